import { assert } from "@effect/vitest"
import { Effect, Fiber } from "effect"
import { eventually } from "../support/eventually.ts"
import { insist, leads } from "../support/uncertain.ts"
import { opened } from "./mails.ts"
import type { Program, Rows } from "./matrix.ts"

export const requests = [
  ["queue.offer", "queue:mails"],
  ["queue.done", "queue:mails"],
  ["queue.finish", "queue:mails"],
  ["queue.cancel", "queue:mails"],
  ["queue.drain", "queue:mails"]
] as const satisfies Rows

export const program: Program = ({ other }) =>
  Effect.gen(function*() {
    const { mails, of, theirs } = yield* opened(other)
    const one = yield* theirs.offer(1)
    yield* leads(Effect.asVoid(mails.offer(2, { id: "two", after: [one.id] })), undefined, of("blocked"), 1)
    yield* leads(Effect.asVoid(mails.offer(3, { id: "three", after: [one.id] })), undefined, of("blocked"), 2)
    yield* leads(Effect.asVoid(mails.offer(4, { id: "four", after: ["two"] })), undefined, of("blocked"), 3)
    yield* leads(mails.job("three").cancel, true, of("blocked"), 2)
    const begun: Array<number> = []
    const running = yield* Effect.forkChild(insist(mails.run((n) => Effect.sync(() => void begun.push(n)))))
    yield* eventually(Effect.map(of("completed"), (completed) => assert.strictEqual(completed, 3)))
    assert.deepStrictEqual(begun, [1, 2, 4])
    yield* Fiber.interrupt(running)
    yield* eventually(Effect.map(of("workers"), (workers) => assert.strictEqual(workers, 0)))
    const { id } = yield* theirs.offer(5)
    yield* theirs.offer(6, { after: [id] })
    yield* insist(mails.drain({ delayed: true }))
    yield* eventually(Effect.map(of("blocked"), (blocked) => assert.strictEqual(blocked, 0)))
    assert.strictEqual(yield* of("dead"), 0)
  })
