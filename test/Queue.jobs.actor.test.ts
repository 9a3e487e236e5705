/** The queue actor beside a model: what has the same id, what changes before it begins, and how much of it there may be. */
import { assert, layer } from "@effect/vitest"
import { Effect } from "effect"
import * as fc from "fast-check"
import type { Redis as IoRedis } from "ioredis"
import { actor, client, keysOf } from "./support/actor.ts"
import { runs } from "./support/effort.ts"
import { freshNamespace, TestServer } from "./support/live.ts"

const live = { excludeTestServices: true, timeout: "120 seconds" } as const

// What Redis is asked for by any process, and by the worker about the jobs that it has in hand.
const verbs = [
  ...[
    "offer",
    "offer",
    "lifo",
    "simple",
    "simple",
    "throttle",
    "debounce",
    "debounce",
    "keepLast",
    "keepLast"
  ] as const,
  ...[
    "keepLast",
    "brief",
    "long",
    "update",
    "update",
    "postpone",
    "promote",
    "promote",
    "cancel",
    "drain",
    "pass"
  ] as const,
  ...["note", "note", "done", "done", "done", "retry", "snooze", "snooze", "bury"] as const,
  ...["take", "take", "take", "take"] as const
]
const own: ReadonlyArray<string> = ["note", "done", "retry", "snooze", "bury", "take"]
// Of a full queue: what becomes of offers is what matters there.
const limited = [
  ...["offer", "offer", "offer", "offer", "lifo", "simple", "throttle", "update", "postpone", "promote"] as const,
  ...["cancel", "cancel", "pass", "done", "done", "retry", "retry", "retry", "bury", "take", "take", "take"] as const
]

const stepOf = (verb: fc.Arbitrary<typeof verbs[number]>) =>
  fc.record({ do: verb, queue: fc.nat(1), pick: fc.nat(100) })

type Step = ReturnType<typeof stepOf> extends fc.Arbitrary<infer A> ? A : never

/** What one process asks with one call, about two queues; or what happens between calls. */
const callOf = (isBounded: boolean) =>
  fc.oneof(
    {
      weight: 15,
      arbitrary: fc.record({
        by: fc.constantFrom("p" as const, "w" as const, "w" as const),
        steps: fc.array(stepOf(fc.constantFrom(...isBounded ? limited : verbs)), { minLength: 1, maxLength: 8 })
      })
    },
    { weight: 1, arbitrary: fc.constantFrom("end" as const, "ring" as const) }
  )

type Call = ReturnType<typeof callOf> extends fc.Arbitrary<infer A> ? A : never

interface Job {
  readonly id: string
  readonly deduped: string
  value: number
  begun: boolean
  /** Whether it had begun before its last attempt. */
  former: boolean
  state: "waiting" | "delayed" | "active" | "cancelled" | "gone"
  checkpoint: number | undefined
  /** When it expires, in ms: between these. */
  readonly till: readonly [least: number, most: number]
}

/** What a full queue does with offers. */
type OnFull = "wait" | "fail" | "drop"

const overflows: { readonly [onFull in OnFull]: number } = { wait: 0, fail: 1, drop: 2 }

// In ms.
const [hour, moment] = [3_600_000, 5]

layer(TestServer.layer, live)("the queue actor", (it) => {
  for (const onFull of [undefined, "drop", "fail", "wait"] as const) {
    it.effect(`knows what has become of jobs${onFull === undefined ? "" : `, and of offers when it is full: ${onFull}`}`, () =>
      Effect.gen(function*() {
        const redis = yield* client(yield* TestServer)
        yield* Effect.promise(() =>
          fc.assert(
            fc.asyncProperty(
              fc.array(callOf(onFull === "fail" || onFull === "wait"), { minLength: 5, maxLength: 25 }),
              (calls) => run(redis, calls, onFull)
            ),
            { numRuns: runs(30), endOnFailure: false }
          )
        )
      }))
  }
})

