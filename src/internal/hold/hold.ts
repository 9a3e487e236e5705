/** Something that is held: its token, its loss, and the programs that run under it. */

import * as DateTime from "effect/DateTime"
import * as Effect from "effect/Effect"
import * as Inspectable from "effect/Inspectable"
import { type Claim, type EndReason, Entry, type Keeper, type Kind } from "./claim.ts"
import type { Stretch } from "./kept.ts"
import { LeaseLost } from "./loss.ts"
import type { Membership } from "./membership.ts"

/** The public part of a hold. */
export interface Lease {
  readonly "~lockstep/Lease": "~lockstep/Lease"
  /** The kind of thing that is held. */
  readonly kind: Kind
  /** The name it was acquired under. */
  readonly key: string
  /** The fencing token: a whole number of microseconds, below 2^53. It changes only when a read lock is upgraded. */
  readonly token: number
  /** By this process's clock: for people, not for decisions. */
  readonly acquiredAt: DateTime.Utc
  /** Never succeeds; fails when the lease is lost. */
  readonly lost: Effect.Effect<never, LeaseLost>
  /** Whether it is still held as far as this process can know. */
  readonly isHeld: Effect.Effect<boolean>
}

/** Whether this process knows that it does not hold it any more. Of a plain token, it knows nothing. */
export const isKnownLost = (lease: Pick<Lease, "token">): boolean => {
  if (!(lease instanceof Hold)) return false
  lease.session?.expireIfDue()
  return !lease.active
}

/** As `isKnownLost`, and no session is lost by asking: for who is in the middle of something. */
export const isOver = (lease: Pick<Lease, "token">): boolean =>
  lease instanceof Hold && (!lease.active || lease.session!.remaining <= 0)

const none: ReadonlyArray<never> = []

const ignore = () => {}

export class Hold extends Entry implements Lease {
  token = 0
  /** It is one of several, as Redis sees it: its process may keep the lock. */
  stretch: Stretch | undefined = undefined
  /** Another process wanted it before the grant was received. */
  recalled = false
  /** How much of the capacity it takes: upgrading and downgrading a read-write lock change that. */
  weight: number
  /** The data that came with the grant, if any. */
  payload: ReadonlyArray<unknown> = none
  /** By the wall clock, for people; by the monotonic clock. */
  since = 0
  heldAt = 0
  loss: EndReason | undefined = undefined
  /** It ends with the last of them, so a child that outlives its parent is still safe. */
  users = 1
  /** How many protected programs run under it: they are late when the margin has passed after a loss. */
  protecting = 0
  /** The id of the fiber that has acquired it into its scope: a hold must not keep a fiber that is over. */
  fiber: number | undefined = undefined
  /** Called when it is released; more than once if it is released again. */
  onRelease: () => void = ignore
  /** A request that ends it is under way. */
  concluding = false
  /** Settles when it has been released, once that has begun. */
  surrendering: Promise<void> | undefined = undefined
  /** The membership that it ends with. */
  readonly member: Membership | undefined
  // One, or several: a hold can have many users.
  #observers: (() => void) | Set<() => void> | undefined = undefined
  #calm: Array<() => void> | undefined = undefined
  #ended: Array<() => void> | undefined = undefined

  constructor(id: string, claim: Claim, keeper: Keeper, member: Membership | undefined, weight: number) {
    super(id, claim, keeper)
    this.member = member
    this.weight = weight
  }

  // Of the class: there can be many holds.
  get "~lockstep/Lease"() {
    return "~lockstep/Lease" as const
  }

  get kind(): Kind {
    return this.claim.place.kind
  }

  get key(): string {
    return this.claim.place.name
  }

  get acquiredAt(): DateTime.Utc {
    return DateTime.makeUnsafe(this.since)
  }

  get active(): boolean {
    return this.state === "held" && this.loss === undefined
  }

  get isHeld(): Effect.Effect<boolean> {
    return Effect.sync(() => !isKnownLost(this))
  }

  get lost(): Effect.Effect<never, LeaseLost> {
    return Effect.callback<never, LeaseLost>((resume) => {
      const told = () => resume(Effect.fail(this.lossError()))
      this.onLoss(told)
      return Effect.sync(() => this.offLoss(told))
    })
  }

  toJSON() {
    const { acquiredAt, active, key, kind, token } = this
    return { _id: "lockstep/Lease", kind, key, token, acquiredAt, held: active }
  }

  [Inspectable.NodeInspectSymbol]() {
    return this.toJSON()
  }

  override toString(): string {
    return JSON.stringify(this)
  }

  /** Why it is no longer held; `given` is said of one that was released. */
  lossError(given: EndReason = "closed"): LeaseLost {
    const { kind, name, namespace } = this.claim.place
    return new LeaseLost({ kind, key: name, namespace, token: this.token, reason: this.loss ?? given })
  }

  /** Calls `f` once: when the hold is lost, or at once if it has been lost. */
  onLoss(f: () => void): void {
    const observers = this.#observers
    if (this.loss !== undefined) f()
    else if (observers === undefined) this.#observers = f
    else if (observers instanceof Set) observers.add(f)
    else this.#observers = new Set([observers, f])
  }

  offLoss(f: () => void): void {
    if (this.#observers === f) this.#observers = undefined
    else if (this.#observers instanceof Set) this.#observers.delete(f)
  }

  lose(reason: EndReason): void {
    if (this.loss !== undefined) return
    this.loss = reason
    const observers = this.#observers
    this.#observers = undefined
    if (observers instanceof Set) { for (const f of observers) f() }
    else observers?.()
  }

  /** A protected program has ended. */
  unprotect(): void {
    if (--this.protecting > 0) return
    const waiting = this.#calm
    this.#calm = undefined
    if (waiting !== undefined) { for (const f of waiting) f() }
  }

  /** When no protected program runs under it any more. */
  calm(): Promise<void> {
    if (this.protecting === 0) return Promise.resolve()
    return new Promise((resolve) => (this.#calm ??= []).push(resolve))
  }

  /** Its last user has released it. */
  end(): void {
    const waiting = this.#ended
    this.#ended = undefined
    if (waiting !== undefined) { for (const f of waiting) f() }
  }

  /** When its last user has released it. */
  ended(): Promise<void> {
    if (this.state === "done") return Promise.resolve()
    return new Promise((resolve) => (this.#ended ??= []).push(resolve))
  }
}
