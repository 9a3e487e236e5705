/** For handlers of a flow's jobs: they read the results of the nodes before their own, and add nodes behind it. */

import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import { checkName } from "../actor/keys.ts"
import type { Queue } from "../queue/api.ts"
import type { Job } from "../queue/job.ts"
import { Task } from "../queue/job.ts"
import { partsOfJob } from "./conducting.ts"
import { fail, type FlowError } from "./errors.ts"
import { checkOffering, letterOf, type Offering, offeringOf, type OnFailure, type Port } from "./graph.ts"
import type { Home } from "./home.ts"

export interface AddOptions extends Offering {
  /**
   * Unique in the run, up to 512 bytes. A handler's node that is done again by `replay` or `retry` adds its nodes again: a node
   * that it added before under that name runs again, with the new payload, unless it is done. Default: made of the name of its
   * queue, and of numbers.
   */
  readonly name?: string | undefined
  /** Other nodes that this handler has added: this one starts when they have ended. */
  readonly after?: ReadonlyArray<Added> | undefined
  /**
   * The names of nodes behind the handler's own that have to wait for this one too. The run fails at this node if one of them does not
   * exist, or does not wait any more.
   */
  readonly before?: ReadonlyArray<string> | undefined
  /** Of all edges of `after` and `before`, as in `job`. Default `fail`. */
  readonly onFailure?: OnFailure | undefined
}

/** A node that is added when the handler has succeeded. */
export class Added {
  readonly name: string
  readonly place: number
  readonly task: Task

  constructor(name: string, place: number, task: Task) {
    this.name = name
    this.place = place
    this.task = task
  }
}

type Part = { readonly task: Task; readonly run: string; readonly node: number }

const partOf = ({ name, space }: Home, job: typeof Job.Service, what: string): Part => {
  const parts = job instanceof Task && job.place.space === space ? partsOfJob(name, job.id) : undefined
  if (parts === undefined) throw new RangeError(`${what} is for handlers of jobs of flow ${JSON.stringify(name)}`)
  return { task: job as Task, ...parts }
}

// Redis stores them with one call.
const mostAdded = 512

export const add = (
  home: Home,
  job: typeof Job.Service,
  port: Port,
  payload: unknown,
  options: AddOptions
): Effect.Effect<Added, FlowError> => {
  const { node, task } = partOf(home, job, "add")
  const { after = [], before = [], name, onFailure = "fail" } = options
  const body = port.payload.encode(payload)
  if (Exit.isFailure(body)) return Effect.mapError(Effect.failCause(body.cause), fail)
  checkOffering(port, options)
  const letter = letterOf(onFailure)
  if (task.concluded) throw new RangeError("add is for handlers that have not ended")
  const all = task.added ??= []
  if (all.length === mostAdded) throw new RangeError(`a job can add up to ${mostAdded} nodes`)
  const place = all.length + 1
  const own = name === undefined
    ? `${port.queue.name}-${node}.${place}`
    : checkName(name, "name")
  if (all.some((text) => (JSON.parse(text) as [string])[0] === own)) {
    throw new RangeError(`a job adds two nodes named ${JSON.stringify(own)}`)
  }
  const from = after.map((added) => {
    if (added instanceof Added && added.task === task) return added.place
    throw new RangeError("after must have nodes that the same handler has added")
  })
  const to = [...new Set(before.map((name) => checkName(name, "before")))]
  const places = [...new Set(from)]
  all.push(
    JSON.stringify([
      own,
      port.queue.name,
      body.value,
      places,
      letter.repeat(places.length),
      to,
      letter.repeat(to.length),
      offeringOf(options)
    ])
  )
  return Effect.succeed(new Added(own, place, task))
}

/** The results of the nodes of a queue before the handler's own that are done, by their names. */
export const results = (
  home: Home,
  job: typeof Job.Service,
  queue: Queue<any, any, any>
): Effect.Effect<ReadonlyMap<string, any>, FlowError> => {
  const { node, run } = partOf(home, job, "results")
  return Effect.flatMap(home.inputsOf(run, node), (ended) =>
    Effect.map(
      Effect.forEach(
        ended.filter(([[, name], state]) => name === queue.name && state === "d"),
        (one) => Effect.map(home.resultOf(one), (result) => [one[0][0], result] as const)
      ),
      (entries) => new Map(entries)
    ))
}
