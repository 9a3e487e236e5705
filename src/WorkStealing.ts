/**
 * A queue whose workers have jobs of their own. Each runs the jobs that it has offered itself, and a worker without jobs steals
 * from the others. It is for jobs that make more jobs. It pays where a job is best run by the worker that has made it, and where
 * some workers get more than others.
 *
 * It is a `Queue` with another order. Handlers, attempts, dead letters, results, progress, schedules and limits are those of
 * queues, and `Queue.worker`, `Queue.monitor` and `Queue.schedule` take it as one.
 *
 * **Guarantees**
 *
 * - All that a `Queue` guarantees, but for the order of jobs. A job in a deque is run once or more, as any other job, whichever
 *   worker has it in the end. While one worker lives, all jobs come to an end.
 * - A job that a process offers while it works goes to its own deque. A job that another process offers goes to the worker that
 *   is free first.
 * - A worker takes the newest job of its deque. But one of eight jobs is the oldest one, and one of eight is a job that is in no
 *   deque. So no job starves.
 * - A worker whose deque is empty takes jobs that are in no deque. Then it steals half of the oldest jobs of the longest deque, with
 *   the same call to Redis that asks for its next job. A worker that can run its own jobs itself is not stolen from.
 * - With nothing to steal a worker waits, and is pushed the next job at once. Nothing polls.
 * - When a worker dies or leaves, the jobs of its deque go to all others, ahead of other jobs.
 *
 * **Gotchas**
 *
 * - A deque is for locality, and promises no order: a job of `to` or `key` runs elsewhere when it is stolen. For order by key, use
 *   the `group` of a `Queue`.
 * - A job that is delayed, runs `after` others, is retried, replayed, or offered by a schedule goes to any worker.
 * - A process has one deque, which all its `run`, `pool` and `take` share. Two processes with the same `worker` share one too.
 * - Jobs that were delivered to a worker are not stolen. A worker has as many as its `concurrency`.
 * - All deques are in one partition, so there are no shards. A steal looks at all deques: have some hundred workers, not thousands.
 *
 * **Example** (A tree of directories)
 *
 * ```ts
 * import { Coordinator, Queue, WorkStealing } from "lockstep"
 * import { Effect, Layer, Schema } from "effect"
 *
 * class Folders extends WorkStealing.Service<Folders>()("folders", { payload: Schema.String }) {}
 *
 * const subfolders = (path: string) => Effect.succeed(path.length < 8 ? [`${path}/a`, `${path}/b`] : [])
 *
 * const Scan = Queue.worker(Folders, (path) =>
 *   Effect.gen(function*() {
 *     const folders = yield* Folders
 *     // They go to the deque of this worker, and others steal of them.
 *     yield* folders.offerAll(yield* subfolders(path))
 *   }))
 *
 * const program = Effect.gen(function*() {
 *   const folders = yield* Folders
 *   yield* folders.offer("/")
 * })
 *
 * program.pipe(
 *   Effect.provide(Scan.pipe(Layer.provideMerge(Folders.layer), Layer.provide(Coordinator.layerEmbedded()))),
 *   Effect.runPromise
 * )
 * ```
 *
 * @since 0.1.0
 */

import * as Deferred from "effect/Deferred"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Scope from "effect/Scope"
import { Coordinator } from "./Coordinator.ts"
import { spaceOf } from "./internal/hold/place.ts"
import { service, type ServiceClass as AnyServiceClass } from "./internal/hold/service.ts"
import type { AwaitOptions, ExecuteOptions, Options as QueueOptions, Queue } from "./internal/queue/api.ts"
import type { QueueError } from "./internal/queue/errors.ts"
import type { Job } from "./internal/queue/job.ts"
import type { Offered } from "./internal/queue/offering.ts"
import { Shard } from "./internal/queue/shard.ts"
import { type DealtOptions, Deque, type StealOptions, type WorkerState } from "./internal/queue/stealing.ts"

export type {
  /**
   * How a job is offered.
   *
   * @category options
   * @since 0.1.0
   */
  DealtOptions as OfferOptions,
  /**
   * The jobs that other workers may steal of the deque of this process.
   *
   * @category options
   * @since 0.1.0
   */
  StealOptions,
  /**
   * A worker, and where its jobs were from, since it has joined.
   *
   * @category models
   * @since 0.1.0
   */
  WorkerState
} from "./internal/queue/stealing.ts"

/**
 * How the queue works, as `Queue.Options` says; and how this process takes part.
 *
 * @category options
 * @since 0.1.0
 */
export interface Options<in out A, in out S = unknown, in out E = never>
  extends Omit<QueueOptions<A, S, E>, "groups" | "shards">
{
  /**
   * The name of this process as a worker. The `to` of others means it, and it decides which keys are its own. Up to 512 bytes
   * without white space. Default: a new one each time.
   */
  readonly worker?: string | undefined
  /** The jobs that others may steal of its deque. Default: anything. */
  readonly steal?: StealOptions | undefined
}

