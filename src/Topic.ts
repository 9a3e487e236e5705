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
 * - Events of one key keep the order in which they were published. In a group that is ordered by key, so does their handling,
 *   also across retries, the death of members, and changes of the number of shards.
 * - Events are numbered: those that retention removes before they are read show as a `Gap`.
 * - Events that a group has not acknowledged are redelivered as soon as the session of their member ends.
 * - A process reads each event from Redis once, and decodes it once, however many subscribers its topic has. A slow one delays
 *   no other.
 *
 * **Gotchas**
 *
 * - Delivery to a group is at least once: a handler can have run before its process died. Make it idempotent.
 * - Retention keeps what a group has not acknowledged, so a group without members makes the topic grow until the group is
 *   abandoned. Set `protect: false` to drop it instead.
 * - Between keys, and between events without one, a group keeps no order.
 * - A group without members is removed after `abandon`, with its position. When it comes back, it begins at its `from`.
 * - Redis may lose events that it had acknowledged, as in a fail-over. Subscribers that had read some of them see a `Gap` with the
 *   reason `lost`, and so do members of a group that was lost; other subscribers and groups do not.
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

import * as Cause from "effect/Cause"
import type * as Context from "effect/Context"
import * as Deferred from "effect/Deferred"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Layer from "effect/Layer"
import * as Option from "effect/Option"
import * as Queue from "effect/Queue"
import * as Result from "effect/Result"
import * as Schedule from "effect/Schedule"
import * as Scope from "effect/Scope"
import * as Stream from "effect/Stream"
import { Coordinator } from "./Coordinator.ts"
import { CoordinatorClosed, type CoordinatorError } from "./internal/actor/errors.ts"
import { checkName } from "./internal/actor/keys.ts"
import type { Publication } from "./internal/hold/following.ts"
import { Hold } from "./internal/hold/hold.ts"
import { describe } from "./internal/hold/loss.ts"
import type { InvalidPayload } from "./internal/hold/payload.ts"
import { millis, type Space, spaceOf, whole } from "./internal/hold/place.ts"
import { question, request } from "./internal/hold/request.ts"
import { service, type ServiceClass as AnyServiceClass } from "./internal/hold/service.ts"
import { sending } from "./internal/hold/span.ts"
import type { Tenancy } from "./internal/hold/tenancy.ts"
import type {
  Delivery,
  GroupOptions,
  HandlerOptions,
  Options,
  PublishOptions,
  SubscribeOptions,
  Topic
} from "./internal/topic/api.ts"
import { deliveryOf } from "./internal/topic/delivery.ts"
import { fail, isLasting, OtherShard, type TopicError } from "./internal/topic/errors.ts"
import {
  beginning,
  DeliveredEvent,
  DeliveredUndecodable,
  type Element,
  type Event,
  type Raw
} from "./internal/topic/event.ts"
import { type Delivery as GroupDelivery, joinGroup } from "./internal/topic/group.ts"
import { burying, DeadLetter, lettersOf } from "./internal/topic/letters.ts"
import { nameOf, Parts } from "./internal/topic/parts.ts"
import { positionsBehind, positionsOf } from "./internal/topic/positions.ts"
import { type Message, type Published, Publisher } from "./internal/topic/publishing.ts"
import { limitsOf } from "./internal/topic/retention.ts"
import { measured, type State, stateOf } from "./internal/topic/state.ts"
import { Subscription } from "./internal/topic/subscription.ts"
import { handle, handled } from "./internal/topic/working.ts"
import { codec } from "./internal/work/codec.ts"
import { persevering } from "./internal/work/patience.ts"
import type { Lease } from "./Lease.ts"

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

/** Subscriptions of which each goes on where the one before it has failed, when what that has brought was handled. */
interface Trail<A> {
  former?: Subscription<A>
}

class TopicImpl<in out A> implements Topic<A> {
  readonly "~lockstep/Topic" = "~lockstep/Topic" as const
  readonly name: string
  readonly #space: Space
  readonly #options: Options<A>
  readonly #parts: Parts<A>
  readonly #encode: (value: A) => Exit.Exit<string, TopicError>
  readonly #publisher: Publisher

