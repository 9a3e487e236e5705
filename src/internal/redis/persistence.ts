/**
 * `effect/persistence/Redis` over a `Redis` of this package.
 *
 * On a Cluster, commands of Effect's modules that have no single key are spread here: scripts are loaded on every
 * master, `MGET`, `DEL` and `UNLINK` are divided by key, and `KEYS` and `SCAN` visit every master.
 *
 * Commands wait for a connection that is being made again. Effect's own client queues them, and its modules rely on
 * that: a failed command ends the fiber with which `PersistedQueue` recovers elements.
 */

import * as Effect from "effect/Effect"
import * as PersistenceRedis from "effect/persistence/Redis"
import type * as Scope from "effect/Scope"
import type { Io, Timer } from "../io.ts"
import { blockingMillis, checkCommand, checkShared, checkSpread, keysOf, sendOwn, slotOf } from "./command.ts"
import type { ClusterConnection, Connection, Connections, SingleConnection } from "./connection.ts"
import { fail, NotConnected, type RedisError } from "./errors.ts"
import { sendProbing } from "./probe.ts"
import { patient, untilReady } from "./waiting.ts"

type Send = (command: string, args: ReadonlyArray<string>, signal?: AbortSignal | undefined) => Promise<unknown>

type Listener = (message: PersistenceRedis.RedisMessage) => void

const sendWith =
  (send: Send, check: typeof checkShared): PersistenceRedis.Redis["Service"]["send"] =>
  <A = unknown>(command: string, ...args: ReadonlyArray<string>) =>
    Effect.suspend(() => {
      check(command, args)
      return attempt((signal) => send(command, args, signal) as Promise<A>)
    })

const attempt = <A>(f: (signal: AbortSignal) => Promise<A>): Effect.Effect<A, PersistenceRedis.RedisError> =>
  Effect.tryPromise({ try: f, catch: (cause) => new PersistenceRedis.RedisError({ cause }) })

/** The cursor says which master it belongs to; 0 is the end, and also the beginning. */
const scan = async (
  masters: ReturnType<ClusterConnection["masters"]>,
  send: (master: Pick<Connection, "send">, args: ReadonlyArray<string | number>) => Promise<unknown>,
  args: ReadonlyArray<string>
): Promise<unknown> => {
  const [cursor = "0", ...rest] = args
  const [node, position] = cursor.includes(":") ? cursor.split(":").map(Number) as [number, number] : [0, 0]
  const master = masters[node]
  // Masters have left while we were scanning.
  if (master === undefined) return ["0", []]
  const [next, keys] = await send(master, [position, ...rest]) as [string, unknown]
  if (next !== "0") return [`${node}:${next}`, keys]
  return [node + 1 < masters.length ? `${node + 1}:0` : "0", keys]
}

/** A command of many keys as one of one key each, for keys in several slots. */
const divided = async (send: Send, command: string, keys: ReadonlyArray<string>): Promise<unknown> => {
  if (new Set(keys.map(slotOf)).size < 2) return send(command, keys)
  const replies = await Promise.all(keys.map((key) => send(command, [key])))
  return command === "MGET"
    ? replies.flat()
    : replies.reduce((sum: number, reply) => sum + Number(reply), 0)
}

const patientSend = (self: Connection, io: Io, timeout: number): Send => (command, args, signal) =>
  patient(self, io, timeout, signal, () => sendProbing(self, command, args, timeout))

