/** Another process of the tests, that waits for a latch, and says when it has passed. */
import { Effect, Layer } from "effect"
import { Coordinator, CountDownLatch, Latch, Redis } from "../../src/index.ts"
import { argument, emit } from "../../src/testing/Program.ts"

export interface Argument {
  readonly url: string
  readonly namespace: string
  readonly lease: string
  readonly margin: string
  readonly waits: "countdown latch" | "latch"
}

export interface Event {
  readonly event: "waiting" | "passed"
}

const { lease, margin, namespace, url, waits } = argument() as Argument
const timeToLive = "100 millis"

const program = Effect.gen(function*() {
  const wait = waits === "countdown latch"
    ? yield* CountDownLatch.make({ name: "it", count: 1, timeToLive })
    : yield* Latch.make({ name: "it", timeToLive })
  emit({ event: "waiting" } satisfies Event)
  yield* wait.await
  emit({ event: "passed" } satisfies Event)
}).pipe(
  Effect.scoped,
  Effect.provide(
    Coordinator.layer({ namespace, lease: lease as "1 second", margin: margin as "1 second" }).pipe(
      Layer.provideMerge(Redis.layer({ url }))
    )
  )
)

await Effect.runPromise(program)
