/** Redis forgets: a fail-over that loses writes, a restart without data or with old data, and a flush. */
import { assert, it, layer } from "@effect/vitest"
import { Deferred, Effect, Fiber, Layer, Option, Result, type Scope, Stream } from "effect"
import { Coordinator, Lease, Lock, Redis, Semaphore } from "../src/index.ts"
import { partitionOf } from "../src/internal/actor/keys.ts"
import { awake } from "./support/awake.ts"
import { eventually } from "./support/eventually.ts"
import { exclusion } from "./support/exclusion.ts"
import { assertEmpty, freshNamespace, type Node, node, onNode, TestServer } from "./support/live.ts"
import { fields } from "./support/requests.ts"
import { sentinel } from "./support/sentinel.ts"
import { awaitInSync, type Server, standalone } from "./support/servers.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

const over = (redis: Redis.Options, options: Coordinator.Options): Effect.Effect<Node, unknown, Scope.Scope> =>
  Layer.build(Coordinator.layer(options).pipe(Layer.provideMerge(Redis.layer(redis)), Layer.fresh))

/** A fiber that holds a lock until it is asked to leave, or loses it. */
const holding = Effect.fnUntraced(function*(key: string) {
  const inside = yield* Deferred.make<Lease.Lease>()
  const leave = yield* Deferred.make<void>()
  const state = { interrupted: false }
  const fiber = yield* Effect.forkDetach(
    Effect.flatMap(Lease.current, (lease) => Deferred.succeed(inside, Option.getOrThrow(lease))).pipe(
      Effect.andThen(Deferred.await(leave)),
      Effect.onInterrupt(() => Effect.sync(() => state.interrupted = true)),
      Lock.withLock(key)
    )
  )
  const lease = yield* Deferred.await(inside)
  // Other observers of the lease are notified as well, however many they are.
  const observers = yield* Effect.forEach([1, 2, 3], () => Effect.forkDetach(Effect.flip(lease.lost)))
  return {
    token: lease.token,
    leave: Effect.andThen(Deferred.succeed(leave, undefined), Fiber.join(fiber)),
    /** Why it was lost; the body has been interrupted by then. */
    lost: Effect.gen(function*() {
      const { reason } = yield* Effect.flip(Fiber.join(fiber))
      assert.isTrue(state.interrupted)
      for (const observer of observers) assert.deepStrictEqual<unknown>(yield* Fiber.join(observer), reason)
      return reason._tag === "LeaseLost" ? reason.reason : reason._tag
    })
  }
})

const tokenOf = (key: string) =>
  Lock.withLock(Effect.map(Lease.current, (lease) => Option.getOrThrow(lease).token), key)

const within = <A, E, R>(effect: Effect.Effect<A, E, R>, millis: number, what: string): Effect.Effect<A, E, R> =>
  Effect.raceFirst(
    effect,
    Effect.andThen(awake(millis), Effect.die(new Error(`${what}: not within ${millis} ms`)))
  )

const waiting = (server: Server, namespace: string, key: string) =>
  eventually(
    Effect.map(fields(server, namespace, `lock:${key}`, "q"), (count) => count > 0),
    { message: `a process waits for ${key}` }
  )

