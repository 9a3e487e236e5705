/**
 * The only place that talks to ioredis: one command or dedicated connection, seen from plain JavaScript.
 *
 * ioredis may leave a promise unsettled for ever, resend what it has already sent, or queue what cannot be sent. So
 * every command is registered here with its own deadline and is settled by a reply, by the loss of the connection or by
 * that deadline, whichever is first; what ioredis does with it afterwards is ignored.
 */
import * as IoRedis from "ioredis"
import type { Redis } from "../../Redis.ts"
import {
  ConnectionLost,
  detailOf,
  errorFrom,
  fail,
  notCluster,
  NotConnected,
  ReadOnlyReplica,
  RedisError,
  Timeout,
  UnsupportedServer
} from "./errors.ts"
import { watch } from "./handshake.ts"
import { type Call, message } from "./resp.ts"

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

export interface Connection {
  /** Sends one command now: never queued offline, never resent. Rejects with `RedisError`, never throws. */
  readonly send: (command: string, args: ReadonlyArray<string | number>, deadlineMillis: number) => Promise<unknown>
  /** Calls a script: as `send`, but encoded by us. */
  readonly run: (command: ScriptCommand, script: string, call: Call, deadlineMillis: number) => Promise<unknown>
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
  /** Destroys the socket (half-open) and lets it reconnect; what is in flight rejects with an unknown outcome. */
  readonly reset: () => void
  readonly close: () => Promise<void>
}

/** What the kernel needs of a `Redis` service. */
export interface Connections {
  readonly topology: Topology
  readonly commands: Connection
  /**
   * A connection of its own for blocking reads; on a cluster to the node of `key`, followed when the slot moves. Its
   * name ends in its role, by default `reader`.
   */
  readonly dedicated: (key?: string | undefined, role?: string | undefined) => Connection
  /** The server, or each master of a cluster. */
  readonly masters: () => ReadonlyArray<Pick<Connection, "send">>
  /** The command connection's deadline, in milliseconds. */
  readonly commandTimeout: number
  readonly features: { readonly functions: boolean }
}

const registry = new WeakMap<Redis["Service"], Connections>()

export const register = (redis: Redis["Service"], connections: Connections): void => {
  registry.set(redis, connections)
}

/** The plain connections behind a `Redis` service made by one of its layers. */
export const connectionsOf = (redis: Redis["Service"]): Connections => {
  const connections = registry.get(redis)
  if (connections === undefined) {
    throw new TypeError("This Redis service was not made by a layer of lockstep/Redis")
  }
  return connections
}

// -----------------------------------------------------------------------------
// Commands in flight
// -----------------------------------------------------------------------------

interface Entry {
  readonly expiresAt: number
  readonly command: IoRedis.Command
  readonly name: string
  readonly reject: (error: RedisError) => void
  previous: Entry | undefined
  next: Entry | undefined
  settled: boolean
}

/** Replies that ioredis would reshape are requested under a spelling that it leaves as RESP2 has them. */
const wireName = (command: string): string => {
  const name = command.toLowerCase()
  return name === "hgetall" ? "HGETALL" : name
}

/** ioredis sees of its arguments what it needs to find the slot. */
class EncodedCommand extends IoRedis.Command {
  readonly #text: string

  constructor(name: ScriptCommand, script: string, call: Call) {
    super(wireName(name), [script, "1", call.key], { replyEncoding: "utf8" })
    this.#text = message(name, script, call)
  }

  override toWritable(): string {
    return this.#text
  }
}

/**
 * The commands in flight in the order of their deadlines, with one timer for all of them. Most have the same deadline,
 * so that one is inserted in a step or two, counted from the end.
 */
