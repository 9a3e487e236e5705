/** Connects the kernel's counts with the public metrics. */

import type * as Context from "effect/Context"
import * as Metrics from "../Metrics.ts"
import type { Hooks } from "./actor/hooks.ts"

/** Writes the kernel's counts into the metrics of the context that the coordinator was made in. */
export const kernelMetrics = (context: Context.Context<never>): Hooks["metrics"] => {
  let held = 0
  let published = 0
  let delivered = 0
  return {
    batch: (requests, millis) => {
      Metrics.requests.updateUnsafe(requests, context)
      Metrics.batchSize.updateUnsafe(requests, context)
      Metrics.roundTrip.updateUnsafe(millis, context)
      if (held !== 0) {
        Metrics.holds.modifyUnsafe(held, context)
        held = 0
      }
      if (published !== 0) {
        Metrics.publications.updateUnsafe(published, context)
        published = 0
      }
      if (delivered !== 0) {
        Metrics.deliveries.updateUnsafe(delivered, context)
        delivered = 0
      }
    },
    waiting: () => Metrics.waits.updateUnsafe(1, context),
    waited: (millis) => Metrics.waitTime.updateUnsafe(millis, context),
    timedOut: () => Metrics.timeouts.updateUnsafe(1, context),
    // Counted here and written with the batch: a grant must not cost a look-up.
    granted: () => void held++,
    released: (millis) => {
      held--
      Metrics.holdTime.updateUnsafe(millis, context)
    },
    // Each session of a coordinator ends when it is closed, and most hold nothing then.
    closing: () => Metrics.losses("closed").updateUnsafe(1, context),
    lost: (reason, holds) => {
      if (reason !== "closed") Metrics.losses(reason).updateUnsafe(1, context)
      Metrics.holds.modifyUnsafe(held - holds, context)
      held = 0
    },
    overrun: (holds) => Metrics.overruns.updateUnsafe(holds, context),
    published: (events) => {
      published += events
    },
    delivered: (attempt) => {
      delivered++
      if (attempt > 1) Metrics.redeliveries.updateUnsafe(1, context)
    },
    buried: () => Metrics.deadLetters.updateUnsafe(1, context),
    missed: (events) => Metrics.missedEvents.updateUnsafe(events, context)
  }
}
