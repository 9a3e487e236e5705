/**
 * Every request, with every fault on its way: it settles in time, and executing it twice equals executing it once. No data
 * is lost here, so the state after each has to be exact.
 */
import { assert, layer } from "@effect/vitest"
import { Effect } from "effect"
import type { Requests } from "../src/internal/actor/lua.ts"
import { make as proxy, type Verdict } from "../src/testing/Proxy.ts"
import * as barrier from "./matrix/barrier.ts"
import * as doubleBarrier from "./matrix/doubleBarrier.ts"
import * as election from "./matrix/election.ts"
import * as held from "./matrix/held.ts"
import * as latch from "./matrix/latch.ts"
import * as queue from "./matrix/queue.ts"
import * as queueGroups from "./matrix/queueGroups.ts"
import * as queueJobs from "./matrix/queueJobs.ts"
import * as queueLimits from "./matrix/queueLimits.ts"
import * as queueLists from "./matrix/queueLists.ts"
import * as queueNotes from "./matrix/queueNotes.ts"
import * as queueShards from "./matrix/queueShards.ts"
import * as ref from "./matrix/ref.ts"
import * as rendezvous from "./matrix/rendezvous.ts"
import * as shards from "./matrix/shards.ts"
import * as signal from "./matrix/signal.ts"
import * as singleton from "./matrix/singleton.ts"
import * as tasks from "./matrix/tasks.ts"
import * as topic from "./matrix/topic.ts"
import { assertEmpty, freshNamespace, node, TestServer } from "./support/live.ts"
import { asks, within } from "./support/requests.ts"

const programs = {
  held,
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
  queueGroups,
  queueJobs,
  queueLimits,
  queueLists,
  queueNotes,
  queueShards
}

type Missing = Exclude<keyof Requests, typeof programs[keyof typeof programs]["requests"][number][0]>

// A new request belongs into one of the programs.
const complete: [Missing] extends [never] ? true : Missing = true

// The coordinator does not wait for these for longer than a request may take; then the lease ends it.
const closing = new Set<string>(["session.end", "session.owned", "session.reap"])

layer(TestServer.layer, { excludeTestServices: true, timeout: "60 seconds" })("a request", (it) => {
  for (const verdict of ["dropReply", "drop", "duplicate", "blackhole", "blackholeReply"] satisfies Array<Verdict>) {
    for (const [name, { program, requests }] of Object.entries(programs)) {
      it.effect(`is executed exactly once, and settled in time: ${name}, ${verdict}`, () =>
        Effect.gen(function*() {
          assert.isTrue(complete)
          const server = yield* TestServer
          yield* Effect.forEach(requests, ([verb, key]) =>
            Effect.scoped(Effect.gen(function*() {
              const namespace = freshNamespace()
              const line = yield* proxy(server)
              const met = yield* line.once(asks(verb, key), verdict)
              const settings = { namespace, partitions: 2, lease: "4 seconds", margin: "500 millis" } as const
              const run = Effect.gen(function*() {
                const other = yield* node(server.url, settings)
                const mine = yield* node(line.url, { ...settings, requestTimeout: "1 second" })
                const world = { server, namespace, line, mine, other }
                yield* Effect.scoped(program(world)).pipe(Effect.provideContext(mine))
              }).pipe(Effect.scoped)
              // A request that got no answer is given up after a second; nothing here waits for the end of a lease.
              yield* within(run, 15_000, "all requests").pipe(
                Effect.catchCause((cause) => Effect.die(new Error(`${verb} ${key}`, { cause })))
              )
              yield* within(met, 100, `${verb} ${key} was sent`)
              if (!verdict.startsWith("blackhole") || !closing.has(verb)) yield* assertEmpty(server, namespace)
            })), { concurrency: 4 })
        }))
    }
  }
})
