/** Workers in a process of their own that is asked to end: once, and then at once. */
import { assert, layer } from "@effect/vitest"
import { Effect, Option } from "effect"
import { Queue } from "../src/index.ts"
import { spawn } from "../src/testing/Process.ts"
import type { Argument, Event } from "./programs/leaver.ts"
import { eventually } from "./support/eventually.ts"
import { TestServer } from "./support/live.ts"
import { make, shows } from "./support/queues.ts"
import { on, several } from "./support/several.ts"

/** Two jobs of each queue: one that runs in the other process, and one that waits. */
const scenario = <A, E>(
  finishes: boolean,
  self: (
    process: Effect.Success<ReturnType<typeof spawn<Event>>>,
    queues: ReadonlyArray<Queue.Queue<number>>
  ) => Effect.Effect<A, E>
) =>
  several(1, ([a], namespace, { url }) =>
    Effect.gen(function*() {
      const queues = yield* Effect.forEach(["one", "two"], (name) => on(a!, make({ name })))
      yield* Effect.forEach(queues, (queue) => queue.offerAll([1, 2]))
      const process = yield* spawn<Event>(new URL("./programs/leaver.ts", import.meta.url), {
        argument: { url, namespace, finishes } satisfies Argument
      })
      yield* eventually(Effect.sync(() => assert.deepStrictEqual(events(process), ["begun", "begun"])), {
        timeout: "20 seconds"
      })
      yield* process.signal("SIGTERM")
      yield* process.waitFor(({ event }) => event === "signal")
      yield* self(process, queues)
    }))

const events = ({ received }: { readonly received: ReadonlyArray<Event> }) => received.map(({ event }) => event)

layer(TestServer.layer, { excludeTestServices: true, timeout: "60 seconds" })("workers that are asked to end", (it) => {
  it.effect("let their handlers finish, and begin no other job", () =>
    scenario(true, (process, queues) =>
      Effect.gen(function*() {
        assert.strictEqual((yield* process.exit).code, 130)
        assert.deepStrictEqual(events(process), ["begun", "begun", "signal", "done", "done"])
        yield* Effect.forEach(queues, (queue) => shows(queue, { completed: 1, active: 0, waiting: 1, workers: 0 }))
      })))

  it.effect("return all jobs at once at the second signal, and that is no attempt", () =>
    scenario(false, (process, queues) =>
      Effect.gen(function*() {
        yield* process.signal("SIGTERM")
        assert.strictEqual((yield* process.exit).code, 130)
        assert.deepStrictEqual(events(process), ["begun", "begun", "signal", "signal", "interrupted", "interrupted"])
        for (const queue of queues) {
          yield* shows(queue, { completed: 0, active: 0, waiting: 2, workers: 0 })
          assert.deepStrictEqual(
            yield* queue.withJob((n) => Effect.map(Queue.Job, ({ attempt, crashes }) => [n, attempt, crashes])),
            Option.some([1, 1, 0])
          )
        }
      })))
})
