/** Takes jobs, into a scope or for an effect: how that ends decides what becomes of them. */

import * as Cause from "effect/Cause"
import * as Context from "effect/Context"
import * as Deferred from "effect/Deferred"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Option from "effect/Option"
import * as Scope from "effect/Scope"
import type { CoordinatorReason } from "../actor/errors.ts"
import type { WaitTimeout } from "../hold/loss.ts"
import type { Place } from "../hold/place.ts"
import { lostWith } from "../hold/protect.ts"
import type { Codec } from "../work/codec.ts"
import type { Handling } from "./attempts.ts"
import { decisionOf } from "./deciding.ts"
import { fail, JobLost, type JobTimeout, type QueueError } from "./errors.ts"
import { handlingOf, type Policy, type Results, Unfit } from "./handling.ts"
import { Job, type Task } from "./job.ts"
import { mostOverrun } from "./pool.ts"
import type { Deque } from "./stealing.ts"
import { crewOf } from "./worker.ts"

/** A job that was taken, until its scope is closed. */
export interface Taken<out A, in S> {
  readonly payload: A
  readonly job: Context.Service.Shape<typeof Job>
  /** Ends when the session is lost, or the job is cancelled: another process may have it then. */
  readonly lost: Effect.Effect<void>
  /** Sets its result, for jobs whose outcome is kept. */
  readonly result: (value: S) => Effect.Effect<void>
}

export interface Taking<A, E> {
  /** Of all shards. */
  readonly places: ReadonlyArray<Place>
  readonly payload: Codec<A>
  readonly results: Results
  readonly policy: Policy<A, any>
  readonly deque: Deque | undefined
  /** In milliseconds, perhaps endless; undefined for as long as there is no job. */
  readonly wait: number | undefined
  readonly closed: () => E
  readonly fail: (error: CoordinatorReason | WaitTimeout) => E
}

// The worker reports the outcomes of jobs to Redis before it leaves.
const patience = 60_000

/** A worker for a while. `waited` ends when `found` does, or when the time to wait is over. */
const taker = <A, R, E>(
  { closed, deque, fail, places, wait }: Taking<A, E>,
  work: {
    readonly context: Context.Context<R>
    readonly handling: Handling<R>
    readonly overrun: number
    readonly lends?: boolean
  },
  max: number
) => {
  const found = Deferred.makeUnsafe<void, E>()
  const own = Scope.makeUnsafe()
  const crew = crewOf({ ...work, deque }, places, max)
  const joined = Scope.provide(
    crew.work(() => Deferred.doneUnsafe(found, Effect.fail(closed())), fail),
    own
  )
  const waited = Effect.andThen(
    joined,
    wait === undefined
      ? Deferred.await(found)
      : Effect.asVoid(Effect.timeoutOption(Deferred.await(found), Duration.millis(wait)))
  )
  const leave = (grace: number) => Effect.andThen(crew.stop(grace), Scope.close(own, Exit.void))
  return { crew, found, waited, leave }
}

/** Up to `max` jobs: as soon as there are so many, or the time to wait is over; without one, as soon as there are any. */
export const take = <A, S, E>(
  taking: Taking<A, E>,
  max: number
): Effect.Effect<ReadonlyArray<Taken<A, S>>, E, Scope.Scope> =>
  Effect.uninterruptibleMask((restore) =>
    Effect.gen(function*() {
      const { payload, policy, results, wait } = taking
      const scope = yield* Effect.scope
      const over = Deferred.makeUnsafe<void, unknown>()
      // A job that is lost before the answer is not taken.
      let open = true
      const enough = () => {
        open = false
        Deferred.doneUnsafe(found, Effect.void)
      }
      const jobs = new Map<Taken<A, S>["job"], Taken<A, S>>()
      const attempt = (payload: A): Effect.Effect<unknown, unknown, Job> =>
        Effect.flatMap(Job, (job) => {
          const lost = Deferred.makeUnsafe<void>()
          let value: S | undefined
          const result = (given: S) => Effect.sync(() => void (value = given))
          jobs.set(job, { payload, job, lost: Deferred.await(lost), result })
          if (jobs.size === max) {
            crew.halt()
            enough()
          }
          const gone = Effect.suspend(() => {
            if (open) jobs.delete(job)
            return Deferred.succeed(lost, undefined)
          })
          return Effect.onInterrupt(Effect.map(Deferred.await(over), () => value), () => gone)
        })
      // No timeout: nothing would interrupt the scope, while another process is given the job.
      const { attempt: handled, judge } = handlingOf(payload, results, attempt, policy)
      const { crew, found, leave, waited } = taker(taking, {
        context: Context.empty() as Context.Context<Job>,
        handling: { attempt: handled, judge },
        overrun: mostOverrun,
        lends: true
      }, max)
      const off = crew.listen(() => {
        if (wait === undefined && jobs.size > 0) enough()
      })
      const taken = yield* Effect.map(Effect.exit(restore(waited)), (exit) => {
        off()
        open = false
        // Jobs that are on their way return to the queue.
        if (jobs.size < max) crew.retire()
        return Exit.map(exit, () => [...jobs.values()])
      })
      if (Exit.isFailure(taken) || taken.value.length === 0) {
        yield* leave(0)
        return yield* taken
      }
      yield* Scope.addFinalizerExit(scope, (exit) => {
        // They return to the queue, and that is no attempt.
        if (Exit.isFailure(exit) && Cause.hasInterruptsOnly(exit.cause)) return leave(0)
        Deferred.doneUnsafe(over, Exit.asVoid(exit))
        return leave(patience)
      })
      return taken.value
    })
  )

