import { Effect, Schema } from "effect"
import type { Coordinator } from "../../../src/index.ts"
import { type Anomaly, overlaps, type Run } from "../checks.ts"
import type { Hold } from "../history.ts"
import { fibers, type Workload } from "../workload.ts"

const key = "corner"

// In milliseconds: a process that comes back later than an outcome is kept may hand a value over again. Of short leases, `keep` is short.
const longestPause = 6000

/**
 * Givers and takers, some of which fail, and parties that exchange; all with a limit. Values are unique and stand in the
 * kinds: "give <value>", "had <value>" and "took <value>", "exchange <mine>" and "met <mine> <theirs>".
 */
export const rendezvous: Workload = {
  name: "rendezvous",
  run: (client) =>
    fibers(
      6,
      client,
      Effect.gen(function*() {
        const place = yield* client.lockstep.Rendezvous.make({
          name: key,
          schema: Schema.String,
          timeToLive: Math.max(client.keep, longestPause)
        })
        const value = client.unique()
        const attempt = <A, E>(what: string, effect: Effect.Effect<A, E, Coordinator.Coordinator>) =>
          client.attempt({ kind: `rendezvous ${what}`, key, weight: 1, wait: true }, effect)
        const say = (what: string) => attempt(what, Effect.void)
        const way = client.random()
        yield* Effect.timeoutOption(
          way < 0.35
            ? attempt(`give ${value}`, place.give(value))
            : way < 0.6
            ? attempt(
              "take",
              Effect.flatMap(
                place.takeWith((value) =>
                  Effect.gen(function*() {
                    yield* say(`had ${value}`)
                    yield* Effect.sleep(client.random() * 10)
                    return client.random() < 0.1 ? yield* Effect.fail({ reason: { _tag: "WaitTimeout" } }) : value
                  })
                ),
                (value) => say(`took ${value}`)
              )
            )
            : way < 0.7
            ? attempt(
              "take plainly",
              Effect.flatMap(place.take(), (value) => Effect.andThen(say(`had ${value}`), say(`took ${value}`)))
            )
            : attempt(
              `exchange ${value}`,
              Effect.flatMap(place.exchange(value), (other) => say(`met ${value} ${other}`))
            ),
          50 + client.random() * (client.random() < 0.1 ? 4000 : 500)
        )
      })
    ),
  check: (holds, run) => [...handedOverOnce(holds, run), ...metEachOther(holds, run)]
}

const said = (holds: ReadonlyArray<Hold>, what: string) =>
  holds.flatMap((hold) => {
    const [, kind, ...values] = hold.kind.split(" ")
    return kind === what && hold.entered !== undefined ? [{ hold, values }] : []
  })

/** Whether Redis has forgotten anything between the two, or shortly before. */
const forgotten = (run: Run, one: Hold, other: Hold): boolean => {
  const first = Math.min(one.entered!, other.entered!)
  const last = Math.max(one.entered!, other.entered!)
  return overlaps(run.forgets, first - run.lease, last)
}

/** What was given was taken, and nothing was taken twice. */
function handedOverOnce(holds: ReadonlyArray<Hold>, run: Run): ReadonlyArray<Anomaly> {
  const anomalies: Array<Anomaly> = []
  const taken = new Map<string, Hold>()
  for (const { hold, values: [value] } of said(holds, "took")) {
    const other = taken.get(value!)
    if (other !== undefined && !forgotten(run, other, hold)) {
      anomalies.push({ check: "doubled", detail: "a value was taken twice", holds: [other, hold] })
    }
    taken.set(value!, hold)
  }
  const had = new Set(said(holds, "had").map(({ values: [value] }) => value))
  // A taker can have died, or given up, before it said so; or Redis has forgotten what it had taken, and gives it another value.
  const silent = holds.filter(({ asked, ended = Number.POSITIVE_INFINITY, entered, kind }) =>
    kind === "rendezvous take plainly" && (entered === undefined || overlaps(run.forgets, asked - run.lease, ended))
  )
  for (const { hold, values: [value] } of said(holds, "give")) {
    const excused = silent.some(({ asked, ended }) => asked <= hold.entered! && (ended ?? hold.asked) >= hold.asked)
    if (!had.has(value) && !excused) {
      anomalies.push({ check: "alone", detail: "a giver was told of a taker that nobody knows", holds: [hold] })
    }
  }
  return anomalies
}

/** A party that has met another one was met by that one, if it was notified, and by no other. */
function metEachOther(holds: ReadonlyArray<Hold>, run: Run): ReadonlyArray<Anomaly> {
  const met = said(holds, "met").map(({ hold, values: [mine, theirs] }) => ({ hold, mine: mine!, theirs: theirs! }))
  const byMine = new Map(met.map((one) => [one.mine, one]))
  const byTheirs = new Map<string, typeof met[number]>()
  return met.flatMap((one) => {
    const other = byMine.get(one.theirs)
    const rival = byTheirs.get(one.theirs)
    byTheirs.set(one.theirs, one)
    const wrong = other !== undefined && other.theirs !== one.mine ? other : rival
    return wrong === undefined || forgotten(run, one.hold, wrong.hold)
      ? []
      : [{ check: "doubled", detail: "a party was met by two", holds: [one.hold, wrong.hold] }]
  })
}
