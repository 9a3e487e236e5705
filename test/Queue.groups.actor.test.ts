/**
 * Groups of jobs in the queue actor, driven directly with random calls about two queues, beside a model: which job of a group begins,
 * and when.
 */
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

const letters = { grouped: ["V", "I", "O", "M"], delayed: ["U", "H", "N", "L"], plain: ["u", "h", "n", "l"] } as const

// One is a part of another, and one ends as a job in the order does.
const names = ["a", "aa", "a20000000000000001O1,0", ""] as const

const verdicts = ["done", "done", "finish", "retry", "later", "snooze", "give", "bury"] as const

type Step =
  | {
    readonly do: "offer"
    readonly group: number
    readonly level: number
    readonly count: number
    readonly later: boolean
  }
  | { readonly do: "join" | "leave" | "repeat" }
  | { readonly do: "settle"; readonly how: typeof verdicts[number]; readonly pick: number }
  | { readonly do: "cancel" | "promote" | "reschedule"; readonly pick: number }
  | { readonly do: "hold" | "free" | "purge"; readonly group: number }
  | { readonly do: "pause" | "resume" | "replay" | "purgeAll" }

const group = fc.integer({ min: 0, max: 2 })

const step: fc.Arbitrary<Step> = fc.oneof(
  {
    weight: 8,
    arbitrary: fc.record({
      do: fc.constant("offer" as const),
      // The last one: none.
      group: fc.integer({ min: 0, max: 3 }),
      level: fc.constantFrom(2, 2, 2, 0, 1, 3),
      count: fc.integer({ min: 1, max: 4 }),
      later: fc.constantFrom(false, false, true)
    })
  },
  {
    weight: 3,
    arbitrary: fc.record({ do: fc.constantFrom("join" as const, "join" as const, "leave" as const, "repeat" as const) })
  },
  {
    weight: 10,
    arbitrary: fc.record({ do: fc.constant("settle" as const), how: fc.constantFrom(...verdicts), pick: fc.nat(100) })
  },
  {
    weight: 2,
    arbitrary: fc.record({
      do: fc.constantFrom("cancel" as const, "promote" as const, "reschedule" as const),
      pick: fc.nat(100)
    })
  },
  {
    weight: 2,
    arbitrary: fc.record({
      do: fc.constantFrom("hold" as const, "hold" as const, "free" as const, "free" as const, "purge" as const),
      group
    })
  },
  {
    weight: 3,
    arbitrary: fc.record({
      do: fc.constantFrom(
        "pause" as const,
        "resume" as const,
        "resume" as const,
        "replay" as const,
        "purgeAll" as const
      )
    })
  }
)

/** What one session asks with one call, about two queues; or what happens between calls. */
const call = fc.oneof(
  {
    weight: 12,
    arbitrary: fc.record({
      by: fc.nat(1),
      steps: fc.array(fc.record({ queue: fc.nat(1), step }), { minLength: 1, maxLength: 8 })
    })
  },
  { weight: 3, arbitrary: fc.record({ by: fc.nat(1), alone: fc.constantFrom("end" as const, "ring" as const) }) }
)

type Call = typeof call extends fc.Arbitrary<infer A> ? A : never

interface Job {
  readonly id: string
  readonly number: number
  readonly value: number
  readonly group: number
  readonly level: number
  begun: boolean
  attempts: number
  crashes: number
  /** Cancelled: its worker has not said that the handler has ended. */
  state: "waiting" | "delayed" | "active" | "cancelled" | "dead" | "gone"
  worker: number
  /** The id that it had before it was replayed first, which names it. */
  readonly former?: string
}

const credit = 3
const mostCrashes = 2
const none = names.length - 1

layer(TestServer.layer, live)("the queue actor with groups", (it) => {
  for (const [limit, spacing] of [[1, 0], [2, 0], [2, 2]] as const) {
    const how = spacing === 0 ? "and groups in turn" : "and at a rate"
    it.effect(`begins jobs of each group in order, ${limit} at a time, ${how}`, () =>
      Effect.gen(function*() {
        const redis = yield* client(yield* TestServer)
        yield* Effect.promise(() =>
          fc.assert(
            fc.asyncProperty(fc.array(call, { minLength: 5, maxLength: 25 }), (calls) =>
              run(redis, calls, limit, spacing)),
            { numRuns: runs(25), endOnFailure: false }
          )
        )
      }))
  }
})

