/**
 * The shared-ref and counter actors themselves: random histories of requests, sent straight to them and compared, reply by
 * reply and event by event, with a small model in memory. Sessions die at any moment.
 */
import { assert, layer } from "@effect/vitest"
import { Effect } from "effect"
import * as fc from "fast-check"
import { keyOf } from "../src/internal/actor/keys.ts"
import { actor, client } from "./support/actor.ts"
import { elapsed } from "./support/awake.ts"
import { runs } from "./support/effort.ts"
import { freshNamespace, TestServer } from "./support/live.ts"

interface Present {
  readonly version: number
  readonly value: unknown
}

const absent: Present = { version: 0, value: null }

const hostile = ["x\u0000}{:\n", "y"] as const

// Values that would break a parser which is not exact.
const values = ["1", "\"2 3:4\"", "[]", "{\"a\":\"}\\n\"}", "null", "\"é✓\"", "\" \"", "1.5e300"]

const session = fc.nat({ max: 2 })
const ref = fc.nat({ max: 1 })
const value = fc.constantFrom(...values)
const step = fc.oneof(
  { weight: 4, arbitrary: fc.record({ do: fc.constant("set"), session, ref, value, former: fc.boolean() }) },
  { weight: 4, arbitrary: fc.record({ do: fc.constant("compareAndSet"), session, ref, value, fits: fc.boolean() }) },
  {
    weight: 3,
    arbitrary: fc.record({
      do: fc.constant("fence"),
      session,
      ref,
      value,
      lease: fc.constantFrom("lock:a", "lock:b "),
      token: fc.integer({ min: 1, max: 5 })
    })
  },
  { weight: 2, arbitrary: fc.record({ do: fc.constant("delete"), session, ref }) },
  {
    weight: 4,
    arbitrary: fc.record({
      do: fc.constant("commit"),
      session,
      values: fc.tuple(fc.option(value), fc.option(value)),
      fits: fc.tuple(fc.boolean(), fc.boolean()),
      turned: fc.boolean()
    })
  },
  { weight: 3, arbitrary: fc.record({ do: fc.constant("join"), session, ref }) },
  { weight: 2, arbitrary: fc.record({ do: fc.constant("leave"), session, ref }) },
  { weight: 1, arbitrary: fc.record({ do: fc.constant("repeat"), session }) },
  { weight: 1, arbitrary: fc.record({ do: fc.constant("ring"), ref }) },
  { weight: 1, arbitrary: fc.record({ do: fc.constant("die"), session }) }
) as fc.Arbitrary<any>

