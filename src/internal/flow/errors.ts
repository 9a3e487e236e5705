/** The errors of flows. */

import * as Schema from "effect/Schema"
import { coordinatorReasons } from "../actor/errors.ts"
import { WaitTimeout } from "../hold/loss.ts"
import { InvalidPayload } from "../hold/payload.ts"
import { aboutRun, becauseOf, run } from "./telling.ts"

const about = aboutRun("flow")

/**
 * A node has failed, and no edge handles that. `outcome` is that of its job, as in `Queue.JobFailed`. `error` is the error of its
 * handler, as far as the `error` schema of its queue describes that, or else a text.
 *
 * @category errors
 * @since 0.1.0
 */
export class NodeFailed extends Schema.Error<NodeFailed>("lockstep/Flow/NodeFailed")({
  _tag: Schema.tag("NodeFailed"),
  ...run,
  node: Schema.String,
  outcome: Schema.String,
  error: Schema.Unknown
}) {
  override get message(): string {
    return `Node ${JSON.stringify(this.node)} of ${about(this)} has failed (${this.outcome})${becauseOf(this.error)}`
  }
}

/**
 * A node that the result of the flow is made of was skipped, or has failed where an edge handles that.
 *
 * @category errors
 * @since 0.1.0
 */
export class NodeSkipped extends Schema.Error<NodeSkipped>("lockstep/Flow/NodeSkipped")({
  _tag: Schema.tag("NodeSkipped"),
  ...run,
  node: Schema.String
}) {
  override get message(): string {
    return `Node ${JSON.stringify(this.node)} of ${about(this)} has no result, because a node before it has failed: ` +
      `return nodes that run in any case.`
  }
}

/**
 * The run was cancelled.
 *
 * @category errors
 * @since 0.1.0
 */
export class FlowCancelled extends Schema.Error<FlowCancelled>("lockstep/Flow/FlowCancelled")({
  _tag: Schema.tag("FlowCancelled"),
  ...run
}) {
  override get message(): string {
    return `The ${about(this)} was cancelled: start it again, or go on with \`retry\`.`
  }
}

/**
 * The run was not over before its deadline.
 *
 * @category errors
 * @since 0.1.0
 */
export class FlowExpired extends Schema.Error<FlowExpired>("lockstep/Flow/FlowExpired")({
  _tag: Schema.tag("FlowExpired"),
  ...run
}) {
  override get message(): string {
    return `The ${about(this)} was not over before its \`deadline\`: set a longer one, or go on with \`retry\`.`
  }
}

/**
 * There is no such run, or not any more.
 *
 * @category errors
 * @since 0.1.0
 */
export class RunUnknown extends Schema.Error<RunUnknown>("lockstep/Flow/RunUnknown")({
  _tag: Schema.tag("RunUnknown"),
  ...run
}) {
  override get message(): string {
    return `The ${about(this)} is not known: it was never started, has ended longer ago than its \`retention\`, ` +
      `or Redis has lost its data. Start it again if it is still needed.`
  }
}

/**
 * A run that is to be replayed has no such node.
 *
 * @category errors
 * @since 0.1.0
 */
export class NodeUnknown extends Schema.Error<NodeUnknown>("lockstep/Flow/NodeUnknown")({
  _tag: Schema.tag("NodeUnknown"),
  ...run,
  node: Schema.String
}) {
  override get message(): string {
    return `The ${about(this)} has no node ${JSON.stringify(this.node)}: use a name that its \`nodes\` show.`
  }
}

/**
 * There is a run with that id already, which was started with another input.
 *
 * @category errors
 * @since 0.1.0
 */
export class RunMismatch extends Schema.Error<RunMismatch>("lockstep/Flow/RunMismatch")({
  _tag: Schema.tag("RunMismatch"),
  ...run
}) {
  override get message(): string {
    return `The ${about(this)} was started with another input: use another \`id\`.`
  }
}

/**
 * @category errors
 * @since 0.1.0
 */
export class FlowError extends Schema.Error<FlowError>("lockstep/Flow/FlowError")({
  _tag: Schema.tag("FlowError"),
  reason: Schema.Union([
    NodeFailed,
    NodeSkipped,
    NodeUnknown,
    FlowCancelled,
    FlowExpired,
    RunUnknown,
    RunMismatch,
    InvalidPayload,
    WaitTimeout,
    ...coordinatorReasons
  ])
}) {
  override get message(): string {
    return this.reason.message
  }
}

export const fail = (reason: FlowError["reason"]): FlowError => new FlowError({ reason })
