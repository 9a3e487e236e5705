/** `SET NX PX` and compare-and-delete, and nothing else: neither waiting nor renewal nor fairness. */
import { Redis } from "ioredis"
import { all, holdsAtOnce, type Open } from "../contestant.ts"

interface Client extends Redis {
  readonly unlock: (key: string, token: string) => Promise<number>
}

const unlock = `if redis.call("get", KEYS[1]) == ARGV[1] then return redis.call("del", KEYS[1]) end return 0`

export const open: Open = async ({ autoPipelining, lease, port }) => {
  const client = new Redis({ host: "127.0.0.1", port, enableAutoPipelining: autoPipelining }) as Client
  client.defineCommand("unlock", { numberOfKeys: 1, lua: unlock })
  await client.ping()
  const tokens = new Map<string, string>()
  let last = 0
  const lock = async (key: string): Promise<string> => {
    const token = `${process.pid}:${++last}`
    if (await client.set(key, token, "PX", lease, "NX") !== "OK") throw new Error(`${key} is taken`)
    return token
  }
  return {
    locks: async (workers) => {
      await Promise.all(workers.map(async (worker) => {
        if (worker.stay !== 0) throw new Error("it cannot wait for a lock")
        while (worker.running()) {
          const token = await lock(worker.key)
          worker.entered()
          await client.unlock(worker.key, token)
        }
      }))
    },
    hold: (keys) =>
      all(keys, holdsAtOnce, async (key) => {
        tokens.set(key, await lock(key))
      })
  }
}
