import { Effect, Option } from "effect"
import { type Anomaly, bounded, type Run } from "../checks.ts"
import type { Client } from "../client.ts"
import type { Hold } from "../history.ts"
import { forgot } from "../states.ts"
import { fibers, type Workload } from "../workload.ts"

const lock = "exclusive fenced"
const table = "{fenced}:table"

/** Writes the token. A lease that its process knows to be lost would not be sent, and here a token is all there is. */
const write = (client: Client, token: number) =>
  client.attempt(
    { kind: "fence write", key: table, weight: token, wait: false },
    client.lockstep.Fence.run({ token }, table, "SET", `${token}`, "PX", 60_000),
    () => token
  )

/** Writes under the lock, and perhaps once more when it is over. */
const once = Effect.fnUntraced(function*(client: Client) {
  const { Lease, Lock } = client.lockstep
  let token: number | undefined
  yield* client.hold(
    [{ kind: "fence", key: lock, weight: 1, wait: true }],
    (body) =>
      Lock.withLock(
        Effect.gen(function*() {
          token = Option.getOrThrow(yield* Lease.currentOf(lock)).token
          yield* body
          yield* write(client, token)
        }),
        lock
      )
  )
  if (token === undefined || client.random() < 0.5) return
  yield* Effect.sleep(client.random() * 50)
  yield* write(client, token)
})

/** Holders of a lock write to Redis with their tokens, in time and too late. */
export const fence: Workload = {
  name: "fence",
  run: (client) => fibers(2, client, Effect.suspend(() => once(client))),
  check: (holds, run) =>
    holds[0]!.key === lock ? bounded(1)(holds, run) : [...outdated(holds, run), ...unfounded(holds)]
}

/** Nothing is written with a token when a newer one has been seen before. */
function outdated(writes: ReadonlyArray<Hold>, run: Run): ReadonlyArray<Anomaly> {
  const accepted = writes.filter(({ entered }) => entered !== undefined)
  return accepted.flatMap((late) => {
    const newer = accepted.find(({ asked, entered, weight }) =>
      weight > late.weight && entered! < late.asked && !forgot(run, asked, late.entered!)
    )
    return newer === undefined ? [] : [{
      check: "fence",
      detail: "a write was accepted behind one with a newer token",
      holds: [newer, late]
    }]
  })
}

/** A write is refused because of another one with a newer token. */
function unfounded(writes: ReadonlyArray<Hold>): ReadonlyArray<Anomaly> {
  return writes.filter(({ outcome }) => outcome?.includes("newer token") === true).filter((refused) =>
    !writes.some(({ asked, weight }) => weight > refused.weight && asked < refused.ended!)
  ).map((refused) => ({ check: "fence", detail: "a write was refused without a newer one", holds: [refused] }))
}
