/**
 * A wake-up that several processes share: each time it is set, exactly one waiter passes. It is kept, and counted, while
 * nobody waits. Its broadcast form is `Gate`.
 *
 * It needs no creation and no scope. It is gone from Redis with its last signal and its last waiter; signals that nobody
 * waits for are kept for `keep`.
 *
 * **Guarantees**
 *
 * - Waiters pass in the order in which they came, by a push. Nothing polls.
 * - The signal of a waiter that is interrupted, times out (`Effect.timeout`) or dies before it passes goes to the next
 *   waiter, or is kept. One that has passed has consumed it.
 * - `set` counts once, also when connections break. If its session is lost before the answer, it fails with
 *   `SetUncertain` and is not repeated.
 *
 * **Gotchas**
 *
 * - No wake-up is lost as long as Redis keeps its data, and once in a while one too many is made: a waiter passes and Redis
 *   is told a moment later; if its process is killed, or its session lost, in that moment, the next one passes as well.
 *   Treat a signal as a hint to look.
 * - A waiter whose process dies has its signal until its lease has run out, and whose session is lost waits at the end of
 *   the line again.
 * - Signals that are set are gone when Redis loses its data; waiters wait on.
 *
 * **Example** (One worker wakes up for each job)
 *
 * ```ts
 * import { Coordinator, Signal } from "lockstep"
 * import { Effect, Fiber } from "effect"
 *
 * const program = Effect.gen(function*() {
 *   const jobs = yield* Signal.make({ name: "jobs" })
 *   const worker = yield* Effect.forkChild(Effect.andThen(jobs.await, Effect.log("looking for a job")))
 *   yield* jobs.set
 *   yield* Fiber.join(worker)
 * })
 *
 * program.pipe(Effect.provide(Coordinator.layerEmbedded()), Effect.runPromise)
 * ```
 *
 * @since 0.1.0
 */
import * as Context from "effect/Context"
import type * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Schema from "effect/Schema"
import { Coordinator } from "./Coordinator.ts"
import { CoordinatorError, coordinatorError } from "./internal/actor/errors.ts"
import { kernelOf } from "./internal/actor/kernel.ts"
import { consume, millis, type Place, placeOf } from "./internal/hold/held.ts"

/**
 * @category type IDs
 * @since 0.1.0
 */
export const TypeId: TypeId = "~lockstep/Signal"

/**
 * @category type IDs
 * @since 0.1.0
 */
export type TypeId = "~lockstep/Signal"

/**
 * @category models
 * @since 0.1.0
 */
export interface Signal {
  readonly [TypeId]: TypeId
  readonly name: string
  /** Wakes one waiter: who has waited longest, or the next to come. */
  readonly set: Effect.Effect<void, SignalError>
  /** Sets it so many times at once: a whole number from 1 to 2^31 - 1. */
  readonly setMany: (count: number) => Effect.Effect<void, SignalError>
  /** Waits for a signal, and consumes it. */
  readonly await: Effect.Effect<void, SignalError>
  /** Forgets the signals that nobody has taken, and answers how many. */
  readonly clear: Effect.Effect<number, SignalError>
  /** How many signals are set that nobody has taken. */
  readonly count: Effect.Effect<number, SignalError>
  /** Whether an `await` would pass now. */
  readonly isSet: Effect.Effect<boolean, SignalError>
  /** How many wait. */
  readonly waiting: Effect.Effect<number, SignalError>
}

/**
 * @category options
 * @since 0.1.0
 */
export interface Options {
  /** How long signals are kept that nobody waits for. Default 1 day, so that nothing stays for ever. The last `set` decides. */
  readonly keep?: Duration.Input | undefined
}

/**
 * The session was lost before Redis had answered: it may be set, and it may not.
 *
 * @category errors
 * @since 0.1.0
 */
export class SetUncertain extends Schema.Error<SetUncertain>("lockstep/Signal/SetUncertain")({
  _tag: Schema.tag("SetUncertain"),
  name: Schema.String
}) {
  override get message(): string {
    return "The session was lost on the way, so it may or may not be set: set it again if a wake-up too many does no harm."
  }
}

