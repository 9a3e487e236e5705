/** When something that has failed is tried again. */

import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Option from "effect/Option"
import * as Pull from "effect/Pull"
import * as Schedule from "effect/Schedule"
import { isAway, isFinal } from "../actor/errors.ts"

/** The delay before the next attempt after so many, if the schedule goes on. */
export const delayAfter = <E>(
  schedule: Schedule.Schedule<unknown, E>,
  attempts: number,
  error: E
): Effect.Effect<Option.Option<Duration.Duration>> =>
  Effect.gen(function*() {
    // Another process may have made the attempts before, so the schedule begins anew and is stepped as often.
    const step = yield* Schedule.toStep(schedule)
    let now = 0
    let delay = Duration.zero
    for (let attempt = 0; attempt < attempts; attempt++) {
      const [, next] = yield* step(now, error)
      delay = next
      now += Duration.toMillis(next)
    }
    return Option.some(delay)
  }).pipe(Pull.catchDone(() => Effect.succeed(Option.none<Duration.Duration>())))

// Some 30,000 years: times have to be dates.
const longest = 1e15

/** A delay as Redis is told it, in milliseconds: a schedule may say that of infinity. */
export const millisOf = (delay: Duration.Duration): number => Math.min(Math.ceil(Duration.toMillis(delay)), longest)

/** Asks again while Redis is away: a part of what waits for longer. */
export const untilBack = <A, E extends { readonly reason: { readonly _tag: string } }, R>(
  self: Effect.Effect<A, E, R>,
  pause: Duration.Input
): Effect.Effect<A, E, R> =>
  Effect.retry(self, { while: ({ reason }) => isAway(reason), schedule: Schedule.spaced(pause) })

const pauses = Schedule.exponential("1 second").pipe(
  Schedule.modifyDelay(({ duration }) => Effect.succeed(Duration.min(duration, Duration.seconds(10))))
)

/** Begins again for as long as that may succeed, as when Redis has memory again. `warn` is not told that Redis is away. */
export const persevering = <A, E extends { readonly reason: { readonly _tag: string } }, R>(
  self: Effect.Effect<A, E, R>,
  warn: (error: E) => Effect.Effect<void>,
  isOver: (reason: E["reason"]) => boolean = isFinal
): Effect.Effect<A, E, R> =>
  Effect.retry(
    Effect.tapError(self, (error) => isAway(error.reason) || isOver(error.reason) ? Effect.void : warn(error)),
    { schedule: pauses, while: ({ reason }) => !isOver(reason) }
  )
