/** Follow-ups in other queues: stored with the end of a job, and delivered by any process that has its queue open. */
import { assert, layer } from "@effect/vitest"
import { Deferred, Effect, type Exit, Logger, Option, Schedule, Schema, Stream } from "effect"
import { Queue } from "../src/index.ts"
import { behindLine } from "./support/behindLine.ts"
import { eventually } from "./support/eventually.ts"
import { TestServer } from "./support/live.ts"
import { isRangeError, make, upTo, working } from "./support/queues.ts"
import { on, several } from "./support/several.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

const two = { lease: "3 seconds", margin: "500 millis", partitions: 2 } as const

// Its jobs stay when the scope is closed.
const plain = (name: string) => Queue.make({ name, payload: Schema.Number, retention: "200 millis" })

const listed = (queue: Queue.Queue<number>, state: "waiting" | "delayed") =>
  Effect.map(
    Stream.runCollect(queue.jobs({ state })),
    (jobs) => jobs.map(({ payload }) => Option.getOrThrow(payload)).toSorted((x, y) => x - y)
  )

layer(TestServer.layer, live)("a follow-up in another queue", (it) => {
  it.effect("is there once when the job is done, and not when the attempt has failed", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const source = yield* on(a!, make({ name: "source" }))
        const target = yield* on(a!, make({ name: "target" }))
        const sharded = yield* on(a!, make({ name: "sharded", shards: 2 }))
        const theirs = yield* on(b!, make({ name: "target" }))
        const worker = yield* working(source, (n) =>
          Effect.gen(function*() {
            if (n >= 100) return
            const { attempt } = yield* Queue.Job
            yield* target.followUp(n)
            yield* target.followUp(n, { id: `of ${n}`, delay: "1 hour" })
            yield* sharded.followUp(n)
            yield* source.followUp(n + 100)
            if (attempt === 1 && n % 3 === 0) return yield* Effect.fail("no")
            if (n === 7) return yield* Effect.flatMap(Queue.Job, (job) => job.discard("never"))
          }), { concurrency: 4, retry: Schedule.spaced("20 millis") })
        yield* source.offerAll(upTo(30))
        const expected = upTo(30).filter((n) => n !== 7)
        yield* eventually(Effect.map(source.state, ({ completed }) => assert.strictEqual(completed, 29 * 2)))
        yield* eventually(Effect.map(listed(theirs, "waiting"), (found) => assert.deepStrictEqual(found, expected)))
        yield* eventually(Effect.map(listed(sharded, "waiting"), (found) => assert.deepStrictEqual(found, expected)))
        assert.deepStrictEqual(yield* listed(theirs, "delayed"), expected)
        assert.strictEqual((yield* theirs.offer(3, { id: "of 3" })).duplicate, true)
        yield* worker.stop
      }), two))

  it.effect("is delivered by another process with the queue open, when the process of the handler has ended", () =>
    several(3, ([a, b, c], namespace, server) =>
      Effect.gen(function*() {
        const target = yield* on(c!, make({ name: "target" }))
        const source = yield* on(b!, make({ name: "source" }))
        const gate = yield* Deferred.make<void>()
        yield* Effect.scoped(Effect.gen(function*() {
          const own = yield* on(a!, plain("source"))
          const far = yield* on(a!, plain("target"))
          yield* source.offerAll([1, 2, 3])
          const worker = yield* working(own, (n) => Effect.andThen(far.followUp(n), Deferred.await(gate)), {
            concurrency: 3
          })
          yield* eventually(Effect.map(source.state, ({ active }) => assert.strictEqual(active, 3)))
          yield* Deferred.succeed(gate, undefined)
          yield* eventually(Effect.map(source.state, ({ completed }) => assert.strictEqual(completed, 3)))
          yield* worker.stop
        }))
        yield* eventually(Effect.map(listed(target, "waiting"), (found) => assert.deepStrictEqual(found, [1, 2, 3])))
        // The other process goes on to deliver, also those of a process that joins later.
        yield* Effect.scoped(Effect.gen(function*() {
          const own = yield* on(a!, plain("source"))
          const far = yield* on(a!, plain("target"))
          const worker = yield* working(own, (n) => far.followUp(n))
          yield* source.offer(4)
          yield* eventually(
            Effect.map(listed(target, "waiting"), (found) => assert.deepStrictEqual(found, [1, 2, 3, 4]))
          )
          yield* worker.stop
        }))
        const workers = yield* server.cli("KEYS", `{${namespace}:*}:errands:queue:source`)
        assert.notStrictEqual(workers.trim(), "")
      })))

  it.effect("is delivered by a process that could not begin to deliver while Redis was full", () =>
    Effect.suspend(() => {
      const lines: Array<string> = []
      const logger = Logger.make(({ message }) => void lines.push(String(message)))
      return behindLine(({ context, line, server }) =>
        Effect.gen(function*() {
          const source = yield* on(context, make({ name: "source" }))
          const target = yield* on(context, make({ name: "target" }))
          const delivering = yield* line.hold(({ args }) =>
            args.includes("queue.work") && args.some((arg) => arg.includes("errands"))
          )
          const worker = yield* working(source, (n) => target.followUp(n))
          yield* source.offer(1)
          yield* delivering.request
          yield* server.cli("CONFIG", "SET", "maxmemory", 1)
          yield* delivering.release()
          yield* eventually(Effect.sync(() => assert.match(lines.join(), /follow-ups of queue "source"/))).pipe(
            Effect.ensuring(Effect.orDie(server.cli("CONFIG", "SET", "maxmemory", 0)))
          )
          yield* eventually(Effect.map(listed(target, "waiting"), (found) => assert.deepStrictEqual(found, [1])))
          yield* worker.stop
        }), { lease: "3 seconds", margin: "500 millis" }).pipe(Effect.provide(Logger.layer([logger])))
    }))

  it.effect("can only be offered by a handler, and of the same coordinator", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const source = yield* on(a!, make({ name: "source" }))
        const foreign = yield* on(b!, make({ name: "target" }))
        const exits: Array<Exit.Exit<void, unknown>> = []
        const worker = yield* working(source, (n) =>
          Effect.gen(function*() {
            exits.push(yield* Effect.exit(foreign.followUp(n)))
            exits.push(yield* Effect.exit(source.followUp(n, { after: ["x"] })))
            // It outlives the handler.
            yield* Effect.forkDetach(Effect.gen(function*() {
              yield* eventually(Effect.map(source.state, ({ completed }) => assert.strictEqual(completed, 1)))
              exits.push(yield* Effect.exit(source.followUp(n)))
            }))
          }))
        yield* source.offer(1)
        yield* eventually(Effect.sync(() => assert.strictEqual(exits.length, 3)))
        for (const exit of exits) isRangeError(exit)
        yield* worker.stop
      })))
})
