/** Shared refs: one value, many processes; every write counts once, and every version is heard of. */
import { assert, layer } from "@effect/vitest"
import { Effect, Fiber, Option, pipe, Schema, Stream, SubscriptionRef } from "effect"
import { type Coordinator, SharedRef } from "../src/index.ts"
import { eventually } from "./support/eventually.ts"
import { type Node, TestServer, withNode } from "./support/live.ts"
import { keysOf } from "./support/namespace.ts"
import { fields } from "./support/requests.ts"
import { on, several } from "./support/several.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

const hostile = "a\u0000}{:\n%s|\"✓"

const options = { schema: Schema.Number, initial: 0 } as const

const number = (name = "x", more: Partial<SharedRef.Options<number>> = {}) =>
  SharedRef.make({ ...options, ...more, name })

const on2 = (
  [a, b]: ReadonlyArray<Node>,
  make: Effect.Effect<SharedRef.SharedRef<number>, never, Coordinator.Coordinator>
) => Effect.all([on(a!, make), on(b!, make)])

/** All that a stream has had so far. */
const collecting = <A, E>(stream: Stream.Stream<A, E>) =>
  Effect.gen(function*() {
    const seen: Array<A> = []
    const fiber = yield* Effect.forkChild(Stream.runForEach(stream, (value) => Effect.sync(() => seen.push(value))))
    return { seen, fiber }
  })

const sees = <A>(seen: ReadonlyArray<A>, expected: ReadonlyArray<A>) =>
  eventually(Effect.sync(() => assert.deepStrictEqual(seen, expected)))

