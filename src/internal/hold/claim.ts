/**
 * What hangs off a session: claims (holds and waits), and the requests that are made for them.
 */
import type { CoordinatorError } from "../actor/errors.ts"
import type { Requests } from "../actor/lua.ts"
import type { Partition } from "../actor/partition.ts"
import { type Address, addressOf } from "../actor/wire.ts"

/** Why a session, and with it every hold, was lost. */
export type LossReason = "expired" | "unknown" | "rolledBack" | "closed"

/** Why something is not held any more. */
type EndReason = LossReason | "maxHold" | "resigned" | "revoked"

/** What a session can be, for users to see. */
export type Phase = "opening" | "open" | "suspended" | "lost" | "closed"

export type Verb = keyof Requests

export interface Request<V extends Verb = Verb> {
  readonly verb: V
  /** Of the resource that it is about, if it is about one. */
  readonly key?: string | undefined
  readonly args: Requests[V]["args"]
  /** The session it is bound to: with that, it is moot. */
  readonly session?: Session | undefined
  /**
   * Called instead of a reply when the session was lost; `sent` says whether it can have been executed. Of requests that
   * are bound to no session, it is called for those that were sent: they are not to be repeated. All others go to the
   * next session.
   */
  readonly moot?: ((sent: boolean) => void) | undefined
  readonly settle: (reply: Requests[V]["reply"]) => void
  readonly fail: (error: CoordinatorError) => void
  cancelled?: boolean | undefined
}

/** The requests that can grant something, or let it be observed. */
export type ClaimVerb = {
  [V in Verb]: Extract<Requests[V]["reply"], readonly ["queued" | "observing", ...any]> extends never
    ? V extends "semaphore.create" | "tasks.register" ? V : never
    : V extends `${string}.check` ? never
    : V
}[Verb]

/** The requests that ask what has become of one that waits. */
export type CheckVerb = Extract<Verb, `${string}.check`>

type ClaimReply = Requests[ClaimVerb]["reply"]

/** What a claim can come to instead of being granted; it is "closed" by this side. */
export type Refusal =
  | Exclude<ClaimReply, readonly ["granted" | "queued" | "observing", ...any]>
  | readonly [tag: "closed"]

export type Outcome = Refusal | readonly [tag: "granted"] | readonly [tag: "failed", error: CoordinatorError]

/** What a membership hears. */
export interface Observation {
  /** How it is when it joins, every change, and how it is whenever it may have missed one. */
  readonly observe: (state: ReadonlyArray<unknown>) => void
  /** The session was lost: what it had there is going to be reaped, and it joins again with the next one. */
  readonly lost?: (() => void) | undefined
  /** The coordinator was closed: there is no next session. */
  readonly closed?: (() => void) | undefined
}

/** What the actor is told besides the id; a function is asked each time. */
export type Details =
  | ReadonlyArray<string | number | boolean>
  | (() => ReadonlyArray<string | number | boolean>)

/** A request to hold, from before it is sent until it is given back. */
export class Claim {
  state: "idle" | "pending" | "queued" | "held" | "done" = "idle"
  session: Session | undefined = undefined
  token = 0
  capacity = 0
  /** What came with the grant, if anything did. */
  payload: ReadonlyArray<unknown> = none
  /** Milliseconds since the epoch, for people. */
  acquiredAt = 0
  lost: EndReason | undefined = undefined
  /** What was asked for in this session before is asked for again: the actor may know of it. */
  known = false
  /** It was told to ask again before the reply that it waits. */
  again = false
  /** Given back, or given up. */
  released = false
  /** Its body is still running: it is late when the margin has passed after a loss. */
  protecting = 0
  request: Asking | undefined = undefined
  releasing: Releasing | undefined = undefined
  observers: Array<() => void> | undefined = undefined
  #calm: Array<() => void> | undefined = undefined

  readonly partition: Partition
  readonly id: string
  readonly key: string
  verb: ClaimVerb
  weight: number
  total: number
  readonly wait: boolean
  /** Held by the coordinator rather than by a fiber: after a loss it is taken again. */
  readonly standing: boolean
  /** Of a membership that hears of changes. */
  readonly observation: Observation | undefined
  /** If it is not about a semaphore. */
  readonly details: Details
  readonly check: CheckVerb
  /** The membership that it ends with. */
  readonly member: Claim | undefined
  settle: (outcome: Outcome) => void

  constructor(
    partition: Partition,
    options: {
      readonly key: string
      readonly verb: Claim["verb"]
      readonly weight: number
      readonly capacity: number
      readonly wait: boolean
      readonly standing: boolean
      readonly observation?: Observation | undefined
      readonly details?: Details | undefined
      readonly check?: CheckVerb | undefined
      readonly member?: Claim | undefined
    }
  ) {
    this.partition = partition
    this.id = partition.kernel.nextId()
    this.key = options.key
    this.verb = options.verb
    this.weight = options.weight
    this.total = options.capacity
    this.wait = options.wait
    this.standing = options.standing
    this.observation = options.observation
    this.details = options.details ?? none
    this.check = options.check ?? "semaphore.check"
    this.member = options.member
    this.settle = () => {}
  }

