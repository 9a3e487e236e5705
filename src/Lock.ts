/**
 * A lock that several processes share: first in, first out, fenced, and never polled.
 *
 * **Guarantees**
 *
 * - One holder at a time, in the order in which Redis saw the requests. Every hold has a larger fencing token than all
 *   before it.
 * - `withLock` interrupts its effect when the lease is lost, and gives the lock back when the effect ends, however it
 *   ends. Nothing has to be joined, renewed or released by hand.
 * - A waiter that is interrupted, times out or dies leaves the queue. A holder that dies is succeeded when its lease has
 *   run out.
 * - Nesting the same key in one fiber, or in a child of it, never deadlocks: it shares the hold with `reentrant: true`
 *   and fails with `AlreadyHeld` without.
 *
 * **Gotchas**
 *
 * - This is a lease: see `Lease` for what it cannot promise, and `Fence` for what to do about it.
 * - Without `wait`, a lock is waited for as long as it takes, also while Redis is away.
 * - Two locks that are nested in different orders by different fibers can deadlock. `withLocks` takes several without
 *   that risk.
 *
 * **Example** (One of many processes at a time)
 *
 * ```ts
 * import { Coordinator, Lock, Redis } from "lockstep"
 * import { Effect, Layer } from "effect"
 *
 * const program = Effect.log("nobody else is here").pipe(
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
import { CoordinatorError } from "./internal/actor/errors.ts"
import * as held from "./internal/hold/held.ts"
import { LeaseLost, WaitTimeout } from "./internal/hold/loss.ts"
import { withAllHeld, withHeld, withinHeld } from "./internal/hold/protect.ts"
import type { Lease } from "./Lease.ts"

/**
 * @category models
 * @since 0.1.0
 */
export interface Options {
  /** How long to wait for it. Default: as long as it takes. Afterwards it fails with `WaitTimeout`. */
  readonly wait?: Duration.Input | undefined
  /** How long it may be held. Afterwards the holder is interrupted, and loses it with the reason `maxHold`. */
  readonly maxHold?: Duration.Input | undefined
  /** Share the hold that this fiber, or a parent, has already. Default `false`: nesting fails with `AlreadyHeld`. */
  readonly reentrant?: boolean | undefined
}

/**
 * The fiber, or a parent of it, holds this lock already, and `reentrant` was not set.
 *
 * @category errors
 * @since 0.1.0
 */
export class AlreadyHeld extends Schema.Error<AlreadyHeld>("lockstep/Lock/AlreadyHeld")({
  _tag: Schema.tag("AlreadyHeld"),
  key: Schema.String
}) {
  override get message(): string {
    return "This fiber holds the lock already, so waiting for it would never end: nest it with `reentrant: true`."
  }
}

/**
 * @category errors
 * @since 0.1.0
 */
export class LockError extends Schema.Error<LockError>("lockstep/Lock/LockError")({
  _tag: Schema.tag("LockError"),
  reason: Schema.Union([LeaseLost, WaitTimeout, AlreadyHeld, CoordinatorError])
}) {
  override get message(): string {
    return this.reason.message
  }
}

const fail = (reason: LockError["reason"]): LockError => new LockError({ reason })

// A lock is busy, or it is not: nothing else can be refused.
const busy = () => Effect.succeed(undefined)

const acquiring = (place: held.Place, wait: boolean, options: Options | undefined): held.Acquire<LockError> => ({
  place,
  weight: 1,
  capacity: 1,
  wait,
  options,
  fail,
  refuse: busy
})

/** Shares the hold that the fiber has, or takes one. */
const nested = <A, E, R>(
  span: string | undefined,
  key: string,
  options: Options | undefined,
  share: (held: held.Held) => Effect.Effect<A, E, R>,
  take: (place: held.Place) => Effect.Effect<A, E, R>
): Effect.Effect<A, E | LockError, R | Coordinator> =>
  held.use<A, E | LockError, R>(span, key, (fiber, kernel) => {
    const place = held.placeOf(kernel, "lock", key, "key")
    const found = held.findHeld(fiber, place)
    if (found === undefined) return take(place)
    return options?.reentrant === true ? share(found) : Effect.fail(fail(new AlreadyHeld({ key })))
  })

/**
 * Runs an effect while holding the lock. Fails with `LeaseLost` when the lock was lost meanwhile; the effect has then
 * been interrupted.
 *
 * @category combinators
 * @since 0.1.0
 */
