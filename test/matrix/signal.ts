import { assert } from "@effect/vitest"
import { Effect, Fiber } from "effect"
import { Signal } from "../../src/index.ts"
import { eventually } from "../support/eventually.ts"
import { onNode } from "../support/live.ts"
import { insist, leads } from "../support/uncertain.ts"
import type { Program, Rows } from "./matrix.ts"

export const requests = [
  ["signal.set", "signal:jobs"],
  ["signal.await", "signal:jobs"],
  ["signal.consume", "signal:jobs"],
  ["signal.clear", "signal:jobs"],
  ["signal.state", "signal:jobs"],
  ["session.leave", "signal:jobs"]
] as const satisfies Rows

export const program: Program = ({ other }) =>
  Effect.gen(function*() {
    const jobs = yield* Signal.make({ name: "jobs" })
    const theirs = yield* onNode(other)(Signal.make({ name: "jobs" }))
    const waits = (count: number) => eventually(Effect.map(theirs.queued, (waiting) => waiting === count))
    const waiting = yield* Effect.forkChild(jobs.await)
    yield* waits(1)
    yield* theirs.set
    yield* Fiber.join(waiting)
    assert.strictEqual(yield* insist(jobs.pending), 0)
    const interrupted = yield* Effect.forkChild(jobs.await)
    yield* waits(1)
    yield* Fiber.interrupt(interrupted)
    yield* waits(0)
    yield* leads(jobs.setMany(3), undefined, theirs.pending, 3)
    yield* jobs.await
    assert.strictEqual(yield* theirs.pending, 2)
    yield* leads(jobs.clear, 2, theirs.pending, 0)
    assert.isFalse(yield* theirs.isSet)
  })
