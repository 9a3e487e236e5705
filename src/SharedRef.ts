/**
 * A value that several processes share: typed, versioned, and observed by a push. The distributed twin of
 * `effect/SubscriptionRef`.
 *
 * A ref needs neither creation nor a scope. While it is absent it reads as its `initial` value, with version 0. Redis keeps
 * the value until it is deleted, or for `timeToLive` after the last write.
 *
 * **Guarantees**
 *
 * - Reads by `get` and writes are linearizable: each takes effect at one moment between its call and its answer, in one order
 *   for all processes.
 * - A write is executed once, also when replies are lost and connections break. If its session is lost before the answer, it
 *   fails with `WriteUncertain` and is not repeated.
 * - `update` and `modify` are atomic. A result is written only over the version that it was made from.
 * - Versions strictly increase, also after a deletion. After a loss of data they do so if the clock of Redis is not behind.
 * - `changes` has the present value first, and then every version in order, by a push. Nothing polls.
 * - `cached` costs no round trip. Its answer is at most as old as the coordinator's `lease`, counted to the beginning
 *   of the turn of the event loop; otherwise it reads from Redis.
 * - Once a holder has written with `setFenced`, no holder with a smaller token of that lease writes with it. A lease that this
 *   process knows to be lost or released writes nothing.
 *
 * **Gotchas**
 *
 * - **The functions of `update`, `modify` and `transaction` may run several times**, also on an outdated value whose result is
 *   dropped. They should only compute.
 * - `update` and `modify` are optimistic. After its second conflict, an update waits for its turn, first in first out. A turn
 *   ends with the update, after 8 ms if more updates follow at once, or after 100 ms if its process is paused.
 * - `updateEffect`, `modifyEffect` and `transaction` try again at once, for as long as others are faster: keep them short.
 * - Updates of one process that meet are one write, and one version.
 * - `cached` can answer an older value than a `get` before it: events come a moment after the write.
 * - Values are decoded once and shared: treat them as immutable.
 * - Redis sends every version to each process that subscribes: keep values small, some kilobytes at most.
 * - A subscriber that falls more than 1,024 versions behind misses the oldest, and `versions` says how many. After a loss of the
 *   session it goes on with the latest version; while a slot of a cluster migrates, it may do so too. What it misses then is not
 *   counted. `conflate` shows a slow subscriber only the latest.
 * - Every process has to use the same schema, `initial` and `colocate`. `colocate` decides where the ref lives.
 * - While Redis is away, reads and writes fail after the coordinator's `requestTimeout`. A write that failed with `Timeout` may
 *   be executed all the same.
 * - Subscribers hear that a value has expired within a third of the coordinator's lease, and cached reads answer it for as long.
 * - `set`, `update` and `delete` do not look at tokens: where a former holder must not write, every writer uses `setFenced`.
 *   Tokens are kept for a day after the last such write.
 * - After a fail-over, a `get` of a process that still reaches the former primary reads what that had.
 *
 * **Example** (Progress that every process sees)
 *
 * ```ts
 * import { Coordinator, SharedRef } from "lockstep"
 * import { Effect, Schema } from "effect"
 *
 * class Progress extends SharedRef.Service<Progress>()("progress", { schema: Schema.Number, initial: 0 }) {}
 *
 * const program = Effect.gen(function*() {
 *   const progress = yield* Progress
 *   yield* Effect.forkChild(progress.update((n) => n + 1))
 *   const reached = yield* progress.until((n) => n >= 1)
 *   yield* Effect.log(`${reached} done`)
 * })
 *
 * program.pipe(Effect.provide(Progress.layer), Effect.provide(Coordinator.layerEmbedded()), Effect.runPromise)
 * ```
 *
 * @since 0.1.0
 */

import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import { dual } from "effect/Function"
import * as Option from "effect/Option"
import * as Schema from "effect/Schema"
import * as Stream from "effect/Stream"
import { Coordinator } from "./Coordinator.ts"
import { coordinatorReasons } from "./internal/actor/errors.ts"
import { checkName } from "./internal/actor/keys.ts"
import { bounded, waitOf } from "./internal/hold/acquire.ts"
import type { Outbox, Publication } from "./internal/hold/following.ts"
import { WaitTimeout } from "./internal/hold/loss.ts"
import { InvalidPayload } from "./internal/hold/payload.ts"
import { duration, millis, placeOf, type Space, spaceOf } from "./internal/hold/place.ts"
import { Recent } from "./internal/hold/recent.ts"
import { service, type ServiceClass as AnyServiceClass } from "./internal/hold/service.ts"
import { spanning } from "./internal/hold/span.ts"
import { StaleToken, WriteUncertain } from "./internal/hold/unwritten.ts"
import { Cell } from "./internal/ref/cell.ts"
import type { Lease } from "./Lease.ts"

