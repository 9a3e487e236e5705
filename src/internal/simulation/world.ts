/**
 * The scheduler of a simulation. At every step it chooses what happens next: a process runs, a request is executed, an answer or an event
 * arrives, time passes, or something breaks. Everything else follows from its choices.
 */

import { nextTick } from "node:process"
import type { Timer } from "../io.ts"
import type { RedisError } from "../redis/errors.ts"
import type { Choices } from "./choices.ts"
import { type Alarm, epoch, Process } from "./process.ts"
import { isRefusal, type Order, type Server, wordsOf } from "./server.ts"
import type { Sending, Wire } from "./wire.ts"

/** One thing that can happen now. */
type Option =
  | { readonly weight: number; readonly is: "run"; readonly process: Process }
  | {
    readonly weight: number
    readonly is: "connect" | "execute" | "deliver"
    readonly process: Process
    readonly wire: Wire
  }
  | { readonly weight: number; readonly is: "late" }
  | { readonly weight: number; readonly is: "timer"; readonly process: Process; readonly alarm: Alarm }

// A process that follows one that has crashed has another number.
const labelOf = (option: Option): string => {
  const place = "process" in option ? option.process.name[0] : ""
  return `${place} ${option.is} ${"wire" in option ? option.wire.role : ""}`
}

// How often each kind of event is chosen, where several can happen.
const weights = { run: 24, execute: 8, deliver: 8, connect: 2, wait: 1, late: 1 } as const

// In milliseconds. A turn behind many others, and nothing else, is one of a program that computes.
const [turn, longTurn, hop] = [0.017, 1, 0.103]
const manyTurns = 1000

// After so many steps the real event loop has its turn: timeouts and signals of who runs the simulation come with it.
const mostSteps = 64

/** The verbs of the requests in a call. */
export const verbsOf = (order: Order): ReadonlyArray<string> => {
  if (order.is === "command") return []
  if (order.script.endsWith("_renew")) return ["session.renew"]
  return wordsOf(order.call).filter((word) => /^=?[a-z][A-Za-z]*\.[a-z][A-Za-z]*$/.test(word)).map((word) =>
    word.replace(/^=/, "")
  )
}

// The story shows at most so many characters of a request, and of an answer.
const most = 120

/** An order, for people: the requests, and the resources that they are about. */
const described = (order: Order): string => {
  if (order.is === "command") return `${order.command} ${order.args.join(" ").slice(0, most)}`
  const words = wordsOf(order.call)
  const keys = words.slice(1, 1 + Number(words[0])).map((key) => key.slice(key.indexOf("}:") + 2))
  const resources = keys.filter((key) => !/^(sessions|absent)$/.test(key))
  return [...verbsOf(order), ...resources.length === 0 ? [] : ["of", resources.join(", ").slice(0, most)]].join(" ")
}

/** The answer of Redis, for people. */
const answer = ({ outcome }: Sending): string => {
  if (outcome === undefined) return ""
  if ("error" in outcome) return outcome.error.reason._tag
  const { reply } = outcome
  return (typeof reply === "string" ? reply : JSON.stringify(reply)).slice(0, most)
}

/** An event in the life of a request. */
export type Moment = "is executed" | "is executed late" | "is answered" | "is lost"

/** Receives each. */
export type Observer = (moment: Moment, order: Order, process: Process | undefined) => void

const blockedFor = (order: Order): number =>
  order.is === "call" ? 0 : Number(order.args[order.args.indexOf("BLOCK") + 1])

export class World {
  /** Milliseconds since the beginning. */
  now = 0
  steps = 0
  /** So many of the last ones were turns of event loops and timers that were due, and nothing else. */
  turns = 0
  readonly processes: Array<Process> = []
  readonly choices: Choices
  readonly server: Server
  /** When time has passed though something else could have happened: the requests and replies on their way took so long. */
  readonly delays: Array<readonly [from: number, to: number]> = []
  /** Calls of connections that are lost, which may still arrive. */
  late: Array<Order> = []
  readonly #events: Array<[at: number, actor: string, what: string]> = []
  #alarms: Array<Alarm> = []
  readonly #lost = new WeakSet<Order>()
  #numbers = 0
  /** Everything is healed. */
  isCalm = false
  /** Nothing is late: time passes only when there is nothing else to do. */
  isPrompt: boolean
  /** Whether its Redis is a cluster. */
  readonly cluster: boolean
  readonly #verbose: boolean
  readonly #observe: Observer | undefined

  constructor(
    choices: Choices,
    server: (now: () => number) => Server,
    cluster: boolean,
    isPrompt: boolean,
    verbose: boolean,
    observe: Observer | undefined
  ) {
    this.choices = choices
    this.cluster = cluster
    this.isPrompt = isPrompt
    this.#verbose = verbose
    this.#observe = observe
    this.server = server(() => epoch + this.now)
  }

