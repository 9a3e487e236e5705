/** Shared refs: one value, many processes; every write counts once, and every version is observed. */
import { assert, layer } from "@effect/vitest"
import {
  Cause,
  Deferred,
  Effect,
  Exit,
  Fiber,
  Option,
  pipe,
  Schema,
  SchemaGetter,
  Scope,
  Stream,
  SubscriptionRef,
  Tracer
} from "effect"
import { type Coordinator, Counter, Fence, Lock, SharedRef, Topic } from "../src/index.ts"
import { Linearizability } from "../src/testing.ts"
import { make as proxy, type Verdict } from "../src/testing/Proxy.ts"
import { elapsed } from "./support/awake.ts"
import { behindLine } from "./support/behindLine.ts"
import { eventually, realSleep } from "./support/eventually.ts"
import { interruptedAfter, interruptedAt } from "./support/interrupter.ts"
import { assertEmpty, freshNamespace, type Node, node, TestServer, withNode } from "./support/live.ts"
import { keysOf } from "./support/namespace.ts"
import { asks, fields } from "./support/requests.ts"
import {
  behind,
  channelOf,
  forgetSession,
  fragile,
  isPending,
  lose,
  missed,
  on,
  promptly,
  several
} from "./support/several.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

const hostile = "a\u0000}{:\n%s|\"✓"

const options = { schema: Schema.Number, initial: 0 } as const

const number = (name = "x", more: Partial<SharedRef.Options<number>> = {}) =>
  SharedRef.make({ ...options, ...more, name })

const on2 = (
  [a, b]: ReadonlyArray<Node>,
  make: Effect.Effect<SharedRef.SharedRef<number>, never, Coordinator.Coordinator>
) => Effect.all([on(a!, make), on(b!, make)])

/** All that a stream has had so far. */
const collecting = <A, E>(stream: Stream.Stream<A, E>) =>
  Effect.gen(function*() {
    const seen: Array<A> = []
    const fiber = yield* Effect.forkChild(Stream.runForEach(stream, (value) => Effect.sync(() => seen.push(value))))
    return { seen, fiber }
  })

const sees = <A>(seen: ReadonlyArray<A>, expected: ReadonlyArray<A>) =>
  eventually(Effect.sync(() => assert.deepStrictEqual(seen, expected)))

