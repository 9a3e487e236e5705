/**
 * A gate that several processes share: open, everybody passes; closed, they wait. The distributed twin of `effect/Latch`.
 *
 * A gate is closed when it is made. It exists for as long as somebody has it, and for `keep` afterwards if it is open.
 *
 * **Guarantees**
 *
 * - Everybody who waits passes when it is opened, also if it is closed right after, by one push to each process. Nothing
 *   polls.
 * - After Redis has lost its data, whoever has the gate creates it again, open if it was open.
 *
 * **Gotchas**
 *
 * - Who is closing it does not know who is still on the way: a gate says who may begin, and not who has finished.
 * - `isOpen` asks Redis; `await` is told, a moment later.
 *
 * **Example** (Everybody starts at once)
 *
 * ```ts
 * import { Coordinator, Gate } from "lockstep"
 * import { Effect } from "effect"
 *
 * const program = Effect.gen(function*() {
 *   const start = yield* Gate.make({ name: "start" })
 *   yield* Effect.forkScoped(Effect.delay(start.open, "1 second"))
 *   yield* Effect.log("off we go").pipe(start.whenOpen)
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
import type * as Scope from "effect/Scope"
import { Coordinator } from "./Coordinator.ts"
import type { CoordinatorError } from "./internal/actor/errors.ts"
import { kernelOf } from "./internal/actor/kernel.ts"
import { placeOf } from "./internal/hold/held.ts"
import { Latch, type Mismatch } from "./internal/latch.ts"

/**
 * @category type IDs
 * @since 0.1.0
 */
export const TypeId: TypeId = "~lockstep/Gate"

/**
 * @category type IDs
 * @since 0.1.0
 */
export type TypeId = "~lockstep/Gate"

/**
 * Named as `effect/Latch`.
 *
 * @category models
 * @since 0.1.0
 */
export interface Gate {
  readonly [TypeId]: TypeId
  readonly name: string
  /** Lets everybody pass who waits, and who comes before it is closed. */
  readonly open: Effect.Effect<void, CoordinatorError>
  readonly close: Effect.Effect<void, CoordinatorError>
  readonly isOpen: Effect.Effect<boolean, CoordinatorError>
  /** Waits until it is open. It is interrupted when the scope of the gate, or the coordinator, is closed. */
  readonly await: Effect.Effect<void>
  /** Waits until it is open, and then runs the effect. */
  readonly whenOpen: <A, E, R>(self: Effect.Effect<A, E, R>) => Effect.Effect<A, E, R>
}

/**
 * @category options
 * @since 0.1.0
 */
export interface Options {
  /** How long it stays open after the last one has left it. Default 1 hour. The last one to make it decides. */
  readonly keep?: Duration.Input | undefined
}

// All gates have the same count.
const same = (reason: CoordinatorError | Mismatch): CoordinatorError => {
  if ("existing" in reason) throw new Error("a gate has a count of its own")
  return reason
}

/**
 * Makes the gate, or joins it as it is. It stays with the scope.
 *
 * @category constructors
 * @since 0.1.0
 */
export const make = (
  options: Options & { readonly name: string }
): Effect.Effect<Gate, CoordinatorError, Coordinator | Scope.Scope> =>
  Effect.flatMap(Coordinator, (coordinator) => {
    const { keep = "1 hour", name } = options
    const latch = new Latch(placeOf(kernelOf(coordinator), "gate", name, "name"), 1, keep, same)
    return Effect.as(latch.join(), {
      [TypeId]: TypeId,
      name,
      // The same one each time, so that opening what is open changes nothing.
      open: Effect.asVoid(latch.count(1, "open")),
      close: latch.reset,
      isOpen: Effect.map(latch.left, (left) => left === 0),
      await: latch.await,
      whenOpen: (self) => Effect.andThen(latch.await, self)
    })
  })

/**
 * The class that `Service` makes.
 *
 * @category models
 * @since 0.1.0
 */
export interface ServiceClass<in out Self, in out Id extends string> extends Context.ServiceClass<Self, Id, Gate> {
  readonly layer: Layer.Layer<Self, CoordinatorError, Coordinator>
}

/**
 * A gate as a typed service: `class Start extends Gate.Service<Start>()("start") {}`, with `Start.layer`.
 *
 * @category constructors
 * @since 0.1.0
 */
export const Service = <Self>() => <const Id extends string>(name: Id, options?: Options): ServiceClass<Self, Id> => {
  const tag = Context.Service<Self, Gate>()(name) as unknown as Context.ServiceClass<Self, Id, Gate>
  return Object.assign(tag, { layer: Layer.effect(tag, make({ ...options, name })) }) as unknown as ServiceClass<
    Self,
    Id
  >
}
