/** The cases of locks: what is run, and which figures are taken from it. */
import type { Entered, HoldResult, Job, MemoryResult, Name } from "./case.ts"
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
import {
  commands,
  handOffs,
  longestAbsence,
  mostInside,
  perSecond,
  runLoops,
  staysOf,
  total,
  unfairness
} from "./loops.ts"
import { now, sleep } from "./machine.ts"
import * as server from "./server.ts"

// -----------------------------------------------------------------------------
// 1 and 2: throughput
// -----------------------------------------------------------------------------

/** Of the cases that a plain client has no part in. */
const libraries = ["lockstep", "redlock", "redis-semaphore"] as const

const throughput = async (
  context: Context,
  options: {
    readonly case: number
    readonly what: string
    readonly keys: number
    readonly ways: ReadonlyArray<Column>
    readonly sameCore: boolean
    readonly autoPipelining: boolean
    readonly warmup: number
    readonly floor: Floor | undefined
  }
): Promise<ReadonlyArray<Row>> => {
  const { cores, quick } = context
  const others: ReadonlyArray<Column> = ["ioredis", "ioredis-auto", "redlock", "redis-semaphore"]
  const columns = ["lockstep", ...options.ways, ...others] as const
  const pairs: Figures = {}
  const client: Figures = {}
  const ofServer: Figures = {}
  const core = options.sameCore ? cores.client(0) : cores.server
  await withServer(context, core, (redis) =>
    rounds(context, quick ? 2 : 5, columns, async (column) => {
      const measured = await runLoops(context, redis, column, {
        processes: 1,
        keys: () => Array.from({ length: options.keys }, (_, at) => `bench:${at}`),
        stay: 0,
        pause: 0,
        autoPipelining: options.autoPipelining,
        warmup: quick ? 700 : options.warmup,
        measure: quick ? 1000 : 2500
      }, cores.client)
      add(pairs, column, perSecond(measured))
      add(client, column, measured.clientCpu / total(measured) * 1e6)
      add(ofServer, column, measured.serverCpu / total(measured) * 1e6)
    }))
  const { what } = options
  return [
    { case: options.case, what, measure: "pairs/s", digits: 0, figures: pairs, floor: options.floor },
    { case: options.case, what, measure: "client CPU per pair, us", digits: 1, figures: client },
    { case: options.case, what, measure: "Redis CPU per pair, us", digits: 1, figures: ofServer }
  ]
}

const sequential = async (context: Context): Promise<ReadonlyArray<Row>> => {
  const run = (what: string, sameCore: boolean) =>
    throughput(context, {
      case: 1,
      what,
      keys: 1,
      ways: ["lockstep-background", "lockstep-cached"],
      sameCore,
      autoPipelining: false,
      warmup: 1500,
      floor: sameCore
        ? {
          text: ">= 0.6 of ioredis, cached >= 5",
          met: (median, ratio) => ratio("ioredis") >= 0.6 && median("lockstep-cached") >= 5 * median("ioredis")
        }
        : { text: ">= 0.75 of ioredis, auto-pipelined", met: (_, ratio) => ratio("ioredis-auto") >= 0.75 }
    })
  const apart = await run("one lock, in turn", false)
  return context.cores.server === undefined
    ? apart
    : [...apart, ...await run("one lock, in turn, all on one core", true)]
}

const concurrent = (context: Context): Promise<ReadonlyArray<Row>> =>
  throughput(context, {
    case: 2,
    what: "1,000 locks at once",
    keys: 1000,
    ways: [],
    sameCore: false,
    autoPipelining: true,
    warmup: 2500,
    floor: { text: ">= 1.15 of ioredis, auto-pipelined", met: (_, ratio) => ratio("ioredis-auto") >= 1.15 }
  })

// -----------------------------------------------------------------------------
// 3 and 4: contention
// -----------------------------------------------------------------------------

