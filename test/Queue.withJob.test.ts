/** Jobs that are taken one by one, each for as long as an effect runs: it is interrupted when the job is not its own any more. */
import { assert, layer } from "@effect/vitest"
import { Deferred, Effect, Fiber, Option, Schedule, Schema, Stream } from "effect"
import { Queue } from "../src/index.ts"
import { TestServer } from "./support/live.ts"
import { emptied, isRangeError, make, shows } from "./support/queues.ts"
import { isPending, lose, on, promptly, several } from "./support/several.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

const typed = Effect.tap(
  Queue.make({ name: "typed", payload: Schema.Number, success: Schema.Int, retention: "200 millis" }),
  emptied
)

layer(TestServer.layer, live)("a job that an effect runs with", (it) => {
  it.effect("is done, is attempted again or goes back as the effect ends", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ retry: Schedule.recurs(1) }))
        const other = yield* on(b!, make())
        const attempt = Effect.map(Queue.Job, ({ attempt }) => attempt)
        yield* other.offerAll([1, 2])
        // One at a time: the other one waits.
        assert.strictEqual(
          yield* Effect.flip(queue.withJob((n) => Effect.andThen(shows(other, { active: 1 }), Effect.fail(`no ${n}`)))),
          "no 1"
        )
        yield* shows(other, { active: 0, waiting: 2, workers: 0 })
        const one = queue.withJob((n) => Effect.map(attempt, (attempt) => [n, attempt]))
        assert.deepStrictEqual(yield* one, Option.some([1, 2]))
        yield* shows(other, { completed: 1, active: 0, waiting: 1, workers: 0 })
        const held = yield* Effect.forkChild(queue.withJob(() => Effect.never))
        yield* shows(other, { active: 1, waiting: 0 })
        yield* Fiber.interrupt(held)
        yield* shows(other, { active: 0, waiting: 1, workers: 0 })
        const endless = queue.withJob((n) => Effect.map(attempt, (attempt) => [n, attempt]), { wait: Infinity })
        assert.deepStrictEqual(yield* endless, Option.some([2, 1]))
        // A push, when there is none yet; and nothing in time.
        const waiting = yield* Effect.forkChild(one)
        yield* shows(other, { workers: 1 })
        yield* other.offer(3)
        assert.deepStrictEqual(yield* promptly(Fiber.join(waiting), "the job"), Option.some([3, 1]))
        assert.isTrue(Option.isNone(yield* queue.withJob(() => Effect.void, { wait: "30 millis" })))
        yield* shows(other, { completed: 3, workers: 0 })
        // The last attempt.
        yield* other.offer(4)
        assert.strictEqual(yield* Effect.flip(queue.withJob(() => Effect.fail("no"), { attempts: 1 })), "no")
        yield* shows(other, { dead: 1, workers: 0 })
        yield* Effect.map(Effect.exit(queue.withJob(() => Effect.void, { attempts: 0 })), isRangeError)
      })))

  it.effect("is snoozed or discarded by the effect, and has its result", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, typed)
        yield* queue.offerAll([1, 2])
        const job = Effect.service(Queue.Job)
        assert.deepStrictEqual(
          yield* queue.withJob(() => Effect.flatMap(job, ({ snooze }) => snooze("1 hour"))),
          Option.none()
        )
        assert.deepStrictEqual(
          yield* queue.withJob(() => Effect.flatMap(job, ({ discard }) => discard("no such account"))),
          Option.none()
        )
        yield* shows(queue, { delayed: 1, dead: 1, waiting: 0 })
        const executing = yield* Effect.forkChild(queue.execute(3))
        assert.deepStrictEqual(yield* queue.withJob((n) => Effect.succeed(n * n)), Option.some(9))
        assert.strictEqual(yield* Fiber.join(executing), 9)
        // A result that does not fit the schema is no success for either.
        const refused = yield* Effect.forkChild(Effect.flip(queue.execute(4)))
        const error = yield* Effect.flip(queue.withJob(() => Effect.succeed(0.5)))
        assert.strictEqual((error as Queue.QueueError).reason._tag, "InvalidPayload")
        assert.strictEqual((yield* Fiber.join(refused)).reason._tag, "JobFailed")
      })))

  it.effect("is left out when its payload does not fit", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, typed)
        const texts = yield* on(a!, Queue.make({ name: "typed", payload: Schema.String }))
        yield* texts.offer("one")
        yield* queue.offer(2)
        assert.deepStrictEqual(yield* queue.withJob(Effect.succeed), Option.some(2))
        const [letter] = yield* Stream.runCollect(queue.deadLetters)
        assert.strictEqual(letter!.reason, "undecodable")
      })))

  it.effect("fails when the effect takes longer than its timeout, and its finalizers run", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ attempts: 1 }))
        let finalized = false
        yield* queue.offer(1)
        const error = yield* Effect.flip(queue.withJob(
          () => Effect.onInterrupt(Effect.never, () => Effect.sync(() => void (finalized = true))),
          { timeout: "20 millis" }
        ))
        assert.strictEqual(error._tag, "JobTimeout")
        assert.isTrue(finalized)
        yield* shows(queue, { dead: 1, workers: 0 })
      })))

  it.effect("goes to another process when the effect ignores its interruption for too long", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ attempts: 2, retry: Schedule.forever }))
        const [begun, gate] = [yield* Deferred.make<void>(), yield* Deferred.make<void>()]
        yield* queue.offer(1)
        const late = yield* Effect.forkChild(Effect.flip(queue.withJob(
          () => Effect.uninterruptible(Effect.andThen(Deferred.succeed(begun, undefined), Deferred.await(gate))),
          { timeout: "20 millis", overrun: "20 millis" }
        )))
        yield* Deferred.await(begun)
        const attempt = Effect.map(Queue.Job, ({ attempt }) => attempt)
        assert.deepStrictEqual(yield* queue.withJob(() => attempt), Option.some(2))
        assert.isTrue(isPending(late))
        yield* Deferred.succeed(gate, undefined)
        assert.strictEqual((yield* promptly(Fiber.join(late), "its end"))._tag, "JobTimeout")
        yield* shows(queue, { completed: 1, active: 0, workers: 0 })
      })))

  for (const shards of [1, 2]) {
    it.effect(`interrupts the effect when its session is lost, or the job is cancelled: ${shards} shards`, () =>
      several(2, ([a, b], namespace, server) =>
        Effect.gen(function*() {
          const queue = yield* on(a!, make({ shards }))
          const other = yield* on(b!, make({ shards }))
          const ended = yield* Deferred.make<void>()
          const gate = yield* Deferred.make<void>()
          // The call ends when its finalizers have, though another process may have the job by then.
          const taking = Effect.flip(queue.withJob(() =>
            Effect.onInterrupt(
              Effect.never,
              () => Effect.andThen(Deferred.succeed(ended, undefined), Deferred.await(gate))
            )
          ))
          yield* other.offer(1, { id: "one" })
          const lost = yield* Effect.forkChild(taking)
          yield* shows(other, { active: 1 })
          yield* lose(a!, namespace, server)
          yield* promptly(Deferred.await(ended), "the interruption")
          assert.deepStrictEqual(
            yield* other.withJob((n) => Effect.map(Queue.Job, ({ crashes }) => [n, crashes])),
            Option.some([1, 1])
          )
          assert.isTrue(isPending(lost))
          yield* Deferred.succeed(gate, undefined)
          const error = (yield* Fiber.join(lost)) as Queue.QueueError
          assert.deepInclude(error.reason, { _tag: "JobLost", id: "one" })
          yield* other.offer(2, { id: "two" })
          const cancelled = yield* Effect.forkChild(taking)
          yield* shows(other, { active: 1 })
          yield* other.job("two").cancel
          const { reason } = (yield* promptly(Fiber.join(cancelled), "the news")) as Queue.QueueError
          assert.deepInclude(reason, { _tag: "JobLost", id: "two" })
          yield* shows(other, { active: 0, completed: 1, workers: 0 })
        }), { lease: "3 seconds", margin: "500 millis", partitions: shards }))
  }
})
