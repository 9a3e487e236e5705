/** A latch lets all begin at once, and a countdown latch waits until all have finished, in whatever process they are. */
import { NodeRuntime } from "@effect/platform-node"
import { Console, Effect } from "effect"
import assert from "node:assert/strict"
import { randomUUID } from "node:crypto"
import { CountDownLatch, Latch } from "../src/index.ts" // In your program: from "lockstep"
import { layer } from "./support.ts"

// The state outlives the program: each run has its own.
const run = randomUUID()

class Start extends Latch.Service<Start>()("start", { run }) {}
class Finished extends CountDownLatch.Service<Finished>()("finished", { count: 3, run }) {}

let begun = 0

const runner = (name: string) =>
  Effect.gen(function*() {
    const start = yield* Start
    const finished = yield* Finished
    yield* start.await
    begun++
    // With an id it counts once, also if this runner is started again after a crash.
    yield* finished.countDown({ id: name })
  })

const program = Effect.gen(function*() {
  const start = yield* Start
  const finished = yield* Finished
  yield* Effect.forEach(["ann", "bob", "cy"], (name) => Effect.forkScoped(runner(name)))

  yield* Effect.sleep("20 millis")
  assert.equal(begun, 0)
  assert.equal(yield* finished.remaining, 3)

  assert.equal(yield* start.open, true)
  yield* finished.await
  assert.equal(begun, 3)

  // A waiter that comes late passes at once, and an id that was counted counts for nothing.
  yield* finished.await
  assert.equal(yield* finished.countDown({ id: "ann" }), 0)
  yield* Console.log(`${begun} have begun, and all have finished`)
}).pipe(Effect.scoped)

program.pipe(
  Effect.provide(Start.layer),
  Effect.provide(Finished.layer),
  Effect.provide(layer()),
  NodeRuntime.runMain
)
