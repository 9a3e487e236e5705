/** What the histories of a round amount to. */
import { type Anomaly, refused, type Run, settled, type Span, type Tally } from "./checks.ts"
import type { Ended, Histories } from "./clients.ts"
import { fold, type Hold, lastRun } from "./history.ts"
import type { Injected } from "./schedule.ts"
import { workloads } from "./workloads.ts"

export interface Evidence {
  readonly histories: Histories
  readonly injected: ReadonlyArray<Injected>
  /** When the last fault was over. */
  readonly healed: number
  readonly ended: Ended
  /** How long they had to stop, in milliseconds. */
  readonly patience: number
  /** In milliseconds. */
  readonly lease: number
  readonly delays: Delays
}

/** How long what happens goes on to disturb clients, in microseconds. */
export interface Delays {
  /** After the first event of a process. */
  readonly start: number
  /** After a fault is over. */
  readonly fault: (name: string) => number
}

export interface Judgement extends Readonly<Tally> {
  readonly holds: ReadonlyArray<Hold>
  /** Why sessions were lost. */
  readonly lost: ReadonlyArray<string>
  readonly anomalies: ReadonlyArray<Anomaly>
  /** How long after the beginning of a fault by which Redis forgot them holders took their last step, in microseconds. */
  readonly interrupted: ReadonlyArray<readonly [fault: string, after: number]>
}

const losses = (histories: Histories) =>
  Array.from(histories, ([name, events]) => [name, events.filter((event) => event.event === "lost")] as const)

/** Of real processes: one that starts keeps a core busy, beside others that start. */
export const realDelays: Delays = {
  start: 2_000_000,
  // A connection that is made while nothing is answered fails only after its `connectTimeout`, when the fault may be over.
  fault: (name) => (name === "half-open" ? 6 : 1) * 1_000_000
}

// A process that was stopped goes on with other things first.
const wakeUp = 200_000

const disturbances = ({ delays, histories, injected }: Evidence): Run["disturbed"] => {
  const disturbed = new Map<string, Array<Span>>()
  for (const [name, [first]] of histories) {
    if (first !== undefined && delays.start > 0) {
      disturbed.set(name, [{ from: first.at, to: first.at + delays.start }])
    }
  }
  for (const { client, fault, from, to } of injected) {
    const names = client === "" ? [""] : [...histories.keys()].filter((name) => name.startsWith(`${client}.`))
    for (const name of names) {
      disturbed.set(name, [...disturbed.get(name) ?? [], { from, to: to + delays.fault(fault.name) }])
    }
  }
  return disturbed
}

/**
 * A process notices a little before Redis that its session expires; or when it goes on, if it was stopped; or it receives that later from
 * Redis. Losses that come together are those of several partitions.
 */
const expirations = ({ ended: { hung, well }, histories, lease: millis }: Evidence): ReadonlyArray<Span> => {
  const lease = millis * 1000
  return [...histories].flatMap(([name, events]) => {
    const spans: Array<Span> = []
    let first = Number.NEGATIVE_INFINITY
    const together = new Set<number>()
    for (const event of events) {
      if (event.event !== "lost") continue
      if (event.at < first + lease / 2 && !together.has(event.partition)) {
        together.add(event.partition)
        continue
      }
      together.clear()
      together.add(event.partition)
      first = event.at
      const before = events.findLast(({ at }) => at < first - wakeUp)?.at
      const known = event.reason === "expired" && before !== undefined
      spans.push({ from: known ? before : first - 1.5 * lease, to: first + lease / 2 })
    }
    const last = events.at(-1)
    if (last !== undefined && !well.has(name) && !hung.has(name)) {
      spans.push({ from: last.at, to: last.at + 1.5 * lease })
    }
    return spans
  })
}

const hangs = ({ ended, patience }: Evidence, holds: ReadonlyArray<Hold>): ReadonlyArray<Anomaly> =>
  ended.hung.size === 0 ? [] : [{
    check: "hang",
    detail: `some were still waiting ${patience / 1000} s after they were told to stop`,
    holds: holds.filter((hold) => hold.ended === undefined && ended.hung.has(hold.client)).slice(0, 10)
  }]

/** What each workload says about its keys, and whether it went on when all was healed. */
const works = (holds: ReadonlyArray<Hold>, run: Run, healed: number): ReadonlyArray<Anomaly> =>
  workloads.flatMap((workload) => {
    const mine = holds.filter(({ kind }) => kind.split(" ")[0] === workload.name)
    const keys = new Set(mine.map(({ key }) => key))
    const wrong = [...keys].flatMap((key) => workload.check(mine.filter((hold) => hold.key === key), run))
    return mine.length === 0 || mine.some(({ entered }) => entered !== undefined && entered > healed) ? wrong : [
      ...wrong,
      { check: "progress", detail: `nothing was granted to ${workload.name} after the faults`, holds: [] }
    ]
  })

// What a user has to reckon with; everything else is a defect.
const isTyped = (outcome: string): boolean =>
  /^failed lockstep\/\w+\/\w+Error: /.test(outcome) && !/defect/i.test(outcome)

const errors = (holds: ReadonlyArray<Hold>): ReadonlyArray<Anomaly> =>
  holds.flatMap((hold) =>
    hold.outcome?.startsWith("failed") === true && !isTyped(hold.outcome)
      ? [{ check: "error", detail: hold.outcome, holds: [hold] }]
      : []
  )

const interruptions = (holds: ReadonlyArray<Hold>, injected: ReadonlyArray<Injected>, lease: number) =>
  injected.filter(({ fault }) => fault.forgets).flatMap(({ fault, from, to }) =>
    holds.filter((hold) =>
      hold.outcome?.startsWith("lost") === true && hold.entered !== undefined && hold.entered < to &&
      hold.ended! > from && hold.ended! < to + 2 * lease
    ).map((hold) => [fault.name, Math.max(0, lastRun(hold) - from)] as const)
  )

export const judge = (evidence: Evidence): Judgement => {
  const { ended, healed, histories, injected } = evidence
  const lease = evidence.lease * 1000
  const holds = Array.from(histories, ([name, events]) => fold(name, events)).flat()
  const lost = losses(histories)
  const tally: Tally = { exposures: [], undecided: 0 }
  const run: Run = {
    lease,
    forgets: injected.filter(({ fault }) => fault.forgets),
    undelivered: injected.filter(({ fault: { name } }) => name === "lost event"),
    disturbed: disturbances(evidence),
    jumped: injected.some(({ fault }) => fault.name === "clock jump"),
    lost: new Map(lost.map(([name, events]) => [name, events.map(({ at }) => at)])),
    expired: expirations(evidence),
    tally
  }
  const anomalies = [
    ...ended.crashes,
    ...hangs(evidence, holds),
    ...works(holds, run, healed),
    ...refused(holds, run),
    ...settled(holds, ended.well),
    ...errors(holds)
  ]
  return {
    holds,
    lost: lost.flatMap(([, events]) => events.map(({ reason }) => reason)),
    anomalies,
    interrupted: interruptions(holds, injected, lease),
    ...tally
  }
}
