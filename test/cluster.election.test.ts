/** An election on a Redis Cluster whose primary dies. */
import { assert, it } from "@effect/vitest"
import { Deferred, Effect, Fiber, Option, Schema, Stream } from "effect"
import { Coordinator, Election } from "../src/index.ts"
import { partitionOf } from "../src/internal/actor/keys.ts"
import { cluster } from "./support/cluster.ts"
import { eventually } from "./support/eventually.ts"
import { exclusion } from "./support/exclusion.ts"
import { assertEmpty, freshNamespace, node } from "./support/live.ts"
import { within } from "./support/requests.ts"

const partitions = 6

it.live("an election goes on when the primary dies, and all see the same leader", () =>
  Effect.gen(function*() {
    const nodes = yield* cluster({ replicas: 1 })
    const namespace = freshNamespace()
    const options = { namespace, partitions, lease: "12 seconds", margin: "500 millis" } as const
    const tag = `{${namespace}:0${partitionOf("chief", partitions)}}`
    const watch = exclusion()
    yield* Effect.scoped(Effect.gen(function*() {
      const losses: Array<string | undefined> = []
      const elections: Array<Election.Election<string>> = []
      const seen: ReadonlyArray<Array<Election.Info<string> | undefined>> = [[], [], []]
      for (const mine of seen) {
        const context = yield* node({ cluster: nodes.startupNodes }, options)
        const election = yield* Effect.provideContext(
          Election.make({ name: "chief", schema: Schema.String, value: `${elections.length}` }),
          context
        )
        yield* Effect.flatMap(Coordinator.Coordinator, (coordinator) =>
          Effect.forkScoped(Stream.runForEach(coordinator.changes, ({ reason, to }) =>
            Effect.sync(() => {
              if (to === "lost") {
                losses.push(reason)
              }
            })))).pipe(Effect.provideContext(context))
        yield* Effect.forkScoped(
          Stream.runForEach(election.changes, (info) =>
            Effect.sync(() =>
              mine.push(Option.getOrUndefined(info))
            ))
        )
        elections.push(election)
      }

      // They lead by turns.
      const terms = [0, 0, 0]
      const candidates = yield* Effect.forEach(elections, (election, at) =>
        Effect.forkChild(
          election.leadForever(
            Effect.tap(watch.enter("chief", { millis: 1 + at }), () => Effect.sync(() => terms[at]!++))
          )
        ))
      const goOn = (count: number) => {
        const before = [...terms]
        return eventually(
          Effect.sync(() => terms.every((term, at) => term >= before[at]! + count)),
          { timeout: "20 seconds", message: `${count} terms of each` }
        )
      }
      yield* goOn(10)
      assert.deepStrictEqual(watch.violations, [])
      const victim = yield* nodes.serving(tag)
      yield* victim.stop()
      yield* nodes.awaitPromotion(tag, victim)
      yield* goOn(10)
      assert.deepStrictEqual(watch.violations.filter(({ what }) => what === "token"), [])
      // Two at once only where the primary took a write with it, and then a process was notified.
      if (losses.length === 0) assert.deepStrictEqual(watch.violations, [])
      for (const reason of losses) assert.include(["rolledBack", "unknown"], reason)
      yield* Effect.forEach(candidates, Fiber.interrupt, { concurrency: "unbounded" })
      assert.isFalse(watch.busy)

      const leave = yield* Deferred.make<void>()
      const last = yield* Effect.forkChild(elections[1]!.lead(Deferred.await(leave)))
      yield* within(eventually(elections[1]!.isLeader), 3000, "the last term")
      const leader = Option.getOrThrow(yield* elections[0]!.leader)
      assert.strictEqual(leader.value, "1")
      yield* eventually(
        Effect.sync(() => {
          for (const mine of seen) assert.strictEqual(mine.at(-1)?.term, leader.term)
        })
      )
      for (const mine of seen) {
        const terms = mine.flatMap((info) => info === undefined ? [] : [info.term])
        // The replica may have missed that a term was over: then, and once, observers receive that term again.
        const again = terms.filter((term, at) => term < (terms[at - 1] ?? 0))
        assert.isAtMost(again.length, losses.length === 0 ? 0 : 1, `terms: ${terms.join(" ")}`)
        assert.isAbove(new Set(terms).size, 30)
      }
      yield* Deferred.succeed(leave, undefined)
      yield* Fiber.join(last)
    }))
    yield* Effect.flatMap(
      nodes.primaries,
      (primaries) => Effect.forEach(primaries, (primary) => assertEmpty(primary, namespace))
    )
  }).pipe(Effect.scoped), 60_000)
