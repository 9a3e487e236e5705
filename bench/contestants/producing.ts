/** What the contestants on Effect have in common: producers that are fibers. */
import { Effect, Schema } from "effect"
import type { Production, Sample } from "../contestant.ts"

export const sample = Schema.Struct({ number: Schema.Number, at: Schema.Number })

export const produce = <E>(
  { batch, more, next, producers, stored }: Production,
  offer: (job: Sample) => Effect.Effect<unknown, E>,
  offerAll: (jobs: ReadonlyArray<Sample>) => Effect.Effect<unknown, E>
): Effect.Effect<void, E> => {
  const producer = Effect.gen(function*() {
    for (;;) {
      const goesOn = more()
      if (!(typeof goesOn === "boolean" ? goesOn : yield* Effect.promise(() => goesOn))) return
      yield* batch === 1 ? offer(next()) : offerAll(Array.from({ length: batch }, next))
      stored(batch)
    }
  })
  return Effect.all(Array.from({ length: producers }, () => producer), { concurrency: "unbounded", discard: true })
}
