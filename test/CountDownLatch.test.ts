/** Countdown latches: they open once, for all waiters, and remember what they have to. */
import { assert, layer } from "@effect/vitest"
import { Effect, Exit, Fiber, Option, Schema, Scope } from "effect"
import * as fc from "fast-check"
import { Coordinator, CountDownLatch, Latch, Lock, TaskGroup } from "../src/index.ts"
import { make as proxy } from "../src/testing/Proxy.ts"
import { actor, client } from "./support/actor.ts"
import { assertUnanswered, behindLine } from "./support/behindLine.ts"
import { departed } from "./support/departed.ts"
import { runs } from "./support/effort.ts"
import { eventually } from "./support/eventually.ts"
import { assertEmpty, freshNamespace, type Node, node, TestServer } from "./support/live.ts"
import { asks, fields } from "./support/requests.ts"
import { behind, forgetSession, lose, on, pending, promptly, sessionsExpired, several } from "./support/several.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

/** Short, so that the namespace is empty soon. */
const timeToLive = "100 millis"

const latchOn = (context: Node, count: number) => on(context, CountDownLatch.make({ name: "ready", count, timeToLive }))

layer(TestServer.layer, live)("a countdown latch", (it) => {
  it.effect("stays for its time after the processes that had it open have died, as latches and task groups do", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const all = (context: Node, timeToLive: "100 millis" | "3 seconds") =>
          Effect.all([
            on(context, CountDownLatch.make({ name: `ready, ${timeToLive}`, count: 3, timeToLive })),
            on(context, Latch.make({ name: `start, ${timeToLive}`, timeToLive })),
            on(context, TaskGroup.make({ name: `job, ${timeToLive}`, result: Schema.Number, timeToLive }))
          ])
        yield* departed(server, namespace, 1, (context) =>
          Effect.forEach(["100 millis", "3 seconds"] as const, (life) =>
            Effect.flatMap(all(context, life), ([ready, start, job]) =>
              Effect.all([ready.countDown(), start.open, job.run("x", Effect.succeed(1))]))))
        yield* Effect.sleep("200 millis")
        const [ready, start, job] = yield* all(a!, "100 millis")
        assert.deepStrictEqual([yield* ready.remaining, yield* start.isOpen, (yield* job.snapshot).done], [3, false, 0])
        const kept = yield* all(a!, "3 seconds")
        assert.deepStrictEqual([yield* kept[0].remaining, yield* kept[1].isOpen, (yield* kept[2].snapshot).done], [
          2,
          true,
          1
        ])
      }), { lease: "30 seconds" }))

  it.effect("opens for all waiters, in all processes, and for those that come later", () =>
    several(3, (nodes) =>
      Effect.gen(function*() {
        const latches = yield* Effect.forEach(nodes, (context) => latchOn(context, 3))
        const waiting = yield* Effect.forEach(latches, (latch) => Effect.forkChild(latch.await))
        assert.strictEqual(yield* latches[0]!.countDown(), 2)
        assert.strictEqual(yield* latches[1]!.countDown(), 1)
        assert.strictEqual(yield* latches[2]!.remaining, 1)
        assert.isFalse(yield* latches[2]!.isOpen)
        yield* Effect.forEach(waiting, pending)
        assert.strictEqual(yield* latches[2]!.countDown({ by: 5 }), 0)
        yield* promptly(Effect.forEach(waiting, Fiber.join), "the waiters")
        assert.isTrue(yield* latches[0]!.isOpen)
        const late = yield* latchOn(nodes[1]!, 3)
        yield* promptly(late.await, "a late one")
        assert.strictEqual(yield* late.countDown(), 0)
      })))

  it.effect("opens for waiters in the process that opens it, by way of another make", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const [one, two] = [yield* latchOn(a!, 1), yield* latchOn(a!, 1)]
        const waiting = yield* Effect.forkChild(two.await)
        yield* pending(waiting)
        yield* one.countDown()
        yield* promptly(Fiber.join(waiting), "the waiter")
        yield* one.reset
        yield* eventually(Effect.map(two.isOpen, (isOpen) => !isOpen))
      })))

  it.effect("counts each id once", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const [one, two] = [yield* latchOn(a!, 2), yield* latchOn(b!, 2)]
        assert.strictEqual(yield* one.countDown({ id: "x\n/" }), 1)
        assert.strictEqual(yield* two.countDown({ id: "x\n/" }), 1)
        assert.strictEqual(yield* one.countDown({ id: "y" }), 0)
      })))

  it.effect("is reset: earlier waiters pass, later ones wait", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const [one, two] = [yield* latchOn(a!, 1), yield* latchOn(b!, 1)]
        const before = yield* Effect.forkChild(two.await)
        yield* Effect.yieldNow
        // In one batch.
        yield* Effect.all([one.countDown({ id: "x" }), one.reset], { concurrency: "unbounded" })
        yield* promptly(Fiber.join(before), "who waited before")
        const after = yield* Effect.forkChild(two.await)
        assert.isFalse(yield* two.isOpen)
        yield* pending(after)
        // The same id counts again.
        yield* one.countDown({ id: "x" })
        yield* promptly(Fiber.join(after), "who came after")
      })))

  it.effect("interrupts its waiters when its scope is closed, and fails them when the coordinator is closed", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const server = yield* TestServer
        const scope = yield* Scope.make()
        const latch = yield* Scope.provide(latchOn(a!, 1), scope)
        const waiting = yield* Effect.forkChild(latch.await)
        yield* Effect.yieldNow
        yield* Scope.close(scope, Exit.void)
        assert.isTrue(Exit.hasInterrupts(yield* promptly(Fiber.await(waiting), "the end of the latch")))
        assert.isTrue(Exit.hasInterrupts(yield* Effect.exit(latch.await)))

        const outer = yield* Scope.make()
        const context = yield* Scope.provide(node(server.url, { namespace: freshNamespace(), partitions: 1 }), outer)
        const other = yield* latchOn(context, 1)
        const left = yield* Effect.forkChild(other.await)
        yield* Effect.yieldNow
        yield* Scope.close(outer, Exit.void)
        const { reason } = yield* promptly(Effect.flip(Fiber.join(left)), "the end of the coordinator")
        assert.deepInclude(reason, { _tag: "CoordinatorClosed" })
        assert.strictEqual((yield* Effect.flip(other.await)).reason._tag, "CoordinatorClosed")
      })))

  it.effect("refuses another count, and bad numbers as defects", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const latch = yield* latchOn(a!, 2)
        const error = yield* Effect.flip(latchOn(b!, 3))
        assert.strictEqual(error.reason._tag, "CountMismatch")
        assert.deepInclude(error.reason, { count: 3, existing: 2 })
        for (const count of [0, -1, 1.5, Number.NaN, 2 ** 31]) {
          const exit = yield* Effect.exit(latchOn(b!, count))
          assert.isTrue(Exit.isFailure(exit) && String(exit.cause).includes("RangeError"))
        }
        for (const by of [0, 0.5]) {
          const exit = yield* Effect.exit(latch.countDown({ by }))
          assert.isTrue(Exit.isFailure(exit) && String(exit.cause).includes("RangeError"))
        }
        const forEver = yield* Effect.exit(
          on(b!, CountDownLatch.make({ name: "ready", count: 2, timeToLive: "Infinity" }))
        )
        assert.isTrue(Exit.isFailure(forEver) && String(forEver.cause).includes("RangeError"))
        const exit = yield* Effect.exit(latch.countDown({ id: "" }))
        assert.isTrue(Exit.isFailure(exit) && String(exit.cause).includes("RangeError"))
        assert.strictEqual(yield* latch.remaining, 2)
      })))

  it.effect("costs one event for each process, however many wait, and nothing for a waiter that gives up", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const [one, two] = [yield* latchOn(a!, 1), yield* latchOn(b!, 1)]
        const waiting = yield* Effect.forEach(Array.from({ length: 64 }), () => Effect.forkChild(two.await))
        assert.isTrue(Option.isNone(yield* Effect.timeoutOption(two.await, "10 millis")))
        const given = yield* Effect.forkChild(two.await)
        yield* Effect.yieldNow
        yield* Fiber.interrupt(given)
        const [{ id }] = (yield* on(b!, Effect.flatMap(Coordinator.Coordinator, (it) => it.sessions))) as readonly [
          Coordinator.Session
        ]
        const mailbox = `{${namespace}:00}:mail:${id}`
        const before = Number(
          (yield* server.cli("XINFO", "STREAM", mailbox)).split("\n").at(
            (yield* server.cli("XINFO", "STREAM", mailbox)).split("\n").indexOf("entries-added") + 1
          )
        )
        yield* one.countDown()
        yield* promptly(Effect.forEach(waiting, Fiber.join), "all of them")
        const after = (yield* server.cli("XINFO", "STREAM", mailbox)).split("\n")
        assert.strictEqual(Number(after[after.indexOf("entries-added") + 1]), before + 1)
      })))

  it.effect("is remembered for its time to live while no process has it open", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        yield* Effect.scoped(Effect.gen(function*() {
          const latch = yield* on(a!, CountDownLatch.make({ name: "ready", count: 2, timeToLive: "1 minute" }))
          yield* latch.countDown()
        }))
        const ttl = Number(yield* server.cli("PTTL", `{${namespace}:00}:countDownLatch:ready`))
        assert.isTrue(ttl > 50_000 && ttl <= 60_000)
        yield* Effect.scoped(Effect.gen(function*() {
          const latch = yield* latchOn(b!, 2)
          // A member keeps it for a day, which each heartbeat of a long day begins anew.
          assert.isAbove(Number(yield* server.cli("PTTL", `{${namespace}:00}:countDownLatch:ready`)), 80_000_000)
          assert.strictEqual(yield* latch.countDown(), 0)
        }))
        // Nothing to remember, so it is deleted at once.
        yield* Effect.scoped(on(a!, CountDownLatch.make({ name: "unused", count: 2, timeToLive: "1 minute" })))
        assert.strictEqual(yield* server.cli("EXISTS", `{${namespace}:00}:countDownLatch:unused`), "0")
      })))

  it.effect("is remembered for as long as the last make says, also when others join again, or Redis has lost it", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const members = fields(server, namespace, "countDownLatch:ready", "o")
        const all = (count: number) =>
          eventually(Effect.map(members, (found) => found === count), { message: `${count} members` })
        yield* Effect.scoped(Effect.gen(function*() {
          const latch = yield* on(a!, CountDownLatch.make({ name: "ready", count: 2, timeToLive: "1 minute" }))
          yield* on(b!, CountDownLatch.make({ name: "ready", count: 2, timeToLive: "1 hour" }))
          yield* latch.countDown()
          yield* lose(a!, namespace, server)
          yield* all(2)
        }))
        const ttl = Effect.map(server.cli("PTTL", `{${namespace}:00}:countDownLatch:ready`), Number)
        yield* all(0)
        assert.isAbove(yield* ttl, 60_000)
        for (const [first, second] of [[a!, b!], [b!, a!]] as const) {
          yield* Effect.scoped(Effect.gen(function*() {
            const latch = yield* on(a!, CountDownLatch.make({ name: "ready", count: 2, timeToLive: "1 minute" }))
            yield* on(b!, CountDownLatch.make({ name: "ready", count: 2, timeToLive: "1 hour" }))
            yield* latch.countDown()
            yield* server.cli("FLUSHALL")
            yield* on(first, Lock.withLockIfAvailable(Effect.void, "to be told"))
            yield* all(1)
            yield* on(second, Lock.withLockIfAvailable(Effect.void, "to be told"))
            yield* all(2)
          }))
          yield* all(0)
          assert.isAbove(yield* ttl, 60_000)
        }
        yield* server.cli("FLUSHALL")
      })))

  it.effect("is restored after Redis has lost its data", () =>
    several(3, ([a, b, c], _, server) =>
      Effect.gen(function*() {
        const [one, two] = [yield* latchOn(a!, 3), yield* latchOn(b!, 3)]
        const open = yield* on(c!, CountDownLatch.make({ name: "open", count: 1, timeToLive }))
        yield* open.countDown()
        yield* one.countDown()
        yield* two.countDown({ id: "two" })
        const waiting = yield* Effect.forEach([one, two], (latch) => Effect.forkChild(latch.await))
        yield* server.cli("FLUSHALL")
        // Both have counted again what they had counted, and no more.
        yield* eventually(Effect.map(one.remaining, (left) => left === 1), { timeout: "10 seconds" })
        yield* eventually(open.isOpen, { timeout: "10 seconds" })
        yield* promptly(open.await, "the open one")
        yield* Effect.forEach(waiting, pending)
        assert.strictEqual(yield* two.countDown(), 0)
        yield* eventually(Effect.sync(() => waiting.every((fiber) => fiber.pollUnsafe() !== undefined)))
      })))

  it.effect("is reset as the first request after Redis has lost its data, and by one member for all", () =>
    several(2, ([a, b], _, server) =>
      Effect.gen(function*() {
        const [one, two] = [yield* latchOn(a!, 3), yield* latchOn(b!, 3)]
        const told = (node: Node) => on(node, Lock.withLockIfAvailable(Effect.void, "to be told"))
        yield* one.countDown()
        yield* one.countDown({ id: "b" })
        for (const member of [one, two]) {
          yield* server.cli("FLUSHALL")
          yield* member.reset
          // What each member restores is behind the first in the queue, and executed before the second.
          for (const node of [a!, b!, a!, b!]) yield* told(node)
          assert.strictEqual(yield* one.remaining, 3)
          assert.strictEqual(yield* one.countDown({ id: "b" }), 2)
        }
        // The first count with an id has counted.
        assert.strictEqual(yield* one.countDown({ id: "b", by: 2 }), 2)
        yield* server.cli("FLUSHALL")
        for (const node of [b!, a!, b!, a!]) yield* told(node)
        assert.strictEqual(yield* one.remaining, 2)
      })))

  it.effect("counts again, and once, what a Redis that went back has forgotten", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const [one, two] = [yield* latchOn(a!, 200), yield* latchOn(b!, 200)]
        const keys = ["countDownLatch", "countDownLatch-items"].map((kind) => `{${namespace}:00}:${kind}:ready`)
        yield* one.countDown()
        yield* one.countDown({ id: "x" })
        for (const key of keys) yield* server.cli("COPY", key, `${key}:before`)
        yield* Effect.forEach(Array.from({ length: 100 }), () => one.countDown(), { concurrency: "unbounded" })
        yield* one.countDown({ id: "y", by: 3 })
        assert.strictEqual(yield* two.remaining, 95)
        for (const key of keys) yield* server.cli("RENAME", `${key}:before`, key)
        yield* lose(a!, namespace, server)
        yield* eventually(Effect.map(two.remaining, (left) => left === 95), { message: "it has counted again" })
        // Now nothing is forgotten but the session.
        yield* lose(a!, namespace, server)
        assert.strictEqual(yield* one.countDown(), 94)
        yield* eventually(Effect.map(fields(server, namespace, "countDownLatch:ready", "o"), (found) => found === 2))
        assert.strictEqual(yield* one.countDown({ id: "y" }), 94)
        yield* two.countDown({ by: 94 })
        yield* promptly(Effect.andThen(one.await, two.await), "both")
      })))

  it.effect("counts all again that Redis has forgotten, also when a newer count comes first", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const [one, two] = [yield* latchOn(a!, 400), yield* latchOn(b!, 400)]
        const keys = ["countDownLatch", "countDownLatch-items"].map((kind) => `{${namespace}:00}:${kind}:ready`)
        yield* one.countDown()
        for (const key of keys) yield* server.cli("COPY", key, `${key}:before`)
        yield* Effect.forEach(Array.from({ length: 300 }), () => one.countDown(), { concurrency: "unbounded" })
        for (const key of keys) yield* server.cli("RENAME", `${key}:before`, key)
        yield* forgetSession(a!, namespace, server)
        // The process learns of the loss with this one, which is sent again at once.
        yield* one.countDown()
        yield* eventually(Effect.map(two.remaining, (left) => left === 98), { message: "all are counted again" })
        yield* two.countDown({ by: 98 })
        yield* promptly(Effect.andThen(one.await, two.await), "both")
      })))

  it.effect("counts each number of a member once, in any order", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      yield* Effect.promise(async () => {
        const total = 10_000
        const { open, send } = actor(redis, freshNamespace(), "countDownLatch:numbers")
        await open("a")
        const remaining = async (number: number) =>
          Number((await send("a", "latch.count", ["n1", number, 1, total, 60_000, "", ""]))[2])
        const counted = new Set<number>()
        const count = async (number: number) => {
          counted.add(number)
          assert.strictEqual(await remaining(number), total - counted.size, `${number}`)
        }
        for (const number of [1, 2, 1000, 2, 3, 1000, 999, 500, 999, 499, 501, 500, 1]) await count(number)
        for (let number = 1; number <= 1001; number++) await count(number)
        for (let number = 1001; number >= 1; number--) await count(number)
        // Of numbers that come in a bad order some may be forgotten, and none is counted twice.
        for (let number = 2000; number > 1001; number -= 2) await remaining(number)
        const left = await remaining(2001)
        for (let number = 2000; number > 1001; number -= 2) assert.strictEqual(await remaining(number), left)
      })
    }))

  it.effect("does not count again what was reset after the loss of the session", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const direct = yield* latchOn(a!, 3)
        const line = yield* proxy(server)
        const context = yield* node(line.url, { namespace, partitions: 1, lease: "6 seconds" })
        const latch = yield* latchOn(context, 3)
        yield* latch.countDown({ id: "x" })
        const again = yield* line.hold(asks("latch.count"))
        yield* lose(context, namespace, server)
        yield* promptly(again.request, "it is counted again")
        yield* direct.reset
        yield* again.release()
        assert.strictEqual(yield* latch.countDown({ id: "y" }), 2)
      })))

  it.effect("is opened and reset at once, however many ids were counted", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const latch = yield* latchOn(a!, 3)
        const items = `{${namespace}:00}:countDownLatch-items:ready`
        const slowest: Array<number> = []
        yield* server.cli("CONFIG", "SET", "slowlog-log-slower-than", "0")
        for (const end of [latch.countDown({ by: 3 }), latch.reset, latch.countDown({ by: 3 }), latch.reset]) {
          if (yield* latch.isOpen) yield* latch.reset
          yield* latch.countDown({ id: "first" })
          yield* server.cli(
            "EVAL",
            "for n = 1, 100000 do redis.call('HSET', KEYS[1], 'i' .. n, '') end",
            1,
            items
          )
          assert.isAtLeast(Number(yield* server.cli("HLEN", items)), 100_000)
          yield* server.cli("SLOWLOG", "RESET")
          yield* end
          const log = (yield* server.call("SLOWLOG", "GET", "-1")) as ReadonlyArray<
            readonly [id: number, at: number, micros: number, command: ReadonlyArray<string>]
          >
          const calls = log.filter(([, , , command]) => command[0]!.toUpperCase() === "FCALL")
          slowest.push(Math.max(...calls.map(([, , micros]) => micros)))
          assert.strictEqual(yield* server.cli("EXISTS", items), "0")
        }
        yield* server.cli("CONFIG", "SET", "slowlog-log-slower-than", "10000")
        // To delete them one by one takes tens of milliseconds. The machine may be busy, so that is true of one of each.
        for (const half of [slowest.filter((_, at) => at % 2 === 0), slowest.filter((_, at) => at % 2 === 1)]) {
          assert.isAbove(half.length, 1)
          assert.isBelow(Math.min(...half), 10_000, `micros: ${slowest.join()}`)
        }
      })))

  it.effect("stores counts without an id once for each member, and none when it is open", () =>
    several(2, (nodes, namespace, server) =>
      Effect.gen(function*() {
        const latches = yield* Effect.forEach(nodes, (context) => latchOn(context, 1000))
        const items = `{${namespace}:00}:countDownLatch-items:ready`
        const stored = Effect.map(server.cli("HLEN", items), Number)
        yield* Effect.forEach(
          Array.from({ length: 300 }),
          (_, n) => latches[n % 2]!.countDown(),
          { concurrency: "unbounded" }
        )
        assert.strictEqual(yield* stored, 2)
        yield* latches[0]!.countDown({ id: "x" })
        assert.strictEqual(yield* stored, 3)
        assert.isAbove(Number(yield* server.cli("PTTL", items)), 80_000_000)
        assert.strictEqual(yield* latches[0]!.remaining, 699)
        yield* latches[1]!.countDown({ by: 699 })
        assert.strictEqual(yield* latches[0]!.countDown({ id: "y" }), 0)
        assert.strictEqual(yield* stored, 0)
        yield* latches[0]!.reset
        assert.strictEqual(yield* stored, 0)
        assert.strictEqual(yield* latches[0]!.countDown({ id: "x" }), 999)
      })))

  it.effect("is not opened by a number that comes again when one is still to come", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      yield* Effect.promise(async () => {
        const { open, send } = actor(redis, freshNamespace(), "countDownLatch:numbers")
        await open("a")
        const remaining = async (number: number) =>
          Number((await send("a", "latch.count", ["n1", number, 1, 3, 60_000, "", ""]))[2])
        for (const [number, left] of [[1, 2], [3, 1], [3, 1], [1, 1], [2, 0]] as const) {
          assert.strictEqual(await remaining(number), left, `${number}`)
        }
      })
    }))

  it.effect("counts each number of a member once, in any order and however often it arrives", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const redis = yield* client(server)
      const arrivals = fc.array(fc.record({ member: fc.nat(1), number: fc.integer({ min: 1, max: 40 }) }), {
        maxLength: 60
      })
      yield* Effect.promise(() =>
        fc.assert(
          fc.asyncProperty(arrivals, async (arrivals) => {
            const { open, send } = actor(redis, freshNamespace(), "countDownLatch:numbers")
            await open("a")
            const counted = new Set<string>()
            for (const { member, number } of arrivals) {
              counted.add(`${member}/${number}`)
              const reply = await send("a", "latch.count", [`n${member}`, number, 1, 1000, 60_000, "", ""])
              assert.deepStrictEqual(reply.slice(0, 3), ["counted", 1000, 1000 - counted.size])
            }
          }),
          { numRuns: runs(25), endOnFailure: true }
        )
      )
    }))

  it.effect("counts once without an id when the session is lost before the answer", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const direct = yield* latchOn(a!, 10)
        const line = yield* proxy(server)
        const context = yield* behind(line, namespace)
        const latch = yield* latchOn(context, 10)
        let left = 10
        for (const verdict of ["dropReply", "drop"] as const) {
          yield* line.once(asks("latch.count"), verdict)
          const again = yield* line.hold(asks("latch.count"))
          const counting = yield* Effect.forkChild(latch.countDown())
          yield* promptly(again.request, "it is sent again")
          yield* forgetSession(context, namespace, server)
          yield* again.release()
          assert.strictEqual(yield* promptly(Fiber.join(counting), "the count"), --left)
          assert.strictEqual(yield* direct.remaining, left)
        }
      })))

  it.effect("is counted down and reset in one round when the session is lost before the answer", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const direct = yield* latchOn(a!, 1)
        const line = yield* proxy(server)
        const context = yield* behind(line, namespace)
        const latch = yield* latchOn(context, 1)
        for (
          const [verb, request, meanwhile] of [
            ["latch.count", latch.countDown({ id: "x" }), direct.reset],
            ["latch.count", latch.countDown(), direct.reset],
            ["latch.reset", latch.reset, direct.countDown()]
          ] as const
        ) {
          yield* line.once(asks(verb), "dropReply")
          const again = yield* line.hold(asks(verb))
          const asking = yield* Effect.forkChild(request as Effect.Effect<unknown, CountDownLatch.CountDownLatchError>)
          yield* promptly(again.request, "it is sent again")
          yield* meanwhile as Effect.Effect<unknown, CountDownLatch.CountDownLatchError>
          const before = yield* direct.remaining
          yield* forgetSession(context, namespace, server)
          yield* again.release()
          yield* promptly(Fiber.join(asking), "the answer")
          assert.strictEqual(yield* direct.remaining, before, verb)
        }
      })))

  it.effect("is found by the next run as the last one has left it, unless its options say otherwise", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const options = { name: "migrated", count: 1, timeToLive: "1 minute" } as const
        const finished = Effect.scoped(
          Effect.flatMap(on(a!, CountDownLatch.make(options)), (latch) => latch.countDown({ id: "x" }))
        )
        yield* finished
        // As documented: the next run passes at once.
        yield* Effect.scoped(Effect.flatMap(on(b!, CountDownLatch.make(options)), (latch) => latch.await))
        yield* Effect.scoped(Effect.gen(function*() {
          const first = yield* on(b!, CountDownLatch.make({ ...options, fresh: true }))
          assert.strictEqual(yield* first.remaining, 1)
          const second = yield* on(a!, CountDownLatch.make({ ...options, count: 1, fresh: true }))
          yield* second.countDown({ id: "x" })
          assert.isTrue(yield* first.isOpen)
          // It is open elsewhere, so it is not created anew.
          const third = yield* on(a!, CountDownLatch.make({ ...options, fresh: true }))
          yield* promptly(third.await, "a member of the same run")
        }))
        yield* Effect.scoped(Effect.gen(function*() {
          const first = yield* on(a!, CountDownLatch.make({ ...options, run: "2" }))
          assert.isFalse(yield* first.isOpen)
          yield* first.countDown({ id: "x" })
          const second = yield* on(b!, CountDownLatch.make({ ...options, run: "2" }))
          yield* promptly(second.await, "a member of the same run")
          // Without a run it is joined as it is.
          yield* promptly(Effect.flatMap(on(b!, CountDownLatch.make(options)), (latch) => latch.await), "one of no run")
        }))
        yield* Effect.scoped(
          Effect.flatMap(on(b!, CountDownLatch.make({ ...options, run: "3", timeToLive })), (latch) => latch.remaining)
        ).pipe(Effect.map((count) => assert.strictEqual(count, 1)))
      })))

  it.effect("notifies the members of a former run that it belongs to another one", () =>
    several(3, ([a, b, c], namespace, server) =>
      Effect.gen(function*() {
        const options = { name: "migrated", count: 2, timeToLive } as const
        const former = yield* on(a!, CountDownLatch.make({ ...options, run: "1" }))
        const any = yield* on(b!, CountDownLatch.make(options))
        yield* former.countDown({ id: "x" })
        const waiting = yield* Effect.forkChild(Effect.flip(former.await))
        const watching = yield* Effect.forkChild(any.await)
        yield* Effect.yieldNow
        const later = yield* on(c!, CountDownLatch.make({ ...options, run: "2" }))
        const told = yield* promptly(Fiber.join(waiting), "the waiter of the former run")
        assert.deepInclude(told.reason, { _tag: "Superseded", name: "migrated", run: "1", current: "2" })
        for (const call of [former.countDown(), former.remaining, former.isOpen, former.reset, former.await]) {
          const error = yield* Effect.flip<unknown, CountDownLatch.CountDownLatchError, never>(call)
          assert.strictEqual(error.reason._tag, "Superseded")
        }
        assert.strictEqual(yield* later.remaining, 2)
        yield* pending(watching)
        // It comes back as a member of the former run, and does not take the latch away.
        yield* forgetSession(a!, namespace, server)
        yield* lose(a!, namespace, server)
        assert.strictEqual(yield* later.countDown({ id: "x" }), 1)
        assert.strictEqual(yield* any.countDown({ id: "y" }), 0)
        yield* promptly(Effect.andThen(Fiber.join(watching), later.await), "the others")
      })))

  it.effect("is created again as the newest run has left it, also by a member of a former run", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const options = { name: "migrated", count: 1, timeToLive } as const
        const former = yield* on(a!, CountDownLatch.make({ ...options, run: "1" }))
        yield* former.countDown()
        const later = yield* on(b!, CountDownLatch.make({ ...options, run: "2" }))
        assert.strictEqual((yield* eventually(Effect.flip(former.await))).reason._tag, "Superseded")
        yield* server.cli("FLUSHALL")
        const members = fields(server, namespace, "countDownLatch:migrated", "o")
        yield* on(a!, Lock.withLockIfAvailable(Effect.void, "to be told"))
        yield* eventually(Effect.map(members, (found) => found > 0), { message: "the former one has created it again" })
        yield* on(b!, Lock.withLockIfAvailable(Effect.void, "to be told"))
        yield* eventually(Effect.map(members, (found) => found === 2), { message: "both have joined again" })
        assert.strictEqual(yield* later.remaining, 1)
      })))

  it.effect("is reset again, if a Redis that went back has forgotten that", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const latch = yield* latchOn(a!, 2)
        const [key, items] = ["countDownLatch", "countDownLatch-items"].map((kind) => `{${namespace}:00}:${kind}:ready`)
        yield* latch.countDown({ by: 2 })
        yield* server.cli("COPY", key!, `${key}:before`)
        yield* latch.reset
        yield* latch.countDown()
        const waiting = yield* Effect.forkChild(latch.await)
        yield* server.cli("DEL", items!)
        yield* server.cli("RENAME", `${key}:before`, key!)
        yield* lose(a!, namespace, server)
        yield* eventually(Effect.map(latch.remaining, (left) => assert.strictEqual(left, 1)))
        yield* pending(waiting)
        yield* latch.countDown()
        yield* promptly(Fiber.join(waiting), "the waiter")
      })))

  it.effect("belongs to the newest run again, if a Redis that went back has forgotten that run", () =>
    several(3, ([a, b, c], namespace, server) =>
      Effect.gen(function*() {
        const options = { name: "migrated", count: 4, timeToLive } as const
        const former = yield* on(a!, CountDownLatch.make({ ...options, run: "1" }))
        const keys = ["countDownLatch", "countDownLatch-items"].map((kind) => `{${namespace}:00}:${kind}:migrated`)
        yield* former.countDown({ id: "x" })
        for (const key of keys) yield* server.cli("COPY", key, `${key}:before`)
        const one = yield* on(b!, CountDownLatch.make({ ...options, run: "2" }))
        const two = yield* on(c!, CountDownLatch.make({ ...options, run: "2" }))
        yield* one.countDown()
        yield* one.countDown({ id: "x" })
        yield* two.countDown()
        for (const key of keys) yield* server.cli("RENAME", `${key}:before`, key)
        yield* Effect.forEach([b!, c!], (context) => lose(context, namespace, server))
        yield* eventually(Effect.map(one.remaining, (left) => left === 1), { message: "both have counted again" })
        assert.strictEqual((yield* Effect.flip(former.countDown())).reason._tag, "Superseded")
        assert.strictEqual(yield* two.countDown(), 0)
        yield* promptly(Effect.andThen(one.await, two.await), "both")
      })))

  it.effect("refuses members of a former run, and lets them join again as observers", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const redis = yield* client(server)
      const { open, send, mail } = actor(redis, freshNamespace(), "countDownLatch:runs")
      yield* Effect.promise(async () => {
        await open("a")
        await open("b")
        const joining = (
          id: string,
          run: string,
          decided = 0,
          epoch = 0
        ) => [id, 2, 2, 100, decided, run, "fail", "", epoch, 0, ""]
        const first = await send("a", "latch.join", joining("1", "one"))
        assert.deepStrictEqual([first[0], first[2], first[7]], ["joined", 2, "one"])
        assert.strictEqual((await send("a", "latch.count", ["ix", 0, 1, 2, 100, "one", ""]))[2], 1)
        const second = await send("b", "latch.join", joining("2", "two"))
        assert.deepStrictEqual([second[2], second[7]], [2, "two"])
        assert.deepStrictEqual((await mail("a")).at(-1), ["changed", "1", ...second.slice(1, 8)])
        // Asked again it answers the same, and changes nothing.
        assert.deepStrictEqual(await send("b", "latch.join", joining("2", "two")), second)
        for (
          const [verb, args] of [
            ["latch.count", ["iy", 0, 1, 2, 100, "one", ""]],
            ["latch.open", [2, 100, "one", ""]],
            ["latch.reset", [2, 100, "one", "", "1"]]
          ] as const
        ) assert.deepStrictEqual(await send("a", verb, args), ["superseded", "two"])
        assert.deepStrictEqual(
          await send("a", "latch.join", joining("3", "one", Number(first[8]), Number(first[6]))),
          second
        )
        assert.deepStrictEqual(await send("b", "latch.state", []), ["state", 2, "two"])
      })
    }))

  it.effect("is created anew when all processes that had it open were killed, though nothing has reaped them yet", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      const options = { name: "migrated", count: 1, timeToLive } as const
      const settings = {
        namespace,
        partitions: 1,
        lease: "1 second",
        margin: "200 millis",
        requestTimeout: "200 millis"
      } as const
      for (const again of [{ fresh: true }, { count: 2 }]) {
        yield* Effect.scoped(Effect.gen(function*() {
          const line = yield* proxy(server)
          const killed = yield* on(yield* node(line.url, settings), CountDownLatch.make(options))
          yield* killed.countDown({ id: "x" })
          yield* line.blackhole
          yield* line.closeAll
          yield* sessionsExpired(server, namespace)
          const next = yield* on(
            yield* node(server.url, { namespace, partitions: 1 }),
            CountDownLatch.make({ ...options, ...again })
          )
          assert.strictEqual(yield* next.remaining, again.fresh === true ? 1 : 0)
        }))
        yield* assertEmpty(server, namespace)
      }
    }))

  it.effect("moves with its count, as onMismatch says", () =>
    several(3, ([a, b, c]) =>
      Effect.gen(function*() {
        const make = (context: Node, count: number, onMismatch?: "fail" | "keep" | "resize", name = "shards") =>
          on(context, CountDownLatch.make({ name, count, timeToLive, onMismatch }))
        const one = yield* make(a!, 5)
        yield* one.countDown({ by: 3 })
        assert.strictEqual((yield* Effect.flip(make(b!, 6))).reason._tag, "CountMismatch")
        assert.strictEqual((yield* Effect.flip(make(b!, 6, "fail"))).reason._tag, "CountMismatch")
        assert.strictEqual(yield* (yield* make(b!, 6, "keep")).remaining, 2)
        assert.strictEqual(yield* (yield* make(b!, 7, "resize")).remaining, 4)
        assert.strictEqual(yield* one.countDown(), 3)
        yield* one.reset
        // All members know the new count.
        assert.strictEqual(yield* one.remaining, 7)
        yield* one.countDown({ by: 3 })
        const waiting = yield* Effect.forkChild(one.await)
        yield* make(c!, 3, "resize")
        yield* promptly(Fiber.join(waiting), "nothing remains")
        // What is open stays open.
        assert.strictEqual(yield* (yield* make(c!, 9, "resize")).remaining, 0)
        yield* one.reset
        assert.strictEqual(yield* one.remaining, 9)
        // Without another member, the new number holds.
        yield* Effect.scoped(Effect.flatMap(make(a!, 5, undefined, "alone"), (latch) => latch.countDown({ by: 3 })))
        yield* Effect.scoped(Effect.gen(function*() {
          const kept = yield* make(b!, 9, "keep", "alone")
          assert.strictEqual(yield* kept.remaining, 2)
        }))
        const next = yield* make(b!, 4, undefined, "alone")
        assert.strictEqual(yield* next.remaining, 1)
      })))

  it.effect("keeps its count over a loss of the session, and of the data", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const make = (context: Node, count: number) =>
          on(context, CountDownLatch.make({ name: "shards", count, timeToLive, onMismatch: "resize", run: "1" }))
        const one = yield* make(a!, 3)
        const two = yield* make(b!, 5)
        yield* two.countDown({ by: 1 })
        yield* lose(a!, namespace, server)
        assert.strictEqual(yield* one.countDown({ id: "x" }), 3)
        yield* two.countDown()
        yield* server.cli("FLUSHALL")
        yield* eventually(Effect.map(one.remaining, (left) => left === 2))
        assert.strictEqual(yield* one.countDown(), 1)
        assert.strictEqual(yield* two.countDown(), 0)
        yield* promptly(Effect.andThen(one.await, two.await), "both")
      })))

  it.effect("is waited for no longer than its own wait or the coordinator's; while Redis is away, questions fail", () =>
    behindLine(({ context, line }) =>
      Effect.gen(function*() {
        const latch = yield* latchOn(context, 2)
        for (const waiting of [latch.await, latch.waitFor({ wait: "20 millis" })]) {
          const { reason } = yield* promptly(Effect.flip(waiting), "the end of the wait")
          assert.deepInclude(reason, { _tag: "WaitTimeout", kind: "countDownLatch", key: "ready", away: false })
        }
        yield* line.blackhole
        yield* assertUnanswered([
          latch.countDown(),
          latch.countDown({ id: "x" }),
          latch.reset,
          latch.remaining,
          latch.isOpen
        ])
        const { reason } = yield* Effect.flip(latch.waitFor({ wait: "20 millis" }))
        assert.deepInclude(reason, { _tag: "WaitTimeout", away: true })
        yield* line.pass
        yield* line.closeAll
        yield* eventually(latch.isOpen.pipe(Effect.as(true)))
      }), { lease: "1 second", margin: "200 millis", requestTimeout: "200 millis", wait: "50 millis" }))

  it.effect("does what its model does, whichever process counts, resets, waits, leaves or joins", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const step = fc.oneof(
        {
          weight: 6,
          arbitrary: fc.record({
            op: fc.constant("count" as const),
            who: fc.nat(2),
            id: fc.nat(3),
            by: fc.integer({ min: 1, max: 2 })
          })
        },
        { weight: 1, arbitrary: fc.record({ op: fc.constant("reset" as const), who: fc.nat(2) }) },
        { weight: 3, arbitrary: fc.record({ op: fc.constant("await" as const), who: fc.nat(2) }) },
        { weight: 1, arbitrary: fc.record({ op: fc.constant("leave" as const), who: fc.nat(2) }) }
      )
      yield* Effect.promise(() =>
        fc.assert(
          fc.asyncProperty(fc.integer({ min: 1, max: 4 }), fc.array(step, { maxLength: 25 }), (total, steps) =>
            Effect.runPromise(Effect.scoped(Effect.gen(function*() {
              const namespace = freshNamespace()
              const options = { namespace, partitions: 1, lease: "5 seconds" } as const
              const open = () =>
                Effect.gen(function*() {
                  const scope = yield* Scope.make()
                  yield* Effect.addFinalizer(() =>
                    Scope.close(scope, Exit.void)
                  )
                  return yield* Effect.gen(function*() {
                    const context = yield* node(server.url, options)
                    const latch = yield* on(
                      context,
                      CountDownLatch.make({ name: "model", count: total, timeToLive: "1 minute" })
                    )
                    return { ...latch, close: Scope.close(scope, Exit.void) }
                  }).pipe(Scope.provide(scope))
                })
              const latches = [yield* open(), yield* open(), yield* open()]
              let left = total
              let counted = new Set<number>()
              let waiting: Array<
                { fiber: Fiber.Fiber<void, CountDownLatch.CountDownLatchError>; who: number; open: boolean }
              > = []
              for (const one of steps) {
                const latch = latches[one.who]!
                if (one.op === "count") {
                  if (left > 0 && !counted.has(one.id)) {
                    counted.add(one.id)
                    left = Math.max(0, left - one.by)
                    if (left === 0) {
                      for (const waiter of waiting) {
                        waiter.open = true
                      }
                    }
                  }
                  assert.strictEqual(yield* latch.countDown({ id: String(one.id), by: one.by }), left)
                } else if (one.op === "reset") {
                  yield* latch.reset
                  left = total
                  counted = new Set()
                } else if (one.op === "await") {
                  // What the others have done has to have come to it, before it is asked.
                  yield* latch.countDown({ id: String([...counted][0] ?? "none") }).pipe(
                    Effect.when(Effect.succeed(counted.size > 0))
                  )
                  const fiber = yield* Effect.forkChild(latch.await)
                  yield* Effect.yieldNow
                  waiting.push({ fiber, who: one.who, open: left === 0 })
                } else {
                  // The whole coordinator, and with it its waiters.
                  for (const { fiber, who } of waiting) {
                    if (who === one.who) {
                      yield* Fiber.interrupt(fiber)
                    }
                  }
                  waiting = waiting.filter(({ who }) => who !== one.who)
                  yield* latch.close
                  latches[one.who] = yield* open()
                }
                assert.strictEqual(yield* latches[one.who]!.remaining, left)
              }
              for (const { fiber, open } of waiting) {
                if (open) yield* promptly(Fiber.join(fiber), "a waiter of an open latch")
              }
            })))),
          { numRuns: runs(15), endOnFailure: true }
        )
      )
    }))

  it.effect("says what it knows right after Redis has lost its data without breaking a connection", () =>
    several(1, ([a], _, server) =>
      Effect.gen(function*() {
        const latch = yield* on(a!, CountDownLatch.make({ name: "it", count: 3, timeToLive: "100 millis" }))
        const group = yield* on(
          a!,
          TaskGroup.make({ name: "it", shards: 2, result: Schema.Number, timeToLive: "100 millis" })
        )
        yield* latch.countDown()
        yield* latch.countDown()
        yield* server.cli("FLUSHALL")
        assert.strictEqual(yield* latch.remaining, 1)
        assert.strictEqual((yield* group.snapshot).expected, 2)
      }), { lease: "1 minute" }))
})
