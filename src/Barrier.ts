/**
 * A barrier that several processes share. A party waits until all parties have arrived; then all go on, with the contributions
 * of all. The barrier is used again and again; each time is a generation.
 *
 * A barrier exists for as long as a process has it open. `make` creates it, or joins one for as many parties.
 *
 * **Guarantees**
 *
 * - No party passes before all parties have arrived. All of a generation get the same contributions, in order of arrival, by
 *   one push to each process however many fibers wait there. Nothing polls.
 * - Each `await` arrives once, also when connections break and sessions are lost on the way.
 * - A party that is interrupted, times out (`wait`) or dies while it waits breaks the generation. The parties that wait with it
 *   fail with `BarrierBroken`, and the next generation begins at once. With `onDeparture: "withdraw"`, the departing party is
 *   taken out of the generation instead. In both cases it leaves nothing behind.
 * - The `action` is run by exactly one party of a generation, before any party passes. It runs under a lease
 *   (`Lease.current`), and is interrupted when that is lost.
 * - After Redis has lost its data, parties that wait arrive again by themselves.
 * - The number of parties can change while processes have it open: see `onMismatch`.
 *
 * **Gotchas**
 *
 * - A process that dies is noticed when its lease has run out. Before that, its arrival counts.
 * - Generations are numbered from 1 for as long as a process has the barrier open, and Redis its data. After a crash of the last one,
 *   the numbers go on for a day.
 * - All parties get everything that was brought: keep contributions small, or bring names of what is large.
 * - A party that arrives while an action runs, or in excess of the parties, belongs to a later generation. While an action
 *   runs, only its runner and `reset` break the generation: all have arrived.
 * - Closing the scope of the barrier interrupts its waiting parties.
 * - If the process of the action dies after it has succeeded and before that was known, the generation is broken all the same.
 *   A later generation runs an action of its own. If the process only loses its session then, it receives the same outcome as
 *   the others. It fails with `LeaseLost` when so much has happened meanwhile that the outcome is not known any more.
 *
 * **Example** (Exchanging partial results)
 *
 * ```ts
 * import { Barrier, Coordinator } from "lockstep"
 * import { Effect, Schema } from "effect"
 *
 * const program = Effect.gen(function*() {
 *   const barrier = yield* Barrier.make({ name: "sums", parties: 3, schema: Schema.Number })
 *   const shard = Effect.fnUntraced(function*(sum: number) {
 *     const { contributions } = yield* barrier.await(sum)
 *     return contributions.reduce((total, one) => total + one, 0)
 *   })
 *   return yield* Effect.forEach([1, 2, 3], shard, { concurrency: "unbounded" }) // [6, 6, 6]
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
import { identity } from "effect/Function"
import * as Schema from "effect/Schema"
import type * as Scope from "effect/Scope"
import { Coordinator } from "./Coordinator.ts"
import { coordinatorReasons } from "./internal/actor/errors.ts"
import type { Requests } from "./internal/actor/lua.ts"
import * as acquiring from "./internal/hold/acquire.ts"
import type { Refusal } from "./internal/hold/claim.ts"
import type { Departure } from "./internal/hold/departing.ts"
import { Hold } from "./internal/hold/hold.ts"
import { describe, LeaseLost, WaitTimeout } from "./internal/hold/loss.ts"
import type { Membership } from "./internal/hold/membership.ts"
import { InvalidPayload, type Payload, payload } from "./internal/hold/payload.ts"
import { callback, oneOf, type Place, placeOf, spaceOf } from "./internal/hold/place.ts"
import { protect } from "./internal/hold/protect.ts"
import { memberQuestion, request } from "./internal/hold/request.ts"
import { service, type ServiceClass as AnyServiceClass } from "./internal/hold/service.ts"
import { spanning } from "./internal/hold/span.ts"
import { checkParties, type Known, open, PartiesMismatch } from "./internal/sync/parties.ts"

/**
 * @category type IDs
 * @since 0.1.0
 */
export const TypeId: TypeId = "~lockstep/Barrier"

/**
 * @category type IDs
 * @since 0.1.0
 */
export type TypeId = "~lockstep/Barrier"

/**
 * A generation that is complete, as one of its parties sees it.
 *
 * @category models
 * @since 0.1.0
 */
