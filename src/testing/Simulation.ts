/**
 * Runs whole fleets of processes in one process, and repeats what they did: their clocks, timers, connections and faults are simulated,
 * Redis is a real one, and a seed decides what happens next.
 *
 * **Guarantees**
 *
 * - The same seed, program and options give the same schedule, step by step.
 * - Processes see what they can see in production: lost replies, half-open connections, late requests, pauses longer than the lease,
 *   clocks that are set, fail-overs that forget. No time passes in vain: an hour of leases takes a second.
 * - The error of a schedule that fails tells its story. `explore` looks for a shorter schedule that fails first.
 *
 * **Gotchas**
 *
 * - The actions of a program outside of Effect's `Clock`, `Random` and Lockstep are not simulated: no timers of Node.js, no
 *   `Date.now`, no other connections.
 * - A process that has crashed is replaced by another one, which runs the program from its beginning.
 * - Programs have to end when `isStopping()` is true. One that does not within `patience` has failed: that is how lost wake-ups show.
 * - Until everything is healed, time may pass while requests and replies are on their way: leases and timeouts can end without a fault.
 * - It needs a `redis-server` or `valkey-server`, as `Redis.layerEmbedded`.
 *
 * **Example** (A lock that three processes share)
 *
 * ```ts
 * import { Coordinator, Lock } from "lockstep"
 * import { Simulation } from "lockstep/testing"
 * import { Effect } from "effect"
 *
 * const scenario = () => {
 *   let inside = 0
 *   return {
 *     program: ({ isStopping }: Simulation.Process) =>
 *       Effect.gen(function*() {
 *         while (!isStopping()) {
 *           yield* Effect.acquireUseRelease(
 *             Effect.sync(() => inside++),
 *             () => Effect.sleep("10 millis"),
 *             () => Effect.sync(() => inside--)
 *           ).pipe(Lock.withLock("shared"), Effect.ignore)
 *         }
 *       }).pipe(
 *         Effect.provide(Coordinator.layer()),
 *         // It is started while things are broken, too.
 *         Effect.retry({ while: () => !isStopping() })
 *       ),
 *     invariant: () => inside > 1 ? `${inside} are inside` : undefined
 *   }
 * }
 *
 * export const test = Simulation.explore(scenario, { schedules: 100, faults: ["cut", "lost replies"] }).pipe(
 *   Effect.provide(Simulation.layer)
 * )
 * ```
 *
 * @since 0.1.0
 */

import * as Cause from "effect/Cause"
import * as Context from "effect/Context"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Layer from "effect/Layer"
import type * as Option from "effect/Option"
import * as Schema from "effect/Schema"
import * as Semaphore from "effect/Semaphore"
import { flag } from "../internal/hold/place.ts"
import { millisIn } from "../internal/io.ts"
import { connectionsOf } from "../internal/redis/connection.ts"
import { type Course, randomOf, seedOf } from "../internal/simulation/choices.ts"
import { type Fault, faults as allFaults } from "../internal/simulation/faults.ts"
import { databases, Machine } from "../internal/simulation/machine.ts"
import { shrink } from "../internal/simulation/shrink.ts"
import { type Outcome, Simulation } from "../internal/simulation/simulation.ts"
import { prettyOf, textOf } from "../internal/text.ts"
import * as Redis from "../Redis.ts"

/**
 * The faults:
 *
 * - `cut`: a connection breaks. Requests and replies under way on it are lost, and the requests may be executed later.
 * - `lost requests`, `lost replies`: a connection is half-open in one direction.
 * - `lost event`: an event does not reach the mailbox of its session.
 * - `crash`: a process ends at once, and another one starts in its place.
 * - `pause`: a process stands still for 50 milliseconds to 5 seconds.
 * - `interrupt`: something is interrupted that is `interruptible`.
 * - `clock`, `server clock`: the wall clock of a process is set by 3 seconds, that of Redis back by up to 100 milliseconds.
 * - `library`, `memory`, `migration`: Redis forgets its functions, is out of memory, or refuses calls as while a slot
 *   migrates. In a `cluster`, a slot does.
 * - `restart`: Redis starts again, with its data.
 * - `flush`, `empty restart`, `fail-over`: Redis forgets everything, also as it starts again, or the last calls.
 *
 * @category models
 * @since 0.1.0
 */
