/** What a queue has in it, what it has done, and how it is emptied. */
import { assert, layer } from "@effect/vitest"
import {
  DateTime,
  Deferred,
  Duration,
  Effect,
  Exit,
  Fiber,
  Layer,
  Metric,
  Option,
  Schedule,
  Schema,
  Stream
} from "effect"
import { Metrics, Queue } from "../src/index.ts"
import { historyOf } from "../src/internal/queue/history.ts"
import { awake } from "./support/awake.ts"
import { eventually } from "./support/eventually.ts"
import { TestServer } from "./support/live.ts"
import { begins, isRangeError, shows, upTo, working } from "./support/queues.ts"
import { on, several } from "./support/several.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

const make = (options: Partial<Queue.Options<number>> = {}) =>
  Effect.tap(
    Queue.make({ name: "jobs", payload: Schema.Number, retention: "300 millis", ...options }),
    (queue) => Effect.addFinalizer(() => Effect.orDie(queue.obliterate))
  )

const listed = (queue: Queue.Queue<number>, options: Queue.JobsOptions) => Stream.runCollect(queue.jobs(options))

const payloads = (jobs: ReadonlyArray<Queue.JobInfo<number>>) => jobs.map(({ payload }) => Option.getOrThrow(payload))

layer(TestServer.layer, live)("the jobs of a queue", (it) => {
  it.effect("are listed by their state, page by page", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const other = yield* on(b!, make())
        const running = yield* Effect.forkChild(
          queue.run((n) => n < 100 ? Effect.never : Effect.fail("no"), {
            concurrency: 150,
            retry: Schedule.spaced("1 hour")
          })
        )
        yield* shows(queue, { workers: 1 })
        // Jobs from 100 on fail, and are delayed; jobs 70 to 99 are in the stream of delayed jobs.
        yield* queue.offerAll(upTo(130), (n) => n >= 70 && n < 100 ? { delay: 1, priority: "low" } : {})
        // At first, those that fail are active and those with a delay are not.
        const active = yield* eventually(
          Effect.tap(
            listed(other, { state: "active" }),
            (active) => Effect.sync(() => assert.deepStrictEqual(payloads(active), upTo(100)))
          )
        )
        yield* shows(queue, { active: 100, delayed: 30 })
        assert.isTrue(
          active.every(({ attempts, due, state }) => attempts === 1 && due === undefined && state === "active")
        )
        assert.deepStrictEqual(active.map(({ priority }) => priority), upTo(100).map((n) => n < 70 ? "normal" : "low"))
        yield* queue.pause
        const due = Math.round(Date.now() / 1000) * 1000 + 1_800_000
        yield* other.offerAll(upTo(200, 1000), { at: due })
        yield* other.offer(2000, { delay: "2 hours", id: "last", priority: "urgent" })
        const delayed = yield* listed(queue, { state: "delayed" })
        assert.strictEqual(delayed.length, 231)
        assert.sameMembers(payloads(delayed.slice(0, 200)), upTo(200, 1000))
        assert.sameMembers(payloads(delayed.slice(200, 230)), upTo(30, 100))
        assert.deepStrictEqual(
          [delayed[0]!.attempts, delayed[200]!.attempts, delayed[230]!.priority, delayed[230]!.id],
          [0, 1, "urgent", "last"]
        )
        assert.isTrue(delayed.slice(0, 200).every((job) => DateTime.toEpochMillis(job.due!) === due))
        yield* other.offerAll(upTo(300, 3000), (n) => ({ priority: n < 3100 ? "low" : n < 3200 ? "high" : "normal" }))
        const inOrder = [...upTo(100, 3100), ...upTo(100, 3200), ...upTo(100, 3000)]
        const waiting = yield* listed(queue, { state: "waiting" })
        assert.deepStrictEqual(payloads(waiting), inOrder)
        assert.isTrue(waiting.every(({ attempts }) => attempts === 0))
        yield* Fiber.interrupt(running)
        yield* shows(queue, { active: 0 })
        // Returned jobs are in front of the waiting jobs of their level.
        const normal = [...upTo(70), ...upTo(100, 3200)]
        const low = [...upTo(30, 70), ...upTo(100, 3000)]
        const all = [...upTo(100, 3100), ...normal, ...low]
        const again = yield* listed(queue, { state: "waiting" })
        assert.deepStrictEqual(payloads(again), all)
        for (const jobs of [again, delayed]) {
          const { state } = jobs[0]!
          for (const at of [0, 63, 64, 150, 199, 200]) {
            const some = yield* listed(other, { state, after: jobs[at]!.cursor, limit: 5 })
            assert.deepStrictEqual(payloads(some), payloads(jobs.slice(at + 1, at + 6)))
          }
        }
        assert.deepStrictEqual(payloads(yield* listed(queue, { state: "waiting", limit: 70 })), all.slice(0, 70))
        const strings = yield* on(b!, Queue.make({ name: "jobs", payload: Schema.String }))
        const [first] = yield* Stream.runCollect(strings.jobs({ state: "waiting", limit: 1 }))
        assert.isTrue(Option.isNone(first!.payload))
      })))

  it.effect("are listed page by page, shard by shard", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ shards: 3 }))
        const other = yield* on(b!, make({ shards: 3 }))
        yield* queue.offerAll(upTo(200), (n) => n < 150 ? { id: `${n}` } : { id: `${n}`, delay: "1 hour" })
        for (const [state, expected] of [["waiting", upTo(150)], ["delayed", upTo(50, 150)]] as const) {
          const all = yield* listed(other, { state })
          assert.sameMembers(payloads(all), expected)
          // They are in several shards, and the cursor says in which one.
          assert.isAbove(new Set(all.map(({ cursor }) => /^\d+\//.exec(cursor)?.[0])).size, 1)
          for (const limit of [1, 40, expected.length, 1000]) {
            assert.deepStrictEqual(payloads(yield* listed(other, { state, limit })), payloads(all.slice(0, limit)))
          }
          for (const [at, { cursor }] of all.entries()) {
            const next = yield* listed(other, { state, after: cursor, limit: 3 })
            assert.deepStrictEqual(payloads(next), payloads(all.slice(at + 1, at + 4)))
          }
        }
      }), { partitions: 3 }))

  for (const shards of [1, 3]) {
    it.effect(`are listed as dead letters, page by page: ${shards} shards`, () =>
      several(2, ([a, b]) =>
        Effect.gen(function*() {
          const queue = yield* on(a!, make({ shards }))
          const other = yield* on(b!, make({ shards }))
          const running = yield* Effect.forkChild(queue.run(() => Effect.fail("no"), { attempts: 1, concurrency: 100 }))
          yield* queue.offerAll(upTo(200), (n) => ({ id: `${n}` }))
          yield* shows(queue, { dead: 200 })
          yield* Fiber.interrupt(running)
          const all = yield* Stream.runCollect(queue.deadLetters)
          assert.sameMembers(all.map(({ id }) => id), upTo(200).map(String))
          const page = (options: Queue.LettersOptions) => Stream.runCollect(other.letters(options))
          assert.deepStrictEqual(yield* page({}), all)
          for (const limit of [1, 64, 65, 199, 200, 300]) {
            assert.deepStrictEqual(yield* page({ limit }), all.slice(0, limit))
          }
          for (const at of [0, 62, 63, 64, 66, 133, 198, 199]) {
            const after = all[at]!.letter
            assert.deepStrictEqual(yield* page({ after }), all.slice(at + 1))
            assert.deepStrictEqual(yield* page({ after, limit: 70 }), all.slice(at + 1, at + 71))
          }
          // A page goes on behind a letter that is not there any more.
          yield* queue.discard([all[9]!.letter])
          assert.deepStrictEqual(yield* page({ after: all[9]!.letter, limit: 2 }), all.slice(10, 12))
          for (const options of [{ limit: 0 }, { limit: 1.5 }, { after: "10" }, { after: "n1-1" }]) {
            isRangeError(yield* Effect.exit(page(options)))
          }
        }), { lease: "3 seconds", margin: "500 millis", partitions: shards }))
  }

  it.effect("are listed in the order in which they begin, also at the front of their level", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        yield* queue.offerAll(upTo(70), { lifo: true, priority: "high" })
        yield* queue.offerAll(upTo(3, 200))
        yield* queue.offerAll(upTo(2, 300), { delay: "1 hour" })
        yield* queue.offerAll(upTo(70, 100), { lifo: true })
        for (const { id } of yield* listed(queue, { state: "delayed" })) yield* queue.job(id).promote
        const jobs = yield* listed(queue, { state: "waiting" })
        const inOrder = [...upTo(70).toReversed(), ...upTo(70, 100).toReversed(), ...upTo(2, 300), ...upTo(3, 200)]
        assert.deepStrictEqual(payloads(jobs), inOrder)
        for (const [at, { cursor }] of jobs.entries()) {
          const some = yield* listed(queue, { state: "waiting", after: cursor, limit: 3 })
          assert.deepStrictEqual(payloads(some), inOrder.slice(at + 1, at + 4))
        }
      })))

  it.effect("are not listed by what makes no sense", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        for (const options of [{ limit: 0 }, { after: "x" }, { state: "done" as "active" }]) {
          isRangeError(yield* Effect.exit(Effect.suspend(() => listed(queue, { state: "waiting", ...options }))))
        }
        isRangeError(yield* Effect.exit(Effect.suspend(() => queue.clean(-1))))
        for (const state of ["waiting", "delayed", "active", "blocked"] as const) {
          assert.deepStrictEqual(yield* listed(queue, { state }), [])
          // Places count from 1 on.
          for (const after of ["0 1-1", "0 ^1-1", "00 1-1"]) {
            isRangeError(yield* Effect.exit(Effect.suspend(() => listed(queue, { state, after }))))
          }
          assert.deepStrictEqual(yield* listed(queue, { state, after: "99 1-1" }), [])
        }
      })))
})

