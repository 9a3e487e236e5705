/**
 * A topic: events that processes publish and subscribe to, kept in a Redis Stream.
 *
 * `subscribe` broadcasts: every subscriber gets every event, from now or from an earlier one. A *group* shares them out: each
 * event goes to one member, until one has acknowledged it.
 *
 * **Guarantees**
 *
 * - An event that `publish` has confirmed reaches every group at least once, and every subscriber that is connected.
 * - A publication is stored once, however often it was resent. With an `id`, it is stored once across processes too.
 * - Events of one key keep the order in which they were published. A group that is ordered by key also handles them in that
 *   order, across retries, deaths of members, and changes of the number of shards.
 * - Events are numbered: those that retention removes before they are read show as a `Gap`.
 * - Events that a group has not acknowledged are redelivered as soon as the session of their member ends.
 * - A process reads each event from Redis once, and decodes it once, however many subscribers its topic has. A slow one delays
 *   no other.
 *
 * **Gotchas**
 *
 * - Delivery to a group is at least once: a handler can have run before its process died. Make it idempotent.
 * - Retention keeps the events that a group has not acknowledged, so a group without members makes the topic grow until the group
 *   is abandoned. Set `protect: false` to drop it instead.
 * - Between keys, and between events without one, a group keeps no order.
 * - A group without members is removed after `abandon`, with its position. When it comes back, it begins at its `from`.
 * - Redis may lose events that it had acknowledged, as in a fail-over. Subscribers that had read some of them see a `Gap` with
 *   the reason `lost`. So do members of a group that was lost. Other subscribers and groups do not.
 *
 * **Example** (Publish, and subscribe)
 *
 * ```ts
 * import { Coordinator, Topic } from "lockstep"
 * import { Effect, Layer, Schema, Stream } from "effect"
 *
 * class Orders extends Topic.Service<Orders>()("orders", {
 *   schema: Schema.Struct({ id: Schema.Number })
 * }) {}
 *
 * const program = Effect.gen(function*() {
 *   const orders = yield* Orders
 *   yield* orders.publish({ id: 1 })
 *   const first = yield* orders.subscribe({ from: "beginning" }).pipe(Topic.values, Stream.take(1), Stream.runCollect)
 *   yield* Effect.log(first)
 * })
 *
 * program.pipe(
 *   Effect.provide(Orders.layer.pipe(Layer.provide(Coordinator.layerEmbedded()))),
 *   Effect.runPromise
 * )
 * ```
 *
 * @since 0.1.0
 */

import * as Arr from "effect/Array"
import * as Channel from "effect/Channel"
import type * as Context from "effect/Context"
import * as Deferred from "effect/Deferred"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Result from "effect/Result"
import * as Schedule from "effect/Schedule"
import type * as Scope from "effect/Scope"
import * as Stream from "effect/Stream"
import { Coordinator } from "./Coordinator.ts"
import { describe } from "./internal/hold/loss.ts"
import { millis, spaceOf } from "./internal/hold/place.ts"
import { service, type ServiceClass as AnyServiceClass } from "./internal/hold/service.ts"
import { logFailure } from "./internal/text.ts"
import type { HandlerOptions, Options, SubscribeOptions, Topic } from "./internal/topic/api.ts"
import { isLasting, type TopicError } from "./internal/topic/errors.ts"
import type { Element, Event } from "./internal/topic/event.ts"
import { measured } from "./internal/topic/state.ts"
import { open, type TopicImpl, type Trail } from "./internal/topic/topic.ts"
import { handled } from "./internal/topic/working.ts"
import { persevering } from "./internal/work/patience.ts"

export type {
  /**
   * An event that a member of a group has to acknowledge.
   *
   * @category models
   * @since 0.1.0
   */
  Delivery,
  /**
   * @category options
   * @since 0.1.0
   */
  GroupOptions,
  /**
   * @category options
   * @since 0.1.0
   */
  HandlerOptions,
  /**
   * @category options
   * @since 0.1.0
   */
  Options,
  /**
   * @category options
   * @since 0.1.0
   */
  PublishOptions,
  /**
   * How long events are kept, in each shard. An event is removed when it exceeds any limit, and no group needs it.
   *
   * @category options
   * @since 0.1.0
   */
  Retention,
  /**
   * @category options
   * @since 0.1.0
   */
  SubscribeOptions,
  /**
   * @category models
   * @since 0.1.0
   */
  Topic
} from "./internal/topic/api.ts"

