/** Queues: every job runs until it has succeeded, in order, within the limits, and what cannot be handled is put aside. */
import { assert, layer } from "@effect/vitest"
import {
  Cause,
  Context,
  Deferred,
  Duration,
  Effect,
  Exit,
  Fiber,
  Layer,
  Logger,
  Metric,
  Option,
  Schedule,
  Schema,
  Stream
} from "effect"
import { Coordinator, Metrics, Queue } from "../src/index.ts"
import { make as proxy } from "../src/testing/Proxy.ts"
import { actor, client } from "./support/actor.ts"
import { awake, elapsed } from "./support/awake.ts"
import { behindLine } from "./support/behindLine.ts"
import { eventually, realSleep } from "./support/eventually.ts"
import { freshNamespace, node, short, TestServer } from "./support/live.ts"
import { begins, emptied, hostile, isRangeError, make, shows, upTo, working } from "./support/queues.ts"
import { asks, within } from "./support/requests.ts"
import { forgetSession, lose, missed, on, promptly, revoked, several } from "./support/several.ts"
import { recording } from "./support/spans.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

// Nothing runs into a time limit, also on a busy machine.
const unhurried = { lease: "9 seconds", margin: "1 second", requestTimeout: "3 seconds" } as const

layer(TestServer.layer, live)("a queue", (it) => {
  it.effect("runs every job once, in order, and leaves nothing behind", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const other = yield* on(b!, make())
        const offered = yield* other.offerAll(upTo(2000))
        assert.strictEqual(new Set(offered.map(({ id }) => id)).size, 2000)
        assert.isTrue(offered.every(({ duplicate }) => !duplicate))
        yield* shows(queue, { waiting: 2000, active: 0, workers: 0 })
        const worker = yield* working(queue)
        yield* begins(worker, upTo(2000))
        yield* shows(queue, { waiting: 0, active: 0, workers: 1, completed: 2000 })
        yield* other.offer(2000)
        yield* begins(worker, upTo(2001))
        yield* worker.stop
        yield* shows(queue, { workers: 0 })
      })))

  it.effect("goes on when its process may call the actor again", () =>
    several(1, ([a], _, server) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        yield* queue.offer(0)
        yield* revoked(a!, server, queue.offer(1))
        yield* promptly(eventually(Effect.asVoid(queue.offer(2))), "an offer")
        yield* promptly(queue.offerAll([3, 4]), "offers")
        const worker = yield* working(queue)
        yield* begins(worker, [0, 2, 3, 4])
        yield* worker.stop
      }), short))

  it.effect("gives jobs to all workers that wait, and never more than they can run", () =>
    several(3, (nodes) =>
      Effect.gen(function*() {
        const queues = yield* Effect.forEach(nodes, (context) => on(context, make()))
        const gate = yield* Deferred.make<void>()
        const running = [0, 0, 0]
        const handler = (at: number) => () =>
          Effect.gen(function*() {
            running[at]!++
            assert.isAtMost(running[at]!, 10)
            yield* Deferred.await(gate)
            running[at]!--
          })
        const workers = yield* Effect.forEach(
          queues,
          (queue, at) => working(queue, handler(at), { concurrency: 10 })
        )
        yield* shows(queues[0]!, { workers: 3 })
        yield* queues[0]!.offerAll(upTo(100))
        yield* eventually(Effect.sync(() => assert.deepStrictEqual(running, [10, 10, 10])))
        yield* shows(queues[0]!, { active: 30, waiting: 70 })
        yield* Deferred.succeed(gate, undefined)
        yield* shows(queues[0]!, { active: 0, waiting: 0, completed: 100 })
        const all = workers.flatMap(({ begun }) => begun).toSorted((x, y) => x - y)
        assert.deepStrictEqual(all, upTo(100))
        yield* Effect.forEach(workers, ({ stop }) => stop)
      })))

  it.effect("runs an offered job on an idle worker at once", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const other = yield* on(b!, make())
        const worker = yield* working(queue)
        yield* shows(queue, { workers: 1 })
        for (let n = 0; n < 20; n++) {
          yield* other.offer(n)
          yield* promptly(begins(worker, upTo(n + 1)), "the job")
        }
        yield* worker.stop
      })))

  it.effect("begins jobs of higher levels first, and starves no level", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        yield* queue.offerAll(upTo(20), { priority: "low" })
        yield* queue.offerAll(upTo(40, 100))
        yield* queue.offerAll(upTo(10, 200), { priority: "urgent" })
        const { waitingBy } = yield* queue.state
        assert.deepStrictEqual(waitingBy, { urgent: 10, high: 0, normal: 40, low: 20 })
        const worker = yield* working(queue)
        yield* shows(queue, { completed: 70 })
        const { begun } = worker
        assert.deepStrictEqual(begun.slice(0, 7), upTo(7, 200))
        // One in eight is of another level, each in its turn.
        assert.isBelow(begun[7]!, 200)
        assert.deepStrictEqual(begun.slice(8, 11), upTo(3, 207))
        for (const from of [0, 100, 200]) {
          const level = begun.filter((n) => n >= from && n < from + 100)
          assert.deepStrictEqual(level, upTo(level.length, from))
        }
        const low = begun.findIndex((n) => n < 100)
        assert.isAtMost(low, 16)
        yield* worker.stop
      })))

  it.effect("begins an older job of a level after seven with `lifo`, and the oldest of lower levels", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        yield* queue.pause
        yield* queue.offerAll(upTo(2), { delay: "1 millis" })
        yield* shows(queue, { delayed: 0 })
        yield* queue.offerAll(upTo(20, 100), { lifo: true })
        yield* queue.offer(300, { priority: "low" })
        yield* queue.offer(200, { priority: "urgent" })
        yield* queue.resume
        const worker = yield* working(queue)
        yield* shows(queue, { completed: 24 })
        const { begun } = worker
        assert.strictEqual(begun[0], 200)
        assert.deepStrictEqual(begun.slice(1, 7), upTo(6, 114).reverse())
        // Then there are a low one, and two of the same level that are older.
        const late = [0, 1, 300].map((n) => begun.indexOf(n))
        assert.deepStrictEqual(late.toSorted((x, y) => x - y), late)
        assert.isAtMost(late[2]!, 24)
        yield* worker.stop
      })))

  it.effect("begins jobs after their delay, and not before", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const started = Date.now()
        const at: Array<number> = []
        const worker = yield* working(queue, () => Effect.sync(() => at.push(Date.now())))
        // In one call, so that no job is late for its place.
        yield* Effect.all([
          queue.offer(2, { delay: "400 millis" }),
          queue.offer(1, { at: started + 200 }),
          queue.offer(3, { at: started + 600, priority: "urgent" }),
          queue.offer(0, { at: started - 1000 })
        ], { concurrency: "unbounded" })
        yield* begins(worker, [0, 1, 2, 3])
        for (const [n, delay] of [0, 200, 400, 600].entries()) {
          assert.isAtLeast(at[n]! - started, delay - 2)
          // Well before a heartbeat.
          assert.isBelow(elapsed(started + delay, at[n]), 500)
        }
        yield* shows(queue, { delayed: 0, active: 0, completed: 4 })
        yield* worker.stop
      })))

  it.effect("stores a job with an id once, while it is there and for a while after that", () =>
    several(2, (nodes) =>
      Effect.gen(function*() {
        const [queue, other] = yield* Effect.forEach(nodes, (context) => on(context, make({ retention: "1 second" })))
        const first = yield* queue!.offer(1, { id: hostile })
        const second = yield* other!.offer(2, { id: hostile })
        assert.deepStrictEqual(second, { id: first.id, duplicate: true })
        const delayed = yield* other!.offerAll([3, 4, 5], (n) => ({ id: n === 4 ? hostile : "later", delay: "1 hour" }))
        assert.deepStrictEqual(delayed.map(({ duplicate }) => duplicate), [false, true, true])
        assert.deepStrictEqual(delayed[2]!.id, delayed[0]!.id)
        assert.deepStrictEqual(yield* other!.job("later").status, Option.some({ state: "delayed", attempts: 0 }))
        const ids: Array<string> = []
        const worker = yield* working(queue!, () => Effect.map(Queue.Job, ({ id }) => void ids.push(id)))
        yield* shows(queue!, { completed: 1 })
        assert.deepStrictEqual(ids, [hostile])
        assert.isTrue((yield* other!.offer(6, { id: hostile })).duplicate)
        yield* eventually(Effect.map(other!.offer(7, { id: hostile }), ({ duplicate }) => !duplicate))
        yield* begins(worker, [1, 7])
        assert.isTrue(yield* queue!.job("later").cancel)
        yield* worker.stop
      })))

  it.effect("knows the retention of the queue, whichever process has decided it last", () =>
    several(3, ([a, b, c], namespace, server) =>
      Effect.gen(function*() {
        yield* on(a!, make({ retention: "200 millis" }))
        const queue = yield* on(b!, make({ retention: undefined }))
        const throttled = Effect.exit(
          Effect.suspend(() => queue.offer(1, { dedupe: { id: "x", mode: "throttle", window: "500 millis" } }))
        )
        isRangeError(yield* throttled)
        yield* on(c!, make({ retention: "600 millis" }))
        yield* eventually(Effect.map(throttled, (exit) => assert.isTrue(Exit.isSuccess(exit))))
        yield* on(c!, make({ retention: "300 millis" }))
        yield* eventually(Effect.map(throttled, isRangeError))
        // The news were lost with the session.
        yield* forgetSession(b!, namespace, server)
        yield* on(c!, make({ retention: "600 millis" }))
        yield* eventually(Effect.map(throttled, (exit) => assert.isTrue(Exit.isSuccess(exit))))
        yield* on(c!, make({ retention: "200 millis" }))
      })))

  it.effect("refuses what makes no sense, and stores nothing of it", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const refused = (options: Queue.OfferOptions) =>
          Effect.map(Effect.exit(Effect.suspend(() => queue.offer(1, options))), isRangeError)
        yield* refused({ id: "" })
        yield* refused({ id: "x".repeat(513) })
        yield* refused({ id: "n1-1" })
        yield* refused({ attempts: 0 })
        yield* refused({ timeout: 0 })
        yield* refused({ priority: "lowest" as "low" })
        yield* refused({ delay: "1 second", at: 1 })
        isRangeError(yield* Effect.exit(Effect.suspend(() => queue.run(() => Effect.void, { concurrency: 1025 }))))
        isRangeError(yield* Effect.exit(on(a!, make({ limits: { concurrency: 0 } }))))
        const invalid = yield* Effect.flip(queue.offer("one" as never))
        assert.strictEqual(invalid.reason._tag, "InvalidPayload")
        const some = yield* Effect.flip(queue.offerAll([1, "two" as never]))
        assert.strictEqual(some.reason._tag, "InvalidPayload")
        isRangeError(yield* Effect.exit(queue.offerAll([1], () => ({ attempts: 0.5 }))))
        let calls = 0
        const thrown = yield* Effect.exit(queue.offerAll(upTo(5), () => {
          if (++calls === 5) throw new Error("no options")
          return {}
        }))
        assert.isTrue(Exit.isFailure(thrown) && String(thrown.cause).includes("no options"))
        assert.deepStrictEqual(yield* queue.offerAll([]), [])
        // Behind all that was sent before it.
        yield* queue.offer(1)
        assert.deepInclude(yield* queue.state, { waiting: 1, delayed: 0 })
      })))

  it.effect("stores nothing of the jobs that are encoded together with one that does not fit", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const invalid = yield* Effect.flip(queue.offerAll([...upTo(2047), "no" as never]))
        assert.strictEqual(invalid.reason._tag, "InvalidPayload")
        yield* queue.offer(0)
        assert.strictEqual((yield* queue.state).waiting, 1)
        yield* Effect.flip(queue.offerAll([...upTo(2500), "no" as never]))
        yield* queue.offer(0)
        assert.strictEqual((yield* queue.state).waiting, 2050)
      })))

  it.effect("cancels jobs that wait, that are delayed, and that run", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const other = yield* on(b!, make())
        const interrupted: Array<number> = []
        const [running, waiting] = yield* other.offerAll([1, 2])
        const delayed = yield* other.offer(3, { delay: "1 hour" })
        const worker = yield* working(
          queue,
          (n) => n === 4 ? Effect.void : Effect.onInterrupt(Effect.never, () => Effect.sync(() => interrupted.push(n)))
        )
        yield* begins(worker, [1])
        const states = yield* Effect.forEach([running!, waiting!, delayed], ({ id }) => other.job(id).status)
        assert.deepStrictEqual(states.map(Option.getOrThrow), [
          { state: "active", attempts: 1 },
          { state: "waiting", attempts: 0 },
          { state: "delayed", attempts: 0 }
        ])
        for (const { id } of [waiting!, delayed, running!]) {
          assert.isTrue(yield* other.job(id).cancel)
          assert.isFalse(yield* other.job(id).cancel)
          assert.isTrue(Option.isNone(yield* other.job(id).status))
        }
        yield* eventually(Effect.sync(() => assert.deepStrictEqual(interrupted, [1])))
        // Its slot is free again.
        yield* other.offer(4)
        yield* begins(worker, [1, 4])
        yield* shows(queue, { waiting: 0, delayed: 0, active: 0, completed: 1 })
        yield* worker.stop
      })))

  it.effect("holds jobs back while it is paused, and removes what waits", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const other = yield* on(b!, make())
        const worker = yield* working(queue)
        yield* shows(queue, { workers: 1 })
        yield* other.pause
        yield* other.offerAll(upTo(10))
        yield* queue.offer(10, { delay: "1 hour", id: "x" })
        yield* queue.offer(11, { priority: "high", id: "y" })
        yield* shows(queue, { waiting: 11, active: 0, paused: true })
        assert.deepStrictEqual(worker.begun, [])
        assert.strictEqual(yield* queue.drain({ delayed: true }), 12)
        yield* other.offer(12, { id: "y" })
        yield* other.resume
        yield* begins(worker, [12])
        yield* shows(queue, { waiting: 0, active: 0, delayed: 0, paused: false })
        yield* worker.stop
      })))

  it.effect("removes thousands of jobs, but those in work", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const gate = yield* Deferred.make<void>()
        const worker = yield* working(queue, () => Deferred.await(gate), { concurrency: 3 })
        yield* shows(queue, { workers: 1 })
        yield* queue.offerAll(upTo(3000), (n) => n % 2 === 0 ? {} : { priority: "low", delay: n % 3 === 0 ? 1e6 : 0 })
        yield* shows(queue, { active: 3 })
        assert.strictEqual(yield* queue.drain({ delayed: true }), 2997)
        yield* Deferred.succeed(gate, undefined)
        yield* shows(queue, { active: 0, waiting: 0, delayed: 0, completed: 3 })
        yield* worker.stop
      })))

  it.effect("does not grow with finished jobs, not even behind one that does not end", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ name: "growing" }))
        const gate = yield* Deferred.make<void>()
        const length = Effect.map(server.cli("XLEN", `{${namespace}:00}:queue-normal:growing`), Number)
        const worker = yield* working(queue, (n) => n === 0 ? Deferred.await(gate) : Effect.void, { concurrency: 10 })
        const [, second] = yield* queue.offerAll(upTo(4000))
        yield* shows(queue, { completed: 3999, active: 1 })
        assert.isBelow(yield* length, 1200)
        // Its entry is still there.
        assert.isTrue(Option.isNone(yield* queue.job(second!.id).status))
        assert.isFalse(yield* queue.job(second!.id).cancel)
        yield* Deferred.succeed(gate, undefined)
        yield* shows(queue, { completed: 4000, active: 0 })
        assert.strictEqual(yield* length, 0)
        yield* worker.stop
      })))

  it.effect("stays as it is while it is open, also when its time to live had begun", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const opened = make({ name: "again", retention: "1 second", limits: { concurrency: 1 } })
        const life = Effect.map(server.cli("PTTL", `{${namespace}:00}:queue:again`), Number)
        yield* Effect.scoped(Effect.gen(function*() {
          const queue = yield* on(a!, opened)
          const worker = yield* working(queue)
          yield* queue.offer(1, { id: "x" })
          yield* shows(queue, { completed: 1 })
          yield* worker.stop
        }))
        const left = yield* life
        assert.isTrue(left > 0 && left <= 1000, String(left))
        const queue = yield* on(a!, opened)
        assert.isAbove(yield* life, 3_600_000)
        yield* queue.offer(2, { delay: "1 hour" })
        assert.strictEqual(yield* life, -1)
      })))

  it.effect("keeps the limits over all processes", () =>
    several(2, (nodes) =>
      Effect.gen(function*() {
        const limited = make({ name: "limited", limits: { concurrency: 3 } })
        const queues = yield* Effect.forEach(nodes, (context) => on(context, limited))
        let [running, most] = [0, 0]
        const handler = () =>
          Effect.gen(function*() {
            most = Math.max(most, ++running)
            yield* Effect.promise(() => new Promise((resolve) => setTimeout(resolve, 2)))
            running--
          })
        const workers = yield* Effect.forEach(queues, (queue) => working(queue, handler, { concurrency: 10 }))
        yield* queues[0]!.offerAll(upTo(200))
        yield* shows(queues[0]!, { completed: 200, active: 0 })
        assert.strictEqual(most, 3)
        assert.isTrue(workers.every(({ begun }) => begun.length > 20), "both work")
        yield* Effect.forEach(workers, ({ stop }) => stop)
      })))

  it.effect("keeps the rate over all processes", () =>
    several(2, (nodes) =>
      Effect.gen(function*() {
        const limited = make({ name: "rate", limits: { rate: { jobs: 5, interval: "500 millis" } } })
        const queues = yield* Effect.forEach(nodes, (context) => on(context, limited))
        const at: Array<number> = []
        const workers = yield* Effect.forEach(
          queues,
          (queue) => working(queue, () => Effect.sync(() => at.push(Date.now())), { concurrency: 10 })
        )
        yield* shows(queues[0]!, { workers: 2 })
        const offered = Date.now()
        yield* queues[0]!.offerAll(upTo(12))
        yield* shows(queues[0]!, { completed: 12 })
        // Five at once, and then one each 100 ms.
        for (let n = 5; n < 12; n++) assert.isAtLeast(at[n]! - offered, 100 * (n - 4) - 2, `${n}`)
        assert.isBelow(elapsed(at[0]!, at[4]), 100)
        yield* Effect.forEach(workers, ({ stop }) => stop)
      })))
})

