/** Barriers and latches on a Redis Cluster: a waiter goes on waiting across the death of the primary that it waits at. */
import { assert, it } from "@effect/vitest"
import { Effect, Fiber } from "effect"
import { Barrier, CountDownLatch, DoubleBarrier, Latch } from "../src/index.ts"
import { partitionOf } from "../src/internal/actor/keys.ts"
import { cluster } from "./support/cluster.ts"
import { eventually } from "./support/eventually.ts"
import { assertEmpty, freshNamespace, type Node, node } from "./support/live.ts"
import { on } from "./support/several.ts"
import { insist } from "./support/uncertain.ts"

const partitions = 4

/** Short, so that the namespace is empty soon. */
const keep = "100 millis"

it.live("parties on a Cluster go on waiting when a primary dies", () =>
  Effect.gen(function*() {
    const nodes = yield* cluster({ replicas: 1 })
    const namespace = freshNamespace()
    const options = { namespace, partitions, lease: "12 seconds", margin: "500 millis" } as const
    yield* Effect.scoped(Effect.gen(function*() {
      const contexts: Array<Node> = []
      for (let n = 0; n < 3; n++) {
        contexts.push(
          yield* node({ cluster: nodes.startupNodes }, options)
        )
      }
      // In every partition one.
      const names = Array.from(
        { length: partitions },
        (_, partition) =>
          Array.from({ length: 100 }, (_, n) => `step${n}`).find((name) => partitionOf(name, partitions) === partition)!
      )
      const barriers = yield* Effect.forEach(
        names,
        (name) => Effect.forEach(contexts, (context) => on(context, Barrier.make({ name, parties: 3 })))
      )
      const phases = yield* Effect.forEach(
        names,
        (name) => Effect.forEach(contexts, (context) => on(context, DoubleBarrier.make({ name, parties: 3 })))
      )
      const latches = yield* Effect.forEach(
        names,
        (name) =>
          Effect.forEach(contexts, (context) => on(context, CountDownLatch.make({ name, count: 3, timeToLive: keep })))
      )
      const plain = yield* Effect.forEach(
        names,
        (name) => Effect.forEach(contexts, (context) => on(context, Latch.make({ name, timeToLive: keep })))
      )
      // A party that finds it broken, since Redis may have forgotten an arrival, comes again.
      const pass = (barrier: Barrier.Barrier<void>): Effect.Effect<number, Barrier.BarrierError> =>
        Effect.map(barrier.await(), ({ generation }) => generation).pipe(
          Effect.catchReason("BarrierError", "BarrierBroken", () => pass(barrier))
        )
      const all = <A, E>(each: ReadonlyArray<Effect.Effect<A, E>>) => Effect.all(each, { concurrency: "unbounded" })
      for (const each of barriers) assert.deepStrictEqual(yield* all(each.map(pass)), [1, 1, 1])
      for (const each of phases) yield* all(each.map((phase) => phase.withPhase(Effect.void)))

      const victim = yield* nodes.serving(`{${namespace}:00}`)
      const waiting = yield* Effect.forEach(barriers, ([one, two]) => Effect.forkChild(all([pass(one!), pass(two!)])))
      const entering = yield* Effect.forEach(phases, ([one, two]) =>
        Effect.forkChild(all([one!.withPhase(Effect.void), two!.withPhase(Effect.void)])))
      for (const [at, [one]] of barriers.entries()) {
        yield* eventually(Effect.map(one!.arrived, (arrived) =>
          arrived === 2))
        yield* eventually(Effect.map(phases[at]![0]!.queued, (waiting) => waiting === 2))
      }
      const opening = yield* Effect.forEach(
        [...latches.map(([, latch]) => latch!.await), ...plain.map(([, latch]) => latch!.await)],
        (wait) => Effect.forkChild(wait)
      )
      for (const [one] of latches) assert.strictEqual(yield* one!.countDown({ id: "one" }), 2)
      yield* victim.stop()
      yield* nodes.awaitPromotion(`{${namespace}:00}`, victim)
      yield* all(barriers.map(([, , three]) => pass(three!)))
      yield* all(phases.map(([, , three]) => three!.withPhase(Effect.void)))
      yield* Effect.forEach(waiting, Fiber.join)
      yield* Effect.forEach(entering, Fiber.join)
      for (const [one, two, three] of latches) {
        yield* insist(two!.countDown({ id: "two" }))
        // A member that has counted counts again by itself if Redis has forgotten it.
        yield* eventually(Effect.map(one!.remaining, (left) => left === 1))
        yield* insist(three!.countDown({ id: "three" }))
      }
      for (const [, , opened] of plain) yield* insist(opened!.open)
      yield* Effect.forEach(opening, Fiber.join)
    }))
    yield* Effect.flatMap(
      nodes.primaries,
      (primaries) => Effect.forEach(primaries, (primary) => assertEmpty(primary, namespace))
    )
  }).pipe(Effect.scoped), 60_000)
