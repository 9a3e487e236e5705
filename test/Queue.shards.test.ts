/** Queues of several shards: every job runs once, all slots of a process go where jobs are, and none is used twice. */
import { assert, layer } from "@effect/vitest"
import { Deferred, Effect, Exit, Fiber, Option, Schema, type Scope, Stream } from "effect"
import { Queue } from "../src/index.ts"
import { partitionOf } from "../src/internal/actor/keys.ts"
import { make as proxy } from "../src/testing/Proxy.ts"
import { actor, client } from "./support/actor.ts"
import { eventually } from "./support/eventually.ts"
import { assertEmpty, freshNamespace, type Node, node, TestServer } from "./support/live.ts"
import { begins, emptied, isRangeError, make, shows, upTo, working } from "./support/queues.ts"
import { asks } from "./support/requests.ts"
import type { Server } from "./support/servers.ts"
import { lose, on } from "./support/several.ts"

const shards = 4

/** So many coordinators, with a partition for each shard. */
const spread = <A, E, R>(
  count: number,
  self: (nodes: ReadonlyArray<Node>, namespace: string, server: Server) => Effect.Effect<A, E, R>
) =>
  Effect.gen(function*() {
    const server = yield* TestServer
    const namespace = freshNamespace()
    yield* Effect.scoped(Effect.gen(function*() {
      const settings = { lease: "3 seconds", margin: "500 millis", namespace, partitions: shards } as const
      const nodes = yield* Effect.forEach(upTo(count), () => node(server.url, settings))
      yield* Effect.scoped(self(nodes, namespace, server))
    }))
    yield* assertEmpty(server, namespace)
  }) as Effect.Effect<void, E, Exclude<R, Scope.Scope> | TestServer>

/** Ids of jobs that are all in one shard. */
const idsOf = (shard: number, count: number): ReadonlyArray<string> => {
  const ids: Array<string> = []
  for (let at = 0; ids.length < count; at++) if (partitionOf(`job ${at}`, shards) === shard) ids.push(`job ${at}`)
  return ids
}

/** A worker whose handlers wait, and how many of them there are. */
const blocked = <A, S, E>(queue: Queue.Queue<A, S, E>, concurrency: number) =>
  Effect.gen(function*() {
    const gate = yield* Deferred.make<void>()
    const seen = { now: 0, most: 0, all: 0 }
    const enter = Effect.sync(() => {
      seen.all++
      seen.most = Math.max(seen.most, ++seen.now)
    })
    const worker = yield* working(
      queue,
      () =>
        Effect.acquireUseRelease(
          enter,
          () => Effect.as(Deferred.await(gate), undefined as S),
          () => Effect.sync(() => void seen.now--)
        ),
      { concurrency }
    )
    return { ...worker, seen, open: Deferred.succeed(gate, undefined) }
  })

