/**
 * The holds, waits and memberships of one channel, and what becomes of each of them. What outlives a session goes to the
 * next one.
 */

import type { Channel, Tenant } from "../actor/channel.ts"
import { CoordinatorClosed, CoordinatorError, Overloaded } from "../actor/errors.ts"
import { guard } from "../actor/hooks.ts"
import type { Kernel, Partition } from "../actor/kernel.ts"
import type { Request } from "../actor/outbox.ts"
import type { LossReason, Session } from "../actor/session.ts"
import type { RedisError } from "../redis/errors.ts"
import { type Asker, Asking, Releasing } from "./asking.ts"
import { type ClaimReply, type ClaimVerb, type Entry, type Keeper, mostStale, type Outcome } from "./claim.ts"
import { Hold } from "./hold.ts"
import { Kept, type Stretch } from "./kept.ts"
import { describe } from "./loss.ts"
import { Membership } from "./membership.ts"

// A claim touches its resource this often: four times before Redis drops keys that no session touches.
const touchEvery = 6 * 3_600_000

const granted: Outcome = ["granted"]
const closed: Outcome = ["closed"]
const busy: Outcome = ["busy"]

const waits = (state: Entry["state"]): number => state === "asked" || state === "queued" ? 1 : 0

const ignore = () => {}

/** The clocks, read once in a turn of the event loop: a thousand grants can come with one reply. */
interface Turn {
  readonly now: number
  readonly wall: number
  /** It was trusted in this turn. */
  trusted: Session | undefined
}

export class Tenancy implements Tenant, Keeper, Asker {
  readonly #all = new Map<string, Entry>()
  #waiting = 0
  #observing = 0
  #touched: number
  #verified: number
  #turn: Turn | undefined = undefined
  // What has become of a claim could not be asked.
  #unverified = false
  // Releases that Redis refused, made again with the next heartbeat.
  #owed: Array<Releasing> = []

  readonly kernel: Kernel
  readonly partition: Partition
  readonly kept: Kept
  readonly #channel: () => Channel

  constructor(kernel: Kernel, partition: Partition, channel: () => Channel) {
    this.kernel = kernel
    this.partition = partition
    this.#channel = channel
    this.kept = new Kept(kernel.io, (stretch) => this.#surrender(stretch))
    this.#touched = kernel.io.now()
    this.#verified = this.#touched
  }

  get channel(): Channel {
    return this.#channel()
  }

  get size(): number {
    return this.#all.size
  }

  #time(): Turn {
    if (this.#turn !== undefined) return this.#turn
    const { io } = this.kernel
    io.defer(() => {
      this.#turn = undefined
    })
    return this.#turn = { now: io.now(), wall: io.wall(), trusted: undefined }
  }

  #isTrusted(session: Session): boolean {
    const turn = this.#time()
    if (session.lost !== undefined) return false
    if (turn.trusted !== session) {
      if (session.expireIfDue()) return false
      turn.trusted = session
    }
    return true
  }

  readonly given = (): number => this.kept.given

  readonly isWaiting = (): boolean => this.#waiting > 0

  readonly isListening = (): boolean => this.#waiting > 0 || this.#observing > 0 || this.kept.size > 0

  // ---------------------------------------------------------------------------------------------------------------
  // Ask
  // ---------------------------------------------------------------------------------------------------------------

