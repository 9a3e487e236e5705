/** What handlers decide about their jobs, and what other processes may change of jobs that are not done. */
import { assert, layer } from "@effect/vitest"
import { Cause, DateTime, Deferred, Effect, Exit, Fiber, Option, Schedule, Schema, Stream } from "effect"
import { Queue } from "../src/index.ts"
import { eventually, realSleep } from "./support/eventually.ts"
import { freshNamespace, node, TestServer } from "./support/live.ts"
import { begins, emptied, hostile, isRangeError, make, shows, upTo, working } from "./support/queues.ts"
import { type Server, standalone } from "./support/servers.ts"
import { lose, missed, on, promptly, several } from "./support/several.ts"

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
          yield* queue.job(late.id).status,
          Option.some({ state: "delayed", attempts: 0 })
        )
        yield* other.stop
      })))

  it.effect("discards its job even if something else has failed, and fails on a delay that makes no sense", () =>
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

  it.effect("discards for what is no text", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const caught = undefined as unknown as string
        const worker = yield* working(queue, () => Effect.flatMap(Queue.Job, (job) => job.discard(caught)))
        yield* queue.offer(1)
        yield* shows(queue, { dead: 1, active: 0 })
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

layer(TestServer.layer, live)("a job that is retried from its dead letter", (it) => {
  it.effect("keeps its id, in any shard, until it is done or a dead letter again", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const make = Effect.tap(
          Queue.make({
            name: hostile,
            payload: Schema.Number,
            success: Schema.Number,
            shards: 2,
            retention: "1 second"
          }),
          emptied
        )
        const queue = yield* on(a!, make)
        const other = yield* on(b!, make)
        const handled: Array<string> = []
        let fails = true
        const handler = (n: number) =>
          Effect.flatMap(Queue.Job, ({ id }) => {
            handled.push(id)
            return fails ? Effect.fail("no") : Effect.succeed(n * n)
          })
        const first = yield* queue.offer(3, { result: true })
        const second = yield* queue.offer(4, { result: true, group: "two" })
        const ids = [first.id, second.id]
        // One in each shard, so that the ids of one have a number in front.
        const third = yield* queue.offer(5, { result: true })
        for (const id of [third.id]) ids.push(id)
        assert.isTrue(ids.some((id) => id.startsWith("1:")) && ids.some((id) => !id.startsWith("1:")))
        const worker = yield* Effect.forkChild(queue.run(handler, { attempts: 1 }))
        for (const round of [1, 2]) {
          yield* shows(other, { dead: 3, failed: 3 * round })
          const letters = yield* Stream.runCollect(other.deadLetters)
          assert.sameMembers(letters.map(({ id }) => id), ids)
          if (round === 2) fails = false
          yield* queue.pause
          for (const id of ids) {
            assert.isTrue(yield* other.job(id).retry)
            assert.deepStrictEqual(yield* other.job(id).status, Option.some({ state: "waiting", attempts: 0 }))
            assert.isFalse(yield* other.job(id).retry)
          }
          const infos = yield* Stream.runCollect(other.jobs({ state: "waiting" }))
          assert.sameMembers(infos.map(({ id }) => id), ids)
          yield* queue.resume
        }
        assert.deepStrictEqual(
          yield* Effect.forEach(ids, (id) => other.job(id).result(), { concurrency: "unbounded" }),
          [9, 16, 25]
        )
        assert.deepStrictEqual(handled.toSorted(), [...ids, ...ids, ...ids].toSorted())
        yield* shows(other, { completed: 3, dead: 0 })
        fails = true
        const { id } = yield* queue.offer(6)
        yield* shows(other, { dead: 1 })
        yield* queue.pause
        assert.isTrue(yield* other.job(id).retry)
        assert.isTrue(yield* other.job(id).cancel)
        yield* shows(other, { waiting: 0, dead: 0 })
        yield* Fiber.interrupt(worker)
      }), { lease: "3 seconds", margin: "500 millis", partitions: 2 }))
})

