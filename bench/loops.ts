/** Workers that loop through what one at a time, or a few, can have: how they are run, and what is seen of them. */
import type { Job, LoopsResult } from "./case.ts"
import * as child from "./child.ts"
import type { RefVerb } from "./contestant.ts"
import type { Column, Context } from "./figures.ts"
import { now, sleep } from "./machine.ts"
import * as server from "./server.ts"

/** What contestants send to Redis, as opposed to what their scripts call there. */
export const commands: { readonly [column in Column]?: ReadonlyArray<string> } = {
  "lockstep-deque": ["fcall", "evalsha", "eval", "xread", "ping", "function|load", "script|load"],
  lockstep: ["fcall", "evalsha", "eval", "xread", "ping", "function|load", "script|load"],
  ioredis: ["set", "evalsha", "eval", "ping"],
  "ioredis-auto": ["set", "evalsha", "eval", "ping"],
  redlock: ["evalsha", "eval", "ping"],
  "redis-semaphore": ["set", "evalsha", "eval", "ping"],
  "pubsub": ["publish"],
  "xread": ["xadd", "xread"],
  "xread-each": ["xadd", "xread"],
  "xreadgroup": ["xadd", "xreadgroup", "xack"],
  "raw-queue": ["xadd", "xreadgroup", "xack", "xdel"],
  "bullmq": ["evalsha", "eval", "bzpopmin", "multi", "exec"],
  "bee-queue": ["evalsha", "brpoplpush", "hget", "multi", "exec", "lrem", "srem", "hdel"],
  "effect-mq": ["evalsha", "eval", "script|load", "publish"],
  "persisted-queue": ["evalsha", "eval", "rpush"]
}

interface Loops {
  readonly processes: number
  readonly keys: (process: number) => ReadonlyArray<string>
  readonly stay: number
  readonly pause: number
  readonly permits?: number
  readonly lead?: true
  readonly ref?: RefVerb
  readonly autoPipelining: boolean
  readonly warmup: number
  readonly measure: number
}

interface Measured {
  readonly results: ReadonlyArray<LoopsResult>
  readonly calls: number
  /** Those of scripts too. */
  readonly commands: number
  readonly clientCpu: number
  readonly serverCpu: number
}

/** Has children that are ready measure, and watches Redis meanwhile. */
export const measured = async <R extends { readonly cpuMillis: number }>(
  redis: server.Server,
  column: Column,
  children: ReadonlyArray<child.Child>,
  { measure, warmup }: { readonly measure: number; readonly warmup: number }
) => {
  const from = now() + warmup
  const to = from + measure
  for (const one of children) one.send({ from, to })
  await sleep(from - now())
  const before = await redis.info()
  await sleep(to - now())
  const after = await redis.info()
  const results: Array<R> = []
  for (const one of children) results.push(await one.next<R>())
  await Promise.all(children.map((one) => one.ended))
  const sent = commands[column] ?? []
  return {
    from,
    to,
    results,
    calls: server.calls(after, sent) - server.calls(before, sent),
    commands: server.commands(after) - server.commands(before),
    clientCpu: results.reduce((sum, { cpuMillis }) => sum + cpuMillis / 1000, 0),
    serverCpu: server.cpuSeconds(after) - server.cpuSeconds(before)
  }
}

export const runLoops = async (
  context: Context,
  redis: server.Server,
  column: Column,
  options: Loops,
  core: (process: number) => number | undefined
): Promise<Measured> => {
  const { autoPipelining, keys, lead, measure, pause, permits, processes, ref, stay, warmup } = options
  await redis.client.flushall()
  const children = Array.from({ length: processes }, (_, process) => {
    const task = {
      is: "loops",
      keys: keys(process),
      stay,
      pause,
      ...permits === undefined ? {} : { permits },
      ...lead === undefined ? {} : { lead },
      ...ref === undefined ? {} : { ref }
    } as const
    const job: Job = {
      contestant: column,
      port: redis.port,
      lease: 15_000,
      autoPipelining: column === "ioredis-auto" || (column !== "ioredis" && autoPipelining),
      task
    }
    return child.start(core(process), job, column === "lockstep" ? context.nodeOptions : [])
  })
  for (const one of children) await one.next()
  const { from, results, to, ...costs } = await measured<LoopsResult>(redis, column, children, { measure, warmup })
  return {
    ...costs,
    results: results.map((result) => ({
      ...result,
      stays: result.stays.filter(([, entered, left]) => entered >= from && left <= to)
    }))
  }
}

export const total = ({ results }: Measured): number =>
  results.reduce((sum, { counts }) => sum + counts.reduce((a, b) => a + b, 0), 0)

export const perSecond = (measured: Measured): number => total(measured) / measured.results[0]!.millis * 1000

/** How much more often the luckiest worker had it than the unluckiest. */
export const unfairness = ({ results }: Measured): number => {
  const counts = results.flatMap(({ counts }) => counts)
  return Math.max(...counts) / Math.min(...counts)
}

export interface Stay {
  readonly worker: string
  readonly entered: number
  readonly left: number
}

export const staysOf = ({ results }: Measured): ReadonlyArray<Stay> =>
  results
    .flatMap(({ stays }, process) =>
      stays.map(([worker, entered, left]) => ({ worker: `${process}/${worker}`, entered, left }))
    )
    .sort((a, b) => a.entered - b.entered)

/** How long it took from each to the next, where that is another one. */
export const handOffs = (stays: ReadonlyArray<Stay>): ReadonlyArray<number> =>
  stays.slice(1).flatMap((stay, at) => stay.worker === stays[at]!.worker ? [] : [stay.entered - stays[at]!.left])

/** The most that were inside at one moment. */
export const mostInside = (stays: ReadonlyArray<Stay>): number => {
  const events = stays.flatMap(({ entered, left }) => [[entered, 1], [left, -1]] as const)
  let inside = 0
  let most = 0
  // Who leaves at the same instant has left before.
  for (const [, change] of events.sort((a, b) => a[0] - b[0] || a[1] - b[1])) {
    inside += change
    most = Math.max(most, inside)
  }
  return most
}

/** The longest that a waiter was without, in milliseconds; the whole measurement if it never had it. */
export const longestAbsence = ({ results }: Measured): number =>
  Math.max(...results.flatMap(({ counts, millis, stays }) =>
    counts.map((_, worker) => {
      const own = stays.filter(([at]) => at === worker)
      return own.length === 0 ? millis : Math.max(...own.slice(1).map(([, entered], at) => entered - own[at]![2]))
    })
  ))
