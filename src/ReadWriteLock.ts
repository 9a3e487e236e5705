/**
 * A lock that many readers or one writer hold, shared by several processes.
 *
 * **Guarantees**
 *
 * - First in, first out: a reader that comes after a waiting writer waits behind it, so that neither starves.
 * - Reading inside one's own read or write lock shares the hold. Writing inside one's own read lock upgrades it when no
 *   other reader holds it at that moment, and fails with `UpgradeConflict` otherwise. Neither ever deadlocks.
 * - Everything that `Lock` says of loss, interruption and crashes.
 *
 * **Gotchas**
 *
 * - On `UpgradeConflict`, leave the read lock, take the write lock, and read again: others may have written meanwhile.
 * - Readers have tokens too, from the same sequence. What only writers write has to be fenced by writers' tokens alone.
 *
 * **Example** (Reading by many, writing by one)
 *
 * ```ts
 * import { ReadWriteLock } from "lockstep"
 * import { Effect } from "effect"
 *
 * const read = Effect.log("reading").pipe(ReadWriteLock.withReadLock("catalogue"))
 * const write = Effect.log("writing").pipe(ReadWriteLock.withWriteLock("catalogue"))
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
import { withHeld, withinHeld } from "./internal/hold/protect.ts"
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
  /** For writing inside one's own write lock: share it. Default `false`: it fails with `AlreadyWriting`. */
  readonly reentrant?: boolean | undefined
}

/**
 * The read lock could not become a write lock, because others read too. Nothing has changed.
 *
 * @category errors
 * @since 0.1.0
 */
export class UpgradeConflict extends Schema.Error<UpgradeConflict>("lockstep/ReadWriteLock/UpgradeConflict")({
  _tag: Schema.tag("UpgradeConflict"),
  key: Schema.String
}) {
  override get message(): string {
    return "Others read too, and two readers that wait for each other would never end: leave the read lock before writing."
  }
}

/**
 * The fiber, or a parent of it, holds the write lock already, and `reentrant` was not set.
 *
 * @category errors
 * @since 0.1.0
 */
export class AlreadyWriting extends Schema.Error<AlreadyWriting>("lockstep/ReadWriteLock/AlreadyWriting")({
  _tag: Schema.tag("AlreadyWriting"),
  key: Schema.String
}) {
  override get message(): string {
    return "This fiber holds the write lock already: nest it with `reentrant: true`."
  }
}

/**
 * The lease is not a write lock that is held.
 *
 * @category errors
 * @since 0.1.0
 */
export class NotWriting extends Schema.Error<NotWriting>("lockstep/ReadWriteLock/NotWriting")({
  _tag: Schema.tag("NotWriting"),
  key: Schema.String
}) {
  override get message(): string {
    return "Only a write lock that is held can be downgraded."
  }
}

/**
 * @category errors
 * @since 0.1.0
 */
export class ReadWriteLockError extends Schema.Error<ReadWriteLockError>("lockstep/ReadWriteLock/ReadWriteLockError")({
  _tag: Schema.tag("ReadWriteLockError"),
  reason: Schema.Union([LeaseLost, WaitTimeout, UpgradeConflict, AlreadyWriting, NotWriting, CoordinatorError])
}) {
  override get message(): string {
    return this.reason.message
  }
}

// A writer weighs as much as all readers that there can be.
const everything = 2 ** 30

type Mode = "read" | "write"

const fail = (reason: ReadWriteLockError["reason"]): ReadWriteLockError => new ReadWriteLockError({ reason })

const busy = () => Effect.succeed(undefined)

const acquiring = (
  place: held.Place,
  mode: Mode,
  wait: boolean,
  options: Options | undefined
): held.Acquire<ReadWriteLockError> => ({
  place,
  weight: mode === "read" ? 1 : everything,
  capacity: everything,
  wait,
  options,
  fail,
  refuse: busy
})

