/** Barriers: all pass or none, with the same contributions, also when some of them fail. */
import { assert, layer } from "@effect/vitest"
import { Cause, Deferred, Effect, Exit, Fiber, Metric, Option, Result, Schema, Scope } from "effect"
import * as fc from "fast-check"
import { Barrier, Coordinator, Lease, Lock, Metrics } from "../src/index.ts"
import { library } from "../src/internal/actor/lua.ts"
import { make as proxy } from "../src/testing/Proxy.ts"
import { actor, client } from "./support/actor.ts"
import { awake, elapsed } from "./support/awake.ts"
import { departed } from "./support/departed.ts"
import { runs } from "./support/effort.ts"
import { eventually } from "./support/eventually.ts"
import { freshNamespace, type Node, node, TestServer, withNode } from "./support/live.ts"
import { asks } from "./support/requests.ts"
import { eventsOf, forgetSession, fragile, lose, on, pending, promptly, several } from "./support/several.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

const barrierOn = <E = never>(
  context: Node,
  parties: number,
  options?: Omit<Barrier.Options<string, E>, "parties" | "schema">
) => on(context, Barrier.make({ name: "all", parties, schema: Schema.String, ...options }))

const arrived = (barrier: Barrier.Barrier<string, unknown>, count: number) =>
  eventually(Effect.map(barrier.arrived, (found) => found === count), { message: `${count} have arrived` })

/** Has one wait, and makes sure that it does. */
const waiting = <E>(barrier: Barrier.Barrier<string, E>, contribution: string, count: number) =>
  Effect.tap(Effect.forkChild(barrier.await(contribution)), () => arrived(barrier, count))

const reasonOf = <A>(fiber: Fiber.Fiber<A, Barrier.BarrierError>) =>
  Effect.map(promptly(Effect.flip(Fiber.join(fiber)), "the failure"), ({ reason }) => reason)

