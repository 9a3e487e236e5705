/** The queue actor, driven with random calls about two queues, beside a model: what it hands out, to which worker, and how often. */
import { assert, layer } from "@effect/vitest"
import { Effect } from "effect"
import * as fc from "fast-check"
import type { Redis } from "ioredis"
import { actor, client } from "./support/actor.ts"
import { bucket } from "./support/bucket.ts"
import { asked, ended } from "./support/driven.ts"
import { runs } from "./support/effort.ts"
import { freshNamespace, TestServer } from "./support/live.ts"

const live = { excludeTestServices: true, timeout: "120 seconds" } as const

const levels = ["u", "h", "n", "l"] as const

type Step =
  | {
    readonly do: "offer"
    readonly level: number
    readonly count: number
    readonly delayed: boolean
    readonly id: number
  }
  | { readonly do: "join" | "leave" | "repeat" }
  | { readonly do: "done" | "finish" | "retry" | "later" | "give" | "bury" | "cancel"; readonly pick: number }
  | { readonly do: "pause" | "resume" | "replay" }

const step: fc.Arbitrary<Step> = fc.oneof(
  {
    weight: 6,
    arbitrary: fc.record({
      do: fc.constant("offer" as const),
      level: fc.integer({ min: 0, max: 3 }),
      count: fc.integer({ min: 1, max: 4 }),
      delayed: fc.boolean(),
      id: fc.integer({ min: 0, max: 2 })
    })
  },
  {
    weight: 3,
    arbitrary: fc.record({
      do: fc.constantFrom("join" as const, "join" as const, "leave" as const, "repeat" as const)
    })
  },
  {
    weight: 9,
    arbitrary: fc.record({
      do: fc.constantFrom(
        "done" as const,
        "done" as const,
        "finish" as const,
        "retry" as const,
        "later" as const,
        "give" as const,
        "bury" as const,
        "bury" as const,
        "cancel" as const
      ),
      pick: fc.nat(100)
    })
  },
  {
    weight: 3,
    arbitrary: fc.record({
      do: fc.constantFrom("pause" as const, "resume" as const, "replay" as const, "replay" as const)
    })
  }
)

/** What one session asks with one call, about two queues; or what happens between calls. */
const call = fc.oneof(
  {
    weight: 12,
    arbitrary: fc.record({
      by: fc.nat(2),
      steps: fc.array(fc.record({ queue: fc.nat(1), step }), { minLength: 1, maxLength: 8 })
    })
  },
  {
    weight: 2,
    arbitrary: fc.record({ by: fc.nat(2), alone: fc.constantFrom("end" as const, "stop" as const, "ring" as const) })
  }
)

type Call = typeof call extends fc.Arbitrary<infer A> ? A : never

interface Job {
  readonly value: number
  readonly given: string
  /** The first id of one that was replayed, if its producer has given it another one. */
  readonly first?: string | undefined
  readonly level: number
  attempts: number
  crashes: number
  /** Cancelled: its worker has not said that the handler has ended. */
  state: "waiting" | "delayed" | "active" | "cancelled" | "dead" | "gone"
  worker: number
  token: number
  /** Where it stands in the order of its level, if it was handed out to no worker yet, and its offer had no delay. */
  fresh: number | undefined
  /** It is not handed out before that time of the server, in ms. */
  due: number
}

const numberIn = (id: string): number => Number(id.split("-")[1])

const credit = 2
const mostCrashes = 2
// While several levels have jobs, one of so many is not of the highest.
const turns = 8
const delay = 20

interface Rules {
  /** How many jobs are in work at a time; 0 for no limit. */
  readonly limit: number
  /** How many ms are between two jobs. */
  readonly spacing: number
}

const variants = {
  "without a limit": { limit: 0, spacing: 0 },
  "two at a time": { limit: 2, spacing: 0 },
  "at a rate": { limit: 0, spacing: 3 }
} as const satisfies { readonly [how: string]: Rules }

