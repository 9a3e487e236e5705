/** What holds, waits and questions promise at their edges: each of these did not hold once. */
import { assert, describe, it, layer } from "@effect/vitest"
import { Context, Deferred, Duration, Effect, Exit, Fiber, Layer, Logger, Option, Schema, Scope, Stream } from "effect"
import * as Lockstep from "../src/index.ts"
import {
  Barrier,
  Batch,
  Coordinator,
  CountDownLatch,
  Counter,
  DoubleBarrier,
  Election,
  Flow,
  Latch,
  Lease,
  Lock,
  Queue,
  ReadWriteLock,
  Redis,
  Rendezvous,
  Semaphore,
  SharedRef,
  Signal,
  TaskGroup,
  Topic,
  WorkStealing
} from "../src/index.ts"
import { partitionOf } from "../src/internal/actor/keys.ts"
import { protocol } from "../src/internal/actor/lua.ts"
import { Outbox } from "../src/internal/actor/outbox.ts"
import type { Session } from "../src/internal/actor/session.ts"
import type { Transport } from "../src/internal/actor/transport.ts"
import { join } from "../src/internal/hold/acquire.ts"
import { placeOf, spaceOf } from "../src/internal/hold/place.ts"
import { CurrentIo, live as liveIo } from "../src/internal/io.ts"
import { make as proxy } from "../src/testing/Proxy.ts"
import { actor, client } from "./support/actor.ts"
import { assertUnanswered, behindLine } from "./support/behindLine.ts"
import { departed } from "./support/departed.ts"
import { eventually, realSleep } from "./support/eventually.ts"
import { assertEmpty, freshNamespace, holding, type Node, node, onNode, TestServer } from "./support/live.ts"
import { asks, fields, waits, within } from "./support/requests.ts"
import { type Server, standalone } from "./support/servers.ts"
import { forget } from "./support/sessions.ts"
import { on, sessionsExpired, several } from "./support/several.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

const short = { lease: "2 seconds", margin: "300 millis", requestTimeout: "400 millis" } as const

/** A coordinator with a scope of its own, to close it when the test says so. */
const closable = Effect.fnUntraced(function*(server: Server, options: Coordinator.Options) {
  const scope = yield* Scope.make()
  const context = yield* node(server.url, options).pipe(Scope.provide(scope))
  // In a fiber of its own: a close that hangs cannot be interrupted, and the test has to fail in time.
  return { context, close: Effect.flatMap(Effect.forkDetach(Scope.close(scope, Exit.void)), Fiber.join) }
})

type Asked<A, E> = Effect.Effect<A, E, Coordinator.Coordinator | Scope.Scope>

/** An outbox of one session, which nothing renews. */
const outboxOf = (
  session: Session,
  transport: Transport,
  { lease, lose, most }: { readonly lease: number; readonly most: number; readonly lose: (reason: string) => void }
) =>
  new Outbox({
    current: () => session,
    open: () => {},
    answered: () => {},
    suspended: () => {},
    unread: () => {},
    lose: (_, reason) => lose(reason)
  }, { transport, io: liveIo, lease, maxBatch: most, maxPending: most, log: () => {} })

layer(TestServer.layer, live)("trust", (it) => {
  it.effect("ends by the earlier of the monotonic and the wall clock", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      let [ahead, passed] = [0, 0]
      const io = { ...liveIo, now: () => liveIo.now() + passed, wall: () => liveIo.wall() + ahead }
      yield* Effect.scoped(Effect.gen(function*() {
        const context = yield* Effect.provideService(node(server.url, { namespace }), CurrentIo, io)
        yield* onNode(context)(Effect.scoped(Effect.gen(function*() {
          const lease = yield* Lock.acquire("a")
          assert.isTrue(yield* lease.isHeld)
          // As after a suspended machine goes on: the monotonic clock has stood still.
          ahead = 15_000
          assert.isFalse(yield* lease.isHeld)
          assert.strictEqual((yield* Effect.flip(lease.lost)).reason, "expired")
        })))
        ahead = 0
        // A wall clock that is set back prolongs nothing, and shortens nothing.
        ahead = -3_600_000
        yield* onNode(context)(Effect.scoped(Effect.gen(function*() {
          const lease = yield* Lock.acquire("a")
          assert.isTrue(yield* lease.isHeld)
          passed = 15_000
          assert.isFalse(yield* lease.isHeld)
          assert.strictEqual((yield* Effect.flip(lease.lost)).reason, "expired")
        })))
      }))
      yield* assertEmpty(server, namespace)
    }))

  it.effect("ends what waits for a promise as soon as a machine goes on that was suspended", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      let ahead = 0
      const io = { ...liveIo, wall: () => liveIo.wall() + ahead }
      yield* Effect.scoped(Effect.gen(function*() {
        const context = yield* Effect.provideService(node(server.url, { namespace }), CurrentIo, io)
        yield* onNode(context)(Lock.withLock(Effect.void, "a"))
        // The session has had nothing to hold for a while.
        yield* realSleep("1 second")
        const inside = yield* Deferred.make<void>()
        const aborted = yield* Deferred.make<void>()
        const body = Effect.promise((signal) =>
          new Promise<void>((resolve) => {
            Deferred.doneUnsafe(inside, Exit.void)
            signal.addEventListener("abort", () => {
              Deferred.doneUnsafe(aborted, Exit.void)
              resolve()
            })
          })
        )
        const holder = yield* Effect.forkChild(onNode(context)(Effect.flip(Lock.withLock(body, "a"))))
        yield* Deferred.await(inside)
        yield* realSleep("1 second")
        ahead = 60_000
        // The next heartbeat may be five seconds away.
        // The clocks are looked at twice a second.
        yield* within(Deferred.await(aborted), 900, "the interruption")
        const { reason } = yield* Fiber.join(holder)
        assert.isTrue(reason._tag === "LeaseLost" && reason.reason === "expired", reason.message)
      }))
      yield* assertEmpty(server, namespace)
    }))
})

/** A coordinator that can be closed, and a body under it that takes a while to end when it is interrupted. */
const lingering = Effect.gen(function*() {
  const server = yield* TestServer
  const namespace = freshNamespace()
  const { close, context } = yield* closable(server, { namespace, lease: "9 seconds", margin: "3 seconds" })
  const order: Array<string> = []
  const inside = yield* Deferred.make<void>()
  const body = Effect.andThen(Deferred.succeed(inside, undefined), Effect.never).pipe(
    Effect.onInterrupt(() => Effect.andThen(realSleep("400 millis"), Effect.sync(() => order.push("finalized"))))
  )
  return { server, namespace, close, context, order, body, begun: Deferred.await(inside) }
})

layer(TestServer.layer, live)("closing", (it) => {
  it.effect("releases what a body holds when its finalizers have run, and not before", () =>
    Effect.gen(function*() {
      const { begun, body, close, context, namespace, order, server } = yield* lingering
      yield* Effect.scoped(Effect.gen(function*() {
        const other = yield* node(server.url, { namespace })
        const holder = yield* Effect.forkDetach(onNode(context)(Effect.exit(Lock.withLock(body, "a"))))
        yield* begun
        const waiter = yield* Effect.forkChild(
          onNode(other)(Lock.withLock(Effect.sync(() => order.push("entered")), "a"))
        )
        yield* waits(server, namespace, "lock:a", 1)
        const { millis } = yield* within(close, 2500, "closing")
        assert.isAbove(millis, 350)
        yield* Fiber.join(waiter)
        assert.deepStrictEqual(order, ["finalized", "entered"])
        const exit = yield* Fiber.join(holder)
        assert.include(String(exit), "closed")
      }))
      yield* assertEmpty(server, namespace)
    }))

  type Handling = (handler: () => Effect.Effect<void>) => Effect.Effect<
    { readonly feed: Effect.Effect<unknown, unknown>; readonly run: Effect.Effect<unknown, unknown> },
    unknown,
    Coordinator.Coordinator | Scope.Scope
  >
  const ofJobs: Handling = (handler) =>
    Effect.map(Queue.make({ name: "work", payload: Schema.Number }), (queue) => ({
      feed: queue.offer(1),
      run: queue.run(handler)
    }))
  const ofEvents: Handling = (handler) =>
    Effect.map(Topic.make({ name: "news", schema: Schema.Number }), (topic) => ({
      feed: topic.publish(1),
      run: topic.run(handler, { group: "g", from: "beginning" })
    }))
  for (const [what, handling] of [["job", ofJobs], ["event", ofEvents]] as const) {
    it.effect(`has the handler of a${what === "event" ? "n" : ""} ${what} end before another process gets that`, () =>
      Effect.gen(function*() {
        const { begun, body, close, context, namespace, order, server } = yield* lingering
        yield* Effect.scoped(Effect.gen(function*() {
          const other = yield* node(server.url, { namespace })
          const { feed, run } = yield* onNode(context)(handling(() => body))
          // It outlives the coordinator.
          const handler = yield* Effect.forkDetach(Effect.exit(run))
          yield* feed
          yield* begun
          const entered = yield* Deferred.make<void>()
          const there = yield* onNode(other)(handling(() =>
            Effect.suspend(() => {
              order.push("entered")
              return Effect.asVoid(Deferred.succeed(entered, undefined))
            })
          ))
          yield* Effect.forkScoped(there.run)
          const { millis } = yield* within(close, 2500, "closing")
          assert.isAbove(millis, 350)
          yield* within(Deferred.await(entered), 5000, "the other process")
          assert.deepStrictEqual(order, ["finalized", "entered"])
          yield* Fiber.join(handler)
        }))
      }))
  }

  type Cleaning = (clean: Effect.Effect<void>) => Effect.Effect<void, unknown, Coordinator.Coordinator>
  const inScope: Cleaning = (clean) =>
    Effect.scoped(Effect.gen(function*() {
      const lease = yield* Lock.acquire("a")
      yield* Effect.exit(lease.lost)
      yield* clean
    }))
  const inNoScope: Cleaning = (clean) =>
    Effect.scoped(Effect.gen(function*() {
      const semaphore = yield* Semaphore.make({ name: "a", permits: 1 })
      const lease = yield* semaphore.take(1)
      yield* Effect.exit(lease.lost)
      yield* clean
      yield* semaphore.release(lease)
    }))
  for (const [form, program] of [["a scope", inScope], ["no scope", inNoScope]] as const) {
    it.effect(`leaves a program its time that holds something in ${form}, and observes the end`, () =>
      Effect.gen(function*() {
        const server = yield* TestServer
        const namespace = freshNamespace()
        const options = { namespace, partitions: 1, lease: "9 seconds", margin: "3 seconds" } as const
        const { close, context } = yield* closable(server, options)
        yield* Effect.scoped(Effect.gen(function*() {
          const other = yield* node(server.url, options)
          const order: Array<string> = []
          const clean = Effect.andThen(realSleep("500 millis"), Effect.sync(() => void order.push("cleaned up")))
          const holder = yield* Effect.forkDetach(onNode(context)(program(clean)))
          const key = form === "a scope" ? "lock:a" : "semaphore:a"
          yield* eventually(Effect.map(fields(server, namespace, key, "h"), (holds) => holds === 1))
          const waiter = yield* Effect.forkDetach(
            onNode(other)(Effect.scoped(Effect.gen(function*() {
              const entered = Effect.sync(() => order.push("entered"))
              if (form === "a scope") return yield* Lock.withLock(entered, "a")
              const semaphore = yield* Semaphore.attach({ name: "a" })
              return yield* semaphore.withPermit(entered)
            })))
          )
          yield* waits(server, namespace, key, 1)
          const { millis } = yield* within(close, 2000, "closing")
          assert.isAbove(millis, 450)
          yield* Fiber.join(holder)
          yield* Fiber.join(waiter)
          assert.deepStrictEqual(order, ["cleaned up", "entered"])
        }))
        yield* assertEmpty(server, namespace)
      }))
  }

  it.effect("leaves finalizers their time also if the session was lost right before", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      const options = { namespace, partitions: 1, lease: "30 seconds", margin: "2 seconds" } as const
      yield* Effect.scoped(Effect.gen(function*() {
        const { close, context } = yield* closable(server, options)
        const other = yield* node(server.url, options)
        const order: Array<string> = []
        const inside = yield* Deferred.make<void>()
        const interrupted = yield* Deferred.make<void>()
        const body = Effect.andThen(Deferred.succeed(inside, undefined), Effect.never).pipe(
          Effect.onInterrupt(() =>
            Deferred.succeed(interrupted, undefined).pipe(
              Effect.andThen(Effect.sleep("500 millis")),
              Effect.andThen(Effect.sync(() => order.push("finalized")))
            )
          )
        )
        yield* Effect.forkDetach(onNode(context)(Effect.exit(Lock.withLock(body, "a"))))
        yield* Deferred.await(inside)
        const next = yield* Effect.forkDetach(
          onNode(other)(Lock.withLock(Effect.sync(() => order.push("entered")), "a"))
        )
        yield* waits(server, namespace, "lock:a", 1)
        const [session] = yield* sessionsOf(context)
        yield* forget(server, namespace, session!.id)
        yield* onNode(context)(Lock.withLock(Effect.void, "b"))
        yield* Deferred.await(interrupted)
        yield* close
        yield* Fiber.join(next)
        assert.deepStrictEqual(order, ["finalized", "entered"])
      }))
      yield* assertEmpty(server, namespace)
    }))

  for (const lease of ["15 seconds", "1 minute"] as const) {
    it.effect(`waits for finalizers no longer than the coordinator's margin, under a lease of ${lease}`, () =>
      Effect.gen(function*() {
        const server = yield* TestServer
        const namespace = freshNamespace()
        const { close, context } = yield* closable(server, { namespace, margin: "500 millis" })
        const inside = yield* Deferred.make<void>()
        const release = yield* Deferred.make<void>()
        const body = Effect.andThen(Deferred.succeed(inside, undefined), Effect.never).pipe(
          Effect.onInterrupt(() => Deferred.await(release))
        )
        yield* Effect.forkDetach(onNode(context)(Effect.exit(Lock.withLock(body, "a", { lease }))))
        yield* Deferred.await(inside)
        const { millis } = yield* within(close, 2000, "closing")
        assert.isAbove(millis, 450)
        yield* assertEmpty(server, namespace)
        yield* Deferred.succeed(release, undefined)
      }))
  }

  it.effect("ends in time though Redis hangs", () =>
    Effect.gen(function*() {
      const server = yield* standalone()
      const { close, context } = yield* closable(server, {
        namespace: freshNamespace(),
        margin: "1 second",
        requestTimeout: "1 second"
      })
      const inside = yield* Deferred.make<void>()
      yield* Effect.forkDetach(
        onNode(context)(
          Effect.exit(Lock.withLock(Effect.andThen(Deferred.succeed(inside, undefined), Effect.never), "a"))
        )
      )
      yield* Deferred.await(inside)
      yield* server.pause
      // The margin, the request timeout, and a little.
      yield* within(close, 2800, "closing").pipe(Effect.ensuring(Effect.orDie(server.resume)))
    }).pipe(Effect.scoped))

  /** Interrupts a program that holds or counts something, while Redis hangs. */
  const endsInTime = <E>(
    program: (inside: Effect.Effect<boolean>) => Effect.Effect<unknown, E, Coordinator.Coordinator>,
    hanging: Effect.Effect<void> = Effect.void,
    lease = Duration.seconds(15)
  ) =>
    Effect.gen(function*() {
      const server = yield* standalone()
      const inside = yield* Deferred.make<void>()
      const fiber = yield* Effect.forkDetach(
        program(Deferred.succeed(inside, undefined)).pipe(
          Effect.provide(
            Coordinator.layer({ namespace: freshNamespace(), lease, margin: "1 second", requestTimeout: "1 second" })
              .pipe(
                Layer.provide(Redis.layer({ url: server.url }))
              )
          )
        )
      )
      yield* Deferred.await(inside)
      yield* server.pause
      yield* hanging
      // The margin, the request timeout, and a little: the first request waits for that, and all the rest has the margin.
      yield* within(Fiber.interrupt(fiber), 2800, "closing").pipe(Effect.ensuring(Effect.orDie(server.resume)))
    }).pipe(Effect.scoped)

  it.effect("ends in time though Redis hangs, however many holds are nested", () =>
    endsInTime((inside) =>
      // In partitions of their own, and in sessions of two lengths.
      Effect.andThen(inside, Effect.never).pipe(
        Lock.withLock("a"),
        Lock.withLock("b"),
        Lock.withLock("c", { lease: "20 seconds" }),
        Lock.withLock("d")
      )
    ))

  // Between two heartbeats, in the middle of one, and where sessions expire while releases wait.
  for (const millis of [500, 1000, 1500, 2000]) {
    it.effect(`ends in time though Redis has hung for ${millis} ms, however many holds are nested`, () =>
      endsInTime(
        (inside) =>
          Effect.andThen(inside, Effect.never).pipe(
            Lock.withLock("a"),
            Lock.withLock("b"),
            Lock.withLock("c", { lease: "20 seconds" }),
            Lock.withLock("d")
          ),
        realSleep(millis),
        Duration.seconds(4)
      ))
  }

  it.effect("ends in time though Redis hangs, however many counters have sums to send", () =>
    endsInTime((inside) =>
      Effect.scoped(Effect.gen(function*() {
        for (let at = 0; at < 5; at++) {
          const counter = yield* Counter.make({ name: `c${at}` })
          const sum = yield* counter.batched({ flush: "10 seconds" })
          yield* sum.add(1)
          yield* sum.flush
          yield* sum.add(1)
        }
        yield* inside
        yield* Effect.never
      }))
    ))

  it.effect("ends in time though Redis hangs, however many workers have acknowledged jobs", () =>
    Effect.gen(function*() {
      const hangs = yield* Deferred.make<void>()
      const acknowledged = yield* Deferred.make<void>()
      const queues = 5
      yield* endsInTime(
        (inside) =>
          Effect.scoped(Effect.gen(function*() {
            let handled = 0
            for (let at = 0; at < queues; at++) {
              const queue = yield* Queue.make({ name: `q${at}`, payload: Schema.Number })
              const begun = yield* Deferred.make<void>()
              const handler = Effect.andThen(
                Effect.andThen(Deferred.succeed(begun, undefined), Deferred.await(hangs)),
                Effect.suspend(() => ++handled === queues ? Deferred.succeed(acknowledged, undefined) : Effect.void)
              )
              yield* queue.pool(() => handler)
              yield* queue.offer(1)
              yield* Deferred.await(begun)
            }
            yield* inside
            yield* Effect.never
          })),
        Effect.andThen(Deferred.succeed(hangs, undefined), Deferred.await(acknowledged))
      )
    }))

  it.effect("ends in time though Redis hangs in the middle of it", () =>
    Effect.gen(function*() {
      const line = yield* proxy(yield* TestServer)
      const { close, context } = yield* closable({ ...yield* TestServer, url: line.url }, {
        namespace: freshNamespace(),
        margin: "1 second",
        requestTimeout: "1 second"
      })
      yield* onNode(context)(Lock.withLock(Effect.void, "a"))
      const reaping = yield* line.hold(({ args }) => args.includes("session.owned"))
      const closing = yield* Effect.forkDetach(within(close, 1600, "closing"))
      yield* reaping.request
      yield* line.blackhole
      // The request timeout, and a little.
      yield* Fiber.join(closing)
    }).pipe(Effect.scoped))
})

