/**
 * A process's sessions with the partition actors in Redis. Every primitive needs a coordinator.
 *
 * A coordinator opens a *session* with a partition when the partition is first used. The process's holds, waits and memberships
 * belong to its sessions. One heartbeat renews a session, for any number of holds.
 *
 * **Guarantees**
 *
 * - Requests are batched, one batch in flight per partition, and executed exactly once, also across reconnects.
 * - When a session cannot be renewed in time, or Redis turns out to have forgotten it, it is *lost*. Every hold fails with
 *   `LeaseLost`, and the programs under them are interrupted. A new session starts by itself, and waiters enter their queues
 *   again in it.
 * - Closing the scope interrupts the programs under holds. Every hold is released when its programs have ended, or its scope is
 *   closed, at the latest after `margin`. Closing takes at most `margin` and `requestTimeout`, also when Redis hangs.
 * - After a crash, holds come back when the lease has run out.
 *
 * **Gotchas**
 *
 * - All coordinators of a namespace need the same number of `partitions`. A coordinator with another number is refused while one
 *   of them is alive. So is a process that goes on after the namespace has got another number.
 * - One coordinator for a namespace is enough for a process. Two have sessions of their own, and a warning is logged.
 * - A session that is `suspended` (a renewal has failed, none has succeeded since) is still trusted until its lease runs
 *   out. Programs that prefer to stop early can watch `changes`.
 * - If the last coordinator of a namespace is killed, its keys stay in Redis, expired, until another coordinator uses
 *   that partition, or for a day.
 *
 * @since 0.1.0
 */

import * as Config from "effect/Config"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as PubSub from "effect/PubSub"
import type * as Scope from "effect/Scope"
import * as Stream from "effect/Stream"
import { CoordinatorError } from "./internal/actor/errors.ts"
import type { Hooks, Settings } from "./internal/actor/hooks.ts"
import { Kernel, marginOf } from "./internal/actor/kernel.ts"
import { checkNamespace } from "./internal/actor/keys.ts"
import type { Phase } from "./internal/actor/session.ts"
import {
  channelAt,
  Coordinator,
  duration,
  Places,
  register,
  type SessionTransition,
  type Space
} from "./internal/hold/place.ts"
import { CurrentIo, giveUpAfter, type Io, live, millisIn } from "./internal/io.ts"
import { kernelMetrics } from "./internal/metrics.ts"
import { connectionsOf } from "./internal/redis/connection.ts"
import { messageOf } from "./internal/text.ts"
import * as Redis from "./Redis.ts"

/**
 * The states of a session.
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
export type SessionState = Phase

export type {
  /**
   * @category models
   * @since 0.1.0
   */
  SessionInfo as Session,
  /**
   * @category models
   * @since 0.1.0
   */
  SessionTransition
} from "./internal/hold/place.ts"

export {
  /**
   * @category services
   * @since 0.1.0
   */
  Coordinator
} from "./internal/hold/place.ts"

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
 * @category options
 * @since 0.1.0
 */
export interface Options {
  /** Separates this system from others in the same Redis: 1 to 64 of `A-Z a-z 0-9 _ . : -`. Default `lockstep`. */
  readonly namespace?: string | undefined
  /** Shown to operators. Default `host:pid`. */
  readonly name?: string | undefined
  /**
   * How long a hold outlives a process that died. Default 15 seconds: longer than a usual fail-over, so that one does
   * not cost every hold. At least 100 milliseconds.
   */
  readonly lease?: Duration.Input | undefined
  /**
   * How long before its end a lease is treated as lost, so that finalizers are done before any other process is granted. Default
   * 10 % of the lease, at least 1 second, and at most half of the lease.
   */
  readonly margin?: Duration.Input | undefined
  /** How many parts the namespace has, 1 to 1,024. Default 16. The same for all coordinators of a namespace. */
  readonly partitions?: number | undefined
  /**
   * After which time without a reply a connection is taken for dead, and a question fails while Redis is away. Default 3
   * seconds, at most a third of the lease.
   */
  readonly requestTimeout?: Duration.Input | undefined
  /**
   * How long a call waits for other processes where it does not say; then it fails with `WaitTimeout`. It does not bound the wait for
   * the results of jobs, flows and batches, nor singletons. Default: as long as it takes.
   */
  readonly wait?: Duration.Input | undefined
  /** How long locks, permits and the like may be held where a call does not say. Default: as long as the effect runs. */
  readonly maxHold?: Duration.Input | undefined
  readonly batch?: {
    /** Requests in one call. Default 256: more would block Redis for longer than a millisecond. */
    readonly maxRequests?: number | undefined
    /**
     * Requests that wait to be sent, per partition, and questions that wait for an answer. Default 65,536; beyond it new ones fail with
     * `Overloaded`.
     */
    readonly maxPending?: number | undefined
  } | undefined
}

const count = (value: number, what: string, min: number, max: number): number => {
  if (!Number.isInteger(value) || value < min || value > max) {
    throw new RangeError(`${what} must be a whole number from ${min} to ${max}`)
  }
  return value
}