/**
 * A queue of payloads `A` with a deque for each worker. Jobs whose outcome is kept have a result `S`, or an error `E`.
 *
 * @category models
 * @since 0.1.0
 */
export interface WorkStealing<in out A, in out S = unknown, in out E = never> extends Queue<A, S, E> {
  /** The name of this process as a worker. */
  readonly worker: string
  /**
   * Stores a job: in the deque of this process while it works, in another one with `to` or `key`, or else in none. Confirmed
   * when it succeeds; if it fails with `Timeout`, it may have been stored. Where it waits for room, `wait` bounds that.
   * `priority`, `lifo` and `group` are a `RangeError`.
   */
  readonly offer: (
    payload: A,
    options?: DealtOptions & AwaitOptions | undefined
  ) => Effect.Effect<Offered, QueueError>
  /** Stores jobs in their order, up to 512 with each call, as `offerAll` of a `Queue` does. */
  readonly offerAll: (
    payloads: Iterable<A>,
    options?: DealtOptions & AwaitOptions | ((payload: A) => DealtOptions) | undefined
  ) => Effect.Effect<ReadonlyArray<Offered>, QueueError>
  /** For handlers of this queue: offers a job when the handler's own job is done, in the same step: both happen, or neither. */
  readonly followUp: (payload: A, options?: DealtOptions | undefined) => Effect.Effect<void, QueueError, Job>
  /** Stores a job, and waits for its result, whichever process runs it. While Redis is away, it waits. */
  readonly execute: (
    payload: A,
    options?: Omit<DealtOptions, "result"> & Pick<ExecuteOptions, "onInterrupt" | "result" | "wait"> | undefined
  ) => Effect.Effect<S, E | QueueError>
  /** The workers that live, with what each has done since it has joined. */
  readonly workers: Effect.Effect<ReadonlyArray<WorkerState>, QueueError>
}

class Stealing<in out A, in out S, in out E> extends Shard<A, S, E> implements WorkStealing<A, S, E> {
  readonly worker: string

  constructor(
    coordinator: Coordinator["Service"],
    { name, steal: _, worker: __, ...options }: Options<A, S, E> & { readonly name: string },
    deque: Deque
  ) {
    super(spaceOf(coordinator), name, { ...options, shards: 1 }, 0, deque)
    this.worker = deque.name
  }
}

/**
 * Opens the queue, and creates it if need be. It is open for as long as the scope is; its jobs stay. The process is a worker while it
 * has a `run` or a `pool`, and from its first `take` on.
 *
 * @category constructors
 * @since 0.1.0
 */
export const make = <A, S = unknown, E = never>(
  options: Options<A, S, E> & { readonly name: string }
): Effect.Effect<WorkStealing<A, S, E>, QueueError, Coordinator | Scope.Scope> =>
  Effect.gen(function*() {
    const coordinator = yield* Coordinator
    const { steal = {}, worker = spaceOf(coordinator).kernel.uniqueId() } = options
    const deque = new Deque(worker, steal)
    const queue = new Stealing(coordinator, options, deque)
    yield* queue.join
    const scope = yield* Effect.scope
    let stands: Deferred.Deferred<void, QueueError> | undefined
    // No caller is alone in needing it, so the interruption of one does not end it.
    deque.standing = Effect.suspend(() => {
      if (stands !== undefined) return Deferred.await(stands)
      const joined = stands = Deferred.makeUnsafe<void, QueueError>()
      const standing = Effect.onExit(Scope.provide(queue.stand, scope), (exit) => {
        if (Exit.isFailure(exit)) stands = undefined
        // The queue is closed, as the next request says.
        return Deferred.done(joined, Exit.hasInterrupts(exit) ? Exit.void : exit)
      })
      return Effect.andThen(Effect.forkIn(standing, scope), Deferred.await(joined))
    })
    return queue
  })

/**
 * The class that `Service` makes.
 *
 * @category models
 * @since 0.1.0
 */
export interface ServiceClass<in out Self, in out Name extends string, in out A, in out S, in out E>
  extends AnyServiceClass<Self, `lockstep/WorkStealing/${Name}`, WorkStealing<A, S, E>, QueueError, Coordinator>
{}

/**
 * A queue with deques as a typed service: `class Folders extends WorkStealing.Service<Folders>()("folders", { payload }) {}`, with
 * `Folders.layer`.
 *
 * @category constructors
 * @since 0.1.0
 */
export const Service = <Self>() =>
<const Name extends string, A, S = unknown, E = never>(
  name: Name,
  options: Options<A, S, E>
): ServiceClass<Self, Name, A, S, E> =>
  service<Self, "WorkStealing", Name, WorkStealing<A, S, E>, QueueError, Coordinator | Scope.Scope>(
    "WorkStealing",
    name,
    make({ ...options, name })
  )
