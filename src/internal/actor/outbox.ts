/**
 * The requests of a session: a queue, and one batch in flight, which is executed exactly once however often it is sent.
 * Plain callbacks: this is the hot path.
 */

import type { Io } from "../io.ts"
import { RedisError } from "../redis/errors.ts"
import type { CoordinatorError } from "./errors.ts"
import { guard, type Log } from "./hooks.ts"
import { describeRequest } from "./keys.ts"
import { allowOom } from "./lua.ts"
import { isTooMuch, leadingOf, lighten, omit, type Request, type Sender, Sending } from "./sending.ts"
import type { LossReason, Session } from "./session.ts"
import {
  type Answer,
  coordinatorError,
  decode,
  failed,
  isTransient,
  overloaded,
  type Reply,
  type Transport,
  type Verb
} from "./transport.ts"

/** Keeps the session under which the outbox sends. */
export interface Keeper {
  readonly current: () => Session | undefined
  /** There is no session, and a request waits for one. */
  readonly open: () => void
  /** A batch has been answered, which renews the session from the time of its last attempt on. */
  readonly answered: (sending: Sending, answer: Answer) => void
  /** The outcome of a sending is not known. */
  readonly suspended: (session: Session, cause: RedisError) => void
  /** An answer could not be read: events that came with it are lost. */
  readonly unread: () => void
  readonly lose: (session: Session, reason: LossReason) => void
}

export interface OutboxOptions {
  readonly transport: Transport
  readonly io: Io
  readonly lease: number
  readonly maxBatch: number
  readonly maxPending: number
  readonly log: Log
}

const weightOf = ({ weight = 1 }: Request): number => weight

const sizeOf = (requests: ReadonlyArray<Request>): number =>
  requests.reduce((sum, request) => sum + (request.size ?? weightOf(request)), 0)

const sumOf = (requests: ReadonlyArray<Request>): number =>
  requests.reduce((sum, request) => sum + weightOf(request), 0)

// Fewer cost Redis, and the wake-ups on both sides, less than the call itself.
const worthACall = 32

// So few are left in the queue until they come to its front.
const mostDiscarded = 64

export class Outbox implements Sender {
  #queue: Array<Request> = []
  // Of all in the queue.
  #weight = 0
  // So many of these are not to be sent any more.
  #discarded = 0
  #inFlight: ReadonlyArray<Request> | undefined = undefined
  #scheduled = false

  readonly #options: OutboxOptions
  readonly #keeper: Keeper
  readonly #timeout: number

  constructor(keeper: Keeper, options: OutboxOptions) {
    this.#keeper = keeper
    this.#options = options
    this.#timeout = options.transport.renewalTimeout(options.lease)
  }

  get pending(): number {
    return this.#weight
  }

  /** Nothing waits, and nothing is under way. */
  get isIdle(): boolean {
    return this.#inFlight === undefined && this.#queue.length === 0
  }

  request<V extends Verb>(request: Request<V>): void {
    const pending = this.#weight
    if (pending >= this.#options.maxPending && request.urgent !== true && !allowOom.has(request.verb)) {
      return request.fail(overloaded(pending, request.key), false)
    }
    request.queued = true
    this.#weight += weightOf(request as unknown as Request)
    if (request.expire !== undefined) request.askedAt = this.#options.io.now()
    this.#queue.push(request as unknown as Request)
    this.#schedule()
  }

  /** What this asks goes ahead of all that waits: that may be about resources which only these requests make exist again. */
  ahead(ask: () => void): void {
    const waiting = this.#queue
    this.#queue = []
    ask()
    this.#queue = this.#queue.concat(waiting)
  }

