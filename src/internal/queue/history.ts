/** The counts of a queue, minute by minute. */

import * as DateTime from "effect/DateTime"
import * as Duration from "effect/Duration"

/** A minute of a queue; the last one goes on. */
export interface Minute {
  /** When it began, by Redis's clock. */
  readonly time: DateTime.Utc
  /** Jobs that were done, that became dead letters, and that expired. */
  readonly completed: number
  readonly failed: number
  readonly expired: number
  /** Attempts that began. */
  readonly begun: number
  /** How long jobs waited, all together. Divided by `begun`, it is the mean. */
  readonly waited: Duration.Duration
  /** How long jobs were in work, all together. Divided by the length of the minute, it is how many were at a time. */
  readonly ran: Duration.Duration
}

type Row = readonly [
  minute: number,
  completed: number,
  failed: number,
  expired: number,
  begun: number,
  waited: number,
  ran: number,
  ready: number,
  active: number
]

const length = 60_000
const mostMinutes = 60

const nothing: Row = [0, 0, 0, 0, 0, 0, 0, 0, 0]

// Between two rows, jobs only wait and run. The last one is now, so its minute goes on.
const between = (before: Row, row: Row): ReadonlyArray<Minute> => {
  const [, , , , , , , ready, active] = before
  const idle = before === nothing ? 0 : row[0] - before[0] - 1
  const minuteOf = (at: number, counts: ReadonlyArray<number>): Minute => {
    const [completed, failed, expired, begun, waited, ran] = counts.map((count) => Math.max(0, count)) as [
      number,
      number,
      number,
      number,
      number,
      number
    ]
    return {
      time: DateTime.makeUnsafe(at * length),
      completed,
      failed,
      expired,
      begun,
      waited: Duration.millis(waited),
      ran: Duration.millis(ran)
    }
  }
  const quiet = Math.min(idle, mostMinutes)
  const minutes = Array.from(
    { length: quiet },
    (_, at) => minuteOf(row[0] - quiet + at, [0, 0, 0, 0, ready * length, active * length])
  )
  const counts = [1, 2, 3, 4, 5, 6].map((at) => row[at]! - before[at]!)
  counts[4]! -= idle * ready * length
  counts[5]! -= idle * active * length
  return [...minutes, minuteOf(row[0], counts)]
}

export const historyOf = (list: unknown): ReadonlyArray<Minute> => {
  const rows = list as ReadonlyArray<Row>
  // A full list has lost the counts before its first minute, so that minute cannot be computed.
  const first = rows.length > mostMinutes + 1 ? 1 : 0
  return rows.flatMap((row, at) => at < first ? [] : between(rows[at - 1] ?? nothing, row)).slice(-mostMinutes)
}

/** Of all shards together. */
export const historyOfAll = (histories: ReadonlyArray<ReadonlyArray<Minute>>): ReadonlyArray<Minute> => {
  const minutes = new Map<number, Minute>()
  for (const one of histories.flat()) {
    const time = DateTime.toEpochMillis(one.time)
    const { begun, completed, expired, failed, ran, waited } = minutes.get(time) ??
      { begun: 0, completed: 0, expired: 0, failed: 0, ran: Duration.zero, waited: Duration.zero }
    minutes.set(time, {
      time: one.time,
      completed: completed + one.completed,
      failed: failed + one.failed,
      expired: expired + one.expired,
      begun: begun + one.begun,
      waited: Duration.sum(waited, one.waited),
      ran: Duration.sum(ran, one.ran)
    })
  }
  return [...minutes.entries()].sort(([a], [b]) => a - b).map(([, minute]) => minute).slice(-mostMinutes)
}
