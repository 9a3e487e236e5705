/** A share in a resource for as long as a scope is open: it keeps the resource alive, and observes its changes. */

import { type Claim, Entry, type Keeper } from "./claim.ts"
import { Table } from "./table.ts"

/** The receiver of a membership's events. */
export interface Observer {
  /** The state at joining, every change, and the state whenever a change may have been missed. */
  readonly observe: (state: ReadonlyArray<unknown>) => void
  /** The session was lost: the membership is reaped, and joins again with the next session. */
  readonly lost?: (() => void) | undefined
  /** Whether something goes on that the loss has interrupted: it has the margin to end before others may go on. */
  readonly isEnding?: (() => boolean) | undefined
  /** The coordinator was closed: there is no next session. */
  readonly closed?: (() => void) | undefined
  /** Fulfilled when that has ended what went on: until then, or for the margin, others may not go on. */
  readonly ended?: (() => Promise<void>) | undefined
}

export class Membership extends Entry {
  /** It has been joined once: from then on it is joined again by itself. */
  joined = false
  readonly observer: Observer
  /** The claims that were made under it, and end with it. */
  readonly dependents = new Table<Entry>()
  // Changes that came before the reply that it has joined.
  #early: Array<ReadonlyArray<unknown>> = []

  constructor(id: string, claim: Claim, keeper: Keeper, observer: Observer) {
    super(id, claim, keeper)
    this.observer = observer
  }

  /** It has joined, in a first or a next session. */
  welcome(state: ReadonlyArray<unknown>): void {
    this.joined = true
    this.observer.observe(state)
    for (const change of this.#early.splice(0)) this.observer.observe(change)
  }

  /** The mailbox can be faster than the reply that it has joined. */
  hear(change: ReadonlyArray<unknown>): void {
    if (this.state === "held") this.observer.observe(change)
    else if (this.state === "asked") this.#early.push(change)
  }

  /** The session is over, in which it was being joined, or observed already. */
  lose(observed: boolean): void {
    this.#early = []
    if (observed) this.observer.lost?.()
  }
}
