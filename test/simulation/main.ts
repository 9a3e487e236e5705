/**
 * Tries schedules of a simulation, and tells the first one that goes wrong as a short story.
 *
 *     npm run simulate -- [--seed 1] [--steps 300] [--only lock] [--fault flush] [--minutes 1] [--count 10] [--coverage]
 *     npm run simulate -- [--bugs] [--bug name]
 *     npm run simulate -- --reach
 *
 * Seeds go on from the first one until the minutes are over, or so many were tried. `--count 1` repeats one. `--only` and `--fault`
 * choose the workloads and the faults. `--bugs` checks the checks instead: each known bug must be found within a minute. `--coverage`
 * says what was reached: which requests were executed, answered and lost in which phase of their sessions. `--reach` writes what the
 * tests expect of that.
 */
import { Effect } from "effect"
import { createHash } from "node:crypto"
import * as fs from "node:fs"
import { tmpdir } from "node:os"
import * as path from "node:path"
import { parseArgs } from "node:util"
import { type Fault, faults } from "../../src/internal/simulation/faults.ts"
import { databases, type Machine } from "../../src/internal/simulation/machine.ts"
import { shrink } from "../../src/internal/simulation/shrink.ts"
import { bugs as usualBugs, copy, original, rareBugs } from "../torture/library.ts"
import { checkAmong, minutesOf, whole } from "../torture/options.ts"
import { workloads } from "../torture/workloads.ts"
import { Coverage } from "./coverage.ts"
import { type Library, load } from "./library.ts"
import { missing, reach, write } from "./reach.ts"
import { chosenBy, chosenOf, type Options, type Result, simulate } from "./schedule.ts"

const { values } = parseArgs({
  options: {
    seed: { type: "string" },
    steps: { type: "string", default: "300" },
    minutes: { type: "string", default: "1" },
    count: { type: "string" },
    only: { type: "string", multiple: true, default: [] },
    fault: { type: "string", multiple: true, default: [] },
    bugs: { type: "boolean", default: false },
    bug: { type: "string", multiple: true, default: [] },
    coverage: { type: "boolean", default: false },
    reach: { type: "boolean", default: false }
  }
})

const bugs = { ...usualBugs, ...rareBugs }

checkAmong("only", values.only, workloads.map(({ name }) => name))
checkAmong("fault", values.fault, faults)
checkAmong("bug", values.bug, Object.keys(bugs))
const first = whole("seed", values.seed) ?? Math.floor(Math.random() * 1e6)
const steps = whole("steps", values.steps)!
const count = whole("count", values.count) ?? Number.MAX_SAFE_INTEGER
const minutes = minutesOf(values.minutes)
const hunted = values.bugs && values.bug.length === 0 ? Object.keys(bugs) : values.bug

// Of one failure: how often a shorter schedule is tried.
const [shrinks, longestShrinking] = [150, 20_000]

interface Failure {
  readonly options: Options
  readonly result: Result
}

const reached = new Coverage()
const tally = { schedules: 0, steps: 0, millis: 0 }

const digest = (result: Result): string =>
  createHash("sha1").update(result.trace().join("\n")).digest("hex").slice(0, 12)

/** With a Redis of its own. */
const withMachine = <A>(library: Library, f: (machine: Machine) => Promise<A>): Promise<A> => {
  const { Redis } = library.lockstep
  return Effect.runPromise(
    Effect.flatMap(
      Redis.Redis,
      (redis) => Effect.promise(() => f(new library.Machine(library.connectionsOf(redis).commands)))
    ).pipe(
      Effect.provide(Redis.layerEmbedded())
    )
  )
}

/** Tries schedules until one is wrong, or the time is over. */
const search = (
  library: Library,
  { only, provoking, until }: {
    readonly only: ReadonlyArray<string>
    readonly provoking: ReadonlyArray<string>
    readonly until: number
  }
) => {
  let [next, found] = [first, undefined as Failure | undefined]
  const world = async (machine: Machine, database: number) => {
    while (found === undefined && next < first + count && performance.now() < until) {
      const coverage = values.coverage ? new Coverage() : undefined
      const seed = next++
      const options = { seed, only, coverage, ...chosenBy(seed, steps, provoking as ReadonlyArray<Fault>) }
      const result = await simulate(options, library, machine, database)
      if (coverage !== undefined) reached.add(coverage)
      tally.schedules++
      tally.steps += result.steps
      tally.millis += result.now
      if (count < 100) console.log(`seed ${options.seed}: ${result.steps} steps, ${digest(result)}`)
      if (result.anomalies.length === 0 || found !== undefined) continue
      found = { options, result }
      // Also if something ends the search for a shorter one.
      if (hunted.length === 0) console.log([`seed ${seed} goes wrong`, ...told(result)].join("\n"))
    }
  }
  return withMachine(library, async (machine) => {
    // In the time that Redis takes for one, the others go on.
    await Promise.all(Array.from({ length: databases }, (_, database) => world(machine, database)))
    return found === undefined || hunted.length > 0 ? found : await shortened(found, library, machine)
  })
}

