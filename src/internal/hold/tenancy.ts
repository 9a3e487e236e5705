/**
 * The holds, waits and memberships of one channel, and the outcome of each of them. Those that outlive a session go to
 * the next one.
 */

import type { Channel, Losses, Tenant } from "../actor/channel.ts"
import type { CoordinatorError } from "../actor/errors.ts"
import type { Partition } from "../actor/kernel.ts"
import type { Office } from "../actor/office.ts"
import type { Request } from "../actor/sending.ts"
import type { LossReason, Session } from "../actor/session.ts"
import { coordinatorError, overloaded } from "../actor/transport.ts"
import type { RedisError } from "../redis/errors.ts"
import { type Asker, Asking } from "./asking.ts"
import { type ClaimReply, type Entry, type Keeper, mostStale, nameOf, type Outcome } from "./claim.ts"
import { Claims, isWaiting } from "./claims.ts"
import { Clock } from "./clock.ts"
import { Ending } from "./ending.ts"
import { Hold } from "./hold.ts"
import { Kept } from "./kept.ts"
import { Membership } from "./membership.ts"
import { watchOverruns } from "./overruns.ts"
import { Releases } from "./releases.ts"
import { Upkeep } from "./upkeep.ts"

const granted: Outcome = ["granted"]
const closed: Outcome = ["closed"]
const busy: Outcome = ["busy"]

const ignore = () => {}

export class Tenancy implements Tenant, Keeper, Asker {
  readonly #claims = new Claims()
  readonly #clock: Clock
  readonly #releases: Releases
  readonly upkeep: Upkeep
  readonly #ending: Ending

  readonly kernel: Office
  readonly partition: Partition
  readonly kept: Kept
  readonly #channel: () => Channel

