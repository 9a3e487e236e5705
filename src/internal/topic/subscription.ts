/**
 * A subscriber: a position in each shard, and a bounded buffer. Near the end it is fed by the shared read; when it is slower,
 * it reads by itself, from where it stands.
 */

import * as Arr from "effect/Array"
import * as Effect from "effect/Effect"
import type { CoordinatorError } from "../actor/errors.ts"
import { coordinatorError } from "../actor/transport.ts"
import { compareIds, type Cursor, type Element, gap } from "./event.ts"
import type { Chunk, Follower, Page, Shard } from "./shard.ts"

export interface Buffer {
  readonly capacity: number
  readonly strategy: "suspend" | "sliding" | "dropping"
}

type Elements<A> = Arr.NonEmptyReadonlyArray<Element<A>>

/**
 * - `paging`: it reads by itself.
 * - `joining`: it reads what is left up to where the shared read stands; what is newer is kept aside.
 * - `live`: it is fed by the shared read.
 * - `paused`: the buffer is full, and it goes on when that is empty.
 */
type Mode = "paging" | "joining" | "live" | "paused"

/** A subscriber's position in one shard. */
class Lane<A> implements Follower<A> {
  mode: Mode = "paused"
  cursor: Cursor
  /** What the shared read has brought while this one was joining. */
  aside: Array<Chunk<A>> = []
  asideSize = 0
  readonly shard: Shard<A>
  readonly #subscription: Subscription<A>

  constructor(subscription: Subscription<A>, shard: Shard<A>, cursor: Cursor) {
    this.#subscription = subscription
    this.shard = shard
    this.cursor = cursor
  }

  /** The shared read has brought these, and stands at their end. */
  heard(chunk: Chunk<A>): void {
    if (this.mode === "joining") {
      this.aside.push(chunk)
      this.asideSize += chunk.elements.length
    } else if (!this.take(chunk)) {
      this.pause()
    }
  }

  /** Takes in what it does not have yet; answers whether there was room. */
  take({ cursor, elements, entries }: Chunk<A>): boolean {
    if (compareIds(this.cursor.id, entries[0]![0]) < 0) return this.takePage({ cursor, elements })
    // It has read ahead of the shared read.
    const newer = entries.filter(([id]) => compareIds(id, this.cursor.id) > 0)
    return newer.length === 0 || this.takePage(this.shard.read(newer, this.cursor))
  }

  /** Takes in what was read for it, behind where it stands. */
  takePage({ cursor, elements }: Pick<Page<A>, "cursor" | "elements">): boolean {
    if (elements.length === 0) return true
    if (!this.#subscription.accept(elements)) return false
    this.cursor = cursor
    return true
  }

  pause(): void {
    this.shard.leave(this)
    this.mode = "paused"
    this.aside = []
    this.asideSize = 0
  }

  /** Redis has lost what came behind this id. */
  rewind(id: string): void {
    this.cursor = { id, number: undefined }
    this.#subscription.insist([gap("lost", undefined)])
  }

  fail(error: CoordinatorError): void {
    this.#subscription.fail(error)
  }
}

export class Subscription<A> {
  readonly #lanes: Array<Lane<A>> = []
  readonly #capacity: number
  readonly #strategy: Buffer["strategy"]
  #chunks: Array<Elements<A>> = []
  #size = 0
  // Events left out since the last chunk was taken in, or taken from the buffer.
  #dropped = 0
  #slid = 0
  #waiting: ((result: Effect.Effect<Elements<A>, CoordinatorError>) => void) | undefined = undefined
  #error: CoordinatorError | undefined = undefined
  #closed = false

  constructor({ capacity, strategy }: Buffer) {
    this.#capacity = capacity
    this.#strategy = strategy
  }

  add(shard: Shard<A>, cursor: Cursor): void {
    const lane = new Lane(this, shard, cursor)
    this.#lanes.push(lane)
    shard.lanes.add(lane)
    void this.#follow(lane)
  }

  close(): void {
    this.#closed = true
    for (const lane of this.#lanes) {
      lane.shard.leave(lane)
      lane.shard.lanes.delete(lane)
    }
  }

