/** The commands in flight: each of them settles once, independently of ioredis and its promise. */

import * as IoRedis from "ioredis"
import { tracingChannel } from "node:diagnostics_channel"
import { giveUpAfter, type Io, type Timer } from "../io.ts"
import { slotOf, wireName } from "./command.ts"
import type { Caller, Connection, NodeConnection, ScriptCommand } from "./connection.ts"
import { errorFrom, fail, type RedisError, Timeout } from "./errors.ts"
import { type Call, command, message } from "./resp.ts"

/** The part of a command that ioredis needs to find its node. */
export type Routed = Pick<IoRedis.Command, "getKeys" | "getSlot">

interface Entry {
  readonly expiresAt: number
  readonly command: Routed
  /** The command's name as the caller spells it, for errors. */
  readonly label: string
  /** Rejects the caller's promise. A `Cluster` of ioredis replaces `reject` of the command to redirect it. */
  readonly rejectWith: (error: RedisError) => void
  previous: Entry | undefined
  next: Entry | undefined
  isSettled: boolean
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
  // The deadlines up to this time have been extended, each once, until this timer comes.
  #extended = -Infinity
  #extension: Timer | undefined

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
    if (after === undefined) this.#head = entry
    else after.next = entry
    if (after === undefined || after.expiresAt <= this.#extended) this.#arm()
  }

  /** Whether the entry had not settled before. */
  settle(entry: Entry): boolean {
    if (entry.isSettled) return false
    entry.isSettled = true
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
    this.#extension?.cancel()
    this.#timerAt = Infinity
  }

  #arm(): void {
    let next = this.#head
    while (next !== undefined && next.expiresAt <= this.#extended) next = next.next
    if (next === undefined || next.expiresAt === Infinity || this.#timerAt <= next.expiresAt) return
    this.#timer?.cancel()
    this.#timerAt = next.expiresAt
    const millis = Math.ceil(this.#timerAt - this.#io.now())
    this.#timer = giveUpAfter(
      this.#io,
      Math.min(longestTimer, Math.max(1, millis)),
      (over) => this.#expire(over),
      (over) => this.#extend(over)
    )
  }

  #extend(over: number): void {
    this.#extended = over
    // The others have a timer of their own.
    this.#extension = this.#timer
    this.#timer = undefined
    this.#timerAt = Infinity
    this.#arm()
  }

  #expire(over: number): void {
    if (over > this.#extended) this.#timerAt = Infinity
    while (this.#head !== undefined && this.#head.expiresAt <= over) {
      const entry = this.#head
      this.settle(entry)
      this.#onExpired(entry)
    }
    this.#arm()
  }
}

interface InFlightOptions {
  readonly io: Io
  /** The address of the server that a command goes to, for errors. */
  readonly addressOf: (command: Routed) => string
  readonly dispatch: (command: IoRedis.Command) => unknown
  readonly onExpired?: ((command: Routed) => void) | undefined
}

const wireNames = { FCALL: "fcall", EVALSHA: "evalsha", EVAL: "eval" } as const

/** Decodes byte strings as UTF-8, also inside arrays. */
const decode = (reply: unknown): unknown =>
  reply instanceof Buffer ? reply.toString() : Array.isArray(reply) ? reply.map(decode) : reply

/** The part of a command that ioredis may use when it sends it. A member that a later ioredis adds fails to compile here. */
type Sendable = Omit<IoRedis.Command, "isResolved" | "stringifyArguments" | "transformReply">

/**
 * Calls that have ended, in that order. Their callers are notified when ioredis is done with the data that it has received:
 * they may close the connection, and their exceptions are not for ioredis.
 */
class Ends {
  #ended: Array<Ended> = []
  readonly #io: Io

  constructor(io: Io) {
    this.#io = io
  }

