/** Countdown latches and gates: they open once, for everybody, and remember what they have to. */
import { assert, layer } from "@effect/vitest"
import { Deferred, Duration, Effect, Exit, Fiber, Option, Scope } from "effect"
import * as fc from "fast-check"
import { Coordinator, CountDownLatch, Gate } from "../src/index.ts"
import { eventually, realSleep } from "./support/eventually.ts"
import { freshNamespace, type Node, node, TestServer, withNode } from "./support/live.ts"
import { on, pending, several } from "./support/several.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

/** Short, so that the namespace is empty soon. */
const keep = "100 millis"

const latchOn = (context: Node, count: number) => on(context, CountDownLatch.make({ name: "ready", count, keep }))

const promptly = <A, E, R>(effect: Effect.Effect<A, E, R>, what: string): Effect.Effect<A, E, R> =>
  Effect.raceFirst(effect, Effect.andThen(realSleep("2 seconds"), Effect.die(new Error(`${what}: not in time`))))

layer(TestServer.layer, live)("a countdown latch", (it) => {
  it.effect("opens for all who wait, in all processes, and for who comes later", () =>
    several(3, (nodes) =>
      Effect.gen(function*() {
        const latches = yield* Effect.forEach(nodes, (context) => latchOn(context, 3))
        const waiting = yield* Effect.forEach(latches, (latch) => Effect.forkChild(latch.await))
        assert.strictEqual(yield* latches[0]!.countDown(), 2)
        assert.strictEqual(yield* latches[1]!.countDown(), 1)
        assert.strictEqual(yield* latches[2]!.count, 1)
        assert.isFalse(yield* latches[2]!.isOpen)
        yield* Effect.forEach(waiting, pending)
        assert.strictEqual(yield* latches[2]!.countDown({ by: 5 }), 0)
        yield* promptly(Effect.forEach(waiting, Fiber.join), "the waiters")
        assert.isTrue(yield* latches[0]!.isOpen)
        const late = yield* latchOn(nodes[1]!, 3)
        yield* promptly(late.await, "a late one")
        assert.strictEqual(yield* late.countDown(), 0)
      })))

  it.effect("counts each id once", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const [one, two] = [yield* latchOn(a!, 2), yield* latchOn(b!, 2)]
        assert.strictEqual(yield* one.countDown({ id: "x\n/" }), 1)
        assert.strictEqual(yield* two.countDown({ id: "x\n/" }), 1)
        assert.strictEqual(yield* one.countDown({ id: "y" }), 0)
      })))

  it.effect("is reset: who waited before passes, who comes after waits", () =>
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

  it.effect("interrupts who waits when it is closed, or its coordinator", () =>
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
        assert.isTrue(Exit.hasInterrupts(yield* promptly(Fiber.await(left), "the end of the coordinator")))
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
        const forEver = yield* Effect.exit(on(b!, CountDownLatch.make({ name: "ready", count: 2, keep: "Infinity" })))
        assert.isTrue(Exit.isFailure(forEver) && String(forEver.cause).includes("RangeError"))
        const exit = yield* Effect.exit(latch.countDown({ id: "" }))
        assert.isTrue(Exit.isFailure(exit) && String(exit.cause).includes("RangeError"))
        assert.strictEqual(yield* latch.count, 2)
      })))

  it.effect("costs one event for each process, however many wait, and nothing for who gives up", () =>
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

  it.effect("is remembered while nobody has it open, for as long as it was told", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        yield* Effect.scoped(Effect.gen(function*() {
          const latch = yield* on(a!, CountDownLatch.make({ name: "ready", count: 2, keep: "1 minute" }))
          yield* latch.countDown()
        }))
        const ttl = Number(yield* server.cli("PTTL", `{${namespace}:00}:latch:ready`))
        assert.isTrue(ttl > 50_000 && ttl <= 60_000)
        yield* Effect.scoped(Effect.gen(function*() {
          const latch = yield* latchOn(b!, 2)
          assert.strictEqual(yield* server.cli("PTTL", `{${namespace}:00}:latch:ready`), "-1")
          assert.strictEqual(yield* latch.countDown(), 0)
        }))
        // Nothing to remember, so it is gone at once.
        yield* Effect.scoped(on(a!, CountDownLatch.make({ name: "unused", count: 2, keep: "1 minute" })))
        assert.strictEqual(yield* server.cli("EXISTS", `{${namespace}:00}:latch:unused`), "0")
      })))

  it.effect("is restored after Redis has lost its data", () =>
    several(3, ([a, b, c], _, server) =>
      Effect.gen(function*() {
        const [one, two] = [yield* latchOn(a!, 3), yield* latchOn(b!, 3)]
        const open = yield* on(c!, CountDownLatch.make({ name: "open", count: 1, keep }))
        yield* open.countDown()
        yield* one.countDown()
        yield* two.countDown({ id: "two" })
        const waiting = yield* Effect.forEach([one, two], (latch) => Effect.forkChild(latch.await))
        yield* server.cli("FLUSHALL")
        // Both have counted again what they had counted, and no more.
        yield* eventually(Effect.map(one.count, (left) => left === 1), { timeout: "10 seconds" })
        yield* eventually(open.isOpen, { timeout: "10 seconds" })
        yield* promptly(open.await, "the open one")
        yield* Effect.forEach(waiting, pending)
        assert.strictEqual(yield* two.countDown(), 0)
        yield* eventually(Effect.sync(() => waiting.every((fiber) => fiber.pollUnsafe() !== undefined)))
      })))

  it.effect("does what its model does, whoever counts, resets, waits, leaves or joins", () =>
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
                  yield* Effect.addFinalizer(() => Scope.close(scope, Exit.void))
                  return yield* Effect.gen(function*() {
                    const context = yield* node(server.url, options)
                    const latch = yield* on(
                      context,
                      CountDownLatch.make({ name: "model", count: total, keep: "1 minute" })
                    )
                    return { ...latch, close: Scope.close(scope, Exit.void) }
                  }).pipe(Scope.provide(scope))
                })
              const latches = [yield* open(), yield* open(), yield* open()]
              let left = total
              let counted = new Set<number>()
              let waiting: Array<{ fiber: Fiber.Fiber<void>; who: number; open: boolean }> = []
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
                  // The whole coordinator, and with it those who wait there.
                  for (const { fiber, who } of waiting) {
                    if (who === one.who) {
                      yield* Fiber.interrupt(fiber)
                    }
                  }
                  waiting = waiting.filter(({ who }) =>
                    who !== one.who
                  )
                  yield* latch.close
                  latches[one.who] = yield* open()
                }
                assert.strictEqual(yield* latches[one.who]!.count, left)
              }
              for (const { fiber, open } of waiting) {
                if (open) yield* promptly(Fiber.join(fiber), "a waiter of an open latch")
              }
            })))),
          { numRuns: 40, endOnFailure: true }
        )
      )
    }))
})

