/**
 * A number that several processes add to, and observe by a push.
 *
 * A counter needs neither creation nor a scope: it begins at 0. Redis keeps it until it is 0 again, or for `timeToLive` after
 * the last change. It is exact from -(2^53 - 1) to 2^53 - 1.
 *
 * **Guarantees**
 *
 * - `add`, `get` and `reset` are one request each, and linearizable.
 * - An addition counts once, also when replies are lost and connections break. If its session is lost before the answer, `add`
 *   fails with `WriteUncertain` and is not repeated.
 * - A sum of `batched` counts once, also when the session is lost meanwhile. While Redis is away it waits.
 * - `changes` has the present value first, and then every change in order, by a push. Nothing polls.
 *
 * **Gotchas**
 *
 * - Additions that `batched` has not sent yet are lost with their process: those within its bound at most, and those that wait
 *   for Redis. After a loss of data, the next session sends again only the sum that was under way.
 * - While Redis is away, `add`, `get` and `reset` fail after the coordinator's `requestTimeout`. An `add` that failed with
 *   `Timeout` may be executed all the same.
 * - A subscriber that falls more than 1,024 changes behind misses the oldest. After a loss of the session it goes on with the
 *   present value. `conflate` shows a slow subscriber only the latest.
 * - Subscribers observe that a counter has expired within a third of the coordinator's lease.
 *
 * **Example** (What all processes have done)
 *
 * ```ts
 * import { Coordinator, Counter } from "lockstep"
 * import { Effect } from "effect"
 *
 * class Done extends Counter.Service<Done>()("done") {}
 *
 * const program = Effect.gen(function*() {
 *   const done = yield* Done
 *   yield* Effect.log(`${yield* done.add(1)} done, over all processes`)
 *   yield* done.reset
 * })
 *
 * program.pipe(Effect.provide(Done.layer), Effect.provide(Coordinator.layerEmbedded()), Effect.runPromise)
 * ```
 *
 * @since 0.1.0
 */

import type * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Schema from "effect/Schema"
import type * as Scope from "effect/Scope"
import * as Stream from "effect/Stream"
import { Coordinator } from "./Coordinator.ts"
import { type CoordinatorError, coordinatorReasons } from "./internal/actor/errors.ts"
import { checkName, keyOf } from "./internal/actor/keys.ts"
import { foreign } from "./internal/actor/transport.ts"
import { bounded, waitOf } from "./internal/hold/acquire.ts"
import { followingOf, type Publication, type Publications } from "./internal/hold/following.ts"
import { describe, WaitTimeout } from "./internal/hold/loss.ts"
import { millis, type Place, placeOf, type Space, spaceOf } from "./internal/hold/place.ts"
import { read, request } from "./internal/hold/request.ts"
import { service, type ServiceClass as AnyServiceClass } from "./internal/hold/service.ts"
import { WriteUncertain } from "./internal/hold/unwritten.ts"
import { prefixOf, what } from "./internal/ref/family.ts"
import { Sums } from "./internal/ref/sums.ts"
import { type State, Watch } from "./internal/ref/watch.ts"

/**
 * @category type IDs
 * @since 0.1.0
 */
export const TypeId: TypeId = "~lockstep/Counter"

/**
 * @category type IDs
 * @since 0.1.0
 */
export type TypeId = "~lockstep/Counter"

/**
 * @category options
 * @since 0.1.0
 */
export interface ChangesOptions {
  /** Only the latest value for a subscriber that is slower than the changes. Default `false`: every change. */
  readonly conflate?: boolean | undefined
}

/**
 * @category models
 * @since 0.1.0
 */
export interface Counter {
  readonly [TypeId]: TypeId
  readonly name: string
  /** Adds a whole number, negative ones too, and answers the sum. Fails with `SumExceeded` where that is not exact. */
  readonly add: (by: number) => Effect.Effect<number, CounterError>
  readonly get: Effect.Effect<number, CounterError>
  /** Back to 0. Answers the former value. */
  readonly reset: Effect.Effect<number, CounterError>
  /**
   * `add` and `reset` that publish events in the same step: both happen, or neither. A `reset` of 0 changes nothing, and publishes
   * nothing. Events come from `Topic.publication`. The topic needs the counter's name as its `colocate`.
   */
  readonly publishing: (publish: Publication | ReadonlyArray<Publication>) => Pick<Counter, "add" | "reset">
  /** The present value, and then every change. It ends only with an error. */
  readonly changes: Stream.Stream<number, CounterError>
  readonly changesWith: (options: ChangesOptions) => Stream.Stream<number, CounterError>
  /** Additions that are summed up here, and sent together. The rest is sent when the scope closes; to add later is a defect. */
  readonly batched: (options: BatchOptions) => Effect.Effect<Batched, never, Scope.Scope>
}

/**
 * Additions that cost no request each.
 *
 * @category models
 * @since 0.1.0
 */
