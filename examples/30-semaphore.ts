/** A pool of permits that all processes share, as a service; its size can be changed while it is in use. */
import { NodeRuntime } from "@effect/platform-node"
import { Console, Effect } from "effect"
import assert from "node:assert/strict"
import { Semaphore } from "../src/index.ts" // In your program: from "lockstep"
import { layer } from "./support.ts"

class Printers extends Semaphore.Service<Printers>()("printers", { permits: 2 }) {}

let [printing, most] = [0, 0]

const print = Effect.gen(function*() {
  most = Math.max(most, ++printing)
  yield* Effect.sleep("20 millis")
  printing--
})

const printTen = Effect.gen(function*() {
  const printers = yield* Printers
  most = 0
  yield* Effect.all(Array.from({ length: 10 }, () => printers.withPermit(print)), { concurrency: "unbounded" })
  yield* Console.log(`ten were printed, at most ${most} at a time`)
  return most
})

const program = Effect.gen(function*() {
  assert.equal(yield* printTen, 2)

  // Another process need not know how many there are.
  const attached = yield* Semaphore.attach({ name: "printers" })
  yield* attached.resize(5)
  assert.equal(yield* printTen, 5)

  // A poster takes three at once; a letter that needs one now still gets it.
  const letter = yield* attached.withPermitsIfAvailable(1)(Effect.succeed("a letter")).pipe(attached.withPermits(3))
  assert.equal(letter._tag, "Some")
  assert.equal(yield* attached.available, 5)
}).pipe(Effect.scoped)

program.pipe(Effect.provide(Printers.layer), Effect.provide(layer()), NodeRuntime.runMain)
