/**
 * What must be true of a topic: of what was published to it, what subscribers saw, and what groups handled. Values are unique
 * and begin with their key; where an event stands is its id.
 */
import { type Anomaly, exclusive, isLost, isLostBehind, overlaps, type Run } from "./checks.ts"
import { type Hold, lastRun } from "./history.ts"
import { forgot } from "./states.ts"

/** The key that a value is published with. */
export const keyOf = (value: string): string | undefined => value.slice(0, value.lastIndexOf("/")) || undefined

interface Publication {
  readonly hold: Hold
  readonly value: string
  /** Given by its publisher; "" for none. */
  readonly id: string
  /** Where it stands, as its publisher was answered: "" if that is not known any more, nothing if it was not confirmed. */
  stored: string | undefined
  duplicate: boolean
  /** When its publisher was answered. */
  confirmed: number
}

/** An event that a subscriber saw, or a group handled. */
interface Sighting {
  readonly hold: Hold
  readonly at: number
  readonly id: string
  readonly value: string
  readonly key: string
  /** Of a group: how often it was delivered, this time included, and how often its members have crashed. */
  readonly counts: readonly [attempt: number, crashes: number]
}

interface Position {
  readonly shard: number
  readonly time: number
  readonly number: number
}

/** An event that is known to have been stored. */
interface Stored {
  readonly publication: Publication
  readonly position: Position
  /** When it was seen or confirmed, for the first time and for the last. */
  earliest: number
  latest: number
}

interface Facts {
  readonly publications: ReadonlyMap<string, Publication>
  readonly seen: ReadonlyArray<Sighting>
  readonly handled: ReadonlyArray<Sighting>
  readonly stored: ReadonlyArray<Stored>
  readonly holds: ReadonlyArray<Hold>
  readonly run: Run
}

const groups = ["ordered", "unordered"]

const positionOf = (id: string): Position => {
  const [, shard = "0", time, number] = /^(?:(\d+):)?(\d+)-(\d+)$/.exec(id)!
  return { shard: Number(shard), time: Number(time), number: Number(number) }
}

const nameOf = ({ number, shard, time }: Position): string => `${shard}:${time}-${number}`

const compare = (a: Position, b: Position): number => a.time - b.time || a.number - b.number

const kindOf = ({ kind }: Hold): string => kind.slice("topic ".length)

/** Of the topic that has no limits, and one shard. */
const isWhole = ({ key }: Hold): boolean => key === "whole"

/** Of the topic that retention removes events from. */
const isShort = ({ key }: Hold): boolean => key.startsWith("short")

/** Of the topic whose shards change in number. */
const isMoving = ({ key }: Hold): boolean => key === "moving"

/** The client has ended its wait for all to be handled, and was not killed before. */
const hasSettled = (hold: Hold): boolean => kindOf(hold) === "settled" && hold.ended !== undefined

const sightings = (hold: Hold, word: string): ReadonlyArray<Sighting> =>
  hold.told.filter(({ what }) => what[0] === word).map(({ at, what }) => ({
    hold,
    at,
    id: String(what[1]),
    value: String(what[2]),
    key: String(what[3]),
    counts: [Number(what[4]), Number(what[5])]
  }))

const publicationsOf = (holds: ReadonlyArray<Hold>): ReadonlyMap<string, Publication> => {
  const found = new Map<string, Publication>()
  for (const hold of holds.filter((hold) => kindOf(hold) === "publish")) {
    for (const { at, what: [word, value, id, duplicate] } of hold.told) {
      if (word === "publishes") {
        found.set(String(value), {
          hold,
          value: String(value),
          id: String(id),
          stored: undefined,
          duplicate: false,
          confirmed: Number.POSITIVE_INFINITY
        })
      } else {
        const publication = found.get(String(value))!
        publication.stored = String(id)
        publication.duplicate = duplicate === 1
        publication.confirmed = at
      }
    }
  }
  return found
}

