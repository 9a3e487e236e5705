/** Batches: flows without edges, whose nodes are added while the run goes on. */

import * as Cause from "effect/Cause"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Queue from "effect/Queue"
import * as Stream from "effect/Stream"
import { batches, checkName } from "../actor/keys.ts"
import { bounded } from "../hold/acquire.ts"
import { request } from "../hold/request.ts"
import { spanning } from "../hold/span.ts"
import {
  BatchCancelled,
  type BatchError,
  BatchExpired,
  BatchFailed,
  BatchSealed,
  BatchUnknown,
  failBatch,
  ofBatch
} from "./batchErrors.ts"
import type { FlowError } from "./errors.ts"
import { type AnyTag, checkOffering, type Offering, offeringOf, partsOfTexts, portIn } from "./graph.ts"
import { failing, type Home, type Over } from "./home.ts"
import {
  countsOf,
  failureOf,
  type Heard,
  type NodeInfo,
  observing,
  over,
  Run,
  states,
  type Status,
  unknown,
  type WaitOptions
} from "./runs.ts"

/** How a run has ended. */
export interface End {
  /** The id of the run. */
  readonly id: string
  readonly state: "done" | "failed" | "cancelled" | "expired"
  /** How many jobs it has had. Each is counted as one of the following. */
  readonly jobs: number
  readonly done: number
  readonly failed: number
  readonly cancelled: number
}

/** How a run is. */
export interface Progress {
  /** How many jobs were added so far. */
  readonly added: number
  readonly done: number
  /** Dead letters, and jobs that have expired or were dropped. */
  readonly failed: number
  readonly cancelled: number
  /** How many jobs were added and have not ended: these wait for room in their queue, or for a worker, or run. */
  readonly running: number
  /** How many jobs have not ended yet, of those that were added, or of `size` where that is more. */
  readonly remaining: number
}

export interface AddOptions extends Offering {
  /**
   * Names the job in its run: another one of that name is not added. So an addition can be repeated whose answer was lost. Up to 512
   * bytes. Default: a name of its own.
   */
  readonly name?: string | undefined
}

export interface AddAllOptions<in A> extends Offering {
  /** Names each job, as in `add`, by its payload and its place, from 0 on. Default: a name of its own. */
  readonly name?: ((payload: A, at: number) => string) | undefined
}

/** A job that was added. */
export interface Added {
  readonly name: string
  /** There was a job of that name already, and no other one was added. */
  readonly duplicate: boolean
}

export const endOf = (id: string, [state, jobs, done, failed, cancelled]: Over): End => ({
  id,
  state: states[state] as End["state"],
  jobs,
  done,
  failed,
  cancelled
})

const progressOf = (
  nodes: number,
  { active, cancelled, done, failed, ready }: Status["counts"],
  expected: number
): Progress => ({
  added: nodes,
  done,
  failed,
  cancelled,
  running: ready + active,
  remaining: Math.max(nodes, expected) - done - failed - cancelled
})

// Of one request, which counts for as many: each job costs Redis what a request costs.
const mostAdded = 128

const nameIn = (addition: string, at: number): string => `${addition}-${at}`

/** The subject that errors of batches name. */
export const aboutBatch = (home: Home, run: string) => ({ ...home.about(run), name: home.name.slice(batches.length) })

/** The run of a batch. */
export class BatchRun {
  readonly id: string
  readonly #home: Home
  readonly #run: Run
  readonly #about: ReturnType<typeof aboutBatch>

