import { assert } from "@effect/vitest"
import { Effect, Fiber, Schema } from "effect"
import { Rendezvous } from "../../src/index.ts"
import { eventually } from "../support/eventually.ts"
import { insist } from "../support/uncertain.ts"
import type { Program, Rows } from "./matrix.ts"

export const requests = [
  ["rendezvous.give", "rendezvous:there"],
  ["rendezvous.take", "rendezvous:there"],
  ["rendezvous.acknowledge", "rendezvous:there"],
  ["rendezvous.exchange", "rendezvous:there"],
  ["rendezvous.accept", "rendezvous:there"],
  ["rendezvous.withdraw", "rendezvous:there"],
  ["rendezvous.state", "rendezvous:there"],
  ["session.leave", "rendezvous:there"]
] as const satisfies Rows

export const program: Program = ({ line, other }) =>
  Effect.gen(function*() {
    const options = { name: "there", schema: Schema.String } as const
    const mine = yield* Rendezvous.make(options)
    const theirs = yield* Effect.provideContext(Rendezvous.make(options), other)
    const waits = (expected: Partial<Effect.Success<typeof theirs.present>>) =>
      eventually(Effect.map(theirs.present, (waiting) => assert.deepInclude(waiting, expected)))

    const giving = yield* Effect.forkChild(mine.give("a"))
    yield* waits({ givers: 1 })
    assert.strictEqual(yield* theirs.take(), "a")
    yield* Fiber.join(giving)

    const taking = yield* Effect.forkChild(mine.takeWith((value, { attempts }) => Effect.succeed([value, attempts])))
    yield* waits({ takers: 1 })
    // A new connection reads on.
    yield* line.closeAll
    yield* theirs.give("b")
    assert.deepStrictEqual(yield* Fiber.join(taking), ["b", 1])

    const waiting = yield* Effect.forkChild(mine.exchange("mine"))
    yield* waits({ exchangers: 1 })
    assert.strictEqual(yield* theirs.exchange("theirs"), "mine")
    assert.strictEqual(yield* Fiber.join(waiting), "theirs")
    const others = yield* Effect.forkChild(theirs.exchange("theirs"))
    yield* waits({ exchangers: 1 })
    assert.strictEqual(yield* mine.exchange("mine"), "theirs")
    assert.strictEqual(yield* Fiber.join(others), "mine")

    const interrupted = yield* Effect.forkChild(mine.take())
    yield* waits({ takers: 1 })
    yield* Fiber.interrupt(interrupted)
    yield* waits({ takers: 0 })
    assert.strictEqual((yield* Effect.flip(mine.exchange("mine", { wait: "100 millis" }))).reason._tag, "WaitTimeout")
    yield* waits({ exchangers: 0 })
    // A question that was not answered in time fails.
    const left = yield* insist(mine.present)
    assert.deepStrictEqual(left, { givers: 0, takers: 0, exchangers: 0 })
  })
