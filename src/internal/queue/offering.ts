/** Offers jobs: those of one turn of the event loop share a request, which is numbered so that they are stored once. */

import type { CoordinatorError } from "../actor/errors.ts"
import type { Request } from "../actor/outbox.ts"
import type { Place } from "../hold/place.ts"
import { nameOf } from "./naming.ts"

export type Level = "u" | "h" | "n" | "l"

/** What is stored of a job. `more` says what is asked for besides its body, as `queue.offer` in lua/Queue.lua reads it. */
export interface Wish {
  readonly body: string
  readonly level: Level
  /** It does not begin at once. */
  readonly held: boolean
  readonly more: string
  /** The texts that `more` names, which stand behind the body. */
  readonly texts: string
}

/** What Redis has made of an offer. */
export interface Offered {
  readonly id: string
  /**
   * A job with the `id` that was asked for, or with that of `dedupe`, was there already, so this one was not stored. `id` is that
   * of the former, which may have the payload of this one now: see `dedupe`.
   */
  readonly duplicate: boolean
}

/** Told of the results of jobs, by their places from `from` on. Undefined: they are stored, and their ids are lost. */
export interface Asker {
  readonly offered: (at: number, offered: Offered | undefined) => void
  readonly failed: (error: CoordinatorError) => void
}

interface Item {
  readonly wish: Wish
  readonly asker: Asker
  readonly at: number
}

// The work of one request is bounded, for Redis and for this process. In jobs, and in characters of their bodies.
const mostJobs = 512
const mostText = 1 << 20

type Reply = readonly ["offered", stamp: number, first: number, known: unknown] | readonly ["late"]

/** Jobs as `queue.offer` reads them. */
export const packed = (items: ReadonlyArray<{ readonly wish: Wish }>): [values: string, shapes: string] => {
  let values = ""
  let shapes = ""
  for (const { wish: { body, more, texts } } of items) {
    values += body
    if (texts !== "") values += texts
    shapes += `${Buffer.byteLength(body)}${more} `
  }
  return [values, shapes]
}

class Offer implements Request<"queue.offer"> {
  readonly verb = "queue.offer"
  readonly key: string
  readonly items: Array<Item> = []
  text = 0
  askedAt: number | undefined = undefined
  queued: boolean | undefined = undefined
  cancelled = false
  readonly #shard: number
  readonly #node: string
  readonly #number: number
  #answered: (() => void) | undefined
  #args: [values: string, shapes: string, node: string, number: number] | undefined = undefined

  constructor(key: string, shard: number, node: string, number: number, answered: () => void) {
    this.key = key
    this.#shard = shard
    this.#node = node
    this.#number = number
    this.#answered = answered
  }

  /** It can take in another job: it has not been sent, and has not failed. */
  get open(): boolean {
    return this.#args === undefined && this.#answered !== undefined && this.items.length < mostJobs &&
      this.text < mostText
  }

  // Made when it is sent, and the same each time.
  get args(): [values: string, shapes: string, node: string, number: number] {
    return this.#args ??= [...packed(this.items), this.#node, this.#number]
  }

  // Once: an answer may come to an offer that has failed because Redis was away.
  #over(): boolean {
    const answered = this.#answered
    this.#answered = undefined
    answered?.()
    return answered === undefined
  }

  settle(reply: Reply): void {
    if (this.#over()) return
    const { items } = this
    if (reply[0] === "late") {
      for (const { asker, at } of items) asker.offered(at, undefined)
      return
    }
    const [, stamp, first, list] = reply
    const known = list as ReadonlyArray<readonly [place: number, id: string, stored?: number]>
    let [next, number] = [0, first]
    for (let place = 0; place < items.length; place++) {
      const { asker, at, wish: { held, level } } = items[place]!
      if (known[next]?.[0] === place) {
        const [, id, stored] = known[next++]!
        if (stored !== undefined) number++
        asker.offered(at, { id: nameOf(this.#shard, id), duplicate: stored === undefined })
      } else {
        const letter = held ? level.toUpperCase() : level
        asker.offered(at, { id: nameOf(this.#shard, `${letter}${stamp}-${number++}`), duplicate: false })
      }
    }
  }

  readonly fail = (error: CoordinatorError): void => {
    if (this.#over()) return
    for (const { asker } of this.items) asker.failed(error)
  }

  expire: ((error: CoordinatorError) => void) | undefined = expire
}

function expire(this: Offer, error: CoordinatorError): void {
  this.cancelled = true
  this.fail(error)
}

export class Offerer {
  readonly place: Place
  readonly #shard: number
  readonly #node: string
  // A number for each request, growing: a smaller one that comes later is a repetition.
  #number = 0
  // Of two requests at most, one is not sent: Redis knows the reply to the last one of a coordinator.
  #last: Offer | undefined = undefined
  #unanswered = 0
  #waiting: Array<Item> = []
  #head = 0

  constructor(place: Place, shard: number) {
    this.place = place
    this.#shard = shard
    this.#node = place.space.kernel.uniqueId()
  }

  /** An offer was not sent yet, and can take in another job. */
  get open(): boolean {
    return this.#last?.open === true
  }

  offer(wish: Wish, asker: Asker, at: number): void {
    const item = { wish, asker, at }
    if (this.#waiting.length > 0 || !this.#put(item)) this.#waiting.push(item)
  }

  #put(item: Item): boolean {
    const { channel, key, space: { kernel } } = this.place
    let offer = this.#last
    if (offer === undefined || !offer.open) {
      if (kernel.isClosing()) {
        item.asker.failed(channel.closedError())
        return true
      }
      if (this.#unanswered === 2) return false
      this.#unanswered++
      offer = this.#last = new Offer(key, this.#shard, this.#node, ++this.#number, this.#answered)
      offer.items.push(item)
      offer.text = item.wish.body.length
      channel.outbox.request(offer)
    } else {
      offer.items.push(item)
      offer.text += item.wish.body.length
    }
    return true
  }

  readonly #answered = (): void => {
    this.#unanswered--
    while (this.#head < this.#waiting.length && this.#put(this.#waiting[this.#head]!)) this.#head++
    if (this.#head === this.#waiting.length) this.#waiting = []
    else if (this.#head * 2 > this.#waiting.length) this.#waiting = this.#waiting.slice(this.#head)
    else return
    this.#head = 0
  }
}
