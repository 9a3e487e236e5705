/**
 * A place where processes meet. Givers and takers hand values over, each to exactly one; or two parties exchange their
 * values. Nobody leaves before the other one was there.
 *
 * It needs no creation and no scope, and is gone from Redis when nobody waits any more.
 *
 * **Guarantees**
 *
 * - `give` completes only when a taker has acknowledged the value. A giver that is interrupted, times out
 *   (`Effect.timeout`) or dies before it was handed out takes it back.
 * - A value is with one taker at a time. If that taker fails, is interrupted or dies, it goes to the next one, before all
 *   others, with a higher count of `attempts`.
 * - `exchange` gives two parties each other's value, in the order of their coming. Both were there at that moment: one
 *   that waits is asked before its value is given away, so that dead and interrupted ones are passed over.
 * - A giver or a party whose session is lost asks in the next one for what has come of it, and finds that for `keep`. So a
 *   lost session neither loses a value nor hands it over or exchanges it twice.
 * - Waits are served first come, first served, by a push. Nothing polls.
 *
 * **Gotchas**
 *
 * - A giver that is interrupted while a taker is busy with the value does not stop that taker; only nobody else gets it
 *   then.
 * - Nobody can be certain of the last message. One that is interrupted or killed while its acknowledgement or its
 *   acceptance is on its way does not know whether the other one has left. `takeWith` is for takers to which that matters:
 *   they acknowledge when they have finished, and recognize by its `id` what they get again.
 * - The value of a taker whose process dies is handed to the next when the lease of that process has run out. A giver, or
 *   a party, that loses its session before it has met anybody waits at the end of the line again.
 * - When Redis loses its data, everybody who waits asks again: what was under way may be handed over or exchanged twice.
 * - Values travel through the mailboxes of the parties: keep them small, some kB.
 *
 * **Example** (Handing over a task to whoever is free)
 *
 * ```ts
 * import { Coordinator, Rendezvous } from "lockstep"
 * import { Effect, Schema } from "effect"
 *
 * const program = Effect.gen(function*() {
 *   const tasks = yield* Rendezvous.make({ name: "tasks", schema: Schema.String })
 *   yield* Effect.forkChild(tasks.takeWith((task, { attempts }) => Effect.log(`doing ${task}, attempt ${attempts}`)))
 *   yield* tasks.give("the dishes")
 *   yield* Effect.log("done")
 * })
 *
 * program.pipe(Effect.provide(Coordinator.layerEmbedded()), Effect.runPromise)
 * ```
 *
 * @since 0.1.0
 */
import * as Context from "effect/Context"
import type * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Layer from "effect/Layer"
import * as Option from "effect/Option"
import * as Schema from "effect/Schema"
import { Coordinator } from "./Coordinator.ts"
import { CoordinatorError, coordinatorError } from "./internal/actor/errors.ts"
import { kernelOf } from "./internal/actor/kernel.ts"
import type { Claim, ClaimVerb } from "./internal/hold/claim.ts"
import * as held from "./internal/hold/held.ts"
import { LeaseLost, type WaitTimeout } from "./internal/hold/loss.ts"
import { InvalidPayload, payload } from "./internal/hold/payload.ts"
import { protect } from "./internal/hold/protect.ts"
import { spanned } from "./internal/hold/span.ts"

/**
 * @category type IDs
 * @since 0.1.0
 */
export const TypeId: TypeId = "~lockstep/Rendezvous"

/**
 * @category type IDs
 * @since 0.1.0
 */
export type TypeId = "~lockstep/Rendezvous"

/**
 * What a taker is told about a value.
 *
 * @category models
 * @since 0.1.0
 */
export interface Handover {
  /** The same each time the value is handed out. */
  readonly id: string
  /** Which time this is, from 1 on. Takers that died before they knew of it count. */
  readonly attempts: number
}

/**
 * @category models
 * @since 0.1.0
 */
export interface Rendezvous<in out A> {
  readonly [TypeId]: TypeId
  readonly name: string
  /** Waits until a taker has acknowledged the value. Fails with `Refused` if that taker could not decode it. */
  readonly give: (value: A) => Effect.Effect<void, RendezvousError>
  /** Waits for a value, and acknowledges it on receipt. */
  readonly take: Effect.Effect<A, RendezvousError>
  /**
   * Waits for a value, and acknowledges it when the effect has succeeded. Otherwise the next taker gets it, and the giver
   * waits on. Fails with `LeaseLost`, and interrupts the effect, when the session is lost meanwhile.
   */
  readonly takeWith: <B, E, R>(
    f: (value: A, handover: Handover) => Effect.Effect<B, E, R>
  ) => Effect.Effect<B, E | RendezvousError, R>
  /** Waits for another party, and answers its value, as the other one gets this one. */
  readonly exchange: (value: A) => Effect.Effect<A, RendezvousError>
  /** How many givers have not been acknowledged, and how many takers and parties of an exchange wait for another. */
  readonly waiting: Effect.Effect<
    { readonly givers: number; readonly takers: number; readonly exchangers: number },
    RendezvousError
  >
}

