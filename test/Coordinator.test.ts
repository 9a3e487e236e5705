/** What a coordinator shows of itself, and what it refuses. */
import { assert, layer } from "@effect/vitest"
import {
  Cause,
  Config,
  ConfigProvider,
  Context,
  Deferred,
  Duration,
  Effect,
  Exit,
  Fiber,
  Layer,
  Logger,
  Metric,
  Option,
  Schema,
  Scope,
  Stream
} from "effect"
import { TestClock } from "effect/testing"
import {
  Coordinator,
  CountDownLatch,
  Counter,
  Fence,
  Lock,
  Metrics,
  Queue,
  Redis,
  SharedRef,
  Topic
} from "../src/index.ts"
import { apart } from "../src/internal/hold/holding.ts"
import { spaceOf } from "../src/internal/hold/place.ts"
import { make as proxy } from "../src/testing/Proxy.ts"
import { behindLine } from "./support/behindLine.ts"
import { eventually } from "./support/eventually.ts"
import { freshNamespace, holding, node, onNode, short, TestServer, withNode } from "./support/live.ts"
import { remainsOf } from "./support/namespace.ts"
import { asks, waits } from "./support/requests.ts"
import { standalone } from "./support/servers.ts"
import { lose, on, promptly, several } from "./support/several.ts"