export const makeInFlight = (options: {
  readonly address: () => string
  readonly dispatch: (command: IoRedis.Command) => unknown
  readonly onExpired: (command: IoRedis.Command) => void
}) => {
  let head: Entry | undefined
  let tail: Entry | undefined
  let timer: NodeJS.Timeout | undefined
  let timerAt = Infinity

  const remove = (entry: Entry): void => {
    if (entry.previous === undefined) head = entry.next
    else entry.previous.next = entry.next
    if (entry.next === undefined) tail = entry.previous
    else entry.next.previous = entry.previous
    entry.previous = entry.next = undefined
  }

  const settle = (entry: Entry): boolean => {
    if (entry.settled) return false
    entry.settled = true
    remove(entry)
    return true
  }

  const expire = (): void => {
    timerAt = Infinity
    const now = performance.now()
    while (head !== undefined && head.expiresAt <= now) {
      const entry = head
      settle(entry)
      options.onExpired(entry.command)
      entry.reject(fail(new Timeout({ command: entry.name })))
    }
    arm()
  }

  const arm = (): void => {
    if (head === undefined || head.expiresAt === Infinity || timerAt <= head.expiresAt) return
    clearTimeout(timer)
    timerAt = head.expiresAt
    timer = setTimeout(expire, Math.max(1, Math.ceil(timerAt - performance.now())))
    // The socket keeps the process alive while an answer can still come.
    timer.unref()
  }

  const insert = (entry: Entry): void => {
    let after = tail
    while (after !== undefined && after.expiresAt > entry.expiresAt) after = after.previous
    entry.previous = after
    entry.next = after === undefined ? head : after.next
    if (entry.next === undefined) tail = entry
    else entry.next.previous = entry
    if (after === undefined) {
      head = entry
      arm()
    } else {
      after.next = entry
    }
  }

  const send = (name: string, args: ReadonlyArray<string | number>, deadlineMillis: number): Promise<unknown> =>
    dispatch(
      name,
      new IoRedis.Command(wireName(name), args as Array<string | number>, { replyEncoding: "utf8" }),
      deadlineMillis
    )

  const run = (name: ScriptCommand, script: string, call: Call, deadlineMillis: number): Promise<unknown> =>
    dispatch(name, new EncodedCommand(name, script, call), deadlineMillis)

  // The promise of the command is the one that is handed out; only what settles it is ours.
  const dispatch = (name: string, command: IoRedis.Command, deadlineMillis: number): Promise<unknown> => {
    const { reject, resolve } = command
    let sent = true
    const entry: Entry = {
      expiresAt: performance.now() + deadlineMillis,
      command,
      name,
      reject,
      previous: undefined,
      next: undefined,
      settled: false
    }
    insert(entry)
    command.resolve = (value) => {
      if (settle(entry)) resolve(value)
    }
    command.reject = (error) => {
      if (settle(entry)) reject(errorFrom(error, name, sent, options.address()))
    }
    try {
      // A rejection before the call returns means that ioredis had nowhere to send it.
      sent = false
      options.dispatch(command)
      sent = true
    } catch (error) {
      sent = true
      if (settle(entry)) reject(errorFrom(error, name, sent, options.address()))
    }
    return command.promise
  }

  const rejectAll = (error: RedisError): void => {
    while (head !== undefined) {
      const entry = head
      settle(entry)
      entry.reject(error)
    }
    clearTimeout(timer)
    timerAt = Infinity
  }

  return { send, run, rejectAll }
}

/** What single and cluster connections share: who wants to know that it is up or down. */
export const makeListeners = () => {
  const ready = new Set<() => void>()
  const down = new Set<(error: RedisError | undefined) => void>()
  let state: ConnectionState = "connecting"
  return {
    state: () => state,
    up: () => {
      if (state === "closed") return
      state = "ready"
      for (const f of [...ready]) f()
    },
    down: (error: RedisError | undefined) => {
      if (state === "closed") return
      if (state === "ready") state = "reconnecting"
      for (const f of [...down]) f(error)
    },
    close: () => {
      if (state === "closed") return
      state = "closed"
      for (const f of [...down]) f(undefined)
      ready.clear()
      down.clear()
    },
    onReady: (f: () => void) => {
      ready.add(f)
      if (state === "ready") f()
      return () => void ready.delete(f)
    },
    onDown: (f: (error: RedisError | undefined) => void) => {
      down.add(f)
      return () => void down.delete(f)
    }
  }
}

// -----------------------------------------------------------------------------
// Profile
// -----------------------------------------------------------------------------

/** How long after its close was asked for a socket that says nothing is destroyed. */
export const disconnectTimeout = 200

export const backoff = (times: number): number => {
  const ceiling = Math.min(2000, 50 * 2 ** Math.min(times - 1, 10))
  return Math.round(ceiling * (0.5 + Math.random() / 2))
}

/**
 * Overrides whatever a caller's options say. `maxRetriesPerRequest: 0` is what makes
 * `autoResendUnfulfilledCommands: false` reject instead of forgetting; `enableReadyCheck` would need INFO.
 */
export const profile = {
  lazyConnect: true,
  enableOfflineQueue: false,
  maxRetriesPerRequest: 0,
  autoResendUnfulfilledCommands: false,
  // ioredis would do it without handling its failure.
  autoResubscribe: false,
  enableAutoPipelining: false,
  enableReadyCheck: false,
  keepAlive: 5000,
  noDelay: true,
  replyMapping: "legacy",
  protocol: 3,
  stringNumbers: false,
  keyPrefix: "",
  readOnly: false,
  monitor: false,
  disableClientInfo: true,
  disconnectTimeout,
  commandTimeout: undefined,
  socketTimeout: undefined,
  blockingTimeout: undefined,
  scripts: undefined,
  himportFieldsets: undefined
} satisfies IoRedis.RedisOptions

