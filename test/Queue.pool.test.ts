/** Pools of workers: resized, idle, drained and shut down, and their handlers that do not end. */
import { assert, layer } from "@effect/vitest"
import { Deferred, Effect, Exit, Fiber, Logger, Metric, Option, Schema, Scope } from "effect"
import { Metrics, Queue } from "../src/index.ts"
import { behindLine } from "./support/behindLine.ts"
import { eventually, realSleep } from "./support/eventually.ts"
import { node, TestServer } from "./support/live.ts"
import { channelOf, isPending, lose, missed, on, pending, promptly, several } from "./support/several.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

const upTo = (count: number, from = 0) => Array.from({ length: count }, (_, at) => from + at)

const make = (options: Partial<Queue.Options<number>> = {}) =>
  Effect.tap(
    Queue.make({ name: "jobs", payload: Schema.Number, retention: "200 millis", ...options }),
    (queue) => Effect.addFinalizer(() => Effect.orDie(Effect.andThen(queue.drain({ delayed: true }), queue.discard())))
  )

const shows = <A, S, E>(queue: Queue.Queue<A, S, E>, expected: Partial<Queue.State>) =>
  eventually(Effect.map(queue.state, (state) => {
    const found = Object.fromEntries(Object.keys(expected).map((key) => [key, state[key as keyof Queue.State]]))
    assert.deepStrictEqual(found, expected)
  }))

/** A pool whose handlers end when the test says so: which jobs they have, and the most that ran at a time. */
const gated = (queue: Queue.Queue<number>, options?: Queue.PoolOptions) =>
  Effect.gen(function*() {
    const open = new Map<number, Deferred.Deferred<void>>()
    const attempts: Array<number> = []
    const seen = { most: 0 }
    const pool = yield* queue.pool((n) =>
      Effect.gen(function*() {
        const { attempt } = yield* Queue.Job
        attempts.push(attempt)
        const gate = yield* Deferred.make<void>()
        open.set(n, gate)
        seen.most = Math.max(seen.most, open.size)
        yield* Effect.ensuring(Deferred.await(gate), Effect.sync(() => open.delete(n)))
      }), options)
    const finish = (count: number) =>
      Effect.forEach([...open.values()].slice(0, count), (gate) => Deferred.succeed(gate, undefined))
    const runs = (...jobs: ReadonlyArray<number>) =>
      eventually(Effect.sync(() => assert.deepStrictEqual([...open.keys()], jobs)))
    return { pool, finish, runs, attempts, seen }
  })