  constructor(space: Space, name: string, options: Options<A>) {
    const { colocate, lease, schema, shards } = options
    if (shards !== undefined) whole(shards, "shards", space.kernel.settings.partitions)
    const owner = { kind: "topic", name: checkName(name, "name"), namespace: space.kernel.settings.namespace }
    const { decode, encode } = codec(schema, `An event of topic ${JSON.stringify(name)}`, owner)
    const first = space.kernel.partitionFor(checkName(colocate ?? name, "colocate")).index
    this.name = name
    this.#space = space
    this.#options = options
    this.#encode = (value) => Exit.mapError(encode(value), fail)
    this.#parts = new Parts({ space, name, first, lease }, (shard) => (raw: Raw): Element<A> => {
      const decoded = decode(raw.body)
      const id = nameOf(shard, raw.id)
      return Exit.isSuccess(decoded)
        ? new DeliveredEvent(raw, id, decoded.value)
        : new DeliveredUndecodable(raw, id, Cause.squash(decoded.cause) as InvalidPayload)
    })
    this.#publisher = new Publisher(this.#parts, space.kernel)
  }

  get subject(): string {
    return describe("topic", this.name, this.#space.kernel.settings.namespace)
  }

  get shards(): number {
    return this.#parts.shards
  }

  readonly join: Effect.Effect<void, TopicError, Scope.Scope> = Effect.suspend(() => {
    const { dedupe, retention, shards } = this.#options
    const decides = retention !== undefined || dedupe !== undefined
    return Effect.map(this.#parts.open(limitsOf(this.#options), decides, shards), () => {
      this.#parts.followers.add(this.#publisher.changed)
      this.#publisher.changed()
    })
  })

  // -------------------------------------------------------------------------------------------------------------------
  // Publish
  // -------------------------------------------------------------------------------------------------------------------

  #message(value: A, options: PublishOptions | undefined, trace: string): Exit.Exit<Message, TopicError> {
    const key = options?.key ?? this.#options.key?.(value)
    const id = options?.id
    return Exit.map(this.#encode(value), (body) => ({
      body,
      key: key === undefined ? "" : checkName(key, "key"),
      id: id === undefined ? "" : checkName(id, "id"),
      trace
    }))
  }

  /** Of an event that follows something. */
  #follower(event: A, options: PublishOptions | undefined, trace: string): Effect.Effect<Message, TopicError> {
    return Effect.flatMap(this.#message(event, options, trace), (message) => {
      const key = this.#publisher.apart(message)
      const { namespace } = this.#space.kernel.settings
      return key === undefined
        ? Effect.succeed(message)
        : Effect.fail(fail(new OtherShard({ name: this.name, namespace, key })))
    })
  }

  readonly publish = (event: A, options?: PublishOptions): Effect.Effect<Published, TopicError> =>
    this.#spanned(
      "publish",
      (trace) =>
        Effect.flatMap(this.#message(event, options, trace), (message) => failing(this.#publisher.publish(message)))
    )

  readonly publishAll = (
    events: Iterable<A>,
    options?: (event: A) => PublishOptions
  ): Effect.Effect<ReadonlyArray<Published>, TopicError> =>
    this.#spanned<ReadonlyArray<Published>>("publishAll", (trace) => {
      const messages: Array<Message> = []
      for (const event of events) {
        const message = this.#message(event, options?.(event), trace)
        if (Exit.isFailure(message)) return Effect.failCause(message.cause)
        messages.push(message.value)
      }
      return failing(this.#publisher.publishAll(messages))
    })

  readonly publication = (event: A, options?: PublishOptions): Effect.Effect<Publication, TopicError> =>
    this.#spanned("publication", (trace) =>
      Effect.map(this.#follower(event, options, trace), (message) => ({
        "~lockstep/Publication": (leader, after) =>
          this.#publisher.following(leader, message, after, () => {}, (error) =>
            this.#space.kernel.hooks.log(
              "Error",
              `an event of ${this.subject} could not be published`,
              error
            ))
      })))

  readonly publishOnRelease = (
    lease: Lease,
    event: A,
    options?: PublishOptions
  ): Effect.Effect<Effect.Effect<Option.Option<Published>, TopicError>, TopicError> =>
    this.#spanned("publishOnRelease", (trace) =>
      Effect.map(this.#follower(event, options, trace), (message) => {
        if (!(lease instanceof Hold)) throw new TypeError("This lease was not made by Lockstep")
        if (!lease.active) return Effect.succeedNone
        const outcome = Deferred.makeUnsafe<Option.Option<Published>, TopicError>()
        const { claim, keeper } = lease
        const follower = this.#publisher.following(
          { channel: (keeper as Tenancy).channel, kind: claim.place.kind, name: claim.place.name },
          message,
          claim.leave === undefined ? "left" : "released",
          (published) => Deferred.doneUnsafe(outcome, Effect.succeed(Option.fromUndefinedOr(published))),
          ({ reason }) => {
            // The tenancy sends a release that Redis has refused again: without this event, which its publisher was told has failed.
            const at = following.indexOf(follower)
            if (at >= 0) following.splice(at, 1)
            Deferred.doneUnsafe(outcome, Effect.fail(fail(reason)))
          }
        )
        const following = lease.following ??= []
        following.push(follower)
        lease.onLoss(() => {
          // Its release has been sent, or is not sent with what follows it.
          lease.following = undefined
          if (lease.releasing === undefined) Deferred.doneUnsafe(outcome, Effect.succeed(Option.none()))
        })
        return Deferred.await(outcome)
      }))

  #spanned<B>(verb: string, use: (trace: string) => Effect.Effect<B, TopicError>): Effect.Effect<B, TopicError> {
    return sending(use, `lockstep.Topic.${verb}`, "topic", this.name)
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Subscribe
  // -------------------------------------------------------------------------------------------------------------------

  readonly subscribe = (options?: SubscribeOptions): Stream.Stream<Element<A>, TopicError> =>
    Stream.unwrap(this.subscribed(options))

  readonly subscribed = (
    options?: SubscribeOptions
  ): Effect.Effect<Stream.Stream<Element<A>, TopicError>, TopicError, Scope.Scope> => this.following({}, options)

  /** As `subscribed`, but behind all that the former subscription of a trail has brought. This one is the next of the trail. */
  readonly following = (
    trail: Trail<A>,
    { buffer: { capacity = 1024, strategy = "suspend" } = {}, from = "now" }: SubscribeOptions = {}
  ): Effect.Effect<Stream.Stream<Element<A>, TopicError>, TopicError, Scope.Scope> =>
    Effect.suspend(() => {
      whole(capacity, "buffer.capacity", 2 ** 24)
      const parts = this.#parts
      // Events of another epoch may come before the ends of the shards are known.
      const epoch = trail.former?.epoch ?? (from === "now" ? parts.epoch : 0)
      const subscription = new Subscription<A>(this.name, { capacity, strategy }, epoch, () => parts.follow())
      const positions = trail.former === undefined
        ? failing(positionsOf(parts, from))
        : Effect.succeed(trail.former.cursors)
      return Effect.flatMap(positions, (cursors) => {
        const changed = () => {
          // All of a shard that was added is new.
          for (const shard of parts.all.slice(subscription.width)) {
            subscription.add(shard, cursors[subscription.width] ?? beginning)
          }
          subscription.complete(parts.epoch)
        }
        return Effect.as(
          Effect.acquireRelease(
            Effect.sync(() => {
              parts.followers.add(changed)
              changed()
              trail.former = subscription
            }),
            () =>
              Effect.sync(() => {
                parts.followers.delete(changed)
                subscription.close()
              })
          ),
          Stream.fromPull(Effect.sync(() => {
            if (subscription.isRead) throw new TypeError("This stream can be run once: subscribe again for another run")
            subscription.isRead = true
            return failing(subscription.take)
          }))
        )
      })
    })

  // -------------------------------------------------------------------------------------------------------------------
  // Groups
  // -------------------------------------------------------------------------------------------------------------------

  #deliveries(
    { from = "now", group, orderBy, prefetch = 16 }: GroupOptions
  ): Effect.Effect<Queue.Dequeue<GroupDelivery<A>, TopicError>, TopicError, Scope.Scope> {
    checkName(group, "group")
    whole(prefetch, "prefetch", 1024)
    const after = typeof from === "object" ? positionsBehind(this.#parts.all.length, from.after) : undefined
    const { namespace } = this.#space.kernel.settings
    return Effect.gen({ self: this }, function*() {
      const queue = yield* Queue.unbounded<GroupDelivery<A>, TopicError>()
      yield* joinGroup(
        this.#parts,
        {
          group,
          from: (shard) => from === "now" ? "" : after?.[shard]?.id ?? "0",
          ordered: orderBy === "key",
          credit: prefetch
        },
        (deliveries) => {
          Queue.offerAllUnsafe(queue, deliveries)
          // Handlers begin now, rather than in the next turn of the event loop, behind the next read.
          queue.dispatcher.flush()
        },
        {
          closed: () => void Queue.failCauseUnsafe(queue, Cause.fail(fail(new CoordinatorClosed({ namespace })))),
          failed: (error) => void Queue.failCauseUnsafe(queue, Cause.fail(error))
        }
      )
      return queue
    })
  }

  readonly consume = (options: GroupOptions): Stream.Stream<Delivery<A>, TopicError> =>
    Stream.unwrap(Effect.map(this.#deliveries(options), (queue) => Stream.map(Stream.fromQueue(queue), deliveryOf)))

  readonly run = <E, R>(
    handler: (event: Event<A>) => Effect.Effect<unknown, E, R>,
    options: HandlerOptions<E>
  ): Effect.Effect<never, TopicError, R> => this.running(handler, options, Effect.void)

  /** As `run`; says when it is a member. */
  readonly running = <E, R>(
    handler: (event: Event<A>) => Effect.Effect<unknown, E, R>,
    options: HandlerOptions<E>,
    joined: Effect.Effect<unknown>
  ): Effect.Effect<never, TopicError, R> => {
    const { concurrency = 1, crashes = 3, deadLetter, group, onGap, retry = patience } = options
    whole(concurrency, "concurrency", 1024)
    whole(crashes, "crashes", 1000)
    const prefetch = options.prefetch ?? Math.min(2 * concurrency, 1024)
    if (deadLetter === undefined) checkName(lettersOf(this.name, group), "name and group")
    const { log, metrics: { buried } } = this.#space.kernel.hooks
    return Effect.scoped(Effect.gen({ self: this }, function*() {
      const scope = yield* Effect.scope
      const opening = Scope.provide(this.deadLetters(group), scope)
      const bury = burying({ name: this.name, subject: this.subject, group, log }, deadLetter, opening)
      const queue = yield* this.#deliveries({ ...options, prefetch })
      yield* joined
      const worker = Effect.forever(Effect.flatMap(Queue.take(queue), (delivery) =>
        handle(delivery, handler, {
          name: this.name,
          subject: this.subject,
          retry,
          crashes,
          log,
          buried,
          onGap: onGap ?? (({ missed, reason }) =>
            Effect.sync(() =>
              log(
                "Warn",
                `group ${JSON.stringify(group)} of ${this.subject} misses ${missed ?? "some"} events (${reason})`
              )
            )),
          bury
        })))
      return yield* Effect.forEach(
        Array.from({ length: concurrency }),
        () => worker,
        { concurrency: "unbounded" }
      ) as unknown as Effect.Effect<never, TopicError, R>
    })) as Effect.Effect<never, TopicError, R>
  }

  readonly deadLetters = (group: string): Effect.Effect<Topic<DeadLetter>, TopicError, Scope.Scope> =>
    Effect.suspend(() =>
      open(this.#space, lettersOf(this.name, checkName(group, "group")), {
        schema: DeadLetter,
        retention: { age: "7 days", length: 10_000 },
        lease: this.#options.lease
      })
    )

  readonly forget = (group: string): Effect.Effect<boolean, TopicError> =>
    Effect.map(
      Effect.forEach(this.#parts.all, ({ place }) =>
        failing(request(place, "topic.forget", [checkName(group, "group")]))),
      (replies) =>
        replies.some(([tag]) => tag === "forgotten")
    )

  get purge(): Effect.Effect<number, TopicError> {
    return Effect.gen({ self: this }, function*() {
      let [total, groups] = [0, "[]"]
      for (const { place } of this.#parts.all) {
        const [, length, stay] = yield* failing(request(place, "topic.purge", [groups]))
        total += length
        groups = JSON.stringify(stay)
      }
      return total
    })
  }

  get state(): Effect.Effect<State, TopicError> {
    return Effect.map(
      Effect.forEach(this.#parts.all, ({ place }) => failing(question(place, "topic.state", [])), {
        concurrency: "unbounded"
      }),
      stateOf
    )
  }
}

