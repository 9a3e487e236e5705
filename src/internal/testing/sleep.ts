import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"

// Taken at import, so that neither a `TestClock` nor a test runner's fake timers can stop it.
const { clearTimeout, setTimeout } = globalThis

/** Sleeps in real time, whatever clock the fiber has. */
export const realSleep = (duration: Duration.Input): Effect.Effect<void> =>
  Effect.callback<void>((resume) => {
    const timer = setTimeout(() => resume(Effect.void), Duration.toMillis(duration))
    return Effect.sync(() => clearTimeout(timer))
  })
