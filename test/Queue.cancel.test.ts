/** Jobs that are cancelled while their handlers run: no other handler takes their slot before they have ended. */
import { assert, layer } from "@effect/vitest"
import { Deferred, Effect, Option } from "effect"
import { behindLine } from "./support/behindLine.ts"
import { eventually } from "./support/eventually.ts"
import { TestServer } from "./support/live.ts"
import { begins, make, shows, upTo, working } from "./support/queues.ts"
import { lose, missed, on, promptly, several } from "./support/several.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

const kinds = [
  { what: "its group, which is strict", limits: {}, group: { group: "a" } },
  { what: "a queue with one job at a time", limits: { limits: { concurrency: 1 } }, group: {} }
] as const

layer(TestServer.layer, live)("a job that is cancelled while its handler runs", (it) => {
  for (const { group, limits, what } of kinds) {
    it.effect(`holds up ${what}, until the handler has ended`, () =>
      several(2, ([a, b]) =>
        Effect.gen(function*() {
          const queue = yield* on(a!, make(limits))
          const other = yield* on(b!, make(limits))
          const news = yield* on(b!, make({ name: "news" }))
          const interrupted: Array<number> = []
          let [running, most] = [0, 0]
          const gate = yield* Deferred.make<void>()
          // Their cleanup takes a while.
          const handler = (n: number) =>
            Effect.suspend(() => {
              most = Math.max(most, ++running)
              return n === 3 ? Effect.void : Effect.onInterrupt(Effect.never, () => {
                interrupted.push(n)
                return Deferred.await(gate)
              })
            }).pipe(Effect.ensuring(Effect.sync(() => running--)))
          const begun: Array<number> = []
          const workers = yield* Effect.forEach([queue, other], (queue) =>
            working(queue, (n) => {
              begun.push(n)
              return handler(n)
            }, { concurrency: 2 }))
          const [first] = yield* queue.offerAll([1, 3], group)
          yield* begins({ begun }, [1])
          assert.isTrue(yield* other.job(first!.id).cancel)
          assert.isTrue(Option.isNone(yield* other.job(first!.id).status))
          yield* promptly(eventually(Effect.sync(() => assert.deepStrictEqual(interrupted, [1]))), "the interruption")
          // The next job would have come to a worker before this one.
          for (const [at, context] of [a!, b!].entries()) {
            missed(context)
            const told = yield* working(yield* on(context, make({ name: "news" })))
            yield* news.offer(at)
            yield* begins(told, [at])
            yield* told.stop
          }
          assert.deepStrictEqual(begun, [1])
          yield* shows(queue, { active: 1, waiting: 1 })
          yield* Deferred.succeed(gate, undefined)
          yield* begins({ begun }, [1, 3])
          yield* shows(queue, { active: 0, waiting: 0, completed: 1 })
          assert.strictEqual(most, 1)
          for (const worker of workers) yield* worker.stop
        })))
  }

  it.effect("frees its slot when its worker has never received it", () =>
    behindLine(({ context, direct, line, server }) =>
      Effect.gen(function*() {
        const limits = { limits: { concurrency: 2 } }
        const other = yield* on(yield* direct(), make(limits))
        const queue = yield* on(context, make(limits))
        const worker = yield* working(queue, (n) => n === 1 ? Effect.never : Effect.void, { concurrency: 2 })
        yield* shows(other, { workers: 1 })
        // Both coordinators read, so the next reading is the one behind the delivery of the first job.
        yield* eventually(
          Effect.map(server.cli("INFO", "clients"), (info) => assert.include(info, "blocked_clients:2"))
        )
        const held = yield* line.hold(({ name }) => name === "XREAD")
        yield* other.offer(1)
        yield* promptly(held.request, "the next reading of the mailbox")
        yield* begins(worker, [1])
        const second = yield* other.offer(2)
        yield* other.job(second.id).cancel
        // The delivery and the news of the cancellation are on their way.
        yield* other.offer(3)
        yield* shows(other, { active: 2, waiting: 1, completed: 0 })
        missed(context)
        yield* promptly(shows(other, { active: 1, waiting: 0, completed: 1 }), "the next job")
        yield* held.release()
        yield* other.offer(4)
        yield* begins(worker, [1, 3, 4])
        yield* shows(other, { active: 1, waiting: 0, completed: 2 })
        yield* worker.stop
      }), { lease: "30 seconds", margin: "1 second", requestTimeout: "1 second" }))

  it.effect("frees its slot when the session of its worker ends", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const other = yield* on(b!, make())
        const gate = yield* Deferred.make<void>()
        const stuck = yield* working(queue, () => Effect.uninterruptible(Deferred.await(gate)))
        const [first] = yield* other.offerAll([1, 2], { group: "a" })
        yield* begins(stuck, [1])
        assert.isTrue(yield* other.job(first!.id).cancel)
        const worker = yield* working(other)
        yield* shows(other, { active: 1, waiting: 1, workers: 2 })
        yield* lose(a!, namespace, server)
        yield* begins(worker, [2])
        yield* worker.stop
        yield* Deferred.succeed(gate, undefined)
        yield* stuck.stop
      })))

  it.effect("loses its slot to another job when it ignores its interruption for too long", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const gate = yield* Deferred.make<void>()
        const worker = yield* working(
          queue,
          (n) => n === 1 ? Effect.uninterruptible(Deferred.await(gate)) : Effect.void,
          { concurrency: 2, overrun: "100 millis" }
        )
        const [first] = yield* queue.offerAll([1, 2], { group: "a" })
        yield* begins(worker, [1])
        assert.isTrue(yield* queue.job(first!.id).cancel)
        yield* begins(worker, [1, 2])
        yield* shows(queue, { active: 0, waiting: 0, completed: 1 })
        yield* Deferred.succeed(gate, undefined)
        yield* worker.stop
      })))

  it.effect("frees its slots for every job of many that are cancelled or removed at any moment", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const limits = { limits: { concurrency: 3 } }
        const queue = yield* on(a!, make(limits))
        const other = yield* on(b!, make(limits))
        const running = new Set<number>()
        const broken: Array<number> = []
        const handler = (n: number) =>
          Effect.suspend(() => {
            if (running.size === 3 || [...running].some((one) => one % 4 === n % 4)) broken.push(n)
            running.add(n)
            return Effect.ensuring(Effect.yieldNow, Effect.sync(() => running.delete(n)))
          })
        const workers = yield* Effect.forEach([queue, other], (queue) => working(queue, handler, { concurrency: 4 }))
        for (let round = 0; round < 20; round++) {
          const offered = yield* queue.offerAll(upTo(40), (n) => ({ group: `${n % 4}` }))
          yield* Effect.forEach(offered, ({ id }) => other.job(id).cancel, { concurrency: 8 })
          if (round % 5 === 4) yield* other.obliterate
        }
        yield* shows(queue, { waiting: 0, active: 0, delayed: 0 })
        assert.deepStrictEqual(broken, [])
        // The workers have all of their slots.
        yield* queue.offerAll(upTo(40), (n) => ({ group: `${n % 4}` }))
        yield* promptly(shows(queue, { waiting: 0, active: 0 }), "the last jobs")
        for (const worker of workers) yield* worker.stop
      })))
})
