import { assert, layer } from "@effect/vitest"
import { Context, Deferred, Effect, Exit, Fiber, Layer, Schema, Stream } from "effect"
import { Batch, Flow, Queue } from "../src/index.ts"
import { partitionOf } from "../src/internal/actor/keys.ts"
import { make as proxy } from "../src/testing/Proxy.ts"
import { eventually } from "./support/eventually.ts"
import { delivered } from "./support/flows.ts"
import { type Node, TestServer } from "./support/live.ts"
import { keysOf } from "./support/namespace.ts"
import { begins, isRangeError, upTo, working } from "./support/queues.ts"
import { asks } from "./support/requests.ts"
import { behind, forgetSession, fragile, lose, on, pending, promptly, several } from "./support/several.ts"

class Work extends Queue.Service<Work>()("work", {
  payload: Schema.Number,
  success: Schema.Number,
  error: Schema.Struct({ why: Schema.String }),
  retention: "200 millis"
}) {}

class Report extends Queue.Service<Report>()("report", {
  payload: Schema.String,
  retention: "200 millis"
}) {}

const queues = Layer.mergeAll(Work.layer, Report.layer)

const retention = "300 millis"

type Queues = typeof Work | typeof Report

type Options<D extends Queues, F extends Queues> = Partial<Batch.Options<Queues, D, F>>

/** The batch, as a process has it. */
const opened = <D extends Queues = never, F extends Queues = never>(context: Node, options: Options<D, F> = {}) =>
  on(
    context,
    Effect.gen(function*() {
      const services = yield* Layer.build(queues)
      const batch = yield* Effect.provideContext(
        Batch.make("batch", { queues: [Work, Report], retention, ...options }),
        services
      )
      return { batch, work: Context.get(services, Work), report: Context.get(services, Report) }
    })
  )

/** As `opened`, and it removes what is left behind the test: dead letters. */
const cleaned = <D extends Queues = never, F extends Queues = never>(context: Node, options: Options<D, F> = {}) =>
  Effect.gen(function*() {
    const services = yield* on(context, Layer.build(queues))
    const [work, report] = [Context.get(services, Work), Context.get(services, Report)]
    yield* Effect.addFinalizer(() => Effect.orDie(Effect.all([work.obliterate, report.obliterate])))
    const open = yield* opened(context, options)
    yield* Effect.addFinalizer(() => Effect.orDie(on(context, delivered("batch:batch"))))
    return open
  })

const reasonOf = <A, R>(self: Effect.Effect<A, Batch.BatchError, R>) =>
  Effect.map(Effect.flip(self), ({ reason }) => reason)

const tagOf = <A, R>(self: Effect.Effect<A, Batch.BatchError, R>) => Effect.map(reasonOf(self), ({ _tag }) => _tag)

const countsOf = ({ cancelled, done, failed, jobs }: Batch.End) => [jobs, done, failed, cancelled]

const text = (end: Batch.End) => `${end.id} ${end.state} ${countsOf(end).join(" ")}`

const callbacks = {
  onDone: { queue: Report, payload: (end: Batch.End) => `done: ${text(end)}` },
  onFailed: { queue: Report, payload: (end: Batch.End) => `failed: ${text(end)}` }
}

const double = (n: number): Effect.Effect<number, { readonly why: string }> =>
  n < 0 ? Effect.fail({ why: `${n}` }) : Effect.succeed(2 * n)

const once = { concurrency: 10, attempts: 1 } as const

