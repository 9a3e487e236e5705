/** What a queue finds by looking at all of its members, workers and groups, and what it knows when it has none of them. */
import { assert, layer } from "@effect/vitest"
import { Effect } from "effect"
import type { Redis } from "ioredis"
import { actor, client } from "./support/actor.ts"
import { freshNamespace, TestServer } from "./support/live.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

const [anHour, aDay] = [3_600_000, 86_400_000] as const

type Actor = ReturnType<typeof actor>

/** A member that says how the queue works. Times are in milliseconds. */
const join = (queue: Actor, session: string, { age = 0, limit = 1, interval = 0 } = {}) => {
  const [rules, ofGroups] = [[0, interval, interval, 60_000, 1000, age, 3, 0, 0], [limit, interval, interval]]
  return queue.send(session, "queue.join", ["m", "1", ...rules, ...ofGroups, 1, 0])
}

let offers = 0

/** Offers jobs with the payload 1, each with these options. */
const offer = async (queue: Actor, session: string, wishes: ReadonlyArray<string>, texts = "") => {
  const values = wishes.map(() => `1${texts}`).join("")
  const shapes = wishes.map((more) => `1${more}`).join(" ")
  assert.strictEqual((await queue.send(session, "queue.offer", [values, shapes, "node", ++offers]))[0], "offered")
}

const deliveredTo = async (
  queue: Actor,
  session: string
): Promise<ReadonlyArray<readonly [id: string, count: number]>> =>
  (await queue.mail(session)).flatMap((event) => event[2] === "deliver" ? event[5] : [])

const alarmOf = async (redis: Redis, queue: Actor) => {
  const score = await redis.zscore(queue.keys("")[1]!, "@queue:q")
  return score === null ? Number.POSITIVE_INFINITY : Number(score)
}

/** Rings for as long as the alarm is due. Answers how often that was. */
const ringAll = async (redis: Redis, queue: Actor, ahead = 0): Promise<number> => {
  for (let rung = 0;; rung++) {
    if (await alarmOf(redis, queue) > Date.now() + ahead) return rung
    assert.isBelow(rung, 1000)
    await queue.ring()
  }
}

/** All processes die; `first` comes back a day later. */
const forgottenAfterADay = (first: "member" | "call") =>
  Effect.gen(function*() {
    const server = yield* TestServer
    const redis = yield* client(server)
    const queue = actor(redis, freshNamespace(), "queue:q")
    yield* Effect.promise(async () => {
      for (const session of ["A", "B"]) {
        await queue.open(session)
        await join(queue, session, { age: 2 * aDay })
        await queue.send(session, "queue.work", ["w", 3])
      }
      await offer(queue, "A", ["u", "u", "h", "n", "n"])
      await offer(queue, "A", ["ng1", "ng1"], "g")
      const handed = [...await deliveredTo(queue, "A"), ...await deliveredTo(queue, "B")]
      assert.lengthOf(handed, 6)
      const [[dead]] = await deliveredTo(queue, "A") as [[string, number]]
      await queue.send("A", "queue.bury", ["w", dead, "failed", "", "[\"failed\",\"\"]", 0])
      // All processes die, and what Redis keeps for a day is deleted.
      const [sessions, due] = queue.keys("") as [string, string]
      await redis.del(sessions, due, ...["A", "B"].flatMap((session) => queue.keys(session).slice(3)))
    })
    const ahead = aDay + anHour
    yield* client(server, ahead / 1000)
    yield* Effect.promise(async () => {
      await queue.open("C")
      // As an alarm, or an errand of another queue, which load it without becoming a member.
      if (first === "call") await queue.ring()
      await join(queue, "C", { age: 2 * aDay })
      await ringAll(redis, queue, ahead)
      const [, ready, delayed, active, dead, workers] = await queue.look("queue.state", [])
      assert.deepStrictEqual([ready.reduce((sum: number, n: number) => sum + n), delayed, active, dead, workers], [
        6,
        0,
        0,
        1,
        0
      ])
      assert.closeTo(await alarmOf(redis, queue), Date.now() + 2 * aDay, anHour)
      await queue.send("C", "queue.work", ["w", 10])
      const handed = await deliveredTo(queue, "C")
      // One of the group, and each counts the crash of its former worker.
      assert.lengthOf(handed, 5)
      assert.isTrue(handed.every(([, count]) => count === 65_536 + 2))
      for (let left = 6; left > 0; left--) {
        const job = (await deliveredTo(queue, "C"))[6 - left]![0]
        await queue.send("C", "queue.done", ["w", `${job.slice(0, 1)} ${job.slice(1)}`, 1])
      }
      await queue.send("C", "queue.discard", [""])
      await queue.send("C", "session.leave", ["w"])
      await queue.send("C", "session.leave", ["m"])
      assert.isEmpty(await redis.keys(`${queue.key}*`))
    })
    yield* client(server)
  })

