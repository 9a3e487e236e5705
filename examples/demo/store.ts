/** What the demo itself keeps in Redis, beside what the library keeps there. */
import { Effect, Schedule } from "effect"
import { Redis } from "../../src/index.ts"
import type { Counts } from "./words.ts"

export const keysOf = (namespace: string) => ({
  /** How often each word occurs, and how far each file is. */
  totals: `${namespace}:totals`,
  /** Who was killed, and who was stopped. */
  fates: `${namespace}:fates`
})
export type Keys = ReturnType<typeof keysOf>

// Words have no spaces, so these never collide with one. They are in the same hash as the counts, so that one command
// writes both: either a part of a file is counted and marked, or it is neither.
export const filesField = "number of files"
export const fileField = (file: string) => `file ${file}`

/** For whatever is as good when it is done twice, so that a lost connection is no reason to give up. */
export const ask = <A>(command: string, ...args: ReadonlyArray<string>) =>
  Effect.flatMap(Redis.Redis, (redis) => redis.send<A>(command, ...args)).pipe(
    Effect.retry({ times: 20, schedule: Schedule.spaced("100 millis") })
  )

/** The counts, and the mark of each file that is in them. */
export const readTotals = Effect.fnUntraced(function*({ totals }: Keys) {
  const flat = yield* ask<Array<string>>("HGETALL", totals)
  const counts: Counts = new Map()
  const marks = new Map<string, string>()
  for (let at = 0; at < flat.length; at += 2) {
    const [field, value] = [flat[at]!, flat[at + 1]!]
    if (field.includes(" ")) marks.set(field, value)
    else counts.set(field, Number(value))
  }
  return { counts, marks }
})

export const clear = (keys: Keys) =>
  Effect.flatMap(
    Redis.Redis,
    (redis) => Effect.forEach(Object.values(keys), (key) => redis.send("DEL", key), { discard: true })
  )
