/**
 * Runs real processes against real Redis deployments while breaking them, and checks what they saw.
 *
 *     npm run torture -- [--minutes 5] [--seed 42] [--only lock] [--deployment cluster] [--fault fail-over]
 *         [--round 7] [--bugs] [--bug name]
 *
 * Rounds go on until the minutes are over, one deployment after the other. `--round` repeats one round of a seed: the same
 * choices, though not the same instants. `--bugs` checks the checks instead: each known bug must be found within a minute,
 * or as many as are given.
 */
import { Cause, Effect, Exit } from "effect"
import * as fs from "node:fs"
import { availableParallelism, tmpdir } from "node:os"
import * as path from "node:path"
import { parseArgs } from "node:util"
import { type Name, names } from "./deployments.ts"
import { faults } from "./faults.ts"
import { describe } from "./history.ts"
import { bugs as usual, rareBugs } from "./library.ts"
import { checkAmong, minutesOf, whole } from "./options.ts"
import { type Options, type Report, round } from "./round.ts"
import { workloads } from "./workloads.ts"

const { values } = parseArgs({
  options: {
    minutes: { type: "string" },
    seed: { type: "string" },
    only: { type: "string", multiple: true, default: [] },
    deployment: { type: "string", multiple: true, default: [] },
    fault: { type: "string", multiple: true, default: [] },
    round: { type: "string" },
    bugs: { type: "boolean", default: false },
    bug: { type: "string", multiple: true, default: [] }
  }
})

const minutes = minutesOf(values.minutes ?? (values.bugs || values.bug.length > 0 ? "1" : "5"))
const seed = whole("seed", values.seed) ?? Math.floor(Math.random() * 1e6)
const repeated = whole("round", values.round)
checkAmong("only", values.only, workloads.map(({ name }) => name))
checkAmong("deployment", values.deployment, names)
checkAmong("fault", values.fault, faults.map(({ name }) => name))
const bugs = { ...usual, ...rareBugs }
checkAmong("bug", values.bug, Object.keys(bugs))
const deployments = values.deployment.length === 0 ? names : values.deployment as ReadonlyArray<Name>
const hunted = values.bugs && values.bug.length === 0 ? Object.keys(usual) : values.bug

const seconds = (micros: number): string => (micros / 1e6).toFixed(3)

const millis = (micros: number): string => `${(micros / 1000).toFixed(0)} ms`

const since = (began: number, unit: number): number => (performance.now() - began) / unit

const counted = (items: ReadonlyArray<string>): string => {
  const counts = new Map<string, number>()
  for (const item of items) counts.set(item, (counts.get(item) ?? 0) + 1)
  return [...counts].sort(([, a], [, b]) => b - a).map(([item, count]) => `${item} ${count}`).join(", ")
}

const attempt = async (options: Options): Promise<Report> => {
  const exit = await Effect.runPromiseExit(Effect.scoped(round(options)))
  if (Exit.isSuccess(exit)) return exit.value
  throw new Error(`the harness failed: ${Cause.pretty(exit.cause)}`)
}

/** Looks for one bug until it shows. */
const hunt = async (name: string): Promise<boolean> => {
  const bug = bugs[name]!
  const began = performance.now()
  for (let at = 0; since(began, 60_000) < minutes; at++) {
    const { faults, long, only } = bug
    const { anomalies } = await attempt({
      seed: seed + at,
      deployment: "standalone",
      only: values.only.length > 0 ? values.only : only ?? [],
      millis: 8000,
      bug,
      faults,
      long
    })
    if (anomalies.length === 0) continue
    const found = counted(anomalies.map(({ check }) => check))
    console.log(`${name}: found after ${since(began, 1000).toFixed(0)} s by ${found}`)
    return true
  }
  console.log(`${name}: NOT FOUND`)
  return false
}

const huntAll = async (): Promise<boolean> => {
  let missed = 0
  for (const name of hunted) if (!await hunt(name)) missed++
  const all = hunted.length
  console.log(missed === 0 ? `All ${all} bugs were found.` : `${missed} of ${all} bugs were missed.`)
  return missed === 0
}

