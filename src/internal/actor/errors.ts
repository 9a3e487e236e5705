/** The errors of a coordinator, which the errors of primitives have as reasons too. */

import * as Schema from "effect/Schema"
import { about, commandReasons, subject } from "../redis/errors.ts"

/**
 * The namespace belongs to coordinators that speak another protocol or divide it otherwise, and one of them is alive.
 *
 * @category errors
 * @since 0.1.0
 */
export class Incompatible extends Schema.Error<Incompatible>("lockstep/Coordinator/Incompatible")({
  _tag: Schema.tag("Incompatible"),
  namespace: Schema.String,
  protocol: Schema.Number,
  partitions: Schema.Number,
  expectedProtocol: Schema.Number,
  expectedPartitions: Schema.Number
}) {
  override get message(): string {
    return `Namespace ${
      JSON.stringify(this.namespace)
    } is in use with protocol ${this.protocol} and ${this.partitions} ` +
      `partitions, and this coordinator has ${this.expectedProtocol} and ${this.expectedPartitions}: use the same settings, ` +
      `another namespace, or wait until those coordinators are closed.`
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
  pending: Schema.Number,
  ...subject
}) {
  override get message(): string {
    return `A request${about(this)} was not sent because ${this.pending} requests already wait for its partition: ` +
      `lower the load or raise batch.maxPending.`
  }
}

/**
 * The coordinator's scope has been closed.
 *
 * @category errors
 * @since 0.1.0
 */
export class CoordinatorClosed extends Schema.Error<CoordinatorClosed>("lockstep/Coordinator/CoordinatorClosed")({
  _tag: Schema.tag("CoordinatorClosed"),
  namespace: Schema.String
}) {
  override get message(): string {
    return `The coordinator of namespace ${JSON.stringify(this.namespace)} is closed: keep its scope open for longer.`
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
  detail: Schema.String,
  ...subject
}) {
  override get message(): string {
    return `The partition actor failed at ${this.request}${
      about(this)
    } (${this.detail}): its keys hold data that Lockstep did not write.`
  }
}

/** All reasons for which a coordinator cannot do what it is asked. Every error of a primitive has them too. */
export const coordinatorReasons = [Incompatible, Overloaded, CoordinatorClosed, ActorDefect, ...commandReasons] as const

/**
 * The coordinator could not do what it was asked. The reasons are its own, or those of Redis.
 *
 * @category errors
 * @since 0.1.0
 */
export class CoordinatorError extends Schema.Error<CoordinatorError>("lockstep/Coordinator/CoordinatorError")({
  _tag: Schema.tag("CoordinatorError"),
  reason: Schema.Union(coordinatorReasons)
}) {
  override get message(): string {
    return this.reason.message
  }
}

export type CoordinatorReason = CoordinatorError["reason"]

/** Whether Redis was out of reach, by the reason of an error: the same may succeed when it is back. */
export const isAway = ({ _tag }: { readonly _tag: string }): boolean =>
  _tag === "Timeout" || _tag === "ConnectionLost" || _tag === "NotConnected" || _tag === "Unavailable"

/** Whether the same could never succeed, by the reason of an error. */
export const isFinal = ({ _tag }: { readonly _tag: string }): boolean =>
  _tag === "CoordinatorClosed" || _tag === "ActorDefect" || _tag === "Incompatible" || _tag === "RequestTooLarge"
