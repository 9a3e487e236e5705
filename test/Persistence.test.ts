import { assert, describe, layer } from "@effect/vitest"
import * as Context from "effect/Context"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Fiber from "effect/Fiber"
import * as Layer from "effect/Layer"
import * as CircuitBreaker from "effect/persistence/CircuitBreaker"
import * as PersistedQueue from "effect/persistence/PersistedQueue"
import * as Persistence from "effect/persistence/Persistence"
import * as RateLimiter from "effect/persistence/RateLimiter"
import * as EffectRedis from "effect/persistence/Redis"
import * as Queue from "effect/Queue"
import * as Schema from "effect/Schema"
import * as IoRedis from "ioredis"
import { execFileSync, spawn } from "node:child_process"
import * as fs from "node:fs"
import * as net from "node:net"
import * as os from "node:os"
import * as path from "node:path"
import { connectionsOf } from "../src/internal/redis/connection.ts"
import * as Redis from "../src/Redis.ts"
import { cliBinary, serverBinary } from "./support/binaries.ts"

const eventually = <A>(what: string, f: () => A | undefined | false | Promise<A | undefined | false>) =>
  Effect.promise(async () => {
    const deadline = performance.now() + 20_000
    for (;;) {
      const value = await f()
      if (value !== undefined && value !== false) return value as A
      if (performance.now() > deadline) throw new Error(`Never happened: ${what}`)
      await new Promise((resolve) => setTimeout(resolve, 20))
    }
  })

const isFree = (port: number) =>
  new Promise<boolean>((resolve) => {
    const server = net.createServer()
    server.once("error", () => resolve(false))
    server.listen(port, "127.0.0.1", () => server.close(() => resolve(true)))
  })

/** With a free one 10000 higher for the cluster bus, both below those that the system gives to clients. */
const freePort = Effect.promise(async () => {
  for (;;) {
    const port = 10_000 + Math.floor(Math.random() * 12_000)
    if (await isFree(port) && await isFree(port + 10_000)) return port
  }
})

interface Node {
  readonly port: number
  readonly client: IoRedis.Redis
  readonly pid: number
}

/** A cluster of three primaries. */
class Cluster extends Context.Service<Cluster, { readonly nodes: ReadonlyArray<Node> }>()("test/Cluster") {
  static readonly layer = Layer.effect(
    Cluster,
    Effect.gen(function*() {
      const directory = yield* Effect.acquireRelease(
        Effect.sync(() => fs.mkdtempSync(path.join(os.tmpdir(), "lockstep-test-"))),
        (directory) => Effect.sync(() => fs.rmSync(directory, { recursive: true, force: true }))
      )
      const nodes = yield* Effect.forEach([0, 1, 2], () =>
        Effect.gen(function*() {
          const port = yield* freePort
          const child = yield* Effect.acquireRelease(
            Effect.sync(() =>
              spawn(
                serverBinary(),
                [
                  ...["--bind", "127.0.0.1", "--port", `${port}`, "--save", "", "--dir", directory],
                  ...["--cluster-enabled", "yes", "--cluster-config-file", `${port}.conf`],
                  ...["--cluster-node-timeout", "5000"]
                ],
                { stdio: "ignore" }
              )
            ),
            (child) =>
              Effect.promise(() =>
                new Promise((resolve) => {
                  child.once("exit", resolve)
                  child.kill("SIGKILL")
                })
              )
          )
          const client = yield* Effect.acquireRelease(
            Effect.sync(() => new IoRedis.Redis({ port, host: "127.0.0.1", retryStrategy: () => 50 })),
            (client) => Effect.sync(() => client.disconnect())
          )
          client.on("error", () => {})
          yield* Effect.promise(() => client.ping())
          return { port, client, pid: child.pid! }
        }))
      // What the client says is part of the error when it fails.
      execFileSync(cliBinary(), [
        ...["--cluster", "create", ...nodes.map((node) => `127.0.0.1:${node.port}`)],
        ...["--cluster-replicas", "0", "--cluster-yes"]
      ], { stdio: "pipe" })
      yield* eventually("the cluster is up", async () => {
        const states = await Promise.all(nodes.map((node) => node.client.cluster("INFO")))
        return states.every((state) => String(state).includes("cluster_state:ok"))
      })
      return { nodes }
    })
  )
}

