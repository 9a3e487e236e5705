/** Counters: every addition counts once, at one request, or in a sum with others. */
import { assert, layer } from "@effect/vitest"
import { Cause, Effect, Exit, Fiber, Scope, Stream } from "effect"
import { Counter } from "../src/index.ts"
import { make as proxy } from "../src/testing/Proxy.ts"
import { elapsed } from "./support/awake.ts"
import { behindLine } from "./support/behindLine.ts"
import { eventually, realSleep } from "./support/eventually.ts"
import { assertEmpty, freshNamespace, node, TestServer, withNode } from "./support/live.ts"
import { keysOf } from "./support/namespace.ts"
import { asks, fields } from "./support/requests.ts"
import { forgetSession, fragile, lose, on, promptly, several } from "./support/several.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

const hostile = "a\u0000}{:\n%s|\"✓"

const make = (options: Counter.Options = {}) => Counter.make({ ...options, name: hostile })

const collecting = <A, E>(stream: Stream.Stream<A, E>) =>
  Effect.gen(function*() {
    const seen: Array<A> = []
    const fiber = yield* Effect.forkChild(Stream.runForEach(stream, (value) => Effect.sync(() => seen.push(value))))
    return { seen, fiber }
  })

const sees = <A>(seen: ReadonlyArray<A>, expected: ReadonlyArray<A>) =>
  eventually(Effect.sync(() => assert.deepStrictEqual(seen, expected)))

const most = Number.MAX_SAFE_INTEGER

