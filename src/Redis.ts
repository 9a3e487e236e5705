/**
 * The connection to Redis that everything else in this package works through: one server, Sentinel or Cluster.
 *
 * **Guarantees**
 *
 * - A layer connects, checks what it has connected to and fails with one sentence that says what to do; it does not
 *   hang. Afterwards it reconnects for ever.
 * - Every command settles: with its reply, when its connection is lost, or at its deadline.
 * - A command is sent at most once. Nothing is queued while Redis is away and nothing is resent; `RedisError.executed`
 *   says whether a failed command can have been executed.
 * - A connection is only used in the database that its `db` says. One whose `SELECT` or `AUTH` is refused fails.
 * - Errors carry neither arguments nor passwords.
 * - Each layer also provides `effect/persistence/Redis`, so that Effect's own `RateLimiter`, `CircuitBreaker`,
 *   `PersistedQueue` and `Persistence` work over the same server.
 *
 * **Gotchas**
 *
 * - `executed: "unknown"` means just that. Repeat such a command only if twice is as good as once.
 * - A blocking command on the shared connection would hold up all others: use `connect`.
 * - A connection of `connect` loses what `WATCH`, `MULTI` and `AUTH` have changed when it is made again. The next command fails
 *   with `NotConnected`, once.
 * - No connection receives messages by `SUBSCRIBE`: use `subscribe` of `effect/persistence/Redis`.
 * - On a Cluster a script is sent to the node of its first key, so that all its keys need one hash tag. Of Effect's own modules,
 *   `PersistedQueue` needs a `prefix` with one (`"{queues}:"`). The token buckets of `RateLimiter` need keys with one
 *   (`"{user:1}"`), and `setMany` of `Persistence` needs a store id with one (`"{users}"`). The rest works without.
 * - Effect's own modules wait up to `commandTimeout` for a connection that is lost. A longer outage, or one that takes
 *   the reply of its command with it, ends the fiber with which `PersistedQueue` recovers elements of dead consumers. A
 *   queue that is idle for 30 seconds and then used again starts another.
 * - Redis 7.0 or Valkey 7.2 is the oldest server supported. Nothing here needs `INFO`, `ROLE` or `CONFIG`.
 *
 * **Permissions**
 *
 * A connection needs no permission of its own, except `SELECT` with a `db` other than 0 and `CLUSTER SLOTS` on a
 * Cluster. With `+client|setname` it shows its name. Effect's own modules need `resetchannels -@all +script|load
 * +evalsha`, and for keys that begin with `app:` each of them
 *
 * - `Persistence`: `~app%3A* +get +mget +set +pexpire +del +keys`. Its keys escape the `:` and `%` of a store id. Only
 *   `clear` needs `+keys`.
 * - `RateLimiter`: `~app:rate:* +get +set +pttl +pexpire +hget +hset +time` with the prefix `"app:rate:"`.
 * - `CircuitBreaker`: `~app:breaker:* +hmget +hset +pexpire +time` with the prefix `"app:breaker:"`.
 * - `PersistedQueue`: `~app:queue:* +scan +set +del +exists +hget +hgetall +hset +hdel +hincrby +lindex +lpop +lrange
 *   +ltrim +rpush +zadd +zrangebyscore +zrem +zremrangebyscore` with the prefix `"app:queue:"`. Only `cleanup` needs
 *   `+scan`.
 *
 * `subscribe` of `effect/persistence/Redis` needs `+subscribe` and the channel, as in `&app:*`.
 *
 * **Example** (Sending a command)
 *
 * ```ts
 * import * as Effect from "effect/Effect"
 * import { Redis } from "lockstep"
 *
 * const program = Effect.gen(function*() {
 *   const redis = yield* Redis.Redis
 *   return yield* redis.send<string>("PING")
 * }).pipe(Effect.provide(Redis.layer({ url: "redis://localhost:6379" })))
 * ```
 *
 * @since 0.1.0
 */

