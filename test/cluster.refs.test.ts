/** Shared refs and counters in a Redis Cluster, across the death of a primary. */
import { assert, it } from "@effect/vitest"
import { Effect, Fiber, Schema } from "effect"
import { Counter, SharedRef } from "../src/index.ts"
import { partitionOf } from "../src/internal/actor/keys.ts"
import { cluster } from "./support/cluster.ts"
import { eventually } from "./support/eventually.ts"
import { assertEmpty, freshNamespace, node } from "./support/live.ts"
import { awaitInSync } from "./support/servers.ts"

const partitions = 6

it.live("shared refs and counters go on in a Cluster when a primary dies", () =>
  Effect.gen(function*() {
    const nodes = yield* cluster({ replicas: 1 })
    const namespace = freshNamespace()
    // One name in each partition.
    const names = Array.from(
      { length: partitions },
      (_, partition) =>
        Array.from({ length: 100 }, (_, n) => `name${n}`).find((name) => partitionOf(name, partitions) === partition)!
    )
    const tag = `{${namespace}:00}`
    const victim = yield* nodes.serving(tag)
    yield* Effect.scoped(Effect.gen(function*() {
      const contexts = yield* Effect.forEach([0, 1], () =>
        node({ cluster: nodes.startupNodes }, { namespace, partitions, lease: "12 seconds", margin: "500 millis" }))
      const options = { schema: Schema.Number, initial: 0 }
      const parties = yield* Effect.forEach(contexts, (context) =>
        Effect.forEach(names, (name) =>
          Effect.all({
            ref: SharedRef.make({ ...options, name }),
            // In the partition of the name, not in its own.
            beside: SharedRef.make({ ...options, name: "beside", colocate: name }),
            same: SharedRef.make({ ...options, name, colocate: name }),
            counter: Counter.make({ name })
          })).pipe(Effect.provideContext(context)))
      const [mine, theirs] = [parties[0]!, parties[1]!]
      const change = (by: number) =>
        Effect.forEach(names, (_, at) =>
          Effect.gen(function*() {
            yield* eventually(mine[at]!.ref.get)
            const waiting = yield* Effect.forkChild(theirs[at]!.ref.until((value) =>
              value >= by
            ))
            yield* mine[at]!.ref.set(by)
            assert.isAtLeast(yield* Fiber.join(waiting), by)
            const { beside, same } = theirs[at]!
            yield* SharedRef.transaction([same, beside], ([a, b]) => [undefined, [a + 1, b + 1]])
            assert.strictEqual(yield* mine[at]!.ref.get, by + 1)
            yield* mine[at]!.counter.add(by)
            return yield* theirs[at]!.counter.add(1)
          }), { concurrency: "unbounded" })
      assert.deepStrictEqual(yield* Effect.timeout(change(10), "5 seconds"), names.map(() => 11))
      // One command for each partition, on any node.
      const reads = yield* Effect.all(
        mine.flatMap(({ beside, ref }) => [ref.get, beside.get]),
        { concurrency: "unbounded" }
      )
      assert.deepStrictEqual(reads, names.flatMap(() => [11, 1]))

      yield* awaitInSync(victim, yield* nodes.replicasOf(victim))
      yield* victim.stop()
      yield* nodes.awaitPromotion(tag, victim)
      assert.deepStrictEqual(yield* Effect.timeout(change(20), "10 seconds"), names.map(() => 32))
      yield* Effect.forEach(mine, ({ beside, counter, ref }) => Effect.all([ref.delete, beside.delete, counter.reset]))
    }))
    yield* Effect.flatMap(nodes.primaries, Effect.forEach((primary) => assertEmpty(primary, namespace)))
  }).pipe(Effect.scoped), 60_000)
