/** The coordinator's lease with one partition, from the moment when Redis has opened it until it is lost. */

import type { Io } from "../io.ts"
import type { Address } from "./wire.ts"

/** Why a session, and with it every hold, was lost. */
export type LossReason = "expired" | "unknown" | "rolledBack" | "closed"

/** The states of a session that users see. */
export type Phase = "opening" | "open" | "suspended" | "lost" | "closed"

export class Session {
  readonly id: string
  readonly mailbox: string
  readonly address: Address
  /** Of the last batch that was answered. */
  number = 0
  /** The mailbox event that was read last: its id, and its number. The number that Redis knows to be read. */
  position: string
  read: number
  acknowledged: number
  /** All that was posted before this time has been read: by the monotonic clock, and by the wall clock. */
  heardAt = Number.NEGATIVE_INFINITY
  heardAtWall = Number.NEGATIVE_INFINITY
  lost: LossReason | undefined = undefined

  readonly #io: Io
  readonly #expire: (session: Session) => void
  // Until then, no other session can have been granted what this one holds: by the monotonic clock, and by the wall clock,
  // because the former stands still while the machine is suspended, and the latter may be set.
  #until = 0
  #wallUntil = 0

  constructor(
    prefix: string,
    id: string,
    address: Address,
    position: string,
    io: Io,
    expire: (session: Session) => void
  ) {
    this.id = id
    this.mailbox = `${prefix}mail:${id}`
    this.address = address
    this.position = position
    this.read = Number.parseInt(position, 10)
    this.acknowledged = this.read
    this.#io = io
    this.#expire = expire
  }

  /** Redis has renewed it, at some time after a request was sent. */
  renewed(sentAt: number, sentAtWall: number, trust: number): void {
    // A request that was sent later can be answered sooner.
    if (sentAt + trust < this.#until) return
    this.#until = sentAt + trust
    this.#wallUntil = sentAtWall + trust
  }

  /** Milliseconds for which it is trusted if it is not renewed. */
  get remaining(): number {
    return Math.min(this.#until - this.#io.now(), this.#wallUntil - this.#io.wall())
  }

  /** Treats a session that is not trusted any more as lost. True at the moment when it does. */
  expireIfDue(): boolean {
    if (this.lost !== undefined || this.#io.now() < this.#until && this.#io.wall() < this.#wallUntil) return false
    this.#expire(this)
    return true
  }
}
