/** Partitions spread over the primaries of a Redis Cluster: a primary dies, and a slot moves, under load. */
import { assert, it } from "@effect/vitest"
import { Context, Deferred, type Duration, Effect, Exit, Fiber, Layer, Option, Redacted, Result, Stream } from "effect"
import * as EffectRedis from "effect/persistence/Redis"
import type * as IoRedis from "ioredis"
import { inspect } from "node:util"
import { Coordinator, Lease, Lock, Redis, Semaphore } from "../src/index.ts"
import { partitionOf } from "../src/internal/actor/keys.ts"
import { awake } from "./support/awake.ts"
import { type Cluster, cluster } from "./support/cluster.ts"
import { eventually } from "./support/eventually.ts"
import { exclusion } from "./support/exclusion.ts"
import { assertEmpty, freshNamespace, type Node, node, onNode } from "./support/live.ts"
import { fields } from "./support/requests.ts"
import { awaitInSync, type Server, standalone } from "./support/servers.ts"

const partitions = 6

const tagOf = (namespace: string, key: string) => `{${namespace}:0${partitionOf(key, partitions)}}`

const within = <A, E, R>(effect: Effect.Effect<A, E, R>, millis: number, what: string): Effect.Effect<A, E, R> =>
  Effect.raceFirst(
    effect,
    Effect.andThen(awake(millis), Effect.die(new Error(`${what}: not within ${millis} ms`)))
  )

/** Coordinators with connections of their own, and what they tell about lost sessions, by partition. */
const coordinators = Effect.fnUntraced(function*(
  nodes: Cluster,
  options: Coordinator.Options,
  count: number,
  credentials: Pick<Redis.Options, "username" | "password"> = {}
) {
  const losses: Array<{ readonly partition: number; readonly reason: string | undefined }> = []
  const contexts: Array<Node> = []
  for (let n = 0; n < count; n++) {
    const context = yield* node({ cluster: nodes.startupNodes, ...credentials }, options)
    yield* Effect.flatMap(
      Coordinator.Coordinator,
      (coordinator) =>
        Effect.forkScoped(Stream.runForEach(coordinator.changes, ({ partition, reason, to }) =>
          Effect.sync(() => {
            if (to === "lost") losses.push({ partition, reason })
          })))
    ).pipe(Effect.provideContext(context))
    contexts.push(context)
  }
  return { contexts, losses }
})

const keys = Array.from(
  { length: partitions },
  (_, partition) =>
    Array.from({ length: 100 }, (_, n) => `key${n}`).find((name) => partitionOf(name, partitions) === partition)!
)

/** Takes turns at a lock in every partition and at two semaphores, until it is asked to stop. */
const load = Effect.fnUntraced(function*(
  contexts: ReadonlyArray<Node>,
  watch: ReturnType<typeof exclusion>,
  tolerant: boolean
) {
  const state = { running: true }
  const progress = new Map<string, number>()
  const workers = yield* Effect.forEach(contexts, (context, at) =>
    Effect.gen(function*() {
      const pools = [
        yield* Semaphore.make({ name: "pool", permits: 3 }),
        yield* Semaphore.make({ name: "another pool", permits: 2 })
      ] as const
      const take = (key: string, n: number): Effect.Effect<
        number,
        Lock.LockError | Semaphore.SemaphoreError,
        Coordinator.Coordinator
      > => {
        if (n % 5 === 3) {
          const permits = 1 + n % 3
          return pools[0].withPermits(permits)(watch.enter("pool", { permits, capacity: 3, millis: n % 3 }))
        }
        if (n % 5 === 4) return pools[1].withPermit(watch.enter("another pool", { capacity: 2, millis: n % 3 }))
        return Lock.withLock(watch.enter(key, { millis: n % 3 }), key)
      }
      yield* Effect.forEach(keys, (key, fiber) =>
        Effect.gen(function*() {
          for (let n = at + fiber; state.running; n += 1 + fiber % 2) {
            const outcome = yield* Effect.result(take(key, n))
            if (Result.isSuccess(outcome)) {
              progress.set(key, (progress.get(key) ?? 0) + 1)
            } else {
              if (!tolerant) assert.fail(outcome.failure.message)
              assert.strictEqual(outcome.failure.reason._tag, "LeaseLost")
            }
          }
        }), { concurrency: "unbounded" })
    }).pipe(Effect.scoped, Effect.provideContext(context), Effect.forkChild))
  return {
    /** Waits until the fibers of all these keys have been inside so many times more. */
    goOn: (names: ReadonlyArray<string>, times: number) => {
      const before = new Map(progress)
      return eventually(
        Effect.sync(() => {
          const rest = names.filter((name) => (progress.get(name) ?? 0) < (before.get(name) ?? 0) + times)
          if (rest.length > 0) throw new Error(`no progress at ${rest.join(" ")}`)
        }),
        { timeout: "15 seconds", message: "progress" }
      )
    },
    stop: Effect.suspend(() => {
      state.running = false
      return within(Effect.forEach(workers, Fiber.join, { discard: true }), 5000, "the end of the load")
    })
  }
})

