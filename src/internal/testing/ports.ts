/** Ports for the servers and proxies of tests that run in parallel. */

import * as Effect from "effect/Effect"
import type * as Scope from "effect/Scope"
import * as dgram from "node:dgram"
import * as net from "node:net"
import { live } from "../io.ts"

// Below the ephemeral ranges of Linux and macOS: an outgoing connection cannot take the port of a stopped server.
const lowest = 20_000
const highest = 32_000

const reserve = (port: number) =>
  new Promise<dgram.Socket | undefined>((resolve) => {
    const socket = dgram.createSocket("udp4")
    socket.once("error", () => resolve(undefined))
    socket.bind({ port, address: "127.0.0.1", exclusive: true }, () => {
      socket.unref()
      const probe = net.createServer()
      probe.once("error", () => socket.close(() => resolve(undefined)))
      probe.listen(port, "127.0.0.1", () => probe.close(() => resolve(socket)))
    })
  })

const search = async () => {
  for (let attempt = 0; attempt < 500; attempt++) {
    const port = lowest + Math.floor(live.random() * (highest - lowest))
    const socket = await reserve(port)
    if (socket !== undefined) return { port, socket }
  }
  throw new Error(`no free port between ${lowest} and ${highest}`)
}

/**
 * A TCP port of 127.0.0.1 that no other test process will choose until the scope closes, also while the server on it
 * is down. The claim is a UDP socket on the same number: the kernel drops it with the process, however that ends.
 */
export const reservePort: Effect.Effect<number, never, Scope.Scope> = Effect.acquireRelease(
  Effect.promise(search),
  ({ socket }) => Effect.callback<void>((resume) => socket.close(() => resume(Effect.void)) && undefined)
).pipe(Effect.map(({ port }) => port))
