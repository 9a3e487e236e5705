/** Each form that waits or holds makes a span where a tracer is provided. */
import { assert, layer } from "@effect/vitest"
import { Deferred, Effect, Fiber, Layer, Option, Schema, type Scope } from "effect"
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
  Singleton,
  TaskGroup
} from "../src/index.ts"
import { delivered } from "./support/flows.ts"
import { TestServer, withNode } from "./support/live.ts"
import { promptly } from "./support/several.ts"
import { recording } from "./support/spans.ts"

type Case = [
  use: Effect.Effect<unknown, unknown, Coordinator.Coordinator | Scope.Scope>,
  spans: ReadonlyArray<string>
]

/** Long enough for a busy machine, and short enough for a namespace that is to be empty soon. */
const timeToLive = "2 seconds"

class Work
  extends Queue.Service<Work>()("work", { payload: Schema.Number, success: Schema.Number, retention: timeToLive })
{}

const working = Queue.worker(Work, (n) => Effect.succeed(n + 1)).pipe(Layer.provideMerge(Work.layer))

const cases: { readonly [name: string]: Case } = {
  Lock: [
    Effect.gen(function*() {
      yield* Lock.acquire("a")
      yield* Lock.acquireIfAvailable("b")
      yield* Lock.withLocks(Effect.void, ["c", "d"])
    }),
    [
      "lockstep.Lock.acquire a",
      "lockstep.Lock.acquireIfAvailable b",
      "lockstep.Lock.withLocks c d",
      ...["a", "b", "c", "d"].flatMap((key) => [`lockstep.lock.hold ${key}`, `lockstep.lock.wait ${key}`])
    ]
  ],
  ReadWriteLock: [
    Effect.gen(function*() {
      yield* ReadWriteLock.acquireRead("a")
      yield* ReadWriteLock.withWriteLock(Effect.void, "b")
    }),
    [
      "lockstep.ReadWriteLock.acquireRead a",
      "lockstep.ReadWriteLock.write b",
      ...["a", "b"].flatMap((key) => [`lockstep.readWriteLock.hold ${key}`, `lockstep.readWriteLock.wait ${key}`])
    ]
  ],
  Semaphore: [
    Effect.gen(function*() {
      yield* Semaphore.make({ name: "a", permits: 3 })
      const semaphore = yield* Semaphore.attach({ name: "a" })
      yield* semaphore.takeScoped(1)
      yield* Effect.flatMap(semaphore.take(1), semaphore.release)
      yield* semaphore.withPermits(1)(Effect.void)
    }),
    [
      "lockstep.Semaphore.attach a",
      "lockstep.Semaphore.take a",
      "lockstep.Semaphore.takeScoped a",
      "lockstep.Semaphore.withPermits a",
      ...[1, 2, 3].flatMap(() => ["lockstep.semaphore.hold a", "lockstep.semaphore.wait a"])
    ]
  ],
  Election: [
    Effect.gen(function*() {
      const election = yield* Election.make({ name: "a" })
      yield* election.lead(Effect.void)
      yield* Effect.scoped(election.campaign())
    }),
    [
      "lockstep.Election.campaign a",
      "lockstep.Election.lead a",
      ...[1, 2].flatMap(() => ["lockstep.election.hold a", "lockstep.election.wait a"])
    ]
  ],
  Singleton: [
    Effect.gen(function*() {
      const run = yield* Deferred.make<void>()
      yield* Layer.build(Singleton.make("a", Deferred.succeed(run, undefined)))
      yield* Deferred.await(run)
    }),
    ["lockstep.Singleton a", "lockstep.singleton.hold a", "lockstep.singleton.wait a"]
  ],
  Barrier: [
    Effect.gen(function*() {
      yield* Effect.flatMap(Barrier.make({ name: "a", parties: 1 }), (barrier) => barrier.await())
      yield* Effect.flatMap(
        Barrier.make({ name: "b", parties: 1, action: () => Effect.void }),
        (barrier) => barrier.await()
      )
    }),
    ["lockstep.Barrier.await a", "lockstep.Barrier.await b", "lockstep.barrier.hold b", "lockstep.barrier.wait b"]
  ],
  DoubleBarrier: [
    Effect.gen(function*() {
      const barrier = yield* DoubleBarrier.make({ name: "a", parties: 1 })
      yield* Effect.flatMap(barrier.enter(), barrier.leave)
      yield* barrier.withPhase(Effect.void)
    }),
    [
      "lockstep.DoubleBarrier.enter a",
      "lockstep.DoubleBarrier.leave a",
      "lockstep.DoubleBarrier.withPhase a",
      ...[1, 2].flatMap(() => ["lockstep.doubleBarrier.hold a", "lockstep.doubleBarrier.wait a"]),
      // Of leaving.
      ...[1, 2].map(() => "lockstep.doubleBarrier.wait a")
    ]
  ],
  latches: [
    Effect.gen(function*() {
      const latch = yield* Latch.make({ name: "a", open: true, timeToLive })
      yield* latch.await
      yield* latch.whenOpen(Effect.void)
      const counted = yield* CountDownLatch.make({ name: "b", count: 1, timeToLive })
      yield* counted.countDown()
      yield* counted.await
    }),
    ["lockstep.CountDownLatch.await b", "lockstep.Latch.await a", "lockstep.Latch.await a"]
  ],
  Rendezvous: [
    Effect.gen(function*() {
      const rendezvous = yield* Rendezvous.make({ name: "a", schema: Schema.Number, timeToLive })
      const give = rendezvous.give(1)
      const both = { concurrency: "unbounded" } as const
      yield* Effect.all([give, rendezvous.take()], both)
      yield* Effect.all([give, rendezvous.takeWith(() => Effect.void)], both)
      yield* Effect.all([rendezvous.exchange(1), rendezvous.exchange(2)], both)
    }),
    [
      ...["exchange", "exchange", "give", "give", "take", "takeWith"].map((verb) => `lockstep.Rendezvous.${verb} a`),
      "lockstep.rendezvous.hold a",
      ...Array.from({ length: 6 }, () => "lockstep.rendezvous.wait a")
    ]
  ],
  Signal: [
    Effect.gen(function*() {
      const signal = yield* Signal.make({ name: "a", timeToLive })
      yield* signal.set
      yield* signal.await
    }),
    ["lockstep.Signal.await a"]
  ],
  SharedRef: [
    Effect.gen(function*() {
      const ref = yield* SharedRef.make({ name: "a", schema: Schema.Number, initial: 1 })
      yield* ref.until((n) => n === 1)
    }),
    ["lockstep.SharedRef.until a"]
  ],
  TaskGroup: [
    Effect.gen(function*() {
      const group = yield* TaskGroup.make({ name: "a", result: Schema.Number, timeToLive })
      yield* Effect.flatMap(group.register("1"), (task) => task.submit(1))
      yield* group.run("2", Effect.succeed(2))
      yield* group.awaitAll()
    }),
    [
      "lockstep.TaskGroup.awaitAll a",
      "lockstep.TaskGroup.register a",
      "lockstep.TaskGroup.run a",
      ...[1, 2].flatMap(() => ["lockstep.taskGroup.hold a", "lockstep.taskGroup.wait a"])
    ]
  ],
  Flow: [
    Effect.gen(function*() {
      const flow = yield* Flow.make("a", { queues: [Work], retention: timeToLive }, (flow) => flow.job(Work, 1))
      assert.strictEqual(yield* flow.run(undefined, { id: "1" }), 2)
      assert.strictEqual(yield* flow.attach("1").await, 2)
      yield* Effect.addFinalizer(() => Effect.orDie(delivered("a")))
    }).pipe(Effect.provide(working)),
    ["lockstep.Flow.await a/1", "lockstep.Flow.run a/1"]
  ],
  Batch: [
    Effect.gen(function*() {
      const batch = yield* Batch.make("a", { queues: [Work], retention: timeToLive, size: 1 })
      const run = yield* batch.start({ id: "1" })
      yield* run.add(Work, 1)
      yield* run.await
      yield* Effect.addFinalizer(() => Effect.orDie(delivered("batch:a")))
    }).pipe(Effect.provide(working)),
    ["lockstep.Batch.await a/1"]
  ]
}