  /** Makes a request heavier that has not been sent. Answers whether there was room. */
  extend<V extends Verb>(request: Request<V>): boolean {
    const { maxBatch, maxPending } = this.#options
    const { weight = 1 } = request
    if (request.queued !== true || request.cancelled === true) return false
    if (weight >= maxBatch || this.#weight >= maxPending) return false
    request.weight = weight + 1
    this.#weight++
    return true
  }

  /** Takes it back if it has not been sent. */
  withdraw(request: Request): boolean {
    if (request.queued !== true) return false
    request.cancelled = true
    this.#discard(request)
    return true
  }

  // The request stays in the queue for now: removing single ones would walk the queue each time.
  #discard(request: Request): void {
    request.queued = false
    this.#weight -= weightOf(request)
    request.weight = 0
    this.#discarded++
    if (this.#discarded < mostDiscarded || this.#discarded * 2 < this.#queue.length) return
    this.#queue = this.#queue.filter(({ cancelled }) => cancelled !== true)
    this.#discarded = 0
  }

  /** Redis is away, and these questions were asked before that time. Answers when the oldest of the others was asked. */
  expire(before: number, cause: RedisError): number | undefined {
    const due = (request: Request) => request.expire !== undefined && request.askedAt! <= before
    const { transport } = this.#options
    for (const request of (this.#inFlight ?? []).filter(due)) this.#expire(request, transport.late(request.key))
    for (const request of this.#queue.filter(due)) {
      this.#expire(request, transport.late(request.key, request.forwarded === true ? undefined : cause, true))
      if (request.queued === true && request.cancelled === true) this.#discard(request)
    }
    const waits = (request: Request) => request.expire !== undefined
    return ((this.#inFlight ?? []).find(waits) ?? this.#queue.find(waits))?.askedAt
  }

  #expire(request: Request, error: CoordinatorError): void {
    const { expire } = request
    request.expire = undefined
    expire!.call(request, error)
  }

  /** Removes all requests: those that may have been executed, and those that wait. */
  drain(): { readonly sent: ReadonlyArray<Request>; readonly queued: ReadonlyArray<Request> } {
    // A request that follows another one is made again with that one.
    const again = new Set(
      (this.#inFlight ?? []).flatMap(({ following = [], moot, session }) =>
        session === undefined && moot === undefined ? following : []
      )
    )
    const sent = (this.#inFlight ?? []).filter((request) => !again.has(request))
    for (const request of this.#queue) request.queued = false
    const drained = { sent, queued: this.#queue.filter(({ cancelled }) => cancelled !== true) }
    this.#inFlight = undefined
    this.#queue = []
    this.#weight = 0
    this.#discarded = 0
    return drained
  }

  // All that is asked in one turn of the event loop goes into one batch.
  #schedule(): void {
    if (this.#scheduled || this.#inFlight !== undefined) return
    this.#scheduled = true
    this.#options.io.defer(() => {
      this.#scheduled = false
      this.flush()
    })
  }

  /** Sends what waits, if nothing is under way. */
  flush(): void {
    while (this.#inFlight === undefined && this.#queue.length > 0) {
      const session = this.#keeper.current()
      if (session === undefined) return this.#keeper.open()
      const taken = this.#take()
      const batch: Array<Request> = []
      const ends: Array<() => void> = []
      for (const request of taken) {
        request.queued = false
        const end = (request.knownFor === undefined ? undefined : this.#date(request, request.knownFor)) ??
          request.lapses?.()
        if (end !== undefined) ends.push(end)
        else if (request.cancelled !== true) batch.push(request)
      }
      this.#discarded = Math.max(0, this.#discarded - taken.length + batch.length)
      if (batch.length > 0) this.#begin(session, batch)
      // Their callers go on at once, and the session can be lost with that: the batch has to be known by then.
      for (const end of ends) end()
    }
  }

  #begin(session: Session, leading: ReadonlyArray<Request>): void {
    const batch = leading.some(({ following }) => following !== undefined)
      ? leading.flatMap((request) => [request, ...this.#followers(request)])
      : leading
    this.#inFlight = batch
    try {
      this.#send(new Sending(this, session, batch))
    } catch (cause) {
      // It cannot be written as one call, for which a string can be too long: nothing was sent, and a part of it may fit.
      this.#inFlight = undefined
      const half = leading.length >> 1
      if (half === 0) return this.#failAll(batch, cause, false)
      this.#putBack(leading.slice(half))
      this.#begin(session, leading.slice(0, half))
    }
  }

  // When the session is lost, they may be sent by themselves.
  #followers({ following = [] }: Request): ReadonlyArray<Request> {
    const { io } = this.#options
    for (const follower of following) {
      if (follower.knownFor !== undefined) follower.sent ??= [io.now(), io.wall()]
    }
    return following
  }

  #putBack(requests: ReadonlyArray<Request>): void {
    for (const request of requests) request.queued = true
    this.#queue.unshift(...requests)
    this.#weight += sumOf(requests)
  }

  // A session may send it for as long as its lease. Answers how to end it if that is too long.
  #date(request: Request, knownFor: number): (() => void) | undefined {
    const { io, lease, transport } = this.#options
    const [now, wall] = [io.now(), io.wall()]
    request.sent ??= [now, wall]
    const [at, wallAt] = request.sent
    if (request.cancelled === true || Math.max(now - at, wall - wallAt) + lease <= Math.max(knownFor, lease)) return
    return () => this.fail(request, transport.late(request.key), true)
  }

  // As many as one batch may have.
  #take(): Array<Request> {
    const queue = this.#queue
    const limit = this.#options.maxBatch
    let [count, weight] = [1, weightOf(queue[0]!)]
    const fits = (next: Request) => next.alone !== true && weight + weightOf(next) <= limit
    if (queue[0]!.alone !== true) {
      while (count < queue.length && fits(queue[count]!)) weight += weightOf(queue[count++]!)
    }
    this.#weight -= weight
    this.#queue = queue.slice(count)
    return count === queue.length ? queue : queue.slice(0, count)
  }

  #send(sending: Sending): void {
    const { header, requests, session } = sending
    if (session.lost !== undefined) return
    const { io, transport } = this.#options
    sending.sentAt = io.now()
    if (Number.isNaN(sending.begunAt)) sending.begunAt = sending.sentAt
    sending.sentAtWall = io.wall()
    transport.send(session.address, requests, header, this.#timeout, sending)
  }

  /** A sending was answered. */
  readonly answered = (sending: Sending, raw: unknown): void => {
    const { batch, number, read, requests, session } = sending
    if (session.lost !== undefined) return
    let answer: Answer
    try {
      answer = decode(requests, raw, batch)
    } catch (cause) {
      // The batch was executed, and its replies are not known.
      session.number = number
      this.#inFlight = undefined
      this.#keeper.unread()
      this.#failAll(batch, cause, true)
      return this.flush()
    }
    if (answer.status !== "ok") return this.#forgotten(session, sending, answer.status)
    session.number = number
    session.acknowledged = read
    this.#keeper.answered(sending, answer)
    this.#settleAll(session, sending, answer)
  }

  /** It is not known whether a sending was executed, or it was not. */
  readonly failed = async (sending: Sending, cause: unknown): Promise<void> => {
    const { batch, number, session } = sending
    if (session.lost !== undefined) return
    if (cause instanceof RedisError) {
      if (!await this.#refused(session, sending, cause)) this.#send(sending)
      return
    }
    session.number = number
    this.#inFlight = undefined
    this.#failAll(batch, cause, true)
    this.flush()
  }

  #settleAll(session: Session, { batch, left, requests }: Sending, { replies }: Answer): void {
    this.#inFlight = undefined
    // The reply is that of the first attempt if that was executed after all.
    const answered = replies.length === batch.length ? batch : requests
    if (answered !== batch) this.#leave(batch, left)
    if (this.#isWorth(batch)) this.flush()
    for (let at = 0; at < answered.length; at++) this.#settle(session, answered[at]!, replies[at]!)
    // Requests that these replies have led to still join the next batch.
    if (this.#queue.length > 0) this.#schedule()
  }

  // Requests that were not sent with their batch are refused, or go with a later one.
  #leave(batch: ReadonlyArray<Request>, left: Sending["left"]): void {
    const postponed = new Set(batch.filter((request) => left.has(request) && left.get(request) === undefined))
    this.#putBack(leadingOf(batch).filter((request) => postponed.has(request)))
    for (const [request, refusal] of left) if (refusal !== undefined) this.#failAll([request], refusal, false)
  }

  // Enough waits for a call of its own: Redis works on that while the replies to the other one are taken in.
  #isWorth(answered: ReadonlyArray<Request>): boolean {
    if (this.#weight >= this.#options.maxBatch) return true
    const waiting = sizeOf(this.#queue)
    return waiting >= worthACall && waiting * 2 >= sizeOf(answered)
  }

  // A callback that throws is a bug of its own, and must not cost the others their answers.
  #settle(session: Session, request: Request, reply: Reply): void {
    try {
      // A reply before this one has shown that the session is over.
      if (session.lost !== undefined && request.session !== undefined) request.moot?.(true)
      else if (reply[0] !== "failed") request.settle(reply)
      else this.fail(request, failed(request.verb, reply[1]), true)
    } catch (cause) {
      this.#options.log("Error", `the answer to ${describeRequest(request)} could not be taken in`, cause)
    }
  }

  /** That it is refused now says nothing of the session that has sent it before. */
  fail(request: Request, error: CoordinatorError, sent: boolean): void {
    const { log, transport } = this.#options
    const isUncertain = request.forwarded === true && !sent
    const reason = isUncertain ? transport.late(request.key) : coordinatorError(error, request.key)
    guard(log, `the failure of ${describeRequest(request)}`, () => request.fail(reason, sent || isUncertain))
  }

  #failAll(requests: ReadonlyArray<Request>, cause: unknown, sent: boolean): void {
    for (const request of requests) this.fail(request, coordinatorError(cause), sent)
  }

  // Redis does not know the session, or not its latest batches.
  #forgotten(session: Session, { batch, uncertain }: Sending, status: Answer["status"]): void {
    if (!uncertain) {
      // Refused, and not executed before: as good as never sent.
      this.#putBack(leadingOf(batch))
      this.#inFlight = undefined
    }
    this.#keeper.lose(session, status === "expired" || status === "unknown" ? status : "rolledBack")
  }

  /** Decides what follows a call that has failed: nothing more, or another sending. */
  async #refused(session: Session, sending: Sending, cause: RedisError): Promise<boolean> {
    const { batch, requests } = sending
    const kept = requests.filter(({ verb, whole }) => allowOom.has(verb) && whole !== true)
    if (cause.reason._tag === "OutOfMemory" && kept.length < requests.length) {
      // Refused before any write, so the number is still free: requests that need no memory are sent alone. If an earlier attempt
      // was executed, that is answered with the reply to all of it; so it is sent even if it is nothing.
      for (const request of requests) if (!kept.includes(request)) sending.left.set(request, cause)
      sending.requests = kept
      return this.#settled(sending)
    }
    if (isTooMuch(sending, cause)) {
      lighten(sending)
      return this.#settled(sending)
    }
    sending.uncertain ||= cause.executed === "unknown"
    if (!isTransient(cause) && cause.reason._tag !== "OutOfMemory") {
      const { uncertain } = sending
      this.#giveUp(batch, cause, uncertain)
      // The number may be used up, and the reply to this batch must not be taken for that to the next one.
      if (uncertain) this.#keeper.lose(session, "unknown")
      return true
    }
    if (sending.attempt === 0) this.#keeper.suspended(session, cause)
    const { io, transport } = this.#options
    await transport.backoff(sending.attempt++, cause)
    // Others that are sent at the same moment on the same connection would seem to be the reason, too.
    if (sending.losses > 1) await transport.sleep(io.random() * 100 * sending.losses)
    if (sending.uncertain || session.lost !== undefined) return false
    for (const end of omit(sending, cause)) end()
    return session.lost === undefined && this.#settled(sending)
  }

  /** Ends the call if it has nothing more to send. An uncertain one is sent even then: only that tells what was executed. */
  #settled({ batch, left, requests, uncertain }: Sending): boolean {
    if (requests.length > 0 || uncertain) return false
    this.#inFlight = undefined
    this.#leave(batch, left)
    if (this.#queue.length > 0) this.#schedule()
    return true
  }

  #giveUp(batch: ReadonlyArray<Request>, cause: RedisError, sent: boolean): true {
    this.#inFlight = undefined
    this.#failAll(batch, cause, sent)
    if (this.#queue.length > 0) this.#schedule()
    return true
  }
}
