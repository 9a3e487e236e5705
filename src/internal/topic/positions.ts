/** Where readers of a topic begin. */

import * as DateTime from "effect/DateTime"
import * as Effect from "effect/Effect"
import type { CoordinatorError } from "../actor/errors.ts"
import { whole } from "../hold/place.ts"
import type { SubscribeOptions } from "./api.ts"
import { beginning, type Cursor, cursorAt } from "./event.ts"
import type { Parts } from "./parts.ts"

/** Where a subscriber begins in each shard. */
export const positionsOf = (
  { all }: Parts<any>,
  from: NonNullable<SubscribeOptions["from"]>
): Effect.Effect<ReadonlyArray<Cursor>, CoordinatorError> => {
  if (from === "now") return Effect.forEach(all, ({ end }) => end, { concurrency: "unbounded" })
  if (from === "beginning") return Effect.succeed(all.map(() => beginning))
  if ("after" in from) return Effect.succeed(positionsBehind(all.length, from.after))
  if ("since" in from) {
    const since = DateTime.toEpochMillis(DateTime.makeUnsafe(from.since))
    return Effect.succeed(all.map(() => ({ id: `${since}-0`, number: undefined })))
  }
  const count = whole(from.last, "last", 10_000)
  return Effect.map(
    Effect.forEach(all, (shard) => shard.last(count), { concurrency: "unbounded" }),
    (found) => {
      const all = found.flatMap(({ times }, shard) => times.map((time) => ({ shard, time })))
      const last = all.sort((a, b) => b.time - a.time).slice(0, count)
      return found.map(({ positions }, at) => positions[last.filter(({ shard }) => shard === at).length]!)
    }
  )
}

/** Behind these events. The position in one shard says nothing of the others. */
export const positionsBehind = (shards: number, ids: string | ReadonlyArray<string>): ReadonlyArray<Cursor> => {
  const cursors = Array.from({ length: shards }, () => beginning)
  for (const id of [ids].flat()) {
    const [, shard = "0", time, number] = /^(?:(\d+):)?(\d{1,15})-(\d{1,15})$/.exec(id) ?? []
    if (time === undefined || Number(shard) >= shards) {
      throw new RangeError("after must be the id of an event of this topic")
    }
    cursors[Number(shard)] = cursorAt(`${time}-${number}`)
  }
  return cursors
}