  onLoss(f: () => void): () => void {
    if (this.lost !== undefined) {
      f()
      return () => {}
    }
    const observers = this.observers ??= []
    observers.push(f)
    return () => {
      const at = observers.indexOf(f)
      if (at >= 0) observers.splice(at, 1)
    }
  }

  /** A body has ended. */
  unprotect(): void {
    if (--this.protecting > 0) return
    const waiting = this.#calm
    this.#calm = undefined
    if (waiting !== undefined) { for (const f of waiting) f() }
  }

  /** When no body is running under it any more. */
  calm(): Promise<void> {
    if (this.protecting === 0) return Promise.resolve()
    return new Promise((resolve) => (this.#calm ??= []).push(resolve))
  }

  lose(reason: EndReason): void {
    if (this.lost !== undefined) return
    this.lost = reason
    const observers = this.observers
    this.observers = undefined
    // A copy: observers take themselves out while they are called.
    if (observers !== undefined) { for (const f of [...observers]) f() }
  }
}

/** The coordinator's lease with one partition. */
export class Session {
  readonly id: string
  readonly mailbox: string
  readonly address: Address
  number = 0
  /** Monotonic: until then, nobody else can have been granted what we hold. */
  trustedUntil: number
  /** Mailbox position: read so far, and acknowledged so far. */
  read: string
  acknowledged: string
  lost: LossReason | undefined = undefined
  /** Has ever waited for something, so that its mailbox is worth reading. */
  waited = false

  readonly partition: Partition

  constructor(partition: Partition, id: string, position: string, trustedUntil: number) {
    this.partition = partition
    this.id = id
    this.mailbox = `${partition.prefix}mail:${id}`
    this.address = addressOf(partition.prefix, id)
    this.read = position
    this.acknowledged = position
    this.trustedUntil = trustedUntil
  }

  /** Gives up a session whose trust has run out. True at the moment when it does. */
  expireIfDue(): boolean {
    if (this.lost !== undefined || performance.now() < this.trustedUntil) return false
    this.partition.lose(this, "expired")
    return true
  }
}

const nothing = () => {}
const none: ReadonlyArray<never> = []

/** What a claim asks for. */
export const argsOf = (claim: Claim): ReadonlyArray<string | number | boolean> => {
  switch (claim.verb) {
    case "semaphore.take":
      return [claim.id, claim.weight, claim.total, claim.wait]
    case "semaphore.create":
      return [claim.id, claim.total]
    case "semaphore.attach":
      return [claim.id]
    default:
      return [claim.id, ...typeof claim.details === "function" ? claim.details() : claim.details]
  }
}

/** Most things that are held are semaphores to their actor; the others know what giving them up means. */
const releases = (verb: ClaimVerb): "semaphore.release" | "session.leave" =>
  verb === "semaphore.take" || verb === "semaphore.create" || verb === "semaphore.attach"
    ? "semaphore.release"
    : "session.leave"

/** A request to take, which is never moot: the claim itself goes to the next session. */
export class Asking implements Request<ClaimVerb> {
  readonly claim: Claim
  readonly session: Session | undefined
  readonly verb: ClaimVerb
  readonly key: string
  readonly args: Requests[ClaimVerb]["args"]
  readonly moot = nothing
  cancelled = false

  constructor(claim: Claim, session: Session | undefined) {
    this.claim = claim
    this.session = session
    this.verb = claim.verb
    this.key = claim.key
    this.args = argsOf(claim) as Requests[ClaimVerb]["args"]
  }

  settle(reply: ClaimReply): void {
    this.claim.partition.claims.answer(this.claim, reply)
  }

  fail(error: CoordinatorError): void {
    this.claim.partition.claims.fail(this.claim, error)
  }
}

/** A request to give back or to leave the queue. With the session, the claim is over anyway. */
export class Releasing implements Request<"semaphore.release" | "session.leave"> {
  readonly claim: Claim
  readonly session: Session | undefined
  readonly verb: "semaphore.release" | "session.leave"
  readonly key: string
  readonly args: [string]
  readonly #done: () => void
  #also: Array<() => void> | undefined = undefined
  #settled = false
  cancelled = false

  constructor(claim: Claim, done: () => void) {
    this.claim = claim
    this.session = claim.session
    this.verb = releases(claim.verb)
    this.key = claim.key
    this.args = [claim.id]
    this.#done = done
  }

  /** Who gives it back a second time waits for the same answer. */
  also(done: () => void): void {
    if (this.#settled) done()
    else (this.#also ??= []).push(done)
  }

  settle(): void {
    this.#settled = true
    this.#done()
    if (this.#also !== undefined) { for (const done of this.#also) done() }
  }

  moot(): void {
    this.settle()
  }

  fail(error: CoordinatorError): void {
    const { partition } = this.claim
    if (error.reason._tag === "RedisError") {
      // The session lives on, and with it what it holds.
      partition.kernel.log("Warn", "a release was refused, and is tried again with the next heartbeat", error)
      return partition.owe(this)
    }
    // The actor cannot do it, nor could it the next time.
    partition.kernel.log("Error", "a release has failed", error)
    this.settle()
  }
}