/**
 * @category options
 * @since 0.1.0
 */
export interface Options<A> {
  /** Of the values, which are sent as JSON. */
  readonly schema: Schema.Codec<A, any>
  /**
   * How long it is remembered what has come of a giver, or of a party of an exchange, whose session was lost at that moment.
   * Default 10 minutes. The last one decides.
   */
  readonly keep?: Duration.Input | undefined
}

export {
  /**
   * A value does not fit the schema: one's own, of which nothing was sent, or the other one's. In that case its giver is
   * told; a party that had waited for this one waits on, and one that came after it has its value.
   *
   * @category errors
   * @since 0.1.0
   */
  InvalidPayload
} from "./internal/hold/payload.ts"

/**
 * The taker could not decode the value.
 *
 * @category errors
 * @since 0.1.0
 */
export class Refused extends Schema.Error<Refused>("lockstep/Rendezvous/Refused")({
  _tag: Schema.tag("Refused"),
  name: Schema.String
}) {
  override get message(): string {
    return "The taker has another schema, which the value does not fit: use the same one everywhere."
  }
}

/**
 * @category errors
 * @since 0.1.0
 */
export class RendezvousError extends Schema.Error<RendezvousError>("lockstep/Rendezvous/RendezvousError")({
  _tag: Schema.tag("RendezvousError"),
  reason: Schema.Union([InvalidPayload, Refused, LeaseLost, CoordinatorError])
}) {
  override get message(): string {
    return this.reason.message
  }
}

const fail = (reason: RendezvousError["reason"]): RendezvousError => new RendezvousError({ reason })

class RendezvousImpl<A> implements Rendezvous<A> {
  readonly [TypeId]: TypeId = TypeId
  readonly name: string
  readonly #place: held.Place
  readonly #keep: number
  readonly #encode: (value: A) => Effect.Effect<string, RendezvousError>
  readonly #decode: (value: unknown) => Effect.Effect<A, RendezvousError>

  constructor(place: held.Place, schema: Schema.Codec<A, any>, keep: Duration.Input) {
    const { name } = place
    const { decode, encode } = payload(schema)
    this.name = name
    this.#place = place
    this.#keep = held.millis(keep, "keep")
    this.#encode = (value) => Effect.mapError(encode(value, "The value"), fail)
    this.#decode = (value) => Effect.mapError(decode(value, "The value of the other one"), fail)
  }