const clusterSend = (self: ClusterConnection, io: Io, timeout: number, address: string): Send => {
  const send = patientSend(self, io, timeout)
  // The keys of a master that is missing would be missing.
  const checkServed = async () => {
    if (!self.isServed()) throw fail(new NotConnected({ address, detail: "to the masters of all slots" }))
  }
  return async (command, args, signal) => {
    const sendHere: Send = (command, args) => send(command, args, signal)
    const sendTo = (master: Pick<Connection, "send">, name: string, args: ReadonlyArray<string | number>) =>
      patient(self, io, timeout, signal, () => master.send(name, args, timeout))
    const everywhere = async () => {
      // The masters are known once there is a connection.
      if (!self.isReady()) await untilReady(self, io, timeout, signal)
      return Promise.all(self.masters().map((master) => sendTo(master, command, args)))
    }
    const name = command.toUpperCase()
    switch (name) {
      case "SCRIPT":
        return args[0]?.toUpperCase() === "LOAD" ? (await everywhere())[0] : sendHere(command, args)
      case "KEYS":
        await patient(self, io, timeout, signal, checkServed)
        return (await everywhere()).flat()
      case "SCAN":
        await patient(self, io, timeout, signal, checkServed)
        return scan(self.masters(), (master, args) => sendTo(master, "SCAN", args), args)
      case "MGET":
      case "DEL":
      case "UNLINK":
        return divided(sendHere, name, args)
      default:
        return sendHere(command, args)
    }
  }
}

// A reservation that goes on to other slots keeps so many connections at most that it does not use.
const mostIdle = 4

interface Own {
  readonly connection: Connection
  readonly send: Connection["send"]
  /** How many commands are under way. */
  busy: number
}

/**
 * Connections that belong to one reservation. On a Cluster, which node is needed shows only with the first command on a
 * key, so that there is one connection for each slot.
 */
const reserve = (connections: Connections, io: Io, address: string) => {
  const { commandTimeout } = connections
  const open = new Map<number | undefined, Own>()
  const clustered = connections.topology === "cluster"
  const closing = new Set<Promise<void>>()
  const close = ({ connection }: Own): Promise<void> => {
    const closed = connection.close()
    closing.add(closed)
    return closed.finally(() => closing.delete(closed))
  }
  // The slots that were used longest ago come first.
  const makeRoom = () => {
    const idle = [...open].filter(([, { busy }]) => busy === 0)
    for (const [slot, own] of idle.slice(0, Math.max(0, idle.length - mostIdle))) {
      open.delete(slot)
      void close(own)
    }
  }
  const send: Send = async (command, args, signal) => {
    const [key] = clustered ? keysOf(command, args) : []
    const slot = key === undefined ? undefined : slotOf(key)
    let own = open.get(slot)
    if (own === undefined) {
      const connection = connections.dedicated(key, "reserved")
      own = { connection, send: sendOwn(connection, address), busy: 0 }
    }
    open.delete(slot)
    open.set(slot, own)
    own.busy++
    try {
      return await sendBy(own, command, args, signal)
    } finally {
      own.busy--
      makeRoom()
    }
  }
  const sendBy = ({ connection, send }: Own, command: string, args: ReadonlyArray<string>, signal?: AbortSignal) => {
    const sendOnce = async () => {
      try {
        return await send(command, args, blockingMillis(command, args) + commandTimeout)
      } catch (error) {
        resetLate(connection, error as RedisError)
        throw error
      }
    }
    return patient(connection, io, commandTimeout, signal, sendOnce)
  }
  return {
    send,
    close: async () => {
      for (const own of open.values()) void close(own)
      await Promise.all(closing)
    }
  }
}

interface Channel {
  readonly listeners: Set<Listener>
  /** The last attempt to subscribe. */
  subscribed: Promise<unknown>
  /** Whether that has failed. */
  isRefused: boolean
}

/** All channels on one connection, opened with the first. Messages that are published while it reconnects are lost. */
class Subscriber {
  readonly #connections: Connections
  readonly #io: Io
  readonly #channels = new Map<string, Channel>()
  #connection: SingleConnection | undefined
  #heart: Timer | undefined

  constructor(connections: Connections, io: Io) {
    this.#connections = connections
    this.#io = io
  }

