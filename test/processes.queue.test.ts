/** A queue over several OS processes: killed, paused and stopped at work, and killed while they offer. */
import { assert, layer } from "@effect/vitest"
import { Effect, Schema, type Scope } from "effect"
import { Queue } from "../src/index.ts"
import { spawn } from "../src/testing/Process.ts"
import type { Argument, Event } from "./programs/worker.ts"
import { awake, elapsed } from "./support/awake.ts"
import { eventually } from "./support/eventually.ts"
import { assertEmpty, freshNamespace, node, TestServer } from "./support/live.ts"
import { deadForgotten, on } from "./support/several.ts"

const lease = 1500
const timing = { lease: `${lease} millis`, margin: "400 millis" } as const

type Work = Extract<Event, { readonly token: number }>
type Process = Effect.Success<ReturnType<typeof spawn<Event>>>
type Start = (
  options: Pick<Argument, "millis" | "offers" | "from" | "fails" | "schedule" | "worker">
) => Effect.Effect<Process, never, Scope.Scope>

const work = (processes: ReadonlyArray<Process>): ReadonlyArray<Work> =>
  processes.flatMap(({ received }) => received.filter((event): event is Work => "token" in event))

/** By job, in the order in which its attempts were granted. */
const byJob = (events: ReadonlyArray<Work>) => {
  const jobs = new Map<number, Array<Work>>()
  for (const event of events) jobs.set(event.value, [...jobs.get(event.value) ?? [], event])
  for (const [value, found] of jobs) jobs.set(value, found.toSorted((x, y) => x.token - y.token || x.at - y.at))
  return jobs
}

const scenario = <A, E, R>(
  self: (queue: Queue.Queue<number>, start: Start) => Effect.Effect<A, E, R>
) =>
  Effect.gen(function*() {
    const server = yield* TestServer
    const namespace = freshNamespace()
    yield* Effect.scoped(Effect.gen(function*() {
      const here = yield* node(server.url, { namespace, ...timing })
      yield* Effect.scoped(Effect.gen(function*() {
        const queue = yield* on(
          here,
          Queue.make({ name: "shared", payload: Schema.Number, retention: "10 seconds", letters: { crashes: 1000 } })
        )
        yield* self(queue, (options) =>
          spawn<Event>(new URL("./programs/worker.ts", import.meta.url), {
            argument: { url: server.url, namespace, ...timing, ...options } satisfies Argument
          }))
        assert.deepStrictEqual(
          yield* Effect.map(queue.state, ({ active, dead, delayed, waiting }) => ({ active, dead, delayed, waiting })),
          { active: 0, dead: 0, delayed: 0, waiting: 0 }
        )
      }))
      yield* deadForgotten(here, namespace, server)
    }))
    // Ids are known for their window.
    yield* server.cli(
      "EVAL",
      "for _, key in ipairs(redis.call('KEYS', ARGV[1])) do redis.call('DEL', key) end",
      0,
      `{${namespace}:*}:queue*`
    )
    yield* assertEmpty(server, namespace)
  })

const workers = (queue: Queue.Queue<number>, start: Start, count: number, millis: number, fails?: number) =>
  Effect.gen(function*() {
    const options = fails === undefined ? { millis } : { millis, fails }
    const started = yield* Effect.all(Array.from({ length: count }, () => start(options)), {
      concurrency: "unbounded"
    })
    yield* Effect.forEach(started, (one) => one.waitFor(({ event }) => event === "ready"))
    yield* eventually(Effect.map(queue.state, (state) => assert.strictEqual(state.workers, count)))
    return started
  })

const begun = ({ event }: Event) => event === "begun"

