import * as Schema from "effect/Schema"

export class LeaseLost extends Schema.Error<LeaseLost>("lockstep/Lease/LeaseLost")({
  _tag: Schema.tag("LeaseLost"),
  key: Schema.String,
  token: Schema.Number,
  reason: Schema.Literals(["expired", "unknown", "rolledBack", "closed", "maxHold", "resigned", "revoked"])
}) {
  override get message(): string {
    return `The lease was lost (${this.reason}); another may hold it by now.`
  }
}

export class WaitTimeout extends Schema.Error<WaitTimeout>("lockstep/Lease/WaitTimeout")({
  _tag: Schema.tag("WaitTimeout"),
  key: Schema.String,
  wait: Schema.DurationFromMillis
}) {
  override get message(): string {
    return "It was not granted within the time to wait."
  }
}
