/** Task groups: one worker for each shard, all the results for waiters, and word of workers that died. */
import { assert, layer } from "@effect/vitest"
import { Cause, Deferred, Duration, Effect, Exit, Fiber, Option, Queue, Scheduler, Schema, Scope, Stream } from "effect"
import { TestClock } from "effect/testing"
import * as fc from "fast-check"
import { Coordinator, Lock, TaskGroup, Topic } from "../src/index.ts"
import { spaceOf } from "../src/internal/hold/place.ts"
import { make as proxy } from "../src/testing/Proxy.ts"
import { assertUnanswered, behindLine } from "./support/behindLine.ts"
import { departed } from "./support/departed.ts"
import { runs } from "./support/effort.ts"
import { eventually, realSleep } from "./support/eventually.ts"
import { assertEmpty, deadlineOf, freshNamespace, type Node, node, TestServer, withNode } from "./support/live.ts"
import { asks, fields } from "./support/requests.ts"
import type { Server } from "./support/servers.ts"
import { forget, ownedIn } from "./support/sessions.ts"
import {
  eventsOf,
  forgetSession,
  fragile,
  lose,
  on,
  pending,
  promptly,
  sessionsOf,
  several
} from "./support/several.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

/** Short, so that the namespace is empty soon. */
const timeToLive = "100 millis"
const timing = { partitions: 1, lease: "3 seconds", margin: "500 millis" } as const

const groupOn = (context: Node, options?: { readonly shards?: number; readonly name?: string }) =>
  on(context, TaskGroup.make({ name: "job", result: Schema.Number, timeToLive, ...options }))

const reasonOf = <A, E>(effect: Effect.Effect<A, TaskGroup.TaskGroupError<E>, Scope.Scope>) =>
  Effect.map(Effect.flip(effect), ({ reason }) => reason)

const arrayOf = <A>(results: ReadonlyMap<string, A>) => [...results]

const sessionOf = (context: Node) => Effect.map(sessionsOf(context), ([session]) => session!.id!)

/** A waiter that has asked how it is. */
const awaiting = <A, E>(group: TaskGroup.TaskGroup<A, E>, onWorkerLost?: "fail" | "wait") =>
  Effect.gen(function*() {
    const fiber = yield* Effect.forkChild(group.awaitAll({ onWorkerLost }), { startImmediately: true })
    // Its question was before this one.
    yield* group.snapshot
    return fiber
  })

/** A worker whose session ends in Redis while it believes that all is well. */
const endSession = (server: Server, namespace: string, context: Node) =>
  Effect.gen(function*() {
    const id = yield* sessionOf(context)
    const sessions = `{${namespace}:00}:sessions`
    yield* server.cli(
      "EVAL",
      "local packed = redis.call('HGET', KEYS[1], 's' .. ARGV[1]) " +
        "redis.call('HSET', KEYS[1], 's' .. ARGV[1], packed:sub(1, 9) .. struct.pack('<d', 0) .. packed:sub(18)) " +
        "redis.call('ZADD', KEYS[2], 0, ARGV[1])",
      2,
      sessions,
      `{${namespace}:00}:due`,
      id
    )
  })

