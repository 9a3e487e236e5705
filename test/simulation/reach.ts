/** What schedules of each workload by itself reach, with a few seeds. Another order of events must not change that. */
import * as fs from "node:fs"
import { replies } from "../../src/internal/actor/lua.ts"
import { databases, type Machine } from "../../src/internal/simulation/machine.ts"
import { workloads } from "../torture/workloads.ts"
import { Coverage } from "./coverage.ts"
import type { Library } from "./library.ts"
import { chosenBy, simulate } from "./schedule.ts"

const seeds = [1, 2, 3, 4, 5, 6]

// If so many seeds of a workload reach a pair, some seed always will.
const many = 4

const file = new URL("./reached.json", import.meta.url)

interface Expected {
  readonly pairs: ReadonlyArray<string>
  /** Requests that these schedules may not reach. */
  readonly rare: ReadonlyArray<string>
}

export const expected = (): Expected => JSON.parse(fs.readFileSync(file, "utf8"))

/** Requests that were never executed, or by fewer seeds of each workload than that. */
export const missing = (reached: Coverage, least = 1): ReadonlyArray<string> =>
  reached.missing(Object.keys(replies), least)

export const write = (reached: Coverage): void => {
  const found: Expected = { pairs: reached.reachedBy(many), rare: missing(reached, many) }
  fs.writeFileSync(file, `${JSON.stringify(found, null, 2)}\n`)
}

export const reach = async (library: Library, machine: Machine): Promise<Coverage> => {
  const reached = new Coverage()
  const schedules = workloads.flatMap(({ name }) => seeds.map((seed) => ({ name, seed })))
  const world = async (database: number) => {
    for (let next = schedules.pop(); next !== undefined; next = schedules.pop()) {
      const { name, seed } = next
      const coverage = new Coverage()
      const options = { seed, only: [name], coverage, ...chosenBy(seed, 300) }
      const [anomaly] = (await simulate(options, library, machine, database)).anomalies
      if (anomaly !== undefined) {
        throw new Error(`seed ${seed} of ${name} goes wrong: ${anomaly.check}: ${anomaly.detail}`)
      }
      reached.add(coverage, name)
    }
  }
  await Promise.all(Array.from({ length: databases }, (_, database) => world(database)))
  return reached
}
