/**
 * Reads mailboxes on a connection of its own: one `XREAD BLOCK` over all of them, issued only while something waits.
 */
import { RedisError } from "../../Redis.ts"
import type { Session } from "../hold/claim.ts"
import type { Connection } from "../redis/connection.ts"
import type { Kernel } from "./kernel.ts"
import type { Partition } from "./partition.ts"

// Below the idle limits of load balancers, and how long a half-open connection can go unnoticed at most.
const blockMillis = 5000
// Over that, an answer to a blocking read is late, and the connection is taken for dead.
const graceMillis = 1000
const batchSize = 1024

type Entry = readonly [id: string, fields: ReadonlyArray<string>]

export class Reader {
  #connection: Connection | undefined = undefined
  #running = false
  #closed = false
  #reading: ReadonlyArray<Session> = []

  readonly #kernel: Kernel
  readonly #connect: () => Connection
  readonly #partitions: () => ReadonlyArray<Partition | undefined>

  constructor(
    kernel: Kernel,
    connect: () => Connection,
    partitions: () => ReadonlyArray<Partition | undefined>
  ) {
    this.#kernel = kernel
    this.#connect = connect
    this.#partitions = partitions
  }

  /** The mailbox of this partition's session has to be read. */
  include(partition: Partition): void {
    if (this.#closed) return
    if (!this.#running) {
      this.#running = true
      void this.#run()
    } else if (this.#reading.length > 0 && !this.#reading.includes(partition.session!)) {
      this.#wake()
    }
  }

  /** The mailbox of a lost session is gone, and a read of it alone would never end. */
  exclude(session: Session): void {
    if (this.#reading.includes(session)) this.#connection?.reset()
  }

  // The blocked read returns when something arrives in one of its own mailboxes.
  #wake(): void {
    const session = this.#reading.find(({ lost }) => lost === undefined)
    if (session === undefined) return this.#connection?.reset()
    session.partition.request({
      verb: "session.wake",
      args: [],
      session,
      moot: () => {},
      settle: () => {},
      fail: (error) => this.#kernel.log("Warn", "the reader could not be woken", error)
    })
  }

  async #run(): Promise<void> {
    let attempt = 0
    let missed = false
    while (!this.#closed) {
      if (!this.#partitions().some((partition) => partition?.claims.isListening() === true)) break
      const connection = this.#connection ??= this.#connect()
      try {
        await ready(connection)
        // Only now: a session that began to wait meanwhile has not woken anybody.
        const sessions: Array<Session> = []
        for (const partition of this.#partitions()) {
          if (partition?.session?.waited === true) sessions.push(partition.session)
        }
        if (missed) { for (const { partition } of sessions) partition.resync() }
        missed = false
        if (sessions.length === 0) break
        this.#reading = sessions
        const reply = await connection.send("XREAD", [
          "COUNT",
          batchSize,
          "BLOCK",
          blockMillis,
          "STREAMS",
          ...sessions.map(({ mailbox }) => mailbox),
          ...sessions.map(({ read }) => read)
        ], blockMillis + graceMillis)
        attempt = 0
        this.#reading = []
        if (!this.#closed) this.#deliver(sessions, reply)
      } catch (cause) {
        this.#reading = []
        if (this.#closed) break
        const passing = cause instanceof RedisError && this.#kernel.isTransient(cause)
        this.#kernel.log(passing ? "Debug" : "Warn", "a read of the mailboxes failed", cause)
        missed = true
        if (!(cause instanceof RedisError) || cause.reason._tag === "Timeout") connection.reset()
        if (attempt > 0) {
          await this.#kernel.sleep(Math.min(1000, 10 * 2 ** Math.min(attempt, 7)) * (0.5 + Math.random() / 2))
        }
        attempt++
      }
    }
    this.#running = false
  }

  #deliver(sessions: ReadonlyArray<Session>, reply: unknown): void {
    if (!Array.isArray(reply)) return
    for (const [mailbox, entries] of reply as ReadonlyArray<readonly [string, ReadonlyArray<Entry>]>) {
      const session = sessions.find((session) => session.mailbox === mailbox)
      if (session === undefined) continue
      for (const [id, fields] of entries) session.partition.deliver(session, id, JSON.parse(fields[1]!))
    }
  }

  async close(): Promise<void> {
    this.#closed = true
    await this.#connection?.close()
  }
}

const ready = (connection: Connection): Promise<void> =>
  new Promise((resolve) => {
    if (connection.isReady()) return resolve()
    const off = connection.onReady(() => {
      off()
      resolve()
    })
  })
