/**
 * Treats sessions as lost as soon as they are not trusted any more, by whichever clock. The monotonic clock, and every timer
 * with it, stands still while the machine is suspended: so while anything is held, the clocks are looked at every half a
 * second.
 */

import type { Io, Timer } from "../io.ts"
import type { Session } from "./session.ts"

/** The keeper of a session. */
export interface Guarded {
  readonly session: Session | undefined
  /** Whether the session has holds, waits or memberships. */
  readonly isUsed: () => boolean
}

// In milliseconds.
const interval = 500

export class Vigil {
  readonly #io: Io
  readonly #guarded = new Set<Guarded>()
  // One for all of them: a renewal must not cost a timer.
  #timer: Timer | undefined = undefined
  #isQuick = false

  constructor(io: Io) {
    this.#io = io
  }

  include(guarded: Guarded): void {
    this.#guarded.add(guarded)
    this.hasten()
  }

  exclude(guarded: Guarded): void {
    this.#guarded.delete(guarded)
    if (this.#guarded.size > 0) return
    this.#timer?.cancel()
    this.#timer = undefined
    this.#isQuick = false
  }

  /** A session has been used, and may have holds now. */
  hasten(): void {
    if (this.#isQuick) return
    this.#isQuick = true
    this.#arm()
  }

  #arm(): void {
    let rest = this.#isQuick ? interval : Number.POSITIVE_INFINITY
    for (const { session } of this.#guarded) if (session !== undefined) rest = Math.min(rest, session.remaining)
    this.#timer?.cancel()
    this.#timer = this.#io.after(Math.max(1, rest), () => this.#look())
  }

  #look(): void {
    this.#timer = undefined
    for (const { session } of [...this.#guarded]) session?.expireIfDue()
    this.#isQuick = [...this.#guarded].some((guarded) => guarded.isUsed())
    if (this.#guarded.size > 0) this.#arm()
  }
}