export type {
  /**
   * @category models
   * @since 0.1.0
   */
  Element,
  /**
   * An event that was published.
   *
   * @category models
   * @since 0.1.0
   */
  Event,
  /**
   * Events are missing.
   *
   * @category models
   * @since 0.1.0
   */
  Gap,
  /**
   * An event that does not fit the schema of its reader.
   *
   * @category models
   * @since 0.1.0
   */
  Undecodable
} from "./internal/topic/event.ts"

export type {
  /**
   * An event that is published in the same step as something else.
   *
   * @category models
   * @since 0.1.0
   */
  Publication
} from "./internal/hold/following.ts"

export type {
  /**
   * @category models
   * @since 0.1.0
   */
  Published
} from "./internal/topic/publishing.ts"

export type {
  /**
   * @category models
   * @since 0.1.0
   */
  Group,
  /**
   * @category models
   * @since 0.1.0
   */
  State
} from "./internal/topic/state.ts"

export {
  /**
   * An event that a group could not handle.
   *
   * @category models
   * @since 0.1.0
   */
  DeadLetter
} from "./internal/topic/letters.ts"

export {
  /**
   * @category errors
   * @since 0.1.0
   */
  OrderMismatch,
  /**
   * @category errors
   * @since 0.1.0
   */
  OtherShard,
  /**
   * @category errors
   * @since 0.1.0
   */
  TooManyGroups,
  /**
   * @category errors
   * @since 0.1.0
   */
  TopicError
} from "./internal/topic/errors.ts"

/**
 * @category type IDs
 * @since 0.1.0
 */
export const TypeId: TypeId = "~lockstep/Topic"

/**
 * @category type IDs
 * @since 0.1.0
 */
export type TypeId = "~lockstep/Topic"

/**
 * Opens the topic, and creates it if need be. It is open for as long as the scope is.
 *
 * @category constructors
 * @since 0.1.0
 */
export const make = <A>(
  options: Options<A> & { readonly name: string }
): Effect.Effect<Topic<A>, TopicError, Coordinator | Scope.Scope> =>
  Effect.flatMap(Coordinator, (coordinator) => open(spaceOf(coordinator), options.name, options))

/**
 * The class that `Service` makes.
 *
 * @category models
 * @since 0.1.0
 */
export interface ServiceClass<in out Self, in out Name extends string, in out A>
  extends AnyServiceClass<Self, `lockstep/Topic/${Name}`, Topic<A>, TopicError, Coordinator>
{}

/**
 * A topic as a typed service: `class Orders extends Topic.Service<Orders>()("orders", { schema }) {}`, with `Orders.layer`.
 *
 * @category constructors
 * @since 0.1.0
 */
export const Service =
  <Self>() => <const Name extends string, A>(name: Name, options: Options<A>): ServiceClass<Self, Name, A> =>
    service<Self, "Topic", Name, Topic<A>, TopicError, Coordinator | Scope.Scope>(
      "Topic",
      name,
      make({ ...options, name })
    )

/**
 * A layer that handles the events of a topic for as long as it is built. With a `group`, these are the events that are delivered
 * to this process as its member; otherwise all of them, as to a subscriber. The layer is built when it has its position, so it
 * misses nothing that is published behind it. It is also built when it could not have one yet. A subscriber's failures are
 * logged, interruptions from inside too. While Redis is away, out of memory, or without the permissions, it tries again and
 * again. A subscriber goes on behind the last event that it has handled. An error of the topic that cannot pass is logged, and
 * ends it.
 *
 * @category layers
 * @since 0.1.0
 */
