/** The decisions of chance: by a seed, or as they were made before. */

/** Numbers from 0 up to 1, the same ones for the same seed. */
export const randomOf = (seed: number): () => number => {
  let state = seed >>> 0
  return () => {
    state = (state + 0x6d2b79f5) | 0
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state)
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296
  }
}

/** A seed for a part of a simulation, which chooses by itself. */
export const seedOf = (seed: number, part: number): number =>
  Math.imul(seed ^ Math.imul(part + 1, 0x9e3779b1), 0x85ebca6b)

/** The choices of one step. */
export interface Round {
  /** Of the fault before it, if something has broken. */
  readonly fault: ReadonlyArray<number> | undefined
  readonly made: ReadonlyArray<number>
  /** What was chosen to happen, as far as it can be told in another course. */
  readonly label: string
}

/** The choices of a schedule. */
export interface Course {
  /** Of its beginning. */
  readonly start: ReadonlyArray<number>
  readonly rounds: ReadonlyArray<Round>
  /** Those from the healing on. In a course that is given without them, the first possibility is chosen then. */
  readonly rest?: ReadonlyArray<number> | undefined
}

/** Choices of one schedule. Those that were given are made again; behind them, the first possibility is chosen. */
export class Choices {
  /** All that were made, to make them again. */
  readonly made: Array<number> = []
  #given: ReadonlyArray<number> | undefined
  // Of all that were made, so many were before the given ones.
  #before = 0
  readonly #random: () => number

  constructor(seed: number, given?: ReadonlyArray<number> | undefined) {
    this.#random = randomOf(seed)
    this.#given = given
  }

  /** From 0 up to below `count`. */
  among(count: number): number {
    const given = this.#given
    const choice = given === undefined
      ? Math.floor(this.#random() * count)
      : Math.min(count - 1, given[this.made.length - this.#before] ?? 0)
    this.made.push(choice)
    return choice
  }

  /** These are next. */
  give(choices: ReadonlyArray<number>): void {
    this.#given = choices
    this.#before = this.made.length
  }

  /** Another one takes the place of the last one. */
  amend(choice: number): void {
    this.made[this.made.length - 1] = choice
  }
}
