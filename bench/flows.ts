/** The cases of flows: graphs of jobs that do nothing, from the start of a run until its end is known. */
import type { FlowResult, Job } from "./case.ts"
import * as child from "./child.ts"
import type { Graph } from "./contestant.ts"
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

const nodes = 1000

const perEdge = async (
  context: Context,
  number: number,
  graph: Graph,
  edges: number,
  what: string,
  columns: ReadonlyArray<Column>
): Promise<ReadonlyArray<Row>> => {
  const figures: Figures = {}
  await withServer(
    context,
    context.cores.server,
    (redis) =>
      rounds(context, context.quick ? 2 : 5, columns, async (contestant) => {
        await redis.client.flushall()
        const task: Job["task"] = { is: "flow", graph, nodes, runs: context.quick ? 2 : 5 }
        const job: Job = { contestant, port: redis.port, lease: 15_000, autoPipelining: true, task }
        const one = child.start(context.cores.client(0), job, contestant === "lockstep" ? context.nodeOptions : [])
        const { millis } = await one.next<FlowResult>()
        await one.ended
        add(figures, contestant, millis / edges)
      })
  )
  const floor: Floor = { text: "<= 0.5", met: (median) => median("lockstep") <= 0.5 }
  return [{ case: number, what, measure: "ms per edge", digits: 3, figures, floor }]
}

const thousand = nodes.toLocaleString("en")

export const flows: ReadonlyArray<Case> = [
  {
    title: "chain of jobs",
    run: (context) => perEdge(context, 22, "chain", nodes - 1, `chain of ${thousand} jobs`, ["lockstep", "bullmq"])
  },
  {
    title: "fan-in of jobs",
    run: (context) => perEdge(context, 23, "fan-in", nodes, `one job behind ${thousand} others`, ["lockstep", "bullmq"])
  },
  {
    // No tree, so BullMQ cannot express it.
    title: "fan-out of jobs",
    run: (context) => perEdge(context, 24, "fan-out", 2 * nodes, `${thousand} jobs between two others`, ["lockstep"])
  }
]
