/**
 * The network between a coordinator and Redis: lost replies, duplicates, half-open connections, outages. No data is lost
 * here, so mutual exclusion has to be exact.
 */
import { assert, layer } from "@effect/vitest"
import { Deferred, Effect, Exit, Fiber, Option, Scope, Stream } from "effect"
import * as net from "node:net"
import { Coordinator, Lease, Lock, Semaphore } from "../src/index.ts"
import { words } from "../src/internal/testing/resp.ts"
import { make as proxy } from "../src/testing/Proxy.ts"
import { elapsed } from "./support/awake.ts"
import { eventually, realSleep } from "./support/eventually.ts"
import { exclusion } from "./support/exclusion.ts"
import { assertEmpty, deadlineOf, freshNamespace, holding, node, TestServer } from "./support/live.ts"
import { asks, fields, waits, within } from "./support/requests.ts"
import { on, several } from "./support/several.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

layer(TestServer.layer, live)("a connection", (it) => {
  it.effect("refuses what a dead connection delivers late, when another session has taken over", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      const late = (bytes: Buffer) =>
        Effect.callback<string>((resume) => {
          const socket = net.connect(server.port, server.host, () => socket.write(bytes))
          socket.once("data", (reply) => {
            socket.destroy()
            resume(Effect.succeed(reply.toString("utf8").split("\r\n")[1]!))
          })
        })
      yield* Effect.scoped(Effect.gen(function*() {
        const line = yield* proxy(server)
        const context = yield* node(line.url, {
          namespace,
          partitions: 1,
          // Trust ends a second before Redis would end the session by itself.
          lease: "2 seconds",
          margin: "1 second",
          requestTimeout: "100 millis"
        })
        yield* Effect.gen(function*() {
          const seen: Array<Buffer> = []
          yield* line.onRequest((request) => {
            if (asks("lock.take")(request)) seen.push(request.bytes)
            return "pass"
          })
          yield* Lock.withLock(Effect.void, "a")
          // While the session lives: answered again, and not executed again.
          assert.strictEqual(words(seen[0]!).includes("lock.take"), true)
          assert.include(["[\"stale\"]"], yield* late(seen[0]!))
          assert.strictEqual(yield* fields(server, namespace, "lock:a", "h"), 0)

          const lost = yield* line.once(asks("lock.take"), "drop")
          yield* line.onRequest((request) => asks("lock.take")(request) ? "blackhole" : "pass")
          const coordinator = yield* Coordinator.Coordinator
          const [{ id }] = yield* coordinator.sessions as never as Effect.Effect<[Coordinator.Session]>
          const waiting = yield* Effect.forkChild(Lock.withLock(Effect.void, "b"))
          const batch = (yield* lost).bytes
          yield* line.refuse
          yield* line.closeAll
          yield* eventually(Effect.map(coordinator.sessions, ([session]) => session!.id !== id))
          yield* line.onRequest(undefined)
          yield* line.pass
          yield* Fiber.join(waiting)
          const answer = yield* late(batch)
          assert.include(["[\"expired\"]", "[\"unknown\"]"], answer)
          assert.strictEqual(yield* fields(server, namespace, "lock:b", "h"), 0)
        }).pipe(Effect.provideContext(context))
      }))
      yield* assertEmpty(server, namespace)
    }))

  it.effect("keeps mutual exclusion exact, and every wake-up, in a storm of reconnects", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      const watch = exclusion()
      yield* Effect.scoped(Effect.gen(function*() {
        const line = yield* proxy(server)
        const options = { namespace, partitions: 4, lease: "10 seconds" } as const
        const nodes = [yield* node(line.url, options), yield* node(line.url, options), yield* node(server.url, options)]
        let stormy = true
        const work = (at: number) =>
          Effect.gen(function*() {
            const pool = yield* Semaphore.make({ name: "pool", permits: 3 })
            const one = (
              n: number
            ): Effect.Effect<number, Lock.LockError | Semaphore.SemaphoreError, Coordinator.Coordinator> => {
              const key = `key${n % 3}`
              if (n % 4 === 3) {
                const permits = 1 + n % 3
                return pool.withPermits(permits)(watch.enter("pool", { permits, capacity: 3, millis: n % 3 }))
              }
              return Lock.withLock(watch.enter(key, { millis: n % 3 }), key)
            }
            yield* Effect.forEach(Array.from({ length: 8 }, (_, fiber) => fiber + at), (fiber) =>
              Effect.gen(function*() {
                let n = fiber
                while (stormy) {
                  // Half of them give up now and then, at any moment of the way.
                  const interrupted = fiber % 2 === 1 && n % 5 === 0
                  if (interrupted) yield* Effect.ignore(Effect.timeout(one(n), n % 7))
                  else yield* one(n)
                  n += 1 + fiber % 2
                  assert.deepStrictEqual(watch.violations, [])
                }
              }), { concurrency: "unbounded" })
          }).pipe(Effect.scoped, Effect.provideContext(nodes[at]!))
        const workers = yield* Effect.forEach([0, 1, 2], (at) => Effect.forkChild(work(at)))
        const until = performance.now() + 3000
        while (performance.now() < until || watch.entered <= 100) {
          yield* realSleep(30 + Math.random() * 40)
          yield* line.closeAll
        }
        stormy = false
        // Every remaining waiter is granted without further ado.
        yield* within(Effect.forEach(workers, Fiber.join), 2500, "the end of the storm")
        assert.isFalse(watch.busy)
      }))
      yield* assertEmpty(server, namespace)
    }))

  it.effect("takes an answer that came while the event loop was blocked for longer than a request waits", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      yield* Effect.scoped(Effect.gen(function*() {
        const line = yield* proxy(server)
        const context = yield* node(line.url, { namespace, requestTimeout: "200 millis" })
        yield* Effect.gen(function*() {
          const coordinator = yield* Coordinator.Coordinator
          const suspended = yield* Effect.forkChild(Stream.runHead(
            Stream.filter(coordinator.changes, ({ to }) => to === "suspended")
          ))
          for (const blocked of [600, 600, 600, 900]) {
            const asked = yield* Effect.forkChild(Lock.withLockIfAvailable(Effect.void, "a"), {
              startImmediately: true
            })
            // It has been sent.
            yield* Effect.promise(() => new Promise<void>((resolve) => process.nextTick(resolve)))
            const end = performance.now() + blocked
            while (performance.now() < end);
            assert.isTrue(Option.isSome(yield* Fiber.join(asked)))
          }
          assert.isUndefined(suspended.pollUnsafe())
          // A request that is sent after the stall waits for no longer than others do.
          yield* line.blackhole
          const { millis } = yield* within(
            Effect.flip(Lock.withLockIfAvailable(Effect.void, "b")),
            1000,
            "the failure"
          )
          assert.isBelow(millis, 600)
          yield* line.pass
        }).pipe(Effect.provideContext(context))
      }))
      yield* assertEmpty(server, namespace)
    }))

  it.effect("grants what it has waited for, though its reader cannot connect", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const line = yield* proxy(server)
        const deaf = yield* node(line.url, { namespace, partitions: 1, lease: "3 seconds" })
        yield* on(deaf, Lock.withLock(Effect.void, "a"))
        yield* line.refuse
        const held = yield* Scope.make()
        yield* on(a!, Scope.provide(Lock.acquire("a"), held))
        const waiting = yield* Effect.forkChild(on(deaf, Lock.withLock(Effect.void, "a")))
        yield* eventually(Effect.map(on(a!, Lock.waiting("a")), ({ length }) => length === 1))
        yield* Scope.close(held, Exit.void)
        yield* within(Fiber.join(waiting), 4000, "the lock")
      })))

  it.effect("notices a half-open command connection, and goes on with another", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      yield* Effect.scoped(Effect.gen(function*() {
        const line = yield* proxy(server)
        const context = yield* node(line.url, { namespace, lease: "6 seconds", requestTimeout: "500 millis" })
        yield* Effect.gen(function*() {
          const held = yield* holding("a")
          // What is open is silent from here on; what is opened from here on works.
          yield* Effect.andThen(line.blackhole, line.pass)
          const { millis } = yield* within(Lock.withLock(Effect.void, "b"), 1500, "another lock")
          assert.isAbove(millis, 400)
          assert.isTrue(yield* held.lease.isHeld)
          yield* held.leave
        }).pipe(Effect.provideContext(context))
      }))
      yield* assertEmpty(server, namespace)
    }))

  it.effect("notices a half-open reader, and a wake-up arrives", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      // The safety net of a short lease is a resync once per lease, that of a long one the deadline of the read.
      yield* Effect.forEach([["1500 millis", 2500], ["1 minute", 7500]] as const, ([lease, bound]) =>
        Effect.gen(function*() {
          const namespace = freshNamespace()
          yield* Effect.scoped(Effect.gen(function*() {
            const line = yield* proxy(server)
            const mine = yield* node(line.url, { namespace, lease, margin: "500 millis" })
            const other = yield* node(server.url, { namespace, lease, margin: "500 millis" })
            const held = yield* Effect.provideContext(holding("a"), other)
            const silenced = yield* line.once((request) =>
              request.name === "XREAD", "blackholeReply")
            const waiting = yield* Effect.forkChild(Lock.withLock(Effect.void, "a").pipe(Effect.provideContext(mine)))
            yield* silenced
            yield* waits(server, namespace, "lock:a", 1)
            yield* held.leave
            yield* eventually(Effect.map(fields(server, namespace, "lock:a", "h"), (holds) => holds === 1))
            yield* within(Fiber.join(waiting), bound, `a wake-up with a lease of ${lease}`)
          }))
          yield* assertEmpty(server, namespace)
        }), { concurrency: "unbounded", discard: true })
    }))

  it.effect("doubts the reader when the connection for commands was half-open", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      yield* Effect.scoped(Effect.gen(function*() {
        const line = yield* proxy(server)
        const options = { namespace, partitions: 1, lease: "1 minute", requestTimeout: "300 millis" } as const
        const mine = yield* node(line.url, options)
        const other = yield* node(server.url, options)
        const held = yield* Effect.provideContext(holding("a"), other)
        const reading = yield* line.once((request) => request.name === "XREAD", "pass")
        const waiting = yield* Effect.forkChild(Lock.withLock(Effect.void, "a").pipe(Effect.provideContext(mine)))
        yield* waits(server, namespace, "lock:a", 1)
        yield* reading
        // What is open is silent from here on.
        yield* Effect.andThen(line.blackhole, line.pass)
        yield* held.leave
        yield* eventually(Effect.map(fields(server, namespace, "lock:a", "h"), (holds) => holds === 1))
        yield* Lock.withLock(Effect.void, "b").pipe(Effect.provideContext(mine))
        yield* within(Fiber.join(waiting), 500, "the wake-up")
      }))
      yield* assertEmpty(server, namespace)
    }))

  it.effect("makes a new reader also when that takes longer than a heartbeat", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      yield* Effect.scoped(Effect.gen(function*() {
        const line = yield* proxy(server)
        const mine = yield* node(line.url, { namespace, lease: "1500 millis", margin: "500 millis" })
        const other = yield* node(server.url, { namespace, lease: "1500 millis", margin: "500 millis" })
        const keys = ["a", "b", "c", "d", "e", "f"]
        const held = yield* Effect.provideContext(Effect.forEach(keys, holding), other)
        const waiting = yield* Effect.forEach(keys, (key) =>
          Lock.withLock(Effect.void, key).pipe(Effect.provideContext(mine), Effect.forkChild))
        yield* Effect.forEach(keys, (key) =>
          waits(server, namespace, `lock:${key}`, 1))
        yield* line.delay({ replies: 250 })
        const made = line.counters.connections
        yield* line.once((request) => request.name === "XREAD", "blackholeReply")
        yield* Effect.forEach(held, ({ leave }) => leave)
        yield* within(Effect.forEach(waiting, Fiber.join), 6000, "the wake-ups")
        assert.isAtMost(line.counters.connections - made, 2)
        yield* line.pass
      }))
      yield* assertEmpty(server, namespace)
    }))

  it.effect("waits for no longer than a lease for a connection of the reader that does not answer", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      yield* Effect.scoped(Effect.gen(function*() {
        const line = yield* proxy(server)
        const mine = yield* node(line.url, { namespace, lease: "1 second", margin: "200 millis" })
        const other = yield* node(server.url, { namespace, lease: "1 second", margin: "200 millis" })
        const { leave } = yield* Effect.provideContext(holding("a"), other)
        const waiting = yield* Lock.withLock(Effect.void, "a").pipe(Effect.provideContext(mine), Effect.forkChild)
        yield* waits(server, namespace, "lock:a", 1)
        const ofReader = (arg: string) => arg.endsWith(":reader")
        const reading = Effect.map(
          server.cli("CLIENT", "LIST"),
          (clients) => clients.split("\n").filter((client) => / cmd=xread /.test(client))
        )
        yield* eventually(Effect.map(reading, ({ length }) => assert.isAbove(length, 0)))
        const silent = yield* line.once(({ args }) => args.some(ofReader), "blackhole")
        for (const client of yield* reading) {
          yield* server.cli("CLIENT", "KILL", "ID", /id=(\d+)/.exec(client)![1]!)
        }
        yield* silent
        yield* leave
        // The lease, and until the reader connects again; the service's own `connectTimeout` is 5 seconds.
        yield* within(Fiber.join(waiting), 3000, "the wake-up")
      }))
      yield* assertEmpty(server, namespace)
    }))

  it.effect("reads every mailbox, also one that is first used while the reader connects", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      yield* Effect.scoped(Effect.gen(function*() {
        const line = yield* proxy(server)
        const mine = yield* node(line.url, { namespace, lease: "1 minute" })
        const other = yield* node(server.url, { namespace, lease: "1 minute" })
        const keys = ["a", "b", "c", "d", "e", "f"]
        const held = yield* Effect.provideContext(Effect.forEach(keys, holding), other)
        yield* line.delay({ replies: 30 })
        const waiting = yield* Effect.forEach(keys, (key, at) =>
          realSleep(at * 15).pipe(
            Effect.andThen(Lock.withLock(Effect.void, key)),
            Effect.provideContext(mine),
            Effect.forkChild
          ))
        yield* Effect.forEach(keys, (key) => waits(server, namespace, `lock:${key}`, 1))
        yield* realSleep(200)
        yield* line.pass
        // The first one last: a reader that has only its mailbox must not be helped by it.
        yield* Effect.forEach(held.slice(1), ({ leave }) => leave)
        yield* within(Effect.forEach(waiting.slice(1), Fiber.join), 500, "all wake-ups")
        yield* held[0]!.leave
        yield* within(Fiber.join(waiting[0]!), 500, "the last wake-up")
      }))
      yield* assertEmpty(server, namespace)
    }))

  for (const restored of [false, true]) {
    it.effect(`interrupts before the lease ends when the network is silent${restored ? ", and keeps the margin when it is back at once" : ""}`, () =>
      Effect.gen(function*() {
        const server = yield* TestServer
        const namespace = freshNamespace()
        const options = {
          namespace,
          partitions: 1,
          lease: "1500 millis",
          margin: "700 millis",
          requestTimeout: "200 millis"
        } as const
        yield* Effect.scoped(Effect.gen(function*() {
          const line = yield* proxy(server)
          const mine = yield* node(line.url, options)
          const other = yield* node(server.url, options)
          const watch = exclusion()
          const inside = yield* Deferred.make<Lease.Lease>()
          const [{ id }] = (yield* Effect.provideContext(
            Effect.flatMap(Coordinator.Coordinator, ({ sessions }) => sessions),
            mine
          )) as readonly [Coordinator.Session]
          let interruptedAt = Infinity
          let cleanedAt = Infinity
          const holder = yield* watch.enter("a", { millis: 60_000 }).pipe(
            (body) =>
              Effect.andThen(
                Effect.flatMap(Lease.current, (lease) => Deferred.succeed(inside, Option.getOrThrow(lease))),
                body
              ),
            Effect.onInterrupt(() =>
              Effect.gen(function*() {
                interruptedAt = Date.now()
                if (restored) yield* Effect.andThen(line.pass, line.closeAll)
                yield* realSleep(300)
                cleanedAt = Date.now()
              })
            ),
            Lock.withLock("a"),
            Effect.provideContext(mine),
            Effect.flip,
            Effect.forkChild
          )
          const lease = yield* Deferred.await(inside)
          const told = yield* Effect.forEach([1, 2, 3], () => Effect.forkChild(Effect.flip(lease.lost)))
          const successor = yield* Effect.gen(function*() {
            const at = Date.now()
            return { at, token: yield* watch.enter("a") }
          }).pipe(Lock.withLock("a"), Effect.provideContext(other), Effect.forkChild)
          yield* waits(server, namespace, "lock:a", 1)
          yield* line.blackhole
          const deadline = yield* deadlineOf(server, namespace, id!)
          const error = yield* Fiber.join(holder)
          assert.isTrue(
            error._tag === "LockError" && error.reason._tag === "LeaseLost" && error.reason.reason === "expired"
          )
          for (const fiber of told) assert.strictEqual((yield* Fiber.join(fiber)).reason, "expired")
          // A margin before the deadline, and the margin is 500 ms.
          assert.isBelow(elapsed(deadline - 500, interruptedAt), 200)
          const next = yield* Fiber.join(successor)
          assert.isAtLeast(next.at, cleanedAt)
          assert.isAbove(next.token, lease.token)
          assert.deepStrictEqual(watch.violations, [])
          yield* Effect.andThen(line.pass, line.closeAll)
          // And the loser is back by itself.
          yield* within(Lock.withLock(Effect.void, "a").pipe(Effect.provideContext(mine)), 3000, "back")
        }))
        yield* assertEmpty(server, namespace)
      }))
  }

  it.effect("gives at once what a dead session has kept, also to a claim that comes after its end", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      yield* Effect.scoped(Effect.gen(function*() {
        const line = yield* proxy(server)
        // Its heartbeat, with which it would find out anyway, is far away.
        const mine = yield* node(server.url, { namespace, partitions: 1, lease: "1 minute" })
        const dying = yield* node(line.url, { namespace, partitions: 1, lease: "500 millis", margin: "100 millis" })
        yield* Effect.provideContext(Effect.forkDetach(Lock.withLock(Effect.never, "a")), dying)
        yield* eventually(Effect.map(fields(server, namespace, "lock:a", "h"), (holds) => holds === 1))
        yield* line.blackhole
        yield* eventually(
          Effect.map(
            Effect.suspend(() => server.cli("ZRANGE", `{${namespace}:00}:due`, 0, Date.now(), "BYSCORE")),
            (ended) => ended !== ""
          )
        )
        assert.strictEqual(yield* fields(server, namespace, "lock:a", "h"), 1)
        yield* within(Lock.withLock(Effect.void, "a").pipe(Effect.provideContext(mine)), 1000, "the lock")
      }))
      yield* assertEmpty(server, namespace)
    }))

  it.effect("shows an outage as suspended, and open again when it is over in time", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      yield* Effect.scoped(Effect.gen(function*() {
        const line = yield* proxy(server)
        const context = yield* node(line.url, { namespace, partitions: 1, lease: "3 seconds", margin: "500 millis" })
        yield* Effect.gen(function*() {
          const coordinator = yield* Coordinator.Coordinator
          const seen: Array<string> = []
          yield* Effect.forkScoped(Stream.runForEach(coordinator.changes, (change) =>
            Effect.sync(() =>
              seen.push(`${change.from}>${change.to}`)
            )))
          const held = yield* holding("a")
          yield* line.refuse
          yield* line.closeAll
          const waiting = yield* Effect.forkChild(Lock.withLock(Effect.void, "b"))
          yield* eventually(Effect.sync(() =>
            seen.length > 0
          ))
          assert.deepStrictEqual(seen, ["open>suspended"])
          assert.strictEqual((yield* coordinator.sessions)[0]!.state, "suspended")
          assert.isTrue(yield* held.lease.isHeld)
          yield* line.pass
          yield* Fiber.join(waiting)
          assert.deepStrictEqual(seen, ["open>suspended", "suspended>open"])
          assert.isTrue(yield* held.lease.isHeld)
          yield* held.leave
        }).pipe(Effect.scoped, Effect.provideContext(context))
      }))
      yield* assertEmpty(server, namespace)
    }))

  it.effect("loses what it holds in an outage longer than the lease, and goes on waiting", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      const options = { namespace, lease: "1200 millis", margin: "200 millis" } as const
      yield* Effect.scoped(Effect.gen(function*() {
        const line = yield* proxy(server)
        const mine = yield* node(line.url, options)
        const other = yield* node(server.url, options)
        const held = yield* Effect.provideContext(holding("theirs"), other)
        yield* Effect.gen(function*() {
          const own = yield* Effect.scoped(Effect.gen(function*() {
            const pool = yield* Semaphore.make({ name: "pool", permits: 2 })
            const lease = yield* pool.takeScoped(1)
            const waiting = yield* Effect.forkChild(Lock.withLock(Effect.succeed("granted"), "theirs"))
            yield* waits(server, namespace, "lock:theirs", 1)
            yield* line.refuse
            yield* line.closeAll
            assert.strictEqual((yield* Effect.flip(lease.lost)).reason, "expired")
            assert.isFalse(yield* lease.isHeld)
            yield* realSleep(700)
            yield* line.pass
            // In its place again, and the semaphore exists again, without a call of the program.
            yield* waits(server, namespace, "lock:theirs", 1)
            yield* held.leave
            assert.strictEqual(yield* Fiber.join(waiting), "granted")
            assert.strictEqual(yield* pool.available, 2)
            return yield* Effect.exit(pool.withPermits(2)(Effect.void))
          }))
          assert.isTrue(Exit.isSuccess(own))
        }).pipe(Effect.provideContext(mine))
      }))
      yield* assertEmpty(server, namespace)
    }))
})