layer(TestServer.layer, live)("a job that is not done", (it) => {
  for (const timeToLive of [undefined, "5 seconds"] as const) {
    const result = timeToLive === undefined ? true : { timeToLive }
    const outcomes = timeToLive === undefined ? "as long as ids are known" : "for longer"
    it.effect(`has its id for others when it is removed, and is known by it all the same: outcomes are kept ${outcomes}`, () =>
      several(1, ([a], namespace, server) =>
        Effect.gen(function*() {
          const options = {
            name: "freed",
            payload: Schema.Number,
            success: Schema.Number,
            retention: "2 seconds"
          } as const
          const queue = yield* on(a!, Effect.tap(Queue.make(options), emptied))
          const drained = (name: string) =>
            Effect.gen(function*() {
              const { reason } = yield* Effect.flip(queue.job(name).result({ wait: "5 seconds" }))
              assert.deepInclude(reason, { _tag: "JobFailed", outcome: "cancelled" })
              const after = yield* queue.offer(5, { after: [name], onFailure: "skip" })
              assert.isTrue(Option.isNone(yield* queue.job(after.id).status))
            })
          const first = yield* queue.offer(1, { id: "a", result })
          assert.strictEqual(yield* queue.drain(), 1)
          yield* drained("a")
          yield* drained(first.id)
          // The new job has the id from now on, also when it is done.
          const second = yield* queue.offer(2, { id: "a", result })
          assert.isFalse(second.duplicate)
          assert.isTrue(Option.isSome(yield* queue.job("a").status))
          const worker = yield* working(queue, (n) => n === 3 ? Effect.die("no") : Effect.succeed(n), { attempts: 1 })
          assert.strictEqual(yield* queue.job("a").result({ wait: "5 seconds" }), 2)
          yield* drained(first.id)
          assert.deepStrictEqual(yield* queue.offer(2, { id: "a" }), { id: second.id, duplicate: true })
          // Also of jobs that were dead letters before, with ids of producers and without.
          const named = yield* queue.offer(3, { id: "b", result })
          const { id } = yield* queue.offer(3, { result })
          yield* shows(queue, { dead: 2 })
          yield* worker.stop
          assert.strictEqual(yield* queue.replay(), 2)
          assert.strictEqual(yield* queue.drain(), 2)
          for (const name of ["b", named.id, id]) yield* drained(name)
          const again = yield* queue.offer(4, { id: "b", result })
          assert.isFalse(again.duplicate)
          assert.strictEqual(yield* queue.drain(), 1)
          yield* drained("b")
          yield* drained(named.id)
          // It is known by that no longer than another job that had the id since.
          const longer = Effect.map(server.cli("KEYS", `{${namespace}:*}:queue-f1:b*`), (keys) => keys.trim() !== "")
          assert.strictEqual(yield* longer, timeToLive !== undefined)
          const last = yield* queue.offer(6, { id: "b" })
          assert.isFalse(yield* longer)
          assert.isTrue(yield* queue.job(last.id).cancel)
          assert.deepInclude((yield* Effect.flip(queue.job("b").result())).reason, { _tag: "OutcomeUnknown" })
        })))
  }

  it.effect("begins now when it is promoted, or later when it is rescheduled", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const other = yield* on(b!, make())
        const delayed = yield* queue.offer(1, { delay: "1 hour" })
        yield* queue.offer(2, { id: "two", delay: "1 hour" })
        yield* queue.offer(3, { id: "three" })
        const late = yield* queue.offer(4, { priority: "high" })
        yield* queue.offer(5, { id: "five", delay: "50 millis" })
        assert.isTrue(yield* other.job(delayed.id).promote)
        assert.isFalse(yield* other.job(delayed.id).promote)
        // A waiting job, whose delay Redis notices as its turn comes, and a delayed job.
        assert.isTrue(yield* other.job(late.id).reschedule({ delay: "1 hour" }))
        assert.isTrue(yield* other.job("three").reschedule({ at: Date.now() + 300 }))
        assert.deepStrictEqual(yield* other.job(late.id).status, Option.some({ state: "delayed", attempts: 0 }))
        assert.isTrue(yield* other.job("five").reschedule({ delay: "1 hour" }))
        assert.isTrue(yield* other.job("five").reschedule({ at: 0 }))
        yield* shows(queue, { waiting: 4, delayed: 1 })
        const worker = yield* working(queue, (n) => n === 3 ? Effect.never : Effect.void, { concurrency: 2 })
        yield* begins(worker, [1, 5, 3])
        yield* shows(queue, { delayed: 2, waiting: 0, active: 1, completed: 2 })
        // Jobs that are active, done, or were never there.
        for (const id of ["three", delayed.id, "never"]) {
          assert.isFalse(yield* other.job(id).promote)
          assert.isFalse(yield* other.job(id).reschedule({ delay: 1 }))
        }
        assert.isTrue(yield* other.job(late.id).promote)
        assert.isTrue(yield* other.job("two").reschedule({ delay: 1 }))
        yield* begins(worker, [1, 5, 3, 4, 2])
        isRangeError(yield* Effect.exit(queue.job("x").reschedule({})))
        isRangeError(yield* Effect.exit(queue.job("x").reschedule({ delay: 1, at: 1 })))
        isRangeError(yield* Effect.exit(queue.job("x").reschedule({ delay: -1 })))
        yield* worker.stop
        assert.isTrue(yield* other.job("three").cancel)
      })))

  it.effect("is not found by an id that begins with the letter of other jobs", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const late = yield* queue.offer(1, { delay: "1 hour" })
        const grouped = yield* queue.offer(2, { group: "g" })
        for (const { id } of [late, grouped]) {
          const letter = id[0]!
          for (const other of ["u", "h", "n", "l", "U", "H", "N", "L", "V", "I", "O", "M"]) {
            if (other === letter) continue
            const { cancel, promote, status } = queue.job(other + id.slice(1))
            assert.isFalse(yield* promote, other)
            assert.isTrue(Option.isNone(yield* status), other)
            assert.isFalse(yield* cancel, other)
          }
        }
        yield* shows(queue, { delayed: 1, waiting: 1 })
        assert.isTrue(yield* queue.job(late.id).promote)
        const worker = yield* working(queue)
        yield* shows(queue, { completed: 2, delayed: 0, waiting: 0, active: 0 })
        assert.deepStrictEqual(worker.begun.toSorted(), [1, 2])
        yield* worker.stop
      })))

  it.effect("waits again when it was promoted, and rescheduled, before any worker came to it", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const { id } = yield* queue.offer(1)
        yield* queue.offer(2)
        assert.isTrue(yield* queue.job(id).reschedule({ delay: "1 hour" }))
        assert.isTrue(yield* queue.job(id).promote)
        assert.isFalse(yield* queue.job(id).promote)
        yield* queue.pause
        const delayed = yield* queue.offer(3, { delay: "1 hour" })
        assert.isTrue(yield* queue.job(delayed.id).promote)
        assert.isTrue(yield* queue.job(delayed.id).reschedule({ delay: "1 hour" }))
        yield* shows(queue, { waiting: 2, delayed: 1 })
        yield* queue.resume
        const worker = yield* working(queue)
        yield* begins(worker, [1, 2])
        yield* worker.stop
      })))

  it.effect("begins before those of its level that wait, the last one first", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        yield* queue.offer(0)
        const lifo = yield* queue.offerAll(upTo(9, 1), { lifo: true })
        yield* queue.offerAll([20, 21], { lifo: true, priority: "high" })
        yield* queue.offer(22, { priority: "high" })
        yield* queue.offer(30, { lifo: true, priority: "low" })
        yield* shows(queue, { waiting: 14, waitingBy: { urgent: 0, high: 3, normal: 10, low: 1 }, delayed: 0 })
        assert.isTrue(yield* queue.job(lifo[8]!.id).cancel)
        assert.isTrue(yield* queue.job(lifo[7]!.id).reschedule({ delay: "1 hour" }))
        assert.isTrue(yield* queue.job(lifo[6]!.id).update(70))
        assert.deepStrictEqual(yield* queue.job(lifo[5]!.id).status, Option.some({ state: "waiting", attempts: 0 }))
        const worker = yield* working(
          queue,
          (n) =>
            n === 21
              ? Effect.flatMap(Queue.Job, ({ attempt }) => attempt === 1 ? Effect.fail("no") : Effect.void)
              : Effect.void,
          { retry: Schedule.spaced("1 milli") }
        )
        yield* shows(queue, { completed: 12, delayed: 1, waiting: 0 })
        const { begun } = worker
        assert.deepStrictEqual(begun.slice(0, 1), [21])
        // One in eight is of another source.
        const normal = begun.filter((n) => n < 20 || n === 70)
        assert.deepStrictEqual(normal.filter((n) => n !== 0), [70, 6, 5, 4, 3, 2, 1])
        assert.isBelow(begun.indexOf(20), begun.indexOf(22))
        yield* worker.stop
        yield* queue.offerAll(upTo(300), { lifo: true })
        assert.strictEqual(yield* queue.drain({ delayed: true }), 301)
        yield* shows(queue, { waiting: 0, delayed: 0 })
        isRangeError(yield* Effect.exit(Effect.suspend(() => queue.offer(1, { lifo: true, delay: 1 }))))
      })))

  it.effect("has the payload that it was given last, until it has begun", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const other = yield* on(b!, make())
        const [first] = yield* queue.offerAll([1, 2])
        const third = yield* queue.offer(3, { id: "three", delay: "1 hour" })
        assert.isTrue(yield* other.job(first!.id).update(10))
        assert.isTrue(yield* other.job(first!.id).update(11))
        assert.isTrue(yield* other.job("three").update(30))
        const worker = yield* working(queue, (n) => n > 9 ? Effect.fail("no") : Effect.void, {
          retry: Schedule.spaced("1 hour")
        })
        yield* begins(worker, [11, 2])
        // An attempt was made, so it has begun.
        assert.isFalse(yield* other.job(first!.id).update(12))
        assert.isFalse(yield* other.job("never").update(1))
        assert.isTrue(yield* other.job(first!.id).retry)
        yield* begins(worker, [11, 2, 11])
        const invalid = yield* Effect.flip(other.job("three").update("x" as never))
        assert.strictEqual(invalid.reason._tag, "InvalidPayload")
        yield* worker.stop
        const last = yield* working(queue, () => Effect.fail("no"), { attempts: 1 })
        assert.isTrue(yield* other.job("three").promote)
        yield* begins(last, [30])
        yield* shows(queue, { dead: 1 })
        const [letter] = yield* Stream.runCollect(queue.deadLetters)
        assert.strictEqual(letter!.body, "30")
        // A dead letter begins anew, by every id that its job has had.
        assert.isTrue(yield* other.job("three").retry)
        yield* begins(last, [30, 30])
        for (const at of [3, 4, 5]) {
          yield* shows(queue, { dead: 1 })
          assert.isTrue(yield* other.job(third.id).retry)
          yield* begins(last, upTo(at).map(() => 30))
        }
        assert.isFalse(yield* other.job("never").retry)
        yield* last.stop
        const { id } = yield* queue.offer(4)
        assert.isFalse(yield* other.job(`7:${id}`).cancel)
        assert.isTrue(Option.isSome(yield* other.job(id).status))
      })))

  it.effect("keeps its payload when its worker dies, and is delivered again", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const other = yield* on(b!, make())
        const { id } = yield* other.offer(1)
        assert.isTrue(yield* other.job(id).update(2))
        const worker = yield* working(queue, () => Effect.never)
        yield* begins(worker, [2])
        missed(a!)
        yield* lose(a!, namespace, server)
        yield* begins(worker, [2, 2])
        assert.deepStrictEqual(yield* other.job(id).status, Option.some({ state: "active", attempts: 2 }))
        yield* worker.stop
      })))

  it.effect("is found among thousands of dead letters", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        yield* queue.offer(0, { id: "first" })
        yield* queue.offerAll(upTo(1100, 1))
        const worker = yield* working(queue, () => Effect.flatMap(Queue.Job, (job) => job.discard("no")), {
          concurrency: 100
        })
        yield* shows(queue, { dead: 1101 })
        yield* worker.stop
        assert.isTrue(yield* queue.job("first").retry)
        assert.isFalse(yield* queue.job("first").retry)
        yield* shows(queue, { dead: 1100, waiting: 1 })
      })))
})

