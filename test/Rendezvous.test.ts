/** Rendezvous: no party leaves before the other one was there, and what a taker had goes to the next when it dies. */
import { assert, layer } from "@effect/vitest"
import { Deferred, Duration, Effect, Exit, Fiber, Option, Schema, Scope } from "effect"
import * as fc from "fast-check"
import { Coordinator, Lease, Lock, Rendezvous } from "../src/index.ts"
import { make as proxy } from "../src/testing/Proxy.ts"
import { elapsed } from "./support/awake.ts"
import { runs } from "./support/effort.ts"
import { eventually, realSleep } from "./support/eventually.ts"
import { interruptedAt } from "./support/interrupter.ts"
import { assertEmpty, deadlineOf, freshNamespace, node, TestServer, withNode } from "./support/live.ts"
import { asks } from "./support/requests.ts"
import { channelOf, forgetSession, fragile, isPending, on, promptly, several } from "./support/several.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

const hostile = "x\u0000}{:\r\n\"é😀"

const make = Rendezvous.make({ name: hostile, schema: Schema.String, timeToLive: "5 seconds" })

type Place = Rendezvous.Rendezvous<string>

const waits = (place: Place, expected: Partial<Effect.Success<Place["present"]>>) =>
  eventually(Effect.map(place.present, (waiting) => assert.deepInclude(waiting, expected)), { interval: 1 })

const nobody = { givers: 0, takers: 0, exchangers: 0 }

const reasonOf = <A>(effect: Effect.Effect<A, Rendezvous.RendezvousError>) =>
  Effect.map(Effect.flip(effect), ({ reason }) => reason._tag)

/** Takes, shows what it has, and has it until the test says how that ends. */
const holding = Effect.fnUntraced(function*(place: Place) {
  const begun = yield* Deferred.make<Rendezvous.Handover & { readonly value: string }>()
  const end = yield* Deferred.make<void, "failed">()
  const fiber = yield* Effect.forkChild(
    place.takeWith((value, handover) =>
      Effect.andThen(Deferred.succeed(begun, { value, ...handover }), Deferred.await(end))
    )
  )
  return {
    fiber,
    begun: promptly(Deferred.await(begun), "an item"),
    finish: Effect.andThen(Deferred.succeed(end, undefined), promptly(Fiber.join(fiber), "the taker")),
    fail: Effect.andThen(Deferred.fail(end, "failed" as const), promptly(Fiber.await(fiber), "the taker"))
  }
})

