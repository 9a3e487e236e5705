/**
 * A double barrier that several processes share: parties enter a phase together, and leave it together. It is used again and
 * again, phase after phase.
 *
 * A double barrier exists for as long as somebody has it open. `make` creates it, or joins one for as many parties.
 *
 * **Guarantees**
 *
 * - Nobody enters before as many wait as there are parties, nobody has left before all of them have, and no two phases
 *   overlap. Each of these is one push to each process, however many fibers wait there. Nothing polls.
 * - Who dies has left: inside of a phase it leaves when its lease has run out; before that, it does not count any more, and
 *   the others go on waiting.
 * - To be inside is to hold a `Lease`, with one fencing token for all of the phase, larger than that of every phase before.
 *   `withPhase` interrupts its effect when the lease is lost.
 * - A wait is only a wait: interrupted or timed out (`Effect.timeout`), it leaves nothing behind.
 *
 * **Gotchas**
 *
 * - Who comes in excess of the parties waits for the next phase, which opens when the present one is over and enough wait.
 * - A fiber that enters twice, without leaving, can wait for itself.
 * - Phases are numbered from 1 for as long as somebody has the double barrier open, and Redis its data.
 * - When Redis loses its data, all leases of the phase are lost, and the phase with them.
 *
 * **Example** (All compute, and nobody goes on before all have computed)
 *
 * ```ts
 * import { Coordinator, DoubleBarrier } from "lockstep"
 * import { Effect } from "effect"
 *
 * const program = Effect.gen(function*() {
 *   const barrier = yield* DoubleBarrier.make({ name: "step", parties: 2 })
 *   const worker = Effect.log("computing").pipe(barrier.withPhase)
 *   yield* Effect.all([worker, worker], { concurrency: "unbounded" })
 * })
 *
 * program.pipe(Effect.scoped, Effect.provide(Coordinator.layerEmbedded()), Effect.runPromise)
 * ```
 *
 * @since 0.1.0
 */
import * as Context from "effect/Context"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Schema from "effect/Schema"
import type * as Scope from "effect/Scope"
import { Coordinator } from "./Coordinator.ts"
import { CoordinatorError, coordinatorError } from "./internal/actor/errors.ts"
import { kernelOf } from "./internal/actor/kernel.ts"
import type { Refusal } from "./internal/hold/claim.ts"
import * as held from "./internal/hold/held.ts"
import { LeaseLost } from "./internal/hold/loss.ts"
import { protectLease } from "./internal/hold/protect.ts"
import { spanned } from "./internal/hold/span.ts"
import { checkParties, join, PartiesMismatch } from "./internal/parties.ts"
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
 * The lease of one party that is inside of a phase.
 *
 * @category models
 * @since 0.1.0
 */
export interface Phase extends Lease {
  /** From 1 on, the same for all of the phase. */
  readonly number: number
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
  readonly parties: number
  /**
   * Waits until all parties are there, and enters with them. It has left when the scope closes, without waiting for the others,
   * if not before by `leave`. What runs inside is not interrupted when the lease is lost: see `Lease.protect`, or use
   * `withPhase`.
   */
  readonly enter: Effect.Effect<Phase, DoubleBarrierError, Scope.Scope>
  /**
   * Leaves, and waits until all parties have. A second time it only waits. Fails with `LeaseLost` when this party was not
   * inside any more. Interrupted, it has left all the same.
   */
  readonly leave: (phase: Phase) => Effect.Effect<void, DoubleBarrierError>
  /**
   * Enters, runs the effect, and leaves: with the others when it has succeeded; otherwise at once. When the lease is lost, the
   * effect is interrupted, and the result is `LeaseLost`.
   */
  readonly withPhase: <A, E, R>(self: Effect.Effect<A, E, R>) => Effect.Effect<A, E | DoubleBarrierError, R>
  /** How many are inside now, by Redis's word. */
  readonly inside: Effect.Effect<number, DoubleBarrierError>
  /** How many wait to enter now, by Redis's word. */
  readonly waiting: Effect.Effect<number, DoubleBarrierError>
}

/**
 * @category options
 * @since 0.1.0
 */
export interface Options {
  /** A whole number from 1 to 1,024. */
  readonly parties: number
}

export {
  /**
   * It exists for another number of parties.
   *
   * @category errors
   * @since 0.1.0
   */
  PartiesMismatch
} from "./internal/parties.ts"

/**
 * @category errors
 * @since 0.1.0
 */
export class DoubleBarrierError extends Schema.Error<DoubleBarrierError>("lockstep/DoubleBarrier/DoubleBarrierError")({
  _tag: Schema.tag("DoubleBarrierError"),
  reason: Schema.Union([PartiesMismatch, LeaseLost, CoordinatorError])
}) {
  override get message(): string {
    return this.reason.message
  }
}

const fail = (reason: DoubleBarrierError["reason"]): DoubleBarrierError => new DoubleBarrierError({ reason })

class DoubleBarrierImpl implements DoubleBarrier {
  readonly "~lockstep/DoubleBarrier" = "~lockstep/DoubleBarrier" as const
  readonly name: string
  readonly parties: number
  readonly #place: held.Place