import * as Config from "effect/Config"
import * as Context from "effect/Context"
import type * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Option from "effect/Option"
import * as PersistenceRedis from "effect/persistence/Redis"
import * as Schema from "effect/Schema"
import type * as Scope from "effect/Scope"
import type * as Stream from "effect/Stream"
import * as SubscriptionRef from "effect/SubscriptionRef"
import type * as IoRedis from "ioredis"
import { CurrentIo, giveUpAfter, type Io, millisIn } from "./internal/io.ts"
import { cluster } from "./internal/redis/cluster.ts"
import { blockingMillis, checkCommand, checkShared, sendOwn } from "./internal/redis/command.ts"
import {
  type Connection,
  type ConnectionState,
  type NodeConnection,
  register,
  type ServerInfo,
  type Topology
} from "./internal/redis/connection.ts"
import * as embedded from "./internal/redis/embedded.ts"
import { EmbeddedFailed, RedisError, summary, Timeout, withoutSlots } from "./internal/redis/errors.ts"
import type { EmbeddedOptions, Options, Timeouts } from "./internal/redis/options.ts"
import * as persistence from "./internal/redis/persistence.ts"
import { probeFunctions, sendProbing } from "./internal/redis/probe.ts"
import { parseAddresses, parseUrl, resolve, resolveClient, type Source } from "./internal/redis/resolve.ts"
import { single } from "./internal/redis/single.ts"
import { sent } from "./internal/redis/waiting.ts"

/**
 * A connection of its own, for blocking commands. See `Redis.connect`.
 *
 * @category models
 * @since 0.1.0
 */
export interface Dedicated {
  /**
   * Sends a command, after waiting for the connection when it is being made again. The deadline of a blocking command
   * is its own timeout and then `commandTimeout`; without one (`BLOCK 0`) it has none. A deadline that passes and an
   * interruption destroy the socket, so that no late reply is taken for that of another command.
   *
   * What `WATCH`, `MULTI`, `AUTH` and the like have changed is lost with the socket. The first command on the next one then
   * fails with `NotConnected`, and is not sent: begin again with what had changed the connection.
   */
  readonly send: <A = unknown>(
    command: string,
    ...args: ReadonlyArray<string | number>
  ) => Effect.Effect<A, RedisError>
}

/**
 * The connection to Redis.
 *
 * @category services
 * @since 0.1.0
 */
export class Redis extends Context.Service<Redis, {
  readonly topology: "standalone" | "sentinel" | "cluster"

  /** The server's flavor and version when the layer was built; `"unknown"` behind a proxy that does not say. */
  readonly server: { readonly flavor: "redis" | "valkey"; readonly version: string }

  /**
   * Sends one command on the shared connection, as RESP2 has it: maps are flat arrays. On a Cluster it goes to the node
   * of its first key. Interruption stops waiting; the command may be executed all the same. Without a connection it fails
   * in the next turn of the event loop.
   */
  readonly send: <A = unknown>(
    command: string,
    ...args: ReadonlyArray<string | number>
  ) => Effect.Effect<A, RedisError>

  /**
   * Opens a connection of its own for blocking commands and transactions, closed with the scope. On a Cluster it goes to the
   * node that serves `key`, also after the slot has moved, and to any node without a key.
   */
  readonly connect: (
    options?: { readonly key?: string | undefined } | undefined
  ) => Effect.Effect<Dedicated, RedisError, Scope.Scope>

  readonly state: Effect.Effect<ConnectionState>

  /** The state now, and every change of it. */
  readonly changes: Stream.Stream<ConnectionState>

  /**
   * The ioredis client behind `send`. It is configured to refuse commands while disconnected, and its promises may stay
   * unsettled when the connection is lost.
   */
  readonly client: IoRedis.Redis | IoRedis.Cluster
}>()("lockstep/Redis") {}

/**
 * The private server of `layerEmbedded`.
 *
 * @category services
 * @since 0.1.0
 */