/**
 * @category errors
 * @since 0.1.0
 */
export class SignalError extends Schema.Error<SignalError>("lockstep/Signal/SignalError")({
  _tag: Schema.tag("SignalError"),
  reason: Schema.Union([SetUncertain, CoordinatorError])
}) {
  override get message(): string {
    return this.reason.message
  }
}

const fail = (reason: SignalError["reason"]): SignalError => new SignalError({ reason })

const mostAtOnce = 2 ** 31 - 1

class SignalImpl implements Signal {
  readonly [TypeId]: TypeId = TypeId
  readonly name: string
  readonly #place: Place
  readonly #keep: number

  constructor(place: Place, keep: Duration.Input) {
    this.name = place.name
    this.#place = place
    this.#keep = millis(keep, "keep")
  }

  readonly setMany = (count: number): Effect.Effect<void, SignalError> =>
    Effect.callback((resume) => {
      if (!Number.isInteger(count) || count < 1 || count > mostAtOnce) {
        throw new RangeError(`count must be a whole number from 1 to ${mostAtOnce}`)
      }
      this.#place.partition.request({
        verb: "signal.set",
        key: this.#place.key,
        args: [count, this.#keep],
        moot: () => resume(Effect.fail(fail(new SetUncertain({ name: this.name })))),
        settle: () => resume(Effect.void),
        fail: (error) => resume(Effect.fail(fail(error)))
      })
    })

  get set(): Effect.Effect<void, SignalError> {
    return this.setMany(1)
  }

  get await(): Effect.Effect<void, SignalError> {
    return consume(this.#place, "signal.await", "signal.consume", fail)
  }

  get clear(): Effect.Effect<number, SignalError> {
    return Effect.callback((resume) =>
      this.#place.partition.request({
        verb: "signal.clear",
        key: this.#place.key,
        args: [],
        settle: ([, count]) => resume(Effect.succeed(count)),
        fail: (error) => resume(Effect.fail(fail(error)))
      })
    )
  }

  get #state() {
    const { key, partition } = this.#place
    return Effect.tryPromise({
      try: () => partition.kernel.inspect(partition, { verb: "signal.state", key, args: [] }),
      catch: (cause) => fail(coordinatorError(cause))
    })
  }

  get count(): Effect.Effect<number, SignalError> {
    return Effect.map(this.#state, ([, count]) => count)
  }

  get isSet(): Effect.Effect<boolean, SignalError> {
    return Effect.map(this.#state, ([, count]) => count > 0)
  }

  get waiting(): Effect.Effect<number, SignalError> {
    return Effect.map(this.#state, ([, , waiting]) => waiting)
  }
}

/**
 * The signal of that name. It asks Redis for nothing yet, and there is nothing to close.
 *
 * @category constructors
 * @since 0.1.0
 */
export const make = (options: Options & { readonly name: string }): Effect.Effect<Signal, never, Coordinator> =>
  Effect.map(Coordinator, (coordinator) => {
    const { keep = "1 day", name } = options
    return new SignalImpl(placeOf(kernelOf(coordinator), "signal", name, "name"), keep)
  })

/**
 * The class that `Service` makes.
 *
 * @category models
 * @since 0.1.0
 */
export interface ServiceClass<in out Self, in out Id extends string> extends Context.ServiceClass<Self, Id, Signal> {
  readonly layer: Layer.Layer<Self, never, Coordinator>
}

/**
 * A signal as a typed service: `class Jobs extends Signal.Service<Jobs>()("jobs") {}`, with `Jobs.layer`.
 *
 * @category constructors
 * @since 0.1.0
 */
export const Service = <Self>() => <const Id extends string>(name: Id, options?: Options): ServiceClass<Self, Id> => {
  const tag = Context.Service<Self, Signal>()(name) as unknown as Context.ServiceClass<Self, Id, Signal>
  return Object.assign(tag, { layer: Layer.effect(tag, make({ ...options, name })) }) as unknown as ServiceClass<
    Self,
    Id
  >
}
