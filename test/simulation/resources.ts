/** What Redis has of a resource with a queue: the claims that wait, and those that were served. */
import { kindOf } from "../../src/internal/actor/keys.ts"

type Fields = ReadonlyMap<string, string>

/** Sends a command that only reads. */
export type Read = (command: string, ...args: ReadonlyArray<string>) => Promise<unknown>

/** Asks the actor about one resource. */
export type Ask = (verb: string) => Promise<ReadonlyArray<unknown>>

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

/** Of the keys of its partition. */
export const prefixOf = (key: string): string => key.slice(0, key.indexOf("}") + 2)

const sessionsOf = (key: string): string => `${prefixOf(key)}sessions`

export const dueOf = (key: string): string => `${prefixOf(key)}due`

/** The member of `due` that is its alarm. */
export const alarmOf = (key: string): string => `@${key.slice(prefixOf(key).length)}`

/** A waiter as a queue has it. */
const waiterOf = (claim: string, detail: string): Waiter => ({ claim, weight: detail === "" ? 1 : Number(detail) })

/** The waiters of a queue that is a text, see lua/waiters.lua. */
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

const noClaims: ReadonlySet<string> = new Set()

const fieldsOf = async (read: Read, key: string): Promise<Fields> => {
  const found = await read("HGETALL", key) as ReadonlyArray<string>
  return new Map(Array.from({ length: found.length / 2 }, (_, at) => [found[2 * at]!, found[2 * at + 1]!]))
}

/** A lock is a text, see lua/Lock.lua. Its waiters may be in the hash. */
const lockOf = async (read: Read, key: string): Promise<Resource> => {
  const text = await read("HGET", sessionsOf(key), alarmOf(key)) as string | null
  const words = (text ?? "h-").split(" ")
  const isInline = words[0]!.startsWith("S")
  const isAlone = /^[hk]/.test(words[0]!)
  const holder = isAlone ? words[0]!.slice(1) : words[isInline ? 1 : 2]!
  const fields = isAlone || isInline ? new Map<string, string>() : await fieldsOf(read, key)
  const waiters = isInline ? words.slice(4).map((claim) => waiterOf(claim, "")) : waitersIn(fields)
  return { waiters, granted: holder === "-" ? noClaims : new Set([holder]), joined: noClaims, fields }
}

export const resourceAt = async (read: Read, key: string): Promise<Resource> => {
  const kind = kindOf(key)
  if (kind === "lock") return lockOf(read, key)
  const fields = await fieldsOf(read, key)
  const waiters = waitersIn(fields)
  const turn = fields.get("t")
  const granted = kind === "sharedRef"
    ? new Set(turn === undefined ? [] : [turn])
    : kind === "rendezvous"
    ? claimsIn(fields, "c", "t ")
    : claimsIn(fields, "h")
  return { waiters, granted, joined: claimsIn(fields, "o"), fields }
}

/** Whether the waiters that are alive, or the first of them, could be served now. The first one is alive. */
type Free = (resource: Resource, alive: ReadonlyArray<Waiter>, ask: Ask) => boolean | Promise<boolean>

const isVacant: Free = ({ granted }) => granted.size === 0

/** The permits that are held: the actor counts them as well. */
const takenOf = ({ fields, granted }: Resource): number =>
  [...granted].reduce((sum, claim) => sum + Number.parseInt(fields.get(`h${claim}`)!, 10), 0)

const hasPermits: Free = async (resource, [next], ask) => {
  const capacity = Number((await ask("semaphore.state"))[1])
  // Without permits, it is not open anywhere.
  return capacity > 0 && next!.weight <= capacity - takenOf(resource)
}

const isPending: Free = async (_resource, _alive, ask) => Number((await ask("signal.state"))[1]) > 0

const canOpen: Free = async ({ granted }, alive, ask) =>
  granted.size === 0 && alive.length >= Number((await ask("doubleBarrier.state"))[3])

// An item without a taker, whose giver has not given up.
const isOffered: Free = ({ fields }) =>
  [...fields].some(([field, item]) => {
    const [, giver, taker] = item.split(" ")
    return field.startsWith("g") && taker === "-" && giver !== "-" && fields.has(`c${giver}`)
  })

/** By kind: those of all resources that have a queue. */
const free: { readonly [kind: string]: Free } = {
  lock: isVacant,
  election: isVacant,
  singleton: isVacant,
  sharedRef: isVacant,
  readWriteLock: hasPermits,
  semaphore: hasPermits,
  signal: isPending,
  doubleBarrier: canOpen,
  rendezvous: isOffered
}

export const kinds: ReadonlyArray<string> = Object.keys(free)

export const isFree = (key: string, ...about: Parameters<Free>): boolean | Promise<boolean> =>
  free[kindOf(key)]!(...about)
