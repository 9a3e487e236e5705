/**
 * What must be true of a history. Where the order of the tokens decides, that is an invariant in n log n; the rest is for
 * the search.
 */
import { patience } from "../../src/internal/hold/kept.ts"
import { Linearizability } from "../../src/testing.ts"
import { type Hold, lastRun } from "./history.ts"

export interface Anomaly {
  readonly check: string
  readonly detail: string
  readonly holds: ReadonlyArray<Hold>
}

/** A stretch of time, in microseconds. */
export interface Span {
  readonly from: number
  readonly to: number
}

export interface Run {
  /** In microseconds. */
  readonly lease: number
  /** When Redis may have forgotten what it had acknowledged: asynchronous replication and flushes promise no more. */
  readonly forgets: ReadonlyArray<Span>
  /** When events could not be delivered: what comes after them is received all the same. */
  readonly undelivered?: ReadonlyArray<Span> | undefined
  /** When something may have kept a client from asking, by client; those of all clients are under "". */
  readonly disturbed: ReadonlyMap<string, ReadonlyArray<Span>>
  /** When the sessions of a client were lost. */
  readonly lost: ReadonlyMap<string, ReadonlyArray<number>>
  /** When sessions can have expired, as Redis sees it: one span for all partitions of a process, where it has lost them together. */
  readonly expired?: ReadonlyArray<Span> | undefined
  /** The clock of Redis has jumped, so its times are not those of the machine. */
  readonly jumped?: boolean | undefined
  readonly tally?: Tally | undefined
}

/** What is no anomaly, and worth counting. */
export interface Tally {
  /** How long two bodies ran at once after Redis had forgotten one of them, in microseconds. */
  readonly exposures: Array<number>
  /** Histories that were searched, and given up. */
  undecided: number
}

const millis = (micros: number): string => `${(micros / 1000).toFixed(3)} ms`

export const overlaps = (spans: ReadonlyArray<Span> | undefined, from: number, to: number): boolean =>
  spans?.some((span) => span.from <= to && from <= span.to) === true

export const isDisturbed = (run: Run, client: string, from: number, to: number): boolean =>
  overlaps(run.disturbed.get(client), from, to) || overlaps(run.disturbed.get(""), from, to)

export const isLost = (run: Run, client: string, from: number, to: number): boolean =>
  run.lost.get(client)?.some((at) => from <= at && at <= to) === true

/** As `isLost`. A client that a fault has stopped notices the loss when the fault is over. */
export const isLostBehind = (run: Run, client: string, from: number, to: number): boolean => {
  const stopped = run.disturbed.get(client)?.filter((span) => span.from <= to && from <= span.to) ?? []
  return isLost(run, client, from, Math.max(to, ...stopped.map((span) => span.to)))
}

/** How many sessions with one partition can have expired between two times, as Redis sees it. */
export const expirations = ({ expired = [] }: Run, from: number, to: number): number =>
  expired.filter((span) => span.from <= to && from <= span.to).length

const granted = (holds: ReadonlyArray<Hold>): ReadonlyArray<Hold> =>
  holds.filter(({ entered }) => entered !== undefined)

const twice = "a token was given twice"

/** Tokens are never given twice, and one that was seen before another was asked for is smaller. */
export const tokens = (holds: ReadonlyArray<Hold>): ReadonlyArray<Anomaly> => {
  const found: Array<Anomaly> = []
  const known = new Map<number, Hold>()
  for (const hold of granted(holds)) {
    const other = known.get(hold.token!)
    if (other !== undefined) {
      found.push({ check: "tokens", detail: twice, holds: [other, hold] })
    }
    known.set(hold.token!, hold)
  }
  const byEntry = [...granted(holds)].sort((a, b) => a.entered! - b.entered!)
  const byAsking = [...granted(holds)].sort((a, b) => a.asked - b.asked)
  let largest: Hold | undefined
  let next = 0
  for (const hold of byAsking) {
    while (next < byEntry.length && byEntry[next]!.entered! < hold.asked) {
      const before = byEntry[next++]!
      if (largest === undefined || before.token! > largest.token!) largest = before
    }
    if (largest !== undefined && largest.token! >= hold.token!) {
      found.push({
        check: "tokens",
        detail: "a token is smaller than one that was known before",
        holds: [largest, hold]
      })
    }
  }
  return found
}

/**
 * Of what a process may keep: it takes that without asking, for up to a second after Redis has forgotten it. Shares that others hold at the
 * same time get larger tokens meanwhile.
 */
export const isKeptBlindly = ({ check, detail, holds }: Anomaly, { forgets }: Run, exclusive: number): boolean =>
  check === "tokens" &&
  (holds.every(({ weight }) => weight < exclusive) && detail !== twice ||
    holds.some(({ asked }) => overlaps(forgets, asked - 1_000_000, asked)))