export class EmbeddedServer extends Context.Service<EmbeddedServer, {
  /** For `layer({ url })` in other processes: `unix://` and the path of the socket, percent-encoded. */
  readonly url: string
  readonly path: string
  readonly pid: number
}>()("lockstep/Redis/EmbeddedServer") {}

export type { ConnectionState } from "./internal/redis/connection.ts"
export {
  AuthenticationFailed,
  CommandFailed,
  ConnectionLost,
  EmbeddedFailed,
  FunctionMissing,
  MissingPermission,
  NotConnected,
  OutOfMemory,
  ReadOnlyReplica,
  RedisError,
  RedisErrorReason,
  RequestTooLarge,
  Timeout,
  Unavailable,
  UnsupportedServer
} from "./internal/redis/errors.ts"
export type { Address, EmbeddedOptions, Options, Timeouts } from "./internal/redis/options.ts"

// -----------------------------------------------------------------------------
// Making
// -----------------------------------------------------------------------------

const millis = (input: Duration.Input | undefined, name: string): number => {
  const value = millisIn(input ?? 5000)
  if (!(value >= 1 && value <= 3_600_000)) throw new RangeError(`Redis: ${name} must be 1 millisecond to 1 hour`)
  return value
}

const attempt = <A>(f: () => Promise<A>): Effect.Effect<A, RedisError> =>
  Effect.tryPromise({ try: f, catch: (error) => error as RedisError })

/** Waits for a connection that is being made: until it is ready, or for its first failure that does not pass. */
const connected = (
  self: Connection,
  io: Io,
  timeout: number,
  passes: (error: RedisError) => boolean
): Effect.Effect<void, RedisError> =>
  Effect.callback((resume) => {
    const cleanup = () => {
      timer.cancel()
      offReady()
      offDown()
    }
    const done = (result: Effect.Effect<void, RedisError>) => {
      // `onReady` may call back before it returns.
      io.defer(cleanup)
      resume(result)
    }
    const timer = giveUpAfter(io, timeout, () => done(Effect.fail(self.failure() ?? timedOut("HELLO"))))
    const offReady = self.onReady(() => done(Effect.void))
    const offDown = self.onDown((error) => {
      const failure = error ?? self.failure() ?? timedOut("HELLO")
      if (self.state() === "closed" || !passes(failure)) done(Effect.fail(failure))
    })
    return Effect.sync(cleanup)
  })

const timedOut = (command: string): RedisError => new RedisError({ reason: new Timeout({ command }) })

const sendShared = (self: Connection, io: Io, timeout: number): Redis["Service"]["send"] => (command, ...args) =>
  Effect.suspend(() => {
    checkShared(command, args)
    return sent(io, () => sendProbing(self, command, args, timeout) as Promise<never>)
  })

const sendDedicated = (
  self: Connection,
  io: Io,
  address: string,
  connectTimeout: number,
  timeout: number
): Dedicated["send"] => {
  const sendHere = sendOwn(self, address)
  return (command, ...args) =>
    Effect.suspend(() => {
      checkCommand(command, args)
      const send = Effect.callback<never, RedisError>((resume) => {
        sendHere(command, args, blockingMillis(command, args) + timeout).then(
          (value) => resume(Effect.succeed(value as never)),
          (error: RedisError) => {
            if (error.reason._tag === "Timeout") self.reset()
            resume(Effect.fail(error))
          }
        )
        return Effect.sync(self.reset)
      })
      return self.isReady() ? send : Effect.andThen(connected(self, io, connectTimeout, () => true), send)
    })
}

type Log = (effect: Effect.Effect<void>) => void