const factsOf = (holds: ReadonlyArray<Hold>, run: Run): Facts => {
  const publications = publicationsOf(holds)
  const seen = holds.flatMap((hold) => sightings(hold, "saw"))
  const handled = holds.flatMap((hold) => sightings(hold, "handles"))
  const stored = new Map<string, Stored>()
  const note = (value: string, id: string, at: number) => {
    const publication = publications.get(value)
    const known = stored.get(`${id} ${value}`)
    if (known !== undefined) {
      known.earliest = Math.min(known.earliest, at)
      known.latest = Math.max(known.latest, at)
    } else if (publication !== undefined) {
      stored.set(`${id} ${value}`, { publication, position: positionOf(id), earliest: at, latest: at })
    }
  }
  for (const { confirmed, duplicate, stored, value } of publications.values()) {
    if (stored !== undefined && stored !== "" && !duplicate) note(value, stored, confirmed)
  }
  for (const { at, id, value } of [...seen, ...handled]) note(value, id, at)
  return {
    publications,
    seen,
    handled,
    stored: [...stored.values()].sort((a, b) => a.position.shard - b.position.shard || compare(a.position, b.position)),
    holds,
    run
  }
}

const groupedBy = <A>(items: ReadonlyArray<A>, keyOf: (item: A) => string): ReadonlyMap<string, ReadonlyArray<A>> => {
  const found = new Map<string, Array<A>>()
  for (const item of items) {
    const key = keyOf(item)
    const known = found.get(key)
    if (known === undefined) found.set(key, [item])
    else known.push(item)
  }
  return found
}

/** Nothing is seen or handled that was not published before, and with another key. */
const phantoms = ({ handled, publications, seen }: Facts): ReadonlyArray<Anomaly> =>
  [...seen, ...handled].flatMap(({ at, hold, id, key, value }) => {
    const publication = publications.get(value)
    const known = publication !== undefined && publication.hold.asked <= at && (keyOf(value) ?? "") === key
    return known ? [] : [{ check: "phantom", detail: `${value} at ${id} was not published`, holds: [hold] }]
  })

/** A publication stands in one place, an id has one publication, and a place one event. */
const storedOnce = (facts: Facts): ReadonlyArray<Anomaly> => {
  const { stored } = facts
  const wrong = (items: ReadonlyArray<Stored>, keyOf: (item: Stored) => string, what: string) =>
    [...groupedBy(items, keyOf).values()].filter((found) => {
      const asked = Math.min(...found.map(({ publication }) => publication.hold.asked))
      return found.length > 1 && !forgot(facts.run, asked, Math.max(...found.map(({ latest }) => latest)))
    }).map((found) => ({
      check: "stored",
      detail: `${what}: ${
        found.map(({ position, publication }) => `${publication.value} at ${nameOf(position)}`).join()
      }`,
      holds: found.map(({ publication }) => publication.hold)
    }))
  return [
    ...wrong(stored, ({ publication }) => publication.value, "a publication was stored twice"),
    ...wrong(
      stored.filter(({ publication }) => publication.id !== ""),
      ({ publication }) => publication.id,
      "an id was stored twice"
    ),
    ...wrong(stored, ({ position }) => nameOf(position), "an event changed")
  ]
}

/** An event that was confirmed before another one was published stands before it; so do the events of one call, in turn. */
const published = (facts: Facts): ReadonlyArray<Anomaly> => {
  const confirmed = [...facts.publications.values()].filter(({ duplicate, stored }) =>
    !duplicate && (stored ?? "") !== ""
  )
    .map((publication) => ({
      publication,
      position: positionOf(publication.stored!),
      hold: publication.hold,
      ended: publication.confirmed
    }))
  const found: Array<Anomaly> = []
  const disordered = (first: typeof confirmed[number], second: typeof confirmed[number]) => {
    if (compare(first.position, second.position) < 0 || forgot(facts.run, first.hold.asked, second.ended)) return
    found.push({
      check: "order",
      detail: `${second.publication.value} was published after ${first.publication.value}, and comes before it`,
      holds: [first.hold, second.hold]
    })
  }
  for (const shard of groupedBy(confirmed, ({ position }) => String(position.shard)).values()) {
    // What one call publishes around a change of the shards is in order by key; events without one may be in any shard then.
    const sequences = groupedBy(
      shard.filter(({ hold, publication: { value } }) => !isMoving(hold) || keyOf(value) !== undefined),
      ({ hold, publication: { value } }) => isMoving(hold) ? keyOf(value)! : ""
    )
    for (const sequence of sequences.values()) {
      for (let at = 1; at < sequence.length; at++) {
        if (sequence[at - 1]!.hold === sequence[at]!.hold) disordered(sequence[at - 1]!, sequence[at]!)
      }
    }
    const ended = [...shard].sort((a, b) => a.ended - b.ended)
    let next = 0
    let largest: typeof confirmed[number] | undefined
    for (const one of [...shard].sort((a, b) => a.hold.asked - b.hold.asked)) {
      for (; ended[next]!.ended < one.hold.asked; next++) {
        if (largest === undefined || compare(ended[next]!.position, largest.position) > 0) largest = ended[next]!
      }
      if (largest !== undefined) disordered(largest, one)
    }
  }
  return found
}