const contention = async (context: Context, pause: number): Promise<ReadonlyArray<Row>> => {
  const { cores, quick } = context
  const rate: Figures = {}
  const handOff: Figures = {}
  const slowest: Figures = {}
  const longest: Figures = {}
  const fairness: Figures = {}
  const calls: Figures = {}
  const inside: Figures = {}
  await withServer(
    context,
    cores.server,
    (redis) =>
      rounds(context, quick ? 1 : 3, libraries, async (column) => {
        const measured = await runLoops(context, redis, column, {
          processes: 2,
          keys: () => Array.from({ length: 8 }, () => "bench:contended"),
          stay: 1,
          pause,
          autoPipelining: true,
          warmup: quick ? 1000 : 2000,
          measure: quick ? 3000 : 10_000
        }, cores.client)
        const stays = staysOf(measured)
        const gaps = handOffs(stays)
        add(rate, column, perSecond(measured))
        add(handOff, column, median(gaps))
        add(slowest, column, percentile(gaps, 99))
        add(longest, column, longestAbsence(measured))
        add(fairness, column, unfairness(measured))
        add(calls, column, measured.calls / gaps.length)
        add(inside, column, mostInside(stays))
      })
  )
  const what = `16 waiters in 2 processes, 1 ms inside${pause === 0 ? "" : `, each back after ${pause} ms`}`
  const floor = (text: string, met: (figure: number) => boolean): Floor => ({
    text,
    met: (median) => met(median("lockstep"))
  })
  return [
    { case: 3, what, measure: "median hand-off, ms", digits: 2, figures: handOff },
    { case: 3, what, measure: "99th percentile of hand-off, ms", digits: 2, figures: slowest },
    { case: 3, what, measure: "acquisitions/s", digits: 0, figures: rate },
    { case: 3, what, measure: "longest time between two turns of a waiter, ms", digits: 0, figures: longest },
    {
      case: 3,
      what,
      measure: "most / fewest acquisitions of a waiter",
      digits: 2,
      figures: fairness,
      floor: floor("<= 1.2", (most) => most <= 1.2)
    },
    {
      case: 3,
      what,
      measure: "Redis calls per hand-off",
      digits: 1,
      figures: calls,
      floor: pause === 0 ? floor("<= 4", (calls) => calls <= 4) : undefined
    },
    {
      case: 3,
      what,
      measure: "most inside at once",
      digits: 0,
      figures: inside,
      floor: floor("1", (most) => most === 1)
    }
  ]
}

const permits = 5

/** How fast a hold goes from one waiter to the next, beside the least that this costs on bare ioredis. */
const passing = async (
  context: Context,
  about: { readonly case: number; readonly what: string; readonly processes: number; readonly workers: number },
  floor: Floor,
  held: { readonly permits?: number } = {}
): Promise<ReadonlyArray<Row>> => {
  const { cores, quick } = context
  const rate: Figures = {}
  const commands: Figures = {}
  const client: Figures = {}
  const ofServer: Figures = {}
  const fairness: Figures = {}
  await withServer(
    context,
    cores.server,
    (redis) =>
      rounds(context, quick ? 2 : 5, ["lockstep", "lua-queue", "list"], async (column) => {
        const measured = await runLoops(context, redis, column, {
          processes: about.processes,
          keys: () => Array.from({ length: about.workers / about.processes }, () => "bench:passed"),
          stay: 0,
          pause: 0,
          ...held,
          autoPipelining: true,
          warmup: quick ? 1000 : 2000,
          measure: quick ? 2000 : 3000
        }, cores.client)
        add(rate, column, perSecond(measured))
        add(commands, column, measured.commands / total(measured))
        add(client, column, measured.clientCpu / total(measured) * 1e6)
        add(ofServer, column, measured.serverCpu / total(measured) * 1e6)
        add(fairness, column, unfairness(measured))
      })
  )
  return [
    { ...about, measure: "acquisitions/s", digits: 0, figures: rate, floor },
    { ...about, measure: "Redis commands per acquisition, with those of scripts", digits: 1, figures: commands },
    { ...about, measure: "client CPU per acquisition, us", digits: 1, figures: client },
    { ...about, measure: "Redis CPU per acquisition, us", digits: 1, figures: ofServer },
    { ...about, measure: "most / fewest acquisitions of a waiter", digits: 2, figures: fairness }
  ]
}

const atLeast = (share: number): Floor => ({
  text: `>= ${share} of Lua queue`,
  met: (_, ratio) => ratio("lua-queue") >= share
})

const contended = async (context: Context): Promise<ReadonlyArray<Row>> => [
  ...await contention(context, 0),
  ...await contention(context, 20),
  ...await passing(context, {
    case: 3,
    what: "16 waiters in 2 processes, nothing inside",
    processes: 2,
    workers: 16
  }, atLeast(0.5))
]

