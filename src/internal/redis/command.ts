/** Commands as ioredis takes them, and what it knows of them. */

import * as IoRedis from "ioredis"

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

/** How long a command may block by its own arguments. */
export const blockingMillis = (command: string, args: ReadonlyArray<string | number>): number => {
  const name = command.toUpperCase()
  if (name === "WAIT" || name === "WAITAOF") return Number(args.at(-1)) || Infinity
  if (!blocking.has(name)) return 0
  const millis = new IoRedis.Command(name, [...args]).extractBlockingTimeout()
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

/** Throws for what must not be sent on any connection. */
export const checkCommand = (command: string, args: ReadonlyArray<unknown>): void => {
  if (typeof command !== "string" || command === "") throw new RangeError("Redis: command must be a non-empty string")
  checkArguments(args)
  const name = command.toUpperCase()
  if (name === "SELECT" || name === "RESET") {
    throw new RangeError(`Redis: ${name} would move a connection for good: use a layer with another \`db\``)
  }
}

// They change what all later commands of a connection come to.
const lasting = /^(?:AUTH|DISCARD|EXEC|HELLO|MONITOR|MULTI|P?SYNC|QUIT|[PS]?SUBSCRIBE|WATCH|CLIENT (?:REPLY|TRACKING))$/

/** Throws for what must not be sent on a connection that others use too. */
export const checkShared = (command: string, args: ReadonlyArray<string | number>): void => {
  checkCommand(command, args)
  const name = command.toUpperCase()
  if (!lasting.test(name === "CLIENT" ? `${name} ${String(args[0]).toUpperCase()}` : name)) return
  throw new RangeError(
    `Redis: ${name} would change the connection that all share: use a connection of your own, by \`connect\``
  )
}