/**
 * @category type IDs
 * @since 0.1.0
 */
export const TypeId: TypeId = "~lockstep/SharedRef"

/**
 * @category type IDs
 * @since 0.1.0
 */
export type TypeId = "~lockstep/SharedRef"

/**
 * A value, and the number of its version: 0 while the ref is absent.
 *
 * @category models
 * @since 0.1.0
 */
export interface Versioned<out A> {
  readonly value: A
  readonly version: number
}

/**
 * A version as a subscriber sees it. `missed` is how many versions directly before it were dropped, because this subscriber
 * was slow or wants the latest only; 0 mostly. Versions that the process was not told of, as after the loss of its session,
 * are not counted.
 *
 * @category models
 * @since 0.1.0
 */
export interface Change<out A> extends Versioned<A> {
  readonly missed: number
}

/**
 * @category options
 * @since 0.1.0
 */
export interface ChangesOptions {
  /** Only the latest version for a subscriber that is slower than the changes. Default `false`: every version. */
  readonly conflate?: boolean | undefined
}

/**
 * @category options
 * @since 0.1.0
 */
export interface UntilOptions {
  /** How long to wait; then it fails with `WaitTimeout`. Default: that of the coordinator, as long as it takes. */
  readonly wait?: Duration.Input | undefined
}

/**
 * Named as `effect/SubscriptionRef`.
 *
 * @category models
 * @since 0.1.0
 */
export interface SharedRef<in out A> {
  readonly [TypeId]: TypeId
  readonly name: string
  /** The present value, by Redis's word: always fresh. */
  readonly get: Effect.Effect<A, SharedRefError>
  /** The present value, and its version. */
  readonly versioned: Effect.Effect<Versioned<A>, SharedRefError>
  /** The present version. */
  readonly version: Effect.Effect<number, SharedRefError>
  /**
   * The value that this process heard of last, without a round trip; never older than the coordinator's `lease`. The first
   * call, and each one while Redis is out of reach, reads as `get`. The process listens on until it has not asked for a minute.
   */
  readonly cached: Effect.Effect<A, SharedRefError>
  /** As `cached`, but never older than this. */
  readonly cachedWithin: (maxAge: Duration.Input) => Effect.Effect<A, SharedRefError>
  /**
   * The same ref, whose writes publish events, each in the same step as the write: both happen, or neither. Events come from
   * `Topic.publication`; a function makes them of the value that is written, which after `delete` is `initial`. It may run several
   * times, as that of an update; only the events of the write that is made are published. The topic needs the ref's `colocate`.
   */
  readonly publishing: (
    publish:
      | Publication
      | ReadonlyArray<Publication>
      | ((value: A) => Effect.Effect<Publication | ReadonlyArray<Publication>>)
  ) => SharedRef<A>
  readonly set: (value: A) => Effect.Effect<void, SharedRefError>
  /** Sets the value, and answers the former one. */
  readonly getAndSet: (value: A) => Effect.Effect<A, SharedRefError>
  /** Sets the value if the ref still has this version; 0 if it is still absent. Answers whether it did. */
  readonly compareAndSet: (version: number, value: A) => Effect.Effect<boolean, SharedRefError>
  /**
   * Sets the value, unless a later holder of the same lock, or other lease, has done so: then it fails with `StaleToken`. So it
   * does without asking Redis when this process knows that the lease was lost or released.
   */
  readonly setFenced: (
    lease: Pick<Lease, "key" | "kind" | "token">,
    value: A
  ) => Effect.Effect<void, SharedRefError>
  /** Removes the value. Answers whether there was one. */
  readonly delete: Effect.Effect<boolean, SharedRefError>
  readonly update: (f: (value: A) => A) => Effect.Effect<void, SharedRefError>
  /** Updates the value, and answers the new one. */
  readonly updateAndGet: (f: (value: A) => A) => Effect.Effect<A, SharedRefError>
  /** Updates the value, and answers the former one. */
  readonly getAndUpdate: (f: (value: A) => A) => Effect.Effect<A, SharedRefError>
  /** Answers the first part of what the function returns, and sets the second. */
  readonly modify: <B>(f: (value: A) => readonly [B, A]) => Effect.Effect<B, SharedRefError>
  /** As `update`. It reads first; while others change the value, the effect runs again. */
  readonly updateEffect: <E, R>(f: (value: A) => Effect.Effect<A, E, R>) => Effect.Effect<void, E | SharedRefError, R>
  /** As `modify`. It reads first; while others change the value, the effect runs again. */
  readonly modifyEffect: <B, E, R>(
    f: (value: A) => Effect.Effect<readonly [B, A], E, R>
  ) => Effect.Effect<B, E | SharedRefError, R>
  /** The present value, and then that of every version. It ends only with an error. */
  readonly changes: Stream.Stream<A, SharedRefError>
  readonly changesWith: (options: ChangesOptions) => Stream.Stream<A, SharedRefError>
  /** As `changes`, with versions, and how many of them this subscriber has missed because it was slow. */
  readonly versions: (options?: ChangesOptions | undefined) => Stream.Stream<Change<A>, SharedRefError>
  /** Waits until the value satisfies the predicate, now or later, and answers it. By a push. */
  readonly until: {
    <B extends A>(
      predicate: (value: A) => value is B,
      options?: UntilOptions | undefined
    ): Effect.Effect<B, SharedRefError>
    (predicate: (value: A) => boolean, options?: UntilOptions | undefined): Effect.Effect<A, SharedRefError>
  }
}

