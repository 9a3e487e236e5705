/** One schedule of the torture's workloads in a simulation, and what is wrong with its history. */
import { Cause, Effect, Exit, Option, Stream } from "effect"
import { type Course, randomOf, seedOf } from "../../src/internal/simulation/choices.ts"
import { type Fault, faults, type Incident } from "../../src/internal/simulation/faults.ts"
import type { Machine } from "../../src/internal/simulation/machine.ts"
import { epoch, type Process } from "../../src/internal/simulation/process.ts"
import type { Member, Outcome } from "../../src/internal/simulation/simulation.ts"
import type { History } from "../../src/testing.ts"
import type { Anomaly } from "../torture/checks.ts"
import { clientOf, type Settings } from "../torture/client.ts"
import type { Event } from "../torture/history.ts"
import { type Delays, judge } from "../torture/judgement.ts"
import type { Injected } from "../torture/schedule.ts"
import { gaveUp, type Workload } from "../torture/workload.ts"
import { workloads } from "../torture/workloads.ts"
import { Bodies } from "./bodies.ts"
import type { Coverage } from "./coverage.ts"
import { lasting, longAfter } from "./lasting.ts"
import type { Library } from "./library.ts"
import { Queues } from "./queues.ts"

/** What differs between schedules, beside what happens in which order. */
export interface Conditions {
  readonly faults: ReadonlyArray<Fault>
  /** A fault happens once in so many steps. */
  readonly every: number
  /** Of sessions, in milliseconds. */
  readonly lease: number
  /** How many of the bodies are long ones, 0 to 1. */
  readonly long: number
  /** Whether time passes only when there is nothing else to do, so that nothing is late but by a fault. */
  readonly prompt: boolean
  /** How long clients rest between two requests, in milliseconds: the longer, the more of a schedule's steps are about time. */
  readonly rest: number
}

export interface Options {
  readonly seed: number
  /** Empty for some of all workloads, which the seed chooses. */
  readonly only: ReadonlyArray<string>
  readonly steps: number
  /** Default `busy`. */
  readonly conditions?: Conditions | undefined
  /** The choices of a schedule that is repeated. */
  readonly choices?: ReadonlyArray<number> | undefined
  readonly course?: Course | undefined
  readonly verbose?: boolean | undefined
  readonly coverage?: Coverage | undefined
}

export interface Result extends Outcome {
  readonly anomalies: ReadonlyArray<Anomaly>
}

const settingsOf = (lease: number): Settings => ({ namespace: "simulated", lease, margin: lease / 5, partitions: 3 })

// In milliseconds: how long clients go on at most when all is healed, and how long they may take to stop then.
const [calm, patience] = [8000, 30_000]

// More steps than that after the healing are without end.
const mostSteps = 100_000

// Of clients between two requests when all is healed, in milliseconds.
const leastRest = 50

/** Every fault, often, and clients that do not rest. */
const busy: Conditions = { faults, every: 40, lease: 2000, long: 0.02, prompt: false, rest: 0 }

// Checks excuse most of what comes after these, so they are found by schedules without them.
const excusing: ReadonlySet<Fault> = new Set(["flush", "empty restart", "fail-over", "server clock"])

/**
 * A few of the faults, more or less often: each finds what all of them at once would hide. Some schedules have three times the usual
 * steps. With `only`, the faults are these.
 */
export const chosenBy = (
  seed: number,
  usual: number,
  only: ReadonlyArray<Fault> = []
): Pick<Options, "conditions" | "steps"> => {
  const random = randomOf(seedOf(seed, 1))
  const pick = <A>(items: ReadonlyArray<A>) => items[Math.floor(random() * items.length)]!
  const strict = random() < 0.6
  const chosen = faults.filter((fault) => !(strict && excusing.has(fault)) && random() < 0.6)
  const conditions = {
    faults: only.length > 0 ? only : chosen,
    every: pick([20, 40, 80, 160, 640]),
    lease: pick([2000, 2000, 500]),
    long: pick([0.02, 0.02, 0.3]),
    prompt: random() < 0.5
  }
  const steps = usual * pick([1, 1, 3])
  return { steps, conditions: { ...conditions, rest: pick([0, 0, 20, 100]) } }
}

