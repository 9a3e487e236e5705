/**
 * The shards of a job, worked on by several processes: workers register shards and submit what they come to, and whoever
 * wants it waits for all of them and hears what has become of workers that died.
 *
 * A group exists for as long as somebody has it open, and for `keep` afterwards if anything was registered. It goes through
 * rounds: `reset` begins the next one.
 *
 * **Guarantees**
 *
 * - A shard has one worker at a time. It can be registered again when its worker has failed, or is lost: its scope was
 *   closed, or its process died. Then its former worker can submit nothing any more; each registration has a fencing token.
 * - `run` interrupts its effect when the lease is lost, before another worker can be granted the shard. A result that was
 *   accepted is never overwritten.
 * - `awaitAll` answers when all shards are done, and fails when it finds one that has failed or, unless it was told to wait,
 *   one whose worker is lost: in the moment when the lease of a dead process runs out. Nothing polls; a change is one event
 *   to each process that has the group open, however many fibers wait there.
 * - `progress` shows every change in order, also across reconnects. After a lost session it goes on with the group as it
 *   is by then.
 * - A wait is only a wait: interrupted or timed out (`Effect.timeout`), it leaves nothing behind.
 * - After Redis has lost its data, whoever has the group open creates it again and submits again what it had submitted
 *   itself; what it was working on is lost.
 *
 * **Gotchas**
 *
 * - Without `shards`, all is done as soon as everything that has been registered so far is done.
 * - What was submitted by processes that have closed the group is gone when Redis loses its data. Then `awaitAll` waits until
 *   as many shards as before are done again; use `Effect.timeout`.
 * - Each process keeps the results that it has submitted in memory, for as long as it has the group open and until `reset`.
 * - Who has lost a lease and registers the shard again at once can still find it taken: by itself, as far as Redis knows,
 *   until the lease has run out there.
 * - `reset` does not wait for the workers of the former round: they are interrupted when they hear of it, and the next
 *   worker of a shard may have begun by then.
 * - `awaitAll` looks at the group when it is called and when it hears of a change. A shard that was lost or had failed for a
 *   moment, and was registered again at once, can go unnoticed by it; `progress` shows it.
 *
 * **Example** (Two shards, in whatever processes their workers are)
 *
 * ```ts
 * import { Coordinator, TaskGroup } from "lockstep"
 * import { Effect, Schema } from "effect"
 *
 * class Count extends TaskGroup.Service<Count>()("count", { result: Schema.Number, shards: 2 }) {}
 *
 * const program = Effect.gen(function*() {
 *   const count = yield* Count
 *   yield* Effect.forkScoped(count.run("a-m", Effect.succeed(12)))
 *   yield* Effect.forkScoped(count.run("n-z", Effect.succeed(30)))
 *   const results = yield* count.awaitAll({ onWorkerLost: "wait" })
 *   yield* Effect.log(results.get("a-m")! + results.get("n-z")!)
 * })
 *
 * program.pipe(
 *   Effect.scoped,
 *   Effect.provide(Count.layer),
 *   Effect.provide(Coordinator.layerEmbedded()),
 *   Effect.runPromise
 * )
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
import * as Queue from "effect/Queue"
import * as Schema from "effect/Schema"
import type * as Scope from "effect/Scope"
import * as Stream from "effect/Stream"
import { Coordinator } from "./Coordinator.ts"
import { CoordinatorError } from "./internal/actor/errors.ts"
import { kernelOf } from "./internal/actor/kernel.ts"
import { checkName } from "./internal/actor/keys.ts"
import * as held from "./internal/hold/held.ts"
import { LeaseLost, type WaitTimeout } from "./internal/hold/loss.ts"
import { InvalidPayload, type Payload, payload } from "./internal/hold/payload.ts"
import { withinHeld } from "./internal/hold/protect.ts"
import { spanned } from "./internal/hold/span.ts"
import {
  isComplete,
  type Page,
  registeredIn,
  type Registration,
  type State,
  type Status,
  Tasks
} from "./internal/tasks.ts"
import type { Lease } from "./Lease.ts"

/**
 * @category type IDs
 * @since 0.1.0
 */