/**
 * Refs of one schema, by key. It asks Redis for nothing, and a key costs nothing until it is used.
 *
 * @category models
 * @since 0.1.0
 */
export type Family<in out A> = (key: string) => SharedRef<A>

/**
 * @category options
 * @since 0.1.0
 */
export interface Options<A> {
  /** Of the value, which is kept as JSON. */
  readonly schema: Schema.Codec<A, any>
  /** What the ref reads as while it is absent. */
  readonly initial: A
  /** How long the value is kept after the last write. Default: until it is deleted. */
  readonly timeToLive?: Duration.Input | undefined
  /** Refs with the same text here live in one partition, so that a `transaction` can change them together. */
  readonly colocate?: string | undefined
}

/**
 * @category options
 * @since 0.1.0
 */
export interface FamilyOptions<A> extends Omit<Options<A>, "colocate"> {
  /** As that of a ref: for all keys, or of each key. Default: each key by itself. */
  readonly colocate?: string | ((key: string) => string) | undefined
}

export {
  /**
   * A value does not fit the schema: this process's own, which was not sent, or one that another process has written.
   *
   * @category errors
   * @since 0.1.0
   */
  InvalidPayload
} from "./internal/hold/payload.ts"

export {
  /**
   * A later holder of the lease has written, or this process knew that the lease was lost or released. Nothing was written.
   *
   * @category errors
   * @since 0.1.0
   */
  StaleToken,
  /**
   * The session was lost before Redis had answered: it may be written, and it may not.
   *
   * @category errors
   * @since 0.1.0
   */
  WriteUncertain
} from "./internal/hold/unwritten.ts"

/**
 * @category errors
 * @since 0.1.0
 */
export class SharedRefError extends Schema.Error<SharedRefError>("lockstep/SharedRef/SharedRefError")({
  _tag: Schema.tag("SharedRefError"),
  reason: Schema.Union([InvalidPayload, StaleToken, WriteUncertain, WaitTimeout, ...coordinatorReasons])
}) {
  override get message(): string {
    return this.reason.message
  }
}

const fail = (reason: SharedRefError["reason"]): SharedRefError => new SharedRefError({ reason })

// More versions than this wait for a slow subscriber only at the price of the oldest.
const mostBehind = 1024

// The cell of each ref, and what its writes publish.
type Inner = readonly [cell: Cell<any, SharedRefError>, outbox: Outbox<any>]

const inners = new WeakMap<object, Inner>()

const innerOf = (ref: SharedRef<any>): Inner => {
  const inner = inners.get(ref)
  if (inner === undefined) throw new TypeError("This SharedRef was not made by lockstep/SharedRef")
  return inner
}

// Of each coordinator, the refs that were named last, by their hash: those who name one together read and update it together.
const recent = new WeakMap<Space, Recent<Known>>()
const mostRecent = 1024

interface Known {
  readonly options: Options<any>
  readonly ref: SharedRef<any>
}

const isSame = (a: Options<any>, b: Options<any>): boolean =>
  a.schema === b.schema && Object.is(a.initial, b.initial) && a.timeToLive === b.timeToLive && a.colocate === b.colocate

