/** When the ticks of a schedule are due. All times are in milliseconds of the clock. */

import * as Clock from "effect/Clock"
import type * as Context from "effect/Context"
import * as Cron from "effect/Cron"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Pull from "effect/Pull"
import * as Schedule from "effect/Schedule"

export interface Tick {
  /** The first tick after the last one. */
  readonly due: number
  /** The first one after now, if there is one. */
  readonly later: Effect.Effect<number | undefined>
  /** How long after a tick the next one comes, as far as that is known. */
  readonly following: (due: number) => number
}

/** `mine` says that the last tick was this process's own. */
export type Next = (last: number | undefined, now: number, mine: boolean) => Effect.Effect<Tick | undefined>

export const ofCron = (cron: Cron.Cron): Next => (last, now) =>
  Effect.sync(() => {
    const after = (millis: number) => Cron.next(cron, new Date(millis)).getTime()
    return {
      due: after(last ?? now),
      later: Effect.sync(() => after(Math.max(now, last ?? now))),
      following: (due) => after(due) - due
    }
  })

/** The time to which a schedule delays what happens at one, unless the schedule is over. */
type After = (millis: number) => Effect.Effect<number | undefined>

export const ofSchedule = <R>(times: Schedule.Schedule<unknown, void, never, R>): Effect.Effect<Next, never, R> =>
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
      const isCalendar = yield* followsClock(begin)
      let after = yield* begin
      // A missed tick is no tick of this process: its schedule begins now.
      const afresh = (now: number) =>
        Effect.flatMap(begin, (begun) => {
          after = begun
          return after(now)
        })
      // A tick of a calendar is behind the last one by any clock, or else it would run twice when the clock is set back. An
      // interval counts from the end of the own tick. It does not wait for a clock that was ahead.
      const since = (last: number, now: number, mine: boolean) => {
        if (isCalendar) return mine ? Math.max(now, last) : last
        return mine ? now : Math.min(now, last)
      }
      return (last, now, mine) => {
        const from = last === undefined ? now : since(last, now, mine)
        return Effect.map(after(from), (due) =>
          due === undefined ? undefined : { due, later: afresh(now), following: () => due - from })
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