const upgrade = (reading: held.Held): Effect.Effect<void, ReadWriteLockError> =>
  Effect.flatMap(Effect.mapError(held.reweigh(reading, everything), fail), (outcome) =>
    outcome === "granted"
      ? Effect.void
      : Effect.fail(
        outcome === "conflict"
          ? fail(new UpgradeConflict({ key: reading.key }))
          : fail(reading.loss("closed"))
      ))

const lighten = (writing: held.Held): Effect.Effect<void> => Effect.ignore(held.reweigh(writing, 1))

interface Cases<A, E, R> {
  readonly share: (held: held.Held) => Effect.Effect<A, E, R>
  readonly take: (place: held.Place) => Effect.Effect<A, E, R>
  readonly upgraded: (held: held.Held) => Effect.Effect<A, E, R>
}

const nested = <A, E, R>(
  span: string | undefined,
  key: string,
  mode: Mode,
  options: Options | undefined,
  { share, take, upgraded }: Cases<A, E, R>
): Effect.Effect<A, E | ReadWriteLockError, R | Coordinator> =>
  held.use<A, E | ReadWriteLockError, R>(span, key, (fiber, kernel) => {
    const place = held.placeOf(kernel, "rw", key, "key")
    const found = held.findHeld(fiber, place)
    if (found === undefined) return take(place)
    if (mode === "read") return share(found)
    if (found.claim.weight !== everything) return upgraded(found)
    return options?.reentrant === true ? share(found) : Effect.fail(fail(new AlreadyWriting({ key })))
  })

const withMode = <A, E, R>(
  self: Effect.Effect<A, E, R>,
  key: string,
  mode: Mode,
  wait: boolean,
  options: Options | undefined
): Effect.Effect<Option.Option<A>, E | ReadWriteLockError, R | Coordinator> => {
  const body = Effect.asSome(self)
  return nested<Option.Option<A>, E | ReadWriteLockError, R>(`lockstep.ReadWriteLock.${mode}`, key, mode, options, {
    share: (shared) => withinHeld(body, shared, fail),
    take: (place) =>
      Effect.map(withHeld(body, acquiring(place, mode, wait, options)), (result) => result ?? Option.none()),
    upgraded: (reading) =>
      Effect.acquireUseRelease(
        upgrade(reading),
        () => withinHeld(body, reading, fail),
        () => lighten(reading)
      )
  })
}

const acquireMode = (
  key: string,
  mode: Mode,
  wait: boolean,
  options: Options | undefined
): Effect.Effect<Option.Option<Lease>, ReadWriteLockError, Coordinator | Scope.Scope> =>
  nested<Option.Option<Lease>, ReadWriteLockError, Scope.Scope>(undefined, key, mode, options, {
    share: (shared) => Effect.asSome(held.shareScoped(shared)),
    take: (place) => Effect.map(held.acquireScoped(acquiring(place, mode, wait, options)), Option.fromUndefinedOr),
    upgraded: (reading) =>
      Effect.asSome(
        Effect.andThen(Effect.acquireRelease(upgrade(reading), () => lighten(reading)), held.shareScoped(reading))
      )
  })

/** What waits is granted in the end. */
const granted = <A, E, R>(self: Effect.Effect<Option.Option<A>, E, R>): Effect.Effect<A, E, R> =>
  Effect.map(self, Option.getOrThrow)

type With<O> = {
  (
    key: string,
    options?: O | undefined
  ): <A, E, R>(self: Effect.Effect<A, E, R>) => Effect.Effect<A, E | ReadWriteLockError, R | Coordinator>
  <A, E, R>(
    self: Effect.Effect<A, E, R>,
    key: string,
    options?: O | undefined
  ): Effect.Effect<A, E | ReadWriteLockError, R | Coordinator>
}

type WithIfAvailable<O> = {
  (
    key: string,
    options?: O | undefined
  ): <A, E, R>(
    self: Effect.Effect<A, E, R>
  ) => Effect.Effect<Option.Option<A>, E | ReadWriteLockError, R | Coordinator>
  <A, E, R>(
    self: Effect.Effect<A, E, R>,
    key: string,
    options?: O | undefined
  ): Effect.Effect<Option.Option<A>, E | ReadWriteLockError, R | Coordinator>
}

