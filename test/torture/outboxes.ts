/**
 * What must be true of what publishes an event in the same step: each write of a ref, release of a lock or result of a task that was
 * made has one event, and no other has any.
 */
import type { Anomaly, Run } from "./checks.ts"
import type { Hold } from "./history.ts"
import { forgot } from "./states.ts"

/** The last event of the topic is that of the present version: both were written in one step. */
const together = (holds: ReadonlyArray<Hold>): ReadonlyArray<Anomaly> =>
  holds.flatMap((hold) =>
    hold.told.flatMap(({ what: [word, , value, event] }): ReadonlyArray<Anomaly> =>
      word !== "beside event" || value === event
        ? []
        : [{ check: "torn", detail: `the event beside ${value} was that of ${event}`, holds: [hold] }]
    )
  )

interface Write {
  readonly hold: Hold
  readonly from: number
  done: number
  refused: boolean
}

const writesOf = (holds: ReadonlyArray<Hold>): ReadonlyMap<string, Write> => {
  const writes = new Map<string, Write>()
  for (const hold of holds) {
    for (const { at, what: [word, , text] } of hold.told) {
      const value = String(text)
      const write = writes.get(value)
      if (word === "writes") writes.set(value, { hold, from: at, done: Number.POSITIVE_INFINITY, refused: false })
      else if (word === "wrote" && write !== undefined) write.done = at
      else if (word === "refused" && write !== undefined) write.refused = true
    }
  }
  return writes
}

/** By those that have read all events of the topic. */
const counted = (holds: ReadonlyArray<Hold>, run: Run): ReadonlyArray<Anomaly> => {
  const writes = writesOf(holds)
  const censuses = holds.filter(({ told }) => told.at(-1)?.what[0] === "counted")
  return censuses.flatMap((census) => {
    const found: Array<Anomaly> = []
    const events = new Map<string, string>()
    const wrong = (check: string, detail: string, { from, hold }: Write) => {
      if (!forgot(run, from, census.ended ?? from)) found.push({ check, detail, holds: [hold, census] })
    }
    for (const { what: [word, , text, id] } of census.told) {
      // A deletion publishes what is there then.
      if (word !== "event" || text === "") continue
      const value = String(text)
      const [write, other] = [writes.get(value), events.get(value)]
      events.set(value, String(id))
      if (write === undefined) found.push({ check: "phantom", detail: `${value} was published`, holds: [census] })
      else if (write.refused) wrong("stored", `${value} was refused, and published`, write)
      else if (other !== undefined) wrong("stored", `${value} was published as ${other} and ${id}`, write)
    }
    for (const [value, write] of writes) {
      if (write.done < census.asked && !events.has(value)) wrong("unpublished", `${value} has no event`, write)
    }
    return found.slice(0, 5)
  })
}

const tokenOf = (value: string): number => Number.parseInt(value, 10)

/**
 * Of those of one id, one was published. Holders release a lock in the order of their tokens, and so are the events, unless Redis has
 * forgotten a holder before its release.
 */
export const released = (holds: ReadonlyArray<Hold>, run: Run): ReadonlyArray<Anomaly> => {
  const ids = new Map<string, string>()
  const since = new Map<string, number>()
  const duplicates: Array<{ readonly at: number; readonly hold: Hold; readonly value: string }> = []
  for (const hold of holds) {
    for (const { at, what: [word, , value, id] } of hold.told) {
      if (word === "writes") {
        ids.set(String(value), String(id))
        since.set(String(value), hold.asked)
      } else if (word === "duplicate") duplicates.push({ at, hold, value: String(value) })
    }
  }
  return holds.filter(({ told }) => told.at(-1)?.what[0] === "counted").flatMap((census) => {
    const values = census.told.flatMap(({ what: [word, , value] }) => word === "event" ? [String(value)] : [])
    const found: Array<Anomaly> = []
    const stored = new Set(values.map((value) => ids.get(value)))
    for (const { at, hold, value } of duplicates) {
      if (values.includes(value)) {
        found.push({ check: "stored", detail: `${value} was a duplicate, and published`, holds: [hold, census] })
      } else if (at < census.asked && !stored.has(ids.get(value)) && !forgot(run, 0, census.ended!)) {
        const detail = `${value} was a duplicate of ${ids.get(value)}, which has no event`
        found.push({ check: "unpublished", detail, holds: [hold, census] })
      }
    }
    if (!holds.some(({ kind }) => kind === "outbox release")) return found.slice(0, 5)
    for (const [at, value] of values.slice(1).entries()) {
      const from = since.get(value) ?? 0
      if (tokenOf(value) < tokenOf(values[at]!) && !forgot(run, from, census.ended ?? from)) {
        found.push({ check: "order", detail: `${value} was published after ${values[at]}`, holds: [census] })
      }
    }
    return found.slice(0, 5)
  })
}

export const published = (holds: ReadonlyArray<Hold>, run: Run): ReadonlyArray<Anomaly> => [
  ...together(holds).slice(0, 5),
  ...counted(holds, run).slice(0, 5)
]
