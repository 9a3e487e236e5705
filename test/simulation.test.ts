/** The simulator: it repeats itself, it finds what is wrong, and what it has found in the library stays mended. */
import { assert, expect, layer } from "@effect/vitest"
import { Duration, Effect, Exit, Option, Schema } from "effect"
import { execFileSync } from "node:child_process"
import * as fs from "node:fs"
import { fileURLToPath } from "node:url"
import { Coordinator, Lock, Redis, Semaphore, SharedRef } from "../src/index.ts"
import { connectionsOf } from "../src/internal/redis/connection.ts"
import { databases, Machine } from "../src/internal/simulation/machine.ts"
import { Server } from "../src/internal/simulation/server.ts"
import { shrink } from "../src/internal/simulation/shrink.ts"
import { realSleep } from "../src/internal/testing/sleep.ts"
import { Simulation } from "../src/testing.ts"
import { load } from "./simulation/library.ts"
import { expected, missing, reach } from "./simulation/reach.ts"
import { type Options, simulate } from "./simulation/schedule.ts"
import { runs } from "./support/effort.ts"
import { original } from "./torture/library.ts"

const saved = new URL("./simulation/saved/", import.meta.url)

/** Processes that take a lock again and again. Unless it protects their bodies, these run on when it is released. */
const scenario = (protect: boolean) => () => {
  let inside = 0
  const body = Effect.acquireUseRelease(
    Effect.sync(() => inside++),
    () => Effect.sleep("20 millis"),
    () => Effect.sync(() => inside--)
  )
  return {
    program: ({ isStopping }: Simulation.Process) =>
      Effect.gen(function*() {
        while (!isStopping()) {
          yield* Effect.annotateLogs(Effect.logInfo("enters"), { turn: 1 })
          const held = protect ? Lock.withLock(body, "a") : Lock.withLock(Effect.forkDetach(body), "a")
          yield* held.pipe(Effect.ignore)
        }
      }).pipe(Effect.provide(Coordinator.layer({ lease: "2 seconds" })), Effect.retry({ while: () => !isStopping() })),
    invariant: () => inside > 1 ? `${inside} are inside` : undefined
  }
}

// Redis forgets nothing, and no process stands still: for longer than its lease, that would be inside beside the next one.
const remembering = [
  "cut",
  "lost requests",
  "lost replies",
  "clock",
  "library",
  "memory",
  "migration"
] as const