layer(TestServer.layer, live)("a lease", (it) => {
  it.effect("says its kind, and is found by it", () =>
    several(1, ([context]) =>
      onNode(context!)(Effect.scoped(Effect.gen(function*() {
        const semaphore = yield* Semaphore.make({ name: "x", permits: 1 })
        const outer = yield* Lock.acquire("x")
        yield* semaphore.withPermit(Effect.gen(function*() {
          const inner = Option.getOrThrow(yield* Lease.currentOf("x"))
          assert.strictEqual(inner.kind, "semaphore")
          const lock = Option.getOrThrow(yield* Lease.currentOf("x", { kind: "lock" }))
          assert.strictEqual(lock.kind, "lock")
          assert.strictEqual(lock.token, outer.token)
          assert.isTrue(Option.isNone(yield* Lease.currentOf("x", { kind: "readWriteLock" })))
        }))
      })))))
})

layer(TestServer.layer, live)("grants", (it) => {
  it.effect("of thousands in one step are a few events, and bounded work a call", () =>
    several(2, ([one, two], namespace, server) =>
      Effect.gen(function*() {
        const readers = 3000
        const writer = yield* onNode(one!)(Effect.gen(function*() {
          const leave = yield* Deferred.make<void>()
          const inside = yield* Deferred.make<void>()
          const fiber = yield* Effect.forkDetach(
            ReadWriteLock.withWriteLock(Effect.andThen(Deferred.succeed(inside, undefined), Deferred.await(leave)), "a")
          )
          yield* Deferred.await(inside)
          return { leave: Deferred.succeed(leave, undefined), fiber }
        }))
        let together = 0
        const all = yield* Deferred.make<void>()
        const reading = yield* Effect.forkDetach(
          onNode(two!)(Effect.forEach(
            Array.from({ length: readers }),
            () =>
              ReadWriteLock.withReadLock(
                Effect.suspend(() => {
                  if (++together === readers) Deferred.doneUnsafe(all, Exit.void)
                  return Deferred.await(all)
                }),
                "a"
              ),
            { concurrency: "unbounded", discard: true }
          ))
        )
        yield* waits(server, namespace, "readWriteLock:a", readers)
        const before = yield* postsOf(server, namespace)
        yield* writer.leave
        yield* Fiber.join(reading)
        assert.strictEqual(together, readers)
        // At most 256 grants a call, and all of them in one event.
        const posts = (yield* postsOf(server, namespace)) - before
        assert.isAtLeast(posts, Math.floor(readers / 256))
        assert.isBelow(posts, 40)
        yield* Fiber.join(writer.fiber)
      })))

  it.effect("of many short queues in one step are bounded work a call, too", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      const { beside, mail, open, sendAll } = actor(redis, freshNamespace(), "semaphore:0")
      const semaphores = Array.from({ length: 200 }, (_, at) => beside(`semaphore:${at}`))
      yield* Effect.promise(async () => {
        await open("a")
        await open("b")
        const all = (session: string, verb: string, args: (at: number) => ReadonlyArray<string | number>) =>
          sendAll(session, semaphores.map(({ key }, at) => [verb, args(at), key]))
        await all("a", "semaphore.take", (at) => [`a${at}`, 3, 3, "1"])
        for (const one of [1, 2, 3]) await all("b", "semaphore.take", (at) => [`b${one}-${at}`, 1, 3, "1"])
        await all("a", "semaphore.release", (at) => [`a${at}`])
        const granted = async () => (await mail("b")).filter(([tag]) => tag === "granted").length
        const atOnce = await granted()
        // The first one of each queue, and 256 others.
        assert.isAtLeast(atOnce, 400)
        assert.isAtMost(atOnce, 456)
        for (const semaphore of semaphores) await semaphore.ring()
        assert.strictEqual(await granted(), 600)
      })
    }))
})

/** How many events all mailboxes have had. */
const postsOf = (server: Server, namespace: string) =>
  Effect.gen(function*() {
    const keys = (yield* server.cli("KEYS", `{${namespace}:*:mail:*`)).split("\n").filter((key) => key !== "")
    let posts = 0
    for (const key of keys) {
      const lines = (yield* server.cli("XINFO", "STREAM", key)).split("\n")
      posts += Number(lines[lines.indexOf("entries-added") + 1])
    }
    return posts
  })

// What would take seconds or hours takes a tenth of that.
const hurried = {
  ...liveIo,
  after: (millis: number, f: () => void) => liveIo.after(millis > 2000 ? millis / 10 : millis, f)
}

layer(TestServer.layer, live)("a lost event", (it) => {
  it.effect("is noticed by its number, and what was missed is asked for", () =>
    several(2, ([one, two], namespace, server) =>
      Effect.gen(function*() {
        const held = yield* onNode(one!)(holding("a"))
        const waiting = yield* Effect.forkDetach(onNode(two!)(Lock.withLock(Effect.succeed("entered"), "a")))
        yield* waits(server, namespace, "lock:a", 1)
        // The mailbox vanishes: the grant is posted into nothing.
        const [session] = yield* sessionsOf(two!)
        yield* server.cli("DEL", `{${namespace}:00}:mail:${session!.id}`)
        yield* held.leave
        const { result } = yield* within(Fiber.join(waiting), 1500, "the grant")
        assert.strictEqual(result, "entered")
      }), { lease: "1500 millis", margin: "300 millis" }))

  it.effect("is noticed within half a minute, however long the lease is", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      yield* Effect.scoped(Effect.gen(function*() {
        const options = { namespace, partitions: 1, lease: "12 hours" } as const
        const one = yield* node(server.url, options)
        const two = yield* Effect.provideService(node(server.url, options), CurrentIo, hurried)
        const held = yield* onNode(one)(holding("a"))
        const waiting = yield* Effect.forkDetach(onNode(two)(Lock.withLock(Effect.succeed("entered"), "a")))
        yield* waits(server, namespace, "lock:a", 1)
        const [session] = yield* sessionsOf(two)
        yield* server.cli("DEL", `{${namespace}:00}:mail:${session!.id}`)
        yield* held.leave
        yield* within(Fiber.join(waiting), 3000, "the grant")
      }))
      yield* assertEmpty(server, namespace)
    }))

  it.effect("costs nothing while nothing is lost: no request for each waiter", () =>
    several(2, ([one, two], namespace, server) =>
      Effect.gen(function*() {
        const held = yield* onNode(one!)(holding("a"))
        const count = 500
        const waiting = yield* Effect.forkDetach(
          onNode(two!)(Effect.forEach(
            Array.from({ length: count }),
            () => Lock.withLock(Effect.void, "a"),
            { concurrency: "unbounded", discard: true }
          ))
        )
        yield* waits(server, namespace, "lock:a", count)
        yield* server.cli("CONFIG", "RESETSTAT")
        // Two leases.
        yield* realSleep("4 seconds")
        const stats = yield* server.cli("INFO", "commandstats")
        // A waiter that asks again reads at least its lock.
        const reads = [...stats.matchAll(/cmdstat_hm?get:calls=(\d+)/g)].map(([, calls]) => Number(calls))
        assert.isBelow(reads.reduce((sum, calls) => sum + calls, 0), count)
        yield* held.leave
        yield* Fiber.join(waiting)
      }), { lease: "2 seconds", margin: "400 millis" }))
})

