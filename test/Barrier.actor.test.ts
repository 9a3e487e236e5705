/**
 * The actors of barriers and double barriers themselves: random histories of requests, sent straight to the partition actor
 * and compared, reply by reply and event by event, with small models in memory. Sessions die, and arrivals are asked for
 * again by others, at any moment.
 */
import { assert, layer } from "@effect/vitest"
import { Effect } from "effect"
import * as fc from "fast-check"
import type { Redis as IoRedis } from "ioredis"
import { actor, client, keysOf } from "./support/actor.ts"
import { runs } from "./support/effort.ts"
import { freshNamespace, TestServer } from "./support/live.ts"

type Reply = ReadonlyArray<unknown>

/** What each session receives, and which sessions have ended. */
class Mail {
  readonly events = new Map<string, Array<Reply>>()
  readonly dead = new Map<string, "ended" | "expired">()

  tell(session: string, event: Reply): void {
    this.events.set(session, [...this.events.get(session) ?? [], event])
  }
}

interface Arrival {
  readonly id: string
  readonly value: number | null
  session: string
  member: string
  claim: string
  withdraws: boolean
  acts: boolean
  gone: boolean
}

/** What a barrier is to do, in as few words as possible. */
class BarrierModel extends Mail {
  generation = 1
  /** In order; the first ones are the present generation. */
  arrivals: Array<Arrival> = []
  runner: Arrival | undefined
  /** How the last generations have ended, for each arrival. */
  results: Array<ReadonlyMap<string, Reply>> = []
  parties: number
  /** How many parties there were when all had arrived that wait for the action. */
  size = 0

  constructor(parties: number) {
    super()
    this.parties = parties
  }

  /** How many the present generation is for. */
  get due(): number {
    return this.runner === undefined ? this.parties : this.size
  }

  get group(): Array<Arrival> {
    return this.arrivals.slice(0, this.due)
  }

  resize(parties: number): void {
    this.parties = parties
    this.advance()
  }

  verdict(id: string): Reply | undefined {
    return this.results.find((ended) => ended.has(id))?.get(id)
  }

  granted(one: Arrival): Reply {
    return ["granted", this.generation, this.brought, this.group.indexOf(one)]
  }

