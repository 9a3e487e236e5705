/** The table, on the console and in RESULTS.md. */
import type { Column, Measured, Run } from "./figures.ts"
import { median, ratio } from "./figures.ts"

const columns: ReadonlyArray<readonly [Column, string]> = [
  ["lockstep", "lockstep"],
  ["lockstep-background", "released in the background"],
  ["lockstep-cached", "cached"],
  ["lockstep-deque", "lockstep, deque"],
  ["static", "static partitions"],
  ["ioredis", "ioredis"],
  ["ioredis-auto", "ioredis, auto-pipelined"],
  ["redlock", "redlock"],
  ["redis-semaphore", "redis-semaphore"],
  ["polling", "polling"],
  ["pubsub", "pub/sub"],
  ["list", "BLPOP"],
  ["lua-queue", "Lua queue and PUBLISH"],
  ["xread", "XREAD, shared"],
  ["xread-each", "XREAD, a connection each"],
  ["xreadgroup", "XREADGROUP"],
  ["raw-queue", "raw stream"],
  ["bullmq", "BullMQ"],
  ["bee-queue", "bee-queue"],
  ["effect-mq", "effect-mq"],
  ["persisted-queue", "Effect's PersistedQueue"],
  ["in-process", "Effect's PubSub"]
]

const number = (value: number, digits: number): string =>
  value === Number.POSITIVE_INFINITY
    ? "never / some"
    : value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits })

const cell = (row: Measured, column: Column): string => {
  const figures = row.figures[column]
  if (figures === undefined) return ""
  const text = number(median(figures), row.digits)
  if (column === "lockstep") return text
  const quotient = ratio(row, column)
  if (!Number.isFinite(quotient) || quotient <= 0) return text
  return `${text} (${quotient.toLocaleString("en", { maximumSignificantDigits: 2 })})`
}

const verdict = ({ floor }: Measured): string => floor === undefined ? "" : floor.met ? "yes" : "NO"

const layOut = (table: ReadonlyArray<ReadonlyArray<string>>): string => {
  const widths = table[0]!.map((_, at) => Math.max(...table.map((line) => line[at]!.length)))
  const lines = table.map((line) =>
    `| ${line.map((text, at) => at < 3 ? text.padEnd(widths[at]!) : text.padStart(widths[at]!)).join(" | ")} |`
  )
  lines.splice(
    1,
    0,
    `|${widths.map((width, at) => at < 3 ? "-".repeat(width + 2) : `${"-".repeat(width + 1)}:`).join("|")}|`
  )
  return lines.join("\n")
}

const columnsOf = (rows: ReadonlyArray<Measured>) =>
  columns.filter(([column]) => rows.some((row) => row.figures[column] !== undefined))

/** What it is about, where that is not what the row before is about. */
const about = (row: Measured, before: Measured | undefined): ReadonlyArray<string> =>
  before?.case === row.case && before.what === row.what ? ["", ""] : [String(row.case), row.what]

// Locks, meetings, topics and queues have other contestants: in one table, most of it would be empty.
const parts = (rows: ReadonlyArray<Measured>): ReadonlyArray<ReadonlyArray<Measured>> =>
  [[0, 7], [7, 11], [11, 15], [15, Number.POSITIVE_INFINITY]]
    .map(([above, last]) => rows.filter((row) => row.case > above! && row.case <= last!))
    .filter((part) => part.length > 0)

export const tables = (all: ReadonlyArray<Measured>): string =>
  parts(all).map((rows) => {
    const used = columnsOf(rows)
    return layOut([
      ["", "case", "measure", ...used.map(([, title]) => title), "required", "met"],
      ...rows.map((row, at) => [
        ...about(row, rows[at - 1]),
        row.measure,
        ...used.map(([column]) => cell(row, column)),
        row.floor?.text ?? "",
        verdict(row)
      ])
    ])
  }).join("\n\n")