const holding = Effect.fnUntraced(function*(key: string) {
  const inside = yield* Deferred.make<Lease.Lease>()
  const leave = yield* Deferred.make<void>()
  const fiber = yield* Effect.forkDetach(
    Effect.flatMap(Lease.current, (lease) => Deferred.succeed(inside, Option.getOrThrow(lease))).pipe(
      Effect.andThen(Deferred.await(leave)),
      Lock.withLock(key)
    )
  )
  const lease = yield* Deferred.await(inside)
  return { lease, leave: Effect.andThen(Deferred.succeed(leave, undefined), Fiber.join(fiber)) }
})

it.live("a Cluster whose primary dies goes on with its replica", () =>
  Effect.gen(function*() {
    const nodes = yield* cluster({ replicas: 1 })
    const namespace = freshNamespace()
    const watch = exclusion()
    const tag = tagOf(namespace, keys[0]!)
    const victim = yield* nodes.serving(tag)
    const owners = yield* Effect.forEach(keys, (key) => nodes.serving(tagOf(namespace, key)))
    const elsewhere = keys.filter((_, at) => owners[at] !== victim)
    yield* Effect.scoped(Effect.gen(function*() {
      const options = { namespace, partitions, lease: "12 seconds", margin: "500 millis" } as const
      const { contexts, losses } = yield* coordinators(nodes, options, 3)
      const working = yield* load(contexts, watch, true)
      yield* working.goOn(keys, 20)
      assert.deepStrictEqual(watch.violations, [])
      yield* victim.stop()
      // What lives on other nodes is not disturbed for longer than the death takes to be noticed.
      yield* working.goOn(elsewhere, 5)
      yield* nodes.awaitPromotion(tag, victim)
      yield* working.goOn(keys, 20)
      yield* working.stop
      assert.isFalse(watch.busy)
      assert.deepStrictEqual(watch.violations.filter(({ what }) => what === "token"), [])
      // Two may have been inside only where a write was lost with the primary, and then a process was notified.
      const told = new Set(losses.map(({ partition }) => partition))
      assert.deepStrictEqual(watch.violations.filter(({ key }) => !told.has(partitionOf(key, partitions))), [])
      for (const { partition, reason } of losses) {
        assert.include(["rolledBack", "unknown"], reason)
        assert.strictEqual(owners[partition], victim)
      }
    }))
    yield* assertEmpty(yield* nodes.primaries, namespace)
  }).pipe(Effect.scoped), 60_000)

