/** Runs of a flow: how they begin, how they are followed, and what they come to. */

import * as DateTime from "effect/DateTime"
import * as Deferred from "effect/Deferred"
import type * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Option from "effect/Option"
import * as Queue from "effect/Queue"
import type * as Scope from "effect/Scope"
import * as Stream from "effect/Stream"
import { checkName } from "../actor/keys.ts"
import { bounded, join } from "../hold/acquire.ts"
import type { Membership } from "../hold/membership.ts"
import type { Place } from "../hold/place.ts"
import { question, request } from "../hold/request.ts"
import { spanning } from "../hold/span.ts"
import type { Outcome } from "../queue/outcomes.ts"
import { untilBack } from "../work/patience.ts"
import {
  fail,
  FlowCancelled,
  type FlowError,
  FlowExpired,
  NodeFailed,
  NodeSkipped,
  NodeUnknown,
  RunMismatch,
  RunUnknown
} from "./errors.ts"
import { type Graph, type Layout, partsOf, resultIn } from "./graph.ts"
import { type About, type Ended, failing, type Home, type StateLetter } from "./home.ts"

/**
 * - `blocked`: nodes before it have not ended.
 * - `ready`: it is about to be offered to its queue.
 * - `active`: its job is in its queue, or runs.
 * - `done`, `failed`, `skipped`, `cancelled`: it has ended.
 * - `compensated`: it was done, and its compensation too.
 */
export type NodeState = "blocked" | "ready" | "active" | "done" | "failed" | "skipped" | "cancelled" | "compensated"

export type RunState =
  | "loading"
  | "running"
  | "compensating"
  | "done"
  | "failed"
  | "cancelled"
  | "expired"

export interface NodeInfo {
  readonly name: string
  readonly queue: string
  readonly state: NodeState
  /** How often it was retried. */
  readonly retries: number
}

export interface Change {
  readonly node: string
  readonly queue: string
  readonly state: NodeState
}

export interface Status {
  readonly state: RunState
  readonly nodes: number
  /** How many nodes are in each state. */
  readonly counts: { readonly [state in NodeState]: number }
  readonly startedAt: DateTime.Utc | undefined
  readonly endedAt: DateTime.Utc | undefined
}

const letters: ReadonlyArray<readonly [StateLetter, NodeState]> = [
  ["b", "blocked"],
  ["r", "ready"],
  ["a", "active"],
  ["d", "done"],
  ["f", "failed"],
  ["s", "skipped"],
  ["c", "cancelled"],
  ["x", "compensated"]
]

const stateOf = new Map(letters)

export const states: ReadonlyArray<RunState> = [
  "loading",
  "running",
  "compensating",
  "done",
  "failed",
  "cancelled",
  "expired"
]

/** Of lua/Flow.lua: from here on a run is over. */
export const over = 3

export const unknown = -1

type Counts = Status["counts"]

export const countsOf = (numbers: ReadonlyArray<unknown>): Counts =>
  Object.fromEntries(letters.map(([, state], at) => [state, numbers[at]])) as unknown as Counts

const timeOf = (millis: number): DateTime.Utc | undefined => millis === 0 ? undefined : DateTime.makeUnsafe(millis)

// Redis clears them with one call.
const mostNamed = 512

type Listed = readonly [about: About, state: StateLetter, retries: number]

export interface Terms {
  /** A failure cancels what has not begun. */
  readonly stops: boolean
  /** In milliseconds, 0 for none. */
  readonly deadline: number
  readonly retention: number
  /** How many nodes there have to be before the run can end; -1 until it is sealed. Default 0. */
  readonly expected?: number
  /** The ends that its conductors are notified of. Default: none. */
  readonly told?: { readonly done: boolean; readonly failed: boolean }
}

