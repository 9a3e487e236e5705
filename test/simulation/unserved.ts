/** What is free, and waited for all the same: an actor has forgotten a wake-up. */
import { kindOf } from "../../src/internal/actor/keys.ts"
import { unnumbered } from "../../src/internal/actor/transport.ts"
import { addressOf, batch } from "../../src/internal/actor/wire.ts"
import type { Machine } from "../../src/internal/simulation/machine.ts"

type State = readonly [tag: "state", capacity: number, taken: number, holds: number, waiting: number]
type Stale = readonly [tag: "stale"]
type Holders = readonly [tag: "holders", holders: ReadonlyArray<unknown>]
type Waiters = readonly [tag: "waiters", waiters: ReadonlyArray<readonly [weight: number]>]

// Where the clock of Redis was set back, a session that has expired is due so much later, in milliseconds. Sessions that are renewed
// last longer.
const setBack = 500

/** Asks when nothing is under way, so that every release has been answered for. */
const unservedAt = async (
  machine: Machine,
  database: number,
  functions: string,
  keys: Iterable<string>,
  now: number
): Promise<string | undefined> => {
  const ask = async (call: Parameters<Machine["execute"]>[2]) => (await machine.execute(database, now, call)).reply
  const found = await Promise.all(Array.from(keys, async (key) => {
    const address = addressOf(key.slice(0, key.indexOf("}") + 2), false, "")
    const verbs = kindOf(key) === "lock" ? ["lock.holders", "lock.waiters"] : ["semaphore.state", "semaphore.waiters"]
    const messages = verbs.map((verb) => ({ verb, key, args: [] }))
    const { count, text } = batch(address, unnumbered, messages)
    const [, [state, waiters]] = JSON.parse(String(await ask({ name: `${functions}_ro`, count, text }))) as [
      "ok",
      readonly [State | Holders | Stale, Waiters | Stale]
    ]
    // An expired session is in the way.
    if (state[0] === "stale" || waiters[0] === "stale") return undefined
    const [capacity, taken] = state[0] === "holders" ? [1, state[1].length] : [state[1], state[2]]
    const next = waiters[1][0]?.[0]
    return next !== undefined && Number(next) <= capacity - taken
      ? `${key} has ${capacity - taken} of ${capacity} free, and the next of its waiters wants ${next}`
      : undefined
  }))
  return found.find((one) => one !== undefined)
}

/** By the clock of Redis now, when a session may be over that is not due yet, and a little later, when it is. */
export const unserved: typeof unservedAt = async (machine, database, functions, keys, now) =>
  await unservedAt(machine, database, functions, keys, now + setBack) &&
  await unservedAt(machine, database, functions, keys, now)