/** The weights, and what they exceed: at each grant, what was granted before counts. */
const excessOf = (
  inside: ReadonlySet<Hold>,
  capacityAt: (grant: Hold) => number
): readonly [total: number, capacity: number] | undefined => {
  let total = 0
  for (const hold of [...inside].sort((one, other) => one.token! - other.token!)) {
    total += hold.weight
    if (total > capacityAt(hold)) return [total, capacityAt(hold)]
  }
  return undefined
}

/**
 * The weights of the bodies that run at the same time never exceed the capacity, which may be another one at each grant, except
 * after Redis has forgotten.
 */
export const exclusive = (
  holds: ReadonlyArray<Hold>,
  capacity: number | ((grant: Hold) => number),
  run: Run
): ReadonlyArray<Anomaly> => {
  const found: Array<Anomaly> = []
  const inside = new Set<Hold>()
  const moments = granted(holds).flatMap((hold) => [
    { at: hold.entered!, hold, enters: true },
    { at: lastRun(hold), hold, enters: false }
  ]).sort((a, b) => a.at - b.at || Number(a.enters) - Number(b.enters))
  let total = 0
  for (const { at, enters, hold } of moments) {
    if (!enters) {
      if (inside.delete(hold)) total -= hold.weight
      continue
    }
    if (lastRun(hold) <= at) continue
    inside.add(hold)
    total += hold.weight
    const exceeded = typeof capacity === "function"
      ? excessOf(inside, capacity)
      : total > capacity
      ? [total, capacity] as const
      : undefined
    if (exceeded === undefined) continue
    const others = [...inside]
    const excess = Math.min(...others.filter((one) => one !== hold).map(lastRun)) - at
    if (overlaps(run.forgets, at - run.lease, at)) {
      run.tally?.exposures.push(excess)
      continue
    }
    found.push({
      check: "exclusive",
      detail: `${exceeded.join(" of ")} at once, for ${millis(excess)} or more`,
      holds: others
    })
  }
  return found
}

// Less than Redis takes to answer, in microseconds.
const atOnce = 100

/**
 * A waiter that has queued for a while is granted before later ones. Tokens tell the order of grants, except that a process takes a share
 * that it has kept with a smaller token: a waiter that was inside before that share was asked for did not wait behind it.
 */
export const fifo = (holds: ReadonlyArray<Hold>, run: Run): ReadonlyArray<Anomaly> => {
  const slack = 500_000
  const found: Array<Anomaly> = []
  const waiters: Array<Hold> = []
  let earliest = Number.POSITIVE_INFINITY
  for (const hold of [...granted(holds)].sort((a, b) => b.token! - a.token!)) {
    // A process that keeps a lock may not have heard yet that another one waits for it.
    const isDeaf = (waiter: Hold) =>
      hold.entered! - hold.asked < atOnce && isDisturbed(run, hold.client, waiter.asked, hold.asked)
    const isBehind = (waiter: Hold) =>
      waiter.asked + slack < hold.asked && waiter.entered! > hold.asked && !isDeaf(waiter)
    const first = hold.asked > earliest + slack ? waiters.find(isBehind) : undefined
    if (first !== undefined) {
      found.push({
        check: "fifo",
        detail: `one that asked ${millis(hold.asked - first.asked)} later was first`,
        holds: [first, hold]
      })
    }
    // Its place was certain only if it had one, all the time. A session that was lost right before has to be opened anew.
    const before = hold.asked - 1_000_000
    const queued = hold.wait && !isDisturbed(run, hold.client, before, hold.asked + slack) &&
      !isLost(run, hold.client, before, hold.entered!) &&
      !overlaps(run.forgets, hold.asked - run.lease, hold.entered!)
    if (!queued) continue
    waiters.push(hold)
    earliest = Math.min(earliest, hold.asked)
  }
  return found
}

interface Step {
  readonly op: "take" | "give" | "busy"
  readonly hold: Hold
}

interface State {
  readonly total: number
  readonly holders: ReadonlySet<Hold>
}

// For one that did not wait, a process was asked to release what it kept. Timers may be early, and times are in microseconds.
const hasQueued = ({ asked, ended }: Hold): boolean => ended! - asked > 0.9 * patience * 1000

