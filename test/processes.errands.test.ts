/** Errands over several OS processes, which are killed and stopped while they deliver. */
import { assert, layer } from "@effect/vitest"
import { Effect, Option, Schema, Stream } from "effect"
import { Queue } from "../src/index.ts"
import { innerOf } from "../src/internal/queue/errands.ts"
import { spawn } from "../src/testing/Process.ts"
import type { Argument, Event } from "./programs/errands.ts"
import { eventually } from "./support/eventually.ts"
import { delivered } from "./support/flows.ts"
import { freshNamespace, node, sturdy, TestServer } from "./support/live.ts"
import { on } from "./support/several.ts"

const timing = { lease: "2 seconds", margin: "400 millis" } as const

layer(TestServer.layer, { excludeTestServices: true, timeout: "60 seconds" })("errands of processes", (it) => {
  it.effect("report the end of each job, with one effect, while processes are killed and stopped", () =>
    Effect.scoped(Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      const here = yield* node(server.url, { namespace, ...sturdy })
      const queue = yield* on(here, Queue.make({ name: "shared", payload: Schema.Number }))
      const ends = yield* on(here, Queue.make({ name: "ends", payload: Schema.Json, retention: "1 hour" }))
      const follows = yield* on(here, Queue.make({ name: "follows", payload: Schema.Number, shards: 3 }))
      const start = Effect.gen(function*() {
        const one = yield* spawn<Event>(new URL("./programs/errands.ts", import.meta.url), {
          argument: { url: server.url, namespace, ...timing } satisfies Argument
        })
        yield* one.waitFor(({ event }) => event === "ready")
        return one
      })
      const alive = yield* Effect.all([start, start, start], { concurrency: "unbounded" })
      const told = () => alive.reduce((sum, { received }) => sum + received.length, 0)
      const each = 400
      let count = 0
      for (const how of ["kill9", "stop", "kill9", "kill9"] as const) {
        const before = told()
        for (let n = 0; n < each; n++) {
          const value = count++
          yield* innerOf(queue).offerFor(value, {}, { errands: "watch", reference: `job "${value}"` })
        }
        yield* eventually(Effect.sync(() => assert.isAbove(told(), before)), { message: "errands are delivered" })
        const victim = alive.shift()!
        yield* how === "kill9" ? victim.kill9 : victim.signal("SIGTERM")
        alive.push(yield* start)
      }
      const jobs = Stream.runCollect(ends.jobs({ state: "waiting" }))
      yield* eventually(
        Effect.map(ends.state, ({ waiting }) => assert.strictEqual(waiting, count)),
        { timeout: "30 seconds", message: "all ends are told" }
      )
      const found = new Map((yield* jobs).map(({ payload }) => Option.getOrThrow(payload) as [string, [string]]))
      for (let value = 0; value < count; value++) {
        assert.strictEqual(found.get(`job "${value}"`)?.[0], value % 7 === 0 ? "discarded" : "success", `job ${value}`)
      }
      // Jobs that have succeeded have a follow-up, and one only.
      const expected = Array.from({ length: count }, (_, value) => value).filter((value) => value % 7 !== 0)
      yield* eventually(
        Effect.map(follows.state, ({ waiting }) => assert.strictEqual(waiting, expected.length)),
        { timeout: "20 seconds", message: "all follow-ups are there" }
      )
      const followed = (yield* Stream.runCollect(follows.jobs({ state: "waiting" }))).map(({ payload }) =>
        Option.getOrThrow(payload)
      )
      assert.deepStrictEqual(followed.toSorted((x, y) => x - y), expected)
      // Some fail when they have told it, and are delivered again.
      yield* Effect.provideContext(delivered("watch"), here)
      yield* Effect.forEach(alive, (one) => one.signal("SIGTERM"))
      yield* Effect.forEach(alive, (one) => one.exit)
      // What the errands needed is deleted with the last process that has worked on them.
      yield* eventually(
        Effect.map(server.cli("KEYS", `{${namespace}:*}:errands*watch`), (keys) => assert.strictEqual(keys.trim(), "")),
        { timeout: "20 seconds", message: "nothing is left of the errands" }
      )
      assert.strictEqual((yield* queue.state).active, 0)
    })))
})