const failing = <A, R>(self: Effect.Effect<A, CoordinatorError, R>): Effect.Effect<A, TopicError, R> =>
  Effect.mapError(self, ({ reason }) => fail(reason))

const patience: Schedule.Schedule<unknown> = Schedule.exponential("1 second").pipe(Schedule.upTo({ times: 4 }))

const open = <A>(
  space: Space,
  name: string,
  options: Options<A>
): Effect.Effect<Topic<A>, TopicError, Scope.Scope> =>
  Effect.suspend(() => {
    const topic = new TopicImpl(space, name, options)
    return Effect.as(topic.join, topic)
  })

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
 * A layer that handles the events of a topic for as long as it is built: with a `group`, those that this process is given as its
 * member; otherwise all of them, as a subscriber. The layer is built when it has its position, so it misses nothing that is published
 * behind it; or when it could not have one yet. A subscriber's failures are logged, interruptions from inside too. While Redis is away,
 * out of memory, or without the permissions, it tries again and again; a subscriber goes on behind the last event that it has handled.
 * An error of the topic that cannot pass is logged, and ends it.
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
            (cause) => Effect.logError(`a ${what} failed at an event`, cause)
          ))
        : topic.running(handle, options, begun)
      const going = persevering(
        Effect.ensuring(handling as Effect.Effect<void, TopicError, R>, begun),
        (error) => Effect.logWarning(`a ${what} could not go on, and begins again`, error),
        isLasting
      )
      yield* Effect.forkScoped(Effect.tapCause(going, (cause) => Effect.logError(`a ${what} has ended`, cause)))
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
  Stream.filterMap(
    logged(self),
    (element) => element._tag === "Event" ? Result.succeed(element) : Result.failVoid
  )

