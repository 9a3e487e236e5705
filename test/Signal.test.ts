/** Signals: each wakes exactly one waiter, and none is lost with a waiter that gives up or dies. */
import { assert, layer } from "@effect/vitest"
import { Effect, Exit, Fiber, Option, Scope } from "effect"
import * as fc from "fast-check"
import { Signal } from "../src/index.ts"
import { make as proxy } from "../src/testing/Proxy.ts"
import { assertUnanswered, behindLine } from "./support/behindLine.ts"
import { runs } from "./support/effort.ts"
import { eventually, realSleep } from "./support/eventually.ts"
import { interruptedAt } from "./support/interrupter.ts"
import { assertEmpty, freshNamespace, node, TestServer, withNode } from "./support/live.ts"
import { asks } from "./support/requests.ts"
import { behind, forgetSession, fragile, isPending, on, promptly, sessionsExpired, several } from "./support/several.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

const hostile = "x\u0000}{:\r\n\"é😀"

const make = Signal.make({ name: hostile })

const waits = (signal: Signal.Signal, count: number) =>
  eventually(Effect.map(signal.queued, (waiting) => waiting === count), { message: `${count} wait`, interval: 1 })

const isRangeError = <A, E>(exit: Exit.Exit<A, E>) =>
  assert.isTrue(Exit.isFailure(exit) && String(exit.cause).includes("RangeError"))

