/**
 * A batch: jobs of several queues that are awaited together. Jobs can be added while others run.
 *
 * Each run of a batch is an actor in Redis that counts its jobs, the same as that of a flow without edges. Every process that has
 * the batch open carries messages between that actor and the queues. The jobs themselves are jobs of queues, with their workers,
 * retries and limits.
 *
 * **Guarantees**
 *
 * - Each job that was added is offered once, also when processes die and messages are repeated. As jobs do, it can run more than
 *   once.
 * - A run is over when all its jobs have ended and no more can be added: it was sealed, or has had `size` jobs. Nothing polls, and all
 *   processes that await it are pushed its end.
 * - The end of a run, and the message that leads to its callback, are one step. The callback is one job: `onDone`, or else `onFailed`.
 *   A run that is retried ends again, with another one.
 * - A run with the same `id` is begun once, whichever processes begin it. All can add jobs to it, and await it.
 *
 * **Gotchas**
 *
 * - Without `size`, a run is not over until it is sealed.
 * - While no process has the batch open, nothing is lost, and jobs that were added are not offered. Open it where its workers are.
 * - `addAll` of more than 256 KiB, or of more than 128 jobs, is several steps. If it fails, also with `BatchSealed`, some jobs may have
 *   been added: repeated with the same names, it adds the others.
 * - A queue knows the id of a job for the `retention` of the queue. A job or a callback may be offered twice if a process dies
 *   between two steps, and no other goes on for longer than this `retention`: it does when the lease has run out, where it is open.
 * - In a fail-over, Redis may lose jobs, or their ends. A `deadline` bounds the wait for them, and `retry` offers again what is lost.
 * - A failed job has a dead letter in its queue. Its replay is a job of its own: the run goes on with `retry`.
 *
 * **Example** (Import files, and report when all are done)
 *
 * ```ts
 * import { Batch, Coordinator, Queue } from "lockstep"
 * import { Effect, Layer, Schema } from "effect"
 *
 * class File extends Queue.Service<File>()("file", { payload: Schema.String }) {}
 * class Report extends Queue.Service<Report>()("report", { payload: Schema.String }) {}
 *
 * class Import extends Batch.Service<Import>()("import", {
 *   queues: [File, Report],
 *   onDone: { queue: Report, payload: ({ done, id }) => `${id}: ${done} files` }
 * }) {}
 *
 * const Workers = Layer.mergeAll(
 *   Queue.worker(File, (name) => Effect.log(`importing ${name}`)),
 *   Queue.worker(Report, (text) => Effect.log(text))
 * )
 *
 * const program = Effect.gen(function*() {
 *   const batch = yield* Import
 *   const run = yield* batch.start({ id: "monday" })
 *   yield* run.addAll(File, ["a.csv", "b.csv"])
 *   yield* run.seal
 *   yield* Effect.log(yield* run.await)
 * })
 *
 * program.pipe(
 *   Effect.provide(
 *     Layer.mergeAll(Workers, Import.layer).pipe(
 *       Layer.provideMerge(Layer.mergeAll(File.layer, Report.layer)),
 *       Layer.provide(Coordinator.layerEmbedded())
 *     )
 *   ),
 *   Effect.runPromise
 * )
 * ```
 *
 * @since 0.1.0
 */

import type * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Schema from "effect/Schema"
import type * as Scope from "effect/Scope"
import type * as Stream from "effect/Stream"
import { Coordinator } from "./Coordinator.ts"
import { batches } from "./internal/actor/keys.ts"
import { type BatchError, ofBatch } from "./internal/flow/batchErrors.ts"
import {
  aboutBatch,
  type AddAllOptions,
  type Added,
  type AddOptions,
  BatchRun,
  type End,
  endOf,
  type Progress
} from "./internal/flow/batches.ts"
import { conduct } from "./internal/flow/conducting.ts"
import { type AnyTag, layoutOf, portIn, type Tag } from "./internal/flow/graph.ts"
import { checkFlow, Home, type IdOf, portsOf } from "./internal/flow/home.ts"
import { begin, type NodeInfo, type Terms, type WaitOptions } from "./internal/flow/runs.ts"
import { millis, oneOf, spaceOf, whole } from "./internal/hold/place.ts"
import { service, type ServiceClass as AnyServiceClass } from "./internal/hold/service.ts"
import { codec } from "./internal/work/codec.ts"