export interface Arrival<out A> {
  /** From 1 on. */
  readonly generation: number
  /** How many had arrived before: 0 for the first. The contribution of this party is `contributions[index]`. */
  readonly index: number
  /** The contributions of all parties, in order of arrival. */
  readonly contributions: ReadonlyArray<A>
}

/**
 * @category options
 * @since 0.1.0
 */
export interface WaitOptions {
  /**
   * How long to wait for the other parties; then it departs and fails with `WaitTimeout`. An action that has begun is not
   * bounded by it. Default: that of the coordinator, as long as it takes.
   */
  readonly wait?: Duration.Input | undefined
}

/**
 * Named as `java.util.concurrent.CyclicBarrier`.
 *
 * @category models
 * @since 0.1.0
 */
export interface Barrier<in out A, out E = never> {
  readonly [TypeId]: TypeId
  readonly name: string
  /** How many parties there are now, as far as this process knows: another process may have changed the number. */
  readonly parties: number
  /**
   * Arrives, and waits until all parties have. Fails with `BarrierBroken` when a waiting party leaves. The party that runs the
   * action fails with the error of the action, or with `LeaseLost` if its session is lost, or the scope of the
   * barrier is closed, meanwhile. An `await` that waits is interrupted when that scope is closed.
   */
  readonly await: (contribution: A, options?: WaitOptions | undefined) => Effect.Effect<Arrival<A>, BarrierError | E>
  /** How many parties wait in the present generation now, by Redis's word. */
  readonly arrived: Effect.Effect<number, BarrierError>
  /**
   * Breaks the present generation if a party waits; an action that runs is interrupted. If the session is lost meanwhile, it
   * may be done a second time.
   */
  readonly reset: Effect.Effect<void, BarrierError>
}

/**
 * @category options
 * @since 0.1.0
 */
export interface Options<A = void, E = never, R = never> {
  /** A whole number from 1 to 1,024. */
  readonly parties: number
  /**
   * What to do when it is open elsewhere for another number of parties. `fail` fails with `PartiesMismatch`, `keep` keeps the
   * number that it has, and `resize` changes it for all processes. Default `fail`. When no other process has it open, it gets
   * this number.
   *
   * **Details**
   *
   * After a `resize` the present generation passes if enough parties have arrived; only one whose action runs keeps its
   * number. To change the number while a fleet is replaced, deploy it with `resize`, or with `keep` where the number comes
   * from another process.
   */
  readonly onMismatch?: "fail" | "keep" | "resize" | undefined
  /**
   * Of the contributions, which travel as JSON. The same for all parties. Default: this party brings nothing, and does not look
   * at the contributions of others.
   */
  readonly schema?: Schema.Codec<A, any> | undefined
  /**
   * The effect on the others when this party is interrupted or dies while it waits. `break` fails them. `withdraw` takes this
   * party out, and they wait for another one. Default `break`.
   */
  readonly onDeparture?: "break" | "withdraw" | undefined
  /**
   * Run once all have arrived, by the last one that has an action, before any party passes. If it does not succeed, its party
   * departs: the generation is broken, or another party has to come, and runs it. It is bounded by the `maxHold` of the
   * coordinator.
   */
  readonly action?: ((arrival: Arrival<A>) => Effect.Effect<unknown, E, R>) | undefined
  /** How long an arrival outlives a process that died. Default: the coordinator's lease. */
  readonly lease?: Duration.Input | undefined
}

/**
 * The generation cannot be completed any more. The next one has begun: `await` again, or give up.
 *
 * **Details**
 *
 * `why` it was broken:
 *
 * - `left`: a party that waited was interrupted, timed out or died, or its session was lost.
 * - `action`: the action did not succeed.
 * - `reset`: a process has reset the barrier.
 * - `unknown`: this party was away for so long that the end of its generation is not known any more. It may have passed, with what this
 *   party has brought. `generation` is the first one that it may have been of.
 *
 * @category errors
 * @since 0.1.0
 */
