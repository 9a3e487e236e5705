import { assert, layer } from "@effect/vitest"
import { Deferred, Effect, Exit, Fiber, Option, Schedule, Scope } from "effect"
import { Lease, ReadWriteLock } from "../src/index.ts"
import { apart } from "../src/internal/hold/holding.ts"
import type { Proxy } from "../src/testing/Proxy.ts"
import { behindLine } from "./support/behindLine.ts"
import { eventually } from "./support/eventually.ts"
import { assertEmpty, freshNamespace, node, onNode, TestServer, withNode } from "./support/live.ts"
import { waits } from "./support/requests.ts"
import { on, promptly, several } from "./support/several.ts"

const token = Effect.map(Lease.current, (lease) => Option.getOrThrow(lease).token)

const waiting = (namespace: string, count: number) =>
  Effect.flatMap(TestServer, (server) => waits(server, namespace, "readWriteLock:a", count))

/** A write lock whose downgrade was interrupted on its way to Redis, which gets it when it is released. */
const downgradingUnseen = (line: Proxy) =>
  Effect.gen(function*() {
    const lease = yield* ReadWriteLock.acquireWrite("a")
    const reweighing = yield* line.hold(({ args }) => args.includes("semaphore.reweigh"))
    const downgrading = yield* Effect.forkChild(ReadWriteLock.downgrade(lease))
    yield* reweighing.request
    yield* Fiber.interrupt(downgrading)
    return reweighing
  })

