/** What a connection does before it is used: no failing step leaves it ready in the wrong state. */

import { assert, describe, it } from "@effect/vitest"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Logger from "effect/Logger"
import * as EffectRedis from "effect/persistence/Redis"
import * as Redacted from "effect/Redacted"
import * as References from "effect/References"
import * as IoRedis from "ioredis"
import * as net from "node:net"
import * as Redis from "../src/Redis.ts"
import { cluster } from "./support/cluster.ts"
import { eventually } from "./support/eventually.ts"
import { sentinel } from "./support/sentinel.ts"
import { standalone } from "./support/servers.ts"

const secret = "s3cret-passw0rd"

/** A user that may do everything but what the rules take away. */
const user = (name: string, ...rules: ReadonlyArray<string>) =>
  `user ${name} on >${secret} ~* &* +@all ${rules.join(" ")}`

const failure = (layer: Layer.Layer<Redis.Redis, Redis.RedisError>) => Effect.scoped(Effect.flip(Layer.build(layer)))

const client = (options: IoRedis.RedisOptions) =>
  Effect.acquireRelease(
    Effect.sync(() => new IoRedis.Redis({ host: "127.0.0.1", lazyConnect: true, ...options } as object)),
    (client) => Effect.sync(() => client.disconnect())
  )

const build = (layer: Layer.Layer<Redis.Redis, Redis.RedisError>) =>
  Effect.map(Layer.build(layer), (context) => Redis.Redis.pipe(Effect.provideContext(context))).pipe(Effect.flatten)

const missing = (error: Redis.RedisError) => {
  assert.strictEqual(error.reason._tag, "MissingPermission")
  assert.strictEqual(error.reason._tag === "MissingPermission" && error.reason.command, "SELECT")
  assert.include(error.message, "SELECT")
  assert.notInclude(JSON.stringify(error), secret)
}

