/** Commands as ioredis takes them, and what it knows of them. */

import * as IoRedis from "ioredis"
import type { Connection } from "./connection.ts"
import { changeLost } from "./errors.ts"

/** Replies that ioredis would reshape are requested under a spelling that it leaves as RESP2 has them. */
export const wireName = (command: string): string => {
  const name = command.toLowerCase()
  return name === "hgetall" ? "HGETALL" : name
}

const blocking = new Set([
  "BLMOVE",
  "BLMPOP",
  "BLPOP",
  "BRPOP",
  "BRPOPLPUSH",
  "BZMPOP",
  "BZPOPMAX",
  "BZPOPMIN",
  "XREAD",
  "XREADGROUP"
])

/** Borrows the method of ioredis: each script call on a cluster needs its slot, and the constructor is expensive. */
export const slotOf = (key: string): number =>
  IoRedis.Command.prototype.getSlot.call({ getKeys: () => [key] } as IoRedis.Command)

/** The keys of a command, if it is one that ioredis knows. */
export const keysOf = (command: string, args: ReadonlyArray<string | number>): ReadonlyArray<string> =>
  new IoRedis.Command(command.toLowerCase(), [...args]).getKeys().map(String)

/** The arguments among which the timeout of a command is. A stream or a group can be named BLOCK. */
const timeoutArguments = (name: string, args: ReadonlyArray<string | number>): Array<string | number> => {
  if (name !== "XREAD" && name !== "XREADGROUP") return [...args]
  const options = name === "XREAD" ? [...args] : args.slice(3)
  const streams = options.findIndex((arg) => String(arg).toUpperCase() === "STREAMS")
  return streams === -1 ? options : options.slice(0, streams)
}

/** How long a command may block by its own arguments. */
export const blockingMillis = (command: string, args: ReadonlyArray<string | number>): number => {
  const name = command.toUpperCase()
  if (name === "WAIT" || name === "WAITAOF") return Number(args.at(-1)) || Infinity
  if (!blocking.has(name)) return 0
  const millis = new IoRedis.Command(name, timeoutArguments(name, args)).extractBlockingTimeout()
  return millis === undefined || millis === null ? 0 : millis === 0 ? Infinity : millis
}

/** Throws for what ioredis would send as another text: an argument that was forgotten as an empty one. */
export const checkArguments = (args: ReadonlyArray<unknown>): void => {
  for (const arg of args) {
    if (typeof arg !== "string" && typeof arg !== "number") {
      throw new RangeError(`Redis: arguments must be strings or numbers, not ${arg === null ? "null" : typeof arg}`)
    }
  }
}

// Their messages come by themselves, and `send` returns one reply.
const streaming = /^(?:MONITOR|P?SYNC|[PS]?SUBSCRIBE)$/

/** Throws for what must not be sent on any connection. */
export const checkCommand = (command: string, args: ReadonlyArray<unknown>): void => {
  // ioredis looks names up in objects, which have members of their own.
  if (typeof command !== "string" || !/^[A-Za-z][\w.|-]*$/.test(command)) {
    throw new RangeError("Redis: command must be the name of a command")
  }
  checkArguments(args)
  const name = command.toUpperCase()
  if (name === "SELECT" || name === "RESET") {
    throw new RangeError(`Redis: ${name} would move a connection for good: use a layer with another \`db\``)
  }
  if (name === "HELLO" && args.length > 0) {
    throw new RangeError("Redis: HELLO would change the protocol, and with it the replies: leave its arguments out")
  }
  if (streaming.test(name)) {
    throw new RangeError(
      `Redis: ${name} is answered by more than one reply: use \`subscribe\` of effect/persistence/Redis, or a client of your own`
    )
  }
}

// They change what all later commands of a connection come to.
const lasting =
  /^(?:ASKING|AUTH|MULTI|READONLY|READWRITE|WATCH|CLIENT (?:NO-EVICT|NO-TOUCH|REPLY|SETNAME|TRACKING)|SCRIPT DEBUG)$/

// They end a transaction, or the connection.
const ending = /^(?:DISCARD|EXEC|QUIT)$/

/** The name of a command, with that of its subcommand where this one decides. */
const fullName = (command: string, args: ReadonlyArray<string | number>): string => {
  const name = command.toUpperCase()
  return name === "CLIENT" || name === "SCRIPT" ? `${name} ${String(args[0]).toUpperCase()}` : name
}

const lastingBut = (why: string) => (command: string, args: ReadonlyArray<string | number>): void => {
  checkCommand(command, args)
  const name = fullName(command, args)
  if (lasting.test(name) || ending.test(name)) throw new RangeError(`Redis: ${name} would change ${why}`)
}

/** Throws for what must not be sent on a connection that others use too. */
export const checkShared = lastingBut("the connection that all share: use a connection of your own, by `connect`")

/** Throws for what must not be sent where each slot of a Cluster has a connection. */
export const checkSpread = lastingBut(
  "one of several connections on a Cluster: use `connect` of lockstep/Redis with a `key`"
)

/**
 * Sends on a connection of a program's own. What a command has changed there is lost with the connection: the next command fails
 * then, once, before it would run without that.
 */
export const sendOwn = (self: Connection, address: string): Connection["send"] => {
  let changedBy: string | undefined
  let transaction: string | undefined
  let lost: string | undefined
  self.onDown(() => {
    lost ??= transaction ?? changedBy
    changedBy = transaction = undefined
  })
  return (command, args, deadlineMillis) => {
    if (!self.isReady()) return self.send(command, args, deadlineMillis)
    if (lost !== undefined) {
      const error = changeLost(address, lost)
      lost = undefined
      return Promise.reject(error)
    }
    const name = fullName(command, args)
    if (ending.test(name)) transaction = undefined
    else if (name === "WATCH" || name === "MULTI") transaction = name
    else if (lasting.test(name)) changedBy = name
    return self.send(command, args, deadlineMillis)
  }
}
