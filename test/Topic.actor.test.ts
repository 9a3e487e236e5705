/** The topic actor, driven directly with random requests: every event is handed out, in order per key, within the credit. */
import { assert, layer } from "@effect/vitest"
import { Effect } from "effect"
import * as fc from "fast-check"
import { actor, type Asked, client } from "./support/actor.ts"
import { runs } from "./support/effort.ts"
import { freshNamespace, TestServer } from "./support/live.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

type Step =
  | { readonly do: "publish"; readonly key: number }
  | { readonly do: "join" | "leave" | "end" | "repeat"; readonly member: number }
  | { readonly do: "ack" | "retry"; readonly pick: number }
  | { readonly do: "delay"; readonly pick: number }

const step = fc.oneof(
  { weight: 6, arbitrary: fc.record({ do: fc.constant("publish" as const), key: fc.integer({ min: 0, max: 2 }) }) },
  {
    weight: 3,
    arbitrary: fc.record({
      do: fc.constantFrom("join" as const, "leave" as const, "end" as const, "repeat" as const),
      member: fc.integer({ min: 0, max: 2 })
    })
  },
  {
    weight: 6,
    arbitrary: fc.record({
      do: fc.constantFrom("ack" as const, "ack" as const, "retry" as const, "delay" as const),
      pick: fc.nat(100)
    })
  }
)

interface Flight {
  readonly member: number
  readonly key: string
  readonly attempt: number
}

const credit = 2

