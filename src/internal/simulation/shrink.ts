/** Finds a shorter schedule that fails in the same way. */

import type { Course, Round } from "./choices.ts"

/** A schedule that can be repeated. */
export interface Attempt {
  readonly steps: number
  /** Behind them, the first possibility is chosen. */
  readonly choices: ReadonlyArray<number>
}

// Nothing breaks before the step.
const calm = ({ fault, label, made }: Round): Round => ({
  fault: undefined,
  made: fault === undefined ? made : [0, ...made],
  label
})

const attemptOf = ({ rest = [], rounds, start }: Course): Attempt => ({
  steps: rounds.length,
  choices: [...start, ...rounds.flatMap(({ fault = [], made }) => [...fault, ...made]), ...rest]
})

/**
 * Nothing if the first attempts do not fail: then something is not repeated. The choices from the healing on are only given where it takes
 * them to fail.
 *
 * First without some of the faults, then with fewer steps, and then without some of those. `fails` tries a course, and answers the course
 * that it has taken, if it fails. It is called so many times at most, and not when it is over.
 */
export const shrink = async (
  first: Course,
  fails: (course: Course) => Promise<Course | undefined>,
  most: number,
  isOver: () => boolean = () => false
): Promise<Attempt | undefined> => {
  const { start } = first
  let best = first.rounds
  let rest: Course["rest"] = undefined
  let tries = 0
  const isSpent = () => tries >= most || isOver()
  const attempt = async (rounds: ReadonlyArray<Round>): Promise<boolean> => {
    if (isSpent()) return false
    tries++
    const made = await fails({ start, rounds, rest })
    if (made === undefined) return false
    best = made.rounds
    rest &&= made.rest
    return true
  }
  // Tries without so many of them at a time, half as many each time. The last ones come first: without an early one, more is different.
  const without = async (count: () => number, drop: (from: number, to: number) => ReadonlyArray<Round>) => {
    for (let size = count(); size >= 1 && !isSpent(); size = Math.floor(size / 2)) {
      for (let end = count(); end > 0 && !isSpent(); end -= size) await attempt(drop(Math.max(0, end - size), end))
    }
  }
  const withoutFaults = () =>
    without(
      () => best.filter(({ fault }) => fault !== undefined).length,
      (from, to) => {
        let at = 0
        return best.map((round) => round.fault !== undefined && at++ >= from && at <= to ? calm(round) : round)
      }
    )
  if (!await attempt(best)) {
    rest = first.rest
    if (!await attempt(best)) return undefined
  }
  await withoutFaults()
  for (let least = 0; least < best.length && !isSpent();) {
    const steps = Math.floor((least + best.length) / 2)
    if (!await attempt(best.slice(0, steps))) least = steps + 1
  }
  await without(() => best.length, (from, to) => [...best.slice(0, from), ...best.slice(to)])
  await withoutFaults()
  return attemptOf({ start, rounds: best, rest })
}
