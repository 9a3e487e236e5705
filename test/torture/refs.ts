/**
 * What must be true of shared refs: of what was written to them, read from them, and seen by subscribers. Values are unique,
 * and versions increase, so the order of the versions is the only one that can explain a history.
 */
import { type Anomaly, isDisturbed, type Run } from "./checks.ts"
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

interface Write extends Change {
  readonly hold: Hold
  readonly value: string
  /** What it was made from, if its process knows: an absent one is "". */
  base: string | undefined
  /** The version that it may replace. */
  readonly expected: number | undefined
  /** Of the lock under which it was written. */
  readonly token: number | undefined
  /** Infinite until it is confirmed. */
  to: number
  refused: boolean
  /** For a refusal because of a later token: that one. */
  later: number | undefined
}

/** A state that a subscriber saw, with its version if that is known. */
interface Sight {
  readonly at: number
  readonly value: string
  readonly version: number | undefined
}

interface Facts {
  readonly name: string
  readonly run: Run
  readonly holds: ReadonlyArray<Hold>
  readonly writes: ReadonlyMap<string, Write>
  /** The values of each version, and the versions of each value, as they were reported: one each, if all is well. */
  readonly values: ReadonlyMap<number, ReadonlyMap<string, Hold>>
  readonly versionsOf: ReadonlyMap<string, ReadonlyMap<number, Hold>>
  /** All that are known, in order. */
  readonly versions: ReadonlyArray<number>
  readonly versionOf: (value: string) => number | undefined
  /** When a version is known to have been written. */
  readonly known: ReadonlyMap<number, number>
  /** When a client received a version for the first time. */
  readonly sighted: ReadonlyMap<number, number>
  readonly deletions: ReadonlyArray<Change>
  readonly reads: ReadonlyArray<Read & { readonly slack: number }>
  readonly streams: ReadonlyArray<{ readonly hold: Hold; readonly sights: ReadonlyArray<Sight> }>
}

const isConfirmed = ({ to }: Change): boolean => Number.isFinite(to)

/** What was reported about one ref. */
const toldOf = (holds: ReadonlyArray<Hold>, name: string) =>
  holds.flatMap((hold) =>
    hold.told.filter(({ what }) => what[1] === name).map(({ at, what: [word, , ...rest] }) => ({
      hold,
      at,
      word,
      rest
    }))
  )

const writesOf = (holds: ReadonlyArray<Hold>, name: string): Map<string, Write> => {
  const writes = new Map<string, Write>()
  for (const { at, hold, rest: [text, ...rest], word } of toldOf(holds, name)) {
    const value = String(text)
    const write = writes.get(value)
    if (word === "writes") {
      const by = (what: string) => rest[0] === what ? Number(rest[1]) : undefined
      writes.set(value, {
        hold,
        value,
        from: at,
        base: rest[0] === "value" ? String(rest[1]) : undefined,
        expected: by("version"),
        token: by("token"),
        to: Number.POSITIVE_INFINITY,
        refused: false,
        later: undefined
      })
    } else if (word === "wrote" && write !== undefined) {
      write.to = at
      if (rest.length > 0) write.base = String(rest[0])
    } else if (word === "refused" && write !== undefined) {
      write.refused = true
      write.later = rest.length > 0 ? Number(rest[0]) : undefined
    }
  }
  return writes
}

const deletionsOf = (holds: ReadonlyArray<Hold>, name: string): ReadonlyArray<Change & { readonly hold: Hold }> =>
  holds.filter((hold) => kindOf(hold) === "delete").flatMap((hold) => {
    const told = hold.told.filter(({ what }) => what[1] === name)
    if (told.length === 0) return []
    return [{
      hold,
      from: hold.asked,
      to: told.find(({ what: [word] }) => word === "deleted")?.at ?? Number.POSITIVE_INFINITY
    }]
  })

const noted = <K, L>(map: Map<K, Map<L, Hold>>, key: K, item: L, hold: Hold): void => {
  const known = map.get(key)
  if (known === undefined) map.set(key, new Map([[item, hold]]))
  else if (!known.has(item)) known.set(item, hold)
}