layer(TestServer.layer, live)("a task group", (it) => {
  it.effect("answers all results, to waiters and to processes that come later", () =>
    several(3, (nodes) =>
      Effect.gen(function*() {
        const groups = yield* Effect.forEach(nodes, (context) => groupOn(context, { shards: 3 }))
        const waiting = yield* Effect.forEach(groups, (group) => Effect.forkChild(group.awaitAll()))
        const second = yield* groups[1]!.register("b")
        yield* groups[0]!.run("a", Effect.succeed(1))
        yield* second.submit(2)
        yield* Effect.forEach(waiting, pending)
        assert.strictEqual(yield* groups[2]!.run("c", Effect.succeed(3)), 3)
        const expected = [["b", 2], ["a", 1], ["c", 3]]
        for (const results of yield* promptly(Effect.forEach(waiting, Fiber.join), "the waiters")) {
          assert.deepStrictEqual<unknown>(arrayOf(results), expected)
        }
        const late = yield* groupOn(nodes[0]!)
        assert.deepStrictEqual<unknown>(arrayOf(yield* promptly(late.awaitAll(), "a late one")), expected)
        assert.deepStrictEqual(yield* late.snapshot, {
          round: 1,
          expected: 3,
          registered: 3,
          running: 0,
          done: 3,
          failed: 0,
          lost: 0,
          changed: undefined
        })
      })))

  it.effect("stores what is published with a result once, also when that is submitted again after an interruption", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const group = yield* groupOn(a!)
        const topic = yield* on(a!, Topic.make({ name: "done", schema: Schema.Number, colocate: "job" }))
        yield* Effect.addFinalizer(() => Effect.orDie(topic.purge))
        const ends = yield* Effect.forEach(Array.from({ length: 30 }, (_, at) => at), (at) =>
          Effect.scoped(Effect.gen(function*() {
            const task = yield* group.register(String(at))
            const submit = Effect.flatMap(topic.publication(at), (publish) =>
              task.submit(at, { publish }))
            yield* Effect.timeoutOption(submit, at % 3)
            return yield* Effect.match(submit, { onFailure: ({ reason }) => reason._tag, onSuccess: () => "again" })
          })))
        assert.isTrue(
          ends.every((end) =>
            end === "again" || end === "SubmitRefused"
          ),
          String(ends)
        )
        assert.include(ends, "again")
        assert.strictEqual((yield* topic.state).length, ends.length)
      })))

  it.effect("has one worker for each shard, and none for one that is done", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const [one, two] = [yield* groupOn(a!), yield* groupOn(b!)]
        const task = yield* one.register("x")
        for (const group of [one, two]) {
          const reason = yield* reasonOf(group.register("x"))
          assert.deepInclude(reason, { _tag: "ShardTaken", name: "job", shard: "x" })
        }
        yield* task.submit(1)
        assert.strictEqual((yield* reasonOf(task.submit(2)))._tag, "SubmitRefused")
        assert.strictEqual((yield* reasonOf(task.fail("late")))._tag, "SubmitRefused")
        assert.strictEqual((yield* reasonOf(two.register("x")))._tag, "ShardDone")
        // Done is done: it is not run again, and the answer is what was submitted.
        assert.strictEqual(yield* two.run("x", Effect.die("it was run again")), 1)
        assert.deepStrictEqual(arrayOf(yield* two.awaitAll()), [["x", 1]])
      })))

  it.effect("reports a worker that failed, with its error, and lets another one try", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const options = {
          name: "job",
          timeToLive,
          shards: 1,
          result: Schema.Date,
          error: Schema.Struct({ code: Schema.BigInt })
        } as const
        const [one, two] = [yield* on(a!, TaskGroup.make(options)), yield* on(b!, TaskGroup.make(options))]
        const waiting = yield* Effect.forkChild(two.awaitAll({ onWorkerLost: "wait" }))
        const failed = yield* Effect.flip(one.run("x", Effect.fail({ code: 7n })))
        assert.deepStrictEqual<unknown>(failed, { code: 7n })
        const error = yield* promptly(Effect.flip(Fiber.join(waiting)), "the failure")
        if (error.reason._tag !== "WorkerFailed") return assert.fail(error.reason._tag)
        // Typed.
        const code: bigint = error.reason.error.code
        assert.deepStrictEqual([code, error.reason.shard, error.reason.name], [7n, "x", "job"])
        assert.deepInclude(yield* one.snapshot, { failed: 1, registered: 1 })
        const again = yield* two.register("x")
        assert.deepInclude(yield* one.snapshot, { failed: 0, running: 1, registered: 1 })
        yield* again.submit(new Date(86_400_000))
        const results = yield* one.awaitAll()
        assert.strictEqual(results.get("x")!.toISOString(), "1970-01-02T00:00:00.000Z")
      })))

  it.effect("reports a worker that is lost, at once or not at all", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const [one, two] = [yield* groupOn(a!, { shards: 2 }), yield* groupOn(b!)]
        const failing = yield* Effect.forkChild(two.awaitAll())
        const waiting = yield* Effect.forkChild(two.awaitAll({ onWorkerLost: "wait" }))
        yield* one.run("x", Effect.succeed(1))
        // Its scope is closed, it dies, it is interrupted.
        yield* Effect.scoped(one.register("y"))
        assert.deepInclude(yield* promptly(reasonOf(Fiber.join(failing)), "the loss"), {
          _tag: "WorkerLost",
          shard: "y"
        })
        assert.deepInclude(yield* reasonOf(one.awaitAll()), { _tag: "WorkerLost", shard: "y" })
        const dead = yield* Effect.exit(one.run("y", Effect.die("dead")))
        assert.isTrue(Exit.isFailure(dead) && Cause.hasDies(dead.cause))
        assert.isTrue(Option.isNone(yield* Effect.timeoutOption(one.run("y", Effect.never), "20 millis")))
        assert.deepInclude(yield* two.snapshot, { lost: 1, done: 1 })
        yield* pending(waiting)
        yield* two.run("y", Effect.succeed(2))
        assert.deepStrictEqual(arrayOf(yield* promptly(Fiber.join(waiting), "the waiter")), [["x", 1], ["y", 2]])
      })))

  it.effect("refuses the late result of a worker that was taken for dead", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const [one, two] = [yield* groupOn(a!), yield* groupOn(b!)]
        const former = yield* one.register("x")
        const running = yield* Effect.forkChild(one.run("y", Effect.never))
        yield* eventually(Effect.map(two.snapshot, ({ running }) => running === 2))
        yield* endSession(server, namespace, a!)
        // No process had to reap it before.
        const next = yield* two.register("x")
        assert.isAbove(next.lease.token, former.lease.token)
        const reason = yield* reasonOf(former.submit(1))
        assert.strictEqual(reason._tag, "LeaseLost")
        assert.strictEqual((yield* promptly(reasonOf(Fiber.join(running)), "the effect"))._tag, "LeaseLost")
        yield* next.submit(2)
        yield* two.run("y", Effect.succeed(3))
        assert.deepStrictEqual(arrayOf(yield* one.awaitAll()), [["x", 2], ["y", 3]])
      })))

  it.effect("accepts a result whose answer was lost together with the session", () =>
    behindLine(({ context: mine, direct, line }) =>
      Effect.gen(function*() {
        const other = yield* direct(timing)
        const [one, two] = [yield* groupOn(mine), yield* groupOn(other)]
        const met = yield* line.once(asks("taskGroup.submit"), "blackholeReply")
        const ran = yield* Effect.forkChild(one.run("x", Effect.succeed(1)))
        yield* met
        yield* line.blackhole
        yield* eventually(Effect.map(sessionsOf(mine), ([session]) => session!.state === "opening"))
        yield* line.pass
        yield* line.closeAll
        assert.strictEqual(yield* promptly(Fiber.join(ran), "the worker"), 1)
        assert.deepStrictEqual(arrayOf(yield* two.awaitAll()), [["x", 1]])
      }), { ...timing, lease: "1500 millis", margin: "200 millis" }))

  it.effect("is awaited under a TestClock, also when Redis is away for a while", () =>
    behindLine(({ context, line }) =>
      Effect.gen(function*() {
        const group = yield* groupOn(context, { shards: 1 })
        yield* line.blackhole
        const waiting = yield* Effect.forkChild(Effect.provide(group.awaitAll(), TestClock.layer()), {
          startImmediately: true
        })
        // The question of the waiter was before this one, and has failed too.
        yield* assertUnanswered([group.snapshot])
        yield* pending(waiting)
        yield* line.pass
        yield* line.closeAll
        yield* group.run("x", Effect.succeed(1))
        assert.deepStrictEqual(arrayOf(yield* promptly(Fiber.join(waiting), "the results")), [["x", 1]])
      }), { ...timing, requestTimeout: "200 millis" }))

  it.effect("begins a new round with a reset", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const [one, two] = [yield* groupOn(a!, { shards: 2 }), yield* groupOn(b!)]
        const waiting = yield* Effect.forkChild(two.awaitAll())
        const done = yield* one.register("x")
        yield* done.submit(1)
        const task = yield* two.register("y")
        const interrupted = yield* Deferred.make<void>()
        const running = yield* Effect.forkChild(
          two.run("z", Effect.never.pipe(Effect.onInterrupt(() => Deferred.succeed(interrupted, undefined))))
        )
        yield* eventually(Effect.map(one.snapshot, ({ running }) => running === 2))
        yield* one.reset
        assert.deepInclude(yield* one.snapshot, { round: 2, registered: 0, expected: 2 })
        assert.deepInclude(yield* promptly(reasonOf(Fiber.join(waiting)), "the waiter"), {
          _tag: "GroupReset",
          round: 1
        })
        yield* promptly(Deferred.await(interrupted), "the effect")
        assert.deepInclude(yield* reasonOf(Fiber.join(running)), { _tag: "LeaseLost", reason: "revoked" })
        assert.include(["LeaseLost", "SubmitRefused"], (yield* reasonOf(task.submit(2)))._tag)
        // The shard of the former round is free, and its former worker has no say in it.
        yield* two.run("y", Effect.succeed(3))
        const again = yield* Effect.forkChild(one.awaitAll())
        yield* one.run("x", Effect.succeed(4))
        assert.deepStrictEqual(arrayOf(yield* promptly(Fiber.join(again), "the next round")), [["y", 3], ["x", 4]])
      })))

  it.effect("shows every change in order, across reconnects", () =>
    behindLine(({ context: mine, direct, line }) =>
      Effect.gen(function*() {
        const other = yield* direct(timing)
        const [one, two] = [yield* groupOn(mine), yield* groupOn(other, { shards: 40 })]
        const seen: Array<TaskGroup.Progress> = []
        const watching = yield* Effect.forkChild(
          Stream.runForEach(one.changes, (progress) => Effect.sync(() => seen.push(progress)))
        )
        yield* eventually(Effect.sync(() => seen.length === 1))
        yield* Effect.forEach(Array.from({ length: 40 }, (_, n) => n), (n) =>
          Effect.gen(function*() {
            if (n % 5 === 0) yield* line.closeAll
            if (n % 3 === 0) yield* Effect.scoped(two.register(`s${n}`))
            if (n % 4 === 0) yield* Effect.ignore(two.run(`s${n}`, Effect.fail("no")))
            yield* two.run(`s${n}`, Effect.succeed(n))
          }))
        yield* eventually(Effect.sync(() => seen.at(-1)?.done === 40), { message: "the last one" })
        const [first, ...changes] = seen
        let counts = { ...first! }
        for (const next of changes) {
          const { changed } = next
          if (changed === undefined) {
            // Only the number of shards was said.
            assert.deepStrictEqual({ ...next, expected: undefined }, { ...counts, changed, expected: undefined })
          } else if (changed.status === "running") {
            assert.strictEqual(next.running, counts.running + 1, JSON.stringify([counts, next]))
          } else {
            assert.strictEqual(next[changed.status], counts[changed.status] + 1, JSON.stringify([counts, next]))
            assert.strictEqual(next.running, counts.running - 1)
          }
          counts = { ...next }
        }
        assert.strictEqual(changes.filter(({ changed }) => changed?.status === "done").length, 40)
        assert.strictEqual(changes.filter(({ changed }) => changed?.status === "lost").length, 14)
        assert.strictEqual(changes.filter(({ changed }) => changed?.status === "failed").length, 10)
        // Joining again is observed behind everything else.
        assert.isAbove(line.counters.connections, 3)
        yield* Fiber.interrupt(watching)
      }), timing))

  it.effect("costs one event per process and change, however many wait, and nothing for a waiter that gives up", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const [one, two] = [yield* groupOn(a!), yield* groupOn(b!)]
        const task = yield* one.register("x")
        const waiting = yield* Effect.forEach(Array.from({ length: 64 }), () => Effect.forkChild(two.awaitAll()))
        assert.isTrue(Option.isNone(yield* Effect.timeoutOption(two.awaitAll(), "10 millis")))
        const given = yield* Effect.forkChild(two.awaitAll())
        yield* Effect.yieldNow
        yield* Fiber.interrupt(given)
        const fields = yield* server.cli("HKEYS", `{${namespace}:00}:taskGroup:job`)
        assert.strictEqual(fields.split("\n").length, 4)
        const added = eventsOf(b!, namespace, server)
        const before = yield* added
        yield* task.submit(1)
        yield* promptly(Effect.forEach(waiting, Fiber.join), "all of them")
        assert.strictEqual(yield* added, before + 1)
      })))

  it.effect("takes any text for a shard, and any payload, in any size and number", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const payload = Schema.Struct({ text: Schema.String, nested: Schema.Unknown })
        const options = { name: "job \"\\\n:/{}\u0000é😀", timeToLive, result: payload, error: payload } as const
        const [one, two] = [yield* on(a!, TaskGroup.make(options)), yield* on(b!, TaskGroup.make(options))]
        const shards = [
          "__proto__",
          "constructor",
          "\"],\"x\":[\"",
          "\\\"\n\r\t\u0000\u007f\u2028",
          "a/b",
          "a:b",
          " ",
          "é😀".repeat(80),
          "r 1 x/y",
          "0"
        ]
        const values = shards.map((shard, n) => ({
          text: `${shard}\r\n"]]`,
          nested: n % 2 === 0 ? JSON.parse(`{"__proto__":[null,{"a":"]"}],"x":1e300}`) as unknown : [shard, [[]]]
        }))
        yield* Effect.forEach(shards, (shard, n) => (n % 2 === 0 ? one : two).run(shard, Effect.succeed(values[n]!)))
        const seen = yield* Stream.runCollect(Stream.take(
          Stream.merge(two.changes, Stream.drain(Stream.fromEffect(Effect.scoped(one.register("\"]\n\u0000"))))),
          3
        ))
        assert.deepStrictEqual(seen.map(({ changed }) => changed), [
          undefined,
          { shard: "\"]\n\u0000", status: "running" },
          { shard: "\"]\n\u0000", status: "lost" }
        ])
        yield* Effect.ignore(one.run("\"]\n\u0000", Effect.fail(values[1]!)))
        const failed = yield* reasonOf(two.awaitAll())
        assert.deepInclude(failed, { _tag: "WorkerFailed", shard: "\"]\n\u0000", error: values[1]! })
        yield* one.run("\"]\n\u0000", Effect.succeed(values[0]!))
        // More than fits into an answer, by number and by size.
        const many = Array.from({ length: 600 }, (_, n) => `many ${n}`)
        yield* Effect.forEach(many, (shard) => two.run(shard, Effect.succeed({ text: shard, nested: null })), {
          concurrency: "unbounded"
        })
        const large = "é".repeat(200_000)
        for (const shard of ["large 1", "large 2"]) yield* one.run(shard, Effect.succeed({ text: large, nested: null }))
        const results = yield* two.awaitAll()
        assert.strictEqual(results.size, shards.length + 1 + many.length + 2)
        shards.forEach((shard, n) => assert.deepStrictEqual(results.get(shard), values[n]))
        many.forEach((shard) => assert.strictEqual(results.get(shard)!.text, shard))
        assert.strictEqual(results.get("large 2")!.text, large)
      })))

  it.effect("refuses another number of shards, bad arguments as defects, and payloads that do not fit", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const defective = <A, E, R>(effect: Effect.Effect<A, E, R>) =>
          Effect.map(Effect.exit(effect), (exit) =>
            assert.isTrue(Exit.isFailure(exit) && String(exit.cause).includes("RangeError")))
        for (const shards of [0, -1, 1.5, Number.NaN, 2 ** 31]) {
          yield* defective(groupOn(a!, { shards }))
        }
        yield* defective(groupOn(a!, { name: "" }))
        const one = yield* groupOn(a!, { shards: 2 })
        assert.deepInclude(yield* reasonOf(groupOn(b!, { shards: 3 })), {
          _tag: "ShardsMismatch",
          shards: 3,
          existing: 2
        })
        for (const shard of ["", "\ud800", "x".repeat(513)]) {
          yield* defective(one.register(shard))
          yield* defective(one.run(shard, Effect.succeed(1)))
        }
        const two = yield* on(
          b!,
          TaskGroup.make({ name: "job", timeToLive, result: Schema.Int, error: Schema.NonEmptyString })
        )
        const task = yield* two.register("x")
        assert.strictEqual((yield* reasonOf(task.submit(1.5)))._tag, "InvalidPayload")
        assert.strictEqual((yield* reasonOf(task.fail("")))._tag, "InvalidPayload")
        // It is still registered.
        yield* task.submit(1)
        yield* one.run("y", Effect.succeed(0.5))
        assert.deepInclude(yield* reasonOf(two.awaitAll()), {
          _tag: "InvalidPayload",
          what: "The result of shard \"y\" of task group \"job\""
        })
        assert.deepStrictEqual(arrayOf(yield* one.awaitAll()), [["x", 1], ["y", 0.5]])
        assert.strictEqual((yield* reasonOf(two.run("y", Effect.succeed(1))))._tag, "InvalidPayload")
      })))

  it.effect("learns from any member how many shards there are", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const one = yield* groupOn(a!)
        yield* one.run("x", Effect.succeed(1))
        const two = yield* groupOn(b!, { shards: 2 })
        const waiting = yield* Effect.forkChild(one.awaitAll())
        assert.strictEqual((yield* one.snapshot).expected, 2)
        yield* two.run("y", Effect.succeed(2))
        assert.deepStrictEqual(arrayOf(yield* promptly(Fiber.join(waiting), "the waiter")), [["x", 1], ["y", 2]])
      })))

  it.effect("fails its waiters with CoordinatorClosed when the coordinator is closed", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      const closing = yield* Scope.make()
      const context = yield* Scope.provide(node(server.url, { namespace, ...timing }), closing)
      yield* Effect.scoped(Effect.gen(function*() {
        const group = yield* groupOn(context, { shards: 1 })
        const waiting = yield* awaiting(group)
        const watching = yield* Effect.forkChild(Stream.runDrain(group.changes))
        yield* Scope.close(closing, Exit.void)
        const reason = yield* promptly(reasonOf(Fiber.join(waiting)), "the waiter")
        assert.deepInclude(reason, { _tag: "CoordinatorClosed", namespace })
        yield* promptly(Fiber.join(watching), "the end of the changes")
        for (const call of [group.awaitAll(), group.snapshot, group.register("x"), group.reset]) {
          const late: Effect.Effect<unknown, TaskGroup.TaskGroupError<string>, Scope.Scope> = call
          assert.strictEqual((yield* reasonOf(late))._tag, "CoordinatorClosed")
        }
      }))
      yield* assertEmpty(server, namespace)
    }))

  it.effect("is remembered while no process has it open, and useless outside of its scope", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const keys = ["taskGroup:job", "taskGroup-items:job"].map((key) => `{${namespace}:00}:${key}`)
        const [gone, waiting, watching] = yield* Effect.scoped(Effect.gen(function*() {
          const group = yield* on(
            a!,
            TaskGroup.make({ name: "job", result: Schema.Number, timeToLive: "1 minute", shards: 2 })
          )
          yield* group.run("x", Effect.succeed(1))
          const waiting = yield* Effect.forkDetach(group.awaitAll())
          const watching = yield* Effect.forkDetach(Stream.runCollect(group.changes))
          yield* realSleep(20)
          return [group, waiting, watching] as const
        }))
        assert.strictEqual((yield* reasonOf(Fiber.join(waiting)))._tag, "GroupGone")
        assert.strictEqual((yield* Fiber.join(watching)).map(({ done }) => done).join(), "1")
        for (const key of keys) {
          const ttl = Number(yield* server.cli("PTTL", key))
          assert.isTrue(ttl > 50_000 && ttl <= 60_000, `${key} ${ttl}`)
        }
        assert.strictEqual((yield* reasonOf(gone.register("y")))._tag, "GroupGone")
        assert.strictEqual((yield* reasonOf(gone.reset))._tag, "GroupGone")
        assert.strictEqual((yield* reasonOf(gone.awaitAll()))._tag, "GroupGone")
        assert.strictEqual((yield* Stream.runCollect(gone.changes)).length, 0)
        yield* Effect.scoped(Effect.gen(function*() {
          const group = yield* groupOn(b!, { shards: 2 })
          // For a day, which is renewed for as long as a session has it open.
          for (const key of keys) assert.isAbove(Number(yield* server.cli("PTTL", key)), 86_000_000)
          yield* group.run("y", Effect.succeed(2))
          assert.deepStrictEqual(arrayOf(yield* group.awaitAll()), [["x", 1], ["y", 2]])
        }))
        // Nothing to remember, so it is deleted at once.
        yield* Effect.scoped(on(a!, TaskGroup.make({ name: "unused", result: Schema.Number, timeToLive: "1 minute" })))
        assert.strictEqual(yield* server.cli("EXISTS", `{${namespace}:00}:taskGroup:unused`), "0")
      })))

  it.effect("is remembered for as long as the last make says, also when others join again, or Redis has lost it", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const members = fields(server, namespace, "taskGroup:job", "o")
        const all = (count: number) =>
          eventually(Effect.map(members, (found) => found === count), { message: `${count} members` })
        yield* Effect.scoped(Effect.gen(function*() {
          const group = yield* on(a!, TaskGroup.make({ name: "job", result: Schema.Number, timeToLive: "1 minute" }))
          yield* on(b!, TaskGroup.make({ name: "job", result: Schema.Number, timeToLive: "1 hour" }))
          yield* group.run("x", Effect.succeed(1))
          yield* lose(a!, namespace, server)
          yield* all(2)
        }))
        const ttl = Effect.map(server.cli("PTTL", `{${namespace}:00}:taskGroup:job`), Number)
        yield* all(0)
        assert.isAbove(yield* ttl, 60_000)
        for (const [shard, first, second] of [["y", a!, b!], ["z", b!, a!]] as const) {
          yield* Effect.scoped(Effect.gen(function*() {
            const group = yield* on(a!, TaskGroup.make({ name: "job", result: Schema.Number, timeToLive: "1 minute" }))
            yield* on(b!, TaskGroup.make({ name: "job", result: Schema.Number, timeToLive: "1 hour" }))
            yield* group.run(shard, Effect.succeed(1))
            yield* server.cli("FLUSHALL")
            yield* on(first, Lock.withLockIfAvailable(Effect.void, "to be told"))
            yield* all(1)
            yield* on(second, Lock.withLockIfAvailable(Effect.void, "to be told"))
            yield* all(2)
          }))
          yield* all(0)
          assert.isAbove(yield* ttl, 60_000)
        }
        yield* server.cli("FLUSHALL")
      })))

  it.effect("submits large results again in small parts", () =>
    behindLine(({ context, line, namespace, server }) =>
      Effect.gen(function*() {
        const group = yield* on(
          context,
          TaskGroup.make({ name: "large", result: Schema.String, timeToLive, shards: 20 })
        )
        const results = Array.from({ length: 20 }, (_, at) => String(at).padStart(300_000, "x"))
        for (const [at, result] of results.entries()) yield* group.run(String(at), Effect.succeed(result))
        let [largest, count] = [0, 0]
        yield* line.onRequest((request) => {
          if (!asks("taskGroup.restore")(request)) return "pass"
          largest = Math.max(largest, request.bytes.length)
          count++
          return "pass"
        })
        yield* server.cli(
          "EVAL",
          "for _, key in ipairs(redis.call('KEYS', ARGV[1])) do redis.call('DEL', key) end",
          0,
          `{${namespace}:*`
        )
        const found = yield* promptly(group.awaitAll(), "the results")
        assert.deepStrictEqual([...found].map(([, result]) => result.length), results.map(() => 300_000))
        assert.isAtLeast(count, 7)
        assert.isBelow(largest, 1_500_000)
      }), { lease: "3 seconds", margin: "500 millis", requestTimeout: "1 second" }))

  it.effect("is restored after Redis has lost its data, with all that was submitted and word of what was lost", () =>
    several(3, ([a, b, c], _, server) =>
      Effect.gen(function*() {
        // Without a number of shards, so that it must not be taken for complete while one is missing.
        const [one, two, three] = [yield* groupOn(a!), yield* groupOn(b!), yield* groupOn(c!)]
        // Of the second round.
        yield* one.run("old", Effect.succeed(0))
        yield* one.reset
        yield* one.run("x", Effect.succeed(1))
        yield* two.run("y", Effect.succeed(2))
        const running = yield* Effect.forkChild(two.run("z", Effect.never))
        yield* eventually(Effect.map(three.snapshot, ({ registered, running }) => registered === 3 && running === 1))
        const failing = yield* awaiting(three)
        const waiting = yield* awaiting(three, "wait")
        yield* server.cli("FLUSHALL")
        const lost = yield* reasonOf(Fiber.join(running))
        assert.strictEqual(lost._tag, "LeaseLost")
        const gone = yield* reasonOf(Fiber.join(failing))
        assert.deepInclude(gone, { _tag: "WorkerLost", shard: "z" })
        yield* eventually(
          Effect.map(one.snapshot, ({ done, lost, round }) => done === 2 && lost === 1 && round === 2)
        )
        yield* pending(waiting)
        yield* one.run("z", Effect.succeed(3))
        const results = yield* promptly(Fiber.join(waiting), "the waiter")
        assert.deepStrictEqual(arrayOf(results).sort(), [["x", 1], ["y", 2], ["z", 3]])
      })))

  it.effect("never takes what is left after a loss for everything", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const one = yield* groupOn(a!)
        const waiting = yield* Effect.gen(function*() {
          yield* Effect.scoped(Effect.gen(function*() {
            const two = yield* groupOn(b!)
            yield* two.run("x", Effect.succeed(1))
          }))
          const task = yield* one.register("y")
          const waiting = yield* awaiting(one, "wait")
          // No process is there any more that knows of x.
          yield* server.cli("FLUSHALL")
          yield* Effect.flip(task.lease.lost)
          return waiting
        }).pipe(Effect.scoped)
        yield* eventually(Effect.map(one.snapshot, ({ lost }) => lost === 1))
        yield* one.run("y", Effect.succeed(2))
        yield* realSleep(50)
        yield* pending(waiting)
        yield* one.run("x", Effect.succeed(3))
        const results = yield* promptly(Fiber.join(waiting), "the waiter")
        assert.deepStrictEqual(arrayOf(results), [["y", 2], ["x", 3]])
        assert.isNotEmpty(namespace)
      })))

  it.effect("takes the result of a task while Redis has no memory", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const group = yield* groupOn(a!)
        const full = Effect.orDie(server.cli("CONFIG", "SET", "maxmemory", 1))
        yield* group.run("x", Effect.as(full, 1)).pipe(
          Effect.ensuring(Effect.orDie(server.cli("CONFIG", "SET", "maxmemory", 0)))
        )
        assert.deepInclude(yield* group.snapshot, { running: 0, done: 1, lost: 0 })
        assert.isNotEmpty(namespace)
      })))

  it.effect("is reset as the first request after Redis has lost its data", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const group = yield* groupOn(a!)
        yield* group.run("x", Effect.succeed(1))
        yield* server.cli("FLUSHALL")
        yield* group.reset
        assert.deepInclude(yield* group.snapshot, { running: 0, done: 0 })
        assert.isNotEmpty(namespace)
      })))

  it.effect("makes up for events that were lost, within two heartbeats", () =>
    behindLine(({ context: mine, direct, line, namespace, server }) =>
      Effect.gen(function*() {
        const other = yield* direct(timing)
        const [one, two] = [yield* groupOn(mine), yield* groupOn(other)]
        const task = yield* two.register("x")
        const waiting = yield* awaiting(one)
        // The reader is not looking while they come and go.
        const reading = yield* line.hold(({ name }) => name === "XREAD")
        yield* two.run("y", Effect.succeed(2))
        yield* reading.request
        const mailbox = `{${namespace}:00}:mail:${yield* sessionOf(mine)}`
        const before = (yield* server.cli("XREVRANGE", mailbox, "+", "-", "COUNT", 1)).split("\n")[0]!
        yield* task.submit(1)
        const ids = (yield* server.cli("XRANGE", mailbox, `(${before}`, "+")).split("\n")
          .filter((line) => /^\d+-\d+$/.test(line))
        assert.isNotEmpty(ids)
        yield* server.cli("XDEL", mailbox, ...ids)
        yield* reading.release()
        yield* line.closeAll
        assert.deepStrictEqual(arrayOf(yield* promptly(Fiber.join(waiting), "the waiter")), [["x", 1], ["y", 2]])
      }), { ...timing, lease: "2 seconds" }))

  it.effect("goes back with a Redis that has forgotten the last changes", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const [one, two] = [yield* groupOn(a!), yield* groupOn(b!)]
        const shown: Array<TaskGroup.Progress> = []
        yield* Effect.forkScoped(Stream.runForEach(two.changes, (it) => Effect.sync(() => shown.push(it))))
        yield* one.run("x", Effect.succeed(1))
        const keys = ["taskGroup:job", "taskGroup-items:job"].map((key) => `{${namespace}:00}:${key}`)
        for (const key of keys) yield* server.cli("COPY", key, `${key}:before`)
        // By a process that will not be there to say it again.
        yield* Effect.scoped(Effect.gen(function*() {
          const gone = yield* groupOn(a!)
          for (const shard of ["y", "z"]) yield* gone.run(shard, Effect.succeed(2))
        }))
        yield* eventually(Effect.sync(() => shown.at(-1)?.done === 3))
        // Its first state is one that Redis forgets.
        const later: Array<TaskGroup.Progress> = []
        yield* Effect.forkScoped(Stream.runForEach(two.changes, (it) => Effect.sync(() => later.push(it))))
        yield* eventually(Effect.sync(() => later.at(-1)?.done === 3))
        for (const key of keys) yield* server.cli("RENAME", `${key}:before`, key)
        for (const context of [a!, b!]) {
          yield* forget(server, namespace, yield* sessionOf(context))
        }
        for (const states of [shown, later]) {
          yield* eventually(Effect.sync(() => states.at(-1)?.done === 1), { message: "the older state" })
        }
        // How many there have been is remembered: these two are not all.
        yield* two.run("w", Effect.succeed(4))
        const waiting = yield* awaiting(one)
        yield* pending(waiting)
        yield* two.run("y", Effect.succeed(3))
        assert.deepStrictEqual(arrayOf(yield* promptly(Fiber.join(waiting), "the waiter")), [
          ["x", 1],
          ["w", 4],
          ["y", 3]
        ])
      })))

  it.effect("accepts a result again whose submission was interrupted, and no other one", () =>
    behindLine(({ context, line }) =>
      Effect.gen(function*() {
        const group = yield* groupOn(context)
        const task = yield* group.register("x")
        const lost = yield* line.once(asks("taskGroup.submit"), "dropReply")
        const submitting = yield* Effect.forkChild(task.submit(1), { startImmediately: true })
        yield* promptly(lost, "the submission")
        yield* Fiber.interrupt(submitting)
        yield* task.submit(1)
        assert.strictEqual((yield* reasonOf(task.submit(2)))._tag, "SubmitRefused")
        assert.deepStrictEqual(arrayOf(yield* group.results), [["x", 1]])
      })
    ))

  it.effect("lets others have the shards of a group that was closed, though the scopes of their tasks are open", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const theirs = yield* groupOn(b!, { shards: 1 })
        const scope = yield* Scope.make()
        const mine = yield* Scope.provide(groupOn(a!, { shards: 1 }), scope)
        const task = yield* mine.register("x")
        yield* Scope.close(scope, Exit.void)
        assert.strictEqual((yield* reasonOf(task.submit(1)))._tag, "LeaseLost")
        yield* eventually(theirs.run("x", Effect.succeed(2)))
      })))

  it.effect("begins anew for another run, whose members alone have a say in it", () =>
    several(3, ([a, b, c]) =>
      Effect.gen(function*() {
        const inRun = (context: Node, run: string) =>
          on(context, TaskGroup.make({ name: "job", result: Schema.Number, shards: 2, timeToLive, run }))
        const one = yield* inRun(a!, "monday")
        yield* one.run("x", Effect.succeed(1))
        const running = yield* Effect.forkChild(one.run("y", Effect.never))
        const waiting = yield* awaiting(one)
        // Others of the same run join it.
        const same = yield* inRun(c!, "monday")
        yield* eventually(Effect.map(same.snapshot, ({ done, running }) => done === 1 && running === 1))

        const two = yield* inRun(b!, "tuesday")
        assert.deepInclude(yield* two.snapshot, { round: 2, registered: 0, expected: 2 })
        assert.deepInclude(yield* promptly(reasonOf(Fiber.join(running)), "the worker"), {
          _tag: "LeaseLost",
          reason: "revoked"
        })
        const ended = { _tag: "Superseded", kind: "taskGroup", name: "job", run: "monday", current: "tuesday" } as const
        assert.deepInclude(yield* promptly(reasonOf(Fiber.join(waiting)), "the waiter"), ended)
        assert.deepInclude(yield* reasonOf(one.awaitAll()), ended)
        assert.deepInclude(yield* reasonOf(one.register("x")), ended)
        assert.deepInclude(yield* reasonOf(same.run("x", Effect.die("it was run for the former run"))), ended)
        assert.deepInclude(yield* reasonOf(one.reset), ended)
        // Nor is it shown what the other run comes to.
        const questions: ReadonlyArray<Effect.Effect<unknown, TaskGroup.TaskGroupError>> = [
          one.snapshot,
          one.shards,
          one.results
        ]
        for (const asked of questions) assert.deepInclude(yield* reasonOf(asked), ended)
        assert.deepStrictEqual(yield* promptly(Stream.runCollect(one.changes), "the changes"), [])

        yield* two.run("x", Effect.succeed(10))
        yield* two.run("y", Effect.succeed(20))
        assert.deepStrictEqual(arrayOf(yield* two.awaitAll()), [["x", 10], ["y", 20]])
      })))

  it.effect("stays that of the newest run when Redis has lost its data, whichever process joins again first", () =>
    behindLine(({ context, direct, line, namespace, server }) =>
      Effect.gen(function*() {
        const inRun = (context: Node, run: string) =>
          on(context, TaskGroup.make({ name: "job", result: Schema.Number, shards: 1, timeToLive, run }))
        const one = yield* inRun(yield* direct(), "monday")
        const two = yield* inRun(context, "tuesday")
        assert.strictEqual((yield* reasonOf(one.register("x")))._tag, "Superseded")
        const joined = (count: number) =>
          eventually(Effect.map(fields(server, namespace, "taskGroup:job", "o"), (found) => found === count), {
            message: `${count} have joined`
          })
        yield* line.blackhole
        yield* server.cli("FLUSHALL")
        yield* joined(1)
        yield* line.pass
        yield* line.closeAll
        yield* joined(2)
        yield* two.run("x", Effect.succeed(1))
        assert.deepInclude(yield* reasonOf(one.register("x")), { _tag: "Superseded", current: "tuesday" })
      }), { ...timing, lease: "1 second", margin: "200 millis" }))

  it.effect("is found completed by the next program, unless that begins anew", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const options = { name: "job", result: Schema.Number, shards: 1, timeToLive: "2 seconds" } as const
        const open = (context: Node, more: { readonly run?: string; readonly fresh?: true }) =>
          on(context, TaskGroup.make({ ...options, ...more }))
        const doneIn = (context: Node, more: { readonly run?: string; readonly fresh?: true }) =>
          Effect.scoped(Effect.map(Effect.flatMap(open(context, more), (group) => group.snapshot), ({ done }) => done))
        const completeIn = (run?: string) =>
          Effect.scoped(
            Effect.flatMap(open(a!, run === undefined ? {} : { run }), (it) => it.run("x", Effect.succeed(1)))
          )
        yield* completeIn()
        assert.strictEqual(yield* doneIn(b!, {}), 1)
        assert.strictEqual(yield* doneIn(b!, { fresh: true }), 0)
        yield* completeIn()
        assert.strictEqual(yield* doneIn(b!, { run: "1" }), 0)
        yield* completeIn("1")
        assert.strictEqual(yield* doneIn(b!, { run: "1" }), 1)
        assert.strictEqual(yield* doneIn(b!, {}), 1)
        assert.strictEqual(yield* doneIn(b!, { run: "2" }), 0)

        // While another process has it open, no other one begins anew.
        const one = yield* on(a!, TaskGroup.make(options))
        yield* one.run("x", Effect.succeed(1))
        assert.strictEqual(yield* doneIn(b!, { fresh: true }), 1)
      })))

  it.effect("does not mind processes that have died when it begins anew, or with another number of shards", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const line = yield* proxy(server)
        const options = { name: "job", result: Schema.Number, timeToLive: "3 seconds" } as const
        const dying = yield* fragile(server, line, namespace, 1)
        const former = yield* on(dying, TaskGroup.make({ ...options, shards: 2 }))
        yield* former.run("x", Effect.succeed(1))
        const other = yield* on(dying, TaskGroup.make({ ...options, name: "other", shards: 2 }))
        const session = yield* sessionOf(dying)
        yield* line.blackhole
        // The heartbeat of the other coordinator is too slow to reap it.
        const time = Effect.map(server.cli("TIME"), (time) => Number(time.split("\n")[0]) * 1000)
        yield* eventually(
          Effect.map(Effect.all([time, deadlineOf(server, namespace, session)]), ([now, at]) => now > at)
        )
        const group = yield* on(a!, TaskGroup.make({ ...options, shards: 2, fresh: true }))
        assert.deepInclude(yield* group.snapshot, { registered: 0, round: 2 })
        const resized = yield* on(a!, TaskGroup.make({ ...options, name: "other", shards: 3 }))
        assert.deepInclude(yield* resized.snapshot, { expected: 3 })
        // It comes back, brings nothing of the former round with it, and takes over the new number.
        yield* line.pass
        yield* line.closeAll
        yield* eventually(Effect.map(server.cli("HLEN", `{${namespace}:00}:taskGroup:job`), (found) => found === "4"))
        assert.deepInclude(yield* group.snapshot, { registered: 0, round: 2 })
        yield* eventually(Effect.map(other.snapshot, ({ expected }) => expected === 3))
      }), { lease: "30 seconds" }))

  it.effect("counts no worker of a process whose lease has run out", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const group = yield* groupOn(a!)
        yield* departed(
          server,
          namespace,
          1,
          (context) => Effect.flatMap(groupOn(context), (theirs) => theirs.register("x"))
        )
        assert.deepInclude(yield* group.snapshot, { running: 0, lost: 1 })
      }), { lease: "30 seconds" }))

  it.effect("is asked what another number of shards means", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const open = (context: Node, shards: number, onMismatch?: "fail" | "keep" | "resize") =>
          on(context, TaskGroup.make({ name: "job", result: Schema.Number, timeToLive, shards, onMismatch }))
        const expected = (group: TaskGroup.TaskGroup<number, string>) =>
          Effect.map(group.snapshot, (progress) => progress.expected)
        const one = yield* open(a!, 2)
        yield* one.run("x", Effect.succeed(1))
        yield* one.run("y", Effect.succeed(1))
        const mismatch = yield* reasonOf(open(b!, 3))
        assert.deepInclude(mismatch, { _tag: "ShardsMismatch", name: "job", shards: 3, existing: 2 })
        assert.strictEqual(yield* expected(yield* open(b!, 3, "keep")), 2)
        const two = yield* open(b!, 3, "resize")
        assert.strictEqual(yield* expected(one), 3)
        const waiting = yield* awaiting(one)
        // It stays resized when a member that has said another number joins again.
        yield* forgetSession(a!, namespace, server)
        yield* eventually(Effect.map(one.snapshot, ({ expected, done }) => expected === 3 && done === 2))
        yield* pending(waiting)
        yield* two.run("z", Effect.succeed(1))
        assert.strictEqual((yield* promptly(Fiber.join(waiting), "the waiter")).size, 3)
      })))

  it.effect("interrupts a worker whose registration has ended, also when no event reached it", () =>
    behindLine(({ context: mine, direct, line, namespace, server }) =>
      Effect.gen(function*() {
        const other = yield* direct(timing)
        const [one, two] = [yield* groupOn(mine), yield* groupOn(other)]
        const running = yield* Effect.forkChild(one.run("x", Effect.never))
        yield* eventually(Effect.map(two.snapshot, ({ running }) => running === 1))
        // The reader sleeps while the event comes and goes.
        const reading = yield* line.hold(({ name }) => name === "XREAD")
        yield* two.run("y", Effect.succeed(1))
        yield* reading.request
        const mailbox = `{${namespace}:00}:mail:${yield* sessionOf(mine)}`
        const before = (yield* server.cli("XREVRANGE", mailbox, "+", "-", "COUNT", 1)).split("\n")[0]!
        yield* two.reset
        const ids = (yield* server.cli("XRANGE", mailbox, `(${before}`, "+")).split("\n")
          .filter((line) => /^\d+-\d+$/.test(line))
        assert.isNotEmpty(ids)
        yield* server.cli("XDEL", mailbox, ...ids)
        yield* reading.release()
        assert.deepInclude(yield* promptly(reasonOf(Fiber.join(running)), "the worker"), {
          _tag: "LeaseLost",
          reason: "revoked"
        })
        // Asking what has become of it has registered nothing in the new round.
        assert.deepInclude(yield* two.snapshot, { round: 2, registered: 0 })
      }), { ...timing, lease: "2 seconds" }))

  it.effect("shows every shard with its worker, and the results so far", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const [one, two] = [yield* groupOn(a!), yield* groupOn(b!)]
        assert.deepStrictEqual(yield* one.shards, [])
        assert.deepStrictEqual(arrayOf(yield* one.results), [])
        yield* one.run("x", Effect.succeed(1))
        yield* two.register("y")
        yield* Effect.ignore(one.run("z", Effect.fail("no")))
        yield* Effect.scoped(two.register("w"))
        yield* Effect.succeed(2).pipe(two.run("v"))
        const shards = yield* one.shards
        assert.deepStrictEqual(
          shards.map(({ shard, status, worker }) => [shard, status, worker?.node]),
          [
            ["x", "done", "node0"],
            ["y", "running", "node1"],
            ["z", "failed", "node0"],
            ["w", "lost", "node1"],
            ["v", "done", "node1"]
          ]
        )
        assert.deepStrictEqual(shards.map(({ worker }) => worker?.pid), shards.map(() => process.pid))
        assert.deepStrictEqual(arrayOf(yield* two.results), [["x", 1], ["v", 2]])
        const many = Array.from({ length: 600 }, (_, n) => `many ${n}`)
        yield* Effect.forEach(many, (shard) => one.run(shard, Effect.succeed(3)), { concurrency: "unbounded" })
        assert.strictEqual((yield* two.shards).length, 605)
        assert.strictEqual((yield* two.results).size, 602)
      })))

  it.effect("limits how long to wait, and how long a worker holds a shard", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const [one, two] = [yield* groupOn(a!, { shards: 1 }), yield* groupOn(b!)]
        assert.deepInclude(yield* reasonOf(one.awaitAll({ wait: "20 millis" })), {
          _tag: "WaitTimeout",
          kind: "taskGroup",
          key: "job",
          away: false
        })
        const held = yield* reasonOf(two.run("x", Effect.never, { maxHold: "20 millis" }))
        assert.deepInclude(held, { _tag: "LeaseLost", reason: "maxHold", kind: "taskGroup", key: "job" })
        const task = yield* one.register("x", { maxHold: "20 millis" })
        assert.strictEqual((yield* Effect.flip(task.lease.lost)).reason, "maxHold")
        assert.strictEqual((yield* reasonOf(task.submit(1)))._tag, "LeaseLost")
        yield* eventually(two.run("x", Effect.succeed(2)))
        assert.deepStrictEqual(arrayOf(yield* one.awaitAll({ wait: "1 second" })), [["x", 2]])
      })))

  it.effect("has a lease of its own where it is given one", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const group = yield* on(
          a!,
          TaskGroup.make({ name: "job", result: Schema.Number, timeToLive, lease: "20 seconds" })
        )
        yield* group.run("x", Effect.succeed(1))
        const leases = (yield* sessionsOf(a!)).map(({ lease }) => Duration.toMillis(lease))
        assert.include(leases, 20_000)
      })))

  it.effect("ends registrations with the scope of the group", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const two = yield* groupOn(b!)
        const scope = yield* Scope.make()
        const task = yield* Effect.scoped(Effect.gen(function*() {
          const one = yield* groupOn(a!)
          return yield* Scope.provide(one.register("x"), scope)
        }))
        assert.deepInclude(yield* reasonOf(task.submit(1)), { _tag: "LeaseLost", reason: "closed" })
        yield* Scope.close(scope, Exit.void)
        assert.deepInclude(yield* two.snapshot, { lost: 1 })
      })))

  it.effect("fails to register while Redis is away, rather than waits", () =>
    behindLine(({ context, line }) =>
      Effect.gen(function*() {
        const group = yield* groupOn(context)
        const task = yield* group.register("x")
        yield* line.blackhole
        yield* assertUnanswered([Effect.scoped(group.register("y"))])
        // A result is not given up: it belongs to a hold that is still trusted.
        const submitting = yield* Effect.forkChild(task.submit(1))
        yield* realSleep(700)
        yield* pending(submitting)
        yield* line.pass
        yield* line.closeAll
        yield* promptly(Fiber.join(submitting), "the submission")
        assert.deepStrictEqual(arrayOf(yield* group.results), [["x", 1]])
      }), { ...timing, lease: "20 seconds", requestTimeout: "300 millis" }))

  it.effect("reads again what it could not read while Redis was away, though no event comes any more", () =>
    behindLine(({ context, direct, line }) =>
      Effect.gen(function*() {
        const [one, two] = [yield* groupOn(context), yield* groupOn(yield* direct())]
        const task = yield* two.register("x")
        const waiting = yield* awaiting(one)
        let dropped = 0
        yield* line.onRequest(({ args }) => args.includes("taskGroup.read") && dropped++ >= 0 ? "drop" : "pass")
        yield* task.submit(1)
        yield* eventually(Effect.sync(() => dropped > 0), { message: "it asks" })
        // For longer than a question takes.
        yield* realSleep(1000)
        yield* pending(waiting)
        yield* line.onRequest(undefined)
        assert.deepStrictEqual(arrayOf(yield* promptly(Fiber.join(waiting), "the waiter")), [["x", 1]])
      }), { ...timing, lease: "20 seconds", requestTimeout: "300 millis" }))

  it.effect("does what its model does, whichever process registers, submits, dies, resets or waits", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const who = fc.nat(2)
      const shard = fc.nat(3)
      const op = <const O extends string>(weight: number, op: O) => ({
        weight,
        arbitrary: fc.record({ op: fc.constant(op), who, shard, value: fc.nat(100) })
      })
      const step = fc.oneof(
        op(6, "register"),
        op(5, "submit"),
        op(1, "fail"),
        op(2, "leave"),
        op(2, "run"),
        op(1, "close"),
        op(1, "reset"),
        op(3, "await")
      )
      yield* Effect.promise(() =>
        fc.assert(
          fc.asyncProperty(fc.boolean(), fc.array(step, { maxLength: 30, size: "max" }), (counted, steps) =>
            Effect.runPromise(Effect.scoped(model(server, counted ? 3 : undefined, steps)))),
          { numRuns: runs(25), endOnFailure: true }
        )
      )
    }))

  it.effect("is a typed service", () => {
    class Count extends TaskGroup.Service<Count>()("count", { result: Schema.Number, shards: 1, timeToLive }) {}
    return withNode(() =>
      Effect.gen(function*() {
        const count = yield* Count
        yield* count.run("x", Effect.succeed(1))
        assert.deepStrictEqual(arrayOf(yield* count.awaitAll()), [["x", 1]])
      }).pipe(Effect.provide(Count.layer))
    )
  })
})

