/** Deques in the queue actor, driven directly with random requests, beside a model: which job a worker begins, and what it steals. */
import { assert, layer } from "@effect/vitest"
import { Effect } from "effect"
import * as fc from "fast-check"
import { actor, client } from "./support/actor.ts"
import { runs } from "./support/effort.ts"
import { freshNamespace, TestServer } from "./support/live.ts"

const live = { excludeTestServices: true, timeout: "120 seconds" } as const

// The last worker has no deque.
const names = ["a", "bb", "c:0", undefined] as const
const workers = names.map((_, at) => at)
const weights = [11, 222_222_222, 2_000_000_000]
type Step =
  | { readonly do: "offer"; readonly to: number; readonly count: number; readonly how: "to" | "key" | "plain" | "id" }
  | { readonly do: "join" | "leave" | "end" | "repeat"; readonly worker: number }
  | { readonly do: "settle"; readonly how: "done" | "finish" | "retry" | "later" | "follow"; readonly pick: number }
  | { readonly do: "cancel" | "reschedule" | "update"; readonly pick: number }
  | { readonly do: "ring" | "pause" | "resume" | "drain" | "again" }

const step: fc.Arbitrary<Step> = fc.oneof(
  {
    weight: 8,
    arbitrary: fc.record({
      do: fc.constant("offer" as const),
      to: fc.integer({ min: 0, max: 2 }),
      // More than a block, now and then.
      count: fc.oneof({ weight: 12, arbitrary: fc.integer({ min: 1, max: 9 }) }, {
        weight: 1,
        arbitrary: fc.constant(70)
      }),
      how: fc.constantFrom("to" as const, "to" as const, "to" as const, "key" as const, "plain" as const, "id" as const)
    })
  },
  {
    weight: 4,
    arbitrary: fc.record({
      do: fc.constantFrom(
        "join" as const,
        "join" as const,
        "join" as const,
        "leave" as const,
        "end" as const,
        "repeat" as const
      ),
      worker: fc.integer({ min: 0, max: 3 })
    })
  },
  {
    weight: 14,
    arbitrary: fc.record({
      do: fc.constant("settle" as const),
      how: fc.constantFrom(
        "done" as const,
        "done" as const,
        "done" as const,
        "finish" as const,
        "retry" as const,
        "later" as const,
        "follow" as const
      ),
      pick: fc.nat(100)
    })
  },
  {
    weight: 3,
    arbitrary: fc.record({
      do: fc.constantFrom("cancel" as const, "reschedule" as const, "update" as const),
      pick: fc.nat(1000)
    })
  },
  {
    weight: 3,
    arbitrary: fc.record({
      do: fc.constantFrom(
        "ring" as const,
        "ring" as const,
        "pause" as const,
        "resume" as const,
        "resume" as const,
        "drain" as const,
        "again" as const
      )
    })
  }
)

interface Job {
  readonly id: string
  value: number
  attempts: number
  crashes: number
  /** Cancelled: its worker has not said that the handler has ended. */
  state: "waiting" | "delayed" | "active" | "cancelled" | "gone"
  worker: number
}

interface Deque {
  /** The oldest job first. */
  places: Array<{ readonly id: string; readonly stolen: boolean }>
  own: number
  stolen: number
  shared: number
  lost: number
}

