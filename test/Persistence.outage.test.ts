/** Effect's own modules while Redis is away: they wait as they do over Effect's own client. */

import { assert, describe, it } from "@effect/vitest"
import * as Context from "effect/Context"
import type * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Fiber from "effect/Fiber"
import * as Layer from "effect/Layer"
import * as PersistedQueue from "effect/persistence/PersistedQueue"
import * as EffectRedis from "effect/persistence/Redis"
import * as Queue from "effect/Queue"
import * as Schema from "effect/Schema"
import * as Redis from "../src/Redis.ts"
import { make as proxy } from "../src/testing/Proxy.ts"
import { elapsed } from "./support/awake.ts"
import { eventually, realSleep } from "./support/eventually.ts"
import { standalone } from "./support/servers.ts"

/** A server behind a line that can be cut, and both services over it. */
const behindLine = Effect.fnUntraced(function*(commandTimeout: Duration.Input) {
  const server = yield* standalone()
  const line = yield* proxy({ port: server.port })
  const context = yield* Layer.build(Redis.layer({ url: line.url, commandTimeout }))
  const redis = Context.get(context, Redis.Redis)
  const cut = line.refuse.pipe(
    Effect.andThen(line.closeAll),
    Effect.andThen(eventually(Effect.map(redis.state, (state) => state === "reconnecting")))
  )
  return { server, line, cut, context, redis, effect: Context.get(context, EffectRedis.Redis) }
})

