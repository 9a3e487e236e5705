/**
 * A process of one contestant: `node bench/case.ts <job as JSON>`, started by `main.ts` on a core of its own. It talks
 * to its parent by messages: it says `ready`, is told the times when the measurement begins and ends, and sends the result.
 */
import type { Contestant, Graph, Meeting, Open, RefVerb, Sample, Traffic, Worker } from "./contestant.ts"
import type { Column } from "./figures.ts"
import { jobs, type JobsTask, store, type StoreTask } from "./jobs.ts"
import { now, sleep } from "./machine.ts"
import { counted, cpuMillis, paced, receive, send } from "./parent.ts"
import { openProgress } from "./progress.ts"

export type Name = Column | "lockstep-scoped"

export interface Job {
  readonly contestant: Name
  readonly port: number
  readonly lease: number
  readonly autoPipelining: boolean
  readonly task:
    /** Every worker loops through its lock, or a permit of its semaphore, or leadership; or does something with its ref. */
    | {
      readonly is: "loops"
      readonly keys: ReadonlyArray<string>
      readonly stay: number
      readonly pause: number
      readonly permits?: number
      readonly lead?: true
      readonly ref?: RefVerb
    }
    /** Holds so many locks. */
    | { readonly is: "hold"; readonly count: number }
    /** Holds more and more locks and says what each number costs this process. */
    | { readonly is: "memory"; readonly counts: ReadonlyArray<number>; readonly settle: number }
    /** Waits for one lock and says when it has it. */
    | { readonly is: "wait"; readonly key: string }
    /** Is a candidate, says when it leads, and leads on. */
    | { readonly is: "lead"; readonly key: string }
    /** Its parties meet those of other processes. */
    | {
      readonly is: "meet"
      readonly by: "barrier" | "latch" | "signal"
      readonly key: string
      readonly parties: number
      readonly own: number
      readonly process: number
      /** The parties of a generation come at random within so many milliseconds, and one of them after that. */
      readonly spread: number
    }
    /** Publishes, and handles what is published. */
    | {
      readonly is: "traffic"
      readonly group: boolean
      readonly handlers: number
      readonly publishers: number
      readonly process: number
      /** The processes that have handlers. */
      readonly subscribing: ReadonlyArray<number>
      /** Milliseconds between two events, about; 0: as fast as they are handled. */
      readonly interval: number
    }
    /** Workers run what each of them has offered: jobs that take so many milliseconds. `keep` of them are not stolen. */
    | { readonly is: "steal"; readonly loads: ReadonlyArray<ReadonlyArray<number>>; readonly keep: number }
    | JobsTask
    | StoreTask
    /** Runs a graph of so many jobs once to warm up, and then so often. */
    | { readonly is: "flow"; readonly graph: Graph; readonly nodes: number; readonly runs: number }
}

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

/** What was seen here of a generation. */
export interface Generation {
  arrived: number
  released: number
  lastArrival: number
  firstRelease: number
  lastRelease: number
}

export interface TrafficResult {
  readonly millis: number
  readonly cpuMillis: number
  /** Events of each handler. */
  readonly counts: ReadonlyArray<number>
  /** How long each took from its publication to its handler, in milliseconds. Empty unless there is an interval. */
  readonly delays: ReadonlyArray<number>
}

export interface FlowResult {
  /** Of one run. */
  readonly millis: number
}

export interface StealResult {
  /** From the first offer to the end of the last job. */
  readonly millis: number
}

export interface Entered {
  readonly at: number
}

