/** A server's description of itself, whether the server can be used, and its features. */

import type { Connection, ServerInfo, Topology } from "./connection.ts"
import { fail, notCluster, ReadOnlyReplica, RedisError, UnsupportedServer } from "./errors.ts"

const parseHello = (reply: unknown): Map<string, unknown> => {
  const fields = new Map<string, unknown>()
  if (!Array.isArray(reply)) return fields
  for (let i = 0; i + 1 < reply.length; i += 2) fields.set(String(reply[i]), reply[i + 1])
  return fields
}

/** The server's description of itself. `HELLO` is exempt from ACLs; `INFO` is only for servers that do not have it. */
export const helloOf = async (
  ask: (name: string, ...args: ReadonlyArray<string>) => Promise<unknown>
): Promise<Map<string, unknown>> => {
  try {
    return parseHello(await ask("hello"))
  } catch (error) {
    if (!isRefusal(error)) throw error
  }
  try {
    const text = String(await ask("info", "server"))
    return new Map([["version", /redis_version:(\S+)/.exec(text)?.[1]]])
  } catch (error) {
    if (!isRefusal(error)) throw error
    return new Map()
  }
}

/** An error reply that says nothing about the state of the server. */
export const isRefusal = (error: unknown): boolean =>
  error instanceof RedisError
    ? error.reason._tag === "CommandFailed" || error.reason._tag === "MissingPermission"
    : /^(ERR (?!max number)|NOPERM)/.test(error instanceof Error ? error.message : "")

/** Throws the reason why this server cannot be used; a field that the server does not send is fine. */
export const checkServer = (hello: Map<string, unknown>, topology: Topology, address: string): ServerInfo => {
  const version = String(hello.get("version") ?? "unknown")
  const mode = hello.get("mode")
  if (mode === "sentinel") {
    throw fail(
      new UnsupportedServer({ detail: "it is a Sentinel: list it under `sentinels` and give the master's `name`" })
    )
  }
  if (mode === "cluster" && topology !== "cluster") {
    throw fail(new UnsupportedServer({ detail: "it is a node of a Redis Cluster: list it under `cluster`" }))
  }
  if (mode === "standalone" && topology === "cluster") {
    throw fail(notCluster())
  }
  if (Number.parseInt(version, 10) < 7) {
    throw fail(new UnsupportedServer({ detail: `version ${version} is too old, use Redis 7.0, Valkey 7.2 or newer` }))
  }
  if (hello.get("role") === "replica") throw fail(new ReadOnlyReplica({ address }))
  return { flavor: hello.get("server") === "valkey" ? "valkey" : "redis", version }
}

/**
 * Sends a command that does not block. After a deadline the connection is only treated as lost if it does not answer
 * `PING` either: one slow command must not cost the others theirs.
 */
export const sendProbing = (
  self: Connection,
  command: string,
  args: ReadonlyArray<string | number>,
  deadlineMillis: number
): Promise<unknown> =>
  self.send(command, args, deadlineMillis).catch((error: RedisError) => {
    if (error.reason._tag === "Timeout") {
      self.send("PING", [], Math.min(deadlineMillis, 1000)).catch((ping: RedisError) => {
        if (ping.reason._tag === "Timeout") self.reset()
      })
    }
    throw error
  })

/**
 * Whether functions can be loaded and called, without needing any permission to find out and without leaving a trace:
 * there is no such function, and this is no library.
 */
export const probeFunctions = async (self: Connection, deadlineMillis: number): Promise<boolean> => {
  const usable = async (command: string, args: ReadonlyArray<string>): Promise<boolean> => {
    try {
      await self.send(command, args, deadlineMillis)
      return true
    } catch (error) {
      const reason = (error as RedisError).reason
      switch (reason._tag) {
        case "MissingPermission":
          return false
        case "CommandFailed":
          return !reason.detail?.startsWith("unknown")
        case "FunctionMissing":
        case "OutOfMemory":
        case "Unavailable":
          return true
        default:
          throw error
      }
    }
  }
  const answers = await Promise.all([
    usable("FCALL", ["lockstep_probe", "0"]),
    usable("FUNCTION", ["LOAD", "lockstep"])
  ])
  return answers.every((answer) => answer)
}
