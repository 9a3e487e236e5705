import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import { live } from "../io.ts"

/** Sleeps in real time, whatever clock the fiber has. */
export const realSleep = (duration: Duration.Input): Effect.Effect<void> =>
  Effect.callback<void>((resume) => {
    const timer = live.after(Duration.toMillis(duration), () => resume(Effect.void))
    return Effect.sync(() => timer.cancel())
  })