layer(TestServer.layer, live)("a rendezvous", (it) => {
  it.effect("hands over in the order of coming, on both sides", () =>
    several(3, (nodes) =>
      Effect.gen(function*() {
        const places = yield* Effect.forEach(nodes, (context) => on(context, make))
        const numbers = [0, 1, 2, 3, 4]
        const taking: Array<Fiber.Fiber<string, Rendezvous.RendezvousError>> = []
        for (const n of numbers) {
          taking.push(yield* Effect.forkChild(places[n % 3]!.take()))
          yield* waits(places[0]!, { takers: n + 1 })
        }
        for (const n of numbers) yield* promptly(places[(n + 1) % 3]!.give(`value ${n}`), "a giver")
        for (const n of numbers) assert.strictEqual(yield* promptly(Fiber.join(taking[n]!), "a taker"), `value ${n}`)

        const giving: Array<Fiber.Fiber<void, Rendezvous.RendezvousError>> = []
        for (const n of numbers) {
          giving.push(yield* Effect.forkChild(places[n % 3]!.give(`value ${n}`)))
          yield* waits(places[0]!, { givers: n + 1 })
        }
        for (const n of numbers) {
          assert.isTrue(giving.slice(n).every(isPending))
          assert.strictEqual(yield* promptly(places[(n + 1) % 3]!.take(), "a taker"), `value ${n}`)
          yield* promptly(Fiber.join(giving[n]!), "a giver")
        }
        assert.deepStrictEqual(yield* places[0]!.present, nobody)
      })))

  it.effect("lets the giver go when the taker has finished, and under the lease of that", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const [one, two] = [yield* on(a!, make), yield* on(b!, make)]
        const taker = yield* holding(two)
        const giver = yield* Effect.forkChild(one.give(hostile))
        assert.deepInclude(yield* taker.begun, { value: hostile, attempts: 1 })
        assert.isTrue(isPending(giver))
        assert.strictEqual((yield* one.present).givers, 1)
        yield* taker.finish
        yield* promptly(Fiber.join(giver), "the giver")

        yield* Effect.forkChild(one.give("x"))
        const lease = yield* two.takeWith(() => Lease.current)
        assert.isTrue(Option.isSome(lease))
        assert.strictEqual(Option.getOrThrow(lease).key, hostile)
      })))

  it.effect("hands what a taker has failed at to the next one, before all others", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const [one, two] = [yield* on(a!, make), yield* on(b!, make)]
        const first = yield* Effect.forkChild(one.give("first"))
        yield* waits(one, { givers: 1 })
        const second = yield* Effect.forkChild(one.give("second"))
        yield* waits(one, { givers: 2 })
        const ids = new Set<string>()
        for (const attempt of [1, 2]) {
          const taker = yield* holding(two)
          const { attempts, id, value } = yield* taker.begun
          assert.deepStrictEqual([value, attempts], ["first", attempt])
          ids.add(id)
          if (attempt === 1) assert.isTrue(Exit.isFailure(yield* taker.fail))
          else yield* Fiber.interrupt(taker.fiber)
        }
        // One that fails while others wait goes straight to them.
        const taker = yield* holding(one)
        ids.add((yield* taker.begun).id)
        const waiting = [yield* holding(two), yield* holding(two)]
        const values = [yield* waiting[0]!.begun]
        yield* waits(one, { takers: 1 })
        yield* taker.fail
        values.push(yield* waiting[1]!.begun)
        assert.deepStrictEqual(values.map(({ attempts, value }) => [value, attempts]), [["second", 1], ["first", 4]])
        ids.add(values[1]!.id)
        assert.strictEqual(ids.size, 1)
        assert.isTrue(isPending(first) && isPending(second))
        yield* waiting[1]!.finish
        yield* promptly(Fiber.join(first), "the first giver")
        yield* waiting[0]!.finish
        yield* promptly(Fiber.join(second), "the second giver")
      })))

  it.effect("returns the value to a giver that gives up, unless a taker has it", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const [one, two] = [yield* on(a!, make), yield* on(b!, make)]
        assert.isTrue(Option.isNone(yield* Effect.timeoutOption(one.give("withdrawn"), "30 millis")))
        yield* waits(one, nobody)
        for (const fine of [true, false]) {
          const giver = yield* Effect.forkChild(one.give("kept"))
          const taker = yield* holding(two)
          yield* taker.begun
          yield* Fiber.interrupt(giver)
          yield* waits(one, { givers: 0 })
          const next = yield* Effect.forkChild(two.take())
          yield* waits(one, { takers: 1 })
          yield* fine ? taker.finish : taker.fail
          // No giver is there any more to give it to the next.
          yield* waits(one, { takers: 1 })
          assert.isTrue(isPending(next))
          yield* one.give("another")
          assert.strictEqual(yield* promptly(Fiber.join(next), "the next"), "another")
        }
      })))

  it.effect("exchanges values between two at a time", () =>
    several(3, (nodes) =>
      Effect.gen(function*() {
        const places = yield* Effect.forEach(nodes, (context) => on(context, make))
        const waiting = yield* Effect.forkChild(places[0]!.exchange(hostile))
        yield* waits(places[1]!, { exchangers: 1 })
        assert.strictEqual(yield* promptly(places[1]!.exchange("x"), "the second"), hostile)
        assert.strictEqual(yield* promptly(Fiber.join(waiting), "the first"), "x")
        assert.isTrue(Option.isNone(yield* Effect.timeoutOption(places[2]!.exchange("alone"), "30 millis")))
        yield* waits(places[0]!, nobody)
        const values = Array.from({ length: 120 }, (_, n) => `${n}`)
        const met = yield* promptly(
          Effect.forEach(values, (value, n) => places[n % 3]!.exchange(value), { concurrency: "unbounded" }),
          "all of them"
        )
        for (const [n, other] of met.entries()) assert.strictEqual(met[Number(other)], `${n}`)
        assert.deepStrictEqual(yield* places[0]!.present, nobody)
      })))

  it.effect("limits how long to wait for a counterpart, and leaves nothing then", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const [one, two] = [yield* on(a!, make), yield* on(b!, make)]
        const wait = { wait: "20 millis" } as const
        const programs: ReadonlyArray<Effect.Effect<unknown, Rendezvous.RendezvousError>> = [
          one.give("x", wait),
          one.take(wait),
          one.takeWith(Effect.succeed, wait),
          one.exchange("x", wait)
        ]
        for (const program of programs) {
          const { reason } = yield* promptly(Effect.flip(program), "the time-out")
          assert.deepInclude(reason, { _tag: "WaitTimeout", kind: "rendezvous", key: hostile, away: false })
          yield* waits(two, nobody)
        }
        // The time is for meeting, not for what is done with the value.
        yield* Effect.forkChild(two.give("y"))
        yield* waits(one, { givers: 1 })
        const slow = one.takeWith((value) => Effect.as(realSleep(60), value), wait)
        assert.strictEqual(yield* promptly(slow, "a slow taker"), "y")
      })))

  it.effect("notifies a party whose time is over that both have met", () =>
    several(1, ([b], namespace, server) =>
      Effect.gen(function*() {
        const line = yield* proxy(server)
        const a = yield* node(line.url, { namespace, partitions: 1, lease: "30 seconds" })
        const [one, two] = [yield* on(a, make), yield* on(b!, make)]
        yield* Effect.all([one.exchange("first"), two.exchange("first")], { concurrency: "unbounded" })
        yield* eventually(Effect.sync(() => channelOf(a).outbox.isIdle))
        yield* line.delay({ replies: 600 })
        const waiting = yield* Effect.forkChild(two.exchange("from b"))
        yield* waits(two, { exchangers: 1 })
        const late = yield* Effect.forkChild(one.exchange("from a", { wait: "400 millis" }))
        assert.strictEqual(yield* promptly(Fiber.join(waiting), "the other one"), "from a")
        assert.strictEqual(yield* promptly(Fiber.join(late), "the late one"), "from b")
        yield* line.pass
        yield* waits(two, nobody)
      })))

  it.effect("counts all attempts to exchange into the time to wait", () =>
    several(1, ([b], namespace, server) =>
      Effect.gen(function*() {
        const line = yield* proxy(server)
        const a = yield* node(line.url, { namespace, partitions: 1, lease: "30 seconds" })
        const [one, two] = [yield* on(a, make), yield* on(b!, make)]
        yield* Effect.timeoutOption(one.exchange("first"), "50 millis")
        yield* line.delay({ replies: 300 })
        const begun = Date.now()
        const waiting = yield* Effect.forkChild(reasonOf(one.exchange("x", { wait: "1 second" })))
        // Each of them leaves before it is answered, so that the one that waits begins anew.
        while (isPending(waiting) && elapsed(begun) < 6000) {
          yield* Effect.timeoutOption(two.exchange("leaves"), "20 millis")
          yield* realSleep(400)
        }
        assert.strictEqual(yield* Fiber.join(waiting), "WaitTimeout")
        assert.isBelow(elapsed(begun), 4000)
        yield* line.pass
      })))

  it.effect("hands the value of a taker that is busy for too long to the next one", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const [one, two] = [yield* on(a!, make), yield* on(b!, make)]
        const giver = yield* Effect.forkChild(one.give("x"))
        yield* waits(one, { givers: 1 })
        const error = yield* Effect.flip(two.takeWith(() => Effect.never, { maxHold: "30 millis" }))
        assert.deepInclude(error.reason, { _tag: "LeaseLost", reason: "maxHold", kind: "rendezvous", key: hostile })
        assert.strictEqual(yield* two.takeWith((value, { attempts }) => Effect.succeed(`${value} ${attempts}`)), "x 2")
        yield* promptly(Fiber.join(giver), "the giver")
      })))

  it.effect("does not count waiters whose session has ended, though none has reaped it", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const line = yield* proxy(server)
        const context = yield* fragile(server, line, namespace, 1)
        const dying = yield* on(context, make)
        const one = yield* on(a!, make)
        yield* Effect.forkChild(Effect.exit(dying.take()))
        yield* Effect.forkChild(Effect.exit(dying.exchange("x")))
        yield* waits(one, { takers: 1, exchangers: 1 })
        const [session] = yield* on(context, Effect.flatMap(Coordinator.Coordinator, (it) => it.sessions))
        yield* line.blackhole
        const time = Effect.map(server.cli("TIME"), (time) => Number(time.split("\n")[0]) * 1000)
        yield* eventually(
          Effect.map(Effect.all([time, deadlineOf(server, namespace, session!.id!)]), ([now, at]) => now > at)
        )
        assert.deepStrictEqual(yield* one.present, nobody)
        yield* line.pass
        yield* line.closeAll
      }), { lease: "30 seconds" }))

  it.effect("has a lease of its own where it is given one", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const place = yield* on(a!, Rendezvous.make({ name: "slow", schema: Schema.String, lease: "20 seconds" }))
        assert.isTrue(Option.isNone(yield* Effect.timeoutOption(place.take(), "20 millis")))
        const sessions = yield* on(a!, Effect.flatMap(Coordinator.Coordinator, (it) => it.sessions))
        assert.include(sessions.map(({ lease }) => Duration.toMillis(lease)), 20_000)
      })))

  it.effect("exchanges with a party that is there, and not with one that was", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const [one, two] = [yield* on(a!, make), yield* on(b!, make)]
        const line = yield* proxy(server)
        const dying = yield* on(yield* fragile(server, line, namespace, 2), make)
        const lost = yield* Effect.forkChild(dying.exchange("lost"))
        yield* waits(one, { exchangers: 1 })
        yield* line.blackhole
        // To Redis it is still there. A party that comes does not leave with its value, and meets the next one to come.
        const first = yield* Effect.forkChild(one.exchange("first"))
        yield* waits(one, { exchangers: 0 })
        assert.isTrue(isPending(first))
        const second = yield* Effect.forkChild(two.exchange("second"))
        assert.strictEqual(yield* Effect.timeout(Fiber.join(first), "4 seconds"), "second")
        assert.strictEqual(yield* promptly(Fiber.join(second), "the second"), "first")
        yield* line.pass
        yield* line.closeAll
        yield* waits(one, { exchangers: 1 })
        assert.strictEqual(yield* promptly(one.exchange("third"), "the third"), "lost")
        assert.strictEqual(yield* promptly(Fiber.join(lost), "who was lost"), "third")
      })))

  it.effect("hands what a taker had to the next one when the lease of that has run out", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const [one, two] = [yield* on(a!, make), yield* on(b!, make)]
        const line = yield* proxy(server)
        const context = yield* fragile(server, line, namespace, 2)
        const taker = yield* holding(yield* on(context, make))
        const waiting = yield* Effect.forkChild(Effect.flatMap(on(context, make), (dying) => dying.take()))
        yield* waits(one, { takers: 2 })
        const giver = yield* Effect.forkChild(one.give("x"))
        const before = yield* taker.begun
        yield* line.blackhole
        const next = yield* holding(two)
        assert.strictEqual(
          yield* Effect.map(
            Effect.flip(Fiber.join(taker.fiber)),
            (error) => error instanceof Rendezvous.RendezvousError ? error.reason._tag : error
          ),
          "LeaseLost"
        )
        assert.deepStrictEqual(yield* eventually(next.begun), { ...before, attempts: 2 })
        yield* next.finish
        yield* promptly(Fiber.join(giver), "the giver")
        yield* line.pass
        yield* line.closeAll
        // One that waited there waits again.
        yield* waits(one, { takers: 1 })
        yield* one.give("y")
        assert.strictEqual(yield* promptly(Fiber.join(waiting), "who waited"), "y")
      })))

  it.effect("refuses what the other party cannot read, and notifies both", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const name = "mixed"
        const text = yield* on(a!, Rendezvous.make({ name, schema: Schema.String }))
        const number = yield* on(b!, Rendezvous.make({ name, schema: Schema.Number }))
        const giver = yield* Effect.forkChild(reasonOf(text.give("x")))
        assert.strictEqual(yield* reasonOf(number.take()), "InvalidPayload")
        assert.strictEqual(yield* promptly(Fiber.join(giver), "the giver"), "Refused")
        yield* waits(text, nobody)
        // One that waits is not met with what it cannot read, and the other waits on.
        const waiting = yield* Effect.forkChild(reasonOf(number.exchange(1)))
        yield* waits(text, { exchangers: 1 })
        const fine = yield* Effect.forkChild(text.exchange("x"))
        assert.strictEqual(yield* promptly(Fiber.join(waiting), "who cannot read it"), "InvalidPayload")
        yield* waits(text, { exchangers: 1 })
        assert.strictEqual(yield* text.exchange("y"), "x")
        assert.strictEqual(yield* promptly(Fiber.join(fine), "who waited on"), "y")
        assert.strictEqual(yield* reasonOf(text.give(1 as never)), "InvalidPayload")
      })))

  it.effect("takes every value of the schema, and bad arguments for defects", () => {
    const schema = Schema.Struct({ at: Schema.Date, of: Schema.optional(Schema.BigInt), none: Schema.Null })
    class Things extends Rendezvous.Service<Things>()("things", { schema }) {}
    return withNode(() =>
      Effect.gen(function*() {
        const things = yield* Things
        const value = { at: new Date(0), of: 12345678901234567890n, none: null }
        yield* Effect.forkChild(things.give(value))
        assert.deepStrictEqual(yield* things.take(), value)
        const large = { at: new Date(1), none: null }
        const values = yield* Effect.all([things.exchange(value), things.exchange(large)], { concurrency: "unbounded" })
        assert.deepStrictEqual(values, [large, value])
        for (const bad of [{ name: "", timeToLive: 1 }, { name: "x", timeToLive: 0 }]) {
          const exit = yield* Effect.exit(Rendezvous.make({ ...bad, schema }))
          assert.isTrue(Exit.isFailure(exit) && String(exit.cause).includes("RangeError"))
        }
        const nothing = yield* Rendezvous.make({ name: "void", schema: Schema.Void })
        yield* Effect.forkChild(nothing.give())
        assert.isUndefined(yield* nothing.take())
        const text = yield* Rendezvous.make({ name: "text", schema: Schema.String })
        for (const one of ["", "\u2028\u0000\\\"'", "\ud800", "é".repeat(20_000)]) {
          yield* Effect.forkChild(text.give(one))
          assert.strictEqual(yield* text.take(), one)
        }
      }).pipe(Effect.provide(Things.layer))
    )
  })

  it.effect("leaves nothing of a party that is interrupted, before any operation", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const [one, two] = [yield* on(a!, make), yield* on(b!, make)]
        const programs: ReadonlyArray<
          readonly [
            mine: Effect.Effect<unknown, unknown>,
            theirs: Effect.Effect<unknown, unknown>
          ]
        > = [
          [one.give("x"), two.take()],
          [one.take(), two.give("x")],
          [one.takeWith(() => Effect.yieldNow), two.give("x")],
          [one.exchange("x"), two.exchange("y")]
        ]
        for (const [mine, theirs] of programs) {
          // Alone, and with a party that has come before.
          for (const accompanied of [false, true]) {
            let interrupted = 0
            for (let at = 1;; at++) {
              const other = accompanied ? yield* Effect.forkChild(theirs) : undefined
              if (accompanied) {
                yield* eventually(Effect.map(two.present, (it) => it.givers + it.takers + it.exchangers > 0), {
                  interval: 1
                })
              }
              const { exit, reached } = yield* interruptedAt(
                at,
                accompanied ? mine : Effect.timeoutOption(mine, "20 millis")
              )
              if (Exit.isFailure(exit)) interrupted++
              if (other !== undefined) {
                yield* eventually(
                  Effect.map(two.present, ({ givers, takers, exchangers }) => givers + takers + exchangers < 2)
                )
                yield* Fiber.interrupt(other)
              }
              yield* waits(two, nobody)
              if (!reached) break
            }
            assert.isAbove(interrupted, 5)
          }
        }
      })))

  it.effect("asks anew when the party that it has met leaves before it is notified that it waits", () =>
    several(1, ([c], namespace, server) =>
      Effect.gen(function*() {
        const lines = [yield* proxy(server), yield* proxy(server)] as const
        const [a, b] = yield* Effect.forEach(lines, ({ url }) =>
          node(url, { namespace, partitions: 1, lease: "30 seconds", requestTimeout: "200 millis" }))
        const [one, two, three] = [yield* on(a!, make), yield* on(b!, make), yield* on(c!, make)]
        // Its mailbox is read already.
        const taker = yield* Effect.forkChild(one.take())
        yield* waits(three, { takers: 1 })
        const leaves = yield* Effect.forkChild(two.exchange("leaves"))
        yield* waits(three, { exchangers: 1 })

        yield* lines[1].delay({ replies: 500 })
        const met = yield* lines[0].once(asks("rendezvous.exchange"), "blackholeReply")
        const stays = yield* Effect.forkChild(one.exchange("stays"))
        yield* met
        yield* waits(three, { exchangers: 0 })
        yield* Fiber.interrupt(leaves)
        yield* lines[1].pass
        assert.strictEqual(yield* promptly(three.exchange("comes"), "the next party"), "stays")
        assert.strictEqual(yield* promptly(Fiber.join(stays), "who has stayed"), "comes")
        yield* Fiber.interrupt(taker)
      })))

  it.effect("leaves nothing of a party that gives up before it could ask anew", () =>
    several(1, ([c], namespace, server) =>
      Effect.gen(function*() {
        const lines = [yield* proxy(server), yield* proxy(server)] as const
        const [a, b] = yield* Effect.forEach(lines, ({ url }) =>
          node(url, { namespace, partitions: 1, lease: "30 seconds" }))
        const plain = Rendezvous.make({ name: "plain", schema: Schema.String })
        const [one, two, three] = [yield* on(a!, plain), yield* on(b!, plain), yield* on(c!, plain)]
        const leaves = yield* Effect.forkChild(two.exchange("leaves"))
        yield* waits(three, { exchangers: 1 })
        yield* lines[1].delay({ replies: 500 })
        const stays = yield* Effect.forkChild(one.exchange("stays"))
        yield* waits(three, { exchangers: 0 })
        // What it is going to ask waits behind another request.
        const held = yield* lines[0].hold(asks("lock.take"))
        const lock = yield* Effect.forkChild(on(a!, Lock.withLock(Effect.void, "busy")))
        yield* held.request
        const { replies } = lines[0].counters
        yield* Fiber.interrupt(leaves)
        yield* eventually(
          Effect.sync(() =>
            lines[0].counters.replies > replies
          ),
          { message: "it hears of that" }
        )
        const gone = yield* Effect.forkChild(Fiber.interrupt(stays), { startImmediately: true })
        yield* held.release()
        yield* promptly(Effect.all([Fiber.join(lock), Fiber.join(gone)]), "the end")
        yield* lines[1].pass
        yield* eventually(
          Effect.map(server.cli("EXISTS", `{${namespace}:00}:rendezvous:plain`), (found) => found === "0"),
          { message: "nothing is left" }
        )
      })))

  it.effect("leaves nothing of a party that asks for its state while the answer says that it is over", () =>
    several(1, ([b], namespace, server) =>
      Effect.gen(function*() {
        const line = yield* proxy(server)
        const a = yield* node(line.url, { namespace, partitions: 1, lease: "30 seconds" })
        const plain = Rendezvous.make({ name: "plain", schema: Schema.String })
        const [one, two] = [yield* on(a, plain), yield* on(b!, plain)]
        const takers = yield* Effect.forEach([1, 2], () => Effect.forkChild(one.take()))
        const stays = yield* Effect.forkChild(one.exchange("stays"))
        yield* waits(two, { takers: 2, exchangers: 1 })
        yield* eventually(Effect.sync(() => line.counters.of("XREAD") > 0), { message: "it reads its mailbox" })
        // The next read, and what it answers to the party that it has met then.
        const reading = yield* line.hold(({ name }) => name === "XREAD")
        const accepting = yield* line.hold(asks("rendezvous.accept"))
        const leaves = yield* Effect.forkChild(two.exchange("leaves"))
        yield* Effect.all([reading.request, accepting.request])
        yield* Fiber.interrupt(leaves)
        // An event is lost, so everything asks anew.
        const [{ id }] = (yield* on(a, Effect.flatMap(Coordinator.Coordinator, ({ sessions }) => sessions))) as [
          Coordinator.Session
        ]
        const mailbox = `{${namespace}:00}:mail:${id}`
        const posted = Effect.map(
          server.cli("XREVRANGE", mailbox, "+", "-", "COUNT", 1),
          (text) => text.split("\n")[0]!
        )
        const before = yield* posted
        const first = yield* Effect.forkChild(two.give("first"))
        yield* eventually(Effect.map(posted, (entry) => entry !== before))
        yield* server.cli("XDEL", mailbox, yield* posted)
        const second = yield* Effect.forkChild(two.give("second"))
        yield* eventually(Effect.map(posted, (entry) => entry !== before))
        const { replies } = line.counters
        yield* reading.release()
        yield* eventually(Effect.sync(() => line.counters.replies > replies), { message: "it hears of that" })
        yield* accepting.release()
        yield* promptly(Fiber.joinAll([...takers, first, second]), "givers and takers")
        assert.strictEqual(yield* promptly(two.exchange("comes"), "the next party"), "stays")
        assert.strictEqual(yield* promptly(Fiber.join(stays), "who has stayed"), "comes")
        yield* eventually(
          Effect.map(server.cli("EXISTS", `{${namespace}:00}:rendezvous:plain`), (found) => found === "0"),
          { message: "nothing is left" }
        )
      })))

  it.effect("can be waited at again after Redis has lost its data", () =>
    several(2, ([a, b], _, server) =>
      Effect.gen(function*() {
        const [one, two] = [yield* on(a!, make), yield* on(b!, make)]
        for (
          const [mine, theirs] of [
            [one.give("x"), two.take()],
            [one.take(), two.give("x")],
            [one.exchange("x"), two.exchange("y")]
          ]
        ) {
          const waiting = yield* Effect.forkChild(mine!)
          yield* eventually(Effect.map(two.present, (it) => it.givers + it.takers + it.exchangers === 1))
          yield* server.cli("FLUSHALL")
          yield* Effect.timeout(theirs!, "4 seconds")
          yield* Effect.timeout(Fiber.join(waiting), "4 seconds")
        }
        const taker = yield* holding(one)
        const giver = yield* Effect.forkChild(two.give("again"))
        yield* taker.begun
        yield* server.cli("FLUSHALL")
        assert.isTrue(Exit.isFailure(yield* Effect.timeout(Fiber.await(taker.fiber), "4 seconds")))
        assert.strictEqual(yield* Effect.timeout(one.take(), "4 seconds"), "again")
        yield* promptly(Fiber.join(giver), "the giver")
      }), { lease: "1 second", margin: "200 millis" }))

  // Each request is executed or not, and then its session is lost before the answer.
  const losses: ReadonlyArray<
    readonly [
      verb: string,
      executed: boolean,
      lost: (place: Place) => Effect.Effect<string | void, Rendezvous.RendezvousError>,
      others: ReadonlyArray<(place: Place) => Effect.Effect<string | void, Rendezvous.RendezvousError>>,
      expected: string,
      first?: boolean
    ]
  > = [
    ["rendezvous.give", true, (it) => it.give("x"), [(it) => it.take()], "undefined | x"],
    ["rendezvous.give", false, (it) => it.give("x"), [(it) => it.take()], "undefined | x"],
    ["rendezvous.take", true, (it) => it.take(), [(it) => it.give("x")], "x | undefined"],
    ["rendezvous.take", false, (it) => it.take(), [(it) => it.give("x")], "x | undefined"],
    // It cannot know whether it was acknowledged.
    ["rendezvous.acknowledge", true, (it) => it.take(), [(it) => it.give("x")], "LeaseLost | undefined"],
    [
      "rendezvous.acknowledge",
      false,
      (it) => it.take(),
      [(it) => it.give("x"), (it) => it.take()],
      "LeaseLost | undefined | x",
      true
    ],
    ["rendezvous.exchange", true, (it) => it.exchange("x"), [(it) => it.exchange("y")], "y | x"],
    ["rendezvous.exchange", false, (it) => it.exchange("x"), [(it) => it.exchange("y")], "y | x"],
    ["rendezvous.exchange", true, (it) => it.exchange("x"), [(it) => it.exchange("y")], "y | x", true],
    ["rendezvous.accept", true, (it) => it.exchange("x"), [(it) => it.exchange("y")], "y | x", true],
    ["rendezvous.accept", false, (it) => it.exchange("x"), [(it) => it.exchange("y")], "y | x", true]
  ]

  it.effect("hands over and exchanges exactly once when a session is lost with a request on its way", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      yield* Effect.forEach(losses, ([verb, executed, lost, others, expected, first]) =>
        Effect.gen(function*() {
          const namespace = freshNamespace()
          const outcome = (effect: Effect.Effect<string | void, Rendezvous.RendezvousError>) =>
            Effect.map(Effect.result(effect), (result) =>
              result._tag === "Success" ? String(result.success) : result.failure.reason._tag)
          const results = yield* Effect.scoped(Effect.gen(function*() {
            const line = yield* proxy(server)
            const other = yield* node(server.url, { namespace, partitions: 1, lease: "3 seconds" })
            const context = yield* fragile(server, line, namespace, 1)
            const [mine, theirs] = [
              yield* on(context, make),
              yield* on(other, make)
            ]
            yield* Effect.provideContext(Lock.withLock(Effect.void, "session"), context)
            const asked = yield* line.hold(asks(verb))
            const waiting: Array<Fiber.Fiber<string>> = []
            const run = Effect.gen(function*() {
              for (const other of others) {
                waiting.push(yield* Effect.forkChild(outcome(other(theirs))))
                yield* realSleep(20)
              }
            })
            // The party that is lost comes last, or waits for the others.
            if (first !== true) {
              yield* run
            }
            const fiber = yield* Effect.forkChild(outcome(lost(mine)))
            if (first === true && verb !== "rendezvous.exchange") {
              yield* eventually(Effect.map(theirs.present, (it) =>
                it.takers + it.exchangers === 1))
              yield* run
            }
            yield* asked.request
            yield* (executed ? line.dropReplies : line.blackhole)
            yield* asked.release(executed ? "pass" : "blackhole")
            if (first === true && verb === "rendezvous.exchange") {
              yield* run
            }
            yield* eventually(
              on(
                context,
                Effect.flatMap(Coordinator.Coordinator, (it) => it.sessions)
              ).pipe(
                Effect.map((sessions) => sessions.every(({ state }) => state !== "open" && state !== "suspended"))
              )
            )
            yield* line.pass
            yield* line.closeAll
            yield* Effect.provideContext(Lock.withLock(Effect.void, "session"), context)
            return yield* Effect.forEach([fiber, ...waiting], (fiber) => Effect.timeout(Fiber.join(fiber), "6 seconds"))
          })).pipe(Effect.catchCause((cause) => Effect.die(new Error(`${verb}, ${executed}`, { cause }))))
          assert.strictEqual(results.join(" | "), expected, `${verb}, ${executed}`)
          yield* assertEmpty(server, namespace)
        }), { concurrency: "unbounded", discard: true })
    }))

  it.effect("hands over once and exchanges pairwise, whichever party gives up, is closed or loses its session", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const who = fc.nat(2)
      const pause = fc.nat(3)
      const step = fc.oneof(
        {
          weight: 12,
          arbitrary: fc.record({
            op: fc.constantFrom("give", "take", "try", "fail", "exchange", "exchange"),
            who,
            pause
          })
        },
        { weight: 3, arbitrary: fc.record({ op: fc.constant("interrupt"), who, pause, pick: fc.nat(30) }) },
        { weight: 1, arbitrary: fc.record({ op: fc.constantFrom("lose", "close"), who, pause }) }
      ) as fc.Arbitrary<{ op: string; who: number; pause: number; pick: number }>
      yield* Effect.promise(() =>
        fc.assert(
          fc.asyncProperty(fc.array(step, { maxLength: 40, size: "max" }), (steps) =>
            Effect.runPromise(Effect.gen(function*() {
              const namespace = freshNamespace()
              const asked: Array<{
                readonly op: string
                readonly value: string
                readonly fiber: Fiber.Fiber<unknown, unknown>
                seen: string | undefined
              }> = []
              yield* Effect.scoped(Effect.gen(function*() {
                const open = Effect.gen(function*() {
                  const scope = yield* Scope.make()
                  yield* Effect.addFinalizer(() =>
                    Scope.close(scope, Exit.void)
                  )
                  const settings = { namespace, partitions: 1, lease: "3 seconds", margin: "100 millis" } as const
                  const context = yield* Scope.provide(node(server.url, settings), scope)
                  const place = yield* on(
                    context,
                    Rendezvous.make({ name: "model", schema: Schema.String, timeToLive: "1 second" })
                  )
                  return { context, place, close: Scope.close(scope, Exit.void) }
                })
                const parties = [yield* open, yield* open, yield* open]
                for (const [n, { op, pause, pick, who }] of steps.entries()) {
                  const { close, context, place } = parties[who]!
                  const value = `${n}`
                  const one = { op, value, seen: undefined as string | undefined }
                  const see = (end: Effect.Effect<void, string>) => (value: string) => {
                    one.seen = value
                    return end
                  }
                  const program = op === "give"
                    ? place.give(value)
                    : op === "take"
                    ? place.take()
                    : op === "try"
                    ? Effect.andThen(place.takeWith(see(realSleep(1))), Effect.sync(() => one.seen))
                    : op === "fail"
                    ? place.takeWith(see(Effect.fail("failed")))
                    : op === "exchange"
                    ? place.exchange(value)
                    : undefined
                  if (program !== undefined) {
                    asked.push(Object.assign(one, { fiber: yield* Effect.forkDetach(program) }))
                  } else if (op === "interrupt") {
                    const picked = asked[pick % Math.max(1, asked.length)]
                    if (picked !== undefined) yield* Effect.forkChild(Fiber.interrupt(picked.fiber))
                  } else if (op === "close") {
                    yield* close
                    parties[who] = yield* open
                  } else {
                    yield* forgetSession(context, namespace, server)
                    yield* Effect.forkChild(Effect.provideContext(Lock.withLock(Effect.void, "session"), context))
                  }
                  if (pause > 0) yield* realSleep(pause - 1)
                }
                // Givers and takers that are left meet each other.
                yield* eventually(
                  Effect.map(parties[0]!.place.present, ({ exchangers, givers, takers }) => {
                    const waiting = asked.filter(({ fiber }) => isPending(fiber)).length
                    return Math.min(givers, takers) === 0 && givers + takers + exchangers === waiting
                  }),
                  { message: "those who are left wait" }
                )
                for (const { fiber } of asked) yield* Fiber.interrupt(fiber)
              }))
              const exits = yield* Effect.forEach(
                asked,
                ({ fiber, ...rest }) => Effect.map(Fiber.await(fiber), (exit) => ({ ...rest, exit }))
              )
              const takes = exits.filter(({ op }) => op === "take" || op === "try" || op === "fail")
              // A taker that received no reply may have acknowledged.
              const certain = takes.every(({ exit, op }) => Exit.isSuccess(exit) || op === "fail")
              for (const { exit, op, value } of exits) {
                if (op === "give") {
                  const taken = takes.filter(({ exit }) => Exit.isSuccess(exit) && exit.value === value).length
                  assert.isAtMost(taken, 1)
                  if (Exit.isSuccess(exit) && certain) assert.strictEqual(taken, 1)
                }
                if (op === "exchange" && Exit.isSuccess(exit)) {
                  const other = exits.find((one) => one.op === "exchange" && one.value === exit.value)!
                  if (Exit.isSuccess(other.exit)) assert.strictEqual(other.exit.value, value)
                  const same = exits.filter((one) =>
                    one.op === "exchange" && Exit.isSuccess(one.exit) && one.exit.value === exit.value
                  )
                  assert.lengthOf(same, 1)
                }
              }
              yield* assertEmpty(server, namespace)
            }))),
          { numRuns: runs(15), endOnFailure: true }
        )
      )
    }))
})
