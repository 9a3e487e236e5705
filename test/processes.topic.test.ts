/** A group over several OS processes, one of which is killed at work. */
import { assert, layer } from "@effect/vitest"
import { Effect, Schema } from "effect"
import { Topic } from "../src/index.ts"
import { type Process, spawn } from "../src/testing/Process.ts"
import type { Argument, Event } from "./programs/member.ts"
import { elapsed } from "./support/awake.ts"
import { eventually, realSleep } from "./support/eventually.ts"
import { assertEmpty, freshNamespace, node, TestServer } from "./support/live.ts"
import { deadForgotten, on } from "./support/several.ts"

const lease = 1500
const timing = { lease: `${lease} millis`, margin: "400 millis" } as const
const count = 600

type Work = Extract<Event, { readonly at: number }>

const workOf = (processes: ReadonlyArray<Process<Event>>) =>
  processes.flatMap(({ received }) => received.filter((event): event is Work => "at" in event))

layer(TestServer.layer, { excludeTestServices: true, timeout: "90 seconds" })("a group of processes", (it) => {
  it.effect("takes over what a killed member was working on when its lease ends, and keeps the order of each key", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      yield* Effect.scoped(Effect.gen(function*() {
        const here = yield* node(server.url, { namespace, ...timing })
        yield* Effect.scoped(Effect.gen(function*() {
          const topic = yield* on(
            here,
            Topic.make({ name: "shared", schema: Schema.Number, key: (n) => String(n % 10) })
          )
          yield* Effect.addFinalizer(() => Effect.orDie(topic.purge))
          const start = spawn<Event>(new URL("./programs/member.ts", import.meta.url), {
            argument: { url: server.url, namespace, ...timing, millis: 10 } satisfies Argument
          })
          const members = yield* Effect.all([start, start, start, start], { concurrency: "unbounded" })
          yield* Effect.forEach(members, (member) => member.waitFor(({ event }) => event === "joined"))
          yield* eventually(Effect.map(topic.state, ({ groups }) => assert.strictEqual(groups[0]?.members, 4)))
          yield* topic.publishAll(Array.from({ length: count }, (_, n) => n))
          const killed = members[0]!
          yield* killed.waitFor(({ event }) => event === "handled")
          yield* killed.kill9
          const killedAt = Date.now()
          yield* killed.exit
          const work = () => workOf(members)
          yield* eventually(Effect.sync(() => {
            const done = new Set(work().flatMap(({ event, value }) => event === "handled" ? [value] : []))
            assert.strictEqual(done.size, count)
          }))
          yield* eventually(
            Effect.map(
              topic.state,
              ({ groups: [group] }) => assert.deepStrictEqual([group?.lag, group?.pending], [0, 0])
            )
          )
          // What was taken over, was so in time.
          const again = work().filter(({ attempt, event }) => event === "begun" && attempt > 1)
          assert.isAbove(again.length, 0)
          for (const { at, value } of again) assert.isAtMost(elapsed(killedAt, at), lease + 100, String(value))
          // Of each key, the first handling of every event comes in order, and none begins while another one is at work.
          for (let key = 0; key < 10; key++) {
            const of = work().filter(({ value }) => value % 10 === key).toSorted((x, y) => x.at - y.at)
            const handled = [...new Set(of.filter(({ event }) => event === "handled").map(({ value }) => value))]
            assert.deepStrictEqual(handled, Array.from({ length: count / 10 }, (_, n) => 10 * n + key))
          }
          yield* Effect.forEach(members.slice(1), (member) => member.signal("SIGKILL"))
          yield* Effect.forEach(members, (member) => member.exit)
          yield* eventually(Effect.map(topic.state, ({ groups: [group] }) => assert.strictEqual(group?.members, 0)))
        }))
        yield* deadForgotten(here, namespace, server)
      }))
      yield* assertEmpty(server, namespace)
    }))

  it.effect("brings each event that was confirmed to every group while publishers and members are killed at random", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      const groups = ["a", "b"]
      const seed = Math.floor(Math.random() * 2 ** 31)
      let state = seed
      const random = (below: number) => {
        state = (Math.imul(state, 1_103_515_245) + 12_345) & 0x7fffffff
        return Math.floor(state / 0x7fffffff * below) % below
      }
      yield* Effect.scoped(Effect.gen(function*() {
        const here = yield* node(server.url, { namespace, ...timing })
        yield* Effect.scoped(Effect.gen(function*() {
          const topic = yield* on(here, Topic.make({ name: "shared", schema: Schema.Number }))
          yield* Effect.addFinalizer(() => Effect.orDie(topic.purge))
          const start = (own: Partial<Argument>) =>
            spawn<Event>(new URL("./programs/member.ts", import.meta.url), {
              argument: { url: server.url, namespace, ...timing, millis: 2, ...own } satisfies Argument
            })
          let publishers = 0
          const roles = [
            ...[...groups, ...groups].map((group) => () => ({ group })),
            ...[1, 2].map(() => () => ({ publishes: 1_000_000 * publishers++ }))
          ]
          const all: Array<{ readonly process: Process<Event>; readonly group: string | undefined }> = []
          const begin = (at: number) =>
            Effect.gen(function*() {
              const own: Partial<Argument> = roles[at]!()
              const process = yield* start(own)
              all.push({ process, group: own.group })
              return process
            })
          const alive = yield* Effect.forEach(roles, (_, at) => begin(at), { concurrency: "unbounded" })
          for (let round = 0; round < 6; round++) {
            const at = random(alive.length)
            const victim = alive[at]!
            // Its first events say that it is at work.
            yield* victim.waitFor(({ event }) => event === "handled" || event === "published", {
              timeout: "30 seconds"
            })
            yield* realSleep(random(400))
            yield* victim.kill9
            alive[at] = yield* begin(at)
          }
          for (const publisher of alive.slice(-2)) {
            yield* publisher.waitFor(({ event }) => event === "published", { timeout: "30 seconds" })
            yield* publisher.kill9
            yield* publisher.exit
          }
          const published = all.flatMap(({ process }) =>
            process.received.flatMap((event) => event.event === "published" ? [event.value] : [])
          )
          assert.isAbove(published.length, 100)
          const handledBy = (group: string) => {
            const members = all.flatMap((one) => one.group === group ? [one.process] : [])
            return workOf(members).flatMap(({ event, value }) => event === "handled" ? [value] : [])
          }
          yield* eventually(
            Effect.sync(() => {
              for (const group of groups) {
                const handled = new Set(handledBy(group))
                assert.deepStrictEqual(published.filter((value) => !handled.has(value)), [], group)
              }
            }),
            { timeout: "30 seconds" }
          )
          // An event that was not confirmed may have been stored: one for each publisher that was killed.
          const confirmed = new Set(published)
          for (const group of groups) {
            const others = new Set(handledBy(group).filter((value) => !confirmed.has(value)))
            assert.isAtMost(others.size, publishers, [...others].join())
          }
          yield* Effect.forEach(alive, (one) => one.signal("SIGKILL"))
          yield* Effect.forEach(all, ({ process }) => process.exit)
          yield* eventually(
            Effect.map(
              topic.state,
              ({ groups }) => assert.deepStrictEqual(groups.map(({ members }) => members), [0, 0])
            )
          )
        }))
        yield* deadForgotten(here, namespace, server)
      })).pipe(Effect.tapCause((cause) => Effect.logError(`seed ${seed}`, cause)))
      yield* assertEmpty(server, namespace)
    }))
})
