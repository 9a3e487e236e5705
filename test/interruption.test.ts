/**
 * Interruption at every point of acquire and release: before each operation of the fiber, and while each request is on
 * its way to Redis, executed but not answered, or answered. Nothing may leak and no waiter may be left in the queue.
 */
import { assert, layer } from "@effect/vitest"
import { Deferred, Effect, Exit, Fiber, Option, type Scope, Stream } from "effect"
import {
  Barrier,
  type Coordinator,
  DoubleBarrier,
  Election,
  Lease,
  Lock,
  ReadWriteLock,
  Redis,
  Semaphore
} from "../src/index.ts"
import { make as proxy, type Request } from "../src/testing/Proxy.ts"
import { eventually, realSleep } from "./support/eventually.ts"
import { interruptedAt } from "./support/interrupter.ts"
import { assertEmpty, freshNamespace, node, onNode, TestServer, withNode } from "./support/live.ts"

// Of a session that owns nothing.
const recordLength = 49

const holds = (namespace: string) =>
  Effect.gen(function*() {
    const redis = yield* Redis.Redis
    const keys = yield* redis.send<Array<string>>("KEYS", `{${namespace}:*`)
    const owned = yield* Effect.forEach(
      keys.filter((key) => key.includes(":own:")),
      (key) => redis.send<Array<string>>("SMEMBERS", key)
    )
    // Of a lock that has nothing but a hold; and records of sessions that own something, which stands behind their numbers.
    const lone = yield* Effect.forEach(keys.filter((key) => key.endsWith(":sessions")), (key) =>
      Effect.flatMap(redis.send<Array<string>>("HKEYS", key), (fields) =>
        Effect.filter(
          fields.filter((field) =>
            /^[@s]/.test(field)
          ),
          (field) =>
            field.startsWith("@")
              ? Effect.succeed(true)
              : Effect.map(redis.send<number>("HSTRLEN", key, field), (length) => length > recordLength)
        )))
    return [
      ...lone.flat(),
      ...keys.filter((key) => /:(lock|readWriteLock|semaphore|barrier|doubleBarrier|election):/.test(key)),
      // The set of a session is never empty.
      ...owned.flat().filter((entry) => entry !== "")
    ]
  })

type Program = Effect.Effect<unknown, unknown, Coordinator.Coordinator>

/** A program that was notified that it leads is notified that it does not any more. */
const elected = (program: (election: Election.Election<void>) => Effect.Effect<unknown, unknown, Scope.Scope>) =>
  Effect.suspend(() => {
    let terms = 0
    const count = (by: number) => () => Effect.sync(() => terms += by)
    return Effect.onExit(
      Effect.scoped(Effect.flatMap(Election.make({ name: "x", onAcquired: count(1), onLost: count(-1) }), program)),
      () => Effect.sync(() => assert.strictEqual(terms, 0))
    )
  })

const programs: Record<string, Program> = {
  "Lock.withLock": Lock.withLock(Effect.yieldNow, "x"),
  "Lock.withLock with a time to wait": Lock.withLock(Effect.yieldNow, "x", { wait: "1 minute", maxHold: "1 minute" }),
  "Lock.withLockIfAvailable": Lock.withLockIfAvailable(Effect.yieldNow, "x"),
  "Lock.acquire": Effect.scoped(Effect.andThen(Lock.acquire("x"), Effect.yieldNow)),
  "Lock.withLocks": Lock.withLocks(Effect.yieldNow, ["x", "y"]),
  "ReadWriteLock, upgraded": ReadWriteLock.withReadLock(ReadWriteLock.withWriteLock(Effect.yieldNow, "x"), "x"),
  "ReadWriteLock, downgraded": Effect.scoped(
    Effect.gen(function*() {
      const lease = yield* ReadWriteLock.acquireWrite("x")
      yield* ReadWriteLock.downgrade(lease)
    })
  ),
  "Semaphore.withPermits": Effect.scoped(
    Effect.flatMap(Semaphore.make({ name: "x", permits: 2 }), (semaphore) => semaphore.withPermits(2)(Effect.yieldNow))
  ),
  "Barrier.await": Effect.scoped(
    Effect.flatMap(
      Barrier.make({ name: "x", parties: 2 }),
      (barrier) => Effect.all([barrier.await(), barrier.await()], { concurrency: "unbounded" })
    )
  ),
  "Barrier.await, with an action": Effect.scoped(
    Effect.flatMap(
      Barrier.make({ name: "x", parties: 1, action: () => Effect.yieldNow }),
      (barrier) => barrier.await()
    )
  ),
  "DoubleBarrier.withPhase": Effect.scoped(
    Effect.flatMap(DoubleBarrier.make({ name: "x", parties: 1 }), (barrier) => barrier.withPhase(Effect.yieldNow))
  ),
  "DoubleBarrier.enter and leave": Effect.scoped(
    Effect.flatMap(DoubleBarrier.make({ name: "x", parties: 2 }), (barrier) => {
      const both = Effect.flatMap(barrier.enter(), barrier.leave)
      return Effect.all([both, both], { concurrency: "unbounded" })
    })
  ),
  "Election.lead": elected((election) => election.lead(Effect.yieldNow)),
  "Election.campaign": elected((election) => Effect.andThen(Effect.scoped(election.campaign()), Effect.yieldNow)),
  "Election.changes": elected((election) => election.lead(Stream.runHead(election.changes))),
  "Election.resign": elected((election) => {
    let rounds = 0
    return election.lead(
      Effect.suspend(() => ++rounds === 2 ? Effect.void : Effect.andThen(election.resign, Effect.never))
    )
  })
}

