/** What refs and counters have in common: states that are never entered again, absence in between, and subscribers. */
import { type Anomaly, isLost, overlaps, type Run } from "./checks.ts"
import type { Hold } from "./history.ts"

/** A state was the present one at some moment between the two times. */
export interface Read {
  readonly hold: Hold
  readonly from: number
  readonly to: number
  readonly state: number
}

/** A write or a deletion: `to` is infinite if its outcome is not known. */
export interface Change {
  readonly hold: Hold | undefined
  readonly from: number
  readonly to: number
}

/** One state follows another one directly, as far as its witness has observed. */
export interface Edge {
  readonly hold: Hold
  readonly before: number
  readonly after: number
  readonly from: number
  readonly to: number
  /** Seen by a subscriber, and not by the process that changed the state. */
  readonly seen: boolean
}

/** Whether Redis may have forgotten what was true at one time before another one. */
export const forgot = (run: Run, from: number, to: number): boolean => overlaps(run.forgets, from - run.lease, to)

export const kindOf = ({ kind }: Hold): string => kind.slice("ref ".length)

/** The number of items up to a bound, in a sorted list. */
export const countUpTo = <A>(sorted: ReadonlyArray<A>, valueOf: (item: A) => number, bound: number): number => {
  let [low, high] = [0, sorted.length]
  while (low < high) {
    const middle = (low + high) >> 1
    if (valueOf(sorted[middle]!) <= bound) low = middle + 1
    else high = middle
  }
  return low
}

/** Of each prefix of a list, what it comes to; the empty one first. */
export const prefixes = <A>(items: ReadonlyArray<A>, initial: number, f: (sum: number, item: A) => number) => {
  const found = [initial]
  for (const item of items) found.push(f(found.at(-1)!, item))
  return found
}

/** The smallest `to` of all changes that were asked after a time. */
export const endAfter = (changes: ReadonlyArray<Change>): (at: number) => number => {
  const sorted = [...changes].sort((a, b) => b.from - a.from)
  const ends = prefixes(sorted, Number.POSITIVE_INFINITY, (end, { to }) => Math.min(end, to))
  return (at) => ends[countUpTo(sorted, ({ from }) => -from, -at - 1)]!
}

/**
 * Whether there can have been no state at some moment between two times: a deletion can have come after all writes that had
 * ended before. Data loss is a deletion.
 */
export const absentBetween = (
  writes: ReadonlyArray<Change>,
  deletions: ReadonlyArray<Change>,
  run: Run
): (from: number, to: number) => boolean => {
  const ended = writes.filter(({ to }) => Number.isFinite(to)).sort((a, b) => a.to - b.to)
  const asked = prefixes(ended, Number.NEGATIVE_INFINITY, (latest, { from }) => Math.max(latest, from))
  const losses = run.forgets.map(({ from, to }) => ({ hold: undefined, from: from - run.lease, to: to + run.lease }))
  const all = [...deletions, ...losses].sort((a, b) => a.from - b.from)
  const ends = prefixes(all, Number.NEGATIVE_INFINITY, (latest, { to }) => Math.max(latest, to))
  return (from, to) => {
    const written = asked[countUpTo(ended, ({ to }) => to, from - 1)]!
    return written === Number.NEGATIVE_INFINITY || ends[countUpTo(all, ({ from }) => from, to)]! >= written
  }
}

/** What a subscriber saw, in order; nothing where its session, or an event, may have been lost in between. */
export const adjacent = (hold: Hold, states: ReadonlyArray<readonly [at: number, state: number]>, run: Run) =>
  states.slice(1).flatMap(([at, after], index): ReadonlyArray<Edge> => {
    const [from, before] = states[index]!
    if (isLost(run, hold.client, from - 1_000_000, at + 1_000_000) || forgot(run, from, at)) return []
    // It may have received the one before long after that was written.
    if (overlaps(run.undelivered, from - 1_000_000, at)) return []
    return [{ hold, before, after, from, to: at, seen: true }]
  })

/** All witnesses of the state before, or after, another one agree. Absence comes again and again. */
export const agreed = (
  edges: ReadonlyArray<Edge>,
  run: Run,
  name: (state: number) => string
): ReadonlyArray<Anomaly> => {
  const found: Array<Anomaly> = []
  for (const [of, other, what] of [["after", "before", "after"], ["before", "after", "before"]] as const) {
    const known = new Map<number, Edge>()
    for (const edge of edges) {
      if (edge[of] === 0) continue
      const first = known.get(edge[of])
      if (first === undefined) {
        known.set(edge[of], edge)
        continue
      }
      if (first[other] === edge[other] || forgot(run, Math.min(first.from, edge.from), Math.max(first.to, edge.to))) {
        continue
      }
      const both = [first[other], edge[other]].map(name).join(" and ")
      found.push({
        check: first.seen || edge.seen ? "unseen" : "overwritten",
        detail: `${name(edge[of])} comes directly ${what} both ${both}`,
        holds: [first.hold, edge.hold]
      })
    }
  }
  return found
}

/** After the last change, subscribers catch up within a bound. */
export const caughtUp = (holds: ReadonlyArray<Hold>): ReadonlyArray<Anomaly> =>
  holds.filter((hold) => kindOf(hold) === "settled" && hold.outcome === "timeout").map((hold) => ({
    check: "lag",
    detail: hold.told.map(({ what: [, count, ...rest] }) => `${count} subscribers are behind: ${rest.join(", ")}`)
      .join(),
    holds: [hold]
  }))
