/**
 * The claims of one channel: by their ids, and how many of them wait or observe. A heartbeat looks at those that need something
 * only: there can be many thousands that are just held.
 */

import type { Session } from "../actor/session.ts"
import type { Entry } from "./claim.ts"
import { Hold } from "./hold.ts"
import { Membership } from "./membership.ts"
import { Table } from "./table.ts"

const waits = (state: Entry["state"]): number => state === "asked" || state === "queued" ? 1 : 0

const none: ReadonlyArray<Entry> = []

/** Whether it has been asked for, and what it comes to is not known yet. */
export const isWaiting = (entry: Entry): boolean => waits(entry.state) === 1

export class Claims {
  readonly #all = new Table<Entry>()
  readonly #idle = new Set<Entry>()
  readonly #verified = new Set<Entry>()
  #waiting = 0
  #observing = 0

  get size(): number {
    return this.#all.size
  }

  /** How many wait, and how many memberships have been joined. */
  get waiting(): number {
    return this.#waiting
  }

  /** One that waits in Redis, if any does. */
  get queued(): Entry | undefined {
    return this.#waiting === 0 ? undefined : this.#all.find(({ state }) => state === "queued")
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

  /** Those in the queue that have to ask again. */
  repeated(session: Session): ReadonlyArray<Entry> {
    if (this.#waiting === 0) return none
    return this.#all.filter((entry) => entry.again && entry.state === "queued" && entry.session === session)
  }

  /** Those whose claims are to be verified once in a lease. */
  verified(): ReadonlyArray<Entry> {
    return [...this.#verified]
  }

  /** Those that have no session, in the order in which they were made. */
  idle(): ReadonlyArray<Entry> {
    if (this.#idle.size === 0) return none
    return [...this.#idle].sort(({ id: a }, { id: b }) => a.length - b.length || (a < b ? -1 : 1))
  }

  add(entry: Entry): void {
    this.#all.add(entry)
    if (entry.claim.verified === true) this.#verified.add(entry)
  }

  /** One that is done is not kept here any longer. */
  become(entry: Entry, state: Entry["state"]): void {
    this.#waiting += waits(state) - waits(entry.state)
    if (entry instanceof Membership) this.#observing += Number(state === "held") - Number(entry.state === "held")
    const before = entry.state
    entry.state = state
    if (state === "idle") this.#idle.add(entry)
    else if (before === "idle" && this.#idle.size > 0) this.#idle.delete(entry)
    if (state === "done" && before !== "done") this.remove(entry)
  }

  /** A hold that is lost stays held until its program is notified. */
  remove(entry: Entry): void {
    this.#all.delete(entry)
    if (entry.claim.verified === true) this.#verified.delete(entry)
    if (entry instanceof Hold) entry.member?.dependents.delete(entry)
  }
}
