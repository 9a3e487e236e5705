/**
 * Conductors: every process that has a flow carries messages between its actor and the queues of its jobs. All that a conductor does can be
 * repeated, by another process too: it may die behind each step, and then its errand is delivered again.
 */

import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import type * as Scope from "effect/Scope"
import { question, request } from "../hold/request.ts"
import { innerOf, workErrands } from "../queue/errands.ts"
import { QueueError } from "../queue/errors.ts"
import type { Task } from "../queue/job.ts"
import type { Offered } from "../queue/offering.ts"
import type { Outcome } from "../queue/outcomes.ts"
import type { OfferOptions, Subscriber } from "../queue/wish.ts"
import { textOf } from "../text.ts"
import { fail, type FlowError } from "./errors.ts"
import type { Port } from "./graph.ts"
import { type About, type Ended, failing, type Home, type Over, type StateLetter } from "./home.ts"
import { Behind, mostOfQueue, Room } from "./room.ts"
import { states } from "./runs.ts"
import { Stops } from "./stops.ts"

/** A run, and the stamp that distinguishes it from the runs before it that had its id. */
type Which = readonly [run: string, stamp: number]

type NodeErrand = readonly [
  tag: string,
  which: Which,
  node: number,
  generation: number,
  about: About,
  more: any,
  /** Of a node that is to be stopped, whether it is active; of one that is to be undone, the number of its compensation. */
  last?: boolean | number
]

type OverErrand = readonly [tag: string, which: Which, ...over: Over]

/** The id of the job of a node: the same for each attempt of a conductor to offer it, so it is stored once. */
const jobOf = (flow: string, [run, stamp]: Which, node: number, generation: number): string =>
  `${flow}/${run}/${stamp}/${node}/${generation}`

/** The run, the node and the generation of a job; undefined if it is not one of this flow. */
export const partsOfJob = (flow: string, job: string) => {
  const parts = job.startsWith(`${flow}/`) ? /^([^]+)\/\d+\/(\d+)\/(\d+)$/.exec(job.slice(flow.length + 1)) : null
  return parts === null ? undefined : { run: parts[1]!, node: Number(parts[2]), generation: Number(parts[3]) }
}

/** A node that a handler has added. */
type Added = readonly [
  name: string,
  queue: string,
  payload: string,
  after: ReadonlyArray<number>,
  policies: string,
  before: ReadonlyArray<string>
]

const referenceOf = ([run, stamp]: Which, node: number, generation: number, undo: number): string =>
  `${node} ${generation} ${undo} ${stamp} ${run}`

/** A payload cannot be made. Another attempt would not change that, so the node has failed. */
class Unmade {
  readonly outcome: Outcome

  constructor(tag: "failed" | "undecodable", message: string) {
    this.outcome = [tag, message.slice(0, 4096).toWellFormed()]
  }
}

const made = (make: () => unknown, node: string): Exit.Exit<unknown, Unmade> => {
  try {
    return Exit.succeed(make())
  } catch (cause) {
    return Exit.fail(
      new Unmade("failed", `the payload of node ${JSON.stringify(node)} could not be made: ${textOf(cause)}`)
    )
  }
}

class Conductor {
  readonly home: Home
  readonly #stops = new Stops()
  readonly #room: Room

  constructor(home: Home) {
    this.home = home
    this.#room = new Room(home.space.kernel.io)
  }

  // An errand that goes behind others is stored again in the step that ends this delivery of it.
  readonly handle = (errand: ReadonlyArray<any>, task: Task): Effect.Effect<unknown, unknown> =>
    Effect.catchIf(
      this.#handle(errand, task),
      (error) => error instanceof Behind,
      ({ queue }) =>
        Effect.sync(() => {
          const more = `lg${Buffer.byteLength(queue)}`
          task.follow({ body: JSON.stringify(errand), letter: "M", more, texts: queue }, task.place)
        })
    )

