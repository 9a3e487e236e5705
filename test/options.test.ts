/** What is no option is refused before anything is sent, and says which one it is. */
import { assert, layer } from "@effect/vitest"
import { Cause, Duration, Effect, Exit, Layer, Schedule, Schema, Stream } from "effect"
import {
  Barrier,
  Coordinator,
  CountDownLatch,
  Election,
  Fence,
  Latch,
  Lock,
  Queue,
  ReadWriteLock,
  Redis,
  Semaphore,
  SharedRef,
  Signal,
  Singleton,
  TaskGroup,
  Topic
} from "../src/index.ts"
import { eventually } from "./support/eventually.ts"
import { node, onNode, TestServer, withNode } from "./support/live.ts"
import { emptied } from "./support/queues.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

const refused = (name: string, self: Effect.Effect<unknown, unknown, any>) =>
  Effect.map(Effect.exit(self as Effect.Effect<unknown, unknown>), (exit) => {
    const defect = Exit.isFailure(exit) ? exit.cause.reasons.find(Cause.isDieReason)?.defect : undefined
    assert.instanceOf(defect, RangeError, `${name}: ${String(exit)}`)
    assert.include((defect as RangeError).message, name)
  })

const queueOf = (options: Partial<Queue.Options<number> & { readonly name: string }> = {}) =>
  Effect.tap(Queue.make({ name: "q", payload: Schema.Number, retention: "200 millis", ...options }), emptied)

