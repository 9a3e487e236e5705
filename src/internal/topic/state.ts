/** How a topic is: for people, and for metrics. */

import * as Clock from "effect/Clock"
import * as DateTime from "effect/DateTime"
import * as Effect from "effect/Effect"
import * as Metric from "effect/Metric"
import * as Metrics from "../../Metrics.ts"
import type { Requests } from "../actor/lua.ts"
import { nameOf } from "./parts.ts"

export interface Group {
  readonly name: string
  /** Members that have joined all shards: while there are none, a shard may not have the group yet. */
  readonly members: number
  /** Events that no member was given yet. */
  readonly lag: number
  /** Events that were given to members, and not acknowledged. */
  readonly pending: number
  /** When the oldest event was published that the group has not acknowledged, whether a member was given it or not. */
  readonly oldest: DateTime.Utc | undefined
}

export interface State {
  /** Events that are kept now. */
  readonly length: number
  /** Bytes of their values, keys and ids: up to 512 too many in each shard once older ones were removed. */
  readonly bytes: number
  /** Of the oldest and the newest event, in each shard that has any. */
  readonly first: ReadonlyArray<string>
  readonly last: ReadonlyArray<string>
  /** Open topics: each `make` whose scope is open is one, also if a process has several. */
  readonly members: number
  readonly groups: ReadonlyArray<Group>
}

const sum = (values: ReadonlyArray<number>): number => values.reduce((total, value) => total + value, 0)

type GroupTuple = readonly [name: string, members: number, lag: number, pending: number, oldest: string]

/** The state of a group, from the reports of the shards that have it, of so many. */
const groupOf = (name: string, shards: ReadonlyArray<GroupTuple>, of: number): Group => {
  const oldest = shards.flatMap(([, , , , id]) => id === "" ? [] : [Number.parseInt(id, 10)])
  return {
    name,
    members: shards.length < of ? 0 : Math.min(...shards.map(([, members]) => members)),
    lag: sum(shards.map(([, , lag]) => lag)),
    pending: sum(shards.map(([, , , pending]) => pending)),
    oldest: oldest.length === 0 ? undefined : DateTime.makeUnsafe(Math.min(...oldest))
  }
}

type Reply = Exclude<Requests["topic.state"]["reply"], readonly ["stale"]>

/** The answers of the shards, taken together. */
export const stateOf = (replies: ReadonlyArray<Reply>): State => {
  const known = replies.flatMap((reply) => reply[0] === "state" ? [reply] : [])
  const named = (at: 4 | 5) =>
    replies.flatMap((reply, shard) => reply[0] === "state" && reply[at] !== "" ? [nameOf(shard, reply[at])] : [])
  const tuples = known.flatMap(([, , , , , , , groups]) => groups as ReadonlyArray<GroupTuple>)
  return {
    length: sum(known.map(([, , length]) => length)),
    bytes: sum(known.map(([, , , bytes]) => bytes)),
    first: named(4),
    last: named(5),
    members: Math.max(0, ...known.map(([, , , , , , members]) => members)),
    groups: Array.from(Map.groupBy(tuples, ([name]) => name), ([name, shards]) => groupOf(name, shards, replies.length))
  }
}

const gone = { members: 0, lag: 0, pending: 0, oldest: undefined }

/** Writes a state into the gauges, also of the groups that are known from before, and are deleted. */
export const measured = (
  topic: string,
  { bytes, groups, length }: State,
  known: Set<string>
): Effect.Effect<void> =>
  Effect.gen(function*() {
    yield* Metric.update(Metrics.topicLength(topic), length)
    yield* Metric.update(Metrics.topicBytes(topic), bytes)
    const now = yield* Clock.currentTimeMillis
    for (const { name } of groups) known.add(name)
    for (const name of known) {
      const { lag, members, oldest, pending } = groups.find((group) => group.name === name) ?? gone
      const age = oldest === undefined ? 0 : Math.max(0, now - DateTime.toEpochMillis(oldest))
      yield* Metric.update(Metrics.groupMembers(topic, name), members)
      yield* Metric.update(Metrics.groupLag(topic, name), lag)
      yield* Metric.update(Metrics.groupPending(topic, name), pending)
      yield* Metric.update(Metrics.groupAge(topic, name), age)
    }
  })