  #handle(errand: ReadonlyArray<any>, { attempt, crashes, group }: Task): Effect.Effect<unknown, unknown> {
    const isBehind = group !== undefined
    switch (errand[0]) {
      case "ended":
        return this.#ended(errand[1], errand[3])
      case "stop":
        return this.#stop(errand as NodeErrand)
      case "undo":
        return this.#undo(errand as NodeErrand, isBehind)
      case "over":
        return this.#over(errand as OverErrand, isBehind)
      default:
        return this.#offer(errand as NodeErrand, attempt > 1 || crashes > 0 || errand[0] === "again", isBehind)
    }
  }

  // A release that does not know a queue or a node leaves the errand to one that does.
  #port([name, queue]: About): Effect.Effect<Port, string> {
    const port = this.home.queues.get(queue)
    if (port !== undefined) return Effect.succeed(port)
    return this.#foreign(`has no queue ${JSON.stringify(queue)} for its node ${JSON.stringify(name)}`)
  }

  #foreign(what: string): Effect.Effect<never, string> {
    const { hooks } = this.home.space.kernel
    const message =
      `${this.home.subject} ${what} here: processes with the code of its runs have to go on until these are over`
    hooks.log("Warn", message)
    return Effect.fail(message)
  }

  // Offered a second time, it is the same job, as long as the queue knows its id. The subscriber was stored with the first offer.
  #offered(
    port: Port,
    payload: unknown,
    options: OfferOptions,
    reference: string,
    isBehind: boolean,
    isStopped: Effect.Effect<boolean, unknown>,
    stop?: Effect.Effect<void>
  ): Effect.Effect<Offered | undefined, unknown> {
    const subscriber: Subscriber = { errands: this.home.name, reference }
    return Effect.mapError(
      this.#room.inLine(
        port.queue,
        (waits) => innerOf(port.queue).offerFor(payload, options, subscriber, waits),
        isBehind,
        isStopped,
        stop
      ),
      (error) =>
        error instanceof QueueError &&
          (error.reason._tag === "InvalidPayload" || error.reason._tag === "RequestTooLarge")
          ? new Unmade("failed", error.message)
          : error
    )
  }

  #offer(errand: NodeErrand, repeated: boolean, isBehind: boolean): Effect.Effect<unknown, unknown> {
    const { hooks } = this.home.space.kernel
    const [, which, node, generation, about] = errand
    const [run, stamp] = which
    const what = `run ${JSON.stringify(run)} of ${this.home.subject}`
    const id = jobOf(this.home.name, which, node, generation)
    const reference = referenceOf(which, node, generation, 0)
    const whole = which.join("/")
    const begun = (offered: boolean) =>
      failing(
        request(this.home.placeOf(run), "flow.begun", [stamp, String(node), generation, offered], { waits: true })
      )
    const offering = Effect.gen({ self: this }, function*() {
      // The first attempt may be so long ago that the node has ended, and the queue does not know the id any more.
      let asks = repeated || isBehind || this.#stops.has(whole)
      for (;;) {
        const [now] = asks ? yield* begun(false) : ["active"]
        if (now === "over" || now === "missing") return
        const port = yield* this.#port(about)
        if (now === "stopping") {
          // Unless an earlier attempt has offered it, the node ends here.
          if ((yield* port.queue.job(id).status)._tag === "None") {
            return yield* this.#recall(port, id, reference, ["cancelled"])
          }
          break
        }
        const payload = yield* this.#payload(port, errand)
        const isStopped = Effect.map(begun(false), ([now]) => now !== "active")
        const stop = this.#stops.of(whole)
        const options = { ...about[2], id }
        const offered = yield* this.#offered(port, payload, options, reference, isBehind, isStopped, stop)
        asks = true
        if (offered === undefined) continue
        // The event of its end may be lost with the data of its partition.
        if (offered.duplicate) yield* this.#recall(port, id, reference)
        break
      }
      // Only now: a run that stops meanwhile learns from this that there is a job to remove. It goes to the actor in front of the
      // acknowledgement of this errand, so nothing waits for the answer.
      yield* Effect.forkDetach(
        Effect.catchCause(
          Effect.map(begun(true), ([now]) => this.#stops.heard(whole, now === "stopping")),
          (cause) =>
            Effect.sync(() =>
              hooks.log(
                "Warn",
                `${what} could not be told that job ${
                  JSON.stringify(id)
                } was offered: it learns that from the end of the job`,
                cause
              )
            )
        ),
        { startImmediately: true }
      )
    })
    return Effect.catchIf(
      offering as Effect.Effect<void, unknown>,
      (error) => error instanceof Unmade,
      ({ outcome }) => this.#ended(reference, outcome)
    )
  }

  #payload(port: Port, [, [run, stamp], node, , [name], body]: NodeErrand): Effect.Effect<unknown, unknown> {
    if (body.length === 1) {
      const payload = port.payload.decodeParsed(body[0])
      return Exit.isSuccess(payload)
        ? Effect.succeed(payload.value)
        : Effect.mapError(Effect.failCause(payload.cause), ({ message }) => new Unmade("undecodable", message))
    }
    return Effect.flatMap(this.home.graphOf(run, stamp), (graph): Effect.Effect<unknown, unknown> => {
      const vertex = graph?.names.get(name)
      const make = vertex?.make
      if (vertex === undefined || make === undefined) {
        return this.#foreign(`has no payload for node ${JSON.stringify(name)}`)
      }
      return Effect.flatMap(this.home.inputsOf(run, node), (ended) => {
        const found = new Map(ended.map((one) => [one[0][0], one]))
        return Effect.flatMap(
          Effect.forEach(
            vertex.before.slice(0, vertex.read),
            ({ vertex: { name } }) => this.#resultOf(found.get(name))
          ),
          (results) => made(() => make(results), name)
        )
      })
    })
  }

  #resultOf(ended: Ended | undefined): Effect.Effect<unknown, FlowError | Unmade> {
    if (ended === undefined || ended[1] !== "d") return Effect.undefined
    return Effect.catchIf(
      this.home.resultOf(ended),
      ({ reason }) => reason._tag === "InvalidPayload",
      ({ message }) => Effect.fail(new Unmade("failed", message))
    )
  }

  /** The end of a job that its queue does not have any more; `lost` stands for its outcome if that is not known either. */
  #recall(port: Port, id: string, reference: string, lost?: Outcome): Effect.Effect<unknown, unknown> {
    const job = innerOf(port.queue).job(id)
    return Effect.flatMap(job.status, (status) => {
      if (status._tag === "Some") return Effect.void
      return Effect.flatMap(
        job.outcome(false),
        (outcome) => {
          const told = outcome[0] === "missing" ? lost : outcome
          return told === undefined ? Effect.void : this.#ended(reference, told)
        }
      )
    })
  }

  // Without its job the node ends: the queue sends that errand, as at any end of the job.
  #remove(port: Port, id: string, ifUnbegun: boolean): Effect.Effect<unknown, QueueError> {
    return innerOf(port.queue).job(id).cancelled({ unbegun: ifUnbegun })
  }

  #stop([, which, node, generation, about, ifUnbegun, active]: NodeErrand): Effect.Effect<unknown, unknown> {
    const id = jobOf(this.home.name, which, node, generation)
    return Effect.flatMap(this.#port(about), (port) =>
      Effect.andThen(
        this.#remove(port, id, ifUnbegun),
        // It was offered. If its queue has lost it, no errand would end the node.
        active === true
          ? this.#recall(port, id, referenceOf(which, node, generation, 0), ["cancelled"])
          : Effect.void
      ))
  }

  #undo(
    [, which, node, generation, about, outcome, attempt]: NodeErrand,
    isBehind: boolean
  ): Effect.Effect<unknown, unknown> {
    const number = Number(attempt)
    const reference = referenceOf(which, node, generation, number)
    const id = `${jobOf(this.home.name, which, node, generation)}/undo${number === 1 ? "" : `/${number}`}`
    const offering = Effect.gen({ self: this }, function*() {
      // The errand may come again when the node is compensated already, and even when the run is forgotten. Its queue may have
      // forgotten the job by then, and would run it twice.
      if (!(yield* this.#isToUndo(which, node, generation, number))) return
      const undo = (yield* this.home.graphOf(...which))?.names.get(about[0])?.undo
      if (undo === undefined) return yield* this.#foreign(`does not compensate node ${JSON.stringify(about[0])}`)
      const result = yield* this.#resultOf([about, "d", outcome])
      const payload = yield* made(() => undo.make(result), about[0])
      const isStopped = Effect.map(this.#isToUndo(which, node, generation, number), (isToUndo) => !isToUndo)
      const offered = yield* this.#offered(undo.port, payload, { id }, reference, isBehind, isStopped)
      if (offered?.duplicate === true) yield* this.#recall(undo.port, id, reference)
    })
    return Effect.catchIf(
      offering as Effect.Effect<void, unknown>,
      (error) => error instanceof Unmade,
      ({ outcome }) => this.#ended(reference, outcome)
    )
  }

  #isToUndo([run, stamp]: Which, node: number, generation: number, attempt: number): Effect.Effect<boolean, FlowError> {
    return Effect.map(failing(question(this.home.placeOf(run), "flow.status", [node])), (reply) => {
      if (reply[0] === "missing" || reply[19] !== stamp || states[reply[1]] !== "compensating") return false
      const [[, state, retries, number]] = reply[18] as readonly [
        readonly [about: About, state: StateLetter, retries: number, attempt: number]
      ]
      return state === "d" && retries === generation && number === attempt
    })
  }

  // Repeated, it is the same job, as long as its queue knows the id. A payload that cannot be made may be made by another release.
  #over([, [run, stamp], ...over]: OverErrand, isBehind: boolean): Effect.Effect<unknown, unknown> {
    const { callbackOf, name, space: { kernel: { hooks } } } = this.home
    const callback = callbackOf(run, over)
    if (callback === undefined) return this.#foreign(`has no callback for its run ${JSON.stringify(run)}`)
    const retry = over[5]
    const id = `${name}/${run}/${stamp}/over${retry === "" ? "" : `/${retry}`}`
    const what = `the callback of run ${JSON.stringify(run)} of ${this.home.subject}`
    return Effect.tapError(
      Effect.flatMap(
        Effect.try({ try: callback.payload, catch: (cause) => cause }),
        (payload) =>
          this.#room.inLine(
            callback.port.queue,
            (waits) => innerOf(callback.port.queue).offerFor(payload, { id }, undefined, waits),
            isBehind,
            Effect.succeed(false)
          )
      ),
      (error) =>
        Effect.sync(() => {
          if (error instanceof Behind) return
          hooks.log("Warn", `${what} could not be offered: it is attempted again`, error)
        })
    )
  }

  // The actor recognizes a repetition by the state and the generation of the node.
  #ended(reference: string, outcome: Outcome): Effect.Effect<unknown, FlowError> {
    const [, node, generation, undo, stamp, run] = /^(\d+) (\d+) (\d+) (\d+) ([^]*)$/.exec(reference)!
    const [tag, value, added] = outcome as readonly [string, unknown?, ReadonlyArray<Added>?]
    const text = JSON.stringify(value === undefined ? [tag] : [tag, value])
    const args = [
      Number(stamp),
      node!,
      Number(generation),
      Number(undo),
      tag,
      text,
      added === undefined ? "" : JSON.stringify(added)
    ] as const
    const told = failing(request(this.home.placeOf(run!), "flow.ended", [...args], { waits: true }))
    return Effect.flatMap(told, (reply) =>
      reply[0] === "refused"
        ? this.#ended(reference, [
          "failed",
          `the job has added to its flow what does not fit: node ${JSON.stringify(reply[1])} ${
            added?.some(([, , , , , before]) => before?.includes(reply[1]))
              ? "is not there, does not wait for its predecessors any more, or is before these nodes itself: `before` cannot name it"
              : "is there already"
          }`
        ])
        : Effect.void)
  }
}

/** Conducts the runs of a flow, for as long as the scope is open. */
export const conduct = (home: Home): Effect.Effect<void, FlowError, Scope.Scope> => {
  const conductor = new Conductor(home)
  const partitions = [...home.ports.values()].flatMap(({ queue }) => innerOf(queue).partitions)
  return workErrands<never, FlowError>({
    space: home.space,
    name: home.name,
    partitions: [home.partition.index, ...partitions],
    handler: conductor.handle,
    lease: home.lease,
    // Errands that wait for room leave as many slots to the others.
    concurrency: 256 + home.queues.size * mostOfQueue,
    fail
  })
}