layer(TestServer.layer, { excludeTestServices: true })("the shared-ref actor", (it) => {
  it.effect(
    "keeps values, versions, fences and members as the model does, and leaves what it should",
    () =>
      Effect.gen(function*() {
        const server = yield* TestServer
        const redis = yield* client(server)
        yield* Effect.promise(() =>
          fc.assert(
            fc.asyncProperty(fc.array(step, { minLength: 1, maxLength: 60, size: "max" }), async (steps) => {
              const namespace = freshNamespace()
              const { answers, end, key, mail, open, reap, repeat, ring, send } = actor(
                redis,
                namespace,
                `sharedRef:${hostile[0]}`
              )
              const hashes = [key, key.replace(hostile[0], hostile[1])]
              const names = ["S0", "S1", "S2"]
              let count = 0
              for (const name of names) await open(name)

              const present = [absent, absent]
              const fences = [new Map<string, number>(), new Map<string, number>()]
              // The id of each session's membership.
              const members = [new Map<string, string>(), new Map<string, string>()]
              const events = new Map<string, Array<ReadonlyArray<unknown>>>()
              let newest = 0

              const ask = (name: string, at: number, verb: string, ...args: Array<string | number>) =>
                send(name, `sharedRef.${verb}`, args, 60_000, "", [hashes[at]!])
              const announce = (at: number, change: number, { value, version }: Present) => {
                for (const [name, id] of members[at]!) {
                  events.set(name, [...events.get(name) ?? [], ["changed", id, change, version, value]])
                }
              }
              const written = (at: number, version: number, json: string) => {
                assert.isAtLeast(version, newest)
                newest = version
                present[at] = { version, value: JSON.parse(json) }
                announce(at, version, present[at]!)
              }
              const fresh = (version: number) => assert.isAbove(version, newest)

              for (const step of steps) {
                const at: number = step.ref ?? 0
                const name = names[step.session ?? 0]!
                const now = present[at]!
                switch (step.do) {
                  case "set": {
                    const [tag, version, ...former] = await ask(name, at, "set", step.value, 0, step.former ? "1" : "")
                    assert.deepStrictEqual(
                      [tag, ...former],
                      step.former ? ["replaced", now.version, now.value] : ["set"]
                    )
                    fresh(version)
                    written(at, version, step.value)
                    break
                  }
                  case "compareAndSet": {
                    const expected = step.fits ? now.version : now.version + 1
                    const reply = await ask(name, at, "compareAndSet", expected, step.value, 0)
                    if (step.fits) {
                      assert.strictEqual(reply[0], "set")
                      fresh(reply[1])
                      written(at, reply[1], step.value)
                    } else {
                      assert.deepStrictEqual(reply, ["conflict", now.version, now.value])
                    }
                    break
                  }
                  case "fence": {
                    const seen = fences[at]!.get(step.lease) ?? 0
                    const reply = await ask(name, at, "fence", step.value, 0, step.lease, step.token)
                    if (step.token < seen) {
                      assert.deepStrictEqual(reply, ["fenced", seen])
                    } else {
                      fences[at]!.set(step.lease, step.token)
                      assert.strictEqual(reply[0], "set")
                      fresh(reply[1])
                      written(at, reply[1], step.value)
                    }
                    break
                  }
                  case "delete": {
                    const reply = await ask(name, at, "delete")
                    assert.strictEqual(reply[0], now === absent ? "absent" : "deleted")
                    if (now !== absent) {
                      fresh(reply[1])
                      newest = reply[1]
                      present[at] = absent
                      announce(at, newest, absent)
                    }
                    assert.strictEqual(reply[1], newest)
                    break
                  }
                  case "commit": {
                    const order: ReadonlyArray<number> = step.turned ? [1, 0] : [0, 1]
                    const changes = order.map((at) => {
                      const json: string = step.values[at] ?? ""
                      const { version } = present[at]!
                      return `${step.fits[at] ? version : version + 1} 0 ${Buffer.byteLength(json)}:${json}`
                    })
                    const both = order.map((at) => hashes[at]!)
                    const reply = await send(name, "sharedRef.commit", [2, changes.join("")], 60_000, "", both)
                    if (step.fits[0] && step.fits[1]) {
                      assert.strictEqual(reply[0], "committed")
                      fresh(reply[1])
                      for (const at of order) {
                        if (step.values[at] !== null) written(at, reply[1], step.values[at])
                      }
                      newest = reply[1]
                    } else {
                      assert.deepStrictEqual(reply, [
                        "conflict",
                        order.map((at) => [present[at]!.version, present[at]!.value])
                      ])
                    }
                    break
                  }
                  case "join": {
                    const known = members[at]!.get(name)
                    const id = known ?? `i${++count}`
                    members[at]!.set(name, id)
                    const reply = await ask(name, at, "join", id)
                    // A member receives it behind the changes that are under way.
                    const told = [newest, now.version, now.value]
                    if (known === undefined) assert.deepStrictEqual(reply, ["joined", ...told])
                    else {
                      assert.deepStrictEqual(reply, ["joined", -newest || -1, now.version, now.value])
                      events.set(name, [...events.get(name) ?? [], ["changed", id, ...told]])
                    }
                    break
                  }
                  case "leave": {
                    const id = members[at]!.get(name)
                    if (id === undefined) break
                    members[at]!.delete(name)
                    await send(name, "session.leave", [id], 60_000, "", [hashes[at]!])
                    break
                  }
                  case "repeat": {
                    const again = await repeat(name)
                    if (again !== undefined) assert.deepStrictEqual(again, answers.get(name))
                    break
                  }
                  case "ring": {
                    // As when a value may have expired.
                    await ring(hashes[at])
                    if (now !== absent) break
                    const heard = members[at]!.size === 0 ? [] : await mail([...members[at]!.keys()][0]!)
                    newest = heard.at(-1)?.[2] ??
                      Number(await redis.hget(key.replace(/:sharedRef.*$/s, ":sessions"), "token"))
                    announce(at, newest, absent)
                    break
                  }
                  case "die": {
                    await end(name, true)
                    assert.strictEqual(await reap(name), "forgotten")
                    for (const one of members) one.delete(name)
                    events.delete(name)
                    names[step.session] = `N${++count}`
                    await open(names[step.session]!)
                  }
                }
                for (const name of names) {
                  assert.deepStrictEqual(await mail(name), events.get(name) ?? [], JSON.stringify(step))
                }
                for (const [at, { value, version }] of present.entries()) {
                  const found = await redis.get(keyOf(hashes[at]!, "value"))
                  const parts = /^(\d+) 0 ([^]*)$/.exec(found ?? "0 0 null")!
                  assert.deepStrictEqual([Number(parts[1]), JSON.parse(parts[2]!)], [version, value])
                }
              }
              for (const name of names) {
                await end(name, true)
                assert.strictEqual(await reap(name), "forgotten")
              }
              for (const [at, hash] of hashes.entries()) {
                assert.strictEqual(await redis.pttl(keyOf(hash, "value")), present[at] === absent ? -2 : -1)
                // What remains says which leases may not write.
                assert.deepStrictEqual(
                  Object.fromEntries(
                    Object.entries(await redis.hgetall(hash)).map(([field, written]) => [field, written.split(" ")[0]])
                  ),
                  Object.fromEntries([...fences[at]!].map(([lease, token]) => [`f${lease}`, String(token)]))
                )
                const left = await redis.pttl(hash)
                if (fences[at]!.size === 0) {
                  assert.strictEqual(left, -2)
                } else assert.isTrue(left > 0 && left <= 86_400_000)
              }
            }),
            { numRuns: runs(120), endOnFailure: false }
          )
        )
      }),
    120_000
  )

  it.effect("lets updates be made in turn, first in first out, and passes the turn of a session that ends or is late", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const redis = yield* client(server)
      yield* Effect.promise(async () => {
        const { end, key, mail, open, reap, ring, send } = actor(redis, freshNamespace(), "sharedRef:x")
        for (const name of ["A", "B", "C", "D"]) await open(name)
        const turn = (name: string, id: string) => send(name, "sharedRef.turn", [id])
        const update = (name: string, id: string, expected: number, value: string, more = "") =>
          send(name, "sharedRef.update", [id, expected, value, 0, more])
        const heard = async (name: string) => (await mail(name)).at(-1)

        assert.deepStrictEqual((await turn("A", "a")).slice(2), [0, null])
        assert.deepStrictEqual(await turn("B", "b"), ["queued", 0])
        assert.deepStrictEqual(await turn("C", "c"), ["queued", 1])
        assert.deepStrictEqual(await turn("B", "b"), ["queued", 0])
        assert.deepStrictEqual(await update("D", "", 0, "9"), ["taken"])
        assert.deepStrictEqual(await update("A", "a", 1, "9"), ["conflict", 0, null])
        const [, second, kept] = await update("A", "a", 0, "2")
        assert.isFalse(kept)
        assert.deepStrictEqual((await heard("B"))!.slice(0, 2), ["granted", "b"])
        assert.deepStrictEqual((await heard("B"))!.slice(3), [second, 2])
        await end("B", true)
        assert.strictEqual(await reap("B"), "forgotten")
        assert.deepStrictEqual((await heard("C"))!.slice(0, 2), ["granted", "c"])
        await send("C", "session.leave", ["c"])
        assert.deepStrictEqual(await redis.hgetall(key), {})
        assert.isNull(await redis.zscore(key.replace(/sharedRef:x$/, "due"), "@sharedRef:x"))

        // Late by more than a turn takes.
        const late = Date.now()
        assert.deepStrictEqual((await turn("A", "d")).slice(2), [second, 2])
        assert.strictEqual((await turn("D", "e"))[0], "queued")
        while ((await heard("D"))?.[1] !== "e") {
          assert.isBelow(elapsed(late), 3000)
          await ring()
        }
        assert.isAbove(Date.now() - late, 90)
        assert.deepStrictEqual(await update("A", "d", second, "3"), ["taken"])
        let [, version] = await update("D", "e", second, "3")
        // As many as there are for a short time, which can be over before the first of them.
        let more = false
        let id = ""
        for (let count = 0; !more; count++) {
          assert.isBelow(count, 100)
          id = `f${count}`
          assert.strictEqual((await turn("A", id))[2], version)
          ;[, version, more] = await update("A", id, version, "4", "1")
        }
        assert.strictEqual((await turn("D", "g"))[0], "queued")
        const begun = Date.now()
        while (more) {
          assert.isBelow(elapsed(begun), 3000)
          ;[, version, more] = await update("A", id, version, "4", "1")
        }
        assert.deepStrictEqual((await heard("D"))!.slice(0, 2), ["granted", "g"])
        await send("D", "session.leave", ["g"])
        await redis.del(keyOf(key, "value"))
      })
    }))

  for (const kind of ["sharedRef", "counter"] as const) {
    it.effect(`keeps the value of a ${kind} for no longer because a session needs it`, () =>
      Effect.gen(function*() {
        const redis = yield* client(yield* TestServer)
        yield* Effect.promise(async () => {
          const { key, mail, open, ring, send } = actor(redis, freshNamespace(), `${kind}:x`)
          await open("S")
          await send("S", `${kind}.join`, ["c"])
          if (kind === "counter") await send("S", "counter.add", [1, 300, "", 0])
          else await send("S", "sharedRef.set", ["1", 300, ""])
          await send("S", "session.touch", [])
          const value = keyOf(key, "value")
          assert.isAtMost(await redis.pttl(value), 300)
          // Even if something else has given it more time, its own is over then, and the member is notified.
          await redis.persist(value)
          const [, until] = (await redis.get(value))!.split(" ")
          while (Date.now() <= Number(until)) await redis.time()
          await ring()
          assert.strictEqual(await redis.exists(value), 0)
          assert.deepStrictEqual((await mail("S")).at(-1)!.slice(3), kind === "counter" ? [0] : [0, null])
        })
      }))
  }

  it.effect("drops the tokens of leases unused for a day when there are many", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const redis = yield* client(server)
      yield* Effect.promise(async () => {
        const { key, open, send } = actor(redis, freshNamespace(), "sharedRef:x")
        await open("S")
        const [seconds, micros] = (await redis.time()).map(Number) as [number, number]
        const now = seconds * 1e6 + micros
        const aDay = 86_400e6
        // Written a little more than a day ago, or less; the tokens are of any time.
        for (let n = 0; n < 126; n++) {
          const written = Math.floor((now - aDay + (n % 2 === 0 ? -1e6 : 60e6)) / 1000)
          await redis.hset(key, `flock:${n}`, `${n % 4 < 2 ? now : now - 9 * aDay} ${written}`)
        }
        await send("S", "session.touch", [])
        await send("S", "sharedRef.fence", ["1", 0, "lock:126", now])
        assert.strictEqual(await redis.hlen(key), 127)
        await send("S", "sharedRef.fence", ["1", 0, "lock:126", now + 1])
        assert.strictEqual(await redis.hlen(key), 127)
        await send("S", "sharedRef.fence", ["1", 0, "lock:127", now])
        assert.strictEqual(await redis.hlen(key), 65)
        assert.deepStrictEqual(await send("S", "sharedRef.fence", ["1", 0, "lock:1", 5]), ["fenced", now])
        assert.strictEqual((await send("S", "sharedRef.fence", ["1", 0, "lock:0", 5]))[0], "set")
      })
    }))
})

