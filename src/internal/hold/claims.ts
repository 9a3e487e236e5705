/** The claims of one channel: by their ids, and how many of them wait or observe. */

import type { Entry } from "./claim.ts"
import { Hold } from "./hold.ts"
import { Membership } from "./membership.ts"

const waits = (state: Entry["state"]): number => state === "asked" || state === "queued" ? 1 : 0

/** Whether it has been asked for, and what it comes to is not known yet. */
export const isWaiting = (entry: Entry): boolean => waits(entry.state) === 1

export class Claims {
  readonly #all = new Map<string, Entry>()
  #waiting = 0
  #observing = 0

  get size(): number {
    return this.#all.size
  }

  /** How many wait, and how many memberships have been joined. */
  get waiting(): number {
    return this.#waiting
  }

  get observing(): number {
    return this.#observing
  }

  get(id: string): Entry | undefined {
    return this.#all.get(id)
  }

  /** Not a copy. */
  values(): Iterable<Entry> {
    return this.#all.values()
  }

  add(entry: Entry): void {
    this.#all.set(entry.id, entry)
  }

  /** One that is done is not kept here any longer. */
  become(entry: Entry, state: Entry["state"]): void {
    this.#waiting += waits(state) - waits(entry.state)
    if (entry instanceof Membership) this.#observing += Number(state === "held") - Number(entry.state === "held")
    const before = entry.state
    entry.state = state
    if (state === "done" && before !== "done") this.remove(entry)
  }

  /** A hold that is lost stays held until it is told. */
  remove(entry: Entry): void {
    this.#all.delete(entry.id)
    if (entry instanceof Hold) entry.member?.dependents.delete(entry)
  }
}
