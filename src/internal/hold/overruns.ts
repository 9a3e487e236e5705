/** The margin is the time that finalizers have before any other session is granted. One that overruns it is reported. */

import type { Office } from "../actor/office.ts"
import { nameOf } from "./claim.ts"
import type { Hold } from "./hold.ts"

// A hold can be lost more than once: when its coordinator closes, and with its session after that.
const reported = new WeakSet<Hold>()

/** The holds have been lost just now. */
export const watchOverruns = (office: Office, margin: number, holds: ReadonlyArray<Hold>): void => {
  if (holds.every((hold) => hold.protecting === 0)) return
  const { hooks, io, isClosed, settings, transport } = office
  const since = io.now()
  void transport.sleep(margin).then(() => {
    // The end of the coordinator ends this pause: every hold has the margin of the coordinator then.
    const passed = Math.min(margin, Math.ceil(io.now() - since))
    if (isClosed() && passed < Math.min(margin, settings.margin)) return
    const late = holds.filter((hold) => hold.protecting > 0 && !reported.has(hold))
    if (late.length === 0) return
    for (const hold of late) reported.add(hold)
    hooks.metrics.overrun(late.length)
    const names = late.slice(0, 3).map(nameOf).join(", ")
    hooks.log("Error", `${late.length} protected programs still ran ${passed} ms after their lease was lost: ${names}`)
  })
}
