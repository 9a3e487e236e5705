/** Three workers compute in phases and exchange what they have, in whatever process they are. */
import { NodeRuntime } from "@effect/platform-node"
import { Console, Effect, Fiber, Schema } from "effect"
import assert from "node:assert/strict"
import { Barrier, DoubleBarrier } from "../src/index.ts" // In your program: from "lockstep"
import { layer } from "./support.ts"

const totals: Array<number> = []

// Run by one of the three, before any of them goes on.
class Sums extends Barrier.Service<Sums>()("sums", {
  parties: 3,
  schema: Schema.Number,
  action: ({ contributions }) => Effect.sync(() => totals.push(contributions.reduce((total, one) => total + one, 0)))
}) {}
class Phase extends DoubleBarrier.Service<Phase>()("phase", { parties: 3 }) {}

let computing = 0

const worker = Effect.fnUntraced(function*(share: number) {
  const sums = yield* Sums
  const phase = yield* Phase
  let mine = share
  for (let round = 1; round <= 3; round++) {
    // All parties begin together, and none goes on before all have finished.
    yield* phase.withPhase(Effect.gen(function*() {
      computing++
      yield* Effect.sleep(5 * share)
      computing--
    }))
    assert.equal(computing, 0)
    const { contributions, generation } = yield* sums.await(mine)
    assert.equal(generation, round)
    mine = Math.max(...contributions) + share
  }
  return mine
})

const program = Effect.gen(function*() {
  const shares = yield* Effect.forEach([1, 2, 3], worker, { concurrency: "unbounded" })
  assert.deepEqual(shares, [10, 11, 12])

  // Who gives up breaks the generation for those who wait with it, and the next one begins.
  const sums = yield* Sums
  const waiting = yield* Effect.forkChild(Effect.flip(sums.await(1)))
  yield* sums.await(2).pipe(Effect.timeoutOption("20 millis"))
  const { reason } = yield* Fiber.join(waiting)
  assert(reason._tag === "BarrierBroken")
  const { generation, missing, why } = reason
  yield* Console.log(`${totals.join(", ")}; and then: generation ${generation} broken (${why}), ${missing} missing`)
})

program.pipe(
  Effect.provide(Sums.layer),
  Effect.provide(Phase.layer),
  Effect.provide(layer()),
  NodeRuntime.runMain
)
