/** Groups of jobs in the queue actor, driven directly with random requests, beside a model: which job of a group begins, and when. */
import { assert, layer } from "@effect/vitest"
import { Effect } from "effect"
import * as fc from "fast-check"
import { actor, client } from "./support/actor.ts"
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
  | { readonly do: "join" | "leave" | "end" | "repeat"; readonly worker: number }
  | { readonly do: "settle"; readonly how: typeof verdicts[number]; readonly pick: number }
  | { readonly do: "cancel" | "promote" | "reschedule"; readonly pick: number }
  | { readonly do: "hold" | "free" | "purge"; readonly group: number }
  | { readonly do: "ring" | "pause" | "resume" | "replay" | "purgeAll" }

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
    arbitrary: fc.record({
      do: fc.constantFrom("join" as const, "join" as const, "leave" as const, "end" as const, "repeat" as const),
      worker: fc.integer({ min: 0, max: 1 })
    })
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
        "ring" as const,
        "ring" as const,
        "ring" as const,
        "pause" as const,
        "resume" as const,
        "resume" as const,
        "replay" as const,
        "purgeAll" as const
      )
    })
  }
)

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
  for (const limit of [1, 2]) {
    it.effect(`begins jobs of each group in order, ${limit} at a time, and groups in turn`, () =>
      Effect.gen(function*() {
        const redis = yield* client(yield* TestServer)
        yield* Effect.promise(() =>
          fc.assert(
            fc.asyncProperty(fc.array(step, { minLength: 5, maxLength: 60 }), (steps) =>
              run(actor(redis, freshNamespace(), "queue:q"), (key) => redis.hkeys(key), steps, limit)),
            { numRuns: 200, endOnFailure: false }
          )
        )
      }))
  }
})

