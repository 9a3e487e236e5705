/** The upkeep of claims while they last: Redis is asked for their state, and their resources are touched. */

import type { Channel } from "../actor/channel.ts"
import type { Office } from "../actor/office.ts"
import type { Request } from "../actor/sending.ts"
import type { Session } from "../actor/session.ts"
import { type ClaimReply, type ClaimVerb, type Entry, nameOf } from "./claim.ts"
import type { Claims } from "./claims.ts"
import { Hold } from "./hold.ts"
import { Membership } from "./membership.ts"

// A claim touches its resource this often: four times before Redis drops keys that no session touches.
const touchEvery = 6 * 3_600_000

const ignore = () => {}

/** Receives the state of claims that were verified. */
export interface Verifier {
  /** The claim waits: it is requested again under the same id. */
  readonly again: (entry: Entry) => void
  /** Redis had ended the hold, and verifying it has made a new claim under its id. */
  readonly ended: (hold: Hold) => void
  /** A heartbeat ago, some claims could not be verified, or events were missing. */
  readonly missed: (session: Session) => void
}

export class Upkeep {
  readonly #office: Office
  readonly #channel: () => Channel
  readonly #claims: Claims
  readonly #verifier: Verifier
  #touched: number
  #verified: number
  // A claim could not be verified, or events are missing.
  #unverified = false

  constructor(office: Office, channel: () => Channel, claims: Claims, verifier: Verifier) {
    this.#office = office
    this.#channel = channel
    this.#claims = claims
    this.#verifier = verifier
    this.#touched = office.io.now()
    this.#verified = this.#touched
  }

  /** Events may be missing: everything is verified with the next heartbeat. */
  doubt(): void {
    this.#unverified = true
  }

  /** A heartbeat. */
  beat(session: Session): void {
    const now = this.#office.io.now()
    if (this.#unverified) {
      this.#unverified = false
      this.#verifier.missed(session)
    } else if (now - this.#verified >= this.#channel().lease) {
      this.#verified = now
      this.verify(session, this.#claims.verified())
    }
    if (now - this.#touched < touchEvery) return
    this.#touched = now
    for (const entry of this.#claims.values()) this.#touch(entry, session)
  }

  verify(session: Session, entries: ReadonlyArray<Entry>): void {
    for (const entry of entries) {
      if (entry.session !== session) continue
      if (entry.state === "queued") this.#verifier.again(entry)
      else if (entry.state === "held") this.#ask(entry, session)
      // The reply that it waits for may be older than what was missed.
      else if (entry.state === "asked") entry.again = true
    }
  }

  #ask(entry: Entry, session: Session): void {
    const { claim } = entry
    const { place: { key }, verb } = claim
    entry.verifying++
    this.#channel().outbox.request({
      verb,
      key,
      args: [entry.id, ...claim.args(true, true)] as never,
      session,
      urgent: true,
      moot: ignore,
      settle: (reply: ClaimReply) => {
        entry.verifying--
        if (entry.state === "held" && entry.session === session) this.#found(entry, reply)
      },
      fail: (error) => {
        entry.verifying--
        this.#unverified = true
        this.#log(entry, "is verified with the next heartbeat", error)
      }
    } as Request<ClaimVerb>)
  }

  #found(entry: Entry, reply: ClaimReply): void {
    if (entry instanceof Membership && reply[0] === "joined") entry.observer.observe(reply.slice(1))
    if (!(entry instanceof Hold)) return
    const isSame = reply[0] === "granted" && Number(reply[1]) === (entry.stretch?.first ?? entry.token)
    if (!isSame) this.#verifier.ended(entry)
  }

  #touch(entry: Entry, session: Session): void {
    this.#channel().outbox.request({
      verb: "session.touch",
      key: entry.claim.place.key,
      args: [],
      session,
      urgent: true,
      moot: ignore,
      settle: ignore,
      fail: (error) => this.#log(entry, "could not be touched", error)
    })
  }

  #log(entry: Entry, what: string, cause: unknown): void {
    this.#office.hooks.log("Warn", `${nameOf(entry)} ${what}`, cause)
  }
}
