/** Jobs that became dead letters. */

import * as Arr from "effect/Array"
import * as DateTime from "effect/DateTime"
import * as Effect from "effect/Effect"
import * as Stream from "effect/Stream"
import type { Place } from "../hold/place.ts"
import { question, request } from "../hold/request.ts"
import { failing, type QueueError } from "./errors.ts"
import { idOf, letterOf, localOf, nameOf } from "./naming.ts"
import { limitOf, paged, pageSize } from "./paging.ts"
import { stateOf } from "./state.ts"

/** @internal */
export interface LettersOptions {
  /**
   * The `letter` of a dead letter, which may be deleted by now: the stream begins behind it. Default: at the oldest
   * one.
   */
  readonly after?: string | undefined
  /** At most so many. Default: all. */
  readonly limit?: number | undefined
}

export interface DeadLetter {
  /** Of the letter: to replay or discard it, and to list the letters behind it. */
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
  /** When it became a dead letter, by Redis's clock. */
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

const lettersOf = (shard: number, tuples: unknown): ReadonlyArray<DeadLetter> =>
  (tuples as ReadonlyArray<Tuple>).map(([letter, job, reason, attempts, crashes, error, body, given, group, logs]) => ({
    letter: nameOf(shard, letter),
    id: idOf(shard, job, given),
    reason: reason as DeadLetter["reason"],
    attempts: Number(attempts),
    crashes: Number(crashes),
    error,
    group: group === "" ? undefined : group,
    body,
    logs,
    time: DateTime.makeUnsafe(Number.parseInt(letter, 10))
  }))

/** The dead letters of a shard. */
export class Letters {
  readonly #place: Place
  readonly #shard: number

  constructor(place: Place, shard: number) {
    this.#place = place
    this.#shard = shard
  }

  readonly list = ({ after, limit }: LettersOptions = {}): Stream.Stream<DeadLetter, QueueError> =>
    Stream.suspend(() => {
      const [shard, behind] = after === undefined ? [this.#shard, ""] : letterOf(after)
      const most = limitOf(limit)
      // Letters are listed shard by shard.
      if (shard !== this.#shard) return Stream.empty
      return paged(
        (behind, count) =>
          Effect.map(
            failing(question(this.#place, "queue.letters", [behind, count])),
            ([, found]) => lettersOf(this.#shard, found)
          ),
        ({ letter }) => localOf(letter, this.#shard),
        behind,
        most
      )
    })

  // Those of other shards are none here.
  #here(letters: ReadonlyArray<string>): ReadonlyArray<string> {
    return letters.map(letterOf).flatMap(([shard, own]) => shard === this.#shard ? [own] : [])
  }

  /** Of all, unless some are named. Answers how many. */
  replay(letters?: ReadonlyArray<string>): Effect.Effect<number, QueueError> {
    return Effect.suspend(() => {
      const chosen = letters === undefined ? this.#present : Stream.fromIterable(this.#here(letters))
      // Jobs that run after others are offered behind all others, as they were first: a job comes before those after it.
      const behind: Array<readonly [number: number, letter: string]> = []
      const sorted = Stream.suspend(() =>
        Stream.fromIterable(behind.toSorted(([a], [b]) => a - b).map(([, letter]) => letter))
      )
      return Effect.zipWith(
        this.#replay(chosen, false, (number, letter) => behind.push([number, letter])),
        this.#replay(sorted, true),
        (some, others) => some + others
      )
    })
  }

  #replay(
    letters: Stream.Stream<string, QueueError>,
    ordered: boolean,
    isAfter: (number: number, letter: string) => void = () => {}
  ): Effect.Effect<number, QueueError> {
    return Stream.mapEffect(
      letters,
      (letter) =>
        Effect.map(failing(request(this.#place, "queue.replay", [letter, ordered])), (reply) => {
          if (reply[0] === "after") isAfter(reply[1], letter)
          return reply[0]
        }),
      { concurrency: pageSize }
    ).pipe(Stream.filter((tag) => tag === "replayed"), Stream.runCount)
  }

  // As many as there are now: a job that fails again at once has a new one, behind them.
  get #present(): Stream.Stream<string, QueueError> {
    return Stream.unwrap(
      Effect.map(failing(question(this.#place, "queue.state", [])), (reply) => {
        const { dead } = stateOf(reply)
        if (dead === 0) return Stream.empty
        return Stream.map(this.list({ limit: dead }), ({ letter }) => localOf(letter, this.#shard))
      })
    )
  }

  discard(letters?: ReadonlyArray<string>): Effect.Effect<number, QueueError> {
    if (letters === undefined) return this.#discard("")
    return Effect.suspend(() =>
      Effect.reduce(
        Arr.chunksOf(this.#here(letters), pageSize),
        () => 0,
        (total, ids) => Effect.map(this.#discard(ids.join(" ")), (count) => total + count)
      )
    )
  }

  #discard(ids: string): Effect.Effect<number, QueueError> {
    return Effect.map(failing(request(this.#place, "queue.discard", [ids])), ([, count]) => count)
  }
}
