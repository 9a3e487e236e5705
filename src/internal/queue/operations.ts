/** What operators do with a queue, or one shard of it: look at it, and change jobs that it has. */

import type * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Option from "effect/Option"
import * as Stream from "effect/Stream"
import type { CoordinatorError } from "../actor/errors.ts"
import { checkName } from "../actor/keys.ts"
import { millisFromNone, type Place } from "../hold/place.ts"
import { question, request } from "../hold/request.ts"
import type { Codec } from "../work/codec.ts"
import type { RescheduleOptions, Status } from "./api.ts"
import { fail, failing, type QueueError } from "./errors.ts"
import { Following } from "./following.ts"
import { type Group, groupOf, groupsOf, type GroupState, removing } from "./groups.ts"
import { historyOf, type Minute } from "./history.ts"
import { type DeadLetter, Letters, type LettersOptions } from "./letters.ts"
import { type JobInfo, jobs, type JobsOptions } from "./listing.ts"
import { localOf } from "./naming.ts"
import { type State, stateOf } from "./state.ts"
import { timeOf } from "./wish.ts"

// Wrong arguments are defects of the effect.
const asked = <A>(ask: () => Effect.Effect<A, CoordinatorError>): Effect.Effect<A, QueueError> =>
  failing(Effect.suspend(ask))

export abstract class Operations<in out A> {
  readonly place: Place
  protected readonly shard: number
  protected readonly codec: Codec<A>
  protected readonly following: Following
  readonly #letters: Letters

  constructor(place: Place, shard: number, codec: Codec<A>) {
    this.place = place
    this.shard = shard
    this.codec = codec
    this.following = new Following(place)
    this.#letters = new Letters(place, shard)
  }

  protected encode(payload: A): Exit.Exit<string, QueueError> {
    return Exit.mapError(this.codec.encode(payload), fail)
  }

  readonly status = (id: string): Effect.Effect<Option.Option<Status>, QueueError> =>
    Effect.map(
      asked(() => question(this.place, "queue.status", [localOf(id)])),
      (reply) =>
        reply[0] === "missing"
          ? Option.none()
          : Option.some({ state: reply[1] as Status["state"], attempts: reply[2] })
    )

  readonly progress = (id: string): Stream.Stream<unknown, QueueError> =>
    Stream.suspend(() => this.following.progress(localOf(id), ({ reason }) => fail(reason)))

  readonly logs = (id: string): Effect.Effect<ReadonlyArray<string>, QueueError> =>
    Effect.map(
      asked(() => question(this.place, "queue.logs", [localOf(id)])),
      (reply) => reply[0] === "missing" ? [] : reply[1] as ReadonlyArray<string>
    )

  readonly cancel = (id: string): Effect.Effect<boolean, QueueError> => this.cancelled(id)

  readonly withdraw = (id: string): Effect.Effect<boolean, QueueError> => this.cancelled(id, { unbegun: true })

  // One that persists is executed when Redis is back, though its caller waits no longer than others.
  protected cancelled(
    id: string,
    { persists = false, unbegun = false }: { readonly persists?: boolean; readonly unbegun?: boolean } = {}
  ): Effect.Effect<boolean, QueueError> {
    return Effect.map(
      asked(() => request(this.place, "queue.cancel", [localOf(id), unbegun], { persists })),
      ([tag]) => tag === "cancelled"
    )
  }

  readonly promote = (id: string): Effect.Effect<boolean, QueueError> =>
    Effect.map(
      asked(() => request(this.place, "queue.promote", [localOf(id)])),
      ([tag]) => tag === "promoted"
    )

  readonly retry = (id: string): Effect.Effect<boolean, QueueError> => {
    const sought = (before: string): Effect.Effect<boolean, QueueError> =>
      Effect.flatMap(asked(() => question(this.place, "queue.seek", [localOf(id), before])), (reply) => {
        if (reply[0] === "missing") return Effect.succeed(false)
        return reply[0] === "more" ? sought(reply[1]) : Effect.map(this.replay([reply[1]]), (count) => count === 1)
      })
    return Effect.flatMap(this.promote(id), (promoted) => promoted ? Effect.succeed(true) : sought(""))
  }

  readonly reschedule = (id: string, when: RescheduleOptions): Effect.Effect<boolean, QueueError> =>
    Effect.suspend(() =>
      Effect.map(
        asked(() => request(this.place, "queue.reschedule", [localOf(id), ...timeOf(when)])),
        ([tag]) => tag === "rescheduled"
      )
    )

  readonly update = (id: string, payload: A): Effect.Effect<boolean, QueueError> =>
    Effect.flatMap(
      Effect.suspend(() => this.encode(payload)),
      (body) =>
        Effect.map(asked(() => request(this.place, "queue.update", [localOf(id), body])), ([tag]) => tag === "updated")
    )

  get pause(): Effect.Effect<void, QueueError> {
    return Effect.asVoid(failing(request(this.place, "queue.pause", [true])))
  }

  get resume(): Effect.Effect<void, QueueError> {
    return Effect.asVoid(failing(request(this.place, "queue.pause", [false])))
  }

  readonly drain = ({ delayed = false }: { readonly delayed?: boolean | undefined } = {}) =>
    removing((behind) => failing(request(this.place, "queue.drain", [delayed, behind])))

  readonly clean = (age: Duration.Input): Effect.Effect<number, QueueError> =>
    removing(() => asked(() => request(this.place, "queue.clean", [millisFromNone(age, "age")])))

  get obliterate(): Effect.Effect<number, QueueError> {
    return removing((behind) => failing(request(this.place, "queue.obliterate", [behind])))
  }

  get state(): Effect.Effect<State, QueueError> {
    return Effect.map(failing(question(this.place, "queue.state", [])), stateOf)
  }

  readonly group = (name: string): Group => groupOf(this.place, checkName(name, "name"), failing)

  get groups(): Stream.Stream<GroupState, QueueError> {
    return groupsOf(this.place, failing)
  }

  get history(): Effect.Effect<ReadonlyArray<Minute>, QueueError> {
    return Effect.map(failing(question(this.place, "queue.history", [])), ([, minutes]) => historyOf(minutes))
  }

  readonly jobs = (options: JobsOptions): Stream.Stream<JobInfo<A>, QueueError> =>
    Stream.suspend(() =>
      Stream.mapError(jobs(this.place, this.shard, this.codec, options), ({ reason }) => fail(reason))
    )

  get deadLetters(): Stream.Stream<DeadLetter, QueueError> {
    return this.#letters.list()
  }

  readonly letters = (options?: LettersOptions): Stream.Stream<DeadLetter, QueueError> => this.#letters.list(options)

  readonly replay = (letters?: ReadonlyArray<string>): Effect.Effect<number, QueueError> =>
    this.#letters.replay(letters)

  readonly discard = (letters?: ReadonlyArray<string>): Effect.Effect<number, QueueError> =>
    this.#letters.discard(letters)
}
