/** What must be true of a semaphore that processes resize while it is in use. */
import { type Anomaly, exclusive, fifo, isLostBehind, overlaps, type Run, tokens } from "./checks.ts"
import type { Hold } from "./history.ts"
import { keepOf } from "./workload.ts"

/** Kinds of requests about the number, which is their weight. Where there is no semaphore yet, "keep" decides it, too. */
export const kinds = {
  fail: "semaphore make fail",
  keep: "semaphore make keep",
  resize: "semaphore make resize",
  resizes: "semaphore resize",
  reads: "semaphore permits",
  closes: "semaphore close"
}

// The number is in force when these are answered.
const deciding = [kinds.fail, kinds.resize, kinds.resizes]

// Clocks of one machine, in microseconds.
const slack = 1000

interface Decision {
  readonly by: string
  readonly permits: number
  readonly from: number
  /** When it had been made at the latest. */
  readonly to: number
  readonly certain: boolean
}

/** The numbers of permits that may be in force in a stretch of time. */
const numbersOf = (holds: ReadonlyArray<Hold>, run: Run) => {
  const late = keepOf(run.lease / 1000) * 1000
  // Redis may have executed it, and forgotten that, before it was asked again and refused.
  const isRefused = ({ asked, ended, outcome }: Hold): boolean =>
    / is open elsewhere /.test(outcome ?? "") && !overlaps(run.forgets, asked, ended!)
  const isDecided = (hold: Hold): boolean =>
    hold.kind === kinds.keep || deciding.includes(hold.kind) && !isRefused(hold)
  const decisions = holds.filter(isDecided).map((
    { asked, client, ended = asked, entered, kind, weight }
  ): Decision => ({
    by: client,
    permits: weight,
    from: asked,
    to: entered ?? ended + late,
    certain: entered !== undefined && deciding.includes(kind)
  }))
  const closed = holds.filter(({ kind }) => kind === kinds.closes)
  const seen = new Map<string, number>()
  for (const { asked, client, ended = asked } of holds) seen.set(client, Math.max(seen.get(client) ?? 0, ended))
  // While its process has the semaphore open, no earlier number comes back.
  const stands = ({ by, from }: Decision, until: number) =>
    seen.get(by)! > until &&
    !closed.some(({ asked, client }) => client === by && from <= asked && asked <= until) &&
    // Where its clock has jumped, Redis is the first to know.
    !isLostBehind(run, by, from, run.jumped === true ? until + run.lease : until) &&
    !overlaps(run.forgets, from - run.lease, until)
  return (from: number, to: number): ReadonlyArray<number> => {
    const last = Math.max(
      0,
      ...decisions.filter((one) => one.certain && one.to < from && stands(one, to)).map((one) => one.from)
    )
    return decisions.filter((one) => one.from <= to && one.to >= last).map(({ permits }) => permits)
  }
}

/**
 * When each was granted. Tokens are times of Redis, whose clock is ahead of that of the histories by as much as all of them allow:
 * a waiter knows only that it was granted some time after it asked.
 */
const grantsOf = (takes: ReadonlyArray<Hold>, run: Run): (grant: Hold) => readonly [from: number, to: number] => {
  let [least, most] = [Number.NEGATIVE_INFINITY, Number.POSITIVE_INFINITY]
  for (const { asked, entered, token } of takes) {
    if (entered === undefined) continue
    least = Math.max(least, token! - entered - slack)
    most = Math.min(most, token! - asked + slack)
  }
  const isKnown = run.jumped !== true && least <= most
  return ({ asked, entered, token }) =>
    isKnown ? [Math.max(asked, token! - most), Math.min(entered!, token! - least)] : [asked, entered!]
}

const among = (numbers: ReadonlyArray<number>): string => [...new Set(numbers)].join(" or ")

/** As `bounded`. Permits that are taken stay so when there are fewer: the number at the time of a grant counts. */
export const resized = (holds: ReadonlyArray<Hold>, run: Run): ReadonlyArray<Anomaly> => {
  const numbers = numbersOf(holds, run)
  const takes = holds.filter(({ kind }) => kind === "semaphore")
  const grantedAt = grantsOf(takes, run)
  const makes = holds.filter(({ kind }) => kind.startsWith("semaphore make "))
  // There are none when Redis has forgotten the semaphore, or the session of its last process is lost, until a process joins again.
  const isGone = ({ asked, client, entered, token }: Hold): boolean => {
    const opened = makes.findLast((make) => make.client === client && make.asked < asked)!.asked
    return token === 0 && (isLostBehind(run, client, opened, entered! + run.lease) ||
      overlaps(run.forgets, opened - run.lease, entered!))
  }
  const read = holds.filter((hold) => hold.kind === kinds.reads && hold.entered !== undefined && !isGone(hold))
  const refused = takes.filter(({ outcome }) => / permits were asked for/.test(outcome ?? ""))
  const wrong = (hold: Hold, detail: string): Anomaly => ({ check: "number", detail, holds: [hold] })
  return [
    ...read.flatMap((hold) => {
      const possible = numbers(hold.asked, hold.entered!)
      return possible.includes(hold.token!) ? [] : [wrong(hold, `${hold.token} permits, not ${among(possible)}`)]
    }),
    ...refused.flatMap((hold) => {
      const possible = numbers(hold.asked, hold.ended!)
      const isRight = possible.some((permits) => permits < hold.weight)
      return isRight ? [] : [wrong(hold, `${hold.weight} of ${among(possible)} permits were refused`)]
    }),
    ...tokens(takes),
    ...exclusive(takes, (grant) => Math.max(...numbers(...grantedAt(grant))), run),
    ...fifo(takes, run)
  ]
}
