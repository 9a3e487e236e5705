/** Schedules of the queue actor, driven directly with random requests: one job for each tick, under any history. */
import { assert, layer } from "@effect/vitest"
import { Effect } from "effect"
import * as fc from "fast-check"
import { actor, client } from "./support/actor.ts"
import { runs } from "./support/effort.ts"
import { freshNamespace, TestServer } from "./support/live.ts"

const names = ["a", "b c", "é\u0000"] as const

type Step =
  | { readonly do: "schedule"; readonly name: number; readonly every: number; readonly missed: "once" | "skip" | "all" }
  | { readonly do: "unschedule"; readonly name: number }
  | { readonly do: "give" | "late"; readonly member: number }
  | { readonly do: "join" | "leave" | "end"; readonly member: number }
  | { readonly do: "ring" | "repeat" | "pause" | "resume" }

const member = fc.integer({ min: 0, max: 1 })
const name = fc.integer({ min: 0, max: 2 })

const step = fc.oneof(
  {
    weight: 3,
    arbitrary: fc.record({
      do: fc.constant("schedule" as const),
      name,
      every: fc.constantFrom(0, 0, 3),
      missed: fc.constantFrom("once" as const, "skip" as const, "all" as const)
    })
  },
  { weight: 1, arbitrary: fc.record({ do: fc.constant("unschedule" as const), name }) },
  {
    weight: 6,
    arbitrary: fc.record({ do: fc.constantFrom("give" as const, "give" as const, "late" as const), member })
  },
  {
    weight: 2,
    arbitrary: fc.record({ do: fc.constantFrom("join" as const, "leave" as const, "end" as const), member })
  },
  {
    weight: 8,
    arbitrary: fc.record({
      do: fc.constantFrom(
        "ring" as const,
        "ring" as const,
        "ring" as const,
        "repeat" as const,
        "pause" as const,
        "resume" as const
      )
    })
  }
)

// A calendar of the tests has a tick at each multiple of this, in ms; so do members that give ticks.
const grid = 4
const ahead = 120
// So many that were missed are made up for.
const mostMissed = 100

interface Plan {
  readonly number: number
  readonly every: number
  /** What becomes of missed ticks, since when; and the first time that it may have a tick. */
  missed: string
  readonly from: number
}

type Job = readonly [tick: number, number: number]

layer(TestServer.layer, { excludeTestServices: true, timeout: "120 seconds" })(
  "the schedules of a queue actor",
  (it) => {
    it.effect("offer each tick once", () =>
      Effect.gen(function*() {
        const redis = yield* client(yield* TestServer)
        yield* Effect.promise(() =>
          fc.assert(
            fc.asyncProperty(
              fc.array(step, { minLength: 5, maxLength: 80 }),
              (steps) => run(actor(redis, freshNamespace(), "queue:q"), steps)
            ),
            { numRuns: runs(60), endOnFailure: false, includeErrorInReport: true }
          )
        )
      }))
  }
)

