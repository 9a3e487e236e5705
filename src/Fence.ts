/**
 * The enforcing side of fencing tokens: Redis commands that are refused when a newer token has been seen.
 *
 * A lease can be lost without its holder knowing yet: the process was paused, or a packet was late. Its writes then have to be
 * refused by the store that receives them. Here that is one call: the token is compared, and the command runs, in one step.
 *
 * **Guarantees**
 *
 * - Once a command has run with a token, no command with a smaller token runs on that key through this module.
 * - No command is sent for a lease that this process knows to be lost or released.
 * - While there is no connection, a command waits for one, up to the coordinator's `requestTimeout`. A command that may have
 *   been executed is not repeated: it fails with `ConnectionLost` or `Timeout`.
 *
 * **Gotchas**
 *
 * - Only what goes through this module is checked. All writers of a key have to use it, and tokens of one lock.
 * - The newest token of a key is kept beside it, under `{tag}lockstep:fence:key`, for `timeToLive` (default 24 hours) after
 *   the last write. A writer that was away for longer than that is not refused any more.
 * - Databases have the same in SQL: keep the token in the row, and write `UPDATE ... SET ..., token = ? WHERE id = ? AND
 *   token <= ?`. No row was updated when a newer holder has written.
 *
 * **Example** (A write that a former holder cannot make)
 *
 * ```ts
 * import { Fence, Lock } from "lockstep"
 * import { Effect } from "effect"
 *
 * const program = Effect.scoped(Effect.gen(function*() {
 *   const lease = yield* Lock.acquire("report")
 *   yield* Fence.run(lease, "report:latest", "SET", "all is well")
 * }))
 * ```
 *
 * @since 0.1.0
 */

import type * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Schema from "effect/Schema"
import { Coordinator } from "./Coordinator.ts"
import { CoordinatorClosed, CoordinatorError, coordinatorReasons } from "./internal/actor/errors.ts"
import type { Kernel } from "./internal/actor/kernel.ts"
import { guardedKey, resourceOf } from "./internal/actor/keys.ts"
import { coordinatorError } from "./internal/actor/transport.ts"
import { isKnownLost } from "./internal/hold/hold.ts"
import { describe } from "./internal/hold/loss.ts"
import { millis, spaceOf, tokenOf } from "./internal/hold/place.ts"
import { StaleToken } from "./internal/hold/unwritten.ts"
import { checkArguments } from "./internal/redis/command.ts"
import { MissingPermission, RedisError } from "./internal/redis/errors.ts"
import { type Call, call } from "./internal/redis/resp.ts"
import type { Lease } from "./Lease.ts"

export {
  /**
   * A newer token has been seen: another has held the lease since, and has written. Or this process knew that the lease was lost or
   * released. Nothing was written.
   *
   * @category errors
   * @since 0.1.0
   */
  StaleToken
} from "./internal/hold/unwritten.ts"

/**
 * Redis refused the command itself. Nothing was written.
 *
 * @category errors
 * @since 0.1.0
 */
export class CommandRefused extends Schema.Error<CommandRefused>("lockstep/Fence/CommandRefused")({
  _tag: Schema.tag("CommandRefused"),
  command: Schema.String,
  kind: Schema.String,
  name: Schema.String,
  namespace: Schema.String,
  code: Schema.String
}) {
  override get message(): string {
    return `Redis refused ${this.command} of ${describe(this.kind, this.name, this.namespace)} (${this.code}): ` +
      `fix the command or its arguments.`
  }
}

/**
 * @category errors
 * @since 0.1.0
 */
export class FenceError extends Schema.Error<FenceError>("lockstep/Fence/FenceError")({
  _tag: Schema.tag("FenceError"),
  reason: Schema.Union([StaleToken, CommandRefused, ...coordinatorReasons])
}) {
  override get message(): string {
    return this.reason.message
  }
}

const fail = (reason: FenceError["reason"]): FenceError => new FenceError({ reason })

// Lua passes no more than some 8,000 values at once.
const mostArguments = 7000

