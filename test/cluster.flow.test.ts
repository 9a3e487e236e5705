/** Flows in a Redis Cluster whose slots migrate: a step of a run is executed as a whole or not at all. */
import { assert, it } from "@effect/vitest"
import { Deferred, Effect, Fiber, Layer, Schema } from "effect"
import { Coordinator, Flow, Queue, Redis } from "../src/index.ts"
import { partitionOf } from "../src/internal/actor/keys.ts"
import { placeOf, spaceOf } from "../src/internal/hold/place.ts"
import { request } from "../src/internal/hold/request.ts"
import { cluster } from "./support/cluster.ts"
import { eventually } from "./support/eventually.ts"
import { delivered, stampOf } from "./support/flows.ts"
import { assertEmpty, freshNamespace } from "./support/live.ts"
import type { Server } from "./support/servers.ts"

const partitions = 6

class Work extends Queue.Service<Work>()("work", {
  payload: Schema.String,
  success: Schema.String,
  retention: "200 millis"
}) {}

const refused = (server: Server) =>
  Effect.map(server.cli("INFO", "errorstats"), (text) => Number(/errorstat_TRYAGAIN:count=(\d+)/.exec(text)?.[1] ?? 0))

it.live("a run whose slot migrates goes on when the slot has moved", () =>
  Effect.gen(function*() {
    const nodes = yield* cluster()
    const namespace = freshNamespace()
    const tag = `{${namespace}:0${partitionOf("chain", partitions)}}`
    yield* Effect.scoped(Effect.gen(function*() {
      const begun = yield* Deferred.make<void>()
      const gate = yield* Deferred.make<void>()
      const work = yield* Work
      yield* work.run((text) =>
        Effect.as(Effect.andThen(Deferred.succeed(begun, undefined), Deferred.await(gate)), text.toUpperCase())
      ).pipe(Effect.forkScoped)
      const chain = yield* Flow.make("chain", { queues: [Work], retention: "300 millis" }, (flow) => {
        const first = flow.job(Work, "a")
        return flow.job(Work, "b", { after: [first] })
      })
      const run = yield* chain.start(undefined)
      yield* Deferred.await(begun)
      yield* delivered("chain")
      const stamp = yield* stampOf("chain", run.id)
      const key = `${tag}:flow-nodes:chain/${run.id}`
      const from = yield* nodes.serving(tag)
      const to = (yield* nodes.primaries).find((server) => server !== from)!
      const before = yield* from.cli("HGETALL", key)
      const refusals = yield* refused(from)

      const migration = yield* nodes.migration(tag, to)
      yield* migration.begin
      const place = placeOf(
        spaceOf(yield* Coordinator.Coordinator),
        "flow",
        `chain/${run.id}`,
        "run",
        undefined,
        "chain"
      )
      const ended = yield* Effect.forkChild(
        request(place, "flow.ended", [
          stamp,
          "1",
          0,
          0,
          "success",
          "[\"success\",\"A\"]",
          ""
        ])
      )
      yield* eventually(Effect.gen(function*() {
        assert.isAbove(yield* refused(from), refusals)
      }))
      assert.strictEqual(yield* from.cli("HGETALL", key), before)
      yield* migration.complete
      assert.deepStrictEqual(yield* Fiber.join(ended), ["ended"])
      yield* Deferred.succeed(gate, undefined)
      assert.strictEqual(yield* run.await, "B")
      yield* delivered("chain")
      yield* work.obliterate
    })).pipe(
      Effect.provide(
        Work.layer.pipe(
          Layer.provideMerge(
            Coordinator.layer({ namespace, partitions, lease: "12 seconds", margin: "500 millis" }).pipe(
              Layer.provideMerge(Redis.layer({ cluster: nodes.startupNodes }))
            )
          )
        )
      )
    )
    yield* Effect.flatMap(nodes.primaries, Effect.forEach((primary) => assertEmpty(primary, namespace)))
  }).pipe(Effect.scoped), 60_000)