layer(TestServer.layer, { excludeTestServices: true, timeout: "60 seconds" })("a queue of several shards", (it) => {
  it.effect("runs every job once, on as many slots as there are", () =>
    spread(2, ([a, b]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ shards }))
        // The number is known by then.
        const other = yield* on(b!, make())
        const offered = yield* queue.offerAll(upTo(3000))
        const single = yield* Effect.forEach(upTo(100, 3000), (n) => other.offer(n))
        assert.strictEqual(new Set([...offered, ...single].map(({ id }) => id)).size, 3100)
        yield* shows(queue, { waiting: 3100 })
        const counts = new Map<number, number>()
        let [running, most] = [0, 0]
        const handler = (n: number) =>
          Effect.acquireUseRelease(
            Effect.sync(() => {
              counts.set(n, (counts.get(n) ?? 0) + 1)
              most = Math.max(most, ++running)
            }),
            () => Effect.yieldNow,
            () => Effect.sync(() => void running--)
          )
        const workers = [yield* working(queue, handler, { concurrency: 7 })]
        yield* eventually(Effect.sync(() => assert.isAbove(counts.size, 50)))
        assert.isAtMost(most, 7)
        workers.push(yield* working(other, handler, { concurrency: 2 }))
        yield* eventually(Effect.sync(() => assert.strictEqual(counts.size, 3100)))
        yield* shows(queue, { waiting: 0, active: 0, completed: 3100, workers: 2 })
        assert.isTrue([...counts.values()].every((count) => count === 1))
        assert.isAtMost(most, 9)
        yield* Effect.forEach(workers, ({ stop }) => stop)
      })))

  it.effect("gives all slots to the one shard that has jobs, and takes them back", () =>
    spread(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ shards }))
        const first = yield* blocked(queue, 4)
        yield* shows(queue, { workers: 1 })
        yield* queue.offerAll(upTo(10), (n) => ({ id: idsOf(2, 10)[n]! }))
        yield* eventually(Effect.sync(() => assert.strictEqual(first.seen.now, 4)))
        // The other shards have no slot now, and get the slots that become free.
        yield* queue.offerAll(upTo(10, 10), (n) => ({ id: idsOf(n % 2, 20)[n]! }))
        yield* first.open
        yield* eventually(Effect.sync(() => assert.strictEqual(first.seen.all, 20)))
        assert.strictEqual(first.seen.most, 4)
        yield* shows(queue, { waiting: 0, active: 0 })
        yield* first.stop
      })))

  it.effect("shares one slot among all shards", () =>
    spread(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ shards }))
        const ids = upTo(shards).map((shard) => idsOf(shard, 50))
        yield* queue.offerAll(upTo(200), (n) => ({ id: ids[n % shards]![Math.floor(n / shards)]! }))
        const worker = yield* working(queue)
        yield* eventually(Effect.sync(() => assert.strictEqual(worker.begun.length, 200)))
        // None waits for the others to be done.
        for (const shard of upTo(shards)) {
          const last = worker.begun.findLastIndex((n) => n % shards === shard)
          assert.isAbove(last, 150, `shard ${shard}`)
        }
        yield* worker.stop
      })))

  it.effect("works on what is left when sessions are lost", () =>
    spread(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ shards }))
        const other = yield* on(b!, make({ shards }))
        const first = yield* blocked(queue, 3)
        yield* other.offerAll(upTo(40))
        yield* eventually(Effect.sync(() => assert.strictEqual(first.seen.now, 3)))
        const second = yield* working(other, undefined, { concurrency: 2 })
        yield* eventually(Effect.sync(() => assert.strictEqual(second.begun.length, 37)))
        yield* lose(a!, namespace, server)
        yield* first.open
        yield* eventually(Effect.sync(() => {
          assert.deepStrictEqual([...new Set([...first.begun, ...second.begun])].toSorted((a, b) => a - b), upTo(40))
        }))
        yield* shows(other, { waiting: 0, active: 0, workers: 2, completed: 40 })
        // Both still take jobs of all shards.
        yield* second.stop
        yield* other.offerAll(upTo(20, 40), (n) => ({ id: `after ${n}` }))
        yield* shows(other, { waiting: 0, active: 0, workers: 1, completed: 60 })
        yield* first.stop
      })))

  it.effect("finds jobs by their ids", () =>
    spread(2, ([a, b]) =>
      Effect.gen(function*() {
        const squares = { success: Schema.Number, shards }
        const queue = yield* on(a!, make(squares as never)) as unknown as Effect.Effect<Queue.Queue<number, number>>
        const other = yield* on(b!, make(squares as never)) as unknown as Effect.Effect<Queue.Queue<number, number>>
        for (const at of upTo(8)) {
          const offered = yield* queue.offer(at, { id: `given ${at}`, delay: "1 hour" })
          assert.deepStrictEqual(yield* other.offer(at, { id: `given ${at}` }), { id: offered.id, duplicate: true })
          assert.isTrue(Option.isSome(yield* other.job(`given ${at}`).status))
          assert.isTrue(Option.isSome(yield* other.job(offered.id).status))
          assert.isTrue(yield* other.job(offered.id).promote)
        }
        const { id } = yield* queue.offer(8)
        assert.isFalse(yield* other.job(id.replace(/^(?:\d+:)?/, "9:")).cancel)
        assert.isTrue(yield* other.job(id).cancel)
        const failing = yield* Effect.forkChild(queue.run((n) => n < 4 ? Effect.fail("no") : Effect.succeed(n * n), {
          attempts: 1,
          concurrency: 3
        }))
        assert.strictEqual(yield* other.execute(12), 144)
        yield* shows(queue, { dead: 4, waiting: 0, active: 0 })
        yield* Fiber.interrupt(failing)
        const letters = yield* Stream.runCollect(queue.deadLetters)
        assert.deepStrictEqual(letters.map(({ id }) => id).toSorted(), upTo(4).map((at) => `given ${at}`))
        // Of no shard that there is.
        const elsewhere = letters.map(({ letter }) => `9:${letter.split(":").at(-1)}`)
        assert.deepStrictEqual(yield* Stream.runCollect(queue.letters({ after: elsewhere[0] })), [])
        assert.strictEqual(yield* other.replay(elsewhere), 0)
        assert.strictEqual(yield* other.discard(elsewhere), 0)
        assert.strictEqual(yield* other.replay([letters[0]!.letter]), 1)
        assert.strictEqual(yield* other.discard([letters[1]!.letter]), 1)
        yield* shows(queue, { dead: 2, waiting: 1 })
        assert.strictEqual(yield* queue.replay(), 2)
        yield* shows(queue, { dead: 0, waiting: 3 })
      })))

  it.effect("stores nothing of the jobs that are encoded together with one that does not fit", () =>
    spread(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ shards }))
        const invalid = yield* Effect.flip(queue.offerAll([...upTo(2047), "no" as never]))
        assert.strictEqual(invalid.reason._tag, "InvalidPayload")
        // In all shards, behind all that was sent before.
        const all = upTo(4).map((shard) => ({ id: idsOf(shard, 1)[0]! }))
        yield* queue.offerAll(upTo(4), (n) => all[n]!)
        assert.strictEqual((yield* queue.state).waiting, 4)
      })))

  it.effect("lists its jobs as often as that is asked", () =>
    spread(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ shards }))
        yield* queue.offerAll(upTo(20))
        const jobs = queue.jobs({ state: "waiting" })
        yield* Stream.runDrain(Stream.take(jobs, 1))
        for (const _ of upTo(2)) assert.lengthOf(yield* Stream.runCollect(jobs), 20)
      })))

  it.effect("offers dead letters again by the ids of their jobs, in any shard", () =>
    spread(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ shards }))
        const offered = yield* Effect.forEach(upTo(shards), (n) => queue.offer(n))
        const failing = yield* working(queue, () => Effect.fail("no"), { attempts: 1, concurrency: shards })
        yield* shows(queue, { dead: shards })
        yield* failing.stop
        for (const { id } of offered) assert.isTrue(yield* queue.job(id).retry, id)
        yield* shows(queue, { dead: 0, waiting: shards })
      })))

  it.effect("takes one job from any shard", () =>
    spread(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ shards }))
        assert.isTrue(Option.isNone(yield* Effect.scoped(queue.take({ wait: "50 millis" }))))
        for (const shard of upTo(shards)) {
          yield* queue.offer(shard, { id: idsOf(shard, 1)[0]! })
          const taken = yield* Effect.scoped(Effect.map(queue.take(), Option.map(({ payload }) => payload)))
          assert.deepStrictEqual(taken, Option.some(shard))
        }
        yield* shows(queue, { waiting: 0, active: 0, completed: shards })
      })))

  it.effect("divides its limits", () =>
    spread(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ shards, limits: { concurrency: 6 } }))
        yield* queue.offerAll(upTo(3000))
        const worker = yield* blocked(queue, 20)
        yield* eventually(Effect.sync(() => assert.strictEqual(worker.seen.now, 6)))
        yield* worker.stop
        yield* queue.drain({ delayed: true })
        const few = [{ concurrency: 3 }, { length: 3 }, { rate: { jobs: 3, interval: "1 second" } }] as const
        for (const limits of few) {
          isRangeError(yield* Effect.exit(on(a!, Effect.scoped(make({ limits })))))
          isRangeError(yield* Effect.exit(on(a!, Effect.scoped(make({ shards, limits, name: "few" })))))
        }
      })))

  it.effect("divides its length", () =>
    spread(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ shards, limits: { length: 6, onFull: "fail" } }))
        const offers = upTo(shards).flatMap((shard) => idsOf(shard, 3).map((id) => Effect.exit(queue.offer(1, { id }))))
        const exits = yield* Effect.all(offers)
        // Two in each of the first shards, and one in each of the others.
        assert.deepStrictEqual(
          exits.map(Exit.isSuccess),
          [true, true, false, true, true, false, true, false, false, true, false, false]
        )
        yield* shows(queue, { waiting: 6 })
      })))

  it.effect("divides its rate", () =>
    spread(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ shards, limits: { rate: { jobs: 6, interval: "600 millis" } } }))
        yield* queue.pause
        yield* Effect.forEach(upTo(shards).flatMap((shard) => idsOf(shard, 4)), (id) => queue.offer(1, { id }))
        const at: Array<number> = []
        const worker = yield* working(queue, () => Effect.sync(() => at.push(Date.now())), { concurrency: 16 })
        yield* shows(queue, { workers: 1 })
        const resumed = Date.now()
        yield* queue.resume
        yield* shows(queue, { completed: 16 })
        // Each shard has 1.5 jobs in 600 ms: one at once, the next when two are due, and then one each 400 ms.
        for (const [n, after] of [[4, 200], [8, 600], [12, 1000]] as const) {
          assert.isAtLeast(at[n]! - resumed, after - 2, `${n}`)
        }
        yield* worker.stop
      })))

  it.effect("keeps its number while it is in use", () =>
    spread(2, ([a, b]) =>
      Effect.gen(function*() {
        const mismatch = (wanted: number) =>
          Effect.gen(function*() {
            const exit = yield* Effect.exit(Effect.scoped(on(b!, make({ shards: wanted }))))
            assert.isTrue(Exit.isFailure(exit) && String(exit.cause).includes("The number of shards"), String(exit))
          })
        yield* Effect.scoped(Effect.gen(function*() {
          const queue = yield* on(a!, make({ shards }))
          yield* mismatch(2)
          yield* queue.offer(1)
        }))
        const queue = yield* on(b!, Effect.tap(Queue.make({ name: "other", payload: Schema.Number }), emptied))
        const worker = yield* working(queue)
        yield* queue.offer(7)
        yield* begins(worker, [7])
        yield* worker.stop
        // The first one is empty, as soon as Redis knows that its process has left.
        yield* eventually(on(b!, make({ shards: 2 })))
        yield* mismatch(3)
        const none = yield* Effect.exit(Effect.scoped(on(b!, make({ shards: 5, name: "none" }))))
        assert.isTrue(Exit.isFailure(none) && String(none.cause).includes("RangeError"), String(none))
      })))

  const signal = Effect.sync(() => process.emit("SIGUSR2", "SIGUSR2"))
  const ways = [
    ["lets handlers finish within the grace", Effect.void, "Success"],
    ["interrupts handlers at the second signal", Effect.andThen(signal, signal), "Failure"]
  ] as const
  for (const [what, hurry, expected] of ways) {
    it.effect(`${what} when it is interrupted before it has joined all shards`, () =>
      Effect.gen(function*() {
        const server = yield* TestServer
        const namespace = freshNamespace()
        const line = yield* proxy(server)
        const settings = { lease: "3 seconds", margin: "500 millis", namespace, partitions: shards } as const
        yield* Effect.scoped(Effect.gen(function*() {
          const mine = yield* node(line.url, settings)
          const queue = yield* on(mine, make({ shards }))
          for (const shard of upTo(shards)) yield* queue.offer(shard, { id: idsOf(shard, 1)[0]! })
          // The first shard is joined, and gives its job.
          let joined = 0
          const held = yield* line.hold((request) => asks("queue.work")(request) && ++joined > 1)
          const [began, gate] = [yield* Deferred.make<void>(), yield* Deferred.make<void>()]
          const outcomes: Array<string> = []
          const handler = () =>
            Effect.andThen(Deferred.succeed(began, undefined), Deferred.await(gate)).pipe(
              Effect.onExit((exit) => Effect.sync(() => outcomes.push(exit._tag)))
            )
          const worker = yield* working(queue, handler, {
            concurrency: shards,
            grace: "1 minute",
            signals: ["SIGUSR2"]
          })
          yield* held.request
          yield* Deferred.await(began)
          const stopping = yield* Effect.forkChild(worker.stop)
          yield* Effect.yieldNow
          yield* held.release()
          // The reply comes after all that the stop has led to.
          yield* queue.state
          yield* hurry
          if (expected === "Success") yield* Deferred.succeed(gate, undefined)
          yield* Fiber.join(stopping)
          assert.deepStrictEqual([...new Set(outcomes)], [expected])
        }))
        yield* assertEmpty(server, namespace)
      }))
  }

  it.effect("has the number of its members also if jobs and workers come before them, after a loss of data", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      yield* Effect.promise(async () => {
        const { open, send } = actor(redis, freshNamespace(), "queue:q")
        await open("A")
        await send("A", "queue.work", ["w", 1])
        await send("A", "queue.offer", ["1", "1", "node", 1])
        const join = (id: string, shards: number) =>
          send("A", "queue.join", [id, "1", 0, 0, 0, 60_000, 1000, 0, 3, 0, 0, 1, 0, 0, shards, 0, ""])
        assert.deepStrictEqual((await join("a", 2)).slice(0, 2), ["joined", 2])
        assert.deepStrictEqual(await join("b", 3), ["mismatch", 2])
      })
    }))

  it.effect("has another number when only members have known the former one whose leases ended long ago", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      yield* Effect.promise(async () => {
        const { keys, open, reap, send } = actor(redis, freshNamespace(), "queue:q")
        await open("A")
        await open("B")
        const join = (session: string, shards: number, anyway: "" | "1" = "", lease?: number) =>
          send(
            session,
            "queue.join",
            ["m", "1", 0, 0, 0, 60_000, 1000, 0, 3, 0, 0, 1, 0, 0, shards, 0, anyway],
            lease
          )
        await join("B", 1, "", 50)
        // Its alarm is set for its former lease.
        await redis.zadd(keys("B")[1]!, 0, "B")
        while ((await join("A", 2))[0] !== "stale");
        assert.deepStrictEqual(await join("A", 2, "1"), ["mismatch", 1])
        await reap("B")
        assert.deepStrictEqual((await join("A", 2)).slice(0, 2), ["joined", 2])
      })
    }))
})
