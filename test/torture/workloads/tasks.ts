import { Effect, Option, Schema } from "effect"
import type { Anomaly, Run } from "../checks.ts"
import type { Hold } from "../history.ts"
import { fibers, keepOf, type Workload } from "../workload.ts"

const shards = 4

/**
 * Jobs that all processes of the same time work on, and wait for. The result of a shard is the token of the
 * registration that it was submitted with, and what all of it comes to is their sum.
 */
export const tasks: Workload = {
  name: "tasks",
  run: (client) =>
    fibers(
      2,
      client,
      Effect.gen(function*() {
        const { lockstep: { Lease, TaskGroup }, random } = client
        const key = `job ${Math.floor(client.clock.wall() / 1000)}`
        const group = yield* TaskGroup.make({ name: key, result: Schema.Number, shards, timeToLive: client.keep })
        const run = (shard: number) =>
          client.attempt(
            { kind: "tasks run", key, weight: shard, wait: false },
            group.run(
              String(shard),
              Effect.delay(Effect.map(Lease.current, (lease) => Option.getOrThrow(lease).token), random() * 20)
            ),
            (token) => token
          )
        for (let at = 0; at < 2; at++) {
          // Some are lost on the way.
          yield* Effect.timeoutOption(run(Math.floor(random() * shards)), random() < 0.2 ? 5 : 1000)
        }
        const all = client.attempt(
          { kind: "tasks", key, weight: 0, wait: true },
          group.awaitAll({ onWorkerLost: "wait" }),
          (results) => [...results.values()].reduce((sum, token) => sum + token, 0)
        )
        for (let limit = random() * 300; Option.isNone(yield* Effect.timeoutOption(all, limit)); limit = 500) {
          for (let shard = 0; shard < shards; shard++) yield* run(shard)
        }
      }).pipe(
        Effect.scoped,
        // Redis may be out of memory or out of reach at that moment.
        Effect.catch(() => Effect.sleep(50 + client.random() * 50)),
        Effect.asVoid
      )
    ),
  check: agrees
}

/**
 * A shard has one result, whichever process asks and when, unless Redis has forgotten it; and no process has all of them before all have
 * been worked on. That all processes get them is for `hang` to say.
 */
function agrees(holds: ReadonlyArray<Hold>, run: Run): ReadonlyArray<Anomaly> {
  const found: Array<Anomaly> = []
  const answered = holds.filter(({ entered }) => entered !== undefined)
  const from = Math.min(...holds.map(({ asked }) => asked))
  const to = Math.max(...answered.map(({ entered }) => entered!))
  const forgot = run.forgets.some((span) => span.from <= to && from - run.lease <= span.to)
  const results = new Map<number, Hold>()
  // No client has reached the group for as long as it is kept: one that was away makes another group.
  const kept = keepOf(run.lease / 1000) * 1000
  const moments = answered.map(({ entered }) => entered!).sort((a, b) => a - b)
  if (moments.some((at, next) => next > 0 && at - moments[next - 1]! > kept)) return []
  for (const hold of answered.filter(({ kind }) => kind === "tasks run")) {
    const other = results.get(hold.weight)
    if (other === undefined) results.set(hold.weight, hold)
    else if (other.token !== hold.token && !forgot) {
      found.push({ check: "overwritten", detail: "a shard had two results", holds: [other, hold] })
    }
  }
  for (const wait of answered.filter(({ kind }) => kind === "tasks")) {
    const worked = new Set(
      holds.filter((hold) => hold.kind === "tasks run" && hold.asked < wait.entered!).map(({ weight }) => weight)
    )
    if (worked.size < shards) {
      found.push({ check: "early", detail: `all was done after ${worked.size} of ${shards}`, holds: [wait] })
    }
    const sum = [...results.values()].reduce((sum, { token }) => sum + token!, 0)
    if (results.size === shards && sum !== wait.token && !forgot) {
      found.push({
        check: "overwritten",
        detail: "a process was given other results",
        holds: [wait, ...results.values()]
      })
    }
  }
  return found
}