/** Everything that one needs to look into it. */
const explain = ({ anomalies, histories, injected, origin, redis }: Report, at: number): string => {
  const folder = fs.mkdtempSync(path.join(tmpdir(), "lockstep-torture-"))
  for (const [name, events] of histories) {
    fs.writeFileSync(path.join(folder, `${name}.jsonl`), events.map((event) => `${JSON.stringify(event)}\n`).join(""))
  }
  if (redis !== undefined) fs.writeFileSync(path.join(folder, "redis"), redis)
  const schedule = [...injected].sort((a, b) => a.from - b.from).map(({ client, failure, fault, from, to }) => {
    const where = client === "" ? "" : ` of ${client}`
    const undone = failure === undefined ? "" : `  (could not be done: ${failure})`
    return `  ${seconds(from - origin)} to ${seconds(to - origin)} s  ${fault.name}${where}${undone}`
  })
  const again = [
    `npm run torture -- --seed ${seed} --round ${at}`,
    ...values.only.map((name) => `--only ${name}`),
    ...values.deployment.map((name) => `--deployment ${name}`),
    ...values.fault.map((name) => `--fault ${JSON.stringify(name)}`)
  ]
  return [
    `${anomalies.length} anomalies; the first:`,
    ...anomalies.slice(0, 5).flatMap(({ check, detail, holds }) => [
      `${check}: ${detail}`,
      ...holds.map((hold) => `  ${describe(hold, origin)}`)
    ]),
    "faults:",
    ...schedule,
    `histories: ${folder}`,
    `again: ${again.join(" ")}`
  ].join("\n")
}

const granted = ({ holds }: Report): number => holds.filter(({ entered }) => entered !== undefined).length

const line = (report: Report, took: string): string => {
  const { anomalies, clients, holds, injected, lost } = report
  const forgets = injected.some(({ fault }) => fault.forgets === true) ? " (forgets)" : ""
  const undone = injected.flatMap(({ failure, fault }) => failure === undefined ? [] : [`${fault.name}: ${failure}`])
  const failed = undone.length === 0 ? "" : ` (${undone.length} could not be done: ${undone.join("; ")})`
  return `${forgets}: ${clients} clients, ${granted(report)} of ${holds.length} granted, ` +
    `${injected.length} faults${failed}, ${lost.length} sessions lost, ${took} s: ` +
    (anomalies.length === 0 ? "fine" : `${anomalies.length} ANOMALIES`)
}

const totals = {
  rounds: 0,
  holds: 0,
  granted: 0,
  failed: 0,
  faults: [] as Array<string>,
  losses: [] as Array<string>,
  interrupted: new Map<string, Array<number>>(),
  exposures: [] as Array<number>,
  undecided: 0
}

const add = (report: Report): void => {
  totals.rounds++
  totals.holds += report.holds.length
  totals.granted += granted(report)
  if (report.anomalies.length > 0) totals.failed++
  totals.faults.push(...report.injected.map(({ fault }) => fault.name))
  totals.losses.push(...report.lost)
  for (const [fault, after] of report.interrupted) {
    totals.interrupted.set(fault, [...totals.interrupted.get(fault) ?? [], after])
  }
  totals.exposures.push(...report.exposures)
  totals.undecided += report.undecided
}

const summary = (began: number): string => {
  const { exposures, failed, faults, interrupted, losses, undecided } = totals
  const most = exposures.length === 0 ? "" : `, for at most ${millis(Math.max(...exposures))}`
  return [
    "",
    `${totals.rounds} rounds in ${since(began, 60_000).toFixed(1)} minutes, ${failed} with anomalies`,
    `${totals.granted} of ${totals.holds} requests granted`,
    `faults: ${faults.length} (${counted(faults)})`,
    `sessions lost: ${losses.length} (${counted(losses)})`,
    `expected: ${exposures.length} holders ran on beside a new one after Redis had forgotten them${most}`,
    ...Array.from(interrupted, ([fault, times]) => {
      const sorted = [...times].sort((a, b) => a - b)
      const [middle, last] = [millis(sorted[sorted.length >> 1]!), millis(sorted.at(-1)!)]
      return `expected: ${times.length} holders lost their leases around ${fault}; ` +
        `their last step was ${middle} after its beginning in the median, ${last} at most`
    }),
    `histories too entangled to be searched: ${undecided}`
  ].join("\n")
}

/** Round after round until the time is over, or the one that is repeated. */
const torture = async (): Promise<boolean> => {
  console.log(
    `seed ${seed}, ${minutes} minutes, ${availableParallelism()} cores, deployments: ${deployments.join(", ")}`
  )
  const began = performance.now()
  for (let at = repeated ?? 0; repeated === undefined ? since(began, 60_000) < minutes : at === repeated; at++) {
    const started = performance.now()
    const deployment = deployments[at % deployments.length]!
    const report = await attempt({
      seed: seed * 1000 + at,
      deployment,
      only: values.only,
      faults: values.fault.length === 0 ? undefined : values.fault,
      // A fail-over takes some seconds of it.
      millis: deployment === "sentinel" || deployment === "cluster" ? 14_000 : 10_000
    })
    add(report)
    console.log(`round ${at}, ${deployment}${line(report, since(started, 1000).toFixed(0))}`)
    if (report.anomalies.length > 0) console.log(explain(report, at))
  }
  console.log(summary(began))
  return totals.failed === 0
}

process.exit(await (hunted.length > 0 ? huntAll() : torture()) ? 0 : 1)
