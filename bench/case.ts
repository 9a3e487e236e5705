/**
 * A process of one contestant: `node bench/case.ts <job as JSON>`, started by `main.ts` on a core of its own. It talks
 * to its parent by messages: it says `ready`, is told the times when the measurement begins and ends, and sends the result.
 */
import type { Contestant, Open, Worker } from "./contestant.ts"
import { now, sleep } from "./machine.ts"

export type Name = "lockstep" | "lockstep-scoped" | "ioredis" | "ioredis-auto" | "redlock" | "redis-semaphore"

export interface Job {
  readonly contestant: Name
  readonly port: number
  readonly lease: number
  readonly autoPipelining: boolean
  readonly task:
    /** Every worker loops through its lock, or a permit of its semaphore. */
    | {
      readonly is: "loops"
      readonly keys: ReadonlyArray<string>
      readonly stay: number
      readonly pause: number
      readonly permits?: number
    }
    /** Holds so many locks. */
    | { readonly is: "hold"; readonly count: number }
    /** Holds more and more locks and says what each number costs this process. */
    | { readonly is: "memory"; readonly counts: ReadonlyArray<number>; readonly settle: number }
    /** Waits for one lock and says when it has it. */
    | { readonly is: "wait"; readonly key: string }
}

export type ToChild = { readonly from: number; readonly to: number } | { readonly more: true }

export interface LoopsResult {
  readonly millis: number
  readonly cpuMillis: number
  /** Acquisitions of each worker. */
  readonly counts: ReadonlyArray<number>
  /** For each stay: worker, time of entry, time of leaving. Empty unless there is a stay. */
  readonly stays: ReadonlyArray<readonly [worker: number, entered: number, left: number]>
}

export interface HoldResult {
  readonly cpuMillis: number
}

export interface MemoryResult {
  readonly heap: number
  readonly rss: number
}

export interface Entered {
  readonly at: number
}

const load = async (name: Name): Promise<Open> => {
  switch (name) {
    case "lockstep":
      return (await import("./contestants/lockstep.ts")).open
    case "lockstep-scoped":
      return (await import("./contestants/lockstep.ts")).openScoped
    case "ioredis":
    case "ioredis-auto":
      return (await import("./contestants/ioredis.ts")).open
    case "redlock":
      return (await import("./contestants/redlock.ts")).open
    case "redis-semaphore":
      return (await import("./contestants/redis-semaphore.ts")).open
  }
}

const send = (message: unknown): Promise<void> =>
  new Promise((resolve, reject) => process.send!(message, (error: Error | null) => error ? reject(error) : resolve()))

const receive = (): Promise<ToChild> => new Promise((resolve) => process.once("message", resolve))

const cpuMillis = (): number => {
  const { system, user } = process.cpuUsage()
  return (system + user) / 1000
}

const name = (n: number): string => `bench:${String(n).padStart(6, "0")}`

const names = (from: number, to: number) => Array.from({ length: to - from }, (_, at) => name(from + at))

const loops = async (contestant: Contestant, task: Extract<Job["task"], { is: "loops" }>): Promise<LoopsResult> => {
  const { keys, pause, permits, stay } = task
  const counts = keys.map(() => 0)
  const since = keys.map(() => 0)
  const stays: Array<readonly [number, number, number]> = []
  const workers = keys.map((key, at): Worker => ({
    key,
    stay,
    pause,
    running: () => true,
    entered: stay === 0
      ? () => {
        counts[at]!++
      }
      : () => {
        since[at] = now()
        counts[at]!++
      },
    leaving: () => void stays.push([at, since[at]!, now()])
  }))
  const done = permits === undefined ? contestant.locks(workers) : contestant.permits!(permits, workers)
  const go = receive()
  await send({ ready: true })
  const measure = async (): Promise<LoopsResult> => {
    const { from, to } = await go as { from: number; to: number }
    await sleep(from - now())
    stays.length = 0
    const before = { at: now(), counts: [...counts], cpu: cpuMillis() }
    await sleep(to - now())
    return {
      millis: now() - before.at,
      cpuMillis: cpuMillis() - before.cpu,
      counts: counts.map((count, at) => count - before.counts[at]!),
      stays
    }
  }
  // The loops end only by failing.
  return await Promise.race([measure(), done.then(() => Promise.reject(new Error("the loops ended")))])
}

const hold = async (contestant: Contestant, count: number): Promise<HoldResult> => {
  await contestant.hold(names(0, count))
  const go = receive()
  await send({ ready: true })
  const { from, to } = await go as { from: number; to: number }
  await sleep(from - now())
  const before = cpuMillis()
  await sleep(to - now())
  return { cpuMillis: cpuMillis() - before }
}

const collect = (): MemoryResult => {
  for (let i = 0; i < 3; i++) globalThis.gc!()
  const { heapUsed, rss } = process.memoryUsage()
  return { heap: heapUsed, rss }
}

const memory = async (contestant: Contestant, counts: ReadonlyArray<number>, settle: number): Promise<void> => {
  let from = 0
  for (const count of counts) {
    await contestant.hold(names(from, count))
    from = count
    await sleep(settle)
    const go = receive()
    await send(collect())
    await go
  }
}

const job = JSON.parse(process.argv[2]!) as Job
// When the parent is gone, nobody needs this.
process.once("disconnect", () => process.exit(1))
const open = await load(job.contestant)
const contestant = await open(job)
switch (job.task.is) {
  case "loops":
    await send(await loops(contestant, job.task))
    break
  case "hold":
    await send(await hold(contestant, job.task.count))
    break
  case "memory":
    await memory(contestant, job.task.counts, job.task.settle)
    break
  case "wait": {
    const { key } = job.task
    const entered = new Promise<number>((resolve, reject) => {
      const worker = { key, stay: 0, pause: 0, running: () => true, entered: () => resolve(now()), leaving: () => {} }
      contestant.locks([worker]).catch(reject)
    })
    await send({ ready: true })
    await send({ at: await entered } satisfies Entered)
  }
}
process.exit(0)