export type { Fault }

/**
 * All faults.
 *
 * @category constants
 * @since 0.1.0
 */
export const faults: ReadonlyArray<Fault> = allFaults

/**
 * One of the simulated processes, for its program.
 *
 * @category models
 * @since 0.1.0
 */
export interface Process {
  readonly name: string
  /** From 0 on: a process that has crashed is replaced by one with the same place. */
  readonly place: number
  /** From 0 up to below 1, by the seed. */
  readonly random: () => number
  /** Milliseconds since the beginning of the schedule. */
  readonly now: () => number
  /** Whether the program has to end. */
  readonly isStopping: () => boolean
  /** Lets the fault `interrupt` interrupt an effect at any step; that answers `None` then. */
  readonly interruptible: <A, E, R>(self: Effect.Effect<A, E, R>) => Effect.Effect<Option.Option<A>, E, R>
}

/**
 * The program of each process, and an invariant.
 *
 * @category models
 * @since 0.1.0
 */
export interface Scenario {
  /** The program of each process. Its failure is that of the schedule. */
  readonly program: (process: Process) => Effect.Effect<unknown, unknown, Redis.Redis>
  /** The condition that must hold after each step: answers the violation, if there is one, or throws it. */
  readonly invariant?: (() => string | undefined) | undefined
}

/**
 * @category models
 * @since 0.1.0
 */
export interface Options {
  /** Default 1. */
  readonly seed?: number | undefined
  /** How many processes there are. Default 3. */
  readonly processes?: number | undefined
  /** Whether Redis is a cluster: then `migration` moves a slot, key by key. Default `false`. */
  readonly cluster?: boolean | undefined
  /** How long things break. A step is anything that happens by itself, as the arrival of a reply. Default 300. */
  readonly steps?: number | undefined
  /** The faults that happen. Default: all, which includes that Redis forgets. */
  readonly faults?: ReadonlyArray<Fault> | undefined
  /** Something breaks once in so many steps. Default 40. */
  readonly faultEvery?: number | undefined
  /**
   * Whether time may pass while requests and replies are on their way, until everything is healed: then leases and timeouts can end
   * without a fault. Default `true`.
   */
  readonly delays?: boolean | undefined
  /** How long the programs go on when everything is healed, in simulated time. Default 2 seconds. */
  readonly calm?: Duration.Input | undefined
  /** How long they may take to end then, in simulated time. Default 1 minute. */
  readonly patience?: Duration.Input | undefined
}

/**
 * The report of schedules without a failure.
 *
 * @category models
 * @since 0.1.0
 */
export interface Report {
  readonly schedules: number
  readonly steps: number
  /** How long it was for the processes. */
  readonly simulated: Duration.Duration
}

// Of a story that is longer than that, a message has what happens at its end, and what breaks before, with a few lines in front.
const [longest, shownAtEnd, shownInFront, mostShown] = [200, 100, 3, 60]

const isTold = (line: string): boolean =>
  /^ *[\d.]+ (?:fault: |world: |redis: late (?!session\.renew$)|\w+: (?:ends$|fails: ))/.test(line)

