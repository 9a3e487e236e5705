import { assert } from "@effect/vitest"
import { Effect, Fiber, Schema } from "effect"
import { Coordinator, TaskGroup } from "../../src/index.ts"
import type { Program, Rows } from "./matrix.ts"

export const requests = [
  ["tasks.join", "tasks:job"],
  ["tasks.register", "tasks:job"],
  ["tasks.submit", "tasks:job"],
  ["tasks.read", "tasks:job"],
  ["tasks.reset", "tasks:job"],
  ["tasks.restore", "tasks:job"],
  ["session.leave", "tasks:job"]
] as const satisfies Rows

export const program: Program = ({ mine, namespace, other, server }) =>
  Effect.gen(function*() {
    const options = { name: "job", result: Schema.Number, keep: "100 millis" } as const
    const group = yield* TaskGroup.make(options)
    const same = yield* Effect.provideContext(TaskGroup.make(options), other)
    const task = yield* group.register("x")
    const waiting = yield* Effect.forkChild(same.awaitAll())
    assert.strictEqual((yield* same.snapshot).running, 1)
    yield* task.submit(1)
    assert.deepStrictEqual([...yield* Fiber.join(waiting)], [["x", 1]])
    assert.strictEqual(yield* group.run("x", Effect.succeed(2)), 1)

    yield* group.reset
    const { registered, round } = yield* same.snapshot
    assert.deepStrictEqual([registered, round], [0, 2])
    yield* Effect.flip(group.run("y", Effect.fail("no")))
    assert.strictEqual((yield* group.snapshot).failed, 1)
    yield* group.run("y", Effect.succeed(3))
    yield* Effect.scoped(group.register("z"))
    assert.deepInclude(yield* same.snapshot, { done: 1, lost: 1, failed: 0, running: 0, round: 2 })
    yield* same.run("z", Effect.succeed(4))

    // A session that Redis has forgotten, so that all is said again in the next one; nothing may change by that.
    const sessions = yield* Effect.provideContext(Effect.flatMap(Coordinator.Coordinator, (it) => it.sessions), mine)
    const { id, partition } = sessions[0]!
    yield* server.cli("HDEL", `{${namespace}:0${partition}}:sessions`, `s${id}`)
    yield* group.run("again", Effect.succeed(5))
    assert.deepInclude(yield* same.snapshot, { done: 3, lost: 0, failed: 0, running: 0, round: 2 })
    assert.deepStrictEqual([...yield* group.awaitAll()], [["y", 3], ["z", 4], ["again", 5]])
  })
