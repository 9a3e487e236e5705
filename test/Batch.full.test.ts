import { assert, layer } from "@effect/vitest"
import { Deferred, Effect, Fiber, Layer, Schema } from "effect"
import { Batch, Queue } from "../src/index.ts"
import { eventually } from "./support/eventually.ts"
import { delivered } from "./support/flows.ts"
import { TestServer } from "./support/live.ts"
import { upTo } from "./support/queues.ts"
import { on, several } from "./support/several.ts"

const retention = "200 millis"

const batchOf = (onFull?: "wait" | "fail") => {
  class Full extends Queue.Service<Full>()("full", {
    payload: Schema.Number,
    retention,
    limits: { length: 10, onFull }
  }) {}
  class Fast extends Queue.Service<Fast>()("fast", { payload: Schema.Number, retention }) {}
  class All extends Batch.Service<All>()("all", { queues: [Full, Fast], retention }) {}
  const queues = Layer.mergeAll(Full.layer, Fast.layer)
  return { All, Fast, Full, live: Layer.provideMerge(All.layer, queues) }
}

layer(TestServer.layer, { excludeTestServices: true })("Batch of a queue that is full", (it) => {
  it.effect("offers jobs of other queues at once, and those of the full one when there is room", () =>
    several(1, ([node]) =>
      Effect.gen(function*() {
        const { All, Fast, Full, live } = batchOf()
        yield* on(
          node!,
          Effect.gen(function*() {
            const [batch, fast, full] = [yield* All, yield* Fast, yield* Full]
            yield* full.pause
            const ran: Array<number> = []
            const began = yield* Deferred.make<void>()
            yield* full.pool((job) => Effect.sync(() => ran.push(job)), { concurrency: 10 })
            yield* fast.pool(() => Deferred.succeed(began, undefined))
            const many = yield* batch.start({ id: "many", size: 1000 })
            yield* many.addAll(Full, upTo(1000))
            const one = yield* batch.start({ id: "one", size: 1 })
            yield* one.add(Fast, 1)
            yield* Effect.timeout(Deferred.await(began), "2 seconds")
            yield* Effect.timeout(one.await, "2 seconds")
            assert.strictEqual((yield* full.state).waiting, 10)
            assert.strictEqual((yield* many.status).running, 1000)
            yield* full.resume
            yield* Effect.timeout(many.await, "10 seconds")
            assert.deepStrictEqual(ran.toSorted((a, b) => a - b), upTo(1000))
            yield* delivered("batch:all")
          }).pipe(Effect.scoped, Effect.provide(live))
        )
      })))

  it.effect("ends a run that is cancelled, whose jobs are behind many that wait for room", () =>
    several(1, ([node]) =>
      Effect.gen(function*() {
        const { All, Full, live } = batchOf()
        yield* on(
          node!,
          Effect.gen(function*() {
            const [batch, full] = [yield* All, yield* Full]
            yield* full.pause
            const many = yield* batch.start({ id: "many", size: 200 })
            yield* many.addAll(Full, upTo(200))
            yield* eventually(Effect.map(full.state, ({ waiting }) => assert.strictEqual(waiting, 10)))
            const few = yield* batch.start({ id: "few", size: 3 })
            yield* few.addAll(Full, upTo(3))
            const end = yield* Effect.forkChild(Effect.flip(few.await))
            assert.isTrue(yield* few.cancel)
            assert.strictEqual((yield* Effect.timeout(Fiber.join(end), "6 seconds")).reason._tag, "BatchCancelled")
            assert.isTrue(yield* many.cancel)
            yield* Effect.flip(many.await)
            yield* delivered("batch:all")
          }).pipe(Effect.scoped, Effect.provide(live))
        )
      })))

  it.effect("offers jobs as soon as there is room also where callers are refused", () =>
    several(1, ([node]) =>
      Effect.gen(function*() {
        const { All, Full, live } = batchOf("fail")
        yield* on(
          node!,
          Effect.gen(function*() {
            const [batch, full] = [yield* All, yield* Full]
            const ran: Array<number> = []
            yield* full.pool((job) => Effect.sync(() => ran.push(job)), { concurrency: 10 })
            yield* full.pause
            const run = yield* batch.start({ size: 200 })
            yield* run.addAll(Full, upTo(200))
            yield* eventually(Effect.map(full.state, ({ waiting }) => assert.strictEqual(waiting, 10)))
            assert.strictEqual((yield* Effect.flip(full.offer(1000))).reason._tag, "QueueFull")
            // Longer than it took them to try again only every ten seconds.
            yield* Effect.sleep("3 seconds")
            yield* full.resume
            yield* Effect.timeout(run.await, "4 seconds")
            assert.deepStrictEqual(ran.toSorted((a, b) => a - b), upTo(200))
            yield* delivered("batch:all")
          }).pipe(Effect.scoped, Effect.provide(live))
        )
      })))
})
