/**
 * The promises of a `PersistedQueue` on a queue of this library, checked against its offers and takes. Values are unique, and say what
 * their handlers do.
 */
import { type Anomaly, expirations, isLostBehind, overlaps, type Run } from "./checks.ts"
import type { Hold } from "./history.ts"
import { deathsOf, groupedBy, ofKind, toldOf } from "./queues.ts"
import { forgot } from "./states.ts"

export const name = "persisted {q}:\n"

/** Of each element. The delay of a retry is in milliseconds. */
export const [mostAttempts, retryDelay] = [3, 60]

interface Offer {
  readonly hold: Hold
  readonly value: string
  /** Given by the producer; "" for none. */
  readonly id: string
  /** In microseconds. */
  readonly delay: number
  /** When its producer was answered. */
  readonly confirmed: number
}

interface Handling {
  readonly hold: Hold
  readonly value: string
  readonly id: string
  readonly attempt: number
  readonly at: number
  /** When its handler has ended; never, if its process died. */
  readonly over: number | undefined
  readonly outcome: "done" | "fails" | undefined
}

interface Facts {
  readonly offers: ReadonlyMap<string, Offer>
  /** By value, in the order of their beginnings. */
  readonly handled: ReadonlyMap<string, ReadonlyArray<Handling>>
  readonly holds: ReadonlyArray<Hold>
  /** How long the custom id of an element is known after its end, in microseconds. */
  readonly retention: number
  readonly run: Run
  /** The last event of each process that was killed. The others have settled. */
  readonly deaths: ReadonlyMap<string, number>
}

const offersOf = (holds: ReadonlyArray<Hold>): ReadonlyMap<string, Offer> =>
  new Map(
    ofKind(holds, "offer").flatMap((hold) => {
      const told = toldOf(hold, "offers")
      if (told === undefined) return []
      const [, value, id, delay] = told.what
      return [[String(value), {
        hold,
        value: String(value),
        id: String(id),
        delay: Number(delay) * 1000,
        confirmed: toldOf(hold, "stored")?.at ?? Number.POSITIVE_INFINITY
      }]]
    })
  )

const handlingsOf = (holds: ReadonlyArray<Hold>): ReadonlyArray<Handling> =>
  ofKind(holds, "take").flatMap((hold) => {
    const told = toldOf(hold, "begins")
    if (told === undefined) return []
    const [, value, id, attempt] = told.what
    return [{
      hold,
      value: String(value),
      id: String(id),
      attempt: Number(attempt),
      at: told.at,
      over: toldOf(hold, "over")?.at,
      outcome: toldOf(hold, "done") !== undefined
        ? "done" as const
        : toldOf(hold, "fails") !== undefined
        ? "fails" as const
        : undefined
    }]
  }).sort((one, other) => one.at - other.at)

/**
 * How many sessions can have ended that had an element, at most. A process whose clock is set can lose several sessions one right after
 * the other, and Redis ends them later.
 */
const crashesOf = (run: Run, from: number, to: number): number =>
  expirations(run, from, to) +
  [...run.lost.values()].flat().filter((at) => from - 1.5 * run.lease <= at && at <= to).length

/** Whether the session of either was lost, so that both may have had the element. */
const isLostBetween = ({ run }: Facts, first: Handling, next: Handling): boolean =>
  isLostBehind(run, first.hold.client, first.at - run.lease, next.at + run.lease) ||
  isLostBehind(run, next.hold.client, next.hold.asked - run.lease, next.at + run.lease) ||
  forgot(run, first.at, next.at)

/** Whether Redis may not have heard how the first one ended. */
const isUntold = (facts: Facts, first: Handling, next: Handling): boolean => {
  const { deaths, run } = facts
  const { client, ended } = first.hold
  return ended === undefined || ended >= (deaths.get(client) ?? Number.POSITIVE_INFINITY) - run.lease ||
    overlaps(run.disturbed.get(""), first.at, next.at) || isLostBetween(facts, first, next)
}

const pairsOf = ({ handled }: Facts): ReadonlyArray<readonly [first: Handling, next: Handling]> =>
  [...handled.values()].flatMap((all) =>
    all.flatMap((first, at) => all.slice(at + 1).map((next) => [first, next] as const))
  )

/** What is handled was offered before, and with its id. */
const phantoms = ({ handled, offers }: Facts): ReadonlyArray<Anomaly> =>
  [...handled.values()].flat().flatMap(({ at, hold, id, value }) => {
    const offer = offers.get(value)
    const known = offer !== undefined && offer.hold.asked <= at && (offer.id === "" || offer.id === id)
    return known ? [] : [{ check: "phantom", detail: `${value} with id ${id} was not offered`, holds: [hold] }]
  })

/** Of elements with one id that come one soon after the other, one is stored. */
const storedOnce = ({ handled, offers, retention, run }: Facts): ReadonlyArray<Anomaly> => {
  const begun = [...handled.values()].flatMap(([first]) => {
    const offer = offers.get(first!.value)
    return offer === undefined || offer.id === "" ? [] : [{ first: first!, offer }]
  })
  return [...groupedBy(begun, ({ offer }) => offer.id).values()].flatMap((all) =>
    all.slice(1).flatMap((one, at) => {
      const before = all[at]!
      const from = Math.min(one.offer.hold.asked, before.offer.hold.asked)
      if (one.first.at - before.first.at >= retention || forgot(run, from, one.first.at)) return []
      const detail = `${before.first.value} and ${one.first.value} were both stored, with the id ${one.offer.id}`
      return [{
        check: "stored",
        detail,
        holds: [before.offer.hold, one.offer.hold, before.first.hold, one.first.hold]
      }]
    })
  )
}

