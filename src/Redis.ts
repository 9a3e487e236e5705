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
 * - Errors carry neither arguments nor passwords.
 * - Each layer also provides `effect/persistence/Redis`, so that Effect's own `RateLimiter`, `CircuitBreaker`,
 *   `PersistedQueue` and `Persistence` work over the same server.
 *
 * **Gotchas**
 *
 * - `executed: "unknown"` means just that. Repeat such a command only if twice is as good as once.
 * - A blocking command on the shared connection would hold up all others: use `connect`.
 * - On a Cluster a script is sent to the node of its first key, so that all its keys need one hash tag. Of Effect's own
 *   modules, `PersistedQueue` needs a `prefix` with one (`"{queues}:"`), the token buckets of `RateLimiter` need keys
 *   with one (`"{user:1}"`), and `setMany` of `Persistence` a store id with one (`"{users}"`). The rest works without.
 * - Effect's own modules wait up to `commandTimeout` for a connection that is lost. An outage that takes longer ends the
 *   fiber with which `PersistedQueue` recovers elements of dead consumers; a queue that is idle for 30 seconds and then
 *   used again starts another.
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
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Option from "effect/Option"
import * as PersistenceRedis from "effect/persistence/Redis"
import * as Redacted from "effect/Redacted"
import type * as Scope from "effect/Scope"
import type * as Stream from "effect/Stream"
import * as SubscriptionRef from "effect/SubscriptionRef"
import type * as IoRedis from "ioredis"
import type { ConnectionOptions } from "node:tls"
import { CurrentIo } from "./internal/io.ts"
import * as clusterConnection from "./internal/redis/cluster.ts"
import * as connection from "./internal/redis/connection.ts"
import type { ConnectionState } from "./internal/redis/connection.ts"
import * as embedded from "./internal/redis/embedded.ts"
import { EmbeddedFailed, RedisError, summary, Timeout } from "./internal/redis/errors.ts"
import * as persistence from "./internal/redis/persistence.ts"

/**
 * A connection that nobody else uses, for blocking commands. See `Redis.connect`.
 *
 * @category models
 * @since 0.1.0
 */
export interface Dedicated {
  /**
   * Sends a command, after waiting for the connection when it is being made again. The deadline of a blocking command
   * is its own timeout and then `commandTimeout`; without one (`BLOCK 0`) it has none. A deadline that passes and an
   * interruption destroy the socket, so that no late reply is taken for that of another command.
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

  /** What the server said of itself when the layer was built; `"unknown"` behind a proxy that does not tell. */
  readonly server: { readonly flavor: "redis" | "valkey"; readonly version: string }

  /**
   * Sends one command on the shared connection, as RESP2 has it: maps are flat arrays. On a Cluster it goes to the node
   * of its first key. Interruption stops waiting; the command may be executed all the same.
   */
  readonly send: <A = unknown>(
    command: string,
    ...args: ReadonlyArray<string | number>
  ) => Effect.Effect<A, RedisError>

  /**
   * Opens a connection of its own for blocking commands, closed with the scope. On a Cluster it goes to the node that
   * serves `key`, also after the slot has moved, and to any node without a key.
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
  /** For `layer({ url })` in other processes: `unix://` and the path of the socket. */
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
  Timeout,
  Unavailable,
  UnsupportedServer
} from "./internal/redis/errors.ts"

// -----------------------------------------------------------------------------
// Options
// -----------------------------------------------------------------------------

/**
 * @category options
 * @since 0.1.0
 */
export interface Address {
  readonly host: string
  readonly port?: number | undefined
}

/**
 * Where Redis is: one of `url`, `path`, `host` and `port`, `sentinels` with `name`, or `cluster`. Without any of them,
 * `localhost:6379`.
 *
 * @category options
 * @since 0.1.0
 */