/** The state of the shared connection as a service shows it, and what the log says of it. */
const observe = Effect.fnUntraced(function*(commands: Connection, log: Log) {
  const state = yield* SubscriptionRef.make<ConnectionState>("ready")
  const setState = (next: ConnectionState) => {
    if (SubscriptionRef.getUnsafe(state) !== next) Effect.runSync(SubscriptionRef.set(state, next))
  }
  const reported = new Set<string>()
  const offReady = commands.onReady(() => {
    if (SubscriptionRef.getUnsafe(state) === "reconnecting") log(Effect.logInfo("Redis is connected again"))
    reported.clear()
    setState("ready")
  })
  const offDown = commands.onDown((error) => {
    const reason = error === undefined ? "closed" : summary(error)
    // Once for each reason, not for every attempt.
    if (commands.state() !== "closed" && !reported.has(reason)) {
      reported.add(reason)
      log(Effect.annotateLogs(Effect.logWarning("Redis is not connected, reconnecting"), { reason }))
    }
    setState(commands.state())
  })
  yield* Effect.addFinalizer(() =>
    Effect.sync(() => {
      offReady()
      offDown()
      setState("closed")
    })
  )
  return state
})

/** The shared connection of a source, and how others of their own are opened. */
const open = (source: Source, io: Io, connectTimeout: number, log: Log) => {
  const { address, clientName, topology } = source
  const onUnnamed = () => log(Effect.logDebug("Redis refuses CLIENT SETNAME, so this connection has no name"))
  const one = (connectionName: string, within = connectTimeout) =>
    single({
      io,
      base: { ...source.single, connectionName },
      address,
      connectTimeout: Math.min(connectTimeout, within),
      topology,
      onUnnamed
    })
  if (source.cluster === undefined) {
    const commands = one(clientName)
    return {
      commands,
      masters: () => [commands],
      dedicated: (_key?: string | undefined, role = "reader", within?: number | undefined): NodeConnection =>
        one(`${clientName}:${role}`, within)
    }
  }
  const commands = cluster({ ...source.cluster, io, address, name: clientName, connectTimeout, onUnnamed })
  return {
    commands,
    masters: commands.masters,
    dedicated: (key?: string | undefined, role = "reader", within?: number | undefined) =>
      commands.dedicated(key, role, within)
  }
}

// In milliseconds.
const again = 100

/** What a server says of itself. In a Cluster it may just have been lost, or have become a replica: then another one is asked. */
const introduced = async (
  commands: ReturnType<typeof open>["commands"],
  topology: Topology,
  io: Io,
  deadline: number
): Promise<{ readonly server: ServerInfo; readonly functions: boolean }> => {
  const rest = () => Math.max(1, deadline - io.now())
  // A node that has just become a replica may not answer at all.
  const patience = topology === "cluster" ? rest() / 4 : rest()
  for (;;) {
    const within = Math.min(patience, rest())
    try {
      return { server: await commands.server(within), functions: await probeFunctions(commands, within) }
    } catch (error) {
      const isOver = rest() <= again || commands.state() === "closed"
      if (topology !== "cluster" || isOver || !isPassing(error as RedisError)) throw error
      await new Promise<void>((resolve) => void io.after(again, resolve))
    }
  }
}

const isPassing = ({ reason }: RedisError): boolean =>
  reason._tag === "ReadOnlyReplica" || reason._tag === "ConnectionLost" || reason._tag === "Timeout" ||
  reason._tag === "NotConnected" && reason.detail !== "WRONGPASS" && reason.detail !== "NOAUTH"

