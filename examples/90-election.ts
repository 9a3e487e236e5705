/** Two candidates: one leads and says where it can be reached, hands over, and observers see every change. */
import { NodeRuntime } from "@effect/platform-node"
import { Console, Effect, Fiber, Option, Schedule, Schema, Stream } from "effect"
import assert from "node:assert/strict"
import { Election, Lease } from "../src/index.ts" // In your program: from "lockstep"
import { layer } from "./support.ts"

const candidate = (address: string) => Election.make({ name: "scheduler", schema: Schema.String, value: address })

const program = Effect.gen(function*() {
  const one = yield* candidate("10.0.0.1:80")
  const two = yield* candidate("10.0.0.2:80")
  const seen = yield* Effect.forkScoped(
    one.changes.pipe(
      Stream.map(Option.match({ onNone: () => "nobody", onSome: ({ value }) => value })),
      Stream.tap((who) => Console.log(`leads: ${who}`)),
      Stream.takeUntil((who) => who === "10.0.0.2:8080"),
      Stream.runCollect
    )
  )

  // Each waits until it leads, and is interrupted when it does not any more.
  const terms: Array<number> = []
  const work = Effect.flatMap(Lease.current, (lease) => {
    terms.push(Option.getOrThrow(lease).token) // The term: a fencing token
    return Effect.never
  })
  yield* Effect.forkScoped(work.pipe(one.lead()))
  yield* Effect.forkScoped(two.lead(Effect.andThen(two.proclaim("10.0.0.2:8080"), work)))

  const [next] = yield* one.candidates.pipe(
    Effect.repeat({ until: (waiting) => waiting.length > 0, schedule: Schedule.spaced("10 millis") })
  )
  yield* one.transferTo(next!)

  const all = yield* Fiber.join(seen)
  assert.deepEqual(all.slice(-3), ["10.0.0.1:80", "10.0.0.2:80", "10.0.0.2:8080"])
  assert.ok(terms.length < 2 || terms[0]! < terms[1]!)
}).pipe(Effect.scoped)

program.pipe(Effect.provide(layer()), NodeRuntime.runMain)
