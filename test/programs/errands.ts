/** Another process of the tests, that works on a queue whose jobs have a subscriber, and delivers the errands of that. */
import { Effect, Layer, Schedule, Schema } from "effect"
import { Coordinator, Queue, Redis } from "../../src/index.ts"
import { spaceOf } from "../../src/internal/hold/place.ts"
import { innerOf, workErrands } from "../../src/internal/queue/errands.ts"
import { argument, emit } from "../../src/testing/Program.ts"

export interface Argument {
  readonly url: string
  readonly namespace: string
  readonly lease: string
  readonly margin: string
}

export interface Event {
  readonly event: "ready" | "told"
}

const { lease, margin, namespace, url } = argument() as Argument

const again = Effect.retry(Schedule.spaced("100 millis"))

const program = Effect.gen(function*() {
  const queue = yield* again(Queue.make({ name: "shared", payload: Schema.Number, letters: { crashes: 1000 } }))
  const follows = yield* again(Queue.make({ name: "follows", payload: Schema.Number, shards: 3 }))
  const ends = yield* again(Queue.make({ name: "ends", payload: Schema.Json }))
  yield* again(workErrands({
    space: spaceOf(yield* Coordinator.Coordinator),
    name: "watch",
    partitions: innerOf(queue).partitions,
    fail: (reason) => reason,
    // Its first attempt fails for some, so that errands are also attempted again.
    handler: ([, reference, , outcome], { attempt, token }) =>
      Effect.gen(function*() {
        yield* Effect.sleep(3)
        yield* ends.offer([reference, outcome] as Schema.Json, { id: String(reference) })
        emit({ event: "told" } satisfies Event)
        if (attempt === 1 && token % 5 === 0) return yield* Effect.fail("no")
      })
  }))
  const working = queue.run(
    (value) =>
      Effect.andThen(
        Effect.andThen(Effect.sleep(2), follows.followUp(value)),
        value % 7 === 0
          ? Effect.flatMap(Queue.Job, (job) => job.discard("no"))
          : Effect.void
      ),
    {
      concurrency: 8
    }
  )
  yield* Effect.forkChild(again(working))
  emit({ event: "ready" } satisfies Event)
  return yield* Effect.never
}).pipe(
  Effect.scoped,
  Effect.provide(
    Coordinator.layer({ namespace, lease: lease as "1 second", margin: margin as "1 second" }).pipe(
      Layer.provideMerge(Redis.layer({ url }))
    )
  )
)

const fiber = Effect.runFork(program as Effect.Effect<never>)
process.on("SIGTERM", () => {
  fiber.addObserver(() => process.exit(0))
  fiber.interruptUnsafe()
})
