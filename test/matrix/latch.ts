import { assert } from "@effect/vitest"
import { Effect, Fiber } from "effect"
import { CountDownLatch } from "../../src/index.ts"
import type { Program, Rows } from "./matrix.ts"

export const requests = [
  ["latch.join", "latch:ready"],
  ["latch.count", "latch:ready"],
  ["latch.state", "latch:ready"],
  ["latch.reset", "latch:ready"],
  ["session.leave", "latch:ready"]
] as const satisfies Rows

export const program: Program = ({ other }) =>
  Effect.gen(function*() {
    const latch = yield* CountDownLatch.make({ name: "ready", count: 2, keep: "100 millis" })
    const same = yield* Effect.provideContext(
      CountDownLatch.make({ name: "ready", count: 2, keep: "100 millis" }),
      other
    )
    const passing = yield* Effect.forkChild(same.await)
    assert.strictEqual(yield* latch.countDown(), 1)
    assert.strictEqual(yield* latch.count, 1)
    assert.strictEqual(yield* latch.countDown(), 0)
    yield* Fiber.join(passing)
    yield* latch.reset
    assert.strictEqual(yield* same.count, 2)
    assert.strictEqual(yield* same.countDown(), 1)
  })
