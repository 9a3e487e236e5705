import { assert } from "@effect/vitest"
import { Effect, Fiber, Option, Schema, Stream } from "effect"
import { Leader } from "../../src/index.ts"
import { eventually } from "../support/eventually.ts"
import { waits } from "../support/requests.ts"
import type { Program, Rows } from "./matrix.ts"

export const requests = [
  ["leader.campaign", "leader:chief"],
  ["leader.observe", "leader:chief"],
  ["leader.proclaim", "leader:chief"],
  ["leader.nominate", "leader:chief"],
  ["leader.state", "leader:chief"],
  ["leader.candidates", "leader:chief"],
  ["session.leave", "leader:chief"]
] as const satisfies Rows

const election = (value: string) => Leader.make({ name: "chief", schema: Schema.String, value })

export const program: Program = ({ namespace, other, server }) =>
  Effect.gen(function*() {
    const mine = yield* election("mine")
    const theirs = yield* Effect.provideContext(election("theirs"), other)
    const seen: Array<string | undefined> = []
    const watching = yield* Effect.forkChild(Stream.runForEach(mine.observe, (info) =>
      Effect.sync(() => {
        seen.push(Option.getOrUndefined(info)?.value)
      })))
    yield* eventually(Effect.sync(() => assert.deepStrictEqual(seen, [undefined])))
    const lease = yield* mine.campaign()
    const first = Option.getOrThrow(yield* theirs.leader)
    assert.deepInclude(first, { value: "mine", term: lease.token })
    yield* mine.proclaim("better")
    const waiting = yield* Effect.forkChild(theirs.lead(Effect.never))
    yield* waits(server, namespace, "leader:chief", 1)
    const [candidate] = yield* mine.candidates
    yield* mine.transferTo(candidate!)
    yield* eventually(Effect.map(theirs.isLeader, (leads) => leads))
    const second = Option.getOrThrow(yield* mine.leader)
    assert.isAbove(second.term, first.term)
    yield* Fiber.interrupt(waiting)
    yield* eventually(
      Effect.sync(() => assert.deepStrictEqual(seen, [undefined, "mine", "better", "theirs", undefined]))
    )
    yield* Fiber.interrupt(watching)
  })
