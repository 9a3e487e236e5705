/**
 * The semaphore actor itself: random histories of requests, sent straight to the partition actor in Redis and compared,
 * reply by reply and event by event, with a small model in memory.
 */
import { assert, layer } from "@effect/vitest"
import { Effect } from "effect"
import * as fc from "fast-check"
import { actor, client } from "./support/actor.ts"
import { runs } from "./support/effort.ts"
import { freshNamespace, TestServer } from "./support/live.ts"
import { ownedIn } from "./support/sessions.ts"

type Event = readonly ["granted" | "exceeds" | "joined" | "recall", string]

/** What the actor is to do, in as few words as possible. */
class Model {
  capacity = 0
  /** Holds that their processes may keep, until another claim is in need of them. */
  readonly kept = new Set<string>()
  /** Since when what was kept has been on its way back, by the clock of the test: it is set to the time of the step that recalls. */
  recalledAt: number | undefined
  now = 0
  readonly holds = new Map<string, number>()
  readonly members = new Set<string>()
  queue: Array<readonly [owner: string, weight: number]> = []
  readonly dead = new Set<string>()
  readonly events = new Map<string, Array<Event>>()
  readonly #isLock: boolean

  constructor(isLock: boolean) {
    this.#isLock = isLock
  }

  get taken(): number {
    return [...this.holds.values()].reduce((sum, weight) => sum + weight, 0)
  }

