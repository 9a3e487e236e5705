/** Jobs that were put aside. */

import * as DateTime from "effect/DateTime"
import { nameOf } from "./naming.ts"

export interface DeadLetter {
  /** Of the letter: to replay or discard it. */
  readonly letter: string
  /** Of the job: the `id` that it was offered with, or the one that `offer` has answered. */
  readonly id: string
  /**
   * - `failed`: its attempts were used up, or its worker's schedule has ended.
   * - `undecodable`: its payload does not fit the schema of its worker.
   * - `crashed`: too many sessions of its workers have ended.
   * - `discarded`: its handler has decided so.
   */
  readonly reason: "failed" | "undecodable" | "crashed" | "discarded"
  readonly attempts: number
  readonly crashes: number
  readonly error: string
  readonly group: string | undefined
  /** The JSON text of its payload. */
  readonly body: string
  /** The newest lines of its log. */
  readonly logs: ReadonlyArray<string>
  /** When it was put aside, by Redis's clock. */
  readonly time: DateTime.Utc
}

type Tuple = readonly [
  letter: string,
  job: string,
  reason: string,
  attempts: string,
  crashes: string,
  error: string,
  body: string,
  given: string,
  group: string,
  logs: ReadonlyArray<string>
]

export const lettersOf = (shard: number, tuples: unknown): ReadonlyArray<DeadLetter> =>
  (tuples as ReadonlyArray<Tuple>).map(([letter, job, reason, attempts, crashes, error, body, given, group, logs]) => ({
    letter: nameOf(shard, letter),
    id: given === "" ? nameOf(shard, job) : given,
    reason: reason as DeadLetter["reason"],
    attempts: Number(attempts),
    crashes: Number(crashes),
    error,
    group: group === "" ? undefined : group,
    body,
    logs,
    time: DateTime.makeUnsafe(Number.parseInt(letter, 10))
  }))
