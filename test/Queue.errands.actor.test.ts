/** Errands and the subscribers of jobs: each end of a job is reported once, in the step that ends it. */
import { assert, layer } from "@effect/vitest"
import { Effect } from "effect"
import * as fc from "fast-check"
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
      // Delayed, expiring, of a group, with an id.
      more: fc.constantFrom("", "d3600000", "e1", "g3", "i3"),
      plain: fc.boolean()
    })
  },
  {
    weight: 8,
    arbitrary: fc.record({
      do: fc.constantFrom("finish" as const, "bury" as const, "cancel" as const, "retry" as const),
      pick: fc.nat(50)
    })
  },
  {
    weight: 1,
    arbitrary: fc.record({ do: fc.constantFrom("drain" as const, "obliterate" as const), pick: fc.nat(50) })
  }
)

/** What a process asks with one call; or what happens between calls. */
const call = fc.oneof(
  { weight: 12, arbitrary: fc.array(step, { minLength: 1, maxLength: 8 }) },
  { weight: 1, arbitrary: fc.constantFrom("crash" as const, "deliver" as const, "short" as const) }
)

type Call = (typeof call) extends fc.Arbitrary<infer A> ? A : never
type Step = (typeof step) extends fc.Arbitrary<infer A> ? A : never

const ended = { finish: ["success", 1], bury: ["failed", "no"], cancel: ["cancelled"] } as const

const name = "e0 \"\n"

layer(TestServer.layer, live)("errands", (it) => {
  it.effect("say once what has become of each job, in the step that ends it", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      yield* Effect.promise(() =>
        fc.assert(
          fc.asyncProperty(fc.array(call, { minLength: 5, maxLength: 20 }), fc.boolean(), async (calls, early) => {
            const namespace = freshNamespace()
            const queue = actor(redis, namespace, "queue:q")
            await run(queue, calls, early)
            for (const key of [queue.key, `{${namespace}:00}:errands:${name}`]) await redis.del(...keysOf(key))
          }),
          { numRuns: runs(60), endOnFailure: false }
        )
      )
    }))

  it.effect("are sent at the end of a call too, when their own queue was finished before", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      yield* Effect.promise(async () => {
        const queue = actor(redis, freshNamespace(), "queue:q")
        const errands = queue.key.replace("queue:q", "errands:e")
        await queue.open("s")
        await queue.send("s", "queue.work", ["d", 5], undefined, "", [errands])
        await queue.send("s", "queue.work", ["w", 1])
        await queue.send("s", "queue.pause", ["1"])
        const [, stamp] = await queue.send("s", "queue.offer", ["01 e123", "1e1ry6 ", "node", 1])
        // It expires after a millisecond.
        for (let now = 0; now <= stamp + 1;) {
          const [seconds, micros] = await redis.time()
          now = Number(seconds) * 1000 + Math.floor(Number(micros) / 1000)
        }
        // Two requests in one call: the second queue hands out when the first one was finished, and its job expires.
        await queue.send("s", "queue.credit", ["d", 1, "", "queue.pause", ""], undefined, "", [errands, queue.key])
        const heard = await queue.mail("s")
        assert.deepStrictEqual(
          heard.map((event) => [event[1], event[2], event[5].map((job: Array<unknown>) => job[2])]),
          [
            ["d", "deliver", [["ended", "123", `n${stamp}-1`, ["expired"]]]]
          ]
        )
      })
    }))
})

