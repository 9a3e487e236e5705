/**
 * A wake-up that several processes share: each time it is set, exactly one waiter passes. It is kept, and counted, while
 * nothing waits. Its broadcast form is `Latch`.
 *
 * It needs no creation and no scope. It is deleted from Redis with its last signal and its last waiter. Signals that nothing
 * waits for are kept for `timeToLive`.
 *
 * **Guarantees**
 *
 * - Waiters pass in the order in which they came, by a push. Nothing polls.
 * - When a waiter is interrupted, times out or dies before it passes, its signal goes to the next waiter, or is kept. A
 *   waiter that has passed has consumed it.
 * - `set` counts once, also when connections break. If its session is lost before the answer, it fails with
 *   `SetUncertain` and is not repeated.
 *
 * **Gotchas**
 *
 * - Delivery is at least once while Redis keeps its data. A waiter passes, and consumes its signal a moment later. If its
 *   process dies or its session is lost in that moment, the next waiter receives the signal too. Treat a signal as a hint to
 *   look.
 * - While Redis is away, `set` and the questions fail after the coordinator's `requestTimeout`. A `set` that failed with
 *   `Timeout` may be executed all the same.
 * - The signal of a waiter whose process dies is taken until the lease of that process has run out. A waiter whose session
 *   is lost waits again at the end of the queue.
 * - **Signals outlive the program**, by their time to live: `clear` removes the signals of a previous run.
 * - Signals that are set are lost when Redis loses its data; waiters wait on.
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

import type * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Schema from "effect/Schema"
import { Coordinator } from "./Coordinator.ts"
import { type CoordinatorError, coordinatorReasons } from "./internal/actor/errors.ts"
import { ask, conclude, type Failure } from "./internal/hold/acquire.ts"
import { describe, WaitTimeout } from "./internal/hold/loss.ts"
import { millis, type Place, placeOf, spaceOf } from "./internal/hold/place.ts"
import { question, request } from "./internal/hold/request.ts"
import { service, type ServiceClass as AnyServiceClass } from "./internal/hold/service.ts"
import { spanning } from "./internal/hold/span.ts"

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
 * @category options
 * @since 0.1.0
 */
export interface WaitOptions {
  /** How long to wait; then it fails with `WaitTimeout`. Default: that of the coordinator, as long as it takes. */
  readonly wait?: Duration.Input | undefined
}

/**
 * @category models
 * @since 0.1.0
 */
export interface Signal {
  readonly [TypeId]: TypeId
  readonly name: string
  /** Wakes one waiter: the one that has waited longest, or the next to come. */
  readonly set: Effect.Effect<void, SignalError>
  /** Sets it so many times at once: a whole number from 1 to 2^31 - 1. */
  readonly setMany: (count: number) => Effect.Effect<void, SignalError>
  /** Waits for a signal, for as long as the coordinator's `wait` says, and consumes it. */
  readonly await: Effect.Effect<void, SignalError>
  /** As `await`, with a `wait` of its own. */
  readonly waitFor: (options: WaitOptions) => Effect.Effect<void, SignalError>
  /** Forgets the signals that no waiter has taken, and answers how many. */
  readonly clear: Effect.Effect<number, SignalError>
  /** How many signals are set that no waiter has taken. */
  readonly pending: Effect.Effect<number, SignalError>
  /** Whether an `await` would pass now. */
  readonly isSet: Effect.Effect<boolean, SignalError>
  /** How many waiters are in the queue. */
  readonly queued: Effect.Effect<number, SignalError>
}

/**
 * @category options
 * @since 0.1.0
 */
export interface Options {
  /**
   * How long signals are kept that nothing waits for, since the last one was set or taken. Default 1 day, so that nothing stays for ever. The
   * last `set` decides.
   */
  readonly timeToLive?: Duration.Input | undefined
  /**
   * How long a signal stays with a waiter whose process died. Default: the coordinator's lease. Another one is a second
   * session, which is renewed by itself.
   */
  readonly lease?: Duration.Input | undefined
}

/**
 * The session was lost before Redis had answered: it may be set, and it may not.
 *
 * @category errors
 * @since 0.1.0
 */
export class SetUncertain extends Schema.Error<SetUncertain>("lockstep/Signal/SetUncertain")({
  _tag: Schema.tag("SetUncertain"),
  name: Schema.String,
  namespace: Schema.String
}) {
  override get message(): string {
    const subject = describe("signal", this.name, this.namespace)
    return `The session was lost before Redis had answered, so ${subject} may or may not be set: ` +
      `set it again if one wake-up too many does no harm.`
  }
}

