/** Leaderships that a process keeps when a term has ended. */
import { assert, layer } from "@effect/vitest"
import { Context, Deferred, Effect, Fiber, Option, Schema, Stream } from "effect"
import { Coordinator, Election, Lease } from "../src/index.ts"
import { placeOf, spaceOf } from "../src/internal/hold/place.ts"
import { actor, client } from "./support/actor.ts"
import { eventually } from "./support/eventually.ts"
import { freshNamespace, type Node, onNode, TestServer } from "./support/live.ts"
import { fields, within } from "./support/requests.ts"
import { several } from "./support/several.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

type Chief = Election.Election<string>

const term = Effect.map(Lease.current, (lease) => Option.getOrThrow(lease).token)

const lead = (election: Chief): Effect.Effect<number, Election.ElectionError> => election.lead(term, { cached: true })

const join = (context: Node, value: string) =>
  onNode(context)(Election.make({ name: "chief", schema: Schema.String, value }))

const keptOf = (context: Node) =>
  placeOf(spaceOf(Context.get(context, Coordinator.Coordinator)), "election", "chief", "name").tenancy.kept

/** Leads until the process keeps the leadership. Answers the last term. */
const keeping = (context: Node, election: Chief) =>
  Effect.repeat(lead(election), { until: () => keptOf(context).size > 0 })

const callsOf = (text: string) => Number(/cmdstat_fcall:calls=(\d+)/.exec(text)?.[1] ?? 0)

const valueOf = (election: Chief) => Effect.map(election.leader, (leader) => Option.getOrUndefined(leader)?.value)

