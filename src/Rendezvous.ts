/**
 * A place where processes meet. Givers hand values over to takers, each value to exactly one; or two parties exchange their
 * values. No party leaves before its counterpart was there.
 *
 * It needs no creation and no scope. It disappears from Redis with the last waiter.
 *
 * **Guarantees**
 *
 * - `give` completes only when a taker has acknowledged the value. A giver that is interrupted, times out or dies before the
 *   value was delivered takes it back.
 * - A value is with one taker at a time. If that taker fails, is interrupted or dies, the next taker gets the value, before
 *   all other values, with a higher count of `attempts`.
 * - `exchange` gives two parties each other's value, first come, first served. Both parties were there at that moment. A waiting
 *   party is asked before its value is delivered, so that dead and interrupted parties are skipped.
 * - A giver or a party whose session is lost asks in its next session for the outcome. Redis keeps outcomes for
 *   `timeToLive`. So a lost session neither loses a value nor hands it over or exchanges it twice.
 * - Waiters are served first come, first served, by a push. Nothing polls.
 *
 * **Gotchas**
 *
 * - Interrupting a giver does not stop a taker that is busy with the value. Afterwards no other taker gets it.
 * - A process that is interrupted or killed while its acknowledgement or its acceptance is on the way does not know the
 *   outcome. `takeWith` is for takers to which that matters: they acknowledge when they have finished, and recognize a
 *   redelivered value by its `id`.
 * - The value of a taker whose process dies is delivered to the next taker when the lease of that process has run out. A giver,
 *   or a party, that loses its session before it has met a counterpart waits at the end of the queue again.
 * - When Redis loses its data, every waiter asks again: values that were under way may be handed over or exchanged twice.
 * - Values travel through the mailboxes of the parties: keep them small, some kB.
 *
 * **Example** (Handing over a task to the next free worker)
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

import type * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Option from "effect/Option"
import * as Schema from "effect/Schema"
import { Coordinator } from "./Coordinator.ts"
import { coordinatorReasons } from "./internal/actor/errors.ts"
import * as acquiring from "./internal/hold/acquire.ts"
import type { Argument } from "./internal/hold/claim.ts"
import type { Departure } from "./internal/hold/departing.ts"
import type { Hold } from "./internal/hold/hold.ts"
import { describe, LeaseLost, WaitTimeout } from "./internal/hold/loss.ts"
import { InvalidPayload, type Payload, payload } from "./internal/hold/payload.ts"
import { millis, type Place, placeOf, spaceOf } from "./internal/hold/place.ts"
import { protect } from "./internal/hold/protect.ts"
import { question, request } from "./internal/hold/request.ts"
import { service, type ServiceClass as AnyServiceClass } from "./internal/hold/service.ts"
import { spanning } from "./internal/hold/span.ts"

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
 * The data about a value that its taker receives.
 *
 * @category models
 * @since 0.1.0
 */
export interface Handover {
  /** The same each time the value is delivered. */
  readonly id: string
  /** How often the value was delivered, this time included. Takers that died before they knew of it count. */
  readonly attempts: number
}

/**
 * @category options
 * @since 0.1.0
 */
export interface WaitOptions {
  /** How long to wait for a counterpart; then it fails with `WaitTimeout`. Default: that of the coordinator. */
  readonly wait?: Duration.Input | undefined
}

/**
 * @category options
 * @since 0.1.0
 */
export interface TakeOptions extends WaitOptions {
  /**
   * How long the taker may be busy with the value; then it is interrupted, and the next taker gets the value. Default: that
   * of the coordinator.
   */
  readonly maxHold?: Duration.Input | undefined
}

/**
 * @category models
 * @since 0.1.0
 */
