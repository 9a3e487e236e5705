/**
 * Two queues of one partition, and all that can be asked of them, several requests with a call: in any combination, what the actor
 * has counted is what there is after each call, and in the end every job has run, or is deleted for a reason.
 */
import { assert, layer } from "@effect/vitest"
import { Effect } from "effect"
import * as fc from "fast-check"
import type { Redis } from "ioredis"
import { layoutOf, partsOf, type Spec } from "../src/internal/flow/graph.ts"
import { actor, type Asked, client, keysOf } from "./support/actor.ts"
import { counted } from "./support/counts.ts"
import { runs } from "./support/effort.ts"
import { freshNamespace, TestServer } from "./support/live.ts"

const live = { excludeTestServices: true, timeout: "120 seconds" } as const

const later = 3_600_000

/** What an offer asks for, besides its level: what does not go together is left out. */
const wishes = [
  "",
  "",
  "d1",
  `d${later}`,
  "f",
  "e1",
  `e${later}`,
  "r",
  "i",
  "g",
  "g",
  "g",
  "gd1",
  "gr",
  "re2",
  "s",
  "t",
  "b",
  "k",
  "k",
  "kg",
  "sg",
  "p",
  "p",
  "pr",
  "pg"
] as const

const verbs = [
  ...["offer", "offer", "offer", "offer", "offer", "offer", "offer", "offer", "start", "start"],
  ...["work", "work", "work", "leave", "credit", "credit", "credit"],
  ...["done", "done", "done", "done", "done", "done", "retry", "retry", "bury", "bury", "complete", "note", "note"],
  ...["cancel", "cancel", "promote", "reschedule", "update", "watch", "follow"],
  ...["pause", "resume", "resume", "resume", "hold", "free", "free", "purge", "slow", "drain", "discard", "replay"],
  ...["plan", "unplan", "obliterate"]
] as const

const request = fc.record({
  do: fc.constantFrom(...verbs),
  queue: fc.nat(1),
  pick: fc.nat(1000),
  wish: fc.constantFrom(...wishes),
  policy: fc.constantFrom("f", "s", "c"),
  count: fc.integer({ min: 1, max: 3 })
})

type Wanted = typeof request extends fc.Arbitrary<infer A> ? A : never

const call = fc.oneof(
  {
    weight: 8,
    arbitrary: fc.record({ session: fc.nat(1), requests: fc.array(request, { minLength: 1, maxLength: 8 }) })
  },
  { weight: 1, arbitrary: fc.constantFrom("ring" as const, "ring" as const, "pass" as const) },
  { weight: 1, arbitrary: fc.record({ end: fc.nat(1) }) }
)

const rules = fc.record({
  limit: fc.constantFrom(0, 0, 2),
  spacing: fc.constantFrom(0, 0, 2),
  length: fc.constantFrom(0, 0, 3, 6),
  overflow: fc.constantFrom(0, 1, 2),
  grouplimit: fc.constantFrom(1, 1, 2),
  groupspacing: fc.constantFrom(0, 0, 2)
})

type Call = typeof call extends fc.Arbitrary<infer A> ? A : never
type Rules = typeof rules extends fc.Arbitrary<infer A> ? A : never

layer(TestServer.layer, live)("queues of one partition", (it) => {
  it.effect("count what there is, and run every job, with any requests in a call", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      yield* Effect.promise(() =>
        fc.assert(
          fc.asyncProperty(
            fc.tuple(rules, rules),
            fc.array(call, { minLength: 5, maxLength: 40 }),
            (both, calls) => drive(redis, both, calls)
          ),
          { numRuns: runs(50), endOnFailure: false }
        )
      )
    }))
})

const idle = { pick: 0, wish: "", policy: "f", count: 1 } as const

type Raw = readonly [id: string, count: number, value: number, ...more: ReadonlyArray<string>]

interface Worker {
  joined: boolean
  readonly jobs: Map<string, Raw>
  /** Cancelled jobs, whose handlers have not ended. */
  readonly ending: Map<string, Raw>
  /** Jobs that wait for room, as they were offered, and whether there is some. */
  waiting: Array<readonly [value: string, shape: string]>
  told: boolean
}

const names = ["one", "two"] as const
const groups = ["a", "bb", "c:0"] as const

const fieldOf = (raw: Raw, name: string): string | undefined => {
  const more = raw.slice(3) as Array<string>
  for (let at = 0; at < more.length; at += 2) if (more[at] === name) return more[at + 1]
  return undefined
}

const outcomeOf = (raw: Raw): string => fieldOf(raw, "r") === undefined ? "" : `["success",1]`

