import { type FlowJob, FlowProducer, Queue, QueueEvents, Worker } from "bullmq"
import { Redis } from "ioredis"
import { type JobQueue, type Open, producing, type Sample } from "../contestant.ts"

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
      const run = (name: string, concurrency: number, handler: (job: Sample) => void) =>
        new Promise<never>((_, reject) => {
          const worker = new Worker<Sample>(name, async ({ data }) => handler(data), { connection, concurrency })
          worker.on("error", reject)
        })
      // It has no groups: a queue for each, and a worker that runs one job at a time.
      const grouped = async (groups: number): Promise<JobQueue> => {
        const queues = Array.from({ length: groups }, (_, at) => new Queue<Sample>(`${name}-${at}`, { connection }))
        await Promise.all(queues.map((queue) => queue.waitUntilReady()))
        return {
          produce: (production) =>
            producing(
              production,
              (job) => queues[job.number % groups]!.add("bench", job),
              (jobs) =>
                Promise.all(queues.map((queue, at) =>
                  queue.addBulk(
                    jobs.filter(({ number }) => number % groups === at).map((data) => ({ name: "bench", data }))
                  )
                ))
            ),
          work: (_, handler) => Promise.race(queues.map((queue) => run(queue.name, 1, handler)))
        }
      }
      return {
        grouped,
        produce: (production) =>
          producing(
            production,
            (job) => queue.add("bench", job),
            (jobs) => queue.addBulk(jobs.map((data) => ({ name: "bench", data })))
          ),
        work: (concurrency, handler) => run(name, concurrency, handler),
        delay: (jobs) => queue.addBulk(jobs.map((data) => ({ name: "bench", data, opts: { delay: 3_600_000 } })))
      }
    },
    // Trees only: a job waits for its children.
    flow: async (graph, nodes) => {
      const queueName = "flow"
      const worker = new Worker(queueName, async () => 1, { connection, concurrency: 64 })
      await worker.waitUntilReady()
      const events = new QueueEvents(queueName, { connection: connection.duplicate() })
      await events.waitUntilReady()
      const producer = new FlowProducer({ connection })
      const treeOf = (): FlowJob => {
        const leaf = (): FlowJob => ({ name: "bench", queueName })
        if (graph === "fan-in") return { ...leaf(), children: Array.from({ length: nodes }, leaf) }
        let tree = leaf()
        for (let count = 1; count < nodes; count++) tree = { ...leaf(), children: [tree] }
        return tree
      }
      return async () => (await producer.add(treeOf())).job.waitUntilFinished(events)
    }
  }
}