const source = fc.constantFrom("", "a", "b")
const by = fc.oneof(fc.integer({ min: -5, max: 5 }), fc.constantFrom(2 ** 53 - 1, -(2 ** 53 - 1), 2 ** 52))
const addition = fc.oneof(
  { weight: 6, arbitrary: fc.record({ do: fc.constant("add"), session, by, source, again: fc.boolean() }) },
  { weight: 1, arbitrary: fc.record({ do: fc.constant("reset"), session }) },
  { weight: 1, arbitrary: fc.record({ do: fc.constant("forget"), session, source: fc.constantFrom("a", "b") }) },
  { weight: 2, arbitrary: fc.record({ do: fc.constantFrom("join", "leave"), session }) }
) as fc.Arbitrary<any>

layer(TestServer.layer, { excludeTestServices: true })("the counter actor", (it) => {
  it.effect("adds each number once, never beyond what is exact, and leaves nothing at 0", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const redis = yield* client(server)
      yield* Effect.promise(() =>
        fc.assert(
          fc.asyncProperty(fc.array(addition, { minLength: 1, maxLength: 60, size: "max" }), async (steps) => {
            const { end, key, mail, open, reap, send } = actor(redis, freshNamespace(), `counter:${hostile[0]}`)
            const names = ["S0", "S1", "S2"]
            for (const name of names) await open(name)
            let value = 0
            let count = 0
            const added = new Map<string, number>()
            const members = new Map<string, string>()
            const events = new Map<string, Array<unknown>>()
            const change = (next: number) => {
              value = next
              for (const [name, id] of members) events.set(name, [...events.get(name) ?? [], ["changed", id, value]])
            }
            for (const step of steps) {
              const name = names[step.session]!
              switch (step.do) {
                case "add": {
                  const last = added.get(step.source) ?? 0
                  const number = step.source === "" ? 0 : step.again ? last : last + 1
                  const reply = await send(name, "counter.add", [step.by, 0, step.source, number])
                  if (step.source !== "" && number <= last) {
                    assert.deepStrictEqual(reply, ["added", value])
                  } else if (Number.isSafeInteger(value + step.by)) {
                    if (step.source !== "") added.set(step.source, number)
                    change(value + step.by)
                    assert.deepStrictEqual(reply, ["added", value])
                  } else {
                    assert.deepStrictEqual(reply, ["exceeds", value])
                  }
                  break
                }
                case "reset":
                  assert.deepStrictEqual(
                    await send(name, "counter.reset", []),
                    value === 0 ? ["zero"] : ["reset", value]
                  )
                  if (value !== 0) change(0)
                  break
                case "forget":
                  await send(name, "counter.forget", [step.source])
                  added.delete(step.source)
                  break
                case "join": {
                  const known = members.get(name)
                  const id = known ?? `i${++count}`
                  members.set(name, id)
                  const [tag, at, present] = await send(name, "counter.join", [id])
                  if (known === undefined) assert.deepStrictEqual([tag, present], ["joined", value])
                  else {
                    assert.deepStrictEqual([tag, present], ["joined", value])
                    assert.isBelow(at as number, 0)
                    events.set(name, [...events.get(name) ?? [], ["changed", id, value]])
                  }
                  break
                }
                case "leave": {
                  const id = members.get(name)
                  if (id === undefined) break
                  members.delete(name)
                  await send(name, "session.leave", [id])
                }
              }
              for (const name of names) {
                const heard = await mail(name)
                assert.deepStrictEqual(heard.map(([tag, id, , value]) => [tag, id, value]), events.get(name) ?? [])
                const changes = heard.map(([, , change]) => change as number)
                assert.deepStrictEqual(changes, [...changes].sort((a, b) => a - b))
              }
              assert.strictEqual(
                await redis.get(keyOf(key, "value")),
                value === 0 ? null : `${value} 0`,
                JSON.stringify(step)
              )
            }
            for (const name of names) {
              await end(name, true)
              assert.strictEqual(await reap(name), "forgotten")
            }
            assert.deepStrictEqual(
              (await redis.hkeys(key)).sort(),
              [...added.keys()].map((source) => `b${source}`).sort()
            )
            assert.isTrue(added.size === 0 || await redis.pttl(key) > 0)
          }),
          { numRuns: runs(80), endOnFailure: false }
        )
      )
    }), 120_000)
})