/** Leaves a primary that has been deposed without noticing it, which still answers. */
const sentinelProfile = (connectTimeout: number) =>
  ({
    role: "master",
    failoverDetector: true,
    updateSentinels: true,
    sentinelRetryStrategy: backoff,
    sentinelReconnectStrategy: () => 5000,
    sentinelCommandTimeout: connectTimeout
  }) satisfies IoRedis.RedisOptions

// -----------------------------------------------------------------------------
// One node
// -----------------------------------------------------------------------------

export interface ServerInfo {
  readonly flavor: "redis" | "valkey"
  readonly version: string
}

interface SingleOptions {
  readonly base: IoRedis.RedisOptions
  readonly address: string
  readonly sentinel?: boolean | undefined
  /** How long connecting and shaking hands may take, each. */
  readonly connectTimeout: number
  readonly topology: Topology
  /** The slot may be elsewhere. */
  readonly onMoved?: (() => void) | undefined
  /** The server has refused the name of the connection. */
  readonly onUnnamed?: (() => void) | undefined
}

/** The shared connection of a layer. */
export interface CommandConnection extends Connection {
  /** What the server says of itself, or the reason why it cannot be used. */
  readonly server: (deadlineMillis: number) => Promise<ServerInfo>
}

export interface SingleConnection extends CommandConnection {
  readonly client: IoRedis.Redis
}

const parseHello = (reply: unknown): Map<string, unknown> => {
  const fields = new Map<string, unknown>()
  if (!Array.isArray(reply)) return fields
  for (let i = 0; i + 1 < reply.length; i += 2) fields.set(String(reply[i]), reply[i + 1])
  return fields
}

/** What the server says of itself. `HELLO` is exempt from ACLs; `INFO` is only for servers that do not have it. */
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
const isRefusal = (error: unknown): boolean =>
  error instanceof RedisError
    ? error.reason._tag === "CommandFailed" || error.reason._tag === "MissingPermission"
    : /^(ERR (?!max number)|NOPERM)/.test(error instanceof Error ? error.message : "")

/** Throws the reason why this server cannot be used; what is not known is fine. */
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

export const codeOf = (error: unknown): string =>
  (error instanceof Error ? /^\w+/.exec(error.message)?.[0] : undefined) ?? ""