layer(TestServer.layer, live)("a shared ref", (it) => {
  it.effect("does what a SubscriptionRef does", () =>
    withNode(() =>
      Effect.gen(function*() {
        const ours = yield* number(hostile)
        const theirs = yield* SubscriptionRef.make(0)
        const both = <A>(
          one: Effect.Effect<A, SharedRef.SharedRefError>,
          other: Effect.Effect<A>
        ): Effect.Effect<void, SharedRef.SharedRefError> =>
          Effect.gen(function*() {
            assert.deepStrictEqual(yield* one, yield* other)
            assert.strictEqual(yield* ours.get, yield* SubscriptionRef.get(theirs))
          })
        const plus = (n: number) => (value: number) => value + n
        const pair = (value: number) => [`was ${value}`, value * 2] as const
        const some = (value: number) => value > 5 ? Option.some(value - 5) : Option.none<number>()
        for (let round = 0; round < 3; round++) {
          yield* both(ours.set(round), SubscriptionRef.set(theirs, round))
          yield* both(ours.update(plus(2)), SubscriptionRef.update(theirs, plus(2)))
          yield* both(ours.getAndSet(7), SubscriptionRef.getAndSet(theirs, 7))
          yield* both(ours.updateAndGet(plus(3)), SubscriptionRef.updateAndGet(theirs, plus(3)))
          yield* both(ours.getAndUpdate(plus(4)), SubscriptionRef.getAndUpdate(theirs, plus(4)))
          yield* both(ours.modify(pair), SubscriptionRef.modify(theirs, pair))
          yield* both(
            ours.updateEffect((value) => Effect.succeed(value + 1)),
            SubscriptionRef.updateEffect(theirs, (value) => Effect.succeed(value + 1))
          )
          yield* both(
            SharedRef.modifyEffect(ours, (value) => Effect.succeed(pair(value))),
            SubscriptionRef.modifyEffect(theirs, (value) => Effect.succeed(pair(value)))
          )
          for (let n = 0; n < 20; n++) {
            yield* both(SharedRef.updateSome(ours, some), SubscriptionRef.updateSome(theirs, some))
          }
          for (let n = 0; n < 9; n++) {
            const maybe = (value: number) => [value, some(value + n)] as const
            yield* both(pipe(ours, SharedRef.modifySome(maybe)), pipe(theirs, SubscriptionRef.modifySome(maybe)))
          }
          const next = (value: number) => Effect.succeed(value + 3)
          const someEffect = (value: number) => Effect.sync(() => some(value))
          yield* both(SharedRef.setAndGet(ours, 13), SubscriptionRef.setAndGet(theirs, 13))
          yield* both(SharedRef.updateAndGetEffect(ours, next), SubscriptionRef.updateAndGetEffect(theirs, next))
          yield* both(SharedRef.getAndUpdateEffect(ours, next), SubscriptionRef.getAndUpdateEffect(theirs, next))
          // Some of them find nothing to change.
          for (let n = 0; n < 3; n++) {
            yield* both(SharedRef.getAndUpdateSome(ours, some), SubscriptionRef.getAndUpdateSome(theirs, some))
            yield* both(SharedRef.updateSomeAndGet(ours, some), SubscriptionRef.updateSomeAndGet(theirs, some))
          }
          yield* both(SharedRef.set(ours, 22), SubscriptionRef.set(theirs, 22))
          for (let n = 0; n < 2; n++) {
            const maybe = (value: number) => Effect.map(someEffect(value), (next) => [`was ${value}`, next] as const)
            yield* both(
              SharedRef.updateSomeEffect(ours, someEffect),
              SubscriptionRef.updateSomeEffect(theirs, someEffect)
            )
            yield* both(
              SharedRef.getAndUpdateSomeEffect(ours, someEffect),
              SubscriptionRef.getAndUpdateSomeEffect(theirs, someEffect)
            )
            yield* both(
              SharedRef.updateSomeAndGetEffect(ours, someEffect),
              SubscriptionRef.updateSomeAndGetEffect(theirs, someEffect)
            )
            yield* both(
              pipe(ours, SharedRef.modifySomeEffect(maybe)),
              pipe(theirs, SubscriptionRef.modifySomeEffect(maybe))
            )
          }
          yield* both(pipe(ours, SharedRef.set(3)), pipe(theirs, SubscriptionRef.set(3)))
          yield* both(pipe(ours, SharedRef.update(plus(1))), pipe(theirs, SubscriptionRef.update(plus(1))))
          yield* both(SharedRef.get(ours), SubscriptionRef.get(theirs))
          yield* both(SharedRef.modify(ours, pair), SubscriptionRef.modify(theirs, pair))
          yield* both(SharedRef.getAndSet(ours, 1), SubscriptionRef.getAndSet(theirs, 1))
          yield* both(SharedRef.getAndUpdate(ours, plus(1)), SubscriptionRef.getAndUpdate(theirs, plus(1)))
          yield* both(SharedRef.updateAndGet(ours, plus(1)), SubscriptionRef.updateAndGet(theirs, plus(1)))
        }
        yield* ours.delete
      })
    ))

  it.effect("reads as its initial value while it is absent, and its versions only grow", () =>
    several(2, (nodes, namespace, server) =>
      Effect.gen(function*() {
        const [one, two] = yield* on2(nodes, number("x", { initial: 5 }))
        assert.deepStrictEqual(yield* one.versioned, { value: 5, version: 0 })
        assert.isFalse(yield* one.delete)
        assert.isTrue(yield* two.compareAndSet(0, 6))
        const first = yield* one.version
        assert.isAbove(first, 0)
        assert.isFalse(yield* one.compareAndSet(0, 7))
        assert.isFalse(yield* one.compareAndSet(first - 1, 7))
        assert.isTrue(yield* one.compareAndSet(first, 7))
        const second = yield* two.versioned
        assert.isAbove(second.version, first)
        assert.isTrue(yield* two.delete)
        assert.isFalse(yield* one.delete)
        assert.deepStrictEqual(yield* one.versioned, { value: 5, version: 0 })
        assert.strictEqual(yield* one.updateAndGet((value) => value + 1), 6)
        assert.isAbove(yield* two.version, second.version)
        assert.strictEqual(yield* two.get, 6)
        yield* one.delete
        const keys = yield* keysOf(server, namespace)
        assert.isFalse(keys.some((key) => key.includes("sharedRef")))
      })))

  it.effect("sends every subscriber the present value and then every version, in order", () =>
    several(2, (nodes, namespace, server) =>
      Effect.gen(function*() {
        const [one, two] = yield* on2(nodes, number())
        const early = yield* collecting(two.changes)
        const own = yield* collecting(one.versions())
        yield* sees(early.seen, [0])
        yield* sees(own.seen, [{ value: 0, version: 0, missed: 0 }])
        for (let n = 1; n <= 5; n++) yield* one.set(n)
        yield* two.update((n) => n + 1)
        yield* sees(early.seen, [0, 1, 2, 3, 4, 5, 6])
        const late = yield* collecting(two.changes)
        yield* sees(late.seen, [6])
        // One membership of each process, however many listen.
        assert.strictEqual(yield* fields(server, namespace, "sharedRef:x", "o"), 2)
        yield* one.delete
        yield* one.set(6)
        yield* sees(early.seen, [0, 1, 2, 3, 4, 5, 6, 0, 6])
        yield* sees(late.seen, [6, 0, 6])
        yield* sees(own.seen.map(({ value }) => value), [0, 1, 2, 3, 4, 5, 6, 0, 6])
        const versions = own.seen.map(({ version }) => version).filter((version) => version > 0)
        assert.deepStrictEqual(versions, [...versions].sort((a, b) => a - b))
        yield* Effect.forEach([early, late, own], ({ fiber }) => Fiber.interrupt(fiber))
        yield* eventually(Effect.map(fields(server, namespace, "sharedRef:x", "o"), (members) => members === 0))
        yield* one.delete
      })))

  it.effect("shows changes that are under way before what is asked anew", () =>
    behindLine(({ context, direct, line }) =>
      Effect.gen(function*() {
        const other = yield* direct()
        const theirs = { ref: yield* on(other, number()), counter: yield* on(other, Counter.make({ name: "x" })) }
        const ref = yield* collecting((yield* on(context, number())).changes)
        const counter = yield* collecting((yield* on(context, Counter.make({ name: "x" }))).changes)
        const see = (values: ReadonlyArray<number>) =>
          Effect.andThen(sees(ref.seen, values), sees(counter.seen, values))
        const change = (value: number) => Effect.andThen(theirs.ref.set(value), theirs.counter.add(1))
        yield* see([0])
        const held = yield* line.hold(({ name }) => name === "XREAD")
        yield* change(1)
        yield* promptly(held.request, "the next reading of the mailbox")
        yield* change(2)
        yield* change(3)
        missed(context)
        yield* on(context, Effect.asVoid(Lock.withLockIfAvailable(Effect.void, "asked later")))
        yield* held.release()
        yield* see([0, 1, 2, 3])
        yield* Fiber.interrupt(ref.fiber)
        yield* Fiber.interrupt(counter.fiber)
        yield* theirs.ref.delete
        yield* theirs.counter.reset
      })
    ))

  it.effect("shows a slow subscriber only the latest version, if it wants that", () =>
    several(2, (nodes) =>
      Effect.gen(function*() {
        const [one, two] = yield* on2(nodes, number())
        const gate = { open: false }
        const slowly = (stream: Stream.Stream<number, SharedRef.SharedRefError>) =>
          Stream.mapEffect(stream, (value) => eventually(Effect.sync(() => gate.open)).pipe(Effect.as(value)))
        const latest = yield* collecting(slowly(two.changesWith({ conflate: true })))
        const all = yield* collecting(slowly(two.changes))
        const heard = yield* collecting(two.changes)
        yield* sees(heard.seen, [0])
        const written = Array.from({ length: 50 }, (_, n) => n + 1)
        yield* Effect.forEach(written, (n) => one.set(n))
        yield* sees(heard.seen, [0, ...written])
        gate.open = true
        yield* sees(all.seen, [0, ...written])
        yield* eventually(Effect.sync(() => latest.seen.at(-1) === 50))
        assert.isAtMost(latest.seen.length, 3)
        yield* one.delete
      })))

  it.effect("reports to each subscriber how many versions it has missed because it was slow", () =>
    several(2, (nodes) =>
      Effect.gen(function*() {
        const [one, two] = yield* on2(nodes, number())
        const slowly = (stream: Stream.Stream<SharedRef.Change<number>, SharedRef.SharedRefError>) =>
          Effect.gen(function*() {
            const gate = yield* Deferred.make<void>()
            const { seen } = yield* collecting(Stream.tap(stream, () => Deferred.await(gate)))
            return { seen, open: Deferred.succeed(gate, undefined) }
          })
        const slow = yield* slowly(two.versions())
        const conflated = yield* slowly(two.versions({ conflate: true }))
        const last = 1500
        const heard = yield* collecting(two.versions())
        yield* sees(heard.seen, [{ value: 0, version: 0, missed: 0 }])
        yield* Effect.forEach(Array.from({ length: last }, (_, n) => n + 1), (n) => one.set(n), {
          concurrency: 100,
          discard: true
        })
        yield* eventually(Effect.sync(() => heard.seen.at(-1)?.value === last))
        assert.isTrue(heard.seen.every(({ missed }) => missed === 0))
        assert.isEmpty(slow.seen)
        yield* slow.open
        yield* conflated.open
        for (const { seen } of [slow, conflated]) {
          yield* eventually(Effect.sync(() => seen.at(-1)?.value === last))
          for (const [at, { missed, value }] of seen.entries()) {
            assert.strictEqual(missed, value - (seen[at - 1]?.value ?? -1) - 1)
          }
          assert.strictEqual(seen.reduce((sum, { missed }) => sum + missed, seen.length), last + 1)
        }
        // Later ones are seen in time.
        yield* one.set(last + 1)
        for (const { seen } of [slow, conflated]) {
          yield* eventually(Effect.sync(() => seen.at(-1)?.value === last + 1))
          assert.strictEqual(seen.at(-1)!.missed, 0)
        }
        assert.strictEqual(slow.seen.filter(({ missed }) => missed > 0).length, 1)
        yield* one.delete
      })))

  it.effect("counts no version that the session has not received", () =>
    several(2, (nodes, namespace, server) =>
      Effect.gen(function*() {
        const [one, two] = yield* on2(nodes, number())
        const { seen } = yield* collecting(two.versions())
        yield* eventually(Effect.sync(() => seen.length === 1))
        yield* forgetSession(nodes[1]!, namespace, server)
        for (const n of [1, 2, 3]) yield* one.set(n)
        yield* on(nodes[1]!, Lock.withLockIfAvailable(Effect.void, "to be told"))
        yield* eventually(Effect.sync(() => seen.at(-1)?.value === 3))
        assert.isTrue(seen.every(({ missed }) => missed === 0))
        yield* one.delete
      })))

  it.effect("is waited for without polling", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      yield* Effect.scoped(Effect.gen(function*() {
        const line = yield* proxy(server)
        const waiter = yield* on(yield* node(line.url, { namespace, partitions: 1 }), number())
        const writer = yield* on(yield* node(server.url, { namespace, partitions: 1 }), number())
        const waiting = yield* Effect.forkChild(waiter.until((n) => n > 2))
        const other = yield* Effect.forkChild(waiter.until((n): n is 7 => n === 7))
        yield* eventually(Effect.map(fields(server, namespace, "sharedRef:x", "o"), (members) => members === 1))
        yield* realSleep("50 millis")
        const before = line.counters.requests
        yield* realSleep("300 millis")
        assert.isAtMost(line.counters.requests - before, 2)
        yield* writer.set(1)
        yield* writer.set(2)
        assert.isTrue(isPending(waiting))
        // It is there for a moment only.
        yield* Effect.all([writer.set(3), writer.set(0)], { concurrency: "unbounded" })
        assert.strictEqual(yield* promptly(Fiber.join(waiting), "the first"), 3)
        assert.isTrue(isPending(other))
        yield* Fiber.interrupt(other)
        yield* eventually(Effect.map(fields(server, namespace, "sharedRef:x", "o"), (members) => members === 0))
        assert.strictEqual(yield* writer.until((n) => n === 0), 0)
        yield* writer.delete
      }))
      yield* assertEmpty(server, namespace)
    }))

  it.effect("is read from the cache without a round trip, and what this process has written is there at once", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      yield* Effect.scoped(Effect.gen(function*() {
        const line = yield* proxy(server)
        const ref = yield* on(yield* node(line.url, { namespace, partitions: 1 }), number())
        const other = yield* on(yield* node(server.url, { namespace, partitions: 1 }), number())
        yield* other.set(1)
        assert.strictEqual(yield* ref.cached, 1)
        yield* eventually(Effect.map(fields(server, namespace, "sharedRef:x", "o"), (members) => members === 1))
        yield* realSleep("50 millis")
        const before = line.counters.requests
        for (let n = 0; n < 10_000; n++) assert.strictEqual(yield* ref.cached, 1)
        assert.isAtMost(line.counters.requests - before, 2)
        yield* other.set(2)
        yield* eventually(Effect.map(ref.cached, (value) => value === 2))
        for (let n = 3; n < 50; n++) {
          if (n % 5 === 0) {
            yield* ref.delete
            assert.strictEqual(yield* ref.cached, 0)
          }
          yield* n % 3 === 0 ? ref.set(n) : ref.update(() => n)
          assert.strictEqual(yield* ref.cached, n)
          assert.strictEqual(yield* ref.cachedWithin("10 seconds"), n)
        }
        const requests = line.counters.of("GET")
        assert.strictEqual(yield* ref.cachedWithin(0.001), 49)
        assert.strictEqual(line.counters.of("GET"), requests + 1)
        yield* ref.delete
      }))
      yield* assertEmpty(server, namespace)
    }))

  it.effect("is never read from the cache when that is older than the lease, also if only events do not come", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      yield* Effect.scoped(Effect.gen(function*() {
        const line = yield* proxy(server)
        const settings = { namespace, partitions: 1, lease: "900 millis", margin: "100 millis" } as const
        const ref = yield* on(yield* node(line.url, settings), number())
        const other = yield* on(yield* node(server.url, { namespace, partitions: 1 }), number())
        yield* other.set(1)
        yield* eventually(Effect.map(ref.cached, (value) => value === 1))
        yield* eventually(Effect.sync(() => line.counters.of("XREAD") > 0))
        // Reads of the mailbox are never answered any more, however often its reader connects again.
        yield* line.onRequest((request) => request.name === "XREAD" ? "blackhole" : "pass")
        yield* realSleep("100 millis")
        for (let round = 2; round < 5; round++) {
          yield* other.set(round)
          const written = Date.now()
          while ((yield* ref.cached) !== round) yield* realSleep(5)
          assert.isBelow(elapsed(written), 900 + 100)
        }
        yield* line.onRequest(undefined)
        yield* line.closeAll
        yield* eventually(Effect.gen(function*() {
          const before = line.counters.of("GET")
          return (yield* ref.cached) === 4 && line.counters.of("GET") === before
        }))
        yield* other.delete
      }))
      yield* assertEmpty(server, namespace)
    }))

  it.effect("is not written by a holder that another one has followed, also after it was deleted", () =>
    several(2, (nodes, namespace, server) =>
      Effect.gen(function*() {
        const [one, two] = yield* on2(nodes, number())
        // As of processes that do not know yet.
        const lease = (name: string) =>
          Effect.map(
            Effect.scoped(on(nodes[0]!, Lock.acquire(name))),
            ({ key, kind, token }) => ({ key, kind, token })
          )
        const [former, later, another] = [yield* lease(hostile), yield* lease(hostile), yield* lease("another")]
        yield* one.setFenced(former, 1)
        yield* two.setFenced(later, 2)
        yield* two.setFenced(later, 3)
        const refused = (yield* Effect.flip(one.setFenced(former, 4))).reason
        assert.deepInclude(refused, { _tag: "StaleToken", token: former.token, seen: later.token })
        assert.include(refused.message, "sharedRef")
        assert.strictEqual(yield* two.get, 3)
        yield* two.delete
        assert.strictEqual((yield* Effect.flip(two.setFenced(former, 5))).reason._tag, "StaleToken")
        assert.deepStrictEqual(yield* one.versioned, { value: 0, version: 0 })
        // Tokens of another lock say nothing.
        yield* one.setFenced({ kind: another.kind, key: another.key, token: 1 }, 6)
        assert.strictEqual(yield* two.get, 6)
        yield* two.delete
        // A holder of long ago keeps its right for a day after its last write, no matter how many other leases write.
        const day = 86_400_000_000
        const [older, holder] = [2, 1].map((days) => ({
          kind: "lock" as const,
          key: "leader",
          token: later.token - days * day - 1
        }))
        yield* one.setFenced(holder!, 7)
        for (let at = 0; at < 300; at++) {
          yield* one.setFenced({ kind: "lock", key: `other ${at}`, token: later.token }, 7)
        }
        assert.strictEqual((yield* Effect.flip(one.setFenced(older!, 8))).reason._tag, "StaleToken")
        yield* two.delete
        // What remains says which leases may not write, for a day.
        const key = `{${namespace}:00}:sharedRef:x`
        const left = Number(yield* server.cli("PTTL", key))
        assert.isTrue(left > 86_000_000 && left <= 86_400_000, `${left}`)
        yield* server.cli("DEL", key)
      })))

  it.effect("is not written under a lease that is released while the write waits for a connection", () =>
    behindLine(({ context, line, namespace, server }) =>
      Effect.gen(function*() {
        const ref = yield* on(context, number())
        const scope = yield* Scope.make()
        const lease = yield* on(context, Scope.provide(Lock.acquire("x"), scope))
        yield* ref.setFenced(lease, 1)
        yield* Effect.andThen(line.refuse, line.closeAll)
        const writing = yield* Effect.forkChild(Effect.flip(ref.setFenced(lease, 2)), { startImmediately: true })
        const closing = yield* Effect.forkChild(Scope.close(scope, Exit.void), { startImmediately: true })
        yield* eventually(Effect.map(lease.isHeld, (held) => !held))
        yield* line.pass
        assert.strictEqual((yield* Fiber.join(writing)).reason._tag, "StaleToken")
        yield* Fiber.join(closing)
        assert.strictEqual(yield* ref.get, 1)
        yield* ref.delete
        // What says which leases may write.
        yield* server.cli("DEL", `{${namespace}:00}:sharedRef:x`)
      }), { lease: "30 seconds", requestTimeout: "10 seconds" }))

  it.effect("does not execute later what was interrupted before it was sent", () =>
    behindLine(({ context, line, namespace, server }) =>
      Effect.gen(function*() {
        const ref = yield* on(context, number())
        const counter = yield* on(context, Counter.make({ name: "x" }))
        const guarded = `${namespace}:guarded`
        const fenced = on(context, Fence.run({ token: 1 }, guarded, "SET", "2"))
        yield* ref.set(1)
        yield* Effect.andThen(line.refuse, line.closeAll)
        for (const write of [ref.set(2), counter.add(2), fenced] as ReadonlyArray<Effect.Effect<unknown, unknown>>) {
          const writing = yield* Effect.forkChild(write, { startImmediately: true })
          assert.isTrue(isPending(writing))
          yield* Fiber.interrupt(writing)
        }
        yield* line.pass
        yield* eventually(Effect.map(Effect.option(ref.get), Option.isSome))
        // Behind whatever waited.
        assert.strictEqual(yield* counter.add(1), 1)
        assert.strictEqual(yield* ref.get, 1)
        assert.strictEqual(yield* server.cli("GET", guarded), "")
        yield* Effect.all([ref.delete, counter.reset])
      }), { lease: "30 seconds" }))

  it.effect("begins with the present value, also where its process has not heard of that yet", () =>
    behindLine(({ context, direct, line }) =>
      Effect.gen(function*() {
        const other = yield* direct()
        const [ref, theirs] = [yield* on(context, number()), yield* on(other, number())]
        const counters = yield* Effect.forEach([context, other], (node) => on(node, Counter.make({ name: "x" })))
        yield* Effect.forkScoped(Stream.runDrain(ref.changes))
        yield* Effect.forkScoped(Stream.runDrain(counters[0]!.changes))
        yield* theirs.set(1)
        yield* promptly(ref.until((value) => value === 1), "the first value")
        const reading = yield* line.hold(({ name }) => name === "XREAD")
        yield* theirs.set(2)
        yield* reading.request
        yield* theirs.set(3)
        assert.strictEqual(yield* counters[1]!.add(4), 4)
        assert.deepStrictEqual(yield* Stream.runHead(ref.changes), Option.some(3))
        assert.deepStrictEqual(yield* Stream.runHead(counters[0]!.changes), Option.some(4))
        const { reason } = yield* Effect.flip(ref.until((value) => value === 1, { wait: "10 millis" }))
        assert.strictEqual(reason._tag, "WaitTimeout")
        // It hears of later ones.
        const later = yield* Effect.forkChild(ref.until((value) => value === 5))
        yield* reading.release()
        yield* theirs.set(5)
        yield* promptly(Fiber.join(later), "a later value")
        yield* Effect.all([ref.delete, counters[0]!.reset])
      }), { lease: "30 seconds" }))

  it.effect("waits no longer than it has to while Redis hangs", () =>
    behindLine(({ context, line }) =>
      Effect.gen(function*() {
        const ref = yield* on(context, number())
        yield* line.blackhole
        const began = Date.now()
        yield* Effect.flip(ref.until((value) => value === 1, { wait: "100 millis" }))
        assert.isBelow(elapsed(began), 1000)
        yield* line.pass
      }), { lease: "30 seconds", requestTimeout: "3 seconds" }))

  it.effect("goes on with other updates when one ends the fiber that makes them", () =>
    withNode(() =>
      Effect.gen(function*() {
        const ref = yield* number()
        const interrupting = ref.update((value) => {
          Fiber.getCurrent()!.interruptUnsafe()
          return value + 10
        })
        const broken = ref.publishing((() => 5) as never).update((value) => value + 100)
        const one = ref.update((value) => value + 1)
        const exits = yield* Effect.forEach(
          [one, interrupting, one, broken, one],
          (update) => Effect.forkChild(Effect.exit(update), { startImmediately: true })
        ).pipe(Effect.flatMap((fibers) => promptly(Effect.forEach(fibers, Fiber.join), "all of them")))
        assert.deepStrictEqual(exits.map(Exit.isSuccess), [true, false, true, false, true])
        assert.strictEqual(yield* ref.get, 3)
        yield* ref.delete
      })
    ))

  it.effect("is not written under a lease that its process knows to be lost or released, and Redis is not asked", () =>
    behindLine(({ context, line, namespace, server }) =>
      Effect.gen(function*() {
        const ref = yield* on(context, number())
        const released = yield* Effect.scoped(Effect.gen(function*() {
          const lease = yield* on(context, Lock.acquire("x"))
          yield* ref.setFenced(lease, 1)
          return lease
        }))
        const lost = yield* on(context, Lock.acquire("x"))
        yield* lose(context, namespace, server)
        yield* eventually(Effect.map(lost.isHeld, (held) => !held))
        yield* Effect.andThen(line.refuse, line.closeAll)
        for (const lease of [released, lost]) {
          for (
            const write of [ref.setFenced(lease, 2), on(context, Fence.run(lease, `${namespace}:guarded`, "SET", "2"))]
          ) {
            const { reason } = yield* Effect.flip(
              write as Effect.Effect<void, SharedRef.SharedRefError | Fence.FenceError>
            )
            if (reason._tag !== "StaleToken") return assert.fail(reason.message)
            assert.deepStrictEqual([reason.token, reason.seen], [lease.token, undefined])
            assert.include(reason.message, "was lost or released")
          }
        }
        yield* line.pass
        yield* eventually(Effect.map(ref.get, (value) => value === 1))
        assert.strictEqual(yield* server.cli("GET", `${namespace}:guarded`), "")
        yield* ref.delete
        // What says which leases may write.
        yield* server.cli("DEL", `{${namespace}:00}:sharedRef:x`)
      })
    ))

  it.effect("changes with others in one go, or not at all", () =>
    several(3, (nodes) =>
      Effect.gen(function*() {
        const accounts = ["ann", "bob", "cy", "dee"]
        const family = SharedRef.family({ ...options, name: "accounts", colocate: "accounts" })
        const banks = yield* Effect.forEach(nodes, (context) => on(context, family))
        const all = (bank: SharedRef.Family<number>) => accounts.map(bank) as [SharedRef.SharedRef<number>]
        yield* SharedRef.transaction(all(banks[0]!), () => [undefined, [100, 100, 100, 100] as never])
        const versions = yield* Effect.forEach(all(banks[1]!), (ref) => ref.version)
        assert.strictEqual(new Set(versions).size, 1)

        const sums: Array<number> = []
        const total = (bank: SharedRef.Family<number>) =>
          SharedRef.transaction(
            all(bank),
            (values) => [(values as ReadonlyArray<number>).reduce((a, b) => a + b, 0), values]
          )
        let transfers = 0
        yield* Effect.forEach(banks, (bank, at) =>
          Effect.forEach([1, 2, 3], (part) =>
            Effect.gen(function*() {
              for (let n = 0; n < 15; n++) {
                const [from, to] = [accounts[(at + n) % 4]!, accounts[(at + n + part) % 4]!]
                const amount = 30 + n
                const done = yield* SharedRef.transaction(
                  [bank(from), bank(to)],
                  ([a, b]) => a < amount ? [false, [a, b]] : [true, [a - amount, b + amount]]
                )
                if (done) transfers++
                sums.push(yield* total(bank))
              }
            }), { concurrency: "unbounded" }), { concurrency: "unbounded" })
        assert.isAbove(transfers, 20)
        assert.deepStrictEqual([...new Set(sums)], [400])

        // What is returned as it was is not written.
        const [ann, bob] = [banks[0]!("ann"), banks[0]!("bob")]
        const before = yield* Effect.all([ann.version, bob.version])
        yield* SharedRef.transaction([ann, bob], ([a, b]) => [undefined, [a, b + 1]])
        const after = yield* Effect.all([ann.version, bob.version])
        assert.deepStrictEqual([after[0] === before[0], after[1] > before[1]], [true, true])
        yield* Effect.forEach(all(banks[0]!), (ref) => ref.delete)
      })))

  it.effect("takes part in a transaction only with refs of its place, once", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const make = (context: Node, name: string, colocate?: string) => on(context, number(name, { colocate }))
        const here = yield* make(a!, "x", "here")
        const range = <R>(effect: Effect.Effect<unknown, SharedRef.SharedRefError, R>) =>
          Effect.map(Effect.exit(effect), (exit) => {
            assert.isTrue(Exit.isFailure(exit) && Cause.squash(exit.cause) instanceof RangeError)
          })
        const nothing = (values: ReadonlyArray<number>) => [undefined, values] as never
        // All names are in one partition here, and it is an error all the same.
        yield* range(SharedRef.transaction([here, yield* make(a!, "y", "there")], nothing))
        yield* range(SharedRef.transaction([yield* make(a!, "x"), yield* make(a!, "y")], nothing))
        yield* range(SharedRef.transaction([here, yield* make(b!, "y", "here")], nothing))
        yield* range(SharedRef.transaction([here, yield* make(a!, "x", "here")], nothing))
        yield* range(SharedRef.transaction([here], () => [undefined, [] as never]))
        assert.strictEqual(yield* SharedRef.transaction([yield* make(a!, "x")], ([x]) => [x, [x]]), 0)
        const boom = yield* Effect.exit(SharedRef.transaction([here], () => {
          throw new Error("boom")
        }))
        assert.include(String(boom), "boom")
        yield* range(Effect.suspend(() => here.compareAndSet(-1, 1)))
        yield* range(on(a!, number("")))
        yield* range(on(a!, number("x", { timeToLive: 0 })))
        yield* range(on(a!, number("x", { colocate: "\ud800" })))
        yield* range(Effect.map(on(a!, SharedRef.family({ ...options, name: "f" })), (family) => family("")))
      })))

  it.effect("is not kept from others for long by an update that was paused in its turn", () =>
    behindLine(({ context, direct, line, namespace, server }) =>
      Effect.gen(function*() {
        const cut = yield* proxy(server)
        const ours = yield* on(context, number())
        const theirs = yield* on(yield* direct(), number())
        // Before, since the turn does not last.
        const third = yield* node(cut.url, {
          namespace,
          partitions: 1,
          lease: "4500 millis",
          requestTimeout: "800 millis"
        })
        const last = yield* on(third, number())
        yield* ours.set(1)
        let held = yield* line.hold(asks("sharedRef.update"))
        const late = yield* Effect.forkChild(ours.updateAndGet((value) => value + 100))
        for (const value of [2, 3]) {
          yield* promptly(held.request, "an update that comes too late")
          yield* theirs.set(value)
          const { release } = held
          held = yield* line.hold(asks("sharedRef.update"))
          yield* release()
        }
        yield* promptly(held.request, "the update in its turn")
        const waiting = yield* Effect.forkChild(Effect.flip(last.update((value) => value + 1)))
        const channel = channelOf(third)
        yield* eventually(Effect.sync(() => channel.tenant.isWaiting() && channel.outbox.pending === 0))
        yield* cut.blackhole
        // With the first heartbeat that is not answered: long before its session is lost.
        yield* promptly(Fiber.join(waiting), "the one that Redis does not answer any more")
        yield* cut.pass
        yield* cut.closeAll
        yield* eventually(Effect.isSuccess(last.set(3)))
        assert.strictEqual(yield* promptly(theirs.updateAndGet((value) => value + 1), "an update of another one"), 4)
        yield* held.release()
        assert.strictEqual(yield* promptly(Fiber.join(late), "the late one"), 104)
        yield* ours.delete
      }), { lease: "10 seconds" }))

  it.effect("is updated exactly as often as it is asked, by many at once, in few requests", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      yield* Effect.scoped(Effect.gen(function*() {
        const line = yield* proxy(server)
        const contexts = [
          yield* node(line.url, { namespace, partitions: 1 }),
          yield* node(server.url, { namespace, partitions: 1 }),
          yield* node(server.url, { namespace, partitions: 1 })
        ]
        const refs = yield* Effect.forEach(contexts, (context) => on(context, number()))
        const heard = yield* collecting(refs[1]!.changes)
        const results = yield* Effect.forEach(
          refs,
          (ref) =>
            Effect.forEach(Array.from({ length: 200 }), () => ref.updateAndGet((n) => n + 1), { concurrency: 20 }),
          {
            concurrency: "unbounded"
          }
        )
        assert.strictEqual(yield* refs[0]!.get, 600)
        assert.deepStrictEqual(results.flat().sort((a, b) => a - b), Array.from({ length: 600 }, (_, n) => n + 1))
        yield* eventually(Effect.sync(() => heard.seen.at(-1) === 600))
        assert.deepStrictEqual(heard.seen, [...heard.seen].sort((a, b) => a - b))
        const before = line.counters.of("FCALL")
        yield* Effect.forEach(Array.from({ length: 1000 }), () => refs[0]!.update((n) => n + 1), {
          concurrency: "unbounded"
        })
        assert.isBelow(line.counters.of("FCALL") - before, 10)
        assert.strictEqual(yield* refs[1]!.get, 1600)
        yield* refs[0]!.delete
      }))
      yield* assertEmpty(server, namespace)
    }))

  const accounts = SharedRef.family({ ...options, name: "accounts" })
  const makers = {
    "of a family": Effect.map(accounts, (family) => () => Effect.succeed(family("ann"))),
    "that is made again": Effect.succeed(() => number())
  }
  for (const [what, maker] of Object.entries(makers)) {
    it.effect(`${what} is read from the cache, and updated together with others, by each that names it`, () =>
      Effect.gen(function*() {
        const server = yield* TestServer
        const namespace = freshNamespace()
        yield* Effect.scoped(Effect.gen(function*() {
          const line = yield* proxy(server)
          const context = yield* node(line.url, { namespace, partitions: 1 })
          const name = yield* on(context, maker)
          const named = <A>(use: (ref: SharedRef.SharedRef<number>) => Effect.Effect<A, SharedRef.SharedRefError>) =>
            on(context, Effect.flatMap(Effect.suspend(name), use))
          yield* named((ref) => ref.set(1))
          yield* named(({ cached }) => cached)
          yield* eventually(Effect.gen(function*() {
            const before = line.counters.of("GET")
            return (yield* named(({ cached }) => cached)) === 1 && line.counters.of("GET") === before
          }))
          const [reads, writes] = [line.counters.of("GET"), line.counters.of("FCALL")]
          for (let n = 0; n < 100; n++) {
            assert.strictEqual(yield* named(({ cached }) => cached), 1)
            yield* Effect.promise(() => new Promise((resolve) => setImmediate(resolve)))
          }
          assert.isAtMost(line.counters.of("GET") - reads, 2)
          yield* Effect.forEach(Array.from({ length: 100 }), () => named((ref) => ref.update((n) => n + 1)), {
            concurrency: "unbounded"
          })
          assert.isBelow(line.counters.of("FCALL") - writes, 10)
          assert.strictEqual(yield* named(({ get }) => get), 101)
          yield* named((ref) => ref.delete)
        }))
        yield* assertEmpty(server, namespace)
      }))
  }

  it.effect("is updated once or not at all when the update is interrupted, and nothing stays behind", () =>
    several(2, (nodes, namespace, server) =>
      Effect.gen(function*() {
        const [ours, theirs] = yield* on2(nodes, number())
        // So that the updates have to wait for their turns.
        let others = 0
        const updating = yield* Effect.forkChild(
          Effect.forever(Effect.andThen(theirs.update((n) => n + 1000), Effect.sync(() => others++)))
        )
        let [confirmed, interrupted] = [0, 0]
        for (let attempt = 0; attempt < 300; attempt++) {
          const update = ours.update((n) => n + 1)
          const exit = attempt % 2 === 0
            ? yield* interruptedAfter(attempt % 20, update)
            : (yield* interruptedAt(1 + attempt % 5, update)).exit
          if (Exit.isSuccess(exit)) confirmed++
          else assert.isTrue(Cause.hasInterruptsOnly(exit.cause), String(exit))
          if (Exit.hasInterrupts(exit)) interrupted++
        }
        assert.isAbove(interrupted, 50)
        yield* Fiber.interrupt(updating)
        const found = yield* promptly(ours.updateAndGet((n) => n), "another update")
        assert.isTrue(found % 1000 >= confirmed && found % 1000 <= 300, `${found} ${confirmed}`)
        assert.isAtMost(Math.floor(found / 1000) - others, 1)
        // Neither a turn nor a wait for one.
        yield* eventually(
          Effect.map(server.cli("HKEYS", `{${namespace}:00}:sharedRef:x`), (left) => left.trim() === "")
        )
        yield* theirs.delete
      })))

  it.effect("does not report what a function has made of an outdated value", () =>
    several(2, (nodes) =>
      Effect.gen(function*() {
        const [one, two] = yield* on2(nodes, number("x", { colocate: "x" }))
        const refuse = (outdated: number) => (value: number): number => {
          if (value === outdated) throw new Error(`it is ${outdated}`)
          return value + 1
        }
        yield* one.set(1)
        yield* two.set(2)
        assert.strictEqual(yield* one.updateAndGet(refuse(1)), 3)
        yield* two.set(4)
        const answer = yield* SharedRef.transaction([one], ([value]) => [value, [refuse(3)(value)]])
        assert.strictEqual(answer, 4)
        // What it makes of the present value is a defect, and costs no other update anything.
        const [failed, fine] = yield* Effect.all(
          [Effect.exit(one.update(refuse(5))), one.updateAndGet((value) => value * 10)],
          { concurrency: "unbounded" }
        )
        assert.include(String(failed), "it is 5")
        assert.strictEqual(fine, 50)
        const invalid = yield* Effect.flip(
          one.update(() => "no" as never)
        )
        assert.strictEqual(invalid.reason._tag, "InvalidPayload")
        const thrown = yield* Effect.flip(one.updateEffect(() => Effect.fail("stop" as const)))
        assert.strictEqual(thrown, "stop")
        assert.strictEqual(yield* two.get, 50)
        // An effect runs again when it was overtaken.
        let runs = 0
        const overtaken = one.modifyEffect((value) =>
          Effect.gen(function*() {
            if (runs++ === 0) yield* two.set(60)
            return [value, value + 1] as const
          })
        )
        assert.deepStrictEqual([yield* overtaken, runs, yield* two.get], [60, 2, 61])
        yield* one.delete
      })))

  it.effect("says that its schema throws", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const thrown = (text: string) => () => {
          throw new Error(text)
        }
        const transformation = { decode: thrown("no decoding"), encode: thrown("no encoding") }
        const schema = Schema.String.pipe(Schema.decodeTo(Schema.String, {
          decode: SchemaGetter.transform(transformation.decode),
          encode: SchemaGetter.transform(transformation.encode)
        }))
        const ref = yield* on(a!, SharedRef.make({ name: "x", schema, initial: "none" }))
        const texts = yield* on(a!, SharedRef.make({ name: "x", schema: Schema.String, initial: "none" }))
        assert.include((yield* Effect.flip(ref.set("a"))).message, "no encoding")
        yield* texts.set("b")
        assert.include((yield* Effect.flip(ref.get)).message, "no decoding")
        yield* texts.delete
      })))

  it.effect("says what does not fit the schema, and whose it is", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const User = Schema.Struct({ name: Schema.String, since: Schema.DateTimeUtcFromString })
        const users = yield* on(a!, SharedRef.make({ name: "x", schema: Schema.UndefinedOr(User), initial: undefined }))
        const texts = yield* on(b!, SharedRef.make({ name: "x", schema: Schema.String, initial: "none" }))
        assert.strictEqual((yield* Effect.flip(users.set({ name: 1 } as never))).reason._tag, "InvalidPayload")
        assert.deepStrictEqual(yield* users.versioned, { value: undefined, version: 0 })
        for (const hard of ["", "a\u0000\r\n}\"\\", "é✓🙂", "x".repeat(100_000)]) {
          yield* texts.set(hard)
          assert.strictEqual(yield* texts.get, hard)
          assert.strictEqual(yield* texts.until((text) => text === hard), hard)
        }
        const reads: ReadonlyArray<Effect.Effect<unknown, SharedRef.SharedRefError>> = [
          users.get,
          users.cached,
          users.update((user) => user),
          users.until(() => true),
          Stream.runHead(users.changes)
        ]
        for (const reading of reads) {
          assert.strictEqual((yield* Effect.flip(reading)).reason._tag, "InvalidPayload")
        }
        // What cannot be read can be replaced, and what can be read again is updated again.
        const since = yield* Schema.decodeEffect(User)({ name: "ann", since: "2020-01-01T00:00:00Z" })
        assert.isTrue(yield* users.compareAndSet(yield* users.version, since))
        assert.deepStrictEqual(yield* users.updateAndGet((user) => ({ ...user!, name: "bob" })), {
          ...since,
          name: "bob"
        })
        yield* users.delete
      })))

  it.effect("is deleted after its time to live, which every write begins anew, and its subscribers observe it", () =>
    several(2, (nodes, namespace, server) =>
      Effect.gen(function*() {
        const [one, two] = yield* on2(nodes, number("x", { timeToLive: "1500 millis" }))
        const heard = yield* collecting(two.changes)
        yield* sees(heard.seen, [0])
        const from = performance.now()
        for (let n = 1; n <= 4; n++) {
          yield* one.update((value) => value + 1)
          yield* realSleep("450 millis")
        }
        assert.isAbove(performance.now() - from, 1700)
        assert.strictEqual(yield* two.get, 4)
        yield* sees(heard.seen, [0, 1, 2, 3, 4, 0])
        assert.strictEqual(yield* two.get, 0)
        assert.strictEqual(yield* eventually(Effect.map(two.cached, (value) => value === 0 && 1)), 1)
        yield* Fiber.interrupt(heard.fiber)
        // Without a time to live it stays.
        const kept = yield* on(nodes[0]!, number())
        yield* kept.set(1)
        const key = (yield* keysOf(server, namespace)).find((key) => key.includes("sharedRef-value"))
        assert.strictEqual(yield* server.cli("PTTL", key!), "-1")
        yield* kept.delete
      })))

  it.effect("fails, and answers no value, where others have written", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const ref = yield* on(a!, number())
        yield* ref.set(1)
        const key = (yield* keysOf(server, namespace)).find((key) => key.includes("sharedRef-value"))!
        for (const foreign of ["", "5", "abc", "2 0 {", "x 0 1"]) {
          yield* server.cli("SET", key, foreign)
          for (const read of [ref.get, ref.version]) {
            if (foreign === "2 0 {" && read === ref.version) continue
            assert.deepInclude((yield* Effect.flip(read)).reason, { _tag: "ActorDefect", kind: "sharedRef" })
          }
        }
        yield* server.cli("SET", key, "3 0 3")
        assert.strictEqual(yield* ref.get, 3)
        yield* ref.delete
      })))

  it.effect("goes on with the latest version after its session was lost, and after Redis has lost its data", () =>
    several(2, (nodes, namespace, server) =>
      Effect.gen(function*() {
        const [one, two] = yield* on2(nodes, number())
        yield* one.set(1)
        const heard = yield* collecting(two.changes)
        const waiting = yield* Effect.forkChild(two.until((value) => value === 9))
        yield* sees(heard.seen, [1])
        yield* lose(nodes[1]!, namespace, server)
        yield* one.set(2)
        yield* sees(heard.seen, [1, 2])
        yield* forgetSession(nodes[1]!, namespace, server)
        for (const n of [3, 4, 5]) yield* one.set(n)
        yield* lose(nodes[1]!, namespace, server).pipe(Effect.ignore)
        yield* eventually(Effect.sync(() => heard.seen.at(-1) === 5))
        yield* server.cli("FLUSHALL")
        yield* eventually(Effect.sync(() => heard.seen.at(-1) === 0))
        yield* eventually(one.set(9))
        assert.strictEqual(yield* promptly(Fiber.join(waiting), "the wait"), 9)
        yield* eventually(Effect.map(two.cached, (value) => value === 9))
        yield* one.delete
      })))

  it.effect("says that a write is uncertain when the session was lost on the way, and does not repeat it", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const direct = yield* on(a!, number("x", { colocate: "x" }))
        const line = yield* proxy(server)
        const context = yield* behind(line, namespace)
        const ref = yield* on(context, number("x", { colocate: "x" }))
        yield* ref.set(1)
        const writes: Record<string, Effect.Effect<unknown, SharedRef.SharedRefError>> = {
          set: ref.set(7),
          update: ref.update((value) => value + 6),
          compareAndSet: Effect.flatMap(ref.versioned, ({ version }) => ref.compareAndSet(version, 7)),
          commit: SharedRef.transaction([ref], ([value]) => [undefined, [value + 6]])
        }
        for (const [executed, verdict] of [[true, "dropReply"], [false, "drop"]] as const) {
          for (const [verb, write] of Object.entries(writes)) {
            yield* direct.set(1)
            yield* ref.get
            yield* line.once(asks(`sharedRef.${verb}`), verdict)
            const again = yield* line.hold(asks(`sharedRef.${verb}`))
            const uncertain = yield* Effect.forkChild(Effect.flip(write))
            yield* promptly(again.request, "it is sent again")
            yield* forgetSession(context, namespace, server)
            yield* again.release()
            const { reason } = yield* promptly(Fiber.join(uncertain), "the uncertain one")
            assert.deepInclude(reason, { _tag: "WriteUncertain", kind: "sharedRef", name: "x", namespace })
            assert.strictEqual(yield* direct.get, executed ? 7 : 1, `${verb}, ${verdict}`)
          }
        }
        yield* direct.delete
      })))

  it.effect("is read once for all that read it in one turn, with any fault on the way", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      yield* Effect.scoped(Effect.gen(function*() {
        const line = yield* proxy(server)
        const context = yield* node(line.url, { namespace, partitions: 1, requestTimeout: "300 millis" })
        const direct = yield* node(server.url, { namespace, partitions: 1 })
        const refs = yield* Effect.forEach(["x", "y", hostile], (name) => on(context, number(name)))
        const theirs = yield* Effect.forEach(["x", "y", hostile], (name) => on(direct, number(name)))
        yield* Effect.forEach(theirs, (ref, at) => ref.set(at + 1))
        const readAll = Effect.forEach([...refs, ...refs, ...refs], (ref) => ref.get, { concurrency: "unbounded" })
        assert.deepStrictEqual(yield* readAll, [1, 2, 3, 1, 2, 3, 1, 2, 3])
        assert.deepStrictEqual([line.counters.of("MGET"), line.counters.of("GET")], [1, 0])
        const verdicts: ReadonlyArray<Verdict> = ["dropReply", "drop", "duplicate", "blackhole", "blackholeReply"]
        for (const verdict of verdicts) {
          for (const [command, reading] of [["GET", refs[0]!.get], ["MGET", readAll]] as const) {
            const met = yield* line.once((request) => request.name === command, verdict)
            const asked = Effect.match(reading as Effect.Effect<unknown, SharedRef.SharedRefError>, {
              onFailure: ({ reason }) => reason._tag as string,
              onSuccess: () => "read"
            })
            const answer = yield* promptly(asked, verdict)
            yield* promptly(met, command)
            // The connection may be given up for another of its commands first, and not be back in time.
            const expected = verdict.startsWith("blackhole") ? ["Timeout", "ConnectionLost", "NotConnected"] : ["read"]
            assert.include(expected, answer, `${command}, ${verdict}`)
            yield* eventually(Effect.map(asked, (answer) => answer === "read"))
          }
        }
        // What was written is read, by any process.
        for (let n = 10; n < 60; n++) {
          yield* theirs[0]!.set(n)
          assert.strictEqual(yield* refs[0]!.get, n)
        }
        yield* Effect.forEach(theirs, (ref) => ref.delete)
      }))
      yield* assertEmpty(server, namespace)
    }))

  it.effect("fails with a reason while Redis is away and when the coordinator is closed, and subscribers wait on", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const direct = yield* on(a!, number())
        const line = yield* proxy(server)
        const { ended, ref: closed } = yield* Effect.scoped(Effect.gen(function*() {
          const ref = yield* on(yield* fragile(server, line, namespace, 1), number())
          yield* ref.set(1)
          const heard = yield* collecting(ref.changes)
          const ended = yield* Effect.forkDetach(Effect.flip(Stream.runDrain(ref.changes)))
          yield* sees(heard.seen, [1])
          yield* line.blackhole
          const questions: ReadonlyArray<Effect.Effect<unknown, SharedRef.SharedRefError>> = [
            ref.get,
            ref.version,
            ref.cachedWithin(0.001),
            ref.set(2),
            ref.getAndSet(2),
            ref.update((value) => value + 1),
            ref.compareAndSet(1, 1),
            ref.delete,
            SharedRef.transaction([ref], ([value]) => [value, [value + 1]])
          ]
          const errors = yield* promptly(
            Effect.forEach(questions, Effect.flip, { concurrency: "unbounded" }),
            "the questions"
          )
          for (const { reason } of errors) {
            assert.include(["Timeout", "ConnectionLost", "NotConnected", "WriteUncertain"], reason._tag)
          }
          yield* direct.set(5)
          yield* line.pass
          yield* line.closeAll
          yield* eventually(ref.set(6))
          yield* eventually(Effect.sync(() => heard.seen.at(-1) === 6))
          return { ended, ref }
        }))
        assert.strictEqual((yield* promptly(Fiber.join(ended), "the end")).reason._tag, "CoordinatorClosed")
        for (const late of [closed.get, closed.set(1), closed.cached, closed.until(() => true)]) {
          const { reason } = yield* Effect.flip<unknown, SharedRef.SharedRefError, never>(late)
          assert.strictEqual(reason._tag, "CoordinatorClosed")
        }
        yield* direct.delete
      })))

  it.effect("forgets a subscriber whose process has died", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const direct = yield* on(a!, number("x", { timeToLive: "1 minute" }))
        const heard = yield* collecting(direct.changes)
        const line = yield* proxy(server)
        const dying = yield* on(yield* fragile(server, line, namespace, 1), number("x", { timeToLive: "1 minute" }))
        yield* Effect.forkChild(Effect.ignore(Stream.runDrain(dying.changes)))
        yield* eventually(Effect.map(fields(server, namespace, "sharedRef:x", "o"), (members) => members === 2))
        yield* line.blackhole
        yield* eventually(Effect.map(fields(server, namespace, "sharedRef:x", "o"), (members) => members === 1))
        yield* direct.set(1)
        yield* sees(heard.seen, [0, 1])
        yield* direct.delete
        // With its last member, the ref is not to be woken any more.
        yield* Fiber.interrupt(heard.fiber)
      })))

  it.effect("is a typed service, and so is a family", () => {
    class Progress extends SharedRef.Service<Progress>()("progress", options) {}
    class Users extends SharedRef.FamilyService<Users>()("us/er%s", { ...options, colocate: (key) => key[0]! }) {}
    return withNode(() =>
      Effect.gen(function*() {
        const progress = yield* Progress
        assert.strictEqual(progress.name, "progress")
        assert.strictEqual(yield* progress.updateAndGet((n) => n + 1), 1)
        const users = yield* Users
        yield* SharedRef.transaction([users("ann"), users("a/b")], ([a, b]) => [undefined, [a + 1, b + 2]])
        assert.strictEqual(users("ann").name, "us%2Fer%25s/ann")
        assert.deepStrictEqual([yield* users("ann").get, yield* users("a/b").get], [1, 2])
        const alone = yield* number("us%2Fer%25s/ann", { colocate: "a" })
        assert.strictEqual(yield* alone.get, 1)
        yield* Effect.forEach([progress, users("ann"), users("a/b")], (ref) => ref.delete)
      }).pipe(Effect.provide(Progress.layer), Effect.provide(Users.layer))
    )
  })
})

