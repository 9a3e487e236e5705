/**
 * The queues of resources, looked at after each call that is about one: nothing is free and waited for, no claim is granted before one that
 * has waited for longer, and no waiter is forgotten.
 */
import { kindOf } from "../../src/internal/actor/keys.ts"
import { unnumberedAnyway } from "../../src/internal/actor/transport.ts"
import { addressOf, batch } from "../../src/internal/actor/wire.ts"
import { command, type Machine } from "../../src/internal/simulation/machine.ts"
import { type Order, type Server, wordsOf } from "../../src/internal/simulation/server.ts"
import { alarmOf, type Ask, dueOf, type Inquire, isFree, kinds, type Resource, resourceAt } from "./resources.ts"

const isQueueing = new RegExp(`\\}:(${kinds.join("|")}):`)

// Where the clock of Redis was set back, a session that has expired is due so much later, in milliseconds.
const setBack = 500

const idOf = (claim: string): string => claim.slice(claim.indexOf("/") + 1)

const sessionOf = (claim: string): string => claim.slice(0, claim.indexOf("/"))

/** Whether one of the calls is about this claim. */
const isNamed = (claim: string, orders: ReadonlyArray<ReadonlyArray<string>>): boolean => {
  const id = idOf(claim)
  return orders.some((words) => words.some((word) => word === id || word.startsWith(`${id}:`)))
}

/** Claims that are wrong with a queue, given as it was before. */
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
  #before = new Map<string, Resource>()
  #orders: Array<Order & { readonly is: "call" }> = []

  constructor(machine: Machine, database: number, server: () => Server, functions: string) {
    this.#machine = machine
    this.#database = database
    this.#server = server
    this.#functions = functions
  }

  /** A request is executed, or refused. */
  heard(order: Order): void {
    if (order.is === "call" && isQueueing.test(order.call.text)) this.#orders.push(order)
  }

  /** Redis has forgotten something. */
  forget(): void {
    this.#before.clear()
  }

  /** What is wrong since the last time. */
  check(): undefined | Promise<string | undefined> {
    if (this.#orders.length === 0) return undefined
    const orders = this.#orders.map(({ call }) => wordsOf(call))
    this.#orders = []
    // Keys on their way have other names.
    if (this.#server().migration !== undefined) {
      this.forget()
      return undefined
    }
    return this.#found(orders)
  }

  async #found(orders: ReadonlyArray<ReadonlyArray<string>>): Promise<string | undefined> {
    const keys = new Set(orders.flatMap((words) => words.slice(1, 1 + Number(words[0]))))
    const found = await Promise.all(Array.from(keys, (key) => kinds.includes(kindOf(key)) && this.#wrong(key, orders)))
    return found.find((one) => typeof one === "string") || undefined
  }

  readonly #ask: Ask = async (name, ...args) =>
    (await this.#machine.execute(this.#database, this.#server().now, command(name, args))).reply

  readonly #inquire: Inquire = async (verb, key) => {
    const { count, text } = batch(addressOf(key.slice(0, key.indexOf("}") + 2), false, ""), unnumberedAnyway, [
      { verb, key, args: [] }
    ])
    const call = { name: `${this.#functions}_ro`, count, text }
    const { reply } = await this.#machine.execute(this.#database, this.#server().now, call)
    return JSON.parse(String(reply))[1][0]
  }

  async #wrong(key: string, orders: ReadonlyArray<ReadonlyArray<string>>): Promise<string | undefined> {
    const now = await resourceAt(this.#ask, key)
    const before = this.#before.get(key)
    this.#before.set(key, now)
    if (now.waiters.length === 0 && (before?.waiters.length ?? 0) === 0) return undefined
    const due = await this.#ask("ZRANGE", dueOf(key), "0", "-1", "WITHSCORES") as ReadonlyArray<string>
    const deadlines = new Map(due.map((member, at) => [member, Number(due[at + 1])]))
    const from = this.#server().now + setBack
    const isAlive = (claim: string) => (deadlines.get(sessionOf(claim)) ?? 0) > from
    const wrong = await this.#waitsInVain(key, now, isAlive, deadlines.has(alarmOf(key))) ??
      (before && await this.#lost(key, before, now, isAlive, orders))
    return wrong === undefined ? undefined : `in the queue of ${key}, ${wrong}`
  }

  // The rest of a long queue goes on when its alarm rings.
  async #waitsInVain(key: string, now: Resource, isAlive: (claim: string) => boolean, rings: boolean) {
    const alive = now.waiters.filter(({ claim }) => isAlive(claim))
    const [next] = alive
    if (next === undefined || next !== now.waiters[0] || rings || !await isFree(key, now, alive, this.#inquire)) {
      return undefined
    }
    return `${next.claim} waits for what is free`
  }

  async #lost(
    key: string,
    before: Resource,
    now: Resource,
    isAlive: (claim: string) => boolean,
    orders: ReadonlyArray<ReadonlyArray<string>>
  ): Promise<string | undefined> {
    // A leader may put another candidate in front.
    const passed = orders.some((words) => words.includes("election.nominate"))
      ? undefined
      : overtaken(before, now, isAlive)
    if (passed !== undefined) return passed
    const present = new Set([...now.waiters.map(({ claim }) => claim), ...now.granted, ...now.joined])
    const gone = before.waiters.find(({ claim }) => !present.has(claim) && isAlive(claim) && !isNamed(claim, orders))
    if (gone === undefined) return undefined
    // Those that want more than there is hear of that.
    if (kindOf(key) === "semaphore" && gone.weight > Number((await this.#inquire("semaphore.state", key))[1])) {
      return undefined
    }
    return `${gone.claim} was forgotten`
  }
}
