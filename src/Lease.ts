/**
 * A hold as its program sees it: its kind and key, the fencing token, and its loss.
 *
 * **Guarantees**
 *
 * - `token` is larger than the token of every earlier hold of the same key. That also holds after the key was deleted,
 *   Redis was flushed, or a fail-over lost writes. The condition is that the new server's clock is not behind the last
 *   token.
 * - A lease is held until it is released, or until `lost` fails. The process itself reports it lost, a margin before any
 *   other process can be granted. It goes by the earlier of its monotonic and its wall clock: the former stands still
 *   while a machine is suspended.
 *
 * **Gotchas**
 *
 * - A lease is not a mutual exclusion of side effects. A process that is paused between two instructions finds out only
 *   afterwards. A write that a former holder must not make has to check the token: see `Fence`.
 * - Renewal needs the event loop. Synchronous work that is longer than the lease loses it.
 *
 * @since 0.1.0
 */

import * as Effect from "effect/Effect"
import { dual } from "effect/Function"
import * as Option from "effect/Option"
import type { Kind } from "./internal/hold/claim.ts"
import type { Lease } from "./internal/hold/hold.ts"
import * as holding from "./internal/hold/holding.ts"
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

export type {
  /**
   * The kind of thing that is held.
   *
   * @category models
   * @since 0.1.0
   */
  Kind
} from "./internal/hold/claim.ts"

export type {
  /**
   * A hold of a lock, of permits, of a term of leadership, or of another thing that one process has at a time.
   *
   * @category models
   * @since 0.1.0
   */
  Lease
} from "./internal/hold/hold.ts"

export {
  /**
   * A hold has ended before it was released.
   *
   * **Details**
   *
   * - `expired`: the lease could not be renewed in time (Redis away, the event loop blocked, the process paused).
   * - `unknown`: Redis does not know the session any more (flushed, restarted without data, ended by another).
   * - `rolledBack`: Redis has forgotten what it had acknowledged (fail-over to a replica that had missed it).
   * - `closed`: the coordinator was closed.
   * - `maxHold`: held for longer than `maxHold` allows.
   * - `resigned`: a leader has resigned, or has handed over to another candidate.
   * - `revoked`: ended by another session, as a reset ends the registrations of a task group and the action of a barrier.
   *
   * @category errors
   * @since 0.1.0
   */
  LeaseLost,
  /**
   * The wait has ended without success after the time in `wait`. `away` says whether Redis was out of reach meanwhile.
   *
   * @category errors
   * @since 0.1.0
   */
  WaitTimeout
} from "./internal/hold/loss.ts"

/**
 * Runs an effect under a lease. When the lease is lost, the effect is interrupted, its finalizers run, and the result is `LeaseLost`.
 * `withLock` and the other `with...` forms do this by themselves. A release does not interrupt it: end the effect before.
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
export const current: Effect.Effect<Option.Option<Lease>> = Effect.map(holding.current, Option.fromUndefinedOr)

/**
 * The innermost lease of this key that the current fiber runs under. A lock and a semaphore may have the same name: `kind`
 * says which is meant. Default: any.
 *
 * @category accessors
 * @since 0.1.0
 */
export const currentOf = (
  key: string,
  options?: { readonly kind?: Kind | undefined } | undefined
): Effect.Effect<Option.Option<Lease>> => Effect.map(holding.currentOf(key, options?.kind), Option.fromUndefinedOr)
