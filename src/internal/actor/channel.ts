/**
 * Keeps a session open with one partition, for one length of lease: it has sessions opened, renews them, notices when one is
 * lost, and has those ended that are over.
 */

import type { Timer } from "../io.ts"
import type { RedisError } from "../redis/errors.ts"
import { CoordinatorClosed, CoordinatorError } from "./errors.ts"
import { Former } from "./former.ts"
import { guard } from "./hooks.ts"
import { describeRequest } from "./keys.ts"
import type { Requests } from "./lua.ts"
import { type Audience, Mailbox } from "./mailbox.ts"
import type { First, Office } from "./office.ts"
import { Opener } from "./opening.ts"
import { Outbox } from "./outbox.ts"
import type { Beating } from "./pulse.ts"
import type { Reader } from "./reader.ts"
import type { Reaper } from "./reaper.ts"
import type { Request, Sending } from "./sending.ts"
import { type LossReason, type Phase, Session } from "./session.ts"
import type { Answer, Renewed } from "./transport.ts"
import type { Guarded } from "./vigil.ts"

/** The losses that come with the end of a session. */
export interface Losses {
  readonly holds: number
  /** Whether programs had something under it that has not ended: they have the margin for that. */
  readonly isEnding: boolean
  /** Notifies the programs of the holds. */
  readonly tell: () => void
}

/** The holds, waits and memberships of a channel's sessions. */
export interface Tenant extends Audience {
  /** How many there are. */
  readonly size: number
  /** Whether one of them waits for another session to release, or to end. */
  readonly isWaiting: () => boolean
  /** The key of a resource that one of them waits for so. */
  readonly wanted: () => string | undefined
  /** There is a session: waiting claims and requests enter it. */
  readonly opened: (session: Session) => void
  /** A heartbeat: refused requests are tried again, and resources of long holds are touched. */
  readonly beat: (session: Session) => void
  /** Events may be missing, and no gap shows that. */
  readonly doubt: () => void
  /** The session is over. Holds are lost when `tell` is called. */
  readonly lost: (reason: LossReason) => Losses
  /** No session can be had. */
  readonly refused: (error: CoordinatorError) => void
  /** Redis is away: questions that were asked before that time are not answered any more. */
  readonly expire: (before: number, cause: RedisError) => void
}

export interface ChannelOptions {
  readonly office: Office
  readonly index: number
  readonly prefix: string
  readonly lease: number
  readonly margin: number
  readonly reaper: Reaper
  readonly reader: () => Reader
  readonly tenant: Tenant
}

// In milliseconds. Where a permission was missing, an operator waits for the effect of granting it.
const longestPause = 5000

export class Channel implements Beating, First, Guarded {
  readonly index: number
  readonly prefix: string
  readonly lease: number
  readonly margin: number
  session: Session | undefined = undefined
  phase: Phase = "closed"
  /** How often Redis was out of reach. */
  outages = 0

  readonly outbox: Outbox
  readonly tenant: Tenant
  readonly reaper: Reaper
  readonly #office: Office
  readonly #reader: () => Reader
  #mailbox: Mailbox | undefined = undefined
  #opening = false
  readonly #former: Former
  readonly #opener: Opener
  // Why Redis is out of reach, while that is looked at.
  #cause: RedisError | undefined = undefined
  #expiry: Timer | undefined = undefined

