/** Connections of a program's own, when they are lost or cannot be made. */

import { assert, describe, it } from "@effect/vitest"
import * as Context from "effect/Context"
import type * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as EffectRedis from "effect/persistence/Redis"
import { blockingMillis } from "../src/internal/redis/command.ts"
import * as Redis from "../src/Redis.ts"
import { make as proxy } from "../src/testing/Proxy.ts"
import { eventually, realSleep } from "./support/eventually.ts"
import { standalone } from "./support/servers.ts"

/** A server behind a line that can be cut, and both services over it. */
const behindLine = Effect.fnUntraced(function*(connectTimeout: Duration.Input = "5 seconds") {
  const server = yield* standalone()
  const line = yield* proxy({ port: server.port })
  const context = yield* Layer.build(Redis.layer({ url: line.url, connectTimeout, commandTimeout: "2 seconds" }))
  const redis = Context.get(context, Redis.Redis)
  const count = (name: string) =>
    Effect.map(server.cli("CLIENT", "LIST"), (list) => list.split(`name=lockstep:${name} `).length - 1)
  /** Breaks all connections, and waits until the shared one and one of its own are made again. */
  const broken = (name: string) =>
    Effect.gen(function*() {
      const before = line.counters.connections
      yield* line.closeAll
      yield* eventually(Effect.sync(() => line.counters.connections >= before + 2))
      yield* eventually(Effect.map(count(name), (count) => count === 1))
      yield* eventually(redis.send("PING"))
    })
  return { server, line, redis, effect: Context.get(context, EffectRedis.Redis), count, broken }
})

type Send = (command: string, ...args: ReadonlyArray<string>) => Effect.Effect<unknown, unknown>

const reasonOf = (error: unknown): Redis.RedisError =>
  (error instanceof EffectRedis.RedisError ? error.cause : error) as Redis.RedisError

/** That what a command has changed is lost is said once. */
const assertSaid = Effect.fnUntraced(function*(send: Send, changed: string, ...next: [string, ...Array<string>]) {
  const error = reasonOf(yield* Effect.flip(send(...next)))
  assert.strictEqual(error.reason._tag, "NotConnected")
  assert.strictEqual(error.executed, "no")
  assert.include(error.message, `(the one on which ${changed} was sent is lost): begin again on the new one`)
})

