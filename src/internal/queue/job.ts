/** A job as its handler sees it. */

import * as Context from "effect/Context"
import * as DateTime from "effect/DateTime"
import type * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import type * as Exit from "effect/Exit"
import type * as Fiber from "effect/Fiber"
import * as Option from "effect/Option"
import { millis, type Place } from "../hold/place.ts"
import { request } from "../hold/request.ts"
import type { Timer } from "../io.ts"
import { messageOf } from "../text.ts"
import { Discarded, Snoozed } from "./deciding.ts"
import { fail, type QueueError } from "./errors.ts"
import { idOf } from "./naming.ts"
import type { Noting } from "./noting.ts"
import { packed, type Wish } from "./offering.ts"

/**
 * The job that a handler works on.
 *
 * @category services
 * @since 0.1.0
 */
export class Job extends Context.Service<Job, {
  /** The name of its queue. */
  readonly queue: string
  /** The `id` that it was offered with, or the one that `offer` has answered. */
  readonly id: string
  /** How often it was begun, this time included; attempts that ended with a return to the queue do not count. */
  readonly attempt: number
  /** How often its worker's session has ended while it was at work. */
  readonly crashes: number
  /** A fencing token: larger than that of every earlier attempt. */
  readonly token: number
  /** When it was offered, or replayed, by Redis's clock. */
  readonly offeredAt: DateTime.Utc
  /**
   * Sends a value, any JSON, to the processes that follow the job. Of the values that a handler sets before the next request is sent,
   * only the latest is sent. Redis keeps it until the job is done.
   */
  readonly progress: (value: unknown) => Effect.Effect<void>
  /** Adds a line to the log of the job: its first 2,048 characters. The newest 100 lines are kept, of up to 16 kB as JSON. */
  readonly log: (line: string) => Effect.Effect<void>
  /**
   * Keeps a state, any JSON, for later attempts, and for the replay of the dead letter. The state is stored when the effect succeeds.
   * The effect interrupts a handler whose worker has lost the job.
   */
  readonly checkpoint: (state: unknown) => Effect.Effect<void, QueueError>
  /** The latest state that earlier attempts have kept; `None` without any. */
  readonly checkpointed: Option.Option<unknown>
  /**
   * Ends the handler, and returns the job to the queue: it is delivered again after this delay, and that uses up no attempt. It
   * ends the handler as a defect does, so finalizers run, and `Effect.catch` does not see it.
   */
  readonly snooze: (delay: Duration.Input) => Effect.Effect<never>
  /** Ends the handler as `snooze` does, and makes the job a dead letter with this reason at once, however many attempts it has left. */
  readonly discard: (reason: string) => Effect.Effect<never>
  /** The schedule that has offered it, and its tick. */
  readonly schedule: Option.Option<{ readonly name: string; readonly tick: DateTime.Utc }>
  /** The group that it was offered with. */
  readonly group: string | undefined
  /**
   * Until this delay is over, no other job of the group begins on any process; without a group, no other job of the queue. This job
   * goes on. Of several such delays, the one that ends last counts; `resume` ends them.
   */
  readonly slowDown: (delay: Duration.Input) => Effect.Effect<void, QueueError>
}>()("lockstep/Queue/Job") {}

/** As the actor delivers it: id, attempts and crashes, body, and its other fields by name. */
export type Raw = readonly [id: string, count: number, body: unknown, ...more: ReadonlyArray<string>]

const jsonOf = (value: unknown, what: string): string => {
  let text: string | undefined
  try {
    text = JSON.stringify(value)
  } catch (cause) {
    throw new RangeError(`${what} must be JSON: ${messageOf(cause)}`, { cause })
  }
  if (text === undefined) throw new RangeError(`${what} must be JSON`)
  return text.toWellFormed()
}

/** Jobs that follow a job into one queue, or one shard of it. */
export interface Followers {
  readonly place: Place
  readonly items: Array<{ readonly wish: Wish }>
}

/** An errand that brings follow-ups of a job to another queue. */
export type Entrusted = readonly ["offer", partition: number, queue: string, values: string, shapes: string]

// Redis stores them with one call.
const mostFollowers = 512

// Of lua/Queue.lua.
const crash = 65_536

export class Task implements Context.Service.Shape<typeof Job> {
  // Of all shards of its queue.
  readonly #places: ReadonlyArray<Place>
  readonly key: string
  readonly count: number
  readonly body: unknown
  readonly token: number
  /** The number of the delivery to its worker that it came with. */
  readonly delivery: number
  readonly #shard: number
  readonly #more: ReadonlyArray<string> | undefined
  readonly #note: (task: Task) => Noting | undefined
  /** The last request with what its handler keeps. */
  noting: Noting | undefined = undefined
  /** The jobs that are offered when it is done, by the keys of their queues. */
  followers: Map<string, Followers> | undefined = undefined
  /** The part behind its result in its outcome: the nodes that it adds to its flow, as JSON. */
  added: Array<string> | undefined = undefined
  fiber: Fiber.Fiber<unknown, unknown> | undefined = undefined
  /** When its handler was begun. */
  begunAt = 0
  /** Its handler has ended, and what it comes to is on its way. */
  concluded = false
  /** The exit of its handler does not matter any more: the session is lost, or the job was cancelled or returned to the queue. */
  over = false
  /** Of its timeout; after its interruption, of the time that its handler has to end. */
  timer: Timer | undefined = undefined
  /** The failure of a handler that ran for longer than its timeout. */
  late: Exit.Failure<unknown, unknown> | undefined = undefined
  interrupted = false
  /** Its handler goes on after its interruption, and another job has its slot. */
  replaced = false

