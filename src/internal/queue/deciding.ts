/**
 * The decision of a handler about its job: it ends the handler, as a defect, so no handler of errors takes it for a
 * failure.
 */

import type * as Cause from "effect/Cause"

/** The job returns to the queue for a while, and no attempt is used up. */
export class Snoozed {
  /** In milliseconds. */
  readonly delay: number

  constructor(delay: number) {
    this.delay = delay
  }
}

/** The job becomes a dead letter at once. */
export class Discarded {
  readonly reason: string

  constructor(reason: string) {
    this.reason = reason
  }
}

/** Of what a handler has thrown, which may be a proxy that throws. */
export const isOf = <A>(value: unknown, kind: abstract new(...args: any) => A): value is A => {
  try {
    return value instanceof kind
  } catch {
    return false
  }
}

/** The decision of a handler, also when its finalizers have failed. */
export const decisionOf = ({ reasons }: Cause.Cause<unknown>): Snoozed | Discarded | undefined => {
  for (const reason of reasons) {
    if (reason._tag !== "Die") continue
    const { defect } = reason
    if (isOf(defect, Snoozed) || isOf(defect, Discarded)) return defect
  }
  return undefined
}