it.live("a Cluster whose replica has missed the last writes notifies the holders", () =>
  Effect.gen(function*() {
    const nodes = yield* cluster({ replicas: 1 })
    const namespace = freshNamespace()
    const tag = tagOf(namespace, "a")
    const victim = yield* nodes.serving(tag)
    const first = yield* nodes.serving(`{${namespace}:00}`)
    const [replica] = yield* nodes.replicasOf(victim)
    yield* Effect.scoped(Effect.gen(function*() {
      const options = { namespace, partitions, lease: "30 seconds", margin: "500 millis" } as const
      const { contexts: [mine, other], losses } = yield* coordinators(nodes, options, 2)
      const tokenOf = (key: string) =>
        Lock.withLock(Effect.map(Lease.current, (lease) => Option.getOrThrow(lease).token), key)
      yield* Effect.provideContext(tokenOf("a"), mine!)
      yield* Effect.provideContext(tokenOf("a"), other!)
      yield* awaitInSync(victim, [replica!])
      yield* nodes.cut(replica!)
      const held = yield* Effect.provideContext(holding("a"), mine!)
      const next = yield* Effect.forkChild(Effect.provideContext(tokenOf("a"), other!))
      yield* eventually(
        Effect.map(fields(victim, namespace, "lock:a", "q"), (count) => count > 0)
      )
      yield* victim.stop()
      yield* replica!.resume
      yield* nodes.awaitPromotion(tag, victim)
      // It is notified as soon as there is a connection to the new primary, long before the next heartbeat.
      assert.strictEqual((yield* within(Effect.flip(held.lease.lost), 3000, "the loss")).reason, "rolledBack")
      assert.isAbove(yield* within(Fiber.join(next), 7000, "the next in line"), held.lease.token)
      // The first partition, which each coordinator opens, may have been renewed on the same primary meanwhile.
      const concerned = [partitionOf("a", partitions), ...first === victim ? [0] : []]
      assert.deepStrictEqual(losses.filter(({ partition }) => !concerned.includes(partition)), [])
      assert.deepStrictEqual(losses.filter(({ reason }) => reason !== "rolledBack"), [])
    }))
    yield* assertEmpty(yield* nodes.primaries, namespace)
  }).pipe(Effect.scoped), 60_000)

it.live("a Cluster moves a slot under load, and no process loses anything", () =>
  Effect.gen(function*() {
    const nodes = yield* cluster()
    const namespace = freshNamespace()
    const watch = exclusion()
    const moving = keys[0]!
    const tag = tagOf(namespace, moving)
    // In the same partition, hence in the same slot.
    const [held, parked] = Array.from({ length: 200 }, (_, n) => `other${n}`)
      .filter((name) => tagOf(namespace, name) === tag) as [string, string]
    yield* Effect.scoped(Effect.gen(function*() {
      const options = { namespace, partitions, lease: "12 seconds", margin: "500 millis" } as const
      const { contexts, losses } = yield* coordinators(nodes, options, 3)
      const [mine, other] = contexts as [Node, Node, Node]
      const working = yield* load(contexts, watch, false)
      yield* working.goOn(keys, 20)

      const migrate = (releaseDuring: boolean) =>
        Effect.gen(function*() {
          const hold = yield* Effect.provideContext(holding(held), mine)
          const second = yield* Effect.provideContext(holding(parked), mine)
          const waiters = yield* Effect.forEach([held, parked], (key) =>
            Effect.forkChild(
              Effect.map(Lease.current, (lease) => Option.getOrThrow(lease).token).pipe(
                Lock.withLock(key),
                onNode(other)
              )
            ))
          const from = yield* nodes.serving(tag)
          yield* Effect.forEach([held, parked], (key) =>
            eventually(
              Effect.map(fields(from, namespace, `lock:${key}`, "q"), (count) => count > 0)
            ))
          const to = (yield* nodes.primaries).find((server) => server !== from)!
          const migration = yield* nodes.migration(tag, to)
          const calm = Effect.gen(function*() {
            assert.isTrue((yield* hold.lease.isHeld) && (yield* second.lease.isHeld))
            assert.isTrue(waiters.every((fiber) => fiber.pollUnsafe() === undefined))
            assert.deepStrictEqual(watch.violations, [])
            assert.deepStrictEqual(losses, [])
          })
          const elsewhere = keys.filter((key) => key !== moving)
          yield* migration.begin
          yield* working.goOn(elsewhere, 3)
          // One key at a time, the sessions first: no process may take an absent key for a free lock or a dead session.
          yield* migration.move([`${tag}:sessions`])
          yield* calm
          const during = releaseDuring ? yield* Effect.forkChild(second.leave) : undefined
          for (let moved = 1; moved > 0;) {
            moved = yield* migration.move({ count: 1 })
            if (!releaseDuring) yield* calm
          }
          yield* working.goOn(elsewhere, 3)
          yield* migration.end
          yield* hold.leave
          if (during === undefined) yield* second.leave
          else yield* Fiber.join(during)
          const tokens = yield* within(Effect.forEach(waiters, Fiber.join), 5000, "the wake-ups")
          assert.isAbove(tokens[0]!, hold.lease.token)
          assert.isAbove(tokens[1]!, second.lease.token)
          assert.strictEqual(yield* nodes.serving(tag), to)
          yield* working.goOn(keys, 10)
        })
      yield* migrate(false)
      yield* migrate(true)
      yield* working.stop
      assert.isFalse(watch.busy)
      assert.deepStrictEqual(watch.violations, [])
      assert.deepStrictEqual(losses, [])
    }))
    yield* assertEmpty(yield* nodes.primaries, namespace)
  }).pipe(Effect.scoped), 60_000)