layer(TestServer.layer, live)("what a handler keeps of its job", (it) => {
  const notesOf = (namespace: string, server: Server) =>
    Effect.map(server.cli("HLEN", `{${namespace}:00}:queue-notes:noted`), Number)

  it.effect("is received by processes that follow it, and ends with the job", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ name: "noted" }))
        const other = yield* on(b!, make({ name: "noted" }))
        const steps = yield* Effect.forEach(upTo(4), () => Deferred.make<void>())
        const { id } = yield* queue.offer(1, { delay: "1 hour", id: "followed" })
        const plain = yield* queue.offer(2)
        const [early, own]: [Array<unknown>, Array<unknown>] = [[], []]
        const follow = (by: typeof queue, name: string, into: Array<unknown>) =>
          Effect.forkChild(Stream.runForEach(by.job(name).progress, (value) => Effect.sync(() => into.push(value))))
        const fibers = [yield* follow(other, "followed", early), yield* follow(queue, id, own)]
        const nothing = yield* follow(other, plain.id, [])
        yield* eventually(Effect.map(notesOf(namespace, server), (count) => assert.strictEqual(count, 2)))
        const worker = yield* working(queue, (n) =>
          n === 2 ? Effect.void : Effect.gen(function*() {
            const { progress } = yield* Queue.Job
            yield* progress(0.1)
            yield* progress({ at: 0.2 })
            for (const [at, step] of steps.entries()) {
              yield* Deferred.await(step)
              yield* progress(at)
            }
          }), { concurrency: 2 })
        yield* promptly(Fiber.join(nothing), "the end of a job that told nothing")
        yield* queue.job(id).promote
        // Of one turn, the latest.
        yield* eventually(Effect.sync(() => assert.deepStrictEqual([early, own], [[{ at: 0.2 }], [{ at: 0.2 }]])))
        assert.deepStrictEqual(yield* Stream.runHead(other.job("followed").progress), Option.some({ at: 0.2 }))
        for (const [at, step] of steps.entries()) {
          yield* Deferred.succeed(step, undefined)
          if (at < 3) yield* eventually(Effect.sync(() => assert.deepStrictEqual([early.at(-1), own.at(-1)], [at, at])))
        }
        yield* promptly(Effect.forEach(fibers, (fiber) => Fiber.join(fiber)), "the end")
        // The last one came before the end, although it was published in the same turn.
        assert.deepStrictEqual([early.at(-1), own.at(-1)], [3, 3])
        assert.deepStrictEqual(yield* Stream.runCollect(other.job("followed").progress), [])
        assert.strictEqual(yield* notesOf(namespace, server), 0)
        yield* worker.stop
      })))

  it.effect("is followed through the loss of sessions, and no more when nothing follows it", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ name: "noted" }))
        const other = yield* on(b!, make({ name: "noted" }))
        const { id } = yield* queue.offer(1)
        const gate = yield* Deferred.make<void>()
        const worker = yield* working(queue, () =>
          Effect.gen(function*() {
            const job = yield* Queue.Job
            yield* job.progress(job.attempt)
            yield* Deferred.await(gate)
          }))
        const told: Array<unknown> = []
        const following = yield* Effect.forkChild(
          Stream.runForEach(other.job(id).progress, (value) => Effect.sync(() => told.push(value)))
        )
        yield* eventually(Effect.sync(() => assert.deepStrictEqual(told, [1])))
        yield* lose(b!, namespace, server)
        yield* lose(a!, namespace, server)
        yield* eventually(Effect.sync(() => assert.deepStrictEqual(told, [1, 2])))
        missed(b!)
        const second = yield* Effect.forkChild(Stream.runDrain(other.job(id).progress))
        yield* Fiber.interrupt(following)
        yield* eventually(Effect.map(notesOf(namespace, server), (count) => assert.strictEqual(count, 2)))
        yield* Fiber.interrupt(second)
        yield* eventually(Effect.map(notesOf(namespace, server), (count) => assert.strictEqual(count, 1)))
        yield* Deferred.succeed(gate, undefined)
        yield* shows(queue, { completed: 1 })
        yield* worker.stop
      })))

  it.effect("is a log of its newest lines, which goes on with its dead letter", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ name: "noted" }))
        const other = yield* on(b!, make({ name: "noted" }))
        const { id } = yield* other.offer(1)
        assert.deepStrictEqual(yield* other.job(id).logs, [])
        const gate = yield* Deferred.make<void>()
        const line = (n: number) => `line "${n}"\n${hostile}`
        const worker = yield* working(queue, () =>
          Effect.gen(function*() {
            const job = yield* Queue.Job
            for (let n = 0; n < 230; n++) {
              yield* job.log(line(n))
              if (n % 50 === 49) yield* job.checkpoint(n)
            }
            yield* job.checkpoint("long")
            yield* Deferred.await(gate)
            yield* job.log("\u0000".repeat(5000))
            yield* Effect.fail("no")
          }), { attempts: 1 })
        yield* eventually(
          Effect.map(other.job(id).logs, (lines) => assert.deepStrictEqual(lines, upTo(100, 130).map(line)))
        )
        yield* Deferred.succeed(gate, undefined)
        yield* shows(queue, { dead: 1 })
        const [letter] = yield* Stream.runCollect(other.deadLetters)
        assert.strictEqual(letter!.logs.at(-1), "\u0000".repeat(2048))
        assert.isBelow(JSON.stringify(letter!.logs).length, 16_500)
        assert.isAbove(letter!.logs.length, 20)
        assert.strictEqual(yield* notesOf(namespace, server), 0)
        assert.deepStrictEqual(yield* other.job(id).logs, [])
        yield* worker.stop
      })))

  it.effect("is a checkpoint for the attempts that follow, after failures, crashes and a replay", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ name: "noted" }))
        const other = yield* on(b!, make({ name: "noted" }))
        const found: Array<unknown> = []
        const handler = () =>
          Effect.gen(function*() {
            const job = yield* Queue.Job
            found.push(Option.getOrUndefined(job.checkpointed))
            yield* job.checkpoint({ step: found.length })
            if (found.length === 2) yield* Effect.never
            if (found.length < 5) yield* Effect.fail("no")
          })
        const worker = yield* working(queue, handler, { retry: Schedule.spaced("10 millis"), attempts: 4 })
        yield* other.offer(1)
        yield* eventually(Effect.sync(() => assert.strictEqual(found.length, 2)))
        yield* eventually(Effect.map(notesOf(namespace, server), (count) => assert.strictEqual(count, 1)))
        missed(a!)
        yield* lose(a!, namespace, server)
        yield* shows(other, { dead: 1 })
        yield* worker.stop
        const again = yield* working(other, handler)
        assert.strictEqual(yield* other.replay(), 1)
        yield* shows(other, { completed: 1 })
        assert.deepStrictEqual(found, [undefined, { step: 1 }, { step: 2 }, { step: 3 }, { step: 4 }])
        assert.strictEqual(yield* notesOf(namespace, server), 0)
        yield* again.stop
      })))

  it.effect("is no checkpoint for a payload that has replaced the one before", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ name: "noted" }))
        const found: Array<unknown> = []
        const handler = (n: number) =>
          Effect.gen(function*() {
            const job = yield* Queue.Job
            found.push([n, Option.getOrUndefined(job.checkpointed)])
            yield* job.checkpoint(n)
            if (n === 1) yield* job.snooze("1 hour")
            if (n === 2) yield* Effect.fail("no")
          })
        const worker = yield* working(queue, handler, { attempts: 1 })
        const begun = (...expected: ReadonlyArray<unknown>) =>
          eventually(Effect.sync(() => assert.deepStrictEqual(found, expected)))
        const replaced = {
          update: [undefined, (id: string) => queue.job(id).update(3)],
          keepLast: [{ id: "k", mode: "keepLast" }, () => queue.offer(3, { dedupe: { id: "k", mode: "keepLast" } })],
          debounce: [
            { id: "d", mode: "debounce", window: 10 },
            () => queue.offer(3, { dedupe: { id: "d", mode: "debounce", window: 10 } })
          ]
        } as const
        for (const [dedupe, replace] of Object.values(replaced)) {
          const { id } = yield* queue.offer(1, { dedupe })
          yield* begun([1, undefined])
          yield* shows(queue, { delayed: 1, active: 0, waiting: 0 })
          yield* replace(id)
          yield* queue.job(id).promote
          yield* begun([1, undefined], [3, undefined])
          found.length = 0
        }
        // That of a dead letter stays with its payload.
        const { id } = yield* queue.offer(2)
        yield* shows(queue, { dead: 1 })
        assert.strictEqual(yield* queue.replay(), 1)
        yield* begun([2, undefined], [2, 2])
        yield* shows(queue, { dead: 1 })
        yield* queue.pause
        assert.strictEqual(yield* queue.replay(), 1)
        assert.isTrue(yield* queue.job(id).update(3))
        yield* queue.resume
        yield* begun([2, undefined], [2, 2], [3, undefined])
        yield* shows(queue, { active: 0, waiting: 0 })
        assert.strictEqual(yield* notesOf(namespace, server), 0)
        yield* worker.stop
      })))

  it.effect("is the latest one, also when Redis had no memory for those before", () =>
    Effect.gen(function*() {
      const server = yield* standalone()
      const memory = (bytes: number) => Effect.orDie(server.cli("CONFIG", "SET", "maxmemory", bytes))
      const options = {
        namespace: freshNamespace(),
        partitions: 1,
        lease: "1500 millis",
        margin: "300 millis"
      } as const
      const queue = yield* on(yield* node(server.url, options), make({ name: "noted" }))
      const found: Array<unknown> = []
      const seen: Array<unknown> = []
      const lines: Array<string> = []
      const worker = yield* working(queue, () =>
        Effect.gen(function*() {
          const job = yield* Queue.Job
          found.push(Option.getOrUndefined(job.checkpointed))
          if (job.attempt > 1) return
          for (const part of [1, 2]) {
            yield* memory(1)
            yield* job.log(`${part} refused`)
            yield* job.progress(part)
            assert.isTrue(Option.isNone(yield* Effect.timeoutOption(job.checkpoint(`${part} refused`), "100 millis")))
            yield* memory(0)
            yield* job.log(`${part} stored`)
            yield* job.progress(part + 0.5)
            yield* promptly(job.checkpoint(`${part} stored`), "the checkpoint")
          }
          // What was refused is not tried again after this.
          yield* realSleep("1 second")
          lines.push(...yield* queue.job("job").logs)
          yield* Effect.fail("no")
        }), { retry: Schedule.spaced("10 millis") })
      yield* queue.offer(1, { id: "job", delay: "100 millis" })
      const following = yield* Effect.forkChild(
        Stream.runForEach(queue.job("job").progress, (value) => Effect.sync(() => seen.push(value)))
      )
      yield* shows(queue, { completed: 1 })
      yield* worker.stop
      yield* Fiber.join(following)
      assert.deepStrictEqual(found, [undefined, "2 stored"])
      assert.deepStrictEqual(seen, [1.5, 2.5])
      assert.deepStrictEqual(lines, ["1 refused", "1 stored", "2 refused", "2 stored"])
    }))

  it.effect("is refused when the job is not its own any more, and when it is no JSON", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ name: "noted" }))
        const { id } = yield* queue.offer(1)
        yield* queue.offer(2)
        const jobs: Array<Queue.Job["Service"]> = []
        const worker = yield* working(queue, (n) =>
          Effect.andThen(
            Effect.map(Queue.Job, (job) => void jobs.push(job)),
            n === 1 ? Effect.never : Effect.void
          ), { concurrency: 2 })
        yield* shows(queue, { completed: 1 })
        assert.isTrue(yield* queue.job(id).cancel)
        for (const job of jobs) {
          yield* job.progress(1)
          yield* job.log("late")
          const exit = yield* Effect.exit(job.checkpoint(1))
          assert.isTrue(Exit.isFailure(exit) && Cause.hasInterruptsOnly(exit.cause))
          const circle: { self?: unknown } = {}
          circle.self = circle
          for (const value of [undefined, 10n, circle]) {
            isRangeError(yield* Effect.exit(job.progress(value)))
            isRangeError(yield* Effect.exit(job.checkpoint(value)))
          }
          isRangeError(yield* Effect.exit(job.log(5 as never)))
        }
        assert.strictEqual(yield* notesOf(namespace, server), 0)
        yield* worker.stop
      })))
})

