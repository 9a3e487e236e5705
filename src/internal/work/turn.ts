/**
 * Turns of the event loop in which handlers begin, or other work is done in parts. Many short ones in one turn would keep timers, and the
 * answers of Redis, waiting for as long as all of them take: leases would run out.
 */

import * as Effect from "effect/Effect"
import type { Io } from "../io.ts"

/** After so many milliseconds, handlers begin in the next turn. */
export const longestTurn = 10

/** Lets fibers work in turns. */
export class Turns {
  readonly #io: Io
  #number = 0
  #until = 0

  constructor(io: Io) {
    this.#io = io
  }

  /** A turn has begun. */
  begin(): void {
    this.#number++
    this.#until = this.#io.now() + longestTurn
  }

  /** Ends when a handler may begin, or the next part. */
  readonly next: Effect.Effect<void> = Effect.suspend(() => {
    if (this.#io.now() < this.#until) return Effect.void
    const number = this.#number
    return Effect.flatMap(Effect.yieldNow, () => {
      // The first fiber that goes on begins the turn; others may have to wait for another one.
      if (this.#number === number) this.begin()
      return this.next
    })
  })
}
