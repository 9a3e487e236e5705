/** Another process of the tests: changes a shared ref and a counter again and again, and reports each change. */
import { Effect, Layer, Schema } from "effect"
import { Coordinator, Counter, Redis, SharedRef } from "../../src/index.ts"
import { argument, emit } from "../../src/testing/Program.ts"

export interface Argument {
  readonly url: string
  readonly namespace: string
  readonly lease: string
  readonly margin: string
}

export type Event =
  | { readonly event: "updated"; readonly value: number }
  | { readonly event: "added"; readonly sum: number }

const { lease, margin, namespace, url } = argument() as Argument

const say = (event: Event) => Effect.sync(() => emit(event))

const program = Effect.gen(function*() {
  const ref = yield* SharedRef.make({ name: "shared", schema: Schema.Number, initial: 0 })
  const counter = yield* Counter.make({ name: "shared" })
  yield* Effect.forkChild(Effect.forever(ref.until((value) => value < 0)))
  yield* Effect.all([
    Effect.forever(Effect.flatMap(ref.updateAndGet((value) => value + 1), (value) => say({ event: "updated", value }))),
    Effect.forever(Effect.flatMap(counter.add(1), (sum) => say({ event: "added", sum })))
  ], { concurrency: "unbounded" })
}).pipe(
  Effect.scoped,
  Effect.provide(
    Coordinator.layer({ namespace, lease: lease as "1 second", margin: margin as "1 second" }).pipe(
      Layer.provideMerge(Redis.layer({ url }))
    )
  )
)

await Effect.runPromise(program)
