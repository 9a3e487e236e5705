/** What handlers decide about their jobs, and what other processes may change of jobs that are not done. */
import { assert, layer } from "@effect/vitest"
import { Effect, Option, Schedule, Schema, Stream } from "effect"
import { Queue } from "../src/index.ts"
import { TestServer } from "./support/live.ts"
import { begins, emptied, make, shows, working } from "./support/queues.ts"
import { on, several } from "./support/several.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

layer(TestServer.layer, live)("a handler", (it) => {
  it.effect("snoozes its job, and that is no attempt", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const attempts: Array<number> = []
        let ended = 0
        const worker = yield* working(queue, () =>
          Effect.gen(function*() {
            const job = yield* Queue.Job
            attempts.push(job.attempt)
            if (attempts.length < 3) yield* job.snooze("50 millis")
          }).pipe(Effect.ensuring(Effect.sync(() => ended++))), { attempts: 1 })
        yield* queue.offer(1)
        yield* shows(queue, { completed: 1, delayed: 0, active: 0, dead: 0 })
        assert.deepStrictEqual(attempts, [1, 1, 1])
        assert.strictEqual(ended, 3)
        // Later than the test lasts: the job is there, and another one takes its turn.
        const late = yield* queue.offer(2)
        yield* worker.stop
        const other = yield* working(
          queue,
          (n) => n === 2 ? Effect.flatMap(Queue.Job, (job) => job.snooze("1 hour")) : Effect.void
        )
        yield* shows(queue, { delayed: 1, active: 0 })
        yield* queue.offer(3)
        yield* begins(other, [2, 3])
        assert.deepStrictEqual(
          yield* queue.status(late.id),
          Option.some({ state: "delayed", attempts: 0 })
        )
        yield* other.stop
      })))

  it.effect("discards its job, whatever else has failed, and is told of a delay that makes no sense", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(
          a!,
          Effect.tap(
            Queue.make({ name: "typed", payload: Schema.Number, error: Schema.String, retention: "200 millis" }),
            emptied
          )
        )
        let begun = 0
        const worker = yield* working(queue, (n): Effect.Effect<void, string, Queue.Job> => {
          begun++
          const decided = Effect.flatMap(Queue.Job, (job) => n === 1 ? job.discard("no such account") : job.snooze(0))
          return n === 1
            ? Effect.asVoid(Effect.all([decided, Effect.fail("no")], { concurrency: 2 }))
            : decided
        }, { retry: Schedule.recurs(1), concurrency: 2 })
        const { reason } = (yield* Effect.flip(queue.execute(1))) as Queue.QueueError
        assert.deepInclude(reason, { _tag: "JobFailed", outcome: "discarded", error: "no such account" })
        assert.strictEqual(begun, 1)
        yield* queue.offer(2)
        yield* shows(queue, { dead: 2 })
        const [discarded, failed] = yield* Stream.runCollect(queue.deadLetters)
        assert.deepInclude(discarded, { reason: "discarded", error: "no such account", attempts: 1 })
        assert.deepInclude(failed, { reason: "failed", attempts: 2 })
        assert.include(failed!.error, "RangeError")
        yield* worker.stop
      })))

  it.effect("decides about a job that was taken into a scope", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        yield* queue.offerAll([1, 2])
        const snoozed = yield* Effect.exit(Effect.scoped(
          Effect.flatMap(queue.take(), (taken) => Option.getOrThrow(taken).job.snooze("1 hour"))
        ))
        assert.isTrue(snoozed._tag === "Failure")
        yield* shows(queue, { delayed: 1, waiting: 1 })
        yield* Effect.exit(Effect.scoped(
          Effect.flatMap(queue.take(), (taken) => Option.getOrThrow(taken).job.discard("no"))
        ))
        yield* shows(queue, { delayed: 1, waiting: 0, dead: 1 })
      })))
})
