/** The requests that are made for claims. */

import type { CoordinatorError } from "../actor/errors.ts"
import type { Request } from "../actor/outbox.ts"
import type { Session } from "../actor/session.ts"
import type { ClaimReply, ClaimVerb, Entry } from "./claim.ts"
import { Hold } from "./hold.ts"

/** What hears of the answers. */
export interface Asker {
  readonly answered: (entry: Entry, reply: ClaimReply) => void
  /** `sent` says whether the request can have been executed. */
  readonly failed: (entry: Entry, error: CoordinatorError, sent: boolean) => void
  /** Redis has been away for longer than a question waits. */
  readonly expired: (entry: Entry, error: CoordinatorError) => void
  readonly unreleased: (releasing: Releasing, error: CoordinatorError) => void
}

const ignore = () => {}

/** A request to hold or to join. It is never moot: the claim itself goes to the next session. */
export class Asking implements Request<ClaimVerb> {
  readonly entry: Entry
  readonly session: Session
  readonly urgent: boolean
  readonly verb: ClaimVerb
  readonly key: string
  readonly args: never
  readonly moot = ignore
  // Looked up for every request, and slowly where they are missing.
  readonly following = undefined
  readonly others = undefined
  expire: ((error: CoordinatorError) => void) | undefined
  askedAt = 0
  queued = false
  cancelled = false
  readonly #asker: Asker

  constructor(asker: Asker, entry: Entry, session: Session, urgent: boolean, anyway: boolean) {
    const { claim } = entry
    this.#asker = asker
    this.entry = entry
    this.session = session
    this.urgent = urgent
    this.verb = claim.verb
    this.key = claim.place.key
    this.args = [entry.id, ...claim.args(anyway)] as never
    this.expire = claim.question === true ? (error) => asker.expired(entry, error) : undefined
  }

  settle(reply: ClaimReply): void {
    this.#asker.answered(this.entry, reply)
  }

  fail(error: CoordinatorError, sent: boolean): void {
    this.#asker.failed(this.entry, error, sent)
  }
}

/** A request to release or to leave the queue. When the session is over, so is the claim. */
export class Releasing implements Request<"lock.return" | "semaphore.release" | "session.leave"> {
  readonly entry: Entry
  readonly session: Session
  readonly verb: "lock.return" | "semaphore.release" | "session.leave"
  readonly key: string
  readonly args: [string] | [string, number]
  readonly urgent = true
  readonly following: ReadonlyArray<Request> | undefined
  readonly others = undefined
  readonly #asker: Asker
  #done: (() => void) | undefined
  #also: Array<() => void> | undefined = undefined
  queued = false
  cancelled = false

  constructor(asker: Asker, entry: Entry, session: Session, done: () => void) {
    this.#asker = asker
    this.entry = entry
    this.session = session
    // It can be of another claim, which has taken over what was kept.
    const kept = entry instanceof Hold && entry.stretch !== undefined
    this.verb = kept ? "lock.return" : entry.claim.leave ?? "session.leave"
    this.key = entry.claim.place.key
    this.args = this.verb === "lock.return" ? [entry.id, kept ? entry.token : 0] : [entry.id]
    this.following = entry.following
    this.#done = done
  }

  fail(error: CoordinatorError): void {
    this.#asker.unreleased(this, error)
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
    this.settle()
  }

  /** Redis is away: it is released later, or expires, and its release is not waited for. */
  expire(): void {
    this.settle()
  }
}
