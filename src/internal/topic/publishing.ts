/** Publishes: events are requests of the session, numbered so that each is stored once. */

import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import type { CoordinatorError } from "../actor/errors.ts"
import type { Kernel } from "../actor/kernel.ts"
import { partitionOf } from "../actor/keys.ts"
import type { Requests } from "../actor/lua.ts"
import type { Request } from "../actor/sending.ts"
import type { Leader } from "../hold/following.ts"
import type { Place } from "../hold/place.ts"
import { question } from "../hold/request.ts"
import { giveUpAfter, type Timer } from "../io.ts"
import { fail, failing, type TopicError } from "./errors.ts"
import { numberOf, timeOf } from "./event.ts"
import { nameOf, type Parts } from "./parts.ts"
import type { Shard } from "./shard.ts"

/** The result of a publication. */
export interface Published {
  /** Of the event; empty when it was stored, and its id was lost with the session. */
  readonly id: string
  /** An event with this `id` was published before, so this one was not stored; `id` is that of the former. */
  readonly duplicate: boolean
}

export interface Message {
  readonly body: string
  readonly key: string
  readonly id: string
  readonly trace: string
}

/** Receives the outcome: nothing was published if the event follows a request that was answered otherwise. */
type Settle = (outcome: Exit.Exit<Published | undefined, TopicError>) => void

/** An event that is to be stored. */
interface Waiting {
  readonly message: Message
  /** In this order they were published. */
  readonly number: number
  /** No shard of this epoch, or of an earlier one, knows its id. */
  unknownIn: number
  readonly settle: Settle
}

const failed = ({ reason }: CoordinatorError): Exit.Exit<never, TopicError> => Exit.fail(fail(reason))

// A class: closures of its own would be a good part of what a publication costs.
abstract class Sending {
  readonly shard: Shard<any>
  readonly index: number
  askedAt: number | undefined = undefined
  queued: boolean | undefined = undefined
  /** It has expired. */
  cancelled = false
  sent: readonly [at: number, wall: number] | undefined = undefined
  expire: ((error: CoordinatorError) => void) | undefined = expire

  constructor(shard: Shard<any>, index: number) {
    this.shard = shard
    this.index = index
  }

  get place(): Place {
    return this.shard.place
  }

  get key(): string {
    return this.place.key
  }

  /** Another process may change that meanwhile. */
  get knownFor(): number {
    return this.shard.window
  }

  abstract fail(error: CoordinatorError): void
}

function expire(this: Sending, error: CoordinatorError): void {
  this.fail(error)
  this.cancelled = true
}

/** One event, with its key, id and other fields. */
class Single extends Sending implements Request<"topic.publish"> {
  readonly verb = "topic.publish"
  args: Requests["topic.publish"]["args"]
  readonly #waiting: Waiting
  // Undefined if it follows another request, and was not sent by a publisher.
  readonly #publisher: Publisher | undefined

  constructor(
    publisher: Publisher | undefined,
    shard: Shard<any>,
    index: number,
    args: Requests["topic.publish"]["args"],
    waiting: Waiting
  ) {
    super(shard, index)
    this.args = args
    this.#waiting = waiting
    this.#publisher = publisher
  }

  /** The tag in front of the lengths is "-" then, see lua/TopicPublish.lua. */
  orphan(): void {
    const [value, about, number] = this.args
    if (this.#publisher === undefined) this.args = [value, about.replace(/^(\S+ \S+) \S*/, "$1 -"), number]
  }

  settle(reply: Requests["topic.publish"]["reply"]): void {
    if (this.cancelled) return
    const [tag, event] = reply
    if (tag === "moved") this.#publisher?.moved([this.#waiting])
    else if (tag === "skipped") this.#waiting.settle(Exit.succeed(undefined))
    else this.#stored(tag === "duplicate", event)
    this.#publisher?.ended()
  }

  #stored(duplicate: boolean, event: string): void {
    if (!duplicate) this.place.space.kernel.hooks.metrics.published(1)
    const id = event === "" ? "" : nameOf(this.index, event)
    this.#waiting.settle(Exit.succeed({ id, duplicate: duplicate && id !== "" }))
  }