const lettersOf = <A>(queue: Queue.Queue<A>) => Stream.runCollect(queue.deadLetters)

layer(TestServer.layer, live)("a job", (it) => {
  it.effect("is attempted again when its handler fails, and becomes a dead letter in the end", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const attempts: Array<readonly [n: number, attempt: number]> = []
        const worker = yield* working(queue, (n) =>
          Effect.flatMap(Queue.Job, ({ attempt }) => {
            attempts.push([n, attempt])
            return n === 1 && attempt === 3 ? Effect.void : Effect.fail(`no ${n}`)
          }), { retry: Schedule.spaced("20 millis"), attempts: 3 })
        yield* queue.offerAll([1, 2], (n) => ({ id: `job ${n}` }))
        yield* queue.offer(3, { attempts: 1 })
        yield* shows(queue, { completed: 1, failed: 2, dead: 2, active: 0, delayed: 0, waiting: 0 })
        for (const n of [1, 2]) {
          assert.deepStrictEqual(attempts.filter(([m]) => m === n).map(([, attempt]) => attempt), [1, 2, 3])
        }
        const letters = yield* lettersOf(queue)
        assert.deepStrictEqual(
          letters.map(({ attempts, body, crashes, reason }) => [body, reason, attempts, crashes]),
          [["3", "failed", 1, 0], ["2", "failed", 3, 0]]
        )
        assert.strictEqual(letters[1]!.id, "job 2")
        assert.include(letters[1]!.error, "no 2")
        yield* worker.stop
        // The ids of jobs are none of dead letters.
        for (const id of [letters[1]!.id, "n1700-1", "1700", "", "1-1 2-2", `${"9".repeat(23)}-1`]) {
          isRangeError(yield* Effect.exit(queue.replay([letters[0]!.letter, id])))
          isRangeError(yield* Effect.exit(queue.discard([letters[0]!.letter, id])))
        }
        // Nor are those of letters of other shards.
        const elsewhere = letters.map(({ letter }) => `3:${letter}`)
        assert.strictEqual(yield* queue.replay(elsewhere), 0)
        assert.strictEqual(yield* queue.discard(elsewhere), 0)
        assert.deepStrictEqual(yield* Stream.runCollect(queue.letters({ after: elsewhere[0] })), [])
        assert.strictEqual(yield* queue.replay([letters[0]!.letter, "1-1"]), 1)
        const again = yield* working(queue)
        yield* begins(again, [3])
        assert.strictEqual(yield* queue.replay(), 1)
        yield* begins(again, [3, 2])
        // Redis has no numbers of that size, and so no job.
        const unknown = ["n99999999999999999999-1", "n1-99999999999999999999"]
        for (const id of unknown) {
          assert.isTrue(Option.isNone(yield* queue.job(id).status))
          assert.isFalse(yield* queue.job(id).cancel)
          assert.strictEqual((yield* Effect.flip(queue.job(id).result())).reason._tag, "OutcomeUnknown")
        }
        yield* shows(queue, { dead: 0, completed: 3 })
        yield* again.stop
      })))

  it.effect("is attempted as often when nobody can look at the errors of its handler", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const throws = () => {
          throw new Error("not to be looked at")
        }
        const errors: ReadonlyArray<() => unknown> = [
          () => Object.assign(new Error("x"), { name: Symbol("name") }),
          () => Object.defineProperty(new Error("x"), "message", { get: throws }),
          () => new Proxy({}, { get: throws, getPrototypeOf: throws }),
          () => {
            const { proxy, revoke } = Proxy.revocable({}, {})
            revoke()
            return proxy
          },
          () => ({ toString: throws }),
          () => Object.create(null)
        ]
        const ends: ReadonlyArray<(error: unknown) => Effect.Effect<never, unknown, Queue.Job>> = [
          Effect.fail,
          (error) => Effect.andThen(Effect.sleep(1), Effect.fail(error)),
          Effect.die,
          (error) => Effect.andThen(Effect.sleep(1), Effect.die(error)),
          (error) => Effect.flatMap(Queue.Job, ({ discard }) => discard(error as string))
        ]
        const cases = ends.flatMap((end) => errors.map((error) => () => end(error())))
        const worker = yield* working(queue, (n) => Effect.suspend(() => cases[n]!()), {
          attempts: 2,
          retry: Schedule.spaced("1 millis"),
          concurrency: 2
        })
        yield* queue.offerAll(cases.map((_, at) => at))
        yield* shows(queue, { dead: cases.length, active: 0, delayed: 0, waiting: 0 })
        for (const { attempts, body, reason } of yield* lettersOf(queue)) {
          const discarded = Number(body) >= 4 * errors.length
          assert.deepStrictEqual([reason, attempts], discarded ? ["discarded", 1] : ["failed", 2], body)
        }
        yield* worker.stop
      })))

  it.effect("fails with both errors when its handler has failed and the retry of the queue throws", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const retry = (): never => {
          throw new Error("in retry")
        }
        const queue = yield* on(
          a!,
          Effect.tap(Queue.make({ name: "thrown", payload: Schema.Number, retention: "200 millis", retry }), emptied)
        )
        yield* on(a!, queue.pool(() => Effect.fail("of the handler")))
        const { reason } = yield* Effect.flip(queue.execute(1))
        assert.strictEqual(reason._tag, "JobFailed")
        for (const text of [reason.message, (yield* lettersOf(queue))[0]!.error]) {
          assert.match(text, /in retry[^]*of the handler/)
        }
      })))

  it.effect("is retried by its payload, unless its worker says otherwise", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(
          a!,
          Effect.tap(
            Queue.make({
              name: "patient",
              payload: Schema.Struct({ retries: Schema.NumberFromString }),
              retry: ({ retries }) => {
                if (retries < 0) throw new Error("never")
                return Schedule.recurs(retries)
              },
              retention: "200 millis"
            }),
            emptied
          )
        )
        const retries = [0, 2, -1, 1]
        const attempts = (count: (retries: number) => number) =>
          Effect.gen(function*() {
            const letters = yield* lettersOf(queue)
            assert.deepStrictEqual(
              letters.map(({ attempts, body }) => [body, attempts]).toSorted(),
              retries.map((one) => [`{"retries":"${one}"}`, count(one)]).toSorted()
            )
            yield* queue.discard()
          })
        yield* queue.offerAll(retries.map((retries) => ({ retries })))
        const worker = yield* working(queue, () => Effect.fail("no"), { concurrency: 4 })
        yield* shows(queue, { dead: 4 })
        yield* attempts((retries) => Math.max(retries, 0) + 1)
        yield* worker.stop
        yield* queue.offerAll(retries.map((retries) => ({ retries })))
        const other = yield* working(queue, () => Effect.fail("no"), { retry: Schedule.recurs(3) })
        yield* shows(queue, { dead: 4 })
        yield* attempts(() => 4)
        yield* other.stop
      })))

  it.effect("is attempted with growing delays by default, and as long as a schedule goes on", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const worker = yield* working(queue, () => Effect.fail("no"), { retry: Schedule.recurs(2) })
        yield* queue.offer(1)
        yield* shows(queue, { dead: 1 })
        assert.deepStrictEqual(worker.begun, [1, 1, 1])
        yield* worker.stop
        const patient = yield* working(queue, () => Effect.die("no"))
        const { id } = yield* queue.offer(2)
        yield* shows(queue, { delayed: 1 })
        assert.deepStrictEqual(yield* queue.job(id).status, Option.some({ state: "delayed", attempts: 1 }))
        yield* eventually(Effect.sync(() => assert.deepStrictEqual(patient.begun, [2, 2])))
        assert.isTrue(yield* queue.job(id).cancel)
        yield* patient.stop
      })))

  it.effect("has the policy of its queue, unless its worker or its offer says otherwise", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const retry = Schedule.spaced("20 millis")
        const queue = yield* on(a!, make({ attempts: 2, retry, timeout: "100 millis", result: true }))
        const worker = yield* working(queue, (n) => n === 3 ? Effect.never : Effect.fail("no"))
        const failed = yield* queue.offer(1)
        assert.strictEqual(outcomeOf(yield* Effect.exit(queue.job(failed.id).result())), "failed")
        const own = yield* queue.offer(2, { attempts: 3, result: false })
        yield* begins(worker, [1, 1, 2, 2, 2])
        assert.strictEqual(outcomeOf(yield* Effect.exit(queue.job(own.id).result())), "OutcomeUnknown")
        const late = yield* queue.offerAll([3])
        assert.strictEqual(outcomeOf(yield* Effect.exit(queue.job(late[0]!.id).result())), "failed")
        assert.deepStrictEqual(worker.begun.slice(5), [3, 3])
        yield* worker.stop
        const other = yield* working(queue, () => Effect.fail("no"), { attempts: 1 })
        const [last] = yield* queue.offerAll([4])
        assert.strictEqual(outcomeOf(yield* Effect.exit(queue.job(last!.id).result())), "failed")
        assert.deepStrictEqual(other.begun, [4])
        yield* other.stop
      })))

  it.effect("has a schedule of its own, which goes with it to any worker and into dead letters", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const other = yield* on(b!, make())
        const worker = yield* working(queue, () => Effect.fail("no"), { retry: Schedule.spaced("1 hour") })
        const retry = Schedule.spaced("20 millis").pipe(Schedule.upTo({ times: 2 }))
        yield* other.offer(1, { retry, id: "one" })
        yield* shows(queue, { dead: 1 })
        assert.strictEqual(yield* other.replay(), 1)
        yield* begins(worker, [1, 1, 1, 1, 1, 1])
        yield* shows(queue, { dead: 1, delayed: 0 })
        // Its own attempts bound it, and so do those of its worker.
        yield* other.offerAll([2], { retry: Schedule.spaced("20 millis"), attempts: 2 })
        yield* shows(queue, { dead: 2, delayed: 0 })
        assert.deepStrictEqual(worker.begun.slice(6), [2, 2])
        yield* other.offer(3)
        yield* shows(queue, { delayed: 1 })
        yield* worker.stop
        const brief = yield* working(queue, () => Effect.fail("no"), { attempts: 3 })
        yield* other.offer(4, { retry: Schedule.spaced("20 millis") })
        yield* shows(queue, { dead: 3, delayed: 1 })
        assert.deepStrictEqual(brief.begun, [4, 4, 4])
        yield* brief.stop
        const patient = yield* working(queue, () => Effect.fail("no"))
        // One that goes on for ever, without any number of attempts.
        yield* other.offer(5, { retry: Schedule.recurs(1000) })
        yield* shows(queue, { dead: 4 })
        assert.deepStrictEqual(patient.begun, upTo(65).map(() => 5))
        yield* other.offer(6, { retry: Schedule.recurs(1000), attempts: 80 })
        yield* shows(queue, { dead: 5 })
        assert.deepStrictEqual(patient.begun.slice(65), upTo(80).map(() => 6))
        yield* patient.stop
      })))

  it.effect("has a schedule that ends after a time, with any delays", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const failing = Effect.andThen(realSleep("20 millis"), Effect.fail("no"))
        const worker = yield* working(queue, () => failing, { retry: Schedule.during("200 millis") })
        yield* queue.offer(1)
        yield* shows(queue, { dead: 1 })
        assert.isAtMost(worker.begun.length, 12)
        yield* worker.stop
      })))

  it.effect("waits for a retry that never comes by itself", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const worker = yield* working(queue, (n) => n === 1 ? Effect.fail("no") : Effect.void, {
          retry: Schedule.spaced(Duration.infinity)
        })
        const { id } = yield* queue.offer(1)
        yield* queue.offer(2)
        yield* begins(worker, [1, 2])
        yield* shows(queue, { active: 0, delayed: 1, completed: 1 })
        assert.strictEqual((yield* Stream.runCollect(queue.jobs({ state: "delayed" }))).length, 1)
        assert.isTrue(yield* queue.job(id).promote)
        yield* begins(worker, [1, 2, 1])
        yield* shows(queue, { active: 0, delayed: 1 })
        yield* worker.stop
      })))

  it.effect("has failed when it runs for longer than its timeout", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const worker = yield* working(queue, () => Effect.never, { timeout: "10 seconds", attempts: 1 })
        yield* queue.offer(1, { timeout: "50 millis" })
        yield* shows(queue, { dead: 1 })
        assert.include((yield* lettersOf(queue))[0]!.error, "ran for longer")
        yield* worker.stop
      })))

  it.effect("is removed when it has not begun in time", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        yield* queue.offerAll([1, 2, 3], (n) => n === 2 ? {} : { expires: n === 1 ? "1 milli" : "1 hour" })
        const worker = yield* working(queue, undefined, { concurrency: 3 })
        yield* begins(worker, [2, 3])
        yield* shows(queue, { expired: 1, completed: 2, active: 0 })
        yield* worker.stop
      })))

  it.effect("is removed when it has not begun in time, whether a worker would take it or not", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ limits: { length: 8, onFull: "fail" } }))
        const other = yield* on(b!, make({ limits: { length: 8, onFull: "fail" } }))
        yield* queue.pause
        const worker = yield* working(other)
        const expires = { expires: "100 millis" } as const
        const kinds: ReadonlyArray<Queue.OfferOptions> = [
          { id: "id" },
          { dedupe: { id: "simple" } },
          { dedupe: { id: "last", mode: "keepLast" } },
          { priority: "urgent", lifo: true },
          { delay: "1 hour" },
          { group: "a" },
          { group: "a", delay: "1 hour" }
        ]
        const started = Date.now()
        const first = yield* queue.offerAll(upTo(kinds.length), (n) => ({ ...kinds[n], ...expires }))
        yield* queue.offer(99, { after: [first[4]!.id], expires: "50 millis", onFailure: "continue" })
        yield* promptly(shows(queue, { waiting: 0, delayed: 0, blocked: 0, expired: 8 }), "the removal")
        assert.isAtLeast(Date.now() - started, 99)
        assert.isBelow(elapsed(started), 800)
        // Nothing is in their way, and there is room for as many.
        const [, ...again] = kinds
        yield* eventually(Effect.map(queue.offer(0, kinds[0]), ({ duplicate }) => !duplicate))
        const stored = yield* queue.offerAll(upTo(again.length, 1), (n) => kinds[n]!)
        assert.isTrue(stored.every(({ duplicate }) => !duplicate))
        yield* other.resume
        yield* eventually(Effect.sync(() => assert.sameMembers(worker.begun, [0, 1, 2, 3, 5])))
        yield* worker.stop
      })))

  it.effect("is removed when its time has passed while it was in work, and it goes back", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const other = yield* on(b!, make())
        const gate = yield* Deferred.make<void>()
        const failing = () => Effect.andThen(Deferred.await(gate), Effect.fail("no"))
        const worker = yield* working(queue, failing, { concurrency: 3, retry: Schedule.spaced("1 hour") })
        yield* queue.offer(1, { expires: "100 millis" })
        yield* queue.offer(2, { expires: "100 millis", group: "a" })
        yield* queue.offer(3, { expires: "1 hour" })
        yield* eventually(Effect.sync(() => assert.sameMembers(worker.begun, [1, 2, 3])))
        const lost = yield* working(other, () => Effect.never)
        yield* queue.offer(4, { expires: "100 millis" })
        yield* begins(lost, [4])
        yield* awake("200 millis")
        yield* shows(queue, { active: 4, expired: 0 })
        yield* Deferred.succeed(gate, undefined)
        yield* promptly(shows(queue, { active: 1, delayed: 1, expired: 2 }), "the removal")
        yield* queue.pause
        yield* forgetSession(b!, namespace, server)
        yield* shows(queue, { active: 0, waiting: 0, delayed: 1, expired: 3 })
        yield* lost.stop
        yield* worker.stop
      })))

  it.effect("becomes a dead letter when it does not fit the schema of its worker", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const texts = yield* on(a!, Queue.make({ name: hostile, payload: Schema.String }))
        const queue = yield* on(a!, make())
        yield* texts.offer(hostile)
        yield* queue.offer(1)
        const worker = yield* working(queue)
        yield* begins(worker, [1])
        yield* shows(queue, { dead: 1, completed: 1, active: 0 })
        const [letter] = yield* lettersOf(queue)
        assert.deepStrictEqual([letter!.reason, letter!.body], ["undecodable", JSON.stringify(hostile)])
        yield* worker.stop
        // Its own handler runs it.
        yield* queue.replay()
        const theirs = yield* working(texts)
        yield* begins(theirs, [hostile])
        yield* theirs.stop
      })))

  it.effect("is replayed once for each time that is asked, though it fails again at once", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        yield* queue.offerAll(upTo(300))
        const failing = yield* working(queue, () => Effect.fail("no"), { attempts: 1, concurrency: 100 })
        yield* shows(queue, { dead: 300, active: 0, waiting: 0 })
        assert.strictEqual((yield* within(queue.replay(), 20_000, "the replay")).result, 300)
        yield* shows(queue, { dead: 300, active: 0, waiting: 0 })
        yield* failing.stop
      })))

  it.effect("keeps all its ids when it is replayed, again and again", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ letters: { length: 10 } }))
        const first = yield* queue.offer(1, { id: "one", result: true })
        const failing = yield* working(queue, () => Effect.fail("no"), { attempts: 1 })
        for (let dead = 0; dead < 3; dead++) {
          yield* shows(queue, { dead: 1, active: 0 })
          assert.strictEqual((yield* Effect.flip(queue.job(first.id).result())).reason._tag, "JobFailed")
          if (dead === 2) yield* failing.stop
          yield* queue.replay()
        }
        for (const id of [first.id, "one"]) assert.isTrue(Option.isSome(yield* queue.job(id).status))
        const waiting = yield* Effect.forkChild(queue.job(first.id).result(), { startImmediately: true })
        const behind = yield* queue.offer(2, { after: [first.id], result: true })
        const worker = yield* working(queue)
        yield* promptly(Fiber.join(waiting), "the result")
        yield* promptly(queue.job(behind.id).result(), "the job behind it")
        yield* worker.stop
      })))

  it.effect("keeps its first id for longer than the retention, and through any number of replays", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ retention: "100 millis", letters: { length: 10 } }))
        const first = yield* queue.offer(1, { id: "one", result: { timeToLive: "3 seconds" } })
        const failing = yield* working(queue, () => Effect.fail("no"), { attempts: 1 })
        for (let dead = 0; dead < 20; dead++) {
          yield* shows(queue, { dead: 1, active: 0 })
          if (dead === 19) yield* failing.stop
          yield* queue.replay()
        }
        yield* realSleep(500)
        for (const id of [first.id, "one"]) {
          assert.deepStrictEqual(yield* queue.job(id).status, Option.some({ state: "waiting", attempts: 0 }))
        }
        const worker = yield* working(queue)
        yield* shows(queue, { completed: 1 })
        yield* worker.stop
        yield* realSleep(500)
        for (const id of [first.id, "one"]) assert.strictEqual(yield* queue.job(id).result(), undefined)
        // Without it, both ids are gone with the job.
        const other = yield* queue.offer(2, { id: "two" })
        const again = yield* working(queue, () => Effect.fail("no"), { attempts: 1 })
        yield* shows(queue, { dead: 1 })
        yield* again.stop
        yield* queue.replay()
        assert.isTrue(yield* queue.job(other.id).cancel)
        assert.isFalse(yield* queue.job("two").cancel)
      })))

  it.effect("leaves no finished jobs behind when the one before them is gone", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ name: "left" }))
        const stored = Effect.map(server.cli("XLEN", `{${namespace}:00}:queue-normal:left`), Number)
        const { id } = yield* queue.offer(0)
        const worker = yield* working(queue, (n) => n === 0 ? Effect.fail("no") : Effect.void, {
          concurrency: 5,
          retry: Schedule.spaced("1 hour")
        })
        yield* shows(queue, { delayed: 1 })
        yield* queue.offerAll(upTo(500, 1))
        yield* shows(queue, { completed: 500 })
        assert.isAbove(yield* stored, 400)
        assert.isTrue(yield* queue.job(id).cancel)
        yield* eventually(Effect.map(stored, (count) => count === 0))
        yield* queue.offer(0)
        yield* shows(queue, { delayed: 1 })
        yield* queue.offerAll(upTo(500, 1))
        yield* shows(queue, { completed: 1000 })
        yield* worker.stop
        yield* queue.obliterate
        assert.strictEqual(yield* stored, 0)
      }), { partitions: 1 }))

  it.effect("has a rate that can be raised at once", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const limited = (jobs: number, interval: "1 hour" | "1 second") =>
          make({ limits: { rate: { jobs, interval } } })
        const queue = yield* on(a!, limited(1, "1 hour"))
        yield* queue.offerAll(upTo(3))
        const worker = yield* working(queue)
        yield* begins(worker, [0])
        yield* on(a!, limited(100, "1 second"))
        yield* begins(worker, upTo(3))
        yield* worker.stop
      })))

  it.effect("is one of as many dead letters as are kept", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ letters: { length: 70, age: "1 day" } }))
        const worker = yield* working(queue, () => Effect.fail("no"), { attempts: 1, concurrency: 50 })
        yield* queue.offerAll(upTo(200))
        yield* shows(queue, { failed: 200, dead: 70 })
        const letters = yield* lettersOf(queue)
        assert.deepStrictEqual(letters.map(({ body }) => Number(body)).toSorted((x, y) => x - y), upTo(70, 130))
        // A lower length than before holds at once.
        yield* on(a!, make({ letters: { length: 68, age: "1 day" } }))
        assert.strictEqual((yield* queue.state).dead, 68)
        assert.deepStrictEqual(yield* lettersOf(queue), letters.slice(2))
        assert.strictEqual(yield* queue.discard(letters.slice(0, 65).map(({ letter }) => letter)), 63)
        assert.strictEqual(yield* queue.discard(), 5)
        yield* shows(queue, { dead: 0 })
        const aged = yield* on(a!, make({ letters: { age: "300 millis" } }))
        yield* aged.offer(1)
        yield* shows(queue, { failed: 201, dead: 1 })
        yield* shows(queue, { dead: 0 })
        yield* worker.stop
      })))

  it.effect("is interrupted when its session is lost, and runs again with a larger token", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const other = yield* on(b!, make())
        const seen: Array<Pick<Queue.Job["Service"], "attempt" | "crashes" | "token">> = []
        const ended: Array<string> = []
        const handler = () =>
          Effect.flatMap(Queue.Job, (job) => {
            seen.push(job)
            return Effect.onExit(
              job.crashes === 0 ? Effect.never : Effect.void,
              (exit) => Effect.sync(() => ended.push(Exit.hasInterrupts(exit) ? "interrupted" : "done"))
            )
          })
        const worker = yield* working(queue, handler)
        yield* other.offer(1)
        yield* begins(worker, [1])
        yield* lose(a!, namespace, server)
        yield* begins(worker, [1, 1])
        yield* shows(queue, { completed: 1, active: 0, workers: 1 })
        assert.deepStrictEqual(ended, ["interrupted", "done"])
        assert.deepStrictEqual(seen.map(({ attempt, crashes }) => [attempt, crashes]), [[1, 0], [2, 1]])
        assert.isAbove(seen[1]!.token, seen[0]!.token)
        yield* worker.stop
      })))

  it.effect("keeps its slot until its handler has ended, also when its session is lost", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const gate = yield* Deferred.make<void>()
        const worker = yield* working(queue, () =>
          Effect.flatMap(Queue.Job, ({ crashes }) =>
            crashes === 0
              ? Effect.onInterrupt(Effect.never, () => Deferred.await(gate))
              : Effect.void))
        yield* queue.offer(1)
        yield* begins(worker, [1])
        yield* lose(a!, namespace, server)
        yield* shows(queue, { workers: 1, active: 0, waiting: 1 })
        assert.deepStrictEqual(worker.begun, [1])
        yield* Deferred.succeed(gate, undefined)
        yield* begins(worker, [1, 1])
        yield* shows(queue, { completed: 1 })
        yield* worker.stop
      })))

  it.effect("becomes a dead letter when too many of its workers have died", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ letters: { crashes: 2 } }))
        const other = yield* on(b!, make({ letters: { crashes: 2 } }))
        const worker = yield* working(queue, () => Effect.never)
        yield* other.offer(1, { id: "x" })
        for (const attempts of [1, 2]) {
          yield* eventually(
            Effect.map(other.job("x").status, (status) =>
              assert.deepStrictEqual(status, Option.some({ state: "active", attempts })))
          )
          yield* lose(a!, namespace, server)
        }
        yield* shows(other, { dead: 1, active: 0, waiting: 0 })
        const [letter] = yield* lettersOf(other)
        assert.deepStrictEqual([letter!.reason, letter!.id, letter!.attempts, letter!.crashes], ["crashed", "x", 2, 2])
        yield* worker.stop
      })))

  it.effect("goes back when its worker stops, and that is no attempt", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const other = yield* on(b!, make())
        const worker = yield* working(queue, () => Effect.never, { concurrency: 2 })
        yield* queue.offerAll(upTo(3))
        yield* queue.offer(3, { priority: "high", delay: 1 })
        yield* begins(worker, [0, 1])
        yield* worker.stop
        yield* shows(queue, { active: 0, waiting: 4, workers: 0 })
        const attempts: Array<number> = []
        const next = yield* working(other, () => Effect.map(Queue.Job, ({ attempt }) => void attempts.push(attempt)))
        yield* begins(next, [3, 0, 1, 2])
        assert.deepStrictEqual(attempts, [1, 1, 1, 1])
        yield* next.stop
      })))

  it.effect("does not run again when its worker stops while Redis refuses its acknowledgement", () =>
    several(2, ([a, b], _, server) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ retention: "1 second" }))
        const other = yield* on(b!, make({ retention: "1 second" }))
        const gate = yield* Deferred.make<void>()
        const worker = yield* working(queue, () => Deferred.await(gate), { concurrency: 2 })
        yield* queue.offer(1)
        yield* queue.offer(2, { id: "two" })
        yield* begins(worker, [1, 2])
        yield* server.cli("ACL", "LOG", "RESET")
        yield* Effect.gen(function*() {
          yield* server.cli("ACL", "SETUSER", "default", "-fcall")
          yield* Deferred.succeed(gate, undefined)
          yield* eventually(Effect.map(server.cli("ACL", "LOG"), (log) => assert.include(log, "fcall")))
          return yield* Effect.forkChild(worker.stop, { startImmediately: true })
        }).pipe(
          Effect.ensuring(Effect.orDie(server.cli("ACL", "SETUSER", "default", "+fcall"))),
          Effect.flatMap((stopping) => promptly(Fiber.join(stopping), "the end"))
        )
        yield* shows(other, { workers: 0 })
        assert.deepInclude(yield* other.state, { waiting: 0, active: 0, completed: 2 })
      }), { lease: "15 seconds", margin: "500 millis" }))

  it.effect("may finish while its worker stops, for as long as that is patient", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const gate = yield* Deferred.make<void>()
        const worker = yield* working(queue, (n) => n === 0 ? Deferred.await(gate) : Effect.never, {
          concurrency: 2,
          grace: "400 millis"
        })
        yield* queue.offerAll(upTo(3))
        yield* begins(worker, [0, 1])
        const stopping = yield* Effect.forkChild(worker.stop, { startImmediately: true })
        yield* Deferred.succeed(gate, undefined)
        yield* shows(queue, { completed: 1, active: 1, waiting: 1 })
        yield* Fiber.join(stopping)
        yield* shows(queue, { completed: 1, active: 0, waiting: 2, workers: 0 })
        assert.deepStrictEqual(worker.begun, [0, 1])
      })))

  it.effect("is interrupted when it was cancelled, also when the news of that are late", () =>
    behindLine(({ context, direct, line }) =>
      Effect.gen(function*() {
        const other = yield* on(yield* direct(), make())
        const queue = yield* on(context, make())
        const interrupted: Array<number> = []
        const worker = yield* working(
          queue,
          (n) => Effect.onInterrupt(Effect.never, () => Effect.sync(() => interrupted.push(n))),
          { concurrency: 3 }
        )
        const [first] = yield* other.offerAll([1, 2])
        yield* begins(worker, [1, 2])
        const held = yield* line.hold(({ name }) => name === "XREAD")
        yield* other.offer(3)
        yield* promptly(held.request, "the next reading of the mailbox")
        yield* begins(worker, [1, 2, 3])
        yield* other.job(first!.id).cancel
        assert.deepStrictEqual(interrupted, [])
        missed(context)
        yield* promptly(
          eventually(Effect.sync(() => assert.deepStrictEqual(interrupted, [1]))),
          "its interruption"
        )
        yield* held.release()
        yield* other.offer(4)
        yield* begins(worker, [1, 2, 3, 4])
        yield* worker.stop
      }), { lease: "30 seconds", margin: "1 second", requestTimeout: "1 second" }))

  it.effect("begins in the order of its offer, also when more come than begin at once", () =>
    behindLine(({ context, direct, line, server }) =>
      Effect.gen(function*() {
        const other = yield* on(yield* direct(), make())
        const queue = yield* on(context, make())
        const worker = yield* working(queue, () => Effect.never, { concurrency: 100 })
        yield* shows(other, { workers: 1 })
        yield* eventually(
          Effect.map(server.cli("INFO", "clients"), (info) => assert.include(info, "blocked_clients:2"))
        )
        const held = yield* line.hold(({ name }) => name === "XREAD")
        yield* other.offer(0)
        yield* promptly(held.request, "the next reading of the mailbox")
        yield* begins(worker, [0])
        yield* other.offerAll(upTo(45, 1))
        yield* other.offerAll(upTo(45, 46))
        yield* held.release()
        yield* begins(worker, upTo(91))
        yield* worker.stop
      }), { lease: "30 seconds", margin: "1 second", requestTimeout: "1 second" }))

  it.effect("is delivered again when news of it were lost, and runs once", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const gate = yield* Deferred.make<void>()
        const worker = yield* working(queue, (n) => {
          missed(a!)
          return n === 0 ? Deferred.await(gate) : Effect.void
        }, { concurrency: 2 })
        yield* queue.offerAll(upTo(20))
        yield* shows(queue, { completed: 19, active: 1 })
        yield* Deferred.succeed(gate, undefined)
        yield* shows(queue, { completed: 20, active: 0 })
        assert.deepStrictEqual(worker.begun, upTo(20))
        yield* worker.stop
      })))

  it.effect("is stored once when the reply to its offer is lost with the session, and keeps its id", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      yield* Effect.scoped(Effect.gen(function*() {
        const line = yield* proxy(server)
        const context = yield* node(line.url, { namespace, partitions: 1, ...unhurried })
        const queue = yield* on(context, make({ retention: "1 minute" }))
        yield* queue.offer(0)
        const sent = yield* line.once(asks("queue.offer"), "dropReply")
        const offering = yield* Effect.forkChild(queue.offerAll([1, 2]))
        yield* sent
        yield* server.cli(
          "EVAL",
          "for _, f in ipairs(redis.call('HKEYS', KEYS[1])) do if f:sub(1, 1) == 's' then redis.call('HDEL', KEYS[1], f) end end",
          1,
          `{${namespace}:00}:sessions`
        )
        const offered = yield* Fiber.join(offering)
        for (const { id } of offered) assert.isTrue(Option.isSome(yield* queue.job(id).status))
        const worker = yield* working(queue)
        yield* begins(worker, [0, 1, 2])
        yield* worker.stop
      }))
    }))

  it.effect("is stored once though Redis does not know its offer any more, when the session is lost", () =>
    behindLine(({ context, direct, line, namespace, server }) =>
      Effect.gen(function*() {
        // Another process has said for how long.
        yield* on(yield* direct(), make({ name: "work", retention: "50 millis" }))
        const queue = yield* on(context, make({ name: "work", retention: undefined }))
        yield* queue.offer(0)
        // The connection that is cut stays so until Redis has forgotten the offer and the session.
        yield* line.refuse
        const sent = yield* line.once(asks("queue.offer"), "dropReply")
        const offering = yield* Effect.forkChild(Effect.flip(queue.offerAll([1, 2])))
        yield* sent
        const known = server.cli("EXISTS", `{${namespace}:00}:queue-even:work`, `{${namespace}:00}:queue-odd:work`)
        yield* eventually(Effect.map(known, (count) => count === "0"))
        yield* forgetSession(context, namespace, server)
        yield* line.pass
        assert.strictEqual((yield* Fiber.join(offering)).reason._tag, "Timeout")
        const worker = yield* working(queue)
        yield* begins(worker, [0, 1, 2])
        yield* queue.offer(3)
        yield* begins(worker, [0, 1, 2, 3])
        yield* worker.stop
      }), unhurried))

  it.effect("is stored once though it is done, and no process has the queue open, when it is sent again", () =>
    behindLine(({ context, direct, line, namespace, server }) =>
      Effect.gen(function*() {
        const { end, reap } = actor(yield* client(server), namespace, "queue:work")
        const options = { name: "work", payload: Schema.Number, retention: "8 seconds" } as const
        const queue = yield* on(context, make(options))
        const stored = server.cli("EXISTS", `{${namespace}:00}:queue-normal:work`)
        const offering = yield* Effect.scoped(Effect.gen(function*() {
          const other = yield* on(yield* direct(), Queue.make(options))
          const worker = yield* working(other)
          yield* shows(other, { workers: 1 })
          const [session] = yield* Effect.provideContext(
            Effect.flatMap(Coordinator.Coordinator, ({ sessions }) => sessions),
            context
          )
          yield* line.refuse
          const sent = yield* line.once(asks("queue.offer"), "dropReply")
          const offering = yield* Effect.forkChild(queue.offer(1))
          yield* sent
          yield* begins(worker, [1])
          yield* shows(other, { completed: 1, active: 0 })
          yield* Effect.promise(async () => {
            await end(session!.id!)
            await reap(session!.id!)
          })
          yield* worker.stop
          return offering
        }))
        yield* eventually(Effect.map(stored, (count) => assert.strictEqual(count, "0")))
        yield* line.pass
        yield* Fiber.join(offering)
        assert.deepInclude(yield* queue.state, { waiting: 0 })
        yield* server.cli("DEL", `{${namespace}:00}:queue-even:work`, `{${namespace}:00}:queue-odd:work`)
      }), { lease: "6 seconds", margin: "200 millis", requestTimeout: "2 seconds" }))

  it.effect("ends when it is interrupted before Redis has answered", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      yield* Effect.scoped(Effect.gen(function*() {
        const line = yield* proxy(server)
        const context = yield* node(line.url, { namespace, partitions: 1, ...short })
        const queue = yield* on(context, make())
        yield* queue.offer(0)
        for (
          const waiting of [
            queue.run(() => Effect.void),
            Effect.scoped(queue.take()),
            Effect.scoped(Effect.andThen(queue.pool(() => Effect.void), Effect.never))
          ]
        ) {
          const sent = yield* line.once(asks("queue.work"), "drop")
          const fiber = yield* Effect.forkChild(waiting)
          yield* sent
          yield* promptly(Fiber.interrupt(fiber), "the end")
          const exit = yield* Fiber.await(fiber)
          assert.isTrue(Exit.isFailure(exit) && Cause.hasInterruptsOnly(exit.cause), String(exit))
        }
        const worker = yield* working(queue)
        yield* begins(worker, [0])
        yield* worker.stop
      }))
    }))

  it.effect("links the span of its handler to that of its offer", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const { spans, traced } = recording()
        const queue = yield* on(a!, make())
        yield* traced(queue.offer(1))
        const worker = yield* traced(working(queue))
        yield* shows(queue, { completed: 1 })
        yield* traced(queue.execute(2))
        yield* worker.stop
        assert.isTrue(spans.some(({ name }) => name === "lockstep.Queue.execute"))
        const [offer, handle] = ["lockstep.Queue.offer", "lockstep.Queue.handle"].map((name) =>
          spans.find((span) => span.name === name)!
        )
        assert.strictEqual(handle!.links[0]?.span.spanId, offer!.spanId)
      })))
})

