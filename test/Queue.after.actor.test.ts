/** Jobs that run after others, driven directly with random graphs and random ends, beside a model. */
import { assert, layer } from "@effect/vitest"
import { Effect } from "effect"
import * as fc from "fast-check"
import type { Redis } from "ioredis"
import { actor, client, keysOf } from "./support/actor.ts"
import { runs } from "./support/effort.ts"
import { freshNamespace, TestServer } from "./support/live.ts"

const live = { excludeTestServices: true, timeout: "120 seconds" } as const

const step = fc.oneof(
  {
    weight: 5,
    arbitrary: fc.record({
      do: fc.constant("offer" as const),
      level: fc.constantFrom("u", "h", "n", "l"),
      kept: fc.boolean(),
      group: fc.boolean()
    })
  },
  {
    weight: 8,
    arbitrary: fc.record({
      do: fc.constant("after" as const),
      level: fc.constantFrom("h", "n"),
      kept: fc.boolean(),
      group: fc.boolean(),
      policy: fc.constantFrom("f", "s", "c"),
      before: fc.array(fc.nat(100), { minLength: 1, maxLength: 4 })
    })
  },
  {
    weight: 10,
    arbitrary: fc.record({
      do: fc.constantFrom(
        "done" as const,
        "done" as const,
        "bury" as const,
        "cancel" as const,
        "retry" as const,
        "replay" as const
      ),
      pick: fc.nat(50)
    })
  },
  { weight: 3, arbitrary: fc.record({ do: fc.constantFrom("drain" as const, "drainAll" as const) }) }
)

type Step = (typeof step) extends fc.Arbitrary<infer A> ? A : never

/** What a process asks with one call, about two queues. */
const call = fc.oneof(
  { weight: 20, arbitrary: fc.array(fc.record({ queue: fc.nat(1), step }), { minLength: 1, maxLength: 8 }) },
  { weight: 1, arbitrary: fc.constant("crash" as const) }
)

type Call = (typeof call) extends fc.Arbitrary<infer A> ? A : never

interface Job {
  /** A replay gives it another one. */
  id: string
  readonly kept: boolean
  readonly policy: string
  readonly before: ReadonlyArray<Job>
  open: number
  /** Jobs after it, with the ids that they had. */
  after: Array<readonly [job: Job, id: string]>
  /** Its dead letter, and that of the job before it that has made it one. */
  letter: Letter | undefined
  cause: Letter | undefined
  state: "blocked" | "live" | "success" | "failed" | "skipped" | "cancelled" | "crashed"
}

interface Letter {
  /** Known behind the call that has written it. */
  id: string | undefined
}

/** A queue that one session has joined. */
const opened = async (redis: Redis) => {
  const queue = actor(redis, freshNamespace(), "queue:q")
  await queue.open("s")
  await queue.send("s", "queue.join", ["p", "1", 0, 0, 0, 60_000, 10_000, 0, 3, 0, 0, 1, 0, 0, 1, 0, ""])
  return queue
}

