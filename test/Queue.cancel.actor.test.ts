/** Jobs that are cancelled while a worker has them, in the queue actor: they keep their slots until the handler has ended. */
import { assert, layer } from "@effect/vitest"
import { Effect } from "effect"
import { actor, client } from "./support/actor.ts"
import { freshNamespace, TestServer } from "./support/live.ts"

const live = { excludeTestServices: true, timeout: "120 seconds" } as const

// A strict group, and a queue with one job at a time.
const kinds = [{ what: "a strict group", shape: "rg1", limit: 0 }, { what: "a limit", shape: "r", limit: 1 }] as const

const parted = (id: string) => `${id[0]} ${id.slice(1)}`

const started = async (queue: ReturnType<typeof actor>, limit: number, workers = 2) => {
  const names = Array.from({ length: workers }, (_, at) => `s${at}`)
  await queue.open("p")
  await queue.send("p", "queue.join", ["p", "1", limit, 0, 0, 60_000, 1000, 0, 1, 0, 0, 1, 0, 0, 1, 0, ""])
  for (const name of names) {
    await queue.open(name)
    await queue.send(name, "queue.work", ["w", 1])
  }
  const given = async (name: string) =>
    (await queue.mail(name)).flatMap(([tag, , what, , , jobs]) =>
      tag === "changed" && what === "deliver" ? (jobs as Array<[string]>).map(([job]) => job) : []
    )
  const begun = async () => (await Promise.all(names.map(given))).flat()
  const holderOf = async (job: string) => {
    for (const name of names) if ((await given(name)).includes(job)) return name
    return assert.fail(`${job} has not begun`)
  }
  const activeIn = async () => (await queue.look("queue.state", []))[3] as number
  return { given, begun, holderOf, activeIn }
}

/** What the worker says of a job that was cancelled, or how it ends. */
const ends: {
  readonly [what: string]: (queue: ReturnType<typeof actor>, name: string, job: string) => Promise<unknown>
} = {
  done: (queue, name, job) => queue.send(name, "queue.done", ["w", `${parted(job)} `, 1]),
  finish: (queue, name, job) => queue.send(name, "queue.finish", ["w", job, "", "", `["success",1]`, 0, 1]),
  complete: (queue, name, job) =>
    queue.send(name, "queue.complete", ["w", job, "", "", `["success",1]`, 0, 1, "7", "1 ", ""]),
  retry: (queue, name, job) => queue.send(name, "queue.retry", ["w", job, 0, "1", 1]),
  later: (queue, name, job) => queue.send(name, "queue.retry", ["w", job, 60_000, "1", 1]),
  bury: (queue, name, job) => queue.send(name, "queue.bury", ["w", job, "failed", "no", `["failed","no"]`, 1]),
  leave: (queue, name) => queue.send(name, "session.leave", ["w"]),
  crash: async (queue, name) => {
    await queue.end(name)
    await queue.reap(name)
  }
}