layer(TestServer.layer, live)("the topic actor", (it) => {
  for (const ordered of [false, true]) {
    it.effect(`hands every event out until it is acknowledged, ${ordered ? "in order per key" : "in no order"}`, () =>
      Effect.gen(function*() {
        const redis = yield* client(yield* TestServer)
        yield* Effect.promise(() =>
          fc.assert(
            fc.asyncProperty(fc.array(step, { minLength: 5, maxLength: 60 }), (steps) =>
              run(actor(redis, freshNamespace(), "topic:t"), steps, ordered)),
            { numRuns: runs(60), endOnFailure: false }
          )
        )
      }))
  }

  it.effect("gives up members of groups that no session remembers", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      yield* Effect.promise(async () => {
        const topic = actor(redis, freshNamespace(), "topic:t")
        const consume = async (session: string) => {
          await topic.open(session)
          await topic.send(session, "topic.join", ["m", -1, 0, 0, 0, 0, 60_000, "1", 1])
          return topic.send(session, "topic.consume", ["c", "g", "0-0", 8, "1", 0, ""])
        }
        const members = Array.from({ length: 20 }, (_, at) => `s${at}`)
        for (const session of members) assert.strictEqual((await consume(session))[0], "joined")
        // One key: all but the first one are behind it.
        for (let number = 1; number <= 4; number++) {
          await topic.send("s0", "topic.publish", [`${number}`, "0 node  1 0 0 k", number])
        }
        const handed = async (session: string) =>
          (await topic.mail(session)).flatMap((event) =>
            event[0] === "changed" && event[2] === "deliver" ? event[5] : []
          )
        const delayed = (await Promise.all(members.map(handed))).flat()
        assert.lengthOf(delayed, 1)
        // All processes die, and what Redis keeps for a day is deleted.
        const [sessions, due] = topic.keys("") as [string, string]
        await redis.del(sessions, due, ...members.flatMap((session) => topic.keys(session).slice(3)))
        assert.strictEqual((await consume("next"))[0], "joined")
        while (Number(await redis.zscore(due, "@topic:t") ?? Number.POSITIVE_INFINITY) <= Date.now()) await topic.ring()
        const [[name, count]] = (await topic.look("topic.state", []) as Array<any>)[7]
        assert.deepStrictEqual([name, count], ["g", 1])
        assert.lengthOf(await handed("next"), 1)
      })
    }))

  it.effect("counts no member that Redis has forgotten, also if only publishers come after that", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      yield* Effect.promise(async () => {
        const topic = actor(redis, freshNamespace(), "topic:t")
        const joining = (session: string) =>
          topic.send(session, "topic.join", ["m", -1, 0, 0, 0, 60_000, 60_000, "1", 1])
        for (const session of ["a", "b"]) {
          await topic.open(session)
          await joining(session)
          await topic.send(session, "topic.consume", ["c", "g", "0-0", 8, "", 0, ""])
        }
        // As after a day without processes.
        const [sessions, due] = topic.keys("") as [string, string]
        await redis.del(sessions, due, ...["a", "b"].flatMap((session) => topic.keys(session).slice(3)))
        await topic.open("c")
        await joining("c")
        while (Number(await redis.zscore(due, "@topic:t") ?? Number.POSITIVE_INFINITY) <= Date.now()) await topic.ring()
        const [, , , , , , members, [[name, inGroup]]] = await topic.look("topic.state", []) as Array<any>
        assert.deepStrictEqual([members, name, inGroup], [1, "g", 0])
        // The group ends a minute after that.
        assert.isAbove(Number(await redis.zscore(due, "@topic:t")), Date.now() + 30_000)
      })
    }))

  it.effect("takes nothing in between two epochs, and then what is of the new one", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      yield* Effect.promise(async () => {
        const topic = actor(redis, freshNamespace(), "topic:t")
        await topic.open("a")
        const joined = await topic.send("a", "topic.join", ["m", 0, 0, 0, 0, 0, 60_000, "1", 2])
        assert.deepStrictEqual(joined.slice(3), [0, 2, 2, 1, [], [0, 0, 0, 0, 0, 60_000, true]])
        let number = 0
        const publish = async (epoch: number, after = "") =>
          (await topic.send("a", "topic.publish", ["1", `${epoch} node${after} ${after} 0 0 0 p`, ++number]))[0]
        assert.strictEqual(await publish(0), "published")
        const seal = (epoch: number, shards: number, width = 2) =>
          topic.send("a", "topic.seal", [epoch, shards, width]).then((reply) => reply.slice(0, 5))
        assert.deepStrictEqual(await seal(0, 9), ["sealed", 0, 2, 2, 1])
        assert.deepStrictEqual(await seal(1, 3), ["sealed", 1, 3, 3, 0])
        assert.deepStrictEqual([await publish(0), await publish(1)], ["moved", "moved"])
        // Another number loses: the first one decides.
        assert.deepStrictEqual(await seal(1, 4), ["sealed", 1, 3, 3, 0])
        assert.deepStrictEqual(await topic.send("a", "topic.open", [2, "[]"]), ["opened", 1])
        assert.strictEqual(await publish(1), "moved")
        assert.deepStrictEqual(await topic.send("a", "topic.open", [1, "[]"]), ["opened", 1])
        assert.deepStrictEqual([await publish(0), await publish(1)], ["moved", "published"])
        assert.deepStrictEqual(await seal(1, 3), ["sealed", 1, 3, 3, 1])
        // Another process knows of more that had events.
        assert.deepStrictEqual(await seal(1, 4, 5), ["sealed", 1, 3, 5, 1])
      })
    }))

  it.effect("says of what follows a request that has failed that this has failed: it may be made again", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      yield* Effect.promise(async () => {
        const topic = actor(redis, freshNamespace(), "topic:t")
        await topic.open("a")
        await topic.send("a", "topic.join", ["m", 0, 0, 0, 0, 0, 60_000, "1", 1])
        await topic.send("a", "topic.seal", [1, 1, 1])
        const following = ["=topic.publish", "1", "0 node opened 0 0 0 p", 1]
        for (const [groups, replies] of [["none", ["failed", "failed"]], ["[]", ["opened", "published"]]] as const) {
          await topic.send("a", "topic.open", [1, groups, ...following])
          assert.deepStrictEqual(topic.answers.get("a")![1].map(([tag]) => tag), [...replies])
        }
      })
    }))

  it.effect("keeps a group that an epoch has brought for as long as another", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      yield* Effect.promise(async () => {
        const topic = actor(redis, freshNamespace(), "topic:t")
        await topic.open("a")
        await topic.send("a", "topic.join", ["m", -1, 0, 0, 0, 60_000, 60_000, "1", 1])
        await topic.send("a", "topic.seal", [1, 2, 2])
        const openedAt = Date.now()
        await topic.send("a", "topic.open", [1, JSON.stringify([["g", 0]])])
        const groups = async () => ((await topic.look("topic.state", [])) as Array<any>)[7].length
        await topic.ring()
        assert.strictEqual(await groups(), 1)
        const due = Number(await redis.zscore(topic.keys("a")[1]!, "@topic:t"))
        assert.isTrue(Math.abs(due - openedAt - 60_000) < 10_000, String(due - openedAt))
      })
    }))

  it.effect("knows what was published also when it is to know that for another time", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      yield* Effect.promise(async () => {
        const topic = actor(redis, freshNamespace(), "topic:t")
        await topic.open("a")
        let number = 0
        const publish = async (id: string, again = 0) =>
          (await topic.send("a", "topic.publish", ["1", `0 node  0 ${id.length} 0 ${id}p`, again || ++number]))[0]
        const known: Array<string> = []
        for (const window of [60_000, 50_000, 500_000, 490_000, 70_000]) {
          await topic.send("a", "topic.join", ["m", -1, 0, 0, 0, 0, window, "1", 1])
          for (const id of known) assert.strictEqual(await publish(id), "duplicate", `${id} after ${window}`)
          if (number > 0) assert.strictEqual(await publish("", 1), "duplicate")
          assert.strictEqual(await publish(String(window)), "published")
          known.push(String(window))
        }
      })
    }))

  it.effect("knows what was published for as long also when the events of a closed topic expire before", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      yield* Effect.promise(async () => {
        const topic = actor(redis, freshNamespace(), "topic:t")
        const entries = topic.key.replace("topic:", "topic-entries:")
        await topic.open("a")
        const join = () => topic.send("a", "topic.join", ["t", -1, 0, 0, 1, 0, 60_000, "1", 1])
        const publish = (number: number) => topic.send("a", "topic.publish", ["1", "0 node  0 2 0 idp", number])
        await join()
        const [, event] = await publish(1)
        await topic.send("a", "session.leave", ["t"])
        while (await redis.exists(entries) === 1) await topic.look("topic.state", [])
        // The alarm rings later than that.
        await topic.ring()
        await join()
        assert.deepStrictEqual(await publish(2), ["duplicate", event])
      })
    }))

  it.effect("knows what was published also when the clock of Redis is behind what it was", () =>
    Effect.gen(function*() {
      const server = yield* TestServer
      const redis = yield* client(server)
      const topic = actor(redis, freshNamespace(), "topic:t")
      let number = 0
      const publish = () =>
        Effect.promise(() => topic.send("a", "topic.publish", ["1", "0 node  0 2 0 idp", ++number])).pipe(
          Effect.map(([tag]) => tag as string)
        )
      yield* Effect.promise(async () => {
        await topic.open("a")
        // Turns as long as the clock is behind, so that this is in the turn before.
        await topic.send("a", "topic.join", ["m", -1, 0, 0, 0, 0, 10_000, "1", 1])
      })
      assert.strictEqual(yield* publish(), "published")
      yield* client(server, -10)
      assert.strictEqual(yield* publish(), "duplicate")
      yield* client(server)
      assert.strictEqual(yield* publish(), "duplicate")
    }))

  it.effect("hands nothing out twice for a retry of before the hash was lost", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      yield* Effect.promise(async () => {
        const topic = actor(redis, freshNamespace(), "topic:t")
        const retries = topic.key.replace("topic:", "topic-retries:")
        await topic.open("a")
        const join = async () => {
          await topic.send("a", "topic.join", ["t", -1, 0, 0, 0, 0, 60_000, "1", 1])
          return await topic.send("a", "topic.consume", ["m", "g", "0", 2, "", 0, ""])
        }
        const [, index] = await join()
        const [, event] = await topic.send("a", "topic.publish", ["1", "0 node  0 0 0 p", 1])
        await topic.send("a", "topic.retry", ["m", index, event!, 1])
        await redis.del(topic.key)
        await join()
        const due = Number(await redis.zscore(retries, `${index}:${event}`))
        while (Number((await redis.time())[0]) * 1000 <= due) await topic.look("topic.state", [])
        await topic.ring()
        assert.strictEqual(await redis.exists(retries), 0)
        const ids = (await topic.mail("a")).flatMap(([, , what, , items]) =>
          what === "deliver" ? (items as Array<[string]>).map(([id]) => id) : []
        )
        assert.deepStrictEqual(ids, [event, event])
      })
    }))

  for (const cause of ["purge", "retention"]) {
    it.effect(`reports the events that a group misses until a member acknowledges that: ${cause}`, () =>
      Effect.gen(function*() {
        const redis = yield* client(yield* TestServer)
        yield* Effect.promise(async () => {
          const topic = actor(redis, freshNamespace(), "topic:t")
          for (const session of ["a", "b", "c", "d"]) await topic.open(session)
          await topic.send("d", "topic.join", ["t", -1, cause === "purge" ? 0 : 1, 0, 0, 0, 60_000, "", 1])
          const join = (session: string) => topic.send(session, "topic.consume", ["m", "g", "0", 1, "", 0, ""])
          const publish = async (number: number) =>
            (await topic.send("d", "topic.publish", ["1", "0 node  0 0 0 p", number]))[1] as string
          const itemsOf = async (session: string) =>
            (await topic.mail(session)).flatMap(([, , what, , items]) => what === "deliver" ? items : [])
          const gapsOf = async (session: string) => (await itemsOf(session)).filter(([tag]) => tag === "gap")
          const [, index] = await join("a")
          const first = await publish(1)
          for (const number of [2, 3, 4]) await publish(number)
          if (cause === "purge") await topic.send("d", "topic.purge", ["[]"])
          else await topic.send("a", "topic.ack", ["m", index, first, ""])
          const missed = cause === "purge" ? 3 : 2
          assert.deepStrictEqual(await gapsOf("a"), [["gap", missed, 1]])
          // The delivery may be lost, and the member ask for what it has.
          assert.deepStrictEqual((await join("a"))[6][0], ["missed", missed, 1])
          await topic.end("a")
          await topic.reap("a")
          await join("b")
          // What the first member had in hand was purged too.
          assert.deepStrictEqual(await gapsOf("b"), [["gap", cause === "purge" ? 4 : 2, 1]])
          // It acknowledges one part after the other.
          const [whole, part] = [cause === "purge" ? 4 : 2, 1]
          await topic.send("b", "topic.ack", ["m", index, String(part), ""])
          assert.deepStrictEqual((await join("b"))[6][0], ["missed", whole - part, 1])
          await topic.send("b", "topic.ack", ["m", index, String(whole - part), ""])
          assert.isEmpty((await join("b"))[6].filter(([tag]: [string]) => tag === "missed"))
          await topic.end("b")
          await topic.reap("b")
          await join("c")
          assert.isEmpty(await gapsOf("c"))
        })
      }))
  }

  for (const end of ["acknowledged", "returned", "left"] as const) {
    it.effect(`hands out no event of a key before what was purged in a member's hands is ${end}`, () =>
      Effect.gen(function*() {
        const redis = yield* client(yield* TestServer)
        yield* Effect.promise(async () => {
          const topic = actor(redis, freshNamespace(), "topic:t")
          for (const session of ["a", "b"]) await topic.open(session)
          await topic.send("b", "topic.join", ["t", -1, 0, 0, 0, 0, 60_000, "", 1])
          const join = (session: string) => topic.send(session, "topic.consume", ["m", "g", "0", 1, "1", 0, ""])
          let number = 0
          const publish = async (key: string) =>
            (await topic.send("b", "topic.publish", ["1", `0 node  ${key.length} 0 0 ${key}p`, ++number]))[1] as string
          const eventsOf = async (session: string) =>
            (await topic.mail(session)).flatMap(([, , what, , items]) =>
              what === "deliver" ? (items as Array<[string]>).map(([id]) => id).filter((id) => id !== "gap") : []
            )
          const [, index] = await join("a")
          const first = await publish("k")
          await publish("k")
          assert.deepStrictEqual(await eventsOf("a"), [first])
          await topic.send("b", "topic.purge", ["[]"])
          // A member that asks again is notified, and does not lose what it has in hand.
          assert.deepStrictEqual((await join("a"))[6].filter(([tag]: [string]) => tag !== "missed"), [[
            "unsent",
            first
          ]])
          await join("b")
          const [second, third] = [await publish("k"), await publish("k")]
          assert.deepStrictEqual(await eventsOf("b"), [])
          // Another key does not wait.
          const other = await publish("l")
          assert.deepStrictEqual(await eventsOf("b"), [other])
          if (end === "acknowledged") await topic.send("a", "topic.ack", ["m", index, first, "k"])
          else if (end === "returned") await topic.send("a", "topic.retry", ["m", index, first, 0])
          else await topic.send("a", "session.leave", ["m"])
          await topic.send("b", "topic.ack", ["m", index, other, "l"])
          const next = end === "left" ? "b" : "a"
          assert.strictEqual((await eventsOf(next)).at(-1), second)
          await topic.send(next, "topic.ack", ["m", index, second, "k"])
          assert.include([...await eventsOf("a"), ...await eventsOf("b")], third)
        })
      }))
  }

  for (
    const [limit, length, bytes, age, rest] of [["length", 1, 0, 0, 1], ["bytes", 0, 1, 0, 1], [
      "age",
      0,
      0,
      1,
      0
    ]] as const
  ) {
    it.effect(`keeps what a group has not acknowledged beyond its limit: ${limit}`, () =>
      Effect.gen(function*() {
        const redis = yield* client(yield* TestServer)
        yield* Effect.promise(async () => {
          const topic = actor(redis, freshNamespace(), "topic:t")
          const entries = topic.key.replace("topic:", "topic-entries:")
          await topic.open("a")
          // A member that decides on the limits has the topic trimmed.
          const kept = async () => {
            await topic.send("a", "topic.join", ["t", -1, length, bytes, age, 0, 60_000, "1", 1])
            return await redis.xlen(entries)
          }
          await kept()
          const [, index] = await topic.send("a", "topic.consume", ["m", "g", "0", 1, "", 0, ""])
          const events: Array<string> = []
          for (const number of [1, 2, 3]) {
            events.push((await topic.send("a", "topic.publish", ["123", "0 node  0 0 0 p", number]))[1])
          }
          const newest = Number(events[2]!.split("-")[0])
          while (Number((await redis.time())[0]) * 1000 <= newest + age) await topic.look("topic.state", [])
          assert.strictEqual(await kept(), 3)
          for (const left of [2, 1, rest]) {
            await topic.send("a", "topic.ack", ["m", index, events.shift()!, ""])
            assert.strictEqual(await kept(), left)
          }
        })
      }))
  }

  it.effect("keeps the newest events that are within so many bytes, whatever their sizes, and one in any case", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      const bytes = 100
      const size = fc.oneof(fc.integer({ min: 1, max: 10 }), fc.integer({ min: 1, max: 150 }))
      const round = fc.record({ sizes: fc.array(size, { maxLength: 50 }), isOneCall: fc.boolean() })
      yield* Effect.promise(() =>
        fc.assert(
          fc.asyncProperty(fc.array(round, { maxLength: 6 }), async (rounds) => {
            const topic = actor(redis, freshNamespace(), "topic:t")
            const entries = topic.key.replace("topic:", "topic-entries:")
            let kept: Array<readonly [number: number, size: number]> = []
            let number = 0
            await topic.open("a")
            for (const { isOneCall, sizes } of rounds) {
              const requests = sizes.map((size): Asked => {
                kept.push([++number, size])
                return ["topic.publish", ["x".repeat(size), "0 node  0 0 0 p", number]]
              })
              const calls = isOneCall ? [requests] : requests.map((request) => [request])
              for (const call of calls) if (call.length > 0) await topic.sendAll("a", call)
              // A member that decides on the limits has the topic trimmed.
              await topic.send("a", "topic.join", ["t", -1, 0, bytes, 0, 0, 60_000, "1", 1])
              let left = bytes
              kept = kept.reverse().filter(([, size], at) => (left -= size) >= 0 || at === 0).reverse()
              const ids = (await redis.xrange(entries, "-", "+")).map(([id]) => Number(id.split("-")[1]))
              assert.deepStrictEqual(ids, kept.map(([number]) => number))
            }
          }),
          { numRuns: runs(60), endOnFailure: false }
        )
      )
    }))

  it.effect("hands out a megabyte at a time, and each event once, however many smaller ones there were", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      yield* Effect.promise(async () => {
        const topic = actor(redis, freshNamespace(), "topic:t")
        for (const session of ["a", "b"]) await topic.open(session)
        await topic.send("a", "topic.join", ["t", -1, 0, 0, 0, 0, 60_000, "1", 1])
        const join = (session: string, credit: number) =>
          topic.send(session, "topic.consume", ["m", "g", "", credit, "", 0, ""])
        await join("a", 1)
        const small = 20_000
        await topic.send("a", "topic.publishAll", [
          "1".repeat(small),
          JSON.stringify(Array.from({ length: small }, () => 1)),
          "0 node  0 0 0 p",
          1
        ])
        // The first one is in hand, and nothing is between it and the large ones for a member that acknowledges it.
        await topic.send("a", "topic.purge", ["[]"])
        const size = 200_000
        const events: Array<string> = []
        for (let number = 2; number < 34; number++) {
          events.push((await topic.send("a", "topic.publish", ["x".repeat(size), "0 node  0 0 0 p", number]))[1])
        }
        const isWithin = (answer: unknown) => assert.isAtMost(JSON.stringify(answer).length, 2 ** 20 + 2 * size)
        const handed = async () => {
          const mail = (await topic.mail("b")).filter(([, , what]) => what === "deliver")
          for (const event of mail) isWithin(event)
          return mail.flatMap(([, , , , items]) => (items as Array<[string]>).map(([id]) => id))
        }
        await join("b", 64)
        isWithin(topic.answers.get("b"))
        while ((await handed()).length < events.length) {
          const before = (await handed()).length
          await topic.ring()
          assert.isAbove((await handed()).length, before)
        }
        assert.deepStrictEqual(await handed(), events)
        // A member that asks again hears the ids of the events that are too much for one answer.
        const [, index, , , , , items] = await join("b", 64) as [string, string, ...Array<any>]
        isWithin(items)
        assert.deepStrictEqual(items.map(([tag, id]: [string, string]) => tag === "unsent" ? id : tag), events)
        // One that it gives back for that was not attempted.
        const [, unsent] = items.find(([tag]: [string]) => tag === "unsent")
        await topic.send("b", "topic.retry", ["m", index, unsent, -1])
        await topic.ring()
        const again = (await topic.mail("b")).flatMap(([, , , , items]) => items as Array<[string, number]>)
        assert.deepStrictEqual(again.filter(([id]) => id === unsent).map(([, attempt]) => attempt), [1, 1])
        // What a member had in hand comes in parts too.
        await topic.end("b")
        await topic.reap("b")
        await topic.open("c")
        await topic.send("c", "topic.consume", ["m", "g", "", 64, "", 0, ""])
        isWithin(topic.answers.get("c"))
        assert.isAbove((await topic.mail("c")).length, 0)
      })
    }))

  it.effect("keeps all that a group has in hand for as long as its member touches the topic", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      yield* Effect.promise(async () => {
        const topic = actor(redis, freshNamespace(), "topic:t")
        await topic.open("a")
        await topic.send("a", "topic.join", ["t", -1, 0, 0, 60_000, 60_000, 60_000, "1", 1])
        const [, index] = await topic.send("a", "topic.consume", ["m", "g", "0", 2, "", 0, ""])
        for (const number of [1, 2]) {
          const [, event] = await topic.send("a", "topic.publish", ["1", "0 node  0 0 0 p", number])
          if (number === 2) await topic.send("a", "topic.retry", ["m", index, event!, 25 * 3_600_000])
        }
        const anHour = 3_600_000
        const keys = [topic.key, ...["entries", "retries"].map((role) => topic.key.replace("topic:", `topic-${role}:`))]
        // Much later, with no other call about the topic.
        for (const key of keys) assert.strictEqual(await redis.pexpire(key, anHour), 1)
        await topic.send("a", "session.touch", [])
        for (const key of keys) assert.isAbove(await redis.pttl(key), 23 * anHour, key)
      })
    }))

  it.effect("keeps a topic for ever that has a group for ever", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      yield* Effect.promise(async () => {
        const namespace = freshNamespace()
        const topic = actor(redis, namespace, "topic:t")
        const keys = [topic.key, ...["entries", "retries"].map((role) => topic.key.replace("topic:", `topic-${role}:`))]
        const lives = async () => (await Promise.all(keys.map((key) => redis.pttl(key)))).map((life) => life > 0)
        await topic.open("a")
        const join = (id: string, abandon: number) =>
          topic.send("a", "topic.join", [id, -1, 0, 0, 60_000, abandon, 60_000, "1", 1])
        const publish = (number: number) => topic.send("a", "topic.publish", ["1", "0 node  0 0 0 p", number])
        await join("m", 0)
        await publish(1)
        assert.deepStrictEqual(await lives(), [true, true, false])
        const [, index] = await topic.send("a", "topic.consume", ["g", "g", "0", 1, "", 0, ""])
        await publish(2)
        assert.deepStrictEqual(await lives(), [false, false, false])
        await join("n", 60_000)
        const id = (await redis.xrange(keys[1]!, "-", "+"))[0]![0]
        await topic.send("a", "topic.retry", ["g", index, id, 60_000])
        await publish(3)
        assert.deepStrictEqual(await lives(), [true, true, true])
        await join("o", 0)
        assert.deepStrictEqual(await lives(), [false, false, false])
      })
    }))
})

