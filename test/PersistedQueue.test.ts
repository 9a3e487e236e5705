/** `PersistedQueue` of `effect` on our queues: its own promises, and what ours add to them. */
import { assert, layer } from "@effect/vitest"
import { Context, Deferred, Duration, Effect, Fiber, Layer, Logger, Schedule, Schema, Stream } from "effect"
import { PersistedQueue } from "effect/persistence"
import { layerStore, type Options } from "../src/effect/PersistedQueue.ts"
import { Queue } from "../src/index.ts"
import { spawn } from "../src/testing/Process.ts"
import { make as proxy } from "../src/testing/Proxy.ts"
import type { Argument, Event } from "./programs/taker.ts"
import { elapsed } from "./support/awake.ts"
import { eventually, realSleep } from "./support/eventually.ts"
import { freshNamespace, type Node, node, TestServer } from "./support/live.ts"
import { channelOf, lose, missed, on, pending, promptly, several } from "./support/several.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

const upTo = (count: number) => Array.from({ length: count }, (_, at) => at)

type Factory = Context.Context<PersistedQueue.PersistedQueueFactory | PersistedQueue.PersistedQueueStore>

const built = (context: Node, options?: Options) =>
  Effect.map(
    on(context, Layer.build(Layer.fresh(PersistedQueue.layer.pipe(Layer.provideMerge(layerStore(options)))))),
    (made): Factory => made
  )

const make = (
  context: Node,
  options: { readonly maxAttempts?: number; readonly retrySchedule?: Schedule.Schedule<unknown, number> } = {},
  store: Options = { retention: "200 millis" }
) =>
  Effect.gen(function*() {
    const factory = yield* built(context, store)
    const queue = yield* Effect.provideContext(
      PersistedQueue.make({ name: "shared", schema: Schema.Number, retrySchedule: Schedule.spaced(0), ...options }),
      factory
    )
    // The queue below it, for looking.
    const below = yield* on(context, Queue.make({ name: "shared", payload: Schema.Unknown }))
    yield* Effect.addFinalizer(() => Effect.orDie(Effect.andThen(below.drain({ delayed: true }), below.discard())))
    const shows = (expected: Partial<Queue.State>) =>
      eventually(Effect.map(below.state, (state) => {
        for (const [key, value] of Object.entries(expected)) assert.strictEqual(state[key as "active"], value, key)
      }))
    const { cleanup } = Context.get(factory, PersistedQueue.PersistedQueueStore)
    return { queue, below, shows, cleanup }
  })

const attempts = (_: number, metadata: { readonly attempts: number }) => Effect.succeed(metadata.attempts)

