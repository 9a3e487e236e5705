import { Effect } from "effect"
import { type Anomaly, isDisturbed, type Run } from "../checks.ts"
import type { Client } from "../client.ts"
import type { Hold } from "../history.ts"
import { forgot } from "../states.ts"
import { fibers, keepOf, type Workload } from "../workload.ts"

/** Every process sets it before waiting for it, so that no waiter may wait for long. */
const paired = "paired"
/** Set and waited for at random, so that no waiter may pass without a set. */
const counted = "counted"
/** Each time another one, set so many times by one fiber, which then waits as often: no set of others hides a lost one. */
const own = "own"
const most = 3

/** Of a wait, in milliseconds. */
const limit = 4000

const open = (client: Client, key: string) => client.lockstep.Signal.make({ name: key, timeToLive: client.keep })

const wait = (key: string) => ({ kind: "signal", key, weight: 1, wait: true })

const alone = Effect.fnUntraced(function*(client: Client) {
  const key = `${own} ${client.unique()}`
  const signal = yield* open(client, key)
  const weight = 1 + Math.floor(client.random() * most)
  let left = weight
  let isFine = yield* client.attempt({ kind: "signal set", key, weight, wait: false }, signal.setMany(weight))
  while (isFine && left-- > 0) isFine = yield* client.attempt(wait(key), signal.waitFor({ wait: limit }))
})

const together = Effect.fnUntraced(function*(client: Client, key: string) {
  const shared = yield* open(client, key)
  const set = client.attempt({ kind: "signal set", key, weight: 1, wait: false }, shared.set)
  if (key === paired) {
    if (yield* set) yield* client.attempt(wait(key), shared.waitFor({ wait: limit }))
  } else if (client.random() < 0.5) yield* set
  else yield* Effect.timeoutOption(client.attempt(wait(key), shared.await), client.random() * 100)
})

/** Signals: a process that has set one and then waits passes, and no more pass than were set. */
export const signal: Workload = {
  name: "signal",
  run: (client) =>
    fibers(
      3,
      client,
      Effect.suspend(() => {
        const key = client.pick([paired, counted, own])
        const using = key === own ? alone(client) : together(client, key)
        return Effect.andThen(using, Effect.sleep(client.random() * 20))
      })
    ),
  check: (holds, run) => [...withoutSet(holds, run), ...late(holds, run)]
}

const sets = (holds: ReadonlyArray<Hold>) => holds.filter(({ kind }) => kind === "signal set")
const waits = (holds: ReadonlyArray<Hold>) => holds.filter(({ kind }) => kind === "signal")

/** A signal may wake two only when a waiter gave up, or its session was lost. */
function withoutSet(holds: ReadonlyArray<Hold>, run: Run): ReadonlyArray<Anomaly> {
  const passed = waits(holds).filter(({ entered }) => entered !== undefined).sort((a, b) => a.entered! - b.entered!)
  const asked = sets(holds).flatMap(({ asked, weight }) => Array.from({ length: weight }, () => asked))
    .sort((a, b) => a - b)
  const excuses = [
    ...waits(holds).flatMap((wait) => wait.entered === undefined && wait.ended !== undefined ? [wait.ended] : []),
    ...[...run.lost.values()].flat()
  ].sort((a, b) => a - b)
  let [set, excused] = [0, 0]
  for (const [at, pass] of passed.entries()) {
    while (set < asked.length && asked[set]! <= pass.entered!) set++
    // A loss is reported a moment after the waiters have observed it.
    while (excused < excuses.length && excuses[excused]! <= pass.entered! + run.lease) excused++
    if (at + 1 > set + excused) {
      return [{ check: "early", detail: `${at + 1} have passed after ${set} were set`, holds: [pass] }]
    }
  }
  return []
}

/** Whether some process did not come to wait for so long that signals may have expired meanwhile. */
const isExpired = ({ disturbed, lease }: Run, from: number, to: number): boolean => {
  const kept = keepOf(lease / 1000) * 1000
  return [...disturbed.values()].flat().some((span) =>
    Math.min(span.to, to) - Math.max(span.from, from) >= kept - lease
  )
}

/** Of as many signals as waiters, none may be lost, unless Redis has forgotten some, or they have expired. */
function late(holds: ReadonlyArray<Hold>, run: Run): ReadonlyArray<Anomaly> {
  if (holds.some(({ key }) => key === counted)) return []
  return waits(holds).filter((wait) => {
    // A shared signal lacks what Redis forgot at any time. A waiter is granted what was set soon after the last fault.
    const set = wait.key === paired ? 0 : sets(holds)[0]!.asked
    return wait.outcome === "timeout" && !forgot(run, set, wait.ended!) && !isExpired(run, set, wait.ended!) &&
      !isDisturbed(run, wait.client, wait.ended! - run.lease, wait.ended!)
  }).map((wait) => ({ check: "hang", detail: `a signal was set for it, and it was not woken`, holds: [wait] }))
}
