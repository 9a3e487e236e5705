/** What schedules have reached: what happened to which request, in which phase of the session that it was made in. */
import type { Process } from "../../src/internal/simulation/process.ts"
import { type Observer, verbsOf } from "../../src/internal/simulation/world.ts"

export class Coverage {
  readonly #counts = new Map<string, number>()
  readonly #phases = new Map<string, string>()
  // How many schedules of each workload have reached each pair.
  readonly #schedules = new Map<string, Map<string, number>>()

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

  /** Adds what was counted in a schedule of a workload, or of several. */
  add(schedule: Coverage, workload = ""): void {
    for (const [pair, count] of schedule.#counts) {
      this.#counts.set(pair, (this.#counts.get(pair) ?? 0) + count)
      const times = this.#schedules.get(pair) ?? new Map<string, number>()
      this.#schedules.set(pair, times.set(workload, (times.get(workload) ?? 0) + 1))
    }
  }

  /** How often each was reached, in order. */
  get counts(): ReadonlyArray<readonly [pair: string, count: number]> {
    return [...this.#counts].sort(([a], [b]) => a < b ? -1 : 1)
  }

  /** What so many schedules of one workload have reached. */
  reachedBy(schedules: number): ReadonlyArray<string> {
    return this.counts.flatMap(([pair]) => Math.max(...this.#schedules.get(pair)!.values()) >= schedules ? [pair] : [])
  }

  /** Which of these requests were not executed in so many schedules of one workload. */
  missing(verbs: Iterable<string>, schedules: number): ReadonlyArray<string> {
    const executed = new Set(this.reachedBy(schedules).flatMap((pair) => / is executed: (.*)$/.exec(pair)?.[1] ?? []))
    return [...verbs].filter((verb) => !executed.has(verb))
  }
}