const factsOf = (holds: ReadonlyArray<Hold>, name: string, run: Run): Facts => {
  const told = toldOf(holds, name)
  const writes = writesOf(holds, name)
  const values = new Map<number, Map<string, Hold>>()
  const versionsOf = new Map<string, Map<number, Hold>>([["", new Map()]])
  const sighted = new Map<number, number>()
  for (const { at, hold, rest: [value, version], word } of told) {
    if (word !== "read" && word !== "saw" || version === undefined) continue
    sighted.set(Number(version), Math.min(sighted.get(Number(version)) ?? Number.POSITIVE_INFINITY, at))
    noted(values, Number(version), String(value), hold)
    noted(versionsOf, String(value), Number(version), hold)
  }
  const versionOf = (value: string): number | undefined => value === "" ? 0 : versionsOf.get(value)?.keys().next().value
  const known = new Map<number, number>()
  const note = (version: number | undefined, at: number) => {
    if (version === undefined || version === 0) return
    known.set(version, Math.min(known.get(version) ?? Number.POSITIVE_INFINITY, at))
  }
  const reads: Array<Facts["reads"][number]> = []
  const streams = new Map<Hold, Array<Sight>>()
  const deletions = deletionsOf(holds, name)
  for (const { at, hold, rest: [text, number], word } of told) {
    if (word === "deleted" && text === 0) reads.push({ hold, from: hold.asked, to: at, state: 0, slack: 0 })
    if (word !== "read" && word !== "cached" && word !== "saw" && word !== "until") continue
    const value = String(text)
    const version = word === "read" && number !== undefined ? Number(number) : versionOf(value)
    note(version, at)
    if (word === "saw") {
      const sights = streams.get(hold)
      const sight = { at, value, version: number === undefined ? version : Number(number) }
      if (sights === undefined) streams.set(hold, [sight])
      else sights.push(sight)
    } else if (version !== undefined && word !== "until") {
      // In milliseconds; -1 for the lease.
      const slack = word === "read" ? 0 : number === -1 ? run.lease : Number(number) * 1000
      reads.push({ hold, from: hold.asked, to: at, state: version, slack })
    }
  }
  for (const { to, value } of writes.values()) if (Number.isFinite(to)) note(versionOf(value), to)
  return {
    name,
    run,
    holds,
    writes,
    values,
    versionsOf,
    versions: [...known.keys()].sort((a, b) => a - b),
    versionOf,
    known,
    sighted,
    deletions: deletions.filter(({ hold }) => !hold.told.some(({ what }) => what[0] === "deleted" && what[2] === 0)),
    reads,
    streams: Array.from(streams, ([hold, sights]) => ({ hold, sights }))
  }
}

const first = <A>(items: ReadonlyMap<unknown, A>): A => items.values().next().value!

const nameOf = ({ name, values }: Facts, version: number): string =>
  version === 0
    ? `the absence of ${JSON.stringify(name)}`
    : `version ${version} of ${JSON.stringify(name)} (${[...values.get(version)?.keys() ?? []].join()})`

/** The next version that is known. */
const nextOf = ({ versions }: Facts, version: number): number =>
  versions[countUpTo(versions, (one) => one, version)] ?? Number.POSITIVE_INFINITY

/** A version has one value, and a value one version. What was refused is not written. */
const storedOnce = (facts: Facts): ReadonlyArray<Anomaly> => {
  const { run, sighted, values, versionsOf, writes } = facts
  const found: Array<Anomaly> = []
  for (const [version, all] of values) {
    const isAbsent = all.has("")
    if (all.size === 1 && isAbsent === (version === 0)) continue
    found.push({ check: "stored", detail: `${nameOf(facts, version)} is not one value`, holds: [...all.values()] })
  }
  for (const [value, all] of versionsOf) {
    const write = writes.get(value)
    if (write === undefined) continue
    const times = [...all.keys()].map((version) => sighted.get(version)!)
    if (all.size > 1 && !forgot(run, write.from, Math.max(...times, write.hold.ended ?? 0))) {
      const detail = `${value} was written twice: ${[...all.keys()].join(" and ")}`
      found.push({ check: "stored", detail, holds: [write.hold, ...all.values()] })
    }
    if (write.refused) {
      found.push({ check: "stored", detail: `${value} was refused, and written`, holds: [write.hold, first(all)] })
    }
  }
  return found
}

/** Nothing is read that was not written, nor before it was. */
const phantoms = ({ holds, name, writes }: Facts): ReadonlyArray<Anomaly> =>
  toldOf(holds, name).flatMap(({ at, hold, rest: [text], word }) => {
    if (word !== "read" && word !== "cached" && word !== "saw" && word !== "until" || text === "") return []
    const write = writes.get(String(text))
    return write !== undefined && write.from <= at
      ? []
      : [{ check: "phantom", detail: `${text} was not written`, holds: [hold] }]
  })

