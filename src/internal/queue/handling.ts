/** Runs a handler on a job, and decides what follows when it fails. */

import * as Cause from "effect/Cause"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Option from "effect/Option"
import * as Schedule from "effect/Schedule"
import type { Log } from "../actor/hooks.ts"
import type { Kernel } from "../actor/kernel.ts"
import { describe } from "../hold/loss.ts"
import type { InvalidPayload } from "../hold/payload.ts"
import { millis, millisOf, scheduleOf, whole } from "../hold/place.ts"
import { receiving } from "../hold/span.ts"
import { prettyOf, shortened } from "../text.ts"
import type { Codec } from "../work/codec.ts"
import { delayAfter } from "../work/patience.ts"
import type { Handling, Verdict } from "./attempts.ts"
import { decisionOf, isOf, Snoozed } from "./deciding.ts"
import { delayBehind, mostStepped } from "./delays.ts"
import { fail, JobFailed, JobTimeout, OutcomeUnknown, type QueueError } from "./errors.ts"
import type { Task } from "./job.ts"
import type { Outcome } from "./outcomes.ts"

/** How what a handler comes to is kept. */
export interface Results {
  readonly success: Codec<any> | undefined
  readonly error: Codec<any> | undefined
}

export interface Policy<A, E> {
  /** Undefined: 5, or for as long as the schedule goes on that was given. */
  readonly attempts: number | undefined
  readonly retry: Retry<A, E> | undefined
  /** In milliseconds. */
  readonly timeout: number | undefined
  readonly log: Log
  readonly namespace: string
}

/** When a job is attempted again, for all jobs or by the payload of each. */
export type Retry<A, E> = Schedule.Schedule<unknown, E> | ((payload: A) => Schedule.Schedule<unknown, E>)

/** A payload or a result does not fit the schema of the queue: another attempt would not change that. */
export class Unfit {
  readonly reason: "failed" | "undecodable"
  readonly error: InvalidPayload

  constructor(reason: "failed" | "undecodable", cause: Cause.Cause<unknown>) {
    this.reason = reason
    this.error = Cause.squash(cause) as InvalidPayload
  }
}

// Unless a number or a schedule was given.
const mostAttempts = 5

const patience = Schedule.exponential("1 second").pipe(
  Schedule.modifyDelay(({ duration }) => Effect.succeed(Duration.min(duration, Duration.hours(1))))
)

const traced = <A, E, R>(self: Effect.Effect<A, E, R>, { attempt, id, queue, trace }: Task) =>
  receiving(
    self,
    "lockstep.Queue.handle",
    { "lockstep.kind": "queue", "lockstep.key": queue, "lockstep.job": id, "lockstep.attempt": attempt },
    trace
  )

const encoded = ({ success }: Results, { added }: Task, value: unknown): Exit.Exit<string, Unfit> => {
  const behind = added === undefined ? "" : `,[${added.join()}]`
  if (success === undefined) return Exit.succeed(`["success",null${behind}]`)
  const exit = success.encode(value)
  return Exit.isSuccess(exit)
    ? Exit.succeed(`["success",${exit.value}${behind}]`)
    : Exit.fail(new Unfit("failed", exit.cause))
}

type Burial = "failed" | "undecodable" | "discarded"

const buried = (
  results: Results,
  task: Task,
  cause: Cause.Cause<unknown>,
  reason: Burial,
  text: string
): Verdict => {
  const message = shortened(text)
  if (!task.isKept) return { tag: "bury", reason, message, outcome: "" }
  const typed = Option.flatMap(
    Cause.findErrorOption(cause),
    (error) =>
      results.error === undefined || reason === "discarded"
        ? Option.none()
        : Exit.getSuccess(results.error.encode(error))
  )
  const outcome = Option.match(typed, {
    onNone: () => JSON.stringify([reason, message]),
    onSome: (error) => `["failure",${error}]`
  })
  return { tag: "bury", reason, message, outcome }
}