  #conclude(result: Reply): void {
    const { group } = this
    this.arrivals = this.arrivals.slice(group.length)
    const ended = new Map(group.map(({ id }, index) => [id, [...result, index]]))
    this.results = [ended, ...this.results].slice(0, 4)
    this.generation++
    this.runner = undefined
    for (const { claim, gone, id, session } of group) {
      if (!gone) this.tell(session, [result[0], claim, ...ended.get(id)!.slice(1)])
    }
  }

  /** What the present group has: a number, if all of it bring nothing. */
  get brought(): number | ReadonlyArray<number | null> {
    const values = this.group.map(({ value }) => value)
    return values.every((value) => value === null) ? values.length : values
  }

  /** All parties that have ever passed. */
  readonly passed: Array<string> = []

  pass(): void {
    this.passed.push(...this.group.map(({ id }) => id))
    this.#conclude(["passed", this.generation, this.brought])
  }

  #break(left: number, why: string): void {
    const here = this.group.filter(({ gone }) => !gone).length - left
    this.#conclude(["broken", this.generation, this.due - here, why])
  }

  depart(one: Arrival): void {
    const at = this.arrivals.indexOf(one)
    if (at < 0) return
    const runs = this.runner === one
    if (this.runner !== undefined && !runs && at < this.due) {
      one.gone = true
    } else if (!one.withdraws && (runs || this.runner === undefined && at < this.due)) {
      // One that has come in excess is of a later generation, and breaks none.
      this.#break(1, runs ? "action" : "left")
    } else {
      this.arrivals.splice(at, 1)
      if (!runs) return
      this.runner = undefined
      this.arrivals = this.arrivals.filter(({ gone }) => !gone)
    }
  }

  /** Parties whose session has expired leave the present generation, and no other. Of one that was ended early, it waits for the end. */
  #sweep(): boolean {
    const { generation } = this
    let [present, unsure] = [0, false]
    for (const one of [...this.arrivals]) {
      const dead = this.dead.get(one.session)
      if (dead === "expired") {
        this.depart(one)
      } else {
        present++
        unsure ||= dead !== undefined
      }
      if (this.generation !== generation) return false
      if (present === this.parties) break
    }
    return unsure
  }

  advance(): void {
    while (this.runner === undefined && this.arrivals.length >= this.parties) {
      const unsure = this.#sweep()
      if (this.arrivals.length < this.parties || unsure) return
      this.size = this.parties
      this.runner = this.group.findLast(({ acts }) => acts)
      if (this.runner !== undefined) {
        const [, ...rest] = this.granted(this.runner)
        this.tell(this.runner.session, ["granted", this.runner.claim, ...rest])
      } else {
        this.pass()
      }
    }
  }

  arrive(next: Arrival, since?: number): Reply {
    const ended = this.verdict(next.id)
    if (ended !== undefined) return ended
    const known = this.arrivals.find(({ id }) => id === next.id)
    if (known !== undefined) {
      const { acts, claim, gone, member, session, withdraws } = next
      Object.assign(known, { session, member, claim, withdraws, acts, gone })
      if (known === this.runner) return this.granted(known)
      this.advance()
      return ["queued"]
    }
    // It may have been of a generation that is forgotten.
    if (since !== undefined && this.generation > since + 4) return ["broken", since, 0, "unknown", 0]
    if (this.runner === undefined && this.arrivals.length + 1 >= this.parties) this.#sweep()
    this.arrivals.push(next)
    this.advance()
    return ["queued"]
  }

  find(session: string, claim: string): Arrival | undefined {
    return this.arrivals.find((one) => one.session === session && one.claim === claim && !one.gone)
  }

  leave(session: string, claim: string): void {
    const one = this.find(session, claim)
    if (one === undefined) return
    this.depart(one)
    this.advance()
  }

  /** Its wait is over. */
  give(session: string, claim: string, id: string): Reply {
    const one = this.find(session, claim)
    if (one === undefined) return this.verdict(id) ?? ["departed"]
    if (this.runner !== undefined && this.arrivals.indexOf(one) < this.due) return ["acting"]
    this.depart(one)
    this.advance()
    return ["departed"]
  }

  leaveMember(session: string, member: string): void {
    for (const one of [...this.arrivals]) {
      if (one.session === session && one.member === member && !one.gone) this.depart(one)
    }
  }

  reset(): void {
    if (this.arrivals.length === 0) return
    this.#break(0, "reset")
    this.advance()
  }

  release(arrival: string): Reply {
    if (this.runner?.id === arrival) {
      this.pass()
      this.advance()
      return ["passed"]
    }
    const ended = this.verdict(arrival)
    return ended === undefined ? ["absent"] : ended[0] === "passed" ? ["passed"] : ended
  }
}

type Owner = readonly [session: string, claim: string]

const same = ([session, claim]: Owner) => (other: Owner) => other[0] === session && other[1] === claim

/** What a double barrier is to do. */
class PhaseModel extends Mail {
  number = 0
  waiting: Array<Owner> = []
  inside: Array<Owner> = []
  leavers: Array<Owner> = []
  parties: number

  constructor(parties: number) {
    super()
    this.parties = parties
  }

  #open(): void {
    if (this.inside.length > 0 || this.waiting.length < this.parties) return
    const isAlive = ([session]: Owner) => !this.dead.has(session)
    // The dead ones at the front do not count any more; those behind it do until they are reaped.
    const first = this.waiting.findIndex(isAlive)
    this.waiting = first < 0 ? [] : this.waiting.slice(first)
    const living = this.waiting.filter(isAlive).slice(0, this.parties)
    if (living.length < this.parties) return
    this.waiting = this.waiting.filter((one) => !living.includes(one))
    this.inside = living
    this.number++
    for (const one of living) this.tell(one[0], ["granted", one[1], this.number])
  }

  resize(parties: number): void {
    this.parties = parties
    this.#open()
  }

  enter(owner: Owner): Reply {
    this.waiting.push(owner)
    this.#open()
    return ["queued"]
  }

  leave(owner: Owner, number: number): Reply {
    if (number !== this.number || this.inside.length === 0) return ["left"]
    this.leavers.push(owner)
    return ["queued"]
  }

  drop(gone: (owner: Owner) => boolean): void {
    const wasInside = this.inside.length > 0
    this.waiting = this.waiting.filter((owner) => !gone(owner))
    this.leavers = this.leavers.filter((owner) => !gone(owner))
    this.inside = this.inside.filter((owner) => !gone(owner))
    if (!wasInside || this.inside.length > 0) return
    for (const [session, claim] of this.leavers.sort((a, b) => Number(a[1]) - Number(b[1]))) {
      this.tell(session, ["left", claim])
    }
    this.leavers = []
    this.#open()
  }
}

