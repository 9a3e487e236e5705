/**
 * A number of permits that several processes share: first in, first out, weighted, fenced, and resizable while in use.
 *
 * A semaphore exists for as long as a process has it open. `make` creates it, or joins one that has as many permits;
 * `attach` joins without knowing the number, and waits until a process creates it.
 *
 * **Guarantees**
 *
 * - Never more permits are taken than there are, also across crashes and reconnects. The permits of a process that died
 *   come back when its lease has run out.
 * - First in, first out, weights included: a big take at the front is not overtaken by small ones behind it.
 * - `withPermits` interrupts its effect when the lease is lost.
 * - After Redis has lost its data, the processes that have the semaphore open create it again with the permits it had.
 *
 * **Gotchas**
 *
 * - After `resize` to fewer permits than are taken, nothing is revoked: holders go on, and the next waiters wait.
 * - Closing the scope of `make` does not end waits: a take that waits is granted in its turn.
 * - A fiber that holds permits and waits for more of the same semaphore can wait for itself.
 * - When no process has it open any more, the semaphore is deleted, and `make` may give it another number.
 *
 * **Example** (Five at a time, over all processes)
 *
 * ```ts
 * import { Coordinator, Redis, Semaphore } from "lockstep"
 * import { Effect, Layer } from "effect"
 *
 * class Pool extends Semaphore.Service<Pool>()("pool", { permits: 5 }) {}
 *
 * const program = Effect.gen(function*() {
 *   const pool = yield* Pool
 *   yield* Effect.log("at most five of us").pipe(pool.withPermit)
 * })
 *
 * program.pipe(
 *   Effect.provide(Pool.layer.pipe(Layer.provide(Coordinator.layerEmbedded()))),
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
import { Coordinator } from "./Coordinator.ts"
import { coordinatorReasons } from "./internal/actor/errors.ts"
import * as acquiring from "./internal/hold/acquire.ts"
import { Hold } from "./internal/hold/hold.ts"
import { type Holder, holdersOf, type Waiter, waitersOf } from "./internal/hold/holders.ts"
import { describe, LeaseLost, WaitTimeout } from "./internal/hold/loss.ts"
import type { Membership } from "./internal/hold/membership.ts"
import { firmly, mismatchPolicies, oneOf, type Place, placeOf, spaceOf, whole } from "./internal/hold/place.ts"
import { withHold } from "./internal/hold/protect.ts"
import { question, request } from "./internal/hold/request.ts"
import { service, type ServiceClass as AnyServiceClass } from "./internal/hold/service.ts"
import { spanning } from "./internal/hold/span.ts"
import { taking } from "./internal/sync/permits.ts"
import type { Lease } from "./Lease.ts"

/**
 * @category type IDs
 * @since 0.1.0
 */
export const TypeId: TypeId = "~lockstep/Semaphore"

/**
 * @category type IDs
 * @since 0.1.0
 */
export type TypeId = "~lockstep/Semaphore"

/**
 * @category options
 * @since 0.1.0
 */
export interface TakeOptions {
  /** How long to wait for the permits; then it fails with `WaitTimeout`. Default: that of the coordinator. */
  readonly wait?: Duration.Input | undefined
  /**
   * How long they may be held; then the lease is lost with the reason `maxHold`, and the effect under it is interrupted. Default:
   * that of the coordinator.
   */
  readonly maxHold?: Duration.Input | undefined
  /**
   * With `awaited`, the end of the effect, or of the scope, waits until Redis has released them. `background` saves that round
   * trip. The release goes with the next request of this process, or at once. Others may find them taken for that moment. If the
   * process ends without closing its coordinator, they may find them taken for the lease. Default `awaited`.
   */
  readonly release?: "awaited" | "background" | undefined
  /**
   * Keep the permits for a moment after their release. While the process takes as many again within 50 ms, it does so without
   * asking Redis. This ends when there are too few for others, and after 0.9 s at most. Default `false`. See `docs/Semaphore.md`.
   */
  readonly cached?: boolean | undefined
}

/**
 * Permits that several processes share. Named as `effect/Semaphore`.
 *
 * @category models
 * @since 0.1.0
 */