export interface Options extends Timeouts {
  /**
   * `redis://user:password@host:6379/0`, `rediss://` for TLS, or `unix:///path/of/socket?db=0`. Options given apart from
   * it win over what it says.
   */
  readonly url?: string | Redacted.Redacted<string> | undefined
  readonly host?: string | undefined
  readonly port?: number | undefined
  /** Path of a unix socket. */
  readonly path?: string | undefined
  /** Database number, default 0. A Cluster has only 0. */
  readonly db?: number | undefined
  readonly username?: string | undefined
  readonly password?: Redacted.Redacted<string> | undefined
  /** `true` for TLS with the authorities that Node.js trusts, or options such as `{ ca }`. */
  readonly tls?: boolean | ConnectionOptions | undefined
  readonly sentinels?: ReadonlyArray<Address> | undefined
  /** The name that the Sentinels know the primary by. */
  readonly name?: string | undefined
  readonly sentinelUsername?: string | undefined
  readonly sentinelPassword?: Redacted.Redacted<string> | undefined
  /** TLS to the Sentinels, default as `tls`. */
  readonly sentinelTls?: boolean | ConnectionOptions | undefined
  /** Some nodes of a Redis Cluster; the others are discovered. */
  readonly cluster?: ReadonlyArray<Address> | undefined
  /** From the addresses that the nodes announce, as `host:port`, to those by which they are reached from here. */
  readonly natMap?: Readonly<Record<string, { readonly host: string; readonly port: number }>> | undefined
  /**
   * The name that `CLIENT LIST` shows, default `"lockstep"`; connections of their own add their purpose to it, as in
   * `"lockstep:reader"`. A user without permission for `client|setname` connects without a name.
   */
  readonly clientName?: string | undefined
}

/**
 * @category options
 * @since 0.1.0
 */
export interface Timeouts {
  /** How long connecting and checking the server may take, default 5 seconds. */
  readonly connectTimeout?: Duration.Input | undefined
  /** How long a command may take, default 5 seconds. */
  readonly commandTimeout?: Duration.Input | undefined
}

/**
 * @category options
 * @since 0.1.0
 */
export interface EmbeddedOptions extends Timeouts {
  /**
   * The program to start, default `LOCKSTEP_REDIS_SERVER` of the environment or else `redis-server` or `valkey-server`,
   * whichever is found first on `PATH`.
   */
  readonly binary?: string | undefined
  /** More arguments for it, such as `["--appendonly", "yes"]`. */
  readonly args?: ReadonlyArray<string> | undefined
}

interface Source {
  readonly topology: connection.Topology
  readonly address: string
  readonly clientName: string
  readonly single: IoRedis.RedisOptions
  readonly cluster?: {
    readonly nodes: ReadonlyArray<IoRedis.ClusterNode>
    readonly base: IoRedis.ClusterOptions
    readonly from?: IoRedis.Cluster
  } | undefined
}

interface ParsedUrl {
  readonly host?: string
  readonly port?: number
  readonly path?: string
  readonly db?: number
  readonly username?: string
  readonly password?: string
  readonly tls?: true
}

const integer = (name: string, text: string): number => {
  if (!/^\d+$/.test(text)) throw new RangeError(`Redis: ${name} must be a number`)
  return Number(text)
}

