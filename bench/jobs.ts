/** What a process of a contestant does with a queue of jobs. */
import type { JobQueue, Sample } from "./contestant.ts"
import { now, sleep } from "./machine.ts"
import { counted, cpuMillis, paced, receive, send } from "./parent.ts"

export type JobsTask =
  /** Offers jobs, of which the first ones warm it up. */
  | {
    readonly is: "enqueue"
    readonly producers: number
    /** Jobs of each call. 1: the call for a single job. */
    readonly batch: number
    readonly warm: number
    readonly count: number
  }
  /** Stores a backlog of jobs and then runs it, beside so many that are delayed. The first jobs warm it up. */
  | {
    readonly is: "process"
    readonly concurrency: number
    readonly warm: number
    readonly count: number
    readonly delayed?: number
    /** The jobs are in so many groups. */
    readonly groups?: number
  }
  /** Stores so many jobs and then runs them. */
  | { readonly is: "drain"; readonly concurrency: number; readonly count: number }
  /** Offers one job at a time, so many milliseconds apart on average. */
  | { readonly is: "offer"; readonly interval: number }
  /** Runs the jobs that another process offers. */
  | { readonly is: "work" }

export interface DrainResult {
  /** Of offering them all, and of running them. */
  readonly millis: readonly [number, number]
  /** The heap in use before the first job is run, and after each tenth of them. */
  readonly heaps: ReadonlyArray<number>
}

/** Stores more and more jobs, and runs them if they are to be `finished`. */
export interface StoreTask {
  readonly is: "store"
  readonly finished: boolean
  readonly counts: ReadonlyArray<number>
  readonly settle: number
}

export interface JobsResult {
  readonly jobs: number
  readonly millis: number
  readonly cpuMillis: number
}

export interface DelaysResult {
  readonly cpuMillis: number
  /** From the offer of each job to its handler, in milliseconds. */
  readonly delays: ReadonlyArray<number>
}

const backlogBatch = 1000

/** Tells the parent when the warm-up is over, and measures from then on until so many jobs are counted. */
const meter = (warm: number, count: number) => {
  const { promise, resolve } = Promise.withResolvers<JobsResult>()
  let counted = 0
  let from: JobsResult | undefined
  const here = (): JobsResult => ({ jobs: counted, millis: now(), cpuMillis: cpuMillis() })
  return {
    measured: promise,
    add: (jobs: number): void => {
      counted += jobs
      if (from === undefined) {
        if (counted < warm) return
        from = here()
        void send({ ready: true })
      } else if (counted >= warm + count) {
        const to = here()
        resolve({
          jobs: to.jobs - from.jobs,
          millis: to.millis - from.millis,
          cpuMillis: to.cpuMillis - from.cpuMillis
        })
      }
    }
  }
}

/** Jobs with consecutive numbers. */
const samples = () => {
  let number = 0
  return { next: (): Sample => ({ number: ++number, at: 0 }), made: () => number }
}

/** Offers jobs until there are so many. */
const fill = async (queue: JobQueue, { made, next }: ReturnType<typeof samples>, count: number): Promise<void> => {
  while (made() < count) {
    const batch = Math.min(backlogBatch, count - made())
    const until = made() + batch
    await queue.produce({ producers: 1, batch, more: () => made() < until, next, stored: () => {} })
  }
}

const enqueue = async (
  queue: JobQueue,
  { batch, count, producers, warm }: Extract<JobsTask, { is: "enqueue" }>
): Promise<JobsResult> => {
  const { add, measured } = meter(warm, count)
  const { made, next } = samples()
  // No more than that: Redis would be at work after the end of the measurement.
  await queue.produce({ producers, batch, more: () => made() < warm + count, next, stored: add })
  return await measured
}

// By then the last jobs are acknowledged too, and Redis has counted that.
const acknowledged = 50

const work = async (
  queue: JobQueue,
  { concurrency, count, delayed = 0, groups = 0, warm }: Extract<JobsTask, { is: "process" }>
): Promise<JobsResult> => {
  const { add, measured } = meter(warm, count)
  for (let left = delayed; left > 0; left -= backlogBatch) {
    await queue.delay!(Array.from({ length: Math.min(left, backlogBatch) }, () => ({ number: 0, at: 0 })))
  }
  const all = warm + count
  await fill(queue, samples(), all)
  let sum = 0
  const last = new Map<number, number>()
  const handler = ({ number }: Sample): void => {
    if (groups > 0) {
      const group = number % groups
      if (number < last.get(group)!) throw new Error("a job of a group was run before an earlier one")
      last.set(group, number)
    }
    sum += number
    add(1)
  }
  const result = await Promise.race([measured, queue.work(concurrency, handler)])
  await sleep(acknowledged)
  if (sum !== all * (all + 1) / 2) throw new Error("a job was lost, or was run twice")
  return result
}

const heap = (): number => {
  globalThis.gc!()
  return process.memoryUsage().heapUsed
}

const drain = async (
  queue: JobQueue,
  { concurrency, count }: Extract<JobsTask, { is: "drain" }>
): Promise<DrainResult> => {
  const from = now()
  await fill(queue, samples(), count)
  const stored = now()
  const heaps = [heap()]
  let ended = 0
  const run = new Promise<void>((resolve) => {
    const handler = () => {
      ended++
      if (ended % (count / 10) === 0) heaps.push(heap())
      if (ended === count) resolve()
    }
    void queue.work(concurrency, handler)
  })
  await run
  return { millis: [stored - from, now() - stored], heaps }
}

const offer = async (queue: JobQueue, interval: number): Promise<DelaysResult> => {
  const go = receive()
  await send({ ready: true })
  const { from } = await go as { from: number; to: number }
  let number = 0
  const more = () => sleep(paced(from, interval) * (0.5 + Math.random())).then(() => true)
  const next = () => ({ number: ++number, at: now() })
  const produced = queue.produce({ producers: 1, batch: 1, more, next, stored: () => {} })
  const delays: Array<number> = []
  const measure = async () => ({ ...await counted(go, [], delays), delays })
  return await Promise.race([measure(), produced.then(measure)])
}

const handle = async (queue: JobQueue): Promise<DelaysResult> => {
  const delays: Array<number> = []
  const working = queue.work(1, ({ at }) => void delays.push(now() - at))
  const go = receive()
  await send({ ready: true })
  const measure = async () => ({ ...await counted(go, [], delays), delays })
  return await Promise.race([measure(), working])
}

export const store = async (queue: JobQueue, { counts, finished, settle }: StoreTask): Promise<void> => {
  const jobs = samples()
  let ended = 0
  let wanted = 0
  let all = () => {}
  const working = finished
    ? queue.work(50, () => {
      if (++ended >= wanted) all()
    })
    : new Promise<never>(() => {})
  for (const count of counts) {
    wanted = count
    const run = new Promise<void>((resolve) => all = resolve)
    await fill(queue, jobs, count)
    if (finished) await Promise.race([run, working])
    await sleep(settle)
    const go = receive()
    await send({ ready: true })
    await go
  }
}

export const jobs = async (queue: JobQueue, task: JobsTask): Promise<JobsResult | DelaysResult | DrainResult> => {
  switch (task.is) {
    case "enqueue":
      return await enqueue(queue, task)
    case "process":
      return await work(task.groups === undefined ? queue : await queue.grouped!(task.groups), task)
    case "drain":
      return await drain(queue, task)
    case "offer":
      return await offer(queue, task.interval)
    case "work":
      return await handle(queue)
  }
}
