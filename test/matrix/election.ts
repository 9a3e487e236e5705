import { assert } from "@effect/vitest"
import { Effect, Fiber, Option, Schema, Stream } from "effect"
import { Election } from "../../src/index.ts"
import { apart } from "../../src/internal/hold/holding.ts"
import { eventually } from "../support/eventually.ts"
import { waits } from "../support/requests.ts"
import type { Program, Rows } from "./matrix.ts"

export const requests = [
  ["election.campaign", "election:chief"],
  ["election.observe", "election:chief"],
  ["election.proclaim", "election:chief"],
  ["election.nominate", "election:chief"],
  ["election.state", "election:chief"],
  ["election.candidates", "election:chief"],
  ["session.leave", "election:chief"]
] as const satisfies Rows

const election = (value: string) => Election.make({ name: "chief", schema: Schema.String, value })

/** What was not answered in time fails; a request may have been executed, and making it again changes nothing then. */
const insisting = <A>(self: Effect.Effect<A, Election.ElectionError>) =>
  Effect.retry(self, { while: ({ reason }) => reason._tag === "Timeout", times: 2 })

export const program: Program = ({ namespace, other, server }) =>
  Effect.gen(function*() {
    const mine = yield* election("mine")
    const theirs = yield* Effect.provideContext(election("theirs"), other)
    const seen: Array<string | undefined> = []
    const watching = yield* Effect.forkChild(Stream.runForEach(mine.changes, (info) =>
      Effect.sync(() => {
        seen.push(Option.getOrUndefined(info)?.value)
      })))
    yield* eventually(Effect.sync(() => assert.deepStrictEqual(seen, [undefined])))
    const lease = yield* mine.campaign()
    const first = Option.getOrThrow(yield* insisting(theirs.leader))
    assert.deepInclude(first, { value: "mine", term: lease.token })
    yield* insisting(mine.proclaim("better"))
    const waiting = yield* Effect.forkChild(apart(theirs.lead(Effect.never)))
    yield* waits(server, namespace, "election:chief", 1)
    const [candidate] = yield* insisting(mine.candidates)
    yield* insisting(mine.transferTo(candidate!))
    yield* eventually(Effect.map(theirs.isLeader, (leads) => leads))
    const second = Option.getOrThrow(yield* insisting(mine.leader))
    assert.isAbove(second.term, first.term)
    yield* Fiber.interrupt(waiting)
    yield* eventually(
      Effect.sync(() => assert.deepStrictEqual(seen, [undefined, "mine", "better", "theirs", undefined]))
    )
    yield* Fiber.interrupt(watching)
  })
