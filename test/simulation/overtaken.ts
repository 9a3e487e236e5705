/** A waiter that keeps its place in a queue is never behind one that came later. */
import { command, type Machine } from "../../src/internal/simulation/machine.ts"
import { kinds } from "./unserved.ts"

type Fields = ReadonlyArray<string>

/** The claims that wait, the first one first. A claim that asks in another session is another one. */
const queueOf = (fields: Fields): ReadonlyArray<string> => {
  const places: Array<readonly [place: number, claim: string]> = []
  for (let at = 0; at < fields.length; at += 2) {
    const place = /^w(-?\d+)$/.exec(fields[at]!)
    if (place !== null) places.push([Number(place[1]), fields[at + 1]!.split(" ")[0]!])
  }
  return places.sort(([one], [other]) => one - other).map(([, claim]) => claim)
}

/** Remembers the queues of a simulation, and compares. */
export class Queues {
  #before = new Map<string, ReadonlyArray<string>>()

  async overtaken(machine: Machine, database: number, namespace: string, now: number): Promise<string | undefined> {
    const ask = async (name: string, args: ReadonlyArray<string>) =>
      (await machine.execute(database, now, command(name, args))).reply as Fields
    const keys = (await Promise.all(kinds.map((kind) => ask("KEYS", [`{${namespace}:*}:${kind}:*`])))).flat()
    const queues = new Map<string, ReadonlyArray<string>>()
    for (const key of keys) queues.set(key, queueOf(await ask("HGETALL", [key])))
    const before = this.#before
    this.#before = queues
    for (const [key, queue] of queues) {
      const former = before.get(key)?.filter((claim) => queue.includes(claim)) ?? []
      const present = queue.filter((claim) => former.includes(claim))
      const at = present.findIndex((claim, at) => claim !== former[at])
      if (at >= 0) return `in the queue of ${key}, ${present[at]} has overtaken ${former[at]}`
    }
    return undefined
  }
}
