/** One job of a queue, as any process looks at it, waits for it and changes it. */

import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Option from "effect/Option"
import type * as Stream from "effect/Stream"
import { bounded } from "../hold/acquire.ts"
import type { Place } from "../hold/place.ts"
import { question, request } from "../hold/request.ts"
import { spanning } from "../hold/span.ts"
import type { Codec } from "../work/codec.ts"
import type { AwaitOptions, JobHandle, RescheduleOptions, Status } from "./api.ts"
import { asked, fail, failing, type QueueError } from "./errors.ts"
import type { Following } from "./following.ts"
import { decoded, type Results } from "./handling.ts"
import type { Letters } from "./letters.ts"
import { localOf, nameOf } from "./naming.ts"
import type { Outcome, Outcomes } from "./outcomes.ts"
import { timeOf } from "./wish.ts"

/** The shard of a job. */
export interface Home<in out A> {
  readonly place: Place
  readonly shard: number
  readonly payload: Codec<A>
  readonly results: Results
  readonly following: Following
  readonly outcomes: Outcomes
  readonly letters: Letters
}

export class Handle<in out A, in out S, in out E> implements JobHandle<A, S, E> {
  readonly id: string
  readonly #home: Home<A>
  // In its shard.
  readonly #name: string

  constructor(home: Home<A>, id: string) {
    this.id = id
    this.#home = home
    this.#name = localOf(id, home.shard)
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Look
  // -------------------------------------------------------------------------------------------------------------------

  get status(): Effect.Effect<Option.Option<Status>, QueueError> {
    return Effect.map(
      failing(question(this.#home.place, "queue.status", [this.#name])),
      (reply) =>
        reply[0] === "missing"
          ? Option.none()
          : Option.some({ state: reply[1] as Status["state"], attempts: reply[2] })
    )
  }

  get progress(): Stream.Stream<unknown, QueueError> {
    return this.#home.following.progress(this.#name, ({ reason }) => fail(reason))
  }

  get logs(): Effect.Effect<ReadonlyArray<string>, QueueError> {
    return Effect.map(
      failing(question(this.#home.place, "queue.logs", [this.#name])),
      (reply) => reply[0] === "missing" ? [] : reply[1] as ReadonlyArray<string>
    )
  }

  readonly result = (options?: AwaitOptions): Effect.Effect<S, E | QueueError> => {
    const { place } = this.#home
    return spanning(
      bounded(this.awaited(false), place, options?.wait, fail),
      "lockstep.Queue.result",
      "queue",
      place.name
    )
  }

  /** Its result. `urgent`: see `Callers`. */
  awaited(urgent: boolean): Effect.Effect<S, E | QueueError> {
    const { place: { name, space }, results } = this.#home
    const about = { name, namespace: space.kernel.settings.namespace, id: this.id }
    return Effect.flatMap(this.outcome(urgent), (outcome) => decoded(results, about, outcome))
  }

  /** Its outcome as it is kept, when there is one. */
  outcome(urgent: boolean): Effect.Effect<Outcome, QueueError> {
    return failing(this.#home.outcomes.await(this.#name, urgent))
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Change
  // -------------------------------------------------------------------------------------------------------------------

  get cancel(): Effect.Effect<boolean, QueueError> {
    return this.cancelled()
  }

  /**
   * Removes the job, with `unbegun` if it was never attempted. As a part of an end, the request persists: see `RequestOptions`.
   */
  cancelled(
    { persists = false, unbegun = false }: { readonly persists?: "end" | false; readonly unbegun?: boolean } = {}
  ): Effect.Effect<boolean, QueueError> {
    return Effect.map(
      failing(request(this.#home.place, "queue.cancel", [this.#name, unbegun], { persists })),
      ([tag]) => tag === "cancelled"
    )
  }

  get promote(): Effect.Effect<boolean, QueueError> {
    return Effect.map(
      failing(request(this.#home.place, "queue.promote", [this.#name])),
      ([tag]) => tag === "promoted"
    )
  }

  get retry(): Effect.Effect<boolean, QueueError> {
    const { letters, place, shard } = this.#home
    const sought = (before: string): Effect.Effect<boolean, QueueError> =>
      Effect.flatMap(failing(question(place, "queue.seek", [this.#name, before])), (reply) => {
        if (reply[0] === "missing") return Effect.succeed(false)
        if (reply[0] === "more") return sought(reply[1])
        return Effect.map(letters.replay([nameOf(shard, reply[1])]), (count) => count === 1)
      })
    return Effect.flatMap(this.promote, (promoted) => promoted ? Effect.succeed(true) : sought(""))
  }

  readonly reschedule = (when: RescheduleOptions): Effect.Effect<boolean, QueueError> =>
    Effect.map(
      asked(() => request(this.#home.place, "queue.reschedule", [this.#name, ...timeOf(when)])),
      ([tag]) => tag === "rescheduled"
    )

  readonly update = (payload: A): Effect.Effect<boolean, QueueError> =>
    Effect.flatMap(
      Effect.suspend(() => Exit.mapError(this.#home.payload.encode(payload), fail)),
      (body) =>
        Effect.map(
          failing(request(this.#home.place, "queue.update", [this.#name, body])),
          ([tag]) => tag === "updated"
        )
    )
}
