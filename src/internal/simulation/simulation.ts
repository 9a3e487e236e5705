/** One schedule of a simulation: processes that run a program, faults, and a calm in which everything has to settle. */

import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import type { Redis } from "../../Redis.ts"
import { prettyOf } from "../text.ts"
import { Choices, type Course, type Round, seedOf } from "./choices.ts"
import { type Fault, type Incident, strike } from "./faults.ts"
import type { Machine } from "./machine.ts"
import type { Process } from "./process.ts"
import { Server } from "./server.ts"
import { type Observer, World } from "./world.ts"

/** A process of the simulation, as its program and its checks see it. */
export interface Member {
  readonly process: Process
  /** The place of the process: one that has crashed is replaced by another in the same place. */
  readonly place: number
  /** How its program has ended, if it has, before a crash. */
  exit: Exit.Exit<void, unknown> | undefined
}

export interface Options {
  readonly seed: number
  /** The choices of a schedule that is repeated. */
  readonly choices?: ReadonlyArray<number> | undefined
  /** Instead of choices: the course of a schedule that is shortened. */
  readonly course?: Course | undefined
  readonly processes: number
  /** Whether Redis is a cluster. Default `false`. */
  readonly cluster?: boolean | undefined
  /** How many steps there are before everything is healed. */
  readonly steps: number
  /** A fault happens once in so many steps. */
  readonly every: number
  readonly faults: ReadonlyArray<Fault>
  /** Whether time passes only when there is nothing else to do, also before everything is healed. Default `false`. */
  readonly prompt?: boolean | undefined
  /** Milliseconds that programs have to end when all is healed, and they were asked to stop. */
  readonly patience: number
  /** A schedule that takes so many steps when all is healed gets no further. */
  readonly mostSteps: number
  /** The program of a process. `stopping` asks it to end. */
  readonly program: (process: Process, place: number, stopping: () => boolean) => Effect.Effect<void, unknown, Redis>
  /** Whether the programs have been healed for long enough to stop. */
  readonly isCalm: (healed: number, now: number) => boolean
  /** Called after each step; an answer ends the schedule. */
  readonly check?: (() => string | undefined | Promise<string | undefined>) | undefined
  /** Says in the trace which requests there were. */
  readonly verbose?: boolean | undefined
  readonly observe?: Observer | undefined
  /** Ends it early. */
  readonly signal?: AbortSignal | undefined
}

// Programs that were asked to end, and do not within so many turns of their event loops, with nothing else, never do.
const mostTurns = 10_000

/** The outcome of a schedule. */
export interface Outcome {
  readonly members: ReadonlyArray<Member>
  readonly incidents: ReadonlyArray<Incident>
  /** When everything was healed, in milliseconds since the beginning. */
  readonly healed: number
  readonly now: number
  readonly steps: number
  /** The answer of the check. */
  readonly failure: string | undefined
  /** The log line of a handler of the actor that has failed. */
  readonly defect: string | undefined
  /** That it would take too many steps. */
  readonly endless: string | undefined
  /** A program that has failed. */
  readonly failed: Member | undefined
  /** Processes that did not end. */
  readonly hung: ReadonlyArray<Member>
  /** Nothing could happen any more. */
  readonly stuck: boolean
  /** The events so far: one line for each step. */
  readonly trace: () => ReadonlyArray<string>
  readonly course: Course
}

export class Simulation {
  readonly world: World
  readonly members: Array<Member> = []
  readonly incidents: Array<Incident> = []
  readonly #options: Options
  #stopping = false
  #failure: string | undefined = undefined
  #defect: string | undefined = undefined
  #endless: string | undefined = undefined
  #failed: Member | undefined = undefined
  #stuck = false

  /** Simulations that run at the same time have different databases. */
  constructor(options: Options, machine: Machine, database: number) {
    this.#options = options
    const choices = new Choices(options.seed, options.choices)
    const serverAt = (now: () => number) => new Server(machine, database, now)
    const { cluster = false, observe, prompt = false, verbose = false } = options
    this.world = new World(choices, serverAt, cluster, prompt, verbose, observe)
  }

