/** Taking a lock that one has already, and losing one that was held for too long. */
import { NodeRuntime } from "@effect/platform-node"
import { Console, Effect } from "effect"
import assert from "node:assert/strict"
import { Lock } from "../src/index.ts" // In your program: from "lockstep"
import { layer } from "./support.ts"

const save = Effect.succeed("saved")

const program = Effect.gen(function*() {
  // Waiting for oneself would never end, so it is an error...
  const error = yield* save.pipe(Lock.withLock("document"), Lock.withLock("document"), Effect.flip)
  assert.equal(error._tag === "LockError" && error.reason._tag, "AlreadyHeld")
  yield* Console.log(error.message)

  // ...unless sharing it is what is meant: `save` can be called with the lock and without.
  const saveLocked = save.pipe(Lock.withLock("document", { reentrant: true }))
  assert.equal(yield* saveLocked, "saved")
  assert.equal(yield* saveLocked.pipe(Lock.withLock("document")), "saved")

  // No program keeps it for longer than this: then it is interrupted, its finalizers run, and the next one is granted.
  const result = yield* Effect.sleep("1 hour").pipe(
    Effect.as("slept"),
    Effect.onInterrupt(() => Console.log("interrupted: time to clean up")),
    Lock.withLock("document", { maxHold: "200 millis" }),
    Effect.catchReason("LockError", "LeaseLost", (lost) => Effect.succeed(lost.reason))
  )
  assert.equal(result, "maxHold")
  assert.equal(yield* saveLocked, "saved")
  yield* Console.log("and the lock is free again")
})

program.pipe(Effect.provide(layer()), NodeRuntime.runMain)
