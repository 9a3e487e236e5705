/** A waiter that keeps its place in a queue is never behind one that came later. */
import type { Waiters } from "./waiters.ts"

/** Remembers the queues of a simulation, and compares. */
export class Queues {
  #before: Waiters = new Map()

  overtaken(queues: Waiters): string | undefined {
    const before = this.#before
    this.#before = queues
    for (const [key, queue] of queues) {
      const former = before.get(key)?.filter((claim) => queue.includes(claim)) ?? []
      const present = queue.filter((claim) => former.includes(claim))
      const at = present.findIndex((claim, at) => claim !== former[at])
      if (at >= 0) return `in the queue of ${key}, ${present[at]} has overtaken ${former[at]}`
    }
    return undefined
  }
}