const sessionsOf = (context: Node) => Context.get(context, Coordinator.Coordinator).sessions

layer(TestServer.layer, live)("a session that is refused", (it) => {
  it.effect("is opened within seconds when it is not refused any more, however long the lease is", () =>
    Effect.gen(function*() {
      const server = yield* standalone()
      const namespace = freshNamespace()
      yield* Effect.scoped(Effect.gen(function*() {
        const context = yield* Effect.provideService(
          node(server.url, { namespace, partitions: 1, lease: "12 hours" }),
          CurrentIo,
          hurried
        )
        yield* onNode(context)(Effect.scoped(Effect.gen(function*() {
          yield* Semaphore.make({ name: "pool", permits: 2 })
          const { id } = (yield* sessionsOf(context))[0]!
          yield* server.cli("ACL", "SETUSER", "default", "-xadd")
          yield* forget(server, namespace, id)
          const { reason } = yield* Effect.flip(Lock.withLock(Effect.void, "a"))
          assert.strictEqual(reason._tag, "MissingPermission", reason.message)
          yield* server.cli("ACL", "SETUSER", "default", "+xadd")
          yield* eventually(Effect.map(sessionsOf(context), ([session]) => session!.state === "open"), {
            timeout: "3 seconds",
            message: "the session is open"
          })
        })))
      }))
      yield* assertEmpty(server, namespace)
    }).pipe(Effect.scoped))
})

layer(TestServer.layer, live)("questions", (it) => {
  const semaphore = (permits: number) => Semaphore.make({ name: "a", permits })
  const jobs = Queue.make({ name: "jobs", payload: Schema.Number, retention: "1 second" })
  const topic = Topic.make({ name: "events", schema: Schema.String })
  const working = Effect.flatMap(jobs, (queue) => Effect.andThen(queue.offer(1, { id: "one" }), queue.take()))
  /** What a killed process has held, what is asked then, and the answer. */
  const afterDeath: {
    readonly [question: string]: readonly [
      hold: Asked<unknown, unknown>,
      ask: Asked<unknown, unknown>,
      answer: unknown
    ]
  } = {
    "withLockIfAvailable": [Lock.acquire("a"), Lock.withLockIfAvailable(Effect.succeed("in"), "a"), Option.some("in")],
    "holder": [Lock.acquire("a"), Lock.holder("a"), Option.none()],
    "withWriteLockIfAvailable": [
      ReadWriteLock.acquireRead("a"),
      ReadWriteLock.withWriteLockIfAvailable(Effect.succeed("in"), "a"),
      Option.some("in")
    ],
    "the upgrade of a reader": [
      ReadWriteLock.acquireRead("a"),
      ReadWriteLock.withReadLock(ReadWriteLock.withWriteLock(Effect.succeed("in"), "a"), "a"),
      "in"
    ],
    "available": [
      Effect.flatMap(semaphore(3), (it) => it.takeScoped(2)),
      Effect.flatMap(semaphore(3), ({ available }) => available),
      3
    ],
    "the state of a job": [
      working,
      Effect.flatMap(
        jobs,
        (queue) => Effect.tap(Effect.map(queue.job("one").status, Option.map(({ state }) => state)), queue.obliterate)
      ),
      Option.some("waiting")
    ],
    "the active jobs": [
      working,
      Effect.flatMap(jobs, (queue) => Effect.tap(Stream.runCount(queue.jobs({ state: "active" })), queue.obliterate)),
      0
    ],
    "another number of permits": [semaphore(3), Effect.flatMap(semaphore(5), ({ permits }) => permits), 5],
    "the members of a group": [
      Effect.gen(function*() {
        const [it, given] = [yield* topic, yield* Deferred.make<void>()]
        yield* it.publish("a")
        const handler = () => Effect.andThen(Deferred.succeed(given, undefined), Effect.never)
        yield* Effect.forkScoped(it.run(handler, { group: "g", from: "beginning" }))
        yield* Deferred.await(given)
      }),
      Effect.flatMap(topic, (it) => Effect.tap(it.forget("g"), it.purge)),
      true
    ]
  }
  for (const [question, [hold, ask, answer]] of Object.entries(afterDeath)) {
    it.effect(`do not count a holder whose lease ended long ago: ${question}`, () =>
      several(1, ([asker], namespace, server) =>
        Effect.gen(function*() {
          yield* departed(server, namespace, 1, (context) => on(context, hold))
          // The heartbeats of the asker are too slow to reap the holder: the question has to.
          assert.deepStrictEqual(yield* on(asker!, ask), answer)
        }), { lease: "30 seconds" }))
  }

  it.effect("do not count a holder whose lease ended long ago, also of a process that has just started", () =>
    several(0, (_, namespace, server) =>
      Effect.gen(function*() {
        yield* departed(server, namespace, 0, (context) => on(context, Lock.acquire("a")))
        const asker = yield* node(server.url, { namespace, partitions: 1 })
        assert.isTrue(Option.isSome(yield* on(asker, Lock.withLockIfAvailable(Effect.void, "a"))))
      })))

  it.effect("do not count one that is alive as ended", () =>
    several(2, ([one, two]) =>
      Effect.gen(function*() {
        const held = yield* onNode(one!)(holding("a"))
        assert.isTrue(Option.isNone(yield* onNode(two!)(Lock.withLockIfAvailable(Effect.void, "a"))))
        const holder = Option.getOrThrow(yield* onNode(two!)(Lock.holder("a")))
        assert.strictEqual(holder.node, "node0")
        assert.strictEqual(holder.token, held.lease.token)
        assert.deepStrictEqual(yield* onNode(two!)(Lock.waiting("a")), [])
        yield* held.leave
      })))

  it.effect("have a deadline also if Redis goes away while an expired holder is reaped for them", () =>
    Effect.forEach([
      Effect.asVoid(Lock.holder("a")),
      Effect.asVoid(Lock.withLockIfAvailable(Effect.void, "a"))
    ], (question) =>
      behindLine(({ context, line, namespace, server }) =>
        Effect.gen(function*() {
          yield* onNode(context)(Lock.withLock(Effect.void, "b"))
          yield* departed(server, namespace, 1, (context) => on(context, Lock.acquire("a")))
          const reaping = yield* line.hold(({ args }) => args.includes("session.owned"))
          const asking = yield* Effect.forkChild(within(Effect.flip(onNode(context)(question)), 4000, "the failure"))
          yield* reaping.request
          yield* line.blackhole
          const { result } = yield* Fiber.join(asking)
          assert.include(["Timeout", "NotConnected", "ConnectionLost"], result.reason._tag)
          yield* line.pass
          yield* line.closeAll
          yield* onNode(context)(Lock.withLock(Effect.void, "a"))
        }), { lease: "30 seconds", requestTimeout: "500 millis" })))

  it.effect("of every module have a deadline while Redis is away", () =>
    behindLine(({ context, line }) =>
      onNode(context)(Effect.scoped(Effect.gen(function*() {
        const schema = Schema.String
        const barrier = yield* Barrier.make({ name: "a", parties: 2 })
        const doubleBarrier = yield* DoubleBarrier.make({ name: "a", parties: 2 })
        const rendezvous = yield* Rendezvous.make({ name: "a", schema })
        const tasks = yield* TaskGroup.make({ name: "a", result: schema, timeToLive: "1 second" })
        const topic = yield* Topic.make({ name: "a", schema })
        const queue = yield* Queue.make({ name: "a", payload: schema })
        const ref = yield* SharedRef.make({ name: "a", schema, initial: "" })
        const counter = yield* Counter.make({ name: "a" })
        yield* line.blackhole
        yield* assertUnanswered([
          onNode(context)(Lock.waiting("a")),
          onNode(context)(ReadWriteLock.holders("a")),
          onNode(context)(ReadWriteLock.waiting("a")),
          barrier.arrived,
          barrier.reset,
          doubleBarrier.inside,
          doubleBarrier.queued,
          rendezvous.present,
          tasks.snapshot,
          tasks.shards,
          tasks.results,
          tasks.reset,
          topic.publish("a"),
          topic.publishAll(["a", "b"]),
          topic.state,
          topic.purge,
          topic.forget("a"),
          queue.offer("a"),
          queue.offerAll(["a", "b"]),
          queue.state,
          queue.pause,
          queue.resume,
          queue.history,
          queue.clean("1 second"),
          queue.job("a").status,
          queue.job("a").cancel,
          Stream.runDrain(queue.jobs({ state: "active" })),
          ref.get,
          ref.set("a"),
          ref.update((value) => value),
          ref.delete,
          counter.get,
          counter.add(1),
          counter.reset
        ])
        yield* line.pass
        yield* line.closeAll
        // What was sent may have been executed.
        yield* eventually(Effect.isSuccess(queue.obliterate))
        yield* Effect.all([tasks.reset, topic.purge, ref.delete, counter.reset])
      }))), { lease: "30 seconds", requestTimeout: "300 millis" }))

  it.effect("have a deadline while Redis is away, and waits say so", () =>
    behindLine(({ context, line, namespace, server }) =>
      Effect.gen(function*() {
        yield* onNode(context)(Effect.scoped(Effect.gen(function*() {
          const semaphore = yield* Semaphore.make({ name: "s", permits: 3 })
          yield* line.blackhole
          const asked = {
            withLockIfAvailable: Lock.withLockIfAvailable(Effect.void, "a"),
            available: semaphore.available,
            resize: semaphore.resize(4),
            make: Semaphore.make({ name: "t", permits: 1 }),
            holder: Lock.holder("a")
          }
          for (const [name, question] of Object.entries(asked)) {
            const { result } = yield* within(
              Effect.flip(
                Effect.scoped(
                  question as Effect.Effect<
                    unknown,
                    Lock.LockError | Semaphore.SemaphoreError,
                    Coordinator.Coordinator
                  >
                )
              ),
              1500,
              name
            )
            assert.include(["Timeout", "NotConnected", "ConnectionLost"], result.reason._tag, name)
            const [kind, of] = name.startsWith("withLock") || name === "holder"
              ? ["lock", "a"]
              : ["semaphore", name === "make" ? "t" : "s"]
            assert.deepInclude(result.reason, { kind, name: of, namespace }, name)
            assert.include(result.reason.message, `${kind} "${of}" of namespace "${namespace}"`)
          }
          const waited = yield* Effect.flip(Lock.withLock(Effect.void, "a", { wait: "300 millis" }))
          assert.isTrue(waited.reason._tag === "WaitTimeout" && waited.reason.away, String(waited))
          // Without a limit it waits until Redis is back.
          const patient = yield* Effect.forkChild(Lock.withLock(Effect.succeed("in"), "b"))
          yield* realSleep("1 second")
          assert.isUndefined(patient.pollUnsafe())
          yield* line.pass
          yield* line.closeAll
          assert.strictEqual(yield* Fiber.join(patient), "in")
          const held = yield* holding("c")
          const present = yield* Effect.flip(
            Effect.provideService(Lock.withLock(Effect.void, "c", { wait: "200 millis" }), CurrentIo, liveIo).pipe(
              onNode(context)
            )
          )
          assert.isTrue(present.reason._tag === "WaitTimeout" && !present.reason.away, String(present))
          // It is back long before the end of this wait.
          const waiting = yield* Effect.forkChild(
            onNode(context)(Effect.flip(Lock.withLock(Effect.void, "c", { wait: "3 seconds" })))
          )
          yield* waits(server, namespace, "lock:c", 1)
          yield* line.blackhole
          yield* Effect.flip(Lock.withLockIfAvailable(Effect.void, "a"))
          yield* line.pass
          yield* line.closeAll
          yield* eventually(Effect.as(Lock.withLockIfAvailable(Effect.void, "a"), true))
          const { reason } = yield* Fiber.join(waiting)
          assert.isTrue(reason._tag === "WaitTimeout" && reason.away, reason.message)
          // Nothing is asked meanwhile: the connection alone tells.
          const quiet = yield* Effect.forkChild(
            onNode(context)(Effect.flip(Lock.withLock(Effect.void, "c", { wait: "1 second" })))
          )
          yield* waits(server, namespace, "lock:c", 1)
          yield* line.closeAll
          const disconnected = yield* Fiber.join(quiet)
          assert.isTrue(disconnected.reason._tag === "WaitTimeout" && disconnected.reason.away, disconnected.message)
          yield* held.leave
        })))
      }), { lease: "30 seconds", requestTimeout: "500 millis" }))
})

layer(TestServer.layer, live)("questions without a session", (it) => {
  it.effect("have a deadline too, while Redis is away", () =>
    behindLine(({ context, line }) =>
      Effect.gen(function*() {
        yield* line.refuse
        yield* line.closeAll
        yield* eventually(Effect.map(sessionsOf(context), ([session]) => session!.state === "opening"))
        const signal = yield* onNode(context)(Signal.make({ name: "a" }))
        yield* assertUnanswered([
          onNode(context)(Lock.withLockIfAvailable(Effect.void, "a")),
          onNode(context)(Effect.scoped(Semaphore.make({ name: "a", permits: 1 }))),
          onNode(context)(Lock.holder("a")),
          signal.set
        ])
        yield* line.pass
        yield* onNode(context)(Lock.withLock(Effect.void, "a"))
      }), short))
})

