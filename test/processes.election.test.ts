/** Elections and singletons of several OS processes, which are killed and paused. */
import { assert, layer } from "@effect/vitest"
import { Effect, Exit, Option, Schema, Scope, Stream } from "effect"
import { Election } from "../src/index.ts"
import { type Process, spawn } from "../src/testing/Process.ts"
import type { Argument, Event } from "./programs/election.ts"
import { elapsed } from "./support/awake.ts"
import { eventually } from "./support/eventually.ts"
import { assertEmpty, deadlineOf, freshNamespace, node, sturdy, TestServer } from "./support/live.ts"
import type { Server } from "./support/servers.ts"

const settings = { partitions: 1, lease: "2 seconds", margin: "400 millis" } as const

/** They wait for the ends of leases most of the time. */
const concurrent = { concurrent: true }

/** Over 100 ms of that a busy machine is to blame. */
const slack = 500

interface Case {
  readonly server: Server
  readonly namespace: string
  /** Of this process, which is never disturbed. */
  readonly election: Election.Election<string>
  readonly seen: ReadonlyArray<number | undefined>
  readonly start: (mode: Argument["mode"], value?: string) => Effect.Effect<Process<Event>, never, Scope.Scope>
  /** The candidates, and how many are in the hash of the election besides. */
  readonly waiting: (values: ReadonlyArray<string>) => Effect.Effect<void>
  readonly observers: Effect.Effect<number, unknown>
  /** When the lease of the leader ends that it has now. */
  readonly deadline: Effect.Effect<number, unknown>
}

const scenario = <A, E, R>(self: (scenario: Case) => Effect.Effect<A, E, R>) =>
  Effect.gen(function*() {
    const server = yield* TestServer
    const namespace = freshNamespace()
    const key = `{${namespace}:00}:election:chief`
    const start: Case["start"] = (mode, value = "") =>
      spawn<Event>(new URL("./programs/election.ts", import.meta.url), {
        argument: { url: server.url, settings: { ...settings, namespace }, mode, value } satisfies Argument
      })
    yield* Effect.scoped(Effect.gen(function*() {
      const here = yield* node(server.url, { ...settings, ...sturdy, namespace })
      const election = yield* Effect.provideContext(
        Election.make({ name: "chief", schema: Schema.String, value: "here" }),
        here
      )
      const seen: Array<number | undefined> = []
      yield* Effect.forkScoped(
        Stream.runForEach(election.changes, (info) => Effect.sync(() => seen.push(Option.getOrUndefined(info)?.term)))
      )
      yield* eventually(Effect.sync(() => assert.deepStrictEqual(seen, [undefined])))
      const observers = Effect.map(
        server.cli("HKEYS", key),
        (fields) => fields.split("\n").filter((field) => field.startsWith("o")).length
      )
      yield* Effect.scoped(self({
        server,
        namespace,
        election,
        seen,
        start,
        waiting: (values) =>
          eventually(
            Effect.map(election.candidates, (found) => assert.deepStrictEqual(found.map(({ value }) => value), values))
          ),
        observers,
        deadline: Effect.flatMap(
          election.leader,
          (leader) => deadlineOf(server, namespace, Option.getOrThrow(leader).id.split("/")[0]!)
        )
      }))
      // The process that is left cleans up behind the dead.
      yield* eventually(
        Effect.gen(function*() {
          assert.strictEqual(yield* observers, 1)
          assert.deepStrictEqual(yield* election.candidates, [])
          const keys = (yield* server.cli("KEYS", `{${namespace}:*`)).split("\n")
          assert.deepStrictEqual(keys.filter((key) => key.includes(":singleton:")), [])
          assert.strictEqual(keys.filter((key) => key.includes(":mail:")).length, 1)
        }),
        { message: "the dead are forgotten" }
      )
    }))
    yield* assertEmpty(server, namespace)
  })

const is = <T extends Event["event"]>(name: T) => (event: Event): event is Extract<Event, { event: T }> =>
  event.event === name

const saw = (term: number | undefined) => (event: Event): event is Extract<Event, { event: "saw" }> =>
  event.event === "saw" && event.term === term

/** Not before the lease has ended, by Redis's clock, and soon after. */
const inTime = (at: number, deadline: number) => {
  assert.isAtLeast(at, deadline - 5)
  assert.isAtMost(elapsed(deadline, at), slack)
}