const run = async (queue: ReturnType<typeof actor>, calls: ReadonlyArray<Call>, early: boolean) => {
  const errands = queue.key.replace("queue:q", `errands:${name}`)
  const references = new Map<string, string>()
  const expected = new Map<string, unknown>()
  let [number, generation, group] = [0, 0, 0]
  const worker = () => `w${generation}`
  const join = (length: number) =>
    queue.send("p", "queue.join", ["p", "1", 0, 0, 0, 60_000, 1000, 0, 1, length, 2, 1, 0, 0, 1, 0, ""])
  const work = async () => {
    await queue.open(worker())
    await queue.send(worker(), "queue.work", ["w", 3])
  }
  await queue.open("p")
  await join(0)
  await work()
  await queue.open("d")
  if (early) await queue.send("d", "queue.work", ["d", 2], undefined, "", [errands])

  const delivered = async (id: string) =>
    (await queue.mail(id)).flatMap(([tag, , what, , , jobs]) => tag === "changed" && what === "deliver" ? jobs : [])
  const told = new Map<string, unknown>()
  const taken = new Set<string>()
  const deliver = async () => {
    for (let before = -1; before < taken.size;) {
      before = taken.size
      for (const [errand, , body] of await delivered("d")) {
        if (taken.has(errand)) continue
        taken.add(errand)
        const [tag, reference, job, outcome] = body
        assert.strictEqual(tag, "ended")
        assert.isFalse(told.has(reference), `${reference} was told twice`)
        assert.strictEqual(references.get(job), reference)
        told.set(reference, outcome)
        await queue.send("d", "queue.done", ["d", `n ${errand.slice(1)} `, 1], undefined, "", [errands])
      }
    }
  }
  const inHand = async () => {
    const known = (await queue.send(worker(), "queue.work", ["w", 0]))[3] as ReadonlyArray<ReadonlyArray<any>>
    return known.map(([job]) => String(job))
  }
  const end = (job: string, outcome: unknown) => {
    const reference = references.get(job)
    // It may have ended in front of that, as it was removed.
    if (reference !== undefined && !expected.has(reference)) expected.set(reference, outcome)
  }
  const alive = async () => {
    const found = await Promise.all(
      [...references.keys()].map(async (job) => (await queue.look("queue.status", [job]))[0] === "status" ? [job] : [])
    )
    return found.flat()
  }
  const offer = async (one: Extract<Step, { do: "offer" }>) => {
    const own = number++
    const text = `${name.length} ${name}r${own}`
    const body = String(own)
    // Ids and groups have three bytes.
    const extra = /^[ig]/.test(one.more) ? `x${String(group++ % 10).padStart(2, "0")}` : ""
    const shape = one.plain ? "" : `${one.level}${one.more}ry${text.length}`
    const values = one.plain ? body : body + extra + text
    const args = [values, `${body.length}${shape} `, "node", number]
    const [, stamp, first, known] = await queue.send(worker(), "queue.offer", args)
    if (one.plain || known.length > 0) return
    const letters = one.more.startsWith("d") ? "UHNL" : one.more.startsWith("g") ? "VIOM" : "uhnl"
    references.set(`${letters["uhnl".indexOf(one.level)]}${stamp}-${first}`, `r${own}`)
  }
  /** A step of a call, when these jobs are in hand, or not done. A worker says once what has become of a job. */
  const returned = new Set<string>()
  const once = async (
    one: Step,
    busy: ReadonlyArray<string>,
    held: Array<string>,
    open: ReadonlyArray<string>
  ): Promise<unknown> => {
    if (one.do === "offer") return offer(one)
    if (one.do === "drain") return queue.send(worker(), "queue.drain", [1, ""])
    if (one.do === "obliterate") {
      await queue.send(worker(), "queue.obliterate", [""])
      // What was returned may have expired.
      for (const job of busy) if (!returned.has(job)) end(job, ended.cancel)
      return
    }
    if (one.do === "cancel") {
      const job = open[one.pick % Math.max(1, open.length)]
      if (job === undefined) return
      const [tag] = await queue.send(worker(), "queue.cancel", [job, 0])
      if (tag === "cancelled") end(job, ended.cancel)
      return
    }
    const [job] = held.splice(one.pick % Math.max(1, held.length), 1)
    if (job === undefined) return
    if (one.do === "retry") {
      returned.add(job)
      return queue.send(worker(), "queue.retry", ["w", job, one.pick % 2, 1, 1])
    }
    const outcome = references.has(job) ? JSON.stringify(ended[one.do]) : ""
    if (one.do === "bury") await queue.send(worker(), "queue.bury", ["w", job, "failed", "no", outcome, 1])
    else await queue.send(worker(), "queue.finish", ["w", job, "", "", outcome, 0, 1])
    end(job, ended[one.do])
  }
  for (const next of calls) {
    if (next === "crash") {
      const jobs = await inHand()
      await queue.end(worker())
      await queue.reap(worker())
      for (const job of jobs) end(job, ["crashed"])
      generation++
      await work()
    } else if (next === "deliver") {
      if (early) await deliver()
    } else if (next === "short") {
      await join(2)
      await join(0)
    } else {
      const [busy, open] = [await inHand(), await alive()]
      const held = [...busy]
      returned.clear()
      await queue.together(worker(), next.map((one) => () => once(one, busy, held, open)))
    }
  }
  // The actor also tells the ends of the other jobs, and of jobs that it removes by itself.
  if (!early) await queue.send("d", "queue.work", ["d", 2], undefined, "", [errands])
  await deliver()
  const left = new Set(await alive())
  for (const [job, reference] of references) {
    assert.strictEqual(told.has(reference), !left.has(job), `${job} (${reference})`)
    const outcome = expected.get(reference)
    if (outcome !== undefined) assert.deepStrictEqual(told.get(reference), outcome)
    else if (told.has(reference)) {
      assert.include(["cancelled", "expired", "dropped"], (told.get(reference) as [string])[0])
    }
  }
  assert.strictEqual((await queue.look("queue.state", [], errands))[3], 0, "errands in work")
}
