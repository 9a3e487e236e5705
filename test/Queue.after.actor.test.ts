/** Jobs that run after others, driven directly with random graphs and random ends, beside a model. */
import { assert, layer } from "@effect/vitest"
import { Effect } from "effect"
import * as fc from "fast-check"
import { actor, client, keysOf } from "./support/actor.ts"
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
      do: fc.constantFrom("done" as const, "done" as const, "bury" as const, "cancel" as const, "retry" as const),
      pick: fc.nat(50)
    })
  },
  { weight: 1, arbitrary: fc.record({ do: fc.constantFrom("drain" as const, "drainAll" as const, "crash" as const) }) }
)

type Step = (typeof step) extends fc.Arbitrary<infer A> ? A : never

interface Job {
  readonly id: string
  readonly kept: boolean
  readonly policy: string
  open: number
  readonly after: Array<Job>
  state: "blocked" | "live" | "success" | "failed" | "skipped" | "cancelled" | "crashed"
}

layer(TestServer.layer, live)("jobs that run after others", (it) => {
  it.effect("begin when all of these have ended, or fail, or are skipped", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      yield* Effect.promise(() =>
        fc.assert(
          fc.asyncProperty(fc.array(step, { minLength: 5, maxLength: 60 }), async (steps) => {
            const queue = actor(redis, freshNamespace(), "queue:q")
            await run(queue, steps, () => redis.hkeys(queue.key))
            await redis.del(...keysOf(queue.key))
          }),
          { numRuns: 200, endOnFailure: false }
        )
      )
    }))

  it.effect("hear of the end of a job a part at a time when they are many", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      yield* Effect.promise(async () => {
        const queue = actor(redis, freshNamespace(), "queue:q")
        await queue.open("s")
        await queue.send("s", "queue.join", ["p", "1", 0, 0, 0, 60_000, 10_000, 0, 3, 0, 0, 1, 0, 0, 1, 0])
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
})

const run = async (
  queue: ReturnType<typeof actor>,
  steps: ReadonlyArray<Step>,
  fields: () => Promise<ReadonlyArray<string>>
) => {
  const jobs = new Map<string, Job>()
  let [number, generation] = [0, 0]
  const worker = () => `w${generation}`
  await queue.open("p")
  await queue.send("p", "queue.join", ["p", "1", 0, 0, 0, 60_000, 1000, 0, 1, 0, 0, 100, 0, 0, 1, 0])
  const work = async () => {
    await queue.open(worker())
    await queue.send(worker(), "queue.work", ["w", 3])
  }
  await work()

  const end = (job: Job, state: Exclude<Job["state"], "blocked" | "live">, drained = false): void => {
    job.state = state
    for (const next of job.after) {
      if (next.state !== "blocked") continue
      if (drained) end(next, "cancelled", true)
      else if (state !== "success" && next.policy !== "c") end(next, next.policy === "s" ? "skipped" : "failed")
      else if (--next.open === 0) next.state = "live"
    }
  }
  const inHand = async () => {
    const known = (await queue.send(worker(), "queue.work", ["w", 0]))[3] as ReadonlyArray<ReadonlyArray<any>>
    return known.map(([id]) => {
      const job = jobs.get(String(id))!
      assert.strictEqual(job.state, "live", `${id} was handed out`)
      return job
    })
  }
  const alive = () => [...jobs.values()].filter(({ state }) => state === "live" || state === "blocked")

  for (const one of steps) {
    switch (one.do) {
      case "offer":
      case "after": {
        const all = [...jobs.values()]
        const before = one.do === "offer" || all.length === 0 ? [] : one.before.map((at) => all[at % all.length]!)
        const policy = one.do === "offer" ? "" : one.policy
        const named = before.length === 0 ? "" : policy + before.map(({ id }) => `${id.length} ${id}`).join("")
        const shape = one.level + (one.kept ? "r" : "") + (named === "" ? "" : `p${named.length}`) +
          (one.group ? "g1" : "")
        const [, stamp, first, known] = await queue.send("p", "queue.offer", [
          `1${named}${one.group ? "x" : ""}`,
          `1${shape} `,
          "node",
          ++number
        ])
        const unknown = before.findIndex(({ kept, state }) => state !== "live" && state !== "blocked" && !kept)
        if (unknown >= 0) {
          assert.deepStrictEqual(known, [[0, 3, unknown]])
          break
        }
        assert.deepStrictEqual(known, [])
        const letters = one.group ? "VIOM" : before.length > 0 ? "UHNL" : "uhnl"
        const id = `${letters["uhnl".indexOf(one.level)]}${stamp}-${first}`
        const open = before.filter(({ state }) => state === "live" || state === "blocked")
        const job: Job = {
          id,
          kept: one.kept,
          policy,
          open: open.length,
          after: [],
          state: open.length === 0 ? "live" : "blocked"
        }
        jobs.set(id, job)
        const failed = before.some(({ state }) => state !== "live" && state !== "blocked" && state !== "success")
        if (failed && policy !== "c") end(job, policy === "s" ? "skipped" : "failed")
        else for (const one of open) one.after.push(job)
        break
      }
      case "done":
      case "bury":
      case "cancel":
      case "retry": {
        const found = one.do === "cancel" ? alive() : await inHand()
        const job = found[one.pick % Math.max(1, found.length)]
        if (job === undefined) break
        const { id, kept } = job
        if (one.do === "retry") {
          await queue.send(worker(), "queue.retry", ["w", id, 0, 1, 1])
          break
        }
        const outcome = kept ? one.do === "done" ? `["success",1]` : `["failed","no"]` : ""
        if (one.do === "cancel") await queue.send("p", "queue.cancel", [id, 0])
        else if (one.do === "bury") await queue.send(worker(), "queue.bury", ["w", id, "failed", "no", outcome, 1])
        else if (kept) await queue.send(worker(), "queue.finish", ["w", id, "", "", outcome, 0, 1])
        else await queue.send(worker(), "queue.done", ["w", `${id[0]} ${id.slice(1)} `, 1])
        end(job, one.do === "done" ? "success" : one.do === "cancel" ? "cancelled" : "failed")
        break
      }
      case "drain":
      case "drainAll": {
        const held = new Set((await inHand()).map(({ id }) => id))
        const all = one.do === "drainAll"
        const removed = alive().filter(({ id, state }) => !held.has(id) && (all || state === "live"))
        const [, count] = await queue.send("p", "queue.drain", [all ? "1" : "", ""])
        assert.strictEqual(count, removed.length)
        for (const job of removed) if (job.state === "live" || job.state === "blocked") end(job, "cancelled", all)
        break
      }
      case "crash": {
        const lost = await inHand()
        await queue.end(worker())
        await queue.reap(worker())
        for (const job of lost) end(job, "crashed")
        generation++
        await work()
      }
    }
    await inHand()
    for (const { id, kept, state } of jobs.values()) {
      const [tag, found] = await queue.look("queue.status", [id])
      if (state === "blocked") assert.strictEqual(found, "blocked", id)
      else if (state === "live") assert.include(["waiting", "active"], found, id)
      else {
        assert.strictEqual(tag, "missing", id)
        const outcome = await queue.send("p", "queue.watch", ["p", id])
        assert.strictEqual(outcome[0] === "outcome" ? outcome[2][0] : "missing", kept ? state : "missing", id)
      }
    }
    const blocked = [...jobs.values()].filter(({ state }) => state === "blocked").map(({ id }) => id)
    assert.strictEqual((await queue.look("queue.state", []))[12], blocked.length)
    const [, , listed] = await queue.look("queue.jobs", ["blocked", "", 100])
    assert.deepStrictEqual(listed.map((job: Array<Array<unknown>>) => job[2]![0]).toSorted(), blocked.toSorted())
    // Nothing else is kept than what blocked jobs and the jobs before them need.
    const needed = new Set(blocked.map((id) => `c${id}`))
    for (const job of alive()) if (job.after.length > 0) needed.add(`d${job.id}`)
    const found = (await fields()).filter((field) => /^[cd]\w|^E/.test(field))
    assert.deepStrictEqual(found.toSorted(), [...needed].toSorted())
  }
  for (let more = true; more;) more = (await queue.send("p", "queue.obliterate", [""]))[2]
  const left = (await fields()).filter((field) => /^[cde]\w|^E/.test(field))
  assert.deepStrictEqual(left, [])
}
