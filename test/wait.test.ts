/** The default `wait` of a coordinator: which calls it bounds. */
import { assert, layer } from "@effect/vitest"
import { Deferred, Effect, Fiber, Schema, type Scope } from "effect"
import {
  Barrier,
  Batch,
  type Coordinator,
  CountDownLatch,
  DoubleBarrier,
  Election,
  Flow,
  Latch,
  Lock,
  Queue,
  ReadWriteLock,
  Rendezvous,
  Semaphore,
  SharedRef,
  Signal,
  TaskGroup
} from "../src/index.ts"
import { delivered } from "./support/flows.ts"
import { node, TestServer } from "./support/live.ts"
import { on, pending, promptly, several } from "./support/several.ts"

type Wait = Effect.Effect<
  unknown,
  { readonly reason: { readonly _tag: string } },
  Coordinator.Coordinator | Scope.Scope
>

/** Long enough for a busy machine, and short enough for a namespace that is to be empty soon. */
const timeToLive = "2 seconds"

class Slow
  extends Queue.Service<Slow>()("slow", { payload: Schema.Void, success: Schema.Void, retention: timeToLive })
{}

const rendezvous = Rendezvous.make({ name: "a", schema: Schema.Number, timeToLive })

/** Each of them waits for another process. */
const waits: { readonly [name: string]: Wait } = {
  "Lock.withLock": Lock.withLock(Effect.void, "held"),
  "Lock.acquire": Lock.acquire("held"),
  "Lock.withLocks": Lock.withLocks(Effect.void, ["free", "held"]),
  "ReadWriteLock.withReadLock": ReadWriteLock.withReadLock(Effect.void, "held"),
  "ReadWriteLock.acquireWrite": ReadWriteLock.acquireWrite("held"),
  "Semaphore.withPermit": Effect.flatMap(
    Semaphore.make({ name: "held", permits: 1 }),
    (semaphore) => semaphore.withPermit(Effect.void)
  ),
  "Semaphore.take": Effect.flatMap(
    Semaphore.make({ name: "held", permits: 1 }),
    (semaphore) => semaphore.take(1)
  ),
  "Semaphore.attach": Semaphore.attach({ name: "none" }),
  "Election.lead": Effect.flatMap(Election.make({ name: "held" }), (election) => election.lead(Effect.void)),
  "Election.campaign": Effect.flatMap(Election.make({ name: "held" }), (election) => election.campaign()),
  "Barrier.await": Effect.flatMap(Barrier.make({ name: "a", parties: 2 }), (barrier) => barrier.await()),
  "Barrier.await with an action": Effect.flatMap(
    Barrier.make({ name: "b", parties: 2, action: () => Effect.void }),
    (barrier) => barrier.await()
  ),
  "DoubleBarrier.enter": Effect.flatMap(
    DoubleBarrier.make({ name: "a", parties: 2 }),
    (barrier) => barrier.enter()
  ),
  "DoubleBarrier.withPhase": Effect.flatMap(
    DoubleBarrier.make({ name: "b", parties: 2 }),
    (barrier) => barrier.withPhase(Effect.void)
  ),
  "Latch.await": Effect.flatMap(Latch.make({ name: "a", timeToLive }), (latch) => latch.await),
  "Latch.whenOpen": Effect.flatMap(Latch.make({ name: "a", timeToLive }), (latch) => latch.whenOpen(Effect.void)),
  "CountDownLatch.await": Effect.flatMap(
    CountDownLatch.make({ name: "a", count: 1, timeToLive }),
    (latch) => latch.await
  ),
  "Signal.await": Effect.flatMap(Signal.make({ name: "a", timeToLive }), (signal) => signal.await),
  "Rendezvous.give": Effect.flatMap(rendezvous, (place) => place.give(1)),
  "Rendezvous.take": Effect.flatMap(
    Rendezvous.make({ name: "b", schema: Schema.Number, timeToLive }),
    (place) => place.take()
  ),
  "Rendezvous.exchange": Effect.flatMap(rendezvous, (place) => place.exchange(1)),
  "TaskGroup.awaitAll": Effect.flatMap(
    TaskGroup.make({ name: "a", result: Schema.Number, timeToLive }),
    (group) => group.awaitAll()
  ),
  "SharedRef.until": Effect.flatMap(
    SharedRef.make({ name: "a", schema: Schema.Number, initial: 0 }),
    (ref) => ref.until((n) => n > 0)
  )
}