const run = async (topic: ReturnType<typeof actor>, steps: ReadonlyArray<Step>, ordered: boolean) => {
  const published: Array<readonly [id: string, key: string]> = []
  const flights = new Map<string, Flight>()
  const done: Array<string> = []
  const attempts = new Map<string, number>()
  const crashes = new Map<string, number>()
  // The session of each member, and the events of its mailbox that were taken in.
  const sessions = [0, 0, 0]
  const joined = [false, false, false]
  const read = new Map<string, number>()
  // The deliveries to each member since it has joined.
  const counted = [0, 0, 0]
  let index = ""
  const nameOf = (member: number) => `s${member}x${sessions[member]}`
  await topic.open("publisher")
  for (const member of [0, 1, 2]) await topic.open(nameOf(member))
  let number = 0

  const take = async () => {
    for (const member of [0, 1, 2]) {
      const name = nameOf(member)
      const events = await topic.mail(name)
      for (const event of events.slice(read.get(name) ?? 0)) {
        if (event[0] !== "changed" || event[2] !== "deliver" || !joined[member]) continue
        const deliveries = event[4] as Array<[string, number, string, string, string, string, number?]>
        assert.strictEqual(event[3], ++counted[member]!)
        for (const [id, attempt, body, key, , , crashed = 0] of deliveries) {
          assert.notStrictEqual(id, "gap")
          const known = flights.get(id)
          assert.isUndefined(known, `${id} was handed out twice`)
          assert.notInclude(done, id)
          assert.deepStrictEqual([attempt, crashed], [(attempts.get(id) ?? 0) + 1, crashes.get(id) ?? 0])
          assert.strictEqual(JSON.parse(body), published.findIndex(([published]) => published === id))
          if (ordered && key !== "") {
            for (const flight of flights.values()) assert.notStrictEqual(flight.key, key, "two events of a key at once")
            const before = published.slice(0, published.findIndex(([published]) => published === id))
            for (const [earlier, other] of before) if (other === key) assert.include(done, earlier)
          }
          attempts.set(id, attempt)
          flights.set(id, { member, key, attempt })
        }
        const held = [...flights.values()].filter((flight) => flight.member === member).length
        assert.isAtMost(held, credit)
      }
      read.set(name, events.length)
    }
  }
  // What no member was given yet counts too.
  const watch = async () => {
    if (index === "") return
    const [, , , , , , , [group]] = await topic.look("topic.state", []) as Array<any>
    assert.strictEqual(group[4], published.find(([id]) => !done.includes(id))?.[0] ?? "")
  }
  // What a member returns by leaving does not count as delivered to it; what it had when its session ended does.
  const drop = (member: number, crashed: boolean) => {
    for (const [id, { attempt, member: of }] of flights) {
      if (of !== member) continue
      flights.delete(id)
      if (!crashed) attempts.set(id, attempt - 1)
      else crashes.set(id, (crashes.get(id) ?? 0) + 1)
    }
    joined[member] = false
  }
  const settle = async (pick: number, verb: "ack" | "retry", delay = 0) => {
    const found = [...flights][pick % Math.max(1, flights.size)]
    if (found === undefined) return
    const [id, { key, member }] = found
    flights.delete(id)
    if (verb === "ack") {
      done.push(id)
      assert.deepStrictEqual(await topic.send(nameOf(member), "topic.ack", ["m", index, id, key]), ["acknowledged"])
    } else {
      assert.deepStrictEqual(await topic.send(nameOf(member), "topic.retry", ["m", index, id, delay]), ["returned"])
    }
  }
  const join = async (member: number) => {
    const name = nameOf(member)
    const [tag, at, count, , , , open] = await topic.send(name, "topic.consume", [
      "m",
      "g",
      "0",
      credit,
      ordered ? "1" : "",
      0,
      ""
    ])
    assert.strictEqual(tag, "joined")
    if (!joined[member]) counted[member] = 0
    // What the member has in hand, of so many deliveries.
    assert.strictEqual(count, counted[member])
    assert.sameDeepMembers(
      (open as Array<[string, number]>).map(([id, attempt]) => [id, attempt]),
      [...flights].filter(([, flight]) => flight.member === member).map(([id, { attempt }]) => [id, attempt])
    )
    index = at as string
    joined[member] = true
  }

  for (const next of steps) {
    switch (next.do) {
      case "publish": {
        const key = next.key === 0 ? "" : `key ${next.key}`
        const [tag, id] = await topic.send("publisher", "topic.publish", [
          JSON.stringify(published.length),
          `0 node  ${key.length} 0 0 ${key}p`,
          ++number
        ])
        assert.strictEqual(tag, "published")
        published.push([id as string, key === "" ? `${id}` : key])
        break
      }
      case "join":
      case "repeat":
        if (next.do === "join" || joined[next.member]) await join(next.member)
        break
      case "leave":
        if (!joined[next.member]) break
        await topic.send(nameOf(next.member), "session.leave", ["m"])
        drop(next.member, false)
        break
      case "end":
        await topic.end(nameOf(next.member))
        await topic.reap(nameOf(next.member))
        drop(next.member, true)
        sessions[next.member]!++
        await topic.open(nameOf(next.member))
        break
      case "ack":
      case "retry":
        await settle(next.pick, next.do)
        break
      case "delay":
        await settle(next.pick, "retry", 1)
    }
    await take()
    await watch()
  }
  // In any case, a member that goes on gets the rest.
  for (const member of [1, 2]) {
    if (joined[member]) await topic.send(nameOf(member), "session.leave", ["m"])
    drop(member, false)
    await take()
  }
  await join(0)
  await take()
  for (let idle = 0; done.length < published.length; idle++) {
    assert.isBelow(idle, 1000, `${published.length - done.length} of ${published.length} events were not handed out`)
    if (flights.size === 0) await topic.ring()
    else await settle(0, "ack")
    await take()
  }
  const [, , , , , , , groups] = await topic.look("topic.state", [])
  assert.deepStrictEqual((groups as Array<Array<unknown>>)[0]!.slice(1, 4), [1, 0, 0])
}
