/** Where readers of a topic begin. */

import * as Effect from "effect/Effect"
import type { CoordinatorError } from "../actor/errors.ts"
import { instant, oneOf, whole } from "../hold/place.ts"
import type { SubscribeOptions } from "./api.ts"
import { before, compareIds, type Cursor, cursorAt, numberOf, type Start, timeOf } from "./event.ts"
import type { Parts } from "./parts.ts"
import type { Shard } from "./shard.ts"

const eachOf = <A, B, E>(shards: ReadonlyArray<A>, f: (shard: A, at: number) => Effect.Effect<B, E>) =>
  Effect.forEach(shards, f, { concurrency: "unbounded" })

/**
 * Where a subscriber begins in each shard. All positions have numbers, so events that are removed from now on are missed. None is
 * behind the end of its shard: events there are read for other subscribers too.
 */
export const positionsOf = (
  { all }: Parts<any>,
  from: NonNullable<SubscribeOptions["from"]>
): Effect.Effect<ReadonlyArray<Start>, CoordinatorError> => {
  if (typeof from !== "object" || from === null) {
    return oneOf(from, "from", ["now", "beginning"]) === "beginning"
      ? eachOf(all, firstOf)
      : eachOf(all, ({ bounds }) => Effect.map(bounds, ({ end }) => end))
  }
  if ("after" in from) {
    const positions = positionsBehind(all.length, from.after)
    return eachOf(all, (shard, at): Effect.Effect<Start, CoordinatorError> => {
      const position = positions[at]
      if (position === undefined) return firstOf(shard)
      return Effect.map(
        shard.bounds,
        ({ end }) => compareIds(position.id, end.id) > 0 ? { ...end, lost: true } : position
      )
    })
  }
  if ("since" in from) {
    const since = instant(from.since, "since")
    return eachOf(all, (shard) =>
      // In this order: events that are published in between are behind the end.
      Effect.flatMap(shard.bounds, ({ end }) =>
        Effect.map(shard.since(since), (first) =>
          first === undefined ? { ...end, since } : { id: `${since}-0`, number: numberOf(first) - 1 })))
  }
  const count = whole(from.last, "last", 10_000)
  return Effect.map(
    eachOf(all, (shard) => Effect.all([Effect.map(shard.bounds, ({ end }) => end), shard.last(count)])),
    (found) => {
      const all = found.flatMap(([, ids], shard) => ids.map((id) => ({ shard, time: timeOf(id) })))
      const last = all.sort((a, b) => b.time - a.time).slice(0, count)
      return found.map(([end, ids], at) => {
        const own = last.filter(({ shard }) => shard === at).length
        return own > 0 ? before(ids[own - 1]!) : ids.length > 0 ? cursorAt(ids[0]!) : end
      })
    }
  )
}

const firstOf = ({ bounds }: Shard<any>): Effect.Effect<Cursor, CoordinatorError> =>
  Effect.map(bounds, ({ first }) => first)

/** Behind these events. The position in one shard says nothing of the others. */
export const positionsBehind = (
  shards: number,
  ids: string | ReadonlyArray<string>
): ReadonlyArray<Cursor | undefined> => {
  const cursors: Array<Cursor | undefined> = Array.from({ length: shards }, () => undefined)
  for (const id of [ids].flat()) {
    const [, shard = "0", time, number] = /^(?:(\d+):)?(\d{1,15})-(\d{1,15})$/.exec(id) ?? []
    if (time === undefined || Number(shard) >= shards) {
      throw new RangeError("after must be the id of an event of this topic")
    }
    cursors[Number(shard)] = cursorAt(`${time}-${number}`)
  }
  return cursors
}
