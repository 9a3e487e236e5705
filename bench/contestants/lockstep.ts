import { Effect, Layer, ManagedRuntime } from "effect"
import { Coordinator, Lock, Redis, Semaphore } from "../../src/index.ts"
import { all, holdsAtOnce, type Open, type Worker } from "../contestant.ts"

const inside = (worker: Worker): Effect.Effect<void> =>
  worker.stay === 0
    ? Effect.sync(worker.entered)
    : Effect.sync(worker.entered).pipe(
      Effect.andThen(Effect.sleep(worker.stay)),
      Effect.andThen(Effect.sync(worker.leaving))
    )

const loops = <E, R>(workers: ReadonlyArray<Worker>, under: (worker: Worker) => Effect.Effect<void, E, R>) =>
  Effect.forEach(
    workers,
    Effect.fnUntraced(function*(worker: Worker) {
      while (worker.running()) {
        yield* under(worker)
        if (worker.pause !== 0) yield* Effect.sleep(worker.pause)
      }
    }),
    { concurrency: "unbounded", discard: true }
  )

/** With `withLock` a hold is a fiber and the fiber that it protects; with `Lock.acquire` it is an entry of a scope. */
const make = (scoped: boolean): Open => async ({ lease, port }) => {
  const runtime = ManagedRuntime.make(
    Coordinator.layer({ namespace: "bench", lease }).pipe(Layer.provide(Redis.layer({ host: "127.0.0.1", port })))
  )
  await runtime.context()
  /** Settles only by failing. */
  const forever = <E>(
    make: (held: () => void) => Effect.Effect<unknown, E, Coordinator.Coordinator>
  ): Promise<void> =>
    new Promise((resolve, reject) => {
      runtime.runPromise(make(resolve)).catch((error) => {
        console.error(`lockstep: ${error}`)
        reject(error)
      })
    })
  return {
    locks: (workers) => runtime.runPromise(loops(workers, (worker) => Lock.withLock(inside(worker), worker.key))),
    permits: (count, workers) =>
      runtime.runPromise(Effect.scoped(Effect.gen(function*() {
        const semaphore = yield* Semaphore.make({ name: workers[0]!.key, permits: count })
        yield* loops(workers, (worker) => semaphore.withPermits(1)(inside(worker)))
      }))),
    hold: (keys) =>
      scoped
        ? forever((held) =>
          Effect.forEach(keys, (key) => Lock.acquire(key), { concurrency: holdsAtOnce, discard: true }).pipe(
            Effect.andThen(Effect.sync(held)),
            Effect.andThen(Effect.never),
            Effect.scoped
          )
        )
        : all(keys, holdsAtOnce, (key) =>
          forever((held) =>
            Lock.withLock(Effect.andThen(Effect.sync(held), Effect.never), key)
          ))
  }
}

export const open: Open = make(false)

export const openScoped: Open = make(true)
