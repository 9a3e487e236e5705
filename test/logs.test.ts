/** What log lines are about: each names the kind, the name and the namespace. */
import { assert, layer } from "@effect/vitest"
import { Deferred, Effect, Logger, References, Schedule, Schema } from "effect"
import { Queue, Topic } from "../src/index.ts"
import { eventually } from "./support/eventually.ts"
import { TestServer, withNode } from "./support/live.ts"

layer(TestServer.layer, { excludeTestServices: true })("log lines", (it) => {
  it.effect("of jobs and events that are handled again name their queue and topic", () =>
    Effect.suspend(() => {
      const lines: Array<string> = []
      const logger = Logger.make(({ message }) => void lines.push(String(message)))
      const has = (pattern: RegExp) => eventually(Effect.sync(() => assert.match(lines.join("\n"), pattern)))
      return withNode((namespace) =>
        Effect.gen(function*() {
          const retry = Schedule.spaced("10 millis")
          const queue = yield* Queue.make({ name: "a", payload: Schema.Number, retention: "100 millis" })
          const topic = yield* Topic.make({ name: "b", schema: Schema.Number })
          yield* Effect.addFinalizer(() => Effect.orDie(topic.purge))
          const failing = Effect.fn(function*(done: Deferred.Deferred<void>, attempts: { count: number }) {
            if (attempts.count++ === 0) return yield* Effect.fail("not yet")
            yield* Deferred.succeed(done, undefined)
          })
          for (const running of ["queue", "topic"] as const) {
            const done = yield* Deferred.make<void>()
            const attempts = { count: 0 }
            const run = running === "queue"
              ? queue.run(() => failing(done, attempts), { retry })
              : topic.run(() => failing(done, attempts), { group: "g", from: "beginning", retry })
            yield* Effect.forkScoped(run)
            yield* running === "queue" ? queue.offer(1) : topic.publish(1)
            yield* Deferred.await(done)
          }
          yield* has(new RegExp(`^job \\S+ of queue "a" of namespace "${namespace}" is attempted again`, "m"))
          yield* has(new RegExp(`^event \\S+ of topic "b" of namespace "${namespace}" is handled again`, "m"))
        })
      ).pipe(Effect.provide(Logger.layer([logger])), Effect.provideService(References.MinimumLogLevel, "Debug"))
    }))
})