export const TypeId: TypeId = "~lockstep/TaskGroup"

/**
 * @category type IDs
 * @since 0.1.0
 */
export type TypeId = "~lockstep/TaskGroup"

/**
 * A registration of a shard. It is over when something was submitted, with its scope, with the session, and with a reset.
 *
 * @category models
 * @since 0.1.0
 */
export interface Task<in A, in E> {
  readonly shard: string
  /** What the worker holds: its fencing token, and word of its loss. */
  readonly lease: Lease
  /** Ends it with a result. Fails with `SubmitRefused` or `LeaseLost` when the registration is over. */
  readonly submit: (result: A) => Effect.Effect<void, TaskGroupError>
  /** Ends it with an error, as `submit` does with a result. */
  readonly fail: (error: E) => Effect.Effect<void, TaskGroupError>
}

/**
 * How the shards of the current round are.
 *
 * @category models
 * @since 0.1.0
 */
export interface Progress {
  /** 1, and one more with each reset. */
  readonly round: number
  /** How many shards there are to be, if anybody has said. */
  readonly expected: number | undefined
  /** How many have been registered: those that are running, done, failed and lost. */
  readonly registered: number
  readonly running: number
  readonly done: number
  readonly failed: number
  readonly lost: number
  /** What has changed, if it was one shard. */
  readonly changed: {
    readonly shard: string
    readonly status: "registered" | "done" | "failed" | "lost"
  } | undefined
}

/**
 * A group of tasks. `A` is what workers submit, `E` what they fail with.
 *
 * @category models
 * @since 0.1.0
 */
export interface TaskGroup<in out A, in out E> {
  readonly [TypeId]: TypeId
  readonly name: string
  /**
   * Makes the caller the worker of a shard (any text of up to 512 bytes), for as long as the scope is open. Fails with
   * `ShardTaken` while somebody alive works on it, and with `ShardDone` when there is a result.
   */
  readonly register: (shard: string) => Effect.Effect<Task<A, E>, TaskGroupError, Scope.Scope>
  /**
   * Registers a shard, runs the effect, and submits its result or error. The effect is interrupted when the registration is
   * lost, and this fails with `LeaseLost`. If the effect dies or is interrupted, the shard is lost.
   * A shard that is done is not run again: the answer is its result.
   */
  readonly run: <B extends A, E2 extends E, R>(
    shard: string,
    effect: Effect.Effect<B, E2, R>
  ) => Effect.Effect<A, E2 | TaskGroupError, R>
  /**
   * Waits until all shards are done: `shards` of them, or else all that have been registered, and at least one. Answers
   * their results, in the order in which they were first registered.
   *
   * Fails with `WorkerFailed` when one has failed, with `WorkerLost` when a worker is lost (with `onWorkerLost: "wait"`
   * it goes on, until somebody has registered the shard again and submitted), of several with the one that was registered
   * first; and with `GroupReset` after a reset.
   */
  readonly awaitAll: (options?: AwaitOptions | undefined) => Effect.Effect<ReadonlyMap<string, A>, TaskGroupError<E>>
  /**
   * How it is now, and then every change. If Redis is out of reach it begins with what this process knows. Ends when the
   * group is closed.
   */
  readonly progress: Stream.Stream<Progress>
  /** How it is now, by Redis's word. */
  readonly snapshot: Effect.Effect<Progress, TaskGroupError>
  /** Begins a new round: what was submitted is forgotten, and registrations are over, with the loss reason `revoked`. */
  readonly reset: Effect.Effect<void, TaskGroupError>
}

/**
 * @category options
 * @since 0.1.0
 */
export interface AwaitOptions {
  /**
   * Whether to fail when a worker is lost, or to wait until another one has done its shard. Default "fail": nobody may
   * ever come.
   */
  readonly onWorkerLost?: "fail" | "wait" | undefined
}

