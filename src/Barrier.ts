/**
 * A barrier that several processes share: everybody waits until all parties have arrived, and then all go on, with what each
 * of them has brought. It is used again and again; each time is a generation.
 *
 * A barrier exists for as long as somebody has it open. `make` creates it, or joins one for as many parties.
 *
 * **Guarantees**
 *
 * - Nobody passes before all parties have arrived. All of a generation get the same contributions, in order of arrival, by
 *   one push to each process however many fibers wait there. Nothing polls.
 * - Each `await` arrives once, also when connections break and sessions are lost on the way.
 * - A party that is interrupted, times out (`Effect.timeout`), or dies while it waits breaks the generation for those who
 *   wait with it (`BarrierBroken`), or is taken out of it, with `onDeparture: "withdraw"`. It leaves nothing behind, and the
 *   next generation begins at once.
 * - The `action` is run by exactly one party of a generation, before anybody passes. It runs under a lease
 *   (`Lease.current`), and is interrupted when that is lost.
 * - After Redis has lost its data, those who wait arrive again by themselves.
 *
 * **Gotchas**
 *
 * - A process that dies is noticed when its lease has run out. Before that, its arrival counts.
 * - Generations are numbered from 1 for as long as somebody has the barrier open, and Redis its data.
 * - Everybody gets everything that was brought: keep contributions small, or bring names of what is large.
 * - Who comes while an action runs, or in excess of the parties, belongs to a later generation. While an action runs, nobody
 *   but its runner, and `reset`, breaks the generation: all have arrived.
 * - If the process of the action dies after it has succeeded and before that was known, the generation is broken all the
 *   same. A later generation runs an action of its own. If only its session is lost then, it hears what the others hear, or
 *   `LeaseLost` when so much has happened meanwhile that this is not known any more.
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
import * as Effect from "effect/Effect"
import { identity } from "effect/Function"
import * as Layer from "effect/Layer"
import * as Schema from "effect/Schema"
import type * as Scope from "effect/Scope"
import { Coordinator } from "./Coordinator.ts"
import { CoordinatorError, coordinatorError } from "./internal/actor/errors.ts"
import { kernelOf } from "./internal/actor/kernel.ts"
import type { Requests } from "./internal/actor/lua.ts"
import type { Claim, Refusal } from "./internal/hold/claim.ts"
import * as held from "./internal/hold/held.ts"
import { LeaseLost, type WaitTimeout } from "./internal/hold/loss.ts"
import { InvalidPayload, type Payload, payload } from "./internal/hold/payload.ts"
import { protectLease } from "./internal/hold/protect.ts"
import { checkParties, join, PartiesMismatch } from "./internal/parties.ts"

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
  /** How many had arrived before: 0 for the first. What this party has brought is `contributions[index]`. */
  readonly index: number
  /** What all have brought, in order of arrival. */
  readonly contributions: ReadonlyArray<A>
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
  readonly parties: number
  /**
   * Arrives, and waits until all parties have. Fails with `BarrierBroken` when one of those who wait leaves, with the error of
   * the action when it was this party that ran it, and with `LeaseLost` when the session was lost while it did. It is
   * interrupted when the scope of the barrier is closed.
   */
  readonly await: (contribution: A) => Effect.Effect<Arrival<A>, BarrierError | E>
  /** How many wait in the present generation now, by Redis's word. */
  readonly arrived: Effect.Effect<number, BarrierError>
  /**
   * Breaks the present generation if anybody waits; an action that runs is interrupted. If the session is lost meanwhile, it
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
   * Of the contributions, which travel as JSON. The same for all parties. Default: this party brings nothing, and does not look
   * at what others bring.
   */
  readonly schema?: Schema.Codec<A, any> | undefined
  /**
   * What it means that this party is interrupted or dies while it waits: `break` fails the others, `withdraw` takes it out,
   * and they wait for somebody else. Default `break`.
   */
  readonly onDeparture?: "break" | "withdraw" | undefined
  /**
   * Run once all have arrived, by the last one that has an action, before anybody passes. If it does not succeed, its party
   * departs: the generation is broken, or another party has to come, and runs it.
   */
  readonly action?: ((arrival: Arrival<A>) => Effect.Effect<unknown, E, R>) | undefined
}