/** The rounds behind the medians. */
const spreads = (all: ReadonlyArray<Measured>): string =>
  parts(all.filter((row) => (row.figures.lockstep?.length ?? 0) > 1)).map((rows) => {
    const used = columnsOf(rows)
    return layOut([
      ["", "case", "measure", ...used.map(([, title]) => title)],
      ...rows.map((row, at) => [
        ...about(row, rows[at - 1]),
        row.measure,
        ...used.map(([column]) => {
          const figures = row.figures[column]
          if (figures === undefined) return ""
          return `${number(Math.min(...figures), row.digits)} to ${number(Math.max(...figures), row.digits)}`
        })
      ])
    ])
  }).join("\n\n")

/** Cases that ran on the same day, on the same machine, with the same versions. */
const sittings = (runs: ReadonlyArray<Run>): string => {
  const found = new Map<string, Array<Run>>()
  for (const run of runs) {
    const when = `${run.date}${run.quick ? " (**quick**: too short to be relied on)" : ""}: ${run.about}`
    found.set(when, [...found.get(when) ?? [], run])
  }
  return [...found].map(([when, some]) => {
    const minutes = Math.ceil(some.reduce((sum, { seconds }) => sum + seconds, 0) / 60)
    return `* Cases ${some.map((run) => run.case).join(", ")}, ${minutes} minutes on ${when}`
  }).join("\n")
}