// ---------------------------------------------------------------------------------------------------------------------
// Linearizability
// ---------------------------------------------------------------------------------------------------------------------

/** Every write has a value of its own, so a value says which write is meant. */
type Input =
  | { readonly op: "get"; readonly seen: number }
  | { readonly op: "write"; readonly value: number; readonly former?: number | undefined }
  | { readonly op: "swap"; readonly expected: number; readonly value: number; readonly done?: boolean | undefined }

const register: Linearizability.Model<number, Input> = {
  initial: 0,
  step: (state, input) => {
    switch (input.op) {
      case "get":
        return input.seen === state ? state : undefined
      case "write":
        return input.former === undefined || input.former === state ? input.value : undefined
      case "swap": {
        const fits = input.expected === state
        return input.done !== undefined && input.done !== fits ? undefined : fits ? input.value : state
      }
    }
  }
}

/** A topic beside what is named `x`, and its events so far. */
const beside = Effect.gen(function*() {
  const topic = yield* Topic.make({ name: "events", schema: Schema.Number, colocate: "x" })
  yield* Effect.addFinalizer(() => Effect.orDie(topic.purge))
  const events = Effect.flatMap(topic.state, ({ length }) =>
    Effect.map(
      Stream.runCollect(Stream.take(topic.subscribe({ from: "beginning" }), length)),
      (all) => all.map((element) => element._tag === "Event" ? element.value : Number.NaN)
    ))
  const publish = (value: number) => Effect.orDie(topic.publication(value))
  return { topic, events, publish }
})

