/**
 * The task group actor itself: random histories of requests, sent straight to the partition actor in Redis and compared,
 * reply by reply and event by event, with a small model in memory.
 */
import { assert, layer } from "@effect/vitest"
import { Effect } from "effect"
import * as fc from "fast-check"
import { actor, client, keysOf } from "./support/actor.ts"
import { runs } from "./support/effort.ts"
import { freshNamespace, TestServer } from "./support/live.ts"

type Status = "running" | "done" | "failed" | "lost"

interface Shard {
  status: Status
  token: number
  owner: string
  value: string
}

interface Joining {
  readonly shards: number
  readonly mismatch: "fail" | "keep" | "resize"
  readonly run: string
  readonly fresh: boolean
  readonly round: number
  readonly known: number
}

/** What the actor is to do, in as few words as possible. */
class Model {
  open = false
  expected = 0
  least = 0
  round = 0
  reset = ""
  run = ""
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
    return [
      expected,
      least,
      ...(["running", "done", "failed", "lost"] as const).map((status) => count.call(this, status)),
      round
    ]
  }

  #change(...shard: ReadonlyArray<unknown>): void {
    this.log.push([...this.counts, this.run, ...shard])
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

  isOver(run: string): boolean {
    return run !== "" && run !== this.run
  }

  join(owner: string, asked: Joining): string {
    const { fresh, mismatch, round, run, shards } = asked
    if (this.members.has(owner)) return "joined"
    if (!this.open) {
      this.open = true
      this.expected = shards
      this.least = 0
      this.round = Math.max(1, round)
      this.reset = ""
      this.run = run
      this.shards = new Map()
    }
    const others = this.members.size > 0
    const anew = round === 0 && (this.isOver(run) || fresh && !others)
    const differs = !anew && shards > 0 && this.expected > 0 && shards !== this.expected
    if (differs && others && mismatch === "fail") return "mismatch"
    if (anew) {
      if (run !== "") this.run = run
      this.expected = shards
      if (others || this.shards.size > 0) this.#begin(this.round + 1)
    } else if (shards > 0 && (this.expected === 0 || differs && mismatch !== "keep")) {
      this.expected = shards
      this.#change()
    }
    if (round > 0) this.#rejoin(asked)
    this.members.set(owner, this.log.length)
    return "joined"
  }

  #rejoin({ known, round, run, shards }: Joining): void {
    if (round > this.round) {
      if (this.isOver(run)) {
        this.run = run
        this.expected = shards
      }
      this.#begin(round)
    } else if (round === this.round && this.run === "") {
      this.run = run
    }
    if (round === this.round && !this.isOver(run) && known > this.shards.size) this.least = Math.max(this.least, known)
  }

  leave(owner: string): void {
    if (this.members.delete(owner)) {
      if (this.members.size === 0 && this.shards.size === 0) this.open = false
      return
    }
    for (const [name, shard] of this.shards) {
      if (shard.owner === owner && shard.status === "running") this.#move(name, "lost", shard.token, owner)
    }
  }

  isAlive(owner: string): boolean {
    return !this.dead.has(owner.split("/")[0]!)
  }

  register(owner: string, name: string, token: number, run = ""): string {
    if (!this.open || this.members.size === 0) return "missing"
    if (this.isOver(run)) return "ended"
    const shard = this.shards.get(name)
    if (shard?.status === "done") return "done"
    if (shard?.status === "running") {
      if (this.isAlive(shard.owner)) return "taken"
      this.#move(name, "lost", shard.token, shard.owner)
    }
    this.#move(name, "running", token, owner)
    return "granted"
  }

  /** What has become of a registration. */
  recall(owner: string, name: string, token: number): string {
    if (!this.open || this.members.size === 0) return "missing"
    const shard = this.shards.get(name)
    return shard?.status === "running" && shard.owner === owner && shard.token === token ? "granted" : "absent"
  }

  submit(name: string, token: number, fine: boolean, value: string): string {
    const shard = this.shards.get(name)
    if (!this.open || shard?.token !== token || shard.status === "lost") return "refused"
    if (shard.status === "running") {
      if (!this.isAlive(shard.owner)) return "refused"
      this.#move(name, fine ? "done" : "failed", token, shard.owner, value)
      return "submitted"
    }
    return shard.status === (fine ? "done" : "failed") && shard.value === value ? "repeated" : "refused"
  }

  restore(name: string, status: Status, token: number, value: string, round: number, run: string): string {
    if (!this.open || this.members.size === 0) return "missing"
    if (round !== this.round || this.isOver(run)) return "refused"
    const shard = this.shards.get(name)
    const newer = shard === undefined || shard.token < token ||
      shard.token === token && status !== "lost" && (shard.status === "running" || shard.status === "lost")
    if (!newer || shard?.status === "done") return "refused"
    this.#move(name, status, token, "", value)
    return "restored"
  }

  clear(reset: string, run: string): string {
    if (!this.open || this.members.size === 0) return "missing"
    if (this.isOver(run)) return "ended"
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
  { weight: 4, arbitrary: fc.record({ do: fc.constant("recall" as const), session, shard, pick, more }) },
  { weight: 2, arbitrary: fc.record({ do: fc.constant("give" as const), session, shard, pick, more }) },
  { weight: 8, arbitrary: fc.record({ do: fc.constant("submit" as const), session, shard, pick, more }) },
  { weight: 3, arbitrary: fc.record({ do: fc.constant("restore" as const), session, shard, pick, more }) },
  { weight: 1, arbitrary: fc.record({ do: fc.constant("reset" as const), session, shard, pick, more }) },
  { weight: 2, arbitrary: fc.record({ do: fc.constant("repeat" as const), session, shard, pick, more }) },
  { weight: 2, arbitrary: fc.record({ do: fc.constant("die" as const), session, shard, pick, more }) }
)

