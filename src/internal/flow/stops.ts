/** The runs that stop, as far as the conductors of this process have heard: what is not offered yet is not to be. */

import * as Effect from "effect/Effect"

// So many are remembered. Of others, their actors are asked.
const most = 1024

export class Stops {
  readonly #stopped = new Set<string>()
  readonly #waiting = new Map<string, Set<() => void>>()

  has(run: string): boolean {
    return this.#stopped.has(run)
  }

  /** What an actor has said of a run. One that has stopped can go on. */
  heard(run: string, isStopped: boolean): void {
    if (!isStopped) return void this.#stopped.delete(run)
    this.#stopped.add(run)
    if (this.#stopped.size > most) this.#stopped.delete(this.#stopped.values().next().value!)
    const waiting = this.#waiting.get(run)
    this.#waiting.delete(run)
    if (waiting !== undefined) { for (const resume of waiting) resume() }
  }

  /** Ends when an actor says from now on that the run stops. */
  of(run: string): Effect.Effect<void> {
    return Effect.callback((resume) => {
      const told = () => resume(Effect.void)
      let waiting = this.#waiting.get(run)
      if (waiting === undefined) this.#waiting.set(run, waiting = new Set())
      waiting.add(told)
      return Effect.sync(() => {
        waiting.delete(told)
        if (waiting.size === 0 && this.#waiting.get(run) === waiting) this.#waiting.delete(run)
      })
    })
  }
}