/** Begins a run, unless there is one with that id and input. Repeated at any point, it goes on. Answers its stamp. */
export const begin = (
  home: Pick<Home, "about" | "name" | "placeOf">,
  run: string,
  input: string,
  layout: Layout,
  terms: Terms
): Effect.Effect<number, FlowError> => {
  const place = home.placeOf(run)
  const { digest, fields, nodes } = layout
  const { deadline, expected = 0, retention, stops, told } = terms
  const policy = (stops ? 1 : 0) + (told?.done ? 2 : 0) + (told?.failed ? 4 : 0)
  // Sent together: they are executed in this order, and each one does nothing where the one before has failed.
  const attempt = Effect.all([
    request(place, "flow.begin", [home.name, input, digest, nodes, expected, policy, deadline, retention]),
    Effect.forEach(
      partsOf(layout),
      (part) => request(place, "flow.load", [digest, JSON.stringify(part)]),
      { concurrency: "unbounded", discard: true }
    ),
    request(place, "flow.start", [digest, fields.length / 2])
  ], { concurrency: "unbounded" })
  return Effect.flatMap(failing(attempt), ([begun, , started]) => {
    if (begun[0] === "mismatch") return Effect.fail(fail(new RunMismatch(home.about(run))))
    // A process with another graph of the run was in between.
    return started[0] === "begun" ? Effect.succeed(started[2]) : begin(home, run, input, layout, terms)
  })
}

/** How long to wait for the end of a run. */
export interface WaitOptions {
  /** Then it fails with `WaitTimeout`, and the run goes on. Default: the `wait` that the flow or the batch was made with. */
  readonly wait?: Duration.Input | undefined
}

export type Heard = readonly [state: number, version: number, ...counts: Array<number>, expected: number, changes: any]

/**
 * A member of a run, notified of its end or of all changes; and of the state when events may have been missed. After a loss the
 * version can be less than before: Redis may have lost changes. To become one that waits for the end is a part of the wait.
 */
export const observing = (
  place: Place,
  all: boolean,
  observe: (heard: Heard) => void,
  closed: () => void,
  lost?: () => void
): Effect.Effect<readonly [Membership, unknown], FlowError, Scope.Scope> =>
  Effect.andThen(
    // The end of another member's session is good for this one: its errands go to others then.
    Effect.acquireRelease(Effect.sync(() => place.partition.watch()), (end) => Effect.sync(end)),
    join(place, {
      verb: "flow.observe",
      args: () => [all],
      observer: { observe: (heard) => observe(heard as unknown as Heard), closed, lost },
      waits: !all,
      fail
    })
  )

/** The failure of a node. */
export const failureOf = ({ queues }: Home, [[node, queue], , outcome]: Ended) => {
  const [tag, value] = (outcome ?? ["failed"]) as Outcome
  const error = tag === "failure" ? queues.get(queue)?.error?.decodeParsed(value) : undefined
  return {
    node,
    outcome: tag === "failure" ? "failed" : tag,
    error: error !== undefined && Exit.isSuccess(error) ? error.value : value ?? ""
  }
}

/** The input of a run as a process has sent it, and the stamp that Redis has answered: 0 if that is not known. */
export interface Begun {
  input: string
  stamp: number
}

export class Run {
  readonly id: string
  readonly #home: Home
  readonly #place: Place

  constructor(home: Home, id: string) {
    this.id = id
    this.#home = home
    this.#place = home.placeOf(id)
  }

