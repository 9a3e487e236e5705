/** The commands in flight: each of them settles once, whatever ioredis does with its promise. */

import * as IoRedis from "ioredis"
import type { Io, Timer } from "../io.ts"
import { EncodedCommand, wireName } from "./command.ts"
import type { Connection } from "./connection.ts"
import { errorFrom, fail, type RedisError, Timeout } from "./errors.ts"

interface Entry {
  readonly expiresAt: number
  readonly command: IoRedis.Command
  readonly name: string
  readonly reject: (error: RedisError) => void
  previous: Entry | undefined
  next: Entry | undefined
  settled: boolean
}

// The longest time that a timer of Node.js can be set to.
const longestTimer = 0x7fff_ffff

/**
 * Entries in the order of their deadlines, with one timer for all of them. Most have the same deadline, so that one is
 * inserted in a step or two, counted from the end.
 */
class Deadlines {
  readonly #io: Io
  readonly #onExpired: (entry: Entry) => void
  #head: Entry | undefined
  #tail: Entry | undefined
  #timer: Timer | undefined
  #timerAt = Infinity

  constructor(io: Io, onExpired: (entry: Entry) => void) {
    this.#io = io
    this.#onExpired = onExpired
  }

  insert(entry: Entry): void {
    let after = this.#tail
    while (after !== undefined && after.expiresAt > entry.expiresAt) after = after.previous
    entry.previous = after
    entry.next = after === undefined ? this.#head : after.next
    if (entry.next === undefined) this.#tail = entry
    else entry.next.previous = entry
    if (after === undefined) {
      this.#head = entry
      this.#arm()
    } else {
      after.next = entry
    }
  }

  /** Whether the entry had not settled before. */
  settle(entry: Entry): boolean {
    if (entry.settled) return false
    entry.settled = true
    if (entry.previous === undefined) this.#head = entry.next
    else entry.previous.next = entry.next
    if (entry.next === undefined) this.#tail = entry.previous
    else entry.next.previous = entry.previous
    entry.previous = entry.next = undefined
    return true
  }

  settleAll(f: (entry: Entry) => void): void {
    while (this.#head !== undefined) {
      const entry = this.#head
      this.settle(entry)
      f(entry)
    }
    this.#timer?.cancel()
    this.#timerAt = Infinity
  }

  #arm(): void {
    if (this.#head === undefined || this.#head.expiresAt === Infinity || this.#timerAt <= this.#head.expiresAt) return
    this.#timer?.cancel()
    this.#timerAt = this.#head.expiresAt
    const millis = Math.ceil(this.#timerAt - this.#io.now())
    this.#timer = this.#io.after(Math.min(longestTimer, Math.max(1, millis)), () => this.#expire())
  }

  #expire(): void {
    this.#timerAt = Infinity
    const now = this.#io.now()
    while (this.#head !== undefined && this.#head.expiresAt <= now) {
      const entry = this.#head
      this.settle(entry)
      this.#onExpired(entry)
    }
    this.#arm()
  }
}

interface InFlightOptions {
  readonly io: Io
  readonly address: string
  readonly dispatch: (command: IoRedis.Command) => unknown
  readonly onExpired?: ((command: IoRedis.Command) => void) | undefined
}

export class InFlight {
  readonly #options: InFlightOptions
  readonly #deadlines: Deadlines

  constructor(options: InFlightOptions) {
    this.#options = options
    this.#deadlines = new Deadlines(options.io, (entry) => {
      options.onExpired?.(entry.command)
      entry.reject(fail(new Timeout({ command: entry.name })))
    })
  }

  readonly send: Connection["send"] = (name, args, deadlineMillis) =>
    this.#dispatch(
      name,
      new IoRedis.Command(wireName(name), args as Array<string | number>, { replyEncoding: "utf8" }),
      deadlineMillis
    )

  readonly run: Connection["run"] = (name, script, call, deadlineMillis) =>
    this.#dispatch(name, new EncodedCommand(name, script, call), deadlineMillis)

  rejectAll(error: RedisError): void {
    this.#deadlines.settleAll((entry) => entry.reject(error))
  }

  // The promise of the command is the one that is handed out; only what settles it is ours.
  #dispatch(name: string, command: IoRedis.Command, deadlineMillis: number): Promise<unknown> {
    const { address, dispatch, io } = this.#options
    const { reject, resolve } = command
    let sent = true
    const entry: Entry = {
      expiresAt: io.now() + deadlineMillis,
      command,
      name,
      reject,
      previous: undefined,
      next: undefined,
      settled: false
    }
    this.#deadlines.insert(entry)
    command.resolve = (value) => {
      if (this.#deadlines.settle(entry)) resolve(value)
    }
    command.reject = (error) => {
      if (this.#deadlines.settle(entry)) reject(errorFrom(error, name, sent, address))
    }
    try {
      // A rejection before the call returns means that ioredis had nowhere to send it.
      sent = false
      dispatch(command)
      sent = true
    } catch (error) {
      sent = true
      command.reject(error as Error)
    }
    return command.promise
  }
}
