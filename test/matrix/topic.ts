import { assert } from "@effect/vitest"
import { Effect, Fiber, Schedule, Schema } from "effect"
import { Topic } from "../../src/index.ts"
import { eventually } from "../support/eventually.ts"
import { onNode } from "../support/live.ts"
import { insist, leads } from "../support/uncertain.ts"
import type { Program, Rows } from "./matrix.ts"

export const requests = [
  ["topic.join", "topic:orders"],
  ["topic.publish", "topic:orders"],
  ["topic.publishAll", "topic:orders"],
  ["topic.consume", "topic:orders"],
  ["topic.ack", "topic:orders"],
  ["topic.retry", "topic:orders"],
  ["topic.forget", "topic:orders"],
  ["topic.state", "topic:orders"],
  ["topic.purge", "topic:orders"],
  ["alarm.ring", "topic:orders"],
  ["session.leave", "topic:orders"]
] as const satisfies Rows

export const program: Program = ({ other }) =>
  Effect.gen(function*() {
    const make = Topic.make({ name: "orders", schema: Schema.Number })
    const orders = yield* insist(make)
    const theirs = yield* onNode(other)(make)
    const length = Effect.map(theirs.state, (state) => state.length)
    const group = Effect.map(theirs.state, ({ groups }) => groups[0])
    yield* leads(Effect.map(orders.publish(1), ({ duplicate }) => duplicate), false, length, 1)
    yield* leads(Effect.map(orders.publish(2, { id: "two" }), ({ duplicate }) => duplicate), false, length, 2)
    const handled: Array<number> = []
    const running = yield* Effect.forkChild(insist(orders.run(({ attempt, value }) => {
      handled.push(value)
      return value === 1 && attempt === 1 ? Effect.fail("once") : Effect.void
    }, { group: "g", from: "beginning", retry: Schedule.spaced("50 millis") })))
    yield* eventually(Effect.map(group, (found) => assert.deepStrictEqual([found?.lag, found?.pending], [0, 0])))
    // A member whose joining was not answered may have been given both, and have left.
    assert.deepStrictEqual([...new Set(handled)].toSorted(), [1, 2])
    yield* Fiber.interrupt(running)
    yield* eventually(Effect.map(group, (found) => assert.strictEqual(found?.members, 0)))
    assert.strictEqual((yield* insist(orders.state)).length, 2)
    yield* leads(orders.forget("g"), true, Effect.map(group, (found) => found === undefined), true)
    yield* leads(orders.purge, 2, length, 0)
  })
