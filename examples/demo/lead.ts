/** What a worker does besides its jobs while it leads: it begins the run, and sums up. */
import { Effect, Schedule } from "effect"
import * as protocol from "./protocol.ts"
import * as words from "./words.ts"

/** Leads whenever it is its turn, until a leader's term has brought the work to its end. */
export const lead = Effect.fnUntraced(function*(files: ReadonlyArray<string>) {
  const chief = yield* protocol.Chief
  const indexing = yield* protocol.Indexing

  // The run goes on without its leader. The next leader begins it again, which is the same run.
  const drive = Effect.gen(function*() {
    const shares = yield* indexing.run(files, { id: protocol.run, onInterrupt: "continue" })
    yield* chief.proclaim({ _tag: "Done", top: words.top(shares.flat()) })
    // When all others have seen that, no candidate is left to succeed it.
    yield* chief.candidates.pipe(
      Effect.repeat({ until: (present) => present.length === 0, schedule: Schedule.spaced("50 millis") })
    )
    return true
  })

  yield* drive.pipe(
    Effect.catch((error) => Effect.as(Effect.logError("The term ends without a result", error), false)),
    (term) => chief.lead(term),
    // If not, it has stepped down, and the next leader goes on.
    Effect.repeat({ until: (done) => done })
  )
})