/**
 * The generation cannot be completed any more. The next one has begun: `await` again, or give up.
 *
 * **Details**
 *
 * `why` it was broken:
 *
 * - `left`: a party that waited was interrupted, timed out or died, or its session was lost. Also said to a party that lost
 *   its own session, when so much has happened meanwhile that it is not known any more how its generation ended.
 * - `action`: the action did not succeed.
 * - `reset`: somebody has reset the barrier.
 *
 * @category errors
 * @since 0.1.0
 */
export class BarrierBroken extends Schema.Error<BarrierBroken>("lockstep/Barrier/BarrierBroken")({
  _tag: Schema.tag("BarrierBroken"),
  name: Schema.String,
  generation: Schema.Number,
  /** How many of the parties were not there any more, or not yet. */
  missing: Schema.Number,
  why: Schema.Literals(["left", "action", "reset"])
}) {
  override get message(): string {
    const why = { left: "a party has left", action: "its action did not succeed", reset: "it was reset" }[this.why]
    return `Generation ${this.generation} was broken, because ${why} (missing parties: ${this.missing}): await again, or give up.`
  }
}

export {
  /**
   * A value does not fit the schema: one's own, or another's, who uses another schema.
   *
   * @category errors
   * @since 0.1.0
   */
  InvalidPayload
} from "./internal/hold/payload.ts"

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
export class BarrierError extends Schema.Error<BarrierError>("lockstep/Barrier/BarrierError")({
  _tag: Schema.tag("BarrierError"),
  reason: Schema.Union([BarrierBroken, PartiesMismatch, InvalidPayload, LeaseLost, CoordinatorError])
}) {
  override get message(): string {
    return this.reason.message
  }
}

const fail = (reason: BarrierError["reason"]): BarrierError => new BarrierError({ reason })

type Passed = readonly [generation: number, contributions: unknown, index: number]

type Broken = Extract<Requests["barrier.release"]["reply"], readonly ["broken", ...any]>

/** How far a barrier has come, as far as is known here. */
interface Progress {
  epoch: number
  generation: number
}

class BarrierImpl<A, E> implements Barrier<A, E> {
  readonly "~lockstep/Barrier" = "~lockstep/Barrier" as const
  readonly name: string
  readonly parties: number

  // By one event for all who wait here, and so decoded once.
  #decoded: { readonly from: unknown; readonly values: ReadonlyArray<A> } | undefined = undefined
  readonly #place: held.Place
  readonly #member: Claim
  readonly #progress: Progress
  readonly #action: Options<A, E>["action"]
  readonly #mode: string
  readonly #payload: Payload<A>

  constructor(
    place: held.Place,
    member: Claim,
    progress: Progress,
    { action, onDeparture, parties, schema }: Options<A, E>
  ) {
    this.name = place.name
    this.parties = parties
    this.#place = place
    this.#member = member
    this.#progress = progress
    this.#action = action
    this.#mode = (onDeparture === "withdraw" ? "w" : "b") + (action === undefined ? "0" : "1")
    this.#payload = payload(schema)
  }