// The part of a key that Redis Cluster hashes; the whole key if it has no tag.
const tagOf = (key: string): string => {
  const open = key.indexOf("{")
  const close = open < 0 ? -1 : key.indexOf("}", open)
  if (close > open + 1) return key.slice(open + 1, close)
  if (key.includes("}")) {
    throw new RangeError("key has a } but no hash tag, so no other key can be put into its slot: use {tag} in it")
  }
  return key
}

/** The key that keeps the newest token seen for `key`. */
const fenceKey = (key: string): string => `{${tagOf(key)}}lockstep:fence:${key}`

/** Redis may be away for a moment: a command that was not executed is sent again. No other is: a second execution may do harm. */
const write = (
  { isClosed, settings: { namespace }, transport }: Kernel,
  key: string,
  lease: Pick<Lease, "token">,
  fenced: Call,
  signal: AbortSignal
): Promise<unknown> =>
  transport.answered(
    key,
    () =>
      // What the interrupted fiber fails with is not looked at.
      signal.aborted
        ? new Error("interrupted")
        : isKnownLost(lease)
        ? new StaleToken({ ...resourceOf(key), token: lease.token })
        : isClosed()
        ? new CoordinatorError({ reason: new CoordinatorClosed({ namespace }) })
        : undefined,
    () =>
      transport.invoke("_fence", fenced).catch((cause: unknown) => {
        throw cause instanceof RedisError && cause.executed === "unknown" ? coordinatorError(cause, key) : cause
      })
  )

/**
 * Runs one Redis command on `key` unless a newer token than the lease's has been seen there: `command key ...args`, with
 * at most 7,000 arguments. Answers what Redis answers. `withOptions` is the same with options.
 *
 * @category combinators
 * @since 0.1.0
 */
export const run = <A = unknown>(
  lease: Pick<Lease, "token">,
  key: string,
  command: string,
  ...args: ReadonlyArray<string | number>
): Effect.Effect<A, FenceError, Coordinator> => withOptions({})(lease, key, command, ...args)

/**
 * @category combinators
 * @since 0.1.0
 */
export const withOptions = (options: {
  /** How long the newest token is kept after the last write. Default 24 hours. */
  readonly timeToLive?: Duration.Input | undefined
}) =>
<A = unknown>(
  lease: Pick<Lease, "token">,
  key: string,
  command: string,
  ...args: ReadonlyArray<string | number>
): Effect.Effect<A, FenceError, Coordinator> =>
  Effect.flatMap(Coordinator, (coordinator) => {
    if (typeof key !== "string" || key.length === 0 || !key.isWellFormed()) {
      throw new RangeError("key must be a non-empty string of well-formed Unicode")
    }
    if (typeof command !== "string" || command === "") throw new RangeError("command must be the name of a command")
    checkArguments(args)
    // Others cannot be written as UTF-8.
    if (!args.every((arg) => String(arg).isWellFormed())) throw new RangeError("args must be well-formed Unicode")
    if (args.length > mostArguments) throw new RangeError(`args must not be more than ${mostArguments}`)
    const token = tokenOf(lease)
    const timeToLive = Math.ceil(millis(options.timeToLive ?? "24 hours", "timeToLive"))
    const { kernel } = spaceOf(coordinator)
    const guarded = guardedKey(kernel.settings.namespace, key)
    const fenced = call([key, fenceKey(key)], [token, timeToLive, command, ...args])
    return Effect.flatMap(
      Effect.tryPromise({
        try: (signal) => write(kernel, guarded, lease, fenced, signal),
        catch: (cause) => fail(cause instanceof StaleToken ? cause : coordinatorError(cause, guarded).reason)
      }),
      (reply) => {
        const [tag, value] = reply as readonly [string, unknown]
        if (tag === "done") return Effect.succeed(value as A)
        const subject = resourceOf(guarded)
        switch (tag) {
          case "stale":
            return Effect.fail(fail(new StaleToken({ ...subject, token, seen: Number(value) })))
          case "denied":
            return Effect.fail(fail(new MissingPermission({ ...subject, command: String(value).toUpperCase() })))
          default:
            return Effect.fail(fail(new CommandRefused({ ...subject, command, code: String(value) })))
        }
      }
    )
  })
