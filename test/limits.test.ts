/** What a server may refuse: memory, permissions, functions, plain text, and a namespace of another shape. */
import { assert, layer } from "@effect/vitest"
import { Deferred, Effect, Exit, Fiber, Layer, Option, Schedule, Schema, type Scope, Stream } from "effect"
import {
  Coordinator,
  Fence,
  Lease,
  Lock,
  Queue,
  ReadWriteLock,
  Redis,
  Rendezvous,
  Semaphore,
  SharedRef,
  Singleton,
  Topic
} from "../src/index.ts"
import { body } from "../src/internal/actor/lua.ts"
import { make as proxy } from "../src/testing/Proxy.ts"
import { awake } from "./support/awake.ts"
import { eventually, realSleep } from "./support/eventually.ts"
import { exclusion } from "./support/exclusion.ts"
import { assertEmpty, freshNamespace, holding, type Node, node, onNode, TestServer } from "./support/live.ts"
import { fields } from "./support/requests.ts"
import { type Server, standalone } from "./support/servers.ts"
import { deadForgotten } from "./support/several.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

/**
 * All that a user needs, for one namespace; `rules(namespace).join(" ")` goes behind `ACL SETUSER name on >password`.
 * Nothing here is of @dangerous or @admin. Of `calling`, one of the two is enough; a Cluster also needs `+cluster|slots`,
 * and `+client|setname` lets `clientName` be seen.
 */
const keys = (namespace: string) => ["resetchannels", `~{${namespace}:*`, "-@all"]
const calling = { functions: ["+fcall", "+function|load"], scripts: ["+eval", "+evalsha"] }
const reading = ["+xread"]
const inside = [
  ...[
    "+del",
    "+get",
    "+hdel",
    "+hget",
    "+hgetall",
    "+hkeys",
    "+hlen",
    "+hmget",
    "+hscan",
    "+hset",
    "+mget",
    "+persist",
    "+pexpire",
    "+sadd",
    "+set",
    "+unlink"
  ],
  ...["+srandmember", "+srem", "+time", "+xack", "+xadd", "+xclaim", "+xdel", "+xgroup|create", "+xgroup|delconsumer"],
  ...[
    "+xgroup|destroy",
    "+xgroup|setid",
    "+xlen",
    "+xpending",
    "+xrange",
    "+xreadgroup",
    "+xrevrange",
    "+xtrim",
    "+zadd",
    "+zrangebylex",
    "+zrangebyscore",
    "+zrem",
    "+zscore"
  ]
]
const rules = (namespace: string) => [
  ...keys(namespace),
  "+ping",
  ...calling.functions,
  ...calling.scripts,
  ...reading,
  ...inside
]

const over = (redis: Redis.Options, options: Coordinator.Options): Effect.Effect<Node, unknown, Scope.Scope> =>
  Layer.build(Coordinator.layer(options).pipe(Layer.provideMerge(Redis.layer(redis)), Layer.fresh))

/** Why a coordinator could not start. */
const refusal = (redis: Redis.Options, options: Coordinator.Options) =>
  Effect.map(Effect.flip(Effect.scoped(over(redis, options))), (error) => {
    assert.instanceOf(error, Coordinator.CoordinatorError)
    const { reason } = error as Coordinator.CoordinatorError
    return reason
  })