const ofPermits = async (context: Context): Promise<ReadonlyArray<Row>> => {
  const { cores, quick } = context
  const rate: Figures = {}
  const fairness: Figures = {}
  const inside: Figures = {}
  const calls: Figures = {}
  await withServer(
    context,
    cores.server,
    (redis) =>
      rounds(context, quick ? 1 : 3, ["lockstep", "redis-semaphore"], async (column) => {
        const measured = await runLoops(context, redis, column, {
          processes: 2,
          keys: () => Array.from({ length: 32 }, () => "bench:semaphore"),
          stay: 1,
          pause: 0,
          permits,
          autoPipelining: true,
          warmup: quick ? 1000 : 2000,
          measure: quick ? 3000 : 10_000
        }, cores.client)
        add(rate, column, perSecond(measured))
        add(fairness, column, unfairness(measured))
        add(inside, column, mostInside(staysOf(measured)))
        add(calls, column, measured.calls / total(measured))
      })
  )
  const what = `semaphore of ${permits}, 64 waiters in 2 processes, 1 ms inside`
  return [
    { case: 4, what, measure: "acquisitions/s", digits: 0, figures: rate },
    {
      case: 4,
      what,
      measure: "most / fewest acquisitions of a waiter",
      digits: 2,
      figures: fairness
    },
    { case: 4, what, measure: "Redis calls per acquisition", digits: 1, figures: calls },
    {
      case: 4,
      what,
      measure: "most inside at once",
      digits: 0,
      figures: inside,
      floor: { text: `<= ${permits}`, met: (median) => median("lockstep") <= permits }
    }
  ]
}

const semaphore = async (context: Context): Promise<ReadonlyArray<Row>> => [
  ...await ofPermits(context),
  ...await passing(
    context,
    {
      case: 4,
      what: `semaphore of ${permits}, 64 waiters in 2 processes, nothing inside`,
      processes: 2,
      workers: 64
    },
    atLeast(0.5),
    { permits }
  )
]

// -----------------------------------------------------------------------------
// 5 and 6: what holding costs
// -----------------------------------------------------------------------------

const holding = async (context: Context): Promise<ReadonlyArray<Row>> => {
  const { cores, quick } = context
  const seconds = quick ? 15 : 30
  const calls: Figures = {}
  const client: Figures = {}
  const ofServer: Figures = {}
  await rounds(
    context,
    1,
    libraries,
    (column) =>
      withServer(context, cores.server, async (redis) => {
        const task = { is: "hold", count: 10_000 } as const
        const job: Job = { contestant: column, port: redis.port, lease: 15_000, autoPipelining: true, task }
        const one = child.start(cores.client(0), job)
        await one.next()
        const from = now() + 500
        const to = from + seconds * 1000
        one.send({ from, to })
        await sleep(from - now())
        const before = await redis.info()
        await sleep(to - now())
        const after = await redis.info()
        const { cpuMillis } = await one.next<HoldResult>()
        await one.ended
        add(calls, column, (server.calls(after, commands[column]!) - server.calls(before, commands[column]!)) / seconds)
        add(client, column, cpuMillis / seconds)
        add(ofServer, column, (server.cpuSeconds(after) - server.cpuSeconds(before)) / seconds * 1000)
      })
  )
  const what = `10,000 locks held for ${seconds} s, lease 15 s`
  return [
    {
      case: 5,
      what,
      measure: "Redis calls/s",
      digits: 1,
      figures: calls,
      floor: { text: "<= 0.5", met: (median) => median("lockstep") <= 0.5 }
    },
    {
      case: 5,
      what,
      measure: "client CPU, ms/s",
      digits: 2,
      figures: client,
      floor: { text: "<= 1", met: (median) => median("lockstep") <= 1 }
    },
    { case: 5, what, measure: "Redis CPU, ms/s", digits: 2, figures: ofServer }
  ]
}

