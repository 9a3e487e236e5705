/**
 * The rendezvous actor itself: random histories of requests, sent straight to it and compared, reply by reply and event by
 * event, with a small model in memory. Sessions die at any moment, and others ask again for what they were about.
 */
import { assert, layer } from "@effect/vitest"
import { Effect } from "effect"
import * as fc from "fast-check"
import { actor, client, keysOf } from "./support/actor.ts"
import { runs } from "./support/effort.ts"
import { freshNamespace, TestServer } from "./support/live.ts"

type Owner = string

interface Item {
  readonly id: string
  /** Undefined when it gave up. */
  giver: Owner | undefined
  taker: Owner | undefined
  attempts: number
}

interface Party {
  owner: Owner
  other: string | undefined
  /** Whether it was asked if it is still there. */
  asked: boolean
}

type Reply = ReadonlyArray<unknown>

const sessionOf = (owner: Owner) => owner.split("/")[0]!
const valueOf = (id: string) => `value of ${id}`

/** What the actor is to do, in as few words as possible. Replies and events are without tokens. */
class Model {
  readonly claims = new Map<Owner, readonly [role: "give" | "take" | "exchange", what: string]>()
  /** In the order in which they were given. */
  items: Array<Item> = []
  takers: Array<Owner> = []
  readonly parties = new Map<string, Party>()
  waiting: string | undefined = undefined
  readonly results = new Map<string, { owner: Owner; readonly value: unknown; kept: boolean }>()
  readonly dead = new Set<string>()
  readonly closed = new Set<string>()
  readonly events = new Map<string, Array<Reply>>()

