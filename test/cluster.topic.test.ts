/** A topic of several shards in a Redis Cluster, across the death of a primary. */
import { assert, it } from "@effect/vitest"
import { Effect, Fiber, Schedule, Schema, Stream } from "effect"
import { Topic } from "../src/index.ts"
import { partitionOf } from "../src/internal/actor/keys.ts"
import { cluster } from "./support/cluster.ts"
import { eventually } from "./support/eventually.ts"
import { assertEmpty, freshNamespace, node } from "./support/live.ts"
import { awaitInSync } from "./support/servers.ts"

const [partitions, shards] = [6, 3]

/** Keys of the shards in turn. */
const keys = Array.from(
  { length: 9 },
  (_, at) =>
    Array.from({ length: 100 }, (_, n) => `${at} ${n}`).find((key) => partitionOf(key, shards) === at % shards)!
)

it.live(
  "a topic of several shards goes on in a Cluster when a primary dies, in the order of each key",
  () =>
    Effect.gen(function*() {
      const nodes = yield* cluster({ replicas: 1 })
      // Each shard is on a primary of its own.
      let namespace = freshNamespace()
      const primaries = Effect.suspend(() =>
        Effect.forEach(Array.from({ length: shards }), (_, at) => nodes.serving(`{${namespace}:0${at}}`))
      )
      while (new Set(yield* primaries).size < shards) namespace = freshNamespace()
      const [victim] = yield* primaries
      const colocate = Array.from({ length: 100 }, (_, n) => `name${n}`).find((name) =>
        partitionOf(name, partitions) === 0
      )!
      yield* Effect.scoped(Effect.gen(function*() {
        const topics = yield* Effect.forEach([0, 1], () =>
          Effect.flatMap(
            node({ cluster: nodes.startupNodes }, { namespace, partitions, lease: "12 seconds", margin: "500 millis" }),
            (context) =>
              Effect.provideContext(Topic.make({ name: "numbers", schema: Schema.Number, shards, colocate }), context)
          ))
        yield* Effect.addFinalizer(() => Effect.orDie(topics[0]!.purge))
        const handled: Array<number> = []
        const read: Array<number | string> = []
        for (const topic of topics) {
          yield* Effect.forkScoped(topic.run(({ value }) => Effect.sync(() => handled.push(value)), {
            group: "g",
            orderBy: "key",
            from: "beginning",
            concurrency: 4
          }))
        }
        const subscribed = yield* topics[1]!.subscribed()
        yield* Effect.forkChild(
          Stream.runForEach(
            subscribed,
            (element) => Effect.sync(() => read.push(element._tag === "Event" ? element.value : element._tag))
          )
        )
        // The next event of a key is published when the one before it is confirmed, by the other process.
        const confirmed = keys.map(() => 0)
        let [isPaused, isOver] = [false, false]
        const publishing = yield* Effect.forEach(keys, (key, at) =>
          Effect.forkChild(Effect.gen(function*() {
            while (!isOver) {
              const n = confirmed[at]!
              if (!isPaused) {
                const value = n * keys.length + at
                yield* Effect.retry(topics[n % 2]!.publish(value, { key, id: String(value) }), Schedule.spaced(100))
                confirmed[at] = n + 1
              }
              yield* Effect.sleep(10)
            }
          })))
        const of = (values: ReadonlyArray<number | string>, at: number) =>
          values.filter((value) => Number(value) % keys.length === at)
        const isOfVictim = (at: number) => at % shards === 0
        /** Of these keys, so many more events are published, and handled. */
        const goesOn = (isMeant: (at: number) => boolean) =>
          Effect.suspend(() => {
            const before = keys.map((_, at) => of(handled, at).length)
            return eventually(Effect.sync(() => {
              for (const [at, count] of before.entries()) {
                if (isMeant(at)) assert.isAtLeast(of(handled, at).length, count + 20, keys[at])
              }
            }))
          })
        const settled = eventually(Effect.map(topics[0]!.state, ({ groups: [group], length }) => {
          assert.strictEqual(length, confirmed.reduce((sum, count) => sum + count))
          assert.deepStrictEqual([group?.lag, group?.pending], [0, 0])
        }))
        yield* goesOn(() => true)
        const lists = yield* Effect.forEach(nodes.servers, (server) => server.cli("CLIENT", "LIST"))
        const connections = lists.flatMap((list) => [...list.matchAll(/ name=(\S+)/g)].map(([, name]) => name!))
        // Each process has one to each node, and one that reads for each partition in use.
        assert.strictEqual(connections.filter((name) => name === "lockstep:reader").length, topics.length * shards)
        assert.isAtMost(connections.length, topics.length * (nodes.servers.length + shards))
        isPaused = true
        // What is on its way is stored as well.
        yield* settled
        yield* awaitInSync(victim!, yield* nodes.replicasOf(victim!))
        yield* victim!.stop()
        isPaused = false
        yield* goesOn((at) => !isOfVictim(at))
        yield* nodes.awaitPromotion(`{${namespace}:00}`, victim!)
        yield* goesOn(() => true)
        isOver = true
        yield* Effect.timeout(Effect.forEach(publishing, Fiber.join), "10 seconds")
        yield* settled
        for (const [at, count] of confirmed.entries()) {
          const expected = Array.from({ length: count }, (_, n) => n * keys.length + at)
          // The acknowledgements that the replica did not have are made again.
          assert.deepStrictEqual([...new Set(of(handled, at))], expected)
          yield* eventually(Effect.sync(() => assert.deepStrictEqual(of(read, at), expected)))
        }
        assert.strictEqual(read.length, confirmed.reduce((sum, count) => sum + count))
      }))
      yield* Effect.flatMap(nodes.primaries, Effect.forEach((primary) => assertEmpty(primary, namespace)))
    }).pipe(Effect.scoped),
  60_000
)
