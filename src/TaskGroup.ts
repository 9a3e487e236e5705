/**
 * The shards of a job, worked on by several processes. Workers register shards and submit their results; waiters wait for all
 * shards, and are notified of workers that died.
 *
 * A group exists for as long as a process has it open, and for `timeToLive` afterwards if any shard was registered. It goes
 * through rounds: `reset` begins the next one.
 *
 * **Guarantees**
 *
 * - A shard has one worker at a time. It can be registered again when its worker has failed, or is lost: its scope was
 *   closed, or its process died. From then on the former worker can submit nothing; each registration has a fencing token.
 * - `run` interrupts its effect when the lease is lost, before another worker can be granted the shard. A result that was
 *   accepted is never overwritten.
 * - `awaitAll` answers when all shards are done. It fails when a shard has failed. Without `onWorkerLost: "wait"` it also fails
 *   when a worker is lost: at the moment when the lease of a dead process runs out. Nothing polls. A change is one event to each
 *   process that has the group open, however many fibers wait there.
 * - `changes` shows every change in order, also across reconnects. After a lost session it continues with the state by
 *   then.
 * - A wait that is interrupted or times out leaves nothing behind.
 * - After Redis has lost its data, the processes that have the group open create it again. Each of them submits its results
 *   again. The shards that they were working on are lost.
 *
 * **Gotchas**
 *
 * - The state outlives a program. A group that was completed a minute ago answers the next run of the same program at once,
 *   with the old results. Give each run an id with `run`, or begin anew with `fresh`.
 * - Without `shards`, all is done as soon as everything that has been registered so far is done.
 * - Results of processes that have closed the group are lost when Redis loses its data. Then `awaitAll` waits until as many
 *   shards as before are done again; use `wait`.
 * - Each process keeps the results that it has submitted in memory, for as long as it has the group open and until `reset`.
 * - A process that has lost a lease and registers the shard again at once can still find it taken. As far as Redis knows, the
 *   process itself has it until the lease has run out there.
 * - `reset` does not wait for the workers of the former round. They are interrupted when they observe it, and the next worker of
 *   a shard may have begun by then.
 * - Closing the scope of the group fails a waiting `awaitAll` with `GroupGone`.
 * - `awaitAll` looks at the group when it is called and when it is notified of a change. It can miss a shard that was lost or
 *   had failed for a moment and was registered again at once; `changes` shows it.
 *
 * **Example** (Two shards, with workers in any processes)
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

import type * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Option from "effect/Option"
import * as Schema from "effect/Schema"
import type * as Scope from "effect/Scope"
import * as Stream from "effect/Stream"
import { Coordinator } from "./Coordinator.ts"
import { checkName } from "./internal/actor/keys.ts"
import * as acquiring from "./internal/hold/acquire.ts"
import type { Publication } from "./internal/hold/following.ts"
import type { Hold } from "./internal/hold/hold.ts"
import { type Process, processOf } from "./internal/hold/holders.ts"
import { type InvalidPayload, type Payload, payload } from "./internal/hold/payload.ts"
import { flag, millis, mismatchPolicies, oneOf, placeOf, spaceOf } from "./internal/hold/place.ts"
import { protect } from "./internal/hold/protect.ts"
import { service, type ServiceClass as AnyServiceClass } from "./internal/hold/service.ts"
import { spanning } from "./internal/hold/span.ts"
import * as waiting from "./internal/taskGroup/awaiting.ts"
import {
  fail,
  GroupGone,
  ShardDone,
  ShardsMismatch,
  ShardTaken,
  SubmitRefused,
  type TaskGroupError
} from "./internal/taskGroup/errors.ts"
import { registeredIn, type Registration, type State, type Status, Tasks } from "./internal/taskGroup/tasks.ts"
import { showAs } from "./internal/text.ts"
import type { Lease } from "./Lease.ts"

export {
  /**
   * A value does not fit the schema: its own, or that of a process that uses another schema.
   *
   * @category errors
   * @since 0.1.0
   */
  InvalidPayload
} from "./internal/hold/payload.ts"
export {
  /**
   * The group was begun anew for another run. Waiters and calls of the former run fail with it.
   *
   * @category errors
   * @since 0.1.0
   */
  Superseded
} from "./internal/hold/superseded.ts"
export {
  GroupGone,
  GroupReset,
  ShardDone,
  ShardsMismatch,
  ShardTaken,
  SubmitRefused,
  TaskGroupError,
  WorkerFailed,
  WorkerLost
} from "./internal/taskGroup/errors.ts"

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
 * @category options
 * @since 0.1.0
 */
