/** Many want to change the same thing, and each reads it first: without a lock, changes would be lost. */
import { NodeRuntime } from "@effect/platform-node"
import { Console, Effect } from "effect"
import assert from "node:assert/strict"
import { Lock } from "../src/index.ts" // In your program: from "lockstep"
import { layer } from "./support.ts"

let stock = 100

const sell = Effect.gen(function*() {
  const before = stock
  yield* Effect.sleep("1 millis")
  stock = before - 1
})

const program = Effect.gen(function*() {
  yield* Effect.all(Array.from({ length: 20 }, () => sell), { concurrency: "unbounded" })
  yield* Console.log(`without a lock, 20 sales leave ${stock} of 100`)

  stock = 100
  const locked = sell.pipe(Lock.withLock("stock"))
  yield* Effect.all(Array.from({ length: 20 }, () => locked), { concurrency: "unbounded" })
  yield* Console.log(`with a lock, 20 sales leave ${stock} of 100`)
  assert.equal(stock, 80)

  // Who would rather do something else than wait for long.
  yield* Effect.scoped(Effect.gen(function*() {
    yield* Effect.forkScoped(Effect.never.pipe(Lock.withLock("stock")), { startImmediately: true })
    const late = yield* sell.pipe(
      Lock.withLock("stock", { wait: "50 millis" }),
      Effect.as("sold"),
      Effect.catchReason("LockError", "WaitTimeout", () => Effect.succeed("another process is at it"))
    )
    yield* Console.log(late)
    assert.equal(late, "another process is at it")
  }))
})

program.pipe(Effect.provide(layer()), NodeRuntime.runMain)
