/** Records numbers, and says so, for ever. */
import { Effect } from "effect"
import { History, Program } from "../../../src/testing.ts"

await Effect.runPromise(Effect.scoped(Effect.gen(function*() {
  const { record } = yield* History.recorder<{ readonly n: number }>(Program.argument<string>())
  for (let n = 1;; n++) {
    record({ n })
    Program.emit({ n })
    if (n % 50 === 0) yield* Effect.sleep(1)
  }
})))
