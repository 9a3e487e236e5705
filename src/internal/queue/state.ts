/** How a queue is, for people and for metrics. */

import * as Clock from "effect/Clock"
import * as DateTime from "effect/DateTime"
import * as Effect from "effect/Effect"
import * as Metric from "effect/Metric"
import * as Metrics from "../../Metrics.ts"
import type { Requests } from "../actor/lua.ts"
import { levels, type Priority } from "./wish.ts"

export interface State {
  /** Jobs that can begin now. */
  readonly waiting: number
  readonly waitingBy: { readonly [priority in Priority]: number }
  /** When the job that is next in the order of the offers was offered; undefined if none waits. */
  readonly oldest: DateTime.Utc | undefined
  /** Jobs that begin later: because of their `delay`, or for a retry. */
  readonly delayed: number
  /** Jobs that wait for the end of the jobs that they were offered to run `after`. */
  readonly blocked: number
  /** Jobs that workers have. */
  readonly active: number
  /** Dead letters. */
  readonly dead: number
  readonly workers: number
  readonly paused: boolean
  /** Jobs that were done, that became dead letters, and that expired, since the queue exists. */
  readonly completed: number
  readonly failed: number
  readonly expired: number
  /** Jobs that were removed because the queue was full. */
  readonly dropped: number
}

type Reply = Exclude<Requests["queue.state"]["reply"], readonly ["stale"]>

const none: Reply = ["state", [], 0, 0, 0, 0, false, 0, 0, 0, 0, 0, 0]

export const stateOf = (reply: Reply): State => {
  const [, ready, delayed, active, dead, workers, paused, completed, failed, expired, dropped, oldest, blocked] =
    reply[0] === "missing"
      ? none
      : reply
  const waitingBy = Object.fromEntries(levels.map((level, at) => [level, Number(ready[at] ?? 0)])) as State["waitingBy"]
  const waiting = levels.reduce((total, level) => total + waitingBy[level], 0)
  return {
    waiting,
    waitingBy,
    oldest: oldest === 0 ? undefined : DateTime.makeUnsafe(oldest),
    delayed,
    blocked,
    active,
    dead,
    workers,
    paused,
    completed,
    failed,
    expired,
    dropped
  }
}

/** Of all shards together. A worker works on all of them. */
export const stateOfAll = (states: ReadonlyArray<State>): State => {
  const sum = (count: (state: State) => number) => states.reduce((sum, state) => sum + count(state), 0)
  return {
    waiting: sum(({ waiting }) => waiting),
    waitingBy: Object.fromEntries(
      levels.map((level) => [level, sum(({ waitingBy }) => waitingBy[level])])
    ) as State["waitingBy"],
    oldest: states.reduce<State["oldest"]>(
      (oldest, state) =>
        oldest === undefined || state.oldest !== undefined && DateTime.isLessThan(state.oldest, oldest)
          ? state.oldest
          : oldest,
      undefined
    ),
    delayed: sum(({ delayed }) => delayed),
    blocked: sum(({ blocked }) => blocked),
    active: sum(({ active }) => active),
    dead: sum(({ dead }) => dead),
    workers: Math.max(...states.map(({ workers }) => workers)),
    paused: states.some(({ paused }) => paused),
    completed: sum(({ completed }) => completed),
    failed: sum(({ failed }) => failed),
    expired: sum(({ expired }) => expired),
    dropped: sum(({ dropped }) => dropped)
  }
}

/** Writes a state into the gauges. */
export const measured = (queue: string, state: State): Effect.Effect<void> =>
  Effect.gen(function*() {
    for (const name of ["waiting", "delayed", "blocked", "active", "dead"] as const) {
      yield* Metric.update(Metrics.queueJobs(queue, name), state[name])
    }
    const now = yield* Clock.currentTimeMillis
    const age = state.oldest === undefined ? 0 : Math.max(0, now - DateTime.toEpochMillis(state.oldest))
    yield* Metric.update(Metrics.queueAge(queue), age)
  })
