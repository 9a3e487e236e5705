/** To lead: the common part of an election and a singleton. */

import * as Cause from "effect/Cause"
import type * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import { type Acquire, acquire, type Failure, leave } from "../hold/acquire.ts"
import type { Hold } from "../hold/hold.ts"
import { describe, LeaseLost } from "../hold/loss.ts"
import { flag, type Place } from "../hold/place.ts"
import { protect } from "../hold/protect.ts"
import { spanned } from "../hold/span.ts"
import { logFailure } from "../text.ts"

export interface Leading<E> {
  readonly place: Place
  /** The value that the others see, as JSON. */
  readonly value: string
  readonly wait: Duration.Input | undefined
  /** Its process may keep the leadership when a term has ended. Default `false`. */
  readonly cached?: boolean | undefined
  /** Campaign again when the effect has ended with success. */
  readonly forever: boolean
  readonly span: string
  /** Called when a term begins, and answers the function to call when its effect has ended. */
  readonly begin: (term: Hold) => () => void
  readonly fail: (error: Failure) => E
}

/** A term that has ended before its effect. */
class Ended {
  readonly loss: LeaseLost
  constructor(loss: LeaseLost) {
    this.loss = loss
  }
}

const endedIn = (cause: Cause.Cause<unknown>): Ended | undefined => {
  for (const reason of cause.reasons) {
    if (Cause.isFailReason(reason) && reason.error instanceof Ended) return reason.error
  }
  return undefined
}

/** The other failures. */
const failures = (cause: Cause.Cause<unknown>): Cause.Cause<unknown> =>
  Cause.fromReasons(
    cause.reasons.filter((reason) =>
      !Cause.isInterruptReason(reason) && !(Cause.isFailReason(reason) && reason.error instanceof Ended)
    )
  )

/** A term ends when its effect does: the `maxHold` of the coordinator is for locks and permits. */
export const withoutMaxHold = (place: Place): Place => ({ ...place, space: { ...place.space, maxHold: undefined } })

/** A candidate that stands by waits as long as it takes: the `wait` of the coordinator does not count. */
export const standingBy = (place: Place): Place => ({
  ...place,
  space: { ...place.space, maxHold: undefined, wait: undefined }
})

export const campaigning = <E>(
  { cached = false, place, value, wait }: Pick<Leading<E>, "cached" | "place" | "value" | "wait">,
  fail: (error: Failure) => E
): Acquire<E> => {
  const { channel, key, tenancy } = place
  return {
    place,
    verb: "election.campaign",
    args: () => [value, cached && tenancy.kept.isWorthKeeping(key, channel.lease) ? "k" : ""],
    cached: flag(cached, "cached"),
    brings: value,
    verified: true,
    options: { wait },
    fail,
    // A candidate waits, so it is never refused.
    refuse: () => Effect.succeed(undefined)
  }
}

/** Runs an effect in one term. */
const oneTerm = <A, E, R, E2>(
  self: Effect.Effect<A, E, R>,
  leading: Leading<E2>
): Effect.Effect<A, E | E2 | Ended, R> => {
  const { begin, fail } = leading
  const ending = (error: Failure) => error instanceof LeaseLost ? new Ended(error) : fail(error)
  return Effect.uninterruptibleMask((restore) =>
    Effect.flatMap(acquire(campaigning(leading, ending), restore), (hold) => {
      const term = hold!
      const end = begin(term)
      return Effect.onExitPrimitive(
        protect(self, term, restore, ending, undefined),
        () => {
          end()
          return leave(term)
        },
        true
      )
    })
  )
}

/** Runs an effect in a term, and in another one when that has ended before it. */
export const lead = <A, E, R, E2>(
  self: Effect.Effect<A, E, R>,
  leading: Leading<E2>
): Effect.Effect<A, E | E2, R> => {
  const { fail, forever, place, span } = leading
  const once = Effect.withFiber<A, E | E2 | Ended, R>((fiber) =>
    spanned(fiber, oneTerm(self, leading), span, place.kind, place.name)
  )
  const round: Effect.Effect<A, E | E2, R> = Effect.suspend(() =>
    Effect.matchCauseEffect(once, {
      onSuccess: (result) => forever ? round : Effect.succeed(result),
      onFailure: (cause): Effect.Effect<A, E | E2, R> => {
        const ended = endedIn(cause)
        if (ended === undefined) return Effect.failCause(cause as Cause.Cause<E | E2>)
        return ended.loss.reason === "closed"
          ? Effect.failCause(Cause.fromReasons<E | E2>([
            ...Cause.fail(fail(ended.loss)).reasons,
            ...(failures(cause) as Cause.Cause<E>).reasons
          ]))
          : Effect.andThen(reported(ended.loss, failures(cause)), round)
      }
    })
  )
  return round
}

const reported = (loss: LeaseLost, rest: Cause.Cause<unknown>): Effect.Effect<void> => {
  const { key, kind, namespace, reason, token } = loss
  const message = `term ${token} of ${describe(kind, key, namespace)} has ended (${reason}): it campaigns again`
  return rest.reasons.length === 0
    ? Effect.logInfo(message)
    : logFailure(`${message}; its effect has failed meanwhile`, rest)
}
