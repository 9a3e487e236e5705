/** When something that has failed is tried again. */

import * as Clock from "effect/Clock"
import type * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Option from "effect/Option"
import * as Pull from "effect/Pull"
import * as Schedule from "effect/Schedule"
import { isAway, isFinal } from "../actor/errors.ts"
import { millisOf } from "../hold/place.ts"
import { CurrentIo, millisIn, pause } from "../io.ts"

// A schedule after so many steps from a time on, and the time to which its delays have come.
const stepped = <E>(schedule: Schedule.Schedule<unknown, E>, steps: number, from: number, error: E, lasted: number) =>
  Effect.gen(function*() {
    const step = yield* Schedule.toStep(schedule)
    let at = from
    for (let left = steps; left > 0; left--) at += millisOf((yield* step(at, error))[1]) + lasted
    return [step, at] as const
  })

/** The delay before the next attempt after so many, if the schedule goes on. The last one has lasted for so many milliseconds. */
export const delayAfter = <E>(
  schedule: Schedule.Schedule<unknown, E>,
  attempts: number,
  error: E,
  lasted: number
): Effect.Effect<Option.Option<Duration.Duration>> =>
  Effect.gen(function*() {
    // Another process may have made the attempts before, so the schedule begins anew and is stepped as often. The last one has
    // ended now, which a schedule by the calendar has to know. The time of the first one follows from the delays between them, if
    // each has lasted as long as this one: a schedule that ends after a while has to end, with any delays.
    const now = yield* Clock.currentTimeMillis
    const each = Math.max(1, lasted)
    const [, later] = yield* stepped(schedule, attempts - 1, now, error, each)
    const [step] = yield* stepped(schedule, attempts - 1, 2 * now - later, error, each)
    const [, delay] = yield* step(now, error)
    return Option.some(delay)
  }).pipe(Pull.catchDone(() => Effect.succeed(Option.none<Duration.Duration>())))

// After pauses in real time, as reconnects are: under the `TestClock` of a program it would wait for ever for Redis, which is back.
const retried = <A, E extends { readonly reason: { readonly _tag: string } }, R>(
  self: Effect.Effect<A, E, R>,
  isWorth: (reason: E["reason"]) => boolean,
  pauseAfter: (attempt: number) => number
): Effect.Effect<A, E, R> =>
  Effect.flatMap(CurrentIo, (io) => {
    let attempt = 0
    const rest = Effect.suspend(() => Effect.as(pause(io, pauseAfter(attempt++)), true))
    return Effect.retry(self, { while: ({ reason }) => isWorth(reason) ? rest : Effect.succeed(false) })
  })

const passing = new Set(["Overloaded", "OutOfMemory"])

/** Asks again while Redis is away, or has no memory, or too much is asked here: a part of what waits for longer. */
export const untilBack = <A, E extends { readonly reason: { readonly _tag: string } }, R>(
  self: Effect.Effect<A, E, R>,
  pause: Duration.Input
): Effect.Effect<A, E, R> => {
  const millis = millisIn(pause)
  return retried(self, (reason) => isAway(reason) || passing.has(reason._tag), () => millis)
}

/** Asks again while Redis is away, unless the answer is not wanted any more. */
export const whileAway = <A, E extends { readonly reason: { readonly _tag: string } }, R>(
  self: Effect.Effect<A, E, R>,
  isWanted: () => boolean
): Effect.Effect<A, E, R> => retried(self, (reason) => isAway(reason) && isWanted(), () => 1000)

/** Begins again for as long as that may succeed, as when Redis has memory again. `warn` does not receive that Redis is away. */
export const persevering = <A, E extends { readonly reason: { readonly _tag: string } }, R>(
  self: Effect.Effect<A, E, R>,
  warn: (error: E) => Effect.Effect<void>,
  isOver: (reason: E["reason"]) => boolean = isFinal
): Effect.Effect<A, E, R> =>
  retried(
    Effect.tapError(self, (error) => isAway(error.reason) || isOver(error.reason) ? Effect.void : warn(error)),
    (reason) => !isOver(reason),
    (attempt) => Math.min(1000 * 2 ** attempt, 10_000)
  )
