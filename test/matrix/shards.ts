import { assert } from "@effect/vitest"
import { Effect, Fiber, Schema, Stream } from "effect"
import { Topic } from "../../src/index.ts"
import { eventually } from "../support/eventually.ts"
import { onNode } from "../support/live.ts"
import { insist } from "../support/uncertain.ts"
import type { Program, Rows } from "./matrix.ts"

export const requests = [
  ["topic.seal", "topic:orders"],
  ["topic.open", "topic:orders"],
  ["topic.mark", "topic:orders"],
  ["topic.find", "topic:orders"],
  ["topic.begin", "topic:orders"]
] as const satisfies Rows

const make = (options: Partial<Topic.Options<number>>) =>
  Topic.make({ name: "orders", schema: Schema.Number, ...options })

export const program: Program = ({ other }) =>
  Effect.gen(function*() {
    const theirs = yield* onNode(other)(make({}))
    const orders = yield* insist(make({}))
    const handled: Array<number> = []
    const running = yield* Effect.forkChild(insist(orders.run(({ value }) => Effect.sync(() => handled.push(value)), {
      group: "g",
      orderBy: "key",
      from: "beginning"
    })))
    const first = yield* insist(orders.publish(1, { id: "one" }))
    yield* insist(make({ shards: 2 }))
    yield* eventually(Effect.sync(() => assert.deepStrictEqual([orders.shards, theirs.shards], [2, 2])))
    assert.deepStrictEqual(yield* insist(orders.publish(1, { id: "one" })), { id: first.id, duplicate: true })
    yield* insist(orders.publish(2, { id: "two" }))
    const found = Topic.values(orders.subscribe({ from: "beginning" })).pipe(Stream.take(2), Stream.runCollect)
    assert.deepStrictEqual(yield* insist(found), [1, 2])
    yield* eventually(Effect.sync(() => assert.deepStrictEqual([...new Set(handled)].toSorted(), [1, 2])))
    yield* Fiber.interrupt(running)
    // What Redis knows of the shards stays as long as events may.
    yield* onNode(other)(Effect.scoped(make({ retention: { age: "1 second" } })))
    yield* theirs.purge
  })
