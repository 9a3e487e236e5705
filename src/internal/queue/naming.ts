/** The ids that a queue makes for jobs and dead letters. Ids of all shards but the first begin with the shard's number. */

import { checkName } from "../actor/keys.ts"

// Numbers are as long as Redis takes them, as in lua/Queue.lua.
const shape = /^(?:(\d{1,4}):)?((?:[uhnlviom])?\d{1,16}-\d{1,16})$/i

/** Among all shards. */
export const nameOf = (shard: number, own: string): string => shard === 0 ? own : `${shard}:${own}`

/** The shard, and the id there; undefined if a producer gave the id. */
export const ownOf = (id: string): readonly [shard: number, own: string] | undefined => {
  const [, shard = "0", own] = shape.exec(id) ?? []
  return own === undefined ? undefined : [Number(shard), own]
}

/** Of a job, among all shards: the id that it was offered with, or that the queue has made. */
export const idOf = (shard: number, own: string, given = ""): string =>
  given !== "" && ownOf(given) === undefined ? given : nameOf(shard, given || own)

/** The id of a job in a shard. One of another shard is that of no job there. */
export const localOf = (id: string, shard: number): string => {
  const own = ownOf(checkName(id, "id"))
  return own?.[0] === shard ? own[1] : id
}

/** Of a dead letter, in its shard. */
export const letterOf = (letter: string): readonly [shard: number, own: string] => {
  const own = ownOf(letter)
  // In front of those of jobs stands the letter of their stream.
  if (own !== undefined && /^\d/.test(own[1])) return own
  throw new RangeError(
    `${JSON.stringify(letter)} is not the id of a dead letter: use its \`letter\`, not the id of its job`
  )
}
