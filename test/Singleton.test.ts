/** Programs and ticks that run on one of several coordinators. */
import { assert, layer } from "@effect/vitest"
import { Clock, Cron, Deferred, Duration, Effect, Fiber, Layer, Logger, Option, Schedule } from "effect"
import { TestClock } from "effect/testing"
import { Coordinator, Lease, Singleton } from "../src/index.ts"
import { restart } from "../src/internal/election/restart.ts"
import { behindLine } from "./support/behindLine.ts"
import { eventually } from "./support/eventually.ts"
import { type Node, TestServer } from "./support/live.ts"
import { asks, waits, within } from "./support/requests.ts"
import { forget } from "./support/sessions.ts"
import { several } from "./support/several.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const
const timeToLive = "100 millis"

/** As a process that provides the layer; interrupting it is the end of that process. */
const launch = (context: Node, singleton: Layer.Layer<never, never, Coordinator.Coordinator>) =>
  Effect.forkChild(Effect.provideContext(Layer.launch(singleton), context))

const until = (condition: () => boolean, what: string) =>
  within(eventually(Effect.sync(() => assert.isTrue(condition()))), 5000, what)

const at = (time: string, day = 1) => Date.parse(`2030-01-0${day}T${time}Z`)

// The same calendar in both forms.
const tenMinutes = Cron.parseUnsafe("*/10 * * * *", "UTC")
const calendars = [
  ["cron", tenMinutes],
  ["schedule", Schedule.cron(tenMinutes) as Schedule.Schedule<unknown, void>]
] as const
const variants = calendars.flatMap(([name, times]) =>
  (["once", "skip"] as const).map((missed) => [name, times, missed] as const)
)

/** A clock that the test moves, and that knows its sleepers. */
const manualClock = () => {
  let monotonic = 0
  let ahead = 0
  const sleepers = new Set<{ readonly at: number; readonly wake: () => void }>()
  const wall = () => monotonic + ahead
  const nanos = (millis: number) => BigInt(millis) * 1_000_000n
  const clock: Clock.Clock = {
    currentTimeMillisUnsafe: wall,
    currentTimeMillis: Effect.sync(wall),
    currentTimeNanosUnsafe: () => nanos(wall()),
    currentTimeNanos: Effect.sync(() => nanos(wall())),
    monotonicTimeNanosUnsafe: () => nanos(monotonic),
    monotonicTimeNanos: Effect.sync(() => nanos(monotonic)),
    sleep: (duration) =>
      Effect.callback((resume) => {
        const sleeper = { at: monotonic + Duration.toMillis(duration), wake: () => resume(Effect.void) }
        if (sleeper.at <= monotonic) return resume(Effect.void)
        sleepers.add(sleeper)
        return Effect.sync(() => sleepers.delete(sleeper))
      })
  }
  return {
    clock,
    /** Time passes until then. */
    set: (millis: number) => {
      monotonic = millis - ahead
      for (const sleeper of [...sleepers]) {
        if (sleeper.at <= monotonic && sleepers.delete(sleeper)) sleeper.wake()
      }
    },
    /** The clock is set, and no time passes. */
    step: (millis: number) => {
      ahead = millis - monotonic
    },
    asleep: () => sleepers.size > 0
  }
}

