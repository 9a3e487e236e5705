/** Several shards as one queue. */

import type * as Cron from "effect/Cron"
import type * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Stream from "effect/Stream"
import { checkName, partitionOf } from "../actor/keys.ts"
import { bounded } from "../hold/acquire.ts"
import { sending } from "../hold/span.ts"
import type {
  AwaitOptions,
  ExecuteOptions,
  PoolOptions,
  Queue,
  RunOptions,
  TakeBatchOptions,
  TakeOptions,
  WithJobOptions
} from "./api.ts"
import type { Codecs, Inner } from "./errands.ts"
import { fail, type QueueError, QueueFull } from "./errors.ts"
import type { Group, GroupState } from "./groups.ts"
import type { Handle } from "./handle.ts"
import { historyOfAll, type Minute } from "./history.ts"
import { Job } from "./job.ts"
import type { DeadLetter, LettersOptions } from "./letters.ts"
import type { JobInfo, JobsOptions } from "./listing.ts"
import { ownOf } from "./naming.ts"
import type { Offered, Wish } from "./offering.ts"
import { longestTurn, mostAhead, storedOf } from "./offers.ts"
import { limitOf } from "./paging.ts"
import type { Scheduled, ScheduleOptions } from "./schedules.ts"
import type { Shard } from "./shard.ts"
import { type State, stateOfAll } from "./state.ts"
import { afterOf, type OfferOptions } from "./wish.ts"

/**
 * A queue of several shards. A job that has an `id` is in the shard of that id. Other jobs go to the shard that the process offers
 * to at the moment.
 */
export class Sharded<in out A, in out S, in out E> implements Queue<A, S, E>, Inner<A> {
  readonly "~lockstep/Queue" = "~lockstep/Queue" as const
  readonly #shards: ReadonlyArray<Shard<A, S, E>>
  readonly #first: Shard<A, S, E>
  // The shard of jobs without an id.
  #current = 0

  constructor(shards: ReadonlyArray<Shard<A, S, E>>) {
    this.#shards = shards
    this.#first = shards[0]!
    this.#first.spread(shards)
  }

  get name(): string {
    return this.#first.name
  }

  get codecs(): Codecs<A> {
    return this.#first.codecs
  }

  get subject(): string {
    return this.#first.subject
  }

  checkOptions(options: OfferOptions): void {
    this.#first.checkOptions(options)
  }

  get partitions(): ReadonlyArray<number> {
    return this.#first.partitions
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Where jobs are
  // -------------------------------------------------------------------------------------------------------------------

  #home(name: string): Shard<A, S, E> {
    return this.#shards[partitionOf(name, this.#shards.length)]!
  }

