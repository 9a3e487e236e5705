/** The queue actor beside a model: what has the same id, what changes before it begins, and how much of it there may be. */
import { assert, layer } from "@effect/vitest"
import { Effect } from "effect"
import * as fc from "fast-check"
import type { Redis as IoRedis } from "ioredis"
import { actor, client, keysOf } from "./support/actor.ts"
import { freshNamespace, TestServer } from "./support/live.ts"

const live = { excludeTestServices: true, timeout: "120 seconds" } as const

interface Step {
  readonly do:
    | "offer"
    | "lifo"
    | "simple"
    | "keepLast"
    | "update"
    | "postpone"
    | "promote"
    | "note"
    | "cancel"
    | "done"
    | "retry"
    | "bury"
    | "end"
    | "take"
  readonly pick: number
}

const step: fc.Arbitrary<Step> = fc.record({
  do: fc.constantFrom(
    ...[
      "offer",
      "lifo",
      "simple",
      "simple",
      "keepLast",
      "keepLast",
      "keepLast",
      "update",
      "update",
      "postpone"
    ] as const,
    ...["promote", "promote", "note", "note", "cancel", "done", "done", "done", "retry", "bury", "end"] as const,
    ...["take", "take", "take", "take"] as const
  ),
  pick: fc.nat(100)
})

interface Job {
  readonly id: string
  readonly deduped: string
  value: number
  begun: boolean
  state: "waiting" | "delayed" | "active"
  checkpoint: number | undefined
}

layer(TestServer.layer, live)("the queue actor", (it) => {
  for (const length of [0, 4]) {
    it.effect(`knows what has become of jobs${length === 0 ? "" : `, and drops those beyond ${length}`}`, () =>
      Effect.gen(function*() {
        const redis = yield* client(yield* TestServer)
        yield* Effect.promise(() =>
          fc.assert(
            fc.asyncProperty(fc.array(step, { minLength: 5, maxLength: 60 }), async (steps) => {
              const queue = actor(redis, freshNamespace(), "queue:q")
              const notes = keysOf(queue.key).find((key) => key.includes("queue-notes:"))!
              await run(queue, steps, length, () => redis.hlen(notes))
            }),
            { numRuns: 150, endOnFailure: false }
          )
        )
      }))
  }
})

