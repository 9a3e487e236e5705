/**
 * The client's half of a partition actor: one session, one batch in flight, and the claims (holds and waits) that hang
 * off the session. Plain callbacks and the monotonic clock: this is the hot path, and a test's `TestClock` must not
 * lose sessions.
 */
import { MissingPermission, RedisError } from "../Redis.ts"
import {
  argsOf,
  Asking,
  type Claim,
  type ClaimVerb,
  type LossReason,
  type Outcome,
  type Phase,
  Releasing,
  type Request,
  Session,
  type Verb
} from "./claim.ts"
import { CoordinatorClosed, CoordinatorError, coordinatorError, Incompatible, Overloaded } from "./errors.ts"
import type { Kernel } from "./kernel.ts"
import { prefixOf } from "./keys.ts"
import { allowOom, protocol, type Requests } from "./lua.ts"
import { ascii } from "./wire.ts"

export class Partition {
  readonly prefix: string
  readonly index: number
  session: Session | undefined = undefined
  phase: Phase = "closed"
  readonly claims = new Map<string, Claim>()
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
  #waiting = 0
  #observing = 0
  #concluding = 0
  #concluded: (() => void) | undefined = undefined

  constructor(kernel: Kernel, index: number) {
    this.kernel = kernel
    this.index = index
    this.prefix = prefixOf(kernel.settings.namespace, index)
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
    if (this.session === undefined) return this.#open()
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
          for (const event of events) this.#hear(session, event)
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

  #open(): void {
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
        this.#reenter()
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
    for (const claim of [...this.claims.values()]) this.fail(claim, refusal)
    if (this.claims.size === 0) return
    void this.kernel.sleep(this.kernel.settings.lease / 3).then(() => {
      if (this.session === undefined && this.claims.size > 0) this.#open()
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
      this.#reenter()
      this.#queue.push(...this.#owed.splice(0))
      if (count % 3 === 0) this.resync()
      else this.request(this.#renewal(session))
    }, delay)
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
    if (nearest < 0 || !this.isWaiting()) return
    // Whoever is first does the work; the others find nothing left to do.
    const at = performance.now() + nearest + 1 + Math.random() * 10
    if (this.#reap !== undefined) {
      if (this.#nearest <= at) return
      clearTimeout(this.#reap)
    }
    this.#nearest = at
    this.#reap = setTimeout(() => {
      this.#reap = undefined
      if (this.session !== undefined && this.isWaiting()) this.request(this.#renewal(this.session))
    }, at - performance.now())
  }

  isWaiting(): boolean {
    return this.#waiting > 0
  }

  /** From now until the result is called, the end of another session is something that is waited for. */
  watch(): () => void {
    this.#waiting++
    if (this.session !== undefined) this.request(this.#renewal(this.session))
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

  /** Renews, and asks what has become of everything that waits: a lost event is a delay, never a hang. */
  resync(): void {
    const session = this.session
    if (session === undefined || session.expireIfDue()) return
    this.request(this.#renewal(session))
    for (const claim of this.claims.values()) {
      if (claim.observation !== undefined && claim.state === "held") this.#look(claim, session)
      if (claim.state !== "queued") continue
      this.request({
        verb: claim.check,
        key: claim.key,
        args: [claim.id],
        session,
        moot: () => {},
        settle: (reply) => {
          if (claim.state !== "queued" || claim.session !== session) return
          if (reply[0] === "granted") return this.#grant(claim, session, reply)
          if (reply[0] === "queued") return this.expect(reply[2])
          // The actor does not know it, though nobody took it out: it takes its place again.
          this.#send(claim)
        },
        fail: (error) => this.kernel.log("Warn", "a resync was refused", error)
      })
    }
  }

  // To join again is to be told how it is.
  #look(claim: Claim, session: Session): void {
    this.request({
      verb: claim.verb,
      key: claim.key,
      args: argsOf(claim) as Requests[ClaimVerb]["args"],
      session,
      moot: () => {},
      settle: (reply) => {
        if (reply[0] === "observing" && claim.state === "held") claim.observation!.observe(reply.slice(1))
      },
      fail: (error) => this.kernel.log("Warn", "a membership could not be checked", error)
    })
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

    const held: Array<Claim> = []
    for (const claim of [...this.claims.values()]) {
      claim.request = undefined
      if (claim.state === "held" && !claim.standing) {
        this.claims.delete(claim.id)
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
    for (const [at, request] of requests.entries()) {
      if (request.cancelled === true) continue
      if (request.session !== undefined || request.moot !== undefined && at < sent) request.moot?.(at < sent)
      else if (reason === "closed") request.fail(new CoordinatorError({ reason: new CoordinatorClosed({}) }))
      else this.#queue.push(request)
    }
    if (reason !== "closed") {
      // Ended at once, it would cost the finalizers of what was held their margin: the next in line would be granted.
      const { margin } = this.kernel.settings
      this.#former.set(session.id, held.length > 0 ? performance.now() + margin : 0)
      if (held.length > 0) void this.kernel.sleep(margin + 1).then(() => this.#retire())
      this.kernel.lost(this, session, reason, held.length)
      if (this.claims.size > 0 || this.#queue.length > 0 || !this.kernel.closed) this.#open()
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
  // Claims
  // ---------------------------------------------------------------------------------------------------------------

  #become(claim: Claim, state: Claim["state"]): void {
    this.#waiting += waits(state) - waits(claim.state)
    if (claim.observation !== undefined) this.#observing += Number(state === "held") - Number(claim.state === "held")
    claim.state = state
    if (state === "done") this.claims.delete(claim.id)
  }

  claim(claim: Claim): void {
    if (claim.member?.released === true) {
      claim.state = "done"
      return claim.settle(closed)
    }
    this.claims.set(claim.id, claim)
    this.#send(claim)
  }

  #reenter(): void {
    const claims = [...this.claims.values()].filter((claim) => claim.state === "idle")
    // Who makes a semaphore exist goes first.
    claims.sort((a, b) => Number(b.standing) - Number(a.standing))
    for (const claim of claims) this.#send(claim)
  }

  #send(claim: Claim): void {
    const session = this.session
    claim.session = session
    if (session === undefined) {
      // It is sent when the session is open, see #reenter.
      this.#become(claim, "idle")
      if (this.kernel.closed) return this.fail(claim, new CoordinatorError({ reason: new CoordinatorClosed({}) }))
      return this.#open()
    }
    this.#become(claim, "pending")
    claim.again = false
    this.request(claim.request = new Asking(claim, session))
  }

  /** What a request to take has come to. */
  answer(claim: Claim, reply: Requests[ClaimVerb]["reply"]): void {
    claim.request = undefined
    const session = this.session!
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
        this.kernel.metrics.waiting()
        this.kernel.listen(this)
        return this.expect(reply[2])
      case "observing":
        if (claim.state !== "pending") return
        session.waited = true
        // Whoever is told that it has joined knows how it is.
        claim.observation!.observe(reply.slice(1))
        this.#grant(claim, session, observing)
        return this.kernel.listen(this)
      default:
        if (claim.state !== "pending") return
        if (reply[0] === "mismatch" && claim.capacity > 0 && claim.observation === undefined) {
          // Joined again after a loss, and others were faster with another size: theirs is in force.
          claim.verb = "semaphore.attach"
          return this.#send(claim)
        }
        if (claim.standing && claim.token > 0) {
          this.kernel.log(
            "Warn",
            `partition ${this.index}: what was open before could not be opened again: ${reply[0]}`
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
      if (token > claim.token && claim.session === session) this.lose(session, "rolledBack")
      return
    }
    // Given up meanwhile: its release is on the way. And nothing is granted on a lease that has run out meanwhile.
    if (claim.state === "done" || session.lost !== undefined || session.expireIfDue()) return
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
    this.kernel.metrics.granted()
    claim.settle(granted)
  }

  /** A request to take could not be answered. */
  fail(claim: Claim, error: CoordinatorError): void {
    if (claim.state === "done" || claim.state === "held") return
    claim.request = undefined
    if (claim.standing && claim.token > 0) {
      // It was granted once, so nobody waits for the answer.
      if (this.kernel.closed) {
        this.#become(claim, "done")
        return claim.observation?.closed?.()
      }
      // It is tried again with the next heartbeat.
      this.kernel.log("Warn", `partition ${this.index}: what was open before could not be opened again`, error)
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
    if (
      state === "pending" && claim.request !== undefined && this.#queue.includes(claim.request as unknown as Request)
    ) {
      claim.request.cancelled = true
      return done()
    }
    if (state === "held") this.kernel.metrics.released()
    this.request(claim.releasing = new Releasing(claim, done))
  }

  // What was asked for under a membership ends before it does.
  #dismiss(member: Claim): void {
    for (const claim of [...this.claims.values()]) {
      if (claim.member !== member) continue
      if (claim.state === "held") {
        claim.lose("closed")
      } else {
        this.release(claim, () => {})
        claim.settle(closed)
      }
    }
  }

  /** It is over by the word of the actor, and nothing is left to give back. */
  forget(claim: Claim): void {
    if (claim.state !== "held") return
    this.kernel.metrics.released()
    this.#become(claim, "done")
    claim.released = true
  }

  // ---------------------------------------------------------------------------------------------------------------
  // Mailbox
  // ---------------------------------------------------------------------------------------------------------------

  deliver(session: Session, id: string, event: ReadonlyArray<unknown>): void {
    if (session.lost !== undefined) return
    session.read = id
    if (session.expireIfDue()) return
    this.#hear(session, event)
  }

  #hear(session: Session, event: ReadonlyArray<unknown>): void {
    if (event[0] === "each") {
      const ids = event[1] as ReadonlyArray<string>
      const own = event[2] as ReadonlyArray<unknown>
      const reply = event.slice(3)
      for (let at = 0; at < ids.length; at++) {
        this.#tell(ids[at]!, session, own.length === 0 ? reply : [...reply, own[at]])
      }
      return
    }
    const claim = this.claims.get(String(event[1]))
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
      case "refused": {
        if (claim.state !== "queued" && claim.state !== "pending") return
        this.#become(claim, "done")
        return claim.settle(["tooBig", Number(event[2])])
      }
    }
  }

  // One of the claims that an event is about: it has the answer that it waits for.
  #tell(id: string, session: Session, reply: ReadonlyArray<unknown>): void {
    const claim = this.claims.get(id)
    if (claim === undefined) return
    if (reply[0] === "granted") return this.#grant(claim, session, reply)
    if (waits(claim.state) === 0) return
    this.#become(claim, "done")
    claim.settle(reply as unknown as Outcome)
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
    if (this.#concluding > 0) await new Promise<void>((resolve) => this.#concluded = resolve)
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

const granted: Outcome = ["granted"]

const closed: Outcome = ["closed"]

// To the kernel, to be a member is to hold something that nobody else can take.
const observing = ["granted", 1, 1] as const

const waits = (state: Claim["state"]): number => state === "pending" || state === "queued" ? 1 : 0
