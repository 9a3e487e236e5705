/** Another process of the tests: works on shards of a group, or waits for all of them, and reports what happens to it. */
import { Effect, Exit, Layer, Option, Schema, Stream } from "effect"
import { Coordinator, Redis, TaskGroup } from "../../src/index.ts"
import { argument, emit } from "../../src/testing/Program.ts"
import { now } from "../support/now.ts"

export interface Argument {
  readonly url: string
  readonly namespace: string
  readonly lease: string
  readonly margin: string
  readonly worker: string
  /** `hold` works on its shards for ever, `cycle` on each for so many milliseconds; the others only look. */
  readonly mode: "hold" | "cycle" | "await" | "progress"
  readonly shards: ReadonlyArray<string>
  readonly millis: number
}

export type Event =
  | { readonly event: "ready" }
  | { readonly event: "started"; readonly shard: string; readonly at: number }
  | { readonly event: "tick"; readonly shard: string; readonly at: number }
  | { readonly event: "submitted"; readonly shard: string; readonly at: number }
  | { readonly event: "refused"; readonly shard: string; readonly reason: string; readonly at: number }
  | { readonly event: "shown"; readonly done: number }

const { lease, margin, millis, mode, namespace, shards, url, worker } = argument() as Argument

const say = (event: Event) => Effect.sync(() => emit(event))

const program = Effect.gen(function*() {
  const group = yield* TaskGroup.make({ name: "shared", result: Schema.String, timeToLive: "100 millis" })
  yield* say({ event: "ready" })
  if (mode === "await") return yield* Effect.asVoid(group.awaitAll({ onWorkerLost: "wait" }))
  if (mode === "progress") {
    return yield* Stream.runForEach(group.changes, ({ done }) => say({ event: "shown", done }))
  }
  yield* Effect.forEach(shards, (shard) =>
    Effect.gen(function*() {
      const work = Effect.gen(function*() {
        yield* say({ event: "started", shard, at: now() })
        if (mode === "cycle") yield* Effect.sleep(millis)
        while (mode === "hold") {
          yield* Effect.sleep(20)
          yield* say({ event: "tick", shard, at: now() })
        }
        return worker
      })
      const exit = yield* Effect.exit(group.run(shard, work))
      if (Exit.isSuccess(exit)) return yield* say({ event: "submitted", shard, at: now() })
      const error = Option.getOrThrow(Exit.findErrorOption(exit))
      yield* say({ event: "refused", shard, reason: error.reason._tag, at: now() })
    }), { concurrency: mode === "hold" ? "unbounded" : 2 })
}).pipe(
  Effect.scoped,
  Effect.provide(
    Coordinator.layer({ namespace, lease: lease as "1 second", margin: margin as "1 second" }).pipe(
      Layer.provideMerge(Redis.layer({ url }))
    )
  )
)

await Effect.runPromise(program)
