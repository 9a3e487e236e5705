/** The cases of queues: jobs that processes offer, and others run. */
import type { Job } from "./case.ts"
import * as child from "./child.ts"
import { timed } from "./coordination.ts"
import {
  add,
  type Case,
  type Column,
  type Context,
  type Figures,
  type Floor,
  rounds,
  type Row,
  withServer
} from "./figures.ts"
import type { DelaysResult, DrainResult, JobsResult, JobsTask, StoreTask } from "./jobs.ts"
import { commands, measured } from "./loops.ts"
import * as server from "./server.ts"

const columns: ReadonlyArray<Column> = ["lockstep", "raw-queue", "bullmq", "bee-queue", "effect-mq", "persisted-queue"]

const start = (context: Context, redis: server.Server, contestant: Column, process: number, task: JobsTask) => {
  const job: Job = { contestant, port: redis.port, lease: 15_000, autoPipelining: true, task }
  return child.start(context.cores.client(process), job, contestant === "lockstep" ? context.nodeOptions : [])
}

// -----------------------------------------------------------------------------
// 16 and 17: throughput
// -----------------------------------------------------------------------------

/** Rates and costs of so many jobs, by contestants in turn on one server. */
export const throughput = async (
  context: Context,
  about: {
    readonly case: number
    readonly what: string
    readonly floor?: Floor | undefined
    readonly ofCalls?: Floor | undefined
    /** All of them by default. */
    readonly columns?: ReadonlyArray<Column> | undefined
  },
  task: JobsTask
): Promise<ReadonlyArray<Row>> => {
  const rate: Figures = {}
  const client: Figures = {}
  const ofServer: Figures = {}
  const calls: Figures = {}
  await withServer(
    context,
    context.cores.server,
    (redis) =>
      rounds(context, context.quick ? 2 : 5, about.columns ?? columns, async (column) => {
        await redis.client.flushall()
        const one = start(context, redis, column, 0, task)
        await one.next()
        const before = await redis.info()
        const { cpuMillis, jobs, millis } = await one.next<JobsResult>()
        const after = await redis.info()
        await one.ended
        add(rate, column, jobs / millis * 1000)
        add(client, column, cpuMillis / jobs * 1000)
        add(ofServer, column, (server.cpuSeconds(after) - server.cpuSeconds(before)) / jobs * 1e6)
        const sent = commands[column]!
        add(calls, column, (server.calls(after, sent) - server.calls(before, sent)) / jobs)
      })
  )
  const { case: number, floor, ofCalls, what } = about
  return [
    { case: number, what, measure: "jobs/s", digits: 0, figures: rate, floor },
    { case: number, what, measure: "client CPU per job, us", digits: 1, figures: client },
    { case: number, what, measure: "Redis CPU per job, us", digits: 1, figures: ofServer },
    { case: number, what, measure: "Redis calls per job", digits: 3, figures: calls, floor: ofCalls }
  ]
}

const producers = 64
const bulk = 10_000

const enqueue = async (context: Context): Promise<ReadonlyArray<Row>> => {
  const { quick } = context
  return [
    ...await throughput(
      context,
      { case: 16, what: `enqueue, one job at a time by ${producers} fibers` },
      { is: "enqueue", producers, batch: 1, warm: quick ? 10_000 : 20_000, count: quick ? 20_000 : 50_000 }
    ),
    ...await throughput(
      context,
      {
        case: 16,
        what: `enqueue, ${bulk.toLocaleString("en")} jobs with a call`,
        floor: { text: ">= 1.0 of raw stream", met: (_, ratio) => ratio("raw-queue") >= 1 }
      },
      { is: "enqueue", producers: 1, batch: bulk, warm: (quick ? 2 : 3) * bulk, count: (quick ? 5 : 10) * bulk }
    )
  ]
}

const work = async (context: Context): Promise<ReadonlyArray<Row>> => {
  const { quick } = context
  const rows: Array<Row> = []
  for (const concurrency of [1, 50, 500]) {
    const busy = concurrency > 1
    const [warm, count] = busy ? [20_000, 50_000] : [5000, 15_000]
    rows.push(
      ...await throughput(
        context,
        {
          case: 17,
          what: `process a backlog, concurrency ${concurrency}`,
          floor: busy
            ? {
              text: ">= 1.0 of raw stream, 5.0 of BullMQ",
              met: (_, ratio) => ratio("raw-queue") >= 1 && ratio("bullmq") >= 5
            }
            : undefined,
          ofCalls: busy ? { text: "<= 0.3", met: (median) => median("lockstep") <= 0.3 } : undefined
        },
        { is: "process", concurrency, warm: quick ? warm / 2 : warm, count: quick ? count / 2 : count }
      )
    )
  }
  return rows
}

// -----------------------------------------------------------------------------
// 18: latency
// -----------------------------------------------------------------------------

const latency = (context: Context): Promise<ReadonlyArray<Row>> =>
  timed(
    context,
    columns,
    {
      case: 18,
      what: "idle queue, one job at a time, begun in another process",
      of: "start",
      floor: { text: "< 1 ms", met: (median) => median("lockstep") < 1 }
    },
    async (redis, column, times) => {
      await redis.client.flushall()
      const children: Array<child.Child> = []
      for (const task of [{ is: "work" }, { is: "offer", interval: 10 }] as const) {
        const one = start(context, redis, column, children.length, task)
        children.push(one)
        await one.next()
      }
      const { results } = await measured<DelaysResult>(redis, column, children, times)
      return results[0]!.delays
    }
  )