const run = async (
  queue: ReturnType<typeof actor>,
  steps: ReadonlyArray<Step>,
  length: number,
  noted: () => Promise<number>
) => {
  // In the order of their offers.
  const jobs = new Map<string, Job>()
  // While the worker had them, and it has not said that their handlers have ended.
  const cancelled = new Set<string>()
  let [number, value, session, read, dropped] = [0, 0, 0, 0, 0]
  const worker = () => `w${session}`
  await queue.open("producer")
  await queue.open(worker())
  await queue.send("producer", "queue.join", ["p", "1", 0, 0, 0, 60_000, 1000, 0, 100, length, 2, 1, 0, 0, 1, 0])
  await queue.send(worker(), "queue.work", ["w", 0])

  const of = (...states: ReadonlyArray<Job["state"]>) =>
    [...jobs.values()].filter(({ state }) => states.includes(state))
  const active = () => of("active")[0]
  const named = (deduped: string) => [...jobs.values()].filter((job) => job.deduped === deduped && deduped !== "")
  // A job that was kept behind this one can begin.
  const gone = (job: Job) => {
    jobs.delete(job.id)
    if (!job.deduped.startsWith("k")) return
    const [next] = named(job.deduped)
    if (next?.state === "delayed" && !next.begun) next.state = "waiting"
  }
  const offer = async (more: string, deduped: string) => {
    const body = String(++value)
    const shape = `${body.length}${more}${deduped === "" ? "" : `q${deduped.length}`}`
    const answer = await queue.send("producer", "queue.offer", [body + deduped, shape, "node", ++number])
    assert.deepStrictEqual(await queue.send("producer", "queue.offer", [body + deduped, shape, "node", number]), answer)
    const [, stamp, first, [known]] = answer as [string, number, number, Array<[number, string, 1?]>]
    const same = named(deduped)
    const fresh = same.find(({ begun }) => !begun)
    if (deduped.startsWith("s") && same.length > 0) return assert.deepStrictEqual(known, [0, same[0]!.id])
    if (fresh !== undefined) {
      assert.deepStrictEqual(known, [0, fresh.id])
      fresh.value = value
      return
    }
    const kept = deduped.startsWith("k") && same.length > 0
    const id = `${kept ? "N" : more === "f" ? "N" : "n"}${stamp}-${first}`
    assert.deepStrictEqual(known, kept ? [0, id, 1] : undefined)
    jobs.set(id, { id, deduped, value, begun: false, state: kept ? "delayed" : "waiting", checkpoint: undefined })
  }
  const hear = async () => {
    const events = await queue.mail(worker())
    for (const event of events.slice(read)) {
      if (event[0] !== "changed" || event[2] !== "deliver") continue
      for (const [id, , body, ...more] of event[5] as Array<[string, number, number, ...Array<string>]>) {
        const job = jobs.get(id)
        assert.isDefined(job, `${id} is gone`)
        assert.notStrictEqual(job!.state, "active")
        assert.strictEqual(body, job!.value)
        const at = more.indexOf("k")
        assert.strictEqual(at < 0 ? undefined : Number(more[at + 1]), job!.checkpoint)
        // Jobs with the same id for deduplication are active one at a time.
        assert.isTrue(named(job!.deduped).every(({ state }) => state !== "active"))
        job!.state = "active"
        job!.begun = true
      }
    }
    read = events.length
  }
  // The model does not say which jobs were dropped: the jobs that are left do.
  const check = async () => {
    const [, ready, delayed, busy, , , , , , , gonePast] = await queue.look("queue.state", [])
    const waiting = (ready as Array<number>).reduce((total, some) => total + Number(some), 0)
    if (gonePast > dropped) {
      assert.isAbove(length, 0)
      for (const job of [...jobs.values()]) {
        const [tag] = await queue.look("queue.status", [job.id])
        if (tag === "missing") {
          assert.notStrictEqual(job.state, "active")
          gone(job)
          dropped++
        }
      }
    }
    assert.strictEqual(gonePast, dropped)
    assert.strictEqual(waiting + delayed, of("waiting", "delayed").length)
    assert.strictEqual(busy, of("active").length + cancelled.size)
    for (const job of jobs.values()) {
      const [, state] = await queue.look("queue.status", [job.id])
      assert.strictEqual(state, job.state, job.id)
    }
    if (jobs.size === 0) assert.strictEqual(await noted(), 0)
  }
  const pickOf = (all: ReadonlyArray<Job>, pick: number) => all[pick % Math.max(1, all.length)]

  for (const { do: what, pick } of steps) {
    const any = pickOf([...jobs.values()], pick)
    const now = active()
    switch (what) {
      case "offer":
        await offer("", "")
        break
      case "lifo":
        await offer("f", "")
        break
      case "simple":
      case "keepLast":
        await offer("", `${what[0]}${what}${pick % 2}`)
        break
      case "update":
        if (any === undefined) break
        assert.deepStrictEqual(
          await queue.send("producer", "queue.update", [any.id, String(++value)]),
          any.begun ? ["begun"] : ["updated"]
        )
        if (!any.begun) any.value = value
        break
      case "postpone":
        if (any === undefined) break
        assert.deepStrictEqual(
          await queue.send("producer", "queue.reschedule", [any.id, "1", 3_600_000]),
          any.state === "active" ? ["begun"] : ["rescheduled"]
        )
        if (any.state !== "active") any.state = "delayed"
        break
      case "promote": {
        // A job that is kept behind another one stays there in the model.
        const kept = any !== undefined && any.deduped.startsWith("k") && named(any.deduped).length > 1
        if (any === undefined || kept) break
        assert.deepStrictEqual(
          await queue.send("producer", "queue.promote", [any.id]),
          any.state === "delayed" ? ["promoted"] : ["begun"]
        )
        if (any.state === "delayed") any.state = "waiting"
        break
      }
      case "note":
        for (const id of cancelled) {
          assert.deepStrictEqual(await queue.send(worker(), "queue.note", ["w", id, "1", "1", ""]), ["missing"])
        }
        if (any === undefined) break
        value++
        assert.deepStrictEqual(
          await queue.send(worker(), "queue.note", ["w", any.id, "1", String(value), "\"line\""]),
          any.state === "active" ? ["noted"] : ["missing"]
        )
        if (any.state === "active") any.checkpoint = value
        break
      case "cancel":
        if (any === undefined) break
        await queue.send("producer", "queue.cancel", [any.id, 0])
        if (any.state === "active") cancelled.add(any.id)
        gone(any)
        break
      case "done":
        for (const id of cancelled) {
          await queue.send(worker(), "queue.done", ["w", `${id[0]} ${id.slice(1)}`, 0])
          cancelled.delete(id)
        }
        if (now === undefined) break
        gone(now)
        if (now.deduped === "") await queue.send(worker(), "queue.done", ["w", `${now.id[0]} ${now.id.slice(1)}`, 0])
        else await queue.send(worker(), "queue.finish", ["w", now.id, "", now.deduped, "", 0, 0])
        break
      case "retry":
        if (now === undefined) break
        now.state = "waiting"
        await queue.send(worker(), "queue.retry", ["w", now.id, 0, "1", 0])
        break
      case "bury":
        if (now === undefined) break
        gone(now)
        await queue.send(worker(), "queue.bury", ["w", now.id, "failed", "no", "", 0])
        break
      case "end":
        await queue.end(worker())
        await queue.reap(worker())
        for (const job of of("active")) job.state = "waiting"
        cancelled.clear()
        session++
        read = 0
        await queue.open(worker())
        await queue.send(worker(), "queue.work", ["w", 0])
        break
      case "take":
        await queue.send(worker(), "queue.credit", ["w", 1, ""])
    }
    await hear()
    await check()
  }
  for (const job of [...jobs.values()]) await queue.send("producer", "queue.cancel", [job.id, 0])
  jobs.clear()
  assert.strictEqual(await noted(), 0)
}