const onCluster = Layer.unwrap(
  Effect.map(
    Cluster,
    ({ nodes }) => Redis.layer({ cluster: nodes.slice(0, 1).map((node) => ({ host: "127.0.0.1", port: node.port })) })
  )
)

const topologies = (
  name: string,
  connected: Layer.Layer<Redis.Redis | EffectRedis.Redis, Redis.RedisError>
) =>
  layer(connected, { excludeTestServices: true, timeout: "60 seconds" })(name, (it) => {
    it.effect("RateLimiter", () =>
      Effect.gen(function*() {
        const limiter = yield* RateLimiter.RateLimiter
        for (const algorithm of ["fixed-window", "token-bucket"] as const) {
          // The token bucket has two keys, which a hash tag keeps together.
          const options = { algorithm, key: `{${algorithm}}`, limit: 2, window: "1 minute" } as const
          yield* limiter.consume(options)
          yield* limiter.consume(options)
          const error = yield* Effect.flip(limiter.consume(options))
          assert.strictEqual(error.reason._tag, "RateLimitExceeded")
        }
      }).pipe(
        Effect.provide(RateLimiter.layer.pipe(Layer.provide(RateLimiter.layerStoreRedis())))
      ))

    it.effect("CircuitBreaker", () =>
      Effect.gen(function*() {
        const breaker = yield* CircuitBreaker.make({
          tripPolicy: CircuitBreaker.consecutive(2),
          openDuration: "1 minute"
        })
        for (const key of ["a", "b", "c", "d"]) {
          const call = Effect.fail("down").pipe(breaker.execute({ key }))
          yield* Effect.flip(call)
          yield* Effect.flip(call)
          const error = yield* Effect.flip(call)
          assert.isTrue(error instanceof CircuitBreaker.CircuitBreakerError && error.reason._tag === "CircuitOpen")
          assert.strictEqual((yield* breaker.state(key))._tag, "Open")
        }
      }).pipe(Effect.scoped, Effect.provide(CircuitBreaker.layerStoreRedis())))

    it.effect("PersistedQueue", () =>
      Effect.gen(function*() {
        const queue = yield* PersistedQueue.make({ name: "numbers", schema: Schema.Number })
        const taken = yield* Effect.forkChild(Effect.forEach([1, 2, 3], () => queue.take(Effect.succeed)))
        yield* Effect.forEach([1, 2, 3], (n) => queue.offer(n))
        assert.deepStrictEqual((yield* Fiber.join(taken)).sort(), [1, 2, 3])
        const store = yield* PersistedQueue.PersistedQueueStore
        // Scans for the keys of all queues.
        yield* store.cleanup({ timeToLive: Duration.minutes(1), failedTimeToLive: Duration.minutes(1) })
      }).pipe(
        Effect.provide(
          PersistedQueue.layer.pipe(
            Layer.provideMerge(PersistedQueue.layerStoreRedis({ prefix: "{queues}:", pollInterval: "50 millis" }))
          )
        )
      ))

    it.effect("Persistence", () =>
      Effect.gen(function*() {
        const backing = yield* Persistence.BackingPersistence
        // One key at a time and reading many need no hash tag.
        const spread = yield* backing.make("spread")
        const keys = ["a", "b", "c", "d", "e"] as const
        yield* Effect.forEach(keys, (key) => spread.set(key, { key }, undefined))
        assert.deepStrictEqual(yield* spread.getMany(keys as never), keys.map((key) => ({ key })) as never)
        yield* spread.remove("a")
        assert.strictEqual(yield* spread.get("a"), undefined)
        yield* spread.clear
        assert.deepStrictEqual(yield* spread.getMany(keys as never), keys.map(() => undefined) as never)
        // Writing many is one script.
        const together = yield* backing.make("{together}")
        yield* together.setMany([["a", { a: 1 }, undefined], ["b", { b: 1 }, Duration.minutes(1)]])
        assert.deepStrictEqual(yield* together.getMany(["a", "b"]), [{ a: 1 }, { b: 1 }])
        yield* together.clear
        assert.strictEqual(yield* together.get("b"), undefined)
      }).pipe(Effect.scoped, Effect.provide(Persistence.layerBackingRedis)))

    it.effect("scripts are loaded again when the server has lost them", () =>
      Effect.gen(function*() {
        const redis = yield* EffectRedis.Redis
        const script = EffectRedis.script((key: string) => [key], { lua: "return KEYS[1]", numberOfKeys: 1 })
          .withReturnType<string>()
        const run = redis.eval(script)
        for (const key of ["a", "b", "c", "d"]) assert.strictEqual(yield* run(key), key)
        const { commands } = connectionsOf(yield* Redis.Redis)
        const masters = "masters" in commands ? (commands as any).masters() : [commands]
        for (const master of masters) yield* Effect.promise(() => master.send("SCRIPT", ["FLUSH"], 1000))
        for (const key of ["d", "c", "b", "a"]) assert.strictEqual(yield* run(key), key)
        const reserved = yield* redis.reserve
        for (const key of ["a", "b", "c"]) assert.strictEqual(yield* reserved.eval(script)(key), key)
      }).pipe(Effect.scoped))

    it.effect("reserved connections block alone", () =>
      Effect.gen(function*() {
        const redis = yield* EffectRedis.Redis
        const pops = yield* Effect.forEach(
          ["one", "two", "three"],
          (key) => Effect.forkChild(Effect.scoped(Effect.flatMap(redis.reserve, (own) => own.send("BLPOP", key, "0"))))
        )
        assert.strictEqual(yield* redis.send("PING"), "PONG")
        for (const key of ["one", "two", "three"]) yield* redis.send("RPUSH", key, key)
        for (const [i, key] of ["one", "two", "three"].entries()) {
          assert.deepStrictEqual(yield* Fiber.join(pops[i]!), [key, key])
        }
        const error = yield* Effect.flip(redis.send("LPUSH"))
        assert.instanceOf(error.cause, Redis.RedisError)
      }))

    it.effect("subscriptions share a connection and survive its loss", () =>
      Effect.gen(function*() {
        const redis = yield* EffectRedis.Redis
        const own = yield* Redis.Redis
        const first = yield* redis.subscribe("channel")
        const second = yield* redis.subscribe("channel")
        const other = yield* redis.subscribe("other")
        // A published message is only delivered to those whose subscription has arrived.
        const delivered = (channel: string, message: string) =>
          eventually(
            `${message} is delivered`,
            async () => Number(await Effect.runPromise(redis.send("PUBLISH", channel, message))) > 0
          )
        const message = (queue: typeof first) => Effect.map(Queue.take(queue), ({ message }) => message)
        if (own.topology === "standalone") {
          yield* delivered("channel", "m1")
          assert.deepStrictEqual(yield* Effect.all([message(first), message(second)]), ["m1", "m1"])
          yield* delivered("other", "o1")
          assert.strictEqual(yield* message(other), "o1")
          assert.strictEqual(yield* own.send("CLIENT", "KILL", "TYPE", "pubsub"), 1)
          yield* delivered("channel", "m2")
          assert.deepStrictEqual(yield* Effect.all([message(first), message(second)]), ["m2", "m2"])
          yield* delivered("other", "o2")
          assert.strictEqual(yield* message(other), "o2")
        } else {
          // The publisher's node counts only its own subscribers: publish until one arrives.
          const publishing = yield* Effect.forkChild(
            Effect.forever(Effect.andThen(redis.send("PUBLISH", "channel", "m1"), Effect.sleep("20 millis")))
          )
          assert.deepStrictEqual(yield* Effect.all([message(first), message(second)]), ["m1", "m1"])
          yield* Fiber.interrupt(publishing)
        }
      }).pipe(Effect.scoped))
  })

