/** What schedules have reached: what happened to which request, in which phase of the session that it was made in. */
import * as fs from "node:fs"
import type { Process } from "../../src/internal/simulation/process.ts"
import { type Observer, verbsOf } from "../../src/internal/simulation/world.ts"

export class Coverage {
  readonly #counts = new Map<string, number>()
  readonly #phases = new Map<string, string>()
  readonly #schedules = new Map<string, number>()

  /** A session of a process has entered another phase. */
  entered(process: Process, partition: number, phase: string): void {
    this.#phases.set(`${process.name}/${partition}`, phase)
  }

  readonly observe: Observer = (moment, order, process) => {
    const partition = order.is === "call" ? Number(/:(\d+)\}/.exec(order.call.key)?.[1]) : 0
    const phase = process === undefined ? "gone" : this.#phases.get(`${process.name}/${partition}`) ?? "closed"
    for (const verb of new Set(verbsOf(order))) {
      const pair = `${phase}, ${moment}: ${verb}`
      this.#counts.set(pair, (this.#counts.get(pair) ?? 0) + 1)
    }
  }

  /** Adds what was counted in a schedule. */
  add(schedule: Coverage): void {
    for (const [pair, count] of schedule.#counts) {
      this.#counts.set(pair, (this.#counts.get(pair) ?? 0) + count)
      this.#schedules.set(pair, (this.#schedules.get(pair) ?? 0) + 1)
    }
  }

  /** How often each was reached, in order. */
  get counts(): ReadonlyArray<readonly [pair: string, count: number]> {
    return [...this.#counts].sort(([a], [b]) => a < b ? -1 : 1)
  }

  /** What so many schedules have reached. */
  reachedBy(schedules: number): ReadonlyArray<string> {
    return this.counts.flatMap(([pair]) => this.#schedules.get(pair)! >= schedules ? [pair] : [])
  }

  /** Which of these requests were never executed. */
  missing(verbs: Iterable<string>): ReadonlyArray<string> {
    const executed = new Set(this.counts.flatMap(([pair]) => / is executed: (.*)$/.exec(pair)?.[1] ?? []))
    return [...verbs].filter((verb) => !executed.has(verb))
  }
}

const file = new URL("./reached.json", import.meta.url)

/** What schedules of these seeds reach, many of them each. Another order of events must not change that. */
export const usual = {
  seed: 1,
  count: 48,
  many: 8,
  read: (): ReadonlyArray<string> => JSON.parse(fs.readFileSync(file, "utf8")),
  write: (coverage: Coverage): void => {
    fs.writeFileSync(file, `${JSON.stringify(coverage.reachedBy(usual.many), null, 2)}\n`)
  }
}