  add(ended: Ended): void {
    if (this.#ended.push(ended) === 1) this.#io.defer(this.#tell)
  }

  readonly #tell = (): void => {
    const ended = this.#ended
    this.#ended = []
    for (const one of ended) {
      try {
        one.tell()
      } catch (cause) {
        this.#io.defer(() => {
          throw cause
        })
      }
    }
  }
}

interface Ended {
  readonly tell: () => void
}

// ioredis hands the promise of a command to what has sent it, and that is us, and to what traces it.
const untraced: Promise<unknown> = Promise.resolve()
const tracing = tracingChannel("ioredis:command")

/** The common part of all commands that are sent without `IoRedis.Command`. */
interface Setting {
  readonly deadlines: Deadlines
  readonly ends: Ends
  readonly addressOf: (command: Routed) => string
}

/**
 * A command with callbacks: its entry, and the command that ioredis sees. `IoRedis.Command` costs about 10 microseconds per
 * call in its constructor and closures, and leaves objects that survive minor collections.
 */
abstract class Bare implements Entry, Ended, Sendable {
  abstract readonly label: string
  abstract readonly name: string
  /** ioredis puts these into traces and debug output. */
  abstract readonly args: Array<string>
  readonly expiresAt: number
  previous: Entry | undefined = undefined
  next: Entry | undefined = undefined
  isSettled = false
  isSent = false
  inTransaction = false
  isTraced = false
  readonly #setting: Setting
  readonly #caller: Caller
  #reply: unknown = undefined
  #error: RedisError | undefined = undefined
  #traced: PromiseWithResolvers<unknown> | undefined = undefined

  constructor(setting: Setting, expiresAt: number, caller: Caller) {
    this.#setting = setting
    this.expiresAt = expiresAt
    this.#caller = caller
  }

  abstract getKeys(): Array<string>
  abstract getSlot(): number
  abstract toWritable(): string

  protected decoded(reply: unknown): unknown {
    return decode(reply)
  }

  get command(): Routed {
    return this
  }

  get promise(): Promise<unknown> {
    if (!tracing.hasSubscribers) return untraced
    return (this.#traced ??= Promise.withResolvers()).promise
  }

  resolve(reply: unknown): void {
    const { addressOf, deadlines, ends } = this.#setting
    if (!deadlines.settle(this)) return
    try {
      this.#reply = this.decoded(reply)
    } catch (error) {
      // The reply is longer than a string can be. ioredis would throw the error as an uncaught exception.
      this.#error = errorFrom(error, this.label, true, addressOf(this))
    }
    ends.add(this)
  }

  reject(error: Error): void {
    const { addressOf, deadlines } = this.#setting
    if (deadlines.settle(this)) this.rejectWith(errorFrom(error, this.label, this.isSent, addressOf(this)))
  }

  rejectWith(error: RedisError): void {
    this.#error = error
    this.#setting.ends.add(this)
  }

  tell(): void {
    if (this.#error === undefined) {
      this.#traced?.resolve(this.#reply)
      this.#caller.resolve(this.#reply)
    } else {
      this.#traced?.reject(this.#error)
      this.#caller.reject(this.#error)
    }
  }

  // `profile` fixes the shape of replies, and the deadline is ours: ioredis has nothing to set.
  setReplyContext(): void {}
  setTimeout(): void {}
  setBlockingTimeout(): void {}
  extractBlockingTimeout(): undefined {}
}

/** One call of a script. */
class ScriptCall extends Bare {
  readonly label: ScriptCommand
  readonly name: string
  readonly #script: string
  readonly #call: Call
  #slot: number | undefined = undefined

  constructor(
    setting: Setting,
    expiresAt: number,
    caller: Caller,
    command: ScriptCommand,
    script: string,
    call: Call
  ) {
    super(setting, expiresAt, caller)
    this.label = command
    this.name = wireNames[command]
    this.#script = script
    this.#call = call
  }

