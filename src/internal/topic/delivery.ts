/** A delivery to a group, as users acknowledge it. */

import * as Effect from "effect/Effect"
import type { CoordinatorError } from "../actor/errors.ts"
import { millisFromNone } from "../hold/place.ts"
import type { Delivery } from "./api.ts"
import { fail, type TopicError } from "./errors.ts"
import type { Delivery as GroupDelivery } from "./group.ts"

export const deliveryOf = <A>(delivery: GroupDelivery<A>): Delivery<A> => {
  const told = (tell: (done: (error: CoordinatorError | undefined) => void) => void): Effect.Effect<void, TopicError> =>
    Effect.callback((resume) =>
      tell((error) => resume(error === undefined ? Effect.void : Effect.fail(fail(error.reason))))
    )
  return {
    element: delivery.element,
    acknowledge: told((done) => delivery.acknowledge(done)),
    retry: (delay = 0) =>
      Effect.suspend(() => {
        const after = millisFromNone(delay, "delay")
        return told((done) => delivery.giveBack(after, done))
      }),
    lost: Effect.callback((resume) => Effect.sync(delivery.onLoss(() => resume(Effect.void))))
  }
}
