/** Recurring jobs: one for each tick, over processes, their deaths, pauses and losses. */
import { assert, layer } from "@effect/vitest"
import { Cron, DateTime, Effect, Exit, Fiber, Layer, Option, Schedule, Schema, Stream } from "effect"
import { Queue } from "../src/index.ts"
import { partitionOf } from "../src/internal/actor/keys.ts"
import { decodeTimes, encodeTimes, ticksOf } from "../src/internal/queue/calendar.ts"
import { actor, client } from "./support/actor.ts"
import { eventually, realSleep } from "./support/eventually.ts"
import { TestServer } from "./support/live.ts"
import type { Server } from "./support/servers.ts"
import { lose, missed, on, promptly, several } from "./support/several.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

const hostile = "x\u0000}{:\r\n\"é😀"

const isRangeError = <A, E>(exit: Exit.Exit<A, E>) =>
  assert.isTrue(Exit.isFailure(exit) && String(exit.cause).includes("RangeError"), String(exit))

const make = (name = "jobs") =>
  Effect.tap(
    Queue.make({ name, payload: Schema.Number, retention: "200 millis" }),
    (queue) => Effect.addFinalizer(() => Effect.orDie(queue.obliterate))
  )

const all = <A, S, E>(queue: Queue.Queue<A, S, E>) => Stream.runCollect(queue.schedules)

const millisOf = (time: DateTime.Utc | undefined) => DateTime.toEpochMillis(time!)

// As many partitions as actors that are driven directly say.
const sixteen = { lease: "3 seconds", margin: "500 millis", partitions: 16 } as const

const everySecond = Cron.parseUnsafe("* * * * * *", "UTC")

interface Tick {
  readonly name: string
  readonly tick: number
  readonly payload: number
}

/** A worker that notes the ticks of its jobs. */
const noting = (queue: Queue.Queue<number>, ticks: Array<Tick>) =>
  Effect.forkScoped(queue.run((payload) =>
    Effect.map(Queue.Job, ({ schedule }) => {
      const { name, tick } = Option.getOrThrow(schedule)
      ticks.push({ name, tick: DateTime.toEpochMillis(tick), payload })
    }), { concurrency: 10 }))

/** As if the queue had been left alone: the next ticks of a schedule were so many milliseconds ago. */
const aged = (server: Server, namespace: string, name: string, ticks: ReadonlyArray<number>) =>
  Effect.gen(function*() {
    const key = `{${namespace}:00}:queue-schedules:jobs`
    const former = (yield* server.cli("HGET", key, `t${name}`)).split(" ")
    const past = ticks.map((ago) => Date.now() - ago)
    const state = [former[0], former[1], former[2], past[0]! - 1, former[4], former[5], ...past]
    yield* server.cli("HSET", key, `t${name}`, state.join(" "))
    yield* server.cli("ZADD", `{${namespace}:00}:queue-delayed:jobs`, past[0]!, `@${name}`)
    yield* server.cli("ZADD", `{${namespace}:00}:due`, 0, "@queue:jobs")
    return past
  })