  async run(): Promise<Outcome> {
    const { world } = this
    const { course, isCalm, mostSteps, patience, processes, steps } = this.#options
    // A simulation before this one has used the same database.
    await world.server.flush()
    if (course !== undefined) world.choices.give(course.start)
    for (let place = 0; place < processes; place++) this.#start(place)
    const start = world.choices.made.slice()
    const rounds: Array<Round> = []
    while (world.steps < steps && !this.#isOver()) {
      const round = await this.#round(course?.rounds[rounds.length])
      if (round === undefined) break
      rounds.push(round)
    }
    const healed = world.now
    const last = world.steps + mostSteps
    const before = world.choices.made.length
    if (course !== undefined) world.choices.give(course.rest ?? [])
    if (!this.#isOver()) await this.#heal()
    await this.#until(last, () => isCalm(healed, world.now))
    this.#stopping = true
    world.turns = 0
    const until = world.now + patience
    await this.#until(last, () => world.now >= until || this.#hung().length === 0)
    const { incidents, members } = this
    return {
      members,
      incidents,
      healed,
      now: world.now,
      steps: world.steps,
      failure: this.#failure,
      defect: this.#defect,
      endless: this.#endless,
      failed: this.#failed,
      hung: this.#isOver() ? [] : this.#hung(),
      stuck: this.#stuck,
      trace: world.trace,
      course: { start, rounds, rest: world.choices.made.slice(before) }
    }
  }

  // Something may break, and then one thing happens, if any can.
  async #round(given: Round | undefined): Promise<Round | undefined> {
    const { every, faults } = this.#options
    const { choices } = this.world
    if (given !== undefined) choices.give(given.fault ?? given.made)
    const from = choices.made.length
    const isStruck = faults.length > 0 && choices.among(every) === every - 1
    if (isStruck) await this.#strike()
    const fault = isStruck ? choices.made.slice(from) : undefined
    if (given?.fault !== undefined) choices.give(given.made)
    const label = await this.#step(given?.label)
    return label === undefined ? undefined : { fault, made: choices.made.slice(from + (fault?.length ?? 0)), label }
  }

  #start(place: number): void {
    const { program, seed } = this.#options
    const { members, world } = this
    const number = members.length + 1
    // Clocks are not equally fast.
    const rate = [1, 1, 1.001, 0.999][world.choices.among(4)]!
    const process = world.start(`${String.fromCharCode(97 + place)}${number}`, seedOf(seed, number), rate)
    const member: Member = { process, place, exit: undefined }
    const running = program(process, place, () => this.#stopping)
    members.push(member)
    Effect.runForkWith(process.context())(running).addObserver((exit) => this.#ended(member, exit))
  }

  // Programs can end each other by what they share, though one of them has crashed.
  #ended(member: Member, exit: Exit.Exit<void, unknown>): void {
    const { process } = member
    if (process.crashed) return
    member.exit = exit
    process.ended = true
    const isFailure = Exit.isFailure(exit)
    if (isFailure) this.#failed ??= member
    this.world.note(process.name, isFailure ? `fails: ${prettyOf(exit.cause)}` : "ends")
  }

  async #strike(): Promise<void> {
    const { choices } = this.world
    const fault = this.#options.faults[choices.among(this.#options.faults.length)]!
    const restart = (process: Process) => this.#start(this.members.find((member) => member.process === process)!.place)
    // What follows from it stands behind it.
    const line = this.world.note("fault", "")
    const struck = await strike(fault, { world: this.world, restart }, this.incidents)
    if (struck === undefined) return this.world.forget(line)
    line[2] = struck.process === undefined ? fault : `${fault} of ${struck.process}`
    await this.world.settle()
  }

  async #step(label?: string): Promise<string | undefined> {
    const happened = await this.world.step(label)
    const found = this.#options.check?.()
    const violation = typeof found === "object" ? await found : found
    this.#failure ??= violation
    this.#defect ??= this.world.server.defect
    const wrong = this.#defect ?? this.#failure
    if (wrong !== undefined) this.world.note("check", wrong)
    return happened
  }

  async #until(last: number, isOver: () => boolean): Promise<void> {
    const { world } = this
    while (!this.#isOver() && !isOver()) {
      if (this.#stopping && world.turns >= mostTurns) {
        this.#endless =
          `${mostTurns} turns of event loops, and nothing else, have ended no program: one runs in circles`
      } else if (world.steps >= last) {
        this.#endless = `the schedule has not ended ${this.#options.mostSteps} steps after all was healed`
      } else if (await this.#step() === undefined) {
        this.#stuck = true
        return
      }
    }
  }

  #isOver(): boolean {
    const { signal } = this.#options
    const failure = this.#failure ?? this.#defect ?? this.#endless ?? this.#failed
    return failure !== undefined || signal?.aborted === true
  }

  #hung(): ReadonlyArray<Member> {
    return this.members.filter(({ process }) => !process.crashed && !process.ended)
  }

  async #heal(): Promise<void> {
    await this.world.heal()
    this.world.note("world", "everything is healed")
  }
}