export {
  BatchCancelled,
  BatchError,
  BatchExpired,
  BatchFailed,
  BatchMismatch,
  BatchSealed,
  BatchUnknown
} from "./internal/flow/batchErrors.ts"
export type {
  /**
   * @category options
   * @since 0.1.0
   */
  AddAllOptions,
  /**
   * A job that was added.
   *
   * @category models
   * @since 0.1.0
   */
  Added,
  /**
   * @category options
   * @since 0.1.0
   */
  AddOptions,
  /**
   * How a run has ended.
   *
   * @category models
   * @since 0.1.0
   */
  End,
  /**
   * How a run is.
   *
   * @category models
   * @since 0.1.0
   */
  Progress
} from "./internal/flow/batches.ts"
export type {
  /**
   * The service of any queue.
   *
   * @category models
   * @since 0.1.0
   */
  AnyTag,
  /**
   * @category options
   * @since 0.1.0
   */
  Offering,
  /**
   * The service of a queue.
   *
   * @category models
   * @since 0.1.0
   */
  Tag
} from "./internal/flow/graph.ts"
export type {
  /**
   * A job of a run.
   *
   * @category models
   * @since 0.1.0
   */
  NodeInfo as JobInfo,
  /**
   * @category models
   * @since 0.1.0
   */
  NodeState as JobState,
  /**
   * How long to wait for the end of a run.
   *
   * @category options
   * @since 0.1.0
   */
  WaitOptions
} from "./internal/flow/runs.ts"
export {
  /**
   * A payload does not fit the schema of its queue.
   *
   * @category errors
   * @since 0.1.0
   */
  InvalidPayload
} from "./internal/hold/payload.ts"

/**
 * @category type IDs
 * @since 0.1.0
 */
export const TypeId: TypeId = "~lockstep/Batch"

/**
 * @category type IDs
 * @since 0.1.0
 */
export type TypeId = "~lockstep/Batch"

/**
 * A run of a batch.
 *
 * @category models
 * @since 0.1.0
 */
export interface Run {
  readonly id: string
  /**
   * Adds a job of one of the batch's queues, which is offered at once. Fails with `BatchSealed` if the run takes no more. When it fails
   * with `Timeout`, the job may have been added: repeat it with the same `name`.
   */
  readonly add: <B, S, E>(
    queue: Tag<B, S, E>,
    payload: B,
    options?: AddOptions | undefined
  ) => Effect.Effect<Added, BatchError>
  /** Adds jobs of one queue, and answers how many: those whose names are there already are left out. */
  readonly addAll: <B, S, E>(
    queue: Tag<B, S, E>,
    payloads: Iterable<B>,
    options?: AddAllOptions<B> | undefined
  ) => Effect.Effect<number, BatchError>
  /** No more jobs are added: the run is over when those have ended that were. Repeated, it changes nothing. */
  readonly seal: Effect.Effect<void, BatchError>
  /**
   * Waits for the end of the run, on any process. Fails with `BatchFailed` if a job was not done, with `BatchCancelled`, or with
   * `BatchExpired`. While Redis is away, it waits. An interruption of the caller does not touch the run.
   */
  readonly await: Effect.Effect<End, BatchError>
  /** The same with a `wait` of its own: then it fails with `WaitTimeout`, and the run goes on. */
  readonly waitFor: (options: WaitOptions) => Effect.Effect<End, BatchError>
  readonly status: Effect.Effect<Progress, BatchError>
  /** How the run is, and then every change; a slow consumer gets the latest. Ends when the run is over. */
  readonly changes: Stream.Stream<Progress, BatchError>
  /** All jobs and their states, in the order in which they were added. Redis reads up to 256 with each call. */
  readonly jobs: Stream.Stream<NodeInfo, BatchError>
  /**
   * Cancels jobs that have not begun, and interrupts the handlers of the others. Answers whether the run is cancelled:
   * false if it had ended otherwise, or there is no such run. It is over when these have ended.
   */
  readonly cancel: Effect.Effect<boolean, BatchError>
  /**
   * Begins a run again that has failed, was cancelled or has expired: all jobs that are not done are offered again, as new jobs.
   * A run that was not sealed, or has not had `size` jobs, takes more. Its next end offers a callback of its own. While the run
   * goes on, jobs that Redis may have lost are offered again. Answers false if the run is done, and there is nothing to retry, and
   * while it still stops: wait for its end first.
   */
  readonly retry: Effect.Effect<boolean, BatchError>
}