layer(TestServer.layer, { excludeTestServices: true })("the task group actor", (it) => {
  it.effect(
    "answers, notifies every member of every change, never overwrites, and leaves nothing behind",
    () =>
      Effect.gen(function*() {
        const server = yield* TestServer
        const redis = yield* client(server)
        yield* Effect.promise(() =>
          fc.assert(
            fc.asyncProperty(fc.array(step, { minLength: 1, maxLength: 60, size: "max" }), async (steps) => {
              const namespace = freshNamespace()
              const { answers, end, key, keys, look, mail, open, reap, repeat, send } = actor(
                redis,
                namespace,
                "taskGroup:x\u0000}{:\n"
              )
              const resource = keysOf(key)
              const model = new Model()
              const sessions = ["S0", "S1", "S2"]
              const given: Array<{ readonly name: string; readonly token: number; readonly owner: string }> = []
              const versions = new Map<string, number>()
              // How many times a member has asked again.
              const repeats = new Map<string, number>()
              let count = 0
              let newest = 0
              for (const id of sessions) await open(id)

              const memberOf = (id: string) =>
                [...model.members.keys()].find((owner) => owner.startsWith(`${id}/`))?.split("/")[1]

              // Of a member of this run, of one that does not say, and of one of another run, which is the least likely.
              const runOf = (pick: number) => pick % 7 === 0 ? "other" : pick % 2 === 0 ? "" : model.run

              const register = async (id: string, name: string, run = "") => {
                const own = `i${++count}`
                const reply = await send(id, "taskGroup.register", [own, name, run, ""])
                // It has to be the newest of all.
                const token = reply[0] === "granted" ? Number(reply[1]) : newest
                if (reply[0] === "granted") {
                  assert.isAbove(token, newest)
                  newest = token
                  given.push({ name, token, owner: `${id}/${own}` })
                }
                if (reply[0] === "done") assert.strictEqual(JSON.stringify(reply[1]), model.shards.get(name)!.value)
                assert.strictEqual(reply[0], model.register(`${id}/${own}`, name, token, run))
              }

              const check = async () => {
                type Entry = readonly [name: string, status: Status, value: unknown, about: unknown]
                const [tag, ...page] = await look("taskGroup.read", [1, "done failed lost"])
                assert.strictEqual(tag, model.open ? "page" : "missing")
                if (model.open) {
                  assert.deepStrictEqual<unknown>(page.slice(0, 7), model.counts)
                  assert.deepStrictEqual<unknown>(page.slice(8, 10), [model.run, 0])
                  const rest = [...model.shards].filter(([, { status }]) => status !== "running")
                  assert.deepStrictEqual<unknown>(
                    page[10],
                    rest.map((
                      [name, { status, value }]
                    ) => [name, status, value === "" ? null : JSON.parse(value), null])
                  )
                  const all = (await look("taskGroup.read", [1, "running done failed lost"]))[11] as Array<Entry>
                  assert.deepStrictEqual(
                    all.map(([name, status]) => [name, status]),
                    [...model.shards].map(([name, { status }]) => [name, status])
                  )
                }
                for (const [owner, from] of model.members) {
                  const [session, id] = owner.split("/") as [string, string]
                  let version = versions.get(owner)!
                  let again = 0
                  const shown: Array<ReadonlyArray<unknown>> = []
                  for (const [tag, of, ...state] of await mail(session)) {
                    if (tag !== "changed" || of !== id) continue
                    const next = Number(state[7])
                    // Asked again, it is the state that the events before have led to.
                    if (state.length === 9 && next === version) {
                      again++
                      continue
                    }
                    assert.strictEqual(next, ++version)
                    shown.push([...state.slice(0, 7), ...state.slice(8)])
                  }
                  assert.deepStrictEqual<unknown>(shown, model.log.slice(from))
                  assert.strictEqual(again, repeats.get(owner) ?? 0)
                }
              }

              for (const one of steps) {
                const id = sessions[one.session]!
                const name = names[one.shard]!
                const pickOne = given[one.pick % Math.max(1, given.length)]
                switch (one.do) {
                  case "join": {
                    const round = [0, model.round, model.round + 1][one.pick % 3]!
                    const asked: Joining = {
                      shards: one.more === 0 ? 0 : 1 + one.more,
                      mismatch: (["fail", "keep", "resize"] as const)[one.pick % 10 % 3]!,
                      run: one.pick < 16 ? "" : one.pick < 27 ? "run" : "another run",
                      fresh: one.pick % 5 === 0,
                      round,
                      known: one.shard
                    }
                    const own = memberOf(id) ?? `m${++count}`
                    const reply = await send(id, "taskGroup.join", [
                      own,
                      asked.shards,
                      asked.mismatch,
                      60_000,
                      0,
                      asked.run,
                      asked.fresh ? "1" : "",
                      "",
                      round,
                      asked.known
                    ])
                    assert.strictEqual(reply[0], model.join(`${id}/${own}`, asked))
                    if (reply[0] !== "joined") break
                    if (versions.has(`${id}/${own}`)) {
                      repeats.set(`${id}/${own}`, (repeats.get(`${id}/${own}`) ?? 0) + 1)
                      assert.strictEqual(reply[8], 0)
                    } else {
                      assert.deepStrictEqual<unknown>(reply.slice(1, 8), model.counts)
                      versions.set(`${id}/${own}`, Number(reply[8]))
                    }
                    break
                  }
                  case "leave": {
                    const own = memberOf(id)
                    if (own === undefined) {
                      break
                    }
                    await send(id, "session.leave", [own])
                    model.leave(`${id}/${own}`)
                    break
                  }
                  case "register":
                    await register(id, name, runOf(one.pick))
                    break
                  case "recall": {
                    if (pickOne === undefined) break
                    const [session, own] = pickOne.owner.split("/") as [string, string]
                    if (session !== id) break
                    const expected = model.recall(pickOne.owner, pickOne.name, pickOne.token)
                    const reply = await send(id, "taskGroup.register", [own, pickOne.name, runOf(one.shard), "1"])
                    assert.strictEqual(reply[0], expected)
                    if (expected !== "granted") break
                    assert.strictEqual(Number(reply[1]), pickOne.token)
                    // The same request again changes nothing either.
                    assert.deepStrictEqual(await send(id, "taskGroup.register", [own, pickOne.name, "", ""]), reply)
                    break
                  }
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
                    const reply = await send(id, "taskGroup.submit", [
                      pickOne.name,
                      pickOne.token,
                      fine ? "1" : "",
                      value
                    ])
                    assert.strictEqual(reply[0], model.submit(pickOne.name, pickOne.token, fine, value))
                    break
                  }
                  case "restore": {
                    if (pickOne === undefined) break
                    const status = (["done", "failed", "lost"] as const)[one.more]!
                    const value = status === "lost" ? "" : JSON.stringify([one.pick])
                    const round = model.round - Number(one.shard === 2)
                    const run = runOf(one.pick)
                    const args = [pickOne.name, status, pickOne.token, value, round, run]
                    const reply = await send(id, "taskGroup.restore", args)
                    assert.strictEqual(reply[0], model.restore(pickOne.name, status, pickOne.token, value, round, run))
                    break
                  }
                  case "reset": {
                    const reset = `reset ${Math.floor(count / 3)}`
                    const run = runOf(one.pick)
                    const reply = await send(id, "taskGroup.reset", [reset, run])
                    assert.strictEqual(reply[0], model.clear(reset, run))
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
                    // Others go on before a reaper does.
                    const other = sessions[(one.session + 1) % 3]!
                    await register(other, name)
                    if (pickOne !== undefined) {
                      const reply = await send(other, "taskGroup.submit", [
                        pickOne.name,
                        pickOne.token,
                        "1",
                        "\"late\""
                      ])
                      assert.strictEqual(reply[0], model.submit(pickOne.name, pickOne.token, true, "\"late\""))
                    }
                    assert.strictEqual(await reap(id, (own) => model.leave(`${id}/${own}`)), "forgotten")
                    assert.strictEqual(await redis.exists(keys(id).slice(3)), 0)
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
              // Remembered for its time to live, if there is anything to remember.
              for (const key of resource) {
                const left = await redis.pttl(key)
                const wanted = model.open && (key === resource[0] || model.shards.size > 0)
                assert.isTrue(wanted ? left > 50_000 && left <= 60_000 : left === -2, `${key} ${left}`)
              }
              await redis.del([...resource])
              // The floor of the tokens stays.
              const rest = (await redis.keys(`{${namespace}:*`)).filter((key) => !key.endsWith(":floor"))
              assert.deepStrictEqual(rest, [`{${namespace}:00}:sessions`])
            }),
            { numRuns: runs(80), endOnFailure: false }
          )
        )
      }),
    120_000
  )

  it.effect("counts no member and no worker of a session that Redis has forgotten", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      for (const fresh of ["", "1"]) {
        const { keys, open, send } = actor(redis, freshNamespace(), "taskGroup:x")
        const joining = (round: number) => ["m", 2, "fail", 9 * 86_400_000, 0, "", fresh, "", round, 0]
        const counts = yield* Effect.promise(async () => {
          await open("a")
          await send("a", "taskGroup.join", joining(0))
          const [, token] = await send("a", "taskGroup.register", ["x", "x", "", ""])
          await send("a", "taskGroup.submit", ["x", token, "1", "1"])
          await send("a", "taskGroup.register", ["y", "y", "", ""])
          // As after a day without processes.
          await redis.del(...keys("a").filter((key) => !key.endsWith(":floor")))
          await open("b")
          const [, , , ...counts] = await send("b", "taskGroup.join", joining(0))
          return counts.slice(0, 5)
        })
        assert.deepStrictEqual(counts, fresh === "" ? [0, 1, 0, 1, 1] : [0, 0, 0, 0, 2])
      }
    }))
})