  constructor(place: held.Place, parties: number) {
    this.name = place.name
    this.parties = parties
    this.#place = place
  }

  #waiting(
    verb: "phase.enter" | "phase.leave",
    detail: string | number
  ): held.Acquire<DoubleBarrierError> {
    return {
      place: this.#place,
      verb,
      check: "phase.check",
      details: [detail],
      weight: 1,
      capacity: 0,
      wait: true,
      options: undefined,
      fail: (error) => fail(error as CoordinatorError),
      refuse: (reply: Refusal) =>
        reply[0] === "mismatch"
          ? Effect.fail(fail(new PartiesMismatch({ name: this.name, parties: this.parties, existing: reply[1] })))
          // All have left.
          : Effect.succeed(undefined)
    }
  }

  get enter(): Effect.Effect<Phase, DoubleBarrierError, Scope.Scope> {
    return Effect.map(
      Effect.suspend(() => held.acquireScoped(this.#waiting("phase.enter", this.parties))),
      (lease) => Object.assign(lease!, { number: Number(lease!.claim.payload[0]) })
    )
  }

  readonly leave = (phase: Phase): Effect.Effect<void, DoubleBarrierError> =>
    Effect.suspend(() => {
      if (!(phase instanceof held.Held) || phase.claim.key !== this.#place.key) {
        throw new TypeError("This phase is not one of this double barrier")
      }
      return this.#leave(phase)
    })

  #leave(phase: held.Held): Effect.Effect<void, DoubleBarrierError> {
    return Effect.uninterruptibleMask((restore) => {
      const { claim } = phase
      if (claim.lost !== undefined) return Effect.fail(fail(phase.loss()))
      // In the same batch as what follows.
      claim.partition.claims.release(claim, () => {})
      return Effect.asVoid(held.acquire(this.#waiting("phase.leave", String(claim.token)), restore))
    })
  }

  readonly withPhase = <A, E, R>(self: Effect.Effect<A, E, R>): Effect.Effect<A, E | DoubleBarrierError, R> =>
    Effect.withFiber((fiber) =>
      spanned(
        fiber,
        Effect.uninterruptibleMask((restore) =>
          Effect.flatMap(held.acquire(this.#waiting("phase.enter", this.parties), restore), (phase) =>
            Effect.ensuring(
              restore(
                Effect.flatMap(
                  protectLease(self, phase!, fail),
                  (result) => Effect.as(this.#leave(phase!), result)
                )
              ),
              held.giveBack(phase!.claim)
            ))
        ),
        "lockstep.DoubleBarrier.withPhase",
        this.name
      )
    )

  get #state(): Effect.Effect<readonly [inside: number, waiting: number], DoubleBarrierError> {
    const { key, partition } = this.#place
    return Effect.map(
      Effect.tryPromise({
        try: () => partition.kernel.inspect(partition, { verb: "phase.state", key, args: [] }),
        catch: (cause) => fail(coordinatorError(cause))
      }),
      // Not there for a moment after Redis has lost its data.
      (reply) => reply[0] === "missing" ? [0, 0] : [reply[1], reply[2]]
    )
  }

  get inside(): Effect.Effect<number, DoubleBarrierError> {
    return Effect.map(this.#state, ([inside]) => inside)
  }

  get waiting(): Effect.Effect<number, DoubleBarrierError> {
    return Effect.map(this.#state, ([, waiting]) => waiting)
  }
}

/**
 * Creates the double barrier, or joins it when it is for as many parties; with another number it fails with
 * `PartiesMismatch`. It stays open with the scope.
 *
 * @category constructors
 * @since 0.1.0
 */
export const make = (
  options: Options & { readonly name: string }
): Effect.Effect<DoubleBarrier, DoubleBarrierError, Coordinator | Scope.Scope> =>
  Effect.flatMap(Coordinator, (coordinator) => {
    const parties = checkParties(options.parties)
    const place = held.placeOf(kernelOf(coordinator), "phase", options.name, "name")
    return Effect.as(join(place, "phase.join", parties, fail), new DoubleBarrierImpl(place, parties))
  })

/**
 * The class that `Service` makes.
 *
 * @category models
 * @since 0.1.0
 */
export interface ServiceClass<in out Self, in out Id extends string>
  extends Context.ServiceClass<Self, Id, DoubleBarrier>
{
  readonly layer: Layer.Layer<Self, DoubleBarrierError, Coordinator>
}

/**
 * A double barrier as a typed service: `class Step extends DoubleBarrier.Service<Step>()("step", { parties: 3 }) {}`, with
 * `Step.layer`.
 *
 * @category constructors
 * @since 0.1.0
 */
export const Service = <Self>() => <const Id extends string>(name: Id, options: Options): ServiceClass<Self, Id> => {
  const tag = Context.Service<Self, DoubleBarrier>()(name) as unknown as Context.ServiceClass<Self, Id, DoubleBarrier>
  return Object.assign(tag, { layer: Layer.effect(tag, make({ ...options, name })) }) as unknown as ServiceClass<
    Self,
    Id
  >
}
