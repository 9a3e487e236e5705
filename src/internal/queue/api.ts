/** The public interface of a queue, and its options. */

import type * as Cron from "effect/Cron"
import type * as DateTime from "effect/DateTime"
import type * as Duration from "effect/Duration"
import type * as Effect from "effect/Effect"
import type * as Option from "effect/Option"
import type * as Schedule from "effect/Schedule"
import type * as Schema from "effect/Schema"
import type * as Scope from "effect/Scope"
import type * as Stream from "effect/Stream"
import type { JobTimeout, QueueError } from "./errors.ts"
import type { Group, GroupState } from "./groups.ts"
import type { Minute } from "./history.ts"
import type { Job } from "./job.ts"
import type { DeadLetter, LettersOptions } from "./letters.ts"
import type { JobInfo, JobsOptions } from "./listing.ts"
import type { Offered } from "./offering.ts"
import type { WorkerPool } from "./pool.ts"
import type { Scheduled, ScheduleOptions } from "./schedules.ts"
import type { State } from "./state.ts"
import type { Taken } from "./taking.ts"
import type { OfferOptions, ResultOption } from "./wish.ts"

export interface ExecuteOptions extends Omit<OfferOptions, "result"> {
  /**
   * How long Redis keeps its outcome, at least for the `lease` of the coordinator. Default: for the queue's `retention`, or as
   * its `result` says.
   */
  readonly result?: Exclude<ResultOption, boolean> | undefined
  /** The effect on the job when the caller is interrupted, or `wait` is over, unless it was there already. Default `cancel`. */
  readonly onInterrupt?: "cancel" | "continue" | undefined
  /** How long to wait for the result; then it fails with `WaitTimeout`. Default: as long as it takes. */
  readonly wait?: Duration.Input | undefined
}

export interface AwaitOptions {
  /** How long to wait; then it fails with `WaitTimeout`. Default: as long as it takes. */
  readonly wait?: Duration.Input | undefined
}

export interface RunOptions<in E = unknown> {
  /** How many jobs this process runs at a time, up to 1,024. Default 1. */
  readonly concurrency?: number | undefined
  /**
   * How often a job is attempted at most; then it is a dead letter. Default: 5, or for as long as the `retry` schedule goes on
   * if there is one. A job's own `attempts` goes first.
   */
  readonly attempts?: number | undefined
  /**
   * When a job whose handler has failed is attempted again. A job's own `retry` goes first. Default: after 1, 2, 4 seconds and so on, up
   * to an hour.
   */
  readonly retry?: Schedule.Schedule<unknown, E | JobTimeout> | undefined
  /** How long a handler may run; then it is interrupted, and has failed. A job's own `timeout` goes first. Default: for ever. */
  readonly timeout?: Duration.Input | undefined
  /**
   * How long handlers may go on after an interruption; the worker takes no more jobs meanwhile. Then the other handlers are
   * interrupted, and their jobs return to the queue. Default: not at all.
   */
  readonly grace?: Duration.Input | undefined
  /**
   * Signals of the process that stop the worker. At the first one it takes no more jobs, and its handlers may go on for `grace`.
   * The second one ends that at once. A process with such a worker does not end by these signals on its own: use `runMain`, or a
   * handler of yours. Default: none.
   */
  readonly signals?: ReadonlyArray<NodeJS.Signals> | undefined
  /**
   * How long a handler may go on after its interruption. Then its slot goes to another job, and the handler runs beside it. That is
   * logged and counted (`lockstep_overruns`). Default 10 seconds.
   */
  readonly overrun?: Duration.Input | undefined
}

export interface PoolOptions<in E = unknown> extends RunOptions<E> {
  /** The pool ends by itself when it had no job for this long; not while Redis is away. Default: never. */
  readonly idle?: Duration.Input | undefined
}

export interface TakeOptions extends Pick<RunOptions, "attempts" | "retry"> {
  /** How long to wait for a job. Default: for ever. */
  readonly wait?: Duration.Input | undefined
}

