/** The reports of a coordinator's runtime to the outside, and how it is set. */

import type { LossReason, Phase } from "./session.ts"

export type Log = (level: "Debug" | "Info" | "Warn" | "Error", message: string, cause?: unknown) => void

/** A callback that throws is a bug of its own, and must not cost the others what they wait for. */
export const guard = (log: Log, what: string, callback: () => void): void => {
  try {
    callback()
  } catch (cause) {
    log("Error", `${what} could not be taken in`, cause)
  }
}

export interface Settings {
  readonly namespace: string
  readonly name: string
  /** All in milliseconds. */
  readonly lease: number
  readonly margin: number
  readonly requestTimeout: number
  readonly partitions: number
  readonly maxBatch: number
  readonly maxPending: number
}

export interface Metrics {
  readonly batch: (requests: number, millis: number) => void
  readonly waiting: () => void
  readonly waited: (millis: number) => void
  readonly timedOut: () => void
  readonly granted: () => void
  readonly released: (millis: number) => void
  /** A session is closed under holds. */
  readonly closing: () => void
  readonly lost: (reason: LossReason, holds: number) => void
  readonly overrun: (holds: number) => void
  readonly published: (events: number) => void
  /** An event was delivered to a group, for the first time or again. */
  readonly delivered: (attempt: number) => void
  readonly buried: () => void
  readonly missed: (events: number) => void
}

export interface Hooks {
  readonly log: Log
  readonly metrics: Metrics
  readonly transition: (
    partition: number,
    session: string | undefined,
    from: Phase,
    to: Phase,
    reason: LossReason | undefined
  ) => void
}
