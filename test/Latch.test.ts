/** Latches: open, all pass; closed, they wait. */
import { assert, layer } from "@effect/vitest"
import { Deferred, Duration, Effect, Fiber, Latch as EffectLatch, Option } from "effect"
import { CountDownLatch, Latch, Lock } from "../src/index.ts"
import { make as proxy } from "../src/testing/Proxy.ts"
import { assertUnanswered, behindLine } from "./support/behindLine.ts"
import { eventually } from "./support/eventually.ts"
import { type Node, node, TestServer, withNode } from "./support/live.ts"
import { fields } from "./support/requests.ts"
import { lose, on, pending, promptly, sessionsOf, several } from "./support/several.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

/** Short, so that the namespace is empty soon. */
const timeToLive = "100 millis"

layer(TestServer.layer, live)("a latch", (it) => {
  it.effect("lets waiters pass, until it is closed", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const [one, two] = [
          yield* on(a!, Latch.make({ name: "start", timeToLive })),
          yield* on(b!, Latch.make({ name: "start", timeToLive }))
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

  it.effect("answers whether it was changed, as effect/Latch does", () =>
    withNode(() =>
      Effect.gen(function*() {
        const shared = yield* Latch.make({ name: "start", timeToLive })
        const local = yield* EffectLatch.make()
        const verbs = ["open", "open", "release", "close", "close", "release", "release", "open", "close"] as const
        for (const verb of verbs) assert.strictEqual(yield* shared[verb], yield* local[verb], verb)
        const ours = { open: Latch.open, close: Latch.close, release: Latch.release }
        const theirs = { open: EffectLatch.open, close: EffectLatch.close, release: EffectLatch.release }
        for (const verb of verbs) assert.strictEqual(yield* ours[verb](shared), yield* theirs[verb](local), verb)
        assert.strictEqual(yield* Latch.isOpen(shared), local.isOpen())
      })
    ))

  it.effect("releases the present waiters without opening", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const [one, two] = [
          yield* on(a!, Latch.make({ name: "start", timeToLive })),
          yield* on(b!, Latch.make({ name: "start", timeToLive }))
        ]
        for (let round = 0; round < 3; round++) {
          const waiting = yield* Effect.forEach([one, two, two], (latch) => Effect.forkChild(latch.await))
          yield* Effect.yieldNow
          assert.isTrue(yield* one.release)
          yield* promptly(Effect.forEach(waiting, Fiber.join), "the present waiters")
          assert.isFalse(yield* two.isOpen)
          const later = yield* Effect.forEach([one, two], (latch) => Effect.forkChild(latch.await))
          // Waiters that were there before a loss of the session wait on.
          yield* lose(b!, namespace, server)
          assert.isFalse(yield* two.close)
          yield* Effect.forEach(later, pending)
          yield* Effect.forEach(later, Fiber.interrupt)
        }
      })))

  it.effect("runs effects when it is open, data first and data last", () =>
    withNode(() =>
      Effect.gen(function*() {
        const start = yield* Latch.make({ name: "start", open: true, timeToLive })
        assert.isTrue(yield* start.isOpen)
        assert.strictEqual(yield* Latch.whenOpen(start, Effect.succeed(1)), 1)
        assert.strictEqual(yield* Effect.succeed(2).pipe(Latch.whenOpen(start)), 2)
        assert.strictEqual(yield* start.whenOpen(Effect.succeed(3)), 3)
        yield* Latch.await(start)
        assert.isTrue(yield* start.close)
        let ran = false
        const late = yield* Effect.flip(start.whenOpen(Effect.sync(() => void (ran = true)), { wait: "20 millis" }))
        const wait = { wait: "20 millis" } as const
        assert.strictEqual((yield* Effect.flip(Latch.whenOpen(start, Effect.void, wait))).reason._tag, "WaitTimeout")
        assert.strictEqual(
          (yield* Effect.flip(Effect.void.pipe(Latch.whenOpen(start, wait)))).reason._tag,
          "WaitTimeout"
        )
        assert.deepInclude(late.reason, { _tag: "WaitTimeout", kind: "latch", key: "start" })
        for (const waiting of [start.await, start.waitFor({ wait: "20 millis" })]) {
          assert.strictEqual((yield* promptly(Effect.flip(waiting), "the end")).reason._tag, "WaitTimeout")
        }
        assert.isFalse(ran)
      }), { wait: "50 millis" }))

  it.effect("is found by the next run as the last one has left it, unless its options say otherwise", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const options = { name: "start", timeToLive: "1 minute" } as const
        const using = <A>(context: Node, more: Latch.Options, use: (latch: Latch.Latch) => Effect.Effect<A, unknown>) =>
          Effect.scoped(Effect.flatMap(on(context, Latch.make({ ...options, ...more })), use))
        yield* using(a!, {}, (latch) => latch.open)
        // As documented: the next run passes at once.
        yield* promptly(using(b!, {}, (latch) => latch.await), "the next run")
        assert.isFalse(yield* using(b!, { fresh: true }, (latch) => latch.isOpen))
        assert.isTrue(yield* using(a!, { fresh: true, open: true }, (latch) => latch.isOpen))
        assert.isTrue(yield* using(a!, { open: false }, (latch) => latch.isOpen))
        // Closed on purpose, so `open` does not open it again.
        assert.isTrue(yield* using(a!, { open: true }, (latch) => latch.close))
        assert.isFalse(yield* using(b!, { open: true }, (latch) => latch.isOpen))
        yield* using(a!, { run: "2" }, (former) =>
          Effect.gen(function*() {
            yield* former.open
            const waiting = yield* Effect.forkChild(former.await)
            yield* promptly(Fiber.join(waiting), "a member of the run")
            yield* using(b!, { run: "2" }, (same) => Effect.map(same.isOpen, (open) => assert.isTrue(open)))
            yield* using(b!, { run: "3" }, (later) =>
              Effect.gen(function*() {
                assert.isFalse(yield* later.isOpen)
                for (const call of [former.open, former.close, former.release, former.isOpen, former.await]) {
                  const { reason } = yield* Effect.flip<unknown, Latch.LatchError, never>(call)
                  assert.deepInclude(reason, { _tag: "Superseded", kind: "latch", run: "2", current: "3" })
                }
              }))
          }))
        yield* using(b!, { run: "4", timeToLive }, (latch) => latch.isOpen)
      })))

  it.effect("is restored open or closed after Redis has lost its data", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const make = (context: Node, name: string) => on(context, Latch.make({ name, open: true, timeToLive }))
        const latches = yield* Effect.forEach(
          ["open", "closed"],
          (name) => Effect.all([make(a!, name), make(b!, name)])
        )
        yield* latches[1]![0].close
        yield* eventually(Effect.map(latches[1]![1].close, (changed) => !changed))
        yield* server.cli("FLUSHALL")
        for (const name of ["open", "closed"]) {
          const members = fields(server, namespace, `latch:${name}`, "o")
          yield* eventually(Effect.map(members, (found) => found === 2), { message: `both have joined ${name} again` })
        }
        assert.isTrue(yield* latches[0]![0].isOpen)
        assert.isFalse(yield* latches[1]![0].isOpen)
        const waiting = yield* Effect.forkChild(latches[1]![0].await)
        yield* promptly(latches[0]![1].await, "a waiter at the open one")
        yield* pending(waiting)
        assert.isTrue(yield* latches[1]![1].open)
        yield* promptly(Fiber.join(waiting), "a waiter at the closed one")
      })))

  it.effect("is closed, released and opened as the first request after Redis has lost its data", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const latch = yield* on(a!, Latch.make({ name: "a", timeToLive }))
        const lost = Effect.andThen(
          server.cli("FLUSHALL"),
          // Its namespace has to be known again, by another session.
          on(b!, Lock.withLockIfAvailable(Effect.void, "to be told"))
        )
        assert.isTrue(yield* latch.open)
        yield* lost
        assert.isTrue(yield* latch.close)
        assert.isFalse(yield* latch.isOpen)
        const waiting = yield* Effect.forkChild(latch.await)
        yield* pending(waiting)
        yield* lost
        yield* latch.release
        yield* promptly(Fiber.join(waiting), "the waiter")
        yield* lost
        assert.isTrue(yield* latch.open)
        assert.isTrue(yield* latch.isOpen)
        assert.isNotEmpty(namespace)
      })))

  it.effect("stays closed if it was closed after Redis has lost its data, also for a member that learns of that later", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const [one, two] = yield* Effect.forEach([a!, b!], (node) => on(node, Latch.make({ name: "a", timeToLive })))
        yield* one!.open
        yield* promptly(two!.await, "the other member")
        yield* server.cli("FLUSHALL")
        assert.isTrue(yield* two!.close)
        const members = fields(server, namespace, "latch:a", "o")
        yield* on(a!, Lock.withLockIfAvailable(Effect.void, "to be told"))
        yield* eventually(Effect.map(members, (found) => found === 2), { message: "both have joined again" })
        // What it restores is behind that in the queue.
        yield* on(a!, Lock.withLockIfAvailable(Effect.void, "to be told"))
        assert.isFalse(yield* one!.isOpen)
        assert.isFalse(yield* two!.isOpen)
      })))

  it.effect("goes back with a Redis that has forgotten that the latch was made anew", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const make = (context: Node) => on(context, Latch.make({ name: "older", timeToLive }))
        const [one, two] = [yield* make(a!), yield* make(b!)]
        const key = `{${namespace}:00}:latch:older`
        yield* server.cli("COPY", key, `${key}:before`)
        yield* server.cli("DEL", key)
        // Made anew, and only this member knows it.
        assert.isTrue(yield* one.open)
        assert.isTrue(yield* one.close)
        yield* server.cli("RENAME", `${key}:before`, key)
        yield* lose(a!, namespace, server)
        yield* lose(b!, namespace, server)
        yield* eventually(Effect.map(fields(server, namespace, "latch:older", "o"), (found) => found === 2), {
          message: "both have joined again"
        })
        const waiting = yield* Effect.forkChild(one.await)
        yield* two.open
        yield* promptly(Fiber.join(waiting), "the waiter")
      })))

  it.effect("is opened again, if a Redis that went back has forgotten it", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const make = (context: Node) => on(context, Latch.make({ name: "start", timeToLive }))
        const [one, two] = [yield* make(a!), yield* make(b!)]
        const key = `{${namespace}:00}:latch:start`
        yield* server.cli("COPY", key, `${key}:before`)
        yield* one.open
        yield* server.cli("RENAME", `${key}:before`, key)
        assert.isFalse(yield* two.isOpen)
        yield* lose(a!, namespace, server)
        yield* eventually(two.isOpen, { message: "it is open again" })
      })))

  it.effect("fails with a reason while Redis is away", () =>
    behindLine(({ context, line }) =>
      Effect.gen(function*() {
        const latch = yield* on(context, Latch.make({ name: "start", timeToLive }))
        yield* line.blackhole
        yield* assertUnanswered([latch.open, latch.close, latch.release, latch.isOpen])
        yield* line.pass
        yield* line.closeAll
        yield* eventually(latch.close.pipe(Effect.as(true)))
      })
    ))

  it.effect("waits when it was open and the session is lost, until Redis says that it still is", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const line = yield* proxy(server)
        const far = yield* node(line.url, {
          namespace,
          partitions: 1,
          lease: "1500 millis",
          requestTimeout: "500 millis"
        })
        const options = { name: "start", timeToLive } as const
        const [mine, theirs] = [yield* on(far, Latch.make(options)), yield* on(a!, Latch.make(options))]
        yield* theirs.open
        yield* mine.await
        for (const closes of [false, true]) {
          yield* line.blackhole
          yield* eventually(Effect.map(sessionsOf(far), ([session]) => session!.state === "opening"))
          const waiting = yield* Effect.forkChild(mine.await)
          yield* pending(waiting)
          if (closes) yield* theirs.close
          yield* line.pass
          yield* line.closeAll
          if (closes) {
            yield* eventually(Effect.map(mine.isOpen, (open) => !open))
            yield* pending(waiting)
            yield* theirs.open
          }
          yield* promptly(Fiber.join(waiting), "the waiter")
        }
      })))

  it.effect("has a lease of its own: a process that is cut off counts as having it for no longer", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const line = yield* proxy(server)
        const dying = yield* node(line.url, { namespace, partitions: 1, lease: "60 seconds", margin: "200 millis" })
        const former = yield* on(dying, Latch.make({ name: "start", timeToLive, lease: "1 second" }))
        yield* former.open
        const isOpenAnew = Effect.scoped(
          Effect.flatMap(on(a!, Latch.make({ name: "start", timeToLive, fresh: true })), (latch) => latch.isOpen)
        )
        assert.isTrue(yield* isOpenAnew)
        yield* line.blackhole
        yield* eventually(Effect.map(isOpenAnew, (open) => !open), { timeout: "5 seconds" })
        yield* line.pass
        yield* line.closeAll
      })))

  it.effect("is a typed service, as a latch is", () => {
    class Start extends Latch.Service<Start>()("start", { timeToLive }) {}
    class Ready extends CountDownLatch.Service<Ready>()("ready", { count: 1, timeToLive: Duration.millis(100) }) {}
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