layer(TestServer.layer, live)("a barrier", (it) => {
  it.effect("lets all pass with what all have brought, generation by generation, in all processes", () =>
    several(3, (nodes) =>
      Effect.gen(function*() {
        const barriers = yield* Effect.forEach(nodes, (context) => barrierOn(context, 3))
        for (let generation = 1; generation <= 5; generation++) {
          const first = yield* waiting(barriers[generation % 3]!, `a${generation}`, 1)
          const second = yield* waiting(barriers[0]!, `b${generation}`, 2)
          yield* pending(first)
          const third = yield* barriers[(generation + 1) % 3]!.await(`c${generation}`)
          const contributions = ["a", "b", "c"].map((one) => `${one}${generation}`)
          assert.deepStrictEqual(third, { generation, index: 2, contributions })
          assert.deepStrictEqual(yield* promptly(Fiber.join(first), "the first"), {
            generation,
            index: 0,
            contributions
          })
          assert.deepStrictEqual(yield* promptly(Fiber.join(second), "the second"), {
            generation,
            index: 1,
            contributions
          })
          assert.strictEqual(yield* barriers[0]!.arrived, 0)
        }
      })))

  it.effect("notifies a party whose connection is lost when its time is over that its generation passed", () =>
    several(2, ([, b], namespace, server) =>
      Effect.gen(function*() {
        const line = yield* proxy(server)
        const far = yield* node(line.url, { namespace, partitions: 1, lease: "30 seconds" })
        const [one, two] = [yield* barrierOn(far, 2), yield* barrierOn(b!, 2)]
        const begun = Date.now()
        const first = yield* Effect.forkChild(one.await("a", { wait: "500 millis" }))
        yield* arrived(two, 1)
        yield* line.refuse
        yield* line.closeAll
        assert.deepStrictEqual((yield* two.await("b")).contributions, ["a", "b"])
        yield* awake(Math.max(0, 550 - elapsed(begun)))
        yield* pending(first)
        yield* line.pass
        assert.deepStrictEqual((yield* promptly(Fiber.join(first), "the pass")).contributions, ["a", "b"])
      })))

  it.effect("notifies a party whose time is over that its generation passed, and waits for an action that has begun", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const line = yield* proxy(server)
        const slow = yield* node(line.url, { namespace, partitions: 1, lease: "30 seconds" })
        const [one, two] = [yield* barrierOn(slow, 2), yield* barrierOn(b!, 2)]
        const first = yield* Effect.forkChild(one.await("a", { wait: "300 millis" }))
        yield* arrived(two, 1)
        yield* line.delay({ replies: 600 })
        assert.deepStrictEqual((yield* two.await("b")).contributions, ["a", "b"])
        assert.deepStrictEqual((yield* promptly(Fiber.join(first), "the pass")).contributions, ["a", "b"])
        yield* line.blackhole
        const begun = Date.now()
        const unanswered = yield* Effect.forkChild(one.await("a", { wait: "200 millis" }))
        assert.strictEqual((yield* reasonOf(unanswered))._tag, "WaitTimeout")
        assert.isBelow(Date.now() - begun, 2500)
        yield* line.pass
        yield* line.closeAll
        yield* arrived(two, 0)
        const late = yield* reasonOf(yield* Effect.forkChild(one.await("a", { wait: "50 millis" })))
        assert.strictEqual(late._tag, "WaitTimeout")
        yield* arrived(two, 0)

        const inside = yield* Deferred.make<void>()
        const end = yield* Deferred.make<void>()
        const action = () => Effect.andThen(Deferred.succeed(inside, undefined), Deferred.await(end))
        const acting = (context: Node) =>
          on(context, Barrier.make({ name: "acting", parties: 2, schema: Schema.String, action }))
        const [three, four] = [yield* acting(a!), yield* acting(b!)]
        const waiter = yield* Effect.forkChild(three.await("a", { wait: "500 millis" }))
        yield* eventually(Effect.map(four.arrived, (count) => count === 1))
        const runner = yield* Effect.forkChild(four.await("b", { wait: "500 millis" }))
        yield* Deferred.await(inside)
        // Longer than a second more.
        yield* Effect.sleep("1600 millis")
        yield* pending(waiter)
        yield* Deferred.succeed(end, undefined)
        for (const fiber of [waiter, runner]) {
          assert.deepStrictEqual((yield* promptly(Fiber.join(fiber), "the pass")).contributions, ["a", "b"])
        }
      })))

  it.effect("does not let a party wait on whose time is over when the action ends in another way", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const begin = (onDeparture: "break" | "withdraw", round: string) =>
          Effect.gen(function*() {
            const inside = yield* Deferred.make<void>()
            const action = () => Effect.andThen(Deferred.succeed(inside, undefined), Effect.never)
            const options = { name: onDeparture + round, parties: 2, schema: Schema.String, action, onDeparture }
            const [one, two] = [yield* on(a!, Barrier.make(options)), yield* on(b!, Barrier.make(options))]
            const waiter = yield* Effect.forkChild(one.await("a", { wait: "200 millis" }))
            yield* arrived(two, 1)
            const runner = yield* Effect.forkChild(two.await("b"))
            yield* Deferred.await(inside)
            return { runner, two, waiter, expected: onDeparture === "break" ? "BarrierBroken" : "WaitTimeout" }
          })
        for (const round of ["", ", lost"]) {
          const both = [yield* begin("break", round), yield* begin("withdraw", round)]
          yield* Effect.sleep("1300 millis")
          if (round !== "") yield* lose(a!, namespace, server)
          for (const { expected, runner, two, waiter } of both) {
            yield* pending(waiter)
            yield* Fiber.interrupt(runner)
            assert.strictEqual((yield* reasonOf(waiter))._tag, expected)
            yield* arrived(two, 0)
          }
        }
      })))

  it.effect("takes a party back whose session is lost, though others have passed before it came", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const options = { onDeparture: "withdraw" } as const
        const [one, two] = [yield* barrierOn(a!, 2, options), yield* barrierOn(b!, 2, options)]
        for (let count = 0; count < 3; count++) {
          yield* Effect.all([two.await("b"), two.await("b")], { concurrency: "unbounded" })
        }
        const waiter = yield* waiting(one, "a", 1)
        yield* lose(a!, namespace, server)
        yield* arrived(two, 1)
        yield* pending(waiter)
        assert.deepStrictEqual((yield* two.await("b")).contributions.toSorted(), ["a", "b"])
        assert.strictEqual((yield* promptly(Fiber.join(waiter), "the pass")).generation, 4)
      })))

  it.effect("keeps in step the parties that come again and again at the same time", () =>
    several(3, (nodes) =>
      Effect.gen(function*() {
        const seen = new Map<number, Set<string>>()
        yield* Effect.forEach(
          nodes.flatMap((context, at) => [[context, at] as const, [context, at + 3] as const]),
          ([context, at]) =>
            Effect.gen(function*() {
              const barrier = yield* on(context, Barrier.make({ name: "steps", parties: 6, schema: Schema.Number }))
              for (let round = 1; round <= 50; round++) {
                const { contributions, generation, index } = yield* barrier.await(round * 10 + at)
                assert.strictEqual(generation, round)
                assert.strictEqual(contributions[index], round * 10 + at)
                seen.set(round, (seen.get(round) ?? new Set()).add(contributions.join()))
              }
            }).pipe(Effect.scoped),
          { concurrency: "unbounded" }
        )
        assert.strictEqual(seen.size, 50)
        for (const same of seen.values()) assert.strictEqual(same.size, 1)
      })))

  it.effect("refuses another number of parties, and bad arguments as defects", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        yield* barrierOn(a!, 2)
        const error = yield* Effect.flip(barrierOn(b!, 3))
        assert.deepInclude(error.reason, {
          _tag: "PartiesMismatch",
          kind: "barrier",
          name: "all",
          parties: 3,
          existing: 2
        })
        assert.include(error.message, "barrier \"all\" of namespace ")
        assert.include(error.message, "is open elsewhere for 2 parties, not 3")
        for (const parties of [0, -1, 1.5, Number.NaN, 1025]) {
          const exit = yield* Effect.exit(barrierOn(b!, parties))
          assert.isTrue(Exit.isFailure(exit) && String(exit.cause).includes("RangeError"))
        }
        for (const options of [{ name: "", parties: 1 }, { name: "a", parties: 1, action: "act" as never }]) {
          const exit = yield* Effect.exit(on(b!, Barrier.make(options)))
          assert.isTrue(Exit.isFailure(exit) && String(exit.cause).includes("RangeError"))
        }
      })))

  it.effect("has a number of parties that changes when a process says so, for all processes", () =>
    several(3, ([a, b, c], namespace, server) =>
      Effect.gen(function*() {
        const one = yield* barrierOn(a!, 3)
        const first = yield* waiting(one, "1", 1)
        const second = yield* waiting(one, "2", 2)
        // What is there is kept by one that does not mind.
        const two = yield* barrierOn(b!, 9, { onMismatch: "keep" })
        assert.strictEqual(two.parties, 3)
        yield* pending(first)
        // The generation has become complete.
        const three = yield* barrierOn(c!, 2, { onMismatch: "resize" })
        for (const [index, fiber] of [first, second].entries()) {
          const passed = yield* promptly(Fiber.join(fiber), "those who had arrived")
          assert.deepStrictEqual(passed, { generation: 1, index, contributions: ["1", "2"] })
        }
        for (const barrier of [one, two, three]) yield* eventually(Effect.sync(() => barrier.parties === 2))
        // A member that joins again, after its session is lost, keeps what is in force.
        yield* lose(a!, namespace, server)
        const third = yield* waiting(one, "3", 1)
        assert.strictEqual((yield* two.await("4")).generation, 2)
        yield* promptly(Fiber.join(third), "the third")
        // And it is in force after Redis has lost its data.
        yield* server.cli("FLUSHALL")
        const fourth = yield* waiting(one, "5", 1)
        yield* two.await("6")
        yield* promptly(Fiber.join(fourth), "the fourth")
        assert.deepStrictEqual([one.parties, two.parties, three.parties], [2, 2, 2])
      })))

  it.effect("has the former number of parties again when Redis has forgotten another one", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const one = yield* barrierOn(a!, 2)
        const key = `{${namespace}:00}:barrier:${one.name}`
        yield* server.cli("COPY", key, `${key}:before`)
        const two = yield* barrierOn(b!, 3, { onMismatch: "resize" })
        yield* eventually(Effect.sync(() => one.parties === 3))
        yield* server.cli("RENAME", `${key}:before`, key)
        for (const context of [a!, b!]) yield* forgetSession(context, namespace, server)
        yield* eventually(Effect.sync(() => one.parties === 2 && two.parties === 2))
      })))

  it.effect("passes the parties that came first when fewer are enough, and waits for more when they are not", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const one = yield* barrierOn(a!, 5)
        const fibers: Array<Fiber.Fiber<Barrier.Arrival<string>, Barrier.BarrierError>> = []
        for (let at = 0; at < 4; at++) fibers.push(yield* waiting(one, String(at), at + 1))
        yield* Effect.scoped(barrierOn(b!, 3, { onMismatch: "resize" }))
        const passed = yield* promptly(Effect.forEach(fibers.slice(0, 3), Fiber.join), "the first three")
        assert.deepStrictEqual(passed[0]!.contributions, ["0", "1", "2"])
        yield* arrived(one, 1)
        yield* Effect.scoped(barrierOn(b!, 4, { onMismatch: "resize" }))
        for (let at = 4; at < 6; at++) fibers.push(yield* waiting(one, String(at), at - 2))
        for (const fiber of fibers.slice(3)) yield* pending(fiber)
        assert.deepStrictEqual((yield* one.await("6")).contributions, ["3", "4", "5", "6"])
        yield* promptly(Effect.forEach(fibers, Fiber.join), "all of them")
      })))

  it.effect("runs its action for the parties that had arrived, when the number changes meanwhile", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const gate = yield* Deferred.make<void>()
        const seen: Array<ReadonlyArray<string>> = []
        const one = yield* barrierOn(a!, 2, {
          action: ({ contributions }) =>
            Effect.andThen(Effect.sync(() => seen.push(contributions)), Deferred.await(gate))
        })
        const first = yield* waiting(one, "1", 1)
        const second = yield* Effect.forkChild(one.await("2"))
        yield* eventually(Effect.sync(() => seen.length === 1))
        const two = yield* barrierOn(b!, 3, { onMismatch: "resize" })
        assert.deepStrictEqual([yield* two.arrived, two.parties], [2, 3])
        const third = yield* Effect.forkChild(two.await("3"))
        yield* eventually(
          Effect.map(server.cli("HLEN", `{${namespace}:00}:barrier-items:all`), (length) => length.trim() === "3")
        )
        yield* Deferred.succeed(gate, undefined)
        const contributions = ["1", "2"]
        assert.deepStrictEqual((yield* promptly(Fiber.join(first), "the first")).contributions, contributions)
        assert.deepStrictEqual((yield* promptly(Fiber.join(second), "the second")).contributions, contributions)
        yield* arrived(two, 1)
        yield* pending(third)
        yield* Effect.all([one.await("4"), one.await("5")], { concurrency: "unbounded" })
        assert.strictEqual((yield* promptly(Fiber.join(third), "the third")).generation, 2)
      })))

  it.effect("minds no number, and no arrival, of a process whose lease has run out", () =>
    several(1, ([here], namespace, server) =>
      Effect.gen(function*() {
        const barrier = yield* barrierOn(here!, 3)
        yield* departed(server, namespace, 1, (context) =>
          Effect.gen(function*() {
            yield* on(context, Barrier.make({ name: "theirs", parties: 7 }))
            const theirs = yield* barrierOn(context, 3)
            yield* Effect.forkChild(Effect.exit(theirs.await("gone")))
            yield* arrived(barrier, 1)
          }))
        assert.strictEqual(yield* barrier.arrived, 0)
        const mine = yield* on(here!, Barrier.make({ name: "theirs", parties: 8 }))
        assert.strictEqual(mine.parties, 8)
      }), { lease: "60 seconds" }))

  it.effect.each(["fail", "keep"] as const)(
    "is opened with another number when the last process that had it open has died: %s",
    (onMismatch) =>
      several(1, ([here], namespace, server) =>
        Effect.gen(function*() {
          yield* on(here!, Barrier.make({ name: "another", parties: 1 }))
          yield* departed(server, namespace, 1, (context) => barrierOn(context, 3))
          assert.strictEqual((yield* barrierOn(here!, 4, { onMismatch })).parties, 4)
        }), { lease: "60 seconds" })
  )

  it.effect("is waited for as long as the caller, or the coordinator, says", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const one = yield* barrierOn(a!, 2)
        const two = yield* barrierOn(b!, 2, { action: () => Effect.sleep("200 millis") })
        for (const barrier of [one, two]) {
          for (const options of [{ wait: "30 millis" }, undefined] as const) {
            const { reason } = yield* promptly(
              Effect.flip(barrier.await("alone", options)),
              "the time-out"
            ) as Effect.Effect<
              Barrier.BarrierError
            >
            assert.deepInclude(reason, { _tag: "WaitTimeout", kind: "barrier", key: "all", away: false })
            yield* arrived(one, 0)
          }
        }
        // The action is no wait.
        const first = yield* Effect.forkChild(one.await("1", { wait: "10 seconds" }))
        yield* arrived(one, 1)
        yield* two.await("2")
        yield* promptly(Fiber.join(first), "the other")
        const exit = yield* Effect.exit(one.await("", { wait: 0 }))
        assert.isTrue(Exit.isFailure(exit) && String(exit.cause).includes("RangeError"))
      }), { wait: "100 millis" }))

  it.effect("notices that events were lost, by their numbers", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const redis = yield* client(server)
        const resource = actor(redis, namespace, "barrier:all")
        const session = (context: Node) =>
          Effect.map(
            Effect.provideContext(Effect.flatMap(Coordinator.Coordinator, (it) => it.sessions), context),
            ([session]) => session!.id!
          )
        /** Resets it as another process would, without a trace in the mailbox. */
        const resetUnheard = (context: Node) =>
          Effect.flatMap(session(context), (id) =>
            Effect.promise(() =>
              redis.multi()
                .call(
                  "FCALL",
                  `${library}_test`,
                  3,
                  resource.keys("")[0]!,
                  resource.key,
                  resource.key.replace(":barrier:", ":barrier-items:"),
                  "",
                  "0",
                  "barrier.reset"
                )
                .xtrim(`{${namespace}:00}:mail:${id}`, "MAXLEN", 0)
                .exec()
            ))
        const running = yield* Deferred.make<void>()
        const one = yield* barrierOn(a!, 1, {
          action: () => Effect.andThen(Deferred.succeed(running, undefined), Effect.never)
        })
        const two = yield* barrierOn(b!, 1)
        // An action that runs for nothing.
        const runs = yield* Effect.forkChild(one.await(""))
        yield* Deferred.await(running)
        yield* resetUnheard(a!)
        assert.deepInclude(yield* reasonOf(runs), { _tag: "BarrierBroken", generation: 1, why: "reset" })
        yield* arrived(two, 0)
        // A wait that is over; and one that goes on.
        yield* Effect.scoped(barrierOn(b!, 3, { onMismatch: "resize" }))
        const waits = yield* waiting(two, "", 1)
        yield* resetUnheard(b!)
        assert.deepInclude(yield* reasonOf(waits), { _tag: "BarrierBroken", generation: 2, missing: 2, why: "reset" })
        const other = yield* on(a!, Barrier.make({ name: "other", parties: 2 }))
        const stays = yield* Effect.forkChild(other.await())
        yield* eventually(Effect.map(other.arrived, (found) => found === 1))
        const breaks = yield* waiting(one, "", 1)
        yield* resetUnheard(a!)
        assert.deepInclude(yield* reasonOf(breaks), { _tag: "BarrierBroken", generation: 3 })
        yield* pending(stays)
        const same = yield* on(b!, Barrier.make({ name: "other", parties: 2 }))
        assert.strictEqual((yield* same.await()).index, 1)
        yield* promptly(Fiber.join(stays), "the wait that goes on")
      }), { lease: "1200 millis", margin: "200 millis" }))

  it.effect("carries every value that the schema allows, under any name", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const schema = Schema.Struct({ at: Schema.Date, text: Schema.String, big: Schema.BigInt })
        const name = "}{:\n\u0000'\"\\ ü😀 each"
        const [one, two] = [
          yield* on(a!, Barrier.make({ name, parties: 2, schema })),
          yield* on(b!, Barrier.make({ name, parties: 2, schema }))
        ]
        const values = ["]]],\"each\"\u0000\n\u2028\ud83d\ude00", "x".repeat(100_000)].map((text, at) => ({
          text,
          at: new Date(at),
          big: 2n ** 80n
        }))
        const results = yield* Effect.all([one.await(values[0]!), two.await(values[1]!)], { concurrency: "unbounded" })
        for (const [at, { contributions, index }] of results.entries()) {
          assert.deepStrictEqual(contributions[index], values[at])
          assert.deepStrictEqual(contributions[1 - index], values[1 - at])
        }
        const other = yield* on(b!, Barrier.make({ name, parties: 2, schema: Schema.Number }))
        const waits = yield* Effect.forkChild(one.await(values[0]!))
        yield* eventually(Effect.map(one.arrived, (count) => count === 1))
        assert.strictEqual((yield* Effect.flip(other.await(1))).reason._tag, "InvalidPayload")
        assert.strictEqual((yield* reasonOf(waits))._tag, "InvalidPayload")
        const even = yield* on(
          a!,
          Barrier.make({ name: "even", parties: 1, schema: Schema.Number.check(Schema.isMultipleOf(2)) })
        )
        assert.strictEqual((yield* Effect.flip(even.await(1))).reason._tag, "InvalidPayload")
        assert.strictEqual((yield* even.await(2)).generation, 1)
      })))

  it.effect("costs one event for each process, however many wait there", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const [one, two] = [yield* barrierOn(a!, 65), yield* barrierOn(b!, 65)]
        const all = yield* Effect.forEach(
          Array.from({ length: 64 }),
          (_, at) => Effect.forkChild(two.await(String(at)))
        )
        yield* arrived(two, 64)
        const before = yield* eventsOf(b!, namespace, server)
        yield* one.await("last")
        const results = yield* promptly(Effect.forEach(all, Fiber.join), "all of them")
        assert.strictEqual(new Set(results.map(({ index }) => index)).size, 64)
        assert.strictEqual(yield* eventsOf(b!, namespace, server), before + 1)
      })))

  it.effect("is broken by a party that is interrupted or times out, and the next generation begins", () =>
    several(3, ([a, b, c]) =>
      Effect.gen(function*() {
        const [one, two, three] = [yield* barrierOn(a!, 4), yield* barrierOn(b!, 4), yield* barrierOn(c!, 4)]
        const first = yield* waiting(one, "first", 1)
        const second = yield* waiting(two, "second", 2)
        const third = yield* waiting(three, "third", 3)
        yield* Fiber.interrupt(second)
        const broken = { _tag: "BarrierBroken", generation: 1, missing: 2, why: "left" } as const
        assert.deepInclude(yield* reasonOf(first), broken)
        assert.deepInclude(yield* reasonOf(third), broken)
        const fourth = yield* waiting(one, "fourth", 1)
        assert.isTrue(Option.isNone(yield* Effect.timeoutOption(two.await("fifth"), "30 millis")))
        assert.deepInclude(yield* reasonOf(fourth), { generation: 2, missing: 3 })
        assert.strictEqual(yield* three.arrived, 0)
        const results = yield* promptly(
          Effect.all([one, two, three, one].map((barrier) => barrier.await("")), { concurrency: "unbounded" }),
          "the next generation"
        )
        assert.deepStrictEqual(results.map(({ generation }) => generation), [3, 3, 3, 3])
      })))

  it.effect("goes on without a party that withdraws", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const [one, two] = [
          yield* barrierOn(a!, 3),
          yield* barrierOn(b!, 3, { onDeparture: "withdraw" })
        ]
        const gone = yield* waiting(two, "gone", 1)
        const stays = yield* waiting(one, "stays", 2)
        yield* Fiber.interrupt(gone)
        yield* arrived(one, 1)
        yield* pending(stays)
        const second = yield* waiting(two, "second", 2)
        assert.deepStrictEqual((yield* two.await("third")).contributions, ["stays", "second", "third"])
        assert.strictEqual((yield* promptly(Fiber.join(stays), "who stays")).index, 0)
        assert.strictEqual((yield* promptly(Fiber.join(second), "the second")).index, 1)
      })))

  it.effect("is left by a party that is interrupted at any moment of arriving, and of passing", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const [one, two] = [yield* barrierOn(a!, 2), yield* barrierOn(b!, 2, { action: () => Effect.yieldNow })]
        const outcomes = new Set<string>()
        // How long it takes to pass, here and now.
        const both = Effect.all([one.await(""), two.await("")], { concurrency: "unbounded" })
        yield* both
        const started = performance.now()
        for (let round = 0; round < 10; round++) yield* both
        const usual = (performance.now() - started) / 10
        for (let delay = 0; delay < 100; delay++) {
          const other = delay % 2 === 0 ? yield* Effect.forkChild(Effect.exit(one.await("other"))) : undefined
          const given = yield* Effect.forkChild(two.await("given up"), { startImmediately: true })
          yield* Effect.callback<void>((resume) => {
            const end = performance.now() + delay / 40 * usual
            const look = () => performance.now() < end ? setImmediate(look) : resume(Effect.void)
            look()
          })
          yield* Fiber.interrupt(given)
          if (other !== undefined) {
            // It passes with the other, or is broken by it; or it waits alone, when the other had left before it came.
            yield* Effect.raceFirst(Fiber.join(other), arrived(one, 1))
            const exit = other.pollUnsafe()
            outcomes.add(exit === undefined ? "alone" : Exit.isSuccess(yield* Fiber.join(other)) ? "passed" : "broken")
            yield* Fiber.interrupt(other)
          }
          yield* arrived(one, 0)
        }
        assert.includeMembers([...outcomes], ["passed"])
      })))

  it.effect("is reset, and numbers its generations on", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const [one, two] = [yield* barrierOn(a!, 2), yield* barrierOn(b!, 2)]
        yield* one.reset
        const waits = yield* waiting(one, "", 1)
        yield* two.reset
        const error = yield* reasonOf(waits)
        assert.deepInclude(error, { _tag: "BarrierBroken", generation: 1, missing: 1, why: "reset" })
        assert.include((error as Barrier.BarrierBroken).message, "it was reset")
        const [{ generation }] = yield* Effect.all([one.await(""), two.await("")], { concurrency: "unbounded" })
        assert.strictEqual(generation, 2)
      })))

  it.effect("has the last party run the action before any party passes, under a lease", () =>
    several(3, ([a, b, c]) =>
      Effect.gen(function*() {
        const runs: Array<{ readonly who: string; readonly all: ReadonlyArray<string>; readonly token: number }> = []
        const gate = yield* Deferred.make<void>()
        const action = (who: string) => ({ contributions }: Barrier.Arrival<string>) =>
          Effect.gen(function*() {
            const { token } = Option.getOrThrow(yield* Lease.currentOf("all"))
            runs.push({ who, all: contributions, token })
            yield* Deferred.await(gate)
          })
        const [one, two, three] = [
          yield* barrierOn(a!, 2, { action: action("one") }),
          yield* barrierOn(b!, 2, { action: action("two") }),
          yield* barrierOn(c!, 2)
        ]
        const first = yield* waiting(one, "1", 1)
        const second = yield* Effect.forkChild(two.await("2"))
        yield* eventually(Effect.sync(() => runs.length === 1))
        // Surplus: of the next generation.
        const third = yield* Effect.forkChild(three.await("3"))
        const fourth = yield* Effect.forkChild(one.await("4"))
        const given = yield* Effect.forkChild(one.await("given up"))
        yield* Effect.yieldNow
        yield* Fiber.interrupt(given)
        assert.strictEqual(yield* three.arrived, 2)
        // All have arrived, so leaving changes nothing for the others.
        yield* Fiber.interrupt(first)
        for (const fiber of [second, third, fourth]) yield* pending(fiber)
        yield* Deferred.succeed(gate, undefined)
        assert.deepStrictEqual(yield* promptly(Fiber.join(second), "the second"), {
          generation: 1,
          index: 1,
          contributions: ["1", "2"]
        })
        const [last] = [
          yield* promptly(Fiber.join(fourth), "the fourth"),
          yield* promptly(Fiber.join(third), "the third")
        ]
        assert.strictEqual(last.generation, 2)
        // By the one that has an action, of those two.
        assert.deepStrictEqual(runs.map(({ all, who }) => [who, [...all].sort()]), [["two", ["1", "2"]], ["one", [
          "3",
          "4"
        ]]])
        assert.isAbove(runs[1]!.token, runs[0]!.token)
      })))

  it.effect("is broken when the action fails, and its party has the failure", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const [one, two] = [
          yield* barrierOn(a!, 2),
          yield* barrierOn(b!, 2, { action: () => Effect.fail("no" as const) })
        ]
        const waits = yield* waiting(one, "", 1)
        assert.strictEqual(yield* Effect.flip(two.await("")), "no")
        assert.deepInclude(yield* reasonOf(waits), { _tag: "BarrierBroken", generation: 1, missing: 1, why: "action" })
        const never = yield* on(b!, Barrier.make({ name: "never", parties: 2, action: () => Effect.never }))
        const other = yield* on(a!, Barrier.make({ name: "never", parties: 2 }))
        const also = yield* Effect.forkChild(other.await())
        yield* eventually(Effect.map(other.arrived, (count) => count === 1))
        assert.isTrue(Option.isNone(yield* Effect.timeoutOption(never.await(), "50 millis")))
        assert.strictEqual((yield* reasonOf(also))._tag, "BarrierBroken")
        assert.strictEqual(yield* other.arrived, 0)
      })))

  it.effect("has another one run the action when its party withdraws", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        let failing = true
        const action = () => Effect.suspend(() => failing ? Effect.fail("no" as const) : Effect.void)
        const [one, two] = [
          yield* barrierOn(a!, 2),
          yield* barrierOn(b!, 2, { action, onDeparture: "withdraw" })
        ]
        const waits = yield* waiting(one, "waits", 1)
        assert.strictEqual(yield* Effect.flip(two.await("")), "no")
        yield* pending(waits)
        yield* arrived(one, 1)
        failing = false
        assert.deepStrictEqual((yield* two.await("again")).contributions, ["waits", "again"])
        assert.strictEqual((yield* promptly(Fiber.join(waits), "the waiter")).generation, 1)
      })))

  it.effect("is reset while its action runs, which is interrupted, or has ended when it observes the reset", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const running = yield* Deferred.make<void>()
        const gate = yield* Deferred.make<void>()
        let interruptible = true
        const one = yield* barrierOn(a!, 1, {
          action: () => {
            const action = Effect.andThen(Deferred.succeed(running, undefined), Deferred.await(gate))
            return interruptible ? action : Effect.uninterruptible(action)
          }
        })
        const two = yield* barrierOn(b!, 1)
        const runs = yield* Effect.forkChild(one.await(""))
        yield* Deferred.await(running)
        yield* two.reset
        assert.deepInclude(yield* reasonOf(runs), { _tag: "BarrierBroken", generation: 1, why: "reset" })

        interruptible = false
        const stays = yield* Effect.forkChild(one.await(""))
        yield* eventually(Effect.map(two.arrived, (found) => found === 1))
        yield* two.reset
        assert.strictEqual((yield* two.await("")).generation, 3)
        yield* Deferred.succeed(gate, undefined)
        assert.deepInclude(yield* reasonOf(stays), { _tag: "BarrierBroken", generation: 2, why: "reset" })
      })))

  it.effect("keeps its waiters when their sessions are lost, and each arrives once", () =>
    several(3, ([a, b, c], namespace, server) =>
      Effect.gen(function*() {
        const [one, two, three] = [
          yield* barrierOn(a!, 3),
          yield* barrierOn(b!, 3, { onDeparture: "withdraw" }),
          yield* barrierOn(c!, 3)
        ]
        const first = yield* waiting(one, "1", 1)
        const second = yield* waiting(two, "2", 2)
        for (let times = 0; times < 3; times++) {
          yield* lose(a!, namespace, server)
          yield* lose(b!, namespace, server)
        }
        assert.strictEqual(yield* three.arrived, 2)
        assert.deepStrictEqual((yield* three.await("3")).contributions, ["1", "2", "3"])
        assert.strictEqual((yield* promptly(Fiber.join(first), "the first")).index, 0)
        assert.strictEqual((yield* promptly(Fiber.join(second), "the second")).index, 1)
      })))

  it.effect("notifies a party that lost its session meanwhile that the generation has passed", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const [one, two] = [yield* barrierOn(a!, 2), yield* barrierOn(b!, 2)]
        const first = yield* waiting(one, "1", 1)
        // The event goes to a mailbox that is deleted.
        const [session] = (yield* server.cli("HKEYS", `{${namespace}:00}:barrier-items:all`)).split("/")
        yield* server.cli("DEL", `{${namespace}:00}:mail:${session}`)
        assert.strictEqual((yield* two.await("2")).generation, 1)
        const third = yield* waiting(two, "3", 1)
        yield* pending(first)
        yield* lose(a!, namespace, server)
        assert.deepStrictEqual(yield* promptly(Fiber.join(first), "the first"), {
          generation: 1,
          index: 0,
          contributions: ["1", "2"]
        })
        yield* pending(third)
        assert.strictEqual((yield* one.await("4")).generation, 2)
        yield* promptly(Fiber.join(third), "the third")
      })))

  it.effect("interrupts the action when its session is lost, and fails with LeaseLost", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const running = yield* Deferred.make<void>()
        const interrupted = yield* Deferred.make<void>()
        const [one, two] = [
          yield* barrierOn(a!, 2, {
            action: () =>
              Deferred.succeed(running, undefined).pipe(
                Effect.andThen(Effect.never),
                Effect.onInterrupt(() => Deferred.succeed(interrupted, undefined))
              )
          }),
          yield* barrierOn(b!, 2)
        ]
        const waits = yield* waiting(two, "", 1)
        const runs = yield* Effect.forkChild(one.await(""))
        yield* promptly(Deferred.await(running), "the action")
        yield* lose(a!, namespace, server)
        yield* promptly(Deferred.await(interrupted), "the interruption")
        assert.strictEqual((yield* reasonOf(runs))._tag, "LeaseLost")
        assert.deepInclude(yield* reasonOf(waits), { _tag: "BarrierBroken", generation: 1 })
      })))

  it.effect("has one outcome for all parties when the session that runs the action is lost as it lets them pass", () =>
    several(1, ([other], namespace, server) =>
      Effect.gen(function*() {
        // Executed before it is lost, with a reply that does not come, or not at all.
        for (const verdict of ["blackholeReply", "blackhole"] as const) {
          yield* Effect.scoped(Effect.gen(function*() {
            const line = yield* proxy(server)
            const context = yield* fragile(server, line, namespace, 1)
            const one = yield* barrierOn(context, 2, { action: () => Effect.void })
            const two = yield* barrierOn(other!, 2)
            const waits = yield* waiting(two, "waits", 1)
            // It is written with the next request.
            const holds = Effect.andThen(
              Effect.forEach([other!, context], (node) => on(node, Lock.withLock(Effect.void, "written"))),
              Effect.map(on(context, Metric.value(Metrics.holds)), ({ value }) => value)
            )
            const before = yield* holds
            const met = yield* line.once(asks("barrier.release"), verdict)
            const runs = yield* Effect.forkChild(Effect.result(one.await("runs")))
            yield* met
            yield* forgetSession(context, namespace, server)
            const mine = yield* promptly(Fiber.join(runs), "who ran the action")
            const theirs = yield* promptly(Effect.result(Fiber.join(waits)), "who waited")
            assert.strictEqual(Result.isSuccess(mine), Result.isSuccess(theirs))
            // Otherwise its next session lets them pass, unless what it was has been reaped before.
            if (verdict === "blackholeReply") assert.isTrue(Result.isSuccess(mine))
            yield* eventually(Effect.map(holds, (now) => assert.strictEqual(now, before)))
          }))
        }
      })))

  it.effect("notifies the party that lets others pass that the coordinator is closed, however its session ends", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      for (const gone of ["the connection", "the connection for a while", "the session"] as const) {
        const namespace = freshNamespace()
        const line = yield* proxy(server)
        const scope = yield* Scope.make()
        const context = yield* Scope.provide(
          node(line.url, {
            namespace,
            partitions: 1,
            lease: "1 second",
            margin: "200 millis",
            requestTimeout: "300 millis"
          }),
          scope
        )
        const one = yield* Scope.provide(barrierOn(context, 1, { action: () => Effect.void }), scope)
        const held = yield* line.hold(asks("barrier.release"))
        const runs = yield* Effect.forkChild(Effect.exit(one.await("")))
        yield* held.request
        if (gone === "the session") yield* forgetSession(context, namespace, server)
        else yield* line.blackhole
        const closing = yield* Effect.forkChild(Scope.close(scope, Exit.void), { startImmediately: true })
        if (gone === "the session") yield* held.release()
        if (gone === "the connection for a while") yield* line.pass
        yield* promptly(Fiber.join(runs), `who lets them pass, without ${gone}`)
        yield* promptly(Fiber.join(closing), "the end of the coordinator")
        yield* held.release()
      }
    }))

  it.effect("is made again after Redis has lost a part of it", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const [one, two] = [yield* barrierOn(a!, 2), yield* barrierOn(b!, 2)]
        for (const part of ["barrier", "barrier-items"]) {
          const first = yield* waiting(one, "1", 1)
          yield* server.cli("DEL", `{${namespace}:00}:${part}:all`)
          const { contributions } = yield* promptly(two.await("2"), `the party without its ${part}`)
          assert.sameMembers([...contributions], ["1", "2"])
          assert.deepStrictEqual((yield* Fiber.join(first)).contributions, contributions)
        }
      }), { lease: "1 second", margin: "200 millis" }))

  it.effect("is made again by its waiters after Redis has lost its data", () =>
    several(3, ([a, b, c], _, server) =>
      Effect.gen(function*() {
        const [one, two] = [yield* barrierOn(a!, 3), yield* barrierOn(b!, 3)]
        const first = yield* waiting(one, "1", 1)
        const second = yield* waiting(two, "2", 2)
        yield* server.cli("FLUSHALL")
        const three = yield* barrierOn(c!, 3)
        yield* arrived(three, 2)
        const { contributions } = yield* three.await("3")
        assert.deepStrictEqual([...contributions].sort(), ["1", "2", "3"])
        for (const fiber of [first, second]) {
          assert.deepStrictEqual((yield* promptly(Fiber.join(fiber), "who waited")).contributions, contributions)
        }
      })))

  it.effect("ends for its waiters with its scope, and with the coordinator", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const two = yield* barrierOn(b!, 3)
        const waits = yield* waiting(two, "", 1)
        const scope = yield* Scope.make()
        const one = yield* Scope.provide(barrierOn(a!, 3), scope)
        const inside = yield* waiting(one, "", 2)
        yield* Scope.close(scope, Exit.void)
        const exit = yield* promptly(Fiber.await(inside), "who waited inside")
        assert.isTrue(Exit.isFailure(exit) && Cause.hasInterruptsOnly(exit.cause))
        assert.strictEqual((yield* reasonOf(waits))._tag, "BarrierBroken")
        const late = yield* Effect.exit(one.await(""))
        assert.isTrue(Exit.isFailure(late) && Cause.hasInterruptsOnly(late.cause))
        assert.strictEqual(yield* two.arrived, 0)

        const closing = yield* Scope.make()
        const server = yield* TestServer
        const context = yield* Scope.provide(node(server.url, { namespace: freshNamespace() }), closing)
        const alone = yield* barrierOn(context, 2)
        const left = yield* waiting(alone, "", 1)
        yield* Scope.close(closing, Exit.void)
        assert.strictEqual((yield* reasonOf(left))._tag, "CoordinatorClosed")
        assert.strictEqual((yield* Effect.flip(alone.await(""))).reason._tag, "CoordinatorClosed")
        assert.strictEqual((yield* Effect.flip(alone.arrived)).reason._tag, "CoordinatorClosed")
      })))

  it.effect("is a typed service, with the context and the error of its action", () => {
    class Sums extends Barrier.Service<Sums>()("sums", {
      parties: 2,
      schema: Schema.Number,
      action: ({ contributions }) => contributions.includes(0) ? Effect.fail("zero" as const) : Effect.void
    }) {}
    class Plain extends Barrier.Service<Plain>()("plain", { parties: 1 }) {}
    return withNode(() =>
      Effect.gen(function*() {
        const sums = yield* Sums
        const [one] = yield* Effect.all([sums.await(1), sums.await(2)], { concurrency: "unbounded" })
        assert.deepStrictEqual(one.contributions, [1, 2])
        const failures = yield* Effect.all([Effect.flip(sums.await(0)), Effect.flip(sums.await(1))], {
          concurrency: "unbounded"
        })
        assert.isTrue(failures.some((failure: "zero" | Barrier.BarrierError) => failure === "zero"))
        assert.deepStrictEqual(yield* (yield* Plain).await(), { generation: 1, index: 0, contributions: [undefined] })
      }).pipe(Effect.provide(Sums.layer), Effect.provide(Plain.layer))
    )
  })

  it.effect("does what its model does, whichever party waits, gives up, resets, loses its session or closes", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const who = fc.nat(2)
      const step = fc.oneof(
        { weight: 8, arbitrary: fc.record({ op: fc.constant("await" as const), who }) },
        { weight: 3, arbitrary: fc.record({ op: fc.constant("interrupt" as const), who, pick: fc.nat(10) }) },
        { weight: 1, arbitrary: fc.record({ op: fc.constant("reset" as const), who }) },
        { weight: 1, arbitrary: fc.record({ op: fc.constant("lose" as const), who }) },
        { weight: 1, arbitrary: fc.record({ op: fc.constant("close" as const), who }) }
      )
      interface Waiter {
        readonly fiber: Fiber.Fiber<Barrier.Arrival<string>, Barrier.BarrierError>
        readonly who: number
        readonly value: string
      }
      yield* Effect.promise(() =>
        fc.assert(
          fc.asyncProperty(fc.integer({ min: 1, max: 4 }), fc.array(step, { maxLength: 20 }), (parties, steps) =>
            Effect.runPromise(Effect.scoped(Effect.gen(function*() {
              const namespace = freshNamespace()
              // The last one withdraws.
              const open = (at: number) =>
                Effect.gen(function*() {
                  const scope = yield* Scope.make()
                  yield* Effect.addFinalizer(() =>
                    Scope.close(scope, Exit.void)
                  )
                  return yield* Effect.gen(function*() {
                    const context = yield* node(server.url, { namespace, partitions: 1, lease: "10 seconds" })
                    const barrier = yield* barrierOn(context, parties, { onDeparture: at === 2 ? "withdraw" : "break" })
                    return { context, barrier, close: Scope.close(scope, Exit.void) }
                  }).pipe(Scope.provide(scope))
                })
              const nodes = [yield* open(0), yield* open(1), yield* open(2)]
              let generation = 1
              let count = 0
              let waiters: Array<Waiter> = []
              const broken = (left: ReadonlyArray<Waiter>, why: string) =>
                Effect.gen(function*() {
                  const rest = waiters.filter((one) => !left.includes(one))
                  for (const { fiber } of rest) {
                    const { _tag, generation: broken, ...reason } = (yield* reasonOf(fiber)) as Barrier.BarrierBroken
                    assert.deepStrictEqual([_tag, broken, reason.why], ["BarrierBroken", generation, why])
                  }
                  waiters = []
                  generation++
                })
              const leave = (one: Waiter) =>
                Effect.gen(function*() {
                  if (!waiters.includes(one)) return
                  if (one.who !== 2) yield* broken([one], "left")
                  waiters = waiters.filter((other) => other !== one)
                })
              for (const step of steps) {
                const { barrier, close, context } = nodes[step.who]!
                const mine = waiters.filter(({ who }) => who === step.who)
                if (step.op === "await") {
                  const value = String(count++)
                  const fiber = yield* Effect.forkChild(barrier.await(value))
                  waiters.push({ fiber, who: step.who, value })
                  if (waiters.length === parties) {
                    const contributions = waiters.map(({ value }) => value)
                    for (const [index, { fiber }] of waiters.entries()) {
                      const passed = yield* promptly(Fiber.join(fiber), "who passes")
                      assert.deepStrictEqual(passed, { generation, index, contributions })
                    }
                    waiters = []
                    generation++
                  }
                } else if (step.op === "interrupt") {
                  const one = mine[step.pick % Math.max(1, mine.length)]
                  if (one === undefined) continue
                  yield* Fiber.interrupt(one.fiber)
                  yield* leave(one)
                } else if (step.op === "reset") {
                  yield* barrier.reset
                  if (waiters.length > 0) yield* broken([], "reset")
                } else if (step.op === "lose") {
                  yield* lose(context, namespace, server)
                } else {
                  yield* close
                  // As each of them is released, one after the other.
                  const others = waiters.filter(({ who }) => who !== step.who)
                  if (mine.length > 0 && step.who !== 2) {
                    waiters = [...others]
                    yield* broken([], "left")
                  } else {
                    waiters = others
                  }
                  for (const { fiber } of mine) assert.isTrue(Exit.isFailure(yield* Fiber.await(fiber)))
                  nodes[step.who] = yield* open(step.who)
                }
                yield* arrived(nodes[step.who]!.barrier, waiters.length)
                for (const { fiber } of waiters) yield* pending(fiber)
              }
              for (const { fiber } of waiters) yield* Fiber.interrupt(fiber)
            })))),
          { numRuns: runs(15) }
        )
      )
    }))
})
