/** What the requests of one call share, and what becomes of them when the call cannot be finished. */
import { assert, layer } from "@effect/vitest"
import { Effect } from "effect"
import type { Redis } from "ioredis"
import { layoutOf, partsOf } from "../src/internal/flow/graph.ts"
import { actor, type Asked, client, keysOf } from "./support/actor.ts"
import { freshNamespace, TestServer } from "./support/live.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

/** Two queues of one partition, with a member each. */
const started = async (redis: Redis) => {
  const namespace = freshNamespace()
  const one = actor(redis, namespace, "queue:one")
  const two = `{${namespace}:00}:queue:two`
  const join = ["m", "1", 0, 0, 0, 60_000, 1000, 0, 3, 0, 0, 1, 0, 0, 1, 0, ""]
  await one.open("s")
  await one.sendAll("s", [["queue.join", join], ["queue.join", join, two]])
  return { ...one, two }
}

const alone = (f: (queues: Awaited<ReturnType<typeof started>>, redis: Redis) => Promise<void>) =>
  Effect.gen(function*() {
    const redis = yield* client(yield* TestServer)
    yield* Effect.promise(async () => f(await started(redis), redis))
  })

layer(TestServer.layer, live)("a call", (it) => {
  it.effect("fails the requests about a queue that it cannot finish, and no others", () =>
    alone(async ({ key, look, send, sendAll, two }, redis) => {
      await send("s", "queue.offer", ["12", "1 1", "node", 1])
      const normal = keysOf(key).find((role) => role.includes("queue-normal:"))!
      await redis.set(normal, "of another program")
      const replies = await sendAll("s", [
        ["queue.offer", ["3", "1", "node", 2], two],
        ["queue.work", ["w", 1]],
        ["queue.state", [], two],
        ["queue.pause", [""]]
      ])
      assert.deepStrictEqual(replies.map(([tag]) => tag), ["offered", "failed", "state", "failed"])
      // What was done by then is known.
      await redis.del(normal)
      assert.strictEqual((await look("queue.state", []))[5], 1)
      assert.deepStrictEqual((await look("queue.state", [], two))[1], [0, 0, 1, 0])
    }))

  it.effect("hands out about a megabyte of jobs, and the others with its alarm", () =>
    alone(async ({ ask, key, mail, send }) => {
      const body = JSON.stringify("x".repeat(100_000))
      for (let node = 1; node <= 6; node++) {
        await send("s", "queue.offer", [body.repeat(10), `${body.length} `.repeat(10), "node", node])
      }
      const [, , , first] = await send("s", "queue.work", ["w", 1000])
      assert.isAtMost(first.length, 11)
      const rung = async () =>
        (await mail("s")).reduce((sum, event) => sum + (event[2] === "deliver" ? event[5].length : 0), 0)
      let rings = 0
      for (; first.length + await rung() < 60; rings++) {
        assert.isBelow(rings, 20)
        await ask("", "alarm.ring", [], key)
      }
      assert.isAbove(rings, 3)
    }))

  it.effect("fails all of its requests when it cannot finish a queue that none of them is about", () =>
    alone(async ({ key, look, send, sendAll, two }, redis) => {
      const errands = key.replace("queue:", "errands:queue:")
      await send("s", "queue.work", ["w", 1])
      const [, stamp, first] = await send("s", "queue.offer", ["1", "1", "node", 1])
      await sendAll("s", [["queue.work", ["e", 1], errands]])
      await redis.hset(errands, "ws/e", "of another program")
      const replies = await sendAll("s", [
        ["queue.offer", ["2", "1", "node", 2], two],
        ["queue.complete", ["w", `n${stamp}-${first}`, "", "", "", 0, 1, "", "", "[1]"]]
      ])
      assert.deepStrictEqual(replies, [["failed", "defect"], ["failed", "defect"]])
      assert.strictEqual((await look("queue.state", []))[7], 1)
    }))

  it.effect("drains what was there, and nothing that it is asked for behind that", () =>
    alone(async ({ look, sendAll }) => {
      // The second job of each two runs after the first one, however that ends.
      const replies = await sendAll("s", [
        ["queue.offer", ["1x", "1i1", "node", 1]],
        ["queue.offer", ["2c1 x", "1p4", "node", 2]],
        ["queue.drain", [1, ""]],
        ["queue.offer", ["1a", "1i1", "node", 3]],
        ["queue.offer", ["2c1 a", "1p4", "node", 4]],
        ["queue.cancel", ["a", ""]]
      ])
      assert.deepStrictEqual([replies[2]!.slice(0, 2), replies[5]], [["drained", 2], ["cancelled", false]])
      const [, ready, , , , , , , , , , , blocked] = await look("queue.state", [])
      assert.deepStrictEqual([ready, blocked], [[0, 0, 1, 0], 0])
    }))

  const chain = async (
    send: (id: string, verb: string, args: ReadonlyArray<string | number>) => Promise<Array<any>>
  ) => {
    for (let from = 0; from < 400; from += 200) {
      const jobs = Array.from({ length: 200 }, (_, at) => {
        const name = String(1000 + from + at)
        const before = from + at === 0 ? "" : `c4 ${Number(name) - 1}`
        return [`1${name}${before}`, `1i4${before === "" ? "" : `p${before.length}`} `] as const
      })
      const [values, shapes] = [0, 1].map((part) => jobs.map((job) => job[part]).join("")) as [string, string]
      assert.deepStrictEqual((await send("s", "queue.offer", [values, shapes, "node", from + 1]))[3], [])
    }
  }

  it.effect("counts each job once that its drains have removed", () =>
    alone(async ({ look, send, sendAll }) => {
      await chain(send)
      const drained = (await sendAll("s", Array.from({ length: 4 }, () => ["queue.drain", [1, ""]]))).map(([, count]) =>
        count
      )
      assert.strictEqual(drained.reduce((sum, count) => sum + count, 0), 400)
      const [, ready, , , , , , , , , , , blocked] = await look("queue.state", [])
      assert.deepStrictEqual([ready, blocked], [[0, 0, 0, 0], 0])
    }))

  it.effect("removes what runs after drained jobs, also when the alarm has to go on with that", () =>
    alone(async ({ answers, look, ring, send }) => {
      await chain(send)
      const blocked = async () => {
        const [, ready, , , , , , , , , , , count] = await look("queue.state", [])
        // The first one is left for another call.
        assert.deepStrictEqual(ready, [0, 0, 1, 0])
        return count
      }
      await send("s", "queue.drain", [1, ""])
      assert.strictEqual(answers.get("s")![3], 0, "there is something to do at once")
      for (let rung = 0; await blocked() > 0; rung++) {
        assert.isBelow(rung, 10)
        await ring()
      }
    }))

  it.effect("does not offer to a queue that it has forgotten", () =>
    alone(async ({ key, look, open, send, sendAll, two }) => {
      const run = key.replace("queue:one", "flow:f/r")
      const node = { options: "{}", payload: "1", undo: false }
      const layout = layoutOf([
        { ...node, name: "first", queue: "two", before: [], behind: [[2, "f"]] },
        { ...node, name: "second", queue: "one", before: [1], behind: [] }
      ])
      await sendAll("s", [
        ["queue.work", ["w", 1], two],
        ["flow.begin", ["f", "null", layout.digest, 2, 0, 0, 0, 60_000], run],
        ...partsOf(layout).map((part): Asked => ["flow.load", [layout.digest, JSON.stringify(part)], run]),
        ["flow.start", [layout.digest, layout.fields.length / 2], run]
      ])
      const [, , , [[job, , , , given]]] = await send("s", "queue.work", ["w", 1], undefined, "", [two])
      // Nothing is left of a queue without jobs and members. Its job waits for a process that has it open.
      await sendAll("s", [
        ["session.leave", ["m"]],
        ["queue.finish", ["w", job, given, "", `["success",1]`, 0, 1], two]
      ])
      assert.deepStrictEqual(await look("queue.state", []), ["missing"])
      await open("d")
      const errands = key.replace("queue:one", "errands:f")
      const [, , , offered] = await send("d", "queue.work", ["d", 1], undefined, "", [errands]).then(() =>
        send("d", "queue.work", ["d", 1], undefined, "", [errands])
      )
      assert.deepStrictEqual(offered.map(([, , [tag, , at]]: any) => [tag, at]), [["offer", 2]])
    }))
})
