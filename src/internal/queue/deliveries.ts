/** Jobs that have come and not begun, in their order: some begin at once, the others in a later turn of the event loop. */

import type { Io } from "../io.ts"
import { longestTurn } from "../work/turn.ts"
import type { Raw } from "./job.ts"

interface Delivery {
  readonly jobs: ReadonlyArray<Raw>
  /** Of the first one. */
  readonly token: number
  readonly number: number
  begun: number
}

/** Takes the jobs. */
export interface Taker {
  /** A request of it is under way, or is about to be sent. */
  readonly isServed: () => boolean
  readonly begin: (raw: Raw, token: number, delivery: number) => void
  /** All of them have begun. */
  readonly empty: () => void
}

// While Redis has nothing to do, one half of the jobs begins before the other one, and what it has come to is sent: from then on Redis
// works on one half while this process works on the other. Smaller halves cost more than that gains.
const leastHalf = 16

export class Deliveries {
  readonly #io: Io
  readonly #taker: Taker
  // Deliveries whose jobs have not all begun.
  #waiting: Array<Delivery> = []
  // The next ones begin later.
  #deferred = false
  #counted = 0

  constructor(io: Io, taker: Taker) {
    this.#io = io
    this.#taker = taker
  }

  add(jobs: ReadonlyArray<Raw>, token: number, number: number): void {
    if (number > this.#counted) this.#waiting.push({ jobs, token, number, begun: 0 })
    if (this.#deferred) return
    const count = this.#count
    this.#beginSome(count < 2 * leastHalf || this.#taker.isServed() ? count : Math.ceil(count / 2))
  }

  /** The last answer has included so many deliveries: one among these that comes later is old. */
  counted(count: number): void {
    this.#counted = count
    this.#waiting = this.#waiting.filter(({ number }) => number > count)
  }

  clear(): void {
    this.#waiting = []
  }

  // So many of those that wait, if they do not take too long; the others behind what these have come to.
  #beginSome(room: number, until = this.#io.now() + longestTurn): void {
    let isLong = false
    for (; room > 0 && !isLong && this.#waiting.length > 0; room--) {
      const first = this.#waiting[0]!
      const at = first.begun++
      if (first.begun === first.jobs.length) this.#waiting.shift()
      this.#taker.begin(first.jobs[at]!, first.token + at, first.number)
      isLong = this.#io.now() >= until
    }
    if (this.#waiting.length === 0) return this.#taker.empty()
    this.#deferred = true
    if (isLong) this.#io.after(0, () => this.#goOn())
    else this.#io.defer(() => this.#goOn(until))
  }

  #goOn(until?: number): void {
    this.#deferred = false
    this.#beginSome(this.#count, until)
  }

  get #count(): number {
    return this.#waiting.reduce((sum, { begun, jobs }) => sum + jobs.length - begun, 0)
  }
}
