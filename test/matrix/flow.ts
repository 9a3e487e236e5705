import { assert } from "@effect/vitest"
import { Context, Effect, Fiber, Layer, Schema, Stream } from "effect"
import { Coordinator, Flow, Queue } from "../../src/index.ts"
import { placeOf, spaceOf } from "../../src/internal/hold/place.ts"
import { request } from "../../src/internal/hold/request.ts"
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
  ["flow.add", "flow:of parts/two"],
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

const parts = OfParts.layer.pipe(Layer.provideMerge(Parts.layer))

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
    // Every node has started once, whatever was sent twice.
    assert.deepStrictEqual(begun.toSorted((a, b) => a - b), [1, 2, 30])
    assert.strictEqual((yield* insist(run.status)).state, "done")
    assert.strictEqual((yield* insist(Stream.runCollect(run.nodes))).length, 3)
    yield* Fiber.interrupt(running)

    const two = yield* insist(flow.start(undefined, { id: "two" }))
    yield* insist(two.cancel)
    yield* eventually(Effect.map(insist(two.status), ({ state }) => assert.strictEqual(state, "cancelled")))
    yield* insist(two.retry)
    yield* eventually(Effect.map(insist(two.status), ({ state }) => assert.strictEqual(state, "running")))
    const place = placeOf(
      spaceOf(yield* Coordinator.Coordinator),
      "flow",
      "of parts/two",
      "name",
      undefined,
      "of parts"
    )
    assert.strictEqual((yield* insist(request(place, "flow.add", ["", false])))[0], "added")
    yield* insist(two.cancel)
    assert.strictEqual((yield* Effect.flip(insist(two.await))).reason._tag, "FlowCancelled")
    assert.strictEqual(begun.length, 3)
    yield* insist(delivered("of parts"))
  })
