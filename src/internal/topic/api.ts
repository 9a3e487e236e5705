/** The public interface of a topic, and its options. */

import type * as DateTime from "effect/DateTime"
import type * as Duration from "effect/Duration"
import type * as Effect from "effect/Effect"
import type * as Option from "effect/Option"
import type * as Schedule from "effect/Schedule"
import type * as Schema from "effect/Schema"
import type * as Scope from "effect/Scope"
import type * as Stream from "effect/Stream"
import type { Publication } from "../hold/following.ts"
import type { Lease } from "../hold/hold.ts"
import type { TopicError } from "./errors.ts"
import type { Element, Event, Gap } from "./event.ts"
import type { DeadLetter } from "./letters.ts"
import type { Published } from "./publishing.ts"
import type { State } from "./state.ts"

export interface PublishOptions {
  /** Events of a key keep their order. Up to 512 bytes. Default: that of the topic's `key`, or none. */
  readonly key?: string | undefined
  /** A second publication with the same id within `dedupe` stores nothing, whichever process makes it. Up to 512 bytes. */
  readonly id?: string | undefined
}

export interface SubscribeOptions {
  /**
   * Where to begin: with the next event, or with the oldest one there is. Or behind the event with an id, with the first one
   * since a time, or with the last `n`, up to 10,000. Of a topic with several shards, `after` names an event of each; a shard
   * without one begins with its oldest event. Default `now`.
   */
  readonly from?: "now" | "beginning" | { readonly after: string | ReadonlyArray<string> } | {
    readonly since: DateTime.DateTime.Input
  } | {
    readonly last: number
  } | undefined
  /**
   * How many events wait in memory for a slow subscriber, and what happens when that is full. `suspend` reads the others from
   * Redis later, `sliding` leaves the oldest out, `dropping` the newest. The missing events show as a `Gap`. An empty buffer
   * takes in all that one read of Redis brings, up to 1,024 events. Default 1,024, and `suspend`.
   */
  readonly buffer?: {
    readonly capacity?: number | undefined
    readonly strategy?: "suspend" | "sliding" | "dropping" | undefined
  } | undefined
}

export interface GroupOptions {
  /** The name of the group: its members share the events. */
  readonly group: string
  /** Where a group begins that does not exist yet. Default `now`. */
  readonly from?: "now" | "beginning" | { readonly after: string | ReadonlyArray<string> } | undefined
  /** `key`: events of one key are handled one after the other, in their order. Default: in no order. */
  readonly orderBy?: "key" | undefined
  /** How many events this process has at a time, in each shard. Default 16, or twice the `concurrency` of a handler. */
  readonly prefetch?: number | undefined
}

export interface HandlerOptions<E = unknown> extends GroupOptions {
  /** How many events are handled at a time. Default 1. */
  readonly concurrency?: number | undefined
  /**
   * When an event whose handler has failed is delivered again. The elapsed time of the schedule is the sum of its delays. Default: 4
   * times, after 1, 2, 4 and 8 seconds.
   */
  readonly retry?: Schedule.Schedule<unknown, E> | undefined
  /**
   * How often the session of a member may end while it has an event, 1 to 1,000: its handler may be what kills the process. The
   * next member does not handle it, and it becomes a dead letter. Default 3.
   */
  readonly crashes?: number | undefined
  /**
   * Where an event goes that cannot be decoded, or is not retried any more. Default: the topic that `deadLetters` opens.
   * `false`: it is dropped, and logged. So is one whose dead letter is too large for Redis.
   */
  readonly deadLetter?: Topic<DeadLetter> | false | undefined
  /**
   * Is notified of events that retention has removed unread, or that Redis has lost. Another member is notified again if this
   * process dies meanwhile. Default: a warning is logged.
   */
  readonly onGap?: ((gap: Gap) => Effect.Effect<void>) | undefined
}

/**
 * An event that a member of a group has to acknowledge.
 */
export interface Delivery<out A> {
  /** An event, or a `Gap`: a gap that is not acknowledged is delivered again when this member has left. */
  readonly element: Element<A>
  /**
   * It was handled. A second time changes nothing. It also succeeds when the session was lost meanwhile: then the event is
   * delivered again.
   */
  readonly acknowledge: Effect.Effect<void, TopicError>
  /** It was not handled: it is delivered again after a delay, by default at once. A `Gap` follows when this member has left. */
  readonly retry: (delay?: Duration.Input | undefined) => Effect.Effect<void, TopicError>
  /** Ends when the session of this process is lost: another member gets the event then. */
  readonly lost: Effect.Effect<void>
}

