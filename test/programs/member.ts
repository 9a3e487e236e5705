/** Another process of the tests, that handles the events of a topic as a member of a group, subscribes to them, or publishes some. */
import { Effect, Layer, Schedule, Schema, Stream } from "effect"
import { Coordinator, Redis, Topic } from "../../src/index.ts"
import { argument, emit } from "../../src/testing/Program.ts"

export interface Argument {
  readonly url: string
  readonly namespace: string
  readonly lease: string
  readonly margin: string
  /** How long it handles an event. */
  readonly millis: number
  /** Default "g". */
  readonly group?: string | undefined
  /** The group keeps the order of each key. Default true. */
  readonly ordered?: boolean | undefined
  /** It subscribes behind the event with this id instead; empty for the beginning. */
  readonly reads?: string | undefined
  /** It publishes numbers from this one on instead, one by one. */
  readonly publishes?: number | undefined
}

export type Event =
  | { readonly event: "joined" }
  | { readonly event: "published"; readonly value: number }
  | { readonly event: "read"; readonly value: number; readonly id: string }
  | { readonly event: "missed" }
  | { readonly event: "begun" | "handled"; readonly value: number; readonly attempt: number; readonly at: number }

const { group = "g", lease, margin, millis, namespace, ordered = true, publishes, reads, url } = argument() as Argument

const program = Effect.gen(function*() {
  const topic = yield* Topic.make({ name: "shared", schema: Schema.Number, key: (n) => String(n % 10) })
  if (publishes !== undefined) {
    for (let value = publishes;; value++) {
      yield* Effect.retry(topic.publish(value, { id: String(value) }), Schedule.spaced("20 millis"))
      emit({ event: "published", value } satisfies Event)
      yield* Effect.sleep(millis)
    }
  }
  if (reads !== undefined) {
    return yield* Stream.runForEach(
      topic.subscribe({ from: reads === "" ? "beginning" : { after: reads } }),
      (element) =>
        Effect.sync(() =>
          emit(
            (element._tag === "Event"
              ? { event: "read", value: element.value, id: element.id }
              : { event: "missed" }) satisfies Event
          )
        )
    )
  }
  const working = topic.run(
    ({ attempt, value }) =>
      Effect.gen(function*() {
        emit({ event: "begun", value, attempt, at: Date.now() } satisfies Event)
        yield* Effect.sleep(millis)
        emit({ event: "handled", value, attempt, at: Date.now() } satisfies Event)
      }),
    // Members are killed at random, which may be while they have the same event.
    { group, orderBy: ordered ? "key" : undefined, concurrency: 8, from: "beginning", crashes: 1000 }
  )
  // Joining is a question, which fails on a machine that is too busy to answer in time.
  yield* Effect.forkChild(Effect.retry(working, Schedule.spaced("100 millis")))
  emit({ event: "joined" } satisfies Event)
  return yield* Effect.never
}).pipe(
  Effect.scoped,
  Effect.provide(
    Coordinator.layer({ namespace, lease: lease as "1 second", margin: margin as "1 second" }).pipe(
      Layer.provideMerge(Redis.layer({ url }))
    )
  )
)

await Effect.runPromise(program)