layer(TestServer.layer, live)("a signal", (it) => {
  it.effect("wakes one waiter each time it is set, in the order in which they came", () =>
    several(3, (nodes) =>
      Effect.gen(function*() {
        const signals = yield* Effect.forEach(nodes, (context) => on(context, make))
        const passed: Array<number> = []
        const waiting: Array<Fiber.Fiber<void, Signal.SignalError>> = []
        for (let n = 0; n < 6; n++) {
          const signal = signals[n % 3]!
          waiting.push(yield* Effect.forkChild(Effect.map(signal.await, () => void passed.push(n))))
          yield* waits(signal, n + 1)
        }
        for (let n = 0; n < 6; n++) {
          assert.isTrue(waiting.slice(n).every(isPending))
          yield* signals[(n + 1) % 3]!.set
          yield* promptly(Fiber.join(waiting[n]!), `waiter ${n}`)
          assert.strictEqual(yield* signals[0]!.queued, 5 - n)
        }
        assert.deepStrictEqual(passed, [0, 1, 2, 3, 4, 5])
        assert.isFalse(yield* signals[0]!.isSet)
      })))

  it.effect("is kept and counted while there is no waiter, and cleared", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const [one, two] = [yield* on(a!, make), yield* on(b!, make)]
        assert.isFalse(yield* one.isSet)
        assert.strictEqual(yield* one.clear, 0)
        yield* one.set
        yield* one.setMany(3)
        assert.strictEqual(yield* two.pending, 4)
        assert.isTrue(yield* two.isSet)
        yield* promptly(Effect.andThen(two.await, two.await), "two waits")
        assert.strictEqual(yield* one.pending, 2)
        assert.strictEqual(yield* two.clear, 2)
        assert.isFalse(yield* one.isSet)
        assert.isTrue(Option.isNone(yield* Effect.timeoutOption(one.await, "30 millis")))
        yield* waits(one, 0)
      })))

  it.effect("lets pass as many waiters as it was set, in either order", () =>
    several(3, (nodes) =>
      Effect.gen(function*() {
        const signals = yield* Effect.forEach(nodes, (context) => on(context, make))
        let passed = 0
        const waiting = yield* Effect.forEach(
          Array.from({ length: 90 }),
          (_, n) => Effect.forkChild(Effect.map(signals[n % 3]!.await, () => void passed++))
        )
        yield* Effect.forEach(Array.from({ length: 100 }), (_, n) => signals[n % 3]!.set, { concurrency: 7 })
        yield* promptly(Effect.forEach(waiting, Fiber.join), "all of them")
        assert.strictEqual(passed, 90)
        assert.strictEqual(yield* signals[0]!.clear, 10)
      })))

  it.effect("takes bad arguments for defects", () =>
    withNode(() =>
      Effect.gen(function*() {
        const signal = yield* Signal.make({ name: "x" })
        for (const count of [0, -1, 1.5, Number.NaN, 2 ** 31]) isRangeError(yield* Effect.exit(signal.setMany(count)))
        isRangeError(yield* Effect.exit(Signal.make({ name: "" })))
        isRangeError(yield* Effect.exit(Signal.make({ name: "x", timeToLive: 0 })))
        assert.isFalse(yield* signal.isSet)
      })
    ))

  it.effect("is kept for its time to live, and stays as long as there is a waiter", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const key = `{${namespace}:00}:signal:x`
        const ttl = Effect.map(server.cli("PTTL", key), Number)
        const signal = yield* on(a!, Signal.make({ name: "x", timeToLive: "1 minute" }))
        yield* signal.setMany(2)
        const isMinute = (millis: number) => millis > 50_000 && millis <= 60_000
        assert.isTrue(isMinute(yield* ttl))
        // A waiter passes before its signal is consumed.
        yield* signal.await
        yield* eventually(Effect.map(ttl, isMinute))
        yield* signal.await
        yield* eventually(Effect.map(ttl, (millis) => millis === -2))
        const waiting = yield* Effect.forkChild(signal.await)
        yield* waits(signal, 1)
        // What a session awaits is kept for a day, which its coordinator begins anew in time.
        assert.isAbove(yield* ttl, 80_000_000)
        yield* Fiber.interrupt(waiting)
        yield* waits(signal, 0)
        assert.strictEqual(yield* ttl, -2)
        const short = yield* on(a!, Signal.make({ name: "x", timeToLive: "50 millis" }))
        yield* short.set
        yield* eventually(Effect.map(signal.isSet, (set) => !set))
      })))

  it.effect("is not consumed by a waiter that is interrupted, before any operation", () =>
    withNode(() =>
      Effect.gen(function*() {
        const signal = yield* make
        const ends: Array<"passed" | "kept" | "gone"> = []
        for (let at = 1;; at++) {
          yield* signal.set
          const { exit, reached } = yield* interruptedAt(at, signal.await)
          const kept = yield* Effect.timeoutOption(
            eventually(Effect.map(signal.pending, (count) => count === 1), { interval: 1 }),
            Exit.isSuccess(exit) ? 0 : 200
          )
          ends.push(Exit.isSuccess(exit) ? "passed" : Option.isSome(kept) ? "kept" : "gone")
          yield* signal.clear
          if (!reached) break
        }
        // Interrupted behind its last operation, it has waited to the end.
        assert.deepStrictEqual(ends.slice(-2), ["gone", "passed"])
        assert.isAbove(ends.length, 2)
        assert.isTrue(ends.slice(0, -2).every((end) => end === "kept"))
      })
    ))

  it.effect("is not consumed by a waiter that is interrupted, at any moment of its coming", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const [one, two] = [yield* on(a!, make), yield* on(b!, make)]
        let passed = 0
        for (let delay = 0; delay < 100; delay++) {
          const waiting = yield* Effect.forkChild(two.await)
          yield* waits(one, 1)
          yield* Effect.forkChild(one.set, { startImmediately: true })
          // It is on its way through Redis; the interruption meets it somewhere.
          yield* Effect.callback<void>((resume) => {
            const end = performance.now() + delay * 0.02
            const look = () => performance.now() < end ? setImmediate(look) : resume(Effect.void)
            look()
          })
          yield* Fiber.interrupt(waiting)
          const exit = yield* Fiber.await(waiting)
          if (Exit.isSuccess(exit)) passed++
          else yield* promptly(one.await, `the next one, at ${delay}`)
          yield* waits(one, 0)
        }
        assert.isTrue(passed > 0 && passed < 100)
        assert.isFalse(yield* one.isSet)
      })))

  it.effect("goes to the next when the waiter's process ends with it, and waiters that ended are passed over", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const one = yield* on(a!, make)
        const line = yield* proxy(server)
        const scope = yield* Scope.make()
        const dying = yield* Scope.provide(
          fragile(server, line, namespace, 2),
          scope
        )
        const other = yield* on(dying, make)
        const lost = yield* Effect.forkChild(Effect.exit(other.await))
        yield* waits(one, 1)
        const next = yield* Effect.forkChild(Effect.andThen(on(b!, make), (signal) => signal.await))
        yield* waits(one, 2)
        // Its network fails before it can say that it has the signal.
        yield* line.blackhole
        yield* one.set
        assert.strictEqual(yield* one.pending, 0)
        assert.isTrue(isPending(next))
        yield* Effect.timeout(Fiber.join(next), "3 seconds")
        yield* line.pass
        yield* line.closeAll
        yield* waits(one, 1)
        yield* one.set
        assert.isTrue(Exit.isSuccess(yield* promptly(Fiber.join(lost), "the first waiter, when it is back")))
        yield* Scope.close(scope, Exit.void)
      })))

  it.effect("says that a set is uncertain when the session was lost on the way, and does not repeat it", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const direct = yield* on(a!, make)
        const line = yield* proxy(server)
        const context = yield* behind(line, namespace)
        const signal = yield* on(context, make)
        yield* signal.set
        for (const [executed, verdict] of [[1, "dropReply"], [0, "drop"]] as const) {
          assert.strictEqual(yield* direct.clear, executed === 1 ? 1 : 0)
          yield* line.once(asks("signal.set"), verdict)
          const again = yield* line.hold(asks("signal.set"))
          const uncertain = yield* Effect.forkChild(Effect.flip(signal.set))
          yield* promptly(again.request, "it is sent again")
          yield* forgetSession(context, namespace, server)
          // One that was not sent yet is set in the next session.
          const later = yield* Effect.forkChild(signal.set)
          yield* Effect.yieldNow
          yield* again.release()
          assert.strictEqual((yield* promptly(Fiber.join(uncertain), "the uncertain one")).reason._tag, "SetUncertain")
          yield* Effect.timeout(Fiber.join(later), "5 seconds")
          assert.strictEqual(yield* direct.clear, executed + 1)
        }
      })))

  it.effect("is set in the next session when the last one had ended before", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const signal = yield* on(a!, make)
        yield* signal.set
        yield* forgetSession(a!, namespace, server)
        yield* signal.set
        assert.strictEqual(yield* signal.clear, 2)
      })))

  it.effect("can be waited for again after Redis has lost its data", () =>
    several(2, ([a, b], _, server) =>
      Effect.gen(function*() {
        const [one, two] = [yield* on(a!, make), yield* on(b!, make)]
        yield* two.set
        const waiting = yield* Effect.forkChild(Effect.andThen(one.await, one.await))
        yield* waits(two, 1)
        yield* server.cli("FLUSHALL")
        yield* two.set
        yield* Effect.timeout(Fiber.join(waiting), "5 seconds")
        assert.isFalse(yield* two.isSet)
      })))

  it.effect("has lost no wake-up when requests and replies were lost", () =>
    behindLine(({ context, direct, line }) =>
      Effect.gen(function*() {
        const two = yield* on(yield* direct(), make)
        const one = yield* on(context, make)
        for (const verb of ["signal.await", "signal.consume", "signal.set"]) {
          for (const verdict of ["drop", "dropReply", "blackholeReply", "duplicate"] as const) {
            const met = yield* line.once(asks(verb), verdict)
            const waiting = yield* Effect.forkChild(one.await)
            if (verb === "signal.set") {
              // A question does not wait for longer than a request may take; the batch is sent again all the same.
              const outcome = yield* Effect.match(one.set, {
                onFailure: ({ reason }) => reason._tag,
                onSuccess: () => "set"
              })
              assert.include(verdict === "blackholeReply" ? ["set", "Timeout"] : ["set"], outcome)
            } else {
              yield* realSleep(1)
              yield* two.set
            }
            yield* promptly(Fiber.join(waiting), `${verb}, ${verdict}`)
            yield* promptly(met, `${verb} was sent`)
            assert.deepStrictEqual([yield* two.pending, yield* two.queued], [0, 0])
          }
        }
      }), { lease: "4 seconds", requestTimeout: "200 millis" }))

  it.effect("fails with a reason while Redis is away, and waits on", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const direct = yield* on(a!, make)
        const line = yield* proxy(server)
        const signal = yield* on(yield* fragile(server, line, namespace, 1), make)
        yield* signal.set
        yield* signal.clear
        const waiting = yield* Effect.forkChild(signal.await)
        yield* waits(direct, 1)
        yield* line.blackhole
        const questions = [signal.set, signal.setMany(2), signal.clear, signal.pending, signal.isSet, signal.queued]
        yield* assertUnanswered(questions)
        const late = yield* Effect.flip(signal.waitFor({ wait: "50 millis" }))
        assert.deepInclude(late.reason, { _tag: "WaitTimeout", kind: "signal", away: true })
        assert.isTrue(isPending(waiting))
        yield* line.pass
        yield* line.closeAll
        yield* direct.set
        yield* Effect.timeout(Fiber.join(waiting), "5 seconds")
        // Behind what was under way when the line broke.
        yield* eventually(signal.clear.pipe(Effect.as(true)))
      })))

  it.effect("is waited for no longer than its own wait or the coordinator's", () =>
    withNode(() =>
      Effect.gen(function*() {
        const signal = yield* make
        for (const waiting of [signal.await, signal.waitFor({ wait: "20 millis" })]) {
          const { reason } = yield* promptly(Effect.flip(waiting), "the end of the wait")
          assert.deepInclude(reason, { _tag: "WaitTimeout", kind: "signal", key: hostile, away: false })
        }
        yield* waits(signal, 0)
        yield* signal.set
        yield* signal.await
      }), { wait: "50 millis" }))

  it.effect("counts no waiter and no taker whose session has expired", () =>
    behindLine(({ context, direct, line, namespace, server }) =>
      Effect.gen(function*() {
        const gone = yield* on(context, make)
        const [first, second] = [yield* Effect.forkChild(gone.await), yield* Effect.forkChild(gone.await)]
        yield* waits(gone, 2)
        yield* line.hold(asks("signal.consume"))
        yield* gone.set
        yield* line.blackhole
        yield* Fiber.interrupt(first)
        yield* Fiber.interrupt(second)
        yield* sessionsExpired(server, namespace)
        // No other coordinator was there to reap them.
        const signal = yield* on(yield* direct({}), make)
        assert.deepStrictEqual([yield* signal.pending, yield* signal.queued], [1, 0])
        yield* signal.clear
      })
    ))

  it.effect("is a typed service", () => {
    class Jobs extends Signal.Service<Jobs>()("jobs", { timeToLive: "1 minute" }) {}
    return withNode(() =>
      Effect.gen(function*() {
        const jobs = yield* Jobs
        assert.strictEqual(jobs.name, "jobs")
        yield* jobs.set
        yield* jobs.await
      }).pipe(Effect.provide(Jobs.layer))
    )
  })

  it.effect("agrees with a model, however its waiters end", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const who = fc.nat(2)
      const step = fc.oneof(
        {
          weight: 5,
          arbitrary: fc.record({ op: fc.constant("set" as const), who, by: fc.integer({ min: 1, max: 3 }) })
        },
        { weight: 8, arbitrary: fc.record({ op: fc.constant("await" as const), who }) },
        { weight: 2, arbitrary: fc.record({ op: fc.constant("interrupt" as const), who, pick: fc.nat(20) }) },
        { weight: 1, arbitrary: fc.record({ op: fc.constant("clear" as const), who }) },
        { weight: 1, arbitrary: fc.record({ op: fc.constant("leave" as const), who }) },
        { weight: 1, arbitrary: fc.record({ op: fc.constant("lose" as const), who }) }
      )
      yield* Effect.promise(() =>
        fc.assert(
          fc.asyncProperty(fc.array(step, { maxLength: 25 }), (steps) =>
            Effect.runPromise(
              Effect.gen(function*() {
                const namespace = freshNamespace()
                yield* Effect.scoped(Effect.gen(function*() {
                  const open = Effect.gen(function*() {
                    const scope = yield* Scope.make()
                    yield* Effect.addFinalizer(() => Scope.close(scope, Exit.void))
                    const context = yield* node(server.url, { namespace, partitions: 1, lease: "5 seconds" }).pipe(
                      Scope.provide(scope)
                    )
                    return { context, signal: yield* on(context, make), close: Scope.close(scope, Exit.void) }
                  })
                  const parties = [yield* open, yield* open, yield* open]
                  interface Waiter {
                    readonly fiber: Fiber.Fiber<void, Signal.SignalError>
                    readonly who: number
                  }
                  let queue: Array<Waiter> = []
                  let count = 0
                  const serve = () => {
                    const passing = queue.slice(0, count)
                    queue = queue.slice(count)
                    count -= passing.length
                    return promptly(Effect.forEach(passing, ({ fiber }) => Fiber.join(fiber)), "who may pass")
                  }
                  for (const one of steps) {
                    const { close, context, signal } = parties[one.who]!
                    switch (one.op) {
                      case "set":
                        yield* signal.setMany(one.by)
                        count += one.by
                        yield* serve()
                        break
                      case "await":
                        queue.push({ fiber: yield* Effect.forkDetach(signal.await), who: one.who })
                        yield* serve()
                        break
                      case "interrupt": {
                        const picked = queue[one.pick % Math.max(1, queue.length)]
                        if (picked === undefined) break
                        yield* Fiber.interrupt(picked.fiber)
                        queue = queue.filter((waiter) => waiter !== picked)
                        break
                      }
                      case "clear":
                        assert.strictEqual(yield* signal.clear, count)
                        count = 0
                        break
                      case "leave": {
                        // The whole coordinator, and with it its waiters.
                        yield* close
                        for (const { fiber } of queue.filter(({ who }) => who === one.who)) {
                          assert.isTrue(
                            Exit.isFailure(yield* promptly(Fiber.await(fiber), "whose coordinator is closed"))
                          )
                        }
                        queue = queue.filter(({ who }) => who !== one.who)
                        parties[one.who] = yield* open
                        break
                      }
                      case "lose":
                        yield* forgetSession(context, namespace, server)
                        // By this it learns of that; its waiters come again, after the others.
                        yield* signal.set
                        count++
                        queue = [
                          ...queue.filter(({ who }) => who !== one.who),
                          ...queue.filter(({ who }) => who === one.who)
                        ]
                        yield* serve()
                    }
                    assert.isTrue(queue.every(({ fiber }) => isPending(fiber)))
                    yield* waits(parties[0]!.signal, queue.length)
                    assert.strictEqual(yield* parties[0]!.signal.pending, count)
                  }
                  for (const { fiber } of queue) yield* Fiber.interrupt(fiber)
                  yield* parties[0]!.signal.clear
                }))
                yield* assertEmpty(server, namespace)
              })
            )),
          { numRuns: runs(15), endOnFailure: true }
        )
      )
    }))
})
