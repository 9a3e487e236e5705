/** The permissions that Effect's own modules need, no more and no fewer, as the documentation of `Redis` has them. */

import { assert, describe, it } from "@effect/vitest"
import * as Context from "effect/Context"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as CircuitBreaker from "effect/persistence/CircuitBreaker"
import * as PersistedQueue from "effect/persistence/PersistedQueue"
import * as Persistence from "effect/persistence/Persistence"
import * as RateLimiter from "effect/persistence/RateLimiter"
import * as EffectRedis from "effect/persistence/Redis"
import * as Queue from "effect/Queue"
import * as Schedule from "effect/Schedule"
import * as Schema from "effect/Schema"
import type * as Scope from "effect/Scope"
import * as fs from "node:fs"
import * as Redis from "../src/Redis.ts"
import { eventually } from "./support/eventually.ts"
import { type Server, standalone } from "./support/servers.ts"

const common = ["+script|load", "+evalsha"]

const exercisePersistence = Effect.gen(function*() {
  const backing = yield* Persistence.BackingPersistence
  const store = yield* backing.make("app:users")
  yield* store.set("a", { a: 1 }, undefined)
  yield* store.set("b", { b: 1 }, Duration.minutes(1))
  yield* store.setMany([["c", { c: 1 }, undefined], ["d", { d: 1 }, Duration.minutes(1)]])
  assert.deepStrictEqual(yield* store.get("a"), { a: 1 })
  assert.deepStrictEqual(yield* store.getMany(["b", "c"]), [{ b: 1 }, { c: 1 }])
  yield* store.remove("a")
  yield* store.clear
  assert.strictEqual(yield* store.get("d"), undefined)
}).pipe(Effect.scoped, Effect.provide(Persistence.layerBackingRedis))

const exerciseRateLimiter = Effect.gen(function*() {
  const limiter = yield* RateLimiter.RateLimiter
  for (const algorithm of ["fixed-window", "token-bucket"] as const) {
    const options = { algorithm, key: algorithm, limit: 1, window: "1 minute" } as const
    yield* limiter.consume(options)
    assert.strictEqual((yield* Effect.flip(limiter.consume(options))).reason._tag, "RateLimitExceeded")
  }
  const key = "adaptive"
  const window = Duration.seconds(1)
  const { epoch } = yield* limiter.adaptiveConsume({ key, tokens: 1, fallbackLimit: 1, fallbackWindow: window })
  yield* limiter.adaptiveFeedback({ key, epoch, tokens: 1, status: 429, retryAfter: window })
}).pipe(Effect.provide(RateLimiter.layer.pipe(Layer.provide(RateLimiter.layerStoreRedis({ prefix: "app:rate:" })))))

const exerciseCircuitBreaker = Effect.gen(function*() {
  const breaker = yield* CircuitBreaker.make({ tripPolicy: CircuitBreaker.consecutive(1), openDuration: "10 millis" })
  yield* Effect.flip(breaker.execute(Effect.fail("down"), { key: "a" }))
  yield* eventually(breaker.execute(Effect.succeed(true), { key: "a" }))
  assert.strictEqual((yield* breaker.state("a"))._tag, "Closed")
}).pipe(
  Effect.scoped,
  Effect.provide(CircuitBreaker.layerStoreRedis({ prefix: "app:breaker:", probeLease: "30 millis" }))
)

const exercisePersistedQueue = (server: Server) =>
  Effect.gen(function*() {
    const queue = yield* PersistedQueue.make({
      name: "numbers",
      schema: Schema.Number,
      maxAttempts: 2,
      retrySchedule: Schedule.spaced(10)
    })
    yield* queue.offer(1)
    yield* queue.offer(2, { id: "two" })
    yield* queue.offer(3, { delay: 1 })
    yield* queue.offer(4, { id: "four", delay: 1 })
    yield* Effect.forEach([1, 2, 3, 4], () => queue.take(() => Effect.sleep(60)))
    // The second of two failures is the last; an interruption counts for none.
    yield* queue.offer(5, { id: "five" })
    yield* Effect.flip(queue.take(() => Effect.fail("once")))
    yield* Effect.flip(queue.take(() => Effect.fail("twice")))
    yield* queue.offer(6)
    yield* Effect.timeoutOption(queue.take(() => Effect.never), 200)
    yield* queue.take(Effect.succeed)
    // An element of a consumer that has died, and one that has been tried too often.
    const prefix = "app:queue:numbers"
    yield* server.cli("HSET", `${prefix}:pending`, "dead", `{"id":"dead","element":7}`)
    yield* server.cli("HSET", `${prefix}:attempts`, "worn", 2)
    yield* server.cli("HSET", `${prefix}:pending`, "worn", `{"id":"worn","element":8}`)
    assert.strictEqual(yield* queue.take(Effect.succeed), 7)
    const store = yield* PersistedQueue.PersistedQueueStore
    yield* store.cleanup({ timeToLive: Duration.zero, failedTimeToLive: Duration.zero })
  }).pipe(Effect.provide(
    PersistedQueue.layer.pipe(Layer.provideMerge(PersistedQueue.layerStoreRedis({
      ...{
        prefix: "app:queue:",
        pollInterval: "10 millis",
        lockRefreshInterval: "20 millis",
        lockExpiration: "5 seconds"
      }
    })))
  ))

