/**
 * Leader election: one of many candidates leads, until it resigns or its lease ends, and the next in line succeeds it.
 *
 * **Guarantees**
 *
 * - One leader at a time, in the order in which the candidates came. Every term has a number, larger than all before it: it
 *   is the fencing token of the leader's lease (see `Fence`).
 * - `lead` interrupts its effect when the lease is lost, and campaigns again. No other process is granted the next term
 *   before the margin has passed: that of the coordinator, or of the election's own `lease`. The effect of the former leader has
 *   ended by then; one whose finalizers take longer is logged and counted (`Metrics`).
 * - A leader that dies is succeeded when its lease has run out. A leader that resigns, or whose process ends in good order,
 *   is succeeded at once.
 * - `changes` shows the present leader, and then every change in order, the time without a leader included. Broken connections
 *   do not make it miss any. It does not show the single terms of a leadership that is kept (`cached`).
 *
 * **Gotchas**
 *
 * - This is a lease: see `Lease` for what it cannot promise. A write that must not come from a former leader has to carry the
 *   term and be checked where it is written.
 * - An observer whose own session is lost sees the state when it has a new session, and not what happened meanwhile. Until
 *   then the last state that it saw stays: `leader` asks Redis.
 * - A leader whose connection is lost leads on until its lease ends: watch `Coordinator.changes` for `suspended` in order to step
 *   down before.
 * - A candidate waits for as long as the `wait` of its coordinator, if that has one: say `wait` in order to stand by for
 *   longer. The `maxHold` of a coordinator does not end terms.
 * - Each `make` is a candidate of its own, also another one of the same name in one process. `isLeader`, `resign`, `proclaim` and
 *   `transferTo` are about the terms of their own object: share one, as a service does.
 * - Closing the scope of `make` ends terms, and no waits: a candidate that wins later loses its term at once (`closed`).
 * - Values are sent to all observers with every change: keep them small.
 *
 * **Example** (One of many processes leads, and all know where it listens)
 *
 * ```ts
 * import { Coordinator, Election } from "lockstep"
 * import { Effect, Schema, Stream } from "effect"
 *
 * const program = Effect.gen(function*() {
 *   const election = yield* Election.make({ name: "scheduler", schema: Schema.String, value: "http://10.0.0.7:8080" })
 *   yield* Effect.forkScoped(election.changes.pipe(Stream.runForEach((leader) => Effect.log(leader))))
 *   yield* Effect.log("I lead").pipe(election.lead())
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
import type * as Option from "effect/Option"
import * as Schema from "effect/Schema"
import type * as Scope from "effect/Scope"
import * as Semaphore from "effect/Semaphore"
import type * as Stream from "effect/Stream"
import { Coordinator } from "./Coordinator.ts"
import { type CoordinatorError, coordinatorReasons } from "./internal/actor/errors.ts"
import type { Callbacks as AnyCallbacks, Transition } from "./internal/election/callbacks.ts"
import { type Candidacy, candidacy } from "./internal/election/candidacy.ts"
import { campaigning, lead, withoutMaxHold } from "./internal/election/leading.ts"
import { type Candidate, type Info, valueOf, type View, view } from "./internal/election/view.ts"
import { acquireScoped, nested, surrender } from "./internal/hold/acquire.ts"
import type { Hold } from "./internal/hold/hold.ts"
import { describe, LeaseLost, WaitTimeout } from "./internal/hold/loss.ts"
import { InvalidPayload, type Payload, payload } from "./internal/hold/payload.ts"
import { type Place, placeOf, spaceOf } from "./internal/hold/place.ts"
import { request } from "./internal/hold/request.ts"
import { service, type ServiceClass as AnyServiceClass } from "./internal/hold/service.ts"
import { spanning } from "./internal/hold/span.ts"
import type { Lease } from "./Lease.ts"

/**
 * @category type IDs
 * @since 0.1.0
 */
export const TypeId: TypeId = "~lockstep/Election"

/**
 * @category type IDs
 * @since 0.1.0
 */
export type TypeId = "~lockstep/Election"