layer(TestServer.layer, live)("a job that means the same as others", (it) => {
  const isEmpty = (queue: Queue.Queue<number>, namespace: string, server: Server) =>
    Effect.gen(function*() {
      yield* shows(queue, { waiting: 0, delayed: 0, active: 0 })
      const fields = (yield* server.cli("HKEYS", `{${namespace}:00}:queue:same`)).split("\n")
      assert.deepStrictEqual(fields.filter((field) => field.startsWith("x")), [])
    })

  it.effect("is stored once while one is not done", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ name: "same" }))
        const other = yield* on(b!, make({ name: "same" }))
        const dedupe = { id: hostile } as const
        const [first, second, apart] = yield* queue.offerAll([1, 2, 3], (n) => n === 3 ? { id: hostile } : { dedupe })
        assert.deepStrictEqual(second, { id: first!.id, duplicate: true })
        assert.isFalse(apart!.duplicate)
        const gate = yield* Deferred.make<void>()
        const worker = yield* working(queue, (n) => n === 1 ? Deferred.await(gate) : Effect.void, { concurrency: 2 })
        yield* begins(worker, [1, 3])
        assert.deepStrictEqual(yield* other.offer(4, { dedupe, delay: "1 hour" }), { id: first!.id, duplicate: true })
        yield* Deferred.succeed(gate, undefined)
        yield* shows(queue, { completed: 2 })
        const delayed = yield* other.offer(5, { dedupe, delay: "1 hour" })
        assert.isFalse(delayed.duplicate)
        assert.isTrue(yield* other.job(delayed.id).cancel)
        assert.isFalse((yield* other.offer(6, { dedupe })).duplicate)
        yield* begins(worker, [1, 3, 6])
        yield* queue.pause
        yield* other.offer(7, { dedupe })
        yield* other.offer(8, { dedupe: { id: "expires" }, expires: 1 })
        yield* queue.drain({ delayed: true })
        assert.isFalse((yield* other.offer(9, { dedupe, expires: 1 })).duplicate)
        yield* queue.resume
        yield* shows(queue, { waiting: 0, active: 0 })
        yield* isEmpty(queue, namespace, server)
        yield* worker.stop
      })))

  it.effect("is stored once in a window", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const throttled = make({ name: "same", retention: "2 seconds" })
        const queue = yield* on(a!, throttled)
        const other = yield* on(b!, throttled)
        const worker = yield* working(queue)
        const dedupe = { id: "x", mode: "throttle", window: "1500 millis" } as const
        const started = Date.now()
        const first = yield* queue.offer(1, { dedupe })
        yield* begins(worker, [1])
        assert.deepStrictEqual(
          yield* other.offerAll([2, 3], { dedupe }),
          upTo(2).map(() => ({ id: first.id, duplicate: true }))
        )
        assert.isFalse((yield* other.offer(4, { dedupe: { ...dedupe, id: "y" } })).duplicate)
        yield* eventually(Effect.map(other.offer(5, { dedupe }), ({ duplicate }) => assert.isFalse(duplicate)))
        assert.isAtLeast(Date.now() - started, 1490)
        yield* begins(worker, [1, 4, 5])
        yield* isEmpty(queue, namespace, server)
        yield* worker.stop
      })))

  it.effect("begins with the last payload when none was offered for a window", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ name: "same" }))
        const other = yield* on(b!, make({ name: "same" }))
        const dedupe = { id: "x", mode: "debounce", window: "1 second" } as const
        const gate = yield* Deferred.make<void>()
        const worker = yield* working(queue, (n) => n === 10 ? Deferred.await(gate) : Effect.void, { concurrency: 2 })
        const [first, again] = yield* queue.offerAll([1, 2], { dedupe })
        assert.deepStrictEqual([first!.duplicate, again], [false, { id: first!.id, duplicate: true }])
        const started = Date.now()
        for (let n = 3; n <= 10; n++) {
          yield* realSleep("200 millis")
          assert.deepStrictEqual(yield* other.offer(n, { dedupe }), { id: first!.id, duplicate: true })
        }
        assert.deepStrictEqual(worker.begun, [])
        yield* begins(worker, [10])
        assert.isAtLeast(Date.now() - started, 2590)
        // One runs, and another one begins beside it.
        const second = yield* other.offer(11, { dedupe })
        assert.isFalse(second.duplicate)
        yield* begins(worker, [10, 11])
        yield* Deferred.succeed(gate, undefined)
        yield* shows(queue, { completed: 2 })
        yield* isEmpty(queue, namespace, server)
        yield* worker.stop
      })))

  it.effect("is not begun sooner by a later one, when it was snoozed or rescheduled", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ name: "same" }))
        const dedupe = { id: "x", mode: "debounce", window: "10 millis" } as const
        const worker = yield* working(queue, () => Effect.flatMap(Queue.Job, (job) => job.snooze("1 hour")))
        const { id } = yield* queue.offer(1, { dedupe })
        yield* begins(worker, [1])
        yield* shows(queue, { delayed: 1, active: 0 })
        const due = Effect.map(
          Stream.runHead(queue.jobs({ state: "delayed" })),
          (found) => DateTime.toEpochMillis(Option.getOrThrow(found).due!) - Date.now()
        )
        assert.isTrue((yield* queue.offer(2, { dedupe })).duplicate)
        assert.closeTo(yield* due, 3_600_000, 30_000)
        assert.isTrue(yield* queue.job(id).reschedule({ delay: "2 hours" }))
        assert.isTrue((yield* queue.offer(3, { dedupe })).duplicate)
        assert.closeTo(yield* due, 7_200_000, 30_000)
        // It is later, when the window is longer.
        assert.isTrue((yield* queue.offer(4, { dedupe: { ...dedupe, window: "3 hours" } })).duplicate)
        assert.closeTo(yield* due, 10_800_000, 30_000)
        yield* worker.stop
        // Also before a worker has come to it.
        const keepLast = { id: "y", mode: "keepLast" } as const
        const second = yield* queue.offer(5, { dedupe: keepLast })
        assert.isTrue(yield* queue.job(second.id).reschedule({ delay: "1 hour" }))
        assert.isTrue((yield* queue.offer(6, { dedupe: { ...dedupe, id: "y" } })).duplicate)
        const again = yield* working(queue)
        assert.isTrue(yield* queue.job(id).promote)
        yield* begins(again, [4])
        yield* shows(queue, { waiting: 0, active: 0, delayed: 1 })
        assert.deepStrictEqual(again.begun, [4])
        yield* again.stop
      })))

  it.effect("is kept behind the one that runs, with the last payload", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ name: "same" }))
        const other = yield* on(b!, make({ name: "same" }))
        const dedupe = { id: "x", mode: "keepLast" } as const
        const gates = yield* Effect.forEach(upTo(3), () => Deferred.make<void>())
        let [running, most, begun] = [0, 0, 0]
        const worker = yield* working(queue, (n) =>
          Effect.gen(function*() {
            most = Math.max(most, ++running)
            if (n < 10) yield* Deferred.await(gates[begun++]!)
            if (n === 4 && (yield* Queue.Job).attempt === 1) yield* Effect.fail("no")
            if (n === 8) yield* (yield* Queue.Job).discard("no")
          }).pipe(Effect.ensuring(Effect.sync(() => running--))), {
          concurrency: 5,
          retry: Schedule.spaced("300 millis")
        })
        const [one, two, three, four] = yield* queue.offerAll([1, 2, 3, 4], { dedupe })
        assert.deepStrictEqual([one!.duplicate, two, three, four!.id], [
          false,
          { id: one!.id, duplicate: true },
          { id: one!.id, duplicate: true },
          one!.id
        ])
        yield* begins(worker, [4])
        const [kept, sixth] = yield* other.offerAll([5, 6], { dedupe })
        assert.deepStrictEqual([kept!.duplicate, sixth], [false, { id: kept!.id, duplicate: true }])
        assert.deepStrictEqual(yield* other.job(kept!.id).status, Option.some({ state: "delayed", attempts: 0 }))
        yield* Deferred.succeed(gates[0]!, undefined)
        // It has failed, and waits for its next attempt: the others wait as well.
        yield* shows(queue, { active: 0, delayed: 2 })
        assert.deepStrictEqual(yield* other.offer(7, { dedupe }), { id: kept!.id, duplicate: true })
        yield* begins(worker, [4, 4])
        yield* Deferred.succeed(gates[1]!, undefined)
        yield* begins(worker, [4, 4, 7])
        // A kept job may be cancelled. It begins when the job before it is a dead letter, also after the death of a worker.
        const cancelled = yield* other.offer(9, { dedupe })
        assert.isTrue(yield* other.job(cancelled.id).cancel)
        assert.isFalse((yield* other.offer(10, { dedupe })).duplicate)
        missed(a!)
        yield* lose(a!, namespace, server)
        yield* begins(worker, [4, 4, 7, 7])
        assert.strictEqual(most, 1)
        assert.isTrue((yield* other.offer(11, { dedupe })).duplicate)
        assert.isTrue(yield* other.job((yield* other.offer(12, { dedupe })).id).cancel)
        yield* other.offer(13, { dedupe })
        const [active] = worker.begun.slice(-1)
        assert.strictEqual(active, 7)
        yield* Deferred.succeed(gates[2]!, undefined)
        yield* worker.stop
        const last = yield* working(other, () => Effect.void)
        yield* begins(last, [7, 13])
        yield* isEmpty(queue, namespace, server)
        yield* last.stop
      })))

  it.effect("is kept behind the one that runs, also for an offer that waits for a quiet moment", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ name: "same" }))
        const gate = yield* Deferred.make<void>()
        const worker = yield* working(queue, (n) => n === 1 ? Deferred.await(gate) : Effect.void, { concurrency: 5 })
        const keepLast = { id: "x", mode: "keepLast" } as const
        yield* queue.offer(1, { dedupe: keepLast })
        yield* begins(worker, [1])
        const kept = yield* queue.offer(2, { dedupe: keepLast })
        // It has this payload now, and begins when the other one is done.
        const quiet = { id: "x", mode: "debounce", window: "1 milli" } as const
        assert.deepStrictEqual(yield* queue.offer(3, { dedupe: quiet }), { id: kept.id, duplicate: true })
        assert.deepStrictEqual(yield* queue.offer(4, { dedupe: keepLast }), { id: kept.id, duplicate: true })
        yield* shows(queue, { active: 1, delayed: 1 })
        yield* Deferred.succeed(gate, undefined)
        yield* begins(worker, [1, 4])
        yield* isEmpty(queue, namespace, server)
        yield* worker.stop
      })))

  it.effect("is refused when it makes no sense", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ name: "same" }))
        const refused = (options: Queue.OfferOptions) =>
          Effect.map(Effect.exit(Effect.suspend(() => queue.offer(1, options))), isRangeError)
        yield* refused({ dedupe: { id: "" } })
        yield* refused({ dedupe: { id: "x" }, id: "y" })
        yield* refused({ dedupe: { id: "x", window: 1 } })
        yield* refused({ dedupe: { id: "x", mode: "throttle" } })
        yield* refused({ dedupe: { id: "x", mode: "throttle", window: "1 hour" } })
        yield* refused({ dedupe: { id: "x", mode: "debounce", window: 0 } })
        yield* refused({ dedupe: { id: "x", mode: "debounce", window: 1 }, delay: 1 })
        yield* refused({ dedupe: { id: "x", mode: "keepLast" }, lifo: true })
        yield* refused({ dedupe: { id: "x", mode: "never" as "simple" } })
        yield* shows(queue, { waiting: 0, delayed: 0 })
      })))
})

