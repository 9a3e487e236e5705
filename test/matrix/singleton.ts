import { assert } from "@effect/vitest"
import { Effect, Fiber, Layer, Schedule } from "effect"
import { Singleton } from "../../src/index.ts"
import { eventually } from "../support/eventually.ts"
import type { Program, Rows } from "./matrix.ts"

export const requests = [
  ["election.campaign", "singleton:tick"],
  ["singleton.last", "tick:tick"],
  ["singleton.claim", "tick:tick"]
] as const satisfies Rows

export const program: Program = ({ namespace, server }) =>
  Effect.gen(function*() {
    let runs = 0
    const count = Effect.sync(() => {
      runs++
    })
    const times = Schedule.spaced("10 millis").pipe(Schedule.upTo({ times: 2 }))
    const fiber = yield* Effect.forkChild(
      Layer.launch(Singleton.schedule("tick", count, times, { timeToLive: "100 millis" }))
    )
    yield* eventually(Effect.sync(() => assert.strictEqual(runs, 2)))
    yield* Fiber.interrupt(fiber)
    // Nothing is claimed that does not run.
    yield* eventually(Effect.map(server.cli("KEYS", `{${namespace}:*:tick`), (keys) => assert.strictEqual(keys, "")))
    assert.strictEqual(runs, 2)
  })