export interface Semaphore {
  readonly [TypeId]: TypeId
  readonly name: string
  /** Runs an effect while holding `permits` of them. */
  readonly withPermits: (
    permits: number,
    options?: TakeOptions | undefined
  ) => <A, E, R>(self: Effect.Effect<A, E, R>) => Effect.Effect<A, E | SemaphoreError, R>
  /** Runs an effect while holding one permit. */
  readonly withPermit: <A, E, R>(self: Effect.Effect<A, E, R>) => Effect.Effect<A, E | SemaphoreError, R>
  /** As `withPermits` if they are free now; otherwise `None`, and the effect does not run. */
  readonly withPermitsIfAvailable: (
    permits: number,
    options?: Omit<TakeOptions, "wait"> | undefined
  ) => <A, E, R>(self: Effect.Effect<A, E, R>) => Effect.Effect<Option.Option<A>, E | SemaphoreError, R>
  /**
   * Takes permits until `release`, or until the coordinator is closed. Nothing is interrupted by itself after a loss, or
   * when `maxHold` has passed: watch `lease.lost`, or use `Lease.protect`.
   */
  readonly take: (permits: number, options?: TakeOptions | undefined) => Effect.Effect<Lease, SemaphoreError>
  /** Takes permits for as long as the scope is open. */
  readonly takeScoped: (
    permits: number,
    options?: TakeOptions | undefined
  ) => Effect.Effect<Lease, SemaphoreError, Scope.Scope>
  /** As `take` if they are free now; otherwise `None`. */
  readonly takeIfAvailable: (
    permits: number,
    options?: Omit<TakeOptions, "wait"> | undefined
  ) => Effect.Effect<Option.Option<Lease>, SemaphoreError>
  /** Releases the permits that `take` has taken. A second time changes nothing. */
  readonly release: (lease: Lease) => Effect.Effect<void>
  /** How many permits are free now, for people: it may have changed before it is read. Negative after shrinking. */
  readonly available: Effect.Effect<number, SemaphoreError>
  /** How many permits there are now. */
  readonly permits: Effect.Effect<number, SemaphoreError>
  /** The processes that hold permits now, in no order; up to 1,000. */
  readonly holders: Effect.Effect<ReadonlyArray<Holder>, SemaphoreError>
  /** The processes that wait for permits now, the next one first; up to 1,000. */
  readonly waiting: Effect.Effect<ReadonlyArray<Waiter>, SemaphoreError>
  /** Changes the number of permits for all processes. If the session is lost meanwhile, it may be done a second time. */
  readonly resize: (permits: number) => Effect.Effect<void, SemaphoreError>
}

/**
 * The semaphore exists with another number of permits.
 *
 * @category errors
 * @since 0.1.0
 */
export class PermitsMismatch extends Schema.Error<PermitsMismatch>("lockstep/Semaphore/PermitsMismatch")({
  _tag: Schema.tag("PermitsMismatch"),
  name: Schema.String,
  namespace: Schema.String,
  permits: Schema.Number,
  existing: Schema.Number
}) {
  override get message(): string {
    return `${describe("semaphore", this.name, this.namespace)} is open elsewhere with ${this.existing} permits, ` +
      `not ${this.permits}: use the same number, attach to it, or say with \`onMismatch\` which number is meant.`
  }
}

/**
 * More permits were asked for than there are, so that they could not be had.
 *
 * @category errors
 * @since 0.1.0
 */
export class PermitsExceeded extends Schema.Error<PermitsExceeded>("lockstep/Semaphore/PermitsExceeded")({
  _tag: Schema.tag("PermitsExceeded"),
  name: Schema.String,
  namespace: Schema.String,
  permits: Schema.Number,
  existing: Schema.Number
}) {
  override get message(): string {
    return `${this.permits} permits were asked for, and ${describe("semaphore", this.name, this.namespace)} has ` +
      `${this.existing}: ask for fewer, or resize it.`
  }
}

/**
 * No process has the semaphore open any more: its scope was closed.
 *
 * @category errors
 * @since 0.1.0
 */
export class SemaphoreGone extends Schema.Error<SemaphoreGone>("lockstep/Semaphore/SemaphoreGone")({
  _tag: Schema.tag("SemaphoreGone"),
  name: Schema.String,
  namespace: Schema.String
}) {
  override get message(): string {
    return `${describe("semaphore", this.name, this.namespace)} does not exist any more: ` +
      `use it within the scope that made it.`
  }
}

/**
 * @category errors
 * @since 0.1.0
 */