export class BarrierBroken extends Schema.Error<BarrierBroken>("lockstep/Barrier/BarrierBroken")({
  _tag: Schema.tag("BarrierBroken"),
  name: Schema.String,
  namespace: Schema.String,
  generation: Schema.Number,
  /** How many of the parties were not there any more, or not yet. */
  missing: Schema.Number,
  why: Schema.Literals(["left", "action", "reset", "unknown"])
}) {
  override get message(): string {
    const subject = describe("barrier", this.name, this.namespace)
    if (this.why === "unknown") {
      return `How generation ${this.generation} of ${subject} has ended is not known any more: it may have passed. ` +
        `Look at what the others have done, and await again, or give up.`
    }
    const why = { left: "a party has left", action: "its action did not succeed", reset: "it was reset" }[this.why]
    return `Generation ${this.generation} of ${subject} was broken, because ${why} ` +
      `(missing parties: ${this.missing}): await again, or give up.`
  }
}

export {
  /**
   * A value does not fit the schema: one's own, or that of a party with another schema.
   *
   * @category errors
   * @since 0.1.0
   */
  InvalidPayload
} from "./internal/hold/payload.ts"

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
export class BarrierError extends Schema.Error<BarrierError>("lockstep/Barrier/BarrierError")({
  _tag: Schema.tag("BarrierError"),
  reason: Schema.Union([
    BarrierBroken,
    PartiesMismatch,
    InvalidPayload,
    LeaseLost,
    WaitTimeout,
    ...coordinatorReasons
  ])
}) {
  override get message(): string {
    return this.reason.message
  }
}

const fail = (reason: BarrierError["reason"]): BarrierError => new BarrierError({ reason })

type Passed = readonly [generation: number, contributions: unknown, index: number]

type Broken = Extract<Requests["barrier.release"]["reply"], readonly ["broken", ...any]>

/** How far a barrier has come, as far as is known here. */
interface Progress extends Known {
  epoch: number
  generation: number
}

const departing = (arrival: string): Departure<"barrier.depart"> => ({
  verb: "barrier.depart",
  args: [arrival],
  told: (id, reply) =>
    reply[0] === "departed" ? "departed" : reply[0] === "acting" ? "later" : ["each", id, [], ...reply]
})

// So many that bring nothing are a number.
const listOf = (contributions: unknown): unknown =>
  typeof contributions === "number" ? Array.from({ length: contributions }, () => null) : contributions

class BarrierImpl<A, E> implements Barrier<A, E> {
  readonly "~lockstep/Barrier" = "~lockstep/Barrier" as const
  readonly name: string

  // One event answers all waiters of this process, so it is decoded once.
  #decoded: { readonly generation: number; readonly from: unknown; readonly values: ReadonlyArray<A> } | undefined =
    undefined
  readonly #place: Place
  readonly #member: Membership
  readonly #progress: Progress
  readonly #action: Options<A, E>["action"]
  readonly #mode: string
  readonly #payload: Payload<A>
  readonly #contribution: string

  constructor(
    place: Place,
    member: Membership,
    progress: Progress,
    { action, onDeparture, schema }: Options<A, E>
  ) {
    this.name = place.name
    this.#place = place
    this.#member = member
    this.#progress = progress
    this.#action = action
    this.#mode = (onDeparture === "withdraw" ? "w" : "b") + (action === undefined ? "0" : "1")
    this.#payload = payload(schema, place)
    this.#contribution = `A contribution to barrier ${JSON.stringify(place.name)}`
  }

  get parties(): number {
    return this.#progress.parties
  }

