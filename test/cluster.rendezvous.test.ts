/** Signals and rendezvous in a Redis Cluster, and waits across the death of a primary. */
import { assert, it } from "@effect/vitest"
import { Effect, Fiber, Schema } from "effect"
import { Rendezvous, Signal } from "../src/index.ts"
import { partitionOf } from "../src/internal/actor/keys.ts"
import { cluster } from "./support/cluster.ts"
import { eventually } from "./support/eventually.ts"
import { assertEmpty, freshNamespace, node } from "./support/live.ts"
import { awaitInSync } from "./support/servers.ts"
import { isPending } from "./support/several.ts"

const partitions = 6

it.live("waits go on in a Cluster when a primary dies, and nothing is lost or doubled", () =>
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
      const contexts = yield* Effect.forEach([0, 1, 2], () =>
        node({ cluster: nodes.startupNodes }, { namespace, partitions, lease: "12 seconds", margin: "500 millis" }))
      const parties = yield* Effect.forEach(contexts, (context) =>
        Effect.forEach(names, (name) =>
          Effect.all({
            place: Rendezvous.make({ name, schema: Schema.String }),
            signal: Signal.make({ name })
          })).pipe(Effect.provideContext(context)))
      // Each waits for the next coordinator, in every partition.
      const begin = Effect.forEach(names, (name, at) =>
        Effect.gen(function*() {
          const [one, two] = [parties[at % 3]![at]!, parties[(at + 1) % 3]![at]!]
          const waiting = [
            yield* Effect.forkDetach(one.place.take()),
            yield* Effect.forkDetach(one.place.exchange(`first ${name}`)),
            yield* Effect.forkDetach(one.signal.await)
          ] as const
          yield* eventually(
            Effect.map(
              Effect.all([two.place.present, two.signal.queued]),
              ([{ exchangers, takers }, signals]) =>
                takers + exchangers + signals === 3
            )
          )
          return { name, one, two, waiting }
        }), { concurrency: "unbounded" })
      const finish = (begun: Effect.Success<typeof begin>) =>
        Effect.forEach(begun, ({ name, one, two, waiting: [taking, exchanging, awaiting] }) =>
          Effect.gen(function*() {
            assert.isTrue(isPending(taking) && isPending(exchanging) && isPending(awaiting))
            yield* two.place.give(name)
            assert.strictEqual(yield* Fiber.join(taking), name)
            assert.strictEqual(yield* two.place.exchange(`second ${name}`), `first ${name}`)
            assert.strictEqual(yield* Fiber.join(exchanging), `second ${name}`)
            yield* two.signal.set
            yield* Fiber.join(awaiting)
            assert.isFalse(yield* one.signal.isSet)
            assert.deepStrictEqual(yield* one.place.present, { givers: 0, takers: 0, exchangers: 0 })
          }), { concurrency: "unbounded" })
      yield* Effect.timeout(Effect.flatMap(begin, finish), "5 seconds")

      const begun = yield* begin
      yield* awaitInSync(victim, yield* nodes.replicasOf(victim))
      yield* victim.stop()
      yield* nodes.awaitPromotion(tag, victim)
      yield* Effect.timeout(finish(begun), "10 seconds")
    }))
    yield* Effect.flatMap(nodes.primaries, Effect.forEach((primary) => assertEmpty(primary, namespace)))
  }).pipe(Effect.scoped), 60_000)
