/** Lists that are read page by page, as the work of one request is bounded. */

import * as Effect from "effect/Effect"
import * as Option from "effect/Option"
import * as Stream from "effect/Stream"

/** Of one request. */
export const pageSize = 64

/** How many items a user wants at most. */
export const limitOf = (limit = Number.MAX_SAFE_INTEGER): number => {
  if (!Number.isInteger(limit) || limit < 1) throw new RangeError("limit must be a whole number from 1 on")
  return limit
}

/** Reads up to `pageSize` items behind a place, "" for the first ones, again and again. */
export const paged = <A, E, R>(
  read: (behind: string, count: number) => Effect.Effect<ReadonlyArray<A>, E, R>,
  placeOf: (item: A) => string,
  after = "",
  limit = limitOf()
): Stream.Stream<A, E, R> =>
  Stream.paginate([after, limit] as const, ([behind, left]) => {
    const count = Math.min(left, pageSize)
    return Effect.map(read(behind, count), (page) => {
      const rest = left - page.length
      const more = page.length === count && rest > 0
      return [page, more ? Option.some([placeOf(page[page.length - 1]!), rest] as const) : Option.none()] as const
    })
  })