const isDataFirst = (args: IArguments) => Effect.isEffect(args[0])

/**
 * Runs an effect while holding the read lock. Inside one's own read or write lock it shares that.
 *
 * @category combinators
 * @since 0.1.0
 */
export const withReadLock: With<Omit<Options, "reentrant">> = dual(
  isDataFirst,
  (self: Effect.Effect<unknown>, key: string, options?: Options) => granted(withMode(self, key, "read", true, options))
)

/**
 * As `withReadLock` if it can be had now; otherwise `None`, and the effect does not run.
 *
 * @category combinators
 * @since 0.1.0
 */
export const withReadLockIfAvailable: WithIfAvailable<Omit<Options, "reentrant" | "wait">> = dual(
  isDataFirst,
  (self: Effect.Effect<unknown>, key: string, options?: Options) => withMode(self, key, "read", false, options)
)

/**
 * Runs an effect while holding the write lock. Inside one's own read lock it upgrades that for the time, or fails with
 * `UpgradeConflict`.
 *
 * @category combinators
 * @since 0.1.0
 */
export const withWriteLock: With<Options> = dual(
  isDataFirst,
  (self: Effect.Effect<unknown>, key: string, options?: Options) => granted(withMode(self, key, "write", true, options))
)

/**
 * As `withWriteLock` if it can be had now; otherwise `None`, and the effect does not run.
 *
 * @category combinators
 * @since 0.1.0
 */
export const withWriteLockIfAvailable: WithIfAvailable<Omit<Options, "wait">> = dual(
  isDataFirst,
  (self: Effect.Effect<unknown>, key: string, options?: Options) => withMode(self, key, "write", false, options)
)

/**
 * Acquires the read lock for as long as the scope is open. See `Lock.acquire` for what happens on loss.
 *
 * @category constructors
 * @since 0.1.0
 */
export const acquireRead = (
  key: string,
  options?: Omit<Options, "reentrant"> | undefined
): Effect.Effect<Lease, ReadWriteLockError, Coordinator | Scope.Scope> =>
  granted(acquireMode(key, "read", true, options))

/**
 * As `acquireRead` if it can be had now; otherwise `None`.
 *
 * @category constructors
 * @since 0.1.0
 */
export const acquireReadIfAvailable = (
  key: string,
  options?: Omit<Options, "reentrant" | "wait"> | undefined
): Effect.Effect<Option.Option<Lease>, ReadWriteLockError, Coordinator | Scope.Scope> =>
  acquireMode(key, "read", false, options)

/**
 * Acquires the write lock for as long as the scope is open. See `Lock.acquire` for what happens on loss.
 *
 * @category constructors
 * @since 0.1.0
 */
export const acquireWrite = (
  key: string,
  options?: Options | undefined
): Effect.Effect<Lease, ReadWriteLockError, Coordinator | Scope.Scope> =>
  granted(acquireMode(key, "write", true, options))

/**
 * As `acquireWrite` if it can be had now; otherwise `None`.
 *
 * @category constructors
 * @since 0.1.0
 */
export const acquireWriteIfAvailable = (
  key: string,
  options?: Omit<Options, "wait"> | undefined
): Effect.Effect<Option.Option<Lease>, ReadWriteLockError, Coordinator | Scope.Scope> =>
  acquireMode(key, "write", false, options)

/**
 * Makes a write lock a read lock without letting go of it: no other writer gets in between, and readers that wait come
 * in at once. It keeps its token.
 *
 * @category combinators
 * @since 0.1.0
 */
export const downgrade = (lease: Lease): Effect.Effect<void, ReadWriteLockError> =>
  Effect.suspend(() => {
    if (!(lease instanceof held.Held) || !lease.active || lease.claim.weight !== everything) {
      return Effect.fail(fail(new NotWriting({ key: lease.key })))
    }
    return Effect.flatMap(Effect.mapError(held.reweigh(lease, 1), fail), (outcome) =>
      outcome === "granted" ? Effect.void : Effect.fail(fail(lease.loss("closed"))))
  })
