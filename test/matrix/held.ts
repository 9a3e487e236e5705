/** Locks, read-write locks, and semaphores, and the sessions under them. */
import { assert } from "@effect/vitest"
import { Effect, Fiber, Option } from "effect"
import { Coordinator, Lease, Lock, ReadWriteLock, Semaphore } from "../../src/index.ts"
import { placeOf, spaceOf } from "../../src/internal/hold/place.ts"
import { make as proxy } from "../../src/testing/Proxy.ts"
import { eventually, realSleep } from "../support/eventually.ts"
import { holding, node, onNode } from "../support/live.ts"
import { fields, waits } from "../support/requests.ts"
import { fragile, on } from "../support/several.ts"
import { insist, leads } from "../support/uncertain.ts"
import type { Program, Rows } from "./matrix.ts"

export const requests = [
  ["session.open", ""],
  ["session.renew", ""],
  ["semaphore.join", "semaphore:pool"],
  ["semaphore.resize", ""],
  ["lock.take", "lock:free"],
  ["lock.release", "lock:free"],
  ["lock.take", "lock:again"],
  ["lock.release", "lock:again"],
  ["lock.take", "lock:taken"],
  ["lock.release", "lock:taken"],
  ["semaphore.take", "semaphore:pool"],
  ["semaphore.release", "semaphore:pool"],
  ["semaphore.join", "semaphore:theirs"],
  ["semaphore.state", "semaphore:theirs"],
  ["semaphore.reweigh", "readWriteLock:book"],
  ["semaphore.take", "readWriteLock:again"],
  ["semaphore.release", "readWriteLock:again"],
  ["lock.holders", "lock:taken"],
  ["lock.waiters", "lock:taken"],
  ["session.wake", ""],
  ["session.inherit", "lock:orphaned"],
  ["session.touch", "readWriteLock:touched"],
  ["session.end", ""],
  ["session.owned", ""],
  ["session.reap", ""],
  ["session.unloaded", ""],
  ["session.settle", ""]
] as const satisfies Rows

