/**
 * Time that a limit may count. While the machine stands still, or gives this process no turn, nothing of what is measured
 * goes on either, so that this is no time in which it was late.
 */
import { Duration, Effect } from "effect"
import { realSleep } from "../../src/internal/testing/sleep.ts"

const interval = 20
const stalls: Array<readonly [from: number, to: number]> = []
let last = Date.now()

const look = () => {
  const at = Date.now()
  // A timer that is late by less is as exact as timers are.
  if (at - last > 2 * interval) stalls.push([last + interval, at])
  last = at
}

setInterval(look, interval).unref()

/** Milliseconds between two moments, of `Date.now()`, but for the stalls of this process in between. */
export const elapsed = (from: number, to = Date.now()): number => {
  look()
  return stalls.reduce((sum, [begin, end]) => sum - Math.max(0, Math.min(to, end) - Math.max(from, begin)), to - from)
}

/** Ends when so much time has elapsed. */
export const awake = (duration: Duration.Input): Effect.Effect<void> =>
  Effect.suspend(() => {
    const from = Date.now()
    const wait: Effect.Effect<void> = Effect.suspend(() => {
      const rest = Duration.toMillis(duration) - elapsed(from)
      return rest > 0 ? Effect.andThen(realSleep(rest), wait) : Effect.void
    })
    return wait
  })