layer(Simulation.layer, { excludeTestServices: true })("Simulation", (it) => {
  it.effect("runs programs without a failure", () =>
    Effect.gen(function*() {
      const report = yield* Simulation.explore(scenario(true), { schedules: runs(8), faults: remembering })
      assert.strictEqual(report.schedules, runs(8))
      assert.isAbove(report.steps, runs(8) * 300)
    }))

  it.effect("ends when it is interrupted", () =>
    Effect.gen(function*() {
      const began = performance.now()
      const long = Simulation.run(scenario(true)().program, { steps: 1_000_000, faults: remembering })
      assert.isTrue(Option.isNone(yield* Effect.timeoutOption(long, "200 millis")))
      assert.isBelow(performance.now() - began, 5000)
      // Its database can be used again.
      yield* Effect.forEach(Array.from({ length: databases }), () => Simulation.run(() => Effect.void, { steps: 1 }), {
        concurrency: "unbounded"
      })
    }))

  it.effect("lets programs send commands", () =>
    Effect.gen(function*() {
      const found: Array<unknown> = []
      yield* Simulation.run(() =>
        Effect.gen(function*() {
          const redis = yield* Redis.Redis
          // An answer can be late.
          yield* Effect.retry(redis.send("SET", "x", "1"), { times: 20 })
          found.push(yield* Effect.retry(redis.send("GET", "x"), { times: 20 }))
        }), { processes: 1, faults: ["cut"] })
      assert.deepStrictEqual(found, ["1"])
    }))

  it.effect("finds a body that runs on after its lock is released, and says how", () =>
    Effect.gen(function*() {
      const failed = yield* Effect.flip(Simulation.explore(scenario(false), { schedules: 20, faults: [] }))
      assert.strictEqual(failed.reason, "2 are inside")
      // The request, its answer, and what the program has logged.
      assert.match(failed.message, /lock\.take of lock:a\n/)
      assert.match(failed.message, /is answered \["ok",.*\["granted","\d+"\]/)
      assert.match(failed.message, /logs Info enters turn=1\n/)
      const again = yield* Effect.flip(Simulation.explore(scenario(false), { schedules: 20, faults: [] }))
      assert.deepStrictEqual(again.story, failed.story)
      const { choices, seed, steps } = failed
      assert.isBelow(steps, 300)
      const { invariant, program } = scenario(false)()
      const repeated = yield* Effect.flip(Simulation.run(program, { invariant, faults: [], seed, steps, choices }))
      assert.deepStrictEqual(repeated.story, failed.story)
    }))

  it.effect("shows a fault before what follows from it, and says how to repeat a long schedule", () =>
    Effect.gen(function*() {
      let seen = false
      const program = () =>
        Effect.flatMap(Redis.Redis, ({ send }) =>
          Effect.forever(
            send("INCR", "n").pipe(
              Effect.catch(({ reason }) =>
                Effect.andThen(
                  Effect.logInfo(reason._tag),
                  Effect.sync(() => seen ||= reason._tag === "ConnectionLost")
                )
              ),
              Effect.andThen(Effect.sleep("1 millis"))
            )
          ))
      const invariant = () => seen ? "seen" : undefined
      const options = { processes: 1, faults: ["cut"], faultEvery: 3 } as const
      const { seed, story } = yield* Effect.flip(Simulation.run(program, { ...options, invariant }))
      const at = story.findLastIndex((line) => line.includes(" fault: cut"))
      assert.isAtLeast(at, 0)
      assert.isAbove(story.findIndex((line) => line.includes("logs Info ConnectionLost")), at)
      const failed = new Simulation.SimulationFailed({
        seed,
        steps: 2000,
        choices: Array.from({ length: 2000 }, () => 7),
        reason: "seen",
        story
      })
      assert.match(failed.message, /the 2000 `choices` of this error; or by `explore`/)
    }))

  it.effect("reports the story of an invariant, or a program, that throws", () =>
    Effect.gen(function*() {
      const throwing = (): never => assert.fail("not so")
      for (
        const failing of [
          Simulation.run(() => Effect.sleep("1 second"), { steps: 5, invariant: throwing }),
          Simulation.run(throwing, { steps: 5 })
        ]
      ) {
        const failed = yield* Effect.flip(failing)
        assert.strictEqual(failed._tag, "SimulationFailed")
        assert.include(failed.message, "not so")
      }
    }))

  it.effect("finds a program that waits for ever", () =>
    Effect.gen(function*() {
      const failed = yield* Effect.flip(
        Simulation.run(
          () =>
            Effect.gen(function*() {
              const permits = yield* Semaphore.make({ name: "one", permits: 1 })
              yield* permits.withPermit(permits.withPermit(Effect.void))
            }).pipe(Effect.scoped, Effect.provide(Coordinator.layer())),
          { faults: [], steps: 50 }
        )
      )
      assert.match(failed.reason, /did not end|has failed/)
    }))

  it.effect("finds a program that runs in circles", () =>
    Effect.gen(function*() {
      for (const pause of [Effect.yieldNow, Effect.sleep(0)]) {
        const ending = ({ isStopping }: Simulation.Process) =>
          Effect.gen(function*() {
            while (!isStopping()) yield* pause
          })
        yield* Simulation.explore(() => ({ program: ending }), { processes: 1, schedules: 2 })
      }
      const program = () => Effect.forever(Effect.yieldNow)
      const failed = yield* Effect.flip(Simulation.explore(() => ({ program }), { processes: 1, schedules: 2 }))
      assert.match(failed.reason, /runs in circles/)
    }), 60_000)

  it.effect("connects again though its program tries to send at once, again and again", () =>
    Effect.gen(function*() {
      let tries = 0
      const program = ({ isStopping }: Simulation.Process) =>
        Effect.gen(function*() {
          const redis = yield* Redis.Redis
          while (!isStopping() && tries < 100_000) {
            tries++
            yield* Effect.ignore(redis.send("PING"))
          }
        })
      yield* Simulation.run(program, { faults: ["cut"], faultEvery: 8, calm: "50 millis" })
      assert.isBelow(tries, 100_000)
    }))

  it.effect("leaves time to whoever runs it, though its program only computes", () =>
    Effect.gen(function*() {
      const program = ({ isStopping }: Simulation.Process) =>
        Effect.gen(function*() {
          while (!isStopping()) yield* Effect.sync(() => 1)
        })
      const run = Simulation.run(program, { processes: 1, calm: "1 hour" })
      assert.strictEqual(yield* Effect.raceFirst(run, Effect.as(realSleep("500 millis"), "timeout")), "timeout")
    }))

  it.effect("simulates an hour of a program that is always busy", () =>
    Effect.gen(function*() {
      const program = ({ isStopping }: Simulation.Process) =>
        Effect.gen(function*() {
          while (!isStopping()) yield* Lock.withLock(Effect.sleep("100 millis"), "a")
        }).pipe(Effect.provide(Coordinator.layer()))
      const report = yield* Simulation.run(program, { processes: 1, faults: [], steps: 0, calm: "1 hour" })
      assert.isAtLeast(Duration.toMinutes(report.simulated), 60)
      assert.isAbove(report.steps, 100_000)
    }))

  it.effect("interrupts what may be interrupted, and starts Redis again", () =>
    Effect.gen(function*() {
      let interrupted = 0
      const program = ({ interruptible, isStopping }: Simulation.Process) =>
        Effect.gen(function*() {
          while (!isStopping()) {
            const held = Effect.ignore(Lock.withLock(Effect.sleep("20 millis"), "a"))
            if (Option.isNone(yield* interruptible(held))) interrupted++
          }
        }).pipe(Effect.provide(Coordinator.layer()), Effect.retry({ while: () => !isStopping() }))
      yield* Simulation.explore(() => ({ program }), { schedules: 10, faults: ["interrupt", "restart"] })
      assert.isAbove(interrupted, 10)
    }))

  it.effect("lets keys expire by its own time", () =>
    Effect.gen(function*() {
      const seen: Array<number> = []
      const program = () =>
        Effect.gen(function*() {
          const ref = yield* SharedRef.make({ name: "a", schema: Schema.Number, initial: 0, timeToLive: "100 millis" })
          yield* ref.set(1)
          // Real time passes.
          yield* Effect.sync(() => {
            for (const end = performance.now() + 150; performance.now() < end;);
          })
          seen.push(yield* ref.get)
          yield* Effect.sleep("200 millis")
          seen.push(yield* ref.get)
        }).pipe(Effect.scoped, Effect.provide(Coordinator.layer()))
      yield* Simulation.run(program, { processes: 1, faults: [], steps: 0 })
      assert.deepStrictEqual(seen, [1, 0])
    }))

  it.effect("lets keys that programs write expire by its own time, however they say it", () =>
    Effect.gen(function*() {
      const written = [
        ["SET", "k", "v", "PX", 1000],
        ["set", "k", "v", "NX", "ex", 1],
        ["SET", "k", "v", "PXAT", 1_800_000_001_000],
        ["SETEX", "k", 1, "v"],
        ["PSETEX", "k", 1000, "v"],
        ["EXPIRE", "other", 1, "NX"],
        ["PEXPIREAT", "other", 1_800_000_001_000],
        ["GETEX", "other", "EX", 1]
      ] as const
      for (const [name, key, ...args] of written) {
        const seen: Array<unknown> = []
        yield* Simulation.run(() =>
          Effect.gen(function*() {
            const redis = yield* Redis.Redis
            yield* redis.send("SET", "other", "v")
            yield* redis.send(name, key, ...args)
            seen.push(yield* redis.send("TTL", key))
            // This one changes nothing.
            seen.push(yield* redis.send("PEXPIRE", key, 100, "GT"))
            yield* Effect.sleep("900 millis")
            seen.push(yield* redis.send("GET", key))
            yield* Effect.sleep("200 millis")
            seen.push(yield* redis.send("GET", key), yield* redis.send("PTTL", key))
            seen.push((yield* redis.send<ReadonlyArray<string>>("TIME"))[0])
          }), { processes: 1, faults: [], steps: 0 })
        assert.deepStrictEqual(seen, [1, 0, "v", null, -2, "1800000001"], name)
      }
    }))

  it.effect("executes commands of programs as Redis does, but for time and chance", () =>
    Effect.gen(function*() {
      const answers: Array<unknown> = []
      const ask = (command: string, ...args: ReadonlyArray<string | number>) =>
        Effect.flatMap(Redis.Redis, (redis) => redis.send(command, ...args)).pipe(
          Effect.catchTag("RedisError", ({ message }) => Effect.succeed(message)),
          Effect.map((answer) => answers.push(answer))
        )
      yield* Simulation.run(() =>
        Effect.gen(function*() {
          yield* ask("XADD", "x", "5-1", "field", "*")
          yield* ask("xadd", "x", "NOMKSTREAM", "MAXLEN", "~", 10, "*", "LIMIT", "*")
          yield* ask("XRANGE", "x", "-", "+")
          yield* ask("SADD", "s", "b", "a")
          yield* ask("SRANDMEMBER", "s")
          yield* ask("SRANDMEMBER", "s", -3)
          yield* ask("SET", "k", "v", "PX", 100)
          yield* ask("RENAME", "k", "other")
          yield* ask("SET", "k", "v", "EX", 0)
          yield* Effect.sleep("200 millis")
          yield* ask("GET", "other")
          yield* ask("FLUSHALL")
        }), { processes: 1, faults: [], steps: 0 })
      assert.deepStrictEqual(answers.slice(0, 8), [
        "5-1",
        "1800000000000-0",
        [["5-1", ["field", "*"]], ["1800000000000-0", ["LIMIT", "*"]]],
        2,
        "a",
        ["a", "b", "a"],
        "OK",
        "OK"
      ])
      assert.match(String(answers[8]), /SET with the error ERR/)
      assert.isNull(answers[9])
      assert.match(String(answers[10]), /cannot be simulated/)
    }))

  it.effect("refuses what programs write while Redis is full, and says what cannot be simulated", () =>
    Effect.gen(function*() {
      const reasons = new Set<string>()
      const tried = (command: string, ...args: ReadonlyArray<string | number>) =>
        Effect.flatMap(Redis.Redis, (redis) => redis.send(command, ...args)).pipe(
          Effect.tapError((error) =>
            Effect.sync(() => reasons.add(`${command}: ${error.reason._tag} ${error.message}`))
          ),
          Effect.ignore
        )
      yield* Simulation.run(
        ({ isStopping }) =>
          Effect.gen(function*() {
            yield* tried("EVAL", "return 1", 0)
            while (!isStopping()) yield* tried("SET", "k", "v").pipe(Effect.andThen(tried("GET", "k")))
          }),
        { faults: ["memory"] }
      )
      const all = [...reasons].join("\n")
      assert.match(all, /EVAL: .*cannot be simulated/)
      assert.match(all, /SET: .*OutOfMemory/)
      assert.notMatch(all, /GET: OutOfMemory/)
    }))

  it.effect("refuses what goes by the real time of Redis, and answers the rest about groups", () =>
    Effect.gen(function*() {
      const answers = new Map<string, unknown>()
      const refused = [
        "XAUTOCLAIM x g d 60000 0",
        "xclaim x g d 60000 1-1",
        "XPENDING x g - + 10",
        "XPENDING x g IDLE 60000 - + 10",
        "XINFO CONSUMERS x g",
        "xinfo stream x full",
        "XREADGROUP GROUP g c CLAIM 100 STREAMS x >",
        "OBJECT IDLETIME x",
        "OBJECT freq x",
        "INFO memory",
        "MEMORY USAGE x",
        "SLOWLOG GET",
        "LATENCY LATEST",
        "LOLWUT"
      ]
      const admitted = ["XREADGROUP GROUP g CLAIM STREAMS x >", "XPENDING x g", "XINFO GROUPS x", "OBJECT ENCODING x"]
      yield* Simulation.run(() =>
        Effect.gen(function*() {
          const { send } = yield* Redis.Redis
          yield* send("XADD", "x", "1-1", "field", "value")
          yield* send("XGROUP", "CREATE", "x", "g", 0)
          for (const line of [...admitted, ...refused]) {
            const [command, ...args] = line.split(" ")
            const answer = yield* Effect.match(send(command!, ...args), {
              onFailure: ({ message }) => message,
              onSuccess: (reply) => reply
            })
            answers.set(line, answer)
          }
        }), { processes: 1, faults: [], steps: 0 })
      for (const line of refused) assert.match(String(answers.get(line)), /cannot be simulated/, line)
      assert.deepStrictEqual(answers.get(admitted[1]!), [1, "1-1", "1-1", [["CLAIM", "1"]]])
      for (const line of admitted) assert.notMatch(String(answers.get(line)), /simulated|ERR/, line)
    }))

  it.effect("answers in the same order each time, and refuses what has another one, or what a cluster refuses", () =>
    Effect.gen(function*() {
      const found: Array<unknown> = []
      const letters = "hcadefbg".split("")
      const options = { processes: 1, faults: [], steps: 0, cluster: true } as const
      yield* Simulation.run(() =>
        Effect.gen(function*() {
          const { send } = yield* Redis.Redis
          const said = (command: string, ...args: ReadonlyArray<string>) =>
            Effect.matchEffect(send(command, ...args), {
              onFailure: ({ message }) => Effect.sync(() => found.push(message)),
              onSuccess: (reply) => Effect.sync(() => found.push(reply))
            })
          yield* send("SADD", "set", ...letters)
          for (const letter of letters) yield* send("SET", `key ${letter}`, "1")
          yield* said("SMEMBERS", "set")
          yield* said("KEYS", "key *")
          for (const refused of ["SCAN 0", "SSCAN set 0", "LASTSAVE", "FUNCTION LIST", "MSET a 1 b 2", "DEL a b"]) {
            const [command, ...args] = refused.split(" ")
            yield* said(command!, ...args)
          }
          yield* said("DEL", "{a}b", "{a}c")
        }), options)
      const sorted = letters.toSorted()
      assert.deepStrictEqual(found.slice(0, 2), [sorted, sorted.map((letter) => `key ${letter}`)])
      for (const message of found.slice(2, 6)) assert.match(String(message), /cannot be simulated/)
      for (const message of found.slice(6, 8)) assert.match(String(message), /CROSSSLOT/)
      assert.strictEqual(found[8], 0)
    }))

  it.effect("starts no program again that has ended, and forgets no failure in a crash", () =>
    Effect.gen(function*() {
      for (const seed of [1, 2, 3, 4, 5]) {
        const starts = [0, 0]
        // The first one ends at once.
        const program = ({ isStopping, place }: Simulation.Process) =>
          Effect.gen(function*() {
            starts[place]!++
            while (place > 0 && !isStopping()) yield* Effect.sleep(1)
          })
        const options = { seed, processes: 2, faults: ["crash"], faultEvery: 5, steps: 100 } as const
        yield* Simulation.run(program, options)
        assert.strictEqual(starts[0], 1)
        assert.isAbove(starts[1]!, 1)
        const failing = (process: Simulation.Process) =>
          process.place === 0 ? Effect.fail("always") : Effect.andThen(Effect.sleep("20 millis"), program(process))
        const failed = yield* Effect.flip(Simulation.run(failing, options))
        assert.include(failed.reason, "always")
        assert.match(failed.story.at(-1)!, /: fails: .*always/)
      }
    }))

  it.effect("ends a process that crashes without finalizers, whatever breaks later", () =>
    Effect.gen(function*() {
      const ended = () => {
        const newest = new Map<number, string>()
        let found: string | undefined
        return {
          program: ({ isStopping, name, place }: Simulation.Process) =>
            Effect.gen(function*() {
              newest.set(place, name)
              const { send } = yield* Redis.Redis
              yield* Effect.promise(() => Promise.resolve())
              while (!isStopping()) {
                yield* Effect.ensuring(
                  Effect.ignore(send("INCR", "n")),
                  Effect.sync(() => {
                    if (newest.get(place) !== name) {
                      found ??= `${name} goes on, and ${newest.get(place)} is in its place`
                    }
                  })
                )
                yield* Effect.sleep("1 millis")
              }
            }),
          invariant: () => found
        }
      }
      yield* Simulation.explore(ended, {
        schedules: runs(32),
        faults: ["crash", "restart", "lost requests", "lost replies"],
        faultEvery: 8,
        calm: "50 millis"
      })
    }))

  it.effect("shortens a failure to one of the same kind, and shows what broke before it", () =>
    Effect.gen(function*() {
      const make = () => {
        let broken = false
        return {
          // Most schedules make it fail, too.
          program: ({ isStopping }: Simulation.Process) =>
            Effect.gen(function*() {
              const redis = yield* Redis.Redis
              const send = redis.send("PING")
              while (!isStopping()) {
                yield* Effect.andThen(broken ? Effect.retry(send, { times: 3 }) : send, Effect.sleep(1))
              }
            }).pipe(
              Effect.tapError(() =>
                Effect.sync(() => {
                  broken = true
                })
              ),
              Effect.retry({ times: 1 })
            ),
          invariant: () => broken ? "it is broken" : undefined
        }
      }
      const failed = yield* Effect.flip(
        Simulation.explore(make, { schedules: 20, faults: ["cut", "lost replies", "clock"] })
      )
      assert.strictEqual(failed.reason, "it is broken")
      const faults = failed.story.filter((line) => line.includes(" fault: "))
      assert.isAtMost(faults.length, 2)
      for (const line of [...faults, failed.story.at(-1)!]) assert.include(failed.message, line)
      assert.match(failed.story.at(-1)!, /check: it is broken/)
    }))

  it.effect("names the fault of a story that is too long to show", () =>
    Effect.gen(function*() {
      const program = ({ isStopping, place }: Simulation.Process) =>
        Effect.gen(function*() {
          yield* Effect.retry(Effect.flatMap(Redis.Redis, (redis) => redis.send("PING")), { times: 3 })
          while (!isStopping()) yield* Effect.sleep(1)
          if (place === 0) yield* Effect.never
        })
      const { message, reason, story } = yield* Effect.flip(
        Simulation.run(program, { faults: ["cut"], faultEvery: 20, steps: 100 })
      )
      assert.match(reason, /^a1 did not end, and nothing can happen any more/)
      assert.isAbove(story.length, 300)
      const lines = message.split("\n")
      assert.isAtMost(lines.length, 300)
      for (const line of story.filter((line) => / (fault|world): /.test(line))) assert.include(lines, line)
      assert.match(message, /\n +… \d+ more\n/)
    }))

  it.effect("gives each process a host of its own", () =>
    Effect.gen(function*() {
      const found: Array<unknown> = []
      const program = () =>
        Effect.gen(function*() {
          yield* Lock.acquire("a")
          found.push(Option.map(yield* Lock.holder("a"), ({ host, node, pid }) => ({ host, node, pid })))
        }).pipe(Effect.scoped, Effect.provide(Coordinator.layer()))
      yield* Simulation.run(program, { processes: 2, faults: [], steps: 0 })
      const of = (host: string) => Option.some({ host, node: `${host}:1`, pid: 1 })
      assert.sameDeepMembers(found, [of("a1"), of("b2")])
    }))

  it.effect("reports a whole schedule where no shorter one fails", () =>
    Effect.gen(function*() {
      assert.isUndefined(yield* Effect.promise(() => shrink({ start: [1], rounds: [] }, async () => undefined, 10)))
    }))

  it.effect("moves slots of a cluster", () =>
    Effect.gen(function*() {
      const report = yield* Simulation.explore(scenario(true), {
        schedules: runs(8),
        cluster: true,
        faults: remembering,
        faultEvery: 10
      })
      assert.strictEqual(report.schedules, runs(8))
    }))

  it.effect("refuses options that make no sense", () =>
    Effect.gen(function*() {
      for (
        const options of [
          { processes: 0 },
          { steps: -1 },
          { faults: ["earthquake" as "cut"] },
          { faultEvery: 0.5 },
          { faults: "cut" as never },
          { seed: 2 ** 32 },
          { calm: Number.NaN },
          { calm: Number.POSITIVE_INFINITY },
          { patience: Number.POSITIVE_INFINITY },
          { patience: "2 parsecs" as never },
          { choices: [Number.NaN] },
          { choices: 5 as never },
          { calm: null as never },
          { cluster: "yes" as never },
          { delays: 1 as never },
          { invariant: 5 as never },
          null as never
        ]
      ) {
        const exit = yield* Effect.exit(Simulation.run(() => Effect.void, options))
        assert.isTrue(Exit.isFailure(exit) && String(exit.cause).includes("RangeError"), JSON.stringify(options))
      }
      const exit = yield* Effect.exit(Simulation.explore(() => undefined as never))
      assert.isTrue(Exit.isFailure(exit) && String(exit.cause).includes("RangeError: program must be a function"))
    }))

  it.effect("delays nothing that is not broken, if it is told so", () =>
    Effect.gen(function*() {
      const slowest = (delays: boolean) => {
        let millis = 0
        const program = ({ isStopping, now }: Simulation.Process) =>
          Effect.gen(function*() {
            const { send } = yield* Redis.Redis
            while (!isStopping()) {
              const from = now()
              yield* Effect.retry(send("PING"), { times: 20 })
              millis = Math.max(millis, now() - from)
              yield* Effect.sleep("1 second")
            }
          })
        return Effect.as(Simulation.run(program, { faults: [], delays }), () => millis)
      }
      assert.isBelow((yield* slowest(false))(), 5)
      assert.isAbove((yield* slowest(true))(), 5)
    }))

  it.effect("shortens a failure of what was chosen when all was healed", () =>
    Effect.gen(function*() {
      const make = () => {
        const answered: Array<number> = []
        return {
          program: ({ isStopping, place }: Simulation.Process) =>
            Effect.gen(function*() {
              const { send } = yield* Redis.Redis
              while (!isStopping()) yield* Effect.sleep("100 millis")
              yield* Effect.retry(send("PING"), { times: 20 })
              answered.push(place)
            }),
          // The first possibility is always the first process.
          invariant: () => answered[0] === 2 ? "the last one is first" : undefined
        }
      }
      const faults = ["cut", "clock"] as const
      const { choices, seed, steps, story } = yield* Effect.flip(Simulation.explore(make, { faults, faultEvery: 10 }))
      assert.isBelow(steps, 10)
      assert.deepStrictEqual(story.filter((line) => line.includes(" fault: ")), [])
      const { invariant, program } = make()
      const options = { faults, faultEvery: 10, seed, steps, choices, invariant }
      assert.deepStrictEqual((yield* Effect.flip(Simulation.run(program, options))).story, story)
    }))

  it.effect("shows what happens in front of a hang, rather than the heartbeats behind that", () =>
    Effect.gen(function*() {
      const { message, story } = yield* Effect.flip(
        Simulation.run(({ isStopping }) =>
          Effect.gen(function*() {
            const permits = yield* Semaphore.make({ name: "a", permits: 1 })
            while (!isStopping()) yield* Effect.sleep("100 millis")
            yield* permits.withPermit(permits.withPermit(Effect.void))
          }).pipe(Effect.scoped, Effect.provide(Coordinator.layer())), { processes: 1, steps: 0 })
      )
      assert.isAbove(story.length, 200)
      assert.match(message, /did not end within 60000 simulated milliseconds of `isStopping\(\)`/)
      assert.match(message, /semaphore\.take of semaphore:a\n.*\n.*semaphore\.take of semaphore:a\n/)
      assert.notMatch(message, /: timer\n.*: timer\n.*: timer\n/)
    }))
})

layer(Redis.layerEmbedded(), { excludeTestServices: true })("schedules", (it) => {
  it.effect("execute what is about a slot that migrates where its keys are, and nothing that is about keys of both servers", () =>
    Effect.gen(function*() {
      const machine = new Machine(connectionsOf(yield* Redis.Redis).commands)
      const server = new Server(machine, 0, () => 0)
      const ask = (command: string, ...args: ReadonlyArray<string>) =>
        Effect.promise(() => server.execute({ is: "command", command, args }))
      yield* Effect.promise(() => server.flush())
      for (const key of ["{a}:1", "{a}:2", "{b}:1"]) yield* ask("SET", key, key)
      yield* Effect.promise(() => server.beginMigration("{a}").move((key) => key === "{a}:1"))
      assert.deepStrictEqual(yield* ask("GET", "{a}:1"), "{a}:1")
      assert.deepStrictEqual(yield* ask("GET", "{a}:2"), "{a}:2")
      assert.deepStrictEqual(yield* ask("MGET", "{b}:1"), ["{b}:1"])
      const refused = yield* Effect.exit(
        Effect.tryPromise(() => server.execute({ is: "command", command: "MGET", args: ["{a}:1", "{a}:2"] }))
      )
      assert.include(String(refused), "TRYAGAIN")
      // New keys are those of the other server.
      yield* ask("SET", "{a}:3", "{a}:3")
      assert.deepStrictEqual(yield* ask("MGET", "{a}:1", "{a}:3"), ["{a}:1", "{a}:3"])
      yield* Effect.promise(() => server.endMigration())
      assert.deepStrictEqual(yield* ask("MGET", "{a}:1", "{a}:2", "{a}:3"), ["{a}:1", "{a}:2", "{a}:3"])
    }))

  it.effect("of the same seed are the same", () =>
    Effect.gen(function*() {
      const machine = new Machine(connectionsOf(yield* Redis.Redis).commands)
      const library = yield* Effect.promise(() => load(original))
      const options: Options = { seed: 7, only: ["lock", "topic", "queue"], steps: 300 }
      const run = (database: number) => simulate(options, library, machine, database)
      const [first, second] = yield* Effect.promise(() => Promise.all([run(0), run(1)]))
      const third = yield* Effect.promise(() => run(0))
      assert.deepStrictEqual(second.trace(), first.trace())
      assert.deepStrictEqual(third.trace(), first.trace())
    }))

  it("of the same seed are the same in every process, on every machine", async () => {
    const main = fileURLToPath(new URL("./simulation/main.ts", import.meta.url))
    // What differs between machines: the time zone, the language, and how the engine hashes.
    const digests = (TZ: string, LANG: string, hashSeed: number) =>
      execFileSync(
        process.execPath,
        [`--hash-seed=${hashSeed}`, "--disable-warning=ExperimentalWarning", main, "--seed", "11", "--count", "8"],
        { encoding: "utf8", env: { ...process.env, TZ, LANG } }
      ).split("\n").filter((line) => /^seed \d+: /.test(line)).sort()
    const here = digests("UTC", "C", 1)
    assert.lengthOf(here, 8)
    assert.deepStrictEqual(digests("Asia/Kathmandu", "tr_TR.UTF-8", 2), here)
    // As on the machine where they were written down. What changes the course of schedules writes them anew, with `-u`.
    await expect(`${here.join("\n")}\n`).toMatchFileSnapshot("./simulation/digests.txt")
  }, 60_000)

  it.effect("reach what they have always reached", () =>
    Effect.gen(function*() {
      const machine = new Machine(connectionsOf(yield* Redis.Redis).commands)
      const library = yield* Effect.promise(() => load(original))
      const { pairs, rare } = expected()
      const reached = yield* Effect.promise(() => reach(library, machine))
      const now = new Set(reached.reachedBy(1))
      assert.deepStrictEqual(pairs.filter((pair) => !now.has(pair)), [])
      assert.deepStrictEqual(missing(reached).filter((verb) => !rare.includes(verb)), [])
    }), 60_000)

  for (const file of fs.existsSync(saved) ? fs.readdirSync(saved) : []) {
    it.effect(`that went wrong once: ${file}`, () =>
      Effect.gen(function*() {
        const machine = new Machine(connectionsOf(yield* Redis.Redis).commands)
        const library = yield* Effect.promise(() => load(original))
        const options = JSON.parse(fs.readFileSync(new URL(file, saved), "utf8")) as Options
        const { anomalies } = yield* Effect.promise(() => simulate(options, library, machine, 0))
        assert.deepStrictEqual(anomalies.map(({ check, detail }) => `${check}: ${detail}`), [])
      }))
  }
})