layer(TestServer.layer, live)("a pool", (it) => {
  it.effect("never runs more jobs than its size, also if Redis has refused a smaller one", () =>
    several(1, ([a], _namespace, server) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const { pool, runs, seen } = yield* gated(queue, { concurrency: 8 })
        const denied = Effect.map(server.cli("ACL", "LOG"), (log) => assert.include(log, "fcall"))
        yield* server.cli("ACL", "LOG", "RESET")
        yield* server.cli("ACL", "SETUSER", "default", "-fcall").pipe(
          Effect.andThen(pool.resize(1)),
          Effect.andThen(eventually(denied)),
          Effect.ensuring(Effect.orDie(server.cli("ACL", "SETUSER", "default", "+fcall")))
        )
        yield* pool.resize(8)
        yield* queue.offerAll(upTo(20))
        yield* runs(0, 1, 2, 3, 4, 5, 6, 7)
        assert.strictEqual(seen.most, 8)
        yield* shows(queue, { waiting: 12, active: 8 })
      })))

  it.effect("runs more or fewer jobs at a time when it is resized, and interrupts none", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const { finish, pool, runs, seen } = yield* gated(queue, { concurrency: 3 })
        yield* queue.offerAll(upTo(12))
        yield* runs(0, 1, 2)
        yield* pool.resize(5)
        yield* runs(0, 1, 2, 3, 4)
        yield* pool.resize(2)
        assert.deepStrictEqual([yield* pool.size, yield* pool.running], [2, 5])
        yield* finish(2)
        yield* runs(2, 3, 4)
        yield* shows(queue, { completed: 2, active: 3, waiting: 7 })
        yield* finish(1)
        yield* shows(queue, { completed: 3, active: 2, waiting: 7 })
        yield* finish(1)
        yield* runs(4, 5)
        // Back before the actor has handed out anything else.
        yield* pool.resize(1)
        yield* pool.resize(4)
        yield* runs(4, 5, 6, 7)
        assert.strictEqual(seen.most, 5)
        for (const size of [0, 1.5, 1025, Number.NaN]) {
          const exit = yield* Effect.exit(pool.resize(size))
          assert.isTrue(Exit.isFailure(exit) && String(exit.cause).includes("RangeError: size must be"))
        }
      })))

  it.effect("keeps its size when its session is lost, with handlers that are slow to end", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const gate = yield* Deferred.make<void>()
        const again: Array<number> = []
        const pool = yield* queue.pool((n) =>
          Effect.flatMap(Queue.Job, ({ crashes }) => {
            if (crashes === 0) return Effect.onInterrupt(Effect.never, () => Deferred.await(gate))
            again.push(n)
            return Effect.never
          }), { concurrency: 4 })
        yield* queue.offerAll(upTo(4))
        yield* eventually(Effect.map(pool.running, (running) => assert.strictEqual(running, 4)))
        yield* pool.resize(2)
        yield* lose(a!, namespace, server)
        yield* shows(queue, { workers: 1, active: 0, waiting: 4 })
        // All of its slots are taken by handlers of the former session.
        assert.deepStrictEqual(again, [])
        yield* Deferred.succeed(gate, undefined)
        yield* shows(queue, { active: 2, waiting: 2 })
        yield* pool.resize(3)
        yield* shows(queue, { active: 3, waiting: 1 })
        assert.deepStrictEqual(again.toSorted(), [0, 1, 2])
      })))

  it.effect("never has more jobs than its size, however that changes", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const other = yield* on(b!, make())
        const seed = Math.floor(Math.random() * 2 ** 31)
        let state = seed
        const random = (below: number) => {
          state = (Math.imul(state, 1_103_515_245) + 12_345) & 0x7fffffff
          return Math.floor(state / 0x7fffffff * below) % below
        }
        yield* Effect.gen(function*() {
          const done = new Map<number, number>()
          let [running, allowed] = [0, 8]
          const pool = yield* queue.pool((n) =>
            Effect.gen(function*() {
              assert.isAtMost(++running, allowed)
              yield* Effect.ensuring(Effect.sleep(random(3)), Effect.sync(() => void running--))
              done.set(n, 1 + (done.get(n) ?? 0))
            }), { concurrency: 8 })
          const offering = yield* Effect.forkChild(other.offerAll(upTo(3000)))
          while ((yield* queue.state).completed < 3000) {
            const next = 1 + random(16)
            const before = yield* pool.size
            // Running handlers go on, and jobs that were handed out before begin.
            allowed = Math.max(allowed, before, next)
            yield* pool.resize(next)
            yield* Effect.sleep(random(20))
            yield* eventually(Effect.map(pool.running, (running) => assert.isAtMost(running, next)))
          }
          yield* Fiber.join(offering)
          assert.isTrue(upTo(3000).every((n) => done.get(n) === 1))
          yield* pool.resize(3)
          yield* eventually(Effect.map(pool.running, (running) => assert.strictEqual(running, 0)))
          // Exactly as much credit as it has slots. Redis receives that before the offers of the same process.
          allowed = 3
          yield* queue.offerAll(upTo(50))
          yield* shows(queue, { completed: 3050 })
        }).pipe(Effect.tapCause((cause) => Effect.logError(`seed ${seed}`, cause)))
      }), { lease: "30 seconds", margin: "1 second" }))

  it.effect("ends by itself when it had nothing to do for long", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const pool = yield* queue.pool(() => Effect.void, { idle: "1 second" })
        yield* realSleep(150)
        const offered = performance.now()
        yield* queue.offer(1)
        yield* pool.await
        assert.isAtLeast(performance.now() - offered, 999)
        yield* shows(queue, { workers: 0, completed: 1 })
        // A pool that has a job does not end, however long the job takes.
        const other = yield* gated(queue, { idle: "50 millis" })
        yield* queue.offer(2)
        yield* other.runs(2)
        const ending = yield* Effect.forkChild(other.pool.await)
        yield* realSleep(200)
        yield* pending(ending)
        yield* other.finish(1)
        yield* promptly(Fiber.join(ending), "its end")
        yield* shows(queue, { workers: 0, completed: 2 })
      })))

  it.effect("does not end for want of jobs while Redis is away", () =>
    behindLine(({ context, direct, line }) =>
      Effect.gen(function*() {
        const other = yield* on(yield* direct(), make())
        const queue = yield* on(context, make())
        const { finish, pool, runs } = yield* gated(queue, { idle: "1 second" })
        yield* line.refuse
        yield* line.closeAll
        yield* shows(other, { workers: 0 })
        yield* other.offer(1)
        yield* realSleep("1200 millis")
        yield* line.pass
        yield* runs(1)
        yield* finish(1)
        yield* promptly(pool.await, "its end")
        yield* shows(other, { completed: 1, workers: 0 })
      }), { lease: "500 millis", margin: "100 millis", requestTimeout: "150 millis" }))

  it.effect("is drained when no job waits, and leaves those that are delayed", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const other = yield* on(b!, make())
        const one = yield* gated(queue, { concurrency: 2 })
        yield* other.offerAll(upTo(5))
        yield* other.offer(9, { delay: "1 hour" })
        yield* one.runs(0, 1)
        const draining = yield* Effect.forkChild(one.pool.drain, { startImmediately: true })
        // The new job comes behind the jobs that were there.
        yield* other.offer(5)
        for (const count of [2, 2, 1]) {
          yield* eventually(Effect.map(one.pool.running, (running) => assert.isAtLeast(running, count)))
          yield* one.finish(count)
        }
        yield* one.runs(5)
        yield* shows(queue, { workers: 1, waiting: 0 })
        yield* pending(draining)
        yield* one.finish(1)
        yield* promptly(Fiber.join(draining), "the end of the pool")
        yield* one.pool.await
        yield* shows(queue, { workers: 0, completed: 6, delayed: 1, waiting: 0, active: 0 })
        // At once, and again.
        yield* one.pool.drain
        const idle = yield* gated(queue, { signals: ["SIGUSR2"] })
        assert.strictEqual(process.listenerCount("SIGUSR2"), 1)
        yield* promptly(idle.pool.drain, "the end of a pool that has nothing to do")
        // The process ends by its signals again.
        assert.strictEqual(process.listenerCount("SIGUSR2"), 0)
      })))

  it.effect("waits for jobs that a limit or a pause holds back, before it is drained", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ limits: { concurrency: 1 } }))
        const other = yield* on(b!, make({ limits: { concurrency: 1 } }))
        const theirs = yield* gated(other)
        yield* queue.offerAll([1, 2])
        yield* theirs.runs(1)
        const ours = yield* gated(queue)
        const draining = yield* Effect.forkChild(ours.pool.drain, { startImmediately: true })
        yield* shows(queue, { waiting: 1, active: 1, workers: 2 })
        yield* pending(draining)
        yield* theirs.finish(1)
        yield* ours.runs(2)
        yield* ours.finish(1)
        yield* promptly(Fiber.join(draining), "the end of the pool")
        // Another pool takes the job that this pool waits for: the actor tells it, long before the lease ends.
        yield* queue.pause
        yield* queue.offer(3)
        const next = yield* gated(queue)
        const waiting = yield* Effect.forkChild(next.pool.drain, { startImmediately: true })
        yield* shows(queue, { waiting: 1, workers: 2 })
        yield* pending(waiting)
        yield* queue.resume
        yield* theirs.runs(3)
        yield* promptly(Fiber.join(waiting), "the end of the other pool")
        yield* theirs.finish(1)
        yield* shows(queue, { completed: 3, workers: 1 })
      })))

  it.effect("has seen what was handed to it, before it is drained", () =>
    behindLine(({ context, direct, line }) =>
      Effect.gen(function*() {
        const other = yield* on(yield* direct(), make())
        const queue = yield* on(context, make())
        const one = yield* gated(queue)
        yield* other.offer(5)
        yield* one.runs(5)
        yield* one.finish(1)
        yield* shows(other, { completed: 1, active: 0 })
        const held = yield* line.hold(({ name }) => name === "XREAD")
        yield* other.offer(0)
        yield* promptly(held.request, "the next reading of the mailbox")
        yield* one.runs(0)
        yield* one.finish(1)
        yield* shows(other, { completed: 2 })
        yield* other.offer(1)
        yield* shows(other, { active: 1, waiting: 0 })
        const draining = yield* Effect.forkChild(one.pool.drain, { startImmediately: true })
        yield* realSleep(200)
        yield* pending(draining)
        yield* held.release()
        yield* one.runs(1)
        yield* one.finish(1)
        yield* promptly(Fiber.join(draining), "the end of the pool")
        yield* shows(other, { completed: 3, waiting: 0, workers: 0 })
      }), { lease: "6 seconds", margin: "1 second", requestTimeout: "1 second" }))

  it.effect("shuts down within the grace, which a second call ends, and no attempt is used up", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const other = yield* on(b!, make())
        const one = yield* gated(queue, { concurrency: 3, grace: "1 minute" })
        yield* other.offerAll(upTo(5))
        yield* one.runs(0, 1, 2)
        const first = yield* Effect.forkChild(one.pool.shutdown(), { startImmediately: true })
        yield* one.finish(1)
        yield* shows(other, { completed: 1, active: 2, waiting: 2 })
        yield* pending(first)
        // A caller that has enough of waiting does not stop it.
        yield* Fiber.interrupt(first)
        const again = yield* Effect.forkChild(one.pool.shutdown(), { startImmediately: true })
        yield* pending(again)
        yield* promptly(one.pool.shutdown({ grace: 0 }), "the end of the pool")
        yield* promptly(Fiber.join(again), "the end of the first call")
        yield* one.pool.await
        yield* shows(other, { workers: 0, active: 0, waiting: 4 })
        const next = yield* gated(other, { concurrency: 4 })
        yield* next.runs(1, 2, 3, 4)
        assert.deepStrictEqual(next.attempts, [1, 1, 1, 1])
        yield* next.finish(4)
        yield* shows(other, { completed: 5 })
      })))

  it.effect("returns jobs at once that were on their way when it began to shut down", () =>
    behindLine(({ context, direct, line }) =>
      Effect.gen(function*() {
        const other = yield* on(yield* direct(), make())
        const queue = yield* on(context, make())
        const one = yield* gated(queue, { concurrency: 2, grace: "1 minute" })
        yield* other.offer(5)
        yield* one.runs(5)
        yield* one.finish(1)
        yield* shows(other, { completed: 1, active: 0 })
        const held = yield* line.hold(({ name }) => name === "XREAD")
        yield* other.offer(1)
        yield* promptly(held.request, "the next reading of the mailbox")
        yield* one.runs(1)
        yield* other.offer(2)
        yield* Effect.forkChild(one.pool.shutdown(), { startImmediately: true })
        yield* shows(other, { active: 2 })
        yield* held.release()
        const next = yield* gated(other)
        yield* next.runs(2)
        assert.deepStrictEqual([one.attempts, next.attempts], [[1, 1], [1]])
        yield* one.finish(1)
        yield* next.finish(1)
        yield* promptly(one.pool.await, "the end of the pool")
        yield* shows(other, { completed: 3, active: 0, waiting: 0 })
      }), { lease: "30 seconds", margin: "1 second", requestTimeout: "1 second" }))

  it.effect("shuts down with its scope, and ends with an error when its coordinator is closed", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const scope = yield* Scope.make()
        const one = yield* Scope.provide(gated(queue, { grace: "1 minute" }), scope)
        yield* queue.offerAll([1, 2])
        yield* one.runs(1)
        const closing = yield* Effect.forkChild(Scope.close(scope, Exit.void), { startImmediately: true })
        yield* one.finish(1)
        yield* promptly(Fiber.join(closing), "the end of the pool")
        yield* one.pool.await
        yield* shows(queue, { workers: 0, completed: 1, waiting: 1 })
        const other = yield* Scope.make()
        const brief = yield* Scope.provide(node(server.url, { namespace, partitions: 1, lease: "3 seconds" }), other)
        const theirs = yield* on(brief, Queue.make({ name: "jobs", payload: Schema.Number }))
        const pool = yield* theirs.pool(() => Effect.never)
        yield* Effect.forkChild(Scope.close(other, Exit.void))
        const error = yield* promptly(Effect.flip(pool.await), "the end of the pool")
        assert.strictEqual(error.reason._tag, "CoordinatorClosed")
        yield* promptly(pool.shutdown(), "its end")
      })))

  it.effect("keeps a job until its handler has ended, also when events of it are lost while it shuts down", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const other = yield* on(b!, make())
        const [begun, stopped, closing] = [0, 0, 0].map(() => Deferred.makeUnsafe<void>())
        const seen: Array<string> = []
        const running = yield* Effect.forkChild(queue.run(() =>
          Effect.ensuring(
            Effect.andThen(Deferred.succeed(begun!, undefined), Effect.never),
            Effect.gen(function*() {
              yield* Deferred.succeed(stopped!, undefined)
              yield* Deferred.await(closing!)
              seen.push("ends")
            })
          )
        ))
        yield* queue.offer(1)
        yield* Deferred.await(begun!)
        yield* Effect.forkChild(other.run(() => Effect.sync(() => void seen.push("begins"))))
        yield* shows(other, { workers: 2 })
        const stopping = yield* Effect.forkChild(Fiber.interrupt(running))
        yield* Deferred.await(stopped!)
        missed(a!)
        yield* eventually(Effect.sync(() => assert.isTrue(channelOf(a!).outbox.isIdle)))
        yield* shows(other, { active: 1, waiting: 0 })
        assert.deepStrictEqual(seen, [])
        yield* Deferred.succeed(closing!, undefined)
        yield* Fiber.join(stopping)
        yield* eventually(Effect.sync(() => assert.deepStrictEqual(seen, ["ends", "begins"])))
      })))

  it.effect("reports a handler that ignores its interruption, and gives its slot to another job", () =>
    Effect.suspend(() => {
      const lines: Array<string> = []
      const logger = Logger.make(({ logLevel, message }) => void lines.push(`${logLevel} ${String(message)}`))
      return several(1, ([a]) =>
        Effect.gen(function*() {
          const queue = yield* on(a!, make())
          const gate = yield* Deferred.make<void>()
          const ended: Array<number> = []
          const stuck = (n: number) =>
            Effect.onExit(Effect.uninterruptible(Deferred.await(gate)), () => Effect.sync(() => ended.push(n)))
          const before = (yield* on(a!, Metric.value(Metrics.overruns))).count
          const pool = yield* queue.pool((n) => n < 3 ? stuck(n) : Effect.void, {
            timeout: "50 millis",
            overrun: "100 millis",
            attempts: 1
          })
          // One is over its timeout, one is cancelled.
          yield* queue.offer(1, { id: "one" })
          yield* queue.offer(2, { timeout: "1 hour", id: "two" })
          yield* eventually(
            Effect.map(
              queue.job("two").status,
              (status) => assert.strictEqual(Option.getOrThrow(status).state, "active")
            )
          )
          yield* shows(queue, { dead: 1 })
          yield* queue.job("two").cancel
          yield* queue.offerAll([3, 4])
          yield* shows(queue, { completed: 2, active: 0, workers: 1 })
          assert.deepStrictEqual(ended, [])
          assert.strictEqual(yield* pool.running, 0)
          const count = (yield* on(a!, Metric.value(Metrics.overruns))).count - before
          assert.strictEqual(count, 2)
          // A pool ends beside a handler that does not.
          yield* queue.offer(0, { timeout: "1 hour" })
          yield* shows(queue, { active: 1 })
          yield* promptly(pool.shutdown(), "the end of the pool")
          yield* shows(queue, { active: 0, waiting: 1, workers: 0 })
          yield* Deferred.succeed(gate, undefined)
          yield* eventually(Effect.sync(() => assert.deepStrictEqual(ended.toSorted(), [0, 1, 2])))
          yield* shows(queue, { completed: 2, dead: 1, waiting: 1 })
          const found = lines.filter((line) => line.includes("after its interruption"))
          assert.strictEqual(found.length, 3, lines.join("\n"))
          assert.match(
            found[0]!,
            /^Warn the handler of job one of queue "jobs" of namespace "\w+" goes on 100 ms after/
          )
          assert.isFalse(isPending(yield* Effect.forkChild(pool.await, { startImmediately: true })))
        })).pipe(Effect.provide(Logger.layer([logger])))
    }))
})
