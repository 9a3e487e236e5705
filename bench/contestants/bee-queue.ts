/** With the settings that its documentation recommends for speed: no events, and no jobs kept in the process. */
import BeeQueue from "bee-queue"
import { type Open, producing, type Sample } from "../contestant.ts"

export const open: Open = async ({ port }) => ({
  queue: async (name, finished) => {
    const connect = (isWorker: boolean) =>
      new BeeQueue<Sample>(name, {
        redis: { host: "127.0.0.1", port },
        isWorker,
        getEvents: false,
        sendEvents: false,
        storeJobs: false,
        removeOnSuccess: finished === "removed"
      })
    const queue = connect(false)
    await queue.ready()
    return {
      produce: (production) =>
        producing(
          production,
          (job) => queue.createJob(job).save(),
          async (jobs) => {
            const [failed] = (await queue.saveAll(jobs.map((job) => queue.createJob(job)))).values()
            if (failed !== undefined) throw failed
          }
        ),
      work: (concurrency, handler) =>
        new Promise((_, reject) => {
          const worker = connect(true)
          worker.on("error", reject)
          worker.process(concurrency, async ({ data }) => handler(data))
        })
    }
  }
})