// What a process does while nothing happens: its timers, its heartbeats, and a read that brings nothing.
const isIdle = (line: string): boolean =>
  /: (?:timer|reader XREAD .*|reader is answered null|commands (?:is answered .{0,8}\["renewed"|session\.renew\b).*)$/
    .test(line)

const abridged = (story: ReadonlyArray<string>): ReadonlyArray<string> => {
  if (story.length <= longest) return story
  const shown = new Set<number>()
  for (const at of story.flatMap((line, at) => isTold(line) ? [at] : []).slice(-mostShown)) {
    for (let line = Math.max(0, at - shownInFront); line <= at; line++) shown.add(line)
  }
  for (const at of story.flatMap((line, at) => isIdle(line) ? [] : [at]).slice(-shownAtEnd)) shown.add(at)
  const lines: Array<string> = []
  let next = 0
  for (const at of [...shown].sort((a, b) => a - b)) {
    if (at > next) lines.push(`           … ${at - next} more`)
    lines.push(story[at]!)
    next = at + 1
  }
  return lines
}

/**
 * A schedule has failed: a program failed or did not end, or an invariant did not hold. The message tells the story. `run` repeats it:
 * with the same options, and the `seed`, the `steps` and the `choices` of this error.
 *
 * @category errors
 * @since 0.1.0
 */
export class SimulationFailed extends Schema.Error<SimulationFailed>("lockstep/testing/SimulationFailed")({
  _tag: Schema.tag("SimulationFailed"),
  seed: Schema.Number,
  steps: Schema.Number,
  /** Those of a schedule that was shortened, and behind them the first possibility each time; otherwise they are as the seed chooses. */
  choices: Schema.UndefinedOr(Schema.Array(Schema.Number)),
  reason: Schema.String,
  /** One line for each step, with the time in milliseconds. */
  story: Schema.Array(Schema.String)
}) {
  override get message(): string {
    const choices = JSON.stringify(this.choices)
    const count = this.choices?.length ?? 0
    const shown = choices === undefined
      ? ""
      : choices.length <= 2000
      ? `, choices ${choices}`
      : `, and the ${count} \`choices\` of this error; or by \`explore\` with this seed and its own steps`
    return `${this.reason} (seed ${this.seed}, steps ${this.steps}${shown})\n${abridged(this.story).join("\n")}`
  }
}

/**
 * The Redis that schedules run in, up to 16 at once.
 *
 * @category services
 * @since 0.1.0
 */
export class Simulator extends Context.Service<Simulator, {
  readonly "~lockstep/testing/Simulator": "~lockstep/testing/Simulator"
}>()("lockstep/testing/Simulator") {}

type Lend = <A>(f: (machine: Machine, database: number, signal: AbortSignal) => Promise<A>) => Effect.Effect<A>

// A simulator as this module sees it: it lends databases.
const lenders = new WeakMap<object, Lend>()

/**
 * A private Redis for schedules.
 *
 * @category layers
 * @since 0.1.0
 */
export const layer: Layer.Layer<Simulator, Redis.RedisError> = Layer.effect(
  Simulator,
  Effect.gen(function*() {
    const { commands } = connectionsOf(yield* Redis.Redis)
    const turns = yield* Semaphore.make(databases)
    const free = Array.from({ length: databases }, (_, at) => at)
    const simulator = Simulator.of({ "~lockstep/testing/Simulator": "~lockstep/testing/Simulator" })
    const machine = new Machine(commands)
    lenders.set(simulator, (f) =>
      turns.withPermits(1)(Effect.acquireUseRelease(
        Effect.sync(() => free.pop()!),
        (database) =>
          Effect.callback<any>((resume, signal) => {
            const ended = f(machine, database, signal).then(
              (value) => resume(Effect.succeed(value)),
              (cause: unknown) => resume(Effect.die(cause))
            )
            // The database is free when the schedule has ended.
            return Effect.promise(() => ended)
          }),
        (database) => Effect.sync(() => void free.push(database))
      )))
    return simulator
  })
).pipe(Layer.provide(Redis.layerEmbedded()))

/** Uses a database of the simulator. */
const lent = <A>(
  f: (machine: Machine, database: number, signal: AbortSignal) => Promise<A>
): Effect.Effect<A, never, Simulator> =>
  Effect.flatMap(Simulator, (simulator) => {
    const lend = lenders.get(simulator)
    if (lend === undefined) throw new TypeError("This Simulator was not made by Simulation.layer")
    return lend(f)
  })

interface Settings {
  readonly seed: number
  readonly processes: number
  readonly cluster: boolean
  readonly steps: number
  readonly faults: ReadonlyArray<Fault>
  readonly every: number
  readonly delays: boolean
  readonly calm: number
  readonly patience: number
}

// So many steps when all is healed are a program that runs in circles.
const mostSteps = 1_000_000

const whole = (value: number, what: string, least: number, most: number): number => {
  if (!Number.isSafeInteger(value) || value < least || value > most) {
    throw new RangeError(`${what} must be a whole number from ${least} to ${most}`)
  }
  return value
}

const durationOf = (input: Duration.Input, what: string): number => {
  const value = millisIn(input)
  // The programs of a calm without an end would go on for ever.
  if (!(value >= 0 && value < Number.POSITIVE_INFINITY)) throw new RangeError(`${what} must be a finite duration`)
  return value
}

// Generators of random numbers have so many states.
const seeds = 2 ** 32

const settingsOf = (options: Options): Settings => {
  if (typeof options !== "object" || options === null) throw new RangeError("options must be an object")
  const { cluster = false, delays = true, faultEvery = 40, faults = allFaults, processes = 3, seed = 1, steps = 300 } =
    options
  const { calm = "2 seconds", patience = "1 minute" } = options
  if (!Array.isArray(faults)) throw new RangeError(`faults must be an array of ${allFaults.join(", ")}`)
  const unknown = faults.find((fault) => !allFaults.includes(fault))
  if (unknown !== undefined) {
    throw new RangeError(`faults must be of ${allFaults.join(", ")}: ${String(unknown)} is not`)
  }
  return {
    seed: whole(seed, "seed", 0, seeds - 1),
    processes: whole(processes, "processes", 1, 26),
    cluster: flag(cluster, "cluster"),
    steps: whole(steps, "steps", 0, 1_000_000),
    faults,
    every: whole(faultEvery, "faultEvery", 2, 1_000_000),
    delays: flag(delays, "delays"),
    calm: durationOf(calm, "calm"),
    patience: durationOf(patience, "patience")
  }
}

const checked = (scenario: Scenario): Scenario => {
  if (typeof scenario?.program !== "function") throw new RangeError("program must be a function, of a process")
  const { invariant } = scenario
  if (invariant !== undefined && typeof invariant !== "function") throw new RangeError("invariant must be a function")
  return scenario
}

// One that throws, as an assertion does, does not hold either.
const held = (invariant: () => string | undefined): string | undefined => {
  try {
    const answer: unknown = invariant()
    return answer === undefined || typeof answer === "string" ? answer : `the invariant answered ${String(answer)}`
  } catch (error) {
    return `the invariant has failed: ${textOf(error)}`
  }
}

/** How a schedule is repeated. */
interface Again {
  readonly choices?: ReadonlyArray<number> | undefined
  readonly course?: Course | undefined
}

const simulated = (
  scenario: Scenario,
  settings: Settings,
  machine: Machine,
  database: number,
  again: Again,
  verbose: boolean,
  signal: AbortSignal
): Promise<Outcome> => {
  const { calm, cluster, delays, every, faults, patience, processes, seed, steps } = settings
  const { invariant, program } = checked(scenario)
  const simulation = new Simulation(
    {
      seed,
      ...again,
      processes,
      cluster,
      steps,
      every,
      faults,
      prompt: !delays,
      patience,
      mostSteps,
      isCalm: (healed, now) => now > healed + calm,
      check: invariant && (() => held(invariant)),
      verbose,
      signal,
      program: (process, place, isStopping) => {
        const random = randomOf(seedOf(seed, 1000 + simulation.members.length))
        const now = () => simulation.world.now
        const { name } = process
        const interruptible: Process["interruptible"] = (self) => process.interruptible(self)
        return Effect.suspend(() => Effect.asVoid(program({ name, place, random, now, isStopping, interruptible })))
      }
    },
    machine,
    database
  )
  return simulation.run()
}

interface Failure {
  readonly reason: string
  /** Two of one kind are one failure. */
  readonly kind: string
}

const failureOf = (
  { defect, endless, failed, failure, hung, stuck }: Outcome,
  patience: number
): Failure | undefined => {
  if (defect !== undefined) return { reason: defect, kind: "defect" }
  if (failure !== undefined) return { reason: failure, kind: "invariant" }
  if (endless !== undefined) return { reason: endless, kind: "endless" }
  const exit = failed?.exit
  if (exit !== undefined && Exit.isFailure(exit)) {
    const error = Cause.squash(exit.cause) as { readonly _tag?: unknown; readonly name?: unknown } | undefined
    return {
      reason: `${failed!.process.name} has failed: ${prettyOf(exit.cause)}`,
      kind: `failed: ${String(error?._tag ?? error?.name)}`
    }
  }
  if (hung.length === 0) return undefined
  const names = hung.map(({ process }) => process.name).join(", ")
  return {
    reason: stuck
      ? `${names} did not end, and nothing can happen any more: what is waited for never comes, or is not simulated`
      : `${names} did not end within ${patience} simulated milliseconds of \`isStopping()\``,
    kind: "hung"
  }
}

const failedWith = (
  reason: string,
  { trace }: Outcome,
  { seed, steps }: Settings,
  choices: ReadonlyArray<number> | undefined
): SimulationFailed => new SimulationFailed({ seed, steps, choices, reason, story: trace() })

// Of one failure: how often a shorter schedule is tried, and for how long, in milliseconds.
const [shrinks, longestShrinking] = [500, 10_000]

const shortened = async (
  make: () => Scenario,
  settings: Settings,
  machine: Machine,
  database: number,
  first: Outcome,
  signal: AbortSignal
): Promise<SimulationFailed> => {
  const kindOf = (outcome: Outcome) => failureOf(outcome, settings.patience)?.kind
  const kind = kindOf(first)
  const spent = AbortSignal.any([signal, AbortSignal.timeout(longestShrinking)])
  const best = await shrink(
    first.course,
    async (course) => {
      const own = { ...settings, steps: course.rounds.length }
      const outcome = await simulated(make(), own, machine, database, { course }, false, spent)
      return !spent.aborted && kindOf(outcome) === kind ? outcome.course : undefined
    },
    shrinks,
    () => spent.aborted
  )
  // Where no shorter schedule fails, it is the whole one, as its seed chooses.
  const { choices, steps } = best ?? { choices: undefined, steps: settings.steps }
  const own = { ...settings, steps }
  const outcome = await simulated(make(), own, machine, database, { choices }, true, signal)
  const reason = failureOf(outcome, settings.patience)?.reason ??
    "It has failed, and not again: something in the program is not simulated"
  return failedWith(reason, outcome, own, choices)
}

/**
 * Tries schedules with one seed after another, some of them at once, and fails with the shortest one that it can make of the
 * first that fails. The scenario is made anew for each of them: data that it shares with others, as a variable of its module, is
 * not simulated.
 *
 * @category combinators
 * @since 0.1.0
 */
export const explore = (
  make: () => Scenario,
  options: Options & {
    /** How many are tried. Default 100. */
    readonly schedules?: number | undefined
  } = {}
): Effect.Effect<Report, SimulationFailed, Simulator> =>
  Effect.gen(function*() {
    const settings = settingsOf(options)
    const schedules = whole(options.schedules ?? 100, "schedules", 1, Number.MAX_SAFE_INTEGER)
    let [steps, millis] = [0, 0]
    for (let at = 0; at < schedules; at += databases) {
      const some = Array.from({ length: Math.min(databases, schedules - at) }, (_, more) => ({
        ...settings,
        seed: (settings.seed + at + more) % seeds
      }))
      const outcomes = yield* Effect.forEach(
        some,
        (own) => lent((machine, database, signal) => simulated(make(), own, machine, database, {}, false, signal)),
        { concurrency: databases }
      )
      for (const [more, outcome] of outcomes.entries()) {
        steps += outcome.steps
        millis += outcome.now
        if (failureOf(outcome, settings.patience) === undefined) continue
        return yield* yield* lent((machine, database, signal) =>
          shortened(make, some[more]!, machine, database, outcome, signal)
        )
      }
    }
    return { schedules, steps, simulated: Duration.millis(millis) }
  })

/**
 * Runs one schedule, or repeats one that has failed. It is not shortened.
 *
 * @category combinators
 * @since 0.1.0
 */
export const run = (
  program: Scenario["program"],
  options: Options & Pick<Scenario, "invariant"> & {
    /** Those of a schedule that has failed. Default: as the seed chooses. */
    readonly choices?: ReadonlyArray<number> | undefined
  } = {}
): Effect.Effect<Report, SimulationFailed, Simulator> =>
  Effect.gen(function*() {
    const settings = settingsOf(options)
    const { choices, invariant } = options
    if (choices !== undefined && !Array.isArray(choices)) throw new RangeError("choices must be an array")
    for (const choice of choices ?? []) whole(choice, "each of choices", 0, Number.MAX_SAFE_INTEGER)
    const outcome = yield* lent((machine, database, signal) =>
      simulated({ program, invariant }, settings, machine, database, { choices }, true, signal)
    )
    const failure = failureOf(outcome, settings.patience)
    if (failure !== undefined) return yield* failedWith(failure.reason, outcome, settings, choices)
    return { schedules: 1, steps: outcome.steps, simulated: Duration.millis(outcome.now) }
  })
