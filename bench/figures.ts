/** What all cases have in common: figures of contestants, taken round after round. */
import type { Cores } from "./machine.ts"
import * as server from "./server.ts"

export type Column =
  | "lockstep"
  | "lockstep-background"
  | "lockstep-cached"
  | "lockstep-deque"
  | "static"
  | "ioredis"
  | "ioredis-auto"
  | "redlock"
  | "redis-semaphore"
  | "polling"
  | "pubsub"
  | "list"
  | "lua-queue"
  | "xread"
  | "xread-each"
  | "xreadgroup"
  | "raw-queue"
  | "bullmq"
  | "bee-queue"
  | "effect-mq"
  | "persisted-queue"
  | "in-process"

export interface Floor {
  readonly text: string
  /** Decides by the medians, and the median ratios to other columns. */
  readonly met: (median: (column: Column) => number, ratio: (column: Column) => number) => boolean
}

export interface Row {
  readonly case: number
  readonly what: string
  readonly measure: string
  readonly digits: number
  /** One figure for each round. */
  readonly figures: { readonly [column in Column]?: ReadonlyArray<number> }
  readonly floor?: Floor | undefined
}

/** A row of a run that is over. */
export interface Measured extends Omit<Row, "floor"> {
  readonly floor?: { readonly text: string; readonly met: boolean } | undefined
}

/** How a case went. */
export interface Run {
  readonly case: number
  readonly date: string
  readonly seconds: number
  readonly quick: boolean
  /** The machine, its cores, and the versions of what was compared. */
  readonly about: string
  readonly rows: ReadonlyArray<Measured>
}

/** Of one round to the same round of the other, then the median: what changes from round to round cancels out. */
export const ratio = ({ figures }: Pick<Row, "figures">, column: Column): number => {
  const others = figures[column] ?? []
  return median((figures.lockstep ?? []).map((figure, round) => figure / others[round]!))
}

export const measured = (row: Row): Measured => {
  const { floor } = row
  if (floor === undefined) return { ...row, floor }
  const met = floor.met((column) => median(row.figures[column] ?? [Number.NaN]), (column) => ratio(row, column))
  return { ...row, floor: { text: floor.text, met } }
}

export interface Context {
  readonly cores: Cores
  readonly quick: boolean
  /** How many there are at most. */
  readonly rounds: number
  /** Other libraries are left out. */
  readonly raw: boolean
  readonly nodeOptions: ReadonlyArray<string>
  readonly progress: (text: string) => void
  readonly noteServer: (version: string) => void
}

export interface Case {
  readonly title: string
  readonly run: (context: Context) => Promise<ReadonlyArray<Row>>
}

export type Figures = { [column in Column]?: Array<number> }

export const add = (figures: Figures, column: Column, figure: number): void => {
  ;(figures[column] ??= []).push(figure)
}

export const median = (figures: ReadonlyArray<number>): number => {
  const sorted = [...figures].sort((a, b) => a - b)
  const middle = sorted.length >> 1
  return sorted.length % 2 === 1 ? sorted[middle]! : (sorted[middle - 1]! + sorted[middle]!) / 2
}

/** The figure that so many of a hundred do not exceed. */
export const percentile = (figures: ReadonlyArray<number>, percent: number): number =>
  [...figures].sort((a, b) => a - b)[Math.floor(figures.length * percent / 100)]!

export const withServer = async <A>(
  context: Context,
  core: number | undefined,
  use: (redis: server.Server) => Promise<A>
): Promise<A> => {
  const redis = await server.start(core)
  context.noteServer(redis.version)
  try {
    return await use(redis)
  } finally {
    await redis.stop()
  }
}

/** Of other libraries. A column is called as the package is. */
export const packages = ["redlock", "redis-semaphore", "bullmq", "bee-queue", "effect-mq"] as const satisfies Array<
  Column
>

/** Contestants in turn, round after round, so that what changes with time changes for all. */
export const rounds = async (
  context: Context,
  planned: number,
  columns: ReadonlyArray<Column>,
  run: (column: Column, round: number) => Promise<void>
): Promise<void> => {
  const invited = context.raw
    ? columns.filter((column) => !(packages as ReadonlyArray<Column>).includes(column))
    : columns
  const count = Math.min(planned, context.rounds)
  for (let round = 0; round < count; round++) {
    for (const column of invited) {
      context.progress(`round ${round + 1} of ${count}: ${column}`)
      await run(column, round)
    }
  }
}
