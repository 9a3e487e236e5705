/** Groups of jobs: to look at them, and to operate them one by one. */

import * as Effect from "effect/Effect"
import * as Option from "effect/Option"
import * as Stream from "effect/Stream"
import type { CoordinatorError } from "../actor/errors.ts"
import type { Place } from "../hold/place.ts"
import { question, request } from "../hold/request.ts"
import type { QueueError } from "./errors.ts"

export interface GroupState {
  readonly name: string
  /** Jobs that can begin as soon as the group's limits and its pause allow it. */
  readonly waiting: number
  /** Jobs that begin later: because of their `delay`, or for a retry. */
  readonly delayed: number
  /** Jobs that workers have. */
  readonly active: number
  readonly paused: boolean
}

export interface Group {
  readonly name: string
  /** From now on no job of the group begins, on any process. Jobs that have begun go on. */
  readonly pause: Effect.Effect<void, QueueError>
  /** Ends a pause, and the time that a handler has asked for with `Job.slowDown`. */
  readonly resume: Effect.Effect<void, QueueError>
  /** Removes all jobs of the group that are not active. Answers how many it removed. */
  readonly purge: Effect.Effect<number, QueueError>
  readonly state: Effect.Effect<GroupState, QueueError>
}

type Failing = <A>(self: Effect.Effect<A, CoordinatorError>) => Effect.Effect<A, QueueError>

/** Repeats a request that removes some jobs, each time behind the last place. Answers how many jobs it removed. */
export const removing = (
  page: (
    behind: string
  ) => Effect.Effect<readonly [tag: string, count: number, more: boolean, behind?: string], QueueError>
): Effect.Effect<number, QueueError> => {
  const some = (removed: number, behind: string): Effect.Effect<number, QueueError> =>
    Effect.flatMap(
      page(behind),
      ([, count, more, behind = ""]) => more ? some(removed + count, behind) : Effect.succeed(removed + count)
    )
  return some(0, "")
}

type Tuple = readonly [name: string, waiting: number, delayed: number, active: number, paused: boolean]

const stateOf = ([name, waiting, delayed, active, paused]: Tuple): GroupState => ({
  name,
  waiting,
  delayed,
  active,
  paused
})

export const groupOf = (place: Place, name: string, failing: Failing): Group => {
  const pause = (paused: boolean) => Effect.asVoid(failing(request(place, "queue.pauseGroup", [name, paused])))
  return {
    name,
    pause: pause(true),
    resume: pause(false),
    purge: removing(() => failing(request(place, "queue.purgeGroup", [name]))),
    state: Effect.map(failing(question(place, "queue.group", [name])), (reply) => {
      const [, ...counts] = reply[0] === "missing" ? none : reply
      return stateOf([name, ...counts])
    })
  }
}

const none = ["group", 0, 0, 0, false] as const

// Redis looks at about so many fields of the queue at a time.
const pageSize = 256

export const groupsOf = (place: Place, failing: Failing): Stream.Stream<GroupState, QueueError> =>
  Stream.paginate(
    "0",
    (cursor: string) =>
      Effect.map(failing(question(place, "queue.groups", [cursor, pageSize])), ([, next, found]) => {
        const groups = (found as ReadonlyArray<Tuple>).map(stateOf)
        return [groups, next === "0" ? Option.none() : Option.some(next)] as const
      })
  )