  /** Arguments of the script stay out of traces and debug output. */
  get args(): Array<string> {
    return [this.#script, "1", this.#call.key]
  }

  getKeys(): Array<string> {
    return [this.#call.key]
  }

  getSlot(): number {
    return this.#slot ??= slotOf(this.#call.key)
  }

  // Not encoded before: the text would be kept until the reply. A redirected call is encoded again.
  toWritable(): string {
    return message(this.label, this.#script, this.#call)
  }
}

/** One read of streams, which goes to the node of its connection. */
class StreamRead extends Bare {
  readonly label = "XREAD"
  readonly name = "xread"
  readonly #args: ReadonlyArray<string | number>

  constructor(setting: Setting, expiresAt: number, caller: Caller, args: ReadonlyArray<string | number>) {
    super(setting, expiresAt, caller)
    this.#args = args
  }

  get args(): Array<string> {
    return this.#args.map(String)
  }

  getKeys(): Array<string> {
    return []
  }

  getSlot(): number {
    return -1
  }

  toWritable(): string {
    return command(this.label, this.#args)
  }

  // Protocol 3 has a map, of which ioredis makes a list: key, entries, key, entries. Protocol 2 has a list of pairs.
  protected override decoded(reply: unknown): unknown {
    const list = super.decoded(reply) as ReadonlyArray<unknown> | null
    if (Array.isArray(list?.[0])) return list
    return list && Array.from({ length: list.length / 2 }, (_, at) => [list[2 * at], list[2 * at + 1]])
  }
}

export class InFlight {
  readonly #options: InFlightOptions
  readonly #deadlines: Deadlines
  readonly #setting: Setting

  constructor(options: InFlightOptions) {
    this.#options = options
    this.#deadlines = new Deadlines(options.io, (entry) => {
      options.onExpired?.(entry.command)
      entry.rejectWith(fail(new Timeout({ command: entry.label })))
    })
    this.#setting = { deadlines: this.#deadlines, ends: new Ends(options.io), addressOf: options.addressOf }
  }

  readonly send: Connection["send"] = (name, args, deadlineMillis) =>
    this.#dispatch(
      name,
      new IoRedis.Command(wireName(name), args as Array<string | number>, { replyEncoding: "utf8" }),
      deadlineMillis
    )

  readonly run: Connection["run"] = (name, script, call, deadlineMillis, caller) =>
    this.#dispatchBare(new ScriptCall(this.#setting, this.#until(deadlineMillis), caller, name, script, call))

  readonly read: NodeConnection["read"] = (args, deadlineMillis, caller) =>
    this.#dispatchBare(new StreamRead(this.#setting, this.#until(deadlineMillis), caller, args))

  #until(deadlineMillis: number): number {
    return this.#options.io.now() + deadlineMillis
  }

  #dispatchBare(command: Bare): void {
    this.#deadlines.insert(command)
    try {
      // A rejection before the call returns means that ioredis had nowhere to send it.
      this.#options.dispatch(command as Sendable as IoRedis.Command)
      command.isSent = true
    } catch (error) {
      command.isSent = true
      command.reject(error as Error)
    }
  }

  /** A call that cannot be sent. */
  refuse(caller: Caller, error: RedisError): void {
    this.#setting.ends.add({ tell: () => caller.reject(error) })
  }

  rejectAll(error: RedisError): void {
    this.#deadlines.settleAll((entry) => entry.rejectWith(error))
  }

  // The caller receives the command's own promise; only the functions that settle it are ours.
  #dispatch(label: string, command: IoRedis.Command, deadlineMillis: number): Promise<unknown> {
    const { addressOf, dispatch } = this.#options
    const { reject, resolve } = command
    let sent = true
    const entry: Entry = {
      expiresAt: this.#until(deadlineMillis),
      command,
      label,
      rejectWith: reject,
      previous: undefined,
      next: undefined,
      isSettled: false
    }
    this.#deadlines.insert(entry)
    command.resolve = (value) => {
      if (this.#deadlines.settle(entry)) resolve(value)
    }
    command.reject = (error) => {
      if (this.#deadlines.settle(entry)) reject(errorFrom(error, label, sent, addressOf(command)))
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
