/**
 * A lock that several processes share: first in, first out, fenced, and never polled.
 *
 * **Guarantees**
 *
 * - One holder at a time, in the order in which Redis saw the requests. Every hold has a larger fencing token than all
 *   before it.
 * - `withLock` interrupts its effect when the lease is lost, and releases the lock when the effect ends, however it
 *   ends. Nothing has to be joined, renewed or released by hand.
 * - A waiter that is interrupted, times out or dies leaves the queue. A holder that dies is succeeded when its lease has
 *   run out.
 * - Nesting the same key in one fiber, or in a child that it waits for, never deadlocks. It shares the hold with
 *   `reentrant: true`, and fails with `AlreadyHeld` without. A detached fiber, as some operators of `Stream` have, may wait.
 *
 * **Gotchas**
 *
 * - This is a lease: see `Lease` for what it cannot promise, and `Fence` for what to do about it.
 * - Without `wait`, a lock is waited for as long as it takes, also while Redis is away.
 * - Two locks that are nested in different orders by different fibers can deadlock. `withLocks` takes several without
 *   that risk, unless the fiber holds one already.
 * - The effect of a `with...` form runs in a fiber of its own: children that it forks end with it.
 *
 * **Example** (One of many processes at a time)
 *
 * ```ts
 * import { Coordinator, Lock, Redis } from "lockstep"
 * import { Effect, Layer } from "effect"
 *
 * const program = Effect.log("alone").pipe(
 *   Lock.withLock("reports/daily", { wait: "10 seconds" })
 * )
 *
 * program.pipe(
 *   Effect.provide(Coordinator.layer().pipe(Layer.provide(Redis.layer({ url: "redis://localhost:6379" })))),
 *   Effect.runPromise
 * )
 * ```
 *
 * @since 0.1.0
 */

import type * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import { dual } from "effect/Function"
import * as Option from "effect/Option"
import * as Schema from "effect/Schema"
import type * as Scope from "effect/Scope"
import type { Coordinator } from "./Coordinator.ts"
import { type CoordinatorError, coordinatorReasons } from "./internal/actor/errors.ts"
import * as acquiring from "./internal/hold/acquire.ts"
import type { Hold } from "./internal/hold/hold.ts"
import { type Holder, holdersOf, type Waiter, waitersOf } from "./internal/hold/holders.ts"
import { describe, LeaseLost, WaitTimeout } from "./internal/hold/loss.ts"
import { type Place, placeOf } from "./internal/hold/place.ts"
import { withAllHolds, withHold, withinHold } from "./internal/hold/protect.ts"
import { spanned } from "./internal/hold/span.ts"
import * as permits from "./internal/sync/permits.ts"
import type { Lease } from "./Lease.ts"

/**
 * @category options
 * @since 0.1.0
 */
export interface Options {
  /** How long to wait for it; then it fails with `WaitTimeout`. Default: that of the coordinator, as long as it takes. */
  readonly wait?: Duration.Input | undefined
  /**
   * How long it may be held; then the holder is interrupted, and loses it with the reason `maxHold`. Default: that of the
   * coordinator, as long as the effect runs.
   */
  readonly maxHold?: Duration.Input | undefined
  /**
   * With `awaited`, the end of the effect, or of the scope, waits until Redis has released it. `background` saves that round
   * trip. The release goes with the next request of this process, or at once. Others may find it held for that moment. If the
   * process ends without closing its coordinator, they may find it held for the lease. Default `awaited`.
   */
  readonly release?: "awaited" | "background" | undefined
  /**
   * Keep the lock when it has been taken again within 50 ms of its release. This process can then take it again without asking
   * Redis, many times faster. The process releases it when it has not taken it for 50 ms, after 0.9 s, and when another process
   * asks for it. That process waits a little longer. A process that ends without closing its coordinator may keep it for the
   * lease. Default `false`.
   */
  readonly cached?: boolean | undefined
  /** Share the hold that this fiber, or a parent, has already. Default `false`: nesting fails with `AlreadyHeld`. */
  readonly reentrant?: boolean | undefined
  /**
   * How long it outlives a process that died. Default: the coordinator's lease. Another one is a second session, which is
   * renewed by itself.
   */
  readonly lease?: Duration.Input | undefined
}

export type {
  /**
   * The process that holds a lock.
   *
   * @category models
   * @since 0.1.0
   */
  Holder,
  /**
   * A process that waits for a lock.
   *
   * @category models
   * @since 0.1.0
   */
  Waiter
} from "./internal/hold/holders.ts"

/**
 * The fiber, or a parent of it, holds this lock already, and `reentrant` was not set.
 *
 * @category errors
 * @since 0.1.0
 */
