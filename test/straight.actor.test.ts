/**
 * The straight paths of locks and offers (lua/LockStraight.lua, lua/QueueStraight.lua) beside the usual one: random calls to two servers with
 * one clock, of which one has no straight paths. All answers and all data are the same after each of them.
 */
import { assert, layer } from "@effect/vitest"
import { Effect } from "effect"
import * as fc from "fast-check"
import type { Redis } from "ioredis"
import { actor, type Asked, client } from "./support/actor.ts"
import { runs } from "./support/effort.ts"
import { freshNamespace, TestServer } from "./support/live.ts"
import { standalone } from "./support/servers.ts"
import { replaced } from "./torture/library.ts"

const live = { excludeTestServices: true, timeout: "120 seconds" } as const

const sessions = ["a", "b"] as const

// Data that some other program has put in the place of these.
const foreign = ["queue:q", "queue-even:q", "queue-odd:q", "queue-normal:q", "lock:0"] as const

// Without options, and with some: by the bytes of the body that stands in front.
const shapes = ["", "u", "l", "f", "d500", "e700", "a3", "t500", "r", "i1", "x1", "g1", "qa2", "z1"] as const
const texts: { readonly [shape: string]: string } = { i1: "i", x1: "x", g1: "g", qa2: "sq", z1: "9" }

const step = fc.oneof(
  { weight: 8, arbitrary: fc.record({ do: fc.constant("offer" as const), body: fc.jsonValue() }) },
  { weight: 2, arbitrary: fc.record({ do: fc.constant("wish" as const), shape: fc.constantFrom(...shapes) }) },
  { weight: 3, arbitrary: fc.record({ do: fc.constant("work" as const), count: fc.integer({ min: 0, max: 3 }) }) },
  { weight: 5, arbitrary: fc.record({ do: fc.constantFrom("done" as const, "retry" as const), pick: fc.nat(9) }) },
  {
    weight: 7,
    arbitrary: fc.record({ do: fc.constantFrom("take" as const, "take" as const, "release" as const), lock: fc.nat(1) })
  },
  { weight: 2, arbitrary: fc.record({ do: fc.constantFrom("leave" as const, "repeat" as const, "end" as const) }) },
  { weight: 1, arbitrary: fc.record({ do: fc.constant("foreign" as const), what: fc.constantFrom(...foreign) }) },
  {
    weight: 4,
    arbitrary: fc.record({ do: fc.constant("pass" as const), millis: fc.constantFrom(1, 400, 9000, 40_000, -3000) })
  }
)

type Step = typeof step extends fc.Arbitrary<infer S> ? S : never

const steps = fc.array(fc.tuple(fc.constantFrom(...sessions), step), { minLength: 30, maxLength: 90, size: "max" })

const clocked = (script: string) =>
  replaced(script, "call('TIME')", "{ call('HGET', 'clock', 's'), call('HGET', 'clock', 'u') }")

const counted = (script: string) =>
  replaced(
    script,
    "if reply then return reply end",
    "if reply then call('HINCRBY', 'straight', argv[3], 1) return reply end"
  )

const usual = (script: string) => replaced(script, "local act = found and straight[argv[3]]", "local act = nil")

const latin = (found: Record<string, Buffer>) =>
  Object.entries(found).map(([field, value]) => [field, value.toString("latin1")]).toSorted()

const dataOf = async (redis: Redis, key: string): Promise<unknown> => {
  const type = await redis.type(key)
  if (type === "string") return await redis.get(key)
  if (type === "hash") return latin(await redis.hgetallBuffer(key))
  if (type === "set") return (await redis.smembers(key)).toSorted()
  if (type === "zset") return await redis.zrange(key, "0", "-1", "WITHSCORES")
  const groups = (await redis.xinfo("GROUPS", key) as Array<Array<string>>).map((group) => group[1]!)
  return [
    await redis.xrange(key, "-", "+"),
    await Promise.all(groups.map(async (group) => [
      group,
      (await redis.xpending(key, group, "-", "+", 1000) as Array<Array<unknown>>).map((one) => one.toSpliced(2, 1)),
      (await redis.xinfo("CONSUMERS", key, group) as Array<Array<unknown>>).map((one) => one.slice(0, 4))
    ]))
  ]
}

