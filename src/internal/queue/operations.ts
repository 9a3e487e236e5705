/** The operations on all jobs of a queue, or of one shard of it, for operators. */

import type * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Stream from "effect/Stream"
import { checkName } from "../actor/keys.ts"
import { millisFromNone, type Place } from "../hold/place.ts"
import { question, request } from "../hold/request.ts"
import type { Codec } from "../work/codec.ts"
import { asked, fail, failing, type QueueError } from "./errors.ts"
import { type Group, groupOf, groupsOf, type GroupState, removing } from "./groups.ts"
import { historyOf, type Minute } from "./history.ts"
import { type DeadLetter, Letters, type LettersOptions } from "./letters.ts"
import { type JobInfo, jobs, type JobsOptions } from "./listing.ts"
import { type State, stateOf } from "./state.ts"

export abstract class Operations<in out A> {
  readonly place: Place
  protected readonly shard: number
  protected readonly codec: Codec<A>
  protected readonly buried: Letters

  constructor(place: Place, shard: number, codec: Codec<A>) {
    this.place = place
    this.shard = shard
    this.codec = codec
    this.buried = new Letters(place, shard)
  }

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
    return this.buried.list()
  }

  readonly letters = (options?: LettersOptions): Stream.Stream<DeadLetter, QueueError> => this.buried.list(options)

  readonly replay = (letters?: ReadonlyArray<string>): Effect.Effect<number, QueueError> => this.buried.replay(letters)

  readonly discard = (letters?: ReadonlyArray<string>): Effect.Effect<number, QueueError> =>
    this.buried.discard(letters)
}
