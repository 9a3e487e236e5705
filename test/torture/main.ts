/**
 * Runs real processes against real Redis deployments while breaking them, and checks what they saw.
 *
 *     npm run torture -- [--minutes 5] [--seed 42] [--only lock] [--deployment cluster] [--fault fail-over]
 *         [--round 7] [--bugs] [--bug name]
 *
 * Rounds go on until the minutes are over, one deployment after the other. `--round` repeats one round of a seed: the same
 * choices, though not the same instants. `--bugs` checks the checks instead: each known bug must be found within a minute.
 */
import { Cause, Effect, Exit } from "effect"
import * as fs from "node:fs"
import { availableParallelism, tmpdir } from "node:os"
import * as path from "node:path"
import { parseArgs } from "node:util"
import type { Anomaly } from "./checks.ts"
import { type Name, names } from "./deployments.ts"
import { faults } from "./faults.ts"
import { describe } from "./history.ts"
import { bugs } from "./library.ts"
import { type Options, type Report, round } from "./round.ts"
import { workloads } from "./workloads.ts"

const { values } = parseArgs({
  options: {
    minutes: { type: "string", default: "5" },
    seed: { type: "string" },
    only: { type: "string", multiple: true, default: [] },
    deployment: { type: "string", multiple: true, default: [] },
    fault: { type: "string", multiple: true, default: [] },
    round: { type: "string" },
    bugs: { type: "boolean", default: false },
    bug: { type: "string", multiple: true, default: [] }
  }
})

const stop = (message: string): never => {
  console.error(message)
  process.exit(2)
}

const minutes = Number(values.minutes)
if (!(minutes > 0)) stop("--minutes must be a number greater than zero")
const seed = values.seed === undefined ? Math.floor(Math.random() * 1e6) : Number(values.seed)
if (!Number.isSafeInteger(seed) || seed < 0) stop("--seed must be a whole number")
for (const name of values.only) {
  if (!workloads.some((workload) => workload.name === name)) {
    stop(`--only must be one of ${workloads.map(({ name }) => name).join(", ")}`)
  }
}
const deployments = (values.deployment.length === 0 ? names : values.deployment) as ReadonlyArray<Name>
for (const name of deployments) if (!names.includes(name)) stop(`--deployment must be one of ${names.join(", ")}`)
for (const name of values.fault) {
  if (!faults.some((fault) => fault.name === name)) {
    stop(`--fault must be one of ${faults.map(({ name }) => name).join(", ")}`)
  }
}
const hunted = values.bugs ? Object.keys(bugs) : values.bug
for (const name of hunted) if (bugs[name] === undefined) stop(`--bug must be one of ${Object.keys(bugs).join(", ")}`)

const seconds = (micros: number): string => (micros / 1e6).toFixed(3)

const counted = (items: ReadonlyArray<string>): string => {
  const counts = new Map<string, number>()
  for (const item of items) counts.set(item, (counts.get(item) ?? 0) + 1)
  return [...counts].sort(([, a], [, b]) => b - a).map(([item, count]) => `${item} ${count}`).join(", ")
}

/** Everything that one needs to look into it. */
const explain = (report: Report, found: ReadonlyArray<Anomaly>, again: string): string => {
  const folder = fs.mkdtempSync(path.join(tmpdir(), "lockstep-torture-"))
  for (const [name, events] of report.histories) {
    fs.writeFileSync(path.join(folder, `${name}.jsonl`), events.map((event) => `${JSON.stringify(event)}\n`).join(""))
  }
  if (report.redis !== undefined) fs.writeFileSync(path.join(folder, "redis"), report.redis)
  const { origin } = report
  const schedule = [...report.injected].sort((a, b) => a.from - b.from).map(({ client, failure, fault, from, to }) =>
    `  ${seconds(from - origin)} to ${seconds(to - origin)} s  ${fault.name}${client === "" ? "" : ` of ${client}`}${
      failure === undefined ? "" : `  (could not be done: ${failure})`
    }`
  )
  const anomalies = found.slice(0, 5).flatMap(({ check, detail, holds }) => [
    `${check}: ${detail}`,
    ...holds.map((hold) => `  ${describe(hold, origin)}`)
  ])
  return [
    `${found.length} anomalies; the first:`,
    ...anomalies,
    "faults:",
    ...schedule,
    `histories: ${folder}`,
    `again: ${again}`
  ].join("\n")
}

const attempt = async (options: Options): Promise<Report> => {
  const exit = await Effect.runPromiseExit(Effect.scoped(round(options)))
  if (Exit.isSuccess(exit)) return exit.value
  throw new Error(`the harness failed: ${Cause.pretty(exit.cause)}`)
}