export class SemaphoreError extends Schema.Error<SemaphoreError>("lockstep/Semaphore/SemaphoreError")({
  _tag: Schema.tag("SemaphoreError"),
  reason: Schema.Union([LeaseLost, WaitTimeout, PermitsMismatch, PermitsExceeded, SemaphoreGone, ...coordinatorReasons])
}) {
  override get message(): string {
    return this.reason.message
  }
}

type AnyEffect = Effect.Effect<unknown, unknown, unknown>

const isDataFirst = (args: IArguments): boolean => typeof args[0] !== "number"

const fail = (reason: SemaphoreError["reason"]): SemaphoreError => new SemaphoreError({ reason })

const aboutOf = ({ name, space: { kernel } }: Place) => ({ name, namespace: kernel.settings.namespace })

// Weights are doubles in Redis; sums of them stay exact far beyond that.
const checkPermits = (permits: number): number => whole(permits, "permits", 2 ** 31 - 1)

class SemaphoreImpl implements Semaphore {
  readonly "~lockstep/Semaphore" = "~lockstep/Semaphore" as const
  readonly name: string
  readonly #place: Place
  readonly #known: Known
  readonly #member: Membership

  constructor(place: Place, known: Known, member: Membership) {
    this.name = place.name
    this.#place = place
    this.#known = known
    this.#member = member
  }

