/** Values that processes share: a configuration that all of them follow, money that is never lost, and a count. */
import { NodeRuntime } from "@effect/platform-node"
import { Console, Effect, Fiber, Layer, Schema, Stream } from "effect"
import assert from "node:assert/strict"
import { Counter, Lock, SharedRef } from "../src/index.ts" // In your program: from "lockstep"
import { layer } from "./support.ts"

class Config extends SharedRef.Service<Config>()("config", {
  schema: Schema.Struct({ workers: Schema.Number, paused: Schema.Boolean }),
  initial: { workers: 1, paused: false }
}) {}

class Accounts extends SharedRef.FamilyService<Accounts>()("accounts", {
  schema: Schema.Number,
  initial: 0,
  colocate: "accounts"
}) {}

class Transfers extends Counter.Service<Transfers>()("transfers") {}

const program = Effect.gen(function*() {
  // Every process follows the configuration, and none polls.
  const config = yield* Config
  const seen: Array<number> = []
  const following = yield* Effect.forkChild(
    config.changes.pipe(
      Stream.takeUntil(({ paused }) => paused),
      Stream.runForEach(({ workers }) => Effect.sync(() => seen.push(workers)))
    )
  )
  while (seen.length === 0) yield* Effect.sleep("1 millis")
  yield* config.update((present) => ({ ...present, workers: 4 }))
  yield* config.update((present) => ({ ...present, paused: true }))
  yield* Fiber.join(following)
  assert.deepEqual(seen, [1, 4, 4])

  // Many transfers at once; no money appears or disappears.
  const account = yield* Accounts
  const transfers = yield* Transfers
  yield* account("ann").set(100)
  const pay = (from: string, to: string, amount: number) =>
    Effect.gen(function*() {
      const paid = yield* SharedRef.transaction(
        [account(from), account(to)],
        ([a, b]) => a < amount ? [false, [a, b]] : [true, [a - amount, b + amount]]
      )
      if (paid) yield* transfers.add(1)
    })
  yield* Effect.all(
    Array.from({ length: 20 }, (_, n) => n % 2 === 0 ? pay("ann", "bob", 20) : pay("bob", "ann", 10)),
    { concurrency: "unbounded" }
  )
  const [ann, bob] = [yield* account("ann").get, yield* account("bob").get]
  assert.equal(ann + bob, 100)
  assert.ok((yield* transfers.get) > 0)

  // As if the first holder had been paused: it does not know of the second one, and must not write any more.
  const first = yield* Effect.scoped(Lock.acquire("owner"))
  const paused = { key: first.key, kind: first.kind, token: first.token }
  yield* Effect.scoped(Effect.gen(function*() {
    const second = yield* Lock.acquire("owner")
    yield* config.setFenced(second, { workers: 8, paused: false })
  }))
  for (const lease of [paused, first]) {
    const refused = yield* Effect.flip(config.setFenced(lease, { workers: 2, paused: false }))
    assert.equal(refused.reason._tag, "StaleToken")
  }

  // Without a round trip, from the second time on.
  assert.equal((yield* config.cached).workers, 8)
  yield* Console.log(`${(yield* config.cached).workers} workers, and ann and bob have ${ann + bob}`)
})

program.pipe(
  Effect.provide(Layer.mergeAll(Config.layer, Accounts.layer, Transfers.layer)),
  Effect.provide(layer()),
  NodeRuntime.runMain
)
