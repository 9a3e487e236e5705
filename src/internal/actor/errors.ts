import * as Schema from "effect/Schema"
import { RedisError } from "../../Redis.ts"

/**
 * The namespace belongs to coordinators that speak another protocol or divide it otherwise.
 *
 * @category errors
 * @since 0.1.0
 */
export class Incompatible extends Schema.Error<Incompatible>("lockstep/Coordinator/Incompatible")({
  _tag: Schema.tag("Incompatible"),
  protocol: Schema.Number,
  partitions: Schema.Number,
  expectedProtocol: Schema.Number,
  expectedPartitions: Schema.Number
}) {
  override get message(): string {
    return `The namespace is in use with protocol ${this.protocol} and ${this.partitions} partitions, and this ` +
      `coordinator has ${this.expectedProtocol} and ${this.expectedPartitions}: use the same settings or another namespace.`
  }
}

/**
 * More requests wait to be sent than `batch.maxPending` allows. Nothing was sent.
 *
 * @category errors
 * @since 0.1.0
 */
export class Overloaded extends Schema.Error<Overloaded>("lockstep/Coordinator/Overloaded")({
  _tag: Schema.tag("Overloaded"),
  pending: Schema.Number
}) {
  override get message(): string {
    return `${this.pending} requests already wait for one partition: lower the load or raise batch.maxPending.`
  }
}

/**
 * The coordinator's scope has been closed.
 *
 * @category errors
 * @since 0.1.0
 */
export class CoordinatorClosed extends Schema.Error<CoordinatorClosed>("lockstep/Coordinator/CoordinatorClosed")({
  _tag: Schema.tag("CoordinatorClosed")
}) {
  override get message(): string {
    return "The coordinator is closed."
  }
}

/**
 * A partition actor answered what it must not answer: its data was changed by others, or this is a bug in Lockstep.
 *
 * @category errors
 * @since 0.1.0
 */
export class ActorDefect extends Schema.Error<ActorDefect>("lockstep/Coordinator/ActorDefect")({
  _tag: Schema.tag("ActorDefect"),
  request: Schema.String,
  detail: Schema.String
}) {
  override get message(): string {
    return `The partition actor failed at ${this.request} (${this.detail}): its keys hold what Lockstep did not write.`
  }
}

/**
 * The coordinator could not do what was asked. `RedisError` is the reason when Redis could not.
 *
 * @category errors
 * @since 0.1.0
 */
export class CoordinatorError extends Schema.Error<CoordinatorError>("lockstep/Coordinator/CoordinatorError")({
  _tag: Schema.tag("CoordinatorError"),
  reason: Schema.Union([Incompatible, Overloaded, CoordinatorClosed, ActorDefect, RedisError])
}) {
  override get message(): string {
    return this.reason.message
  }
}

/** What the kernel rejects with, as the error that users see. */
export const coordinatorError = (cause: unknown): CoordinatorError =>
  cause instanceof RedisError ? new CoordinatorError({ reason: cause }) : cause as CoordinatorError