layer(TestServer.layer, { excludeTestServices: true, timeout: "60 seconds" })("Coordinator", (it) => {
  it.effect("shows its sessions and their transitions", () =>
    withNode(() =>
      Effect.gen(function*() {
        const server = yield* TestServer
        const coordinator = yield* Coordinator.Coordinator
        const seen: Array<Coordinator.SessionTransition> = []
        yield* Effect.forkScoped(
          Stream.runForEach(coordinator.changes, (change) => Effect.sync(() => void seen.push(change))),
          { startImmediately: true }
        )
        yield* Lock.withLock(Effect.void, "a")
        yield* eventually(Effect.sync(() => seen.some(({ to }) => to === "open")))
        yield* server.cli("FLUSHALL")
        yield* eventually(Effect.sync(() => seen.some(({ reason, to }) => to === "lost" && reason === "unknown")))
        yield* eventually(Effect.map(coordinator.sessions, (all) => all.every(({ state }) => state === "open")))
        assert.isTrue(seen.every(({ partition }) => partition >= 0 && partition < 16))
      }), short))

  it.effect("ends the stream of transitions when it is closed", () =>
    Effect.gen(function*() {
      const scope = yield* Scope.make()
      const context = yield* Scope.provide(
        Effect.flatMap(TestServer, ({ url }) => node(url, { namespace: freshNamespace(), ...short })),
        scope
      )
      const { changes } = Context.get(context, Coordinator.Coordinator)
      const watching = yield* Effect.forkChild(Stream.runCollect(changes), { startImmediately: true })
      yield* onNode(context)(Lock.withLock(Effect.void, "a"))
      yield* Scope.close(scope, Exit.void)
      const seen = yield* Effect.timeout(Fiber.join(watching), "5 seconds")
      assert.strictEqual(Array.from(seen).at(-1)?.to, "closed")
      assert.isEmpty(yield* Stream.runCollect(changes))
    }))

  it.effect("counts", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      yield* Effect.gen(function*() {
        const context = yield* node(server.url, { namespace, ...short })
        yield* Effect.gen(function*() {
          yield* Effect.forEach(
            [1, 2, 3],
            () =>
              Lock.withLock(
                Effect.gen(function*() {
                  yield* Effect.sleep(5)
                }),
                "a"
              ),
            { concurrency: "unbounded" }
          )
          yield* Lock.withLock(
            Effect.gen(function*() {
              yield* Lock.withLock(Effect.void, "b")
              yield* eventually(Effect.map(Metric.value(Metrics.holds), ({ value }) => value === 1))
              // A finalizer that takes longer than the margin.
              yield* server.cli("FLUSHALL")
              yield* Effect.never
            }).pipe(Effect.onInterrupt(() => Effect.sleep("800 millis"))),
            "c"
          ).pipe(Effect.flip)
          yield* eventually(Effect.map(Metric.value(Metrics.overruns), ({ count }) => count === 1))
          assert.isAbove((yield* Metric.value(Metrics.requests)).count, 10)
          assert.strictEqual((yield* Metric.value(Metrics.waits)).count, 2)
          assert.isAtLeast((yield* Metric.value(Metrics.losses("unknown"))).count, 1)
          const closed = (program: Effect.Effect<unknown, unknown, Coordinator.Coordinator>) =>
            Effect.scoped(
              Effect.flatMap(
                node(server.url, { namespace: freshNamespace() }),
                (other) => Effect.provideContext(program, other)
              )
            ).pipe(Effect.andThen(Metric.value(Metrics.losses("closed"))), Effect.map(({ count }) => count))
          assert.strictEqual(yield* closed(Lock.withLock(Effect.void, "a")), 0)
          assert.strictEqual(yield* closed(holding("a")), 1)
          assert.isAbove((yield* Metric.value(Metrics.batchSize)).count, 5)
          assert.isAbove((yield* Metric.value(Metrics.roundTrip)).count, 5)
          yield* eventually(Effect.map(Metric.value(Metrics.holds), ({ value }) => value === 0))
          const waits = (yield* Metric.value(Metrics.waitTime)).count
          const holds = (yield* Metric.value(Metrics.holdTime)).count
          yield* Lock.withLock(
            Effect.andThen(
              Effect.flip(Lock.withLock(Effect.void, "d", { wait: "50 millis" }).pipe(apart)),
              Effect.andThen(
                Effect.forkDetach(Lock.withLock(Effect.void, "d").pipe(apart)),
                Effect.sleep("20 millis")
              )
            ),
            "d"
          )
          assert.strictEqual((yield* Metric.value(Metrics.timeouts)).count, 1)
          yield* eventually(Effect.map(Metric.value(Metrics.waitTime), ({ count }) => count === waits + 1))
          yield* eventually(Effect.map(Metric.value(Metrics.holdTime), ({ count }) => count === holds + 2))
          assert.isAtLeast((yield* Metric.value(Metrics.holdTime)).max, 65)
        }).pipe(Effect.provideContext(context))
      }).pipe(Effect.scoped, Effect.provideService(Metric.MetricRegistry, new Map()))
    }))

  it.effect("measures the round trip of a batch from its first attempt on", () =>
    behindLine(({ context, line }) =>
      on(
        context,
        Effect.gen(function*() {
          const max = Effect.map(Metric.value(Metrics.roundTrip), ({ max }) => max)
          yield* Lock.withLock(Effect.void, "a")
          assert.isBelow(yield* max, 300)
          const lost = yield* line.once(asks("lock.take"), "blackholeReply")
          yield* Lock.withLock(Effect.void, "a")
          yield* lost
          assert.isAtLeast(yield* max, 299)
        })
      ), { lease: "3 seconds", requestTimeout: "300 millis" }).pipe(
        Effect.provideService(Metric.MetricRegistry, new Map())
      ))

  it.effect("counts overruns of the margin of the coordinator when that is closed, for any length of lease", () =>
    Effect.gen(function*() {
      const { url } = yield* TestServer
      const count = Effect.map(Metric.value(Metrics.overruns), ({ count }) => count)
      const overrunsOf = Effect.fnUntraced(function*(lease: Duration.Input | undefined, cleanUp: Duration.Input) {
        const before = yield* count
        const scope = yield* Scope.make()
        const options = { namespace: freshNamespace(), lease: "6 seconds", margin: "600 millis" } as const
        const context = yield* Scope.provide(node(url, options), scope)
        const held = yield* Deferred.make<void>()
        const program = Effect.andThen(Deferred.succeed(held, undefined), Effect.never).pipe(
          Effect.onInterrupt(() => Effect.sleep(cleanUp)),
          Lock.withLock("a", { lease })
        )
        const fiber = yield* Effect.forkChild(onNode(context)(program))
        yield* Deferred.await(held)
        yield* Scope.close(scope, Exit.void)
        yield* Fiber.await(fiber)
        return (yield* count) - before
      })
      assert.strictEqual(yield* overrunsOf(undefined, "1 second"), 1)
      assert.strictEqual(yield* overrunsOf("20 seconds", "1 second"), 1)
      assert.strictEqual(yield* overrunsOf("400 millis", "400 millis"), 0)
      assert.strictEqual(yield* overrunsOf("400 millis", "1 second"), 1)
    }).pipe(Effect.provideService(Metric.MetricRegistry, new Map())))

  it.effect("counts an overrun when it is closed before the margin of a loss has passed", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const scope = yield* Scope.make()
      const options = { namespace: freshNamespace(), lease: "3 seconds", margin: "200 millis" } as const
      const context = yield* Scope.provide(node(server.url, options), scope)
      const [held, lost] = [yield* Deferred.make<void>(), yield* Deferred.make<void>()]
      const program = Effect.andThen(Deferred.succeed(held, undefined), Effect.never).pipe(
        Effect.onInterrupt(() => Effect.andThen(Deferred.succeed(lost, undefined), Effect.sleep("2 seconds"))),
        Lock.withLock("a", { lease: "60 seconds" })
      )
      const fiber = yield* Effect.forkChild(onNode(context)(program))
      yield* Deferred.await(held)
      yield* server.cli("FLUSHALL")
      yield* onNode(context)(Lock.withLock(Effect.void, "a", { lease: "60 seconds" })).pipe(Effect.forkChild)
      yield* Deferred.await(lost)
      yield* Scope.close(scope, Exit.void)
      assert.isUndefined(fiber.pollUnsafe())
      assert.strictEqual((yield* Metric.value(Metrics.overruns)).count, 1)
      yield* Fiber.await(fiber)
    }).pipe(Effect.provideService(Metric.MetricRegistry, new Map())))

  it.effect("counts a wait once, also when its session is lost meanwhile", () =>
    several(2, ([one, two], namespace, server) =>
      Effect.gen(function*() {
        const held = yield* onNode(one!)(holding("a"))
        const waiting = yield* Effect.forkChild(onNode(two!)(Lock.withLock(Effect.void, "a")))
        yield* waits(server, namespace, "lock:a", 1)
        yield* lose(two!, namespace, server)
        yield* waits(server, namespace, "lock:a", 1)
        yield* held.leave
        yield* Fiber.join(waiting)
        assert.strictEqual((yield* Metric.value(Metrics.waits)).count, 1)
        assert.strictEqual((yield* Metric.value(Metrics.waitTime)).count, 1)
      })).pipe(Effect.provideService(Metric.MetricRegistry, new Map())))

  it.effect("identifies itself in its log lines", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      const lines: Array<string> = []
      const logger = Logger.make((options) => void lines.push(JSON.stringify(Logger.formatStructured.log(options))))
      yield* Effect.gen(function*() {
        const context = yield* node(server.url, { namespace, name: "me", ...short })
        yield* Lock.withLock(Effect.andThen(server.cli("FLUSHALL"), Effect.never), "a").pipe(
          Effect.provideContext(context),
          Effect.flip
        )
      }).pipe(Effect.scoped, Effect.provide(Logger.layer([logger])))
      const line = lines.find((line) => line.includes("session") && line.includes("was lost (unknown)"))
      assert.include(line, namespace)
      assert.include(line, "\"me\"")
      const what = JSON.stringify(`lock "a" of namespace "${namespace}"`).slice(1, -1)
      assert.isDefined(lines.find((line) => line.includes(what) && line.includes("lost (unknown)")), lines.join("\n"))
    }))

  it.effect("names some of the holds that are lost with a session, and tells how many there were", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      const lines: Array<string> = []
      const logger = Logger.make(({ message }) => void lines.push(String(message)))
      yield* Effect.gen(function*() {
        const context = yield* node(server.url, { namespace, partitions: 1, ...short })
        const held = Effect.forEach(Array.from({ length: 200 }), (_, at) => Lock.acquire(`lock ${at}`))
        yield* Effect.gen(function*() {
          const leases = yield* held
          yield* server.cli("FLUSHALL")
          yield* Effect.forEach(leases, ({ lost }) => Effect.exit(lost))
        }).pipe(Effect.scoped, Effect.provideContext(context))
      }).pipe(Effect.scoped, Effect.provide(Logger.layer([logger])))
      assert.isDefined(lines.find((line) => line.includes("and 200 holds with it")), lines.join("\n"))
      assert.strictEqual(lines.filter((line) => line.includes("lock \"lock ") && line.includes("was lost")).length, 10)
    }))

  it.effect("ends the sessions of other lengths of lease when they are not used any more", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const { sessions } = Context.get(a!, Coordinator.Coordinator)
        const opened = Effect.map(sessions, (all) => all.filter(({ state }) => state === "open").length)
        const inRedis = Effect.map(
          server.cli("HKEYS", `{${namespace}:00}:sessions`),
          (fields) => fields.split("\n").filter((field) => field.startsWith("s")).length
        )
        const leave = yield* Deferred.make<void>()
        const held = yield* on(
          a!,
          Effect.forkChild(Lock.withLock(Deferred.await(leave), "held", { lease: "600 millis" }))
        )
        const waiting = yield* on(a!, Effect.forkChild(Lock.withLock(Effect.void, "held", { lease: "700 millis" })))
        yield* waits(server, namespace, "lock:held", 1)
        for (let more = 0; more < 10; more++) {
          yield* on(a!, Lock.withLock(Effect.void, "a", { lease: 300 + more }))
        }
        yield* eventually(Effect.map(opened, (count) => assert.strictEqual(count, 3)))
        yield* eventually(Effect.map(inRedis, (count) => assert.strictEqual(count, 3)))
        assert.isUndefined(held.pollUnsafe())
        yield* Deferred.succeed(leave, undefined)
        yield* Fiber.join(held)
        yield* Fiber.join(waiting)
        yield* eventually(Effect.map(inRedis, (count) => assert.strictEqual(count, 1)))
        // They are opened again.
        yield* on(a!, Lock.withLock(Effect.void, "a", { lease: 300 }))
      })))

  it.effect("says why it could not be built, when Redis refuses all the time", () =>
    Effect.gen(function*() {
      const server = yield* standalone()
      yield* server.cli("CONFIG", "SET", "min-replicas-to-write", "1")
      const options = {
        namespace: freshNamespace(),
        lease: "1 second",
        margin: "200 millis",
        requestTimeout: "300 millis"
      } as const
      const failed = yield* Effect.flip(Effect.scoped(node(server.url, options)))
      assert.deepInclude((failed as Coordinator.CoordinatorError).reason, { _tag: "Unavailable", code: "NOREPLICAS" })
    }).pipe(Effect.scoped))

  it.effect("fails to be built under a TestClock, too, when Redis is silent", () =>
    Effect.gen(function*() {
      const line = yield* proxy(yield* TestServer)
      const redis = yield* Layer.build(Redis.layer({ url: line.url }))
      yield* line.blackhole
      const layer = Coordinator.layer({ namespace: freshNamespace(), lease: "1 second", requestTimeout: "300 millis" })
      const building = Effect.scoped(Layer.build(layer)).pipe(Effect.provideContext(redis))
      const error = yield* promptly(Effect.flip(Effect.provide(building, TestClock.layer())), "the failure")
      assert.strictEqual(error.reason._tag, "Timeout")
    }).pipe(Effect.scoped))

  it.effect("warns of another one of the same namespace in this process, for as long as there is one", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      const lines: Array<string> = []
      const logger = Logger.make(({ logLevel, message }) => void lines.push(`${logLevel} ${String(message)}`))
      const warnings = Effect.sync(() => lines.filter((line) => /^Warn .* coordinators of the namespace/.test(line)))
      yield* Effect.gen(function*() {
        yield* Effect.scoped(Effect.gen(function*() {
          yield* node(server.url, { namespace })
          yield* node(server.url, { namespace: freshNamespace() })
          assert.deepStrictEqual(yield* warnings, [])
          yield* node(server.url, { namespace })
          yield* eventually(Effect.map(warnings, ({ length }) => length === 1))
          assert.include(lines.find((line) => line.includes("coordinators of the namespace")), "has 2 coordinators")
        }))
        yield* Effect.scoped(node(server.url, { namespace }))
        assert.strictEqual((yield* warnings).length, 1)
      }).pipe(Effect.provide(Logger.layer([logger])))
    }))

  it.effect("warns when the namespace had another number of partitions, once", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      const lines: Array<string> = []
      const logger = Logger.make(({ logLevel, message }) => void lines.push(`${logLevel} ${String(message)}`))
      const use = (partitions: number) =>
        Effect.scoped(Effect.flatMap(node(server.url, { namespace, partitions }), (context) =>
          Effect.forEach(
            Array.from({ length: 20 }, (_, at) => `k${at}`),
            (key) => Lock.withLock(Effect.void, key)
          ).pipe(
            Effect.provideContext(context)
          )))
      yield* Effect.forEach([4, 4, 8, 8], use).pipe(Effect.provide(Logger.layer([logger])))
      const warnings = lines.filter((line) => line.startsWith("Warn"))
      assert.strictEqual(warnings.length, 1, warnings.join())
      assert.include(warnings[0], `the namespace "${namespace}" had 4 partitions and has 8 now`)
    }))

  it.effect("reads its options from Config", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      const provider = ConfigProvider.fromUnknown({ NAMESPACE: namespace, LEASE: "20 seconds" })
      const context = yield* Layer.build(
        Coordinator.layerConfig({ namespace: Config.String("NAMESPACE"), lease: Config.Duration("LEASE") }).pipe(
          Layer.provide(Redis.layer({ url: server.url })),
          Layer.provide(ConfigProvider.layer(provider))
        )
      )
      const coordinator = Context.get(context, Coordinator.Coordinator)
      assert.strictEqual(coordinator.namespace, namespace)
      assert.strictEqual(Duration.toSeconds(coordinator.lease), 20)
    }).pipe(Effect.scoped))

  it.effect("refuses bad options as defects", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const bad: Array<Coordinator.Options> = [
        { namespace: "" },
        { namespace: "a{b" },
        { namespace: "a".repeat(65) },
        { namespace: "ä" },
        { lease: "50 millis" },
        { lease: "1 second", margin: "1 second" },
        { lease: "10 seconds", margin: "6 seconds" },
        { margin: Number.NaN },
        { lease: "10 seconds", requestTimeout: "4 seconds" },
        { partitions: 0 },
        { partitions: 1.5 },
        { partitions: 2000 },
        { name: "" },
        { batch: { maxRequests: 0 } },
        { batch: { maxPending: 0 } }
      ]
      for (const options of bad) {
        const exit = yield* Effect.exit(Effect.scoped(node(server.url, options)))
        const defect = Exit.isFailure(exit) ? Cause.squash(exit.cause) : undefined
        assert.instanceOf(defect, RangeError, JSON.stringify(options))
      }
    }))

  it.effect("refuses a namespace that is divided otherwise", () =>
    withNode((namespace) =>
      Effect.gen(function*() {
        const server = yield* TestServer
        const exit = yield* Effect.exit(Effect.scoped(node(server.url, { namespace, partitions: 8 })))
        const error = Exit.isFailure(exit) ? Cause.squash(exit.cause) : undefined
        assert.instanceOf(error, Coordinator.CoordinatorError)
        assert.strictEqual((error as Coordinator.CoordinatorError).reason._tag, "Incompatible")
      })
    ))

  it.effect("fails requests beyond maxPending with Overloaded, and serves the others", () =>
    withNode(() =>
      Effect.gen(function*() {
        const exits = yield* Effect.forEach(
          Array.from({ length: 200 }, (_, at) => at),
          (at) => Effect.exit(Lock.withLock(Effect.void, `k${at}`)),
          { concurrency: "unbounded" }
        )
        const reasons = exits.flatMap((exit) => {
          const error = Option.getOrUndefined(Exit.findErrorOption(exit))
          if (error === undefined) return []
          assert.match(error.message, /about lock "k\d+" of namespace "/)
          return [error.reason._tag]
        })
        assert.isAbove(reasons.length, 0)
        assert.isBelow(reasons.length, 200)
        assert.isTrue(reasons.every((reason) => reason === "Overloaded"))
        yield* Lock.withLock(Effect.void, "k0")
      }), { partitions: 1, batch: { maxPending: 20, maxRequests: 10 } }))

  it.effect("refuses questions beyond its bound, and answers the others", () =>
    withNode(() =>
      Effect.gen(function*() {
        const latch = yield* CountDownLatch.make({ name: "ready", count: 1 })
        const ref = yield* SharedRef.make({ name: "state", schema: Schema.Number, initial: 1 })
        const askMany = <E extends { readonly reason: { readonly _tag: string } }>(
          question: Effect.Effect<number, E>
        ) =>
          Effect.gen(function*() {
            const asked = Array.from({ length: 50 }, () => Effect.exit(question))
            const exits = yield* Effect.all(asked, { concurrency: "unbounded" })
            const refused = exits.flatMap((exit) => Option.toArray(Exit.findErrorOption(exit)))
            assert.strictEqual(refused.length, 30)
            assert.isTrue(refused.every(({ reason }) => reason._tag === "Overloaded"))
            yield* question
          })
        yield* askMany(latch.remaining)
        yield* askMany(ref.get)
      }), { partitions: 1, batch: { maxPending: 20 } }))

  it.effect("fails what is asked of it after it was closed", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const { context, latch } = yield* Effect.scoped(Effect.gen(function*() {
        const context = yield* node(server.url, { namespace: freshNamespace() })
        const latch = yield* CountDownLatch.make({ name: "ready", count: 1 }).pipe(Effect.provideContext(context))
        return { context, latch }
      }))
      const error = yield* Lock.withLock(Effect.void, "a").pipe(Effect.provideContext(context), Effect.flip)
      assert.strictEqual(error.reason._tag, "CoordinatorClosed")
      // Requests and questions alike.
      for (const asked of [latch.countDown(), latch.remaining, latch.isOpen, latch.reset]) {
        const { reason } = yield* Effect.flip(asked)
        assert.strictEqual(reason._tag, "CoordinatorClosed")
      }
    }))

  it.effect("does what is due at once before it is closed, since there may be no other one", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      for (let round = 0; round < 10; round++) {
        yield* Effect.scoped(Effect.gen(function*() {
          const context = yield* node(server.url, { namespace, partitions: 1 })
          yield* Effect.provideContext(Lock.withLock(Effect.void, "a"), context)
          yield* server.cli("ZADD", `{${namespace}:00}:due`, 0, "@lock:one that is gone")
          // As the reply to its last request would say.
          const { kernel } = spaceOf(Context.get(context, Coordinator.Coordinator))
          kernel.partitionAt(0).reaper.expect({ millis: 0, ending: undefined }, kernel.io.now())
        }))
        assert.deepStrictEqual(yield* remainsOf([server], namespace), [])
      }
    }))

  it.effect("keeps one session for any number of holds", () =>
    withNode(() =>
      Effect.gen(function*() {
        const server = yield* TestServer
        yield* Effect.scoped(Effect.gen(function*() {
          const leases = yield* Effect.forEach(
            Array.from({ length: 2000 }, (_, at) => `k${at}`),
            (key) => Lock.acquire(key),
            {
              concurrency: "unbounded"
            }
          )
          const calls = Effect.map(
            server.cli("INFO", "commandstats"),
            (text) =>
              [...text.matchAll(/cmdstat_fcall:calls=(\d+)/g)].reduce((sum, [, calls]) => sum + Number(calls), 0)
          )
          const [before, from] = [yield* calls, performance.now()]
          yield* Effect.sleep("2 seconds")
          const made = (yield* calls) - before
          // Of a lease of two seconds: three heartbeats, each for all 16 partitions.
          assert.isBelow(made, 2 + (performance.now() - from) / 2000 * 3)
          for (const lease of leases) assert.isTrue(yield* lease.isHeld)
        }))
      }), short))

  it.effect("has two connections, regardless of what its process runs", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const name = freshNamespace()
      yield* Effect.gen(function*() {
        const connections = Effect.map(
          server.cli("CLIENT", "LIST"),
          (list) => [...list.matchAll(new RegExp(` name=(${name}\\S*)`, "g"))].map(([, found]) => found!).sort()
        )
        const schema = Schema.Number
        const heard = new Set<string>()
        const hears = (what: string) => (n: number) => Effect.sync(() => void heard.add(`${what} ${n}`))
        // Topics with subscribers that are quick, slow or begin late, and groups; queues; refs and counters; waiters.
        const all = (at: number) =>
          Effect.gen(function*() {
            const what = `${at}`
            const topic = yield* Topic.make({ name: what, schema, shards: 1 + at % 3 })
            yield* Effect.addFinalizer(() => Effect.orDie(topic.purge))
            const queue = yield* Queue.make({ name: what, payload: schema })
            const ref = yield* SharedRef.make({ name: what, schema, initial: 0 })
            const counter = yield* Counter.make({ name: what })
            yield* topic.publishAll([1, 2, 3])
            const subscriber = (options: Topic.SubscribeOptions, slow: boolean, named: string) =>
              topic.subscribe(options).pipe(
                Topic.values,
                Stream.tap(() => slow ? Effect.sleep(2) : Effect.void),
                Stream.runForEach(hears(named))
              )
            yield* Effect.all([
              ...Array.from({ length: 5 }, (_, n) => subscriber({ from: "beginning" }, false, `sub ${what}.${n}`)),
              subscriber({ from: "beginning", buffer: { capacity: 1 } }, true, `slow ${what}`),
              ...["ordered", "unordered"].map((group) =>
                topic.run(({ value }) => hears(`${group} ${what}`)(value), {
                  group,
                  from: "beginning",
                  orderBy: group === "ordered" ? "key" : undefined
                })
              ),
              queue.run(hears(`job ${what}`), { concurrency: 3 }),
              Stream.runForEach(ref.changes, hears(`ref ${what}`)),
              ref.until((n) => n < 0),
              Stream.runForEach(counter.changes, hears(`count ${what}`)),
              Effect.andThen(Lock.acquire(`lock ${what}`), Lock.acquire("the same"))
            ], { concurrency: "unbounded" }).pipe(Effect.forkScoped)
            const expected = [
              ...Array.from({ length: 5 }, (_, n) => `sub ${what}.${n}`),
              ...["slow", "ordered", "unordered"].map((word) => `${word} ${what}`)
            ].flatMap((named) => [`${named} 3`, `${named} 63`])
            yield* topic.publishAll(Array.from({ length: 60 }, (_, n) => n + 4))
            yield* queue.offer(1)
            yield* ref.set(1)
            yield* counter.add(1)
            yield* eventually(Effect.sync(() => {
              for (const one of [...expected, ...["job", "ref", "count"].map((word) => `${word} ${what} 1`)]) {
                assert.isTrue(heard.has(one), one)
              }
            }))
            yield* ref.delete
            yield* counter.reset
          })
        yield* all(0)
        assert.deepStrictEqual(yield* connections, [name, `${name}:reader`])
        yield* Effect.forEach([1, 2, 3, 4, 5, 6, 7, 8, 9], all, { concurrency: "unbounded" })
        assert.deepStrictEqual(yield* connections, [name, `${name}:reader`])
      }).pipe(
        Effect.scoped,
        Effect.provide(
          Coordinator.layer({ namespace: name, partitions: 8 }).pipe(
            Layer.provideMerge(Redis.layer({ url: server.url, clientName: name })),
            Layer.fresh
          )
        )
      )
    }))

  it.effect("guards a key against former holders", () =>
    withNode((namespace) =>
      Effect.gen(function*() {
        const redis = yield* Redis.Redis
        for (const key of [`${namespace}`, `{${namespace}}x`, `${namespace} é\n:{`, `a{${namespace}}{b}`]) {
          assert.strictEqual(yield* Fence.run({ token: 5 }, key, "SET", "five"), "OK")
          assert.strictEqual(yield* Fence.run({ token: 5 }, key, "APPEND", "!"), 5)
          const stale = yield* Effect.flip(Fence.run({ token: 4 }, key, "SET", "four"))
          assert.deepStrictEqual(
            stale.reason._tag === "StaleToken" && [stale.reason.token, stale.reason.seen],
            [4, 5]
          )
          const about = `key ${JSON.stringify(key)} of namespace "${namespace}"`
          assert.include(stale.message, about)
          assert.strictEqual(yield* redis.send("GET", key), "five!")
          // What Redis refuses neither writes nor counts as seen.
          const refused = yield* Effect.flip(Fence.run({ token: 9 }, key, "HSET", "a", "b"))
          assert.strictEqual(refused.reason._tag, "CommandRefused")
          const forgotten = yield* Effect.exit(Fence.run({ token: 9 }, key, "SET", undefined as never))
          assert.include(String(forgotten), "RangeError")
          assert.include(refused.message, about)
          assert.strictEqual(yield* Fence.run({ token: 6 }, key, "GET"), "five!")
          yield* redis.send("DEL", key)
          yield* redis.send("DEL", ...(yield* redis.send<Array<string>>("KEYS", "*lockstep:fence:*")))
        }
        for (const key of ["", "a}b", "{}a", "\ud800"]) {
          assert.isTrue(Exit.hasDies(yield* Effect.exit(Fence.run({ token: 1 }, key, "SET", "x"))))
        }
      })
    ))

  it.effect("guards nothing with a token that cannot be kept", () =>
    withNode((namespace) =>
      Effect.gen(function*() {
        const server = yield* TestServer
        const key = `${namespace}:guarded`
        const forever = Fence.withOptions({ timeToLive: Duration.infinity })
        assert.isTrue(Exit.hasDies(yield* Effect.exit(Effect.suspend(() => forever({ token: 2 }, key, "SET", "two")))))
        assert.strictEqual(yield* server.cli("GET", key), "")
      })
    ))

  it.effect("guards a key over a reconnect, and names it when Redis stays away", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      const key = `${namespace}:guarded`
      yield* Effect.scoped(Effect.gen(function*() {
        const line = yield* proxy(server)
        const context = yield* node(line.url, { namespace, requestTimeout: "500 millis" })
        yield* Effect.gen(function*() {
          const { state } = yield* Redis.Redis
          const away = Effect.andThen(
            Effect.andThen(line.refuse, line.closeAll),
            eventually(Effect.map(state, (now) => now === "reconnecting"))
          )
          yield* away
          const written = yield* Effect.forkChild(Fence.run({ token: 1 }, key, "INCR"))
          yield* Effect.yieldNow
          yield* line.pass
          assert.strictEqual(yield* Fiber.join(written), 1)
          // It may have been executed: it is not repeated.
          yield* line.once(({ args }) => args.includes("INCR"), "dropReply")
          const lost = yield* Effect.flip(Fence.run({ token: 1 }, key, "INCR"))
          assert.strictEqual(lost.reason._tag, "ConnectionLost", lost.message)
          assert.include(lost.message, key)
          assert.strictEqual(yield* server.cli("GET", key), "2")
          yield* away
          const error = yield* Effect.flip(Fence.run({ token: 1 }, key, "INCR"))
          assert.strictEqual(error.reason._tag, "NotConnected", error.message)
          assert.include(error.message, `about key "${key}" of namespace "${namespace}"`)
          yield* line.pass
        }).pipe(Effect.provideContext(context))
      }))
    }))

  it.effect("runs programs that fail to be interrupted for a moment without losing the word of it", () =>
    withNode(() =>
      Effect.gen(function*() {
        const server = yield* TestServer
        // The body cannot be interrupted, and finishes: its result must not look like a success under the lock.
        const fiber = yield* Effect.forkChild(
          Lock.withLock(
            Effect.uninterruptible(Effect.andThen(server.cli("FLUSHALL"), Effect.sleep("1500 millis"))),
            "a"
          )
        )
        const exit = yield* Fiber.await(fiber)
        const error = Option.getOrUndefined(Exit.findErrorOption(exit))
        assert.strictEqual(error?._tag === "LockError" && error.reason._tag, "LeaseLost")
      }), short))
})
