/** The Redis of a simulation: a real one, whose time and faults the simulation decides. */

import { CommandFailed, fail, FunctionMissing, OutOfMemory, RedisError, Unavailable } from "../redis/errors.ts"
import { type Call, call } from "../redis/resp.ts"
import { command, type Machine } from "./machine.ts"
import { Migration } from "./migration.ts"
import { expiry } from "./source.ts"

/** A request of a process to Redis. */
export type Order =
  | { readonly is: "call"; readonly command: string; readonly script: string; readonly call: Call }
  | { readonly is: "command"; readonly command: string; readonly args: ReadonlyArray<string | number> }

/** An order that was executed, to be executed again. */
interface Done {
  readonly at: number
  readonly order: Order
}

// Chance decides about them, or the real time, or they are about more than one database, or about the server.
const notSimulated: ReadonlySet<string> = new Set([
  "COPY",
  "FLUSHALL",
  "HEXPIRE",
  "HEXPIREAT",
  "HGETEX",
  "HPEXPIRE",
  "HPEXPIREAT",
  "HRANDFIELD",
  "HSETEX",
  "INFO",
  "LASTSAVE",
  "LATENCY",
  "LOLWUT",
  "MEMORY",
  "MIGRATE",
  "MOVE",
  "RANDOMKEY",
  "RESTORE",
  "SCAN",
  "SLOWLOG",
  "SPOP",
  "SSCAN",
  "SWAPDB",
  "XAUTOCLAIM",
  "XCLAIM",
  "ZRANDMEMBER",
  "ZSCAN"
])

/** Whether the reply depends on how long something has been idle: Redis goes by the real time there. */
const asksForIdleTime = (command: string, args: ReadonlyArray<string | number>): boolean => {
  const words = args.map((arg) => String(arg).toUpperCase())
  if (command === "OBJECT") return words[0] === "IDLETIME" || words[0] === "FREQ"
  if (command === "XINFO") return words[0] === "CONSUMERS" || words[2] === "FULL"
  // Behind the key and the group: without more, it counts.
  if (command === "XPENDING") return words.length > 2
  return command === "XREADGROUP" && words.slice(3, words.indexOf("STREAMS")).includes("CLAIM")
}

// They write nothing, or nothing that a replica could miss.
const unlogged: ReadonlySet<string> = new Set(["FUNCTION", "GET", "MGET", "XREAD"])

export class Server {
  /** How many entries were written to streams, and the number of the last one of each stream. */
  writes = 0
  /** The log line of a script: a handler of the actor has failed. */
  defect: string | undefined = undefined
  readonly written = new Map<string, number>()
  /** Behind the clock of the world, in milliseconds. */
  behind = 0
  /** When it has forgotten something, by its own clock. */
  forgotAt = 0
  /** Over its `maxmemory`. */
  full = false
  /** Refuses for the time being. */
  migrating = false
  /** The slot of a cluster that migrates. */
  #migration: Migration | undefined = undefined

  readonly #machine: Machine
  readonly #database: number
  readonly #now: () => number
  #loaded = false
  #log: Array<Done> = []
  // When keys are to expire, in milliseconds of the world's clock, and when the first of them is.
  #expiring = new Map<string, number>()
  #nextExpiry = Number.POSITIVE_INFINITY

  constructor(machine: Machine, database: number, now: () => number) {
    this.#machine = machine
    this.#database = database
    this.#now = now
  }

