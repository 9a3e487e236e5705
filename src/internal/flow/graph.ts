/** The graph of a flow: as the user's code builds it, checked, and as the actor stores it. */

import type * as Context from "effect/Context"
import type * as Duration from "effect/Duration"
import * as Exit from "effect/Exit"
import { createHash } from "node:crypto"
import { checkName } from "../actor/keys.ts"
import type { InvalidPayload } from "../hold/payload.ts"
import { choice, isNone, millis, oneOf, whole } from "../hold/place.ts"
import type { Queue } from "../queue/api.ts"
import { innerOf } from "../queue/errands.ts"
import { levels, type Priority } from "../queue/wish.ts"
import type { Codec } from "../work/codec.ts"

/** The effect on a node when a node in front of it has failed. */
export type OnFailure = "fail" | "skip" | "continue"

/** @internal */
const NodeTypeId = "~lockstep/Flow/Node" as const

/** @internal */
export interface Node<out S> {
  readonly [NodeTypeId]: (_: never) => S
  /** Unique in the flow. */
  readonly name: string
  /** The name of its queue. */
  readonly queue: string
}

/** A node in front, with what becomes of this one when that has failed. */
export interface Edge<out S, out P extends OnFailure = OnFailure> {
  readonly node: Node<S>
  readonly onFailure: P
}

export type After = ReadonlyArray<Node<any> | Edge<any>>

type ResultBehind<S, P extends OnFailure> = P extends "continue" ? S | undefined : S

/** The results of the nodes in front: undefined where a node may have failed. */
export type Results<A extends After, P extends OnFailure> = {
  readonly [K in keyof A]: A[K] extends Edge<infer S, infer Q> ? ResultBehind<S, Q>
    : A[K] extends Node<infer S> ? ResultBehind<S, P>
    : never
}

/** How the job of a node is offered. */
export interface Offering {
  /** How long to wait before the job can begin, from when its node may start. */
  readonly delay?: Duration.Input | undefined
  /** As of `Queue.offer`. */
  readonly priority?: Priority | undefined
  /** As of `Queue.offer`. */
  readonly attempts?: number | undefined
  /** As of `Queue.offer`. */
  readonly timeout?: Duration.Input | undefined
  /** As of `Queue.offer`. Not where the queue has several shards. */
  readonly group?: string | undefined
}

export interface JobOptions<A extends After = After, P extends OnFailure = OnFailure> extends Offering {
  /** Unique in the flow, up to 512 bytes. Default: the name of its queue, and a number. */
  readonly name?: string | undefined
  /** The nodes that have to end before this one starts. */
  readonly after?: A | undefined
  /**
   * The effect on this node when a node in front of it has failed, or was cancelled: it fails too, it is skipped, or it starts
   * all the same. Behind a node that was skipped, `fail` skips too. Default `fail`.
   */
  readonly onFailure?: P | undefined
}

export interface ComputedOptions<A extends After, P extends OnFailure, B> extends JobOptions<A, P> {
  readonly after: A
  /**
   * Makes the payload of the results of the nodes of `after`, in their order, when these have ended. It has to be pure: it runs on any
   * process, and perhaps twice.
   */
  readonly payload: (results: Results<A, P>) => B
}

/** The service of a queue. */
export type Tag<B, S, E> = Context.Key<any, Queue<B, S, E>>

/** That of any queue. */
export type AnyTag = Context.Key<any, { readonly "~lockstep/Queue": "~lockstep/Queue" }>

/** Builds the graph of a run. */
export interface Builder {
  /** Adds a node: a job of a queue, whose payload is known or made of the results of the nodes in front of it. */
  readonly job: {
    <B, S, E, const A extends After, const P extends OnFailure = "fail">(
      queue: Tag<B, S, E>,
      options: ComputedOptions<A, P, B>
    ): Node<S>
    <B, S, E>(queue: Tag<B, S, E>, payload: B, options?: JobOptions | undefined): Node<S>
  }
  /** Adds an edge between two nodes, for graphs that `after` cannot express in one go. */
  readonly edge: (from: Node<unknown>, to: Node<unknown>, onFailure?: OnFailure | undefined) => void
  /**
   * The job that undoes a node. It is offered when the run has failed, was cancelled or has expired, and the node is done. Such jobs
   * run one by one, the last node that was done first.
   */
  readonly compensate: <S, B, T, E>(node: Node<S>, queue: Tag<B, T, E>, payload: (result: S) => B) => void
}