  // ---------------------------------------------------------------------------------------------------------------
  // Processes
  // ---------------------------------------------------------------------------------------------------------------

  start(name: string, seed: number, rate = 1): Process {
    const process = new Process(name, seed, rate, {
      cluster: this.cluster,
      now: () => this.now,
      set: (alarm) => this.#set(alarm),
      onCut: (wire) => this.#lose(process, wire),
      onLog: this.#verbose ? (line) => this.note(name, line) : undefined
    })
    this.processes.push(process)
    return process
  }

  #set(alarm: Omit<Alarm, "number">): Timer {
    if (alarm.process.crashed) return { cancel: () => {} }
    const entry: Alarm = { ...alarm, number: ++this.#numbers }
    let at = this.#alarms.length
    while (at > 0 && this.#alarms[at - 1]!.at > entry.at) at--
    this.#alarms.splice(at, 0, entry)
    return { cancel: () => this.#cancel(entry) }
  }

  #cancel({ number }: Alarm): void {
    const at = this.#alarms.findIndex((alarm) => alarm.number === number)
    if (at >= 0) this.#alarms.splice(at, 1)
  }

  crash(process: Process): void {
    process.crashed = true
    process.tasks = []
    this.#alarms = this.#alarms.filter((alarm) => alarm.process !== process)
    for (const wire of process.wires) this.#lose(process, wire)
  }

  // Requests under way are lost, or come later: once, though the connections of a process that has crashed may break after that.
  #lose(process: Process, wire: Wire): void {
    for (const order of wire.underWay) {
      const isLate = this.choices.among(2) === 1
      if (this.#lost.has(order)) continue
      this.#lost.add(order)
      this.#observe?.("is lost", order, process)
      if (isLate) this.late.push(order)
    }
  }

  isAwake(process: Process): boolean {
    return !process.crashed && process.pausedUntil <= this.now
  }

  // ---------------------------------------------------------------------------------------------------------------
  // Steps
  // ---------------------------------------------------------------------------------------------------------------

  #options(): Array<Option> {
    const options: Array<Option> = []
    for (const process of this.processes) {
      if (process.crashed) continue
      const isAwake = this.isAwake(process)
      if (isAwake && process.tasks.length > 0) options.push({ weight: weights.run, is: "run", process })
      for (const wire of process.wires) this.#ofWire(options, process, wire, isAwake)
    }
    if (this.late.length > 0) options.push({ weight: weights.late, is: "late" })
    const alarm = this.#nextAlarm()
    if (alarm !== undefined) {
      const isDue = alarm.at <= this.now
      if (isDue || options.length === 0 || !this.isPrompt) {
        options.push({ weight: isDue ? weights.run : weights.wait, is: "timer", process: alarm.process, alarm })
      }
    }
    return options
  }

