import { assert, it } from "@effect/vitest"
import { Effect, Exit, Fiber, Stream } from "effect"
import { Cluster, Redis } from "ioredis"
import * as fs from "node:fs"
import * as net from "node:net"
import { spawn } from "../src/testing/Process.ts"
import { make as proxy } from "../src/testing/Proxy.ts"
import { cluster } from "./support/cluster.ts"
import { eventually } from "./support/eventually.ts"
import { sentinel } from "./support/sentinel.ts"
import { awaitInSync, replicated, standalone } from "./support/servers.ts"

const timeout = 60_000

const alive = (pid: number) => {
  try {
    process.kill(pid, 0)
  } catch {
    return false
  }
  // A dead process whose parent has ended may stay as an entry until init collects it.
  const status = `/proc/${pid}/status`
  return !fs.existsSync(status) || !/^State:\s+Z/m.test(fs.readFileSync(status, "utf8"))
}

const client = (port: number) =>
  Effect.acquireRelease(
    Effect.sync(() => {
      const options = { maxRetriesPerRequest: 0, enableOfflineQueue: true, retryStrategy: () => 20 }
      const redis = new Redis({ host: "127.0.0.1", port, ...options })
      redis.on("error", () => undefined)
      return redis
    }),
    (redis) => Effect.sync(() => redis.disconnect())
  )

it.effect(
  "a server keeps or discards its data, and leaves nothing behind after a failure",
  () =>
    Effect.gen(function*() {
      let seen = { pid: 0, socket: "" }
      const exit = yield* Effect.exit(Effect.scoped(Effect.gen(function*() {
        const server = yield* standalone({ persistence: "aof" })
        seen = { pid: server.pid, socket: server.socket }
        yield* server.cli("SET", "key", "a value")
        yield* server.stop("SIGKILL")
        yield* server.start()
        assert.strictEqual(yield* server.cli("GET", "key"), "a value")
        yield* server.stop("SIGTERM")
        yield* server.start({ data: "discard" })
        assert.strictEqual(yield* server.cli("GET", "key"), "")
        assert.match((yield* Effect.flip(server.cli("INCR"))).message, /wrong number of arguments/)
        yield* server.pause
        seen = { pid: server.pid, socket: server.socket }
        return yield* Effect.fail("stop")
      })))
      assert.isTrue(exit._tag === "Failure")
      assert.isFalse(alive(seen.pid))
      assert.isFalse(fs.existsSync(seen.socket))
      assert.isFalse(fs.existsSync(seen.socket.split("/").slice(0, -2).join("/")))
    }),
  timeout
)

it.effect("a server and a program die with a test process that is killed", () =>
  Effect.gen(function*() {
    const outer = yield* spawn<{ pids: ReadonlyArray<number>; directory: string }>(
      new URL("./support/programs/owner.ts", import.meta.url)
    )
    const { directory, pids } = yield* outer.waitFor((event) => event.pids.length === 3)
    assert.isTrue(pids.every(alive) && fs.existsSync(directory))
    yield* outer.kill9
    assert.strictEqual((yield* outer.exit).signal, "SIGKILL")
    const left = () => [directory, `${directory}.gone`].some((path) => fs.existsSync(path))
    yield* eventually(Effect.sync(() => !pids.some(alive) && !left()))
  }), timeout)

it.effect("an access list and TLS apply to every user but the administrator", () =>
  Effect.gen(function*() {
    const server = yield* standalone({ acl: ["user default off", "user app on >secret ~app:* +@all"], tls: true })
    assert.strictEqual(yield* server.cli("SET", "other", "1"), "OK")
    const url = server.url.replace("//", "//app:secret@")
    const redis = new Redis(url, { tls: { ca: server.tls?.ca ?? "" } })
    assert.strictEqual(yield* Effect.promise(() => redis.set("app:key", "1")), "OK")
    assert.match(String(yield* Effect.promise(() => redis.get("other").catch(String))), /NOPERM/)
    redis.disconnect()
  }), timeout)

