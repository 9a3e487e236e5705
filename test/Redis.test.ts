import { assert, describe, it } from "@effect/vitest"
import * as Cause from "effect/Cause"
import * as ConfigProvider from "effect/ConfigProvider"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Fiber from "effect/Fiber"
import * as Layer from "effect/Layer"
import * as PersistenceRedis from "effect/persistence/Redis"
import * as Redacted from "effect/Redacted"
import * as Schema from "effect/Schema"
import type * as Scope from "effect/Scope"
import * as Stream from "effect/Stream"
import * as IoRedis from "ioredis"
import { execFileSync, spawn } from "node:child_process"
import * as fs from "node:fs"
import * as net from "node:net"
import * as os from "node:os"
import * as path from "node:path"
import { inspect } from "node:util"
import { Coordinator, Election, Lock, Queue, Semaphore, SharedRef, TaskGroup, Topic } from "../src/index.ts"
import { connectionsOf } from "../src/internal/redis/connection.ts"
import * as Redis from "../src/Redis.ts"
import { elapsed } from "./support/awake.ts"
import { identify, serverBinary } from "./support/binaries.ts"

const temporaryDirectory = Effect.acquireRelease(
  Effect.sync(() => fs.mkdtempSync(path.join(os.tmpdir(), "lockstep-test-"))),
  (directory) => Effect.sync(() => fs.rmSync(directory, { recursive: true, force: true }))
)

/** Checks every few milliseconds, and fails after ten seconds. */
const eventually = <A>(what: string, f: () => A | undefined | false | Promise<A | undefined | false>) =>
  Effect.promise(async () => {
    const deadline = performance.now() + 10_000
    for (;;) {
      const value = await f()
      if (value !== undefined && value !== false) return value as A
      if (performance.now() > deadline) throw new Error(`Never happened: ${what}`)
      await new Promise((resolve) => setTimeout(resolve, 10))
    }
  })

const freePort = Effect.promise(() =>
  new Promise<number>((resolve) => {
    const server = net.createServer().listen(0, "127.0.0.1", () => {
      const { port } = server.address() as net.AddressInfo
      server.close(() => resolve(port))
    })
  })
)

const accepts = (target: { readonly port: number } | { readonly path: string }) =>
  new Promise<boolean>((resolve) => {
    const socket = net.connect({ host: "127.0.0.1", ...target })
    socket.once("connect", () => {
      socket.destroy()
      resolve(true)
    })
    socket.once("error", () => resolve(false))
  })

const spawnServer = (args: ReadonlyArray<string>, directory: string) =>
  spawn(
    serverBinary(),
    ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", directory, ...args],
    { stdio: "ignore" }
  )

const stopServer = (child: ReturnType<typeof spawn>) =>
  new Promise<void>((resolve) => {
    if (child.exitCode !== null || child.signalCode !== null) return resolve()
    child.once("exit", () => resolve())
    child.kill("SIGKILL")
  })

const server = Effect.fnUntraced(function*(...args: ReadonlyArray<string>) {
  const directory = yield* temporaryDirectory
  const port = yield* freePort
  const child = yield* Effect.acquireRelease(
    Effect.sync(() => spawnServer(["--port", `${port}`, ...args], directory)),
    (child) => Effect.promise(() => stopServer(child))
  )
  yield* eventually("the server listens", () => accepts({ port }))
  return { port, child, directory }
})