  /** Milliseconds since the epoch: Redis's clock counts whole microseconds. */
  get now(): number {
    return Math.round((this.#now() - this.behind) * 1000) / 1000
  }

  forgetLibrary(): void {
    this.#loaded = false
  }

  /** The keys that are there now. */
  async keys(): Promise<ReadonlyArray<string>> {
    await this.#expire()
    return await this.#command("KEYS", "*") as ReadonlyArray<string>
  }

  /** Slots, by what their keys begin with, that have any. */
  async slots(): Promise<ReadonlyArray<string>> {
    const keys = await this.#command("KEYS", "*") as ReadonlyArray<string>
    return [...new Set(keys.map((key) => key.slice(0, key.indexOf("}") + 1)))].filter((slot) => slot !== "").sort()
  }

  /** A slot begins to move to another server. */
  beginMigration(slot: string): Migration {
    return this.#migration = new Migration(slot, (name, ...args) => this.#command(name, ...args))
  }

  get migration(): Migration | undefined {
    return this.#migration
  }

  async endMigration(): Promise<void> {
    await this.#migration?.finish()
    this.#migration = undefined
  }

  async flush(): Promise<void> {
    this.#migration = undefined
    await this.#command("FLUSHDB")
    this.#log = []
    this.#expiring.clear()
  }

  /** The newest entry of a stream is lost. */
  async loseNewest(stream: string): Promise<void> {
    const [newest] = await this.#command("XREVRANGE", stream, "+", "-", "COUNT", "1") as ReadonlyArray<
      readonly [string]
    >
    if (newest !== undefined) await this.#command("XDEL", stream, newest[0])
  }

  /** A replica that has missed the last calls is the primary from now on. */
  async failOver(missed: number): Promise<void> {
    const log = this.#log.slice(0, Math.max(0, this.#log.length - missed))
    await this.flush()
    for (const { at, order } of log) {
      await this.#expire(at)
      await this.#executed(order, at)
    }
    this.#log = log
  }

  async execute(order: Order): Promise<unknown> {
    if (this.migrating) throw fail(new Unavailable({ code: "TRYAGAIN" }))
    await this.#expire()
    if (order.is === "call") this.#admit(order)
    else if (!unlogged.has(order.command)) await this.#admitCommand(order)
    const isRead = order.is === "call" ? order.script.endsWith("_ro") : unlogged.has(order.command)
    const at = this.now
    const reply = order.is === "call" ? await this.#routed(order, at) : await this.#plain(order)
    if (!isRead) this.#log.push({ at, order })
    return reply
  }

  #admit({ command, script }: Order & { readonly is: "call" }): void {
    if (!this.#loaded) throw fail(new FunctionMissing({ code: "ERR" }))
    if (this.full && !/_(oom|renew|ro)$/.test(script)) throw fail(new OutOfMemory({ command }))
  }

  async #admitCommand({ args, command }: Order & { readonly is: "command" }): Promise<void> {
    const { callable, grows } = await this.#machine.traits(command)
    const name = command.toUpperCase()
    if (!callable || notSimulated.has(name) || asksForIdleTime(name, args)) {
      throw fail(new CommandFailed({ command, code: "ERR", detail: "it cannot be simulated" }))
    }
    if (this.full && grows) throw fail(new OutOfMemory({ command }))
  }

  async #plain(order: Order & { readonly is: "command" }): Promise<unknown> {
    const { args, command } = order
    if (command !== "FUNCTION") return await this.#routed(order, this.now)
    if (args[0] === "LOAD") this.#loaded = true
    return "OK"
  }

  async #command(name: string, ...args: ReadonlyArray<string>): Promise<unknown> {
    return (await this.#machine.execute(this.#database, this.now, command(name, args))).reply
  }

  async #routed(order: Order, at: number): Promise<unknown> {
    return this.#migration === undefined
      ? await this.#executed(order, at)
      : await this.#migration.execute(keysOf(order), (leaving) => this.#executed(order, at, leaving))
  }

  async #executed(order: Order, at: number, leaving = ""): Promise<unknown> {
    const asked = order.is === "call"
      ? { name: leaving + order.script, ...order.call }
      : command(order.command, order.command === "XREAD" ? unblocked(order.args) : order.args)
    const { notes, reply } = await this.#machine.execute(this.#database, at, asked)
    for (const note of notes) {
      if (note[0] === "w") {
        this.written.set(note.slice(1), ++this.writes)
      } else if (note[0] === "l") {
        this.defect ??= note.slice(1)
      } else {
        const space = note.indexOf(" ")
        const due = Number(note.slice(1, space))
        this.#expiring.set(note.slice(space + 1), due)
        this.#nextExpiry = Math.min(this.#nextExpiry, due)
      }
    }
    return reply
  }

  async #expire(now = this.now): Promise<void> {
    // Keys on their way have other names.
    if (this.#nextExpiry > now || this.#migration !== undefined) return
    const due = [...this.#expiring].filter(([, at]) => at <= now)
    for (const [key] of due) this.#expiring.delete(key)
    this.#nextExpiry = Math.min(Number.POSITIVE_INFINITY, ...this.#expiring.values())
    const { count, text } = call(due.map(([key]) => key), [])
    await this.#machine.execute(this.#database, now, { name: expiry, count, text })
  }
}

/** The keys that it declares. */
const keysOf = (order: Order): ReadonlyArray<string> => {
  if (order.is === "command") {
    const { args, command } = order
    if (command === "MGET") return args.map(String)
    const streams = args.indexOf("STREAMS")
    if (streams < 0) return args.slice(0, 1).map(String)
    return args.slice(streams + 1, streams + 1 + (args.length - streams - 1) / 2).map(String)
  }
  const words = wordsOf(order.call)
  return words.slice(1, 1 + Number(words[0]))
}

/** The arguments of a call: the number of its keys, these, and the others. */
export const wordsOf = ({ text }: Call): ReadonlyArray<string> => {
  const bytes = Buffer.from(text)
  const words: Array<string> = []
  for (let at = 0; at < bytes.length;) {
    const start = bytes.indexOf("\r\n", at) + 2
    const end = start + Number(bytes.toString("latin1", at + 1, start - 2))
    words.push(bytes.toString("utf8", start, end))
    at = end + 2
  }
  return words
}

// The simulation blocks, and Redis does not.
const unblocked = (args: ReadonlyArray<string | number>): ReadonlyArray<string | number> => {
  const at = args.indexOf("BLOCK")
  return at < 0 ? args : [...args.slice(0, at), ...args.slice(at + 2)]
}

/** Whether it is an answer of Redis, rather than a defect of the simulation. */
export const isRefusal = (cause: unknown): cause is RedisError => cause instanceof RedisError