/**
 * Runs the effect with one job, as a worker runs its handler. `None`: no job has come in time, or the effect has snoozed or discarded it.
 */
export const withJob = <A, B, E, R>(
  use: (payload: A) => Effect.Effect<B, E, R>,
  taking: Taking<A, QueueError>,
  overrun: number
): Effect.Effect<Option.Option<B>, E | JobTimeout | QueueError, Exclude<R, Job>> =>
  Effect.uninterruptibleMask((restore) =>
    Effect.gen(function*() {
      const { payload, policy, results } = taking
      const context = (yield* Effect.context<Exclude<R, Job>>()) as Context.Context<R | Job>
      const ended = Deferred.makeUnsafe<Exit.Exit<unknown, E>>()
      let begun = undefined as Task | undefined
      let value: B
      const handler = (payload: A): Effect.Effect<B, E, R | Job> =>
        Effect.flatMap(Job, (job) => {
          begun = job as Task
          crew.halt()
          Deferred.doneUnsafe(found, Effect.void)
          return Effect.map(use(payload), (given) => value = given)
        })
      const { attempt, ...deciding } = handlingOf(payload, results, handler, policy)
      // A job whose payload does not fit is not the one that is taken.
      const told = (task: Task) => (exit: Exit.Exit<unknown, unknown>) =>
        Effect.sync(() => {
          if (begun === task) Deferred.doneUnsafe(ended, Effect.succeed(exit as Exit.Exit<unknown, E>))
        })
      const { crew, found, leave, waited } = taker(taking, {
        context,
        handling: { ...deciding, attempt: (task) => Effect.onExit(attempt(task), told(task)) },
        overrun
      }, 1)
      const waiting = yield* Effect.map(Effect.exit(restore(waited)), (exit) => {
        // A job that is on its way returns to the queue.
        if (begun === undefined) crew.retire()
        return exit
      })
      if (begun === undefined) {
        yield* leave(0)
        return yield* Exit.map(waiting, () => Option.none<B>())
      }
      const exit = yield* Effect.onInterrupt(
        restore(Deferred.await(ended)),
        () => Effect.andThen(leave(0), Deferred.await(ended))
      )
      yield* leave(patience)
      return yield* outcomeOf(begun, exit, () => value, policy.namespace)
    })
  )

/** The outcome of an effect, once its worker has decided about the job. */
const outcomeOf = <B, E>(
  task: Task,
  exit: Exit.Exit<unknown, E>,
  value: () => B,
  namespace: string
): Exit.Exit<Option.Option<B>, E | JobTimeout | QueueError> => {
  if (task.over) return lostWith(fail(new JobLost({ name: task.queue, namespace, id: task.id })), exit)
  // One that ignored its interruption has failed by then, however it ends.
  if (Exit.isSuccess(exit) && !task.replaced) return Exit.succeed(Option.some(value()))
  const { cause } = (task.late ?? exit) as Exit.Failure<unknown, E | JobTimeout>
  if (decisionOf(cause) !== undefined) return Exit.succeed(Option.none())
  const error = Cause.squash(cause)
  return error instanceof Unfit ? Exit.fail(fail(error.error)) : Exit.failCause(cause)
}
