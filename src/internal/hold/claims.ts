/** The claims of one channel: by their ids, and how many of them wait or observe. */

import type { Entry } from "./claim.ts"
import { Hold } from "./hold.ts"
import { Membership } from "./membership.ts"
import { Table } from "./table.ts"

const waits = (state: Entry["state"]): number => state === "asked" || state === "queued" ? 1 : 0

/** Whether it has been asked for, and what it comes to is not known yet. */
export const isWaiting = (entry: Entry): boolean => waits(entry.state) === 1

export class Claims {
  readonly #all = new Table<Entry>()
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

  /** A copy, in no order. */
  values(): Array<Entry> {
    return this.#all.values()
  }

  /** A copy of those that fit, in no order. */
  filter(fits: (entry: Entry) => boolean): Array<Entry> {
    return this.#all.filter(fits)
  }

  /** Those that have no session, in the order in which they were made. */
  idle(): Array<Entry> {
    return this.#all.filter(({ state }) => state === "idle")
      .sort(({ id: a }, { id: b }) => a.length - b.length || (a < b ? -1 : 1))
  }

  add(entry: Entry): void {
    this.#all.add(entry)
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
    this.#all.delete(entry)
    if (entry instanceof Hold) entry.member?.dependents.delete(entry)
  }
}
