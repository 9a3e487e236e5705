/** A gate lets everybody begin at once, and a latch waits until all have finished, in whatever process they are. */
import { NodeRuntime } from "@effect/platform-node"
import { Console, Effect } from "effect"
import assert from "node:assert/strict"
import { CountDownLatch, Gate } from "../src/index.ts" // In your program: from "lockstep"
import { layer } from "./support.ts"

class Start extends Gate.Service<Start>()("start") {}
class Finished extends CountDownLatch.Service<Finished>()("finished", { count: 3 }) {}

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
  assert.equal(yield* finished.count, 3)

  yield* start.open
  yield* finished.await
  assert.equal(begun, 3)

  // Who comes late passes at once; who has counted already counts for nothing.
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
