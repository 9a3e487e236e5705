/** What Redis has of a resource with a queue: the claims that wait, and those that were served. */
import { kindOf } from "../../src/internal/actor/keys.ts"

type Fields = ReadonlyMap<string, string>

/** Sends a command that only reads. */
export type Ask = (command: string, ...args: ReadonlyArray<string>) => Promise<unknown>

/** Asks an actor about a resource. */
export type Inquire = (verb: string, key: string) => Promise<ReadonlyArray<unknown>>

export interface Waiter {
  readonly claim: string
  /** What it waits for: a number of permits, mostly 1. */
  readonly weight: number
}

export interface Resource {
  /** The first one first. */
  readonly waiters: ReadonlyArray<Waiter>
  /** The claims that were granted. */
  readonly granted: ReadonlySet<string>
  /** Claims that need not wait any more for another reason. */
  readonly joined: ReadonlySet<string>
  readonly fields: Fields
}

const prefixOf = (key: string): string => key.slice(0, key.indexOf("}") + 2)

const sessionsOf = (key: string): string => `${prefixOf(key)}sessions`

export const dueOf = (key: string): string => `${prefixOf(key)}due`

/** The member of `due` that is its alarm. */
export const alarmOf = (key: string): string => `@${key.slice(prefixOf(key).length)}`

/** A waiter as a queue has it. */
const waiterOf = (claim: string, detail: string): Waiter => ({ claim, weight: detail === "" ? 1 : Number(detail) })

/** Those of a text, see lua/waiters.lua. */
const inlineWaiters = (text: string): ReadonlyArray<Waiter> =>
  text.split(" ").slice(1).map((waiter) => {
    const [claim = "", detail = ""] = waiter.split(":")
    return waiterOf(claim, detail)
  })

const waitersIn = (fields: Fields): ReadonlyArray<Waiter> => {
  const inline = fields.get("w")
  const places = [...fields].flatMap(([field, value]) => {
    const place = /^w(-?\d+)$/.exec(field)
    if (place === null) return []
    const [claim = "", detail = ""] = value.split(" ")
    return [[Number(place[1]), waiterOf(claim, detail)] as const]
  })
  return [
    ...inline === undefined ? [] : inlineWaiters(inline),
    ...places.sort(([one], [other]) => one - other).map(([, waiter]) => waiter)
  ]
}

/** The claims of fields that begin with a letter, and whose values begin with a text. */
const claimsIn = (fields: Fields, letter: string, value = ""): ReadonlySet<string> =>
  new Set(
    [...fields].flatMap(([field, found]) =>
      field.startsWith(letter) && found.startsWith(value) && field.includes("/") ? [field.slice(1)] : []
    )
  )

const nobody: ReadonlySet<string> = new Set()

const fieldsOf = async (ask: Ask, key: string): Promise<Fields> => {
  const found = await ask("HGETALL", key) as ReadonlyArray<string>
  return new Map(Array.from({ length: found.length / 2 }, (_, at) => [found[2 * at]!, found[2 * at + 1]!]))
}

/** A lock is a text, see lua/Lock.lua. Its waiters may be in the hash. */
const lockOf = async (ask: Ask, key: string): Promise<Resource> => {
  const text = await ask("HGET", sessionsOf(key), alarmOf(key)) as string | null
  const words = (text ?? "h-").split(" ")
  const isInline = words[0]!.startsWith("S")
  const isAlone = /^[hk]/.test(words[0]!)
  const holder = isAlone ? words[0]!.slice(1) : words[isInline ? 1 : 2]!
  const fields = isAlone || isInline ? new Map<string, string>() : await fieldsOf(ask, key)
  const waiters = isInline ? words.slice(4).map((claim) => waiterOf(claim, "")) : waitersIn(fields)
  return { waiters, granted: holder === "-" ? nobody : new Set([holder]), joined: nobody, fields }
}

export const resourceAt = async (ask: Ask, key: string): Promise<Resource> => {
  const kind = kindOf(key)
  if (kind === "lock") return lockOf(ask, key)
  const fields = await fieldsOf(ask, key)
  const waiters = waitersIn(fields)
  const turn = fields.get("t")
  const granted = kind === "sharedRef"
    ? new Set(turn === undefined ? [] : [turn])
    : kind === "rendezvous"
    ? claimsIn(fields, "c", "t ")
    : claimsIn(fields, "h")
  return { waiters, granted, joined: claimsIn(fields, "o"), fields }
}

type Free = (
  resource: Resource,
  alive: ReadonlyArray<Waiter>,
  inquire: (verb: string) => Promise<ReadonlyArray<unknown>>
) =>
  | boolean
  | Promise<boolean>

const permits = async (
  { waiters: [next] }: Resource,
  inquire: (verb: string) => Promise<ReadonlyArray<unknown>>
): Promise<boolean> => {
  const [, capacity, taken] = await inquire("semaphore.state")
  // Without permits, it is not open anywhere.
  return Number(capacity) > 0 && next!.weight <= Number(capacity) - Number(taken)
}

const isVacant: Free = ({ granted }) => granted.size === 0

/** Whether a waiter in front, which is alive, and those alive behind it need not wait: by kind. */
const free: { readonly [kind: string]: Free } = {
  lock: isVacant,
  election: isVacant,
  singleton: isVacant,
  sharedRef: isVacant,
  readWriteLock: (resource, _, inquire) => permits(resource, inquire),
  semaphore: (resource, _, inquire) => permits(resource, inquire),
  signal: async (_resource, _alive, inquire) => Number((await inquire("signal.state"))[1]) > 0,
  doubleBarrier: async (_, alive, inquire) => {
    const [, inside, , parties] = await inquire("doubleBarrier.state")
    return inside === 0 && alive.length >= Number(parties)
  },
  // An item without a taker, whose giver has not given up.
  rendezvous: ({ fields }) =>
    [...fields].some(([field, item]) => {
      const [, giver, taker] = item.split(" ")
      return field.startsWith("g") && taker === "-" && giver !== "-" && fields.has(`c${giver}`)
    })
}

/** The kinds of resources that have a queue. */
export const kinds: ReadonlyArray<string> = Object.keys(free)

export const isFree = (
  key: string,
  resource: Resource,
  alive: ReadonlyArray<Waiter>,
  inquire: Inquire
): boolean | Promise<boolean> => free[kindOf(key)]!(resource, alive, (verb) => inquire(verb, key))
