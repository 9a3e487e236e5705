/**
 * How much the tests try that find more, the more they try. `LOCKSTEP_EFFORT=4 npm test` has them make four times as many runs, for
 * four times as long. Default 1, with which each commit is tested.
 */
export const effort = Number(process.env["LOCKSTEP_EFFORT"] ?? 1)

/** How many runs of a property that makes, of so many by default. */
export const runs = (count: number): number => Math.ceil(count * effort)