layer(TestServer.layer, live)("the queue actor with deques", (it) => {
  // With `loose`, jobs leave deques by other ways, and the model does not know what is in the deques.
  for (
    const [what, loose, keep, most, credit] of [
      ["steals half of the oldest jobs of the longest deque", false, 0, 256, 2],
      ["steals no more than the owners allow", false, 3, 2, 6],
      ["loses no job, and runs none twice, while jobs are cancelled and changed", true, 1, 256, 4]
    ] as const
  ) {
    it.effect(what, () =>
      Effect.gen(function*() {
        const redis = yield* client(yield* TestServer)
        yield* Effect.promise(() =>
          fc.assert(
            fc.asyncProperty(
              fc.array(step, { minLength: 5, maxLength: 60 }),
              (steps) => {
                const queue = actor(redis, freshNamespace(), "queue:q")
                const size = async (name: string) =>
                  (await redis.hgetBuffer(queue.key, `D${name}`))?.readDoubleLE(1 + 8 * 3) ?? 0
                return run(queue, size, steps, { loose, keep, most, credit })
              }
            ),
            { numRuns: runs(25), endOnFailure: false }
          )
        )
      }))
  }

  const opened = (policy: { readonly keep?: number; readonly most?: number } = {}) =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      const queue = actor(redis, freshNamespace(), "queue:q")
      let offers = 0
      const { keep = 0, most = 256 } = policy
      return yield* Effect.promise(async () => {
        await queue.open("producer")
        await queue.send("producer", "queue.join", joinArgs)
        const deques = async () => {
          const [, found] = await queue.look("queue.deques", [])
          return new Map((found as Array<[string, ...Array<number>]>).map(([name, ...counts]) => [name, counts]))
        }
        return {
          queue,
          deques,
          join: async (name: string, credit: number) => {
            await queue.open(name)
            await queue.send(name, "queue.employ", ["w", credit, name, 1, keep, most])
          },
          offer: (name: string, count: number) =>
            queue.send("producer", "queue.offer", [
              Array.from({ length: count }, (_, at) => `${at % 10}${name}`).join(""),
              Array.from({ length: count }, () => `1o${name.length}`).join(" "),
              "node",
              ++offers
            ]),
          begun: async (name: string) =>
            (await queue.mail(name)).filter(([, , tag]) => tag === "deliver").flatMap(([, , , , , items]) =>
              (items as Array<[string]>).map(([id]) => id)
            ),
          done: (name: string, id: string, take = 1) =>
            queue.send(name, "queue.done", ["w", `${id[0]} ${id.slice(1)}`, take])
        }
      })
    })

  it.effect("forgets the deques of dead workers, though ids of jobs are known for longer", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      yield* Effect.promise(async () => {
        const queue = actor(redis, freshNamespace(), "queue:q")
        await queue.open("dies")
        await queue.send("dies", "queue.employ", ["w", 1, "deque", 1, 0, 256])
        const [, stamp, first] = await queue.send("dies", "queue.offer", ["1i", "1i1", "node", 1])
        await queue.send("dies", "queue.finish", ["w", `n${stamp}-${first}`, "i", "", "", 0, 1])
        await queue.end("dies")
        await queue.reap("dies")
        assert.deepStrictEqual((await redis.hkeys(queue.key)).filter((field) => /^[DEw]/.test(field)), [])
        await queue.open("lives")
        await queue.send("lives", "queue.employ", ["w", 1, "other", 1, 0, 256])
        const [, found] = await queue.look("queue.deques", [])
        assert.deepStrictEqual((found as Array<[string]>).map(([name]) => name), ["other"])
      })
    }))

  it.effect("hands the jobs of a deque without a worker to others, before other jobs", () =>
    Effect.gen(function*() {
      const { begun, deques, done, join, offer, queue } = yield* opened({ keep: 1000 })
      yield* Effect.promise(async () => {
        await join("dies", 0)
        await join("lives", 0)
        await offer("dies", 300)
        await offer("lives", 300)
        await queue.send("producer", "queue.offer", ["1", "1", "other", 1])
        assert.deepStrictEqual([...await deques()].map(([name, [size]]) => [name, size]), [["dies", 300], [
          "lives",
          300
        ]])
        await queue.end("dies")
        await queue.reap("dies")
        await join("idle", 1)
        const number = (id: string) => Number(id.split("-")[1])
        for (let at = 1; at <= 300; at++) {
          const ids = await begun("idle")
          await done("idle", ids.at(-1)!)
        }
        // One of eight is another one: the plain job.
        const ids = (await begun("idle")).slice(0, 301)
        assert.sameMembers(ids.map(number), [...Array.from({ length: 300 }, (_, at) => at + 1), 601])
        assert.deepStrictEqual([...(await deques()).keys()], ["lives", "idle"])
      })
    }))

  it.effect("steals first from a worker whose session has ended, however many jobs that keeps", () =>
    Effect.gen(function*() {
      const { begun, join, offer, queue } = yield* opened({ keep: 1000 })
      yield* Effect.promise(async () => {
        await join("dies", 0)
        await join("lives", 0)
        await offer("lives", 50)
        await offer("dies", 10)
        await queue.end("dies")
        await join("idle", 1)
        const [first] = await begun("idle")
        assert.isAbove(Number(first!.split("-")[1]), 50)
      })
    }))

  it.effect("takes one of eight jobs from the oldest end of a deque, and one from no deque", () =>
    Effect.gen(function*() {
      const { begun, done, join, offer, queue } = yield* opened()
      yield* Effect.promise(async () => {
        await join("w", 0)
        await offer("w", 100)
        await queue.send("producer", "queue.offer", ["12", "1 1", "other", 1])
        await queue.send("w", "queue.credit", ["w", 1, ""])
        for (let at = 0; at < 16; at++) await done("w", (await begun("w")).at(-1)!)
        const order = (await begun("w")).slice(0, 16).map((id) => id.slice(0, 1) + id.split("-")[1])
        assert.deepStrictEqual(order, [
          ...["N100", "N99", "N98", "N1", "N97", "N96", "N95", "n101"],
          ...["N94", "N93", "N92", "N2", "N91", "N90", "N89", "n102"]
        ])
      })
    }))

  it.effect("leaves the keys of other workers where they are when a worker comes or goes", () =>
    Effect.gen(function*() {
      const { deques, join, queue } = yield* opened()
      yield* Effect.promise(async () => {
        const named = ["w1", "w2", "w3", "w4"]
        for (const [at, name] of named.entries()) {
          await queue.open(name)
          await queue.send(name, "queue.employ", ["w", 0, name, (at + 1) * 429_496_729, 0, 256])
        }
        const key = (at: number) => at * 2_654_435 % 2_147_483_647
        let offers = 0
        const place = async (count: number) => {
          await queue.send("producer", "queue.offer", [
            "1".repeat(count),
            Array.from({ length: count }, (_, at) => `1c${key(at)}`).join(" "),
            "node",
            ++offers
          ])
          const sizes = new Map([...await deques()].map(([name, [size]]) => [name, size!]))
          await queue.send("producer", "queue.drain", ["1", ""])
          return sizes
        }
        const before = await place(200)
        for (const size of before.values()) assert.isTrue(size > 25 && size < 85, `${[...before]}`)
        await queue.send("w4", "session.leave", ["w"])
        const after = await place(200)
        for (const name of ["w1", "w2", "w3"]) assert.isAbove(after.get(name)!, before.get(name)!)
        await join("w5", 0)
        const last = await place(200)
        for (const name of ["w1", "w2", "w3"]) assert.isAtMost(last.get(name)!, after.get(name)!)
      })
    }))

  it.effect("counts a cancelled job as one in hand until its handler has ended", () =>
    Effect.gen(function*() {
      const { begun, deques, done, join, offer, queue } = yield* opened({ keep: 1000 })
      yield* Effect.promise(async () => {
        const counts = async () => {
          const found = (await deques()).get("w")!
          return { waiting: found[0], active: found[1], idle: found[6]! }
        }
        const cancelled = async () => {
          const [job] = (await begun("w")).slice(-1)
          assert.deepStrictEqual(await queue.send("producer", "queue.cancel", [job!]), ["cancelled", true])
          return job!
        }
        await join("w", 1)
        await offer("w", 3)
        const before = await counts()
        assert.deepInclude(before, { waiting: 2, active: 1 })
        const first = await cancelled()
        const until = Date.now() + 20
        while (Date.now() < until) assert.deepStrictEqual(await counts(), before)
        await done("w", first)
        assert.deepStrictEqual(await counts(), { ...before, waiting: 1 })
        // A worker that takes no other job has none then.
        await done("w", await cancelled(), 0)
        assert.deepInclude(await counts(), { waiting: 1, active: 0 })
        while ((await counts()).idle < before.idle + 5);
        // It dies with a cancelled job, and its deque goes to others.
        await queue.send("w", "queue.credit", ["w", 1, ""])
        await offer("w", 200)
        await cancelled()
        assert.deepInclude(await counts(), { waiting: 200, active: 1 })
        await queue.end("w")
        await queue.reap("w")
        await join("other", 300)
        assert.deepStrictEqual((await deques()).get("other")!.slice(0, 6), [0, 200, 0, 0, 200, 0])
        const [, ready, , active] = await queue.look("queue.state", [])
        assert.deepStrictEqual([...ready.map(Number), active], [0, 0, 0, 0, 200])
        await queue.open("again")
        await queue.send("again", "queue.employ", ["w", 0, "w", 1, 0, 256])
        assert.deepInclude(await counts(), { waiting: 0, active: 0 })
      })
    }))

  it.effect("hands jobs that ran after others to any worker, and lists cancelled ones nowhere", () =>
    Effect.gen(function*() {
      const { begun, deques, done, join, offer, queue } = yield* opened()
      yield* Effect.promise(async () => {
        const listed = async (state: string) => {
          let count = 0
          for (let place = "";;) {
            const [, next, found] = await queue.look("queue.jobs", [state, place, 100])
            count += found.length
            if (next === "") return count
            place = next
          }
        }
        await join("w", 300)
        await offer("w", 300)
        const ids = await begun("w")
        for (const id of ids.slice(1)) await queue.send("producer", "queue.cancel", [id])
        await offer("w", 2)
        const before = `f${ids[0]!.length} ${ids[0]}`
        await queue.send("producer", "queue.offer", [`1${before}`, `1p${before.length}`, "after", 1])
        assert.deepStrictEqual([await listed("waiting"), await listed("active"), await listed("blocked")], [2, 1, 1])
        await done("w", ids[0]!, 0)
        assert.deepStrictEqual([await listed("waiting"), await listed("active"), await listed("blocked")], [3, 0, 0])
        assert.strictEqual((await deques()).get("w")![0], 2)
        await join("other", 1)
        assert.strictEqual((await begun("other")).length, 1)
        assert.deepStrictEqual((await deques()).get("other")!.slice(2, 5), [0, 0, 1])
      })
    }))

  it.effect("measures how long a worker had no job", () =>
    Effect.gen(function*() {
      const { begun, deques, done, join, offer } = yield* opened()
      yield* Effect.promise(async () => {
        const idle = async () => (await deques()).get("w")![6]!
        const pass = async (from: number) => {
          while (await idle() < from + 5);
        }
        await join("w", 1)
        await pass(0)
        await offer("w", 1)
        const before = await idle()
        const until = Date.now() + 20
        while (Date.now() < until) assert.strictEqual(await idle(), before)
        await done("w", (await begun("w"))[0]!)
        await pass(before)
      })
    }))
})