layer(TestServer.layer, live)("a singleton", (it) => {
  it.effect("runs on one of all, and on the next when that ends", () =>
    several(3, (nodes) =>
      Effect.gen(function*() {
        const running = new Set<number>()
        const began: Array<number> = []
        const program = (at: number) =>
          Singleton.make(
            "one",
            Effect.gen(function*() {
              assert.strictEqual(running.size, 0)
              running.add(at)
              began.push(at)
              assert.isTrue(Option.isSome(yield* Lease.current))
              yield* Effect.addFinalizer(() => Effect.sync(() => running.delete(at)))
              yield* Effect.never
            })
          )
        const fibers: Array<Fiber.Fiber<never>> = []
        for (const [at, context] of nodes.entries()) fibers.push(yield* launch(context, program(at)))
        for (let round = 1; round <= 3; round++) {
          yield* until(() => began.length === round, "a process runs it")
          yield* Fiber.interrupt(fibers[began.at(-1)!]!)
        }
        assert.deepStrictEqual(began.toSorted(), [0, 1, 2])
        assert.strictEqual(running.size, 0)
      })))

  it.effect("stays where it has ended, and is run again where it has failed, by the next process", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const ended: Array<string> = []
        const done = (who: string) => Singleton.make("done", Effect.sync(() => ended.push(who)))
        const first = yield* launch(a!, done("a"))
        yield* until(() => ended.length === 1, "the end")
        const second = yield* launch(b!, done("b"))
        const failed: Array<string> = []
        const failing = (who: string) =>
          Singleton.make(
            "failing",
            Effect.suspend(() => failed.push(who) < 5 ? Effect.fail("no") : Effect.never),
            { restart: Schedule.spaced("20 millis") }
          )
        const others = [yield* launch(a!, failing("a")), yield* launch(b!, failing("b"))]
        yield* until(() => failed.length === 5, "five tries")
        assert.strictEqual(new Set(failed).size, 2)
        yield* Fiber.interruptAll(others)
        assert.deepStrictEqual(ended, ["a"])
        yield* Fiber.interrupt(first)
        yield* until(() => ended.length === 2, "the other one")
        yield* Fiber.interrupt(second)
      })))

  it.effect("is run again after every end but success", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const ends = [
          Effect.fail("no"),
          Effect.die("a defect"),
          Effect.interrupt,
          Effect.sync(() => {
            throw new Error("thrown")
          }),
          Effect.void
        ]
        let runs = 0
        const program = Effect.suspend((): Effect.Effect<void, string> => ends[runs++]!)
        const fiber = yield* launch(a!, Singleton.make("one", program, { restart: Schedule.spaced("10 millis") }))
        yield* until(() => runs === ends.length, "all runs")
        yield* Fiber.interrupt(fiber)
        assert.strictEqual(runs, ends.length)
      })))

  it.effect("is run again later each time, unless it has not failed for long", () =>
    Effect.gen(function*() {
      const step = yield* Schedule.toStep(restart)
      let now = 0
      const fails = (after: number) =>
        Effect.map(step(now += after, undefined), ([, delay]) => Duration.toSeconds(delay))
      const delays = yield* Effect.forEach([0, 1000, 2000, 4000, 8000, 16_000, 32_000, 60_000, 120_000], fails)
      assert.deepStrictEqual(delays, [1, 2, 4, 8, 16, 32, 60, 60, 60])
      assert.strictEqual(yield* fails(120_001), 1)
      assert.strictEqual(yield* fails(1000), 2)
    }))

  it.effect("is interrupted when its lease is lost, and runs elsewhere after that", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const events: Array<string> = []
        const program = (who: string) =>
          Singleton.make(
            "one",
            Effect.onExit(
              Effect.andThen(Effect.sync(() => events.push(`+${who}`)), Effect.never),
              () => Effect.sync(() => events.push(`-${who}`))
            )
          )
        const first = yield* launch(a!, program("a"))
        yield* until(() => events.length === 1, "the first")
        const second = yield* launch(b!, program("b"))
        const [{ id }] = (yield* Effect.provideContext(
          Effect.flatMap(Coordinator.Coordinator, (coordinator) => coordinator.sessions),
          a!
        )) as readonly [Coordinator.Session]
        yield* forget(server, namespace, id)
        yield* until(() => events.length === 3, "the second")
        assert.deepStrictEqual(events, ["+a", "-a", "+b"])
        yield* Fiber.interruptAll([first, second])
      })))

  it.effect("stands by for as long as it takes, and runs on, despite the coordinator's limits for locks", () =>
    several(2, ([a, b]) =>
      Effect.gen(function*() {
        const runs: Array<string> = []
        const program = (who: string) =>
          Singleton.make("one", Effect.andThen(Effect.sync(() => runs.push(who)), Effect.never))
        const first = yield* launch(a!, program("a"))
        yield* until(() => runs.length === 1, "the first")
        const second = yield* launch(b!, program("b"))
        yield* Effect.sleep("300 millis")
        assert.deepStrictEqual(runs, ["a"])
        yield* Fiber.interrupt(first)
        // At once: a candidate that had given up would try again after a second.
        yield* within(eventually(Effect.sync(() => assert.deepStrictEqual(runs, ["a", "b"]))), 900, "the second")
        yield* Fiber.interrupt(second)
      }), { lease: "3 seconds", margin: "500 millis", wait: "50 millis", maxHold: "100 millis" }))

  it.effect("has a lease of its own: a process that is cut off is succeeded after that", () =>
    behindLine(({ context, direct, line, namespace, server }) =>
      Effect.gen(function*() {
        const runs: Array<string> = []
        const scheduled = (who: string) =>
          Singleton.schedule("tick", Effect.sync(() => runs.push(who)), Schedule.spaced("20 millis"), {
            lease: "2 seconds",
            timeToLive
          })
        const first = yield* launch(context, scheduled("a"))
        yield* until(() => runs.length === 3, "ticks")
        const second = yield* launch(yield* direct(), scheduled("b"))
        yield* waits(server, namespace, "singleton:tick", 1)
        yield* line.blackhole
        yield* within(eventually(Effect.sync(() => assert.include(runs, "b"))), 4000, "the successor")
        yield* line.pass
        yield* line.closeAll
        yield* Fiber.interruptAll([first, second])
      }), { lease: "60 seconds", margin: "5 seconds" }))
})