it.effect("each fault of the proxy happens once, where it was asked for", () =>
  Effect.gen(function*() {
    const server = yield* standalone()
    const front = yield* proxy(server)
    const redis = yield* client(front.port)
    const incr = Effect.tryPromise(() => redis.incr("n"))
    const count = Effect.map(server.cli("GET", "n"), Number)
    const isIncr = (request: { name: string }) => request.name === "INCR"
    assert.strictEqual(yield* incr, 1)

    const lost = yield* front.once(isIncr, "dropReply")
    assert.strictEqual((yield* Effect.exit(incr))._tag, "Failure")
    assert.deepStrictEqual((yield* lost).args.map((word) => word.toLowerCase()), ["incr", "n"])
    assert.strictEqual(yield* count, 2)

    yield* front.once(isIncr, "drop")
    assert.strictEqual((yield* Effect.exit(incr))._tag, "Failure")
    assert.strictEqual(yield* count, 2)

    yield* front.once(isIncr, "duplicate")
    assert.strictEqual(yield* incr, 3)
    assert.strictEqual(yield* Effect.promise(() => redis.get("n")), "4")

    const held = yield* front.hold(isIncr)
    const pending = redis.incr("n")
    yield* held.request
    assert.strictEqual(yield* count, 4)
    yield* held.release()
    assert.strictEqual(yield* Effect.promise(() => pending), 5)

    yield* front.dropReplies
    assert.strictEqual((yield* Effect.exit(incr))._tag, "Failure")
    assert.strictEqual(yield* count, 6)
    yield* front.pass
    yield* eventually(incr)
    assert.strictEqual(yield* count, 7)

    yield* front.delay({ replies: 200 })
    const started = performance.now()
    yield* incr
    assert.isAtLeast(performance.now() - started, 195)
    yield* front.pass

    yield* front.refuse
    yield* front.closeAll
    yield* eventually(Effect.sync(() => redis.status === "reconnecting"))
    yield* front.acceptThenClose
    const before = front.counters.connections
    yield* front.pass
    yield* eventually(Effect.sync(() => redis.status === "ready"))
    assert.strictEqual(front.counters.connections, before + 1)

    yield* front.blackhole
    let settled = false
    redis.incr("n").catch(() => undefined).finally(() => {
      settled = true
    })
    yield* eventually(Effect.sync(() => front.counters.open === 1))
    assert.strictEqual(yield* count, 8)
    assert.isFalse(settled)
    yield* front.pass
    assert.isFalse(settled)
    yield* front.closeAll
    yield* eventually(Effect.sync(() => settled))
    assert.strictEqual(yield* count, 8)
    assert.isAtLeast(front.counters.of("INCR"), 8)
  }), timeout)

it.effect("the proxy holds back nothing when its scope is closed", () =>
  Effect.gen(function*() {
    const server = yield* standalone()
    const program = yield* spawn(new URL("./support/programs/delayed.ts", import.meta.url), { argument: server.port })
    assert.deepStrictEqual(yield* program.exit, { code: 0, signal: null })
  }), timeout)

it.effect("the proxy is in the mode that was asked for last", () =>
  Effect.gen(function*() {
    const front = yield* proxy(yield* standalone())
    const connecting = Effect.callback<string>((resume) => {
      const socket = net.connect(front.port, "127.0.0.1")
      socket.on("connect", () => resume(Effect.succeed("connected")))
      socket.on("error", (error: NodeJS.ErrnoException) => resume(Effect.succeed(String(error.code))))
      return Effect.sync(() => socket.destroy())
    })
    yield* front.refuse
    yield* Effect.all([front.pass, front.dropReplies, front.pass], { concurrency: "unbounded" })
    assert.strictEqual(yield* connecting, "connected")
    yield* front.refuse
    yield* Effect.all([front.pass, front.refuse], { concurrency: "unbounded" })
    assert.strictEqual(yield* connecting, "ECONNREFUSED")
    const opening = yield* Effect.forkChild(front.pass, { startImmediately: true })
    yield* Effect.all([Fiber.interrupt(opening), front.refuse], { concurrency: "unbounded" })
    assert.strictEqual(yield* connecting, "ECONNREFUSED")
  }), timeout)

it.effect("the proxy refuses ports, delays and verdicts that are none", () =>
  Effect.gen(function*() {
    const front = yield* proxy({ port: 6379 })
    const held = yield* front.hold(() => true)
    const attempts = [
      front.once(() => true, "dropped" as never),
      front.once(() => true, undefined as never),
      held.release("dropped" as never),
      ...[0, -1, 1.5, 70_000, Number.NaN, "6379" as never].flatMap((port) => [proxy({ port }), front.retarget(port)]),
      ...[-1, Number.NaN, 1e10, "5" as never].flatMap((time) => [
        front.delay({ requests: time }),
        front.delay({ replies: time })
      ])
    ]
    for (const [at, attempt] of attempts.entries()) {
      const exit = yield* Effect.exit(attempt)
      assert.isTrue(Exit.isFailure(exit) && String(exit.cause).includes("RangeError"), String(at))
    }
  }))

it.effect("the proxy passes pushes, large values and both protocols", () =>
  Effect.gen(function*() {
    const server = yield* standalone()
    const front = yield* proxy(server)
    for (const protocol of [2, 3] as const) {
      const options = { protocol, host: "127.0.0.1", port: front.port }
      const [writer, reader] = [new Redis(options), new Redis(options)]
      const messages: Array<string> = []
      reader.on("message", (_, message) => messages.push(message))
      yield* Effect.promise(() => reader.subscribe("a", "b"))
      const large = "x\r\n".repeat(1_000_000)
      yield* Effect.promise(() => writer.set("large", large))
      assert.isTrue((yield* Effect.promise(() => writer.get("large"))) === large)
      yield* Effect.promise(() => writer.publish("b", "hello"))
      yield* eventually(Effect.sync(() => messages.length === 1))
      yield* Effect.promise(() => reader.ping())
      writer.disconnect()
      reader.disconnect()
    }
  }), timeout)

