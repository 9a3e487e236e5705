/** `Connection.run`: it encodes, decodes and settles a script call without a command of ioredis. */

import { assert, describe, it } from "@effect/vitest"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import type * as IoRedis from "ioredis"
import { tracingChannel } from "node:diagnostics_channel"
import { live } from "../src/internal/io.ts"
import { slotOf } from "../src/internal/redis/command.ts"
import { type Connection, connectionsOf } from "../src/internal/redis/connection.ts"
import type { RedisError } from "../src/internal/redis/errors.ts"
import { InFlight } from "../src/internal/redis/inFlight.ts"
import { call } from "../src/internal/redis/resp.ts"
import * as Redis from "../src/Redis.ts"
import { cluster } from "./support/cluster.ts"
import { eventually } from "./support/eventually.ts"
import { standalone } from "./support/servers.ts"

const deadline = 5000

const build = (layer: Layer.Layer<Redis.Redis, RedisError>) =>
  Effect.map(Layer.build(layer), (context) => Redis.Redis.pipe(Effect.provideContext(context))).pipe(
    Effect.flatten,
    Effect.map(connectionsOf)
  )

/** What a call of a script comes to. */
const ran = (
  connection: Pick<Connection, "run">,
  ...[name, script, call, millis]: Parameters<Connection["run"]> extends [...infer P, unknown] ? P : never
) => new Promise<unknown>((resolve, reject) => connection.run(name, script, call, millis, { resolve, reject }))

/** How the promise rejects. */
const refusal = (promise: Promise<unknown>) =>
  Effect.promise(() =>
    promise.then(() => assert.fail("it was answered"), (error: RedisError) => ({
      executed: error.executed,
      reason: error.reason._tag
    }))
  )