const session = fc.nat({ max: 2 })
const member = fc.nat({ max: 2 })
const pick = fc.nat({ max: 30 })

const resize = fc.record({
  do: fc.constant("resize" as const),
  session,
  parties: fc.integer({ min: 1, max: 4 }),
  how: fc.constantFrom("resize", "keep", "kept", "fail", "firm")
})

const barrierStep = fc.oneof(
  { weight: 2, arbitrary: resize },
  {
    weight: 10,
    arbitrary: fc.record({
      do: fc.constant("arrive" as const),
      session,
      member,
      withdraws: fc.boolean(),
      acts: fc.integer({ min: 0, max: 3 })
    })
  },
  { weight: 3, arbitrary: fc.record({ do: fc.constant("again" as const), session, member, pick }) },
  { weight: 4, arbitrary: fc.record({ do: fc.constant("leave" as const), session, pick }) },
  { weight: 2, arbitrary: fc.record({ do: fc.constant("check" as const), session, pick }) },
  { weight: 5, arbitrary: fc.record({ do: fc.constant("release" as const), session }) },
  { weight: 1, arbitrary: fc.record({ do: fc.constant("late" as const), session, pick }) },
  { weight: 1, arbitrary: fc.record({ do: fc.constant("reset" as const), session }) },
  { weight: 1, arbitrary: fc.record({ do: fc.constant("repeat" as const), session }) },
  { weight: 1, arbitrary: fc.record({ do: fc.constant("close" as const), session, member }) },
  { weight: 1, arbitrary: fc.record({ do: fc.constant("die" as const), session, expires: fc.boolean() }) },
  { weight: 2, arbitrary: fc.record({ do: fc.constant("reap" as const) }) }
)

const phaseStep = fc.oneof(
  { weight: 2, arbitrary: resize },
  { weight: 8, arbitrary: fc.record({ do: fc.constant("enter" as const), session }) },
  { weight: 4, arbitrary: fc.record({ do: fc.constant("wait" as const), session, late: fc.boolean() }) },
  { weight: 8, arbitrary: fc.record({ do: fc.constant("leave" as const), session, pick }) },
  { weight: 2, arbitrary: fc.record({ do: fc.constant("check" as const), session, pick }) },
  { weight: 1, arbitrary: fc.record({ do: fc.constant("close" as const), session, member }) },
  { weight: 1, arbitrary: fc.record({ do: fc.constant("die" as const), session, expires: fc.boolean() }) },
  { weight: 2, arbitrary: fc.record({ do: fc.constant("reap" as const) }) }
)

/** The last one does not join: it is enrolled when it arrives. */
const members = ["m0", "m1", "m2"]

/** Waits until a lease of one millisecond has run out. */
const eventuallyDead = async (redis: IoRedis) => {
  const millis = async () => {
    const [seconds, micros] = await redis.time()
    return Math.floor(Number(seconds) * 1000 + Number(micros) / 1000)
  }
  for (const from = await millis(); await millis() <= from + 1;);
}