  readonly await = (
    contribution: A,
    options?: WaitOptions | undefined
  ): Effect.Effect<Arrival<A>, BarrierError | E> =>
    spanning(
      Effect.flatMap(
        Effect.mapError(this.#payload.encode(contribution, this.#contribution), fail),
        (json): Effect.Effect<Arrival<A>, BarrierError | E> => {
          // However often it is asked for, it is one arrival.
          const arrival = this.#place.space.kernel.uniqueId()
          return this.#action === undefined && acquiring.waitOf(this.#place, options) === undefined
            ? acquiring.ask(this.#asking(arrival, json), (reply) => this.#ended(reply as Refusal, identity))
            : Effect.uninterruptibleMask((restore) => this.#lead(arrival, json, options, restore))
        }
      ),
      "lockstep.Barrier.await",
      "barrier",
      this.name
    )

  #asking(arrival: string, contribution: string) {
    let since = ""
    return {
      place: this.#place,
      member: this.#member,
      verb: "barrier.arrive",
      args: () => {
        const { epoch, generation, parties } = this.#progress
        const mode = this.#mode + since
        if (since === "") since = ` ${epoch} ${generation}`
        return [arrival, this.#member.id, contribution, parties, mode]
      },
      fail: (error: acquiring.Failure) => fail(error)
    } as const
  }

  /** Arrives as one that may have to run the action, or may depart. */
  #lead(
    arrival: string,
    contribution: string,
    options: WaitOptions | undefined,
    restore: acquiring.Restore
  ): Effect.Effect<Arrival<A>, BarrierError | E> {
    return Effect.flatMap(
      acquiring.acquire({
        ...this.#asking(arrival, contribution),
        options,
        departure: departing(arrival),
        refuse: (reply) => this.#ended(reply, restore)
      }, restore),
      (outcome) =>
        outcome instanceof Hold
          ? Effect.onExitPrimitive(this.#act(arrival, outcome, restore), () => acquiring.leave(outcome), true)
          : Effect.succeed(outcome)
    )
  }

  // A later arrival is of a later generation.
  #advance(ended: number): void {
    this.#progress.generation = Math.max(this.#progress.generation, ended + 1)
  }

  #ended(reply: Refusal, restore: acquiring.Restore): Effect.Effect<Arrival<A>, BarrierError> {
    switch (reply[0]) {
      case "passed": {
        const passed = reply as readonly ["passed", ...Passed]
        this.#advance(passed[1])
        return this.#complete(passed[1], passed[2], passed[3], restore)
      }
      case "broken":
        this.#advance(reply[1])
        return this.#broken(reply)
      default:
        return Effect.interrupt
    }
  }

  #brokenError(generation: number, missing: number, why: BarrierBroken["why"]): BarrierError {
    const { namespace } = this.#place.space.kernel.settings
    return fail(new BarrierBroken({ name: this.name, namespace, generation, missing, why }))
  }

  #broken([, generation, missing, why]: Broken): Effect.Effect<never, BarrierError> {
    return Effect.fail(this.#brokenError(generation, missing, why as BarrierBroken["why"]))
  }

  #complete(
    generation: number,
    contributions: unknown,
    index: number,
    restore: acquiring.Restore
  ): Effect.Effect<Arrival<A>, BarrierError> {
    const known = this.#decoded
    if (known !== undefined && known.from === contributions && known.generation === generation) {
      return Effect.succeed({ generation, index, contributions: known.values })
    }
    return restore(Effect.map(
      Effect.mapError(this.#payload.decodeAll(listOf(contributions), this.#contribution), fail),
      (values) => {
        this.#decoded = { generation, from: contributions, values }
        return { generation, index, contributions: values }
      }
    ))
  }

  /** Runs the action under its lease, and lets all parties pass. */
  #act(arrival: string, hold: Hold, restore: acquiring.Restore): Effect.Effect<Arrival<A>, BarrierError | E> {
    const place = this.#place
    const maxHold = acquiring.maxHoldOf(place, undefined)
    return Effect.flatMap(
      this.#complete(...hold.payload as Passed, restore),
      (complete) =>
        Effect.andThen(
          protect(
            this.#action!(complete),
            hold,
            restore,
            (loss) => this.#lost(loss, complete),
            maxHold === undefined ? undefined : { place, maxHold }
          ),
          restore(this.#release(arrival, hold, complete))
        )
    )
  }

  // Only a reset ends it from outside.
  #lost(loss: LeaseLost, { generation }: Arrival<A>): BarrierError {
    return loss.reason === "revoked" ? this.#brokenError(generation, 0, "reset") : fail(loss)
  }

  // When its session is lost meanwhile, the next one receives whether the others have passed.
  #release(arrival: string, hold: Hold, complete: Arrival<A>): Effect.Effect<Arrival<A>, BarrierError> {
    return Effect.callback((resume) =>
      acquiring.conclude(this.#place, hold, {
        verb: "barrier.release",
        args: [arrival],
        settle: (reply) => {
          this.#advance(complete.generation)
          if (reply[0] === "passed") return resume(Effect.succeed(complete))
          if (reply[0] === "broken") return resume(this.#broken(reply))
          // Without a lost session, it can only have been broken before this came.
          resume(Effect.fail(this.#lost(hold.lossError("revoked"), complete)))
        },
        fail: (reason) => resume(Effect.fail(fail(reason)))
      })
    )
  }

  get arrived(): Effect.Effect<number, BarrierError> {
    return Effect.mapBoth(memberQuestion(this.#place, "barrier.state", []), {
      onFailure: ({ reason }) => fail(reason),
      // Not there for a moment after Redis has lost its data.
      onSuccess: (reply) => reply[0] === "missing" ? 0 : reply[1]
    })
  }

  get reset(): Effect.Effect<void, BarrierError> {
    return Effect.mapBoth(request(this.#place, "barrier.reset", []), {
      onFailure: ({ reason }) => fail(reason),
      onSuccess: () => undefined
    })
  }
}

