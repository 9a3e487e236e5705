/** The errors of batches. */

import * as Schema from "effect/Schema"
import { coordinatorReasons } from "../actor/errors.ts"
import { WaitTimeout } from "../hold/loss.ts"
import { InvalidPayload } from "../hold/payload.ts"
import type { FlowError } from "./errors.ts"
import { aboutRun, becauseOf, run } from "./telling.ts"

const about = aboutRun("batch")

/**
 * The run is over, and not all of its jobs were done. `failed` and `cancelled` count them. `job` is the first of them, and `outcome` that
 * of `Queue.JobFailed`. `error` is the error of its handler, as far as the `error` schema of its queue describes that, or else a text.
 *
 * @category errors
 * @since 0.1.0
 */
export class BatchFailed extends Schema.Error<BatchFailed>("lockstep/Batch/BatchFailed")({
  _tag: Schema.tag("BatchFailed"),
  ...run,
  done: Schema.Number,
  failed: Schema.Number,
  cancelled: Schema.Number,
  job: Schema.String,
  outcome: Schema.String,
  error: Schema.Unknown
}) {
  override get message(): string {
    return `The ${
      about(this)
    } has failed: ${this.done} jobs are done, ${this.failed} have failed, ${this.cancelled} were cancelled, ` +
      `first ${JSON.stringify(this.job)} (${this.outcome})${becauseOf(this.error)}`
  }
}

/**
 * The run was cancelled.
 *
 * @category errors
 * @since 0.1.0
 */
export class BatchCancelled extends Schema.Error<BatchCancelled>("lockstep/Batch/BatchCancelled")({
  _tag: Schema.tag("BatchCancelled"),
  ...run
}) {
  override get message(): string {
    return `The ${about(this)} was cancelled: start another one, or go on with \`retry\`.`
  }
}

/**
 * The run was not over before its deadline.
 *
 * @category errors
 * @since 0.1.0
 */
export class BatchExpired extends Schema.Error<BatchExpired>("lockstep/Batch/BatchExpired")({
  _tag: Schema.tag("BatchExpired"),
  ...run
}) {
  override get message(): string {
    return `The ${about(this)} was not over before its \`deadline\`: set a longer one, or go on with \`retry\`.`
  }
}

/**
 * The run takes no more jobs: it was sealed, `size` jobs were added, it stops, or it is over.
 *
 * @category errors
 * @since 0.1.0
 */
export class BatchSealed extends Schema.Error<BatchSealed>("lockstep/Batch/BatchSealed")({
  _tag: Schema.tag("BatchSealed"),
  ...run
}) {
  override get message(): string {
    return `The ${about(this)} takes no more jobs, because it is sealed, stops, or is over: add them to another run.`
  }
}

/**
 * There is no such run, or not any more.
 *
 * @category errors
 * @since 0.1.0
 */
export class BatchUnknown extends Schema.Error<BatchUnknown>("lockstep/Batch/BatchUnknown")({
  _tag: Schema.tag("BatchUnknown"),
  ...run
}) {
  override get message(): string {
    return `The ${about(this)} is not known: it was never started, has ended longer ago than its \`retention\`, ` +
      `or Redis has lost its data. Start it again if it is still needed.`
  }
}

/**
 * There is a run with that id already, which was started with another size.
 *
 * @category errors
 * @since 0.1.0
 */
export class BatchMismatch extends Schema.Error<BatchMismatch>("lockstep/Batch/BatchMismatch")({
  _tag: Schema.tag("BatchMismatch"),
  ...run
}) {
  override get message(): string {
    return `The ${about(this)} was started with another \`size\`: use the same, or another \`id\`.`
  }
}

/**
 * @category errors
 * @since 0.1.0
 */
export class BatchError extends Schema.Error<BatchError>("lockstep/Batch/BatchError")({
  _tag: Schema.tag("BatchError"),
  reason: Schema.Union([
    BatchFailed,
    BatchCancelled,
    BatchExpired,
    BatchSealed,
    BatchUnknown,
    BatchMismatch,
    InvalidPayload,
    WaitTimeout,
    ...coordinatorReasons
  ])
}) {
  override get message(): string {
    return this.reason.message
  }
}

export const failBatch = (reason: BatchError["reason"]): BatchError => new BatchError({ reason })

/** An error of the flow that a batch is, in the words of batches. Their runs have no other errors of flows. */
export const ofBatch =
  (about: { readonly name: string; readonly namespace: string; readonly run: string }) =>
  ({ reason }: FlowError): BatchError => {
    switch (reason._tag) {
      case "RunUnknown":
        return failBatch(new BatchUnknown(about))
      case "RunMismatch":
        return failBatch(new BatchMismatch(about))
      default:
        return failBatch(reason as BatchError["reason"])
    }
  }
