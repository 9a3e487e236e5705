import { assert } from "@effect/vitest"
import { Effect, Fiber, Schema } from "effect"
import { Barrier } from "../../src/index.ts"
import { eventually } from "../support/eventually.ts"
import type { Program, Rows } from "./matrix.ts"

export const requests = [
  ["barrier.join", "barrier:sum"],
  ["barrier.arrive", "barrier:sum"],
  ["barrier.depart", "barrier:sum"],
  ["barrier.release", "barrier:sum"],
  ["barrier.reset", "barrier:sum"],
  ["barrier.state", "barrier:sum"],
  ["session.leave", "barrier:sum"]
] as const satisfies Rows

/** What was not answered in time fails; a request may have been executed, and making it again changes nothing then. */
const insisting = <A, R>(self: Effect.Effect<A, Barrier.BarrierError, R>) =>
  Effect.retry(self, { while: ({ reason }) => reason._tag === "Timeout", times: 2 })

export const program: Program = ({ line, other }) =>
  Effect.gen(function*() {
    const acted: Array<number> = []
    const options = { name: "sum", parties: 2, schema: Schema.Number } as const
    const barrier = yield* insisting(Barrier.make({
      ...options,
      action: ({ generation }) => Effect.sync(() => acted.push(generation))
    }))
    const same = yield* Effect.provideContext(Barrier.make(options), other)

    const first = yield* Effect.forkChild(barrier.await(1))
    yield* eventually(Effect.map(insisting(barrier.arrived), (arrived) => arrived === 1))
    // A new connection asks what it missed.
    yield* line.closeAll
    assert.deepStrictEqual(yield* same.await(2), { generation: 1, index: 1, contributions: [1, 2] })
    assert.deepStrictEqual(yield* Fiber.join(first), { generation: 1, index: 0, contributions: [1, 2] })

    const second = yield* Effect.forkChild(same.await(3))
    yield* eventually(Effect.map(insisting(same.arrived), (arrived) => arrived === 1))
    assert.deepStrictEqual(yield* barrier.await(4), { generation: 2, index: 1, contributions: [3, 4] })
    assert.deepStrictEqual(yield* Fiber.join(second), { generation: 2, index: 0, contributions: [3, 4] })
    assert.deepStrictEqual(acted, [1, 2])

    const third = yield* Effect.forkChild(Effect.flip(same.await(5)))
    yield* eventually(Effect.map(insisting(same.arrived), (arrived) => arrived === 1))
    yield* insisting(barrier.reset)
    assert.deepInclude((yield* Fiber.join(third) as Effect.Effect<Barrier.BarrierError>).reason, {
      _tag: "BarrierBroken",
      generation: 3,
      missing: 1,
      why: "reset"
    })

    const fourth = yield* Effect.forkChild(barrier.await(6))
    yield* eventually(Effect.map(insisting(same.arrived), (arrived) => arrived === 1))
    yield* Fiber.interrupt(fourth)
    yield* eventually(Effect.map(insisting(same.arrived), (arrived) => arrived === 0))

    // It has departed, or the answer has not come: then it has failed all the same.
    const fifth = yield* Effect.flip(
      barrier.await(7, { wait: "100 millis" }) as Effect.Effect<unknown, Barrier.BarrierError>
    )
    assert.strictEqual(fifth.reason._tag, "WaitTimeout")
    yield* eventually(Effect.map(insisting(same.arrived), (arrived) => arrived === 0))
  })