  constructor({ index, lease, margin, office, prefix, reader, reaper, tenant }: ChannelOptions) {
    const { hooks, io, settings, transport } = office
    this.index = index
    this.prefix = prefix
    this.lease = lease
    this.margin = margin
    this.tenant = tenant
    this.reaper = reaper
    this.#office = office
    this.#reader = reader
    this.#former = new Former(office, prefix, reaper)
    this.#opener = new Opener({ office, index, prefix, lease, reaper, former: this.#former }, {
      isFirst: () => office.first() === this,
      begin: (...begun) => this.#begin(...begun),
      refuse: (refusal) => this.#refuse(refusal),
      unreachable: (cause) => this.#unreachable(cause),
      closedError: () => this.closedError()
    })
    const { maxBatch, maxPending } = settings
    this.outbox = new Outbox({
      current: () => this.session,
      open: () => this.open(),
      answered: (sending, answer) => this.#answered(sending, answer),
      suspended: (session, cause) => this.#suspend(session, cause),
      unread: () => tenant.doubt(),
      lose: (session, reason) => this.lose(session, reason)
    }, { transport, io, lease, maxBatch, maxPending, log: hooks.log })
  }

  // ---------------------------------------------------------------------------------------------------------------
  // Open
  // ---------------------------------------------------------------------------------------------------------------

  opened(late?: (cause: RedisError) => void): Promise<void> {
    return new Promise((resolve, reject) => {
      this.outbox.request({
        verb: "session.renew",
        args: [],
        urgent: true,
        settle: () => resolve(),
        fail: reject,
        expire: late && (() => late(this.#cause!))
      })
    })
  }

  isTrusted(): boolean {
    return this.session !== undefined && !this.session.expireIfDue()
  }

  isUsed(): boolean {
    return this.tenant.size > 0 || this.tenant.isListening()
  }

  open(): void {
    if (this.#opening || this.session !== undefined) return
    if (this.#office.isClosed()) return this.#refuse(this.closedError())
    this.#opening = true
    this.#enter("opening")
    void this.#opener.run()
  }

  /** After so many milliseconds, refused requests are tried again. */
  get retryPause(): number {
    return Math.min(this.lease / 3, longestPause)
  }

  closedError(): CoordinatorError {
    return new CoordinatorError({ reason: new CoordinatorClosed({ namespace: this.#office.settings.namespace }) })
  }

  #begin(id: string, position: string, identity: string, sentAt: number, sentAtWall: number): void {
    const { io, transport } = this.#office
    const address = transport.addressOf(this.prefix, id)
    const session = new Session(this.prefix, id, address, position, io, (expired) => this.lose(expired, "expired"))
    this.#opening = false
    this.session = session
    if (this.#office.first() === this) this.#office.admitted(identity)
    this.#mailbox = new Mailbox(
      session,
      this.tenant,
      io,
      () => this.#wake(session),
      () => this.lose(session, "rolledBack")
    )
    this.#renewed(session, sentAt, sentAtWall)
    this.#office.vigil.include(this)
    this.#office.pulseOf(this.lease).include(this)
    this.outbox.request(this.#renewal(session))
    this.#enter("open")
    this.outbox.ahead(() => this.tenant.opened(session))
    this.outbox.flush()
  }

  // No session can be opened: requests and claims that need one fail, and the next request tries again.
  #refuse(refusal: CoordinatorError): void {
    this.#opening = false
    this.#reached()
    this.#enter("closed")
    for (const request of this.outbox.drain().queued) this.outbox.fail(request, refusal, false)
    this.tenant.refused(refusal)
    const isFirst = this.#office.first() === this
    if (isFirst) this.#office.refused(refusal)
    const isNeeded = () => isFirst || this.tenant.size > 0
    if (!isNeeded()) return
    void this.#office.transport.sleep(this.retryPause).then(() => {
      if (this.session === undefined && isNeeded() && !this.#office.isClosed()) this.open()
    })
  }

  /** The namespace belongs to others: the claims of this coordinator in this partition are not valid any more. */
  forgo(): void {
    if (this.session !== undefined) this.lose(this.session, "rolledBack")
  }

  // ---------------------------------------------------------------------------------------------------------------
  // Keep
  // ---------------------------------------------------------------------------------------------------------------

  #answered({ begunAt, sentAt, sentAtWall, session }: Sending, { events, next, replies }: Answer): void {
    const { hooks, io } = this.#office
    this.#renewed(session, sentAt, sentAtWall)
    hooks.metrics.batch(replies.length, io.now() - begunAt)
    if (next !== undefined) this.reaper.expect(next, sentAt)
    // Behind the replies of the same batch, which are taken in at once.
    if (events.length > 0) io.defer(() => this.#hear(session, events))
  }

  #hear(session: Session, events: ReadonlyArray<ReadonlyArray<unknown>>): void {
    try {
      for (const event of events) if (session.lost === undefined) this.tenant.heard(session, event)
    } catch (cause) {
      this.#office.hooks.log("Error", `events of ${this.prefix} could not be taken in`, cause)
      this.#mailbox?.onGap()
    }
  }

  #renewed(session: Session, sentAt: number, sentAtWall: number): void {
    session.renewed(sentAt, sentAtWall, this.lease - this.margin)
    this.#reached()
    if (this.phase === "suspended") this.#enter("open")
    this.#office.vigil.hasten()
  }

  /** A heartbeat. Answers the session if it has nothing else to ask: it is renewed with others, see `renewed`. */
  readonly beat = (): Session | undefined => {
    const { session } = this
    if (session === undefined || session.expireIfDue()) return undefined
    if (this.#isOver()) return this.#rest(session)
    this.tenant.beat(session)
    const mailbox = this.#mailbox!
    const { askedAt, due } = mailbox
    if (due <= session.read) {
      // The events that were read are acknowledged by a batch of its own, which Redis compares with the events that it has
      // posted.
      if (this.outbox.isIdle && session.read === session.acknowledged) return session
      this.outbox.request(this.#renewal(session))
      return undefined
    }
    // An event that was posted before the last heartbeat and has not been read since may be lost, or the reader cannot read: claims ask
    // for what they have missed on the connection for commands. If the event is only late, the reader skips nothing. A process that was
    // busy itself reads it before the reply.
    this.outbox.request(this.#renewal(session, () => {
      if (due <= session.read) return
      this.#reader().doubt(askedAt)
      mailbox.onGap()
    }))
    this.#wake(session)
    return undefined
  }

  // A program can choose a length of lease for each hold: the sessions of those lengths would be more and more.
  #isOver(): boolean {
    const { first, settings } = this.#office
    return this.lease !== settings.lease && first() !== this && !this.isUsed() && this.outbox.isIdle
  }

  #rest(session: Session): undefined {
    this.lose(session, "closed")
    this.#former.end(session.id)
  }

  /** It was renewed with others, by a call that was sent at that time. */
  readonly renewed = (session: Session, sentAt: number, sentAtWall: number, { next, reply }: Renewed): void => {
    if (session.lost !== undefined) return
    this.#renewed(session, sentAt, sentAtWall)
    this.reaper.expect(next, sentAt)
    this.#informed(session, sentAt, sentAtWall, reply)
  }

  /** Extends the lease, and asks what else is due: at once, since Redis may have forgotten the session. */
  readonly renew = (): void => {
    const { session } = this
    if (session !== undefined && !session.expireIfDue()) this.outbox.request(this.#renewal(session))
  }

  /**
   * Renews it on a new connection for commands. A read of the mailbox that was sent before may be on a connection that is as dead as the
   * former one, without being noticed.
   */
  readonly reconnected = (): void => {
    const { session } = this
    if (session === undefined || session.expireIfDue()) return
    const since = this.#office.io.now()
    this.outbox.request(this.#renewal(session, (posted) => {
      if (posted > session.read) this.#reader().doubt(since)
    }))
  }

  #renewal(session: Session, answered: (posted: number) => void = ignore): Request<"session.renew"> {
    const { io } = this.#office
    const [askedAt, askedAtWall] = [io.now(), io.wall()]
    return {
      verb: "session.renew",
      args: [],
      session,
      urgent: true,
      moot: ignore,
      settle: (reply) => {
        answered(reply[1])
        this.#informed(session, askedAt, askedAtWall, reply)
      },
      fail: (error) => this.#office.hooks.log("Warn", `a renewal in ${this.prefix} was refused`, error)
    }
  }

  /** The rest of the answer to a renewal. */
  #informed(
    session: Session,
    askedAt: number,
    askedAtWall: number,
    [, posted, due]: Requests["session.renew"]["reply"]
  ): void {
    const others = due.filter((member) => member !== session.id)
    if (others.length > 0) void this.reaper.handle(others)
    const mailbox = this.#mailbox
    if (mailbox === undefined || session !== this.session) return
    mailbox.posted(posted, askedAt, askedAtWall)
    if (posted > session.read) this.listen()
  }

  /** When all that was asked before has been answered, or cannot be for now. */
  settled(): Promise<void> {
    const { session } = this
    if (session === undefined || this.outbox.isIdle || this.isLongAway()) return Promise.resolve()
    return new Promise((resolve) => {
      const settle = () => resolve()
      this.outbox.request({ ...this.#renewal(session, settle), moot: settle, fail: settle })
    })
  }

  /** Has the mailbox read for as long as something can come to it. */
  listen(): void {
    if (this.#mailbox !== undefined) this.#reader().include(this.#mailbox)
  }

  #wake(session: Session): void {
    this.outbox.request({
      verb: "session.wake",
      args: [],
      session,
      urgent: true,
      moot: ignore,
      settle: ignore,
      fail: (error) => this.#office.hooks.log("Warn", `the reader of ${this.prefix} could not be woken`, error)
    })
  }

  #unreachable(cause: RedisError): void {
    const watched = this.#cause !== undefined
    this.#cause = cause
    if (!this.away) {
      const { away, io, transport } = this.#office
      const silent = cause.reason._tag === "Timeout" ? transport.renewalTimeout(this.lease) : 0
      away.set(this, io.now() - silent)
      this.outages++
    }
    if (!watched) this.#expire()
  }

  #reached(): void {
    const { away } = this.#office
    if (away.size > 0) away.delete(this)
    this.#office.silentSince = undefined
  }

  get away(): boolean {
    return this.#office.away.has(this)
  }

  /** Whether Redis has been away for longer than a request waits: nothing more has to wait for it. */
  isLongAway(): boolean {
    return this.patience() === 0
  }

  /**
   * For how long an end waits for an answer, in milliseconds. Where Redis is away for longer than a request waits, it does not: a program
   * that ends much would end the later, the more that is. Nor does it wait again for as long as a release has waited in vain. On a cluster,
   * other channels may reach other nodes, which answer at once then.
   */
  patience(): number {
    const { away, io, settings: { partitions, requestTimeout }, silentSince, transport } = this.#office
    if (away.size === 0 && silentSince === undefined) return requestTimeout
    const now = io.now()
    const left = (since = now) => Math.max(0, since + requestTimeout - now)
    if (left(away.get(this)) === 0) return 0
    const others = [...away.values()].some((since) => left(since) === 0) ? 0 : left(silentSince)
    return Math.max(others, transport.connections.topology === "cluster" ? requestTimeout / partitions : 0)
  }

  /** Calls back when an end has waited for its request for long enough, if that is before the request fails. */
  whenImpatient(f: () => void): void {
    const { io, settings: { requestTimeout } } = this.#office
    const patience = this.patience()
    if (patience === 0) f()
    else if (patience < requestTimeout) io.after(patience, f)
  }

  // While Redis is away, questions that have waited for long enough fail.
  #expire(): void {
    const { io, isClosed, settings } = this.#office
    const cause = this.#cause!
    if (!this.away || isClosed()) {
      this.#cause = undefined
      return
    }
    const { requestTimeout } = settings
    const before = io.now() - requestTimeout
    const oldest = this.outbox.expire(before, cause) ?? Number.POSITIVE_INFINITY
    this.tenant.expire(before, cause)
    const pause = Math.max(1, Math.min(requestTimeout / 4, oldest - before))
    this.#expiry = io.after(pause, () => this.#expire())
  }

  #suspend(session: Session, cause: RedisError): void {
    this.#unreachable(cause)
    if (this.phase !== "open") return
    this.#enter("suspended", undefined, session)
    this.#office.hooks.log("Warn", `the session with ${this.prefix} is suspended`, cause)
  }

  // ---------------------------------------------------------------------------------------------------------------
  // Lose
  // ---------------------------------------------------------------------------------------------------------------

  /** The session is over: its holds are lost, and its waiters enter the next one. */
  lose(session: Session, reason: LossReason): void {
    if (session.lost !== undefined) return
    session.lost = reason
    this.session = undefined
    this.#office.vigil.exclude(this)
    this.#office.pulseOf(this.lease).exclude(this)
    const mailbox = this.#mailbox
    this.#mailbox = undefined
    const { queued, sent } = this.outbox.drain()
    // Programs are notified of the loss at once, and may ask for the next session.
    if (reason !== "closed" && reason !== "expired") this.#opener.doubt()
    this.#enter(reason === "closed" ? "closed" : "lost", reason, session)
    const losses = this.tenant.lost(reason)
    const isMoot = (request: Request) => request.session !== undefined || request.moot !== undefined
    // These requests go before those that the losses below lead to.
    for (const request of sent) if (!isMoot(request)) this.#forward(Object.assign(request, { forwarded: true }))
    for (const request of queued) {
      if (request.session === undefined) this.#forward(request)
      else for (const follower of request.following ?? []) this.#forward(follower)
    }
    for (const request of sent) if (isMoot(request)) this.#moot(request, true)
    for (const request of queued) if (request.session !== undefined) this.#moot(request, false)
    if (mailbox !== undefined) this.#reader().exclude(mailbox)
    this.#office.hooks.metrics.lost(reason, losses.holds)
    if (reason !== "closed") this.#replace(session, reason, losses)
    losses.tell()
  }

  #moot(request: Request, sent: boolean): void {
    guard(this.#office.hooks.log, `the loss of ${describeRequest(request)}`, () => request.moot?.(sent))
  }

  // The request is bound to no session, so the next session makes it. If it has followed another request, it is alone now.
  #forward(request: Request): void {
    request.orphan?.()
    if (this.#office.isClosed()) this.outbox.fail(request, this.closedError(), false)
    else this.outbox.request(Object.assign(request, { urgent: true }))
  }

  #replace(session: Session, reason: LossReason, { holds, isEnding }: Losses): void {
    const { hooks } = this.#office
    this.#former.add(session.id, isEnding ? this.margin : undefined)
    hooks.log(
      holds > 0 ? "Error" : "Info",
      `session ${session.id} with ${this.prefix} was lost (${reason}), and ${holds} holds with it`
    )
    if (this.tenant.size > 0 || this.outbox.pending > 0 || !this.#office.isClosing()) this.open()
  }

  #enter(phase: Phase, reason?: LossReason, session = this.session): void {
    const from = this.phase
    if (from === phase) return
    this.phase = phase
    this.#office.hooks.transition(this.index, session?.id, from, phase, reason)
  }

  /** When finalizers under sessions that were lost a moment ago have had their time. */
  calm(): Promise<void> {
    return this.#former.calm()
  }

  /** Ends the session because the coordinator is closed, and releases what it owns. */
  async close(): Promise<void> {
    const { session } = this
    if (session === undefined) this.#refuse(this.closedError())
    else this.lose(session, "closed")
    this.#expiry?.cancel()
    // One that is being opened would outlive this channel.
    await this.#opener.asked()
    await this.#former.close(session?.id)
  }
}

const ignore = () => {}
