/** A topic over its shards. */

import * as Cause from "effect/Cause"
import * as Deferred from "effect/Deferred"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Option from "effect/Option"
import * as Queue from "effect/Queue"
import * as Schedule from "effect/Schedule"
import * as Scope from "effect/Scope"
import * as Stream from "effect/Stream"
import { CoordinatorClosed } from "../actor/errors.ts"
import { checkName } from "../actor/keys.ts"
import type { Publication } from "../hold/following.ts"
import { Hold, type Lease } from "../hold/hold.ts"
import { describe } from "../hold/loss.ts"
import type { InvalidPayload } from "../hold/payload.ts"
import { oneOf, scheduleOf, type Space, whole } from "../hold/place.ts"
import { fresh, question, request } from "../hold/request.ts"
import { sending } from "../hold/span.ts"
import type { Tenancy } from "../hold/tenancy.ts"
import { codec } from "../work/codec.ts"
import { Turns } from "../work/turn.ts"
import type { Delivery, GroupOptions, HandlerOptions, Options, PublishOptions, SubscribeOptions, Topic } from "./api.ts"
import { deliveryOf } from "./delivery.ts"
import { fail, failing, OtherShard, type TopicError } from "./errors.ts"
import { beginning, DeliveredEvent, DeliveredUndecodable, type Element, type Event, type Raw } from "./event.ts"
import { type Delivery as GroupDelivery, joinGroup } from "./group.ts"
import { burying, DeadLetter, lettersOf } from "./letters.ts"
import { nameOf, Parts } from "./parts.ts"
import { positionsBehind, positionsOf } from "./positions.ts"
import { type Message, type Published, Publisher } from "./publishing.ts"
import { limitsOf } from "./retention.ts"
import { type State, stateOf } from "./state.ts"
import { Subscription } from "./subscription.ts"
import { handle } from "./working.ts"

/** Subscriptions of which each goes on where the one before it has failed, when what that has brought was handled. */
export interface Trail<A> {
  former?: Subscription<A>
}

export class TopicImpl<in out A> implements Topic<A> {
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