export interface Batched {
  /** Adds a whole number to the sum of this process, without a request. */
  readonly add: (by: number) => Effect.Effect<void>
  /** The sum that is not known yet to be added. */
  readonly pending: Effect.Effect<number>
  /**
   * Waits until all that was added so far is in Redis, for as long as the coordinator's `wait` says. Fails with `SumExceeded` if a
   * sum was refused since the last time: that is dropped, and logged.
   */
  readonly flush: Effect.Effect<void, CounterError>
  /** The same with a `wait` of its own. */
  readonly flushFor: (options: WaitOptions) => Effect.Effect<void, CounterError>
}

/**
 * @category options
 * @since 0.1.0
 */
export interface BatchOptions {
  /** How long an addition waits for others before the sum is sent, at most, if Redis has answered the sum before it by then. */
  readonly flush: Duration.Input
}

/**
 * @category options
 * @since 0.1.0
 */
export interface WaitOptions {
  /** How long to wait; then it fails with `WaitTimeout`. Default: that of the coordinator, as long as it takes. */
  readonly wait?: Duration.Input | undefined
}

/**
 * Counters by key. It asks Redis for nothing.
 *
 * @category models
 * @since 0.1.0
 */
export type Family = (key: string) => Counter

/**
 * @category options
 * @since 0.1.0
 */
export interface Options {
  /** How long the value is kept after the last addition. Default: until it is 0. */
  readonly timeToLive?: Duration.Input | undefined
}

export {
  /**
   * The session was lost before Redis had answered: it may be added or reset, and it may not.
   *
   * @category errors
   * @since 0.1.0
   */
  WriteUncertain
} from "./internal/hold/unwritten.ts"

/**
 * The sum would not be exact. Nothing was added.
 *
 * @category errors
 * @since 0.1.0
 */
export class SumExceeded extends Schema.Error<SumExceeded>("lockstep/Counter/SumExceeded")({
  _tag: Schema.tag("SumExceeded"),
  name: Schema.String,
  namespace: Schema.String,
  by: Schema.Number,
  value: Schema.Number
}) {
  override get message(): string {
    return `${
      describe("counter", this.name, this.namespace)
    } is ${this.value}, and ${this.by} more would not be exact: ` +
      `reset it.`
  }
}

/**
 * @category errors
 * @since 0.1.0
 */
export class CounterError extends Schema.Error<CounterError>("lockstep/Counter/CounterError")({
  _tag: Schema.tag("CounterError"),
  reason: Schema.Union([SumExceeded, WaitTimeout, WriteUncertain, ...coordinatorReasons])
}) {
  override get message(): string {
    return this.reason.message
  }
}

const fail = (reason: CounterError["reason"]): CounterError => new CounterError({ reason })

const failed = ({ reason }: CoordinatorError): CounterError => fail(reason)

const mostBehind = 1024

const uncertain = () => ["uncertain"] as const

// As lua/Counter.lua writes it, with the time at which it expires.
const stored = /^(-?\d+) \d+$/

const checkBy = (by: number): number => {
  if (!Number.isSafeInteger(by)) throw new RangeError("by must be a whole number from -(2^53 - 1) to 2^53 - 1")
  // Not -0, which is written as 0.
  return by + 0
}

interface Told extends State {
  readonly value: number
}

class CounterImpl implements Counter {
  readonly [TypeId]: TypeId = TypeId
  readonly name: string
  readonly get: Effect.Effect<number, CounterError>
  readonly changes: Stream.Stream<number, CounterError>
  readonly #place: Place
  readonly #timeToLive: number

  constructor(place: Place, timeToLive: number) {
    this.name = place.name
    this.#place = place
    this.#timeToLive = timeToLive
    this.get = Effect.matchEffect(read(place, keyOf(place.key, "value")), {
      onFailure: (error) => Effect.fail(failed(error)),
      onSuccess: (text) => {
        const sum = text === null ? 0 : Number(stored.exec(text)?.[1])
        return Number.isSafeInteger(sum)
          ? Effect.succeed(sum)
          : Effect.fail(failed(foreign("counter.get", place.key)))
      }
    })
    this.changes = this.changesWith({})
  }

  #about() {
    return { name: this.name, namespace: this.#place.space.kernel.settings.namespace }
  }

