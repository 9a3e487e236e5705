/** The request that is made for a claim. */

import type { CoordinatorError } from "../actor/errors.ts"
import type { Request } from "../actor/sending.ts"
import type { Session } from "../actor/session.ts"
import type { ClaimReply, ClaimVerb, Entry } from "./claim.ts"

/** The receiver of the answers. */
export interface Asker {
  readonly answered: (entry: Entry, reply: ClaimReply) => void
  /** `sent` says whether the request can have been executed. */
  readonly failed: (entry: Entry, error: CoordinatorError, sent: boolean) => void
  /** Redis has been away for longer than a question waits. */
  readonly expired: (entry: Entry, error: CoordinatorError) => void
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
    this.args = [entry.id, ...claim.args(anyway, entry.known)] as never
    this.expire = claim.question === true ? (error) => asker.expired(entry, error) : undefined
  }

  settle(reply: ClaimReply): void {
    this.#asker.answered(this.entry, reply)
  }

  fail(error: CoordinatorError, sent: boolean): void {
    this.#asker.failed(this.entry, error, sent)
  }
}
