/**
 * The runtime that every primitive needs: this process's sessions with the partition actors in Redis.
 *
 * A coordinator opens a *session* with a partition when the partition is first used. Everything that the process holds
 * or waits for hangs off a session; sessions are renewed by a heartbeat, whatever the number of holds.
 *
 * **Guarantees**
 *
 * - Requests are batched, one batch in flight per partition, and executed exactly once, also across reconnects.
 * - When a session cannot be renewed in time, or Redis turns out to have forgotten it, it is *lost*: every hold fails
 *   with `LeaseLost`, the programs under them are interrupted, and a new session starts by itself. Who waited goes on
 *   waiting in the new one.
 * - Closing the scope gives everything back at once. After a crash it comes back when the lease has run out.
 *
 * **Gotchas**
 *
 * - All coordinators of a namespace need the same number of `partitions`; another number is refused.
 * - A session that is `suspended` (a renewal has failed, none has succeeded since) is still trusted until its lease runs
 *   out. Programs that prefer to stop early can watch `changes`.
 * - If the last coordinator of a namespace is killed, what it held stays in Redis, expired, until the next one uses that
 *   partition.
 *
 * @since 0.1.0
 */
import * as Config from "effect/Config"
import * as Context from "effect/Context"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as PubSub from "effect/PubSub"
import type * as Scope from "effect/Scope"
import * as Stream from "effect/Stream"
import { hostname } from "node:os"
import { CoordinatorError } from "./internal/actor/errors.ts"
import { Kernel, register } from "./internal/actor/kernel.ts"
import { checkNamespace } from "./internal/actor/keys.ts"
import { kernelMetrics } from "./internal/actor/metrics.ts"
import { connectionsOf } from "./internal/redis/connection.ts"
import * as Redis from "./Redis.ts"

/**
 * What a session can be.
 *
 * - `opening`: being opened; requests wait.
 * - `open`: renewed in time.
 * - `suspended`: the outcome of a renewal is unknown. Holds are still held, and may be lost soon.
 * - `lost`: over; every hold of it is lost.
 * - `closed`: not in use.
 *
 * @category models
 * @since 0.1.0
 */
export type SessionState = "opening" | "open" | "suspended" | "lost" | "closed"

/**
 * @category models
 * @since 0.1.0
 */
export interface Session {
  readonly partition: number
  readonly id: string | undefined
  readonly state: SessionState
  /** Holds and waits of this process in that partition. */
  readonly claims: number
}

/**
 * @category models
 * @since 0.1.0
 */
export interface SessionTransition {
  readonly partition: number
  readonly id: string | undefined
  readonly from: SessionState
  readonly to: SessionState
  /** Why, when `to` is `lost`; see `Lease.LeaseLost`. */
  readonly reason: "expired" | "unknown" | "rolledBack" | "closed" | undefined
}

/**
 * @category services
 * @since 0.1.0
 */
export class Coordinator extends Context.Service<Coordinator, {
  readonly namespace: string
  readonly name: string
  /** How long a hold outlives the process that held it, at most. */
  readonly lease: Duration.Duration
  readonly margin: Duration.Duration
  /** The sessions of all partitions in use. */
  readonly sessions: Effect.Effect<ReadonlyArray<Session>>
  /** Transitions from now on. A subscriber that falls more than 1,024 behind misses the oldest. */
  readonly changes: Stream.Stream<SessionTransition>
}>()("lockstep/Coordinator") {}

export {
  /**
   * @category errors
   * @since 0.1.0
   */
  ActorDefect,
  /**
   * @category errors
   * @since 0.1.0
   */
  CoordinatorClosed,
  /**
   * @category errors
   * @since 0.1.0
   */
  CoordinatorError,
  /**
   * @category errors
   * @since 0.1.0
   */
  Incompatible,
  /**
   * @category errors
   * @since 0.1.0
   */
  Overloaded
} from "./internal/actor/errors.ts"

/**
 * @category models
 * @since 0.1.0
 */
export interface Options {
  /** What separates this system from others in the same Redis: 1 to 64 of `A-Z a-z 0-9 _ . : -`. Default `lockstep`. */
  readonly namespace?: string | undefined
  /** Shown to operators. Default `host:pid`. */
  readonly name?: string | undefined
  /**
   * How long a hold outlives a process that died. Default 15 seconds: longer than a usual fail-over, so that one does
   * not cost every hold. At least 100 milliseconds.
   */
  readonly lease?: Duration.Input | undefined
  /**
   * How long before its end a lease is given up, so that finalizers are done before anyone else is granted. Default 10 %
   * of the lease, at least 1 second, and at most half of the lease.
   */
  readonly margin?: Duration.Input | undefined
  /** How many parts the namespace has, 1 to 1,024. Default 16. The same for all coordinators of a namespace. */
  readonly partitions?: number | undefined
  /** After which time without a reply a connection is taken for dead. Default 3 seconds, at most a third of the lease. */
  readonly requestTimeout?: Duration.Input | undefined
  readonly batch?: {
    /** Requests in one call. Default 256: more would block Redis for longer than a millisecond. */
    readonly maxRequests?: number | undefined
    /** Requests that wait to be sent, per partition. Default 65,536; beyond it they fail with `Overloaded`. */
    readonly maxPending?: number | undefined
  } | undefined
}

