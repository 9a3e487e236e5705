/** Another process of the tests, that takes one element of a persisted queue, and keeps it. */
import { Effect, Layer, Schema } from "effect"
import { PersistedQueue } from "effect/persistence"
import { layerStore } from "../../src/effect/PersistedQueue.ts"
import { Coordinator, Redis } from "../../src/index.ts"
import { argument, emit } from "../../src/testing/Program.ts"

export interface Argument {
  readonly url: string
  readonly namespace: string
}

export interface Event {
  readonly id: string
  readonly attempts: number
}

const { namespace, url } = argument() as Argument

const program = Effect.gen(function*() {
  const queue = yield* PersistedQueue.make({ name: "shared", schema: Schema.Number })
  yield* queue.take((_, event) => {
    emit(event satisfies Event)
    return Effect.never
  })
}).pipe(Effect.provide(
  PersistedQueue.layer.pipe(
    Layer.provide(layerStore({ retention: "200 millis" })),
    Layer.provide(Coordinator.layer({ namespace, lease: "1500 millis", margin: "400 millis", partitions: 1 })),
    Layer.provide(Redis.layer({ url }))
  )
))

Effect.runFork(program)