export interface WithJobOptions<in E = unknown>
  extends Pick<RunOptions<E>, "attempts" | "overrun" | "retry" | "timeout">
{
  /** How long to wait for a job. Default: for ever. */
  readonly wait?: Duration.Input | undefined
}

export interface RescheduleOptions {
  /** How long from now the job waits. */
  readonly delay?: Duration.Input | undefined
  /** When it can begin, instead of a `delay`. */
  readonly at?: DateTime.DateTime.Input | undefined
}

export interface TakeBatchOptions extends Pick<RunOptions, "attempts" | "retry"> {
  /** How many jobs it takes at most: 1 to 1,024. */
  readonly max: number
  /** How long to wait for `max` jobs. Default: until the first job, and the jobs that come with it. */
  readonly wait?: Duration.Input | undefined
}

/**
 * The status of a job that is not done.
 */
export interface Status {
  /** `blocked`: it waits for the end of jobs that it was offered to run `after`. */
  readonly state: "waiting" | "delayed" | "blocked" | "active"
  /** How often it was begun. */
  readonly attempts: number
}

/**
 * A job of a queue with payloads `A`, by its `id`, for any process. To make a handle asks Redis for nothing, so there need not be such a
 * job.
 */
export interface JobHandle<in A, out S = unknown, out E = never> {
  readonly id: string
  /** Waits for the result of a job that was offered with `result`, as `execute` does. */
  readonly result: (options?: AwaitOptions | undefined) => Effect.Effect<S, E | QueueError>
  /** The status of the job; `None` if it is done, or was never there. */
  readonly status: Effect.Effect<Option.Option<Status>, QueueError>
  /**
   * The values that the handler has set with `Job.progress`: the latest value, if any, and then each change. Only the latest change waits
   * for a slow consumer. The stream ends when the job is done, a dead letter or removed, and at once if there is no such job. While Redis
   * is away, it waits.
   */
  readonly progress: Stream.Stream<unknown, QueueError>
  /** The newest lines that handlers have added to the log of the job while it is not done; empty if there is none. */
  readonly logs: Effect.Effect<ReadonlyArray<string>, QueueError>
  /**
   * Removes the job if it is not done, and interrupts its handler if one runs. The job keeps its slot until the handler has
   * ended. Answers whether there was one.
   */
  readonly cancel: Effect.Effect<boolean, QueueError>
  /**
   * Has a job that waits for its retry begin now, or offers the newest dead letter of that `id` again. Answers whether it found
   * either. The job keeps its `id`. Redis looks at 512 dead letters with each call, the newest first.
   */
  readonly retry: Effect.Effect<boolean, QueueError>
  /** Ends the delay of the job, or its time until a retry. Answers whether it had one. */
  readonly promote: Effect.Effect<boolean, QueueError>
  /** Has the job begin after this delay, or at that time, if it is not active. Answers whether there was one. */
  readonly reschedule: (when: RescheduleOptions) => Effect.Effect<boolean, QueueError>
  /**
   * Replaces the payload if the job has not begun. Answers whether there was such a job. A job that has returned to the queue
   * from its first attempt has not begun.
   */
  readonly update: (payload: A) => Effect.Effect<boolean, QueueError>
}

/**
 * A queue of payloads `A`. Jobs whose outcome is kept have a result `S`, or an error `E`.
 */