  // It may be gone alone, as after an eviction: then it is created again, once.
  #taking<A, E, R>(
    permits: number,
    wait: boolean,
    options: TakeOptions | undefined,
    take: (acquiring: acquiring.Acquire<SemaphoreError>) => Effect.Effect<A, E | SemaphoreError, R>
  ): Effect.Effect<A, E | SemaphoreError, R> {
    return Effect.suspend(() => {
      checkPermits(permits)
      let isGone = false
      const claim = () =>
        taking(this.#place, permits, 0, wait, {
          options,
          fail,
          refuse: (refusal) => {
            if (refusal[0] === "busy") return Effect.succeed(undefined)
            if (refusal[0] === "exceeds") return Effect.fail(this.#exceeded(permits, refusal[1]))
            isGone = true
            return Effect.fail(this.#gone())
          }
        })
      return Effect.catchCauseIf(
        take(claim()),
        // The failure is not that of what ran under a hold.
        () => isGone && acquiring.rejoin(this.#place, this.#member),
        () => take(claim())
      )
    })
  }

  #exceeded(permits: number, existing: number): SemaphoreError {
    this.#known.permits = existing
    return fail(new PermitsExceeded({ ...aboutOf(this.#place), permits, existing }))
  }

  #gone(): SemaphoreError {
    return fail(new SemaphoreGone(aboutOf(this.#place)))
  }

  #spanned<A, E, R>(self: Effect.Effect<A, E, R>, verb: string): Effect.Effect<A, E, R> {
    return spanning(self, `lockstep.Semaphore.${verb}`, "semaphore", this.name)
  }

  readonly withPermits =
    (permits: number, options?: TakeOptions | undefined) =>
    <A, E, R>(self: Effect.Effect<A, E, R>): Effect.Effect<A, E | SemaphoreError, R> =>
      this.#spanned(
        this.#taking(permits, true, options, (taking) =>
          withHold(self, taking) as Effect.Effect<A, E | SemaphoreError, R>),
        "withPermits"
      )

  readonly withPermit = <A, E, R>(self: Effect.Effect<A, E, R>): Effect.Effect<A, E | SemaphoreError, R> =>
    this.withPermits(1)(self)

  readonly withPermitsIfAvailable =
    (permits: number, options?: Omit<TakeOptions, "wait"> | undefined) =>
    <A, E, R>(self: Effect.Effect<A, E, R>): Effect.Effect<Option.Option<A>, E | SemaphoreError, R> =>
      this.#spanned(
        Effect.map(
          this.#taking(permits, false, options, (taking) => withHold(Effect.asSome(self), taking)),
          (result) => result ?? Option.none()
        ),
        "withPermitsIfAvailable"
      )

  readonly take = (permits: number, options?: TakeOptions | undefined): Effect.Effect<Lease, SemaphoreError> =>
    this.#spanned(
      this.#taking(permits, true, options, acquiring.acquireUnscoped),
      "take"
    ) as Effect.Effect<Lease, SemaphoreError>

  readonly takeScoped = (
    permits: number,
    options?: TakeOptions | undefined
  ): Effect.Effect<Lease, SemaphoreError, Scope.Scope> =>
    this.#spanned(
      this.#taking(permits, true, options, (taking) => acquiring.acquireScoped(taking)),
      "takeScoped"
    ) as Effect.Effect<Lease, SemaphoreError, Scope.Scope>

  readonly takeIfAvailable = (
    permits: number,
    options?: Omit<TakeOptions, "wait"> | undefined
  ): Effect.Effect<Option.Option<Lease>, SemaphoreError> =>
    Effect.map(
      this.#spanned(
        this.#taking(permits, false, options, acquiring.acquireUnscoped),
        "takeIfAvailable"
      ),
      Option.fromUndefinedOr
    )

  readonly release = (lease: Lease): Effect.Effect<void> =>
    Effect.suspend(() => {
      if (!(lease instanceof Hold) || lease.claim.place.key !== this.#place.key) {
        const own = describe("semaphore", this.name, this.#place.namespace)
        throw new TypeError(`This lease was not taken from ${own}: release what its own \`take\` has answered.`)
      }
      return acquiring.release(lease)
    })

  get #state(): Effect.Effect<readonly [capacity: number, taken: number], SemaphoreError> {
    return Effect.flatMap(
      Effect.mapError(question(this.#place, "semaphore.state", []), ({ reason }) => fail(reason)),
      ([, capacity, taken]) => {
        if (capacity > 0) return Effect.succeed([capacity, taken] as const)
        return acquiring.rejoin(this.#place, this.#member)
          ? Effect.succeed([this.#known.permits, 0] as const)
          : Effect.fail(this.#gone())
      }
    )
  }

  get available(): Effect.Effect<number, SemaphoreError> {
    return Effect.map(this.#state, ([capacity, taken]) => capacity - taken)
  }

  get permits(): Effect.Effect<number, SemaphoreError> {
    return Effect.map(this.#state, ([capacity]) => capacity)
  }

  get holders(): Effect.Effect<ReadonlyArray<Holder>, SemaphoreError> {
    return Effect.mapError(holdersOf(this.#place, "semaphore.holders"), ({ reason }) => fail(reason))
  }

  get waiting(): Effect.Effect<ReadonlyArray<Waiter>, SemaphoreError> {
    return Effect.mapError(waitersOf(this.#place, "semaphore.waiters"), ({ reason }) => fail(reason))
  }

  readonly resize = (permits: number): Effect.Effect<void, SemaphoreError> =>
    Effect.suspend(() => {
      checkPermits(permits)
      const { heard } = this.#known
      return Effect.matchEffect(request(this.#place, "semaphore.resize", [permits]), {
        onFailure: ({ reason }) => Effect.fail(fail(reason)),
        onSuccess: ([tag]) => {
          // Another process may have resized it since, and its event be here already.
          if (tag === "missing" || this.#known.heard === heard) this.#known.permits = permits
          if (tag === "missing" && !acquiring.rejoin(this.#place, this.#member)) return Effect.fail(this.#gone())
          // What is kept would be taken again without asking whether there is as much: the recall comes a moment later.
          this.#place.tenancy.kept.surrenderKey(this.#place.key)
          return Effect.void
        }
      })
    })
}

/** The number of permits as far as this process knows. The actor has the last word. */
interface Known {
  permits: number
  joined: boolean
  /** How often it was heard from the actor. */
  heard: number
}

type Mode = "fail" | "keep" | "resize" | "attach"

const open = (
  name: string,
  mode: Mode,
  permits: number,
  wait: Duration.Input | undefined,
  lease: Duration.Input | undefined
): Effect.Effect<Semaphore, SemaphoreError, Coordinator | Scope.Scope> =>
  Effect.flatMap(Coordinator, (coordinator) => {
    const place = placeOf(spaceOf(coordinator), "semaphore", name, "name", lease)
    const known: Known = { permits, joined: false, heard: 0 }
    return Effect.flatMap(
      acquiring.join(place, {
        verb: "semaphore.join",
        leave: "semaphore.release",
        // Joined again, the number that is in force is meant. If it is asked for again in one session, it has been gone alone.
        args: (anyway, again) =>
          known.joined
            ? [known.permits, again ? "again" : "kept"]
            : [permits, anyway && mode !== "attach" ? firmly[mode] : mode],
        observer: {
          observe: ([capacity]) => {
            known.joined = true
            known.heard++
            known.permits = Number(capacity)
          }
        },
        wait: mode === "attach" ? wait ?? place.space.wait : undefined,
        waits: mode === "attach",
        fail: (error) => fail(error)
      }),
      ([member, outcome]) =>
        outcome[0] === "granted"
          ? Effect.succeed(new SemaphoreImpl(place, known, member))
          : Effect.fail(fail(
            outcome[0] === "mismatch"
              ? new PermitsMismatch({ ...aboutOf(place), permits, existing: outcome[1] })
              : new SemaphoreGone(aboutOf(place))
          ))
    )
  })

/**
 * @category options
 * @since 0.1.0
 */
export interface Options {
  /** A whole number from 1 to 2^31 - 1. */
  readonly permits: number
  /**
   * What to do when it is open elsewhere with another number of permits. `fail` fails with `PermitsMismatch`, `keep` keeps the
   * number that it has, and `resize` changes it for all processes. Default `fail`. When no process has it open, it gets this
   * number.
   */
  readonly onMismatch?: "fail" | "keep" | "resize" | undefined
  /** How long permits outlive a process that died. Default: the coordinator's lease. */
  readonly lease?: Duration.Input | undefined
}

/**
 * @category options
 * @since 0.1.0
 */
export interface AttachOptions {
  /** How long to wait until a process creates it; then it fails with `WaitTimeout`. Default: the coordinator's `wait`. */
  readonly wait?: Duration.Input | undefined
  /** How long permits outlive a process that died. Default: the coordinator's lease. */
  readonly lease?: Duration.Input | undefined
}

/**
 * Creates the semaphore, or joins it when it has as many permits. Fails with `PermitsMismatch` when it has another number.
 * It is open for as long as the scope is.
 *
 * @category constructors
 * @since 0.1.0
 */
export const make = (
  options: Options & { readonly name: string }
): Effect.Effect<Semaphore, SemaphoreError, Coordinator | Scope.Scope> =>
  Effect.suspend(() => {
    const { lease, name, onMismatch = "fail", permits } = options
    oneOf(onMismatch, "onMismatch", mismatchPolicies)
    return open(name, onMismatch, checkPermits(permits), undefined, lease)
  })

/**
 * Joins a semaphore without knowing how many permits it has, and waits until a process creates it.
 *
 * @category constructors
 * @since 0.1.0
 */
export const attach = (
  options: AttachOptions & { readonly name: string }
): Effect.Effect<Semaphore, SemaphoreError, Coordinator | Scope.Scope> =>
  spanning(
    Effect.suspend(() => open(options.name, "attach", 0, options.wait, options.lease)),
    "lockstep.Semaphore.attach",
    "semaphore",
    options.name
  )

// -----------------------------------------------------------------------------
// Combinators, as in `effect/Semaphore`
// -----------------------------------------------------------------------------

/**
 * Changes the number of permits for all processes.
 *
 * @category combinators
 * @since 0.1.0
 */
export const resize: {
  (permits: number): (self: Semaphore) => Effect.Effect<void, SemaphoreError>
  (self: Semaphore, permits: number): Effect.Effect<void, SemaphoreError>
} = dual(2, (self: Semaphore, permits: number) => self.resize(permits))

/**
 * Runs an effect while holding so many permits.
 *
 * @category combinators
 * @since 0.1.0
 */
export const withPermits: {
  <A, E, R>(
    self: Semaphore,
    permits: number,
    effect: Effect.Effect<A, E, R>,
    options?: TakeOptions | undefined
  ): Effect.Effect<A, E | SemaphoreError, R>
  (
    self: Semaphore,
    permits: number,
    options?: TakeOptions | undefined
  ): <A, E, R>(effect: Effect.Effect<A, E, R>) => Effect.Effect<A, E | SemaphoreError, R>
} =
  ((self: Semaphore, permits: number, first?: AnyEffect | TakeOptions, options?: TakeOptions) =>
    Effect.isEffect(first) ? self.withPermits(permits, options)(first) : self.withPermits(permits, first)) as never

/**
 * Runs an effect while holding one permit.
 *
 * @category combinators
 * @since 0.1.0
 */
export const withPermit: {
  <A, E, R>(self: Semaphore, effect: Effect.Effect<A, E, R>): Effect.Effect<A, E | SemaphoreError, R>
  (self: Semaphore): <A, E, R>(effect: Effect.Effect<A, E, R>) => Effect.Effect<A, E | SemaphoreError, R>
} = ((self: Semaphore, effect?: AnyEffect) => effect === undefined ? self.withPermit : self.withPermit(effect)) as never

/**
 * As `withPermits` if they are free now; otherwise `None`, and the effect does not run.
 *
 * @category combinators
 * @since 0.1.0
 */
export const withPermitsIfAvailable: {
  <A, E, R>(
    self: Semaphore,
    permits: number,
    effect: Effect.Effect<A, E, R>,
    options?: Omit<TakeOptions, "wait"> | undefined
  ): Effect.Effect<Option.Option<A>, E | SemaphoreError, R>
  (
    self: Semaphore,
    permits: number,
    options?: Omit<TakeOptions, "wait"> | undefined
  ): <A, E, R>(effect: Effect.Effect<A, E, R>) => Effect.Effect<Option.Option<A>, E | SemaphoreError, R>
} =
  ((self: Semaphore, permits: number, first?: AnyEffect | TakeOptions, options?: TakeOptions) =>
    Effect.isEffect(first)
      ? self.withPermitsIfAvailable(permits, options)(first)
      : self.withPermitsIfAvailable(permits, first)) as never

/**
 * Takes permits until `release`, or until the coordinator is closed.
 *
 * @category combinators
 * @since 0.1.0
 */
export const take: {
  (
    permits: number,
    options?: TakeOptions | undefined
  ): (self: Semaphore) => Effect.Effect<Lease, SemaphoreError>
  (self: Semaphore, permits: number, options?: TakeOptions | undefined): Effect.Effect<Lease, SemaphoreError>
} = dual(isDataFirst, (self: Semaphore, permits: number, options?: TakeOptions) => self.take(permits, options))

/**
 * Takes permits for as long as the scope is open.
 *
 * @category combinators
 * @since 0.1.0
 */
export const takeScoped: {
  (
    permits: number,
    options?: TakeOptions | undefined
  ): (self: Semaphore) => Effect.Effect<Lease, SemaphoreError, Scope.Scope>
  (
    self: Semaphore,
    permits: number,
    options?: TakeOptions | undefined
  ): Effect.Effect<Lease, SemaphoreError, Scope.Scope>
} = dual(isDataFirst, (self: Semaphore, permits: number, options?: TakeOptions) => self.takeScoped(permits, options))

/**
 * As `take` if they are free now; otherwise `None`.
 *
 * @category combinators
 * @since 0.1.0
 */
export const takeIfAvailable: {
  (
    permits: number,
    options?: Omit<TakeOptions, "wait"> | undefined
  ): (self: Semaphore) => Effect.Effect<Option.Option<Lease>, SemaphoreError>
  (
    self: Semaphore,
    permits: number,
    options?: Omit<TakeOptions, "wait"> | undefined
  ): Effect.Effect<Option.Option<Lease>, SemaphoreError>
} = dual(
  isDataFirst,
  (self: Semaphore, permits: number, options?: Omit<TakeOptions, "wait">) => self.takeIfAvailable(permits, options)
)

/**
 * Releases the permits that `take` has taken. A second time changes nothing.
 *
 * @category combinators
 * @since 0.1.0
 */
export const release: {
  (lease: Lease): (self: Semaphore) => Effect.Effect<void>
  (self: Semaphore, lease: Lease): Effect.Effect<void>
} = dual(2, (self: Semaphore, lease: Lease) => self.release(lease))

// -----------------------------------------------------------------------------
// Services
// -----------------------------------------------------------------------------

/**
 * The class that `Service` makes.
 *
 * @category models
 * @since 0.1.0
 */
export interface ServiceClass<in out Self, in out Name extends string>
  extends AnyServiceClass<Self, `lockstep/Semaphore/${Name}`, Semaphore, SemaphoreError, Coordinator>
{}

/**
 * A semaphore as a typed service: `class Pool extends Semaphore.Service<Pool>()("pool", { permits: 5 }) {}`, with
 * `Pool.layer`. Without `permits` it attaches.
 *
 * @category constructors
 * @since 0.1.0
 */
export const Service =
  <Self>() =>
  <const Name extends string>(name: Name, options: Options | AttachOptions = {}): ServiceClass<Self, Name> =>
    service<Self, "Semaphore", Name, Semaphore, SemaphoreError, Coordinator | Scope.Scope>(
      "Semaphore",
      name,
      "permits" in options ? make({ ...options, name }) : attach({ ...options, name })
    )
