/** When the ticks of a schedule are due. All times are in milliseconds of the clock. */

import * as Clock from "effect/Clock"
import type * as Context from "effect/Context"
import * as Cron from "effect/Cron"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Pull from "effect/Pull"
import * as Schedule from "effect/Schedule"
import { monotonicOf } from "../io.ts"

/** What to do with ticks that were due while no process ran them: leave them out, or make up for them by one run. */
export type Missed = "skip" | "once"

export interface Tick {
  /** The next tick. It is before now if it was missed, and is to be made up for. */
  readonly due: number
  /** How long after a tick the next one comes, as far as that is known. */
  readonly following: (due: number) => number
}

export interface Times {
  /** `mine` says that the last tick was this process's own. Answers undefined when no tick follows. */
  readonly next: (last: number | undefined, now: number, mine: boolean) => Effect.Effect<Tick | undefined>
  /** Waits until a tick is due. Answers false when the clock was set past it: the tick is missed. */
  readonly wait: (due: number, now: number) => Effect.Effect<boolean>
}

// A clock that was set is noticed so soon: a sleep does not end earlier for it. A tick that is far away is waited for in fewer
// parts, or else a test that adjusts its clock by a week would wake the process a hundred thousand times.
const pauseFor = (left: number) => Math.min(left, 60_000, Math.max(5000, left / 60))

// A tick that the clock was set past by less is due, not missed: time servers set clocks by less than that all the time.
const tolerance = 1000

const reach = (due: number): Effect.Effect<boolean> =>
  Effect.clockWith((clock) =>
    Effect.gen(function*() {
      for (let now = clock.currentTimeMillisUnsafe(); now < due;) {
        const pause = pauseFor(due - now)
        const began = monotonicOf(clock)
        yield* clock.sleep(Duration.millis(pause))
        // A busy process wakes late too. Its tick is due.
        const late = Math.max(0, monotonicOf(clock) - began - pause)
        now = clock.currentTimeMillisUnsafe()
        if (now - late - due > tolerance) return false
      }
      return true
    })
  )

// Behind the last tick by any clock, or else a tick would run twice when the clock is set back. A tick of this very millisecond
// is not missed.
const behind = (last: number | undefined, now: number, missed: Missed) => {
  if (last === undefined) return now
  return missed === "once" ? last : Math.max(now - 1, last)
}

export const ofCron = (cron: Cron.Cron, missed: Missed): Times => {
  const after = (millis: number) => Cron.next(cron, new Date(millis)).getTime()
  return {
    next: (last, now) =>
      Effect.sync(() => ({ due: after(behind(last, now, missed)), following: (due) => after(due) - due })),
    wait: reach
  }
}

/** The time to which a schedule delays what happens at one, unless the schedule is over. */
type After = (millis: number) => Effect.Effect<number | undefined>

export const ofSchedule = <R>(
  times: Schedule.Schedule<unknown, void, never, R>,
  missed: Missed
): Effect.Effect<Times, never, R> =>
  Effect.contextWith((context: Context.Context<R>) =>
    Effect.gen(function*() {
      const begin: Effect.Effect<After> = Effect.map(
        Effect.provideContext(Schedule.toStep(times), context),
        (step) => (millis) =>
          step(millis, undefined).pipe(
            Effect.map(([, delay]) => millis + Duration.toMillis(delay)),
            Pull.catchDone(() => Effect.succeed(undefined)),
            Effect.provideContext(context)
          )
      )
      const calendar = yield* followsClock(begin)
      let after = yield* begin
      const tick = (due: number | undefined, from: number): Tick | undefined =>
        due === undefined ? undefined : { due, following: () => due - from }
      if (calendar) {
        return {
          next: (last, now) => Effect.map(after(behind(last, now, missed)), (due) => tick(due, last ?? now)),
          wait: reach
        }
      }
      const clock = yield* Clock.Clock
      const ahead = clock.currentTimeMillisUnsafe() - monotonicOf(clock)
      // By how much the clock was set back meanwhile. Intervals do not follow it.
      let setBack = 0
      const setBackAt = (now: number): number => {
        const found = ahead + monotonicOf(clock) - now
        if (Math.abs(found - setBack) > tolerance) setBack = Math.round(found)
        return setBack
      }
      return {
        next: (last, now, mine) =>
          Effect.gen(function*() {
            // An interval begins when the own tick has ended, and does not wait for a clock that was ahead.
            const from = mine || last === undefined ? now : Math.min(now, last)
            const by = setBackAt(now)
            const following = (time: number) => Effect.map(after(time + by), (due) => due && due - by)
            const due = yield* following(from)
            if (due === undefined || due >= now || missed === "once") return tick(due, from)
            // A missed tick is no tick of this process: its schedule begins now.
            after = yield* begin
            return tick(yield* following(now), now)
          }),
        // An interval is as long as it was, however the clock is set meanwhile.
        wait: (due, now) => Effect.as(Effect.sleep(Duration.millis(due - now)), true)
      }
    })
  )

// Only a calendar has the same next time when it is asked a bit later: the times of a `Cron` are whole seconds.
const followsClock = (begin: Effect.Effect<After>): Effect.Effect<boolean> =>
  Effect.gen(function*() {
    const now = yield* Clock.currentTimeMillis
    const within = now - now % 1000 + 500
    const next = yield* (yield* begin)(within)
    return next !== undefined && next === (yield* (yield* begin)(within + 1))
  })
