/** Handing over a parcel: the giver leaves when a courier has delivered it, and not when one has taken it along. */
import { NodeRuntime } from "@effect/platform-node"
import { Console, Effect, Fiber, Schema } from "effect"
import assert from "node:assert/strict"
import { Rendezvous } from "../src/index.ts" // In your program: from "lockstep"
import { layer } from "./support.ts"

const Parcel = Schema.Struct({ to: Schema.String, sent: Schema.Date })

class Counter extends Rendezvous.Service<Counter>()("counter", { schema: Parcel }) {}

class Swaps extends Rendezvous.Service<Swaps>()("swaps", { schema: Schema.String }) {}

const program = Effect.gen(function*() {
  const counter = yield* Counter
  const log: Array<string> = []

  const courier = (name: string, fine: boolean) =>
    counter.takeWith(({ to }, { attempts }) =>
      Effect.gen(function*() {
        log.push(`${name} goes to ${to}, attempt ${attempts}`)
        if (!fine) return yield* Effect.fail("a flat tyre")
      })
    )

  const giver = yield* Effect.forkChild(
    Effect.tap(counter.give({ to: "Zoe", sent: new Date() }), Effect.sync(() => log.push("the giver leaves")))
  )
  assert.equal(yield* Effect.flip(courier("ann", false)), "a flat tyre")
  // It is back, and the giver still there.
  assert.deepEqual(yield* counter.present, { givers: 1, takers: 0, exchangers: 0 })
  yield* courier("bob", true)
  yield* Fiber.join(giver)
  assert.deepEqual(log, ["ann goes to Zoe, attempt 1", "bob goes to Zoe, attempt 2", "the giver leaves"])

  // Two that meet each other.
  const swaps = yield* Swaps
  const swapped = yield* Effect.all([swaps.exchange("an apple"), swaps.exchange("a pear")], { concurrency: 2 })
  assert.deepEqual(swapped, ["a pear", "an apple"])
  yield* Console.log(`delivered by bob, and swapped ${swapped.join(" for ")}`)
})

program.pipe(
  Effect.provide(Counter.layer),
  Effect.provide(Swaps.layer),
  Effect.provide(layer()),
  NodeRuntime.runMain
)