describe("effect/persistence over Redis", () => {
  topologies("standalone", Redis.layerEmbedded())
  topologies("cluster", onCluster.pipe(Layer.provide(Cluster.layer)))
})

layer(Cluster.layer, { excludeTestServices: true, timeout: "60 seconds" })("Redis Cluster", (it) => {
  const slotKey = (tag: string) => `{${tag}}:key`
  const slotOf = (key: string) => new IoRedis.Command("get", [key]).getSlot()

  /** Moves a slot as the client does, with the keys in it. */
  const move = async (nodes: ReadonlyArray<Node>, key: string) => {
    const slot = slotOf(key)
    const ids = await Promise.all(nodes.map(async (node) => String(await node.client.call("CLUSTER", "MYID"))))
    const owners = await Promise.all(
      nodes.map(async (node) => String(await node.client.call("CLUSTER", "COUNTKEYSINSLOT", slot)) !== "0")
    )
    const from = owners.indexOf(true)
    const to = (from + 1) % nodes.length
    await nodes[to]!.client.call("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[from]!)
    await nodes[from]!.client.call("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[to]!)
    const keys = await nodes[from]!.client.call("CLUSTER", "GETKEYSINSLOT", slot, 100) as Array<string>
    for (const key of keys) await nodes[from]!.client.call("MIGRATE", "127.0.0.1", nodes[to]!.port, key, 0, 1000)
    for (const node of [nodes[to]!, nodes[from]!]) await node.client.call("CLUSTER", "SETSLOT", slot, "NODE", ids[to]!)
  }

  it.effect("routes by key, and follows a slot that moves, on the shared and on dedicated connections", () =>
    Effect.gen(function*() {
      const { nodes } = yield* Cluster
      const redis = yield* Redis.Redis
      assert.strictEqual(redis.topology, "cluster")
      assert.isTrue(connectionsOf(redis).features.functions)
      for (const tag of ["a", "b", "c", "d", "e", "f"]) yield* redis.send("RPUSH", slotKey(tag), tag)
      const key = slotKey("a")
      const dedicated = yield* redis.connect({ key })
      assert.strictEqual(yield* dedicated.send("LINDEX", key, 0), "a")
      yield* Effect.promise(() => move(nodes, key))
      assert.strictEqual(yield* redis.send("LINDEX", key, 0), "a")
      // The first command is answered that the slot has moved, and the connection goes after it.
      yield* eventually("the dedicated connection has moved", async () => {
        const exit = await Effect.runPromiseExit(dedicated.send("LINDEX", key, 0))
        return Exit.isSuccess(exit) && exit.value === "a"
      })
      assert.strictEqual(
        yield* dedicated.send("BLPOP", slotKey("a"), 1).pipe(Effect.map((reply: any) => reply[1])),
        "a"
      )
    }).pipe(Effect.scoped, Effect.provide(onCluster)))

  it.effect("a reservation refuses what one of its connections alone would know, and keeps few of them", () =>
    Effect.gen(function*() {
      const { nodes } = yield* Cluster
      const reserved = yield* (yield* EffectRedis.Redis).reserve
      for (const command of [["MULTI"], ["WATCH", "a"], ["EXEC"], ["DISCARD"], ["AUTH", "a", "b"]] as const) {
        const [name, ...args] = command
        const exit = yield* Effect.exit(reserved.send(name, ...args))
        assert.include(String(exit), `RangeError: Redis: ${name} would change one of several connections on a Cluster`)
      }
      const keys = Array.from({ length: 40 }, (_, n) => slotKey(`reserved${n}`))
      for (const key of keys) assert.strictEqual(yield* reserved.send("SET", key, key), "OK")
      const replies = yield* Effect.forEach(keys, (key) => reserved.send("GET", key), { concurrency: 10 })
      assert.deepStrictEqual(replies, keys)
      yield* eventually("the others are closed", async () => {
        const lists = await Promise.all(nodes.map(({ client }) => client.client("LIST")))
        return lists.join("").split(":reserved ").length - 1 <= 4
      })
      for (const key of keys) yield* reserved.send("DEL", key)
    }).pipe(Effect.scoped, Effect.provide(onCluster)))

  it.effect("a node that stops answering costs only the commands that need it", () =>
    Effect.gen(function*() {
      const { nodes } = yield* Cluster
      const redis = yield* Redis.Redis
      const { commands } = connectionsOf(redis)
      const owner = async (key: string) => {
        for (const node of nodes) {
          try {
            await node.client.get(key)
            return node
          } catch {
            continue
          }
        }
        throw new Error("nobody serves it")
      }
      const stopped = yield* Effect.promise(() => owner(slotKey("stopped")))
      const other = yield* Effect.promise(async () => {
        for (let i = 0;; i++) if (await owner(slotKey(`other${i}`)) !== stopped) return slotKey(`other${i}`)
      })
      assert.strictEqual(yield* redis.send("SET", slotKey("stopped"), 1), "OK")
      assert.strictEqual(yield* redis.send("SET", other, 1), "OK")
      const tag = (promise: Promise<unknown>) =>
        Effect.promise(() => promise.then(() => "answered", (error: Redis.RedisError) => error.reason._tag as string))
      process.kill(stopped.pid, "SIGSTOP")
      yield* Effect.addFinalizer(() => Effect.sync(() => process.kill(stopped.pid, "SIGCONT")))
      const late = commands.send("INCR", [slotKey("stopped")], 60_000)
      assert.strictEqual(yield* tag(commands.send("INCR", [slotKey("stopped")], 100)), "Timeout")
      commands.reset()
      assert.strictEqual(yield* tag(late), "ConnectionLost")
      assert.strictEqual(yield* tag(commands.send("GET", [other], 1000)), "answered")
      process.kill(stopped.pid, "SIGCONT")
      yield* eventually("it answers again", () =>
        commands.send("GET", [slotKey("stopped")], 1000).then(() => true, () => false))
    }).pipe(Effect.scoped, Effect.provide(onCluster)))

  it.effect("closing the last subscription sets no timer in the past", () =>
    Effect.gen(function*() {
      const warnings: Array<string> = []
      const warned = (warning: Error) => void warnings.push(`${warning.name}: ${warning.message}`)
      process.on("warning", warned)
      yield* Effect.addFinalizer(() => Effect.sync(() => process.off("warning", warned)))
      const redis = yield* EffectRedis.Redis
      // The first chase for the owners of slots has no predecessor to keep a distance from.
      yield* eventually("time has passed", () => performance.now() > 300)
      yield* Effect.scoped(redis.subscribe("channel"))
      yield* eventually(
        "the warning would have been given",
        () => new Promise<boolean>((resolve) => setImmediate(() => resolve(true)))
      )
      assert.deepStrictEqual(warnings, [])
    }).pipe(Effect.scoped, Effect.provide(onCluster)))

  it.effect("from a Cluster client of the user's, which stays as it is", () =>
    Effect.gen(function*() {
      const { nodes } = yield* Cluster
      const client = yield* Effect.acquireRelease(
        Effect.sync(() => new IoRedis.Cluster([{ host: "127.0.0.1", port: nodes[1]!.port }])),
        (client) => Effect.sync(() => client.disconnect())
      )
      yield* Effect.gen(function*() {
        const redis = yield* Redis.Redis
        assert.notStrictEqual(redis.client as unknown, client)
        assert.strictEqual(yield* redis.send("SET", "user", 1), "OK")
      }).pipe(Effect.provide(Redis.layerFromClient(client)))
      assert.strictEqual(yield* Effect.promise(() => client.get("user")), "1")
    }))
})
