/** Effect's own queue on its Redis store, with its own client. It has no call for many jobs, and no worker: fibers take jobs. */
import { NodeRedis } from "@effect/platform-node"
import { Effect, Layer, ManagedRuntime } from "effect"
import { PersistedQueue } from "effect/persistence"
import type { JobQueue, Open } from "../contestant.ts"
import { produce, sample } from "./producing.ts"

export const open: Open = async ({ port }) => {
  const runtime = ManagedRuntime.make(
    PersistedQueue.layer.pipe(
      Layer.provide(PersistedQueue.layerStoreRedis()),
      Layer.provide(NodeRedis.layer({ socket: { host: "127.0.0.1", port } }))
    )
  )
  return {
    queue: async (name): Promise<JobQueue> => {
      const queue = await runtime.runPromise(PersistedQueue.make({ name, schema: sample }))
      return {
        produce: (production) =>
          runtime.runPromise(produce(
            production,
            (job) => queue.offer(job),
            (jobs) => Effect.forEach(jobs, (job) => queue.offer(job), { concurrency: "unbounded", discard: true })
          )),
        work: (concurrency, handler) => {
          const taking = Effect.forever(queue.take((job) => Effect.sync(() => handler(job))))
          return runtime.runPromise(
            Effect.all(Array.from({ length: concurrency }, () => taking), {
              concurrency: "unbounded",
              discard: true
            }).pipe(Effect.andThen(Effect.never))
          )
        }
      }
    }
  }
}