describe("effect/persistence while Redis is away", () => {
  it.live("commands and scripts wait for the connection, and are sent once", () =>
    Effect.gen(function*() {
      const { cut, effect, line, redis, server } = yield* behindLine("5 seconds")
      const script = EffectRedis.script((key: string) => [key], {
        lua: "return redis.call('INCR', KEYS[1])",
        numberOfKeys: 1
      }).withReturnType<number>()
      yield* cut
      const sent = yield* Effect.forkChild(effect.send("INCR", "sent"))
      const scripted = yield* Effect.forkChild(effect.eval(script)("scripted"))
      const abandoned = yield* Effect.forkChild(effect.send("INCR", "abandoned"))
      // Those of this package still fail at once.
      assert.strictEqual((yield* Effect.flip(redis.send("PING"))).reason._tag, "NotConnected")
      yield* realSleep(200)
      yield* Fiber.interrupt(abandoned)
      yield* line.pass
      assert.strictEqual(yield* Fiber.join(sent), 1)
      assert.strictEqual(yield* Fiber.join(scripted), 1)
      assert.strictEqual(yield* server.cli("MGET", "sent", "scripted", "abandoned"), "1\n1\n")
    }).pipe(Effect.scoped), 20_000)

  it.live(
    "a command fails with the reason after commandTimeout, and when the layer is closed",
    () =>
      Effect.gen(function*() {
        const { cut, effect } = yield* behindLine("400 millis")
        yield* cut
        const before = Date.now()
        const error = yield* Effect.flip(effect.send("GET", "a"))
        assert.isAtLeast(Date.now() - before, 350)
        assert.isBelow(elapsed(before), 2000)
        assert.instanceOf(error.cause, Redis.RedisError)
        assert.strictEqual((error.cause as Redis.RedisError).reason._tag, "NotConnected")

        const waiting = yield* Effect.scoped(Effect.gen(function*() {
          const { cut, effect } = yield* behindLine("1 minute")
          yield* cut
          const fiber = yield* Effect.forkDetach(effect.send("GET", "a"))
          yield* realSleep(20)
          return fiber
        }))
        const closed = Date.now()
        assert.isTrue(Exit.isFailure(yield* Fiber.await(waiting)))
        assert.isBelow(elapsed(closed), 1000)
      }).pipe(Effect.scoped),
    20_000
  )

  it.live("a command that was answered is not sent again, whatever the answer is", () =>
    Effect.gen(function*() {
      const { effect, server } = yield* behindLine("500 millis")
      const source = "redis.call('INCR', KEYS[1]) return redis.error_reply(ARGV[1])"
      for (const [at, text] of ["NOAUTH Authentication required.", "NOAUTH locked", "WRONGPASS locked"].entries()) {
        const error = yield* Effect.flip(effect.send("EVAL", source, "1", "n", text))
        assert.instanceOf(error.cause, Redis.RedisError)
        assert.strictEqual(yield* server.cli("GET", "n"), String(at + 1))
      }
    }).pipe(Effect.scoped), 20_000)

  it.live(
    "a subscription that was refused when it was made again comes back when it may",
    () =>
      Effect.gen(function*() {
        const { effect, server } = yield* behindLine("2 seconds")
        const messages = yield* effect.subscribe("channel")
        const subscribed = (count: number) =>
          eventually(
            Effect.map(server.cli("PUBSUB", "NUMSUB", "channel"), (reply) => reply.trim() === `channel\n${count}`),
            { timeout: "15 seconds" }
          )
        yield* subscribed(1)
        yield* server.cli("ACL", "SETUSER", "default", "resetchannels")
        yield* server.cli("CLIENT", "KILL", "TYPE", "pubsub")
        const refused = Effect.map(server.cli("ACL", "LOG"), (log) => log.includes("channel"))
        yield* eventually(refused)
        yield* subscribed(0)
        yield* server.cli("ACL", "SETUSER", "default", "allchannels")
        yield* subscribed(1)
        yield* server.cli("PUBLISH", "channel", "hello")
        assert.strictEqual((yield* Queue.take(messages)).message, "hello")
      }).pipe(Effect.scoped),
    30_000
  )

  it.live("a subscription in an outage can be interrupted, and is not made later", () =>
    Effect.gen(function*() {
      const { cut, effect, line, redis, server } = yield* behindLine("1 minute")
      yield* cut
      const before = Date.now()
      yield* Effect.timeoutOption(effect.subscribe("channel").pipe(Effect.scoped), 50)
      assert.isBelow(elapsed(before), 1000)
      const other = yield* Effect.forkChild(effect.subscribe("other"))
      yield* line.pass
      yield* Fiber.join(other)
      yield* eventually(redis.send("PING"))
      assert.strictEqual(yield* server.cli("PUBSUB", "CHANNELS"), "other")
    }).pipe(Effect.scoped), 20_000)

  it.live(
    "a reserved connection that has become half-open is made again after one deadline",
    () =>
      Effect.gen(function*() {
        const { effect, line } = yield* behindLine("400 millis")
        const reserved = yield* effect.reserve
        assert.strictEqual(yield* reserved.send("PING"), "PONG")
        yield* line.blackhole
        yield* line.pass
        const late = yield* Effect.flip(reserved.send("PING"))
        assert.strictEqual((late.cause as Redis.RedisError).reason._tag, "Timeout")
        assert.strictEqual(yield* reserved.send("PING"), "PONG")
      }).pipe(Effect.scoped),
    20_000
  )

  it.live("PersistedQueue recovers elements of dead consumers after an outage", () =>
    Effect.gen(function*() {
      const { context, cut, line, server } = yield* behindLine("5 seconds")
      yield* Effect.gen(function*() {
        const queue = yield* PersistedQueue.make({ name: "numbers", schema: Schema.Number })
        const recovery = yield* line.once((request) => request.name === "EVALSHA" && request.args.includes("6"), "pass")
        yield* Effect.forkScoped(queue.take(Effect.succeed))
        yield* recovery
        // Between two rounds of its recovery, so that none of them is in flight.
        yield* realSleep(50)
        yield* cut
        yield* realSleep(700)
        yield* line.pass
        yield* server.cli("HSET", "effectq:numbers:pending", "id", `{"id":"id","element":1}`)
        yield* eventually(
          Effect.map(server.cli("LLEN", "effectq:numbers"), (length) => length === "1"),
          { timeout: "5 seconds" }
        )
      }).pipe(
        Effect.scoped,
        Effect.provide(PersistedQueue.layer.pipe(
          Layer.provideMerge(
            PersistedQueue.layerStoreRedis({ pollInterval: "10 minutes", lockRefreshInterval: "300 millis" })
          )
        )),
        Effect.provideContext(context)
      )
    }).pipe(Effect.scoped), 20_000)
})