/** A subscriber sees the events of a key in the order of their publication, through all changes of the shards. */
const inSequence = ({ holds, publications, run }: Facts): ReadonlyArray<Anomaly> =>
  holds.filter((hold) => kindOf(hold) === "subscriber").flatMap((hold) => {
    const found: Array<Anomaly> = []
    const latest = new Map<string, Publication>()
    for (const { at, what: [word, , value] } of hold.told) {
      if (word === "gap") latest.clear()
      const publication = publications.get(String(value))
      const key = keyOf(String(value))
      if (word !== "saw" || publication === undefined || key === undefined) continue
      const before = latest.get(key)
      if (before === undefined || publication.hold.asked > before.hold.asked) latest.set(key, publication)
      if (
        before !== undefined && publication.confirmed < before.hold.asked &&
        !forgot(run, publication.hold.asked, at)
      ) {
        found.push({
          check: "order",
          detail: `${publication.value} was seen after ${before.value}, and published before it`,
          holds: [publication.hold, before.hold, hold]
        })
      }
    }
    return found
  })

/** Between two events that a subscriber saw there is no other one, nor before the first of all, unless a gap says so. */
const contiguous = (facts: Facts): ReadonlyArray<Anomaly> => {
  const shards = groupedBy(facts.stored, ({ position }) => String(position.shard))
  const places = new Map<string, number>()
  for (const stored of shards.values()) {
    for (const [at, { position }] of stored.entries()) places.set(nameOf(position), at)
  }
  return facts.holds.filter((hold) => kindOf(hold) === "subscriber").flatMap((hold) => {
    const found: Array<Anomaly> = []
    const last = new Map<number, { readonly at: number; readonly position: Position }>()
    // Nothing is removed from this one, so it begins at the beginning.
    let whole = isWhole(hold)
    for (const { at, what: [word, id] } of hold.told) {
      if (word === "gap") {
        last.clear()
        whole = false
        continue
      }
      const position = positionOf(String(id))
      const before = last.get(position.shard)
      last.set(position.shard, { at, position })
      const first = whole && word === "saw"
      whole = false
      if (before === undefined && !first) continue
      // No data loss excuses this: a subscriber that saw an event which Redis then lost sees a gap.
      if (before !== undefined && position.number !== before.position.number + 1) {
        const check = position.number > before.position.number ? "unseen" : "order"
        found.push({ check, detail: `${id} was seen after ${nameOf(before.position)}, and no gap`, holds: [hold] })
        continue
      }
      const stored = shards.get(String(position.shard)) ?? []
      const from = before === undefined ? -1 : places.get(nameOf(before.position))
      const to = places.get(nameOf(position))
      // Phantoms have no place; that is for another check.
      if (from === undefined || to === undefined) continue
      const missed = stored.slice(from + 1, to).filter(({ publication }) =>
        !forgot(facts.run, publication.hold.asked, at)
      )
      if (missed.length === 0) continue
      const [{ publication }] = missed as [Stored]
      found.push({
        check: "unseen",
        detail: `${missed.length} events before ${id} were not seen, and no gap: ${publication.value}`,
        holds: [publication.hold, hold]
      })
    }
    return found
  })
}