  fail(error: CoordinatorError): void {
    if (this.cancelled) return
    this.#waiting.settle(failed(error))
    this.#publisher?.ended()
  }
}

/** Events of which there is nothing but their value, one behind the other: many are published by one request. */
class Run extends Sending implements Request<"topic.publishAll"> {
  readonly verb = "topic.publishAll"
  weight = 1
  readonly #publisher: Publisher
  readonly #about: string
  readonly #all: Array<Waiting>
  #length: number
  #args: Requests["topic.publishAll"]["args"] | undefined = undefined

  constructor(publisher: Publisher, shard: Shard<any>, index: number, about: string, first: Waiting) {
    super(shard, index)
    this.#publisher = publisher
    this.#about = about
    this.#all = [first]
    this.#length = first.message.body.length
  }

  add(waiting: Waiting): void {
    this.#all.push(waiting)
    this.#length += waiting.message.body.length
  }

  /** It has not been sent, so more can be added. */
  hasRoomFor({ body }: Message): boolean {
    return this.#args === undefined && this.#length + body.length <= runLength
  }

  // Made when it is sent, and the same each time.
  get args(): Requests["topic.publishAll"]["args"] {
    if (this.#args === undefined) {
      const bodies = this.#all.map(({ message: { body } }) => body)
      this.#args = [bodies.join(""), `[${bodies.map(sizeOf).join()}]`, this.#about, this.#all[0]!.number]
    }
    return this.#args
  }

  settle([tag, event]: Requests["topic.publishAll"]["reply"]): void {
    if (this.cancelled) return
    if (tag === "moved") this.#publisher.moved(this.#all)
    else this.#stored(event)
    this.#publisher.ended()
  }