layer(TestServer.layer, live)("jobs that run after others", (it) => {
  it.effect("begin when all of these have ended, or fail, or are skipped", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      yield* Effect.promise(() =>
        fc.assert(
          fc.asyncProperty(fc.array(call, { minLength: 5, maxLength: 30 }), (calls) => run(redis, calls)),
          { numRuns: runs(50), endOnFailure: false }
        )
      )
    }))

  it.effect("are notified of the end of a job a part at a time when they are many", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      yield* Effect.promise(async () => {
        const queue = await opened(redis)
        const [, stamp] = await queue.send("s", "queue.offer", ["1", "1 ", "node", 1])
        const before = `n${stamp}-1`
        const text = `f${before.length} ${before}`
        for (let part = 0; part < 4; part++) {
          await queue.send("s", "queue.offer", [
            `1${text}`.repeat(500),
            `1p${text.length} `.repeat(500),
            "node",
            part + 2
          ])
        }
        const state = async () => {
          const reply = await queue.look("queue.state", [])
          return { waiting: reply[1][2], dead: reply[4], blocked: reply[12] }
        }
        assert.deepStrictEqual(await state(), { waiting: 1, dead: 0, blocked: 2000 })
        await queue.send("s", "queue.work", ["w", 1])
        // The work of a call is bounded, and the alarm goes on at once.
        await queue.send("s", "queue.done", ["w", `n ${before.slice(1)} `, 0])
        let { blocked } = await state()
        let calls = 1
        for (; blocked > 0; calls++) {
          assert.strictEqual(queue.answers.get("s")![3], 0, "there is something to do at once")
          await queue.ring()
          const next = (await state()).blocked
          assert.isAtLeast(blocked - next, 1)
          assert.isAtMost(blocked - next, 256)
          blocked = next
        }
        assert.strictEqual(calls, 8)
        assert.deepStrictEqual(await state(), { waiting: 2000, dead: 0, blocked: 0 })
        const left = (await redis.hkeys(queue.key)).filter((field) => /^[cde]\w|^E/.test(field))
        assert.deepStrictEqual(left, [])
      })
    }))

  it.effect("are not notified while a drain goes on, or not for long if its process dies", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      yield* Effect.promise(async () => {
        const queue = await opened(redis)
        let number = 0
        const offer = (values: string, shapes: string) =>
          queue.send("s", "queue.offer", [values, shapes, "node", ++number])
        const fill = async () => {
          const [, stamp, first] = await offer("1", "1 ")
          const before = `n${stamp}-${first}`
          await offer(`1c${before.length} ${before}`, `1p${before.length + 4} `)
          await offer("1".repeat(400), "1 ".repeat(400))
        }
        const drain = async (all = "") => (await queue.send("s", "queue.drain", [all, ""])).slice(1, 3)
        const state = async () => {
          const reply = await queue.look("queue.state", [])
          return { waiting: reply[1][1] + reply[1][2], blocked: reply[12] }
        }
        const left = async () => (await redis.hkeys(queue.key)).filter((field) => /^[cdeC]\w|^[CE]/.test(field))
        await fill()
        assert.deepStrictEqual(await drain(), [256, true])
        assert.deepStrictEqual(await state(), { waiting: 145, blocked: 1 })
        // No alarm goes on with it, nor a member that joins.
        assert.isAtLeast(queue.answers.get("s")![3] as number, 1000)
        await queue.ring()
        await queue.send("s", "queue.join", ["p", 0, 0, 0, 0, 60_000, 10_000, 0, 3, 0, 0, 1, 0, 0, 1, 0, ""])
        assert.deepStrictEqual(await state(), { waiting: 145, blocked: 1 })
        assert.deepStrictEqual(await drain(), [145, false])
        assert.deepStrictEqual(await state(), { waiting: 1, blocked: 0 })
        assert.deepStrictEqual(await left(), [])
        // What ends all the same does not wait for that.
        await fill()
        assert.deepStrictEqual(await drain(), [256, true])
        assert.deepStrictEqual(await drain("1"), [147, false])
        assert.deepStrictEqual(await state(), { waiting: 0, blocked: 0 })
        assert.deepStrictEqual(await left(), [])
        for (const past of [-1, 3_600_000]) {
          await fill()
          assert.deepStrictEqual(await drain(), [256, true])
          assert.deepStrictEqual(await state(), { waiting: 145, blocked: 1 })
          await redis.hincrby(queue.key, "C", past < 0 ? -10_000 : past)
          await queue.ring()
          assert.deepStrictEqual(await state(), { waiting: 146, blocked: 0 })
          assert.deepStrictEqual(await left(), [])
          assert.deepStrictEqual(await drain(), [146, false])
        }
      })
    }))
})

interface World {
  readonly partition: ReturnType<typeof actor>
  /** The session of the worker, which asks for everything. */
  readonly session: () => string
  readonly fieldsOf: (hash: string) => Promise<ReadonlyArray<string>>
}