export interface SubmitOptions {
  /**
   * Published if the result is accepted, in the same step; see `Topic.publication`. The topic needs the name of the group as its
   * `colocate`.
   */
  readonly publish?: Publication | ReadonlyArray<Publication> | undefined
}

/**
 * A registration of a shard. It is over when something was submitted, with its scope, with that of the group, with the
 * session, and with the round.
 *
 * @category models
 * @since 0.1.0
 */
export interface Task<in A, in E> {
  readonly shard: string
  /** The lease of the worker: its fencing token, and its loss. */
  readonly lease: Lease
  /** Ends it with a result. Fails with `SubmitRefused` or `LeaseLost` when the registration is over. */
  readonly submit: (result: A, options?: SubmitOptions | undefined) => Effect.Effect<void, TaskGroupError>
  /** Ends it with an error, as `submit` does with a result. */
  readonly fail: (error: E, options?: SubmitOptions | undefined) => Effect.Effect<void, TaskGroupError>
}

/**
 * The shards of the current round, by number.
 *
 * @category models
 * @since 0.1.0
 */
export interface Progress {
  /** 1, and one more with each reset and each run. */
  readonly round: number
  /** How many shards there will be, if any member has said. */
  readonly expected: number | undefined
  /** How many have been registered: those that are running, done, failed and lost. */
  readonly registered: number
  readonly running: number
  readonly done: number
  readonly failed: number
  readonly lost: number
  /** The change, if it was one of a shard. */
  readonly changed: {
    readonly shard: string
    readonly status: "running" | "done" | "failed" | "lost"
  } | undefined
}

/**
 * A shard and its worker.
 *
 * @category models
 * @since 0.1.0
 */
export interface Shard {
  readonly shard: string
  readonly status: "running" | "done" | "failed" | "lost"
  /** The process that has worked on it last; undefined when Redis does not know its session any more. */
  readonly worker: { readonly node: string; readonly host: string; readonly pid: number } | undefined
}

/**
 * A group of tasks. `A` is the result of workers, `E` their error.
 *
 * @category models
 * @since 0.1.0
 */