describe("handshake", () => {
  it.live("fails without the permission for SELECT, instead of using database 0", () =>
    Effect.gen(function*() {
      const { port } = yield* standalone({ acl: [user("app", "-select")] })
      const credentials = { host: "127.0.0.1", port, username: "app" }
      const password = Redacted.make(secret)
      missing(yield* failure(Redis.layer({ ...credentials, password, db: 3 })))
      missing(yield* failure(Redis.layer({ url: `redis://app:${secret}@127.0.0.1:${port}/3` })))
      missing(yield* failure(Redis.layerFromClient(yield* client({ ...credentials, password: secret, db: 3 }))))
      // Database 0 needs no SELECT.
      const redis = yield* build(Redis.layer({ ...credentials, password }))
      assert.strictEqual(yield* redis.send("PING"), "PONG")
    }).pipe(Effect.scoped), 20_000)

  it.live("fails for a database that the server does not have", () =>
    Effect.gen(function*() {
      const { port } = yield* standalone()
      for (
        const layer of [
          Redis.layer({ url: `redis://127.0.0.1:${port}/99` }),
          Redis.layerFromClient(yield* client({ port, db: 99 }))
        ]
      ) {
        const error = yield* failure(layer)
        assert.strictEqual(error.reason._tag, "UnsupportedServer")
        assert.include(error.message, "99")
      }
    }).pipe(Effect.scoped), 20_000)

  it.live("fails behind Sentinel too", () =>
    Effect.gen(function*() {
      const deployment = yield* sentinel()
      const hosts = deployment.sentinels.map(({ port }) => ({ host: "127.0.0.1", port }))
      const error = yield* failure(Redis.layer({ sentinels: hosts, name: deployment.name, db: 99 }))
      assert.strictEqual(error.reason._tag, "UnsupportedServer")
      assert.include(error.message, "99")
    }).pipe(Effect.scoped), 60_000)

  it.live("is not ready again in another database when the permission is taken away", () =>
    Effect.gen(function*() {
      const server = yield* standalone({ acl: [user("app")] })
      const layer = Redis.layer({
        url: `redis://app:${secret}@127.0.0.1:${server.port}/3`,
        connectTimeout: "1 second"
      })
      const redis = yield* build(layer)
      const own = yield* redis.connect()
      const database = Effect.map(redis.send<string>("CLIENT", "INFO"), (info) => /\bdb=(\d+)/.exec(info)?.[1])
      assert.strictEqual(yield* database, "3")
      yield* server.cli("ACL", "SETUSER", "app", "-select")
      yield* server.cli("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
      yield* eventually(Effect.map(redis.state, (state) => state === "reconnecting"))
      // Both try several times, and neither of them gets through.
      const until = performance.now() + 1500
      while (performance.now() < until) {
        const error = yield* Effect.flip(redis.send("SET", "key", "in the wrong database"))
        assert.strictEqual(error.reason._tag, "NotConnected")
        yield* Effect.sleep(10)
      }
      const { message } = yield* Effect.flip(redis.send("PING"))
      assert.match(message, /no permission for SELECT.*ACL/)
      assert.notInclude(message, "running")
      missing(yield* Effect.flip(own.send("PING")))
      assert.strictEqual(yield* server.cli("EXISTS", "key"), "0")
      yield* server.cli("ACL", "SETUSER", "app", "+select")
      yield* eventually(Effect.map(redis.state, (state) => state === "ready"))
      assert.strictEqual(yield* database, "3")
      // Each connection comes back in its own time.
      yield* eventually(Effect.map(own.send<string>("CLIENT", "INFO"), (info) => assert.include(info, " db=3 ")))
    }).pipe(Effect.scoped), 20_000)

  it.live("says that the credentials are refused when the password has changed", () =>
    Effect.gen(function*() {
      const server = yield* standalone({ acl: [user("app")] })
      const redis = yield* build(Redis.layer({ url: `redis://app:${secret}@127.0.0.1:${server.port}` }))
      yield* server.cli("ACL", "SETUSER", "app", "resetpass", ">another")
      yield* server.cli("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
      yield* eventually(
        Effect.map(Effect.flip(redis.send("PING")), (error) => {
          assert.notInclude(JSON.stringify(error), secret)
          return /WRONGPASS.*`password`/.test(error.message)
        }),
        { timeout: "5 seconds" }
      )
    }).pipe(Effect.scoped), 20_000)

  it.live("does not let one user of a connection change what it is for the others", () =>
    Effect.gen(function*() {
      const redis = yield* Redis.Redis
      const own = yield* redis.connect()
      const effect = yield* EffectRedis.Redis
      const reserved = yield* effect.reserve
      const sends: ReadonlyArray<Effect.Effect<unknown, unknown>> = [
        redis.send("select", 5),
        own.send("SELECT", 5),
        effect.send("Select", "5"),
        reserved.send("SELECT", "5")
      ]
      for (const send of sends) {
        const exit = yield* Effect.exit(send)
        assert.include(String(exit), "RangeError: Redis: SELECT")
      }
      const others: ReadonlyArray<Effect.Effect<unknown, unknown>> = [
        redis.send("RESET"),
        own.send("reset"),
        effect.send("RESET"),
        redis.send("MULTI"),
        redis.send("MONITOR"),
        redis.send("AUTH", "other", "password"),
        redis.send("hello", "3"),
        redis.send("QUIT"),
        redis.send("client", "reply", "off"),
        effect.send("multi")
      ]
      for (const send of others) assert.include(String(yield* Effect.exit(send)), "RangeError: Redis: ")
      // On a dedicated connection.
      for (const one of [own, reserved] as ReadonlyArray<Pick<typeof own, "send">>) {
        assert.strictEqual(yield* one.send("MULTI"), "OK")
        assert.deepStrictEqual(yield* one.send("EXEC"), [])
      }
      assert.include(String(yield* redis.send("CLIENT", "INFO")), "db=0")
    }).pipe(
      Effect.scoped,
      Effect.provide(Redis.layerEmbedded())
    ), 20_000)

  for (const topology of ["one server", "a Cluster"]) {
    it.live(`fails when a server that cannot speak RESP3 refuses AUTH: ${topology}`, () =>
      Effect.gen(function*() {
        // ioredis takes this refusal for a mere warning.
        const refusal = "-ERR AUTH <password> called without any password configured for the default user. " +
          "Are you sure your configuration is correct?\r\n"
        const server = yield* Effect.acquireRelease(
          Effect.callback<net.Server>((resume) => {
            const server = net.createServer((socket) => {
              const slots = `*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:${socket.localPort}\r\n`
              const replies = new Map([
                ["hello", "-ERR unknown command 'hello'\r\n"],
                ["auth", refusal],
                ["cluster", slots]
              ])
              socket.on("error", () => {})
              socket.on("data", (data) => {
                for (const [, name] of data.toString().toLowerCase().matchAll(/\*\d+\r\n\$\d+\r\n(\w+)/g)) {
                  socket.write(replies.get(name!) ?? "+PONG\r\n")
                }
              })
            }).listen(0, "127.0.0.1", () => resume(Effect.succeed(server)))
          }),
          (server) => Effect.sync(() => server.close())
        )
        const { port } = server.address() as net.AddressInfo
        const warn = console.warn
        console.warn = () => {}
        const layer = topology === "a Cluster"
          ? Redis.layer({ cluster: [{ host: "127.0.0.1", port }], password: Redacted.make(secret) })
          : Redis.layer({ url: `redis://:${secret}@127.0.0.1:${port}` })
        const error = yield* failure(layer).pipe(Effect.ensuring(Effect.sync(() => console.warn = warn)))
        assert.strictEqual(error.reason._tag, "AuthenticationFailed", error.message)
        assert.notInclude(JSON.stringify(error), secret)
      }).pipe(Effect.scoped), 20_000)
  }

  describe("the name of a connection", () => {
    it.live("shows in CLIENT LIST, with the purpose of connections of their own", () =>
      Effect.gen(function*() {
        const server = yield* standalone()
        const names = Effect.map(
          server.cli("CLIENT", "LIST"),
          (list) => [...list.matchAll(/ name=(lock\S*|orders\S*)/g)].map(([, name]) => name!).sort()
        )
        const url = `redis://127.0.0.1:${server.port}`
        yield* Effect.scoped(Effect.gen(function*() {
          const redis = yield* build(Redis.layer({ url }))
          yield* redis.connect()
          assert.deepStrictEqual(yield* names, ["lockstep", "lockstep:blocking"])
        }))
        yield* Effect.scoped(Effect.gen(function*() {
          yield* build(Redis.layer({ url, clientName: "orders" }))
          assert.deepStrictEqual(yield* names, ["orders"])
        }))
        yield* Effect.scoped(Effect.gen(function*() {
          yield* build(Redis.layerFromClient(yield* client({ port: server.port, connectionName: "orders" })))
          assert.deepStrictEqual(yield* names, ["orders"])
        }))
        const exit = yield* Effect.exit(failure(Redis.layer({ url, clientName: "two words" })))
        assert.include(String(exit), "RangeError: Redis: clientName")
      }).pipe(Effect.scoped), 20_000)

    it.live("shows on every node of a Cluster", () =>
      Effect.gen(function*() {
        const { servers, startupNodes } = yield* cluster()
        const redis = yield* build(Redis.layer({ cluster: startupNodes, clientName: "orders" }))
        yield* redis.connect({ key: "a" })
        const lists = yield* Effect.forEach(servers, (server) => server.cli("CLIENT", "LIST"))
        for (const list of lists) assert.include(list, " name=orders ")
        assert.strictEqual(lists.filter((list) => list.includes(" name=orders:blocking ")).length, 1)
      }).pipe(Effect.scoped), 60_000)

    it.live("needs no permission: a refusal decides nothing, and is logged at Debug", () =>
      Effect.gen(function*() {
        const server = yield* standalone({ acl: [user("app", "-client")] })
        const lines: Array<string> = []
        const logger = Logger.make(({ logLevel, message }) => void lines.push(`${logLevel} ${String(message)}`))
        const redis = yield* build(Redis.layer({ url: `redis://app:${secret}@127.0.0.1:${server.port}` })).pipe(
          Effect.provide(Logger.layer([logger])),
          Effect.provideService(References.MinimumLogLevel, "Debug")
        )
        assert.strictEqual(yield* redis.send("PING"), "PONG")
        yield* eventually(Effect.sync(() => lines.some((line) => /^Debug .*CLIENT SETNAME/.test(line))))
      }).pipe(Effect.scoped), 20_000)
  })
})
