/** Takes one job into a scope: how that ends decides what becomes of the job. */

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
import type { Codec } from "../work/codec.ts"
import { handlingOf, type Policy, type Results } from "./handling.ts"
import { Job } from "./job.ts"
import { mostOverrun } from "./pool.ts"
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
  /** In milliseconds; undefined for ever. */
  readonly wait: number | undefined
  readonly closed: () => E
  readonly fail: (error: CoordinatorReason | WaitTimeout) => E
}

// Redis is told the outcome of a scope before the worker leaves.
const patience = 60_000

export const take = <A, S, E>(
  { closed, fail, payload, places, policy, results, wait }: Taking<A, E>
): Effect.Effect<Option.Option<Taken<A, S>>, E, Scope.Scope> =>
  Effect.uninterruptibleMask((restore) =>
    Effect.gen(function*() {
      const scope = yield* Effect.scope
      const own = yield* Scope.make()
      const found = Deferred.makeUnsafe<Taken<A, S>, E>()
      const over = Deferred.makeUnsafe<unknown, unknown>()
      const lost = Deferred.makeUnsafe<void>()
      let value: S | undefined
      const attempt = (payload: A): Effect.Effect<unknown, unknown, Job> =>
        Effect.flatMap(Job, (job) => {
          worker.halt()
          const result = (given: S) => Effect.sync(() => void (value = given))
          Deferred.doneUnsafe(found, Effect.succeed({ payload, job, lost: Deferred.await(lost), result }))
          return Effect.onInterrupt(Deferred.await(over), () => Deferred.succeed(lost, undefined))
        })
      const worker = crewOf(
        {
          context: Context.empty() as Context.Context<Job>,
          handling: handlingOf(payload, results, attempt, policy),
          overrun: mostOverrun
        },
        places,
        1
      )
      const leave = (grace: number) => Effect.andThen(worker.stop(grace), Scope.close(own, Exit.void))
      const joined = Scope.provide(
        worker.work(() => Deferred.doneUnsafe(found, Effect.fail(closed())), fail),
        own
      )
      const waited = Effect.andThen(
        joined,
        wait === undefined
          ? Effect.asSome(Deferred.await(found))
          : Effect.timeoutOption(Deferred.await(found), Duration.millis(wait))
      )
      const taken = yield* Effect.onExit(
        restore(waited),
        (exit) => Exit.isSuccess(exit) && Option.isSome(exit.value) ? Effect.void : leave(0)
      )
      if (Option.isNone(taken)) return taken
      yield* Scope.addFinalizerExit(scope, (exit) => {
        // It goes back, and that is no attempt.
        if (Exit.isFailure(exit) && Cause.hasInterruptsOnly(exit.cause)) return leave(0)
        Deferred.doneUnsafe(over, Exit.isSuccess(exit) ? Effect.succeed(value) : exit)
        return leave(patience)
      })
      return taken
    })
  )