layer(TestServer.layer, live)("a kind that this release does not know", (it) => {
  it.effect("is set aside, and blocks nothing", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const redis = yield* client(server)
      const namespace = freshNamespace()
      const prefix = `{${namespace}:00}:`
      const { ask, end, send } = actor(redis, namespace, "lock:a")
      yield* Effect.promise(async () => {
        // More than one answer names, all of them before the one that holds the lock.
        for (let at = 0; at < 40; at++) {
          await ask(`S${at}`, "session.open", [`S${at}`, "", 60_000, protocol, 1, "{}", "", -1])
          await redis.sadd(`${prefix}own:S${at}`, `x:novel:thing${at}`)
        }
        await ask("T", "session.open", ["T", "", 60_000, protocol, 1, "{}", "", -1])
        await send("T", "lock.take", ["h", "1"])
        // Far more than are looked at, at random, before the one that can be released.
        await redis.sadd(`${prefix}own:T`, ...Array.from({ length: 50_000 }, (_, at) => `x:novel:other${at}`))
        for (let at = 0; at < 40; at++) await end(`S${at}`)
        await end("T")
        await redis.zadd(`${prefix}due`, 0, `@novel:alarm`)
      })
      yield* Effect.scoped(Effect.gen(function*() {
        const context = yield* node(server.url, { namespace, partitions: 1, ...short })
        const { result } = yield* within(onNode(context)(Lock.withLock(Effect.succeed("in"), "a")), 15_000, "the lock")
        assert.strictEqual(result, "in")
        const held = yield* onNode(context)(holding("b"))
        const waiting = yield* Effect.forkChild(onNode(context)(Lock.withLock(Effect.void, "b")))
        yield* waits(server, namespace, "lock:b", 1)
        yield* eventually(Effect.map(
          Effect.promise(() => redis.zcount(`${prefix}due`, 0, Date.now())),
          (due) => due === 0
        ))
        yield* server.cli("CONFIG", "RESETSTAT")
        yield* realSleep("1 second")
        const stats = yield* server.cli("INFO", "commandstats")
        assert.isBelow(Number(/cmdstat_fcall:calls=(\d+)/.exec(stats)?.[1] ?? 0), 20)
        yield* held.leave
        yield* Fiber.join(waiting)
        // Nothing of the unknown kind is dropped.
        assert.strictEqual(yield* Effect.promise(() => redis.sismember(`${prefix}own:S7`, "x:novel:thing7")), 1)
      }))
    }).pipe(Effect.scoped))
})

const opened = (ask: ReturnType<typeof actor>["ask"], id: string, lease: number) =>
  ask(id, "session.open", [id, "", lease, protocol, 1, "{}", "", -1])

layer(TestServer.layer, live)("a question", (it) => {
  it.effect("does not count a holder that died with its whole fleet, behind alarms that are due", () =>
    several(1, ([asker], namespace, server) =>
      Effect.gen(function*() {
        const redis = yield* client(server)
        const { ask, send } = actor(redis, namespace, "lock:a")
        const due = `{${namespace}:00}:due`
        const alarms = Array.from({ length: 40 }, (_, at) => `@novel:alarm${at}`)
        yield* onNode(asker!)(Lock.withLock(Effect.void, "a"))
        yield* Effect.promise(async () => {
          // The holder is the last one that is due.
          for (let at = 0; at < 100; at++) await opened(ask, `S${at}`, 100)
          await opened(ask, "T", 200)
          await send("T", "lock.take", ["h", "1"], 200)
          for (const alarm of alarms) await redis.zadd(due, 0, alarm)
        })
        yield* eventually(Effect.map(
          Effect.promise(async () => Number(await redis.zscore(due, "T"))),
          (deadline) => deadline < Date.now()
        ))
        const found = yield* onNode(asker!)(Lock.withLockIfAvailable(Effect.succeed("in"), "a"))
        assert.deepStrictEqual(found, Option.some("in"))
        yield* Effect.promise(() => redis.zrem(due, ...alarms))
      }), { lease: "30 seconds" }))

  it.effect("looks at a bounded part of what is due", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const redis = yield* client(server)
      const namespace = freshNamespace()
      const { ask, send } = actor(redis, namespace, "lock:a")
      const due = `{${namespace}:00}:due`
      const calls = async () =>
        Number(/cmdstat_zrangebyscore:calls=(\d+)/.exec(await redis.info("commandstats"))?.[1] ?? 0)
      const overdue = (count: number) =>
        redis.zadd(due, ...Array.from({ length: count }, (_, at) => [1, `@novel:alarm${at}`]).flat())
      yield* Effect.promise(async () => {
        await opened(ask, "S", 60_000)
        await opened(ask, "T", 60_000)
        await send("S", "lock.take", ["h", "1"])
        // Alarms alone make no answer wrong.
        await overdue(500)
        assert.deepStrictEqual(await send("T", "lock.take", ["i", "0"]), ["busy"])
        // Behind as many as these there may be a dead session: they are rung first.
        await overdue(20_000)
        const before = await calls()
        assert.deepStrictEqual(await send("T", "lock.take", ["j", "0"]), ["stale"])
        assert.strictEqual(await calls() - before, 1)
      })
    }).pipe(Effect.scoped))
})

layer(TestServer.layer, live)("what cannot be reaped or rung", (it) => {
  it.effect("is set aside, and blocks neither its session nor others", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const redis = yield* client(server)
      const namespace = freshNamespace()
      const { ask, end, send } = actor(redis, namespace, "lock:a")
      const prefix = `{${namespace}:00}:`
      yield* Effect.promise(async () => {
        for (let at = 0; at < 40; at++) {
          await opened(ask, `S${at}`, 60_000)
          await send(`S${at}`, "semaphore.take", ["h", 1, 1, 1], 60_000, "", [`${prefix}semaphore:broken${at}`])
          await send(`S${at}`, "lock.take", ["i", "1"], 60_000, "", [`${prefix}lock:${at}`])
          await redis.set(`${prefix}semaphore:broken${at}`, "not a hash")
        }
        for (let at = 0; at < 40; at++) await end(`S${at}`)
      })
      const context = yield* node(server.url, { namespace, partitions: 1 })
      yield* Effect.forEach(
        Array.from({ length: 40 }, (_, at) => at),
        (at) => within(onNode(context)(Lock.withLock(Effect.void, `${at}`)), 15_000, `lock ${at}`),
        { concurrency: "unbounded", discard: true }
      )
      // A minute later it is tried again.
      const due = Effect.promise(() => redis.zrangebyscore(`${prefix}due`, 0, Date.now() + 30_000))
      yield* eventually(Effect.map(due, (members) => !members.some((member) => member.startsWith("S"))))
      assert.strictEqual(yield* Effect.promise(() => redis.zcard(`${prefix}due`)), 41)
    }).pipe(Effect.scoped))

  it.effect("fails what is asked about it, by its name", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const redis = yield* client(server)
      const namespace = freshNamespace()
      const context = yield* node(server.url, { namespace, partitions: 1 })
      yield* Effect.promise(() => redis.set(`{${namespace}:00}:readWriteLock:a`, "not a hash"))
      for (const asked of [ReadWriteLock.withWriteLock(Effect.void, "a"), ReadWriteLock.holders("a")]) {
        const { reason } = yield* Effect.flip(onNode(context)(asked))
        assert.deepInclude(reason, { _tag: "ActorDefect", kind: "readWriteLock", name: "a", namespace })
        assert.include(reason.message, `about readWriteLock "a" of namespace "${namespace}"`)
      }
      yield* Effect.promise(() => redis.del(`{${namespace}:00}:readWriteLock:a`))
    }).pipe(Effect.scoped))

  it.effect("rings again later if its alarm has failed", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      const namespace = freshNamespace()
      const { key, ring } = actor(redis, namespace, "queue:a")
      const due = `{${namespace}:00}:due`
      yield* Effect.promise(async () => {
        await redis.set(key, "not a hash")
        await redis.zadd(due, 0, "@queue:a")
        assert.deepStrictEqual(await ring(), ["failed", "defect"])
        assert.closeTo(Number(await redis.zscore(due, "@queue:a")), Date.now() + 60_000, 10_000)
      })
    }).pipe(Effect.scoped))
})

