import { assert } from "@effect/vitest"
import { Effect, Fiber, Schema } from "effect"
import { Queue } from "../../src/index.ts"
import { eventually } from "../support/eventually.ts"
import { onNode } from "../support/live.ts"
import { inLine } from "../support/queues.ts"
import { insist } from "../support/uncertain.ts"
import type { Program, Rows } from "./matrix.ts"

export const requests = [
  ["queue.enter", "queue:mails"],
  ["queue.pass", "queue:mails"]
] as const satisfies Rows

export const program: Program = ({ namespace, other, server }) =>
  Effect.gen(function*() {
    const make = Queue.make({ name: "mails", payload: Schema.Number, retention: "3 seconds", limits: { length: 2 } })
    const mails = yield* insist(make)
    const theirs = yield* onNode(other)(make)
    yield* theirs.offerAll([1, 2])
    // Offers whose answers are late are made again, with their ids.
    const offers = yield* Effect.forEach(
      [3, 4, 5],
      (n) => Effect.forkChild(insist(mails.offer(n, { id: String(n) })))
    )
    const handled: Array<number> = []
    const running = yield* Effect.forkChild(theirs.run((n) => Effect.sync(() => handled.push(n))))
    yield* Effect.forEach(offers, (fiber) => Fiber.join(fiber))
    yield* theirs.offer(6)
    yield* eventually(Effect.sync(() => assert.deepStrictEqual(handled.toSorted(), [1, 2, 3, 4, 5, 6])))
    yield* eventually(
      Effect.map(theirs.state, ({ active, waiting }) => assert.deepStrictEqual([active, waiting], [0, 0]))
    )
    yield* Fiber.interrupt(running)
    yield* theirs.offerAll([7, 8])
    const waiting = yield* Effect.forkChild(mails.offer(9))
    yield* inLine(server, namespace, 1)
    yield* Fiber.interrupt(waiting)
    yield* inLine(server, namespace, 0)
    yield* theirs.drain()
  })
