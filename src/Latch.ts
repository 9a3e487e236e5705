/**
 * A latch that several processes share: open, all pass; closed, they wait. The distributed twin of `effect/Latch`.
 *
 * It exists for as long as a process has it, and for `timeToLive` afterwards unless it was closed from the start.
 *
 * **Guarantees**
 *
 * - All waiters pass when it is opened, also if it is closed right after, by one push to each process. Nothing polls.
 * - `release` lets the present waiters pass, and leaves it closed.
 * - After Redis has lost its data, or a fail-over some of it, the processes that have the latch create it again. It is then open
 *   if it was open.
 *
 * **Gotchas**
 *
 * - **The state outlives the program.** A program that is started again within `timeToLive` finds the latch open if the
 *   previous run has opened it. Where each run begins anew, give it a `run`, or make it `fresh`.
 * - With `fresh`, a process that was killed has the latch until its lease has run out. A `run` needs no such wait.
 * - The process that closes it does not know which waiters are still on the way: a latch says what may begin, not what has
 *   finished.
 * - A waiter that comes while a `release` is on the way to its process may pass with the others.
 * - `isOpen` asks Redis; waiters are notified a moment later.
 * - Closing the scope of the latch interrupts its waiters. Closing the coordinator fails them with `CoordinatorClosed`.
 * - `open`, `close` and `release` are made again if the session is lost meanwhile, and answer what they did then. `open` and `close` are
 *   not made again behind another `close`; `release` can be executed twice.
 *
 * **Example** (All start at once)
 *
 * ```ts
 * import { Coordinator, Latch } from "lockstep"
 * import { Effect } from "effect"
 *
 * const program = Effect.gen(function*() {
 *   const start = yield* Latch.make({ name: "start", fresh: true })
 *   yield* Effect.forkScoped(Effect.delay(start.open, "1 second"))
 *   yield* Effect.log("off we go").pipe(Latch.whenOpen(start))
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
import { WaitTimeout } from "./internal/hold/loss.ts"
import { flag, placeOf, spaceOf } from "./internal/hold/place.ts"
import { service, type ServiceClass as AnyServiceClass } from "./internal/hold/service.ts"
import { Superseded } from "./internal/hold/superseded.ts"
import { SharedLatch } from "./internal/sync/latch.ts"

/**
 * @category type IDs
 * @since 0.1.0
 */
export const TypeId: TypeId = "~lockstep/Latch"

/**
 * @category type IDs
 * @since 0.1.0
 */
export type TypeId = "~lockstep/Latch"

/**
 * @category options
 * @since 0.1.0
 */
export interface WaitOptions {
  /** How long to wait; then it fails with `WaitTimeout`. Default: that of the coordinator, as long as it takes. */
  readonly wait?: Duration.Input | undefined
}

/**
 * Named as `effect/Latch`.
 *
 * @category models
 * @since 0.1.0
 */
export interface Latch {
  readonly [TypeId]: TypeId
  readonly name: string
  /** Opens it: the present waiters pass, and those that come before it is closed. Answers whether it was closed. */
  readonly open: Effect.Effect<boolean, LatchError>
  /** Lets the present waiters pass without opening it. Answers whether it was closed. */
  readonly release: Effect.Effect<boolean, LatchError>
  /** Closes it. Answers whether it was open. */
  readonly close: Effect.Effect<boolean, LatchError>
  /**
   * Waits until it is open, or until the present waiters are released, for as long as the coordinator's `wait` says. It is
   * interrupted when the scope of the latch is closed.
   */
  readonly await: Effect.Effect<void, LatchError>
  /** As `await`, with a `wait` of its own. */
  readonly waitFor: (options: WaitOptions) => Effect.Effect<void, LatchError>
  /** Waits as `await`, and then runs the effect. */
  readonly whenOpen: <A, E, R>(
    self: Effect.Effect<A, E, R>,
    options?: WaitOptions | undefined
  ) => Effect.Effect<A, E | LatchError, R>
  readonly isOpen: Effect.Effect<boolean, LatchError>
}

/**
 * @category options
 * @since 0.1.0
 */