export const handlingOf = <A, E, R>(
  { decodeParsed }: Codec<A>,
  results: Results,
  handler: (payload: A) => Effect.Effect<unknown, E, R>,
  policy: Policy<A, E | JobTimeout>
): Handling<R> => ({
  attempt: (task) => {
    const decoded = decodeParsed(task.body)
    if (Exit.isFailure(decoded)) return Effect.fail(new Unfit("undecodable", decoded.cause))
    const handling = Effect.suspend(() => handler(decoded.value))
    const handled = task.isKept ? Effect.flatMap(handling, (value) => encoded(results, task, value)) : handling
    return traced(handled, task)
  },
  limit: (task) => {
    const timeout = task.timeout ?? policy.timeout
    if (timeout === undefined) return undefined
    const { id, queue: name } = task
    return {
      timeout,
      exit: () =>
        Exit.fail(
          new JobTimeout({ name, namespace: policy.namespace, id, timeout: Duration.millis(timeout) })
        ) as Exit.Failure<unknown, unknown>
    }
  },
  judge: (task, { cause }, lasted) => {
    const error = Cause.squash(cause)
    const bury = (reason: Burial, text: string) => buried(results, task, cause, reason, text)
    const decision = decisionOf(cause)
    if (decision instanceof Snoozed) return Effect.succeed({ tag: "retry", delay: decision.delay, attempted: false })
    if (decision !== undefined) return Effect.succeed(bury("discarded", decision.reason))
    if (isOf(error, Unfit)) return Effect.succeed(bury(error.reason, error.error.message))
    const { delays } = task
    const { retry = patience } = policy
    const attempts = task.attempts ?? policy.attempts ??
      (delays !== undefined ? mostStepped : policy.retry === undefined ? mostAttempts : Number.POSITIVE_INFINITY)
    if (task.attempt >= attempts) return Effect.succeed(bury("failed", prettyOf(cause)))
    return Effect.map(
      Effect.suspend(() => {
        if (delays !== undefined) return Effect.succeed(delayBehind(delays, task.attempt))
        // It has been decoded for this attempt.
        const schedule = typeof retry === "function"
          ? retry(Option.getOrThrow(Exit.getSuccess(decodeParsed(task.body))))
          : retry
        return delayAfter(schedule, task.attempt, error as E, lasted)
      }),
      Option.match({
        onNone: () => bury("failed", prettyOf(cause)),
        onSome: (delay) => {
          policy.log(
            "Debug",
            `job ${task.id} of ${describe("queue", task.queue, policy.namespace)} is attempted again`,
            error
          )
          return { tag: "retry", delay: millisOf(delay), attempted: true }
        }
      })
    )
  }
})

/** The outcome of a job, as its caller gets it. */
export const decoded = <S, E>(
  { error: errors, success }: Results,
  about: { readonly name: string; readonly namespace: string; readonly id: string },
  outcome: Outcome
): Effect.Effect<S, E | QueueError> => {
  switch (outcome[0]) {
    case "success":
      return success === undefined
        ? Effect.succeed(undefined as S)
        : Exit.mapError(success.decodeParsed(outcome[1]), fail)
    case "failure": {
      if (errors === undefined) {
        return Effect.fail(fail(new JobFailed({ ...about, outcome: "failed", error: JSON.stringify(outcome[1]) })))
      }
      const error = errors.decodeParsed(outcome[1])
      return Exit.isSuccess(error) ? Effect.fail(error.value) : Effect.failCause(Cause.map(error.cause, fail))
    }
    case "missing":
      return Effect.fail(fail(new OutcomeUnknown(about)))
    default:
      return Effect.fail(fail(new JobFailed({ ...about, outcome: outcome[0], error: outcome[1] ?? "" })))
  }
}

/** How often a job is attempted, when, and for how long, as users say it. */
interface Attempts {
  readonly attempts?: number | undefined
  readonly retry?: Retry<any, any> | undefined
  readonly timeout?: Duration.Input | undefined
}

/** `given` goes first, and then what the queue was opened with. */
export const policyOf = (
  given: Attempts,
  usual: Attempts,
  { hooks: { log }, settings: { namespace } }: Kernel
): Policy<any, any> => {
  const { attempts = usual.attempts, retry = usual.retry, timeout = usual.timeout } = given
  return {
    attempts: attempts === undefined ? undefined : whole(attempts, "attempts", 1000),
    retry: retry === undefined ? undefined : scheduleOf(retry),
    timeout: timeout === undefined ? undefined : millis(timeout, "timeout"),
    log,
    namespace
  }
}