describe("a script call", () => {
  it.live("decodes replies of every shape as ioredis does", () =>
    Effect.gen(function*() {
      const { port } = yield* standalone()
      const { commands } = yield* build(Redis.layer({ host: "127.0.0.1", port }))
      const scripts = [
        "return ARGV[1]",
        "return { 'stale', ARGV[1], 7, false, '', { KEYS[1], { ARGV[1], {} } } }",
        "return { ok = 'FINE' }",
        "return nil",
        "return 12",
        "return string.rep(ARGV[1], 100000)",
        "return string.char(255, 254, 65)",
        "redis.setresp(3) return { map = { a = ARGV[1] } }",
        "redis.setresp(3) return { set = { a = true } }",
        "redis.setresp(3) return { double = 1.5 }",
        "redis.setresp(3) return true",
        "return { 'a', redis.error_reply('ERR b') }"
      ]
      for (const script of scripts) {
        const args = ["größe €\r\n🔒", ""]
        const [ours, theirs] = yield* Effect.promise(() =>
          Promise.all([
            ran(commands, "EVAL", script, call(["key"], args), deadline),
            commands.send("EVAL", [script, 1, "key", ...args], deadline)
          ])
        )
        assert.deepStrictEqual(ours, theirs, script)
      }
    }).pipe(Effect.scoped), 20_000)

  it.live("rejects with what Redis answers", () =>
    Effect.gen(function*() {
      const { port } = yield* standalone()
      const { commands } = yield* build(Redis.layer({ host: "127.0.0.1", port }))
      const key = call(["key"], [])
      assert.deepStrictEqual(
        yield* refusal(ran(commands, "FCALL", "absent", key, deadline)),
        { executed: "no", reason: "FunctionMissing" }
      )
      assert.deepStrictEqual(
        yield* refusal(ran(commands, "EVALSHA", "0".repeat(40), key, deadline)),
        { executed: "no", reason: "FunctionMissing" }
      )
      assert.deepStrictEqual(
        yield* refusal(ran(commands, "EVAL", "return redis.error_reply('ERR no')", key, deadline)),
        { executed: "unknown", reason: "CommandFailed" }
      )
    }).pipe(Effect.scoped), 20_000)

  it.live(
    "rejects with what the script answers, whatever code that has, and keeps the connection",
    () =>
      Effect.gen(function*() {
        const { port } = yield* standalone()
        const { commands } = yield* build(Redis.layer({ host: "127.0.0.1", port }))
        let downs = 0
        commands.onDown(() => downs++)
        const source = "redis.call('INCR', KEYS[1]) return redis.error_reply(ARGV[1])"
        for (
          const text of ["READONLY is the account", "MASTERDOWN", "BUSY line", "NOAUTH for you", "OOM", "NOSCRIPT"]
        ) {
          for (
            const promise of [
              ran(commands, "EVAL", source, call(["n"], [text]), deadline),
              commands.send("EVAL", [source, 1, "n", text], deadline)
            ]
          ) assert.deepStrictEqual(yield* refusal(promise), { executed: "unknown", reason: "CommandFailed" }, text)
        }
        assert.strictEqual(yield* Effect.promise(() => commands.send("GET", ["n"], deadline)), "12")
        assert.strictEqual(downs, 0)
      }).pipe(Effect.scoped),
    20_000
  )

  it.live(
    "keeps its deadline, fails with the connection, and leaves a late reply to no other call",
    () =>
      Effect.gen(function*() {
        const server = yield* standalone()
        const { commands } = yield* build(Redis.layer({ host: "127.0.0.1", port: server.port }))
        const incr = (millis: number) =>
          ran(commands, "EVAL", "return redis.call('INCR', KEYS[1])", call(["n"], []), millis)
        yield* Effect.promise(() => commands.send("CLIENT", ["PAUSE", 400, "WRITE"], deadline))
        const late = incr(deadline)
        assert.deepStrictEqual(yield* refusal(incr(50)), { executed: "unknown", reason: "Timeout" })
        assert.strictEqual(yield* Effect.promise(() => late), 1)
        assert.strictEqual(yield* Effect.promise(() => incr(deadline)), 3)

        yield* Effect.promise(() => commands.send("CLIENT", ["PAUSE", 60_000, "WRITE"], deadline))
        const lost = incr(60_000)
        commands.reset()
        assert.deepStrictEqual(yield* refusal(lost), { executed: "unknown", reason: "ConnectionLost" })
        assert.deepStrictEqual(yield* refusal(incr(deadline)), { executed: "no", reason: "NotConnected" })
        yield* eventually(Effect.sync(() => commands.isReady()))
        yield* Effect.promise(() => commands.send("CLIENT", ["UNPAUSE"], deadline))
        // 4 if the server dropped the lost call with its connection. A call sent twice would make it 6.
        assert.include([4, 5], yield* Effect.promise(() => incr(deadline)))
      }).pipe(Effect.scoped),
    20_000
  )

  it.live("reports what was never sent, and settles once", () =>
    Effect.gen(function*() {
      const commands: Array<IoRedis.Command> = []
      const key = call(["key"], ["secret"])
      const run = (dispatch: (command: IoRedis.Command) => unknown) =>
        ran(new InFlight({ io: live, addressOf: () => "nowhere", dispatch }), "FCALL", "f", key, deadline)
      const unwritable = run((command) => command.reject(new Error("Stream isn't writeable")))
      assert.deepStrictEqual(yield* refusal(unwritable), { executed: "no", reason: "NotConnected" })
      const aborted = run((command) => queueMicrotask(() => command.reject(new Error("Connection is closed."))))
      assert.deepStrictEqual(yield* refusal(aborted), { executed: "unknown", reason: "ConnectionLost" })
      const thrown = run(() => {
        throw new Error("broken")
      })
      assert.deepStrictEqual(yield* refusal(thrown), { executed: "unknown", reason: "ConnectionLost" })
      const answered = run((command) => commands.push(command))
      const [command] = commands
      assert.strictEqual(
        command!.toWritable({}),
        "*5\r\n$5\r\nFCALL\r\n$1\r\nf\r\n$1\r\n1\r\n$3\r\nkey\r\n$6\r\nsecret\r\n"
      )
      command!.resolve(Buffer.from("first"))
      command!.resolve(Buffer.from("second"))
      command!.reject(new Error("Connection is closed."))
      assert.strictEqual(yield* Effect.promise(() => answered), "first")
      // A reply that cannot be decoded must not leave the caller without an answer.
      const long = run((command) => commands.push(command))
      commands[1]!.resolve(Object.assign(Buffer.from(""), { toString: () => assert.fail("too long") }))
      assert.deepStrictEqual(yield* refusal(long), { executed: "unknown", reason: "ConnectionLost" })
    }))

  it.live("is traced without the arguments of the script", () =>
    Effect.gen(function*() {
      const { port } = yield* standalone()
      const { commands } = yield* build(Redis.layer({ host: "127.0.0.1", port }))
      const seen: Array<unknown> = []
      const channel = tracingChannel("ioredis:command")
      const note = (context: unknown) => {
        const { args, result } = context as { readonly args: unknown; readonly result?: unknown }
        seen.push(result ?? args)
      }
      channel.start.subscribe(note)
      channel.asyncEnd.subscribe(note)
      yield* Effect.promise(() => ran(commands, "EVAL", "return ARGV[1]", call(["key"], ["secret"]), deadline))
      channel.start.unsubscribe(note)
      channel.asyncEnd.unsubscribe(note)
      assert.deepStrictEqual(seen, [["return ARGV[1]", "1", "key"], "secret"])
    }).pipe(Effect.scoped), 20_000)

  it.live("finds the node of its first key on a cluster, also while the slot moves", () =>
    Effect.gen(function*() {
      const nodes = yield* cluster()
      const { commands, masters } = yield* build(Redis.layer({ cluster: nodes.startupNodes }))
      const incr = (key: string) =>
        Effect.promise(() => ran(commands, "EVAL", "return redis.call('INCR', KEYS[1])", call([key], ["x"]), deadline))
      for (const key of ["a", "b", "c", "{tag}:a", "{}a", "größe", "{ü}x", ""]) {
        assert.strictEqual(slotOf(key), yield* nodes.slotOf(key))
        assert.strictEqual(yield* incr(key), 1)
      }
      const from = yield* nodes.serving("a")
      const to = (yield* nodes.primaries).find((primary) => primary.port !== from.port)!
      const migration = yield* nodes.migration("a", to)
      yield* migration.begin
      yield* migration.move(["a"])
      assert.strictEqual(yield* incr("a"), 2)
      yield* migration.complete
      assert.strictEqual(yield* incr("a"), 3)
      assert.strictEqual(yield* incr("a"), 4)
      assert.strictEqual(masters().length, 3)
      assert.deepStrictEqual(
        yield* refusal(ran(commands, "FCALL", "absent", call(["a"], []), deadline)),
        { executed: "no", reason: "FunctionMissing" }
      )
    }).pipe(Effect.scoped), 60_000)
})
