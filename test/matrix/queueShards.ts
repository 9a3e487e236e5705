import { assert } from "@effect/vitest"
import { Deferred, Effect, Fiber, Schema } from "effect"
import { Queue } from "../../src/index.ts"
import { partitionOf } from "../../src/internal/actor/keys.ts"
import { eventually } from "../support/eventually.ts"
import { insist } from "../support/uncertain.ts"
import type { Program, Rows } from "./matrix.ts"

export const requests = [["queue.shed", "queue:mails"]] as const satisfies Rows

export const program: Program = () =>
  Effect.gen(function*() {
    const make = Queue.make({ name: "mails", payload: Schema.Number, retention: "500 millis", shards: 2 })
    const mails = yield* insist(make)
    const gate = yield* Deferred.make<void>()
    let [begun, running, most] = [0, 0, 0]
    const handler = Effect.suspend(() => {
      begun++
      most = Math.max(most, ++running)
      return Effect.ensuring(Deferred.await(gate), Effect.sync(() => void running--))
    })
    const working = yield* Effect.forkChild(insist(mails.run(() => handler, { concurrency: 2 })))
    yield* eventually(Effect.map(mails.state, ({ workers }) => assert.strictEqual(workers, 1)))
    // Each shard has one of the two slots, and all jobs are in one shard.
    const ids = Array.from({ length: 100 }, (_, at) => `${at}`).filter((id) => partitionOf(id, 2) === 1)
    yield* Effect.forEach(ids.slice(0, 4), (id) => insist(mails.offer(1, { id })))
    yield* eventually(Effect.sync(() => assert.strictEqual(running, 2)))
    yield* Deferred.succeed(gate, undefined)
    yield* eventually(Effect.map(mails.state, ({ active, waiting }) => assert.strictEqual(active + waiting, 0)))
    assert.isAtLeast(begun, 4)
    assert.strictEqual(most, 2)
    yield* Fiber.interrupt(working)
    yield* eventually(Effect.map(mails.state, ({ workers }) => assert.strictEqual(workers, 0)))
  })