const logMissing = (element: Element<unknown>): Effect.Effect<void> => {
  if (element._tag === "Event") return Effect.void
  if (element._tag === "Undecodable") {
    return Effect.logWarning(`event ${element.id} is left out: ${element.error.message}`)
  }
  const { missed = "some", reason, topic } = element
  return Effect.logWarning(`${missed} events of topic ${JSON.stringify(topic)} are missing (${reason})`)
}

// By chunks: `Stream.tap` would take them apart, and that is most of what a subscriber costs.
const logged = <A, E, R>(self: Stream.Stream<Element<A>, E, R>): Stream.Stream<Element<A>, E, R> =>
  Stream.mapArrayEffect(self, (elements) =>
    elements.every(isEvent) ? Effect.succeed(elements) : Effect.as(
      Effect.forEach(elements, logMissing, { discard: true }),
      elements
    ))

const isEvent = (element: Element<unknown>): boolean => element._tag === "Event"

/**
 * The values of the events alone. Gaps and events that do not fit the schema are logged.
 *
 * @category combinators
 * @since 0.1.0
 */
export const values = <A, E, R>(self: Stream.Stream<Element<A>, E, R>): Stream.Stream<A, E, R> =>
  Stream.filterMap(
    logged(self),
    (element) => element._tag === "Event" ? Result.succeed(element.value) : Result.failVoid
  )
