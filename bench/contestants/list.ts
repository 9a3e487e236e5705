/** A list of signals, or of permits: `BLPOP` blocks until one is pushed. What is popped and lost is lost. */
import { Redis } from "ioredis"
import { setTimeout } from "node:timers/promises"
import type { Open, Worker } from "../contestant.ts"
import { sleep } from "../machine.ts"

export const open: Open = async ({ port }) => {
  const client = new Redis({ host: "127.0.0.1", port })
  await client.ping()
  // A connection that waits does nothing else, so each worker has one.
  const loops = async (permits: number, workers: ReadonlyArray<Worker>) => {
    const { key } = workers[0]!
    if (await client.set(`${key}:made`, "", "NX") === "OK") {
      await client.rpush(key, ...Array.from({ length: permits }, () => ""))
    }
    await Promise.all(workers.map(async ({ entered, leaving, pause, running, stay }) => {
      const own = client.duplicate()
      while (running()) {
        await own.blpop(key, 0)
        entered()
        if (stay !== 0) {
          await setTimeout(stay)
          leaving()
        }
        await own.rpush(key, "")
        if (pause !== 0) await setTimeout(pause)
      }
    }))
  }
  return {
    locks: (workers) => loops(1, workers),
    permits: loops,
    signal: async ({ arriving, key, opened, pause, process, released }) => {
      await opened()
      for (let number = 0;; number++) {
        if (process === 0) {
          await client.blpop(key, 0)
          released(number)
        } else {
          await sleep(pause(number, 0))
          arriving(number)
          await client.lpush(key, "")
        }
      }
    }
  }
}