layer(TestServer.layer, live)("a queue is emptied", (it) => {
  it.effect("of jobs that wait, and of delayed ones only if that is wanted", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        yield* queue.offerAll(upTo(700), (n) => n % 2 === 0 ? { delay: "1 hour", id: `${n}` } : { priority: "low" })
        assert.strictEqual(yield* queue.drain(), 350)
        yield* shows(queue, { waiting: 0, delayed: 350 })
        assert.strictEqual(yield* queue.drain({ delayed: true }), 350)
        yield* shows(queue, { waiting: 0, delayed: 0 })
        assert.isFalse((yield* queue.offer(2, { id: "2" })).duplicate)
      })))

  it.effect("of jobs that wait, and not of the job that is kept behind one of them", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const dedupe = { id: "x", mode: "keepLast" } as const
        // The second one is removed by a later call than the first one, and has a group.
        for (const [count, group] of [[0, undefined], [600, undefined], [0, "g"], [600, "g"]] as const) {
          const failing = yield* working(queue, () => Effect.fail("no"), { retry: Schedule.spaced("1 hour") })
          const first = yield* queue.offer(1, { dedupe })
          yield* shows(queue, { delayed: 1, active: 0, waiting: 0 })
          yield* failing.stop
          const kept = yield* queue.offer(2, { dedupe, group })
          assert.isTrue(yield* queue.job(first.id).promote)
          yield* queue.offerAll(upTo(count), { group })
          yield* shows(queue, { waiting: count + 1, delayed: 1 })
          assert.strictEqual(yield* queue.drain(), count + 1)
          assert.deepStrictEqual(yield* queue.job(kept.id).status, Option.some({ state: "waiting", attempts: 0 }))
          const worker = yield* working(queue)
          yield* begins(worker, [2])
          yield* shows(queue, { active: 0 })
          yield* worker.stop
        }
      })))

  it.effect("of dead letters that are old", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const running = yield* Effect.forkChild(queue.run(() => Effect.fail("no"), { attempts: 1, concurrency: 100 }))
        yield* queue.offerAll(upTo(600))
        yield* shows(queue, { dead: 600 })
        const letters = yield* Stream.runCollect(queue.deadLetters)
        const buried = Math.max(...letters.map(({ time }) => DateTime.toEpochMillis(time)))
        assert.strictEqual(yield* queue.clean("1 hour"), 0)
        yield* eventually(Effect.sync(() => assert.isAbove(Date.now(), buried + 1000)))
        yield* queue.offer(1)
        yield* shows(queue, { dead: 601 })
        assert.strictEqual(yield* queue.clean(Date.now() - buried - 500), 600)
        yield* shows(queue, { dead: 1 })
        yield* Fiber.interrupt(running)
      })))

  it.effect("of everything, and its members and workers go on", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ retention: "1 second" }))
        const other = yield* on(b!, make({ retention: "1 second" }))
        let interrupted = 0
        const running = yield* Effect.forkChild(
          queue.run((n) =>
            n === 1
              ? Effect.void
              : n === 2
              ? Effect.fail("no")
              : Effect.onInterrupt(Effect.never, () => Effect.sync(() => interrupted++)), {
            concurrency: 300,
            attempts: 1
          })
        )
        yield* other.offer(1, { id: "one", result: true })
        yield* other.offer(2)
        yield* shows(other, { completed: 1, dead: 1 })
        yield* other.offerAll(upTo(299, 100), (n) => n % 2 === 0 ? { delay: 1 } : {})
        const waiting = yield* Effect.forkChild(Effect.exit(other.execute(5)), { startImmediately: true })
        yield* shows(other, { active: 300 })
        yield* other.schedule("hourly", "1 hour", 1)
        yield* other.offerAll(upTo(400, 1000), (n) => n % 2 === 0 ? { delay: "1 hour", id: `${n}` } : {})
        assert.strictEqual(yield* other.obliterate, 700)
        yield* eventually(Effect.sync(() => assert.strictEqual(interrupted, 300)))
        const exit = yield* Fiber.join(waiting)
        assert.include(String(Exit.isFailure(exit) && exit.cause), "cancelled")
        yield* shows(other, { waiting: 0, delayed: 0, active: 0, dead: 0, completed: 0, failed: 0, workers: 1 })
        assert.deepStrictEqual(yield* Stream.runCollect(other.schedules), [])
        assert.deepStrictEqual((yield* other.history).map(({ completed, failed }) => completed + failed), [0])
        const unknown = yield* Effect.flip(other.job("one").result())
        assert.strictEqual(unknown.reason._tag, "OutcomeUnknown")
        assert.isFalse((yield* other.offer(1, { id: "one" })).duplicate)
        yield* shows(other, { completed: 1 })
        assert.isTrue((yield* other.offer(1, { id: "one" })).duplicate)
        yield* Fiber.interrupt(running)
        assert.strictEqual(yield* server.cli("EXISTS", `{${namespace}:00}:queue-schedules:jobs`), "0")
      })))
})

