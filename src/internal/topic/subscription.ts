/**
 * A subscriber: a position in each shard, and a bounded buffer. Near the end it is fed by the shared read; when it is slower,
 * it reads by itself, from where it stands.
 */

import * as Arr from "effect/Array"
import * as Effect from "effect/Effect"
import type { CoordinatorError } from "../actor/errors.ts"
import { coordinatorError } from "../actor/transport.ts"
import type { Place } from "../hold/place.ts"
import { compareIds, type Cursor, cursorAt, type Element, epochOf, type Gap, gap, type Start, timeOf } from "./event.ts"
import type { Chunk, Follower, Shard } from "./shard.ts"

export interface Buffer {
  readonly capacity: number
  readonly strategy: "suspend" | "sliding" | "dropping"
}

type Elements<A> = Arr.NonEmptyReadonlyArray<Element<A>>

/**
 * - `paging`: it reads by itself.
 * - `joining`: it reads the events that are left up to where the shared read stands; newer events are kept aside.
 * - `live`: it is fed by the shared read.
 * - `paused`: the buffer is full, and it goes on when half of that is free.
 * - `held`: its next event is of an epoch that not all lanes have come to.
 */
type Mode = "paging" | "joining" | "live" | "paused" | "held"

const nothing: ReadonlyArray<never> = []

/** Elements that a full buffer leaves out. */
class LeftOut {
  #missed = 0
  // Of these, events: those that are missing in gaps are counted where these are noticed.
  #events = 0
  // How many are missing besides is not known.
  #lost = false

  add(elements: ReadonlyArray<Element<unknown>>): void {
    for (const element of elements) {
      if (element._tag !== "Gap") {
        this.#missed++
        this.#events++
      } else if (element.missed === undefined) this.#lost = true
      else this.#missed += element.missed
    }
  }

