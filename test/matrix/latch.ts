import { assert } from "@effect/vitest"
import { Effect, Fiber } from "effect"
import { CountDownLatch, Latch } from "../../src/index.ts"
import { onNode } from "../support/live.ts"
import { insist, leads } from "../support/uncertain.ts"
import type { Program, Rows } from "./matrix.ts"

export const requests = [
  ["latch.join", "countDownLatch:ready"],
  ["latch.count", "countDownLatch:ready"],
  ["latch.count", "countDownLatch-items:ready"],
  ["latch.state", "countDownLatch:ready"],
  ["latch.reset", "countDownLatch:ready"],
  ["session.leave", "countDownLatch:ready"],
  ["latch.join", "latch:start"],
  ["latch.open", "latch:start"],
  ["latch.release", "latch:start"],
  ["latch.reset", "latch:start"],
  ["session.leave", "latch:start"]
] as const satisfies Rows

export const program: Program = ({ other }) =>
  Effect.gen(function*() {
    const options = { name: "ready", count: 2, timeToLive: "100 millis" } as const
    const latch = yield* insist(CountDownLatch.make(options))
    const same = yield* onNode(other)(CountDownLatch.make(options))
    const passing = yield* Effect.forkChild(same.await)
    yield* leads(latch.countDown(), 1, same.remaining, 1)
    assert.strictEqual(yield* insist(latch.remaining), 1)
    yield* leads(latch.countDown({ id: "x" }), 0, same.remaining, 0)
    yield* Fiber.join(passing)
    yield* leads(latch.reset, undefined, same.remaining, 2)
    assert.strictEqual(yield* same.countDown(), 1)

    const start = yield* insist(Latch.make({ name: "start", timeToLive: "100 millis" }))
    const theirs = yield* onNode(other)(Latch.make({ name: "start", timeToLive: "100 millis" }))
    const released = yield* Effect.forkChild(theirs.await)
    yield* Effect.yieldNow
    yield* leads(start.release, true, theirs.isOpen, false)
    yield* Fiber.join(released)
    yield* leads(start.open, true, theirs.isOpen, true)
    yield* theirs.await
    yield* leads(start.close, true, theirs.isOpen, false)
    assert.isTrue(yield* theirs.open)
  })
