/** Why a request to a task group fails. */

import * as Schema from "effect/Schema"
import { coordinatorReasons } from "../actor/errors.ts"
import { describe, LeaseLost, WaitTimeout } from "../hold/loss.ts"
import { InvalidPayload } from "../hold/payload.ts"
import { Superseded } from "../hold/superseded.ts"

interface InGroup {
  readonly name: string
  readonly namespace: string
}

const about = ({ name, namespace }: InGroup): string => describe("taskGroup", name, namespace)
const aboutShard = (reason: InGroup & { readonly shard: string }): string =>
  `shard ${JSON.stringify(reason.shard)} of ${about(reason)}`

/**
 * A living worker has the shard.
 *
 * @category errors
 * @since 0.1.0
 */
export class ShardTaken extends Schema.Error<ShardTaken>("lockstep/TaskGroup/ShardTaken")({
  _tag: Schema.tag("ShardTaken"),
  name: Schema.String,
  namespace: Schema.String,
  shard: Schema.String
}) {
  override get message(): string {
    return `A worker has ${aboutShard(this)} already: ` +
      `register another shard, or this one when \`changes\` shows that it is lost.`
  }
}

/**
 * The shard is done, and has its result.
 *
 * @category errors
 * @since 0.1.0
 */
export class ShardDone extends Schema.Error<ShardDone>("lockstep/TaskGroup/ShardDone")({
  _tag: Schema.tag("ShardDone"),
  name: Schema.String,
  namespace: Schema.String,
  shard: Schema.String
}) {
  override get message(): string {
    return `There is nothing left to do for ${aboutShard(this)}, which is done: ` +
      `reset the group to work on it again.`
  }
}

/**
 * Nothing can be submitted with this registration any more.
 *
 * @category errors
 * @since 0.1.0
 */
export class SubmitRefused extends Schema.Error<SubmitRefused>("lockstep/TaskGroup/SubmitRefused")({
  _tag: Schema.tag("SubmitRefused"),
  name: Schema.String,
  namespace: Schema.String,
  shard: Schema.String,
  token: Schema.Number
}) {
  override get message(): string {
    return `The registration of ${
      aboutShard(this)
    } is over, so nothing was changed (something was submitted with it, ` +
      `its scope was closed, its session expired, or the group began anew): register the shard again.`
  }
}

/**
 * A worker has submitted an error.
 *
 * @category errors
 * @since 0.1.0
 */
export class WorkerFailed<E = unknown> extends Schema.Error<WorkerFailed<any>>("lockstep/TaskGroup/WorkerFailed")({
  _tag: Schema.tag("WorkerFailed"),
  name: Schema.String,
  namespace: Schema.String,
  shard: Schema.String,
  error: Schema.Unknown
}) {
  declare readonly error: E
  override get message(): string {
    return `The worker of ${aboutShard(this)} has failed: see \`error\`, and register the shard again.`
  }
}

/**
 * A worker has ended without submitting anything, or died.
 *
 * @category errors
 * @since 0.1.0
 */
export class WorkerLost extends Schema.Error<WorkerLost>("lockstep/TaskGroup/WorkerLost")({
  _tag: Schema.tag("WorkerLost"),
  name: Schema.String,
  namespace: Schema.String,
  shard: Schema.String
}) {
  override get message(): string {
    return `The worker of ${aboutShard(this)} is gone and has submitted nothing: ` +
      `register the shard again, or wait with \`onWorkerLost: "wait"\`.`
  }
}

/**
 * The group was reset while it was waited for.
 *
 * @category errors
 * @since 0.1.0
 */
export class GroupReset extends Schema.Error<GroupReset>("lockstep/TaskGroup/GroupReset")({
  _tag: Schema.tag("GroupReset"),
  name: Schema.String,
  namespace: Schema.String,
  round: Schema.Number
}) {
  override get message(): string {
    return `Round ${this.round} of ${about(this)} was ended by a reset, and its results are gone: ` +
      `wait again for those of the next round.`
  }
}

/**
 * The group is not open: its scope was closed, or Redis has lost its data a moment ago.
 *
 * @category errors
 * @since 0.1.0
 */
export class GroupGone extends Schema.Error<GroupGone>("lockstep/TaskGroup/GroupGone")({
  _tag: Schema.tag("GroupGone"),
  name: Schema.String,
  namespace: Schema.String
}) {
  override get message(): string {
    return `No process has ${about(this)} open: use it within the scope that made it.`
  }
}

/**
 * The group is open elsewhere with another number of shards.
 *
 * @category errors
 * @since 0.1.0
 */
export class ShardsMismatch extends Schema.Error<ShardsMismatch>("lockstep/TaskGroup/ShardsMismatch")({
  _tag: Schema.tag("ShardsMismatch"),
  name: Schema.String,
  namespace: Schema.String,
  shards: Schema.Number,
  existing: Schema.Number
}) {
  override get message(): string {
    return `${about(this)} is open elsewhere with ${this.existing} shards, not ${this.shards}: ` +
      `use the same number, none, or say with \`onMismatch\` which number is meant.`
  }
}

/**
 * `E` is the error of workers, where that can be the reason.
 *
 * @category errors
 * @since 0.1.0
 */
export class TaskGroupError<E = never> extends Schema.Error<TaskGroupError<any>>("lockstep/TaskGroup/TaskGroupError")({
  _tag: Schema.tag("TaskGroupError"),
  reason: Schema.Union([
    ShardTaken,
    ShardDone,
    SubmitRefused,
    WorkerFailed,
    WorkerLost,
    GroupReset,
    Superseded,
    GroupGone,
    ShardsMismatch,
    InvalidPayload,
    LeaseLost,
    WaitTimeout,
    ...coordinatorReasons
  ])
}) {
  declare readonly reason: Reason<E>
  override get message(): string {
    return this.reason.message
  }
}

type CoordinatorReason = InstanceType<typeof coordinatorReasons[number]>

export type Reason<E = never> =
  | ShardTaken
  | ShardDone
  | SubmitRefused
  | WorkerFailed<E>
  | WorkerLost
  | GroupReset
  | Superseded
  | GroupGone
  | ShardsMismatch
  | InvalidPayload
  | LeaseLost
  | WaitTimeout
  | CoordinatorReason

export const fail = <E = never>(reason: Reason<E>): TaskGroupError<E> =>
  new TaskGroupError({ reason: reason as never }) as TaskGroupError<E>