export const handler = <Self, A, E, R>(
  tag: Context.Key<Self, Topic<A>>,
  handle: (event: Event<A>) => Effect.Effect<unknown, E, R>,
  options: HandlerOptions<E> | (SubscribeOptions & { readonly group?: undefined }) = {}
): Layer.Layer<never, never, Self | R> =>
  Layer.effectDiscard(
    Effect.gen(function*() {
      const topic = (yield* tag) as TopicImpl<A>
      const what = `handler of ${topic.subject}`
      const ready = yield* Deferred.make<void>()
      const begun = Deferred.succeed(ready, undefined)
      const trail: Trail<A> = {}
      const handling = options.group === undefined
        ? Stream.runForEach(events(Stream.unwrap(Effect.tap(topic.following(trail, options), begun))), (event) =>
          // An interruption of this fiber is not caught.
          Effect.catchCause(
            handled(handle, event, topic.name),
            (cause) => logFailure(`a ${what} failed at an event`, cause)
          ))
        : topic.running(handle, options, begun)
      const going = persevering(
        Effect.ensuring(handling as Effect.Effect<void, TopicError, R>, begun),
        (error) => Effect.logWarning(`a ${what} could not go on, and begins again`, error),
        isLasting
      )
      yield* Effect.forkScoped(Effect.tapCause(going, (cause) => logFailure(`a ${what} has ended`, cause)))
      yield* Deferred.await(ready)
    })
  )

/**
 * A layer that writes the topic's state into the gauges of `Metrics`, at once and then in this interval. One process is enough.
 * While Redis is away, the gauges stay as they were.
 *
 * @category layers
 * @since 0.1.0
 */
export const monitor = <Self, A>(
  tag: Context.Key<Self, Topic<A>>,
  { every = "15 seconds" }: {
    /** Default 15 seconds. */
    readonly every?: Duration.Input | undefined
  } = {}
): Layer.Layer<never, never, Self> =>
  Layer.effectDiscard(
    Effect.flatMap(tag, (topic) => {
      const groups = new Set<string>()
      return Effect.flatMap(topic.state, (state) => measured(topic.name, state, groups)).pipe(
        Effect.catch((error) => Effect.logDebug(`${(topic as TopicImpl<A>).subject} could not be measured`, error)),
        Effect.repeat(Schedule.spaced(Duration.millis(millis(every, "every")))),
        Effect.forkScoped
      )
    })
  )

/**
 * The events alone. Gaps and events that do not fit the schema are logged.
 *
 * @category combinators
 * @since 0.1.0
 */
export const events = <A, E, R>(self: Stream.Stream<Element<A>, E, R>): Stream.Stream<Event<A>, E, R> =>
  chosen(self, (chunk) => chunk.events)

/**
 * The values of the events alone. Gaps and events that do not fit the schema are logged. Where there are many events, take them by the
 * chunk, with `Stream.runForEachArray`: an effect for each event is most of what a subscriber costs.
 *
 * @category combinators
 * @since 0.1.0
 */
export const values = <A, E, R>(self: Stream.Stream<Element<A>, E, R>): Stream.Stream<A, E, R> =>
  chosen(self, (chunk) => chunk.values)

const chosen = <A, B, E, R>(
  self: Stream.Stream<Element<A>, E, R>,
  choose: (chunk: Sorted<A>) => ReadonlyArray<B>
): Stream.Stream<B, E, R> =>
  Stream.fromChannel(Channel.filterMapEffect(self.channel, (elements) => {
    const chunk = sorted(elements)
    const wanted = choose(chunk)
    const result = Arr.isReadonlyArrayNonEmpty(wanted) ? Result.succeed(wanted) : Result.failVoid
    return chunk.others.length === 0
      ? Effect.succeed(result)
      : Effect.as(Effect.forEach(chunk.others, logMissing, { discard: true }), result)
  }))

type Other = Exclude<Element<unknown>, Event<unknown>>

interface Sorted<A> {
  readonly events: ReadonlyArray<Event<A>>
  readonly values: ReadonlyArray<A>
  readonly others: ReadonlyArray<Other>
}

// One chunk goes to all subscribers of a process.
const known = new WeakMap<ReadonlyArray<Element<any>>, Sorted<any>>()

const sorted = <A>(elements: ReadonlyArray<Element<A>>): Sorted<A> => {
  const before = known.get(elements)
  if (before !== undefined) return before
  const events = elements.filter((element) => element._tag === "Event")
  const others = elements.filter((element) => element._tag !== "Event")
  const chunk = { events, others, values: events.map(({ value }) => value) }
  known.set(elements, chunk)
  return chunk
}

const logMissing = (other: Other): Effect.Effect<void> => {
  if (other._tag === "Undecodable") return Effect.logWarning(`event ${other.id} is left out: ${other.error.message}`)
  const { missed = "some", namespace, reason, topic } = other
  return Effect.logWarning(`${missed} events of ${describe("topic", topic, namespace)} are missing (${reason})`)
}