/** Nothing is handled again after its success. */
const repeated = (facts: Facts): ReadonlyArray<Anomaly> =>
  pairsOf(facts).flatMap(([first, next]) =>
    first.hold.outcome !== "released" || isUntold(facts, first, next)
      ? []
      : [{
        check: "repeated",
        detail: `${first.value} was handled again after its success`,
        holds: [first.hold, next.hold]
      }]
  )

/** Nothing is handled in two places at once. */
const exclusive = (facts: Facts): ReadonlyArray<Anomaly> =>
  pairsOf(facts).flatMap(([first, next]) =>
    first.over === undefined || first.over <= next.at || isLostBetween(facts, first, next)
      ? []
      : [{ check: "exclusive", detail: `${first.value} was handled twice at once`, holds: [first.hold, next.hold] }]
  )

/** Failures and crashes use up attempts, and nothing else does. */
const attempts = (facts: Facts): ReadonlyArray<Anomaly> => {
  const { handled, offers, run } = facts
  return [...handled.values()].flatMap((all) =>
    all.flatMap((one, index) => {
      const { at, attempt, hold, value } = one
      const { asked } = offers.get(value)?.hold ?? hold
      const failures = all.slice(0, index).filter((before) => before.outcome === "fails")
      const sure = failures.filter((before) => before.hold.outcome === "timeout" && !isUntold(facts, before, one))
      const crashes = crashesOf(run, asked, at)
      const fits = attempt <= mostAttempts && attempt <= 1 + failures.length + crashes && attempt > sure.length
      return fits || forgot(run, asked, at) ? [] : [{
        check: "attempts",
        detail: `${value} has attempt ${attempt} after ${failures.length} failures and up to ${crashes} crashes`,
        holds: [hold]
      }]
    })
  )
}

/** Neither a delay nor the delay of a retry is shorter than asked for. */
const early = (facts: Facts): ReadonlyArray<Anomaly> => {
  const { handled, offers, run } = facts
  if (run.jumped === true) return []
  return [...handled.values()].flatMap((all) =>
    all.flatMap((one, index) => {
      const { at, attempt, hold, value } = one
      const [offer, before] = [offers.get(value), all[index - 1]]
      const isRetry = before?.hold.outcome === "timeout" && before.attempt === attempt - 1
      const from = isRetry ? before.over! + retryDelay * 1000 : (offer?.hold.asked ?? 0) + (offer?.delay ?? 0)
      // Clocks are not equally fast. One that was lost with its process is not delayed.
      const excused = at >= from - 2000 || isRetry && isUntold(facts, before, one) ||
        forgot(run, offer?.hold.asked ?? at, at)
      return excused ? [] : [{ check: "early", detail: `${value} began too early`, holds: [hold] }]
    })
  )
}

/** What was confirmed is done, or a dead letter. */
const concluded = ({ handled, holds, offers, run }: Facts): ReadonlyArray<Anomaly> => {
  const censuses = ofKind(holds, "settled").filter((hold) => toldOf(hold, "counted") !== undefined)
  const byId = groupedBy([...offers.values()], ({ id, value }) => id === "" ? value : `id ${id}`)
  const ended = new Set(
    censuses.flatMap(({ told }) =>
      told.flatMap(({ what: [word, , value] }) => word === "letter" ? [String(value)] : [])
    )
  )
  for (const [value, all] of handled) if (all.some(({ outcome }) => outcome === "done")) ended.add(value)
  const census = censuses.toSorted((one, other) => one.asked - other.asked).at(-1)
  return census === undefined ? [] : [...byId.values()].flatMap((same) => {
    if (same.some(({ value }) => ended.has(value))) return []
    const lost = same.find(({ confirmed, hold }) => confirmed < census.asked && !forgot(run, hold.asked, census.ended!))
    return lost === undefined
      ? []
      : [{ check: "undone", detail: `${lost.value} was stored, and not handled`, holds: [lost.hold, census] }]
  })
}

/** No element becomes a dead letter before its attempts are used up. */
const buried = ({ handled, holds, offers, run }: Facts): ReadonlyArray<Anomaly> =>
  ofKind(holds, "settled").flatMap((hold) =>
    hold.told.flatMap(({ at, what: [word, , value, reason] }) => {
      const offer = offers.get(String(value))
      if (word !== "letter") return []
      const failures = handled.get(String(value))?.filter(({ outcome }) => outcome === "fails").length ?? 0
      const from = offer?.hold.asked ?? 0
      const fits = offer !== undefined && reason === "failed" && failures + crashesOf(run, from, at) >= mostAttempts
      return fits || forgot(run, from, at) ? [] : [{
        check: "buried",
        detail: `${value} has become a dead letter after ${failures} failures: ${reason}`,
        holds: [hold]
      }]
    })
  )

/** After the last offer, everything is handled within a bound. */
const lag = ({ holds }: Facts): ReadonlyArray<Anomaly> =>
  ofKind(holds, "settled").flatMap((hold) => {
    const open = toldOf(hold, "open")
    return open === undefined
      ? []
      : [{ check: "lag", detail: `${open.what.slice(1, 4).join(", ")} are left`, holds: [hold] }]
  })

/** The first anomalies of each kind are enough. */
export const persisted = (holds: ReadonlyArray<Hold>, run: Run): ReadonlyArray<Anomaly> => {
  const facts: Facts = {
    offers: offersOf(holds),
    handled: groupedBy(handlingsOf(holds), ({ value }) => value),
    holds,
    retention: Math.min(...ofKind(holds, "open").map((hold) => Number(toldOf(hold, "retains")?.what[1] ?? 0) * 1000)),
    run,
    deaths: deathsOf(holds)
  }
  return [phantoms, storedOnce, repeated, exclusive, attempts, early, concluded, buried, lag].flatMap((check) =>
    check(facts).slice(0, 5)
  )
}