  async subscribe(name: string, listener: Listener, signal: AbortSignal): Promise<void> {
    const connection = this.#open()
    let channel = this.#channels.get(name)
    if (channel === undefined) {
      channel = { listeners: new Set(), subscribed: Promise.resolve(), isRefused: false }
      this.#channels.set(name, channel)
      if (connection.isReady()) this.#send(connection, name, channel)
    }
    channel.listeners.add(listener)
    try {
      await untilReady(connection, this.#io, this.#connections.commandTimeout, signal)
      await channel.subscribed
    } catch (error) {
      await this.unsubscribe(name, listener)
      throw error
    }
  }

  async unsubscribe(name: string, listener: Listener): Promise<void> {
    const channel = this.#channels.get(name)
    if (channel === undefined || !channel.listeners.delete(listener) || channel.listeners.size > 0) return
    this.#channels.delete(name)
    if (this.#channels.size === 0) return this.close()
    const connection = this.#connection
    // When the connection is lost, the next one does not subscribe to it. If it is refused, its messages have no listener.
    await connection?.send("UNSUBSCRIBE", [name], this.#connections.commandTimeout).catch((error: RedisError) =>
      resetLate(connection, error)
    )
  }

  async close(): Promise<void> {
    this.#heart?.cancel()
    const connection = this.#connection
    this.#connection = undefined
    await connection?.close()
  }

  #open(): SingleConnection {
    if (this.#connection !== undefined) return this.#connection
    const connection = this.#connections.dedicated(undefined, "subscriber") as SingleConnection
    this.#connection = connection
    connection.client.on("message", (channel: string, message: string) => {
      for (const listener of this.#channels.get(channel)?.listeners ?? []) listener({ channel, message })
    })
    connection.onReady(() => {
      for (const [name, channel] of this.#channels) this.#send(connection, name, channel)
    })
    this.#beat(connection)
    return connection
  }

  #send(connection: SingleConnection, name: string, channel: Channel): void {
    channel.isRefused = false
    channel.subscribed = connection.send("SUBSCRIBE", [name], this.#connections.commandTimeout)
    channel.subscribed.catch((error: RedisError) => {
      channel.isRefused = true
      resetLate(connection, error)
    })
  }

  // A subscriber is only spoken to: without this, a half-open connection would never be noticed.
  #beat(connection: SingleConnection): void {
    this.#heart = this.#io.after(5000, () => {
      this.#beat(connection)
      if (!connection.isReady()) return
      // A subscriber does not notice that its permission was missing for a while.
      for (const [name, channel] of this.#channels) if (channel.isRefused) this.#send(connection, name, channel)
      connection.send("PING", [], this.#connections.commandTimeout).catch((error: RedisError) =>
        resetLate(connection, error)
      )
    })
  }
}

const resetLate = (connection: Connection, error: RedisError): void => {
  if (error.reason._tag === "Timeout") connection.reset()
}

export const make = (
  connections: Connections,
  io: Io,
  address: string
): Effect.Effect<PersistenceRedis.Redis["Service"], never, Scope.Scope> =>
  Effect.gen(function*() {
    const { commandTimeout, commands } = connections
    const clustered = connections.topology === "cluster"
    const raw: Send = clustered
      ? clusterSend(commands as ClusterConnection, io, commandTimeout, address)
      : patientSend(commands, io, commandTimeout)
    const subscriptions = new Subscriber(connections, io)
    yield* Effect.addFinalizer(() => Effect.promise(() => subscriptions.close()))
    return yield* PersistenceRedis.make({
      send: sendWith(raw, checkShared),
      connect: Effect.sync(() => {
        const connection = reserve(connections, io, address)
        const check = clustered ? checkSpread : checkCommand
        return { send: sendWith(connection.send, check), close: Effect.promise(connection.close) }
      }),
      subscribe: (channel, onMessage) =>
        // An interruption can come between the reply and its fiber: the finalizer is there before.
        Effect.addFinalizer(() => Effect.promise(() => subscriptions.unsubscribe(channel, onMessage))).pipe(
          Effect.andThen(attempt((signal) => subscriptions.subscribe(channel, onMessage, signal))),
          Effect.as(Effect.never)
        )
    })
  })