const of = <A>(space: Space, name: string, what: string, options: Options<A>): SharedRef<A> => {
  const { colocate, initial, schema, timeToLive } = options
  if (colocate !== undefined) checkName(colocate, "colocate")
  const place = placeOf(space, "sharedRef", name, what, undefined, colocate)
  let refs = recent.get(space)
  if (refs === undefined) recent.set(space, refs = new Recent(mostRecent))
  const known = refs.get(place.key)
  if (known !== undefined && isSame(known.options, options)) return known.ref
  const cell = new Cell<A, SharedRefError>({
    place,
    schema,
    initial,
    timeToLive: timeToLive === undefined ? 0 : millis(timeToLive, "timeToLive"),
    colocate,
    fail
  })
  const ref = withOutbox(cell, [])
  refs.add(place.key, { options, ref })
  return ref
}

const withOutbox = <A>(cell: Cell<A, SharedRefError>, outbox: Outbox<A>): SharedRef<A> => {
  const { name, space } = cell.place
  const versions = (options?: ChangesOptions) => cell.versions(options?.conflate === true ? 1 : mostBehind)
  const changesWith = (options: ChangesOptions) => Stream.map(versions(options), ({ value }) => value)
  const { versioned } = cell
  const modify = <B>(f: (value: A) => readonly [B, A]) => cell.modify(f, outbox)
  const modifyEffect = <B, E, R>(f: (value: A) => Effect.Effect<readonly [B, Option.Option<A>], E, R>) =>
    cell.modifyEffect(f, outbox)
  const self: SharedRef<A> = {
    [TypeId]: TypeId,
    name,
    get: Effect.map(versioned, ({ value }) => value),
    versioned,
    version: Effect.map(versioned, ({ version }) => version),
    cached: cell.cached(space.kernel.settings.lease),
    cachedWithin: (maxAge) => {
      const age = Duration.toMillis(duration(maxAge, "maxAge"))
      return cell.cached(Math.min(age, space.kernel.settings.lease))
    },
    publishing: (publish) => withOutbox(cell, [...outbox, publish]),
    set: (value) => cell.set(value, outbox),
    getAndSet: (value) => cell.getAndSet(value, outbox),
    compareAndSet: (version, value) => {
      if (!Number.isSafeInteger(version) || version < 0) {
        throw new RangeError("version must be a whole number from 0 on")
      }
      return cell.compareAndSet(version, value, outbox)
    },
    setFenced: (lease, value) => cell.setFenced(lease, value, outbox),
    delete: cell.delete(outbox),
    update: (f) => modify((value) => [undefined, f(value)] as const),
    updateAndGet: (f) =>
      modify((value) => {
        const next = f(value)
        return [next, next]
      }),
    getAndUpdate: (f) => modify((value) => [value, f(value)]),
    modify,
    updateEffect: (f) =>
      modifyEffect((value) => Effect.map(f(value), (next) => [undefined, Option.some(next)] as const)),
    modifyEffect: (f) =>
      modifyEffect((value) => Effect.map(f(value), ([result, next]) => [result, Option.some(next)] as const)),
    changes: changesWith({}),
    changesWith,
    versions,
    until: (predicate: (value: A) => boolean, options?: UntilOptions) => {
      const waiting = Effect.flatMap(
        Stream.runHead(Stream.filter(changesWith({}), predicate)),
        // Subscriptions end with an error only.
        Option.match({ onNone: () => Effect.interrupt, onSome: Effect.succeed })
      )
      return spanning(
        bounded(waiting, cell.place, waitOf(cell.place, options), fail),
        "lockstep.SharedRef.until",
        "sharedRef",
        name
      ) as Effect.Effect<any, SharedRefError>
    }
  }
  inners.set(self, [cell, outbox])
  return self
}

/**
 * The ref of that name. It asks Redis for nothing yet, and there is nothing to close.
 *
 * @category constructors
 * @since 0.1.0
 */
export const make = <A>(
  options: Options<A> & { readonly name: string }
): Effect.Effect<SharedRef<A>, never, Coordinator> =>
  Effect.map(Coordinator, (coordinator) => of(spaceOf(coordinator), options.name, "name", options))

// So that no family can name the refs of another one.
const prefixOf = (name: string): string => `${checkName(name, "name").replace(/[%/]/g, encodeURIComponent)}/`

/**
 * Refs by key: that of the key `ann` of the family `users` is the ref named `users/ann`. A `/` or `%` in the name of the
 * family is escaped.
 *
 * @category constructors
 * @since 0.1.0
 */
