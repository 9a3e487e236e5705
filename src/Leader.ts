/**
 * Leader election: of many candidates one leads, until it resigns or its lease ends, and the next in line succeeds it.
 *
 * **Guarantees**
 *
 * - One leader at a time, in the order in which the candidates came. Every term has a number, larger than all before it: it
 *   is the fencing token of the leader's lease (see `Fence`).
 * - `lead` interrupts its effect when the lease is lost, and campaigns again. Nobody else is granted the next term before
 *   the margin of the coordinator has passed, so the effect of the former leader has ended by then; one whose finalizers take
 *   longer is logged and counted (`Metrics`).
 * - A leader that dies is succeeded when its lease has run out; one that resigns, or whose process ends in good order, at
 *   once.
 * - `observe` shows who leads now, and then every change in order, the time without a leader included. Broken connections
 *   do not make it miss any.
 *
 * **Gotchas**
 *
 * - This is a lease: see `Lease` for what it cannot promise. A write that must not come from a former leader has to carry the
 *   term and be checked where it is written.
 * - An observer whose own lease is lost sees how things are when it is back, and not what happened meanwhile. Until then
 *   the last that was seen stays: `leader` asks Redis.
 * - A leader whose connection is gone leads on until its lease ends: watch `Coordinator.transitions` for `suspended` in order to
 *   step down before.
 * - Values are sent to all observers with every change: keep them small.
 *
 * **Example** (One of many processes leads, and everybody knows where it listens)
 *
 * ```ts
 * import { Coordinator, Leader } from "lockstep"
 * import { Effect, Schema, Stream } from "effect"
 *
 * const program = Effect.gen(function*() {
 *   const leader = yield* Leader.make({ name: "scheduler", schema: Schema.String, value: "http://10.0.0.7:8080" })
 *   yield* Effect.forkScoped(leader.observe.pipe(Stream.runForEach((info) => Effect.log(info))))
 *   yield* leader.lead(Effect.log("I lead"))
 * })
 *
 * program.pipe(Effect.scoped, Effect.provide(Coordinator.layerEmbedded()), Effect.runPromise)
 * ```
 *
 * @since 0.1.0
 */
import type * as Cause from "effect/Cause"
import * as Context from "effect/Context"
import * as DateTime from "effect/DateTime"
import type * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Fiber from "effect/Fiber"
import * as Layer from "effect/Layer"
import * as Option from "effect/Option"
import * as PubSub from "effect/PubSub"
import * as Queue from "effect/Queue"
import * as RcRef from "effect/RcRef"
import * as Schema from "effect/Schema"
import type * as Scope from "effect/Scope"
import * as Stream from "effect/Stream"
import type * as Take from "effect/Take"
import { Coordinator } from "./Coordinator.ts"
import { CoordinatorClosed, CoordinatorError, coordinatorError } from "./internal/actor/errors.ts"
import { type Kernel, kernelOf } from "./internal/actor/kernel.ts"
import * as held from "./internal/hold/held.ts"
import { LeaseLost, WaitTimeout } from "./internal/hold/loss.ts"
import { InvalidPayload, payload } from "./internal/hold/payload.ts"
import * as leading from "./internal/leading.ts"
import type { Lease } from "./Lease.ts"

/**
 * @category type IDs
 * @since 0.1.0
 */
export const TypeId: TypeId = "~lockstep/Leader"

/**
 * @category type IDs
 * @since 0.1.0
 */
export type TypeId = "~lockstep/Leader"

/**
 * Who wants to lead.
 *
 * @category models
 * @since 0.1.0
 */
export interface Candidate<A> {
  /** Of this candidature: another campaign of the same process has another. */
  readonly id: string
  /** Of its coordinator. */
  readonly node: string
  readonly host: string
  readonly pid: number
  readonly value: A
}

/**
 * Who leads.
 *
 * @category models
 * @since 0.1.0
 */
export interface Info<A> extends Candidate<A> {
  /** Larger than all terms before it: the fencing token. */
  readonly term: number
  /** By the clock of Redis, in whole seconds. */
  readonly since: DateTime.Utc
}

/**
 * What happens to this process as a candidate.
 *
 * @category models
 * @since 0.1.0
 */
export type Transition =
  | { readonly _tag: "Acquired"; readonly lease: Lease }
  | { readonly _tag: "Lost"; readonly lease: Lease; readonly reason: LeaseLost["reason"] }

