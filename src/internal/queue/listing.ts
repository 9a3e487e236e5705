/** Jobs of a queue by their state, page by page. */

import * as DateTime from "effect/DateTime"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Option from "effect/Option"
import * as Stream from "effect/Stream"
import type { CoordinatorError } from "../actor/errors.ts"
import { oneOf, type Place } from "../hold/place.ts"
import { question } from "../hold/request.ts"
import type { Codec } from "../work/codec.ts"
import { type Raw, Task } from "./job.ts"
import { limitOf, pageSize } from "./paging.ts"
import { levelOf, type Priority } from "./wish.ts"

/** @internal */
export interface JobsOptions {
  readonly state: "waiting" | "delayed" | "blocked" | "active"
  /** The `cursor` of a job: the stream begins behind it. Default: at the first job. */
  readonly after?: string | undefined
  /** At most so many. Default: all. */
  readonly limit?: number | undefined
}

/** A job that is not done. */
export interface JobInfo<out A> {
  /** The `id` that it was offered with, or the one that `offer` has answered. */
  readonly id: string
  readonly state: "waiting" | "delayed" | "blocked" | "active"
  /** `None` if it does not fit the schema of this process. */
  readonly payload: Option.Option<A>
  /** How often it was begun. */
  readonly attempts: number
  /** How often its worker's session has ended while it was at work. */
  readonly crashes: number
  readonly priority: Priority
  /** The group that it was offered with. */
  readonly group: string | undefined
  readonly offeredAt: DateTime.Utc
  /** When a delayed job can begin. */
  readonly due: DateTime.Utc | undefined
  /** The schedule that has offered it, and its tick. */
  readonly schedule: Option.Option<{ readonly name: string; readonly tick: DateTime.Utc }>
  /** The place of the job: a listing with this `after` goes on behind it. */
  readonly cursor: string
}

const ignore = () => undefined

type Listed = readonly [cursor: string, due: number, raw: Raw]

export const jobs = <A>(
  place: Place,
  shard: number,
  { decodeParsed }: Codec<A>,
  { after = "", limit, state }: JobsOptions
): Stream.Stream<JobInfo<A>, CoordinatorError> => {
  if (!/^(?:[1-9]\d{0,15} \^?\d{1,16}-\d{1,16}|\d{1,16} \d{1,16}|g[^]+)?$/.test(after)) {
    throw new RangeError("after must be the cursor of a job")
  }
  oneOf(state, "state", ["waiting", "delayed", "blocked", "active"])
  const infoOf = ([cursor, due, raw]: Listed): JobInfo<A> => {
    const { attempt, body, crashes, group, id, key, offeredAt, schedule } = new Task([], shard, raw, 0, 0, ignore)
    return {
      id,
      state,
      payload: Exit.getSuccess(decodeParsed(body)),
      attempts: attempt,
      crashes,
      priority: levelOf(key),
      group,
      offeredAt,
      due: due === 0 ? undefined : DateTime.makeUnsafe(due),
      schedule,
      cursor: shard === 0 ? cursor : `${shard}/${cursor}`
    }
  }
  return Stream.paginate(
    [after, limitOf(limit)] as const,
    ([behind, left]) =>
      Effect.map(question(place, "queue.jobs", [state, behind, Math.min(left, pageSize)]), ([, next, found]) => {
        const page = (found as ReadonlyArray<Listed>).map(infoOf)
        const more = next !== "" && left > page.length
        return [page, more ? Option.some([next, left - page.length] as const) : Option.none()] as const
      })
  )
}
