/**
 * Three releases of a program read one stream. The second one adds a field to an event and renames another; the third one has the
 * new name in the stream, too. Events of older releases still decode.
 */
import { NodeRuntime } from "@effect/platform-node"
import { Console, Effect, Schema, Stream } from "effect"
import assert from "node:assert/strict"
import { Topic } from "../src/index.ts" // In your program: from "lockstep"
import { layer } from "./support.ts"

const First = Schema.Struct({ id: Schema.Number, mail: Schema.String })

// `locale` is new, and events without it get a default.
const SignUp = Schema.Struct({
  id: Schema.Number,
  email: Schema.String,
  locale: Schema.String.pipe(Schema.withDecodingDefaultKey(Effect.succeed("en")))
})

// `email` is still `mail` in the stream. Processes of the first release, which run on for a while, can read new events.
const Second = SignUp.pipe(Schema.encodeKeys({ email: "mail" }))

// When the first release is gone everywhere, the name can change in the stream. Events are encoded by the first member of the
// union, and decoded by the first one that they fit.
const Third = Schema.Union([SignUp, Second])

/** What a release makes of each event: its value, or "Undecodable". */
const read = <A>(topic: Topic.Topic<A>, count: number) =>
  topic.subscribe({ from: "beginning" }).pipe(
    Stream.map((element) => element._tag === "Event" ? element.value : element._tag),
    Stream.take(count),
    Stream.runCollect
  )

const program = Effect.gen(function*() {
  const first = yield* Topic.make({ name: "sign-ups", schema: First })
  const second = yield* Topic.make({ name: "sign-ups", schema: Second })
  const third = yield* Topic.make({ name: "sign-ups", schema: Third })
  yield* Effect.addFinalizer(() => Effect.orDie(third.purge))

  // A rolling update: the first and the second release understand each other.
  yield* first.publish({ id: 1, mail: "ann@example.org" })
  yield* second.publish({ id: 2, email: "bob@example.org", locale: "de" })
  assert.deepEqual(yield* read(first, 2), [
    { id: 1, mail: "ann@example.org" },
    { id: 2, mail: "bob@example.org" }
  ])
  assert.deepEqual(yield* read(second, 2), [
    { id: 1, email: "ann@example.org", locale: "en" },
    { id: 2, email: "bob@example.org", locale: "de" }
  ])

  // The third release reads the events of all, and writes what older ones cannot read. They go on behind it all the same.
  yield* third.publish({ id: 3, email: "cy@example.org", locale: "fr" })
  const signUps = [
    { id: 1, email: "ann@example.org", locale: "en" },
    { id: 2, email: "bob@example.org", locale: "de" },
    { id: 3, email: "cy@example.org", locale: "fr" }
  ]
  assert.deepEqual(yield* read(third, 3), signUps)
  yield* first.publish({ id: 4, mail: "dee@example.org" })
  assert.deepEqual((yield* read(first, 4)).slice(2), ["Undecodable", { id: 4, mail: "dee@example.org" }])
  assert.deepEqual((yield* read(second, 4))[2], "Undecodable")

  const all = yield* read(third, 4)
  assert.deepEqual(all, [...signUps, { id: 4, email: "dee@example.org", locale: "en" }])
  yield* Console.log(all.map((value) => typeof value === "string" ? value : value.locale).join(", "))
}).pipe(Effect.scoped)

program.pipe(Effect.provide(layer()), NodeRuntime.runMain)
