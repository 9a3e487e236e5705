/** Jobs that run after others, as users offer them. */
import { assert, layer } from "@effect/vitest"
import { Deferred, Effect, Fiber, Option, Schema, Stream } from "effect"
import { Queue } from "../src/index.ts"
import { TestServer } from "./support/live.ts"
import { begins, emptied, isRangeError, make, shows, upTo, working } from "./support/queues.ts"
import { on, promptly, several } from "./support/several.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

const kept = {
  name: "kept",
  payload: Schema.Number,
  success: Schema.Number,
  error: Schema.String,
  retention: "3 seconds"
} as const

layer(TestServer.layer, live)("a job after others", (it) => {
  it.effect("is blocked until they have ended, whichever process runs them", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const theirs = yield* on(b!, make())
        const gates = [yield* Deferred.make<void>(), yield* Deferred.make<void>()]
        const first = yield* queue.offer(0)
        yield* queue.offer(1, { id: "second" })
        const third = yield* queue.offer(2, { after: [first.id, "second"] })
        // Behind it, and of a batch that names its own jobs.
        const more = yield* queue.offerAll([3, 4], (n) => ({ id: `job ${n}`, after: [n === 3 ? third.id : "job 3"] }))
        assert.deepStrictEqual(more.map(({ duplicate }) => duplicate), [false, false])
        yield* shows(queue, { waiting: 2, blocked: 3 })
        assert.deepStrictEqual(yield* theirs.job(third.id).status, Option.some({ state: "blocked", attempts: 0 }))
        const listed = yield* Stream.runCollect(theirs.jobs({ state: "blocked" }))
        assert.deepStrictEqual(listed.map(({ id, payload, state }) => [id, Option.getOrNull(payload), state]), [
          [third.id, 2, "blocked"],
          ["job 3", 3, "blocked"],
          ["job 4", 4, "blocked"]
        ])
        // Requests about jobs that have not begun also work for blocked jobs, and do not begin them.
        assert.isTrue(yield* queue.job("job 4").update(5))
        assert.isFalse(yield* queue.job(third.id).promote)
        assert.isFalse(yield* queue.job(third.id).reschedule({ delay: "1 second" }))
        const handler = (n: number) => n < 2 ? Deferred.await(gates[n]!) : Effect.void
        const worker = yield* working(theirs, handler, { concurrency: 8 })
        yield* begins(worker, [0, 1])
        yield* Deferred.succeed(gates[1]!, undefined)
        yield* shows(queue, { active: 1, blocked: 3 })
        yield* Deferred.succeed(gates[0]!, undefined)
        yield* begins(worker, [0, 1, 2, 3, 5])
        yield* shows(queue, { completed: 5, blocked: 0, waiting: 0 })
        // That it is done is known, and not that it has succeeded.
        assert.strictEqual((yield* queue.offer(9, { id: "second", after: ["never offered"] })).duplicate, true)
        yield* worker.stop
      })))

  it.effect("fails, is skipped or runs when one has failed, and says so", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, Effect.tap(Queue.make(kept), emptied))
        const first = yield* queue.offer(0, { result: true })
        const after = [first.id]
        const fails = yield* queue.offer(1, { after, result: true })
        const skips = yield* queue.offer(2, { after, onFailure: "skip", result: true })
        const goes = yield* queue.offer(3, { after, onFailure: "continue", result: true })
        const next = yield* queue.offer(4, { after: [skips.id], result: true })
        const worker = yield* working(
          queue,
          (n): Effect.Effect<number, string> => n === 0 ? Effect.fail("no") : Effect.succeed(n),
          { attempts: 1 }
        )
        const outcomeOf = (id: string) =>
          Effect.map(Effect.flip(queue.job(id).result()), (error) =>
            typeof error === "string"
              ? error
              : error.reason._tag === "JobFailed"
              ? error.reason.outcome
              : error.reason._tag)
        assert.strictEqual(yield* promptly(outcomeOf(first.id), "the failure"), "no")
        assert.strictEqual(yield* outcomeOf(fails.id), "failed")
        assert.strictEqual(yield* outcomeOf(skips.id), "skipped")
        assert.strictEqual(yield* queue.job(goes.id).result(), 3)
        assert.strictEqual(yield* outcomeOf(next.id), "failed")
        assert.deepStrictEqual(worker.begun, [0, 3])
        const letters = yield* Stream.runCollect(queue.deadLetters)
        assert.deepStrictEqual(letters.map(({ error, id, reason }) => [id, reason, error]).slice(1), [
          [fails.id, "failed", `job ${first.id}, which it runs after, has not succeeded`],
          [next.id, "failed", `job ${skips.id}, which it runs after, has not succeeded`]
        ])
        // Offered when all that has happened already.
        assert.strictEqual(yield* outcomeOf((yield* queue.offer(5, { after, result: true })).id), "failed")
        assert.strictEqual(yield* queue.execute(6, { after, onFailure: "continue" }), 6)
        assert.strictEqual(yield* queue.execute(7, { after: [goes.id] }), 7)
        yield* worker.stop
      })))

  it.effect("comes after them when its dead letter is replayed, too", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        let fails = true
        const ended: Array<number> = []
        const worker = yield* working(queue, (n) =>
          Effect.gen(function*() {
            if (fails) yield* Effect.fail("no")
            ended.push(n)
          }), { attempts: 1, concurrency: 8 })
        yield* queue.pause
        const first = yield* queue.offer(0)
        const second = yield* queue.offer(1, { after: [first.id], onFailure: "continue", group: "g" })
        const third = yield* queue.offer(2, { after: [second.id, first.id] })
        const other = yield* queue.offer(3, { after: [first.id] })
        yield* queue.resume
        yield* shows(queue, { dead: 4, blocked: 0 })
        assert.deepStrictEqual(worker.begun, [0, 1])
        // By itself, it does not begin before the job that has made it a dead letter.
        for (const { id } of [other, third]) assert.isFalse(yield* queue.job(id).retry)
        yield* queue.pause
        const letters = (yield* Stream.runCollect(queue.deadLetters)).map(({ letter }) => letter)
        assert.strictEqual(yield* queue.replay(letters.toReversed()), 4)
        yield* shows(queue, { dead: 0, waiting: 1, blocked: 3 })
        yield* queue.resume
        // They fail again, as they did the first time.
        yield* shows(queue, { dead: 4, blocked: 0 })
        fails = false
        assert.isTrue(yield* queue.job(first.id).retry)
        yield* shows(queue, { dead: 3, active: 0, waiting: 0 })
        assert.isTrue(yield* queue.job(other.id).retry)
        yield* begins({ begun: ended }, [0, 3])
        assert.strictEqual(yield* queue.replay(), 2)
        yield* begins({ begun: ended }, [0, 3, 1, 2])
        yield* shows(queue, { dead: 0, active: 0, blocked: 0 })
        yield* worker.stop
      })))

  it.effect("is refused when nothing is known of one of them", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const worker = yield* working(queue)
        const plain = yield* queue.offer(1)
        yield* shows(queue, { completed: 1 })
        for (const after of [[plain.id], ["never offered"]]) {
          const one = yield* Effect.flip(queue.offer(2, { after }))
          assert.include(String(one.reason), after[0]!)
          assert.strictEqual(one.reason._tag, "OutcomeUnknown")
          assert.strictEqual((yield* Effect.flip(queue.offerAll([3], { after }))).reason._tag, "OutcomeUnknown")
        }
        for (
          const options of [
            { delay: "1 second" },
            { lifo: true },
            { at: Date.now() },
            { onFailure: "never" as "fail" },
            { dedupe: { id: "x", mode: "keepLast" } },
            { after: upTo(1001).map(String) },
            { after: [""] }
          ] as const
        ) {
          isRangeError(yield* Effect.exit(Effect.suspend(() => queue.offer(1, { after: [plain.id], ...options }))))
        }
        yield* worker.stop
        assert.deepStrictEqual((yield* queue.state).blocked, 0)
      })))

  it.effect("is removed by cancel, drain and obliterate, also when thousands run after one", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const fan = (count: number) =>
          Effect.gen(function*() {
            const { id } = yield* queue.offer(0)
            const all = yield* queue.offerAll(upTo(count), { after: [id] })
            return [id, ...all.map(({ id }) => id)]
          })
        const [, second, third] = yield* fan(2)
        yield* queue.offer(1, { after: [third!], onFailure: "continue" })
        assert.isTrue(yield* queue.job(third!).cancel)
        yield* shows(queue, { waiting: 2, blocked: 1 })
        assert.isTrue(Option.isSome(yield* queue.job(second!).status))
        // Without the delayed jobs it removes waiting ones, and those after them fail.
        assert.strictEqual(yield* queue.drain(), 2)
        yield* shows(queue, { waiting: 0, blocked: 0, dead: 1 })
        yield* queue.discard()
        yield* fan(1500)
        assert.strictEqual(yield* queue.drain({ delayed: true }), 1501)
        yield* shows(queue, { waiting: 0, blocked: 0, dead: 0 })
        yield* fan(1500)
        assert.strictEqual(yield* queue.obliterate, 1501)
        const [first] = yield* fan(3000)
        const worker = yield* working(queue, () => Effect.void, { concurrency: 64 })
        yield* shows(queue, { completed: 3001, blocked: 0, waiting: 0 })
        assert.strictEqual(worker.begun.length, 3001)
        assert.isTrue(Option.isNone(yield* queue.job(first!).status))
        yield* worker.stop
      })))

  it.effect("runs all the same after a removed job, also when a drain or a purge removes jobs over several calls", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const remove = { drain: queue.drain(), purge: queue.group("g").purge }
        for (const [how, group] of [["drain", undefined], ["drain", "g"], ["purge", "g"]] as const) {
          const first = yield* queue.offer(0, { group })
          const after = { after: [first.id], group }
          const kept = yield* queue.offer(1, { ...after, onFailure: "continue" })
          const failed = yield* queue.offer(2, after)
          yield* queue.offer(3, { after: [failed.id], group, onFailure: "continue" })
          yield* queue.offerAll(upTo(600), { group })
          assert.strictEqual(yield* remove[how], 601)
          yield* shows(queue, { waiting: 2, blocked: 0, dead: 1 })
          assert.deepStrictEqual(yield* queue.job(kept.id).status, Option.some({ state: "waiting", attempts: 0 }))
          const worker = yield* working(queue)
          yield* begins(worker, [1, 3])
          yield* worker.stop
          yield* queue.discard()
        }
      })))

  it.effect("runs in its shard, and is refused for jobs of others", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ shards: 2 }))
        const ids = upTo(20).map((n) => `job ${n}`)
        const offered = yield* queue.offerAll(upTo(20), (n) => ({ id: ids[n]! }))
        assert.strictEqual(offered.length, 20)
        const results = yield* Effect.forEach(ids, (id) => Effect.exit(queue.offer(100, { after: ["job 0", id] })))
        const refused = results.filter((exit) => exit._tag === "Failure")
        assert.isTrue(refused.length > 0 && refused.length < 20)
        for (const exit of refused) isRangeError(exit)
        const plain = yield* Effect.forEach([1, 2], () => queue.offer(0))
        const after = yield* Effect.forEach(plain, ({ id }) => queue.offer(200, { after: [id] }))
        const worker = yield* working(queue)
        yield* shows(queue, { blocked: 0, waiting: 0, active: 0 })
        assert.strictEqual(worker.begun.filter((n) => n === 200).length, after.length)
        assert.strictEqual(worker.begun.filter((n) => n === 100).length, 20 - refused.length)
        yield* worker.stop
      }), { lease: "3 seconds", margin: "500 millis", partitions: 2 }))

  it.effect("of a group begins in its turn", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const gate = yield* Deferred.make<void>()
        const { id } = yield* queue.offer(0)
        const after = yield* queue.offerAll([1, 2], { after: [id], group: "g" })
        yield* queue.offer(3, { group: "g" })
        assert.isTrue(yield* queue.job(after[1]!.id).cancel)
        const worker = yield* working(queue, (n) => n === 0 ? Deferred.await(gate) : Effect.void, { concurrency: 4 })
        yield* shows(queue, { completed: 1, active: 1, blocked: 1 })
        yield* Deferred.succeed(gate, undefined)
        yield* shows(queue, { completed: 3, blocked: 0 })
        assert.strictEqual(worker.begun[2], 1)
        assert.isUndefined(worker.fiber.pollUnsafe())
        yield* Fiber.interrupt(worker.fiber)
      })))
})