  // They were stored behind one another.
  #stored(event: string | undefined): void {
    if (event === undefined) {
      for (const { settle } of this.#all) settle(Exit.succeed({ id: "", duplicate: false }))
      return
    }
    this.place.space.kernel.hooks.metrics.published(this.#all.length)
    const time = nameOf(this.index, `${timeOf(event)}-`)
    let number = numberOf(event)
    for (const { settle } of this.#all) settle(Exit.succeed({ id: `${time}${number++}`, duplicate: false }))
  }

  fail(error: CoordinatorError): void {
    if (this.cancelled) return
    const outcome = failed(error)
    for (const { settle } of this.#all) settle(outcome)
    this.#publisher.ended()
  }
}

// So many characters are in one request. The outbox can send fewer requests with a call, but no part of one.
const runLength = 2 ** 22

// So many requests wait at a time, of one call.
const chunkSize = 4096

const isPlain = ({ id, key, trace }: Message): boolean => id === "" && key === "" && trace === ""

/** The text that decides about its shard; empty if any will do. */
const placeOf = ({ id, key }: Message): string => key === "" ? id : key

const sizeOf = (text: string): number => Buffer.byteLength(text)

export class Publisher {
  readonly #parts: Parts<any>
  readonly #kernel: Kernel
  readonly #node: string
  readonly #name: string
  // A number for each publication, growing: a smaller one that comes later is a repetition.
  #number = 0
  #next = 0
  // Of the shards, as all that was sent lately knows them.
  #epoch = 0
  #shards = 1
  // So many are sent, and not answered.
  #sent = 0
  // Of each shard, the last request, if events can be added to it.
  readonly #runs: Array<Run | undefined> = []
  // The events that wait for a change of the shards to be over, so that the events of a key keep their order.
  #waiting: Array<Waiting> | undefined = undefined
  #isFinding = false
  #expiry: Timer | undefined = undefined

  constructor(parts: Parts<any>, kernel: Kernel) {
    this.#parts = parts
    this.#kernel = kernel
    this.#node = kernel.uniqueId()
    this.#name = kernel.settings.name
  }

  #shardOf(message: Message): number {
    const shards = this.#shards
    if (shards === 1) return 0
    const place = placeOf(message)
    if (place !== "") return partitionOf(place, shards)
    this.#next = (this.#next + 1) % shards
    return this.#next
  }

  #single(waiting: Waiting, shard: number, after: string): Single {
    const { body, id, key, trace } = waiting.message
    // An event that follows another request is sent behind later publications, so it is not numbered with them.
    const node = after === "" ? this.#node : this.#kernel.uniqueId()
    const about = `${this.#epoch} ${node} ${after} ${sizeOf(key)} ${sizeOf(id)} ${
      sizeOf(trace)
    } ${key}${id}${trace}${this.#name}`
    const own = after === "" ? this : undefined
    return new Single(own, this.#parts.all[shard]!, shard, [body, about, waiting.number], waiting)
  }

  #send(message: Message, unknownIn: number, settle: Settle): void {
    const waiting = { message, number: ++this.#number, unknownIn, settle }
    if (this.#waiting !== undefined) return void this.#waiting.push(waiting)
    const shard = this.#shardOf(message)
    const part = this.#parts.all[shard]!
    const { away, outbox } = part.place.channel
    const run = this.#runs[shard]
    if (isPlain(message)) {
      // While Redis is away, each has its own deadline.
      if (run !== undefined && run.hasRoomFor(message) && !away && outbox.extend(run)) return run.add(waiting)
      const about = `${this.#epoch} ${this.#node}  0 0 0 ${this.#name}`
      const next = new Run(this, part, shard, about, waiting)
      this.#runs[shard] = next
      return this.#request(next)
    }
    this.#runs[shard] = undefined
    this.#request(this.#single(waiting, shard, ""))
  }

  #request(request: Single | Run): void {
    const { channel } = request.place
    this.#sent++
    if (this.#kernel.isClosing()) return request.fail(channel.closedError())
    channel.outbox.request(request as unknown as Request)
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Changes of the shards
  // -------------------------------------------------------------------------------------------------------------------

  /** Its shard does not take it in any more, or not yet. */
  moved(all: ReadonlyArray<Waiting>): void {
    for (const one of all) one.unknownIn = this.#epoch
    this.#wait().push(...all)
    this.#parts.follow()
  }

  /** One that was sent is answered. */
  ended(): void {
    this.#sent--
    this.#goOn()
  }

  /** All shards are in an epoch. */
  readonly changed = (): void => {
    const { epoch, shards } = this.#parts
    if (epoch === this.#epoch && shards === this.#shards && this.#waiting === undefined) return
    this.#wait()
    this.#goOn()
  }

  #wait(): Array<Waiting> {
    if (this.#waiting !== undefined) return this.#waiting
    const { io, settings: { requestTimeout }, transport } = this.#kernel
    const waiting: Array<Waiting> = []
    this.#waiting = waiting
    this.#expiry = giveUpAfter(io, requestTimeout, () => {
      this.#waiting = undefined
      const outcome = failed(transport.late(this.#parts.all[0]!.place.key))
      for (const { settle } of waiting) settle(outcome)
    })
    return waiting
  }

  // Events that were sent before can still come back, and belong before events that were published since.
  #goOn(): void {
    const waiting = this.#waiting
    if (waiting === undefined || this.#sent > 0 || this.#isFinding || this.#parts.isChanging) return
    this.#epoch = this.#parts.epoch
    this.#shards = this.#parts.shards
    const unasked = waiting.filter(({ message, unknownIn }) => message.id !== "" && unknownIn < this.#epoch - 1)
    if (unasked.length > 0) return this.#findAll(waiting, unasked)
    this.#expiry?.cancel()
    this.#waiting = undefined
    waiting.sort((a, b) => a.number - b.number)
    for (const { message, settle, unknownIn } of waiting) this.#send(message, unknownIn, settle)
  }

  // A shard of before the change may know their ids: one that was not asked yet, or was before it was sealed.
  #findAll(waiting: Array<Waiting>, unasked: ReadonlyArray<Waiting>): void {
    this.#isFinding = true
    const sealed = this.#epoch - 1
    const drop = (one: Waiting) => waiting.splice(waiting.indexOf(one), 1)
    const found = Effect.forEach(
      unasked,
      (one) =>
        Effect.map(Effect.exit(this.#find(one.message)), (found) => {
          one.unknownIn = sealed
          if (Exit.isSuccess(found) && found.value === undefined) return
          drop(one)
          one.settle(found)
        }),
      { concurrency: 64, discard: true }
    )
    this.#kernel.io.run(Effect.onExit(found, () =>
      Effect.sync(() => {
        this.#isFinding = false
        this.#goOn()
      })))
  }

  // A shard of before a change knows the ids that were published there.
  #find(message: Message): Effect.Effect<Published | undefined, TopicError> {
    const now = this.#kernel.io.now()
    const shards = new Set(
      this.#parts.former.filter(({ until }) => until > now).map(({ shards }) => partitionOf(placeOf(message), shards))
    )
    const found = Effect.forEach(shards, (shard) =>
      Effect.map(
        question(this.#parts.all[shard]!.place, "topic.find", [message.id]),
        ([, event]) => event === "" ? undefined : { id: nameOf(shard, event), duplicate: true }
      ), { concurrency: "unbounded" })
    return Effect.map(failing(found), (all) => all.find((published) => published !== undefined))
  }

  /** The key or id that keeps an event from following a request: only the first shard is beside that. */
  apart(message: Message): string | undefined {
    const place = placeOf(message)
    return place === "" || partitionOf(place, this.#parts.shards) === 0 ? undefined : place
  }

  /** A publication that follows a request, and is made if that is answered with this tag. */
  following(
    leader: Leader,
    message: Message,
    after: string,
    settle: Settle
  ): Request {
    const publishing = this.#single({ message, number: 1, unknownIn: this.#epoch, settle }, 0, after)
    const { place } = publishing
    if (place.channel !== leader.channel) {
      throw new RangeError(
        `topic ${JSON.stringify(place.name)} is not in the partition of ${leader.kind} ${
          JSON.stringify(leader.name)
        }, or was made ` +
          `with another coordinator or lease: give it \`colocate: ${JSON.stringify(leader.name)}\``
      )
    }
    return publishing as unknown as Request
  }

  /** Stores an event once. While Redis is away it fails after the `requestTimeout`; if it was sent, it may be stored. */
  publish(message: Message): Effect.Effect<Published, TopicError> {
    const sealed = this.#epoch - 1
    const stored = Effect.callback<Published, TopicError>((resume) => this.#send(message, sealed, resume as Settle))
    if (message.id === "" || this.#parts.former.length === 0) return stored
    return Effect.flatMap(this.#find(message), (found) => found === undefined ? stored : Effect.succeed(found))
  }

  /** Stores events in order. The first failure is the answer, and later ones may be stored all the same. */
  publishAll(messages: ReadonlyArray<Message>): Effect.Effect<ReadonlyArray<Published>, TopicError> {
    const rest = (
      from: number,
      results: ReadonlyArray<Published>
    ): Effect.Effect<ReadonlyArray<Published>, TopicError> =>
      from >= messages.length
        ? Effect.succeed(results)
        : Effect.flatMap(
          this.#publishChunk(messages.slice(from, from + chunkSize)),
          (more) => rest(from + chunkSize, from === 0 ? more : results.concat(more))
        )
    return rest(0, [])
  }

  #publishChunk(messages: ReadonlyArray<Message>): Effect.Effect<ReadonlyArray<Published>, TopicError> {
    const results: Array<Published | undefined> = new Array(messages.length)
    const sealed = this.#epoch - 1
    const stored = Effect.callback<ReadonlyArray<Published>, TopicError>((resume) => {
      let left = 1
      const one = () => {
        if (--left === 0) resume(Effect.succeed(results as ReadonlyArray<Published>))
      }
      for (const [at, message] of messages.entries()) {
        if (results[at] !== undefined) continue
        left++
        this.#send(message, sealed, (outcome) => {
          if (Exit.isFailure(outcome)) return resume(Exit.failCause(outcome.cause))
          results[at] = outcome.value
          one()
        })
      }
      one()
    })
    if (this.#parts.former.length === 0) return stored
    const found = Effect.forEach(
      messages.entries(),
      ([at, message]) =>
        message.id === "" ? Effect.void : Effect.map(this.#find(message), (published) => {
          results[at] = published
        }),
      { concurrency: 64, discard: true }
    )
    return Effect.andThen(found, stored)
  }
}
