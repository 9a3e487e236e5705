/**
 * A test that pauses and crashes processes, and cuts their connections. It finds the deposit that is lost when an account does not look at
 * fencing tokens, and tells how that happens.
 */
import { NodeRuntime } from "@effect/platform-node"
import { Console, Effect, Option } from "effect"
import assert from "node:assert/strict"
import { Coordinator, Lease, Lock } from "../src/index.ts" // In your program: from "lockstep"
import { Simulation } from "../src/testing.ts" // In your program: from "lockstep/testing"

/** What is outside: it can be reached by processes that do not know yet that their lease is over. */
const openAccount = (looksAtTokens: boolean) => {
  let [balance, newest] = [0, 0]
  const admits = (token: number): boolean => {
    if (looksAtTokens && token < newest) return false
    newest = Math.max(newest, token)
    return true
  }
  return {
    balance: () => balance,
    read: (token: number) => admits(token) ? Option.some(balance) : Option.none(),
    write: (token: number, value: number) => {
      if (!admits(token)) return false
      balance = value
      return true
    }
  }
}

const scenario = (looksAtTokens: boolean) => () => {
  const account = openAccount(looksAtTokens)
  let confirmed = 0
  const deposit = Effect.gen(function*() {
    const { token } = Option.getOrThrow(yield* Lease.currentOf("account"))
    const found = account.read(token)
    yield* Effect.sleep("50 millis")
    if (Option.isSome(found) && account.write(token, found.value + 1)) confirmed++
  })
  return {
    program: ({ isStopping }: Simulation.Process) =>
      Effect.gen(function*() {
        while (!isStopping()) {
          // Not to be interrupted in the middle, so it goes on for a moment when the lease is lost.
          yield* Lock.withLock(Effect.uninterruptible(deposit), "account").pipe(Effect.ignore)
        }
      }).pipe(Effect.provide(Coordinator.layer({ lease: "2 seconds" })), Effect.retry({ while: () => !isStopping() })),
    invariant: () =>
      account.balance() === confirmed
        ? undefined
        : `${confirmed} deposits were confirmed, and the balance is ${account.balance()}`
  }
}

const options: Simulation.Options = { processes: 2, faults: ["cut", "lost replies", "pause", "crash"] }

const program = Effect.gen(function*() {
  const lost = yield* Effect.flip(Simulation.explore(scenario(false), { ...options, schedules: 200 }))
  // What broke, what was lost, and what was found; `lost.message` has more of the story.
  yield* Console.log(lost.story.filter((line) => /: logs (Warn|Error) | (fault|check): /.test(line)).join("\n"))
  yield* Console.log(`seed ${lost.seed}: ${lost.reason}`)

  const { schedules, simulated } = yield* Simulation.explore(scenario(true), { ...options, schedules: 20 })
  assert.equal(schedules, 20)
  yield* Console.log(`an account that looks at tokens loses nothing, in ${schedules} schedules`)
  assert.ok(simulated)
})

program.pipe(Effect.provide(Simulation.layer), NodeRuntime.runMain)
