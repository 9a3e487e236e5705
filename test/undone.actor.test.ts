/**
 * What a session asks for after a fail-over that has undone what it received: the calls of others that led to it are lost, and its own are
 * not, so only what it has read of its mailbox shows that.
 */
import { assert, layer } from "@effect/vitest"
import { Effect } from "effect"
import type { Redis } from "ioredis"
import { heard } from "../src/internal/actor/lua.ts"
import { actor, client } from "./support/actor.ts"
import { freshNamespace, TestServer } from "./support/live.ts"
import { snapshot } from "./support/rollback.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

const started = async (redis: Redis) => {
  const namespace = freshNamespace()
  const queue = actor(redis, namespace, "queue:q")
  let number = 0
  for (const id of ["a", "b"]) {
    await queue.open(id)
    await queue.send(id, "queue.join", ["m", 1, 0, 0, 0, 60_000, 1000, 0, 3, 0, 0, 1, 0, 0, 1, 0, ""])
  }
  return {
    ...queue,
    offer: (shape: string) => queue.send("a", "queue.offer", ["1", shape, "node", ++number]),
    counts: async () => {
      const [, ready, delayed, active] = await queue.look("queue.state", [])
      return [ready, delayed, active]
    },
    /** What was posted to a session: the ids of its events. */
    posted: async (id: string) => (await redis.xrange(`{${namespace}:00}:mail:${id}`, "-", "+")).map(([id]) => id),
    mailbox: (id: string) => `{${namespace}:00}:mail:${id}`,
    kept: () => snapshot(redis, `{${namespace}:00}:`),
    passed: async (millis: number) => {
      const micros = async () => (await redis.time()).reduce((sum, part) => sum * 1e6 + Number(part), 0)
      const from = await micros()
      while (await micros() <= from + millis * 1000) await redis.ping()
    }
  }
}

layer(TestServer.layer, live)("what was undone", (it) => {
  const alone = (f: (queue: Awaited<ReturnType<typeof started>>, redis: Redis) => Promise<void>) =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      yield* Effect.promise(async () => f(await started(redis), redis))
    })

  const delayed = [[0, 0, 0, 0], 1, 0]

  /** Redis forgets that it has delivered a job: how the worker says that it is done, and the event that it has read. */
  const undone = async ({ kept, offer, passed, posted, ring, send }: Awaited<ReturnType<typeof started>>) => {
    await send("b", "queue.work", ["w", 9])
    const [, stamp, first] = await offer("1d1 ")
    const back = await kept()
    await passed(2)
    await ring()
    const read = (await posted("b")).at(-1)!
    await back()
    return { done: ["w", `N ${stamp}-${first} `, 1], read }
  }

  it.effect("is noticed when a job is done that a lost call has delivered", () =>
    alone(async (queue) => {
      const { done, read } = await undone(queue)
      assert.deepStrictEqual(await queue.counts(), delayed)
      assert.strictEqual(await queue.tell("b", "queue.done", done, read), "gap")
      assert.deepStrictEqual(await queue.counts(), delayed)
    }))

  it.effect("is noticed when as many other events were posted since, or more", () =>
    alone(async (queue) => {
      const { done, read } = await undone(queue)
      for (const active of [1, 2, 3]) {
        await queue.offer("1 ")
        assert.strictEqual(await queue.tell("b", "queue.done", done, read), "gap")
        assert.deepStrictEqual(await queue.counts(), [[0, 0, 0, 0], 1, active])
      }
    }))

  it.effect("is nothing of what was posted, and read in part, or trimmed", () =>
    alone(async ({ counts, mailbox, offer, posted, send, tell }, redis) => {
      await send("b", "queue.work", ["w", 9])
      const offered: Array<ReadonlyArray<unknown>> = []
      for (let at = 0; at < 4; at++) offered.push(await offer("1 "))
      const events = (await posted("b")).slice(-4)
      const done = (at: number) => ["w", `n ${offered[at]![1]}-${offered[at]![2]} `, 0]
      assert.strictEqual(await tell("b", "queue.done", done(0), events[1]!), "ok")
      // Told again, and of an event before it.
      assert.strictEqual(await tell("b", "queue.done", done(1), events[1]!), "ok")
      await redis.xtrim(mailbox("b"), "MINID", events[3]!)
      assert.strictEqual(await tell("b", "queue.done", done(2), events[2]!), "ok")
      assert.strictEqual(await tell("b", "queue.done", done(3), events[3]!), "ok")
      assert.deepStrictEqual(await counts(), [[0, 0, 0, 0], 0, 0])
    }))

  it.effect("is reported with all that follows from an event", () =>
    Effect.sync(() => {
      for (const verb of ["queue.done", "queue.finish", "queue.complete", "rendezvous.acknowledge", "barrier.arrive"]) {
        assert.isTrue(heard.has(verb), verb)
      }
    }))

  it.effect("counts no party of a barrier twice", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      yield* Effect.promise(async () => {
        const namespace = freshNamespace()
        const barrier = actor(redis, namespace, "barrier:b")
        const arrive = (id: string, arrival: string, mode = "w0") =>
          [id, arrival, "m", `"${arrival}"`, 2, mode] as const
        for (const id of ["a", "b"]) {
          await barrier.open(id)
          await barrier.send(id, "barrier.join", ["m", 2, "fail"])
        }
        await barrier.send("a", "barrier.arrive", arrive("c", "a1"))
        const back = await snapshot(redis, `{${namespace}:00}:`)
        await barrier.send("b", "barrier.arrive", arrive("c", "b1"))
        assert.deepStrictEqual((await barrier.mail("a")).at(-1)?.slice(1, 6), ["c", [0], "passed", 1, ["a1", "b1"]])
        const [read] = (await redis.xrevrange(`{${namespace}:00}:mail:a`, "+", "-", "COUNT", 1))[0]!
        await back()
        assert.strictEqual(await barrier.tell("a", "barrier.arrive", arrive("d", "a2"), read), "gap")
        await barrier.end("a")
        await barrier.open("next")
        await barrier.send("next", "barrier.join", ["m", 2, "fail"])
        // Its first arrival is still there, and belongs to the session that was ended.
        assert.deepStrictEqual(await barrier.send("next", "barrier.arrive", arrive("d", "a2")), ["queued", 2])
        assert.deepStrictEqual((await barrier.mail("next")).filter(([tag]) => tag === "each"), [])
        assert.strictEqual(await barrier.reap("a"), "forgotten")
        assert.deepStrictEqual((await barrier.look("barrier.state", [])).slice(1), [1, 2])
        await barrier.open("other")
        await barrier.send("other", "barrier.join", ["m", 2, "fail"])
        await barrier.send("other", "barrier.arrive", arrive("e", "b2"))
        assert.deepStrictEqual((await barrier.mail("next")).at(-1)?.slice(1, 6), ["d", [0], "passed", 1, [
          "a2",
          "b2"
        ]])
      })
    }))

  it.effect("counts a member of a semaphore once", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      yield* Effect.promise(async () => {
        const semaphore = actor(redis, freshNamespace(), "semaphore:s")
        for (const id of ["a", "b"]) await semaphore.open(id)
        // It attaches before there are permits, and has asked again by the time that these come.
        assert.strictEqual((await semaphore.send("b", "semaphore.join", ["m", 0, "attach"]))[0], "queued")
        await semaphore.send("b", "semaphore.join", ["m", 2, "keep"])
        await semaphore.send("b", "session.leave", ["m"])
        const [, , ...state] = await semaphore.look("semaphore.state", [])
        assert.isDefined(state)
        assert.strictEqual(await redis.exists(semaphore.key), 0)
      })
    }))
})
