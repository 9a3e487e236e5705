/** Another process of the tests: meets others again and again, or once, and reports what happens. */
import { Effect, Layer, Schema } from "effect"
import { Coordinator, Redis, Rendezvous, Signal } from "../../src/index.ts"
import { argument, emit } from "../../src/testing/Program.ts"

export interface Argument {
  readonly url: string
  readonly namespace: string
  readonly lease: string
  readonly margin: string
  readonly id: string
  /** `hold` takes and never finishes; `all` gives, takes, exchanges and signals in turn, for ever. */
  readonly mode: "await" | "give" | "take" | "hold" | "exchange" | "all"
}

export type Event =
  | { readonly event: "asked" | "passed" | "set" }
  | { readonly event: "has"; readonly value: string; readonly id: string; readonly attempts: number }
  | { readonly event: "took" | "gave"; readonly value: string }
  | { readonly event: "exchanged"; readonly value: string; readonly other: string }

const { id, lease, margin, mode, namespace, url } = argument() as Argument

const say = (event: Event) => Effect.sync(() => emit(event))

const program = Effect.gen(function*() {
  const place = yield* Rendezvous.make({ name: "shared", schema: Schema.String, timeToLive: "1 second" })
  const signal = yield* Signal.make({ name: "shared" })
  const has = (value: string, handover: Rendezvous.Handover) => say({ event: "has", value, ...handover })
  const take = Effect.flatMap(
    place.takeWith((value, handover) => Effect.as(has(value, handover), value)),
    (value) => say({ event: "took", value })
  )
  const give = (value: string) => Effect.andThen(place.give(value), say({ event: "gave", value }))
  const exchange = (value: string) =>
    Effect.flatMap(place.exchange(value), (other) => say({ event: "exchanged", value, other }))
  const wait = Effect.andThen(signal.await, say({ event: "passed" }))
  const asking = <A, E>(self: Effect.Effect<A, E>) => Effect.andThen(say({ event: "asked" }), self)
  switch (mode) {
    case "await":
      return yield* asking(wait)
    case "give":
      return yield* asking(give(id))
    case "take":
      return yield* asking(take)
    case "hold":
      return yield* asking(place.takeWith((value, handover) => Effect.andThen(has(value, handover), Effect.never)))
    case "exchange":
      return yield* asking(exchange(id))
    case "all": {
      let count = 0
      // Values that no other process has.
      const next = <A, E>(self: (value: string) => Effect.Effect<A, E>) =>
        Effect.forever(Effect.suspend(() => self(`${id}:${++count}`)))
      return yield* Effect.all([
        next(give),
        Effect.forever(take),
        next(exchange),
        Effect.forever(wait),
        Effect.forever(Effect.andThen(signal.set, Effect.andThen(say({ event: "set" }), Effect.sleep(2))))
      ], { concurrency: "unbounded" })
    }
  }
}).pipe(
  Effect.provide(
    Coordinator.layer({ namespace, lease: lease as "1 second", margin: margin as "1 second" }).pipe(
      Layer.provideMerge(Redis.layer({ url }))
    )
  )
)

await Effect.runPromise(program)
