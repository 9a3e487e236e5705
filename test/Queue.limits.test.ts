/** Queues of a length: what becomes of offers when they are full. */
import { assert, layer } from "@effect/vitest"
import { DateTime, Deferred, Effect, Exit, Fiber, Option, Schedule, Schema, Scope, Stream } from "effect"
import { Queue } from "../src/index.ts"
import { make as proxy } from "../src/testing/Proxy.ts"
import { eventually, realSleep } from "./support/eventually.ts"
import { TestServer } from "./support/live.ts"
import { begins, emptied, inLine, isRangeError, make, shows, upTo, working } from "./support/queues.ts"
import { asks } from "./support/requests.ts"
import { behind, isPending, lose, missed, on, pending, promptly, several } from "./support/several.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

const limited = (length: number, onFull?: "wait" | "fail" | "dropOldest") => make({ limits: { length, onFull } })

const refusal = <A>(offer: Effect.Effect<A, Queue.QueueError>) =>
  Effect.map(Effect.flip(offer), ({ reason }) => {
    assert(reason._tag === "QueueFull")
    return reason
  })

const waitersOf = <A, E>(fibers: ReadonlyArray<Fiber.Fiber<A, E>>, count: number) =>
  eventually(Effect.sync(() => assert.strictEqual(fibers.filter((fiber) => isPending(fiber)).length, count)))

