/** What is tried again while Redis is away. */
import { assert, it } from "@effect/vitest"
import { Effect } from "effect"
import { Lock } from "../src/index.ts"
import { Timeout } from "../src/internal/redis/errors.ts"
import { persevering, untilBack } from "../src/internal/work/patience.ts"
import { promptly } from "./support/several.ts"

/** Redis is away the first time. */
const awayOnce = Effect.sync(() => {
  let attempts = 0
  return Effect.suspend(() =>
    ++attempts === 1
      ? Effect.fail(new Lock.LockError({ reason: new Timeout({ command: "FCALL" }) }))
      : Effect.succeed(attempts)
  )
})

it.effect("is tried again in real time, also under a TestClock", () =>
  Effect.gen(function*() {
    assert.strictEqual(yield* promptly(untilBack(yield* awayOnce, "100 millis"), "a question"), 2)
    assert.strictEqual(yield* promptly(persevering(yield* awayOnce, () => Effect.void), "a worker"), 2)
  }))
