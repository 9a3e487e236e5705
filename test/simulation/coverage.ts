/** What schedules have reached: what happened to which request, in which phase of the session that it was made in. */
import type { Process } from "../../src/internal/simulation/process.ts"
import { type Observer, verbsOf } from "../../src/internal/simulation/world.ts"

export class Coverage {
  readonly #counts = new Map<string, number>()
  readonly #phases = new Map<string, string>()

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

  /** Adds what another one has counted. */
  add(other: Coverage): void {
    for (const [pair, count] of other.#counts) this.#counts.set(pair, (this.#counts.get(pair) ?? 0) + count)
  }

  /** How often each was reached, in order. */
  get counts(): ReadonlyArray<readonly [pair: string, count: number]> {
    return [...this.#counts].sort(([a], [b]) => a < b ? -1 : 1)
  }

  /** Which of these requests were never executed. */
  missing(verbs: Iterable<string>): ReadonlyArray<string> {
    const executed = new Set(this.counts.flatMap(([pair]) => / is executed: (.*)$/.exec(pair)?.[1] ?? []))
    return [...verbs].filter((verb) => !executed.has(verb))
  }
}
