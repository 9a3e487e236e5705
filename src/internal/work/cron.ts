/** A `Cron` that means the same times for all processes. */

import * as Cron from "effect/Cron"
import * as DateTime from "effect/DateTime"
import * as Option from "effect/Option"

// Processes can be in several time zones, so a calendar without one is in none of theirs.
const utc = DateTime.zoneMakeNamedUnsafe("UTC")

export const zoneOf = ({ tz }: Cron.Cron): DateTime.TimeZone => Option.getOrElse(tz, () => utc)

/** Whether days and weekdays must both match: a `Cron` does not say so by itself. */
export const isAnd = (cron: Cron.Cron): boolean =>
  Cron.equals(cron, Cron.make({ ...cron, tz: Option.getOrUndefined(cron.tz), and: true }))

/** In its own time zone, or else in UTC. Throws when it has no times, such as a 30 February. */
export const cronOf = (cron: Cron.Cron): Cron.Cron => {
  try {
    Cron.next(cron, new Date(0))
  } catch (cause) {
    throw new RangeError("times must be a Cron that has a next time", { cause })
  }
  return Option.isSome(cron.tz) ? cron : Cron.make({ ...cron, tz: zoneOf(cron), and: isAnd(cron) })
}
