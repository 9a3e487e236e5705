import { assert } from "@effect/vitest"
import { Context, Effect, Fiber, Layer, Schema, Stream } from "effect"
import { Batch, Flow, Queue } from "../../src/index.ts"
import { eventually } from "../support/eventually.ts"
import { delivered } from "../support/flows.ts"
import { insist } from "../support/uncertain.ts"
import type { Program, Rows } from "./matrix.ts"

export const requests = [
  ["flow.begin", "flow:of parts/one"],
  ["flow.load", "flow:of parts/one"],
  ["flow.start", "flow:of parts/one"],
  ["flow.observe", "flow:of parts/one"],
  ["flow.begun", "flow:of parts/one"],
  ["flow.ended", "flow:of parts/one"],
  ["flow.inputs", "flow:of parts/one"],
  ["flow.outcomes", "flow:of parts/one"],
  ["flow.status", "flow:of parts/one"],
  ["flow.cancel", "flow:of parts/two"],
  ["flow.retry", "flow:of parts/two"],
  ["flow.add", "flow:batch:of parts/three"],
  ["queue.offer", "queue:parts"],
  ["queue.finish", "queue:parts"],
  ["session.leave", "flow:of parts/one"]
] as const satisfies Rows

class Parts extends Queue.Service<Parts>()("parts", {
  payload: Schema.Number,
  success: Schema.Number,
  retention: "1 second"
}) {}

class OfParts extends Flow.Service<OfParts>()("of parts", { queues: [Parts], retention: "4 seconds" }, (flow) => {
  const [a, b] = [flow.job(Parts, 1), flow.job(Parts, 2)]
  return flow.job(Parts, { after: [a, b], payload: ([a, b]) => a + b })
}) {}

class BatchOfParts extends Batch.Service<BatchOfParts>()("of parts", { queues: [Parts], retention: "4 seconds" }) {}

const parts = Layer.mergeAll(OfParts.layer, BatchOfParts.layer).pipe(Layer.provideMerge(Parts.layer))

export const program: Program = ({ other }) =>
  Effect.gen(function*() {
    const theirs = yield* Effect.provideContext(Layer.build(Parts.layer), other)
    yield* Effect.addFinalizer(() => Effect.orDie(Context.get(theirs, Parts).obliterate))
    const mine = yield* insist(Layer.build(parts))
    const [flow, queue] = [Context.get(mine, OfParts), Context.get(mine, Parts)]
    const begun: Array<number> = []
    const work = (n: number) => {
      begun.push(n)
      return n === 0 ? Effect.never : Effect.succeed(10 * n)
    }
    const running = yield* Effect.forkChild(insist(queue.run(work, { concurrency: 2 })))
    const run = yield* insist(flow.start(undefined, { id: "one" }))
    assert.strictEqual(yield* insist(run.await), 300)
    // Every node has started once, though a request was sent twice.
    assert.deepStrictEqual(begun.toSorted((a, b) => a - b), [1, 2, 30])
    assert.strictEqual((yield* insist(run.status)).state, "done")
    assert.strictEqual((yield* insist(Stream.runCollect(run.nodes))).length, 3)

    const batch = Context.get(mine, BatchOfParts)
    const three = yield* insist(batch.start({ id: "three", size: 2 }))
    yield* insist(three.addAll(Parts, [5, 6], { name: String }))
    assert.strictEqual((yield* insist(three.await)).done, 2)
    assert.deepStrictEqual(begun.toSorted((a, b) => a - b), [1, 2, 5, 6, 30])
    yield* insist(delivered("batch:of parts"))
    yield* Fiber.interrupt(running)

    const two = yield* insist(flow.start(undefined, { id: "two" }))
    yield* insist(two.cancel)
    yield* eventually(Effect.map(insist(two.status), ({ state }) => assert.strictEqual(state, "cancelled")))
    yield* insist(two.retry)
    yield* eventually(Effect.map(insist(two.status), ({ state }) => assert.strictEqual(state, "running")))
    yield* insist(two.cancel)
    assert.strictEqual((yield* Effect.flip(insist(two.await))).reason._tag, "FlowCancelled")
    assert.strictEqual(begun.length, 5)
    yield* insist(delivered("of parts"))
  })
