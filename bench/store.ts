/** The latest run of each case, from which RESULTS.md is written: a run of some cases replaces only theirs. */
import { readFileSync, writeFileSync } from "node:fs"
import type { Run } from "./figures.ts"
import { results } from "./report.ts"

const kept = new URL("figures.json", import.meta.url)

const read = (): ReadonlyArray<Run> =>
  JSON.parse(readFileSync(kept, "utf8"), (_, value) => value === "Infinity" ? Number.POSITIVE_INFINITY : value)

// More digits than four are noise.
const brief = (_: string, value: unknown): unknown =>
  value === Number.POSITIVE_INFINITY ? "Infinity" : typeof value === "number" ? Number(value.toPrecision(4)) : value

// A row on a line, for those who read what a run has changed.
const encode = ({ rows, ...rest }: Run): string =>
  `${JSON.stringify(rest).slice(0, -1)},"rows":[\n${rows.map((row) => JSON.stringify(row, brief)).join(",\n")}\n]}`

/** Of so many cases. */
export const keep = (run: Run, cases: number): void => {
  const runs = [...read().filter((other) => other.case !== run.case), run].sort((a, b) => a.case - b.case)
  writeFileSync(kept, `[${runs.map(encode).join(",\n")}]\n`)
  writeFileSync(new URL("RESULTS.md", import.meta.url), results(runs, cases))
}
