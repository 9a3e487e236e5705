/** A queue with deques: where jobs go, which worker steals them, and that they are jobs as any other. */
import { assert, layer } from "@effect/vitest"
import { Deferred, Duration, Effect, Exit, Fiber, Layer, Option, Schedule, Schema, Scope, Stream } from "effect"
import { Queue, WorkStealing } from "../src/index.ts"
import { behindLine } from "./support/behindLine.ts"
import { eventually } from "./support/eventually.ts"
import { onNode, TestServer } from "./support/live.ts"
import { begins, emptied, hostile, isRangeError, shows, upTo, working } from "./support/queues.ts"
import { asks } from "./support/requests.ts"
import { lose, on, promptly, several } from "./support/several.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

type Options = Partial<WorkStealing.Options<number, number> & { readonly name: string }>

const opened = (options: Options = {}) =>
  WorkStealing.make({
    name: hostile,
    payload: Schema.Number,
    success: Schema.Number,
    retention: "200 millis",
    ...options
  })

const make = (options?: Options) => Effect.tap(opened(options), emptied)

const joined = (queue: Queue.Queue<number, number>, workers: number) => shows(queue, { workers })

/** A worker whose first job waits for a gate. */
const busy = (queue: WorkStealing.WorkStealing<number, number>, workers = 1) =>
  Effect.gen(function*() {
    const gate = yield* Deferred.make<void>()
    let first = true
    const worker = yield* working(queue, (n) => {
      if (!first) return Effect.succeed(n)
      first = false
      return Effect.as(Deferred.await(gate), n)
    })
    yield* joined(queue, workers)
    yield* queue.offer(-1)
    yield* begins(worker, [-1])
    return { ...worker, open: Deferred.succeed(gate, undefined) }
  })

const countsOf = (queue: WorkStealing.WorkStealing<number, number>) =>
  Effect.map(queue.workers, (workers) =>
    Object.fromEntries(
      workers.map(({ active, lost, name, own, shared, stolen, waiting }) =>
        [name, { waiting, active, own, stolen, shared, lost }] as const
      )
    ))