/** A queue, as flows need it. */
export interface Port {
  readonly queue: Queue<any, any, any>
  readonly payload: Codec<any>
  readonly success: Codec<any> | undefined
  readonly error: Codec<any> | undefined
  /** How many shards it has. */
  readonly shards: number
}

export const portIn = (ports: ReadonlyMap<string, Port>, { key }: AnyTag, what: string): Port => {
  const port = ports.get(key)
  if (port === undefined) {
    throw new RangeError(`${what} has no queue ${JSON.stringify(key)}: add it to \`queues\``)
  }
  return port
}

/** A node of the graph that is built. */
export class Vertex implements Node<any> {
  declare readonly [NodeTypeId]: (_: never) => any
  readonly name: string
  readonly port: Port
  readonly at: number
  readonly graph: Graph
  /** Of a payload that is known, or made of results. */
  readonly body: unknown
  readonly make: ((results: ReadonlyArray<unknown>) => unknown) | undefined
  readonly options: Offering
  readonly before: Array<{ readonly vertex: Vertex; readonly onFailure: OnFailure }> = []
  readonly behind: Array<{ readonly vertex: Vertex; readonly onFailure: OnFailure }> = []
  /** How many of `before` the payload is made of. */
  read = 0
  undo: { readonly port: Port; readonly make: (result: unknown) => unknown } | undefined = undefined

  constructor(
    graph: Graph,
    at: number,
    name: string,
    port: Port,
    body: unknown,
    make: ((results: ReadonlyArray<unknown>) => unknown) | undefined,
    options: Offering
  ) {
    this.graph = graph
    this.at = at
    this.name = name
    this.port = port
    this.body = body
    this.make = make
    this.options = options
  }

  get queue(): string {
    return this.port.queue.name
  }
}

const letters: { readonly [policy in OnFailure]: string } = { fail: "f", skip: "s", continue: "c" }

/** @internal */
export const letterOf = (onFailure: OnFailure): string => choice(letters, onFailure, "onFailure")

/** The options of a job as JSON, checked. */
export const offeringOf = ({ attempts, delay, group, priority, timeout }: Offering): string =>
  JSON.stringify({
    attempts: attempts === undefined ? undefined : whole(attempts, "attempts", 1000),
    delay: delay === undefined || isNone(delay) ? undefined : millis(delay, "delay"),
    group: group === undefined ? undefined : checkName(group, "group"),
    priority: priority === undefined ? undefined : oneOf(priority, "priority", levels),
    timeout: timeout === undefined ? undefined : millis(timeout, "timeout")
  })

export const checkOffering = ({ queue, shards }: Port, options: Offering): void => {
  innerOf(queue).checkOptions(options)
  if (options.group !== undefined && shards > 1) {
    throw new RangeError(`group goes with no node of queue ${JSON.stringify(queue.name)}, which has several shards`)
  }
}

/** More would be more than a process should hold in memory. */
const mostNodes = 100_000

export class Graph implements Builder {
  readonly vertices: Array<Vertex> = []
  readonly names = new Map<string, Vertex>()
  /** The nodes that the result is made of. */
  shape: unknown = undefined
  readonly #ports: ReadonlyMap<string, Port>
  readonly #counts = new Map<string, number>()
  readonly #flow: string

  constructor(flow: string, ports: ReadonlyMap<string, Port>) {
    this.#flow = flow
    this.#ports = ports
  }

  port(tag: AnyTag): Port {
    return portIn(this.#ports, tag, `flow ${JSON.stringify(this.#flow)}`)
  }

  #own(node: Node<any>): Vertex {
    if (node instanceof Vertex && node.graph === this) return node
    throw new RangeError(
      `a node of flow ${JSON.stringify(this.#flow)} is not known: nodes are those of \`job\` in the same call`
    )
  }