/**
 * @category options
 * @since 0.1.0
 */
export interface Options<A, E = string> {
  readonly result: Schema.Codec<A, any>
  /** Of what workers fail with. Default: a string. */
  readonly error?: Schema.Codec<E, any> | undefined
  /** How many shards there are: a whole number from 1 to 2^31 - 1. Default: as many as are registered. */
  readonly shards?: number | undefined
  /** How long it is remembered after the last one has closed it. Default 1 hour. The last one to open it decides. */
  readonly keep?: Duration.Input | undefined
}

/**
 * Somebody alive works on the shard.
 *
 * @category errors
 * @since 0.1.0
 */
export class ShardTaken extends Schema.Error<ShardTaken>("lockstep/TaskGroup/ShardTaken")({
  _tag: Schema.tag("ShardTaken"),
  name: Schema.String,
  shard: Schema.String
}) {
  override get message(): string {
    return "The shard has a worker: register another one, or this one when `progress` shows that it is lost."
  }
}

/**
 * The shard is done, and has its result.
 *
 * @category errors
 * @since 0.1.0
 */
export class ShardDone extends Schema.Error<ShardDone>("lockstep/TaskGroup/ShardDone")({
  _tag: Schema.tag("ShardDone"),
  name: Schema.String,
  shard: Schema.String
}) {
  override get message(): string {
    return "The shard is done: there is nothing left to do for it until the group is reset."
  }
}

/**
 * Nothing can be submitted with this registration any more.
 *
 * @category errors
 * @since 0.1.0
 */
export class SubmitRefused extends Schema.Error<SubmitRefused>("lockstep/TaskGroup/SubmitRefused")({
  _tag: Schema.tag("SubmitRefused"),
  name: Schema.String,
  shard: Schema.String,
  token: Schema.Number
}) {
  override get message(): string {
    return "The registration is over: something was submitted, its scope was closed, its worker was taken for dead, or " +
      "the group was reset. Nothing was changed; register the shard again."
  }
}

/**
 * A worker has submitted an error.
 *
 * @category errors
 * @since 0.1.0
 */
export class WorkerFailed<E = unknown> extends Schema.Error<WorkerFailed<any>>("lockstep/TaskGroup/WorkerFailed")({
  _tag: Schema.tag("WorkerFailed"),
  name: Schema.String,
  shard: Schema.String,
  error: Schema.Unknown
}) {
  declare readonly error: E
  override get message(): string {
    return "The worker of a shard has failed: see `error`; the shard can be registered again."
  }
}

/**
 * A worker has ended without submitting anything, or died.
 *
 * @category errors
 * @since 0.1.0
 */
export class WorkerLost extends Schema.Error<WorkerLost>("lockstep/TaskGroup/WorkerLost")({
  _tag: Schema.tag("WorkerLost"),
  name: Schema.String,
  shard: Schema.String
}) {
  override get message(): string {
    return "The worker of a shard is gone and has submitted nothing: register the shard again, or wait with " +
      "`onWorkerLost: \"wait\"`."
  }
}

/**
 * The group was reset while it was waited for.
 *
 * @category errors
 * @since 0.1.0
 */
export class GroupReset extends Schema.Error<GroupReset>("lockstep/TaskGroup/GroupReset")({
  _tag: Schema.tag("GroupReset"),
  name: Schema.String,
  round: Schema.Number
}) {
  override get message(): string {
    return `Round ${this.round} was ended by a reset, and its results are gone: wait again for those of the next one.`
  }
}

/**
 * Nobody has the group open any more: this one's scope was closed, or Redis has lost its data a moment ago.
 *
 * @category errors
 * @since 0.1.0
 */
export class GroupGone extends Schema.Error<GroupGone>("lockstep/TaskGroup/GroupGone")({
  _tag: Schema.tag("GroupGone"),
  name: Schema.String
}) {
  override get message(): string {
    return "The group is not open: use it within the scope that made it."
  }
}