interface Module {
  readonly name: string
  readonly rules: ReadonlyArray<string>
  readonly exercise: (server: Server) => Effect.Effect<void, unknown, EffectRedis.Redis | Scope.Scope>
}

const modules: ReadonlyArray<Module> = [
  {
    name: "Persistence",
    rules: ["~app%3A*", "+get", "+mget", "+set", "+pexpire", "+del", "+keys"],
    exercise: () => exercisePersistence
  },
  {
    name: "RateLimiter",
    rules: ["~app:rate:*", "+get", "+set", "+pttl", "+pexpire", "+hget", "+hset", "+time"],
    exercise: () => exerciseRateLimiter
  },
  {
    name: "CircuitBreaker",
    rules: ["~app:breaker:*", "+hmget", "+hset", "+pexpire", "+time"],
    exercise: () => exerciseCircuitBreaker
  },
  {
    name: "PersistedQueue",
    rules: [
      ...["~app:queue:*", "+scan", "+set", "+del", "+exists", "+hget", "+hgetall", "+hset", "+hdel", "+hincrby"],
      ...["+lindex", "+lpop", "+lrange", "+ltrim", "+rpush", "+zadd", "+zrangebyscore", "+zrem", "+zremrangebyscore"]
    ],
    exercise: exercisePersistedQueue
  }
]

/** All commands that clients have sent or scripts have called since the last reset, without those of `server.cli`. */
const commandsUsed = Effect.fnUntraced(function*(server: Server) {
  const stats = yield* server.cli("INFO", "commandstats")
  const own = new Set(["acl|log", "client|setname", "config|resetstat", "hello", "info", "ping", "auth"])
  return [...stats.matchAll(/cmdstat_([^:]+):/g)].map(([, name]) => name!).filter((name) => !own.has(name)).sort()
})

describe("permissions of effect/persistence", () => {
  for (const { exercise, name, rules } of modules) {
    it.live(`${name} needs those that are documented, and no others`, () =>
      Effect.gen(function*() {
        const acl = `user app on >secret resetchannels -@all ${[...common, ...rules].join(" ")}`
        const server = yield* standalone({ acl: [acl] })
        const context = yield* Layer.build(Redis.layer({ url: `redis://app:secret@127.0.0.1:${server.port}` }))
        // What the layer itself tries and can do without.
        yield* server.cli("ACL", "LOG", "RESET")
        yield* server.cli("CONFIG", "RESETSTAT")
        yield* Effect.provideService(
          Effect.scoped(exercise(server)),
          EffectRedis.Redis,
          Context.get(context, EffectRedis.Redis)
        )
        assert.strictEqual(yield* server.cli("ACL", "LOG"), "")
        const needed = [...common, ...rules].filter((rule) => rule.startsWith("+")).map((rule) => rule.slice(1))
        assert.deepStrictEqual(yield* commandsUsed(server), needed.sort())
      }).pipe(Effect.scoped), 30_000)
  }

  it("are documented", () => {
    const text = fs.readFileSync(new URL("../src/Redis.ts", import.meta.url), "utf8").replace(/\n \*\s*/g, " ")
    for (const { name, rules } of modules) {
      const documented = new RegExp(`\`${name}\`: \`([^\`]*)\``).exec(text)?.[1]
      assert.strictEqual(documented, rules.join(" "), name)
    }
    assert.include(text, `resetchannels -@all ${common.join(" ")}`)
  })

  it.live(
    "a subscription that may not be ended is ended here, and costs the others nothing",
    () =>
      Effect.gen(function*() {
        const server = yield* standalone({ acl: ["user app on >secret resetchannels &news &other -@all +subscribe"] })
        const context = yield* Layer.build(Redis.layer({ url: `redis://app:secret@127.0.0.1:${server.port}` }))
        const redis = Context.get(context, EffectRedis.Redis)
        const news = yield* redis.subscribe("news")
        const subscribers = server.cli("CLIENT", "LIST", "TYPE", "pubsub")
        const idOf = (list: string) => /\bid=(\d+)/.exec(list)![1]
        yield* Effect.scoped(Effect.andThen(redis.subscribe("other"), Effect.void))
        const id = idOf(yield* subscribers)
        yield* Effect.scoped(Effect.andThen(redis.subscribe("other"), Effect.void))
        yield* server.cli("PUBLISH", "news", "one")
        assert.strictEqual((yield* Queue.take(news)).message, "one")
        assert.strictEqual(idOf(yield* subscribers), id)
        assert.include(yield* server.cli("ACL", "LOG"), "unsubscribe")
      }).pipe(Effect.scoped),
    20_000
  )
})
