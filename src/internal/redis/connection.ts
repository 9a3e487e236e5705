/**
 * A connection to Redis as the rest of this package sees it, and the connections behind each `Redis` service.
 *
 * ioredis may leave a promise unsettled for ever, resend what it has already sent, or queue what cannot be sent. So
 * every command is registered with its own deadline. It is settled by a reply, by the loss of the connection or by that
 * deadline, whichever is first; ioredis's later handling of it is ignored.
 */

import type * as IoRedis from "ioredis"
import type { RedisError } from "./errors.ts"
import type { Call } from "./resp.ts"

/**
 * How the shared connection is doing. `"connecting"` until it is ready for the first time, `"closed"` when the layer's
 * scope has been closed.
 *
 * @category models
 * @since 0.1.0
 */
export type ConnectionState = "connecting" | "ready" | "reconnecting" | "closed"

export type Topology = "standalone" | "sentinel" | "cluster"

export type ScriptCommand = "FCALL" | "EVALSHA" | "EVAL"

/** The receiver of a call's end: once, and never before `run` has returned. */
export interface Caller {
  readonly resolve: (reply: unknown) => void
  readonly reject: (error: RedisError) => void
}

export interface Connection {
  /** Sends one command now: never queued offline, never resent. Rejects with `RedisError`, never throws. */
  readonly send: (command: string, args: ReadonlyArray<string | number>, deadlineMillis: number) => Promise<unknown>
  /** Calls a script: as `send`, but encoded by us, and with callbacks, since promises cost the hot path a tenth. */
  readonly run: (command: ScriptCommand, script: string, call: Call, deadlineMillis: number, caller: Caller) => void
  readonly isReady: () => boolean
  readonly state: () => ConnectionState
  /** Why the last attempt to connect failed. */
  readonly failure: () => RedisError | undefined
  /**
   * Calls back each time the connection becomes ready, on a cluster also when one node does, and at once if it is.
   * Returns the unsubscription.
   */
  readonly onReady: (f: () => void) => () => void
  /** Calls back each time the connection is lost, and for each failed attempt to get it back. */
  readonly onDown: (f: (error: RedisError | undefined) => void) => () => void
  /** Destroys the socket (half-open) and lets it reconnect; commands in flight reject with an unknown outcome. */
  readonly reset: () => void
  readonly close: () => Promise<void>
}

/** A connection to one node. */
export interface NodeConnection extends Connection {
  /** Sends an `XREAD` as `run` sends the call of a script. */
  readonly read: (args: ReadonlyArray<string | number>, deadlineMillis: number, caller: Caller) => void
}

/** Waits until it is ready, if it is not. */
export const whenReady = (connection: Connection): Promise<void> =>
  new Promise((resolve) => {
    if (connection.isReady()) return resolve()
    const off = connection.onReady(() => {
      off()
      resolve()
    })
  })

/** A server's description of itself. */
export interface ServerInfo {
  readonly flavor: "redis" | "valkey"
  readonly version: string
}

/** The shared connection of a layer. */
export interface CommandConnection extends Connection {
  /** The server's description of itself, or the reason why it cannot be used. */
  readonly server: (deadlineMillis: number) => Promise<ServerInfo>
}

export interface SingleConnection extends CommandConnection, NodeConnection {
  readonly client: IoRedis.Redis
}

export interface ClusterConnection extends CommandConnection {
  readonly client: IoRedis.Cluster
  readonly dedicated: (key: string | undefined, role: string, within?: number | undefined) => NodeConnection
  /** The masters, in an order that only changes when they do. */
  readonly masters: () => ReadonlyArray<Pick<Connection, "send">>
  /** Whether there is a connection to the master of every slot. */
  readonly isServed: () => boolean
}

/** The part of a `Redis` service that the kernel needs. */
export interface Connections {
  readonly topology: Topology
  readonly commands: Connection
  /**
   * A connection of its own for blocking reads; on a cluster to the node of `key`, followed when the slot moves. Its
   * name ends in its role, by default `reader`. It connects within so many milliseconds, or it tries again: at most the
   * `connectTimeout` of the service.
   */
  readonly dedicated: (
    key?: string | undefined,
    role?: string | undefined,
    within?: number | undefined
  ) => NodeConnection
  /** The server, or each master of a cluster. */
  readonly masters: () => ReadonlyArray<Pick<Connection, "send">>
  /** The command connection's deadline, in milliseconds. */
  readonly commandTimeout: number
  readonly features: { readonly functions: boolean }
}

// By the service itself. Its type is not named here, because the service's module imports this one.
const registry = new WeakMap<object, Connections>()

export const register = (redis: object, connections: Connections): void => {
  registry.set(redis, connections)
}

/** The plain connections behind a `Redis` service made by one of its layers. */
export const connectionsOf = (redis: object): Connections => {
  const connections = registry.get(redis)
  if (connections === undefined) {
    throw new TypeError("This Redis service was not made by a layer of lockstep/Redis")
  }
  return connections
}