  #ofWire(options: Array<Option>, process: Process, wire: Wire, isAwake: boolean): void {
    if (wire.isConnecting) {
      if (isAwake) options.push({ weight: weights.connect, is: "connect", process, wire })
      return
    }
    const next = wire.sent[0]
    if (next !== undefined && !wire.deaf && this.#isDue(next)) {
      options.push({ weight: weights.execute, is: "execute", process, wire })
    }
    if (isAwake && wire.answered.length > 0) options.push({ weight: weights.deliver, is: "deliver", process, wire })
  }

  /** Lets it happen, and says what it is. */
  #happen(option: Option, isAlone: boolean): string | Promise<string> {
    switch (option.is) {
      case "run":
        this.now += this.turns < manyTurns ? turn : longTurn
        option.process.flush()
        return "runs"
      case "connect":
        option.wire.connected()
        return `${option.wire.role} connects`
      case "execute": {
        const sending = option.wire.sent[0]!
        const { order } = sending
        return this.#execute(option.process, option.wire, sending).then(() =>
          `${option.wire.role} ${this.#verbose ? described(order) : order.command}`
        )
      }
      case "deliver": {
        const sending = option.wire.answered[0]!
        this.#deliver(option.process, option.wire)
        return `${option.wire.role} is answered${this.#verbose ? ` ${answer(sending)}` : ""}`
      }
      case "late": {
        const order = this.late[0]!
        return this.#executeLate(order).then(() => `late${this.#verbose ? ` ${described(order)}` : ""}`)
      }
      case "timer":
        this.#ring(option.alarm, !isAlone)
        return "timer"
    }
  }

  #isDue({ blocked, streams }: Sending): boolean {
    return blocked === undefined || streams.some((key) => this.#isWritten(key, blocked))
  }

  #isWritten(key: string, since: number): boolean {
    return (this.server.written.get(key) ?? 0) > since
  }

  /** The streams that a read waits for, and has not read since something was written there. */
  unread({ sent: [next] }: Wire): ReadonlyArray<string> {
    if (next?.blocked === undefined) return []
    const { blocked, streams } = next
    return streams.filter((key) => this.#isWritten(key, blocked))
  }

  // Of processes that are stopped, timers are late.
  #nextAlarm(): Alarm | undefined {
    let found: Alarm | undefined
    for (const alarm of this.#alarms) {
      const at = Math.max(alarm.at, alarm.process.pausedUntil)
      if (at <= alarm.at) {
        if (found === undefined || alarm.at < found.at) found = alarm
        break
      }
      if (found === undefined || at < found.at) found = { ...alarm, at }
    }
    return found
  }

  #deliver(process: Process, wire: Wire): void {
    this.now += hop
    this.#observe?.("is answered", wire.answered[0]!.order, process)
    wire.deliver()
  }

  #ring(alarm: Alarm, isLate: boolean): void {
    if (isLate && alarm.at > this.now) this.delays.push([this.now, alarm.at])
    // Time passes with timers of no time, too.
    this.now = alarm.at > this.now ? alarm.at : this.now + turn
    this.#cancel(alarm)
    alarm.ring()
  }

  async #execute(process: Process, wire: Wire, sending: Sending): Promise<void> {
    this.now += hop
    this.#observe?.("is executed", sending.order, process)
    const outcome = await this.#outcome(sending.order)
    if (sending.streams.length === 0 || "error" in outcome || outcome.reply !== null) {
      return wire.answer(outcome)
    }
    if (sending.blocked === undefined) {
      this.#set({
        at: this.now + blockedFor(sending.order),
        process,
        ring: () => {
          if (wire.sent[0] === sending) wire.answer({ reply: null })
        }
      })
    }
    sending.blocked = this.server.writes
  }

  async #executeLate(order: Order): Promise<void> {
    this.now += hop
    this.late.shift()
    this.#observe?.("is executed late", order, undefined)
    await this.#outcome(order)
  }

  async #outcome(order: Order): Promise<{ readonly reply: unknown } | { readonly error: RedisError }> {
    try {
      return { reply: await this.server.execute(order) }
    } catch (error) {
      if (!isRefusal(error)) throw error
      return { error }
    }
  }

  /** Lets one thing happen: what is labelled so, if it can happen. Answers the label of what has happened, if anything could. */
  async step(label?: string): Promise<string | undefined> {
    const options = this.#options()
    if (options.length === 0) return undefined
    this.steps++
    const option = this.#chosen(options, label)
    this.turns = this.#isTurn(option) ? this.turns + 1 : 0
    // What follows from it stands behind it.
    const line = this.note("process" in option ? option.process.name : "redis", "")
    const happening = this.#happen(option, options.length === 1)
    // Most steps need no answer of Redis.
    const what = typeof happening === "string" ? happening : await happening
    ;[line[0], line[2]] = [this.now, what]
    await (this.steps % mostSteps === 0 ? new Promise((resolve) => setImmediate(resolve)) : this.settle())
    return labelOf(option)
  }

  // A timer that is due has been set in a turn before.
  #isTurn(option: Option): boolean {
    return option.is === "run" || option.is === "timer" && option.alarm.at <= this.now
  }

  #chosen(options: ReadonlyArray<Option>, label: string | undefined): Option {
    const total = options.reduce((sum, { weight }) => sum + weight, 0)
    let choice = this.choices.among(total)
    let at = 0
    while (choice >= options[at]!.weight) choice -= options[at++]!.weight
    const found = label === undefined || labelOf(options[at]!) === label
      ? -1
      : options.findIndex((option) => labelOf(option) === label)
    if (found < 0) return options[at]!
    this.choices.amend(options.slice(0, found).reduce((sum, { weight }) => sum + weight, 0))
    return options[found]!
  }

  /**
   * Everything that follows from the last event without another choice: this tick comes when no promise has anything left to do.
   */
  readonly settle = (): Promise<void> => new Promise((resolve) => nextTick(resolve))

  /** Nothing is broken any more, and nothing breaks. */
  async heal(): Promise<void> {
    this.isCalm = this.isPrompt = true
    this.server.full = this.server.migrating = false
    await this.server.endMigration()
    for (const process of this.processes) {
      process.pausedUntil = 0
      for (const wire of process.wires) if (wire.deaf || wire.mute) wire.reset()
    }
  }

  note(actor: string, what: string): [at: number, actor: string, what: string] {
    const line: [at: number, actor: string, what: string] = [this.now, actor, what]
    this.#events.push(line)
    return line
  }

  /** Nothing has happened after all. */
  forget(line: [at: number, actor: string, what: string]): void {
    this.#events.splice(this.#events.lastIndexOf(line), 1)
  }

  /** The events so far: one line for each step. */
  readonly trace = (): ReadonlyArray<string> =>
    this.#events.map(([at, actor, what]) => `${at.toFixed(3).padStart(10)} ${actor}: ${what.replaceAll("\n", "\\n")}`)
}
