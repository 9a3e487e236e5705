/** The common part of a barrier and a double barrier: a number of parties, and a membership while it is open. */

import type * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Schema from "effect/Schema"
import type * as Scope from "effect/Scope"
import type { CoordinatorReason } from "../actor/errors.ts"
import { join } from "../hold/acquire.ts"
import { describe } from "../hold/loss.ts"
import type { Membership } from "../hold/membership.ts"
import { firmly, mismatchPolicies, oneOf, type Place } from "../hold/place.ts"

export class PartiesMismatch extends Schema.Error<PartiesMismatch>("lockstep/Barrier/PartiesMismatch")({
  _tag: Schema.tag("PartiesMismatch"),
  kind: Schema.Literals(["barrier", "doubleBarrier"]),
  name: Schema.String,
  namespace: Schema.String,
  parties: Schema.Number,
  existing: Schema.Number
}) {
  override get message(): string {
    return `${describe(this.kind, this.name, this.namespace)} is open elsewhere for ${this.existing} parties, not ` +
      `${this.parties}: use the same number, or say with \`onMismatch\` which number is meant.`
  }
}

/** How many parties, and what to do when it is open elsewhere with another number. */
export interface PartiesOptions {
  readonly parties: number
  readonly onMismatch?: "fail" | "keep" | "resize" | undefined
  readonly lease?: Duration.Input | undefined
}

// Each of them receives the contributions of all, and one call of Redis sends them.
const mostParties = 1024

export const checkParties = (parties: number): number => {
  if (!Number.isInteger(parties) || parties < 1 || parties > mostParties) {
    throw new RangeError(`parties must be a whole number from 1 to ${mostParties}`)
  }
  return parties
}

/** The number of parties in force as far as it is known here, and the number of the change that has set it. */
export interface Known {
  parties: number
  change: number
}

/**
 * Has it open for as long as the scope is. `known` follows every change. `lost` is called at the end of a session, behind which
 * it is joined again.
 */
export const open = <E>(
  place: Place,
  verb: "barrier.join" | "doubleBarrier.join",
  { onMismatch = "fail", parties }: PartiesOptions,
  known: Known,
  fail: (reason: CoordinatorReason | PartiesMismatch) => E,
  observe: (state: ReadonlyArray<unknown>) => void = () => {},
  lost: () => void = () => {}
): Effect.Effect<Membership, E, Scope.Scope> => {
  oneOf(onMismatch, "onMismatch", mismatchPolicies)
  // Redis may have gone back with the loss of a session: the next state from it is accepted, however old that is.
  let isLost = false
  return Effect.flatMap(
    join(place, {
      verb,
      // Joined again after a loss of the session, the number in force is meant, which may be another one by now.
      args: (anyway) =>
        known.change > 0
          ? [known.parties, "kept"]
          : [parties, anyway ? firmly[onMismatch] : onMismatch],
      observer: {
        observe: (state) => {
          const [parties, change] = state.slice(-2).map(Number) as [number, number]
          // An event that was posted before the reply to a join can come after it.
          if (isLost || change >= known.change) Object.assign(known, { parties, change })
          isLost = false
          observe(state)
        },
        lost: () => {
          isLost = true
          lost()
        }
      },
      fail
    }),
    ([member, outcome]) =>
      outcome[0] === "mismatch"
        ? Effect.fail(fail(
          new PartiesMismatch({
            kind: verb === "barrier.join" ? "barrier" : "doubleBarrier",
            name: place.name,
            namespace: place.space.kernel.settings.namespace,
            parties,
            existing: Number(outcome[1])
          })
        ))
        : Effect.succeed(member)
  )
}
