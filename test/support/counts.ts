/** What a queue counts, beside what can be counted in its keys. */
import type { Redis } from "ioredis"
import { keysOf } from "./actor.ts"
import { unpack } from "./records.ts"

const sources = ["u", "U", "", "h", "H", "", "n", "N", "", "l", "L", ""]
const streams = { u: "urgent", h: "high", n: "normal", l: "low", U: "held" } as const

const counters = [
  ...["active", "blocked", "delayed", "stacked", "expiring", "dead", "notes", "cancelled", "awaited", "grouped"],
  ...["members", "workers", "queued", "plans"]
]

type Counts = { readonly [what: string]: unknown }

/** What the record of a queue says, and what there is in its keys. */
export const counted = async (redis: Redis, hash: string): Promise<readonly [found: Counts, expected: Counts]> => {
  const packed = await redis.hgetBuffer(hash, "s")
  const keyOf = (role: string) => keysOf(hash).find((key) => key.includes(`queue-${role}:`))!
  const record = packed === null ? undefined : unpack("Queue", packed)
  const fields = await redis.hgetallBuffer(hash)
  const of = (letter: string) => Object.keys(fields).filter((field) => field.startsWith(letter))
  const ready = sources.map(() => 0)
  const inGroups = [0, 0, 0, 0]
  let [active, blocked, held] = [0, 0, 0]
  for (const [letter, role] of Object.entries(streams)) {
    const key = keyOf(role)
    const pending = await redis.call("XPENDING", key, "workers", "-", "+", 100_000)
      .catch(() => []) as Array<[string, string]>
    for (const [, consumer] of pending) {
      const own = letter === "U" ? consumer.slice(-1) : letter
      const level = "VIOM".indexOf(own)
      if (consumer.includes("/")) active++
      else if (consumer.startsWith("^")) blocked++
      else if (consumer.startsWith("-")) {
        if (level >= 0) inGroups[level]!++
        else ready[sources.indexOf(own)]!++
      }
    }
    if (letter === "U") {
      held = pending.length
      continue
    }
    const [info] = await redis.call("XINFO", "GROUPS", key).catch(() => []) as Array<Array<unknown>>
    const last = info === undefined ? "-" : `(${String(info[info.indexOf("last-delivered-id") + 1])}`
    ready[sources.indexOf(letter) + 2] = (await redis.xrange(key, last, "+")).length
  }
  const timed = await redis.zrange(keyOf("delayed"), "0", "-1", "WITHSCORES")
  const scores = timed.flatMap((member, at) => at % 2 === 0 ? [[member, Number(timed[at + 1])] as const] : [])
  const totals = fields["G"] === undefined ? undefined : unpack("QueueGroups", fields["G"])
  const inLine = fields["f"]?.toString().trim() ?? ""
  const states = of("g").map((field) => unpack("QueueGroup", fields[field]!))
  const sum = (field: string) => states.reduce((total, state) => total + state[field]!, 0)
  const expected = {
    ready,
    active,
    blocked,
    delayed: scores.filter(([member, score]) => score >= 0 && !member.startsWith("@")).length,
    stacked: scores.filter(([member, score]) => score < 0 && !member.startsWith("e")).length,
    expiring: scores.filter(([member]) => member.startsWith("e")).length,
    dead: await redis.xlen(keyOf("dead")),
    notes: await redis.hlen(keyOf("notes")),
    cancelled: of("j").length,
    awaited: of("d").length,
    grouped: states.length,
    members: of("o").length,
    workers: of("w").length,
    queued: inLine === "" ? 0 : inLine.split(" ").length,
    plans: await redis.hlen(keyOf("schedules")) / 2,
    waiting: inGroups,
    inGroups: inGroups.reduce((total, count) => total + count, 0),
    order: await redis.zcard(keyOf("order")),
    turns: await redis.zcard(keyOf("turns")),
    // Of cancelled jobs, the entries are deleted.
    held: await redis.xlen(keyOf("held")) + of("j").filter((field) => /^j[A-ZV]/.test(field)).length
  }
  const found = {
    ready: sources.map((_, at) => record?.[`c${at + 1}`] ?? 0),
    ...Object.fromEntries(counters.map((counter) => [counter, record?.[counter] ?? 0])),
    waiting: [1, 2, 3, 4].map((level) => totals?.[`waiting${level}`] ?? 0),
    inGroups: sum("waiting"),
    order: sum("waiting") + sum("delayed"),
    turns: ["ready1", "ready2", "ready3", "ready4", "timed"].reduce(
      (total, field) => total + (totals?.[field] ?? 0),
      0
    ),
    held
  }
  return [found, expected]
}