/** One order of takes and releases explains what all clients saw. Not asked after Redis has forgotten something. */
export const linearizable = (holds: ReadonlyArray<Hold>, capacity: number, run: Run): ReadonlyArray<Anomaly> => {
  if (run.forgets.length > 0) return []
  // May have been granted and released unseen, so that others found it busy; or in a session that was lost.
  const ghosts = holds.filter((hold) =>
    hold.entered === undefined && (hold.outcome !== "busy" || hasQueued(hold)) ||
    isLost(run, hold.client, hold.asked, hold.entered ?? hold.ended ?? Number.POSITIVE_INFINITY)
  )
  // One that waits is ahead of one that asks whether there is room, also while the process that keeps a lock idle is still being asked for it.
  const isBehindAnother = (hold: Hold) =>
    holds.some((other) =>
      other !== hold && other.wait && other.asked <= hold.ended! &&
      hold.asked <= (other.entered ?? other.ended ?? Number.POSITIVE_INFINITY)
    )
  const operations = holds.flatMap((hold): ReadonlyArray<Linearizability.Operation<Step>> => {
    if (hold.entered !== undefined) {
      // Certain once the caller was answered, unless a lost session left it to the lease, or Redis was away for longer than a release
      // is waited for: then the next release is not waited for at all.
      const left = hold.left ?? hold.entered
      const isAtOnce = hold.ended !== undefined && hold.ended - left < atOnce &&
        isDisturbed(run, hold.client, left, hold.ended)
      const certain = hold.ended !== undefined && (hold.outcome === "released" || hold.outcome === "interrupted") &&
        !isLost(run, hold.client, hold.asked, hold.ended) &&
        hold.ended - left < 0.9 * run.lease / 3 && !isAtOnce
      return [
        { input: { op: "take", hold }, start: hold.asked, end: hold.entered },
        {
          input: { op: "give", hold },
          start: Math.max(lastRun(hold), hold.entered),
          end: certain ? hold.ended : undefined
        }
      ]
    }
    const plain = hold.outcome === "busy" && capacity === 1 && !hasQueued(hold) && !isBehindAnother(hold) &&
      !ghosts.some((ghost) =>
        ghost.asked <= hold.ended! && hold.asked <= (ghost.ended ?? Number.POSITIVE_INFINITY) + 2 * run.lease
      )
    return plain ? [{ input: { op: "busy", hold }, start: hold.asked, end: hold.ended }] : []
  })
  // Unless one has found it busy, it only helps to take late, and to give early.
  const hasBusy = operations.some(({ input: { op } }) => op === "busy")
  const exact = ({ end, input, start }: Linearizability.Operation<Step>): Linearizability.Operation<Step> => {
    const at = input.op === "take" ? end! : start
    return { input, start: at, end: at }
  }
  const result = Linearizability.check<State, Step>(
    {
      initial: { total: 0, holders: new Set() },
      step: ({ holders, total }, { hold, op }) => {
        if (op === "busy") return total > 0 ? { total, holders } : undefined
        if (op === "take") {
          return total + hold.weight > capacity
            ? undefined
            : { total: total + hold.weight, holders: new Set(holders).add(hold) }
        }
        if (!holders.has(hold)) return undefined
        const rest = new Set(holders)
        rest.delete(hold)
        return { total: total - hold.weight, holders: rest }
      },
      // Those that hold follow from which takes and gives there were, in any order.
      key: () => ""
    },
    hasBusy ? operations : operations.map(exact),
    { maxSteps: 1_000_000 }
  )
  if (result._tag === "Unknown" && run.tally !== undefined) run.tally.undecided++
  return result._tag !== "NotLinearizable" ? [] : [{
    check: "linearizable",
    detail: `no order explains ${result.stuck.input.op}`,
    holds: [...new Set([result.stuck.input.hold, ...result.around.map(({ input }) => input.hold)])].slice(0, 12)
  }]
}

/** For everything that has a capacity, each hold with a token. */
export const bounded = (capacity: number) => (holds: ReadonlyArray<Hold>, run: Run): ReadonlyArray<Anomaly> => [
  ...tokens(holds),
  ...exclusive(holds, capacity, run),
  ...fifo(holds, run),
  ...linearizable(holds, capacity, run)
]

/** A write of a valid holder was refused: a later holder has written already. */
export const refused = (holds: ReadonlyArray<Hold>, run: Run): ReadonlyArray<Anomaly> =>
  holds.flatMap((hold) =>
    hold.refused !== undefined && hold.outcome === "released" &&
      !overlaps(run.forgets, hold.entered! - run.lease, hold.ended!)
      ? [{ check: "refused", detail: "a write under a hold that was never lost was refused", holds: [hold] }]
      : []
  )

/** A body runs once, and what was asked is answered if its process lived. */
export const settled = (holds: ReadonlyArray<Hold>, ended: ReadonlySet<string>): ReadonlyArray<Anomaly> =>
  holds.flatMap((hold) => [
    ...(hold.repeated ? [{ check: "once", detail: "a body ran twice", holds: [hold] }] : []),
    ...(hold.ended === undefined && ended.has(hold.client)
      ? [{ check: "settled", detail: "was never answered", holds: [hold] }]
      : [])
  ])
