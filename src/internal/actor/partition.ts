/**
 * The client's half of a partition actor: one session, and one batch in flight. Plain callbacks and the monotonic clock:
 * this is the hot path, and a test's `TestClock` must not lose sessions.
 */
import { MissingPermission, RedisError } from "../../Redis.ts"
import { type LossReason, type Phase, type Releasing, type Request, Session, type Verb } from "../hold/claim.ts"
import { Claims } from "../hold/claims.ts"
import { ascii } from "../redis/resp.ts"
import { CoordinatorClosed, CoordinatorError, coordinatorError, Incompatible, Overloaded } from "./errors.ts"
import type { Kernel } from "./kernel.ts"
import { prefixOf } from "./keys.ts"
import { allowOom, protocol, type Requests } from "./lua.ts"

export class Partition {
  readonly prefix: string
  readonly index: number
  session: Session | undefined = undefined
  phase: Phase = "closed"
  readonly claims: Claims
  readonly kernel: Kernel

  #queue: Array<Request> = []
  #inFlight: ReadonlyArray<Request> | undefined = undefined
  // Refused, and yet to be done.
  #owed: Array<Request> = []
  #scheduled = false
  #opening = false
  #asking: Promise<unknown> | undefined = undefined
  // Sessions that are over, or may never have begun, and when they may be ended: Redis may still have them.
  readonly #former = new Map<string, number>()
  #heartbeat: NodeJS.Timeout | undefined = undefined
  #trust: NodeJS.Timeout | undefined = undefined
  #reap: NodeJS.Timeout | undefined = undefined
  #nearest = Number.POSITIVE_INFINITY
  #concluding = 0
  #concluded: (() => void) | undefined = undefined

  constructor(kernel: Kernel, index: number) {
    this.kernel = kernel
    this.index = index
    this.prefix = prefixOf(kernel.settings.namespace, index)
    this.claims = new Claims(this)
  }

  // ---------------------------------------------------------------------------------------------------------------
  // Requests
  // ---------------------------------------------------------------------------------------------------------------

