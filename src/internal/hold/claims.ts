/**
 * What hangs off the session of a partition: holds, waits and memberships, and what becomes of each of them. A claim that
 * outlives its session goes to the next one.
 */
import { CoordinatorClosed, CoordinatorError } from "../actor/errors.ts"
import type { Kernel } from "../actor/kernel.ts"
import type { Requests } from "../actor/lua.ts"
import type { Partition } from "../actor/partition.ts"
import {
  argsOf,
  Asking,
  type Claim,
  type ClaimVerb,
  type LossReason,
  type Outcome,
  Releasing,
  type Request,
  type Session
} from "./claim.ts"

export class Claims {
  readonly #all = new Map<string, Claim>()
  #waiting = 0
  #observing = 0

  readonly #partition: Partition
  readonly #kernel: Kernel

  constructor(partition: Partition) {
    this.#partition = partition
    this.#kernel = partition.kernel
  }

  get size(): number {
    return this.#all.size
  }

  isWaiting(): boolean {
    return this.#waiting > 0
  }

  /** From now until the result is called, the end of another session is something that is waited for. */
  watch(): () => void {
    this.#waiting++
    this.#partition.renew()
    let over = false
    return () => {
      if (over) return
      over = true
      this.#waiting--
    }
  }

  /** Whether anything can come to its mailbox. */
  isListening(): boolean {
    return this.#waiting > 0 || this.#observing > 0
  }

  // ---------------------------------------------------------------------------------------------------------------
  // Ask
  // ---------------------------------------------------------------------------------------------------------------