/** The states that writes replaced, as far as their processes know. */
const basesOf = ({ known, versionOf, writes }: Facts): ReadonlyArray<Edge> =>
  [...writes.values()].flatMap(({ base, expected, from, hold, to, value }): ReadonlyArray<Edge> => {
    const after = versionOf(value)
    if (after === undefined) return []
    let [earlier, since] = [base, from]
    // Updates of one process that meet make one version, with the last value. Or no process saw the version in between.
    while (earlier !== undefined && versionOf(earlier) === undefined) {
      const other = writes.get(earlier)
      since = Math.min(since, other?.from ?? since)
      earlier = other?.base
    }
    const before = expected ?? (earlier === undefined ? undefined : versionOf(earlier))
    if (before === undefined) return []
    return [{ hold, before, after, from: since, to: Math.min(to, known.get(after)!), seen: false }]
  })

/** A write replaces the version that it says, and a subscriber sees every version, each after the one before it. */
const contiguous = (facts: Facts): ReadonlyArray<Anomaly> => {
  const { known, run, streams } = facts
  const full = streams.filter(({ hold }) => kindOf(hold) === "versions")
  const seen = full.flatMap(({ hold, sights }) =>
    // A value whose version no process knows separates.
    adjacent(hold, sights.map(({ at, version }) => [at, version ?? -1] as const), run)
  ).filter(({ after, before }) => after >= 0 && before >= 0)
  const edges = [...basesOf(facts), ...seen]
  const missed = edges.flatMap((edge): ReadonlyArray<Anomaly> => {
    const { after, before, from, hold, seen, to } = edge
    if (before === 0 || after === 0 || before >= after) return []
    const between = nextOf(facts, before)
    if (between >= after || forgot(run, Math.min(from, known.get(before) ?? from), to)) return []
    return [{
      check: seen ? "unseen" : "overwritten",
      detail: `between ${nameOf(facts, before)} and ${nameOf(facts, after)} there is ${nameOf(facts, between)}`,
      holds: [hold, ...facts.values.get(between)?.values() ?? []]
    }]
  })
  return [...missed, ...agreed(edges, run, (state) => nameOf(facts, state))]
}

/** No subscriber goes back. */
const increasing = (facts: Facts): ReadonlyArray<Anomaly> =>
  facts.streams.flatMap(({ hold, sights }) => {
    const found: Array<Anomaly> = []
    let last: Sight | undefined
    for (const sight of sights) {
      if (sight.version === undefined || sight.version === 0) continue
      // A process that is paused sees late what others have seen before.
      const since = last === undefined ? sight.at : Math.min(last.at, facts.known.get(last.version!) ?? last.at)
      if (last !== undefined && sight.version <= last.version! && !forgot(facts.run, since, sight.at)) {
        const detail = `${nameOf(facts, sight.version)} was seen after ${nameOf(facts, last.version!)}`
        found.push({ check: "order", detail, holds: [hold] })
      }
      last = sight
    }
    return found
  })

/**
 * Reads and writes take effect between question and answer: neither a read nor a write finds a version when a later one, or
 * a deletion, was known before it was asked; and absence is read only when a deletion can have come last.
 */
const linearizable = (facts: Facts): ReadonlyArray<Anomaly> => {
  const { deletions, known, reads, run, versionOf, versions, writes } = facts
  const confirmed = deletions.filter(isConfirmed)
  const latest = [...versions].reverse()
  // Of each version, when a later one was known first.
  const passed = prefixes(latest, Number.POSITIVE_INFINITY, (at, version) => Math.min(at, known.get(version)!))
  const deleted = endAfter(confirmed)
  const goneOf = (version: number): number =>
    Math.min(
      passed[versions.length - countUpTo(versions, (one) => one, version)]!,
      deleted(known.get(version) ?? Number.POSITIVE_INFINITY)
    )
  const isAbsent = absentBetween([...writes.values()], deletions, run)
  const wrong: Array<Anomaly> = []
  const look = (check: string, { from, hold, state, to }: Read, slack: number) => {
    const gone = state === 0 ? Number.POSITIVE_INFINITY : goneOf(state)
    const isLate = state === 0 ? !isAbsent(from - slack, to) : from - slack > gone
    if (!isLate || forgot(run, Math.min(from - slack, known.get(state) ?? from), to)) return
    const late = state === 0 ? "" : `, ${((from - gone) / 1000).toFixed(3)} ms after it was known to be over`
    wrong.push({ check, detail: `${nameOf(facts, state)} was found${late}`, holds: [hold] })
  }
  for (const read of reads) look("stale", read, read.slack)
  for (const { from, hold, to, value } of writes.values()) {
    const state = versionOf(value)
    if (state !== undefined) look("order", { hold, from, to: Math.min(to, known.get(state)!), state }, 0)
  }
  for (const { before, from, hold, to } of basesOf(facts)) look("overwritten", { hold, from, to, state: before }, 0)
  return wrong
}

