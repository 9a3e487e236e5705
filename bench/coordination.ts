/** The cases of parties that wait for each other, and of leaders. */
import type { Entered, Generation, Job } from "./case.ts"
import * as child from "./child.ts"
import {
  add,
  type Case,
  type Column,
  type Context,
  type Figures,
  type Floor,
  median,
  percentile,
  rounds,
  type Row,
  withServer
} from "./figures.ts"
import { handOffs, runLoops, staysOf } from "./loops.ts"
import { now, sleep } from "./machine.ts"
import { leaseLeft, type Server } from "./server.ts"

// -----------------------------------------------------------------------------
// 8 to 10: meetings
// -----------------------------------------------------------------------------

const processes = 2

interface Meetings {
  readonly by: "barrier" | "latch" | "signal"
  readonly parties: number
  readonly own: number
  readonly spread: number
  readonly warmup: number
  readonly measure: number
}

/** For each generation how long it took from the last arrival to the last release, in milliseconds. */
const releases = async (
  { cores, nodeOptions }: Context,
  redis: Server,
  column: Column,
  { by, measure, own, parties, spread, warmup }: Meetings
): Promise<ReadonlyArray<number>> => {
  await redis.client.flushall()
  const children: Array<child.Child> = []
  for (let process = 0; process < processes; process++) {
    const task = { is: "meet", by, key: "bench:meeting", parties, own, process, spread } as const
    const job: Job = { contestant: column, port: redis.port, lease: 15_000, autoPipelining: false, task }
    const one = child.start(cores.client(process), job, column === "lockstep" ? nodeOptions : [])
    children.push(one)
    await one.next()
  }
  const from = now() + warmup
  for (const one of children) one.send({ from, to: from + measure })
  const seen: Array<ReadonlyArray<Generation>> = []
  for (const one of children) seen.push(await one.next())
  await Promise.all(children.map((one) => one.ended))
  const taken = Array.from({ length: Math.min(...seen.map(({ length }) => length)) }, (_, number) => {
    const parts = seen.map((generations) => generations[number]!)
    const count = (of: (part: Generation) => number) => parts.reduce((sum, part) => sum + of(part), 0)
    const lastArrival = Math.max(...parts.map((part) => part.lastArrival))
    const lastRelease = Math.max(...parts.map((part) => part.lastRelease))
    const isWhole = count(({ arrived }) => arrived) === parties && count(({ released }) => released) === parties
    if (isWhole && Math.min(...parts.map((part) => part.firstRelease)) < lastArrival) {
      throw new Error(`${column} has let a party pass before all had come`)
    }
    return isWhole && lastArrival >= from ? [lastRelease - lastArrival] : []
  }).flat()
  if (taken.length === 0) throw new Error(`${column} has not completed a generation`)
  return taken
}

/** How long it takes, by contestants in turn on one server: the median and the slow end of each round, as rows. */
export const timed = async (
  context: Context,
  columns: ReadonlyArray<Column>,
  about: { readonly case: number; readonly what: string; readonly of: string; readonly floor: Floor },
  measure: (redis: Server, column: Column, times: { readonly warmup: number; readonly measure: number }) => Promise<
    ReadonlyArray<number>
  >
): Promise<ReadonlyArray<Row>> => {
  const { cores, quick } = context
  const medians: Figures = {}
  const slow: Figures = {}
  await withServer(
    context,
    cores.server,
    (redis) =>
      rounds(context, quick ? 2 : 5, columns, async (column) => {
        const times = await measure(redis, column, { warmup: quick ? 3000 : 5000, measure: quick ? 2000 : 5000 })
        add(medians, column, median(times))
        add(slow, column, percentile(times, 95))
      })
  )
  const { floor, of, what } = about
  return [
    { case: about.case, what, measure: `median ${of}, ms`, digits: 2, figures: medians, floor },
    { case: about.case, what, measure: `95th percentile of ${of}, ms`, digits: 2, figures: slow }
  ]
}

