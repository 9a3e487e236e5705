/** Another process of the tests: leads, waits to lead, observes, or runs the ticks of a schedule, and reports it. */
import { Cron, Effect, Layer, Option, Schema, Stream } from "effect"
import { Coordinator, Election, Lease, Redis, Singleton } from "../../src/index.ts"
import { argument, emit } from "../../src/testing/Program.ts"

export interface Argument {
  readonly url: string
  readonly settings: Coordinator.Options
  readonly mode: "lead" | "observe" | "schedule"
  readonly value: string
}

/** Times are those of the machine's clock, as Redis has it. */
export type Event =
  | { readonly event: "led"; readonly term: number; readonly at: number }
  | { readonly event: "tick"; readonly term: number; readonly at: number }
  | { readonly event: "interrupted"; readonly term: number; readonly at: number }
  | { readonly event: "saw"; readonly term: number | undefined; readonly at: number }
  | { readonly event: "began"; readonly due: number; readonly at: number }
  | { readonly event: "ended"; readonly due: number; readonly at: number }

const { mode, settings, url, value } = argument() as Argument

const say = (event: Event) => Effect.sync(() => emit(event))

const body = Effect.gen(function*() {
  const term = Option.getOrThrow(yield* Lease.current).token
  yield* Effect.onInterrupt(
    Effect.gen(function*() {
      yield* say({ event: "led", term, at: Date.now() })
      while (true) {
        yield* Effect.sleep(20)
        yield* say({ event: "tick", term, at: Date.now() })
      }
    }),
    () => say({ event: "interrupted", term, at: Date.now() })
  )
})

const tick = Effect.gen(function*() {
  // It begins at the second that it is due.
  const due = Math.round(Date.now() / 1000)
  yield* say({ event: "began", due, at: Date.now() })
  yield* Effect.sleep("400 millis")
  yield* say({ event: "ended", due, at: Date.now() })
})

const programs = {
  lead: Effect.gen(function*() {
    const election = yield* Election.make({ name: "chief", schema: Schema.String, value })
    yield* election.lead(body)
  }),
  observe: Effect.gen(function*() {
    const election = yield* Election.make({ name: "chief", schema: Schema.String, value })
    yield* Stream.runForEach(
      election.changes,
      (info) => say({ event: "saw", term: Option.getOrUndefined(info)?.term, at: Date.now() })
    )
  }),
  schedule: Layer.launch(Singleton.schedule("chief", tick, Cron.parseUnsafe("* * * * * *"), { timeToLive: "1 second" }))
}

await Effect.runPromise(
  programs[mode].pipe(
    Effect.scoped,
    Effect.provide(Coordinator.layer(settings).pipe(Layer.provideMerge(Redis.layer({ url }))))
  )
)