/** Three sessions with their members, and those of them that are over and have not been reaped. */
const world = async (
  redis: IoRedis,
  verb: string,
  resource: string,
  parties: number,
  mailbox: Mail
) => {
  const namespace = freshNamespace()
  const driver = actor(redis, namespace, resource)
  const names = ["S0", "S1", "S2"]
  const graves: Array<string> = []
  let count = 0
  let joined: Reply = []
  const enrol = async (name: string) => {
    for (const id of members.slice(0, 2)) {
      joined = await driver.send(name, verb, [id, parties, "kept"])
      assert.strictEqual(joined[0], "joined")
    }
  }
  for (const name of names) {
    await driver.open(name)
    await enrol(name)
  }
  const reap = async (name: string) => {
    assert.strictEqual(await driver.reap(name), "forgotten")
    assert.strictEqual(await redis.exists(driver.keys(name).slice(3)), 0)
    mailbox.events.delete(name)
  }
  return {
    ...driver,
    names,
    graves,
    joined,
    reap,
    fresh: () => `${++count}`,
    /** Opens it with another number of parties, closes it again, and answers what came of it. */
    resize: async (at: number, parties: number, how: string): Promise<Reply> => {
      const id = `r${++count}`
      const reply = await driver.send(names[at]!, verb, [id, parties, how])
      if (reply[0] === "joined") assert.deepStrictEqual(await driver.send(names[at]!, "session.leave", [id]), ["left"])
      return reply
    },
    /** What Redis has of it goes away by itself. */
    expires: async () => {
      for (const key of keysOf(driver.key)) assert.notStrictEqual(await redis.pttl(key), -1, key)
    },
    die: async (at: number, expires: boolean) => {
      const name = names[at]!
      if (expires) {
        await driver.send(name, "session.renew", [], 1)
        await eventuallyDead(redis)
      } else {
        await driver.end(name)
      }
      mailbox.dead.set(name, expires ? "expired" : "ended")
      graves.push(name)
      names[at] = `N${++count}`
      await driver.open(names[at]!)
      await enrol(names[at]!)
    },
    /** What the living sessions have received, one by one. */
    told: async () => {
      for (const name of names) {
        const events: Array<Reply> = []
        for (const event of await driver.mail(name)) {
          if (event[0] === "granted") events.push(["granted", event[1], ...event.slice(3)])
          if (event[0] !== "each") continue
          const [, all, own, tag, ...rest] = event
          const ids: Array<string> = all.split(" ")
          if (tag === "left") ids.sort((a, b) => Number(a) - Number(b))
          for (const [at, id] of ids.entries()) {
            events.push([tag, id, ...tag === "granted" ? rest.slice(1) : rest, ...own.slice(at, at + 1)])
          }
        }
        // What comes with a reply, and what comes by the mailbox, overtake each other.
        assert.sameDeepMembers(events, mailbox.events.get(name) ?? [])
      }
    },
    /** When all sessions have ended, nothing is left but what those may ask for that have died, for a day. */
    finish: async () => {
      for (const name of names) await driver.end(name, true)
      for (const name of [...graves, ...names]) await reap(name)
      const isKept = resource.startsWith("barrier:") && mailbox.dead.size > 0
      const rest = await redis.pttl(driver.key)
      if (isKept) assert.isTrue(rest === -2 || rest > 0 && rest <= 86_400_000)
      assert.sameMembers(
        (await redis.keys(`{${namespace}:*`)).filter((key) => !isKept || key !== driver.key),
        [`{${namespace}:00}:sessions`, `{${namespace}:00}:floor`]
      )
      assert.includeMembers(
        ["identity", "opened", "partitions", "protocol", "token", "floor"],
        await redis.hkeys(`{${namespace}:00}:sessions`)
      )
    }
  }
}

/** What is to come of opening it with another number of parties. */
const opened = (model: BarrierModel | PhaseModel, parties: number, how: string, stale: boolean): "joined" | Reply => {
  if (parties === model.parties || how === "kept") return "joined"
  if (stale && (how === "fail" || how === "keep")) return ["stale"]
  if (how === "keep") return "joined"
  if (how !== "resize") return ["mismatch", model.parties]
  model.resize(parties)
  return "joined"
}

/** Without what the model does not know: tokens, and how long to wait. */
const plain = (reply: Reply): Reply =>
  reply[0] === "granted" ? ["granted", ...reply.slice(2)] : reply[0] === "queued" ? ["queued"] : reply

const property = <A>(step: fc.Arbitrary<A>, run: (redis: IoRedis, parties: number, steps: Array<A>) => Promise<void>) =>
  Effect.gen(function*() {
    const server = yield* TestServer
    const redis = yield* client(server)
    yield* Effect.promise(() =>
      fc.assert(
        fc.asyncProperty(
          fc.integer({ min: 1, max: 4 }),
          // Fields come in the order of writing, or in none.
          fc.constantFrom(512, 0),
          fc.array(step, { minLength: 1, maxLength: 60, size: "max" }),
          async (parties, small, steps) => {
            await redis.config("SET", "hash-max-listpack-entries", small)
            await run(redis, parties, steps)
          }
        ),
        { numRuns: runs(60) }
      )
    )
    yield* Effect.promise(() => redis.call("FUNCTION", "FLUSH"))
  })

