/** What becomes of holds, waits and memberships when their session is over, or their coordinator is closed. */

import type { Channel, Losses } from "../actor/channel.ts"
import type { CoordinatorError } from "../actor/errors.ts"
import { guard } from "../actor/hooks.ts"
import type { Office } from "../actor/office.ts"
import type { LossReason } from "../actor/session.ts"
import { type Entry, nameOf } from "./claim.ts"
import type { Claims } from "./claims.ts"
import { Hold } from "./hold.ts"
import { Membership } from "./membership.ts"
import { watchOverruns } from "./overruns.ts"

export interface Acts {
  /** It could not be asked for. */
  readonly failed: (entry: Entry, error: CoordinatorError) => void
  readonly release: (entry: Entry) => void
  readonly log: (entry: Entry, what: string) => void
}

// Of the holds of a session that is lost: the line about the session has their number.
const mostNamed = 10

const isHeld = (entry: Entry): entry is Hold => entry instanceof Hold && entry.state === "held"

export class Ending {
  readonly #kernel: Office
  readonly #channel: () => Channel
  readonly #claims: Claims
  readonly #acts: Acts

  constructor(kernel: Office, channel: () => Channel, claims: Claims, acts: Acts) {
    this.#kernel = kernel
    this.#channel = channel
    this.#claims = claims
    this.#acts = acts
  }

  /** The session is over. Holds are lost; everything else goes to the next session, if there is one. */
  lose(reason: LossReason): Losses {
    const holds: Array<Hold> = []
    const memberships: Array<readonly [member: Membership, observed: boolean]> = []
    for (const entry of this.#claims.values()) {
      // A program that was just notified of the end of another claim has ended this one.
      if (entry.state === "done") continue
      entry.request = undefined
      if (isHeld(entry)) {
        this.#claims.remove(entry)
        holds.push(entry)
      } else if (reason === "closed") {
        this.#claims.become(entry, "idle")
        this.#acts.failed(entry, this.#channel().closedError())
      } else {
        if (entry instanceof Membership) memberships.push([entry, entry.state === "held"])
        this.#claims.become(entry, "idle")
        entry.repeated?.()
      }
    }
    // Programs are notified of it at once, and may end their claims.
    let isEnding = holds.length > 0
    for (const [member, observed] of memberships) {
      if (member.state !== "done") this.#guard(member, () => member.lose(observed))
      isEnding ||= member.observer.isEnding?.() === true
    }
    return { holds: holds.length, isEnding, tell: () => this.#tell(holds, reason) }
  }

  #tell(holds: ReadonlyArray<Hold>, reason: LossReason): void {
    let told = 0
    for (const hold of holds) {
      // Closing has notified its program already, or it has been ended by a request whose answer is still to come.
      if (hold.loss === undefined && !(reason === "closed" && hold.concluding) && told++ < mostNamed) {
        this.#acts.log(hold, `was lost (${reason})`)
      }
      this.#guard(hold, () => hold.lose(reason))
    }
    // Closing has watched them since it has begun.
    if (reason !== "closed") watchOverruns(this.#kernel, this.#channel().margin, holds)
  }

  #guard(entry: Entry, callback: () => void): void {
    guard(this.#kernel.hooks.log, `the loss of ${nameOf(entry)}`, callback)
  }

  /** Ends holds, and waits until their users have released them; all other claims end at once. */
  async close(): Promise<void> {
    const channel = this.#channel()
    const entries = this.#claims.values()
    const error = channel.closedError()
    const ending: Array<Promise<void> | undefined> = []
    // Before any hold ends: it must not be granted to a waiter of the same coordinator.
    for (const entry of entries) {
      if (isHeld(entry) || entry.state === "done") continue
      if (entry instanceof Membership && entry.joined) {
        entry.observer.closed?.()
        ending.push(entry.observer.ended?.())
      } else {
        this.#acts.release(entry)
        entry.settle(["failed", error])
      }
    }
    const held = entries.filter(isHeld)
    if (held.length > 0) this.#kernel.hooks.metrics.closing()
    // A request that ends a hold says more than its loss.
    for (const hold of held) if (!hold.concluding) hold.lose("closed")
    // Not that of the channel, whose lease may have another length: the session lasts for the margin of the coordinator.
    watchOverruns(this.#kernel, this.#kernel.settings.margin, held)
    // A program that is notified of the end cleans up first, also one that only has a scope.
    await Promise.all([...ending, ...held.map((hold) => hold.ended())])
    await channel.settled()
  }
}