/** A gap has a reason: retention trims only a topic with a limit and never what a group needs, and only faults lose events. */
const gaps = ({ holds, run }: Facts): ReadonlyArray<Anomaly> =>
  holds.flatMap((hold) =>
    hold.told.filter(({ at, what: [word, reason] }) =>
      word === "gap" && !run.forgets.some(({ from }) => from <= at) &&
      !(reason === "trimmed" && kindOf(hold) === "subscriber" && isShort(hold))
    ).map(({ what }) => ({
      check: "gap",
      detail: `a gap of ${what[2]} without a reason (${what[1]})`,
      holds: [hold]
    }))
  )

const handlings = ({ handled }: Facts, group: string): ReadonlyMap<string, ReadonlyArray<Sighting>> =>
  groupedBy(handled.filter(({ hold }) => kindOf(hold) === group).sort((a, b) => a.at - b.at), ({ value }) => value)

const isDone = ({ hold }: Sighting, before = Number.POSITIVE_INFINITY): boolean =>
  hold.told.some(({ at, what: [word] }) => word === "done" && at <= before)

/** Every group has handled every event that was confirmed, or that a client saw, unless all clients of the topic were killed. */
const delivered = (facts: Facts): ReadonlyArray<Anomaly> => {
  if (!facts.holds.some(hasSettled)) return []
  // A request whose publisher has given it up can be executed when the first client has seen that all is handled.
  const settled = Math.min(...facts.holds.filter((hold) => kindOf(hold) === "settled").map(({ asked }) => asked))
  const isLate = ({ earliest, publication: { stored } }: Stored) => stored === undefined && earliest > settled
  const known = new Map(
    facts.stored.flatMap((one) => isLate(one) ? [] : [[one.publication.value, one.publication] as const])
  )
  // Of those of one id, one was stored.
  const ids = new Map(facts.stored.map(({ publication: { id, value } }) => [id, value]))
  for (const publication of facts.publications.values()) {
    const { duplicate, id, stored, value } = publication
    if (stored === undefined) continue
    if (!duplicate || id !== "" && !ids.has(id)) known.set(value, publication)
  }
  return groups.flatMap((group) => {
    const by = handlings(facts, group)
    return [...known.values()].filter(({ hold, id, value }) =>
      by.get(value)?.some((one) => isDone(one)) !== true &&
      !(id !== "" && by.get(ids.get(id) ?? "")?.some((one) => isDone(one)) === true) &&
      !forgot(facts.run, hold.asked, Number.POSITIVE_INFINITY)
    ).map(({ hold, stored, value }) => ({
      check: "undelivered",
      detail: `${value} at ${stored || "an unknown place"} was not handled by group ${group}`,
      holds: [hold, ...(by.get(value) ?? []).map(({ hold }) => hold)]
    }))
  })
}

/** What was delivered before, was handled or crashed: a member that leaves returns uncounted what it has not begun. */
const attempts = (facts: Facts): ReadonlyArray<Anomaly> =>
  groups.flatMap((group) =>
    [...handlings(facts, group).values()].flatMap((all) =>
      all.flatMap((one, before) => {
        const [attempt, crashes] = one.counts
        const counted = attempt - crashes - 1
        if (counted <= before || forgot(facts.run, all[0]!.hold.asked, one.at)) return []
        return [{
          check: "attempts",
          detail: `group ${group} has handled ${one.value} ${before} times, and returned it ${counted} times`,
          holds: all.slice(0, before + 1).map(({ hold }) => hold)
        }]
      })
    )
  )

/** When each process did something for the last time. */
const endsOf = ({ holds }: Facts): ReadonlyMap<string, number> => {
  const ends = new Map<string, number>()
  for (const { asked, client, ended } of holds) ends.set(client, Math.max(ends.get(client) ?? 0, asked, ended ?? asked))
  return ends
}

/** The same of those that were killed: the others have settled in the end. */
const deathsOf = (ends: ReadonlyMap<string, number>, { holds }: Facts): ReadonlyMap<string, number> => {
  const deaths = new Map(ends)
  for (const hold of holds) if (hasSettled(hold)) deaths.delete(hold.client)
  return deaths
}

