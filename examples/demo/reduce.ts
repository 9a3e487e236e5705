/** The second half: all files are in the totals, and the most frequent words of each share are found. */
import { Effect } from "effect"
import * as protocol from "./protocol.ts"
import { keys, tell } from "./self.ts"
import * as store from "./store.ts"
import * as words from "./words.ts"

/** The handler of a job. */
export const reduce = Effect.fnUntraced(function*(share: number) {
  yield* tell({ _tag: "Reduces", share })
  const { counts } = yield* store.readTotals(keys)
  return words.top([...counts].filter(([word]) => words.shareOf(word, protocol.shares) === share))
})
