/** What a queue with deques promises beyond any queue: where its jobs run. */
import { type Anomaly, isLost, type Run } from "./checks.ts"
import type { Hold } from "./history.ts"
import { type Facts, factsOf, groupedBy, type Handling, isUnsettled, kept, ofKind, toldOf } from "./queues.ts"
import { forgot } from "./states.ts"

/** Workers come and go, and steal. */
export const deques = "deques {s}:\n"

/** Each worker keeps the jobs of its deque. There is one in each process. */
export const keepers = "keepers"

export const mostKept = 2 ** 31

export const keys = ["key 1", "key 2", "key 3", "key 4"]

/** The value of a job that goes to the deque of a worker, or to the one that a key belongs to. */
export const dealt = (value: string, how: "to" | "key", target: string): string => `${value}@${how}@${target}`

/** A worker has a deque, from its first `take` on. Times are in microseconds. */
interface Stand {
  readonly hold: Hold
  readonly client: string
  readonly worker: string
  /** When it was there for sure; never, if its process received no reply. */
  readonly from: number
  /** When it left its deque, or died. Pools may have come and gone until then. */
  readonly to: number
  /** When a pool left: it returns what it had in hand. */
  readonly ends: ReadonlyArray<number>
}

const standsOf = ({ deaths, failed, holds, stops }: Facts): ReadonlyArray<Stand> => {
  const ends = groupedBy([
    ...Array.from(stops, ([run, { at }]) => ({ client: run.split(" ")[0]!, at })),
    ...ofKind(holds, "failed").filter((hold) => failed.has(`${hold.client} ${toldOf(hold, "failed")?.what[1]}`))
      .map(({ asked, client }) => ({ client, at: asked }))
  ], ({ client }) => client)
  return ofKind(holds, "stand").map((hold) => {
    const { client, ended } = hold
    const stands = toldOf(hold, "stands")
    return {
      hold,
      client,
      worker: String(stands?.what[1]),
      from: stands?.at ?? Number.POSITIVE_INFINITY,
      to: toldOf(hold, "leaves")?.at ?? ended ?? deaths.get(client) ?? Number.POSITIVE_INFINITY,
      ends: ends.get(client)?.map(({ at }) => at) ?? []
    }
  })
}

interface Dealt {
  readonly first: Handling
  readonly offer: Hold
  readonly how: string
  readonly target: string
}

// Those that nothing was wrong with before they began.
const dealtOf = ({ handled, offers, run }: Facts): ReadonlyArray<Dealt> =>
  [...handled].flatMap(([value, [first]]) => {
    const [, how, target] = value.split("@")
    const offer = offers.get(value)
    if (first === undefined || how === undefined || target === undefined || offer === undefined) return []
    // One that was returned goes to any worker.
    return first.attempt > 1 || forgot(run, offer.hold.asked, first.hold.asked)
      ? []
      : [{ first, offer: offer.hold, how, target }]
  })

/** Whether a worker was there from the offer of a job to its beginning, returned nothing, and nothing disturbed it. */
const stood = (run: Run, { client, ends, from, to }: Stand, { first, offer }: Dealt): boolean =>
  from < offer.asked && first.hold.asked < to &&
  // Redis may have handed the job to a pool before it learned that the pool leaves.
  !ends.some((at) => offer.asked - 1_000_000 < at && at < first.hold.asked) &&
  !isUnsettled(run, client, offer.asked - 1_000_000, first.hold.asked + run.lease) &&
  !isLost(run, client, offer.asked - 2 * run.lease, offer.asked)

/** Whether a worker may have had the job in its deque, and have left or died with it. */
const bereft = (run: Run, stand: Stand, one: Dealt): boolean => {
  const { client, hold, to } = stand
  // Redis learns of the end of a worker that cannot leave when its session expires.
  const gone = hold.outcome === "released" && !isUnsettled(run, client, to, to + 1_000_000) ? 1_000_000 : 2 * run.lease
  return hold.asked < one.first.hold.asked && one.offer.asked < to + gone && !stood(run, stand, one)
}

/** While a worker that keeps its jobs lives, nothing of its deque runs elsewhere. */
const stolen = (facts: Facts, stands: ReadonlyArray<Stand>, all: ReadonlyArray<Dealt>): ReadonlyArray<Anomaly> =>
  all.filter(({ how }) => how === "to").flatMap((one) => {
    const { first, offer, target } = one
    const owner = stands.find((stand) => stand.worker === target && stood(facts.run, stand, one))
    return owner === undefined || owner.client === first.hold.client ? [] : [{
      check: "stolen",
      detail: `${first.value} left a deque whose worker keeps all jobs`,
      holds: [owner.hold, offer, first.hold]
    }]
  })

/** Of two workers, one goes before the other one for all jobs of a key. */
const strayed = (facts: Facts, stands: ReadonlyArray<Stand>, all: ReadonlyArray<Dealt>): ReadonlyArray<Anomaly> =>
  [...groupedBy(all.filter(({ how }) => how === "key"), ({ target }) => target)].flatMap(([key, jobs]) => {
    const preferred = new Map<string, Dealt>()
    return jobs.flatMap((one) => {
      const own = one.first.hold.client
      if (stands.some((stand) => bereft(facts.run, stand, one))) return []
      return [
        ...new Set(
          stands.filter((stand) => stand.client !== own && stood(facts.run, stand, one)).map((stand) => stand.client)
        )
      ].flatMap((other) => {
        preferred.set(`${own} ${other}`, one)
        const before = preferred.get(`${other} ${own}`)
        return before === undefined ? [] : [{
          check: "strayed",
          detail: `${key} belonged to ${other} beside ${own}, and to ${own} beside ${other}`,
          holds: [before.offer, before.first.hold, one.offer, one.first.hold]
        }]
      })
    })
  })

/** The checks of one queue. The first anomalies of each kind are enough. */
export const placed = (holds: ReadonlyArray<Hold>, run: Run): ReadonlyArray<Anomaly> => {
  const found = kept(holds, run)
  if (holds[0]?.key !== keepers) return found
  const facts = factsOf(holds, run)
  const [stands, all] = [standsOf(facts), dealtOf(facts)]
  return [...found, ...[stolen, strayed].flatMap((check) => check(facts, stands, all).slice(0, 5))]
}
