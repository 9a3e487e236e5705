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
 * - `cached` costs no round trip. Its answer is at most as old as the coordinator's `lease`; otherwise it reads from Redis. The
 *   age is counted to the beginning of the turn of the event loop.
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
 *   session, or of events of which some 16,000 waited, it goes on with the latest version: those that it has missed then are not
 *   counted. `conflate` shows a slow subscriber only the latest.
 * - Every process has to use the same schema, `initial` and `colocate`. `colocate` decides where the ref lives.
 * - While Redis is away, reads and writes fail after the coordinator's `requestTimeout`. A write that failed with `Timeout` may
 *   be executed all the same.
 * - Subscribers observe that a value has expired within a third of the coordinator's lease, and cached reads answer it for as
 *   long.
 * - `set`, `update` and `delete` do not look at tokens: where a former holder must not write, every writer uses `setFenced`.
 *   Tokens are kept for a day after the last such write.
 * - After a fail-over, a `get` of a process that still reaches the former primary reads the data of that primary.
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

import * as Effect from "effect/Effect"
import { dual } from "effect/Function"
import * as Option from "effect/Option"
import type * as Stream from "effect/Stream"
import { Coordinator } from "./Coordinator.ts"
import { checkName } from "./internal/actor/keys.ts"
import { spaceOf } from "./internal/hold/place.ts"
import { service, type ServiceClass as AnyServiceClass } from "./internal/hold/service.ts"
import type { Family, FamilyOptions, Options, SharedRef } from "./internal/ref/api.ts"
import type { SharedRefError } from "./internal/ref/errors.ts"
import { prefixOf, what } from "./internal/ref/family.ts"
import { modifySomeEffect as modifyingSome, of, transacted } from "./internal/ref/refs.ts"

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

export type {
  /**
   * A version as a subscriber sees it. `missed` is how many versions directly before it were dropped, because this subscriber
   * was slow or wants the latest only; 0 mostly. Versions that the process was not notified of, as after the loss of its
   * session, are not counted.
   *
   * @category models
   * @since 0.1.0
   */
  Change,
  /**
   * @category options
   * @since 0.1.0
   */
  ChangesOptions,
  /**
   * Refs of one schema, by key. It asks Redis for nothing, and a key costs nothing until it is used.
   *
   * @category models
   * @since 0.1.0
   */
  Family,
  /**
   * @category options
   * @since 0.1.0
   */
  FamilyOptions,
  /**
   * @category options
   * @since 0.1.0
   */
  Options,
  /**
   * Named as `effect/SubscriptionRef`.
   *
   * @category models
   * @since 0.1.0
   */
  SharedRef,
  /**
   * @category options
   * @since 0.1.0
   */
  UntilOptions,
  /**
   * A value, and the number of its version: 0 while the ref is absent.
   *
   * @category models
   * @since 0.1.0
   */
  Versioned
} from "./internal/ref/api.ts"

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

export {
  /**
   * @category errors
   * @since 0.1.0
   */
  SharedRefError
} from "./internal/ref/errors.ts"

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
      return of(space, prefix + checkName(key, "key"), what, {
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
  ): Effect.Effect<B, E | SharedRefError, R> => modifyingSome(self, f)
)

type Values<Refs extends ReadonlyArray<SharedRef<any>>> = {
  readonly [At in keyof Refs]: Refs[At] extends SharedRef<infer A> ? A : never
}

/**
 * Changes several refs together: all or none, at one moment, with one version. The function gets their values, and answers a
 * result and their new values. A value that it returns as it was is not written. All refs need the same `colocate`. At most 64
 * refs. Subscribers in one process observe all changes together.
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
export const transaction = <const Refs extends ReadonlyArray<SharedRef<any>>, B>(
  refs: Refs,
  f: (values: Values<Refs>) => readonly [B, Values<Refs>]
): Effect.Effect<B, SharedRefError> => transacted(refs, f as never)

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
