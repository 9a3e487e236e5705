/**
 * Every request, with every fault on its way: it settles in time, and executing it twice equals executing it once. No data
 * is lost here, so the state after each has to be exact.
 */
import { assert, layer } from "@effect/vitest"
import { Effect, Exit, Option } from "effect"
import type { Requests } from "../../src/internal/actor/lua.ts"
import { make as proxy, type Verdict } from "../../src/testing/Proxy.ts"
import { assertEmpty, freshNamespace, node, TestServer } from "../support/live.ts"
import { asks, within } from "../support/requests.ts"
import * as barrier from "./barrier.ts"
import * as crowd from "./crowd.ts"
import * as doubleBarrier from "./doubleBarrier.ts"
import * as election from "./election.ts"
import * as flow from "./flow.ts"
import * as held from "./held.ts"
import * as latch from "./latch.ts"
import * as queue from "./queue.ts"
import * as queueAfter from "./queueAfter.ts"
import * as queueErrands from "./queueErrands.ts"
import * as queueFollowUps from "./queueFollowUps.ts"
import * as queueGroups from "./queueGroups.ts"
import * as queueJobs from "./queueJobs.ts"
import * as queueLimits from "./queueLimits.ts"
import * as queueLists from "./queueLists.ts"
import * as queueNotes from "./queueNotes.ts"
import * as queueShards from "./queueShards.ts"
import * as ref from "./ref.ts"
import * as rendezvous from "./rendezvous.ts"
import * as shards from "./shards.ts"
import * as signal from "./signal.ts"
import * as singleton from "./singleton.ts"
import * as tasks from "./tasks.ts"
import * as topic from "./topic.ts"
import * as workStealing from "./workStealing.ts"

const programs = {
  held,
  crowd,
  latch,
  election,
  singleton,
  barrier,
  doubleBarrier,
  tasks,
  signal,
  rendezvous,
  topic,
  shards,
  ref,
  queue,
  queueAfter,
  queueErrands,
  queueFollowUps,
  queueGroups,
  queueJobs,
  queueLimits,
  queueLists,
  queueNotes,
  queueShards,
  flow,
  workStealing
}

type Missing = Exclude<keyof Requests, typeof programs[keyof typeof programs]["requests"][number][0]>

// A new request belongs into one of the programs.
const complete: [Missing] extends [never] ? true : Missing = true

// The coordinator does not wait for these for longer than a request may take; then the lease ends it. No program waits for
// an alarm, so the connection that swallows its reply may be the one that the coordinator closes with.
const closing = new Set<string>(["session.end", "session.owned", "session.reap", "alarm.ring"])

/** The tests of all requests with one fault. Each fault has a file of its own, so that they run side by side. */
export const executed = (verdict: Verdict): void =>
  layer(TestServer.layer, { excludeTestServices: true, timeout: "60 seconds" })("a request", (it) => {
    for (const [name, { program, requests }] of Object.entries(programs)) {
      it.effect(`is executed exactly once, and settled in time: ${name}, ${verdict}`, () =>
        Effect.gen(function*() {
          assert.isTrue(complete)
          const server = yield* TestServer
          // This run answers whether the request was sent, and whether its coordinators have left anything behind.
          const suffered = (verb: string, key: string) =>
            Effect.scoped(Effect.gen(function*() {
              const namespace = freshNamespace()
              const line = yield* proxy(server)
              const met = yield* line.once(asks(verb, key), verdict)
              const settings = { namespace, partitions: 2, lease: "4 seconds", margin: "500 millis" } as const
              const run = Effect.gen(function*() {
                const other = yield* node(server.url, settings)
                // Where the connection breaks, a busy machine needs a while for the next one before the coordinator is closed.
                const requestTimeout = verdict.startsWith("blackhole") ? "1 second" : "1300 millis"
                const mine = yield* node(line.url, { ...settings, requestTimeout })
                const world = { server, namespace, line, mine, other }
                yield* Effect.scoped(program(world)).pipe(Effect.provideContext(mine))
              }).pipe(Effect.scoped)
              // A request that got no answer is given up after a second; nothing here waits for the end of a lease.
              yield* within(run, 30_000, "all requests").pipe(
                Effect.catchCause((cause) => Effect.die(new Error(`${verb} ${key}`, { cause })))
              )
              const sent = Option.isSome(yield* Effect.timeoutOption(met, 100))
              const isLeft = sent && (!verdict.startsWith("blackhole") || !closing.has(verb))
              const left = isLeft ? yield* Effect.exit(assertEmpty(server, namespace)) : Exit.void
              return { sent, left }
            }))
          yield* Effect.forEach(requests, ([verb, key]) =>
            Effect.gen(function*() {
              // On a busy machine, a coordinator that closes may not come so far in time: its sessions are left then, too.
              const { left, sent } = yield* Effect.repeat(suffered(verb, key), {
                until: ({ left, sent }) => Exit.isSuccess(left) && (sent || !closing.has(verb)),
                times: 2
              })
              assert.isTrue(sent, `${verb} ${key} was not sent`)
              yield* left
            }), { concurrency: 6 })
        }), 120_000)
    }
  })