const run = async (queue: ReturnType<typeof actor>, steps: ReadonlyArray<Step>) => {
  const plans = new Map<string, Plan>()
  const sessions = [0, 0]
  const joined = [false, false]
  const heard = new Map<string, number>()
  const asked: Array<Array<ReadonlyArray<any>>> = [[], []]
  let [numbers, paused] = [0, false]
  // Jobs of the schedules that there are: each has its number as payload.
  const jobs = new Map<number, Array<Job>>()
  const nameOf = (at: number) => `m${at}x${sessions[at]}`
  await queue.open("user")
  await queue.send("user", "queue.join", ["m", "1", 0, 0, 0, 60_000, 1000, 0, 3, 0, 0, 1, 0, 0, 1, 0, ""])
  for (const at of [0, 1]) await queue.open(nameOf(at))

  // Members are notified of schedules that are short of ticks.
  const listen = async (at: number) => {
    const session = nameOf(at)
    const events = await queue.mail(session)
    for (const event of events.slice(heard.get(session) ?? 0)) {
      if (event[0] !== "changed" || event[2] !== "ticks") continue
      assert.isTrue(joined[at], "told, and no member")
      asked[at]!.push(event.slice(3))
    }
    heard.set(session, events.length)
  }
  const ticksFrom = (last: number, now: number) => {
    const ticks: Array<number> = []
    const from = Math.max(last, now - mostMissed * grid)
    for (let tick = (Math.floor(from / grid) + 1) * grid; tick <= now + ahead * grid; tick += grid) {
      ticks.push(tick)
    }
    return ticks
  }
  const give = async (session: string, [name, version, last, now]: ReadonlyArray<any>) =>
    await queue.send(session, "queue.ticks", ["m", name, version, last, ticksFrom(last, now).join(" ")])
  const schedule = async (session: string, name: string, every: number, missed: string) => {
    const known = plans.get(name)
    const number = known !== undefined && known.every === every ? known.number : ++numbers
    const times = JSON.stringify([every])
    const reply = await queue.send(session, "queue.schedule", ["m", name, times, "", String(number), every, missed])
    const [tag, version, last, now, short] = reply as [string, number, number, number, boolean]
    assert.strictEqual(tag, "scheduled")
    if (number !== known?.number) plans.set(name, { number, every, missed: "any", from: last })
    plans.get(name)!.missed = plans.get(name)!.missed === "any" || plans.get(name)!.missed === missed ? missed : "mixed"
    if (short) await give(session, [name, version, last, now])
  }
  const waiting = async () => {
    const found: Array<readonly [body: number, job: Job]> = []
    for (let place = "";;) {
      const [, next, page] = await queue.look("queue.jobs", ["waiting", place, 64]) as [string, string, Array<any>]
      for (const [, , [id, count, body, field, schedule]] of page) {
        assert.strictEqual(field, "s")
        assert.strictEqual(count, 0)
        const [tick, ...rest] = (schedule as string).split(" ")
        assert.include(names, rest.join(" "))
        found.push([body, [Number(tick), Number((id as string).split("-")[1])]])
      }
      if (next === "") return found
      place = next
    }
  }
  const check = async (now: number) => {
    const found = await waiting()
    jobs.clear()
    for (const [body, job] of found) jobs.set(body, [...jobs.get(body) ?? [], job])
    for (const plan of plans.values()) {
      const ticks = (jobs.get(plan.number) ?? []).toSorted((x, y) => x[1] - y[1]).map(([tick]) => tick)
      const step = plan.every > 0 ? plan.every : grid
      for (const [at, tick] of ticks.entries()) {
        assert.isAtMost(tick, now, "ahead of its time")
        assert.strictEqual((tick - (plan.every > 0 ? plan.from : 0)) % step, 0)
        assert.isAbove(tick, at === 0 ? plan.from : ticks[at - 1]!, "a tick twice, or in disorder")
        const passed = (tick - (at === 0 ? plan.from : ticks[at - 1]!)) / step
        // Unless more were missed at once than are made up for.
        if (plan.missed === "all" && ticks.length - at < mostMissed) assert.isAtMost(passed, 1, "a tick was left out")
      }
    }
  }
  const total = () => [...jobs.values()].flat().length

  for (const next of steps) {
    const before = total()
    switch (next.do) {
      case "schedule":
        await schedule("user", names[next.name]!, next.every, next.missed)
        break
      case "unschedule": {
        const [tag] = await queue.send("user", "queue.unschedule", [names[next.name]!])
        assert.strictEqual(tag, plans.delete(names[next.name]!) ? "removed" : "missing")
        break
      }
      case "give":
      case "late": {
        // The news that it answers may be old by now.
        const told = next.do === "late" ? asked[next.member]![0] : asked[next.member]!.pop()
        if (told !== undefined) await give(nameOf(next.member), told)
        break
      }
      case "join":
        const again = ["m", "", 0, 0, 0, 60_000, 1000, 0, 3, 0, 0, 1, 0, 0, 1, 0, ""]
        await queue.send(nameOf(next.member), "queue.join", again)
        joined[next.member] = true
        break
      case "leave":
        if (joined[next.member]) await queue.send(nameOf(next.member), "session.leave", ["m"])
        joined[next.member] = false
        break
      case "end":
        await queue.end(nameOf(next.member))
        await queue.reap(nameOf(next.member))
        joined[next.member] = false
        asked[next.member] = []
        sessions[next.member]!++
        await queue.open(nameOf(next.member))
        break
      case "repeat":
        await queue.repeat("user")
        await queue.repeat(nameOf(0))
        break
      case "pause":
      case "resume":
        await queue.send("user", "queue.pause", [next.do === "pause" ? "1" : ""])
        paused = next.do === "pause"
        break
      case "ring":
        await queue.ring()
        break
    }
    for (const at of [0, 1]) if (joined[at]) await listen(at)
    await check(Date.now())
    if (next.do !== "ring" || paused) assert.strictEqual(total(), before)
    const [, schedules] = await queue.look("queue.schedules", ["", 100])
    assert.sameMembers((schedules as Array<[string]>).map(([name]) => name), [...plans.keys()])
  }
  // After all that, the actor tells a living member, and the ticks go on.
  await queue.send("user", "queue.pause", [""])
  for (const [name, { every, number }] of plans) {
    const seen = jobs.get(number)?.length ?? 0
    for (let tries = 0; (jobs.get(number)?.length ?? 0) <= seen; tries++) {
      assert.isBelow(tries, 200, `${JSON.stringify(name)}, every ${every}, has stopped`)
      await queue.ring()
      const events = await queue.mail("user")
      const told = events.slice(heard.get("user") ?? 0).filter((event) => event[2] === "ticks")
      heard.set("user", events.length)
      for (const event of told) await give("user", event.slice(3))
      for (const at of [0, 1]) {
        if (!joined[at]) continue
        await listen(at)
        for (const told of asked[at]!.splice(0)) await give(nameOf(at), told)
      }
      await check(Date.now())
    }
  }
}
