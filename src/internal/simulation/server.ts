/** The Redis of a simulation: a real one, whose time and faults the simulation decides. */

import type { Connection } from "../redis/connection.ts"
import { fail, FunctionMissing, OutOfMemory, RedisError, Unavailable } from "../redis/errors.ts"
import { ascii, type Call } from "../redis/resp.ts"
import { never, prefix, simulated } from "./source.ts"

/** What a process asks Redis for. */
export type Order =
  | { readonly is: "call"; readonly command: string; readonly script: string; readonly call: Call }
  | { readonly is: "command"; readonly command: string; readonly args: ReadonlyArray<string | number> }

/** What was executed, to be executed again. */
interface Done {
  readonly at: number
  readonly order: Order
}

const deadline = 60_000

// Loading takes longer than most schedules, so Redis keeps what it has between them.
const libraries = new WeakMap<Connection, string>()

export class Server {
  /** How many entries were written to streams, and the number of the last one of each stream. */
  writes = 0
  readonly written = new Map<string, number>()
  /** Behind the clock of the world, in milliseconds. */
  behind = 0
  /** When it has forgotten something, by the clock of the world. */
  forgotAt = 0
  /** Over its `maxmemory`. */
  full = false
  /** Refuses for the time being. */
  migrating = false

  readonly #connection: Connection
  readonly #now: () => number
  #loaded = false
  #log: Array<Done> = []
  // Times to live: the milliseconds of the world's clock, and the key.
  #expiring: Array<readonly [at: number, key: string]> = []

  constructor(connection: Connection, now: () => number) {
    this.#connection = connection
    this.#now = now
  }

  /** Milliseconds since the epoch. */
  get now(): number {
    return this.#now() - this.behind
  }

  /** Empty, with nothing loaded. */
  async reset(): Promise<void> {
    await this.#connection.send("FLUSHDB", [], deadline)
    this.writes = 0
    this.written.clear()
    this.behind = this.forgotAt = 0
    this.full = this.migrating = this.#loaded = false
    this.#log = []
    this.#expiring = []
  }

  forgetLibrary(): void {
    this.#loaded = false
  }

  async flush(): Promise<void> {
    await this.#connection.send("FLUSHDB", [], deadline)
    this.#log = []
  }

  /** A replica that has missed the last calls is the primary from now on. */
  async failOver(missed: number): Promise<void> {
    const log = this.#log.slice(0, Math.max(0, this.#log.length - missed))
    await this.flush()
    this.#expiring = []
    for (const { at, order } of log) await this.#executed(order, at).catch(ignore)
    this.#log = log
  }

  async execute(order: Order): Promise<unknown> {
    if (this.migrating) throw fail(new Unavailable({ code: "TRYAGAIN" }))
    await this.#expire()
    if (order.is === "command") return await this.#command(order)
    if (!this.#loaded) throw fail(new FunctionMissing({ code: "ERR" }))
    if (this.full && !order.script.endsWith("_oom") && !order.script.endsWith("_ro")) {
      throw fail(new OutOfMemory({ command: order.command }))
    }
    const at = this.now
    const reply = await this.#executed(order, at)
    if (!order.script.endsWith("_ro")) this.#log.push({ at, order })
    return reply
  }

  async #command(order: Order & { readonly is: "command" }): Promise<unknown> {
    const { args, command } = order
    if (command !== "FUNCTION") return await this.#executed(order, this.now)
    if (args[0] === "LOAD") {
      const source = String(args[1])
      if (libraries.get(this.#connection) !== source) {
        await this.#connection.send("FUNCTION", ["LOAD", "REPLACE", simulated(source)], deadline)
        libraries.set(this.#connection, source)
      }
      this.#loaded = true
    }
    return "OK"
  }

  async #executed(order: Order, at: number): Promise<unknown> {
    if (order.is === "command") {
      const args = order.command === "XREAD" ? unblocked(order.args) : order.args
      return await this.#connection.send(order.command, args, deadline)
    }
    const { call: { count, key, text }, command, script } = order
    const now = ascii(String(Math.round(at * 1000)))
    const reply = await this.#connection.run(
      command as "FCALL",
      prefix + script,
      { key, count: count + 1, text: text + now },
      deadline
    )
    const [first, ...notes] = reply as ReadonlyArray<string>
    for (const note of notes) {
      if (note[0] === "w") {
        this.written.set(note.slice(1), ++this.writes)
      } else {
        const space = note.indexOf(" ")
        this.#expiring.push([Number(note.slice(1, space)), note.slice(space + 1)])
      }
    }
    return first
  }

  async #expire(): Promise<void> {
    const { now } = this
    const due = this.#expiring.filter(([at]) => at <= now)
    if (due.length === 0) return
    this.#expiring = this.#expiring.filter(([at]) => at > now)
    for (const [, key] of due) {
      const at = Number(await this.#connection.send("PEXPIRETIME", [key], deadline))
      if (at > 0 && at - never <= now) await this.#connection.send("DEL", [key], deadline)
    }
  }
}

const ignore = () => {}

// The simulation blocks, and Redis does not.
const unblocked = (args: ReadonlyArray<string | number>): ReadonlyArray<string | number> => {
  const at = args.indexOf("BLOCK")
  return at < 0 ? args : [...args.slice(0, at), ...args.slice(at + 2)]
}

/** Whether it is an answer of Redis, rather than a defect of the simulation. */
export const isRefusal = (cause: unknown): cause is RedisError => cause instanceof RedisError
