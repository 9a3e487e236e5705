/** Elections: one leads at a time, all observers see which, and a former leader has been interrupted. */
import { assert, layer } from "@effect/vitest"
import { Context, Deferred, Duration, Effect, Exit, Fiber, Layer, Logger, Option, Schema, Scope, Stream } from "effect"
import { hostname } from "node:os"
import {
  Barrier,
  Coordinator,
  type DoubleBarrier,
  Election,
  Latch,
  Lease,
  Lock,
  ReadWriteLock,
  Semaphore,
  type TaskGroup
} from "../src/index.ts"
import { apart } from "../src/internal/hold/holding.ts"
import { make as proxy } from "../src/testing/Proxy.ts"
import { elapsed } from "./support/awake.ts"
import { assertUnanswered, behindLine } from "./support/behindLine.ts"
import { eventually } from "./support/eventually.ts"
import { assertEmpty, freshNamespace, type Node, node, TestServer, withNode } from "./support/live.ts"
import { asks, waits, within } from "./support/requests.ts"
import { forget } from "./support/sessions.ts"
import { missed, on, several } from "./support/several.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

const electionNamed = (name: string) => Election.make({ name, schema: Schema.String, value: name })

const electionOn = (context: Node, value: string, callbacks?: Election.Callbacks) =>
  Effect.provideContext(Election.make({ ...callbacks, name: "chief", schema: Schema.String, value }), context)

const promptly = <A, E, R>(effect: Effect.Effect<A, E, R>, what: string) =>
  Effect.map(within(effect, 2000, what), ({ result }) => result)

/** Leads until it is asked to end. */
const leading = Effect.fnUntraced(function*(leader: Election.Election<string>, forever = false) {
  const began: Array<number> = []
  const ended: Array<number> = []
  const leave = yield* Deferred.make<void>()
  const body = Effect.flatMap(Lease.current, (lease) => {
    const { token } = Option.getOrThrow(lease)
    began.push(token)
    return Effect.onExit(Deferred.await(leave), () => Effect.sync(() => ended.push(token)))
  })
  const fiber: Fiber.Fiber<void, Election.ElectionError> = yield* Effect.forkChild(
    forever ? leader.leadForever(body) : leader.lead(body)
  )
  return { began, ended, fiber, leave: Deferred.succeed(leave, undefined) }
})

/** Leads until it is interrupted, and ends when the finalizer has. */
const leadingUntil = Effect.fnUntraced(function*(leader: Election.Election<string>, finalizer: Effect.Effect<unknown>) {
  const inside = yield* Deferred.make<void>()
  let first = true
  const body = Effect.suspend(() =>
    first
      ? Effect.onExit(Effect.andThen(Deferred.succeed(inside, undefined), Effect.never), () => {
        first = false
        return Effect.asVoid(finalizer)
      })
      : Effect.never
  )
  const fiber = yield* Effect.forkChild(leader.lead(body))
  yield* promptly(Deferred.await(inside), "the term")
  return fiber
})

const begun = (term: { readonly began: ReadonlyArray<number> }, times = 1) =>
  promptly(eventually(Effect.sync(() => assert.strictEqual(term.began.length, times))), "the term")

/** What an observer has seen: values, and `undefined` while no candidate leads. */
const watching = Effect.fnUntraced(function*(leader: Election.Election<string>) {
  const seen: Array<Election.Info<string> | undefined> = []
  const fiber = yield* Effect.forkChild(
    Stream.runForEach(leader.changes, (info) => Effect.sync(() => seen.push(Option.getOrUndefined(info))))
  )
  yield* eventually(Effect.sync(() => assert.isAtLeast(seen.length, 1)))
  return {
    seen,
    fiber,
    saw: (values: ReadonlyArray<string | undefined>) =>
      promptly(
        eventually(Effect.sync(() => assert.deepStrictEqual(seen.map((info) => info?.value), values))),
        `to see ${values.join()}`
      )
  }
})

const reasonOf = (error: Election.ElectionError) => error.reason._tag

