import { argument, emit } from "../../../src/testing/Program.ts"

// More than any buffer between two processes has, and gone right behind it.
const count = argument<number>()
for (let n = 1; n <= count; n++) emit({ n, text: "x".repeat(100) })
process.kill(process.pid, "SIGKILL")