  #message(value: A, body: string, options: PublishOptions | undefined, trace: string): Message {
    const key = options?.key ?? this.#options.key?.(value)
    const id = options?.id
    return {
      body,
      key: key === undefined ? "" : checkName(key, "key"),
      id: id === undefined ? "" : checkName(id, "id"),
      trace
    }
  }

  /** Of an event that follows something. */
  #follower(event: A, options: PublishOptions | undefined, trace: string): Effect.Effect<Message, TopicError> {
    return Effect.flatMap(this.#encode(event), (body) => {
      const message = this.#message(event, body, options, trace)
      const key = this.#publisher.apart(message)
      const { namespace } = this.#space.kernel.settings
      return key === undefined
        ? Effect.succeed(message)
        : Effect.fail(fail(new OtherShard({ name: this.name, namespace, key })))
    })
  }

  readonly publish = (event: A, options?: PublishOptions): Effect.Effect<Published, TopicError> =>
    this.#spanned("publish", (trace) => {
      const body = this.#encode(event)
      return Exit.isSuccess(body)
        ? this.#publisher.publish(this.#message(event, body.value, options, trace))
        : Exit.failCause(body.cause)
    })

  readonly publishAll = (
    events: Iterable<A>,
    options?: Pick<PublishOptions, "key"> | ((event: A) => PublishOptions)
  ): Effect.Effect<ReadonlyArray<Published>, TopicError> =>
    this.#spanned<ReadonlyArray<Published>>("publishAll", (trace) => {
      const messages: Array<Message> = []
      for (const event of events) {
        const body = this.#encode(event)
        if (Exit.isFailure(body)) return Exit.failCause(body.cause)
        messages.push(this.#message(event, body.value, typeof options === "function" ? options(event) : options, trace))
      }
      return this.#publisher.publishAll(messages)
    })

  readonly publication = (event: A, options?: PublishOptions): Effect.Effect<Publication, TopicError> =>
    this.#spanned("publication", (trace) =>
      Effect.map(this.#follower(event, options, trace), (message) => ({
        "~lockstep/Publication": (leader, after) =>
          this.#publisher.following(leader, message, after, (outcome) => {
            if (Exit.isSuccess(outcome)) return
            const { log } = this.#space.kernel.hooks
            log("Error", `an event of ${this.subject} could not be published`, Cause.squash(outcome.cause))
          })
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
          (exit) => {
            // The tenancy sends a release that Redis has refused again: without this event, whose failure its publisher
            // has received.
            const at = Exit.isFailure(exit) ? following.indexOf(follower) : -1
            if (at >= 0) following.splice(at, 1)
            Deferred.doneUnsafe(outcome, Exit.map(exit, Option.fromUndefinedOr))
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
      oneOf(strategy, "buffer.strategy", ["suspend", "sliding", "dropping"])
      const parts = this.#parts
      // Events of another epoch may come before the ends of the shards are known.
      const epoch = trail.former?.epoch ?? (from === "now" ? parts.epoch : 0)
      const subscription = new Subscription<A>(parts.all[0]!.place, { capacity, strategy }, epoch, () => parts.follow())
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
    { from = "now", group, orderBy, prefetch = 16 }: GroupOptions,
    turns?: Turns
  ): Effect.Effect<Queue.Dequeue<GroupDelivery<A>, TopicError>, TopicError, Scope.Scope> {
    checkName(group, "group")
    whole(prefetch, "prefetch", 1024)
    if (orderBy !== undefined) oneOf(orderBy, "orderBy", ["key"])
    if (typeof from !== "object" || from === null) oneOf(from, "from", ["now", "beginning"])
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
          turns?.begin()
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
    Stream.unwrap(
      Effect.map(
        Effect.suspend(() => this.#deliveries(options)),
        (queue) => Stream.map(Stream.fromQueue(queue), deliveryOf)
      )
    )

  readonly run = <E, R>(
    handler: (event: Event<A>) => Effect.Effect<unknown, E, R>,
    options: HandlerOptions<E>
  ): Effect.Effect<never, TopicError, R> => this.running(handler, options, Effect.void)

  /** As `run`; says when it is a member. */
  readonly running = <E, R>(
    handler: (event: Event<A>) => Effect.Effect<unknown, E, R>,
    options: HandlerOptions<E>,
    joined: Effect.Effect<unknown>
  ): Effect.Effect<never, TopicError, R> =>
    Effect.suspend(() => {
      const { concurrency = 1, crashes = 3, deadLetter, group, onGap, retry = patience } = options
      whole(concurrency, "concurrency", 1024)
      whole(crashes, "crashes", 1000)
      scheduleOf(retry)
      const prefetch = options.prefetch ?? Math.min(2 * concurrency, 1024)
      if (deadLetter === undefined) checkName(lettersOf(this.name, group), "name and group")
      const { log, metrics: { buried } } = this.#space.kernel.hooks
      return Effect.scoped(Effect.gen({ self: this }, function*() {
        const scope = yield* Effect.scope
        const opening = Scope.provide(this.deadLetters(group), scope)
        const bury = burying({ name: this.name, subject: this.subject, group, log }, deadLetter, opening)
        const turns = new Turns(this.#space.kernel.io)
        const queue = yield* this.#deliveries({ ...options, prefetch }, turns)
        yield* joined
        const worker = Effect.forever(Effect.flatMap(Effect.tap(Queue.take(queue), turns.next), (delivery) =>
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
          () =>
            worker,
          { concurrency: "unbounded" }
        ) as unknown as Effect.Effect<never, TopicError, R>
      })) as Effect.Effect<never, TopicError, R>
    })

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
        failing(fresh(place, (anyway) =>
          request(place, "topic.forget", [checkName(group, "group"), anyway])))),
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

const patience: Schedule.Schedule<unknown> = Schedule.exponential("1 second").pipe(Schedule.upTo({ times: 4 }))

export const open = <A>(
  space: Space,
  name: string,
  options: Options<A>
): Effect.Effect<Topic<A>, TopicError, Scope.Scope> =>
  Effect.suspend(() => {
    const topic = new TopicImpl(space, name, options)
    return Effect.as(topic.join, topic)
  })