export const family = <A>(
  options: FamilyOptions<A> & { readonly name: string }
): Effect.Effect<Family<A>, never, Coordinator> =>
  Effect.map(Coordinator, (coordinator) => {
    const { colocate, name, ...others } = options
    const prefix = prefixOf(name)
    const space = spaceOf(coordinator)
    return (key) => {
      const together = typeof colocate === "function" ? colocate(key) : colocate
      return of(space, prefix + checkName(key, "key"), "the name of the family and the key", {
        ...others,
        colocate: together
      })
    }
  })

// -----------------------------------------------------------------------------
// Combinators
// -----------------------------------------------------------------------------

/**
 * The present value, by Redis's word.
 *
 * @category getters
 * @since 0.1.0
 */
export const get = <A>(self: SharedRef<A>): Effect.Effect<A, SharedRefError> => self.get

/**
 * The present value, and then that of every version.
 *
 * @category combinators
 * @since 0.1.0
 */
export const changes = <A>(self: SharedRef<A>): Stream.Stream<A, SharedRefError> => self.changes

/**
 * @category combinators
 * @since 0.1.0
 */
export const set: {
  <A>(value: A): (self: SharedRef<A>) => Effect.Effect<void, SharedRefError>
  <A>(self: SharedRef<A>, value: A): Effect.Effect<void, SharedRefError>
} = dual(2, <A>(self: SharedRef<A>, value: A): Effect.Effect<void, SharedRefError> => self.set(value))

/**
 * Sets the value, and answers it.
 *
 * @category combinators
 * @since 0.1.0
 */
export const setAndGet: {
  <A>(value: A): (self: SharedRef<A>) => Effect.Effect<A, SharedRefError>
  <A>(self: SharedRef<A>, value: A): Effect.Effect<A, SharedRefError>
} = dual(
  2,
  <A>(self: SharedRef<A>, value: A): Effect.Effect<A, SharedRefError> => Effect.as(self.set(value), value)
)

/**
 * Sets the value, and answers the former one.
 *
 * @category combinators
 * @since 0.1.0
 */
export const getAndSet: {
  <A>(value: A): (self: SharedRef<A>) => Effect.Effect<A, SharedRefError>
  <A>(self: SharedRef<A>, value: A): Effect.Effect<A, SharedRefError>
} = dual(2, <A>(self: SharedRef<A>, value: A): Effect.Effect<A, SharedRefError> => self.getAndSet(value))

/**
 * @category combinators
 * @since 0.1.0
 */
export const update: {
  <A>(f: (value: A) => A): (self: SharedRef<A>) => Effect.Effect<void, SharedRefError>
  <A>(self: SharedRef<A>, f: (value: A) => A): Effect.Effect<void, SharedRefError>
} = dual(2, <A>(self: SharedRef<A>, f: (value: A) => A): Effect.Effect<void, SharedRefError> => self.update(f))

/**
 * Updates the value, and answers the new one.
 *
 * @category combinators
 * @since 0.1.0
 */
export const updateAndGet: {
  <A>(f: (value: A) => A): (self: SharedRef<A>) => Effect.Effect<A, SharedRefError>
  <A>(self: SharedRef<A>, f: (value: A) => A): Effect.Effect<A, SharedRefError>
} = dual(2, <A>(self: SharedRef<A>, f: (value: A) => A): Effect.Effect<A, SharedRefError> => self.updateAndGet(f))

/**
 * Updates the value, and answers the former one.
 *
 * @category combinators
 * @since 0.1.0
 */
export const getAndUpdate: {
  <A>(f: (value: A) => A): (self: SharedRef<A>) => Effect.Effect<A, SharedRefError>
  <A>(self: SharedRef<A>, f: (value: A) => A): Effect.Effect<A, SharedRefError>
} = dual(2, <A>(self: SharedRef<A>, f: (value: A) => A): Effect.Effect<A, SharedRefError> => self.getAndUpdate(f))

/**
 * As `updateAndGet`, with an effect. It reads first; while others change the value, the effect runs again.
 *
 * @category combinators
 * @since 0.1.0
 */
export const updateAndGetEffect: {
  <A, E, R>(f: (value: A) => Effect.Effect<A, E, R>): (self: SharedRef<A>) => Effect.Effect<A, E | SharedRefError, R>
  <A, E, R>(self: SharedRef<A>, f: (value: A) => Effect.Effect<A, E, R>): Effect.Effect<A, E | SharedRefError, R>
} = dual(
  2,
  <A, E, R>(self: SharedRef<A>, f: (value: A) => Effect.Effect<A, E, R>): Effect.Effect<A, E | SharedRefError, R> =>
    self.modifyEffect((value) => Effect.map(f(value), (next) => [next, next] as const))
)