/** Takes turns at a few keys until it is asked to stop; losses are part of life here. */
const load = (
  nodes: ReadonlyArray<Node>,
  watch: ReturnType<typeof exclusion>,
  onLoss: (reason: string) => void
) =>
  Effect.gen(function*() {
    const state = { running: true }
    const workers = yield* Effect.forEach(nodes, (context, at) =>
      Effect.gen(function*() {
        const pool = yield* Semaphore.make({ name: "pool", permits: 3 })
        const one = (
          n: number
        ): Effect.Effect<number, Lock.LockError | Semaphore.SemaphoreError, Coordinator.Coordinator> =>
          n % 4 === 3
            ? pool.withPermits(1 + n % 3)(watch.enter("pool", { permits: 1 + n % 3, capacity: 3, millis: n % 3 }))
            : Lock.withLock(watch.enter(`key${n % 4}`, { millis: n % 3 }), `key${n % 4}`)
        yield* Effect.forEach(Array.from({ length: 6 }, (_, fiber) => fiber + at), (fiber) =>
          Effect.gen(function*() {
            for (let n = fiber; state.running; n += 1 + fiber % 2) {
              const outcome = yield* Effect.result(one(n))
              if (Result.isSuccess(outcome)) continue
              const { reason } = outcome.failure
              assert.strictEqual(reason._tag, "LeaseLost")
              if (reason._tag === "LeaseLost") onLoss(reason.reason)
            }
          }), { concurrency: "unbounded" })
      }).pipe(Effect.scoped, Effect.provideContext(context), Effect.forkChild))
    return {
      stop: Effect.suspend(() => {
        state.running = false
        return within(Effect.forEach(workers, Fiber.join, { discard: true }), 10_000, "the end of the load")
      })
    }
  })

it.live("a fail-over to a replica that has missed the last writes", () =>
  Effect.gen(function*() {
    const group = yield* sentinel()
    const namespace = freshNamespace()
    const redis = { sentinels: group.sentinels.map(({ host, port }) => ({ host, port })), name: group.name }
    const options = { namespace, lease: "15 seconds", margin: "500 millis" } as const
    const first = yield* group.primary
    const [missing, spare] = yield* group.replicas
    const watch = exclusion()
    const losses: Array<string> = []
    // In partitions of their own.
    const used = new Set(["pool", "key0", "key1", "key2"].map((name) => partitionOf(name, 16)).concat(0))
    const names = Array.from({ length: 100 }, (_, n) => `name${n}`).filter((name) => {
      const partition = partitionOf(name, 16)
      return !used.has(partition) && used.add(partition)
    }).slice(0, 3)
    const [early, late, brief] = names as [string, string, string]
    const next = yield* Effect.scoped(Effect.gen(function*() {
      const mine = yield* over(redis, options)
      const other = yield* over(redis, options)
      // Its lease is shorter than a fail-over takes.
      const hasty = yield* over(redis, { ...options, lease: "1500 millis" })
      const tokens = new Map<string, number>()

      // The replica knows the sessions of the partition of `early`, and none of the partition of `late`.
      yield* Effect.provideContext(tokenOf(early), mine)
      yield* onNode(other)(tokenOf(early))
      const working = yield* load([mine, other], watch, (reason) => losses.push(reason))
      yield* eventually(Effect.sync(() => watch.entered > 50))
      yield* awaitInSync(first, [missing!, spare!])
      yield* group.cut(missing!)

      const holds = [
        yield* Effect.provideContext(holding(early), mine),
        yield* Effect.provideContext(holding(late), mine),
        yield* Effect.provideContext(holding(brief), hasty)
      ] as const
      for (const [at, key] of names.entries()) tokens.set(key, holds[at]!.token)
      const waiters = yield* Effect.forEach(
        names,
        (key) => Effect.forkChild(onNode(other)(tokenOf(key)))
      )
      yield* Effect.forEach(names, (key) => waiting(first, namespace, key))

      const before = watch.entered
      yield* spare!.stop()
      yield* first.stop()
      yield* missing!.resume
      assert.strictEqual(yield* holds[2].lost, "expired")
      const promoted = yield* group.awaitFailover(first)
      assert.strictEqual(promoted, missing)
      assert.strictEqual(yield* within(holds[0].lost, 6000, "the loss of early"), "rolledBack")
      assert.strictEqual(yield* within(holds[1].lost, 6000, "the loss of late"), "unknown")
      for (const [at, key] of names.entries()) {
        assert.isAbove(yield* within(Fiber.join(waiters[at]!), 6000, `the next of ${key}`), tokens.get(key)!)
      }

      // Everything goes on, without a call of the program.
      yield* eventually(Effect.sync(() => watch.entered > before + 200))
      yield* working.stop
      for (const context of [mine, other, hasty]) {
        for (const key of tokens.keys()) {
          // `hasty` may still be in its pause of 2 s at most before it connects again.
          const token = yield* within(Effect.provideContext(tokenOf(key), context), 4000, key)
          assert.isAbove(token, tokens.get(key)!)
          tokens.set(key, token)
        }
      }
      return promoted
    }))
    assert.deepStrictEqual(watch.violations.filter(({ what }) => what === "token"), [])
    assert.deepStrictEqual(losses.filter((reason) => reason !== "rolledBack" && reason !== "unknown"), [])
    assert.isFalse(watch.busy)
    yield* assertEmpty(next, namespace)
  }).pipe(Effect.scoped), 60_000)

