/** What a barrier and a double barrier have in common: a number of parties, and a membership while it is open. */
import * as Effect from "effect/Effect"
import * as Schema from "effect/Schema"
import type * as Scope from "effect/Scope"
import type { CoordinatorError } from "./actor/errors.ts"
import type { Claim, Observation } from "./hold/claim.ts"
import { membership, type Place } from "./hold/held.ts"

export class PartiesMismatch extends Schema.Error<PartiesMismatch>("lockstep/Barrier/PartiesMismatch")({
  _tag: Schema.tag("PartiesMismatch"),
  name: Schema.String,
  parties: Schema.Number,
  existing: Schema.Number
}) {
  override get message(): string {
    return `It exists for ${this.existing} parties, not ${this.parties}: use the same number, or another name.`
  }
}

// Each of them hears what all have brought, and one call of Redis tells them.
const mostParties = 1024

export const checkParties = (parties: number): number => {
  if (!Number.isInteger(parties) || parties < 1 || parties > mostParties) {
    throw new RangeError(`parties must be a whole number from 1 to ${mostParties}`)
  }
  return parties
}

/** Has it open for as long as the scope is. What is to be heard is heard by who waits, for the most part. */
export const join = <E>(
  place: Place,
  verb: "barrier.join" | "phase.join",
  parties: number,
  fail: (reason: CoordinatorError | PartiesMismatch) => E,
  observe: Observation["observe"] = () => {}
): Effect.Effect<Claim, E, Scope.Scope> =>
  Effect.flatMap(
    membership(place, verb, parties, undefined, (error) => fail(error as CoordinatorError), {
      observation: { observe },
      details: [parties]
    }),
    ([claim, outcome]) =>
      outcome[0] === "mismatch"
        ? Effect.fail(fail(new PartiesMismatch({ name: place.name, parties, existing: outcome[1] })))
        : Effect.succeed(claim)
  )
