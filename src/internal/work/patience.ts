/** When something that a handler has failed at is handled again. */

import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Option from "effect/Option"
import * as Pull from "effect/Pull"
import * as Schedule from "effect/Schedule"

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