layer(TestServer.layer, live)("a schedule", (it) => {
  it.effect("runs each tick once, however often the process that runs it changes", () =>
    several(3, (nodes) =>
      Effect.gen(function*() {
        const tokens: Array<number> = []
        let busy = false
        let failures = 0
        const tick = Effect.gen(function*() {
          assert.isFalse(busy)
          busy = true
          yield* Effect.addFinalizer(() => Effect.sync(() => void (busy = false)))
          tokens.push(Option.getOrThrow(yield* Lease.current).token)
          if (tokens.length % 3 === 0) {
            failures++
            return yield* Effect.fail("a tick may fail")
          }
        })
        const scheduled = Singleton.schedule("tick", tick, Schedule.spaced("15 millis"), { timeToLive })
        const first = yield* launch(nodes[0]!, scheduled)
        yield* until(() => tokens.length > 0, "a tick of the first")
        const others = yield* Effect.forEach(nodes.slice(1), (context) => launch(context, scheduled))
        yield* until(() => tokens.length >= 4, "ticks of the first")
        const before = new Set(tokens).size
        yield* Fiber.interrupt(first)
        yield* until(() => new Set(tokens).size > before, "ticks of the next")
        assert.isAbove(failures, 0)
        assert.deepStrictEqual(tokens, tokens.toSorted((x, y) => x - y))
        yield* Fiber.interruptAll(others)
      })))

  it.effect("keeps the times of a Cron: the same for all, none twice, missed ones left out or made up for once", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        for (const missed of ["skip", "once"] as const) {
          const runs: Array<number> = []
          const tick = Effect.clockWith((clock) => Effect.sync(() => runs.push(clock.currentTimeMillisUnsafe())))
          const scheduled = Singleton.schedule(missed, tick, tenMinutes, { missed, timeToLive: "10 seconds" })
          const { asleep, clock, set } = manualClock()
          yield* Effect.gen(function*() {
            const go = (millis: number, count: number) =>
              Effect.gen(function*() {
                yield* until(asleep, "the schedule sleeps")
                set(millis)
                yield* until(() => runs.length === count, `${count} runs`)
              })
            set(at("00:05"))
            const first = yield* launch(a!, scheduled)
            yield* go(at("00:10"), 1)
            yield* go(at("00:20"), 2)
            yield* Fiber.interrupt(first)
            // Three ticks are due while no process is there.
            set(at("00:55"))
            const second = yield* launch(b!, scheduled)
            if (missed === "once") yield* until(() => runs.length === 3, "what was missed")
            yield* go(at("01:00"), missed === "once" ? 4 : 3)
            yield* Fiber.interrupt(second)
            assert.deepStrictEqual(
              runs,
              missed === "once"
                ? [at("00:10"), at("00:20"), at("00:55"), at("01:00")]
                : [at("00:10"), at("00:20"), at("01:00")]
            )
            // A clock that is behind does not repeat what another has run.
            set(at("00:59"))
            const third = yield* launch(a!, scheduled)
            yield* go(at("01:10"), runs.length + 1)
            assert.strictEqual(runs.at(-1), at("01:10"))
            yield* Fiber.interrupt(third)
          }).pipe(Effect.provideService(Clock.Clock, clock))
          yield* server.cli("DEL", `{${namespace}:00}:tick:${missed}`)
        }
      })))

  it.effect("counts a Cron without a time zone in UTC, whatever the zone of the process", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        yield* Effect.acquireRelease(
          Effect.sync(() => {
            const zone = process.env["TZ"]
            process.env["TZ"] = "Asia/Tokyo"
            return zone
          }),
          (zone) =>
            Effect.sync(() => {
              if (zone === undefined) delete process.env["TZ"]
              else process.env["TZ"] = zone
            })
        )
        assert.strictEqual(new Date(0).getHours(), 9)
        // Days and weekdays must both match: the first Friday of the year that is a 13th.
        const fields = { minutes: [0], hours: [12], months: [], days: [13], weekdays: [5] }
        for (
          const [name, cron, at] of [
            ["plain", Cron.parseUnsafe("0 12 * * *"), "2030-01-01T12:00Z"],
            ["both", Cron.make({ ...fields, and: true }), "2030-09-13T12:00Z"]
          ] as const
        ) {
          let runs = 0
          const scheduled = Singleton.schedule(name, Effect.sync(() => runs++), cron, { timeToLive: "10 seconds" })
          const { asleep, clock, set } = manualClock()
          yield* Effect.gen(function*() {
            set(Date.parse("2030-01-01T11:59Z"))
            const fiber = yield* launch(a!, scheduled)
            yield* until(asleep, "the schedule sleeps")
            set(Date.parse(at))
            yield* until(() => runs === 1, "the tick")
            yield* Fiber.interrupt(fiber)
          }).pipe(Effect.provideService(Clock.Clock, clock))
          const claimed = yield* server.cli("HGET", `{${namespace}:00}:tick:${name}`, "t")
          assert.strictEqual(Number(claimed), Date.parse(at))
          yield* server.cli("DEL", `{${namespace}:00}:tick:${name}`)
        }
      }).pipe(Effect.scoped)))

  it.effect("keeps the last tick of a week until long after the next one is due", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        let runs = 0
        const scheduled = Singleton.schedule("week", Effect.sync(() => runs++), Cron.parseUnsafe("0 9 * * 1", "UTC"))
        const { asleep, clock, set } = manualClock()
        yield* Effect.gen(function*() {
          set(Date.parse("2030-01-07T08:59:00Z"))
          const first = yield* launch(a!, scheduled)
          yield* until(asleep, "the schedule sleeps")
          set(Date.parse("2030-01-07T09:00:00Z"))
          yield* until(() => runs === 1, "the tick")
          yield* Fiber.interrupt(first)
        }).pipe(Effect.provideService(Clock.Clock, clock))
        const left = Number(yield* server.cli("PTTL", `{${namespace}:00}:tick:week`))
        assert.isAbove(left, 13.9 * 86_400_000)
        yield* server.cli("DEL", `{${namespace}:00}:tick:week`)
      })))

  it.effect("keeps the times of a Schedule that has a calendar, behind another process too", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const runs: Array<number> = []
        const tick = Effect.clockWith((clock) => Effect.sync(() => runs.push(clock.currentTimeMillisUnsafe())))
        const [, [, times]] = calendars
        const scheduled = Singleton.schedule("calendar", tick, times, { timeToLive: "10 seconds" })
        const { asleep, clock, set } = manualClock()
        yield* Effect.gen(function*() {
          const go = (time: string) =>
            Effect.gen(function*() {
              const count = runs.length + 1
              yield* until(asleep, "the schedule sleeps")
              set(at(time))
              yield* until(() => runs.length === count, `${count} runs`)
            })
          set(at("00:05:00"))
          const first = yield* launch(a!, scheduled)
          yield* go("00:10:00")
          yield* until(asleep, "the schedule sleeps")
          yield* Fiber.interrupt(first)
          set(at("00:12:30"))
          const second = yield* launch(b!, scheduled)
          yield* until(asleep, "the schedule sleeps")
          set(at("00:19:59"))
          yield* go("00:20:00")
          yield* Fiber.interrupt(second)
        }).pipe(Effect.provideService(Clock.Clock, clock))
        assert.deepStrictEqual(runs, [at("00:10:00"), at("00:20:00")])
        yield* server.cli("DEL", `{${namespace}:00}:tick:calendar`)
      })))

  it.effect("runs no tick of a calendar twice when the clock is set back in a tick", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        for (const [name, times] of calendars) {
          const { asleep, clock, set, step } = manualClock()
          const runs: Array<number> = []
          const tick = Effect.sync(() => {
            if (runs.push(clock.currentTimeMillisUnsafe()) === 1) step(at("00:08"))
          })
          yield* Effect.gen(function*() {
            set(at("00:05"))
            const fiber = yield* launch(a!, Singleton.schedule(name, tick, times, { timeToLive: "10 seconds" }))
            for (const time of ["00:10", "00:10", "00:20", "00:30"]) {
              yield* until(asleep, "the schedule sleeps")
              set(at(time))
            }
            yield* until(() => runs.at(-1) === at("00:30"), "the last tick")
            yield* Fiber.interrupt(fiber)
          }).pipe(Effect.provideService(Clock.Clock, clock))
          assert.deepStrictEqual(runs, [at("00:10"), at("00:20"), at("00:30")])
          yield* server.cli("DEL", `{${namespace}:00}:tick:${name}`)
        }
      })))

  it.effect("looks at its clock again while it waits for a tick of a calendar", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        for (const [name, times, missed] of variants) {
          const { asleep, clock, set, step } = manualClock()
          const runs: Array<string> = []
          const tick = Effect.sync(() =>
            runs.push(new Date(clock.currentTimeMillisUnsafe()).toISOString().slice(11, 21))
          )
          yield* Effect.gen(function*() {
            const sleeps = until(asleep, "the schedule sleeps")
            const pass = (time: string) => Effect.andThen(sleeps, Effect.sync(() => set(at(time))))
            const ran = (time: string) => until(() => runs.at(-1) === `${time}.0`, `the tick at ${time}`)
            set(at("00:05"))
            const options = { missed, timeToLive: "10 seconds" } as const
            const fiber = yield* launch(a!, Singleton.schedule(name, tick, times, options))
            // Set back: as much time passes as the tick was away, and it is not run before the clock says so.
            yield* sleeps
            step(at("00:03"))
            yield* pass("00:09")
            yield* pass("00:10")
            yield* ran("00:10:00")
            // Set forward, past two ticks.
            yield* sleeps
            step(at("00:34"))
            yield* pass("00:35")
            if (missed === "once") yield* ran("00:35:00")
            yield* pass("00:40")
            yield* ran("00:40:00")
            // Set forward by less than a second, and a process that is busy for long: these ticks are only late.
            yield* pass("00:49:57")
            yield* sleeps
            step(at("00:49:57.500"))
            yield* pass("00:50:00.500")
            yield* until(() => runs.at(-1) === "00:50:00.5", "the tick at 00:50")
            yield* pass("01:03")
            yield* ran("01:03:00")
            yield* Fiber.interrupt(fiber)
          }).pipe(Effect.provideService(Clock.Clock, clock))
          const between = missed === "once" ? ["00:35:00.0"] : []
          const expected = ["00:10:00.0", ...between, "00:40:00.0", "00:50:00.5", "01:03:00.0"]
          assert.deepStrictEqual(runs, expected, `${name} ${missed}`)
          yield* server.cli("DEL", `{${namespace}:00}:tick:${name}`)
        }
      })))

  it.effect("sees each tick when a test adjusts its clock by days at a time", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        let [runs, sleepers] = [0, 0]
        const tick = Effect.sync(() => runs++)
        const scheduled = Singleton.schedule("daily", tick, Cron.parseUnsafe("0 2 * * *", "UTC"), {
          timeToLive: "10 seconds"
        })
        yield* Effect.gen(function*() {
          const clock = yield* Clock.Clock
          const sleep = (duration: Duration.Duration) =>
            Effect.acquireUseRelease(
              Effect.sync(() => sleepers++),
              () => clock.sleep(duration),
              () => Effect.sync(() => sleepers--)
            )
          const fiber = yield* Effect.provideService(launch(a!, scheduled), Clock.Clock, { ...clock, sleep })
          for (const days of [1, 7]) {
            yield* until(() => sleepers === 1, "the schedule sleeps")
            const before = runs
            yield* TestClock.adjust(Duration.days(days))
            // More than one, when Redis answers while the clock is adjusted.
            yield* until(() => runs > before, "the tick")
          }
          yield* Fiber.interrupt(fiber)
        }).pipe(Effect.provide(TestClock.layer()))
        yield* server.cli("DEL", `{${namespace}:00}:tick:daily`)
      })))

  it.effect("makes up for the ticks of a calendar that were due while an earlier one ran", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        for (const [name, times, missed] of variants) {
          const { asleep, clock, set } = manualClock()
          const runs: Array<number> = []
          const finish = yield* Deferred.make<void>()
          const tick = Effect.suspend(() =>
            runs.push(clock.currentTimeMillisUnsafe()) === 1 ? Deferred.await(finish) : Effect.void
          )
          yield* Effect.gen(function*() {
            set(at("00:05"))
            const options = { missed, timeToLive: "10 seconds" } as const
            const fiber = yield* launch(a!, Singleton.schedule(name, tick, times, options))
            yield* until(asleep, "the schedule sleeps")
            set(at("00:10"))
            yield* until(() => runs.length === 1, "the first tick")
            // Two more are due before it ends.
            set(at("00:35"))
            yield* Deferred.succeed(finish, undefined)
            yield* until(asleep, "the schedule sleeps")
            set(at("00:40"))
            yield* until(() => runs.at(-1) === at("00:40"), "the last tick")
            yield* Fiber.interrupt(fiber)
          }).pipe(Effect.provideService(Clock.Clock, clock))
          const between = missed === "once" ? [at("00:35")] : []
          assert.deepStrictEqual(runs, [at("00:10"), ...between, at("00:40")], `${name} ${missed}`)
          yield* server.cli("DEL", `{${namespace}:00}:tick:${name}`)
        }
      })))

  it.effect("does not wait for a clock that was ahead, if its times are intervals", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        for (
          const times of [Schedule.spaced("10 minutes"), Schedule.fixed("10 minutes"), Schedule.windowed("10 minutes")]
        ) {
          // It is no multiple of the interval by which the clock is set.
          const odd = 90_000
          const { asleep, clock, set, step } = manualClock()
          const runs: Array<number> = []
          const tick = Effect.sync(() => runs.push(clock.currentTimeMillisUnsafe()))
          const scheduled = Singleton.schedule("tick", tick, times, { timeToLive: "10 seconds" })
          yield* Effect.gen(function*() {
            const go = (millis: number) =>
              Effect.gen(function*() {
                const count = runs.length + 1
                yield* until(asleep, "the schedule sleeps")
                set(millis)
                yield* until(() => runs.length === count, `${count} runs`)
              })
            set(at("00:00", 3))
            const first = yield* launch(a!, scheduled)
            yield* go(at("00:10", 3))
            // By a day, while the process waits: the interval is as long as before.
            yield* until(asleep, "the schedule sleeps")
            step(at("00:00", 2) + odd)
            yield* go(at("00:10", 2) + odd)
            yield* go(at("00:20", 2) + odd)
            yield* Fiber.interrupt(first)
            // By another day, for the next process.
            step(at("00:00"))
            const second = yield* launch(b!, scheduled)
            yield* go(at("00:10"))
            yield* go(at("00:20"))
            yield* Fiber.interrupt(second)
          }).pipe(Effect.provideService(Clock.Clock, clock))
          yield* server.cli("DEL", `{${namespace}:00}:tick:tick`)
        }
      })))

  it.effect("begins a Schedule anew with each process, though ticks were missed", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const runs: Array<string> = []
        const times = Schedule.spaced("50 millis").pipe(Schedule.upTo({ times: 1 }))
        const scheduled = (who: string) =>
          Singleton.schedule("few", Effect.sync(() => runs.push(who)), times, { timeToLive: "3 seconds" })
        const first = yield* launch(a!, scheduled("a"))
        yield* until(() => runs.length === 1, "the tick of the first process")
        yield* Fiber.interrupt(first)
        yield* Effect.sleep("200 millis")
        const second = yield* launch(b!, scheduled("b"))
        yield* until(() => runs.length === 2, "the tick of the second process")
        yield* Fiber.interrupt(second)
        assert.deepStrictEqual(runs, ["a", "b"])
        yield* server.cli("DEL", `{${namespace}:00}:tick:few`)
      })))

  it.effect("goes on behind a tick that interrupts itself", () =>
    several(1, ([a], namespace, server) =>
      Effect.gen(function*() {
        let runs = 0
        const tick = Effect.andThen(Effect.sync(() => runs++), Effect.interrupt)
        const scheduled = Singleton.schedule("tick", tick, Schedule.spaced("20 millis"), { timeToLive: "2 seconds" })
        const first = yield* launch(a!, scheduled)
        yield* until(() => runs >= 5, "several ticks")
        yield* Fiber.interrupt(first)
        yield* server.cli("DEL", `{${namespace}:00}:tick:tick`)
      })))

  it.effect("claims before it runs, and does not run what another has claimed", () =>
    several(2, ([a, b], namespace, server) =>
      Effect.gen(function*() {
        const runs: Array<string> = []
        const inside = yield* Deferred.make<void>()
        const scheduled = (who: string) =>
          Singleton.schedule(
            "tick",
            Effect.andThen(
              Effect.sync(() => runs.push(who)),
              who === "a" ? Effect.andThen(Deferred.succeed(inside, undefined), Effect.never) : Effect.void
            ),
            Schedule.spaced("200 millis"),
            { timeToLive: "2 seconds" }
          )
        const first = yield* launch(a!, scheduled("a"))
        yield* Deferred.await(inside)
        const claimed = Number(yield* server.cli("HGET", `{${namespace}:00}:tick:tick`, "t"))
        // It dies in the middle of its tick.
        yield* Fiber.interrupt(first)
        const second = yield* launch(b!, scheduled("b"))
        yield* until(() => runs.length === 2, "the next tick")
        const next = Number(yield* server.cli("HGET", `{${namespace}:00}:tick:tick`, "t"))
        // As long after it as the schedule says, and not at once.
        assert.isAtLeast(next - claimed, 200)
        yield* Fiber.interrupt(second)
        yield* server.cli("DEL", `{${namespace}:00}:tick:tick`)
      })))

  it.effect("runs the tick that it has claimed, though the answer came late or not at all", () =>
    behindLine(({ context, line, namespace, server }) =>
      Effect.gen(function*() {
        let runs = 0
        const dues = new Set<string>()
        const tick = Effect.gen(function*() {
          const due = yield* server.cli("HGET", `{${namespace}:00}:tick:tick`, "t")
          runs++
          dues.add(due)
        })
        const failures: Array<unknown> = []
        const logger = Logger.make(({ logLevel, message }) => void (logLevel === "Error" && failures.push(message)))
        const fiber = yield* launch(
          context,
          Singleton.schedule("tick", tick, Schedule.spaced("50 millis"), { timeToLive: "10 seconds" }).pipe(
            Layer.provide(Logger.layer([logger]))
          )
        )
        yield* until(() => runs === 2, "two ticks")
        // It is executed, and then Redis is away for longer than a question waits.
        const met = yield* line.once(asks("singleton.claim"), "blackholeReply")
        yield* met
        const before = runs
        yield* Effect.sleep("700 millis")
        yield* line.closeAll
        yield* until(() => runs > before, "the tick")
        // None was claimed in vain, and none ran twice.
        yield* until(() => runs > before + 2, "further ticks")
        assert.strictEqual(dues.size, runs)
        assert.deepStrictEqual(failures, [])
        yield* Fiber.interrupt(fiber)
        yield* server.cli("DEL", `{${namespace}:00}:tick:tick`)
      }), { lease: "6 seconds", requestTimeout: "200 millis" }))

  it.effect("refuses bad options at once", () =>
    Effect.sync(() => {
      for (const bad of [0, -1, Number.NaN, "Infinity"] as const) {
        assert.throws(() => Singleton.schedule("x", Effect.void, Schedule.forever, { timeToLive: bad }), RangeError)
      }
      // A 30 February.
      assert.throws(
        () => Singleton.schedule("x", Effect.void, Cron.parseUnsafe("0 0 30 2 *", "UTC")),
        RangeError,
        /next time/
      )
    }))
})
