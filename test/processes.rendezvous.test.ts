/** Signals and rendezvous between OS processes that are killed while they wait for each other. */
import { assert, layer } from "@effect/vitest"
import { Effect, Fiber, Schema, type Scope } from "effect"
import { type Coordinator, Rendezvous, Signal } from "../src/index.ts"
import { spawn } from "../src/testing/Process.ts"
import type { Argument, Event } from "./programs/meeter.ts"
import { eventually } from "./support/eventually.ts"
import { assertEmpty, freshNamespace, node, sturdy, TestServer } from "./support/live.ts"
import { deadForgotten, isPending } from "./support/several.ts"

const timing = { lease: "2 seconds", margin: "300 millis" } as const

/** Longer than a lease, and shorter than two. */
const inTime = "3500 millis"

interface Case {
  readonly place: Rendezvous.Rendezvous<string>
  readonly signal: Signal.Signal
  readonly start: (
    mode: Argument["mode"],
    id?: string
  ) => Effect.Effect<Effect.Success<ReturnType<typeof spawn<Event>>>, never, Scope.Scope>
}

const scenario = <A, E, R>(self: (scenario: Case) => Effect.Effect<A, E, R>) =>
  Effect.gen(function*() {
    const server = yield* TestServer
    const namespace = freshNamespace()
    yield* Effect.scoped(Effect.gen(function*() {
      const here = yield* node(server.url, { namespace, ...sturdy })
      const context = <A, E>(effect: Effect.Effect<A, E, Coordinator.Coordinator>) =>
        Effect.provideContext(effect, here)
      const place = yield* context(Rendezvous.make({ name: "shared", schema: Schema.String, timeToLive: "1 second" }))
      const signal = yield* context(Signal.make({ name: "shared" }))
      yield* Effect.scoped(self({
        place,
        signal,
        start: (mode, id = mode) =>
          spawn<Event>(new URL("./programs/meeter.ts", import.meta.url), {
            argument: { url: server.url, namespace, ...timing, mode, id } satisfies Argument
          })
      }))
      // A process that is left, and has a session there, cleans up behind the dead.
      yield* signal.clear
      yield* deadForgotten(here, namespace, server)
      // What was theirs is set again.
      yield* signal.clear
    }))
    yield* assertEmpty(server, namespace)
  })

const is = <T extends Event["event"]>(name: T) => (event: Event): event is Extract<Event, { event: T }> =>
  event.event === name

const waits = (place: Case["place"], expected: Partial<Effect.Success<Case["place"]["present"]>>) =>
  eventually(Effect.map(place.present, (waiting) => assert.deepInclude(waiting, expected)))

layer(TestServer.layer, { excludeTestServices: true, timeout: "60 seconds" })("processes that are killed", (it) => {
  it.effect("while they wait for a signal: the next one gets it", () =>
    scenario(({ signal, start }) =>
      Effect.gen(function*() {
        const killed = yield* start("await")
        yield* eventually(Effect.map(signal.queued, (waiting) => waiting === 1))
        const next = yield* Effect.forkChild(signal.await)
        yield* eventually(Effect.map(signal.queued, (waiting) => waiting === 2))
        yield* killed.kill9
        yield* killed.exit
        yield* signal.set
        yield* Effect.timeout(Fiber.join(next), inTime)
        assert.isFalse(yield* signal.isSet)
      })
    ))

  it.effect("while they wait for an item, and while they have one: the next one gets it", () =>
    scenario(({ place, start }) =>
      Effect.gen(function*() {
        const busy = yield* start("hold")
        yield* waits(place, { takers: 1 })
        const waiting = yield* start("take")
        yield* waits(place, { takers: 2 })
        const giver = yield* Effect.forkChild(place.give("x"))
        const { id } = yield* busy.waitFor(is("has"))
        yield* Effect.all([busy.kill9, waiting.kill9])
        yield* Effect.all([busy.exit, waiting.exit])
        const handover = yield* Effect.timeout(
          place.takeWith((value, handover) => Effect.succeed({ value, ...handover })),
          inTime
        )
        assert.deepInclude(handover, { id, value: "x" })
        assert.isAbove(handover.attempts, 1)
        yield* Effect.timeout(Fiber.join(giver), "1 second")
      })
    ))

  it.effect("while they give: no taker gets it when their lease has run out", () =>
    scenario(({ place, start }) =>
      Effect.gen(function*() {
        const giver = yield* start("give")
        yield* waits(place, { givers: 1 })
        yield* giver.kill9
        yield* giver.exit
        const other = yield* Effect.forkChild(place.exchange("waits, so that the dead are looked after"))
        yield* waits(place, { givers: 0 })
        const taking = yield* Effect.forkChild(place.take())
        yield* waits(place, { takers: 1 })
        yield* place.give("y")
        assert.strictEqual(yield* Fiber.join(taking), "y")
        yield* Fiber.interrupt(other)
      })
    ))

  it.effect("while they wait for another party: the parties that come meet each other", () =>
    scenario(({ place, start }) =>
      Effect.gen(function*() {
        const killed = yield* start("exchange")
        yield* waits(place, { exchangers: 1 })
        yield* killed.kill9
        yield* killed.exit
        const first = yield* Effect.forkChild(place.exchange("first"))
        yield* waits(place, { exchangers: 0 })
        const second = yield* Effect.forkChild(place.exchange("second"))
        assert.isTrue(isPending(first))
        assert.deepStrictEqual(yield* Effect.timeout(Effect.forEach([first, second], Fiber.join), inTime), [
          "second",
          "first"
        ])
      })
    ))

  it.effect("at random: each value is taken once, each exchange is mutual, and the other processes go on", () =>
    scenario(({ start }) =>
      Effect.gen(function*() {
        const all: Array<Event> = []
        for (let round = 0; round < 2; round++) {
          const running = yield* Effect.all(
            [0, 1, 2].map((n) => start("all", `${round}.${n}`)),
            { concurrency: "unbounded" }
          )
          const seen = (event: Event["event"], after = false) =>
            Effect.forEach(
              running.filter(({ running }) => running),
              (process) => process.waitFor(is(event), after ? { after: process.received.length } : {}),
              { concurrency: "unbounded" }
            )
          yield* Effect.forEach(["gave", "took", "exchanged", "passed"] as const, (event) => seen(event))
          yield* running[round]!.kill9
          yield* running[round]!.exit
          yield* Effect.forEach(["gave", "took", "exchanged", "passed"] as const, (event) => seen(event, true))
          for (const process of running) yield* process.kill9
          for (const process of running) {
            yield* process.exit
            all.push(...process.received)
          }
        }
        const given = all.filter(is("gave"))
        const had = new Set(all.filter(is("has")).map(({ value }) => value))
        const taken = all.filter(is("took")).map(({ value }) => value)
        assert.isAbove(given.length, 10)
        assert.deepStrictEqual(given.filter(({ value }) => !had.has(value)), [])
        assert.strictEqual(new Set(taken).size, taken.length, "nothing is taken twice")
        const exchanged = new Map(all.filter(is("exchanged")).map(({ other, value }) => [value, other]))
        assert.isAbove(exchanged.size, 10)
        for (const [value, other] of exchanged) assert.include([value, undefined], exchanged.get(other))
        assert.strictEqual(new Set(exchanged.values()).size, exchanged.size, "nobody is met twice")
        assert.isAtMost(all.filter(is("passed")).length, all.filter(is("set")).length + 9)
      })
    ))
})
