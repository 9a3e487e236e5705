/** A queue, or one shard of it. */

import * as Context from "effect/Context"
import type * as Cron from "effect/Cron"
import type * as DateTime from "effect/DateTime"
import type * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Option from "effect/Option"
import type * as Scope from "effect/Scope"
import * as Stream from "effect/Stream"
import { CoordinatorClosed } from "../actor/errors.ts"
import { checkName } from "../actor/keys.ts"
import { bounded, join, within } from "../hold/acquire.ts"
import { describe } from "../hold/loss.ts"
import type { Observer } from "../hold/membership.ts"
import { millis, millisOrEndless, oneOf, type Place, placeIn, type Space, whole } from "../hold/place.ts"
import { question } from "../hold/request.ts"
import { sending, spanning } from "../hold/span.ts"
import { showAs } from "../text.ts"
import { codec } from "../work/codec.ts"
import type {
  AwaitOptions,
  ExecuteOptions,
  Options,
  PoolOptions,
  Queue,
  RunOptions,
  TakeBatchOptions,
  TakeOptions,
  WithJobOptions
} from "./api.ts"
import { entrusted } from "./entrusting.ts"
import type { Codecs, Inner } from "./errands.ts"
import { fail, failing, type Failure, type JobTimeout, QueueClosed, type QueueError, ShardsMismatch } from "./errors.ts"
import { Following } from "./following.ts"
import { Handle, type Home } from "./handle.ts"
import { handlingOf, policyOf } from "./handling.ts"
import { Job, Task } from "./job.ts"
import { type Offered, Offerer, type Wish } from "./offering.ts"
import { type Bound, Offers } from "./offers.ts"
import { Operations } from "./operations.ts"
import { Outcomes } from "./outcomes.ts"
import { graceOf, mostConcurrency, mostOverrun, poolOf, type WorkerPool } from "./pool.ts"
import { type Scheduled, type ScheduleOptions, Schedules } from "./schedules.ts"
import { joinArgs, retained } from "./settings.ts"
import { type Deque, workersOf, type WorkerState } from "./stealing.ts"
import { take, type Taken, type Taking, withJob } from "./taking.ts"
import { awaited, keptOf, type OfferOptions, type Sender, type Subscriber, wishOf } from "./wish.ts"
import { crewOf } from "./worker.ts"

export class Shard<in out A, in out S, in out E> extends Operations<A> implements Queue<A, S, E>, Inner<A> {
  readonly "~lockstep/Queue" = "~lockstep/Queue" as const
  readonly name: string
  readonly subject: string
  readonly #space: Space
  // How many shards the queue has; 0: as many as it had.
  #count: number
  // When it has decided how the queue works: 1 for now, 0 if it has not.
  #decided = 0
  // Of all shards.
  #places: ReadonlyArray<Place>
  readonly #options: Options<A, S, E>
  readonly #offerer: Offerer
  readonly #offers: Offers
  readonly #home: Home<A>
  readonly #schedules: Schedules
  #delivering: Effect.Effect<void> = Effect.void

  // Of this process, if its workers have one.
  readonly #deque: Deque | undefined

