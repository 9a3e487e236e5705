/** A task group on a Redis Cluster: workers and waiters in three coordinators, while the group's primary dies. */
import { assert, it } from "@effect/vitest"
import { Effect, Fiber, Schema, Stream } from "effect"
import { TaskGroup } from "../src/index.ts"
import { partitionOf } from "../src/internal/actor/keys.ts"
import { awake } from "./support/awake.ts"
import { cluster } from "./support/cluster.ts"
import { eventually } from "./support/eventually.ts"
import { assertEmpty, freshNamespace, node } from "./support/live.ts"
import { awaitInSync } from "./support/servers.ts"

const partitions = 6

const within = <A, E, R>(effect: Effect.Effect<A, E, R>, millis: number, what: string): Effect.Effect<A, E, R> =>
  Effect.raceFirst(
    effect,
    Effect.andThen(awake(millis), Effect.die(new Error(`${what}: not within ${millis} ms`)))
  )

const scenario = (missed: boolean) =>
  Effect.gen(function*() {
    const nodes = yield* cluster({ replicas: 1 })
    const namespace = freshNamespace()
    const options = { namespace, partitions, lease: "12 seconds", margin: "500 millis" } as const
    const tag = `{${namespace}:0${partitionOf("job", partitions)}}`
    const victim = yield* nodes.serving(tag)
    const [replica] = yield* nodes.replicasOf(victim)
    yield* Effect.scoped(Effect.gen(function*() {
      const [one, two, three] = yield* Effect.forEach([1, 2, 3], () =>
        Effect.gen(function*() {
          const context = yield* node({ cluster: nodes.startupNodes }, options)
          return yield* Effect.provideContext(
            TaskGroup.make({ name: "job", result: Schema.Number, shards: 4, timeToLive: "100 millis" }),
            context
          )
        }))
      const waiting = yield* Effect.forkChild(three!.awaitAll({ onWorkerLost: "wait" }))
      const shown: Array<TaskGroup.Progress> = []
      yield* Effect.forkScoped(Stream.runForEach(three!.changes, (it) => Effect.sync(() => shown.push(it))))
      yield* one!.run("a", Effect.succeed(1))
      const task = yield* two!.register("b")
      yield* eventually(Effect.sync(() => shown.at(-1)?.registered === 2), { message: "events" })
      yield* awaitInSync(victim, [replica!])
      // The replica misses what was acknowledged last, and the next primary has never received it.
      if (missed) yield* nodes.cut(replica!)
      yield* one!.run("c", Effect.succeed(3))
      if (!missed) yield* awaitInSync(victim, [replica!])
      yield* victim.stop()
      if (missed) yield* replica!.resume
      yield* nodes.awaitPromotion(tag, victim)
      const submitted = yield* within(Effect.result(task.submit(2)), 8000, "the worker")
      // Its session may have been lost with what it had done last; then it has been notified.
      if (submitted._tag === "Failure") {
        assert.include(["LeaseLost", "SubmitRefused"], submitted.failure.reason._tag)
        yield* within(
          eventually(two!.run("b", Effect.succeed(2)), { timeout: "15 seconds", message: "b" }),
          16_000,
          "again"
        )
      }
      assert.isUndefined(waiting.pollUnsafe())
      yield* within(two!.run("d", Effect.succeed(4)), 8000, "the last one")
      const results = yield* within(Fiber.join(waiting), 8000, "the waiter")
      assert.deepStrictEqual([...results].sort(), [["a", 1], ["b", 2], ["c", 3], ["d", 4]])
      yield* eventually(Effect.sync(() => shown.at(-1)?.done === 4), { message: "progress" })
    }))
    yield* Effect.flatMap(
      nodes.primaries,
      (primaries) => Effect.forEach(primaries, (primary) => assertEmpty(primary, namespace))
    )
  }).pipe(Effect.scoped)

it.live("a wait goes on across the death of a primary", () => scenario(false), 60_000)

it.live("what was submitted is submitted again when the next primary has missed it", () => scenario(true), 60_000)
