/**
 * A queue: jobs that processes offer, and workers on any process run, each at least once.
 *
 * A worker's claim on a job lives as long as the session of its process. Jobs need no renewals of their own, and no sweeper looks
 * for stalled ones.
 *
 * **Guarantees**
 *
 * - A job that `offer` has confirmed runs until a handler has succeeded, it was cancelled or has expired, or it is a dead
 *   letter. An offer is stored once, however often it was resent.
 * - A job has one worker at a time. A handler whose process loses its session is interrupted before the job can be delivered to
 *   any other process. Its `Job.token` lets databases refuse its late writes.
 * - The jobs of a process that died go to other workers as soon as its session ends. A job whose workers died three times is
 *   a dead letter.
 * - A process that stops returns its unfinished jobs to the queue, and that uses up no attempt.
 * - Jobs of a level begin in the order of their offers. One of eight jobs is the oldest of the other levels, so no job starves.
 * - A worker never has more jobs than it can run. An idle one is pushed the next job; a busy one gets it with the reply to
 *   its acknowledgement.
 * - A job that was offered to run `after` others begins when all of these have ended, in the same step.
 * - A tick of a `schedule` has one job, whichever processes are alive, and however often the schedule is set.
 * - A finished job leaves nothing behind in Redis, but its `id` and its result for a while, if it has them.
 *
 * **Gotchas**
 *
 * - A job can run more than once: its process may die between its end and its acknowledgement. Make handlers idempotent.
 * - A retry, and a job whose delay is over, go ahead of the waiting jobs of their level.
 * - A delay ends, and a job expires, when a process ticks the partition. When the process that would tick it dies, another one
 *   does with its next renewal: up to a third of the lease later.
 * - `attempts` counts crashes, but only a failure ends in a dead letter because of it. A job with `attempts: 1` runs again after a
 *   crash, up to `letters.crashes`.
 * - A handler that ignores its interruption runs beside the next attempt. After `overrun`, its slot goes to another job.
 * - In a fail-over, Redis may lose jobs that it had acknowledged, or deliver finished jobs again.
 *
 * **Example** (Offer, and work)
 *
 * ```ts
 * import { Coordinator, Queue } from "lockstep"
 * import { Effect, Layer, Schema } from "effect"
 *
 * class Emails extends Queue.Service<Emails>()("emails", {
 *   payload: Schema.Struct({ to: Schema.String })
 * }) {}
 *
 * const SendEmails = Queue.worker(Emails, ({ to }) => Effect.log(`to ${to}`), { concurrency: 10 })
 *
 * const program = Effect.gen(function*() {
 *   const emails = yield* Emails
 *   yield* emails.offer({ to: "ann@example.com" })
 *   yield* emails.offer({ to: "bob@example.com" }, { delay: "1 minute", id: "welcome-bob" })
 * })
 *
 * program.pipe(
 *   Effect.provide(
 *     SendEmails.pipe(Layer.provideMerge(Emails.layer), Layer.provide(Coordinator.layerEmbedded()))
 *   ),
 *   Effect.runPromise
 * )
 * ```
 *
 * @since 0.1.0
 */

import * as Cause from "effect/Cause"
import type * as Context from "effect/Context"
import type * as Cron from "effect/Cron"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Schedule from "effect/Schedule"
import type * as Scope from "effect/Scope"
import { Coordinator } from "./Coordinator.ts"
import { millis, spaceOf, whole } from "./internal/hold/place.ts"
import { service, type ServiceClass as AnyServiceClass } from "./internal/hold/service.ts"
import type { Options, Queue, RunOptions } from "./internal/queue/api.ts"
import { innerOf } from "./internal/queue/errands.ts"
import type { QueueError } from "./internal/queue/errors.ts"
import type { Job } from "./internal/queue/job.ts"
import type { ScheduleOptions } from "./internal/queue/schedules.ts"
import { checkShares } from "./internal/queue/settings.ts"
import { Shard } from "./internal/queue/shard.ts"
import { Sharded } from "./internal/queue/sharded.ts"
import { measured } from "./internal/queue/state.ts"
import { logFailure } from "./internal/text.ts"
import { persevering } from "./internal/work/patience.ts"

