/** One of the streams of a topic, as this process sees it: its events, decoded once, and its followers. */

import * as Cause from "effect/Cause"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import { CoordinatorClosed, CoordinatorError } from "../actor/errors.ts"
import { keyOf } from "../actor/keys.ts"
import type { Requests } from "../actor/lua.ts"
import type { Entry } from "../actor/reader.ts"
import type { Observer } from "../hold/membership.ts"
import type { Place } from "../hold/place.ts"
import { look, question } from "../hold/request.ts"
import { exitOf } from "../io.ts"
import { untilBack } from "../work/patience.ts"
import {
  before,
  beginning,
  compareIds,
  type Cursor,
  cursorAt,
  type Element,
  type Gap,
  gap,
  numberOf,
  type Raw,
  rawOf
} from "./event.ts"
import { type Feed, feedOf, type Listener } from "./feed.ts"

type Joined = Extract<Requests["topic.join"]["reply"], readonly ["joined", ...any]> extends
  readonly [string, ...infer Rest] ? Rest : never

/** New entries, decoded. */
export interface Chunk<A> {
  readonly entries: ReadonlyArray<Entry>
  /** The events, and what is missing behind the position after which they were read. */
  readonly elements: ReadonlyArray<Element<A>>
  readonly after: Cursor
  /** Where they end. */
  readonly cursor: Cursor
}

/** A subscriber's position in a shard. */
export interface Follower<A> {
  readonly cursor: Cursor
  readonly heard: (chunk: Chunk<A>) => void
  /** It has to read by itself. */
  readonly reread: () => void
  /** Nothing is there any more up to this position. */
  readonly emptied: () => void
  /** Redis has lost what came behind this id. */
  readonly rewind: (id: string) => void
  readonly fail: (error: CoordinatorError) => void
}

export interface Page<A> extends Chunk<A> {
  /** Whether more may come behind it right now. */
  readonly isFull: boolean
}

/** When it was decided how the topic is kept: -1 for now, 0 for never; and how. */
export type Kept = Requests["topic.join"]["args"] extends [string, ...infer Rest, number] ? Readonly<Rest> : never

/** The report of a shard about the whole topic. */
export interface Report {
  readonly epoch: number
  readonly shards: number
  readonly width: number
  readonly isOpen: boolean
  readonly former: unknown
  readonly kept: Kept
}

/** There is one if no process has named a number. */
export const shardsOf = (named: number): number => Math.max(1, named)

// One page is what one read of Redis returns. So many are remembered, and for so long: subscribers that are slow together
// stand at the same events one after the other.
const pagesKept = 8
const pageMillis = 1000

export class Shard<A> implements Listener {
  readonly place: Place
  readonly feed: Feed
  /** All that have a position here. */
  readonly lanes = new Set<Follower<A>>()
  readonly decode: (raw: Raw) => Element<A>
  readonly #live = new Set<Follower<A>>()
  /** Its report when it was joined. */
  report: Report | undefined = undefined
  /** How long it knows what was published, in milliseconds, at least. */
  window = 0
  /** Called with the epoch that it is in, and with the number of shards if it has joined. */
  readonly #onEpoch: (epoch: number, shards?: number) => void
  /** Behind the last event, when the stream was empty. */
  emptied = beginning
  // The last event before each epoch.
  readonly #marks = new Map<number, string>()
  // Of the last event that the shared read has brought.
  #cursor: Cursor = beginning
  readonly #pages = new Map<string, { readonly at: number; readonly page: Promise<Page<A>> }>()