export interface Topic<in out A> {
  readonly "~lockstep/Topic": "~lockstep/Topic"
  readonly name: string
  readonly shards: number
  /** Stores an event. Confirmed when it succeeds; if it fails with `Timeout`, it may have been stored. */
  readonly publish: (event: A, options?: PublishOptions | undefined) => Effect.Effect<Published, TopicError>
  /** Stores events in their order, many with each call. */
  readonly publishAll: (
    events: Iterable<A>,
    options?: Pick<PublishOptions, "key"> | ((event: A) => PublishOptions) | undefined
  ) => Effect.Effect<ReadonlyArray<Published>, TopicError>
  /**
   * An event to be published in the same step as something else, such as the submission of a result. The topic needs the same
   * `colocate` as that. The first shard stores it: fails with `OtherShard` if its key, or its id without one, belongs to another.
   */
  readonly publication: (event: A, options?: PublishOptions | undefined) => Effect.Effect<Publication, TopicError>
  /**
   * Stores an event in the same step as a release, so never without it. The topic needs the `colocate` of the object that the
   * lease is of. The first shard stores it: fails with `OtherShard` if its key, or its id without one, belongs to another.
   * Answers an effect that waits for the outcome. That is `None` if the lease is lost before its release, or was released before.
   * It is an error if Redis is out of memory or refuses it, which holds up no release.
   */
  readonly publishOnRelease: (
    lease: Lease,
    event: A,
    options?: PublishOptions | undefined
  ) => Effect.Effect<Effect.Effect<Option.Option<Published>, TopicError>, TopicError>
  /** Every event from a position on. Each run of the stream is a subscriber of its own. */
  readonly subscribe: (options?: SubscribeOptions | undefined) => Stream.Stream<Element<A>, TopicError>
  /** As `subscribe`, for as long as the scope is open: it has its position when this succeeds, so nothing later is missed. */
  readonly subscribed: (
    options?: SubscribeOptions | undefined
  ) => Effect.Effect<Stream.Stream<Element<A>, TopicError>, TopicError, Scope.Scope>
  /** The events that are delivered to this process as a member of a group. Each has to be acknowledged. */
  readonly consume: (options: GroupOptions) => Stream.Stream<Delivery<A>, TopicError>
  /** Handles the events of a group, and acknowledges them. Ends with an error only. */
  readonly run: <E, R>(
    handler: (event: Event<A>) => Effect.Effect<unknown, E, R>,
    options: HandlerOptions<E>
  ) => Effect.Effect<never, TopicError, R>
  /** The events that a group could not handle, as a topic of its own. */
  readonly deadLetters: (group: string) => Effect.Effect<Topic<DeadLetter>, TopicError, Scope.Scope>
  /**
   * Removes a group, and the events that it has not acknowledged. Answers whether it did: not if the group has members, or is not
   * there.
   */
  readonly forget: (group: string) => Effect.Effect<boolean, TopicError>
  /**
   * Removes all events, and groups without members. Members finish the events that they are working on. Answers how many events
   * were removed.
   */
  readonly purge: Effect.Effect<number, TopicError>
  readonly state: Effect.Effect<State, TopicError>
}

/**
 * How long events are kept, in each shard. An event is removed when it exceeds any limit, and no group needs it.
 */
export interface Retention {
  /** How many events, up to an eighth more. Default 100,000. `Infinity` for no limit. */
  readonly length?: number | undefined
  /**
   * Bytes of values, keys and ids, about, and checked every 64 events. The newest event stays until the next one, also if it
   * alone is larger. Default: no limit.
   */
  readonly bytes?: number | undefined
  /** How long, up to a third of the lease longer. Default: 1 day. `Infinity` for no limit. */
  readonly age?: Duration.Input | undefined
  /**
   * Whether events that a group has not acknowledged are kept beyond these limits. They always are for a group with `orderBy`.
   * Default true.
   */
  readonly protect?: boolean | undefined
  /** After which time without members a group is removed. Default: 7 days. `Infinity` for never. */
  readonly abandon?: Duration.Input | undefined
}

export interface Options<in out A> {
  /** Of the events. It has to decode and encode synchronously. */
  readonly schema: Schema.Codec<A, any>
  /** The last `make` that names it decides. Default: as the topic is, or the defaults of each limit. */
  readonly retention?: Retention | undefined
  /** The key of an event that is published without one. */
  readonly key?: ((event: A) => string | undefined) | undefined
  /** How long ids of publications are known, at least. Decided together with `retention`. Default: 10 minutes. */
  readonly dedupe?: Duration.Input | undefined
  /**
   * Over how many partitions the events are spread, 1 to the coordinator's `partitions`: by key, or in turn. The last `make`
   * that names it decides, for all processes. A change holds publications up for some round trips, and keeps the order of each
   * key. Subscribers, and groups that are ordered by key, finish the events of before it first. Default: as the topic is, or 1.
   */
  readonly shards?: number | undefined
  /**
   * Topics, refs and the like with the same `colocate` share a partition. One name with another `colocate` is another topic.
   * Default: the name.
   */
  readonly colocate?: string | undefined
  /** How long events that a member has not acknowledged outlive its process. Default: the coordinator's lease. */
  readonly lease?: Duration.Input | undefined
}