export {
  /**
   * A payload does not fit the schema of the queue.
   *
   * @category errors
   * @since 0.1.0
   */
  InvalidPayload
} from "./internal/hold/payload.ts"
export type {
  /**
   * @category options
   * @since 0.1.0
   */
  AwaitOptions,
  /**
   * @category options
   * @since 0.1.0
   */
  ExecuteOptions,
  /**
   * A job of a queue, by its `id`.
   *
   * @category models
   * @since 0.1.0
   */
  JobHandle,
  /**
   * How a queue works, for all processes. The last `make` that sets one of `limits`, `groups`, `retention` and `letters` decides
   * about all of them.
   *
   * @category options
   * @since 0.1.0
   */
  Options,
  /**
   * @category options
   * @since 0.1.0
   */
  PoolOptions,
  /**
   * A queue of payloads `A`. Jobs whose outcome is kept have a result `S`, or an error `E`.
   *
   * @category models
   * @since 0.1.0
   */
  Queue,
  /**
   * @category options
   * @since 0.1.0
   */
  RescheduleOptions,
  /**
   * @category options
   * @since 0.1.0
   */
  RunOptions,
  /**
   * The status of a job that is not done.
   *
   * @category models
   * @since 0.1.0
   */
  Status,
  /**
   * @category options
   * @since 0.1.0
   */
  TakeBatchOptions,
  /**
   * @category options
   * @since 0.1.0
   */
  TakeOptions,
  /**
   * @category options
   * @since 0.1.0
   */
  WithJobOptions
} from "./internal/queue/api.ts"
export {
  JobFailed,
  JobLost,
  JobTimeout,
  OfferUncertain,
  OutcomeUnknown,
  QueueClosed,
  QueueError,
  QueueFull,
  ShardsMismatch
} from "./internal/queue/errors.ts"
export type {
  /**
   * The jobs that were offered with the same `group`.
   *
   * @category models
   * @since 0.1.0
   */
  Group,
  /**
   * @category models
   * @since 0.1.0
   */
  GroupState
} from "./internal/queue/groups.ts"
export type {
  /**
   * A minute of a queue.
   *
   * @category models
   * @since 0.1.0
   */
  Minute
} from "./internal/queue/history.ts"
export { Job } from "./internal/queue/job.ts"
export type {
  /**
   * A job that became a dead letter.
   *
   * @category models
   * @since 0.1.0
   */
  DeadLetter,
  /**
   * @category options
   * @since 0.1.0
   */
  LettersOptions
} from "./internal/queue/letters.ts"
export type {
  /**
   * A job that is not done.
   *
   * @category models
   * @since 0.1.0
   */
  JobInfo,
  /**
   * @category options
   * @since 0.1.0
   */
  JobsOptions
} from "./internal/queue/listing.ts"
export type {
  /**
   * @category models
   * @since 0.1.0
   */
  Offered
} from "./internal/queue/offering.ts"
export type {
  /**
   * The workers of this process, as `pool` makes them.
   *
   * @category models
   * @since 0.1.0
   */
  WorkerPool
} from "./internal/queue/pool.ts"
export type {
  /**
   * A schedule of a queue.
   *
   * @category models
   * @since 0.1.0
   */
  Scheduled,
  /**
   * @category options
   * @since 0.1.0
   */
  ScheduleOptions
} from "./internal/queue/schedules.ts"
export type {
  /**
   * @category models
   * @since 0.1.0
   */
  State
} from "./internal/queue/state.ts"
export type {
  /**
   * @category models
   * @since 0.1.0
   */
  Taken
} from "./internal/queue/taking.ts"
export type {
  /**
   * @category options
   * @since 0.1.0
   */
  OfferOptions,
  Priority,
  ResultOption
} from "./internal/queue/wish.ts"

/**
 * @category type IDs
 * @since 0.1.0
 */
export const TypeId: TypeId = "~lockstep/Queue"

/**
 * @category type IDs
 * @since 0.1.0
 */
export type TypeId = "~lockstep/Queue"

/**
 * Opens the queue, and creates it if need be. It is open for as long as the scope is; its jobs stay.
 *
 * @category constructors
 * @since 0.1.0
 */