const load = async (name: Name): Promise<Open> => {
  switch (name) {
    case "lockstep-deque":
    case "static":
      return (await import("./contestants/stealing.ts")).open
    case "lockstep":
      return (await import("./contestants/lockstep.ts")).open
    case "lockstep-background":
      return (await import("./contestants/lockstep.ts")).openBackground
    case "lockstep-cached":
      return (await import("./contestants/lockstep.ts")).openCached
    case "lockstep-scoped":
      return (await import("./contestants/lockstep.ts")).openScoped
    case "ioredis":
    case "ioredis-auto":
      return (await import("./contestants/ioredis.ts")).open
    case "redlock":
      return (await import("./contestants/redlock.ts")).open
    case "redis-semaphore":
      return (await import("./contestants/redis-semaphore.ts")).open
    case "polling":
      return (await import("./contestants/polling.ts")).open
    case "pubsub":
      return (await import("./contestants/pubsub.ts")).open
    case "list":
      return (await import("./contestants/list.ts")).open
    case "lua-queue":
      return (await import("./contestants/lua-queue.ts")).open
    case "xread":
      return (await import("./contestants/streams.ts")).open
    case "xread-each":
      return (await import("./contestants/streams.ts")).openEach
    case "xreadgroup":
      return (await import("./contestants/streams.ts")).openGroup
    case "raw-queue":
      return (await import("./contestants/raw-queue.ts")).open
    case "bullmq":
      return (await import("./contestants/bullmq.ts")).open
    case "bee-queue":
      return (await import("./contestants/bee-queue.ts")).open
    case "effect-mq":
      return (await import("./contestants/effect-mq.ts")).open
    case "persisted-queue":
      return (await import("./contestants/persisted-queue.ts")).open
    case "in-process":
      return (await import("./contestants/in-process.ts")).open
  }
}

const name = (n: number): string => `bench:${String(n).padStart(6, "0")}`

const names = (from: number, to: number) => Array.from({ length: to - from }, (_, at) => name(from + at))

const loops = async (contestant: Contestant, task: Extract<Job["task"], { is: "loops" }>): Promise<LoopsResult> => {
  const { keys, lead = false, pause, permits, ref, stay } = task
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
  const done = ref !== undefined
    ? contestant[ref]!(workers)
    : lead
    ? contestant.lead!(workers)
    : permits === undefined
    ? contestant.locks!(workers)
    : contestant.permits!(permits, workers)
  const go = receive()
  await send({ ready: true })
  const measure = async (): Promise<LoopsResult> => ({ ...await counted(go, counts, stays), stays })
  // The loops end only by failing.
  return await Promise.race([measure(), done.then(() => Promise.reject(new Error("the loops ended")))])
}

const hold = async (contestant: Contestant, count: number): Promise<HoldResult> => {
  await contestant.hold!(names(0, count))
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
    await contestant.hold!(names(from, count))
    from = count
    await sleep(settle)
    const go = receive()
    await send(collect())
    await go
  }
}

/** When it is in, for the first time. */
const entry = async (
  under: (workers: ReadonlyArray<Worker>) => Promise<void>,
  key: string,
  stay: number
): Promise<number> => {
  const entered = new Promise<number>((resolve, reject) => {
    const worker = { key, stay, pause: 0, running: () => true, entered: () => resolve(now()), leaving: () => {} }
    under([worker]).catch(reject)
  })
  await send({ ready: true })
  return entered
}

const meet = async (
  contestant: Contestant,
  { by, key, own, parties, process, spread }: Extract<Job["task"], { is: "meet" }>
): Promise<ReadonlyArray<Generation>> => {
  const generations: Array<Generation> = []
  const of = (generation: number): Generation =>
    generations[generation] ??= {
      arrived: 0,
      released: 0,
      lastArrival: 0,
      firstRelease: Number.MAX_VALUE,
      lastRelease: 0
    }
  const go = receive()
  let from = Number.POSITIVE_INFINITY
  const meeting: Meeting = {
    key,
    own,
    parties,
    process,
    opened: async () => {
      await send({ ready: true })
      const told = await go as { from: number; to: number }
      from = told.from
    },
    pause: (generation, party) => {
      const within = paced(from, spread)
      return generation % parties === (process * own + party) % parties ? within * 1.1 : Math.random() * within
    },
    arriving: (generation) => {
      const seen = of(generation)
      seen.arrived++
      seen.lastArrival = now()
    },
    released: (generation) => {
      const at = now()
      const seen = of(generation)
      if (seen.released++ === 0) seen.firstRelease = at
      seen.lastRelease = at
    }
  }
  const measure = async () => {
    const { to } = await go as { from: number; to: number }
    await sleep(to - now())
    return generations
  }
  return await Promise.race([
    measure(),
    contestant[by]!(meeting).then(() => Promise.reject(new Error("the meeting has ended")))
  ])
}