describe("a connection of its own", () => {
  for (const kind of ["blocking", "reserved"] as const) {
    it.live(
      `says that WATCH, MULTI and AUTH are lost, before anything runs without them: ${kind}`,
      () =>
        Effect.gen(function*() {
          const { broken, effect, redis } = yield* behindLine()
          const own: { readonly send: Send } = kind === "blocking" ? yield* redis.connect() : yield* effect.reserve
          const { send } = own
          yield* redis.send("SET", "balance", 100)
          yield* send("WATCH", "balance")
          assert.strictEqual(yield* send("GET", "balance"), "100")
          yield* broken(kind)
          yield* redis.send("SET", "balance", 7)
          yield* assertSaid(send, "WATCH", "MULTI")
          yield* send("WATCH", "balance")
          yield* send("MULTI")
          yield* send("SET", "balance", "8")
          assert.deepStrictEqual(yield* send("EXEC"), ["OK"])

          yield* send("MULTI")
          yield* send("INCR", "a")
          yield* broken(kind)
          yield* assertSaid(send, "MULTI", "INCR", "b")
          assert.deepStrictEqual(yield* redis.send("MGET", "a", "b"), [null, null])

          yield* redis.send("ACL", "SETUSER", "tenant", "on", ">pw", "~tenant:*", "+@all")
          yield* send("AUTH", "tenant", "pw")
          yield* broken(kind)
          yield* assertSaid(send, "AUTH", "SET", "other", "x")
          assert.strictEqual(yield* redis.send("GET", "other"), null)
          assert.strictEqual(yield* send("ACL", "WHOAMI"), "default")
        }).pipe(Effect.scoped),
      20_000
    )
  }

  it.live("says nothing when nothing was changed, or the transaction is over", () =>
    Effect.gen(function*() {
      const { broken, redis } = yield* behindLine()
      const own = yield* redis.connect()
      yield* own.send("SET", "a", 1)
      yield* broken("blocking")
      assert.strictEqual(yield* own.send("GET", "a"), "1")
      yield* own.send("WATCH", "a")
      yield* own.send("MULTI")
      yield* own.send("EXEC")
      yield* broken("blocking")
      assert.strictEqual(yield* own.send("GET", "a"), "1")
    }).pipe(Effect.scoped), 20_000)

  it.live("says so too after an interruption, which destroys the socket", () =>
    Effect.gen(function*() {
      const { redis } = yield* behindLine()
      const own = yield* redis.connect()
      yield* own.send("WATCH", "a")
      yield* Effect.timeoutOption(own.send("BLPOP", "list", 0), 50)
      yield* assertSaid(own.send, "WATCH", "MULTI")
      assert.strictEqual(yield* own.send("PING"), "PONG")
    }).pipe(Effect.scoped), 20_000)

  it.live("is closed at once when it cannot be made, or is interrupted meanwhile", () =>
    Effect.gen(function*() {
      const { count, line, redis } = yield* behindLine("300 millis")
      yield* line.refuse
      for (let time = 0; time < 3; time++) {
        assert.strictEqual((yield* Effect.flip(redis.connect())).reason._tag, "NotConnected")
        yield* Effect.timeoutOption(redis.connect(), 50)
      }
      yield* line.pass
      const before = line.counters.connections
      yield* redis.connect()
      // Longer than any pause of one that is still being made.
      yield* realSleep(2500)
      assert.strictEqual(line.counters.connections, before + 1)
      assert.strictEqual(yield* count("blocking"), 1)
    }).pipe(Effect.scoped), 20_000)

  it.live("takes what would change the connection that all share, but no other protocol", () =>
    Effect.gen(function*() {
      const { redis } = yield* behindLine()
      const own = yield* redis.connect()
      const changing: ReadonlyArray<readonly [string, ...Array<string>]> = [
        ["SCRIPT", "DEBUG", "YES"],
        ["client", "no-evict", "on"],
        ["CLIENT", "NO-TOUCH", "ON"],
        ["CLIENT", "SETNAME", "other"],
        ["CLIENT", "TRACKING", "ON"],
        ["READONLY"],
        ["readwrite"],
        ["ASKING"]
      ]
      for (const command of changing) {
        assert.include(String(yield* Effect.exit(redis.send(...command))), "RangeError: Redis: ")
      }
      assert.strictEqual(yield* own.send("CLIENT", "NO-EVICT", "ON"), "OK")
      for (const send of [own.send, redis.send]) {
        assert.include(String(yield* Effect.exit(send("HELLO", 3))), "RangeError: Redis: HELLO")
      }
      assert.include(yield* own.send<Array<unknown>>("HELLO"), "server")
      assert.isString(yield* redis.send("SCRIPT", "LOAD", "return 1"))
    }).pipe(Effect.scoped), 20_000)

  it("has the deadline of the block of a command, and of no key or group with such a name", () => {
    assert.strictEqual(blockingMillis("XREAD", ["COUNT", 1, "block", 100, "STREAMS", "s", "$"]), 100)
    assert.strictEqual(blockingMillis("xread", ["BLOCK", 0, "streams", "s", "$"]), Infinity)
    assert.strictEqual(blockingMillis("XREAD", ["STREAMS", "BLOCK", "0"]), 0)
    assert.strictEqual(blockingMillis("XREADGROUP", ["GROUP", "BLOCK", "0", "STREAMS", "s", ">"]), 0)
    assert.strictEqual(blockingMillis("XREADGROUP", ["GROUP", "g", "STREAMS", "BLOCK", "50", "STREAMS", "s", ">"]), 50)
    assert.strictEqual(blockingMillis("BLPOP", ["block", "2"]), 2000)
  })

  it.live("refuses what is answered by more than one reply", () =>
    Effect.gen(function*() {
      const { effect, redis } = yield* behindLine()
      const own = yield* redis.connect()
      const reserved = yield* effect.reserve
      for (const { send } of [redis, own, effect, reserved] as ReadonlyArray<{ readonly send: Send }>) {
        for (const name of ["SUBSCRIBE", "psubscribe", "SSUBSCRIBE", "MONITOR", "SYNC", "PSYNC"]) {
          assert.include(String(yield* Effect.exit(send(name, "a"))), `RangeError: Redis: ${name.toUpperCase()}`)
        }
      }
    }).pipe(Effect.scoped), 20_000)
})