  constructor(home: Home, id: string) {
    this.id = id
    this.#home = home
    this.#run = new Run(home, id)
    this.#about = aboutBatch(home, id)
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Add
  // -------------------------------------------------------------------------------------------------------------------

  readonly addAll = <A>(
    queue: AnyTag,
    payloads: Iterable<A>,
    options: AddAllOptions<A> = {}
  ): Effect.Effect<number, BatchError> => Effect.suspend(() => this.#add(queue, payloads, options))

  readonly add = (
    queue: AnyTag,
    payload: unknown,
    { name, ...offering }: AddOptions = {}
  ): Effect.Effect<Added, BatchError> =>
    Effect.suspend(() => {
      const own = this.#home.space.kernel.uniqueId()
      return Effect.map(
        this.#add(queue, [payload], { ...offering, name: name === undefined ? undefined : () => name }, own),
        (count) => ({ name: name ?? nameIn(own, 0), duplicate: count === 0 })
      )
    })

  get seal(): Effect.Effect<void, BatchError> {
    return Effect.asVoid(this.#ask("", "", true))
  }

  #add<A>(
    queue: AnyTag,
    payloads: Iterable<A>,
    { name, ...offering }: AddAllOptions<A>,
    own = this.#home.space.kernel.uniqueId()
  ): Effect.Effect<number, BatchError> {
    const port = portIn(this.#home.ports, queue, `batch ${JSON.stringify(this.#about.name)}`)
    checkOffering(port, offering)
    const more = offeringOf(offering)
    const names = new Set<string>()
    const texts: Array<string> = []
    for (const payload of payloads) {
      const body = port.payload.encode(payload)
      if (Exit.isFailure(body)) return Effect.mapError(Effect.failCause(body.cause), failBatch)
      const named = name === undefined ? nameIn(own, texts.length) : checkName(name(payload, texts.length), "name")
      if (names.has(named)) throw new RangeError(`two jobs are named ${JSON.stringify(named)}`)
      names.add(named)
      texts.push(JSON.stringify([named, port.queue.name, body.value, [], "", [], "", more]))
    }
    return Effect.map(
      Effect.forEach(
        partsOfTexts(texts, 1, mostAdded),
        (part) => this.#ask(`[${part.join(",")}]`, name === undefined ? "" : own, false, part.length),
        { concurrency: "unbounded" }
      ),
      // Only this addition knows the names that it has made itself.
      (counts) => name === undefined ? texts.length : counts.reduce((a, b) => a + b, 0)
    )
  }

  #ask(added: string, addition: string, seal: boolean, weight?: number): Effect.Effect<number, BatchError> {
    return Effect.flatMap(
      this.#mapped(failing(request(this.#home.placeOf(this.id), "flow.add", [added, addition, seal], { weight }))),
      (reply) => {
        switch (reply[0]) {
          case "added":
            return Effect.succeed(reply[1])
          case "sealed":
            return Effect.fail(failBatch(new BatchSealed(this.#about)))
          default:
            return Effect.fail(failBatch(new BatchUnknown(this.#about)))
        }
      }
    )
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Follow
  // -------------------------------------------------------------------------------------------------------------------

  get await(): Effect.Effect<End, BatchError> {
    return this.waitFor({})
  }

  readonly waitFor = ({ wait = this.#home.wait }: WaitOptions): Effect.Effect<End, BatchError> => {
    const { space } = this.#home
    const { channel } = this.#home.placeOf(this.id)
    const awaited = { kind: "batch", name: `${this.#about.name}/${this.id}`, channel, space }
    return spanning(
      bounded(this.#ended, awaited, wait, failBatch),
      "lockstep.Batch.await",
      awaited.kind,
      awaited.name
    )
  }

  get #ended(): Effect.Effect<End, BatchError> {
    return Effect.flatMap(
      this.#mapped(this.#run.ended),
      ({ counts: { cancelled, done, failed }, fault, nodes, state }) => {
        switch (state) {
          case "done":
            return Effect.succeed<End>({ id: this.id, state, jobs: nodes, done, failed, cancelled })
          case "cancelled":
            return Effect.fail(failBatch(new BatchCancelled(this.#about)))
          case "expired":
            return Effect.fail(failBatch(new BatchExpired(this.#about)))
          default: {
            const { node, ...why } = failureOf(this.#home, fault!)
            return Effect.fail(
              failBatch(new BatchFailed({ ...this.#about, done, failed, cancelled, job: node, ...why }))
            )
          }
        }
      }
    )
  }

  get status(): Effect.Effect<Progress, BatchError> {
    return Effect.map(
      this.#mapped(this.#run.page(Number.MAX_SAFE_INTEGER)),
      ({ counts, expected, nodes }) => progressOf(nodes, counts, expected)
    )
  }

  get changes(): Stream.Stream<Progress, BatchError> {
    return Stream.callback<Progress, BatchError>((queue) => {
      let last = -1
      const show = ([state, version, nodes, ...rest]: Heard) => {
        if (state === unknown) {
          return void Queue.failCauseUnsafe(queue, Cause.fail(failBatch(new BatchUnknown(this.#about))))
        }
        // The actor sends the state again when this process may have missed events.
        if (version > last) {
          last = version
          Queue.offerUnsafe(queue, progressOf(nodes as number, countsOf(rest), rest[8] as number))
        }
        if (state >= over) Queue.endUnsafe(queue)
      }
      return this.#mapped(
        observing(
          this.#home.placeOf(this.id),
          true,
          show,
          () => Queue.failCauseUnsafe(queue, Cause.fail(ofBatch(this.#about)(this.#run.closed))),
          () => {
            last = -1
          }
        )
      )
    }, { bufferSize: 1, strategy: "sliding" })
  }

  get jobs(): Stream.Stream<NodeInfo, BatchError> {
    return Stream.mapError(this.#run.nodes, ofBatch(this.#about))
  }

  get cancel(): Effect.Effect<boolean, BatchError> {
    return this.#mapped(this.#run.cancel)
  }

  get retry(): Effect.Effect<boolean, BatchError> {
    return this.#mapped(this.#run.retry)
  }

  #mapped<A, R>(self: Effect.Effect<A, FlowError, R>): Effect.Effect<A, BatchError, R> {
    return Effect.mapError(self, ofBatch(this.#about))
  }
}
