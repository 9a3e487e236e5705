/** Where a flow is: its runs, in one partition, and the queues of its jobs. */

import type * as Context from "effect/Context"
import type * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import type { CoordinatorError } from "../actor/errors.ts"
import type { Partition } from "../actor/kernel.ts"
import { batches, checkName } from "../actor/keys.ts"
import { describe } from "../hold/loss.ts"
import { duration, type Place, placeIn, type Space } from "../hold/place.ts"
import { question } from "../hold/request.ts"
import type { Queue } from "../queue/api.ts"
import { innerOf } from "../queue/errands.ts"
import type { Outcome } from "../queue/outcomes.ts"
import type { Codec } from "../work/codec.ts"
import { fail, type FlowError } from "./errors.ts"
import { type AnyTag, Graph, type Port } from "./graph.ts"

/** As lua/Flow.lua writes them. */
export type StateLetter = "b" | "r" | "a" | "d" | "f" | "s" | "c" | "x"

export type About = readonly [name: string, queue: string, options: Readonly<Record<string, any>>]

/** A node, its state, and the outcome of its job. */
export type Ended = readonly [about: About, state: StateLetter, outcome: Outcome | null]

// Graphs of so many runs are kept; another one is built anew from the input of its run.
const mostGraphs = 64

// The id of a job has both, and numbers.
const mostName = 450

/** Runs and jobs are named by it, up to the first "/". */
export const checkFlow = (name: string): string => {
  if (checkName(name, "name").includes("/")) throw new RangeError(`name must not contain "/"`)
  return name
}

export type IdOf<K> = K extends Context.Key<infer Id, any> ? Id : never

/** The queues of these services, by the keys of the services. */
export const portsOf = <Q extends AnyTag>(
  queues: ReadonlyArray<Q>
): Effect.Effect<ReadonlyMap<string, Port>, never, IdOf<Q>> =>
  Effect.map(
    Effect.forEach(queues, (tag) =>
      Effect.map(tag as Context.Key<IdOf<Q>, unknown>, (service): readonly [string, Port] => {
        const queue = service as Queue<any, any, any>
        const { codecs: { error, payload, success }, partitions } = innerOf(queue)
        return [tag.key, { queue, payload, success, error, shards: partitions.length }]
      })),
    (ports) =>
      new Map(ports)
  )

/** How a run has ended: its state, how many nodes it has, and has in some states, and the id of its last retry, or nothing. */
export type Over = readonly [
  state: number,
  nodes: number,
  done: number,
  failed: number,
  cancelled: number,
  retry: string
]

/** A job that is offered when a run has ended. */
export interface Callback {
  readonly port: Port
  /** Made of how the run has ended. */
  readonly payload: () => unknown
}

export class Home {
  readonly space: Space
  readonly name: string
  readonly partition: Partition
  /** By the keys of their services. */
  readonly ports: ReadonlyMap<string, Port>
  /** By their names. */
  readonly queues: ReadonlyMap<string, Port>
  readonly lease: Duration.Input | undefined
  /** How long the end of a run is waited for. */
  readonly wait: Duration.Input | undefined
  readonly input: Codec<any>
  /** The job that is offered when a run has ended, if there is one. */
  readonly callbackOf: (run: string, over: Over) => Callback | undefined
  readonly #build: (graph: Graph, input: any) => unknown
  readonly #graphs = new Map<string, Graph>()

  constructor(options: {
    readonly space: Space
    readonly name: string
    readonly ports: ReadonlyMap<string, Port>
    readonly colocate: string | undefined
    readonly lease: Duration.Input | undefined
    readonly wait: Duration.Input | undefined
    readonly input: Codec<any>
    readonly build: (graph: Graph, input: any) => unknown
    readonly callbackOf?: ((run: string, over: Over) => Callback | undefined) | undefined
  }) {
    this.space = options.space
    this.name = options.name
    const { colocate } = options
    this.partition = this.space.kernel.partitionFor(
      colocate === undefined ? this.name : checkName(colocate, "colocate")
    )
    this.ports = options.ports
    this.queues = new Map([...options.ports.values()].map((port) => [port.queue.name, port]))
    this.lease = options.lease
    this.wait = options.wait === undefined ? undefined : duration(options.wait, "wait")
    this.input = options.input
    this.callbackOf = options.callbackOf ?? (() => undefined)
    this.#build = options.build
  }

  checkId(id: string): string {
    checkName(id, "id")
    if (Buffer.byteLength(id) + Buffer.byteLength(this.name) > mostName) {
      throw new RangeError(`id must not be longer than ${mostName} bytes with the name of what it is a run of`)
    }
    return id
  }