export class AlreadyHeld extends Schema.Error<AlreadyHeld>("lockstep/Lock/AlreadyHeld")({
  _tag: Schema.tag("AlreadyHeld"),
  key: Schema.String,
  namespace: Schema.String
}) {
  override get message(): string {
    const subject = describe("lock", this.key, this.namespace)
    return `This fiber, or one that waits for it, holds ${subject} already, so waiting would never end: ` +
      `nest it with \`reentrant: true\`.`
  }
}

/**
 * @category errors
 * @since 0.1.0
 */
export class LockError extends Schema.Error<LockError>("lockstep/Lock/LockError")({
  _tag: Schema.tag("LockError"),
  reason: Schema.Union([LeaseLost, WaitTimeout, AlreadyHeld, ...coordinatorReasons])
}) {
  override get message(): string {
    return this.reason.message
  }
}

const fail = (reason: LockError["reason"]): LockError => new LockError({ reason })

// A lock is busy, or it is not: nothing else can be refused.
const busy = () => Effect.succeed(undefined)

const taking = (place: Place, wait: boolean, options: Options | undefined): acquiring.Acquire<LockError> =>
  permits.locking(place, wait, { options, fail, refuse: busy })

const alreadyHeld = ({ name, space: { kernel } }: Place): Effect.Effect<never, LockError> =>
  Effect.fail(fail(new AlreadyHeld({ key: name, namespace: kernel.settings.namespace })))

/** Shares the hold that the fiber has, or takes one. */
const nested = <A, E, R>(
  span: string,
  key: string,
  options: Options | undefined,
  share: (hold: Hold) => Effect.Effect<A, E, R>,
  take: (place: Place) => Effect.Effect<A, E, R>
): Effect.Effect<A, E | LockError, R | Coordinator> =>
  acquiring.use<A, E | LockError, R>((fiber, space) => {
    acquiring.check(options)
    const place = placeOf(space, "lock", key, "key", options?.lease)
    const reentrant = options?.reentrant === true
    return acquiring.nested<A, E | LockError, R>(fiber, place, reentrant, (found) => {
      if (found !== undefined && !reentrant) return alreadyHeld(place)
      return spanned(fiber, found === undefined ? take(place) : share(found), span, "lock", key)
    })
  })

/**
 * Runs an effect while holding the lock. Fails with `LeaseLost` when the lock was lost meanwhile; the effect has then
 * been interrupted.
 *
 * @category combinators
 * @since 0.1.0
 */
export const withLock: {
  <A, E, R>(
    self: Effect.Effect<A, E, R>,
    key: string,
    options?: Options | undefined
  ): Effect.Effect<A, E | LockError, R | Coordinator>
  (
    key: string,
    options?: Options | undefined
  ): <A, E, R>(self: Effect.Effect<A, E, R>) => Effect.Effect<A, E | LockError, R | Coordinator>
} = dual(
  (args) => Effect.isEffect(args[0]),
  <A, E, R>(self: Effect.Effect<A, E, R>, key: string, options?: Options) =>
    nested<A, E | LockError, R>(
      "lockstep.Lock.withLock",
      key,
      options,
      (shared) => withinHold(self, shared, fail),
      (place) => withHold(self, taking(place, true, options)) as Effect.Effect<A, E | LockError, R>
    )
)

/**
 * As `withLock` if the lock is free now; otherwise `None`, and the effect does not run.
 *
 * @category combinators
 * @since 0.1.0
 */
export const withLockIfAvailable: {
  <A, E, R>(
    self: Effect.Effect<A, E, R>,
    key: string,
    options?: Omit<Options, "wait"> | undefined
  ): Effect.Effect<Option.Option<A>, E | LockError, R | Coordinator>
  (
    key: string,
    options?: Omit<Options, "wait"> | undefined
  ): <A, E, R>(self: Effect.Effect<A, E, R>) => Effect.Effect<Option.Option<A>, E | LockError, R | Coordinator>
} = dual(
  (args) => Effect.isEffect(args[0]),
  <A, E, R>(self: Effect.Effect<A, E, R>, key: string, options?: Omit<Options, "wait">) =>
    nested<Option.Option<A>, E | LockError, R>(
      "lockstep.Lock.withLockIfAvailable",
      key,
      options,
      (shared) => withinHold(Effect.asSome(self), shared, fail),
      (place) =>
        Effect.map(
          withHold(Effect.asSome(self), taking(place, false, options)),
          (result) => result ?? Option.none()
        )
    )
)

/**
 * Acquires the lock for as long as the scope is open. Nothing is interrupted by itself: watch `lease.lost`, or run effects that
 * must not go on after a loss under `Lease.protect`.
 *
 * @category constructors
 * @since 0.1.0
 */
