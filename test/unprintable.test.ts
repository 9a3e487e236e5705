/** Errors of users that throw when they are looked at: nothing ends for it that would not end for another error. */
import { assert, layer } from "@effect/vitest"
import { Cause, Effect, Exit, Fiber, Layer, Logger, Schedule, Schema } from "effect"
import { Election, Lock, Rendezvous, SharedRef, Singleton, Topic } from "../src/index.ts"
import { eventually } from "./support/eventually.ts"
import { TestServer } from "./support/live.ts"
import { on, promptly, several } from "./support/several.ts"

class Hostile extends Error {
  constructor() {
    super()
    Object.defineProperty(this, "detail", { enumerable: true, get: () => this.message })
  }

  override get message(): string {
    throw new Error("not to be looked at")
  }
}

const hostile = () => new Hostile()

class Numbers extends Topic.Service<Numbers>()("numbers", { schema: Schema.Number }) {}

/** As loggers do, it prints the cause. */
const printing = (lines: Array<string>) =>
  Logger.layer([Logger.make(({ cause, message }) => void lines.push(`${message} ${Cause.pretty(cause)}`))])

layer(TestServer.layer, { excludeTestServices: true, timeout: "60 seconds" })(
  "an error that cannot be looked at",
  (it) => {
    for (const end of [Effect.fail, Effect.die] as ReadonlyArray<(error: Error) => Effect.Effect<never, Error>>) {
      it.effect(`of what ran under a lost lock, by ${end === Effect.die ? "die" : "fail"}, comes with the loss`, () =>
        several(1, ([a]) =>
          Effect.gen(function*() {
            const error = hostile()
            const body = Effect.uninterruptible(
              Effect.andThen(Effect.sleep("150 millis"), Effect.suspend(() => end(error)))
            )
            const held = on(a!, Lock.withLock(body, "a", { maxHold: "50 millis" }))
            const exit = yield* promptly(Effect.exit(held), "the end")
            assert.isTrue(Exit.isFailure(exit))
            const [lost, own] = Exit.isFailure(exit) ? exit.cause.reasons : []
            assert.isTrue(lost !== undefined && Cause.isFailReason(lost) && lost.error instanceof Lock.LockError)
            const found = own !== undefined &&
              (Cause.isFailReason(own) ? own.error : Cause.isDieReason(own) && own.defect)
            assert.isTrue(found === error)
          })))
    }

    it.effect("of a callback, a handler or a tick is logged, and the next one begins", () =>
      several(1, ([a]) =>
        Effect.gen(function*() {
          const lines: Array<string> = []
          const calls: Array<string> = []
          const seen: Array<number> = []
          let ticks = 0
          const handler = Topic.handler(Numbers, ({ value }) => {
            seen.push(value)
            return Effect.die(hostile())
          })
          const tick = Effect.suspend(() => {
            ticks++
            return Effect.fail(hostile())
          })
          yield* on(
            a!,
            Effect.gen(function*() {
              const election = yield* Election.make({
                name: "a",
                onAcquired: () => Effect.andThen(Effect.sync(() => calls.push("acquired")), Effect.die(hostile())),
                onLost: () => Effect.andThen(Effect.sync(() => calls.push("lost")), Effect.die(hostile()))
              })
              let terms = 0
              yield* election.lead(Effect.suspend(() => ++terms === 3 ? Effect.void : election.resign))
              yield* eventually(Effect.sync(() => assert.lengthOf(calls, 6)))
              const numbers = yield* Numbers
              yield* Effect.addFinalizer(() => Effect.orDie(numbers.purge))
              yield* Layer.build(handler)
              yield* numbers.publishAll([1, 2, 3])
              yield* eventually(Effect.sync(() => assert.deepStrictEqual(seen, [1, 2, 3])))
              const schedule = Singleton.schedule("tick", tick, Schedule.spaced("20 millis"), {
                timeToLive: "1 second"
              })
              yield* Layer.build(schedule)
              yield* eventually(Effect.sync(() => assert.isAbove(ticks, 3)))
            }).pipe(Effect.scoped, Effect.provide(Numbers.layer), Effect.provide(printing(lines)))
          )
          const text = lines.join()
          for (const part of ["onAcquired of", "onLost of", "failed at an event", "a tick of"]) {
            assert.include(text, part)
          }
        })))

    it.effect("of a schema is that of a value that does not fit", () =>
      several(2, ([a, b]) =>
        Effect.gen(function*() {
          const throwing = Schema.String.check(
            Schema.makeFilter((text) => {
              if (text === "bad") throw hostile()
              return true
            })
          )
          const text = yield* on(a!, Rendezvous.make({ name: "r", schema: Schema.String }))
          const fussy = yield* on(b!, Rendezvous.make({ name: "r", schema: throwing }))
          const giver = yield* Effect.forkChild(Effect.flip(text.give("bad")))
          assert.strictEqual((yield* Effect.flip(fussy.take())).reason._tag, "InvalidPayload")
          assert.strictEqual((yield* promptly(Fiber.join(giver), "the giver")).reason._tag, "Refused")
          const ref = yield* on(a!, SharedRef.make({ name: "r", schema: Schema.String, initial: "" }))
          const strict = yield* on(b!, SharedRef.make({ name: "r", schema: throwing, initial: "" }))
          yield* ref.set("bad")
          assert.strictEqual((yield* Effect.flip(strict.get)).reason._tag, "InvalidPayload")
          yield* ref.delete
        })))
  }
)
