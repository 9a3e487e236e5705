/** What a worker does besides its share of the work while it leads: it says what there is to do, and sums up. */
import { Effect, Option, Schedule, Schema } from "effect"
import { type CountDownLatch, Lease } from "../../src/index.ts"
import * as protocol from "./protocol.ts"
import { keys } from "./self.ts"
import * as store from "./store.ts"
import * as words from "./words.ts"

const decode = Schema.decodeUnknownEffect(Schema.Array(Schema.fromJsonString(protocol.Top)))

/** Leads whenever it is its turn, until somebody's term has brought the work to its end. */
export const lead = Effect.fnUntraced(function*(mapped: CountDownLatch.CountDownLatch) {
  const chief = yield* protocol.Chief

  // Whoever succeeds a leader begins at the beginning: what was done already takes no time. Answers whether all is done.
  const drive = Effect.gen(function*() {
    const { token: term } = Option.getOrThrow(yield* Lease.current)
    yield* mapped.await
    const others = yield* chief.candidates
    const parties = 1 + others.length
    const reduced = yield* protocol.reduced(term, parties)
    yield* chief.proclaim({ _tag: "Reduce", parties })
    // One that has been counted and dies would never come. It ceases to be a candidate, though, when its lease ends.
    const missing = chief.candidates.pipe(
      Effect.map((present) => others.some(({ id }) => present.every((candidate) => candidate.id !== id))),
      Effect.repeat({ until: (gone) => gone, schedule: Schedule.spaced("500 millis") })
    )
    if (yield* Effect.raceFirst(Effect.as(reduced.await, false), missing)) return false
    const fields = Array.from({ length: parties }, (_, index) => store.shareField(term, index))
    const shares = yield* decode(yield* store.ask("HMGET", keys.shares, ...fields))
    yield* chief.proclaim({ _tag: "Done", top: words.top(shares.flat()) })
    // When all others have seen that, nobody is left to succeed it.
    yield* chief.candidates.pipe(
      Effect.repeat({ until: (present) => present.length === 0, schedule: Schedule.spaced("50 millis") })
    )
    return true
  }).pipe(Effect.scoped)

  yield* drive.pipe(
    Effect.catch((error) => Effect.as(Effect.logError("The term ends without a result", error), false)),
    (term) => chief.lead(term),
    // If not, it has stepped down, and the next leader counts the parties anew.
    Effect.repeat({ until: (done) => done })
  )
})