  readonly await = (contribution: A): Effect.Effect<Arrival<A>, BarrierError | E> =>
    Effect.flatMap(
      Effect.mapError(this.#payload.encode(contribution, "A contribution"), fail),
      (json): Effect.Effect<Arrival<A>, BarrierError | E> => {
        // Whatever asks for it and however often, it is one arrival.
        const arrival = this.#place.partition.kernel.uniqueId()
        return this.#action === undefined
          ? held.ask(this.#asking(arrival, json), (reply) => this.#ended(reply as Refusal, identity))
          : Effect.uninterruptibleMask((restore) => this.#lead(arrival, json, restore))
      }
    )

  #asking(arrival: string, contribution: string) {
    let since = ""
    return {
      place: this.#place,
      member: this.#member,
      verb: "barrier.arrive",
      check: "barrier.check",
      details: () => {
        const mode = this.#mode + since
        if (since === "") since = ` ${this.#progress.epoch} ${this.#progress.generation}`
        return [arrival, this.#member.id, contribution, this.parties, mode]
      },
      fail: (error: CoordinatorError | LeaseLost | WaitTimeout) => fail(error as CoordinatorError)
    } as const
  }

  /** Arrives as one that may have to run the action. */
  #lead(
    arrival: string,
    contribution: string,
    restore: <A, E, R>(effect: Effect.Effect<A, E, R>) => Effect.Effect<A, E, R>
  ): Effect.Effect<Arrival<A>, BarrierError | E> {
    return Effect.flatMap(
      held.acquire({
        ...this.#asking(arrival, contribution),
        weight: 1,
        capacity: 0,
        wait: true,
        options: undefined,
        refuse: (reply) => this.#ended(reply, restore)
      }, restore),
      (outcome) =>
        outcome instanceof held.Held
          ? Effect.ensuring(restore(this.#act(arrival, outcome)), held.giveBack(outcome.claim))
          : Effect.succeed(outcome)
    )
  }

  // What comes later is of a later generation.
  #advance(ended: number): void {
    this.#progress.generation = Math.max(this.#progress.generation, ended + 1)
  }

  #ended(
    reply: Refusal,
    restore: <A, E, R>(effect: Effect.Effect<A, E, R>) => Effect.Effect<A, E, R>
  ): Effect.Effect<Arrival<A>, BarrierError> {
    switch (reply[0]) {
      case "passed": {
        const [, ...passed] = reply as readonly ["passed", ...Passed]
        this.#advance(passed[0])
        return this.#complete(passed, restore)
      }
      case "broken":
        this.#advance(reply[1])
        return this.#broken(reply)
      case "mismatch":
        return Effect.fail(fail(new PartiesMismatch({ name: this.name, parties: this.parties, existing: reply[1] })))
      default:
        return Effect.interrupt
    }
  }

  #broken([, generation, missing, why]: Broken): Effect.Effect<never, BarrierError> {
    return Effect.fail(
      fail(new BarrierBroken({ name: this.name, generation, missing, why: why as BarrierBroken["why"] }))
    )
  }

  #complete(
    [generation, contributions, index]: Passed,
    restore: <A, E, R>(effect: Effect.Effect<A, E, R>) => Effect.Effect<A, E, R>
  ): Effect.Effect<Arrival<A>, BarrierError> {
    const known = this.#decoded
    if (known !== undefined && known.from === contributions) {
      return Effect.succeed({ generation, index, contributions: known.values })
    }
    return restore(Effect.map(
      Effect.mapError(this.#payload.decodeAll(contributions, "A contribution"), fail),
      (values) => {
        this.#decoded = { from: contributions, values }
        return { generation, index, contributions: values }
      }
    ))
  }

  /** Runs the action under its lease, and lets everybody pass. */
  #act(arrival: string, lease: held.Held): Effect.Effect<Arrival<A>, BarrierError | E> {
    return Effect.flatMap(
      this.#complete(lease.claim.payload as Passed, identity),
      (complete) =>
        Effect.andThen(
          protectLease(this.#action!(complete), lease, (loss) => this.#lost(loss, complete)),
          this.#release(arrival, lease, complete)
        )
    )
  }

  // Nobody but a reset ends it from outside.
  #lost(loss: LeaseLost, { generation }: Arrival<A>): BarrierError {
    return fail(
      loss.reason === "revoked"
        ? new BarrierBroken({ name: this.name, generation, missing: 0, why: "reset" })
        : loss
    )
  }