  #become(claim: Claim, state: Claim["state"]): void {
    this.#waiting += waits(state) - waits(claim.state)
    if (claim.observation !== undefined) this.#observing += Number(state === "held") - Number(claim.state === "held")
    claim.state = state
    if (state === "done") this.#all.delete(claim.id)
  }

  take(claim: Claim): void {
    if (claim.member?.released === true) {
      claim.state = "done"
      return claim.settle(closed)
    }
    this.#all.set(claim.id, claim)
    this.#send(claim)
  }

  reenter(): void {
    const claims = [...this.#all.values()].filter((claim) => claim.state === "idle")
    // Who makes a semaphore exist goes first.
    claims.sort((a, b) => Number(b.standing) - Number(a.standing))
    for (const claim of claims) this.#send(claim)
  }

  #send(claim: Claim): void {
    const session = this.#partition.session
    claim.session = session
    if (session === undefined) {
      // It is sent when the session is open, see `reenter`.
      this.#become(claim, "idle")
      if (this.#kernel.closed) return this.fail(claim, new CoordinatorError({ reason: new CoordinatorClosed({}) }))
      return this.#partition.open()
    }
    claim.known = claim.state !== "idle"
    this.#become(claim, "pending")
    claim.again = false
    this.#partition.request(claim.request = new Asking(claim, session))
  }

  /** What a request to take has come to. */
  answer(claim: Claim, reply: Requests[ClaimVerb]["reply"]): void {
    claim.request = undefined
    const session = this.#partition.session!
    switch (reply[0]) {
      case "granted":
        return this.#grant(claim, session, reply)
      case "queued":
        // The grant can have come through the mailbox before this reply.
        if (claim.state !== "pending") return
        if (claim.again) return this.#send(claim)
        this.#become(claim, "queued")
        claim.session = session
        session.waited = true
        this.#kernel.metrics.waiting()
        this.#kernel.listen(this.#partition)
        return this.#partition.expect(reply[2])
      case "observing":
        if (claim.state !== "pending") return
        session.waited = true
        // Whoever is told that it has joined knows how it is.
        claim.observation!.observe(reply.slice(1))
        this.#grant(claim, session, observing)
        return this.#kernel.listen(this.#partition)
      default:
        if (claim.state !== "pending") return
        if (reply[0] === "mismatch" && claim.capacity > 0 && claim.observation === undefined) {
          // Joined again after a loss, and others were faster with another size: theirs is in force.
          claim.verb = "semaphore.attach"
          return this.#send(claim)
        }
        if (claim.standing && claim.token > 0) {
          this.#kernel.log(
            "Warn",
            `partition ${this.#partition.index}: what was open before could not be opened again: ${reply[0]}`
          )
        }
        this.#become(claim, "done")
        claim.settle(reply as Outcome)
    }
  }

  #grant(claim: Claim, session: Session, reply: ReadonlyArray<unknown>): void {
    const token = Number(reply[1])
    const capacity = Number(reply[2])
    if (claim.state === "held") {
      // Granted again what we hold: Redis has forgotten the first grant.
      // An older one is an event that comes late, after the hold was made heavier.
      if (token > claim.token && claim.session === session) this.#partition.lose(session, "rolledBack")
      return
    }
    // Given up meanwhile: its release is on the way. And nothing is granted on a lease that has run out meanwhile.
    if (claim.state === "done" || session.lost !== undefined || session.expireIfDue()) return
    // What is taken again after a loss was counted before.
    if (claim.token === 0) this.#kernel.metrics.granted()
    this.#become(claim, "held")
    claim.session = session
    claim.token = token
    claim.capacity = capacity
    if (reply.length > 3) claim.payload = reply.slice(3)
    if (claim.standing && claim.observation === undefined) {
      // After a loss, whoever is back first creates it again as it was.
      claim.verb = "semaphore.create"
      claim.total = capacity
    }
    claim.acquiredAt = Date.now()
    claim.request = undefined
    claim.settle(granted)
  }

  /** No session can be had. */
  failAll(error: CoordinatorError): void {
    for (const claim of [...this.#all.values()]) this.fail(claim, error)
  }

  /** A request to take could not be answered. */
  fail(claim: Claim, error: CoordinatorError): void {
    if (claim.state === "done" || claim.state === "held") return
    claim.request = undefined
    if (claim.standing && claim.token > 0) {
      // It was granted once, so nobody waits for the answer.
      if (this.#kernel.closed) {
        this.#become(claim, "done")
        return claim.observation?.closed?.()
      }
      // It is tried again with the next heartbeat.
      this.#kernel.log(
        "Warn",
        `partition ${this.#partition.index}: what was open before could not be opened again`,
        error
      )
      return this.#become(claim, "idle")
    }
    this.#become(claim, "done")
    claim.settle(["failed", error])
  }

  /** Gives a hold back, or leaves the queue, and says when that is certain. */
  release(claim: Claim, done: () => void): void {
    const { session, state } = claim
    if (claim.releasing !== undefined) return claim.releasing.also(done)
    this.#become(claim, "done")
    claim.released = true
    if (claim.standing) this.#dismiss(claim)
    if (state === "idle" || state === "done" || session === undefined || session.lost !== undefined) return done()
    if (state === "pending" && claim.request !== undefined) {
      if (this.#partition.withdraw(claim.request as unknown as Request) && !claim.known) return done()
    }
    if (state === "held") this.#kernel.metrics.released()
    this.#partition.request(claim.releasing = new Releasing(claim, done))
  }

  // What was asked for under a membership ends before it does.
  #dismiss(member: Claim): void {
    for (const claim of [...this.#all.values()]) {
      if (claim.member !== member) continue
      if (claim.state === "held") {
        claim.lose("closed")
      } else {
        this.release(claim, () => {})
        claim.settle(closed)
      }
    }
  }

  /** Somebody else has ended it: what runs under it is interrupted. */
  revoke(claim: Claim): void {
    if (claim.state !== "held") return
    claim.lose("revoked")
    this.#kernel.watchOverruns([claim])
  }

  /** It is over by the word of the actor, and nothing is left to give back. */
  forget(claim: Claim): void {
    if (claim.state !== "held") return
    // What was lost with its session is not counted any more.
    if (claim.session?.lost === undefined) this.#kernel.metrics.released()
    this.#become(claim, "done")
    claim.released = true
  }

  // ---------------------------------------------------------------------------------------------------------------
  // Hear
  // ---------------------------------------------------------------------------------------------------------------

  hear(session: Session, event: ReadonlyArray<unknown>): void {
    if (event[0] === "each") {
      const ids = event[1] as ReadonlyArray<string>
      const own = event[2] as ReadonlyArray<unknown>
      const reply = event.slice(3)
      for (let at = 0; at < ids.length; at++) {
        this.#tell(ids[at]!, session, own.length === 0 ? reply : [...reply, own[at]])
      }
      return
    }
    const claim = this.#all.get(String(event[1]))
    if (claim === undefined) return
    switch (event[0]) {
      case "granted":
        return this.#grant(claim, session, event.slice(1))
      case "changed":
        return claim.observation?.observe(event.slice(2))
      case "again":
        if (claim.state === "queued") this.#send(claim)
        // The reply that it waits is still to come.
        else if (claim.state === "pending") claim.again = true
        return
      case "revoked":
        return this.revoke(claim)
      case "refused":
        return this.#settle(claim, ["tooBig", Number(event[2])])
    }
  }

  // One of the claims that an event is about: it has the answer that it waits for.
  #tell(id: string, session: Session, reply: ReadonlyArray<unknown>): void {
    const claim = this.#all.get(id)
    if (claim === undefined) return
    if (reply[0] === "granted") return this.#grant(claim, session, reply)
    this.#settle(claim, reply as unknown as Outcome)
  }

  #settle(claim: Claim, outcome: Outcome): void {
    if (waits(claim.state) === 0) return
    this.#become(claim, "done")
    claim.settle(outcome)
  }

  /** Asks what has become of everything that waits, and how it is with what is observed. */
  check(session: Session): void {
    for (const claim of this.#all.values()) {
      if (claim.observation !== undefined && claim.state === "held") this.#look(claim, session)
      if (claim.state !== "queued") continue
      this.#partition.request({
        verb: claim.check,
        key: claim.key,
        args: [claim.id],
        session,
        moot: () => {},
        settle: (reply) => {
          if (claim.state !== "queued" || claim.session !== session) return
          if (reply[0] === "granted") return this.#grant(claim, session, reply)
          if (reply[0] === "queued") return this.#partition.expect(reply[2])
          // The actor does not know it, though nobody took it out: it takes its place again.
          this.#send(claim)
        },
        fail: (error) => this.#kernel.log("Warn", "a resync was refused", error)
      })
    }
  }

  // To join again is to be told how it is.
  #look(claim: Claim, session: Session): void {
    this.#partition.request({
      verb: claim.verb,
      key: claim.key,
      args: argsOf(claim) as Requests[ClaimVerb]["args"],
      session,
      moot: () => {},
      settle: (reply) => {
        if (reply[0] === "observing" && claim.state === "held") claim.observation!.observe(reply.slice(1))
      },
      fail: (error) => this.#kernel.log("Warn", "a membership could not be checked", error)
    })
  }

  /** The session is over. Answers what was held in it; everything else goes to the next one, if there is one. */
  leaveSession(reason: LossReason): ReadonlyArray<Claim> {
    const held: Array<Claim> = []
    for (const claim of [...this.#all.values()]) {
      claim.request = undefined
      if (claim.state === "held" && !claim.standing) {
        this.#all.delete(claim.id)
        held.push(claim)
      } else if (reason === "closed") {
        this.#become(claim, "idle")
        this.fail(claim, new CoordinatorError({ reason: new CoordinatorClosed({}) }))
      } else {
        const observed = claim.state === "held"
        this.#become(claim, "idle")
        if (observed) claim.observation?.lost?.()
      }
    }
    return held
  }
}

const granted: Outcome = ["granted"]

const closed: Outcome = ["closed"]

// To the kernel, to be a member is to hold something that nobody else can take.
const observing = ["granted", 1, 1] as const

const waits = (state: Claim["state"]): number => state === "pending" || state === "queued" ? 1 : 0