/** Interrupts a fiber before operation number `at`, its own or of the fibers that work for it. */
class Interrupter extends Scheduler.MixedScheduler {
  count = 0
  target: Fiber.Fiber<unknown, unknown> | undefined = undefined
  readonly at: number

  constructor(at: number) {
    super()
    this.at = at
  }

  override shouldYield(fiber: Fiber.Fiber<unknown, unknown>): boolean {
    if (this.target !== undefined && ++this.count === this.at) {
      this.target.interruptUnsafe()
      return fiber === this.target
    }
    return super.shouldYield(fiber)
  }
}

layer(TestServer.layer, live)("a task group, interrupted before every operation of", (it) => {
  const programs: Record<
    string,
    (
      group: TaskGroup.TaskGroup<number, string>,
      shard: string
    ) => Effect.Effect<unknown, unknown, Coordinator.Coordinator | Scope.Scope>
  > = {
    "run": (group, shard) => group.run(shard, Effect.as(Effect.yieldNow, 1)),
    "register": (group, shard) =>
      Effect.scoped(Effect.flatMap(group.register(shard), (task) => Effect.andThen(Effect.yieldNow, task.submit(1)))),
    "awaitAll": (group, shard) =>
      Effect.all([group.awaitAll({ onWorkerLost: "wait" }), Effect.delay(group.run(shard, Effect.succeed(1)), 1)], {
        concurrency: "unbounded"
      }),
    "progress": (group, shard) =>
      Effect.all([
        Stream.runHead(Stream.filter(group.changes, ({ changed }) => changed?.shard === shard)),
        Effect.delay(Effect.scoped(group.register(shard)), 1)
      ], { concurrency: "unbounded" }),
    "make": (_, shard) =>
      Effect.scoped(
        Effect.flatMap(TaskGroup.make({ name: `other ${shard}`, result: Schema.Number, timeToLive }), (other) =>
          other.run("x", Effect.succeed(1)))
      )
  }
  for (const [name, program] of Object.entries(programs)) {
    it.effect(name, () =>
      withNode((namespace) =>
        Effect.gen(function*() {
          const server = yield* TestServer
          const group = yield* TaskGroup.make({ name: "job", result: Schema.Number, timeToLive })
          let interrupted = 0
          for (let at = 1;; at++) {
            const scheduler = new Interrupter(at)
            const fiber = yield* Effect.forkChild(
              Effect.withFiber((fiber) => {
                scheduler.target = fiber
                return Effect.scoped(program(group, `shard ${at}`))
              }).pipe(Effect.provideService(Scheduler.Scheduler, scheduler))
            )
            const exit = yield* Fiber.await(fiber)
            // No worker and no watcher is left, and the session owns nothing but the membership.
            yield* eventually(
              Effect.gen(function*() {
                const { running } = yield* group.snapshot
                return running === 0 && (yield* ownedIn(server, namespace)).length === 1
              }),
              { interval: 1, message: `at ${at}` }
            )
            const { claims } = (yield* Effect.flatMap(Coordinator.Coordinator, (it) => it.sessions))[0]!
            assert.strictEqual(claims, 1)
            const coordinator = yield* Coordinator.Coordinator
            assert.isFalse(spaceOf(coordinator).kernel.partitionAt(0).isWaiting())
            if (scheduler.count < at) {
              assert.isTrue(Exit.isSuccess(exit))
              break
            }
            if (Exit.hasInterrupts(exit)) interrupted++
            // What was lost this time is not to be waited for the next time.
            yield* group.reset
          }
          assert.isAbove(interrupted, 5)
        }), { partitions: 1 }))
  }
})

