/** The errors of queues and jobs. */

import * as Effect from "effect/Effect"
import * as Schema from "effect/Schema"
import { coordinatorReasons } from "../actor/errors.ts"
import { describe, WaitTimeout } from "../hold/loss.ts"
import { InvalidPayload } from "../hold/payload.ts"

/**
 * The reply to an offer was lost with the session, and later ones were stored behind it. The jobs are stored; their ids are
 * not known here.
 *
 * @category errors
 * @since 0.1.0
 */
export class OfferUncertain extends Schema.Error<OfferUncertain>("lockstep/Queue/OfferUncertain")({
  _tag: Schema.tag("OfferUncertain"),
  name: Schema.String,
  namespace: Schema.String
}) {
  override get message(): string {
    return `The ids of jobs that ${
      describe("queue", this.name, this.namespace)
    } has stored were lost with the session: ` +
      `do not offer them again, or give them an \`id\`.`
  }
}

/**
 * As many jobs wait as the queue's `limits.length` allows, so the new job was not stored. Of the jobs of `offerAll`, `stored` has the
 * jobs that Redis has stored, or found, all the same: `at` is the place among the payloads, from 0 on.
 *
 * @category errors
 * @since 0.1.0
 */
export class QueueFull extends Schema.Error<QueueFull>("lockstep/Queue/QueueFull")({
  _tag: Schema.tag("QueueFull"),
  name: Schema.String,
  namespace: Schema.String,
  stored: Schema.Array(Schema.Struct({ at: Schema.Number, id: Schema.String, duplicate: Schema.Boolean }))
}) {
  override get message(): string {
    const subject = describe("queue", this.name, this.namespace)
    const why = `because ${subject} is full: offer it again later, or raise \`limits.length\`.`
    return this.stored.length === 0
      ? `A job was not stored, ${why}`
      : `A job was not stored, and ${this.stored.length} others of the same call were, ${why}`
  }
}

/**
 * A handler ran for longer than the `timeout` of its job, and was interrupted.
 *
 * @category errors
 * @since 0.1.0
 */
export class JobTimeout extends Schema.Error<JobTimeout>("lockstep/Queue/JobTimeout")({
  _tag: Schema.tag("JobTimeout"),
  name: Schema.String,
  namespace: Schema.String,
  id: Schema.String,
  timeout: Schema.DurationFromMillis
}) {
  override get message(): string {
    return `The handler of job ${this.id} of ${
      describe("queue", this.name, this.namespace)
    } ran for longer than its \`timeout\`: ` +
      `set a longer one, or make it faster.`
  }
}

/**
 * The job of `withJob` was cancelled, or the session under which it was taken is lost: its effect was interrupted, and another process
 * may have the job.
 *
 * @category errors
 * @since 0.1.0
 */
export class JobLost extends Schema.Error<JobLost>("lockstep/Queue/JobLost")({
  _tag: Schema.tag("JobLost"),
  name: Schema.String,
  namespace: Schema.String,
  id: Schema.String
}) {
  override get message(): string {
    return `Job ${this.id} of ${
      describe("queue", this.name, this.namespace)
    } was cancelled, or lost with its session: ` +
      `go on with the next one, as another process may have it by now.`
  }
}

/**
 * A job has no result, and `outcome` says why. `failed`: the last attempt has failed with an error that the queue's `error` schema
 * does not describe. `undecodable`: the payload does not fit the schema of the worker. `crashed`: too many of its workers have died.
 * `discarded`: its handler has decided so. `cancelled`, `dropped` and `expired`: it was removed. `skipped`: a job that it was to run
 * after has not succeeded.
 *
 * @category errors
 * @since 0.1.0
 */
export class JobFailed extends Schema.Error<JobFailed>("lockstep/Queue/JobFailed")({
  _tag: Schema.tag("JobFailed"),
  name: Schema.String,
  namespace: Schema.String,
  id: Schema.String,
  outcome: Schema.Literals([
    "failed",
    "undecodable",
    "crashed",
    "cancelled",
    "expired",
    "discarded",
    "dropped",
    "skipped"
  ]),
  error: Schema.String
}) {
  override get message(): string {
    const why = this.error === "" ? "" : `: ${this.error}`
    return `Job ${this.id} of ${describe("queue", this.name, this.namespace)} has no result (${this.outcome})${why}`
  }
}

/**
 * There is no such job, or its outcome is not kept, or not any more.
 *
 * @category errors
 * @since 0.1.0
 */
export class OutcomeUnknown extends Schema.Error<OutcomeUnknown>("lockstep/Queue/OutcomeUnknown")({
  _tag: Schema.tag("OutcomeUnknown"),
  name: Schema.String,
  namespace: Schema.String,
  id: Schema.String
}) {
  override get message(): string {
    return `The outcome of job ${this.id} of ${
      describe("queue", this.name, this.namespace)
    } is not known: offer it with \`result\`, and ask ` +
      `within the queue's \`retention\`.`
  }
}

/**
 * The queue has another number of shards, and jobs, dead letters, schedules, or processes that have it open.
 *
 * @category errors
 * @since 0.1.0
 */
export class ShardsMismatch extends Schema.Error<ShardsMismatch>("lockstep/Queue/ShardsMismatch")({
  _tag: Schema.tag("ShardsMismatch"),
  name: Schema.String,
  namespace: Schema.String,
  /** How many shards the queue has. */
  shards: Schema.Number,
  expected: Schema.Number
}) {
  override get message(): string {
    return `The number of shards of ${
      describe("queue", this.name, this.namespace)
    } is ${this.shards}, and this process was told ${this.expected}: say ${this.shards} or nothing, or change it while the ` +
      `queue is empty and no process has it open.`
  }
}

/**
 * The scope in which this process has opened the queue is closed: offers and waits need it.
 *
 * @category errors
 * @since 0.1.0
 */
export class QueueClosed extends Schema.Error<QueueClosed>("lockstep/Queue/QueueClosed")({
  _tag: Schema.tag("QueueClosed"),
  name: Schema.String,
  namespace: Schema.String
}) {
  override get message(): string {
    return `The scope of ${describe("queue", this.name, this.namespace)} is closed in this process: ` +
      `keep it open for as long as the queue is used.`
  }
}

/**
 * @category errors
 * @since 0.1.0
 */
export class QueueError extends Schema.Error<QueueError>("lockstep/Queue/QueueError")({
  _tag: Schema.tag("QueueError"),
  reason: Schema.Union([
    ShardsMismatch,
    OfferUncertain,
    QueueClosed,
    QueueFull,
    JobFailed,
    JobLost,
    OutcomeUnknown,
    InvalidPayload,
    WaitTimeout,
    ...coordinatorReasons
  ])
}) {
  override get message(): string {
    return this.reason.message
  }
}

/** An error of the queue, or of the coordinator. */
export interface Failure {
  readonly reason: QueueError["reason"]
}

export const fail = (reason: QueueError["reason"]): QueueError => new QueueError({ reason })

/** As an error of the queue. */
export const failing = <A, R>(self: Effect.Effect<A, Failure, R>): Effect.Effect<A, QueueError, R> =>
  Effect.mapError(self, ({ reason }) => fail(reason))

/** As `failing`. Wrong arguments are defects of the effect. */
export const asked = <A, R>(ask: () => Effect.Effect<A, Failure, R>): Effect.Effect<A, QueueError, R> =>
  failing(Effect.suspend(ask))