layer(TestServer.layer, { excludeTestServices: true })("Batch", (it) => {
  it.effect("is over when it has had as many jobs as its size, on all processes", () =>
    several(3, (nodes) =>
      Effect.gen(function*() {
        const first = yield* cleaned(nodes[0]!)
        const others = yield* Effect.forEach(nodes.slice(1), (node) => opened(node))
        const { begun } = yield* working(first.work, double, once)
        const ends = yield* Effect.forEach([first, ...others], ({ batch }, at) =>
          Effect.gen(function*() {
            const run = yield* batch.start({ id: "one", size: 30 })
            assert.deepStrictEqual(yield* run.add(Work, 10 * at, { name: `${at}` }), {
              name: `${at}`,
              duplicate: false
            })
            assert.strictEqual(yield* run.addAll(Work, upTo(9, 10 * at + 1)), 9)
            const end = yield* run.await
            // The answer of an addition may be lost, and it is repeated later.
            assert.isTrue((yield* run.add(Work, 10 * at, { name: `${at}` })).duplicate)
            assert.strictEqual(yield* tagOf(run.add(Work, 1)), "BatchSealed")
            return end
          }), { concurrency: "unbounded" })
        for (const end of ends) {
          assert.deepStrictEqual(end, { id: "one", state: "done", jobs: 30, done: 30, failed: 0, cancelled: 0 })
        }
        assert.deepStrictEqual(begun.toSorted((a, b) => a - b), upTo(30))
      })))

  it.effect("takes jobs while others run, until it is sealed", () =>
    several(2, ([one, two]) =>
      Effect.gen(function*() {
        const mine = yield* cleaned(one!)
        const theirs = yield* opened(two!)
        const run = yield* mine.batch.start({ id: "one" })
        const { begun } = yield* working(theirs.work, (n) =>
          Effect.gen(function*() {
            // Each job adds two, and one report.
            if (n < 8) yield* Effect.orDie(theirs.batch.attach("one").addAll(Work, [2 * n, 2 * n + 1]))
            yield* Effect.orDie(theirs.batch.attach("one").add(Report, `${n}`))
            return n
          }), once)
        const reports = yield* working(mine.report, () => Effect.void, once)
        const fiber = yield* Effect.forkChild(theirs.batch.attach("one").await)
        yield* run.add(Work, 1)
        yield* eventually(
          Effect.map(run.status, ({ done, remaining }) => assert.deepStrictEqual([done, remaining], [30, 0]))
        )
        yield* pending(fiber)
        yield* Effect.all([run.seal, run.seal])
        assert.deepStrictEqual(countsOf(yield* Fiber.join(fiber)), [30, 30, 0, 0])
        assert.deepStrictEqual(begun.toSorted((a, b) => a - b), upTo(15, 1))
        assert.strictEqual(reports.begun.length, 15)
        assert.strictEqual(yield* tagOf(run.add(Work, 1)), "BatchSealed")
      })))

  it.effect("is over at once when it is sealed without jobs, and earlier than its size when it is sealed before", () =>
    several(1, ([node]) =>
      Effect.gen(function*() {
        const { batch, work } = yield* cleaned(node!, { size: 10 })
        yield* working(work, double, once)
        const empty = yield* batch.start()
        yield* empty.seal
        assert.deepStrictEqual(countsOf(yield* empty.await), [0, 0, 0, 0])
        const run = yield* batch.start()
        const fiber = yield* Effect.forkChild(run.await)
        yield* run.addAll(Work, [1, 2])
        yield* eventually(
          Effect.map(run.status, ({ done, remaining }) => assert.deepStrictEqual([done, remaining], [2, 8]))
        )
        yield* pending(fiber)
        assert.strictEqual(yield* tagOf(run.addAll(Work, upTo(9))), "BatchSealed")
        yield* run.seal
        assert.deepStrictEqual(countsOf(yield* Fiber.join(fiber)), [2, 2, 0, 0])
      })))

  it.effect("offers one callback when all jobs are done, however many processes have it open", () =>
    several(3, (nodes) =>
      Effect.gen(function*() {
        const first = yield* cleaned(nodes[0]!, callbacks)
        yield* Effect.forEach(nodes.slice(1), (node) => opened(node, callbacks))
        yield* working(first.work, double, once)
        const { begun } = yield* working(first.report, () => Effect.void, once)
        const expected: Array<string> = []
        for (const id of ["a", "b", "c"]) {
          const run = yield* first.batch.start({ id, size: 20 })
          yield* run.addAll(Work, upTo(20))
          expected.push(`done: ${text(yield* run.await)}`)
        }
        yield* eventually(Effect.sync(() => assert.strictEqual(begun.length, 3)))
        yield* on(nodes[0]!, delivered("batch:batch"))
        assert.deepStrictEqual(begun.toSorted(), expected)
      })))

  it.effect("makes the payload of a callback again when it could not be made", () =>
    several(1, ([node]) =>
      Effect.gen(function*() {
        let made = 0
        const payload = (end: Batch.End) => {
          if (++made === 1) throw new Error("not yet")
          return made === 2 ? 1 as never : `${made} ${end.state}`
        }
        const { batch, report } = yield* cleaned(node!, { onDone: { queue: Report, payload } })
        const reports = yield* working(report, () => Effect.void, once)
        const run = yield* batch.start()
        yield* run.seal
        yield* begins(reports, ["3 done"])
      })))

  it.effect("lets the other jobs go on when one fails, and fails with its typed error", () =>
    several(2, ([one, two]) =>
      Effect.gen(function*() {
        const { batch, report, work } = yield* cleaned(one!, callbacks)
        const theirs = yield* opened(two!, callbacks)
        yield* working(work, double, once)
        const reports = yield* working(report, () => Effect.void, once)
        const run = yield* batch.start({ id: "one" })
        yield* run.add(Work, -1, { name: "bad" })
        yield* eventually(Effect.map(run.status, ({ failed }) => assert.strictEqual(failed, 1)))
        yield* run.addAll(Work, [1, 2])
        yield* run.seal
        for (const at of [run, theirs.batch.attach("one")]) {
          const reason = yield* reasonOf(at.await)
          assert.strictEqual(reason._tag, "BatchFailed")
          const { cancelled, done, error, failed, job, message } = reason as Batch.BatchFailed
          assert.deepStrictEqual([done, failed, cancelled, job, error], [2, 1, 0, "bad", { why: "-1" }])
          assert.include(message, "batch \"batch\"")
        }
        yield* begins(reports, ["failed: one failed 3 2 1 0"])
        const jobs = yield* Stream.runCollect(run.jobs)
        assert.deepStrictEqual(jobs.map(({ state }) => state), ["failed", "done", "done"])
      })))

  it.effect("cancels what has not begun when a job fails, if that is wanted", () =>
    several(1, ([node]) =>
      Effect.gen(function*() {
        const { batch, report, work } = yield* cleaned(node!, { ...callbacks, onFailure: "cancel", size: 10 })
        const go = yield* Deferred.make<void>()
        const { begun } = yield* working(
          work,
          (n) => n === 0 ? Effect.as(Deferred.await(go), 0) : double(n),
          { concurrency: 2, attempts: 1 }
        )
        const reports = yield* working(report, () => Effect.void, once)
        const run = yield* batch.start({ id: "one" })
        yield* run.add(Work, 0)
        yield* begins({ begun }, [0])
        const fiber = yield* Effect.forkChild(Effect.flip(run.await))
        yield* run.addAll(Work, [-1, 1, 2], { delay: "1 minute" })
        yield* run.add(Work, -2)
        yield* eventually(Effect.map(run.status, ({ cancelled }) => assert.strictEqual(cancelled, 3)))
        assert.strictEqual(yield* tagOf(run.add(Work, 1)), "BatchSealed")
        // What has begun finishes.
        yield* pending(fiber)
        yield* Deferred.succeed(go, undefined)
        const { reason } = yield* Fiber.join(fiber)
        assert.strictEqual(reason._tag, "BatchFailed")
        yield* begins(reports, ["failed: one failed 5 1 1 3"])
      })))

  it.effect("interrupts running jobs when it is cancelled, and offers one callback", () =>
    several(2, ([one, two]) =>
      Effect.gen(function*() {
        const { batch, report, work } = yield* cleaned(one!, callbacks)
        const theirs = yield* opened(two!, callbacks)
        const interrupted = yield* Deferred.make<void>()
        const { begun } = yield* working(
          work,
          () => Effect.onInterrupt(Effect.never, () => Deferred.succeed(interrupted, undefined)),
          { concurrency: 1, attempts: 1 }
        )
        const reports = yield* working(report, () => Effect.void, once)
        const run = yield* batch.start({ id: "one" })
        yield* run.addAll(Work, [1, 2])
        yield* eventually(Effect.sync(() => assert.strictEqual(begun.length, 1)))
        assert.isTrue(yield* theirs.batch.attach("one").cancel)
        yield* Deferred.await(interrupted)
        assert.strictEqual(yield* tagOf(run.await), "BatchCancelled")
        assert.isTrue(yield* run.cancel)
        assert.strictEqual(yield* tagOf(run.add(Work, 1)), "BatchSealed")
        yield* begins(reports, ["failed: one cancelled 2 0 0 2"])
        assert.strictEqual(begun.length, 1)
      })))

  it.effect("offers what is not done again when it is retried, and a callback at the new end", () =>
    several(2, ([one, two]) =>
      Effect.gen(function*() {
        const { batch, report, work } = yield* cleaned(one!, callbacks)
        const theirs = yield* opened(two!, callbacks)
        let fine = false
        const { begun } = yield* working(work, (n) => fine ? Effect.succeed(n) : double(n), once)
        const reports = yield* working(report, () => Effect.void, once)
        const run = yield* batch.start({ id: "one", size: 5 })
        yield* run.addAll(Work, [1, -1, 2, -2, 3])
        assert.strictEqual(yield* tagOf(run.await), "BatchFailed")
        yield* begins(reports, ["failed: one failed 5 3 2 0"])
        fine = true
        assert.isTrue(yield* theirs.batch.attach("one").retry)
        assert.deepStrictEqual(countsOf(yield* run.await), [5, 5, 0, 0])
        yield* begins(reports, ["failed: one failed 5 3 2 0", "done: one done 5 5 0 0"])
        assert.deepStrictEqual(begun.toSorted((a, b) => a - b), [-2, -2, -1, -1, 1, 2, 3])
        assert.isFalse(yield* run.retry)
      })))

  it.effect("takes the jobs that were missing when it was cancelled, after a retry", () =>
    several(1, ([node]) =>
      Effect.gen(function*() {
        const { batch, work } = yield* cleaned(node!)
        const run = yield* batch.start({ id: "one", size: 3 })
        yield* run.add(Work, 1, { name: "1" })
        assert.isTrue(yield* run.cancel)
        assert.strictEqual(yield* tagOf(run.await), "BatchCancelled")
        assert.strictEqual(yield* tagOf(run.add(Work, 2)), "BatchSealed")
        assert.isTrue(yield* run.retry)
        assert.strictEqual(yield* run.addAll(Work, [1, 2, 3], { name: String }), 2)
        yield* working(work, double, once)
        assert.deepStrictEqual(countsOf(yield* run.await), [3, 3, 0, 0])
        assert.strictEqual(yield* tagOf(batch.attach("never").retry), "BatchUnknown")
      })))

  it.effect("expires at its deadline, and is not touched by an interruption of those that await it", () =>
    several(1, ([node]) =>
      Effect.gen(function*() {
        const { batch } = yield* cleaned(node!, { deadline: "1 second" })
        const run = yield* batch.start()
        yield* run.add(Work, 1)
        const fibers = yield* Effect.forEach(
          [run.await, Stream.runDrain(run.changes)],
          (self) => Effect.forkChild(self as Effect.Effect<unknown, Batch.BatchError>)
        )
        yield* eventually(Effect.map(run.status, ({ running }) => assert.strictEqual(running, 1)))
        yield* Effect.forEach(fibers, Fiber.interrupt)
        assert.strictEqual((yield* run.status).remaining, 1)
        assert.strictEqual(yield* tagOf(run.await), "BatchExpired")
      })))

  it.effect("is over at its deadline, or when it is cancelled, though Redis has lost jobs", () =>
    several(1, ([node], namespace, server) =>
      Effect.gen(function*() {
        const { batch, report } = yield* cleaned(node!, { ...callbacks, deadline: "1 second" })
        const runs = [yield* batch.start({ id: "one" }), yield* batch.start({ id: "two" })] as const
        for (const run of runs) {
          yield* run.add(Work, 1)
          yield* eventually(Effect.map(run.jobs.pipe(Stream.runCollect), (jobs) =>
            assert.deepStrictEqual(
              jobs.map(({ state }) => state),
              ["active"]
            )))
        }
        const lost = (yield* keysOf(server, namespace)).filter((key) => /^\{[^}]+\}:queue[^:]*:work$/.test(key))
        assert.isAbove(lost.length, 0)
        yield* server.cli("DEL", ...lost)
        assert.isTrue(yield* runs[0].cancel)
        const reports = yield* working(report, () => Effect.void, once)
        assert.strictEqual(yield* tagOf(runs[0].await), "BatchCancelled")
        assert.strictEqual(yield* tagOf(runs[1].await), "BatchExpired")
        yield* begins(reports, ["failed: one cancelled 1 0 0 1", "failed: two expired 1 0 0 1"])
      })))

  it.effect("shows its progress, whichever process makes it", () =>
    several(2, ([one, two]) =>
      Effect.gen(function*() {
        const { batch, work } = yield* cleaned(one!)
        const theirs = yield* opened(two!)
        const run = yield* batch.start({ id: "one", size: 4 })
        const seen: Array<Batch.Progress> = []
        const fiber = yield* Effect.forkChild(
          Stream.runForEach(theirs.batch.attach("one").changes, (progress) => Effect.sync(() => seen.push(progress)))
        )
        const shows = (expected: Batch.Progress) =>
          eventually(Effect.sync(() => assert.deepStrictEqual(seen.at(-1), expected)))
        yield* shows({ added: 0, done: 0, failed: 0, cancelled: 0, running: 0, remaining: 4 })
        yield* run.addAll(Work, [1, -1, 2])
        yield* shows({ added: 3, done: 0, failed: 0, cancelled: 0, running: 3, remaining: 4 })
        yield* working(work, double, once)
        yield* shows({ added: 3, done: 2, failed: 1, cancelled: 0, running: 0, remaining: 1 })
        yield* run.seal
        yield* Fiber.join(fiber)
        assert.deepStrictEqual(seen.at(-1), { added: 3, done: 2, failed: 1, cancelled: 0, running: 0, remaining: 0 })
        for (const [at, { added, remaining }] of seen.entries()) {
          if (at === 0) continue
          assert.isAtLeast(added, seen[at - 1]!.added)
          assert.isAtMost(remaining, seen[at - 1]!.remaining)
        }
        assert.strictEqual(yield* tagOf(run.await), "BatchFailed")
      })))

  it.effect("shows its progress as it is after Redis has lost some of it", () =>
    several(1, ([node], namespace, server) =>
      Effect.gen(function*() {
        const { batch } = yield* cleaned(node!)
        const run = yield* batch.start({ id: "one", size: 2 })
        const keys = (yield* keysOf(server, namespace)).filter((key) => /:flow[^:]*:/.test(key))
        for (const key of keys) yield* server.cli("COPY", key, `${key} before`)
        const seen: Array<number> = []
        const fiber = yield* Effect.forkChild(
          Stream.runForEach(run.changes, ({ added }) => Effect.sync(() => seen.push(added)))
        )
        yield* run.add(Work, 1)
        yield* eventually(Effect.sync(() => assert.strictEqual(seen.at(-1), 1)))
        for (const key of keys) yield* server.cli("RENAME", `${key} before`, key)
        yield* lose(node!, namespace, server)
        yield* eventually(Effect.sync(() => assert.strictEqual(seen.at(-1), 0)))
        yield* run.cancel
        yield* Fiber.join(fiber)
      })))

  // In another partition than the queue, so conductors offer the jobs.
  const apart = upTo(9).map(String).find((name) => partitionOf(name, 2) !== partitionOf("work", 2))!
  for (const executed of [false, true]) {
    const how = executed ? "before it hears of the offer" : "before Redis sees the offer"
    it.effect(`offers each job once when a process is lost behind an addition, ${how}`, () =>
      several(1, ([survivor], namespace, server) =>
        Effect.gen(function*() {
          const line = yield* proxy(server)
          const dying = yield* fragile(server, line, namespace, 1, 2)
          const held = yield* line.hold(asks("queue.offer", "queue:work"))
          const options = { ...callbacks, colocate: apart }
          const lost = yield* opened(dying, options)
          const run = yield* lost.batch.start({ id: "one", size: 2 })
          yield* run.addAll(Work, [1, 2])
          yield* held.request
          // Redis may get it, and the process is cut off all the same before it receives the reply.
          if (executed) yield* held.release("dropReply")
          yield* line.blackhole
          if (!executed) yield* held.release("drop")
          const { batch, report, work } = yield* cleaned(survivor!, options)
          const { begun } = yield* working(work, double, once)
          const reports = yield* working(report, () => Effect.void, once)
          assert.deepStrictEqual(countsOf(yield* batch.attach("one").await), [2, 2, 0, 0])
          yield* begins(reports, ["done: one done 2 2 0 0"])
          assert.deepStrictEqual(begun.toSorted(), [1, 2])
        }), { lease: "3 seconds", margin: "500 millis", partitions: 2 }))
  }

  it.effect("answers what a call has added when the session is lost before the answer", () =>
    several(1, ([direct], namespace, server) =>
      Effect.gen(function*() {
        const { batch } = yield* cleaned(direct!)
        const line = yield* proxy(server)
        const context = yield* behind(line, namespace)
        const { id } = yield* batch.start()
        const run = (yield* opened(context)).batch.attach(id)
        const duplicate = (self: ReturnType<typeof run.add>) => Effect.map(self, ({ duplicate }) => duplicate)
        const additions: ReadonlyArray<readonly [addition: Effect.Effect<unknown, Batch.BatchError>, answer: unknown]> =
          [
            [duplicate(run.add(Work, 1)), false],
            [duplicate(run.add(Work, 1, { name: "a" })), false],
            [duplicate(run.add(Work, 1, { name: "a" })), true],
            [run.addAll(Work, [1, 2]), 2],
            [run.addAll(Work, [1, 2], { name: (n) => `b${n}` }), 2],
            [run.addAll(Work, [1, 2, 3], { name: (n) => `b${n}` }), 1]
          ]
        for (const [addition, answer] of additions) {
          yield* line.once(asks("flow.add"), "dropReply")
          const again = yield* line.hold(asks("flow.add"))
          const adding = yield* Effect.forkChild(addition)
          yield* promptly(again.request, "it is sent again")
          yield* forgetSession(context, namespace, server)
          yield* again.release()
          assert.strictEqual(yield* promptly(Fiber.join(adding), "the answer"), answer)
        }
        assert.strictEqual((yield* run.status).added, 7)
        yield* run.cancel
      })))

  it.effect("takes thousands of jobs with a call", () =>
    several(1, ([node]) =>
      Effect.gen(function*() {
        const { batch, work } = yield* cleaned(node!, { retention: "5 seconds" })
        yield* working(work, double, { concurrency: 200 })
        const run = yield* batch.start({ size: 3000 })
        const name = (n: number) => `job ${n}`
        assert.strictEqual(yield* run.addAll(Work, upTo(2000), { name }), 2000)
        // Repeated with more of them, the others are added.
        assert.strictEqual(yield* run.addAll(Work, upTo(3000), { name }), 1000)
        assert.deepStrictEqual(countsOf(yield* run.await), [3000, 3000, 0, 0])
      })), 120_000)

  it.effect("is a service", () =>
    several(1, ([node]) =>
      Effect.gen(function*() {
        class Doubled extends Batch.Service<Doubled>()("batch", { queues: [Work], size: 2, retention }) {}
        const { work } = yield* cleaned(node!)
        yield* working(work, double, once)
        yield* on(
          node!,
          Effect.scoped(Effect.gen(function*() {
            const doubled = yield* Doubled
            assert.strictEqual(doubled.name, "batch")
            const run = yield* doubled.start()
            yield* run.addAll(Work, [1, 2])
            assert.strictEqual((yield* run.await).done, 2)
          })).pipe(Effect.provide(Layer.provideMerge(Doubled.layer, queues)))
        )
      })))

  it.effect("refuses what does not fit, and does not know other runs", () =>
    several(1, ([node]) =>
      Effect.gen(function*() {
        const { batch } = yield* cleaned(node!)
        const run = yield* batch.start({ id: "one" })
        assert.strictEqual(yield* tagOf(batch.start({ id: "one", size: 3 })), "BatchMismatch")
        assert.strictEqual(yield* tagOf(run.add(Work, "1" as never)), "InvalidPayload")
        class Other extends Queue.Service<Other>()("other", { payload: Schema.Number }) {}
        for (
          const wrong of [
            run.add(Other, 1),
            run.add(Work, 1, { name: "" }),
            run.add(Work, 1, { attempts: 0 }),
            run.addAll(Work, [1, 2], { name: () => "same" }),
            batch.start({ size: 0 }),
            batch.start({ size: 1.5 }),
            batch.start({ id: "" }),
            batch.start({ id: "x".repeat(450) })
          ]
        ) isRangeError(yield* Effect.exit(wrong as Effect.Effect<unknown, unknown>))
        for (
          const options of [
            { size: -1 },
            { onFailure: "other" as never },
            { onDone: { queue: Other, payload: () => 1 } }
          ]
        ) isRangeError(yield* Effect.exit(Effect.scoped(opened(node!, options as Options<never, never>))))
        isRangeError(yield* Effect.exit(on(node!, Effect.scoped(Batch.make("a/b", { queues: [] })))))
        for (const name of ["batch:x", "queue:x"]) {
          isRangeError(yield* Effect.exit(on(node!, Effect.scoped(Flow.make(name, { queues: [] }, () => {})))))
        }
        yield* run.seal
        yield* run.await

        const never = batch.attach("never")
        for (
          const asked of [
            never.await,
            never.status,
            never.seal,
            never.add(Work, 1),
            Stream.runDrain(never.changes),
            Stream.runDrain(never.jobs)
          ]
        ) assert.strictEqual(yield* tagOf(asked as Effect.Effect<unknown, Batch.BatchError>), "BatchUnknown")
        assert.isFalse(yield* never.cancel)
        assert.isTrue(Exit.isSuccess(yield* Effect.exit(run.seal)))
      })))
})
