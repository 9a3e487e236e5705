/** Another process of the tests, with workers of two queues, that `runMain` interrupts at a signal. */
import { NodeRuntime } from "@effect/platform-node"
import { Effect, Layer, Schema } from "effect"
import { Coordinator, Queue, Redis } from "../../src/index.ts"
import { argument, emit } from "../../src/testing/Program.ts"

export interface Argument {
  readonly url: string
  readonly namespace: string
  /** Its handlers end at the first signal. */
  readonly finishes: boolean
}

export interface Event {
  readonly event: "begun" | "signal" | "done" | "interrupted"
}

const { finishes, namespace, url } = argument() as Argument

const say = (event: Event["event"]) => Effect.sync(() => emit({ event } satisfies Event))

const signalled = Effect.callback<void>((resume) => void process.once("SIGTERM", () => resume(Effect.void)))

const worker = (name: string) => {
  class Work extends Queue.Service<Work>()(name, { payload: Schema.Number }) {}
  const handler = () =>
    say("begun").pipe(
      Effect.andThen(finishes ? signalled : Effect.never),
      Effect.andThen(say("done")),
      Effect.onInterrupt(() => say("interrupted"))
    )
  return Layer.provide(Queue.worker(Work, handler, { grace: "1 minute", signals: ["SIGTERM"] }), Work.layer)
}

process.on("SIGTERM", () => emit({ event: "signal" } satisfies Event))

Layer.launch(Layer.mergeAll(worker("one"), worker("two"))).pipe(
  Effect.provide(Coordinator.layer({ namespace, partitions: 1 }).pipe(Layer.provideMerge(Redis.layer({ url })))),
  NodeRuntime.runMain
)
