/**
 * The steps that ioredis sends before a connection is ready. It only gives up for some that fail: after a refused
 * `SELECT` it goes on in database 0, and a refused `AUTH` of RESP2 can be a warning to it.
 */

import type * as IoRedis from "ioredis"
import { errorFrom, fail, type RedisError, UnsupportedServer } from "./errors.ts"

export interface Handshake {
  /** Why the connection must not be used. The name of the connection is the one step that may fail. */
  readonly failure: () => RedisError | undefined
  /** Whether this error is that of a step, which `failure` reports. */
  readonly reports: (error: unknown) => boolean
  /** Whether the server has refused the name of the connection. */
  readonly isUnnamed: () => boolean
}

export const watch = (client: IoRedis.Redis, db: number, address: string): Handshake => {
  // The last outcome of each step: without RESP3 all of them are sent twice.
  const refused = new Map<string, unknown>()
  const sendCommand = client.sendCommand.bind(client)
  client.sendCommand = (command, stream) => {
    // Without ioredis's ready check, this status has no other commands.
    if (client.status === "connect") {
      const { name } = command
      command.promise.then(() => refused.delete(name), (error) => refused.set(name, error))
    }
    return sendCommand(command, stream)
  }

  const stepFailure = (name: string): RedisError | undefined => {
    const error = refused.get(name)
    if (!(error instanceof Error)) return undefined
    // ioredis has gone on with RESP2.
    if (name === "hello" && /NOPROTO|unknown command/i.test(error.message)) return undefined
    return name === "select" && /^ERR (DB index|invalid DB index)/.test(error.message)
      ? fail(new UnsupportedServer({ detail: `it has no database ${db}: choose another or raise its \`databases\`` }))
      : errorFrom(error, name.toUpperCase(), true, address)
  }

  return {
    failure: () => stepFailure("hello") ?? stepFailure("auth") ?? stepFailure("select"),
    reports: (error) => error !== undefined && refused.get("select") === error,
    isUnnamed: () => refused.has("client")
  }
}