export interface TaskGroup<in out A, in out E> {
  readonly [TypeId]: TypeId
  readonly name: string
  /**
   * Makes the caller the worker of a shard (any text of up to 512 bytes), for as long as the scope is open. Fails with
   * `ShardTaken` while a living worker has it, and with `ShardDone` when there is a result.
   */
  readonly register: (
    shard: string,
    options?: RunOptions | undefined
  ) => Effect.Effect<Task<A, E>, TaskGroupError, Scope.Scope>
  /**
   * Registers a shard, runs the effect, and submits its result or error. The effect is interrupted when the registration is
   * lost, and this fails with `LeaseLost`. If the effect dies or is interrupted, the shard is lost.
   * A shard that is done is not run again: the answer is its result.
   */
  readonly run: {
    <B extends A, E2 extends E, R>(
      shard: string,
      effect: Effect.Effect<B, E2, R>,
      options?: RunOptions | undefined
    ): Effect.Effect<A, E2 | TaskGroupError, R>
    (
      shard: string,
      options?: RunOptions | undefined
    ): <B extends A, E2 extends E, R>(effect: Effect.Effect<B, E2, R>) => Effect.Effect<A, E2 | TaskGroupError, R>
  }
  /**
   * Waits until all shards are done: `shards` of them, or else all that have been registered, and at least one. Answers
   * their results, in the order in which they were first registered.
   *
   * Fails with `WorkerFailed` when a shard has failed, and with `WorkerLost` when a worker is lost. With `onWorkerLost: "wait"`
   * it waits until another worker has done the shard. Of several shards, the error is about the one that was registered first.
   * Fails with `GroupReset` after a reset, and with `Superseded` when another run has begun.
   */
  readonly awaitAll: (options?: AwaitOptions | undefined) => Effect.Effect<ReadonlyMap<string, A>, TaskGroupError<E>>
  /**
   * The state now, and then every change. If Redis is out of reach it begins with the state that this process knows. Ends
   * when the group is closed, and when another run begins.
   */
  readonly changes: Stream.Stream<Progress>
  /** The state now, by Redis's word. */
  readonly snapshot: Effect.Effect<Progress, TaskGroupError>
  /** Every shard of this round, in the order of their first registrations, with its status and its worker. */
  readonly shards: Effect.Effect<ReadonlyArray<Shard>, TaskGroupError>
  /** The results so far, in the order of the first registrations. */
  readonly results: Effect.Effect<ReadonlyMap<string, A>, TaskGroupError>
  /**
   * Begins a new round: results are forgotten, and registrations are lost, with the reason `revoked`. When it fails because
   * Redis did not answer in time, it may still be executed later: look at `snapshot` before repeating it.
   */
  readonly reset: Effect.Effect<void, TaskGroupError>
}

/**
 * @category options
 * @since 0.1.0
 */
export interface RunOptions {
  /**
   * How long the shard may be held; then its worker is interrupted, and loses it with the reason `maxHold`. Default: that of
   * the coordinator.
   */
  readonly maxHold?: Duration.Input | undefined
}

/**
 * @category options
 * @since 0.1.0
 */
export interface AwaitOptions {
  /** How long to wait; then it fails with `WaitTimeout`. Default: that of the coordinator. */
  readonly wait?: Duration.Input | undefined
  /**
   * Whether to fail when a worker is lost, or to wait until another one has done its shard. Default "fail": there may never
   * be another one.
   */
  readonly onWorkerLost?: "fail" | "wait" | undefined
}

/**
 * @category options
 * @since 0.1.0
 */
export interface Options<A, E = string> {
  readonly result: Schema.Codec<A, any>
  /** Of the errors of workers. Default: a string. */
  readonly error?: Schema.Codec<E, any> | undefined
  /** How many shards there are: a whole number from 1 to 2^31 - 1. Default: as many as are registered. */
  readonly shards?: number | undefined
  /**
   * What to do when the group has another number of shards. `fail` fails with `ShardsMismatch` while other processes have it
   * open. `keep` keeps the number that it has, and `resize` changes it for all processes. Default `fail`. When no other process
   * has it open, `fail` gives it this number.
   */
  readonly onMismatch?: "fail" | "keep" | "resize" | undefined
  /**
   * The run that the state belongs to, any text of up to 512 bytes: the id of a deployment, or a date. The first process
   * with another run id begins anew: results are forgotten, registrations of the former run are lost, and its processes get
   * `Superseded`. Default: the run that the state belongs to already, whichever that is.
   */
  readonly run?: string | undefined
  /**
   * Begins anew if no other living process has the group open. A process that was killed counts as living until its lease
   * has run out; give each run an id with `run` where that matters.
   */
  readonly fresh?: boolean | undefined
  /** How long the state is kept after the last process has closed the group. Default 1 hour. The last to open it decides. */
  readonly timeToLive?: Duration.Input | undefined
  /** How long shards stay with a worker whose process died. Default: the coordinator's lease. */
  readonly lease?: Duration.Input | undefined
}

const progressOf = (state: State): Progress => ({
  round: state.round,
  expected: state.expected === 0 ? undefined : state.expected,
  registered: registeredIn(state),
  running: state.running,
  done: state.done,
  failed: state.failed,
  lost: state.lost,
  changed: state.changed
})

