/** The second phase: the workers meet, and each one finds the most frequent words of its share. */
import { Effect, Option, Schema, Stream } from "effect"
import { Barrier } from "../../src/index.ts"
import * as protocol from "./protocol.ts"
import { keys, settings, tell } from "./self.ts"
import * as store from "./store.ts"
import * as words from "./words.ts"

const encode = Schema.encodeSync(Schema.fromJsonString(protocol.Top))

/** Whatever has to do with a term has its number in its name: parties of two terms never meet. */
const takePart = Effect.fnUntraced(function*(term: number, parties: number, written: number) {
  const reduced = yield* protocol.reduced(term, parties)
  const barrier = yield* Barrier.make({
    name: `reduce in term ${term}`,
    parties,
    schema: Schema.Int,
    // Somebody else may come instead of one that dies here, and if nobody does there will be another term.
    onDeparture: "withdraw",
    action: ({ contributions }) =>
      tell({ _tag: "Met", parties, words: contributions.reduce((sum, own) => sum + own, 0) })
  })
  yield* tell({ _tag: "Waits", what: "barrier" })
  const { index } = yield* barrier.await(written).pipe(
    // One that is stopped while it runs the action has left without wanting to.
    Effect.retry({ while: ({ reason }) => reason._tag === "LeaseLost" }),
    Effect.ensuring(tell({ _tag: "Freed", what: "barrier" }))
  )
  const { counts } = yield* store.readTotals(keys)
  const share = [...counts].filter(([word]) => words.partyOf(word, parties) === index)
  yield* store.ask("HSET", keys.shares, store.shareField(term, index), encode(words.top(share)))
  yield* reduced.countDown({ id: `${index}` })
}, Effect.scoped)

/**
 * Does what the leader says, each time it says something else, until it says that all is done. Not even then if it leads
 * itself, as the leader leaves last.
 */
export const reduce = Effect.fnUntraced(function*(written: number) {
  const chief = yield* protocol.Chief
  yield* chief.changes.pipe(
    Stream.map(Option.getOrUndefined),
    Stream.takeUntil((leader) => leader?.value._tag === "Done" && leader.node !== settings.name),
    Stream.switchMap((leader) =>
      leader?.value._tag === "Reduce"
        ? Stream.fromEffectDrain(takePart(leader.term, leader.value.parties, written))
        : Stream.empty
    ),
    Stream.runDrain
  )
})
