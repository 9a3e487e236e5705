/** Finds a shorter schedule that fails in the same way. */

export interface Attempt {
  readonly steps: number
  /** Behind them, the first possibility is chosen. */
  readonly choices: ReadonlyArray<number>
}

/**
 * Nothing if the first attempt does not fail: then it is what was chosen after everything was healed that counts.
 *
 * First fewer steps, then without parts of the choices. `fails` answers the choices that were made until everything was healed, if it
 * fails. It is called so many times at most, and not when it is over.
 */
export const shrink = async (
  first: Attempt,
  fails: (attempt: Attempt) => Promise<ReadonlyArray<number> | undefined>,
  most: number,
  isOver: () => boolean = () => false
): Promise<Attempt | undefined> => {
  let best = first
  let tries = 0
  const attempt = async (one: Attempt): Promise<boolean> => {
    if (tries++ >= most || isOver()) return false
    const choices = await fails(one)
    if (choices === undefined) return false
    best = { steps: one.steps, choices }
    return true
  }
  if (!await attempt(first)) return undefined
  for (const part of [0.1, 0.25, 0.5, 0.75, 0.9]) {
    while (await attempt({ ...best, steps: Math.floor(best.steps * part) })) if (best.steps === 0) return best
  }
  for (let size = Math.ceil(best.choices.length / 2); size >= 1 && tries < most; size = Math.floor(size / 2)) {
    for (let at = 0; at < best.choices.length && tries < most;) {
      const choices = [...best.choices.slice(0, at), ...best.choices.slice(at + size)]
      if (!await attempt({ ...best, choices })) at += size
    }
  }
  return best
}
