/** Shared refs and counters. */
import { assert } from "@effect/vitest"
import { Effect, Fiber, Schema, Stream } from "effect"
import { Counter, Lock, SharedRef } from "../../src/index.ts"
import { eventually } from "../support/eventually.ts"
import { onNode } from "../support/live.ts"
import { asks } from "../support/requests.ts"
import { insist, leads } from "../support/uncertain.ts"
import type { Program, Rows } from "./matrix.ts"

export const requests = [
  ["sharedRef.set", "sharedRef:x"],
  ["sharedRef.compareAndSet", "sharedRef:x"],
  ["sharedRef.update", "sharedRef:x"],
  ["sharedRef.turn", "sharedRef:x"],
  ["sharedRef.fence", "sharedRef:x"],
  ["sharedRef.join", "sharedRef:x"],
  ["sharedRef.commit", "sharedRef:y"],
  ["sharedRef.delete", "sharedRef:x"],
  ["session.leave", "sharedRef:x"],
  ["counter.add", "counter:n"],
  ["counter.join", "counter:n"],
  ["counter.forget", "counter:n"],
  ["counter.reset", "counter:n"],
  ["session.leave", "counter:n"]
] as const satisfies Rows

const ref = (name: string) => SharedRef.make({ name, schema: Schema.Number, initial: 0, colocate: "together" })

const collecting = <A, E>(stream: Stream.Stream<A, E>) =>
  Effect.gen(function*() {
    const seen: Array<A> = []
    const fiber = yield* Effect.forkChild(Stream.runForEach(stream, (value) => Effect.sync(() => seen.push(value))))
    yield* eventually(Effect.sync(() => seen.length > 0))
    return { seen, fiber }
  })

const told = <A>(seen: ReadonlyArray<A>, expected: ReadonlyArray<A>) =>
  eventually(Effect.sync(() => assert.deepStrictEqual(seen, expected)))

export const program: Program = ({ line, namespace, other, server }) =>
  Effect.gen(function*() {
    const [x, y] = [yield* ref("x"), yield* ref("y")]
    const [theirX, theirY] = [yield* onNode(other)(ref("x")), yield* onNode(other)(ref("y"))]
    const hearing = yield* collecting(x.changes)
    yield* leads(x.set(1), undefined, theirX.get, 1)
    assert.strictEqual(yield* insist(x.get), 1)
    yield* theirX.set(2)
    // From an outdated value, an update needs a second request, which is not made when the first was given up.
    yield* told(hearing.seen, [0, 1, 2])
    yield* leads(x.updateAndGet((value) => value + 1), 3, theirX.get, 3)
    // After two updates that came too late, the next one waits for its turn.
    let held = yield* line.hold(asks("sharedRef.update"))
    const late = yield* Effect.forkChild(insist(x.updateAndGet((value) => value * 2)))
    for (const value of [4, 5]) {
      yield* held.request
      yield* theirX.set(value)
      const { release } = held
      if (value === 4) held = yield* line.hold(asks("sharedRef.update"))
      yield* release()
    }
    // It says nothing of the update when it gets no turn in time.
    assert.strictEqual(yield* Fiber.join(late), 10)
    yield* told(hearing.seen, [0, 1, 2, 3, 4, 5, 10])
    const { version } = yield* theirX.versioned
    yield* leads(x.compareAndSet(version, 3), true, theirX.get, 3)
    const { key, kind, token } = yield* Effect.scoped(onNode(other)(Lock.acquire("owner")))
    yield* leads(x.setFenced({ key, kind, token }, 4), undefined, theirX.get, 4)
    yield* leads(
      SharedRef.transaction([x, y], ([x, y]) => [x + y, [x + 1, y + 1]]),
      4,
      Effect.all([theirX.get, theirY.get]).pipe(Effect.map(([x, y]) => x * 10 + y)),
      51
    )
    yield* told(hearing.seen, [0, 1, 2, 3, 4, 5, 10, 3, 4, 5])
    yield* leads(x.delete, true, theirX.get, 0)
    yield* told(hearing.seen, [0, 1, 2, 3, 4, 5, 10, 3, 4, 5, 0])
    yield* Fiber.interrupt(hearing.fiber)
    yield* theirY.delete
    // What remains says which leases may write.
    yield* eventually(
      Effect.map(
        server.cli("KEYS", `{${namespace}:*sharedRef:x`),
        (keys) => server.cli("HKEYS", keys.trim()).pipe(Effect.map((fields) => fields.trim() === "flock:owner"))
      ).pipe(Effect.flatten)
    )
    yield* server.cli("DEL", (yield* server.cli("KEYS", `{${namespace}:*sharedRef:x`)).trim())

    const n = yield* Counter.make({ name: "n" })
    const theirs = yield* onNode(other)(Counter.make({ name: "n" }))
    const counting = yield* collecting(n.changes)
    yield* leads(n.add(2), 2, theirs.get, 2)
    yield* Effect.scoped(Effect.gen(function*() {
      const batched = yield* n.batched({ flush: "5 millis" })
      yield* batched.add(3)
      yield* batched.add(4)
      yield* batched.flush
    }))
    assert.strictEqual(yield* theirs.get, 9)
    yield* told(counting.seen, [0, 2, 9])
    yield* leads(n.reset, 9, theirs.get, 0)
    yield* told(counting.seen, [0, 2, 9, 0])
    yield* Fiber.interrupt(counting.fiber)
  })