  #exceeded(by: number, value: number): CounterError {
    return fail(new SumExceeded({ ...this.#about(), by, value }))
  }

  #uncertain(): CounterError {
    return fail(new WriteUncertain({ kind: "counter", ...this.#about() }))
  }

  readonly add = (by: number): Effect.Effect<number, CounterError> => this.#add(by, undefined)

  #add(by: number, publish: Publications | undefined): Effect.Effect<number, CounterError> {
    return Effect.suspend(() => {
      const args = [checkBy(by), this.#timeToLive, "", 0] as [number, number, string, number]
      const following = followingOf(this.#place, publish, "added")
      return Effect.matchEffect(request(this.#place, "counter.add", args, { moot: uncertain, following }), {
        onFailure: (error) => Effect.fail(failed(error)),
        onSuccess: (reply) =>
          reply[0] === "added"
            ? Effect.succeed(reply[1])
            : Effect.fail(reply[0] === "exceeds" ? this.#exceeded(by, reply[1]) : this.#uncertain())
      })
    })
  }

  get reset(): Effect.Effect<number, CounterError> {
    return this.#reset(undefined)
  }

  #reset(publish: Publications | undefined): Effect.Effect<number, CounterError> {
    return Effect.suspend(() => {
      const following = followingOf(this.#place, publish, "reset")
      return Effect.matchEffect(request(this.#place, "counter.reset", [], { moot: uncertain, following }), {
        onFailure: (error) => Effect.fail(failed(error)),
        onSuccess: (reply) =>
          reply[0] === "uncertain"
            ? Effect.fail(this.#uncertain())
            : Effect.succeed(reply[0] === "reset" ? reply[1] : 0)
      })
    })
  }

  readonly publishing = (publish: Publications): Pick<Counter, "add" | "reset"> => ({
    add: (by) => this.#add(by, publish),
    reset: this.#reset(publish)
  })

  readonly changesWith = ({ conflate = false }: ChangesOptions): Stream.Stream<number, CounterError> =>
    Stream.map(
      Watch.changes<Told, CounterError>(
        () =>
          Watch.of({
            place: this.#place,
            verb: "counter.join",
            parse: ([change, value]) => ({ change: Number(change), value: Number(value) }),
            isSame: (a, b) => a.value === b.value,
            expires: this.#timeToLive > 0
          }),
        conflate ? 1 : mostBehind,
        failed
      ),
      ({ state }) => state.value
    )

  readonly batched = ({ flush }: BatchOptions): Effect.Effect<Batched, never, Scope.Scope> =>
    Effect.suspend(() => {
      const sums = new Sums<CounterError>({
        place: this.#place,
        timeToLive: this.#timeToLive,
        bound: millis(flush, "flush"),
        fail: failed,
        exceeded: (by, value) => this.#exceeded(by, value)
      })
      const flushFor = (options: WaitOptions): Effect.Effect<void, CounterError> =>
        bounded(sums.flush, this.#place, waitOf(this.#place, options), fail)
      const batched: Batched = {
        add: (by) => Effect.sync(() => sums.add(checkBy(by))),
        pending: Effect.sync(() => sums.pending),
        flush: flushFor({}),
        flushFor
      }
      return Effect.acquireRelease(Effect.succeed(batched), () => sums.close)
    })
}

/**
 * The counter of that name. It asks Redis for nothing yet, and there is nothing to close.
 *
 * @category constructors
 * @since 0.1.0
 */
export const make = (options: Options & { readonly name: string }): Effect.Effect<Counter, never, Coordinator> =>
  Effect.map(Coordinator, (coordinator) => of(spaceOf(coordinator), options.name, "name", options))

const of = (space: Space, name: string, what: string, { timeToLive }: Options): Counter =>
  new CounterImpl(
    placeOf(space, "counter", name, what),
    timeToLive === undefined ? 0 : millis(timeToLive, "timeToLive")
  )

/**
 * Counters by key: that of the key `ann` of the family `visits` is the counter named `visits/ann`. A `/` or `%` in the name of the
 * family is escaped. A key costs nothing until it is used.
 *
 * @category constructors
 * @since 0.1.0
 */
export const family = (options: Options & { readonly name: string }): Effect.Effect<Family, never, Coordinator> =>
  Effect.map(Coordinator, (coordinator) => {
    const prefix = prefixOf(options.name)
    const space = spaceOf(coordinator)
    return (key) => of(space, prefix + checkName(key, "key"), what, options)
  })

/**
 * The class that `Service` makes.
 *
 * @category models
 * @since 0.1.0
 */
export interface ServiceClass<in out Self, in out Name extends string>
  extends AnyServiceClass<Self, `lockstep/Counter/${Name}`, Counter, never, Coordinator>
{}

/**
 * A counter as a typed service: `class Done extends Counter.Service<Done>()("done") {}`, with `Done.layer`.
 *
 * @category constructors
 * @since 0.1.0
 */
export const Service =
  <Self>() => <const Name extends string>(name: Name, options?: Options): ServiceClass<Self, Name> =>
    service<Self, "Counter", Name, Counter, never, Coordinator>("Counter", name, make({ ...options, name }))

/**
 * The class that `FamilyService` makes.
 *
 * @category models
 * @since 0.1.0
 */
export interface FamilyServiceClass<in out Self, in out Name extends string>
  extends AnyServiceClass<Self, `lockstep/Counter.Family/${Name}`, Family, never, Coordinator>
{}

/**
 * A family as a typed service: `class Visits extends Counter.FamilyService<Visits>()("visits") {}`, with `Visits.layer`.
 *
 * @category constructors
 * @since 0.1.0
 */
export const FamilyService =
  <Self>() => <const Name extends string>(name: Name, options?: Options): FamilyServiceClass<Self, Name> =>
    service<Self, "Counter.Family", Name, Family, never, Coordinator>(
      "Counter.Family",
      name,
      family({ ...options, name })
    )
