/** Publishes: every event is a request of the session, numbered so that it is stored once. */

import * as Effect from "effect/Effect"
import type { CoordinatorError } from "../actor/errors.ts"
import { partitionOf } from "../actor/keys.ts"
import type { Requests } from "../actor/lua.ts"
import type { Request } from "../actor/outbox.ts"
import type { Leader } from "../hold/following.ts"
import type { Place } from "../hold/place.ts"

/** What Redis has made of a publication. */
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

type Done = (published: Published | undefined) => void

// A class: closures of its own would be a good part of what a publication costs.
class Publishing implements Request<"topic.publish"> {
  readonly verb = "topic.publish"
  readonly place: Place
  readonly args: Requests["topic.publish"]["args"]
  readonly fail: (error: CoordinatorError) => void
  askedAt: number | undefined = undefined
  queued: boolean | undefined = undefined
  cancelled = false
  readonly #done: Done
  readonly #nameOf: (id: string) => string

  constructor(
    place: Place,
    args: Requests["topic.publish"]["args"],
    done: Done,
    fail: (error: CoordinatorError) => void,
    nameOf: (id: string) => string
  ) {
    this.place = place
    this.args = args
    this.fail = fail
    this.#done = done
    this.#nameOf = nameOf
  }

  get key(): string {
    return this.place.key
  }

  settle(reply: Requests["topic.publish"]["reply"]): void {
    if (reply[0] === "skipped") return this.#done(undefined)
    if (reply[0] === "published") this.place.space.kernel.hooks.metrics.published()
    const stored = reply[1] === "" ? "" : this.#nameOf(reply[1])
    this.#done({ id: stored, duplicate: reply[0] === "duplicate" && stored !== "" })
  }

  expire: ((error: CoordinatorError) => void) | undefined = expire
}

function expire(this: Publishing, error: CoordinatorError): void {
  this.cancelled = true
  this.fail(error)
}

// So many requests wait at a time, of one call.
const chunkSize = 4096

const sizeOf = (text: string): number => Buffer.byteLength(text)

export class Publisher {
  readonly #places: ReadonlyArray<Place>
  readonly #node: string
  readonly #name: string
  // Of each shard, what makes the id of an event.
  readonly #names: ReadonlyArray<(id: string) => string>
  // A number for each publication, growing: a smaller one that comes later is a repetition.
  #number = 0
  #next = 0

  constructor(places: ReadonlyArray<Place>, nameOf: (shard: number, id: string) => string) {
    const { kernel } = places[0]!.space
    this.#places = places
    this.#names = places.map((_, shard) => (id) => nameOf(shard, id))
    this.#node = kernel.uniqueId()
    this.#name = kernel.settings.name
  }

  #shardOf(key: string): number {
    const { length } = this.#places
    if (length === 1) return 0
    if (key !== "") return partitionOf(key, length)
    this.#next = (this.#next + 1) % length
    return this.#next
  }

  #request(
    { body, id, key, trace }: Message,
    node: string,
    number: number,
    after: string,
    done: Done,
    fail: (error: CoordinatorError) => void
  ): Publishing {
    const shard = this.#shardOf(id === "" || key !== "" ? key : id)
    const plain = id === "" && key === "" && trace === ""
    const about = plain
      ? `${node} ${after} 0 0 0 ${this.#name}`
      : `${node} ${after} ${sizeOf(key)} ${sizeOf(id)} ${sizeOf(trace)} ${key}${id}${trace}${this.#name}`
    return new Publishing(this.#places[shard]!, [body, about, number], done, fail, this.#names[shard]!)
  }

  #send(message: Message, done: Done, fail: (error: CoordinatorError) => void): void {
    const publishing = this.#request(message, this.#node, ++this.#number, "", done, fail)
    const { channel, space: { kernel } } = publishing.place
    if (kernel.isClosing()) fail(channel.closedError())
    else channel.outbox.request(publishing)
  }

  /** A publication that follows a request, and is made if that is answered with this tag. */
  following(
    leader: Leader,
    message: Message,
    after: string,
    done: (published: Published | undefined) => void,
    fail: (error: CoordinatorError) => void
  ): Request {
    // It is sent behind later publications, so it is not numbered with them.
    const node = this.#places[0]!.space.kernel.uniqueId()
    const publishing = this.#request(message, node, 1, after, done, fail)
    const { place } = publishing
    if (place.channel !== leader.channel) {
      throw new RangeError(
        `topic ${JSON.stringify(place.name)} is not in the partition of ${leader.kind} ${
          JSON.stringify(leader.name)
        }, or has ` +
          `another lease: give it \`colocate: ${JSON.stringify(leader.name)}\``
      )
    }
    return publishing as unknown as Request
  }

  /** Stores an event once. While Redis is away it fails after the `requestTimeout`; if it was sent, it may be stored. */
  publish(message: Message): Effect.Effect<Published, CoordinatorError> {
    return Effect.callback((resume) =>
      this.#send(
        message,
        (published) => resume(Effect.succeed(published!)),
        (error) => resume(Effect.fail(error))
      )
    )
  }

  /** Stores events in order. The first failure is the answer, and later ones may be stored all the same. */
  publishAll(messages: ReadonlyArray<Message>): Effect.Effect<ReadonlyArray<Published>, CoordinatorError> {
    const results: Array<Published> = new Array(messages.length)
    const chunk = (from: number) =>
      Effect.callback<void, CoordinatorError>((resume) => {
        const to = Math.min(messages.length, from + chunkSize)
        let left = to - from
        for (let at = from; at < to; at++) {
          this.#send(
            messages[at]!,
            (published) => {
              results[at] = published!
              if (--left === 0) resume(Effect.void)
            },
            (error) => resume(Effect.fail(error))
          )
        }
      })
    const rest = (from: number): Effect.Effect<ReadonlyArray<Published>, CoordinatorError> =>
      from >= messages.length
        ? Effect.succeed(results)
        : Effect.flatMap(chunk(from), () => rest(from + chunkSize))
    return rest(0)
  }
}