// What is wrong must not quote the URL: it may carry a password.
const parseUrl = (text: string): ParsedUrl => {
  if (text.startsWith("/")) return { path: text }
  if (!URL.canParse(text)) throw new RangeError("Redis: url is not a URL such as redis://localhost:6379")
  const url = new URL(text)
  const db = url.searchParams.get("db")
  const common = {
    ...(url.username === "" ? undefined : { username: decodeURIComponent(url.username) }),
    ...(url.password === "" ? undefined : { password: decodeURIComponent(url.password) }),
    ...(db === null ? undefined : { db: integer("the database in url", db) })
  }
  switch (url.protocol) {
    case "unix:":
    case "redis+unix:":
    case "redis+socket:":
      if (url.host !== "" && url.host !== "localhost") {
        throw new RangeError("Redis: url needs three slashes: unix:///path")
      }
      return { ...common, path: decodeURIComponent(url.pathname) }
    case "redis:":
    case "rediss:":
    case "valkey:":
    case "valkeys:": {
      const database = url.pathname.slice(1)
      return {
        ...common,
        host: url.hostname === "" ? "localhost" : url.hostname.replace(/^\[(.*)\]$/, "$1"),
        ...(url.port === "" ? undefined : { port: Number(url.port) }),
        ...(database === "" ? undefined : { db: integer("the database in url", database) }),
        ...(url.protocol === "rediss:" || url.protocol === "valkeys:" ? { tls: true as const } : undefined)
      }
    }
    default:
      throw new RangeError("Redis: url must begin with redis://, rediss:// or unix://")
  }
}

const tlsOf = (option: boolean | ConnectionOptions | undefined): ConnectionOptions | undefined =>
  option === true ? {} : option === false ? undefined : option

const definedOnly = <A extends object>(options: A): A => {
  for (const key of Object.keys(options)) if (options[key as keyof A] === undefined) delete options[key as keyof A]
  return options
}

const resolve = (options: Options): Source => {
  const { cluster, sentinels } = options
  const places = [options.url, options.path, options.host ?? options.port, sentinels, cluster]
  if (places.filter((place) => place !== undefined).length > 1) {
    throw new RangeError("Redis: give only one of url, path, host and port, sentinels, cluster")
  }
  if (sentinels !== undefined && (sentinels.length === 0 || options.name === undefined)) {
    throw new RangeError("Redis: sentinels needs at least one address, and the name of the primary as `name`")
  }
  if (cluster !== undefined && cluster.length === 0) throw new RangeError("Redis: cluster needs at least one address")
  const parsed: ParsedUrl = options.url === undefined
    ? {}
    : parseUrl(Redacted.isRedacted(options.url) ? Redacted.value(options.url) : options.url)
  const path = options.path ?? parsed.path
  const host = options.host ?? parsed.host ?? "localhost"
  const port = options.port ?? parsed.port ?? 6379
  const db = options.db ?? parsed.db ?? 0
  if (!Number.isInteger(port) || port < 1 || port > 65535) throw new RangeError("Redis: port must be 1 to 65535")
  if (!Number.isInteger(db) || db < 0) throw new RangeError("Redis: db must be a non-negative integer")
  if (cluster !== undefined && db !== 0) throw new RangeError("Redis: a Cluster has only database 0")
  const clientName = options.clientName ?? "lockstep"
  if (!/^[!-~]+$/.test(clientName)) throw new RangeError("Redis: clientName must be ASCII without spaces")
  const tls = tlsOf(options.tls ?? parsed.tls)
  const common = definedOnly<IoRedis.RedisOptions>({
    username: options.username ?? parsed.username,
    password: options.password === undefined ? parsed.password : Redacted.value(options.password),
    tls
  })
  const list = (addresses: ReadonlyArray<Address>, standard: number) =>
    addresses.map((address) => ({ host: address.host, port: address.port ?? standard }))
  if (cluster !== undefined) {
    return {
      topology: "cluster",
      clientName,
      address: list(cluster, 6379).map((node) => `${node.host}:${node.port}`).join(","),
      single: {},
      cluster: {
        nodes: list(cluster, 6379),
        base: {
          redisOptions: common,
          // The names in the certificate are those of the nodes.
          ...(tls === undefined ? undefined : { dnsLookup: (name, callback) => callback(null, name) }),
          ...(options.natMap === undefined ? undefined : { natMap: options.natMap })
        }
      }
    }
  }
  if (sentinels !== undefined) {
    return {
      topology: "sentinel",
      clientName,
      address: `${options.name} of ${list(sentinels, 26379).map((node) => `${node.host}:${node.port}`).join(",")}`,
      single: {
        ...common,
        db,
        role: "master",
        sentinels: list(sentinels, 26379),
        ...definedOnly<IoRedis.RedisOptions>({
          name: options.name,
          sentinelUsername: options.sentinelUsername,
          sentinelPassword: options.sentinelPassword === undefined
            ? undefined
            : Redacted.value(options.sentinelPassword),
          sentinelTLS: tlsOf(options.sentinelTls ?? options.tls),
          natMap: options.natMap
        }),
        // Without this, ioredis leaves the connection to the primary in plain text.
        enableTLSForSentinelMode: tls !== undefined
      }
    }
  }
  return path === undefined
    ? { topology: "standalone", clientName, address: `${host}:${port}`, single: { ...common, host, port, db } }
    : { topology: "standalone", clientName, address: path, single: { ...common, path, db } }
}

