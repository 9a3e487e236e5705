/** A read-write lock that many wait for. */
import { assert } from "@effect/vitest"
import { Deferred, Effect, Fiber } from "effect"
import { ReadWriteLock } from "../../src/index.ts"
import { onNode } from "../support/live.ts"
import { waits } from "../support/requests.ts"
import { insist } from "../support/uncertain.ts"
import type { Program, Rows } from "./matrix.ts"

export const requests = [
  ["semaphore.holders", "readWriteLock:crowd"],
  ["semaphore.waiters", "readWriteLock:crowd"],
  ["alarm.ring", "readWriteLock:crowd"]
] as const satisfies Rows

export const program: Program = ({ mine, namespace, server }) =>
  Effect.gen(function*() {
    // More than one call grants, so that the resource's alarm rings.
    const crowd = 600
    const leave = yield* Deferred.make<void>()
    const writing = yield* Deferred.make<void>()
    const writer = yield* Effect.forkChild(
      ReadWriteLock.withWriteLock(Effect.andThen(Deferred.succeed(writing, undefined), Deferred.await(leave)), "crowd")
    )
    yield* Deferred.await(writing)
    const readers = yield* Effect.forkChild(
      onNode(mine)(Effect.forEach(
        Array.from({ length: crowd }),
        () => ReadWriteLock.withReadLock(Effect.void, "crowd"),
        { concurrency: "unbounded", discard: true }
      ))
    )
    yield* waits(server, namespace, "readWriteLock:crowd", crowd)
    assert.strictEqual((yield* insist(ReadWriteLock.holders("crowd"))).length, 1)
    assert.strictEqual((yield* insist(ReadWriteLock.waiting("crowd"))).length, crowd)
    yield* Deferred.succeed(leave, undefined)
    yield* Fiber.join(readers)
    yield* Fiber.join(writer)
  })