export interface Queue<in out A, in out S = unknown, in out E = never> {
  readonly "~lockstep/Queue": "~lockstep/Queue"
  readonly name: string
  /**
   * Stores a job. Confirmed when it succeeds; if it fails with `Timeout`, it may have been stored. Where it waits for room, `wait` bounds
   * that: then it fails with `WaitTimeout`, and the job is not stored. A job that is on its way to Redis at that moment is waited for.
   */
  readonly offer: (
    payload: A,
    options?: OfferOptions & AwaitOptions | undefined
  ) => Effect.Effect<Offered, QueueError>
  /**
   * Stores jobs in their order, up to 512 with each call, which is executed once or not at all. If it fails, some calls
   * may have succeeded; and where room or an unknown `after` refuses some jobs of a call, the others are stored. `QueueFull` says
   * which jobs are stored. Up to 2,048 jobs are encoded together: when one of them does not fit the schema, or `options` throws, none
   * of these is stored. When `wait` is over, the jobs that are stored stay.
   */
  readonly offerAll: (
    payloads: Iterable<A>,
    options?: OfferOptions & AwaitOptions | ((payload: A) => OfferOptions) | undefined
  ) => Effect.Effect<ReadonlyArray<Offered>, QueueError>
  /**
   * For handlers of jobs, of this queue or another one. Offers a job when the handler's own job is done, in the same step: both
   * happen, or neither. No job is offered if the attempt fails, or the worker has lost the job. Up to 512 for a job.
   *
   * A follow-up in another queue is stored beside the handler's queue in that step. Any process that has the handler's queue open
   * delivers it, once for the `retention` of this queue, and without regard to `limits.length`.
   */
  readonly followUp: (payload: A, options?: OfferOptions | undefined) => Effect.Effect<void, QueueError, Job>
  /**
   * Stores a job, and waits for its result, whichever process runs it. It fails with the error of the last attempt, as far as
   * the `error` schema describes that, or else with `JobFailed`. While Redis is away, it waits.
   */
  readonly execute: (payload: A, options?: ExecuteOptions | undefined) => Effect.Effect<S, E | QueueError>
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
   * Takes one job and runs the effect with it, as `run` does with its handler. The effect is interrupted when the job is not its
   * own any more, and then this fails with `JobLost`. With a success the job is done. With a failure it has failed, and this
   * fails with the same error. When this is interrupted, the job returns to the queue. `None` if no job comes in time, or the
   * effect has snoozed or discarded its job.
   */
  readonly withJob: <B extends S, E2, R>(
    use: (payload: A) => Effect.Effect<B, E2, R>,
    options?: WithJobOptions<E2> | undefined
  ) => Effect.Effect<Option.Option<B>, E2 | JobTimeout | QueueError, Exclude<R, Job>>
  /**
   * Takes one job into the scope, or `None` if there is none in time. The job is done when the scope closes with a success. It
   * has failed when the scope closes with a failure, and returns to the queue when it is interrupted. Nothing interrupts the
   * scope when the job is lost, and no `timeout` applies. Prefer `withJob` where an effect is all that needs the job, and `run`
   * for many jobs.
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
  /**
   * A job, by the `id` that it was offered with, or the one that `offer` has answered. Its handle is there to wait for the result
   * of the job, to look at the job, and to change it.
   */
  readonly job: (id: string) => JobHandle<A, S, E>
  /** From now on no job begins, on any process. Jobs that have begun go on. */
  readonly pause: Effect.Effect<void, QueueError>
  /** Ends a pause, and the time that a handler has asked for with `Job.slowDown`. */
  readonly resume: Effect.Effect<void, QueueError>
  /**
   * Removes all waiting jobs, and with `delayed` the delayed jobs, retries and blocked jobs too. Answers how many jobs it removed.
   * Schedules go on. Without `delayed`, a job that was to run after a removed one fails, or does what its `onFailure` says.
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
   * The jobs of a state. Waiting jobs come level by level in the order in which they begin, and jobs of groups last. Delayed jobs
   * come as they are due, and active jobs as they were offered. Redis reads up to 64 with each call, so jobs that change
   * meanwhile can be missing or come twice.
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
  /**
   * The next ticks of a schedule, up to 1,000; none if there is no such schedule. Dies with a `RangeError` where this process does not
   * know the time zone.
   */
  readonly nextRuns: (name: string, count: number) => Effect.Effect<ReadonlyArray<DateTime.Utc>, QueueError>
  /** All dead letters, the oldest first. */
  readonly deadLetters: Stream.Stream<DeadLetter, QueueError>
  /** The dead letters behind one of them, in pages: as `deadLetters`, of which this is a part. */
  readonly letters: (options?: LettersOptions | undefined) => Stream.Stream<DeadLetter, QueueError>
  /**
   * Offers the jobs of dead letters again, which begin with their first attempt: those of these `letter`s, or of all that there
   * are now. Answers how many they were: one stays if another job has its `id`, or while the dead letter of a job of its `after` is
   * there that has made it one.
   */
  readonly replay: (letters?: ReadonlyArray<string> | undefined) => Effect.Effect<number, QueueError>
  /** Removes dead letters: these, or all. Answers how many they were. */
  readonly discard: (letters?: ReadonlyArray<string> | undefined) => Effect.Effect<number, QueueError>
}

