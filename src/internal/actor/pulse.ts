/** The heartbeat of all sessions of a coordinator that have the same lease: those that have nothing else to ask share a call. */

import type { Io, Timer } from "../io.ts"
import type { Hooks } from "./hooks.ts"
import type { Session } from "./session.ts"
import type { Renewed, Transport } from "./transport.ts"

/** The keeper of a session. */
export interface Beating {
  /** Answers the session if it is to be renewed with others. */
  readonly beat: () => Session | undefined
  readonly renewed: (session: Session, sentAt: number, sentAtWall: number, renewed: Renewed) => void
  /** Has it renewed by itself. */
  readonly renew: () => void
}

// Redis does nothing else during a call.
const most = 32

// In milliseconds. A heartbeat also notices events that were lost, and tries again what was refused.
const longestPause = 20_000

export class Pulse {
  readonly #members = new Set<Beating>()
  readonly #transport: Transport
  readonly #io: Io
  readonly #hooks: Hooks
  readonly #lease: number
  #timer: Timer | undefined = undefined

  constructor(transport: Transport, io: Io, hooks: Hooks, lease: number) {
    this.#transport = transport
    this.#io = io
    this.#hooks = hooks
    this.#lease = lease
  }

  include(member: Beating): void {
    this.#members.add(member)
    if (this.#timer === undefined) this.#set()
  }

  exclude(member: Beating): void {
    this.#members.delete(member)
    if (this.#members.size > 0) return
    this.#timer?.cancel()
    this.#timer = undefined
  }

  // A third of the lease, so that two renewals may fail; jittered, so that a fleet does not beat as one.
  #set(): void {
    const pause = Math.min(this.#lease / 3, longestPause)
    this.#timer = this.#io.after(pause * (0.9 + 0.1 * this.#io.random()), () => {
      this.#set()
      this.#beat()
    })
  }

  #beat(): void {
    const idle: Array<readonly [Beating, Session]> = []
    for (const member of [...this.#members]) {
      const session = member.beat()
      if (session !== undefined) idle.push([member, session])
    }
    // On a cluster, a call is for one slot.
    const each = this.#transport.connections.topology === "cluster" ? 1 : most
    for (let at = 0; at < idle.length; at += each) void this.#renew(idle.slice(at, at + each))
  }

  async #renew(idle: ReadonlyArray<readonly [Beating, Session]>): Promise<void> {
    if (idle.length === 1) return idle[0]![0].renew()
    const sentAt = this.#io.now()
    const sentAtWall = this.#io.wall()
    let answers: ReadonlyArray<Renewed | undefined> = []
    try {
      answers = await this.#transport.renew(idle.map(([, session]) => session), this.#lease)
    } catch (cause) {
      // Each finds out by itself what that means for it.
      this.#hooks.log("Debug", "sessions could not be renewed together", cause)
      this.#transport.doubt(cause)
    }
    this.#hooks.metrics.batch(idle.length, this.#io.now() - sentAt)
    for (const [at, [member, session]] of idle.entries()) {
      const answer = answers[at]
      if (answer === undefined) member.renew()
      else member.renewed(session, sentAt, sentAtWall, answer)
    }
  }
}