// -----------------------------------------------------------------------------
// 19: memory
// -----------------------------------------------------------------------------

const stored = 10_000

// So many first that every script is loaded.
const base = 500

const memory = async (context: Context): Promise<ReadonlyArray<Row>> => {
  const rowOf = async (finished: boolean): Promise<Row> => {
    const figures: Figures = {}
    await rounds(
      context,
      context.quick ? 1 : 3,
      columns,
      (column) =>
        withServer(context, context.cores.server, async (redis) => {
          const task: StoreTask = {
            is: "store",
            finished,
            counts: [base, base + stored],
            settle: context.quick ? 2500 : 4000
          }
          // Lockstep's last replies stay in Redis until its next heartbeat, which comes within a third of the lease.
          const job: Job = { contestant: column, port: redis.port, lease: 6000, autoPipelining: true, task }
          const one = child.start(context.cores.client(0), job)
          const read = async () => {
            await one.next()
            const bytes = server.dataBytes(await redis.info())
            one.send({ more: true })
            return bytes
          }
          const before = await read()
          add(figures, column, (await read() - before) / stored)
          await one.ended
        })
    )
    return {
      case: 19,
      what: `${stored.toLocaleString("en")} ${finished ? "finished" : "waiting"} jobs`,
      measure: "Redis, bytes each",
      digits: 0,
      figures
    }
  }
  return [await rowOf(false), await rowOf(true)]
}

// -----------------------------------------------------------------------------
// 20: long queues
// -----------------------------------------------------------------------------

const delayed = 100_000
const backlog = 1_000_000

/** Rates of contestants with many delayed jobs, each relative to its own without. */
const besideDelayed = async (context: Context): Promise<Row> => {
  const { quick } = context
  const figures: Figures = {}
  await withServer(
    context,
    context.cores.server,
    (redis) =>
      rounds(context, quick ? 1 : 3, ["lockstep", "bullmq"], async (column) => {
        const rate = async (delayed: number): Promise<number> => {
          await redis.client.flushall()
          const [warm, count] = quick ? [5000, 15_000] : [10_000, 50_000]
          const one = start(context, redis, column, 0, { is: "process", concurrency: 50, warm, count, delayed })
          await one.next()
          const { jobs, millis } = await one.next<JobsResult>()
          await one.ended
          return jobs / millis
        }
        const alone = await rate(0)
        add(figures, column, await rate(delayed) / alone)
      })
  )
  return {
    case: 20,
    what: `process a backlog beside ${delayed.toLocaleString("en")} delayed jobs, concurrency 50`,
    measure: "jobs/s, relative to none delayed",
    digits: 2,
    figures,
    floor: { text: ">= 0.9", met: (median) => median("lockstep") >= 0.9 }
  }
}

const drained = async (context: Context): Promise<ReadonlyArray<Row>> => {
  const offered: Figures = {}
  const run: Figures = {}
  const heap: Figures = {}
  const count = context.quick ? backlog / 10 : backlog
  await withServer(context, context.cores.server, (redis) =>
    rounds(context, 1, ["lockstep"], async (column) => {
      const one = start(context, redis, column, 0, { is: "drain", concurrency: 500, count })
      const { heaps, millis } = await one.next<DrainResult>()
      await one.ended
      add(offered, column, count / millis[0] * 1000)
      add(run, column, count / millis[1] * 1000)
      add(heap, column, (Math.max(...heaps) - heaps[0]!) / 1024 / 1024)
    }))
  const what = `${count.toLocaleString("en")} waiting jobs, offered and then processed by one process`
  return [
    { case: 20, what, measure: "jobs/s offered", digits: 0, figures: offered },
    { case: 20, what, measure: "jobs/s processed", digits: 0, figures: run },
    {
      case: 20,
      what,
      measure: "growth of the heap while it processes, MiB",
      digits: 1,
      figures: heap,
      floor: { text: "< 16", met: (median) => median("lockstep") < 16 }
    }
  ]
}

const long = async (context: Context): Promise<ReadonlyArray<Row>> => [
  await besideDelayed(context),
  ...await drained(context)
]

// -----------------------------------------------------------------------------
// 21: groups
// -----------------------------------------------------------------------------

const groups = 1000

/** BullMQ has a queue and a worker for each group. */
const ordered = (context: Context): Promise<ReadonlyArray<Row>> => {
  const [warm, count] = context.quick ? [5000, 10_000] : [10_000, 30_000]
  return throughput(
    context,
    {
      case: 21,
      what: `process a backlog of ${groups.toLocaleString("en")} groups, each in order, concurrency 500`,
      columns: ["lockstep", "bullmq"],
      floor: { text: ">= 1.0 of BullMQ", met: (_, ratio) => ratio("bullmq") >= 1 }
    },
    { is: "process", concurrency: 500, warm, count, groups }
  )
}

export const queues: ReadonlyArray<Case> = [
  { title: "enqueue", run: enqueue },
  { title: "process", run: work },
  { title: "latency of a queue", run: latency },
  { title: "memory of a queue", run: memory },
  { title: "long queues", run: long },
  { title: "groups of jobs", run: ordered }
]