// Redis has forgotten the barrier, or what has arrived, though not the session.
const arriveAgain = ({ channel: { session }, tenancy }: Place, { dependents }: Membership): void => {
  if (session === undefined) return
  for (const { id, state } of dependents.values()) if (state === "queued") tenancy.heard(session, ["again", id])
}

type Typed<A, E, R> = Options<A, E, R> & { readonly schema: Schema.Codec<A, any> }

type Untyped<E, R> = Options<void, E, R> & { readonly schema?: undefined }

/**
 * Creates the barrier, or joins it when it is for as many parties; with another number, `onMismatch` decides. It stays open
 * with the scope.
 *
 * @category constructors
 * @since 0.1.0
 */
export const make: {
  <E = never, R = never>(
    options: Untyped<E, R> & { readonly name: string }
  ): Effect.Effect<Barrier<void, E>, BarrierError, Coordinator | Scope.Scope | R>
  <A, E = never, R = never>(
    options: Typed<A, E, R> & { readonly name: string }
  ): Effect.Effect<Barrier<A, E>, BarrierError, Coordinator | Scope.Scope | R>
} = Effect.fnUntraced(function*<E, R>(options: Options<any, E, R> & { readonly name: string }) {
  const parties = checkParties(options.parties)
  oneOf(options.onDeparture ?? "break", "onDeparture", ["break", "withdraw"])
  callback(options.action, "action")
  const place = placeOf(spaceOf(yield* Coordinator), "barrier", options.name, "name", options.lease)
  const context = yield* Effect.context<R>()
  const progress: Progress = { epoch: 0, generation: 0, parties, change: 0 }
  let member: Membership | undefined = undefined
  let isNew = true
  const observe = ([generation, epoch]: ReadonlyArray<unknown>) => {
    // A reply can come behind an event that is newer. Redis goes back to an earlier epoch only with the loss of the session.
    if (Number(epoch) < progress.epoch && !isNew) return
    isNew = false
    const same = epoch === progress.epoch
    progress.generation = same ? Math.max(progress.generation, Number(generation)) : Number(generation)
    progress.epoch = Number(epoch)
    if (!same && member !== undefined) arriveAgain(place, member)
  }
  member = yield* open(place, "barrier.join", options, progress, fail, observe, () => {
    isNew = true
  })
  const { action } = options
  return new BarrierImpl<any, E>(place, member, progress, {
    ...options,
    // The services of its party come first.
    action: action && ((arrival) =>
      Effect.updateContext(
        action(arrival),
        (around: Context.Context<never>) => Context.merge(context, around)
      ))
  })
})

/**
 * The class that `Service` makes.
 *
 * @category models
 * @since 0.1.0
 */
export interface ServiceClass<in out Self, in out Name extends string, in out A, in out E = never, in out R = never>
  extends AnyServiceClass<Self, `lockstep/Barrier/${Name}`, Barrier<A, E>, BarrierError, Coordinator | R>
{}

/**
 * A barrier as a typed service: `class Sums extends Barrier.Service<Sums>()("sums", { parties: 3 }) {}`, with `Sums.layer`.
 *
 * @category constructors
 * @since 0.1.0
 */
export const Service = <Self>(): {
  <const Name extends string, E = never, R = never>(
    name: Name,
    options: Untyped<E, R>
  ): ServiceClass<Self, Name, void, E, Exclude<R, Scope.Scope>>
  <const Name extends string, A, E = never, R = never>(
    name: Name,
    options: Typed<A, E, R>
  ): ServiceClass<Self, Name, A, E, Exclude<R, Scope.Scope>>
} =>
(name: string, options: Options<any, any, any>) =>
  service<Self, "Barrier", string, Barrier<any, any>, BarrierError, any>(
    "Barrier",
    name,
    make({ ...options, name } as never)
  ) as never
