/** Why something may not be written, or may not have been. */

import * as Schema from "effect/Schema"

export class StaleToken extends Schema.Error<StaleToken>("lockstep/Fence/StaleToken")({
  _tag: Schema.tag("StaleToken"),
  token: Schema.Number,
  seen: Schema.Number
}) {
  override get message(): string {
    return `A holder with the newer token ${this.seen} has written already, so the write with token ${this.token} was refused: stop, the lease is lost.`
  }
}