export const acquire = (
  key: string,
  options?: Options | undefined
): Effect.Effect<Lease, LockError, Coordinator | Scope.Scope> =>
  nested<Lease, LockError, Scope.Scope>(
    "lockstep.Lock.acquire",
    key,
    options,
    (shared) => acquiring.shareScoped(shared),
    (place) => acquiring.acquireScoped(taking(place, true, options)) as Effect.Effect<Lease, LockError, Scope.Scope>
  )

/**
 * As `acquire` if the lock is free now; otherwise `None`.
 *
 * @category constructors
 * @since 0.1.0
 */
export const acquireIfAvailable = (
  key: string,
  options?: Omit<Options, "wait"> | undefined
): Effect.Effect<Option.Option<Lease>, LockError, Coordinator | Scope.Scope> =>
  nested<Option.Option<Lease>, LockError, Scope.Scope>(
    "lockstep.Lock.acquireIfAvailable",
    key,
    options,
    (shared) => Effect.asSome(acquiring.shareScoped(shared)),
    (place) => Effect.map(acquiring.acquireScoped(taking(place, false, options)), Option.fromUndefinedOr)
  )

// As a list, a text would be its characters: a program that passes one means a single key.
const listOf = (keys: Iterable<string>): ReadonlyArray<string> | undefined =>
  typeof keys === "object" && keys !== null && Symbol.iterator in keys ? [...keys] : undefined

const lockAll = <A, E, R>(
  self: Effect.Effect<A, E, R>,
  keys: ReadonlyArray<string> | undefined,
  options: Options | undefined
) => {
  const ordered = [...new Set(keys)].sort((a, b) => a < b ? -1 : 1)
  const reentrant = options?.reentrant === true
  if (keys === undefined) return Effect.die(new RangeError("keys must be a list of keys"))
  return acquiring.use((fiber, space): Effect.Effect<A, E | LockError, R> => {
    acquiring.check(options)
    const missing: Array<acquiring.Acquire<LockError>> = []
    const shared: Array<Hold> = []
    const looking = Effect.forEach(ordered, (key) => {
      const place = placeOf(space, "lock", key, "key", options?.lease)
      return acquiring.nested<void, LockError, never>(fiber, place, reentrant, (found) => {
        if (found !== undefined && !reentrant) return alreadyHeld(place)
        if (found === undefined) missing.push(taking(place, true, options))
        else shared.push(found)
        return Effect.void
      })
    }, { discard: true })
    const body = Effect.suspend(() =>
      shared.reduce((body, one) => withinHold(body, one, fail), withAllHolds(self, missing, fail, options))
    )
    return Effect.andThen(looking, spanned(fiber, body, "lockstep.Lock.withLocks", "lock", ordered.join(" ")))
  })
}

/**
 * Runs an effect while holding several locks, named in any order: all of them, or none. They are taken in one order everywhere,
 * so that two of these never deadlock, unless the fiber of one holds a lock already. `wait` is for all of them together.
 *
 * @category combinators
 * @since 0.1.0
 */
export const withLocks: {
  <A, E, R>(
    self: Effect.Effect<A, E, R>,
    keys: Iterable<string>,
    options?: Options | undefined
  ): Effect.Effect<A, E | LockError, R | Coordinator>
  (
    keys: Iterable<string>,
    options?: Options | undefined
  ): <A, E, R>(self: Effect.Effect<A, E, R>) => Effect.Effect<A, E | LockError, R | Coordinator>
} = (...args: Array<any>): any => {
  if (Effect.isEffect(args[0])) return lockAll(args[0], listOf(args[1]), args[2])
  // The keys are read once: an iterable can have no more to give the next time.
  const keys = listOf(args[0])
  return <A, E, R>(self: Effect.Effect<A, E, R>) => lockAll(self, keys, args[1])
}

const inspecting = <A>(
  key: string,
  inspect: (place: Place) => Effect.Effect<A, CoordinatorError>
): Effect.Effect<A, LockError, Coordinator> =>
  acquiring.use((_, space) =>
    Effect.mapError(inspect(placeOf(space, "lock", key, "key")), ({ reason }) => fail(reason))
  )

/**
 * The process that holds the lock now, if any, for people: it may have changed before it is read.
 *
 * @category accessors
 * @since 0.1.0
 */
export const holder = (key: string): Effect.Effect<Option.Option<Holder>, LockError, Coordinator> =>
  Effect.map(inspecting(key, (place) => holdersOf(place, "lock.holders")), ([first]) => Option.fromUndefinedOr(first))

/**
 * The processes that wait for the lock now, the next one first; up to 1,000.
 *
 * @category accessors
 * @since 0.1.0
 */
export const waiting = (key: string): Effect.Effect<ReadonlyArray<Waiter>, LockError, Coordinator> =>
  inspecting(key, (place) => waitersOf(place, "lock.waiters"))