const keysOf = async (redis: Redis, namespace: string) => (await redis.keys(`{${namespace}:*`)).toSorted()

/** All that a namespace has. */
const contents = async (redis: Redis, namespace: string) =>
  Promise.all((await keysOf(redis, namespace)).map(async (key) => [key, await dataOf(redis, key)]))

/** When its keys expire, in milliseconds: below 0 for never. */
const lives = async (redis: Redis, namespace: string) =>
  Promise.all((await keysOf(redis, namespace)).map((key) => redis.pttl(key)))

type Actor = ReturnType<typeof actor>

class Pair {
  readonly #redis: ReadonlyArray<Redis>
  readonly #namespace = freshNamespace()
  readonly #actors: ReadonlyArray<Actor>
  readonly #ended = new Set<string>()
  readonly #held: Array<readonly [session: string, id: string, lock: string]> = []
  #clock = 1.7e15
  #offers = 0
  // A session that has ended is followed by one with another id.
  readonly #now = { a: "a", b: "b" }
  #ids = 0

  constructor(redis: ReadonlyArray<Redis>) {
    this.#redis = redis
    this.#actors = redis.map((one) => actor(one, this.#namespace, "queue:q"))
  }

  async #both<A>(ask: (one: Actor, redis: Redis) => Promise<A>): Promise<A> {
    const [straight, usual] = await Promise.all(this.#actors.map((one, at) => ask(one, this.#redis[at]!)))
    assert.deepStrictEqual(straight, usual)
    return straight!
  }

