import { Redis } from "ioredis"
import { setTimeout } from "node:timers/promises"
import { Mutex, Semaphore } from "redis-semaphore"
import { all, holdsAtOnce, type Open, type Worker } from "../contestant.ts"

export const open: Open = async ({ autoPipelining, lease, port }) => {
  const client = new Redis({ host: "127.0.0.1", port, enableAutoPipelining: autoPipelining })
  await client.ping()
  // Tries for ever. Everything else is as it comes: the next try after 10 ms, renewal at 80 % of the lease.
  const options = { lockTimeout: lease, acquireTimeout: Number.POSITIVE_INFINITY }
  const held: Array<Mutex> = []
  const loops = async (workers: ReadonlyArray<Worker>, make: (worker: Worker) => Mutex) => {
    await Promise.all(workers.map(async (worker) => {
      while (worker.running()) {
        const lock = make(worker)
        await lock.acquire()
        worker.entered()
        if (worker.stay !== 0) {
          await setTimeout(worker.stay)
          worker.leaving()
        }
        await lock.release()
        if (worker.pause !== 0) await setTimeout(worker.pause)
      }
    }))
  }
  return {
    locks: (workers) => loops(workers, (worker) => new Mutex(client, worker.key, options)),
    permits: (count, workers) => loops(workers, (worker) => new Semaphore(client, worker.key, count, options)),
    hold: (keys) =>
      all(keys, holdsAtOnce, async (key) => {
        const lock = new Mutex(client, key, options)
        await lock.acquire()
        held.push(lock)
      })
  }
}