export interface Rendezvous<in out A> {
  readonly [TypeId]: TypeId
  readonly name: string
  /**
   * Waits until a taker has acknowledged the value. Fails with `Refused` if that taker could not decode it. A value that is with
   * a taker when `wait` is over stays there, and the giver does not learn the outcome.
   */
  readonly give: (value: A, options?: WaitOptions | undefined) => Effect.Effect<void, RendezvousError>
  /** Waits for a value, and acknowledges it on receipt. */
  readonly take: (options?: WaitOptions | undefined) => Effect.Effect<A, RendezvousError>
  /**
   * Waits for a value, and acknowledges it when the effect has succeeded. Otherwise the next taker gets it, and the giver
   * waits on. Fails with `LeaseLost`, and interrupts the effect, when the session is lost meanwhile.
   */
  readonly takeWith: <B, E, R>(
    f: (value: A, handover: Handover) => Effect.Effect<B, E, R>,
    options?: TakeOptions | undefined
  ) => Effect.Effect<B, E | RendezvousError, R>
  /** Waits for another party, and answers its value; that party gets this one's. */
  readonly exchange: (value: A, options?: WaitOptions | undefined) => Effect.Effect<A, RendezvousError>
  /** How many givers have not been acknowledged, and how many takers and parties of an exchange wait for a counterpart. */
  readonly present: Effect.Effect<
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
   * How long Redis keeps the outcome of a giver, or of a party of an exchange, whose session was lost at that moment.
   * Default 10 minutes. The last request decides.
   */
  readonly timeToLive?: Duration.Input | undefined
  /** How long a value stays with a taker whose process died. Default: the coordinator's lease. */
  readonly lease?: Duration.Input | undefined
}

