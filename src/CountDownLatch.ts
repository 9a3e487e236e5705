/**
 * A latch that several processes share: it opens when it has been counted down to zero, and everybody who waits passes.
 *
 * It exists for as long as somebody has it open, and for `keep` afterwards if anything was counted, so that processes may
 * come and go one after another, and late ones find it open.
 *
 * **Guarantees**
 *
 * - Whoever awaits it passes when it is opened, by one push to each process however many fibers wait there. Nothing polls.
 *   Who comes later passes at once.
 * - A count with an `id` counts once, whoever makes it and however often, also across crashes. Without one, each call
 *   counts once, also when connections break.
 * - A wait is only a wait: interrupted or timed out (`Effect.timeout`), it leaves nothing behind.
 * - After Redis has lost its data, whoever has it open creates it again and repeats what it had counted itself; if it was
 *   open, it is opened.
 *
 * **Gotchas**
 *
 * - What was counted by processes that have closed it is gone when Redis loses its data.
 * - `count` and `isOpen` ask Redis; `await` is told, a moment later.
 * - `reset` can be made twice if the session is lost meanwhile.
 *
 * **Example** (Waiting for three workers, in whatever process they are)
 *
 * ```ts
 * import { Coordinator, CountDownLatch } from "lockstep"
 * import { Effect } from "effect"
 *
 * const program = Effect.gen(function*() {
 *   const ready = yield* CountDownLatch.make({ name: "ready", count: 3 })
 *   yield* ready.countDown({ id: "worker-1" })
 *   yield* ready.await
 * })
 *
 * program.pipe(Effect.scoped, Effect.provide(Coordinator.layerEmbedded()), Effect.runPromise)
 * ```
 *
 * @since 0.1.0
 */
import * as Context from "effect/Context"
import type * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Schema from "effect/Schema"
import type * as Scope from "effect/Scope"
import { Coordinator } from "./Coordinator.ts"
import { CoordinatorError } from "./internal/actor/errors.ts"
import { kernelOf } from "./internal/actor/kernel.ts"
import { checkName } from "./internal/actor/keys.ts"
import { placeOf } from "./internal/hold/held.ts"
import { Latch, type Mismatch } from "./internal/latch.ts"

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
 * @category models
 * @since 0.1.0
 */
export interface CountDownLatch {
  readonly [TypeId]: TypeId
  readonly name: string
  /** Counts down by one, or `by`; answers what is left. Never below zero. */
  readonly countDown: (options?: {
    /** A whole number from 1 on. Default 1. */
    readonly by?: number | undefined
    /** Counts once with this id until the next reset; up to 512 bytes. Default: each call has an id of its own. */
    readonly id?: string | undefined
  }) => Effect.Effect<number, CountDownLatchError>
  /**
   * Waits until it is open. A waiter that was there before passes also if it is reset right after it was opened. It is
   * interrupted when the scope of the latch, or the coordinator, is closed.
   */
  readonly await: Effect.Effect<void>
  /** What is left to count. */
  readonly count: Effect.Effect<number, CountDownLatchError>
  readonly isOpen: Effect.Effect<boolean, CountDownLatchError>
  /** Closes it, with everything left to count; who waits goes on waiting. */
  readonly reset: Effect.Effect<void, CountDownLatchError>
}

/**
 * @category options
 * @since 0.1.0
 */
export interface Options {
  /** A whole number from 1 to 2^31 - 1. */
  readonly count: number
  /** How long it is remembered after the last one has closed it. Default 1 hour. The last one to open it decides. */
  readonly keep?: Duration.Input | undefined
}

/**
 * The latch exists with another count.
 *
 * @category errors
 * @since 0.1.0
 */
export class CountMismatch extends Schema.Error<CountMismatch>("lockstep/CountDownLatch/CountMismatch")({
  _tag: Schema.tag("CountMismatch"),
  name: Schema.String,
  count: Schema.Number,
  existing: Schema.Number
}) {
  override get message(): string {
    return `It exists with a count of ${this.existing}, not ${this.count}: use the same count, or another name.`
  }
}

/**
 * @category errors
 * @since 0.1.0
 */
export class CountDownLatchError
  extends Schema.Error<CountDownLatchError>("lockstep/CountDownLatch/CountDownLatchError")({
    _tag: Schema.tag("CountDownLatchError"),
    reason: Schema.Union([CountMismatch, CoordinatorError])
  })
{
  override get message(): string {
    return this.reason.message
  }
}

const mostCounts = 2 ** 31 - 1

const checkCount = (count: number, what: string): number => {
  if (!Number.isInteger(count) || count < 1 || count > mostCounts) {
    throw new RangeError(`${what} must be a whole number from 1 to ${mostCounts}`)
  }
  return count
}

const failing = (name: string, count: number) => (reason: CoordinatorError | Mismatch): CountDownLatchError =>
  new CountDownLatchError({
    reason: "existing" in reason ? new CountMismatch({ name, count, existing: reason.existing }) : reason
  })

/**
 * Creates the latch, or joins it when it has the same count; with another one it fails with `CountMismatch`. It stays open
 * with the scope.
 *
 * @category constructors
 * @since 0.1.0
 */
export const make = (
  options: Options & { readonly name: string }
): Effect.Effect<CountDownLatch, CountDownLatchError, Coordinator | Scope.Scope> =>
  Effect.flatMap(Coordinator, (coordinator) => {
    const { keep = "1 hour", name } = options
    const total = checkCount(options.count, "count")
    const latch = new Latch(placeOf(kernelOf(coordinator), "latch", name, "name"), total, keep, failing(name, total))
    return Effect.as(latch.join(), {
      [TypeId]: TypeId,
      name,
      countDown: ({ by = 1, id } = {}) =>
        Effect.suspend(() => latch.count(checkCount(by, "by"), id === undefined ? undefined : checkName(id, "id"))),
      await: latch.await,
      count: latch.left,
      isOpen: Effect.map(latch.left, (left) => left === 0),
      reset: latch.reset
    })
  })

/**
 * The class that `Service` makes.
 *
 * @category models
 * @since 0.1.0
 */
export interface ServiceClass<in out Self, in out Id extends string>
  extends Context.ServiceClass<Self, Id, CountDownLatch>
{
  readonly layer: Layer.Layer<Self, CountDownLatchError, Coordinator>
}

/**
 * A latch as a typed service: `class Ready extends CountDownLatch.Service<Ready>()("ready", { count: 3 }) {}`, with
 * `Ready.layer`.
 *
 * @category constructors
 * @since 0.1.0
 */
export const Service = <Self>() => <const Id extends string>(name: Id, options: Options): ServiceClass<Self, Id> => {
  const tag = Context.Service<Self, CountDownLatch>()(name) as unknown as Context.ServiceClass<Self, Id, CountDownLatch>
  return Object.assign(tag, { layer: Layer.effect(tag, make({ ...options, name })) }) as unknown as ServiceClass<
    Self,
    Id
  >
}
