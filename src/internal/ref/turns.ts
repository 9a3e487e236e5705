/**
 * The turns of a process to update a ref that other processes update too. Optimistic updates that all try again at once
 * invalidate each other; in turn, none is in vain.
 */

import * as Effect from "effect/Effect"
import { ask, type Failure } from "../hold/acquire.ts"
import type { Hold } from "../hold/hold.ts"
import type { Place } from "../hold/place.ts"

const ignore = () => {}

// An update that comes so soon after the one before it is made in the same turn, if that is not over. In milliseconds.
const gap = 1

export class Turns<E> {
  readonly #place: Place
  readonly #fail: (reason: Failure) => E
  #turn: Hold | undefined = undefined
  // The last turn had to be waited for, so the next update waits for one at once.
  #contended = false
  // Updates come one right after the other.
  #lively = false
  #updating = false
  #restedAt = Number.NEGATIVE_INFINITY
  #ending = false

  constructor(place: Place, fail: (reason: Failure) => E) {
    this.#place = place
    this.#fail = fail
  }

  /** An update begins. */
  begin(): void {
    this.#updating = true
    this.#lively = this.#place.space.kernel.io.now() - this.#restedAt < gap
  }

  /** No update is under way. A turn that is not over ends, unless another update comes at once. */
  rest(): void {
    const { io } = this.#place.space.kernel
    this.#updating = false
    this.#restedAt = io.now()
    if (this.#turn === undefined || this.#ending) return
    this.#ending = true
    this.#endSoon()
  }

  #endSoon(): void {
    const { io } = this.#place.space.kernel
    io.after(gap, () => {
      if (this.#updating || io.now() - this.#restedAt < gap) return this.#endSoon()
      this.#ending = false
      this.end()
    })
  }

  /** Whether another update is expected at once. */
  get isLively(): boolean {
    return this.#lively
  }

  get isContended(): boolean {
    return this.#contended
  }

  /** That of this process, as far as it knows. */
  get present(): Hold | undefined {
    return this.#turn
  }

  /** Waits for the next one. */
  get next(): Effect.Effect<Hold, E> {
    const asked = {
      place: this.#place,
      verb: "sharedRef.turn",
      args: () => [],
      question: true,
      fail: this.#fail
    } as const
    return ask(asked, (_, turn) =>
      Effect.sync(() => {
        this.#contended = turn.queued
        return this.#turn = turn
      }))
  }

  /** The actor has ended it. */
  over(): void {
    const turn = this.#turn
    this.#turn = undefined
    if (turn !== undefined) this.#place.tenancy.forget(turn)
  }

  /** Returns it. */
  end(): void {
    const turn = this.#turn
    this.#turn = undefined
    if (turn !== undefined) this.#place.tenancy.release(turn, ignore)
  }
}