export type {
  /**
   * A process that waits to lead.
   *
   * @category models
   * @since 0.1.0
   */
  Candidate,
  /**
   * The process that leads.
   *
   * @category models
   * @since 0.1.0
   */
  Info
} from "./internal/election/view.ts"

export type {
  /**
   * A change of an election object as a candidate.
   *
   * @category models
   * @since 0.1.0
   */
  Transition
} from "./internal/election/callbacks.ts"

/**
 * @category options
 * @since 0.1.0
 */
export interface CampaignOptions {
  /**
   * How long to wait for the term; then it fails with `WaitTimeout`. Default: that of the coordinator, as long as it takes.
   */
  readonly wait?: Duration.Input | undefined
  /**
   * Keep the leadership when this process has led again within 50 ms of the end of a term. It can then lead again without asking Redis,
   * many times faster, each time in a larger term. Other processes see one leader, in the first of these terms. The process resigns when
   * it has not led for 50 ms, after 1,000 terms, after 0.9 s, and when another candidate comes. That one waits a little longer. A
   * process that ends without closing its coordinator may keep the leadership for the lease. Default `false`.
   */
  readonly cached?: boolean | undefined
}

/**
 * @category models
 * @since 0.1.0
 */
export interface Election<A> {
  readonly [TypeId]: TypeId
  readonly name: string
  /**
   * Runs an effect while leading, and resigns when the effect ends. When the lease is lost, or after `resign`, the effect is
   * interrupted, and the process campaigns again; failures of its finalizers are logged. Fails with `LeaseLost` (`closed`) when
   * the coordinator is closed, or the scope of `make`, and with the failures of finalizers then.
   */
  readonly lead: {
    <B, E, R>(
      self: Effect.Effect<B, E, R>,
      options?: CampaignOptions | undefined
    ): Effect.Effect<B, E | ElectionError, R>
    (
      options?: CampaignOptions | undefined
    ): <B, E, R>(self: Effect.Effect<B, E, R>) => Effect.Effect<B, E | ElectionError, R>
  }
  /** As `lead`, but when the effect has ended with success, the process campaigns again. */
  readonly leadForever: {
    <B, E, R>(
      self: Effect.Effect<B, E, R>,
      options?: CampaignOptions | undefined
    ): Effect.Effect<never, E | ElectionError, R>
    (
      options?: CampaignOptions | undefined
    ): <B, E, R>(self: Effect.Effect<B, E, R>) => Effect.Effect<never, E | ElectionError, R>
  }
  /**
   * Waits until it leads, and leads for as long as the scope is open. Nothing is interrupted by itself when the lease is
   * lost: watch `lease.lost`, or use `lead`.
   */
  readonly campaign: (options?: CampaignOptions | undefined) => Effect.Effect<Lease, ElectionError, Scope.Scope>
  /**
   * Ends the term of this object. The effect under it is interrupted, and has the margin to end before the next candidate
   * follows. Ends a leadership that the process keeps (`cached`), too. Does nothing if it does not lead.
   */
  readonly resign: Effect.Effect<void>
  /**
   * Another value for the rest of this term; the value that it has already is no change. Fails with `NotLeading` if this
   * object does not lead. While Redis is away it fails after the coordinator's `requestTimeout`; with `Timeout` the value
   * may have changed all the same, so retry.
   */
  readonly proclaim: (value: A) => Effect.Effect<void, ElectionError>
  /**
   * Resigns in favour of a candidate, which has the next term. Fails with `CandidateGone`, and goes on leading, if that does
   * not wait any more, and with `NotLeading` if this object does not lead. While Redis is away it fails after the
   * coordinator's `requestTimeout`, and goes on leading.
   */
  readonly transferTo: (candidate: string | { readonly id: string }) => Effect.Effect<void, ElectionError>
  /**
   * Whether this object leads, by its `lead`, `leadForever` or `campaign`, as far as it knows, without asking Redis. Another object of
   * the same name may lead in the same process: `leader` names the process.
   */
  readonly isLeader: Effect.Effect<boolean>
  /** The present leader, by Redis's word. */
  readonly leader: Effect.Effect<Option.Option<Info<A>>, ElectionError>
  /** The processes that wait to lead, the next one first; up to 1,000. */
  readonly candidates: Effect.Effect<ReadonlyArray<Candidate<A>>, ElectionError>
  /**
   * The leader now, and every change from then on, in order. `None` while there is no leader. Ends with the scope of `make`, and
   * fails when the coordinator is closed.
   */
  readonly changes: Stream.Stream<Option.Option<Info<A>>, ElectionError>
  /** When this object begins and ceases to lead. Ends with the scope of `make`. */
  readonly terms: Stream.Stream<Transition>
}