/** Its certificate is for `localhost`, of an authority of its own. */
const tlsServer = Effect.fnUntraced(function*(...args: ReadonlyArray<string>) {
  const directory = yield* temporaryDirectory
  const file = (name: string) => path.join(directory, name)
  const openssl = (...args: ReadonlyArray<string>) => execFileSync("openssl", args, { cwd: directory, stdio: "ignore" })
  const key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
  openssl("req", "-x509", ...key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=Test CA")
  openssl("req", ...key, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=localhost")
  fs.writeFileSync(file("san"), "subjectAltName=DNS:localhost")
  openssl(
    ..."x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out server.pem -days 2 -extfile san"
      .split(" ")
  )
  const tlsPort = yield* freePort
  const { port } = yield* server(
    ...args,
    ...["--tls-port", `${tlsPort}`, "--tls-auth-clients", "no", "--tls-ca-cert-file", file("ca.pem")],
    ...["--tls-cert-file", file("server.pem"), "--tls-key-file", file("server.key")]
  )
  const ca = fs.readFileSync(file("ca.pem"), "utf8")
  return { ca, port, tlsPort }
})

type Handler = (client: net.Socket) => void

/** A TCP server that is not Redis. */
const tcp = (handler: Handler) =>
  Effect.acquireRelease(
    Effect.promise(() =>
      new Promise<{ readonly server: net.Server; readonly port: number; readonly sockets: Set<net.Socket> }>(
        (resolve) => {
          const sockets = new Set<net.Socket>()
          const server = net.createServer((socket) => {
            sockets.add(socket)
            socket.on("error", () => {})
            socket.on("close", () => sockets.delete(socket))
            handler(socket)
          }).listen(
            0,
            "127.0.0.1",
            () => resolve({ server, sockets, port: (server.address() as net.AddressInfo).port })
          )
        }
      )
    ),
    ({ server, sockets }) =>
      Effect.promise(() => {
        for (const socket of sockets) socket.destroy()
        return new Promise((resolve) => server.close(resolve))
      })
  )

/** Forwards to a server, until a test has it swallow everything or drop replies. */
const proxy = Effect.fnUntraced(function*(port: number) {
  const faults = { swallow: false, connections: 0 }
  const listener = yield* tcp((client) => {
    faults.connections++
    const upstream = net.connect(port, "127.0.0.1")
    // A connection that was made before the fault stays as dead as it is.
    let dead = false
    const forward = (to: net.Socket) => (data: Buffer) => {
      dead ||= faults.swallow
      if (!dead) to.write(data)
    }
    client.on("data", forward(upstream))
    upstream.on("data", forward(client))
    upstream.on("error", () => client.destroy())
    upstream.on("close", () => client.destroy())
    client.on("close", () => upstream.destroy())
  })
  return { port: listener.port, faults }
})

const withRedis = <A, E>(
  layer: Layer.Layer<Redis.Redis, E, never>,
  f: (redis: Redis.Redis["Service"]) => Effect.Effect<A, E | Redis.RedisError, Scope.Scope>
) => Effect.scoped(Effect.flatMap(Redis.Redis, f)).pipe(Effect.provide(layer))

const ping = (redis: Redis.Redis["Service"]) => redis.send<string>("PING")

/** Builds the layer and answers how it failed, and how fast. */
const failure = Effect.fnUntraced(function*(layer: Layer.Layer<any, Redis.RedisError, never>) {
  const before = Date.now()
  const error = yield* Effect.flip(Effect.scoped(Layer.build(layer)))
  return { error, millis: Date.now() - before, took: elapsed(before) }
})

const reasonOf = (layer: Layer.Layer<any, Redis.RedisError, never>) =>
  Effect.map(failure(layer), ({ error }) => error.reason)

const secret = "s3cret-passw0rd"

describe("Redis", () => {
  describe("connecting", () => {
    it.live("by URL, host and port, unix socket and database number", () =>
      Effect.gen(function*() {
        const directory = yield* temporaryDirectory
        const socket = path.join(directory, "s.sock")
        const { port } = yield* server("--unixsocket", socket)
        for (
          const options of [
            { url: `redis://127.0.0.1:${port}` },
            { url: Redacted.make(`redis://127.0.0.1:${port}/0`) },
            { url: `redis://127.0.0.1:${port}?family=0` },
            { host: "127.0.0.1", port },
            { path: socket },
            { url: `unix://${socket}` },
            { url: socket }
          ]
        ) {
          assert.strictEqual(yield* withRedis(Redis.layer(options), ping), "PONG")
        }
        yield* withRedis(Redis.layer({ url: `redis://127.0.0.1:${port}/3` }), (redis) => redis.send("SET", "three", 3))
        assert.strictEqual(
          yield* withRedis(Redis.layer({ url: `unix://${socket}?db=3` }), (redis) => redis.send("GET", "three")),
          "3"
        )
        assert.strictEqual(yield* withRedis(Redis.layer({ path: socket }), (redis) => redis.send("GET", "three")), null)
        yield* withRedis(Redis.layer({ port }), (redis) =>
          Effect.sync(() => {
            assert.strictEqual(redis.topology, "standalone")
            const { name, version } = identify(serverBinary())
            // Valkey 7.2 tells its clients that it is Redis.
            const flavor = name === "valkey" && !version.startsWith("7.2.") ? "valkey" : "redis"
            assert.deepStrictEqual(redis.server, { flavor, version })
          }))
      }), 20_000)

    it.live("and nothing that is made of it shows the password, however it is printed", () =>
      Effect.gen(function*() {
        const { port } = yield* server("--requirepass", secret)
        yield* Effect.gen(function*() {
          const things = [
            yield* Redis.Redis,
            yield* PersistenceRedis.Redis,
            yield* Coordinator.Coordinator,
            yield* Lock.acquire("a"),
            yield* Lock.withLock(Effect.void, "a", { wait: 1 }).pipe(Effect.flip),
            yield* Semaphore.make({ name: "a", permits: 1 }),
            yield* Election.make({ name: "a" }),
            yield* TaskGroup.make({ name: "a", result: Schema.Void }),
            yield* Topic.make({ name: "a", schema: Schema.Void }),
            yield* Queue.make({ name: "a", payload: Schema.Void }),
            yield* SharedRef.make({ name: "a", schema: Schema.Number, initial: 0 })
          ]
          for (const thing of things) {
            assert.notInclude(inspect(thing, { depth: 20 }), secret)
            assert.notInclude(JSON.stringify(thing), secret)
          }
        }).pipe(
          Effect.scoped,
          Effect.provide(Coordinator.layer()),
          Effect.provide(Redis.layer({ url: `redis://:${secret}@127.0.0.1:${port}` }))
        )
      }), 20_000)

    it.live("by configuration", () =>
      Effect.gen(function*() {
        const { port } = yield* server("--requirepass", secret)
        const environment = (env: Record<string, string>) => ConfigProvider.layer(ConfigProvider.fromEnv({ env }))
        const viaUrl = Redis.layerConfig().pipe(
          Layer.provide(environment({ REDIS_URL: `redis://:${secret}@127.0.0.1:${port}` }))
        )
        const viaParts = Redis.layerConfig().pipe(
          Layer.provide(environment({ REDIS_HOST: "127.0.0.1", REDIS_PORT: `${port}`, REDIS_PASSWORD: secret }))
        )
        assert.strictEqual(yield* withRedis(viaUrl, ping), "PONG")
        assert.strictEqual(yield* withRedis(viaParts, ping), "PONG")
      }), 20_000)

    it.live("by configuration that is wrong, which fails with what is wrong", () =>
      Effect.gen(function*() {
        const { port } = yield* server()
        const built = (env: Record<string, string>) =>
          Effect.exit(Effect.scoped(Layer.build(
            Redis.layerConfig().pipe(Layer.provide(ConfigProvider.layer(ConfigProvider.fromEnv({ env }))))
          )))
        const wrong: ReadonlyArray<readonly [env: Record<string, string>, message: string]> = [
          [{ REDIS_CLUSTER: "127.0.0.1:abc" }, "the port in REDIS_CLUSTER must be a number"],
          [{ REDIS_CLUSTER: "127.0.0.1:0" }, "the port in REDIS_CLUSTER must be 1 to 65535"],
          [{ REDIS_URL: "nonsense" }, "url is not a URL"],
          [{ REDIS_URL: `redis://:se%cret@localhost` }, "percent-encode"],
          [{ REDIS_PORT: "abc" }, "REDIS_PORT"]
        ]
        for (const [env, message] of wrong) {
          const exit = yield* built(env)
          assert.isTrue(Exit.isFailure(exit) && !Cause.hasDies(exit.cause), String(exit))
          const [reason] = Exit.isFailure(exit) ? exit.cause.reasons.filter(Cause.isFailReason) : []
          assert.strictEqual(reason!.error._tag, "ConfigError")
          assert.include(`${JSON.stringify(env)} ${String(reason!.error)}`, message)
          assert.notInclude(String(reason!.error), "se%cret")
        }
        // As Kubernetes sets it for a service of that name.
        const linked = yield* built({ REDIS_URL: `redis://127.0.0.1:${port}`, REDIS_PORT: "tcp://10.0.0.1:6379" })
        assert.isTrue(Exit.isSuccess(linked))
        const others = yield* built({ REDIS_CLUSTER: "127.0.0.1:1", REDIS_PORT: "tcp://10.0.0.1:6379" })
        assert.match(String(others), /There is no connection to Redis at 127.0.0.1:1/)
        // An address of IPv6, and a name that does not resolve.
        for (const address of ["[::1]:1", "::1", "[::1]"]) {
          const exit = yield* built({ REDIS_CLUSTER: address })
          assert.match(String(exit), /There is no connection to Redis/)
          assert.notInclude(String(exit), "ENOTFOUND")
        }
        assert.match(String(yield* built({ REDIS_CLUSTER: "no.such.host.invalid" })), /There is no connection to Redis/)
      }), 20_000)

    it.live("over TLS, with a certificate that is checked", () =>
      Effect.gen(function*() {
        const { ca, tlsPort } = yield* tlsServer()
        const url = `rediss://localhost:${tlsPort}`
        assert.strictEqual(yield* withRedis(Redis.layer({ url, tls: { ca } }), ping), "PONG")
        const blocked = withRedis(Redis.layer({ url, tls: { ca } }), (redis) =>
          Effect.flatMap(redis.connect(), (dedicated) => dedicated.send("BLPOP", "nothing", 0.01)))
        assert.strictEqual(yield* blocked, null)
        for (
          const options of [{ url }, { url: `rediss://127.0.0.1:${tlsPort}`, tls: { ca } }]
        ) {
          const { error } = yield* failure(Redis.layer(options))
          assert.strictEqual(error.reason._tag, "NotConnected")
          assert.include(error.message, "certificate")
        }
      }), 20_000)

    it.live("over TLS, as a Cluster, whose nodes may refuse the client again and again", () =>
      Effect.gen(function*() {
        const { ca, port, tlsPort } = yield* tlsServer(
          ...["--cluster-enabled", "yes", "--tls-cluster", "yes", "--cluster-announce-hostname", "localhost"],
          ...["--cluster-preferred-endpoint-type", "hostname"]
        )
        const client = yield* Effect.acquireRelease(
          Effect.sync(() => new IoRedis.Redis(port)),
          (client) => Effect.sync(() => client.disconnect())
        )
        yield* Effect.promise(() => client.call("CLUSTER", "ADDSLOTSRANGE", 0, 16383))
        const cluster = [{ host: "localhost", port: tlsPort }]
        assert.strictEqual(yield* withRedis(Redis.layer({ cluster, tls: { ca } }), ping), "PONG")
        // An error that nothing listens to would end the process.
        for (let time = 0; time < 15; time++) {
          const { error } = yield* failure(Redis.layer({ cluster, tls: true }))
          assert.strictEqual(error.reason._tag, "NotConnected")
          assert.include(error.message, "certificate")
        }
      }), 20_000)

    it.live("from a client of the user's, which stays as it is", () =>
      Effect.gen(function*() {
        const { port } = yield* server("--requirepass", secret)
        const client = yield* Effect.acquireRelease(
          Effect.sync(() =>
            new IoRedis.Redis({ port, host: "127.0.0.1", password: secret, enableAutoPipelining: true })
          ),
          (client) => Effect.sync(() => client.disconnect())
        )
        const before = { ...client.options }
        yield* withRedis(Redis.layerFromClient(client), (redis) =>
          Effect.gen(function*() {
            assert.notStrictEqual(redis.client as unknown, client)
            assert.strictEqual(yield* ping(redis), "PONG")
          }))
        assert.deepStrictEqual({ ...client.options }, before)
        assert.strictEqual(yield* Effect.promise(() => client.ping()), "PONG")
      }), 20_000)

    it.effect("refuses contradictory options and unsuitable clients as defects that do not quote them", () =>
      Effect.gen(function*() {
        const lazy = (options: IoRedis.RedisOptions) => new IoRedis.Redis({ ...options, lazyConnect: true } as object)
        const tooMuch = [
          Redis.layer({ url: `redis://localhost`, path: "/tmp/x" }),
          Redis.layer({ url: `http://:${secret}@localhost` }),
          Redis.layer({ url: `redis://:${secret}@localhost/one` }),
          Redis.layer({ url: `redis://user:12#${secret}@localhost` }),
          Redis.layer({ url: `redis://user:12?${secret}@localhost` }),
          Redis.layer({ url: `redis://localhost?password=${secret}` }),
          Redis.layer({ url: "redis://localhost?family=5" }),
          Redis.layer({ host: `user:${secret}@localhost` }),
          Redis.layer({ cluster: [{ host: `redis://:${secret}@localhost` }] }),
          Redis.layer({ cluster: ["localhost:1" as never] }),
          Redis.layer({ cluster: [null as never] }),
          Redis.layer({ sentinels: [{ port: 1 } as never], name: "one" }),
          Redis.layer({ tls: "yes" as never }),
          Redis.layer({ username: 5 as never }),
          Redis.layer({ password: Redacted.make(undefined as never) }),
          Redis.layer(null as never),
          Redis.layer({ cluster: [{ host: "localhost" }], db: 1 }),
          Redis.layer({ cluster: [] }),
          Redis.layer({ cluster: [{ host: "localhost", port: 99_999 }] }),
          Redis.layer({ sentinels: [{ host: "localhost", port: -5 }], name: "one" }),
          Redis.layer({ sentinels: [{ host: "localhost" }] }),
          Redis.layer({ port: 70_000 }),
          Redis.layer({ connectTimeout: 0 }),
          Redis.layerEmbedded({ connectTimeout: 0 }),
          Redis.layer({ url: "redis:6379" }),
          Redis.layer({ url: `valkey:${secret}` }),
          Redis.layer({ path: 5 as never }),
          Redis.layer({ host: {} as never }),
          Redis.layer({ host: "" }),
          Redis.layer({ url: 5 as never }),
          Redis.layer({ cluster: secret as never }),
          Redis.layer({ cluster: [{ host: 5 as never }] }),
          Redis.layer({ cluster: [{ host: "localhost" }], natMap: { "a:1": { host: "b" } as never } }),
          Redis.layer({ cluster: [{ host: "localhost" }], natMap: { "a:1": "b:1" as never } }),
          Redis.layer(`redis://:${secret}@localhost` as never),
          Redis.layerFromClient(undefined as never),
          Redis.layerFromClient({ host: "localhost" } as never),
          Redis.layerFromClient(lazy({}).pipeline() as never),
          Redis.layerFromClient(lazy({ keyPrefix: "x:" })),
          Redis.layerFromClient(lazy({ readOnly: true })),
          Redis.layerFromClient(lazy({ sentinels: [{ host: "localhost" }], name: "a", tls: {} })),
          Redis.layerFromClient(new IoRedis.Cluster([{ host: "localhost" }], { lazyConnect: true, scaleReads: "all" })),
          Redis.layerFromClient(
            new IoRedis.Cluster([{ host: "localhost" }], { lazyConnect: true, redisOptions: { db: 3 } as object })
          )
        ]
        for (const layer of tooMuch) {
          const exit = yield* Effect.exit(
            Effect.scoped(Layer.build(layer as Layer.Layer<Redis.Redis, Redis.RedisError>))
          )
          assert.isTrue(Exit.isFailure(exit))
          if (!Exit.isFailure(exit)) continue
          assert.instanceOf(Cause.squash(exit.cause), RangeError)
          assert.notInclude(Cause.pretty(exit.cause), secret)
        }
      }))
  })

  describe("failing to connect", () => {
    it.live("nothing listens", () =>
      Effect.gen(function*() {
        const port = yield* freePort
        const { error, took } = yield* failure(Redis.layer({ host: "127.0.0.1", port }))
        assert.strictEqual(error.reason._tag, "NotConnected")
        assert.strictEqual(error.executed, "no")
        assert.include(error.message, `127.0.0.1:${port} (ECONNREFUSED)`)
        assert.isBelow(took, 2000)
        const cluster = yield* failure(Redis.layer({ cluster: [{ host: "127.0.0.1", port }] }))
        assert.strictEqual(cluster.error.reason._tag, "NotConnected")
        assert.isBelow(cluster.took, 4000)
        const sentinel = yield* failure(Redis.layer({ sentinels: [{ host: "127.0.0.1", port }], name: "primary" }))
        assert.strictEqual(sentinel.error.reason._tag, "NotConnected")
        assert.include(sentinel.error.message, "(no Sentinel answers: ECONNREFUSED)")
        assert.isBelow(sentinel.took, 4000)
        const none = yield* failure(Redis.layer({ path: "/nowhere/redis.sock" }))
        assert.include(none.error.message, "ENOENT")
      }), 20_000)

    it.live("no connection can be tried with these options", () =>
      Effect.gen(function*() {
        const { ca } = yield* tlsServer()
        const place = { host: "localhost", port: yield* freePort }
        const wrong: ReadonlyArray<readonly [options: Redis.Options, code: string, advice: string]> = [
          [{ ...place, tls: { cert: "garbage" } }, "ERR_OSSL_PEM_NO_START_LINE", "correct `tls`"],
          [{ ...place, tls: { cert: ca, key: "garbage" } }, "ERR_OSSL", "correct `tls`"],
          [
            { ...place, tls: { minVersion: "TLSv9" as "TLSv1.3" } },
            "ERR_TLS_INVALID_PROTOCOL_VERSION",
            "correct `tls`"
          ],
          [{ ...place, host: "a\0b" }, "ERR_INVALID_ARG_VALUE", "check that it is running there"]
        ]
        for (const [options, code, advice] of wrong) {
          const { error, took } = yield* failure(Redis.layer(options))
          assert.strictEqual(error.reason._tag, "NotConnected")
          assert.include(error.message, code)
          assert.include(error.message, advice)
          assert.isBelow(took, 2000)
        }
      }), 20_000)

    it.live("what listens is not Redis", () =>
      Effect.gen(function*() {
        const http = yield* tcp((socket) => {
          socket.once("data", () => socket.end("HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"))
        })
        const reason = yield* reasonOf(Redis.layer({ host: "127.0.0.1", port: http.port }))
        assert.strictEqual(reason._tag, "UnsupportedServer")
        const closing = yield* tcp((socket) => socket.end())
        const closed = yield* failure(Redis.layer({ host: "127.0.0.1", port: closing.port }))
        assert.strictEqual(closed.error.reason._tag, "NotConnected")
        assert.isBelow(closed.took, 2000)
      }), 20_000)

    it.live("it accepts the connection and never answers", () =>
      Effect.gen(function*() {
        const silent = yield* tcp(() => {})
        const { error, millis, took } = yield* failure(
          Redis.layer({ host: "127.0.0.1", port: silent.port, connectTimeout: "300 millis" })
        )
        assert.strictEqual(error.reason._tag, "Timeout")
        assert.isBelow(took, 1500)
        assert.isAtLeast(millis, 250)
        const cluster = yield* failure(
          Redis.layer({ cluster: [{ host: "127.0.0.1", port: silent.port }], connectTimeout: "300 millis" })
        )
        assert.isBelow(cluster.took, 1500)
      }), 20_000)

    it.live("it answers late, and one of the questions never", () =>
      Effect.gen(function*() {
        const slow = yield* tcp((socket) =>
          socket.on("data", (data) => {
            for (const [, name] of data.toString().toLowerCase().matchAll(/\*\d+\r\n\$\d+\r\n(\w+)/g)) {
              if (name === "fcall" || name === "function") continue
              if (name === "ping") setTimeout(() => socket.write("+PONG\r\n"), 400)
              else if (name === "hello") socket.write("-ERR unknown command 'hello'\r\n")
              else if (name === "info") socket.write("$20\r\nredis_version:7.0.15\r\n")
              else socket.write("+OK\r\n")
            }
          })
        )
        const { error, took } = yield* failure(
          Redis.layer({ host: "127.0.0.1", port: slow.port, connectTimeout: "600 millis" })
        )
        assert.strictEqual(error.reason._tag, "Timeout")
        // One `connectTimeout` for all steps together.
        assert.isBelow(took, 850)
      }), 20_000)

    it.live("the password is wrong or missing, and no error shows it", () =>
      Effect.gen(function*() {
        const { port } = yield* server("--requirepass", "another")
        const lines: Array<string> = []
        const spied = ["log", "warn", "error"] as const
        const originals = spied.map((name) => console[name])
        for (const name of spied) console[name] = (...args: ReadonlyArray<unknown>) => void lines.push(inspect(args))
        yield* Effect.gen(function*() {
          for (const url of [`redis://:${secret}@127.0.0.1:${port}`, `redis://who:${secret}@127.0.0.1:${port}`]) {
            const { error } = yield* failure(Redis.layer({ url }))
            assert.strictEqual(error.reason._tag, "AuthenticationFailed")
            assert.notInclude(inspect(error, { depth: 20, showHidden: true }), secret)
            assert.notInclude(Cause.pretty(Cause.fail(error)), secret)
            assert.notInclude(JSON.stringify(error), secret)
          }
        }).pipe(
          Effect.ensuring(Effect.sync(() => spied.forEach((name, i) => console[name] = originals[i]!)))
        )
        assert.notInclude(lines.join("\n"), secret)
        assert.notInclude(lines.join("\n"), "Unhandled")
        const missing = yield* failure(Redis.layer({ host: "127.0.0.1", port }))
        assert.strictEqual(missing.error.reason._tag, "AuthenticationFailed")
        assert.include(missing.error.message, "none was given")
      }), 20_000)

    it.live("it is a replica, a Sentinel, a cluster node, or no cluster", () =>
      Effect.gen(function*() {
        const primary = yield* server()
        const replica = yield* server("--replicaof", "127.0.0.1", `${primary.port}`)
        assert.strictEqual(
          (yield* reasonOf(Redis.layer({ port: replica.port, host: "127.0.0.1" })))._tag,
          "ReadOnlyReplica"
        )
        const node = yield* server("--cluster-enabled", "yes")
        const single = yield* failure(Redis.layer({ port: node.port, host: "127.0.0.1" }))
        assert.include(single.error.message, "`cluster`")
        const cluster = yield* failure(Redis.layer({ cluster: [{ port: primary.port, host: "127.0.0.1" }] }))
        assert.strictEqual(cluster.error.reason._tag, "UnsupportedServer")
        const listed = { cluster: [{ port: node.port, host: "127.0.0.1" }] }
        const unready = yield* failure(Redis.layer(listed))
        assert.include(unready.error.message, "--cluster create")
        // It announces an address where nothing is.
        const nothing = yield* freePort
        const client = yield* Effect.acquireRelease(
          Effect.sync(() => new IoRedis.Redis(node.port)),
          (client) => Effect.sync(() => client.disconnect())
        )
        const call = (command: string, ...args: ReadonlyArray<string | number>) =>
          Effect.promise(() => client.call(command, ...args))
        for (const host of ["127.0.0.1", "nowhere.invalid"]) {
          yield* call("CONFIG", "SET", "cluster-announce-ip", host, "cluster-announce-port", nothing)
          if (host === "127.0.0.1") yield* call("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
          const unreachable = yield* failure(Redis.layer(listed))
          assert.include(unreachable.error.message, `${host}:${nothing}`)
          assert.include(unreachable.error.message, "`natMap`")
        }

        const directory = yield* temporaryDirectory
        const port = yield* freePort
        const config = path.join(directory, "sentinel.conf")
        fs.writeFileSync(
          config,
          `bind 127.0.0.1\nport ${port}\ndir ${directory}\nsentinel monitor primary 127.0.0.1 ${primary.port} 1\n`
        )
        yield* Effect.acquireRelease(
          Effect.sync(() => spawn(serverBinary(), [config, "--sentinel"], { stdio: "ignore" })),
          (child) => Effect.promise(() => stopServer(child))
        )
        yield* eventually("the Sentinel listens", () => accepts({ port }))
        const sentinel = yield* failure(Redis.layer({ port, host: "127.0.0.1" }))
        assert.include(sentinel.error.message, "`sentinels`")
        assert.strictEqual(
          (yield* reasonOf(Redis.layer({ cluster: [{ port, host: "127.0.0.1" }] })))._tag,
          "UnsupportedServer"
        )
        const other = yield* failure(Redis.layer({ sentinels: [{ host: "127.0.0.1", port }], name: "other" }))
        assert.include(other.error.message, "check `name`")
        const none = yield* failure(
          Redis.layer({ sentinels: [{ host: "127.0.0.1", port: primary.port }], name: "primary" })
        )
        assert.include(none.error.message, "list the Sentinels")
        const denied = yield* server("--requirepass", secret)
        const locked = yield* failure(
          Redis.layer({
            sentinels: [{ host: "127.0.0.1", port: denied.port }],
            name: "primary",
            sentinelPassword: Redacted.make("wrong")
          })
        )
        assert.include(locked.error.message, "`sentinelPassword`")
        yield* withRedis(Redis.layer({ sentinels: [{ host: "127.0.0.1", port }], name: "primary" }), (redis) =>
          Effect.gen(function*() {
            assert.strictEqual(redis.topology, "sentinel")
            assert.strictEqual(yield* ping(redis), "PONG")
          }))

        // A silent Sentinel and one that is down come first. ioredis prints the errors of the second Sentinel where nothing
        // listens to its client.
        const [silent, down] = [yield* tcp(() => {}), yield* freePort]
        const ports = [silent.port, down, port]
        const sentinels = ports.map((port) => ({ host: "127.0.0.1", port }))
        const printed: Array<unknown> = []
        const { error: print } = console
        console.error = (...lines) =>
          void printed.push(lines)
        const from = performance.now()
        yield* withRedis(Redis.layer({ sentinels, name: "primary", connectTimeout: "3 seconds" }), (redis) =>
          Effect.gen(function*() {
            const own = yield* redis.connect()
            assert.strictEqual(yield* own.send("PING"), "PONG")
            assert.isBelow(performance.now() - from, 5000)
            yield* Effect.promise(() =>
              new Promise((resolve) =>
                setTimeout(resolve, 1000)
              )
            )
          })).pipe(Effect.ensuring(Effect.sync(() => console.error = print)))
        assert.deepStrictEqual(printed, [])
      }), 30_000)
  })

  describe("permissions", () => {
    it.live("needs none but those of the commands sent, and says which is missing", () =>
      Effect.gen(function*() {
        const { port } = yield* server("--user", "limited", "on", ">pw", "~app:*", "-@all", "+ping", "+get", "+evalsha")
        const lines: Array<unknown> = []
        const warn = console.warn
        console.warn = (...args: ReadonlyArray<unknown>) => void lines.push(args)
        yield* withRedis(Redis.layer({ url: `redis://limited:pw@127.0.0.1:${port}` }), (redis) =>
          Effect.gen(function*() {
            assert.isFalse(connectionsOf(redis).features.functions)
            assert.strictEqual(yield* redis.send("GET", "app:a"), null)
            const error = yield* Effect.flip(redis.send("SET", "app:a", secret))
            assert.strictEqual(error.reason._tag, "MissingPermission")
            assert.include(error.message, "SET")
            assert.strictEqual((yield* Effect.flip(redis.send("GET", "other")))?.reason._tag, "MissingPermission")
          })).pipe(Effect.ensuring(Effect.sync(() => console.warn = warn)))
        assert.deepStrictEqual(lines, [])
        yield* withRedis(Redis.layer({ host: "127.0.0.1", port }), (redis) =>
          Effect.sync(() => assert.isTrue(connectionsOf(redis).features.functions)))
      }), 20_000)
  })

  describe("commands", () => {
    it.live(
      "answers are those of RESP2, and errors are classified without arguments",
      () =>
        withRedis(Redis.layerEmbedded(), (redis) =>
          Effect.gen(function*() {
            yield* redis.send("HSET", "h", "f", "v")
            assert.deepStrictEqual(yield* redis.send("HGETALL", "h"), ["f", "v"])
            assert.deepStrictEqual(yield* redis.send("hgetall", "h"), ["f", "v"])
            yield* redis.send("XADD", "s", "1-1", "f", "v")
            assert.deepStrictEqual(yield* redis.send("XREAD", "STREAMS", "s", "0"), [["s", [["1-1", ["f", "v"]]]]])
            yield* redis.send("ZADD", "z", 1.5, "m")
            assert.deepStrictEqual(yield* redis.send("ZRANGE", "z", 0, -1, "WITHSCORES"), ["m", "1.5"])

            const failed = (command: string, ...args: ReadonlyArray<string | number>) =>
              Effect.map(Effect.flip(redis.send(command, ...args)), (error) => {
                assert.notInclude(inspect(error, { depth: 20, showHidden: true }), secret)
                return error
              })
            const wrongType = yield* failed("LPUSH", "h", secret)
            assert.strictEqual(wrongType.reason._tag, "CommandFailed")
            assert.include(wrongType.message, "WRONGTYPE")
            assert.strictEqual(wrongType.executed, "no")
            assert.strictEqual((yield* failed("NOSUCHCOMMAND", secret)).reason._tag, "CommandFailed")
            const script = yield* failed("EVAL", `error('${secret}')`, 0)
            assert.strictEqual(script.reason._tag, "CommandFailed")
            assert.strictEqual(script.executed, "unknown")
            assert.strictEqual((yield* failed("FCALL", "none", 0, secret)).reason._tag, "FunctionMissing")
            assert.strictEqual((yield* failed("EVALSHA", "0".repeat(40), 0, secret)).reason._tag, "FunctionMissing")
            yield* redis.send("CONFIG", "SET", "maxmemory", 1)
            assert.strictEqual((yield* failed("SET", "k", secret)).reason._tag, "OutOfMemory")
            yield* redis.send("CONFIG", "SET", "maxmemory", 0)
            yield* redis.send("CONFIG", "SET", "min-replicas-to-write", 1)
            const unavailable = yield* failed("SET", "k", secret)
            assert.strictEqual(unavailable.reason._tag, "Unavailable")
            assert.strictEqual(unavailable.executed, "no")
            const wrongNames = ["", "__proto__", "MULTI ", "GET\n", "1GET", "größe"].map((name) => redis.send(name))
            for (const wrong of [...wrongNames, redis.send("SET", "k", undefined as never)]) {
              const bad = yield* Effect.exit(wrong)
              assert.isTrue(Exit.isFailure(bad) && Cause.squash(bad.cause) instanceof RangeError)
            }
          })),
      20_000
    )

    it.live(
      "a dedicated connection blocks alone, times out late, and survives interruption",
      () =>
        withRedis(Redis.layerEmbedded({ commandTimeout: "300 millis" }), (redis) =>
          Effect.gen(function*() {
            const dedicated = yield* redis.connect()
            const popped = yield* Effect.forkChild(dedicated.send("BLPOP", "list", 0))
            yield* eventually(
              "it blocks",
              async () => String(await Effect.runPromise(redis.send("INFO", "clients"))).includes("blocked_clients:1")
            )
            assert.strictEqual(yield* ping(redis), "PONG")
            yield* redis.send("RPUSH", "list", "a")
            assert.deepStrictEqual(yield* Fiber.join(popped), ["list", "a"])
            // Longer than commandTimeout: the deadline is counted from the end of the block.
            assert.strictEqual(yield* dedicated.send("BLPOP", "list", 0.5), null)
            const interrupted = yield* Effect.forkChild(dedicated.send("BLPOP", "list", 0))
            yield* eventually(
              "it blocks",
              async () => String(await Effect.runPromise(redis.send("INFO", "clients"))).includes("blocked_clients:1")
            )
            yield* Fiber.interrupt(interrupted)
            assert.strictEqual(yield* dedicated.send("PING"), "PONG")
          })),
      20_000
    )

    it.live(
      "a late answer is a timeout that leaves the connection alone, and can have been executed",
      () =>
        withRedis(Redis.layerEmbedded({ commandTimeout: "500 millis" }), (redis) =>
          Effect.gen(function*() {
            const other = yield* redis.connect()
            yield* other.send("CLIENT", "PAUSE", 600, "WRITE")
            const error = yield* Effect.flip(redis.send("SET", "a", "late"))
            assert.strictEqual(error.reason._tag, "Timeout")
            assert.strictEqual(error.executed, "unknown")
            yield* eventually("it was executed", async () => await Effect.runPromise(other.send("GET", "a")) === "late")
            assert.strictEqual(yield* redis.state, "ready")
          })),
      20_000
    )
  })

  describe("losing the connection", () => {
    it.live("the state follows a restart of the server, and nothing is queued or resent", () =>
      Effect.gen(function*() {
        const { child, directory, port } = yield* server()
        yield* withRedis(Redis.layer({ host: "127.0.0.1", port }), (redis) =>
          Effect.gen(function*() {
            const seen: Array<Redis.ConnectionState> = []
            yield* Effect.forkChild(
              Stream.runForEach(redis.changes, (state) => Effect.sync(() => void seen.push(state)))
            )
            yield* eventually("the first state", () => seen.length === 1)
            const blocked = yield* Effect.forkChild(Effect.flip(redis.send("BLPOP", "list", 0)))
            yield* Effect.yieldNow
            yield* Effect.promise(() => stopServer(child))
            const lost = yield* Fiber.join(blocked)
            assert.strictEqual(lost.reason._tag, "ConnectionLost")
            assert.strictEqual(lost.executed, "unknown")
            yield* eventually("it reconnects", () => seen.at(-1) === "reconnecting")
            const refused = yield* Effect.flip(ping(redis))
            assert.strictEqual(refused.reason._tag, "NotConnected")
            assert.strictEqual(refused.executed, "no")
            yield* Effect.acquireRelease(
              Effect.sync(() => spawnServer(["--port", `${port}`], directory)),
              (again) => Effect.promise(() => stopServer(again))
            )
            yield* eventually("it is ready again", () => seen.at(-1) === "ready")
            assert.strictEqual(yield* ping(redis), "PONG")
            assert.deepStrictEqual(seen, ["ready", "reconnecting", "ready"])
            assert.strictEqual(yield* redis.state, "ready")
          }))
      }).pipe(Effect.scoped), 20_000)

    it.live(
      "a half-open connection is given up after a deadline, and what was in flight fails at once",
      () =>
        Effect.gen(function*() {
          const { port } = yield* server()
          const { faults, port: through } = yield* proxy(port)
          yield* withRedis(Redis.layer({ host: "127.0.0.1", port: through, commandTimeout: "200 millis" }), (redis) =>
            Effect.gen(function*() {
              faults.swallow = true
              const error = yield* Effect.flip(redis.send("INCR", "n"))
              assert.strictEqual(error.reason._tag, "Timeout")
              faults.swallow = false
              yield* eventually(
                "a new connection answers",
                async () =>
                  Exit.isSuccess(await Effect.runPromiseExit(redis.send("INCR", "n")))
              )
              // The swallowed one was never sent again.
              assert.strictEqual(yield* redis.send("GET", "n"), "1")
            }))
        }).pipe(Effect.scoped),
      20_000
    )

    it.live(
      "leaves turns of the event loop to connect in, though a program tries again at once",
      () =>
        Effect.gen(function*() {
          const { port } = yield* server()
          yield* withRedis(Redis.layer({ host: "127.0.0.1", port }), (redis) =>
            Effect.gen(function*() {
              connectionsOf(redis).commands.reset()
              let tries = 0
              let failed = true
              while (failed && tries++ < 100_000) failed = Exit.isFailure(yield* Effect.exit(redis.send("PING")))
              assert.isFalse(failed)
            }))
        }).pipe(Effect.scoped),
      20_000
    )

    it.live("reset, down, and the deadline of plain connections", () =>
      Effect.gen(function*() {
        const { port } = yield* server()
        const { faults, port: through } = yield* proxy(port)
        yield* withRedis(Redis.layer({ host: "127.0.0.1", port: through }), (redis) =>
          Effect.gen(function*() {
            const { commands, dedicated } = connectionsOf(redis)
            const downs: Array<string | undefined> = []
            let ups = 0
            commands.onDown((error) => downs.push(error?.reason._tag))
            commands.onReady(() => ups++)
            assert.strictEqual(ups, 1)
            const tag = (promise: Promise<unknown>) =>
              Effect.promise(() =>
                promise.then(() => "answered", (error: unknown) => {
                  assert.instanceOf(error, Redis.RedisError)
                  return error.reason._tag as string
                })
              )
            faults.swallow = true
            const before = Date.now()
            const late = commands.send("SET", ["a", "1"], 60_000)
            const early = commands.send("SET", ["a", "1"], 50)
            assert.strictEqual(yield* tag(early), "Timeout")
            assert.isBelow(elapsed(before), 500)
            assert.isTrue(commands.isReady())
            commands.reset()
            assert.isFalse(commands.isReady())
            assert.strictEqual(yield* tag(late), "ConnectionLost")
            assert.strictEqual(yield* tag(commands.send("PING", [], 1000)), "NotConnected")
            faults.swallow = false
            yield* eventually("ready again", () => commands.isReady())
            assert.deepStrictEqual(downs, ["ConnectionLost"])
            assert.strictEqual(ups, 2)
            assert.strictEqual(yield* tag(commands.send("PING", [], 1000)), "answered")

            const own = dedicated()
            yield* eventually("the dedicated one is ready", () => own.isReady())
            const blocked = own.send("BLPOP", ["nothing", "0"], Infinity)
            yield* Effect.promise(() => own.close())
            assert.strictEqual(yield* tag(blocked), "ConnectionLost")
            assert.strictEqual(own.state(), "closed")
            assert.strictEqual(yield* tag(own.send("PING", [], 1000)), "NotConnected")
          }))
      }).pipe(Effect.scoped), 20_000)

    it.live("a primary that becomes a replica is not ready until it is one again", () =>
      Effect.gen(function*() {
        const { port } = yield* server()
        const other = yield* server()
        yield* withRedis(Redis.layer({ host: "127.0.0.1", port }), (redis) =>
          Effect.gen(function*() {
            const control = new IoRedis.Redis({ host: "127.0.0.1", port })
            yield* Effect.addFinalizer(() => Effect.sync(() => control.disconnect()))
            yield* Effect.promise(() => control.replicaof("127.0.0.1", other.port))
            const error = yield* Effect.flip(redis.send("SET", "a", 1))
            assert.strictEqual(error.executed, "no")
            yield* eventually("it is refused", async () => await Effect.runPromise(redis.state) === "reconnecting")
            yield* Effect.promise(() => control.replicaof("NO", "ONE"))
            yield* eventually("it is ready", async () => await Effect.runPromise(redis.state) === "ready")
            assert.strictEqual(yield* redis.send("SET", "a", 1), "OK")
          }))
      }).pipe(Effect.scoped), 20_000)

    it.live("Sentinel: the new primary is found after a failover", () =>
      Effect.gen(function*() {
        const primary = yield* server()
        const replica = yield* server("--replicaof", "127.0.0.1", `${primary.port}`)
        const directory = yield* temporaryDirectory
        const port = yield* freePort
        const config = path.join(directory, "sentinel.conf")
        fs.writeFileSync(
          config,
          `bind 127.0.0.1\nport ${port}\ndir ${directory}\nsentinel monitor primary 127.0.0.1 ${primary.port} 1\n` +
            `sentinel down-after-milliseconds primary 500\nsentinel failover-timeout primary 5000\n`
        )
        yield* Effect.acquireRelease(
          Effect.sync(() => spawn(serverBinary(), [config, "--sentinel"], { stdio: "ignore" })),
          (child) => Effect.promise(() => stopServer(child))
        )
        yield* eventually("the Sentinel listens", () => accepts({ port }))
        const sentinel = new IoRedis.Redis({ host: "127.0.0.1", port })
        yield* Effect.addFinalizer(() => Effect.sync(() => sentinel.disconnect()))
        yield* eventually("the replica is known", async () =>
          (await sentinel.call("SENTINEL", "replicas", "primary") as Array<unknown>).length === 1)
        yield* withRedis(Redis.layer({ sentinels: [{ host: "127.0.0.1", port }], name: "primary" }), (redis) =>
          Effect.gen(function*() {
            yield* redis.send("SET", "a", 1)
            yield* Effect.promise(() =>
              stopServer(primary.child)
            )
            const failures = new Set<string>()
            yield* Effect.promise(async () => {
              const deadline = performance.now() + 25_000
              for (;;) {
                const exit = await Effect.runPromiseExit(redis.send("SET", "a", 2))
                if (Exit.isSuccess(exit)) {
                  return
                }
                failures.add(Cause.pretty(exit.cause))
                if (performance.now() > deadline) {
                  throw new Error("no failover")
                }
                await new Promise((resolve) =>
                  setTimeout(resolve, 50)
                )
              }
            })
            // It does answer, each time that it is asked.
            assert.notInclude([...failures].join(), "no Sentinel answers")
            const direct = new IoRedis.Redis({ host: "127.0.0.1", port: replica.port })
            yield* Effect.addFinalizer(() => Effect.sync(() => direct.disconnect()))
            assert.strictEqual(yield* Effect.promise(() => direct.get("a")), "2")
          }))
      }).pipe(Effect.scoped), 60_000)
  })

  describe("embedded server", () => {
    const alive = (pid: number) => {
      try {
        process.kill(pid, 0)
        return true
      } catch {
        return false
      }
    }

    it.live("is reachable by its URL and ends with its scope", () =>
      Effect.gen(function*() {
        const { path: socket, pid } = yield* Effect.gen(function*() {
          const embedded = yield* Redis.EmbeddedServer
          yield* Effect.flatMap(Redis.Redis, (redis) => redis.send("SET", "a", 1))
          assert.strictEqual(
            yield* withRedis(Redis.layer({ url: embedded.url }), (redis) => redis.send("GET", "a")),
            "1"
          )
          return embedded
        }).pipe(Effect.provide(Redis.layerEmbedded()))
        assert.isFalse(alive(pid))
        assert.isFalse(fs.existsSync(path.dirname(socket)))
      }), 20_000)

    it.live(
      "has a URL for any temporary directory, and leaves nothing there when it cannot start",
      () =>
        Effect.gen(function*() {
          const directory = path.join(yield* temporaryDirectory, "a#b?c%41 ü")
          fs.mkdirSync(directory)
          const before = process.env["TMPDIR"]
          process.env["TMPDIR"] = directory
          yield* Effect.addFinalizer(() =>
            Effect.sync(() => {
              if (before === undefined) delete process.env["TMPDIR"]
              else process.env["TMPDIR"] = before
            })
          )
          yield* Effect.flatMap(Redis.EmbeddedServer, ({ url }) =>
            Effect.flatMap(withRedis(Redis.layer({ url }), ping), (pong) =>
              Effect.sync(() =>
                assert.strictEqual(pong, "PONG")
              ))).pipe(Effect.provide(Redis.layerEmbedded()))
          for (const args of [["--maxmemory", "1\0"], 5 as never]) {
            const { error } = yield* failure(Redis.layerEmbedded({ args }))
            assert.strictEqual(error.reason._tag, "EmbeddedFailed")
          }
          assert.deepStrictEqual(fs.readdirSync(directory), [])
        }).pipe(Effect.scoped),
      20_000
    )

    it.live("exits with its process, however that ends", () =>
      Effect.gen(function*() {
        const script = `
          import * as Effect from "effect/Effect"
          import * as Redis from ${JSON.stringify(new URL("../src/Redis.ts", import.meta.url).href)}
          Effect.runFork(Effect.gen(function*() {
            const embedded = yield* Redis.EmbeddedServer
            console.log(JSON.stringify({ pid: embedded.pid, path: embedded.path }))
            yield* Effect.never
          }).pipe(Effect.provide(Redis.layerEmbedded())))`
        for (const signal of ["SIGKILL", "SIGTERM", "SIGINT"] as const) {
          const child = yield* Effect.acquireRelease(
            Effect.sync(() =>
              spawn(process.execPath, ["--input-type=module", "-e", script], {
                cwd: path.dirname(new URL(import.meta.url).pathname),
                stdio: ["ignore", "pipe", "inherit"]
              })
            ),
            (child) => Effect.promise(() => stopServer(child))
          )
          const line = yield* Effect.promise(() =>
            new Promise<string>((resolve) => child.stdout.once("data", (data: Buffer) => resolve(data.toString())))
          )
          const { path: socket, pid } = JSON.parse(line) as { readonly path: string; readonly pid: number }
          assert.isTrue(alive(pid))
          child.kill(signal)
          yield* eventually(`the server is gone after ${signal}`, () => !alive(pid))
          yield* eventually("its directory is gone", () => !fs.existsSync(path.dirname(socket)))
        }
      }).pipe(Effect.scoped), 30_000)

    it.live("says how to install a server that is not there, and why one did not start", () =>
      Effect.gen(function*() {
        const missing = yield* failure(Redis.layerEmbedded({ binary: "no-such-redis-server" }))
        assert.strictEqual(missing.error.reason._tag, "EmbeddedFailed")
        for (const command of ["apt-get install", "dnf install", "apk add", "brew install"]) {
          assert.include(missing.error.message, command)
        }
        const wrong = yield* failure(Redis.layerEmbedded({ args: ["--no-such-option", "1"] }))
        assert.strictEqual(wrong.error.reason._tag, "EmbeddedFailed")
        assert.include(wrong.error.message, "ended at once")
      }), 20_000)
  })
})