it.effect("a program reports, stops and continues", () =>
  Effect.gen(function*() {
    const program = yield* spawn<{ n: number }>(new URL("./support/programs/counter.ts", import.meta.url), {
      argument: { last: 5 }
    })
    assert.strictEqual((yield* program.waitFor(({ n }) => n === 3)).n, 3)
    yield* program.sigstop
    yield* program.sigcont
    assert.deepStrictEqual(yield* program.exit, { code: 3, signal: null })
    assert.deepStrictEqual(yield* Stream.runCollect(program.events), [1, 2, 3, 4, 5].map((n) => ({ n })))
    assert.strictEqual(yield* program.output, "not an event\n")
    const missing = yield* Effect.exit(program.waitFor(({ n }) => n === 6))
    assert.match(String(missing), /ended \(code 3/)
  }), timeout)

it.effect("a condition that never holds is reported with its last failure", () =>
  Effect.gen(function*() {
    const exit = yield* Effect.exit(eventually(Effect.fail("still blue"), { timeout: 100 }))
    assert.match(String(exit), /not met after 1\d\d ms .* last: .*still blue/s)
    const hung = yield* Effect.exit(eventually(Effect.never, { timeout: 50 }))
    assert.match(String(hung), /did not finish/)
  }))

it.effect("a replica follows", () =>
  Effect.gen(function*() {
    const { primary, replicas } = yield* replicated(2)
    yield* primary.cli("SET", "key", 1)
    yield* awaitInSync(primary, replicas)
    for (const replica of replicas) assert.strictEqual(yield* replica.cli("GET", "key"), "1")
  }), timeout)

it.effect("sentinels promote a replica that missed the last write", () =>
  Effect.gen(function*() {
    const group = yield* sentinel()
    const first = yield* group.primary
    const replicas = yield* group.replicas
    yield* first.cli("SET", "early", 1)
    yield* awaitInSync(first, replicas)
    for (const replica of replicas) yield* group.cut(replica)
    yield* first.cli("SET", "late", 1)
    yield* first.stop()
    for (const replica of replicas) yield* replica.resume
    const next = yield* group.awaitFailover(first)
    assert.notStrictEqual(next, first)
    assert.strictEqual(yield* next.cli("MGET", "early", "late"), "1\n")
    yield* first.start()
    yield* eventually(Effect.map(first.cli("ROLE"), (role) => role.startsWith("slave")))
  }), timeout)

it.effect("a cluster migrates a slot under load and promotes a replica", () =>
  Effect.gen(function*() {
    const nodes = yield* cluster({ replicas: 1 })
    const from = yield* nodes.serving("{tag}")
    const to = (yield* nodes.primaries).find((server) => server !== from)
    if (to === undefined) return yield* Effect.die("no target")
    for (let n = 0; n < 20; n++) yield* from.cli("SET", `{tag}${n}`, n)
    const redis = yield* Effect.acquireRelease(
      Effect.sync(() => new Cluster(Array.from(nodes.startupNodes))),
      (redis) => Effect.sync(() => redis.disconnect())
    )
    let done = 0
    const write = Effect.promise(async () => {
      done = await redis.incr(`{tag}load${done % 5}`)
    })
    const load = yield* Effect.forkChild(Effect.forever(write))
    const migration = yield* nodes.migration("{tag}", to)
    yield* migration.begin
    assert.strictEqual(yield* migration.move(["{tag}1"]), 1)
    assert.match((yield* Effect.flip(from.cli("GET", "{tag}1"))).message, /ASK/)
    yield* migration.complete
    assert.strictEqual(yield* nodes.serving("{tag}"), to)
    const before = done
    yield* eventually(Effect.sync(() => done > before + 10))
    yield* Fiber.interrupt(load)
    assert.isAtLeast(Number(yield* to.cli("CLUSTER", "COUNTKEYSINSLOT", migration.slot)), 20)
    assert.strictEqual(yield* from.cli("CLUSTER", "COUNTKEYSINSLOT", migration.slot), "0")

    const [replica] = yield* nodes.replicasOf(to)
    if (replica === undefined) return yield* Effect.die("no replica")
    yield* awaitInSync(to, [replica])
    yield* nodes.cut(replica)
    yield* to.cli("SET", "{tag}late", 1)
    yield* to.stop()
    yield* replica.resume
    assert.strictEqual(yield* nodes.awaitPromotion("{tag}", to), replica)
    assert.strictEqual(yield* replica.cli("MGET", "{tag}2", "{tag}late"), "2\n")
  }), timeout)

it.live(
  "a process gets all events of a program that is killed right behind the last one",
  () =>
    Effect.gen(function*() {
      const count = 20_000
      const program = yield* spawn<{ n: number }>(new URL("./support/programs/chatty.ts", import.meta.url), {
        argument: count
      })
      assert.strictEqual((yield* program.exit).signal, "SIGKILL")
      assert.deepStrictEqual(program.received.map(({ n }) => n), Array.from({ length: count }, (_, at) => at + 1))
    }).pipe(Effect.scoped),
  timeout
)
