/** A list as a signal: `BLPOP` blocks until somebody pushes, and what nobody waits for is kept. What is popped and lost is lost. */
import { Redis } from "ioredis"
import type { Open } from "../contestant.ts"
import { sleep } from "../machine.ts"

export const open: Open = async ({ port }) => {
  const client = new Redis({ host: "127.0.0.1", port })
  await client.ping()
  return {
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
