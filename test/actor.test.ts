/**
 * The semaphore actor itself: random histories of requests, sent straight to the partition actor in Redis and compared,
 * reply by reply and event by event, with a small model in memory.
 */
import { assert, layer } from "@effect/vitest"
import { Effect } from "effect"
import * as fc from "fast-check"
import { actor, client } from "./support/actor.ts"
import { freshNamespace, TestServer } from "./support/live.ts"

type Event = readonly ["granted" | "refused", string]

/** What the actor is to do, in as few words as possible. */
class Model {
  capacity = 0
  readonly holds = new Map<string, number>()
  queue: Array<readonly [owner: string, weight: number]> = []
  readonly dead = new Set<string>()
  readonly events = new Map<string, Array<Event>>()

  get taken(): number {
    return [...this.holds.values()].reduce((sum, weight) => sum + weight, 0)
  }

  #post(owner: string, event: "granted" | "refused"): void {
    const [session, id] = owner.split("/") as [string, string]
    this.events.set(session, [...this.events.get(session) ?? [], [event, id]])
  }

  #serve(): void {
    for (;;) {
      const first = this.queue[0]
      if (first === undefined) return
      const [owner, weight] = first
      if (!this.dead.has(owner.split("/")[0]!)) {
        if (this.capacity === 0) return
        if (weight > this.capacity) this.#post(owner, "refused")
        else if (this.taken + weight <= this.capacity) {
          this.holds.set(owner, weight)
          this.#post(owner, "granted")
        } else return
      }
      this.queue.shift()
    }
  }

  // A resource without a hold and a waiter is forgotten.
  #forget(): void {
    if (this.holds.size === 0 && this.queue.length === 0) this.capacity = 0
  }

  take(owner: string, weight: number, capacity: number, wait: boolean): string {
    if (this.holds.size === 0 && this.queue.length === 0) this.capacity = capacity
    if (this.capacity === 0) return "missing"
    const reply = weight > this.capacity
      ? "tooBig"
      : this.queue.length === 0 && this.taken + weight <= this.capacity
      ? "granted"
      : wait
      ? "queued"
      : "busy"
    if (reply === "granted") this.holds.set(owner, weight)
    if (reply === "queued") this.queue.push([owner, weight])
    this.#forget()
    return reply
  }

  drop(owner: string): string {
    const found = this.holds.delete(owner) || this.queue.some(([waiter]) => waiter === owner)
    this.queue = this.queue.filter(([waiter]) => waiter !== owner)
    if (found) this.#serve()
    this.#forget()
    return found ? "released" : "absent"
  }

  create(owner: string, permits: number): string {
    if (this.capacity !== 0 && this.capacity !== permits) return "mismatch"
    this.capacity = permits
    this.holds.set(owner, 0)
    this.#serve()
    return "granted"
  }

  attach(owner: string): string {
    if (this.capacity === 0) {
      this.queue.push([owner, 0])
      return "queued"
    }
    this.holds.set(owner, 0)
    return "granted"
  }

  resize(permits: number): string {
    if (this.capacity === 0) return "missing"
    this.capacity = permits
    this.#serve()
    this.#forget()
    return "resized"
  }

  reweigh(owner: string, weight: number): string {
    const before = this.holds.get(owner)
    if (before === undefined) return "absent"
    if (weight > before && this.taken - before + weight > this.capacity) return "conflict"
    this.holds.set(owner, weight)
    this.#serve()
    return "granted"
  }

  check(owner: string): string {
    if (this.holds.has(owner)) return "granted"
    return this.queue.some(([waiter]) => waiter === owner) ? "queued" : "absent"
  }

  /** A session dies: nothing happens until it is reaped, but its waiters are passed over. */
  die(session: string): void {
    this.dead.add(session)
  }

  reap(session: string): void {
    for (const owner of [...this.holds.keys(), ...this.queue.map(([owner]) => owner)]) {
      if (owner.startsWith(`${session}/`)) this.drop(owner)
    }
  }
}

type Step =
  | { readonly do: "take"; readonly session: number; readonly weight: number; readonly wait: boolean }
  | { readonly do: "release" | "check"; readonly session: number; readonly pick: number }
  | { readonly do: "reweigh"; readonly session: number; readonly pick: number; readonly weight: number }
  | { readonly do: "create"; readonly session: number; readonly permits: number }
  | { readonly do: "attach" | "die" | "repeat"; readonly session: number }
  | { readonly do: "resize"; readonly session: number; readonly permits: number }

const session = fc.nat({ max: 2 })
const pick = fc.nat({ max: 30 })
const weight = fc.integer({ min: 1, max: 4 })
const permits = fc.integer({ min: 1, max: 4 })

