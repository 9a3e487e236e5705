/** The cases of values that processes share. */
import type { RefVerb } from "./contestant.ts"
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
import { perSecond, runLoops } from "./loops.ts"

// -----------------------------------------------------------------------------
// 12: shared refs
// -----------------------------------------------------------------------------

const readers = 64
const writers = 8

const measured = async (
  context: Context,
  options: {
    readonly what: string
    readonly measure: string
    /** What each contestant does. */
    readonly columns: { readonly [column in Column]?: RefVerb }
    readonly processes: number
    readonly keys: ReadonlyArray<string>
    readonly warmup?: number
    readonly floor?: Floor
  }
): Promise<Row> => {
  const { cores, quick } = context
  const { columns, floor, keys, measure, processes, warmup = 2000, what } = options
  const rate: Figures = {}
  await withServer(
    context,
    cores.server,
    (redis) =>
      rounds(context, quick ? 2 : warmup > 2000 ? 3 : 5, Object.keys(columns) as Array<Column>, async (column) => {
        const result = await runLoops(context, redis, column, {
          processes,
          keys: () => keys,
          ref: columns[column]!,
          stay: 0,
          pause: 0,
          autoPipelining: true,
          warmup: quick ? 1000 : warmup,
          measure: quick ? 1000 : 2500
        }, cores.client)
        const counts = result.results.flatMap(({ counts }) => counts)
        if (counts.includes(0)) throw new Error(`a worker of ${column} has done nothing`)
        add(rate, column, perSecond(result))
      })
  )
  return { case: 12, what, measure, digits: 0, figures: rate, floor }
}

const sharedRef = async (context: Context): Promise<ReadonlyArray<Row>> => {
  const keys = Array.from({ length: readers }, (_, at) => `bench:${at}`)
  return [
    await measured(context, {
      what: `shared ref, read by ${readers} fibers`,
      measure: "reads/s, against GET",
      columns: { lockstep: "get", "ioredis-auto": "get" },
      processes: 1,
      keys,
      floor: { text: ">= 0.8 of ioredis, auto-pipelined", met: (_, ratio) => ratio("ioredis-auto") >= 0.8 }
    }),
    await measured(context, {
      what: `shared ref, cached, read by ${readers} fibers`,
      measure: "reads/s, against GET",
      columns: { lockstep: "cached", "ioredis-auto": "get" },
      processes: 1,
      keys
    }),
    await measured(context, {
      what: "shared ref, cached, read by one fiber",
      measure: "reads/s, against GET",
      columns: { lockstep: "cached", ioredis: "get" },
      processes: 1,
      keys: keys.slice(0, 1),
      floor: { text: ">= 100 of ioredis", met: (_, ratio) => ratio("ioredis") >= 100 }
    }),
    await measured(context, {
      what: `shared ref, updated by ${writers} processes`,
      measure: "updates/s, against WATCH and MULTI",
      columns: { lockstep: "update", ioredis: "update" },
      processes: writers,
      keys: ["bench:contended"],
      // The processes share a core, and their code has to be compiled.
      warmup: 20_000,
      floor: { text: ">= 2.0 of ioredis", met: (_, ratio) => ratio("ioredis") >= 2 }
    })
  ]
}

export const refs: ReadonlyArray<Case> = [{ title: "shared ref", run: sharedRef }]