type AnyEffect<A, E> = Effect.Effect<A, E, any>

const allStatuses: ReadonlyArray<Status> = ["running", "done", "failed", "lost"]

class TaskImpl<A, E> implements Task<A, E> {
  readonly #group: waiting.Group<A, E>
  readonly #registration: Registration
  #submitted = false

  constructor(group: waiting.Group<A, E>, registration: Registration) {
    this.#group = group
    this.#registration = registration
  }

  get shard(): string {
    return this.#registration.shard
  }

  get lease(): Hold {
    return this.#registration.hold
  }

  readonly submit = (result: A, options?: SubmitOptions): Effect.Effect<void, TaskGroupError> => {
    const { result: { encode }, tasks } = this.#group
    return this.#end(true, encode(result, waiting.resultOf(tasks.place.name, this.shard)), options)
  }

  readonly fail = (error: E, options?: SubmitOptions): Effect.Effect<void, TaskGroupError> => {
    const { error: { encode }, tasks } = this.#group
    return this.#end(false, encode(error, waiting.errorOf(tasks.place.name, this.shard)), options)
  }

  #refused(): Effect.Effect<never, TaskGroupError> {
    const { lease, shard } = this
    const { about } = this.#group.tasks
    const reason = lease.loss === undefined
      ? new SubmitRefused({ ...about, shard, token: lease.token })
      : lease.lossError()
    return Effect.fail(fail(reason))
  }

  #end(
    fine: boolean,
    encoded: Effect.Effect<string, InvalidPayload>,
    options: SubmitOptions | undefined
  ): Effect.Effect<void, TaskGroupError> {
    return Effect.flatMap(Effect.mapError(encoded, fail), (value) => {
      if (this.#submitted || this.lease.loss !== undefined) return this.#refused()
      const submitted = this.#group.tasks.submit(this.#registration, fine, value, options?.publish)
      this.#submitted = true
      // After a failure or an interruption, the same can be submitted again.
      const settled = Effect.onExit(submitted, (exit) =>
        Effect.sync(() => {
          if (Exit.isFailure(exit)) this.#submitted = false
        }))
      return Effect.matchEffect(settled, {
        onFailure: ({ reason }) => Effect.fail(fail(reason)),
        onSuccess: (accepted) => accepted ? Effect.void : this.#refused()
      })
    })
  }
}

class TaskGroupImpl<A, E> implements TaskGroup<A, E>, waiting.Group<A, E> {
  readonly "~lockstep/TaskGroup" = "~lockstep/TaskGroup" as const
  readonly name: string
  readonly tasks: Tasks
  readonly result: Payload<A>
  readonly error: Payload<E>

  constructor(tasks: Tasks, options: Options<A, E>) {
    showAs(this, { _id: "lockstep/TaskGroup", name: tasks.place.name, namespace: tasks.place.namespace })
    this.name = tasks.place.name
    this.tasks = tasks
    this.result = payload(options.result, tasks.place)
    this.error = payload(options.error ?? (Schema.String as unknown as Schema.Codec<E>), tasks.place)
  }