const step: fc.Arbitrary<Step> = fc.oneof(
  { weight: 8, arbitrary: fc.record({ do: fc.constant("take" as const), session, weight, wait: fc.boolean() }) },
  { weight: 6, arbitrary: fc.record({ do: fc.constant("release" as const), session, pick }) },
  { weight: 1, arbitrary: fc.record({ do: fc.constant("check" as const), session, pick }) },
  { weight: 2, arbitrary: fc.record({ do: fc.constant("reweigh" as const), session, pick, weight }) },
  { weight: 2, arbitrary: fc.record({ do: fc.constant("create" as const), session, permits }) },
  { weight: 1, arbitrary: fc.record({ do: fc.constant("attach" as const), session }) },
  { weight: 1, arbitrary: fc.record({ do: fc.constant("resize" as const), session, permits }) },
  { weight: 1, arbitrary: fc.record({ do: fc.constant("repeat" as const), session }) },
  { weight: 1, arbitrary: fc.record({ do: fc.constant("die" as const), session }) }
)

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
            async (steps, isLock) => {
              const namespace = freshNamespace()
              const { answers, ask, end, key, keys, mail, open, reap, repeat, send } = actor(
                redis,
                namespace,
                isLock ? "lock:x\u0000}{:\n" : "sem:é😀"
              )
              const model = new Model()
              const names = ["S0", "S1", "S2"]
              const ids: Array<Array<string>> = [[], [], []]
              let generation = 0
              let count = 0
              let token = 0
              const implicit = isLock ? 1 : 0
              for (const name of names) await open(name)

              const grants = (reply: ReadonlyArray<string | number>) => {
                if (reply[0] !== "granted") return
                assert.isAbove(Number(reply[1]), token, "tokens increase")
                token = Number(reply[1])
              }
              // Events of one request come in order of their tokens; those of several sessions are merged by token.
              const seen = new Map<string, number>()
              const collect = async () => {
                const fresh: Array<Array<string | number>> = []
                for (const name of names) {
                  const events = (await mail(name)).filter(([tag]) => tag === "granted" || tag === "refused")
                  assert.deepStrictEqual<unknown>(events.map(([tag, id]) => [tag, id]), model.events.get(name) ?? [])
                  fresh.push(...events.slice(seen.get(name) ?? 0))
                  seen.set(name, events.length)
                }
                fresh.filter(([tag]) => tag === "granted").map((event) => [event[0]!, event[2]!])
                  .sort((a, b) => Number(a[1]) - Number(b[1])).forEach(grants)
              }

              for (const step of steps) {
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
                    reply = await send(name, "semaphore.take", [id, heavy, implicit, step.wait ? "1" : ""])
                    expected = model.take(owner(id), heavy, implicit, step.wait)
                    grants(reply)
                    break
                  }
                  case "release":
                  case "check": {
                    const id = mine[step.pick % Math.max(1, mine.length)] ?? "none"
                    reply = await send(name, `semaphore.${step.do}`, [id])
                    expected = step.do === "release" ? model.drop(owner(id)) : model.check(owner(id))
                    break
                  }
                  case "reweigh": {
                    const id = mine[step.pick % Math.max(1, mine.length)] ?? "none"
                    const before = model.holds.get(owner(id))
                    if (before === 0) break
                    reply = await send(name, "semaphore.reweigh", [id, step.weight])
                    expected = model.reweigh(owner(id), step.weight)
                    if (before !== undefined && step.weight > before) grants(reply)
                    break
                  }
                  case "create": {
                    if (isLock) break
                    const id = fresh()
                    reply = await send(name, "semaphore.create", [id, step.permits])
                    expected = model.create(owner(id), step.permits)
                    grants(reply)
                    break
                  }
                  case "attach": {
                    if (isLock) break
                    const id = fresh()
                    reply = await send(name, "semaphore.attach", [id])
                    expected = model.attach(owner(id))
                    grants(reply)
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
                    // Others go on before anybody reaps.
                    const other = names[(step.session + 1) % 3]!
                    const id = `i${++count}`
                    ids[(step.session + 1) % 3]!.push(id)
                    const heavy = 1
                    const taken = await send(other, "semaphore.take", [id, heavy, implicit, "1"])
                    assert.strictEqual(taken[0], model.take(`${other}/${id}`, heavy, implicit, true))
                    grants(taken)
                    for (const id of ids[(step.session + 1) % 3]!) {
                      const dropped = await send(other, "semaphore.release", [id])
                      assert.strictEqual(dropped[0], model.drop(`${other}/${id}`))
                      await collect()
                    }
                    model.events.delete(name)
                    seen.delete(name)
                    model.reap(name)
                    assert.strictEqual(await reap(name), "forgotten")
                    assert.strictEqual(await redis.exists(keys(name).slice(2)), 0)
                    const next = `N${++generation}`
                    names[step.session] = next
                    ids[step.session] = []
                    await open(next)
                    break
                  }
                }
                if (reply !== undefined) assert.strictEqual(reply[0], expected, JSON.stringify(step))
                await collect()
                const [, capacity, taken, holds, waiting] = await ask("", "semaphore.state", [], [key])
                assert.deepStrictEqual([taken, holds, waiting], [model.taken, model.holds.size, model.queue.length])
                if (!isLock) assert.strictEqual(capacity, model.capacity)
              }
              for (const name of names) await end(name)
              for (const name of names) assert.strictEqual(await reap(name), "forgotten")
              assert.strictEqual(await redis.exists(key), 0)
              assert.deepStrictEqual(await redis.keys(`{${namespace}:*`), [`{${namespace}:00}:sessions`])
              assert.deepStrictEqual(
                (await redis.hkeys(`{${namespace}:00}:sessions`)).sort(),
                token === 0 ? ["partitions", "protocol"] : ["partitions", "protocol", "token"]
              )
            }
          ),
          { numRuns: 200, endOnFailure: false }
        )
      )
    }), 120_000)
})
