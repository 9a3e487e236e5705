import { assert } from "@effect/vitest"
import { Deferred, Effect, Fiber } from "effect"
import { DoubleBarrier } from "../../src/index.ts"
import { eventually } from "../support/eventually.ts"
import type { Program, Rows } from "./matrix.ts"

export const requests = [
  ["doubleBarrier.join", "doubleBarrier:step"],
  ["doubleBarrier.enter", "doubleBarrier:step"],
  ["doubleBarrier.leave", "doubleBarrier:step"],
  ["doubleBarrier.state", "doubleBarrier:step"],
  ["session.leave", "doubleBarrier:step"]
] as const satisfies Rows

/** What was not answered in time fails; a request may have been executed, and making it again changes nothing then. */
const insisting = <A, R>(self: Effect.Effect<A, DoubleBarrier.DoubleBarrierError, R>) =>
  Effect.retry(self, { while: ({ reason }) => reason._tag === "Timeout", times: 2 })

export const program: Program = ({ line, other }) =>
  Effect.gen(function*() {
    const barrier = yield* insisting(DoubleBarrier.make({ name: "step", parties: 2 }))
    const same = yield* Effect.provideContext(DoubleBarrier.make({ name: "step", parties: 2 }), other)

    const entering = yield* Effect.forkChild(barrier.enter())
    yield* eventually(Effect.map(insisting(barrier.queued), (waiting) => waiting === 1))
    // A new connection asks what it missed.
    yield* line.closeAll
    const theirs = yield* same.enter()
    const mine = yield* Fiber.join(entering)
    assert.deepStrictEqual([mine.number, theirs.number], [1, 1])
    assert.strictEqual(mine.token, theirs.token)

    const leaving = yield* Effect.forkChild(barrier.leave(mine))
    yield* eventually(Effect.map(insisting(barrier.inside), (inside) => inside === 1))
    assert.isUndefined(leaving.pollUnsafe())
    yield* same.leave(theirs)
    yield* Fiber.join(leaving)
    assert.strictEqual(yield* same.inside, 0)

    // Each of them is inside until the other is.
    const [here, there] = [yield* Deferred.make<void>(), yield* Deferred.make<void>()]
    const meeting = (mine: Deferred.Deferred<void>, theirs: Deferred.Deferred<void>) =>
      Effect.andThen(Deferred.succeed(mine, undefined), Deferred.await(theirs))
    yield* Effect.all(
      [same.withPhase(meeting(here, there)), barrier.withPhase(meeting(there, here))],
      { concurrency: "unbounded" }
    )
    assert.strictEqual(yield* same.inside, 0)
  })