/**
 * @category options
 * @since 0.1.0
 */
export interface StartOptions {
  /**
   * Names the run: a second start with it and the same `size` is the same run, until the `retention` after its end. With the name of the
   * batch, up to 444 bytes. Default: an id of its own.
   */
  readonly id?: string | undefined
  /** How many jobs the run is to have, from 1 to 1,000,000. Then it is sealed. Default: that of the batch. */
  readonly size?: number | undefined
}

/**
 * Jobs of several queues that are awaited together.
 *
 * @category models
 * @since 0.1.0
 */
export interface Batch {
  readonly [TypeId]: TypeId
  readonly name: string
  /** Starts a run, to which jobs are added then. */
  readonly start: (options?: StartOptions | undefined) => Effect.Effect<Run, BatchError>
  /** A run by its id, which any process has started. */
  readonly attach: (id: string) => Run
}

/**
 * The payload of the jobs of a queue, by its service.
 *
 * @category models
 * @since 0.1.0
 */
export type PayloadOf<K extends AnyTag> = K extends Tag<infer B, infer _S, infer _E> ? B : never

/**
 * A job that is offered when a run is over.
 *
 * @category options
 * @since 0.1.0
 */
export interface Callback<K extends AnyTag> {
  /** One of the batch's queues. */
  readonly queue: K
  /** Makes the payload. It has to be pure: it runs on any process, and perhaps twice. While it throws, it is called again. */
  readonly payload: (end: End) => PayloadOf<K>
}

/**
 * @category options
 * @since 0.1.0
 */
export interface Options<Q extends AnyTag, D extends Q = Q, F extends Q = Q> {
  /** The queues of all jobs of the batch, and of its callbacks. */
  readonly queues: ReadonlyArray<Q>
  /** How many jobs a run is to have, from 1 to 1,000,000. Then it is sealed. Default: it is sealed by `seal`. */
  readonly size?: number | undefined
  /** The job that is offered, once for each end, when all jobs of a run are done. It is not one of the run. Default: none. */
  readonly onDone?: Callback<D> | undefined
  /**
   * The job that is offered, once for each end, when a run is over and not all of its jobs are done. It is not one of the run.
   * Default: none.
   */
  readonly onFailed?: Callback<F> | undefined
  /**
   * What the run does when a job has failed, or was cancelled. Default `finish`.
   *
   * - `finish`: the others go on, and more can be added.
   * - `cancel`: jobs that have not begun are cancelled, and no more are added. Those that have begun finish.
   */
  readonly onFailure?: "cancel" | "finish" | undefined
  /** How long a run may last; then it is cancelled, and has expired. Default: for ever. */
  readonly deadline?: Duration.Input | undefined
  /** How long a run is known after its end. Default 10 minutes. */
  readonly retention?: Duration.Input | undefined
  /** How long `await` waits for the end of a run; then it fails with `WaitTimeout`. Default: as long as it takes. */
  readonly wait?: Duration.Input | undefined
  /**
   * Where runs are kept: with the queues, topics and refs that have the same `colocate`, or that name. A job of a queue there is
   * offered in the step that adds it. Its end is known in the step that ends it. That is one call instead of four. Every process
   * has to use the same. Default: the name, behind `batch:`.
   */
  readonly colocate?: string | undefined
  /** How long messages stay with a process that died. Default: the coordinator's lease. */
  readonly lease?: Duration.Input | undefined
}

const mostJobs = 1_000_000