layer(TestServer.layer, live)("a queue", (it) => {
  for (const first of ["member", "call"] as const) {
    it.effect(`gives up workers and members that no session remembers after a day, when the first ${first} comes`, () =>
      forgottenAfterADay(first))
  }

  it.effect("does not take attempts for crashes, however many there are", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      const queue = actor(redis, freshNamespace(), "queue:q")
      yield* Effect.promise(async () => {
        await queue.open("A")
        await join(queue, "A")
        await queue.send("A", "queue.work", ["w", 1])
        await offer(queue, "A", ["n"])
        const [[job]] = await deliveredTo(queue, "A") as [[string, number]]
        for (const key of await redis.keys("*")) {
          if (await redis.type(key) !== "stream") continue
          await redis.call("XCLAIM", key, "workers", "A/w", 0, job.slice(1), "RETRYCOUNT", 65_535).catch(() =>
            "another stream"
          )
        }
        for (let again = 0; again < 2; again++) {
          const [id] = (await deliveredTo(queue, "A")).at(-1)!
          assert.deepStrictEqual<unknown>(await queue.send("A", "queue.retry", ["w", id, 0, "1", 1]), ["returned"])
          assert.strictEqual((await deliveredTo(queue, "A")).at(-1)![1], 65_535)
        }
      })
    }))

  it.effect("begins jobs of groups that wait when the limits of groups are raised", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      const queue = actor(redis, freshNamespace(), "queue:q")
      yield* Effect.promise(async () => {
        await queue.open("A")
        await join(queue, "A")
        await queue.send("A", "queue.work", ["w", 1024])
        const names = Array.from({ length: 600 }, (_, at) => String.fromCharCode(0x100 + at))
        for (const name of names) await offer(queue, "A", ["ng2", "ng2"], name)
        const first = await deliveredTo(queue, "A")
        assert.lengthOf(first, names.length)
        // Of a strict group, the next job waits for the retry of the first one.
        for (const [job] of first) await queue.send("A", "queue.retry", ["w", job, anHour, "1", 1])
        await ringAll(redis, queue)
        assert.lengthOf(await deliveredTo(queue, "A"), names.length)
        // The same limits change nothing.
        await join(queue, "A")
        assert.strictEqual(await ringAll(redis, queue), 0)
        await join(queue, "A", { limit: 2 })
        assert.isAbove(await ringAll(redis, queue), 1, "all groups in one call")
        assert.lengthOf(await deliveredTo(queue, "A"), 2 * names.length)
      })
    }))

  it.effect("finds a member for a schedule that needs ticks behind many groups, some in each call", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      const queue = actor(redis, freshNamespace(), "queue:q")
      yield* Effect.promise(async () => {
        for (const session of ["A", "B"]) {
          await queue.open(session)
          await join(queue, session)
        }
        for (let at = 0; at < 3000; at++) await queue.send("A", "queue.pauseGroup", [`group ${at}`, "1"])
        await queue.send("A", "queue.schedule", ["m", "s", "[]", "n", "1", 0, "once"])
        const asked = async () => (await queue.mail("B")).filter((event) => event[2] === "ticks")
        assert.isEmpty(await asked())
        await queue.end("A")
        await queue.reap("A")
        assert.isAbove(await ringAll(redis, queue), 1, "all fields in one call")
        const [told] = await asked()
        const [version, last] = [told![4], told![5]] as [number, number]
        const ticks = [anHour, 2 * anHour, 3 * anHour].map((from) => Date.now() + from)
        assert.deepStrictEqual(await queue.send("B", "queue.ticks", ["m", "s", version, last, ticks.join(" ")]), [
          "given"
        ])
        await ringAll(redis, queue)
        assert.strictEqual(await alarmOf(redis, queue), ticks[0])
      })
    }))
  it.effect("keeps its rates when all jobs and processes have ended, and nothing else for longer", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      const queue = actor(redis, freshNamespace(), "queue:q")
      yield* Effect.promise(async () => {
        await queue.open("A")
        await join(queue, "A", { interval: anHour })
        await queue.send("A", "queue.work", ["w", 2])
        await offer(queue, "A", ["ng1"], "g")
        const [[job]] = await deliveredTo(queue, "A") as [[string, number]]
        await queue.send("A", "queue.done", ["w", `${job.slice(0, 1)} ${job.slice(1)}`, 1])
        for (const id of ["w", "m"]) await queue.send("A", "session.leave", [id])
        const keys = await redis.keys(`${queue.key.slice(0, -2)}*`)
        const lives = await Promise.all(keys.map((key) => redis.pttl(key)))
        assert.isTrue(lives.every((life) => life > 0 && life < anHour + 10_000), lives.join())
        await join(queue, "A", { interval: anHour })
        await queue.send("A", "queue.work", ["w", 2])
        await offer(queue, "A", ["ng1"], "g")
        await offer(queue, "A", ["n"])
        assert.lengthOf(await deliveredTo(queue, "A"), 1)
        assert.closeTo(await alarmOf(redis, queue), Date.now() + anHour, 10_000)
      })
    }))
})