const count = (value: number, what: string, min: number, max: number): number => {
  if (!Number.isInteger(value) || value < min || value > max) {
    throw new RangeError(`${what} must be a whole number from ${min} to ${max}`)
  }
  return value
}

const settingsOf = (options: Options) => {
  const millis = (input: Duration.Input, what: string, min: number, max: number) => {
    const value = Duration.toMillis(Duration.fromInputUnsafe(input))
    if (!(value >= min && value <= max)) throw new RangeError(`${what} must be from ${min} to ${max} milliseconds`)
    return Math.ceil(value)
  }
  const lease = millis(options.lease ?? "15 seconds", "lease", 100, 86_400_000)
  const margin = millis(
    options.margin ?? Math.min(lease / 2, Math.max(1000, lease / 10)),
    "margin (of this lease)",
    0,
    lease / 2
  )
  const name = options.name ?? `${hostname()}:${process.pid}`
  if (typeof name !== "string" || name.length === 0 || name.length > 256 || !name.isWellFormed()) {
    throw new RangeError("name must be 1 to 256 characters of well-formed Unicode")
  }
  return {
    namespace: checkNamespace(options.namespace ?? "lockstep"),
    name,
    lease,
    margin,
    partitions: count(options.partitions ?? 16, "partitions", 1, 1024),
    requestTimeout: options.requestTimeout === undefined
      ? Math.min(3000, Math.floor(lease / 3))
      : millis(options.requestTimeout, "requestTimeout (of this lease)", 10, lease / 3),
    maxBatch: count(options.batch?.maxRequests ?? 256, "batch.maxRequests", 1, 4096),
    maxPending: count(options.batch?.maxPending ?? 65_536, "batch.maxPending", 1, 16_777_216)
  }
}

/**
 * Starts a coordinator. It has loaded its actors into Redis and opened a first session when it returns.
 *
 * @category constructors
 * @since 0.1.0
 */
export const make: (
  options?: Options | undefined
) => Effect.Effect<Coordinator["Service"], CoordinatorError, Redis.Redis | Scope.Scope> = Effect.fnUntraced(
  function*(options = {}) {
    const settings = settingsOf(options)
    const connections = connectionsOf(yield* Redis.Redis)
    const context = yield* Effect.context<never>()
    const run = Effect.runForkWith(context)
    const transitions = yield* PubSub.sliding<SessionTransition>(1024)
    const about = JSON.stringify({ name: settings.name, host: hostname(), pid: process.pid, since: Date.now() })

    const kernel = yield* Effect.acquireRelease(
      Effect.sync(() =>
        new Kernel(connections, settings, about, {
          log: (level, message, cause) => {
            const text = cause === undefined
              ? message
              : `${message}: ${cause instanceof Error ? cause.message : String(cause)}`
            run(
              Effect.logWithLevel(level)(text).pipe(
                Effect.annotateLogs({ namespace: settings.namespace, node: settings.name })
              )
            )
          },
          transition: (partition, id, from, to, reason) => {
            PubSub.publishUnsafe(transitions, { partition, id, from, to, reason })
          },
          metrics: kernelMetrics(context)
        })
      ),
      (kernel) => Effect.promise(() => kernel.close())
    )
    yield* Effect.tryPromise({
      try: () => kernel.partitionAt(0).opened(),
      catch: (cause) => cause as CoordinatorError
    }).pipe(
      Effect.timeoutOrElse({
        duration: Duration.millis(settings.requestTimeout * 3),
        orElse: () =>
          Effect.fail(
            new CoordinatorError({
              reason: new Redis.RedisError({ reason: new Redis.Timeout({ command: "FCALL" }) })
            })
          )
      })
    )
    const coordinator = Coordinator.of({
      namespace: settings.namespace,
      name: settings.name,
      lease: Duration.millis(settings.lease),
      margin: Duration.millis(settings.margin),
      sessions: Effect.sync(() =>
        kernel.partitions.flatMap((partition) =>
          partition === undefined ? [] : [{
            partition: partition.index,
            id: partition.session?.id,
            state: partition.phase,
            claims: partition.claims.size
          }]
        )
      ),
      changes: Stream.fromPubSub(transitions)
    })
    register(coordinator, kernel)
    return coordinator
  }
)

/**
 * A coordinator over a `Redis` connection.
 *
 * @category layers
 * @since 0.1.0
 */
export const layer = (options?: Options | undefined): Layer.Layer<Coordinator, CoordinatorError, Redis.Redis> =>
  Layer.effect(Coordinator, make(options))

/**
 * As `layer`, with options from `Config`.
 *
 * @category layers
 * @since 0.1.0
 */
export const layerConfig = (
  options: Config.Wrap<Options>
): Layer.Layer<Coordinator, CoordinatorError | Config.ConfigError, Redis.Redis> =>
  Layer.effect(Coordinator, Effect.flatMap(Config.unwrap(options), make))

/**
 * A coordinator over an embedded Redis of its own, for development, demos and tests. It provides the connection too.
 *
 * @category layers
 * @since 0.1.0
 */
export const layerEmbedded = (options?: Options | undefined) =>
  Layer.provideMerge(layer(options), Redis.layerEmbedded())
