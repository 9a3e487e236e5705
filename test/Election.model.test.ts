/** An election against its model: a leader, a queue of candidates, and the list of all changes. */
import { assert, layer } from "@effect/vitest"
import { Deferred, Effect, Exit, Fiber, Logger, Option, Schema, Scope, Stream } from "effect"
import * as fc from "fast-check"
import { Coordinator, Election, Lease, Lock } from "../src/index.ts"
import { runs } from "./support/effort.ts"
import { eventually } from "./support/eventually.ts"
import { assertEmpty, freshNamespace, type Node, node, TestServer } from "./support/live.ts"
import { within } from "./support/requests.ts"
import type { Server } from "./support/servers.ts"
import { forget } from "./support/sessions.ts"

const promptly = <A, E, R>(effect: Effect.Effect<A, E, R>, what: string) =>
  Effect.map(within(effect, 5000, what), ({ result }) => result)

const reasonOf = (error: Election.ElectionError) => error.reason._tag

const coordinators = 3
const seats = 2 * coordinators

const step = fc.oneof(
  { weight: 12, arbitrary: fc.record({ op: fc.constant("campaign" as const), seat: fc.nat(seats - 1) }) },
  { weight: 4, arbitrary: fc.record({ op: fc.constant("end" as const), seat: fc.nat(seats - 1) }) },
  { weight: 2, arbitrary: fc.record({ op: fc.constant("resign" as const) }) },
  {
    weight: 2,
    arbitrary: fc.record({ op: fc.constant("proclaim" as const), seat: fc.nat(seats - 1), value: fc.string() })
  },
  {
    weight: 3,
    arbitrary: fc.record({
      op: fc.constant("transfer" as const),
      seat: fc.option(fc.nat(seats - 1)),
      to: fc.nat(seats)
    })
  },
  { weight: 2, arbitrary: fc.record({ op: fc.constant("observe" as const), who: fc.nat(coordinators - 1) }) },
  { weight: 1, arbitrary: fc.record({ op: fc.constant("quit" as const), seat: fc.nat(seats - 1) }) },
  { weight: 1, arbitrary: fc.record({ op: fc.constant("close" as const), who: fc.nat(coordinators - 1) }) },
  { weight: 1, arbitrary: fc.record({ op: fc.constant("lose" as const), who: fc.nat(coordinators - 1) }) }
)

/** One that can be a candidate: those of even number lead again by themselves, the others hold a lease and let go. */
interface Seat {
  readonly at: number
  readonly who: number
  readonly election: Election.Election<string>
  value: string
  leave: Deferred.Deferred<void>
  fiber: Fiber.Fiber<unknown, unknown> | undefined
  readonly close: Effect.Effect<void>
}

interface Observer {
  readonly seen: ReadonlyArray<Election.Info<string> | undefined>
  readonly fiber: Fiber.Fiber<void, Election.ElectionError>
  /** The first change that it has to see. */
  readonly from: number
  /** Its session was never lost. */
  faithful: boolean
}

interface Coordinating {
  readonly context: Node
  readonly seats: [Seat, Seat]
  observing: Observer | undefined
  readonly close: Effect.Effect<void>
}