/**
 * @category models
 * @since 0.1.0
 */
export interface Leader<A> {
  readonly [TypeId]: TypeId
  readonly name: string
  /**
   * Waits until it leads, and leads for as long as the scope is open. Nothing is interrupted by itself when the lease is
   * lost: watch `lease.lost`, or use `lead`.
   */
  readonly campaign: (options?: CampaignOptions) => Effect.Effect<Lease, LeaderError, Scope.Scope>
  /**
   * Runs an effect while leading. When the lease is lost, or after `resign`, the effect is interrupted, and it campaigns
   * again; what its finalizers fail with is logged. When the effect ends it resigns: for good, or with `again` until it
   * leads the next time. Fails with `LeaseLost` (`closed`) when the coordinator is closed, or the scope of `make`.
   */
  readonly lead: {
    <B, E, R>(
      self: Effect.Effect<B, E, R>,
      options?: LeadOptions & { readonly again?: false | undefined }
    ): Effect.Effect<
      B,
      E | LeaderError,
      R
    >
    <B, E, R>(self: Effect.Effect<B, E, R>, options: LeadOptions & { readonly again: true }): Effect.Effect<
      never,
      E | LeaderError,
      R
    >
  }
  /**
   * Gives up leading: what runs under it is interrupted, and has the margin of the coordinator to end before the next one
   * follows. Does nothing if it does not lead.
   */
  readonly resign: Effect.Effect<void>
  /** Another value for the rest of this term. Fails with `NotLeading` if it does not lead. */
  readonly proclaim: (value: A) => Effect.Effect<void, LeaderError>
  /** Who leads, by Redis's word. */
  readonly leader: Effect.Effect<Option.Option<Info<A>>, LeaderError>
  /**
   * Who leads now, and every change from then on, in order. `None` while nobody does. Ends with the scope of `make`, and
   * fails when the coordinator is closed.
   */
  readonly observe: Stream.Stream<Option.Option<Info<A>>, LeaderError>
  /** Whether it leads: what it believes, without asking Redis. */
  readonly isLeader: Effect.Effect<boolean>
  /** Who waits to lead, the next first; up to 1000. */
  readonly candidates: Effect.Effect<ReadonlyArray<Candidate<A>>, LeaderError>
  /**
   * Resigns in favour of a candidate, which has the next term. Fails with `CandidateGone`, and goes on leading, if it does
   * not wait any more, and with `NotLeading` if it does not lead.
   */
  readonly transferTo: (candidate: string | { readonly id: string }) => Effect.Effect<void, LeaderError>
  /** When this process begins and ceases to lead. */
  readonly transitions: Stream.Stream<Transition>
}

/**
 * @category options
 * @since 0.1.0
 */
export interface CampaignOptions {
  /** How long to wait for it. Default: as long as it takes. Afterwards it fails with `WaitTimeout`. */
  readonly wait?: Duration.Input | undefined
}

/**
 * @category options
 * @since 0.1.0
 */
export interface LeadOptions extends CampaignOptions {
  /** Campaign again when the effect has ended with success. Default `false`. */
  readonly again?: boolean | undefined
}

/**
 * Run one after the other by a fiber of their own; one that fails is logged. The scope of `make` waits for them, and
 * interrupts them after the margin of the coordinator.
 *
 * @category options
 * @since 0.1.0
 */
export interface Callbacks<R = never> {
  readonly onAcquired?: ((lease: Lease) => Effect.Effect<unknown, unknown, R>) | undefined
  readonly onLost?: ((lease: Lease, reason: LeaseLost["reason"]) => Effect.Effect<unknown, unknown, R>) | undefined
}

/**
 * The fiber, or a parent of it, leads already.
 *
 * @category errors
 * @since 0.1.0
 */
export class AlreadyLeading extends Schema.Error<AlreadyLeading>("lockstep/Leader/AlreadyLeading")({
  _tag: Schema.tag("AlreadyLeading"),
  name: Schema.String
}) {
  override get message(): string {
    return "This fiber leads already, so waiting to lead would never end."
  }
}

/**
 * Only the leader can do that.
 *
 * @category errors
 * @since 0.1.0
 */
