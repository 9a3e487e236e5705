/** Questions while faults are on their way: they fail when their answer is late, and may be executed all the same. */
import { assert } from "@effect/vitest"
import { Effect } from "effect"
import { eventually } from "./eventually.ts"

interface Failure {
  readonly reason: { readonly _tag: string }
}

const away = new Set(["Timeout", "ConnectionLost", "NotConnected", "Unavailable"])

/** Asks something that changes nothing, or that may be asked twice, until it has an answer. */
export const insist = <A, E extends Failure, R>(question: Effect.Effect<A, E, R>): Effect.Effect<A, E, R> =>
  Effect.retry(question, { while: ({ reason }) => away.has(reason._tag), times: 10 })

/**
 * Asks for a change. Whether its answer was late or not, the change leads to this state, and nowhere else. It is asked for once
 * more if it was given up before it was sent, since the request before it had no answer.
 */
export const leads = <A, E extends Failure, B, E2>(
  change: Effect.Effect<A, E>,
  expected: A,
  state: Effect.Effect<B, E2>,
  to: B,
  again = true
): Effect.Effect<void, unknown> =>
  Effect.gen(function*() {
    const answer = yield* Effect.match(change, {
      onFailure: ({ reason }) => ({ failed: reason._tag }),
      onSuccess: (value) => ({ value })
    })
    const reached = Effect.map(state, (now) => assert.strictEqual(now, to))
    if ("failed" in answer) {
      assert.strictEqual(answer.failed, "Timeout")
      return yield* again
        ? Effect.catchCause(eventually(reached, { timeout: "4 seconds" }), () =>
          leads(change, expected, state, to, false))
        : eventually(reached)
    }
    assert.strictEqual(answer.value, expected)
    yield* reached
  })