layer(TestServer.layer, live)("a namespace", (it) => {
  it.effect("adopts other settings when no process is alive in it", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      const use = (partitions: number) =>
        Effect.scoped(Effect.flatMap(node(server.url, { namespace, partitions }), (context) =>
          onNode(context)(Effect.forEach(
            Array.from({ length: 20 }, (_, at) => `k${at}`),
            (key) => Lock.withLock(Effect.void, key)
          ))))
      yield* use(8)
      yield* use(3)
      yield* use(16)
      yield* Effect.scoped(Effect.gen(function*() {
        yield* node(server.url, { namespace, partitions: 4 })
        const error = yield* Effect.flip(Effect.scoped(node(server.url, { namespace, partitions: 5 })))
        assert.strictEqual((error as Coordinator.CoordinatorError).reason._tag, "Incompatible")
      }))
      // Left by an earlier release, and by processes that were killed since.
      yield* server.cli("HSET", `{${namespace}:00}:sessions`, "protocol", 1, "sOLD", "unreadable")
      // As long as a record of this release, in which it would look alive.
      yield* server.cli(
        "EVAL",
        "redis.call('HSET', KEYS[1], 'sOLDER', struct.pack('<Bddddd', 1, 0, 1e15, 0, 0, 0))",
        1,
        `{${namespace}:00}:sessions`
      )
      yield* server.cli("ZADD", `{${namespace}:00}:due`, 1, "OLD", 1, "OLDER")
      yield* use(16)
      yield* Effect.scoped(Effect.flatMap(node(server.url, { namespace }), (context) =>
        Effect.andThen(
          onNode(context)(Lock.withLockIfAvailable(Effect.void, "k0")),
          eventually(Effect.map(
            server.cli("ZCARD", `{${namespace}:00}:due`),
            (left) =>
              Number(left) <= 1
          ))
        )))
      yield* assertEmpty(server, namespace)
    }))

  it.effect("loses nothing of a session whose record another release has written", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      const { beside, due, keys, open, reap, send } = actor(redis, freshNamespace(), "lock:a")
      const other = beside("semaphore:s")
      yield* Effect.promise(async () => {
        const [sessions, dues] = keys("") as [string, string]
        await open("a")
        await send("a", "lock.take", ["1", ""])
        await other.send("a", "semaphore.take", ["2", 1, 1, ""])
        // Its version is another one.
        const record = (await redis.hgetBuffer(sessions, "sa"))!
        record[0] = 99
        await redis.hset(sessions, "sa", record)
        await open("b")
        // Its own release has renewed it since a coordinator of this one was told when it would end.
        assert.deepStrictEqual(await due("a"), [["renewed", 0, []], ["alive"]])
        await redis.zadd(dues, 0, "a")
        const [renewed, owned] = await due("a")
        assert.deepStrictEqual(renewed, ["renewed", 0, ["a"]])
        assert.sameMembers(owned![1], ["1:lock:a", "2:semaphore:s"])
        assert.strictEqual(await reap("a"), "forgotten")
        assert.strictEqual((await send("b", "lock.take", ["3", ""]))[0], "granted")
        assert.strictEqual((await other.send("b", "semaphore.take", ["4", 1, 1, ""]))[0], "granted")
      })
    }))

  it.effect("is not in use for a dead session that is set aside", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const redis = yield* client(server)
      const namespace = freshNamespace()
      const { ask, end } = actor(redis, namespace, "lock:a")
      yield* Effect.promise(async () => {
        await opened(ask, "S", 60_000)
        await redis.sadd(`{${namespace}:00}:own:S`, "x:novel:thing")
        await end("S")
        assert.deepStrictEqual(await ask("S", "session.owned", ["S"]), ["aside"])
      })
      const context = yield* node(server.url, { namespace, partitions: 3 })
      yield* onNode(context)(Lock.withLock(Effect.void, "a"))
    }).pipe(Effect.scoped))

  // Of the first half of 16 partitions under 8, and of the second half under 16.
  const apart = Array.from({ length: 100 }, (_, at) => `job${at}`).find((name) => partitionOf(name, 16) >= 8)!
  const locking = Lock.withLock(Effect.void, apart, { wait: "300 millis" })

  /** A coordinator with 8 partitions holds the lock, and the one with 16 is refused; when that is over, it is not. */
  const excluded = (server: Server, namespace: string, context: Node) =>
    Effect.gen(function*() {
      yield* Effect.scoped(Effect.gen(function*() {
        const other = yield* eventually(node(server.url, { namespace, partitions: 8, ...short }))
        const held = yield* onNode(other)(holding(apart))
        yield* onNode(context)(Effect.gen(function*() {
          let [entered, refused] = [0, 0]
          yield* eventually(Effect.gen(function*() {
            const exit = yield* Effect.exit(locking)
            if (Exit.isSuccess(exit)) entered++
            else if (String(exit.cause).includes("is in use with protocol")) refused++
            return entered > 0 || refused > 10
          }))
          assert.deepStrictEqual([entered, refused], [0, 11])
          const { reason } = yield* Effect.flip(Lock.holder(apart))
          assert.deepInclude(reason, { _tag: "Incompatible", partitions: 8, expectedPartitions: 16 })
        }))
        assert.isTrue(yield* held.lease.isHeld)
        yield* held.leave
        yield* onNode(other)(Lock.withLock(Effect.void, apart))
      }))
      yield* eventually(onNode(context)(locking))
    })

  it.effect("is not divided in two ways when a process goes on that was cut off for longer than its lease", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      yield* Effect.scoped(Effect.gen(function*() {
        const line = yield* proxy(server)
        const context = yield* node(line.url, { namespace, partitions: 16, ...short })
        yield* onNode(context)(locking)
        yield* Effect.andThen(line.refuse, line.closeAll)
        yield* sessionsExpired(server, namespace)
        yield* Effect.forkChild(Effect.andThen(realSleep("500 millis"), line.pass))
        yield* excluded(server, namespace, context)
      }))
      yield* assertEmpty(server, namespace)
    }))

  it.effect("is not divided in two ways when Redis loses its data", () =>
    Effect.gen(function*() {
      const server = yield* standalone()
      const namespace = freshNamespace()
      yield* Effect.scoped(Effect.gen(function*() {
        const context = yield* node(server.url, { namespace, partitions: 16, lease: "30 seconds" })
        yield* onNode(context)(locking)
        yield* server.cli("FLUSHALL")
        yield* excluded(server, namespace, context)
      }))
      yield* assertEmpty(server, namespace)
    }).pipe(Effect.scoped))

  it.effect("is not divided anew while a session is alive in another partition", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      yield* Effect.scoped(Effect.gen(function*() {
        const context = yield* node(server.url, { namespace, partitions: 16, lease: "1 minute" })
        const held = yield* onNode(context)(holding(apart))
        const [first] = yield* sessionsOf(context)
        yield* forget(server, namespace, first!.id)
        yield* server.cli("ZREM", `{${namespace}:00}:due`, first!.id!)
        const error = yield* Effect.flip(Effect.scoped(node(server.url, { namespace, partitions: 8 })))
        const { reason } = error as Coordinator.CoordinatorError
        assert.deepInclude(reason, { _tag: "Incompatible", partitions: 16, expectedPartitions: 8 })
        assert.isTrue(yield* held.lease.isHeld)
        yield* held.leave
      }))
      yield* assertEmpty(server, namespace)
    }))

  it.effect("loses the holds of a process when another division is found in it", () =>
    Effect.gen(function*() {
      const server = yield* standalone()
      const namespace = freshNamespace()
      yield* Effect.scoped(Effect.gen(function*() {
        const context = yield* node(server.url, { namespace, partitions: 16, lease: "1 minute", margin: "300 millis" })
        const held = yield* onNode(context)(holding(apart))
        // Only the partition that decides has lost its data.
        const keys = (yield* server.cli("KEYS", `{${namespace}:00}:*`)).split("\n")
        yield* server.cli("DEL", ...keys)
        const other = yield* node(server.url, { namespace, partitions: 8, ...short })
        yield* server.cli("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        const { result } = yield* within(Effect.flip(held.lease.lost), 2000, "the loss")
        assert.strictEqual(result.reason, "rolledBack")
        yield* onNode(other)(locking)
      }))
      yield* assertEmpty(server, namespace)
    }).pipe(Effect.scoped))

  it.effect("is not adopted after another session was opened, nor entered by a request that comes late", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      const { ask, end, reap } = actor(redis, freshNamespace(), "lock:a")
      const open = (id: string, partitions: number, vacant = -1) =>
        ask(id, "session.open", [id, "", 60_000, protocol, partitions, "{}", "", vacant])
      const settle = (partitions: number) => ask("", "session.settle", [protocol, partitions])
      yield* Effect.promise(async () => {
        assert.strictEqual((await open("A", 16))[0], "opened")
        assert.deepStrictEqual(await settle(8), ["mismatch", protocol, 16])
        await end("A", true)
        assert.deepStrictEqual(await open("B", 8), ["vacant", 1, 16])
        // One of the former settings comes and goes before all partitions have adopted the others.
        assert.strictEqual((await open("C", 16))[0], "opened")
        assert.deepStrictEqual(await open("B", 8, 1), ["mismatch", protocol, 16])
        await end("C", true)
        assert.deepStrictEqual(await open("B", 8, 1), ["vacant", 2, 16])
        assert.strictEqual((await open("B", 8, 2))[0], "opened")
        await end("B", true)
        // A partition that has adopted settings refuses coordinators with others.
        assert.deepStrictEqual(await settle(16), ["settled"])
        assert.deepStrictEqual(await open("D", 8), ["vacant", 3, 16])
        for (const id of ["A", "B", "C"]) await reap(id)
      })
    }).pipe(Effect.scoped))

  it.effect("removes the function libraries that no process calls any more", () =>
    Effect.gen(function*() {
      const server = yield* standalone()
      const namespace = freshNamespace()
      const library = (name: string) =>
        `#!lua name=${name}\nredis.register_function('${name}_f', function() return 1 end)`
      const libraries = Effect.map(server.cli("FUNCTION", "LIST"), (text) =>
        [...text.matchAll(/lockstep_\w+/g)].map(([name]) => name).filter((name) => /old/.test(name)))
      yield* Effect.scoped(node(server.url, { namespace }))
      for (const name of ["lockstep_1_old", "lockstep_1_older"]) {
        yield* server.cli("FUNCTION", "LOAD", library(name))
      }
      yield* server.cli("SET", `{${namespace}:00}:libraries`, "lockstep_1_old lockstep_1_older")
      // As after a day without processes.
      yield* server.cli("DEL", `{${namespace}:00}:sessions`, `{${namespace}:00}:due`)
      yield* Effect.scoped(Effect.gen(function*() {
        const context = yield* node(server.url, { namespace })
        yield* eventually(Effect.map(libraries, (found) =>
          found.length === 0))
        // One that a session alive has called stays.
        const [session] = yield* sessionsOf(context)
        for (const name of ["lockstep_1_old", "lockstep_1_older"]) {
          yield* server.cli("FUNCTION", "LOAD", library(name))
        }
        yield* server.cli("SET", `{${namespace}:00}:libraries`, "lockstep_1_old lockstep_1_older")
        yield* server.cli("HSET", `{${namespace}:00}:sessions`, `library/${session!.id}`, "lockstep_1_old")
        yield* node(server.url, { namespace })
        yield* eventually(Effect.map(libraries, (found) => !found.includes("lockstep_1_older")))
        assert.include(yield* libraries, "lockstep_1_old")
      }))
    }).pipe(Effect.scoped))

  it.effect("remembers a function library until it is removed", () =>
    Effect.gen(function*() {
      const server = yield* standalone()
      const namespace = freshNamespace()
      const name = "lockstep_1_old"
      const known = Effect.map(
        server.cli("GET", `{${namespace}:00}:libraries`),
        (names) => names.split(" ").includes(name)
      )
      const isLoaded = Effect.map(server.cli("FUNCTION", "LIST"), (text) => text.includes(name))
      yield* Effect.scoped(node(server.url, { namespace }))
      yield* server.cli(
        "FUNCTION",
        "LOAD",
        `#!lua name=${name}\nredis.register_function('${name}_f', function() return 1 end)`
      )
      yield* server.cli("SET", `{${namespace}:00}:libraries`, `${name} lockstep_1_gone`)
      yield* server.cli("ACL", "SETUSER", "default", "-function|delete")
      yield* Effect.scoped(node(server.url, { namespace }))
      assert.isTrue(yield* isLoaded)
      assert.isTrue(yield* known)
      yield* server.cli("ACL", "SETUSER", "default", "+function|delete")
      yield* Effect.scoped(Effect.gen(function*() {
        yield* node(server.url, { namespace })
        yield* eventually(Effect.map(isLoaded, (loaded) => !loaded))
        yield* eventually(Effect.map(known, (is) => !is))
      }))
      // Nor is there anything left to say of one that was deleted already.
      const names = yield* server.cli("GET", `{${namespace}:00}:libraries`)
      assert.notInclude(names, "lockstep_1_gone")
    }).pipe(Effect.scoped))
})

layer(TestServer.layer, live)("a lost session", (it) => {
  it.effect("leaves nothing of what programs give up that observe it at once", () =>
    several(1, ([context], namespace, server) =>
      onNode(context!)(Effect.scoped(Effect.gen(function*() {
        const names = Array.from({ length: 20 }, (_, at) => `own ${at}`)
        const begun = new Set<string>()
        const queue = yield* Queue.make({ name: "work", payload: Schema.String, retention: "1 second" })
        const handler = (name: string) =>
          Effect.suspend(() => {
            if (begun.has(name)) return Effect.void
            begun.add(name)
            return Lock.withLock(Effect.never, name)
          })
        yield* Effect.forkScoped(queue.run(handler, { concurrency: names.length }))
        yield* queue.offerAll(names)
        const held = Effect.map(
          Effect.forEach(names, (name) => Lock.holder(name)),
          (holders) => holders.filter(Option.isSome).length
        )
        yield* eventually(Effect.map(held, (count) => count === names.length))
        const { channel } = placeOf(spaceOf(yield* Coordinator.Coordinator), "lock", "own 0", "name")
        yield* forget(server, namespace, channel.session!.id)
        // The jobs come again, and take no locks.
        yield* eventually(Effect.map(queue.state, ({ completed }) => completed === names.length))
        yield* eventually(Effect.map(held, (count) => count === 0), { timeout: 5000 })
      }))), { lease: "1500 millis", margin: "300 millis" }))
})

layer(TestServer.layer, live)("a call", (it) => {
  it.effect("has as many requests as its coordinator allows, and costs no session", () =>
    several(1, ([context]) =>
      onNode(context!)(Effect.scoped(Effect.gen(function*() {
        yield* Lock.withLock(Effect.void, "a")
        const names = Array.from({ length: 4096 }, (_, at) => `many ${at}`)
        const leases = yield* Effect.forEach(names, (name) => Lock.acquire(name), { concurrency: "unbounded" })
        const held = yield* Effect.forEach(leases, ({ isHeld }) => isHeld)
        assert.isTrue(held.every((one) => one))
      }))), { batch: { maxRequests: 4096 } }))

  it.effect("grants nothing on a lease that has run out while a program before was granted something", () =>
    several(2, ([one, two], namespace, server) =>
      Effect.gen(function*() {
        const held = yield* onNode(one!)(holding("a"))
        const other = yield* onNode(one!)(holding("b"))
        // Both are granted by one event. The first one to be granted lets the event loop stand still for longer than the lease.
        const outcomes: Array<string> = []
        const waiting = (key: string) =>
          onNode(two!)(Effect.scoped(Effect.flatMap(Lock.acquire(key), ({ isHeld }) =>
            Effect.flatMap(isHeld, (isHeld) =>
              Effect.sync(() => {
                outcomes.push(`${isHeld}`)
                const until = performance.now() + 1600
                while (performance.now() < until);
              })))))
        const fibers = yield* Effect.forEach(["a", "b"], (key) =>
          Effect.forkDetach(waiting(key)))
        for (const key of ["a", "b"]) yield* waits(server, namespace, `lock:${key}`, 1)
        yield* Effect.all([held.leave, other.leave], { concurrency: "unbounded" })
        yield* Effect.forEach(fibers, Fiber.await)
        assert.isFalse(outcomes.includes("false"), outcomes.join())
      }), { lease: "1500 millis", margin: "300 millis" }))
})

layer(TestServer.layer, live)("a handler whose session is lost", (it) => {
  it.effect("has the margin to end before its job begins elsewhere", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const opened = Queue.make({ name: "work", payload: Schema.Number, retention: "1 second" })
        const running: Array<number> = []
        let [begun, ended] = [0, 0]
        const handler = () =>
          Effect.suspend(() => {
            running.push(begun - ended)
            const body = ++begun === 1 ? Effect.never : Effect.void
            return Effect.ensuring(body, Effect.andThen(realSleep("300 millis"), Effect.sync(() => ended++)))
          })
        const queue = yield* on(a!, opened)
        const other = yield* on(b!, opened)
        yield* Effect.forkScoped(queue.run(handler))
        yield* queue.offer(1)
        yield* eventually(Effect.sync(() => begun === 1))
        yield* Effect.forkScoped(other.run(handler))
        const { channel } = placeOf(spaceOf(Context.get(a!, Coordinator.Coordinator)), "lock", "a", "name")
        yield* forget(server, namespace, channel.session!.id)
        yield* Effect.ignore(on(a!, Lock.withLockIfAvailable(Effect.void, "to be told")))
        yield* eventually(Effect.map(other.state, ({ completed }) => completed === 1), { timeout: 10_000 })
        assert.deepStrictEqual(running, [0, 0])
      }), { lease: "30 seconds", margin: "1 second" }))
})