layer(TestServer.layer, { excludeTestServices: true, timeout: "120 seconds" })("interruption", (it) => {
  for (const [name, program] of Object.entries(programs)) {
    it.effect(`before every operation of ${name}`, () =>
      withNode((namespace) =>
        Effect.gen(function*() {
          let interrupted = 0
          for (let at = 1;; at++) {
            const { exit, reached } = yield* interruptedAt(at, program)
            assert.isFalse(Exit.hasDies(exit), String(exit))
            yield* eventually(Effect.map(holds(namespace), (keys) => keys.length === 0), {
              interval: 1,
              message: `at ${at}`
            })
            if (!reached) {
              assert.isTrue(Exit.isSuccess(exit))
              break
            }
            if (Exit.hasInterrupts(exit)) interrupted++
          }
          assert.isAbove(interrupted, 5)
        })
      ))
  }

  it.effect("by the body itself, which still ends before its hold does", () =>
    withNode(() =>
      Effect.gen(function*() {
        const events: Array<string> = []
        const held = (body: Effect.Effect<void>) => ({
          withLock: Lock.withLock(body, "x"),
          withLocks: Lock.withLocks(body, ["x", "y"]),
          protect: Effect.scoped(Effect.flatMap(Lock.acquire("x"), (lease) => Lease.protect(body, lease))),
          reentrant: Lock.withLock(Lock.withLock(body, "x", { reentrant: true }), "x")
        })
        for (const name of ["withLock", "withLocks", "protect", "reentrant"] as const) {
          const fiber = yield* Effect.forkChild(Effect.withFiber((fiber) => {
            // As by an abort signal that the body triggers.
            const body = Effect.sync(() => fiber.interruptUnsafe()).pipe(
              Effect.andThen(realSleep(30)),
              Effect.onExit((exit) =>
                Effect.sync(() => events.push(Exit.hasInterrupts(exit) ? "interrupted" : "ran on"))
              )
            )
            return held(body)[name]
          }))
          assert.isTrue(Exit.hasInterrupts(yield* Fiber.await(fiber)))
          assert.deepStrictEqual(events.splice(0), ["interrupted"], name)
        }
      })
    ))

  it.effect("at every moment of waiting behind another holder", () =>
    withNode((namespace) =>
      Effect.gen(function*() {
        const server = yield* TestServer
        const other = yield* node(server.url, { namespace })
        let granted = 0
        for (let delay = 0; delay < 120; delay++) {
          const held = yield* Deferred.make<void>()
          const go = yield* Deferred.make<void>()
          const holder = yield* Effect.forkChild(
            Effect.andThen(Deferred.succeed(held, undefined), Deferred.await(go)).pipe(Lock.withLock("x"))
          )
          yield* Deferred.await(held)
          const waiter = yield* Effect.forkChild(
            Effect.sync(() => void granted++).pipe(Lock.withLock("x"), onNode(other)),
            { startImmediately: true }
          )
          yield* Deferred.succeed(go, undefined)
          // The grant is on its way through Redis; the interruption meets it somewhere.
          yield* Effect.callback<void>((resume) => {
            const end = performance.now() + delay * 0.02
            const look = () => performance.now() < end ? setImmediate(look) : resume(Effect.void)
            look()
          })
          yield* Fiber.interrupt(waiter)
          yield* Fiber.join(holder)
          // Free at once, without waiting for a lease to run out.
          const free = yield* Lock.withLock(Effect.succeed("free"), "x", { wait: "2 seconds" })
          assert.strictEqual(free, "free")
          yield* eventually(Effect.map(holds(namespace), (keys) => keys.length === 0), { interval: 1 })
        }
        // Early ones were interrupted before the grant, late ones after it.
        assert.isBelow(granted, 120)
      })
    ))

  const verbs = ["lock.take", "lock.release"]
  for (const verb of verbs) {
    for (const verdict of ["pass", "dropReply", "drop"] as const) {
      it.effect(`while ${verb} is on its way, which then suffers "${verdict}"`, () =>
        Effect.gen(function*() {
          const server = yield* TestServer
          const namespace = freshNamespace()
          yield* Effect.scoped(Effect.gen(function*() {
            const wire = yield* proxy(server)
            const context = yield* node(wire.url, { namespace })
            const direct = yield* node(server.url, { namespace })
            yield* Lock.withLock(Effect.void, "x").pipe(Effect.provideContext(context))
            const isIt = (request: Request) => request.args.includes(verb)
            const held = yield* wire.hold(isIt)
            const fiber = yield* Effect.forkChild(
              Lock.withLock(Effect.void, "x").pipe(Effect.provideContext(context))
            )
            yield* held.request
            const interruption = yield* Effect.forkChild(Fiber.interrupt(fiber))
            yield* held.release(verdict)
            yield* Fiber.join(interruption)
            const free = yield* Lock.withLock(Effect.succeed("free"), "x", { wait: "4 seconds" }).pipe(
              Effect.provideContext(direct)
            )
            assert.strictEqual(free, "free")
            yield* eventually(
              Effect.map(holds(namespace), (keys) => keys.length === 0).pipe(Effect.provideContext(direct))
            )
            assert.isTrue(
              Option.isSome(yield* Lock.withLockIfAvailable(Effect.void, "x").pipe(Effect.provideContext(context)))
            )
          }))
          yield* assertEmpty(server, namespace)
        }))
    }
  }
})