  #acquiring(verb: ClaimVerb, details: ReadonlyArray<string | number>): held.Acquire<RendezvousError> {
    return {
      place: this.#place,
      verb,
      details,
      check: "rendezvous.check",
      weight: 1,
      capacity: 1,
      wait: true,
      options: undefined,
      fail: (reason: CoordinatorError | LeaseLost | WaitTimeout) => fail(reason as CoordinatorError | LeaseLost),
      refuse: (refusal) => Effect.die(new Error(`refused: ${refusal[0]}`))
    }
  }

  /** Waits for a grant and uses it, and then gives up what is left of it. */
  #meet<B, E, R>(
    verb: ClaimVerb,
    details: ReadonlyArray<string | number>,
    use: (
      held: held.Held,
      restore: <A, E, R>(effect: Effect.Effect<A, E, R>) => Effect.Effect<A, E, R>
    ) => Effect.Effect<B, E, R>
  ): Effect.Effect<B, E | RendezvousError, R> {
    return Effect.uninterruptibleMask((restore) =>
      Effect.flatMap(held.acquire(this.#acquiring(verb, details), restore), (granted) =>
        Effect.onExitPrimitive(
          use(granted!, restore),
          () => {
            const { claim } = granted!
            // Nobody waits for that: there is nothing more to do under it.
            if (claim.state === "held") claim.partition.claims.release(claim, () => {})
            return undefined
          },
          true
        ))
    )
  }

  readonly give = (value: A): Effect.Effect<void, RendezvousError> =>
    Effect.flatMap(
      this.#encode(value),
      (json) =>
        this.#meet("rendezvous.give", [this.#place.partition.kernel.uniqueId(), this.#keep, json], ({ claim }) =>
          claim.payload[1] === true
            ? Effect.void
            : Effect.fail(fail(new Refused({ name: this.name }))))
    )

  #take<B, E, R>(
    use: (
      value: A,
      granted: held.Held,
      restore: <A, E, R>(effect: Effect.Effect<A, E, R>) => Effect.Effect<A, E, R>
    ) => Effect.Effect<B, E, R>
  ): Effect.Effect<B, E | RendezvousError, R> {
    return this.#meet(
      "rendezvous.take",
      [],
      (granted, restore) =>
        Effect.matchEffect(restore(this.#decode(granted.claim.payload[1])), {
          // It would fit no better next time.
          onFailure: (error) => Effect.andThen(restore(this.#acknowledge(granted, false)), Effect.fail(error)),
          onSuccess: (value) =>
            Effect.flatMap(
              use(value, granted, restore),
              (result) => Effect.as(restore(this.#acknowledge(granted, true)), result)
            )
        })
    )
  }

  get take(): Effect.Effect<A, RendezvousError> {
    return this.#take(Effect.succeed)
  }

  readonly takeWith = <B, E, R>(
    f: (value: A, handover: Handover) => Effect.Effect<B, E, R>
  ): Effect.Effect<B, E | RendezvousError, R> =>
    Effect.withFiber((fiber) =>
      spanned(
        fiber,
        this.#take((value, granted, restore) => {
          const [id, attempts] = granted.claim.payload[0] as [string, number]
          return Effect.onExitPrimitive(
            protect(Effect.suspend(() => f(value, { id, attempts })), granted, restore, fail, undefined),
            (exit) => Exit.isFailure(exit) ? held.giveBack(granted.claim) : undefined,
            true
          )
        }),
        "lockstep.Rendezvous.takeWith",
        this.name
      )
    )

  #acknowledge(granted: held.Held, accepted: boolean): Effect.Effect<void, RendezvousError> {
    const { claim } = granted
    return Effect.callback((resume) => {
      const lost = () => resume(Effect.fail(fail(granted.loss(claim.session?.lost ?? "unknown"))))
      held.conclude(claim, {
        verb: "rendezvous.acknowledge",
        args: [claim.id, accepted],
        settle: (reply) => reply[0] === "acknowledged" ? resume(Effect.void) : lost(),
        moot: lost,
        fail: (error) => resume(Effect.fail(fail(error)))
      })
    })
  }

  readonly exchange = (
    value: A
  ): Effect.Effect<A, RendezvousError> =>
    Effect.flatMap(this.#encode(value), (json) => {
      const details = [this.#place.partition.kernel.uniqueId(), this.#keep, json]
      const attempt: Effect.Effect<A, RendezvousError> = Effect.flatMap(
        this.#meet("rendezvous.exchange", details, ({ claim }, restore) => {
          const [met, theirs] = claim.payload
          // The other one has gone before this one was asked.
          if (met === null) return Effect.succeedNone
          return Effect.flatMap(restore(this.#decode(theirs)), (value) =>
            Effect.map(
              met === true ? Effect.succeed(true) : restore(this.#accept(claim)),
              (accepted) => accepted ? Option.some(value) : Option.none()
            ))
        }),
        // The next one, or what has come of it after all.
        (met) => Option.isSome(met) ? Effect.succeed(met.value) : attempt
      )
      return attempt
    })

  /** Says that this one is still there. False if the other one is not, or if nobody knows. */
  #accept(claim: Claim): Effect.Effect<boolean, RendezvousError> {
    return Effect.callback((resume) => {
      if (claim.lost !== undefined) return resume(Effect.succeed(false))
      claim.partition.request({
        verb: "rendezvous.accept",
        key: claim.key,
        args: [claim.id],
        session: claim.session,
        moot: () => resume(Effect.succeed(false)),
        settle: ([tag]) => {
          if (tag === "alone") claim.partition.claims.forget(claim)
          resume(Effect.succeed(tag === "accepted"))
        },
        fail: (error) => resume(Effect.fail(fail(error)))
      })
    })
  }

  get waiting() {
    const { key, partition } = this.#place
    return Effect.map(
      Effect.tryPromise({
        try: () => partition.kernel.inspect(partition, { verb: "rendezvous.state", key, args: [] }),
        catch: (cause) => fail(coordinatorError(cause))
      }),
      ([, givers, takers, exchangers]) => ({ givers, takers, exchangers })
    )
  }
}

/**
 * The rendezvous of that name. It asks Redis for nothing yet, and there is nothing to close.
 *
 * @category constructors
 * @since 0.1.0
 */
export const make = <A>(
  options: Options<A> & { readonly name: string }
): Effect.Effect<Rendezvous<A>, never, Coordinator> =>
  Effect.map(Coordinator, (coordinator) => {
    const { keep = "10 minutes", name, schema } = options
    return new RendezvousImpl(held.placeOf(kernelOf(coordinator), "rendezvous", name, "name"), schema, keep)
  })

/**
 * The class that `Service` makes.
 *
 * @category models
 * @since 0.1.0
 */
export interface ServiceClass<in out Self, in out Id extends string, in out A>
  extends Context.ServiceClass<Self, Id, Rendezvous<A>>
{
  readonly layer: Layer.Layer<Self, never, Coordinator>
}

/**
 * A rendezvous as a typed service: `class Tasks extends Rendezvous.Service<Tasks>()("tasks", { schema: Task }) {}`, with
 * `Tasks.layer`.
 *
 * @category constructors
 * @since 0.1.0
 */
export const Service =
  <Self>() => <const Id extends string, A>(name: Id, options: Options<A>): ServiceClass<Self, Id, A> => {
    const tag = Context.Service<Self, Rendezvous<A>>()(name) as unknown as Context.ServiceClass<Self, Id, Rendezvous<A>>
    return Object.assign(tag, { layer: Layer.effect(tag, make({ ...options, name })) }) as unknown as ServiceClass<
      Self,
      Id,
      A
    >
  }