layer(TestServer.layer, live)("a callback that throws", (it) => {
  it.effect("costs no other request an answer, and the session goes on", () =>
    several(1, ([context]) =>
      Effect.gen(function*() {
        const { channel } = placeOf(spaceOf(Context.get(context!, Coordinator.Coordinator)), "lock", "a", "name")
        const session = channel.session
        const answered = yield* Effect.callback<number>((resume) => {
          let count = 0
          const counted = () => {
            if (++count === 2) resume(Effect.succeed(count))
          }
          const request = { verb: "session.wake", args: [] as [], fail: counted } as const
          channel.outbox.request({ ...request, settle: counted })
          channel.outbox.request({
            ...request,
            settle: () => {
              throw new Error("a bug")
            }
          })
          channel.outbox.request({ ...request, settle: counted })
        })
        assert.strictEqual(answered, 2)
        yield* onNode(context!)(Lock.withLock(Effect.void, "a"))
        assert.strictEqual(channel.session, session)
      })))

  it.effect("is as good as an answer that cannot be read: the batch fails, and the next one goes", () =>
    several(1, ([context]) =>
      Effect.gen(function*() {
        const place = placeOf(spaceOf(Context.get(context!, Coordinator.Coordinator)), "lock", "a", "name")
        const { kernel } = place.space
        const session = place.channel.session!
        let spoilt = 0
        const transport: Transport = Object.create(kernel.transport, {
          send: {
            value: (...[address, messages, header, timeout, caller]: Parameters<Transport["send"]>) =>
              kernel.transport.send(address, messages, header, timeout, {
                ...caller,
                resolve: (raw) => caller.resolve(spoilt++ > 0 ? raw : "not JSON")
              })
          }
        })
        const lost: Array<string> = []
        const outbox = outboxOf(session, transport, { lease: 3000, most: 10, lose: (reason) => void lost.push(reason) })
        const ask = Effect.callback<string>((resume) =>
          outbox.request({
            verb: "session.wake",
            args: [],
            settle: ([tag]) => resume(Effect.succeed(tag)),
            fail: ({ reason }) => resume(Effect.succeed(reason._tag))
          })
        )
        assert.strictEqual(yield* ask, "ActorDefect")
        assert.strictEqual(yield* ask, "woken")
        assert.deepStrictEqual(lost, [])
      })))

  it.effect("while an event is taken in that came with a reply is as good as a lost event", () =>
    several(1, ([context]) =>
      Effect.gen(function*() {
        const { channel } = placeOf(spaceOf(Context.get(context!, Coordinator.Coordinator)), "lock", "a", "name")
        const held = yield* onNode(context!)(holding("a"))
        const waiting = yield* Effect.forkDetach(onNode(context!)(Lock.withLock(Effect.succeed("in"), "a")))
        yield* eventually(Effect.map(onNode(context!)(Lock.waiting("a")), ({ length }) => length === 1))
        const { tenant } = channel
        const { heard } = tenant
        let thrown = 0
        Object.assign(tenant, {
          heard: (...args: Parameters<typeof heard>) => {
            if (thrown++ > 0) return heard(...args)
            throw new Error("a bug")
          }
        })
        yield* held.leave
        // Well before the next heartbeat.
        assert.strictEqual((yield* within(Fiber.join(waiting), 3000, "the grant")).result, "in")
        assert.isAtLeast(thrown, 1)
      }), { lease: "30 seconds" }))

  it.effect("nor is an answer that cannot be read, with a grant in it: the waiter asks with the next heartbeat", () =>
    several(1, ([context]) =>
      Effect.gen(function*() {
        const place = placeOf(spaceOf(Context.get(context!, Coordinator.Coordinator)), "lock", "a", "name")
        const { transport } = place.space.kernel
        const held = yield* onNode(context!)(holding("a"))
        const waiting = yield* Effect.forkDetach(onNode(context!)(Lock.withLock(Effect.succeed("in"), "a")))
        yield* eventually(Effect.map(onNode(context!)(Lock.waiting("a")), ({ length }) => length === 1))
        const send = transport.send.bind(transport)
        let spoilt = 0
        Object.assign(transport, {
          send: (...[address, messages, header, timeout, caller]: Parameters<Transport["send"]>) =>
            send(address, messages, header, timeout, {
              resolve: (raw) => caller.resolve(spoilt++ > 0 ? raw : "not JSON"),
              reject: (cause) => caller.reject(cause)
            })
        })
        yield* held.leave
        assert.strictEqual((yield* within(Fiber.join(waiting), 3000, "the grant")).result, "in")
        assert.isAtLeast(spoilt, 1)
      }), { lease: "1500 millis", margin: "300 millis" }))

  it.effect("while a session is lost keeps neither holds from observing it, nor another session from being opened", () =>
    several(1, ([context], namespace, server) =>
      Effect.gen(function*() {
        const { channel } = placeOf(spaceOf(Context.get(context!, Coordinator.Coordinator)), "lock", "a", "name")
        const held = yield* onNode(context!)(holding("a"))
        const session = channel.session!
        yield* forget(server, namespace, session.id)
        const throws = () => {
          throw new Error("a bug")
        }
        channel.outbox.request({ verb: "session.wake", args: [], session, moot: throws, settle: throws, fail: throws })
        assert.strictEqual((yield* within(Effect.flip(held.lease.lost), 3000, "the loss")).result.reason, "unknown")
        yield* onNode(context!)(Lock.withLock(Effect.void, "b"))
        yield* Effect.ignore(held.leave)
      }), { lease: "30 seconds" }))

  it.effect("is not the end of a session if requests are too long for one call: the others are made", () =>
    several(1, ([context]) =>
      Effect.gen(function*() {
        const place = placeOf(spaceOf(Context.get(context!, Coordinator.Coordinator)), "lock", "a", "name")
        const { kernel } = place.space
        const session = place.channel.session!
        const transport: Transport = Object.create(kernel.transport, {
          send: {
            value: (...[address, messages, ...rest]: Parameters<Transport["send"]>) => {
              // Four is the longest string that there is.
              const length = messages.reduce((sum, { args }) => sum + Number(args[0] ?? 1), 0)
              if (length > 4) throw new RangeError("Invalid string length")
              kernel.transport.send(address, messages.map((message) => ({ ...message, args: [] })), ...rest)
            }
          }
        })
        const lost: Array<string> = []
        const outbox = outboxOf(session, transport, {
          lease: 30_000,
          most: 100,
          lose: (reason) => void lost.push(reason)
        })
        const ask = (length: number) =>
          Effect.callback<string>((resume) =>
            outbox.request({
              verb: "session.wake",
              args: [length] as never,
              settle: ([tag]) => resume(Effect.succeed(tag)),
              fail: ({ reason }, sent) => resume(Effect.succeed(`${reason._tag}, ${sent}`))
            })
          )
        assert.deepStrictEqual(
          yield* Effect.all([1, 2, 1, 9, 3, 1, 1].map(ask), { concurrency: "unbounded" }),
          ["woken", "woken", "woken", "ActorDefect, false", "woken", "woken", "woken"]
        )
        assert.deepStrictEqual(lost, [])
      }), { lease: "30 seconds" }))

  it.effect("and an entry that cannot be read do not stop the reader", () =>
    several(2, ([one, two], namespace, server) =>
      Effect.gen(function*() {
        const held = yield* onNode(one!)(holding("a"))
        const waiting = yield* Effect.forkDetach(onNode(two!)(Lock.withLock(Effect.succeed("in"), "a")))
        yield* waits(server, namespace, "lock:a", 1)
        const [session] = yield* sessionsOf(two!)
        const mailbox = `{${namespace}:00}:mail:${session!.id}`
        yield* server.cli("XADD", mailbox, "2-0", "e", "not JSON")
        yield* server.cli("CONFIG", "RESETSTAT")
        yield* realSleep("500 millis")
        const stats = yield* server.cli("INFO", "commandstats")
        assert.isBelow(Number(/cmdstat_xread:calls=(\d+)/.exec(stats)?.[1] ?? 0), 20)
        yield* held.leave
        assert.strictEqual((yield* within(Fiber.join(waiting), 3000, "the grant")).result, "in")
      })))

  it.effect("nor an entry that cannot be read in place of a grant: the waiter asks, and the session goes on", () =>
    behindLine(({ context, direct, line, namespace, server }) =>
      Effect.gen(function*() {
        const other = yield* direct()
        const held = yield* onNode(other)(holding("a"))
        // The reader sleeps while the entry comes and is spoilt.
        const reading = yield* line.hold(({ name }) => name === "XREAD")
        const waiting = yield* Effect.forkDetach(onNode(context)(Lock.withLock(Effect.succeed("in"), "a")))
        yield* waits(server, namespace, "lock:a", 1)
        yield* reading.request
        const [session] = yield* sessionsOf(context)
        yield* held.leave
        const mailbox = `{${namespace}:00}:mail:${session!.id}`
        const [entry] = (yield* server.cli("XREVRANGE", mailbox, "+", "-", "COUNT", 1)).split("\n")
        yield* server.cli("DEL", mailbox)
        yield* server.cli("XADD", mailbox, entry!, "e", "not JSON")
        yield* reading.release()
        // Well before the next heartbeat.
        assert.strictEqual((yield* within(Fiber.join(waiting), 3000, "the grant")).result, "in")
        assert.strictEqual((yield* sessionsOf(context))[0]!.id, session!.id)
      }), { lease: "30 seconds" }))
})

layer(TestServer.layer, live)("the bound of what waits", (it) => {
  it.effect("is for new work, and never for what enters again after a loss", () =>
    several(1, ([context], namespace, server) =>
      Effect.gen(function*() {
        const waiters = 200
        const holder = yield* Effect.forkDetach(onNode(context!)(Effect.exit(Lock.withLock(Effect.never, "a"))))
        const fibers = yield* Effect.forEach(Array.from({ length: waiters / 10 }), (_, at) =>
          Effect.gen(function*() {
            const fiber = yield* Effect.forkDetach(
              onNode(context!)(Effect.forEach(
                Array.from({ length: 10 }, (_, at) => at),
                () => Lock.withLock(Effect.void, "a", { wait: "20 seconds" }),
                { concurrency: 10, discard: true }
              ))
            )
            // No more than these are pending at a time.
            yield* eventually(
              Effect.map(onNode(context!)(Lock.waiting("a")), ({ length }) => assert.strictEqual(length, 10 * at + 10))
            )
            return fiber
          }), { concurrency: 1 })
        const [session] = yield* sessionsOf(context!)
        yield* forget(server, namespace, session!.id)
        yield* Effect.forEach(fibers, Fiber.join, { discard: true })
        assert.isTrue(Exit.isFailure(yield* Fiber.join(holder)))
      }), { lease: "3 seconds", margin: "500 millis", batch: { maxPending: 30, maxRequests: 8 } }))

  it.effect("is not for a count that is made again after a loss", () =>
    behindLine(({ context, line, namespace, server }) =>
      Effect.gen(function*() {
        const latch = yield* on(context, CountDownLatch.make({ name: "a", count: 2, timeToLive: "1 second" }))
        const refs = yield* Effect.forEach(Array.from({ length: 10 }), (_, at) =>
          onNode(context)(SharedRef.make({ name: `b${at}`, schema: Schema.String, initial: "" })))
        const counting = yield* line.hold(asks("latch.count"))
        const count = yield* Effect.forkChild(latch.countDown())
        yield* counting.request
        // Deletions are not bounded.
        const others = yield* Effect.forEach(refs, (ref) =>
          Effect.forkChild(ref.delete))
        const [session] = yield* sessionsOf(context)
        yield* forget(server, namespace, session!.id)
        // It may have been executed.
        yield* counting.release("drop")
        assert.strictEqual(yield* Fiber.join(count), 1)
        yield* Effect.forEach(others, Fiber.join, { discard: true })
      }), { lease: "3 seconds", batch: { maxPending: 5 } }))

  it.effect("holds without a session, too", () =>
    behindLine(({ context, line }) =>
      Effect.gen(function*() {
        yield* line.refuse
        yield* line.closeAll
        yield* eventually(Effect.map(sessionsOf(context), ([session]) => session!.state === "opening"))
        const fiber = yield* Effect.forkDetach(
          onNode(context)(Effect.forEach(
            Array.from({ length: 200 }, (_, at) => at),
            (at) => Effect.exit(Lock.withLock(Effect.void, `k${at}`)),
            { concurrency: "unbounded" }
          ))
        )
        yield* realSleep("100 millis")
        yield* line.pass
        const exits = yield* Fiber.join(fiber)
        const failed = exits.filter(Exit.isFailure)
        assert.isTrue(failed.every((exit) => String(exit.cause).includes("batch.maxPending")))
        assert.isAtLeast(failed.length, 100)
        assert.isBelow(failed.length, 200)
      }), { ...short, batch: { maxPending: 50 } }))

  it.effect("does not count what has given up waiting", () =>
    behindLine(({ context, line }) =>
      Effect.gen(function*() {
        const semaphore = yield* onNode(context)(Semaphore.make({ name: "a", permits: 1 }))
        yield* line.blackhole
        for (let round = 0; round < 3; round++) {
          const exits = yield* onNode(context)(
            Effect.forEach(Array.from({ length: 40 }), () => Effect.exit(semaphore.resize(2)), {
              concurrency: "unbounded"
            })
          )
          assert.notInclude(String(exits.map((exit) => Exit.isFailure(exit) && exit.cause)), "batch.maxPending")
        }
        // Waits that are interrupted, too.
        for (let round = 0; round < 3; round++) {
          const exits = yield* onNode(context)(
            Effect.forEach(
              Array.from({ length: 40 }, (_, at) => at),
              (at) => Effect.exit(Lock.withLock(Effect.void, `k${at}`, { wait: "20 millis" })),
              { concurrency: "unbounded" }
            )
          )
          for (const exit of exits) assert.include(String(Exit.isFailure(exit) && exit.cause), "was over after")
        }
        yield* line.pass
        yield* onNode(context)(Lock.withLock(Effect.void, "k0"))
      }), { lease: "30 seconds", requestTimeout: "200 millis", batch: { maxPending: 50 } }))
})