layer(TestServer.layer, live)("a follow-up", (it) => {
  it.effect("is offered when its job is done, and not when that fails", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const other = yield* on(b!, make())
        const worker = yield* working(queue, (n) =>
          Effect.gen(function*() {
            const { attempt } = yield* Queue.Job
            if (n === 1) {
              yield* queue.followUp(10 * attempt)
              yield* queue.followUp(11, { priority: "high", id: "eleven" })
              yield* queue.followUp(12, { delay: "1 hour", id: "twelve" })
              if (attempt === 1) yield* Effect.fail("no")
            }
            if (n === 2) {
              yield* queue.followUp(30)
              yield* (yield* Queue.Job).discard("no")
            }
            if (n === 3) {
              yield* queue.followUp(31)
              yield* Effect.never
            }
          }), { retry: Schedule.spaced("10 millis") })
        const [, , third] = yield* other.offerAll([1, 2, 3])
        yield* eventually(Effect.sync(() => assert.include(worker.begun, 3)))
        assert.isTrue(yield* other.job(third!.id).cancel)
        yield* shows(queue, { completed: 3, dead: 1, delayed: 1, waiting: 0, active: 0 })
        assert.deepStrictEqual(worker.begun.filter((n) => n >= 10).toSorted(), [11, 20])
        assert.isTrue(yield* other.job("twelve").cancel)
        yield* worker.stop
      })))

  it.effect("is offered once when its worker dies, and when replies are lost", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const other = yield* on(b!, make())
        const gate = yield* Deferred.make<void>()
        const handler = (n: number) => n === 1 ? Effect.andThen(queue.followUp(2), Deferred.await(gate)) : Effect.void
        const worker = yield* working(queue, handler)
        yield* other.offer(1)
        yield* begins(worker, [1])
        missed(a!)
        yield* lose(a!, namespace, server)
        yield* begins(worker, [1, 1])
        yield* Deferred.succeed(gate, undefined)
        yield* begins(worker, [1, 1, 2])
        yield* shows(queue, { completed: 2, waiting: 0, active: 0 })
        yield* worker.stop
      })))

  it.effect("goes with the result of its job, and is one of so many", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(
          a!,
          Effect.tap(
            Queue.make({ name: "counts", payload: Schema.Number, success: Schema.Number, retention: "200 millis" }),
            emptied
          )
        )
        const worker = yield* working(queue, (n) =>
          Effect.gen(function*() {
            for (let at = 0; at < n; at++) yield* queue.followUp(0)
            if (n === 2) yield* queue.followUp("two" as never)
            return n
          }), { concurrency: 10, attempts: 1 })
        assert.strictEqual(yield* queue.execute(512), 512)
        yield* shows(queue, { completed: 513, dead: 0 })
        for (const n of [2, 513]) yield* Effect.exit(queue.execute(n))
        const letters = yield* Stream.runCollect(queue.deadLetters)
        assert.deepStrictEqual(
          letters.map(({ error }) => /RangeError|InvalidPayload|Expected number/.test(error)),
          [true, true]
        )
        yield* shows(queue, { completed: 513, dead: 2, waiting: 0 })
        isRangeError(yield* Effect.exit(queue.followUp(1).pipe(Effect.provideService(Queue.Job, {} as never))))
        yield* worker.stop
      })))
})