  #send(session: string, ...requests: ReadonlyArray<Asked>) {
    return this.#both((one) => one.sendAll(session, requests))
  }

  async #pass(micros: number): Promise<void> {
    this.#clock += micros
    const now = { s: Math.floor(this.#clock / 1e6), u: this.#clock % 1e6 }
    await Promise.all(this.#redis.map((one) => one.hset("clock", now)))
  }

  async #open(session: string): Promise<void> {
    await this.#both((one) => one.open(session))
    await this.#send(session, ["queue.join", ["m", 0, 0, 0, 0, 60_000, 1000, 0, 3, 0, 0, 1, 0, 0, 1, 0, ""]])
  }

  async begin(): Promise<void> {
    await this.#pass(0)
    for (const session of sessions) await this.#open(session)
    // From the first token on.
    await this.#send("a", ["lock.take", ["first", ""], this.#lock(2)])
  }

  #lock(which: number): string {
    return `{${this.#namespace}:00}:lock:${which}`
  }

  #offer(session: string, body: string, shape: string): Asked {
    const text = texts[shape] ?? ""
    const more = text === "" ? shape : shape.replace(/\d$/, "") + text.length
    return ["queue.offer", [body + text, `${Buffer.byteLength(body)}${more} `, session[0]!, ++this.#offers]]
  }

  /** The jobs that the worker of a session has. */
  async #jobs(session: string): Promise<ReadonlyArray<ReadonlyArray<string>>> {
    const mail = await this.#both((one) => one.mail(session))
    const given = mail.flatMap(([, id, tag, , , jobs]) =>
      id === "w" && tag === "deliver" ? jobs as Array<Array<string>> : []
    )
    return given.filter(([job]) => !this.#ended.has(job!))
  }

  async step(who: (typeof sessions)[number], step: Step): Promise<void> {
    await this.#pass(7)
    const session = this.#now[who]
    if (step.do === "offer") await this.#send(session, this.#offer(session, JSON.stringify(step.body), ""))
    else if (step.do === "wish") await this.#send(session, this.#offer(session, "1", step.shape))
    else if (step.do === "work") await this.#send(session, ["queue.work", ["w", step.count]])
    else if (step.do === "leave") await this.#send(session, ["session.leave", ["w"]])
    else if (step.do === "repeat") await this.#both((one) => one.repeat(session))
    else if (step.do === "pass") {
      await this.#pass(step.millis * 1000)
      for (const one of Object.values(this.#now)) await this.#send(one, ["session.renew", []])
    } else if (step.do === "end") {
      await this.#both((one) => one.end(session))
      await this.#both((one) => one.reap(session))
      await this.#open(this.#now[who] += "'")
    } else if (step.do === "foreign") await this.#foreign(session, `{${this.#namespace}:00}:${step.what}`)
    else if (step.do === "take") {
      const id = `${session}${++this.#ids}`
      this.#held.push([session, id, this.#lock(step.lock)])
      await this.#send(session, ["lock.take", [id, "1"], this.#lock(step.lock)])
    } else if (step.do === "release") {
      const at = this.#held.findIndex(([holder, , lock]) => holder === session && lock === this.#lock(step.lock))
      if (at >= 0) await this.#send(session, ["lock.release", [this.#held[at]![1]], this.#held.splice(at, 1)[0]![2]])
    } else if (step.do === "done" || step.do === "retry") await this.#end(session, step.do, step.pick)
    await this.#both((_, redis) => contents(redis, this.#namespace))
    const [straight, usual] = await Promise.all(this.#redis.map((redis) => lives(redis, this.#namespace)))
    for (const [at, life] of straight!.entries()) assert.closeTo(life, usual![at]!, 5000)
  }

  async #end(session: string, how: "done" | "retry", pick: number): Promise<void> {
    const jobs = await this.#jobs(session)
    if (jobs.length === 0) return
    const [job, , , ...more] = jobs[pick % jobs.length]!
    this.#ended.add(job!)
    if (how === "retry") await this.#send(session, ["queue.retry", ["w", job!, 0, "1", 1]])
    else if (more.length === 0) await this.#send(session, ["queue.done", ["w", `${job![0]} ${job!.slice(1)}`, 1]])
    else {
      const given = more[more.indexOf("i") + 1] ?? ""
      await this.#send(session, ["queue.finish", [
        "w",
        job!,
        more.includes("i") ? given : "",
        "",
        "[\"success\",1]",
        0,
        1
      ]])
    }
  }

  // All that is about it fails, one by one, and nothing else.
  async #foreign(session: string, key: string): Promise<void> {
    await this.#both(async (_, redis) => {
      if (await redis.exists(key) === 1) await redis.rename(key, `${key}~`)
      await redis.set(key, "of another program")
    })
    await this.#send(session, this.#offer(session, "1", ""))
    await this.#send(session, ["lock.take", [`foreign${++this.#ids}`, "1"], this.#lock(0)])
    const held = this.#held.find(([holder, , lock]) => holder === session && lock === this.#lock(0))
    if (held !== undefined) await this.#send(session, ["lock.release", [held[1]], held[2]])
    await this.#both(async (_, redis) => {
      await redis.del(key)
      if (await redis.exists(`${key}~`) === 1) await redis.rename(`${key}~`, key)
    })
  }
}

layer(TestServer.layer, live)("a straight path", (it) => {
  it.effect("does what the usual one does", () =>
    Effect.gen(function*() {
      const straight = yield* client(yield* TestServer, 0, (script) => counted(clocked(script)))
      const plain = yield* client(yield* standalone(), 0, (script) => usual(clocked(script)))
      const property = fc.asyncProperty(steps, async (all) => {
        const pair = new Pair([straight, plain])
        await pair.begin()
        for (const [session, one] of all) await pair.step(session, one)
      })
      yield* Effect.promise(() => fc.assert(property, { numRuns: runs(60) }))
      const taken = yield* Effect.promise(() => straight.hgetall("straight"))
      for (const verb of ["queue.offer", "lock.take", "lock.release"]) assert.isAbove(Number(taken[verb]), 50, verb)
    }))
})
