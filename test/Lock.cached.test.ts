/** Locks that a process keeps when it has released them. */
import { assert, layer } from "@effect/vitest"
import { Context, Deferred, Effect, Fiber, Option } from "effect"
import { Coordinator, Lease, Lock } from "../src/index.ts"
import type { Tenancy } from "../src/internal/hold/tenancy.ts"
import { actor, client } from "./support/actor.ts"
import { eventually } from "./support/eventually.ts"
import { freshNamespace, type Node, onNode, TestServer } from "./support/live.ts"
import { fields, within } from "./support/requests.ts"
import { channelOf, missed, several } from "./support/several.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

const token = Effect.map(Lease.current, (lease) => Option.getOrThrow(lease).token)

const again = Lock.withLock(token, "a", { cached: true })

const keptOf = (context: Node) => (channelOf(context).tenant as Tenancy).kept

const sessionsOf = (context: Node) => Context.get(context, Coordinator.Coordinator).sessions

/** Takes it until the process keeps it. Answers the last token. */
const keeping = (context: Node) => Effect.repeat(onNode(context)(again), { until: () => keptOf(context).size > 0 })

layer(TestServer.layer, live)("a lock that is cached", (it) => {
  it.effect("is taken again without asking Redis, each time with a larger token", () =>
    several(1, ([context], _, server) =>
      Effect.gen(function*() {
        yield* keeping(context!)
        yield* server.cli("CONFIG", "RESETSTAT")
        const tokens = yield* onNode(context!)(Effect.forEach(Array.from({ length: 2000 }), () => again))
        assert.deepStrictEqual(tokens, [...new Set(tokens)].sort((a, b) => a - b))
        const calls = Number(/cmdstat_fcall:calls=(\d+)/.exec(yield* server.cli("INFO", "commandstats"))?.[1] ?? 0)
        assert.isBelow(calls, 200)
      })))

  it.effect("is released when another process wants it, with the last token", () =>
    several(2, ([one, two]) =>
      Effect.gen(function*() {
        const recalled = Effect.gen(function*() {
          const last = yield* keeping(one!)
          const { result } = yield* within(onNode(two!)(Lock.withLock(token, "a")), 1000, "the grant")
          assert.isAbove(result, last)
          assert.strictEqual(keptOf(one!).size, 0)
          // Others are to have it for a while.
          yield* onNode(one!)(again)
          yield* onNode(one!)(again)
          return keptOf(one!).size === 0
        })
        // On a busy machine the first process may have given it back before it was asked to, and keeps it again then.
        for (let round = 0; round < 3; round++) {
          assert.isTrue(yield* Effect.repeat(recalled, { until: (spares) => spares, times: 10 }))
        }
      })))

  it.effect("is granted to another fiber that waits before the one that keeps it takes it again", () =>
    several(1, ([one]) =>
      Effect.gen(function*() {
        for (let round = 0; round < 5; round++) {
          yield* eventually(Effect.map(keeping(one!), () => keptOf(one!).size > 0))
          const order: Array<string> = []
          const enter = (who: string) => Lock.withLock(Effect.sync(() => order.push(who)), "a", { cached: true })
          yield* onNode(one!)(Effect.gen(function*() {
            const inside = yield* Deferred.make<void>()
            const other = yield* Effect.forkChild(Effect.andThen(Deferred.await(inside), enter("other")), {
              startImmediately: true
            })
            const hold = Effect.andThen(Deferred.succeed(inside, undefined), Effect.yieldNow)
            yield* Lock.withLock(hold, "a", { cached: true })
            yield* Effect.forEach([1, 2, 3], () => enter("first"))
            yield* Fiber.join(other)
          }))
          assert.deepStrictEqual(order, ["other", "first", "first", "first"])
          // It is spared for a second.
          keptOf(one!).clear()
        }
      })))

  it.effect("is not kept again at once when others have wanted it, however many are", () =>
    several(2, ([one, two]) =>
      Effect.gen(function*() {
        const recalled = Effect.gen(function*() {
          yield* keeping(one!)
          yield* onNode(two!)(Lock.withLock(token, "a"))
          const others = Array.from({ length: 1100 }, (_, at) => Lock.withLock(Effect.void, `${at}`, { cached: true }))
          yield* onNode(one!)(Effect.all(others, { concurrency: 500, discard: true }))
          yield* onNode(one!)(again)
          yield* onNode(one!)(again)
          return !keptOf(one!).has(`${channelOf(one!).prefix}lock:a`)
        })
        // As above.
        assert.isTrue(yield* Effect.repeat(recalled, { until: (spares) => spares, times: 3 }))
      })))

  it.effect("is available to others when it is not in use, and busy when it is", () =>
    several(2, ([one, two]) =>
      Effect.gen(function*() {
        yield* keeping(one!)
        assert.isTrue(Option.isSome(yield* onNode(two!)(Lock.withLockIfAvailable(token, "a"))))

        const inside = yield* Deferred.make<void>()
        const leave = yield* Deferred.make<void>()
        yield* eventually(Effect.map(onNode(one!)(again), () => keptOf(one!).size > 0))
        const holder = yield* Effect.forkChild(
          onNode(one!)(
            Lock.withLock(Effect.andThen(Deferred.succeed(inside, undefined), Deferred.await(leave)), "a", {
              cached: true
            })
          )
        )
        yield* Deferred.await(inside)
        assert.strictEqual(keptOf(one!).size, 1)
        // Also for others of the same process, which need not ask.
        assert.isTrue(Option.isNone(yield* onNode(one!)(Lock.withLockIfAvailable(token, "a"))))
        assert.strictEqual(keptOf(one!).size, 1)
        assert.isTrue(Option.isNone(yield* onNode(two!)(Lock.withLockIfAvailable(token, "a"))))
        assert.isTrue(Option.isNone(yield* onNode(two!)(Lock.withLockIfAvailable(token, "a"))))
        // One that waits goes before those of the process that has kept it.
        const waiting = yield* Effect.forkChild(onNode(two!)(Lock.withLock(token, "a")))
        yield* Deferred.succeed(leave, undefined)
        yield* within(Fiber.join(waiting), 1000, "the grant")
        yield* Fiber.join(holder)
      })))

  it.effect("is released when no fiber takes it, and when its coordinator is closed", () =>
    several(1, ([context], namespace, server) =>
      Effect.gen(function*() {
        yield* keeping(context!)
        assert.strictEqual(yield* fields(server, namespace, "lock:a", "h"), 1)
        yield* eventually(Effect.map(fields(server, namespace, "lock:a", "h"), (holds) => holds === 0))
        assert.strictEqual(keptOf(context!).size, 0)
        yield* keeping(context!)
      })))

  it.effect("gives no token again that a process may have given which died", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      const { open, reap, send } = actor(redis, freshNamespace(), "lock:a")
      yield* Effect.promise(async () => {
        await open("A")
        await open("B")
        const [tag, first, tokens] = await send("A", "lock.take", ["a", "1k"], 1)
        assert.strictEqual(tag, "kept")
        assert.isAbove(tokens, 100)
        assert.strictEqual((await send("B", "lock.take", ["b", "1"]))[0], "queued")
        for (let state = ""; state !== "forgotten";) state = await reap("A")
        assert.strictEqual((await send("B", "lock.release", ["b"]))[0], "released")
        const [, next] = await send("B", "lock.take", ["c", "1"])
        assert.isAtLeast(Number(next), Number(first) + tokens)
      })
    }))

  it.effect("has no tokens that are ahead of the clock, however often it is granted", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      for (const [kind, ...rest] of [["lock"], ["semaphore", 1, 1]] as const) {
        const { open, send } = actor(redis, freshNamespace(), `${kind}:a`)
        yield* Effect.promise(async () => {
          await open("A")
          let kept = 0
          for (let id = 0; id < 200; id++) {
            const [tag, first, tokens = 1] = await send("A", `${kind}.take`, [`${id}`, ...rest, "1k"])
            if (tag === "kept") kept++
            await send("A", `${kind}.release`, [`${id}`])
            const [seconds, micros] = await redis.time()
            assert.isAtMost(Number(first) + tokens, Number(seconds) * 1e6 + Number(micros) + 1100)
          }
          assert.isAbove(kept, 0)
        })
      }
    }))

  it.effect("waits in Redis, in its turn, for others of the same process", () =>
    several(1, ([context]) =>
      Effect.gen(function*() {
        yield* keeping(context!)
        const order: Array<number> = []
        yield* onNode(context!)(Effect.forEach(
          Array.from({ length: 20 }, (_, at) => at),
          (at) =>
            Lock.withLock(Effect.andThen(Effect.yieldNow, Effect.sync(() => order.push(at))), "a", { cached: true }),
          { concurrency: "unbounded" }
        ))
        assert.deepStrictEqual(order, Array.from({ length: 20 }, (_, at) => at))
      })))

  it.effect("is released where events may be missing, and is lost with its session", () =>
    several(1, ([context], namespace, server) =>
      Effect.gen(function*() {
        yield* keeping(context!)
        missed(context!)
        assert.strictEqual(keptOf(context!).size, 0)
        yield* keeping(context!)
        const [session] = yield* sessionsOf(context!)
        yield* server.cli("FLUSHALL")
        const tokens: Array<number> = []
        // Each second Redis is asked at least once.
        yield* within(
          Effect.whileLoop({
            while: () => channelOf(context!).session?.id === session!.id,
            body: () => onNode(context!)(Effect.option(again)),
            step: (next) => {
              if (Option.isSome(next)) tokens.push(next.value)
            }
          }),
          1500,
          "the loss"
        )
        tokens.push(yield* onNode(context!)(again))
        assert.deepStrictEqual(tokens, [...new Set(tokens)].sort((a, b) => a - b))
        assert.isAtMost(yield* fields(server, namespace, "lock:a", "h"), 1)
      }), { lease: "30 seconds" }))
})