const make = Effect.fnUntraced(function*(resolved: () => Source, timeouts: Timeouts) {
  const source = resolved()
  const { address, topology } = source
  const connectTimeout = millis(timeouts.connectTimeout, "connectTimeout")
  const commandTimeout = millis(timeouts.commandTimeout, "commandTimeout")
  const io = yield* CurrentIo
  const runFork = Effect.runForkWith(yield* Effect.context<never>())
  const log: Log = (effect) => void runFork(Effect.annotateLogs(effect, { module: "lockstep/Redis", address }))

  const { commands, dedicated, masters } = yield* Effect.acquireRelease(
    Effect.sync(() => open(source, io, connectTimeout, log)),
    ({ commands }) => Effect.promise(commands.close)
  )
  // One deadline for all steps.
  const deadline = io.now() + connectTimeout
  // A node that has left the Cluster, or is not in it yet, may be listed, or one that is silent: ioredis goes on with others.
  const hasOthers = source.cluster !== undefined && source.cluster.listed > 1
  yield* connected(
    commands,
    io,
    connectTimeout,
    ({ reason }) => hasOthers && reason._tag === "NotConnected" && (reason.detail ?? withoutSlots) === withoutSlots
  )
  const { functions, server } = yield* attempt(() => introduced(commands, topology, io, deadline))
  const state = yield* observe(commands, log)

  const connect: Redis["Service"]["connect"] = (options) =>
    Effect.uninterruptibleMask(Effect.fnUntraced(function*(restore) {
      const self = dedicated(options?.key, "blocking")
      const close = Effect.promise(self.close)
      yield* Effect.addFinalizer(() => close)
      // The scope may stay open for long, and the caller has nothing to close.
      yield* Effect.onError(restore(connected(self, io, connectTimeout, () => true)), () => close)
      return { send: sendDedicated(self, io, address, connectTimeout, commandTimeout) }
    }))

  const redis = Redis.of({
    topology,
    server,
    send: sendShared(commands, io, commandTimeout),
    connect,
    state: SubscriptionRef.get(state),
    changes: SubscriptionRef.changes(state),
    client: commands.client
  })
  const connections = { topology, commands, dedicated, masters, commandTimeout, features: { functions } }
  register(redis, connections)
  const effectRedis = yield* persistence.make(connections, io, address)
  return Context.make(Redis, redis).pipe(Context.add(PersistenceRedis.Redis, effectRedis))
})

// -----------------------------------------------------------------------------
// Layers
// -----------------------------------------------------------------------------

/**
 * Connects to Redis and provides `Redis` and Effect's own `effect/persistence/Redis`.
 *
 * **Details**
 *
 * Building the layer takes no longer than `connectTimeout` and fails with the reason: not running, not Redis, too old, a replica,
 * wrong credentials. Contradictory options are defects (`RangeError`). From then on it reconnects for ever, waiting 2 seconds at
 * most; `changes` shows it and the log says it once for each reason.
 *
 * The user needs no more than the permissions of the commands that are sent. With a `db` other than 0 it also needs `SELECT`, and
 * on a Cluster `CLUSTER SLOTS`. A connection whose `SELECT` is refused is never used in another database. With `client|setname`
 * the connection shows its name. Without `FCALL` and `FUNCTION`, Lockstep uses `EVALSHA` and `SCRIPT LOAD`.
 *
 * @category layers
 * @since 0.1.0
 */
export const layer = (
  options: Options = {}
): Layer.Layer<Redis | PersistenceRedis.Redis, RedisError> => Layer.effectContext(make(() => resolve(options), options))

/** A text that can be read so. The error says why not. */
const readable = (read: (text: string) => unknown) =>
  Schema.String.check(Schema.makeFilter((text) => {
    try {
      read(text)
    } catch (error) {
      return (error as Error).message
    }
    return true
  }))

const addresses = (name: string) =>
  optional(Config.map(
    Config.schema(readable((text) => parseAddresses(name, text)), name),
    (text) => parseAddresses(name, text)
  ))

const optional = <A>(config: Config.Config<A>): Config.Config<A | undefined> =>
  Config.map(Config.option(config), Option.getOrUndefined)

/**
 * The variables that `layerConfig` reads by default. The server is that of `REDIS_URL`, or `REDIS_HOST` and `REDIS_PORT`, or
 * `REDIS_SENTINELS` and `REDIS_SENTINEL_NAME`, or `REDIS_CLUSTER` (addresses as `host:port,[::1]:port`). The other variables are
 * `REDIS_USERNAME`, `REDIS_PASSWORD`, `REDIS_SENTINEL_USERNAME`, `REDIS_SENTINEL_PASSWORD`, `REDIS_DB` and `REDIS_TLS`.
 * `REDIS_PORT` is not read beside `REDIS_URL`, `REDIS_SENTINELS` or `REDIS_CLUSTER`.
 *
 * @category options
 * @since 0.1.0
 */