/**
 * How a queue works, for all processes. The last `make` that sets one of `limits`, `groups`, `retention` and `letters` decides
 * about all of them.
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
    /**
     * The mean rate at which jobs begin, over all processes: `jobs` for each `interval`. Up to `jobs` begin at once after a rest,
     * and then one each `interval / jobs`: fewer than `2 * jobs` in any interval. Default: no limit.
     */
    readonly rate?: { readonly jobs: number; readonly interval: Duration.Input } | undefined
    /** How many jobs may wait, delayed jobs included, and blocked ones not, up to 2^31. Default: no limit. */
    readonly length?: number | undefined
    /**
     * What a full queue does with the jobs of `offer`, `offerAll` and `execute`. Default `wait`.
     *
     * - `wait`: jobs wait in their process until there is room. Processes take turns, in the order in which they began to wait.
     * - `fail`: the offer fails with `QueueFull`, which says what `offerAll` has stored all the same.
     * - `dropOldest`: the oldest job of the lowest level is removed, which may be the new one.
     */
    readonly onFull?: "wait" | "fail" | "dropOldest" | undefined
  } | undefined
  /** Of each group of jobs; see `group` of `OfferOptions`. */
  readonly groups?: {
    /**
     * How many jobs of a group are active at a time, over all processes. Default 1: they run in the order of their offers, one by
     * one. While one waits for its retry, no other job of the group begins.
     */
    readonly concurrency?: number | undefined
    /** The rate at which jobs of each group begin, over all processes: as that of `limits`. Default: no limit. */
    readonly rate?: { readonly jobs: number; readonly interval: Duration.Input } | undefined
  } | undefined
  /**
   * Over how many partitions the queue is spread, and so over how many primaries of a Redis Cluster: up to the coordinator's
   * `partitions`. Default: as many as the queue has, or 1. It can only be changed while the queue is empty and no process has it
   * open; until then `make` fails with `ShardsMismatch`. Jobs are in order within a shard, and `limits` are divided among them:
   * none may be less than the number of shards. A group is in one shard.
   */
  readonly shards?: number | undefined
  /**
   * Queues, flows, topics and refs with the same `colocate` share a partition; the first shard of a queue is there. Every process has to
   * use the same. Default: the name.
   */
  readonly colocate?: string | undefined
  /** How often workers attempt a job that has no `attempts`, unless they say otherwise. Default: see `RunOptions`. */
  readonly attempts?: number | undefined
  /**
   * When workers attempt a failed job again, unless they say otherwise. It is for all jobs, or by the payload of each, so that
   * the producer can decide. Default: see `RunOptions`.
   */
  readonly retry?: Schedule.Schedule<unknown, any> | ((payload: A) => Schedule.Schedule<unknown, any>) | undefined
  /** How long the handler of a job without a `timeout` may run, unless its worker says otherwise. Not for `take`. Default: for ever. */
  readonly timeout?: Duration.Input | undefined
  /** Whether the outcomes of jobs are kept whose offer does not say, and for how long. Default false. */
  readonly result?: ResultOption | undefined
  /**
   * How long ids and results of finished jobs are known: at least this long, at most twice as long. A `result` can have a time of
   * its own. Default: 10 minutes.
   */
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