layer(TestServer.layer, live)("a job of the queue actor that is cancelled while a worker has it", (it) => {
  for (const { limit, shape, what } of kinds) {
    for (const [how, end] of Object.entries(ends)) {
      it.effect(`keeps its slot of ${what} until ${how}`, () =>
        Effect.gen(function*() {
          const redis = yield* client(yield* TestServer)
          yield* Effect.promise(async () => {
            const queue = actor(redis, freshNamespace(), "queue:q")
            const { activeIn, begun, holderOf } = await started(queue, limit)
            const group = shape.includes("g") ? "x" : ""
            await queue.send("p", "queue.offer", [`1${group}2${group}`, `1${shape} 1${shape} `, "node", 1])
            const [first] = await begun()
            const holder = await holderOf(first!)
            await queue.send(holder, "queue.note", ["w", first!, "1", "", ""])
            assert.deepStrictEqual(await queue.send("p", "queue.cancel", [first!, 1]), ["begun"])
            assert.deepStrictEqual(await queue.look("queue.status", [first!]), ["status", "active", 1])
            assert.deepStrictEqual(await queue.send("p", "queue.cancel", [first!, 0]), ["cancelled", true])
            // It has ended, for all but its slot.
            assert.deepStrictEqual(await queue.send("p", "queue.cancel", [first!, 0]), ["missing"])
            assert.deepStrictEqual(await queue.look("queue.status", [first!]), ["missing"])
            assert.deepStrictEqual(await queue.send("p", "queue.watch", ["p", first!]), ["outcome", first!, [
              "cancelled"
            ]])
            assert.deepStrictEqual(await queue.send(holder, "queue.note", ["w", first!, "1", "", ""]), ["missing"])
            assert.deepStrictEqual(await begun(), [first], "another job began beside the cancelled handler")
            assert.strictEqual(await activeIn(), 1)
            const asked = await queue.send(holder, "queue.work", ["w", 0])
            assert.deepStrictEqual(asked.slice(3), [[], [first]])
            await end(queue, holder, first!)
            const second = (await begun()).find((job) => job !== first)
            assert.isDefined(second, "the slot was not freed")
            assert.strictEqual(await activeIn(), 1)
            await queue.send(await holderOf(second!), "queue.finish", ["w", second!, "", "", `["success",2]`, 0, 1])
            const [, ready, delayed, active, dead, , , completed] = await queue.look("queue.state", [])
            assert.deepStrictEqual([...ready, delayed, active, dead, completed].map(Number), [0, 0, 0, 0, 0, 0, 0, 1])
            assert.deepStrictEqual(await queue.send("p", "queue.watch", ["p", first!]), ["outcome", first!, [
              "cancelled"
            ]])
            assert.isEmpty((await redis.hkeys(queue.key)).filter((field) => /^[jgG]/.test(field)))
            assert.strictEqual(await redis.hlen(queue.key.replace(":queue:", ":queue-notes:")), 0)
          })
        }))
    }
  }

  it.effect("is not removed again, and frees its slot once", () =>
    Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      yield* Effect.promise(async () => {
        const queue = actor(redis, freshNamespace(), "queue:q")
        const { activeIn, given } = await started(queue, 0, 1)
        await queue.send("s0", "queue.credit", ["w", 999, ""])
        await queue.send("p", "queue.offer", ["1".repeat(600), "1 ".repeat(600), "node", 1])
        const jobs = await given("s0")
        assert.strictEqual(jobs.length, 600)
        let [count, behind, more] = [0, "", true]
        while (more) {
          const answer = await queue.send("p", "queue.obliterate", [behind])
          count += answer[1]
          more = answer[2]
          behind = answer[3]
        }
        assert.strictEqual(count, 600)
        assert.deepStrictEqual((await queue.send("p", "queue.obliterate", [""])).slice(0, 3), ["obliterated", 0, false])
        assert.strictEqual(await activeIn(), 600)
        // Jobs that are offered then are removed as well.
        await queue.send("p", "queue.offer", ["1", "1 ", "node", 2])
        const late = (await given("s0"))[600]!
        const removed = []
        for (let behind = ""; removed.length < 9;) {
          const answer = await queue.send("p", "queue.obliterate", [behind])
          removed.push(answer[1])
          if (!answer[2]) break
          behind = answer[3]
        }
        assert.strictEqual(removed.reduce((sum, one) => sum + one, 0), 1)
        assert.isBelow(removed.length, 9)
        const all = [...jobs, late].map((job) => job.slice(1)).join(" ")
        for (let time = 0; time < 2; time++) await queue.send("s0", "queue.done", ["w", `n ${all} `, 0])
        const [, , , active, , , , completed] = await queue.look("queue.state", [])
        assert.deepStrictEqual([active, completed], [0, 0])
        assert.isEmpty((await redis.hkeys(queue.key)).filter((field) => field.startsWith("j")))
      })
    }))
})
