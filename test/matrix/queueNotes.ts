import { assert } from "@effect/vitest"
import { Deferred, Effect, Fiber, Option, Schedule, Stream } from "effect"
import { Queue } from "../../src/index.ts"
import { eventually } from "../support/eventually.ts"
import { insist } from "../support/uncertain.ts"
import { opened } from "./mails.ts"
import type { Program, Rows } from "./matrix.ts"

export const requests = [
  ["queue.complete", "queue:mails"],
  ["queue.note", "queue:mails"],
  ["queue.follow", "queue:mails"],
  ["queue.unfollow", "queue:mails"],
  ["queue.logs", "queue:mails"]
] as const satisfies Rows

export const program: Program = ({ other }) =>
  Effect.gen(function*() {
    const { mails, theirs } = yield* opened(other)
    // What a handler keeps, and what others receive of it.
    const { id } = yield* theirs.offer(4)
    const [gate, second] = yield* Effect.all([Deferred.make<void>(), Deferred.make<void>()])
    const kept: Array<unknown> = []
    const working = yield* Effect.forkChild(insist(mails.run(() =>
      Effect.gen(function*() {
        const job = yield* Queue.Job
        kept.push(Option.getOrUndefined(job.checkpointed))
        yield* job.progress(job.attempt)
        yield* job.log(`attempt ${job.attempt}`)
        yield* job.checkpoint({ attempt: job.attempt })
        yield* Deferred.await(job.attempt === 1 ? gate : second)
        if (job.attempt === 1) yield* Effect.fail("no")
      }), { retry: Schedule.spaced("10 millis") })))
    const first = Stream.runHead(mails.job(id).progress)
    const told: Array<unknown> = []
    yield* insist(eventually(Effect.map(first, (value) => assert.deepStrictEqual(value, Option.some(1)))))
    const followed = yield* Effect.forkChild(
      insist(Stream.runForEach(mails.job(id).progress, (value) => Effect.sync(() => told.push(value))))
    )
    yield* eventually(Effect.sync(() => assert.deepStrictEqual(told, [1])))
    yield* Deferred.succeed(gate, undefined)
    yield* eventually(Effect.sync(() => assert.deepStrictEqual(told, [1, 2])))
    yield* eventually(
      Effect.map(insist(mails.job(id).logs), (lines) => assert.deepStrictEqual(lines, ["attempt 1", "attempt 2"]))
    )
    yield* Deferred.succeed(second, undefined)
    yield* Fiber.join(followed)
    assert.deepStrictEqual(kept, [undefined, { attempt: 1 }])
    yield* Fiber.interrupt(working)
    // A job that another one follows, once.
    const chain: Array<number> = []
    const chained = yield* Effect.forkChild(insist(mails.run((n) => {
      chain.push(n)
      return n < 12 ? mails.followUp(n + 1) : Effect.void
    })))
    yield* theirs.offer(10)
    yield* eventually(Effect.sync(() => assert.deepStrictEqual([...new Set(chain)], [10, 11, 12])))
    yield* eventually(
      Effect.map(theirs.state, ({ active, waiting }) => assert.deepStrictEqual([active, waiting], [0, 0]))
    )
    assert.strictEqual(chain.filter((n) => n === 12).length, 1)
    yield* Fiber.interrupt(chained)
  })
