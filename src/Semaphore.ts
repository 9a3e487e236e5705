/**
 * A number of permits that several processes share: first in, first out, weighted, fenced, and resizable while in use.
 *
 * A semaphore exists for as long as somebody has it open. `make` creates it, or joins one that has as many permits;
 * `attach` joins without knowing the number, and waits until somebody creates it.
 *
 * **Guarantees**
 *
 * - Never more permits are taken than there are, also across crashes and reconnects. The permits of a process that died
 *   come back when its lease has run out.
 * - First in, first out, weights included: a big take at the front is not overtaken by small ones behind it.
 * - `withPermits` interrupts its effect when the lease is lost.
 * - After Redis has lost its data, whoever has the semaphore open creates it again with the permits it had.
 *
 * **Gotchas**
 *
 * - After `resize` to fewer permits than are taken, nothing is revoked: who holds goes on, and the next ones wait.
 * - A fiber that holds permits and waits for more of the same semaphore can wait for itself.
 * - When the last process that had it open is gone, the semaphore is gone, and `make` may give it another number.
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
import * as Context from "effect/Context"
import type * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Option from "effect/Option"
import * as Schema from "effect/Schema"
import type * as Scope from "effect/Scope"
import { Coordinator } from "./Coordinator.ts"
import { CoordinatorError, coordinatorError } from "./internal/actor/errors.ts"
import { kernelOf } from "./internal/actor/kernel.ts"
import type { Claim } from "./internal/hold/claim.ts"
import * as held from "./internal/hold/held.ts"
import { LeaseLost, WaitTimeout } from "./internal/hold/loss.ts"
import { withHeld } from "./internal/hold/protect.ts"
import { spanned } from "./internal/hold/span.ts"
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
 * @category models
 * @since 0.1.0
 */
export interface TakeOptions {
  /** How long to wait for the permits. Default: as long as it takes. Afterwards it fails with `WaitTimeout`. */
  readonly wait?: Duration.Input | undefined
  /** How long they may be held. Afterwards the holder is interrupted, and loses them with the reason `maxHold`. */
  readonly maxHold?: Duration.Input | undefined
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
  /** Takes permits until `release`, or until the coordinator is closed. */
  readonly take: (
    permits: number,
    options?: Omit<TakeOptions, "maxHold"> | undefined
  ) => Effect.Effect<Lease, SemaphoreError>
  /** Takes permits for as long as the scope is open. */
  readonly takeScoped: (
    permits: number,
    options?: TakeOptions | undefined
  ) => Effect.Effect<Lease, SemaphoreError, Scope.Scope>
  /** As `take` if they are free now; otherwise `None`. */
  readonly takeIfAvailable: (permits: number) => Effect.Effect<Option.Option<Lease>, SemaphoreError>
  /** Gives back what `take` has taken. A second time changes nothing. */
  readonly release: (lease: Lease) => Effect.Effect<void>
  /** How many permits are free now, for people: it may have changed before it is read. Negative after shrinking. */
  readonly available: Effect.Effect<number, SemaphoreError>
  /** How many permits there are now. */
  readonly permits: Effect.Effect<number, SemaphoreError>
  /** Changes the number of permits, for everybody. If the session is lost meanwhile, it may be done a second time. */
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
  permits: Schema.Number,
  existing: Schema.Number
}) {
  override get message(): string {
    return `It exists with ${this.existing} permits, not ${this.permits}: use the same number, attach to it, or resize it.`
  }
}

/**
 * More permits were asked for than there are by now, so that they could never be had.
 *
 * @category errors
 * @since 0.1.0
 */
export class PermitsExceeded extends Schema.Error<PermitsExceeded>("lockstep/Semaphore/PermitsExceeded")({
  _tag: Schema.tag("PermitsExceeded"),
  name: Schema.String,
  permits: Schema.Number,
  existing: Schema.Number
}) {
  override get message(): string {
    return `${this.permits} permits were asked for, and there are ${this.existing} in all: it has been resized.`
  }
}

/**
 * Nobody has the semaphore open any more: this one's scope was closed, or Redis has lost its data a moment ago.
 *
 * @category errors
 * @since 0.1.0
 */
export class SemaphoreGone extends Schema.Error<SemaphoreGone>("lockstep/Semaphore/SemaphoreGone")({
  _tag: Schema.tag("SemaphoreGone"),
  name: Schema.String
}) {
  override get message(): string {
    return "The semaphore does not exist any more: use it within the scope that made it."
  }
}

/**
 * @category errors
 * @since 0.1.0
 */