export {
  /**
   * A value does not fit the schema: its own, which was not sent, or the counterpart's. A giver is notified that its value was
   * refused. If the value of one party of an exchange does not fit, the other party fails. The party that sent it waits on, or
   * has received its value already.
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
  name: Schema.String,
  namespace: Schema.String
}) {
  override get message(): string {
    return `The taker at ${describe("rendezvous", this.name, this.namespace)} could not decode the value: ` +
      `use the same schema everywhere.`
  }
}

/**
 * @category errors
 * @since 0.1.0
 */
export class RendezvousError extends Schema.Error<RendezvousError>("lockstep/Rendezvous/RendezvousError")({
  _tag: Schema.tag("RendezvousError"),
  reason: Schema.Union([InvalidPayload, Refused, LeaseLost, WaitTimeout, ...coordinatorReasons])
}) {
  override get message(): string {
    return this.reason.message
  }
}

const fail = (reason: RendezvousError["reason"]): RendezvousError => new RendezvousError({ reason })

type MeetingVerb = "rendezvous.give" | "rendezvous.take" | "rendezvous.exchange"

type Use<B, E, R> = (hold: Hold, restore: acquiring.Restore) => Effect.Effect<B, E, R>

const ignore = () => {}

const withdrawing: Departure<"rendezvous.withdraw"> = {
  verb: "rendezvous.withdraw",
  args: [],
  told: (id, reply) =>
    reply[0] === "departed" ? "departed" : ["granted", id, reply[1], ...reply[2] as ReadonlyArray<unknown>]
}

class RendezvousImpl<A> implements Rendezvous<A> {
  readonly [TypeId]: TypeId = TypeId
  readonly name: string
  readonly #place: Place
  readonly #timeToLive: number
  readonly #payload: Payload<A>

  constructor(place: Place, schema: Schema.Codec<A, any>, timeToLive: number) {
    this.name = place.name
    this.#place = place
    this.#timeToLive = timeToLive
    this.#payload = payload(schema, place)
  }

  #encode(value: A): Effect.Effect<string, RendezvousError> {
    return Effect.mapError(this.#payload.encode(value, `The value for rendezvous ${JSON.stringify(this.name)}`), fail)
  }

  #decode(value: unknown): Effect.Effect<A, RendezvousError> {
    const what = `The value of the counterpart at rendezvous ${JSON.stringify(this.name)}`
    return Effect.mapError(this.#payload.decode(value, what), fail)
  }

  #spanned<B, E, R>(self: Effect.Effect<B, E, R>, verb: string): Effect.Effect<B, E, R> {
    return spanning(self, `lockstep.Rendezvous.${verb}`, "rendezvous", this.name)
  }

  /** Waits for a grant and uses it, and then releases the rest of it. */
  #meet<B, E, R>(
    verb: MeetingVerb,
    args: ReadonlyArray<Argument>,
    options: WaitOptions | undefined,
    use: Use<B, E, R>
  ): Effect.Effect<B, E | RendezvousError, R> {
    const place = this.#place
    const meeting: acquiring.Acquire<RendezvousError, never> = {
      place,
      verb,
      args: () => args,
      options,
      fail,
      // An item that a taker returns loses nothing.
      departure: verb === "rendezvous.take" ? undefined : withdrawing,
      refuse: (refusal) => Effect.die(new Error(`${verb} was refused: ${refusal[0]}`))
    }
    return Effect.uninterruptibleMask((restore) =>
      Effect.flatMap(acquiring.acquire(meeting, restore), (hold) =>
        Effect.onExitPrimitive(
          use(hold, restore),
          () => {
            // Nothing runs under it any more, so nothing waits for the release.
            if (hold.state === "held") place.tenancy.release(hold, ignore)
            return undefined
          },
          true
        ))
    )
  }

  readonly give = (value: A, options?: WaitOptions | undefined): Effect.Effect<void, RendezvousError> =>
    this.#spanned(
      Effect.flatMap(this.#encode(value), (json) => {
        const id = this.#place.space.kernel.uniqueId()
        return this.#meet("rendezvous.give", [id, this.#timeToLive, json], options, ({ payload: [accepted] }) =>
          accepted === true
            ? Effect.void
            : Effect.fail(
              fail(new Refused({ name: this.name, namespace: this.#place.space.kernel.settings.namespace }))
            ))
      }),
      "give"
    )

  #take<B, E, R>(
    options: WaitOptions | undefined,
    use: (value: A, hold: Hold, restore: acquiring.Restore) => Effect.Effect<B, E, R>
  ): Effect.Effect<B, E | RendezvousError, R> {
    return this.#meet(
      "rendezvous.take",
      [],
      options,
      (hold, restore) =>
        Effect.matchEffect(restore(this.#decode(hold.payload[2])), {
          // It would fit no better next time.
          onFailure: (error) => Effect.andThen(restore(this.#acknowledge(hold, false)), Effect.fail(error)),
          onSuccess: (value) =>
            Effect.flatMap(
              use(value, hold, restore),
              (result) => Effect.as(restore(this.#acknowledge(hold, true)), result)
            )
        })
    )
  }

  readonly take = (options?: WaitOptions | undefined): Effect.Effect<A, RendezvousError> =>
    this.#spanned(Effect.suspend(() => this.#take(options, Effect.succeed)), "take")

  readonly takeWith = <B, E, R>(
    f: (value: A, handover: Handover) => Effect.Effect<B, E, R>,
    options?: TakeOptions | undefined
  ): Effect.Effect<B, E | RendezvousError, R> =>
    this.#spanned(
      Effect.suspend(() => {
        const place = this.#place
        const maxHold = acquiring.maxHoldOf(place, options)
        return this.#take(options, (value, hold, restore) => {
          const [id, attempts] = hold.payload as [string, number]
          return Effect.onExitPrimitive(
            protect(
              Effect.suspend(() => f(value, { id, attempts })),
              hold,
              restore,
              fail,
              maxHold === undefined ? undefined : { place, maxHold }
            ),
            (exit) => Exit.isFailure(exit) ? acquiring.release(hold) : undefined,
            true
          )
        })
      }),
      "takeWith"
    )

  #acknowledge(hold: Hold, accepted: boolean): Effect.Effect<void, RendezvousError> {
    return Effect.callback((resume) => {
      const lost = () => resume(Effect.fail(fail(hold.lossError(hold.session?.lost ?? "unknown"))))
      acquiring.conclude(this.#place, hold, {
        verb: "rendezvous.acknowledge",
        args: [hold.id, accepted],
        settle: (reply) => reply[0] === "acknowledged" ? resume(Effect.void) : lost(),
        moot: lost,
        fail: (reason) => resume(Effect.fail(fail(reason)))
      })
    })
  }

  readonly exchange = (value: A, options?: WaitOptions | undefined): Effect.Effect<A, RendezvousError> =>
    this.#spanned(
      Effect.flatMap(this.#encode(value), (json) =>
        Effect.clockWith((clock) => {
          const args = [this.#place.space.kernel.uniqueId(), this.#timeToLive, json]
          const { kind, name, namespace } = this.#place
          const wait = acquiring.waitOf(this.#place, options)
          const left = wait === undefined ? undefined : acquiring.leftOf(clock, wait)
          const attempt = (isLast: boolean): Effect.Effect<A, RendezvousError> => {
            // Each attempt has the rest of the time, and at least a try.
            const rest = left && Math.max(1, left())
            return Effect.flatMap(
              Effect.mapError(
                this.#meet("rendezvous.exchange", args, { wait: rest }, (hold, restore) => this.#met(hold, restore)),
                (error) => error.reason._tag === "WaitTimeout" ? fail(acquiring.waited(error.reason, wait!)) : error
              ),
              (met) => {
                if (Option.isSome(met)) return Effect.succeed(met.value)
                if (isLast) {
                  return Effect.fail(fail(acquiring.waited({ kind, key: name, namespace, away: false }, wait!)))
                }
                // The next party, or the outcome after all, for which one more try is made when the time is over.
                return attempt(left !== undefined && left() <= 0)
              }
            )
          }
          return attempt(false)
        })),
      "exchange"
    )

  /** The value of the counterpart, if it is certain that both have met. */
  #met(hold: Hold, restore: acquiring.Restore): Effect.Effect<Option.Option<A>, RendezvousError> {
    const [stage, theirs] = hold.payload
    // The counterpart has left before this party answered.
    if (stage === "alone") return Effect.succeedNone
    return Effect.flatMap(restore(this.#decode(theirs)), (value) =>
      Effect.map(
        stage === "met" ? Effect.succeed(true) : restore(this.#accept(hold)),
        (accepted) => accepted ? Option.some(value) : Option.none()
      ))
  }

  /** Says that this party is still there. False if the counterpart is not, or if that is not known. */
  #accept(hold: Hold): Effect.Effect<boolean, RendezvousError> {
    return Effect.suspend(() => {
      if (hold.loss !== undefined) return Effect.succeed(false)
      return Effect.mapBoth(
        request(this.#place, "rendezvous.accept", [hold.id], {
          session: hold.session,
          moot: () => ["unknown"] as const,
          waits: true
        }),
        {
          onFailure: ({ reason }) => fail(reason),
          onSuccess: ([tag]) => tag === "accepted"
        }
      )
    })
  }

  get present() {
    return Effect.mapBoth(question(this.#place, "rendezvous.state", []), {
      onFailure: ({ reason }) => fail(reason),
      onSuccess: ([, givers, takers, exchangers]) => ({ givers, takers, exchangers })
    })
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
    const { lease, name, schema, timeToLive = "10 minutes" } = options
    const place = placeOf(spaceOf(coordinator), "rendezvous", name, "name", lease)
    return new RendezvousImpl(place, schema, millis(timeToLive, "timeToLive"))
  })

/**
 * The class that `Service` makes.
 *
 * @category models
 * @since 0.1.0
 */
export interface ServiceClass<in out Self, in out Name extends string, in out A>
  extends AnyServiceClass<Self, `lockstep/Rendezvous/${Name}`, Rendezvous<A>, never, Coordinator>
{}

/**
 * A rendezvous as a typed service: `class Tasks extends Rendezvous.Service<Tasks>()("tasks", { schema: Task }) {}`, with
 * `Tasks.layer`.
 *
 * @category constructors
 * @since 0.1.0
 */
export const Service =
  <Self>() => <const Name extends string, A>(name: Name, options: Options<A>): ServiceClass<Self, Name, A> =>
    service<Self, "Rendezvous", Name, Rendezvous<A>, never, Coordinator>("Rendezvous", name, make({ ...options, name }))