export class NotLeading extends Schema.Error<NotLeading>("lockstep/Leader/NotLeading")({
  _tag: Schema.tag("NotLeading"),
  name: Schema.String
}) {
  override get message(): string {
    return "This process does not lead, or not any more."
  }
}

/**
 * The candidate does not wait any more.
 *
 * @category errors
 * @since 0.1.0
 */
export class CandidateGone extends Schema.Error<CandidateGone>("lockstep/Leader/CandidateGone")({
  _tag: Schema.tag("CandidateGone"),
  candidate: Schema.String
}) {
  override get message(): string {
    return "The candidate does not wait any more: choose another one of `candidates`."
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

/**
 * @category errors
 * @since 0.1.0
 */
export class LeaderError extends Schema.Error<LeaderError>("lockstep/Leader/LeaderError")({
  _tag: Schema.tag("LeaderError"),
  reason: Schema.Union([
    LeaseLost,
    WaitTimeout,
    AlreadyLeading,
    NotLeading,
    CandidateGone,
    InvalidPayload,
    CoordinatorError
  ])
}) {
  override get message(): string {
    return this.reason.message
  }
}

const fail = (reason: LeaderError["reason"]): LeaderError => new LeaderError({ reason })

interface About {
  readonly name: string
  readonly host: string
  readonly pid: number
}

// The session of one that has just been reaped is not known any more.
const candidateOf = <A>(id: string, about: unknown, value: A): Candidate<A> => {
  const { host = "", name = "", pid = 0 } = (about ?? {}) as Partial<About>
  return { id, node: name, host, pid, value }
}

/**
 * Joins an election. Nobody leads or is a candidate by that alone. When the scope is closed, it leads no more: what runs
 * under it is interrupted and fails with `LeaseLost` (`closed`).
 *
 * With a `schema`, each candidate brings a value (an address, a version), which all can see.
 *
 * @category constructors
 * @since 0.1.0
 */
export const make: {
  <A, R = never>(
    options: Callbacks<R> & {
      readonly name: string
      readonly schema: Schema.Codec<A, any>
      readonly value: A
    }
  ): Effect.Effect<Leader<A>, LeaderError, Coordinator | Scope.Scope | R>
  <R = never>(
    options: Callbacks<R> & { readonly name: string }
  ): Effect.Effect<Leader<void>, LeaderError, Coordinator | Scope.Scope | R>
} = Effect.fnUntraced(function*<A, R>(
  options: Callbacks<R> & { readonly name: string; readonly schema?: Schema.Codec<A, any>; readonly value?: A }
) {
  const { name } = options
  const kernel = kernelOf(yield* Coordinator)
  const place = held.placeOf(kernel, "leader", name, "name")
  const { key, partition } = place
  const codec = payload(options.schema)
  const encode = (it: A) => Effect.mapError(codec.encode(it, "A leader's value"), fail)
  const decode = (json: unknown) => Effect.mapError(codec.decode(json, "A leader's or candidate's value"), fail)
  const value = yield* encode(options.value as A)

  // ---------------------------------------------------------------------------------------------------------------
  // This process as a candidate
  // ---------------------------------------------------------------------------------------------------------------

  const terms = new Set<held.Held>()
  const transitions = yield* untilClosed<Transition>()
  const announcing = yield* callbacks(options, kernel)
  let closed = false

  const tell = (transition: Transition): void => {
    PubSub.publishUnsafe(transitions, [transition])
    announcing(transition)
  }

  const begin = (term: held.Held): () => void => {
    terms.add(term)
    tell({ _tag: "Acquired", lease: term })
    if (closed) term.claim.lose("closed")
    const lost = () => tell({ _tag: "Lost", lease: term, reason: term.claim.lost ?? "resigned" })
    const off = term.claim.onLoss(lost)
    return () => {
      terms.delete(term)
      off()
      if (term.claim.lost === undefined) lost()
    }
  }

  const term = (): held.Held | undefined => {
    for (const one of terms) {
      one.claim.session?.expireIfDue()
      if (one.active) return one
    }
    return undefined
  }

  const surrender = (reason: "resigned" | "closed"): Effect.Effect<void> =>
    Effect.suspend(() =>
      Effect.forEach([...terms], (one) => held.surrender(one, reason), { concurrency: "unbounded", discard: true })
    )

  yield* Effect.addFinalizer(() => {
    closed = true
    return surrender("closed")
  })

  const unlessLeading = <B, E, R2>(self: Effect.Effect<B, E, R2>): Effect.Effect<B, E | LeaderError, R2> =>
    Effect.withFiber<B, E | LeaderError, R2>((fiber) =>
      held.findHeld(fiber, place) === undefined ? self : Effect.fail(fail(new AlreadyLeading({ name })))
    )

  const campaign = (campaignOptions?: CampaignOptions): Effect.Effect<Lease, LeaderError, Scope.Scope> =>
    unlessLeading(
      // It is waited for, so it is never refused.
      Effect.map(held.acquireScoped(leading.campaigning(place, value, campaignOptions?.wait, fail), begin), (mine) =>
        mine!)
    )

  const lead = <B, E, R2>(
    self: Effect.Effect<B, E, R2>,
    { again = false, wait }: LeadOptions = {}
  ): Effect.Effect<B, E | LeaderError, R2> =>
    unlessLeading(leading.lead(self, { place, value, wait, again, span: "lockstep.Leader.lead", begin, fail }))

  const unlessNot = <B>(self: (mine: held.Held) => Effect.Effect<B, LeaderError>): Effect.Effect<B, LeaderError> =>
    Effect.suspend(() => {
      const mine = term()
      return mine === undefined ? Effect.fail(fail(new NotLeading({ name }))) : self(mine)
    })

  const ask = <V extends "leader.proclaim" | "leader.nominate">(
    verb: V,
    mine: held.Held,
    argument: string
  ): Effect.Effect<"proclaimed" | "nominated" | "gone" | "absent", LeaderError> =>
    Effect.callback((resume) =>
      partition.request({
        verb,
        key,
        args: [mine.claim.id, argument],
        session: mine.claim.session,
        moot: () => resume(Effect.succeed("absent")),
        settle: (reply) => resume(Effect.succeed(reply[0])),
        fail: (error) => resume(Effect.fail(fail(error)))
      })
    )

  const proclaim = (next: A): Effect.Effect<void, LeaderError> =>
    unlessNot((mine) =>
      Effect.flatMap(encode(next), (json) =>
        Effect.flatMap(
          ask("leader.proclaim", mine, json),
          (answer) => answer === "absent" ? Effect.fail(fail(new NotLeading({ name }))) : Effect.void
        ))
    )

  const transferTo = (candidate: string | { readonly id: string }): Effect.Effect<void, LeaderError> => {
    const id = typeof candidate === "string" ? candidate : candidate.id
    return unlessNot((mine) =>
      Effect.flatMap(ask("leader.nominate", mine, id), (answer) => {
        if (answer === "absent") return Effect.fail(fail(new NotLeading({ name })))
        if (answer === "gone") return Effect.fail(fail(new CandidateGone({ candidate: id })))
        return held.surrender(mine, "resigned")
      })
    )
  }

  // ---------------------------------------------------------------------------------------------------------------
  // What everybody sees
  // ---------------------------------------------------------------------------------------------------------------

  type State = readonly [change: number, term: string, id: string, since: number, about: unknown, value: unknown]

  const infoOf = ([, number, id, since, about, json]: State): Effect.Effect<Option.Option<Info<A>>, LeaderError> =>
    id === ""
      ? Effect.succeedNone
      : Effect.map(decode(json), (decoded) =>
        Option.some({
          ...candidateOf(id, about, decoded),
          term: Number(number),
          since: DateTime.makeUnsafe(since * 1000)
        }))

  const inspect = <V extends "leader.state" | "leader.candidates">(verb: V) =>
    Effect.tryPromise({
      try: () => kernel.inspect(partition, { verb, key, args: [] }),
      catch: (cause) => fail(coordinatorError(cause))
    })

  // One membership, however many observe here.
  const changes = yield* RcRef.make({
    acquire: Effect.gen(function*() {
      const seen = yield* untilClosed<State, LeaderError>({ replay: 1 })
      let last = 0
      let anew = false
      const observation = {
        observe: (state: ReadonlyArray<unknown>) => {
          const change = state[0] as number
          if (change === last || change < last && !anew) return
          last = change
          anew = false
          PubSub.publishUnsafe(seen, [state as unknown as State])
        },
        // Redis may have lost its data, and its clock may be behind the one that has numbered the changes so far.
        lost: () => {
          anew = true
        },
        closed: () => {
          PubSub.publishUnsafe(seen, Exit.fail(fail(new CoordinatorError({ reason: new CoordinatorClosed({}) }))))
        }
      }
      yield* held.membership(place, "leader.observe", 1, undefined, (error) => fail(error), { observation })
      // Of a leader that dies it is told when its lease ends, and not some time later.
      yield* Effect.acquireRelease(Effect.sync(() => partition.claims.watch()), (off) => Effect.sync(off))
      return seen
    })
  })

  const leader: Leader<A> = {
    [TypeId]: TypeId,
    name,
    campaign,
    lead: lead as Leader<A>["lead"],
    resign: surrender("resigned"),
    proclaim,
    leader: Effect.flatMap(inspect("leader.state"), ([, ...state]) => infoOf(state as unknown as State)),
    observe: Stream.unwrap(Effect.map(RcRef.get(changes), Stream.fromPubSubTake)).pipe(Stream.mapEffect(infoOf)),
    isLeader: Effect.sync(() => term() !== undefined),
    candidates: Effect.flatMap(
      inspect("leader.candidates"),
      ([, list]) =>
        Effect.forEach(
          list as ReadonlyArray<readonly [id: string, about: unknown, value: unknown]>,
          ([id, about, json]) => Effect.map(decode(json), (decoded) => candidateOf(id, about, decoded))
        )
    ),
    transferTo,
    transitions: Stream.fromPubSubTake(transitions)
  }
  return leader
}) as never

/** Its streams end with the scope, behind all that was published. */
const untilClosed = <A, E = never>(options?: { readonly replay: number }) =>
  Effect.acquireRelease(PubSub.unbounded<Take.Take<A, E>>(options), (self) => PubSub.end(self, Exit.void))

/** The callbacks in a fiber of their own; what has happened when the scope closes is still told. */
const callbacks = Effect.fnUntraced(function*<R>({ onAcquired, onLost }: Callbacks<R>, kernel: Kernel) {
  if (onAcquired === undefined && onLost === undefined) return () => {}
  const context = yield* Effect.context<R>()
  const queue = yield* Queue.unbounded<Transition, Cause.Done>()
  const calling = Stream.fromQueue(queue).pipe(
    Stream.runForEach((transition) =>
      Effect.suspend((): Effect.Effect<unknown, unknown, R> =>
        (transition._tag === "Acquired"
          ? onAcquired?.(transition.lease)
          : onLost?.(transition.lease, transition.reason)) ?? Effect.void
      ).pipe(
        Effect.catchCause((cause) => Effect.logError(`${transition._tag}: the callback has failed`, cause))
      )
    ),
    Effect.provideContext(context)
  )
  yield* Effect.acquireRelease(Effect.forkDetach(calling), (fiber) => {
    const late = Effect.promise(() => kernel.sleep(kernel.settings.margin)).pipe(
      Effect.andThen(Effect.logError("a callback of an election did not end, and is interrupted")),
      Effect.andThen(Fiber.interrupt(fiber))
    )
    return Effect.andThen(Queue.end(queue), Effect.raceFirst(Fiber.await(fiber), late))
  })
  return (transition: Transition) => {
    Queue.offerUnsafe(queue, transition)
  }
})

/**
 * The class that `Service` makes.
 *
 * @category models
 * @since 0.1.0
 */
export interface ServiceClass<in out Self, in out Id extends string, A>
  extends Context.ServiceClass<Self, Id, Leader<A>>
{
  readonly layer: Layer.Layer<Self, LeaderError, Coordinator>
}

/**
 * An election as a typed service: `class Chief extends Leader.Service<Chief>()("chief") {}`, with `Chief.layer`.
 *
 * @category constructors
 * @since 0.1.0
 */
export const Service = <Self>(): {
  <const Id extends string, A>(
    name: Id,
    options: Callbacks & { readonly schema: Schema.Codec<A, any>; readonly value: A }
  ): ServiceClass<Self, Id, A>
  <const Id extends string>(name: Id, options?: Callbacks): ServiceClass<Self, Id, void>
} =>
(name: string, options?: Callbacks) => {
  const tag = Context.Service<Self, Leader<any>>()(name)
  return Object.assign(tag, { layer: Layer.effect(tag, make({ ...options, name })) }) as never
}
