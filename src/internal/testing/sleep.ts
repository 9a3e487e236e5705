/** Sleeps of the testing kit, which a test clock must not stop. */

import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import { live } from "../io.ts"

/** Sleeps in real time, with any clock of the fiber. */
export const realSleep = (duration: Duration.Input): Effect.Effect<void> =>
  Effect.callback<void>((resume) => {
    const timer = live.after(Duration.toMillis(duration), () => resume(Effect.void))
    return Effect.sync(() => timer.cancel())
  })