  constructor(place: Place, decode: (raw: Raw) => Element<A>, onEpoch: (epoch: number, shards?: number) => void) {
    this.place = place
    this.decode = decode
    this.#onEpoch = onEpoch
    this.feed = feedOf(place.space.kernel, place.partition, keyOf(place.key, "entries"))
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Read
  // -------------------------------------------------------------------------------------------------------------------

  /** The events that are missing between two events of these numbers. */
  gaps(last: number, next: number): ReadonlyArray<Gap> {
    if (next === last + 1) return []
    const { space } = this.place
    if (next <= last) return [gap(this.place, "lost", undefined)]
    const missed = next - last - 1
    space.kernel.hooks.metrics.missed(missed)
    return [gap(this.place, "trimmed", missed)]
  }

  /** Decodes, and notices what is missing: events are numbered. */
  read(entries: ReadonlyArray<Entry>, after: Cursor): Chunk<A> {
    let last = after.number
    const elements: Array<Element<A>> = []
    for (const entry of entries) {
      const number = numberOf(entry[0])
      if (last !== undefined && number !== last + 1) elements.push(...this.gaps(last, number))
      elements.push(this.decode(rawOf(entry)))
      last = number
    }
    return { entries, elements, after, cursor: cursorAt(entries[entries.length - 1]![0]) }
  }

  /** The events behind a cursor. Lanes that stand at the same one share the events that are read and decoded. */
  page(cursor: Cursor, until: string): Promise<Page<A>> {
    const { io } = this.place.space.kernel
    const key = `${cursor.id} ${cursor.number} ${until}`
    const known = this.#pages.get(key)
    if (known !== undefined && io.now() - known.at < pageMillis) return known.page
    const page = this.#page(cursor, until)
    const entry = { at: io.now(), page }
    this.#pages.delete(key)
    this.#pages.set(key, entry)
    const forget = () => {
      if (this.#pages.get(key) === entry) this.#pages.delete(key)
    }
    // One that is not full grows.
    page.then(({ isFull }) => {
      if (!isFull) forget()
    }, forget)
    if (this.#pages.size > pagesKept) this.#pages.delete(this.#pages.keys().next().value!)
    return page
  }

  async #page(cursor: Cursor, until: string): Promise<Page<A>> {
    const { entries, isFull } = await this.feed.page(cursor.id, until, () => this.lanes.size === 0)
    return entries.length === 0
      ? { entries, elements: [], after: cursor, cursor, isFull }
      : { ...this.read(entries, cursor), isFull }
  }

  /** The last event before an epoch, if the shard is in that one already. */
  async mark(epoch: number): Promise<string | undefined> {
    const known = this.#marks.get(epoch)
    if (known !== undefined) return known
    const exit = await exitOf(
      this.place.space.kernel.io,
      untilBack(question(this.place, "topic.mark", [epoch]), "100 millis")
    )
    if (Exit.isFailure(exit)) throw Cause.squash(exit.cause)
    const [, mark] = exit.value
    if (mark !== undefined) this.#marks.set(epoch, mark)
    return mark
  }

  /** Whether there is anything between two events. */
  async hasBetween(after: string, until: string): Promise<boolean> {
    return (await this.feed.page(after, until, () => this.lanes.size === 0, 1)).isFull
  }

  readonly heard = (entries: ReadonlyArray<Entry>): void => {
    const chunk = this.read(entries, this.#cursor)
    this.#cursor = chunk.cursor
    for (const lane of [...this.#live]) lane.heard(chunk)
  }

  // The shared read has brought by now what was there before.
  #empty(last: string): void {
    if (compareIds(last, this.emptied.id) <= 0) return
    this.emptied = cursorAt(last)
    if (compareIds(last, this.#cursor.id) > 0) this.#cursor = this.emptied
    for (const lane of [...this.#live]) lane.emptied()
  }

  readonly missed = (): void => {
    for (const lane of [...this.#live]) lane.reread()
  }

  /** From now on the lane receives the events behind the id that is answered. */
  listen(lane: Follower<A>): string {
    if (this.#live.size === 0) {
      this.feed.add(this, lane.cursor.id)
      const position = this.feed.position!
      this.#cursor = position === lane.cursor.id ? lane.cursor : cursorAt(position)
    }
    this.#live.add(lane)
    return this.feed.position!
  }

  leave(lane: Follower<A>): void {
    if (this.#live.delete(lane) && this.#live.size === 0) this.feed.remove(this)
  }

  /** Before the oldest event that is there, and behind the newest one, which may not be. */
  get bounds(): Effect.Effect<{ readonly first: Cursor; readonly end: Cursor }, CoordinatorError> {
    return Effect.map(question(this.place, "topic.state", []), (reply) => {
      const [, , , , first, last] = reply[0] === "state" ? reply : ["", 0, 0, 0, "", ""] as const
      const end = last === "" ? beginning : cursorAt(last)
      return { first: first === "" ? end : before(first), end }
    })
  }

  /** The first event of a time, or of a later one. */
  since(time: number): Effect.Effect<string | undefined, CoordinatorError> {
    const { place } = this
    return Effect.map(
      look(place, "XRANGE", [keyOf(place.key, "entries"), `${time}-0`, "+", "COUNT", 1]),
      (found) => (found as ReadonlyArray<Entry>)[0]?.[0]
    )
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Membership
  // -------------------------------------------------------------------------------------------------------------------

  readonly observer: Observer = {
    observe: (state) => {
      if (state[0] === "epoch") return this.#onEpoch(Number(state[1]))
      if (state[0] === "emptied") return this.#empty(String(state[1]))
      if (state[0] === "window") return void (this.window = Number(state[1]))
      const [, last, epoch, named, width, open, former, keeping] = state as Joined
      const shards = shardsOf(named)
      const kept = keeping as Kept
      this.report = { epoch, shards, width, isOpen: open === 1, former, kept }
      this.window = kept[5]
      // After a loss, an epoch can begin elsewhere.
      this.#marks.clear()
      if (this.#isBehind(last)) void this.#confirm()
      this.#onEpoch(epoch, shards)
    },
    closed: () => {
      const { namespace } = this.place.space.kernel.settings
      const error = new CoordinatorError({ reason: new CoordinatorClosed({ namespace }) })
      for (const lane of [...this.lanes]) lane.fail(error)
    }
  }

  // The stream ends before what was read of it: the answer is old, or Redis has lost events.
  #isBehind(last: string): boolean {
    return [...this.lanes].some(({ cursor }) => compareIds(cursor.id, last) > 0)
  }

  async #confirm(): Promise<void> {
    const known = [...this.lanes].map((lane) => [lane, lane.cursor] as const)
    const exit = await exitOf(this.place.space.kernel.io, question(this.place, "topic.state", []))
    // Redis is away again, and the membership is joined again when it is back.
    if (Exit.isFailure(exit)) return
    const [tag, , , , , last] = exit.value
    const end = tag === "state" && last !== "" ? String(last) : "0-0"
    if (compareIds(this.emptied.id, end) > 0) this.emptied = beginning
    for (const [lane, cursor] of known) {
      if (compareIds(cursor.id, end) <= 0) continue
      this.feed.rewind(end)
      this.#pages.clear()
      this.#cursor = { id: end, number: undefined }
      lane.rewind(end)
    }
  }
}