const run = async (
  queue: ReturnType<typeof actor>,
  fieldsOf: (key: string) => Promise<ReadonlyArray<string>>,
  steps: ReadonlyArray<Step>,
  limit: number
) => {
  const jobs = new Map<string, Job>()
  const sessions = [0, 0]
  const joined = [false, false]
  const read = new Map<string, number>()
  const held = names.map(() => false)
  // Of each group, counted in jobs that began: since when it can begin a job, of which level, and when it last began a job.
  const ready = names.map(() => ({ since: Number.POSITIVE_INFINITY, level: -1 }))
  const before = names.map(() => -1)
  let [number, values, paused, begins] = [0, 0, false, 0]
  const nameOf = (worker: number) => `s${worker}x${sessions[worker]}`
  await queue.open("producer")
  await queue.send("producer", "queue.join", ["p", "1", 0, 0, 0, 60_000, 1000, 0, mostCrashes, 0, 0, limit, 0, 0, 1, 0])
  for (const worker of [0, 1]) await queue.open(nameOf(worker))

  const all = () => [...jobs.values()]
  // Cancelled jobs are active until their handlers have ended.
  const inState = (state: Job["state"]) =>
    all().filter((job) => (job.state === "cancelled" ? "active" : job.state) === state)
  const inGroup = (at: number, state: Job["state"]) => inState(state).filter(({ group }) => group === at)
  const active = (worker?: number) => inState("active").filter((job) => worker === undefined || job.worker === worker)

  /** The job that a group begins next, if it can. */
  const headOf = (at: number): Job | undefined => {
    if (held[at]) return undefined
    const kept = inGroup(at, "delayed").filter(({ begun }) => begun).length
    if (inGroup(at, "active").length + (limit === 1 ? kept : 0) >= limit) return undefined
    const rank = ({ begun, level }: Job) => limit === 1 && begun ? 0 : 2 * level + (begun ? 1 : 2)
    return inGroup(at, "waiting").toSorted((x, y) => rank(x) - rank(y) || x.number - y.number)[0]
  }
  const observe = () => {
    for (let at = 0; at < none; at++) {
      const level = headOf(at)?.level ?? -1
      if (level !== ready[at]!.level) ready[at] = { since: begins, level }
    }
  }
  const begin = (
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
      assert.strictEqual(headOf(at)?.id, id, "another job of the group is in front")
      // Another group of the same level that could have begun one all the time has had its turn.
      for (let other = 0; other < none; other++) {
        if (other === at || ready[other]!.level !== job!.level || ready[at]!.level !== job!.level) continue
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
      const events = await queue.mail(name)
      for (const event of events.slice(read.get(name) ?? 0)) {
        if (event[2] !== "deliver") continue
        for (const [at, raw] of event[5].entries()) begun.push([event[4] + at, worker, raw])
      }
      read.set(name, events.length)
    }
    for (const [, worker, [id, count, value, ...more]] of begun.toSorted(([x], [y]) => x - y)) {
      begin(worker, [id, count, value], more)
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
  const settle = async (pick: number, how: typeof verdicts[number]) => {
    const job = active()[pick % Math.max(1, active().length)]
    if (job === undefined) return
    const { attempts } = job
    const isCancelled = job.state === "cancelled"
    const name = nameOf(job.worker)
    await tell(job, name, how)
    // Whatever its worker says, it was cancelled.
    if (isCancelled) Object.assign(job, { attempts, state: "gone" })
  }
  const tell = async (job: Job, name: string, how: typeof verdicts[number]) => {
    const { id } = job
    switch (how) {
      case "done":
        job.state = "gone"
        await queue.send(name, "queue.done", ["w", `${id[0]} ${id.slice(1)}`, 1])
        return
      case "finish":
        job.state = "gone"
        await queue.send(name, "queue.finish", ["w", id, job.former ?? "", "", "", 0, 1])
        return
      case "bury":
        bury(job)
        await queue.send(name, "queue.bury", ["w", id, "failed", "no", "", 1])
        return
      default: {
        const later = how === "later" || how === "snooze"
        job.state = later ? "delayed" : "waiting"
        if (how === "snooze" || how === "give") job.attempts--
        await queue.send(name, "queue.retry", [
          "w",
          id,
          later ? 1 : 0,
          how === "later" || how === "retry" ? "1" : "",
          1
        ])
      }
    }
  }
  const join = async (worker: number) => {
    const [, , , open, cancelled] = await queue.send(nameOf(worker), "queue.work", ["w", credit])
    const own = (state: Job["state"]) => active(worker).filter((job) => job.state === state).map(({ id }) => id)
    assert.sameMembers((open as Array<[string]>).map(([id]) => id), own("active"))
    assert.sameMembers(cancelled, own("cancelled"))
    joined[worker] = true
  }
  const offer = async ({ count, group, later, level }: Extract<Step, { do: "offer" }>) => {
    const name = names[group]!
    const bodies = Array.from({ length: count }, () => String(++values))
    const more = `${letters.plain[level]}${later ? "d1" : ""}${group === none ? "" : `g${name.length}`}`
    const [, stamp, first] = await queue.send("producer", "queue.offer", [
      bodies.map((body) => body + name).join(""),
      bodies.map((body) => `${body.length}${more}`).join(" "),
      "node",
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
  const purge = async (at?: number) => {
    const gone = all().filter(({ group, state }) =>
      (state === "waiting" || state === "delayed") && (at === undefined || at === group)
    )
    const answer = at === undefined
      ? await queue.send("producer", "queue.drain", ["1", ""])
      : await queue.send("producer", "queue.purgeGroup", [names[at]!])
    assert.deepStrictEqual(answer.slice(1, 3), [gone.length, false])
    for (const job of gone) job.state = "gone"
  }
  const replay = async () => {
    const [, found] = await queue.look("queue.letters", ["", 100])
    assert.sameMembers(
      (found as Array<[string, string]>).map(([, job]) => job),
      all().filter(({ state }) => state === "dead").map(({ id }) => id)
    )
    for (const [letter, former, , , , , , , name] of found as Array<Array<string>>) {
      const job = jobs.get(former!)!
      assert.strictEqual(name, names[job.group])
      const [, id] = await queue.send("producer", "queue.replay", [letter!])
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
      assert.deepStrictEqual(
        await queue.look("queue.group", [names[at]!]),
        isKept ? ["group", ...found] : ["missing"]
      )
      if (isKept) states.push([names[at]!, ...found] as [string, number, number, number, boolean])
    }
    const [, cursor, found] = await queue.look("queue.groups", ["0", 100])
    assert.strictEqual(cursor, "0")
    assert.sameDeepMembers(found, states)
    for (const { attempts, former, id, state } of all()) {
      const answer = await queue.look("queue.status", [former ?? id])
      const isOpen = !["cancelled", "gone", "dead"].includes(state)
      assert.deepStrictEqual(answer, isOpen ? ["status", state, attempts] : ["missing"])
    }
    // What can begin has begun, if a worker takes it.
    if (paused || ![0, 1].some((worker) => joined[worker] && active(worker).length < credit)) return
    assert.isEmpty(inGroup(none, "waiting"))
    for (let at = 0; at < none; at++) assert.isUndefined(headOf(at), `group ${at} can begin a job`)
  }

  const once = async (next: Step): Promise<void> => {
    switch (next.do) {
      case "offer":
        return offer(next)
      case "join":
      case "repeat":
        if (next.do === "join" || joined[next.worker]) await join(next.worker)
        return
      case "leave":
        if (!joined[next.worker]) return
        await queue.send(nameOf(next.worker), "session.leave", ["w"])
        return drop(next.worker, false)
      case "end":
        await queue.end(nameOf(next.worker))
        await queue.reap(nameOf(next.worker))
        drop(next.worker, true)
        sessions[next.worker]!++
        await queue.open(nameOf(next.worker))
        return
      case "settle":
        return settle(next.pick, next.how)
      case "cancel": {
        const open = all().filter(({ state }) => !["cancelled", "gone", "dead"].includes(state))
        const job = open[next.pick % Math.max(1, open.length)]
        if (job === undefined) return
        const isActive = job.state === "active"
        job.state = isActive ? "cancelled" : "gone"
        assert.deepStrictEqual(await queue.send("producer", "queue.cancel", [job.id, 0]), ["cancelled", isActive])
        return
      }
      case "promote": {
        const open = all().filter(({ state }) => state === "delayed")
        const job = open[next.pick % Math.max(1, open.length)]
        if (job === undefined) return
        job.state = "waiting"
        assert.deepStrictEqual(await queue.send("producer", "queue.promote", [job.id]), ["promoted"])
        return
      }
      case "reschedule": {
        const open = all().filter(({ group, state }) => group !== none && (state === "waiting" || state === "delayed"))
        const job = open[next.pick % Math.max(1, open.length)]
        if (job === undefined) return
        job.state = "delayed"
        assert.deepStrictEqual(await queue.send("producer", "queue.reschedule", [job.id, "1", 1]), ["rescheduled"])
        return
      }
      case "hold":
      case "free":
        held[next.group] = next.do === "hold"
        await queue.send("producer", "queue.pauseGroup", [names[next.group]!, next.do === "hold" ? "1" : ""])
        return
      case "purge":
        return purge(next.group)
      case "purgeAll":
        return purge()
      case "ring":
        return ring()
      case "pause":
      case "resume":
        paused = next.do === "pause"
        await queue.send("producer", "queue.pause", [paused ? "1" : ""])
        return
      case "replay":
        return replay()
    }
  }
  for (const next of steps) {
    await once(next)
    await take()
    await check()
  }
  // After all that, a worker that goes on gets the rest, and nothing is left of the groups.
  await once({ do: "resume" })
  await take()
  for (const at of [0, 1, 2]) {
    await once({ do: "free", group: at })
    await take()
  }
  await join(0)
  await take()
  for (let idle = 0; all().some(({ state }) => state !== "dead" && state !== "gone"); idle++) {
    assert.isBelow(idle, 1000, "some jobs were not handed out")
    if (active().length === 0) await ring()
    else await settle(0, "done")
    await take()
  }
  await check()
  assert.isEmpty((await fieldsOf(queue.key)).filter((field) => /^[gGj]/.test(field)))
}