/** An event is handled again only when it was returned, or its member is dead, has left or has lost its session. */
const repeated = (facts: Facts): ReadonlyArray<Anomaly> => {
  const { run } = facts
  const ends = endsOf(facts)
  const deaths = deathsOf(ends, facts)
  return groups.flatMap((group) =>
    [...handlings(facts, group).values()].flatMap((all) =>
      all.slice(1).flatMap((second, at) => {
        const first = all[at]!
        const ended = second.hold.ended ?? second.at
        const excused = first.hold.outcome !== "released" ||
          isLostBehind(run, first.hold.client, first.hold.asked - run.lease, second.at + run.lease) ||
          // The process was killed before it sent the acknowledgement.
          first.hold.ended! >= (deaths.get(first.hold.client) ?? Number.POSITIVE_INFINITY) - run.lease ||
          // Its member may have left, and Redis have refused its acknowledgement until then.
          (group === "unordered" || ends.get(first.hold.client)! < second.at) &&
            overlaps(run.disturbed.get(""), first.at, second.at) ||
          // The second handler began after its session had expired, and before its process noticed.
          isLost(run, second.hold.client, second.at - run.lease, ended + run.lease) ||
          second.hold.outcome === undefined && second.hold.steps.length === 0 ||
          forgot(facts.run, first.at, second.at)
        return excused ? [] : [{
          check: "repeated",
          detail: `group ${group} has handled ${second.value} twice, and nothing was wrong the first time`,
          holds: [first.hold, second.hold]
        }]
      })
    )
  )
}

/** One event of a key is handled at a time, and each for the first time when the one before it is done. */
const ordered = (facts: Facts): ReadonlyArray<Anomaly> => {
  const { run, stored } = facts
  const by = handlings(facts, "ordered")
  const keyed = stored.filter(({ publication: { value } }) => keyOf(value) !== undefined)
  const early = [...groupedBy(keyed, ({ publication: { value } }) => keyOf(value)!).values()].flatMap((unsorted) => {
    const events = unsorted.toSorted((a, b) => compare(a.position, b.position))
    return events.slice(1).flatMap(({ position, publication: { hold, value } }, at) => {
      const { position: { shard }, publication } = events[at]!
      const first = by.get(value)?.[0]
      const before = by.get(publication.value) ?? []
      // The times of two shards do not say which event is the first one.
      if (shard !== position.shard && publication.confirmed >= hold.asked) return []
      if (
        first === undefined || before.some((one) => isDone(one, first.at)) ||
        forgot(facts.run, publication.hold.asked, first.at) ||
        // It was stored, handled and forgotten, and stored again: its publisher had no answer, or what was lost on its way came late.
        compare(positionOf(first.id), position) !== 0
      ) return []
      return [{
        check: "order",
        detail: `${value} was handled before ${publication.value} was done`,
        holds: [...before.slice(0, 3).map(({ hold }) => hold), first.hold]
      }]
    })
  })
  // A handler that outlives its session may take one step before it is interrupted.
  const bodies = [...by.values()].flat().filter(({ value }) => keyOf(value) !== undefined).map(({ hold, key }) => {
    const over = hold.outcome === "interrupted" ||
      isLost(run, hold.client, hold.entered!, lastRun(hold) + run.lease / 2)
    return { ...hold, key, outcome: over ? "lost session" as const : hold.outcome }
  })
  const together = [...groupedBy(bodies, ({ key }) => key).values()].flatMap((of) => exclusive(of, 1, run))
  return [...early, ...together]
}

/** After the last publication, groups and subscribers catch up within a bound. */
const lag = ({ holds }: Facts): ReadonlyArray<Anomaly> =>
  holds.filter((hold) => kindOf(hold) === "settled" && hold.outcome === "timeout").map((hold) => ({
    check: "lag",
    detail: hold.told.map(({ what: [word, ...rest] }) =>
      word === "open"
        ? `group ${rest[0]} with ${rest[1]} members has ${rest[2]} events to deliver and ${rest[3]} to acknowledge`
        : `${rest[0]} subscribers are behind, there are ${rest[1]} groups`
    ).join("; "),
    holds: [hold]
  }))

/** The checks of one topic. The first ones of each kind are enough. */
export const kept = (holds: ReadonlyArray<Hold>, run: Run): ReadonlyArray<Anomaly> => {
  const facts = factsOf(holds, run)
  return [phantoms, storedOnce, published, inSequence, contiguous, gaps, delivered, attempts, repeated, ordered, lag]
    .flatMap((check) => check(facts).slice(0, 5))
}