const joinArgs = ["p", "1", 0, 0, 0, 60_000, 1000, 0, 1000, 0, 0, 1, 0, 0, 1, 0, ""]

const run = async (
  queue: ReturnType<typeof actor>,
  /** Of a deque, also if no worker has it. */
  sizeOf: (name: string) => Promise<number>,
  steps: ReadonlyArray<Step>,
  { credit, keep, loose, most }: {
    readonly loose: boolean
    readonly keep: number
    readonly most: number
    readonly credit: number
  }
) => {
  const jobs = new Map<string, Job>()
  const deques = new Map<number, Deque>()
  // What was in the deques of workers that have left.
  const left = new Map<number, Deque["places"]>()
  const sessions = workers.map(() => 0)
  const joined = workers.map(() => false)
  const read = new Map<string, number>()
  let [number, values, paused, named] = [0, 0, false, 0]
  const nameOf = (worker: number) => `s${worker}x${sessions[worker]}`
  await queue.open("producer")
  await queue.send("producer", "queue.join", joinArgs)
  for (const worker of workers) await queue.open(nameOf(worker))

  const all = () => [...jobs.values()]
  // Cancelled jobs are active until their handlers have ended.
  const active = (worker?: number) =>
    all().filter((job) =>
      (job.state === "active" || job.state === "cancelled") && (worker === undefined || job.worker === worker)
    )
  const waiting = () => all().filter(({ state }) => state === "waiting")
  const stored = () => new Set([...deques.values()].flatMap(({ places }) => places.map(({ id }) => id)))
  const spare = (worker: number) => {
    const size = deques.get(worker)!.places.length
    return Math.min(size, Math.max(0, size - keep))
  }

  /** A worker was handed these jobs, all at once. */
  const begin = (worker: number, items: ReadonlyArray<[string, number, number]>) => {
    assert.isTrue(joined[worker])
    assert.isFalse(paused)
    for (const [id, count, value] of items) {
      const job = jobs.get(id)
      assert.isDefined(job, `${id} was never offered`)
      assert.strictEqual(job!.state, "waiting", id)
      assert.strictEqual(value, job!.value)
      job!.attempts++
      assert.strictEqual(count, job!.attempts + 65_536 * job!.crashes)
    }
    if (!loose) place(worker, items.map(([id]) => id))
    for (const [id] of items) Object.assign(jobs.get(id)!, { state: "active", worker })
    assert.isAtMost(active(worker).length, credit)
  }
  const place = (worker: number, ids: Array<string>) => {
    const own = deques.get(worker)
    const dealt = stored()
    const others = waiting().filter(({ id }) => !dealt.has(id))
    if ((own === undefined || own.places.length === 0) && others.length === 0) {
      const from = [...deques.keys()].find((other) => deques.get(other)!.places.some(({ id }) => id === ids[0]))!
      const victim = deques.get(from)!
      for (const other of deques.keys()) {
        assert.isAtMost(spare(other), spare(from), "a longer deque was passed over")
        if (deques.get(other)!.places.length > 0) {
          assert.strictEqual(active(other).length, credit, "a worker that could go on was stolen from")
        }
      }
      const half = Math.min(Math.ceil(victim.places.length / 2), spare(from), most)
      const count = own === undefined ? Math.min(half, credit - active(worker).length) : half
      const taken = victim.places.splice(0, count)
      victim.lost += count
      if (own === undefined) return assert.deepStrictEqual(ids, taken.map(({ id }) => id))
      own.places = taken.map(({ id }) => ({ id, stolen: true }))
    }
    for (const id of ids) {
      if (!dealt.has(id) || own === undefined) {
        assert.isFalse(dealt.has(id))
        if (own !== undefined) own.shared++
        continue
      }
      const { places } = own
      const at = places[0]?.id === id ? 0 : places.length - 1
      assert.strictEqual(places[at]?.id, id, "neither the newest job of its deque nor the oldest")
      const { stolen } = places.splice(at, 1)[0]!
      if (stolen) own.stolen++
      else own.own++
    }
  }
  const take = async () => {
    const begun: Array<readonly [token: number, worker: number, items: Array<[string, number, number]>]> = []
    for (const worker of workers) {
      const name = nameOf(worker)
      const events = await queue.mail(name)
      for (const event of events.slice(read.get(name) ?? 0)) {
        if (event[2] === "deliver") begun.push([event[4], worker, event[5]])
      }
      read.set(name, events.length)
    }
    for (const [, worker, items] of begun.toSorted(([x], [y]) => x - y)) begin(worker, items)
  }
  const drop = (worker: number, crashed: boolean) => {
    for (const job of active(worker)) {
      const isCancelled = job.state === "cancelled"
      job.state = isCancelled ? "gone" : "waiting"
      if (isCancelled) continue
      if (crashed) job.crashes++
      else job.attempts--
    }
    joined[worker] = false
    // Its jobs can go to any worker now, unless it comes back before others had credit for them.
    if (deques.has(worker)) left.set(worker, deques.get(worker)!.places)
    deques.delete(worker)
  }
  const add = (id: string, value: number, to: number | undefined) => {
    jobs.set(id, { id, value, attempts: 0, crashes: 0, state: "waiting", worker: -1 })
    if (to !== undefined) deques.get(to)?.places.push({ id, stolen: false })
  }
  const offer = async ({ count, how, to }: Extract<Step, { do: "offer" }>) => {
    const name = names[to]!
    const bodies = Array.from({ length: count }, () => String(++values))
    const ids = bodies.map(() => `x/${++named}`)
    const parts = bodies.map((body, at): [value: string, shape: string] => {
      switch (how) {
        case "to":
          return [body + name, `${body.length}o${name.length}`]
        case "id":
          return [body + ids[at] + name, `${body.length}i${ids[at]!.length}o${name.length}`]
        case "key":
          return [body, `${body.length}c${weights[to]! + 1}`]
        case "plain":
          return [body, `${body.length}`]
      }
    })
    const args = [parts.map(([value]) => value).join(""), parts.map(([, shape]) => shape).join(" "), "node", ++number]
    const [, stamp, first, known] = await queue.send("producer", "queue.offer", args)
    assert.deepStrictEqual(known, [])
    const home = how === "plain" ? undefined : how === "key" ? homeOf(weights[to]! + 1) : to
    for (const [at, body] of bodies.entries()) {
      add(`${how === "plain" ? "n" : "N"}${stamp}-${first + at}`, Number(body), home)
    }
  }
  /** The worker that weighs a key most. */
  const homeOf = (key: number): number | undefined => {
    const prime = 2_147_483_647
    const weigh = (worker: number) => {
      const mixed = (key ^ weights[worker]!) * 48_271 % prime
      return (mixed ^ (mixed >>> 15)) * 69_621 % prime
    }
    return [...deques.keys()].toSorted((x, y) => weigh(y) - weigh(x))[0]
  }
  const settle = async (pick: number, how: Extract<Step, { do: "settle" }>["how"]) => {
    const job = active()[pick % Math.max(1, active().length)]
    if (job === undefined) return
    const isCancelled = job.state === "cancelled"
    await tell(job, how, isCancelled)
    // It was cancelled, regardless of what its worker says.
    if (isCancelled) job.state = "gone"
  }
  const tell = async (job: Job, how: Extract<Step, { do: "settle" }>["how"], isCancelled: boolean) => {
    const { id, worker } = job
    const name = nameOf(worker)
    switch (how) {
      case "done":
        job.state = "gone"
        return void await queue.send(name, "queue.done", ["w", `${id[0]} ${id.slice(1)}`, 1])
      case "finish":
        job.state = "gone"
        return void await queue.send(name, "queue.finish", ["w", id, "", "", "", 0, 1])
      case "follow": {
        job.state = "gone"
        const own = names[worker]
        const body = String(++values)
        await queue.send(name, "queue.complete", [
          ...["w", id, "", "", "", 0, 1],
          ...own === undefined ? [body, `${body.length}`] : [body + own, `${body.length}o${own.length}`],
          ""
        ])
        if (isCancelled) return
        // The answer does not say its id, and it may have begun by then.
        const found = new Set<string>()
        for (const state of ["waiting", "active"]) for (const id of await list(state)) found.add(id)
        const fresh = [...found].find((id) => !jobs.has(id))
        return add(fresh!, Number(body), own === undefined ? undefined : worker)
      }
      case "retry":
      case "later":
        job.state = how === "later" ? "delayed" : "waiting"
        await queue.send(name, "queue.retry", ["w", id, how === "later" ? 1 : 0, "1", 1])
    }
  }
  const list = async (state: string): Promise<Array<string>> => {
    const ids: Array<string> = []
    for (let place = "";;) {
      const [, next, found] = await queue.look("queue.jobs", [state, place, 50])
      ids.push(...(found as Array<[string, number, [string]]>).map(([, , [id]]) => id))
      if (next === "") return ids
      place = next
    }
  }
  const ring = async () => {
    // Every delay is over by then.
    const until = Date.now() + 3
    while (Date.now() < until) await queue.look("queue.state", [])
    await queue.ring()
    for (const job of all()) if (job.state === "delayed") job.state = "waiting"
  }
  const once = async (next: Step): Promise<void> => {
    switch (next.do) {
      case "offer":
        return offer(next)
      case "join":
      case "repeat": {
        const { worker } = next
        if (next.do === "repeat" && !joined[worker]) return
        const name = names[worker]
        if (name !== undefined && !joined[worker]) {
          const places = await sizeOf(name) > 0 ? left.get(worker)! : []
          deques.set(worker, { places, own: 0, stolen: 0, shared: 0, lost: 0 })
        }
        const [tag, , , open, cancelled] = name === undefined
          ? await queue.send(nameOf(worker), "queue.work", ["w", credit])
          : await queue.send(nameOf(worker), "queue.employ", ["w", credit, name, weights[worker]!, keep, most])
        assert.strictEqual(tag, "joined")
        const own = (state: Job["state"]) => active(worker).filter((job) => job.state === state).map(({ id }) => id)
        assert.sameMembers((open as Array<[string]>).map(([id]) => id), own("active"))
        assert.sameMembers(cancelled, own("cancelled"))
        joined[worker] = true
        return
      }
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
        // A cancelled job would leave its place in a deque behind, also if the worker of that has left.
        const placed = new Set([...stored(), ...[...left.values()].flatMap((places) => places.map(({ id }) => id))])
        const open = all().filter(({ id, state }) =>
          state !== "cancelled" && state !== "gone" && (loose || !placed.has(id))
        )
        const job = open[next.pick % Math.max(1, open.length)]
        if (job === undefined) return
        const isActive = job.state === "active"
        job.state = isActive ? "cancelled" : "gone"
        assert.deepStrictEqual(await queue.send("producer", "queue.cancel", [job.id]), ["cancelled", isActive])
        return
      }
      case "reschedule": {
        const open = loose ? waiting() : []
        const job = open[next.pick % Math.max(1, open.length)]
        if (job === undefined) return
        assert.deepStrictEqual(await queue.send("producer", "queue.reschedule", [job.id, "1", 1]), ["rescheduled"])
        // Its time may have come, or come with any call.
        return ring()
      }
      case "update": {
        const open = waiting().filter(({ attempts, crashes }) => attempts + crashes === 0)
        const job = open[next.pick % Math.max(1, open.length)]
        if (job === undefined) return
        job.value = ++values
        assert.deepStrictEqual(await queue.send("producer", "queue.update", [job.id, String(job.value)]), ["updated"])
        return
      }
      case "drain": {
        const gone = waiting()
        let count = 0
        for (;;) {
          const [, some, more] = await queue.send("producer", "queue.drain", ["", ""])
          count += some
          if (!more) break
        }
        assert.strictEqual(count, gone.length)
        for (const job of gone) job.state = "gone"
        for (const deque of deques.values()) deque.places = []
        return
      }
      case "ring":
        return ring()
      case "again": {
        const answer = await queue.repeat("producer")
        assert.strictEqual(answer![0], "ok")
        return
      }
      case "pause":
      case "resume":
        paused = next.do === "pause"
        await queue.send("producer", "queue.pause", [paused ? "1" : ""])
        return
    }
  }
  const check = async () => {
    const [, counts, delayed, working] = await queue.look("queue.state", [])
    const count = (state: Job["state"]) => all().filter((job) => job.state === state).length
    const sum = (counts as Array<string>).reduce((sum, some) => sum + Number(some), 0)
    assert.deepStrictEqual([sum, delayed, working], [waiting().length, count("delayed"), active().length])
    assert.sameMembers(await list("waiting"), waiting().map(({ id }) => id))
    const running = active().filter(({ state }) => state === "active")
    assert.sameMembers(await list("active"), running.map(({ id }) => id))
    const [, found] = await queue.look("queue.deques", [])
    if (!loose) {
      assert.sameDeepMembers(
        (found as Array<Array<unknown>>).map((state) => state.slice(0, 7)),
        [...deques].map(([worker, { lost, own, places, shared, stolen }]) => [
          names[worker]!,
          places.length,
          active(worker).length,
          own,
          stolen,
          shared,
          lost
        ])
      )
    }
    // What can begin has begun, if a worker takes it.
    const free = workers.filter((worker) => joined[worker] && active(worker).length < credit)
    if (paused || free.length === 0) return
    if (loose) return assert.isAtMost(waiting().length, keep * deques.size)
    const dealt = stored()
    assert.isEmpty(waiting().filter(({ id }) => !dealt.has(id)))
    for (const worker of deques.keys()) {
      assert.strictEqual(spare(worker), 0)
      if (free.includes(worker)) assert.isEmpty(deques.get(worker)!.places)
    }
  }
  for (const next of steps) {
    await once(next)
    await take()
    await check()
  }
  // Everything ends while one worker lives.
  for (const next of [{ do: "resume" }, { do: "ring" }, { do: "join", worker: 0 }] as const) {
    await once(next)
    await take()
  }
  for (const worker of [1, 2, 3]) {
    if (!joined[worker]) continue
    await once({ do: "leave", worker })
    await take()
  }
  while (active().length > 0) {
    await settle(0, "done")
    await take()
  }
  assert.isEmpty(waiting())
  await check()
}
