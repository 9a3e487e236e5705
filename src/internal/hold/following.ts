/** Publications in the same step as a request: both are executed, or neither. */

import * as Effect from "effect/Effect"
import type { Request } from "../actor/sending.ts"
import type { Place } from "./place.ts"

/** The object whose requests are followed. */
export interface Leader extends Pick<Place, "channel" | "kind" | "name"> {}

export interface Publication {
  /** Made once for each request that it follows; it is executed if that is answered with the tag `after`. */
  readonly "~lockstep/Publication": (leader: Leader, after: string) => Request
}

export type Publications = Publication | ReadonlyArray<Publication>

/** The publications with each write of a value: always the same, or made of the value that is written. */
export type Outbox<A> = ReadonlyArray<Publications | ((value: A) => Effect.Effect<Publications>)>

export const publicationsOf = <A>(outbox: Outbox<A>, value: A): Effect.Effect<Publications> =>
  Effect.map(
    Effect.forEach(
      outbox,
      (publish) => typeof publish === "function" ? Effect.suspend(() => publish(value)) : Effect.succeed(publish)
    ),
    (all) => all.flat() as ReadonlyArray<Publication>
  )

/** The requests that follow one, if there are any. */
export const followingOf = (
  leader: Leader,
  publications: Publications | undefined,
  after: string
): ReadonlyArray<Request> | undefined =>
  publications === undefined || Array.isArray(publications) && publications.length === 0
    ? undefined
    : [publications].flat().map((publication) => (publication as Publication)["~lockstep/Publication"](leader, after))
