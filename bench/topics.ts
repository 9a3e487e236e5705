/** The cases of topics: events that processes publish, and others handle. */
import type { Job, TrafficResult } from "./case.ts"
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
import { measured } from "./loops.ts"
import type * as server from "./server.ts"

interface Part {
  readonly handlers: number
  readonly publishers: number
}

interface Traffic {
  /** The last one publishes, and is started when the others are ready. */
  readonly parts: ReadonlyArray<Part>
  readonly group: boolean
  readonly interval: number
  readonly warmup: number
  readonly measure: number
}

interface Measured {
  readonly results: ReadonlyArray<TrafficResult>
  readonly calls: number
  readonly clientCpu: number
  readonly serverCpu: number
}

const runTraffic = async (
  { cores, nodeOptions }: Context,
  redis: server.Server,
  column: Column,
  { group, interval, measure, parts, warmup }: Traffic
): Promise<Measured> => {
  await redis.client.flushall()
  const subscribing = parts.flatMap(({ handlers }, process) => handlers > 0 ? [process] : [])
  const children: Array<child.Child> = []
  for (const [process, { handlers, publishers }] of parts.entries()) {
    const task = { is: "traffic", group, handlers, publishers, process, subscribing, interval } as const
    const job: Job = { contestant: column, port: redis.port, lease: 15_000, autoPipelining: true, task }
    const one = child.start(cores.client(process), job, column === "lockstep" ? nodeOptions : [])
    children.push(one)
    await one.next()
  }
  return await measured<TrafficResult>(redis, column, children, { measure, warmup })
}

/** Rates and costs, by contestants in turn on one server. `handled` says how many events count. */
const throughput = async (
  context: Context,
  columns: ReadonlyArray<Column>,
  about: { readonly case: number; readonly what: string; readonly floor?: Floor | undefined },
  traffic: Pick<Traffic, "parts" | "group">,
  handled: (counts: ReadonlyArray<number>) => number
): Promise<ReadonlyArray<Row>> => {
  const { cores, quick } = context
  const rate: Figures = {}
  const client: Figures = {}
  const ofServer: Figures = {}
  const calls: Figures = {}
  await withServer(context, cores.server, (redis) =>
    rounds(context, quick ? 2 : 5, columns, async (column) => {
      const measured = await runTraffic(context, redis, column, {
        ...traffic,
        interval: 0,
        warmup: quick ? 1000 : 2000,
        measure: quick ? 1000 : 2500
      })
      const events = handled(measured.results.flatMap(({ counts }) => counts))
      add(rate, column, events / measured.results[0]!.millis * 1000)
      if (events === 0) return
      add(client, column, measured.clientCpu / events * 1e6)
      if (column === "in-process") return
      add(ofServer, column, measured.serverCpu / events * 1e6)
      add(calls, column, measured.calls / events)
    }))
  const { case: number, floor, what } = about
  return [
    { case: number, what, measure: "events/s", digits: 0, figures: rate, floor },
    { case: number, what, measure: "client CPU per event, us", digits: 1, figures: client },
    { case: number, what, measure: "Redis CPU per event, us", digits: 1, figures: ofServer },
    { case: number, what, measure: "Redis calls per event", digits: 3, figures: calls }
  ]
}

// -----------------------------------------------------------------------------
// 13: broadcast
// -----------------------------------------------------------------------------

const atOnce = 1024

const sizes = [1, 10, 100]

const atLeast = (share: number): Floor => ({
  text: `>= ${share} of XREAD, shared`,
  met: (_, ratio) => ratio("xread") >= share
})

const broadcast = async (context: Context): Promise<ReadonlyArray<Row>> => {
  const rows: Array<Row> = []
  for (const processes of [1, 2]) {
    for (const handlers of sizes) {
      const parts = processes === 1
        ? [{ handlers, publishers: atOnce }]
        : [{ handlers, publishers: 0 }, { handlers: 0, publishers: atOnce }]
      const where = processes === 1 ? "in the process of the publisher" : "in another process"
      rows.push(
        ...await throughput(
          context,
          ["lockstep", "xread", "pubsub", "xread-each", ...processes === 1 ? ["in-process"] as const : []],
          {
            case: 13,
            what: `broadcast, ${handlers} ${handlers === 1 ? "subscriber" : "subscribers"} ${where}`,
            floor: processes === 1
              ? atLeast(0.95)
              : handlers === 1
              ? atLeast(0.8)
              : undefined
          },
          { parts, group: false },
          (counts) => Math.min(...counts)
        )
      )
    }
  }
  return rows
}

// -----------------------------------------------------------------------------
// 14: latency
// -----------------------------------------------------------------------------

const delivery = (context: Context, group: boolean): Promise<ReadonlyArray<Row>> =>
  timed(
    context,
    group ? ["lockstep", "xreadgroup"] : ["lockstep", "xread", "pubsub"],
    {
      case: 14,
      what: `${group ? "group" : "broadcast"}, one event at a time, handled in another process`,
      of: "delivery",
      floor: { text: "< 1 ms", met: (median) => median("lockstep") < 1 }
    },
    async (redis, column, times) => {
      const parts = [{ handlers: 1, publishers: 0 }, { handlers: 0, publishers: 1 }]
      const { results } = await runTraffic(context, redis, column, { parts, group, interval: 5, ...times })
      return results[0]!.delays
    }
  )

const latency = async (context: Context): Promise<ReadonlyArray<Row>> => [
  ...await delivery(context, false),
  ...await delivery(context, true)
]

// -----------------------------------------------------------------------------
// 15: groups
// -----------------------------------------------------------------------------

const group = (context: Context): Promise<ReadonlyArray<Row>> =>
  throughput(
    context,
    ["lockstep", "xreadgroup"],
    { case: 15, what: "group, 2 members in 2 processes, published by a third one" },
    {
      parts: [{ handlers: 1, publishers: 0 }, { handlers: 1, publishers: 0 }, { handlers: 0, publishers: atOnce }],
      group: true
    },
    (counts) => counts.reduce((sum, count) => sum + count, 0)
  )

export const topics: ReadonlyArray<Case> = [
  { title: "broadcast", run: broadcast },
  { title: "latency of a topic", run: latency },
  { title: "group", run: group }
]