/**
 * The group exists with another number of shards.
 *
 * @category errors
 * @since 0.1.0
 */
export class ShardsMismatch extends Schema.Error<ShardsMismatch>("lockstep/TaskGroup/ShardsMismatch")({
  _tag: Schema.tag("ShardsMismatch"),
  name: Schema.String,
  shards: Schema.Number,
  existing: Schema.Number
}) {
  override get message(): string {
    return `It exists with ${this.existing} shards, not ${this.shards}: use the same number, none, or another name.`
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
 * `E` is what workers fail with, where that can be the reason.
 *
 * @category errors
 * @since 0.1.0
 */
export class TaskGroupError<E = never> extends Schema.Error<TaskGroupError<any>>("lockstep/TaskGroup/TaskGroupError")({
  _tag: Schema.tag("TaskGroupError"),
  reason: Schema.Union([
    ShardTaken,
    ShardDone,
    SubmitRefused,
    WorkerFailed,
    WorkerLost,
    GroupReset,
    GroupGone,
    ShardsMismatch,
    InvalidPayload,
    LeaseLost,
    CoordinatorError
  ])
}) {
  declare readonly reason:
    | ShardTaken
    | ShardDone
    | SubmitRefused
    | WorkerFailed<E>
    | WorkerLost
    | GroupReset
    | GroupGone
    | ShardsMismatch
    | InvalidPayload
    | LeaseLost
    | CoordinatorError
  override get message(): string {
    return this.reason.message
  }
}

const failure = <E = never>(reason: TaskGroupError<E>["reason"]): TaskGroupError<E> =>
  new TaskGroupError({ reason }) as TaskGroupError<E>

const statuses = { r: "registered", d: "done", f: "failed", l: "lost" } as const satisfies Record<Status, string>

const progressOf = (state: State): Progress => ({
  round: state.round,
  expected: state.expected === 0 ? undefined : state.expected,
  registered: registeredIn(state),
  running: state.running,
  done: state.done,
  failed: state.failed,
  lost: state.lost,
  changed: state.changed && { shard: state.changed.shard, status: statuses[state.changed.status] }
})

const resultOf = (shard: string) => `The result of shard ${JSON.stringify(shard)}`
const errorOf = (shard: string) => `The error of shard ${JSON.stringify(shard)}`

class TaskImpl<A, E> implements Task<A, E> {
  readonly #group: TaskGroupImpl<A, E>
  readonly #registration: Registration
  #submitted = false

  constructor(group: TaskGroupImpl<A, E>, registration: Registration) {
    this.#group = group
    this.#registration = registration
  }

  get shard(): string {
    return this.#registration.shard
  }

  get lease(): held.Held {
    return this.#registration.held
  }

  readonly submit = (result: A): Effect.Effect<void, TaskGroupError> =>
    this.#end(true, this.#group.result.encode(result, resultOf(this.shard)))

  readonly fail = (error: E): Effect.Effect<void, TaskGroupError> =>
    this.#end(false, this.#group.error.encode(error, errorOf(this.shard)))

  #end(
    fine: boolean,
    encoded: Effect.Effect<string, InvalidPayload>
  ): Effect.Effect<void, TaskGroupError> {
    const { name, tasks } = this.#group
    return Effect.flatMap(Effect.mapError(encoded, failure), (value) =>
      Effect.callback((resume) => {
        const refuse = () =>
          resume(Effect.fail(failure(
            this.lease.claim.lost === undefined
              ? new SubmitRefused({ name, shard: this.shard, token: this.lease.token })
              : this.lease.loss()
          )))
        if (this.#submitted || this.lease.claim.lost !== undefined) return refuse()
        this.#submitted = true
        tasks.submit(this.#registration, fine, value, (accepted) =>
          accepted ? resume(Effect.void) : refuse(), (error) => {
          this.#submitted = false
          resume(Effect.fail(failure(error)))
        })
      }))
  }
}

class TaskGroupImpl<A, E> implements TaskGroup<A, E> {
  readonly "~lockstep/TaskGroup" = "~lockstep/TaskGroup" as const
  readonly name: string
  readonly tasks: Tasks
  readonly result: Payload<A>
  readonly error: Payload<E>

  constructor(tasks: Tasks, options: Options<A, E>) {
    this.name = tasks.place.name
    this.tasks = tasks
    this.result = payload(options.result)
    this.error = payload(options.error ?? (Schema.String as unknown as Schema.Codec<E>))
  }

  /** `done` is given the result of a shard that has one. */
  #acquiring(shard: string, done: (result: unknown) => Effect.Effect<undefined, TaskGroupError>) {
    checkName(shard, "shard")
    return {
      place: this.tasks.place,
      verb: "tasks.register",
      details: [shard],
      weight: 1,
      capacity: 1,
      wait: false,
      options: undefined,
      // It never waits for anybody.
      fail: (error: CoordinatorError | LeaseLost | WaitTimeout) => failure(error as CoordinatorError | LeaseLost),
      refuse: (refusal) => {
        if (refusal[0] === "taken") return Effect.fail(failure(new ShardTaken({ name: this.name, shard })))
        if (refusal[0] === "done") return done(refusal[1])
        return Effect.fail(failure(new GroupGone({ name: this.name })))
      }
    } satisfies held.Acquire<TaskGroupError>
  }

  #register(lease: held.Held, shard: string): TaskImpl<A, E> {
    return new TaskImpl(this, this.tasks.registered(lease, shard))
  }

  readonly register = (shard: string): Effect.Effect<Task<A, E>, TaskGroupError, Scope.Scope> =>
    Effect.suspend(() => {
      const refuse = () => Effect.fail(failure(new ShardDone({ name: this.name, shard })))
      return Effect.map(held.acquireScoped(this.#acquiring(shard, refuse)), (lease) => this.#register(lease!, shard))
    })

  readonly run = <B extends A, E2 extends E, R>(
    shard: string,
    effect: Effect.Effect<B, E2, R>
  ): Effect.Effect<A, E2 | TaskGroupError, R> =>
    Effect.withFiber((fiber) =>
      spanned(
        fiber,
        Effect.uninterruptibleMask((restore) => {
          let former: A
          const acquiring = this.#acquiring(shard, (result) =>
            Effect.map(Effect.mapError(this.result.decode(result, resultOf(shard)), failure), (result) => {
              former = result
              return undefined
            }))
          return Effect.flatMap(held.acquire(acquiring, restore), (lease) =>
            lease === undefined ? Effect.succeed(former) : Effect.onExit(
              Effect.suspend(() => {
                const task = this.#register(lease, shard)
                return Effect.flatMap(
                  Effect.exit(restore(withinHeld(effect, lease, failure))),
                  (exit) => this.#submit(task, exit, restore)
                )
              }),
              () =>
                held.giveBack(lease.claim)
            ))
        }),
        "lockstep.TaskGroup.run",
        this.name
      )
    )

  #submit<B extends A, E2 extends E>(
    task: TaskImpl<A, E>,
    exit: Exit.Exit<B, E2 | TaskGroupError>,
    restore: <T, Err, R>(effect: Effect.Effect<T, Err, R>) => Effect.Effect<T, Err, R>
  ): Effect.Effect<B, E2 | TaskGroupError> {
    if (Exit.isSuccess(exit)) return Effect.andThen(restore(task.submit(exit.value)), exit)
    if (task.lease.claim.lost !== undefined) return exit
    const error = Exit.findErrorOption(exit) as Option.Option<E2>
    return Option.isSome(error) ? Effect.andThen(restore(task.fail(error.value)), exit) : exit
  }

  readonly awaitAll = (
    options?: AwaitOptions | undefined
  ): Effect.Effect<ReadonlyMap<string, A>, TaskGroupError<E>> =>
    Effect.acquireUseRelease(
      Effect.sync(() => this.tasks.place.partition.claims.watch()),
      () => this.#all(options?.onWorkerLost === "wait" ? "f" : "fl"),
      (end) => Effect.sync(end)
    )

  /** `faults` are the statuses that end it. */
  #all(faults: "f" | "fl"): Effect.Effect<ReadonlyMap<string, A>, TaskGroupError<E>> {
    const { name, tasks } = this
    const isFaulty = (state: State) => state.failed > 0 || faults === "fl" && state.lost > 0
    return Effect.gen({ self: this }, function*() {
      let round = 0
      for (;;) {
        const { heard } = tasks
        const look = yield* this.#page(1, "")
        if (look !== undefined) {
          const { state } = look
          if (round > 0 && state.round > round) return yield* Effect.fail(failure(new GroupReset({ name, round })))
          round = state.round
          if (isFaulty(state)) yield* this.#fault(state, faults)
          else if (isComplete(state)) {
            const results = yield* this.#results(state)
            if (results !== undefined) return results
          }
        }
        // What was read is exact, and what is heard says only when to read again.
        yield* this.#news(
          heard,
          (state) => look === undefined || state.round !== round || isFaulty(state) || isComplete(state)
        )
      }
    })
  }

  #page(from: number, wanted: string): Effect.Effect<Page | undefined, TaskGroupError> {
    return Effect.mapError(this.tasks.readIfPossible(from, wanted), failure)
  }

  /** Waits until something worth looking at was heard since. */
  #news(since: number, isWorth: (state: State) => boolean): Effect.Effect<void, TaskGroupError> {
    const { name, tasks } = this
    return Effect.callback((resume) => {
      const wake = () => {
        if (!tasks.closed && (tasks.heard === since || !isWorth(tasks.state))) return
        tasks.waiting.delete(wake)
        resume(tasks.closed ? Effect.fail(failure(new GroupGone({ name }))) : Effect.void)
      }
      tasks.waiting.add(wake)
      wake()
      return Effect.sync(() => tasks.waiting.delete(wake))
    })
  }

  /** Nothing if they change meanwhile. */
  readonly #results = Effect.fnUntraced({ self: this }, function*(
    this: TaskGroupImpl<A, E>,
    { done, round }: State
  ): Effect.fn.Return<ReadonlyMap<string, A> | undefined, TaskGroupError> {
    const results = new Map<string, A>()
    for (let from = 1; from > 0;) {
      const page = yield* this.#page(from, "d")
      if (page === undefined || page.state.round !== round) return undefined
      for (const [shard, , value] of page.shards) {
        results.set(shard, yield* Effect.mapError(this.result.decode(value, resultOf(shard)), failure))
      }
      from = page.next
    }
    return results.size < done ? undefined : results
  })

  /** Fails with the first one, if it is still there. */
  readonly #fault = Effect.fnUntraced({ self: this }, function*(
    this: TaskGroupImpl<A, E>,
    { round }: State,
    faults: "f" | "fl"
  ): Effect.fn.Return<void, TaskGroupError<E>> {
    const { name } = this
    for (let from = 1; from > 0;) {
      const page = yield* this.#page(from, faults)
      if (page === undefined || page.state.round !== round) return
      const [first] = page.shards
      if (first !== undefined) {
        const [shard, status, value] = first
        if (status === "l") return yield* Effect.fail(failure(new WorkerLost({ name, shard })))
        const error = yield* Effect.mapError(this.error.decode(value, errorOf(shard)), failure)
        return yield* Effect.fail(failure<E>(new WorkerFailed({ name, shard, error }) as WorkerFailed<E>))
      }
      from = page.next
    }
  })

  get progress(): Stream.Stream<Progress> {
    const { tasks } = this
    const changes = Stream.callback<State>((queue) => {
      // What is heard before it is known how it was is for later, or known by then.
      let early: Array<State> | undefined = []
      let known = 0
      const show = (state: State) => {
        if (state.version <= known) return
        known = 0
        Queue.offerUnsafe(queue, state)
      }
      const see = (state: State | undefined) => {
        if (state === undefined) Queue.endUnsafe(queue)
        else if (early === undefined) show(state)
        else early.push(state)
      }
      const subscribed = Effect.acquireRelease(
        Effect.sync(() => {
          if (tasks.closed) see(undefined)
          tasks.streams.add(see)
          return tasks.place.partition.claims.watch()
        }),
        (end) =>
          Effect.sync(() => {
            end()
            tasks.streams.delete(see)
          })
      )
      return Effect.gen(function*() {
        yield* subscribed
        const page = yield* Effect.orElseSucceed(tasks.read(1, ""), () => undefined)
        const first = page?.state ?? tasks.state
        Queue.offerUnsafe(queue, { ...first, changed: undefined })
        known = first.version
        early?.forEach(show)
        early = undefined
      })
    }, { bufferSize: Number.POSITIVE_INFINITY })
    return Stream.map(changes, progressOf)
  }

  get snapshot(): Effect.Effect<Progress, TaskGroupError> {
    return Effect.flatMap(
      Effect.mapError(this.tasks.read(1, ""), failure),
      (page) =>
        page === undefined
          ? Effect.fail(failure(new GroupGone({ name: this.name })))
          : Effect.succeed(progressOf(page.state))
    )
  }

  get reset(): Effect.Effect<void, TaskGroupError> {
    return Effect.callback((resume) =>
      this.tasks.reset(
        (found) => resume(found ? Effect.void : Effect.fail(failure(new GroupGone({ name: this.name })))),
        (error) => resume(Effect.fail(failure(error)))
      )
    )
  }
}