layer(TestServer.layer, live)("a shared ref that publishes", (it) => {
  it.effect("publishes with every write that is made, and with no other", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const { events, publish, topic } = yield* on(a!, beside)
        const plain = yield* on(a!, number("x", { colocate: "x" }))
        const other = yield* on(a!, number("y", { colocate: "x" }))
        const ref = plain.publishing(publish)
        yield* ref.set(1)
        yield* ref.getAndSet(2)
        yield* ref.update((n) => n + 1)
        yield* ref.updateAndGet((n) => n + 1)
        yield* ref.getAndUpdate((n) => n + 1)
        yield* ref.modify((n) => ["", n + 1])
        yield* ref.updateEffect((n) => Effect.succeed(n + 1))
        yield* ref.modifyEffect((n) => Effect.succeed(["", n + 1]))
        yield* SharedRef.updateSome(ref, (n) => Option.some(n + 1))
        yield* SharedRef.updateSome(ref, () => Option.none())
        yield* Effect.exit(ref.update(() => "ten" as never))
        yield* Effect.exit(ref.set("ten" as never))
        assert.isTrue(yield* Effect.flatMap(ref.versioned, ({ version }) => ref.compareAndSet(version, 10)))
        assert.isFalse(yield* ref.compareAndSet(1, 77))
        const owner = { key: "owner", kind: "lock" } as const
        const [early, late] = [{ ...owner, token: 1 }, { ...owner, token: 2 }]
        yield* ref.setFenced(late, 11)
        yield* Effect.flip(ref.setFenced(early, 77))
        yield* SharedRef.transaction([ref, other.publishing(publish)], ([x]) => ["", [x + 1, 13]])
        yield* SharedRef.transaction([ref, other.publishing(publish)], ([x, y]) => ["", [x + 2, y]])
        yield* SharedRef.transaction([ref, other], ([x, y]) => ["", [x, y + 2]])
        // Several ones, in the order in which they were named; a deleted ref reads as its initial value.
        const both = ref.publishing([yield* topic.publication(100), yield* topic.publication(101)])
        yield* both.set(20)
        assert.isTrue(yield* ref.delete)
        assert.isFalse(yield* ref.delete)
        yield* plain.set(77)
        yield* ref.set(21)
        assert.deepStrictEqual(yield* on(a!, events), [
          ...[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14],
          ...[20, 100, 101, 0, 21]
        ])
        // Events that cannot be published have nothing written; other updates of the turn are.
        const far = yield* on(a!, Topic.make({ name: "far", schema: Schema.Number, colocate: "x", lease: "1 second" }))
        const lost = ref.publishing(yield* far.publication(1))
        const exits = yield* Effect.forEach(
          [lost.update((n) => n + 50), ref.update((n) => n + 1), lost.set(77), lost.delete],
          (write) => Effect.exit(write as Effect.Effect<unknown, SharedRef.SharedRefError>),
          { concurrency: "unbounded" }
        )
        assert.deepStrictEqual(exits.map(Exit.isSuccess), [false, true, false, false])
        for (const exit of exits.filter(Exit.isFailure)) assert.include(String(exit.cause), "RangeError")
        assert.strictEqual(yield* ref.get, 22)
        assert.strictEqual((yield* on(a!, events)).at(-1), 22)
        yield* Effect.all([plain.delete, other.delete])
        // What says which leases may write.
        yield* server.cli("DEL", `{${namespace}:00}:sharedRef:x`)
      })))

  it.effect("publishes within the span of each write", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const { publish, topic } = yield* on(a!, beside)
        const plain = yield* on(a!, number("x"))
        const ref = plain.publishing(publish)
        const tracer = Tracer.make({ span: (options) => new Tracer.NativeSpan(options) })
        const spans: Array<string> = []
        const traced = <A, E>(write: Effect.Effect<A, E>) =>
          Effect.andThen(Effect.map(Effect.currentSpan, ({ traceId }) => spans.push(traceId)), write).pipe(
            Effect.withSpan("write", { root: true }),
            Effect.provideService(Tracer.Tracer, tracer)
          )
        yield* traced(ref.set(1))
        // These meet, and are one write.
        yield* Effect.all([traced(ref.update((n) => n + 1)), traced(ref.modify((n) => ["", n + 1]))], {
          concurrency: "unbounded"
        })
        yield* traced(ref.updateEffect((n) => Effect.succeed(n + 1)))
        yield* traced(SharedRef.transaction([ref], ([n]) => ["", [n + 1]]))
        const events = yield* Stream.runCollect(Stream.take(topic.subscribe({ from: "beginning" }), 5))
        assert.deepStrictEqual(
          events.map((event) => event._tag === "Event" && event.trace?.split("-")[1]),
          spans
        )
        yield* plain.delete
      })))

  it.effect("is not deleted, nor a counter reset, while Redis has no memory for the event", () =>
    several(1, ([a], _, server) =>
      Effect.gen(function*() {
        const { events, publish, topic } = yield* on(a!, beside)
        const ref = (yield* on(a!, number("x"))).publishing(publish)
        const counter = yield* on(a!, Counter.make({ name: "x" }))
        const counting = counter.publishing(yield* topic.publication(7))
        yield* ref.set(1)
        yield* counter.add(1)
        const removals = [ref.delete, counting.reset] as ReadonlyArray<
          Effect.Effect<unknown, SharedRef.SharedRefError | Counter.CounterError>
        >
        yield* server.cli("CONFIG", "SET", "maxmemory", 1)
        const errors = yield* Effect.forEach(removals, (removal) => Effect.flip(removal)).pipe(
          Effect.ensuring(Effect.orDie(server.cli("CONFIG", "SET", "maxmemory", 0)))
        )
        assert.deepStrictEqual(errors.map(({ reason }) => reason._tag), ["OutOfMemory", "OutOfMemory"])
        assert.deepStrictEqual([yield* ref.get, yield* counter.get, yield* on(a!, events)], [1, 1, [1]])
        yield* eventually(Effect.all(removals))
        assert.deepStrictEqual(yield* on(a!, events), [1, 0, 7])
        // Nothing is reset, so nothing is published.
        assert.strictEqual(yield* counting.reset, 0)
        assert.deepStrictEqual(yield* on(a!, events), [1, 0, 7])
      })))

  it.effect("publishes each value of many writers once, in the order of the writes", () =>
    several(3, (nodes) =>
      Effect.gen(function*() {
        const [each, total] = [60, 3 * 4 * 60]
        const { events } = yield* on(nodes[0]!, beside)
        yield* Effect.forEach(nodes, (context) =>
          Effect.gen(function*() {
            const { publish } = yield* on(context, beside)
            const ref = (yield* on(context, number("x"))).publishing(publish)
            const tries: ReadonlyArray<Effect.Effect<unknown, SharedRef.SharedRefError>> = [
              ref.update((n) => n + 1),
              ref.updateEffect((n) => Effect.succeed(n + 1)),
              Effect.repeat(
                Effect.flatMap(ref.versioned, ({ value, version }) => ref.compareAndSet(version, value + 1)),
                { until: (done) => done }
              ),
              SharedRef.transaction([ref], ([n]) => [undefined, [n + 1]])
            ]
            yield* Effect.forEach(tries, (one) => Effect.repeat(one, { times: each - 1 }), { concurrency: "unbounded" })
          }), { concurrency: "unbounded" })
        assert.deepStrictEqual(yield* on(nodes[0]!, events), Array.from({ length: total }, (_, at) => at + 1))
        const ref = yield* on(nodes[0]!, number("x"))
        assert.strictEqual(yield* ref.get, total)
        yield* ref.delete
      })))

  it.effect("publishes if its write is made, also when the reply or the session is lost", () =>
    behindLine(({ context, direct, line, namespace, server }) =>
      Effect.gen(function*() {
        const their = yield* direct()
        const { events } = yield* on(their, beside)
        const plain = yield* on(their, number("x"))
        const { publish } = yield* on(context, beside)
        const ref = (yield* on(context, number("x"))).publishing(publish)
        const counter = yield* on(context, Counter.make({ name: "x" }))
        const { topic } = yield* on(context, beside)
        const counting = counter.publishing(yield* topic.publication(7))
        yield* counter.add(1)
        const writes: ReadonlyArray<[verb: string, write: Effect.Effect<unknown, unknown>, event: number]> = [
          ["sharedRef.set", ref.set(7), 7],
          ["sharedRef.set", ref.getAndSet(7), 7],
          ["sharedRef.update", ref.update((value) => value + 6), 7],
          ["sharedRef.commit", SharedRef.transaction([ref], ([value]) => [undefined, [value + 6]]), 7],
          ["sharedRef.delete", ref.delete, 0],
          ["counter.add", counting.add(1), 7],
          ["counter.reset", counting.reset, 7]
        ]
        const expected: Array<number> = []
        for (const verdict of ["dropReply", "drop"] as const) {
          for (const losing of [false, true]) {
            for (const [verb, write, event] of writes) {
              yield* plain.set(1)
              yield* counter.add(1)
              yield* ref.get
              yield* line.once(asks(verb), verdict)
              const again = yield* line.hold(asks(verb))
              const writing = yield* Effect.forkChild(Effect.exit(write))
              yield* promptly(again.request, "it is sent again")
              if (losing) yield* forgetSession(context, namespace, server)
              yield* again.release()
              const exit = yield* promptly(Fiber.join(writing), "the write")
              assert.strictEqual(Exit.isSuccess(exit), !losing, `${verb}, ${verdict}, ${String(exit)}`)
              if (!losing || verdict === "dropReply") expected.push(event)
              assert.deepStrictEqual(yield* on(their, events), expected, `${verb}, ${verdict}, ${losing}`)
            }
          }
        }
        yield* Effect.all([plain.delete, counter.reset])
      }), { lease: "6 seconds", requestTimeout: "2 seconds" }))

  it.effect("publishes nothing for a write that was lost with its session, though another write follows at once", () =>
    behindLine(({ context, direct, line, namespace, server }) =>
      Effect.gen(function*() {
        const their = yield* direct()
        const { events } = yield* on(their, beside)
        const { publish } = yield* on(context, beside)
        const plain = yield* on(context, number("x"))
        const ref = plain.publishing(publish)
        yield* ref.set(1)
        yield* line.once(asks("sharedRef.set"), "drop")
        const again = yield* line.hold(asks("sharedRef.set"))
        const writing = yield* Effect.forkChild(ref.set(2).pipe(Effect.catch(() => ref.set(3))))
        yield* promptly(again.request, "it is sent again")
        yield* forgetSession(context, namespace, server)
        yield* again.release()
        yield* promptly(Fiber.join(writing), "the second write")
        yield* ref.set(4)
        assert.deepStrictEqual(yield* on(their, events), [1, 3, 4])
        yield* plain.delete
      }), { lease: "6 seconds", requestTimeout: "2 seconds" }))
})

