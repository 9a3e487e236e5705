/**
 * Looks at the queue of a resource after each call about it. Nothing may be free and waited for. No claim may be granted before one that
 * has waited for longer, and no waiter may be forgotten.
 */
import { kindOf } from "../../src/internal/actor/keys.ts"
import { unnumberedAnyway } from "../../src/internal/actor/transport.ts"
import { addressOf, batch } from "../../src/internal/actor/wire.ts"
import { command, type Machine } from "../../src/internal/simulation/machine.ts"
import { type Order, type Server, wordsOf } from "../../src/internal/simulation/server.ts"
import { alarmOf, dueOf, isFree, kinds, prefixOf, type Read, type Resource, resourceAt } from "./resources.ts"

const isQueueing = new RegExp(`\\}:(${kinds.join("|")}):`)

type Words = ReadonlyArray<string>

const sessionOf = (claim: string): string => claim.slice(0, claim.indexOf("/"))

/** Whether one of the calls is about this claim. */
const isNamed = (claim: string, calls: ReadonlyArray<Words>): boolean => {
  const [session, id] = [sessionOf(claim), claim.slice(claim.indexOf("/") + 1)]
  return calls.some((words) =>
    words.includes(session) && words.some((word) => word === id || word.startsWith(`${id}:`))
  )
}

/** Says which claim has come before one that has waited for longer, if one has. */
const overtaken = (before: Resource, now: Resource, isAlive: (claim: string) => boolean): string | undefined => {
  const present = new Set(now.waiters.map(({ claim }) => claim))
  const former = before.waiters.map(({ claim }) => claim)
  const stayed = former.filter((claim) => present.has(claim))
  const order = now.waiters.map(({ claim }) => claim).filter((claim) => stayed.includes(claim))
  const at = order.findIndex((claim, at) => claim !== stayed[at])
  if (at >= 0) return `${order[at]} has overtaken ${stayed[at]}`
  for (const claim of now.granted) {
    if (before.granted.has(claim)) continue
    const place = former.indexOf(claim)
    const passed = stayed.find((one) => isAlive(one) && (place < 0 || former.indexOf(one) < place))
    if (passed !== undefined) return `${claim} was granted, and ${passed} waits for longer`
  }
  return undefined
}

export class Queues {
  readonly #machine: Machine
  readonly #database: number
  readonly #server: () => Server
  readonly #functions: string
  readonly #before = new Map<string, Resource>()
  #calls: Array<Order & { readonly is: "call" }> = []
  // How late it has ever been by the clock of Redis, which can be set back.
  #latest = 0
  // When Redis had forgotten something, at the last look.
  #forgotAt = 0

  constructor(machine: Machine, database: number, server: () => Server, functions: string) {
    this.#machine = machine
    this.#database = database
    this.#server = server
    this.#functions = functions
  }

  /** A request is executed, or refused. */
  heard(order: Order): void {
    this.#latest = Math.max(this.#latest, this.#server().now)
    if (order.is === "call" && isQueueing.test(order.call.text)) this.#calls.push(order)
  }

  /** What is wrong since the last time. */
  check(): undefined | Promise<string | undefined> {
    const { forgotAt } = this.#server()
    if (forgotAt !== this.#forgotAt) this.#before.clear()
    this.#forgotAt = forgotAt
    if (this.#calls.length === 0) return undefined
    const calls = this.#calls.map(({ call }) => wordsOf(call))
    this.#calls = []
    return this.#found(calls)
  }

  async #found(calls: ReadonlyArray<Words>): Promise<string | undefined> {
    const keys = new Set(calls.flatMap((words) => words.slice(1, 1 + Number(words[0]))))
    const slot = this.#server().migration?.slot
    const queues = [...keys].filter((key) => {
      if (!kinds.includes(kindOf(key))) return false
      // Keys on their way have other names.
      const moves = slot !== undefined && key.startsWith(slot)
      if (moves) this.#before.delete(key)
      return !moves
    })
    const found = await Promise.all(queues.map((key) => this.#wrong(key, calls)))
    return found.find((one) => one !== undefined)
  }

  readonly #read: Read = async (name, ...args) =>
    (await this.#machine.execute(this.#database, this.#server().now, command(name, args))).reply

  async #ask(verb: string, key: string): Promise<ReadonlyArray<unknown>> {
    const { count, text } = batch(addressOf(prefixOf(key), false, ""), unnumberedAnyway, [
      { verb, key, args: [] }
    ])
    const call = { name: `${this.#functions}_ro`, count, text }
    const { reply } = await this.#machine.execute(this.#database, this.#server().now, call)
    return JSON.parse(String(reply))[1][0]
  }

  async #wrong(key: string, calls: ReadonlyArray<Words>): Promise<string | undefined> {
    const now = await resourceAt(this.#read, key)
    const before = this.#before.get(key)
    this.#before.set(key, now)
    if (now.waiters.length === 0 && (before?.waiters.length ?? 0) === 0) return undefined
    // A session that was renewed after the clock was set back ends so much earlier than it is due. The others are alive, and always were.
    const from = Math.floor(this.#latest) + this.#server().behind
    const due = await this.#read("ZRANGEBYSCORE", dueOf(key), `(${from}`, "+inf") as Words
    const isAlive = (claim: string) => due.includes(sessionOf(claim))
    const wrong = await this.#waitsInVain(key, now, isAlive) ??
      (before && await this.#lost(key, before, now, isAlive, calls))
    return wrong === undefined ? undefined : `in the queue of ${key}, ${wrong}`
  }

  async #waitsInVain(key: string, now: Resource, isAlive: (claim: string) => boolean): Promise<string | undefined> {
    const alive = now.waiters.filter(({ claim }) => isAlive(claim))
    const [next] = alive
    if (next === undefined || next !== now.waiters[0]) return undefined
    if (!await isFree(key, now, alive, (verb) => this.#ask(verb, key))) return undefined
    // The rest of a long queue goes on when its alarm rings, which is at once.
    const alarm = await this.#read("ZSCORE", dueOf(key), alarmOf(key))
    return alarm !== null && Number(alarm) <= this.#latest ? undefined : `${next.claim} waits for what is free`
  }

  async #lost(
    key: string,
    before: Resource,
    now: Resource,
    isAlive: (claim: string) => boolean,
    calls: ReadonlyArray<Words>
  ): Promise<string | undefined> {
    // A leader may put another candidate in front.
    const isNominated = calls.some((words) => words.includes("election.nominate"))
    const passed = isNominated ? undefined : overtaken(before, now, isAlive)
    if (passed !== undefined) return passed
    const present = new Set([...now.waiters.map(({ claim }) => claim), ...now.granted, ...now.joined])
    const gone = before.waiters.find(({ claim }) => !present.has(claim) && isAlive(claim) && !isNamed(claim, calls))
    if (gone === undefined || await this.#exceeds(key, gone.weight)) return undefined
    return `${gone.claim} was forgotten`
  }

  // Waiters for more permits than there are leave the queue, and are told.
  async #exceeds(key: string, weight: number): Promise<boolean> {
    if (kindOf(key) !== "semaphore") return false
    const capacity = Number((await this.#ask("semaphore.state", key))[1])
    return capacity > 0 && weight > capacity
  }
}
