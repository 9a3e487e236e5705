/** The errors of topics. */

import * as Effect from "effect/Effect"
import * as Schedule from "effect/Schedule"
import * as Schema from "effect/Schema"
import { coordinatorReasons, isFinal } from "../actor/errors.ts"
import { describe } from "../hold/loss.ts"
import { InvalidPayload } from "../hold/payload.ts"

/**
 * The group exists with the other order: by key, or without. Nothing was joined.
 *
 * @category errors
 * @since 0.1.0
 */
export class OrderMismatch extends Schema.Error<OrderMismatch>("lockstep/Topic/OrderMismatch")({
  _tag: Schema.tag("OrderMismatch"),
  name: Schema.String,
  namespace: Schema.String,
  group: Schema.String
}) {
  override get message(): string {
    return `Group ${JSON.stringify(this.group)} of ${
      describe("topic", this.name, this.namespace)
    } exists with another ` +
      `\`orderBy\`: use the same one, or another group.`
  }
}

/**
 * The topic has as many groups as it can have.
 *
 * @category errors
 * @since 0.1.0
 */
export class TooManyGroups extends Schema.Error<TooManyGroups>("lockstep/Topic/TooManyGroups")({
  _tag: Schema.tag("TooManyGroups"),
  name: Schema.String,
  namespace: Schema.String,
  group: Schema.String
}) {
  override get message(): string {
    return `${describe("topic", this.name, this.namespace)} has 64 groups, so group ${
      JSON.stringify(this.group)
    } cannot ` +
      `be added: forget one that is not used any more.`
  }
}

/**
 * An event was to follow something, which only the first shard can, and its key, or its id without one, belongs to another shard.
 * Nothing was stored.
 *
 * @category errors
 * @since 0.1.0
 */
export class OtherShard extends Schema.Error<OtherShard>("lockstep/Topic/OtherShard")({
  _tag: Schema.tag("OtherShard"),
  name: Schema.String,
  namespace: Schema.String,
  /** The key, or the id of an event without one. */
  key: Schema.String
}) {
  override get message(): string {
    return `An event of ${describe("topic", this.name, this.namespace)} cannot be published with something else, as ` +
      `${JSON.stringify(this.key)} belongs to another shard than the first one: leave key and id out, or use one shard.`
  }
}

/**
 * @category errors
 * @since 0.1.0
 */
export class TopicError extends Schema.Error<TopicError>("lockstep/Topic/TopicError")({
  _tag: Schema.tag("TopicError"),
  reason: Schema.Union([
    OrderMismatch,
    TooManyGroups,
    OtherShard,
    InvalidPayload,
    ...coordinatorReasons
  ])
}) {
  override get message(): string {
    return this.reason.message
  }
}

export const fail = (reason: TopicError["reason"]): TopicError => new TopicError({ reason })

export const failing = <A, R>(
  self: Effect.Effect<A, { readonly reason: TopicError["reason"] }, R>
): Effect.Effect<A, TopicError, R> => Effect.mapError(self, ({ reason }) => fail(reason))

/** Whether it fails in the same way the next time. */
export const isLasting = (reason: { readonly _tag: string }): boolean =>
  isFinal(reason) || reason._tag === "OrderMismatch" || reason._tag === "TooManyGroups"

/** For what no caller waits for. */
export const again = {
  while: ({ reason }: { readonly reason: { readonly _tag: string } }): boolean => !isLasting(reason),
  schedule: Schedule.spaced("1 second")
}