layer(TestServer.layer, live)("a queue of a length", (it) => {
  it.effect("has offers wait in turn until there is room", () =>
    several(3, (nodes) =>
      Effect.gen(function*() {
        const [queue, second, third] = yield* Effect.forEach(nodes, (context) => on(context, limited(10)))
        yield* queue!.offerAll(upTo(10))
        const own = yield* Effect.forkChild(queue!.offerAll(upTo(3000, 1000)))
        yield* pending(own)
        const theirs = yield* Effect.forkChild(second!.offerAll(upTo(300, 5000)))
        const single = yield* Effect.forEach(upTo(5, 6000), (n) => Effect.forkChild(third!.offer(n)))
        yield* shows(queue!, { waiting: 10 })
        for (const fiber of [own, theirs, ...single]) yield* pending<unknown, unknown>(fiber)
        const worker = yield* working(queue!, undefined, { concurrency: 5 })
        const offered = yield* Fiber.join(own)
        assert.strictEqual(new Set(offered.map(({ id }) => id)).size, 3000)
        yield* Fiber.join(theirs)
        yield* Effect.forEach(single, (fiber) => Fiber.join(fiber))
        yield* shows(queue!, { completed: 3315, waiting: 0 })
        for (const [from, count] of [[1000, 3000], [5000, 300], [6000, 5]] as const) {
          assert.deepStrictEqual(worker.begun.filter((n) => n >= from && n < from + count), upTo(count, from))
        }
        // No process waits for all jobs of another one.
        assert.isBelow(worker.begun.indexOf(6004), 1000)
        yield* worker.stop
      })))

  it.effect("is as long as the last process says, also when others join again, or Redis has lost it", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        yield* on(a!, limited(5, "fail"))
        const queue = yield* on(b!, limited(50, "fail"))
        const members = server.cli(
          "EVAL",
          `local fields = redis.call('HKEYS', redis.call('KEYS', '{${namespace}:*:queue:*')[1])
          local count = 0
          for _, field in ipairs(fields) do if string.sub(field, 1, 1) == 'o' then count = count + 1 end end
          return count`,
          0
        )
        const holds = Effect.gen(function*() {
          yield* eventually(Effect.map(members, (count) => assert.strictEqual(Number(count), 2)))
          yield* queue.offerAll(upTo(50))
          assert.strictEqual((yield* Effect.flip(queue.offer(0))).reason._tag, "QueueFull")
        })
        missed(a!)
        yield* lose(a!, namespace, server)
        yield* holds
        yield* server.cli("FLUSHALL")
        yield* eventually(on(b!, Effect.asVoid(queue.state)))
        yield* holds
      })))

  it.effect("keeps no room for an offer that is interrupted, or whose process has ended", () =>
    several(3, ([a, b, c], namespace, server) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, limited(1))
        const scope = yield* Scope.make()
        const open = Queue.make({
          name: queue.name,
          payload: Schema.Number,
          limits: { length: 1 },
          retention: "200 millis"
        })
        const other = yield* Scope.provide(on(b!, open), scope)
        const last = yield* on(c!, limited(1))
        yield* queue.offer(1)
        const first = yield* Effect.forkChild(other.offer(2))
        yield* inLine(server, namespace, 1)
        const kept = yield* Effect.forkChild(last.offer(3))
        yield* inLine(server, namespace, 2)
        yield* Fiber.interrupt(first)
        yield* inLine(server, namespace, 1)
        const again = yield* Effect.forkChild(Effect.flip(other.offerAll([4, 5])))
        yield* inLine(server, namespace, 2)
        yield* pending(kept)
        // The place in the line is that of the session, and the jobs go into the line again.
        yield* lose(c!, namespace, server)
        missed(b!)
        yield* inLine(server, namespace, 2)
        yield* Scope.close(scope, Exit.void)
        assert.strictEqual((yield* promptly(Fiber.join(again), "the refusal")).reason._tag, "QueueClosed")
        yield* inLine(server, namespace, 1)
        const worker = yield* working(queue)
        yield* promptly(Fiber.join(kept), "the offer")
        yield* begins(worker, [1, 3])
        yield* worker.stop
      })))

  it.effect("releases a caller that is interrupted before its job is stored, or known to be", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, limited(1))
        const early = yield* Effect.forkChild(queue.execute(1), { startImmediately: true })
        yield* promptly(Fiber.interrupt(early), "the interruption")
        // Behind that one, which was stored, and is cancelled.
        yield* promptly(queue.offer(2), "the offer")
        yield* shows(queue, { waiting: 1 })
        const waiting = yield* Effect.forkChild(queue.execute(3), { startImmediately: true })
        yield* pending(waiting)
        yield* promptly(Fiber.interrupt(waiting), "the interruption")
        const worker = yield* working(queue)
        yield* shows(queue, { waiting: 0, completed: 1 })
        assert.deepStrictEqual(worker.begun, [2])
        yield* worker.stop
      })))

  it.effect("does not store the job of a caller that is interrupted before its process knows that the queue is full", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, limited(1))
        const other = yield* on(b!, Queue.make({ name: queue.name, payload: Schema.Number }))
        yield* queue.offer(1)
        const early = yield* Effect.forkChild(other.offer(2), { startImmediately: true })
        yield* promptly(Fiber.interrupt(early), "the interruption")
        const kept = yield* Effect.forkChild(other.offer(3))
        yield* pending(kept)
        const worker = yield* working(queue)
        yield* promptly(Fiber.join(kept), "the offer")
        yield* begins(worker, [1, 3])
        yield* worker.stop
      })))

  for (const shards of [1, 3]) {
    it.effect(`waits for room for as long as an offer says, with ${shards} shards`, () =>
      several(2, ([a, b]) =>
        Effect.gen(function*() {
          const open = make({ shards, limits: { length: shards } })
          const queue = yield* on(a!, open)
          const other = yield* on(b!, open)
          const group = "full"
          yield* queue.offer(1, { group })
          const wait = "200 millis"
          const late = [
            yield* Effect.flip(other.offer(100, { group, wait })),
            yield* Effect.flip(other.offerAll([101, 102], { group, wait }))
          ]
          assert.deepStrictEqual(late.map(({ reason }) => reason._tag), ["WaitTimeout", "WaitTimeout"])
          assert.include(late[0]!.message, JSON.stringify(queue.name))
          isRangeError(yield* Effect.exit(other.offer(1, { wait: -1 })))
          // It has left the line.
          const kept = yield* Effect.forkChild(other.offer(103, { group }))
          yield* pending(kept)
          const worker = yield* working(queue)
          yield* promptly(Fiber.join(kept), "the offer")
          yield* eventually(Effect.sync(() => assert.include(worker.begun, 103)))
          assert.deepStrictEqual(worker.begun.filter((n) => n > 99), [103])
          yield* worker.stop
        }), { partitions: shards, lease: "3 seconds", margin: "500 millis" }))
  }

  it.effect("counts the time in which an offer waits for room as time since the offer", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, limited(1))
        yield* queue.pause
        yield* queue.offer(1)
        const began = Date.now()
        const expired = yield* Effect.forkChild(Effect.flip(queue.execute(2, { expires: "300 millis" })))
        yield* waitersOf([expired], 1)
        // The request for the first one is under way: these stand behind it in their process.
        const due = yield* Effect.forkChild(queue.offer(3, { delay: "300 millis" }))
        const late = yield* Effect.forkChild(queue.offer(4, { delay: "1 hour", expires: "2 hours", id: "e9d9" }))
        yield* eventually(Effect.sync(() => assert.isAbove(Date.now() - began, 400)))
        const worker = yield* working(queue)
        yield* queue.resume
        const { reason } = yield* promptly(Fiber.join(expired), "the end of the job")
        assert.deepInclude(reason, { _tag: "JobFailed", outcome: "expired" })
        yield* Fiber.join(due)
        yield* begins(worker, [1, 3])
        yield* Fiber.join(late)
        yield* shows(queue, { completed: 2, expired: 1, delayed: 1 })
        const [job] = yield* Stream.runCollect(queue.jobs({ state: "delayed" }))
        const hour = began + 3_600_000
        assert.strictEqual(job!.id, "e9d9")
        assert.isAtMost(Math.abs(DateTime.toEpochMillis(job!.due!) - hour), 250)
        yield* worker.stop
      })))

  it.effect("stores no job whose wait for room was over", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const line = yield* proxy(server)
        const queue = yield* on(a!, limited(2))
        const other = yield* on(
          yield* behind(line, namespace),
          Queue.make({ name: queue.name, payload: Schema.Number })
        )
        const worker = yield* working(queue, () => Effect.sleep(3))
        const offered: Array<number> = []
        let late = 0
        const offering = (first: number) =>
          Effect.forEach(upTo(60, first), (n) =>
            Effect.match(other.offer(n, { wait: 2 + n % 30 }), {
              onFailure: ({ reason }) => {
                assert.strictEqual(reason._tag, "WaitTimeout")
                late++
              },
              onSuccess: () => void offered.push(n)
            }))
        yield* line.delay({ requests: 2, replies: 2 })
        yield* Effect.all([offering(0), offering(1000), offering(2000)], { concurrency: "unbounded" })
        assert.isTrue(late > 0 && offered.length > 0)
        yield* queue.offer(-1)
        yield* eventually(Effect.sync(() => assert.include(worker.begun, -1)))
        assert.deepStrictEqual(
          worker.begun.filter((n) => n >= 0).toSorted((x, y) => x - y),
          offered.toSorted((x, y) => x - y)
        )
        yield* worker.stop
      })))

  it.effect("answers an offer that is on its way when its wait is over", () =>
    several(0, (_, namespace, server) =>
      Effect.gen(function*() {
        const line = yield* proxy(server)
        const queue = yield* on(yield* behind(line, namespace), make())
        const held = yield* line.hold(asks("queue.offer"))
        const offer = yield* Effect.forkChild(queue.offer(1, { wait: "20 millis" }))
        yield* held.request
        yield* realSleep("100 millis")
        yield* pending(offer)
        yield* held.release()
        yield* promptly(Fiber.join(offer), "the answer")
        assert.strictEqual((yield* queue.state).waiting, 1)
      })))

  for (const onFull of ["wait", "fail"] as const) {
    it.effect(`takes a job beyond its length that runs after one that has ended: ${onFull}`, () =>
      several(1, ([a]) =>
        Effect.gen(function*() {
          const queue = yield* on(a!, limited(1, onFull))
          const { id } = yield* queue.offer(1, { result: true })
          const worker = yield* working(queue)
          yield* queue.job(id).result()
          yield* worker.stop
          yield* queue.offer(2)
          yield* promptly(queue.offer(3, { after: [id] }), "the job")
          yield* shows(queue, { waiting: 2 })
          // There is no room for others, as before.
          const full = yield* Effect.forkChild(Effect.exit(queue.offer(4, { wait: "200 millis" })))
          assert.isTrue(Exit.isFailure(yield* Fiber.join(full)))
        })))
  }

  for (const onFull of ["wait", "fail", "dropOldest"] as const) {
    it.effect(`takes blocked jobs beyond its length, and counts them when they can begin: ${onFull}`, () =>
      several(2, ([a, b]) =>
        Effect.gen(function*() {
          const queue = yield* on(a!, limited(2, onFull))
          const other = yield* on(b!, limited(2, onFull))
          const [first, second] = yield* queue.offerAll([1, 2])
          // The others wait for room, if they can.
          const waiting = onFull === "wait" ? yield* Effect.forkChild(queue.offer(3)) : undefined
          if (waiting !== undefined) yield* pending(waiting)
          const after = [first!.id]
          const blocked = yield* promptly(
            other.offerAll([4, 5, 6], (n) => ({ after, id: `blocked ${n}` })),
            "the offers"
          )
          assert.deepStrictEqual(blocked.map(({ duplicate }) => duplicate), [false, false, false])
          const again = yield* promptly(other.offer(77, { after, id: "blocked 5" }), "the duplicate")
          assert.deepStrictEqual(again, { id: blocked[1]!.id, duplicate: true })
          const simple = { after: [second!.id], dedupe: { id: "simple" } }
          assert.isFalse((yield* promptly(other.offer(7, simple), "the job")).duplicate)
          assert.isTrue((yield* promptly(other.offer(77, simple), "its duplicate")).duplicate)
          yield* shows(queue, { waiting: 2, blocked: 4, dropped: 0 })
          // With others: what takes room is refused, and what does not is stored.
          const mixed = yield* Effect.forkChild(
            Effect.exit(other.offerAll([8, 9], (n) => n === 8 ? { after, id: "blocked 8" } : {}))
          )
          // The job that is dropped has jobs after it.
          const dropped = { blocked: 1, dropped: 1, dead: 4 }
          yield* shows(queue, {
            waiting: 2,
            ...onFull === "dropOldest" ? dropped : { blocked: 5, dropped: 0, dead: 0 }
          })
          if (onFull === "fail") assert.isTrue(Exit.isFailure(yield* Fiber.join(mixed)))
          const worker = yield* working(queue)
          yield* shows(queue, { waiting: 0, blocked: 0, active: 0 })
          yield* Fiber.join(mixed)
          if (waiting !== undefined) yield* Fiber.join(waiting)
          if (onFull !== "dropOldest") {
            yield* eventually(Effect.sync(() =>
              assert.deepStrictEqual(
                worker.begun.toSorted((x, y) => x - y),
                onFull === "wait" ? [1, 2, 3, 4, 5, 6, 7, 8, 9] : [1, 2, 4, 5, 6, 7, 8]
              )
            ))
          }
          yield* worker.stop
        })))
  }

  it.effect("stores the jobs of an offer under their ids while others become dead letters in the same call", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, limited(3, "fail"))
        const ids: Array<string> = []
        const worker = yield* working(queue, () => Effect.map(Queue.Job, ({ id }) => void ids.push(id)))
        yield* shows(queue, { workers: 1 })
        for (const id of ["x", "y", "z"]) yield* queue.offer(0, { id, delay: "1 hour" })
        for (const before of ["x", "y"]) yield* queue.offerAll(upTo(20), { after: [before] })
        const [cancelled, offered, also] = yield* Effect.all(
          [queue.job("x").cancel, queue.offerAll([1, 2]), queue.job("y").cancel],
          { concurrency: "unbounded" }
        )
        assert.deepStrictEqual([cancelled, also], [true, true])
        yield* shows(queue, { waiting: 0, delayed: 1, blocked: 0, active: 0, completed: 2, dead: 40 })
        assert.deepStrictEqual(ids, offered.map(({ id }) => id))
        const letters = yield* Stream.runCollect(queue.deadLetters)
        assert.strictEqual(new Set(letters.map(({ letter }) => letter)).size, 40)
        yield* worker.stop
      })))

  it.effect("takes what waiting workers can begin, beyond its length", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, limited(1, "fail"))
        const gate = yield* Deferred.make<void>()
        const worker = yield* working(queue, () => Deferred.await(gate), { concurrency: 20 })
        yield* shows(queue, { workers: 1 })
        yield* queue.offerAll(upTo(21))
        const { reason } = yield* Effect.flip(queue.offer(21))
        assert.strictEqual(reason._tag, "QueueFull")
        assert.include(reason.message, "is full")
        yield* Deferred.succeed(gate, undefined)
        yield* shows(queue, { completed: 21 })
        yield* queue.offer(22)
        yield* shows(queue, { completed: 22 })
        yield* worker.stop
      })))

  it.effect("refuses offers, but those whose job is there", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, limited(3, "fail"))
        // A queue that was opened without the limit.
        const other = yield* on(b!, Queue.make({ name: queue.name, payload: Schema.Number }))
        yield* other.offer(1, { id: "one" })
        yield* other.offer(2, { delay: "1 hour" })
        const some = yield* Effect.flip(other.offerAll([3, 4, 5]))
        assert.strictEqual(some.reason._tag, "QueueFull")
        yield* shows(queue, { waiting: 2, delayed: 1 })
        assert.deepStrictEqual((yield* refusal(queue.offer(6))).stored, [])
        assert.isTrue((yield* queue.offer(1, { id: "one" })).duplicate)
        assert.strictEqual((yield* Effect.flip(queue.offer(6, { lifo: true }))).reason._tag, "QueueFull")
        yield* queue.drain({ delayed: true })
        yield* queue.offer(7)
        isRangeError(yield* Effect.exit(on(a!, limited(0))))
        isRangeError(yield* Effect.exit(on(a!, limited(1, "never" as "fail"))))
      })))

  for (const shards of [1, 3]) {
    it.effect(`reports which jobs of a call it has stored, before it was full and behind that: ${shards} shards`, () =>
      several(1, ([a]) =>
        Effect.gen(function*() {
          const length = 600
          const queue = yield* on(a!, make({ shards, limits: { length, onFull: "fail" } }))
          const known = yield* queue.offer(0, { id: "known" })
          // Several calls to Redis, the last ones of which are on their way when the first one is refused.
          const numbers = upTo(5000, 1)
          const idOf = (n: number) => ({ id: n === 4000 ? "known" : `job ${n}` })
          const { message, stored } = yield* refusal(queue.offerAll(numbers, idOf))
          assert.include(message, `${stored.length} `)
          yield* shows(queue, { waiting: length })
          assert.deepStrictEqual(stored.map(({ at }) => at).toSorted((x, y) => x - y), stored.map(({ at }) => at))
          const found = new Set<number>()
          yield* Stream.runForEach(
            queue.jobs({ state: "waiting" }),
            ({ payload }) => Effect.sync(() => found.add(Option.getOrThrow(payload)))
          )
          assert.isTrue(found.delete(0))
          const places = [...found].map((n) => n - 1)
          assert.sameMembers(stored.filter(({ duplicate }) => !duplicate).map(({ at }) => at), places)
          const { at, id } = stored[0]!
          assert.deepStrictEqual(yield* queue.offer(0, idOf(numbers[at]!)), { id, duplicate: true })
          // Each of the others can be offered again.
          yield* queue.drain()
          const missing = numbers.filter((n) => !found.has(n)).slice(0, 100)
          const again = yield* queue.offerAll(missing, idOf)
          assert.isTrue(again.every(({ duplicate }) => !duplicate))
          assert.notInclude(again.map(({ id }) => id), known.id)
        }), { lease: "3 seconds", margin: "500 millis", partitions: shards }))
  }

  it.effect("drops the oldest jobs of the lowest level, and notifies the callers that wait for them", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const make = Effect.tap(
          Queue.make({
            name: "drops",
            payload: Schema.Number,
            retention: "200 millis",
            limits: { length: 4, onFull: "dropOldest" }
          }),
          emptied
        )
        const queue = yield* on(a!, make)
        const other = yield* on(b!, make)
        const result = yield* Effect.forkChild(Effect.flip(other.execute(0, { priority: "low", id: "zero" })))
        yield* shows(queue, { waiting: 1 })
        yield* queue.offerAll([1, 2])
        yield* queue.offer(3, { priority: "high" })
        yield* queue.offer(4, { delay: "1 hour", dedupe: { id: "x" } })
        const { reason } = yield* promptly(Fiber.join(result), "the outcome")
        assert.deepInclude(reason, { _tag: "JobFailed", outcome: "dropped" })
        yield* shows(queue, { waiting: 3, delayed: 1, dropped: 1 })
        // Its id is free again.
        assert.isFalse((yield* other.offer(5, { priority: "low", id: "zero" })).duplicate)
        yield* shows(queue, { waiting: 3, delayed: 1, dropped: 2 })
        yield* other.offerAll(upTo(600, 100), { priority: "urgent" })
        yield* shows(queue, { waiting: 3, delayed: 1, dropped: 602 })
        const worker = yield* working(queue)
        yield* begins(worker, [697, 698, 699])
        yield* worker.stop
        // Where no job waits, the delayed job that would begin first is dropped.
        yield* queue.offerAll(upTo(4), { delay: "2 hours" })
        yield* shows(queue, { waiting: 0, delayed: 4, dropped: 603 })
        assert.isFalse((yield* other.offer(9, { dedupe: { id: "x" }, delay: "3 hours" })).duplicate)
        yield* shows(queue, { waiting: 0, delayed: 4, dropped: 604 })
        yield* queue.obliterate
        yield* shows(queue, { waiting: 0, delayed: 0, completed: 0, dropped: 0 })
      })))

  it.effect("drops delayed jobs of no group first, those first that would begin first", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const length = 403
        const queue = yield* on(a!, limited(length, "dropOldest"))
        yield* queue.offerAll(upTo(400, 1000), (n) => ({ delay: n * 1000, group: `g${n % 10}` }))
        yield* queue.offer(1, { delay: "2 hours" })
        yield* queue.offer(2, { delay: "3 hours" })
        yield* queue.schedule("s", "1 hour", 0)
        const left = Effect.map(Stream.runCollect(queue.jobs({ state: "delayed" })), (jobs) => [
          jobs.filter(({ group }) => group !== undefined).length,
          jobs.flatMap(({ group, payload }) => group === undefined ? [Option.getOrThrow(payload)] : [])
        ])
        yield* queue.offerAll([3, 4, 5], { delay: "1 hour" })
        assert.deepStrictEqual(yield* left, [400, [5, 1, 2]])
        yield* queue.offerAll(upTo(3, 2000), { delay: "1 hour", group: "a" })
        assert.deepStrictEqual(yield* left, [length, []])
        yield* queue.offer(2003, { delay: "1 hour", group: "b" })
        assert.deepStrictEqual(yield* left, [length, []])
        yield* shows(queue, { delayed: length, waiting: 0, dropped: 6 })
        yield* queue.unschedule("s")
      })))

  it.effect("drops no job for one that was not offered: returned, retried, replayed, or of a schedule", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, limited(2, "dropOldest"))
        const taken = (
          end: Exit.Exit<unknown, unknown>,
          options: { readonly attempts?: number; readonly retry?: Schedule.Schedule<unknown> }
        ) =>
          Effect.gen(function*() {
            const scope = yield* Scope.make()
            yield* queue.offer(0)
            yield* queue.take(options).pipe(Scope.provide(scope))
            yield* queue.offerAll([1, 2])
            yield* Scope.close(scope, end)
          })
        yield* taken(Exit.interrupt(), {})
        yield* shows(queue, { waiting: 3, active: 0, dropped: 0 })
        // An offer has as many go as it stores.
        yield* queue.offer(3)
        yield* shows(queue, { waiting: 3, dropped: 1 })
        yield* queue.drain()
        yield* taken(Exit.fail(7), { attempts: 2, retry: Schedule.spaced("1 hour") })
        yield* shows(queue, { waiting: 2, delayed: 1, dropped: 1 })
        yield* queue.drain({ delayed: true })
        yield* taken(Exit.fail(7), { attempts: 1 })
        yield* queue.replay()
        yield* shows(queue, { waiting: 3, dead: 0, dropped: 1 })
        yield* queue.schedule("often", "100 millis", 9)
        yield* eventually(Effect.map(queue.state, ({ waiting }) => waiting >= 6))
        yield* queue.unschedule("often")
        yield* shows(queue, { dropped: 1 })
        yield* queue.obliterate
      })))

  it.effect("drops what is beyond a lower length, and nothing that comes back after that", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, limited(5000, "dropOldest"))
        yield* queue.offerAll(upTo(3000))
        yield* on(b!, limited(10, "dropOldest"))
        yield* promptly(shows(queue, { waiting: 10, dropped: 2990 }), "the lower length")
        const worker = yield* working(queue, () => Effect.never, { concurrency: 5 })
        yield* shows(queue, { waiting: 5, active: 5 })
        yield* queue.offerAll(upTo(5, 5000))
        yield* worker.stop
        yield* shows(queue, { waiting: 15, active: 0, dropped: 2990 })
        yield* queue.drain()
      })))

  it.effect("lets waiting offers go on when its length is raised, or taken away", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, limited(1))
        const fibers = yield* Effect.forEach(upTo(3), (n) => Effect.forkChild(queue.offer(n)))
        yield* waitersOf(fibers, 2)
        yield* on(b!, limited(2))
        yield* waitersOf(fibers, 1)
        yield* on(b!, make({ limits: {} }))
        yield* waitersOf(fibers, 0)
        yield* shows(queue, { waiting: 3 })
        assert.isTrue(Option.isNone(yield* queue.job("none").status))
      })))

  it.effect("lets waiting offers go on when the oldest jobs are dropped for them from now on", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, limited(1))
        const fibers = yield* Effect.forEach(upTo(4), (n) => Effect.forkChild(queue.offer(n)))
        yield* waitersOf(fibers, 3)
        yield* on(b!, limited(1, "dropOldest"))
        yield* waitersOf(fibers, 0)
        yield* shows(queue, { waiting: 1, dropped: 3 })
      })))
})
