/** The handlers of elections and ticks, driven directly: asked again, they answer the same and change nothing. */
import { assert, layer } from "@effect/vitest"
import { Effect } from "effect"
import { actor, client } from "./support/actor.ts"
import { freshNamespace, TestServer } from "./support/live.ts"

const live = { excludeTestServices: true, timeout: "30 seconds" } as const

layer(TestServer.layer, live)("an election's actor", (it) => {
  const on = <A>(resource: string, self: (one: ReturnType<typeof actor>) => Promise<A>) =>
    Effect.scoped(Effect.gen(function*() {
      const redis = yield* client(yield* TestServer)
      const one = actor(redis, freshNamespace(), resource)
      return yield* Effect.promise(async () => {
        for (const session of ["a", "b", "c"]) await one.open(session)
        return await self(one)
      })
    }))

  it.effect("answers a candidate that asks again what has become of it", () =>
    on("election:chief", async ({ mail, send }) => {
      const first = await send("a", "election.campaign", ["1", "\"x\""])
      assert.strictEqual(first[0], "granted")
      assert.deepStrictEqual(await send("b", "election.campaign", ["1", "\"y\""]), ["queued", 0])
      assert.deepStrictEqual(await send("c", "election.campaign", ["1", "\"z\""]), ["queued", 1])
      const state = await send("c", "election.state", [])
      assert.deepStrictEqual(await send("a", "election.campaign", ["1", "\"other\""]), first)
      assert.deepStrictEqual(await send("c", "election.campaign", ["1", "\"other\""]), ["queued", 1])
      assert.deepStrictEqual(await send("c", "election.state", []), state)
      assert.deepStrictEqual(await send("a", "election.nominate", ["1", "c/1"]), ["nominated"])
      assert.deepStrictEqual(await send("a", "election.nominate", ["1", "c/1"]), ["nominated"])
      assert.deepStrictEqual(await send("b", "election.nominate", ["1", "c/1"]), ["absent"])
      await send("a", "session.leave", ["1"])
      const granted = (await mail("c")).filter(([event]) => event === "granted")
      assert.strictEqual(granted.length, 1)
      assert.deepStrictEqual(await send("c", "election.campaign", ["1", "\"z\""]), ["granted", granted[0]![2]])
      assert.deepStrictEqual(await send("a", "election.nominate", ["1", "b/1"]), ["absent"])
    }))

  it.effect("answers an observer that asks again through its mailbox, behind the changes that are there", () =>
    on("election:chief", async ({ mail, send }) => {
      const [joined, change, ...vacant] = await send("a", "election.observe", ["o"])
      assert.deepStrictEqual([joined, ...vacant], ["joined", "0", "", 0, null, null])
      assert.isAbove(change, 0)
      // Also changes that its own session makes.
      const [, term] = await send("a", "election.campaign", ["1", "1"])
      for (const value of ["2", "2", "3"]) {
        assert.deepStrictEqual(await send("a", "election.proclaim", ["1", value]), ["proclaimed"])
      }
      assert.deepStrictEqual(await send("a", "election.observe", ["o"]), ["joined", 0, "0", "", 0, null, null])
      await send("a", "session.leave", ["1"])
      const events = await mail("a")
      const seen = events.filter(([event]) => event === "changed").map(([, , , of, , , , value]) => [of, value])
      assert.deepStrictEqual(seen, [[term, 1], [term, 2], [term, 3], [term, 3], ["0", null]])
      const changes = events.flatMap(([event, , at]) => event === "changed" ? [at] : [])
      assert.deepStrictEqual(changes, changes.toSorted((x, y) => x - y))
    }))

  it.effect("gives a tick to one term, which may ask again", () =>
    on("tick:report", async ({ send }) => {
      assert.deepStrictEqual(await send("a", "singleton.claim", ["1", "", "100", 60_000]), ["claimed"])
      assert.deepStrictEqual(await send("a", "singleton.claim", ["1", "", "100", 60_000]), ["claimed"])
      assert.deepStrictEqual(await send("a", "singleton.claim", ["2", "", "100", 60_000]), ["taken", "100"])
      assert.deepStrictEqual(await send("b", "singleton.claim", ["1", "", "100", 60_000]), ["taken", "100"])
      assert.deepStrictEqual(await send("b", "singleton.claim", ["1", "100", "200", 60_000]), ["claimed"])
      assert.deepStrictEqual(await send("a", "singleton.claim", ["1", "100", "200", 60_000]), ["taken", "200"])
    }))
})