layer(TestServer.layer, live)("Redis", (it) => {
  it.effect("restarts without its data", () =>
    Effect.gen(function*() {
      const server = yield* standalone()
      const namespace = freshNamespace()
      const options = { namespace, lease: "10 seconds", margin: "300 millis" } as const
      yield* Effect.scoped(Effect.gen(function*() {
        const mine = yield* node(server.url, options)
        const other = yield* node(server.url, options)
        yield* Effect.gen(function*() {
          const pool = yield* Semaphore.make({ name: "pool", permits: 4 })
          const held = yield* holding("a")
          const permit = yield* pool.takeScoped(3)
          const next = yield* Effect.forkChild(onNode(other)(tokenOf("a")))
          yield* waiting(server, namespace, "a")
          yield* server.stop()
          yield* server.start({ data: "discard" })
          assert.strictEqual(yield* within(held.lost, 3000, "the loss"), "unknown")
          assert.strictEqual((yield* Effect.flip(permit.lost)).reason, "unknown")
          assert.isAbove(yield* within(Fiber.join(next), 3000, "the next in line"), held.token)
          yield* eventually(Effect.map(pool.available, (available) => available === 4))
        }).pipe(Effect.scoped, Effect.provideContext(mine))
      }))
      yield* assertEmpty(server, namespace)
    }))

  it.effect("restarts with old data", () =>
    Effect.gen(function*() {
      const server = yield* standalone({ persistence: "rdb" })
      const namespace = freshNamespace()
      const options = { namespace, lease: "10 seconds", margin: "300 millis" } as const
      yield* Effect.scoped(Effect.gen(function*() {
        const mine = yield* node(server.url, options)
        const other = yield* node(server.url, options)
        // By the dump, `mine` holds `given`, `other` waits for it, and no process has `taken`. By now it is otherwise.
        const given = yield* Effect.provideContext(holding("given"), mine)
        const heir = yield* Effect.forkChild(onNode(other)(holding("given")))
        yield* waiting(server, namespace, "given")
        yield* Effect.provideContext(tokenOf("taken"), mine)
        yield* server.cli("SAVE")
        yield* given.leave
        const inherited = yield* Fiber.join(heir)
        const taken = yield* Effect.provideContext(holding("taken"), mine)
        const fresh = yield* onNode(other)(holding("in a session after the dump"))
        yield* server.stop("SIGKILL")
        yield* server.start()
        assert.strictEqual(yield* within(inherited.lost, 3000, "the loss"), "rolledBack")
        assert.strictEqual(yield* within(taken.lost, 3000, "the loss"), "rolledBack")
        assert.strictEqual(yield* within(fresh.lost, 3000, "the loss"), "unknown")
        assert.isAbove(yield* within(Effect.provideContext(tokenOf("given"), mine), 3000, "given"), inherited.token)
        assert.isAbove(yield* within(onNode(other)(tokenOf("taken")), 3000, "taken"), taken.token)
        assert.isAbove(yield* Effect.provideContext(tokenOf("in a session after the dump"), mine), fresh.token)
      }))
      yield* assertEmpty(server, namespace)
    }))

  it.effect("notices by the mailbox alone that a grant was forgotten", () =>
    Effect.gen(function*() {
      const server = yield* standalone({ persistence: "rdb" })
      const namespace = freshNamespace()
      // Nothing is renewed in the time of the test, so that the numbers of the batches tell nothing.
      const options = { namespace, lease: "1 minute", margin: "300 millis", partitions: 1 } as const
      yield* Effect.scoped(Effect.gen(function*() {
        const mine = yield* node(server.url, options)
        const other = yield* node(server.url, options)
        const first = yield* Effect.provideContext(holding("a"), mine)
        const second = yield* Effect.forkChild(onNode(other)(holding("a")))
        yield* waiting(server, namespace, "a")
        yield* server.cli("SAVE")
        yield* first.leave
        // Granted by an event, in answer to nothing that it has asked.
        const inherited = yield* Fiber.join(second)
        yield* server.stop("SIGKILL")
        yield* server.start()
        assert.strictEqual(yield* within(inherited.lost, 3000, "the loss"), "rolledBack")
        assert.isAbove(yield* within(Effect.provideContext(tokenOf("a"), mine), 3000, "the lock"), inherited.token)
      }))
      yield* assertEmpty(server, namespace)
    }))

  it.effect("is flushed under load", () =>
    Effect.gen(function*() {
      const server = yield* standalone()
      const namespace = freshNamespace()
      const options = { namespace, lease: "6 seconds", margin: "100 millis", partitions: 4 } as const
      const watch = exclusion()
      const losses: Array<string> = []
      yield* Effect.scoped(Effect.gen(function*() {
        const nodes = [yield* node(server.url, options), yield* node(server.url, options)]
        const held = yield* onNode(nodes[0]!)(holding("held"))
        const working = yield* load(nodes, watch, (reason) => losses.push(reason))
        for (let n = 0; n < 6; n++) {
          const entered = watch.entered
          yield* eventually(Effect.sync(() => watch.entered > entered + 100))
          yield* server.cli("FLUSHALL")
        }
        // One that only holds finds out with its next renewal at the latest.
        assert.strictEqual(yield* within(held.lost, 3000, "the loss"), "unknown")
        const entered = watch.entered
        yield* eventually(Effect.sync(() => watch.entered > entered + 100))
        yield* working.stop
      }))
      assert.deepStrictEqual(watch.violations.filter(({ what }) => what === "token"), [])
      assert.deepStrictEqual(losses.filter((reason) => reason !== "unknown"), [])
      yield* assertEmpty(server, namespace)
    }))

  it.effect("loses its functions under load, and no process notices", () =>
    Effect.gen(function*() {
      const server = yield* standalone()
      const namespace = freshNamespace()
      const options = { namespace, lease: "6 seconds", margin: "100 millis", partitions: 4 } as const
      const watch = exclusion()
      const changes: Array<string> = []
      yield* Effect.scoped(Effect.gen(function*() {
        const nodes = [yield* node(server.url, options), yield* node(server.url, options)]
        for (const context of nodes) {
          yield* Effect.flatMap(Coordinator.Coordinator, (coordinator) =>
            Effect.forkScoped(Stream.runForEach(coordinator.changes, ({ to }) =>
              Effect.sync(() => changes.push(to)))))
            .pipe(Effect.provideContext(context))
        }
        const held = yield* onNode(nodes[0]!)(holding("held"))
        const working = yield* load(nodes, watch, (reason) =>
          assert.fail(reason))
        for (let n = 0; n < 20; n++) {
          const entered = watch.entered
          yield* server.cli("FUNCTION", "FLUSH")
          yield* eventually(Effect.sync(() => watch.entered > entered + 20), { interval: 1 })
          assert.deepStrictEqual(watch.violations, [])
        }
        yield* working.stop
        yield* held.leave
        assert.deepStrictEqual(changes.filter((to) => to !== "opening" && to !== "open"), [])
      }))
      yield* assertEmpty(server, namespace)
    }))
})