  fail(error: CoordinatorError): void {
    if (this.#closed || this.#error !== undefined) return
    this.#error = error
    for (const lane of this.#lanes) if (lane.mode !== "paused") lane.pause()
    this.#wake()
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Buffer
  // -------------------------------------------------------------------------------------------------------------------

  /** Takes elements in, or answers that there is no room. */
  accept(elements: ReadonlyArray<Element<A>>): boolean {
    if (this.#size > 0 && this.#size + elements.length > this.#capacity) {
      if (this.#strategy === "suspend") return false
      if (this.#strategy === "dropping") {
        this.#dropped += countOf(elements)
        return true
      }
      while (this.#size > 0 && this.#size + elements.length > this.#capacity) {
        const oldest = this.#chunks.shift()!
        this.#size -= oldest.length
        this.#slid += countOf(oldest)
      }
    }
    if (this.#dropped > 0) {
      this.#push([gap("overflow", this.#dropped)])
      this.#dropped = 0
    }
    this.#push(elements)
    this.#wake()
    return true
  }

  /** Takes in what must not be left out. */
  insist(elements: ReadonlyArray<Element<A>>): void {
    this.#push(elements)
    this.#wake()
  }

  #push(elements: ReadonlyArray<Element<A>>): void {
    if (!Arr.isReadonlyArrayNonEmpty(elements)) return
    this.#chunks.push(elements)
    this.#size += elements.length
  }

  #wake(): void {
    const resume = this.#waiting
    if (resume === undefined || this.#size === 0 && this.#error === undefined) return
    this.#waiting = undefined
    resume(this.#next())
  }

  #next(): Effect.Effect<Elements<A>, CoordinatorError> {
    if (this.#slid > 0) {
      const missed = this.#slid
      this.#slid = 0
      return Effect.succeed([gap("overflow", missed)])
    }
    const chunk = this.#chunks.shift()
    if (chunk === undefined) return Effect.fail(this.#error!)
    this.#size -= chunk.length
    return Effect.succeed(chunk)
  }

  /** The next elements, at least one. */
  readonly take: Effect.Effect<Elements<A>, CoordinatorError> = Effect.callback((resume) => {
    if (this.#size === 0) this.#resume()
    if (this.#size > 0 || this.#error !== undefined) return resume(this.#next())
    this.#waiting = resume
    return Effect.sync(() => {
      this.#waiting = undefined
    })
  })

  #resume(): void {
    if (this.#error !== undefined) return
    for (const lane of this.#lanes) if (lane.mode === "paused") void this.#follow(lane)
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Catching up
  // -------------------------------------------------------------------------------------------------------------------

  async #follow(lane: Lane<A>): Promise<void> {
    lane.mode = "paging"
    try {
      while (this.#isGoingOn(lane)) {
        if (!await this.#readUntil(lane, "+")) return
        // From now on, the shared read brings what comes behind this.
        const until = lane.shard.listen(lane)
        lane.mode = "joining"
        if (compareIds(lane.cursor.id, until) < 0 && !await this.#readUntil(lane, until)) return
        if (lane.asideSize <= this.#capacity) return this.#goLive(lane)
        lane.pause()
        lane.mode = "paging"
      }
    } catch (cause) {
      this.fail(coordinatorError(cause))
    }
  }

  /** Reads up to an id. Answers whether it came there. */
  async #readUntil(lane: Lane<A>, until: string): Promise<boolean> {
    for (;;) {
      const { cursor } = lane
      const page = await lane.shard.page(cursor, until)
      if (!this.#isGoingOn(lane)) return false
      // Redis has lost what was read.
      if (lane.cursor !== cursor) continue
      if (!lane.takePage(page)) {
        lane.pause()
        return false
      }
      if (!page.isFull) return true
    }
  }

  readonly #isOver = (): boolean => this.#closed || this.#error !== undefined

  #isGoingOn(lane: Lane<A>): boolean {
    return !this.#isOver() && lane.mode !== "paused"
  }

  // What the shared read has brought meanwhile comes behind all that was read here.
  #goLive(lane: Lane<A>): void {
    lane.mode = "live"
    const { aside } = lane
    lane.aside = []
    lane.asideSize = 0
    for (const chunk of aside) {
      if (!lane.take(chunk)) return lane.pause()
    }
  }
}

const countOf = (elements: ReadonlyArray<Element<unknown>>): number =>
  elements.reduce((sum, element) => sum + (element._tag === "Gap" ? element.missed ?? 0 : 1), 0)