layer(TestServer.layer, { excludeTestServices: true })("spans", (it) => {
  for (const [name, [use, expected]] of Object.entries(cases)) {
    it.effect(`are made by every wait and hold: ${name}`, () =>
      withNode(() =>
        Effect.gen(function*() {
          const { spans, traced } = recording()
          yield* traced(Effect.scoped(use))
          // Those of jobs belong to their queue.
          const own = spans.filter(({ name }) => !name.startsWith("lockstep.Queue."))
          assert.deepStrictEqual(
            own.map(({ attributes, name }) => `${name} ${String(attributes.get("lockstep.key"))}`).sort(),
            expected.toSorted()
          )
          for (const { name, status } of own) assert.strictEqual(status._tag, "Ended", name)
        })
      ))
  }

  it.effect("are made in the order of wait and hold, inside that of the call", () =>
    withNode(() =>
      Effect.gen(function*() {
        const { spans, traced } = recording()
        yield* traced(Lock.withLock(Effect.void, "a"))
        assert.deepStrictEqual(
          spans.map(({ attributes, name }) => [name, attributes.get("lockstep.kind")]),
          [["lockstep.Lock.withLock", "lock"], ["lockstep.lock.wait", "lock"], ["lockstep.lock.hold", "lock"]]
        )
        const [call, ...parts] = spans
        for (const { parent } of parts) assert.strictEqual(Option.getOrThrow(parent).spanId, call!.spanId)
      })
    ))

  it.effect("cover permits that were taken until they are released, or lost", () =>
    withNode(() =>
      Effect.gen(function*() {
        const { spans, traced } = recording()
        const exits = () =>
          spans.flatMap(({ name, status }) =>
            name === "lockstep.semaphore.hold" ? [status._tag === "Ended" ? status.exit._tag : status._tag] : []
          )
        const semaphore = yield* Semaphore.make({ name: "a", permits: 1 })
        const first = yield* traced(semaphore.take(1))
        assert.deepStrictEqual(exits(), ["Started"])
        const waiting = yield* Effect.forkChild(traced(semaphore.take(1, { maxHold: "50 millis" })))
        yield* semaphore.release(first)
        assert.deepStrictEqual(exits()[0], "Success")
        const second = yield* promptly(Fiber.join(waiting), "the second permit")
        assert.deepStrictEqual(exits(), ["Success", "Started"])
        yield* Effect.exit(second.lost)
        assert.deepStrictEqual(exits(), ["Success", "Failure"])
        yield* semaphore.release(second)
        assert.deepStrictEqual(exits(), ["Success", "Failure"])
        // Nothing is taken, so there is nothing to cover.
        const third = yield* semaphore.take(1)
        yield* traced(semaphore.takeIfAvailable(1))
        assert.lengthOf(exits(), 2)
        yield* semaphore.release(third)
      })
    ))
})