layer(TestServer.layer, live)("the history of a shared ref", (it) => {
  for (const losing of [false, true]) {
    it.effect(`is linearizable while connections are cut and replies lost${losing ? ", and sessions with them" : ""}`, () =>
      Effect.gen(function*() {
        const server = yield* TestServer
        const namespace = freshNamespace()
        const history: Array<Linearizability.Operation<Input>> = []
        let unique = 0
        let uncertain = 0
        const settings = { namespace, partitions: 1, lease: "10 seconds", requestTimeout: "400 millis" } as const
        yield* Effect.scoped(Effect.gen(function*() {
          const parties = yield* Effect.forEach([0, 1, 2], () =>
            Effect.gen(function*() {
              const line = yield* proxy(server)
              const context = yield* node(line.url, settings)
              return { line, context, ref: yield* on(context, number()) }
            }))
          let over = false
          const faults = yield* Effect.forkChild(Effect.gen(function*() {
            for (let round = 0; !over; round++) {
              const { context, line } = parties[round % 3]!
              yield* realSleep(15 + 35 * Math.random())
              switch (Math.floor(Math.random() * (losing ? 4 : 3))) {
                case 0:
                  yield* line.closeAll
                  break
                case 1:
                  yield* line.once((request) => request.name === "FCALL" || request.name === "GET", "dropReply")
                  break
                case 2:
                  yield* line.dropReplies
                  yield* realSleep(10)
                  yield* line.pass
                  yield* line.closeAll
                  break
                case 3:
                  yield* Effect.ignore(forgetSession(context, namespace, server))
              }
            }
          }))
          const recorded = <A>(
            effect: Effect.Effect<A, SharedRef.SharedRefError>,
            inputOf: (answer: A | undefined) => Input | undefined
          ) =>
            Effect.gen(function*() {
              const start = performance.now()
              const exit = yield* Effect.exit(effect)
              const end = performance.now()
              if (Exit.isSuccess(exit)) history.push({ input: inputOf(exit.value)!, start, end })
              else {
                uncertain++
                const input = inputOf(undefined)
                if (input !== undefined) history.push({ input, start })
              }
            })
          const one = (ref: SharedRef.SharedRef<number>) =>
            Effect.gen(function*() {
              const value = ++unique
              switch (Math.floor(Math.random() * 6)) {
                case 0:
                case 1:
                  yield* recorded(ref.get, (seen) => seen === undefined ? undefined : { op: "get", seen })
                  break
                case 2:
                  yield* recorded(ref.set(value), () => ({ op: "write", value }))
                  break
                case 3:
                  yield* recorded(ref.getAndSet(value), (former) => ({ op: "write", value, former }))
                  break
                case 4:
                  yield* recorded(
                    ref.modify((former) => [former, value]),
                    (former) => ({ op: "write", value, former })
                  )
                  break
                case 5: {
                  const read = yield* Effect.option(ref.versioned)
                  if (Option.isNone(read)) break
                  const { value: expected, version } = read.value
                  yield* recorded(
                    ref.compareAndSet(version, value),
                    (done) => ({ op: "swap", expected, value, done })
                  )
                }
              }
            })
          yield* Effect.forEach(
            parties.flatMap(({ ref }) => [ref, ref]),
            (ref) =>
              Effect.forEach(Array.from({ length: 70 }), () => Effect.andThen(one(ref), realSleep(Math.random() * 8))),
            { concurrency: "unbounded" }
          )
          over = true
          yield* Fiber.join(faults)
        }))
        // Behind what was given up and is executed all the same.
        yield* Effect.scoped(Effect.gen(function*() {
          const ref = yield* on(yield* node(server.url, settings), number())
          yield* ref.delete
        }))
        const verdict = Linearizability.check(register, history, { maxSteps: 3_000_000 })
        assert.strictEqual(verdict._tag, "Linearizable", JSON.stringify(verdict, undefined, 1))
        assert.isAbove(history.length - uncertain, 150)
        yield* assertEmpty(server, namespace)
      }))
  }
})
