/** The cases of work stealing: skewed load, and what a deque costs. */
import type { Job, StealResult } from "./case.ts"
import * as child from "./child.ts"
import { add, type Case, type Column, type Context, type Figures, rounds, type Row, withServer } from "./figures.ts"
import { throughput } from "./queues.ts"

// -----------------------------------------------------------------------------
// 25: skewed load
// -----------------------------------------------------------------------------

// Of each worker.
const shares = [0.7, 0.1, 0.1, 0.1]

const skewed = async (context: Context): Promise<ReadonlyArray<Row>> => {
  const jobs = context.quick ? 200 : 400
  // The same in each round: from 20 to 90 ms, in no order.
  const loads = shares.map((share) => Array.from({ length: share * jobs }, (_, at) => 20 + at * 17 % 71))
  const ideal = loads.flat().reduce((sum, millis) => sum + millis, 0) / shares.length
  const makespan: Figures = {}
  const relative: Figures = {}
  const columns: ReadonlyArray<Column> = ["lockstep", "static"]
  await withServer(
    context,
    context.cores.server,
    (redis) =>
      rounds(context, context.quick ? 2 : 5, columns, async (column) => {
        await redis.client.flushall()
        const task = { is: "steal", loads, keep: column === "static" ? 2 ** 31 : 0 } as const
        const job: Job = { contestant: "lockstep-deque", port: redis.port, lease: 15_000, autoPipelining: true, task }
        const one = child.start(context.cores.client(0), job)
        const { millis } = await one.next<StealResult>()
        await one.ended
        add(makespan, column, millis)
        add(relative, column, millis / ideal)
      })
  )
  const what = `${jobs.toLocaleString("en")} jobs for 4 workers, 70 % offered by one of them`
  return [
    {
      case: 25,
      what,
      measure: "until all are done, ms",
      digits: 0,
      figures: makespan,
      floor: { text: "<= 0.5 of static", met: (_, ratio) => ratio("static") <= 0.5 }
    },
    {
      case: 25,
      what,
      measure: "relative to the ideal",
      digits: 3,
      figures: relative,
      floor: { text: "<= 1.1", met: (median) => median("lockstep") <= 1.1 }
    }
  ]
}

// -----------------------------------------------------------------------------
// 26: what a deque costs
// -----------------------------------------------------------------------------

const columns: ReadonlyArray<Column> = ["lockstep", "lockstep-deque"]
const bulk = 10_000

const cost = async (context: Context): Promise<ReadonlyArray<Row>> => {
  const { quick } = context
  const rows = [
    ...await throughput(
      context,
      { case: 26, columns, what: `offer to the own deque, ${bulk.toLocaleString("en")} jobs with a call` },
      { is: "enqueue", producers: 1, batch: bulk, warm: (quick ? 2 : 3) * bulk, count: (quick ? 5 : 10) * bulk }
    )
  ]
  for (const concurrency of [1, 50]) {
    const [warm, count] = concurrency > 1 ? [20_000, 50_000] : [5000, 15_000]
    rows.push(
      ...await throughput(
        context,
        { case: 26, columns, what: `run the own deque, concurrency ${concurrency}` },
        { is: "process", concurrency, warm: quick ? warm / 2 : warm, count: quick ? count / 2 : count }
      )
    )
  }
  return rows
}

export const stealing: ReadonlyArray<Case> = [
  { title: "skewed load", run: skewed },
  { title: "cost of a deque", run: cost }
]
