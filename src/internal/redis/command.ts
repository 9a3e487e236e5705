/** Commands as ioredis takes them, and what it knows of them. */

import * as IoRedis from "ioredis"
import type { ScriptCommand } from "./connection.ts"
import { type Call, message } from "./resp.ts"

/** Replies that ioredis would reshape are requested under a spelling that it leaves as RESP2 has them. */
export const wireName = (command: string): string => {
  const name = command.toLowerCase()
  return name === "hgetall" ? "HGETALL" : name
}

/** ioredis sees of its arguments what it needs to find the slot. */
export class EncodedCommand extends IoRedis.Command {
  readonly #text: string

  constructor(name: ScriptCommand, script: string, call: Call) {
    super(wireName(name), [script, "1", call.key], { replyEncoding: "utf8" })
    this.#text = message(name, script, call)
  }

  override toWritable(): string {
    return this.#text
  }
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

export const slotOf = (key: string): number => new IoRedis.Command("get", [key]).getSlot()

/** The first key of a command, if it is one that ioredis knows. */
export const keyOf = (command: string, args: ReadonlyArray<string | number>): string | undefined =>
  new IoRedis.Command(command.toLowerCase(), [...args]).getKeys()[0]?.toString()

/** How long a command may block by its own arguments. */
export const blockingMillis = (command: string, args: ReadonlyArray<string | number>): number => {
  const name = command.toUpperCase()
  if (name === "WAIT" || name === "WAITAOF") return Number(args.at(-1)) || Infinity
  if (!blocking.has(name)) return 0
  const millis = new IoRedis.Command(name, [...args]).extractBlockingTimeout()
  return millis === undefined || millis === null ? 0 : millis === 0 ? Infinity : millis
}

/** Throws for what must not be sent on any connection. */
export const checkCommand = (command: string): void => {
  if (typeof command !== "string" || command === "") throw new RangeError("Redis: command must be a non-empty string")
  if (command.toUpperCase() === "SELECT") {
    throw new RangeError("Redis: SELECT would move a connection for good: use a layer with another `db`")
  }
}
