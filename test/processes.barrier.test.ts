/** Parties in processes of their own, killed or paused during each kind of wait: the others never hang, and nothing stays. */
import { assert, layer } from "@effect/vitest"
import { Effect, Exit, Fiber } from "effect"
import type { Scope } from "effect"
import { Barrier, DoubleBarrier } from "../src/index.ts"
import { type Process, spawn } from "../src/testing/Process.ts"
import type { Argument, Event } from "./programs/party.ts"
import { elapsed } from "./support/awake.ts"
import { eventually } from "./support/eventually.ts"
import { assertEmpty, freshNamespace, type Node, node, sturdy, TestServer } from "./support/live.ts"
import { on, pending } from "./support/several.ts"

const lease = 2000
const timing = { lease: `${lease} millis`, margin: "300 millis" } as const
type Start = (does: Argument["does"], parties: number) => Effect.Effect<Process<Event>, never, Scope.Scope>

const scenario = <A, E, R>(self: (here: Node, start: Start) => Effect.Effect<A, E, R>) =>
  Effect.gen(function*() {
    const server = yield* TestServer
    const namespace = freshNamespace()
    yield* Effect.scoped(Effect.gen(function*() {
      const here = yield* node(server.url, { namespace, ...sturdy })
      yield* Effect.scoped(self(here, (does, parties) =>
        spawn<Event>(new URL("./programs/party.ts", import.meta.url), {
          argument: { url: server.url, namespace, ...timing, parties, does } satisfies Argument
        })))
      // The process that is left cleans up behind the dead.
      yield* eventually(
        Effect.map(
          server.cli("KEYS", `{${namespace}:*:mail:*`),
          (keys) =>
            new Set(keys.split("\n").map((key) => key.slice(0, key.indexOf("}")))).size === keys.split("\n").length
        ),
        { message: "the dead are forgotten" }
      )
    }))
    yield* assertEmpty(server, namespace)
  })

const is = <T extends Event["event"]>(name: T) => (event: Event): event is Extract<Event, { event: T }> =>
  event.event === name

const arrived = (barrier: Barrier.Barrier<void>, count: number) =>
  eventually(Effect.map(barrier.arrived, (found) => found === count), { message: `${count} have arrived` })

const counts = (barrier: DoubleBarrier.DoubleBarrier, inside: number, waiting: number) =>
  eventually(
    Effect.gen(function*() {
      assert.deepStrictEqual([yield* barrier.inside, yield* barrier.queued], [inside, waiting])
    }),
    { message: `${inside} inside, ${waiting} waiting` }
  )

/** How long after now the effect ends, in milliseconds. */
const after = <A, E, R>(effect: Effect.Effect<A, E, R>) =>
  Effect.suspend(() => {
    const started = Date.now()
    return Effect.map(effect, (result) => ({ result, millis: elapsed(started) }))
  })

layer(TestServer.layer, { excludeTestServices: true, timeout: "60 seconds" })("a party", (it) => {
  it.effect("that is killed breaks the generation when its lease has run out", () =>
    scenario((here, start) =>
      Effect.gen(function*() {
        const barrier = yield* on(here, Barrier.make({ name: "all", parties: 3 }))
        const waits = yield* Effect.forkChild(Effect.flip(barrier.await()))
        const victim = yield* start("await", 3)
        yield* arrived(barrier, 2)
        yield* victim.kill9
        const { millis, result } = yield* after(Fiber.join(waits))
        assert.deepInclude(result.reason, {
          _tag: "BarrierBroken" as const,
          generation: 1,
          missing: 2,
          why: "left" as const
        })
        assert.isBelow(millis, lease + 1000)
        // And the next generation is whole.
        const [{ generation }] = yield* Effect.all([barrier.await(), barrier.await(), barrier.await()], {
          concurrency: "unbounded"
        })
        assert.strictEqual(generation, 2)
      })
    ))

  it.effect("that is killed while it runs the action breaks the generation", () =>
    scenario((here, start) =>
      Effect.gen(function*() {
        const barrier = yield* on(here, Barrier.make({ name: "all", parties: 2 }))
        const waits = yield* Effect.forkChild(Effect.flip(barrier.await()))
        const victim = yield* start("act", 2)
        yield* victim.waitFor(is("acting"))
        yield* victim.kill9
        const { result } = yield* after(Fiber.join(waits))
        assert.deepInclude(result.reason, { _tag: "BarrierBroken" as const, generation: 1, missing: 1 })
      })
    ))

  it.effect("that is killed is not missed when it withdraws", () =>
    scenario((here, start) =>
      Effect.gen(function*() {
        const barrier = yield* on(here, Barrier.make({ name: "all", parties: 3 }))
        const victim = yield* start("withdraw", 3)
        yield* arrived(barrier, 1)
        const waits = yield* Effect.forkChild(barrier.await())
        yield* arrived(barrier, 2)
        yield* victim.kill9
        yield* arrived(barrier, 1)
        yield* pending(waits)
        yield* Effect.all([barrier.await(), barrier.await()], { concurrency: "unbounded" })
        assert.strictEqual((yield* Fiber.join(waits)).index, 0)
      })
    ))

  it.effect("that is paused for longer than its lease observes that the generation is broken", () =>
    scenario((here, start) =>
      Effect.gen(function*() {
        const barrier = yield* on(here, Barrier.make({ name: "all", parties: 3 }))
        const paused = yield* start("await", 3)
        yield* arrived(barrier, 1)
        const waits = yield* Effect.forkChild(Effect.exit(barrier.await()))
        yield* arrived(barrier, 2)
        yield* paused.sigstop
        assert.isTrue(Exit.isFailure(yield* Fiber.join(waits)))
        yield* paused.sigcont
        assert.strictEqual((yield* paused.waitFor(is("failed"))).reason, "BarrierBroken")
      })
    ))

  it.effect("that is killed while it waits to enter does not count", () =>
    scenario((here, start) =>
      Effect.gen(function*() {
        const barrier = yield* on(here, DoubleBarrier.make({ name: "step", parties: 3 }))
        const victim = yield* start("enter", 3)
        yield* counts(barrier, 0, 1)
        const first = yield* Effect.forkChild(barrier.enter())
        yield* counts(barrier, 0, 2)
        yield* victim.kill9
        yield* counts(barrier, 0, 1)
        yield* pending(first)
        yield* Effect.all([barrier.enter(), barrier.enter()], { concurrency: "unbounded" })
        assert.strictEqual((yield* Fiber.join(first)).number, 1)
      })
    ))

  it.effect("that is killed inside, or while it waits to leave, has left", () =>
    scenario((here, start) =>
      Effect.gen(function*() {
        const barrier = yield* on(here, DoubleBarrier.make({ name: "step", parties: 3 }))
        const [inside, leaving] = yield* Effect.all([start("stay", 3), start("leave", 3)], { concurrency: "unbounded" })
        const phase = yield* barrier.enter()
        yield* inside.waitFor(is("inside"))
        yield* leaving.waitFor(is("leaving"))
        yield* counts(barrier, 2, 0)
        const waits = yield* Effect.forkChild(barrier.leave(phase))
        yield* counts(barrier, 1, 0)
        yield* leaving.kill9
        yield* inside.kill9
        const { millis } = yield* after(Fiber.join(waits))
        assert.isBelow(millis, lease + 1000)
        yield* counts(barrier, 0, 0)
      })
    ))
})
