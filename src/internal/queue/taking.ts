/** Takes jobs into a scope: how that ends decides what becomes of them. */

import * as Cause from "effect/Cause"
import * as Context from "effect/Context"
import * as Deferred from "effect/Deferred"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Scope from "effect/Scope"
import type { CoordinatorReason } from "../actor/errors.ts"
import type { WaitTimeout } from "../hold/loss.ts"
import type { Place } from "../hold/place.ts"
import type { Codec } from "../work/codec.ts"
import { handlingOf, type Policy, type Results } from "./handling.ts"
import { Job } from "./job.ts"
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

interface Taking<A, E> {
  /** Of all shards. */
  readonly places: ReadonlyArray<Place>
  readonly payload: Codec<A>
  readonly results: Results
  readonly policy: Policy<any>
  readonly max: number
  readonly deque: Deque | undefined
  /** In milliseconds; undefined for as long as there is none. */
  readonly wait: number | undefined
  readonly closed: () => E
  readonly fail: (error: CoordinatorReason | WaitTimeout) => E
}

// The worker tells Redis the outcome of a scope before it leaves.
const patience = 60_000

/** Up to `max` jobs: as soon as there are so many, or the time to wait is over; without one, as soon as there are any. */
export const take = <A, S, E>(
  { closed, deque, fail, max, payload, places, policy, results, wait }: Taking<A, E>
): Effect.Effect<ReadonlyArray<Taken<A, S>>, E, Scope.Scope> =>
  Effect.uninterruptibleMask((restore) =>
    Effect.gen(function*() {
      const scope = yield* Effect.scope
      const own = yield* Scope.make()
      const found = Deferred.makeUnsafe<void, E>()
      const over = Deferred.makeUnsafe<void, unknown>()
      // A job that is lost before the answer is not taken.
      let open = true
      const enough = (result: Effect.Effect<void, E>) => {
        open = false
        Deferred.doneUnsafe(found, result)
      }
      const jobs = new Map<Taken<A, S>["job"], Taken<A, S>>()
      const attempt = (payload: A): Effect.Effect<unknown, unknown, Job> =>
        Effect.flatMap(Job, (job) => {
          const lost = Deferred.makeUnsafe<void>()
          let value: S | undefined
          const result = (given: S) => Effect.sync(() => void (value = given))
          jobs.set(job, { payload, job, lost: Deferred.await(lost), result })
          if (jobs.size === max) {
            worker.halt()
            enough(Effect.void)
          }
          const gone = Effect.suspend(() => {
            if (open) jobs.delete(job)
            return Deferred.succeed(lost, undefined)
          })
          return Effect.onInterrupt(Effect.map(Deferred.await(over), () => value), () => gone)
        })
      // No timeout: nothing would interrupt the scope, while another process is given the job.
      const { attempt: handled, judge } = handlingOf(payload, results, attempt, policy)
      const worker = crewOf(
        {
          context: Context.empty() as Context.Context<Job>,
          handling: { attempt: handled, judge },
          overrun: mostOverrun,
          lends: true,
          deque
        },
        places,
        max
      )
      const off = worker.listen(() => {
        if (wait === undefined && jobs.size > 0) enough(Effect.void)
      })
      const leave = (grace: number) => Effect.andThen(worker.stop(grace), Scope.close(own, Exit.void))
      const joined = Scope.provide(
        worker.work(() => enough(Effect.fail(closed())), fail),
        own
      )
      const waited = Effect.andThen(
        joined,
        wait === undefined
          ? Deferred.await(found)
          : Effect.asVoid(Effect.timeoutOption(Deferred.await(found), Duration.millis(wait)))
      )
      const taken = yield* Effect.map(Effect.exit(restore(waited)), (exit) => {
        off()
        open = false
        // Jobs that are on their way go back.
        if (jobs.size < max) worker.retire()
        return Exit.map(exit, () => [...jobs.values()])
      })
      if (Exit.isFailure(taken) || taken.value.length === 0) {
        yield* leave(0)
        return yield* taken
      }
      yield* Scope.addFinalizerExit(scope, (exit) => {
        // They go back, and that is no attempt.
        if (Exit.isFailure(exit) && Cause.hasInterruptsOnly(exit.cause)) return leave(0)
        Deferred.doneUnsafe(over, Exit.asVoid(exit))
        return leave(patience)
      })
      return taken.value
    })
  )
