/** Follow-ups into other queues: errands of the queue whose jobs they follow. */

import * as Effect from "effect/Effect"
import { describe } from "../hold/loss.ts"
import { type Place, placeIn } from "../hold/place.ts"
import { request } from "../hold/request.ts"
import { persevering } from "../work/patience.ts"
import { workErrands } from "./errands.ts"
import type { Entrusted } from "./job.ts"

/** Delivers the follow-ups of jobs of this place, for as long as it runs. */
export const entrusted = ({ channel, name, partition, space }: Place): Effect.Effect<void> => {
  const { log } = space.kernel.hooks
  const what = `the follow-ups of ${describe("queue", name, space.kernel.settings.namespace)}`
  const delivering = workErrands({
    space,
    name: `queue:${name}`,
    partitions: [partition.index],
    lease: channel.lease,
    fail: (reason) => ({ reason }),
    handler: (body, task) => {
      const [, index, queue, values, shapes] = body as unknown as Entrusted
      const target = placeIn(space, space.kernel.partitionAt(index), "queue", queue, undefined)
      // Of all errands: their queue, and which one of these.
      const errand = `${partition.index} ${name} ${task.key}`
      return request(target, "queue.entrust", [values, shapes, errand])
    }
  })
  return persevering(
    Effect.scoped(Effect.andThen(delivering, Effect.never)),
    ({ reason }) => Effect.sync(() => log("Warn", `this process cannot deliver ${what} yet: it tries again`, reason))
  ).pipe(
    Effect.catch(({ reason }) =>
      Effect.sync(() => log("Error", `this process does not deliver ${what}: others may`, reason))
    )
  )
}