interface World {
  readonly partition: ReturnType<typeof actor>
  readonly onFull: OnFull | undefined
  /** The session of the worker. */
  readonly worker: () => string
  /** How many fields there are of what has changed of the jobs of a queue. */
  readonly noted: (hash: string) => Promise<number>
}

type Process = "p" | "w"

/** One of the queues: it learns from the answers, in their order, what has become of its jobs. */
const model = (at: number, { noted, onFull, partition, worker }: World) => {
  const queue = partition.beside(`queue:q${at}`)
  const claim = `w${at}`
  const length = onFull === undefined ? 0 : onFull === "wait" ? 2 : 4
  const isBounded = onFull === "fail" || onFull === "wait"
  const jobs: Array<Job> = []
  // The job that later ones are duplicates of, while it has not begun; and the last one that began a window.
  const debounced = new Map<string, Job>()
  const throttled = new Map<string, readonly [job: Job, least: number, most: number]>()
  let [number, value, dropped, expired, credit] = [0, 0, 0, 0, 0]
  // How many jobs waited when that was checked last, and how many went back since.
  let [former, returned] = [0, 0]
  // Of a call: when it began, whether it asks for something, and has offered something; how many jobs began before its end.
  let [began, asked, offering, handed] = [0, false, false, 0]
  const settling = new Set<Job>()
  // Processes whose jobs wait for room, and whether the first one was notified of some.
  let line: Array<Process> = []
  let told = false
  const read = { p: 0, w: 0 }
  const sessionOf = (by: Process) => by === "p" ? "producer" : worker()

  const of = (...states: ReadonlyArray<Job["state"]>) => jobs.filter(({ state }) => states.includes(state))
  const open = () => of("waiting", "delayed", "active")
  const named = (deduped: string) => open().filter((job) => job.deduped === deduped && deduped !== "")
  const send = (by: Process, verb: string, args: ReadonlyArray<string | number>) => {
    asked = true
    return queue.send(sessionOf(by), verb, args)
  }
  const join = async (by: Process) => {
    const most = onFull === undefined ? 0 : overflows[onFull]
    const rules = [0, 0, 0, 60_000, 1000, 0, 100, length, most, 1, 0, 0, 1, 0, ""]
    await queue.send(sessionOf(by), "queue.join", [`${by}${at}`, "1", ...rules])
    if (by === "w") await queue.send(worker(), "queue.work", [claim, 0])
  }

  // A job that was kept behind this one can begin.
  const gone = (job: Job, state: "gone" | "cancelled" = "gone") => {
    job.state = state
    if (debounced.get(job.deduped) === job) debounced.delete(job.deduped)
    const [next] = job.deduped.startsWith("k") ? named(job.deduped) : []
    if (next?.state === "delayed" && !next.begun) next.state = "waiting"
  }
  /** Whether a job was there. It may have expired before it was asked about. */
  const isThere = (job: Job, reply: ReadonlyArray<unknown>): boolean => {
    if (reply[0] !== "missing" || job.state === "gone" || job.state === "cancelled") return true
    assert.isAtMost(job.till[0], Date.now(), `${job.id} is gone`)
    gone(job)
    expired++
    return false
  }

  // How many jobs there is room for. Workers that wait take some first.
  const room = (): number => {
    const waiting = of("waiting").length - handed
    if (waiting + of("delayed").length >= length) handed += Math.min(credit - handed, waiting)
    return Math.max(0, length - of("waiting", "delayed").length + handed)
  }

  const offer = async (by: Process, more: string, deduped: string, life = Number.POSITIVE_INFINITY) => {
    const body = String(++value)
    const own = value
    const shape = `${body.length}${more}${deduped === "" ? "" : `q${deduped.length}`} `
    const enters = onFull === "wait"
    const args = [...enters ? [`${by}${at}`] : [], body + deduped, shape, `node${by}${at}`, ++number]
    const last = number
    const answer = await send(by, enters ? "queue.enter" : "queue.offer", args)
    const answered = (): Promise<unknown> => placed(by, own, more, deduped, life, answer)
    const result = answered()
    // The same offer again is answered as before, and changes nothing.
    if (!enters && last === number) {
      assert.deepStrictEqual(await queue.send(sessionOf(by), "queue.offer", args), answer)
    }
    return result
  }
  const replace = (job: Job, value: number) => {
    job.value = value
    job.checkpoint = undefined
  }
  // The job that is in the way of an offer, as far as that is certain.
  const inTheWay = (deduped: string): Job | undefined => {
    const same = named(deduped)
    if (deduped.startsWith("s")) return same[0]
    if (deduped.startsWith("k")) return same.findLast(({ begun }) => !begun)
    const job = debounced.get(deduped)
    return job?.begun === false ? job : undefined
  }
  const placed = async (
    by: Process,
    own: number,
    more: string,
    deduped: string,
    life: number,
    answer: ReadonlyArray<any>
  ) => {
    const [tag, stamp, first, [known]] = answer as [string, number, number, Array<[number, string | number, 1?]>]
    assert.strictEqual(tag, "offered")
    const before = { found: inTheWay(deduped), kept: deduped.startsWith("k") && named(deduped).length > 0 }
    let { found } = before
    const window = throttled.get(deduped)
    if (window !== undefined) {
      const [job, least, most] = window
      const isSame = known?.[1] === job.id
      // It is certain while the window goes on for all that is known, or is over for all that is known.
      if (isSame) assert.isAtMost(began, most + moment)
      else assert.isAtLeast(Date.now(), least + moment)
      if (isSame) found = job
    }
    if (found !== undefined) {
      leave(by)
      assert.deepStrictEqual(known, [0, found.id])
      if (/^[kd]/.test(deduped)) replace(found, own)
      if (deduped.startsWith("d")) found.state = "delayed"
      return
    }
    const isFull = isBounded && (line.length > 0 && line[0] !== by || room() === 0)
    if (isFull) {
      assert.deepStrictEqual(known, [0, onFull === "wait" ? 2 : 0])
      if (onFull === "wait" && !line.includes(by)) line.push(by)
      // The actor tells the first member of the line again, as that has stored nothing.
      if (line[0] === by) told = false
      return
    }
    leave(by)
    const isHeld = before.kept || more === "f" || deduped.startsWith("d")
    const id = `${isHeld ? "N" : "n"}${stamp}-${first}`
    assert.deepStrictEqual(known, before.kept ? [0, id, 1] : undefined)
    const isLater = before.kept || deduped.startsWith("d")
    const job: Job = {
      id,
      deduped,
      value: own,
      begun: false,
      former: false,
      state: isLater ? "delayed" : "waiting",
      checkpoint: undefined,
      till: [began + life, Date.now() + life]
    }
    jobs.push(job)
    if (deduped.startsWith("d")) debounced.set(deduped, job)
    if (deduped.startsWith("t")) throttled.set(deduped, [job, began, Date.now()])
  }
  const leave = (by: Process) => {
    if (line[0] === by) told = false
    line = line.filter((other) => other !== by)
  }

  /** A step of a call: it asks once, at once, about a job whose id is known by then. */
  const once = async (by: Process, { do: what, pick }: Step): Promise<unknown> => {
    if (own.includes(what) && by !== "w") return
    const pickOf = (all: ReadonlyArray<Job>): Job | undefined => all[pick % Math.max(1, all.length)]
    const isOffer = ["offer", "lifo", "simple", "keepLast", "debounce", "throttle", "brief", "long"].includes(what)
    // What has begun before the end of a call is not known here.
    if (isBounded && offering && !isOffer && what !== "take") return
    offering ||= isOffer
    const any = pickOf(open())
    const active = pickOf(of("active", "cancelled").filter((job) => !settling.has(job)))
    switch (what) {
      case "offer":
        return offer(by, "", "")
      case "lifo":
        return offer(by, "f", "")
      case "simple":
      case "keepLast":
        return offer(by, "", `${what[0]}${what}${pick % 2}`)
      case "debounce":
        return offer(by, `v${hour}`, `ddebounce${pick % 2}`)
      case "throttle":
        return offer(by, `v${moment}`, `tthrottle${pick % 2}`)
      case "brief":
      case "long": {
        const life = what === "brief" ? 2 : hour
        return offer(by, `e${life}`, "", life)
      }
      case "update": {
        if (any === undefined) return
        const body = ++value
        const reply = await send(by, "queue.update", [any.id, String(body)])
        const { begun } = any
        if (!isThere(any, reply)) return
        assert.deepStrictEqual(reply, isOver(any) ? ["missing"] : begun ? ["begun"] : ["updated"])
        if (!begun) replace(any, body)
        return
      }
      case "postpone": {
        if (any === undefined) return
        const reply = await send(by, "queue.reschedule", [any.id, "1", hour])
        if (!isThere(any, reply)) return
        assert.deepStrictEqual(reply, isOver(any) ? ["missing"] : any.state === "active" ? ["begun"] : ["rescheduled"])
        if (any.state === "waiting") any.state = "delayed"
        return
      }
      case "promote": {
        // A job that is kept behind another one stays there in the model.
        if (any === undefined || any.deduped.startsWith("k")) return
        const reply = await send(by, "queue.promote", [any.id])
        if (!isThere(any, reply)) return
        assert.deepStrictEqual(reply, isOver(any) ? ["missing"] : any.state === "delayed" ? ["promoted"] : ["begun"])
        if (any.state === "delayed") any.state = "waiting"
        return
      }
      case "cancel": {
        if (any === undefined) return
        const reply = await send(by, "queue.cancel", [any.id, 0])
        if (!isThere(any, reply)) return
        assert.deepStrictEqual(reply, isOver(any) ? ["missing"] : ["cancelled", any.state === "active"])
        if (!isOver(any)) gone(any, any.state === "active" ? "cancelled" : "gone")
        return
      }
      case "drain": {
        const [, count] = await send(by, "queue.drain", ["", ""])
        const removed = of("waiting")
        // The others have expired in this call.
        expired += removed.length - count
        for (const job of removed) gone(job)
        return
      }
      case "pass": {
        if (onFull !== "wait") return
        await send(by, "queue.pass", [`${by}${at}`])
        return leave(by)
      }
      case "note": {
        const job = pickOf(jobs)
        if (job === undefined) return
        const kept = ++value
        const reply = await send(by, "queue.note", [claim, job.id, "1", String(kept), "\"line\""])
        assert.deepStrictEqual(reply, job.state === "active" ? ["noted"] : ["missing"])
        if (job.state === "active") job.checkpoint = kept
        return
      }
      case "done": {
        if (active === undefined) return
        settling.add(active)
        const { deduped, id } = active
        await (deduped === ""
          ? send(by, "queue.done", [claim, `${id[0]} ${id.slice(1)}`, 0])
          : send(by, "queue.finish", [claim, id, "", deduped, "", 0, 0]))
        return settled(active, gone)
      }
      case "retry": {
        if (active === undefined) return
        settling.add(active)
        await send(by, "queue.retry", [claim, active.id, 0, "1", 0])
        returned++
        return settled(active, (job) => job.state = "waiting")
      }
      case "snooze": {
        if (active === undefined) return
        settling.add(active)
        await send(by, "queue.retry", [claim, active.id, 0, "", 0])
        returned++
        return settled(active, (job) => {
          job.state = "waiting"
          job.begun = job.former
        })
      }
      case "bury": {
        if (active === undefined) return
        settling.add(active)
        await send(by, "queue.bury", [claim, active.id, "failed", "no", "", 0])
        return settled(active, gone)
      }
      case "take":
        await send(by, "queue.credit", [claim, 1, ""])
        credit++
    }
  }
  const isOver = ({ state }: Job): boolean => state === "gone" || state === "cancelled"
  // A cancelled job is over, regardless of what its worker says.
  const settled = (job: Job, act: (job: Job) => void) => {
    if (job.state === "cancelled") job.state = "gone"
    else act(job)
  }

  const hear = async () => {
    for (const by of ["p", "w"] as const) {
      const events = await partition.mail(sessionOf(by))
      for (const [tag, id, what, , token, delivered] of events.slice(read[by])) {
        if (tag !== "changed" || !String(id).endsWith(String(at))) continue
        if (what === "room") {
          assert.deepStrictEqual([line[0], told], [by, false], "another one was told of room")
          told = true
        }
        if (what === "deliver") { for (const [place, one] of delivered.entries()) begin(one, token + place) }
      }
      read[by] = events.length
    }
  }
  const begin = ([id, , body, ...more]: [string, number, number, ...Array<string>], token: number) => {
    const job = jobs.find((job) => job.id === id)
    assert.isDefined(job, `${id} is not known`)
    assert.include(["waiting", "delayed"], job!.state, `${id} was handed out`)
    assert.strictEqual(body, job!.value)
    assert.isAbove(job!.till[1], Math.floor(token / 1000) - 1, `${id} began after it had expired`)
    const kept = more.indexOf("k")
    assert.strictEqual(kept < 0 ? undefined : Number(more[kept + 1]), job!.checkpoint)
    // Jobs with the same id for deduplication are active one at a time, but for windows.
    if (!/^[dt]/.test(job!.deduped)) assert.isTrue(named(job!.deduped).every(({ state }) => state !== "active"))
    assert.strictEqual(job!.state, "waiting", `${id} was delayed`)
    job!.state = "active"
    job!.former = job!.begun
    job!.begun = true
    credit--
  }

  // The model does not say which jobs were dropped, or have expired by now: the jobs that are left do.
  const check = async () => {
    const [, ready, delayed, busy, , , , , , past, away] = await queue.look("queue.state", [])
    const states = new Map<Job, ReadonlyArray<any>>()
    for (const job of open()) states.set(job, await queue.look("queue.status", [job.id]))
    const missing = [...states].filter(([, [tag]]) => tag === "missing").map(([job]) => job)
    for (const job of missing) {
      assert.notStrictEqual(job.state, "active", job.id)
      gone(job)
    }
    assert.strictEqual(past - expired + away - dropped, missing.length, "jobs are gone")
    if (past > expired) assert.isAtLeast(missing.filter(({ till }) => till[0] <= Date.now()).length, past - expired)
    if (away > dropped) assert.strictEqual(onFull, "drop")
    ;[dropped, expired] = [away, past]
    const waiting = (ready as Array<number>).reduce((total, some) => total + Number(some), 0)
    assert.strictEqual(waiting + delayed, of("waiting", "delayed").length)
    assert.strictEqual(busy, of("active", "cancelled").length)
    if (onFull === "drop") assert.isAtMost(waiting + delayed, Math.max(length, former + returned))
    ;[former, returned] = [waiting + delayed, 0]
    for (const [job, [, state]] of states) if (!missing.includes(job)) assert.strictEqual(state, job.state, job.id)
    // The first process in the line knows of room.
    if (asked && line.length > 0 && of("waiting", "delayed").length < length) {
      assert.isTrue(told, "nobody was told of room")
    }
    if (open().length === 0) assert.strictEqual(await noted(queue.key), 0)
  }
  return {
    join,
    once,
    begins: () => {
      began = Date.now()
      ;[asked, offering, handed] = [false, false, 0]
      settling.clear()
    },
    ends: async () => {
      await hear()
      await check()
    },
    ring: queue.ring,
    ended: async () => {
      for (const job of of("active")) job.state = "waiting"
      for (const job of of("cancelled")) job.state = "gone"
      ;[credit, read.w] = [0, 0]
      leave("w")
    },
    finish: async () => {
      for (const job of open()) await queue.send("producer", "queue.cancel", [job.id, 0])
      assert.strictEqual(await noted(queue.key), 0)
    }
  }
}

