/** The live end of one stream: read once for all that subscribe to it in this process. */

import type { Kernel, Partition } from "../actor/kernel.ts"
import type { Entry, Reader, Source } from "../actor/reader.ts"
import { isTransient } from "../actor/transport.ts"
import { RedisError } from "../redis/errors.ts"
import { compareIds } from "./event.ts"

/** The receiver of new entries, in order. */
export interface Listener {
  readonly heard: (entries: ReadonlyArray<Entry>) => void
  /** Some could not be taken in. */
  readonly missed: () => void
}

// A read of its own for every position: one that is under way returns what comes behind an older one.
class Tap implements Source {
  readonly key: string
  position: string
  readonly #feed: Feed

  constructor(feed: Feed, key: string, position: string) {
    this.#feed = feed
    this.key = key
    this.position = position
  }

  readonly isActive = (): boolean => this.#feed.isRead(this)

  readonly onEntries = (entries: ReadonlyArray<Entry>): void => {
    this.position = entries[entries.length - 1]![0]
    this.#feed.heard(entries)
  }

  readonly onGap = (): void => this.#feed.missed()
}

// Of a page.
const mostEntries = 256

export class Feed {
  readonly #key: string
  readonly #kernel: Kernel
  readonly #reader: () => Reader
  readonly #listeners = new Set<Listener>()
  #tap: Tap | undefined = undefined
  // So many entries a page has: fewer where they are so large, or the link so slow, that a page comes too late.
  #most = mostEntries
  // Topics that have it open.
  #users = 0

  constructor(kernel: Kernel, partition: Partition, key: string) {
    this.#kernel = kernel
    this.#key = key
    this.#reader = () => kernel.readerOf(partition)
  }

  open(): void {
    this.#users++
  }

  close(): void {
    const known = feeds.get(this.#kernel)
    if (--this.#users === 0 && known?.get(this.#key) === this) known.delete(this.#key)
  }

  /** The id of the last entry that was read, while anything listens. */
  get position(): string | undefined {
    return this.#tap?.position
  }

  isRead(tap: Tap): boolean {
    return this.#tap === tap
  }

  /** Listens to what comes behind `position`, or behind where it is read already. */
  add(listener: Listener, position: string): void {
    this.#listeners.add(listener)
    if (this.#tap === undefined) this.#read(position)
  }

  remove(listener: Listener): void {
    this.#listeners.delete(listener)
    if (this.#listeners.size === 0) this.#end()
  }

  /** Redis has lost what came behind this position. */
  rewind(position: string): void {
    if (this.#tap === undefined || compareIds(this.#tap.position, position) <= 0) return
    this.#end()
    this.#read(position)
  }

  #read(position: string): void {
    this.#tap = new Tap(this, this.#key, position)
    this.#reader().include(this.#tap)
  }

  #end(): void {
    if (this.#tap !== undefined) this.#reader().exclude(this.#tap)
    this.#tap = undefined
  }

  heard(entries: ReadonlyArray<Entry>): void {
    for (const listener of [...this.#listeners]) listener.heard(entries)
  }

  missed(): void {
    for (const listener of [...this.#listeners]) listener.missed()
  }

  /** Entries behind one id, up to another one, and whether there may be others. While Redis is away it waits, until `isOver` says so. */
  async page(
    after: string,
    until: string,
    isOver: () => boolean,
    most = mostEntries
  ): Promise<{ readonly entries: ReadonlyArray<Entry>; readonly isFull: boolean }> {
    const { io, transport } = this.#kernel
    for (let attempt = 0; !isOver() && !this.#kernel.isClosed(); attempt++) {
      const count = Math.min(most, this.#most)
      const from = io.now()
      try {
        const args = [this.#key, `(${after}`, until, "COUNT", count]
        const entries = await transport.read("XRANGE", args) as ReadonlyArray<Entry>
        if (io.now() - from < transport.requestTimeout / 16) this.#most = Math.min(mostEntries, 2 * this.#most)
        return { entries, isFull: entries.length === count }
      } catch (cause) {
        if (!(cause instanceof RedisError) || !isTransient(cause)) throw cause
        const { _tag } = cause.reason
        if (_tag === "Timeout" || _tag === "ConnectionLost") this.#most = Math.max(1, this.#most >> 2)
        await transport.backoff(attempt, cause)
      }
    }
    return { entries: [], isFull: false }
  }
}

// By the key of the stream: two topics of one name in a process share what is read.
const feeds = new WeakMap<Kernel, Map<string, Feed>>()

export const feedOf = (kernel: Kernel, partition: Partition, key: string): Feed => {
  let known = feeds.get(kernel)
  if (known === undefined) feeds.set(kernel, known = new Map())
  const feed = known.get(key) ?? new Feed(kernel, partition, key)
  known.set(key, feed)
  return feed
}