layer(TestServer.layer, live)("a gate", (it) => {
  it.effect("lets pass who waits, until it is closed", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const [one, two] = [
          yield* on(a!, Gate.make({ name: "start", keep })),
          yield* on(b!, Gate.make({ name: "start", keep }))
        ]
        assert.isFalse(yield* one.isOpen)
        const through = yield* Deferred.make<string>()
        yield* Effect.forkChild(two.whenOpen(Deferred.succeed(through, "passed")))
        yield* one.open
        assert.strictEqual(yield* promptly(Deferred.await(through), "the waiter"), "passed")
        yield* one.open
        assert.isTrue(yield* two.isOpen)
        yield* two.close
        yield* one.close
        assert.isFalse(yield* one.isOpen)
        const waiting = yield* Effect.forkChild(one.await)
        assert.isTrue(Option.isNone(yield* Effect.timeoutOption(one.await, "20 millis")))
        yield* two.open
        yield* promptly(Fiber.join(waiting), "after it was open again")
        yield* one.close
      })))

  it.effect("is a typed service, as a latch is", () => {
    class Start extends Gate.Service<Start>()("start", { keep }) {}
    class Ready extends CountDownLatch.Service<Ready>()("ready", { count: 1, keep: Duration.millis(100) }) {}
    return withNode(() =>
      Effect.gen(function*() {
        const start = yield* Start
        const ready = yield* Ready
        yield* ready.countDown()
        yield* ready.await
        yield* start.open
        yield* start.await
        yield* start.close
      }).pipe(Effect.provide(Start.layer), Effect.provide(Ready.layer))
    )
  })
})