const resolveClient = (client: IoRedis.Redis | IoRedis.Cluster): Source => {
  if (client.isCluster) {
    const from = client as IoRedis.Cluster
    const options = from.options
    if (options.keyPrefix || options.redisOptions?.keyPrefix) {
      throw new RangeError("Redis: a client with keyPrefix cannot be used, as it does not reach all names: remove it")
    }
    if (options.scaleReads !== undefined && options.scaleReads !== "master") {
      throw new RangeError("Redis: a client with scaleReads cannot be used, as replicas are behind: use \"master\"")
    }
    return {
      topology: "cluster",
      clientName: options.redisOptions?.connectionName ?? "lockstep",
      address: "the given Cluster",
      single: {},
      cluster: { nodes: [], base: {}, from }
    }
  }
  const options = (client as IoRedis.Redis).options
  if (options.keyPrefix) {
    throw new RangeError("Redis: a client with keyPrefix cannot be used, as it does not reach all names: remove it")
  }
  if (options.readOnly || options.role === "slave") {
    throw new RangeError("Redis: a client that reads from replicas cannot be used: connect it to the primary")
  }
  const sentinel = options.sentinels !== undefined && options.sentinels !== null
  if (sentinel && options.tls !== undefined && !options.enableTLSForSentinelMode) {
    throw new RangeError("Redis: this client sends its password in plain text: set enableTLSForSentinelMode with tls")
  }
  return {
    topology: sentinel ? "sentinel" : "standalone",
    clientName: options.connectionName ?? "lockstep",
    address: sentinel ? `${options.name} of its Sentinels` : options.path ?? `${options.host}:${options.port}`,
    single: options
  }
}

// -----------------------------------------------------------------------------
// Making
// -----------------------------------------------------------------------------

const millis = (input: Duration.Input | undefined, name: string): number => {
  const value = input === undefined ? 5000 : Duration.toMillis(Duration.fromInputUnsafe(input))
  if (!(value >= 1 && value <= 3_600_000)) throw new RangeError(`Redis: ${name} must be 1 millisecond to 1 hour`)
  return value
}

const attempt = <A>(f: () => Promise<A>): Effect.Effect<A, RedisError> =>
  Effect.tryPromise({ try: f, catch: (error) => error as RedisError })

/** Waits for a connection that is being made: until it is ready, or for its first failure if `patient` is false. */
const connected = (self: connection.Connection, timeout: number, patient: boolean): Effect.Effect<void, RedisError> =>
  Effect.callback((resume) => {
    const cleanup = () => {
      clearTimeout(timer)
      offReady()
      offDown()
    }
    const done = (result: Effect.Effect<void, RedisError>) => {
      queueMicrotask(cleanup)
      resume(result)
    }
    const timer = setTimeout(() => done(Effect.fail(self.failure() ?? timedOut("HELLO"))), timeout)
    const offReady = self.onReady(() => done(Effect.void))
    const offDown = self.onDown((error) => {
      if (!patient || self.state() === "closed") done(Effect.fail(error ?? self.failure() ?? timedOut("HELLO")))
    })
    return Effect.sync(cleanup)
  })

