/** A stream as a queue, and nothing else: neither retries nor delays nor priorities, and jobs of a dead consumer stay with it. */
import { Redis } from "ioredis"
import { type Open, producing, type Sample } from "../contestant.ts"

type Entries = ReadonlyArray<readonly [id: string, fields: ReadonlyArray<string>]>
type Reply = ReadonlyArray<readonly [key: string, Entries]> | null

const group = "bench"

// Redis works on one part of a batch while the next one is written.
const part = 500

export const open: Open = async ({ port }) => {
  const client = new Redis({ host: "127.0.0.1", port, enableAutoPipelining: true })
  await client.ping()
  return {
    queue: async (name) => {
      await client.xgroup("CREATE", name, group, "0", "MKSTREAM").catch((error: Error) => {
        if (!error.message.startsWith("BUSYGROUP")) throw error
      })
      const offerAll = async (jobs: ReadonlyArray<Sample>) => {
        const parts: Array<Promise<unknown>> = []
        for (let from = 0; from < jobs.length; from += part) {
          const pipeline = client.pipeline()
          for (const job of jobs.slice(from, from + part)) pipeline.xadd(name, "*", "j", JSON.stringify(job))
          parts.push(pipeline.exec())
        }
        await Promise.all(parts)
      }
      return {
        produce: (production) =>
          producing(production, (job) => client.xadd(name, "*", "j", JSON.stringify(job)), offerAll),
        work: async (concurrency, handler) => {
          const reader = client.duplicate({ enableAutoPipelining: false })
          let done: ReadonlyArray<string> = []
          for (;;) {
            const pipeline = reader.pipeline()
            if (done.length > 0) pipeline.xack(name, group, ...done).xdel(name, ...done)
            pipeline.xreadgroup("GROUP", group, "one", "COUNT", concurrency, "BLOCK", 5000, "STREAMS", name, ">")
            const replies = await pipeline.exec()
            const [error, reply] = replies![replies!.length - 1]!
            if (error !== null) throw error
            done = ((reply as Reply)?.[0]?.[1] ?? []).map(([id, fields]) => {
              handler(JSON.parse(fields[1]!) as Sample)
              return id
            })
          }
        }
      }
    }
  }
}