/** One of the queues. Jobs are notified of the ends of others when the call ends. */
const model = (at: number, { fieldsOf, partition, session }: World) => {
  const queue = partition.beside(`queue:q${at}`)
  const [member, worker] = [`p${at}`, `w${at}`]
  const jobs = new Map<string, Job>()
  const every = () => [...new Set(jobs.values())]
  // Jobs in hand, as far as they were not returned, and jobs whose ends others were not notified of.
  let held = new Set<Job>()
  let ended: Array<Pick<Job, "state" | "after" | "letter">> = []
  let number = 0
  const fields = () => fieldsOf(queue.key)
  const join = () =>
    queue.send("p", "queue.join", [member, "1", 0, 0, 0, 60_000, 1000, 0, 1, 0, 0, 100, 0, 0, 1, 0, ""])
  const work = () => queue.send(session(), "queue.work", [worker, 3])

  const isOpen = ({ state }: Job): boolean => state === "live" || state === "blocked"
  const alive = () => every().filter(isOpen)
  const end = (job: Job, state: Exclude<Job["state"], "blocked" | "live">, cause?: Letter): void => {
    job.state = state
    job.cause = cause
    if (state === "failed" || state === "crashed") job.letter = { id: undefined }
    held.delete(job)
    ended.push({ ...job })
  }
  const isLetter = (letter: Letter | undefined) => letter !== undefined && every().some((job) => job.letter === letter)
  const tell = () => {
    for (let job = ended.shift(); job !== undefined; job = ended.shift()) {
      for (const [next, id] of job.after) {
        if (next.state !== "blocked" || next.id !== id) continue
        if (job.state !== "success" && next.policy !== "c") {
          end(next, next.policy === "s" ? "skipped" : "failed", job.letter)
        } else if (--next.open === 0) next.state = "live"
      }
    }
  }
  const inHand = async () => {
    const known = (await queue.send(session(), "queue.work", [worker, 0]))[3] as ReadonlyArray<ReadonlyArray<any>>
    held = new Set(known.map(([id]) => {
      const job = jobs.get(String(id))!
      assert.strictEqual(job.state, "live", `${id} was handed out`)
      return job
    }))
  }

  const offer = async (one: Extract<Step, { do: "offer" | "after" }>) => {
    const all = every()
    const before = one.do === "offer" || all.length === 0 ? [] : one.before.map((at) => all[at % all.length]!)
    const policy = one.do === "offer" ? "" : one.policy
    const named = before.length === 0 ? "" : policy + before.map(({ id }) => `${id.length} ${id}`).join("")
    const shape = one.level + (one.kept ? "r" : "") + (named === "" ? "" : `p${named.length}`) + (one.group ? "g1" : "")
    const [, stamp, first, known] = await queue.send(session(), "queue.offer", [
      `1${named}${one.group ? "x" : ""}`,
      `1${shape} `,
      `node${at}`,
      ++number
    ])
    const unknown = before.findIndex((job) => !isOpen(job) && !job.kept)
    if (unknown >= 0) return assert.deepStrictEqual(known, [[0, 3, unknown]])
    assert.deepStrictEqual(known, [])
    const letters = one.group ? "VIOM" : before.length > 0 ? "UHNL" : "uhnl"
    const id = `${letters["uhnl".indexOf(one.level)]}${stamp}-${first}`
    const open = before.filter(isOpen)
    const state = open.length === 0 ? "live" : "blocked"
    const { kept } = one
    const none = { letter: undefined, cause: undefined }
    const job: Job = { id, kept, policy, before, open: open.length, after: [], state, ...none }
    jobs.set(id, job)
    const failed = before.some((job) => !isOpen(job) && job.state !== "success")
    if (failed && policy !== "c") end(job, policy === "s" ? "skipped" : "failed")
    else for (const one of open) one.after.push([job, id])
  }
  const replay = async (pick: number) => {
    const found = every().filter((job) => job.letter?.id !== undefined && !settling.has(job))
    const job = found[pick % Math.max(1, found.length)]
    if (job === undefined) return
    settling.add(job)
    const [tag, id] = await queue.send(session(), "queue.replay", [job.letter!.id!, "1"])
    assert.strictEqual(tag, isLetter(job.cause) ? "taken" : "replayed")
    if (tag === "taken") return
    const open = job.before.filter(isOpen)
    job.id = id
    jobs.set(id, job)
    job.open = open.length
    job.after = []
    job.letter = job.cause = undefined
    job.state = open.length === 0 ? "live" : "blocked"
    for (const one of open) one.after.push([job, id])
  }

  // A worker says once what has become of a job.
  let settling = new Set<Job>()
  const settle = async (what: "done" | "bury" | "cancel" | "retry", pick: number) => {
    const found = what === "cancel" ? alive() : [...held].filter((job) => !settling.has(job))
    const job = found[pick % Math.max(1, found.length)]
    if (job === undefined) return
    if (what !== "cancel") settling.add(job)
    const { id, kept } = job
    const outcome = kept ? what === "done" ? `["success",1]` : `["failed","no"]` : ""
    if (what === "cancel") await queue.send(session(), "queue.cancel", [id, 0])
    else if (what === "retry") await queue.send(session(), "queue.retry", [worker, id, 0, 1, 1])
    else if (what === "bury") await queue.send(session(), "queue.bury", [worker, id, "failed", "no", outcome, 1])
    else if (kept) await queue.send(session(), "queue.finish", [worker, id, "", "", outcome, 0, 1])
    else await queue.send(session(), "queue.done", [worker, `${id[0]} ${id.slice(1)} `, 1])
    // It may have been cancelled in front of that.
    if (!isOpen(job)) return
    if (what === "retry") held.delete(job)
    else end(job, what === "done" ? "success" : what === "cancel" ? "cancelled" : "failed")
  }
  const drain = async (all: boolean) => {
    const [, count] = await queue.send(session(), "queue.drain", [all ? "1" : "", ""])
    const removed = alive().filter((job) => !held.has(job) && (all || job.state === "live"))
    assert.strictEqual(count, removed.length)
    for (const job of removed) end(job, "cancelled")
  }
  const once = async (one: Step): Promise<unknown> => {
    switch (one.do) {
      case "offer":
      case "after":
        return offer(one)
      case "drain":
      case "drainAll":
        return drain(one.do === "drainAll")
      case "replay":
        return replay(one.pick)
      default:
        return settle(one.do, one.pick)
    }
  }

  const check = async () => {
    for (const { id, kept, state } of every()) {
      const [tag, found] = await queue.look("queue.status", [id])
      if (state === "blocked") assert.strictEqual(found, "blocked", id)
      else if (state === "live") assert.include(["waiting", "active"], found, id)
      else {
        assert.strictEqual(tag, "missing", id)
        const outcome = await queue.send("p", "queue.watch", [member, id])
        assert.strictEqual(outcome[0] === "outcome" ? outcome[2][0] : "missing", kept ? state : "missing", id)
      }
    }
    const letters = new Map((await queue.look("queue.letters", ["", 1000]))[1].map(([letter, id]: any) => [id, letter]))
    for (const { id, letter } of every()) if (letter !== undefined) letter.id = letters.get(id) as string
    assert.strictEqual(letters.size, every().filter(({ letter }) => letter?.id !== undefined).length)
    const blocked = every().filter(({ state }) => state === "blocked").map(({ id }) => id)
    assert.strictEqual((await queue.look("queue.state", []))[12], blocked.length)
    const [, , listed] = await queue.look("queue.jobs", ["blocked", "", 100])
    assert.deepStrictEqual(listed.map((job: Array<Array<unknown>>) => job[2]![0]).toSorted(), blocked.toSorted())
    // Nothing else is kept than what blocked jobs and the jobs before them need.
    const needed = new Set(blocked.map((id) => `c${id}`))
    for (const job of alive()) if (job.after.length > 0) needed.add(`d${job.id}`)
    const found = (await fields()).filter((field) => /^[cd]\w|^E/.test(field))
    assert.deepStrictEqual(found.toSorted(), [...needed].toSorted())
  }
  return {
    join,
    work,
    once,
    ends: async () => {
      tell()
      settling = new Set()
      await inHand()
      await check()
    },
    crashed: () => {
      for (const job of held) end(job, "crashed")
    },
    finish: async () => {
      for (let more = true; more;) more = (await queue.send("p", "queue.obliterate", [""]))[2]
      assert.deepStrictEqual((await fields()).filter((field) => /^[cde]\w|^E/.test(field)), [])
    },
    key: queue.key
  }
}

const run = async (redis: Redis, calls: ReadonlyArray<Call>) => {
  const partition = actor(redis, freshNamespace(), "queue:q0")
  let generation = 0
  const session = () => `w${generation}`
  const queues = [0, 1].map((at) => model(at, { fieldsOf: (hash) => redis.hkeys(hash), partition, session }))
  await partition.open("p")
  await partition.open(session())
  for (const queue of queues) {
    await queue.join()
    await queue.work()
  }
  for (const next of calls) {
    if (next === "crash") {
      await partition.end(session())
      await partition.reap(session())
      generation++
      await partition.open(session())
      for (const queue of queues) {
        queue.crashed()
        await queue.work()
      }
    } else await partition.together(session(), next.map(({ queue, step }) => () => queues[queue]!.once(step)))
    for (const queue of queues) await queue.ends()
  }
  for (const queue of queues) {
    await queue.finish()
    await redis.del(...keysOf(queue.key))
  }
}
