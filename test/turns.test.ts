/** Many short handlers together do not keep the answers of Redis waiting. */
import { assert, layer } from "@effect/vitest"
import { Effect, Schema, type Scope } from "effect"
import { type Coordinator, Queue, Topic } from "../src/index.ts"
import { eventually } from "./support/eventually.ts"
import { freshNamespace, node, TestServer } from "./support/live.ts"
import { on } from "./support/several.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

const [count, millis] = [80, 25]

/** Uses the processor for a while. */
const working = () => {
  const runs: Array<number> = []
  const handler = (n: number) =>
    Effect.sync(() => {
      const until = performance.now() + millis
      while (performance.now() < until);
      runs.push(n)
    })
  return { handler, runs }
}

const numbers = Array.from({ length: count }, (_, at) => at)

layer(TestServer.layer, live)("handlers that take longer than the lease together", (it) => {
  const alone = <A, E>(use: Effect.Effect<A, E, Coordinator.Coordinator | Scope.Scope>) =>
    Effect.gen(function*() {
      const options = { namespace: freshNamespace(), lease: "1 second", margin: "200 millis" } as const
      return yield* on(yield* node((yield* TestServer).url, options), use)
    }).pipe(Effect.scoped)

  it.effect("keep the jobs of a queue", () =>
    alone(Effect.gen(function*() {
      const { handler, runs } = working()
      const queue = yield* Queue.make({ name: "jobs", payload: Schema.Number })
      yield* queue.offerAll(numbers)
      yield* Effect.forkScoped(queue.run(handler, { concurrency: count }))
      yield* eventually(Effect.map(queue.state, ({ active, waiting }) => active + waiting === 0))
      assert.deepStrictEqual(runs, numbers)
    })))

  it.effect("keep the events of a group", () =>
    alone(Effect.gen(function*() {
      const { handler, runs } = working()
      const topic = yield* Topic.make({ name: "events", schema: Schema.Number })
      yield* topic.publishAll(numbers)
      yield* Effect.forkScoped(
        topic.run(({ value }) => handler(value), { group: "all", from: "beginning", concurrency: count })
      )
      yield* eventually(
        Effect.map(topic.state, ({ groups: [all] }) => all !== undefined && all.lag + all.pending === 0)
      )
      assert.sameMembers(runs, numbers)
    })))
})