export class SemaphoreError extends Schema.Error<SemaphoreError>("lockstep/Semaphore/SemaphoreError")({
  _tag: Schema.tag("SemaphoreError"),
  reason: Schema.Union([LeaseLost, WaitTimeout, PermitsMismatch, PermitsExceeded, SemaphoreGone, CoordinatorError])
}) {
  override get message(): string {
    return this.reason.message
  }
}

const fail = (reason: SemaphoreError["reason"]): SemaphoreError => new SemaphoreError({ reason })

// Weights are doubles in Redis; sums of them stay exact far beyond that.
const mostPermits = 2 ** 31 - 1

const checkPermits = (permits: number, most: number): number => {
  if (!Number.isInteger(permits) || permits < 1 || permits > most) {
    throw new RangeError(`permits must be a whole number from 1 to ${most}`)
  }
  return permits
}

class SemaphoreImpl implements Semaphore {
  readonly "~lockstep/Semaphore" = "~lockstep/Semaphore" as const
  readonly name: string
  readonly place: held.Place
  readonly member: Claim

  constructor(place: held.Place, member: Claim) {
    this.name = place.name
    this.place = place
    this.member = member
  }

  #acquiring(permits: number, wait: boolean, options: TakeOptions | undefined): held.Acquire<SemaphoreError> {
    checkPermits(permits, this.member.capacity)
    return {
      place: this.place,
      weight: permits,
      capacity: 0,
      wait,
      options,
      fail,
      refuse: (refusal) => {
        switch (refusal[0]) {
          case "busy":
            return Effect.succeed(undefined)
          case "tooBig":
            this.#resized(refusal[1])
            return Effect.fail(fail(new PermitsExceeded({ name: this.name, permits, existing: refusal[1] })))
          default:
            return Effect.fail(fail(new SemaphoreGone({ name: this.name })))
        }
      }
    }
  }

  // What is known here bounds what can be asked for; the actor has the last word.
  #resized(permits: number): void {
    this.member.capacity = this.member.total = permits
  }

  readonly withPermits =
    (permits: number, options?: TakeOptions | undefined) =>
    <A, E, R>(self: Effect.Effect<A, E, R>): Effect.Effect<A, E | SemaphoreError, R> =>
      Effect.withFiber((fiber) =>
        spanned(
          fiber,
          withHeld(self, this.#acquiring(permits, true, options)) as Effect.Effect<A, E | SemaphoreError, R>,
          "lockstep.Semaphore.withPermits",
          this.name
        )
      )

  readonly withPermit = <A, E, R>(self: Effect.Effect<A, E, R>): Effect.Effect<A, E | SemaphoreError, R> =>
    this.withPermits(1)(self)

  readonly withPermitsIfAvailable =
    (permits: number, options?: Omit<TakeOptions, "wait"> | undefined) =>
    <A, E, R>(self: Effect.Effect<A, E, R>): Effect.Effect<Option.Option<A>, E | SemaphoreError, R> =>
      Effect.withFiber((fiber) =>
        spanned(
          fiber,
          Effect.map(
            withHeld(Effect.asSome(self), this.#acquiring(permits, false, options)),
            (result) => result ?? Option.none()
          ),
          "lockstep.Semaphore.withPermitsIfAvailable",
          this.name
        )
      )

  readonly take = (
    permits: number,
    options?: Omit<TakeOptions, "maxHold"> | undefined
  ): Effect.Effect<Lease, SemaphoreError> => {
    return Effect.uninterruptibleMask((restore) =>
      held.acquire(this.#acquiring(permits, true, options), restore)
    ) as Effect.Effect<Lease, SemaphoreError>
  }

  readonly takeScoped = (
    permits: number,
    options?: TakeOptions | undefined
  ): Effect.Effect<Lease, SemaphoreError, Scope.Scope> => {
    return Effect.suspend(() => held.acquireScoped(this.#acquiring(permits, true, options))) as Effect.Effect<
      Lease,
      SemaphoreError,
      Scope.Scope
    >
  }

  readonly takeIfAvailable = (permits: number): Effect.Effect<Option.Option<Lease>, SemaphoreError> => {
    return Effect.map(
      Effect.uninterruptibleMask((restore) => held.acquire(this.#acquiring(permits, false, undefined), restore)),
      Option.fromUndefinedOr
    )
  }

  readonly release = (lease: Lease): Effect.Effect<void> => {
    return Effect.suspend(() => {
      if (!(lease instanceof held.Held) || lease.claim.key !== this.place.key) {
        throw new TypeError("This lease was not taken from this semaphore")
      }
      return held.giveBack(lease.claim)
    })
  }

  get #state() {
    return Effect.tryPromise({
      try: () =>
        this.place.partition.kernel.inspect(this.place.partition, {
          verb: "semaphore.state",
          key: this.place.key,
          args: []
        }),
      catch: (cause) => fail(coordinatorError(cause))
    })
  }

  get available(): Effect.Effect<number, SemaphoreError> {
    return Effect.map(this.#state, ([, capacity, taken]) => capacity - taken)
  }

  get permits(): Effect.Effect<number, SemaphoreError> {
    return Effect.map(this.#state, ([, capacity]) => {
      if (capacity > 0) this.#resized(capacity)
      return capacity
    })
  }

  readonly resize = (permits: number): Effect.Effect<void, SemaphoreError> => {
    return Effect.suspend(() => {
      checkPermits(permits, mostPermits)
      return Effect.callback<void, SemaphoreError>((resume) => {
        this.place.partition.request({
          verb: "semaphore.resize",
          key: this.place.key,
          args: [permits],
          settle: (reply) => {
            if (reply[0] === "missing") return resume(Effect.fail(fail(new SemaphoreGone({ name: this.name }))))
            this.#resized(permits)
            resume(Effect.void)
          },
          fail: (error) => resume(Effect.fail(fail(error)))
        })
      })
    })
  }
}

const open = (
  name: string,
  verb: "semaphore.create" | "semaphore.attach",
  permits: number,
  wait: Duration.Input | undefined
): Effect.Effect<Semaphore, SemaphoreError, Coordinator | Scope.Scope> =>
  Effect.flatMap(Coordinator, (coordinator) => {
    const place = held.placeOf(kernelOf(coordinator), "sem", name, "name")
    return Effect.flatMap(
      held.membership(place, verb, permits, wait, fail),
      ([claim, outcome]) =>
        outcome[0] === "granted"
          ? Effect.succeed(new SemaphoreImpl(place, claim))
          : Effect.fail(fail(
            outcome[0] === "mismatch"
              ? new PermitsMismatch({ name, permits, existing: outcome[1] })
              : new SemaphoreGone({ name })
          ))
    )
  })

/**
 * Creates the semaphore, or joins it when it has as many permits; with another number it fails with `PermitsMismatch`.
 * It stays open with the scope.
 *
 * @category constructors
 * @since 0.1.0
 */
export const make = (options: {
  readonly name: string
  /** A whole number from 1 to 2^31 - 1. */
  readonly permits: number
}): Effect.Effect<Semaphore, SemaphoreError, Coordinator | Scope.Scope> =>
  Effect.suspend(() => open(options.name, "semaphore.create", checkPermits(options.permits, mostPermits), undefined))

/**
 * Joins the semaphore without knowing how many permits it has, and waits until somebody has created it: for `timeout`,
 * then it fails with `WaitTimeout`, or for as long as it takes.
 *
 * @category constructors
 * @since 0.1.0
 */
export const attach = (options: {
  readonly name: string
  readonly timeout?: Duration.Input | undefined
}): Effect.Effect<Semaphore, SemaphoreError, Coordinator | Scope.Scope> =>
  Effect.suspend(() => open(options.name, "semaphore.attach", 0, options.timeout))

/**
 * The class that `Service` makes.
 *
 * @category models
 * @since 0.1.0
 */
export interface ServiceClass<in out Self, in out Id extends string> extends Context.ServiceClass<Self, Id, Semaphore> {
  readonly layer: Layer.Layer<Self, SemaphoreError, Coordinator>
}

/**
 * A semaphore as a typed service: `class Pool extends Semaphore.Service<Pool>()("pool", { permits: 5 }) {}`, with
 * `Pool.layer`. Without `permits` it attaches to one that others make.
 *
 * @category constructors
 * @since 0.1.0
 */
export const Service = <Self>() =>
<const Id extends string>(
  name: Id,
  options: { readonly permits: number } | { readonly timeout?: Duration.Input | undefined }
): ServiceClass<Self, Id> => {
  const tag = Context.Service<Self, Semaphore>()(name) as unknown as Context.ServiceClass<Self, Id, Semaphore>
  return Object.assign(tag, {
    layer: Layer.effect(
      tag,
      "permits" in options ? make({ name, permits: options.permits }) : attach({ name, timeout: options.timeout })
    )
  }) as unknown as ServiceClass<Self, Id>
}