layer(TestServer.layer, live)("a shared ref", (it) => {
  it.effect("does what a SubscriptionRef does", () =>
    withNode(() =>
      Effect.gen(function*() {
        const ours = yield* number(hostile)
        const theirs = yield* SubscriptionRef.make(0)
        const both = <A>(
          one: Effect.Effect<A, SharedRef.SharedRefError>,
          other: Effect.Effect<A>
        ): Effect.Effect<void, SharedRef.SharedRefError> =>
          Effect.gen(function*() {
            assert.deepStrictEqual(yield* one, yield* other)
            assert.strictEqual(yield* ours.get, yield* SubscriptionRef.get(theirs))
          })
        const plus = (n: number) => (value: number) => value + n
        const pair = (value: number) => [`was ${value}`, value * 2] as const
        const some = (value: number) => value > 5 ? Option.some(value - 5) : Option.none<number>()
        for (let round = 0; round < 3; round++) {
          yield* both(ours.set(round), SubscriptionRef.set(theirs, round))
          yield* both(ours.update(plus(2)), SubscriptionRef.update(theirs, plus(2)))
          yield* both(ours.getAndSet(7), SubscriptionRef.getAndSet(theirs, 7))
          yield* both(ours.updateAndGet(plus(3)), SubscriptionRef.updateAndGet(theirs, plus(3)))
          yield* both(ours.getAndUpdate(plus(4)), SubscriptionRef.getAndUpdate(theirs, plus(4)))
          yield* both(ours.modify(pair), SubscriptionRef.modify(theirs, pair))
          yield* both(
            ours.updateEffect((value) => Effect.succeed(value + 1)),
            SubscriptionRef.updateEffect(theirs, (value) => Effect.succeed(value + 1))
          )
          yield* both(
            SharedRef.modifyEffect(ours, (value) => Effect.succeed(pair(value))),
            SubscriptionRef.modifyEffect(theirs, (value) => Effect.succeed(pair(value)))
          )
          for (let n = 0; n < 20; n++) {
            yield* both(SharedRef.updateSome(ours, some), SubscriptionRef.updateSome(theirs, some))
          }
          for (let n = 0; n < 9; n++) {
            const maybe = (value: number) => [value, some(value + n)] as const
            yield* both(pipe(ours, SharedRef.modifySome(maybe)), pipe(theirs, SubscriptionRef.modifySome(maybe)))
          }
          yield* both(pipe(ours, SharedRef.set(3)), pipe(theirs, SubscriptionRef.set(3)))
          yield* both(pipe(ours, SharedRef.update(plus(1))), pipe(theirs, SubscriptionRef.update(plus(1))))
          yield* both(SharedRef.get(ours), SubscriptionRef.get(theirs))
          yield* both(SharedRef.modify(ours, pair), SubscriptionRef.modify(theirs, pair))
          yield* both(SharedRef.getAndSet(ours, 1), SubscriptionRef.getAndSet(theirs, 1))
          yield* both(SharedRef.getAndUpdate(ours, plus(1)), SubscriptionRef.getAndUpdate(theirs, plus(1)))
          yield* both(SharedRef.updateAndGet(ours, plus(1)), SubscriptionRef.updateAndGet(theirs, plus(1)))
        }
        yield* ours.delete
      })
    ))

  it.effect("reads as its initial value while it is absent, and its versions only grow", () =>
    several(2, (nodes, namespace, server) =>
      Effect.gen(function*() {
        const [one, two] = yield* on2(nodes, number("x", { initial: 5 }))
        assert.deepStrictEqual(yield* one.versioned, { value: 5, version: 0 })
        assert.isFalse(yield* one.delete)
        assert.isTrue(yield* two.compareAndSet(0, 6))
        const first = yield* one.version
        assert.isAbove(first, 0)
        assert.isFalse(yield* one.compareAndSet(0, 7))
        assert.isFalse(yield* one.compareAndSet(first - 1, 7))
        assert.isTrue(yield* one.compareAndSet(first, 7))
        const second = yield* two.versioned
        assert.isAbove(second.version, first)
        assert.isTrue(yield* two.delete)
        assert.isFalse(yield* one.delete)
        assert.deepStrictEqual(yield* one.versioned, { value: 5, version: 0 })
        assert.strictEqual(yield* one.updateAndGet((value) => value + 1), 6)
        assert.isAbove(yield* two.version, second.version)
        assert.strictEqual(yield* two.get, 6)
        yield* one.delete
        const keys = yield* keysOf(server, namespace)
        assert.isFalse(keys.some((key) => key.includes("sharedRef")))
      })))

  it.effect("tells every subscriber the present value and then every version, in order", () =>
    several(2, (nodes, namespace, server) =>
      Effect.gen(function*() {
        const [one, two] = yield* on2(nodes, number())
        const early = yield* collecting(two.changes)
        const own = yield* collecting(one.versions())
        yield* sees(early.seen, [0])
        yield* sees(own.seen, [{ value: 0, version: 0 }])
        for (let n = 1; n <= 5; n++) yield* one.set(n)
        yield* two.update((n) => n + 1)
        yield* sees(early.seen, [0, 1, 2, 3, 4, 5, 6])
        const late = yield* collecting(two.changes)
        yield* sees(late.seen, [6])
        // One membership of each process, however many listen.
        assert.strictEqual(yield* fields(server, namespace, "sharedRef:x", "o"), 2)
        yield* one.delete
        yield* one.set(6)
        yield* sees(early.seen, [0, 1, 2, 3, 4, 5, 6, 0, 6])
        yield* sees(late.seen, [6, 0, 6])
        yield* sees(own.seen.map(({ value }) => value), [0, 1, 2, 3, 4, 5, 6, 0, 6])
        const versions = own.seen.map(({ version }) => version).filter((version) => version > 0)
        assert.deepStrictEqual(versions, [...versions].sort((a, b) => a - b))
        yield* Effect.forEach([early, late, own], ({ fiber }) => Fiber.interrupt(fiber))
        yield* eventually(Effect.map(fields(server, namespace, "sharedRef:x", "o"), (members) => members === 0))
        yield* one.delete
      })))
})
