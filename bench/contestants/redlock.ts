import { Redis } from "ioredis"
import { setTimeout } from "node:timers/promises"
// @ts-ignore: its types cannot be found through its `exports`.
import Redlock from "redlock"
import { all, holdsAtOnce, type Open } from "../contestant.ts"

interface RedlockLike {
  readonly acquire: (
    keys: ReadonlyArray<string>,
    millis: number
  ) => Promise<{ readonly release: () => Promise<unknown> }>
  readonly using: <A>(keys: ReadonlyArray<string>, millis: number, f: (signal: AbortSignal) => Promise<A>) => Promise<A>
}

export const open: Open = async ({ autoPipelining, lease, port }) => {
  const client = new Redis({ host: "127.0.0.1", port, enableAutoPipelining: autoPipelining })
  await client.ping()
  // -1: tries for ever. Everything else is as it comes: the next try after 100 to 300 ms.
  const redlock = new (Redlock as new(clients: ReadonlyArray<Redis>, settings: object) => RedlockLike)([client], {
    retryCount: -1
  })
  return {
    locks: async (workers) => {
      await Promise.all(workers.map(async (worker) => {
        while (worker.running()) {
          const lock = await redlock.acquire([worker.key], lease)
          worker.entered()
          if (worker.stay !== 0) {
            await setTimeout(worker.stay)
            worker.leaving()
          }
          await lock.release()
          if (worker.pause !== 0) await setTimeout(worker.pause)
        }
      }))
    },
    hold: (keys) =>
      all(keys, holdsAtOnce, (key) =>
        new Promise((resolve, reject) => {
          redlock.using([key], lease, (signal) =>
            new Promise<never>((_, lost) => {
              signal.addEventListener("abort", () => lost(new Error(`${key} was lost`)))
              resolve()
            })).catch((error) => {
              console.error(`redlock: ${error}`)
              reject(error)
            })
        }))
  }
}
