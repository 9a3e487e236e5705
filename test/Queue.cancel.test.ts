/** Jobs that are cancelled while their handlers run: no other handler takes their slot before they have ended. */
import { assert, layer } from "@effect/vitest"
import { Deferred, Effect, Option } from "effect"
import { eventually } from "./support/eventually.ts"
import { TestServer } from "./support/live.ts"
import { begins, make, shows, working } from "./support/queues.ts"
import { missed, on, promptly, several } from "./support/several.ts"

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
          let running = 0
          const gate = yield* Deferred.make<void>()
          // Their cleanup takes a while.
          const handler = (n: number) =>
            Effect.suspend(() => {
              assert.strictEqual(++running, 1, "two handlers run at once")
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
          assert.isTrue(yield* other.cancel(first!.id))
          assert.isTrue(Option.isNone(yield* other.status(first!.id)))
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
          for (const worker of workers) yield* worker.stop
        })))
  }
})