const release = (
  context: Context,
  options: { readonly case: number; readonly by: "barrier" | "latch"; readonly parties: number }
): Promise<ReadonlyArray<Row>> => {
  const { by, parties } = options
  const floor: Floor = parties === 64
    ? {
      text: "<= 2.0 of pub/sub, < 3 ms",
      met: (median, ratio) => ratio("pubsub") <= 2 && median("lockstep") < 3
    }
    : { text: "<= 2.0 of pub/sub", met: (_, ratio) => ratio("pubsub") <= 2 }
  return timed(
    context,
    ["lockstep", "polling", "pubsub"],
    { case: options.case, what: `${by}, ${parties} parties in ${processes} processes`, of: "release", floor },
    (redis, column, times) =>
      releases(context, redis, column, { by, parties, own: parties / processes, spread: 50, ...times })
  )
}

const sizes = [2, 16, 64]

const releasing =
  (number: number, by: "barrier" | "latch") => async (context: Context): Promise<ReadonlyArray<Row>> => {
    const rows: Array<Row> = []
    for (const parties of sizes) rows.push(...await release(context, { case: number, by, parties }))
    return rows
  }

const signal = (context: Context): Promise<ReadonlyArray<Row>> =>
  timed(
    context,
    ["lockstep", "pubsub", "list"],
    {
      case: 10,
      what: "signal, set in one process, awaited in another",
      of: "hand-off",
      floor: { text: "< 1 ms", met: (median) => median("lockstep") < 1 }
    },
    (redis, column, times) =>
      releases(context, redis, column, { by: "signal", parties: 1, own: 1, spread: 10, ...times })
  )

// -----------------------------------------------------------------------------
// 11: leaders
// -----------------------------------------------------------------------------

const resignation = (context: Context): Promise<ReadonlyArray<Row>> =>
  timed(
    context,
    ["lockstep"],
    {
      case: 11,
      what: `leader resigns, ${processes} candidates in ${processes} processes`,
      of: "hand-over",
      floor: { text: "< 5 ms", met: (median) => median("lockstep") < 5 }
    },
    async (redis, column, times) =>
      handOffs(staysOf(
        await runLoops(context, redis, column, {
          processes,
          keys: () => ["bench:leader"],
          lead: true,
          stay: 10,
          pause: 0,
          autoPipelining: false,
          ...times
        }, context.cores.client)
      ))
  )

const killed = async (context: Context): Promise<ReadonlyArray<Row>> => {
  const { cores, quick } = context
  const lease = 3000
  const after: Array<number> = []
  const left: Array<number> = []
  const late: Array<number> = []
  const key = "bench:leader"
  await withServer(
    context,
    cores.server,
    (redis) =>
      rounds(context, quick ? 2 : 5, ["lockstep"], async (contestant, round) => {
        await redis.client.flushall()
        const start = (process: number): child.Child =>
          child.start(cores.client(process), {
            contestant,
            port: redis.port,
            lease,
            autoPipelining: false,
            task: { is: "lead", key }
          })
        const leader = start(0)
        await leader.next()
        await leader.next<Entered>()
        const successor = start(1)
        await successor.next()
        // At another moment between two renewals each time.
        await sleep(1000 + round * 370 % 1000)
        const rest = await leaseLeft(redis, "election", key)
        const from = now()
        leader.kill()
        const { at } = await successor.next<Entered>()
        successor.kill()
        await Promise.all([leader.ended, successor.ended])
        after.push(at - from)
        left.push(rest)
        late.push(at - from - rest)
      })
  )
  const what = "leader killed, lease 3 s"
  const floor: Floor = {
    text: "<= 5, <= 100 in each round",
    met: (median) => median("lockstep") <= 5 && Math.max(...late) <= 100
  }
  return [
    { case: 11, what, measure: "next leader begins after, ms", digits: 0, figures: { lockstep: after } },
    { case: 11, what, measure: "what was left of the lease, ms", digits: 0, figures: { lockstep: left } },
    { case: 11, what, measure: "later than the end of the lease by, ms", digits: 0, figures: { lockstep: late }, floor }
  ]
}

const leading = async (context: Context): Promise<ReadonlyArray<Row>> => [
  ...await resignation(context),
  ...await killed(context)
]

export const coordination: ReadonlyArray<Case> = [
  { title: "barrier", run: releasing(8, "barrier") },
  { title: "latch", run: releasing(9, "latch") },
  { title: "signal", run: signal },
  { title: "leader", run: leading }
]