const drive = async (redis: Redis, both: readonly [Rules, Rules], calls: ReadonlyArray<Call>) => {
  const namespace = freshNamespace()
  const partition = actor(redis, namespace, "queue:one")
  const hashes = names.map((name) => `{${namespace}:00}:queue:${name}`)
  const generations = [0, 0]
  const sessionOf = (at: number) => `s${at}x${generations[at]}`
  const read = new Map<string, number>()
  const known: [Array<string>, Array<string>] = [[], []]
  const tokens = new Map<string, number>()
  const fresh = (): Worker => ({ joined: false, jobs: new Map(), ending: new Map(), waiting: [], told: false })
  const workers = [0, 1].map(() => [fresh(), fresh()])
  const runs: Array<number> = []
  let [value, number] = [0, 0]

  const joinArgs = (at: number): Array<string | number> => {
    const { grouplimit, groupspacing, length, limit, overflow, spacing } = both[at]!
    const ofGroups = [grouplimit, groupspacing, groupspacing * 3]
    return [`m${at}`, "1", limit, spacing, spacing * 3, 60_000, 1000, 0, 2, length, overflow, ...ofGroups, 1, 0, ""]
  }
  const begin = async (session: number) => {
    await partition.open(sessionOf(session))
    read.set(sessionOf(session), 0)
    await ask(session, hashes.map((hash, at) => ["queue.join", joinArgs(at), hash]))
    await send(session, [0, 1].map((queue) => ({ ...idle, do: "work", queue, pick: 1 })))
  }
  const ask = async (session: number, requests: ReadonlyArray<Asked>): Promise<Array<Array<any>>> => {
    if (requests.length === 0) return []
    const replies = await partition.sendAll(sessionOf(session), requests)
    for (const [at, reply] of replies.entries()) {
      assert.notStrictEqual(reply[0], "failed", `${JSON.stringify(requests[at])} failed`)
    }
    await hear()
    for (const at of [0, 1]) await compare(at, requests)
    return replies
  }

  const hear = async () => {
    for (const session of [0, 1]) {
      const name = sessionOf(session)
      const events = await partition.mail(name)
      for (const [, id, tag, ...rest] of events.slice(read.get(name) ?? 0)) {
        const at = Number(String(id).slice(1))
        const worker = workers[session]![at]!
        if (tag === "room") worker.told = true
        if (tag === "cancel") {
          const raw = worker.jobs.get(rest[0])
          if (raw !== undefined) worker.ending.set(raw[0], raw)
          worker.jobs.delete(rest[0])
        }
        if (tag !== "deliver" || !worker.joined) continue
        for (const [place, raw] of (rest[2] as Array<Raw>).entries()) {
          const [job] = raw
          for (const others of workers) assert.isFalse(others[at]!.jobs.has(job), `${job} has two workers`)
          const token = rest[1] + place
          assert.isAbove(token, tokens.get(`${at} ${job}`) ?? 0)
          tokens.set(`${at} ${job}`, token)
          worker.jobs.set(job, raw)
        }
      }
      read.set(name, events.length)
    }
  }

  /** What the record of a queue says, and what there is. */
  const compare = async (at: number, requests: ReadonlyArray<unknown>) => {
    const [found, expected] = await counted(redis, hashes[at]!)
    const about = () => JSON.stringify({ queue: names[at], rules: both[at], requests })
    assert.deepStrictEqual(found, expected, about())
  }

  const pickOf = <A>(all: ReadonlyArray<A>, pick: number): A | undefined => all[pick % Math.max(1, all.length)]

  const offered = (at: number, { count, pick, policy, wish: wanted }: Wanted): [string, string] | undefined => {
    const level = "uhnl"[pick % 4]!
    const name = String(pick % 3)
    // Several jobs run after the same ones.
    const recent = known[at]!.slice(-4)
    const before = [pickOf(recent, pick), pickOf(recent, pick + 7)].filter((job) => job !== undefined)
    const group = groups[pick % 3]!
    const named = policy + before.map((job) => `${job.length} ${job}`).join("")
    let [more, texts] = [level, ""]
    const add = (letter: string, text: string) => {
      more += `${letter}${Buffer.byteLength(text)}`
      texts += text
    }
    for (const [part] of wanted.matchAll(/[a-z]\d*/g)) {
      if (/^[def]|^r/.test(part)) more += part
      else if (part === "i") add("i", `i${name}`)
      else if (part === "g") add("g", group)
      else if (part === "p") {
        if (before.length === 0) return undefined
        add("p", named)
      } else if (part === "t" || part === "b") {
        more += `v${part === "b" && pick % 2 === 0 ? later : 3}`
        add("q", `${part === "t" ? "t" : "d"}${name}`)
      } else add("q", part + name)
    }
    let [values, shapes] = ["", ""]
    for (let one = 0; one < count; one++) {
      const body = String(++value)
      values += body + texts
      shapes += `${body.length}${more} `
    }
    return [values, shapes]
  }

  /** Runs offer to queues beside them that have no length. */
  const starting = ({ count, pick, policy, queue }: Wanted): ReadonlyArray<Asked> => {
    if (both[0].length + both[1].length > 0) return []
    const run = `{${namespace}:00}:flow:f/${runs.push(runs.length)}`
    const nodes = Array.from({ length: count + 1 }, (_, at): Spec => ({
      name: `n${at}`,
      queue: names[(queue + at) % 2]!,
      options: (pick + at) % 2 === 0 ? "{}" : JSON.stringify({ group: groups[(pick + at) % 3] }),
      payload: String(++value),
      before: at === 0 ? [] : [at],
      behind: at === count ? [] : [[at + 2, policy]],
      undo: false
    }))
    const layout = layoutOf(nodes)
    return [
      ["flow.begin", ["f", "null", layout.digest, nodes.length, 0, 0, 0, 60_000], run],
      ...partsOf(layout).map((part): Asked => ["flow.load", [layout.digest, JSON.stringify(part)], run]),
      ["flow.start", [layout.digest, layout.fields.length / 2], run]
    ]
  }

  const enters = (at: number): boolean => both[at]!.length > 0 && both[at]!.overflow === 0

  /** What a wish becomes here and now: none if there is nothing to ask. */
  const askedFor = async (
    session: number,
    wanted: Wanted
  ): Promise<readonly [asked: Asked, answered?: (reply: Array<any>) => void] | undefined> => {
    const at = wanted.queue
    const { pick } = wanted
    const hash = hashes[at]!
    const worker = workers[session]![at]!
    const own = `w${at}`
    const any = pick % 5 === 0 ? `i${pick % 3}` : pickOf(known[at]!.slice(-15), pick) ?? "n1-1"
    const inHand = () => {
      const [job, raw] = pickOf([...worker.jobs, ...worker.ending], pick) ?? []
      if (job === undefined) return undefined
      worker.jobs.delete(job)
      worker.ending.delete(job)
      return raw!
    }
    switch (wanted.do) {
      case "offer": {
        const texts = offered(at, wanted)
        if (texts === undefined) return undefined
        const node = `node${session}${at}`
        if (enters(at)) {
          // One that waits already goes with what waits.
          if (worker.waiting.length > 0) return undefined
          return [
            ["queue.enter", [`m${at}`, ...texts, node, ++number], hash],
            (reply) => stored(session, at, texts, reply)
          ]
        }
        return [["queue.offer", [...texts, node, ++number], hash], (reply) => stored(session, at, texts, reply)]
      }
      case "work":
        if (worker.joined) return undefined
        worker.joined = true
        return [["queue.work", [own, 1 + pick % 4], hash]]
      case "leave":
        if (!worker.joined) return undefined
        worker.joined = false
        worker.jobs.clear()
        worker.ending.clear()
        return [["session.leave", [own], hash]]
      case "credit":
        return worker.joined ? [["queue.credit", [own, 1, ""], hash]] : undefined
      case "done": {
        const raw = inHand()
        if (raw === undefined) return undefined
        const [given, deduped] = [fieldOf(raw, "i") ?? "", fieldOf(raw, "q") ?? ""]
        const outcome = outcomeOf(raw)
        if (given === "" && deduped === "" && outcome === "") {
          return [["queue.done", [own, `${raw[0][0]} ${raw[0].slice(1)} `, 1], hash]]
        }
        return [["queue.finish", [own, raw[0], given, deduped, outcome, 0, 1], hash]]
      }
      case "complete": {
        const raw = inHand()
        if (raw === undefined) return undefined
        const text = String(++value)
        const group = groups[pick % 3]!
        const follower = pick % 2 === 0 ? [text, `${text.length} `] : [text + group, `${text.length}g${group.length} `]
        return [[
          "queue.complete",
          [own, raw[0], fieldOf(raw, "i") ?? "", fieldOf(raw, "q") ?? "", outcomeOf(raw), 0, 1, ...follower, ""],
          hash
        ]]
      }
      case "retry": {
        const raw = inHand()
        const delay = [0, 0, 1, later][pick % 4]!
        return raw && [["queue.retry", [own, raw[0], delay, pick % 3 === 0 ? "" : "1", 1], hash]]
      }
      case "bury": {
        const raw = inHand()
        return raw && [["queue.bury", [own, raw[0], "failed", "no", "[\"failed\",\"no\"]", 1], hash]]
      }
      case "note": {
        const [job] = pickOf([...worker.jobs], pick) ?? []
        return job === undefined ? undefined : [["queue.note", [own, job, String(pick), "1", "\"line\""], hash]]
      }
      case "cancel":
        return [["queue.cancel", [any, pick % 7 === 0 ? "1" : ""], hash]]
      case "promote":
        return [["queue.promote", [any], hash]]
      case "reschedule":
        return [["queue.reschedule", [any, "1", pick % 2 === 0 ? 1 : later], hash]]
      case "update":
        return [["queue.update", [any, String(++value)], hash]]
      case "start":
        return undefined
      case "plan":
        return [["queue.schedule", [`m${at}`, `plan ${pick % 2}`, "{}", "", String(++value), 3, "all"], hash]]
      case "unplan":
        return [["queue.unschedule", [`plan ${pick % 2}`], hash]]
      case "obliterate":
        return [["queue.obliterate", [""], hash]]
      case "watch":
        return [["queue.watch", [`m${at}`, any], hash]]
      case "follow":
        return [["queue.follow", [`m${at}`, any], hash]]
      case "pause":
      case "resume":
        return [["queue.pause", [wanted.do === "pause" ? "1" : ""], hash]]
      case "hold":
      case "free":
        return [["queue.pauseGroup", [groups[pick % 3]!, wanted.do === "hold" ? "1" : ""], hash]]
      case "purge":
        return [["queue.purgeGroup", [groups[pick % 3]!], hash]]
      case "slow":
        return [["queue.slow", [pick % 2 === 0 ? "" : groups[pick % 3]!, 2], hash]]
      case "drain":
        return [["queue.drain", [pick % 2 === 0 ? "1" : "", ""], hash]]
      case "discard":
      case "replay": {
        const [, letters] = await partition.look("queue.letters", ["", 100], hash)
        const letter = pickOf(letters as Array<Array<string>>, pick)?.[0]
        if (letter === undefined) return undefined
        return wanted.do === "discard" ?
          [["queue.discard", [letter], hash]] :
          [["queue.replay", [letter, "1"], hash], ([tag, job]) => {
            if (tag === "replayed") known[at]!.push(job)
          }]
      }
    }
  }

  const stored = (session: number, at: number, [values, shapes]: [string, string], reply: Array<any>) => {
    const worker = workers[session]![at]!
    const [, stamp, first, exceptions] = reply as [string, number, number, Array<[number, string | number, number?]>]
    let [next, from] = [first, 0]
    worker.waiting = []
    for (const [place, shape] of shapes.trim().split(" ").entries()) {
      const [, bytes, more] = /^(\d+)(.*)$/.exec(shape)!
      let size = Number(bytes)
      for (const [, length] of more!.matchAll(/[igqp](\d+)/g)) size += Number(length)
      const text = Buffer.from(values).subarray(from, from + size).toString()
      from += size
      const found = exceptions.find(([exception]) => exception === place)
      if (found === undefined) {
        const level = "uhnl".indexOf(more![0]!)
        const held = /[dfp]|qd/.test(more!.slice(1)) || text.slice(Number(bytes)).startsWith("d")
        known[at]!.push(`${(/g/.test(more!) ? "VIOM" : held ? "UHNL" : "uhnl")[level]}${stamp}-${next++}`)
      } else if (typeof found[1] === "string") {
        if (found[2] === 1) next++
        known[at]!.push(found[1])
      } else if (found[1] === 2) worker.waiting.push([text, shape])
    }
  }

  /** The jobs that wait for room are offered again when there is some. */
  const entering = (session: number): Array<readonly [Asked, (reply: Array<any>) => void]> =>
    [0, 1].flatMap((at) => {
      const worker = workers[session]![at]!
      if (!worker.told) return []
      worker.told = false
      if (worker.waiting.length === 0) return [[["queue.pass", [`m${at}`], hashes[at]!], () => {}] as const]
      const texts: [string, string] = [
        worker.waiting.map(([text]) => text).join(""),
        worker.waiting.map(([, shape]) => `${shape} `).join("")
      ]
      const asked: Asked = ["queue.enter", [`m${at}`, ...texts, `node${session}${at}`, ++number], hashes[at]!]
      return [[asked, (reply: Array<any>) => stored(session, at, texts, reply)] as const]
    })

  const send = async (session: number, wanted: ReadonlyArray<Wanted>) => {
    const asked: Array<Asked> = []
    const answers: Array<((reply: Array<any>) => void) | undefined> = []
    for (const [one, answered] of entering(session)) {
      asked.push(one)
      answers.push(answered)
    }
    const left = new Set<number>()
    for (const one of wanted) {
      // A worker that has left joins with another call: what it received before cannot be distinguished from what it receives behind that.
      if (one.do === "work" && left.has(one.queue)) continue
      // What waits is known with the answer.
      if (
        one.do === "offer" && enters(one.queue) &&
        asked.some(([verb, , hash]) => verb === "queue.enter" && hash === hashes[one.queue])
      ) continue
      if (one.do === "leave") left.add(one.queue)
      if (one.do === "start") {
        asked.push(...starting(one))
        answers.length = asked.length
        continue
      }
      const found = await askedFor(session, one)
      if (found === undefined) continue
      asked.push(found[0])
      answers.push(found[1])
    }
    const replies = await ask(session, asked)
    for (const [at, reply] of replies.entries()) answers[at]?.(reply)
  }

  const due = async (at: number): Promise<boolean> =>
    Number(await redis.zscore(partition.keys("")[1]!, `@queue:${names[at]}`) ?? Infinity) <= Date.now()
  const ring = async () => {
    for (const at of [0, 1]) {
      if (!await due(at)) continue
      await partition.ring(hashes[at]!)
      await hear()
      for (const other of [0, 1]) await compare(other, ["ring", names[at]])
    }
  }
  const end = async (session: number) => {
    const name = sessionOf(session)
    await partition.end(name)
    await partition.reap(name)
    workers[session] = [fresh(), fresh()]
    generations[session]!++
    await begin(session)
  }
  const pass = async () => {
    const until = Date.now() + 4
    while (Date.now() < until) await redis.ping()
  }

  await begin(0)
  await begin(1)
  for (const one of calls) {
    if (one === "ring") await ring()
    else if (one === "pass") await pass()
    else if ("end" in one) await end(one.end)
    else await send(one.session, one.requests)
  }

  // Nothing holds jobs back any more, so all of them run.
  for (const at of [0, 1]) {
    await ask(0, [
      ["queue.pause", [""], hashes[at]!],
      ...[0, 1].map((plan): Asked => ["queue.unschedule", [`plan ${plan}`], hashes[at]!]),
      ...groups.map((group): Asked => ["queue.pauseGroup", [group, ""], hashes[at]!])
    ])
    await send(0, [{ ...idle, do: "work", queue: at, pick: 3 }])
  }
  for (let turn = 0;; turn++) {
    const left: Array<number> = []
    for (const [at, hash] of hashes.entries()) {
      const [, ready, delayed, active, , , , , , , , , blocked] = await partition.look("queue.state", [], hash)
      left[at] = (ready as Array<number>).reduce((sum, some) => sum + Number(some), 0) + delayed + active + blocked
      const [, , listed] = await partition.look("queue.jobs", ["delayed", "", 100], hash)
      await ask(0, (listed as Array<[string, string, Raw]>).map(([, , [job]]): Asked => ["queue.promote", [job], hash]))
    }
    const waits = workers.flat().some(({ waiting }) => waiting.length > 0)
    if (!waits && left.every((count) => count === 0)) break
    assert.isBelow(turn, 400, `jobs are left: ${left.join(", ")}, ${waits ? "and some wait for room" : ""}`)
    for (const session of [0, 1]) {
      await send(
        session,
        [0, 1].flatMap((queue) => {
          const { ending, jobs } = workers[session]![queue]!
          const done = { do: "done", queue, pick: 0, wish: "", policy: "f", count: 1 } as const
          return Array.from({ length: ending.size + jobs.size }, () => done)
        })
      )
    }
    await ring()
    if (turn > 10) await pass()
  }
  for (const run of runs) {
    const [tag, state] = await partition.look("flow.status", [1], `{${namespace}:00}:flow:f/${run + 1}`)
    // Done, or failed.
    assert.deepStrictEqual([tag, state > 2 && state < 5], ["status", true], `run ${run} is over`)
  }
  for (const hash of hashes) {
    const fields = await redis.hkeys(hash)
    assert.isEmpty(fields.filter((field) => /^[acdjxyE]|^e\w/.test(field)), "nothing is left of jobs")
    assert.strictEqual(await redis.hlen(keysOf(hash).find((key) => key.includes("queue-ids:"))!), 0)
  }
  await redis.del(...hashes.flatMap(keysOf))
}
