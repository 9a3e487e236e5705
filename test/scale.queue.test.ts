/** Long queues: what a job costs does not depend on how many others there are. */
import { assert, layer } from "@effect/vitest"
import { Deferred, Effect, Schema } from "effect"
import { setFlagsFromString } from "node:v8"
import { runInNewContext } from "node:vm"
import { Queue } from "../src/index.ts"
import { TestServer } from "./support/live.ts"
import { on, several } from "./support/several.ts"

const live = { excludeTestServices: true, timeout: "180 seconds" } as const

setFlagsFromString("--expose-gc")
const collect = runInNewContext("gc") as () => void

const upTo = (count: number) => Array.from({ length: count }, (_, at) => at)

const emptied = <A>(queue: Queue.Queue<A>) => Effect.addFinalizer(() => Effect.orDie(queue.drain({ delayed: true })))

/** Runs as many jobs as there are, and looks at each. */
const drained = <A>(queue: Queue.Queue<A>, count: number, look: (done: number) => void = () => {}) =>
  Effect.gen(function*() {
    const over = yield* Deferred.make<void>()
    let done = 0
    const handler = Effect.suspend(() => {
      look(++done)
      return done === count ? Deferred.succeed(over, undefined) : Effect.void
    })
    yield* Effect.raceFirst(queue.run(() => handler, { concurrency: 50 }), Deferred.await(over))
  })

/** How often Redis was called, by clients and by commands inside of functions. */
const calls = Effect.gen(function*() {
  const server = yield* TestServer
  const stats = yield* server.cli("INFO", "commandstats")
  return [...stats.matchAll(/cmdstat_(?!ping)[^:]+:calls=(\d+)/g)].reduce((sum, [, count]) => sum + Number(count), 0)
})

layer(TestServer.layer, live)("a long queue", (it) => {
  it.effect("costs no more per job when 100,000 others are delayed", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const [short, long] = yield* on(
          a!,
          Effect.all([
            Effect.tap(Queue.make({ name: "short", payload: Schema.Number }), emptied),
            Effect.tap(Queue.make({ name: "long", payload: Schema.Number }), emptied)
          ])
        )
        const cost = (queue: Queue.Queue<number>) =>
          Effect.gen(function*() {
            const before = yield* calls
            yield* queue.offerAll(upTo(5000))
            yield* drained(queue, 5000)
            return (yield* calls) - before
          })
        yield* long.offerAll(upTo(100_000), { delay: "1 hour" })
        assert.strictEqual((yield* long.state).delayed, 100_000)
        yield* cost(short)
        const alone = yield* cost(short)
        const beside = yield* cost(long)
        // Requests of a turn share a call, and turns differ.
        assert.isBelow(beside, alone * 1.15)
        assert.strictEqual((yield* long.state).delayed, 100_000)
      }), {}))

  // 1,000,000 are a case of the benchmark, which also compares the time that they take.
  it.effect("is drained with flat memory", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, Effect.tap(Queue.make({ name: "many", payload: Schema.Number }), emptied))
        const count = 100_000
        yield* queue.offerAll(upTo(count))
        const heaps: Array<number> = []
        yield* drained(queue, count, (done) => {
          if (done % (count / 10) !== 0) return
          collect()
          heaps.push(process.memoryUsage().heapUsed)
        })
        // 10,000 jobs lie between two of these; with one of 100 bytes kept for each, it would have grown by 9 MB.
        assert.isBelow(Math.max(...heaps) - heaps[0]!, 3 * 1024 * 1024, heaps.join())
      }), {}))
})