  #nameOf(name: string | undefined, { queue }: Port): string {
    if (name !== undefined) return checkName(name, "name")
    const count = (this.#counts.get(queue.name) ?? 0) + 1
    this.#counts.set(queue.name, count)
    return `${queue.name}-${count}`
  }

  readonly job = (tag: AnyTag, given: any, third?: JobOptions): Node<any> => {
    const port = this.port(tag)
    const computed = third === undefined && typeof given === "object" && given !== null &&
      typeof given.payload === "function" && Array.isArray(given.after)
    const options: JobOptions = computed ? given : third ?? {}
    const name = this.#nameOf(options.name, port)
    if (this.names.has(name)) {
      throw new RangeError(`flow ${JSON.stringify(this.#flow)} has two nodes named ${JSON.stringify(name)}`)
    }
    if (this.vertices.length === mostNodes) throw new RangeError(`a flow can have up to ${mostNodes} nodes`)
    checkOffering(port, options)
    const make = computed ? given.payload : undefined
    const vertex = new Vertex(this, this.vertices.length + 1, name, port, computed ? undefined : given, make, options)
    for (const one of options.after ?? []) {
      const [node, onFailure] = "node" in one ? [one.node, one.onFailure] : [one, options.onFailure ?? "fail"]
      this.edge(node, vertex, onFailure)
    }
    vertex.read = vertex.before.length
    this.vertices.push(vertex)
    this.names.set(name, vertex)
    return vertex
  }