/** A connection to one node that connects again for ever. It is ready once the node has proved to be a usable master. */
export const single = (options: SingleOptions): SingleConnection => {
  const { address, topology } = options
  const listeners = makeListeners()
  let closed = false
  let info: ServerInfo = { flavor: "redis", version: "unknown" }
  let lastError: RedisError | undefined
  let failure: RedisError | undefined
  // ioredis counts an attempt as good once the handshake is done; a node that fails our check must still be backed off.
  let refusals = 0
  let watchdog: NodeJS.Timeout | undefined
  let revival: NodeJS.Timeout | undefined

  const client = new IoRedis.Redis({
    ...options.base,
    ...profile,
    ...(options.sentinel === true ? sentinelProfile(options.connectTimeout) : undefined),
    connectTimeout: options.connectTimeout,
    retryStrategy: (times) => backoff(Math.max(times, refusals)),
    // Never 2, which would resend.
    reconnectOnError: (error) => {
      const code = codeOf(error)
      if (code === "MOVED" || code === "ASK") options.onMoved?.()
      return code === "READONLY" || code === "MASTERDOWN" ||
          (topology === "cluster" && (code === "MOVED" || code === "ASK" || code === "CLUSTERDOWN"))
        ? 1
        : false
    }
  })
  const handshake = watch(client, options.base.db ?? 0, address)
  const inFlight = makeInFlight({
    address: () => address,
    dispatch: (command) => client.sendCommand(command),
    onExpired: () => {}
  })

  const ask = (name: string, ...args: ReadonlyArray<string>): Promise<unknown> => {
    const command = new IoRedis.Command(name, [...args], { replyEncoding: "utf8" })
    client.sendCommand(command)
    return command.promise
  }

  const hello = async (): Promise<void> => {
    info = checkServer(await helloOf(ask), topology, address)
  }

  /** Until it answers PING with something else than LOADING or MASTERDOWN. */
  const answering = async (): Promise<void> => {
    for (;;) {
      try {
        await ask("ping")
        return
      } catch (error) {
        const code = codeOf(error)
        if (code !== "LOADING" && code !== "MASTERDOWN") {
          if (code === "BUSY" || isRefusal(error)) return
          throw error
        }
        failure = errorFrom(error, "PING", true, address)
        await new Promise((resolve) => setTimeout(resolve, 100))
        if (client.status !== "ready") throw error
      }
    }
  }

  let epoch = 0
  // The socket was destroyed by us, and its loss has been told.
  let cut = false
  const check = async (): Promise<void> => {
    const mine = epoch
    try {
      await hello()
      const refusal = handshake.failure()
      if (refusal !== undefined) throw refusal
      await answering()
    } catch (error) {
      if (mine !== epoch || closed) return
      lastError ??= errorFrom(error, "HELLO", false, address)
      refusals++
      client.disconnect(true)
      return
    }
    if (mine !== epoch || closed || client.status !== "ready") return
    clearTimeout(watchdog)
    refusals = 0
    lastError = failure = undefined
    if (handshake.isUnnamed()) options.onUnnamed?.()
    listeners.up()
  }

  const onLost = (): void => {
    epoch++
    clearTimeout(watchdog)
    const error = lastError ?? failure ??
      (listeners.state() === "ready"
        ? undefined
        : fail(new NotConnected({ address, detail: "it closes the connection without an answer" })))
    lastError = undefined
    failure = error
    inFlight.rejectAll(fail(new ConnectionLost({ address, detail: detailOf(error) })))
    listeners.down(error)
  }

  client.on("error", (error: unknown) => {
    if (handshake.reports(error)) return
    lastError ??= errorFrom(error, "HELLO", false, address)
    // A Sentinel connector goes on by itself, without closing anything.
    if (options.sentinel === true && client.status === "connecting") {
      failure = lastError
      lastError = undefined
      listeners.down(failure)
    }
  })
  client.on("connect", () => {
    clearTimeout(watchdog)
    // A server that accepts the connection and never answers would otherwise hold it for ever.
    watchdog = setTimeout(() => {
      // It may have said that it is still loading.
      lastError ??= failure?.reason._tag === "Unavailable" ? failure : fail(new Timeout({ command: "HELLO" }))
      refusals++
      client.stream.destroy()
    }, options.connectTimeout)
  })
  client.on("ready", () => void check())
  client.on("close", () => {
    if (cut) cut = false
    else onLost()
  })
  client.on("end", () => {
    // ioredis gives up when its connector fails, for example when a Sentinel connection is cut while it is being asked.
    if (closed) return
    refusals++
    revival = setTimeout(() => void client.connect().catch(() => {}), backoff(refusals))
  })
  client.connect().catch(() => {})

  const unready = () => fail(new NotConnected({ address, detail: detailOf(failure) }))

  return {
    client,
    send: (name, args, deadlineMillis) =>
      listeners.state() === "ready" ? inFlight.send(name, args, deadlineMillis) : Promise.reject(unready()),
    run: (name, script, call, deadlineMillis) =>
      listeners.state() === "ready" ? inFlight.run(name, script, call, deadlineMillis) : Promise.reject(unready()),
    server: async () => info,
    isReady: () => listeners.state() === "ready",
    state: listeners.state,
    failure: () => failure,
    onReady: listeners.onReady,
    onDown: listeners.onDown,
    reset: () => {
      if (closed) return
      // Not ready from now on, and not only once the socket has said that it is closed.
      if (listeners.state() === "ready") {
        cut = true
        lastError = fail(new ConnectionLost({ address, detail: "reset" }))
        onLost()
      }
      client.stream?.destroy()
    },
    close: async () => {
      if (closed) return
      closed = true
      clearTimeout(watchdog)
      clearTimeout(revival)
      inFlight.rejectAll(fail(new ConnectionLost({ address, detail: "closed" })))
      client.disconnect()
      client.stream?.destroy()
      listeners.close()
    }
  }
}

// -----------------------------------------------------------------------------
// Commands
// -----------------------------------------------------------------------------

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

/**
 * Sends a command that does not block. After a deadline the connection is only given up if it does not answer `PING`
 * either: one slow command must not cost the others theirs.
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

/** How long a command may block by its own arguments. */
export const blockingMillis = (command: string, args: ReadonlyArray<string | number>): number => {
  const name = command.toUpperCase()
  if (name === "WAIT" || name === "WAITAOF") return Number(args.at(-1)) || Infinity
  if (!blocking.has(name)) return 0
  const millis = new IoRedis.Command(name, [...args]).extractBlockingTimeout()
  return millis === undefined || millis === null ? 0 : millis === 0 ? Infinity : millis
}

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
