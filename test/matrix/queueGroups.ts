import { assert } from "@effect/vitest"
import { Effect, Fiber, Stream } from "effect"
import { Queue } from "../../src/index.ts"
import { eventually } from "../support/eventually.ts"
import { insist, leads } from "../support/uncertain.ts"
import { opened } from "./mails.ts"
import type { Program, Rows } from "./matrix.ts"

export const requests = [
  ["queue.offer", "queue:mails"],
  ["queue.done", "queue:mails"],
  ["queue.retry", "queue:mails"],
  ["queue.pauseGroup", "queue:mails"],
  ["queue.purgeGroup", "queue:mails"],
  ["queue.slow", "queue:mails"],
  ["queue.group", "queue:mails"],
  ["queue.groups", "queue:mails"]
] as const satisfies Rows

export const program: Program = ({ other }) =>
  Effect.gen(function*() {
    const { mails, of, theirs } = yield* opened(other)
    const paused = Effect.map(theirs.group("a").state, (group) => group.paused)
    yield* leads(Effect.asVoid(mails.offerAll([1, 2], { group: "a" })), undefined, of("waiting"), 2)
    yield* leads(Effect.asVoid(mails.offer(3, { group: "b" })), undefined, of("waiting"), 3)
    yield* leads(mails.group("a").pause, undefined, paused, true)
    yield* leads(mails.group("b").purge, 1, of("waiting"), 2)
    const state = { name: "a", waiting: 2, delayed: 0, active: 0, paused: true }
    assert.deepStrictEqual(yield* insist(mails.group("a").state), state)
    assert.deepStrictEqual(yield* insist(Stream.runCollect(mails.groups)), [state])
    yield* leads(mails.group("a").resume, undefined, paused, false)
    const begun: Array<number> = []
    const running = yield* Effect.forkChild(insist(mails.run((n) =>
      Effect.flatMap(Queue.Job, ({ attempt, slowDown }) => {
        begun.push(n)
        return n === 1 && attempt === 1
          ? Effect.andThen(insist(slowDown("100 millis")), Effect.fail("no"))
          : Effect.void
      }), { attempts: 3 })))
    yield* eventually(Effect.map(of("completed"), (completed) => assert.strictEqual(completed, 2)))
    assert.deepStrictEqual(begun.slice(-1), [2])
    assert.notInclude(begun.slice(0, -1), 2)
    yield* Fiber.interrupt(running)
    yield* eventually(Effect.map(of("workers"), (workers) => assert.strictEqual(workers, 0)))
  })