layer(TestServer.layer, { excludeTestServices: true, timeout: "120 seconds" })("the actor", (it) => {
  it.effect(
    "of a barrier lets all pass or none, has one run the action, and leaves nothing behind",
    () =>
      property(barrierStep, async (redis, parties, steps) => {
        const model = new BarrierModel(parties)
        const barrier = await world(redis, "barrier.join", "barrier:x\u0000}{:\n", parties, model)
        const {
          answers,
          ask,
          die,
          expires,
          finish,
          fresh,
          graves,
          joined,
          key,
          look,
          names,
          reap,
          repeat,
          send,
          told
        } = barrier
        const claims: Array<{ readonly session: string; readonly claim: string; readonly id: string; since: number }> =
          []
        const known: Array<Arrival & { readonly since: number }> = []
        const arrive = async (arrival: Arrival, since?: number) => {
          const { acts, claim, id, member, session, value, withdraws } = arrival
          const again = since === undefined ? "" : ` ${joined[2]} ${since}`
          const args = [
            claim,
            id,
            member,
            String(value),
            model.parties,
            `${withdraws ? "w" : "b"}${acts ? 1 : 0}${again}`
          ]
          assert.deepStrictEqual(plain(await send(session, "barrier.arrive", args)), model.arrive(arrival, since))
        }
        for (const step of steps) {
          const name = step.do === "reap" ? "" : names[step.session]!
          switch (step.do) {
            case "arrive": {
              const id = `a-${fresh()}`
              const arrival: Arrival = {
                id,
                value: known.length % 3 === 0 ? known.length : null,
                session: name,
                member: `m${step.member}`,
                claim: fresh(),
                withdraws: step.withdraws,
                acts: step.acts === 0,
                gone: false
              }
              known.push({ ...arrival, since: model.generation })
              claims.push({ ...arrival, since: model.generation })
              await arrive(arrival)
              break
            }
            case "again": {
              const before = known[step.pick % Math.max(1, known.length)]
              if (before === undefined) break
              const again = { ...before, session: name, member: `m${step.member}`, claim: fresh() }
              claims.push(again)
              await arrive(again, before.since)
              break
            }
            case "leave": {
              const { claim, id } = claims.filter(({ session }) => session === name).at(-1 - step.pick % 6) ??
                { claim: "none", id: "none" }
              if (step.pick % 2 === 0) {
                const departed = plain(await send(name, "barrier.depart", [claim, id]))
                assert.deepStrictEqual(departed, model.give(name, claim, id))
                break
              }
              assert.deepStrictEqual(await send(name, "session.leave", [claim]), ["left"])
              model.leave(name, claim)
              break
            }
            case "check": {
              // A claim that waits, or holds, asks again under its id: an event may have been lost.
              const mine = claims.filter(({ claim, id, session, since }) =>
                session === name &&
                (model.find(name, claim)?.id === id || model.verdict(id) !== undefined ||
                  model.generation > since + 4 && !model.arrivals.some((one) => one.id === id))
              )
              const one = mine.at(-1 - step.pick % 6)
              if (one === undefined) break
              const found = known.find(({ id }) => id === one.id)!
              const before = await redis.hgetall(keysOf(key)[1]!)
              await arrive({ ...found, ...model.find(name, one.claim), session: name, claim: one.claim }, one.since)
              assert.deepStrictEqual(await redis.hgetall(keysOf(key)[1]!), before, "nothing has changed")
              break
            }
            case "resize": {
              const outcome = opened(model, step.parties, step.how, graves.length > 0)
              const reply = await barrier.resize(step.session, step.parties, step.how)
              if (outcome !== "joined") assert.deepStrictEqual(reply, outcome)
              else assert.deepStrictEqual(reply.slice(0, 4), ["joined", model.generation, joined[2], model.parties])
              // The member leaves again.
              if (outcome === "joined") model.advance()
              break
            }
            case "release": {
              if (model.runner === undefined) break
              const { id } = model.runner
              assert.deepStrictEqual<Reply>(await send(name, "barrier.release", [id]), model.release(id))
              break
            }
            case "late": {
              const { id } = known[step.pick % Math.max(1, known.length)] ?? { id: "none" }
              if (model.runner?.id === id) break
              assert.deepStrictEqual<Reply>(await send(name, "barrier.release", [id]), model.release(id))
              break
            }
            case "reset":
              assert.deepStrictEqual(await send(name, "barrier.reset", []), ["reset"])
              model.reset()
              break
            case "repeat":
              // The reply was lost and the batch is sent again: the same answer and the same events, and nothing happens.
              assert.deepStrictEqual(await repeat(name), answers.get(name))
              break
            case "close":
              assert.deepStrictEqual(await send(name, "session.leave", [`m${step.member}`]), ["left"])
              model.leaveMember(name, `m${step.member}`)
              model.advance()
              if (step.member === 2) break
              assert.deepStrictEqual<Reply>(
                (await send(name, "barrier.join", [`m${step.member}`, parties, "kept"])).slice(0, 4),
                // For as long as a session has it open, there are members.
                ["joined", model.generation, joined[2], model.parties]
              )
              break
            case "die":
              await die(step.session, step.expires)
              break
            case "reap": {
              const dead = graves.shift()
              if (dead === undefined) break
              for (const member of members) {
                // In the order of the model.
                await ask(dead, "session.reap", [dead, `${member}:${key.slice(key.indexOf("}:") + 2)}`], key)
                model.leaveMember(dead, member)
                model.advance()
              }
              await reap(dead)
            }
          }
          await told()
          const state = ["state", model.group.length, model.parties]
          assert.deepStrictEqual(await look("barrier.state", []), state)
          assert.deepStrictEqual(await ask("", "barrier.state", [], key), graves.length > 0 ? ["stale"] : state)
          assert.strictEqual(new Set(model.passed).size, model.passed.length, "no arrival counts twice")
          assert.strictEqual(await redis.hlen(keysOf(key)[1]!), model.arrivals.length)
          await expires()
          assert.strictEqual(await redis.hexists(key, "x"), Number(model.runner !== undefined))
        }
        await finish()
      }),
    120_000
  )

  it.effect("of a barrier counts out the dead, each in its own generation", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      yield* Effect.promise(async () => {
        const { mail, open, send } = actor(redis, freshNamespace(), "barrier:x")
        for (const name of ["A", "B", "D"]) {
          await open(name)
          await send(name, "barrier.join", ["m", 2, "fail"])
        }
        const arrive = (name: string, id: string, mode = "b0") =>
          send(name, "barrier.arrive", [id, id, "m", `"${id}"`, 2, mode])
        await arrive("A", "1a")
        await arrive("B", "1b", "b1")
        // While the action runs, two generations more arrive, and one of the last dies.
        await arrive("A", "2a")
        await arrive("B", "2b")
        await arrive("A", "3a")
        await arrive("D", "3d")
        await send("D", "session.renew", [], 1)
        await eventuallyDead(redis)
        assert.deepStrictEqual<unknown>(await send("B", "barrier.release", ["1b"]), ["passed"])
        const heard = (await mail("A")).filter(([tag]) => tag === "each").map(([, ids, , tag]) => [ids, tag])
        assert.deepStrictEqual(heard, [["1a", "passed"], ["2a", "passed"], ["3a", "broken"]])
      })
      yield* Effect.promise(() => redis.call("FUNCTION", "FLUSH"))
    }))

  it.effect("of a barrier knows how a generation has ended when others have ended since", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      yield* Effect.promise(async () => {
        const { open, send } = actor(redis, freshNamespace(), "barrier:x")
        let epoch: unknown
        for (const name of ["A", "B"]) {
          await open(name)
          epoch = (await send(name, "barrier.join", ["m", 2, "fail"]))[2]
        }
        const arrive = (name: string, id: string, again = "") =>
          send(name, "barrier.arrive", [id, id, "m", `"${id}"`, 2, `b0${again}`])
        await arrive("B", "1b")
        await arrive("A", "1a")
        // The second generation is broken.
        await arrive("A", "2a")
        await send("A", "session.leave", ["2a"])
        assert.deepStrictEqual<unknown>(await arrive("B", "1b", ` ${epoch} 1`), ["passed", 1, ["1b", "1a"], 0])
        // What is older than that is not known any more.
        for (let n = 0; n < 3; n++) {
          await arrive("A", `${n + 3}a`)
          await send("A", "session.leave", [`${n + 3}a`])
        }
        assert.deepStrictEqual<unknown>(await arrive("B", "1b", ` ${epoch} 1`), ["broken", 1, 0, "unknown", 0])
        // Its process had not heard of this epoch when it asked for the first time.
        assert.deepStrictEqual<unknown>(await arrive("B", "1b", " 1 700"), ["broken", 1, 0, "unknown", 0])
      })
      yield* Effect.promise(() => redis.call("FUNCTION", "FLUSH"))
    }))

  it.effect("of a barrier knows how its last generation has ended when it was closed behind a party that comes back", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      yield* Effect.promise(async () => {
        const { key, open, reap, send } = actor(redis, freshNamespace(), "barrier:x")
        const join = (name: string, parties = 2) => send(name, "barrier.join", ["m", parties, "fail"])
        let epoch: unknown
        for (const name of ["A", "B"]) {
          await open(name)
          epoch = (await join(name))[2]
        }
        const arrive = (name: string, id: string, again = "") =>
          send(name, "barrier.arrive", [id, id, "m", `"${id}"`, 2, `b0${again}`])
        // When all have closed it, no process comes back.
        await arrive("B", "0b")
        await arrive("A", "0a")
        for (const name of ["A", "B"]) await send(name, "session.leave", ["m"])
        assert.strictEqual(await redis.exists(key), 0)
        for (const name of ["A", "B"]) epoch = (await join(name))[2]
        await arrive("B", "1b")
        await arrive("A", "1a")
        await send("B", "session.renew", [], 1)
        await eventuallyDead(redis)
        await send("A", "session.leave", ["m"])
        assert.strictEqual(await reap("B"), "forgotten")
        assert.isAbove(await redis.pttl(key), 0)
        await open("B2")
        assert.deepStrictEqual<unknown>((await join("B2")).slice(0, 4), ["joined", 2, epoch, 2])
        assert.deepStrictEqual<unknown>(await arrive("B2", "1b", ` ${epoch} 1`), ["passed", 1, ["1b", "1a"], 0])
        // The last one that has it open has it for as many parties as it says.
        await send("B2", "session.renew", [], 1)
        await eventuallyDead(redis)
        assert.strictEqual(await reap("B2"), "forgotten")
        // Another one opens and closes it before that process has come back.
        assert.deepStrictEqual<unknown>((await join("A", 3)).slice(0, 4), ["joined", 2, epoch, 3])
        await send("A", "session.leave", ["m"])
        await open("B3")
        assert.deepStrictEqual<unknown>(await arrive("B3", "1b", ` ${epoch} 1`), ["passed", 1, ["1b", "1a"], 0])
      })
      yield* Effect.promise(() => redis.call("FUNCTION", "FLUSH"))
    }))

  it.effect("of a barrier does a bounded part of what there is to do in one call, and the rest when it is woken", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      yield* Effect.promise(async () => {
        const { key, keys, mail, open, ring, send } = actor(redis, freshNamespace(), "barrier:x")
        for (const name of ["A", "B"]) {
          await open(name)
          await send(name, "barrier.join", ["m", 2, "fail"])
        }
        const arrive = (name: string, id: string, mode = "b0") =>
          send(name, "barrier.arrive", [id, id, "m", `"${id}"`, 2, mode])
        await arrive("A", "first")
        await arrive("B", "second", "b1")
        for (let n = 0; n < 1201; n++) await arrive("A", `a${n}`)
        assert.deepStrictEqual<unknown>(await send("B", "barrier.release", ["second"]), ["passed"])
        const passed = async () =>
          (await mail("A")).filter(([tag]) => tag === "each").map(([, ids, , tag, number]) => [ids, tag, number])
        const due = () => redis.zscore(keys("")[1]!, `@${key.slice(key.indexOf("}:") + 2)}`)
        let before = (await passed()).length
        assert.isBelow(before, 200)
        while (await due() !== null) {
          assert.deepStrictEqual<unknown>(await ring(), ["rung"])
          const now = (await passed()).length
          assert.isAbove(now, before)
          assert.isBelow(now - before, 200)
          before = now
        }
        assert.deepStrictEqual(await passed(), [
          ["first", "passed", 1],
          ...Array.from({ length: 600 }, (_, n) => [`a${2 * n} a${2 * n + 1}`, "passed", n + 2])
        ])
        assert.strictEqual(await redis.hlen(keysOf(key)[1]!), 1)
      })
      yield* Effect.promise(() => redis.call("FUNCTION", "FLUSH"))
    }))

  it.effect(
    "of a double barrier opens one phase after the other, for the living, and leaves nothing behind",
    () =>
      property(phaseStep, async (redis, parties, steps) => {
        const model = new PhaseModel(parties)
        const barrier = await world(redis, "doubleBarrier.join", "doubleBarrier:é😀", parties, model)
        const { ask, die, expires, finish, fresh, graves, key, look, names, reap, send, told } = barrier
        const claims: Array<Owner> = []
        const tokens = [0]
        const claim = (owner: Owner) => (claims.push(owner), owner)
        for (const step of steps) {
          const name = step.do === "reap" ? "" : names[step.session]!
          switch (step.do) {
            case "enter": {
              const owner = claim([name, fresh()])
              assert.deepStrictEqual(
                plain(await send(name, "doubleBarrier.enter", [owner[1], parties])),
                model.enter(owner)
              )
              break
            }
            case "wait": {
              const owner = claim([name, fresh()])
              const number = Math.max(0, model.number - Number(step.late))
              const reply = await send(name, "doubleBarrier.leave", [owner[1], tokens[number]!])
              assert.deepStrictEqual(plain(reply), model.leave(owner, number))
              break
            }
            case "leave":
            case "check": {
              const mine = claims.filter(([session]) => session === name)
              const owner: Owner = [name, mine.at(-1 - step.pick % 6)?.[1] ?? "none"]
              if (step.do === "leave") {
                assert.deepStrictEqual(await send(name, "session.leave", [owner[1]]), ["left"])
                model.drop(same(owner))
                break
              }
              // A claim that waits, or holds, asks again under its id: an event may have been lost.
              const before = await redis.hgetall(key)
              const inside = model.inside.some(same(owner))
              if (inside || model.waiting.some(same(owner))) {
                assert.deepStrictEqual(
                  plain(await send(name, "doubleBarrier.enter", [owner[1], parties])),
                  inside ? ["granted", model.number] : ["queued"]
                )
              } else if (model.leavers.some(same(owner))) {
                const reply = await send(name, "doubleBarrier.leave", [owner[1], tokens[model.number]!])
                assert.deepStrictEqual(plain(reply), ["queued"])
              }
              assert.deepStrictEqual(await redis.hgetall(key), before, "nothing has changed")
              break
            }
            case "resize": {
              const outcome = opened(model, step.parties, step.how, graves.length > 0)
              const reply = await barrier.resize(step.session, step.parties, step.how)
              if (outcome !== "joined") assert.deepStrictEqual(reply, outcome)
              else assert.deepStrictEqual(reply.slice(0, 2), ["joined", model.parties])
              break
            }
            case "close":
              assert.deepStrictEqual(await send(name, "session.leave", [`m${step.member}`]), ["left"])
              if (step.member === 2) break
              assert.deepStrictEqual<Reply>(
                (await send(name, "doubleBarrier.join", [`m${step.member}`, parties, "kept"])).slice(0, 2),
                ["joined", model.parties]
              )
              break
            case "die":
              await die(step.session, step.expires)
              break
            case "reap": {
              const dead = graves.shift()
              if (dead === undefined) break
              for (const owner of claims.filter(([session]) => session === dead)) {
                // In the order of the model. A party that waits to leave owns nothing, and ends with its phase.
                if (model.leavers.some(same(owner))) continue
                await ask(dead, "session.reap", [dead, `${owner[1]}:${key.slice(key.indexOf("}:") + 2)}`], key)
                model.drop(same(owner))
              }
              await reap(dead)
            }
          }
          await told()
          const state = ["state", model.inside.length, model.waiting.length, model.parties]
          assert.deepStrictEqual(await look("doubleBarrier.state", []), state)
          assert.deepStrictEqual(await ask("", "doubleBarrier.state", [], key), graves.length > 0 ? ["stale"] : state)
          await expires()
          if (tokens.length <= model.number) {
            // Several phases can have come and gone in one step.
            const [first] = model.inside
            const before = tokens.at(-1)!
            const token = first === undefined
              ? before
              : Number((await send(first[0], "doubleBarrier.enter", [first[1], parties]))[1])
            if (first !== undefined) assert.isAbove(token, before)
            while (tokens.length <= model.number) tokens.push(token)
          }
        }
        await finish()
      }),
    120_000
  )
})
