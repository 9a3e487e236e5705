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
  return lastOf(all, whole(from.last, "last", 10_000))
}

interface Bounds {
  readonly first: Cursor
  readonly end: Cursor
}

/** The events of a shard from a time on: how many, and where they begin. */
interface Tail {
  readonly count: number
  readonly start: Cursor
}

const none = ({ end }: Bounds): Tail => ({ count: 0, start: end })

const tailOf = ({ end }: Bounds, start: Cursor): Tail => ({ count: numberOf(end.id) - numberOf(start.id), start })

const tailSince = (shard: Shard<any>, bounds: Bounds, time: number): Effect.Effect<Tail, CoordinatorError> =>
  Effect.map(shard.since(time), (id) =>
    // One that was published meanwhile is behind the end.
    id === undefined || compareIds(id, bounds.end.id) > 0 ? none(bounds) : tailOf(bounds, before(id)))

interface Tails {
  readonly time: number
  readonly all: ReadonlyArray<Tail>
  readonly count: number
}

const tailsOf = (time: number, all: ReadonlyArray<Tail>): Tails => ({
  time,
  all,
  count: all.reduce((sum, { count }) => sum + count, 0)
})

/**
 * Where the last events of all shards begin. Events can be large, so none but the first of a time is read: the numbers say how many
 * follow. The search looks where that time is if the events come evenly, and every other time in the middle.
 */
const lastOf = Effect.fnUntraced(function*(shards: ReadonlyArray<Shard<any>>, count: number) {
  const bounds = yield* eachOf(shards, (shard) => shard.bounds)
  const known = bounds.filter(({ end, first }) => end.id !== first.id)
  let low = tailsOf(
    Math.min(...known.map(({ first }) => timeOf(first.id))),
    bounds.map((each) => tailOf(each, each.first))
  )
  let high = tailsOf(Math.max(...known.map(({ end }) => timeOf(end.id))) + 1, bounds.map(none))
  for (let probe = 0; low.count > count && high.time - low.time > 1; probe++) {
    const part = probe % 2 === 1 ? 0.5 : (low.count - count) / (low.count - high.count)
    const span = high.time - low.time
    const time = low.time + Math.min(span - 1, Math.max(1, Math.round(part * span)))
    const tails = tailsOf(time, yield* eachOf(shards, (shard, at) => tailSince(shard, bounds[at]!, time)))
    if (tails.count >= count) low = tails
    else high = tails
  }
  // These have one time.
  let excess = Math.max(0, low.count - count)
  return low.all.map(({ count, start }, at): Cursor => {
    // Retention may have removed some between two looks.
    const skipped = Math.min(excess, Math.max(0, count - high.all[at]!.count))
    excess -= skipped
    return skipped === 0 ? start : cursorAt(`${low.time}-${numberOf(start.id) + skipped}`)
  })
})

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
