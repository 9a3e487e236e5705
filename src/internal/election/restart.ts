/** When what has failed is run again. */

import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Schedule from "effect/Schedule"

const shortest = 1000
const longest = 60_000

/** Twice as long after each failure; from the shortest on again when the last one was long ago. */
export const restart: Schedule.Schedule<void> = Schedule.fromStepWithMetadata(Effect.sync(() => {
  let delay = 0
  return ({ elapsedSincePrevious }) => {
    // The time that it had to wait after the last failure is in this, too.
    if (elapsedSincePrevious > 2 * longest) delay = 0
    delay = Math.min(longest, Math.max(shortest, 2 * delay))
    return Effect.succeed([undefined, Duration.millis(delay)])
  }
}))