layer(TestServer.layer, live)("jobs of the queue actor", (it) => {
  const alone = (f: (queue: Awaited<ReturnType<typeof started>>, redis: IoRedis) => Promise<void>) =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      yield* Effect.promise(async () => f(await started(redis), redis))
    })

  it.effect("are not listed as delayed while they are in front of others", () =>
    alone(async ({ look, offer }) => {
      const ids = [await offer("1f"), await offer("1f"), await offer("1d60000")]
      const [, place, jobs] = await look("queue.jobs", ["delayed", "", 2])
      assert.deepStrictEqual([place, jobs.map(([, , [id]]: any) => id)], ["", ids.slice(2)])
    }))

  it.effect("are obliterated behind one that waits for its retry", () =>
    alone(async ({ look, offer, send, work }) => {
      await work(1)
      const job = await offer("1q2", "kx")
      await offer("1q2", "kx")
      await send("worker", "queue.retry", ["w", job, 60_000, "1", 0])
      assert.deepStrictEqual(await send("producer", "queue.obliterate", [""]), ["obliterated", 1, true, ""])
      assert.deepStrictEqual(await send("producer", "queue.obliterate", [""]), ["obliterated", 1, false, ""])
      const [, , delayed, active] = await look("queue.state", [])
      assert.deepStrictEqual([delayed, active], [0, 0])
    }))

  it.effect("get no payload that is newer than that of the one behind them", () =>
    alone(async ({ delivered, offer, send, work }) => {
      await work(1)
      const first = await offer("1q2", "kx", 1)
      const kept = await offer("1q2", "kx", 2)
      await send("worker", "session.leave", ["w"])
      assert.strictEqual(await offer("1q2", "kx", 3), kept)
      await work(1)
      await send("worker", "queue.finish", ["w", first, "", "kx", "", 0, 1])
      assert.deepStrictEqual(await delivered(), [[first, 1], [first, 1], [kept, 3]])
    }))

  it.effect("expire, so many in a call", () =>
    alone(async ({ look, offers, passed, ring, work }) => {
      for (let at = 0; at < 10; at++) await offers(Array.from({ length: 500 }, () => "1e1000"))
      await passed(1000)
      await work(500)
      const expired = async () => (await look("queue.state", []))[9] as number
      const some = await expired()
      assert.isTrue(some >= 2048 && some < 3000, String(some))
      await ring()
      await ring()
      assert.strictEqual(await expired(), 5000)
    }))

  it.effect("are not looked for when they have ended before they expire", () =>
    alone(async ({ delivered, end, key, offer, offers, reap, send, work }, redis) => {
      const timed = keysOf(key).find((key) => key.includes("queue-delayed:"))!
      const left = async () => (await redis.zrange(timed, "0", "-1")).filter((member) => member.startsWith("e")).length
      const expires = "e60000"
      await offers([
        ...Array.from({ length: 600 }, () => `1${expires}`),
        ...[`1r${expires}`, `1h${expires}`, `1d60000${expires}`, `1f${expires}`],
        ...[`1${expires}a1`, `1${expires}a2`]
      ])
      await offers([`1g1${expires}`, `1g1d60000${expires}`], "g")
      await work(607)
      const begun = (await delivered()).map(([id]) => id)
      assert.strictEqual(begun.length, 606)
      assert.strictEqual(await left(), 608)
      const ids = new Map<string, Array<string>>()
      for (const id of begun.slice(7)) ids.set(id[0]!, [...ids.get(id[0]!) ?? [], id.slice(1)])
      await send("worker", "queue.finish", ["w", begun[0]!, "", "", "[\"success\",1]", 0, 0])
      await send("worker", "queue.complete", ["w", begun[1]!, "", "", "", 0, 0, `1`, "1", ""])
      await send("worker", "queue.bury", ["w", begun[2]!, "failed", "no", "", 0])
      await send("producer", "queue.cancel", [begun[3]!, 0])
      for (const [letter, parts] of ids) await send("worker", "queue.done", ["w", `${letter} ${parts.join(" ")}`, 0])
      assert.strictEqual(await left(), 5)
      // Of one that goes back it is known.
      await send("worker", "queue.retry", ["w", begun[4]!, 60_000, "1", 0])
      assert.strictEqual(await left(), 5)
      await end("worker")
      await reap("worker")
      assert.strictEqual(await left(), 5)
      await send("producer", "queue.drain", [1, ""])
      assert.strictEqual(await left(), 0)
      await offer(`1${expires}`)
      await send("producer", "queue.obliterate", [""])
      assert.strictEqual(await left(), 0)
    }))

  it.effect("expire when the alarm rings, so many in a call, and those in work when they go back", () =>
    alone(async ({ alarm, delivered, look, now, offers, passed, ring, send, work }) => {
      const state = async () => {
        const [, [, , normal], delayed, active, , , , , , expired] = await look("queue.state", [])
        return { normal, delayed, active, expired }
      }
      await work(1)
      await offers([`1e500`, ...Array.from({ length: 600 }, () => "1d60000e500")])
      assert.deepStrictEqual(await state(), { normal: 0, delayed: 600, active: 1, expired: 0 })
      await passed(500)
      for (const expired of [256, 512, 600]) {
        assert.isAtMost(await alarm(), await now())
        await ring()
        assert.deepStrictEqual(await state(), { normal: 0, delayed: 600 - expired, active: 1, expired })
      }
      const [[job]] = await delivered() as [[string, number]]
      await send("worker", "queue.retry", ["w", job, 60_000, "1", 0])
      assert.deepStrictEqual(await state(), { normal: 0, delayed: 1, active: 0, expired: 600 })
      assert.isAtMost(await alarm(), await now())
      await ring()
      assert.deepStrictEqual(await state(), { normal: 0, delayed: 0, active: 0, expired: 601 })
    }))

  it.effect("of groups that wait for a time begin after all sessions have been away for long", () =>
    alone(async ({ alarm, delivered, join, keys, offers, send, work }, redis) => {
      await join({ groupspacing: 60_000 })
      await work(2)
      await offers(["1g1", "1g1"], "g")
      const [[id]] = await delivered() as [[string, number]]
      await send("worker", "queue.done", ["w", `${id[0]} ${id.slice(1)}`, 0])
      await redis.del(keys("")[1]!)
      await join({ groupspacing: 60_000 })
      assert.isTrue(await alarm() > 0)
    }))

  it.effect("use up nothing of the rate of their group when they expire", () =>
    alone(async ({ delivered, join, offers, passed, work }) => {
      await join({ groupspacing: 60_000 })
      await offers(["1e1g1", "1e1g1", "1g1"], "g")
      await passed(1)
      await work(1)
      assert.strictEqual((await delivered()).length, 1)
    }))

  it.effect("are counted when they are dropped behind others", () =>
    alone(async ({ join, look, offer, send, work }) => {
      await work(2)
      for (const deduped of ["kx", "ky"]) {
        const job = await offer("1q2", deduped)
        await offer("1q2", deduped)
        await send("worker", "queue.retry", ["w", job, 60_000, "1", 0])
      }
      await join({ length: 1, overflow: 2 })
      await join({ length: 1, overflow: 2 })
      const [, ready, delayed] = await look("queue.state", [])
      assert.deepStrictEqual([ready, delayed], [[0, 0, 1, 0], 0])
    }))

  it.effect("begin when the one before them is dropped", () =>
    alone(async ({ delivered, join, offer, send, work }) => {
      await join({ length: 1, overflow: 2 })
      await work(1)
      const job = await offer("1q2", "kx")
      const kept = await offer("1q2", "kx")
      await send("worker", "queue.retry", ["w", job, 60_000, "1", 1])
      assert.deepStrictEqual((await delivered()).map(([id]) => id), [job, kept])
    }))

  it.effect("are dropped, the oldest one first, also where the newest one begins first", () =>
    alone(async ({ delivered, join, offer, work }) => {
      await join({ length: 2, overflow: 2 })
      const ids = [await offer("1f"), await offer("1f"), await offer("1f")]
      await work(2)
      assert.deepStrictEqual((await delivered()).map(([id]) => id), [ids[2], ids[1]])
    }))

  it.effect("of groups begin when the one before them has expired", () =>
    alone(async ({ delivered, offer, passed, send, work }) => {
      await work(1)
      const job = await offer("1e20q2", "kx")
      const kept = await offer("1q2g1", "kxg")
      await passed(20)
      await send("worker", "queue.retry", ["w", job, 0, "1", 1])
      assert.deepStrictEqual((await delivered()).map(([id]) => id), [job, kept])
    }))

  it.effect("that wait for room do so behind no member that is gone", () =>
    alone(async ({ join, mail, offer, open, send }) => {
      await join({ length: 1 })
      const job = await offer("1")
      await open("closed")
      // As when the request was on its way while the member left.
      for (const [session, id] of [["closed", "m"], ["producer", "p"]] as const) {
        const [, , , known] = await send(session, "queue.enter", [id, "2", "1", session, 1])
        assert.deepStrictEqual(known, [[0, 2]])
      }
      await send("producer", "queue.cancel", [job, 0])
      assert.deepStrictEqual(await mail("closed"), [])
      assert.deepStrictEqual(await mail("producer"), [["changed", "p", "room"]])
    }))

  it.effect("that were rescheduled are dropped after jobs that wait", () =>
    alone(async ({ join, look, offer, send }) => {
      await join({ length: 3, overflow: 2 })
      const [first, second, third] = [await offer("1"), await offer("1"), await offer("1")]
      for (const job of [first, second]) await send("producer", "queue.reschedule", [job, "1", 60_000])
      const last = await offer("1")
      const states = async () => {
        const answers = await Promise.all([first, second, third, last].map((job) => look("queue.status", [job])))
        return answers.map(([, state]) => state ?? "gone")
      }
      assert.deepStrictEqual(await states(), ["delayed", "delayed", "gone", "waiting"])
      const [, ready, delayed] = await look("queue.state", [])
      assert.deepStrictEqual([ready, delayed], [[0, 0, 1, 0], 2])
      await join({ length: 1, overflow: 2 })
      assert.deepStrictEqual(await states(), ["gone", "delayed", "gone", "gone"])
    }))

  it.effect("that were rescheduled are drained as delayed ones", () =>
    alone(async ({ look, offer, send }) => {
      const job = await offer("1")
      await send("producer", "queue.reschedule", [job, "1", 60_000])
      assert.deepStrictEqual(await send("producer", "queue.drain", ["", ""]), ["drained", 0, false, ""])
      assert.deepStrictEqual(await look("queue.status", [job]), ["status", "delayed", 0])
      assert.deepStrictEqual(await send("producer", "queue.drain", ["1", ""]), ["drained", 1, false, ""])
    }))
})

