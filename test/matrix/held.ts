/** Locks, read-write locks, and semaphores, and the sessions under them. */
import { assert } from "@effect/vitest"
import { Effect, Fiber, Option } from "effect"
import { Lease, Lock, ReadWriteLock, Semaphore } from "../../src/index.ts"
import { eventually } from "../support/eventually.ts"
import { holding } from "../support/live.ts"
import { fields, waits } from "../support/requests.ts"
import type { Program, Rows } from "./matrix.ts"

export const requests = [
  ["session.open", ""],
  ["session.renew", ""],
  ["semaphore.create", ""],
  ["semaphore.resize", ""],
  ["semaphore.take", "lock:free"],
  ["semaphore.release", "lock:free"],
  ["semaphore.take", "lock:taken"],
  ["semaphore.release", "lock:taken"],
  ["semaphore.take", "sem:pool"],
  ["semaphore.release", "sem:pool"],
  ["semaphore.attach", "sem:theirs"],
  ["semaphore.state", "sem:theirs"],
  ["semaphore.reweigh", "rw:book"],
  ["semaphore.check", "lock:taken"],
  ["session.wake", ""],
  ["session.end", ""],
  ["session.owned", ""],
  ["session.reap", ""]
] as const satisfies Rows

export const program: Program = ({ line, mine, namespace, other, server }) =>
  Effect.gen(function*() {
    const pool = yield* Semaphore.make({ name: "pool", permits: 2 })
    yield* pool.resize(3)
    assert.strictEqual(yield* pool.permits, 3)
    const theirs = yield* Effect.provideContext(Semaphore.attach({ name: "pool" }), other)

    const token = yield* Effect.gen(function*() {
      assert.strictEqual(yield* fields(server, namespace, "lock:free", "h"), 1)
      const taken = yield* Effect.provideContext(Lock.withLockIfAvailable(Effect.void, "free"), other)
      assert.isTrue(Option.isNone(taken))
      return Option.getOrThrow(yield* Lease.current).token
    }).pipe(Lock.withLock("free"))
    assert.strictEqual(yield* fields(server, namespace, "lock:free", "h"), 0)
    const next = yield* Effect.map(Lease.current, (lease) => Option.getOrThrow(lease).token).pipe(
      Lock.withLock("free"),
      Effect.provideContext(other)
    )
    assert.isAbove(next, token)

    const held = yield* Effect.provideContext(holding("taken"), other)
    const waiting = yield* Effect.forkChild(
      Lock.withLock(fields(server, namespace, "lock:taken", "h"), "taken")
    )
    yield* waits(server, namespace, "lock:taken", 1)
    yield* eventually(Effect.sync(() => line.counters.of("XREAD") > 0))
    // The reader has to look up, since this one waits in another partition; and a new connection asks what it missed.
    const elsewhere = yield* Effect.provideContext(holding("elsewhere"), other)
    const alsoWaiting = yield* Effect.forkChild(Lock.withLock(Effect.void, "elsewhere"))
    yield* waits(server, namespace, "lock:elsewhere", 1)
    yield* line.closeAll
    yield* held.leave
    assert.strictEqual(yield* Fiber.join(waiting), 1)
    assert.strictEqual(yield* fields(server, namespace, "lock:taken", "h"), 0)
    yield* elsewhere.leave
    yield* Fiber.join(alsoWaiting)

    const tokens = yield* Effect.gen(function*() {
      const reader = Option.getOrThrow(yield* Lease.current).token
      const writer = yield* ReadWriteLock.withWriteLock(
        Effect.map(Lease.current, (lease) => Option.getOrThrow(lease).token),
        "book"
      )
      return { reader, writer }
    }).pipe(ReadWriteLock.withReadLock("book"))
    assert.isAbove(tokens.writer, tokens.reader)
    yield* Effect.scoped(Effect.gen(function*() {
      const attached = yield* Semaphore.attach({ name: "theirs" })
      assert.strictEqual(yield* attached.available, 2)
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
    assert.strictEqual(yield* theirs.available, 3)
    const all = Option.getOrThrow(yield* theirs.takeIfAvailable(3))
    assert.strictEqual(yield* pool.available, 0)
    yield* theirs.release(all)
    // Two members, and no hold that nobody knows of.
    assert.strictEqual(yield* fields(server, namespace, "sem:pool", "h"), 2)

    // What is held when the coordinator closes goes back as well.
    yield* Effect.forkDetach(Lock.withLock(Effect.never, "kept"))
    yield* eventually(Effect.map(fields(server, namespace, "lock:kept", "h"), (holds) => holds === 1))
  })
