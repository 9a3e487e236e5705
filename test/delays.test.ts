/** The delays of a schedule, as they are stored with a job. */
import { assert, it } from "@effect/vitest"
import { Context, Duration, Effect, Option, Random, Schedule } from "effect"
import { delayBehind, delaysOf } from "../src/internal/queue/delays.ts"
import { upTo } from "./support/queues.ts"

const delays = (schedule: Schedule.Schedule<unknown>, attempts = Number.POSITIVE_INFINITY) =>
  delaysOf(schedule, attempts, Context.empty())

const delaysBehind = (delays: string, count: number) =>
  upTo(count).map((at) => Option.getOrUndefined(Option.map(delayBehind(delays, at + 1), Duration.toMillis)))

it("are those of the schedule, as many as the attempts need", () => {
  assert.strictEqual(delays(Schedule.exponential("1 second"), 5), "1000 2000 4000 8000+")
  assert.deepStrictEqual(delaysBehind("1000 2000 4000 8000+", 5), [1000, 2000, 4000, 8000, 8000])
  assert.strictEqual(delays(Schedule.exponential("1 second").pipe(Schedule.upTo({ times: 2 }))), "1000 2000")
  assert.deepStrictEqual(delaysBehind("1000 2000", 4), [1000, 2000, undefined, undefined])
  assert.deepStrictEqual(delaysBehind(delays(Schedule.recurs(0)), 2), [undefined, undefined])
  const last = delays(Schedule.recurs(64))
  assert.deepStrictEqual(delaysBehind(last, 66), [...upTo(64).map(() => 0), undefined, undefined])
})

it("that repeat at the end are stored once, and no more than 64", () => {
  assert.strictEqual(delays(Schedule.spaced("250 millis")), "250+")
  assert.deepStrictEqual(delaysBehind("250+", 1000), upTo(1000).map(() => 250))
  assert.strictEqual(delays(Schedule.spaced("250 millis").pipe(Schedule.upTo({ times: 3 })), 9), "250 250 250")
  assert.strictEqual(delays(Schedule.recurs(100)), "0+")
  const growing = delays(Schedule.forever.pipe(
    Schedule.modifyDelay(({ output }) => Effect.succeed(Duration.millis(output)))
  ))
  assert.deepStrictEqual(growing.split(" "), [...upTo(63).map(String), "63+"])
})

it("are never below 0, and end with one that never passes", () => {
  assert.strictEqual(delays(Schedule.spaced(Duration.infinity)), "1000000000000000+")
  assert.strictEqual(delays(Schedule.spaced(-5)), "0+")
  assert.isAbove(delaysBehind(delays(Schedule.exponential("1 second")), 64).at(-1)!, 100 * 365 * 24 * 3_600_000)
})

it.effect("draw from the randomness of the fiber that offers", () =>
  Effect.gen(function*() {
    const drawn = Effect.contextWith((context: Context.Context<never>) =>
      Effect.succeed(delaysOf(Schedule.jittered(Schedule.spaced("1 second")), 4, context))
    )
    const [one, two, other] = yield* Effect.all([
      drawn.pipe(Random.withSeed("a")),
      drawn.pipe(Random.withSeed("a")),
      drawn.pipe(Random.withSeed("b"))
    ])
    assert.strictEqual(one, two)
    assert.notStrictEqual(one, other)
  }))

it("need a schedule that steps at once", async () => {
  assert.throws(() => delays("1 second" as never, 2), /must be a Schedule$/)
  let steps = 0
  const slow = Schedule.spaced("1 second").pipe(
    Schedule.modifyDelay(({ duration }) => Effect.as(Effect.sleep(1), duration)),
    Schedule.modifyDelay(({ duration }) => Effect.sync(() => (steps++, duration)))
  )
  assert.throws(() => delays(slow, 20), /synchronously/)
  await new Promise((resolve) => setTimeout(resolve, 30))
  assert.strictEqual(steps, 0)
  const broken = Schedule.spaced("1 second").pipe(Schedule.while(() => {
    throw new Error("broken")
  }))
  assert.throws(() => delays(broken, 2), /could not be stepped/)
})
