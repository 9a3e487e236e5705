/**
 * A latch that several processes share: it opens when it has been counted down to zero, and all waiters pass.
 *
 * It exists for as long as a process has it open, and for `timeToLive` afterwards if anything was counted. So processes may
 * come and go one after another, and late ones find it open.
 *
 * **Guarantees**
 *
 * - All waiters pass when it is opened, by one push to each process however many fibers wait there. Nothing polls. A fiber
 *   that comes later passes at once.
 * - A count with an `id` counts once, whichever process makes it and however often, also across crashes. Without one, each
 *   call counts once, also when connections break.
 * - A wait is only a wait: when it is interrupted or times out, it leaves nothing behind.
 * - After Redis has lost its data, or a fail-over some of it, the processes that have the latch open create it again. They
 *   repeat their own counts, and open it if it was open. A reset that a fail-over has lost is made again.
 *
 * **Gotchas**
 *
 * - **The state outlives the program.** A program that is started again within `timeToLive` finds the counts of the
 *   previous run, and an open latch lets it pass at once. Where each run counts anew, give it a `run`, or make it `fresh`.
 * - With `fresh`, a process that was killed has the latch open until its lease has run out. A `run` needs no such wait.
 * - When Redis loses its data, the counts of processes that have closed the latch are lost.
 * - `remaining` and `isOpen` ask Redis; waiters are notified a moment later.
 * - Closing the scope of the latch interrupts its waiters. Closing the coordinator fails them with `CoordinatorClosed`.
 * - `countDown` and `reset` are made again if the session is lost meanwhile, unless the latch was reset since.
 * - Redis stores each counted `id` until the latch opens or is reset. The state of calls without one is stored once for
 *   each process. A process remembers its own counts for as long, by id or the last 4,096 and the sum of those before.
 *
 * **Example** (Waiting for three workers, in any processes)
 *
 * ```ts
 * import { Coordinator, CountDownLatch } from "lockstep"
 * import { Effect } from "effect"
 *
 * const program = Effect.gen(function*() {
 *   const ready = yield* CountDownLatch.make({ name: "ready", count: 3, run: "deploy-17" })
 *   yield* ready.countDown({ id: "worker-1" })
 *   yield* ready.waitFor({ wait: "1 minute" })
 * })
 *
 * program.pipe(Effect.scoped, Effect.provide(Coordinator.layerEmbedded()), Effect.runPromise)
 * ```
 *
 * @since 0.1.0
 */

import type * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Schema from "effect/Schema"
import type * as Scope from "effect/Scope"
import { Coordinator } from "./Coordinator.ts"
import { coordinatorReasons } from "./internal/actor/errors.ts"
import { checkName } from "./internal/actor/keys.ts"
import { describe, WaitTimeout } from "./internal/hold/loss.ts"
import { flag, mismatchPolicies, oneOf, placeOf, spaceOf } from "./internal/hold/place.ts"
import { service, type ServiceClass as AnyServiceClass } from "./internal/hold/service.ts"
import { Superseded } from "./internal/hold/superseded.ts"
import { SharedLatch } from "./internal/sync/latch.ts"

/**
 * @category type IDs
 * @since 0.1.0
 */
export const TypeId: TypeId = "~lockstep/CountDownLatch"

/**
 * @category type IDs
 * @since 0.1.0
 */
export type TypeId = "~lockstep/CountDownLatch"

/**
 * @category options
 * @since 0.1.0
 */
export interface WaitOptions {
  /** How long to wait; then it fails with `WaitTimeout`. Default: that of the coordinator, as long as it takes. */
  readonly wait?: Duration.Input | undefined
}

/**
 * @category models
 * @since 0.1.0
 */
export interface CountDownLatch {
  readonly [TypeId]: TypeId
  readonly name: string
  /** Counts down by one, or `by`; answers the remaining count. Never below zero. */
  readonly countDown: (options?: {
    /** A whole number from 1 on. Default 1. */
    readonly by?: number | undefined
    /** Counts once with this id until the latch opens or is reset; up to 512 bytes. Default: each call counts. */
    readonly id?: string | undefined
  }) => Effect.Effect<number, CountDownLatchError>
  /**
   * Waits until it is open, for as long as the coordinator's `wait` says. A waiter passes also if the latch is reset right
   * after it was opened. It is interrupted when the scope of the latch is closed.
   */
  readonly await: Effect.Effect<void, CountDownLatchError>
  /** As `await`, with a `wait` of its own. */
  readonly waitFor: (options: WaitOptions) => Effect.Effect<void, CountDownLatchError>
  /** The remaining count. */
  readonly remaining: Effect.Effect<number, CountDownLatchError>
  readonly isOpen: Effect.Effect<boolean, CountDownLatchError>
  /** Closes it, with everything to be counted; waiters wait on. */
  readonly reset: Effect.Effect<void, CountDownLatchError>
}

/**
 * @category options
 * @since 0.1.0
 */
