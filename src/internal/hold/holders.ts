/** Holders and waiters, by Redis's word. */

import * as DateTime from "effect/DateTime"
import * as Effect from "effect/Effect"
import type { CoordinatorError } from "../actor/errors.ts"
import type { Verb } from "../actor/transport.ts"
import type { Place } from "./place.ts"
import { question } from "./request.ts"

/** A process, as its coordinator has described itself. */
export interface Process {
  /** The name of its coordinator. Empty when Redis does not know it any more. */
  readonly node: string
  readonly host: string
  readonly pid: number
}

export interface Holder extends Process {
  /** The fencing token. */
  readonly token: number
  /** By the clock of Redis, in whole seconds. */
  readonly since: DateTime.Utc
  /** How many permits; for a read-write lock see `mode`. */
  readonly weight: number
}

export interface Waiter extends Process {
  readonly weight: number
}

export const processOf = (about: unknown): Process => {
  const { host = "", name = "", pid = 0 } = (about ?? {}) as { name?: string; host?: string; pid?: number }
  return { node: name, host, pid }
}

type Held = readonly [weight: number, token: string, since: number, about: unknown]

/** Up to 1,000 holders, in no order. */
export const holdersOf = (
  place: Place,
  verb: Extract<Verb, `${string}.holders`>
): Effect.Effect<ReadonlyArray<Holder>, CoordinatorError> =>
  Effect.map(
    question(place, verb, []),
    ([, holders]) =>
      (holders as ReadonlyArray<Held>).map(([weight, token, since, about]) => ({
        ...processOf(about),
        token: Number(token),
        since: DateTime.makeUnsafe(since * 1000),
        weight
      }))
  )

/** Up to 1,000 waiters, the next one first. */
export const waitersOf = (
  place: Place,
  verb: Extract<Verb, `${string}.waiters`>
): Effect.Effect<ReadonlyArray<Waiter>, CoordinatorError> =>
  Effect.map(
    question(place, verb, []),
    ([, waiters]) =>
      (waiters as ReadonlyArray<readonly [weight: number, about: unknown]>).map(([weight, about]) => ({
        ...processOf(about),
        weight
      }))
  )
