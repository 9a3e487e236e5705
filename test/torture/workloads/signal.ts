import { Effect } from "effect"
import type { Anomaly, Run } from "../checks.ts"
import type { Hold } from "../history.ts"
import { fibers, type Workload } from "../workload.ts"

/** Everybody sets it before waiting for it, so that nobody may wait for long. */
const paired = "paired"
/** Set and waited for at random, so that nobody may pass without a set. */
const counted = "counted"

/** Of a wait, in milliseconds. */
const limit = 4000

/** Signals: who has set one and then waits passes, and no more pass than were set. */
export const signal: Workload = {
  name: "signal",
  run: (client) =>
    fibers(
      3,
      client,
      Effect.gen(function*() {
        const key = client.pick([paired, counted])
        const shared = yield* client.lockstep.Signal.make({ name: key, timeToLive: client.keep })
        const set = client.attempt({ kind: "signal set", key, weight: 1, wait: false }, shared.set)
        const request = { kind: "signal", key, weight: 1, wait: true }
        if (key === paired) {
          if (yield* set) yield* client.attempt(request, shared.waitFor({ wait: limit }))
        } else if (client.random() < 0.5) yield* set
        else yield* Effect.timeoutOption(client.attempt(request, shared.await), client.random() * 100)
        yield* Effect.sleep(client.random() * 20)
      })
    ),
  check: (holds, run) => [...withoutSet(holds, run), ...late(holds, run)]
}

const sets = (holds: ReadonlyArray<Hold>) => holds.filter(({ kind }) => kind === "signal set")
const waits = (holds: ReadonlyArray<Hold>) => holds.filter(({ kind }) => kind === "signal")

/** A signal may wake two only when a waiter gave up, or its session was lost. */
function withoutSet(holds: ReadonlyArray<Hold>, run: Run): ReadonlyArray<Anomaly> {
  const passed = waits(holds).filter(({ entered }) => entered !== undefined).sort((a, b) => a.entered! - b.entered!)
  const asked = sets(holds).map(({ asked }) => asked).sort((a, b) => a - b)
  const excuses = [
    ...waits(holds).flatMap((wait) => wait.entered === undefined && wait.ended !== undefined ? [wait.ended] : []),
    ...[...run.lost.values()].flat()
  ].sort((a, b) => a - b)
  let [set, excused] = [0, 0]
  for (const [at, pass] of passed.entries()) {
    while (set < asked.length && asked[set]! <= pass.entered!) set++
    // A loss is told a moment after those who waited have heard of it.
    while (excused < excuses.length && excuses[excused]! <= pass.entered! + run.lease) excused++
    if (at + 1 > set + excused) {
      return [{ check: "early", detail: `${at + 1} have passed after ${set} were set`, holds: [pass] }]
    }
  }
  return []
}

/** Of as many signals as waiters, none may be lost, unless Redis has forgotten some. */
function late(holds: ReadonlyArray<Hold>, run: Run): ReadonlyArray<Anomaly> {
  if (holds.some(({ key }) => key !== paired)) return []
  return waits(holds).filter((wait) =>
    wait.outcome === "timeout" &&
    run.forgets.every(({ from }) => from > wait.ended!) &&
    ["", wait.client].every((client) =>
      run.disturbed.get(client)?.every(({ from, to }) => to < wait.asked || from > wait.ended!) !== false
    )
  ).map((wait) => ({ check: "hang", detail: `a signal was set for it, and it was not woken`, holds: [wait] }))
}