layer(TestServer.layer, live)("a schedule", (it) => {
  it.effect("offers a job at each interval, by whichever process lives, and says which tick it is", () =>
    several(3, (nodes, namespace, server) =>
      Effect.gen(function*() {
        const queues = yield* Effect.forEach(nodes, (context) => on(context, make()))
        const ticks: Array<Tick> = []
        yield* Effect.forEach(queues, (queue) => noting(queue, ticks))
        yield* Effect.forEach(queues, (queue) => queue.schedule(hostile, "100 millis", 7), { concurrency: 3 })
        for (const at of [0, 1, 2]) {
          const before = ticks.length
          yield* lose(nodes[at]!, namespace, server)
          yield* eventually(Effect.sync(() => assert.isAtLeast(ticks.length, before + 5)))
        }
        const times = ticks.map(({ tick }) => tick).toSorted((x, y) => x - y)
        for (const [at, tick] of times.entries()) {
          if (at > 0) assert.isAbove(tick, times[at - 1]!, "a tick came twice")
          assert.strictEqual((tick - times[0]!) % 100, 0)
        }
        assert.isTrue(ticks.every(({ name, payload }) => name === hostile && payload === 7))
        const [found] = yield* all(queues[0]!)
        assert.isAbove(millisOf(found!.next), millisOf(found!.last))
        assert.isTrue(yield* queues[1]!.unschedule(hostile))
        assert.isFalse(yield* queues[0]!.unschedule(hostile))
      })))

  it.effect("goes on by its calendar, which any process can count", () =>
    several(3, (nodes, namespace, server) =>
      Effect.gen(function*() {
        const ticks: Array<Tick> = []
        const worker = yield* on(nodes[1]!, make())
        yield* noting(worker, ticks)
        // The process that sets it leaves.
        yield* Effect.scoped(Effect.gen(function*() {
          const queue = yield* on(nodes[0]!, Queue.make({ name: "jobs", payload: Schema.Number }))
          yield* queue.schedule("each second", everySecond, 1)
          yield* eventually(Effect.map(all(queue), ([one]) => assert.isDefined(one!.next)))
        }))
        yield* eventually(Effect.sync(() => assert.isAtLeast(ticks.length, 2)))
        // Few ticks are left, and the member that gave them is not there any more.
        const key = `{${namespace}:00}:queue-schedules:jobs`
        const state = (yield* server.cli("HGET", key, "teach second")).split(" ")
        yield* server.cli("HSET", key, "teach second", state.slice(0, 8).join(" "))
        const before = ticks.length
        yield* eventually(Effect.sync(() => assert.isAtLeast(ticks.length, before + 3)))
        assert.isAbove((yield* server.cli("HGET", key, "teach second")).split(" ").length, 30)
        const times = ticks.map(({ tick }) => tick)
        for (const [at, tick] of times.entries()) {
          assert.strictEqual(tick % 1000, 0)
          if (at > 0) assert.strictEqual(tick - times[at - 1]!, 1000)
        }
      })))

  it.effect("is given ticks by a member that joins, or that may have missed that it should", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        yield* queue.schedule("daily", Cron.parseUnsafe("0 0 * * *"), 1)
        yield* eventually(Effect.map(all(queue), ([one]) => assert.isDefined(one!.next)))
        const key = `{${namespace}:00}:queue-schedules:jobs`
        const short = Effect.gen(function*() {
          const state = (yield* server.cli("HGET", key, "tdaily")).split(" ")
          yield* server.cli("HSET", key, "tdaily", state.slice(0, 6).join(" "))
          yield* server.cli("ZADD", `{${namespace}:00}:queue-delayed:jobs`, "+inf", "@daily")
          assert.isUndefined((yield* all(queue))[0]!.next)
        })
        const given = promptly(eventually(Effect.map(all(queue), ([one]) => assert.isDefined(one!.next))), "the ticks")
        yield* short
        yield* on(b!, make())
        yield* given
        yield* short
        missed(b!)
        yield* given
        yield* short
        yield* lose(b!, namespace, server)
        yield* given
      })))

  it.effect("is given ticks by another member where one cannot count them", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        const { partitions } = sixteen
        const name = Array.from({ length: 1000 }, (_, at) => `jobs ${at}`).find((name) =>
          partitionOf(name, partitions) === 0
        )!
        const { ask, end, key, mail, open, reap, ring, send } = actor(yield* client(server), namespace, `queue:${name}`)
        const join = (id: string) =>
          send(id, "queue.join", ["m", "", 0, 0, 0, 60_000, 1000, 0, 3, 0, 0, 1, 0, 0, 1, 0, ""])
        // No process here knows the time zone.
        const times = encodeTimes(everySecond).replace("UTC", "Moon/Tranquility")
        yield* Effect.promise(async () => {
          for (const id of ["first", "other"]) {
            await open(id)
            await join(id)
          }
          await send("first", "queue.schedule", ["m", "a", times, "", "1", 0, "once"])
        })
        // The last one that joins is asked first.
        const queue = yield* on(a!, make(name))
        const [listed] = yield* all(queue)
        assert.deepInclude(listed, { name: "a", times: undefined, payload: Option.some(1), last: undefined })
        yield* Effect.promise(async () => {
          await end("first", true)
          await reap("first")
          await ring()
        })
        const asked = Effect.map(
          Effect.promise(() => mail("other")),
          (news) => news.filter(([, , tag, name]) => tag === "ticks" && name === "a")
        )
        const [[, , , , version, last]] = (yield* eventually(Effect.tap(asked, ({ length }) =>
          Effect.sync(() => assert.isAbove(length, 0))))) as [Array<any>]
        const tick = Date.now() + 60_000
        yield* Effect.promise(async () => {
          const given = ["m", "a", version, last, `${tick} ${tick + 1000}`]
          assert.deepStrictEqual(await send("other", "queue.ticks", given), ["given"])
          // It has nothing more to say.
          assert.deepStrictEqual(await send("other", "queue.ticks", ["m", "a", version, last, ""]), ["missing"])
          assert.strictEqual((await ask("", "queue.scheduled", ["a"], key))[1][6], tick)
          await end("other", true)
          await reap("other")
        })
        yield* queue.unschedule("a")
      }), sixteen))

  it.effect("stays as it is when it is set again, and keeps its next tick when only its payload changes", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const other = yield* on(b!, make())
        yield* queue.schedule("hourly", "1 hour", 1)
        const [first] = yield* all(queue)
        assert.deepStrictEqual(first!.payload, Option.some(1))
        assert.isUndefined(first!.last)
        yield* other.schedule("hourly", "1 hour", 1)
        assert.deepStrictEqual(yield* all(other), [first!])
        yield* other.schedule("hourly", "60 minutes", 2, { missed: "all", priority: "high" })
        assert.deepStrictEqual(yield* all(queue), [{ ...first!, payload: Option.some(2), missed: "all" }])
        yield* other.schedule("hourly", "30 minutes", 2)
        const [replaced] = yield* all(queue)
        assert.isBelow(millisOf(replaced!.next), millisOf(first!.next) - 1_000_000)
        const runs = yield* queue.nextRuns("hourly", 3)
        assert.deepStrictEqual(runs.map(millisOf), [0, 1, 2].map((n) => millisOf(replaced!.next) + n * 1_800_000))
        yield* queue.schedule("monday", Cron.parseUnsafe("0 9 * * 1", "Europe/Berlin"), 3)
        const mondays = yield* other.nextRuns("monday", 60)
        const local = new Set(
          mondays.map((run) => DateTime.toParts(DateTime.setZoneNamedUnsafe(run, "Europe/Berlin"))).map((
            { hour, minute, weekDay }
          ) => `${weekDay} ${hour} ${minute}`)
        )
        assert.deepStrictEqual([...local], ["1 9 0"])
        assert.deepStrictEqual(yield* queue.nextRuns("never", 3), [])
        // As far as dates go.
        yield* queue.schedule("rare", "40000000 days", 4)
        assert.strictEqual((yield* queue.nextRuns("rare", 1000)).length, 8)
        const strings = yield* on(b!, Queue.make({ name: "jobs", payload: Schema.String }))
        assert.isTrue((yield* all(strings)).every(({ payload }) => Option.isNone(payload)))
      })))

  it.effect("lists thousands of schedules, up to a limit", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const names = Array.from({ length: 1024 }, (_, n) => `schedule ${String(n).padStart(4, "0")}`)
        yield* Effect.forEach(names, (name, n) => queue.schedule(name, "1 hour", n), { concurrency: 100 })
        const found = yield* all(queue)
        assert.deepStrictEqual(found.map(({ name }) => name), names)
        isRangeError(yield* Effect.exit(queue.schedule("one more", "1 hour", 0)))
        yield* queue.schedule(names[5]!, "2 hours", 0)
        yield* queue.offer(1, { delay: "1 hour" })
        assert.strictEqual(yield* queue.drain({ delayed: true }), 1)
        assert.strictEqual((yield* all(queue)).length, 1024)
        assert.strictEqual((yield* queue.state).delayed, 0)
      })))

  it.effect("makes up for missed ticks as its options say", () =>
    several(2, ([a], namespace, server) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const ticks: Array<Tick> = []
        yield* noting(queue, ticks)
        const minutes = (...ago: ReadonlyArray<number>) => ago.map((minute) => minute * 60_000)
        // Half an hour from now: the last tick is late.
        const hourly = Cron.parseUnsafe(`${(new Date().getUTCMinutes() + 30) % 60} * * * *`)
        for (const [at, missed] of (["once", "skip", "all"] as const).entries()) {
          yield* queue.schedule(missed, "1 hour", at, { missed })
          yield* queue.schedule(`${missed} cron`, hourly, at, { missed })
        }
        yield* eventually(
          Effect.map(all(queue), (found) => assert.isTrue(found.every(({ next }) => next !== undefined)))
        )
        const expected: Array<Tick> = []
        for (const [at, name] of ["once", "skip", "all"].entries()) {
          const past = yield* aged(server, namespace, name, minutes(150))
          // A member has to count from there.
          const [last] = yield* aged(server, namespace, `${name} cron`, minutes(150, 149))
          const due = ticksOf(hourly, last! - 1, Date.now(), "all").filter((tick) => tick <= Date.now())
          if (name === "once") {
            expected.push({ name, tick: past[0]! + 7_200_000, payload: at })
            expected.push({ name: `${name} cron`, tick: due.at(-1)!, payload: at })
          } else if (name === "all") {
            for (const n of [0, 1, 2]) expected.push({ name, tick: past[0]! + n * 3_600_000, payload: at })
            for (const tick of due) expected.push({ name: `${name} cron`, tick, payload: at })
          }
        }
        const sorted = (some: ReadonlyArray<Tick>) =>
          some.toSorted((x, y) => x.name.localeCompare(y.name) || x.tick - y.tick)
        yield* eventually(Effect.sync(() => assert.deepStrictEqual(sorted(ticks), sorted(expected))))
        const found = yield* all(queue)
        assert.isTrue(found.every(({ next }) => millisOf(next) > Date.now()))
        assert.isUndefined(found.find(({ name }) => name === "skip")!.last)
        assert.strictEqual(ticks.length, expected.length)
      })))

  it.effect("has no job while the queue is paused, and one for all of that when it is resumed", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const ticks: Array<Tick> = []
        yield* queue.pause
        yield* queue.schedule("often", "100 millis", 1)
        const [{ next }] = (yield* all(queue)) as [Queue.Scheduled<number>]
        yield* eventually(Effect.sync(() => assert.isAbove(Date.now(), millisOf(next) + 500)))
        assert.strictEqual((yield* queue.state).waiting, 0)
        yield* noting(queue, ticks)
        yield* queue.resume
        yield* eventually(Effect.sync(() => assert.isAtLeast(ticks.length, 3)))
        assert.isAtLeast(ticks[0]!.tick, millisOf(next) + 400)
        assert.strictEqual(ticks[1]!.tick - ticks[0]!.tick, 100)
      })))

  it.effect("with rare ticks keep no event loop busy for as long as it takes to find them", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        // Once in 28 years.
        const spec = { ...Cron.parseUnsafe("0 0 29 2 1"), tz: DateTime.zoneMakeNamedUnsafe("Europe/Berlin") }
        yield* queue.schedule("leap", Cron.make({ ...spec, and: true }), 1)
        yield* eventually(Effect.map(all(queue), ([{ next } = { next: undefined }]) => assert.isDefined(next)))
        const asking = yield* Effect.forkChild(queue.nextRuns("leap", 20), { startImmediately: true })
        let turns = 0
        while (asking.pollUnsafe() === undefined) {
          yield* realSleep(1)
          turns++
        }
        assert.isAtLeast(turns, 10)
        const runs = yield* Fiber.join(asking)
        assert.deepStrictEqual(
          new Set(runs.map((run) => DateTime.formatIso(DateTime.add(run, { hours: 1 })).slice(4, 10))),
          new Set(["-02-29"])
        )
        yield* queue.unschedule("leap")
      })))

  it.effect("rings again when all processes were away for so long that Redis has forgotten alarms", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        yield* Effect.scoped(Effect.gen(function*() {
          const queue = yield* on(a!, Queue.make({ name: "jobs", payload: Schema.Number }))
          yield* queue.schedule("often", "200 millis", 1)
          yield* queue.offer(5, { delay: "300 millis" })
        }))
        yield* server.cli("ZREM", `{${namespace}:00}:due`, "@queue:jobs")
        const queue = yield* on(a!, make())
        yield* eventually(Effect.map(queue.state, ({ delayed, waiting }) => {
          assert.strictEqual(delayed, 0)
          assert.isAbove(waiting, 2)
        }))
      })))

  it.effect("has jobs without the options that single jobs have", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        // A type that has more is a type of these.
        const wide = {
          priority: "low",
          group: "g",
          lifo: true,
          id: "x",
          after: ["n1-1"],
          retry: Schedule.recurs(1)
        } as const
        const worked: Array<number> = []
        yield* Effect.forkScoped(queue.run((payload) => Effect.sync(() => worked.push(payload))))
        yield* queue.schedule("s", "1 second", 1, wide)
        yield* eventually(Effect.sync(() => assert.isAtLeast(worked.length, 2)))
        yield* queue.offer(2)
        yield* eventually(Effect.sync(() => assert.include(worked, 2)))
      })))

  it.effect("keep no event loop busy for as long as it takes to give ticks to all of them", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const times = Cron.parseUnsafe("0 9 * * 1", "Europe/Berlin")
        const since = performance.now()
        for (let each = 0; each < 20; each++) ticksOf(times, Date.now(), Date.now(), "once")
        const each = (performance.now() - since) / 20
        const count = 250
        let longest = 0
        let last = performance.now()
        const watching = setInterval(() => {
          longest = Math.max(longest, performance.now() - last)
          last = performance.now()
        }, 1)
        yield* Effect.addFinalizer(() => Effect.sync(() => clearInterval(watching)))
        // All are answered at once.
        yield* Effect.forEach(Array.from({ length: count }, (_, at) => `s${at}`), (name) =>
          queue.schedule(name, times, 1), {
          concurrency: "unbounded",
          discard: true
        })
        yield* eventually(
          Effect.map(all(queue), (found) =>
            found.length === count && found.every(({ next }) =>
              next !== undefined
            ))
        )
        assert.isBelow(longest, count * each / 3)
        yield* queue.obliterate
      }).pipe(Effect.scoped)))

  it.effect("refuses what makes no sense", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        const refused = (
          name: string,
          times: Parameters<typeof queue.schedule>[1],
          options?: Queue.ScheduleOptions
        ) => Effect.map(Effect.exit(queue.schedule(name, times, 1, options)), isRangeError)
        yield* refused("", "1 hour")
        yield* refused("x", "99 millis")
        yield* refused("x", Cron.parseUnsafe("0 0 31 2 *"))
        yield* refused("x", Cron.parseUnsafe("0 0 * * *", DateTime.zoneMakeOffset(90_000)))
        yield* refused("x", "1 hour", { missed: "some" as "all" })
        yield* refused("x", "1 hour", { attempts: 0 })
        isRangeError(yield* Effect.exit(Effect.suspend(() => queue.nextRuns("x", 1001))))
        assert.strictEqual(
          (yield* Effect.flip(queue.schedule("x", "1 hour", "" as never))).reason._tag,
          "InvalidPayload"
        )
        assert.deepStrictEqual(yield* all(queue), [])
      })))

  it.effect("is a layer", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        class Reports extends Queue.Service<Reports>()("jobs", { payload: Schema.Number }) {}
        const live = Queue.schedule(Reports, "often", "100 millis", 3).pipe(Layer.provideMerge(Reports.layer))
        yield* on(
          a!,
          Effect.scoped(Effect.gen(function*() {
            const reports = yield* Reports
            yield* eventually(Effect.map(reports.state, ({ waiting }) => assert.isAtLeast(waiting, 2)))
            yield* reports.obliterate
          })).pipe(Effect.provide(live))
        )
      })))
})

