/**
 * The task group actor itself: random histories of requests, sent straight to the partition actor in Redis and compared,
 * reply by reply and event by event, with a small model in memory.
 */
import { assert, layer } from "@effect/vitest"
import { Effect } from "effect"
import * as fc from "fast-check"
import { actor, client } from "./support/actor.ts"
import { freshNamespace, TestServer } from "./support/live.ts"

type Status = "r" | "d" | "f" | "l"

interface Shard {
  status: Status
  token: number
  owner: string
  value: string
}

/** What the actor is to do, in as few words as possible. */
class Model {
  open = false
  expected = 0
  least = 0
  round = 0
  reset = ""
  readonly members = new Map<string, number>()
  shards = new Map<string, Shard>()
  readonly dead = new Set<string>()
  /** Every change: the counts after it, and the shard. */
  readonly log: Array<ReadonlyArray<unknown>> = []

  count(status: Status): number {
    return [...this.shards.values()].filter((shard) => shard.status === status).length
  }

  get counts(): ReadonlyArray<number> {
    const { count, expected, least, round } = this
    return [expected, least, ...(["r", "d", "f", "l"] as const).map((status) => count.call(this, status)), round]
  }

  #change(...shard: ReadonlyArray<unknown>): void {
    this.log.push([...this.counts, ...shard])
  }

  #move(name: string, status: Status, token: number, owner: string, value = ""): void {
    this.shards.set(name, { ...this.shards.get(name), status, token, owner, value })
    this.#change(name, status)
  }

  #begin(round: number): void {
    this.shards = new Map()
    this.round = round
    this.least = 0
    this.#change()
  }

  join(owner: string, shards: number, round: number, known: number): string {
    if (!this.open) {
      this.open = true
      this.expected = shards
      this.least = 0
      this.round = Math.max(1, round)
      this.reset = ""
      this.shards = new Map()
    } else if (this.expected === 0) {
      this.expected = shards
      if (shards > 0) this.#change()
    } else if (round === 0 && shards > 0 && shards !== this.expected) {
      return "mismatch"
    }
    if (round > this.round) this.#begin(round)
    if (round === this.round && known > this.shards.size) this.least = Math.max(this.least, known)
    if (this.members.has(owner)) return "posted"
    this.members.set(owner, this.log.length)
    return "observing"
  }

  leave(owner: string): void {
    if (this.members.delete(owner)) {
      if (this.members.size === 0 && this.shards.size === 0) this.open = false
      return
    }
    for (const [name, shard] of this.shards) {
      if (shard.owner === owner && shard.status === "r") this.#move(name, "l", shard.token, owner)
    }
  }

  isAlive(owner: string): boolean {
    return !this.dead.has(owner.split("/")[0]!)
  }

  register(owner: string, name: string, token: number): string {
    if (!this.open || this.members.size === 0) return "missing"
    const shard = this.shards.get(name)
    if (shard?.status === "d") return "done"
    if (shard?.status === "r") {
      if (this.isAlive(shard.owner)) return "taken"
      this.#move(name, "l", shard.token, shard.owner)
    }
    this.#move(name, "r", token, owner)
    return "granted"
  }

  submit(name: string, token: number, fine: boolean, value: string): string {
    const shard = this.shards.get(name)
    if (!this.open || shard?.token !== token || shard.status === "l") return "refused"
    if (shard.status === "r") {
      if (!this.isAlive(shard.owner)) return "refused"
      this.#move(name, fine ? "d" : "f", token, shard.owner, value)
    }
    return "submitted"
  }

  restore(name: string, status: Status, token: number, value: string, round: number): string {
    if (!this.open || this.members.size === 0) return "missing"
    if (round !== this.round) return "refused"
    const shard = this.shards.get(name)
    const newer = shard === undefined || shard.token < token ||
      shard.token === token && status !== "l" && (shard.status === "r" || shard.status === "l")
    if (!newer || shard?.status === "d") return "refused"
    this.#move(name, status, token, "", value)
    return "restored"
  }

  clear(reset: string): string {
    if (!this.open || this.members.size === 0) return "missing"
    if (this.reset !== reset) {
      this.reset = reset
      this.#begin(this.round + 1)
    }
    return "reset"
  }
}

const names = ["a", "b\"]\\", "c\n/:\u0000{}é😀"]

