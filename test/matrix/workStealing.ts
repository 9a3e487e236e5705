import { assert } from "@effect/vitest"
import { Deferred, Effect, Fiber, Schema } from "effect"
import { type Queue, WorkStealing } from "../../src/index.ts"
import { eventually } from "../support/eventually.ts"
import { onNode } from "../support/live.ts"
import { insist, leads } from "../support/uncertain.ts"
import type { Program, Rows } from "./matrix.ts"

export const requests = [
  ["queue.employ", "queue:mails"],
  ["queue.deques", "queue:mails"],
  ["queue.offer", "queue:mails"],
  ["queue.done", "queue:mails"],
  ["queue.complete", "queue:mails"],
  ["session.leave", "queue:mails"]
] as const satisfies Rows

export const program: Program = ({ other }) =>
  Effect.gen(function*() {
    const make = (worker: string) =>
      WorkStealing.make({ name: "mails", payload: Schema.Number, retention: "500 millis", worker })
    const mails = yield* insist(make("mine"))
    const theirs = yield* onNode(other)(make("theirs"))
    const of = <K extends keyof Queue.State>(key: K) => Effect.map(theirs.state, (state) => state[key])
    const gate = yield* Deferred.make<void>()
    const begun: Array<number> = []
    const running = yield* Effect.forkChild(insist(mails.run((n) => {
      begun.push(n)
      if (n === 4) return mails.followUp(5)
      return n === 0 ? Deferred.await(gate) : Effect.void
    })))
    yield* eventually(Effect.map(of("workers"), (workers) => assert.strictEqual(workers, 1)))
    yield* leads(Effect.asVoid(mails.offer(0)), undefined, of("active"), 1)
    yield* leads(Effect.asVoid(mails.offerAll([1, 2])), undefined, of("waiting"), 2)
    yield* leads(Effect.asVoid(theirs.offer(3, { to: "mine" })), undefined, of("waiting"), 3)
    assert.deepStrictEqual(
      (yield* insist(mails.workers)).map(({ active, name, waiting }) => [name, active, waiting]),
      [["mine", 1, 3]]
    )
    // The oldest two of three are stolen.
    const stolen: Array<number> = []
    const stealing = yield* Effect.forkChild(insist(theirs.run((n) => {
      stolen.push(n)
      return Effect.void
    })))
    yield* eventually(Effect.map(of("completed"), (completed) => assert.strictEqual(completed, 3)))
    assert.sameMembers([...new Set(stolen)], [1, 2, 3])
    yield* Fiber.interrupt(stealing)
    yield* eventually(Effect.map(of("workers"), (workers) => assert.strictEqual(workers, 1)))
    yield* Deferred.succeed(gate, undefined)
    yield* eventually(Effect.map(of("active"), (active) => assert.strictEqual(active, 0)))
    yield* insist(mails.offer(4, { id: "four" }))
    yield* eventually(Effect.sync(() => assert.include(begun, 5)))
    yield* eventually(Effect.map(theirs.state, ({ active, waiting }) => assert.strictEqual(active + waiting, 0)))
    yield* Fiber.interrupt(running)
    yield* eventually(Effect.map(of("workers"), (workers) => assert.strictEqual(workers, 0)))
  })