const timedOut = (command: string): RedisError => new RedisError({ reason: new Timeout({ command }) })

const checkCommand = (command: string): void => {
  if (typeof command !== "string" || command === "") throw new RangeError("Redis: command must be a non-empty string")
  if (command.toUpperCase() === "SELECT") {
    throw new RangeError("Redis: SELECT would move a connection for good: use a layer with another `db`")
  }
}

const sendShared = (self: connection.Connection, timeout: number): Redis["Service"]["send"] => (command, ...args) =>
  Effect.suspend(() => {
    checkCommand(command)
    return attempt(() => connection.sendProbing(self, command, args, timeout) as Promise<never>)
  })

const sendDedicated =
  (self: connection.Connection, connectTimeout: number, timeout: number): Dedicated["send"] => (command, ...args) =>
    Effect.suspend(() => {
      checkCommand(command)
      const send = Effect.callback<never, RedisError>((resume) => {
        self.send(command, args, connection.blockingMillis(command, args) + timeout).then(
          (value) => resume(Effect.succeed(value as never)),
          (error: RedisError) => {
            if (error.reason._tag === "Timeout") self.reset()
            resume(Effect.fail(error))
          }
        )
        return Effect.sync(self.reset)
      })
      return self.isReady() ? send : Effect.andThen(connected(self, connectTimeout, true), send)
    })