interface Shard {
  status: "running" | "done" | "failed" | "lost"
  value: number
  owner: number
}

/** A few coordinators, step by step, and what the group must be after each. */
const model = Effect.fnUntraced(function*(
  server: Server,
  expected: number | undefined,
  steps: ReadonlyArray<{
    readonly op: "register" | "submit" | "fail" | "leave" | "run" | "close" | "reset" | "await"
    readonly who: number
    readonly shard: number
    readonly value: number
  }>
) {
  const namespace = freshNamespace()
  // A coordinator that is closed before the scopes of its registrations waits for them.
  const options = { namespace, partitions: 1, lease: "5 seconds", margin: "20 millis" } as const
  const open = Effect.gen(function*() {
    const scope = yield* Scope.make()
    yield* Effect.addFinalizer(() => Scope.close(scope, Exit.void))
    const context = yield* Scope.provide(node(server.url, options), scope)
    const group = yield* Scope.provide(
      on(context, TaskGroup.make({ name: "model", result: Schema.Number, timeToLive: "1 minute", shards: expected })),
      scope
    )
    return { group, scope }
  })
  const members = [yield* open, yield* open, yield* open]
  const watched = yield* Queue.unbounded<TaskGroup.Progress>()
  const observer = yield* open
  yield* Effect.forkChild(Stream.runForEach(observer.group.changes, (it) => Queue.offer(watched, it)), {
    startImmediately: true
  })
  const shards = new Map<string, Shard>()
  const tasks: Array<
    { readonly who: number; readonly shard: string; readonly task: TaskGroup.Task<number, string>; round: number } & {
      readonly scope: Scope.Closeable
      ended: boolean
    }
  > = []
  const waiting: Array<{
    readonly fiber: Fiber.Fiber<ReadonlyMap<string, number>, TaskGroup.TaskGroupError<string>>
    readonly who: number
    outcome: string | ReadonlyArray<readonly [string, number]> | undefined
    readonly patient: boolean
  }> = []
  const changes: Array<string> = []
  let round = 1
  const count = (status: Shard["status"]) => [...shards.values()].filter((shard) => shard.status === status).length
  const outcomeOf = (patient: boolean) => {
    // Of several, it is the one that was registered first.
    for (const { status } of shards.values()) {
      if (status === "failed") return "WorkerFailed"
      if (status === "lost" && !patient) return "WorkerLost"
    }
    const complete = shards.size >= (expected ?? 1) && count("done") === shards.size
    return complete ? [...shards].map(([shard, { value }]) => [shard, value] as const) : undefined
  }
  // A waiter observes one state before the next one comes.
  const settle = Effect.gen(function*() {
    for (const waiter of waiting) {
      waiter.outcome ??= outcomeOf(waiter.patient)
      if (waiter.outcome === undefined) {
        yield* pending(waiter.fiber)
        continue
      }
      const exit = yield* promptly(Fiber.await(waiter.fiber), "a waiter")
      const got = Exit.isSuccess(exit)
        ? [...exit.value]
        : Option.getOrThrow(Exit.findErrorOption(exit)).reason._tag
      assert.deepStrictEqual<unknown>(got, waiter.outcome)
    }
    waiting.splice(0, waiting.length, ...waiting.filter(({ outcome }) => outcome === undefined))
  })
  const change = (shard: string, status: Shard["status"], to: Partial<Shard> = {}) => {
    const before = shards.get(shard) ?? { status, value: 0, owner: 0 }
    shards.set(shard, { ...before, ...to, status })
    changes.push(`${shard} ${status}`)
    return settle
  }
  const isRunning = (task: typeof tasks[number]) => !task.ended && task.round === round
  const leave = (task: typeof tasks[number]) =>
    Effect.gen(function*() {
      if (task.ended) return
      yield* Scope.close(task.scope, Exit.void)
      const running = isRunning(task)
      task.ended = true
      if (running) yield* change(task.shard, "lost")
    })
  for (const { op, shard: at, value, who } of steps) {
    const { group } = members[who]!
    const shard = `shard ${at}`
    const known = shards.get(shard)
    const mine = tasks.find((task) => task.who === who && task.shard === shard && !task.ended)
    switch (op) {
      case "register": {
        const scope = yield* Scope.make()
        const exit = yield* Effect.exit(Scope.provide(group.register(shard), scope))
        if (known?.status === "running" || known?.status === "done") {
          const reason = Option.getOrThrow(Exit.findErrorOption(exit)).reason._tag
          assert.strictEqual(reason, known.status === "done" ? "ShardDone" : "ShardTaken")
          yield* Scope.close(scope, Exit.void)
        } else {
          if (Exit.isFailure(exit)) return yield* Effect.failCause(exit.cause)
          tasks.push({ who, shard, task: exit.value, scope, round, ended: false })
          yield* change(shard, "running", { owner: who })
        }
        break
      }
      case "submit":
      case "fail": {
        if (mine === undefined) break
        const ended = op === "submit" ? mine.task.submit(value) : mine.task.fail("no")
        const exit = yield* Effect.exit(ended)
        assert.strictEqual(Exit.isSuccess(exit), isRunning(mine))
        if (isRunning(mine)) {
          mine.ended = true
          yield* change(shard, op === "submit" ? "done" : "failed", { value })
        }
        yield* Scope.close(mine.scope, Exit.void)
        mine.ended = true
        break
      }
      case "leave":
        if (mine !== undefined) yield* leave(mine)
        break
      case "run": {
        const exit = yield* Effect.exit(group.run(shard, Effect.succeed(value)))
        if (known?.status === "running") {
          assert.isTrue(Exit.isFailure(exit))
        } else if (known?.status === "done") {
          assert.deepStrictEqual(exit, Exit.succeed(known.value))
        } else {
          assert.deepStrictEqual(exit, Exit.succeed(value))
          // Both at once, as far as a waiter can tell.
          shards.set(shard, { status: "running", value: 0, owner: who })
          changes.push(`${shard} running`)
          yield* change(shard, "done", { value })
        }
        break
      }
      case "close": {
        // The whole coordinator, and with it its workers and waiters.
        for (const waiter of waiting.filter((waiter) => waiter.who === who)) yield* Fiber.interrupt(waiter.fiber)
        waiting.splice(0, waiting.length, ...waiting.filter((waiter) => waiter.who !== who))
        yield* Scope.close(members[who]!.scope, Exit.void)
        const lost = tasks.filter((task) => task.who === who && isRunning(task))
        for (const task of tasks) if (task.who === who) task.ended = true
        // In which order they are reaped is not for us to say.
        for (const { shard } of lost) shards.set(shard, { ...shards.get(shard)!, status: "lost" })
        yield* eventually(Effect.map(observer.group.snapshot, (it) => it.lost === count("lost")))
        changes.push([...lost].map(({ shard }) => `${shard} lost`).sort().join())
        yield* settle
        members[who] = yield* open
        break
      }
      case "reset":
        yield* group.reset
        round++
        shards.clear()
        changes.push("reset")
        for (const waiter of waiting) waiter.outcome = "GroupReset"
        yield* settle
        break
      case "await": {
        const patient = value % 2 === 0
        const fiber = yield* awaiting(group, patient ? "wait" : undefined)
        waiting.push({ fiber, who, outcome: outcomeOf(patient), patient })
        yield* settle
      }
    }
    const now = yield* observer.group.snapshot
    assert.deepStrictEqual(
      [now.round, now.expected, now.registered, now.running, now.done, now.failed, now.lost],
      [round, expected, shards.size, count("running"), count("done"), count("failed"), count("lost")]
    )
  }
  // All that has changed has been shown, once and in order.
  const flat = changes.flatMap((change) => change.split(",")).filter((change) => change !== "")
  const seen = yield* promptly(Queue.takeN(watched, flat.length + 1), "all changes")
  const shown = seen.slice(1).map(({ changed }) =>
    changed === undefined ? "reset" : `${changed.shard} ${changed.status}`
  )
  const sorted = (all: ReadonlyArray<string>) => {
    // Those that were lost together come in any order.
    const result: Array<string> = []
    for (let at = 0; at < all.length;) {
      let end = at
      while (end < all.length && all[end]!.endsWith(" lost")) end++
      result.push(...all.slice(at, end).sort(), ...all.slice(end, end + 1))
      at = end + 1
    }
    return result
  }
  assert.deepStrictEqual(sorted(shown), sorted(flat))
  assert.strictEqual(yield* Queue.size(watched), 0)
})