layer(TestServer.layer, live)("two coordinators of one process", (it) => {
  it.effect("find each other's holds, however they name the server, so that nesting never deadlocks", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      const lines: Array<string> = []
      const logger = Logger.make(({ message }) => void lines.push(String(message)))
      yield* Effect.gen(function*() {
        const one = yield* node(server.url, { namespace })
        const two = yield* node(server.url.replace("127.0.0.1", "localhost"), { namespace })
        const three = yield* node(`unix://${server.socket}`, { namespace })
        yield* eventually(Effect.sync(() => lines.some((line) => line.includes("has 3 coordinators of the namespace"))))
        for (const other of [two, three]) {
          const inside = <A, E>(self: Effect.Effect<A, E, Coordinator.Coordinator>) =>
            Effect.provideContext(Lock.withLock(Effect.provideContext(self, other), "a"), one)
          const error = yield* Effect.flip(inside(Lock.withLock(Effect.void, "a")))
          assert.strictEqual(error.reason._tag, "AlreadyHeld")
          assert.strictEqual(yield* inside(Lock.withLock(Effect.succeed("shared"), "a", { reentrant: true })), "shared")
          const parallel = inside(Effect.forEach([1, 2], () => Effect.flip(Lock.withLock(Effect.void, "a")), {
            concurrency: 2
          }))
          assert.deepStrictEqual((yield* parallel).map(({ reason }) => reason._tag), ["AlreadyHeld", "AlreadyHeld"])
        }
        // The same name in another database is another lock.
        const apart = yield* node(`${server.url}/1`, { namespace })
        const nested = Effect.provideContext(Lock.withLock(Effect.succeed("entered"), "a"), apart)
        assert.strictEqual(yield* Effect.provideContext(Lock.withLock(nested, "a"), one), "entered")
      }).pipe(Effect.scoped, Effect.provide(Logger.layer([logger])))
      yield* assertEmpty(server, namespace)
    }))

  it.effect("let a detached fiber wait for what its parent holds", () =>
    several(1, ([context]) =>
      Effect.provideContext(
        Effect.gen(function*() {
          const detached = yield* Lock.withLock(
            Effect.gen(function*() {
              const fiber = yield* Effect.forkDetach(Lock.withLock(Effect.succeed("later"), "a"))
              yield* Effect.forEach([1, 2, 3], () => Effect.yieldNow)
              assert.isUndefined(fiber.pollUnsafe())
              return fiber
            }),
            "a"
          )
          assert.strictEqual(yield* Fiber.join(detached), "later")
          const scope = yield* Effect.scope
          const later = Lock.withLock(Effect.succeed("later"), "a")
          // A scope keeps a fiber only to interrupt it, and a detached fiber has nothing that waits for it.
          for (
            const fork of [
              Effect.forkIn(later, scope),
              Effect.forkDetach(later, { startImmediately: true }),
              Effect.forkDetach(Effect.withFiber(() => later), { startImmediately: true }),
              Lock.withLock(Effect.forkDetach(later, { startImmediately: true }), "b")
            ]
          ) {
            const inner = yield* Lock.withLock(Effect.andThen(Effect.void, fork), "a")
            assert.strictEqual(yield* Fiber.join(inner), "later")
          }
          // What is awaited is not detached, however it was started, and however deep the holds are nested.
          const refused = Effect.map(Effect.flip(Lock.withLock(Effect.void, "a")), ({ reason }) => reason._tag)
          for (
            const awaited of [
              Effect.withFiber((fiber) => Effect.promise(() => Effect.runPromiseWith(fiber.context as Node)(refused))),
              Lock.withLock(refused, "b"),
              Lock.withLock(Effect.flatMap(Effect.forkChild(refused), Fiber.join), "b"),
              Effect.scoped(Effect.andThen(Lock.acquire("b"), Effect.flatMap(Effect.forkChild(refused), Fiber.join)))
            ]
          ) {
            assert.strictEqual(yield* Lock.withLock(awaited, "a"), "AlreadyHeld")
          }
          const child = yield* Lock.withLock(
            Effect.flatMap(Effect.forkChild(Effect.flip(Lock.withLock(Effect.void, "a"))), Fiber.join),
            "a"
          )
          assert.strictEqual(child.reason._tag, "AlreadyHeld")
        }),
        context!
      )))
})

layer(TestServer.layer, live)("keys", (it) => {
  it.effect("have a time to live beyond every deadline, except the floor of tokens", () =>
    several(2, ([one, two], namespace, server) =>
      Effect.gen(function*() {
        yield* onNode(one!)(Effect.scoped(Effect.gen(function*() {
          yield* Lock.acquire("a")
          yield* ReadWriteLock.acquireRead("b")
          const semaphore = yield* Semaphore.make({ name: "c", permits: 2 })
          yield* semaphore.takeScoped(2)
          // So many have a hash.
          const waiting = yield* Effect.forkChild(
            onNode(two!)(Effect.forEach(
              Array.from({ length: 70 }),
              () => Lock.withLock(Effect.void, "a"),
              { concurrency: "unbounded" }
            ))
          )
          yield* waits(server, namespace, "lock:a", 70)
          const schema = Schema.String
          const timeToLive = "1 second"
          const countDownLatch = yield* CountDownLatch.make({ name: "d", count: 2, timeToLive })
          yield* countDownLatch.countDown()
          yield* Latch.make({ name: "e", timeToLive })
          yield* Effect.flatMap(Election.make({ name: "f" }), (election) => election.campaign())
          const tasks = yield* TaskGroup.make({ name: "g", result: schema, timeToLive })
          yield* tasks.register("x")
          const barrier = yield* Barrier.make({ name: "h", parties: 2 })
          const doubleBarrier = yield* DoubleBarrier.make({ name: "i", parties: 2 })
          const rendezvous = yield* Rendezvous.make({ name: "j", schema })
          const signal = yield* Signal.make({ name: "k" })
          const meeting = yield* Effect.forkChild(Effect.all([
            barrier.await(),
            Effect.scoped(doubleBarrier.enter()),
            rendezvous.give("a"),
            signal.await
          ], { concurrency: "unbounded" }))
          const resources = [
            ...["lock:a", "readWriteLock:b", "semaphore:c", "countDownLatch:d", "countDownLatch-items:d", "latch:e"],
            ...["election:f", "taskGroup:g", "taskGroup-items:g", "barrier:h", "barrier-items:h", "doubleBarrier:i"],
            ...["rendezvous:j", "rendezvous-items:j", "signal:k"]
          ]
          yield* eventually(Effect.map(
            server.cli("EXISTS", ...resources.map((resource) => `{${namespace}:00}:${resource}`)),
            (found) => Number(found) === resources.length
          ))
          const check = Effect.gen(function*() {
            const keys = (yield* server.cli("KEYS", `{${namespace}:*`)).split("\n").filter((key) => key !== "")
            assert.isAbove(keys.length, resources.length + 5)
            for (const key of keys) {
              const left = Number(yield* server.cli("PTTL", key))
              if (/:(floor|libraries)$/.test(key)) assert.strictEqual(left, -1, key)
              else assert.isAbove(left, 80_000_000, key)
            }
          })
          yield* check
          // After heartbeats as well.
          yield* realSleep("1500 millis")
          yield* check
          yield* Fiber.interruptAll([waiting, meeting])
        })))
      })))

  it.effect("have one also when all waiters have left a long queue, the first one last", () =>
    several(2, ([one, two], namespace, server) =>
      Effect.gen(function*() {
        yield* onNode(one!)(Effect.scoped(Effect.gen(function*() {
          yield* Lock.acquire("a")
          const wait = Effect.forkChild(onNode(two!)(Lock.withLock(Effect.void, "a")))
          const [first, ...others] = yield* Effect.replicateEffect(wait, 70)
          yield* waits(server, namespace, "lock:a", 70)
          yield* Fiber.interruptAll(others)
          yield* waits(server, namespace, "lock:a", 1)
          yield* Fiber.interrupt(first!)
          yield* waits(server, namespace, "lock:a", 0)
          const next = yield* wait
          yield* waits(server, namespace, "lock:a", 1)
          assert.notStrictEqual(Number(yield* server.cli("PTTL", `{${namespace}:00}:lock:a`)), -1)
          yield* Fiber.interrupt(next)
        })))
      })))

  it.effect("of what users store stay as long as that says, and its alarms for as long", () =>
    Effect.gen(function*() {
      class Stored extends Queue.Service<Stored>()("l", { payload: Schema.String }) {}
      const server = yield* TestServer
      const namespace = freshNamespace()
      const [day, schema] = [86_400_000, Schema.String]
      yield* Effect.scoped(Effect.gen(function*() {
        const context = yield* node(server.url, { namespace, partitions: 1 })
        yield* onNode(context)(Effect.scoped(
          Effect.gen(function*() {
            const queue = yield* Stored
            yield* queue.offer("later", { delay: "30 days" })
            const flow = yield* Flow.make("n", { queues: [Stored] }, (graph) => graph.job(Stored, "in a flow"))
            yield* flow.start()
            yield* Effect.flatMap(Topic.make({ name: "m", schema }), (topic) => topic.publish("a"))
            yield* Effect.flatMap(SharedRef.make({ name: "o", schema, initial: "" }), (ref) => ref.set("a"))
            const kept = yield* SharedRef.make({ name: "q", schema, initial: "", timeToLive: "9 days" })
            yield* kept.set("a")
            yield* Effect.flatMap(Counter.make({ name: "p" }), (counter) => counter.add(1))
          }).pipe(Effect.provide(Stored.layer))
        ))
        const left = new Map<string, number>()
        for (const key of (yield* server.cli("KEYS", `{${namespace}:*`)).split("\n")) {
          left.set(key.slice(key.indexOf("}") + 2), Number(yield* server.cli("PTTL", key)))
        }
        for (const [key, millis] of left) {
          const isStored = /^(queue|flow|sharedRef-value:o|counter-value|floor|libraries)/.test(key)
          // Numbers of an interval of ten minutes, and of the one before.
          if (/-(odd|even):/.test(key)) assert.isAbove(millis, 0, key)
          else if (isStored) assert.strictEqual(millis, -1, key)
          else assert.isAbove(millis, 80_000_000, key)
        }
        assert.isAtLeast(left.size, 14)
        assert.closeTo(left.get("sharedRef-value:q")!, 9 * day, 60_000)
        assert.isAbove(left.get("due")!, 30 * day)
      }))
    }))

  it.effect("of a session have it before its first heartbeat", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      const { keys, open } = actor(redis, freshNamespace(), "lock:a")
      yield* Effect.promise(() => open("a"))
      for (const key of keys("a").filter((key) => !key.endsWith(":floor"))) {
        assert.isAbove(yield* Effect.promise(() => redis.pttl(key)), 80_000_000, key)
      }
    }))

  it.effect("have it when the last one of many waiters has left before the others were served", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      // A release alone takes the straight path, one beside another request does not.
      for (const beside of [[], ["session.renew"]]) {
        const { key, keys, mail, open, send } = actor(redis, freshNamespace(), "lock:a")
        yield* Effect.promise(async () => {
          await open("a")
          for (const id of ["1", "2", "3", "4", "5"]) await send("a", "lock.take", [id, "1"])
          await send("a", "lock.release", ["5"])
          for (const id of ["1", "2", "3"]) {
            await send("a", "lock.release", [id], undefined, undefined, undefined, beside)
          }
          await send("a", "lock.take", ["6", "1"])
        })
        for (const one of [key, ...keys("a").filter((key) => !key.endsWith(":floor"))]) {
          assert.notStrictEqual(yield* Effect.promise(() => redis.pttl(one)), -1, one)
        }
        yield* Effect.promise(() => send("a", "lock.release", ["4"]))
        const heard = (yield* Effect.promise(() => mail("a"))).map(([tag, id]) => `${tag} ${id}`)
        assert.deepStrictEqual(heard, ["granted 2", "granted 3", "granted 4", "granted 6"])
      }
    }))

  it.effect("of a latch count no member of a session that Redis has forgotten", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      const { keys, open, send } = actor(redis, freshNamespace(), "countDownLatch:a")
      const joining = (id: string, total: number, fresh: string) =>
        send(id, "latch.join", [`m${id}`, total, total, 9 * 86_400_000, 0, "", "fail", fresh, 0, 0, ""])
      yield* Effect.promise(async () => {
        await open("a")
        assert.deepStrictEqual((await joining("a", 3, "")).slice(0, 3), ["joined", 3, 3])
        await send("a", "latch.count", ["i1", 0, 1, 3, 9 * 86_400_000, "", ""])
        // As after a day without processes.
        await redis.del(...keys("a").filter((key) => !key.endsWith(":floor")))
        await open("b")
        assert.deepStrictEqual((await joining("b", 3, "1")).slice(0, 3), ["joined", 3, 3])
        // That one is alive.
        await open("c")
        assert.deepStrictEqual(await joining("c", 4, ""), ["mismatch", 3])
      })
    }))

  it.effect("are touched while something is held for long", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      let ahead = 0
      const io = { ...liveIo, now: () => liveIo.now() + ahead, wall: () => liveIo.wall() + ahead }
      yield* Effect.scoped(Effect.gen(function*() {
        const context = yield* Effect.provideService(
          node(server.url, { namespace, partitions: 1, lease: "43200 seconds", margin: 0 }),
          CurrentIo,
          { ...io, after: (millis: number, f: () => void) => liveIo.after(Math.min(millis, 200), f) }
        )
        yield* onNode(context)(Effect.scoped(Effect.gen(function*() {
          yield* ReadWriteLock.acquireRead("a")
          const latch = yield* CountDownLatch.make({ name: "b", count: 2, timeToLive: "1 second" })
          yield* latch.countDown()
          const keys = ["readWriteLock:a", "countDownLatch:b", "countDownLatch-items:b"].map((key) =>
            `{${namespace}:00}:${key}`
          )
          for (const key of keys) yield* server.cli("PEXPIRE", key, 60_000)
          ahead = 7 * 3_600_000
          for (const key of keys) {
            yield* eventually(Effect.map(server.cli("PTTL", key), (left) => Number(left) > 80_000_000), {
              message: key
            })
          }
        })))
      }))
      yield* assertEmpty(server, namespace)
    }))
})

