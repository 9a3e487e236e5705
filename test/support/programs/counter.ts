import { argument, emit } from "../../../src/testing/Program.ts"

const { last } = argument<{ readonly last: number }>()
for (let n = 1; n <= last; n++) emit({ n })
console.log("not an event")
process.exitCode = 3