interface World {
  readonly nameOf: (worker: number) => string
  readonly partition: ReturnType<typeof actor>
  readonly limit: number
  /** How many ms are between two jobs of a group. */
  readonly spacing: number
}

/** One of the queues. Its workers and members have the same sessions as those of the other one. */
const model = (which: number, { limit, nameOf, partition, spacing }: World) => {
  const queue = partition.beside(`queue:q${which}`)
  const [member, own] = [`m${which}`, `w${which}`]
  const jobs = new Map<string, Job>()
  const joined = [false, false]
  const read = new Map<string, number>()
  const held = names.map(() => false)
  // Of each group, counted in jobs that began: since when it can begin a job, of which level, and when it last began a job.
  const ready = names.map(() => ({ since: Number.POSITIVE_INFINITY, level: -1 }))
  const before = names.map(() => -1)
  // How many jobs each group has begun since it began one of a lower level than its first.
  const since = names.map(() => 0)
  const allowed = names.map(() => bucket(spacing, 3 * spacing))
  let [number, values, paused, begins] = [0, 0, false, 0]
  const open = () =>
    queue.send("producer", "queue.join", [
      ...[member, "1", 0, 0, 0, 60_000, 1000, 0, mostCrashes, 0, 0, limit, spacing, 3 * spacing, 1, 0, ""]
    ])

  const all = () => [...jobs.values()]
  // Cancelled jobs are active until their handlers have ended.
  const inState = (state: Job["state"]) =>
    all().filter((job) => (job.state === "cancelled" ? "active" : job.state) === state)
  const inGroup = (at: number, state: Job["state"]) => inState(state).filter(({ group }) => group === at)
  const active = (worker?: number) => inState("active").filter((job) => worker === undefined || job.worker === worker)

  const rank = ({ begun, level }: Job) => limit === 1 && begun ? 0 : 2 * level + (begun ? 1 : 2)
  /** The first job of a group, if it can begin one. */
  const headOf = (at: number): Job | undefined => {
    if (held[at]) return undefined
    const kept = inGroup(at, "delayed").filter(({ begun }) => begun).length
    if (inGroup(at, "active").length + (limit === 1 ? kept : 0) >= limit) return undefined
    return inGroup(at, "waiting").toSorted((x, y) => rank(x) - rank(y) || x.number - y.number)[0]
  }
  /** The oldest job of the levels below the first job, which seven other ones have gone ahead of. */
  const oldestOf = (at: number): Job | undefined => {
    const head = headOf(at)
    if (head === undefined || rank(head) === 0 || since[at]! < 7) return undefined
    const lower = inGroup(at, "waiting").filter(({ level }) => level > head.level)
    // Those of a level that have begun before come first.
    const firsts = [1, 2, 3].map((level) =>
      lower.filter((job) => job.level === level).toSorted((x, y) => rank(x) - rank(y) || x.number - y.number)[0]
    )
    return firsts.filter((job) => job !== undefined).toSorted((x, y) => x.number - y.number)[0]
  }
  const observe = () => {
    for (let at = 0; at < none; at++) {
      const level = headOf(at)?.level ?? -1
      if (level !== ready[at]!.level) ready[at] = { since: begins, level }
    }
  }
  const begin = (
    token: number,
    worker: number,
    [id, count, value]: [string, number, number],
    more: ReadonlyArray<string>
  ) => {
    const job = jobs.get(id)
    assert.isDefined(job, `${id} was never offered`)
    assert.strictEqual(job!.state, "waiting", id)
    assert.strictEqual(value, job!.value)
    assert.isFalse(paused)
    const at = job!.group
    const given = job!.former === undefined ? [] : ["i", job!.former]
    assert.deepStrictEqual(more, [...at === none ? [] : ["g", names[at]!], ...given])
    if (at !== none) {
      const isAged = headOf(at)?.id !== id
      assert.include([headOf(at)?.id, oldestOf(at)?.id], id, "another job of the group is in front")
      since[at] = isAged ? 0 : since[at]! + 1
      allowed[at]!(token, id)
      // Another group of the same level that could have begun one all the time has had its turn.
      for (let other = 0; other < none; other++) {
        if (spacing > 0 || other === at || ready[other]!.level !== job!.level || ready[at]!.level !== job!.level) {
          continue
        }
        assert.isFalse(
          ready[other]!.since < before[at]! && before[other]! < before[at]!,
          `group ${other} was passed over`
        )
      }
      before[at] = ++begins
    }
    job!.attempts++
    assert.strictEqual(count, job!.attempts + 65_536 * job!.crashes)
    job!.state = "active"
    job!.begun = true
    job!.worker = worker
    observe()
    // It can begin the next one from now on.
    if (at !== none) ready[at] = { since: begins, level: headOf(at)?.level ?? -1 }
  }
  const take = async () => {
    observe()
    const begun: Array<readonly [token: number, worker: number, raw: [string, number, number, ...Array<string>]]> = []
    for (const worker of [0, 1]) {
      const name = nameOf(worker)
      const events = await partition.mail(name)
      for (const event of events.slice(read.get(name) ?? 0)) {
        if (event[1] !== own || event[2] !== "deliver") continue
        for (const [at, raw] of event[5].entries()) begun.push([event[4] + at, worker, raw])
      }
      read.set(name, events.length)
    }
    for (const [token, worker, [id, count, value, ...more]] of begun.toSorted(([x], [y]) => x - y)) {
      begin(token, worker, [id, count, value], more)
    }
  }
  const bury = (job: Job) => {
    job.state = "dead"
  }
  const drop = (worker: number, crashed: boolean) => {
    for (const job of active(worker)) {
      const isCancelled = job.state === "cancelled"
      job.state = isCancelled ? "gone" : "waiting"
      if (isCancelled) continue
      if (!crashed) job.attempts--
      else if (++job.crashes >= mostCrashes) bury(job)
    }
    joined[worker] = false
  }
  const settle = async (by: number, pick: number, how: typeof verdicts[number]) => {
    const job = active(by)[pick % Math.max(1, active(by).length)]
    if (job === undefined) return
    const { attempts } = job
    const isCancelled = job.state === "cancelled"
    const name = nameOf(job.worker)
    const told = tell(job, name, how)
    // It was cancelled, regardless of what its worker says. What is behind it in the call finds it so.
    if (isCancelled) Object.assign(job, { attempts, state: "gone" })
    await told
  }
  const tell = async (job: Job, name: string, how: typeof verdicts[number]) => {
    const { id } = job
    switch (how) {
      case "done":
        job.state = "gone"
        await queue.send(name, "queue.done", [own, `${id[0]} ${id.slice(1)}`, 1])
        return
      case "finish":
        job.state = "gone"
        await queue.send(name, "queue.finish", [own, id, job.former ?? "", "", "", 0, 1])
        return
      case "bury":
        bury(job)
        await queue.send(name, "queue.bury", [own, id, "failed", "no", "", 1])
        return
      default: {
        const later = how === "later" || how === "snooze"
        job.state = later ? "delayed" : "waiting"
        if (how === "snooze" || how === "give") job.attempts--
        await queue.send(name, "queue.retry", [
          own,
          id,
          later ? 1 : 0,
          how === "later" || how === "retry" ? "1" : "",
          1
        ])
      }
    }
  }
  const join = async (worker: number) => {
    // Behind it in the call, some of these may end.
    const ofIts = (state: Job["state"]) => active(worker).filter((job) => job.state === state).map(({ id }) => id)
    const [busy, ending] = [ofIts("active"), ofIts("cancelled")]
    joined[worker] = true
    const [, , , open, cancelled] = await queue.send(nameOf(worker), "queue.work", [own, credit])
    assert.sameMembers((open as Array<[string]>).map(([id]) => id), busy)
    assert.sameMembers(cancelled, ending)
  }
  const offer = async (by: string, { count, group, later, level }: Extract<Step, { do: "offer" }>) => {
    const name = names[group]!
    const bodies = Array.from({ length: count }, () => String(++values))
    const more = `${letters.plain[level]}${later ? "d1" : ""}${group === none ? "" : `g${name.length}`}`
    const [, stamp, first] = await queue.send(by, "queue.offer", [
      bodies.map((body) => body + name).join(""),
      bodies.map((body) => `${body.length}${more}`).join(" "),
      `node${which}`,
      ++number
    ])
    const letter = letters[group !== none ? "grouped" : later ? "delayed" : "plain"][level]!
    for (const [at, body] of bodies.entries()) {
      const id = `${letter}${stamp}-${first + at}`
      const state = later ? "delayed" : "waiting"
      const value = Number(body)
      jobs.set(id, {
        id,
        number: first + at,
        value,
        group,
        level,
        begun: false,
        attempts: 0,
        crashes: 0,
        state,
        worker: -1
      })
    }
  }
  const ring = async () => {
    // Every delay is over by then.
    const until = Date.now() + 3
    while (Date.now() < until) await queue.look("queue.state", [])
    await queue.ring()
    for (const job of all()) if (job.state === "delayed") job.state = "waiting"
  }
  const purge = async (by: string, at?: number) => {
    const known = new Set(jobs.keys())
    const remove = (isMeant: (job: Job) => boolean) => {
      const gone = all().filter((job) =>
        (job.state === "waiting" || job.state === "delayed") && (at === undefined || at === job.group) && isMeant(job)
      )
      for (const job of gone) job.state = "gone"
      return gone.length
    }
    const count = remove(() => true)
    const answer = at === undefined
      ? await queue.send(by, "queue.drain", ["1", ""])
      : await queue.send(by, "queue.purgeGroup", [names[at]!])
    // Jobs that were offered in front of it in the call have their ids now.
    assert.deepStrictEqual(answer.slice(1, 3), [count + remove(({ id }) => !known.has(id)), false])
  }
  const replay = async (by: string) => {
    const [, found] = await queue.look("queue.letters", ["", 100])
    assert.sameMembers(
      (found as Array<[string, string]>).map(([, job]) => job),
      all().filter(({ state }) => state === "dead").map(({ id }) => id)
    )
    for (const [letter, former, , , , , , , name] of found as Array<Array<string>>) {
      const job = jobs.get(former!)!
      assert.strictEqual(name, names[job.group])
      const [, id] = await queue.send(by, "queue.replay", [letter!, "1"])
      jobs.delete(former!)
      const again = { number: Number(id.slice(id.indexOf("-") + 1)), attempts: 0, crashes: 0, begun: false, worker: -1 }
      jobs.set(id, { ...job, ...again, id, former: job.former ?? former!, state: "waiting" })
      await take()
    }
  }
  const check = async () => {
    const [, waiting, delayed, working, dead] = await queue.look("queue.state", [])
    const count = (state: Job["state"]) => inState(state).length
    assert.deepStrictEqual(
      [...(waiting as Array<string>).map(Number), delayed, working, dead],
      [
        ...[0, 1, 2, 3].map((level) => all().filter((job) => job.state === "waiting" && job.level === level).length),
        count("delayed"),
        count("active"),
        count("dead")
      ]
    )
    const states: Array<[string, number, number, number, boolean]> = []
    for (let at = 0; at < none; at++) {
      const counts = (["waiting", "delayed", "active"] as const).map((state) => inGroup(at, state).length)
      const found = [...counts, held[at]!] as const
      const isKept = found.some(Boolean)
      const answer = await queue.look("queue.group", [names[at]!])
      // Its rate may keep it for longer.
      if (isKept || answer[0] === "group" && spacing > 0) assert.deepStrictEqual(answer, ["group", ...found])
      else assert.deepStrictEqual(answer, ["missing"])
      if (isKept) states.push([names[at]!, ...found] as [string, number, number, number, boolean])
    }
    const [, cursor, found] = await queue.look("queue.groups", ["0", 100])
    assert.strictEqual(cursor, "0")
    assert.sameDeepMembers(
      (found as typeof states).filter(([, ...counts]) => spacing === 0 || counts.some(Boolean)),
      states
    )
    for (const { attempts, former, id, state } of all()) {
      const answer = await queue.look("queue.status", [former ?? id])
      const isOpen = !["cancelled", "gone", "dead"].includes(state)
      assert.deepStrictEqual(answer, isOpen ? ["status", state, attempts] : ["missing"])
    }
    // What can begin has begun, if a worker takes it.
    if (paused || ![0, 1].some((worker) => joined[worker] && active(worker).length < credit)) return
    assert.isEmpty(inGroup(none, "waiting"))
    for (let at = 0; spacing === 0 && at < none; at++) assert.isUndefined(headOf(at), `group ${at} can begin a job`)
  }

  const cancel = async (by: string, pick: number) => {
    const open = all().filter(({ state }) => !["cancelled", "gone", "dead"].includes(state))
    const job = open[pick % Math.max(1, open.length)]
    if (job === undefined) return
    const isActive = job.state === "active"
    job.state = isActive ? "cancelled" : "gone"
    assert.deepStrictEqual(await queue.send(by, "queue.cancel", [job.id, 0]), ["cancelled", isActive])
  }
  const promote = async (by: string, pick: number) => {
    const open = all().filter(({ state }) => state === "delayed")
    const job = open[pick % Math.max(1, open.length)]
    if (job === undefined) return
    job.state = "waiting"
    assert.deepStrictEqual(await queue.send(by, "queue.promote", [job.id]), ["promoted"])
  }
  const reschedule = async (by: string, pick: number) => {
    const open = all().filter(({ group, state }) => group !== none && (state === "waiting" || state === "delayed"))
    const job = open[pick % Math.max(1, open.length)]
    if (job === undefined) return
    job.state = "delayed"
    assert.deepStrictEqual(await queue.send(by, "queue.reschedule", [job.id, "1", 1]), ["rescheduled"])
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
        if (!joined[by]) return
        drop(by, false)
        return queue.send(name, "session.leave", [own])
      case "settle":
        return settle(by, next.pick, next.how)
      case "cancel":
        return cancel(name, next.pick)
      case "promote":
        return promote(name, next.pick)
      case "reschedule":
        return reschedule(name, next.pick)
      case "hold":
      case "free":
        held[next.group] = next.do === "hold"
        return queue.send(name, "queue.pauseGroup", [names[next.group]!, next.do === "hold" ? "1" : ""])
      case "purge":
        return purge(name, next.group)
      case "purgeAll":
        return purge(name)
      case "pause":
      case "resume":
        paused = next.do === "pause"
        return queue.send(name, "queue.pause", [paused ? "1" : ""])
      case "replay":
        return
    }
  }
  const ended = (worker: number) => {
    drop(worker, true)
    read.delete(nameOf(worker))
  }
  // After all that, a worker that goes on gets the rest, and nothing is left of the groups.
  const finish = async (fieldsOf: (key: string) => Promise<ReadonlyArray<string>>) => {
    await once(0, { do: "resume" })
    await take()
    for (const at of [0, 1, 2]) {
      await once(0, { do: "free", group: at })
      await take()
    }
    await join(0)
    await take()
    for (let idle = 0; all().some(({ state }) => state !== "dead" && state !== "gone"); idle++) {
      assert.isBelow(idle, 1000, "some jobs were not handed out")
      if (active().length === 0) await ring()
      else await settle(active()[0]!.worker, 0, "done")
      await take()
    }
    await check()
    // Groups stay for as long as their rate holds them back.
    const kept = spacing === 0 ? /^[gGj]/ : /^j/
    assert.isEmpty((await fieldsOf(queue.key)).filter((field) => kept.test(field)))
  }
  return { open, once, replay, take, check, ended, finish, ring }
}

const run = async (redis: Redis, calls: ReadonlyArray<Call>, limit: number, spacing: number) => {
  const partition = actor(redis, freshNamespace(), "queue:q0")
  const sessions = [0, 0]
  const nameOf = (worker: number) => `s${worker}x${sessions[worker]}`
  const queues = [0, 1].map((which) => model(which, { limit, spacing, nameOf, partition }))
  await partition.open("producer")
  for (const queue of queues) await queue.open()
  for (const worker of [0, 1]) await partition.open(nameOf(worker))
  for (const next of calls) {
    const { by } = next
    if ("steps" in next) {
      await asked(partition, queues, by, nameOf(by), next.steps)
    } else if (next.alone === "end") {
      await ended(partition, queues, by, sessions, nameOf)
    } else {
      for (const queue of queues) await queue.ring()
    }
    for (const queue of queues) {
      await queue.take()
      await queue.check()
    }
  }
  for (const queue of queues) await queue.finish((key) => redis.hkeys(key))
}