  // When its session is lost meanwhile, the next one hears whether the others have passed.
  #release(arrival: string, lease: held.Held, complete: Arrival<A>): Effect.Effect<Arrival<A>, BarrierError> {
    return Effect.callback((resume) =>
      held.conclude(lease.claim, {
        verb: "barrier.release",
        args: [arrival],
        settle: (reply) => {
          this.#advance(complete.generation)
          if (reply[0] === "passed") return resume(Effect.succeed(complete))
          if (reply[0] === "broken") return resume(this.#broken(reply))
          // Without a lost session, it can only have been broken before this came.
          resume(Effect.fail(this.#lost(lease.loss("revoked"), complete)))
        },
        fail: (error) => resume(Effect.fail(fail(error)))
      })
    )
  }

  get arrived(): Effect.Effect<number, BarrierError> {
    const { key, partition } = this.#place
    return Effect.map(
      Effect.tryPromise({
        try: () => partition.kernel.inspect(partition, { verb: "barrier.state", key, args: [] }),
        catch: (cause) => fail(coordinatorError(cause))
      }),
      // Not there for a moment after Redis has lost its data.
      (reply) => reply[0] === "missing" ? 0 : reply[1]
    )
  }

  get reset(): Effect.Effect<void, BarrierError> {
    return Effect.callback((resume) =>
      this.#place.partition.request({
        verb: "barrier.reset",
        key: this.#place.key,
        args: [],
        settle: () => resume(Effect.void),
        fail: (error) => resume(Effect.fail(fail(error)))
      })
    )
  }
}

type Typed<A, E, R> = Options<A, E, R> & { readonly schema: Schema.Codec<A, any> }

type Untyped<E, R> = Options<void, E, R> & { readonly schema?: undefined }

/**
 * Creates the barrier, or joins it when it is for as many parties; with another number it fails with `PartiesMismatch`. It
 * stays open with the scope.
 *
 * @category constructors
 * @since 0.1.0
 */
export const make: {
  <A, E = never, R = never>(
    options: Typed<A, E, R> & { readonly name: string }
  ): Effect.Effect<Barrier<A, E>, BarrierError, Coordinator | Scope.Scope | R>
  <E = never, R = never>(
    options: Untyped<E, R> & { readonly name: string }
  ): Effect.Effect<Barrier<void, E>, BarrierError, Coordinator | Scope.Scope | R>
} = Effect.fnUntraced(function*<A, E, R>(options: Options<A, E, R> & { readonly name: string }) {
  const parties = checkParties(options.parties)
  const place = held.placeOf(kernelOf(yield* Coordinator), "barrier", options.name, "name")
  const context = yield* Effect.context<R>()
  const progress: Progress = { epoch: 0, generation: 0 }
  const member = yield* join(place, "barrier.join", parties, fail, ([generation, epoch]) => {
    progress.generation = epoch === progress.epoch
      ? Math.max(progress.generation, Number(generation))
      : Number(generation)
    progress.epoch = Number(epoch)
  })
  const { action } = options
  return new BarrierImpl<A, E>(place, member, progress, {
    ...options,
    // What its party has around it comes first.
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
export interface ServiceClass<in out Self, in out Id extends string, in out A, out E = never, out R = never>
  extends Context.ServiceClass<Self, Id, Barrier<A, E>>
{
  readonly layer: Layer.Layer<Self, BarrierError, Coordinator | R>
}

/**
 * A barrier as a typed service: `class Sums extends Barrier.Service<Sums>()("sums", { parties: 3 }) {}`, with `Sums.layer`.
 *
 * @category constructors
 * @since 0.1.0
 */
export const Service = <Self>(): {
  <const Id extends string, A, E = never, R = never>(
    name: Id,
    options: Typed<A, E, R>
  ): ServiceClass<Self, Id, A, E, Exclude<R, Scope.Scope>>
  <const Id extends string, E = never, R = never>(
    name: Id,
    options: Untyped<E, R>
  ): ServiceClass<Self, Id, void, E, Exclude<R, Scope.Scope>>
} =>
(name: string, options: Options<any, any, any>) => {
  const tag = Context.Service<Self, Barrier<any, any>>()(name)
  return Object.assign(tag, { layer: Layer.effect(tag, make({ ...options, name } as never)) }) as never
}