layer(TestServer.layer, live)("a persisted queue", (it) => {
  it.effect("hands each element to one taker, in their order, and receives the outcome", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const one = yield* make(a!)
        const two = yield* make(b!)
        const id = yield* two.queue.offer(1)
        const metadata = yield* one.queue.take((value, metadata) => Effect.succeed({ value, ...metadata }))
        assert.deepStrictEqual(metadata, { value: 1, id, attempts: 1 })
        yield* one.shows({ completed: 1, active: 0 })
        // A push, when there is none yet.
        const waiting = yield* Effect.forkChild(one.queue.take(Effect.succeed))
        yield* one.shows({ workers: 1 })
        yield* two.queue.offer(2)
        assert.strictEqual(yield* promptly(Fiber.join(waiting), "the push"), 2)
        // Many, by many takers of two processes.
        const seen: Array<number> = []
        const takers = yield* Effect.forEach(
          upTo(8),
          (at) =>
            Effect.forkChild(
              Effect.forever((at % 2 === 0 ? one : two).queue.take((value) => Effect.sync(() => void seen.push(value))))
            )
        )
        yield* Effect.forEach(upTo(1000), (value) => two.queue.offer(value), { concurrency: 100 })
        yield* one.shows({ completed: 1002, active: 0, waiting: 0 })
        assert.deepStrictEqual(seen.toSorted((x, y) => x - y), upTo(1000))
        yield* Fiber.interruptAll(takers)
        // The takers that have ended have no credit any more.
        yield* one.queue.offer(3)
        yield* one.shows({ waiting: 1, active: 0 })
      })))

  it.effect("retries what has failed, as often as it may, and after the delay of its schedule", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const { below, queue, shows } = yield* make(a!, { maxAttempts: 3 })
        yield* queue.offer(1, { id: "one" })
        for (const attempt of [1, 2, 3]) {
          const error = yield* Effect.flip(queue.take((_, { attempts }) => Effect.fail(["boom", attempts] as const)))
          assert.deepStrictEqual(error, ["boom", attempt])
        }
        yield* shows({ dead: 1, waiting: 0, delayed: 0 })
        const [letter] = yield* Stream.runCollect(below.deadLetters)
        assert.deepStrictEqual([letter!.id, letter!.reason, letter!.attempts], ["one", "failed", 3])
        assert.include(letter!.error, "boom")
        const slow = yield* make(a!, { retrySchedule: Schedule.spaced("400 millis") })
        yield* slow.queue.offer(2)
        const takenAt = performance.now()
        yield* Effect.flip(slow.queue.take(() => Effect.fail("boom")))
        yield* shows({ delayed: 1 })
        assert.strictEqual(yield* slow.queue.take(attempts), 2)
        assert.isAtLeast(performance.now() - takenAt, 395)
      })))

  it.effect("knows what the last taker has done when the store is closed right behind it", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const { below, queue, shows } = yield* make(a!)
        for (const [at, fails] of [false, true].entries()) {
          yield* queue.offer(at)
          yield* Effect.scoped(Effect.gen(function*() {
            const factory = yield* built(a!, { retention: "200 millis" })
            const last = yield* Effect.provideContext(
              PersistedQueue.make({
                name: "shared",
                schema: Schema.Number,
                retrySchedule: Schedule.spaced("1 minute")
              }),
              factory
            )
            yield* Effect.exit(last.take(() => fails ? Effect.fail("boom") : Effect.void))
          }))
          yield* shows(fails ? { delayed: 1, waiting: 0 } : { completed: 1, waiting: 0, active: 0 })
        }
        const [job] = yield* Stream.runCollect(below.jobs({ state: "delayed" }))
        assert.strictEqual(job?.attempts, 1)
      })))

  it.effect("gets an element back from a taker that is interrupted, which is no attempt", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const { queue, shows } = yield* make(a!)
        const taken = yield* Deferred.make<void>()
        const first = yield* Effect.forkChild(
          queue.take(() => Effect.andThen(Deferred.succeed(taken, undefined), Effect.never))
        )
        yield* queue.offer(1)
        yield* Deferred.await(taken)
        const second = yield* Effect.forkChild(queue.take(attempts))
        const gone = yield* Effect.forkChild(queue.take(attempts))
        yield* realSleep(50)
        yield* pending(second)
        yield* Fiber.interrupt(gone)
        yield* Fiber.interrupt(first)
        assert.strictEqual(yield* promptly(Fiber.join(second), "the element"), 1)
        yield* shows({ completed: 1, waiting: 0, active: 0 })
        // In whichever moment.
        yield* Effect.forEach(upTo(60), (at) =>
          Effect.gen(function*() {
            const taking = yield* Effect.forkChild(queue.take(Effect.succeed))
            yield* Effect.forkChild(queue.offer(at), { startImmediately: true })
            yield* realSleep(at % 6)
            yield* Fiber.interrupt(taking)
          }))
        yield* shows({ active: 0 })
        const left: Array<number> = []
        const rest = yield* Effect.forkChild(
          Effect.forever(queue.take((value, { attempts }) => Effect.sync(() => void left.push(value, attempts))))
        )
        yield* shows({ completed: 61, waiting: 0, active: 0 })
        assert.isTrue(left.every((value, at) => at % 2 === 0 || value === 1), "attempts")
        yield* Fiber.interrupt(rest)
      })))

  it.effect("stores an element with an id once, and delays it", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const one = yield* make(a!)
        const two = yield* make(b!)
        const offered = performance.now()
        yield* one.queue.offer(1, { id: "x", delay: "300 millis" })
        yield* two.queue.offer(2, { id: "x" })
        yield* one.shows({ delayed: 1, waiting: 0 })
        assert.deepStrictEqual(
          yield* two.queue.take((value, { id }) => Effect.succeed([value, id])),
          [1, "x"]
        )
        assert.isAtLeast(performance.now() - offered, 290)
        yield* one.queue.offer(3, { id: "x" })
        yield* one.shows({ waiting: 0, active: 0, completed: 1 })
        // It is known for a while.
        yield* eventually(
          Effect.andThen(one.queue.offer(4, { id: "x" }), one.below.state).pipe(
            Effect.map(({ waiting }) => assert.strictEqual(waiting, 1))
          )
        )
        assert.strictEqual(yield* two.queue.take(Effect.succeed), 4)
      })))

  it.effect("takes any text as an id", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const one = yield* make(a!)
        const two = yield* make(b!)
        const long = "x".repeat(600)
        const ids = ["1001-2", "n5-5", "1:2026-11", "", "=", "é".repeat(256), long, `${long}y`, "\ud800", "\ud801"]
        for (const { queue } of [one, two]) {
          yield* Effect.forEach(ids, (id, at) => queue.offer(at, { id }), { discard: true })
        }
        yield* one.shows({ waiting: ids.length })
        const taken = yield* Effect.forEach(
          ids,
          () => two.queue.take((value, { id }) => Effect.succeed([value, id] as const))
        )
        assert.deepStrictEqual(taken, ids.map((id, at) => [at, id]))
        yield* one.shows({ waiting: 0, completed: ids.length })
      })))

  it.effect("stores an element once when the reply to its offer is lost", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const line = yield* proxy(server)
      const context = yield* node(line.url, { namespace: freshNamespace(), partitions: 1 })
      const { queue, shows } = yield* make(context)
      yield* queue.offer(0)
      yield* line.dropReplies
      const offering = yield* Effect.forkChild(queue.offer(1))
      yield* realSleep(100)
      yield* pending(offering)
      yield* line.closeAll
      yield* line.pass
      yield* promptly(Fiber.join(offering), "the offer")
      yield* shows({ waiting: 2 })
    }))

  it.effect("puts aside what cannot be decoded, and takes the next one", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const { below, cleanup, queue, shows } = yield* make(a!)
        yield* below.offer({ element: "no number", id: "poison" })
        yield* queue.offer(1)
        assert.strictEqual(yield* queue.take(Effect.succeed), 1)
        yield* shows({ dead: 1, completed: 1, waiting: 0, active: 0 })
        const [letter] = yield* Stream.runCollect(below.deadLetters)
        assert.deepStrictEqual([letter!.reason, letter!.attempts], ["undecodable", 1])
        // Until it is cleaned up.
        yield* cleanup({ timeToLive: Duration.zero, failedTimeToLive: undefined })
        yield* shows({ dead: 1 })
        const cleaned = (failedTimeToLive: Duration.Input, dead: number) =>
          Effect.andThen(
            cleanup({ timeToLive: Duration.zero, failedTimeToLive: Duration.fromInputUnsafe(failedTimeToLive) }),
            shows({ dead })
          )
        yield* cleaned("1 hour", 1)
        yield* cleaned(Duration.infinity, 1)
        // By the clock of Redis, not by that of this process.
        const { now } = Date
        yield* Effect.acquireUseRelease(
          Effect.sync(() => void (Date.now = () => now() - 3_600_000)),
          () => cleanup({ timeToLive: Duration.zero, failedTimeToLive: Duration.millis(1) }),
          () => Effect.sync(() => void (Date.now = now))
        )
        yield* shows({ dead: 0 })
        yield* below.offer({ element: "no number" })
        yield* queue.offer(2)
        assert.strictEqual(yield* queue.take(Effect.succeed), 2)
        yield* shows({ dead: 1 })
        yield* cleaned(0, 0)
      })))

  it.effect("gives an element to a taker that allows one more attempt, and says where none does", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const factory = yield* built(a!)
        const made = (maxAttempts: number) =>
          Effect.provideContext(
            PersistedQueue.make({
              name: "shared",
              schema: Schema.Number,
              retrySchedule: Schedule.spaced(0),
              maxAttempts
            }),
            factory
          )
        const [impatient, patient] = [yield* made(1), yield* made(10)]
        const { below, shows } = yield* make(a!)
        yield* impatient.offer(1)
        assert.strictEqual(yield* Effect.flip(patient.take(() => Effect.fail("no"))), "no")
        yield* shows({ waiting: 1 })
        yield* below.pause
        const refusing = yield* Effect.forkChild(impatient.take(attempts), { startImmediately: true })
        const taking = yield* Effect.forkChild(Effect.flip(patient.take((_, { attempts }) => Effect.fail(attempts))), {
          startImmediately: true
        })
        yield* below.resume
        assert.strictEqual(yield* promptly(Fiber.join(taking), "it"), 2)
        yield* shows({ dead: 1, active: 0 })
        const [letter] = yield* Stream.runCollect(below.deadLetters)
        assert.include(letter!.error, "had 2 attempts, and maxAttempts is 1 here")
        yield* Fiber.interrupt(refusing)
      })))

  it.effect("gets the element of a killed process back when its lease ends, and counts that", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const { below, queue, shows } = yield* make(a!, { maxAttempts: 2 })
        const start = Effect.gen(function*() {
          const process = yield* spawn<Event>(new URL("./programs/taker.ts", import.meta.url), {
            argument: { url: server.url, namespace } satisfies Argument
          })
          return { process, event: yield* process.waitFor(() => true) }
        })
        const id = yield* queue.offer(1)
        const first = yield* start
        assert.deepStrictEqual(first.event, { id, attempts: 1 })
        yield* first.process.kill9
        const killedAt = Date.now()
        const seen = yield* promptly(queue.take((_, { attempts }) => Effect.fail(attempts)).pipe(Effect.flip), "it")
        assert.strictEqual(seen, 2)
        assert.isAtMost(elapsed(killedAt), 1500 + 1000)
        yield* shows({ dead: 1 })
        // It was the last attempt, and its process has died in it.
        yield* below.replay()
        yield* Effect.flip(queue.take(() => Effect.fail("no")))
        const last = yield* start
        assert.strictEqual(last.event.attempts, 2)
        yield* last.process.kill9
        const next = yield* Effect.forkChild(queue.take(Effect.succeed))
        yield* shows({ dead: 1, active: 0 })
        yield* pending(next)
        const [letter] = yield* Stream.runCollect(below.deadLetters)
        assert.include(letter!.error, "died")
        yield* queue.offer(2)
        assert.strictEqual(yield* promptly(Fiber.join(next), "the next element"), 2)
        yield* Effect.forEach([first, last], ({ process }) => process.exit)
      }), { lease: "1500 millis", margin: "400 millis" }))

  it.effect("keeps its limits, and warns of an element that is handled when its session is lost", () =>
    Effect.suspend(() => {
      const lines: Array<string> = []
      const logger = Logger.make(({ logLevel, message }) => void lines.push(`${logLevel} ${String(message)}`))
      return several(1, ([a], namespace, server) =>
        Effect.gen(function*() {
          const limits = { length: 1, concurrency: 1, onFull: "fail" } as const
          const { queue, shows } = yield* make(a!, {}, { retention: "200 millis", limits })
          yield* queue.offer(1)
          assert.include((yield* Effect.flip(queue.offer(2))).message, "offer an element")
          const gate = yield* Deferred.make<void>()
          const first = yield* Effect.forkChild(queue.take(() => Deferred.await(gate)))
          yield* shows({ active: 1 })
          const second = yield* Effect.forkChild(queue.take(Effect.succeed))
          yield* queue.offer(2)
          yield* shows({ active: 1, waiting: 1 })
          yield* lose(a!, namespace, server)
          yield* eventually(Effect.sync(() => assert.match(lines.join(), /Warn .* was taken was lost/)))
          assert.isUndefined(first.pollUnsafe())
          assert.strictEqual(yield* promptly(Fiber.join(second), "the element"), 1)
          yield* Deferred.succeed(gate, undefined)
          yield* Fiber.join(first)
          assert.strictEqual(yield* promptly(queue.take(Effect.succeed), "the next element"), 2)
        })).pipe(Effect.provide(Logger.layer([logger])))
    }))

  it.effect("has its takers wait while Redis is full", () =>
    several(1, ([a], _, server) =>
      Effect.gen(function*() {
        const lines: Array<string> = []
        const logger = Logger.make(({ message }) => void lines.push(String(message)))
        const { queue } = yield* make(a!)
        yield* server.cli("CONFIG", "SET", "maxmemory", 1)
        const taking = yield* Effect.forkChild(Effect.provide(queue.take(Effect.succeed), Logger.layer([logger])))
        yield* eventually(
          Effect.sync(() => assert.match(lines.join(), /nothing can be taken from queue "shared" of namespace "\w+"/))
        )
          .pipe(
            Effect.ensuring(Effect.orDie(server.cli("CONFIG", "SET", "maxmemory", 0)))
          )
        yield* queue.offer(1)
        assert.strictEqual(yield* promptly(Fiber.join(taking), "the element"), 1)
      })))

  it.effect("ends its takers when its coordinator is closed", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const [taking, queue] = yield* Effect.scoped(Effect.gen(function*() {
        const context = yield* node(server.url, { namespace: freshNamespace(), partitions: 1 })
        const { queue, shows } = yield* make(context)
        const taking = yield* Effect.forkDetach(queue.take(Effect.succeed))
        yield* shows({ workers: 1 })
        return [taking, queue] as const
      }))
      const error = yield* promptly(Effect.flip(Fiber.join(taking)), "the end")
      assert.include(error.message, "take an element")
      // And later calls.
      for (const late of [Effect.asVoid(queue.take(Effect.succeed)), Effect.asVoid(queue.offer(1))]) {
        yield* promptly(Effect.flip(late), "the end of a late one")
      }
    }))

  it.effect("ends its takers when the store is closed, and takes nothing in", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const [used, unused] = yield* Effect.scoped(Effect.gen(function*() {
          const factory = yield* built(a!, { retention: "200 millis" })
          const named = (name: string) =>
            Effect.provideContext(PersistedQueue.make({ name, schema: Schema.Number }), factory)
          const used = yield* named("used")
          yield* used.offer(1)
          assert.strictEqual(yield* used.take(attempts), 1)
          return [used, yield* named("unused")] as const
        }))
        for (const queue of [used, unused]) {
          for (const late of [Effect.asVoid(queue.take(Effect.succeed)), Effect.asVoid(queue.offer(1))]) {
            const error = yield* promptly(Effect.flip(late), "the end")
            assert.include(String((error as PersistedQueue.PersistedQueueError).cause), "scope of queue")
          }
        }
      })))

  it.effect("has the elements of a thousand takers and more in hand, also when it has missed events", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const { queue, shows } = yield* make(a!)
        const count = 1100
        const gate = Deferred.makeUnsafe<void>()
        let begun = 0
        const take = queue.take(() => Effect.andThen(Effect.sync(() => begun++), Deferred.await(gate)))
        const takers = yield* Effect.forkChild(
          Effect.forEach(upTo(count), () => take, { concurrency: "unbounded", discard: true })
        )
        yield* Effect.forEach(upTo(count), (value) => queue.offer(value), { concurrency: 50, discard: true })
        yield* eventually(Effect.sync(() => assert.strictEqual(begun, count)))
        missed(a!)
        yield* eventually(Effect.sync(() => assert.isTrue(channelOf(a!).outbox.isIdle)))
        yield* shows({ active: count, completed: 0 })
        yield* Fiber.interrupt(takers)
        yield* shows({ active: 0, completed: 0, waiting: count })
      }), { lease: "9 seconds", margin: "1 second" }))
})