const run = async (redis: IoRedis, calls: ReadonlyArray<Call>, onFull: OnFull | undefined) => {
  const partition = actor(redis, freshNamespace(), "queue:q0")
  let session = 0
  const worker = () => `w${session}`
  const noted = (hash: string) => redis.hlen(keysOf(hash).find((key) => key.includes("queue-notes:"))!)
  const queues = [0, 1].map((at) => model(at, { noted, onFull, partition, worker }))
  await partition.open("producer")
  await partition.open(worker())
  for (const queue of queues) {
    await queue.join("p")
    await queue.join("w")
  }
  for (const next of calls) {
    for (const queue of queues) queue.begins()
    if (next === "ring") { for (const queue of queues) await queue.ring() }
    else if (next === "end") {
      await partition.end(worker())
      await partition.reap(worker())
      session++
      await partition.open(worker())
      for (const queue of queues) {
        await queue.ended()
        await queue.join("w")
      }
    } else {
      const { by, steps } = next
      const id = by === "p" ? "producer" : worker()
      await partition.together(id, steps.map((step) => () => queues[step.queue]!.once(by, step)))
    }
    for (const queue of queues) await queue.ends()
  }
  for (const queue of queues) await queue.finish()
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

  it.effect("have their time anew when they are replayed", () =>
    alone(async ({ delivered, look, offers, passed, ring, send, work }) => {
      await work(1)
      const [, stamp, first] = await offers(["1i3e500"], "one")
      const jobs = [`n${stamp}-${first}`]
      for (const take of [1, 0]) {
        await send("worker", "queue.bury", ["w", jobs.at(-1)!, "failed", "no", "", take])
        await passed(600)
        const [, [[letter]]] = await look("queue.letters", ["", 1])
        jobs.push((await send("producer", "queue.replay", [letter, ""]))[1])
      }
      assert.deepStrictEqual((await delivered()).map(([id]) => id), jobs.slice(0, 2))
      assert.strictEqual((await look("queue.status", ["one"]))[0], "status")
      await passed(500)
      await ring()
      assert.strictEqual((await look("queue.status", ["one"]))[0], "missing")
      assert.strictEqual((await look("queue.state", []))[9], 1)
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
      await send("worker", "queue.retry", ["w", job, 60_000, "1", 2])
      assert.deepStrictEqual((await delivered()).map(([id]) => id), [job])
      const next = await offer("1")
      assert.deepStrictEqual((await delivered()).map(([id]) => id), [job, next, kept])
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

  it.effect("that wait for room do so behind no member that has left", () =>
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

  it.effect("are not kept behind a job that expires in the same call", () =>
    alone(async ({ join, look, offer, offers, passed, send, work }) => {
      await work(1)
      // It is to be attempted again, and expires.
      const first = await offer("1e800q2", "kx")
      await send("worker", "queue.retry", ["w", first, 0, "1", 0])
      // More of them expire than one call removes.
      await offers(Array.from({ length: 300 }, () => "1e500"))
      await send("producer", "queue.slow", ["", 700])
      await send("worker", "queue.credit", ["w", 5, ""])
      await join({ length: 1, overflow: 1 })
      await passed(900)
      const next = await offer("1q2", "kx", 2)
      assert.deepStrictEqual(await look("queue.status", [first]), ["missing"])
      assert.deepStrictEqual(await look("queue.status", [next]), ["status", "active", 1])
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

/** A queue with a producer, and a worker that works when it is asked to. */
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
      ["p", "1", 0, 0, 0, 60_000, 1000, 0, 100, length, overflow, 1, groupspacing, 0, 1, 0, ""]
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
