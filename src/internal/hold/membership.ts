/** A share in a resource for as long as a scope is open: it keeps the resource alive, and hears of its changes. */

import { type Claim, Entry, type Keeper } from "./claim.ts"

/** What a membership hears. */
export interface Observer {
  /** The state at joining, every change, and the state whenever a change may have been missed. */
  readonly observe: (state: ReadonlyArray<unknown>) => void
  /** The session was lost: the membership is reaped, and joins again with the next session. */
  readonly lost?: (() => void) | undefined
  /** The coordinator was closed: there is no next session. */
  readonly closed?: (() => void) | undefined
}

export class Membership extends Entry {
  /** It has been joined once: from then on it is joined again by itself. */
  joined = false
  readonly observer: Observer
  /** Changes that came before the reply that it has joined. */
  readonly early: Array<ReadonlyArray<unknown>> = []
  /** What was asked for under it, and ends with it. */
  readonly dependents = new Set<Entry>()

  constructor(id: string, claim: Claim, keeper: Keeper, observer: Observer) {
    super(id, claim, keeper)
    this.observer = observer
  }
}