class TooBig extends Schema.Error<TooBig>("TooBig")({ _tag: Schema.tag("TooBig"), limit: Schema.Number }) {}

const typed = (retention: "1 second" | "3 seconds" = "1 second") =>
  Effect.tap(
    Queue.make({
      name: "typed",
      payload: Schema.Number,
      success: Schema.Struct({ square: Schema.NumberFromString }),
      error: TooBig,
      retention
    }),
    emptied
  )

const outcomeOf = <A, E>(exit: Exit.Exit<A, E | Queue.QueueError>) =>
  Exit.match(exit, {
    onSuccess: () => "success",
    onFailure: (cause) => {
      const error = Cause.squash(cause) as Queue.QueueError
      return error.reason._tag === "JobFailed" ? error.reason.outcome : error.reason._tag
    }
  })

layer(TestServer.layer, live)("the result of a job", (it) => {
  it.effect("comes to whichever process waits for it, as do its errors", () =>
    several(3, (nodes) =>
      Effect.gen(function*() {
        const [a, b, c] = yield* Effect.forEach(nodes, (context) => on(context, typed()))
        const attempts: Array<number> = []
        const worker = yield* working(a!, (n) => {
          attempts.push(n)
          return n > 9
            ? Effect.fail(new TooBig({ limit: 9 }))
            : n === 0
            ? Effect.die("zero")
            : Effect.succeed({ square: n * n })
        }, { retry: Schedule.recurs(1), concurrency: 4 })
        assert.deepStrictEqual(yield* b!.execute(3), { square: 9 })
        assert.deepStrictEqual(yield* a!.execute(4), { square: 16 })
        assert.deepStrictEqual(yield* Effect.flip(b!.execute(10)), new TooBig({ limit: 9 }))
        assert.deepStrictEqual(attempts, [3, 4, 10, 10])
        assert.strictEqual(outcomeOf(yield* Effect.exit(b!.execute(0))), "failed")
        const all = yield* Effect.forEach(upTo(100, 1), (n) => b!.execute(n % 9 + 1), { concurrency: "unbounded" })
        assert.deepStrictEqual(all.map(({ square }) => Math.sqrt(square)), upTo(100, 1).map((n) => n % 9 + 1))
        const { id } = yield* b!.offer(5, { result: true, id: "five" })
        assert.strictEqual(id.startsWith("n"), true)
        const both = yield* Effect.all([a!.job("five").result(), c!.job("five").result(), c!.job(id).result()], {
          concurrency: 3
        })
        assert.deepStrictEqual(both, [{ square: 25 }, { square: 25 }, { square: 25 }])
        assert.deepStrictEqual(yield* c!.job("five").result(), { square: 25 })
        assert.strictEqual(outcomeOf(yield* Effect.exit(c!.job("six").result())), "OutcomeUnknown")
        const plain = yield* b!.offer(6, { delay: "1 hour" })
        assert.strictEqual(outcomeOf(yield* Effect.exit(c!.job(plain.id).result())), "OutcomeUnknown")
        yield* worker.stop
      })))

  it.effect("is known for the time of its job, regardless of the retention of the queue", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const open = Queue.make({
          name: hostile,
          payload: Schema.Number,
          success: Schema.Number,
          retention: "1 second",
          result: { timeToLive: "6 seconds" }
        })
        const queue = yield* on(a!, Effect.tap(open, emptied))
        const other = yield* on(b!, open)
        const worker = yield* working(queue, (n) => n < 0 ? Effect.die("negative") : Effect.succeed(n), { attempts: 1 })
        const results = (ids: ReadonlyArray<string>) =>
          Effect.forEach(ids, (id) => Effect.map(Effect.exit(other.job(id).result()), outcomeOf))
        const short = yield* queue.offer(1, { id: "short", result: { timeToLive: "300 millis" } })
        const plain = yield* queue.offer(2, { id: "plain", result: true })
        const [long, failed] = yield* queue.offerAll([3, -4], (n) => ({ id: n === 3 ? "long:3" : "failed" }))
        const ids = ["short", "plain", "long:3", "failed", short.id, plain.id, long!.id, failed!.id]
        yield* shows(queue, { completed: 3, dead: 1 })
        assert.deepStrictEqual(yield* results(ids.slice(1)), [
          ...["success", "success", "failed"],
          ...["success", "success", "success", "failed"]
        ])
        yield* queue.offer(5, { id: "none", result: false })
        assert.strictEqual(yield* other.execute(6, { result: { timeToLive: 1 } }), 6)
        yield* shows(queue, { completed: 5 })
        assert.deepStrictEqual(yield* results(["none"]), ["OutcomeUnknown"])
        yield* eventually(
          Effect.map(results(ids), (found) =>
            assert.deepStrictEqual(found, [
              ...["OutcomeUnknown", "OutcomeUnknown", "success", "failed"],
              ...["OutcomeUnknown", "OutcomeUnknown", "success", "failed"]
            ]))
        )
        // The id of a job is that of its result for as long as this is known, also for the jobs after it.
        assert.deepStrictEqual(yield* other.offer(7, { id: "long:3" }), { id: long!.id, duplicate: true })
        assert.isFalse((yield* other.offer(8, { id: "short" })).duplicate)
        yield* other.offer(9, { after: ["long:3"], result: false })
        yield* shows(queue, { completed: 7, dead: 1 })
        assert.deepStrictEqual(worker.begun, [1, 2, 3, -4, 5, 6, 8, 9])
        yield* eventually(
          Effect.map(server.cli("KEYS", `{${namespace}:*}:queue-[ri]*`), (keys) => assert.strictEqual(keys, "")),
          { timeout: "20 seconds" }
        )
        assert.deepStrictEqual(yield* results(["long:3"]), ["OutcomeUnknown"])
        assert.isFalse((yield* other.offer(10, { id: "long:3" })).duplicate)
        yield* worker.stop
      })))

  it.effect("is removed with its queue, though it has a time of its own", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make({ retention: "100 millis" }))
        const worker = yield* working(queue)
        yield* queue.offer(1, { id: "one", result: { timeToLive: "5 seconds" } })
        assert.isUndefined(yield* queue.job("one").result())
        yield* queue.obliterate
        assert.strictEqual(outcomeOf(yield* Effect.exit(queue.job("one").result())), "OutcomeUnknown")
        assert.isFalse((yield* queue.offer(2, { id: "one" })).duplicate)
        yield* begins(worker, [1, 2])
        yield* worker.stop
      })))

  it.effect("cannot be kept for a time that makes no sense", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const times: ReadonlyArray<unknown> = [0, -1, Number.NaN, Infinity, "soon", undefined, null, {}]
        const senseless: ReadonlyArray<unknown> = [...times.map((timeToLive) => ({ timeToLive })), "none", 1, null]
        for (const result of senseless as ReadonlyArray<any>) {
          isRangeError(yield* Effect.exit(queue.offer(1, { result })))
          isRangeError(yield* Effect.exit(queue.offerAll([1], { result })))
          isRangeError(yield* Effect.exit(on(a!, make({ name: "other", result }))))
        }
        isRangeError(yield* Effect.exit(queue.execute(1, { result: { timeToLive: 0 } })))
      })))

  it.effect("is that there is none when the job was cancelled, has expired, or is not understood", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, typed())
        const other = yield* on(b!, typed())
        const delayed = yield* queue.offer(1, { result: true, delay: "1 hour" })
        const waiting = yield* Effect.forkChild(Effect.exit(other.job(delayed.id).result()), { startImmediately: true })
        yield* eventually(
          Effect.map(
            server.cli("HKEYS", `{${namespace}:00}:queue:typed`),
            (fields) => assert.include(fields, `a${delayed.id}`)
          )
        )
        yield* queue.job(delayed.id).cancel
        assert.strictEqual(outcomeOf(yield* Fiber.join(waiting)), "cancelled")
        const expired = yield* queue.offer(2, { result: true, expires: 1 })
        const texts = yield* on(a!, Queue.make({ name: "typed", payload: Schema.String }))
        const strange = yield* texts.offer("x", { result: true })
        const worker = yield* working(queue, () => Effect.succeed({ square: 0 }))
        assert.strictEqual(outcomeOf(yield* Effect.exit(other.job(expired.id).result())), "expired")
        assert.strictEqual(outcomeOf(yield* Effect.exit(other.job(strange.id).result())), "undecodable")
        assert.strictEqual(outcomeOf(yield* Effect.exit(queue.job(strange.id).result())), "undecodable")
        yield* worker.stop
        const wrong = yield* working(queue, () => Effect.succeed({ square: "no" as never }))
        assert.strictEqual(outcomeOf(yield* Effect.exit(other.execute(3))), "failed")
        assert.deepStrictEqual(wrong.begun, [3])
        yield* wrong.stop
      })))

  it.effect("is that it has expired, also without any worker", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, typed())
        const executing = Effect.exit(queue.execute(1, { id: "one", expires: "50 millis" }))
        for (let tries = 0; tries < 2; tries++) {
          assert.strictEqual(outcomeOf(yield* promptly(executing, "the outcome")), "expired")
        }
        yield* shows(queue, { expired: 1, waiting: 0 })
      }), { lease: "15 seconds", margin: "500 millis" }))

  it.effect("of others that expire is noticed by all that wait for it, also without any worker", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, typed())
        const other = yield* on(b!, typed())
        const expires = { expires: "300 millis" } as const
        const one = yield* queue.offer(1, { ...expires, result: true })
        const awaiting = Effect.exit(other.job(one.id).result())
        assert.strictEqual(outcomeOf(yield* promptly(awaiting, "the outcome")), "expired")
        const two = yield* queue.offer(2, { ...expires, result: true })
        yield* promptly(Stream.runDrain(other.job(two.id).progress), "the end of its progress")
        const three = yield* queue.offer(3, { ...expires, result: true })
        const behind = Effect.exit(other.execute(4, { after: [three.id], onFailure: "skip" }))
        assert.strictEqual(outcomeOf(yield* promptly(behind, "the outcome of the job behind it")), "skipped")
        const full = yield* on(a!, make({ limits: { length: 1 } }))
        yield* full.offer(5, expires)
        yield* promptly(Effect.flatMap(on(b!, make()), (same) => same.offer(6)), "room")
        yield* full.drain()
      }), { lease: "60 seconds", margin: "500 millis" }))

  it.effect("is not wanted any more by a caller that is interrupted, unless it says so", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, typed())
        const other = yield* on(b!, typed())
        const worker = yield* working(queue, () => Effect.never, { concurrency: 2 })
        const cancelled = yield* Effect.forkChild(other.execute(1))
        yield* begins(worker, [1])
        yield* Fiber.interrupt(cancelled)
        yield* shows(queue, { active: 0, waiting: 0 })
        const left = yield* Effect.forkChild(other.execute(2, { onInterrupt: "continue", id: "two" }))
        yield* begins(worker, [1, 2])
        yield* Fiber.interrupt(left)
        assert.isTrue(Option.isSome(yield* queue.job("two").status))
        assert.isTrue(yield* queue.job("two").cancel)
        yield* worker.stop
      })))

  it.effect("still comes to others when a caller is interrupted whose job was there already", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, typed())
        const other = yield* on(b!, typed())
        const gate = yield* Deferred.make<void>()
        const worker = yield* working(queue, (n) => Effect.as(Deferred.await(gate), { square: n * n }), {
          concurrency: 2
        })
        const first = yield* Effect.forkChild(queue.execute(2, { id: "two" }))
        yield* queue.offer(3, { dedupe: { id: "three" }, result: true })
        yield* eventually(Effect.sync(() => assert.sameMembers(worker.begun, [2, 3])))
        for (const options of [{ id: "two" }, { dedupe: { id: "three" } }]) {
          // One that knows of the job, and one that learns of it behind its interruption.
          const exit = yield* Effect.exit(Effect.timeout(other.execute(4, options), "100 millis"))
          assert.isTrue(Exit.isFailure(exit))
          const late = yield* Effect.forkChild(other.execute(4, options), { startImmediately: true })
          yield* Fiber.interrupt(late)
          // The second one is behind all that the answer to the interrupted one has led to.
          yield* other.offer(4, options)
          yield* other.offer(4, options)
        }
        yield* shows(queue, { active: 2, waiting: 0 })
        yield* Deferred.succeed(gate, undefined)
        assert.deepStrictEqual(yield* Fiber.join(first), { square: 4 })
        yield* shows(queue, { active: 0, completed: 2 })
        yield* worker.stop
      })))

  it.effect("comes to a caller whose session was lost, and whose news were", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, typed("3 seconds"))
        const other = yield* on(b!, typed("3 seconds"))
        const gate = yield* Deferred.make<void>()
        const worker = yield* working(queue, (n) => Effect.as(Deferred.await(gate), { square: n * n }))
        const executing = yield* Effect.forkChild(other.execute(2))
        yield* begins(worker, [2])
        yield* lose(b!, namespace, server)
        missed(b!)
        yield* Deferred.succeed(gate, undefined)
        assert.deepStrictEqual(yield* Fiber.join(executing), { square: 4 })
        yield* worker.stop
      })))
})

