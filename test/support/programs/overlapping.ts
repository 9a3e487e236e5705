/** Looks for an order of forty operations at once, whose states have long keys. */
import { check } from "../../../src/testing/Linearizability.ts"
import { emit } from "../../../src/testing/Program.ts"

const padding = "x".repeat(2000)
const overlapping = Array.from({ length: 40 }, (_, at) => ({ input: at, start: at, end: 1000 + at }))
const result = check(
  {
    initial: { n: 0 },
    step: ({ n }, input: number) => input < 0 ? undefined : { n: (n * 31 + input + 1) % 1_000_003 },
    key: ({ n }) => JSON.stringify({ n, padding })
  },
  [...overlapping, { input: -1, start: 5000, end: 5001 }],
  { maxSteps: 300_000 }
)
emit({ result: result._tag })
