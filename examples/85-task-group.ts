/** Three workers share a job of six shards. One of them ends in the middle; another one takes over what it has left. */
import { NodeRuntime } from "@effect/platform-node"
import { Console, Effect, Fiber, Schema, Stream } from "effect"
import assert from "node:assert/strict"
import { TaskGroup } from "../src/index.ts" // In your program: from "lockstep"
import { layer } from "./support.ts"

class Sums extends TaskGroup.Service<Sums>()("sums", { result: Schema.Number, shards: 6 }) {}

const shards = ["0", "1", "2", "3", "4", "5"]

// From 0 to 99, from 100 to 199, ...
const sum = (shard: string) =>
  Effect.as(
    Effect.sleep("10 millis"),
    Array.from({ length: 100 }, (_, n) => Number(shard) * 100 + n).reduce((a, b) => a + b)
  )

const program = Effect.gen(function*() {
  const sums = yield* Sums

  const impatient = yield* Effect.forkScoped(sums.awaitAll())
  const patient = yield* Effect.forkScoped(sums.awaitAll({ onWorkerLost: "wait" }))
  const shown = yield* Effect.forkScoped(
    Stream.runCollect(Stream.takeUntil(sums.changes, ({ done }) => done === 6))
  )

  // Each shard has one worker, whichever process asks for it; a process that asks for one that is done is given its result.
  const dying = yield* Effect.forkScoped(sums.run("5", Effect.never))
  yield* Effect.forEach(
    ["ann", "bob", "cy"],
    () =>
      Effect.forEach(
        shards,
        (shard) => Effect.catchReason(sums.run(shard, sum(shard)), "TaskGroupError", "ShardTaken", () => Effect.void),
        { discard: true }
      ),
    {
      concurrency: "unbounded",
      discard: true
    }
  )
  assert.equal((yield* sums.snapshot).done, 5)

  yield* Fiber.interrupt(dying)
  const lost = yield* Effect.flip(Fiber.join(impatient))
  assert.equal(lost.reason._tag, "WorkerLost")
  yield* sums.run("5", sum("5"))

  const results = yield* Fiber.join(patient)
  const total = [...results.values()].reduce((a, b) => a + b)
  assert.equal(total, 600 * 599 / 2)
  const changes = (yield* Fiber.join(shown)).flatMap(({ changed }) => changed ?? [])
  assert.deepEqual(changes.filter(({ shard }) => shard === "5").map(({ status }) => status), [
    "running",
    "lost",
    "running",
    "done"
  ])
  yield* Console.log(`${results.size} shards, ${total} in all, and one of them by its second worker`)
}).pipe(Effect.scoped)

program.pipe(
  Effect.provide(Sums.layer),
  Effect.provide(layer()),
  NodeRuntime.runMain
)