  constructor(space: Space, name: string, options: Options<A, S, E>, shard: number, deque?: Deque) {
    const { kernel } = space
    const { colocate = checkName(name, "name") } = options
    const first = kernel.partitionFor(checkName(colocate, "colocate")).index
    const partition = kernel.partitionAt((first + shard) % kernel.settings.partitions)
    const place = placeIn(space, partition, "queue", name, options.lease)
    super(place, shard, codec(options.payload, `A job of queue ${JSON.stringify(name)}`, place))
    showAs(this, { _id: "lockstep/Queue", name, namespace: kernel.settings.namespace })
    this.name = name
    this.#deque = deque
    this.#space = space
    this.subject = describe("queue", name, kernel.settings.namespace)
    this.#count = options.shards ?? 0
    this.#places = [this.place]
    this.#options = options
    const { error, success } = options
    keptOf(options.result)
    policyOf({}, options, kernel)
    this.#offerer = new Offerer(this.place, shard, millis(options.retention ?? retained, "retention"))
    this.#offers = new Offers(this.#offerer, kernel.io, { name, namespace: kernel.settings.namespace })
    this.#home = {
      place,
      shard,
      payload: this.codec,
      results: {
        success: success && codec(success, `A result of queue ${JSON.stringify(name)}`, place),
        error: error && codec(error, `An error of queue ${JSON.stringify(name)}`, place)
      },
      following: new Following(place),
      outcomes: new Outcomes(place),
      letters: this.buried
    }
    this.#schedules = new Schedules(this.place)
  }

  /** Answers how many shards there are. */
  readonly join: Effect.Effect<number, QueueError, Scope.Scope> = Effect.suspend(() => {
    const { groups, letters, limits, retention } = this.#options
    const given = [retention, letters, limits, groups].some((option) => option !== undefined)
    this.#decided = given ? 1 : 0
    const args = joinArgs(this.#options)
    const joined = join(this.place, {
      verb: "queue.join",
      args: (anyway) => [this.#decided, ...args, this.#count, this.shard, anyway],
      observer: this.#observer,
      fail
    })
    const opened = Effect.flatMap(joined, ([{ id }, outcome]) => {
      if (outcome[0] === "mismatch") {
        const { namespace } = this.#space.kernel.settings
        const about = { name: this.name, namespace, shards: Number(outcome[1]), expected: this.#count }
        return Effect.fail(fail(new ShardsMismatch(about)))
      }
      this.#offerer.joined(id, limits?.length !== undefined && (limits.onFull ?? "wait") === "wait")
      this.#home.outcomes.joined(id)
      this.#home.following.joined(id)
      this.#schedules.joined(id)
      // Before it is left.
      return Effect.as(Effect.addFinalizer(() => Effect.sync(() => this.#close(this.#left))), this.#count)
    })
    const leaving = Effect.addFinalizer(() => Effect.sync(() => this.#schedules.leave()))
    const delivering = Effect.map(Effect.scope, (scope) => {
      this.#delivering = Effect.asVoid(Effect.forkIn(entrusted(this.place), scope))
    })
    return leaving.pipe(Effect.andThen(delivering), Effect.andThen(opened))
  })

  // Its jobs have follow-ups in other queues. From now on this process delivers them too.
  #deliver(): void {
    this.#space.kernel.io.run(this.#delivering)
    this.#delivering = Effect.void
  }

  get codecs(): Codecs<A> {
    return { payload: this.codec, ...this.#home.results }
  }

  checkOptions(options: OfferOptions): void {
    this.#deque?.aim(options)
  }

  get partitions(): ReadonlyArray<number> {
    return this.#places.map(({ partition }) => partition.index)
  }

  /** Its workers work on all shards. */
  spread(shards: ReadonlyArray<Shard<A, S, E>>): void {
    this.#places = shards.map((shard) => shard.place)
  }

  readonly #observer: Observer = {
    observe: (change) => {
      if (change[0] === "outcome") this.#home.outcomes.told(change as never)
      else if (change[0] === "progress" || change[0] === "over") this.#home.following.told(change as never)
      else if (change[0] === "room") this.#offerer.enter()
      else if (change[0] === "ticks") this.#schedules.told(change)
      else if (change[0] === "errands") this.#deliver()
      else if (change[0] === "window") this.#offerer.knownFor = Number(change[1])
      else {
        // After a loss of data, Redis does not know the number of shards any more.
        this.#count = Number(change[0])
        if (this.#decided === 1) this.#decided = Number(change[3])
        if (change[1] === true) this.#schedules.watch()
        if (change[2] === true) this.#deliver()
        this.#offerer.knownFor = Number(change[4])
        this.#offerer.rejoined()
        this.#home.outcomes.rejoined()
        this.#home.following.rejoined()
      }
    },
    closed: () => this.#close(this.place.channel.closedError())
  }

  // Callers that wait here would not be notified any more, and others would wait behind them.
  #close(error: Failure): void {
    this.#offerer.closed(error)
    this.#home.outcomes.closed(error)
    this.#home.following.closed(error)
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Offer
  // -------------------------------------------------------------------------------------------------------------------

  /** Whether a handler of this queue here has the job. */
  hasHanded(job: Context.Service.Shape<typeof Job>): job is Task {
    return job instanceof Task && job.place.space === this.#space && job.place.key === this.place.key
  }

  /** An offer was not sent yet, and can take in another job. */
  get isOffering(): boolean {
    return this.#offerer.open
  }

  #encode(payload: A): Exit.Exit<string, QueueError> {
    return Exit.mapError(this.codec.encode(payload), fail)
  }

  wishFor(
    payload: A,
    options: OfferOptions | undefined,
    sender: Sender,
    subscriber?: Subscriber
  ): Exit.Exit<Wish, QueueError> {
    const body = this.#encode(payload)
    if (Exit.isFailure(body)) return Exit.failCause(body.cause)
    const { result } = this.#options
    const wanted = result && options?.result === undefined ? { ...options, result } : options
    return Exit.succeed(
      wishOf(body.value, wanted, sender, this.#offerer.knownFor, this.#deque?.aim(options), subscriber)
    )
  }

  readonly offer = (payload: A, options?: OfferOptions & AwaitOptions): Effect.Effect<Offered, QueueError> => {
    const wait = options?.wait
    if (wait === undefined) return this.#offer(payload, options)
    const bound: Bound = (self, late) => within(self, this.place, wait, fail, late)
    return this.#offer(payload, options, (wish) => this.#offers.oneWithin(wish, bound))
  }

  readonly offerFor = (
    payload: A,
    options: OfferOptions,
    subscriber: Subscriber | undefined,
    waits?: () => void
  ): Effect.Effect<Offered, QueueError> =>
    this.#offer(payload, options, (wish) => this.#offers.one(wish, undefined, waits), subscriber)

  #offer(
    payload: A,
    options: OfferOptions | undefined,
    ask: (wish: Wish) => Effect.Effect<Offered, QueueError> = (wish) => this.#offers.one(wish),
    subscriber?: Subscriber
  ): Effect.Effect<Offered, QueueError> {
    return this.#spanned("offer", (sender) => {
      const wish = this.wishFor(payload, options, sender, subscriber)
      return Exit.isFailure(wish) ? Effect.failCause(wish.cause) : ask(wish.value)
    })
  }

  readonly followUp = (payload: A, options?: OfferOptions): Effect.Effect<void, QueueError, Job> =>
    Effect.flatMap(Job, (job) =>
      this.#spanned("followUp", (sender) => {
        if (!(job instanceof Task && job.place.space === this.#space)) {
          throw new RangeError(`followUp is for handlers of jobs of this coordinator`)
        }
        if (options?.after !== undefined) throw new RangeError("followUp takes no after")
        return Exit.map(this.wishFor(payload, options, sender), (wish) => job.follow(wish, this.place))
      }))

  readonly offerAll = (
    payloads: Iterable<A>,
    options?: OfferOptions & AwaitOptions | ((payload: A) => OfferOptions)
  ): Effect.Effect<ReadonlyArray<Offered>, QueueError> => {
    const offered = this.#spanned("offerAll", (sender) => {
      const iterator = payloads[Symbol.iterator]()
      return this.offerEach(() => {
        const next = iterator.next()
        if (next.done === true) return undefined
        return this.wishFor(next.value, typeof options === "function" ? options(next.value) : options, sender)
      })
    })
    return bounded(offered, this.place, typeof options === "function" ? undefined : options?.wait, fail)
  }

  readonly offerEach = (
    next: () => Exit.Exit<Wish, QueueError> | undefined
  ): Effect.Effect<ReadonlyArray<Offered>, QueueError> => this.#offers.each(next)

  #spanned<B>(verb: string, use: (sender: Sender) => Effect.Effect<B, QueueError>): Effect.Effect<B, QueueError> {
    return sending((trace, context) => use({ trace, context }), `lockstep.Queue.${verb}`, "queue", this.name)
  }

  #traced<B, F, R>(verb: string, self: Effect.Effect<B, F, R>): Effect.Effect<B, F, R> {
    return spanning(self, `lockstep.Queue.${verb}`, "queue", this.name)
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Jobs
  // -------------------------------------------------------------------------------------------------------------------

  readonly execute = (payload: A, { wait, ...options }: ExecuteOptions = {}) =>
    this.#traced("execute", bounded(Effect.suspend(() => this.#execute(payload, options)), this.place, wait, fail))

  #execute(payload: A, { onInterrupt = "cancel", ...options }: Omit<ExecuteOptions, "wait">) {
    oneOf(onInterrupt, "onInterrupt", ["cancel", "continue"])
    const result = awaited(options.result || this.#options.result || true, this.#space.kernel.settings.lease)
    // A job that was there already is also that of others.
    const cancel = ({ duplicate, id }: Offered) =>
      duplicate || onInterrupt === "continue" ? Effect.void : Effect.ignore(this.job(id).cancelled({ persists: "end" }))
    // An offer may wait for room for long, so it can be interrupted too.
    const offer = this.#offer(
      payload,
      { ...options, result },
      (wish) => this.#offers.one(wish, (offered) => void this.#space.kernel.io.run(cancel(offered)))
    )
    return Effect.uninterruptibleMask((restore) =>
      Effect.flatMap(
        restore(offer),
        (offered) => Effect.onInterrupt(restore(this.job(offered.id).awaited(true)), () => cancel(offered))
      )
    )
  }

  readonly job = (id: string): Handle<A, S, E> => new Handle(this.#home, id)

  // -------------------------------------------------------------------------------------------------------------------
  // Work
  // -------------------------------------------------------------------------------------------------------------------

  get #left(): QueueError {
    const { namespace } = this.#space.kernel.settings
    return fail(new QueueClosed({ name: this.name, namespace }))
  }

  get #closed(): QueueError {
    return fail(new CoordinatorClosed({ namespace: this.#space.kernel.settings.namespace }))
  }

  readonly take = (options: TakeOptions = {}): Effect.Effect<Option.Option<Taken<A, S>>, QueueError, Scope.Scope> =>
    Effect.map(this.takeBatch({ ...options, max: 1 }), ([taken]) => Option.fromUndefinedOr(taken))

  readonly takeBatch = (
    options: TakeBatchOptions
  ): Effect.Effect<ReadonlyArray<Taken<A, S>>, QueueError, Scope.Scope> =>
    Effect.suspend(() =>
      this.#take("take", take<A, S, QueueError>(this.#taking(options), whole(options.max, "max", mostConcurrency)))
    )

  readonly withJob = <B extends S, E2, R>(
    use: (payload: A) => Effect.Effect<B, E2, R>,
    { overrun = mostOverrun, ...options }: WithJobOptions<E2> = {}
  ): Effect.Effect<Option.Option<B>, E2 | JobTimeout | QueueError, Exclude<R, Job>> =>
    Effect.suspend(() => this.#take("withJob", withJob(use, this.#taking(options), millis(overrun, "overrun"))))

  #taking({ wait, ...options }: WithJobOptions<any>): Taking<A, QueueError> {
    return {
      places: this.#places,
      deque: this.#deque,
      payload: this.codec,
      results: this.#home.results,
      policy: policyOf(options, this.#options, this.#space.kernel),
      wait: wait === undefined ? undefined : millisOrEndless(wait, "wait") ?? Number.POSITIVE_INFINITY,
      closed: () => this.#closed,
      fail
    }
  }

  #take<B, F, R>(verb: string, taking: Effect.Effect<B, F, R>): Effect.Effect<B, F | QueueError, R> {
    return this.#traced(verb, this.#deque === undefined ? taking : Effect.andThen(this.#deque.standing, taking))
  }

  readonly run = <E2, R>(
    handler: (payload: A) => Effect.Effect<S, E2, R>,
    options: RunOptions<E2> = {}
  ): Effect.Effect<never, QueueError, Exclude<R, Job>> => {
    const pool = Effect.suspend(() => this.#pool(handler, options))
    return Effect.scoped(Effect.flatMap(pool, (pool) => Effect.andThen(pool.await, Effect.never)))
  }

  readonly pool = <E2, R>(handler: (payload: A) => Effect.Effect<S, E2, R>, options: PoolOptions<E2> = {}) =>
    Effect.suspend(() => this.#pool(handler, options))

  #pool<E2, R>(
    handler: (payload: A) => Effect.Effect<S, E2, R>,
    { concurrency = 1, grace = 0, idle, overrun = mostOverrun, signals = [], ...options }: PoolOptions<E2>
  ): Effect.Effect<WorkerPool, QueueError, Scope.Scope | Exclude<R, Job>> {
    whole(concurrency, "concurrency", mostConcurrency)
    const handling = handlingOf(
      this.codec,
      this.#home.results,
      handler,
      policyOf(options, this.#options, this.#space.kernel)
    )
    const shared = {
      grace: graceOf(grace),
      idle: idle === undefined ? undefined : millis(idle, "idle"),
      signals,
      closed: () => this.#closed,
      fail,
      place: this.place
    }
    const over = millis(overrun, "overrun")
    return Effect.flatMap(Effect.context<Exclude<R, Job>>(), (context) => {
      const employment = { context: context as Context.Context<R>, handling, overrun: over, deque: this.#deque }
      return poolOf(crewOf(employment, this.#places, concurrency), shared)
    })
  }

  /** A worker without slots: its process has a deque for as long as the scope is open, also while it takes no job. */
  get stand(): Effect.Effect<void, QueueError, Scope.Scope> {
    const handling = handlingOf(
      this.codec,
      this.#home.results,
      () => Effect.void,
      policyOf({}, this.#options, this.#space.kernel)
    )
    const employment = { context: Context.empty(), handling, overrun: mostOverrun, deque: this.#deque }
    return crewOf(employment, this.#places, 0).work(() => {}, fail)
  }

  get workers(): Effect.Effect<ReadonlyArray<WorkerState>, QueueError> {
    return Effect.map(failing(question(this.place, "queue.deques", [])), ([, found]) => workersOf(found))
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Schedules
  // -------------------------------------------------------------------------------------------------------------------

  readonly schedule = (
    name: string,
    times: Cron.Cron | Duration.Input,
    payload: A,
    options: ScheduleOptions = {}
  ): Effect.Effect<void, QueueError> =>
    Effect.suspend(() => {
      this.checkOptions(options)
      const body = this.#encode(payload)
      return Exit.isFailure(body)
        ? Effect.failCause(body.cause)
        : failing(this.#schedules.set(checkName(name, "name"), times, body.value, options))
    })

  readonly unschedule = (name: string): Effect.Effect<boolean, QueueError> =>
    Effect.suspend(() => failing(this.#schedules.remove(checkName(name, "name"))))

  get schedules(): Stream.Stream<Scheduled<A>, QueueError> {
    return Stream.mapError(this.#schedules.all(this.codec), ({ reason }) => fail(reason))
  }

  readonly nextRuns = (name: string, count: number): Effect.Effect<ReadonlyArray<DateTime.Utc>, QueueError> =>
    Effect.suspend(() => failing(this.#schedules.runs(checkName(name, "name"), count)))
}