const memory = async (context: Context): Promise<ReadonlyArray<Row>> => {
  const { cores, quick } = context
  const sizes = quick ? [1000, 10_000] : [1000, 10_000, 100_000]
  // So many first that every partition has a session, every script is loaded and the code has been compiled.
  const base = 500
  const runs: ReadonlyArray<readonly [Name, Column]> = [
    ["lockstep", "lockstep"],
    ["lockstep-scoped", "lockstep"],
    ["ioredis", "ioredis"],
    ["redlock", "redlock"],
    ["redis-semaphore", "redis-semaphore"]
  ]
  const rows: Array<Row> = []
  const figuresOf = (size: number, measure: string, most?: number): Figures => {
    const what = `${size.toLocaleString("en")} locks held`
    const row = rows.find((row) => row.what === what && row.measure === measure)
    if (row !== undefined) return row.figures as Figures
    const figures: Figures = {}
    // Of a few, what the process has once weighs most.
    const floor = most === undefined || size < 10_000
      ? undefined
      : { text: `<= ${most.toLocaleString("en")}`, met: (median) => median("lockstep") <= most } satisfies Floor
    rows.push({ case: 6, what, measure, digits: 0, figures, floor })
    return figures
  }
  for (const [contestant, column] of runs) {
    context.progress(contestant)
    await withServer(context, cores.server, async (redis) => {
      const counts = [base, ...sizes.map((size) => size + base)]
      // Lockstep's last replies stay in Redis until its next heartbeat, which comes within a third of the lease.
      const lease = column === "lockstep" ? 6000 : 600_000
      const task = { is: "memory", counts, settle: quick ? 2500 : 4000 } as const
      const one = child.start(cores.client(0), { contestant, port: redis.port, lease, autoPipelining: true, task })
      let first: { readonly own: MemoryResult; readonly redis: number } | undefined
      for (const count of counts) {
        const own = await one.next<MemoryResult>()
        const inRedis = server.dataBytes(await redis.info())
        one.send({ more: true })
        if (first === undefined) {
          first = { own, redis: inRedis }
          continue
        }
        const size = count - base
        const heap = (own.heap - first.own.heap) / size
        if (contestant === "lockstep-scoped") {
          add(figuresOf(size, "process heap with Lock.acquire, bytes each", 1000), column, heap)
        } else {
          add(figuresOf(size, "Redis, bytes each"), column, (inRedis - first.redis) / size)
          add(figuresOf(size, "process heap, bytes each", 2000), column, heap)
          add(figuresOf(size, "process RSS, bytes each"), column, (own.rss - first.own.rss) / size)
        }
      }
      await one.ended
    })
  }
  // In the order of the sizes; what `sort` leaves as it is.
  const sizeOf = (row: Row) => Number.parseInt(row.what.replaceAll(",", ""), 10)
  return rows.sort((a, b) => sizeOf(a) - sizeOf(b))
}

// -----------------------------------------------------------------------------
// 7: failover
// -----------------------------------------------------------------------------

/** Milliseconds until the lock that is held by others than `except` runs out in Redis. */
const remaining = async (redis: server.Server, column: Column, key: string): Promise<number> => {
  if (column !== "lockstep") {
    return Number(await redis.client.pttl(key.replace(/^/, column === "redis-semaphore" ? "mutex:" : "")))
  }
  return server.leaseLeft(redis, "lock", key)
}

const failover = async (context: Context): Promise<ReadonlyArray<Row>> => {
  const { cores, quick } = context
  const lease = 2000
  const after: Figures = {}
  const left: Figures = {}
  const late: Figures = {}
  await withServer(
    context,
    cores.server,
    (redis) =>
      rounds(context, quick ? 2 : 5, libraries, async (column, round) => {
        await redis.client.flushall()
        const common = { contestant: column, port: redis.port, lease, autoPipelining: true }
        const holder = child.start(cores.client(0), { ...common, task: { is: "hold", count: 1 } })
        await holder.next()
        const key = "bench:000000"
        const waiter = child.start(cores.client(1), { ...common, task: { is: "wait", key } })
        await waiter.next()
        // At another moment between two renewals each time.
        await sleep(800 + round * 370 % 1000)
        const rest = await remaining(redis, column, key)
        const killed = now()
        holder.kill()
        const { at } = await waiter.next<Entered>()
        await Promise.all([holder.ended, waiter.ended])
        add(after, column, at - killed)
        add(left, column, rest)
        add(late, column, at - killed - rest)
      })
  )
  const what = "holder killed, lease 2 s"
  return [
    { case: 7, what, measure: "next holder enters after, ms", digits: 0, figures: after },
    { case: 7, what, measure: "what was left of the lease, ms", digits: 0, figures: left },
    { case: 7, what, measure: "later than the end of the lease by, ms", digits: 0, figures: late }
  ]
}

export const cases: ReadonlyArray<Case> = [
  { title: "one lock, in turn", run: sequential },
  { title: "1,000 locks at once", run: concurrent },
  { title: "16 waiters for one lock", run: contended },
  { title: "64 waiters for a semaphore", run: semaphore },
  { title: "10,000 locks held", run: holding },
  { title: "memory", run: memory },
  { title: "failover", run: failover }
]
