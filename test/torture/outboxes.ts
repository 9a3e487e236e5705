/** What must be true of a ref that publishes its writes: each write that was made has one event, and no other has any. */
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

export const published = (holds: ReadonlyArray<Hold>, run: Run): ReadonlyArray<Anomaly> => [
  ...together(holds).slice(0, 5),
  ...counted(holds, run).slice(0, 5)
]