layer(TestServer.layer, live)("a wait for what others do", (it) => {
  it.effect("ends after `wait`, and what its caller has begun as after an interruption", () =>
    Effect.gen(function*() {
      class Work extends Queue.Service<Work>()("a", { payload: Schema.String, success: Schema.String }) {}
      const server = yield* TestServer
      const namespace = freshNamespace()
      yield* Effect.scoped(Effect.gen(function*() {
        const context = yield* node(server.url, { namespace })
        yield* onNode(context)(Effect.scoped(
          Effect.gen(function*() {
            const wait = "200 millis"
            const late = <A, E extends { readonly reason: { readonly _tag: string } }, R>(
              self: Effect.Effect<A, E, R>,
              kind: string,
              key: string
            ) =>
              Effect.map(
                within(Effect.flip(self), 2000, kind),
                ({ result: { reason } }) =>
                  assert.deepInclude(reason as object, { _tag: "WaitTimeout", kind, key, namespace, away: false })
              )
            const queue = yield* Work
            const { id } = yield* queue.offer("offered", { result: true })
            yield* late(queue.job(id).result({ wait }), "queue", "a")
            yield* late(queue.execute("executed", { wait }), "queue", "a")
            // The one that was executed is not there any more.
            yield* eventually(Effect.map(queue.state, ({ waiting }) => waiting === 1))
            yield* late(queue.execute("goes on", { wait, onInterrupt: "continue" }), "queue", "a")
            assert.strictEqual((yield* queue.state).waiting, 2)

            const flow = yield* Flow.make("b", { queues: [Work], wait }, (graph) => graph.job(Work, "of a flow"))
            const run = yield* flow.start(undefined, { id: "one" })
            yield* late(run.await, "flow", "b/one")
            yield* late(flow.run(undefined, { id: "two" }), "flow", "b/two")
            yield* eventually(Effect.map(flow.attach("two").status, ({ state }) => state === "cancelled"))
            yield* late(flow.run(undefined, { id: "three", onInterrupt: "continue" }), "flow", "b/three")
            assert.strictEqual((yield* flow.attach("three").status).state, "running")

            const batch = yield* Batch.make("c", { queues: [Work], wait })
            const jobs = yield* batch.start({ id: "one" })
            yield* jobs.add(Work, "of a batch")
            yield* late(jobs.await, "batch", "c/one")

            const ref = yield* SharedRef.make({ name: "d", schema: Schema.Number, initial: 0 })
            yield* late(ref.until((value) => value > 0, { wait }), "sharedRef", "d")
            yield* ref.set(1)
            assert.strictEqual(yield* ref.until((value) => value > 0, { wait }), 1)

            // What comes in time comes.
            yield* Effect.forkScoped(queue.run((payload) => Effect.succeed(payload)))
            assert.strictEqual(yield* queue.execute("in time", { wait: "5 seconds" }), "in time")
            assert.strictEqual(yield* queue.job(id).result({ wait: "5 seconds" }), "offered")
            assert.strictEqual(yield* flow.run(undefined, { wait: "5 seconds" }), "of a flow")
          }).pipe(Effect.provide(Work.layer))
        ))
      }))
    }))
})

layer(TestServer.layer, live)("a value that does not fit its schema", (it) => {
  const schema = Schema.Int
  const name = "a"
  class Work extends Queue.Service<Work>()(name, { payload: schema, success: schema }) {}
  type Failing = Effect.Effect<
    unknown,
    { readonly reason: { readonly _tag: string; readonly message: string } },
    Coordinator.Coordinator | Scope.Scope | Work
  >
  const programs: Record<string, Failing> = {
    barrier: Effect.flatMap(Barrier.make({ name, parties: 2, schema }), (it) => it.await(1.5)),
    election: Election.make({ name, schema, value: 1.5 }),
    rendezvous: Effect.flatMap(Rendezvous.make({ name, schema }), (it) => it.give(1.5)),
    sharedRef: Effect.flatMap(SharedRef.make({ name, schema, initial: 0 }), (it) => it.set(1.5)),
    taskGroup: Effect.flatMap(TaskGroup.make({ name, result: schema }), (it) => it.run("x", Effect.succeed(1.5))),
    topic: Effect.flatMap(Topic.make({ name, schema }), (it) => it.publish(1.5)),
    queue: Effect.flatMap(Work, (it) => it.offer(1.5)),
    flow: Effect.flatMap(
      Flow.make(name, { queues: [Work], input: schema }, (flow, n) => flow.job(Work, n)),
      (it) => it.start(1.5)
    )
  }
  for (const [kind, program] of Object.entries(programs)) {
    it.effect(`fails with its name and namespace: ${kind}`, () =>
      Effect.gen(function*() {
        const server = yield* TestServer
        const namespace = freshNamespace()
        yield* Effect.scoped(Effect.gen(function*() {
          const context = yield* node(server.url, { namespace })
          const { reason } = yield* onNode(context)(
            Effect.scoped(Effect.flip(program)).pipe(Effect.provide(Work.layer))
          )
          assert.deepInclude(reason as object, { _tag: "InvalidPayload", kind, name, namespace })
          assert.include(reason.message, `"a" of namespace "${namespace}"`)
        }))
      }))
  }
})

/** Milliseconds that this process has worked, regardless of what else the machine does. */
const busy = () => {
  const { system, user } = process.cpuUsage()
  return (system + user) / 1000
}

layer(TestServer.layer, live)("interruption", (it) => {
  it.effect("of thousands that are queued to be sent takes no longer than making them", () =>
    behindLine(({ context, line }) =>
      Effect.gen(function*() {
        yield* onNode(context)(Lock.withLock(Effect.void, "a"))
        yield* line.blackhole
        const count = 30_000
        const started = busy()
        const fiber = yield* Effect.forkDetach(
          onNode(context)(Effect.forEach(
            Array.from({ length: count }),
            () => Lock.withLock(Effect.void, "a"),
            { concurrency: "unbounded", discard: true }
          ))
        )
        yield* realSleep(1)
        const made = busy()
        yield* Fiber.interrupt(fiber)
        const interrupted = busy()
        assert.isBelow(interrupted - made, 2000 + 3 * (made - started))
        yield* line.pass
        yield* line.closeAll
      }), { lease: "30 seconds" }))
})

layer(TestServer.layer, live)("the end of a membership", (it) => {
  it.effect("costs no more with many other claims", () =>
    behindLine(({ context, line }) =>
      Effect.gen(function*() {
        const place = placeOf(spaceOf(Context.get(context, Coordinator.Coordinator)), "semaphore", "a", "name")
        const members = yield* Effect.forEach(Array.from({ length: 4000 }), () =>
          join(place, {
            verb: "semaphore.join",
            args: () => [1, "fail"],
            observer: { observe: () => {} },
            fail: (reason) => reason
          }), { concurrency: "unbounded" })
        const release = (some: typeof members) => {
          const started = busy()
          for (const [member] of some) place.tenancy.release(member, () => {})
          return busy() - started
        }
        // A collection of garbage may fall into one of them.
        const least = (from: number) =>
          Math.min(...[0, 500, 1000].map((at) => release(members.slice(from + at, from + at + 500))))
        yield* line.blackhole
        // Code that is not compiled yet takes longer.
        release(members.slice(0, 1000))
        const alone = least(1000)
        const count = 30_000
        const waiting = yield* Effect.forkDetach(
          onNode(context)(Effect.forEach(
            Array.from({ length: count }, (_, at) => at),
            (at) => Lock.withLock(Effect.void, `k${at}`),
            { concurrency: "unbounded", discard: true }
          ))
        )
        yield* eventually(Effect.sync(() => place.tenancy.size >= count))
        // Looking at all claims for each of them takes seconds.
        assert.isBelow(least(2500), 20 * Math.max(alone, 5 / 3))
        yield* Fiber.interrupt(waiting)
        yield* line.pass
        yield* line.closeAll
        yield* onNode(context)(Lock.withLock(Effect.void, "a"))
      }), { lease: "30 seconds" }))
})

layer(TestServer.layer, live)("a number that differs", (it) => {
  it.effect("fails while others are alive, is kept, or changed for all", () =>
    several(2, ([one, two]) =>
      onNode(one!)(Effect.gen(function*() {
        yield* Effect.scoped(Effect.gen(function*() {
          const here = yield* Semaphore.make({ name: "s", permits: 5 })
          yield* here.resize(8)
          const make = (options: Partial<Semaphore.Options>) =>
            onNode(two!)(Semaphore.make({ name: "s", permits: 5, ...options }))
          const error = yield* Effect.flip(make({}))
          assert.isTrue(error.reason._tag === "PermitsMismatch" && error.reason.existing === 8)
          yield* Effect.scoped(Effect.gen(function*() {
            const kept = yield* make({ onMismatch: "keep" })
            assert.strictEqual(yield* kept.permits, 8)
            assert.strictEqual((yield* kept.take(8)).kind, "semaphore")
          }))
          yield* Effect.scoped(Effect.gen(function*() {
            const resized = yield* make({ onMismatch: "resize", permits: 6 })
            assert.strictEqual(yield* resized.permits, 6)
            assert.strictEqual(yield* here.permits, 6)
          }))
        }))
        // No process has it open: the number is new.
        const again = yield* Effect.scoped(Effect.flatMap(
          Semaphore.make({ name: "s", permits: 2 }),
          (semaphore) => semaphore.permits
        ))
        assert.strictEqual(again, 2)
      }))))
})

describe("services of all modules", () => {
  it("may have the same name", () => {
    const schema = Schema.String
    const keys = {
      Barrier: Barrier.Service()("migration", { parties: 2 }).key,
      CountDownLatch: CountDownLatch.Service()("migration", { count: 1 }).key,
      Batch: Batch.Service()("migration", { queues: [] }).key,
      Counter: Counter.Service()("migration").key,
      DoubleBarrier: DoubleBarrier.Service()("migration", { parties: 2 }).key,
      Election: Election.Service()("migration").key,
      Flow: Flow.Service()("migration", { queues: [] }, () => ({})).key,
      Latch: Latch.Service()("migration").key,
      Queue: Queue.Service()("migration", { payload: schema }).key,
      Rendezvous: Rendezvous.Service()("migration", { schema }).key,
      Semaphore: Semaphore.Service()("migration", { permits: 1 }).key,
      SharedRef: SharedRef.Service()("migration", { schema, initial: "" }).key,
      "SharedRef.Family": SharedRef.FamilyService()("migration", { schema, initial: "" }).key,
      Signal: Signal.Service()("migration").key,
      TaskGroup: TaskGroup.Service()("migration", { result: schema }).key,
      Topic: Topic.Service()("migration", { schema }).key,
      WorkStealing: WorkStealing.Service()("migration", { payload: schema }).key
    }
    for (const [module, key] of Object.entries(keys)) assert.strictEqual(key, `lockstep/${module}/migration`)
    const withService = Object.entries(Lockstep).filter(([, module]) => "Service" in module).map(([name]) => name)
    for (const module of withService) assert.property(keys, module)
  })
})

layer(TestServer.layer, live)("a lease of its own", (it) => {
  it.effect("is a second session, which is lost and renewed by itself", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      yield* Effect.scoped(Effect.gen(function*() {
        const context = yield* node(server.url, {
          namespace,
          partitions: 1,
          lease: "30 seconds",
          requestTimeout: "400 millis"
        })
        yield* onNode(context)(Effect.scoped(Effect.gen(function*() {
          const long = yield* Lock.acquire("long")
          const brief = yield* Lock.acquire("brief", { lease: "1500 millis" })
          const sessions = yield* sessionsOf(context)
          assert.strictEqual(sessions.length, 2)
          // Longer than the short lease: it is renewed.
          yield* realSleep("2 seconds")
          assert.isTrue(yield* brief.isHeld)
          const short = sessions.find(({ lease }) => lease.value._tag === "Millis" && lease.value.millis === 1500)!
          yield* forget(server, namespace, short.id)
          assert.strictEqual((yield* Effect.flip(brief.lost)).reason, "unknown")
          assert.isTrue(yield* long.isHeld)
        })))
      }))
      yield* assertEmpty(server, namespace)
    }))
})
