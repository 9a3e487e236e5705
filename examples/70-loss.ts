/** A lease can be lost: here because the process stands still for longer than it lasts, as in a long pause. */
import { NodeRuntime } from "@effect/platform-node"
import { Console, Effect } from "effect"
import assert from "node:assert/strict"
import { Lock } from "../src/index.ts" // In your program: from "lockstep"
import { layer } from "./support.ts"

const standStill = (millis: number) =>
  Effect.sync(() => void Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, millis))

const steps: Array<string> = []
const step = (name: string) => Effect.sync(() => void steps.push(name))

const job = (pause: number) =>
  step("started").pipe(
    Effect.andThen(standStill(pause)),
    // Another process may have the lock now. The lease is looked at before the program goes on, so this does not run.
    Effect.andThen(step("written")),
    Effect.ensuring(step("cleaned up")),
    Lock.withLock("job")
  )

const program = Effect.gen(function*() {
  const outcome = yield* job(1500).pipe(
    Effect.as("done"),
    Effect.catchReason("LockError", "LeaseLost", (lost) => Effect.succeed(`lost: ${lost.reason}`))
  )
  yield* Console.log(`${outcome}; ${steps.join(", ")}`)
  assert.equal(outcome, "lost: expired")
  assert.deepEqual(steps, ["started", "cleaned up"])

  // The coordinator has a new session by itself. Trying again is all there is to do.
  yield* job(0)
  yield* Console.log(`the next time: ${steps.slice(2).join(", ")}`)
  assert.deepEqual(steps.slice(2), ["started", "written", "cleaned up"])
})

// A short lease, so that it does not take long to lose it. The default is 15 seconds.
program.pipe(Effect.provide(layer({ lease: "1 second", margin: "200 millis" })), NodeRuntime.runMain)
