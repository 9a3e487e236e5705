import { Queue, Worker } from "bullmq"
import { Redis } from "ioredis"
import { type Open, producing, type Sample } from "../contestant.ts"

export const open: Open = async ({ port }) => {
  const connection = new Redis({ host: "127.0.0.1", port, maxRetriesPerRequest: null })
  await connection.ping()
  return {
    queue: async (name, finished) => {
      const queue = new Queue<Sample>(name, {
        connection,
        ...finished === "removed" ? { defaultJobOptions: { removeOnComplete: true } } : {}
      })
      await queue.waitUntilReady()
      return {
        produce: (production) =>
          producing(
            production,
            (job) => queue.add("bench", job),
            (jobs) => queue.addBulk(jobs.map((data) => ({ name: "bench", data })))
          ),
        work: (concurrency, handler) =>
          new Promise((_, reject) => {
            const worker = new Worker<Sample>(name, async ({ data }) => handler(data), { connection, concurrency })
            worker.on("error", reject)
          }),
        delay: (jobs) => queue.addBulk(jobs.map((data) => ({ name: "bench", data, opts: { delay: 3_600_000 } })))
      }
    }
  }
}
