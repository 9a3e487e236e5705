/** The margin is the time that finalizers have before any other session is granted. One that overruns it is reported. */

import type { Office } from "../actor/office.ts"
import { nameOf } from "./claim.ts"
import type { Hold } from "./hold.ts"

/** The holds have been lost just now. */
export const watchOverruns = (office: Office, margin: number, holds: ReadonlyArray<Hold>): void => {
  if (holds.every((hold) => hold.protecting === 0)) return
  const { hooks, isClosed, transport } = office
  void transport.sleep(margin).then(() => {
    const late = holds.filter((hold) => hold.protecting > 0)
    if (late.length === 0 || isClosed()) return
    hooks.metrics.overrun(late.length)
    const names = late.slice(0, 3).map(nameOf).join(", ")
    hooks.log("Error", `${late.length} protected programs still ran ${margin} ms after their lease was lost: ${names}`)
  })
}