const settingsOf = (options: Options, { host, pid }: Io): Settings => {
  const millis = (input: Duration.Input, what: string, min: number, max: number) => {
    const value = millisIn(input)
    if (!(value >= min && value <= max)) throw new RangeError(`${what} must be from ${min} to ${max} milliseconds`)
    return Math.ceil(value)
  }
  for (const [given, what] of [[options, "options"], [options.batch, "batch"]] as const) {
    if (given !== undefined && (typeof given !== "object" || given === null)) {
      throw new RangeError(`${what} must be an object`)
    }
  }
  const lease = millis(options.lease ?? "15 seconds", "lease", 100, 43_200_000)
  const name = options.name ?? `${host}:${pid}`
  if (typeof name !== "string" || name.length === 0 || name.length > 256 || !name.isWellFormed()) {
    throw new RangeError("name must be 1 to 256 characters of well-formed Unicode")
  }
  return {
    namespace: checkNamespace(options.namespace ?? "lockstep"),
    name,
    lease,
    margin: millis(options.margin ?? marginOf(lease), "margin (of this lease)", 0, lease / 2),
    partitions: count(options.partitions ?? 16, "partitions", 1, 1024),
    requestTimeout: options.requestTimeout === undefined
      ? Math.min(3000, Math.floor(lease / 3))
      : millis(options.requestTimeout, "requestTimeout (of this lease)", 10, lease / 3),
    maxBatch: count(options.batch?.maxRequests ?? 256, "batch.maxRequests", 1, 4096),
    maxPending: count(options.batch?.maxPending ?? 65_536, "batch.maxPending", 1, 16_777_216)
  }
}

// Of the coordinators of this process.
const homes = new Set<Kernel["home"]>()

const counted = ({ home, hooks, settings }: Kernel): void => {
  homes.add(home)
  const count = [...homes].filter((other) => other.isSame(home)).length
  if (count === 1) return
  hooks.log(
    "Warn",
    `this process has ${count} coordinators of the namespace ${
      JSON.stringify(settings.namespace)
    }: each has sessions of its own, so provide one layer once`
  )
}

// Transitions of each partition that a slow subscriber may leave unread. The whole buffer is allocated, also without subscribers.
const unread = 16

/** The reports of the kernel go to the context that the coordinator was made in. */
const hooksOf = Effect.fnUntraced(function*({ name, namespace }: Settings, changes: Transitions) {
  const context = yield* Effect.context<never>()
  const run = Effect.runForkWith(context)
  const hooks: Hooks = {
    log: (level, message, cause) => {
      const text = cause === undefined
        ? message
        : `${message}: ${messageOf(cause)}`
      run(Effect.annotateLogs(Effect.logWithLevel(level)(text), { namespace, node: name }))
    },
    transition: (partition, id, from, to, reason) => {
      PubSub.publishUnsafe(changes, { partition, id, from, to, reason })
    },
    metrics: kernelMetrics(context)
  }
  return hooks
})

/** Transitions, and behind them the end: nothing. */
type Transitions = PubSub.PubSub<SessionTransition | undefined>

const serviceOf = (kernel: Kernel, changes: Transitions): Coordinator["Service"] => {
  const { lease, margin, name, namespace } = kernel.settings
  return Coordinator.of({
    namespace,
    name,
    lease: Duration.millis(lease),
    margin: Duration.millis(margin),
    sessions: Effect.sync(() =>
      Array.from(kernel.channels(), (channel) => ({
        partition: channel.index,
        id: channel.session?.id,
        state: channel.phase,
        lease: Duration.millis(channel.lease),
        claims: channel.tenant.size
      }))
    ),
    changes: Stream.suspend(() =>
      kernel.isClosed()
        ? Stream.empty
        : Stream.takeWhile(Stream.fromPubSub(changes), (transition) => transition !== undefined) as Stream.Stream<
          SessionTransition
        >
    )
  })
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
    const io = yield* CurrentIo
    const settings = settingsOf(options, io)
    const wait = options.wait === undefined ? undefined : duration(options.wait, "wait")
    const maxHold = options.maxHold === undefined ? undefined : duration(options.maxHold, "maxHold")
    const connections = connectionsOf(yield* Redis.Redis)
    const changes = yield* PubSub.sliding<SessionTransition | undefined>(unread * settings.partitions)
    const hooks = yield* hooksOf(settings, changes)
    const about = JSON.stringify({ name: settings.name, host: io.host, pid: io.pid, since: io.wall() })
    const kernel = yield* Effect.acquireRelease(
      Effect.sync(() => new Kernel(connections, settings, about, hooks, io)),
      (kernel) =>
        Effect.andThen(
          Effect.promise(() => kernel.close()),
          Effect.sync(() => {
            homes.delete(kernel.home)
            PubSub.publishUnsafe(changes, undefined)
          })
        )
    )
    const space: Space = { kernel, places: new Places(), wait, maxHold }
    const first = channelAt(space, 0)
    let late: Redis.RedisError | undefined
    const opening = Effect.tryPromise({
      try: () => first.opened((cause) => void (late = cause)),
      catch: (cause) => cause as CoordinatorError
    })
    const unanswered = (): CoordinatorError => {
      const { name, namespace } = settings
      if (late !== undefined && late.reason._tag !== "Timeout") return kernel.transport.late(undefined, late)
      return new CoordinatorError({
        reason: new Redis.Timeout({ command: "FCALL", kind: "coordinator", name, namespace })
      })
    }
    const patience = Effect.callback<never, CoordinatorError>((resume) => {
      const timer = giveUpAfter(io, settings.requestTimeout * 3, () => resume(Effect.fail(unanswered())))
      return Effect.sync(timer.cancel)
    })
    yield* Effect.raceFirst(opening, patience)
    // Simulated processes are processes of their own.
    if (io === live) counted(kernel)
    const coordinator = serviceOf(kernel, changes)
    register(coordinator, space)
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