/**
 * The fiber, or a parent of it, leads already.
 *
 * @category errors
 * @since 0.1.0
 */
export class AlreadyLeading extends Schema.Error<AlreadyLeading>("lockstep/Election/AlreadyLeading")({
  _tag: Schema.tag("AlreadyLeading"),
  name: Schema.String,
  namespace: Schema.String
}) {
  override get message(): string {
    const subject = describe("election", this.name, this.namespace)
    return `This fiber, or one that waits for it, leads ${subject} already, so waiting to lead would never end: ` +
      `resign first, or campaign in another fiber.`
  }
}

/**
 * Only the leader can do that, by the object that leads.
 *
 * @category errors
 * @since 0.1.0
 */
export class NotLeading extends Schema.Error<NotLeading>("lockstep/Election/NotLeading")({
  _tag: Schema.tag("NotLeading"),
  name: Schema.String,
  namespace: Schema.String
}) {
  override get message(): string {
    return `This object does not lead ${describe("election", this.name, this.namespace)}, or not any more: ` +
      `do that with the object whose \`lead\` or \`campaign\` leads.`
  }
}

/**
 * The candidate does not wait any more.
 *
 * @category errors
 * @since 0.1.0
 */
export class CandidateGone extends Schema.Error<CandidateGone>("lockstep/Election/CandidateGone")({
  _tag: Schema.tag("CandidateGone"),
  name: Schema.String,
  namespace: Schema.String,
  candidate: Schema.String
}) {
  override get message(): string {
    const candidate = JSON.stringify(this.candidate)
    return `Candidate ${candidate} of ${describe("election", this.name, this.namespace)} does not wait any more: ` +
      `choose another one of \`candidates\`.`
  }
}

export {
  /**
   * A value does not fit the schema: one's own, or that of a process with another schema.
   *
   * @category errors
   * @since 0.1.0
   */
  InvalidPayload
} from "./internal/hold/payload.ts"

/**
 * @category errors
 * @since 0.1.0
 */
export class ElectionError extends Schema.Error<ElectionError>("lockstep/Election/ElectionError")({
  _tag: Schema.tag("ElectionError"),
  reason: Schema.Union([
    LeaseLost,
    WaitTimeout,
    AlreadyLeading,
    NotLeading,
    CandidateGone,
    InvalidPayload,
    ...coordinatorReasons
  ])
}) {
  override get message(): string {
    return this.reason.message
  }
}

const fail = (reason: ElectionError["reason"]): ElectionError => new ElectionError({ reason })

const unwrapped = ({ reason }: CoordinatorError): ElectionError => fail(reason)

const idOf = (candidate: string | { readonly id: string }): string => {
  const id: unknown = typeof candidate === "object" ? candidate?.id : candidate
  if (typeof id !== "string") throw new RangeError("candidate must be one of `candidates`, or the id of one")
  return id
}

class ElectionImpl<A> implements Election<A> {
  readonly "~lockstep/Election" = "~lockstep/Election" as const
  readonly name: string
  readonly terms: Stream.Stream<Transition>
  readonly #place: Place
  readonly #codec: Payload<A>
  /** The value that candidates begin with, as JSON. */
  readonly #value: string
  readonly #candidacy: Candidacy
  // A term is handed over to one candidate.
  readonly #transfers = Semaphore.makeUnsafe(1)
  readonly #view: View<A, ElectionError>

  constructor(
    place: Place,
    codec: Payload<A>,
    value: string,
    candidacy: Candidacy,
    view: View<A, ElectionError>
  ) {
    this.name = place.name
    this.terms = candidacy.transitions
    this.#place = place
    this.#codec = codec
    this.#value = value
    this.#candidacy = candidacy
    this.#view = view
  }