layer(TestServer.layer, live)("options", (it) => {
  it.effect("that are one of a few words", () =>
    withNode(() =>
      Effect.scoped(Effect.gen(function*() {
        const context = yield* Effect.context<Coordinator.Coordinator>()
        const bad = "Fail" as never
        const made = <A, E, R>(self: Effect.Effect<A, E, R>) => Effect.provideContext(Effect.scoped(self), context)
        const makes = {
          semaphore: Semaphore.make({ name: "x", permits: 1, onMismatch: bad }),
          latch: CountDownLatch.make({ name: "x", count: 1, onMismatch: bad }),
          barrier: Barrier.make({ name: "x", parties: 1, onMismatch: bad }),
          tasks: TaskGroup.make({ name: "x", shards: 1, result: Schema.Number, onMismatch: bad } as never)
        }
        for (const self of Object.values<Effect.Effect<unknown, unknown, any>>(makes)) {
          yield* refused("onMismatch", made(self))
        }
        yield* refused("onDeparture", made(Barrier.make({ name: "x", parties: 1, onDeparture: bad })))
        assert.throws(() => Singleton.schedule("x", Effect.void, Schedule.forever, { missed: bad }), /missed/)
        assert.throws(() => Singleton.schedule("x", Effect.void, "* * * * *" as never), /times/)
        yield* refused("restart", made(Layer.build(Singleton.make("x", Effect.void, { restart: 5 as never }))))
        yield* refused("release", Lock.withLock(Effect.void, "x", { release: bad }))
        const release = { release: bad, reentrant: true }
        yield* refused("release", Lock.withLock(Lock.withLock(Effect.void, "x", release), "x"))
        yield* refused(
          "release",
          ReadWriteLock.withReadLock(ReadWriteLock.withReadLock(Effect.void, "x", release), "x")
        )
        const queue = yield* queueOf()
        for (const word of ["bogus", "constructor", "__proto__"] as Array<never>) {
          yield* refused("priority", queue.offer(1, { priority: word }))
          yield* refused("dedupe.mode", queue.offer(1, { dedupe: { id: "x", mode: word } }))
          yield* refused("onFailure", queue.offer(1, { onFailure: word }))
        }
        const topic = yield* Topic.make({ name: "x", schema: Schema.Number })
        yield* refused("strategy", Stream.runDrain(topic.subscribe({ buffer: { strategy: bad } })))
        yield* refused("from", Stream.runDrain(topic.subscribe({ from: bad })))
        yield* refused("from", Stream.runDrain(topic.consume({ group: "g", from: bad })))
        yield* refused("orderBy", topic.run(() => Effect.void, { group: "g", orderBy: bad }))
        yield* refused("retry", topic.run(() => Effect.void, { group: "g", retry: 3 as never }))
        yield* refused("retry", queue.run(() => Effect.void, { retry: 3 as never }))
        yield* refused("onInterrupt", queue.execute(1, { onInterrupt: bad }))
        const tasks = yield* TaskGroup.make({ name: "t", shards: 1, result: Schema.Number, timeToLive: "1 second" })
        yield* refused("onWorkerLost", tasks.awaitAll({ onWorkerLost: bad }))
        for (const signal of ["SIGKILL", "NOPE"] as Array<never>) {
          yield* refused("signals", Effect.scoped(queue.pool(() => Effect.void, { signals: ["SIGUSR2", signal] })))
        }
        assert.strictEqual(process.listenerCount("SIGUSR2"), 0)
        // As a program without types may have them.
        const sharded = yield* queueOf({ name: "sharded", shards: 2 })
        for (const wrong of ["x", 5, null] as Array<never>) {
          for (const one of [queue, sharded]) {
            yield* refused("after", Effect.suspend(() => one.offer(1, { after: wrong })))
            yield* refused("after", Effect.suspend(() => one.offerAll([1], { after: wrong })))
          }
          yield* refused("dedupe", queue.offer(1, { dedupe: wrong }))
          yield* refused("signals", Effect.scoped(queue.pool(() => Effect.void, { signals: wrong })))
          yield* refused("from", Stream.runDrain(topic.subscribe({ from: wrong })))
          yield* refused("from", Stream.runDrain(topic.consume({ group: "g", from: wrong })))
          yield* refused("from", topic.run(() => Effect.void, { group: "g", from: wrong }))
        }
      }))
    ))

  it.effect("never before there is an effect", () =>
    withNode(() =>
      Effect.scoped(Effect.gen(function*() {
        const ref = yield* SharedRef.make({ name: "x", schema: Schema.Number, initial: 0 })
        const queue = yield* queueOf()
        const topic = yield* Topic.make({ name: "x", schema: Schema.Number })
        const signal = yield* Signal.make({ name: "x" })
        const isTrue = () => true
        const effects: Array<readonly [name: string, Effect.Effect<unknown, unknown, any>]> = [
          ["version", ref.compareAndSet(-1, 0)],
          ["maxAge", ref.cachedWithin(-1)],
          ["wait", ref.until(isTrue, { wait: -1 })],
          ["wait", signal.waitFor({ wait: 0 })],
          ["concurrency", queue.run(() => Effect.void, { concurrency: 0 })],
          ["attempts", Effect.scoped(queue.pool(() => Effect.void, { attempts: 0 }))],
          ["after", Stream.runDrain(queue.jobs({ state: "waiting", after: "?" }))],
          ["count", queue.nextRuns("n", 0)],
          ["name", queue.unschedule("")],
          ["age", queue.clean(-1)],
          ["concurrency", topic.run(() => Effect.void, { group: "g", concurrency: 0 })],
          ["prefetch", Stream.runDrain(topic.consume({ group: "g", prefetch: 0 }))]
        ]
        for (const [name, self] of effects) yield* refused(name, self)
        const unnamed = yield* Effect.exit(Effect.suspend(() => queue.job(undefined as never).status))
        assert.isTrue(Exit.isFailure(unnamed) && Cause.hasDies(unnamed.cause))
        // No time is one, too.
        assert.strictEqual(yield* ref.cachedWithin(0), 0)
        assert.strictEqual(yield* queue.clean(0), 0)
        const { id } = yield* queue.offer(1, { delay: "1 hour" })
        assert.isTrue(yield* queue.job(id).reschedule({ delay: 0 }))
        const waiting = Effect.map(queue.state, ({ waiting }) => assert.strictEqual(waiting, 1))
        yield* eventually(waiting)
      }))
    ))

  it.effect("that are times and durations", () =>
    withNode(() =>
      Effect.scoped(Effect.gen(function*() {
        const context = yield* Effect.context<Coordinator.Coordinator>()
        const made = <A, E, R>(self: Effect.Effect<A, E, R>) => Effect.provideContext(Effect.scoped(self), context)
        const bad = "soon" as never
        yield* refused("lease", made(queueOf({ lease: bad })))
        yield* refused("timeout", made(queueOf({ timeout: 0 })))
        yield* refused("attempts", made(queueOf({ attempts: 0 })))
        const queue = yield* queueOf()
        yield* refused("at", queue.offer(1, { at: Number.NaN }))
        yield* refused("delay", queue.offer(1, { delay: bad }))
        yield* refused("delay", queue.offer(1, { delay: Number.NaN }))
        // All that went before is at once, and all that will never come is far away.
        const { id } = yield* queue.offer(1, { at: new Date("0001-01-01T00:00:00Z") })
        assert.isTrue(yield* queue.job(id).cancel)
        yield* queue.offer(1, { delay: Duration.millis(Number.MAX_SAFE_INTEGER), id: "never" })
        assert.lengthOf(yield* Stream.runCollect(queue.jobs({ state: "delayed" })), 1)
        const connected = Coordinator.layer({ lease: bad })
        const redis = Redis.layer({ password: "secret" as never })
        yield* refused(
          "lease",
          Effect.void.pipe(Effect.provide(connected), Effect.provide(Redis.layerEmbedded())) as never
        )
        yield* refused("password", Effect.void.pipe(Effect.provide(redis)))
      }))
    ))

  it.effect("also where nothing has to be waited for", () =>
    withNode(() =>
      Effect.gen(function*() {
        for (const [name, options] of [["wait", { wait: -1 }], ["maxHold", { maxHold: 0 }]] as const) {
          const reentrant = { ...options, reentrant: true }
          yield* Lock.withLock(refused(name, Lock.withLock(Effect.void, "a", reentrant)), "a")
          yield* Lock.withLock(refused(name, Effect.scoped(Lock.acquire("a", reentrant))), "a")
          yield* refused(name, Lock.withLocks(Effect.void, [], options))
          yield* ReadWriteLock.withReadLock(refused(name, ReadWriteLock.withReadLock(Effect.void, "a", options)), "a")
        }
      })
    ))

  it.effect("that are true or false", () =>
    withNode(() =>
      Effect.gen(function*() {
        for (const bad of [0, "", Number.NaN, "5", null] as Array<never>) {
          const makes = {
            tasks: TaskGroup.make({ name: "x", result: Schema.Number, fresh: bad }),
            latch: Latch.make({ name: "x", fresh: bad }),
            countDown: CountDownLatch.make({ name: "x", count: 1, fresh: bad })
          }
          for (const self of Object.values<Effect.Effect<unknown, unknown, any>>(makes)) {
            yield* refused("fresh", Effect.scoped(self))
          }
          yield* refused("open", Effect.scoped(Latch.make({ name: "x", open: bad })))
        }
      })
    ))

  it.effect("that are callbacks and candidates of an election", () =>
    withNode(() =>
      Effect.scoped(Effect.gen(function*() {
        for (const name of ["onAcquired", "onLost"]) {
          yield* refused(name, Effect.scoped(Election.make({ name: "x", [name]: 5 })))
        }
        const election = yield* Election.make({ name: "x" })
        for (const bad of [5, {}, Number.NaN, null, undefined] as Array<never>) {
          yield* refused("candidate", election.transferTo(bad))
          yield* refused("candidate", election.lead(election.transferTo(bad)))
        }
      }))
    ))

  it.effect("that are tokens", () =>
    withNode(() =>
      Effect.scoped(Effect.gen(function*() {
        const ref = yield* SharedRef.make({ name: "x", schema: Schema.Number, initial: 0 })
        yield* Effect.addFinalizer(() => Effect.orDie(ref.delete))
        const context = yield* Effect.context<Coordinator.Coordinator>()
        for (const token of [Number.NaN, Infinity, 1.5, -1, undefined as never]) {
          yield* refused("token", ref.setFenced({ kind: "lock", key: "k", token }, 1))
          yield* refused("token", Effect.provideContext(Fence.run({ token }, "fenced", "SET", "1"), context))
        }
        const torn = Fence.run({ token: 1 }, "fenced", "SET", "\ud800")
        yield* refused("args", Effect.provideContext(torn, context))
        assert.strictEqual(yield* ref.get, 0)
      }))
    ))

  it.effect("that fit what another process has made larger are not refused for what is known here", () =>
    withNode((namespace) =>
      Effect.scoped(Effect.gen(function*() {
        const other = yield* node((yield* TestServer).url, { namespace })
        const semaphore = yield* Semaphore.make({ name: "x", permits: 1 })
        const elsewhere = yield* Semaphore.make({ name: "x", permits: 1 }).pipe(onNode(other))
        yield* elsewhere.resize(5)
        assert.strictEqual(yield* semaphore.withPermits(5)(Effect.succeed("all")), "all")
        assert.strictEqual((yield* Effect.flip(semaphore.withPermits(6)(Effect.void))).reason._tag, "PermitsExceeded")
      }))
    ))
})