  constructor(kernel: Office, partition: Partition, channel: () => Channel) {
    this.kernel = kernel
    this.partition = partition
    this.#channel = channel
    this.#clock = new Clock(kernel.io)
    this.#releases = new Releases(channel, kernel)
    this.kept = new Kept(kernel.io, (hold, session) => this.#releases.begin(hold, session, ignore))
    this.upkeep = new Upkeep(kernel, channel, this.#claims, {
      again: (entry) => this.#send(entry, true),
      ended: (hold) => {
        this.revoke(hold)
        this.release(hold, ignore)
      },
      missed: (session) => this.missed(session)
    })
    this.#ending = new Ending(kernel, channel, this.#claims, {
      failed: (entry, error) => this.failed(entry, error, false),
      release: (entry) => this.release(entry, ignore),
      log: (entry, what) => this.#log(entry, what)
    })
  }

  get channel(): Channel {
    return this.#channel()
  }

  get size(): number {
    return this.#claims.size
  }

  readonly isWaiting = (): boolean => this.#claims.waiting > 0

  readonly wanted = (): string | undefined => this.#claims.queued?.claim.place.key

  readonly isListening = (): boolean => this.#claims.waiting > 0 || this.#claims.observing > 0 || this.kept.size > 0

  // ---------------------------------------------------------------------------------------------------------------
  // Ask
  // ---------------------------------------------------------------------------------------------------------------

  /** Asks for something new. */
  take(entry: Entry): void {
    const member = entry instanceof Hold ? entry.member : undefined
    if (this.kernel.isClosing()) return this.#finish(entry, ["failed", this.channel.closedError()])
    if (member?.state === "done") return this.#finish(entry, closed)
    if (this.kept.size > 0 && entry instanceof Hold && this.#takeKept(entry)) return
    const { maxPending } = this.kernel.settings
    if (this.channel.session === undefined && this.#claims.size >= maxPending) {
      return this.#finish(entry, ["failed", overloaded(this.#claims.size, entry.claim.place.key)])
    }
    this.#claims.add(entry)
    member?.dependents.add(entry)
    entry.askedAt = this.#clock.now
    this.#send(entry, false)
  }

  // Takes what its process has kept, without asking. If it is in use here, the claim waits in Redis, in its turn.
  #takeKept(hold: Hold): boolean {
    const { patience, place } = hold.claim
    const stretch = this.kept.resting(hold.claim, hold.weight)
    if (stretch === undefined) {
      if (this.kept.makeWay(place, patience === undefined)) return false
      this.#finish(hold, busy)
      return true
    }
    const { id, session } = stretch
    // The clocks are read anew: many can follow each other in one turn of the event loop.
    if (session.lost !== undefined || session.expireIfDue()) return false
    const { io, transport } = this.kernel
    const token = transport.commands.isReady() && !this.channel.away ? this.kept.next(stretch) : undefined
    if (token === undefined) {
      this.kept.surrender(stretch)
      return false
    }
    hold.id = id
    hold.known = true
    hold.stretch = stretch
    this.#claims.add(hold)
    hold.member?.dependents.add(hold)
    const now = io.now()
    hold.askedAt = now
    this.#hold(hold, session, token, now, io.wall())
    return true
  }

  #finish(entry: Entry, outcome: Outcome): void {
    this.#claims.become(entry, "done")
    entry.settle(outcome)
  }

  #send(entry: Entry, urgent: boolean): void {
    const { channel } = this
    const { session } = channel
    const again = entry.session === session
    entry.session = session
    if (session === undefined) {
      // It is sent when there is a session, see `opened`.
      this.#claims.become(entry, "idle")
      return channel.open()
    }
    entry.known = entry.state !== "idle" || again
    entry.queued = entry.known && entry.queued
    if (entry instanceof Hold) {
      entry.stretch = undefined
      entry.recalled = false
    }
    this.#claims.become(entry, "asked")
    entry.again = false
    const asking = new Asking(this, entry, session, urgent, entry.stale >= mostStale)
    entry.request = asking
    channel.outbox.request(asking)
  }

  readonly opened = (): void => {
    const idle = this.#claims.idle()
    // Claims that make a resource exist go first.
    for (const entry of idle) if (entry instanceof Membership && entry.state === "idle") this.#send(entry, true)
    for (const entry of idle) if (entry.state === "idle") this.#send(entry, true)
  }

  // ---------------------------------------------------------------------------------------------------------------
  // Answers
  // ---------------------------------------------------------------------------------------------------------------

  /** The reply to a request to hold or to join. */
  answered(entry: Entry, reply: ClaimReply): void {
    entry.request = undefined
    const { session } = this.channel
    if (session === undefined || entry.session !== session) return
    switch (reply[0]) {
      case "kept":
        return this.#grant(entry, session, reply, 1, Number(reply[2]))
      case "granted":
        return this.#grant(entry, session, reply, 1)
      case "joined":
        return this.#join(entry, reply.slice(1))
      case "queued":
        return this.#queue(entry)
      case "stale":
        return this.#clear(entry, session)
      default:
        if (entry.state !== "asked") return
        return this.#refuse(entry, reply as Outcome)
    }
  }

  #refuse(entry: Entry, outcome: Outcome): void {
    if (entry instanceof Membership && entry.joined) {
      this.#log(entry, `could not be joined again (${outcome[0]}): the session retries at its next heartbeat`)
      return this.#claims.become(entry, "idle")
    }
    // The session still owns a waiter that is refused in the queue.
    if (outcome[0] === "exceeds" && entry.queued) this.release(entry, ignore)
    this.#finish(entry, outcome)
  }

  #queue(entry: Entry): void {
    // The grant can have come through the mailbox before this reply.
    if (entry.state !== "asked") return
    entry.queued = true
    if (entry.again) return this.#send(entry, true)
    this.#claims.become(entry, "queued")
    if (!entry.waited) this.kernel.hooks.metrics.waiting()
    entry.waited = true
    this.channel.listen()
    const { patience } = entry.claim
    if (patience === undefined) return
    this.kernel.io.after(patience, () => {
      if (!isWaiting(entry)) return
      this.release(entry, ignore)
      entry.settle(busy)
    })
  }

  // An expired session stands in the way: it is reaped, and the claim asks again.
  #clear(entry: Entry, session: Session): void {
    if (entry.state !== "asked") return
    entry.stale++
    void this.partition.reaper.tickInTime().then(() => {
      if (entry.state === "asked" && entry.session === session && session.lost === undefined) this.#send(entry, true)
    })
  }

  // The token stands at that place, and the payload behind it. With several tokens, the process may keep it.
  #grant(entry: Entry, session: Session, told: ReadonlyArray<unknown>, at: number, tokens = 1): void {
    if (!(entry instanceof Hold)) return
    const token = Number(told[at])
    if (entry.state === "held") {
      // Granted again what it holds: Redis has forgotten the first grant. An older one is an event that comes late, after
      // the hold was made heavier.
      if (token > entry.token && entry.session === session) this.channel.lose(session, "rolledBack")
      return
    }
    // Ended meanwhile: its release is on the way. And nothing is granted on a lease that has run out meanwhile.
    if (entry.state === "done" || !this.#clock.isTrusted(session)) return
    if (tokens > 1) {
      if (!entry.recalled) {
        entry.stretch = this.kept.begin(entry, session, token, tokens)
        this.channel.listen()
      }
    } else if (told.length > at + 1) {
      entry.payload = told.slice(at + 1)
    }
    this.#hold(entry, session, token, this.#clock.now, this.#clock.wall)
  }

  #hold(hold: Hold, session: Session, token: number, now: number, wall: number): void {
    const { hooks } = this.kernel
    hooks.metrics.granted()
    hold.heldAt = now
    if (hold.waited) hooks.metrics.waited(now - hold.askedAt)
    this.#claims.become(hold, "held")
    hold.session = session
    hold.token = token
    hold.since = wall
    hold.request = undefined
    if (hold.again) this.#verifyAgain(hold, session)
    hold.settle(granted)
  }

  // Events may have been missed since it was asked for, which the answer is older than.
  #verifyAgain(entry: Entry, session: Session): void {
    entry.again = false
    this.upkeep.verify(session, [entry])
  }

  #join(entry: Entry, state: ReadonlyArray<unknown>): void {
    if (!(entry instanceof Membership) || entry.state === "done") return
    const first = !entry.joined
    entry.request = undefined
    if (entry.state !== "held") this.#claims.become(entry, "held")
    // Before it settles: the fiber that has joined may ask for the state at once.
    entry.welcome(state)
    if (entry.again && entry.session !== undefined) this.#verifyAgain(entry, entry.session)
    this.channel.listen()
    if (first) entry.settle(granted)
  }

  readonly refused = (error: CoordinatorError): void => {
    for (const entry of this.#claims.values()) {
      this.failed(entry, coordinatorError(error, entry.claim.place.key), false)
    }
  }

  /** A request to hold or to join could not be answered. */
  failed(entry: Entry, error: CoordinatorError, sent: boolean): void {
    entry.request = undefined
    if (entry.state === "done" || entry.state === "held") return
    if (entry instanceof Membership && entry.joined) {
      // It was joined before, so no caller waits for the answer.
      if (this.kernel.isClosing()) {
        this.#claims.become(entry, "done")
        return entry.observer.closed?.()
      }
      this.#log(entry, "could not be joined again: the session retries at its next heartbeat", error)
      return this.#claims.become(entry, "idle")
    }
    if (entry.state === "asked" && entry.queued && !this.kernel.isClosing()) {
      // The claim has its place in the queue: this request only verified that.
      this.#log(entry, "is still waited for, and asks again with the next heartbeat", error)
      this.#claims.become(entry, "queued")
      entry.again = true
      return
    }
    // Its outcome may not be known: it must not be granted to a claim that is over.
    if (sent) this.release(entry, ignore)
    else this.#claims.become(entry, "done")
    entry.settle(["failed", error])
  }

  /** Redis has been away for longer than a question waits. */
  expired(entry: Entry, error: CoordinatorError): void {
    if (!isWaiting(entry) && entry.state !== "idle") return
    // No caller waits for it: it is joined again when Redis is back.
    if (entry instanceof Membership && entry.joined) return
    this.release(entry, ignore)
    entry.settle(["failed", error])
  }

  /** Questions that no session could be had for, or that wait for their turn. */
  readonly expire = (before: number, cause: RedisError): void => {
    for (const entry of this.#claims.values()) {
      const { place, question } = entry.claim
      if (question !== true || entry.state !== "idle" && entry.state !== "queued" || entry.askedAt > before) continue
      this.expired(entry, this.kernel.transport.late(place.key, cause, entry.state === "idle"))
    }
  }

  // ---------------------------------------------------------------------------------------------------------------
  // Release
  // ---------------------------------------------------------------------------------------------------------------

  /** Releases a hold, leaves a queue or a resource. `done` is called when that is certain, or cannot be for now. */
  readonly release = (entry: Entry, done: () => void): void => {
    const { session, state } = entry
    if (entry.releasing !== undefined) return entry.releasing.also(done)
    if (entry instanceof Hold && (entry.stretch !== undefined || entry.claim.cached === true) && this.#keep(entry)) {
      return done()
    }
    this.#claims.become(entry, "done")
    if (entry instanceof Membership) this.#dismiss(entry)
    else if (entry instanceof Hold) entry.end()
    // A claim that is idle in a session was requested there, and the request has failed: Redis may know the claim.
    if (state === "done" || session === undefined || session.lost !== undefined) return done()
    if (state === "asked" && entry.request !== undefined) {
      if (this.channel.outbox.withdraw(entry.request as unknown as Request) && !entry.known) return done()
    }
    if (state === "held" && entry instanceof Hold) this.#released(entry)
    this.#releases.begin(entry, session, done)
  }

  // Keeps what it could release, for the next claim here.
  #keep(hold: Hold): boolean {
    const { claim: { cached }, following, loss, member, session, state, verifying } = hold
    if (state !== "held") return false
    const isWell = cached === true && loss === undefined && following === undefined && verifying === 0 &&
      member?.state !== "done" && session?.lost === undefined && !this.kernel.isClosing()
    if (!this.kept.rest(hold, isWell)) return false
    this.#released(hold)
    this.#claims.become(hold, "done")
    return true
  }

  // Another process wants what this one may keep.
  #recall(session: Session, id: string): void {
    if (this.kept.recall(id, session)) return
    const entry = this.#claims.get(id)
    if (!(entry instanceof Hold) || entry.session !== session) return
    entry.recalled = true
    this.kept.recalled(entry.claim.place.key)
  }

  #released(hold: Hold): void {
    // The clock of a kept one is read anew, and can be ahead of that of the turn.
    this.kernel.hooks.metrics.released(Math.max(0, this.#clock.now - hold.heldAt))
  }

  // The claims under a membership end before it does.
  #dismiss(member: Membership): void {
    this.kept.surrenderResting(member.claim.place.key)
    for (const entry of member.dependents.values()) {
      if (entry instanceof Hold && entry.state === "held") {
        this.#cease(entry)
      } else {
        this.release(entry, ignore)
        entry.settle(closed)
      }
    }
  }

  // Its scope may stay open: as after any loss, the margin is for finalizers, and then the hold is released for them.
  #cease(hold: Hold): void {
    const { channel: { margin }, kernel } = this
    hold.lose("closed")
    watchOverruns(kernel, margin, [hold])
    const timer = kernel.io.after(margin, () => {
      if (hold.state === "held") this.release(hold, ignore)
    })
    void hold.ended().then(() => timer.cancel())
  }

  /** Another session has ended it: the program under it is interrupted. */
  revoke(hold: Hold): void {
    if (hold.state !== "held") return
    hold.lose("revoked")
    watchOverruns(this.kernel, this.channel.margin, [hold])
  }

  /** The actor has ended the hold, so there is nothing to release, unless verifying it has made a new claim under its id. */
  forget(hold: Hold): void {
    if (hold.state !== "held") return
    if (hold.verifying > 0) return this.release(hold, ignore)
    // A hold that was lost with its session is not counted any more.
    if (hold.session?.lost === undefined) this.#released(hold)
    this.#claims.become(hold, "done")
    hold.end()
  }

  // ---------------------------------------------------------------------------------------------------------------
  // Events
  // ---------------------------------------------------------------------------------------------------------------

  readonly heard = (session: Session, event: ReadonlyArray<unknown>): void => {
    if (event[0] === "each") {
      const ids = (event[1] as string).split(" ")
      const single = event[2] as ReadonlyArray<unknown>
      const answer = event.slice(3)
      for (let at = 0; at < ids.length; at++) {
        this.#told(ids[at]!, session, single.length === 0 ? answer : answer.concat([single[at]]))
      }
      return
    }
    if (event[0] === "recall") return this.#recall(session, String(event[1]))
    if (event[0] === "doubt") return this.missed(session)
    const entry = this.#claims.get(String(event[1]))
    if (entry === undefined || entry.session !== session) return
    switch (event[0]) {
      case "granted":
        return this.#grant(entry, session, event, 2)
      case "changed":
        return entry instanceof Membership ? entry.hear(event.slice(2)) : undefined
      case "again":
        if (entry.state === "queued") this.#send(entry, true)
        // The reply that it waits for is still to come.
        else if (entry.state === "asked") entry.again = true
        return entry.repeated?.()
      case "revoked":
        return entry instanceof Hold ? this.revoke(entry) : undefined
    }
  }

  // One of the claims that an event is about: it has the answer that it waits for.
  #told(id: string, session: Session, answer: ReadonlyArray<unknown>): void {
    const entry = this.#claims.get(id)
    if (entry === undefined || entry.session !== session) return
    if (answer[0] === "granted") return this.#grant(entry, session, answer, 1)
    if (answer[0] === "joined") return this.#join(entry, answer.slice(1))
    if (!isWaiting(entry)) return
    // The event can come before the reply that it has joined the queue.
    entry.queued = true
    this.#refuse(entry, answer as unknown as Outcome)
  }

  /** Events may be missing: every claim asks again, under the same id, for its state. */
  readonly missed = (session: Session): void => {
    // One that was recalled may be among them, or still be on its way.
    this.kept.surrenderAll()
    for (const entry of this.#claims.values()) {
      if (entry instanceof Hold && entry.state === "asked") entry.recalled = true
    }
    this.upkeep.verify(session, this.#claims.values())
  }

  readonly doubt = (): void => this.upkeep.doubt()

  readonly beat = (session: Session): void => {
    this.opened()
    for (const entry of this.#claims.repeated(session)) this.#send(entry, true)
    this.#releases.beat()
    this.upkeep.beat(session)
  }

  // ---------------------------------------------------------------------------------------------------------------
  // End
  // ---------------------------------------------------------------------------------------------------------------

  /** The session is over. Holds are lost; everything else goes to the next session, if there is one. */
  readonly lost = (reason: LossReason): Losses => {
    this.kept.clear()
    this.#releases.lost()
    return this.#ending.lose(reason)
  }

  /** Ends holds, and waits until their users have released them; all other claims end at once. */
  readonly close = (): Promise<void> => {
    this.kept.surrenderAll()
    return this.#ending.close()
  }

  #log(entry: Entry, what: string, cause?: unknown): void {
    this.kernel.hooks.log("Warn", `${nameOf(entry)} ${what}`, cause)
  }
}
