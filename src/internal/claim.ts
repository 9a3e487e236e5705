/**
 * What hangs off a session: claims (holds and waits), and the requests that are made for them.
 */
import type { CoordinatorError } from "./errors.ts"
import type { Requests } from "./lua.ts"
import type { Partition } from "./partition.ts"
import { type Address, addressOf } from "./wire.ts"

/** Why a session, and with it every hold, was lost. */
export type LossReason = "expired" | "unknown" | "rolledBack" | "closed"

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
  /** Called instead of a reply when the session it is bound to was lost. Other requests go to the next session. */
  readonly moot?: (() => void) | undefined
  readonly settle: (reply: Requests[V]["reply"]) => void
  readonly fail: (error: CoordinatorError) => void
  cancelled?: boolean | undefined
}

export type Outcome =
  | Extract<
    Requests["semaphore.take" | "semaphore.create" | "latch.join"]["reply"],
    readonly ["busy"] | readonly ["missing"] | readonly [tag: "tooBig" | "mismatch", capacity: number]
  >
  | readonly [tag: "granted"]
  | readonly [tag: "failed", error: CoordinatorError]

/** What a membership hears: how it is when it joins, every change, and how it is whenever it may have missed one. */
export interface Observation {
  readonly keep: number
  readonly observe: (state: ReadonlyArray<string | number>) => void
}

/** A request to hold, from before it is sent until it is given back. */
export class Claim {
  state: "idle" | "pending" | "queued" | "held" | "done" = "idle"
  session: Session | undefined = undefined
  token = 0
  capacity = 0
  /** Milliseconds since the epoch, for people. */
  acquiredAt = 0
  lost: LossReason | "maxHold" | undefined = undefined
  /** Its body is still running: it is late when the margin has passed after a loss. */
  protecting = 0
  request: Asking | undefined = undefined
  observers: Array<() => void> | undefined = undefined

  readonly partition: Partition
  readonly id: string
  readonly key: string
  verb: "semaphore.take" | "semaphore.create" | "semaphore.attach" | "latch.join"
  weight: number
  total: number
  readonly wait: boolean
  /** Held by the coordinator rather than by a fiber: after a loss it is taken again. */
  readonly standing: boolean
  /** Of a membership that hears of changes. */
  readonly observation: Observation | undefined
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

  lose(reason: LossReason | "maxHold"): void {
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

/** A request to take, which is never moot: the claim itself goes to the next session. */
export class Asking implements Request<Claim["verb"]> {
  readonly claim: Claim
  readonly session: Session | undefined
  readonly verb: Claim["verb"]
  readonly key: string
  readonly args: Requests[Claim["verb"]]["args"]
  readonly moot = nothing
  cancelled = false

  constructor(claim: Claim, session: Session | undefined) {
    this.claim = claim
    this.session = session
    this.verb = claim.verb
    this.key = claim.key
    this.args = claim.verb === "semaphore.take"
      ? [claim.id, claim.weight, claim.total, claim.wait]
      : claim.verb === "semaphore.create"
      ? [claim.id, claim.total]
      : claim.verb === "latch.join"
      ? [claim.id, claim.total, claim.observation!.keep]
      : [claim.id]
  }

  settle(reply: Requests[Claim["verb"]]["reply"]): void {
    this.claim.partition.answer(this.claim, reply)
  }

  fail(error: CoordinatorError): void {
    this.claim.partition.fail(this.claim, error)
  }
}

/** A request to give back or to leave the queue. With the session, the claim is over anyway. */
export class Releasing implements Request<"semaphore.release" | "session.leave"> {
  readonly claim: Claim
  readonly session: Session | undefined
  readonly verb: "semaphore.release" | "session.leave"
  readonly key: string
  readonly args: [string]
  readonly moot: () => void
  readonly settle: () => void
  cancelled = false

  constructor(claim: Claim, done: () => void) {
    this.claim = claim
    this.session = claim.session
    this.verb = claim.observation === undefined ? "semaphore.release" : "session.leave"
    this.key = claim.key
    this.args = [claim.id]
    this.moot = done
    this.settle = done
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