/** A queue with a producer, and a worker that works when it is told to. */
const started = async (redis: IoRedis) => {
  const queue = actor(redis, freshNamespace(), "queue:q")
  const due = queue.keys("")[1]!
  let number = 0
  const now = async () => {
    const [seconds, micros] = await redis.time()
    return Number(seconds) * 1000 + Number(micros) / 1000
  }
  const join = ({ groupspacing = 0, length = 0, overflow = 0 } = {}) =>
    queue.send(
      "producer",
      "queue.join",
      ["p", "1", 0, 0, 0, 60_000, 1000, 0, 100, length, overflow, 1, groupspacing, 0, 1, 0]
    )
  /** Jobs with bodies of one digit; the same texts are behind each. */
  const offers = (shapes: ReadonlyArray<string>, texts = "", body = 1) => {
    const values = shapes.map(() => `${body}${texts}`).join("")
    return queue.send("producer", "queue.offer", [values, shapes.join(" "), "node", ++number])
  }
  await queue.open("producer")
  await queue.open("worker")
  await join()
  return {
    ...queue,
    join,
    offers,
    /** Answers the id of the job. */
    offer: async (shape: string, texts = "", body = 1): Promise<string> => {
      const [, stamp, first, [known]] = await offers([shape], texts, body)
      if (known !== undefined) return known[1]
      const letter = /^1.*[fd]/.test(shape) ? "N" : "n"
      return `${letter}${stamp}-${first}`
    },
    work: (credit: number) => queue.send("worker", "queue.work", ["w", credit]),
    /** The jobs that the worker was given, and their bodies. */
    delivered: async (): Promise<Array<[id: string, body: number]>> =>
      (await queue.mail("worker")).flatMap(([, , tag, , , jobs]) =>
        tag === "deliver" ? jobs.map(([id, , body]: any) => [id, body]) : []
      ),
    /** When the alarm of the queue rings. */
    alarm: async () => Number(await redis.zscore(due, "@queue:q")),
    /** The time of Redis, in ms. */
    now,
    passed: async (millis: number) => {
      const from = await now()
      while (await now() <= from + millis) await redis.ping()
    }
  }
}
