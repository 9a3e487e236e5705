/** Groups of jobs: their order and limits hold over all processes, however the jobs end, and no group delays another. */
import { assert, layer } from "@effect/vitest"
import { Deferred, Effect, Option, Schedule, Stream } from "effect"
import { Queue } from "../src/index.ts"
import { eventually } from "./support/eventually.ts"
import { TestServer } from "./support/live.ts"
import { begins, hostile, isRangeError, make, shows, upTo, working } from "./support/queues.ts"
import { lose, on, promptly, several } from "./support/several.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

const isGone = (queue: Queue.Queue<number>) =>
  eventually(Effect.map(Stream.runCollect(queue.groups), (groups) => assert.deepStrictEqual(groups, [])))

layer(TestServer.layer, live)("a group of jobs", (it) => {
  it.effect("runs them one by one, in order, over all processes", () =>
    several(3, (nodes) =>
      Effect.gen(function*() {
        const queues = yield* Effect.forEach(nodes, (context) => on(context, make()))
        const running = new Map<string, number>()
        const begun = new Map<string, Array<number>>()
        const handler = (n: number) =>
          Effect.gen(function*() {
            const { group } = yield* Queue.Job
            assert.strictEqual(group, `tenant ${n % 5}`)
            assert.strictEqual(running.get(group!) ?? 0, 0)
            running.set(group!, 1)
            begun.set(group!, [...begun.get(group!) ?? [], n])
            yield* Effect.sleep(1)
            running.set(group!, 0)
          })
        const workers = yield* Effect.forEach(queues, (queue) => working(queue, handler, { concurrency: 10 }))
        yield* queues[0]!.offerAll(upTo(300), (n) => ({ group: `tenant ${n % 5}` }))
        yield* shows(queues[0]!, { completed: 300, waiting: 0, active: 0 })
        for (const [, values] of begun) assert.deepStrictEqual(values, values.toSorted((x, y) => x - y))
        yield* Effect.forEach(workers, ({ stop }) => stop)
        yield* isGone(queues[0]!)
      })))

  it.effect("has as many of them at a time as was said, and they begin in order", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const groups = { concurrency: 3 }
        const queue = yield* on(a!, make({ groups }))
        const other = yield* on(b!, make({ groups }))
        const gate = yield* Deferred.make<void>()
        const workers = yield* Effect.forEach([queue, other], (one) =>
          working(one, () => Deferred.await(gate), { concurrency: 10 }))
        yield* queue.offerAll(upTo(20), { group: hostile })
        yield* shows(queue, { active: 3, waiting: 17 })
        assert.deepStrictEqual(yield* queue.group(hostile).state, {
          name: hostile,
          waiting: 17,
          delayed: 0,
          active: 3,
          paused: false
        })
        yield* Deferred.succeed(gate, undefined)
        yield* shows(queue, { completed: 20 })
        yield* Effect.forEach(workers, ({ stop }) =>
          stop)
      })))

  it.effect("waits for the retry of its first job, and other groups do not", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const worker = yield* working(
          queue,
          (n) => Effect.flatMap(Queue.Job, ({ attempt }) => n === 0 && attempt < 3 ? Effect.fail("no") : Effect.void),
          { concurrency: 10, retry: Schedule.spaced("100 millis") }
        )
        yield* queue.offerAll([0, 1, 2], { group: "a" })
        yield* queue.offerAll([10, 11], { group: "b" })
        yield* queue.offer(3, { group: "a", priority: "urgent" })
        yield* shows(queue, { completed: 6 })
        const ofA = worker.begun.filter((n) => n < 10)
        assert.deepStrictEqual(ofA, [0, 0, 0, 3, 1, 2])
        assert.isBelow(worker.begun.indexOf(11), worker.begun.lastIndexOf(0))
        yield* worker.stop
        yield* isGone(queue)
      })))

  it.effect("waits for a job that snoozes, and for one that was returned or lost its worker", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const other = yield* on(b!, make())
        let snoozed = false
        const first = yield* working(queue, (n) =>
          Effect.flatMap(Queue.Job, (job): Effect.Effect<void> => {
            if (n !== 0) return Effect.never
            if (snoozed) return Effect.void
            snoozed = true
            return job.snooze("50 millis")
          }), { concurrency: 5 })
        yield* queue.offerAll([0, 1, 2], { group: "a" })
        yield* begins(first, [0, 0, 1])
        yield* first.stop
        const second = yield* working(queue, () => Effect.never, { concurrency: 5 })
        yield* begins(second, [1])
        yield* lose(a!, namespace, server)
        yield* eventually(Effect.sync(() => assert.deepStrictEqual(second.begun, [1, 1])))
        yield* second.stop
        const third = yield* working(other, () => Effect.void, { concurrency: 5 })
        yield* begins(third, [1, 2])
        yield* shows(other, { completed: 3 })
        yield* third.stop
      })))

  it.effect("does not delay another one by more than a round, however many jobs it has", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ groups: { concurrency: 100 } }))
        yield* queue.offerAll(upTo(3000), { group: "a" })
        yield* queue.offerAll(upTo(3000, 10_000), { group: "b" })
        const gate = yield* Deferred.make<void>()
        const worker = yield* working(queue, () => Deferred.await(gate))
        yield* begins(worker, [0])
        yield* queue.offer(20_000, { group: "c" })
        yield* queue.offer(30_000)
        yield* Deferred.succeed(gate, undefined)
        yield* eventually(Effect.sync(() => assert.isAbove(worker.begun.length, 10)))
        assert.isAtMost(worker.begun.indexOf(20_000), 6)
        assert.isAtMost(worker.begun.indexOf(30_000), 3)
        const [ofA, ofB] = [
          worker.begun.filter((n) => n < 10_000),
          worker.begun.filter((n) => n >= 10_000 && n < 20_000)
        ]
        assert.isAtMost(Math.abs(ofA.length - ofB.length), 1)
        yield* worker.stop
      })))

  it.effect("shares the turns of its level with jobs of no group, and lower levels have theirs", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        yield* queue.offerAll(upTo(40))
        yield* queue.offerAll(upTo(40, 100), (n) => ({ group: String(n) }))
        yield* queue.offerAll(upTo(10, 200), { group: "low", priority: "low" })
        yield* queue.offerAll(upTo(2, 300), { group: "high", priority: "high" })
        const { waitingBy } = yield* queue.state
        assert.deepStrictEqual(waitingBy, { urgent: 0, high: 2, normal: 80, low: 10 })
        const worker = yield* working(queue)
        yield* shows(queue, { completed: 92 })
        const { begun } = worker
        assert.isBelow(begun.indexOf(300), 2)
        const early = begun.slice(0, 40)
        const of = (from: number, to: number) => early.filter((n) => n >= from && n < to).length
        assert.isAtLeast(of(0, 100), 14)
        assert.isAtLeast(of(100, 200), 14)
        assert.isAtLeast(of(200, 300), 1)
        for (const from of [0, 100, 200, 300]) {
          const level = begun.filter((n) => n >= from && n < from + 100)
          assert.deepStrictEqual(level, upTo(level.length, from))
        }
        yield* worker.stop
      })))

  it.effect("begins one job of eight from its lower levels, the oldest first", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        yield* queue.offerAll(upTo(2, 100), { group: "a", priority: "low" })
        yield* queue.offerAll(upTo(1, 200), { group: "a" })
        yield* queue.offerAll(upTo(1, 102), { group: "a", priority: "low" })
        yield* queue.offerAll(upTo(24), { group: "a", priority: "urgent" })
        const worker = yield* working(queue)
        yield* shows(queue, { completed: 28 })
        assert.deepStrictEqual(worker.begun, [
          ...upTo(7),
          100,
          ...upTo(7, 7),
          101,
          ...upTo(7, 14),
          200,
          ...upTo(3, 21),
          102
        ])
        yield* worker.stop
      })))

  it.effect("keeps its rate over all processes", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const groups = { concurrency: 10, rate: { jobs: 3, interval: "300 millis" } } as const
        const queue = yield* on(a!, make({ groups }))
        const other = yield* on(b!, make({ groups }))
        // By Redis's clock, in microseconds.
        const begun = new Map<string, Array<number>>()
        const handler = () =>
          Effect.map(Queue.Job, ({ group, token }) => void begun.set(group!, [...begun.get(group!) ?? [], token]))
        const workers = yield* Effect.forEach([queue, other], (one) => working(one, handler, { concurrency: 10 }))
        yield* queue.offerAll(upTo(20), (n) => ({ group: n % 2 === 0 ? "even" : "odd" }))
        yield* shows(queue, { completed: 20 })
        for (const tokens of begun.values()) {
          const sorted = tokens.toSorted((x, y) => x - y)
          assert.strictEqual(sorted.length, 10)
          // Three at once, and then one every 100 ms.
          assert.isAtMost(sorted[2]! - sorted[0]!, 90_000)
          for (const [at, token] of sorted.entries()) {
            if (at >= 3) assert.isAtLeast(token - sorted[at - 3]!, 98_000)
          }
          assert.isAtLeast(sorted[9]! - sorted[0]!, 690_000)
        }
        yield* Effect.forEach(workers, ({ stop }) => stop)
      })))

  it.effect("is paused and resumed, on all processes, also while it has no jobs", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const other = yield* on(b!, make())
        const worker = yield* working(queue)
        yield* other.group("a").pause
        yield* other.offerAll([1, 2], { group: "a" })
        yield* other.offer(3, { group: "b" })
        yield* begins(worker, [3])
        yield* shows(queue, { waiting: 2, completed: 1 })
        assert.deepStrictEqual(yield* Stream.runCollect(queue.groups), [
          { name: "a", waiting: 2, delayed: 0, active: 0, paused: true }
        ])
        yield* queue.group("a").resume
        yield* begins(worker, [3, 1, 2])
        yield* worker.stop
        yield* isGone(queue)
      })))

  it.effect("has the same jobs that are cancelled, expire, are purged, or become dead letters", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        yield* queue.offer(0, { group: "a", id: "zero" })
        yield* queue.offer(1, { group: "a", expires: "1 millis" })
        yield* queue.offer(2, { group: "a", id: "two", result: true })
        yield* queue.offer(3, { group: "a", delay: "1 hour", id: "three" })
        yield* queue.offer(4, { group: "b" })
        assert.isTrue((yield* queue.offer(0, { group: "a", id: "zero" })).duplicate)
        assert.deepStrictEqual(yield* queue.job("three").status, Option.some({ state: "delayed", attempts: 0 }))
        assert.isTrue(yield* queue.job("zero").cancel)
        assert.strictEqual(yield* queue.group("b").purge, 1)
        const worker = yield* working(queue, () => Effect.fail("no"), { attempts: 1 })
        yield* begins(worker, [2])
        yield* shows(queue, { dead: 1, delayed: 1, expired: 1, waiting: 0 })
        const [letter] = yield* Stream.runCollect(queue.deadLetters)
        assert.strictEqual(letter!.group, "a")
        const failed = yield* Effect.flip(queue.job("two").result())
        assert.strictEqual((failed as Queue.QueueError).reason._tag, "JobFailed")
        yield* worker.stop
        assert.strictEqual(yield* queue.replay(), 1)
        assert.deepStrictEqual(yield* queue.group("a").state, {
          name: "a",
          waiting: 1,
          delayed: 1,
          active: 0,
          paused: false
        })
        assert.isTrue(yield* queue.job("three").promote)
        const again = yield* working(queue)
        // The delay of the third job was over first, and its place is that of its offer.
        yield* begins(again, [3, 2])
        yield* again.stop
        yield* isGone(queue)
      })))

  it.effect("is removed with thousands of jobs, and no other one", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        yield* queue.offerAll(upTo(1000), { group: "a" })
        yield* queue.offerAll(upTo(300), { group: "a", delay: "1 hour" })
        yield* queue.offerAll(upTo(300), (n) => ({ group: `aa ${n}` }))
        assert.strictEqual((yield* Stream.runCollect(queue.groups)).length, 301)
        assert.strictEqual(yield* queue.group("a").purge, 1300)
        yield* shows(queue, { waiting: 300, delayed: 0 })
        assert.strictEqual(yield* queue.drain({ delayed: true }), 300)
        yield* isGone(queue)
      })))

  it.effect("stays slow, also while the queue has no jobs and no process has it open", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const named = { name: "slow", retention: "1 hour" } as const
        const first = yield* Effect.scoped(Effect.gen(function*() {
          const queue = yield* on(a!, make(named))
          const worker = yield* working(queue, () => Effect.flatMap(Queue.Job, ({ slowDown }) => slowDown("1 hour")))
          yield* queue.offer(1, { group: "g" })
          yield* shows(queue, { completed: 1, active: 0 })
          yield* worker.stop
          return worker.begun
        }))
        assert.deepStrictEqual(first, [1])
        const queue = yield* on(a!, make(named))
        yield* queue.offerAll([2, 3], (n) => ({ group: n === 2 ? "g" : "other" }))
        const worker = yield* working(queue)
        yield* begins(worker, [3])
        yield* shows(queue, { waiting: 1, active: 0 })
        yield* queue.group("g").resume
        yield* begins(worker, [3, 2])
        yield* worker.stop
        yield* queue.obliterate
      })))

  it.effect("slows down when a handler says so, and so does a queue for a job of no group", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const other = yield* on(b!, make())
        const begun: Array<readonly [n: number, token: number]> = []
        const handler = (n: number) =>
          Effect.flatMap(Queue.Job, ({ slowDown, token }) => {
            begun.push([n, token])
            return n % 10 === 0 ? slowDown(n === 20 ? "1 minute" : "200 millis") : Effect.void
          })
        const worker = yield* working(other, handler, { concurrency: 5 })
        const since = (from: number, to: number) => {
          const tokenOf = (sought: number) => begun.find(([n]) => n === sought)![1]
          return tokenOf(to) - tokenOf(from)
        }
        yield* queue.offerAll([0, 1, 2], (n) => ({ group: n === 2 ? "b" : "a" }))
        yield* shows(queue, { completed: 3 })
        assert.isAtLeast(since(0, 1), 200_000)
        assert.isAtMost(since(0, 2), 190_000)
        yield* queue.offer(10)
        yield* eventually(Effect.sync(() => assert.isTrue(begun.some(([n]) => n === 10))))
        yield* shows(queue, { completed: 4 })
        yield* queue.offerAll([11, 12], (n) => n === 11 ? { group: "b" } : {})
        yield* shows(queue, { completed: 6 })
        assert.isAtLeast(since(10, 11), 200_000)
        assert.isAtLeast(since(10, 12), 200_000)
        // `resume` ends it.
        yield* queue.offerAll([20, 21], { group: "c" })
        yield* shows(queue, { completed: 7, waiting: 1 })
        yield* queue.group("c").resume
        yield* promptly(shows(queue, { completed: 8 }), "the next job")
        // A group that only waits has no jobs, and is not paused.
        yield* queue.offer(20, { group: "d" })
        yield* shows(queue, { completed: 9 })
        yield* isGone(queue)
        yield* queue.group("d").resume
        yield* worker.stop
      })))

  it.effect("counts for the length of its queue, and gives its jobs up for new ones", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ limits: { length: 4, onFull: "dropOldest" } }))
        yield* queue.offer(0, { group: "a", delay: "1 hour" })
        yield* queue.offerAll(upTo(6, 1), { group: "a" })
        yield* shows(queue, { waiting: 3, delayed: 1, dropped: 3 })
        yield* queue.offerAll(upTo(4, 10), { group: "b" })
        yield* shows(queue, { waiting: 3, delayed: 1, dropped: 7 })
        const worker = yield* working(queue)
        yield* begins(worker, upTo(3, 11))
        yield* worker.stop
        yield* queue.drain({ delayed: true })
        yield* isGone(queue)
      })))

  it.effect("is listed, drained and obliterated with the jobs of no group", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const listed = (options: Queue.JobsOptions) => Stream.runCollect(queue.jobs(options))
        yield* queue.offerAll(upTo(300), (n) => n % 10 === 0 ? {} : { group: `g${n % 3}` })
        yield* queue.offer(300, { group: "g0", delay: "1 hour" })
        const waiting = yield* listed({ state: "waiting" })
        assert.sameMembers(waiting.map(({ payload }) => Option.getOrThrow(payload)), upTo(300))
        assert.isTrue(waiting.every(({ group, payload }) => {
          const n = Option.getOrThrow(payload)
          return group === (n % 10 === 0 ? undefined : `g${n % 3}`)
        }))
        const first = yield* listed({ state: "waiting", limit: 100 })
        const rest = yield* listed({ state: "waiting", after: first.at(-1)!.cursor })
        assert.deepStrictEqual([...first, ...rest], waiting)
        const delayed = yield* listed({ state: "delayed" })
        assert.deepStrictEqual(delayed.map(({ group }) => group), ["g0"])
        assert.strictEqual(yield* queue.drain(), 300)
        yield* shows(queue, { waiting: 0, delayed: 1 })
        yield* queue.offerAll(upTo(300), (n) => ({ group: `g${n % 3}` }))
        const blocked = yield* working(queue, () => Effect.never, { concurrency: 8 })
        yield* shows(queue, { active: 3, waiting: 297 })
        assert.strictEqual(yield* queue.obliterate, 301)
        yield* shows(queue, { active: 0, waiting: 0, delayed: 0 })
        yield* blocked.stop
        const worker = yield* working(queue)
        yield* queue.offerAll(upTo(6), { group: "g1" })
        yield* begins(worker, upTo(6))
        yield* worker.stop
        yield* isGone(queue)
      })))

  it.effect("is in one shard of a queue that has several", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ shards: 4 }))
        const other = yield* on(b!, make())
        const begun = new Map<string, Array<number>>()
        const handler = (n: number) =>
          Effect.map(Queue.Job, ({ group }) => void begun.set(group!, [...begun.get(group!) ?? [], n]))
        const group = (n: number) => ({ group: `tenant ${n % 8}` })
        yield* queue.offerAll(upTo(100), group)
        for (const n of upTo(60, 100)) yield* other.offer(n, group(n))
        assert.strictEqual((yield* Stream.runCollect(other.groups)).length, 8)
        assert.strictEqual((yield* queue.group("tenant 3").state).waiting, 20)
        yield* other.group("tenant 3").pause
        const workers = yield* Effect.forEach([queue, other], (one) => working(one, handler, { concurrency: 5 }))
        yield* shows(queue, { completed: 140, waiting: 20 })
        yield* queue.group("tenant 3").resume
        yield* shows(queue, { completed: 160 })
        for (const [name, values] of begun) {
          assert.deepStrictEqual(values, upTo(160).filter((n) => group(n).group === name))
        }
        isRangeError(yield* Effect.exit(queue.offer(1, { group: "a", id: "b" })))
        yield* Effect.forEach(workers, ({ stop }) => stop)
        yield* isGone(queue)
      }), { lease: "3 seconds", margin: "500 millis", partitions: 4 }))

  it.effect("is refused with options and names that make no sense", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        isRangeError(yield* Effect.exit(queue.offer(1, { group: "" })))
        isRangeError(yield* Effect.exit(queue.offer(1, { group: "x".repeat(513) })))
        isRangeError(yield* Effect.exit(queue.offer(1, { group: "a", lifo: true })))
        isRangeError(yield* Effect.exit(Effect.suspend(() => queue.group("").state)))
        for (const groups of [{ concurrency: 0 }, { rate: { jobs: 0, interval: "1 second" } }] as const) {
          isRangeError(yield* Effect.exit(on(a!, make({ groups }))))
        }
        yield* shows(queue, { waiting: 0 })
      })))
})
