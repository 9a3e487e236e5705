/** Why something may not be written, or may not have been. */

import * as Schema from "effect/Schema"
import { describe } from "./loss.ts"

export class StaleToken extends Schema.Error<StaleToken>("lockstep/Fence/StaleToken")({
  _tag: Schema.tag("StaleToken"),
  /** The object that was to be written. */
  kind: Schema.String,
  name: Schema.String,
  namespace: Schema.String,
  token: Schema.Number,
  /** The newest token that Redis has seen. It was not asked if this process knew that the lease was lost or released. */
  seen: Schema.optional(Schema.Number)
}) {
  override get message(): string {
    const subject = describe(this.kind, this.name, this.namespace)
    return this.seen === undefined
      ? `The lease with token ${this.token} was lost or released, so ${subject} was not written: stop.`
      : `A holder with the newer token ${this.seen} has written ${subject} already, ` +
        `so the write with token ${this.token} was refused: stop, the lease is lost.`
  }
}

export class WriteUncertain extends Schema.Error<WriteUncertain>("lockstep/WriteUncertain")({
  _tag: Schema.tag("WriteUncertain"),
  kind: Schema.String,
  name: Schema.String,
  namespace: Schema.String
}) {
  override get message(): string {
    return `The session was lost before Redis had answered, so ${describe(this.kind, this.name, this.namespace)} may ` +
      `or may not be changed: read it, and decide whether to write again.`
  }
}