layer(TestServer.layer, live)("a queue with deques", (it) => {
  it.effect("has a worker run its own jobs, the newest first", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ worker: "a" }))
        const producer = yield* on(b!, make())
        const worker = yield* busy(queue)
        yield* queue.offerAll(upTo(4))
        yield* producer.offer(10)
        assert.deepStrictEqual(yield* countsOf(producer), {
          a: { waiting: 4, active: 1, own: 1, stolen: 0, shared: 0, lost: 0 }
        })
        yield* shows(producer, { waiting: 5, active: 1 })
        yield* worker.open
        // The fourth one is the oldest of its deque. What is in no deque comes last, or is one of eight.
        yield* begins(worker, [-1, 3, 2, 0, 1, 10])
        yield* shows(queue, { completed: 6 })
        assert.deepStrictEqual(yield* countsOf(producer), {
          a: { waiting: 0, active: 0, own: 5, stolen: 0, shared: 1, lost: 0 }
        })
        yield* worker.stop
        yield* joined(queue, 0)
        assert.deepStrictEqual(yield* queue.workers, [])
      })))

  it.effect("has an idle worker steal half of the oldest jobs of the longest deque", () =>
    several(3, ([a, b, c]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ worker: "a" }))
        const other = yield* on(b!, make({ worker: "b" }))
        const thief = yield* on(c!, make({ worker: "c" }))
        const workers = [yield* busy(queue), yield* busy(other, 2)]
        yield* queue.offerAll(upTo(10))
        yield* other.offerAll(upTo(4, 100))
        const stealing = yield* Deferred.make<void>()
        const stolen = yield* working(thief, (n) => Effect.as(Deferred.await(stealing), n))
        yield* begins(stolen, [4])
        assert.deepStrictEqual(yield* countsOf(queue), {
          a: { waiting: 5, active: 1, own: 1, stolen: 0, shared: 0, lost: 5 },
          b: { waiting: 4, active: 1, own: 1, stolen: 0, shared: 0, lost: 0 },
          c: { waiting: 4, active: 1, own: 0, stolen: 1, shared: 0, lost: 0 }
        })
        yield* Deferred.succeed(stealing, undefined)
        yield* shows(queue, { completed: 14, active: 2, waiting: 0 })
        yield* Effect.forEach(workers, ({ open }) => open)
        yield* shows(queue, { completed: 16, active: 0 })
        yield* Effect.forEach([...workers, stolen], ({ stop }) => stop)
      })))

  it.effect("leaves a worker as many jobs as it keeps, and no more are stolen at a time than it allows", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ worker: "a", steal: { keep: 3, most: 2 } }))
        const thief = yield* on(b!, make({ worker: "b" }))
        const worker = yield* busy(queue)
        yield* queue.offerAll(upTo(10))
        const stealing = yield* working(thief, Effect.succeed)
        yield* shows(queue, { completed: 7, waiting: 3 })
        assert.deepStrictEqual(stealing.begun, [1, 0, 3, 2, 5, 4, 6])
        yield* worker.stop
        // Its worker has left.
        yield* shows(queue, { completed: 11, waiting: 0 })
        yield* stealing.stop
      })))

  it.effect("sends jobs to the worker that is named, or that a key belongs to", () =>
    several(3, ([a, b, c]) =>
      Effect.gen(function*() {
        const queues = yield* Effect.forEach([a, b], (node, at) => on(node!, make({ worker: `w${at}` })))
        const producer = yield* on(c!, make())
        const workers = [yield* busy(queues[0]!), yield* busy(queues[1]!, 2)]
        yield* producer.offerAll([1, 2], { to: "w0" })
        yield* producer.offerAll([3, 4, 5], { to: "w1" })
        assert.deepStrictEqual((yield* producer.workers).map(({ waiting }) => waiting), [2, 3])
        yield* producer.offerAll(upTo(60, 10), (n) => ({ key: `key ${n % 30}` }))
        const sizes = (yield* producer.workers).map(({ waiting }) => waiting)
        assert.strictEqual(sizes[0]! + sizes[1]!, 65)
        assert.isTrue(sizes.every((size) => size > 10), String(sizes))
        // Two of each key.
        assert.strictEqual(sizes[0]! % 2, 0)
        // A worker that is not there: any.
        yield* producer.offer(99, { to: "w9" })
        yield* shows(producer, { waiting: 66 })
        yield* Effect.forEach(workers, ({ open }) => open)
        yield* shows(producer, { completed: 68 })
        yield* Effect.forEach(workers, ({ stop }) => stop)
      })))

  it.effect("pushes the next job of any worker to one that waits", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ worker: "a" }))
        const thief = yield* on(b!, make({ worker: "b" }))
        const worker = yield* busy(queue)
        const stealing = yield* working(thief, Effect.succeed)
        yield* joined(queue, 2)
        for (const n of upTo(5)) {
          yield* queue.offer(n)
          yield* promptly(begins(stealing, upTo(n + 1)), "a stolen job")
        }
        yield* worker.open
        yield* worker.stop
        yield* stealing.stop
      })))

  it.effect("keeps the deque of a process between two jobs that it takes", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ worker: "a" }))
        const other = yield* on(b!, make({ worker: "b", steal: { keep: 10 } }))
        const none = yield* Effect.scoped(queue.take({ wait: "1 millis" }))
        assert.isTrue(Option.isNone(none))
        yield* Effect.scoped(other.take({ wait: "1 millis" }))
        yield* queue.offerAll(upTo(3))
        yield* other.offerAll(upTo(3, 10))
        yield* shows(queue, { waiting: 6 })
        const taken: Array<number> = []
        const takes = (from: typeof queue) =>
          Effect.scoped(
            Effect.map(from.take({ wait: "1 second" }), (found) => taken.push(Option.getOrThrow(found).payload))
          )
        yield* takes(queue)
        yield* takes(other)
        yield* takes(queue)
        yield* takes(queue)
        // It keeps the rest of its jobs.
        assert.isTrue(Option.isNone(yield* Effect.scoped(queue.take({ wait: "20 millis" }))))
        yield* takes(other)
        yield* takes(other)
        assert.deepStrictEqual(taken, [2, 12, 1, 0, 11, 10])
        yield* shows(queue, { completed: 6, waiting: 0 })
      })))

  it.effect("retries, buries, cancels, changes and follows up jobs of deques as any other", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ worker: "a" }))
        const other = yield* on(b!, make({ worker: "b" }))
        const gate = yield* Deferred.make<void>()
        const begun: Array<readonly [n: number, attempt: number]> = []
        const worker = yield* working(queue, (n) =>
          Effect.gen(function*() {
            const { attempt, id, log, progress } = yield* Queue.Job
            begun.push([n, attempt])
            if (n === 0) yield* Deferred.await(gate)
            if (n === 1 && attempt === 1) return yield* Effect.fail("no")
            if (n === 2) return yield* Effect.fail("never")
            if (n === 5) yield* queue.followUp(50, { id: "follower" })
            yield* progress(n)
            yield* log(id)
            return n * 2
          }), { attempts: 2, retry: Schedule.spaced("1 millis") })
        yield* joined(queue, 1)
        yield* queue.offer(0)
        yield* begins(worker, [0])
        const ids = yield* queue.offerAll(upTo(6, 1))
        const result = yield* Effect.forkChild(queue.execute(7))
        yield* shows(queue, { waiting: 7 })
        assert.deepStrictEqual(yield* other.job(ids[0]!.id).status, Option.some({ state: "waiting", attempts: 0 }))
        const listed = yield* Stream.runCollect(other.jobs({ state: "waiting" }))
        assert.deepStrictEqual(listed.map(({ payload }) => Option.getOrThrow(payload)), [1, 2, 3, 4, 5, 6, 7])
        assert.isTrue(yield* other.job(ids[2]!.id).cancel)
        assert.isFalse(yield* other.job(ids[2]!.id).cancel)
        assert.isTrue(yield* other.job(ids[3]!.id).update(40))
        assert.isTrue(yield* other.job(ids[5]!.id).reschedule({ delay: "1 hour" }))
        assert.deepStrictEqual(yield* other.job(ids[5]!.id).status, Option.some({ state: "delayed", attempts: 0 }))
        yield* Deferred.succeed(gate, undefined)
        yield* shows(queue, { completed: 6, dead: 1, delayed: 1, waiting: 0, active: 0 })
        assert.strictEqual(yield* Fiber.join(result), 14)
        assert.isTrue(yield* other.job(ids[5]!.id).promote)
        yield* shows(queue, { completed: 7 })
        assert.sameDeepMembers(begun, [[0, 1], [7, 1], [5, 1], [50, 1], [40, 1], [2, 1], [2, 2], [1, 1], [1, 2], [
          6,
          1
        ]])
        const [letter] = yield* Stream.runCollect(other.deadLetters)
        assert.strictEqual(letter!.attempts, 2)
        yield* queue.discard()
        yield* worker.stop
      })))

  it.effect("has any worker run a job after a cancelled one, whose worker has it until its handler has ended", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ worker: "a", steal: { keep: 1000 } }))
        const other = yield* on(b!, make({ worker: "b" }))
        const gate = yield* Deferred.make<void>()
        const worker = yield* working(
          queue,
          (n) => n === 0 ? Effect.as(Effect.uninterruptible(Deferred.await(gate)), n) : Effect.succeed(n)
        )
        yield* joined(queue, 1)
        const { id } = yield* queue.offer(0)
        yield* begins(worker, [0])
        yield* queue.offer(1, { after: [id], onFailure: "continue" })
        yield* queue.offer(2)
        const thief = yield* working(other, Effect.succeed)
        yield* joined(queue, 2)
        yield* shows(queue, { waiting: 1, blocked: 1, active: 1 })
        assert.isTrue(yield* other.job(id).cancel)
        yield* begins(thief, [1])
        yield* shows(queue, { waiting: 1, blocked: 0, active: 1, completed: 1 })
        assert.deepInclude(yield* countsOf(other), {
          a: { waiting: 1, active: 1, own: 1, stolen: 0, shared: 0, lost: 0 }
        })
        yield* Deferred.succeed(gate, undefined)
        yield* begins(worker, [0, 2])
        yield* shows(queue, { waiting: 0, active: 0, completed: 2 })
        yield* thief.stop
        yield* worker.stop
      })))

  it.effect("gives the jobs of a worker that leaves, or whose session is lost, to others", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ worker: "a", steal: { keep: 1000 } }))
        const other = yield* on(b!, make({ worker: "b" }))
        for (const ends of ["leaves", "loses"] as const) {
          const { completed } = yield* queue.state
          const worker = yield* busy(queue)
          yield* queue.offerAll(upTo(600))
          const heir = yield* working(other, Effect.succeed, { concurrency: 5 })
          yield* joined(queue, 2)
          assert.isEmpty(heir.begun)
          if (ends === "leaves") yield* worker.stop
          else yield* lose(a!, namespace, server)
          yield* shows(other, { completed: completed + 601, waiting: 0, active: 0 })
          yield* heir.stop
          yield* worker.stop
          yield* joined(other, 0)
        }
      })))

  it.effect("delays a job that was rescheduled in the deque of a worker that has left", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const other = yield* on(b!, make({ worker: "b" }))
        const theirs = yield* busy(other)
        const scope = yield* Scope.make()
        const queue = yield* on(a!, Scope.provide(opened({ worker: "a" }), scope))
        const own = yield* busy(queue, 2)
        const ids = (yield* queue.offerAll(upTo(3))).map(({ id }) => id)
        const job = other.job(ids[2]!)
        assert.isTrue(yield* job.reschedule({ delay: "1 hour" }))
        yield* own.stop
        yield* Scope.close(scope, Exit.void)
        yield* theirs.open
        yield* begins(theirs, [-1, -1, 0, 1])
        assert.strictEqual(Option.getOrThrow(yield* job.status).state, "delayed")
        assert.isTrue(yield* job.promote)
        yield* begins(theirs, [-1, -1, 0, 1, 2])
        yield* theirs.stop
      })))

  it.effect("is a service that layers of queues take", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        class Numbers extends WorkStealing.Service<Numbers>()("numbers", {
          payload: Schema.Number,
          success: Schema.Number,
          retention: "200 millis",
          worker: "w"
        }) {}
        const program = Effect.gen(function*() {
          const numbers = yield* Numbers
          assert.strictEqual(numbers.worker, "w")
          yield* joined(numbers, 1)
          assert.strictEqual(yield* numbers.execute(2), 4)
          const [{ idle, name, own }] = (yield* numbers.workers) as [WorkStealing.WorkerState]
          assert.deepStrictEqual([name, own], ["w", 1])
          assert.isTrue(Duration.toMillis(idle) >= 0)
        })
        const worker = Queue.worker(Numbers, (n) => Effect.succeed(2 * n))
        yield* program.pipe(Effect.provide(Layer.provideMerge(worker, Numbers.layer)), onNode(a!))
      })))

  it.effect("keeps its deque when the first of two takes is interrupted while it joins", () =>
    behindLine(({ context, line }) =>
      Effect.gen(function*() {
        const queue = yield* on(context, make({ worker: "a" }))
        const joining = yield* line.hold(asks("queue.employ"))
        const [first, second] = yield* Effect.all(
          [1, 2].map(() =>
            Effect.forkChild(Effect.scoped(queue.take({ wait: "5 seconds" })), { startImmediately: true })
          )
        )
        yield* joining.request
        yield* Fiber.interrupt(first!)
        yield* joining.release()
        yield* joined(queue, 1)
        yield* queue.offer(1)
        assert.isTrue(Option.isSome(yield* Fiber.join(second!)))
        assert.deepStrictEqual(Object.keys(yield* countsOf(queue)), ["a"])
      })
    ))

  it.effect("takes turns where all workers together have one slot", () =>
    several(3, (nodes) =>
      Effect.gen(function*() {
        const limits = { concurrency: 1 }
        const queues = yield* Effect.forEach(
          nodes,
          (context, at) => on(context, make({ worker: "abc"[at]!, steal: { keep: 1000 }, limits }))
        )
        const [first] = queues
        yield* first!.pause
        const order: Array<string> = []
        const workers = yield* Effect.forEach(queues, (queue) =>
          working(queue, (n) =>
            Effect.gen(function*() {
              order.push(queue.worker)
              // This one always has more of them.
              if (queue === first && n < 1000) yield* queue.offer(n + 1)
              return n
            })))
        yield* shows(first!, { workers: 3 })
        yield* first!.offerAll([0, 0, 0])
        for (const queue of queues.slice(1)) yield* queue.offerAll(upTo(100, 2000))
        yield* first!.resume
        yield* eventually(Effect.sync(() => assert.isAtLeast(order.filter((worker) => worker !== "a").length, 200)))
        const others = order.slice(0, order.lastIndexOf("b") + 1)
        const share = others.filter((worker) => worker === "a").length / others.length
        assert.isTrue(share > 0.2 && share < 0.5, String(share))
        for (const worker of workers) yield* worker.stop
        yield* first!.obliterate
      })))

  it.effect("bounds what waits in deques", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ worker: "a", limits: { length: 3, onFull: "dropOldest" } }))
        const worker = yield* busy(queue)
        yield* queue.offerAll(upTo(5))
        yield* shows(queue, { waiting: 3, dropped: 2 })
        yield* worker.open
        yield* begins(worker, [-1, 4, 3, 2])
        yield* worker.stop
      })))

  it.effect("refuses what has no meaning", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        for (
          const options of [
            { priority: "high" },
            { lifo: true },
            { group: "g" },
            { to: "a b" },
            { to: "" },
            { key: "" },
            { to: "a", key: "b" },
            { to: "a", delay: "1 second" },
            { key: "a", at: 0 },
            { to: "a", after: ["x"] },
            { key: "a", after: ["x"] },
            { to: "a", dedupe: { id: "d", mode: "debounce", window: "1 second" } }
          ] as ReadonlyArray<Queue.OfferOptions>
        ) {
          isRangeError(yield* Effect.exit(queue.offer(1, options)))
        }
        for (
          const options of [
            { worker: "" },
            { worker: "a\tb" },
            { steal: { keep: -1 } },
            { steal: { keep: 0.5 } },
            { steal: { most: 0 } },
            { steal: { most: 257 } }
          ]
        ) {
          isRangeError(yield* Effect.exit(on(a!, make(options))))
        }
      })))
})