const world = Effect.fnUntraced(function*(server: Server, namespace: string) {
  const settings = { namespace, partitions: 1, lease: "5 seconds", margin: "100 millis" } as const
  const terms: Array<number> = []
  // What has happened, the vacancy at the beginning included.
  const log: Array<string | undefined> = [undefined]
  let leads: Seat | undefined
  let queue: Array<Seat> = []

  const isOut = (seat: Seat) => seat !== leads && !queue.includes(seat)

  const observer = Effect.fnUntraced(function*(election: Election.Election<string>) {
    const seen: Array<Election.Info<string> | undefined> = []
    const fiber = yield* Effect.forkDetach(
      Stream.runForEach(election.changes, (info) => Effect.sync(() => seen.push(Option.getOrUndefined(info))))
    )
    const found: Observer = { seen, fiber, from: log.length - 1, faithful: true }
    return found
  })

  const sit = Effect.fnUntraced(function*(context: Node, at: number) {
    const scope = yield* Scope.make()
    yield* Effect.addFinalizer(() => Scope.close(scope, Exit.void))
    const election = yield* Election.make({ name: "chief", schema: Schema.String, value: `${at}` }).pipe(
      Effect.provideContext(context),
      Scope.provide(scope)
    )
    const leave = yield* Deferred.make<void>()
    const seat: Seat = {
      at,
      who: at >> 1,
      election,
      value: `${at}`,
      leave,
      fiber: undefined,
      close: Scope.close(scope, Exit.void)
    }
    return seat
  })

  const open = Effect.fnUntraced(function*(who: number) {
    const scope = yield* Scope.make()
    yield* Effect.addFinalizer(() => Scope.close(scope, Exit.void))
    const context = yield* Scope.provide(node(server.url, settings), scope)
    const found: Coordinating = {
      context,
      seats: [yield* sit(context, 2 * who), yield* sit(context, 2 * who + 1)],
      observing: undefined,
      close: Scope.close(scope, Exit.void)
    }
    return found
  })

  const nodes = yield* Effect.forEach(Array.from({ length: coordinators + 1 }), (_, who) => open(who))
  const witness = yield* observer(nodes[coordinators]!.seats[0]!.election)
  const seatAt = (at: number) => nodes[at >> 1]!.seats[at % 2]!

  const succeed = () => {
    leads = queue.shift()
    log.push(leads?.value)
  }
  const enter = (seat: Seat) => {
    seat.value = `${seat.at}`
    queue.push(seat)
    if (leads === undefined) succeed()
  }
  /** A former leader comes back if it leads again by itself. */
  const retire = (seat: Seat) => {
    succeed()
    if (seat.at % 2 === 0) enter(seat)
  }

  const run = ({ at, election, leave }: Seat) => {
    const term = (token: number) => {
      terms.push(token)
      return Deferred.await(leave)
    }
    return at % 2 === 0
      ? election.lead(Effect.flatMap(Lease.current, (lease) => term(Option.getOrThrow(lease).token)))
      : Effect.scoped(
        Effect.flatMap(election.campaign(), (lease) => Effect.raceFirst(term(lease.token), Effect.exit(lease.lost)))
      )
  }

  const apply = Effect.fnUntraced(function*(one: typeof step extends fc.Arbitrary<infer A> ? A : never) {
    switch (one.op) {
      case "campaign": {
        const seat = seatAt(one.seat)
        if (!isOut(seat)) return
        enter(seat)
        seat.leave = yield* Deferred.make<void>()
        seat.fiber = yield* Effect.forkDetach(run(seat))
        return
      }
      case "end": {
        const seat = seatAt(one.seat)
        if (isOut(seat)) return
        if (seat === leads) {
          succeed()
          yield* Deferred.succeed(seat.leave, undefined)
          yield* Fiber.join(seat.fiber!)
        } else {
          queue = queue.filter((other) => other !== seat)
          yield* Fiber.interrupt(seat.fiber!)
        }
        return
      }
      case "resign": {
        if (leads === undefined) return yield* seatAt(0).election.resign
        const { election } = leads
        retire(leads)
        return yield* election.resign
      }
      case "proclaim": {
        const seat = leads !== undefined && one.seat % 2 === 0 ? leads : seatAt(one.seat)
        if (seat !== leads) {
          return assert.strictEqual(reasonOf(yield* Effect.flip(seat.election.proclaim(one.value))), "NotLeading")
        }
        // The same value again is no change.
        if (one.value !== seat.value) log.push(one.value)
        seat.value = one.value
        return yield* seat.election.proclaim(one.value)
      }
      case "transfer": {
        const seat = one.seat === null ? leads ?? seatAt(0) : seatAt(one.seat)
        const place = one.to % queue.length
        const to = one.to === seats ? undefined : queue[place]
        const id = to === undefined ? "x/y" : (yield* seat.election.candidates)[place]!.id
        if (seat === leads && to !== undefined) {
          queue = [to, ...queue.filter((other) => other !== to)]
          retire(seat)
          return yield* seat.election.transferTo(id)
        }
        const reason = reasonOf(yield* Effect.flip(seat.election.transferTo(id)))
        return assert.strictEqual(reason, seat === leads ? "CandidateGone" : "NotLeading")
      }
      case "observe": {
        const found = nodes[one.who]!
        if (found.observing === undefined) {
          found.observing = yield* observer(found.seats[0]!.election)
        } else {
          yield* Fiber.interrupt(found.observing.fiber)
          found.observing = undefined
        }
        return
      }
      case "close": {
        const { close, observing, seats } = nodes[one.who]!
        queue = queue.filter(({ who }) => who !== one.who)
        if (leads?.who === one.who) succeed()
        yield* close
        for (const { fiber } of seats) if (fiber !== undefined) yield* promptly(Fiber.await(fiber), "the end")
        if (observing !== undefined) yield* promptly(Fiber.await(observing.fiber), "the end of the changes")
        nodes[one.who] = yield* open(one.who)
        return
      }
      case "quit": {
        const seat = seatAt(one.seat)
        const found = nodes[seat.who]!
        queue = queue.filter((other) => other !== seat)
        if (seat === leads) succeed()
        yield* seat.close
        // A waiter is notified when it would lead.
        if (seat.fiber !== undefined) yield* Fiber.interrupt(seat.fiber)
        if (seat.at % 2 === 0 && found.observing !== undefined) {
          yield* promptly(Fiber.join(found.observing.fiber), "the end of the changes")
          found.observing = undefined
        }
        found.seats[seat.at % 2] = yield* sit(found.context, seat.at)
        return
      }
      case "lose": {
        const { context, observing, seats } = nodes[one.who]!
        const lost = terms.at(-1)
        const [session] = yield* Effect.provideContext(
          Effect.flatMap(Coordinator.Coordinator, ({ sessions }) => sessions),
          context
        )
        yield* forget(server, namespace, session!.id)
        // The next request finds it out.
        yield* Effect.provideContext(Lock.withLockIfAvailable(Effect.void, "any"), context)
        if (observing !== undefined) observing.faithful = false
        // They come back behind all others, in whichever order.
        const former = leads
        const back = queue.filter(({ who }) => who === one.who)
        queue = queue.filter(({ who }) => who !== one.who)
        if (former?.who === one.who && former.at % 2 === 0) back.push(former)
        for (const seat of back) seat.value = `${seat.at}`
        const others = queue.map(({ value }) => value)
        const settled = yield* promptly(
          eventually(
            Effect.gen(function*() {
              const now = Option.getOrUndefined(yield* seats[0]!.election.leader)
              const waiting = (yield* seats[0]!.election.candidates).map(({ value }) => value)
              if (former?.who === one.who) assert.notStrictEqual(now?.term, lost)
              const all = former?.who === one.who && now !== undefined ? [now.value, ...waiting] : waiting
              assert.deepStrictEqual(all.slice(0, others.length), others)
              assert.deepStrictEqual(all.slice(others.length).toSorted(), back.map(({ value }) => value).toSorted())
              return all
            }),
            { interval: 5 }
          ),
          "everybody in line again"
        )
        queue.push(...settled.slice(others.length).map((value) => back.find((seat) => seat.value === value)!))
        if (former?.who !== one.who) return
        leads = queue.shift()
        yield* eventually(Effect.sync(() => assert.strictEqual(witness.seen.at(-1)?.value, leads?.value)))
        // It may have been vacant until they were back.
        if (leads?.who === one.who && witness.seen.length > log.length + 1) log.push(undefined)
        log.push(leads?.value)
      }
    }
  })

  /** What can be seen is what the model says. */
  const agrees = Effect.gen(function*() {
    const { election } = nodes[coordinators]!.seats[0]!
    const now = Option.getOrUndefined(yield* election.leader)
    assert.strictEqual(now?.value, leads?.value)
    if (now !== undefined) assert.strictEqual(now.term, terms.at(-1))
    assert.deepStrictEqual((yield* election.candidates).map(({ value }) => value), queue.map(({ value }) => value))
    for (const { observing } of [...nodes, { observing: witness }]) {
      if (observing === undefined) continue
      const seen = observing.seen.map((info) => info?.value)
      if (observing.faithful) assert.deepStrictEqual(seen, log.slice(observing.from))
      else assert.strictEqual(seen.at(-1), leads?.value)
    }
    for (const { seats } of nodes) {
      for (const seat of seats) assert.strictEqual(yield* seat.election.isLeader, seat === leads)
    }
    for (const [at, term] of terms.entries()) if (at > 0) assert.isAbove(term, terms[at - 1]!)
  })

  /** Nor is there anything else in Redis. */
  const nothingElse = Effect.gen(function*() {
    const fields = (yield* server.cli("HKEYS", `{${namespace}:00}:election:chief`)).split("\n")
    const count = (kind: string) => fields.filter((field) => field.startsWith(kind)).length
    const candidates = queue.length + Number(leads !== undefined)
    const queues = Math.min(queue.length, 1)
    const observers = nodes.filter(({ observing }) => observing !== undefined).length + 1
    assert.deepStrictEqual(
      { h: count("h"), w: count("w"), q: count("q"), v: count("v"), o: count("o"), all: fields.length },
      {
        h: candidates - queue.length,
        // All candidates are in one field.
        w: queues,
        q: 0,
        v: candidates,
        o: observers,
        // And the state, the number of the last change, and the leader.
        all: candidates + 2 * (candidates - queue.length) + queues + observers + 2
      }
    )
  })

  return {
    nothingElse: eventually(nothingElse, { timeout: "5 seconds", message: "nothing else" }),
    apply: Effect.fnUntraced(function*(one: Parameters<typeof apply>[0]) {
      yield* promptly(apply(one), one.op)
      yield* eventually(agrees, { interval: 2, timeout: "5 seconds", message: `agreement after ${one.op}` })
    })
  }
})

layer(TestServer.layer, { excludeTestServices: true, timeout: "60 seconds" })("an election", (it) => {
  it.effect("does what its model does, whichever candidate leads, waits, chooses, looks, leaves or is lost", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      yield* Effect.promise(() =>
        fc.assert(
          fc.asyncProperty(fc.array(step, { maxLength: 40, size: "max" }), (steps) =>
            Effect.runPromise(
              Effect.gen(function*() {
                const namespace = freshNamespace()
                yield* Effect.scoped(
                  Effect.flatMap(
                    world(server, namespace),
                    ({ apply, nothingElse }) => Effect.andThen(Effect.forEach(steps, apply), nothingElse)
                  )
                )
                yield* assertEmpty(server, namespace)
              }).pipe(Effect.provide(Logger.layer([])))
            )),
          { numRuns: runs(15), endOnFailure: true }
        )
      )
    }))
})
