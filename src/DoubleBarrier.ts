/**
 * A double barrier that several processes share: parties enter a phase together, and leave it together. It is used again and
 * again, phase after phase.
 *
 * A double barrier exists for as long as a process has it open. `make` creates it, or joins one for as many parties.
 *
 * **Guarantees**
 *
 * - No party enters before as many wait as there are parties, no party has left before all of them have, and no two phases
 *   overlap. Each of these is one push to each process, however many fibers wait there. Nothing polls.
 * - A party that dies has left. Inside a phase it leaves when its lease has run out; before that, it does not count any
 *   more, and the others go on waiting.
 * - To be inside is to hold a `Lease`, with one fencing token for all of the phase, larger than that of every phase before.
 *   `withPhase` interrupts its effect when the lease is lost.
 * - A wait is only a wait: interrupted or timed out (`wait`), it leaves nothing behind.
 * - The number of parties can change while processes have it open: see `onMismatch`.
 *
 * **Gotchas**
 *
 * - A party in excess waits for the next phase, which opens when the present one is over and enough wait.
 * - A fiber that enters twice, without leaving, can wait for itself.
 * - Phases are numbered from 1 for as long as a process has the double barrier open, and Redis its data. After a crash of the last
 *   one, the numbers go on for a day.
 * - Closing the scope of `make` does not end waits: a party that waits to enter goes on waiting.
 * - When Redis loses its data, all leases of the phase are lost, and the phase with them.
 *
 * **Example** (All compute, and no party goes on before all have computed)
 *
 * ```ts
 * import { Coordinator, DoubleBarrier } from "lockstep"
 * import { Effect } from "effect"
 *
 * const program = Effect.gen(function*() {
 *   const barrier = yield* DoubleBarrier.make({ name: "step", parties: 2 })
 *   const worker = Effect.log("computing").pipe(barrier.withPhase())
 *   yield* Effect.all([worker, worker], { concurrency: "unbounded" })
 * })
 *
 * program.pipe(Effect.scoped, Effect.provide(Coordinator.layerEmbedded()), Effect.runPromise)
 * ```
 *
 * @since 0.1.0
 */

import type * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import { dual } from "effect/Function"
import * as Schema from "effect/Schema"
import type * as Scope from "effect/Scope"
import { Coordinator } from "./Coordinator.ts"
import { coordinatorReasons } from "./internal/actor/errors.ts"
import * as acquiring from "./internal/hold/acquire.ts"
import { Hold } from "./internal/hold/hold.ts"
import { describe, LeaseLost, WaitTimeout } from "./internal/hold/loss.ts"
import { duration, type Place, placeOf, spaceOf } from "./internal/hold/place.ts"
import { protect } from "./internal/hold/protect.ts"
import { memberQuestion } from "./internal/hold/request.ts"
import { service, type ServiceClass as AnyServiceClass } from "./internal/hold/service.ts"
import { spanning } from "./internal/hold/span.ts"
import { checkParties, type Known, open, PartiesMismatch } from "./internal/sync/parties.ts"
import type { Lease } from "./Lease.ts"

/**
 * @category type IDs
 * @since 0.1.0
 */
export const TypeId: TypeId = "~lockstep/DoubleBarrier"

/**
 * @category type IDs
 * @since 0.1.0
 */
export type TypeId = "~lockstep/DoubleBarrier"

/**
 * The lease of one party that is inside a phase.
 *
 * @category models
 * @since 0.1.0
 */
export interface Phase extends Lease {
  /** From 1 on, the same for all of the phase. */
  readonly number: number
}

/**
 * @category options
 * @since 0.1.0
 */
export interface EnterOptions {
  /**
   * How long to wait for the other parties; then it fails with `WaitTimeout`. Default: that of the coordinator, as long as it
   * takes.
   */
  readonly wait?: Duration.Input | undefined
  /**
   * How long a party may be inside; then it loses its lease with the reason `maxHold`. Default: that of the coordinator, as
   * long as it takes.
   */
  readonly maxHold?: Duration.Input | undefined
}

/**
 * Named as Curator's `DistributedDoubleBarrier`.
 *
 * @category models
 * @since 0.1.0
 */