const shortened = async (failure: Failure, library: Library, machine: Machine): Promise<Failure> => {
  const until = performance.now() + longestShrinking
  const checks = new Set(failure.result.anomalies.map(({ check }) => check))
  const best = await shrink(
    failure.result.course,
    async (course) => {
      const result = await simulate({ ...failure.options, course, steps: course.rounds.length }, library, machine, 0)
      return result.anomalies.some(({ check }) => checks.has(check)) ? result.course : undefined
    },
    shrinks,
    () => performance.now() > until
  )
  // Where no shorter schedule fails, it is the whole one, as its seed chooses.
  const options = { ...failure.options, ...best }
  return { options, result: await simulate({ ...options, verbose: true }, library, machine, 0) }
}

const told = ({ anomalies }: Result): ReadonlyArray<string> =>
  anomalies.slice(0, 5).map(({ check, detail }) => `${check}: ${detail}`)

// What is shorter than that can be copied from a log, in characters.
const short = 6000

/** What has happened, and what is wrong with it. */
const story = ({ options, result }: Failure): string => {
  const file = path.join(fs.mkdtempSync(path.join(tmpdir(), "lockstep-simulation-")), `seed-${options.seed}.json`)
  // With their names it stays the same when there are more of them.
  const only = chosenOf(options.only, options.seed).map(({ name }) => name)
  const schedule = JSON.stringify({ ...options, only })
  fs.writeFileSync(file, schedule)
  return [
    `${options.steps} steps of seed ${options.seed} go wrong, too:`,
    ...result.trace().slice(-400),
    ...told(result),
    ...schedule.length < short ? [schedule] : [],
    `The schedule is in ${file}: copy it to test/simulation/saved to repeat it with the tests.`
  ].join("\n")
}

const seconds = (since: number): number => (performance.now() - since) / 1000

const isWrong = (options: Options, library: Library): Promise<boolean> =>
  withMachine(library, async (machine) => (await simulate(options, library, machine, 0)).anomalies.length > 0)

const hunt = async (): Promise<boolean> => {
  const directory = fs.mkdtempSync(path.join(tmpdir(), "lockstep-simulation-"))
  const unchanged = await load(original)
  let missed = 0
  for (const name of hunted) {
    const began = performance.now()
    const { only = [] } = bugs[name]!
    const library = await load(copy(directory, name, bugs[name]!))
    const found = await search(library, {
      only: values.only.length > 0 ? values.only : only,
      // The faults of the others have the names that they have in the torture.
      provoking: values.fault.length > 0 ? values.fault : rareBugs[name]?.faults ?? [],
      until: began + 60_000
    })
    const took = seconds(began).toFixed(1)
    // An anomaly that is there without the bug says nothing about it.
    const isOlder = found !== undefined && await isWrong(found.options, unchanged)
    if (found === undefined || isOlder) missed++
    const what = found === undefined
      ? "NOT FOUND"
      : `${
        isOlder ? "NOT FOUND: also wrong without the bug" : "found"
      } after ${took} s, seed ${found.options.seed}, by ${found.result.anomalies[0]!.check}`
    console.log(`${name}: ${what}`)
  }
  fs.rmSync(directory, { recursive: true })
  return missed === 0
}

// Most errors of a simulation are its own faults.
Error.stackTraceLimit = 0

if (values.reach) {
  const library = await load(original)
  write(await withMachine(library, (machine) => reach(library, machine)))
  process.exit()
}

const began = performance.now()
let isFine: boolean
if (hunted.length > 0) isFine = await hunt()
else {
  console.log(`seed ${first}`)
  const found = await search(await load(original), {
    only: values.only,
    provoking: values.fault,
    until: began + minutes * 60_000
  })
  if (found !== undefined) console.log(story(found))
  isFine = found === undefined
}
console.log(
  `${tally.schedules} schedules and ${tally.steps} steps in ${seconds(began).toFixed(0)} s: ` +
    `${(tally.schedules / seconds(began)).toFixed(1)} schedules and ${
      (tally.steps / seconds(began)).toFixed(0)
    } steps a second, ` +
    `${(tally.millis / 1000).toFixed(0)} s simulated; ${isFine ? "fine" : "NOT fine"}`
)
if (values.coverage) {
  console.log(reached.counts.map(([pair, times]) => `${String(times).padStart(8)} ${pair}`).join("\n"))
  console.log(`${reached.counts.length} pairs; never executed: ${missing(reached).join(", ")}`)
}
process.exit(isFine ? 0 : 1)
