import { Context, Deferred, Effect, Layer, ManagedRuntime, Schema, Scope } from "effect"
import { Coordinator, Redis, WorkStealing } from "../../src/index.ts"
import type { JobQueue, Open } from "../contestant.ts"
import { produce, sample } from "./producing.ts"

export const open: Open = async ({ lease, port }) => {
  const coordinator = Coordinator.layer({ namespace: "bench", lease }).pipe(
    Layer.provide(Redis.layer({ host: "127.0.0.1", port }))
  )
  return {
    /** All jobs are offered to the deque of this process. */
    queue: async (name): Promise<JobQueue> => {
      const runtime = ManagedRuntime.make(coordinator)
      // The process ends without closing it.
      const scope = Scope.makeUnsafe()
      const queue = await runtime.runPromise(
        Scope.provide(
          Effect.tap(
            WorkStealing.make({ name, payload: sample }),
            (queue) => Effect.scoped(queue.take({ wait: 1 }))
          ),
          scope
        )
      )
      return {
        produce: (production) => runtime.runPromise(produce(production, (job) => queue.offer(job), queue.offerAll)),
        work: (concurrency, handler) =>
          runtime.runPromise(queue.run((job) => Effect.sync(() => handler(job)), { concurrency }))
      }
    },
    steal: (loads, keep) =>
      Effect.runPromise(Effect.scoped(Effect.gen(function*() {
        const all = loads.flat().length
        const done = yield* Deferred.make<void>()
        let ended = 0
        const workers = yield* Effect.forEach(loads, () =>
          Effect.gen(function*() {
            const context = yield* Layer.build(Layer.fresh(coordinator))
            const queue = yield* WorkStealing.make({ name: "jobs", payload: Schema.Number, steal: { keep } }).pipe(
              Effect.provideService(Coordinator.Coordinator, Context.get(context, Coordinator.Coordinator))
            )
            const handler = (millis: number) =>
              Effect.andThen(
                Effect.sleep(millis),
                Effect.suspend(() => ++ended === all ? Deferred.succeed(done, undefined) : Effect.void)
              )
            yield* Effect.forkScoped(queue.run(handler))
            return queue
          }))
        const [first] = workers
        while ((yield* first!.workers).length < loads.length) yield* Effect.sleep(10)
        const from = performance.now()
        yield* Effect.forEach(workers, (queue, at) => queue.offerAll(loads[at]!), { concurrency: "unbounded" })
        yield* Deferred.await(done)
        return performance.now() - from
      })))
  }
}
