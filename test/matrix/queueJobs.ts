import { assert } from "@effect/vitest"
import { Effect, Fiber, Option } from "effect"
import { Queue } from "../../src/index.ts"
import { eventually } from "../support/eventually.ts"
import { insist, leads } from "../support/uncertain.ts"
import { opened } from "./mails.ts"
import type { Program, Rows } from "./matrix.ts"

export const requests = [
  ["queue.promote", "queue:mails"],
  ["queue.reschedule", "queue:mails"],
  ["queue.update", "queue:mails"],
  ["queue.seek", "queue:mails"]
] as const satisfies Rows

export const program: Program = ({ other }) =>
  Effect.gen(function*() {
    const { mails, of, theirs } = yield* opened(other)
    const stateOf = (id: string) =>
      Effect.map(theirs.job(id).status, (status) => Option.isSome(status) ? status.value.state : "none")
    yield* theirs.offer(1, { id: "one", delay: "10 seconds" })
    yield* theirs.offer(2, { id: "two" })
    yield* leads(mails.job("two").reschedule({ delay: "10 seconds" }), true, stateOf("two"), "delayed")
    yield* leads(mails.job("one").promote, true, stateOf("one"), "waiting")
    assert.isTrue(yield* insist(mails.job("two").update(3)))
    const begun: Array<number> = []
    const running = yield* Effect.forkChild(theirs.run((n) => {
      begun.push(n)
      return n === 1 ? Effect.flatMap(Queue.Job, (job) => job.discard("no")) : Effect.void
    }))
    yield* theirs.job("two").promote
    yield* eventually(Effect.map(of("completed"), (completed) => assert.strictEqual(completed, 1)))
    assert.deepStrictEqual(begun.toSorted(), [1, 3])
    yield* theirs.pause
    yield* leads(mails.job("one").retry, true, of("waiting"), 1)
    yield* Fiber.interrupt(running)
    yield* theirs.drain({ delayed: true })
  })