  request<V extends Verb>(request: Request<V>): void {
    if (this.kernel.closed) {
      if (request.session !== undefined) return request.moot?.(false)
      return request.fail(new CoordinatorError({ reason: new CoordinatorClosed({}) }))
    }
    if (this.#queue.length >= this.kernel.settings.maxPending && !allowOom.has(request.verb)) {
      return request.fail(new CoordinatorError({ reason: new Overloaded({ pending: this.#queue.length }) }))
    }
    this.#queue.push(request as unknown as Request)
    this.#schedule()
  }

  /** Takes it back if it has not been sent. */
  withdraw(request: Request): boolean {
    if (!this.#queue.includes(request)) return false
    request.cancelled = true
    return true
  }

  /** Asks again with the next heartbeat; the end of the session settles it as well. */
  owe(request: Releasing): void {
    if (this.session === undefined || request.session !== this.session) return request.moot()
    this.#owed.push(request as unknown as Request)
  }

  // All that is asked in one turn of the event loop goes into one batch.
  #schedule(): void {
    if (this.#scheduled || this.#inFlight !== undefined) return
    this.#scheduled = true
    queueMicrotask(() => {
      this.#scheduled = false
      this.#flush()
    })
  }

  #flush(): void {
    if (this.#inFlight !== undefined || this.#queue.length === 0) return
    if (this.session === undefined) return this.open()
    const limit = this.kernel.settings.maxBatch
    let batch = this.#queue
    if (batch.length > limit) {
      this.#queue = batch.slice(limit)
      batch = batch.slice(0, limit)
    } else {
      this.#queue = []
    }
    batch = batch.filter((request) => request.cancelled !== true)
    if (batch.length === 0) return this.#flush()
    this.#inFlight = batch
    void this.#transmit(this.session, batch)
  }

  async #transmit(session: Session, batch: ReadonlyArray<Request>): Promise<void> {
    const kernel = this.kernel
    const number = session.number + 1
    const read = session.read === session.acknowledged ? "" : session.read
    const header = ascii(String(number)) + kernel.lease + ascii(read)
    let requests = batch
    let attempt = 0
    // Whether an attempt may have been executed without an answer, and why requests that need memory were left out.
    let uncertain = false
    let refusal: RedisError | undefined
    while (session.lost === undefined) {
      const sentAt = performance.now()
      try {
        const raw = await kernel.call(
          session.address,
          requests,
          header,
          requests.every((request) => allowOom.has(request.verb)),
          batch
        )
        if (session.lost !== undefined) return
        const [status, replies, events] = raw
        if (status !== "ok") {
          if (!uncertain) {
            // Refused, and not executed before: as good as never sent.
            this.#queue.unshift(...batch)
            this.#inFlight = undefined
          }
          return this.lose(session, status === "expired" || status === "unknown" ? status : "rolledBack")
        }
        session.number = number
        if (read !== "") session.acknowledged = read
        this.#renewed(session, sentAt)
        kernel.metrics.batch(replies!.length, performance.now() - sentAt)
        this.#inFlight = undefined
        // The reply is that of the first attempt if that was executed after all.
        const answered = replies!.length === batch.length ? batch : requests
        if (refusal !== undefined) this.#refuseAll(batch.filter((request) => !answered.includes(request)), refusal)
        for (let at = 0; at < answered.length; at++) this.#settle(session, answered[at]!, replies![at]!)
        if (events !== undefined && session.lost === undefined) {
          for (const event of events) this.claims.hear(session, event)
        }
        // Requests that these replies have led to still join the next batch.
        if (this.#queue.length > 0) this.#schedule()
        return
      } catch (cause) {
        if (session.lost !== undefined) return
        if (!(cause instanceof RedisError)) {
          // An answer, though not one that can be read: nobody knows what was granted.
          for (const request of batch) request.fail(cause as CoordinatorError)
          this.#settled()
          return this.lose(session, "unknown")
        }
        const kept = requests.filter((request) => allowOom.has(request.verb))
        if (cause.reason._tag === "OutOfMemory" && kept.length < requests.length) {
          // Refused before any write, so the number is still free: what needs no memory is sent alone. If an earlier
          // attempt was executed, that is answered with the reply to all of it; so it is sent even if it is nothing.
          refusal = cause
          requests = kept
          if (kept.length > 0 || uncertain) continue
          this.#refuseAll(batch, cause)
          return this.#settled()
        }
        uncertain ||= cause.reason._tag === "ConnectionLost" || cause.reason._tag === "Timeout"
        if (!kernel.isTransient(cause) && cause.reason._tag !== "OutOfMemory") {
          this.#refuseAll(batch, cause)
          this.#settled()
          // The number may be used up, and the reply to this batch must not be taken for that to the next one.
          if (uncertain) this.lose(session, "unknown")
          return
        }
        if (attempt === 0) this.#suspend(session, cause)
        await kernel.backoff(attempt++, cause)
      }
    }
  }

  #settled(): void {
    this.#inFlight = undefined
    if (this.#queue.length > 0) this.#schedule()
  }

  #refuseAll(requests: ReadonlyArray<Request>, cause: RedisError): void {
    for (const request of requests) request.fail(new CoordinatorError({ reason: cause }))
  }

  #settle(session: Session, request: Request, reply: Requests[Verb]["reply"] | readonly ["failed", string]): void {
    if (session.lost !== undefined && request.session !== undefined) {
      // A reply before this one has shown that the session is over.
      request.moot?.(true)
    } else if (reply[0] === "failed") {
      request.fail(this.kernel.failed(request.verb, reply[1] as string))
    } else {
      request.settle(reply as Requests[Verb]["reply"])
    }
  }

  // ---------------------------------------------------------------------------------------------------------------
  // Session
  // ---------------------------------------------------------------------------------------------------------------

  /** Opens a session unless there is one, and tells how that went. */
  opened(): Promise<void> {
    return new Promise((resolve, reject) => {
      this.request({ verb: "session.renew", args: [], settle: () => resolve(), fail: reject })
    })
  }

  open(): void {
    if (this.#opening || this.kernel.closed) return
    this.#opening = true
    this.#enter("opening")
    void this.#handshake()
  }

  async #handshake(): Promise<void> {
    const kernel = this.kernel
    const { lease, partitions } = kernel.settings
    let attempt = 0
    while (!kernel.closed) {
      // An id for each attempt: one whose reply was lost may have begun its lease long before the next is sent.
      const id = kernel.newSession()
      const sentAt = performance.now()
      const replaced = this.#ending()
      try {
        const asking = kernel.ask(this, id, [{
          verb: "session.open",
          args: [id, replaced.join(" "), lease, protocol, partitions, kernel.about]
        }])
        this.#asking = asking
        const [reply] = await asking
        if (kernel.closed) return void this.#former.set(id, 0)
        if (reply![0] === "denied") {
          return this.#refuse(
            new CoordinatorError({
              reason: new RedisError({ reason: new MissingPermission({ command: reply![1] as string }) })
            })
          )
        }
        if (reply![0] === "mismatch") {
          return this.#refuse(
            new CoordinatorError({
              reason: new Incompatible({
                protocol: reply![1] as number,
                partitions: reply![2] as number,
                expectedProtocol: protocol,
                expectedPartitions: partitions
              })
            })
          )
        }
        if (reply![0] !== "opened") throw kernel.failed("session.open", String(reply![1]))
        const session = new Session(this, id, reply![1] as string, sentAt)
        for (const former of replaced) this.#former.delete(former)
        this.#opening = false
        this.session = session
        this.#renewed(session, sentAt)
        this.#beat(session)
        this.request(this.#renewal(session))
        for (const former of replaced) void kernel.reap(this, former)
        this.#enter("open")
        this.claims.reenter()
        this.#flush()
        return
      } catch (cause) {
        if (cause instanceof RedisError && kernel.isTransient(cause)) {
          if (cause.executed === "unknown") this.#former.set(id, 0)
          await kernel.backoff(attempt++, cause)
        } else {
          return this.#refuse(
            coordinatorError(cause)
          )
        }
      }
    }
  }

  // No session can be had: everybody who waits for one is told, and the next request tries again.
  #refuse(refusal: CoordinatorError): void {
    this.#opening = false
    this.#enter("closed")
    const queue = this.#queue
    this.#queue = []
    for (const request of queue) request.fail(refusal)
    this.claims.failAll(refusal)
    if (this.claims.size === 0) return
    void this.kernel.sleep(this.kernel.settings.lease / 3).then(() => {
      if (this.session === undefined && this.claims.size > 0) this.open()
    })
  }

  // Few at a time: the others expire by themselves.
  #ending(): ReadonlyArray<string> {
    const now = performance.now()
    return [...this.#former].filter(([, at]) => at <= now).map(([id]) => id).slice(-32)
  }

  /** Ends sessions that are over, so that nobody has to wait for their deadlines. */
  async #retire(): Promise<void> {
    await Promise.all(
      this.#ending().map(async (id) => {
        try {
          await this.#end(id)
        } catch (cause) {
          // The next session does it, or it expires.
          this.kernel.log("Debug", `partition ${this.index}: a former session could not be ended`, cause)
        }
      })
    )
  }

  async #end(id: string, closed = false): Promise<void> {
    await this.kernel.insist(this, id, [{ verb: "session.end", args: [id, closed] }])
    this.#former.delete(id)
    await this.kernel.reap(this, id)
  }

  #renewed(session: Session, sentAt: number): void {
    const { lease, margin } = this.kernel.settings
    session.trustedUntil = sentAt + lease - margin
    if (this.phase === "suspended") this.#enter("open")
    if (this.#trust === undefined) this.#watch(session)
  }

  // One timer that is re-armed when it fires: a renewal must not cost a timer.
  #watch(session: Session): void {
    this.#trust = setTimeout(() => {
      this.#trust = undefined
      if (session.lost === undefined && !session.expireIfDue()) this.#watch(session)
    }, Math.max(1, session.trustedUntil - performance.now()))
  }

  #beat(session: Session, count = 1): void {
    // A third of the lease, so that two renewals may fail; jittered, so that a fleet does not beat as one.
    const delay = this.kernel.settings.lease / 3 * (0.9 + 0.1 * Math.random())
    this.#heartbeat = setTimeout(() => {
      if (session.lost !== undefined) return
      this.#beat(session, count + 1)
      if (session.expireIfDue()) return
      this.claims.reenter()
      this.#queue.push(...this.#owed.splice(0))
      if (count % 3 === 0) this.resync()
      else this.request(this.#renewal(session))
    }, delay)
  }

  /** Extends the lease, and asks who else has ended. */
  renew(): void {
    if (this.session !== undefined) this.request(this.#renewal(this.session))
  }

  #renewal(session: Session): Request<"session.renew"> {
    return {
      verb: "session.renew",
      args: [],
      session,
      moot: () => {},
      settle: ([, nearest, ended]) => {
        this.expect(nearest)
        if (ended === "") return
        const ids = ended.split(" ").filter((id) => id !== session.id)
        const reaped = Promise.all(ids.map((id) => this.kernel.reap(this, id)))
        // There may be more than one answer names.
        if (ids.length >= mostNamed) void reaped.then(() => session.lost ?? this.request(this.#renewal(session)))
      },
      fail: (error) => this.kernel.log("Warn", "a renewal was refused", error)
    }
  }

  /** Asks for a reaping when the nearest deadline of another session has passed, if somebody waits here. */
  expect(nearest: number): void {
    if (nearest < 0 || !this.claims.isWaiting()) return
    // Whoever is first does the work; the others find nothing left to do.
    const at = performance.now() + nearest + 1 + Math.random() * 10
    if (this.#reap !== undefined) {
      if (this.#nearest <= at) return
      clearTimeout(this.#reap)
    }
    this.#nearest = at
    this.#reap = setTimeout(() => {
      this.#reap = undefined
      if (this.claims.isWaiting()) this.renew()
    }, at - performance.now())
  }

  /** Renews, and asks what has become of everything that waits: a lost event is a delay, never a hang. */
  resync(): void {
    const session = this.session
    if (session === undefined || session.expireIfDue()) return
    this.renew()
    this.claims.check(session)
  }

  #suspend(session: Session, cause: RedisError): void {
    if (this.phase !== "open") return
    this.#enter("suspended", undefined, session)
    this.kernel.log("Warn", `partition ${this.index}: the session is suspended`, cause)
  }

  /** The session is over: whatever it held is lost, and whoever waited waits in the next one. */
  lose(session: Session, reason: LossReason): void {
    if (session.lost !== undefined) return
    session.lost = reason
    this.session = undefined
    clearTimeout(this.#trust)
    clearTimeout(this.#heartbeat)
    clearTimeout(this.#reap)
    this.#trust = this.#heartbeat = this.#reap = undefined
    this.#nearest = Number.POSITIVE_INFINITY

    const sent = this.#inFlight?.length ?? 0
    const requests = [...this.#inFlight ?? [], ...this.#queue, ...this.#owed]
    this.#inFlight = undefined
    this.#owed = []
    this.#queue = []
    this.#enter(reason === "closed" ? "closed" : "lost", reason, session)

    const held = this.claims.leaveSession(reason)
    for (const [at, request] of requests.entries()) {
      if (request.cancelled === true) continue
      if (request.session !== undefined || request.moot !== undefined && at < sent) request.moot?.(at < sent)
      else if (this.kernel.closed) request.fail(new CoordinatorError({ reason: new CoordinatorClosed({}) }))
      else this.#queue.push(request)
    }
    if (reason !== "closed") {
      // Ended at once, it would cost the finalizers of what was held their margin: the next in line would be granted.
      const { margin } = this.kernel.settings
      this.#former.set(session.id, held.length > 0 ? performance.now() + margin : 0)
      if (held.length > 0) void this.kernel.sleep(margin + 1).then(() => this.#retire())
      this.kernel.lost(this, session, reason, held.length)
      if (this.claims.size > 0 || this.#queue.length > 0 || !this.kernel.closed) this.open()
    }
    for (const claim of held) claim.lose(reason)
    if (held.length > 0) this.kernel.watchOverruns(held)
  }

  #enter(phase: Phase, reason?: LossReason, session = this.session): void {
    const from = this.phase
    if (from === phase) return
    this.phase = phase
    this.kernel.transition(this, session, from, phase, reason)
  }

  // ---------------------------------------------------------------------------------------------------------------
  // Mailbox
  // ---------------------------------------------------------------------------------------------------------------

  deliver(session: Session, id: string, event: ReadonlyArray<unknown>): void {
    if (session.lost !== undefined) return
    session.read = id
    if (session.expireIfDue()) return
    this.claims.hear(session, event)
  }

  /** A session is not closed before what has come of its holds is known: until the result is called. */
  concluding(): () => void {
    this.#concluding++
    return () => {
      if (--this.#concluding === 0) this.#concluded?.()
    }
  }

  /** Ends the session on our own word, and releases what it owns. */
  async close(): Promise<void> {
    if (this.#concluding > 0 && this.session !== undefined) {
      await new Promise<void>((resolve) => this.#concluded = resolve)
    }
    const session = this.session
    if (session === undefined) this.#refuse(new CoordinatorError({ reason: new CoordinatorClosed({}) }))
    else this.lose(session, "closed")
    // One that is being opened would outlive us.
    await this.#asking?.catch(() => {})
    const ids = [...this.#former.keys()]
    if (session !== undefined) ids.push(session.id)
    await Promise.all(ids.map((id) => this.#end(id, true)))
  }
}

// As many sessions as one renewal names: REAP_SESSIONS in lua/kernel.lua.
const mostNamed = 16