layer(TestServer.layer, { excludeTestServices: true, timeout: "60 seconds" })("processes", (it) => {
  it.effect(
    "a leader that is killed is succeeded when its lease has run out, and all see it",
    () =>
      scenario(({ deadline, election, seen, start, waiting }) =>
        Effect.gen(function*() {
          const observer = yield* start("observe")
          yield* observer.waitFor(saw(undefined))
          const leader = yield* start("lead", "a")
          const { term } = yield* leader.waitFor(is("led"))
          const next = yield* start("lead", "b")
          yield* waiting(["b"])
          yield* leader.kill9
          yield* leader.exit
          const end = yield* deadline
          const led = yield* next.waitFor(is("led"))
          assert.isAbove(led.term, term)
          inTime(led.at, end)
          inTime((yield* observer.waitFor(saw(led.term))).at, end)
          // No candidate is left: it is vacant when the lease has ended.
          yield* next.kill9
          yield* next.exit
          const last = yield* deadline
          const vacant = yield* observer.waitFor(saw(undefined), { after: observer.received.length })
          inTime(vacant.at, last)
          assert.isTrue(Option.isNone(yield* election.leader))
          const expected = [undefined, term, led.term, undefined]
          assert.deepStrictEqual(observer.received.filter(is("saw")).map(({ term }) => term), expected)
          yield* eventually(Effect.sync(() => assert.deepStrictEqual(seen, expected)))
        })
      ),
    concurrent
  )

  it.effect(
    "a candidate that is killed is passed over, at once or when its lease has run out",
    () =>
      scenario(({ deadline, election, start, waiting }) =>
        Effect.gen(function*() {
          const scope = yield* Scope.make()
          const { token } = yield* Scope.provide(election.campaign(), scope)
          const dead = yield* start("lead", "b")
          yield* waiting(["b"])
          const next = yield* start("lead", "c")
          yield* waiting(["b", "c"])
          // Redis does not know yet that it is dead, so it leads until its lease has ended.
          yield* dead.kill9
          yield* dead.exit
          yield* Scope.close(scope, Exit.void)
          assert.strictEqual(Option.getOrThrow(yield* election.leader).value, "b")
          const end = yield* deadline
          const led = yield* next.waitFor(is("led"))
          assert.isAbove(led.term, token)
          inTime(led.at, end)
          // And one that is known to be dead is left out.
          const another = yield* start("lead", "d")
          yield* waiting(["d"])
          yield* another.kill9
          yield* waiting([])
          yield* next.kill9
        })
      ),
    concurrent
  )

  it.effect(
    "an observer that is killed is forgotten, and no process waits for it",
    () =>
      scenario(({ election, observers, seen, start }) =>
        Effect.gen(function*() {
          const observer = yield* start("observe")
          yield* observer.waitFor(saw(undefined))
          assert.strictEqual(yield* observers, 2)
          yield* observer.kill9
          yield* observer.exit
          const term = yield* Effect.scoped(Effect.map(election.campaign(), ({ token }) => token))
          yield* eventually(Effect.sync(() => assert.deepStrictEqual(seen, [undefined, term, undefined])))
          yield* eventually(Effect.map(observers, (count) => assert.strictEqual(count, 1)))
        })
      ),
    concurrent
  )

  it.effect(
    "a leader that was paused beyond its lease is interrupted before it does more, and another one leads",
    () =>
      scenario(({ deadline, start, waiting }) =>
        Effect.gen(function*() {
          const leader = yield* start("lead", "a")
          const { term } = yield* leader.waitFor(is("led"))
          const next = yield* start("lead", "b")
          yield* waiting(["b"])
          yield* leader.waitFor(is("tick"))
          yield* leader.sigstop
          const before = leader.received.length
          const end = yield* deadline
          const led = yield* next.waitFor(is("led"))
          inTime(led.at, end)
          const continued = Date.now()
          yield* leader.sigcont
          assert.strictEqual((yield* leader.waitFor(is("interrupted"))).term, term)
          const after = leader.received.slice(before).filter(is("tick")).filter(({ at }) => at >= continued)
          assert.deepStrictEqual(after, [])
          // It is a candidate again.
          yield* waiting(["a"])
          yield* next.kill9
          assert.isAbove((yield* leader.waitFor(is("led"), { after: leader.received.length })).term, led.term)
          yield* leader.kill9
        })
      ),
    concurrent
  )

  it.effect(
    "a tick is not run twice, whether its process is killed or paused in the middle of it",
    () =>
      scenario(({ namespace, server, start }) =>
        Effect.gen(function*() {
          const all = [yield* start("schedule"), yield* start("schedule"), yield* start("schedule")]
          const begun = () => all.flatMap((one) => one.received.filter(is("began")))
          /** The process in the middle of a tick that comes after so many. */
          const runner = (after: number) =>
            eventually(
              Effect.sync(() => {
                assert.isAbove(begun().length, after)
                const last = Math.max(...begun().map(({ at }) => at))
                return all.find((one) => one.received.some((event) => is("began")(event) && event.at === last))!
              }),
              { interval: 5 }
            )
          const killed = yield* runner(0)
          yield* killed.kill9
          yield* killed.exit
          const paused = yield* runner(begun().length)
          assert.notStrictEqual(paused, killed)
          yield* paused.sigstop
          const third = yield* runner(begun().length)
          assert.notStrictEqual(third, paused)
          yield* paused.sigcont
          yield* third.waitFor(is("ended"), { after: third.received.length })
          const dues = begun().map(({ due }) => due)
          assert.strictEqual(new Set(dues).size, dues.length)
          // What was interrupted did not end.
          for (const one of [killed, paused]) {
            assert.deepStrictEqual(
              one.received.filter(is("ended")).map(({ due }) => due),
              one.received.filter(is("began")).slice(0, -1).map(({ due }) => due)
            )
          }
          for (const one of all) yield* one.kill9
          yield* eventually(
            Effect.map(server.cli("EXISTS", `{${namespace}:00}:tick:chief`), (keys) => assert.strictEqual(keys, "0"))
          )
        })
      ),
    concurrent
  )
})
