/** The questions of a partition that have no answer yet: they are sent at once, so this is what bounds them. */

import { overloaded } from "./transport.ts"

export class Questions {
  #unanswered = 0
  readonly #most: number

  constructor(most: number) {
    this.#most = most
  }

  /** Throws if too many have no answer. Otherwise `end` is to be called when this one has. */
  begin(key: string): void {
    if (this.#unanswered >= this.#most) throw overloaded(this.#unanswered, key)
    this.#unanswered++
  }

  end(): void {
    this.#unanswered--
  }
}
