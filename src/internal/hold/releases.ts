/** Releases on their way to Redis. One that Redis refused is made again with the next heartbeat. */

import type { Channel } from "../actor/channel.ts"
import type { CoordinatorError } from "../actor/errors.ts"
import type { Office } from "../actor/office.ts"
import type { Request } from "../actor/sending.ts"
import type { Session } from "../actor/session.ts"
import { type Entry, type LeaveVerb, nameOf } from "./claim.ts"

export class Releases {
  readonly #channel: () => Channel
  readonly #kernel: Office
  #owed: Array<Releasing> = []

  constructor(channel: () => Channel, kernel: Office) {
    this.#channel = channel
    this.#kernel = kernel
  }

  begin(entry: Entry, session: Session, done: () => void): void {
    const releasing = new Releasing(this, entry, session, done)
    entry.releasing = releasing
    const channel = this.#channel()
    channel.outbox.request(releasing)
    channel.whenImpatient(() => releasing.settle())
  }

  /** A release could not be answered. */
  refused(releasing: Releasing, error: CoordinatorError): void {
    const { entry, session } = releasing
    if (error.reason._tag === "ActorDefect") {
      // The actor cannot do it, nor could it the next time.
      this.#kernel.hooks.log("Error", `${nameOf(entry)} could not be released`, error)
      return releasing.settle()
    }
    // The session lives on, and with it what it holds. Redis may go on to refuse that for as long: nothing waits for it.
    this.#kernel.hooks.log("Warn", `the release of ${nameOf(entry)} is tried again with the next heartbeat`, error)
    if (session.lost === undefined) this.#owed.push(releasing)
    releasing.settle()
  }

  /** It ends without an answer. */
  unanswered({ askedAt }: Releasing): void {
    const { silentSince } = this.#kernel
    if (askedAt !== undefined) this.#kernel.silentSince = Math.min(askedAt, silentSince ?? askedAt)
  }

  /** A heartbeat. */
  beat(): void {
    for (const releasing of this.#owed.splice(0)) this.#channel().outbox.request(releasing)
  }

  /** The session is over, and with it what was to be released. */
  lost(): void {
    this.#owed = []
  }
}

/** A request to release or to leave the queue. When the session is over, so is the claim. */
class Releasing implements Request<LeaveVerb> {
  readonly entry: Entry
  readonly session: Session
  readonly verb: LeaveVerb
  readonly key: string
  readonly args: [string]
  readonly urgent = true
  readonly following: ReadonlyArray<Request> | undefined
  readonly others = undefined
  askedAt: number | undefined = undefined
  readonly #releases: Releases
  #done: (() => void) | undefined
  #also: Array<() => void> | undefined = undefined
  queued = false
  cancelled = false

  constructor(releases: Releases, entry: Entry, session: Session, done: () => void) {
    this.#releases = releases
    this.entry = entry
    this.session = session
    this.verb = entry.claim.leave ?? "session.leave"
    this.key = entry.claim.place.key
    this.args = [entry.id]
    this.following = entry.following
    this.#done = done
  }

  fail(error: CoordinatorError): void {
    this.#releases.refused(this, error)
  }

  /** A second release waits for the same answer. */
  also(done: () => void): void {
    if (this.#done === undefined) done()
    else (this.#also ??= []).push(done)
  }

  settle(): void {
    const done = this.#done
    this.#done = undefined
    done?.()
    if (this.#also !== undefined) { for (const also of this.#also.splice(0)) also() }
  }

  moot(): void {
    if (this.session.lost === "expired") this.#releases.unanswered(this)
    this.settle()
  }

  /** Redis is away: it is released later, or expires, and its release is not waited for. */
  expire(): void {
    this.#releases.unanswered(this)
    this.settle()
  }
}
