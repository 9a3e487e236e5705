/**
 * A queue: jobs that processes offer, and workers on any process run, each at least once.
 *
 * A worker's claim on a job lives as long as the session of its process: there is nothing to renew for each job, and no
 * sweeper that looks for stalled ones.
 *
 * **Guarantees**
 *
 * - A job that `offer` has confirmed runs until a handler has succeeded, it was cancelled or has expired, or it is a dead
 *   letter. An offer is stored once, however often it was resent.
 * - A job has one worker at a time. A handler whose process loses its session is interrupted before any other process can be
 *   given the job. Its `Job.token` lets databases refuse what it writes all the same.
 * - The jobs of a process that died go to other workers as soon as its session ends. A job whose workers died three times is
 *   a dead letter.
 * - A process that stops gives its unfinished jobs back, and that uses up no attempt.
 * - Jobs of a level begin in the order of their offers. One of eight jobs comes from the other levels that have jobs, so no level
 *   starves.
 * - A worker never has more jobs than it can run. An idle one is pushed the next job; a busy one gets it with the reply to
 *   its acknowledgement.
 * - A tick of a `schedule` has one job, whichever processes are alive, and however often the schedule is set.
 * - A finished job leaves nothing behind in Redis, but its `id` and its result for the `retention`, if it has them.
 *
 * **Gotchas**
 *
 * - A job can run more than once: its process may die between its end and its acknowledgement. Make handlers idempotent.
 * - A retry, and a job whose delay is over, go ahead of the waiting jobs of their level.
 * - A delay ends when a process rings the alarm in Redis. When the process that would ring dies, another one does with its next
 *   renewal: up to a third of the lease later.
 * - `attempts` counts crashes, but only a failure ends in a dead letter because of it. A job with `attempts: 1` runs again after a
 *   crash, up to `letters.crashes`.
 * - A handler that ignores its interruption runs beside the next attempt. After `overrun`, its slot goes to another job.
 * - In a fail-over, Redis may lose jobs that it had acknowledged, or hand out finished jobs again.
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
import type * as DateTime from "effect/DateTime"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Layer from "effect/Layer"
import * as Option from "effect/Option"
import * as Schedule from "effect/Schedule"
import type * as Schema from "effect/Schema"
import type * as Scope from "effect/Scope"
import * as Stream from "effect/Stream"
import { Coordinator } from "./Coordinator.ts"
import { CoordinatorClosed, type CoordinatorError, isAway } from "./internal/actor/errors.ts"
import { checkName, partitionOf } from "./internal/actor/keys.ts"
import { join } from "./internal/hold/acquire.ts"
import type { Observer } from "./internal/hold/membership.ts"
import { millis, type Place, placeIn, type Space, spaceOf } from "./internal/hold/place.ts"
import { question, request } from "./internal/hold/request.ts"
import { service, type ServiceClass as AnyServiceClass } from "./internal/hold/service.ts"
import { sending } from "./internal/hold/span.ts"
import {
  fail,
  JobFailed,
  type JobTimeout,
  OfferUncertain,
  OutcomeUnknown,
  type QueueError,
  QueueFull,
  ShardsMismatch
} from "./internal/queue/errors.ts"
import { Following } from "./internal/queue/following.ts"
import { type Group, groupOf, groupsOf, type GroupState, removing } from "./internal/queue/groups.ts"
import { handlingOf, type Policy, type Results } from "./internal/queue/handling.ts"
import { historyOf, historyOfAll, type Minute } from "./internal/queue/history.ts"
import { Job, Task } from "./internal/queue/job.ts"
import { type DeadLetter, lettersOf } from "./internal/queue/letters.ts"
import { type JobInfo, jobs, type JobsOptions } from "./internal/queue/listing.ts"
import { ownOf } from "./internal/queue/naming.ts"
import { type Asker, type Offered, Offerer } from "./internal/queue/offering.ts"
import { type Outcome, Outcomes } from "./internal/queue/outcomes.ts"
import { graceOf, mostConcurrency, mostOverrun, poolOf, type WorkerPool } from "./internal/queue/pool.ts"
import { type Scheduled, type ScheduleOptions, Schedules } from "./internal/queue/schedules.ts"
import { measured, type State, stateOf, stateOfAll } from "./internal/queue/state.ts"
import { take, type Taken } from "./internal/queue/taking.ts"
import { type OfferOptions, timeOf, whole, wishOf } from "./internal/queue/wish.ts"
import { crewOf } from "./internal/queue/worker.ts"
import { type Codec, codec } from "./internal/work/codec.ts"

export {
  /**
   * A payload does not fit the schema of the queue.
   *
   * @category errors
   * @since 0.1.0
   */
  InvalidPayload
} from "./internal/hold/payload.ts"
export {
  JobFailed,
  JobTimeout,
  OfferUncertain,
  OutcomeUnknown,
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
   * A job that was put aside.
   *
   * @category models
   * @since 0.1.0
   */
  DeadLetter
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
  Priority
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
 * @category options
 * @since 0.1.0
 */
export interface ExecuteOptions extends Omit<OfferOptions, "result"> {
  /** What becomes of the job when the caller is interrupted. Default `cancel`. */
  readonly onInterrupt?: "cancel" | "continue" | undefined
}

/**
 * @category options
 * @since 0.1.0
 */
export interface RunOptions<in E = unknown> {
  /** How many jobs this process runs at a time, up to 1,024. Default 1. */
  readonly concurrency?: number | undefined
  /**
   * How often a job is attempted at most; then it is a dead letter. Default: 5, or for as long as the `retry` schedule goes on
   * if there is one. A job's own `attempts` goes first.
   */
  readonly attempts?: number | undefined
  /** When a job whose handler has failed is attempted again. Default: after 1, 2, 4 seconds and so on, up to an hour. */
  readonly retry?: Schedule.Schedule<unknown, E | JobTimeout> | undefined
  /** How long a handler may run; then it is interrupted, and has failed. A job's own `timeout` goes first. Default: for ever. */
  readonly timeout?: Duration.Input | undefined
  /**
   * How long handlers may go on after an interruption; the worker takes no more jobs meanwhile. Then the other handlers are
   * interrupted, and their jobs go back. Default: not at all.
   */
  readonly grace?: Duration.Input | undefined
  /**
   * How long a handler may go on after its interruption. Then its slot goes to another job, and the handler runs beside it. That is
   * logged and counted (`lockstep_overruns`). Default 10 seconds.
   */
  readonly overrun?: Duration.Input | undefined
}

/**
 * @category options
 * @since 0.1.0
 */
export interface PoolOptions<in E = unknown> extends RunOptions<E> {
  /** The pool ends by itself when it had no job for this long; not while Redis is away. Default: never. */
  readonly idle?: Duration.Input | undefined
}

/**
 * @category options
 * @since 0.1.0
 */
export interface TakeOptions extends Pick<RunOptions, "attempts" | "retry"> {
  /** How long to wait for a job. Default: for ever. */
  readonly wait?: Duration.Input | undefined
}

/**
 * @category options
 * @since 0.1.0
 */
export interface RescheduleOptions {
  /** How long from now the job waits. */
  readonly delay?: Duration.Input | undefined
  /** When it can begin, instead of a `delay`. */
  readonly at?: DateTime.DateTime.Input | undefined
}

/**
 * @category options
 * @since 0.1.0
 */
export interface TakeBatchOptions extends Pick<RunOptions, "attempts" | "retry"> {
  /** How many jobs it takes at most: 1 to 1,024. */
  readonly max: number
  /** How long to wait for `max` jobs. Default: until the first job, and the jobs that come with it. */
  readonly wait?: Duration.Input | undefined
}

/**
 * What has become of a job that is not done.
 *
 * @category models
 * @since 0.1.0
 */
export interface Status {
  readonly state: "waiting" | "delayed" | "active"
  /** How often it was begun. */
  readonly attempts: number
}

/**
 * A queue of payloads `A`. Jobs whose outcome is kept have a result `S`, or an error `E`.
 *
 * @category models
 * @since 0.1.0
 */
export interface Queue<in out A, in out S = unknown, in out E = never> {
  readonly [TypeId]: TypeId
  readonly name: string
  /** Stores a job. Confirmed when it succeeds; if it fails with `Timeout`, it may have been stored. */
  readonly offer: (payload: A, options?: OfferOptions | undefined) => Effect.Effect<Offered, QueueError>
  /**
   * Stores jobs in their order, up to 512 with each call: all of these, or none. If it fails, some calls may have succeeded.
   */
  readonly offerAll: (
    payloads: Iterable<A>,
    options?: OfferOptions | ((payload: A) => OfferOptions) | undefined
  ) => Effect.Effect<ReadonlyArray<Offered>, QueueError>
  /**
   * For handlers of this queue: offers a job when the handler's own job is done, in the same step: both happen, or neither. No job
   * is offered if the attempt fails, or the worker has lost the job. Up to 512 for a job.
   */
  readonly followUp: (payload: A, options?: OfferOptions | undefined) => Effect.Effect<void, QueueError, Job>
  /**
   * Stores a job, and waits for its result, whichever process runs it. It fails with the error of the last attempt, as far as
   * the `error` schema describes that, or else with `JobFailed`. While Redis is away, it waits.
   */
  readonly execute: (payload: A, options?: ExecuteOptions | undefined) => Effect.Effect<S, E | QueueError>
  /** Waits for the result of a job that was offered with `result`, by its `id`, as `execute` does. */
  readonly result: (id: string) => Effect.Effect<S, E | QueueError>
  /** Runs the handler on jobs, as a worker of the queue. Ends with an error only. */
  readonly run: <E2, R>(
    handler: (payload: A) => Effect.Effect<S, E2, R>,
    options?: RunOptions<E2> | undefined
  ) => Effect.Effect<never, QueueError, Exclude<R, Job>>
  /**
   * Runs the handler on jobs, as `run` does, with a pool that can be resized, drained and shut down. It shuts down when the scope
   * closes.
   */
  readonly pool: <E2, R>(
    handler: (payload: A) => Effect.Effect<S, E2, R>,
    options?: PoolOptions<E2> | undefined
  ) => Effect.Effect<WorkerPool, QueueError, Scope.Scope | Exclude<R, Job>>
  /**
   * Takes one job into the scope, or `None` if there is none in time. The job is done when the scope closes with a success. It has
   * failed when the scope closes with a failure, and goes back when it is interrupted. Prefer `run` for many jobs.
   */
  readonly take: (
    options?: TakeOptions | undefined
  ) => Effect.Effect<Option.Option<Taken<A, S>>, QueueError, Scope.Scope>
  /**
   * Takes several jobs into the scope, as `take`: `max` of them, or the jobs that have come in time, perhaps none. How the scope
   * ends decides about all of them.
   */
  readonly takeBatch: (
    options: TakeBatchOptions
  ) => Effect.Effect<ReadonlyArray<Taken<A, S>>, QueueError, Scope.Scope>
  /** What has become of a job, by its `id`; `None` if it is done, or was never there. */
  readonly status: (id: string) => Effect.Effect<Option.Option<Status>, QueueError>
  /**
   * The values that the handler of a job has set with `Job.progress`: the latest value, if any, and then each change. Only the latest
   * change waits for a slow consumer. The stream ends when the job is done, a dead letter or removed, and at once if there is no such
   * job. While Redis is away, it waits.
   */
  readonly progress: (id: string) => Stream.Stream<unknown, QueueError>
  /** What handlers have added to the log of a job that is not done, the newest lines; empty if there is none. */
  readonly logs: (id: string) => Effect.Effect<ReadonlyArray<string>, QueueError>
  /** Removes a job that is not done, and interrupts its handler if one runs. Answers whether there was one. */
  readonly cancel: (id: string) => Effect.Effect<boolean, QueueError>
  /**
   * Has a job that waits for its retry begin now, or offers the newest dead letter of that `id` again. Answers whether it found
   * either. Redis looks at 512 dead letters with each call, the newest first.
   */
  readonly retry: (id: string) => Effect.Effect<boolean, QueueError>
  /** Ends the delay of a job, or its time until a retry. Answers whether it had one. */
  readonly promote: (id: string) => Effect.Effect<boolean, QueueError>
  /** Has a job that is not active begin after this delay, or at that time. Answers whether there was one. */
  readonly reschedule: (id: string, when: RescheduleOptions) => Effect.Effect<boolean, QueueError>
  /**
   * Replaces the payload of a job that has not begun. Answers whether there was such a job. A job whose first attempt was given back
   * has not begun.
   */
  readonly update: (id: string, payload: A) => Effect.Effect<boolean, QueueError>
  /** From now on no job begins, on any process. Jobs that have begun go on. */
  readonly pause: Effect.Effect<void, QueueError>
  /** Ends a pause, and the time that a handler has asked for with `Job.slowDown`. */
  readonly resume: Effect.Effect<void, QueueError>
  /**
   * Removes all waiting jobs, and with `delayed` the delayed jobs and retries too. Answers how many jobs it removed. Schedules go
   * on.
   */
  readonly drain: (
    options?: { readonly delayed?: boolean | undefined } | undefined
  ) => Effect.Effect<number, QueueError>
  /** Removes dead letters of at least this age. Answers how many it removed. */
  readonly clean: (age: Duration.Input) => Effect.Effect<number, QueueError>
  /**
   * Removes everything: all jobs, schedules, dead letters, ids, results and the history. Handlers that run are interrupted. Members
   * and workers stay. Answers how many jobs there were. Jobs that are offered meanwhile may be removed or not.
   */
  readonly obliterate: Effect.Effect<number, QueueError>
  readonly state: Effect.Effect<State, QueueError>
  /** A group of jobs, by the `group` that they are offered with, to look at it, and to pause, resume or purge it. */
  readonly group: (name: string) => Group
  /** The groups that have jobs, or are paused. A group that appears or changes meanwhile may be missing, or come twice. */
  readonly groups: Stream.Stream<GroupState, QueueError>
  /** The counts of each of the last 60 minutes, the oldest first. The last minute goes on. */
  readonly history: Effect.Effect<ReadonlyArray<Minute>, QueueError>
  /**
   * The jobs of a state. Waiting jobs come level by level in the order in which they begin, and jobs of groups last; delayed jobs as
   * they are due; active jobs as they were offered. Redis reads up to 64 with each call, so jobs that change meanwhile can be missing
   * or come twice.
   */
  readonly jobs: (options: JobsOptions) => Stream.Stream<JobInfo<A>, QueueError>
  /**
   * Offers a job at each time of a calendar, or at an interval: one for each tick, whichever processes are alive. A schedule of
   * this name is replaced; if its times are the same, its next tick stays. The first tick of an interval is one interval from now.
   * A calendar without a time zone is in UTC.
   */
  readonly schedule: (
    name: string,
    times: Cron.Cron | Duration.Input,
    payload: A,
    options?: ScheduleOptions | undefined
  ) => Effect.Effect<void, QueueError>
  /** Removes a schedule. Answers whether there was one. Jobs that it has offered stay. */
  readonly unschedule: (name: string) => Effect.Effect<boolean, QueueError>
  /** The schedules, in the order of their names. */
  readonly schedules: Stream.Stream<Scheduled<A>, QueueError>
  /** The next ticks of a schedule, up to 1,000; none if there is no such schedule. */
  readonly nextRuns: (name: string, count: number) => Effect.Effect<ReadonlyArray<DateTime.Utc>, QueueError>
  /** The dead letters, the oldest first. */
  readonly deadLetters: Stream.Stream<DeadLetter, QueueError>
  /**
   * Offers the jobs of dead letters again, which begin with their first attempt: those of these `letter`s, or of all that there
   * are now. Answers how many they were: one stays if another job has its `id`.
   */
  readonly replay: (letters?: ReadonlyArray<string> | undefined) => Effect.Effect<number, QueueError>
  /** Removes dead letters: these, or all. Answers how many they were. */
  readonly discard: (letters?: ReadonlyArray<string> | undefined) => Effect.Effect<number, QueueError>
}

/**
 * How a queue works, for all processes. The last `make` that sets one of `limits`, `groups`, `retention` and `letters` decides
 * about all of them.
 *
 * @category options
 * @since 0.1.0
 */
export interface Options<in out A, in out S = unknown, in out E = never> {
  /** Of the payloads. It has to decode and encode synchronously, as all of these. */
  readonly payload: Schema.Codec<A, any>
  /** Of results. Default: handlers may return anything, and results are undefined. */
  readonly success?: Schema.Codec<S, any> | undefined
  /** Of errors that `execute` and `result` fail with. Default: they fail with `JobFailed`. */
  readonly error?: Schema.Codec<E, any> | undefined
  readonly limits?: {
    /** How many jobs are active at a time, over all processes. Default: no limit. */
    readonly concurrency?: number | undefined
    /** How many jobs begin in each interval, over all processes. All of `jobs` can begin at once. Default: no limit. */
    readonly rate?: { readonly jobs: number; readonly interval: Duration.Input } | undefined
    /** How many jobs may wait, delayed jobs included, up to 2^31. Default: no limit. */
    readonly length?: number | undefined
    /**
     * What a full queue does with the jobs of `offer`, `offerAll` and `execute`. Default `wait`.
     *
     * - `wait`: jobs wait in their process until there is room. Processes take turns, in the order in which they began to wait.
     * - `fail`: the offer fails with `QueueFull`. `offerAll` may have stored some of its jobs.
     * - `dropOldest`: the oldest job of the lowest level is removed, which may be the new one.
     */
    readonly onFull?: "wait" | "fail" | "dropOldest" | undefined
  } | undefined
  /** Of each group of jobs; see `group` of `OfferOptions`. */
  readonly groups?: {
    /**
     * How many jobs of a group are active at a time, over all processes. Default 1: they run in the order of their offers, one by
     * one, and while one waits for its retry no other job of the group begins.
     */
    readonly concurrency?: number | undefined
    /** How many jobs of a group begin in each interval, over all processes. All of `jobs` can begin at once. Default: no limit. */
    readonly rate?: { readonly jobs: number; readonly interval: Duration.Input } | undefined
  } | undefined
  /**
   * Over how many partitions the queue is spread, and so over how many primaries of a Redis Cluster: up to the coordinator's
   * `partitions`. Default: as many as the queue has, or 1. It can only be changed while the queue is empty and no process has it
   * open; until then `make` fails with `ShardsMismatch`. Jobs are in order within a shard, and `limits` are divided among them;
   * a group is in one shard.
   */
  readonly shards?: number | undefined
  /** How long ids and results of finished jobs are known: at least this long, at most twice as long. Default: 10 minutes. */
  readonly retention?: Duration.Input | undefined
  readonly letters?: {
    /** How many dead letters are kept, the newest: 1 to 1,000,000, of each shard. Default 10,000. */
    readonly length?: number | undefined
    /** How long they are kept. Default: 7 days. `Infinity` for no limit. */
    readonly age?: Duration.Input | undefined
    /** The session of a job's worker may end this often, 1 to 1,000; then the job is a dead letter. Default 3. */
    readonly crashes?: number | undefined
  } | undefined
  /** How long jobs stay with a process that died. Default: the coordinator's lease. */
  readonly lease?: Duration.Input | undefined
}

const retained = "10 minutes"

const overflows = ["wait", "fail", "dropOldest"]

const overflowOf = (onFull: string): number => {
  const overflow = overflows.indexOf(onFull)
  if (overflow < 0) throw new RangeError(`limits.onFull must be one of ${overflows.join(", ")}`)
  return overflow
}

type Limits = NonNullable<Options<any>["limits"]>

// How many jobs at a time, how many milliseconds between two of them, and how many of these may be saved up.
const limitArgs = ({ concurrency, rate }: Limits, what: string) => {
  const interval = rate === undefined ? 0 : millis(rate.interval, `${what}.rate.interval`)
  return [
    concurrency === undefined ? 0 : whole(concurrency, `${what}.concurrency`, 2 ** 31),
    rate === undefined ? 0 : interval / whole(rate.jobs, `${what}.rate.jobs`, 1_000_000),
    interval
  ] as const
}

const joinArgs = (
  { groups: { concurrency = 1, rate } = {}, letters = {}, limits = {}, retention = retained }: Options<any, any, any>
) => {
  const { length, onFull = "wait" } = limits
  const { age = "7 days", crashes = 3, length: kept = 10_000 } = letters
  return [
    ...limitArgs(limits, "limits"),
    millis(retention, "retention"),
    whole(kept, "letters.length", 1_000_000),
    Duration.isFinite(Duration.fromInputUnsafe(age)) ? millis(age, "letters.age") : 0,
    whole(crashes, "letters.crashes", 1000),
    length === undefined ? 0 : whole(length, "limits.length", 2 ** 31),
    overflowOf(onFull),
    ...limitArgs({ concurrency, rate }, "groups")
  ] as const
}

const patience = Schedule.exponential("1 second").pipe(
  Schedule.modifyDelay(({ duration }) => Effect.succeed(Duration.min(duration, Duration.hours(1))))
)

class QueueImpl<in out A, in out S, in out E> implements Queue<A, S, E> {
  readonly "~lockstep/Queue" = "~lockstep/Queue" as const
  readonly name: string
  readonly #space: Space
  readonly #place: Place
  readonly #shard: number
  // How many shards the queue has; 0: as many as it had.
  #count: number
  // Of all shards.
  #places: ReadonlyArray<Place>
  readonly #options: Options<A, S, E>
  readonly #codec: Codec<A>
  readonly #success: Codec<S> | undefined
  readonly #error: Codec<E> | undefined
  // In milliseconds.
  readonly #retention: number
  readonly #offerer: Offerer
  readonly #outcomes: Outcomes
  readonly #following: Following
  readonly #schedules: Schedules

  constructor(space: Space, name: string, options: Options<A, S, E>, shard: number) {
    this.name = name
    this.#space = space
    const { kernel } = space
    const first = kernel.partitionFor(checkName(name, "name")).index
    const partition = kernel.partitionAt((first + shard) % kernel.settings.partitions)
    this.#place = placeIn(space, partition, "queue", name, options.lease)
    this.#shard = shard
    this.#count = options.shards ?? 0
    this.#places = [this.#place]
    this.#options = options
    this.#codec = codec(options.payload, `A job of queue ${JSON.stringify(name)}`)
    const { error, success } = options
    this.#success = success && codec(success, `A result of queue ${JSON.stringify(name)}`)
    this.#error = error && codec(error, `An error of queue ${JSON.stringify(name)}`)
    this.#retention = millis(options.retention ?? retained, "retention")
    this.#offerer = new Offerer(this.#place, shard)
    this.#outcomes = new Outcomes(this.#place)
    this.#following = new Following(this.#place)
    this.#schedules = new Schedules(this.#place)
  }

  /** Answers how many shards there are. */
  readonly join: Effect.Effect<number, QueueError, Scope.Scope> = Effect.suspend(() => {
    const { groups, letters, limits, retention } = this.#options
    const given = [retention, letters, limits, groups].some((option) => option !== undefined)
    const args = joinArgs(this.#options)
    const joined = join(this.#place, {
      verb: "queue.join",
      args: () => [given, ...args, this.#count, this.#shard],
      observer: this.#observer,
      fail
    })
    const opened = Effect.flatMap(joined, ([{ id }, outcome]) => {
      if (outcome[0] === "mismatch") {
        const { namespace } = this.#space.kernel.settings
        const about = { name: this.name, namespace, shards: Number(outcome[1]), expected: this.#count }
        return Effect.fail(fail(new ShardsMismatch(about)))
      }
      this.#offerer.joined(id, limits?.length !== undefined && (limits.onFull ?? "wait") === "wait")
      this.#outcomes.joined(id)
      this.#following.joined(id)
      this.#schedules.joined(id)
      return Effect.succeed(this.#count)
    })
    return Effect.andThen(Effect.addFinalizer(() => Effect.sync(() => this.#schedules.leave())), opened)
  })

  /** Its workers work on all shards. */
  spread(shards: ReadonlyArray<QueueImpl<A, S, E>>): void {
    this.#places = shards.map((shard) => shard.#place)
  }

  readonly #observer: Observer = {
    observe: (change) => {
      if (change[0] === "outcome") this.#outcomes.told(change)
      else if (change[0] === "progress" || change[0] === "over") this.#following.told(change as never)
      else if (change[0] === "room") this.#offerer.enter()
      else if (change[0] === "ticks") this.#schedules.told(change)
      else {
        // After a loss of data, Redis does not know the number of shards any more.
        this.#count = Number(change[0])
        if (change[1] === true) this.#schedules.watch()
        this.#offerer.rejoined()
        this.#outcomes.rejoined()
        this.#following.rejoined()
      }
    },
    closed: () => {
      this.#offerer.closed()
      this.#outcomes.closed()
      this.#following.closed()
    }
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Offer
  // -------------------------------------------------------------------------------------------------------------------

  get #full(): QueueError {
    return fail(new QueueFull({ name: this.name, namespace: this.#space.kernel.settings.namespace }))
  }

  /** Whether a handler of this queue here has the job. */
  hasHanded(job: Context.Service.Shape<typeof Job>): job is Task {
    return job instanceof Task && job.place.space === this.#space && job.place.key === this.#place.key
  }

  /** An offer was not sent yet, and can take in another job. */
  get isOffering(): boolean {
    return this.#offerer.open
  }

  get #uncertain(): QueueError {
    return fail(new OfferUncertain({ name: this.name, namespace: this.#space.kernel.settings.namespace }))
  }

  #encode(payload: A): Exit.Exit<string, QueueError> {
    return Exit.mapError(this.#codec.encode(payload), fail)
  }

  readonly offer = (payload: A, options?: OfferOptions): Effect.Effect<Offered, QueueError> =>
    this.#offer(payload, options)

  // `late` is told of a job that was stored, or found, after its caller was interrupted.
  #offer(
    payload: A,
    options: OfferOptions | undefined,
    late?: (offered: Offered) => void
  ): Effect.Effect<Offered, QueueError> {
    return this.#spanned("offer", (trace) => {
      const encoded = this.#encode(payload)
      if (Exit.isFailure(encoded)) return Effect.failCause(encoded.cause)
      const wish = wishOf(encoded.value, options, trace, this.#retention)
      return Effect.callback((resume) => {
        const asker: Asker = {
          offered: (_, offered) => {
            if (offered === undefined) resume(Effect.fail(this.#uncertain))
            else if (late !== undefined && asker.gone === true) late(offered)
            else resume(Effect.succeed(offered))
          },
          full: () => resume(Effect.fail(this.#full)),
          failed: ({ reason }) => resume(Effect.fail(fail(reason)))
        }
        this.#offerer.offer(wish, asker, 0)
        // Only then it may wait for long.
        return this.#offerer.enters || late !== undefined
          ? Effect.sync(() => this.#offerer.withdraw(asker))
          : undefined
      })
    })
  }

  readonly followUp = (payload: A, options?: OfferOptions): Effect.Effect<void, QueueError, Job> =>
    Effect.flatMap(Job, (job) =>
      this.#spanned("followUp", (trace) => {
        if (!this.hasHanded(job)) {
          throw new RangeError(`followUp is for handlers of jobs of queue ${JSON.stringify(this.name)}`)
        }
        const encoded = this.#encode(payload)
        if (Exit.isFailure(encoded)) return Effect.failCause(encoded.cause)
        job.follow(wishOf(encoded.value, options, trace, this.#retention))
        return Effect.void
      }))

  readonly offerAll = (
    payloads: Iterable<A>,
    options?: OfferOptions | ((payload: A) => OfferOptions)
  ): Effect.Effect<ReadonlyArray<Offered>, QueueError> =>
    this.#spanned("offerAll", (trace) =>
      Effect.callback((resume) => {
        const asker = this.#offerAll(payloads, options, trace, resume)
        return Effect.sync(() => this.#offerer.withdraw(asker))
      }))

  // Jobs are encoded while Redis works on those before them.
  #offerAll(
    payloads: Iterable<A>,
    options: OfferOptions | ((payload: A) => OfferOptions) | undefined,
    trace: string,
    resume: (result: Effect.Effect<ReadonlyArray<Offered>, QueueError>) => void
  ): Asker {
    const { io } = this.#space.kernel
    const results: Array<Offered> = []
    const iterator = payloads[Symbol.iterator]()
    let [asked, answered, ended, over] = [0, 0, false, false]
    const end = (result: Effect.Effect<ReadonlyArray<Offered>, QueueError>) => {
      over = true
      resume(result)
    }
    const asker: Asker = {
      offered: (at: number, offered: Offered | undefined) => {
        if (over) return
        if (offered === undefined) return end(Effect.fail(this.#uncertain))
        results[at] = offered
        answered++
        if (answered === asked && ended) end(Effect.succeed(results))
        else if (asked - answered === mostAhead / 2) io.defer(() => io.defer(feed))
      },
      full: () => {
        if (!over) end(Effect.fail(this.#full))
      },
      failed: ({ reason }: CoordinatorError) => {
        if (!over) end(Effect.fail(fail(reason)))
      }
    }
    const feed = () => {
      try {
        while (!over && asker.gone !== true && !ended && asked - answered < mostAhead) {
          const next = iterator.next()
          if (next.done === true) {
            ended = true
            if (answered === asked) end(Effect.succeed(results))
            return
          }
          const encoded = this.#encode(next.value)
          if (Exit.isFailure(encoded)) return end(Effect.failCause(encoded.cause))
          const wish = wishOf(
            encoded.value,
            typeof options === "function" ? options(next.value) : options,
            trace,
            this.#retention
          )
          this.#offerer.offer(wish, asker, asked++)
        }
      } catch (cause) {
        end(Effect.die(cause))
      }
    }
    feed()
    return asker
  }

  #spanned<B>(verb: string, use: (trace: string) => Effect.Effect<B, QueueError>): Effect.Effect<B, QueueError> {
    return sending(use, `lockstep.Queue.${verb}`, "queue", this.name)
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Results
  // -------------------------------------------------------------------------------------------------------------------

  readonly execute = (payload: A, { onInterrupt = "cancel", ...options }: ExecuteOptions = {}) => {
    const cancel = ({ id }: Offered) => onInterrupt === "continue" ? Effect.void : Effect.ignore(this.cancel(id))
    // An offer may wait for room for long, so it can be interrupted too.
    const offer = this.#offer(payload, { ...options, result: true }, (offered) => void Effect.runFork(cancel(offered)))
    return Effect.uninterruptibleMask((restore) =>
      Effect.flatMap(
        restore(offer),
        (offered) => Effect.onInterrupt(restore(this.result(offered.id)), () => cancel(offered))
      )
    )
  }

  readonly result = (id: string): Effect.Effect<S, E | QueueError> =>
    Effect.flatMap(failing(this.#outcomes.await(localOf(id))), (outcome) => this.#decoded(id, outcome))

  #decoded(id: string, outcome: Outcome): Effect.Effect<S, E | QueueError> {
    const about = { name: this.name, namespace: this.#space.kernel.settings.namespace, id }
    switch (outcome[0]) {
      case "success":
        return this.#success === undefined
          ? Effect.succeed(undefined as S)
          : Exit.mapError(this.#success.decodeParsed(outcome[1]), fail)
      case "failure": {
        if (this.#error === undefined) {
          return Effect.fail(fail(new JobFailed({ ...about, outcome: "failed", error: JSON.stringify(outcome[1]) })))
        }
        const error = this.#error.decodeParsed(outcome[1])
        return Exit.isSuccess(error) ? Effect.fail(error.value) : Effect.failCause(Cause.map(error.cause, fail))
      }
      case "missing":
        return Effect.fail(fail(new OutcomeUnknown(about)))
      default:
        return Effect.fail(fail(new JobFailed({ ...about, outcome: outcome[0], error: outcome[1] ?? "" })))
    }
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Work
  // -------------------------------------------------------------------------------------------------------------------

  #policy<E2>({ attempts, retry, timeout }: Pick<RunOptions<E2>, "attempts" | "retry" | "timeout">): Policy<any> {
    const { hooks: { log }, settings: { namespace } } = this.#space.kernel
    return {
      attempts: attempts === undefined
        ? retry === undefined ? 5 : Number.POSITIVE_INFINITY
        : whole(attempts, "attempts", 1000),
      retry: retry ?? patience,
      timeout: timeout === undefined ? undefined : millis(timeout, "timeout"),
      log,
      namespace
    }
  }

  get #results(): Results {
    return { success: this.#success, error: this.#error }
  }

  get #closed(): QueueError {
    return fail(new CoordinatorClosed({ namespace: this.#space.kernel.settings.namespace }))
  }

  readonly take = (options: TakeOptions = {}): Effect.Effect<Option.Option<Taken<A, S>>, QueueError, Scope.Scope> =>
    Effect.map(this.takeBatch({ ...options, max: 1 }), ([taken]) => Option.fromUndefinedOr(taken))

  readonly takeBatch = (
    options: TakeBatchOptions
  ): Effect.Effect<ReadonlyArray<Taken<A, S>>, QueueError, Scope.Scope> =>
    Effect.suspend(() =>
      take({
        max: whole(options.max, "max", mostConcurrency),
        places: this.#places,
        payload: this.#codec,
        results: this.#results,
        policy: this.#policy(options),
        wait: options.wait === undefined ? undefined : millis(options.wait, "wait"),
        closed: () => this.#closed,
        fail
      })
    )

  readonly run = <E2, R>(
    handler: (payload: A) => Effect.Effect<S, E2, R>,
    options: RunOptions<E2> = {}
  ): Effect.Effect<never, QueueError, Exclude<R, Job>> => {
    const pool = this.#pool(handler, options)
    return Effect.scoped(Effect.flatMap(pool, (pool) => Effect.andThen(pool.await, Effect.never)))
  }

  readonly pool = <E2, R>(handler: (payload: A) => Effect.Effect<S, E2, R>, options: PoolOptions<E2> = {}) =>
    this.#pool(handler, options)

  #pool<E2, R>(
    handler: (payload: A) => Effect.Effect<S, E2, R>,
    { concurrency = 1, grace = 0, idle, overrun = mostOverrun, ...options }: PoolOptions<E2>
  ): Effect.Effect<WorkerPool, QueueError, Scope.Scope | Exclude<R, Job>> {
    whole(concurrency, "concurrency", mostConcurrency)
    const handling = handlingOf(this.#codec, this.#results, handler, this.#policy(options))
    const shared = {
      grace: graceOf(grace),
      idle: idle === undefined ? undefined : millis(idle, "idle"),
      closed: () => this.#closed,
      fail,
      place: this.#place
    }
    const over = millis(overrun, "overrun")
    return Effect.flatMap(Effect.context<Exclude<R, Job>>(), (context) => {
      const employment = { context: context as Context.Context<R>, handling, overrun: over }
      return poolOf(crewOf(employment, this.#places, concurrency), shared)
    })
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Schedules
  // -------------------------------------------------------------------------------------------------------------------

  readonly schedule = (
    name: string,
    times: Cron.Cron | Duration.Input,
    payload: A,
    options: ScheduleOptions = {}
  ): Effect.Effect<void, QueueError> =>
    Effect.suspend(() => {
      const body = this.#encode(payload)
      return Exit.isFailure(body)
        ? Effect.failCause(body.cause)
        : failing(this.#schedules.set(checkName(name, "name"), times, body.value, options))
    })

  readonly unschedule = (name: string): Effect.Effect<boolean, QueueError> =>
    failing(this.#schedules.remove(checkName(name, "name")))

  get schedules(): Stream.Stream<Scheduled<A>, QueueError> {
    return Stream.mapError(this.#schedules.all(this.#codec), ({ reason }) => fail(reason))
  }

  readonly nextRuns = (name: string, count: number): Effect.Effect<ReadonlyArray<DateTime.Utc>, QueueError> =>
    failing(this.#schedules.runs(checkName(name, "name"), count))

  // -------------------------------------------------------------------------------------------------------------------
  // Look and operate
  // -------------------------------------------------------------------------------------------------------------------

  readonly status = (id: string): Effect.Effect<Option.Option<Status>, QueueError> =>
    Effect.map(
      failing(question(this.#place, "queue.status", [localOf(id)])),
      (reply) =>
        reply[0] === "missing"
          ? Option.none()
          : Option.some({ state: reply[1] as Status["state"], attempts: reply[2] })
    )

  readonly progress = (id: string): Stream.Stream<unknown, QueueError> =>
    Stream.suspend(() => this.#following.progress(localOf(id), ({ reason }) => fail(reason)))

  readonly logs = (id: string): Effect.Effect<ReadonlyArray<string>, QueueError> =>
    Effect.map(
      failing(question(this.#place, "queue.logs", [localOf(id)])),
      (reply) => reply[0] === "missing" ? [] : reply[1] as ReadonlyArray<string>
    )

  readonly cancel = (id: string): Effect.Effect<boolean, QueueError> =>
    Effect.map(
      failing(request(this.#place, "queue.cancel", [localOf(id)])),
      ([tag]) => tag === "cancelled"
    )

  readonly promote = (id: string): Effect.Effect<boolean, QueueError> =>
    Effect.map(
      failing(request(this.#place, "queue.promote", [localOf(id)])),
      ([tag]) => tag === "promoted"
    )

  readonly retry = (id: string): Effect.Effect<boolean, QueueError> => {
    const sought = (before: string): Effect.Effect<boolean, QueueError> =>
      Effect.flatMap(failing(question(this.#place, "queue.seek", [localOf(id), before])), (reply) => {
        if (reply[0] === "missing") return Effect.succeed(false)
        return reply[0] === "more" ? sought(reply[1]) : Effect.map(this.replay([reply[1]]), (count) => count === 1)
      })
    return Effect.flatMap(this.promote(id), (promoted) => promoted ? Effect.succeed(true) : sought(""))
  }

  readonly reschedule = (id: string, when: RescheduleOptions): Effect.Effect<boolean, QueueError> =>
    Effect.suspend(() =>
      Effect.map(
        failing(request(this.#place, "queue.reschedule", [localOf(id), ...timeOf(when)])),
        ([tag]) => tag === "rescheduled"
      )
    )

  readonly update = (id: string, payload: A): Effect.Effect<boolean, QueueError> =>
    Effect.flatMap(
      Effect.suspend(() => this.#encode(payload)),
      (body) =>
        Effect.map(failing(request(this.#place, "queue.update", [localOf(id), body])), ([tag]) => tag === "updated")
    )

  get pause(): Effect.Effect<void, QueueError> {
    return Effect.asVoid(failing(request(this.#place, "queue.pause", [true])))
  }

  get resume(): Effect.Effect<void, QueueError> {
    return Effect.asVoid(failing(request(this.#place, "queue.pause", [false])))
  }

  readonly drain = ({ delayed = false }: { readonly delayed?: boolean | undefined } = {}) =>
    removing((behind) => failing(request(this.#place, "queue.drain", [delayed, behind])))

  readonly clean = (age: Duration.Input): Effect.Effect<number, QueueError> =>
    removing(() => failing(request(this.#place, "queue.clean", [millis(age, "age")])))

  get obliterate(): Effect.Effect<number, QueueError> {
    return removing(() => failing(request(this.#place, "queue.obliterate", [])))
  }

  get state(): Effect.Effect<State, QueueError> {
    return Effect.map(failing(question(this.#place, "queue.state", [])), stateOf)
  }

  readonly group = (name: string): Group => groupOf(this.#place, checkName(name, "name"), failing)

  get groups(): Stream.Stream<GroupState, QueueError> {
    return groupsOf(this.#place, failing)
  }

  get history(): Effect.Effect<ReadonlyArray<Minute>, QueueError> {
    return Effect.map(failing(question(this.#place, "queue.history", [])), ([, minutes]) => historyOf(minutes))
  }

  readonly jobs = (options: JobsOptions): Stream.Stream<JobInfo<A>, QueueError> =>
    Stream.mapError(jobs(this.#place, this.#shard, this.#codec, options), ({ reason }) => fail(reason))

  get deadLetters(): Stream.Stream<DeadLetter, QueueError> {
    return Stream.paginate(
      "",
      (behind: string) =>
        Effect.map(failing(question(this.#place, "queue.letters", [behind, pageSize])), ([, found]) => {
          const letters = lettersOf(this.#shard, found)
          const next = letters.length < pageSize
            ? Option.none()
            : Option.some(localOf(letters[letters.length - 1]!.letter))
          return [letters, next] as const
        })
    )
  }

  readonly replay = (letters?: ReadonlyArray<string>): Effect.Effect<number, QueueError> => {
    const chosen = letters === undefined
      ? Stream.map(this.deadLetters, ({ letter }) => letter)
      : Stream.fromIterable(letters)
    return Stream.mapEffect(chosen, (letter) => failing(request(this.#place, "queue.replay", [localOf(letter)])), {
      concurrency: pageSize
    }).pipe(Stream.filter(([tag]) => tag === "replayed"), Stream.runCount)
  }

  readonly discard = (letters?: ReadonlyArray<string>): Effect.Effect<number, QueueError> => {
    if (letters === undefined) return this.#discard("")
    return Effect.reduce(
      chunked(letters),
      () => 0,
      (total, ids) => Effect.map(this.#discard(ids.map(localOf).join(" ")), (count) => total + count)
    )
  }

  #discard(ids: string): Effect.Effect<number, QueueError> {
    return Effect.map(failing(request(this.#place, "queue.discard", [ids])), ([, count]) => count)
  }
}

const localOf = (id: string): string => ownOf(id)?.[1] ?? checkName(id, "id")

const pageSize = 64

// How many jobs `offerAll` encodes ahead of Redis.
const mostAhead = 2048

const failing = <A, R>(self: Effect.Effect<A, CoordinatorError, R>): Effect.Effect<A, QueueError, R> =>
  Effect.mapError(self, ({ reason }) => fail(reason))

const chunked = (ids: ReadonlyArray<string>): ReadonlyArray<ReadonlyArray<string>> =>
  Array.from({ length: Math.ceil(ids.length / pageSize) }, (_, at) => ids.slice(at * pageSize, (at + 1) * pageSize))

/**
 * A queue of several shards. A job that has an `id` is in the shard of that id. Other jobs go to the shard that the process offers
 * to at the moment.
 */
class Sharded<in out A, in out S, in out E> implements Queue<A, S, E> {
  readonly "~lockstep/Queue" = "~lockstep/Queue" as const
  readonly #shards: ReadonlyArray<QueueImpl<A, S, E>>
  readonly #first: QueueImpl<A, S, E>
  // The shard of jobs without an id.
  #current = 0

  constructor(shards: ReadonlyArray<QueueImpl<A, S, E>>) {
    this.#shards = shards
    this.#first = shards[0]!
    this.#first.spread(shards)
  }

  get name(): string {
    return this.#first.name
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Where jobs are
  // -------------------------------------------------------------------------------------------------------------------

  #home(name: string): QueueImpl<A, S, E> {
    return this.#shards[partitionOf(name, this.#shards.length)]!
  }

  #of(id: string): QueueImpl<A, S, E> {
    const own = ownOf(id)
    return own === undefined ? this.#home(checkName(id, "id")) : this.#shards[own[0]] ?? this.#first
  }

  // Jobs that are offered at the same time share a request, and so a shard.
  get #next(): QueueImpl<A, S, E> {
    if (!this.#shards[this.#current]!.isOffering) this.#current = (this.#current + 1) % this.#shards.length
    return this.#shards[this.#current]!
  }

  #for(options: OfferOptions | undefined): QueueImpl<A, S, E> {
    const named = options?.id ?? options?.dedupe?.id
    if (options?.group === undefined) return named === undefined ? this.#next : this.#home(named)
    // Jobs are looked for where their id is, and a group is in one shard.
    if (named !== undefined) {
      throw new RangeError("group goes with no id and no dedupe where a queue has several shards")
    }
    return this.#home(options.group)
  }

  #all<B>(
    use: (shard: QueueImpl<A, S, E>) => Effect.Effect<B, QueueError>
  ): Effect.Effect<ReadonlyArray<B>, QueueError> {
    return Effect.forEach(this.#shards, use, { concurrency: "unbounded" })
  }

  #sum(use: (shard: QueueImpl<A, S, E>) => Effect.Effect<number, QueueError>): Effect.Effect<number, QueueError> {
    return Effect.map(this.#all(use), (counts) => counts.reduce((sum, count) => sum + count, 0))
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Offer
  // -------------------------------------------------------------------------------------------------------------------

  readonly offer = (payload: A, options?: OfferOptions): Effect.Effect<Offered, QueueError> =>
    Effect.suspend(() => this.#for(options).offer(payload, options))

  // Up to `mostAhead` jobs at a time, some of each shard.
  readonly offerAll = (
    payloads: Iterable<A>,
    options?: OfferOptions | ((payload: A) => OfferOptions)
  ): Effect.Effect<ReadonlyArray<Offered>, QueueError> =>
    Effect.suspend(() => {
      const results: Array<Offered> = []
      const iterator = payloads[Symbol.iterator]()
      const some: Effect.Effect<ReadonlyArray<Offered>, QueueError> = Effect.suspend(() => {
        const parts = new Map<QueueImpl<A, S, E>, Array<Item<A>>>()
        let [next, ended] = [results.length, false]
        for (const to = next + mostAhead; next < to && !ended;) {
          const one = iterator.next()
          if (one.done === true) {
            ended = true
          } else {
            const chosen = typeof options === "function" ? options(one.value) : options
            const shard = chosen?.id === undefined && chosen?.dedupe === undefined && chosen?.group === undefined
              ? this.#shards[(this.#current + Math.floor(next / chunk)) % this.#shards.length]!
              : this.#for(chosen)
            const items = parts.get(shard) ?? []
            parts.set(shard, items)
            items.push({ at: next++, payload: one.value, options: chosen })
          }
        }
        const offered = Effect.forEach(parts, ([shard, items]) => {
          let at = 0
          return Effect.map(
            shard.offerAll(items.map(({ payload }) => payload), () => items[at++]!.options ?? {}),
            (found) => found.forEach((one, at) => void (results[items[at]!.at] = one))
          )
        }, { concurrency: "unbounded", discard: true })
        return Effect.flatMap(offered, () => ended ? Effect.succeed(results) : some)
      })
      return some
    })

  // The job goes to the shard of the handler's job, so no process would look for an id of its own there.
  readonly followUp = (payload: A, options?: OfferOptions): Effect.Effect<void, QueueError, Job> =>
    Effect.flatMap(Job, (job) => {
      if (options?.id !== undefined || options?.dedupe !== undefined) {
        throw new RangeError("followUp takes no id and no dedupe where a queue has several shards")
      }
      if (options?.group !== undefined && options.group !== job.group) {
        throw new RangeError("followUp takes no other group than that of its job where a queue has several shards")
      }
      const shard = this.#shards.find((shard) => shard.hasHanded(job)) ?? this.#first
      return shard.followUp(payload, options)
    })

  readonly execute = (payload: A, options?: ExecuteOptions): Effect.Effect<S, E | QueueError> =>
    Effect.suspend(() => this.#for(options).execute(payload, options))

  // -------------------------------------------------------------------------------------------------------------------
  // Work
  // -------------------------------------------------------------------------------------------------------------------

  readonly run = <E2, R>(handler: (payload: A) => Effect.Effect<S, E2, R>, options?: RunOptions<E2>) =>
    this.#first.run(handler, options)

  readonly pool = <E2, R>(handler: (payload: A) => Effect.Effect<S, E2, R>, options?: PoolOptions<E2>) =>
    this.#first.pool(handler, options)

  readonly take = (options?: TakeOptions) => this.#first.take(options)

  readonly takeBatch = (options: TakeBatchOptions) => this.#first.takeBatch(options)

  // -------------------------------------------------------------------------------------------------------------------
  // One job
  // -------------------------------------------------------------------------------------------------------------------

  readonly result = (id: string) => Effect.suspend(() => this.#of(id).result(id))

  readonly status = (id: string) => Effect.suspend(() => this.#of(id).status(id))

  readonly progress = (id: string) => Stream.suspend(() => this.#of(id).progress(id))

  readonly logs = (id: string) => Effect.suspend(() => this.#of(id).logs(id))

  readonly cancel = (id: string) => Effect.suspend(() => this.#of(id).cancel(id))

  readonly retry = (id: string) => Effect.suspend(() => this.#of(id).retry(id))

  readonly promote = (id: string) => Effect.suspend(() => this.#of(id).promote(id))

  readonly reschedule = (id: string, when: RescheduleOptions) => Effect.suspend(() => this.#of(id).reschedule(id, when))

  readonly update = (id: string, payload: A) => Effect.suspend(() => this.#of(id).update(id, payload))

  // -------------------------------------------------------------------------------------------------------------------
  // All jobs
  // -------------------------------------------------------------------------------------------------------------------

  get pause(): Effect.Effect<void, QueueError> {
    return Effect.asVoid(this.#all((shard) => shard.pause))
  }

  get resume(): Effect.Effect<void, QueueError> {
    return Effect.asVoid(this.#all((shard) => shard.resume))
  }

  readonly drain = (options?: { readonly delayed?: boolean | undefined }) => this.#sum((shard) => shard.drain(options))

  readonly clean = (age: Duration.Input): Effect.Effect<number, QueueError> => this.#sum((shard) => shard.clean(age))

  get obliterate(): Effect.Effect<number, QueueError> {
    return this.#sum((shard) => shard.obliterate)
  }

  get history(): Effect.Effect<ReadonlyArray<Minute>, QueueError> {
    return Effect.map(this.#all((shard) => shard.history), historyOfAll)
  }

  readonly jobs = ({ after = "", limit, ...options }: JobsOptions): Stream.Stream<JobInfo<A>, QueueError> => {
    const [, shard = "0", behind] = /^(?:(\d{1,4})\/)?([^]*)$/.exec(after)!
    const listed = Stream.flatMap(
      Stream.fromIterable(this.#shards.slice(Number(shard)).entries()),
      ([at, one]) => one.jobs({ ...options, limit, after: at === 0 ? behind : undefined })
    )
    return limit === undefined ? listed : Stream.take(listed, limit)
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Schedules, in the shards of their names
  // -------------------------------------------------------------------------------------------------------------------

  readonly schedule = (name: string, times: Cron.Cron | Duration.Input, payload: A, options?: ScheduleOptions) =>
    Effect.suspend(() => this.#home(checkName(name, "name")).schedule(name, times, payload, options))

  readonly unschedule = (name: string) => Effect.suspend(() => this.#home(checkName(name, "name")).unschedule(name))

  get schedules(): Stream.Stream<Scheduled<A>, QueueError> {
    return Stream.flatMap(Stream.fromIterable(this.#shards), (shard) => shard.schedules)
  }

  readonly nextRuns = (name: string, count: number) =>
    Effect.suspend(() => this.#home(checkName(name, "name")).nextRuns(name, count))

  get state(): Effect.Effect<State, QueueError> {
    return Effect.map(this.#all((shard) => shard.state), stateOfAll)
  }

  readonly group = (name: string): Group => this.#home(checkName(name, "name")).group(name)

  get groups(): Stream.Stream<GroupState, QueueError> {
    return Stream.flatMap(Stream.fromIterable(this.#shards), (shard) => shard.groups)
  }

  get deadLetters(): Stream.Stream<DeadLetter, QueueError> {
    return Stream.flatMap(Stream.fromIterable(this.#shards), (shard) => shard.deadLetters)
  }

  readonly replay = (letters?: ReadonlyArray<string>): Effect.Effect<number, QueueError> =>
    this.#sum((shard) => shard.replay(letters?.filter((letter) => this.#of(letter) === shard)))

  readonly discard = (letters?: ReadonlyArray<string>): Effect.Effect<number, QueueError> =>
    this.#sum((shard) => shard.discard(letters?.filter((letter) => this.#of(letter) === shard)))
}

interface Item<A> {
  readonly at: number
  readonly payload: A
  readonly options: OfferOptions | undefined
}

// This many consecutive jobs of a call are in one shard.
const chunk = 512

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
    const { limits, name, shards: wanted } = options
    if (wanted !== undefined) whole(wanted, "shards", space.kernel.settings.partitions)
    const first = new QueueImpl(space, name, options, 0)
    const count = yield* first.join
    if (count === 1) return first
    if (limits?.concurrency !== undefined && limits.concurrency < count) {
      throw new RangeError(`limits.concurrency must not be less than the number of shards, ${count}`)
    }
    const others = Array.from(
      { length: count - 1 },
      (_, at) => new QueueImpl(space, name, { ...options, shards: count }, at + 1)
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
 * A layer that runs a handler on jobs for as long as it is built. While Redis is away, it begins again; any other error of the
 * queue is logged, and ends it.
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
      const going = Effect.retry(queue.run(handler, options), {
        schedule: Schedule.spaced("1 second"),
        while: ({ reason }) => isAway(reason)
      })
      return Effect.forkScoped(
        Effect.tapCause(going, (cause) =>
          Cause.hasInterruptsOnly(cause)
            ? Effect.void
            : Effect.logError(`a worker of queue ${JSON.stringify(queue.name)} has ended`, cause))
      )
    })
  )

/**
 * A layer that sets a schedule of a queue when it is built, as `schedule` does. The schedule stays when the layer is closed: remove it
 * with `unschedule`.
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
 * A layer that writes the gauges of a queue for as long as it is built: how many jobs are in each state, and the age of the oldest
 * waiting job. One process is enough.
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
        Effect.catch((error) => Effect.logDebug(`queue ${JSON.stringify(queue.name)} could not be measured`, error)),
        Effect.repeat(Schedule.spaced(Duration.millis(millis(every, "every")))),
        Effect.forkScoped
      ))
  )
