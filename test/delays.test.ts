/** The delays of a schedule, as they are stored with a job. */
import { assert, it } from "@effect/vitest"
import { Duration, Effect, Option, Random, Schedule } from "effect"
import { delayBehind, delaysOf } from "../src/internal/queue/delays.ts"
import { upTo } from "./support/queues.ts"

const delaysBehind = (delays: string, count: number) =>
  upTo(count).map((at) => Option.getOrUndefined(Option.map(delayBehind(delays, at + 1), Duration.toMillis)))

it("are those of the schedule, as many as the attempts need", () => {
  assert.strictEqual(delaysOf(Schedule.exponential("1 second"), 5), "1000 2000 4000 8000+")
  assert.deepStrictEqual(delaysBehind("1000 2000 4000 8000+", 5), [1000, 2000, 4000, 8000, 8000])
  const twice = Schedule.exponential("1 second").pipe(Schedule.upTo({ times: 2 }))
  assert.strictEqual(delaysOf(twice, Number.POSITIVE_INFINITY), "1000 2000")
  assert.deepStrictEqual(delaysBehind("1000 2000", 4), [1000, 2000, undefined, undefined])
  const none = Schedule.recurs(0)
  assert.deepStrictEqual(delaysBehind(delaysOf(none, 9), 2), [undefined, undefined])
})

it("that repeat at the end are stored once", () => {
  const endless = delaysOf(Schedule.spaced("250 millis"), Number.POSITIVE_INFINITY)
  assert.strictEqual(endless, "250+")
  assert.deepStrictEqual(delaysBehind(endless, 1000), upTo(1000).map(() => 250))
  assert.strictEqual(delaysOf(Schedule.spaced("250 millis").pipe(Schedule.upTo({ times: 3 })), 9), "250 250 250")
  const growing = delaysOf(Schedule.fibonacci("1 milli"), Number.POSITIVE_INFINITY)
  assert.strictEqual(growing.split(" ").length, 64)
  assert.deepStrictEqual(delaysBehind(growing, 100).slice(63), upTo(37).map(() => delaysBehind(growing, 64)[63]))
})

it("are never more than dates can count", () => {
  assert.strictEqual(delaysOf(Schedule.spaced(Duration.infinity), 9), "1000000000000000+")
})

it.effect("draw from the randomness of the fiber that offers", () =>
  Effect.gen(function*() {
    const drawn = Effect.sync(() => delaysOf(Schedule.jittered(Schedule.spaced("1 second")), 4))
    const [one, two, other] = yield* Effect.all([
      drawn.pipe(Random.withSeed("a")),
      drawn.pipe(Random.withSeed("a")),
      drawn.pipe(Random.withSeed("b"))
    ])
    assert.strictEqual(one, two)
    assert.notStrictEqual(one, other)
  }))

it("need a schedule that steps at once", () => {
  assert.throws(() => delaysOf("1 second" as never, 2), RangeError)
  const slow = Schedule.spaced("1 second").pipe(
    Schedule.modifyDelay(({ duration }) => Effect.as(Effect.sleep(1), duration))
  )
  assert.throws(() => delaysOf(slow, 2), RangeError)
})
