/** The clocks, read once in a turn of the event loop: a thousand grants can come with one reply. */

import type { Session } from "../actor/session.ts"
import type { Io } from "../io.ts"

export class Clock {
  readonly #io: Io
  #isRead = false
  #now = 0
  #wall = 0

  constructor(io: Io) {
    this.#io = io
  }

  /** By the monotonic clock. */
  get now(): number {
    this.#read()
    return this.#now
  }

  /** By the wall clock. */
  get wall(): number {
    this.#read()
    return this.#wall
  }

  /** Whether the session may be granted something now. A program that was granted something in this turn can have taken long. */
  isTrusted(session: Session): boolean {
    return session.lost === undefined && !session.expireIfDue()
  }

  #read(): void {
    if (this.#isRead) return
    const io = this.#io
    this.#isRead = true
    this.#now = io.now()
    this.#wall = io.wall()
    io.defer(this.#forget)
  }

  readonly #forget = (): void => {
    this.#isRead = false
  }
}