/** Looks for one bug until it shows. */
const hunt = async (name: string): Promise<boolean> => {
  const began = performance.now()
  for (let at = 0; performance.now() - began < 60_000; at++) {
    const report = await attempt({
      seed: seed + at,
      deployment: "standalone",
      only: values.only,
      millis: 8000,
      bug: bugs[name],
      faults: bugs[name]!.faults,
      long: bugs[name]!.long
    })
    if (report.anomalies.length === 0) continue
    const took = ((performance.now() - began) / 1000).toFixed(0)
    console.log(`${name}: found after ${took} s by ${counted(report.anomalies.map(({ check }) => check))}`)
    return true
  }
  console.log(`${name}: NOT FOUND`)
  return false
}

if (hunted.length > 0) {
  let missed = 0
  for (const name of hunted) if (!await hunt(name)) missed++
  console.log(
    missed === 0 ? `All ${hunted.length} bugs were found.` : `${missed} of ${hunted.length} bugs were missed.`
  )
  process.exit(missed === 0 ? 0 : 1)
}

console.log(`seed ${seed}, ${minutes} minutes, ${availableParallelism()} cores, deployments: ${deployments.join(", ")}`)
const began = performance.now()
const totals = { rounds: 0, holds: 0, granted: 0, failed: 0 }
const injected: Array<string> = []
const reasons: Array<string> = []
const interrupted = new Map<string, Array<number>>()
const exposures: Array<number> = []
let undecided = 0
const first = values.round === undefined ? 0 : Number(values.round)
for (let at = first; values.round === undefined ? performance.now() - began < minutes * 60_000 : at === first; at++) {
  const deployment = deployments[at % deployments.length]!
  const started = performance.now()
  const long = deployment === "sentinel" || deployment === "cluster"
  const report = await attempt({
    seed: seed * 1000 + at,
    deployment,
    only: values.only,
    faults: values.fault.length === 0 ? undefined : values.fault,
    millis: long ? 14_000 : 10_000
  })
  const granted = report.holds.filter(({ entered }) => entered !== undefined).length
  totals.rounds++
  totals.holds += report.holds.length
  totals.granted += granted
  injected.push(...report.injected.map(({ fault }) => fault.name))
  reasons.push(...report.lost)
  exposures.push(...report.exposures)
  undecided += report.undecided
  for (const [fault, after] of report.interrupted) interrupted.set(fault, [...interrupted.get(fault) ?? [], after])
  const undone = report.injected.filter(({ failure }) => failure !== undefined)
  const faithful = !report.injected.some(({ fault }) => fault.forgets === true)
  console.log(
    `round ${at}, ${deployment}${
      faithful ? "" : " (forgets)"
    }: ${report.clients} clients, ${granted} of ${report.holds.length}` +
      ` granted, ${report.injected.length} faults${
        undone.length === 0
          ? ""
          : ` (${undone.length} could not be done: ${
            undone.map(({ failure, fault }) => `${fault.name}: ${failure}`).join("; ")
          })`
      }, ${report.lost.length} sessions lost,` +
      ` ${((performance.now() - started) / 1000).toFixed(0)} s: ${
        report.anomalies.length === 0 ? "fine" : `${report.anomalies.length} ANOMALIES`
      }`
  )
  if (report.anomalies.length > 0) {
    totals.failed++
    const only = values.only.map((name) => ` --only ${name}`).join("")
    const where = [
      ...values.deployment.map((name) => ` --deployment ${name}`),
      ...values.fault.map((name) => ` --fault ${JSON.stringify(name)}`)
    ].join("")
    console.log(explain(report, report.anomalies, `npm run torture -- --seed ${seed} --round ${at}${only}${where}`))
  }
}
console.log(
  [
    "",
    `${totals.rounds} rounds in ${
      ((performance.now() - began) / 60_000).toFixed(1)
    } minutes, ${totals.failed} with anomalies`,
    `${totals.granted} of ${totals.holds} requests granted`,
    `faults: ${injected.length} (${counted(injected)})`,
    `sessions lost: ${reasons.length} (${counted(reasons)})`,
    `expected: ${exposures.length} holders ran on beside a new one after Redis had forgotten them${
      exposures.length === 0 ? "" : `, for at most ${(Math.max(...exposures) / 1000).toFixed(0)} ms`
    }`,
    ...Array.from(interrupted, ([fault, times]) => {
      const sorted = [...times].sort((a, b) => a - b)
      const [middle, last] = [sorted[sorted.length >> 1]!, sorted.at(-1)!].map((time) => (time / 1000).toFixed(0))
      return `expected: ${times.length} holders lost their leases around ${fault}; their last step was ${middle} ms after its beginning in the median, ${last} ms at most`
    }),
    `histories too entangled to be searched: ${undecided}`
  ].join("\n")
)
process.exit(totals.failed === 0 ? 0 : 1)