it.live(
  "a Cluster that refuses the password on one node is waited for, and its sessions are kept",
  () =>
    Effect.gen(function*() {
      const nodes = yield* cluster({ acl: ["user app on >secret ~* &* +@all"] })
      const namespace = freshNamespace()
      const [key] = keys as [string]
      const victim = yield* nodes.serving(tagOf(namespace, key))
      yield* Effect.scoped(Effect.gen(function*() {
        const options = { namespace, partitions, lease: "20 seconds" } as const
        const credentials = { username: "app", password: Redacted.make("secret") }
        const { contexts: [context], losses } = yield* coordinators(nodes, options, 1, credentials)
        yield* Effect.gen(function*() {
          const redis = yield* Redis.Redis
          assert.notInclude(inspect([redis, ...(redis.client as IoRedis.Cluster).nodes()], { depth: 20 }), "secret")
          const held = yield* holding(key)
          const other = Array.from({ length: 200 }, (_, n) => `other${n}`)
            .find((name) => tagOf(namespace, name) === tagOf(namespace, key))!
          yield* victim.cli("ACL", "SETUSER", "app", "resetpass", ">another")
          yield* victim.cli("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
          yield* eventually(
            Effect.map(Effect.flip(redis.send("GET", `${tagOf(namespace, key)}:plain`)), (error) => {
              assert.strictEqual(error.reason._tag, "NotConnected", error.message)
              assert.match(error.message, /WRONGPASS.*`password`/)
            })
          )
          const { reason } = yield* Effect.flip(Lock.withLock(Effect.void, other, { wait: "2 seconds" }))
          assert.isTrue(reason._tag === "WaitTimeout" && reason.away, reason.message)
          const waiting = yield* Effect.forkChild(Lock.withLock(Effect.succeed("granted"), other))
          yield* victim.cli("ACL", "SETUSER", "app", "resetpass", ">secret")
          assert.strictEqual(yield* within(Fiber.join(waiting), 5000, "the grant"), "granted")
          assert.isTrue(yield* held.lease.isHeld)
          yield* held.leave
        }).pipe(Effect.provideContext(context!))
        assert.deepStrictEqual(losses, [])
      }))
      yield* assertEmpty(yield* nodes.primaries, namespace)
    }).pipe(Effect.scoped),
  60_000
)

it.live("a Cluster one of whose primaries hangs keeps its connections to the others", () =>
  Effect.gen(function*() {
    // No node counts as failed, which would change the view of all others.
    const nodes = yield* cluster({ config: { "cluster-node-timeout": 60_000 } })
    const namespace = freshNamespace()
    const owners = yield* Effect.forEach(keys, (key) => nodes.serving(tagOf(namespace, key)))
    const servedBy = (server: Server) => keys.filter((_, at) => owners[at] === server)
    // It serves two partitions or more.
    const victim = [...owners].sort((a, b) => servedBy(b).length - servedBy(a).length)[0]!
    yield* Effect.scoped(Effect.gen(function*() {
      const options = { namespace, partitions, lease: "15 seconds", requestTimeout: "2 seconds" } as const
      const { contexts: [context] } = yield* coordinators(nodes, options, 1)
      yield* Effect.gen(function*() {
        const suspended = new Set<number>()
        const { changes } = yield* Coordinator.Coordinator
        yield* Effect.forkScoped(Stream.runForEach(changes, ({ partition, to }) =>
          Effect.sync(() => {
            if (to === "suspended") suspended.add(partition)
          })))
        const held = yield* Effect.forEach(keys, holding)
        const names = Array.from({ length: 200 }, (_, n) => `other${n}`)
        const others = names.filter((key) => owners[partitionOf(key, partitions)] !== victim)
        yield* victim.pause
        // Meanwhile there are always requests to the others on their way.
        const working = yield* Effect.forkChild(Effect.forever(
          Effect.forEach(others, (key) => within(Lock.withLock(Effect.void, key), 5000, key), { concurrency: 20 })
        ))
        // Their deadlines pass together, and each of them doubts the connection.
        const late = yield* Effect.forEach(
          names.filter((key) => !others.includes(key)),
          (key) => Effect.forkChild(Lock.withLock(Effect.void, key))
        )
        yield* eventually(
          Effect.sync(() =>
            assert.includeMembers([...suspended], servedBy(victim).map((key) => partitionOf(key, partitions)))
          )
        )
        assert.isUndefined(working.pollUnsafe())
        yield* Fiber.interrupt(working)
        yield* victim.resume
        yield* Effect.forEach(late, Fiber.join)
        yield* Effect.forEach(held, ({ leave }) => leave, { concurrency: "unbounded" })
        assert.sameMembers([...suspended], servedBy(victim).map((key) => partitionOf(key, partitions)))
      }).pipe(Effect.provideContext(context!))
    }))
    yield* assertEmpty(yield* nodes.primaries, namespace)
  }).pipe(Effect.scoped), 60_000)

it.live(
  "a listed node that is not in the Cluster, and a primary that hangs, keep no connection from being made",
  () =>
    Effect.gen(function*() {
      const nodes = yield* cluster({ config: { "cluster-node-timeout": 60_000 } })
      const stray = yield* standalone({ config: { "cluster-enabled": "yes" } })
      const listed = [{ host: "127.0.0.1", port: stray.port }, ...nodes.startupNodes]
      const built = (connectTimeout: Duration.Input) => Layer.build(Redis.layer({ cluster: listed, connectTimeout }))
      yield* Effect.forEach(Array.from({ length: 12 }), () => Effect.scoped(built("5 seconds")), { discard: true })
      const redis = Context.get(yield* built("5 seconds"), Redis.Redis)
      for (const primary of yield* nodes.primaries) {
        yield* primary.pause
        for (let turn = 0; turn < 3; turn++) {
          const own = yield* redis.connect()
          assert.strictEqual(yield* own.send("PING"), "PONG")
        }
        yield* Effect.scoped(built("5 seconds"))
        yield* primary.resume
      }
    }).pipe(Effect.scoped),
  60_000
)

it.live("keys are not said to be all while the master of some slots is missing", () =>
  Effect.gen(function*() {
    const nodes = yield* cluster({ config: { "cluster-require-full-coverage": "no", "cluster-node-timeout": 1000 } })
    const context = yield* Layer.build(Redis.layer({ cluster: nodes.startupNodes, commandTimeout: "2 seconds" }))
    const effect = Context.get(context, EffectRedis.Redis)
    const names = Array.from({ length: 30 }, (_, n) => `key${n}`)
    yield* Effect.forEach(names, (name) => effect.send("SET", name, name))
    const found = Effect.map(effect.send<Array<string>>("KEYS", "key*"), (keys) => keys.length)
    assert.strictEqual(yield* found, 30)
    const victim = (yield* nodes.primaries)[0]!
    yield* Effect.forEach(yield* nodes.replicasOf(victim), (replica) => replica.stop("SIGKILL"))
    yield* victim.stop("SIGKILL")
    // Also when the cluster has noticed it.
    for (let turn = 0; turn < 4; turn++) {
      assert.include(String((yield* Effect.flip(found)).cause), "masters of all slots")
      assert.isTrue(Exit.isFailure(yield* Effect.exit(effect.send("SCAN", "0"))))
    }
  }).pipe(Effect.scoped), 60_000)