layer(TestServer.layer, live)("a calendar", (it) => {
  const again = (cron: Cron.Cron) => decodeTimes(JSON.parse(encodeTimes(cron))) as Cron.Cron

  it.effect("is the same in every process", () =>
    Effect.sync(() => {
      for (
        const cron of [
          Cron.parseUnsafe("*/7 3-5 1,15 * 2", "America/New_York"),
          Cron.parseUnsafe("15 30 2 * * *", "Europe/Berlin", { onDstOverlap: "both" }),
          Cron.make({
            minutes: [0],
            hours: [4],
            days: [8, 9, 10],
            months: [],
            weekdays: [1],
            and: true,
            tz: DateTime.zoneMakeOffset(3_600_000)
          })
        ]
      ) assert.isTrue(Cron.equals(cron, again(cron)))
      const local = again(Cron.parseUnsafe("0 12 * * *"))
      assert.strictEqual(Cron.next(local, new Date(0)).toISOString(), "1970-01-01T12:00:00.000Z")
    }))

  it.effect("has every tick once, over changes of the clock", () =>
    Effect.sync(() => {
      const cron = Cron.parseUnsafe("30 * * * *", "Europe/Berlin", { onDstOverlap: "both" })
      const from = Date.parse("2026-10-24T12:00:00Z")
      const ticks = ticksOf(cron, from, from, "once")
      assert.deepStrictEqual(ticks, Array.from({ length: 32 }, (_, at) => from + at * 3_600_000 + 1_800_000))
      const later = ticksOf(cron, from, from + 10 * 3_600_000, "all")
      assert.deepStrictEqual(later.slice(0, 32), ticks)
      assert.strictEqual(later.length, 42)
      const newest = ticksOf(cron, from, from + 10 * 3_600_000, "skip")
      assert.deepStrictEqual(newest, later.slice(9))
      const years = ticksOf(cron, 0, from, "all")
      assert.strictEqual(years.length, 132)
      assert.isAtMost(years[99]!, from)
      assert.isAbove(years[100]!, from)
    }))
})