layer(TestServer.layer, live)("a job that is taken into a scope", (it) => {
  it.effect("is done, has failed or goes back as the scope ends", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const other = yield* on(b!, make())
        const taking = (end: Effect.Effect<void, string>, options?: Queue.TakeOptions) =>
          Effect.scoped(Effect.gen(function*() {
            const taken = Option.getOrThrow(yield* queue.take({ retry: Schedule.recurs(1), ...options }))
            yield* shows(other, { active: 1 })
            yield* end
            return [taken.payload, taken.job.attempt]
          }))
        yield* other.offerAll([1, 2])
        yield* Effect.exit(taking(Effect.fail("no")))
        yield* shows(other, { active: 0, waiting: 2, workers: 0 })
        const [payload, attempt] = yield* taking(Effect.void)
        assert.deepStrictEqual([payload, attempt], [1, 2])
        yield* shows(other, { completed: 1, active: 0, waiting: 1, workers: 0 })
        const held = yield* Effect.forkChild(taking(Effect.never))
        yield* shows(other, { active: 1, waiting: 0 })
        yield* Fiber.interrupt(held)
        yield* shows(other, { active: 0, waiting: 1, workers: 0 })
        assert.deepStrictEqual(yield* taking(Effect.void), [2, 1])
        // A push, when there is none yet.
        const waiting = yield* Effect.forkChild(taking(Effect.void))
        yield* shows(other, { workers: 1 })
        yield* other.offer(3)
        assert.deepStrictEqual(yield* promptly(Fiber.join(waiting), "the job"), [3, 1])
        yield* shows(other, { completed: 3, workers: 0 })
        assert.isTrue(Option.isNone(yield* Effect.scoped(queue.take({ wait: "30 millis" }))))
        yield* shows(other, { workers: 0 })
      })))

  it.effect("comes with others, as many as are wanted or have come in time", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const other = yield* on(b!, make())
        const taking = <B, E>(
          options: Queue.TakeBatchOptions,
          use: (jobs: ReadonlyArray<number>, attempts: ReadonlyArray<number>) => Effect.Effect<B, E>
        ) =>
          Effect.scoped(
            Effect.flatMap(
              queue.takeBatch({ retry: Schedule.recurs(1), ...options }),
              (taken) => use(taken.map(({ payload }) => payload), taken.map(({ job }) => job.attempt))
            )
          )
        yield* other.offerAll(upTo(100))
        // As many as are wanted.
        const first = yield* taking({ max: 70 }, (jobs) => Effect.as(shows(other, { active: 70, waiting: 30 }), jobs))
        assert.deepStrictEqual(first, upTo(70))
        yield* shows(other, { completed: 70, workers: 0, active: 0 })
        // As many as there are: others that come are not its own.
        yield* taking({ max: 50 }, (jobs) =>
          Effect.gen(function*() {
            assert.deepStrictEqual(jobs, upTo(30, 70))
            yield* other.offer(100)
            yield* shows(other, { active: 30, waiting: 1, workers: 1 })
          }))
        yield* shows(other, { completed: 100, waiting: 1 })
        // First the jobs that come until the time is over, then as many jobs as fit.
        const some = yield* Effect.forkChild(taking({ max: 10, wait: "300 millis" }, Effect.succeed))
        yield* shows(other, { active: 1 })
        yield* other.offer(101)
        assert.deepStrictEqual(yield* Fiber.join(some), [100, 101])
        const full = yield* Effect.forkChild(taking({ max: 2, wait: "1 minute" }, Effect.succeed))
        yield* other.offer(102)
        yield* shows(other, { active: 1 })
        yield* other.offer(103)
        assert.deepStrictEqual(yield* promptly(Fiber.join(full), "two jobs"), [102, 103])
        assert.deepStrictEqual(yield* taking({ max: 2, wait: "20 millis" }, Effect.succeed), [])
        // All of them fail, or go back, which is no attempt.
        yield* other.offerAll([1, 2, 3])
        yield* Effect.exit(taking({ max: 3 }, () => Effect.fail("no")))
        const held = yield* Effect.forkChild(taking({ max: 3, wait: "1 minute" }, () => Effect.never))
        yield* shows(other, { active: 3 })
        yield* Fiber.interrupt(held)
        assert.deepStrictEqual(yield* taking({ max: 3, wait: "1 minute" }, (_, attempts) => Effect.succeed(attempts)), [
          2,
          2,
          2
        ])
        // A wait that is given up takes nothing with it.
        const waiting = yield* Effect.forkChild(taking({ max: 3, wait: "1 minute" }, Effect.succeed))
        yield* other.offer(4)
        yield* shows(other, { active: 1 })
        yield* Fiber.interrupt(waiting)
        yield* shows(other, { active: 0, waiting: 1, workers: 0 })
        assert.deepStrictEqual(yield* taking({ max: 3 }, Effect.succeed), [4])
        yield* Effect.forEach(
          [0, 1025, 1.5],
          (max) => Effect.map(Effect.exit(taking({ max }, Effect.succeed)), isRangeError)
        )
      })))

  it.effect("has no timeout, also while others are waited for", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const options = { timeout: "50 millis", attempts: 1 } as const
        const queue = yield* on(a!, make(options))
        const handled = yield* on(a!, make({ ...options, name: "handled" }))
        const worker = yield* working(handled, () => Effect.never)
        // When a handler that began later has timed out, so would have those that have the job of the other queue.
        const timesOut = Effect.gen(function*() {
          const { dead } = yield* handled.state
          yield* handled.offer(0)
          yield* shows(handled, { dead: dead + 1 })
        })
        yield* queue.offer(1, { timeout: "50 millis" })
        yield* Effect.scoped(Effect.gen(function*() {
          assert.strictEqual(Option.getOrThrow(yield* queue.take()).payload, 1)
          yield* timesOut
          yield* shows(queue, { active: 1, dead: 0 })
        }))
        yield* shows(queue, { completed: 1, dead: 0 })
        const taking = yield* Effect.forkChild(
          Effect.scoped(
            Effect.map(
              queue.takeBatch({ max: 2, wait: Duration.infinity }),
              (taken) => taken.map(({ job, payload }) => [payload, job.attempt])
            )
          )
        )
        yield* queue.offer(2)
        yield* shows(queue, { active: 1 })
        yield* timesOut
        yield* shows(queue, { active: 1, dead: 0 })
        yield* queue.offer(3)
        assert.deepStrictEqual(yield* promptly(Fiber.join(taking), "two jobs"), [[2, 1], [3, 1]])
        yield* worker.stop
      })))

  it.effect("is left out when it is lost while others are waited for", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const taking = yield* Effect.forkChild(
          Effect.scoped(Effect.map(queue.takeBatch({ max: 3, wait: "1 minute" }), (taken) =>
            taken.map(({ job, payload }) => [payload, job.crashes])))
        )
        yield* queue.offerAll([1, 2])
        yield* shows(queue, { active: 2 })
        yield* lose(a!, namespace, server)
        yield* shows(queue, { active: 2 })
        yield* queue.offer(4)
        const taken = yield* promptly(Fiber.join(taking), "three jobs")
        assert.deepStrictEqual(
          taken.toSorted(([a], [b]) =>
            a! - b!
          ),
          [[1, 1], [2, 1], [4, 0]]
        )
        yield* shows(queue, { completed: 3, workers: 0 })
      })))

  it.effect("is warned of when its session is lost", () =>
    Effect.suspend(() => {
      const lines: Array<string> = []
      const logger = Logger.make(({ logLevel, message }) => void lines.push(`${logLevel} ${String(message)}`))
      const warnings = () => lines.filter((line) => /^Warn .* was taken was lost/.test(line))
      return several(2, ([a, b], namespace, server) =>
        Effect.gen(function*() {
          const queue = yield* on(a!, make())
          const other = yield* on(b!, make())
          yield* other.offerAll([1, 2])
          const overruns = Effect.map(Metric.value(Metrics.overruns), ({ count }) => Number(count))
          const before = yield* overruns
          yield* Effect.scoped(Effect.gen(function*() {
            const taken = yield* queue.takeBatch({ max: 2 })
            assert.strictEqual(taken.length, 2)
            yield* lose(a!, namespace, server)
            yield* promptly(taken[0]!.lost, "the news")
            assert.strictEqual(warnings().length, 2)
            assert.strictEqual(yield* overruns, before + 2)
          }))
          // Nothing is lost where a handler is interrupted, or a job was cancelled.
          const worker = yield* working(queue, () => Effect.never, { concurrency: 2 })
          yield* eventually(Effect.sync(() => assert.strictEqual(worker.begun.length, 2)))
          yield* lose(a!, namespace, server)
          yield* eventually(Effect.sync(() => assert.isAtLeast(worker.begun.length, 4)))
          yield* worker.stop
          assert.strictEqual(warnings().length, 2)
        })).pipe(Effect.provide(Logger.layer([logger])))
    }))

  it.effect("is notified when it is not its own any more, and has the result that was set", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, typed())
        const other = yield* on(b!, typed())
        const executing = yield* Effect.forkChild(other.execute(3))
        yield* Effect.scoped(Effect.gen(function*() {
          const { payload, result } = Option.getOrThrow(yield* queue.take())
          yield* result({ square: payload * payload })
        }))
        assert.deepStrictEqual(yield* Fiber.join(executing), { square: 9 })
        yield* other.offer(4, { id: "four" })
        yield* Effect.scoped(Effect.gen(function*() {
          const { lost } = Option.getOrThrow(yield* queue.take())
          yield* other.job("four").cancel
          yield* promptly(lost, "the news")
        }))
        yield* shows(other, { completed: 1, active: 0, workers: 0 })
      })))
})