  /** The flow or batch in log lines. */
  get subject(): string {
    const { namespace } = this.space.kernel.settings
    return this.name.startsWith(batches)
      ? describe("batch", this.name.slice(batches.length), namespace)
      : describe("flow", this.name, namespace)
  }

  /** The subject that its errors name. */
  about(run: string): { readonly name: string; readonly namespace: string; readonly run: string } {
    return { name: this.name, namespace: this.space.kernel.settings.namespace, run }
  }

  placeOf(run: string): Place {
    return placeIn(this.space, this.partition, "flow", `${this.name}/${run}`, this.lease)
  }

  /** Builds the graph of an input, checked: an error in it is a defect. */
  build(input: unknown): Graph {
    const graph = new Graph(this.name, this.ports)
    graph.shape = this.#build(graph, input)
    graph.check()
    return graph
  }

  /** The graph of a run, which is known here. The stamp distinguishes the run from others that had its id. */
  keep(run: string, stamp: number, graph: Graph): void {
    const key = `${stamp} ${run}`
    this.#graphs.delete(key)
    this.#graphs.set(key, graph)
    if (this.#graphs.size > mostGraphs) this.#graphs.delete(this.#graphs.keys().next().value!)
  }

  /** The graph of a run as the code of this process builds it, for what cannot be stored; undefined if there is no such run. */
  graphOf(run: string, stamp: number): Effect.Effect<Graph | undefined, FlowError> {
    const known = this.#graphs.get(`${stamp} ${run}`)
    if (known !== undefined) return Effect.succeed(known)
    return Effect.flatMap(this.#inputOf(run, stamp), (raw) => {
      if (raw === undefined) return Effect.undefined
      const input = this.input.decodeParsed(raw.input)
      if (Exit.isFailure(input)) return Effect.mapError(Effect.failCause(input.cause), fail)
      const graph = this.build(input.value)
      this.keep(run, stamp, graph)
      return Effect.succeed(graph)
    })
  }

  #inputOf(run: string, stamp: number): Effect.Effect<{ readonly input: unknown } | undefined, FlowError> {
    return Effect.map(
      failing(question(this.placeOf(run), "flow.status", [Number.MAX_SAFE_INTEGER])),
      (reply) => reply[0] === "missing" || reply[19] !== stamp ? undefined : { input: reply[13] }
    )
  }

  /** The ends of the nodes before a node. */
  inputsOf(run: string, node: number): Effect.Effect<ReadonlyArray<Ended>, FlowError> {
    const place = this.placeOf(run)
    return paged((from) => failing(question(place, "flow.inputs", [String(node), from])), 0)
  }

  /** The ends of nodes by their names, in this order; null for one that is not known. Undefined if the run is not known. */
  outcomesOf(
    run: string,
    names: ReadonlyArray<string>
  ): Effect.Effect<ReadonlyArray<Ended | null> | undefined, FlowError> {
    const place = this.placeOf(run)
    // A request names some of them, so that it is not too large.
    const some = names.slice(0, mostNames)
    const rest = names.slice(mostNames)
    return Effect.flatMap(
      paged<Ended | null>((from) => failing(question(place, "flow.outcomes", [JSON.stringify(some), from])), 1),
      (found) =>
        found.length < some.length || rest.length === 0
          ? Effect.succeed(found.length < some.length ? undefined : found)
          : Effect.map(this.outcomesOf(run, rest), (more) => more && [...found, ...more])
    )
  }

  /** The result of a node that is done, by the schema of its queue. */
  resultOf([[, queue], , outcome]: Ended): Exit.Exit<unknown, FlowError> {
    const success = this.queues.get(queue)?.success
    return success === undefined ? Exit.succeed(undefined) : Exit.mapError(success.decodeParsed(outcome?.[1]), fail)
  }
}

const mostNames = 256

export const failing = <A, R>(self: Effect.Effect<A, CoordinatorError, R>): Effect.Effect<A, FlowError, R> =>
  Effect.mapError(self, ({ reason }) => fail(reason))

type Paged = readonly [tag: string, next: number, page: unknown] | readonly [tag: "missing"]

// All pages. After a page of nothing, as of a run that is not known, there is no other.
const paged = <A>(
  ask: (from: number) => Effect.Effect<Paged, FlowError>,
  first: number
): Effect.Effect<ReadonlyArray<A>, FlowError> =>
  Effect.gen(function*() {
    const found: Array<A> = []
    for (let from: number | undefined = first; from !== undefined;) {
      const reply: Paged = yield* ask(from)
      if (reply[0] === "missing") return []
      const [, next, page] = reply as readonly [string, number, ReadonlyArray<A>]
      for (const one of page) found.push(one)
      from = next === 0 ? undefined : next
    }
    return found
  })
