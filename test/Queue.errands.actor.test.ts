/** Errands and the subscribers of jobs: each end of a job is told once, in the step that ends it. */
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
    weight: 2,
    arbitrary: fc.record({
      do: fc.constantFrom(
        "drain" as const,
        "obliterate" as const,
        "crash" as const,
        "deliver" as const,
        "short" as const
      )
    })
  }
)

type Step = (typeof step) extends fc.Arbitrary<infer A> ? A : never

const ended = { finish: ["success", 1], bury: ["failed", "no"], cancel: ["cancelled"] } as const

const name = "e0 \"\n"

layer(TestServer.layer, live)("errands", (it) => {
  it.effect("say once what has become of each job, in the step that ends it", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      yield* Effect.promise(() =>
        fc.assert(
          fc.asyncProperty(fc.array(step, { minLength: 5, maxLength: 50 }), fc.boolean(), async (steps, early) => {
            const namespace = freshNamespace()
            const queue = actor(redis, namespace, "queue:q")
            await run(queue, steps, early)
            for (const key of [queue.key, `{${namespace}:00}:errands:${name}`]) await redis.del(...keysOf(key))
          }),
          { numRuns: 150, endOnFailure: false }
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

const run = async (queue: ReturnType<typeof actor>, steps: ReadonlyArray<Step>, early: boolean) => {
  const errands = queue.key.replace("queue:q", `errands:${name}`)
  const references = new Map<string, string>()
  const expected = new Map<string, unknown>()
  let [number, generation, group] = [0, 0, 0]
  const worker = () => `w${generation}`
  const join = (length: number) =>
    queue.send("p", "queue.join", ["p", "1", 0, 0, 0, 60_000, 1000, 0, 1, length, 2, 1, 0, 0, 1, 0])
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
    if (reference !== undefined) expected.set(reference, outcome)
  }
  const alive = async () => {
    const found = await Promise.all(
      [...references.keys()].map(async (job) => (await queue.look("queue.status", [job]))[0] === "status" ? [job] : [])
    )
    return found.flat()
  }
  for (const one of steps) {
    switch (one.do) {
      case "offer": {
        const text = `${name.length} ${name}r${number}`
        const body = String(number)
        // Ids and groups have three bytes.
        const extra = /^[ig]/.test(one.more) ? `x${String(group++ % 10).padStart(2, "0")}` : ""
        const shape = one.plain ? "" : `${one.level}${one.more}ry${text.length}`
        const values = one.plain ? body : body + extra + text
        const [, stamp, first, known] = await queue.send("p", "queue.offer", [
          values,
          `${body.length}${shape} `,
          "node",
          ++number
        ])
        if (one.plain || known.length > 0) break
        const letters = one.more.startsWith("d") ? "UHNL" : one.more.startsWith("g") ? "VIOM" : "uhnl"
        references.set(`${letters["uhnl".indexOf(one.level)]}${stamp}-${first}`, `r${number - 1}`)
        break
      }
      case "finish":
      case "bury":
      case "cancel":
      case "retry": {
        const jobs = one.do === "cancel" ? await alive() : await inHand()
        const job = jobs[one.pick % Math.max(1, jobs.length)]
        if (job === undefined) break
        if (one.do === "retry") {
          await queue.send(worker(), "queue.retry", ["w", job, one.pick % 2, 1, 1])
          break
        }
        const outcome = references.has(job) ? JSON.stringify(ended[one.do]) : ""
        if (one.do === "cancel") await queue.send("p", "queue.cancel", [job, 0])
        else if (one.do === "bury") await queue.send(worker(), "queue.bury", ["w", job, "failed", "no", outcome, 1])
        else await queue.send(worker(), "queue.finish", ["w", job, "", "", outcome, 0, 1])
        end(job, ended[one.do])
        break
      }
      case "drain":
      case "obliterate": {
        await queue.send("p", `queue.${one.do}`, one.do === "drain" ? [1, ""] : [])
        break
      }
      case "crash": {
        const jobs = await inHand()
        await queue.end(worker())
        await queue.reap(worker())
        for (const job of jobs) end(job, ["crashed"])
        generation++
        await work()
        break
      }
      case "deliver":
        if (early) await deliver()
        break
      case "short": {
        await join(2)
        await join(0)
      }
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