layer(TestServer.layer, { excludeTestServices: true })("the coordinator's wait", (it) => {
  it.effect("bounds every wait for another process", () =>
    several(1, ([context], namespace, server) =>
      Effect.gen(function*() {
        yield* on(
          yield* node(server.url, { namespace, partitions: 1 }),
          Effect.all([
            Lock.acquire("held"),
            ReadWriteLock.acquireWrite("held"),
            Effect.flatMap(Semaphore.make({ name: "held", permits: 1 }), (semaphore) => semaphore.takeScoped(1)),
            Effect.flatMap(Election.make({ name: "held" }), (election) => election.campaign())
          ])
        )
        const ends = yield* Effect.forEach(
          Object.entries(waits),
          ([name, wait]) =>
            promptly(
              Effect.map(Effect.flip(Effect.scoped(on(context!, wait))), ({ reason }) => [name, reason._tag]),
              name
            ),
          { concurrency: "unbounded" }
        )
        assert.deepStrictEqual(ends, Object.keys(waits).map((name) => [name, "WaitTimeout"]))
      }), { wait: "50 millis" }))

  it.effect("of a run is that of its flow or batch, or of the call", () =>
    several(1, ([context]) =>
      Effect.scoped(on(
        context!,
        Effect.gen(function*() {
          const go = yield* Deferred.make<void>()
          yield* Effect.gen(function*() {
            const options = { queues: [Slow], retention: timeToLive, wait: "60 millis" } as const
            const flow = yield* Flow.make("a", options, (flow) => flow.job(Slow, undefined))
            yield* Effect.addFinalizer(() => Effect.orDie(delivered("a")))
            const batch = yield* Batch.make("b", options)
            yield* Effect.addFinalizer(() => Effect.orDie(delivered("batch:b")))
            const runs = [yield* flow.start(undefined), yield* batch.start()]
            yield* (runs[1] as Batch.Run).add(Slow, undefined)
            yield* (runs[1] as Batch.Run).seal
            for (const run of runs) {
              const late: ReadonlyArray<Effect.Effect<unknown, Flow.FlowError | Batch.BatchError>> = [
                run.await,
                run.waitFor({ wait: "50 millis" })
              ]
              for (const waiting of late) assert.strictEqual((yield* Effect.flip(waiting)).reason._tag, "WaitTimeout")
            }
            yield* Deferred.succeed(go, undefined)
            for (const run of runs) yield* (run.waitFor({ wait: "10 seconds" }) as Effect.Effect<unknown, never>)
          }).pipe(
            Effect.provide(Queue.worker(Slow, () => Deferred.await(go), { concurrency: 2 })),
            Effect.provide(Slow.layer)
          )
        })
      ))))

  it.effect("does not bound the wait for results", () =>
    several(1, ([context]) =>
      Effect.gen(function*() {
        const go = yield* Deferred.make<void>()
        const waiting = yield* Effect.forkChild(Effect.scoped(on(
          context!,
          Effect.gen(function*() {
            const flow = yield* Flow.make(
              "a",
              { queues: [Slow], retention: timeToLive },
              (flow) => flow.job(Slow, undefined)
            )
            yield* Effect.addFinalizer(() => Effect.orDie(delivered("a")))
            yield* Effect.all([
              Effect.flatMap(Slow, (slow) => slow.execute()),
              flow.run(undefined)
            ], { concurrency: "unbounded" })
          }).pipe(
            Effect.provide(Queue.worker(Slow, () => Deferred.await(go), { concurrency: 2 })),
            Effect.provide(Slow.layer)
          )
        )))
        // So long that both would have ended.
        for (let times = 0; times < 2; times++) {
          yield* Effect.flip(on(context!, Effect.flatMap(rendezvous, (place) => place.give(1))))
        }
        yield* pending(waiting)
        yield* Deferred.succeed(go, undefined)
        yield* promptly(Fiber.join(waiting), "the results")
      }), { wait: "50 millis" }))
})
