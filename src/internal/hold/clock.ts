/** The clocks, read once in a turn of the event loop: a thousand grants can come with one reply. */

import type { Session } from "../actor/session.ts"
import type { Io } from "../io.ts"

interface Turn {
  readonly now: number
  readonly wall: number
  /** It was trusted in this turn. */
  trusted: Session | undefined
}

export class Clock {
  readonly #io: Io
  #turn: Turn | undefined = undefined

  constructor(io: Io) {
    this.#io = io
  }

  /** By the monotonic clock, and by the wall clock. */
  read(): { readonly now: number; readonly wall: number } {
    return this.#read()
  }

  /** Whether the session may be granted something now. */
  isTrusted(session: Session): boolean {
    const turn = this.#read()
    if (session.lost !== undefined) return false
    if (turn.trusted !== session) {
      if (session.expireIfDue()) return false
      turn.trusted = session
    }
    return true
  }

  #read(): Turn {
    if (this.#turn !== undefined) return this.#turn
    const io = this.#io
    io.defer(() => {
      this.#turn = undefined
    })
    return this.#turn = { now: io.now(), wall: io.wall(), trusted: undefined }
  }
}
