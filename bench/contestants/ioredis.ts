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
    get: async (workers) => {
      await Promise.all(workers.map(async (worker) => {
        await client.set(worker.key, "1")
        while (worker.running()) {
          if (await client.get(worker.key) !== "1") throw new Error(`${worker.key} is another value`)
          worker.entered()
        }
      }))
    },
    // As many round trips as it needs at least: a WATCH belongs to a connection, so each worker has one.
    update: async (workers) => {
      await Promise.all(workers.map(async (worker) => {
        const own = client.duplicate({ enableAutoPipelining: false })
        while (worker.running()) {
          const found = await own.pipeline().watch(worker.key).get(worker.key).exec()
          const next = Number(found![1]![1] ?? 0) + 1
          if (await own.multi().set(worker.key, next).exec() !== null) worker.entered()
        }
      }))
    },
    hold: (keys) =>
      all(keys, holdsAtOnce, async (key) => {
        tokens.set(key, await lock(key))
      })
  }
}
