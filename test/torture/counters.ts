/**
 * What must be true of counters. Amounts are random and large, so the difference of two sums tells which additions were made
 * between them, and no sum but 0 comes again.
 */
import type { Anomaly, Run } from "./checks.ts"
import type { Hold } from "./history.ts"
import {
  absentBetween,
  adjacent,
  agreed,
  caughtUp,
  type Change,
  countUpTo,
  type Edge,
  endAfter,
  forgot,
  kindOf,
  prefixes,
  type Read
} from "./states.ts"

// A subscriber that is so many changes behind misses the oldest.
const mostBehind = 1024

/** One addition, or one that was summed up with others. */
interface Addition extends Change {
  readonly hold: Hold
  readonly by: number
}

/** Additions of one scope, of which each request sums up some that follow each other. */
interface Batch {
  readonly hold: Hold
  readonly additions: ReadonlyArray<Addition>
  /** Of each sum from the beginning on, how many additions it has. */
  readonly sums: ReadonlyMap<number, number>
}

interface Facts {
  readonly run: Run
  readonly holds: ReadonlyArray<Hold>
  readonly single: ReadonlyMap<number, Addition>
  readonly batches: ReadonlyArray<Batch>
  readonly resets: ReadonlyArray<Change>
  readonly edges: ReadonlyArray<Edge>
  readonly reads: ReadonlyArray<Read>
  /** When a sum was reported for the first time. */
  readonly known: ReadonlyMap<number, number>
}

const batchOf = (hold: Hold): Batch => {
  let to = hold.told.length
  let confirmed = Number.POSITIVE_INFINITY
  const additions: Array<Addition> = []
  while (to-- > 0) {
    const { at, what: [word, by] } = hold.told[to]!
    if (word === "flushed") confirmed = at
    else additions.unshift({ hold, by: Number(by), from: at, to: confirmed })
  }
  const sums = prefixes(additions, 0, (sum, { by }) => sum + by)
  return { hold, additions, sums: new Map(sums.map((sum, count) => [sum, count])) }
}

const factsOf = (holds: ReadonlyArray<Hold>, run: Run): Facts => {
  const single = new Map<number, Addition>()
  const resets: Array<Change> = []
  const edges: Array<Edge> = []
  const reads: Array<Read> = []
  const known = new Map<number, number>()
  const note = (sum: number, at: number) => known.set(sum, Math.min(known.get(sum) ?? Number.POSITIVE_INFINITY, at))
  for (const hold of holds) {
    const kind = kindOf(hold)
    const [one, two] = hold.told
    const number = (told: typeof one) => Number(told!.what[1])
    if (kind === "add" && one !== undefined) {
      const by = number(one)
      single.set(by, { hold, by, from: one.at, to: two?.at ?? Number.POSITIVE_INFINITY })
      if (two === undefined) continue
      const after = number(two)
      note(after, two.at)
      edges.push({ hold, before: after - by, after, from: one.at, to: two.at, seen: false })
    } else if (kind === "count" && one !== undefined) {
      note(number(one), one.at)
      reads.push({ hold, from: hold.asked, to: one.at, state: number(one) })
    } else if (kind === "reset") {
      resets.push({ hold, from: hold.asked, to: one?.at ?? Number.POSITIVE_INFINITY })
      if (one === undefined) continue
      const before = number(one)
      if (before === 0) reads.push({ hold, from: hold.asked, to: one.at, state: 0 })
      else {
        note(before, one.at)
        edges.push({ hold, before, after: 0, from: hold.asked, to: one.at, seen: false })
      }
    } else if (kind === "versions" || kind === "conflated") {
      for (const told of hold.told) note(number(told), told.at)
      if (kind === "versions") {
        const sights = hold.told.map((told) => [told.at, number(told)] as const)
        // It was as many behind as can wait for it, as after an outage.
        const isLate = ([at]: typeof sights[number], index: number) =>
          (sights[index + mostBehind - 1]?.[0] ?? Number.POSITIVE_INFINITY) < at + 1_000_000
        const late = new Set(sights.filter(isLate).map(([at]) => at))
        edges.push(...adjacent(hold, sights, run).filter(({ to }) => !late.has(to)))
      }
    }
  }
  const batches = holds.filter((hold) => kindOf(hold) === "batch").map(batchOf)
  known.delete(0)
  return { run, holds, single, batches, resets, edges, reads, known }
}

const additionsOf = ({ batches, single }: Facts): ReadonlyArray<Addition> => [
  ...single.values(),
  ...batches.flatMap(({ additions }) => additions)
]

type Made = readonly [Batch | undefined, from: number, to: number]

// Most requests sum up fewer additions; all others are looked for one by one.
const usual = 30

/** Which additions make a difference, and where in their batch. */
const makers = ({ batches, single }: Facts): (difference: number, at: number) => Made | undefined => {
  const known = new Map<number, Made>()
  for (const batch of batches) {
    const sums = [...batch.sums.keys()]
    for (let from = 0; from < sums.length; from++) {
      for (let to = from + 1; to < Math.min(sums.length, from + usual); to++) {
        known.set(sums[to]! - sums[from]!, [batch, from, to])
      }
    }
  }
  return (difference, at) => {
    const one = single.get(difference)
    if (one !== undefined && one.from <= at) return [undefined, 0, 0]
    const made = known.get(difference)
    if (made !== undefined && made[0]!.additions[made[2] - 1]!.from <= at) return made
    for (const batch of batches) {
      if (batch.hold.asked > at) continue
      for (const [sum, count] of batch.sums) {
        const to = batch.sums.get(sum + difference)
        if (to !== undefined && to > count && batch.additions[to - 1]!.from <= at) return [batch, count, to]
      }
    }
    return undefined
  }
}