export interface Options {
  /** Whether it is open when it is created. Default `false`. */
  readonly open?: boolean | undefined
  /** How long it is kept after the last process has left it. Default 1 hour. The last one to make it decides. */
  readonly timeToLive?: Duration.Input | undefined
  /**
   * The run that the state belongs to, up to 512 bytes: the first process with another one creates the latch anew. Members of the
   * former run then fail with `Superseded`. Default: the run that it belongs to, whichever that is.
   */
  readonly run?: string | undefined
  /** Create it anew if no process has it. Default `false`: the kept state is found. */
  readonly fresh?: boolean | undefined
  /**
   * How long a process that died still counts as having it. Default: the coordinator's lease. Another one is a second
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
 * @category errors
 * @since 0.1.0
 */
export class LatchError extends Schema.Error<LatchError>("lockstep/Latch/LatchError")({
  _tag: Schema.tag("LatchError"),
  reason: Schema.Union([Superseded, WaitTimeout, ...coordinatorReasons])
}) {
  override get message(): string {
    return this.reason.message
  }
}

const fail = (reason: LatchError["reason"]): LatchError => new LatchError({ reason })

/**
 * Makes the latch, or joins it as it is. It is there for as long as the scope is open.
 *
 * @category constructors
 * @since 0.1.0
 */
export const make = (
  options: Options & { readonly name: string }
): Effect.Effect<Latch, LatchError, Coordinator | Scope.Scope> =>
  Effect.flatMap(Coordinator, (coordinator) => {
    const { fresh = false, lease, name, open = false, run, timeToLive = "1 hour" } = options
    const latch = new SharedLatch<LatchError>({
      place: placeOf(spaceOf(coordinator), "latch", name, "name", lease),
      module: "Latch",
      total: 1,
      open: flag(open, "open"),
      timeToLive,
      run,
      fresh: flag(fresh, "fresh"),
      onMismatch: "keep",
      fail,
      // All have the same count.
      mismatch: (existing) => {
        throw new Error(`a latch has a count of 1, not ${existing}`)
      }
    })
    return Effect.as(latch.join(), {
      [TypeId]: TypeId,
      name,
      open: latch.open,
      release: latch.release,
      close: latch.close,
      await: latch.waitFor(),
      waitFor: latch.waitFor,
      whenOpen: (self, options) => Effect.andThen(latch.waitFor(options), self),
      isOpen: Effect.map(latch.remaining, (remaining) => remaining === 0)
    })
  })

/**
 * Opens the latch; answers whether it was closed.
 *
 * @category combinators
 * @since 0.1.0
 */
export const open = (self: Latch): Effect.Effect<boolean, LatchError> => self.open

/**
 * Lets the present waiters pass without opening the latch; answers whether it was closed.
 *
 * @category combinators
 * @since 0.1.0
 */
export const release = (self: Latch): Effect.Effect<boolean, LatchError> => self.release

/**
 * Closes the latch; answers whether it was open.
 *
 * @category combinators
 * @since 0.1.0
 */
export const close = (self: Latch): Effect.Effect<boolean, LatchError> => self.close

const _await = (self: Latch): Effect.Effect<void, LatchError> => self.await

export {
  /**
   * Waits until the latch is open, or until the present waiters are released.
   *
   * @category getters
   * @since 0.1.0
   */
  _await as await
}

/**
 * Waits until the latch is open, or until the present waiters are released, and then runs the effect.
 *
 * @category combinators
 * @since 0.1.0
 */
export const whenOpen: {
  <A, E, R>(
    self: Latch,
    effect: Effect.Effect<A, E, R>,
    options?: WaitOptions | undefined
  ): Effect.Effect<A, E | LatchError, R>
  (
    self: Latch,
    options?: WaitOptions | undefined
  ): <A, E, R>(effect: Effect.Effect<A, E, R>) => Effect.Effect<A, E | LatchError, R>
} =
  ((self: Latch, first?: Effect.Effect<unknown, unknown, unknown> | WaitOptions, options?: WaitOptions) =>
    Effect.isEffect(first)
      ? self.whenOpen(first, options)
      : (effect: Effect.Effect<unknown, unknown, unknown>) => self.whenOpen(effect, first)) as never

/**
 * Whether the latch is open, by Redis's word.
 *
 * @category getters
 * @since 0.1.0
 */
export const isOpen = (self: Latch): Effect.Effect<boolean, LatchError> => self.isOpen

/**
 * The class that `Service` makes.
 *
 * @category models
 * @since 0.1.0
 */
export interface ServiceClass<in out Self, in out Name extends string>
  extends AnyServiceClass<Self, `lockstep/Latch/${Name}`, Latch, LatchError, Coordinator>
{}

/**
 * A latch as a typed service: `class Start extends Latch.Service<Start>()("start") {}`, with `Start.layer`.
 *
 * @category constructors
 * @since 0.1.0
 */
export const Service =
  <Self>() => <const Name extends string>(name: Name, options?: Options): ServiceClass<Self, Name> =>
    service<Self, "Latch", Name, Latch, LatchError, Coordinator | Scope.Scope>(
      "Latch",
      name,
      make({ ...options, name })
    )