  get #about() {
    return { name: this.name, namespace: this.#place.space.kernel.settings.namespace }
  }

  // Waiting for a term of the fiber's own would never end.
  #unlessLeading<B, E, R>(self: Effect.Effect<B, E, R>): Effect.Effect<B, E | ElectionError, R> {
    return Effect.withFiber<B, E | ElectionError, R>((fiber) =>
      nested<B, E | ElectionError, R>(
        fiber,
        this.#place,
        false,
        (found) => found === undefined ? self : Effect.fail(fail(new AlreadyLeading(this.#about)))
      )
    )
  }

  #lead<B, E, R>(self: Effect.Effect<B, E, R>, forever: boolean, options: CampaignOptions | undefined) {
    return this.#unlessLeading(
      lead(self, {
        place: this.#place,
        value: this.#value,
        wait: options?.wait,
        cached: options?.cached,
        forever,
        span: `lockstep.Election.${forever ? "leadForever" : "lead"}`,
        begin: this.#candidacy.begin,
        fail
      })
    )
  }

  readonly lead: Election<A>["lead"] = dual(
    (args) => Effect.isEffect(args[0]),
    <B, E, R>(self: Effect.Effect<B, E, R>, options?: CampaignOptions) => this.#lead(self, false, options)
  )

  readonly leadForever: Election<A>["leadForever"] = dual(
    (args) => Effect.isEffect(args[0]),
    <B, E, R>(self: Effect.Effect<B, E, R>, options?: CampaignOptions) =>
      this.#lead(self, true, options) as Effect.Effect<never, E | ElectionError, R>
  )

