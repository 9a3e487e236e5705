/** A group over several OS processes, one of which is killed at work. */
import { assert, layer } from "@effect/vitest"
import { Effect, Schema } from "effect"
import { Topic } from "../src/index.ts"
import { spawn } from "../src/testing/Process.ts"
import type { Argument, Event } from "./programs/member.ts"
import { elapsed } from "./support/awake.ts"
import { eventually } from "./support/eventually.ts"
import { assertEmpty, freshNamespace, node, TestServer } from "./support/live.ts"
import { deadForgotten, on } from "./support/several.ts"

const lease = 1500
const timing = { lease: `${lease} millis`, margin: "400 millis" } as const
const count = 600

type Work = Extract<Event, { readonly value: number }>

layer(TestServer.layer, { excludeTestServices: true, timeout: "60 seconds" })("a group of processes", (it) => {
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
          const work = () =>
            members.flatMap(({ received }) => received.filter((event): event is Work => event.event !== "joined"))
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
})