const session = fc.nat({ max: 2 })
const shard = fc.nat({ max: 2 })
const pick = fc.nat({ max: 30 })
const more = fc.nat({ max: 2 })

const step = fc.oneof(
  { weight: 4, arbitrary: fc.record({ do: fc.constant("join" as const), session, shard, pick, more }) },
  { weight: 1, arbitrary: fc.record({ do: fc.constant("leave" as const), session, shard, pick, more }) },
  { weight: 10, arbitrary: fc.record({ do: fc.constant("register" as const), session, shard, pick, more }) },
  { weight: 2, arbitrary: fc.record({ do: fc.constant("give" as const), session, shard, pick, more }) },
  { weight: 8, arbitrary: fc.record({ do: fc.constant("submit" as const), session, shard, pick, more }) },
  { weight: 3, arbitrary: fc.record({ do: fc.constant("restore" as const), session, shard, pick, more }) },
  { weight: 1, arbitrary: fc.record({ do: fc.constant("reset" as const), session, shard, pick, more }) },
  { weight: 2, arbitrary: fc.record({ do: fc.constant("repeat" as const), session, shard, pick, more }) },
  { weight: 2, arbitrary: fc.record({ do: fc.constant("die" as const), session, shard, pick, more }) }
)

layer(TestServer.layer, { excludeTestServices: true })("the task group actor", (it) => {
  it.effect(
    "answers, tells everybody of every change, never overwrites, and leaves nothing behind",
    () =>
      Effect.gen(function*() {
        const server = yield* TestServer
        const redis = yield* client(server)
        yield* Effect.promise(() =>
          fc.assert(
            fc.asyncProperty(fc.array(step, { minLength: 1, maxLength: 60, size: "max" }), async (steps) => {
              const namespace = freshNamespace()
              const { answers, ask, end, itemKeys, key, keys, mail, open, reap, repeat, send } = actor(
                redis,
                namespace,
                "tasks:x\u0000}{:\n",
                "tasks-items:x\u0000}{:\n"
              )
              const resource = [key, ...itemKeys]
              const model = new Model()
              const sessions = ["S0", "S1", "S2"]
              const given: Array<{ readonly name: string; readonly token: number; readonly owner: string }> = []
              const versions = new Map<string, number>()
              let count = 0
              let newest = 0
              for (const id of sessions) await open(id)

              const memberOf = (id: string) =>
                [...model.members.keys()].find((owner) => owner.startsWith(`${id}/`))?.split("/")[1]

              const register = async (id: string, name: string) => {
                const own = `i${++count}`
                const reply = await send(id, "tasks.register", [own, name])
                // It has to be the newest of all.
                const token = reply[0] === "granted" ? Number(reply[1]) : newest
                if (reply[0] === "granted") {
                  assert.isAbove(token, newest)
                  newest = token
                  given.push({ name, token, owner: `${id}/${own}` })
                }
                if (reply[0] === "done") assert.strictEqual(JSON.stringify(reply[1]), model.shards.get(name)!.value)
                assert.strictEqual(reply[0], model.register(`${id}/${own}`, name, token))
              }

              const check = async () => {
                const [tag, ...page] = await ask("", "tasks.read", [1, "dfl"], resource) as unknown as [
                  string,
                  ...Array<number>,
                  ReadonlyArray<readonly [string, Status, unknown]>
                ]
                assert.strictEqual(tag, model.open ? "page" : "missing")
                if (model.open) {
                  assert.deepStrictEqual<unknown>(page.slice(0, 7), model.counts)
                  assert.strictEqual(page[8], 0)
                  const rest = [...model.shards].filter(([, { status }]) => status !== "r")
                  assert.deepStrictEqual<unknown>(
                    page[9],
                    rest.map(([name, { status, value }]) => [name, status, value === "" ? null : JSON.parse(value)])
                  )
                }
                for (const [owner, from] of model.members) {
                  const [session, id] = owner.split("/") as [string, string]
                  let version = versions.get(owner)!
                  const shown: Array<ReadonlyArray<unknown>> = []
                  for (const [tag, of, ...state] of await mail(session)) {
                    if (tag !== "changed" || of !== id) continue
                    const next = Number(state[7])
                    // Who joins again is told how it is, behind everything else.
                    if (next === version) continue
                    assert.strictEqual(next, ++version)
                    shown.push([...state.slice(0, 7), ...state.slice(8)])
                  }
                  assert.deepStrictEqual<unknown>(shown, model.log.slice(from))
                }
              }

              for (const one of steps) {
                const id = sessions[one.session]!
                const name = names[one.shard]!
                const pickOne = given[one.pick % Math.max(1, given.length)]
                switch (one.do) {
                  case "join": {
                    const round = [0, model.round, model.round + 1][one.pick % 3]!
                    const shards = one.more === 0 ? 0 : 1 + one.more
                    const own = memberOf(id) ?? `m${++count}`
                    const reply = await send(id, "tasks.join", [own, shards, 60_000, round, one.shard])
                    assert.strictEqual(reply[0], model.join(`${id}/${own}`, shards, round, one.shard))
                    if (reply[0] !== "observing") break
                    assert.deepStrictEqual<unknown>(reply.slice(1, 8), model.counts)
                    versions.set(`${id}/${own}`, Number(reply[8]))
                    break
                  }
                  case "leave": {
                    const own = memberOf(id)
                    if (own === undefined) break
                    await send(id, "session.leave", [own])
                    model.leave(`${id}/${own}`)
                    break
                  }
                  case "register":
                    await register(id, name)
                    break
                  case "give": {
                    const own = pickOne?.owner.split("/") ?? [id, "none"]
                    if (own[0] !== id) break
                    await send(id, "session.leave", [own[1]!])
                    model.leave(own.join("/"))
                    break
                  }
                  case "submit": {
                    if (pickOne === undefined) break
                    const value = JSON.stringify({ text: names[one.more], n: count })
                    const fine = one.more > 0
                    const reply = await send(id, "tasks.submit", [pickOne.name, pickOne.token, fine ? "1" : "", value])
                    assert.strictEqual(reply[0], model.submit(pickOne.name, pickOne.token, fine, value))
                    break
                  }
                  case "restore": {
                    if (pickOne === undefined) break
                    const status = (["d", "f", "l"] as const)[one.more]!
                    const value = status === "l" ? "" : JSON.stringify([one.pick])
                    const round = model.round - Number(one.shard === 2)
                    const reply = await send(id, "tasks.restore", [pickOne.name, status, pickOne.token, value, round])
                    assert.strictEqual(reply[0], model.restore(pickOne.name, status, pickOne.token, value, round))
                    break
                  }
                  case "reset": {
                    const reset = `reset ${Math.floor(count / 3)}`
                    const reply = await send(id, "tasks.reset", [reset])
                    assert.strictEqual(reply[0], model.clear(reset))
                    break
                  }
                  case "repeat": {
                    // The reply was lost and the batch is sent again: the same answer, and nothing happens.
                    const again = await repeat(id)
                    if (again !== undefined) assert.deepStrictEqual(again, answers.get(id))
                    break
                  }
                  case "die": {
                    await end(id)
                    model.dead.add(id)
                    // Others go on before anybody reaps.
                    const other = sessions[(one.session + 1) % 3]!
                    await register(other, name)
                    if (pickOne !== undefined) {
                      const reply = await send(other, "tasks.submit", [pickOne.name, pickOne.token, "1", "\"late\""])
                      assert.strictEqual(reply[0], model.submit(pickOne.name, pickOne.token, true, "\"late\""))
                    }
                    assert.strictEqual(await reap(id, (own) => model.leave(`${id}/${own}`)), "forgotten")
                    assert.strictEqual(await redis.exists(keys(id).slice(2)), 0)
                    sessions[one.session] = `N${++count}`
                    await open(sessions[one.session]!)
                  }
                }
                await check()
              }
              for (const id of sessions) {
                await end(id)
                assert.strictEqual(await reap(id, (own) => model.leave(`${id}/${own}`)), "forgotten")
              }
              // Remembered for as long as it was told, if there is anything to remember.
              for (const key of resource) {
                const left = await redis.pttl(key)
                const wanted = model.open && (key === resource[0] || model.shards.size > 0)
                assert.isTrue(wanted ? left > 50_000 && left <= 60_000 : left === -2, `${key} ${left}`)
              }
              await redis.del(resource)
              assert.deepStrictEqual(await redis.keys(`{${namespace}:*`), [`{${namespace}:00}:sessions`])
            }),
            { numRuns: 200, endOnFailure: false }
          )
        )
      }),
    120_000
  )
})
