/** The errors of a hold that was lost, and of a wait that has timed out. */

import * as Duration from "effect/Duration"
import * as Schema from "effect/Schema"
import { describe } from "../actor/keys.ts"

export { describe }

const why = {
  expired: "it could not be renewed in time",
  unknown: "Redis does not know its session any more",
  rolledBack: "Redis has forgotten what it had acknowledged",
  closed: "it was released, or its coordinator or the object that it belongs to was closed",
  maxHold: "it was held for longer than `maxHold`",
  resigned: "its holder resigned",
  revoked: "it was ended by another session"
} as const

export class LeaseLost extends Schema.Error<LeaseLost>("lockstep/Lease/LeaseLost")({
  _tag: Schema.tag("LeaseLost"),
  kind: Schema.String,
  key: Schema.String,
  namespace: Schema.String,
  token: Schema.Number,
  reason: Schema.Literals(["expired", "unknown", "rolledBack", "closed", "maxHold", "resigned", "revoked"])
}) {
  override get message(): string {
    return `The lease of ${describe(this.kind, this.key, this.namespace)} was lost (${this.reason}): ` +
      `${why[this.reason]}. Undo or retry: another process may hold it by now.`
  }
}

export class WaitTimeout extends Schema.Error<WaitTimeout>("lockstep/Lease/WaitTimeout")({
  _tag: Schema.tag("WaitTimeout"),
  kind: Schema.String,
  key: Schema.String,
  namespace: Schema.String,
  wait: Schema.DurationFromMillis,
  away: Schema.Boolean
}) {
  override get message(): string {
    const subject = describe(this.kind, this.key, this.namespace)
    const over = `The wait for ${subject} was over after ${Duration.format(this.wait)}`
    return this.away
      ? `${over}, and Redis was out of reach meanwhile: retry when it is back.`
      : `${over}: retry later, or wait for longer (\`wait\`).`
  }
}
