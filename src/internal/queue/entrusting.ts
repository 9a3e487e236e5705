/** Follow-ups into other queues: errands of the queue whose jobs they follow. */

import * as Effect from "effect/Effect"
import * as Schedule from "effect/Schedule"
import type * as Scope from "effect/Scope"
import { isAway } from "../actor/errors.ts"
import { type Place, placeIn } from "../hold/place.ts"
import { request } from "../hold/request.ts"
import { workErrands } from "./errands.ts"
import type { Entrusted } from "./job.ts"

/** Delivers the follow-ups of jobs of this place, for as long as the scope is open. */
export const entrusted = ({ channel, name, partition, space }: Place): Effect.Effect<void, never, Scope.Scope> =>
  workErrands({
    space,
    name: `queue:${name}`,
    partitions: [partition.index],
    lease: channel.lease,
    fail: (reason) => reason,
    handler: (body, task) => {
      const [, index, queue, values, shapes] = body as unknown as Entrusted
      const target = placeIn(space, space.kernel.partitionAt(index), "queue", queue, undefined)
      // Of all errands: what their queue is, and which one of these.
      const errand = `${partition.index} ${name} ${task.key}`
      return request(target, "queue.entrust", [values, shapes, errand])
    }
  }).pipe(
    Effect.retry({ schedule: Schedule.spaced("1 second"), while: isAway }),
    Effect.catch((reason) =>
      Effect.sync(() =>
        space.kernel.hooks.log("Error", `this process delivers no follow-ups of queue ${JSON.stringify(name)}`, reason)
      )
    )
  )
