/** Workers sleep until there is something to do: each signal wakes one of them, in whatever process it is. */
import { NodeRuntime } from "@effect/platform-node"
import { Console, Effect, Fiber, Option } from "effect"
import assert from "node:assert/strict"
import { Signal } from "../src/index.ts" // In your program: from "lockstep"
import { layer } from "./support.ts"

class Work extends Signal.Service<Work>()("work") {}

const woken: Array<string> = []

const worker = (name: string) =>
  Effect.gen(function*() {
    const work = yield* Work
    yield* work.await
    woken.push(name)
  })

const program = Effect.gen(function*() {
  const work = yield* Work
  const workers: Array<Fiber.Fiber<void, Signal.SignalError>> = []
  for (const name of ["ann", "bob", "cy"]) {
    workers.push(yield* Effect.forkChild(worker(name)))
    while ((yield* work.queued) < workers.length) yield* Effect.yieldNow
  }

  // The worker that has waited longest is first. One that gives up takes no signal with it.
  yield* work.set
  yield* Fiber.join(workers[0]!)
  yield* Fiber.interrupt(workers[1]!)
  yield* work.set
  yield* Fiber.join(workers[2]!)
  assert.deepEqual(woken, ["ann", "cy"])

  // Without a waiter, signals are kept.
  yield* work.setMany(2)
  assert.equal(yield* work.pending, 2)
  yield* work.await
  assert.equal(yield* work.clear, 1)
  assert.ok(Option.isNone(yield* Effect.timeoutOption(work.await, "50 millis")))
  yield* Console.log(`woken: ${woken.join(", ")}`)
})

program.pipe(
  Effect.provide(Work.layer),
  Effect.provide(layer()),
  NodeRuntime.runMain
)
