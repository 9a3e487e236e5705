/** The times of a schedule: as JSON, so that any process can compute its next ticks, and the ticks of a calendar. */

import * as Cron from "effect/Cron"
import * as DateTime from "effect/DateTime"
import * as Duration from "effect/Duration"
import * as Option from "effect/Option"
import { millis } from "../hold/place.ts"
import { cronOf, isAnd, zoneOf } from "../work/cron.ts"

/** When jobs of a schedule are offered: at the times of a calendar, or at an interval. */
export type Times = Cron.Cron | Duration.Duration

type Encoded =
  | readonly [tag: "every", millis: number]
  | readonly [
    tag: "cron",
    seconds: ReadonlyArray<number>,
    minutes: ReadonlyArray<number>,
    hours: ReadonlyArray<number>,
    days: ReadonlyArray<number>,
    months: ReadonlyArray<number>,
    weekdays: ReadonlyArray<number>,
    zone: string,
    and: boolean,
    onDstOverlap: Cron.DstOverlapPolicy
  ]

// Each tick is a call to Redis.
const shortest = 100

// Ticks that are given at a time. Rare ones can take long to find, such as a 29 February that is a Monday: of those, only a few.
const [ahead, fewAhead, rare] = [32, 3, 366 * 86_400_000]
// As in lua/QueueSchedules.lua: missed ticks that are made up for, and ticks that a schedule keeps.
const mostMissed = 100
const mostTicks = 256

export const timesOf = (input: Cron.Cron | Duration.Input): Times => {
  if (!Cron.isCron(input)) {
    const every = millis(input, "times")
    if (every < shortest) throw new RangeError(`times must be at least ${shortest} milliseconds apart`)
    return Duration.millis(every)
  }
  const cron = cronOf(input)
  const zone = zoneOf(cron)
  // As text, it has no seconds.
  if (DateTime.isTimeZoneOffset(zone) && zone.offset % 60_000 !== 0) {
    throw new RangeError("times must be in a time zone of whole minutes")
  }
  return decodeTimes(JSON.parse(encodeTimes(cron)))
}

export const everyOf = (times: Times): number => Cron.isCron(times) ? 0 : Duration.toMillis(times)

const sorted = (values: ReadonlySet<number>) => [...values].toSorted((a, b) => a - b)

export const encodeTimes = (times: Times): string => {
  if (!Cron.isCron(times)) return JSON.stringify(["every", Duration.toMillis(times)] satisfies Encoded)
  const { days, hours, minutes, months, seconds, weekdays } = times
  const [s, m, h, d, month, w] = [seconds, minutes, hours, days, months, weekdays].map(sorted) as [
    Array<number>,
    Array<number>,
    Array<number>,
    Array<number>,
    Array<number>,
    Array<number>
  ]
  const zone = DateTime.zoneToString(zoneOf(times))
  const encoded: Encoded = ["cron", s, m, h, d, month, w, zone, isAnd(times), times.onDstOverlap]
  return JSON.stringify(encoded)
}

/** Undefined when this process does not know the time zone. */
export const knownTimes = (json: unknown): Times | undefined => {
  const encoded = json as Encoded
  if (encoded[0] === "every") return Duration.millis(encoded[1])
  const [, seconds, minutes, hours, days, months, weekdays, zone, and, onDstOverlap] = encoded
  const tz = Option.getOrUndefined(DateTime.zoneFromString(zone))
  return tz && Cron.make({ seconds, minutes, hours, days, months, weekdays, tz, and, onDstOverlap })
}

/** Throws when this process does not know the time zone. */
export const decodeTimes = (json: unknown): Times => {
  const times = knownTimes(json)
  if (times === undefined) throw new RangeError(`time zone ${JSON.stringify((json as Encoded)[7])} is not known here`)
  return times
}

const after = (cron: Cron.Cron, time: number): number => Cron.next(cron, new Date(time)).getTime()

/** The ticks behind the last one: the newest missed ticks that may be made up for, and the next ticks. In milliseconds. */
export const ticksOf = (cron: Cron.Cron, last: number, now: number, missed: Missed): ReadonlyArray<number> => {
  let from = now + 1
  for (let back = missed === "all" ? mostMissed : 1; back >= 0 && from > last; back--) {
    from = Cron.prev(cron, new Date(from)).getTime()
  }
  const ticks: Array<number> = []
  for (
    let next = Math.max(from, last), coming = 0;
    ticks.length < mostTicks && coming < (next > now + rare ? fewAhead : ahead);
  ) {
    next = after(cron, next)
    ticks.push(next)
    if (next > now) coming++
  }
  return ticks
}

/** The policy for ticks that were due while no process was alive, or while the queue was paused. */
export type Missed = "once" | "skip" | "all"

// The last time that a date can have.
const last = 8.64e15

/** All ticks from one on, or else behind a time, as far as dates go. In milliseconds. */
export function* runsOf(times: Times, next: number, now: number): Generator<number, void> {
  for (let run = next; run <= last;) {
    if (run > 0) yield run
    run = Cron.isCron(times) ? after(times, run > 0 ? run : now) : run + Duration.toMillis(times)
  }
}
