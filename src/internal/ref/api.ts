/** The public interface of a shared ref, and its options. */

import type * as Duration from "effect/Duration"
import type * as Effect from "effect/Effect"
import type * as Schema from "effect/Schema"
import type * as Stream from "effect/Stream"
import type { Publication } from "../hold/following.ts"
import type { Lease } from "../hold/hold.ts"
import type { SharedRefError } from "./errors.ts"

/**
 * A value, and the number of its version: 0 while the ref is absent.
 */
export interface Versioned<out A> {
  readonly value: A
  readonly version: number
}

/**
 * A version as a subscriber sees it. `missed` is how many versions directly before it were dropped, because this subscriber was
 * slow or wants the latest only; 0 mostly. Versions that the process was not notified of, as after the loss of its session, are
 * not counted.
 */
export interface Change<out A> extends Versioned<A> {
  readonly missed: number
}

export interface ChangesOptions {
  /** Only the latest version for a subscriber that is slower than the changes. Default `false`: every version. */
  readonly conflate?: boolean | undefined
}

export interface UntilOptions {
  /** How long to wait; then it fails with `WaitTimeout`. Default: that of the coordinator, as long as it takes. */
  readonly wait?: Duration.Input | undefined
}

/**
 * Named as `effect/SubscriptionRef`.
 */
export interface SharedRef<in out A> {
  readonly "~lockstep/SharedRef": "~lockstep/SharedRef"
  readonly name: string
  /** The present value, by Redis's word: always fresh. */
  readonly get: Effect.Effect<A, SharedRefError>
  /** The present value, and its version. */
  readonly versioned: Effect.Effect<Versioned<A>, SharedRefError>
  /** The present version. */
  readonly version: Effect.Effect<number, SharedRefError>
  /**
   * The value that this process received last, without a round trip; never older than the coordinator's `lease`. The first call,
   * and each one while Redis is out of reach, reads as `get`. The process observes the ref until it has not asked for a minute.
   */
  readonly cached: Effect.Effect<A, SharedRefError>
  /** As `cached`, but never older than this. */
  readonly cachedWithin: (maxAge: Duration.Input) => Effect.Effect<A, SharedRefError>
  /**
   * The same ref, whose writes publish events, each in the same step as the write: both happen, or neither. Events come from
   * `Topic.publication`; a function makes them of the value that is written, which after `delete` is `initial`. It may run several
   * times, as that of an update; only the events of the write that is made are published. The topic needs the ref's `colocate`.
   */
  readonly publishing: (
    publish:
      | Publication
      | ReadonlyArray<Publication>
      | ((value: A) => Effect.Effect<Publication | ReadonlyArray<Publication>>)
  ) => SharedRef<A>
  readonly set: (value: A) => Effect.Effect<void, SharedRefError>
  /** Sets the value, and answers the former one; fails with `InvalidPayload`, and has set it, if the schema does not fit that one. */
  readonly getAndSet: (value: A) => Effect.Effect<A, SharedRefError>
  /** Sets the value if the ref still has this version; 0 if it is still absent. Answers whether it did. */
  readonly compareAndSet: (version: number, value: A) => Effect.Effect<boolean, SharedRefError>
  /**
   * Sets the value, unless a later holder of the same lock, or other lease, has done so: then it fails with `StaleToken`. So it
   * does without asking Redis when this process knows that the lease was lost or released.
   */
  readonly setFenced: (
    lease: Pick<Lease, "key" | "kind" | "token">,
    value: A
  ) => Effect.Effect<void, SharedRefError>
  /** Removes the value. Answers whether there was one. */
  readonly delete: Effect.Effect<boolean, SharedRefError>
  readonly update: (f: (value: A) => A) => Effect.Effect<void, SharedRefError>
  /** Updates the value, and answers the new one. */
  readonly updateAndGet: (f: (value: A) => A) => Effect.Effect<A, SharedRefError>
  /** Updates the value, and answers the former one. */
  readonly getAndUpdate: (f: (value: A) => A) => Effect.Effect<A, SharedRefError>
  /** Answers the first part of what the function returns, and sets the second. */
  readonly modify: <B>(f: (value: A) => readonly [B, A]) => Effect.Effect<B, SharedRefError>
  /** As `update`. It reads first; while others change the value, the effect runs again. */
  readonly updateEffect: <E, R>(f: (value: A) => Effect.Effect<A, E, R>) => Effect.Effect<void, E | SharedRefError, R>
  /** As `modify`. It reads first; while others change the value, the effect runs again. */
  readonly modifyEffect: <B, E, R>(
    f: (value: A) => Effect.Effect<readonly [B, A], E, R>
  ) => Effect.Effect<B, E | SharedRefError, R>
  /** The present value, and then that of every version. It ends only with an error. */
  readonly changes: Stream.Stream<A, SharedRefError>
  readonly changesWith: (options: ChangesOptions) => Stream.Stream<A, SharedRefError>
  /** As `changes`, with versions, and how many of them this subscriber has missed because it was slow. */
  readonly versions: (options?: ChangesOptions | undefined) => Stream.Stream<Change<A>, SharedRefError>
  /** Waits until the value satisfies the predicate, now or later, and answers it. By a push. */
  readonly until: {
    <B extends A>(
      predicate: (value: A) => value is B,
      options?: UntilOptions | undefined
    ): Effect.Effect<B, SharedRefError>
    (predicate: (value: A) => boolean, options?: UntilOptions | undefined): Effect.Effect<A, SharedRefError>
  }
}

/**
 * Refs of one schema, by key. It asks Redis for nothing, and a key costs nothing until it is used.
 */
export type Family<in out A> = (key: string) => SharedRef<A>

export interface Options<A> {
  /** Of the value, which is kept as JSON. */
  readonly schema: Schema.Codec<A, any>
  /** The value of the ref while it is absent. */
  readonly initial: A
  /** How long the value is kept after the last write. Default: until it is deleted. */
  readonly timeToLive?: Duration.Input | undefined
  /** Refs with the same text here live in one partition, so that a `transaction` can change them together. */
  readonly colocate?: string | undefined
}

export interface FamilyOptions<A> extends Omit<Options<A>, "colocate"> {
  /** As that of a ref: for all keys, or of each key. Default: each key by itself. */
  readonly colocate?: string | ((key: string) => string) | undefined
}
