import { assert } from "@effect/vitest"
import { Effect, Fiber, Option, Schedule, Stream } from "effect"
import { Queue } from "../../src/index.ts"
import { eventually } from "../support/eventually.ts"
import { insist, leads } from "../support/uncertain.ts"
import { opened } from "./mails.ts"
import type { Program, Rows } from "./matrix.ts"

export const requests = [
  ["queue.join", "queue:mails"],
  ["queue.offer", "queue:mails"],
  ["queue.work", "queue:mails"],
  ["queue.done", "queue:mails"],
  ["queue.finish", "queue:mails"],
  ["queue.retry", "queue:mails"],
  ["queue.bury", "queue:mails"],
  ["queue.credit", "queue:mails"],
  ["queue.cancel", "queue:mails"],
  ["queue.status", "queue:mails"],
  ["queue.watch", "queue:mails"],
  ["queue.pause", "queue:mails"],
  ["queue.drain", "queue:mails"],
  ["queue.drained", "queue:mails"],
  ["queue.state", "queue:mails"],
  ["queue.letters", "queue:mails"],
  ["queue.replay", "queue:mails"],
  ["queue.discard", "queue:mails"],
  ["alarm.ring", "queue:mails"],
  ["session.leave", "queue:mails"]
] as const satisfies Rows

export const program: Program = ({ other }) =>
  Effect.gen(function*() {
    const { mails, of, theirs } = yield* opened(other)
    yield* leads(Effect.asVoid(mails.offer(1)), undefined, of("waiting"), 1)
    yield* leads(
      Effect.map(mails.offer(2, { id: "two", result: true }), ({ duplicate }) => duplicate),
      false,
      of("waiting"),
      2
    )
    yield* leads(Effect.asVoid(mails.offer(3, { delay: "10 seconds", id: "three" })), undefined, of("delayed"), 1)
    yield* leads(Effect.asVoid(mails.offer(4)), undefined, of("waiting"), 3)
    assert.deepStrictEqual(yield* insist(mails.job("three").status), Option.some({ state: "delayed", attempts: 0 }))
    yield* leads(mails.job("three").cancel, true, of("delayed"), 0)
    const results = yield* Effect.forEach(
      [theirs, mails],
      (queue) => Effect.forkChild(insist(queue.job("two").result()))
    )
    const handled: Array<number> = []
    const running = yield* Effect.forkChild(insist(mails.run((n) =>
      Effect.flatMap(Queue.Job, ({ attempt }) => {
        handled.push(n)
        return n === 4 || n === 1 && attempt === 1 ? Effect.fail("no") : Effect.void
      }), { retry: Schedule.spaced("50 millis"), attempts: 2 })))
    yield* eventually(Effect.gen(function*() {
      const { active, completed, dead, delayed, waiting } = yield* theirs.state
      assert.deepStrictEqual({ active, completed, dead, delayed, waiting }, {
        active: 0,
        completed: 2,
        dead: 1,
        delayed: 0,
        waiting: 0
      })
    }))
    assert.deepStrictEqual([...new Set(handled)].toSorted(), [1, 2, 4])
    yield* Fiber.join(results[0]!)
    // It may be answered so late that the result is not known any more.
    yield* Effect.exit(Fiber.join(results[1]!))
    yield* Fiber.interrupt(running)
    yield* eventually(Effect.map(of("workers"), (workers) => assert.strictEqual(workers, 0)))
    yield* leads(mails.pause, undefined, of("paused"), true)
    const [letter] = yield* insist(Stream.runCollect(mails.deadLetters))
    yield* leads(mails.replay([letter!.letter]), 1, of("waiting"), 1)
    const draining = Effect.scoped(Effect.flatMap(mails.pool(() => Effect.void), ({ drain }) => drain))
    const drained = yield* Effect.forkChild(insist(draining))
    yield* leads(mails.drain(), 1, of("waiting"), 0)
    yield* Fiber.join(drained)
    yield* leads(mails.discard(), 0, of("dead"), 0)
    yield* insist(mails.state)
  })