// Processes do everything else at once.
const delays: Delays = { start: 0, fault: () => 200_000 }

/** What the clients of one schedule have recorded, by their names. */
class Records {
  readonly bodies = new Bodies()
  readonly #events = new Map<string, Array<History.Timed<Event>>>()
  readonly #kinds = new Map<string, string>()
  /** When each kind was granted last. */
  readonly #granted = new Map<string, number>()

  recorder(name: string, micros: () => number): (event: Event) => void {
    const events: Array<History.Timed<Event>> = []
    this.#events.set(name, events)
    return (event) => {
      const at = micros()
      events.push({ at, ...event })
      this.bodies.hear(name, event)
      if (event.event === "ask") this.#kinds.set(`${name}/${event.id}`, event.kind.split(" ")[0]!)
      if (event.event === "enter") this.#granted.set(this.#kinds.get(`${name}/${event.id}`)!, at)
    }
  }

  get histories(): ReadonlyMap<string, ReadonlyArray<History.Timed<Event>>> {
    return this.#events
  }

  /** Whether each of these has been granted since that time. */
  haveGrantedSince(kinds: ReadonlyArray<string>, micros: number): boolean {
    return kinds.every((kind) => (this.#granted.get(kind) ?? 0) > micros)
  }
}

/** The table that locks protect: it refuses a token older than one that it has seen. */
const table = () => {
  const tokens = new Map<string, number>()
  return (key: string, token: number) =>
    Effect.sync(() => {
      const accepted = token >= (tokens.get(key) ?? 0)
      if (accepted) tokens.set(key, token)
      return accepted
    })
}

const nameOf = ({ place, process }: Member): string => `client-${place + 1}.${process.name}`

// What checks know under another name: times of Redis are not those of the world after a jump.
const named: { readonly [fault in Incident["fault"]]?: string } = {
  "server clock": "clock jump",
  migration: "slot migration"
}

const injectedBy = ({ fault, forgets, from, process, to }: Incident, members: ReadonlyArray<Member>): Injected => {
  const member = members.find((one) => one.process.name === process)
  return {
    client: member === undefined ? "" : `client-${member.place + 1}`,
    fault: { name: named[fault] ?? fault, forgets } as Injected["fault"],
    from: from * 1000,
    to: to * 1000
  } as Injected
}

// Shorter ones are within what checks allow.
const longDelay = 5

const judged = (
  outcome: Outcome,
  records: Records,
  late: ReadonlyArray<readonly [number, number]>,
  lease: number
) => {
  const { healed, hung, incidents, members } = outcome
  const ended = members.filter(({ exit }) => exit !== undefined)
  const slow = late.filter(([from, to]) => to - from > longDelay).map(([from, to]): Incident => ({
    fault: "pause",
    process: undefined,
    from,
    to,
    forgets: false
  }))
  return judge({
    histories: records.histories,
    injected: [...incidents, ...slow].map((incident) =>
      injectedBy({ ...incident, to: Math.min(incident.to, Math.max(healed, incident.from)) }, members)
    ),
    healed: healed * 1000,
    ended: {
      well: new Set(ended.map(nameOf)),
      hung: new Set(hung.map(nameOf)),
      crashes: ended.flatMap((member) => {
        const exit = member.exit!
        return Exit.isSuccess(exit)
          ? []
          : [{ check: "crash", detail: `${nameOf(member)}: ${Cause.pretty(exit.cause)}`, holds: [] }]
      })
    },
    patience,
    lease,
    delays
  })
}

// A schedule is short: with more at once, each would do little.
const mostMixed = 2

/** The workloads that were asked for, or some of them all. */
export const chosenOf = (only: ReadonlyArray<string>, seed: number): ReadonlyArray<Workload> => {
  // In their order: it is a part of the schedule.
  if (only.length > 0) return only.map((name) => workloads.find((workload) => workload.name === name)!)
  const random = randomOf(seedOf(seed, 0))
  const left = [...workloads]
  return Array.from({ length: mostMixed }, () => left.splice(Math.floor(random() * left.length), 1)[0]!)
}

/** Schedules that are tried at the same time have different databases. */
export const simulate = async (
  options: Options,
  library: Library,
  machine: Machine,
  database: number
): Promise<Result> => {
  const { choices, conditions = busy, course, coverage, only, seed, steps, verbose } = options
  const { layerStore, lockstep } = library
  const chosen = chosenOf(only, seed)
  const settings = settingsOf(conditions.lease)
  const records = new Records()
  const write = table()
  const queues = new Queues(machine, database, () => simulation.world.server, library.functions)
  let last = 0
  // What happens in one moment has an order all the same.
  const micros = () => last = Math.max(simulation.world.now * 1000, last + 0.001)
  const program = (process: Process, place: number, stopping: () => boolean) => {
    const own = seedOf(seed, 1000 + simulation.members.length)
    const recorded = records.recorder(`client-${place + 1}.${process.name}`, micros)
    // A process that has crashed records nothing.
    const record = (event: Event) => {
      if (!process.crashed) recorded(event)
    }
    const client = clientOf({
      argument: { settings, long: conditions.long, moves: 0.4 },
      layerStore,
      lockstep,
      // The time of the world. The clocks of processes are for the library.
      clock: { now: () => simulation.world.now, wall: () => epoch + simulation.world.now, began: epoch, micros },
      random: randomOf(own),
      // What waits is waited for in fewer steps.
      interruptible: (self) =>
        Effect.flatMap(
          process.interruptible(self),
          Option.match({
            onNone: () => Effect.fail(gaveUp),
            onSome: Effect.succeed
          })
        ),
      least: () => simulation.world.isCalm ? leastRest : conditions.rest,
      record,
      stopping,
      write
    })
    const losses = Effect.flatMap(
      lockstep.Coordinator.Coordinator,
      ({ changes }) =>
        Stream.runForEach(changes, ({ partition, reason = "", to }) =>
          Effect.sync(() => {
            coverage?.entered(process, partition, to)
            if (to === "lost") record({ event: "lost", reason, partition })
          }))
    )
    const work = Effect.forEach(chosen, (workload) => workload.run(client), { concurrency: "unbounded", discard: true })
    return Effect.raceFirst(work, losses).pipe(
      Effect.provide(lockstep.Coordinator.layer(settings)),
      // It is started while things are broken, too.
      Effect.retry({ while: () => !stopping() }),
      Effect.ignore
    )
  }
  const simulation = new library.Simulation(
    {
      seed,
      choices,
      course,
      processes: 2 + seed % 3,
      cluster: seed % 2 === 1,
      steps,
      every: conditions.every,
      faults: conditions.faults,
      prompt: conditions.prompt,
      patience,
      mostSteps,
      program,
      isCalm: (healed, now) =>
        now > healed + calm || records.haveGrantedSince(chosen.map(({ name }) => name), healed * 1000),
      check: () => {
        // What bodies have done says nothing after Redis has forgotten something.
        const violation = simulation.world.server.forgotAt === 0 ? records.bodies.violation : undefined
        return violation ?? queues.check()
      },
      verbose,
      observe: (moment, order, process) => {
        if (moment === "is executed" || moment === "is executed late") queues.heard(order)
        coverage?.observe(moment, order, process)
      }
    },
    machine,
    database
  )
  const outcome = await simulation.run()
  const { anomalies } = judged(outcome, records, simulation.world.delays, settings.lease)
  const failure = outcome.defect ?? outcome.failure ?? outcome.endless
  const failed = failure === undefined ? [] : [{ check: "schedule", detail: failure, holds: [] }]
  simulation.world.now += longAfter
  const left = lasting(await simulation.world.server.keys())
  const leaked = left.length === 0 ? [] : [{ check: "leak", detail: `left behind: ${left.join(", ")}`, holds: [] }]
  return { ...outcome, anomalies: [...failed, ...anomalies, ...leaked] }
}