layer(TestServer.layer, live)("a leader", (it) => {
  it.effect("is one of all, first in first out, and known to every candidate", () =>
    several(3, ([a, b, c], namespace, server) =>
      Effect.gen(function*() {
        const elections = [
          yield* electionOn(a!, "a"),
          yield* electionOn(b!, "b"),
          yield* electionOn(c!, "c")
        ] as const
        assert.isTrue(Option.isNone(yield* elections[0].leader))
        const terms = []
        for (const [at, election] of elections.entries()) {
          terms.push(yield* leading(election))
          if (at > 0) yield* waits(server, namespace, "election:chief", at)
          else yield* begun(terms[0]!)
        }
        const info = Option.getOrThrow(yield* elections[2].leader)
        assert.deepInclude(info, { node: "node0", host: hostname(), pid: process.pid, value: "a" })
        assert.strictEqual(info.term, terms[0]!.began[0])
        assert.deepStrictEqual((yield* elections[0].candidates).map(({ value }) => value), ["b", "c"])
        assert.deepStrictEqual(
          yield* Effect.forEach(elections, (election) => election.isLeader),
          [true, false, false]
        )
        yield* terms[0]!.leave
        yield* Fiber.join(terms[0]!.fiber)
        yield* begun(terms[1]!)
        yield* Fiber.interrupt(terms[1]!.fiber)
        yield* begun(terms[2]!)
        assert.isAbove(terms[1]!.began[0]!, terms[0]!.began[0]!)
        assert.isAbove(terms[2]!.began[0]!, terms[1]!.began[0]!)
        assert.isFalse(yield* elections[0].isLeader)
        yield* terms[2]!.leave
        yield* Fiber.join(terms[2]!.fiber)
      })))

  it.effect("is interrupted when its lease is lost, and campaigns again", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const [mine, theirs] = [yield* electionOn(a!, "a"), yield* electionOn(b!, "b")]
        const own = yield* leading(mine)
        yield* begun(own)
        const next = yield* leading(theirs)
        yield* waits(server, namespace, "election:chief", 1)
        const [{ id }] = (yield* Effect.provideContext(
          Effect.flatMap(Coordinator.Coordinator, (coordinator) => coordinator.sessions),
          a!
        )) as readonly [Coordinator.Session]
        // As a fail-over to a replica that does not know it.
        yield* forget(server, namespace, id)
        yield* promptly(eventually(Effect.sync(() => assert.deepStrictEqual(own.ended, own.began))), "the interruption")
        yield* begun(next)
        assert.isFalse(yield* mine.isLeader)
        yield* waits(server, namespace, "election:chief", 1)
        yield* next.leave
        yield* begun(own, 2)
        yield* own.leave
        yield* Fiber.join(own.fiber)
      })))

  it.effect("resigns when its effect ends: for good, or until the next time", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const election = yield* electionOn(a!, "a")
        assert.strictEqual(yield* election.lead(Effect.succeed(42)), 42)
        assert.strictEqual(yield* Effect.flip(election.lead(Effect.fail("no"))), "no")
        let rounds = 0
        const error = yield* Effect.flip(
          election.leadForever(Effect.suspend(() => ++rounds === 3 ? Effect.fail("enough") : Effect.void))
        )
        assert.strictEqual(error, "enough")
        assert.strictEqual(rounds, 3)
        assert.isTrue(Option.isNone(yield* election.leader))
      })))

  it.effect("resigns at any time: what runs under it ends first, and the next one follows at once", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const [mine, theirs] = [yield* electionOn(a!, "a"), yield* electionOn(b!, "b")]
        yield* mine.resign
        const order: Array<string> = []
        const inside = yield* Deferred.make<void>()
        const first = yield* Effect.forkChild(
          mine.lead(
            Effect.onExit(
              Effect.andThen(Deferred.succeed(inside, undefined), Effect.never),
              () => Effect.andThen(Effect.sleep("30 millis"), Effect.sync(() => order.push("ended")))
            )
          )
        )
        yield* Deferred.await(inside)
        const second = yield* Effect.forkChild(
          theirs.lead(Effect.andThen(Effect.sync(() => order.push("next")), Effect.never))
        )
        yield* waits(server, namespace, "election:chief", 1)
        yield* mine.resign
        yield* promptly(eventually(Effect.sync(() => assert.deepStrictEqual(order, ["ended", "next"]))), "the next")
        // It is a candidate again.
        yield* waits(server, namespace, "election:chief", 1)
        yield* Fiber.interrupt(first)
        yield* Fiber.interrupt(second)
        // From inside, and with a lease that nothing runs under.
        const again = yield* Effect.flip(
          mine.leadForever(Effect.suspend(() => order.push("x") === 4 ? Effect.fail("second") : mine.resign))
        )
        assert.strictEqual(again, "second")
        yield* Effect.scoped(Effect.gen(function*() {
          const lease = yield* mine.campaign()
          yield* mine.resign
          assert.strictEqual((yield* Effect.flip(lease.lost)).reason, "resigned")
          assert.isFalse(yield* lease.isHeld)
          yield* promptly(theirs.lead(Effect.void), "another")
        }))
      })))

  it.effect("resigns in a finalizer of its term without waiting for itself", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const mine = yield* electionOn(a!, "a")
        const began = Date.now()
        let rounds = 0
        const error = yield* Effect.flip(
          mine.leadForever(
            Effect.suspend(() => ++rounds === 4 ? Effect.fail("enough") : Effect.ensuring(Effect.void, mine.resign))
          )
        )
        assert.strictEqual(error, "enough")
        // The margin is as long.
        assert.isBelow(elapsed(began), 1500)
        assert.isTrue(Option.isNone(yield* mine.leader))
      }), { lease: "15 seconds", margin: "1500 millis" }))

  it.effect("hands over to the candidate that it chooses, with a larger term, or not at all", () =>
    several(3, ([a, b, c], namespace, server) =>
      Effect.gen(function*() {
        const [mine, first, second] = [
          yield* electionOn(a!, "a"),
          yield* electionOn(b!, "b"),
          yield* electionOn(c!, "c")
        ]
        assert.strictEqual(reasonOf(yield* Effect.flip(mine.transferTo("x/y"))), "NotLeading")
        assert.strictEqual(reasonOf(yield* Effect.flip(mine.proclaim("z"))), "NotLeading")
        const own = yield* leading(mine)
        yield* begun(own)
        assert.strictEqual(reasonOf(yield* Effect.flip(mine.transferTo("x/y"))), "CandidateGone")
        assert.isTrue(yield* mine.isLeader)
        const one = yield* leading(first)
        yield* waits(server, namespace, "election:chief", 1)
        const two = yield* leading(second)
        yield* waits(server, namespace, "election:chief", 2)
        const watch = yield* watching(first)
        const candidates = yield* mine.candidates
        // To one of them, if it is to be handed over to several.
        const [chosen, other] = yield* Effect.all(
          [1, 0].map((at) => Effect.exit(mine.transferTo(candidates[at]!))),
          { concurrency: 2 }
        )
        assert.isTrue(Exit.isSuccess(chosen!))
        assert.match(String(other), /does not lead/)
        yield* begun(two)
        assert.isAbove(two.began[0]!, own.began[0]!)
        assert.deepStrictEqual(own.ended, own.began)
        // No gap: no observer has seen it vacant, and the others have kept their places.
        yield* watch.saw(["a", "c"])
        yield* waits(server, namespace, "election:chief", 2)
        assert.deepStrictEqual((yield* mine.candidates).map(({ value }) => value), ["b", "a"])
        assert.strictEqual(reasonOf(yield* Effect.flip(second.transferTo(candidates[1]!))), "CandidateGone")
        yield* two.leave
        yield* begun(one)
        yield* one.leave
        yield* begun(own, 2)
        yield* own.leave
        yield* Fiber.interrupt(watch.fiber)
      })))

  it.effect("is campaigned for again when its loss comes in the middle of a proclamation", () =>
    several(1, ([a], _, server) =>
      Effect.gen(function*() {
        const election = yield* electionOn(a!, "0")
        let terms = 0
        const proclaiming = Effect.suspend(() => {
          terms++
          return Effect.forever(Effect.andThen(election.proclaim("x"), Effect.yieldNow))
        })
        const fiber = yield* Effect.forkChild(election.leadForever(proclaiming))
        for (const term of [1, 2, 3]) {
          yield* eventually(Effect.sync(() => assert.strictEqual(terms, term)))
          yield* server.cli("FLUSHALL")
        }
        yield* eventually(Effect.sync(() => assert.strictEqual(terms, 4)))
        yield* Fiber.interrupt(fiber)
      })))

  it.effect("is observed from the first to the last change, in order, across lost connections", () =>
    behindLine(({ context: watcher, direct, line }) =>
      Effect.gen(function*() {
        const candidate = yield* direct()
        const election = yield* electionOn(candidate, "0")
        const watch = yield* watching(yield* electionOn(watcher, "watcher"))
        const expected: Array<string | undefined> = [undefined]
        for (let round = 1; round <= 8; round++) {
          yield* election.lead(Effect.gen(function*() {
            yield* line.closeAll
            yield* election.proclaim(`${round}`)
            if (round % 2 === 0) yield* line.closeAll
          }))
          expected.push("0", `${round}`, undefined)
        }
        yield* watch.saw(expected)
        const terms = watch.seen.flatMap((info) => info === undefined ? [] : [info.term])
        assert.deepStrictEqual(terms, terms.toSorted((x, y) => x - y))
        assert.strictEqual(new Set(terms).size, 8)
        yield* Fiber.interrupt(watch.fiber)
      }), { lease: "5 seconds" }))

  it.effect("is observed by many at the price of one, also by observers that come later", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const [mine, theirs] = [yield* electionOn(a!, "a"), yield* electionOn(b!, "b")]
        const lease = yield* Scope.make()
        yield* Scope.provide(mine.campaign(), lease)
        const watches = yield* Effect.forEach(Array.from({ length: 10 }), () => watching(theirs))
        const members = (yield* server.cli("HKEYS", `{${namespace}:00}:election:chief`)).split("\n")
        assert.strictEqual(members.filter((field) => field.startsWith("o")).length, 1)
        yield* mine.proclaim("b")
        yield* Scope.close(lease, Exit.void)
        for (const watch of watches) yield* watch.saw(["a", "b", undefined])
        yield* Effect.forEach(watches, ({ fiber }) => Fiber.interrupt(fiber))
        // No leader, no waiter and no observer.
        yield* eventually(
          Effect.map(server.cli("EXISTS", `{${namespace}:00}:election:chief`), (keys) => assert.strictEqual(keys, "0"))
        )
      })))

  it.effect("calls back when it leads and when it does not any more, also at the end of its scope", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const calls: Array<string> = []
        const record = (what: string) => Effect.sync(() => calls.push(what))
        const messages: Array<unknown> = []
        const logger = Logger.make(({ message }) => void messages.push(message))
        yield* Effect.scoped(
          Effect.gen(function*() {
            const election = yield* electionOn(a!, "a", {
              onAcquired: ({ token }) => token > 0 ? record("acquired") : Effect.void,
              onLost: (_, reason) => Effect.andThen(record(reason), Effect.fail("oops"))
            })
            const transitions: Array<string> = []
            const following = yield* Effect.forkChild(
              Stream.runForEach(election.terms, ({ _tag }) => Effect.sync(() => transitions.push(_tag)))
            )
            yield* Effect.yieldNow
            yield* election.lead(Effect.void)
            yield* eventually(Effect.sync(() => assert.deepStrictEqual(calls, ["acquired", "resigned"])))
            assert.deepStrictEqual(transitions, ["Acquired", "Lost"])
            yield* Fiber.interrupt(following)
            yield* election.campaign()
          }).pipe(Effect.provide(Logger.layer([logger])))
        )
        assert.deepStrictEqual(calls, ["acquired", "resigned", "acquired", "resigned"])
        assert.include(JSON.stringify(messages), "the callback has failed")
      })))

  it.effect("refuses to wait for itself, and says what does not fit", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const election = yield* electionOn(a!, "line\r\n\"quoted\" \u0000 é {}")
        const numbers = yield* Effect.provideContext(
          Election.make({ name: "chief", schema: Schema.Number, value: 1 }),
          b!
        )
        yield* Effect.gen(function*() {
          assert.strictEqual(reasonOf(yield* Effect.flip(election.lead(Effect.void))), "AlreadyLeading")
          assert.strictEqual(reasonOf(yield* Effect.flip(Effect.scoped(election.campaign()))), "AlreadyLeading")
          assert.strictEqual(Option.getOrThrow(yield* election.leader).value, "line\r\n\"quoted\" \u0000 é {}")
          assert.strictEqual(reasonOf(yield* Effect.flip(numbers.leader)), "InvalidPayload")
          assert.strictEqual(reasonOf(yield* Effect.flip(Stream.runDrain(numbers.changes))), "InvalidPayload")
          const waited = yield* Effect.flip(apart(numbers.lead(Effect.void, { wait: "30 millis" })))
          assert.strictEqual(reasonOf(waited), "WaitTimeout")
          yield* eventually(Effect.map(election.candidates, (found) => assert.deepStrictEqual(found, [])))
        }).pipe((self) => election.lead(self))
        for (const name of ["", "\ud800", "x".repeat(513)]) {
          const exit = yield* Effect.exit(Effect.provideContext(Election.make({ name }), a!))
          assert.isTrue(Exit.isFailure(exit) && String(exit.cause).includes("RangeError"))
        }
      })))

  it.effect("leads again, and is seen again, after Redis has lost its data", () =>
    several(2, ([a, b], _, server) =>
      Effect.gen(function*() {
        const [mine, theirs] = [yield* electionOn(a!, "a"), yield* electionOn(b!, "b")]
        const own = yield* leading(mine)
        yield* begun(own)
        const watch = yield* watching(theirs)
        yield* server.cli("FLUSHALL")
        yield* eventually(Effect.sync(() => assert.strictEqual(own.began.length, 2)), { timeout: "5 seconds" })
        assert.isAbove(own.began[1]!, own.began[0]!)
        yield* eventually(
          Effect.sync(() => assert.strictEqual(watch.seen.at(-1)?.term, own.began[1])),
          { timeout: "5 seconds" }
        )
        yield* own.leave
        yield* Fiber.join(own.fiber)
        yield* promptly(eventually(Effect.sync(() => assert.isUndefined(watch.seen.at(-1)))), "the vacancy")
        yield* Fiber.interrupt(watch.fiber)
      })))

  it.effect("is not succeeded by the waiter of a lock when it resigns in one batch with that", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const [mine, theirs] = [yield* electionOn(a!, "a"), yield* electionOn(b!, "b")]
        const watch = yield* watching(theirs)
        const scope = yield* Scope.make()
        yield* Effect.provideContext(Scope.provide(Lock.acquire("any"), scope), a!)
        const own = yield* leading(mine)
        yield* begun(own)
        const taken = yield* Effect.forkChild(on(b!, Lock.withLock(Effect.void, "any")))
        yield* waits(server, namespace, "lock:any", 1)
        yield* Effect.all([Scope.close(scope, Exit.void), own.leave], { concurrency: "unbounded" })
        yield* promptly(Fiber.join(taken), "the lock")
        yield* watch.saw([undefined, "a", undefined])
        yield* Fiber.interrupt(watch.fiber)
      })))

  it.effect("resigns once, however many ask for it, and not before what runs under it has ended or had its time", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const [mine, theirs] = [yield* electionOn(a!, "a"), yield* electionOn(b!, "b")]
        const order: Array<string> = []
        const note = (what: string) => Effect.sync(() => order.push(what))
        const slow = yield* leadingUntil(mine, Effect.andThen(Effect.sleep("100 millis"), note("ended")))
        const next = yield* leading(theirs)
        yield* waits(server, namespace, "election:chief", 1)
        // One of them from inside, and one in favour of another candidate.
        const candidate = (yield* mine.candidates)[0]!
        yield* Effect.all(
          [mine.transferTo(candidate), mine.resign, mine.resign].map(Effect.andThen(note("resigned"))),
          { concurrency: "unbounded" }
        )
        assert.deepStrictEqual(order, ["ended", "resigned", "resigned", "resigned"])
        yield* begun(next)
        yield* Fiber.interrupt(slow)
        yield* next.leave
        yield* Fiber.join(next.fiber)
        // One that does not end has the margin.
        const go = yield* Deferred.make<void>()
        const stuck = yield* leadingUntil(mine, Deferred.await(go))
        const after = yield* leading(theirs)
        yield* waits(server, namespace, "election:chief", 1)
        const { millis } = yield* within(mine.resign, 2000, "the resignation")
        assert.isAbove(millis, 450)
        yield* begun(after)
        yield* Deferred.succeed(go, undefined)
        yield* Fiber.interrupt(stuck)
        yield* after.leave
        yield* Fiber.join(after.fiber)
      })))

  it.effect("is succeeded though everything goes wrong while it resigns", () =>
    several(3, ([a, b, c], namespace, server) =>
      Effect.gen(function*() {
        const mine = yield* electionOn(a!, "a")
        const chosen = yield* electionOn(b!, "b")
        const watch = yield* watching(yield* electionOn(c!, "c"))
        const sessionOfA = Effect.map(
          Effect.provideContext(Effect.flatMap(Coordinator.Coordinator, ({ sessions }) => sessions), a!),
          ([session]) => session!.id!
        )
        const mishaps: ReadonlyArray<Effect.Effect<unknown, unknown>> = [
          Effect.flatMap(sessionOfA, (id) => forget(server, namespace, id)),
          server.cli("FLUSHALL"),
          server.cli("DEL", `{${namespace}:00}:election:chief`)
        ]
        for (const mishap of mishaps) {
          const go = yield* Deferred.make<void>()
          const own = yield* leadingUntil(mine, Deferred.await(go))
          const next = yield* leading(chosen)
          yield* waits(server, namespace, "election:chief", 1)
          const transferred = yield* Effect.forkChild(mine.transferTo((yield* mine.candidates)[0]!))
          yield* promptly(eventually(Effect.map(mine.isLeader, (leads) => !leads)), "that it leads no more")
          yield* mishap
          yield* Deferred.succeed(go, undefined)
          yield* promptly(Fiber.join(transferred), "the transfer")
          yield* Fiber.interrupt(own)
          yield* within(eventually(Effect.sync(() => assert.strictEqual(next.began.length, 1))), 5000, "the next term")
          yield* within(
            eventually(Effect.sync(() => assert.strictEqual(watch.seen.at(-1)?.term, next.began[0]))),
            5000,
            "to see it"
          )
          yield* next.leave
          yield* Fiber.join(next.fiber)
        }
        yield* Fiber.interrupt(watch.fiber)
      })))

  it.effect("leads no more when the scope that made it is closed, and its observers are notified", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const calls: Array<string> = []
        const scope = yield* Scope.make()
        const mine = yield* Scope.provide(
          electionOn(a!, "a", {
            onAcquired: () => Effect.sync(() => calls.push("acquired")),
            onLost: (_, reason) => Effect.sync(() => calls.push(reason))
          }),
          scope
        )
        const theirs = yield* electionOn(b!, "b")
        const watch = yield* watching(mine)
        const following = yield* Effect.forkChild(Stream.runCollect(mine.terms))
        const own = yield* leading(mine)
        yield* begun(own)
        const next = yield* leading(theirs)
        yield* waits(server, namespace, "election:chief", 1)
        const waiting = yield* leading(mine)
        yield* waits(server, namespace, "election:chief", 2)
        yield* promptly(Scope.close(scope, Exit.void), "the end of the scope")
        assert.deepStrictEqual(own.ended, own.began)
        assert.deepStrictEqual(calls, ["acquired", "closed"])
        assert.deepStrictEqual(
          (yield* promptly(Fiber.join(following), "the end of the transitions")).map(({ _tag }) => _tag),
          ["Acquired", "Lost"]
        )
        yield* promptly(Fiber.join(watch.fiber), "the end of the changes")
        // A subscriber that comes later finds no more of them.
        assert.deepStrictEqual(yield* Stream.runCollect(mine.changes), [])
        yield* begun(next)
        yield* next.leave
        // A waiter for it does not begin, nor does a later one.
        for (const fiber of [own.fiber, waiting.fiber, yield* Effect.forkChild(mine.lead(Effect.void))]) {
          const { reason } = yield* promptly(Effect.flip(Fiber.join(fiber)), "the failure")
          assert.deepInclude(reason, { _tag: "LeaseLost", reason: "closed" })
        }
        assert.deepStrictEqual(waiting.began, [])
        yield* Fiber.join(next.fiber)
      })))

  it.effect("blocks no other candidate when its campaign is granted after what made it was closed", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const [made, campaigning] = [yield* Scope.make(), yield* Scope.make()]
        const mine = yield* Scope.provide(electionOn(a!, "a"), made)
        const theirs = yield* electionOn(b!, "b")
        const own = yield* leading(theirs)
        yield* begun(own)
        const campaign = yield* Effect.forkChild(Effect.exit(Scope.provide(mine.campaign(), campaigning)))
        yield* waits(server, namespace, "election:chief", 1)
        yield* Scope.close(made, Exit.void)
        yield* own.leave
        yield* Fiber.join(own.fiber)
        yield* promptly(Fiber.join(campaign), "the end of the campaign")
        assert.strictEqual(yield* promptly(theirs.lead(Effect.succeed("led")), "the next term"), "led")
        yield* Scope.close(campaigning, Exit.void)
      })))

  it.effect("fails observing, leading and resigning when the coordinator is closed", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      const scope = yield* Scope.make()
      const context = yield* Scope.provide(node(server.url, { namespace, partitions: 1 }), scope)
      yield* Effect.scoped(Effect.gen(function*() {
        const election = yield* electionOn(context, "a")
        const watch = yield* watching(election)
        const go = yield* Deferred.make<void>()
        const stuck = yield* leadingUntil(election, Deferred.await(go))
        yield* Effect.addFinalizer(() => Deferred.succeed(go, undefined))
        const resigning = yield* Effect.forkChild(election.resign)
        yield* promptly(eventually(Effect.map(election.isLeader, (leads) => !leads)), "that it leads no more")
        yield* Scope.close(scope, Exit.void)
        const isClosed = (error: Election.ElectionError) => assert.strictEqual(error.reason._tag, "CoordinatorClosed")
        yield* promptly(Fiber.join(resigning), "the resignation")
        isClosed(yield* promptly(Effect.flip(Fiber.join(watch.fiber)), "the end of the changes"))
        isClosed(yield* promptly(Effect.flip(Stream.runHead(election.changes)), "a late observer"))
        isClosed(yield* promptly(Effect.flip(election.leader), "a question"))
        yield* Deferred.succeed(go, undefined)
        isClosed(yield* promptly(Effect.flip(Fiber.join(stuck)), "the end"))
      }))
      yield* assertEmpty(server, namespace)
    }))

  it.effect("fails with what has failed meanwhile when it is closed", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const scope = yield* Scope.make()
        const election = yield* Scope.provide(electionOn(a!, "a"), scope)
        const begun = yield* Deferred.make<void>()
        const body = Effect.onExit(
          Effect.andThen(Deferred.succeed(begun, undefined), Effect.never),
          () => Effect.die("a finalizer")
        )
        const fiber = yield* Effect.forkChild(election.lead(body))
        yield* Deferred.await(begun)
        yield* Scope.close(scope, Exit.void)
        const exit = yield* promptly(Fiber.await(fiber), "the end")
        assert.match(String(exit), /closed.*a finalizer/s)
      })))

  it.effect("outlives callbacks that throw or do not end, and says what has failed meanwhile", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const messages: Array<unknown> = []
        const logger = Logger.make(({ cause, message }) => void messages.push(message, cause))
        const calls: Array<string> = []
        const used = Effect.scoped(
          Effect.gen(function*() {
            const election = yield* electionOn(a!, "a", {
              onAcquired: () => {
                throw new Error("thrown")
              },
              onLost: (_, reason) => {
                calls.push(reason)
                return Effect.never
              }
            })
            let rounds = 0
            const body = Effect.suspend(() =>
              ++rounds === 2 ? Effect.void : Effect.onExit(election.resign, () => Effect.die("a finalizer"))
            )
            yield* election.lead(body)
          }).pipe(Effect.provide(Logger.layer([logger])))
        )
        yield* promptly(used, "the end of the scope")
        assert.deepStrictEqual(calls, ["resigned"])
        const text = messages.map((message) => String(message)).join()
        for (const part of ["the callback has failed", "thrown", "did not end", "a finalizer"]) {
          assert.include(text, part)
        }
      })))

  it.effect("gives callbacks the margin, also when the coordinator is closed before the election", () =>
    Effect.gen(function*() {
      const { url } = yield* TestServer
      const [outer, inner] = [yield* Scope.make(), yield* Scope.make()]
      const options = { namespace: freshNamespace(), lease: "4 seconds", margin: "1 second" } as const
      const context = yield* Scope.provide(node(url, options), outer)
      const calls: Array<string> = []
      const election = yield* Scope.provide(
        electionOn(context, "a", {
          onLost: (_, reason) => Effect.andThen(Effect.sleep("200 millis"), Effect.sync(() => calls.push(reason)))
        }),
        inner
      )
      const term = yield* leading(election)
      yield* begun(term)
      yield* Scope.close(outer, Exit.void)
      yield* Scope.close(inner, Exit.void)
      assert.deepStrictEqual(calls, ["closed"])
      yield* Fiber.await(term.fiber)
    }))

  it.effect("is one object of a process that has two of the name, and the other one says so", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const [mine, other] = [yield* electionOn(a!, "a"), yield* electionOn(a!, "a")]
        const term = yield* leading(mine)
        yield* begun(term)
        assert.deepStrictEqual([yield* mine.isLeader, yield* other.isLeader], [true, false])
        const { reason } = yield* Effect.flip(other.proclaim("b"))
        assert.strictEqual(reason._tag, "NotLeading")
        assert.match(reason.message, /^This object does not lead election "chief" .*the object whose/)
        yield* other.resign
        assert.strictEqual(Option.getOrThrow(yield* other.leader).term, term.began[0])
        yield* mine.proclaim("b")
        yield* term.leave
        yield* Fiber.join(term.fiber)
      })))

  it.effect("is seen also when the clock of Redis is behind what it was", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const [mine, theirs] = [yield* electionOn(a!, "a"), yield* electionOn(b!, "b")]
        yield* mine.lead(Effect.void)
        // All numbers from here on are those of a clock that is a day ahead, until the data is lost.
        yield* server.cli("HINCRBY", `{${namespace}:00}:sessions`, "token", 86_400_000_000)
        const own = yield* leading(mine)
        yield* begun(own)
        const watch = yield* watching(theirs)
        yield* server.cli("FLUSHALL")
        yield* eventually(Effect.sync(() => assert.strictEqual(own.began.length, 2)), { timeout: "5 seconds" })
        assert.isBelow(own.began[1]!, own.began[0]!)
        yield* eventually(
          Effect.sync(() => assert.strictEqual(watch.seen.at(-1)?.term, own.began[1])),
          { timeout: "5 seconds" }
        )
        yield* own.leave
        yield* promptly(eventually(Effect.sync(() => assert.isUndefined(watch.seen.at(-1)))), "the vacancy")
        yield* Fiber.interrupt(watch.fiber)
      })))

  it.effect("is found among a thousand candidates, and behind millions that gave up", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const [mine, theirs] = [yield* electionOn(a!, "a"), yield* electionOn(b!, "b")]
        const key = `{${namespace}:00}:election:chief`
        const own = yield* leading(mine)
        yield* begun(own)
        const first = yield* leading(theirs)
        yield* waits(server, namespace, "election:chief", 1)
        yield* server.cli(
          "EVAL",
          "local v, c, t, h, m, f, l, k = struct.unpack('<Bddddddd', redis.call('HGET', KEYS[1], 's')) " +
            "return redis.call('HSET', KEYS[1], 's', struct.pack('<Bddddddd', v, c, t, h, m, f, l + 5e6, k))",
          1,
          key
        )
        const second = yield* leading(mine)
        yield* waits(server, namespace, "election:chief", 2)
        yield* server.cli("CONFIG", "RESETSTAT")
        assert.deepStrictEqual((yield* mine.candidates).map(({ value }) => value), ["b", "a"])
        yield* own.leave
        yield* begun(first)
        yield* first.leave
        yield* begun(second)
        const calls = /cmdstat_hget:calls=(\d+)/.exec(yield* server.cli("INFO", "commandstats"))![1]!
        assert.isBelow(Number(calls), 1000)
        const crowd = yield* Effect.forEach(
          Array.from({ length: 1100 }),
          () => Effect.forkChild(theirs.lead(Effect.never))
        )
        yield* waits(server, namespace, "election:chief", 1100)
        const candidates = yield* mine.candidates
        assert.strictEqual(candidates.length, 1000)
        assert.strictEqual(new Set(candidates.map(({ id }) => id)).size, 1000)
        yield* mine.transferTo(candidates.at(-1)!)
        yield* promptly(eventually(theirs.isLeader), "the successor")
        assert.strictEqual(Option.getOrThrow(yield* mine.leader).id, candidates.at(-1)!.id)
        yield* second.leave
        yield* Fiber.interrupt(second.fiber)
        yield* Fiber.interruptAll(crowd)
      })))

  it.effect("has a lease of its own: a leader is succeeded after that, and other holds are not touched", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      const settings = { namespace, partitions: 1, lease: "60 seconds", margin: "5 seconds" } as const
      const chief = { name: "chief", schema: Schema.String, lease: "2 seconds" } as const
      yield* Effect.scoped(Effect.gen(function*() {
        const line = yield* proxy(server)
        const a = yield* node(line.url, settings)
        const b = yield* node(server.url, settings)
        const mine = yield* Effect.provideContext(Election.make({ ...chief, value: "a" }), a)
        const theirs = yield* Effect.provideContext(Election.make({ ...chief, value: "b" }), b)
        const lock = yield* Effect.provideContext(Lock.acquire("any"), a)
        const own = yield* leading(mine)
        yield* begun(own)
        const sessions = yield* Effect.provideContext(
          Effect.flatMap(Coordinator.Coordinator, (coordinator) => coordinator.sessions),
          a
        )
        assert.deepStrictEqual(
          sessions.map(({ claims, lease, state }) => ({ claims, lease: Duration.toMillis(lease), state }))
            .toSorted((x, y) => x.lease - y.lease),
          [{ claims: 1, lease: 2000, state: "open" }, { claims: 1, lease: 60_000, state: "open" }]
        )
        const next = yield* leading(theirs)
        yield* waits(server, namespace, "election:chief", 1)
        const watch = yield* watching(theirs)
        yield* line.blackhole
        const { millis } = yield* within(
          eventually(Effect.sync(() => assert.strictEqual(next.began.length, 1)), { interval: 5 }),
          4000,
          "the successor"
        )
        // The lease has been renewed within its first third, at the latest.
        assert.isAbove(millis, 1000)
        assert.isAbove(next.began[0]!, own.began[0]!)
        assert.deepStrictEqual(own.ended, own.began)
        yield* watch.saw(["a", "b"])
        yield* line.pass
        yield* line.closeAll
        assert.isTrue(yield* lock.isHeld)
        const taken = yield* Effect.provideContext(apart(Lock.withLockIfAvailable(Effect.void, "any")), b)
        assert.isTrue(Option.isNone(taken))
        // It is a candidate again, in another session.
        yield* waits(server, namespace, "election:chief", 1)
        yield* next.leave
        yield* begun(own, 2)
        assert.isTrue(yield* lock.isHeld)
        yield* own.leave
        yield* Fiber.join(own.fiber)
        yield* Fiber.interrupt(watch.fiber)
      }))
      yield* assertEmpty(server, namespace)
    }))

  it.effect("is not asked for in vain by a process whose session ended long ago", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      const settings = { namespace, partitions: 1, lease: "1 second", margin: "200 millis" } as const
      const line = yield* proxy(server)
      const scope = yield* Scope.make()
      const dead = yield* electionOn(yield* Scope.provide(node(line.url, settings), scope), "dead")
      const other = yield* electionOn(yield* Scope.provide(node(line.url, settings), scope), "other")
      const own = yield* leading(dead)
      yield* begun(own)
      const waiting = yield* leading(other)
      yield* waits(server, namespace, "election:chief", 1)
      yield* line.blackhole
      yield* Effect.sleep("1500 millis")
      // No process has used the partition since, so nothing has been reaped. The first answer is right.
      yield* Effect.scoped(Effect.gen(function*() {
        const election = yield* electionOn(yield* node(server.url, settings), "fresh")
        assert.isTrue(Option.isNone(yield* election.leader))
        assert.deepStrictEqual(yield* election.candidates, [])
      }))
      yield* Fiber.interruptAll([own.fiber, waiting.fiber])
      yield* promptly(Scope.close(scope, Exit.void), "the end")
      yield* line.pass
    }))

  it.effect("shows observers every change in order, also those that their own session makes", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const [mine, other] = [yield* electionOn(a!, "a"), yield* electionOn(a!, "b")]
        const watch = yield* watching(other)
        const expected: Array<string | undefined> = [undefined]
        for (let round = 0; round < 20; round++) {
          yield* mine.lead(mine.proclaim(`${round}`))
          yield* other.lead(Effect.andThen(other.proclaim(`${round}`), other.proclaim(`${round}`)))
          expected.push("a", `${round}`, undefined, "b", `${round}`, undefined)
        }
        yield* watch.saw(expected)
        yield* Fiber.interrupt(watch.fiber)
      })))

  it.effect("shows changes that are under way before what is asked anew", () =>
    behindLine(({ context: b, direct, line }) =>
      Effect.gen(function*() {
        const a = yield* direct()
        const mine = yield* electionOn(a, "a")
        const watch = yield* watching(yield* electionOn(b, "b"))
        const own = yield* leading(mine)
        yield* watch.saw([undefined, "a"])
        const held = yield* line.hold(({ name }) => name === "XREAD")
        yield* mine.proclaim("1")
        yield* promptly(held.request, "the next reading of the mailbox")
        yield* watch.saw([undefined, "a", "1"])
        yield* mine.proclaim("2")
        yield* mine.proclaim("3")
        missed(b)
        yield* Effect.provideContext(Lock.withLockIfAvailable(Effect.void, "asked later"), b)
        yield* watch.saw([undefined, "a", "1"])
        yield* held.release()
        yield* watch.saw([undefined, "a", "1", "2", "3"])
        yield* own.leave
        yield* Fiber.join(own.fiber)
        yield* watch.saw([undefined, "a", "1", "2", "3", undefined])
        yield* Fiber.interrupt(watch.fiber)
      }), {}))

  it.effect("shows a change that arrives before the answer to the observer", () =>
    behindLine(({ context: b, direct, line }) =>
      Effect.gen(function*() {
        const a = yield* direct()
        const [mine, theirs] = [yield* electionOn(a, "a"), yield* electionOn(b, "b")]
        // So that the mailbox is being read.
        const other = yield* watching(yield* Effect.provideContext(electionNamed("other"), b))
        // It is executed, and answered when it is sent again.
        const met = yield* line.once(asks("election.observe"), "blackholeReply")
        const seen: Array<string | undefined> = []
        const watch = yield* Effect.forkChild(
          Stream.runForEach(theirs.changes, (info) => Effect.sync(() => seen.push(Option.getOrUndefined(info)?.value)))
        )
        const saw = (values: ReadonlyArray<string | undefined>) =>
          promptly(eventually(Effect.sync(() => assert.deepStrictEqual(seen, values))), "the changes")
        yield* met
        const own = yield* leading(mine)
        yield* begun(own)
        assert.deepStrictEqual(seen, [])
        // What leads by the time that it is answered.
        yield* saw(["a"])
        yield* own.leave
        yield* Fiber.join(own.fiber)
        yield* saw(["a", undefined])
        yield* Fiber.interruptAll([watch, other.fiber])
      }), { lease: "6 seconds", requestTimeout: "500 millis" }))

  it.effect("shows every change though the mailbox is read late", () =>
    behindLine(({ context: b, direct, line }) =>
      Effect.gen(function*() {
        const a = yield* direct()
        const mine = yield* electionOn(a, "a")
        const watch = yield* watching(yield* electionOn(b, "b"))
        const own = yield* leading(mine)
        yield* watch.saw([undefined, "a"])
        const held = yield* line.hold(({ name }) => name === "XREAD")
        yield* mine.proclaim("0")
        yield* promptly(held.request, "the next reading of the mailbox")
        const expected = [undefined, "a", "0"]
        // Several heartbeats of the observer.
        for (let change = 1; change <= 25; change++) {
          yield* Effect.sleep("100 millis")
          yield* mine.proclaim(`${change}`)
          expected.push(`${change}`)
        }
        yield* held.release()
        yield* watch.saw(expected)
        yield* own.leave
        yield* Fiber.join(own.fiber)
        yield* Fiber.interrupt(watch.fiber)
      }), { lease: "1500 millis", margin: "300 millis" }))

  it.effect("keeps the place of a candidate that asks again while Redis is out of memory", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const [mine, theirs] = [yield* electionOn(a!, "a"), yield* electionOn(b!, "b")]
        const own = yield* leading(mine)
        yield* begun(own)
        const next = yield* leading(theirs)
        yield* waits(server, namespace, "election:chief", 1)
        yield* server.cli("CONFIG", "SET", "maxmemory", "1")
        yield* Effect.gen(function*() {
          missed(b!)
          yield* Effect.sleep("200 millis")
        }).pipe(Effect.ensuring(Effect.orDie(server.cli("CONFIG", "SET", "maxmemory", "0"))))
        yield* waits(server, namespace, "election:chief", 1)
        yield* own.leave
        yield* begun(next)
        yield* next.leave
        yield* Fiber.join(next.fiber)
      })))

  it.effect("has callbacks that may require services", () => {
    class Calls extends Context.Service<Calls, Array<string>>()("test/Calls") {}
    class Chief extends Election.Service<Chief>()("chief", {
      onAcquired: () => Effect.map(Calls, (calls) => calls.push("acquired")),
      onLost: (_, reason) => Effect.map(Calls, (calls) => calls.push(reason))
    }) {}
    const calls: Array<string> = []
    return withNode(() =>
      Effect.gen(function*() {
        assert.strictEqual(Chief.key, "lockstep/Election/chief")
        yield* Effect.flatMap(Chief, (chief) => Effect.void.pipe(chief.lead())).pipe(
          Effect.provide(Chief.layer.pipe(Layer.provide(Layer.succeed(Calls, calls))))
        )
        assert.deepStrictEqual(calls, ["acquired", "resigned"])
      })
    )
  })

  it.effect("is led data-last, for a term or for ever", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const election = yield* electionOn(a!, "a")
        assert.strictEqual(yield* Effect.succeed(42).pipe(election.lead({ wait: "1 second" })), 42)
        let rounds = 0
        const body = Effect.suspend(() => ++rounds === 3 ? Effect.fail("enough") : Effect.void)
        assert.strictEqual(yield* Effect.flip(body.pipe(election.leadForever())), "enough")
        assert.strictEqual(rounds, 3)
        // @ts-expect-error: an option that does not exist
        election.lead(Effect.void, { wiat: "1 second" })
      })))

  it("has a misspelled option reported where it stands", () => {
    void (() => [
      Election.make({
        name: "a",
        // @ts-expect-error
        leese: "1 second"
      }),
      Election.make({
        name: "a",
        schema: Schema.String,
        value: "a",
        // @ts-expect-error
        leese: "1 second"
      }),
      Election.Service<never>()("a", {
        schema: Schema.String,
        value: "a",
        // @ts-expect-error
        leese: "1 second"
      }),
      Barrier.make({
        name: "a",
        parties: 2,
        schema: Schema.String,
        // @ts-expect-error
        leese: "1 second"
      }),
      Lock.withLock(Effect.void, "a", {
        // @ts-expect-error
        wiat: "1 second"
      }),
      Lock.withLock("a", {
        // @ts-expect-error
        wiat: "1 second"
      }),
      Lock.withLocks(["a"], {
        // @ts-expect-error
        wiat: "1 second"
      }),
      ReadWriteLock.withReadLock("a", {
        // @ts-expect-error
        wiat: "1 second"
      }),
      (semaphore: Semaphore.Semaphore) =>
        Semaphore.withPermits(semaphore, 1, {
          // @ts-expect-error
          wiat: "1 second"
        }),
      (latch: Latch.Latch) =>
        Latch.whenOpen(latch, {
          // @ts-expect-error
          wiat: "1 second"
        }),
      (election: Election.Election<string>) =>
        election.lead({
          // @ts-expect-error
          wiat: "1 second"
        }),
      (barrier: DoubleBarrier.DoubleBarrier) =>
        barrier.withPhase({
          // @ts-expect-error
          wiat: "1 second"
        }),
      (group: TaskGroup.TaskGroup<number, never>) =>
        group.run("a", {
          // @ts-expect-error
          maxHodl: "1 second"
        })
    ])
  })

  it.effect("waits as long as its coordinator says, and leads for longer than that lets locks be held", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const [mine, theirs] = [yield* electionOn(a!, "a"), yield* electionOn(b!, "b")]
        const own = yield* leading(mine)
        yield* begun(own)
        const error = yield* Effect.flip(apart(theirs.lead(Effect.void)))
        assert.strictEqual(reasonOf(error), "WaitTimeout")
        assert.include(error.message, "election \"chief\"")
        yield* Effect.sleep("200 millis")
        assert.deepStrictEqual(own.ended, [])
        yield* own.leave
        yield* Fiber.join(own.fiber)
      }), { lease: "3 seconds", margin: "500 millis", wait: "100 millis", maxHold: "150 millis" }))

  it.effect("fails while Redis is away, rather than waiting: questions, proclamations and hand-overs", () =>
    behindLine(({ context, line }) =>
      Effect.gen(function*() {
        const election = yield* electionOn(context, "a")
        const own = yield* leading(election)
        yield* begun(own)
        yield* line.blackhole
        const asked = [
          Effect.asVoid(election.leader),
          Effect.asVoid(election.candidates),
          election.proclaim("b"),
          election.transferTo("x/y")
        ]
        yield* within(assertUnanswered(asked), 2000, "the failures")
        yield* line.pass
        yield* line.closeAll
        yield* eventually(Effect.map(Effect.option(election.leader), (found) => assert.isTrue(Option.isSome(found))))
        assert.deepStrictEqual(own.ended, [])
        yield* own.leave
        yield* Fiber.join(own.fiber)
      }), { lease: "6 seconds", requestTimeout: "300 millis" }))

  it.effect("is a typed service", () => {
    class Chief extends Election.Service<Chief>()("chief", { schema: Schema.Number, value: 7 }) {}
    class Plain extends Election.Service<Plain>()("plain") {}
    return withNode(() =>
      Effect.gen(function*() {
        const chief = yield* Chief
        const info = yield* chief.lead(chief.leader)
        assert.strictEqual(Option.getOrThrow(info).value, 7)
        const plain = yield* Plain
        assert.isUndefined(Option.getOrThrow(yield* plain.lead(plain.leader)).value)
      }).pipe(Effect.provide(Chief.layer), Effect.provide(Plain.layer))
    )
  })
})