  #spanned<B, E2, R>(self: Effect.Effect<B, E2, R>, verb: string): Effect.Effect<B, E2, R> {
    return spanning(self, `lockstep.TaskGroup.${verb}`, "taskGroup", this.name)
  }

  /** `done` is given the result of a shard that has one. */
  #acquiring(
    shard: string,
    options: RunOptions | undefined,
    done: (result: unknown) => Effect.Effect<undefined, TaskGroupError>
  ): acquiring.Acquire<TaskGroupError> {
    checkName(shard, "shard")
    const { tasks } = this
    return {
      place: tasks.place,
      verb: "taskGroup.register",
      args: tasks.registering(shard),
      member: tasks.member,
      question: true,
      options,
      fail,
      refuse: (refusal) => {
        switch (refusal[0]) {
          case "taken":
            return Effect.fail(fail(new ShardTaken({ ...tasks.about, shard })))
          case "done":
            return done(refusal[1])
          case "ended":
            return Effect.fail(fail(tasks.superseded(refusal[1])))
          default:
            return Effect.fail(fail(new GroupGone(tasks.about)))
        }
      }
    }
  }

  #register(hold: Hold, shard: string): TaskImpl<A, E> {
    return new TaskImpl(this, this.tasks.registered(hold, shard))
  }

  readonly register = (
    shard: string,
    options?: RunOptions | undefined
  ): Effect.Effect<Task<A, E>, TaskGroupError, Scope.Scope> =>
    this.#spanned(
      Effect.suspend(() => {
        const refuse = () => Effect.fail(fail(new ShardDone({ ...this.tasks.about, shard })))
        return Effect.map(
          acquiring.acquireScoped(this.#acquiring(shard, options, refuse)),
          (hold) => this.#register(hold!, shard)
        )
      }),
      "register"
    )

  readonly run = ((shard: string, first?: AnyEffect<A, E> | RunOptions, options?: RunOptions) => {
    const run = (effect: AnyEffect<A, E>, options: RunOptions | undefined) =>
      this.#spanned(Effect.suspend(() => this.#run(shard, effect, options)), "run")
    return Effect.isEffect(first) ? run(first, options) : (effect: AnyEffect<A, E>) => run(effect, first)
  }) as TaskGroup<A, E>["run"]

  #run<B extends A, E2 extends E, R>(
    shard: string,
    effect: Effect.Effect<B, E2, R>,
    options: RunOptions | undefined
  ): Effect.Effect<A, E2 | TaskGroupError, R> {
    const { place } = this.tasks
    let former: A
    const decode = (result: unknown) =>
      Effect.map(
        Effect.mapError(this.result.decode(result, waiting.resultOf(this.name, shard)), fail),
        (result) => void (former = result)
      )
    const registering = this.#acquiring(shard, options, decode)
    const maxHold = acquiring.maxHoldOf(place, options)
    const limited = maxHold === undefined ? undefined : { place, maxHold }
    return Effect.uninterruptibleMask((restore) =>
      Effect.flatMap(acquiring.acquire(registering, restore), (hold) => {
        if (hold === undefined) return Effect.succeed(former)
        const ran = Effect.suspend(() => {
          const task = this.#register(hold, shard)
          return Effect.flatMap(
            Effect.exit(protect(effect, hold, restore, fail, limited)),
            (exit) => this.#submit(task, exit, restore)
          )
        })
        return Effect.onExit(ran, () => acquiring.release(hold))
      })
    )
  }

  #submit<B extends A, E2 extends E>(
    task: TaskImpl<A, E>,
    exit: Exit.Exit<B, E2 | TaskGroupError>,
    restore: acquiring.Restore
  ): Effect.Effect<B, E2 | TaskGroupError> {
    if (Exit.isSuccess(exit)) return Effect.andThen(restore(task.submit(exit.value)), exit)
    if (task.lease.loss !== undefined) return exit
    const error = Exit.findErrorOption(exit) as Option.Option<E2>
    return Option.isSome(error) ? Effect.andThen(restore(task.fail(error.value)), exit) : exit
  }

  readonly awaitAll = (
    options?: AwaitOptions | undefined
  ): Effect.Effect<ReadonlyMap<string, A>, TaskGroupError<E>> =>
    this.#spanned(
      Effect.suspend(() => {
        const { place } = this.tasks
        const onWorkerLost = oneOf(options?.onWorkerLost ?? "fail", "onWorkerLost", ["fail", "wait"])
        const all = waiting.awaitAll(this, onWorkerLost === "wait" ? ["failed"] : ["failed", "lost"])
        const wait = acquiring.waitOf(place, options)
        return wait === undefined ? all : acquiring.within(all, place, wait, fail<E>)
      }),
      "awaitAll"
    )

  get changes(): Stream.Stream<Progress> {
    return Stream.map(waiting.changesOf(this.tasks), progressOf)
  }

  get #gone(): Effect.Effect<never, TaskGroupError> {
    return Effect.fail(fail(new GroupGone(this.tasks.about)))
  }

  get snapshot(): Effect.Effect<Progress, TaskGroupError> {
    return Effect.flatMap(
      waiting.ownPage(this.tasks, 1, ""),
      (page) => page === undefined ? this.#gone : Effect.succeed(progressOf(page.state))
    )
  }

  get shards(): Effect.Effect<ReadonlyArray<Shard>, TaskGroupError> {
    return Effect.map(waiting.shardsOf(this.tasks, allStatuses), (shards) =>
      shards.map(([shard, status, , about]) => ({
        shard,
        status,
        worker: about === null ? undefined : processOf(about) satisfies Process
      })))
  }

  get results(): Effect.Effect<ReadonlyMap<string, A>, TaskGroupError> {
    return Effect.flatMap(
      waiting.shardsOf(this.tasks, ["done"]),
      (shards) => waiting.resultsOf(this.name, this.result, shards)
    )
  }

  get reset(): Effect.Effect<void, TaskGroupError> {
    return Effect.matchEffect(this.tasks.reset, {
      onFailure: ({ reason }) => Effect.fail(fail(reason)),
      onSuccess: (reply) => {
        if (reply[0] === "reset") return Effect.void
        return reply[0] === "ended" ? Effect.fail(fail(this.tasks.superseded(reply[1]))) : this.#gone
      }
    })
  }
}