layer(TestServer.layer, { excludeTestServices: true, timeout: "60 seconds" })("ReadWriteLock", (it) => {
  it.effect("names its holders, its waiters, and what they want", () =>
    several(2, ([one, two], namespace, server) =>
      Effect.gen(function*() {
        const named = (all: ReadonlyArray<{ readonly mode: string; readonly node: string }>) =>
          all.map(({ mode, node }) => `${node} ${mode}`).sort()
        yield* Effect.scoped(Effect.gen(function*() {
          const lease = yield* on(one!, ReadWriteLock.acquireRead("a"))
          yield* on(two!, ReadWriteLock.acquireRead("a"))
          const writing = yield* Effect.forkChild(onNode(two!)(ReadWriteLock.withWriteLock(Effect.void, "a")))
          yield* waits(server, namespace, "readWriteLock:a", 1)
          const reading = yield* Effect.forkChild(onNode(one!)(apart(ReadWriteLock.withReadLock(Effect.void, "a"))))
          yield* waits(server, namespace, "readWriteLock:a", 2)
          const holders = yield* onNode(two!)(ReadWriteLock.holders("a"))
          assert.deepStrictEqual(named(holders), ["node0 read", "node1 read"])
          assert.include(holders.map(({ token }) => token), lease.token)
          const waiting = yield* onNode(two!)(ReadWriteLock.waiting("a"))
          assert.deepStrictEqual(waiting.map(({ mode, node }) => [node, mode]), [["node1", "write"], ["node0", "read"]])
          yield* Fiber.interruptAll([writing, reading])
        }))
        const write = ReadWriteLock.withWriteLock(Effect.map(ReadWriteLock.holders("a"), named), "a")
        assert.deepStrictEqual(yield* onNode(one!)(write), ["node0 write"])
        assert.deepStrictEqual(yield* onNode(one!)(ReadWriteLock.holders("a")), [])
      })))

  it.effect("lets in many readers or one writer, over several coordinators", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      yield* Effect.scoped(Effect.gen(function*() {
        const nodes = yield* Effect.all([1, 2, 3].map(() => node(server.url, { namespace })))
        let readers = 0
        let writers = 0
        let most = 0
        let last = 0
        const read = Effect.gen(function*() {
          readers++
          most = Math.max(most, readers)
          assert.strictEqual(writers, 0)
          yield* Effect.sleep(1)
          assert.strictEqual(writers, 0)
          readers--
        })
        const write = Effect.gen(function*() {
          const mine = yield* token
          assert.isAbove(mine, last)
          last = mine
          assert.deepStrictEqual([++writers, readers], [1, 0])
          yield* Effect.yieldNow
          assert.deepStrictEqual([writers--, readers], [1, 0])
        })
        yield* Effect.forEach(
          Array.from({ length: 200 }, (_, at) => at),
          (at) =>
            (at % 4 === 0 ? ReadWriteLock.withWriteLock(write, "a") : ReadWriteLock.withReadLock(read, "a")).pipe(
              onNode(nodes[at % 3]!)
            ),
          { concurrency: "unbounded", discard: true }
        )
        assert.isAbove(most, 1)
      }))
      yield* assertEmpty(server, namespace)
    }))

  it.effect("lets no reader overtake a waiting writer, and no writer starve readers", () =>
    withNode((namespace) =>
      Effect.gen(function*() {
        const order: Array<string> = []
        const enter = (name: string) => Effect.sync(() => void order.push(name))
        const fibers: Array<Fiber.Fiber<unknown, unknown>> = []
        yield* Effect.scoped(Effect.gen(function*() {
          const server = yield* TestServer
          const other = yield* node(server.url, { namespace })
          yield* onNode(other)(ReadWriteLock.acquireRead("a"))
          const wait = ["writer 1", "reader 1", "reader 2", "writer 2", "reader 3"]
          for (const [at, name] of wait.entries()) {
            const form = name.startsWith("writer") ? ReadWriteLock.withWriteLock : ReadWriteLock.withReadLock
            fibers.push(yield* Effect.forkDetach(form(enter(name), "a")))
            yield* waiting(namespace, at + 1)
          }
          assert.deepStrictEqual(order, [])
        }))
        yield* Effect.forEach(fibers, Fiber.join)
        assert.strictEqual(order[0], "writer 1")
        assert.sameMembers(order.slice(1, 3), ["reader 1", "reader 2"])
        assert.deepStrictEqual(order.slice(3), ["writer 2", "reader 3"])
      })
    ))

  it.effect("shares reading inside one's own reading and writing", () =>
    withNode((namespace) =>
      Effect.gen(function*() {
        const read = ReadWriteLock.withReadLock(token, "a")
        const server = yield* TestServer
        const other = yield* node(server.url, { namespace })
        const writer = yield* ReadWriteLock.withReadLock(
          Effect.gen(function*() {
            // A writer in between must not make the inner reader wait behind it, and so for itself.
            const writer = yield* Effect.forkDetach(
              ReadWriteLock.withWriteLock(Effect.succeed("written"), "a").pipe(onNode(other))
            )
            yield* waiting(namespace, 1)
            assert.strictEqual(yield* token, yield* read)
            return writer
          }),
          "a"
        )
        assert.strictEqual(yield* Fiber.join(writer), "written")
        yield* ReadWriteLock.withWriteLock(
          Effect.map(Effect.all([token, read]), ([a, b]) => assert.strictEqual(a, b)),
          "a"
        )
        const error = yield* Effect.flip(
          ReadWriteLock.withWriteLock(ReadWriteLock.withWriteLock(Effect.void, "a"), "a")
        )
        assert.strictEqual(error.reason._tag, "AlreadyWriting")
        yield* ReadWriteLock.withWriteLock(ReadWriteLock.withWriteLock(Effect.void, "a", { reentrant: true }), "a")
      })
    ))

  it.effect("upgrades the sole reader, with a new token, and is a reader again afterwards", () =>
    withNode((namespace) =>
      Effect.gen(function*() {
        const server = yield* TestServer
        const other = yield* node(server.url, { namespace })
        const reading = ReadWriteLock.withReadLockIfAvailable(Effect.void, "a").pipe(onNode(other))
        yield* ReadWriteLock.withReadLock(
          Effect.gen(function*() {
            const before = yield* token
            assert.isTrue(Option.isSome(yield* reading))
            const during = yield* ReadWriteLock.withWriteLock(
              Effect.gen(function*() {
                assert.isTrue(Option.isNone(yield* reading))
                return yield* token
              }),
              "a"
            )
            assert.isAbove(during, before)
            assert.isTrue(Option.isSome(yield* reading))
            // Scoped, too.
            yield* Effect.scoped(Effect.gen(function*() {
              yield* ReadWriteLock.acquireWrite("a")
              assert.isTrue(Option.isNone(yield* reading))
            }))
            assert.isTrue(Option.isSome(yield* reading))
          }),
          "a"
        )
      })
    ))

  it.effect("reads on when an upgraded lock was downgraded, and writes anew", () =>
    withNode((namespace) =>
      Effect.gen(function*() {
        const other = yield* node((yield* TestServer).url, { namespace })
        const reading = ReadWriteLock.withReadLockIfAvailable(Effect.void, "a").pipe(onNode(other))
        yield* Effect.scoped(Effect.gen(function*() {
          yield* ReadWriteLock.acquireRead("a")
          yield* Effect.scoped(Effect.gen(function*() {
            const lease = yield* ReadWriteLock.acquireWrite("a")
            yield* ReadWriteLock.downgrade(lease)
            assert.isTrue(Option.isSome(yield* reading))
            assert.isTrue(Option.isNone(yield* ReadWriteLock.withWriteLock(reading, "a")))
            assert.isTrue(Option.isSome(yield* reading))
          }))
          assert.isTrue(Option.isSome(yield* reading))
          assert.isTrue(Option.isNone(yield* ReadWriteLock.withWriteLock(reading, "a")))
        }))
      })
    ))

  it.effect("writes until the last effect that has upgraded it has ended", () =>
    withNode((namespace) =>
      Effect.gen(function*() {
        const other = yield* node((yield* TestServer).url, { namespace })
        const reading = ReadWriteLock.withReadLockIfAvailable(Effect.void, "a").pipe(onNode(other))
        const reentrant = { reentrant: true } as const
        yield* ReadWriteLock.withReadLock(
          Effect.gen(function*() {
            // At once: one of them writes, and it writes until its end.
            for (const options of [{}, reentrant]) {
              const outcome = Effect.match(ReadWriteLock.withWriteLock(Effect.sleep("20 millis"), "a", options), {
                onFailure: ({ reason }) => reason._tag,
                onSuccess: () => "written"
              })
              assert.deepStrictEqual(
                yield* Effect.all([outcome, outcome], { concurrency: "unbounded" }),
                ["written", "UpgradeConflict"]
              )
              assert.isTrue(Option.isSome(yield* reading))
            }
            // One that was forked before its parent writes is none of its children there.
            const refused = yield* Effect.scoped(Effect.gen(function*() {
              const written = yield* Deferred.make<void>()
              const beside = Effect.andThen(Deferred.await(written), ReadWriteLock.acquireWrite("a", reentrant))
              const child = yield* Effect.forkChild(beside, { startImmediately: true })
              yield* ReadWriteLock.acquireWrite("a")
              yield* ReadWriteLock.acquireWrite("a", reentrant)
              yield* Effect.forkChild(ReadWriteLock.acquireWrite("a", reentrant)).pipe(Effect.flatMap(Fiber.join))
              yield* Deferred.succeed(written, undefined)
              return yield* Effect.flip(Fiber.join(child))
            }))
            assert.strictEqual(refused.reason._tag, "UpgradeConflict")
            // A child that ends before it.
            assert.isTrue(Option.isNone(
              yield* ReadWriteLock.withWriteLock(
                Effect.andThen(ReadWriteLock.withWriteLock(Effect.void, "a", reentrant), reading),
                "a"
              )
            ))
            assert.isTrue(Option.isSome(yield* reading))
            // A child that outlives the effect that has upgraded it.
            const child = yield* ReadWriteLock.withWriteLock(
              Effect.forkDetach(
                ReadWriteLock.withWriteLock(Effect.andThen(Effect.sleep("100 millis"), reading), "a", reentrant),
                { startImmediately: true }
              ),
              "a"
            )
            assert.isTrue(Option.isNone(yield* reading))
            assert.deepStrictEqual(yield* Fiber.join(child), Option.none())
            yield* eventually(Effect.map(reading, Option.isSome))
            // Between its end and the answer to that, another one upgrades it anew.
            const again = yield* Effect.all(
              Array.from({ length: 20 }, (_, at) =>
                Effect.andThen(
                  Effect.sleep(at),
                  Effect.exit(
                    ReadWriteLock.withWriteLock(Effect.sleep(1).pipe(Effect.andThen(reading)), "a").pipe(
                      Effect.retry({
                        schedule: Schedule.spaced(1),
                        while: ({ reason }) => reason._tag === "UpgradeConflict"
                      })
                    )
                  )
                )),
              { concurrency: "unbounded" }
            )
            assert.isTrue(again.every((exit) => Exit.isSuccess(exit) && Option.isNone(exit.value)), String(again))
          }),
          "a"
        )
        assert.isTrue(Option.isSome(yield* reading))
      })
    ))

  it.effect("knows of a downgrade whose caller was interrupted", () =>
    behindLine(({ context, direct, line }) =>
      Effect.gen(function*() {
        const other = yield* direct()
        const reading = ReadWriteLock.withReadLockIfAvailable(Effect.void, "a").pipe(onNode(other))
        yield* onNode(context)(Effect.scoped(Effect.gen(function*() {
          const reweighing = yield* downgradingUnseen(line)
          yield* reweighing.release()
          yield* eventually(Effect.map(reading, Option.isSome))
          const scope = yield* Scope.make()
          yield* onNode(other)(Scope.provide(ReadWriteLock.acquireRead("a"), scope))
          const refused = yield* Effect.flip(ReadWriteLock.withWriteLock(Effect.void, "a", { reentrant: true }))
          assert.strictEqual(refused.reason._tag, "UpgradeConflict")
          assert.isTrue(Option.isNone(yield* ReadWriteLock.withWriteLockIfAvailable(Effect.die("it runs"), "a")))
          assert.isTrue(Option.isNone(yield* ReadWriteLock.acquireWriteIfAvailable("a")))
          yield* Scope.close(scope, Exit.void)
        })))
      }), { lease: "30 seconds" }))

  it.effect("writes behind a downgrade that Redis has not executed yet, and no reader comes in", () =>
    behindLine(({ context, direct, line }) =>
      Effect.gen(function*() {
        const other = yield* direct()
        const reading = ReadWriteLock.withReadLockIfAvailable(Effect.void, "a").pipe(onNode(other))
        yield* onNode(context)(Effect.scoped(Effect.gen(function*() {
          const reweighing = yield* downgradingUnseen(line)
          const released = yield* Deferred.make<void>()
          const readings = Effect.forEach(Array.from({ length: 20 }), () => Effect.delay(reading, "5 millis"))
          const writing = yield* Effect.forkChild(
            ReadWriteLock.withWriteLock(Effect.andThen(Deferred.await(released), readings), "a", { reentrant: true }),
            { startImmediately: true }
          )
          yield* reweighing.release()
          yield* Deferred.succeed(released, undefined)
          assert.isTrue((yield* Fiber.join(writing)).every(Option.isNone))
          yield* eventually(Effect.map(reading, Option.isSome))
        })))
      }), { lease: "30 seconds" }))

  it.effect("is upgraded, and is a reader again, in time while Redis is away", () =>
    behindLine(({ context, direct, line }) =>
      Effect.gen(function*() {
        const other = yield* direct()
        const reading = ReadWriteLock.withReadLockIfAvailable(Effect.void, "a").pipe(onNode(other))
        yield* onNode(context)(ReadWriteLock.withReadLock(
          Effect.gen(function*() {
            const writing = yield* Deferred.make<void>()
            const writer = yield* Effect.forkChild(
              ReadWriteLock.withWriteLock(Effect.andThen(Deferred.succeed(writing, undefined), Effect.never), "a")
            )
            yield* Deferred.await(writing)
            yield* line.blackhole
            yield* promptly(Fiber.interrupt(writer), "the end of the writer")
            // It fails as a question does, though Redis may make the lock heavier later.
            const refused = yield* promptly(
              Effect.flip(ReadWriteLock.withWriteLock(Effect.void, "a")),
              "the answer"
            )
            assert.include(["Timeout", "ConnectionLost", "NotConnected"], refused.reason._tag)
            // It is interrupted as any other wait is.
            const upgrades = [
              ReadWriteLock.withWriteLock(Effect.void, "a"),
              Effect.scoped(ReadWriteLock.acquireWrite("a"))
            ]
            for (const upgrade of upgrades) {
              const began = performance.now()
              assert.isTrue(Option.isNone(yield* Effect.timeoutOption(upgrade, "50 millis")))
              assert.isBelow(performance.now() - began, 200)
            }
            yield* line.pass
            yield* eventually(Effect.map(reading, Option.isSome))
            yield* ReadWriteLock.withWriteLock(Effect.map(reading, (found) => assert.isTrue(Option.isNone(found))), "a")
          }),
          "a"
        ))
      }), { lease: "30 seconds", requestTimeout: "300 millis" }))

  it.effect("fails with UpgradeConflict when others read, and changes nothing", () =>
    withNode((namespace) =>
      Effect.gen(function*() {
        const server = yield* TestServer
        const other = yield* node(server.url, { namespace })
        const upgrading = ReadWriteLock.withReadLock(
          Effect.gen(function*() {
            const error = yield* Effect.flip(ReadWriteLock.withWriteLock(Effect.die("must not run"), "a"))
            assert.strictEqual(error.reason._tag, "UpgradeConflict")
            assert.isTrue(yield* Option.getOrThrow(yield* Lease.current).isHeld)
          }),
          "a"
        )
        // Both at once: neither deadlocks.
        const ready = [yield* Deferred.make<void>(), yield* Deferred.make<void>()] as const
        const both = yield* Effect.all(
          [0, 1].map((at) =>
            ReadWriteLock.withReadLock(
              Effect.gen(function*() {
                yield* Deferred.succeed(ready[at]!, undefined)
                yield* Deferred.await(ready[1 - at]!)
                return yield* Effect.exit(ReadWriteLock.withWriteLock(Effect.void, "a"))
              }),
              "a"
            ).pipe(onNode(other))
          ),
          { concurrency: "unbounded" }
        )
        assert.isTrue(both.some(Exit.isFailure))
        yield* Effect.scoped(Effect.andThen(
          onNode(other)(ReadWriteLock.acquireRead("a")),
          upgrading
        ))
      })
    ))

  it.effect("downgrades without letting another writer in between", () =>
    withNode((namespace) =>
      Effect.gen(function*() {
        const server = yield* TestServer
        const other = yield* node(server.url, { namespace })
        yield* Effect.scoped(Effect.gen(function*() {
          const lease = yield* ReadWriteLock.acquireWrite("a")
          const reader = yield* Effect.forkDetach(
            ReadWriteLock.withReadLock(Effect.succeed("read"), "a").pipe(onNode(other))
          )
          yield* waiting(namespace, 1)
          yield* ReadWriteLock.downgrade(lease)
          assert.strictEqual(yield* Fiber.join(reader), "read")
          const writing = ReadWriteLock.withWriteLockIfAvailable(Effect.void, "a").pipe(onNode(other))
          assert.isTrue(Option.isNone(yield* writing))
          assert.isTrue(yield* lease.isHeld)
          assert.strictEqual((yield* Effect.flip(ReadWriteLock.downgrade(lease))).reason._tag, "NotWriting")
        }))
        assert.isTrue(
          Option.isSome(
            yield* ReadWriteLock.withWriteLockIfAvailable(Effect.void, "a").pipe(onNode(other))
          )
        )
      })
    ))

  it.effect("does not mix with a lock of the same name", () =>
    withNode(() =>
      Effect.scoped(Effect.gen(function*() {
        yield* ReadWriteLock.acquireWrite("a")
        const { Lock } = yield* Effect.promise(() => import("../src/index.ts"))
        assert.isTrue(Option.isSome(yield* Lock.acquireIfAvailable("a")))
      }))
    ))

  it.effect("becomes a read lock again when Redis had refused that", () =>
    withNode((namespace) =>
      Effect.gen(function*() {
        const server = yield* TestServer
        const other = yield* node(server.url, { namespace })
        const reading = onNode(other)(ReadWriteLock.withReadLockIfAvailable(Effect.void, "a"))
        const lease = yield* ReadWriteLock.acquireRead("a")
        const refuse = server.cli("ACL", "SETUSER", "default", "-fcall")
        yield* ReadWriteLock.withWriteLock(refuse, "a").pipe(
          Effect.ensuring(Effect.orDie(server.cli("ACL", "SETUSER", "default", "+fcall")))
        )
        yield* ReadWriteLock.withWriteLock(Effect.void, "a")
        yield* eventually(Effect.map(reading, (read) => assert.isTrue(Option.isSome(read))))
        assert.isTrue(yield* lease.isHeld)
        // Without another write, with a pause.
        yield* ReadWriteLock.withWriteLock(refuse, "a").pipe(
          Effect.ensuring(Effect.orDie(server.cli("ACL", "SETUSER", "default", "+fcall")))
        )
        yield* eventually(Effect.map(reading, (read) => assert.isTrue(Option.isSome(read))))
      }).pipe(Effect.scoped), { lease: "2 seconds", margin: "400 millis" }))

  it.effect("writes until its effect has ended when Redis has refused a downgrade", () =>
    several(2, ([one, two], _, server) =>
      Effect.gen(function*() {
        const reading = onNode(two!)(apart(ReadWriteLock.withReadLockIfAvailable(Effect.void, "a")))
        const downgrading = Effect.flatMap(Lease.current, (lease) => ReadWriteLock.downgrade(Option.getOrThrow(lease)))
        const refused = Effect.gen(function*() {
          yield* server.cli("ACL", "SETUSER", "default", "-fcall")
          const { reason } = yield* Effect.flip(downgrading)
          assert.strictEqual(reason._tag, "MissingPermission")
        }).pipe(Effect.ensuring(Effect.orDie(server.cli("ACL", "SETUSER", "default", "+fcall"))))
        yield* onNode(one!)(ReadWriteLock.withReadLock(
          Effect.gen(function*() {
            yield* ReadWriteLock.withWriteLock(
              Effect.andThen(
                refused,
                Effect.gen(function*() {
                  assert.isTrue(Option.isNone(yield* reading))
                  const again = yield* Effect.flip(ReadWriteLock.withWriteLock(Effect.void, "a"))
                  assert.strictEqual(again.reason._tag, "AlreadyWriting")
                })
              ),
              "a"
            )
            assert.isTrue(Option.isSome(yield* reading))
            // Its effect has ended before the downgrade was refused.
            const fiber = yield* ReadWriteLock.withWriteLock(
              Effect.andThen(
                server.cli("ACL", "SETUSER", "default", "-fcall"),
                Effect.forkDetach(Effect.exit(downgrading), { startImmediately: true })
              ),
              "a"
            )
            assert.isTrue(Exit.isFailure(yield* Fiber.join(fiber)))
            yield* server.cli("ACL", "SETUSER", "default", "+fcall")
            yield* eventually(Effect.map(reading, (read) => assert.isTrue(Option.isSome(read))))
            assert.isTrue(Option.isNone(yield* ReadWriteLock.withWriteLock(reading, "a")))
          }),
          "a"
        ))
      })))
})