layer(TestServer.layer, live)("the queue actor", (it) => {
  for (const [how, rules] of Object.entries(variants)) {
    it.effect(`hands every job out until it is done, ${how}`, () =>
      Effect.gen(function*() {
        const redis = yield* client(yield* TestServer)
        yield* Effect.promise(() =>
          fc.assert(
            fc.asyncProperty(fc.array(call, { minLength: 5, maxLength: 30 }), (calls) => run(redis, calls, rules)),
            { numRuns: runs(40), endOnFailure: false }
          )
        )
      }))
  }
})

type Delivery = readonly [id: string, count: number, value: number, ...more: Array<string>]

interface World {
  readonly nameOf: (worker: number) => string
  readonly partition: ReturnType<typeof actor>
  readonly rules: Rules
  /** The time of Redis before the call, in ms. */
  readonly now: () => number
}

/** One of the queues. Its workers and members have the same sessions as those of the other one. */
const model = (at: number, { nameOf, now, partition, rules: { limit, spacing } }: World) => {
  const queue = partition.beside(`queue:q${at}`)
  const [member, claim] = [`m${at}`, `w${at}`]
  const jobs = new Map<string, Job>()
  const tokens = new Set<number>()
  const known = new Map<string, string>()
  const joined = [false, false, false]
  const stopped = [false, false, false]
  const owed = [0, 0, 0]
  const read = new Map<string, number>()
  const counted = [0, 0, 0]
  let [number, values, paused, completed] = [0, 0, false, 0]
  // The last job of each level that began in its order, and how many have begun since one of a lower level went ahead.
  const last = [0, 0, 0, 0]
  let since = 0
  const allowed = bucket(spacing, 3 * spacing)
  const open = () =>
    queue.send("producer", "queue.join", [
      ...[member, "1", limit, spacing, 3 * spacing, 60_000, 1000, 0, mostCrashes, 0, 0, 1, 0, 0, 1, 0, ""]
    ])

  // With cancelled ones.
  const held = (worker?: number) =>
    [...jobs].filter(([, { state, worker: own }]) =>
      (state === "active" || state === "cancelled") && (worker === undefined || own === worker)
    )

  const fence = (job: Job, token: number) => {
    assert.isAbove(token, job.token)
    assert.isFalse(tokens.has(token))
    tokens.add(token)
    job.token = token
  }
  // In the order of their tokens, over all workers.
  const begin = (deliveries: ReadonlyArray<readonly [token: number, worker: number, delivery: Delivery]>) => {
    for (const [token, worker, [id, count, value, ...more]] of deliveries.toSorted(([x], [y]) => x - y)) {
      const job = jobs.get(id)
      assert.isDefined(job, `${id} was never offered`)
      assert.include(["waiting", "delayed"], job!.state, `${id} was handed out`)
      assert.strictEqual(value, job!.value)
      const names = { i: job!.given || undefined, f: job!.first }
      assert.deepStrictEqual(more, Object.entries(names).flatMap(([name, id]) => id === undefined ? [] : [name, id]))
      job!.attempts++
      assert.strictEqual(count, job!.attempts + 65_536 * job!.crashes)
      fence(job!, token)
      allowed(token, id)
      assert.isAtLeast(token / 1000, job!.due, `${id} was handed out before its time`)
      if (job!.fresh !== undefined) {
        assert.isAbove(job!.fresh, last[job!.level]!, `${id} was overtaken by another of its level`)
        last[job!.level] = job!.fresh
      }
      const waiting = [...jobs].filter(([, { state }]) => state === "waiting")
      const higher = waiting.some(([, { level }]) => level < job!.level)
      if (higher) {
        assert.isAtLeast(since, turns - 1, `${id} went ahead of a higher level`)
        const highest = Math.min(...waiting.map(([, { level }]) => level))
        const older = waiting.find(([other, { level }]) => level > highest && numberIn(other) < numberIn(id))
        assert.isUndefined(older, `${id} went ahead of an older job of another level`)
      }
      since = higher ? 0 : since + 1
      job!.fresh = undefined
      job!.state = "active"
      job!.worker = worker
    }
  }
  const take = async () => {
    const heard: Array<readonly [number, number, Delivery]> = []
    for (const worker of [0, 1, 2]) {
      const name = nameOf(worker)
      const events = await partition.mail(name)
      for (const event of events.slice(read.get(name) ?? 0)) {
        if (event[0] !== "changed" || event[1] !== claim || event[2] !== "deliver") continue
        assert.strictEqual(event[3], ++counted[worker]!)
        assert.isFalse(paused, "handed out while it is paused")
        for (const [at, one] of (event[5] as Array<Delivery>).entries()) heard.push([event[4] + at, worker, one])
      }
      read.set(name, events.length)
    }
    begin(heard)
    for (const worker of [0, 1, 2]) assert.isAtMost(held(worker).length + owed[worker]!, credit)
    if (limit > 0) assert.isAtMost(held().length, limit)
  }
  // What its workers are given up counts as `crashed` says.
  const drop = (worker: number, crashed: boolean) => {
    for (const [, job] of held(worker)) {
      const isCancelled = job.state === "cancelled"
      job.state = isCancelled ? "gone" : "waiting"
      if (isCancelled) continue
      if (!crashed) job.attempts--
      else if (++job.crashes >= mostCrashes) bury(job)
    }
    joined[worker] = stopped[worker] = false
    owed[worker] = 0
  }
  const bury = (job: Job) => {
    job.state = "dead"
  }
  const gone = (job: Job) => {
    job.state = "gone"
  }
  const settle = async (by: number, pick: number, what: Step["do"]) => {
    const all = held(by)
    const found = all[pick % Math.max(1, all.length)]
    if (found === undefined) return
    const [id, job] = found
    const name = nameOf(job.worker)
    // No worker is owed a job for a slot that it does not take again.
    const more = stopped[job.worker] ? 0 : 1
    if (more === 0) owed[job.worker]!++
    const isCancelled = job.state === "cancelled"
    // It was cancelled, regardless of what its worker says.
    if (isCancelled) gone(job)
    switch (what) {
      case "done":
      case "finish":
        if (!isCancelled) completed++
        gone(job)
        if (job.given !== "") await queue.send(name, "queue.finish", [claim, id, job.given, "", "", 0, more])
        else await queue.send(name, "queue.done", [claim, `${id[0]} ${id.slice(1)}`, more])
        return
      case "retry":
      case "later":
        if (!isCancelled) job.state = what === "later" ? "delayed" : "waiting"
        if (what === "later") job.due = now() + delay
        assert.deepStrictEqual(
          await queue.send(name, "queue.retry", [claim, id, what === "later" ? delay : 0, "1", more]),
          ["returned"]
        )
        return
      case "give":
        if (!isCancelled) {
          job.state = "waiting"
          job.attempts--
        }
        await queue.send(name, "queue.retry", [claim, id, 0, "", more])
        return
      case "bury":
        if (!isCancelled) bury(job)
        await queue.send(name, "queue.bury", [claim, id, "failed", "no", "", more])
    }
  }
  const join = async (worker: number) => {
    // Behind it in the call, some of these may end.
    const own = held(worker).map(([id, { attempts, crashes, state }]) =>
      [id, attempts + 65_536 * crashes, state] as const
    )
    const ofIts = (wanted: Job["state"]) => own.filter(([, , state]) => state === wanted)
    if (!joined[worker]) counted[worker] = 0
    joined[worker] = true
    const before = counted[worker]
    const [tag, sent, token, open, cancelled] = await queue.send(nameOf(worker), "queue.work", [claim, credit])
    assert.strictEqual(tag, "joined")
    assert.strictEqual(sent, before)
    assert.sameDeepMembers(
      (open as Array<[string, number]>).map(([id, count]) => [id, count, "active"] as const),
      ofIts("active")
    )
    assert.sameMembers(cancelled, ofIts("cancelled").map(([id]) => id))
    for (const [at, [id]] of (open as Array<[string]>).entries()) fence(jobs.get(id)!, (token as number) + at)
  }
  const offer = async (name: string, { count, delayed, id, level }: Extract<Step, { do: "offer" }>) => {
    const given = id === 0 ? "" : `id ${id}`
    const bodies = Array.from({ length: count }, () => String(++values))
    const more = `${level === 2 ? "" : levels[level]}${delayed ? `d${delay}` : ""}${
      given === "" ? "" : `i${given.length}`
    }`
    const text = bodies.map((body) => body + given).join("")
    const shapes = bodies.map((body) => `${body.length}${more}`).join(" ")
    const due = delayed ? now() + delay : 0
    const args = [text, shapes, `node${at}`, ++number]
    const answer = await queue.send(name, "queue.offer", args)
    const [tag, stamp, first, duplicates] = answer as [string, number, number, Array<[number, string]>]
    assert.strictEqual(tag, "offered")
    let next = first
    for (const [place, body] of bodies.entries()) {
      const duplicate = duplicates.find(([at]) => at === place)
      const letter = delayed ? levels[level]!.toUpperCase() : levels[level]!
      const former = given === "" ? undefined : known.get(given)
      if (former !== undefined) {
        assert.deepStrictEqual(duplicate, [place, former])
        continue
      }
      assert.isUndefined(duplicate)
      const own = `${letter}${stamp}-${next}`
      if (given !== "") known.set(given, own)
      jobs.set(own, {
        value: Number(body),
        given,
        level,
        attempts: 0,
        crashes: 0,
        state: delayed ? "delayed" : "waiting",
        worker: -1,
        token: 0,
        fresh: delayed ? undefined : next,
        due
      })
      next++
    }
    // The same offer again is answered as before, and changes nothing.
    if (number === args[3]) assert.deepStrictEqual(await queue.send(name, "queue.offer", args), answer)
  }
  const check = async () => {
    const [, ready, delayed, active, dead, , isPaused, done] = await queue.look("queue.state", [])
    const all = [...jobs.values()]
    const count = (state: Job["state"]) => all.filter((job) => job.state === state).length
    assert.strictEqual(active, count("active") + count("cancelled"))
    assert.strictEqual(dead, count("dead"))
    assert.strictEqual(isPaused, paused)
    assert.strictEqual(done, completed)
    // A delay may be over in Redis already.
    const waiting = (ready as Array<number>).reduce((total, some) => total + Number(some), 0)
    assert.strictEqual(waiting + delayed, count("waiting") + count("delayed"))
    for (const [id, own] of jobs) {
      // The id of a job that was replayed names the new one.
      let newest = id
      while (known.has(newest)) newest = known.get(newest)!
      const job = jobs.get(newest) ?? own
      const [tag, state, attempts] = await queue.look("queue.status", [id])
      if (["cancelled", "gone", "dead"].includes(job.state)) assert.strictEqual(tag, "missing", id)
      else if (job.state === "active") assert.deepStrictEqual([state, attempts], ["active", job.attempts])
      else assert.include(["waiting", "delayed"], state)
    }
  }

  const cancel = async (name: string, pick: number) => {
    const all = [...jobs].filter(([, { state }]) => !["cancelled", "gone", "dead"].includes(state))
    const found = all[pick % Math.max(1, all.length)]
    if (found === undefined) return
    const [id, job] = found
    const { state } = job
    job.state = state === "active" ? "cancelled" : "gone"
    const answer = await queue.send(name, "queue.cancel", [job.given === "" ? id : job.given, 0])
    assert.deepStrictEqual(answer, ["cancelled", state === "active"])
    assert.deepStrictEqual(await queue.send(name, "queue.cancel", [id, 0]), ["missing"])
  }
  const replay = async (name: string) => {
    const [, letters] = await queue.look("queue.letters", ["", 100])
    const tuples = letters as Array<[string, string, string, string, string, string, string]>
    assert.sameMembers(
      tuples.map(([, job]) => job),
      [...jobs].filter(([, { state }]) => state === "dead").map(([id]) => id)
    )
    for (const [letter, former, reason, attempts, crashes, , body] of tuples) {
      const job = jobs.get(former)!
      assert.deepStrictEqual(
        [reason, Number(attempts), Number(crashes), Number(body)],
        [job.crashes >= mostCrashes ? "crashed" : "failed", job.attempts, job.crashes, job.value]
      )
      const [tag, id] = await queue.send(name, "queue.replay", [letter, "1"])
      assert.strictEqual(tag, "replayed")
      assert.strictEqual((id as string)[0], levels[job.level])
      gone(job)
      // Its former id names it.
      const given = job.given || former
      jobs.set(id as string, {
        ...job,
        given,
        first: job.first ?? (given.startsWith("id ") ? former : undefined),
        attempts: 0,
        crashes: 0,
        state: "waiting",
        worker: -1,
        fresh: Number(/\d+$/.exec(id as string)![0]),
        due: 0
      })
      known.set(given, id as string)
      known.set(former, id as string)
      await take()
    }
  }
  const leave = async (worker: number) => {
    if (!joined[worker]) return
    drop(worker, false)
    await queue.send(nameOf(worker), "session.leave", [claim])
  }
  /** A step of a call: it asks once, at once. */
  const once = async (by: number, next: Step): Promise<unknown> => {
    const name = nameOf(by)
    switch (next.do) {
      case "offer":
        return offer(name, next)
      case "join":
      case "repeat":
        return next.do === "join" || joined[by] ? join(by) : undefined
      case "leave":
        return leave(by)
      case "cancel":
        return cancel(name, next.pick)
      case "pause":
      case "resume":
        paused = next.do === "pause"
        return queue.send(name, "queue.pause", [paused ? "1" : ""])
      case "replay":
        return
      default:
        return settle(by, next.pick, next.do)
    }
  }
  const stop = async (worker: number) => {
    if (!joined[worker] || stopped[worker]) return
    await queue.send(nameOf(worker), "queue.credit", [claim, 0, "1"])
    await take()
    stopped[worker] = true
    owed[worker] = credit - held(worker).length
  }
  const ended = (worker: number) => {
    drop(worker, true)
    read.delete(nameOf(worker))
  }
  const finish = async () => {
    await queue.send("producer", "queue.pause", [""])
    paused = false
    await take()
    for (const worker of [1, 2]) {
      await leave(worker)
      await take()
    }
    if (stopped[0]) await leave(0)
    await join(0)
    await take()
    const open = () => [...jobs.values()].filter(({ state }) => state !== "dead" && state !== "gone").length
    for (let idle = 0; open() > 0; idle++) {
      assert.isBelow(idle, 1000, `${open()} jobs were not handed out`)
      if (held().length === 0) await queue.ring()
      else await settle(0, 0, "done")
      await take()
    }
    await check()
  }
  return { open, once, replay, take, check, stop, ended, finish, ring: queue.ring }
}

const run = async (redis: Redis, calls: ReadonlyArray<Call>, rules: Rules) => {
  const partition = actor(redis, freshNamespace(), "queue:q0")
  const sessions = [0, 0, 0]
  const nameOf = (worker: number) => `s${worker}x${sessions[worker]}`
  let now = 0
  const queues = [0, 1].map((at) => model(at, { rules, nameOf, now: () => now, partition }))
  const quiet = async () => {
    for (const queue of queues) {
      await queue.take()
      await queue.check()
    }
  }
  await partition.open("producer")
  for (const queue of queues) await queue.open()
  for (const worker of [0, 1, 2]) await partition.open(nameOf(worker))
  for (const next of calls) {
    const [seconds, micros] = await redis.time()
    now = Number(seconds) * 1000 + Math.floor(Number(micros) / 1000)
    const { by } = next
    if ("steps" in next) {
      await asked(partition, queues, by, nameOf(by), next.steps)
    } else if (next.alone === "end") {
      await ended(partition, queues, by, sessions, nameOf)
    } else {
      for (const queue of queues) await (next.alone === "ring" ? queue.ring() : queue.stop(by))
    }
    await quiet()
  }
  // In any case, a worker that goes on gets the rest.
  for (const queue of queues) await queue.finish()
}