const sizeOf = (size: number | undefined): number => size === undefined ? -1 : whole(size, "size", mostJobs)

class BatchImpl implements Batch {
  readonly [TypeId]: TypeId = TypeId
  readonly name: string
  readonly #home: Home
  readonly #size: number
  readonly #terms: Terms

  constructor(name: string, home: Home, options: Options<any, any, any>) {
    const { deadline, onDone, onFailed, onFailure = "finish", retention = "10 minutes", size } = options
    oneOf(onFailure, "onFailure", ["cancel", "finish"])
    this.name = name
    this.#home = home
    this.#size = sizeOf(size)
    this.#terms = {
      stops: onFailure === "cancel",
      deadline: deadline === undefined ? 0 : millis(deadline, "deadline"),
      retention: millis(retention, "retention"),
      told: { done: onDone !== undefined, failed: onFailed !== undefined }
    }
  }

  readonly start = ({ id, size }: StartOptions = {}): Effect.Effect<Run, BatchError> =>
    Effect.suspend(() => {
      const home = this.#home
      const run = this.attach(id ?? home.space.kernel.uniqueId())
      const expected = size === undefined ? this.#size : sizeOf(size)
      return Effect.as(
        Effect.mapError(
          begin(home, run.id, JSON.stringify({ size: expected }), layoutOf([]), { ...this.#terms, expected }),
          ofBatch(aboutBatch(home, run.id))
        ),
        run
      )
    })

  readonly attach = (id: string): Run => new BatchRun(this.#home, this.#home.checkId(id))
}

/**
 * Opens the batch, and conducts its runs for as long as the scope is open. The name must not contain `/`.
 *
 * @category constructors
 * @since 0.1.0
 */
export const make = <Q extends AnyTag, D extends Q = never, F extends Q = never>(
  name: string,
  options: Options<Q, D, F>
): Effect.Effect<Batch, BatchError, Coordinator | Scope.Scope | IdOf<Q>> =>
  Effect.gen(function*() {
    const space = spaceOf(yield* Coordinator)
    checkFlow(name)
    const { onDone, onFailed } = options
    const ports = yield* portsOf(options.queues)
    for (const callback of [onDone, onFailed]) {
      if (callback !== undefined) portIn(ports, callback.queue, `batch ${JSON.stringify(name)}`)
    }
    const home = new Home({
      space,
      name: `${batches}${name}`,
      ports,
      colocate: options.colocate,
      lease: options.lease,
      wait: options.wait,
      // Nothing of a run is built: its jobs are all stored with their payloads.
      input: codec<any>(Schema.Unknown, `The size of batch ${JSON.stringify(name)}`, {
        kind: "batch",
        name,
        namespace: space.kernel.settings.namespace
      }),
      build: () => undefined,
      callbackOf: (run, over) => {
        const end = endOf(run, over)
        const callback: Callback<AnyTag> | undefined = end.state === "done" ? onDone : onFailed
        return callback && { port: ports.get(callback.queue.key)!, payload: () => callback.payload(end) }
      }
    })
    const batch = new BatchImpl(name, home, options)
    yield* Effect.mapError(conduct(home), ofBatch(aboutBatch(home, "")))
    return batch
  })

/**
 * The class that `Service` makes.
 *
 * @category models
 * @since 0.1.0
 */
export interface ServiceClass<in out Self, in out Name extends string, in out R>
  extends AnyServiceClass<Self, `lockstep/Batch/${Name}`, Batch, BatchError, R>
{}

/**
 * A batch as a typed service: `class Import extends Batch.Service<Import>()("import", { queues: [File] }) {}`, with `Import.layer`.
 *
 * @category constructors
 * @since 0.1.0
 */
export const Service =
  <Self>() =>
  <const Name extends string, Q extends AnyTag, D extends Q = never, F extends Q = never>(
    name: Name,
    options: Options<Q, D, F>
  ): ServiceClass<Self, Name, Coordinator | IdOf<Q>> =>
    service<Self, "Batch", Name, Batch, BatchError, Coordinator | Scope.Scope | IdOf<Q>>(
      "Batch",
      name,
      make(name, options)
    )