export interface DoubleBarrier {
  readonly [TypeId]: TypeId
  readonly name: string
  /** How many parties there are now, as far as this process knows: another process may have changed the number. */
  readonly parties: number
  /**
   * Waits until all parties are there, and enters with them. It has left when the scope closes, without waiting for the others,
   * if not before by `leave`. A program inside is not interrupted when the lease is lost: see `Lease.protect`, or use
   * `withPhase`.
   */
  readonly enter: (options?: EnterOptions | undefined) => Effect.Effect<Phase, DoubleBarrierError, Scope.Scope>
  /**
   * Leaves, and waits until all parties have. A second time it only waits. Fails with `LeaseLost` when this party was not
   * inside any more. Interrupted or timed out, it has left all the same.
   */
  readonly leave: (
    phase: Phase,
    options?: Omit<EnterOptions, "maxHold"> | undefined
  ) => Effect.Effect<void, DoubleBarrierError>
  /**
   * Enters, runs the effect, and leaves: with the others when it has succeeded; otherwise at once. When the lease is lost, the
   * effect is interrupted, and the result is `LeaseLost`. `wait` bounds each of the two waits.
   */
  readonly withPhase: {
    <A, E, R>(
      self: Effect.Effect<A, E, R>,
      options?: EnterOptions | undefined
    ): Effect.Effect<A, E | DoubleBarrierError, R>
    (
      options?: EnterOptions | undefined
    ): <A, E, R>(self: Effect.Effect<A, E, R>) => Effect.Effect<A, E | DoubleBarrierError, R>
  }
  /** How many parties are inside now, by Redis's word. */
  readonly inside: Effect.Effect<number, DoubleBarrierError>
  /** How many parties wait to enter now, by Redis's word. */
  readonly queued: Effect.Effect<number, DoubleBarrierError>
}

/**
 * @category options
 * @since 0.1.0
 */
export interface Options {
  /** A whole number from 1 to 1,024. */
  readonly parties: number
  /**
   * What to do when it is open elsewhere for another number of parties. `fail` fails with `PartiesMismatch`, `keep` keeps the
   * number that it has, and `resize` changes it for all processes, from the next phase on. Default `fail`. When no other
   * process has it open, it gets this number.
   */
  readonly onMismatch?: "fail" | "keep" | "resize" | undefined
  /** How long a party inside outlives its process. Default: the coordinator's lease. */
  readonly lease?: Duration.Input | undefined
}

export {
  /**
   * It is open elsewhere for another number of parties.
   *
   * @category errors
   * @since 0.1.0
   */
  PartiesMismatch
} from "./internal/sync/parties.ts"

/**
 * @category errors
 * @since 0.1.0
 */
export class DoubleBarrierError extends Schema.Error<DoubleBarrierError>("lockstep/DoubleBarrier/DoubleBarrierError")({
  _tag: Schema.tag("DoubleBarrierError"),
  reason: Schema.Union([PartiesMismatch, LeaseLost, WaitTimeout, ...coordinatorReasons])
}) {
  override get message(): string {
    return this.reason.message
  }
}

const fail = (reason: DoubleBarrierError["reason"]): DoubleBarrierError => new DoubleBarrierError({ reason })

const ignore = () => {}

class DoubleBarrierImpl implements DoubleBarrier {
  readonly "~lockstep/DoubleBarrier" = "~lockstep/DoubleBarrier" as const
  readonly name: string
  readonly #place: Place
  readonly #known: Known

  constructor(place: Place, known: Known) {
    this.name = place.name
    this.#place = place
    this.#known = known
  }

  get parties(): number {
    return this.#known.parties
  }