layer(TestServer.layer, live)("the history of a queue", (it) => {
  for (const shards of [1, 3]) {
    it.effect(`counts jobs, and how long they wait and run: ${shards} shards`, () =>
      several(2, ([a, b]) =>
        Effect.gen(function*() {
          const queue = yield* on(a!, make({ shards }))
          const other = yield* on(b!, make({ shards }))
          yield* queue.offerAll(upTo(10), (n) => ({ id: `${n}` }))
          const gate = yield* Deferred.make<void>()
          const running = yield* Effect.forkChild(
            queue.run((n) => n === 0 ? Effect.fail("no") : Deferred.await(gate), { concurrency: 10, attempts: 1 })
          )
          yield* shows(queue, { active: 9, dead: 1 })
          const began = Date.now()
          yield* eventually(Effect.sync(() => assert.isAbove(Date.now(), began + 300)))
          const sum = (minutes: ReadonlyArray<Queue.Minute>, of: (minute: Queue.Minute) => number) =>
            minutes.reduce((total, minute) => total + of(minute), 0)
          const before = yield* other.history
          assert.isAtLeast(sum(before, ({ ran }) => Duration.toMillis(ran)), 9 * 300)
          const ended = Date.now()
          yield* Deferred.succeed(gate, undefined)
          yield* shows(queue, { completed: 9 })
          const minutes = yield* other.history
          assert.strictEqual(sum(minutes, ({ completed }) => completed), 9)
          assert.strictEqual(sum(minutes, ({ failed }) => failed), 1)
          assert.strictEqual(sum(minutes, ({ begun }) => begun), 10)
          assert.isAtMost(sum(minutes, ({ ran }) => Duration.toMillis(ran)), 10 * (Date.now() - began + 500))
          assert.isAtMost(DateTime.toEpochMillis(minutes[0]!.time), ended)
          yield* Fiber.interrupt(running)
        }), { partitions: shards }))
  }

  it.effect("counts how long jobs have waited that were offered one by one", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ retention: "1 minute" }))
        const began = Date.now()
        yield* queue.offer(0)
        yield* queue.withJob(() => Effect.void)
        yield* queue.offer(1)
        yield* queue.offer(2)
        const two = Date.now()
        yield* awake("500 millis")
        const before = Date.now()
        yield* queue.offer(3)
        const after = Date.now()
        const rows = yield* queue.history
        const waited = rows.reduce((sum, row) => sum + Duration.toMillis(row.waited), 0)
        assert.isAtLeast(waited, 2 * (before - two) - 10)
        assert.isAtMost(waited, 2 * (after - began) + 3 * (Date.now() - before) + 10)
      })))

  it.effect("ends a minute with the first call of a later one", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        yield* queue.offerAll([1, 2])
        const key = `{${namespace}:00}:queue:jobs`
        // As if that had been three minutes ago.
        yield* server.cli(
          "EVAL",
          "local packed = redis.call('HGET', KEYS[1], 's') local at = 1 + 8 * tonumber(ARGV[1]) " +
            "local since = struct.unpack('<d', packed:sub(at + 1, at + 8)) " +
            "redis.call('HSET', KEYS[1], 's', packed:sub(1, at) .. struct.pack('<d', since - 180000) .. packed:sub(at + 9))",
          1,
          key,
          since
        )
        const expected = (minutes: ReadonlyArray<Queue.Minute>) => {
          assert.strictEqual(minutes.length, 4)
          const waited = minutes.map(({ waited }) => Duration.toMillis(waited))
          assert.deepStrictEqual(waited.slice(1, 3), [120_000, 120_000])
          assert.strictEqual(
            DateTime.toEpochMillis(minutes[3]!.time) - DateTime.toEpochMillis(minutes[0]!.time),
            180_000
          )
          const all = waited.reduce((total, one) => total + one, 0)
          assert.isTrue(all >= 360_000 && all < 380_000, String(all))
        }
        expected(yield* queue.history)
        yield* queue.offer(3)
        expected(yield* queue.history)
      })))

  it.effect("is of 60 minutes at most", () =>
    Effect.sync(() => {
      const row = (minute: number, n: number) => [minute, n, 0, 0, n, 0, 0, 0, 1]
      const busy = historyOf(upTo(62).map((n) => row(1000 + n, n * n)))
      assert.strictEqual(busy.length, 60)
      assert.deepStrictEqual(busy.map(({ completed }) => completed), upTo(60, 2).map((n) => 2 * n - 1))
      const quiet = historyOf([row(1000, 5), row(5000, 6)])
      assert.strictEqual(quiet.length, 60)
      assert.deepStrictEqual(quiet.map(({ completed }) => completed), [...upTo(59).map(() => 0), 1])
      assert.isTrue(quiet.slice(0, 59).every(({ ran }) => Duration.toMillis(ran) === 60_000))
      assert.deepStrictEqual(historyOf([row(7, 0)]).length, 1)
    }))

  it.effect("is beside gauges of what is there now", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        class Jobs extends Queue.Service<Jobs>()("jobs", { payload: Schema.Number }) {}
        const live = Queue.monitor(Jobs, { every: "20 millis" }).pipe(Layer.provideMerge(Jobs.layer))
        yield* on(
          a!,
          Effect.scoped(Effect.gen(function*() {
            const jobs = yield* Jobs
            yield* jobs.offerAll([1, 2])
            yield* jobs.offer(3, { delay: "1 hour" })
            yield* eventually(Effect.gen(function*() {
              const gauges = yield* Effect.forEach(
                ["waiting", "delayed", "active", "dead"] as const,
                (state) => Metric.value(Metrics.queueJobs("jobs", state))
              )
              assert.deepStrictEqual(gauges.map(({ value }) => value), [2, 1, 0, 0])
              const age = yield* Metric.value(Metrics.queueAge("jobs"))
              assert.isTrue(age.value > 0 && age.value < 10_000, String(age.value))
            }))
            yield* jobs.obliterate
          })).pipe(Effect.provide(live))
        )
      })))
})

// Where `since` stands in the record of a queue.
const since = 5
