/** A connection to one node that connects again for ever, also by way of Sentinel. */

import * as IoRedis from "ioredis"
import { giveUpAfter, type Io, type Timer } from "../io.ts"
import { showAs } from "../text.ts"
import type { Connection, NodeConnection, ServerInfo, SingleConnection, Topology } from "./connection.ts"
import { codeOf, ConnectionLost, detailOf, errorFrom, fail, NotConnected, type RedisError, Timeout } from "./errors.ts"
import { type Handshake, watch } from "./handshake.ts"
import { InFlight } from "./inFlight.ts"
import { makeListeners } from "./listeners.ts"
import { sharingTime, toleratingErrors } from "./nodeConnector.ts"
import { checkServer, helloOf, isRefusal } from "./probe.ts"
import { backoff, profile, sentinelProfile } from "./profile.ts"

export interface SingleOptions {
  readonly io: Io
  readonly base: IoRedis.RedisOptions
  readonly address: string
  /** How long connecting and shaking hands may take, each. */
  readonly connectTimeout: number
  readonly topology: Topology
  /** The slot may be elsewhere. */
  readonly onMoved?: (() => void) | undefined
  /** The server has refused the name of the connection. */
  readonly onUnnamed?: (() => void) | undefined
}

/** The connection is ready once the node has proved to be a usable master, in the database that was asked for. */
export const single = (options: SingleOptions): SingleConnection => new Single(options)

class Single implements SingleConnection {
  readonly client: IoRedis.Redis
  readonly #options: SingleOptions
  readonly #listeners = makeListeners()
  readonly #handshake: Handshake
  readonly #inFlight: InFlight
  #closed = false
  #info: ServerInfo = { flavor: "redis", version: "unknown" }
  /** Why this connection fails. */
  #lastError: RedisError | undefined
  /** Why the last one failed. */
  #failure: RedisError | undefined
  // ioredis counts an attempt as good once the handshake is done; a node that fails our check must still be backed off.
  #refusals = 0
  #watchdog: Timer | undefined
  #leaveSentinels: (() => void) | undefined
  #revival: Timer | undefined
  #epoch = 0
  // The socket was destroyed by us, and its loss has been reported.
  #cut = false

