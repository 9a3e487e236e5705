/** What a layer is made of: its identity, and its clocks and timers. */

import { assert, describe, it } from "@effect/vitest"
import * as Context from "effect/Context"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as EffectRedis from "effect/persistence/Redis"
import * as Redacted from "effect/Redacted"
import * as IoRedis from "ioredis"
import { CurrentIo, type Io, live, type Timer } from "../src/internal/io.ts"
import { connectionsOf } from "../src/internal/redis/connection.ts"
import { resolve, resolveClient } from "../src/internal/redis/resolve.ts"
import * as Redis from "../src/Redis.ts"
import { cluster } from "./support/cluster.ts"
import { standalone } from "./support/servers.ts"

const secret = "s3cret-passw0rd"
const password = Redacted.make(secret)

const identities = (sources: ReadonlyArray<{ readonly identity: string; readonly address: string }>) => {
  for (const { address, identity } of sources) assert.notInclude(identity + address, secret)
  return new Set(sources.map(({ identity }) => identity))
}

const one = (options: IoRedis.RedisOptions) =>
  resolveClient(new IoRedis.Redis({ ...options, lazyConnect: true } as object))

const many = (nodes: ReadonlyArray<IoRedis.ClusterNode>) =>
  resolveClient(new IoRedis.Cluster([...nodes], { lazyConnect: true }))

describe("the identity of connections", () => {
  it("is the same for one server and database, however they are given", () => {
    const same = identities([
      resolve({ url: `redis://app:${secret}@Example.com:6380/3` }),
      resolve({ host: "example.com", port: 6380, db: 3, password, clientName: "other" }),
      one({ host: "example.com", port: 6380, db: 3, password: secret })
    ])
    assert.strictEqual(same.size, 1)
    assert.strictEqual(identities([resolve({ url: "unix:///tmp/A.sock" }), one({ path: "/tmp/A.sock" })]).size, 1)
    assert.strictEqual(identities([resolve({}), one({})]).size, 1)
  })

  it("is the same for one primary of Sentinels or one Cluster, in whatever order their hosts are given", () => {
    const [a, b] = [{ host: "a", port: 1 }, { host: "b", port: 2 }]
    const sentinels = identities([
      resolve({ sentinels: [a, b], name: "primary" }),
      resolve({ sentinels: [b, a], name: "primary", sentinelPassword: password }),
      one({ sentinels: [b, a], name: "primary" })
    ])
    assert.strictEqual(sentinels.size, 1)
    const clusters = identities([
      resolve({ cluster: [a, b] }),
      resolve({ cluster: [b, a], password }),
      many([a, b]),
      many([`redis://:${secret}@b:2`, "a:1"])
    ])
    assert.strictEqual(clusters.size, 1)
  })

  it("differs for another server, database or primary", () => {
    const [a, b] = [{ host: "a", port: 1 }, { host: "b", port: 2 }]
    const sources = [
      resolve({}),
      resolve({ db: 1 }),
      resolve({ port: 6380 }),
      resolve({ host: "other" }),
      resolve({ path: "/tmp/a" }),
      resolve({ path: "/tmp/A" }),
      resolve({ cluster: [{ host: "localhost" }] }),
      resolve({ cluster: [a, b] }),
      resolve({ sentinels: [a, b], name: "primary" }),
      resolve({ sentinels: [a, b], name: "other" }),
      resolve({ sentinels: [a, b], name: "primary", db: 1 })
    ]
    assert.strictEqual(identities(sources).size, sources.length)
  })

  it.live("is that of the connections behind a service", () =>
    Effect.gen(function*() {
      const { port } = yield* standalone()
      const identity = (layer: Layer.Layer<Redis.Redis, Redis.RedisError>) =>
        Effect.map(Layer.build(layer), (context) => connectionsOf(Context.get(context, Redis.Redis)).identity)
      const first = yield* identity(Redis.layer({ url: `redis://127.0.0.1:${port}` }))
      const second = yield* identity(Layer.fresh(Redis.layer({ host: "127.0.0.1", port })))
      assert.strictEqual(first, second)
      assert.notStrictEqual(yield* identity(Redis.layer({ host: "127.0.0.1", port, db: 1 })), first)
    }).pipe(Effect.scoped), 20_000)
})

/** Live, and knows which timers are set. */
const counting = () => {
  const pending = new Set<Timer>()
  const faults: Array<string> = []
  const io: Io = {
    ...live,
    after: (millis, f) => {
      if (!(millis >= 0 && millis < 2 ** 31)) faults.push(`after ${millis}`)
      const inner = live.after(millis, () => {
        pending.delete(timer)
        f()
      })
      const timer: Timer = {
        cancel: () => {
          pending.delete(timer)
          inner.cancel()
        }
      }
      pending.add(timer)
      return timer
    }
  }
  return { io, pending, faults }
}

/** Every kind of connection once. */
const exercise = Effect.gen(function*() {
  const redis = yield* Redis.Redis
  const effect = yield* EffectRedis.Redis
  assert.strictEqual(yield* redis.send("SET", "a", 1), "OK")
  const own = yield* redis.connect({ key: "a" })
  // Longer than any timer can be set to.
  yield* Effect.timeoutOption(own.send("BLPOP", "list", 4_000_000), 50)
  yield* effect.subscribe("channel")
  yield* effect.send("SCAN", "0")
  yield* Effect.scoped(Effect.flatMap(effect.reserve, (reserved) => reserved.send("GET", "a")))
})

describe("the timers of a layer", () => {
  const check = (layer: Layer.Layer<Redis.Redis | EffectRedis.Redis, Redis.RedisError>) =>
    Effect.gen(function*() {
      const { faults, io, pending } = counting()
      yield* Effect.scoped(Effect.gen(function*() {
        const context = yield* Layer.build(layer)
        assert.isAbove(pending.size, 0, "the timers come from somewhere else")
        yield* Effect.provideContext(exercise, context)
      })).pipe(Effect.provideService(CurrentIo, io))
      yield* Effect.sleep(20)
      assert.strictEqual(pending.size, 0)
      assert.deepStrictEqual(faults, [])
    })

  it.live("are those of CurrentIo, and none is left when it is closed", () =>
    Effect.gen(function*() {
      const { port } = yield* standalone()
      yield* check(Redis.layer({ host: "127.0.0.1", port }))
      yield* check(Redis.layerEmbedded())
    }).pipe(Effect.scoped), 20_000)

  it.live("on a Cluster too", () =>
    Effect.gen(function*() {
      const { startupNodes } = yield* cluster()
      yield* check(Redis.layer({ cluster: startupNodes }))
    }).pipe(Effect.scoped), 60_000)
})