/** A comparison fails only if the version is another one. */
const compared = (facts: Facts): ReadonlyArray<Anomaly> => {
  const { reads, run, versionOf, writes } = facts
  // Versions never come again: what is read later has been there all the time.
  const last = new Map<number, Read>()
  for (const read of reads) {
    if (read.slack === 0 && (last.get(read.state)?.from ?? 0) < read.from) last.set(read.state, read)
  }
  for (const { before, from, hold, to } of basesOf(facts)) {
    if ((last.get(before)?.from ?? 0) < from) last.set(before, { hold, from, to, state: before })
  }
  return [...writes.values()].flatMap(({ expected, from, hold, refused, value }) => {
    const read = refused && expected !== undefined && expected > 0 ? last.get(expected) : undefined
    if (read === undefined || read.from < (hold.ended ?? Number.POSITIVE_INFINITY)) return []
    if (versionOf(value) !== undefined || forgot(run, from, read.to)) return []
    const detail = `${value} was refused, and ${nameOf(facts, expected!)} was still there`
    return [{ check: "refused", detail, holds: [hold, read.hold] }]
  })
}

/** A confirmed write is seen by each watcher that watched from before the request until something later was written. */
const happened = (facts: Facts): ReadonlyArray<Anomaly> => {
  const { run, streams, versionOf, writes } = facts
  const bases = new Set(Array.from(writes.values(), ({ base }) => base))
  const missing = [...writes.values()].filter((write) =>
    isConfirmed(write) && versionOf(write.value) === undefined &&
    // It may have met another update of its process, and have no version of its own.
    !bases.has(write.value)
  )
  return missing.flatMap((write) => {
    const { from, hold, to, value } = write
    for (const { hold: watcher, sights } of streams) {
      if (kindOf(watcher) !== "versions" || sights[0]!.at >= from || sights.at(-1)!.at <= to) continue
      if (sights.some((sight) => sight.value === value)) continue
      const later = sights.find((sight) => (writes.get(sight.value)?.from ?? 0) > to)
      if (later === undefined || forgot(run, from, later.at)) continue
      const before = sights.findLast(({ at }) => at < from)!
      const between = sights.filter(({ at }) => before.at <= at && at <= later.at).map(({ at }) => [at, 0] as const)
      // A lost session may miss versions.
      if (adjacent(watcher, between, run).length < between.length - 1) continue
      return [{ check: "unseen", detail: `${value} was confirmed, and never there`, holds: [hold, watcher] }]
    }
    return []
  })
}

/** No holder writes after a later one. */
const fenced = (facts: Facts): ReadonlyArray<Anomaly> => {
  const { known, run, versionOf, writes } = facts
  const tokens = new Map<number, Write>()
  for (const write of writes.values()) {
    const { from, token } = write
    if (token !== undefined && from < (tokens.get(token)?.from ?? Number.POSITIVE_INFINITY)) tokens.set(token, write)
  }
  const found: Array<Anomaly> = []
  for (const { from, hold, later, to } of writes.values()) {
    const other = later === undefined ? undefined : tokens.get(later)
    if (later === undefined || other !== undefined && other.from < Math.min(to, hold.ended ?? to)) continue
    if (!forgot(run, from, hold.ended ?? from)) {
      found.push({ check: "refused", detail: `refused for token ${later}, which nobody had`, holds: [hold] })
    }
  }
  let largest: Write | undefined
  const order = [...writes.values()].filter(({ token, value }) => token !== undefined && versionOf(value) !== undefined)
  for (const write of order.sort((a, b) => versionOf(a.value)! - versionOf(b.value)!)) {
    if (largest !== undefined && write.token! < largest.token!) {
      const at = known.get(versionOf(write.value)!)!
      if (!forgot(run, Math.min(largest.from, write.from), at)) {
        const detail =
          `${write.value} was written with token ${write.token} after ${largest.value} with ${largest.token}`
        found.push({ check: "fenced", detail, holds: [largest.hold, write.hold] })
      }
    } else largest = write
  }
  return found
}