  constructor(options: SingleOptions) {
    this.#options = options
    this.client = new IoRedis.Redis(this.#clientOptions() as object)
    showAs(this.client, { _id: "ioredis/Redis", address: options.address })
    toleratingErrors(this.client)
    if (options.topology === "sentinel") this.#leaveSentinels = sharingTime(this.client, options.connectTimeout)
    this.#handshake = watch(this.client, options.base.db ?? 0, options.address)
    this.#inFlight = new InFlight({
      io: options.io,
      addressOf: () => options.address,
      dispatch: (command) => this.client.sendCommand(command)
    })
    this.#listen()
    this.client.connect().catch(() => {})
  }

  readonly send: Connection["send"] = (name, args, deadlineMillis) =>
    this.isReady() ? this.#inFlight.send(name, args, deadlineMillis) : Promise.reject(this.#unready())

  readonly run: Connection["run"] = (name, script, call, deadlineMillis, caller) => {
    if (this.isReady()) this.#inFlight.run(name, script, call, deadlineMillis, caller)
    else this.#inFlight.refuse(caller, this.#unready())
  }

  readonly read: NodeConnection["read"] = (args, deadlineMillis, caller) => {
    if (this.isReady()) this.#inFlight.read(args, deadlineMillis, caller)
    else this.#inFlight.refuse(caller, this.#unready())
  }

  readonly server = async (): Promise<ServerInfo> => this.#info

  readonly state = this.#listeners.state
  readonly isReady = () => this.#listeners.state() === "ready"
  readonly failure = () => this.#failure
  readonly onReady = this.#listeners.onReady
  readonly onDown = this.#listeners.onDown

  readonly reset = (): void => {
    if (this.#closed) return
    // Not ready from now on, and not only once the socket has said that it is closed.
    if (this.isReady()) {
      this.#cut = true
      this.#lastError = fail(new ConnectionLost({ address: this.#options.address, detail: "reset" }))
      this.#onLost()
    }
    this.client.stream?.destroy()
  }

  readonly close = async (): Promise<void> => {
    if (this.#closed) return
    this.#closed = true
    this.#watchdog?.cancel()
    this.#revival?.cancel()
    this.#inFlight.rejectAll(fail(new ConnectionLost({ address: this.#options.address, detail: "closed" })))
    const { stream } = this.client
    this.client.disconnect()
    // ioredis waits for the event of a socket that has closed before, and its timer would keep the process for as long.
    if (stream?.closed === true) stream.emit("close")
    else stream?.destroy()
    this.#leaveSentinels?.()
    this.#listeners.close()
  }

  #unready(): RedisError {
    return fail(new NotConnected({ address: this.#options.address, detail: detailOf(this.#failure) }))
  }

  #clientOptions(): IoRedis.RedisOptions {
    const { base, connectTimeout, io, onMoved, topology } = this.#options
    const pause = backoff(io)
    return {
      ...base,
      ...profile,
      ...(topology === "sentinel" ? sentinelProfile : undefined),
      connectTimeout,
      retryStrategy: (times) => pause(Math.max(times, this.#refusals)),
      // Never 2, which would resend.
      reconnectOnError: (error) => {
        const code = codeOf(error)
        if (code === "MOVED" || code === "ASK") onMoved?.()
        return code === "READONLY" || code === "MASTERDOWN" ||
            (topology === "cluster" && (code === "MOVED" || code === "ASK" || code === "CLUSTERDOWN"))
          ? 1
          : false
      }
    }
  }

  #listen(): void {
    const { client } = this
    client.on("error", (error: unknown) => this.#onError(error))
    client.on("connect", () => this.#watch())
    client.on("ready", () => void this.#check())
    client.on("close", () => {
      if (this.#cut) this.#cut = false
      else this.#onLost()
    })
    client.on("end", () => {
      // ioredis gives up when its connector fails, for example when a Sentinel connection is cut in the middle, or TLS refuses a key.
      // It has emitted the error, and there was no socket that could close.
      if (this.#closed) return
      if (this.#lastError !== undefined) {
        this.#failure = this.#lastError
        this.#lastError = undefined
        this.#listeners.down(this.#failure)
      }
      this.#refusals++
      const { io } = this.#options
      this.#revival = io.after(backoff(io)(this.#refusals), () => void client.connect().catch(() => {}))
    })
  }

  #onError(error: unknown): void {
    if (this.#handshake.reports(error)) return
    this.#lastError ??= errorFrom(error, "HELLO", false, this.#options.address)
  }

  /** A server that accepts the connection and never answers would otherwise hold it for ever. */
  #watch(): void {
    const { connectTimeout, io } = this.#options
    this.#watchdog?.cancel()
    this.#watchdog = giveUpAfter(io, connectTimeout, () => {
      // It may have said that it is still loading.
      this.#lastError ??= this.#failure?.reason._tag === "Unavailable"
        ? this.#failure
        : fail(new Timeout({ command: "HELLO" }))
      this.#refusals++
      this.client.stream.destroy()
    })
  }

  async #check(): Promise<void> {
    const epoch = this.#epoch
    const { address, onUnnamed, topology } = this.#options
    try {
      this.#info = checkServer(await helloOf(this.#ask), topology, address)
      const refusal = this.#handshake.failure()
      if (refusal !== undefined) throw refusal
      await this.#answering()
    } catch (error) {
      if (epoch !== this.#epoch || this.#closed) return
      this.#lastError ??= errorFrom(error, "HELLO", false, address)
      this.#refusals++
      this.client.disconnect(true)
      return
    }
    if (epoch !== this.#epoch || this.#closed || this.client.status !== "ready") return
    this.#watchdog?.cancel()
    this.#refusals = 0
    this.#lastError = this.#failure = undefined
    if (this.#handshake.isUnnamed()) onUnnamed?.()
    this.#listeners.up()
  }

  readonly #ask = (name: string, ...args: ReadonlyArray<string>): Promise<unknown> => {
    const command = new IoRedis.Command(name, [...args], { replyEncoding: "utf8" })
    this.client.sendCommand(command)
    return command.promise
  }

  /** Until it answers PING with something else than LOADING or MASTERDOWN. */
  async #answering(): Promise<void> {
    for (;;) {
      try {
        await this.#ask("ping")
        return
      } catch (error) {
        const code = codeOf(error)
        if (code !== "LOADING" && code !== "MASTERDOWN") {
          if (code === "BUSY" || isRefusal(error)) return
          throw error
        }
        this.#failure = errorFrom(error, "PING", true, this.#options.address)
        await new Promise<void>((resolve) => void this.#options.io.after(100, resolve))
        if (this.client.status !== "ready") throw error
      }
    }
  }

  #onLost(): void {
    const { address } = this.#options
    this.#epoch++
    this.#watchdog?.cancel()
    const error = this.#lastError ?? this.#failure ??
      (this.isReady()
        ? undefined
        : fail(new NotConnected({ address, detail: "it closes the connection without an answer" })))
    this.#lastError = undefined
    this.#failure = error
    this.#inFlight.rejectAll(fail(new ConnectionLost({ address, detail: detailOf(error) })))
    this.#listeners.down(error)
  }
}