  readonly edge = (from: Node<any>, to: Node<any>, onFailure: OnFailure = "fail"): void => {
    const [before, behind] = [this.#own(from), this.#own(to)]
    letterOf(onFailure)
    if (behind.before.some(({ vertex }) => vertex === before)) {
      throw new RangeError(`node ${JSON.stringify(to.name)} is behind node ${JSON.stringify(from.name)} twice`)
    }
    behind.before.push({ vertex: before, onFailure })
    before.behind.push({ vertex: behind, onFailure })
  }

  readonly compensate = (node: Node<any>, tag: AnyTag, make: (result: any) => unknown): void => {
    this.#own(node).undo = { port: this.port(tag), make }
  }

  /** The names of the nodes that the result is made of. */
  get results(): ReadonlyArray<string> {
    return nodesOf(this.shape).map((node) => this.#own(node).name)
  }

  /** Fails, as a defect, if nodes are in a cycle, or the result is made of something else than nodes. */
  check(): void {
    void this.results
    const open = new Map(this.vertices.map((vertex) => [vertex, vertex.before.length]))
    const ready = this.vertices.filter(({ before }) => before.length === 0)
    for (let at = 0; at < ready.length; at++) {
      for (const { vertex } of ready[at]!.behind) {
        const left = open.get(vertex)! - 1
        open.set(vertex, left)
        if (left === 0) ready.push(vertex)
      }
    }
    if (ready.length === this.vertices.length) return
    const stuck = this.vertices.filter((vertex) => open.get(vertex)! > 0).slice(0, 3).map(({ name }) =>
      JSON.stringify(name)
    )
    throw new RangeError(`the nodes of flow ${JSON.stringify(this.#flow)} are in a cycle, at ${stuck.join(", ")}`)
  }
}

/** A node, or several in a list or a record. */
export type Shape = Node<any> | ReadonlyArray<Node<any>> | { readonly [name: string]: Node<any> } | undefined

export type ResultOf<O> = O extends Node<infer S> ? S
  : O extends undefined | void ? void
  : { readonly [K in keyof O]: O[K] extends Node<infer S> ? S : never }

const nodesOf = (shape: unknown): ReadonlyArray<Node<any>> =>
  shape === undefined ? [] : shape instanceof Vertex ? [shape] : Object.values(shape as object)

/** The result in its shape, of the results of its nodes in their order. */
export const resultIn = (shape: unknown, results: ReadonlyArray<unknown>): unknown => {
  if (shape === undefined) return undefined
  if (shape instanceof Vertex) return results[0]
  if (Array.isArray(shape)) return results
  return Object.fromEntries(Object.keys(shape as object).map((name, at) => [name, results[at]]))
}

// Of lua/Flow.lua: so many edges are notified of an end at a time.
const chunk = 256

const chunked = (field: string, tokens: ReadonlyArray<string>, fields: Array<string>): number => {
  let count = 0
  for (let at = 0; at < tokens.length; at += chunk) {
    fields.push(`${field}.${count++}`, tokens.slice(at, at + chunk).join(" "))
  }
  return count
}

/** The fields of the nodes, as lua/Flow.lua describes them: field, value, field, value. */
export interface Layout {
  readonly fields: ReadonlyArray<string>
  readonly digest: string
  readonly nodes: number
}

/** One node in the order of its number, by the numbers of others. */
export interface Spec {
  readonly name: string
  readonly queue: string
  readonly options: string
  readonly payload: string | undefined
  readonly before: ReadonlyArray<number>
  readonly behind: ReadonlyArray<readonly [node: number, policy: string]>
  readonly undo: boolean
}

export const layoutOf = (specs: ReadonlyArray<Spec>): Layout => {
  const fields: Array<string> = []
  const roots: Array<string> = []
  for (const [index, { before, behind, name, options, payload, queue, undo }] of specs.entries()) {
    const at = index + 1
    // Node 0, which is done from the start, is in front of the nodes without another one.
    if (before.length === 0) roots.push(`${at}f`)
    const successors = chunked(`e${at}`, behind.map(([node, policy]) => `${node}${policy}`), fields)
    const predecessors = chunked(`b${at}`, before.map(String), fields)
    const fatal = behind.length === 0 || behind.some(([, policy]) => policy === "f")
    fields.push(
      `N${name}`,
      String(at),
      `d${at}`,
      JSON.stringify([name, queue]).slice(0, -1) + `,${options}]`,
      `n${at}`,
      `b ${Math.max(1, before.length)} 0 0 ${successors} ${predecessors} ${fatal ? 1 : 0} ${undo ? 1 : 0}`
    )
    if (payload !== undefined) fields.push(`p${at}`, payload)
  }
  const chunks = chunked("e0", roots, fields)
  fields.push("n0", `d 0 0 0 ${chunks} 0 0 0`)
  const hash = createHash("sha1")
  for (const text of fields) hash.update(text).update("\0")
  return { fields, digest: hash.digest("base64url"), nodes: specs.length }
}

/** The graph as the actor stores it. Fails with the first payload that does not fit its schema. */
export const specsOf = ({ vertices }: Graph): Exit.Exit<ReadonlyArray<Spec>, InvalidPayload> => {
  const specs: Array<Spec> = []
  for (const { before, behind, body, make, name, options, port, queue, undo } of vertices) {
    const payload = make === undefined ? port.payload.encode(body) : undefined
    if (payload !== undefined && Exit.isFailure(payload)) return Exit.failCause(payload.cause)
    specs.push({
      name,
      queue,
      options: offeringOf(options),
      payload: payload?.value,
      before: before.map(({ vertex }) => vertex.at),
      behind: behind.map(({ onFailure, vertex }) => [vertex.at, letterOf(onFailure)] as const),
      undo: undo !== undefined
    })
  }
  return Exit.succeed(specs)
}

// Of one request: texts of at most so many characters, but at least one field.
const mostTexts = 512
const mostText = 1 << 18

/** Texts in parts that one request each can carry. So many texts stay together. */
export const partsOfTexts = (
  texts: ReadonlyArray<string>,
  together: number,
  most = mostTexts
): ReadonlyArray<ReadonlyArray<string>> => {
  const parts: Array<Array<string>> = []
  let size = Number.POSITIVE_INFINITY
  for (let at = 0; at < texts.length; at += together) {
    if (size >= mostText || parts.at(-1)!.length >= most) {
      parts.push([])
      size = 0
    }
    for (const text of texts.slice(at, at + together)) {
      parts.at(-1)!.push(text)
      size += text.length
    }
  }
  return parts
}

/** The fields in parts that one request each can carry. */
export const partsOf = ({ fields }: Layout): ReadonlyArray<ReadonlyArray<string>> => partsOfTexts(fields, 2)
