/** A holder that was away for too long must not write any more. The place that is written to has to see to that. */
import { NodeRuntime } from "@effect/platform-node"
import { Console, Effect } from "effect"
import assert from "node:assert/strict"
import { DatabaseSync } from "node:sqlite"
import { Fence, Lock, Redis } from "../src/index.ts" // In your program: from "lockstep"
import { layer } from "./support.ts"

const database = new DatabaseSync(":memory:")
database.exec("CREATE TABLE report (id INTEGER PRIMARY KEY, text TEXT, token INTEGER)")
database.exec("INSERT INTO report VALUES (1, 'empty', 0)")
const update = database.prepare("UPDATE report SET text = ?1, token = ?2 WHERE id = 1 AND token <= ?2")

interface Token {
  readonly token: number
}

/** Whether it was written. */
const toSql = ({ token }: Token, text: string) => update.run(text, token).changes === 1

const toRedis = (lease: Token, text: string) =>
  Fence.run(lease, "report", "SET", text, "EX", 60).pipe(
    Effect.as(true),
    Effect.catchReason("FenceError", "StaleToken", (stale) => Effect.as(Console.log(stale.message), false))
  )

const program = Effect.gen(function*() {
  // As if the processes had been paused. One that knows that its lease is over writes nothing, so these have the tokens only.
  const { token: one } = yield* Effect.scoped(Lock.acquire("report"))
  const { token: other } = yield* Effect.scoped(Lock.acquire("report"))
  assert.ok(one < other)
  const [first, second] = [{ token: one }, { token: other }]

  assert.deepEqual([toSql(second, "by the second"), toSql(first, "by the first")], [true, false])
  assert.deepEqual([yield* toRedis(second, "by the second"), yield* toRedis(first, "by the first")], [true, false])

  const redis = yield* Redis.Redis
  const texts = [database.prepare("SELECT text FROM report").get()?.["text"], yield* redis.send("GET", "report")]
  yield* Console.log(`SQL has what was written ${texts[0]}, Redis has what was written ${texts[1]}`)
  assert.deepEqual(texts, ["by the second", "by the second"])
})

program.pipe(Effect.provide(layer()), NodeRuntime.runMain)
