/** A queue over several OS processes: killed, paused and stopped at work, and killed while they offer. */
import { assert, layer } from "@effect/vitest"
import { Effect, Schema, type Scope } from "effect"
import { Queue } from "../src/index.ts"
import { spawn } from "../src/testing/Process.ts"
import type { Argument, Event } from "./programs/worker.ts"
import { awake, elapsed } from "./support/awake.ts"
import { effort } from "./support/effort.ts"
import { eventually } from "./support/eventually.ts"
import { assertEmpty, freshNamespace, node, sturdy, TestServer } from "./support/live.ts"
import { deadForgotten, on } from "./support/several.ts"

const lease = 2000
const timing = { lease: `${lease} millis`, margin: "400 millis" } as const

// So long processes are killed and paused at random, in milliseconds.
const killing = 60_000 * effort

type Work = Extract<Event, { readonly token: number }>
type Process = Effect.Success<ReturnType<typeof spawn<Event>>>
type Start = (
  options: Pick<Argument, "millis" | "offers" | "from" | "fails" | "groups" | "pause" | "schedule" | "worker">
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
      const here = yield* node(server.url, { namespace, ...sturdy })
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

  it.effect(
    "loses no job while workers and producers are killed, paused and stopped at random",
    () =>
      scenario((queue, start) =>
        Effect.gen(function*() {
          const [groups, fails, apart] = [7, 10, 1_000_000]
          const seed = Math.floor(Math.random() * 2 ** 31)
          let state = seed
          const random = (below: number) => {
            state = (Math.imul(state, 1_103_515_245) + 12_345) & 0x7fffffff
            return Math.floor(state / 0x7fffffff * below) % below
          }
          const all = [...yield* workers(queue, start, 3, 10, fails)]
          const working = [...all]
          const producers: Array<Array<Process>> = [[], []]
          const offered = (at: number) =>
            producers[at]!.flatMap(({ received }) =>
              received.flatMap((event) => event.event === "offered" ? [event.value] : [])
            )
          // It goes on behind the last offer that was confirmed. The one behind that may be stored: it has the same id.
          const produce = (at: number) =>
            Effect.gen(function*() {
              const from = Math.max(at * apart, 1 + Math.max(-1, ...offered(at)))
              const next = yield* start({ offers: apart, from, pause: 15, groups: [groups, `of ${at}`] })
              producers[at]!.push(next)
            })
          yield* Effect.forEach([0, 1], produce, { discard: true })
          const replace = (at: number, isWorker: boolean) =>
            isWorker
              ? Effect.map(start({ millis: 10, fails }), (next) => {
                all.push(next)
                working[at] = next
              })
              : produce(at)
          const round = Effect.gen(function*() {
            const isWorker = random(3) > 0
            const at = isWorker ? random(working.length) : random(2)
            const victim = isWorker ? working[at]! : producers[at]!.at(-1)!
            const seen = victim.received.length
            yield* eventually(Effect.sync(() => assert.isAbove(victim.received.length, seen + 5)), {
              timeout: "30 seconds",
              message: "it works"
            })
            const how = random(3)
            if (how === 0) yield* victim.kill9
            if (how === 1) yield* victim.signal("SIGTERM")
            if (how < 2) return yield* replace(at, isWorker)
            yield* victim.sigstop
            // Also for so long that its session has ended, perhaps in the middle of an offer.
            yield* awake(`${100 + random(lease + 500)} millis`)
            yield* victim.sigcont
          })
          yield* Effect.gen(function*() {
            for (const began = Date.now(); Date.now() < began + killing;) yield* round
            yield* Effect.forEach(producers, (some) => some.at(-1)!.signal("SIGTERM"))
            yield* Effect.forEach(producers.flat(), (one) => one.exit)
            const confirmed = [...offered(0), ...offered(1)]
            yield* eventually(
              Effect.gen(function*() {
                const done = new Set(work(all).flatMap(({ event, value }) => event === "done" ? [value] : []))
                assert.deepStrictEqual(confirmed.filter((value) => !done.has(value)), [])
                const { active, delayed, waiting } = yield* queue.state
                assert.deepStrictEqual([active, delayed, waiting], [0, 0, 0])
              }),
              { timeout: "30 seconds" }
            )
            const jobs = byJob(work(all))
            for (const [value, events] of jobs) {
              const begins = events.filter(({ event }) => event === "begun")
              let before = { failures: 0, crashes: 0 }
              for (const begin of begins) {
                // The first attempt, and one more for each failure and each crash. A job that was returned is no attempt.
                const failures = begin.attempt - 1 - begin.crashes
                const failed = events.some(({ event, token }) => event === "failed" && token < begin.token)
                assert.include(failed ? [0, 1] : [0], failures, `job ${value}: ${JSON.stringify(begins)}`)
                assert.isAtLeast(failures, before.failures, `job ${value}`)
                assert.isAtLeast(begin.crashes, before.crashes, `job ${value}`)
                before = { failures, crashes: begin.crashes }
              }
              assert.strictEqual(new Set(begins.map(({ token }) => token)).size, begins.length, `job ${value}`)
              // A process that has lost a job does nothing more of it: it is in one place at a time.
              for (const { at, token } of events.filter(({ event }) => event === "done" || event === "failed")) {
                const next = begins.find((other) => other.token > token)
                assert.isAtMost(at, next?.at ?? at, `job ${value} went on while another process had it`)
              }
            }
            // The jobs of a group begin one behind the other.
            for (
              const [at, group] of [0, 1].flatMap((at) => Array.from({ length: groups }, (_, group) => [at, group]))
            ) {
              const values = [...jobs.keys()].filter((value) =>
                value % 2 === 1 && value % groups === group && Math.floor(value / apart) === at
              ).toSorted((x, y) => x - y)
              let over = 0
              for (const value of values) {
                const events = jobs.get(value)!
                for (const begin of events) {
                  if (begin.event === "begun") {
                    assert.isAtLeast(begin.at, over, `job ${value} began before the one before it was over`)
                  }
                }
                over = Math.max(
                  over,
                  events.findLast(({ event }) => event === "done")?.at ?? 0
                )
              }
            }
          }).pipe(Effect.tapCause((cause) => Effect.logError(`seed ${seed}`, cause)))
          yield* Effect.forEach(all, (one) => one.signal("SIGKILL"))
          yield* Effect.forEach(all, (one) => one.exit)
        })
      ),
    120_000 + killing
  )
})