class Numbers extends Queue.Service<Numbers>()("numbers", { payload: Schema.Number }) {}

layer(TestServer.layer, live)("a worker layer", (it) => {
  it.effect("works for as long as it is built, with what its handler requires", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        class Seen extends Context.Service<Seen, { readonly add: (n: number) => void }>()("Seen") {}
        const seen: Array<number> = []
        const live = Queue.worker(Numbers, (n) => Effect.map(Seen, ({ add }) => add(n)), { concurrency: 2 }).pipe(
          Layer.provideMerge(Numbers.layer),
          Layer.provide(Layer.succeed(Seen, { add: (n) => seen.push(n) }))
        )
        yield* on(
          a!,
          Effect.gen(function*() {
            const numbers = yield* Numbers
            yield* numbers.offerAll(upTo(10))
            yield* shows(numbers, { completed: 10 })
          }).pipe(Effect.provide(live))
        )
        assert.deepStrictEqual(seen, upTo(10))
      })))

  it.effect("begins when Redis has memory again, if it was full as the layer was built", () =>
    several(1, ([a], _, server) =>
      Effect.gen(function*() {
        const lines: Array<string> = []
        const logger = Logger.make(({ message }) => void lines.push(String(message)))
        const seen: Array<number> = []
        const worker = Queue.worker(Numbers, (n) => Effect.sync(() => seen.push(n)))
        yield* on(
          a!,
          Effect.gen(function*() {
            const numbers = yield* Numbers
            yield* server.cli("CONFIG", "SET", "maxmemory", 1)
            yield* Layer.build(worker).pipe(
              Effect.andThen(
                eventually(
                  Effect.sync(() => assert.match(lines.join(), /worker of queue "numbers" of namespace "\w+"/))
                )
              ),
              Effect.provide(Logger.layer([logger])),
              Effect.ensuring(Effect.orDie(server.cli("CONFIG", "SET", "maxmemory", 0)))
            )
            yield* numbers.offer(1)
            yield* eventually(Effect.sync(() => assert.deepStrictEqual(seen, [1])))
          }).pipe(Effect.scoped, Effect.provide(Numbers.layer))
        )
      })))
})