/** `until` observes a change within a second, if its process was not disturbed. */
const heard = ({ deletions, holds, known, name, run, versionOf }: Facts): ReadonlyArray<Anomaly> =>
  holds.filter(({ kind, outcome }) => kind === "ref until" && outcome === "timeout").flatMap((hold) => {
    const [read] = hold.told
    const base = read?.what[1] === name ? versionOf(String(read.what[2])) : undefined
    if (base === undefined) return []
    // A ref that is absent can have had a later version before the wait began.
    const isGone = base === 0 && deletions.some(({ from, to }) => from <= read!.at && to > hold.asked - 1_000_000)
    // A ref that was deleted had later versions before.
    const later = Array.from(known).find(([version, at]) =>
      version > base && at > hold.asked && at + 1_000_000 < hold.ended!
    )
    if (later === undefined || isGone || isDisturbed(run, hold.client, hold.asked, hold.ended!)) return []
    if (forgot(run, hold.asked, hold.ended!)) return []
    return [{ check: "missed", detail: `until has not heard of version ${later[0]}`, holds: [hold] }]
  })

/** A transaction writes its values with one version, and sees values of one moment. */
const whole = (left: Facts, right: Facts): ReadonlyArray<Anomaly> => {
  const { holds, run } = left
  const found: Array<Anomaly> = []
  const torn = (detail: string, hold: Hold, from: number, to: number) => {
    if (!forgot(run, from, to)) found.push({ check: "torn", detail, holds: [hold] })
  }
  for (const { from, hold, value } of left.writes.values()) {
    if (!right.writes.has(value)) continue
    const [one, other] = [left, right].map(({ versionOf }) => versionOf(value))
    if (one === other) continue
    const times = [left.known.get(one ?? 0), right.known.get(other ?? 0)].filter((at) => at !== undefined)
    if (one !== undefined && other !== undefined) {
      torn(`${value} has versions ${one} and ${other}`, hold, from, Math.max(...times, hold.ended ?? 0))
      continue
    }
    // A write that no process has seen must be absent from the unbroken part of what a subscriber saw.
    const [seen, unseen] = one === undefined ? [right, left] : [left, right]
    const write = unseen.writes.get(value)!
    write.to = Math.min(write.to, seen.known.get(seen.versionOf(value)!)!)
  }
  const isMoment = (one: Facts, version: number, other: Facts, beside: number): boolean =>
    Math.max(version, beside) < Math.min(nextOf(one, version), nextOf(other, beside))
  // What is absent may be so since Redis has forgotten it, however long ago that was. So may be a version that comes between.
  const sinceNext = (facts: Facts, version: number, asked: number): number =>
    version === 0 ? 0 : Math.min(asked, facts.known.get(nextOf(facts, version)) ?? asked)
  for (const hold of holds) {
    for (const { at, what: [word, name, value, third, fourth] } of hold.told) {
      const [mine, theirs] = name === left.name ? [left, right] : [right, left]
      if (word === "snapshot") {
        const [one, other] = [mine.versionOf(String(value)), theirs.versionOf(String(fourth))]
        if (one === undefined || other === undefined || isMoment(mine, one, theirs, other)) continue
        const since = Math.min(sinceNext(mine, one, hold.asked), sinceNext(theirs, other, hold.asked))
        torn(`${nameOf(mine, one)} and ${nameOf(theirs, other)} were never together`, hold, since, at)
      } else if (word === "beside") {
        const [base, version] = [mine.versionOf(String(third)), theirs.versionOf(String(value))]
        if (version === undefined || base === undefined || base < version && nextOf(mine, base) > version) continue
        // Redis can have forgotten it between the attempt and the write, or the write itself, which was then made again.
        const written = Math.max(at, theirs.known.get(version) ?? at, hold.ended ?? at)
        torn(
          `${nameOf(mine, base)} was not there at ${nameOf(theirs, version)}`,
          hold,
          sinceNext(mine, base, hold.asked),
          written
        )
      }
    }
  }
  return found
}

/** The checks of a group of refs. The first anomalies of each kind are enough. */
export const versioned = (holds: ReadonlyArray<Hold>, run: Run): ReadonlyArray<Anomaly> => {
  const words = new Set(["read", "saw", "writes"])
  const names = new Set(
    holds.flatMap(({ told }) => told.flatMap(({ what: [word, name] }) => words.has(String(word)) ? [String(name)] : []))
  )
  const all = [...names].map((name) => factsOf(holds, name, run))
  const [left, right] = all as [Facts, Facts]
  const both = all.length === 2 ? whole(left, right).slice(0, 5) : []
  const each = [storedOnce, phantoms, contiguous, increasing, linearizable, compared, happened, fenced, heard]
  return [...both, ...all.flatMap((facts) => each.flatMap((check) => check(facts).slice(0, 5))), ...caughtUp(holds)]
}