  #alive(owner: Owner) {
    return !this.dead.has(sessionOf(owner))
  }

  #post(owner: Owner, tag: string, ...rest: ReadonlyArray<unknown>) {
    const [session, id] = owner.split("/") as [string, string]
    this.events.set(session, [...this.events.get(session) ?? [], [tag, id, ...rest]])
  }

  // The oldest item that no taker has, for a taker. Those of dead givers are deleted.
  #handOut(taker: Owner): Reply | undefined {
    for (;;) {
      const item = this.items.find((item) => item.taker === undefined)
      if (item === undefined) return undefined
      if (this.#alive(item.giver!)) {
        item.taker = taker
        item.attempts++
        this.claims.set(taker, ["take", item.id])
        return [item.id, item.attempts, valueOf(item.id)]
      }
      this.items = this.items.filter((other) => other !== item)
    }
  }

  #serve() {
    for (;;) {
      const taker = this.takers.shift()
      if (taker === undefined) return
      if (this.#alive(taker)) return this.#post(taker, "granted", ...this.#handOut(taker)!)
      this.claims.delete(taker)
    }
  }

  give(owner: Owner, id: string): Reply {
    this.claims.set(owner, ["give", id])
    const result = this.results.get(id)
    if (result !== undefined) {
      result.owner = owner
      return ["granted", result.value]
    }
    const item = this.items.find((item) => item.id === id)
    if (item !== undefined) item.giver = owner
    else {
      this.items.push({ id, giver: owner, taker: undefined, attempts: 0 })
      this.#serve()
    }
    return ["queued"]
  }

  take(owner: Owner): Reply {
    const item = this.#handOut(owner)
    if (item !== undefined) return ["granted", ...item]
    this.claims.set(owner, ["take", ""])
    this.takers.push(owner)
    return ["queued"]
  }

  acknowledge(owner: Owner, accepted: boolean): Reply {
    const [role, what] = this.claims.get(owner) ?? []
    if (role !== "take" || what === "") return ["absent"]
    this.claims.delete(owner)
    const { giver } = this.items.find(({ id }) => id === what)!
    this.items = this.items.filter(({ id }) => id !== what)
    if (giver !== undefined) {
      const there = this.claims.has(giver)
      this.results.set(what!, { owner: giver, value: accepted, kept: !there })
      if (there) this.#post(giver, "granted", accepted)
    }
    return ["acknowledged"]
  }

  #separate(id: string) {
    const party = this.parties.get(id)
    if (party === undefined) return
    this.parties.delete(id)
    if (this.waiting === id) this.waiting = undefined
    const other = party.other === undefined ? undefined : this.parties.get(party.other)!
    if (other?.asked === true) other.other = undefined
    else if (other !== undefined) {
      this.parties.delete(party.other!)
      this.#post(other.owner, "again")
    }
  }

  exchange(owner: Owner, id: string): Reply {
    this.claims.set(owner, ["exchange", id])
    const result = this.results.get(id)
    if (result !== undefined) {
      result.owner = owner
      return ["granted", "met", result.value]
    }
    this.#separate(id)
    const other = this.waiting
    const there = other === undefined ? undefined : this.parties.get(other)!
    if (there !== undefined && this.#alive(there.owner)) {
      this.waiting = undefined
      this.parties.set(id, { owner, other, asked: false })
      there.other = id
      there.asked = true
      this.#post(there.owner, "granted", "asked", valueOf(id))
    } else {
      if (other !== undefined) this.parties.delete(other)
      this.parties.set(id, { owner, other: undefined, asked: false })
      this.waiting = id
    }
    return ["queued"]
  }

  accept(owner: Owner): Reply {
    const [role, id] = this.claims.get(owner) ?? []
    if (role !== "exchange") return ["alone"]
    const party = this.parties.get(id!)
    const other = party?.other === undefined ? undefined : this.parties.get(party.other)
    if (other !== undefined && this.#alive(other.owner)) {
      this.parties.delete(id!)
      this.parties.delete(party!.other!)
      this.results.set(id!, { owner, value: valueOf(party!.other!), kept: false })
      this.results.set(party!.other!, { owner: other.owner, value: valueOf(id!), kept: false })
      this.#post(other.owner, "granted", "met", valueOf(id!))
      return ["accepted"]
    }
    this.#separate(id!)
    this.parties.set(id!, { owner, other: undefined, asked: true })
    return ["alone"]
  }

  check(owner: Owner): Reply {
    const [role, what] = this.claims.get(owner) ?? []
    if (role === undefined) return ["absent"]
    if (role === "take") {
      const item = this.items.find(({ id }) => id === what)
      return item === undefined ? ["queued"] : ["granted", item.id, item.attempts, valueOf(item.id)]
    }
    const result = this.results.get(what!)
    if (role === "give") {
      if (result !== undefined) return ["granted", result.value]
      return [this.items.some(({ id }) => id === what) ? "queued" : "absent"]
    }
    if (result !== undefined) return ["granted", "met", result.value]
    const party = this.parties.get(what!)
    if (party === undefined) return ["absent"]
    if (!party.asked) return ["queued"]
    return party.other === undefined ? ["granted", "alone", null] : ["granted", "asked", valueOf(party.other)]
  }

  /** By a living session itself, or because it is dead. */
  leave(owner: Owner) {
    const session = sessionOf(owner)
    const gone = !this.dead.has(session) || this.closed.has(session)
    const [role, what] = this.claims.get(owner) ?? []
    if (role === undefined) return
    this.claims.delete(owner)
    const result = this.results.get(what!)
    if (role === "take") {
      const item = this.items.find((item) => item.taker === owner)
      this.takers = this.takers.filter((taker) => taker !== owner)
      if (item === undefined) return
      item.taker = undefined
      if (item.giver === undefined || !this.#alive(item.giver)) {
        this.items = this.items.filter((other) => other !== item)
      } else this.#serve()
    } else if (result?.owner === owner) {
      if (gone) this.results.delete(what!)
      else result.kept = true
    } else if (role === "give") {
      const item = this.items.find((item) => item.giver === owner)
      if (item?.taker === undefined) this.items = this.items.filter((other) => other !== item)
      else if (gone) item.giver = undefined
    } else if (this.parties.get(what!)?.owner === owner) {
      this.#separate(what!)
    }
  }

  get state() {
    return [
      this.items.filter(({ giver }) => giver !== undefined && this.claims.has(giver)).length,
      this.takers.length,
      this.waiting === undefined ? 0 : 1
    ]
  }
}

const session = fc.nat({ max: 2 })
const pick = fc.nat({ max: 30 })
const step = fc.oneof(
  { weight: 6, arbitrary: fc.record({ do: fc.constantFrom("give", "take", "exchange"), session }) },
  { weight: 3, arbitrary: fc.record({ do: fc.constant("acknowledge"), session, pick, accepted: fc.boolean() }) },
  { weight: 3, arbitrary: fc.record({ do: fc.constant("accept"), session, pick }) },
  { weight: 3, arbitrary: fc.record({ do: fc.constantFrom("leave", "check"), session, pick }) },
  { weight: 2, arbitrary: fc.record({ do: fc.constant("again"), session, pick }) },
  { weight: 1, arbitrary: fc.record({ do: fc.constant("repeat"), session }) },
  { weight: 1, arbitrary: fc.record({ do: fc.constant("die"), session, closed: fc.boolean() }) },
  { weight: 1, arbitrary: fc.record({ do: fc.constant("reap"), session }) }
) as fc.Arbitrary<{ do: string; session: number; pick: number; accepted: boolean; closed: boolean }>

