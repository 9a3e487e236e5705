import { assert } from "@effect/vitest"
import { Effect, Fiber } from "effect"
import { Coordinator } from "../../src/index.ts"
import { spaceOf } from "../../src/internal/hold/place.ts"
import { innerOf, workErrands } from "../../src/internal/queue/errands.ts"
import { fail } from "../../src/internal/queue/errors.ts"
import { eventually } from "../support/eventually.ts"
import { insist, leads } from "../support/uncertain.ts"
import { opened } from "./mails.ts"
import type { Program, Rows } from "./matrix.ts"

export const requests = [
  ["queue.offer", "queue:mails"],
  ["queue.finish", "queue:mails"],
  ["queue.work", "errands:of mails"],
  ["queue.done", "errands:of mails"],
  ["queue.retry", "errands:of mails"],
  ["session.leave", "errands:of mails"]
] as const satisfies Rows

export const program: Program = ({ other }) =>
  Effect.gen(function*() {
    const { mails, of } = yield* opened(other)
    const told: Array<unknown> = []
    const delivering = workErrands({
      space: spaceOf(yield* Coordinator.Coordinator),
      name: "of mails",
      partitions: innerOf(mails).partitions,
      fail,
      handler: ([, reference, , outcome], { attempt }) => {
        told.push([reference, outcome])
        return attempt === 1 && reference === "one" ? Effect.fail("no") : Effect.void
      }
    })
    const delivers = yield* Effect.forkChild(Effect.scoped(Effect.andThen(insist(delivering), Effect.never)))
    const offer = (n: number, id: string) =>
      leads(
        Effect.asVoid(innerOf(mails).offerFor(n, { id }, { errands: "of mails", reference: id })),
        undefined,
        of("waiting"),
        n
      )
    yield* offer(1, "one")
    yield* offer(2, "two")
    const running = yield* Effect.forkChild(insist(mails.run(() => Effect.void)))
    yield* eventually(Effect.map(of("completed"), (completed) => assert.strictEqual(completed, 2)))
    // An errand is delivered until its handler has succeeded.
    yield* eventually(Effect.sync(() => {
      assert.deepStrictEqual(told.toSorted(), [
        ["one", ["success", null]],
        ["one", ["success", null]],
        ["two", ["success", null]]
      ])
    }))
    yield* Fiber.interrupt(running)
    yield* eventually(Effect.map(of("workers"), (workers) => assert.strictEqual(workers, 0)))
    yield* Fiber.interrupt(delivers)
  })