layer(TestServer.layer, live)("a leadership that is cached", (it) => {
  it.effect("is taken again without asking Redis, in larger and larger terms, by one leader to the others", () =>
    several(2, ([one, two], _, server) =>
      Effect.gen(function*() {
        const [election, other] = [yield* join(one!, "one"), yield* join(two!, "two")]
        yield* keeping(one!, election)
        const seen: Array<string | undefined> = []
        const first = yield* Deferred.make<void>()
        yield* Effect.forkScoped(Stream.runForEach(other.changes, (leader) => {
          seen.push(Option.getOrUndefined(leader)?.value)
          return Deferred.succeed(first, undefined)
        }))
        yield* Deferred.await(first)
        yield* keeping(one!, election)
        yield* server.cli("CONFIG", "RESETSTAT")
        const terms = yield* Effect.forEach(Array.from({ length: 2000 }), () => lead(election))
        assert.deepStrictEqual(terms, [...new Set(terms)].sort((a, b) => a - b))
        assert.isBelow(callsOf(yield* server.cli("INFO", "commandstats")), 200)
        assert.isFalse(yield* election.isLeader)
        yield* eventually(Effect.map(valueOf(other), (value) => value === undefined))
        // Far fewer than the terms.
        yield* eventually(Effect.sync(() => assert.isUndefined(seen.at(-1))))
        assert.isBelow(seen.length, 100)
      })))

  it.effect("passes to another candidate at once, in a larger term", () =>
    several(2, ([one, two]) =>
      Effect.gen(function*() {
        const [election, other] = [yield* join(one!, "one"), yield* join(two!, "two")]
        const recalled = Effect.gen(function*() {
          const last = yield* keeping(one!, election)
          const { result } = yield* within(other.lead(term), 1000, "the term")
          assert.isAbove(result, last)
          assert.strictEqual(keptOf(one!).size, 0)
          // Others are to have it for a while.
          yield* lead(election)
          yield* lead(election)
          return keptOf(one!).size === 0
        })
        // On a busy machine the first process may have resigned before it was asked to, and keeps it again then.
        assert.isTrue(yield* Effect.repeat(recalled, { until: (spares) => spares, times: 10 }))
      })))

  it.effect("passes to another candidate at the end of the term that has begun", () =>
    several(2, ([one, two], namespace, server) =>
      Effect.gen(function*() {
        const [election, other] = [yield* join(one!, "one"), yield* join(two!, "two")]
        yield* keeping(one!, election)
        const [inside, leave] = [yield* Deferred.make<void>(), yield* Deferred.make<void>()]
        const leads = yield* Effect.forkChild(
          election.lead(Effect.andThen(Deferred.succeed(inside, undefined), Deferred.await(leave)), { cached: true })
        )
        yield* Deferred.await(inside)
        const waiting = yield* Effect.forkChild(other.lead(valueOf(other)))
        yield* eventually(Effect.map(fields(server, namespace, "election:chief", "q"), (count) => count === 1))
        assert.strictEqual(yield* valueOf(other), "one")
        yield* Deferred.succeed(leave, undefined)
        assert.strictEqual((yield* within(Fiber.join(waiting), 1000, "the term")).result, "two")
        yield* Fiber.join(leads)
      })))

  it.effect("passes to another fiber that waits before the one that keeps it leads again", () =>
    several(1, ([one]) =>
      Effect.gen(function*() {
        const election = yield* join(one!, "one")
        yield* keeping(one!, election)
        const order: Array<string> = []
        const enter = (who: string) => election.lead(Effect.sync(() => order.push(who)), { cached: true })
        const inside = yield* Deferred.make<void>()
        const other = yield* Effect.forkChild(Effect.andThen(Deferred.await(inside), enter("other")), {
          startImmediately: true
        })
        yield* election.lead(Effect.andThen(Deferred.succeed(inside, undefined), Effect.yieldNow), { cached: true })
        yield* Effect.forEach([1, 2, 3], () => enter("first"))
        yield* Fiber.join(other)
        assert.deepStrictEqual(order, ["other", "first", "first", "first"])
      })))

  it.effect("keeps no value of a term but the one of its object", () =>
    several(1, ([one]) =>
      Effect.gen(function*() {
        const [election, other] = [yield* join(one!, "one"), yield* join(one!, "other")]
        const last = yield* keeping(one!, election)
        yield* election.lead(election.proclaim("proclaimed"), { cached: true })
        assert.strictEqual(yield* election.lead(valueOf(election), { cached: true }), "one")
        yield* keeping(one!, election)
        // Of the same process, with another value.
        assert.strictEqual(yield* other.lead(valueOf(other), { cached: true }), "other")
        assert.isAbove(yield* lead(election), last)
      })))

  it.effect("ends between two terms when its object resigns or is closed", () =>
    several(2, ([one, two]) =>
      Effect.gen(function*() {
        const other = yield* join(two!, "two")
        const election = yield* join(one!, "one")
        yield* keeping(one!, election)
        yield* election.resign
        assert.strictEqual(keptOf(one!).size, 0)
        assert.isUndefined(yield* valueOf(other))
        yield* Effect.scoped(Effect.flatMap(join(one!, "one"), (closed) => keeping(one!, closed)))
        assert.strictEqual(keptOf(one!).size, 0)
        assert.isUndefined(yield* valueOf(other))
      })))

  it.effect("ends when its object resigns, when no fiber leads, and when its coordinator is closed", () =>
    several(2, ([one, two], namespace, server) =>
      Effect.gen(function*() {
        const [election, other] = [yield* join(one!, "one"), yield* join(two!, "two")]
        yield* keeping(one!, election)
        const inside = yield* Deferred.make<void>()
        const leads = yield* Effect.forkChild(
          Effect.exit(
            election.campaign({ cached: true }).pipe(
              Effect.flatMap((lease) => Effect.andThen(Deferred.succeed(inside, undefined), Effect.exit(lease.lost))),
              Effect.scoped
            )
          )
        )
        yield* Deferred.await(inside)
        yield* election.resign
        yield* Fiber.join(leads)
        assert.strictEqual(keptOf(one!).size, 0)
        assert.isUndefined(yield* valueOf(other))
        yield* keeping(one!, election)
        yield* eventually(Effect.map(fields(server, namespace, "election:chief", "h"), (count) => count === 0))
        assert.strictEqual(keptOf(one!).size, 0)
        yield* keeping(one!, election)
      })))

  it.effect("is recalled once by its actor, and gives no term again", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      const { end, key, mail, open, reap, send, sendAll } = actor(redis, freshNamespace(), "election:chief")
      yield* Effect.promise(async () => {
        for (const session of ["a", "b", "c"]) await open(session)
        await send("a", "election.campaign", ["0", "1", ""])
        // In one call.
        const [, [tag, first, tokens]] = await sendAll("a", [
          ["session.leave", ["0"]],
          ["election.campaign", ["1", "1", "k"]]
        ]) as [unknown, [string, string, number]]
        assert.strictEqual(tag, "kept")
        assert.strictEqual((await send("a", "election.state", []))[2], first)
        assert.deepStrictEqual(await send("a", "election.campaign", ["1", "1", "k"]), ["granted", first])
        assert.deepStrictEqual(await send("b", "election.campaign", ["1", "2", ""]), ["queued", 0])
        assert.deepStrictEqual(await send("c", "election.campaign", ["1", "3", "k"]), ["queued", 1])
        assert.deepStrictEqual((await mail("a")).filter(([event]) => event === "recall"), [["recall", "1"]])
        await end("a")
        for (let state = ""; state !== "forgotten";) state = await reap("a")
        const [, , next] = (await mail("b")).find(([event]) => event === "granted")!
        assert.isAtLeast(Number(next), Number(first) + tokens)
        // One that was not asked to keep it is granted as ever.
        await send("b", "session.leave", ["1"])
        assert.isTrue((await mail("c")).some(([event]) => event === "granted"))
        await send("c", "session.leave", ["1"])
        assert.strictEqual(await redis.exists(key), 0)
      })
    }))

  it.effect("is refused where it is no boolean", () =>
    several(1, ([one]) =>
      Effect.gen(function*() {
        const election = yield* join(one!, "one")
        const cached = 1 as never
        for (const make of [election.lead(term, { cached }), Effect.asVoid(election.campaign({ cached }))]) {
          const defect = yield* Effect.flip(Effect.sandbox(Effect.scoped(Effect.asVoid(make))))
          assert.include(String(defect), "cached must be true or false")
        }
      })))
})