export interface Options {
  /** A whole number from 1 to 2^31 - 1. */
  readonly count: number
  /**
   * What to do when other processes have it open with another count. `fail` fails with `CountMismatch`, `keep` keeps the
   * count that it has, and `resize` changes it for all processes. When it is resized, the remaining count moves by the
   * difference, and at zero the latch opens; an open one stays open. Default `fail`. When no process has it open, it is
   * resized, unless the option says `keep`.
   */
  readonly onMismatch?: "fail" | "keep" | "resize" | undefined
  /** How long it is kept after the last process has closed it. Default 1 hour. The last one to make it decides. */
  readonly timeToLive?: Duration.Input | undefined
  /**
   * The run that the state belongs to, up to 512 bytes: the first process with another one creates the latch anew. Members
   * of the former run then fail with `Superseded`. Default: the run that it belongs to, whichever that is.
   */
  readonly run?: string | undefined
  /** Create it anew if no process has it open. Default `false`: the kept state is found. */
  readonly fresh?: boolean | undefined
  /**
   * How long a process that died still counts as having it open. Default: the coordinator's lease. Another one is a second
   * session, which is renewed by itself.
   */
  readonly lease?: Duration.Input | undefined
}

export {
  /**
   * The latch was created anew for another run. Waiters and calls of the former run fail with it.
   *
   * @category errors
   * @since 0.1.0
   */
  Superseded
} from "./internal/hold/superseded.ts"

/**
 * Other processes have the latch open with another count.
 *
 * @category errors
 * @since 0.1.0
 */
export class CountMismatch extends Schema.Error<CountMismatch>("lockstep/CountDownLatch/CountMismatch")({
  _tag: Schema.tag("CountMismatch"),
  name: Schema.String,
  namespace: Schema.String,
  count: Schema.Number,
  existing: Schema.Number
}) {
  override get message(): string {
    return `${describe("countDownLatch", this.name, this.namespace)} is open elsewhere with a count of ` +
      `${this.existing}, not ${this.count}: use the same count, or say with \`onMismatch\` which one is meant.`
  }
}

/**
 * @category errors
 * @since 0.1.0
 */
export class CountDownLatchError
  extends Schema.Error<CountDownLatchError>("lockstep/CountDownLatch/CountDownLatchError")({
    _tag: Schema.tag("CountDownLatchError"),
    reason: Schema.Union([CountMismatch, Superseded, WaitTimeout, ...coordinatorReasons])
  })
{
  override get message(): string {
    return this.reason.message
  }
}

const fail = (reason: CountDownLatchError["reason"]): CountDownLatchError => new CountDownLatchError({ reason })

const mostCounts = 2 ** 31 - 1

const checkCount = (count: number, what: string): number => {
  if (!Number.isInteger(count) || count < 1 || count > mostCounts) {
    throw new RangeError(`${what} must be a whole number from 1 to ${mostCounts}`)
  }
  return count
}

/**
 * Creates the latch, or joins it. Fails with `CountMismatch` when other processes have it open with another count. It is
 * open for as long as the scope is.
 *
 * @category constructors
 * @since 0.1.0
 */
export const make = (
  options: Options & { readonly name: string }
): Effect.Effect<CountDownLatch, CountDownLatchError, Coordinator | Scope.Scope> =>
  Effect.flatMap(Coordinator, (coordinator) => {
    const { count, fresh = false, lease, name, onMismatch = "fail", run, timeToLive = "1 hour" } = options
    const place = placeOf(spaceOf(coordinator), "countDownLatch", name, "name", lease)
    const { namespace } = place.space.kernel.settings
    const latch = new SharedLatch({
      place,
      module: "CountDownLatch",
      total: checkCount(count, "count"),
      open: false,
      timeToLive,
      run,
      fresh: flag(fresh, "fresh"),
      onMismatch: oneOf(onMismatch, "onMismatch", mismatchPolicies),
      fail,
      mismatch: (existing) => fail(new CountMismatch({ name, namespace, count, existing }))
    })
    return Effect.as(latch.join(), {
      [TypeId]: TypeId,
      name,
      countDown: ({ by = 1, id } = {}) =>
        Effect.suspend(() => latch.count(checkCount(by, "by"), id === undefined ? undefined : checkName(id, "id"))),
      await: latch.waitFor(),
      waitFor: latch.waitFor,
      remaining: latch.remaining,
      isOpen: Effect.map(latch.remaining, (remaining) => remaining === 0),
      reset: latch.reset
    })
  })

/**
 * The class that `Service` makes.
 *
 * @category models
 * @since 0.1.0
 */
export interface ServiceClass<in out Self, in out Name extends string>
  extends AnyServiceClass<Self, `lockstep/CountDownLatch/${Name}`, CountDownLatch, CountDownLatchError, Coordinator>
{}

/**
 * A latch as a typed service: `class Ready extends CountDownLatch.Service<Ready>()("ready", { count: 3 }) {}`, with
 * `Ready.layer`.
 *
 * @category constructors
 * @since 0.1.0
 */
export const Service =
  <Self>() => <const Name extends string>(name: Name, options: Options): ServiceClass<Self, Name> =>
    service<Self, "CountDownLatch", Name, CountDownLatch, CountDownLatchError, Coordinator | Scope.Scope>(
      "CountDownLatch",
      name,
      make({ ...options, name })
    )
