/** Waits for connections that are not ready yet. */

import * as Effect from "effect/Effect"
import { giveUpAfter, type Io } from "../io.ts"
import type { Connection } from "./connection.ts"
import { isUnsent, type RedisError } from "./errors.ts"

// A connection can be ready for all it knows and still have no socket: until it notices the loss, for example.
const pause = 50

const sleep = (io: Io, millis: number): Promise<void> =>
  new Promise((resolve) => {
    io.after(millis, resolve)
  })

/**
 * Resolves once the connection is ready. After so many milliseconds, when the connection is closed, and when the signal
 * aborts, it rejects with why there is none.
 */
export const untilReady = (
  connection: Connection,
  io: Io,
  millis: number,
  signal?: AbortSignal | undefined
): Promise<void> =>
  new Promise((resolve, reject) => {
    let done = false
    const settle = () => {
      if (done) return
      done = true
      timer.cancel()
      signal?.removeEventListener("abort", settle)
      // `onReady` may call back before it returns.
      io.defer(() => {
        offReady()
        offDown()
      })
      if (signal?.aborted) reject(new Error("aborted"))
      else if (connection.isReady()) resolve()
      // Rejects without sending anything.
      else connection.send("PING", [], millis).then(() => resolve(), reject)
    }
    const timer = giveUpAfter(io, Math.max(1, millis), settle)
    const offDown = connection.onDown(() => {
      if (connection.state() === "closed") settle()
    })
    const offReady = connection.onReady(settle)
    signal?.addEventListener("abort", settle)
    if (signal?.aborted || connection.state() === "closed") settle()
  })

/**
 * Sends when the connection is ready, at the latest after so many milliseconds. A command that has been sent is not
 * sent again.
 */
export const patient = async <A>(
  connection: Connection,
  io: Io,
  millis: number,
  signal: AbortSignal | undefined,
  send: () => Promise<A>
): Promise<A> => {
  const until = io.now() + millis
  for (;;) {
    if (!connection.isReady()) await untilReady(connection, io, until - io.now(), signal)
    try {
      return await send()
    } catch (error) {
      if (!isUnsent(error) || connection.state() === "closed" || io.now() + pause > until) throw error
      await sleep(io, pause)
      if (signal?.aborted) throw error
    }
  }
}

/**
 * The result of a command that a program sends. Where there is no connection, it fails in a later turn of the event loop: a program
 * that tries again at once would otherwise leave none in which to connect.
 */
export const sent = <A>(io: Io, send: () => Promise<A>): Effect.Effect<A, RedisError> =>
  Effect.callback((resume) => {
    send().then(
      (reply) => resume(Effect.succeed(reply)),
      (error: RedisError) => {
        const failed = () => resume(Effect.fail(error))
        if (isUnsent(error)) io.after(0, failed)
        else failed()
      }
    )
  })