/**
 * As `getAndUpdate`, with an effect. It reads first; while others change the value, the effect runs again.
 *
 * @category combinators
 * @since 0.1.0
 */
export const getAndUpdateEffect: {
  <A, E, R>(f: (value: A) => Effect.Effect<A, E, R>): (self: SharedRef<A>) => Effect.Effect<A, E | SharedRefError, R>
  <A, E, R>(self: SharedRef<A>, f: (value: A) => Effect.Effect<A, E, R>): Effect.Effect<A, E | SharedRefError, R>
} = dual(
  2,
  <A, E, R>(self: SharedRef<A>, f: (value: A) => Effect.Effect<A, E, R>): Effect.Effect<A, E | SharedRefError, R> =>
    self.modifyEffect((value) => Effect.map(f(value), (next) => [value, next] as const))
)

/**
 * Updates the value if the function answers another one. It reads first.
 *
 * @category combinators
 * @since 0.1.0
 */
export const updateSome: {
  <A>(f: (value: A) => Option.Option<A>): (self: SharedRef<A>) => Effect.Effect<void, SharedRefError>
  <A>(self: SharedRef<A>, f: (value: A) => Option.Option<A>): Effect.Effect<void, SharedRefError>
} = dual(
  2,
  <A>(self: SharedRef<A>, f: (value: A) => Option.Option<A>): Effect.Effect<void, SharedRefError> =>
    modifySome(self, (value) => [undefined, f(value)])
)

/**
 * As `updateSome`, and answers the value that there is then.
 *
 * @category combinators
 * @since 0.1.0
 */
export const updateSomeAndGet: {
  <A>(f: (value: A) => Option.Option<A>): (self: SharedRef<A>) => Effect.Effect<A, SharedRefError>
  <A>(self: SharedRef<A>, f: (value: A) => Option.Option<A>): Effect.Effect<A, SharedRefError>
} = dual(
  2,
  <A>(self: SharedRef<A>, f: (value: A) => Option.Option<A>): Effect.Effect<A, SharedRefError> =>
    modifySome(self, (value) => {
      const next = f(value)
      return [Option.getOrElse(next, () => value), next]
    })
)

/**
 * As `updateSome`, and answers the former value.
 *
 * @category combinators
 * @since 0.1.0
 */
export const getAndUpdateSome: {
  <A>(f: (value: A) => Option.Option<A>): (self: SharedRef<A>) => Effect.Effect<A, SharedRefError>
  <A>(self: SharedRef<A>, f: (value: A) => Option.Option<A>): Effect.Effect<A, SharedRefError>
} = dual(
  2,
  <A>(self: SharedRef<A>, f: (value: A) => Option.Option<A>): Effect.Effect<A, SharedRefError> =>
    modifySome(self, (value) => [value, f(value)])
)

/**
 * As `updateSome`, with an effect. It reads first; while others change the value, the effect runs again.
 *
 * @category combinators
 * @since 0.1.0
 */
export const updateSomeEffect: {
  <A, E, R>(
    f: (value: A) => Effect.Effect<Option.Option<A>, E, R>
  ): (self: SharedRef<A>) => Effect.Effect<void, E | SharedRefError, R>
  <A, E, R>(
    self: SharedRef<A>,
    f: (value: A) => Effect.Effect<Option.Option<A>, E, R>
  ): Effect.Effect<void, E | SharedRefError, R>
} = dual(
  2,
  <A, E, R>(
    self: SharedRef<A>,
    f: (value: A) => Effect.Effect<Option.Option<A>, E, R>
  ): Effect.Effect<void, E | SharedRefError, R> =>
    modifySomeEffect(self, (value) => Effect.map(f(value), (next) => [undefined, next] as const))
)

/**
 * As `updateSomeAndGet`, with an effect. It reads first; while others change the value, the effect runs again.
 *
 * @category combinators
 * @since 0.1.0
 */
export const updateSomeAndGetEffect: {
  <A, E, R>(
    f: (value: A) => Effect.Effect<Option.Option<A>, E, R>
  ): (self: SharedRef<A>) => Effect.Effect<A, E | SharedRefError, R>
  <A, E, R>(
    self: SharedRef<A>,
    f: (value: A) => Effect.Effect<Option.Option<A>, E, R>
  ): Effect.Effect<A, E | SharedRefError, R>
} = dual(
  2,
  <A, E, R>(
    self: SharedRef<A>,
    f: (value: A) => Effect.Effect<Option.Option<A>, E, R>
  ): Effect.Effect<A, E | SharedRefError, R> =>
    modifySomeEffect(
      self,
      (value) => Effect.map(f(value), (next) => [Option.getOrElse(next, () => value), next] as const)
    )
)