layer(TestServer.layer, { excludeTestServices: true })("the rendezvous actor", (it) => {
  it.effect(
    "hands over and exchanges as the model does, and leaves nothing but what dead sessions may ask for",
    () =>
      Effect.gen(function*() {
        const server = yield* TestServer
        const redis = yield* client(server)
        yield* Effect.promise(() =>
          fc.assert(
            fc.asyncProperty(fc.array(step, { minLength: 1, maxLength: 80, size: "max" }), async (steps) => {
              const namespace = freshNamespace()
              const name = "x\u0000}{:\n"
              const { answers, end, key, look, mail, open, reap, repeat, send } = actor(
                redis,
                namespace,
                `rendezvous:${name}`
              )
              const [, ...itemKeys] = keysOf(key)
              const model = new Model()
              const names = ["S0", "S1", "S2"]
              // The claims of each session, and what they are about.
              const asked = new Map<string, Array<readonly [id: string, role: string, what: string]>>()
              let unreaped: Array<string> = []
              const all = [...names]
              let count = 0
              for (const name of names) await open(name)

              const ask = async (name: string, role: string, what: string) => {
                const id = `i${++count}`
                asked.set(name, [...asked.get(name) ?? [], [id, role, what]])
                return [await request(name, id, role, what), expected(`${name}/${id}`, role, what)] as const
              }
              const request = (name: string, id: string, role: string, what: string) => {
                const details = role === "take" ? [] : [what, 60_000, JSON.stringify(valueOf(what))]
                return send(name, `rendezvous.${role}`, [id, ...details])
              }
              const expected = (owner: Owner, role: string, what: string): Reply =>
                role === "take"
                  ? model.take(owner)
                  : role === "give"
                  ? model.give(owner, what)
                  : model.exchange(owner, what)
              const bury = async (name: string) => {
                unreaped = unreaped.filter((other) => other !== name)
                assert.strictEqual(await reap(name, (id) => model.leave(`${name}/${id}`)), "forgotten")
              }
              const plain = ([tag, ...rest]: Reply): Reply =>
                tag === "granted" ? [tag, ...rest.slice(1)] : tag === "queued" ? [tag] : [tag, ...rest]

              for (const step of steps) {
                const name = names[step.session]!
                const mine = asked.get(name) ?? []
                const [id, role, what] = mine[(step.pick ?? 0) % Math.max(1, mine.length)] ?? ["none", "", ""]
                const owner = `${name}/${id}`
                let outcome: readonly [Reply, Reply] | undefined
                switch (step.do) {
                  case "give":
                  case "take":
                  case "exchange":
                    outcome = await ask(name, step.do, step.do === "take" ? "" : `n${count}`)
                    break
                  case "acknowledge":
                    outcome = [
                      await send(name, "rendezvous.acknowledge", [id, step.accepted ? "1" : ""]),
                      model.acknowledge(owner, step.accepted)
                    ]
                    break
                  case "accept": {
                    // Only those that were asked do.
                    const party = model.parties.get(what)
                    if (role !== "exchange" || party?.asked === false && party.owner === owner) break
                    if (model.results.has(what)) break
                    outcome = [await send(name, "rendezvous.accept", [id]), model.accept(owner)]
                    break
                  }
                  case "check": {
                    // The same request again, under the same id: what has become of it.
                    if (!model.claims.has(owner)) break
                    const reply = await request(name, id, role, what)
                    const known = model.check(owner)
                    // Its counterpart has left before it was asked, so it begins anew.
                    outcome = [reply, known[0] === "absent" ? expected(owner, role, what) : known]
                    break
                  }
                  case "leave":
                    model.leave(owner)
                    outcome = [await send(name, "session.leave", [id]), ["left"]]
                    break
                  case "again": {
                    // What a dead session was about, and no other session has asked for, or perhaps its reaper has not come yet.
                    const lost = [...asked].filter(([session]) => model.dead.has(session) && !model.closed.has(session))
                      .flatMap(([, claims]) => claims).filter(([, role]) => role !== "take")
                    const found = lost[step.pick % Math.max(1, lost.length)]
                    if (found === undefined) break
                    const living = names.flatMap((name) => asked.get(name) ?? [])
                    if (living.some(([, , what]) => what === found[2])) break
                    outcome = await ask(name, found[1], found[2])
                    break
                  }
                  case "repeat": {
                    const again = await repeat(name)
                    if (again !== undefined) assert.deepStrictEqual(again, answers.get(name))
                    break
                  }
                  case "die": {
                    await end(name, step.closed)
                    model.dead.add(name)
                    if (step.closed) model.closed.add(name)
                    unreaped.push(name)
                    names[step.session] = `N${++count}`
                    all.push(names[step.session]!)
                    await open(names[step.session]!)
                    break
                  }
                  case "reap":
                    if (unreaped[0] !== undefined) await bury(unreaped[0])
                }
                if (outcome !== undefined) assert.deepStrictEqual(plain(outcome[0]), outcome[1], JSON.stringify(step))
                for (const name of names) {
                  const events = (await mail(name)).filter(([tag]) => tag === "granted" || tag === "again")
                  assert.deepStrictEqual<unknown>(
                    events.map(([tag, id, ...rest]) => [tag, id, ...rest.slice(1)]),
                    model.events.get(name) ?? []
                  )
                }
                assert.deepStrictEqual((await look("rendezvous.state", [])).slice(1), model.state)
              }
              for (const name of names) {
                await end(name, true)
                model.dead.add(name)
                model.closed.add(name)
                unreaped.push(name)
              }
              while (unreaped[0] !== undefined) await bury(unreaped[0])
              assert.strictEqual(await redis.exists(itemKeys), 0)
              const kept = [...model.results.values()].some(({ kept }) => kept)
              const left = await redis.pttl(key)
              if (model.results.size === 0 && !kept) assert.isTrue(left === -2 || left > 0)
              else assert.isTrue(left > 0 && left <= 60_000, `${left}`)
              const results = (await redis.hkeys(key)).filter((field) => field.startsWith("r")).sort()
              assert.deepStrictEqual(results, [...model.results.keys()].map((id) => `r${id}`).sort())
            }),
            { numRuns: runs(120), endOnFailure: false }
          )
        )
      }),
    120_000
  )

  // What asks it may be in its mailbox, unread, when it asks after a reconnect: asked twice, it would answer the wrong one.
  it.effect("asks a party once under one claim, also when the other one has left meanwhile", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const redis = yield* client(server)
      yield* Effect.promise(async () => {
        const { mail, open, send } = actor(redis, freshNamespace(), "rendezvous:x")
        for (const name of ["A", "B", "C"]) await open(name)
        const exchange = (name: string) => send(name, "rendezvous.exchange", ["1", name, 60_000, `"${name}"`])
        await exchange("A")
        await exchange("B")
        await send("B", "session.leave", ["1"])
        const [tag, , stage, value] = await exchange("A")
        assert.deepStrictEqual([tag, stage, value], ["granted", "alone", null])
        await exchange("A")
        assert.strictEqual((await exchange("C"))[0], "queued")
        assert.strictEqual((await mail("A")).filter(([event]) => event === "granted").length, 1)
        assert.deepStrictEqual(await send("A", "rendezvous.accept", ["1"]), ["alone"])
      })
    }))

  it.effect("has a party meet no other one under a claim that was asked for again in the call that had left it alone", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const redis = yield* client(server)
      yield* Effect.promise(async () => {
        const { answers, end, key, open, reap, send } = actor(redis, freshNamespace(), "rendezvous:x")
        for (const name of ["A", "B"]) await open(name)
        const asked = (name: string) => ["1", name, 60_000, `"${name}"`] as const
        for (const name of ["A", "B"]) await send(name, "rendezvous.exchange", asked(name))
        await send("B", "session.leave", ["1"])
        await send("A", "rendezvous.accept", ["1", "=rendezvous.exchange", ...asked("A")])
        assert.deepStrictEqual(answers.get("A")![1].map(([tag]) => tag), ["alone", "granted"])
        assert.strictEqual((await send("B", "rendezvous.exchange", ["2", "C", 60_000, `"C"`]))[0], "queued")
        assert.deepStrictEqual(await send("A", "session.leave", ["1"]), ["left"])
        assert.strictEqual((await send("A", "rendezvous.exchange", ["2", ...asked("A").slice(1)]))[0], "queued")
        assert.deepStrictEqual(await send("B", "rendezvous.accept", ["2"]), ["accepted"])
        for (const name of ["A", "B"]) await send(name, "session.leave", ["2"])
        await end("A", true)
        await reap("A")
        assert.strictEqual(await redis.exists(key), 0)
      })
    }))
})