  /** The gaps in their place. */
  take(topic: Place): ReadonlyArray<Gap> {
    if (this.#missed === 0 && !this.#lost) return nothing
    const gaps = [
      ...this.#missed > 0 ? [gap(topic, "overflow", this.#missed)] : [],
      ...this.#lost ? [gap(topic, "lost", undefined)] : []
    ]
    if (this.#events > 0) topic.space.kernel.hooks.metrics.missed(this.#events)
    this.#missed = this.#events = 0
    this.#lost = false
    return gaps
  }
}

/** A subscriber's position in one shard. */
class Lane<A> implements Follower<A> {
  mode: Mode = "paused"
  cursor: Cursor
  /** The events of the shared read while this one was joining. */
  aside: Array<Chunk<A>> = []
  asideSize = 0
  /** The epoch of the event that it is held at. */
  epoch = 0
  readonly shard: Shard<A>
  readonly #subscription: Subscription<A>
  // Events of before this time are left out.
  #since: number

  constructor(subscription: Subscription<A>, shard: Shard<A>, { id, number, since = 0 }: Start) {
    this.#subscription = subscription
    this.shard = shard
    this.cursor = { id, number }
    this.#since = since
  }

  /** The shared read has brought these, and stands at their end. */
  heard(chunk: Chunk<A>): void {
    if (this.mode === "joining") {
      this.aside.push(chunk)
      this.asideSize += chunk.elements.length
    } else {
      this.take(chunk)
    }
  }

  /** Takes in what it does not have yet; answers whether it goes on. */
  take(chunk: Chunk<A>): boolean {
    const { id, number } = this.cursor
    if (chunk.after.number === number && compareIds(id, chunk.entries[0]![0]) < 0) return this.takePage(chunk)
    // It has read ahead of the shared read, or what that has brought meanwhile was removed before this one could read it.
    const newer = chunk.entries.filter((entry) => compareIds(entry[0], id) > 0)
    return newer.length === 0 || this.takePage(this.shard.read(newer, this.cursor))
  }

  /** Takes in what was read for it, behind where it stands; answers whether it goes on. */
  takePage({ cursor, elements, entries }: Chunk<A>): boolean {
    if (entries.length === 0) return true
    if (this.#since > 0) return this.#takeSince(entries)
    const { epoch } = this.#subscription
    if (epochOf(entries[entries.length - 1]!) > epoch) return this.#takeUntil(entries, epoch)
    if (!this.#subscription.accept(elements)) {
      this.pause()
      return false
    }
    this.cursor = cursor
    this.#subscription.advanced()
    return true
  }

  // The clock of Redis is behind the time from which on it takes events in.
  #takeSince(entries: Chunk<A>["entries"]): boolean {
    const first = entries.findIndex(([id]) => timeOf(id) >= this.#since)
    const skipped = first < 0 ? entries.length : first
    if (skipped > 0) this.cursor = cursorAt(entries[skipped - 1]![0])
    this.#subscription.advanced()
    if (first < 0) return true
    this.#since = 0
    return this.takePage(this.shard.read(entries.slice(first), this.cursor))
  }

  // It waits behind the events up to an epoch for the other lanes to come there.
  #takeUntil(entries: Chunk<A>["entries"], epoch: number): boolean {
    const next = entries.findIndex((entry) => epochOf(entry) > epoch)
    const known = entries.slice(0, next)
    if (known.length > 0 && !this.takePage(this.shard.read(known, this.cursor))) return false
    this.pause("held")
    this.epoch = epochOf(entries[next]!)
    this.#subscription.align()
    return false
  }

  pause(mode: "paused" | "held" = "paused"): void {
    this.shard.leave(this)
    this.mode = mode
    this.aside = []
    this.asideSize = 0
  }

  /** Answers whether it goes on. */
  readonly emptied = (): boolean => {
    if (this.mode !== "live") return true
    const { emptied } = this.shard
    const { id, number } = this.cursor
    if (compareIds(id, emptied.id) >= 0) return true
    const gaps = number === undefined ? nothing : this.shard.gaps(number, emptied.number! + 1)
    if (!this.#subscription.accept(gaps)) {
      this.pause()
      return false
    }
    this.cursor = emptied
    this.#subscription.advanced()
    return true
  }

  /** Whether it has nothing of before an epoch to read any more. */
  async isPast(epoch: number): Promise<boolean> {
    const mark = await this.shard.mark(epoch)
    if (mark === undefined) return false
    if (compareIds(this.cursor.id, mark) >= 0) return true
    // Events that are being read may be removed meanwhile. When they have come, this is asked again.
    return this.mode === "paused" && !await this.shard.hasBetween(this.cursor.id, mark) && this.mode === "paused"
  }

  /** The events of the shared read could not be taken in. */
  reread(): void {
    this.pause()
    this.#subscription.resumeIfAwaited()
  }

  /** Redis has lost what came behind this id. */
  rewind(id: string): void {
    this.cursor = { id, number: undefined }
    this.#subscription.insist([gap(this.shard.place, "lost", undefined)])
  }

  fail(error: CoordinatorError): void {
    this.#subscription.fail(error)
  }
}

export class Subscription<A> {
  // The place of its first shard.
  readonly #topic: Place
  readonly #lanes: Array<Lane<A>> = []
  readonly #capacity: number
  readonly #strategy: Buffer["strategy"]
  #chunks: Array<Elements<A>> = []
  #size = 0
  // Elements that were left out since the last chunk was taken in, or taken from the buffer.
  readonly #dropped = new LeftOut()
  readonly #slid = new LeftOut()
  #waiting: ((result: Effect.Effect<Elements<A>, CoordinatorError>) => void) | undefined = undefined
  #error: CoordinatorError | undefined = undefined
  #closed = false
  /** Its elements go to one reader. */
  isRead = false
  #aligning = false
  #again = false
  /** Of the shards: all events that it takes in are of this one, or of earlier ones. */
  epoch: number
  // The shards of this one, and of all before, have lanes.
  #known = 0
  readonly #askForShards: () => void

  constructor(topic: Place, { capacity, strategy }: Buffer, epoch: number, askForShards: () => void) {
    this.#topic = topic
    this.#capacity = capacity
    this.#strategy = strategy
    this.epoch = epoch
    this.#askForShards = askForShards
  }

  get width(): number {
    return this.#lanes.length
  }

  /** Where it stands in each shard, behind all that it has taken in. */
  get cursors(): ReadonlyArray<Cursor> {
    return this.#lanes.map(({ cursor }) => cursor)
  }

  add(shard: Shard<A>, start: Start): void {
    const lane = new Lane(this, shard, start)
    this.#lanes.push(lane)
    if (start.lost === true) this.insist([gap(shard.place, "lost", undefined)])
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
    const excess = this.#size > 0 ? this.#size + elements.length - this.#capacity : 0
    let taken = elements
    if (excess > 0) {
      if (this.#strategy === "suspend") return false
      const room = Math.max(0, elements.length - excess)
      taken = this.#strategy === "dropping" ? elements.slice(0, room) : this.#slide(excess, elements)
    }
    // The gap of those that were left out before stands before these.
    if (taken.length > 0) this.#push(this.#dropped.take(this.#topic))
    this.#push(taken)
    if (this.#strategy === "dropping") this.#dropped.add(elements.slice(taken.length))
    this.#wake()
    return true
  }

  // Leaves out so many of the oldest, also of these, and answers the others of these.
  #slide(excess: number, elements: ReadonlyArray<Element<A>>): ReadonlyArray<Element<A>> {
    let rest = excess
    while (rest > 0 && this.#chunks.length > 0) {
      const oldest = this.#chunks.shift()!
      this.#slid.add(oldest.slice(0, rest))
      const kept = oldest.slice(rest)
      if (Arr.isReadonlyArrayNonEmpty(kept)) this.#chunks.unshift(kept)
      this.#size -= oldest.length - kept.length
      rest -= oldest.length - kept.length
    }
    this.#slid.add(elements.slice(0, rest))
    return elements.slice(rest)
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
    const slid = this.#slid.take(this.#topic)
    if (Arr.isReadonlyArrayNonEmpty(slid)) return Effect.succeed(slid)
    const chunk = this.#chunks.shift()
    if (chunk === undefined) return Effect.fail(this.#error!)
    this.#size -= chunk.length
    return Effect.succeed(chunk)
  }

  /** The next elements, at least one. */
  readonly take: Effect.Effect<Elements<A>, CoordinatorError> = Effect.callback((resume) => {
    if (this.#size <= this.#capacity / 2) this.#resume()
    // Nothing may come any more that could bring them.
    if (this.#size === 0) this.#push(this.#dropped.take(this.#topic))
    if (this.#size > 0 || this.#error !== undefined) return resume(this.#next())
    this.#waiting = resume
    return Effect.sync(() => {
      this.#waiting = undefined
    })
  })

  /** A subscriber that waits takes nothing, which is when a lane is resumed otherwise. */
  resumeIfAwaited(): void {
    if (this.#waiting !== undefined) this.#resume()
  }

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
      this.#stop(cause)
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
      if (!lane.takePage(page)) return false
      if (!page.isFull) return true
    }
  }

  #stop(cause: unknown): void {
    this.fail(coordinatorError(cause, this.#topic.key))
  }

  readonly #isOver = (): boolean => this.#closed || this.#error !== undefined

  #isGoingOn(lane: Lane<A>): boolean {
    return !this.#isOver() && lane.mode !== "paused" && lane.mode !== "held"
  }

  // The events of the shared read meanwhile come behind all that was read here.
  #goLive(lane: Lane<A>): void {
    lane.mode = "live"
    const { aside } = lane
    lane.aside = []
    lane.asideSize = 0
    for (const chunk of aside) if (!lane.take(chunk)) return
    // The events that it had to read may have been removed: then no event says that it has come here.
    if (lane.emptied()) this.advanced()
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Epochs
  // -------------------------------------------------------------------------------------------------------------------

  /** A lane has come further. */
  advanced(): void {
    if (this.#aligning) this.#again = true
    else if (this.#lanes.length > 1 && this.#lanes.some(({ mode }) => mode === "held")) this.align()
  }

  /** All shards of an epoch have been added. */
  complete(epoch: number): void {
    this.#known = epoch
    this.align()
  }

  /** Begins the next epoch if all lanes have come to it. */
  align(): void {
    this.#again = true
    if (this.#aligning) return
    void this.#aligned()
  }

  async #aligned(): Promise<void> {
    this.#aligning = true
    try {
      while (this.#again && !this.#isOver()) {
        this.#again = false
        await this.#alignHeld(this.#lanes.filter(({ mode }) => mode === "held"))
      }
    } catch (cause) {
      this.#stop(cause)
    } finally {
      this.#aligning = false
    }
  }

  async #alignHeld(held: ReadonlyArray<Lane<A>>): Promise<void> {
    if (held.length === 0) return
    const next = Math.min(...held.map(({ epoch }) => epoch))
    if (next > this.#known) return this.#askForShards()
    const others = this.#lanes.filter((lane) => !held.includes(lane))
    const past = await Promise.all(others.map((lane) => lane.isPast(next)))
    if (this.#isOver() || past.includes(false)) return
    this.epoch = next
    this.#again = true
    for (const lane of held) if (lane.epoch === next) void this.#follow(lane)
  }
}