  #post(owner: string, event: Event[0]): void {
    const [session, id] = owner.split("/") as [string, string]
    this.events.set(session, [...this.events.get(session) ?? [], [event, id]])
  }

  #serve(changed = false): void {
    for (;;) {
      const first = this.queue[0]
      if (first === undefined || !changed && this.capacity > 0 && this.taken >= this.capacity) return
      const [owner, weight] = first
      if (!this.dead.has(owner.split("/")[0]!)) {
        if (this.capacity === 0) return
        if (weight > this.capacity) this.#post(owner, "exceeds")
        else if (weight === 0) {
          this.members.add(owner)
          this.#post(owner, "joined")
        } else if (this.taken + weight <= this.capacity) {
          this.holds.set(owner, weight)
          this.#post(owner, "granted")
        } else return
      }
      this.queue.shift()
    }
  }

  // A resource without a hold and a waiter is forgotten.
  #forget(): void {
    if (!this.#isEmpty()) return
    this.capacity = 0
    this.recalledAt = undefined
  }

  #isEmpty(): boolean {
    return this.holds.size + this.members.size + this.queue.length === 0
  }

  /** The answer to a claim that asks again, if it is known. */
  #known(owner: string): string | undefined {
    return this.holds.has(owner) ? "granted" : this.queue.some(([waiter]) => waiter === owner) ? "queued" : undefined
  }

  take(owner: string, weight: number, capacity: number, wait: boolean, keep = false, soon = false): string {
    const known = this.#known(owner)
    if (known !== undefined) return known
    if (this.#isEmpty()) this.capacity = capacity
    if (this.capacity === 0) return "missing"
    const reply = weight > this.capacity
      ? "exceeds"
      : this.queue.length === 0 && this.taken + weight <= this.capacity
      ? keep ? "kept" : "granted"
      : this.#recall() || wait || soon
      ? "queued"
      : "busy"
    if (reply === "kept") {
      this.kept.add(owner)
      this.recalledAt = undefined
    }
    if (reply === "kept" || reply === "granted") this.holds.set(owner, weight)
    if (reply === "queued") this.queue.push([owner, weight])
    this.#forget()
    return reply
  }

  /** Others want what is kept. Answers whether a process that keeps it is alive. */
  #recall(): boolean {
    const alive = [...this.kept].filter((owner) => !this.dead.has(owner.split("/")[0]!))
    for (const owner of alive) this.#post(owner, "recall")
    this.kept.clear()
    if (alive.length > 0) this.recalledAt = this.now
    return alive.length > 0
  }

  drop(owner: string): string {
    this.kept.delete(owner)
    // There is only one hold of a lock that can be on its way back.
    if (this.#isLock && this.holds.has(owner)) this.recalledAt = undefined
    const found = this.holds.delete(owner) || this.members.delete(owner) ||
      this.queue.some(([waiter]) => waiter === owner)
    this.queue = this.queue.filter(([waiter]) => waiter !== owner)
    if (found) this.#serve()
    this.#forget()
    return found ? "released" : "absent"
  }

  join(owner: string, permits: number, mismatch: "fail" | "keep" | "resize" | "attach"): string {
    if (this.capacity === 0 && mismatch === "attach") {
      if (this.#known(owner) === undefined) this.queue.push([owner, 0])
      return "queued"
    }
    const differs = this.capacity !== 0 && this.capacity !== permits
    const member = this.members.has(owner)
    if (differs && mismatch === "fail" && !member && this.members.size > 0) return "mismatch"
    const keeps = mismatch === "attach" || mismatch === "keep" && this.members.size > 0
    if (this.capacity === 0 || differs && !member && !keeps) {
      this.capacity = permits
      if (this.taken > permits) this.#recall()
    }
    this.members.add(owner)
    this.#serve(true)
    return "joined"
  }

  resize(permits: number): string {
    if (this.capacity === 0) return "missing"
    this.capacity = permits
    if (this.taken > permits) this.#recall()
    this.#serve(true)
    this.#forget()
    return "resized"
  }

  reweigh(owner: string, weight: number): string {
    const before = this.holds.get(owner)
    if (before === undefined) return "absent"
    if (weight > before && this.taken - before + weight > this.capacity) {
      this.#recall()
      return "conflict"
    }
    this.holds.set(owner, weight)
    this.kept.delete(owner)
    this.#serve()
    return "granted"
  }

  /** A session dies: nothing happens until it is reaped, but its waiters are passed over. */
  die(session: string): void {
    this.dead.add(session)
  }

  reap(session: string): void {
    for (const owner of [...this.holds.keys(), ...this.members, ...this.queue.map(([owner]) => owner)]) {
      if (owner.startsWith(`${session}/`)) this.drop(owner)
    }
  }
}

type Step =
  | { readonly do: "take"; readonly session: number; readonly weight: number; readonly wait: boolean }
  | { readonly do: "keep"; readonly session: number; readonly wait: boolean; readonly keep: boolean }
  | { readonly do: "release" | "again"; readonly session: number; readonly pick: number }
  | { readonly do: "reweigh"; readonly session: number; readonly pick: number; readonly weight: number }
  | { readonly do: "join"; readonly session: number; readonly permits: number; readonly mismatch: Mismatch }
  | { readonly do: "die" | "repeat"; readonly session: number }
  | { readonly do: "resize"; readonly session: number; readonly permits: number }

type Mismatch = "fail" | "keep" | "resize" | "attach"

const mismatch = fc.constantFrom<Mismatch>("fail", "keep", "resize", "attach")
const session = fc.nat({ max: 2 })
const pick = fc.nat({ max: 30 })
const weight = fc.integer({ min: 1, max: 4 })
const permits = fc.integer({ min: 1, max: 4 })

const step: fc.Arbitrary<Step> = fc.oneof(
  { weight: 8, arbitrary: fc.record({ do: fc.constant("take" as const), session, weight, wait: fc.boolean() }) },
  {
    weight: 4,
    arbitrary: fc.record({ do: fc.constant("keep" as const), session, wait: fc.boolean(), keep: fc.boolean() })
  },
  { weight: 6, arbitrary: fc.record({ do: fc.constant("release" as const), session, pick }) },
  { weight: 1, arbitrary: fc.record({ do: fc.constant("again" as const), session, pick }) },
  { weight: 2, arbitrary: fc.record({ do: fc.constant("reweigh" as const), session, pick, weight }) },
  { weight: 3, arbitrary: fc.record({ do: fc.constant("join" as const), session, permits, mismatch }) },
  { weight: 1, arbitrary: fc.record({ do: fc.constant("resize" as const), session, permits }) },
  { weight: 1, arbitrary: fc.record({ do: fc.constant("repeat" as const), session }) },
  { weight: 1, arbitrary: fc.record({ do: fc.constant("die" as const), session }) }
)

/** An event for one claim: its tag, the claim, and the token if it is a grant. */
const tagged = (event: ReadonlyArray<any>): Array<string> =>
  event[0] === "each" ? [event[3], event[1]] : [event[0], event[1], event[2]]

layer(TestServer.layer, { excludeTestServices: true })("the semaphore actor", (it) => {
  it.effect("answers, grants in order, keeps within capacity, and leaves nothing behind", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const redis = yield* client(server)
      yield* Effect.promise(() =>
        fc.assert(
          fc.asyncProperty(
            fc.array(step, { minLength: 1, maxLength: 80, size: "max" }),
            fc.boolean(),
            fc.func(fc.boolean()),
            async (steps, isLock, beside) => {
              const namespace = freshNamespace()
              const { answers, ask, end, key, keys, mail, open, reap, repeat, send } = actor(
                redis,
                namespace,
                isLock ? "lock:x\u0000}{:\n" : "semaphore:é😀"
              )
              const model = new Model(isLock)
              const names = ["S0", "S1", "S2"]
              const ids: Array<Array<string>> = [[], [], []]
              const weights = new Map<string, number>()
              let generation = 0
              let count = 0
              let token = 0
              const implicit = isLock ? 1 : 0
              // One request of a call about a lock can take a path of its own.
              const sending = (name: string, verb: string, args: ReadonlyArray<string | number>) =>
                send(name, verb, args, undefined, undefined, undefined, beside(++sendings) ? ["session.renew"] : [])
              let sendings = 0
              const take = (name: string, id: string, weight: number, wait: boolean, keep = false, again = false) => {
                const how = `${wait ? 1 : 0}${keep ? "k" : ""}${again ? "a" : ""}`
                return isLock
                  ? sending(name, "lock.take", [id, how])
                  : sending(name, "semaphore.take", [id, weight, 0, how])
              }
              const release = (name: string, id: string) =>
                sending(name, `${isLock ? "lock" : "semaphore"}.release`, [id])
              for (const name of names) await open(name)

              const grants = (reply: ReadonlyArray<string | number>) => {
                if (reply[0] !== "granted" && reply[0] !== "kept") return
                assert.isAbove(Number(reply[1]), token, "tokens increase")
                // Its process gives the others that go with what it may keep.
                token = Number(reply[1]) + (reply[0] === "kept" ? Number(reply[2]) - 1 : 0)
              }
              // Events of one request come in order of their tokens; those of several sessions are merged by token.
              const seen = new Map<string, number>()
              const collect = async () => {
                const fresh: Array<Array<string | number>> = []
                for (const name of names) {
                  const events = (await mail(name)).filter(([tag]) => ["granted", "each", "recall"].includes(tag))
                    .map((event) => tagged(event))
                  assert.deepStrictEqual<unknown>(events.map(([tag, id]) => [tag, id]), model.events.get(name) ?? [])
                  fresh.push(...events.slice(seen.get(name) ?? 0))
                  seen.set(name, events.length)
                }
                fresh.filter(([tag]) => tag === "granted").map((event) => [event[0]!, event[2]!])
                  .sort((a, b) => Number(a[1]) - Number(b[1])).forEach(grants)
              }

              // Nothing may be kept whose tokens would be ahead of the clock: then the next one does not come from the clock.
              const isAhead = (reply: ReadonlyArray<string | number>) =>
                reply[0] === "granted" && Number(reply[1]) === token + 1

              // Whether a claim that does not wait queues for what is on its way back: for 100 ms, which may have passed meanwhile.
              const soon = ([tag]: ReadonlyArray<string | number>) => {
                if (model.recalledAt === undefined) return false
                // Redis counts whole milliseconds.
                return performance.now() - model.recalledAt < 98 || tag === "queued"
              }

              for (const step of steps) {
                model.now = performance.now()
                const name = names[step.session]!
                const mine = ids[step.session]!
                const owner = (id: string) => `${name}/${id}`
                const fresh = () => {
                  const id = `i${++count}`
                  mine.push(id)
                  return id
                }
                let reply: ReadonlyArray<string | number> | undefined
                let expected: string | undefined
                switch (step.do) {
                  case "take": {
                    const id = fresh()
                    const heavy = isLock ? 1 : step.weight
                    reply = await take(name, id, heavy, step.wait)
                    expected = model.take(owner(id), heavy, implicit, step.wait, false, soon(reply))
                    weights.set(id, heavy)
                    grants(reply)
                    break
                  }
                  case "keep": {
                    const id = fresh()
                    reply = await take(name, id, 1, step.wait, step.keep)
                    expected = model.take(owner(id), 1, implicit, step.wait, step.keep && !isAhead(reply), soon(reply))
                    weights.set(id, 1)
                    grants(reply)
                    break
                  }
                  case "release": {
                    const id = mine[step.pick % Math.max(1, mine.length)] ?? "none"
                    reply = await release(name, id)
                    expected = model.drop(owner(id))
                    break
                  }
                  case "again": {
                    // Asked again under the same id: told what has become of it, and granted no second time.
                    const id = mine[step.pick % Math.max(1, mine.length)]
                    const heavy = id === undefined ? undefined : weights.get(id)
                    if (id === undefined || heavy === undefined) break
                    const known = model.holds.has(owner(id))
                    reply = await take(name, id, heavy, true, false, true)
                    expected = model.take(owner(id), heavy, implicit, true)
                    if (!known) grants(reply)
                    break
                  }
                  case "reweigh": {
                    if (isLock) break
                    const id = mine[step.pick % Math.max(1, mine.length)] ?? "none"
                    const before = model.holds.get(owner(id))
                    reply = await send(name, "semaphore.reweigh", [id, step.weight, "1"])
                    expected = model.reweigh(owner(id), step.weight)
                    if (before !== undefined && step.weight > before) grants(reply)
                    break
                  }
                  case "join": {
                    if (isLock) break
                    const id = fresh()
                    reply = await send(name, "semaphore.join", [id, step.permits, step.mismatch])
                    expected = model.join(owner(id), step.permits, step.mismatch)
                    if (reply[0] === "joined") assert.strictEqual(reply[1], model.capacity)
                    break
                  }
                  case "resize":
                    if (isLock) break
                    reply = await send(name, "semaphore.resize", [step.permits])
                    expected = model.resize(step.permits)
                    break
                  case "repeat": {
                    // The reply was lost and the batch is sent again: the same answer, and nothing happens.
                    const again = await repeat(name)
                    if (again !== undefined) assert.deepStrictEqual(again, answers.get(name))
                    break
                  }
                  case "die": {
                    await end(name)
                    model.die(name)
                    assert.deepStrictEqual(await repeat(name) ?? ["expired"], ["expired"])
                    // Others go on before a reaper does.
                    const other = names[(step.session + 1) % 3]!
                    const id = `i${++count}`
                    ids[(step.session + 1) % 3]!.push(id)
                    const heavy = 1
                    const taken = await take(other, id, heavy, true)
                    assert.strictEqual(taken[0], model.take(`${other}/${id}`, heavy, implicit, true))
                    grants(taken)
                    for (const id of ids[(step.session + 1) % 3]!) {
                      const dropped = await release(other, id)
                      assert.strictEqual(dropped[0], model.drop(`${other}/${id}`))
                      await collect()
                    }
                    model.events.delete(name)
                    seen.delete(name)
                    model.reap(name)
                    assert.strictEqual(await reap(name), "forgotten")
                    assert.strictEqual(await redis.exists(keys(name).slice(3)), 0)
                    const next = `N${++generation}`
                    names[step.session] = next
                    ids[step.session] = []
                    await open(next)
                    break
                  }
                }
                if (reply !== undefined) assert.strictEqual(reply[0], expected, JSON.stringify(step))
                await collect()
                if (isLock) {
                  const [[, holders], [, waiters]] = [
                    await ask("", "lock.holders", [], key),
                    await ask("", "lock.waiters", [], key)
                  ]
                  assert.deepStrictEqual([holders.length, waiters.length], [model.holds.size, model.queue.length])
                } else {
                  const [, ...state] = await ask("", "semaphore.state", [], key)
                  const { capacity, holds, queue, taken } = model
                  assert.deepStrictEqual(state, [capacity, taken, holds.size, queue.length])
                }
              }
              const owned = (await Effect.runPromise(ownedIn(server, namespace))).map((entry) =>
                entry.slice(0, entry.indexOf(":"))
              )
              const claims = [...model.holds.keys(), ...model.members, ...model.queue.map(([owner]) => owner)]
                .map((owner) => owner.slice(owner.indexOf("/") + 1))
              // A waiter that is refused is given up by its session.
              const told = [...model.events.values()].flat().filter(([tag]) => tag === "exceeds").map(([, id]) => id)
              assert.deepStrictEqual(
                owned.filter((id) => claims.includes(id) || !told.includes(id)).sort(),
                claims.sort()
              )
              for (const name of names) await end(name)
              for (const name of names) assert.strictEqual(await reap(name), "forgotten")
              assert.strictEqual(await redis.exists(key), 0)
              assert.deepStrictEqual(
                (await redis.keys(`{${namespace}:*`)).sort(),
                [...token === 0 ? [] : [`{${namespace}:00}:floor`], `{${namespace}:00}:sessions`]
              )
              assert.deepStrictEqual(
                (await redis.hkeys(`{${namespace}:00}:sessions`)).sort(),
                token === 0
                  ? ["identity", "opened", "partitions", "protocol"]
                  : ["identity", "opened", "partitions", "protocol", "token"]
              )
            }
          ),
          { numRuns: runs(80), endOnFailure: false }
        )
      )
    }), 120_000)

  it.effect("owns a waiter once that was refused, and asks again before it receives the refusal", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const namespace = freshNamespace()
      const { open, send } = actor(yield* client(server), namespace, "semaphore:s")
      yield* Effect.promise(async () => {
        await open("S")
        const take = (id: string, weight: number) => send("S", "semaphore.take", [id, weight, 0, "1a"])
        await send("S", "semaphore.join", ["member", 2, "fail"])
        await take("holder", 1)
        assert.strictEqual((await take("waiter", 2))[0], "queued")
        await send("S", "semaphore.resize", [1])
        await send("S", "semaphore.resize", [2])
        assert.strictEqual((await take("waiter", 2))[0], "queued")
        assert.strictEqual((await send("S", "semaphore.release", ["waiter"]))[0], "released")
      })
      const owned = yield* ownedIn(server, namespace)
      assert.deepStrictEqual([...owned].sort(), ["holder:semaphore:s", "member:semaphore:s"])
    }))
})