// How far the publishers may be ahead of the slowest subscriber.
const window = 4096

const traffic = async (
  contestant: Contestant,
  task: Extract<Job["task"], { is: "traffic" }>,
  port: number
): Promise<TrafficResult> => {
  const { group, interval, process, publishers, subscribing } = task
  const counts: Array<number> = Array.from({ length: task.handlers }, () => 0)
  const last: Array<number> = counts.map(() => 0)
  const delays: Array<number> = []
  const handlers = counts.map((_, at) => ({ at: sent, number }: Sample): void => {
    if (interval > 0) delays.push(now() - sent)
    // Of a group, this process gets a part only.
    if (!group && last[at] !== 0 && number !== last[at]! + 1) {
      throw new Error(`event ${number} came after ${last[at]}`)
    }
    last[at] = number
    counts[at]!++
  })
  // One event at a time needs none, and is not to be disturbed.
  const progress = interval > 0 ? undefined : await openProgress({
    port,
    process,
    publishing: publishers > 0,
    subscribing,
    own: () => group ? counts[0]! : Math.min(...last),
    combine: (figures) => group ? figures.reduce((sum, figure) => sum + figure, 0) : Math.min(...figures)
  })
  let number = 0
  let from = Number.POSITIVE_INFINITY
  let rested = true
  const pause: Traffic["pause"] = progress === undefined
    ? () => {
      rested = !rested
      return rested ? undefined : sleep(paced(from, interval) * (0.5 + Math.random()))
    }
    : () => number - progress.reached() < window ? undefined : progress.changed()
  const go = receive()
  const opened = async () => {
    await send({ ready: true })
    const told = await go as { from: number; to: number }
    from = told.from
  }
  const done = contestant.traffic!({
    name: "bench:traffic",
    handlers,
    group,
    publishers,
    pause,
    next: () => ({ number: ++number, at: interval > 0 ? now() : 0 }),
    opened
  })
  const measure = async (): Promise<TrafficResult> => ({ ...await counted(go, counts, delays), delays })
  return await Promise.race([measure(), done.then(() => Promise.reject(new Error("the traffic has ended")))])
}

const flow = async (
  contestant: Contestant,
  { graph, nodes, runs }: Extract<Job["task"], { is: "flow" }>
): Promise<FlowResult> => {
  const run = await contestant.flow!(graph, nodes)
  await run()
  const from = now()
  for (let count = 0; count < runs; count++) await run()
  return { millis: (now() - from) / runs }
}

const job = JSON.parse(process.argv[2]!) as Job
// When the parent is gone, this is not needed.
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
  case "wait":
    await send({ at: await entry(contestant.locks!, job.task.key, 0) } satisfies Entered)
    break
  case "lead":
    await send({ at: await entry(contestant.lead!, job.task.key, 3_600_000) } satisfies Entered)
    // Until it is killed.
    await new Promise(() => {})
    break
  case "meet":
    await send(await meet(contestant, job.task))
    break
  case "traffic":
    await send(await traffic(contestant, job.task, job.port))
    break
  case "enqueue":
  case "process":
  case "drain":
  case "offer":
  case "work":
    await send(await jobs(await contestant.queue!("jobs", "removed"), job.task))
    break
  case "flow":
    await send(await flow(contestant, job.task))
    break
  case "steal":
    await send({ millis: await contestant.steal!(job.task.loads, job.task.keep) } satisfies StealResult)
    break
  case "store":
    await store(await contestant.queue!("jobs", "default"), job.task)
}
process.exit(0)