  #of(id: string): Shard<A, S, E> {
    const own = ownOf(id)
    return own === undefined ? this.#home(checkName(id, "id")) : this.#shards[own[0]] ?? this.#first
  }

  // Jobs that are offered at the same time share a request, and so a shard.
  get #next(): Shard<A, S, E> {
    if (!this.#shards[this.#current]!.isOffering) this.#current = (this.#current + 1) % this.#shards.length
    return this.#shards[this.#current]!
  }

  #for(options: OfferOptions | undefined): Shard<A, S, E> {
    const before = options === undefined ? [] : afterOf(options).map((id) => this.#of(id))
    const shard = before.length > 0 && options?.id === undefined && options?.dedupe === undefined &&
        options?.group === undefined
      ? before[0]!
      : this.#placed(options)
    if (before.some((one) => one !== shard)) {
      throw new RangeError("after names a job of another shard than that of the job: use a Flow for those")
    }
    return shard
  }

  #placed(options: OfferOptions | undefined): Shard<A, S, E> {
    const named = options?.id ?? options?.dedupe?.id
    if (options?.group === undefined) return named === undefined ? this.#next : this.#home(named)
    // Jobs are looked for where their id is, and a group is in one shard.
    if (named !== undefined) {
      throw new RangeError("group goes with no id and no dedupe where a queue has several shards")
    }
    return this.#home(options.group)
  }

  #all<B>(
    use: (shard: Shard<A, S, E>) => Effect.Effect<B, QueueError>
  ): Effect.Effect<ReadonlyArray<B>, QueueError> {
    return Effect.forEach(this.#shards, use, { concurrency: "unbounded" })
  }

  #sum(use: (shard: Shard<A, S, E>) => Effect.Effect<number, QueueError>): Effect.Effect<number, QueueError> {
    return Effect.map(this.#all(use), (counts) => counts.reduce((sum, count) => sum + count, 0))
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Offer
  // -------------------------------------------------------------------------------------------------------------------

  readonly offer = (payload: A, options?: OfferOptions & AwaitOptions): Effect.Effect<Offered, QueueError> =>
    Effect.suspend(() => this.#for(options).offer(payload, options))

  readonly offerFor = (...offer: Parameters<Inner<A>["offerFor"]>): Effect.Effect<Offered, QueueError> =>
    Effect.suspend(() => this.#for(offer[1]).offerFor(...offer))

  readonly offerAll = (
    payloads: Iterable<A>,
    options?: OfferOptions & AwaitOptions | ((payload: A) => OfferOptions)
  ): Effect.Effect<ReadonlyArray<Offered>, QueueError> => {
    const wait = typeof options === "function" ? undefined : options?.wait
    return bounded(this.#offerAll(payloads, options), this.#first.place, wait, fail)
  }

  // Up to `mostAhead` jobs at a time, some of each shard.
  #offerAll(
    payloads: Iterable<A>,
    options: OfferOptions | ((payload: A) => OfferOptions) | undefined
  ): Effect.Effect<ReadonlyArray<Offered>, QueueError> {
    return sending(
      (trace, context) => {
        const { io } = this.#first.place.space.kernel
        const sender = { trace, context }
        const results: Array<Offered> = []
        const iterator = payloads[Symbol.iterator]()
        const some: Effect.Effect<ReadonlyArray<Offered>, QueueError> = Effect.suspend(() => {
          const parts = new Map<Shard<A, S, E>, Array<Item>>()
          let [next, ended] = [results.length, false]
          const to = next + mostAhead
          const encoded: Effect.Effect<void, QueueError> = Effect.suspend(() => {
            const until = io.now() + longestTurn
            while (next < to) {
              if (io.now() > until) return Effect.andThen(Effect.yieldNow, encoded)
              const one = iterator.next()
              ended = one.done === true
              if (one.done === true) break
              const chosen = typeof options === "function" ? options(one.value) : options
              const shard = this.#among(chosen, next)
              const wish = shard.wishFor(one.value, chosen, sender)
              if (Exit.isFailure(wish)) return Effect.failCause(wish.cause)
              const items = parts.get(shard) ?? []
              parts.set(shard, items)
              items.push({ at: next++, wish })
            }
            return Effect.void
          })
          const offered = Effect.suspend(() =>
            Effect.forEach(parts, ([shard, items]) => this.#part(shard, items, results), { concurrency: "unbounded" })
          )
          return Effect.flatMap(Effect.andThen(encoded, offered), (found) => {
            const full = found.find((reason) => reason !== undefined)
            if (full !== undefined) return Effect.fail(fail(new QueueFull({ ...full, stored: storedOf(results) })))
            return ended ? Effect.succeed(results) : some
          })
        })
        return some
      },
      "lockstep.Queue.offerAll",
      "queue",
      this.name
    )
  }

  // Of one of many jobs, by its place among them.
  #among(options: OfferOptions | undefined, at: number): Shard<A, S, E> {
    return options?.id === undefined && options?.dedupe === undefined && options?.group === undefined &&
        options?.after === undefined
      ? this.#shards[(this.#current + Math.floor(at / chunk)) % this.#shards.length]!
      : this.#for(options)
  }

  // Answers why some were not stored, if the shard is full: the other shards go on.
  #part(shard: Shard<A, S, E>, items: ReadonlyArray<Item>, results: Array<Offered>) {
    let at = 0
    const place = (one: Offered, at: number) => void (results[items[at]!.at] = one)
    return Effect.matchEffect(shard.offerEach(() => items[at++]?.wish), {
      onSuccess: (found) => Effect.sync(() => found.forEach(place)),
      onFailure: (error) => {
        if (error.reason._tag !== "QueueFull") return Effect.fail(error)
        for (const { at, ...one } of error.reason.stored) place(one, at)
        return Effect.succeed(error.reason)
      }
    })
  }

  // The job goes to the shard of the handler's job, so no process would look for an id of its own there.
  readonly followUp = (payload: A, options?: OfferOptions): Effect.Effect<void, QueueError, Job> =>
    Effect.flatMap(Job, (job) => {
      const own = this.#shards.find((shard) => shard.hasHanded(job))
      if (own === undefined) return this.#for(options).followUp(payload, options)
      if (options?.id !== undefined || options?.dedupe !== undefined) {
        throw new RangeError("followUp takes no id and no dedupe where a queue has several shards")
      }
      if (options?.group !== undefined && options.group !== job.group) {
        throw new RangeError("followUp takes no other group than that of its job where a queue has several shards")
      }
      return own.followUp(payload, options)
    })

  readonly execute = (payload: A, options?: ExecuteOptions): Effect.Effect<S, E | QueueError> =>
    Effect.suspend(() => this.#for(options).execute(payload, options))

  // -------------------------------------------------------------------------------------------------------------------
  // Work
  // -------------------------------------------------------------------------------------------------------------------

  readonly run = <E2, R>(handler: (payload: A) => Effect.Effect<S, E2, R>, options?: RunOptions<E2>) =>
    this.#first.run(handler, options)

  readonly pool = <E2, R>(handler: (payload: A) => Effect.Effect<S, E2, R>, options?: PoolOptions<E2>) =>
    this.#first.pool(handler, options)

  readonly withJob = <B extends S, E2, R>(
    use: (payload: A) => Effect.Effect<B, E2, R>,
    options?: WithJobOptions<E2>
  ) => this.#first.withJob(use, options)

  readonly take = (options?: TakeOptions) => this.#first.take(options)

  readonly takeBatch = (options: TakeBatchOptions) => this.#first.takeBatch(options)

  // -------------------------------------------------------------------------------------------------------------------
  // One job
  // -------------------------------------------------------------------------------------------------------------------

  readonly job = (id: string): Handle<A, S, E> => this.#of(id).job(id)

  // -------------------------------------------------------------------------------------------------------------------
  // All jobs
  // -------------------------------------------------------------------------------------------------------------------

  get pause(): Effect.Effect<void, QueueError> {
    return Effect.asVoid(this.#all((shard) => shard.pause))
  }

  get resume(): Effect.Effect<void, QueueError> {
    return Effect.asVoid(this.#all((shard) => shard.resume))
  }

  readonly drain = (options?: { readonly delayed?: boolean | undefined }) => this.#sum((shard) => shard.drain(options))

  readonly clean = (age: Duration.Input): Effect.Effect<number, QueueError> => this.#sum((shard) => shard.clean(age))

  get obliterate(): Effect.Effect<number, QueueError> {
    return this.#sum((shard) => shard.obliterate)
  }

  get history(): Effect.Effect<ReadonlyArray<Minute>, QueueError> {
    return Effect.map(this.#all((shard) => shard.history), historyOfAll)
  }

  readonly jobs = ({ after = "", limit, ...options }: JobsOptions): Stream.Stream<JobInfo<A>, QueueError> =>
    Stream.suspend(() => {
      const [, shard = "0", behind] = /^(?:(\d{1,4})\/)?([^]*)$/.exec(after)!
      return this.#listed(
        Number(shard),
        limit,
        (one, first) => one.jobs({ ...options, limit, after: first ? behind : undefined })
      )
    })

  // Shard by shard, from one on.
  #listed<B>(
    from: number,
    limit: number | undefined,
    list: (shard: Shard<A, S, E>, first: boolean) => Stream.Stream<B, QueueError>
  ): Stream.Stream<B, QueueError> {
    const shards = Stream.fromIterable(this.#shards.slice(from).entries())
    return Stream.take(Stream.flatMap(shards, ([at, one]) => list(one, at === 0)), limitOf(limit))
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Schedules, in the shards of their names
  // -------------------------------------------------------------------------------------------------------------------

  readonly schedule = (name: string, times: Cron.Cron | Duration.Input, payload: A, options?: ScheduleOptions) =>
    Effect.suspend(() => this.#home(checkName(name, "name")).schedule(name, times, payload, options))

  readonly unschedule = (name: string) => Effect.suspend(() => this.#home(checkName(name, "name")).unschedule(name))

  get schedules(): Stream.Stream<Scheduled<A>, QueueError> {
    return Stream.flatMap(Stream.fromIterable(this.#shards), (shard) => shard.schedules)
  }

  readonly nextRuns = (name: string, count: number) =>
    Effect.suspend(() => this.#home(checkName(name, "name")).nextRuns(name, count))

  get state(): Effect.Effect<State, QueueError> {
    return Effect.map(this.#all((shard) => shard.state), stateOfAll)
  }

  readonly group = (name: string): Group => this.#home(checkName(name, "name")).group(name)

  get groups(): Stream.Stream<GroupState, QueueError> {
    return Stream.flatMap(Stream.fromIterable(this.#shards), (shard) => shard.groups)
  }

  get deadLetters(): Stream.Stream<DeadLetter, QueueError> {
    return this.letters()
  }

  readonly letters = ({ after, limit }: LettersOptions = {}): Stream.Stream<DeadLetter, QueueError> =>
    Stream.suspend(() => {
      const [shard = 0] = after === undefined ? [] : ownOf(after) ?? []
      return this.#listed(shard, limit, (one, first) => one.letters({ limit, after: first ? after : undefined }))
    })

  readonly replay = (letters?: ReadonlyArray<string>): Effect.Effect<number, QueueError> =>
    this.#sum((shard) => shard.replay(letters?.filter((letter) => this.#of(letter) === shard)))

  readonly discard = (letters?: ReadonlyArray<string>): Effect.Effect<number, QueueError> =>
    this.#sum((shard) => shard.discard(letters?.filter((letter) => this.#of(letter) === shard)))
}

interface Item {
  readonly at: number
  readonly wish: Exit.Exit<Wish, QueueError>
}

// This many consecutive jobs of a call are in one shard.
const chunk = 512
