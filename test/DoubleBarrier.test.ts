/** Double barriers: a phase has all its parties or none, and no two phases overlap, also when some of them fail. */
import { assert, layer } from "@effect/vitest"
import { Deferred, Effect, Exit, Fiber, Option, Scope } from "effect"
import * as fc from "fast-check"
import { DoubleBarrier, Lease } from "../src/index.ts"
import { departed } from "./support/departed.ts"
import { runs } from "./support/effort.ts"
import { eventually } from "./support/eventually.ts"
import { freshNamespace, type Node, node, TestServer, withNode } from "./support/live.ts"
import { eventsOf, lose, on, pending, promptly, several } from "./support/several.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

const barrierOn = (context: Node, parties: number, onMismatch?: "fail" | "keep" | "resize") =>
  on(context, DoubleBarrier.make({ name: "step", parties, onMismatch }))

const counts = (barrier: DoubleBarrier.DoubleBarrier, inside: number, waiting: number) =>
  eventually(
    Effect.gen(function*() {
      assert.deepStrictEqual([yield* barrier.inside, yield* barrier.queued], [inside, waiting])
    }),
    { message: `${inside} inside, ${waiting} waiting` }
  )

layer(TestServer.layer, live)("a double barrier", (it) => {
  it.effect("lets all enter together, and leave together, phase by phase", () =>
    several(3, (nodes) =>
      Effect.gen(function*() {
        const [one, two, three] = [
          yield* barrierOn(nodes[0]!, 3),
          yield* barrierOn(nodes[1]!, 3),
          yield* barrierOn(nodes[2]!, 3)
        ]
        let last = 0
        for (let number = 1; number <= 3; number++) {
          const first = yield* Effect.forkChild(one.enter())
          const second = yield* Effect.forkChild(two.enter())
          yield* counts(three, 0, 2)
          yield* pending(first)
          const phases = [
            yield* three.enter(),
            yield* promptly(Fiber.join(first), "the first"),
            yield* promptly(Fiber.join(second), "the second")
          ]
          assert.deepStrictEqual(phases.map((phase) => phase.number), [number, number, number])
          assert.strictEqual(new Set(phases.map(({ token }) => token)).size, 1)
          assert.isAbove(phases[0]!.token, last)
          last = phases[0]!.token
          const [third, ...others] = phases
          const leaving = yield* Effect.forkChild(three.leave(third!))
          yield* counts(one, 2, 0)
          // A party that is early: it is for the next phase.
          const early = yield* Effect.forkChild(three.enter())
          yield* counts(one, 2, 1)
          const also = yield* Effect.forkChild(one.leave(others[0]!))
          yield* counts(one, 1, 1)
          for (const fiber of [leaving, also]) yield* pending(fiber)
          yield* pending(early)
          yield* two.leave(others[1]!)
          yield* promptly(Effect.forEach([leaving, also], Fiber.join), "the others")
          yield* Fiber.interrupt(early)
          yield* counts(one, 0, 0)
          assert.isFalse(yield* third!.isHeld)
          // A second time.
          yield* promptly(three.leave(third!), "one that has left")
        }
      })))

  it.effect("never has two phases overlap, nor a phase without one of its parties", () =>
    several(3, (nodes) =>
      Effect.gen(function*() {
        const parties = 4
        let inside = 0
        let phase = 0
        let entered = 0
        yield* Effect.forEach(Array.from({ length: 8 }, (_, at) => nodes[at % 3]!), (context) =>
          Effect.gen(function*() {
            const barrier = yield* barrierOn(context, parties)
            const body = Effect.gen(function*() {
              const { token } = Option.getOrThrow(yield* Lease.current)
              if (token !== phase) {
                assert.strictEqual(inside, 0, "the phase before is over")
                assert.isAbove(token, phase)
                assert.strictEqual(entered % parties, 0)
                phase = token
              }
              entered++
              inside++
              assert.isAtMost(inside, parties)
              yield* Effect.yieldNow
              inside--
            })
            for (let round = 0; round < 20; round++) yield* barrier.withPhase(body)
          }).pipe(Effect.scoped), { concurrency: "unbounded" })
        assert.strictEqual(entered, 160)
      })))

  it.effect("refuses another number of parties, and bad arguments as defects", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const barrier = yield* barrierOn(a!, 1)
        const error = yield* Effect.flip(barrierOn(b!, 3))
        assert.deepInclude(error.reason, {
          _tag: "PartiesMismatch",
          kind: "doubleBarrier",
          name: "step",
          parties: 3,
          existing: 1
        })
        assert.include(error.message, "doubleBarrier \"step\" of namespace ")
        assert.include(error.message, "is open elsewhere for 1 parties, not 3")
        for (const parties of [0, 0.5, 1025]) {
          const exit = yield* Effect.exit(barrierOn(b!, parties))
          assert.isTrue(Exit.isFailure(exit) && String(exit.cause).includes("RangeError"))
        }
        const other = yield* on(b!, DoubleBarrier.make({ name: "\u0000}{:\n😀\"", parties: 1 }))
        const phase = yield* other.enter()
        const exit = yield* Effect.exit(barrier.leave(phase))
        assert.isTrue(Exit.isFailure(exit) && String(exit.cause).includes("TypeError"))
        yield* other.leave(phase)
      })))

  it.effect("has a number of parties that changes when a process says so, from the next phase on", () =>
    several(3, ([a, b, c], namespace, server) =>
      Effect.gen(function*() {
        const one = yield* barrierOn(a!, 3)
        const two = yield* barrierOn(b!, 9, "keep")
        assert.strictEqual(two.parties, 3)
        const entering = [yield* Effect.forkChild(one.enter()), yield* Effect.forkChild(two.enter())]
        yield* counts(one, 0, 2)
        // Enough wait by now.
        const three = yield* barrierOn(c!, 2, "resize")
        const [mine, theirs] = yield* promptly(Effect.forEach(entering, Fiber.join), "the phase")
        assert.strictEqual(mine!.number, 1)
        for (const barrier of [one, two, three]) yield* eventually(Effect.sync(() => barrier.parties === 2))
        // The phase that runs goes on as it is.
        yield* Effect.scoped(barrierOn(c!, 1, "resize"))
        const third = yield* Effect.forkChild(three.enter())
        yield* counts(one, 2, 1)
        yield* pending(third)
        const leaving = yield* Effect.forkChild(one.leave(mine!))
        yield* counts(one, 1, 1)
        yield* pending(leaving)
        yield* two.leave(theirs!)
        yield* promptly(Fiber.join(leaving), "the end of the phase")
        const alone = yield* promptly(Fiber.join(third), "the next phase")
        assert.strictEqual(alone.number, 2)
        yield* three.leave(alone)
        // A member that joins again, after its session is lost, keeps what is in force; also when Redis has lost all.
        yield* lose(a!, namespace, server)
        yield* one.withPhase(Effect.void)
        yield* server.cli("FLUSHALL")
        yield* promptly(one.withPhase(Effect.void), "a phase of one")
        assert.deepStrictEqual([one.parties, two.parties, three.parties], [1, 1, 1])
      })))

  it.effect("minds no number, and no party, of a process whose lease has run out", () =>
    several(1, ([here], namespace, server) =>
      Effect.gen(function*() {
        const barrier = yield* on(here!, DoubleBarrier.make({ name: "other", parties: 1 }))
        yield* departed(server, namespace, 1, (context) =>
          Effect.gen(function*() {
            const theirs = yield* on(context, DoubleBarrier.make({ name: "other", parties: 1 }))
            yield* theirs.enter()
            yield* Effect.forkChild(Effect.exit(Effect.scoped(theirs.enter())))
            yield* counts(barrier, 1, 1)
          }))
        assert.deepStrictEqual([yield* barrier.inside, yield* barrier.queued], [0, 0])
        for (const onMismatch of ["fail", "keep"] as const) {
          yield* departed(server, namespace, 1, (context) => barrierOn(context, 3))
          assert.strictEqual((yield* Effect.scoped(barrierOn(here!, 4, onMismatch))).parties, 4)
        }
      }), { lease: "60 seconds" }))

  it.effect("is waited for as long as the caller, or the coordinator, says, and held no longer than that", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const [one, two] = [yield* barrierOn(a!, 2), yield* barrierOn(b!, 2)]
        const timedOut = { _tag: "WaitTimeout", kind: "doubleBarrier", key: "step", away: false } as const
        const wait = { wait: "20 millis" } as const
        for (
          const waits of [
            Effect.scoped(one.enter(wait)),
            Effect.scoped(one.enter()),
            one.withPhase(Effect.void, wait),
            one.withPhase(Effect.void),
            Effect.void.pipe(one.withPhase(wait)),
            Effect.void.pipe(one.withPhase())
          ]
        ) {
          const { reason } = yield* promptly(Effect.flip(Effect.asVoid(waits)), "the time-out")
          assert.deepInclude(reason, timedOut)
          yield* counts(one, 0, 0)
        }
        const entering = yield* Effect.forkChild(one.enter({ wait: "10 seconds" }))
        yield* counts(two, 0, 1)
        const theirs = yield* two.enter()
        const mine = yield* promptly(Fiber.join(entering), "the phase")
        for (const options of [wait, undefined]) {
          assert.deepInclude((yield* promptly(Effect.flip(one.leave(mine, options)), "the time-out")).reason, timedOut)
          yield* counts(one, 1, 0)
        }
        yield* two.leave(theirs)

        const inside = yield* Effect.forkChild(
          Effect.flip(one.withPhase(Effect.never, { wait: "10 seconds", maxHold: "100 millis" }))
        )
        yield* counts(two, 0, 1)
        yield* two.withPhase(Effect.void, { wait: "10 seconds" })
        const { reason } = yield* promptly(Fiber.join(inside), "the end of the hold")
        assert.deepInclude(reason, { _tag: "LeaseLost", reason: "maxHold" })
      }), { wait: "100 millis" }))

  it.effect("notices that it was let in, and that all have left, though the event was lost", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const [one, two] = [yield* barrierOn(a!, 2), yield* barrierOn(b!, 2)]
        /** Its mailbox is absent for as long as the effect runs, so that an event is dropped. */
        const unheard = <A, E, R>(effect: Effect.Effect<A, E, R>, field: RegExp) =>
          Effect.gen(function*() {
            const fields = (yield* server.cli("HKEYS", `{${namespace}:00}:doubleBarrier:step`)).split("\n")
            const session = fields.find((name) => field.test(name))!.slice(1).split("/")[0]!
            yield* server.cli("DEL", `{${namespace}:00}:mail:${session}`)
            return yield* effect
          })
        const entering = yield* Effect.forkChild(one.enter())
        yield* counts(two, 0, 1)
        const theirs = yield* unheard(two.enter(), /^q/)
        const mine = yield* promptly(Fiber.join(entering), "the phase")
        assert.strictEqual(mine.token, theirs.token)
        const leaving = yield* Effect.forkChild(one.leave(mine))
        yield* counts(two, 1, 0)
        yield* unheard(two.leave(theirs), /^l/)
        yield* promptly(Fiber.join(leaving), "the end of the phase")
      }), { lease: "1200 millis", margin: "200 millis" }))

  it.effect("costs one event for each process at the beginning and at the end, however many are there", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const [one, two] = [yield* barrierOn(a!, 65), yield* barrierOn(b!, 65)]
        const all = yield* Effect.forEach(
          Array.from({ length: 64 }),
          () => Effect.forkChild(Effect.scoped(Effect.flatMap(two.enter(), two.leave)))
        )
        yield* counts(two, 0, 64)
        const before = yield* eventsOf(b!, namespace, server)
        const phase = yield* one.enter()
        yield* counts(two, 1, 0)
        assert.strictEqual(yield* eventsOf(b!, namespace, server), before + 1)
        yield* one.leave(phase)
        yield* promptly(Effect.forEach(all, Fiber.join), "all of them")
        assert.strictEqual(yield* eventsOf(b!, namespace, server), before + 2)
      })))

  it.effect("leaves nothing behind of a party that gives up", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const [one, two] = [yield* barrierOn(a!, 2), yield* barrierOn(b!, 2)]
        assert.isTrue(Option.isNone(yield* Effect.timeoutOption(Effect.scoped(one.enter()), "20 millis")))
        yield* counts(one, 0, 0)
        const scope = yield* Scope.make()
        const entering = yield* Effect.forkChild(Scope.provide(one.enter(), scope))
        const theirs = yield* two.enter()
        yield* promptly(Fiber.join(entering), "the other")
        assert.isTrue(Option.isNone(yield* Effect.timeoutOption(two.leave(theirs), "20 millis")))
        // It has left all the same.
        yield* counts(one, 1, 0)
        const waiting = yield* Effect.forkChild(two.leave(theirs))
        // The end of the scope is leaving, too.
        yield* Scope.close(scope, Exit.void)
        yield* promptly(Fiber.join(waiting), "the waiter for the end")
        yield* counts(one, 0, 0)
      })))

  it.effect("leaves at once when the effect fails or is interrupted, and with the others when it succeeds", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const [one, two] = [yield* barrierOn(a!, 2), yield* barrierOn(b!, 2)]
        const gate = yield* Deferred.make<void>()
        const stays = yield* Effect.forkChild(two.withPhase(Deferred.await(gate)))
        assert.strictEqual(yield* promptly(Effect.flip(one.withPhase(Effect.fail("no"))), "the failure"), "no")
        yield* counts(one, 1, 0)
        yield* pending(stays)
        yield* Deferred.succeed(gate, undefined)
        yield* promptly(Fiber.join(stays), "who stays")

        const running = yield* Deferred.make<void>()
        const never = yield* Effect.forkChild(
          one.withPhase(Effect.andThen(Deferred.succeed(running, undefined), Effect.never))
        )
        const done = yield* Effect.forkChild(two.withPhase(Effect.succeed("done")))
        yield* promptly(Deferred.await(running), "the phase")
        yield* counts(one, 1, 0)
        yield* pending(done)
        yield* Fiber.interrupt(never)
        assert.strictEqual(yield* promptly(Fiber.join(done), "the other"), "done")
      })))

  it.effect("interrupts a party that loses its session inside, and lets the others leave", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const [one, two] = [yield* barrierOn(a!, 2), yield* barrierOn(b!, 2)]
        const interrupted = yield* Deferred.make<void>()
        const running = yield* Deferred.make<void>()
        const lost = yield* Effect.forkChild(one.withPhase(
          Deferred.succeed(running, undefined).pipe(
            Effect.andThen(Effect.never),
            Effect.onInterrupt(() => Deferred.succeed(interrupted, undefined))
          )
        ))
        const theirs = yield* two.enter()
        yield* promptly(Deferred.await(running), "the phase")
        const leaving = yield* Effect.forkChild(two.leave(theirs))
        yield* counts(two, 1, 0)
        yield* lose(a!, namespace, server)
        yield* promptly(Deferred.await(interrupted), "the interruption")
        assert.strictEqual((yield* Effect.flip(Fiber.join(lost))).reason._tag, "LeaseLost")
        yield* promptly(Fiber.join(leaving), "the other")
        // And the next phase is whole again, also when a party loses its session while it waits to enter or to leave.
        const entering = yield* Effect.forkChild(one.enter())
        yield* counts(two, 0, 1)
        yield* lose(a!, namespace, server)
        const next = yield* two.enter()
        const mine = yield* promptly(Fiber.join(entering), "who lost its session")
        assert.isAbove(next.token, theirs.token)
        const waits = yield* Effect.forkChild(one.leave(mine))
        yield* counts(two, 1, 0)
        yield* lose(a!, namespace, server)
        yield* pending(waits)
        yield* two.leave(next)
        yield* promptly(Fiber.join(waits), "the waiter to leave")
      })))

  it.effect("notifies every party inside that the phase is lost when Redis has lost its data", () =>
    several(2, ([a, b], _, server) =>
      Effect.gen(function*() {
        const [one, two] = [yield* barrierOn(a!, 2), yield* barrierOn(b!, 2)]
        const body = yield* Effect.forkChild(one.withPhase(Effect.never))
        const theirs = yield* two.enter()
        yield* counts(two, 2, 0)
        yield* server.cli("FLUSHALL")
        assert.strictEqual((yield* Effect.flip(Fiber.join(body))).reason._tag, "LeaseLost")
        yield* promptly(Effect.flip(theirs.lost), "the loss")
        assert.strictEqual((yield* Effect.flip(two.leave(theirs))).reason._tag, "LeaseLost")
        const entering = yield* Effect.forkChild(one.enter())
        yield* counts(two, 0, 1)
        yield* server.cli("FLUSHALL")
        const next = yield* two.enter()
        const mine = yield* eventually(Effect.sync(() => entering.pollUnsafe() !== undefined)).pipe(
          Effect.andThen(Fiber.join(entering))
        )
        assert.strictEqual(mine.token, next.token)
        assert.isAbove(next.token, theirs.token)
      })))

  it.effect("is a typed service", () => {
    class Step extends DoubleBarrier.Service<Step>()("step", { parties: 2 }) {}
    return withNode(() =>
      Effect.gen(function*() {
        const step = yield* Step
        const both = yield* Effect.all([1, 2].map((one) => step.withPhase(Effect.succeed(one))), {
          concurrency: "unbounded"
        })
        assert.deepStrictEqual(both, [1, 2])
      }).pipe(Effect.provide(Step.layer))
    )
  })

  it.effect("does what its model does, whichever party enters, leaves, gives up, loses its session or closes", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const who = fc.nat(2)
      const pick = fc.nat(10)
      const step = fc.oneof(
        { weight: 8, arbitrary: fc.record({ op: fc.constant("enter" as const), who }) },
        { weight: 8, arbitrary: fc.record({ op: fc.constant("leave" as const), who, pick }) },
        { weight: 2, arbitrary: fc.record({ op: fc.constant("interrupt" as const), who, pick }) },
        { weight: 1, arbitrary: fc.record({ op: fc.constant("lose" as const), who }) },
        { weight: 1, arbitrary: fc.record({ op: fc.constant("close" as const), who }) }
      )
      type Entering = Fiber.Fiber<DoubleBarrier.Phase, DoubleBarrier.DoubleBarrierError>
      type Leaving = Fiber.Fiber<void, DoubleBarrier.DoubleBarrierError>
      interface Waiting<F> {
        readonly who: number
        readonly fiber: F
      }
      interface Inside {
        readonly who: number
        readonly phase: DoubleBarrier.Phase
      }
      yield* Effect.promise(() =>
        fc.assert(
          fc.asyncProperty(fc.integer({ min: 1, max: 4 }), fc.array(step, { maxLength: 25 }), (parties, steps) =>
            Effect.runPromise(Effect.scoped(Effect.gen(function*() {
              const namespace = freshNamespace()
              const open = Effect.gen(function*() {
                const scope = yield* Scope.make()
                yield* Effect.addFinalizer(() =>
                  Scope.close(scope, Exit.void)
                )
                return yield* Effect.gen(function*() {
                  const context = yield* node(server.url, {
                    namespace,
                    partitions: 1,
                    lease: "10 seconds",
                    margin: "20 millis"
                  })
                  return { context, barrier: yield* barrierOn(context, parties), close: Scope.close(scope, Exit.void) }
                }).pipe(Scope.provide(scope))
              })
              const nodes = [yield* open, yield* open, yield* open]
              let number = 0
              let entering: Array<Waiting<Entering>> = []
              let leaving: Array<Waiting<Leaving>> = []
              let inside: Array<Inside> = []
              const proceed = (wasInside: boolean) =>
                Effect.gen(function*() {
                  if (inside.length > 0) return
                  if (wasInside) {
                    for (const { fiber } of leaving) yield* promptly(Fiber.join(fiber), "who leaves")
                    leaving = []
                  }
                  if (entering.length < parties) return
                  number++
                  const group = entering.slice(0, parties)
                  entering = entering.slice(parties)
                  for (const { fiber, who } of group) {
                    const phase = yield* promptly(Fiber.join(fiber), "who enters")
                    assert.strictEqual(phase.number, number)
                    inside.push({ who, phase })
                  }
                })
              for (const step of steps) {
                const { barrier, close, context } = nodes[step.who]!
                const isMine = ({ who }: { readonly who: number }) => who === step.who
                const wasInside = inside.length > 0
                const before = number
                if (step.op === "enter") {
                  const waiting = entering.length + 1
                  const fiber = yield* Effect.forkChild(barrier.enter())
                  entering.push({ who: step.who, fiber })
                  if (inside.length > 0 || waiting < parties) yield* counts(barrier, inside.length, waiting)
                } else if (step.op === "leave") {
                  const mine = inside.filter(isMine)
                  const one = mine[step.pick % Math.max(1, mine.length)]
                  if (one === undefined) continue
                  inside = inside.filter((other) => other !== one)
                  leaving.push({ who: step.who, fiber: yield* Effect.forkChild(barrier.leave(one.phase)) })
                } else if (step.op === "interrupt") {
                  const mine: Array<Waiting<Entering | Leaving>> = [
                    ...entering.filter(isMine),
                    ...leaving.filter(isMine)
                  ]
                  const one = mine[step.pick % Math.max(1, mine.length)]
                  if (one === undefined) continue
                  yield* Fiber.interruptAll([one.fiber])
                  entering = entering.filter((other) => other !== one)
                  leaving = leaving.filter((other) => other !== one)
                } else if (step.op === "lose") {
                  yield* lose(context, namespace, server)
                  for (const { phase } of inside.filter(isMine)) yield* promptly(Effect.flip(phase.lost), "the loss")
                  inside = inside.filter((one) => !isMine(one))
                  // It takes its place anew, at the end.
                  entering = [...entering.filter((one) => !isMine(one)), ...entering.filter(isMine)]
                } else {
                  yield* Fiber.interruptAll([...entering, ...leaving].filter(isMine).map(({ fiber }) => fiber))
                  entering = entering.filter((one) => !isMine(one))
                  leaving = leaving.filter((one) => !isMine(one))
                  inside = inside.filter((one) => !isMine(one))
                  yield* close
                  nodes[step.who] = yield* open
                }
                yield* proceed(wasInside || number > before)
                yield* counts(nodes[step.who]!.barrier, inside.length, entering.length)
                for (const { fiber } of entering) yield* pending(fiber)
                for (const { fiber } of leaving) yield* pending(fiber)
                for (const { phase } of inside) assert.isTrue(yield* phase.isHeld)
              }
            })))),
          { numRuns: runs(15) }
        )
      )
    }))
})
