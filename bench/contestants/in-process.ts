/** Effect's PubSub: what a broadcast costs that never leaves the process. */
import { Effect, PubSub, Stream } from "effect"
import type { Open, Sample } from "../contestant.ts"

export const open: Open = async () => ({
  traffic: ({ handlers, next, opened }) =>
    Effect.runPromise(Effect.gen(function*() {
      const events = yield* PubSub.bounded<Sample>(1024)
      const handling = Effect.forEach(
        handlers,
        (handler) => Stream.runForEach(Stream.fromPubSub(events), (event) => Effect.sync(() => handler(event))),
        { concurrency: "unbounded", discard: true }
      )
      const publishing = Effect.gen(function*() {
        yield* Effect.sleep(200)
        yield* Effect.promise(opened)
        for (;;) yield* Effect.suspend(() => PubSub.publish(events, next()))
      })
      yield* Effect.all([handling, publishing], { concurrency: "unbounded", discard: true })
    }))
})