export const results = (runs: ReadonlyArray<Run>, cases: number): string => {
  const open = Array.from({ length: cases }, (_, at) => at + 1).filter((at) => runs.every((run) => run.case !== at))
  const rows = runs.flatMap((run) => run.rows)
  const floors = rows.filter((row) => row.floor !== undefined)
  const missed = floors.filter((row) => row.floor?.met === false)
  return `# Results

Written by \`node bench/main.ts --write\`; \`npm run bench\` repeats it on your machine.

${sittings(runs)}${open.length === 0 ? "" : `\n* Not run lately: ${open.join(", ")}`}
* Floors: ${floors.length - missed.length} of ${floors.length} met${
    missed.length === 0 ? "" : `; missed: ${missed.map((row) => `${row.what}: ${row.measure}`).join("; ")}`
  }

${tables(rows)}

## How to read it

* A figure is the median of the rounds. In brackets: lockstep's figure divided by this one, as the median over the
  rounds. Above 1 is good where more is better (pairs/s, acquisitions/s), below 1 is good everywhere else.
* All contestants use one private Redis without persistence over loopback TCP. They run in turn, round after round
  (A B C A B C ...), each time in a new process that is warmed up first. Where one thing is measured at a time, with rests
  between (8 to 10, 14, 18), they follow each other every 2 ms for some seconds first, as in a process that has been up for
  long: what is measured is compiled code that rests, and not how a process starts.
* \`ioredis\` is \`SET key token NX PX 15000\` and a compare-and-delete script by \`EVALSHA\`: no waiting, no renewal, no
  fairness, no fencing. It is what a lock costs at least. The second column of it has \`enableAutoPipelining\`.
* \`lockstep\` is \`Lock.withLock\` and \`Semaphore.withPermits\` in Effect fibers, with the coordinator's defaults: first
  in, first out, fenced, renewed, protected against loss. In cases 1 and 2 the others are called in their cheapest form,
  without renewal for redlock.
* redlock and redis-semaphore have auto-pipelining except in case 1, where it would slow them down, and their default
  settings, except that they wait for as long as it takes. They poll: redlock every 100 to 300 ms, redis-semaphore every
  10 ms. A client that has just released wins the next try, hence what they show in case 3 and 4: many acquisitions by few.
  "never / some" means that a waiter had none in the whole measurement.
* A hand-off is measured from the last instruction under the lock to the first one of the next holder under it, on the
  machine's monotonic clock, when that is another waiter; Redis calls per hand-off count only such hand-offs.
* Redis calls are the commands that clients send, by \`INFO commandstats\`, not what scripts and functions call.
* Memory is what so many locks more cost, after 500 that all of them start with; Redis without the buffers of its
  clients, the process after garbage collection. \`Lock.withLock\` has two fibers per lock; \`Lock.acquire\` in one scope
  has none.
* What was left of the lease is what Redis said right before the holder, or the leader, was killed.
* A release (8, 9) is measured from the moment when the last party of both processes calls, to the moment when the last
  one goes on, on the same clock. Each run checks that no party of a generation goes on before. The parties of a generation come
  at random within 50 ms, and one of them 5 ms after them, so that all wait when it comes. Between two generations a
  process rests for 5 ms: to begin the next one would hold up another process that still releases on the same core.
* \`Lua queue and PUBLISH\` and \`BLPOP\` (3, 4) are the least that a hand-off takes, on bare ioredis: a list of waiters, one script
  to take and one to release, and a message to the process of the next holder; or a list of permits, and a connection for each
  waiter. They renew nothing, have no tokens, and stand still when a process or a message is lost.
* \`polling\` is the Node.js code of a guide to coordination with Redis, as it is: it asks every 100 ms. \`pub/sub\` is the
  least that it takes, on bare ioredis: each party does \`INCR\`, the last one \`PUBLISH\`, and the subscriber of each process
  lets all pass that wait there. It knows nothing of parties that die, and of messages that are lost.
* A signal (10) is measured from the moment before it is set to the moment when who waited for it goes on, while Redis is
  told that it was consumed; with \`BLPOP\` and pub/sub it can be lost on the way.
* Topics (13 to 15) publish a small JSON text by 1,024 publications at a time, never more than 4,096 events ahead of the
  slowest subscriber. An event counts when all subscribers have handled it; each checks that no event is missing and that
  they come in order. \`lockstep\` is \`Topic.publish\`, \`Topic.values\` and \`Topic.run\` with the defaults.
* \`XREAD, shared\` is the fastest raw way: auto-pipelined \`XADD\`, and one \`XREAD BLOCK\` in each process whose events go
  to all handlers there. It stores an event twice when a \`XADD\` is resent. \`Effect's PubSub\` never leaves the process.
* A member of a group handles 64 events at a time and has up to 512; the raw one reads up to 512 with \`XREADGROUP\` and
  sends an auto-pipelined \`XACK\` for each. What a member that dies has read stays unhandled there.
* A delivery (14) is measured from the moment before an event is published to the call of the handler in another process,
  one event at a time.
* Jobs (16 to 19) are a small JSON text each. \`lockstep\` is \`Queue.offer\`, \`Queue.offerAll\` and \`Queue.run\` with the
  defaults and an empty handler. A backlog is stored first, and one process runs it; each run checks that no job was lost
  or was run twice. The first jobs of each run warm it up.
* \`raw stream\` is the fastest raw way: auto-pipelined \`XADD\`, or pipelines of 500 for many jobs; then one \`XREADGROUP\` for
  as many jobs as run at a time, pipelined behind one \`XACK\` and one \`XDEL\` for the jobs before them. It has neither
  retries nor delays nor priorities, and the jobs of a process that dies stay with it.
* BullMQ, bee-queue, effect-mq and PersistedQueue have their default settings, except that the first three remove finished
  jobs in cases 16 to 18, and that bee-queue sends no events there and keeps no jobs in the process, as its documentation
  recommends for speed. PersistedQueue has no call for many jobs: a fiber offers each. It and effect-mq, which runs on
  the released Effect 4 with its imports redirected, have the Redis client of \`@effect/platform-node\`.
* A start (18) is measured from the moment before a job is offered to the call of the handler in another process, one job
  every 10 ms on average. PersistedQueue polls every second.
* Memory of jobs (19) is what 10,000 more of them cost after the first 500, with the default settings of all: BullMQ,
  bee-queue and effect-mq keep finished jobs.
* Flows (22 to 24) are beside their queue (\`colocate\`). In BullMQ, a chain is a tree in which each job has one child.
* Skewed load (25): 4 workers with a coordinator each run one job at a time; one worker offers 70 % of the work. A job sleeps for 20
  to 90 ms. \`lockstep\` is \`WorkStealing\` with the defaults; in \`static partitions\` all workers \`keep\` all of their jobs. The ideal
  is all work divided by 4.
* A deque (26): a process offers jobs to its own deque, and runs them, as in cases 16 and 17.
* A hand-over (11) is measured from the last instruction of the leader, after which it resigns, to the first one of the
  next leader.

## Lowest and highest round

${spreads(rows)}
`
}