  get #unknown(): FlowError {
    return fail(new RunUnknown(this.#home.about(this.id)))
  }

  get closed(): FlowError {
    return fail(this.#place.channel.closedError().reason)
  }

  page(from: number) {
    return Effect.flatMap(failing(question(this.#place, "flow.status", [from])), (reply) => {
      if (reply[0] === "missing") return Effect.fail(this.#unknown)
      const [, state, version, nodes] = reply
      return Effect.succeed({
        state: states[state]!,
        version,
        nodes,
        counts: countsOf(reply.slice(4, 12)),
        expected: reply[12],
        startedAt: timeOf(reply[14]),
        endedAt: timeOf(reply[15]),
        fault: reply[16] as Ended | null,
        next: reply[17],
        page: (reply[18] as ReadonlyArray<Listed>).map(([[name, queue], letter, retries]): NodeInfo => ({
          name,
          queue,
          state: stateOf.get(letter)!,
          retries
        })),
        stamp: reply[19]
      })
    })
  }

  get status(): Effect.Effect<Status, FlowError> {
    return Effect.map(
      this.page(Number.MAX_SAFE_INTEGER),
      ({ counts, endedAt, nodes, startedAt, state }) => ({ state, nodes, counts, startedAt, endedAt })
    )
  }

  get nodes(): Stream.Stream<NodeInfo, FlowError> {
    return Stream.paginate(
      1,
      (from: number) =>
        Effect.map(
          this.page(from),
          ({ next, page }) => [page, next === 0 ? Option.none() : Option.some(next)] as const
        )
    )
  }

  // -------------------------------------------------------------------------------------------------------------------
  // The end
  // -------------------------------------------------------------------------------------------------------------------

  /** Succeeds when the run is over. */
  get end(): Effect.Effect<void, FlowError> {
    return Effect.scoped(
      Effect.gen({ self: this }, function*() {
        const ended = yield* Deferred.make<number, FlowError>()
        yield* observing(this.#place, false, ([state]) => {
          if (state >= over || state === unknown) Deferred.doneUnsafe(ended, Exit.succeed(state))
        }, () => Deferred.doneUnsafe(ended, Exit.fail(this.closed)))
        if ((yield* Deferred.await(ended)) === unknown) yield* Effect.fail(this.#unknown)
      })
    )
  }

  /** The state of the run when it is over. One that starts again, by `retry` or `replay`, is awaited again. */
  get ended() {
    const ended = Effect.andThen(this.end, untilBack(this.page(Number.MAX_SAFE_INTEGER), "1 second"))
    return Effect.repeat(ended, { until: ({ state }) => states.indexOf(state) >= over })
  }

  get await(): Effect.Effect<any, FlowError> {
    return this.waitFor({})
  }

  readonly waitFor = ({ wait = this.#home.wait }: WaitOptions): Effect.Effect<any, FlowError> =>
    spanning(bounded(this.result, this.#place, wait, fail), "lockstep.Flow.await", "flow", this.#place.name)

  /** As `await`, for as long as it takes. */
  get result(): Effect.Effect<any, FlowError> {
    return Effect.flatMap(this.ended, ({ fault, stamp, state, version }) => {
      switch (state) {
        case "done":
          return untilBack(this.#results(version, stamp), "1 second")
        case "cancelled":
          return Effect.fail(fail(new FlowCancelled(this.#home.about(this.id))))
        case "expired":
          return Effect.fail(fail(new FlowExpired(this.#home.about(this.id))))
        default:
          return Effect.fail(fail(new NodeFailed({ ...this.#home.about(this.id), ...failureOf(this.#home, fault!) })))
      }
    })
  }

  #results(version: number, stamp: number): Effect.Effect<unknown, FlowError> {
    return Effect.gen({ self: this }, function*() {
      const graph = yield* this.#home.graphOf(this.id, stamp)
      const names = graph?.results ?? []
      const found = yield* this.#home.outcomesOf(this.id, names)
      if (graph === undefined || found === undefined) return yield* Effect.fail(this.#unknown)
      const results: Array<unknown> = []
      for (const [at, one] of found.entries()) {
        if (one === null || one[1] !== "d") {
          // It has started again meanwhile.
          if ((yield* this.page(Number.MAX_SAFE_INTEGER)).version !== version) return yield* this.result
          return yield* Effect.fail(fail(new NodeSkipped({ ...this.#home.about(this.id), node: names[at]! })))
        }
        results.push(yield* this.#home.resultOf(one))
      }
      return resultIn(graph.shape, results)
    })
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Changes
  // -------------------------------------------------------------------------------------------------------------------

  get changes(): Stream.Stream<Change, FlowError> {
    return Stream.callback<Change, FlowError>((queue) =>
      Effect.gen({ self: this }, function*() {
        const news = yield* Queue.unbounded<Heard | "lost" | undefined>()
        const known = new Map<string, NodeState>()
        const show = (name: string, of: string, state: NodeState) => {
          // The state that was read page by page can be ahead of events that come later.
          if (known.get(name) === state) return
          known.set(name, state)
          Queue.offerUnsafe(queue, { node: name, queue: of, state })
        }
        yield* observing(
          this.#place,
          true,
          (heard) => void Queue.offerUnsafe(news, heard),
          () => void Queue.offerUnsafe(news, undefined),
          () => void Queue.offerUnsafe(news, "lost")
        )
        let version = -1
        const follow = Effect.gen({ self: this }, function*() {
          for (;;) {
            const heard = yield* Queue.take(news)
            if (heard === undefined) return yield* Effect.fail(this.closed)
            if (heard === "lost") {
              version = -1
              continue
            }
            const [state, next] = heard
            if (state === unknown) return yield* Effect.fail(this.#unknown)
            const changes = heard.at(-1) as ReadonlyArray<readonly [About, StateLetter]>
            // An answer to joining again never has changes, also if there were some.
            const isComplete = version >= 0 && next === version + 1 && changes.length > 0
            if (isComplete) {
              version = next
              for (const [[name, of], letter] of changes) show(name, of, stateOf.get(letter)!)
            } else if (next > version) {
              version = yield* this.#showAll(show)
            }
            if (state >= over) return
          }
        })
        yield* Effect.forkScoped(
          Effect.onExit(follow, (exit) =>
            Effect.sync(() =>
              Exit.isSuccess(exit) ? Queue.endUnsafe(queue) : Queue.failCauseUnsafe(queue, exit.cause)
            ))
        )
      }), { bufferSize: Number.POSITIVE_INFINITY })
  }

  // Answers the version by then.
  #showAll(show: (name: string, queue: string, state: NodeState) => void): Effect.Effect<number, FlowError> {
    return Effect.gen({ self: this }, function*() {
      let version = -1
      for (let from = 1; from > 0;) {
        const found: { readonly version: number; readonly next: number; readonly page: ReadonlyArray<NodeInfo> } =
          yield* this
            .page(from)
        if (version < 0) version = found.version
        for (const { name, queue, state } of found.page) show(name, queue, state)
        from = found.next
      }
      return version
    })
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Operate
  // -------------------------------------------------------------------------------------------------------------------

  get cancel(): Effect.Effect<boolean, FlowError> {
    return this.#cancel("", 0, false)
  }

  /**
   * As `cancel`, without waiting for it; when Redis is away, as soon as it is back. A run with another input is that of another caller,
   * and so is one with another stamp, unless it is not known whether this one has begun.
   */
  abandon({ input, stamp }: Begun): Effect.Effect<void> {
    return Effect.asVoid(
      Effect.forkDetach(Effect.ignore(this.#cancel(stamp === 0 ? input : "", stamp, true)), { startImmediately: true })
    )
  }

  #cancel(input: string, stamp: number, persists: boolean): Effect.Effect<boolean, FlowError> {
    return Effect.map(
      failing(request(this.#place, "flow.cancel", [input, stamp], { persists })),
      ([tag, state]) => tag === "cancelled" && (state! < over || states[state!] === "cancelled")
    )
  }

  get retry(): Effect.Effect<boolean, FlowError> {
    return this.#retry("")
  }

  readonly replay = (names: ReadonlyArray<string>): Effect.Effect<boolean, FlowError> =>
    Effect.suspend(() => {
      const all = [...new Set(names)]
      if (all.length === 0 || all.length > mostNamed) {
        throw new RangeError(`names must have 1 to ${mostNamed} nodes, got ${all.length}`)
      }
      for (const name of all) checkName(name, "names")
      return this.#retry(JSON.stringify(all))
    })

  #retry(names: string): Effect.Effect<boolean, FlowError> {
    return Effect.suspend(() =>
      Effect.flatMap(
        failing(request(this.#place, "flow.retry", [this.#home.space.kernel.uniqueId(), names])),
        (reply) => {
          switch (reply[0]) {
            case "missing":
              return Effect.fail(this.#unknown)
            case "unknown":
              return Effect.fail(fail(new NodeUnknown({ ...this.#home.about(this.id), node: reply[1] })))
            default:
              return Effect.succeed(reply[0] === "retried")
          }
        }
      )
    )
  }

  /** The graph is known here from its start. */
  keep(stamp: number, graph: Graph): void {
    this.#home.keep(this.id, stamp, graph)
  }
}