/**
 * As `getAndUpdateSome`, with an effect. It reads first; while others change the value, the effect runs again.
 *
 * @category combinators
 * @since 0.1.0
 */
export const getAndUpdateSomeEffect: {
  <A, E, R>(
    f: (value: A) => Effect.Effect<Option.Option<A>, E, R>
  ): (self: SharedRef<A>) => Effect.Effect<A, E | SharedRefError, R>
  <A, E, R>(
    self: SharedRef<A>,
    f: (value: A) => Effect.Effect<Option.Option<A>, E, R>
  ): Effect.Effect<A, E | SharedRefError, R>
} = dual(
  2,
  <A, E, R>(
    self: SharedRef<A>,
    f: (value: A) => Effect.Effect<Option.Option<A>, E, R>
  ): Effect.Effect<A, E | SharedRefError, R> =>
    modifySomeEffect(self, (value) => Effect.map(f(value), (next) => [value, next] as const))
)

/**
 * @category combinators
 * @since 0.1.0
 */
export const modify: {
  <A, B>(f: (value: A) => readonly [B, A]): (self: SharedRef<A>) => Effect.Effect<B, SharedRefError>
  <A, B>(self: SharedRef<A>, f: (value: A) => readonly [B, A]): Effect.Effect<B, SharedRefError>
} = dual(
  2,
  <A, B>(self: SharedRef<A>, f: (value: A) => readonly [B, A]): Effect.Effect<B, SharedRefError> => self.modify(f)
)

/**
 * Answers the first part of what the function returns, and sets the second if there is one. It reads first.
 *
 * @category combinators
 * @since 0.1.0
 */
export const modifySome: {
  <A, B>(f: (value: A) => readonly [B, Option.Option<A>]): (self: SharedRef<A>) => Effect.Effect<B, SharedRefError>
  <A, B>(self: SharedRef<A>, f: (value: A) => readonly [B, Option.Option<A>]): Effect.Effect<B, SharedRefError>
} = dual(
  2,
  <A, B>(self: SharedRef<A>, f: (value: A) => readonly [B, Option.Option<A>]): Effect.Effect<B, SharedRefError> =>
    modifySomeEffect(self, (value) => Effect.sync(() => f(value)))
)

/**
 * Updates the value with an effect. It reads first; while others change the value, the effect runs again.
 *
 * @category combinators
 * @since 0.1.0
 */
export const updateEffect: {
  <A, E, R>(
    f: (value: A) => Effect.Effect<A, E, R>
  ): (self: SharedRef<A>) => Effect.Effect<void, E | SharedRefError, R>
  <A, E, R>(self: SharedRef<A>, f: (value: A) => Effect.Effect<A, E, R>): Effect.Effect<void, E | SharedRefError, R>
} = dual(
  2,
  <A, E, R>(
    self: SharedRef<A>,
    f: (value: A) => Effect.Effect<A, E, R>
  ): Effect.Effect<void, E | SharedRefError, R> => self.updateEffect(f)
)

/**
 * As `modify`, with an effect. It reads first; while others change the value, the effect runs again.
 *
 * @category combinators
 * @since 0.1.0
 */
export const modifyEffect: {
  <A, B, E, R>(
    f: (value: A) => Effect.Effect<readonly [B, A], E, R>
  ): (self: SharedRef<A>) => Effect.Effect<B, E | SharedRefError, R>
  <A, B, E, R>(
    self: SharedRef<A>,
    f: (value: A) => Effect.Effect<readonly [B, A], E, R>
  ): Effect.Effect<B, E | SharedRefError, R>
} = dual(
  2,
  <A, B, E, R>(
    self: SharedRef<A>,
    f: (value: A) => Effect.Effect<readonly [B, A], E, R>
  ): Effect.Effect<B, E | SharedRefError, R> => self.modifyEffect(f)
)

/**
 * As `modifySome`, with an effect. It reads first; while others change the value, the effect runs again.
 *
 * @category combinators
 * @since 0.1.0
 */