  constructor(
    places: ReadonlyArray<Place>,
    shard: number,
    raw: Raw,
    token: number,
    delivery: number,
    note: (task: Task) => Noting | undefined
  ) {
    this.#places = places
    this.#shard = shard
    this.key = raw[0]
    this.count = raw[1]
    this.body = raw[2]
    this.token = token
    this.delivery = delivery
    this.#note = note
    this.#more = raw.length > 3 ? raw.slice(3) as Array<string> : undefined
  }

  /** The data that is stored with its end: its follow-ups in its own queue, and errands about the others. */
  get following(): [values: string, shapes: string, errands: string] {
    const { key } = this.place
    const errands: Array<string> = []
    for (const { items, place } of this.followers!.values()) {
      if (place.key === key) continue
      const body: Entrusted = ["offer", place.partition.index, place.name, ...packed(items)]
      errands.push(JSON.stringify(body))
    }
    return [...packed(this.followers!.get(key)?.items ?? []), errands.join("\n")]
  }

  #field(name: string): string | undefined {
    const more = this.#more
    if (more === undefined) return undefined
    for (let at = 0; at < more.length; at += 2) if (more[at] === name) return more[at + 1]
    return undefined
  }

  /** Of its shard. */
  get place(): Place {
    return this.#places[this.#shard]!
  }

  get queue(): string {
    return this.place.name
  }

  get given(): string | undefined {
    return this.#field("i")
  }

  get group(): string | undefined {
    return this.#field("g")
  }

  get id(): string {
    return idOf(this.#shard, this.key, this.given)
  }

  get attempt(): number {
    return this.count % crash
  }

  get crashes(): number {
    return Math.floor(this.count / crash)
  }

  /** Has a job offered to the queue of that place when it is done. */
  follow(wish: Wish, place: Place): void {
    if (this.concluded) throw new RangeError("followUp is for handlers that have not ended")
    const all = this.followers ??= new Map<string, Followers>()
    const count = [...all.values()].reduce((sum, { items }) => sum + items.length, 0)
    if (count === mostFollowers) throw new RangeError(`a job can have up to ${mostFollowers} follow-ups`)
    const followers = all.get(place.key) ?? { place, items: [] }
    all.set(place.key, followers)
    followers.items.push({ wish })
  }

  // Getters: handlers may take these functions out of the service, and most handlers use none.
  get progress() {
    return (value: unknown): Effect.Effect<void> =>
      Effect.sync(() => {
        const text = jsonOf(value, "progress")
        const noting = this.#note(this)
        if (noting !== undefined) noting.progress = text
      })
  }

  get log() {
    return (line: string): Effect.Effect<void> =>
      Effect.sync(() => {
        if (typeof line !== "string") throw new RangeError("lines of the log must be strings")
        this.#note(this)?.log(line)
      })
  }

  get checkpoint() {
    return (state: unknown): Effect.Effect<void, QueueError> =>
      Effect.callback((resume) => {
        const text = jsonOf(state, "checkpoint")
        const noting = this.#note(this)
        if (noting === undefined) return resume(Effect.interrupt)
        noting.checkpoint = text
        noting.tell((stored, error) => {
          if (error !== undefined) resume(Effect.fail(fail(error.reason)))
          else resume(stored ? Effect.void : Effect.interrupt)
        })
      })
  }

  get checkpointed(): Option.Option<unknown> {
    const state = this.#field("k")
    return state === undefined ? Option.none() : Option.some(JSON.parse(state))
  }

  snooze(delay: Duration.Input): Effect.Effect<never> {
    return Effect.suspend(() => Effect.die(new Snoozed(millis(delay, "delay"))))
  }

  discard(reason: string): Effect.Effect<never> {
    return Effect.die(new Discarded(reason))
  }

  get offeredAt(): DateTime.Utc {
    return DateTime.makeUnsafe(Number.parseInt(this.key.slice(1), 10))
  }

  get schedule(): Option.Option<{ readonly name: string; readonly tick: DateTime.Utc }> {
    const field = this.#field("s")
    if (field === undefined) return Option.none()
    const space = field.indexOf(" ")
    return Option.some({ name: field.slice(space + 1), tick: DateTime.makeUnsafe(Number(field.slice(0, space))) })
  }

  // A getter, for the same reason.
  get slowDown() {
    return (delay: Duration.Input): Effect.Effect<void, QueueError> =>
      Effect.suspend(() => {
        const { group } = this
        const args = [group ?? "", millis(delay, "delay")] as [string, number]
        const slowing = Effect.forEach(
          group === undefined ? this.#places : [this.place],
          (place) => request(place, "queue.slow", args),
          { concurrency: "unbounded", discard: true }
        )
        return Effect.mapError(slowing, ({ reason }) => fail(reason))
      })
  }

  get attempts(): number | undefined {
    const attempts = this.#field("a")
    return attempts === undefined ? undefined : Number(attempts)
  }

  /** The delays between its attempts, if it has a schedule of its own: see delays.ts. */
  get delays(): string | undefined {
    return this.#field("z")
  }

  get timeout(): number | undefined {
    const timeout = this.#field("t")
    return timeout === undefined ? undefined : Number(timeout)
  }

  /** Whether its outcome is kept. */
  get isKept(): boolean {
    return this.#field("r") !== undefined
  }

  /** For how many milliseconds its outcome is kept; 0 for the retention of its queue. */
  get life(): number {
    return Number(this.#field("r") ?? 0)
  }

  /** How it is deduplicated: the letter of the mode, and the id for that. */
  get deduped(): string | undefined {
    return this.#field("q")
  }

  /** The W3C `traceparent` of the span that has offered it. */
  get trace(): string | undefined {
    return this.#field("x")
  }
}