  #become(entry: Entry, state: Entry["state"]): void {
    this.#waiting += waits(state) - waits(entry.state)
    if (entry instanceof Membership) this.#observing += Number(state === "held") - Number(entry.state === "held")
    const before = entry.state
    entry.state = state
    if (state === "done" && before !== "done") {
      this.#all.delete(entry.id)
      if (entry instanceof Hold) entry.member?.dependents.delete(entry)
    }
  }

  /** Asks for something new. */
  take(entry: Entry): void {
    const member = entry instanceof Hold ? entry.member : undefined
    if (this.kernel.isClosing()) return this.#finish(entry, ["failed", this.channel.closedError()])
    if (member?.state === "done") return this.#finish(entry, closed)
    if (this.kept.size > 0 && entry instanceof Hold && this.#takeKept(entry)) return
    const { maxPending } = this.kernel.settings
    if (this.channel.session === undefined && this.#all.size >= maxPending) {
      const reason = new Overloaded({ pending: this.#all.size })
      return this.#finish(entry, ["failed", new CoordinatorError({ reason })])
    }
    this.#all.set(entry.id, entry)
    member?.dependents.add(entry)
    entry.askedAt = this.#time().now
    this.#send(entry, false)
  }

  // Takes what its process has kept, without asking. If it is in use here, the claim waits in Redis, in its turn.
  #takeKept(hold: Hold): boolean {
    const { patience, place } = hold.claim
    const stretch = this.kept.named(place.key)
    if (stretch === undefined) return false
    if (stretch.resting === undefined) {
      if (patience === undefined) return false
      this.#finish(hold, busy)
      return true
    }
    const { id, session } = stretch
    // The clocks are read anew: many can follow each other in one turn of the event loop.
    if (session.lost !== undefined || session.expireIfDue()) return false
    const { io, transport } = this.kernel
    const token = transport.commands.isReady() && !this.channel.away ? this.kept.next(stretch) : undefined
    if (token === undefined) {
      this.#surrender(stretch)
      return false
    }
    hold.id = id
    hold.known = true
    hold.stretch = stretch
    this.#all.set(id, hold)
    const now = io.now()
    hold.askedAt = now
    this.#hold(hold, session, token, now, io.wall())
    return true
  }

  #finish(entry: Entry, outcome: Outcome): void {
    this.#become(entry, "done")
    entry.settle(outcome)
  }

  #send(entry: Entry, urgent: boolean): void {
    const { channel } = this
    const { session } = channel
    const again = entry.session === session
    entry.session = session
    if (session === undefined) {
      // It is sent when there is a session, see `opened`.
      this.#become(entry, "idle")
      return channel.open()
    }
    entry.known = entry.state !== "idle" || again
    entry.queued = entry.known && entry.queued
    if (entry instanceof Hold) {
      entry.stretch = undefined
      entry.recalled = false
    }
    this.#become(entry, "asked")
    entry.again = false
    const asking = new Asking(this, entry, session, urgent, entry.stale >= mostStale)
    entry.request = asking
    channel.outbox.request(asking)
  }

  // A session is open, so sending settles nothing at once: the claims are walked without a copy.
  readonly opened = (): void => {
    // What makes a resource exist goes first.
    for (const entry of this.#all.values()) {
      if (entry.state === "idle" && entry instanceof Membership) this.#send(entry, true)
    }
    for (const entry of this.#all.values()) if (entry.state === "idle") this.#send(entry, true)
  }

  // ---------------------------------------------------------------------------------------------------------------
  // Answers
  // ---------------------------------------------------------------------------------------------------------------

  /** What a request to hold or to join has come to. */
  answered(entry: Entry, reply: ClaimReply): void {
    entry.request = undefined
    const { session } = this.channel
    if (session === undefined || entry.session !== session) return
    switch (reply[0]) {
      case "kept":
        return this.#grant(entry, session, reply)
      case "granted":
        return this.#grant(entry, session, reply)
      case "joined":
        return this.#join(entry, reply.slice(1))
      case "queued":
        return this.#queue(entry)
      case "stale":
        return this.#clear(entry, session)
      default:
        if (entry.state === "asked") this.#refuse(entry, reply as Outcome)
    }
  }

  #queue(entry: Entry): void {
    // The grant can have come through the mailbox before this reply.
    if (entry.state !== "asked") return
    entry.queued = true
    if (entry.again) return this.#send(entry, true)
    this.#become(entry, "queued")
    this.kernel.hooks.metrics.waiting()
    this.channel.listen()
    const { patience } = entry.claim
    if (patience === undefined) return
    this.kernel.io.after(patience, () => {
      if (waits(entry.state) === 0) return
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

  #refuse(entry: Entry, outcome: Outcome): void {
    if (entry instanceof Membership && entry.joined) this.#log(entry, `could not be joined again: ${outcome[0]}`)
    this.#finish(entry, outcome)
  }

  #grant(entry: Entry, session: Session, reply: ReadonlyArray<unknown>): void {
    if (!(entry instanceof Hold)) return
    const token = Number(reply[1])
    if (entry.state === "held") {
      // Granted again what it holds: Redis has forgotten the first grant. An older one is an event that comes late, after
      // the hold was made heavier.
      if (token > entry.token && entry.session === session) this.channel.lose(session, "rolledBack")
      return
    }
    // Given up meanwhile: its release is on the way. And nothing is granted on a lease that has run out meanwhile.
    if (entry.state === "done" || !this.#isTrusted(session)) return
    if (reply.length > 2) entry.payload = reply.slice(2)
    if (reply[0] === "kept" && !entry.recalled) {
      entry.stretch = this.kept.begin(entry, session, token)
      this.channel.listen()
    }
    const { now, wall } = this.#time()
    this.#hold(entry, session, token, now, wall)
  }

  #hold(hold: Hold, session: Session, token: number, now: number, wall: number): void {
    const { hooks } = this.kernel
    hooks.metrics.granted()
    hold.heldAt = now
    if (hold.state === "queued") hooks.metrics.waited(now - hold.askedAt)
    this.#become(hold, "held")
    hold.session = session
    hold.token = token
    hold.since = wall
    hold.request = undefined
    hold.settle(granted)
  }

  #join(entry: Entry, state: ReadonlyArray<unknown>): void {
    if (!(entry instanceof Membership) || entry.state === "done") return
    const first = !entry.joined
    entry.joined = true
    entry.request = undefined
    if (entry.state !== "held") this.#become(entry, "held")
    // First the state: the fiber that has joined may ask for it at once.
    entry.observer.observe(state)
    for (const change of entry.early.splice(0)) entry.observer.observe(change)
    this.channel.listen()
    if (first) entry.settle(granted)
  }

  readonly refused = (error: CoordinatorError): void => {
    for (const entry of [...this.#all.values()]) this.failed(entry, error, false)
  }

  /** A request to hold or to join could not be answered. */
  failed(entry: Entry, error: CoordinatorError, sent: boolean): void {
    entry.request = undefined
    if (entry.state === "done" || entry.state === "held") return
    if (entry instanceof Membership && entry.joined) {
      // It was joined before, so no caller waits for the answer.
      if (this.kernel.isClosing()) {
        this.#become(entry, "done")
        return entry.observer.closed?.()
      }
      this.#log(entry, "could not be joined again, and is with the next heartbeat", error)
      return this.#become(entry, "idle")
    }
    if (entry.state === "asked" && entry.queued && !this.kernel.isClosing()) {
      // It only wanted to know what has become of it, and has its place in the queue.
      this.#log(entry, "is still waited for, and asks again with the next heartbeat", error)
      this.#become(entry, "queued")
      entry.again = true
      return
    }
    // What it has come to may not be known: it must not be granted to a claim that is over.
    if (sent) this.release(entry, ignore)
    else this.#become(entry, "done")
    entry.settle(["failed", error])
  }

  /** Redis has been away for longer than a question waits. */
  expired(entry: Entry, error: CoordinatorError): void {
    if (waits(entry.state) === 0 && entry.state !== "idle") return
    // No caller waits for it: it is joined again when Redis is back.
    if (entry instanceof Membership && entry.joined) return
    this.release(entry, ignore)
    entry.settle(["failed", error])
  }

  /** Questions that no session could be had for, or that wait for their turn. */
  readonly expire = (before: number, cause: RedisError): void => {
    for (const entry of [...this.#all.values()]) {
      const { place, question } = entry.claim
      if (question !== true || entry.state !== "idle" && entry.state !== "queued" || entry.askedAt > before) continue
      this.expired(entry, this.kernel.transport.late(place.key, cause))
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
    this.#become(entry, "done")
    if (entry instanceof Membership) this.#dismiss(entry)
    // One that is idle in a session was asked for in it, and failed: Redis may know it.
    if (state === "done" || session === undefined || session.lost !== undefined) return done()
    if (state === "asked" && entry.request !== undefined) {
      if (this.channel.outbox.withdraw(entry.request as unknown as Request) && !entry.known) return done()
    }
    if (state === "held" && entry instanceof Hold) this.#released(entry)
    const releasing = new Releasing(this, entry, session, done)
    entry.releasing = releasing
    this.channel.outbox.request(releasing)
  }

  // Keeps what it could release, for the next claim here. If not, it is released with the last token.
  #keep(hold: Hold): boolean {
    const { claim: { cached, place }, following, id, loss, session, state, verifying } = hold
    if (state !== "held") return false
    // None if it has been ended meanwhile.
    const stretch = this.kept.of(id)
    const isWell = cached === true && loss === undefined && following === undefined && verifying === 0 &&
      session?.lost === undefined && !this.kernel.isClosing()
    if (stretch === undefined || !isWell || !this.kept.rest(stretch, hold)) {
      this.kept.released(place.key)
      if (stretch !== undefined) this.kept.end(stretch)
      return false
    }
    this.#released(hold)
    this.#become(hold, "done")
    return true
  }

  // What is not in use is given back; the rest will be, when it is released.
  #surrender(stretch: Stretch): void {
    const hold = stretch.resting
    this.kept.end(stretch)
    if (hold === undefined) return
    this.kept.released(stretch.key)
    const releasing = new Releasing(this, hold, stretch.session, ignore)
    hold.releasing = releasing
    this.channel.outbox.request(releasing)
  }

  // Another process wants what this one may keep.
  #recall(session: Session, id: string): void {
    const stretch = this.kept.of(id)
    const entry = this.#all.get(id)
    if (stretch?.session === session) {
      this.#surrender(stretch)
      this.kept.recalled(stretch.key)
    } else if (entry instanceof Hold && entry.session === session) {
      entry.recalled = true
      this.kept.recalled(entry.claim.place.key)
    }
  }

  #released(hold: Hold): void {
    // The clock of a kept one is read anew, and can be ahead of that of the turn.
    this.kernel.hooks.metrics.released(Math.max(0, this.#time().now - hold.heldAt))
  }

  /** A release could not be answered. */
  unreleased(releasing: Releasing, error: CoordinatorError): void {
    const { entry, session } = releasing
    if (error.reason._tag === "ActorDefect") {
      // The actor cannot do it, nor could it the next time.
      this.kernel.hooks.log("Error", `${this.#name(entry)} could not be released`, error)
      return releasing.settle()
    }
    // The session lives on, and with it what it holds.
    this.kernel.hooks.log("Warn", `the release of ${this.#name(entry)} is tried again with the next heartbeat`, error)
    if (session.lost === undefined) this.#owed.push(releasing)
    else releasing.settle()
  }

  // The claims under a membership end before it does.
  #dismiss(member: Membership): void {
    for (const entry of [...member.dependents]) {
      if (entry instanceof Hold && entry.state === "held") {
        entry.lose("closed")
      } else {
        this.release(entry, ignore)
        entry.settle(closed)
      }
    }
  }

  /** Another session has ended it: what runs under it is interrupted. */
  revoke(hold: Hold): void {
    if (hold.state !== "held") return
    hold.lose("revoked")
    this.watchOverruns([hold])
  }

  /** It is over, as the actor has told, and nothing is left to release, unless asking about it has made a new claim of it. */
  forget(hold: Hold): void {
    if (hold.state !== "held") return
    if (hold.verifying > 0) return this.release(hold, ignore)
    // What was lost with its session is not counted any more.
    if (hold.session?.lost === undefined) this.#released(hold)
    this.#become(hold, "done")
  }

  // ---------------------------------------------------------------------------------------------------------------
  // Events
  // ---------------------------------------------------------------------------------------------------------------

  readonly heard = (session: Session, event: ReadonlyArray<unknown>): void => {
    if (event[0] === "each") {
      const ids = event[1] as ReadonlyArray<string>
      const single = event[2] as ReadonlyArray<unknown>
      const answer = event.slice(3)
      for (let at = 0; at < ids.length; at++) {
        this.#told(ids[at]!, session, single.length === 0 ? answer : [...answer, single[at]])
      }
      return
    }
    if (event[0] === "recall") return this.#recall(session, String(event[1]))
    const entry = this.#all.get(String(event[1]))
    if (entry === undefined || entry.session !== session) return
    switch (event[0]) {
      case "granted":
        return this.#grant(entry, session, event.slice(1))
      case "changed":
        return entry instanceof Membership ? this.#observe(entry, event.slice(2)) : undefined
      case "again":
        if (entry.state === "queued") this.#send(entry, true)
        // The reply that it waits for is still to come.
        else if (entry.state === "asked") entry.again = true
        return
      case "revoked":
        return entry instanceof Hold ? this.revoke(entry) : undefined
    }
  }

  #observe(entry: Membership, change: ReadonlyArray<unknown>): void {
    if (entry.state === "held") entry.observer.observe(change)
    // The mailbox can be faster than the reply that it has joined.
    else if (entry.state === "asked") entry.early.push(change)
  }

  // One of the claims that an event is about: it has the answer that it waits for.
  #told(id: string, session: Session, answer: ReadonlyArray<unknown>): void {
    const entry = this.#all.get(id)
    if (entry === undefined || entry.session !== session) return
    if (answer[0] === "granted") return this.#grant(entry, session, answer)
    if (answer[0] === "joined") return this.#join(entry, answer.slice(1))
    if (waits(entry.state) === 1) this.#finish(entry, answer as unknown as Outcome)
  }

  /** Events may be missing: everything asks again, under the same id, what has become of it. */
  readonly missed = (session: Session): void => {
    // One that was recalled may be among them, or still be on its way.
    for (const stretch of this.kept.all()) this.#surrender(stretch)
    for (const entry of this.#all.values()) if (entry instanceof Hold && entry.state === "asked") entry.recalled = true
    this.#verifyAll(session, () => true)
  }

  #verifyAll(session: Session, isMeant: (entry: Entry) => boolean): void {
    for (const entry of this.#all.values()) {
      if (entry.session !== session || !isMeant(entry)) continue
      if (entry.state === "queued") this.#send(entry, true)
      else if (entry.state === "held") this.#verify(entry, session)
      // The reply that it waits for may be older than what was missed.
      else if (entry.state === "asked") entry.again = true
    }
  }

  #verify(entry: Entry, session: Session): void {
    const { args, place: { key }, verb } = entry.claim
    entry.verifying++
    this.channel.outbox.request({
      verb,
      key,
      args: [entry.id, ...args(true)] as never,
      session,
      urgent: true,
      moot: ignore,
      settle: (reply: ClaimReply) => {
        entry.verifying--
        if (entry.state !== "held" || entry.session !== session) return
        if (entry instanceof Membership) {
          return reply[0] === "joined"
            ? entry.observer.observe(reply.slice(1))
            : undefined
        }
        if (
          !(entry instanceof Hold) ||
          reply[0] === "granted" && Number(reply[1]) === (entry.stretch?.first ?? entry.token)
        ) return
        // It has been ended, and asking has made a new claim of it.
        this.revoke(entry)
        this.release(entry, ignore)
      },
      fail: (error) => {
        entry.verifying--
        this.#unverified = true
        this.#log(entry, "is verified with the next heartbeat", error)
      }
    } as Request<ClaimVerb>)
  }

  readonly beat = (session: Session): void => {
    this.opened()
    for (const entry of this.#all.values()) {
      if (entry.again && entry.state === "queued" && entry.session === session) this.#send(entry, true)
    }
    for (const releasing of this.#owed.splice(0)) this.channel.outbox.request(releasing)
    const now = this.kernel.io.now()
    if (this.#unverified) {
      this.#unverified = false
      this.missed(session)
    } else if (now - this.#verified >= this.channel.lease) {
      this.#verified = now
      this.#verifyAll(session, ({ claim }) => claim.verified === true)
    }
    if (now - this.#touched < touchEvery) return
    this.#touched = now
    for (const entry of this.#all.values()) this.#touch(entry, session)
  }

  #touch(entry: Entry, session: Session): void {
    this.channel.outbox.request({
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

  // ---------------------------------------------------------------------------------------------------------------
  // End
  // ---------------------------------------------------------------------------------------------------------------

  /** The session is over. Holds are lost; everything else goes to the next session, if there is one. */
  readonly lost = (reason: LossReason): { readonly holds: number; readonly tell: () => void } => {
    const holds: Array<Hold> = []
    this.kept.clear()
    for (const releasing of this.#owed.splice(0)) releasing.settle()
    for (const entry of [...this.#all.values()]) {
      entry.request = undefined
      if (entry instanceof Hold && entry.state === "held") {
        this.#all.delete(entry.id)
        entry.member?.dependents.delete(entry)
        holds.push(entry)
      } else if (reason === "closed") {
        this.#become(entry, "idle")
        this.failed(entry, this.channel.closedError(), false)
      } else {
        const observed = entry.state === "held"
        this.#become(entry, "idle")
        if (entry instanceof Membership) entry.early.length = 0
        if (observed && entry instanceof Membership) this.#guard(entry, () => entry.observer.lost?.())
      }
    }
    return {
      holds: holds.length,
      tell: () => {
        for (const hold of holds) {
          // Closing has told it already, or it has been ended by a request whose answer is still to come.
          if (hold.loss === undefined && !(reason === "closed" && hold.concluding)) {
            this.#log(hold, `was lost (${reason})`)
          }
          this.#guard(hold, () => hold.lose(reason))
        }
        this.watchOverruns(holds)
      }
    }
  }

  #guard(entry: Entry, callback: () => void): void {
    guard(this.kernel.hooks.log, `the loss of ${this.#name(entry)}`, callback)
  }

  /** The margin is the time that finalizers have before any other session is granted. One that overruns it is reported. */
  watchOverruns(holds: ReadonlyArray<Hold>): void {
    if (holds.every((hold) => hold.protecting === 0)) return
    const { hooks, transport } = this.kernel
    const { margin } = this.channel
    void transport.sleep(margin).then(() => {
      const late = holds.filter((hold) => hold.protecting > 0)
      if (late.length === 0 || this.kernel.isClosed()) return
      hooks.metrics.overrun(late.length)
      const names = late.slice(0, 3).map((hold) => this.#name(hold)).join(", ")
      hooks.log(
        "Error",
        `${late.length} protected programs still ran ${margin} ms after their lease was lost: ${names}`
      )
    })
  }

  /** Interrupts what runs under holds, and releases them when that has ended; everything else is given up at once. */
  readonly close = async (): Promise<void> => {
    for (const stretch of this.kept.all()) this.#surrender(stretch)
    const entries = [...this.#all.values()]
    const error = new CoordinatorError({ reason: new CoordinatorClosed({ namespace: this.kernel.settings.namespace }) })
    const isHeld = (entry: Entry): entry is Hold => entry instanceof Hold && entry.state === "held"
    // Before any hold ends: it must not be granted to a waiter of the same coordinator.
    for (const entry of entries) {
      if (isHeld(entry) || entry.state === "done") continue
      if (entry instanceof Membership && entry.joined) {
        entry.observer.closed?.()
      } else {
        this.release(entry, ignore)
        entry.settle(["failed", error])
      }
    }
    const held = entries.filter(isHeld)
    // A request that ends a hold says more than its loss.
    for (const hold of held) if (!hold.concluding) hold.lose("closed")
    this.watchOverruns(held)
    await Promise.all(held.map(async (hold) => {
      await hold.calm()
      // A request that ends it says more than a release.
      if (!hold.concluding) await new Promise<void>((resolve) => this.release(hold, resolve))
    }))
    // Releases in the background.
    await this.channel.settled()
  }

  #name({ claim }: Entry): string {
    return describe(claim.place.kind, claim.place.name, claim.place.namespace)
  }

  #log(entry: Entry, what: string, cause?: unknown): void {
    this.kernel.hooks.log("Warn", `${this.#name(entry)} ${what}`, cause)
  }
}
