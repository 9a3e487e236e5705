/** The sockets of connections, and those to the node of a Cluster that serves a slot. */

import * as IoRedis from "ioredis"
import * as net from "node:net"
import * as tls from "node:tls"
import { disconnectTimeout } from "./profile.ts"
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
