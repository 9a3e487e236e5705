/**
 * Reads streams on a connection of its own: one `XREAD BLOCK` over all its sources, issued only while there is something to
 * wait for.
 */

import type { Io } from "../io.ts"
import { type NodeConnection, whenReady } from "../redis/connection.ts"
import { RedisError } from "../redis/errors.ts"
import type { Log } from "./hooks.ts"
import { isTransient, type Transport } from "./transport.ts"

export type Entry = readonly [id: string, fields: ReadonlyArray<string>]

/** A stream that is read. */
export interface Source {
  readonly key: string
  /** The id of the last entry that was read. */
  readonly position: string
  /** Whether there is anything to wait for in it now. */
  readonly isActive: () => boolean
  /** Moves the position. If it throws, that makes a gap. */
  readonly onEntries: (entries: ReadonlyArray<Entry>) => void
  /** Entries may be missing: some could not be read. */
  readonly onGap: () => void
  /** Has an entry written to the stream, so that a blocked read of it returns. */
  readonly wake?: (() => void) | undefined
}

// Below the idle limits of load balancers, and how long a half-open connection can go unnoticed at most.
const blockMillis = 5000
// Over that, an answer to a blocking read is late, and the connection is taken for dead.
const graceMillis = 1000
const batchSize = 1024

// In milliseconds, after so many failures one after the other.
const pauseAfter = (failures: number, longest: number): number => Math.min(longest, 10 * 2 ** Math.min(failures, 10))

export class Reader {
  #connection: NodeConnection | undefined = undefined
  #running = false
  #closed = false
  // How often reading has failed, one time after the other.
  #attempts = 0
  // So many entries of a stream are read at once: fewer after a failure, because they may be too large to come in time.
  #count = batchSize
  readonly #sources = new Set<Source>()
  // How often the entries of a source could not be taken in, one time after the other.
  readonly #failures = new WeakMap<Source, number>()
  #reading: ReadonlyArray<Source> = []
  // When the read that is under way was sent.
  #sentAt = Number.POSITIVE_INFINITY

  readonly #transport: Transport
  readonly #io: Io
  readonly #log: Log
  readonly #connect: () => NodeConnection

  constructor(transport: Transport, io: Io, log: Log, connect: () => NodeConnection) {
    this.#transport = transport
    this.#io = io
    this.#log = log
    this.#connect = connect
  }

  /** The source has to be read from now on, for as long as it is active. */
  include(source: Source): void {
    if (this.#closed) return
    this.#sources.add(source)
    if (!this.#running) {
      this.#running = true
      this.#io.defer(this.#next)
    } else if (this.#reading.length > 0 && !this.#reading.includes(source)) {
      this.#wake()
    }
  }

  /** The source is not read any more. */
  exclude(source: Source): void {
    this.#sources.delete(source)
    // The stream of a source that wakes is deleted, and a read of such streams alone would never end.
    const isLast = this.#reading.every((one) => one.wake === undefined || !this.#sources.has(one))
    if (source.wake !== undefined && isLast && this.#reading.includes(source)) this.#connection?.reset()
  }

  /**
   * An event that was posted before that time, long ago, has not come. The connection may be half-open if it was being read
   * all that time: then it is read again on a new one. If the reader was only slow, it goes on where it was. A connection
   * that is being made is left alone, because under load none would ever be ready.
   */
  doubt(postedBefore: number): void {
    if (this.#sentAt <= postedBefore) this.#connection?.reset()
  }

  // The blocked read returns when something arrives in one of its own streams.
  #wake(): void {
    const waking = this.#reading.find((source) => source.wake !== undefined && this.#sources.has(source))
    if (waking === undefined) this.#connection?.reset()
    else waking.wake!()
  }

  readonly #next = (): void => {
    this.#running = !this.#closed && [...this.#sources].some((source) => source.isActive())
    if (!this.#running) return
    const connection = this.#connection ??= this.#connect()
    if (connection.isReady()) this.#read(connection)
    else void whenReady(connection).then(() => this.#read(connection))
  }

  #read(connection: NodeConnection): void {
    // Only now: a source that was included meanwhile has not woken anything.
    const sources = [...this.#sources]
    if (sources.length === 0) return this.#next()
    this.#reading = sources
    this.#sentAt = this.#io.now()
    const streams = [...sources.map(({ key }) => key), ...sources.map(({ position }) => position)]
    connection.read(
      ["COUNT", this.#count, "BLOCK", blockMillis, "STREAMS", ...streams],
      blockMillis + graceMillis,
      {
        resolve: (reply) => {
          this.#rest()
          try {
            if (!this.#closed) this.#deliver(sources, reply)
          } catch (cause) {
            return this.#failed(connection, cause)
          }
          this.#attempts = 0
          this.#count = Math.min(batchSize, 2 * this.#count)
          // The entries that have come are taken in first.
          this.#io.defer(this.#next)
        },
        reject: (cause) => {
          this.#rest()
          this.#failed(connection, cause)
        }
      }
    )
  }

  #failed(connection: NodeConnection, cause: unknown): void {
    if (this.#closed) return
    const passing = cause instanceof RedisError && isTransient(cause)
    this.#log(passing ? "Debug" : "Warn", "a read of the mailboxes failed", cause)
    if (!(cause instanceof RedisError) || cause.reason._tag === "Timeout") connection.reset()
    if (passing) this.#count = Math.max(1, Math.floor(this.#count / 8))
    const attempt = this.#attempts++
    if (attempt === 0) return this.#io.defer(this.#next)
    void this.#transport.sleep(pauseAfter(attempt, 1000) * (0.5 + this.#io.random() / 2)).then(this.#next)
  }

  #rest(): void {
    this.#reading = []
    this.#sentAt = Number.POSITIVE_INFINITY
  }

  #deliver(sources: ReadonlyArray<Source>, reply: unknown): void {
    if (reply === null) return
    for (const [key, entries] of reply as ReadonlyArray<readonly [string, ReadonlyArray<Entry>]>) {
      const source = sources.find((source) => source.key === key)
      if (source === undefined || !this.#sources.has(source)) continue
      // They were removed in the call that has stored them, which is what the read waited for.
      if (entries.length === 0) continue
      try {
        source.onEntries(entries)
        this.#failures.delete(source)
      } catch (cause) {
        this.#log("Error", `entries of ${key} could not be taken in`, cause)
        this.#miss(source)
      }
    }
  }

  // The source asks for what it has missed. The answer may be as unreadable as the entries were: then the source asks after a pause.
  #miss(source: Source): void {
    const failures = (this.#failures.get(source) ?? 0) + 1
    this.#failures.set(source, failures)
    if (failures === 1) return source.onGap()
    this.#io.after(pauseAfter(failures, 10_000), () => {
      if (this.#sources.has(source)) source.onGap()
    })
  }

  async close(): Promise<void> {
    this.#closed = true
    await this.#connection?.close()
  }
}