const mostShards = 2 ** 31 - 1

/**
 * Creates the group, or joins it. It stays open with the scope. Fails with `ShardsMismatch` when other processes have it
 * open with another number of shards.
 *
 * @category constructors
 * @since 0.1.0
 */
export const make = <A, E = string>(
  options: Options<A, E> & { readonly name: string }
): Effect.Effect<TaskGroup<A, E>, TaskGroupError, Coordinator | Scope.Scope> =>
  Effect.flatMap(Coordinator, (coordinator) => {
    const { fresh = false, lease, name, onMismatch = "fail", run, shards, timeToLive = "1 hour" } = options
    if (shards !== undefined && !(Number.isInteger(shards) && shards >= 1 && shards <= mostShards)) {
      throw new RangeError(`shards must be a whole number from 1 to ${mostShards}`)
    }
    if (run !== undefined) checkName(run, "run")
    const tasks = new Tasks(placeOf(spaceOf(coordinator), "taskGroup", name, "name", lease), {
      shards: shards ?? 0,
      onMismatch: oneOf(onMismatch, "onMismatch", mismatchPolicies),
      timeToLive: millis(timeToLive, "timeToLive"),
      run: run ?? "",
      fresh: flag(fresh, "fresh")
    })
    return Effect.flatMap(tasks.join(fail), (existing) =>
      existing === undefined
        ? Effect.succeed(new TaskGroupImpl(tasks, options))
        : Effect.fail(fail(new ShardsMismatch({ ...tasks.about, shards: shards!, existing }))))
  })

/**
 * The class that `Service` makes.
 *
 * @category models
 * @since 0.1.0
 */
export interface ServiceClass<in out Self, in out Name extends string, in out A, in out E>
  extends AnyServiceClass<Self, `lockstep/TaskGroup/${Name}`, TaskGroup<A, E>, TaskGroupError, Coordinator>
{}

/**
 * A group as a typed service: `class Import extends TaskGroup.Service<Import>()("import", { result: Schema.Number }) {}`,
 * with `Import.layer`.
 *
 * @category constructors
 * @since 0.1.0
 */
export const Service =
  <Self>() =>
  <const Name extends string, A, E = string>(name: Name, options: Options<A, E>): ServiceClass<Self, Name, A, E> =>
    service<Self, "TaskGroup", Name, TaskGroup<A, E>, TaskGroupError, Coordinator | Scope.Scope>(
      "TaskGroup",
      name,
      make({ ...options, name })
    )
