/** effect-mq on its Redis store, with its own client, and one worker. What its settings do not say is as by default. */
import { NodeRedis } from "@effect/platform-node"
import { Effect, Layer, ManagedRuntime } from "effect"
import { registerHooks } from "node:module"
import type { JobQueue, Open } from "../contestant.ts"
import { produce, sample } from "./producing.ts"

// Version 0.7 still asks for modules by the paths that they had before Effect 4 was released.
registerHooks({
  resolve: (specifier, context, next) => next(specifier.replace("effect/unstable/", "effect/"), context)
})
const { Job, Worker } = await import("effect-mq")
const { RedisJobStore } = await import("effect-mq/redis")

export const open: Open = async ({ port }) => {
  const store = RedisJobStore.layer().pipe(Layer.provide(NodeRedis.layer({ socket: { host: "127.0.0.1", port } })))
  const runtime = ManagedRuntime.make(store)
  await runtime.runPromise(Effect.void)
  return {
    queue: async (name, finished): Promise<JobQueue> => {
      const bench = Job.make("bench", {
        payload: sample.fields,
        queue: name,
        ...finished === "removed" ? { defaults: { keep: { completed: { count: 0 } } } } : {}
      })
      return {
        produce: (production) =>
          runtime.runPromise(produce(production, (job) => bench.enqueue(job), (jobs) => bench.enqueueMany(jobs))),
        work: (concurrency, handler) =>
          runtime.runPromise(Layer.launch(
            bench.toLayer((job) => Effect.sync(() => handler(job)), { concurrency }).pipe(Layer.provide(Worker.layer()))
          ))
      }
    }
  }
}
