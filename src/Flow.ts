/**
 * A flow: a graph of jobs of several queues. A job starts when the jobs before it have ended, on any process.
 *
 * Each run of a flow is an actor in Redis that knows its graph. Every process that has the flow open carries messages between
 * that actor and the queues. A run goes on for as long as any of these processes lives. The jobs themselves are jobs of queues,
 * with their workers, retries and limits.
 *
 * **Guarantees**
 *
 * - Each node starts once, when all nodes before it have ended, also when processes die and messages are repeated. Or it does not
 *   start, for a reason that its state shows. As jobs do, a node that has started can run more than once.
 * - The end of a job, and the message about it to its run, are one step. So are the end of a node, its effect on the nodes behind
 *   it, and the nodes that its handler has added.
 * - A run with the same `id` is begun once, whichever processes begin it. All can await it.
 * - A run is over when no node is left that could start, and no job of it runs.
 * - A graph with a cycle, with a node of another run, or with two nodes of the same name is refused before anything is sent.
 * - While no process has the flow open, nothing is lost, and nothing starts. Nothing polls.
 *
 * **Gotchas**
 *
 * - The function that builds the graph runs on every process. It has to build the same graph of the same input: no clock, no
 *   randomness. The payloads that it knows are stored with the run. Functions of results are called by any process that has the
 *   code.
 * - So the code of a node has to stay until the runs that have it are over. A process without it leaves the node to others, and warns.
 * - A queue knows the id of a job for the `retention` of the queue. A node may start twice if a conductor dies between two steps,
 *   and no other goes on for longer than this `retention`: it does when the lease has run out, where the flow is open.
 * - A deadline, and the work of large graphs, need a process that has the flow open.
 * - In a fail-over, Redis may lose jobs, or the end of a node. `retry` offers again what is lost.
 * - A failed node has a dead letter in its queue. Its replay is a job of its own: the run goes on with `retry`.
 *
 * **Example** (Two jobs, and one that needs the results of both)
 *
 * ```ts
 * import { Coordinator, Flow, Queue } from "lockstep"
 * import { Effect, Layer, Schema } from "effect"
 *
 * class Count extends Queue.Service<Count>()("count", { payload: Schema.String, success: Schema.Number }) {}
 * class Sum extends Queue.Service<Sum>()("sum", { payload: Schema.Array(Schema.Number), success: Schema.Number }) {}
 *
 * class Words extends Flow.Service<Words>()("words", { queues: [Count, Sum] }, (flow) => {
 *   const a = flow.job(Count, "to be or not to be")
 *   const b = flow.job(Count, "that is the question")
 *   return flow.job(Sum, { after: [a, b], payload: (counts) => counts })
 * }) {}
 *
 * const Workers = Layer.mergeAll(
 *   Queue.worker(Count, (text) => Effect.succeed(text.split(" ").length)),
 *   Queue.worker(Sum, (counts) => Effect.succeed(counts.reduce((a, b) => a + b, 0)))
 * )
 *
 * const program = Effect.gen(function*() {
 *   const words = yield* Words
 *   yield* Effect.log(yield* words.run())
 * })
 *
 * program.pipe(
 *   Effect.provide(
 *     Layer.mergeAll(Workers, Words.layer).pipe(
 *       Layer.provideMerge(Layer.mergeAll(Count.layer, Sum.layer)),
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
import * as Exit from "effect/Exit"
import * as Schema from "effect/Schema"
import type * as Scope from "effect/Scope"
import type * as Stream from "effect/Stream"
import { Coordinator } from "./Coordinator.ts"
import { add, type Added, type AddOptions, results } from "./internal/flow/adding.ts"
import { conduct } from "./internal/flow/conducting.ts"
import { fail, type FlowError } from "./internal/flow/errors.ts"
import {
  type AnyTag,
  type Builder,
  Graph,
  layoutOf,
  type Port,
  type ResultOf,
  type Shape,
  specsOf,
  type Tag
} from "./internal/flow/graph.ts"
import { checkFlow, Home, type IdOf, portsOf } from "./internal/flow/home.ts"
import {
  begin,
  type Begun,
  type Change,
  type NodeInfo,
  Run as Handle,
  type Status,
  type WaitOptions
} from "./internal/flow/runs.ts"
import { bounded } from "./internal/hold/acquire.ts"
import { millis, oneOf, spaceOf } from "./internal/hold/place.ts"
import { service, type ServiceClass as AnyServiceClass } from "./internal/hold/service.ts"
import { spanning } from "./internal/hold/span.ts"
import { Job } from "./internal/queue/job.ts"
import { codec } from "./internal/work/codec.ts"

export type {
  /**
   * A node that a handler has added.
   *
   * @category models
   * @since 0.1.0
   */
  Added,
  /**
   * @category options
   * @since 0.1.0
   */
  AddOptions
} from "./internal/flow/adding.ts"
export {
  FlowCancelled,
  FlowError,
  FlowExpired,
  NodeFailed,
  NodeSkipped,
  NodeUnknown,
  RunMismatch,
  RunUnknown
} from "./internal/flow/errors.ts"
export type {
  /**
   * The nodes before a node, each perhaps with the effect of its failure on that node.
   *
   * @category models
   * @since 0.1.0
   */
  After,
  /**
   * The service of any queue.
   *
   * @category models
   * @since 0.1.0
   */
  AnyTag,
  /**
   * The argument of `build`, which adds nodes to the graph.
   *
   * @category models
   * @since 0.1.0
   */
  Builder,
  /**
   * Of a job whose payload is made of results.
   *
   * @category options
   * @since 0.1.0
   */
  ComputedOptions,
  /**
   * A node in front of another, with the effect of its failure on the other one.
   *
   * @category models
   * @since 0.1.0
   */
  Edge,
  /**
   * @category options
   * @since 0.1.0
   */
  JobOptions,
  /**
   * A job of a graph, with a result `S`.
   *
   * @category models
   * @since 0.1.0
   */
  Node,
  /**
   * @category options
   * @since 0.1.0
   */
  Offering,
  /**
   * The effect on a node when a node before it has failed.
   *
   * @category models
   * @since 0.1.0
   */
  OnFailure,
  /**
   * The result of a flow, by the nodes that it is made of.
   *
   * @category models
   * @since 0.1.0
   */
  ResultOf,
  /**
   * The results of the nodes before a node.
   *
   * @category models
   * @since 0.1.0
   */
  Results,
  /**
   * The nodes that the result of a flow is made of.
   *
   * @category models
   * @since 0.1.0
   */
  Shape,
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
   * A node that is in another state now.
   *
   * @category models
   * @since 0.1.0
   */
  Change,
  /**
   * @category models
   * @since 0.1.0
   */
  NodeInfo,
  /**
   * @category models
   * @since 0.1.0
   */
  NodeState,
  /**
   * @category models
   * @since 0.1.0
   */
  RunState,
  /**
   * How a run is.
   *
   * @category models
   * @since 0.1.0
   */
  Status,
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
   * An input, a payload or a result does not fit its schema.
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
export const TypeId: TypeId = "~lockstep/Flow"

/**
 * @category type IDs
 * @since 0.1.0
 */
export type TypeId = "~lockstep/Flow"

/**
 * A run of a flow with a result `O`.
 *
 * @category models
 * @since 0.1.0
 */
export interface Run<out O> {
  readonly id: string
  /**
   * Waits for the end of the run, and answers its result. Fails with `NodeFailed`, `FlowCancelled`, `FlowExpired`, or with `NodeSkipped`
   * when a node of the result has none. While Redis is away, it waits.
   */
  readonly await: Effect.Effect<O, FlowError>
  /** The same with a `wait` of its own: then it fails with `WaitTimeout`, and the run goes on. */
  readonly waitFor: (options: WaitOptions) => Effect.Effect<O, FlowError>
  readonly status: Effect.Effect<Status, FlowError>
  /** All nodes and their states, in the order of the graph. Redis reads up to 256 with each call. */
  readonly nodes: Stream.Stream<NodeInfo, FlowError>
  /** The state of each node, and then every change. Ends when the run is over. */
  readonly changes: Stream.Stream<Change, FlowError>
  /**
   * Cancels nodes that have not begun, and interrupts the handlers of the others. Answers whether the run is cancelled:
   * false if it had ended otherwise, or there is no such run. It is over when these have ended.
   */
  readonly cancel: Effect.Effect<boolean, FlowError>
  /**
   * Begins a run again that has failed, was cancelled or has expired: all nodes that are not done, in the order of the graph.
   * While it goes on, jobs that Redis may have lost are offered again. Answers false if the run is done, and there is nothing to
   * retry, and while it still stops: wait for its end first.
   */
  readonly retry: Effect.Effect<boolean, FlowError>
  /**
   * Begins a run again that is over: the nodes of these names and all nodes behind them, although they are done. As with `retry`,
   * all nodes that are not done begin again too. The other results stay. Up to 512 names. Answers false if the run is not over,
   * and then changes nothing. Fails with `NodeUnknown` if the run has no node of a name. A node that is done is not compensated
   * before it is done again.
   */
  readonly replay: (names: ReadonlyArray<string>) => Effect.Effect<boolean, FlowError>
}

/**
 * @category options
 * @since 0.1.0
 */
export interface StartOptions {
  /**
   * Names the run: a second start with it and the same input is the same run, until the `retention` after its end. With the name of the
   * flow, up to 450 bytes. Default: an id of its own.
   */
  readonly id?: string | undefined
}

/**
 * @category options
 * @since 0.1.0
 */
export interface RunOptions extends StartOptions {
  /** The effect on the run when the caller is interrupted, or `wait` is over. Default `cancel`. */
  readonly onInterrupt?: "cancel" | "continue" | undefined
  /** How long to wait for the end of the run; then it fails with `WaitTimeout`. Default: that of the flow. */
  readonly wait?: Duration.Input | undefined
}

/**
 * A flow that takes an input `I`, and has a result `O`.
 *
 * @category models
 * @since 0.1.0
 */
export interface Flow<in I, out O> {
  readonly [TypeId]: TypeId
  readonly name: string
  /** Starts a run, and waits for its result, as `Run.await` does. */
  readonly run: (input: I, options?: RunOptions | undefined) => Effect.Effect<O, FlowError>
  /** Starts a run. */
  readonly start: (input: I, options?: StartOptions | undefined) => Effect.Effect<Run<O>, FlowError>
  /** A run by its id, which any process has started. */
  readonly attach: (id: string) => Run<O>
  /**
   * For handlers of jobs of this flow: adds a node behind the handler's own. It is added when the handler's job is done, in the step that
   * ends the node, so not if the attempt fails. Up to 512 for a job.
   */
  readonly add: <B, S, E>(
    queue: Tag<B, S, E>,
    payload: B,
    options?: AddOptions | undefined
  ) => Effect.Effect<Added, FlowError, Job>
  /** For handlers of jobs of this flow: the results of those nodes before the handler's own that are of this queue and done, by name. */
  readonly results: <B, S, E>(
    queue: Tag<B, S, E>
  ) => Effect.Effect<ReadonlyMap<string, S>, FlowError, Job>
}

/**
 * @category options
 * @since 0.1.0
 */
export interface Options<in out I, out Q extends AnyTag> {
  /** The queues of all jobs of the flow. Their `success` schemas are those of results. */
  readonly queues: ReadonlyArray<Q>
  /** Of the input of a run. Default: none. */
  readonly input?: Schema.Codec<I, any> | undefined
  /**
   * What the run does when a node has failed, and no edge handles that. Default `cancel`.
   *
   * - `cancel`: nodes that have not begun are cancelled. Those that have begun finish.
   * - `finish`: all nodes start that can.
   */
  readonly onFailure?: "cancel" | "finish" | undefined
  /** How long a run may last; then it is cancelled, and has expired. Default: for ever. */
  readonly deadline?: Duration.Input | undefined
  /** How long a run is known after its end. Default 10 minutes. */
  readonly retention?: Duration.Input | undefined
  /** How long `run` and `await` wait for the end of a run; then they fail with `WaitTimeout`. Default: as long as it takes. */
  readonly wait?: Duration.Input | undefined
  /**
   * Where runs are kept: with the queues, topics and refs that have the same `colocate`, or that name. Between nodes of queues
   * there, an edge costs one call instead of four, or two if a payload is made of results. The end of a job, its effect on the
   * nodes behind it, and the offers of their jobs are one step there. Every process has to use the same. Default: the name.
   */
  readonly colocate?: string | undefined
  /** How long messages stay with a process that died. Default: the coordinator's lease. */
  readonly lease?: Duration.Input | undefined
}

class FlowImpl<I, O> implements Flow<I, O> {
  readonly [TypeId]: TypeId = TypeId
  readonly #home: Home
  readonly #terms: { readonly stops: boolean; readonly deadline: number; readonly retention: number }

  constructor(home: Home, { deadline, onFailure = "cancel", retention = "10 minutes" }: Options<any, any>) {
    oneOf(onFailure, "onFailure", ["cancel", "finish"])
    this.#home = home
    this.#terms = {
      stops: onFailure === "cancel",
      deadline: deadline === undefined ? 0 : millis(deadline, "deadline"),
      retention: millis(retention, "retention")
    }
  }

  get name(): string {
    return this.#home.name
  }

  readonly start = (input: I, { id }: StartOptions = {}): Effect.Effect<Run<O>, FlowError> =>
    Effect.suspend(() => this.#start(input, this.#home.checkId(id ?? this.#home.space.kernel.uniqueId())))

  #start(input: I, id: string, begun: Begun = { input: "", stamp: 0 }): Effect.Effect<Handle, FlowError> {
    return Effect.suspend(() => {
      const home = this.#home
      const run = new Handle(home, id)
      const body = home.input.encode(input)
      if (Exit.isFailure(body)) return Effect.mapError(Effect.failCause(body.cause), fail)
      begun.input = body.value
      const graph = home.build(input)
      const specs = specsOf(graph)
      if (Exit.isFailure(specs)) return Effect.mapError(Effect.failCause(specs.cause), fail)
      return Effect.map(begin(home, run.id, body.value, layoutOf(specs.value), this.#terms), (stamp) => {
        run.keep(stamp, graph)
        begun.stamp = stamp
        return run
      })
    })
  }

  readonly run = (
    input: I,
    { id, onInterrupt = "cancel", wait = this.#home.wait }: RunOptions = {}
  ): Effect.Effect<O, FlowError> =>
    Effect.suspend(() => {
      const own = this.#home.checkId(id ?? this.#home.space.kernel.uniqueId())
      oneOf(onInterrupt, "onInterrupt", ["cancel", "continue"])
      const begun: Begun = { input: "", stamp: 0 }
      const started = this.#start(input, own, begun)
      // It may be interrupted as it starts: Redis executes its end behind the requests of its start.
      const running = Effect.onInterrupt(
        Effect.flatMap(started, ({ result }) => result),
        () =>
          onInterrupt === "continue" || begun.input === "" ? Effect.void : new Handle(this.#home, own).abandon(begun)
      )
      const place = this.#home.placeOf(own)
      return spanning(bounded(running, place, wait, fail), "lockstep.Flow.run", "flow", place.name)
    })

  readonly attach = (id: string): Run<O> => new Handle(this.#home, this.#home.checkId(id))

  readonly add = (queue: AnyTag, payload: unknown, options: AddOptions = {}) =>
    Effect.flatMap(Job, (job) => add(this.#home, job, this.#port(queue), payload, options))

  readonly results = (queue: AnyTag) => Effect.flatMap(Job, (job) => results(this.#home, job, this.#port(queue).queue))

  #port(queue: AnyTag): Port {
    return new Graph(this.name, this.#home.ports).port(queue)
  }
}

// The errands of batches, and of follow-ups of queues, have names that begin so.
const taken = /^(?:batch|queue):/

/**
 * Opens the flow, and conducts its runs for as long as the scope is open. The name must not contain `/`. `build` makes the graph
 * of an input. It returns the nodes that the result is made of: a node, a list or a record of nodes, or nothing.
 *
 * @category constructors
 * @since 0.1.0
 */
export const make = <Q extends AnyTag, const O extends Shape | void, I = void>(
  name: string,
  options: Options<I, Q>,
  build: (flow: Builder, input: I) => O
): Effect.Effect<Flow<I, ResultOf<O>>, FlowError, Coordinator | Scope.Scope | IdOf<Q>> =>
  Effect.gen(function*() {
    const space = spaceOf(yield* Coordinator)
    checkFlow(name)
    if (taken.test(name)) throw new RangeError(`name must not begin with "batch:" or "queue:"`)
    const ports = yield* portsOf(options.queues)
    const owner = { kind: "flow", name, namespace: space.kernel.settings.namespace }
    const input = codec<any>(options.input ?? Schema.Void, `The input of flow ${JSON.stringify(name)}`, owner)
    const home = new Home({
      space,
      name,
      ports,
      colocate: options.colocate,
      lease: options.lease,
      wait: options.wait,
      input,
      build
    })
    const flow = new FlowImpl<I, ResultOf<O>>(home, options)
    yield* conduct(home)
    return flow
  })

/**
 * The class that `Service` makes.
 *
 * @category models
 * @since 0.1.0
 */
export interface ServiceClass<in out Self, in out Name extends string, in I, out O, in out R>
  extends AnyServiceClass<Self, `lockstep/Flow/${Name}`, Flow<I, O>, FlowError, R>
{}

/**
 * A flow as a typed service: `class Etl extends Flow.Service<Etl>()("etl", { queues: [Extract, Load] }, build) {}`, with `Etl.layer`.
 *
 * @category constructors
 * @since 0.1.0
 */
export const Service =
  <Self>() =>
  <const Name extends string, Q extends AnyTag, const O extends Shape | void, I = void>(
    name: Name,
    options: Options<I, Q>,
    build: (flow: Builder, input: I) => O
  ): ServiceClass<Self, Name, I, ResultOf<O>, Coordinator | IdOf<Q>> =>
    service<Self, "Flow", Name, Flow<I, ResultOf<O>>, FlowError, Coordinator | Scope.Scope | IdOf<Q>>(
      "Flow",
      name,
      make(name, options, build)
    )
