/** Another process of the tests, that has a flow, works on its jobs, and begins runs of it, or awaits those of others. */
import { DateTime, Effect, Layer, Schedule, Schema } from "effect"
import { Coordinator, Flow, Queue, Redis } from "../../src/index.ts"
import { argument, emit } from "../../src/testing/Program.ts"

export interface Argument {
  readonly url: string
  readonly namespace: string
  readonly lease: string
  readonly margin: string
  /** The id of the run, and the layers of nodes and the nodes of each. */
  readonly run: string
  readonly depth: number
  readonly width: number
}

export type Event =
  | { readonly event: "ready" }
  | { readonly event: "begun"; readonly node: number; readonly offeredAt: number }
  | { readonly event: "result"; readonly result: number }

const { depth, lease, margin, namespace, run, url, width } = argument() as Argument

class Steps extends Queue.Service<Steps>()("steps", {
  payload: Schema.Struct({ node: Schema.Number, sum: Schema.Number }),
  success: Schema.Number,
  letters: { crashes: 1000 }
}) {}

const input = Schema.Struct({ depth: Schema.Number, width: Schema.Number })

// Each node is behind two of the layer before. The result of a node is the number of ways to it.
class Layers extends Flow.Service<Layers>()("layers", { queues: [Steps], input }, (flow, { depth, width }) => {
  let node = 0
  let layer: Array<Flow.Node<number>> = []
  for (let at = 0; at < depth; at++) {
    layer = Array.from({ length: width }, (_, place) => {
      const number = node++
      if (at === 0) return flow.job(Steps, { node: number, sum: 1 })
      const after = [...new Set([layer[place]!, layer[(place + 1) % width]!])]
      return flow.job(Steps, { after, payload: (sums) => ({ node: number, sum: sums.reduce((a, b) => a + b, 0) }) })
    })
  }
  return flow.job(Steps, {
    after: layer,
    payload: (sums) => ({ node, sum: sums.reduce((a, b) => a + b, 0) })
  })
}) {}

const program = Effect.gen(function*() {
  const [steps, layers] = [yield* Steps, yield* Layers]
  emit({ event: "ready" } satisfies Event)
  const working = steps.run(({ node, sum }) =>
    Effect.map(Queue.Job, ({ offeredAt }) => {
      emit({ event: "begun", node, offeredAt: DateTime.toEpochMillis(offeredAt) } satisfies Event)
      return sum
    }), { concurrency: 8 })
  yield* Effect.forkChild(Effect.retry(working, Schedule.spaced("100 millis")))
  const running = layers.run({ depth, width }, { id: run, onInterrupt: "continue" })
  emit({ event: "result", result: yield* Effect.retry(running, Schedule.spaced("100 millis")) } satisfies Event)
  return yield* Effect.never
}).pipe(
  Effect.provide(
    Layers.layer.pipe(
      Layer.provideMerge(Steps.layer),
      Layer.provide(
        Coordinator.layer({ namespace, lease: lease as "1 second", margin: margin as "1 second" }).pipe(
          Layer.provideMerge(Redis.layer({ url }))
        )
      )
    )
  )
)

const fiber = Effect.runFork(program as Effect.Effect<never>)
process.on("SIGTERM", () => {
  fiber.addObserver(() => process.exit(0))
  fiber.interruptUnsafe()
})