export const modifySomeEffect: {
  <A, B, E, R>(
    f: (value: A) => Effect.Effect<readonly [B, Option.Option<A>], E, R>
  ): (self: SharedRef<A>) => Effect.Effect<B, E | SharedRefError, R>
  <A, B, E, R>(
    self: SharedRef<A>,
    f: (value: A) => Effect.Effect<readonly [B, Option.Option<A>], E, R>
  ): Effect.Effect<B, E | SharedRefError, R>
} = dual(
  2,
  <A, B, E, R>(
    self: SharedRef<A>,
    f: (value: A) => Effect.Effect<readonly [B, Option.Option<A>], E, R>
  ): Effect.Effect<B, E | SharedRefError, R> =>
    Effect.suspend(() => {
      const [cell, outbox] = innerOf(self)
      return cell.modifyEffect(f, outbox)
    })
)

type Values<Refs extends ReadonlyArray<SharedRef<any>>> = {
  readonly [At in keyof Refs]: Refs[At] extends SharedRef<infer A> ? A : never
}

// Each is a part of one call of Redis, which does nothing else meanwhile.
const mostTogether = 64

/**
 * Changes several refs together: all or none, at one moment, with one version. The function gets their values, and answers
 * a result and the values that they are to have; one that it returns as it was is not written. All refs need the same
 * `colocate`. At most 64 refs. Subscribers in one process hear of all changes in one go.
 *
 * **Example** (A transfer)
 *
 * ```ts
 * import { SharedRef } from "lockstep"
 * import { Effect, Schema } from "effect"
 *
 * const transfer = Effect.gen(function*() {
 *   const account = yield* SharedRef.family({
 *     name: "accounts",
 *     schema: Schema.Number,
 *     initial: 0,
 *     colocate: "accounts"
 *   })
 *   return yield* SharedRef.transaction(
 *     [account("ann"), account("bob")],
 *     ([ann, bob]) => ann < 10 ? [false, [ann, bob]] : [true, [ann - 10, bob + 10]]
 *   )
 * })
 * ```
 *
 * @category combinators
 * @since 0.1.0
 */
export const transaction = <const Refs extends readonly [SharedRef<any>, ...ReadonlyArray<SharedRef<any>>], B>(
  refs: Refs,
  f: (values: Values<Refs>) => readonly [B, Values<Refs>]
): Effect.Effect<B, SharedRefError> =>
  Effect.suspend(() => {
    const inners = refs.map(innerOf)
    const all = inners.map(([cell]) => cell)
    const [{ colocate, place: { partition } }] = all as [Cell<any, SharedRefError>]
    if (all.length > mostTogether) throw new RangeError(`refs must not be more than ${mostTogether}`)
    if (new Set(all.map(({ place: { key } }) => key)).size < all.length) {
      throw new RangeError("refs must be different ones")
    }
    const apart = all.find((cell) => cell.place.partition !== partition || cell.colocate !== colocate)
    if (all.length > 1 && (colocate === undefined || apart !== undefined)) {
      throw new RangeError("refs of a transaction must have the same `colocate`, and be made with one coordinator")
    }
    return Cell.transaction(inners, f as never)
  })

// -----------------------------------------------------------------------------
// Services
// -----------------------------------------------------------------------------

/**
 * The class that `Service` makes.
 *
 * @category models
 * @since 0.1.0
 */
export interface ServiceClass<in out Self, in out Name extends string, in out A>
  extends AnyServiceClass<Self, `lockstep/SharedRef/${Name}`, SharedRef<A>, never, Coordinator>
{}

/**
 * A ref as a typed service: `class Progress extends SharedRef.Service<Progress>()("progress", { schema, initial }) {}`, with
 * `Progress.layer`.
 *
 * @category constructors
 * @since 0.1.0
 */
export const Service =
  <Self>() => <const Name extends string, A>(name: Name, options: Options<A>): ServiceClass<Self, Name, A> =>
    service<Self, "SharedRef", Name, SharedRef<A>, never, Coordinator>("SharedRef", name, make({ ...options, name }))

/**
 * The class that `FamilyService` makes.
 *
 * @category models
 * @since 0.1.0
 */
export interface FamilyServiceClass<in out Self, in out Name extends string, in out A>
  extends AnyServiceClass<Self, `lockstep/SharedRef.Family/${Name}`, Family<A>, never, Coordinator>
{}

/**
 * A family as a typed service: `class Users extends SharedRef.FamilyService<Users>()("users", { schema, initial }) {}`, with
 * `Users.layer`.
 *
 * @category constructors
 * @since 0.1.0
 */
export const FamilyService =
  <Self>() =>
  <const Name extends string, A>(name: Name, options: FamilyOptions<A>): FamilyServiceClass<Self, Name, A> =>
    service<Self, "SharedRef.Family", Name, Family<A>, never, Coordinator>(
      "SharedRef.Family",
      name,
      family({ ...options, name })
    )
