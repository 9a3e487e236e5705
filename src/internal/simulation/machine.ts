/**
 * The real Redis behind simulations. Each of them has a database of its own, and what several of them ask for in one turn of the event
 * loop is executed in one round trip.
 */

import { source } from "../actor/transport.ts"
import type { Connection } from "../redis/connection.ts"
import { errorFrom } from "../redis/errors.ts"
import { ascii, encode } from "../redis/resp.ts"
import { entrance, simulated } from "./source.ts"

/** A request of a process to Redis: the name of a function of the library, or "" for a command; and the arguments. */
export interface Call {
  readonly name: string
  /** Of a command. */
  readonly label?: string
  /** How many there are, and as they are sent. */
  readonly count: number
  readonly text: string
}

/** What Redis knows of a command: whether it takes memory, and whether a script can call it. */
export interface Traits {
  readonly grows: boolean
  readonly callable: boolean
}

export interface Executed {
  readonly reply: unknown
  /** Notes for the simulation, see `source.ts`. */
  readonly notes: ReadonlyArray<string>
}

interface Waiting {
  /** The name of the command, for errors. */
  readonly label: string
  readonly count: number
  readonly text: string
  readonly resolve: (executed: Executed) => void
  readonly reject: (cause: unknown) => void
}

/** As many as Redis has by default. */
export const databases = 16

// While Redis executes the calls of one half of them, the other half goes on.
const batch = databases / 2

const deadline = 60_000

// Redis walks through a hash of this encoding in the order of its fields, and through others as chance decides.
const settings = ["hash-max-listpack-entries", 1_000_000, "hash-max-listpack-value", 1_000_000]

/** A command, as a call. */
export const command = (name: string, args: ReadonlyArray<string | number>): Call => ({
  name: "",
  label: name,
  count: 1 + args.length,
  text: [name, ...args].map(encode).join("")
})

// Errors of Lua itself have none.
const withCode = (message: string): string => /^[A-Z]+ /.test(message) ? message : `ERR ${message}`

// It is no answer to a simulated process.
const lost = (cause: unknown): Error => new Error("The Redis of the simulation has failed", { cause })

export class Machine {
  readonly #connection: Connection
  #loaded = false
  #waiting: Array<Waiting> = []
  readonly #traits = new Map<string, Promise<Traits>>()

  constructor(connection: Connection) {
    this.#connection = connection
  }

  /** Executes a call in a database, at a time in milliseconds since the epoch. */
  execute(database: number, at: number, { count, label = "FCALL", name, text }: Call): Promise<Executed> {
    // Simulations do not give way to the event loop before they all wait.
    if (this.#waiting.length === 0) setImmediate(() => this.#flush())
    const { promise, reject, resolve } = Promise.withResolvers<Executed>()
    const about = encode(database) + encode(Math.round(at * 1000)) + ascii(name) + encode(count)
    this.#waiting.push({ label, count: count + 4, text: about + text, resolve, reject })
    if (this.#waiting.length === batch) this.#flush()
    return promise
  }

  traits(name: string): Promise<Traits> {
    let found = this.#traits.get(name)
    if (found === undefined) {
      found = this.#connection.send("COMMAND", ["INFO", name], deadline).then((reply) => {
        const flags =
          (reply as ReadonlyArray<readonly [name: string, arity: number, flags: Iterable<string>] | null>)[0]?.[2]
        const all = new Set(flags)
        return { grows: all.has("denyoom"), callable: !all.has("noscript") }
      }, (cause) => {
        throw lost(cause)
      })
      this.#traits.set(name, found)
    }
    return found
  }

  #flush(): void {
    const waiting = this.#waiting
    if (waiting.length === 0) return
    this.#waiting = []
    const failed = (cause: unknown) => {
      for (const { reject } of waiting) reject(lost(cause))
    }
    // The command that is sent first is executed first.
    if (!this.#loaded) {
      this.#loaded = true
      this.#connection.send("CONFIG", ["SET", ...settings], deadline).catch(failed)
      this.#connection.send("FUNCTION", ["LOAD", "REPLACE", simulated(source())], deadline).catch(failed)
    }
    const count = waiting.reduce((sum, one) => sum + one.count, 1)
    const text = ascii("0") + waiting.map((one) => one.text).join("")
    this.#connection.run("FCALL", entrance, { key: "", count, text }, deadline, {
      resolve: (replies) => {
        for (const [at, { label, reject, resolve }] of waiting.entries()) {
          const [reply, ...notes] = (replies as ReadonlyArray<readonly [unknown, ...Array<string>]>)[at]!
          if (notes[0]?.[0] === "e") reject(errorFrom(new Error(withCode(notes[0].slice(1))), label, true, ""))
          else resolve({ reply, notes })
        }
      },
      reject: failed
    })
  }
}
