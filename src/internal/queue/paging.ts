/** Lists that are read page by page, as the work of one request is bounded. */

import * as Effect from "effect/Effect"
import * as Option from "effect/Option"
import * as Stream from "effect/Stream"

/** Of one request. */
export const pageSize = 64

/** Reads up to `pageSize` items behind a place, "" for the first ones, again and again. */
export const paged = <A, E, R>(
  read: (behind: string) => Effect.Effect<ReadonlyArray<A>, E, R>,
  placeOf: (item: A) => string
): Stream.Stream<A, E, R> =>
  Stream.paginate("", (behind: string) =>
    Effect.map(read(behind), (page) => {
      const next = page.length < pageSize ? Option.none() : Option.some(placeOf(page[page.length - 1]!))
      return [page, next] as const
    }))
