/**
 * What a holder has: the key, the fencing token, and word of its loss.
 *
 * **Guarantees**
 *
 * - `token` is larger than the token of every earlier hold of the same key, also after the key was deleted, Redis was
 *   flushed, or a fail-over lost writes (as long as the new server's clock is not behind the last token).
 * - A lease is held until it is given back, or until `lost` fails. It is reported lost on this process's own monotonic
 *   clock, a margin before anybody else can be granted.
 *
 * **Gotchas**
 *
 * - A lease is not a mutual exclusion of side effects. A process that is paused between two instructions finds out only
 *   afterwards. What must not be written by a former holder has to check the token: see `Fence`.
 * - Renewal needs the event loop. Synchronous work that is longer than the lease loses it.
 *
 * @since 0.1.0
 */
import type * as DateTime from "effect/DateTime"
import * as Effect from "effect/Effect"
import { dual } from "effect/Function"
import * as Option from "effect/Option"
import * as internal from "./internal/hold/held.ts"
import type { LeaseLost } from "./internal/hold/loss.ts"
import { protectLease } from "./internal/hold/protect.ts"

/**
 * @category type IDs
 * @since 0.1.0
 */
export const TypeId: TypeId = "~lockstep/Lease"

/**
 * @category type IDs
 * @since 0.1.0
 */
export type TypeId = "~lockstep/Lease"

/**
 * A hold of a lock, a read or write lock, or of permits.
 *
 * @category models
 * @since 0.1.0
 */
export interface Lease {
  readonly [TypeId]: TypeId
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

export {
  /**
   * A hold has ended before it was given back.
   *
   * **Details**
   *
   * - `expired`: the lease could not be renewed in time (Redis away, the event loop blocked, the process paused).
   * - `unknown`: Redis does not know the session any more (flushed, restarted without data, ended by another).
   * - `rolledBack`: Redis has forgotten what it had acknowledged (fail-over to a replica that had missed it).
   * - `closed`: the coordinator was closed.
   * - `maxHold`: held for longer than `maxHold` allows.
   * - `resigned`: a leader has resigned, or has handed over to another.
   * - `revoked`: ended by somebody else, as the registrations of a task group, and the action of a barrier, are by a reset.
   *
   * @category errors
   * @since 0.1.0
   */
  LeaseLost,
  /**
   * It was not granted within `wait`.
   *
   * @category errors
   * @since 0.1.0
   */
  WaitTimeout
} from "./internal/hold/loss.ts"

/**
 * Runs an effect for as long as the lease is held: when the lease is lost the effect is interrupted, its finalizers run,
 * and the result is `LeaseLost`. `withLock` and the other `with...` forms do this by themselves.
 *
 * @category combinators
 * @since 0.1.0
 */
export const protect: {
  (lease: Lease): <A, E, R>(self: Effect.Effect<A, E, R>) => Effect.Effect<A, E | LeaseLost, R>
  <A, E, R>(self: Effect.Effect<A, E, R>, lease: Lease): Effect.Effect<A, E | LeaseLost, R>
} = dual(
  2,
  <A, E, R>(self: Effect.Effect<A, E, R>, lease: Lease): Effect.Effect<A, E | LeaseLost, R> =>
    protectLease(self, lease, (error) => error)
)

/**
 * The innermost lease that the current fiber runs under, acquired by it or inherited from its parent.
 *
 * **Example** (Using the token of the surrounding lock)
 *
 * ```ts
 * import { Lease, Lock } from "lockstep"
 * import { Effect, Option } from "effect"
 *
 * const program = Effect.gen(function*() {
 *   const lease = Option.getOrThrow(yield* Lease.current)
 *   yield* Effect.log(`writing with token ${lease.token}`)
 * }).pipe(Lock.withLock("report"))
 * ```
 *
 * It may be of any kind: inside `withPermit` inside `withLock` it is that of the permit. Use `currentOf` for the token of
 * a certain key.
 *
 * @category accessors
 * @since 0.1.0
 */
export const current: Effect.Effect<Option.Option<Lease>> = Effect.map(internal.current, Option.fromUndefinedOr)

/**
 * The innermost lease of this key that the current fiber runs under.
 *
 * @category accessors
 * @since 0.1.0
 */
export const currentOf = (key: string): Effect.Effect<Option.Option<Lease>> =>
  Effect.map(internal.currentOf(key), Option.fromUndefinedOr)
