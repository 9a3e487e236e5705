/**
 * Errands: messages from an actor in one partition to an actor in another. The actor that sends an errand stores it as a job of an
 * internal queue beside it, in the step that has led to it, and the processes that work on errands of its name deliver it. So an
 * errand that was sent is delivered at least once while any of them lives; receivers recognize repetitions.
 */

import type * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import type * as Scope from "effect/Scope"
import type { CoordinatorReason } from "../actor/errors.ts"
import { describe, type WaitTimeout } from "../hold/loss.ts"
import { placeIn, type Space } from "../hold/place.ts"
import type { Codec } from "../work/codec.ts"
import type { Queue } from "./api.ts"
import type { Handling } from "./attempts.ts"
import type { QueueError } from "./errors.ts"
import type { Handle } from "./handle.ts"
import type { Task } from "./job.ts"
import type { Offered } from "./offering.ts"
import { mostOverrun } from "./pool.ts"
import type { OfferOptions, Subscriber } from "./wish.ts"
import { crewOf } from "./worker.ts"

/** The interface of a queue for primitives on queues, besides the one for users. */
export interface Inner<in out A> {
  /**
   * As `offer`. The subscriber is sent the errand `["ended", reference, job, outcome]` when the job is done or deleted. `waits` is
   * called when the job waits for room, perhaps several times.
   */
  readonly offerFor: (
    payload: A,
    options: OfferOptions,
    subscriber: Subscriber | undefined,
    waits?: () => void
  ) => Effect.Effect<Offered, QueueError>
  readonly job: (id: string) => Handle<A, any, any>
  /** Of its shards. */
  readonly partitions: ReadonlyArray<number>
  readonly codecs: Codecs<A>
  /** Options that go with no job of this queue are a `RangeError`. */
  readonly checkOptions: (options: OfferOptions) => void
  /** In log lines. */
  readonly subject: string
}

/** Of the payloads of a queue, and of what its handlers come to, where the queue has a schema for that. */
export interface Codecs<in out A> {
  readonly payload: Codec<A>
  readonly success: Codec<any> | undefined
  readonly error: Codec<any> | undefined
}

export const innerOf = <A, S, E>(queue: Queue<A, S, E>): Inner<A> => queue as unknown as Inner<A>

interface Employment<R, E> {
  readonly space: Space
  /** Of the errands: the object that they are about has the same name. */
  readonly name: string
  /** In which these errands are sent. */
  readonly partitions: Iterable<number>
  /** Fails if it is to be called again. It may be called again also when it has succeeded. */
  readonly handler: (body: ReadonlyArray<unknown>, task: Task) => Effect.Effect<unknown, unknown, R>
  readonly lease?: Duration.Input | undefined
  /** How many errands of each partition it delivers at a time. */
  readonly concurrency?: number | undefined
  /** The coordinator was closed. */
  readonly closed?: (() => void) | undefined
  readonly fail: (reason: CoordinatorReason | WaitTimeout) => E
}

// In milliseconds, before the second attempt and before all late ones. No other process would
// make these attempts, so there is no last one.
const [shortest, longest] = [50, 10_000]

const ignore = () => {}

/** Delivers the errands of a name in these partitions, for as long as the scope is open. */
export const workErrands = <R, E>(
  { closed = ignore, concurrency = 64, fail, handler, lease, name, partitions, space }: Employment<R, E>
): Effect.Effect<void, E, Scope.Scope | R> => {
  const handling: Handling<R> = {
    attempt: (task) => Effect.suspend(() => handler(task.body as ReadonlyArray<unknown>, task)),
    judge: (task, { cause }) =>
      Effect.sync(() => {
        const { hooks, settings: { namespace } } = space.kernel
        hooks.log("Debug", `errand ${task.key} of ${describe("errands", name, namespace)} is attempted again`, cause)
        const delay = Math.min(longest, shortest * 2 ** Math.min(task.attempt - 1, 16))
        return { tag: "retry", delay, attempted: true }
      })
  }
  const together = { concurrency: "unbounded", discard: true } as const
  return Effect.flatMap(Effect.context<R>(), (context) => {
    const crews = [...new Set(partitions)].map((index) => {
      const place = placeIn(space, space.kernel.partitionAt(index), "errands", name, lease)
      return crewOf({ context, handling, overrun: mostOverrun }, [place], concurrency)
    })
    return Effect.uninterruptibleMask((restore) =>
      Effect.ensuring(
        restore(Effect.forEach(crews, (crew) => crew.work(closed, fail), together)),
        // Behind the memberships, so it is called before these end: errands that are under way go back.
        Effect.addFinalizer(() => Effect.forEach(crews, (crew) => crew.stop(0), together))
      )
    )
  })
}
