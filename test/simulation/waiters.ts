/** The waiters of each resource, by what Redis has. */
import { command, type Machine } from "../../src/internal/simulation/machine.ts"

type Fields = ReadonlyArray<string>

/** The claims that wait, the first one first, behind the key of their resource. */
export type Waiters = ReadonlyMap<string, Fields>

/** Of what is behind one actor, with a queue. */
const isQueueing = (key: string): boolean => /^\{[^}]*\}:(lock|readWriteLock|semaphore):/.test(key)

const isSessions = (key: string): boolean => key.endsWith("}:sessions")

const pairsOf = (fields: Fields): ReadonlyArray<readonly [name: string, value: string]> =>
  Array.from({ length: fields.length / 2 }, (_, at) => [fields[2 * at]!, fields[2 * at + 1]!])

/**
 * The claims that wait in a hash, the first one first: a few are in one text. A claim that asks in another session is another
 * one.
 */
const queueOf = (hash: Fields): ReadonlyArray<string> =>
  pairsOf(hash).flatMap(([name, value]) => {
    if (name === "w") return [...value.matchAll(/ ([^ :]+)/g)].map(([, claim], at) => [at, claim!] as const)
    const place = /^w(-?\d+)$/.exec(name)
    return place === null ? [] : [[Number(place[1]), value.split(" ")[0]!] as const]
  }).sort(([one], [other]) => one - other).map(([, claim]) => claim)

/** A few waiters of a lock are in its inline state. */
const inlineQueues = (sessions: string, hash: Fields): ReadonlyArray<readonly [key: string, queue: Fields]> =>
  pairsOf(hash).flatMap(([name, value]) =>
    name.startsWith("@lock:") && value.startsWith("S")
      ? [[sessions.replace(/sessions$/, name.slice(1)), value.split(" ").slice(4)]]
      : []
  )

/** The queues of all resources that have a hash, or waiters; in the order of their keys. */
export const queuesIn = async (
  machine: Machine,
  database: number,
  namespace: string,
  now: number
): Promise<Waiters> => {
  const ask = async (name: string, args: Fields) =>
    (await machine.execute(database, now, command(name, args))).reply as Fields
  const keys = (await ask("KEYS", [`{${namespace}:*}:*`])).filter((key) => isQueueing(key) || isSessions(key)).sort()
  const queues = await Promise.all(keys.map(async (key) => {
    const hash = await ask("HGETALL", [key])
    return isSessions(key) ? inlineQueues(key, hash) : [[key, queueOf(hash)] as const]
  }))
  return new Map(queues.flat())
}