export const config: Config.Config<Options> = Config.flatMap(
  Config.all({
    url: optional(Config.schema(Schema.Redacted(readable(parseUrl)), "REDIS_URL")),
    sentinels: addresses("REDIS_SENTINELS"),
    cluster: addresses("REDIS_CLUSTER")
  }),
  (places) => {
    const others = Config.all({
      host: optional(Config.String("REDIS_HOST")),
      // Kubernetes sets it to a URL for a service that is named redis.
      port: Object.values(places).every((place) => place === undefined)
        ? optional(Config.Port("REDIS_PORT"))
        : Config.succeed(undefined),
      db: optional(Config.Int("REDIS_DB")),
      username: optional(Config.String("REDIS_USERNAME")),
      password: optional(Config.Redacted("REDIS_PASSWORD")),
      tls: optional(Config.Boolean("REDIS_TLS")),
      name: optional(Config.String("REDIS_SENTINEL_NAME")),
      sentinelUsername: optional(Config.String("REDIS_SENTINEL_USERNAME")),
      sentinelPassword: optional(Config.Redacted("REDIS_SENTINEL_PASSWORD"))
    })
    return Config.map(others, (others) => ({ ...places, ...others }))
  }
)

/**
 * As `layer`, with options from `Config`; by default from the environment variables of `config`.
 *
 * @category layers
 * @since 0.1.0
 */
export const layerConfig = (
  options: Config.Wrap<Options> = config
): Layer.Layer<Redis | PersistenceRedis.Redis, RedisError | Config.ConfigError> =>
  Layer.unwrap(Effect.map(Config.unwrap<Options>(options), layer))

/**
 * Uses the address, credentials and TLS of an ioredis client. Lockstep uses duplicates of the client, with the settings that
 * Lockstep needs; the client itself is neither changed nor used nor closed.
 *
 * A client that has `keyPrefix`, reads from replicas or would send a password to the primary in plain text is refused
 * with a `RangeError`.
 *
 * @category layers
 * @since 0.1.0
 */
export const layerFromClient = (
  client: IoRedis.Redis | IoRedis.Cluster,
  options: Timeouts = {}
): Layer.Layer<Redis | PersistenceRedis.Redis, RedisError> =>
  Layer.effectContext(make(() => resolveClient(client), options))

const startEmbedded = (options: EmbeddedOptions): Effect.Effect<embedded.Embedded, RedisError> =>
  Effect.flatMap(CurrentIo, (io) => {
    const timeout = millis(options.connectTimeout, "connectTimeout")
    return Effect.tryPromise({
      try: () => embedded.start(options, timeout, io),
      catch: (error) =>
        new RedisError({
          reason: new EmbeddedFailed({ detail: error instanceof Error ? error.message : "it failed" })
        })
    })
  })

/**
 * Starts a `redis-server` (or `valkey-server`) of its own for development and tests, and connects to it. It listens on a unix
 * socket only, and keeps nothing on disk unless an option says so. It ends with the scope or with this process, however that
 * ends.
 *
 * @category layers
 * @since 0.1.0
 */
export const layerEmbedded = (
  options: EmbeddedOptions = {}
): Layer.Layer<Redis | EmbeddedServer | PersistenceRedis.Redis, RedisError> =>
  Layer.unwrap(
    Effect.map(
      Effect.acquireRelease(startEmbedded(options), (server) => Effect.promise(server.stop)),
      (server) =>
        Layer.merge(
          layer({ path: server.path, connectTimeout: options.connectTimeout, commandTimeout: options.commandTimeout }),
          Layer.succeed(EmbeddedServer, { url: server.url, path: server.path, pid: server.pid })
        )
    )
  )