export const program: Program = ({ line, mine, namespace, other, server }) =>
  Effect.gen(function*() {
    const pool = yield* insist(Semaphore.make({ name: "pool", permits: 2 }))
    yield* leads(pool.resize(3), undefined, insist(pool.permits), 3)
    const theirs = yield* Effect.provideContext(Semaphore.attach({ name: "pool" }), other)

    const token = yield* Effect.gen(function*() {
      assert.strictEqual(yield* fields(server, namespace, "lock:free", "h"), 1)
      const taken = yield* onNode(other)(Lock.withLockIfAvailable(Effect.void, "free"))
      assert.isTrue(Option.isNone(taken))
      return Option.getOrThrow(yield* Lease.current).token
    }).pipe(Lock.withLock("free"))
    yield* eventually(Effect.map(fields(server, namespace, "lock:free", "h"), (holds) => holds === 0))
    const next = yield* Effect.map(Lease.current, (lease) => Option.getOrThrow(lease).token).pipe(
      Lock.withLock("free"),
      Effect.provideContext(other)
    )
    assert.isAbove(next, token)

    const tokenOf = Effect.map(Lease.current, (lease) => Option.getOrThrow(lease).token)
    const { kept } = placeOf(spaceOf(yield* Coordinator.Coordinator), "lock", "again", "key").tenancy
    const again = yield* Effect.repeat(Lock.withLock(tokenOf, "again", { cached: true }), {
      until: () => kept.size > 0
    })
    assert.isAbove(yield* Effect.provideContext(Lock.withLock(tokenOf, "again"), other), again)
    const read = yield* Effect.repeat(ReadWriteLock.withReadLock(tokenOf, "again", { cached: true }), {
      until: () => kept.size > 0
    })
    assert.isAbove(yield* Effect.provideContext(ReadWriteLock.withWriteLock(tokenOf, "again"), other), read)

    const held = yield* Effect.provideContext(holding("taken"), other)
    const waiting = yield* Effect.forkChild(
      Lock.withLock(fields(server, namespace, "lock:taken", "h"), "taken")
    )
    yield* waits(server, namespace, "lock:taken", 1)
    assert.isTrue(Option.isSome(yield* insist(Lock.holder("taken"))))
    assert.strictEqual((yield* insist(Lock.waiting("taken"))).length, 1)
    yield* eventually(Effect.sync(() => line.counters.of("XREAD") > 0))
    // The reader has to look up, since this one waits in another partition; and a new connection asks what it missed.
    const elsewhere = yield* Effect.provideContext(holding("elsewhere"), other)
    const alsoWaiting = yield* Effect.forkChild(Lock.withLock(Effect.void, "elsewhere"))
    yield* waits(server, namespace, "lock:elsewhere", 1)
    yield* line.closeAll
    yield* held.leave
    assert.strictEqual(yield* Fiber.join(waiting), 1)
    yield* eventually(Effect.map(fields(server, namespace, "lock:taken", "h"), (holds) => holds === 0))
    yield* elsewhere.leave
    yield* Fiber.join(alsoWaiting)

    const tokens = yield* Effect.gen(function*() {
      const reader = Option.getOrThrow(yield* Lease.current).token
      const writer = yield* insist(ReadWriteLock.withWriteLock(
        Effect.map(Lease.current, (lease) => Option.getOrThrow(lease).token),
        "book"
      ))
      return { reader, writer }
    }).pipe(ReadWriteLock.withReadLock("book"))
    assert.isAbove(tokens.writer, tokens.reader)
    yield* Effect.scoped(Effect.gen(function*() {
      const attached = yield* Semaphore.attach({ name: "theirs" })
      assert.strictEqual(yield* insist(attached.available), 2)
    })).pipe(
      Effect.provideContext(mine),
      (attaching) =>
        Effect.scoped(
          Effect.andThen(Effect.provideContext(Semaphore.make({ name: "theirs", permits: 2 }), other), attaching)
        )
    )

    yield* pool.withPermits(3)(Effect.gen(function*() {
      assert.strictEqual(yield* theirs.available, 0)
      assert.isTrue(Option.isNone(yield* theirs.takeIfAvailable(1)))
    }))
    // A release whose reply is lost is certain later.
    yield* eventually(Effect.map(theirs.available, (available) => available === 3))
    const all = Option.getOrThrow(yield* theirs.takeIfAvailable(3))
    assert.strictEqual(yield* insist(pool.available), 0)
    yield* theirs.release(all)
    // Two members, and no hold that no process knows of.
    assert.strictEqual(yield* fields(server, namespace, "semaphore:pool", "o"), 2)

    // What a process leaves that is gone.
    yield* Effect.scoped(Effect.gen(function*() {
      const lost = yield* proxy(server)
      yield* on(yield* fragile(server, lost, namespace, 2, 2), Lock.acquire("orphaned"))
      yield* lost.blackhole
      yield* Effect.provideContext(Lock.withLock(Effect.void, "orphaned"), mine)
    }))

    // A hold of hours is touched; here at once.
    yield* Effect.gen(function*() {
      const { channel, key } = placeOf(spaceOf(yield* Coordinator.Coordinator), "readWriteLock", "touched", "name")
      yield* server.cli("PEXPIRE", key, 60_000)
      yield* Effect.callback<void>((resume) =>
        channel.outbox.request({
          verb: "session.touch",
          key,
          args: [],
          settle: () => resume(Effect.void),
          fail: (error) => resume(Effect.die(error))
        })
      )
      assert.isAbove(Number(yield* server.cli("PTTL", key)), 80_000_000)
    }).pipe(ReadWriteLock.withWriteLock("touched"))

    // Another coordinator removes libraries that no session calls.
    const libraries = `{${namespace}:00}:libraries`
    yield* server.cli("SET", libraries, "lockstep_1_gone")
    yield* Effect.scoped(Effect.gen(function*() {
      const context = yield* node(line.url, { namespace, partitions: 2, lease: "4 seconds", margin: "500 millis" })
      yield* eventually(
        Effect.map(server.cli("GET", libraries), (known) => !known.includes("lockstep_1_gone"))
      )
      // Closing would not wait for a connection that has fallen silent.
      yield* onNode(context)(Lock.withLock(Effect.void, "a"))
    }))

    // A coordinator divides a namespace anew that no other one uses any more.
    for (const partitions of [2, 3]) {
      yield* Effect.scoped(Effect.gen(function*() {
        const context = yield* node(line.url, { namespace: `${namespace}:divided`, partitions, lease: "4 seconds" })
        yield* onNode(context)(Lock.withLock(Effect.void, "a"))
      }))
    }

    // When the coordinator closes, a program that does not end within the margin loses what it holds all the same.
    yield* Effect.forkDetach(Lock.withLock(Effect.uninterruptible(realSleep("3 seconds")), "kept"))
    yield* eventually(Effect.map(fields(server, namespace, "lock:kept", "h"), (holds) => holds === 1))
  })
