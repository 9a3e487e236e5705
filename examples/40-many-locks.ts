/** Money goes from account to account, in both directions at once. Each transfer needs two locks; none deadlocks. */
import { NodeRuntime } from "@effect/platform-node"
import { Console, Effect } from "effect"
import assert from "node:assert/strict"
import { Lock } from "../src/index.ts" // In your program: from "lockstep"
import { layer } from "./support.ts"

const balances = { alice: 100, bob: 100, carol: 100 }
type Account = keyof typeof balances

const transfer = (from: Account, to: Account, amount: number) =>
  Effect.gen(function*() {
    const [a, b] = [balances[from], balances[to]]
    yield* Effect.sleep("1 millis")
    balances[from] = a - amount
    balances[to] = b + amount
    // In whatever order they are named: `withLocks` takes them in the same order everywhere.
  }).pipe(Lock.withLocks([`account/${from}`, `account/${to}`]))

const program = Effect.gen(function*() {
  const round = [
    transfer("alice", "bob", 10),
    transfer("bob", "alice", 5),
    transfer("bob", "carol", 7),
    transfer("carol", "alice", 1)
  ]
  yield* Effect.all([...round, ...round, ...round], { concurrency: "unbounded" })
  yield* Console.log(`alice ${balances.alice}, bob ${balances.bob}, carol ${balances.carol}`)
  assert.deepEqual(balances, { alice: 88, bob: 94, carol: 118 })
})

program.pipe(Effect.provide(layer()), NodeRuntime.runMain)
