/** The stream of a session's events: how far it was read, and which events must have come and have not. */

import type { Io } from "../io.ts"
import type { Entry, Source } from "./reader.ts"
import type { Session } from "./session.ts"

/** The receiver of a mailbox's events. */
export interface Audience {
  /** Whether anything can come to the mailbox. */
  readonly isListening: () => boolean
  readonly heard: (session: Session, event: ReadonlyArray<unknown>) => void
  /** Events may be missing: the state of everything has to be asked for. */
  readonly missed: (session: Session) => void
}

// A mailbox is read while something waits; when an event has come all the same, at the next heartbeat.
export class Mailbox implements Source {
  readonly key: string
  /** Of the last event that Redis is known to have posted; a heartbeat later it must have been read. */
  due: number
  /** When that was asked. */
  askedAt = 0
  #askedAtWall = 0
  #missedAt = Number.NEGATIVE_INFINITY
  readonly #io: Io
  readonly #session: Session
  readonly #audience: Audience
  readonly #forgotten: () => void
  readonly wake: () => void

  constructor(session: Session, audience: Audience, io: Io, wake: () => void, forgotten: () => void) {
    this.#io = io
    this.#forgotten = forgotten
    this.key = session.mailbox
    this.due = session.read
    this.#session = session
    this.#audience = audience
    this.wake = wake
  }

  get position(): string {
    return this.#session.position
  }

  /** So many events had been posted when Redis was asked, or later. */
  posted(due: number, askedAt: number, askedAtWall: number): void {
    this.due = due
    // The session sends the questions that follow from the gap behind this renewal.
    if (askedAt <= this.#missedAt) return
    this.askedAt = askedAt
    this.#askedAtWall = askedAtWall
    this.#heard()
  }

  #heard(): void {
    const session = this.#session
    if (session.read < this.due) return
    session.heardAt = Math.max(session.heardAt, this.askedAt)
    session.heardAtWall = Math.max(session.heardAtWall, this.#askedAtWall)
  }

  readonly isActive = (): boolean =>
    this.#session.lost === undefined && (this.#audience.isListening() || this.due > this.#session.read)

  readonly onEntries = (entries: ReadonlyArray<Entry>): void => {
    let failure: unknown
    // One that cannot be taken in must not cost those behind it.
    for (const [id, fields] of entries) {
      try {
        this.#take(id, fields)
      } catch (cause) {
        failure ??= cause
      }
    }
    if (failure !== undefined) throw failure
  }

  #take(id: string, fields: ReadonlyArray<string>): void {
    const session = this.#session
    const number = Number.parseInt(id, 10)
    if (session.lost !== undefined) return
    // Another event under a number that was read already: Redis has forgotten the first one.
    if (number <= session.read) return this.#forgotten()
    const gap = number !== session.read + 1
    session.read = number
    session.position = id
    if (session.expireIfDue()) return
    for (const event of JSON.parse(fields[1]!) as ReadonlyArray<ReadonlyArray<unknown>>) {
      if (session.lost === undefined) this.#audience.heard(session, event)
    }
    if (gap) this.onGap()
    else this.#heard()
  }

  readonly onGap = (): void => {
    const session = this.#session
    if (session.lost !== undefined) return
    // Nothing counts as received until a renewal is answered that the session has sent behind the questions which
    // follow from this gap.
    this.#missedAt = this.#io.now()
    session.heardAt =
      session.heardAtWall =
      this.askedAt =
      this.#askedAtWall =
        Number.NEGATIVE_INFINITY
    this.#audience.missed(session)
  }
}
