/** The sockets of connections, and those to the node of a Cluster that serves a slot. */

import * as IoRedis from "ioredis"
import * as net from "node:net"
import * as tls from "node:tls"
import { unreachable } from "./errors.ts"
import { disconnectTimeout, shareOf } from "./profile.ts"
import type { Place } from "./slots.ts"

/**
 * The socket of a client may fail more than once, as TLS does when the server answers the end of a handshake with an alert. ioredis
 * listens for the first time only, and the next one would end the process.
 */
export const toleratingErrors = (client: IoRedis.Redis): void => {
  const { connector } = client as unknown as { readonly connector: Pick<IoRedis.AbstractConnector, "connect"> }
  const connect = connector.connect.bind(connector)
  connector.connect = async (emitter) => {
    const stream = await connect(emitter)
    stream.on("error", () => {})
    return stream
  }
}

interface SentinelConnector {
  connect: IoRedis.AbstractConnector["connect"]
  connectToSentinel: (place: unknown, options?: IoRedis.RedisOptions) => IoRedis.Redis
}

type Flushed = Pick<IoRedis.Redis, "status"> & { readonly flushQueue: (error: Error) => void }

/**
 * Sentinels are asked in turn: a silent Sentinel takes its share of the time, and leaves the others theirs. ioredis makes
 * some of these clients without a listener for their errors, and prints those. The function that `sharingTime` returns disconnects all of
 * these clients.
 */
export const sharingTime = (client: IoRedis.Redis, connectTimeout: number): () => void => {
  const { connector } = client as unknown as { readonly connector: SentinelConnector }
  const { length } = client.options.sentinels!
  const within = shareOf(connectTimeout, length)
  const open = new Set<IoRedis.Redis>()
  let asked = 0
  let why: Error | undefined
  const connect = connector.connect.bind(connector)
  connector.connect = async (emitter) => {
    asked = 0
    why = undefined
    for (let turn = 0;; turn++) {
      try {
        return await connect(emitter)
      } catch (error) {
        const found = error instanceof Error && unreachable.exec(error.message)
        if (!found) throw error
        // ioredis goes on in its list where the last attempt has stopped, which may have been at its end.
        if (turn === 0 && asked < length) continue
        // It says only that the connection was closed.
        if (why !== undefined && found[1] === "Connection is closed.") error.cause = why
        throw error
      }
    }
  }
  const connectToSentinel = connector.connectToSentinel.bind(connector)
  connector.connectToSentinel = (place, options) => {
    const sentinel = connectToSentinel(place, {
      connectTimeout: within,
      commandTimeout: within,
      disconnectTimeout,
      ...options
    })
    const disconnect = sentinel.disconnect.bind(sentinel)
    sentinel.disconnect = (reconnect) => {
      const { flushQueue, status } = sentinel as unknown as Flushed
      disconnect(reconnect)
      if (status !== "reconnecting" || reconnect === true) return
      // It has no socket, so it would never end: the timers of its commands would keep the process.
      flushQueue.call(sentinel, new Error("closed"))
      open.delete(sentinel)
    }
    open.add(sentinel)
    // Those with options wait for fail-overs.
    if (options === undefined) asked++
    return sentinel
      .on("error", (error) => {
        if (options === undefined) why ??= error
      })
      .on("end", () => open.delete(sentinel))
  }
  return () => {
    for (const sentinel of [...open]) {
      sentinel.disconnect()
      sentinel.stream?.destroy()
    }
  }
}

/** Looks the node up anew at every attempt, so that reconnecting follows a slot that has moved. */
export const nodeConnector = (
  owner: () => Place | undefined,
  security: tls.ConnectionOptions | undefined
): new() => IoRedis.AbstractConnector =>
  class NodeConnector extends IoRedis.AbstractConnector {
    constructor() {
      super(disconnectTimeout)
    }
    override async connect() {
      this.connecting = true
      const node = owner()
      // Ends ioredis's own attempts; `single` revives it.
      if (node === undefined) throw new Error("No node of the cluster is known")
      this.stream = security === undefined ? net.createConnection({ ...node }) : tls.connect({ ...security, ...node })
      this.stream.once("error", (error) => {
        this.firstError = error
      })
      return this.stream
    }
  }
