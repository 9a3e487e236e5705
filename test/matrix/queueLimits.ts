import { assert } from "@effect/vitest"
import { Effect, Fiber, Schema } from "effect"
import { Queue } from "../../src/index.ts"
import { eventually } from "../support/eventually.ts"
import { onNode } from "../support/live.ts"
import { insist } from "../support/uncertain.ts"
import type { Program, Rows } from "./matrix.ts"

export const requests = [
  ["queue.enter", "queue:mails"]
] as const satisfies Rows

export const program: Program = ({ other }) =>
  Effect.gen(function*() {
    const make = Queue.make({ name: "mails", payload: Schema.Number, retention: "500 millis", limits: { length: 2 } })
    const mails = yield* insist(make)
    const theirs = yield* onNode(other)(make)
    yield* theirs.offerAll([1, 2])
    // It may be answered too late, and is stored all the same, or not: but not twice.
    const offers = yield* Effect.forEach([3, 4, 5], (n) => Effect.forkChild(Effect.exit(mails.offer(n))))
    const handled: Array<number> = []
    const running = yield* Effect.forkChild(theirs.run((n) => Effect.sync(() => handled.push(n))))
    const exits = yield* Effect.forEach(offers, (fiber) => Fiber.join(fiber))
    yield* theirs.offer(6)
    yield* eventually(Effect.sync(() => {
      assert.include(handled, 6)
      for (const [at, exit] of exits.entries()) if (exit._tag === "Success") assert.include(handled, 3 + at)
    }))
    assert.strictEqual(new Set(handled).size, handled.length)
    yield* eventually(
      Effect.map(theirs.state, ({ active, waiting }) => assert.deepStrictEqual([active, waiting], [0, 0]))
    )
    yield* Fiber.interrupt(running)
  })
