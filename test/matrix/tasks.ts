import { assert } from "@effect/vitest"
import { Effect, Fiber, Schema } from "effect"
import { Coordinator, TaskGroup } from "../../src/index.ts"
import { eventually } from "../support/eventually.ts"
import { forget } from "../support/sessions.ts"
import type { Program, Rows } from "./matrix.ts"

export const requests = [
  ["taskGroup.join", "taskGroup:job"],
  ["taskGroup.register", "taskGroup:job"],
  ["taskGroup.submit", "taskGroup:job"],
  ["taskGroup.read", "taskGroup:job"],
  ["taskGroup.reset", "taskGroup:job"],
  ["taskGroup.restore", "taskGroup:job"],
  ["session.leave", "taskGroup:job"]
] as const satisfies Rows

/** What was not answered in time fails; a request may have been executed, and making it again changes nothing then. */
const insisting = <A, E, R>(self: Effect.Effect<A, E, R>) =>
  Effect.retry(self, {
    while: (error) => error instanceof TaskGroup.TaskGroupError && error.reason._tag === "Timeout",
    times: 10
  })

export const program: Program = ({ mine, namespace, other, server }) =>
  Effect.gen(function*() {
    const options = { name: "job", result: Schema.Number, timeToLive: "100 millis" } as const
    const group = yield* insisting(TaskGroup.make(options))
    const same = yield* Effect.provideContext(TaskGroup.make(options), other)
    const task = yield* insisting(group.register("x"))
    const waiting = yield* Effect.forkChild(same.awaitAll())
    assert.strictEqual((yield* same.snapshot).running, 1)
    yield* task.submit(1)
    assert.deepStrictEqual([...yield* Fiber.join(waiting)], [["x", 1]])
    assert.strictEqual(yield* insisting(group.run("x", Effect.succeed(2))), 1)

    // Each one is another reset. One that was not answered in time is on its way, and is executed all the same.
    yield* Effect.catchTag(group.reset, "TaskGroupError", () =>
      eventually(Effect.map(same.snapshot, ({ round }) =>
        round === 2)))
    const { registered, round } = yield* same.snapshot
    assert.deepStrictEqual([registered, round], [0, 2])
    yield* Effect.flip(insisting(group.run("y", Effect.fail("no"))))
    assert.strictEqual((yield* insisting(group.snapshot)).failed, 1)
    yield* insisting(group.run("y", Effect.succeed(3)))
    yield* insisting(Effect.scoped(group.register("z")))
    assert.deepInclude(yield* same.snapshot, { done: 1, lost: 1, failed: 0, running: 0, round: 2 })
    yield* same.run("z", Effect.succeed(4))

    // A session that Redis has forgotten, so that all is said again in the next one; nothing may change by that.
    const sessions = yield* Effect.provideContext(
      Effect.flatMap(Coordinator.Coordinator, (it) =>
        it.sessions),
      mine
    )
    const { id, partition } = sessions[0]!
    yield* forget(server, namespace, id, partition)
    yield* insisting(group.run("again", Effect.succeed(5)))
    assert.deepInclude(yield* same.snapshot, { done: 3, lost: 0, failed: 0, running: 0, round: 2 })
    assert.deepStrictEqual([...yield* group.awaitAll()], [["y", 3], ["z", 4], ["again", 5]])
  })