layer(TestServer.layer, { excludeTestServices: true, timeout: "60 seconds" })("a queue of processes", (it) => {
  it.effect("gives the jobs of a killed process to others when its lease ends, and counts that", () =>
    scenario((queue, start) =>
      Effect.gen(function*() {
        const all = yield* workers(queue, start, 3, 20)
        const killed = all[0]!
        const count = 500
        yield* queue.offerAll(Array.from({ length: count }, (_, n) => n))
        yield* killed.waitFor(begun)
        yield* killed.kill9
        const killedAt = Date.now()
        yield* killed.exit
        yield* eventually(Effect.map(queue.state, ({ completed }) => assert.isAtLeast(completed, count)), {
          timeout: "20 seconds"
        })
        const jobs = byJob(work(all))
        assert.strictEqual(jobs.size, count)
        const again = [...jobs.values()].filter((events) => events.some(({ crashes }) => crashes > 0))
        assert.isAbove(again.length, 0)
        for (const events of jobs.values()) {
          const attempts = events.filter(({ event }) => event === "begun").map((
            { attempt, crashes }
          ) => [attempt, crashes])
          assert.include(
            [JSON.stringify([[1, 0]]), JSON.stringify([[1, 0], [2, 1]]), JSON.stringify([[2, 1]])],
            JSON.stringify(attempts)
          )
        }
        const first = Math.min(...again.map((events) => events.find(({ crashes }) => crashes > 0)!.at))
        assert.isAtMost(elapsed(killedAt, first), lease + 1000)
        yield* Effect.forEach(all.slice(1), (one) => one.signal("SIGKILL"))
        yield* Effect.forEach(all, (one) => one.exit)
      })
    ))

  it.effect("has the deques of killed processes run by others, and no job is lost or done twice", () =>
    scenario((queue, start) =>
      Effect.gen(function*() {
        const thieves = yield* Effect.forEach(["b", "c", "d"], (worker) => start({ millis: 10, worker }))
        yield* Effect.forEach(thieves, (one) => one.waitFor(({ event }) => event === "ready"))
        yield* eventually(Effect.map(queue.state, ({ workers }) => assert.strictEqual(workers, 3)))
        const count = 1200
        const owner = yield* start({ millis: 10, worker: "a", offers: count })
        const all = [owner, ...thieves]
        yield* owner.waitFor(({ event }) => event === "ready")
        yield* Effect.forEach(thieves, (one) => one.waitFor(begun))
        // Both have jobs in their deques.
        yield* Effect.forEach([owner, thieves[0]!], (one) => one.kill9)
        yield* eventually(Effect.map(queue.state, ({ completed }) => assert.isAtLeast(completed, count)), {
          timeout: "30 seconds"
        })
        const jobs = byJob(work(all))
        assert.strictEqual(jobs.size, count)
        assert.isTrue([...jobs.values()].some((events) => events.some(({ crashes }) => crashes > 0)))
        for (const events of jobs.values()) {
          // One that was done may have been given again, if its process was killed before it could say so.
          const crashes = Math.max(...events.map(({ crashes }) => crashes))
          assert.isAtMost(events.filter(({ event }) => event === "begun").length, 1 + crashes)
          assert.isAtLeast(events.filter(({ event }) => event === "done").length, 1)
        }
        yield* Effect.forEach(thieves.slice(1), (one) => one.signal("SIGKILL"))
        yield* Effect.forEach(all, (one) => one.exit)
      })
    ))

  it.effect("offers each tick of a schedule once while processes are killed, as long as one lives", () =>
    scenario((queue, start) =>
      Effect.gen(function*() {
        const started = yield* Effect.forEach([0, 1, 2, 3], () => start({ millis: 0, schedule: 100 }))
        const ticks = () =>
          work(started).flatMap(({ attempt, event, tick }) => event === "begun" && attempt === 1 ? [tick!] : [])
        yield* Effect.forEach(started, (one) => one.waitFor(begun))
        for (const one of started.slice(0, 3)) {
          const before = ticks().length
          yield* one.kill9
          yield* eventually(Effect.sync(() => assert.isAtLeast(ticks().length, before + 10)), { timeout: "20 seconds" })
        }
        assert.isTrue(yield* queue.unschedule("often"))
        yield* eventually(Effect.map(queue.state, ({ active, waiting }) => assert.strictEqual(active + waiting, 0)))
        yield* started[3]!.kill9
        yield* Effect.forEach(started, (one) => one.exit)
        const times = ticks().toSorted((x, y) => x - y)
        assert.strictEqual(new Set(times).size, times.length, "a tick came twice")
        assert.isTrue(times.every((tick) => (tick - times[0]!) % 100 === 0))
      })
    ))

  it.effect("interrupts the jobs of a paused process before it does more, and no job runs in two places", () =>
    scenario((queue, start) =>
      Effect.gen(function*() {
        const all = yield* workers(queue, start, 3, 300)
        const paused = all[0]!
        const count = 60
        yield* queue.offerAll(Array.from({ length: count }, (_, n) => n))
        yield* paused.waitFor(begun)
        yield* paused.sigstop
        const others = all.slice(1)
        yield* eventually(Effect.sync(() => assert.isTrue(work(others).some(({ crashes }) => crashes > 0))))
        yield* paused.sigcont
        yield* paused.waitFor(({ event }) => event === "interrupted")
        yield* eventually(Effect.map(queue.state, ({ completed }) => assert.isAtLeast(completed, count)), {
          timeout: "20 seconds"
        })
        for (const [value, events] of byJob(work(all))) {
          const dones = events.filter(({ event }) => event === "done")
          assert.strictEqual(dones.length, 1, `job ${value} was done ${dones.length} times`)
          // With the token of the last attempt.
          assert.strictEqual(dones[0]!.token, Math.max(...events.map(({ token }) => token)))
        }
        yield* Effect.forEach(all, (one) => one.signal("SIGTERM"))
        yield* Effect.forEach(all, (one) => one.exit)
      })
    ))

  it.effect("gets jobs back at once from a process that stops, which is no attempt", () =>
    scenario((queue, start) =>
      Effect.gen(function*() {
        const all = yield* workers(queue, start, 2, 300)
        const count = 40
        yield* queue.offerAll(Array.from({ length: count }, (_, n) => n))
        yield* all[0]!.waitFor(begun)
        yield* all[0]!.signal("SIGTERM")
        assert.strictEqual((yield* all[0]!.exit).code, 0)
        yield* eventually(Effect.map(queue.state, ({ completed }) => assert.strictEqual(completed, count)))
        const jobs = byJob(work(all))
        assert.isTrue([...jobs.values()].some((events) => events.some(({ event }) => event === "interrupted")))
        for (const events of jobs.values()) for (const { attempt } of events) assert.strictEqual(attempt, 1)
        yield* all[1]!.signal("SIGTERM")
        yield* all[1]!.exit
      })
    ))

  it.effect("keeps the order of each group while workers are killed, paused and stopped at random", () =>
    scenario((queue, start) =>
      Effect.gen(function*() {
        const [each, groups] = [600, 20]
        let count = 0
        const all = [...yield* workers(queue, start, 3, 4, 17)]
        const alive = [...all]
        for (const how of ["kill9", "sigstop", "stop", "kill9"] as const) {
          const victim = alive.shift()!
          yield* queue.offerAll(Array.from({ length: each }, () => count++), (n) => ({ group: `group ${n % groups}` }))
          const seen = victim.received.length
          yield* eventually(
            Effect.sync(() => assert.isAbove(victim.received.length, seen)),
            { message: "it works" }
          )
          if (how === "sigstop") {
            yield* victim.sigstop
            const before = work(alive).length
            yield* eventually(Effect.sync(() => assert.isAbove(work(alive).length, before + 30)))
            yield* victim.sigcont
            alive.push(victim)
          } else {
            yield* how === "kill9" ? victim.kill9 : victim.signal("SIGTERM")
            const next = yield* start({ millis: 4, fails: 17 })
            all.push(next)
            yield* next.waitFor(({ event }) => event === "ready")
            alive.push(next)
          }
        }
        yield* eventually(Effect.map(queue.state, ({ completed }) => assert.strictEqual(completed, count)), {
          timeout: "30 seconds"
        })
        const jobs = byJob(work(all))
        for (let group = 0; group < groups; group++) {
          let over = 0
          for (let value = group; value < count; value += groups) {
            const events = jobs.get(value) ?? []
            // What a killed process has said last may be lost. Else a job begins when the one before it is over.
            for (const { at, event } of events) if (event === "begun") assert.isAtLeast(at, over, `job ${value}`)
            const last = events.findLast(({ event }) => event === "done")
            over = Math.max(over, last?.at ?? 0)
            const tokens = events.map(({ token }) => token)
            const next = (jobs.get(value + groups) ?? []).map(({ token }) => token)
            assert.isBelow(Math.max(0, ...tokens), Math.min(Number.POSITIVE_INFINITY, ...next), `job ${value}`)
          }
        }
        yield* Effect.forEach(all, (one) => one.signal("SIGKILL"))
        yield* Effect.forEach(all, (one) => one.exit)
      })
    ))

  it.effect("loses no job while workers and producers are killed and paused at random", () =>
    scenario((queue, start) =>
      Effect.gen(function*() {
        const each = 1500
        const producers = yield* Effect.all(
          [0, 1].map((at) => start({ offers: each, from: at * each })),
          { concurrency: "unbounded" }
        )
        const all = [...yield* workers(queue, start, 3, 10)]
        const alive = [...all]
        const seed = Math.floor(Math.random() * 2 ** 31)
        let state = seed
        const random = (below: number) => {
          state = (Math.imul(state, 1_103_515_245) + 12_345) & 0x7fffffff
          return Math.floor(state / 0x7fffffff * below) % below
        }
        yield* Effect.gen(function*() {
          for (let round = 0; round < 4; round++) {
            const at = random(alive.length)
            const victim = alive[at]!
            const seen = victim.received.length
            yield* eventually(
              Effect.sync(() => assert.isAbove(victim.received.length, seen)),
              { message: "it works" }
            )
            if (random(2) === 0) {
              yield* victim.kill9
              const next = yield* start({ millis: 10 })
              all.push(next)
              alive[at] = next
            } else {
              yield* victim.sigstop
              const others = alive.filter((one) => one !== victim)
              const before = work(others).length
              yield* eventually(Effect.sync(() => assert.isAbove(work(others).length, before + 30)))
              yield* victim.sigcont
            }
            if (round === 1) yield* producers[0]!.kill9
            if (round === 0) {
              // For so long that its session has ended, perhaps in the middle of an offer.
              yield* producers[1]!.sigstop
              yield* awake(`${lease + 500} millis`)
              yield* producers[1]!.sigcont
            }
          }
          // What a producer was confirmed, and what may have been stored before it was killed.
          const offered = producers.flatMap(({ received }) =>
            received.flatMap((event) => event.event === "offered" ? [event.value] : [])
          )
          yield* producers[1]!.waitFor((event) => event.event === "offered" && event.value === 2 * each - 1)
          yield* eventually(
            Effect.gen(function*() {
              const done = new Set(work(all).flatMap(({ event, value }) => event === "done" ? [value] : []))
              for (const value of offered) assert.isTrue(done.has(value), `job ${value}`)
              for (let value = each; value < 2 * each; value++) assert.isTrue(done.has(value), `job ${value}`)
              const { active, delayed, waiting } = yield* queue.state
              assert.deepStrictEqual([active, delayed, waiting], [0, 0, 0])
            }),
            { timeout: "30 seconds" }
          )
          for (const [value, events] of byJob(work(all))) {
            // No attempt begins before the one before it is over or lost, and none is counted twice.
            const attempts = events.filter(({ event }) => event === "begun").map(({ attempt }) => attempt)
            assert.deepStrictEqual(attempts, attempts.toSorted((x, y) => x - y), `job ${value}`)
            assert.strictEqual(new Set(attempts).size, attempts.length, `job ${value}: ${attempts}`)
            // A process that has lost a job does nothing more of it: it is in one place at a time.
            const begins = events.filter(({ event }) => event === "begun")
            for (const { at, token } of events.filter(({ event }) => event === "done")) {
              const next = begins.find((other) => other.token > token)
              assert.isAtMost(at, next?.at ?? at, `job ${value} was done while another process had it`)
            }
          }
        }).pipe(Effect.tapCause((cause) => Effect.logError(`seed ${seed}`, cause)))
        yield* Effect.forEach([...all, ...producers], (one) => one.signal("SIGKILL"))
        yield* Effect.forEach([...all, ...producers], (one) => one.exit)
      })
    ))
})