/** Every change is an addition that was made, or a reset, and every addition changes the counter once. */
const addedOnce = (facts: Facts): ReadonlyArray<Anomaly> => {
  const { edges, resets, run } = facts
  const found: Array<Anomaly> = []
  const changes = new Map<string, Edge>()
  for (const edge of edges) {
    const name = `${edge.before} ${edge.after}`
    const known = changes.get(name)
    if (known === undefined || edge.to < known.to) changes.set(name, edge)
  }
  const madeBy = makers(facts)
  const singles = new Map<number, Edge>()
  const parts = new Map<Batch, Array<{ readonly from: number; readonly to: number; readonly edge: Edge }>>()
  const wrong = (check: string, detail: string, edges: ReadonlyArray<Edge>, from: number) => {
    if (forgot(run, from, Math.max(...edges.map(({ to }) => to)))) return
    found.push({ check, detail, holds: edges.map(({ hold }) => hold) })
  }
  for (const edge of changes.values()) {
    const { after, before, to } = edge
    if (after === 0 && resets.some(({ from }) => from <= to)) continue
    const difference = after - before
    const made = madeBy(difference, to)
    if (made === undefined) {
      wrong("phantom", `nobody has made ${before} ${after}: a difference of ${difference}`, [edge], edge.from)
      continue
    }
    const [batch, first, last] = made
    if (batch === undefined) {
      const other = singles.get(difference)
      const addition = facts.single.get(difference)!
      if (other === undefined) singles.set(difference, edge)
      else {
        const detail = `${difference} was added twice: to ${other.before} and ${before}`
        wrong("stored", detail, [other, edge], addition.from)
      }
      continue
    }
    const all = parts.get(batch) ?? []
    const other = all.find(({ from, to }) => first < to && from < last)
    if (other !== undefined) {
      const detail = `additions ${first} to ${last} of a batch count twice: to ${other.edge.before} and ${before}`
      wrong("stored", detail, [other.edge, edge], batch.additions[first]!.from)
    }
    parts.set(batch, [...all, { from: first, to: last, edge }])
  }
  return found
}

/** Reads and additions take effect between question and answer: none finds a sum when a later one was known before. */
const linearizable = (facts: Facts): ReadonlyArray<Anomaly> => {
  const { edges, known, reads, resets, run } = facts
  const next = new Map<number, Edge>()
  for (const edge of edges) {
    const other = next.get(edge.before)
    if (edge.before !== 0 && (other === undefined || edge.to < other.to)) next.set(edge.before, edge)
  }
  const deleted = endAfter(resets.filter(({ to }) => Number.isFinite(to)))
  const gone = new Map<number, number>()
  const goneOf = (state: number): number => {
    const way: Array<number> = []
    let at = state
    while (!gone.has(at) && next.has(at)) {
      way.push(at)
      at = next.get(at)!.after
      if (at === 0) break
    }
    let end = at === 0 ? Number.POSITIVE_INFINITY : gone.get(at) ?? Number.POSITIVE_INFINITY
    for (const one of way.reverse()) {
      end = Math.min(end, next.get(one)!.to, deleted(known.get(one) ?? Number.POSITIVE_INFINITY))
      gone.set(one, end)
    }
    return gone.get(state) ?? deleted(known.get(state) ?? Number.POSITIVE_INFINITY)
  }
  const isAbsent = absentBetween(additionsOf(facts), resets, run)
  const found: Array<Anomaly> = []
  const look = (check: string, { from, hold, state, to }: Read) => {
    if (state === 0 ? isAbsent(from, to) : from <= goneOf(state)) return
    if (forgot(run, Math.min(from, known.get(state) ?? from), to)) return
    found.push({ check, detail: `${state} was found after it was known to be over`, holds: [hold] })
  }
  for (const read of reads) look("stale", read)
  for (const edge of edges) if (!edge.seen) look("overwritten", { ...edge, state: edge.before })
  return found
}

/** A counter that only grows is at least what was added for sure before, and at most what was added at all by then. */
const bounded = (facts: Facts): ReadonlyArray<Anomaly> => {
  const { edges, known, reads, run } = facts
  const additions = additionsOf(facts)
  const total = (sum: number, { by }: Addition) => sum + by
  const ended = additions.filter(({ to }) => Number.isFinite(to)).sort((a, b) => a.to - b.to)
  const least = prefixes(ended, 0, total)
  const asked = [...additions].sort((a, b) => a.from - b.from)
  const most = prefixes(asked, 0, total)
  const found: Array<Anomaly> = []
  const look = (sum: number, from: number, to: number, holds: ReadonlyArray<Hold>) => {
    const low = least[countUpTo(ended, (one) => one.to, from - 1)]!
    const high = most[countUpTo(asked, (one) => one.from, to)]!
    if (low <= sum && sum <= high || forgot(run, 0, to)) return
    found.push({ check: "sum", detail: `${sum} is not from ${low} to ${high}`, holds })
  }
  for (const { from, hold, state, to } of reads) look(state, from, to, [hold])
  for (const { after, from, hold, seen, to } of edges) if (!seen) look(after, from, to, [hold])
  for (const [sum, at] of known) look(sum, 0, at, [])
  return found
}

/** The checks of one counter. The first anomalies of each kind are enough. */
export const counted = (holds: ReadonlyArray<Hold>, run: Run): ReadonlyArray<Anomaly> => {
  const facts = factsOf(holds, run)
  const all = [
    addedOnce(facts),
    agreed(facts.edges, run, String),
    linearizable(facts),
    facts.resets.length === 0 && additionsOf(facts).every(({ by }) => by >= 0) ? bounded(facts) : []
  ]
  return [...all.flatMap((anomalies) => anomalies.slice(0, 5)), ...caughtUp(holds)]
}