const make = Effect.fnUntraced(function*(source: () => Source, timeouts: Timeouts) {
  const { address, clientName, cluster, single, topology } = source()
  const connectTimeout = millis(timeouts.connectTimeout, "connectTimeout")
  const commandTimeout = millis(timeouts.commandTimeout, "commandTimeout")
  const io = yield* CurrentIo
  const runFork = Effect.runForkWith(yield* Effect.context<never>())
  const log = (effect: Effect.Effect<void>) =>
    void runFork(Effect.annotateLogs(effect, { module: "lockstep/Redis", address }))

  const onUnnamed = () => log(Effect.logDebug("Redis refuses CLIENT SETNAME, so this connection has no name"))
  const open = (connectionName: string) =>
    connection.single({
      base: { ...single, connectionName },
      address,
      connectTimeout,
      topology,
      sentinel: topology === "sentinel",
      onUnnamed
    })
  const commands = yield* Effect.acquireRelease(
    Effect.sync(() =>
      cluster === undefined
        ? open(clientName)
        : clusterConnection.cluster({ ...cluster, address, name: clientName, connectTimeout, onUnnamed })
    ),
    (self) => Effect.promise(self.close)
  )
  yield* connected(commands, connectTimeout, false)
  const server = yield* attempt(() => commands.server(connectTimeout))
  const functions = yield* attempt(() => connection.probeFunctions(commands, connectTimeout))

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

  const dedicated = (key?: string | undefined, role = "reader"): connection.Connection =>
    "dedicated" in commands ? commands.dedicated(key, role) : open(`${clientName}:${role}`)
  const connect: Redis["Service"]["connect"] = Effect.fnUntraced(function*(options) {
    const self = yield* Effect.acquireRelease(
      Effect.sync(() => dedicated(options?.key, "blocking")),
      (self) => Effect.promise(self.close)
    )
    yield* connected(self, connectTimeout, true)
    return { send: sendDedicated(self, connectTimeout, commandTimeout) }
  })

  const redis = Redis.of({
    topology,
    server,
    send: sendShared(commands, commandTimeout),
    connect,
    state: SubscriptionRef.get(state),
    changes: SubscriptionRef.changes(state),
    client: commands.client
  })
  const masters = "masters" in commands ? commands.masters : () => [commands]
  const connections = { topology, commands, dedicated, masters, commandTimeout, features: { functions } }
  connection.register(redis, connections)
  const effectRedis = yield* persistence.make(connections, io)
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
 * Building the layer takes no longer than `connectTimeout` and fails with what is wrong: not running, not Redis, too
 * old, a replica, wrong credentials. Contradictory options are defects (`RangeError`). From then on it reconnects for
 * ever, waiting 2 seconds at most; `changes` shows it and the log says it once for each reason.
 *
 * The user needs no more than the permissions of the commands that are sent, with a `db` other than 0 `SELECT`, and on
 * a Cluster `CLUSTER SLOTS`. A connection whose `SELECT` is refused is never used in another database. With
 * `client|setname` the connection shows its name. Without `FCALL` and `FUNCTION`, Lockstep uses `EVALSHA` and
 * `SCRIPT LOAD`.
 *
 * @category layers
 * @since 0.1.0
 */
export const layer = (
  options: Options = {}
): Layer.Layer<Redis | PersistenceRedis.Redis, RedisError> => Layer.effectContext(make(() => resolve(options), options))

const addresses = (name: string, standard: number) =>
  Config.String(name).pipe(
    Config.map((text) =>
      text.split(",").map((part) => part.trim()).filter((part) => part !== "").map((part): Address => {
        const colon = part.lastIndexOf(":")
        return colon === -1
          ? { host: part, port: standard }
          : { host: part.slice(0, colon), port: integer(name, part.slice(colon + 1)) }
      })
    ),
    optional
  )

const optional = <A>(config: Config.Config<A>): Config.Config<A | undefined> =>
  Config.map(Config.option(config), Option.getOrUndefined)

/**
 * What `layerConfig` reads by default: `REDIS_URL`, or `REDIS_HOST` and `REDIS_PORT`, or `REDIS_SENTINELS` and
 * `REDIS_SENTINEL_NAME`, or `REDIS_CLUSTER` (addresses as `host:port,host:port`); and `REDIS_USERNAME`,
 * `REDIS_PASSWORD`, `REDIS_SENTINEL_USERNAME`, `REDIS_SENTINEL_PASSWORD`, `REDIS_DB` and `REDIS_TLS`.
 *
 * @category options
 * @since 0.1.0
 */
export const config: Config.Config<Options> = Config.all({
  url: optional(Config.Redacted("REDIS_URL")),
  host: optional(Config.String("REDIS_HOST")),
  port: optional(Config.Port("REDIS_PORT")),
  db: optional(Config.Int("REDIS_DB")),
  username: optional(Config.String("REDIS_USERNAME")),
  password: optional(Config.Redacted("REDIS_PASSWORD")),
  tls: optional(Config.Boolean("REDIS_TLS")),
  sentinels: addresses("REDIS_SENTINELS", 26379),
  name: optional(Config.String("REDIS_SENTINEL_NAME")),
  sentinelUsername: optional(Config.String("REDIS_SENTINEL_USERNAME")),
  sentinelPassword: optional(Config.Redacted("REDIS_SENTINEL_PASSWORD")),
  cluster: addresses("REDIS_CLUSTER", 6379)
})

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
 * Uses the address, credentials and TLS of an ioredis client. Duplicates of it are what is used, with the settings that
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

/**
 * Starts a `redis-server` (or `valkey-server`) of its own for development and tests, and connects to it. It listens on
 * a unix socket only, keeps nothing on disk unless told to, and is gone with the scope or with this process, however it
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
      Effect.acquireRelease(
        Effect.tryPromise({
          try: () => embedded.start(options, millis(options.connectTimeout, "connectTimeout")),
          catch: (error) =>
            new RedisError({
              reason: new EmbeddedFailed({ detail: error instanceof Error ? error.message : "it failed" })
            })
        }),
        (server) => Effect.promise(server.stop)
      ),
      (server) =>
        Layer.merge(
          layer({ path: server.path, connectTimeout: options.connectTimeout, commandTimeout: options.commandTimeout }),
          Layer.succeed(EmbeddedServer, { url: server.url, path: server.path, pid: server.pid })
        )
    )
  )