export const withLock: {
  (
    key: string,
    options?: Options | undefined
  ): <A, E, R>(self: Effect.Effect<A, E, R>) => Effect.Effect<A, E | LockError, R | Coordinator>
  <A, E, R>(
    self: Effect.Effect<A, E, R>,
    key: string,
    options?: Options | undefined
  ): Effect.Effect<A, E | LockError, R | Coordinator>
} = dual(
  (args) => Effect.isEffect(args[0]),
  <A, E, R>(self: Effect.Effect<A, E, R>, key: string, options?: Options) =>
    nested<A, E | LockError, R>(
      "lockstep.Lock.withLock",
      key,
      options,
      (shared) => withinHeld(self, shared, fail),
      (place) => withHeld(self, acquiring(place, true, options)) as Effect.Effect<A, E | LockError, R>
    )
)

/**
 * As `withLock` if the lock is free now; otherwise `None`, and the effect does not run.
 *
 * @category combinators
 * @since 0.1.0
 */
export const withLockIfAvailable: {
  (
    key: string,
    options?: Omit<Options, "wait"> | undefined
  ): <A, E, R>(self: Effect.Effect<A, E, R>) => Effect.Effect<Option.Option<A>, E | LockError, R | Coordinator>
  <A, E, R>(
    self: Effect.Effect<A, E, R>,
    key: string,
    options?: Omit<Options, "wait"> | undefined
  ): Effect.Effect<Option.Option<A>, E | LockError, R | Coordinator>
} = dual(
  (args) => Effect.isEffect(args[0]),
  <A, E, R>(self: Effect.Effect<A, E, R>, key: string, options?: Omit<Options, "wait">) =>
    nested<Option.Option<A>, E | LockError, R>(
      "lockstep.Lock.withLockIfAvailable",
      key,
      options,
      (shared) => withinHeld(Effect.asSome(self), shared, fail),
      (place) =>
        Effect.map(
          withHeld(Effect.asSome(self), acquiring(place, false, options)),
          (result) => result ?? Option.none()
        )
    )
)

/**
 * Acquires the lock for as long as the scope is open. Nothing is interrupted by itself: watch `lease.lost`, or run what
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
    undefined,
    key,
    options,
    (shared) => held.shareScoped(shared),
    (place) => held.acquireScoped(acquiring(place, true, options)) as Effect.Effect<Lease, LockError, Scope.Scope>
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
    undefined,
    key,
    options,
    (shared) => Effect.asSome(held.shareScoped(shared)),
    (place) => Effect.map(held.acquireScoped(acquiring(place, false, options)), Option.fromUndefinedOr)
  )

/**
 * Runs an effect while holding several locks, in whatever order they are named: all of them, or none. They are taken in
 * one order everywhere, so that two of these never deadlock. `wait` is for all of them together.
 *
 * @category combinators
 * @since 0.1.0
 */
export const withLocks: {
  (
    keys: Iterable<string>,
    options?: Options | undefined
  ): <A, E, R>(self: Effect.Effect<A, E, R>) => Effect.Effect<A, E | LockError, R | Coordinator>
  <A, E, R>(
    self: Effect.Effect<A, E, R>,
    keys: Iterable<string>,
    options?: Options | undefined
  ): Effect.Effect<A, E | LockError, R | Coordinator>
} = dual(
  (args) => Effect.isEffect(args[0]),
  <A, E, R>(self: Effect.Effect<A, E, R>, keys: Iterable<string>, options?: Options) => {
    const ordered = [...new Set(keys)].sort((a, b) => a < b ? -1 : 1)
    return held.use(
      "lockstep.Lock.withLocks",
      ordered.join(" "),
      (fiber, kernel): Effect.Effect<A, E | LockError, R> => {
        const missing: Array<held.Acquire<LockError>> = []
        const shared: Array<held.Held> = []
        for (const key of ordered) {
          const place = held.placeOf(kernel, "lock", key, "key")
          const found = held.findHeld(fiber, place)
          if (found === undefined) missing.push(acquiring(place, true, options))
          else if (options?.reentrant === true) shared.push(found)
          else return Effect.fail(fail(new AlreadyHeld({ key })))
        }
        return shared.reduce(
          (body, one) => withinHeld(body, one, fail),
          withAllHeld(self, missing, fail, options)
        )
      }
    )
  }
)
