/**
 * Compares lockstep with what one would use otherwise, side by side in one run.
 *
 *     node bench/main.ts [--quick] [--rounds 3] [--raw] [--write] [--cpu-prof] [case ...]
 *
 * `--quick` shortens everything, `--rounds` is how often each case is measured at most, `--raw` leaves out other libraries, which need not be installed then. `--write` writes
 * RESULTS.md whenever a case has ended, with what it knows of the others;
 * `--cpu-prof` leaves profiles of lockstep's processes in cases 1 to 4, 8 to 10 and 13 to 18 in the current directory. Cases
 * are numbers from 1 to 26; without any, all of them run.
 */
import { readFileSync } from "node:fs"
import { createRequire } from "node:module"
import { dirname, join } from "node:path"
import { parseArgs } from "node:util"
import { cases as ofLocks } from "./cases.ts"
import { coordination } from "./coordination.ts"
import { type Measured, measured, packages } from "./figures.ts"
import { flows } from "./flows.ts"
import { describe, findCores } from "./machine.ts"
import { queues } from "./queues.ts"
import { refs } from "./refs.ts"
import { tables } from "./report.ts"
import { stealing } from "./stealing.ts"
import { keep } from "./store.ts"
import { topics } from "./topics.ts"

const { positionals, values } = parseArgs({
  allowPositionals: true,
  options: {
    quick: { type: "boolean", default: false },
    rounds: { type: "string" },
    raw: { type: "boolean", default: false },
    write: { type: "boolean", default: false },
    "cpu-prof": { type: "boolean", default: false }
  }
})
const most = values.rounds === undefined ? Number.POSITIVE_INFINITY : Number(values.rounds)
if (!(most >= 1)) throw new RangeError("--rounds must be a number from 1 on")
const cases = [...ofLocks, ...coordination, ...refs, ...topics, ...queues, ...flows, ...stealing]
if (values.raw && values.write) throw new RangeError("RESULTS.md has all contestants: --write does not go with --raw")
const wanted = positionals.length === 0 ? cases.map((_, at) => at + 1) : positionals.map(Number)
for (const at of wanted) if (cases[at - 1] === undefined) throw new RangeError(`there is no case ${at}`)

/** The version of a package as it is seen from a file. */
const versionOf = (name: string, from: string): string => {
  let folder = dirname(createRequire(from).resolve(name))
  for (;;) {
    try {
      const found = JSON.parse(readFileSync(join(folder, "package.json"), "utf8")) as {
        name?: string
        version?: string
      }
      if (found.name === name && found.version !== undefined) return found.version.replace(/^v/, "")
    } catch {
      // Further up.
    }
    if (folder === dirname(folder)) return "unknown"
    folder = dirname(folder)
  }
}

const library = new URL("../package.json", import.meta.url)
const versions: Array<readonly [string, string]> = [
  ["Node", process.versions.node],
  ["lockstep", (JSON.parse(readFileSync(library, "utf8")) as { version: string }).version],
  ["effect", versionOf("effect", library.pathname)],
  ["ioredis", versionOf("ioredis", library.pathname)],
  ...values.raw
    ? []
    : packages.map((name) => [name, versionOf(name, import.meta.url)] as const)
]

const named = (versions: ReadonlyArray<readonly [name: string, version: string]>): string =>
  versions.map(([name, version]) => `${name} ${version}`).join(", ")

const cores = findCores()
console.log(`${describe()}\n${cores.description}`)

const rows: Array<Measured> = []
for (const at of wanted) {
  const { run, title } = cases[at - 1]!
  const started = performance.now()
  const found = await run({
    cores,
    quick: values.quick,
    rounds: most,
    raw: values.raw,
    nodeOptions: values["cpu-prof"] ? ["--cpu-prof"] : [],
    progress: (text) => console.error(`case ${at}, ${title}, ${text}`),
    noteServer: (version) => {
      const [name, number] = version.split(" ") as [string, string]
      if (!versions.some(([known]) => known === name)) versions.splice(1, 0, [name, number])
    }
  })
  rows.push(...found.map(measured))
  if (!values.write) continue
  keep({
    case: at,
    date: new Date().toISOString().slice(0, 10),
    seconds: Math.round((performance.now() - started) / 1000),
    quick: values.quick,
    about: `${describe()}; ${cores.description}; ${named(versions)}${most < 5 ? `; ${most} rounds` : ""}`,
    rows: found.map(measured)
  }, cases.length)
}

console.log(`\n${tables(rows)}\n`)
console.log(named(versions))
console.log("In brackets: lockstep's figure divided by this one.")
const missed = rows.filter((row) => row.floor?.met === false)
for (const row of missed) console.log(`NOT met: ${row.what}: ${row.measure} ${row.floor!.text}`)
process.exitCode = missed.length === 0 ? 0 : 1