  readonly campaign = (options?: CampaignOptions): Effect.Effect<Lease, ElectionError, Scope.Scope> => {
    // A candidate waits, so it is never refused.
    const acquired = Effect.suspend(() =>
      acquireScoped(
        campaigning({ place: this.#place, value: this.#value, wait: options?.wait, cached: options?.cached }, fail),
        this.#candidacy.begin
      ) as Effect.Effect<Lease, ElectionError, Scope.Scope>
    )
    return this.#unlessLeading(
      spanning(acquired, "lockstep.Election.campaign", "election", this.name)
    )
  }

  get resign(): Effect.Effect<void> {
    return this.#candidacy.resign
  }

  // Asks on behalf of the term, which may be over when the request is executed.
  #inTerm<V extends "election.proclaim" | "election.nominate">(
    verb: V,
    argument: Effect.Effect<string, ElectionError>,
    done: (tag: "proclaimed" | "nominated" | "gone", term: Hold) => Effect.Effect<void, ElectionError>
  ): Effect.Effect<void, ElectionError> {
    const notLeading = Effect.suspend(() => Effect.fail(fail(new NotLeading(this.#about))))
    return Effect.suspend(() => {
      const { term } = this.#candidacy
      if (term === undefined) return notLeading
      // Another value, or another leader, is for this term only.
      this.#place.tenancy.kept.cease(term.stretch)
      return Effect.flatMap(
        argument,
        (text) =>
          request(this.#place, verb, [term.id, text], { session: term.session, moot: () => ["absent"] as const }).pipe(
            Effect.mapError(unwrapped),
            Effect.flatMap(([tag]) => tag === "absent" ? notLeading : done(tag, term))
          )
      )
    })
  }

  readonly proclaim = (value: A): Effect.Effect<void, ElectionError> =>
    this.#inTerm(
      "election.proclaim",
      Effect.mapError(this.#codec.encode(value, valueOf(this.#place)), fail),
      () => Effect.void
    )

  readonly transferTo = (candidate: string | { readonly id: string }): Effect.Effect<void, ElectionError> => {
    return Effect.suspend(() => {
      const id = idOf(candidate)
      return this.#transfers.withPermit(
        this.#inTerm("election.nominate", Effect.succeed(id), (tag, term) =>
          tag === "gone"
            ? Effect.fail(fail(new CandidateGone({ ...this.#about, candidate: id })))
            : surrender(this.#place, [term], "resigned"))
      )
    })
  }

  get isLeader(): Effect.Effect<boolean> {
    return Effect.sync(() => this.#candidacy.term !== undefined)
  }

  get leader(): Effect.Effect<Option.Option<Info<A>>, ElectionError> {
    return this.#view.leader
  }

  get candidates(): Effect.Effect<ReadonlyArray<Candidate<A>>, ElectionError> {
    return this.#view.candidates
  }

  get changes(): Stream.Stream<Option.Option<Info<A>>, ElectionError> {
    return this.#view.changes
  }
}

/**
 * Called one after the other by a fiber of their own; a callback that fails is logged. Nothing else waits for them: another process
 * may lead before `onLost` has ended. The scope of `make` waits for them, and interrupts them after the margin: that of the
 * coordinator, or of the election's own `lease`.
 *
 * @category options
 * @since 0.1.0
 */
export interface Callbacks<R = never> extends AnyCallbacks<R> {}

/**
 * @category options
 * @since 0.1.0
 */
export interface Options<R = never> extends Callbacks<R> {
  /**
   * How long a leader that died keeps its successor waiting. Default: the coordinator's lease. Another one is a second
   * session, which is renewed by itself. Its margin is the default for that length: 10 %, at least 1 second, at most half of it.
   */
  readonly lease?: Duration.Input | undefined
}

/**
 * With a schema, each candidate brings a value (an address, a version), which all processes can see.
 *
 * @category options
 * @since 0.1.0
 */
export interface OptionsWithValue<A, R = never> extends Options<R> {
  readonly schema: Schema.Codec<A, any>
  readonly value: A
}

type Untyped<R> = Options<R> & { readonly schema?: undefined; readonly value?: undefined }

const open = Effect.fnUntraced(function*<A, R>(
  name: string,
  options: Options<R> & { readonly schema?: Schema.Codec<A, any>; readonly value?: A }
): Effect.fn.Return<Election<A>, ElectionError, Coordinator | Scope.Scope | R> {
  const place = withoutMaxHold(placeOf(spaceOf(yield* Coordinator), "election", name, "name", options.lease))
  const codec = payload(options.schema, place)
  const value = yield* Effect.mapError(codec.encode(options.value as A, valueOf(place)), fail)
  const candidate = yield* candidacy(place, options)
  return new ElectionImpl<A>(place, codec, value, candidate, yield* view(place, codec, fail))
})

/**
 * Joins an election. That alone makes the process neither a leader nor a candidate. When the scope is closed, the process leads
 * no more: the effect under its term is interrupted and fails with `LeaseLost` (`closed`).
 *
 * @category constructors
 * @since 0.1.0
 */
export const make: {
  <R = never>(
    options: Untyped<R> & { readonly name: string }
  ): Effect.Effect<Election<void>, ElectionError, Coordinator | Scope.Scope | R>
  <A, R = never>(
    options: OptionsWithValue<A, R> & { readonly name: string }
  ): Effect.Effect<Election<A>, ElectionError, Coordinator | Scope.Scope | R>
} = (options: Options<any> & { readonly name: string }) => open<any, any>(options.name, options)

/**
 * The class that `Service` makes.
 *
 * @category models
 * @since 0.1.0
 */
export interface ServiceClass<in out Self, in out Name extends string, A, R = never>
  extends AnyServiceClass<Self, `lockstep/Election/${Name}`, Election<A>, ElectionError, Coordinator | R>
{}

/**
 * An election as a typed service: `class Chief extends Election.Service<Chief>()("chief") {}`, with `Chief.layer`. The
 * layer requires what its callbacks require.
 *
 * @category constructors
 * @since 0.1.0
 */
export const Service = <Self>(): {
  <const Name extends string, R = never>(
    name: Name,
    options?: Untyped<R> | undefined
  ): ServiceClass<Self, Name, void, R>
  <const Name extends string, A, R = never>(
    name: Name,
    options: OptionsWithValue<A, R>
  ): ServiceClass<Self, Name, A, R>
} =>
(name: string, options: Options<any> = {}) =>
  service<Self, "Election", string, Election<any>, ElectionError, Coordinator | Scope.Scope>(
    "Election",
    name,
    open<any, never>(name, options as Options)
  )
