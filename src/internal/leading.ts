/** To lead: what an election and a singleton have in common. */
import * as Cause from "effect/Cause"
import type * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import type { CoordinatorError } from "./actor/errors.ts"
import * as held from "./hold/held.ts"
import { LeaseLost, type WaitTimeout } from "./hold/loss.ts"
import { withHeld } from "./hold/protect.ts"
import { spanned } from "./hold/span.ts"

type Failure = CoordinatorError | LeaseLost | WaitTimeout

export interface Leading<E> {
  readonly place: held.Place
  /** What the others see, as JSON. */
  readonly value: string
  readonly wait: Duration.Input | undefined
  readonly again: boolean
  readonly span: string
  /** Told when a term begins, and answers what is to be called when its effect has ended. */
  readonly begin: (term: held.Held) => () => void
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

/** What else has gone wrong. */
const failures = (cause: Cause.Cause<unknown>): Cause.Cause<unknown> =>
  Cause.fromReasons(
    cause.reasons.filter((reason) =>
      !Cause.isInterruptReason(reason) && !(Cause.isFailReason(reason) && reason.error instanceof Ended)
    )
  )

export const campaigning = <E>(
  place: held.Place,
  value: string,
  wait: Duration.Input | undefined,
  fail: (error: Failure) => E
): held.Acquire<E> => ({
  place,
  verb: "leader.campaign",
  details: [value, true],
  weight: 1,
  capacity: 1,
  wait: true,
  options: { wait },
  fail,
  // It is waited for, so it is never refused.
  refuse: () => Effect.succeed(undefined)
})

/** Runs an effect under a term, and under another one when that has ended before it. */
export const lead = <A, E, R, E2>(
  self: Effect.Effect<A, E, R>,
  { again, begin, fail, place, span, value, wait }: Leading<E2>
): Effect.Effect<A, E | E2, R> => {
  const body = Effect.withFiber<A, E, R>((fiber) => {
    // It runs under its term from the first operation to the last.
    const mine = held.findHeld(fiber, place)!
    let end: (() => void) | undefined
    return Effect.onExitPrimitive(
      Effect.suspend(() => {
        end = begin(mine)
        return mine.active ? self : Effect.interrupt
      }),
      () => {
        end?.()
        return undefined
      }
    )
  })
  const acquiring = campaigning(
    place,
    value,
    wait,
    (error) => error instanceof LeaseLost ? new Ended(error) : fail(error)
  )
  const once = Effect.withFiber<A, E | E2 | Ended, R>((fiber) =>
    spanned(fiber, withHeld(body, acquiring) as Effect.Effect<A, E | E2 | Ended, R>, span, place.name)
  )
  const round: Effect.Effect<A, E | E2, R> = Effect.suspend(() =>
    Effect.matchCauseEffect(once, {
      onSuccess: (result) => again ? round : Effect.succeed(result),
      onFailure: (cause): Effect.Effect<A, E | E2, R> => {
        const ended = endedIn(cause)
        if (ended === undefined) return Effect.failCause(cause as Cause.Cause<E | E2>)
        const { reason, token } = ended.loss
        if (reason === "closed") return Effect.fail(fail(ended.loss))
        const message = `${JSON.stringify(place.name)}: term ${token} has ended (${reason}), campaigning again`
        const rest = failures(cause)
        return Effect.andThen(
          rest.reasons.length === 0
            ? Effect.logInfo(message)
            : Effect.logError(`${message}; its effect has failed meanwhile`, rest),
          round
        )
      }
    })
  )
  return round
}