export const make = <A, S = unknown, E = never>(
  options: Options<A, S, E> & { readonly name: string }
): Effect.Effect<Queue<A, S, E>, QueueError, Coordinator | Scope.Scope> =>
  Effect.gen(function*() {
    const space = spaceOf(yield* Coordinator)
    const { limits = {}, name, shards: wanted } = options
    if (wanted !== undefined) checkShares(limits, whole(wanted, "shards", space.kernel.settings.partitions))
    const first = new Shard(space, name, options, 0)
    const count = yield* first.join
    if (count === 1) return first
    checkShares(limits, count)
    const others = Array.from(
      { length: count - 1 },
      (_, at) => new Shard(space, name, { ...options, shards: count }, at + 1)
    )
    yield* Effect.forEach(others, ({ join }) => join, { concurrency: "unbounded", discard: true })
    return new Sharded([first, ...others])
  })

/**
 * The class that `Service` makes.
 *
 * @category models
 * @since 0.1.0
 */
export interface ServiceClass<in out Self, in out Name extends string, in out A, in out S, in out E>
  extends AnyServiceClass<Self, `lockstep/Queue/${Name}`, Queue<A, S, E>, QueueError, Coordinator>
{}

/**
 * A queue as a typed service: `class Emails extends Queue.Service<Emails>()("emails", { payload }) {}`, with `Emails.layer`.
 *
 * @category constructors
 * @since 0.1.0
 */
export const Service = <Self>() =>
<const Name extends string, A, S = unknown, E = never>(
  name: Name,
  options: Options<A, S, E>
): ServiceClass<Self, Name, A, S, E> =>
  service<Self, "Queue", Name, Queue<A, S, E>, QueueError, Coordinator | Scope.Scope>(
    "Queue",
    name,
    make({ ...options, name })
  )

/**
 * A layer that runs a handler on jobs for as long as it is built. While Redis is away, out of memory, or without the permissions, it
 * begins again and again. An error that cannot pass is logged, and ends it.
 *
 * @category layers
 * @since 0.1.0
 */
export const worker = <Self, A, S, E, E2, R>(
  tag: Context.Key<Self, Queue<A, S, E>>,
  handler: (payload: A) => Effect.Effect<S, E2, R>,
  options?: RunOptions<E2> | undefined
): Layer.Layer<never, never, Self | Exclude<R, Job>> =>
  Layer.effectDiscard(
    Effect.flatMap(tag, (queue) => {
      const what = `a worker of ${innerOf(queue).subject}`
      const going = persevering(
        queue.run(handler, options),
        (error) => Effect.logWarning(`${what} could not begin, and tries again`, error)
      )
      return Effect.forkScoped(
        Effect.tapCause(going, (cause) =>
          Cause.hasInterruptsOnly(cause) ? Effect.void : logFailure(`${what} has ended`, cause))
      )
    })
  )

/**
 * A layer that sets a schedule of a queue when it is built, as `schedule` does. The schedule stays when the layer is closed: remove it
 * with `unschedule`. When Redis loses its data while the layer is open, the schedule is not set again.
 *
 * @category layers
 * @since 0.1.0
 */
export const schedule = <Self, A, S, E>(
  tag: Context.Key<Self, Queue<A, S, E>>,
  name: string,
  times: Cron.Cron | Duration.Input,
  payload: A,
  options?: ScheduleOptions | undefined
): Layer.Layer<never, QueueError, Self> =>
  Layer.effectDiscard(Effect.flatMap(tag, (queue) => queue.schedule(name, times, payload, options)))

/**
 * A layer that writes the gauges of a queue for as long as it is built. They are the number of jobs in each state, and the age of
 * the oldest waiting job. One process is enough.
 *
 * @category layers
 * @since 0.1.0
 */
export const monitor = <Self, A, S, E>(
  tag: Context.Key<Self, Queue<A, S, E>>,
  { every = "15 seconds" }: {
    /** Default 15 seconds. */
    readonly every?: Duration.Input | undefined
  } = {}
): Layer.Layer<never, never, Self> =>
  Layer.effectDiscard(
    Effect.flatMap(tag, (queue) =>
      Effect.flatMap(queue.state, (state) => measured(queue.name, state)).pipe(
        Effect.catch((error) => Effect.logDebug(`${innerOf(queue).subject} could not be measured`, error)),
        Effect.repeat(Schedule.spaced(Duration.millis(millis(every, "every")))),
        Effect.forkScoped
      ))
  )
