/** The errors of shared refs. */

import * as Schema from "effect/Schema"
import { coordinatorReasons } from "../actor/errors.ts"
import { WaitTimeout } from "../hold/loss.ts"
import { InvalidPayload } from "../hold/payload.ts"
import { StaleToken, WriteUncertain } from "../hold/unwritten.ts"

/**
 * @category errors
 * @since 0.1.0
 */
export class SharedRefError extends Schema.Error<SharedRefError>("lockstep/SharedRef/SharedRefError")({
  _tag: Schema.tag("SharedRefError"),
  reason: Schema.Union([InvalidPayload, StaleToken, WriteUncertain, WaitTimeout, ...coordinatorReasons])
}) {
  override get message(): string {
    return this.reason.message
  }
}

export const fail = (reason: SharedRefError["reason"]): SharedRefError => new SharedRefError({ reason })