const redisReason = (
  error: Lock.LockError | Semaphore.SemaphoreError | ReadWriteLock.ReadWriteLockError
): string => {
  assert.match(error.message, / about \w+ ".*" of namespace "/)
  return error.reason._tag
}

const quickly = <A, E, R>(effect: Effect.Effect<A, E, R>, what: string, millis = 1000): Effect.Effect<A, E, R> =>
  Effect.raceFirst(
    effect,
    Effect.andThen(awake(millis), Effect.die(new Error(`${what}: not within ${millis} ms`)))
  )

/** Locks, read-write locks and semaphores of two coordinators, and what a third leaves behind that goes silent. */
/** All ways through a stream and its group. */
const meeting = Effect.gen(function*() {
  const place = yield* Rendezvous.make({ name: "place", schema: Schema.String })
  const give = yield* Effect.forkChild(place.give("a"))
  assert.strictEqual(yield* Effect.flip(place.takeWith((value) => Effect.fail(value))), "a")
  assert.strictEqual(yield* place.takeWith((_, { attempts }) => Effect.succeed(attempts)), 2)
  yield* Fiber.join(give)
  assert.isTrue(Option.isNone(yield* Effect.timeoutOption(place.give("b"), 20)))
  assert.deepStrictEqual(
    yield* Effect.all([place.exchange("a"), place.exchange("b")], { concurrency: "unbounded" }),
    ["b", "a"]
  )
})

const basics = (
  server: Server,
  redis: Redis.Options,
  namespace: string
): Effect.Effect<void, unknown> =>
  Effect.gen(function*() {
    const options = { namespace, lease: "1500 millis", margin: "300 millis", requestTimeout: "400 millis" } as const
    const line = yield* proxy(server)
    const nodes = [yield* over(redis, options), yield* over(redis, options)]
    const { url, host: _host, port: _port, ...rest } = redis
    const dying = yield* over({ ...rest, url: String(url).replace(`:${server.port}`, `:${line.port}`) }, options)
    const watch = exclusion()
    yield* Effect.forEach(nodes, (context) =>
      Effect.gen(function*() {
        const pool = yield* Semaphore.make({ name: "pool", permits: 2 })
        const one = (n: number): Effect.Effect<number, unknown, Coordinator.Coordinator> =>
          n % 4 === 0
            ? Lock.withLock(watch.enter("lock"), "lock")
            : n % 4 === 1
            ? pool.withPermit(watch.enter("pool", { capacity: 2, millis: 1 }))
            : n % 4 === 2
            ? ReadWriteLock.withReadLock(watch.enter("rw", { capacity: 24, millis: 1 }), "rw")
            : ReadWriteLock.withWriteLock(watch.enter("rw", { permits: 24, capacity: 24 }), "rw")
        yield* Effect.forEach(Array.from({ length: 24 }, (_, n) => n), one, { concurrency: "unbounded" })
      }).pipe(Effect.scoped, Effect.provideContext(context)), { concurrency: "unbounded" })
    assert.strictEqual(watch.entered, 48)
    yield* onNode(nodes[0]!)(meeting)

    const lost = yield* Effect.provideContext(holding("left"), dying)
    const waiting = yield* Effect.forkChild(
      Effect.map(Lease.current, (lease) => Option.getOrThrow(lease).token).pipe(
        Lock.withLock("left"),
        onNode(nodes[0]!)
      )
    )
    yield* line.blackhole
    assert.isAbove(yield* quickly(Fiber.join(waiting), "a reaping", 4000), lost.lease.token)
    assert.strictEqual((yield* Effect.flip(Fiber.join(lost.fiber)))._tag, "LockError")
    assert.deepStrictEqual(watch.violations, [])
    // In the partitions where nothing waits, the dead are forgotten with a heartbeat of the living.
    yield* deadForgotten(nodes, namespace, server)
  }).pipe(Effect.scoped, Effect.andThen(assertEmpty(server, namespace)))

layer(TestServer.layer, live)("a server", (it) => {
  it.effect("out of memory lets processes hold, wait and release, refuses to take at once, and is forgiven", () =>
    Effect.gen(function*() {
      const server = yield* standalone()
      const namespace = freshNamespace()
      const options = { namespace, lease: "1500 millis", margin: "300 millis" } as const
      const full = server.cli("CONFIG", "SET", "maxmemory", 1)
      const free = server.cli("CONFIG", "SET", "maxmemory", 0)
      yield* Effect.scoped(Effect.gen(function*() {
        const mine = yield* node(server.url, options)
        const other = yield* node(server.url, options)
        const held = yield* Effect.provideContext(holding("a"), mine)
        const waiting = yield* Effect.forkChild(
          Effect.succeed("granted").pipe(Lock.withLock("a"), onNode(other))
        )
        yield* eventually(
          Effect.map(server.cli("KEYS", `{${namespace}:*mail:*`), (keys) => keys.split("\n").length >= 2)
        )
        yield* Effect.gen(function*() {
          const pool = yield* Semaphore.make({ name: "pool", permits: 2 })
          yield* Effect.scoped(Effect.gen(function*() {
            const permit = yield* pool.takeScoped(1)
            yield* full
            // Nothing can load the library now, and holds are renewed all the same.
            yield* server.cli("FUNCTION", "FLUSH")
            const until = performance.now() + 2500
            while (performance.now() < until) {
              for (const context of [mine, other]) {
                const take = Effect.flip(Lock.withLock(Effect.die("must not run"), "b")).pipe(
                  Effect.provideContext(context)
                )
                assert.strictEqual(redisReason(yield* quickly(take, "a refusal")), "OutOfMemory")
              }
              assert.strictEqual(redisReason(yield* quickly(Effect.flip(pool.take(1)), "a refusal")), "OutOfMemory")
              const made = Effect.flip(Effect.scoped(Semaphore.make({ name: "other", permits: 1 })))
              assert.strictEqual(redisReason(yield* quickly(made, "a refusal")), "OutOfMemory")
              assert.isTrue((yield* held.lease.isHeld) && (yield* permit.isHeld))
              yield* realSleep(50)
            }
            const started = yield* refusal({ url: server.url }, options)
            assert.strictEqual(started._tag, "OutOfMemory")
          }))
          // Releasing works, and so does the wake-up of waiters.
          yield* held.leave
          assert.strictEqual(yield* quickly(Fiber.join(waiting), "the next in line"), "granted")
          assert.strictEqual(yield* pool.available, 2)

          // A session cannot be opened now, so that the semaphore cannot exist; it does as soon as one can.
          yield* server.cli("FLUSHALL")
          const coordinator = yield* Coordinator.Coordinator
          yield* eventually(Effect.map(
            coordinator.sessions,
            (sessions) => sessions.every(({ state }) => state !== "open" && state !== "suspended")
          ))
          assert.strictEqual(redisReason(yield* Effect.flip(pool.take(1))), "OutOfMemory")
          yield* free
          yield* eventually(Effect.map(pool.available, (available) => available === 2))
          yield* pool.withPermits(2)(Lock.withLock(Effect.void, "b"))
          yield* onNode(other)(Lock.withLock(Effect.void, "b"))
        }).pipe(Effect.scoped, Effect.provideContext(mine))
      }))
      yield* assertEmpty(server, namespace)
    }))

  it.effect("out of memory lets queues and their groups be paused and resumed", () =>
    Effect.gen(function*() {
      const server = yield* standalone()
      const namespace = freshNamespace()
      yield* Effect.scoped(Effect.gen(function*() {
        const queue = yield* Queue.make({ name: "q", payload: Schema.Number })
        const group = queue.group("g")
        yield* server.cli("CONFIG", "SET", "maxmemory", 1)
        for (const one of [queue, group]) yield* one.pause
        assert.strictEqual((yield* Effect.flip(queue.offer(1))).reason._tag, "OutOfMemory")
        assert.isTrue((yield* queue.state).paused)
        for (const one of [queue, group]) yield* one.resume
        assert.isFalse((yield* queue.state).paused)
        yield* server.cli("CONFIG", "SET", "maxmemory", 0)
      })).pipe(Effect.provideContext(yield* node(server.url, { namespace })))
    }).pipe(Effect.scoped))

  for (const executed of [true, false]) {
    it.effect(`out of memory does not hide that a take ${executed ? "was" : "was not"} executed before`, () =>
      Effect.gen(function*() {
        const server = yield* standalone()
        const namespace = freshNamespace()
        yield* Effect.scoped(Effect.gen(function*() {
          const line = yield* proxy(server)
          const context = yield* node(line.url, { namespace, partitions: 1 })
          yield* Effect.gen(function*() {
            const met = yield* line.once(
              (request) => request.args.includes("lock.take"),
              executed ? "dropReply" : "drop"
            )
            const held = yield* Deferred.make<void>()
            const leave = yield* Deferred.make<void>()
            const taking = yield* Effect.forkChild(
              Lock.withLock(Effect.andThen(Deferred.succeed(held, undefined), Deferred.await(leave)), "a")
            )
            yield* met
            yield* line.refuse
            if (executed) {
              yield* eventually(Effect.map(fields(server, namespace, "lock:a", "h"), (found) => found === 1))
            }
            yield* server.cli("CONFIG", "SET", "maxmemory", 1)
            yield* line.closeAll
            yield* line.pass
            if (executed) {
              yield* quickly(Deferred.await(held), "the grant")
              assert.strictEqual(yield* fields(server, namespace, "lock:a", "h"), 1)
              yield* Deferred.succeed(leave, undefined)
              yield* Fiber.join(taking)
            } else {
              assert.strictEqual(
                redisReason(yield* quickly(Effect.flip(Fiber.join(taking)), "a refusal")),
                "OutOfMemory"
              )
            }
            assert.strictEqual(yield* fields(server, namespace, "lock:a", "h"), 0)
            yield* server.cli("CONFIG", "SET", "maxmemory", 0)
            // The numbers of both sides still agree.
            const tokens = yield* Effect.forEach(
              ["a", "b"],
              (key) => Lock.withLock(Effect.map(Lease.current, (lease) => Option.getOrThrow(lease).token), key)
            )
            assert.isAbove(tokens[1]!, tokens[0]!)
          }).pipe(Effect.provideContext(context))
        }))
        yield* assertEmpty(server, namespace)
      }))
  }

  it.effect("out of memory delays the ticks of a singleton, and ends none of its terms", () =>
    Effect.gen(function*() {
      const server = yield* standalone()
      const context = yield* node(server.url, { namespace: freshNamespace(), partitions: 1 })
      let ticks = 0
      yield* Effect.scoped(Effect.gen(function*() {
        yield* Layer.build(Singleton.schedule("s", Effect.sync(() => ticks++), Schedule.spaced("50 millis")))
        yield* eventually(Effect.sync(() => assert.isAbove(ticks, 0)))
        for (const _ of [1, 2, 3]) {
          yield* server.cli("CONFIG", "SET", "maxmemory", 1)
          yield* realSleep("300 millis")
          yield* server.cli("CONFIG", "SET", "maxmemory", 0)
          const before = ticks
          yield* quickly(eventually(Effect.sync(() => assert.isAbove(ticks, before + 1))), "the next ticks", 900)
        }
      })).pipe(Effect.provideContext(context))
    }))

  it.effect("fails a request that is larger than the server takes, and no other one", () =>
    Effect.gen(function*() {
      const server = yield* standalone({ config: { "proto-max-bulk-len": "1mb" } })
      const context = yield* node(server.url, { namespace: freshNamespace(), partitions: 1 })
      yield* Effect.scoped(Effect.gen(function*() {
        const lease = yield* Lock.acquire("held")
        const refs = yield* Effect.forEach(["a", "b", "c", "d"], (name) =>
          SharedRef.make({ name, schema: Schema.String, initial: "" }))
        const exits = yield* Effect.forEach(
          refs,
          (ref, at) =>
            Effect.exit(ref.set(at === 2 ? "x".repeat(2 * 1024 * 1024) : ref.name)),
          { concurrency: "unbounded" }
        )
        const errors = exits.flatMap((exit) => Option.toArray(Exit.findErrorOption(exit)))
        assert.deepStrictEqual(errors.map(({ reason }) => reason._tag), ["RequestTooLarge"])
        assert.match(errors[0]!.message, /about sharedRef "c" .* is larger than the server/)
        assert.deepStrictEqual(yield* Effect.forEach(refs, (ref) => ref.get), ["a", "b", "", "d"])
        assert.isTrue(yield* lease.isHeld)
      })).pipe(Effect.provideContext(context))
    }))

  it.effect("ends what is larger than the server takes: a job's result, a checkpoint, an event behind a release", () =>
    Effect.gen(function*() {
      const server = yield* standalone({ config: { "proto-max-bulk-len": "1mb" } })
      const namespace = freshNamespace()
      const context = yield* node(server.url, { namespace, partitions: 1 })
      const large = "x".repeat(1_200_000)
      yield* Effect.scoped(Effect.gen(function*() {
        const queue = yield* Queue.make({ name: "q", payload: Schema.String, success: Schema.String })
        const checkpoints: Array<string> = []
        yield* Effect.forkScoped(queue.run((payload) => {
          if (payload !== "checkpoint") return Effect.succeed(large)
          return Effect.flatMap(Queue.Job, (job) =>
            Effect.match(job.checkpoint(large), {
              onFailure: ({ reason }) => checkpoints.push(reason._tag),
              onSuccess: () => checkpoints.push("stored")
            })).pipe(Effect.as("small"))
        }))
        const error = yield* quickly(Effect.flip(queue.execute("result")), "the end of the job", 10_000)
        assert.deepInclude(error.reason, { _tag: "JobFailed", outcome: "failed" })
        assert.strictEqual(yield* quickly(queue.execute("checkpoint"), "the other job", 10_000), "small")
        assert.deepStrictEqual(checkpoints, ["RequestTooLarge"])
        const topic = yield* Topic.make({ name: "t", schema: Schema.String, colocate: "a" })
        yield* Effect.scoped(Effect.andThen(
          Lock.acquire("a"),
          (lease) => topic.publishOnRelease(lease, large)
        ))
        yield* quickly(Lock.withLock(Effect.void, "a"), "the release", 5000)
        yield* queue.obliterate
        yield* topic.purge
      })).pipe(Effect.provideContext(context))
    }))

  it.effect("may refuse what it has executed before, and what follows is not confused with it", () =>
    Effect.gen(function*() {
      const server = yield* standalone({ acl: ["user app on >secret ~* +@all"] })
      const namespace = freshNamespace()
      yield* Effect.scoped(Effect.gen(function*() {
        const line = yield* proxy(server)
        const url = `redis://app:secret@127.0.0.1:${line.port}`
        const context = yield* over({ url }, { namespace, partitions: 1 })
        yield* Effect.gen(function*() {
          const met = yield* line.once(
            (request) => request.args.includes("lock.take"),
            "dropReply"
          )
          const taking = yield* Effect.forkChild(Effect.flip(Lock.withLock(Effect.die("must not run"), "a")))
          yield* met
          yield* line.refuse
          yield* eventually(Effect.map(fields(server, namespace, "lock:a", "h"), (found) => found === 1))
          yield* server.cli("ACL", "SETUSER", "app", "-fcall")
          yield* line.closeAll
          yield* line.pass
          assert.strictEqual(redisReason(yield* quickly(Fiber.join(taking), "a refusal")), "MissingPermission")
          yield* server.cli("ACL", "SETUSER", "app", "+fcall")
          // The reply to the take of `a` waits in Redis under the number that this one would have.
          yield* Lock.withLock(
            Effect.map(fields(server, namespace, "lock:b", "h"), (count) => assert.strictEqual(count, 1)),
            "b"
          ).pipe(
            // The new session may have been refused before, and the answer is on its way.
            Effect.retry({
              while: (error) => error instanceof Lock.LockError && redisReason(error) === "MissingPermission",
              schedule: Schedule.spaced("50 millis"),
              times: 20
            })
          )
          yield* quickly(Lock.withLock(Effect.void, "a"), "what was taken and refused")
        }).pipe(Effect.provideContext(context))
      }))
      yield* assertEmpty(server, namespace)
    }))

  it.effect("names the command that a fence may not run", () =>
    Effect.gen(function*() {
      const namespace = freshNamespace()
      const server = yield* standalone({
        acl: [`user app on >secret ~a ~{a}* ${rules(namespace).join(" ")} +set +get`]
      })
      const context = yield* over({ url: `redis://app:secret@127.0.0.1:${server.port}` }, { namespace })
      const refusalOf = (command: string, ...args: ReadonlyArray<string>) =>
        Effect.map(
          Effect.flip(Fence.run({ token: 1 }, "a", command, ...args)),
          ({ reason }) => reason._tag === "MissingPermission" ? reason.command : reason._tag
        ).pipe(Effect.provideContext(context))
      assert.strictEqual(yield* refusalOf("lpush", "a"), "LPUSH")
      assert.strictEqual(yield* refusalOf("set"), "CommandRefused")
      yield* server.cli("ACL", "SETUSER", "app", "-set")
      assert.strictEqual(yield* refusalOf("GET"), "SET")
    }).pipe(Effect.scoped))

  it.effect("needs to grant no more than the documented permissions, and each of them", () =>
    Effect.gen(function*() {
      const namespace = "some:app"
      const server = yield* standalone({ acl: [`user app on >secret ${rules(namespace).join(" ")}`] })
      const url = `redis://app:secret@127.0.0.1:${server.port}`
      const dangerous = new Set([
        ...(yield* server.cli("ACL", "CAT", "dangerous")).split("\n"),
        ...(yield* server.cli("ACL", "CAT", "admin")).split("\n")
      ])
      for (const rule of rules(namespace)) assert.isFalse(dangerous.has(rule.slice(1)), rule)
      yield* basics(server, { url }, namespace)

      const without = (...rules: ReadonlyArray<string>) =>
        Effect.gen(function*() {
          yield* server.cli("ACL", "SETUSER", "app", ...rules.map((rule) => rule.replace("+", "-")))
          const reason = yield* quickly(refusal({ url }, { namespace }), `without ${rules.join(" ")}`)
          yield* server.cli("ACL", "SETUSER", "app", ...rules)
          assert.strictEqual(reason._tag, "MissingPermission", rules.join(" "))
          return reason._tag === "MissingPermission" ? reason.command : ""
        })
      for (const rule of [...reading, ...inside]) {
        const command = yield* without(rule)
        // These are needed before the actor can answer; older servers name the call, newer ones the command.
        if (["+time", "+hmget", "+get"].includes(rule)) assert.match(command, /^(FCALL|EVAL|TIME|HMGET|GET)/)
        else assert.strictEqual(command, rule.slice(1).toUpperCase())
      }
      yield* without("+fcall", ...calling.scripts)
      yield* without("+function|load", ...calling.scripts)
      assert.strictEqual((yield* refusal({ url }, { namespace: "another" }))._tag, "MissingPermission")
      yield* assertEmpty(server, namespace)
      yield* assertEmpty(server, "another")

      // Permissions that are taken away later.
      yield* Effect.scoped(Effect.gen(function*() {
        const context = yield* over({ url }, { namespace, partitions: 16 })
        yield* server.cli("ACL", "SETUSER", "app", "-hset")
        const error = yield* Effect.flip(Effect.provideContext(Lock.withLock(Effect.void, "a"), context))
        assert.strictEqual(redisReason(error), "MissingPermission")
        yield* server.cli("ACL", "SETUSER", "app", "+hset")
        yield* Effect.provideContext(Lock.withLock(Effect.void, "a"), context)
      }))
      yield* assertEmpty(server, namespace)
    }))

  it("asks for every command that an actor calls", () => {
    const granted = [...reading, ...inside].map((rule) => rule.replace(/^\+/, ""))
    const called = [...body.matchAll(/(?:call|tryGroup)\('([A-Z]+)'(?:, '([A-Z]+)')?/g)]
    assert.isAbove(called.length, 100)
    for (const [, name, subcommand] of called) {
      const command = name!.toLowerCase()
      assert.isTrue(granted.includes(command) || granted.includes(`${command}|${subcommand?.toLowerCase()}`), name)
    }
  })

  it.effect("a release that is refused for a while is made up for, while the session lives on", () =>
    Effect.gen(function*() {
      const server = yield* standalone({ acl: [`user app on >secret ${keys("t*").join(" ")} +@all`] })
      const namespace = freshNamespace()
      const options = { namespace, partitions: 1, lease: "6 seconds" } as const
      yield* Effect.scoped(Effect.gen(function*() {
        const mine = yield* over({ url: `redis://app:secret@127.0.0.1:${server.port}` }, options)
        const other = yield* over({ url: server.url }, options)
        const held = yield* Effect.provideContext(holding("a"), mine)
        const before = yield* Effect.provideContext(Effect.flatMap(Coordinator.Coordinator, (it) => it.sessions), mine)
        yield* server.cli("ACL", "SETUSER", "app", "-fcall")
        const leaving = yield* Effect.forkChild(held.leave)
        const next = yield* Effect.forkChild(Lock.withLock(Effect.void, "a").pipe(onNode(other)))
        yield* eventually(Effect.map(server.cli("ACL", "LOG"), (log) => log.includes("fcall")))
        yield* server.cli("ACL", "SETUSER", "app", "+fcall")
        yield* quickly(Effect.andThen(Fiber.join(leaving), Fiber.join(next)), "the release", 4000)
        const after = yield* Effect.provideContext(Effect.flatMap(Coordinator.Coordinator, (it) => it.sessions), mine)
        assert.strictEqual(after[0]!.id, before[0]!.id)
      }))
      yield* assertEmpty(server, namespace)
    }))

  it.effect("may deny functions: scripts do the same", () =>
    Effect.gen(function*() {
      const namespace = freshNamespace()
      const denied = rules(namespace).filter((rule) => !calling.functions.includes(rule))
      const server = yield* standalone({ acl: [`user app on >secret ${denied.join(" ")}`] })
      yield* basics(server, { url: `redis://app:secret@127.0.0.1:${server.port}` }, namespace)
      assert.strictEqual(yield* server.cli("FUNCTION", "LIST"), "")
    }))

  it.effect("cannot be used when a command is renamed, and says which", () =>
    Effect.gen(function*() {
      const server = yield* standalone({ config: { "rename-command": ["UNLINK \"\"", "XCLAIM other"] } })
      const reason = yield* refusal({ url: server.url }, { namespace: freshNamespace() })
      assert.strictEqual(reason._tag, "UnsupportedServer")
      assert.include(reason.message, "UNLINK")
    }))

  it.effect("may have renamed functions: scripts do the same, also after SCRIPT FLUSH", () =>
    Effect.gen(function*() {
      const server = yield* standalone({
        config: { "rename-command": ["FUNCTION \"\"", "FCALL \"\"", "FCALL_RO \"\""] }
      })
      const namespace = freshNamespace()
      const flushing = yield* Effect.forkChild(
        Effect.forever(Effect.andThen(server.cli("SCRIPT", "FLUSH"), realSleep(20)))
      )
      yield* basics(server, { url: server.url }, namespace)
      yield* Fiber.interrupt(flushing)
    }))

  it.effect("may speak protocol 2 alone: mailboxes and topics are read all the same", () =>
    Effect.gen(function*() {
      const server = yield* standalone({ config: { "rename-command": ["HELLO \"\""] } })
      const namespace = freshNamespace()
      yield* basics(server, { url: server.url }, namespace)
      const context = yield* over({ url: server.url }, { namespace })
      yield* Effect.gen(function*() {
        const topic = yield* Topic.make({ name: "a", schema: Schema.Number })
        yield* topic.publish(1)
        const events = yield* Effect.forkChild(
          Stream.runCollect(Stream.take(Topic.values(topic.subscribe({ from: "beginning" })), 3))
        )
        yield* Effect.forEach([2, 3], (event) => Effect.andThen(realSleep(100), topic.publish(event)))
        assert.deepStrictEqual(yield* quickly(Fiber.join(events), "the events"), [1, 2, 3])
        yield* topic.purge
      }).pipe(Effect.scoped, Effect.provideContext(context))
    }).pipe(Effect.scoped))

  it.effect("may want TLS", () =>
    Effect.gen(function*() {
      const server = yield* standalone({ tls: true })
      yield* basics(server, { url: server.url, tls: { ca: server.tls!.ca } }, freshNamespace())
    }))

  it.effect("has one number of partitions for a namespace, while one of its coordinators is alive", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      yield* Effect.scoped(Effect.gen(function*() {
        const context = yield* node(server.url, { namespace, partitions: 4 })
        for (const partitions of [1, 3, 5, 16]) {
          const reason = yield* refusal({ url: server.url }, { namespace, partitions })
          assert.isTrue(reason._tag === "Incompatible")
          if (reason._tag === "Incompatible") {
            assert.deepStrictEqual([reason.partitions, reason.expectedPartitions], [4, partitions])
          }
        }
        yield* node(server.url, { namespace, partitions: 4 })
        yield* Lock.withLock(Effect.void, "a").pipe(Effect.provideContext(context))
      }))
      // With no process there, the namespace adopts another number.
      yield* Effect.scoped(node(server.url, { namespace, partitions: 5 }))
      yield* assertEmpty(server, namespace)
    }))
})
