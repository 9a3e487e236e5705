/**
 * What a hand-off costs at least, where waiters are served first in, first out: a list in Redis, one script each to take and to release,
 * and a message to the process of the next holder. It renews nothing, numbers nothing, and stands still when a holder or a message is lost.
 */
import { Redis } from "ioredis"
import { setTimeout } from "node:timers/promises"
import type { Open, Worker } from "../contestant.ts"

interface Client extends Redis {
  readonly take: (held: string, queue: string, permits: number, claim: string) => Promise<number>
  readonly leave: (held: string, queue: string) => Promise<unknown>
}

const take = `
if redis.call("incr", KEYS[1]) <= tonumber(ARGV[1]) then return 1 end
redis.call("decr", KEYS[1])
redis.call("rpush", KEYS[2], ARGV[2])
return 0`

const leave = `
local claim = redis.call("lpop", KEYS[2])
if claim then return redis.call("publish", string.match(claim, "^[^/]*"), claim) end
return redis.call("decr", KEYS[1])`

export const open: Open = async ({ autoPipelining, port }) => {
  const client = new Redis({ host: "127.0.0.1", port, enableAutoPipelining: autoPipelining }) as Client
  client.defineCommand("take", { numberOfKeys: 2, lua: take })
  client.defineCommand("leave", { numberOfKeys: 2, lua: leave })
  const subscriber = new Redis({ host: "127.0.0.1", port })
  const name = `bench:${process.pid}`
  const waiting = new Map<string, () => void>()
  subscriber.on("message", (_, claim: string) => {
    const granted = waiting.get(claim)!
    waiting.delete(claim)
    granted()
  })
  await subscriber.subscribe(name)
  let last = 0
  const loops = async (permits: number, workers: ReadonlyArray<Worker>) => {
    await Promise.all(workers.map(async ({ entered, key, leaving, pause, running, stay }) => {
      const keys = [`${key}:held`, `${key}:queue`] as const
      while (running()) {
        const claim = `${name}/${++last}`
        const granted = new Promise<void>((resolve) => waiting.set(claim, resolve))
        if (await client.take(...keys, permits, claim) === 1) waiting.delete(claim)
        else await granted
        entered()
        if (stay !== 0) {
          await setTimeout(stay)
          leaving()
        }
        await client.leave(...keys)
        if (pause !== 0) await setTimeout(pause)
      }
    }))
  }
  return { locks: (workers) => loops(1, workers), permits: loops }
}