layer(TestServer.layer, live)("a counter", (it) => {
  it.effect("adds up what all processes add, and notifies each of them", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const [one, two] = [yield* on(a!, make()), yield* on(b!, make())]
        const heard = yield* collecting(two.changes)
        yield* sees(heard.seen, [0])
        assert.strictEqual(yield* one.add(5), 5)
        assert.strictEqual(yield* two.add(-7), -2)
        assert.strictEqual(yield* one.get, -2)
        yield* sees(heard.seen, [0, 5, -2])
        assert.strictEqual(yield* two.add(2), 0)
        // At 0 it leaves no value.
        const keys = yield* keysOf(server, namespace)
        assert.isFalse(keys.some((key) => key.includes("counter-value")))
        assert.strictEqual(yield* one.reset, 0)
        assert.strictEqual(yield* one.add(-0), 0)
        const sums = yield* Effect.forEach(
          [one, two],
          (counter) => Effect.forEach(Array.from({ length: 100 }), () => counter.add(1), { concurrency: "unbounded" }),
          { concurrency: "unbounded" }
        )
        assert.deepStrictEqual(sums.flat().sort((a, b) => a - b), Array.from({ length: 200 }, (_, n) => n + 1))
        yield* sees(heard.seen, [0, 5, -2, 0, ...Array.from({ length: 200 }, (_, n) => n + 1)])
        const latest = yield* collecting(one.changesWith({ conflate: true }))
        yield* sees(latest.seen, [200])
        assert.strictEqual(yield* two.reset, 200)
        yield* sees(latest.seen, [200, 0])
      })))

  it.effect("fails, and answers no number, where others have written", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const counter = yield* on(a!, make())
        yield* counter.add(1)
        const key = (yield* keysOf(server, namespace)).find((key) => key.includes("counter-value"))!
        for (const foreign of ["", "abc", "1", "1.5 0", "9007199254740993 0", "NaN 0"]) {
          yield* server.cli("SET", key, foreign)
          const { reason } = yield* Effect.flip(counter.get)
          assert.deepInclude(reason, { _tag: "ActorDefect", kind: "counter", name: hostile })
        }
        yield* server.cli("SET", key, "-7 0")
        assert.strictEqual(yield* counter.get, -7)
        yield* counter.reset
      })))

  it.effect("is exact, or refuses", () =>
    withNode(() =>
      Effect.gen(function*() {
        const counter = yield* make()
        assert.strictEqual(yield* counter.add(most), most)
        const { reason } = yield* Effect.flip(counter.add(1))
        assert.deepInclude(reason, { _tag: "SumExceeded", name: hostile, by: 1, value: most })
        assert.strictEqual(yield* counter.add(-1), most - 1)
        assert.strictEqual(yield* counter.get, most - 1)
        assert.strictEqual(yield* counter.reset, most - 1)
        assert.strictEqual(yield* counter.add(-most), -most)
        assert.strictEqual((yield* Effect.flip(counter.add(-1))).reason._tag, "SumExceeded")
        yield* counter.reset
        const wrong: ReadonlyArray<Effect.Effect<unknown, unknown, Scope.Scope>> = [
          counter.add(0.5),
          counter.add(Number.NaN),
          counter.add(2 ** 53),
          counter.batched({ flush: 0 }),
          Effect.flatMap(counter.batched({ flush: "1 second" }), (batched) => batched.add(1.5))
        ]
        for (const call of wrong) {
          const exit = yield* Effect.exit(Effect.scoped(call))
          assert.isTrue(Exit.isFailure(exit) && Cause.squash(exit.cause) instanceof RangeError)
        }
      })
    ))

  it.effect("sends sums within the bound, on demand, and when the scope closes, each addition once", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      yield* Effect.scoped(Effect.gen(function*() {
        const line = yield* proxy(server)
        const context = yield* node(line.url, { namespace, partitions: 1 })
        const counter = yield* on(context, Counter.make({ name: "n" }))
        const other = yield* on(yield* node(server.url, { namespace, partitions: 1 }), Counter.make({ name: "n" }))
        assert.strictEqual(yield* counter.add(1), 1)
        yield* Effect.scoped(Effect.gen(function*() {
          const closed = yield* Effect.scoped(counter.batched({ flush: "1 second" }))
          assert.isTrue(Exit.hasDies(yield* Effect.exit(closed.add(1))))
          const batched = yield* counter.batched({ flush: "1 second" })
          const before = line.counters.of("FCALL")
          for (let n = 0; n < 10_000; n++) yield* batched.add(1)
          assert.strictEqual(yield* batched.pending, 10_000)
          assert.strictEqual(line.counters.of("FCALL"), before)
          const added = Date.now()
          yield* eventually(Effect.map(other.get, (value) => value === 10_001), { interval: 5 })
          assert.isBelow(elapsed(added), 1500)
          assert.isAtMost(line.counters.of("FCALL") - before, 2)
          yield* eventually(Effect.map(batched.pending, (pending) => pending === 0))
          yield* batched.add(5)
          yield* batched.flush
          assert.strictEqual(yield* other.get, 10_006)
          yield* batched.flush
          // The wait for an answer has a bound, and the sum has none.
          const held = yield* line.hold(({ name }) => name === "FCALL")
          yield* batched.add(2)
          yield* batched.add(-1)
          const late = yield* Effect.forkChild(Effect.flip(batched.flushFor({ wait: "50 millis" })))
          yield* held.request
          assert.strictEqual((yield* Fiber.join(late)).reason._tag, "WaitTimeout")
          yield* held.release()
          yield* batched.flush
          yield* batched.add(-1)
          yield* batched.flush
          assert.strictEqual(yield* other.get, 10_006)
          // Sums that cancel out are no request.
          yield* batched.add(3)
          yield* batched.add(-3)
          yield* batched.flush
          yield* batched.add(4)
        }))
        assert.strictEqual(yield* other.get, 10_010)
        assert.strictEqual(yield* fields(server, namespace, "counter:n", "h"), 0)
        // Nothing is known of the source any more.
        assert.strictEqual(yield* server.cli("EXISTS", `{${namespace}:00}:counter:n`), "0")
        yield* other.reset
      }))
      yield* assertEmpty(server, namespace)
    }))

  it.effect("sends an addition within its bound, or with the reply to the sum before it", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const direct = yield* on(a!, Counter.make({ name: "n" }))
        const line = yield* proxy(server)
        const context = yield* node(line.url, { namespace, partitions: 1, lease: "10 seconds" })
        yield* Effect.scoped(Effect.gen(function*() {
          const counter = yield* on(context, Counter.make({ name: "n" }))
          const batched = yield* counter.batched({ flush: "1 second" })
          const first = yield* line.hold(asks("counter.add"))
          yield* batched.add(1)
          yield* promptly(first.request, "the first sum")
          yield* batched.add(2)
          // Its bound is over, and the reply has not come.
          yield* realSleep("1100 millis")
          const released = Date.now()
          yield* first.release()
          yield* eventually(Effect.map(direct.get, (value) => value === 3), { interval: 5 })
          assert.isBelow(elapsed(released), 900)
          // A flush that waits for a sum has nothing to wait for when its additions cancel out.
          const second = yield* line.hold(asks("counter.add"))
          yield* batched.add(3)
          const flushing = yield* Effect.forkChild(batched.flush)
          yield* promptly(second.request, "the second sum")
          yield* batched.add(4)
          const waiting = yield* Effect.forkChild(batched.flush, { startImmediately: true })
          yield* batched.add(-4)
          yield* second.release()
          yield* promptly(Fiber.join(flushing), "the flush of the sum")
          yield* promptly(Fiber.join(waiting), "the flush of nothing")
          assert.strictEqual(yield* direct.reset, 6)
        }))
      })))

  it.effect("counts each sum once, despite any loss of replies and sessions on the way", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const direct = yield* on(a!, Counter.make({ name: "n" }))
        const line = yield* proxy(server)
        const context = yield* node(line.url, {
          namespace,
          partitions: 1,
          lease: "6 seconds",
          requestTimeout: "1 second"
        })
        const counter = yield* on(context, Counter.make({ name: "n" }))
        let sum = 0
        yield* Effect.scoped(Effect.gen(function*() {
          const batched = yield* counter.batched({ flush: "5 millis" })
          for (const verdict of ["dropReply", "drop", "duplicate"] as const) {
            for (const losing of [false, true]) {
              yield* line.once(asks("counter.add"), verdict)
              const again = verdict === "duplicate" ? undefined : yield* line.hold(asks("counter.add"))
              yield* batched.add(++sum)
              if (again !== undefined) {
                yield* promptly(again.request, "it is sent again")
                if (losing) yield* forgetSession(context, namespace, server)
                // It waits for the sum that is under way.
                yield* batched.add(1)
                yield* again.release()
              } else {
                if (losing) yield* forgetSession(context, namespace, server)
                yield* batched.add(1)
              }
              yield* promptly(batched.flush, `${verdict}, losing: ${losing}`)
              assert.strictEqual(yield* direct.reset, sum + 1, `${verdict}, losing: ${losing}`)
            }
          }
          // While Redis is away it waits, and `flush` with it.
          yield* batched.add(1)
          yield* batched.flush
          yield* line.blackhole
          for (let n = 0; n < 10; n++) {
            yield* batched.add(1)
            yield* realSleep(20)
          }
          const flushing = yield* Effect.forkChild(batched.flush)
          yield* realSleep("1500 millis")
          yield* line.pass
          yield* line.closeAll
          yield* promptly(Fiber.join(flushing), "the flush")
          assert.strictEqual(yield* direct.reset, 11)
        }))
      })))

  it.effect("fails every flush of what was added when the coordinator was closed, and no other", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const scope = yield* Scope.make()
      const context = yield* Scope.provide(node(server.url, { namespace: freshNamespace(), partitions: 1 }), scope)
      const counter = yield* on(context, Counter.make({ name: "n" }))
      const batched = yield* counter.batched({ flush: "10 seconds" })
      yield* batched.add(1)
      yield* batched.flush
      yield* counter.reset
      yield* Scope.close(scope, Exit.void)
      yield* promptly(batched.flush, "the flush of nothing")
      yield* batched.add(1)
      for (let n = 0; n < 3; n++) {
        const { reason } = yield* promptly(Effect.flip(batched.flush), `flush ${n}`)
        assert.strictEqual(reason._tag, "CoordinatorClosed")
      }
    }).pipe(Effect.scoped))

  it.effect("drops a sum that is not exact, says so, and goes on", () =>
    withNode(() =>
      Effect.gen(function*() {
        const counter = yield* make()
        yield* counter.add(most)
        yield* Effect.scoped(Effect.gen(function*() {
          const batched = yield* counter.batched({ flush: "1 minute" })
          yield* batched.add(2)
          assert.deepInclude((yield* Effect.flip(batched.flush)).reason, { _tag: "SumExceeded", by: 2, value: most })
          yield* batched.add(-2)
          yield* batched.flush
          assert.strictEqual(yield* counter.get, most - 2)
        }))
        yield* counter.reset
      })
    ))

  it.effect("says that an addition is uncertain when the session was lost on the way", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const direct = yield* on(a!, Counter.make({ name: "n" }))
        const line = yield* proxy(server)
        const context = yield* node(line.url, { namespace, partitions: 1, lease: "6 seconds" })
        const counter = yield* on(context, Counter.make({ name: "n" }))
        yield* counter.add(1)
        for (const [executed, verdict] of [[1, "dropReply"], [0, "drop"]] as const) {
          yield* direct.reset
          yield* line.once(asks("counter.add"), verdict)
          const again = yield* line.hold(asks("counter.add"))
          const adding = yield* Effect.forkChild(Effect.flip(counter.add(1)))
          yield* promptly(again.request, "it is sent again")
          yield* forgetSession(context, namespace, server)
          yield* again.release()
          const { reason } = yield* promptly(Fiber.join(adding), "the uncertain one")
          assert.deepInclude(reason, { _tag: "WriteUncertain", kind: "counter", name: "n", namespace })
          assert.strictEqual(yield* direct.get, executed)
        }
        yield* direct.reset
      })))

  it.effect("is deleted after its time to live, and its subscribers observe that, also after a loss of data", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const [one, two] = [
          yield* on(a!, make({ timeToLive: "400 millis" })),
          yield* on(b!, make({ timeToLive: "400 millis" }))
        ]
        const heard = yield* collecting(two.changes)
        yield* sees(heard.seen, [0])
        yield* one.add(1)
        yield* sees(heard.seen, [0, 1, 0])
        assert.strictEqual(yield* one.get, 0)
        yield* lose(b!, namespace, server)
        yield* one.add(2)
        yield* eventually(Effect.sync(() => heard.seen.includes(2)))
        yield* server.cli("FLUSHALL")
        yield* eventually(Effect.sync(() => heard.seen.at(-1) === 0))
        yield* eventually(one.add(3))
        yield* eventually(Effect.sync(() => heard.seen.includes(3)))
        yield* one.reset
      })))

  it.effect("fails with a reason while Redis is away", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const direct = yield* on(a!, make())
        const line = yield* proxy(server)
        yield* Effect.scoped(Effect.gen(function*() {
          const counter = yield* on(yield* fragile(server, line, namespace, 1), make())
          yield* counter.add(1)
          yield* line.blackhole
          const errors = yield* promptly(
            Effect.forEach([counter.add(1), counter.get, counter.reset], Effect.flip, { concurrency: "unbounded" }),
            "the questions"
          )
          for (const { reason } of errors) assert.include(["Timeout", "ConnectionLost", "NotConnected"], reason._tag)
          yield* line.pass
          yield* line.closeAll
          yield* eventually(counter.reset)
        }))
        yield* direct.reset
      })))

  it.effect("says which requests were not sent while Redis was away", () =>
    behindLine(({ context, direct, line }) =>
      Effect.gen(function*() {
        const counter = yield* on(context, make())
        const other = yield* on(yield* direct(), make())
        yield* counter.add(1)
        yield* line.once(asks("counter.add"), "blackholeReply")
        const add = Effect.forkChild(Effect.flip(counter.add(1)))
        const sent = yield* add
        yield* eventually(Effect.map(other.get, (sum) => assert.strictEqual(sum, 2)))
        const waiting = yield* add
        yield* line.refuse
        yield* line.closeAll
        assert.strictEqual((yield* promptly(Fiber.join(sent), "its end")).reason._tag, "Timeout")
        assert.strictEqual((yield* promptly(Fiber.join(waiting), "its end")).reason._tag, "NotConnected")
        yield* line.pass
        yield* eventually(counter.reset)
      }), { lease: "15 seconds", margin: "1 second", requestTimeout: "1 second" }))

  it.effect("is a typed service", () => {
    class Done extends Counter.Service<Done>()("done", { timeToLive: "1 minute" }) {}
    return withNode(() =>
      Effect.gen(function*() {
        const done = yield* Done
        assert.strictEqual(done.name, "done")
        assert.strictEqual(yield* done.add(2), 2)
        assert.strictEqual(yield* done.reset, 2)
      }).pipe(Effect.provide(Done.layer))
    )
  })

  it.effect("comes in families, whose members no other family can name", () =>
    withNode(() =>
      Effect.gen(function*() {
        class Visits extends Counter.FamilyService<Visits>()("a/b", { timeToLive: "5 seconds" }) {}
        yield* Effect.gen(function*() {
          const visits = yield* Visits
          const other = yield* Counter.family({ name: "a", timeToLive: "5 seconds" })
          assert.deepStrictEqual([yield* visits("ann").add(1), yield* visits("ann").add(1)], [1, 2])
          assert.deepStrictEqual([yield* visits("bob").get, yield* other("b/ann").get], [0, 0])
          assert.strictEqual(visits("ann").name, "a%2Fb/ann")
          assert.throws(() => visits(""), RangeError, /key/)
          yield* visits("ann").reset
        }).pipe(Effect.provide(Visits.layer))
      })
    ))
})