  #waiting(
    verb: "doubleBarrier.enter" | "doubleBarrier.leave",
    args: () => ReadonlyArray<string | number>,
    options: EnterOptions | undefined
  ): acquiring.Acquire<DoubleBarrierError> {
    return {
      place: this.#place,
      verb,
      args,
      options,
      fail,
      // All have left.
      refuse: () => Effect.succeed(undefined)
    }
  }

  #entering(options: EnterOptions | undefined): acquiring.Acquire<DoubleBarrierError> {
    return this.#waiting("doubleBarrier.enter", () => [this.#known.parties], options)
  }

  #spanned<A, E, R>(self: Effect.Effect<A, E, R>, verb: string): Effect.Effect<A, E, R> {
    return spanning(self, `lockstep.DoubleBarrier.${verb}`, "doubleBarrier", this.name)
  }

  readonly enter = (options?: EnterOptions | undefined): Effect.Effect<Phase, DoubleBarrierError, Scope.Scope> =>
    this.#spanned(
      Effect.map(
        Effect.suspend(() => acquiring.acquireScoped(this.#entering(options))),
        (hold) => Object.assign(hold!, { number: Number(hold!.payload[0]) })
      ),
      "enter"
    )

  readonly leave = (
    phase: Phase,
    options?: Omit<EnterOptions, "maxHold"> | undefined
  ): Effect.Effect<void, DoubleBarrierError> =>
    this.#spanned(
      Effect.suspend(() => {
        if (!(phase instanceof Hold) || phase.claim.place.key !== this.#place.key) {
          const own = describe(this.#place.kind, this.name, this.#place.namespace)
          throw new TypeError(`This phase is not one of ${own}: leave the one that its own \`enter\` has answered.`)
        }
        return this.#leave(phase, options)
      }),
      "leave"
    )

  #leave(hold: Hold, options: EnterOptions | undefined): Effect.Effect<void, DoubleBarrierError> {
    return Effect.uninterruptibleMask((restore) => {
      if (hold.loss !== undefined) return Effect.fail(fail(hold.lossError()))
      // A wrong option must not end the phase.
      if (options?.wait !== undefined) duration(options.wait, "wait")
      // In the same batch as the requests that follow.
      hold.keeper.release(hold, ignore)
      const token = String(hold.token)
      return Effect.asVoid(acquiring.acquire(this.#waiting("doubleBarrier.leave", () => [token], options), restore))
    })
  }

  readonly withPhase: DoubleBarrier["withPhase"] = dual(
    (args) => Effect.isEffect(args[0]),
    <A, E, R>(
      self: Effect.Effect<A, E, R>,
      options?: EnterOptions | undefined
    ): Effect.Effect<A, E | DoubleBarrierError, R> =>
      this.#spanned(
        Effect.uninterruptibleMask((restore) => {
          const place = this.#place
          const maxHold = acquiring.maxHoldOf(place, options)
          const limited = maxHold === undefined ? undefined : { place, maxHold }
          return Effect.flatMap(acquiring.acquire(this.#entering(options), restore), (hold) =>
            Effect.onExitPrimitive(
              Effect.flatMap(
                protect(self, hold!, restore, fail, limited),
                (result) => Effect.as(restore(this.#leave(hold!, options)), result)
              ),
              () => acquiring.leave(hold!),
              true
            ))
        }),
        "withPhase"
      )
  )

  get #state(): Effect.Effect<readonly [inside: number, queued: number], DoubleBarrierError> {
    return Effect.mapBoth(memberQuestion(this.#place, "doubleBarrier.state", []), {
      onFailure: ({ reason }) => fail(reason),
      // Not there for a moment after Redis has lost its data.
      onSuccess: (reply) => reply[0] === "missing" ? [0, 0] : [reply[1], reply[2]]
    })
  }

  get inside(): Effect.Effect<number, DoubleBarrierError> {
    return Effect.map(this.#state, ([inside]) => inside)
  }

  get queued(): Effect.Effect<number, DoubleBarrierError> {
    return Effect.map(this.#state, ([, queued]) => queued)
  }
}

/**
 * Creates the double barrier, or joins it when it is for as many parties; with another number, `onMismatch` decides. It stays
 * open with the scope.
 *
 * @category constructors
 * @since 0.1.0
 */
export const make = (
  options: Options & { readonly name: string }
): Effect.Effect<DoubleBarrier, DoubleBarrierError, Coordinator | Scope.Scope> =>
  Effect.flatMap(Coordinator, (coordinator) => {
    const parties = checkParties(options.parties)
    const place = placeOf(spaceOf(coordinator), "doubleBarrier", options.name, "name", options.lease)
    const known: Known = { parties, change: 0 }
    return Effect.as(open(place, "doubleBarrier.join", options, known, fail), new DoubleBarrierImpl(place, known))
  })

/**
 * The class that `Service` makes.
 *
 * @category models
 * @since 0.1.0
 */
export interface ServiceClass<in out Self, in out Name extends string>
  extends AnyServiceClass<Self, `lockstep/DoubleBarrier/${Name}`, DoubleBarrier, DoubleBarrierError, Coordinator>
{}

/**
 * A double barrier as a typed service: `class Step extends DoubleBarrier.Service<Step>()("step", { parties: 3 }) {}`, with
 * `Step.layer`.
 *
 * @category constructors
 * @since 0.1.0
 */
export const Service =
  <Self>() => <const Name extends string>(name: Name, options: Options): ServiceClass<Self, Name> =>
    service<Self, "DoubleBarrier", Name, DoubleBarrier, DoubleBarrierError, Coordinator | Scope.Scope>(
      "DoubleBarrier",
      name,
      make({ ...options, name })
    )