/**
 * @category errors
 * @since 0.1.0
 */
export class SignalError extends Schema.Error<SignalError>("lockstep/Signal/SignalError")({
  _tag: Schema.tag("SignalError"),
  reason: Schema.Union([SetUncertain, WaitTimeout, ...coordinatorReasons])
}) {
  override get message(): string {
    return this.reason.message
  }
}

const fail = (reason: SignalError["reason"]): SignalError => new SignalError({ reason })

const failed = ({ reason }: CoordinatorError): SignalError => fail(reason)

// A signal is over when it is granted, so no lease of it can be lost.
const failedWait = (reason: Failure): SignalError => fail(reason as SignalError["reason"])

const ignore = () => {}

const mostAtOnce = 2 ** 31 - 1

class SignalImpl implements Signal {
  readonly [TypeId]: TypeId = TypeId
  readonly name: string
  readonly #place: Place
  readonly #timeToLive: number

  constructor(place: Place, timeToLive: Duration.Input) {
    this.name = place.name
    this.#place = place
    this.#timeToLive = millis(timeToLive, "timeToLive")
  }

  readonly setMany = (count: number): Effect.Effect<void, SignalError> =>
    Effect.suspend(() => {
      if (!Number.isInteger(count) || count < 1 || count > mostAtOnce) {
        throw new RangeError(`count must be a whole number from 1 to ${mostAtOnce}`)
      }
      // A second time would wake one waiter too many, so no other session repeats it.
      const moot = () => ["uncertain"] as const
      const { name, space: { kernel: { settings: { namespace } } } } = this.#place
      return Effect.matchEffect(request(this.#place, "signal.set", [count, this.#timeToLive], { moot }), {
        onFailure: (error) => Effect.fail(failed(error)),
        onSuccess: ([tag]) => tag === "set" ? Effect.void : Effect.fail(fail(new SetUncertain({ name, namespace })))
      })
    })

  get set(): Effect.Effect<void, SignalError> {
    return this.setMany(1)
  }

  get await(): Effect.Effect<void, SignalError> {
    return this.waitFor({})
  }

  readonly waitFor = ({ wait }: WaitOptions): Effect.Effect<void, SignalError> => {
    const place = this.#place
    const waiting = ask({ place, verb: "signal.await", args: () => [], wait, fail: failedWait }, (_, hold) => {
      // The waiter passes at once, and its signal is consumed asynchronously: one round trip less.
      conclude(place, hold, {
        verb: "signal.consume",
        args: [hold.id],
        settle: ignore,
        moot: ignore,
        fail: (reason) => {
          const { hooks, settings } = place.space.kernel
          const what = describe(place.kind, place.name, settings.namespace)
          hooks.log("Warn", `${what} could not be consumed, and goes to the next waiter as well`, reason)
        }
      })
      return Effect.void
    })
    return spanning(waiting, "lockstep.Signal.await", "signal", this.name)
  }

  get clear(): Effect.Effect<number, SignalError> {
    return Effect.mapError(Effect.map(request(this.#place, "signal.clear", []), ([, count]) => count), failed)
  }

  get #state() {
    return Effect.mapError(question(this.#place, "signal.state", []), failed)
  }

  get pending(): Effect.Effect<number, SignalError> {
    return Effect.map(this.#state, ([, pending]) => pending)
  }

  get isSet(): Effect.Effect<boolean, SignalError> {
    return Effect.map(this.#state, ([, pending]) => pending > 0)
  }

  get queued(): Effect.Effect<number, SignalError> {
    return Effect.map(this.#state, ([, , queued]) => queued)
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
    const { lease, name, timeToLive = "1 day" } = options
    return new SignalImpl(placeOf(spaceOf(coordinator), "signal", name, "name", lease), timeToLive)
  })

/**
 * The class that `Service` makes.
 *
 * @category models
 * @since 0.1.0
 */
export interface ServiceClass<in out Self, in out Name extends string>
  extends AnyServiceClass<Self, `lockstep/Signal/${Name}`, Signal, never, Coordinator>
{}

/**
 * A signal as a typed service: `class Jobs extends Signal.Service<Jobs>()("jobs") {}`, with `Jobs.layer`.
 *
 * @category constructors
 * @since 0.1.0
 */
export const Service =
  <Self>() => <const Name extends string>(name: Name, options?: Options): ServiceClass<Self, Name> =>
    service<Self, "Signal", Name, Signal, never, Coordinator>("Signal", name, make({ ...options, name }))