const mostShards = 2 ** 31 - 1

/**
 * Creates the group, or joins it. It stays open with the scope. Fails with `ShardsMismatch` when it exists with another
 * number of shards.
 *
 * @category constructors
 * @since 0.1.0
 */
export const make = <A, E = string>(
  options: Options<A, E> & { readonly name: string }
): Effect.Effect<TaskGroup<A, E>, TaskGroupError, Coordinator | Scope.Scope> =>
  Effect.flatMap(Coordinator, (coordinator) => {
    const { keep = "1 hour", name, shards } = options
    if (shards !== undefined && !(Number.isInteger(shards) && shards >= 1 && shards <= mostShards)) {
      throw new RangeError(`shards must be a whole number from 1 to ${mostShards}`)
    }
    const millis = held.millis(keep, "keep")
    const tasks = new Tasks(held.placeOf(kernelOf(coordinator), "tasks", name, "name"), shards ?? 0, millis)
    return Effect.flatMap(tasks.join(failure), (existing) =>
      existing === undefined
        ? Effect.succeed(new TaskGroupImpl(tasks, options))
        : Effect.fail(failure(new ShardsMismatch({ name, shards: shards!, existing }))))
  })

/**
 * The class that `Service` makes.
 *
 * @category models
 * @since 0.1.0
 */
export interface ServiceClass<in out Self, in out Id extends string, in out A, in out E>
  extends Context.ServiceClass<Self, Id, TaskGroup<A, E>>
{
  readonly layer: Layer.Layer<Self, TaskGroupError, Coordinator>
}

/**
 * A group as a typed service: `class Import extends TaskGroup.Service<Import>()("import", { result: Schema.Number }) {}`,
 * with `Import.layer`.
 *
 * @category constructors
 * @since 0.1.0
 */
export const Service =
  <Self>() =>
  <const Id extends string, A, E = string>(name: Id, options: Options<A, E>): ServiceClass<Self, Id, A, E> => {
    const tag = Context.Service<Self, TaskGroup<A, E>>()(name) as unknown as Context.ServiceClass<
      Self,
      Id,
      TaskGroup<A, E>
    >
    return Object.assign(tag, { layer: Layer.effect(tag, make({ ...options, name })) }) as unknown as ServiceClass<
      Self,
      Id,
      A,
      E
    >
  }
