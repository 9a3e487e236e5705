/**
 * The delays of a job's own schedule between its attempts. A schedule is code, and the job may be attempted by any process, so it is
 * stepped when the job is offered.
 */

import * as Cause from "effect/Cause"
import * as Clock from "effect/Clock"
import type * as Context from "effect/Context"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Option from "effect/Option"
import * as Pull from "effect/Pull"
import * as Schedule from "effect/Schedule"
import { millisOf } from "../hold/place.ts"

// Of one job.
const mostDelays = 64

/** How often a job with a schedule of its own is attempted, if nothing else is said. */
export const mostStepped = mostDelays + 1

// In milliseconds, a century: the attempt behind such a delay never comes.
const longest = 3.2e12

// As `delaysOf` answers them.
const stepped = (schedule: Schedule.Schedule<unknown>, most: number) =>
  Effect.gen(function*() {
    const delays: Array<number> = []
    let at = yield* Clock.currentTimeMillis
    const step = yield* Schedule.toStep(schedule)
    const steps = Effect.gen(function*() {
      while (delays.length < most) {
        const delay = millisOf((yield* step(at, undefined))[1])
        if (delays.length === mostDelays) return true
        delays.push(delay)
        if (delay > longest) return true
        at += delay
      }
      return true
    })
    const goesOn = yield* Pull.catchDone(steps, () => Effect.succeed(false))
    while (goesOn && delays.length > 1 && delays.at(-1) === delays.at(-2)) delays.pop()
    return delays.join(" ") + (goesOn ? "+" : "")
  })

/** In ms, as many as a job with so many attempts can need; with a "+" where the last one is repeated. */
export const delaysOf = (
  schedule: Schedule.Schedule<unknown>,
  attempts: number,
  context: Context.Context<never>
): string => {
  if (!Schedule.isSchedule(schedule)) throw new RangeError("retry must be a Schedule")
  const exit = Effect.runSyncExitWith(context)(stepped(schedule, attempts - 1))
  if (Exit.isSuccess(exit)) return exit.value
  const cause = Cause.squash(exit.cause)
  if (!Cause.isAsyncFiberError(cause)) throw new RangeError("retry could not be stepped", { cause })
  // It would go on.
  cause.fiber.interruptUnsafe()
  throw new RangeError("retry must be a Schedule that is stepped synchronously")
}

/** The delay behind so many attempts, if there is one. */
export const delayBehind = (delays: string, attempts: number): Option.Option<Duration.Duration> => {
  const goesOn = delays.endsWith("+")
  const all = delays.match(/\d+/g) ?? []
  const delay = all[goesOn ? Math.min(attempts, all.length) - 1 : attempts - 1]
  return Option.map(Option.fromUndefinedOr(delay), (delay) => Duration.millis(Number(delay)))
}
