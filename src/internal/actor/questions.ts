/** The questions of a partition that have no answer yet: they are sent at once, so this is what bounds them. */

import type { CoordinatorError } from "./errors.ts"
import { overloaded } from "./transport.ts"

export class Questions {
  #unanswered = 0
  readonly #most: number

  constructor(most: number) {
    this.#most = most
  }

  /** Answers why it may not be asked, if too many have no answer. Otherwise `end` is to be called when it has one. */
  begin(key: string): CoordinatorError | undefined {
    if (this.#unanswered >= this.#most) return overloaded(this.#unanswered, key)
    this.#unanswered++
    return undefined
  }

  end(count = 1): void {
    this.#unanswered -= count
  }
}
