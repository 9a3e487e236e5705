import { Effect, Option } from "effect"
import type { Anomaly } from "../checks.ts"
import type { Hold } from "../history.ts"
import { fibers, type Workload } from "../workload.ts"

const total = 4

/** Nobody passes before enough has been counted. That everybody passes afterwards is for `hang` to say. */
const early = (holds: ReadonlyArray<Hold>): ReadonlyArray<Anomaly> => {
  const counts = holds.filter(({ kind }) => kind === "latch count")
  return holds.filter(({ entered, kind }) => kind === "latch" && entered !== undefined).flatMap((pass) => {
    const before = counts.filter(({ asked }) => asked < pass.entered!)
    const sum = before.reduce((sum, { weight }) => sum + weight, 0)
    return sum >= total ? [] : [{ check: "early", detail: `passed after ${sum} of ${total}`, holds: [pass, ...before] }]
  })
}

/** Latches that everybody who comes at the same time counts down and waits for; the last one does what is left. */
export const latch: Workload = {
  name: "latch",
  run: (client) =>
    fibers(
      2,
      client,
      Effect.gen(function*() {
        const key = `phase ${Math.floor(client.clock.wall() / 500)}`
        const shared = yield* client.lockstep.CountDownLatch.make({ name: key, count: total, timeToLive: client.keep })
        const count = (by: number) =>
          client.attempt({ kind: "latch count", key, weight: by, wait: false }, shared.countDown({ by }))
        const request = { kind: "latch", key, weight: 1, wait: true }
        yield* Effect.sleep(client.random() * 20)
        yield* count(1)
        const limit = 50 + client.random() * 500
        const opened = yield* Effect.timeoutOption(client.attempt(request, shared.await), limit)
        if (Option.isNone(opened)) {
          while (!(yield* count(total))) yield* Effect.sleep(50)
          yield* client.attempt(request, shared.await)
        }
      }).pipe(
        Effect.scoped,
        // Redis may be out of memory or out of reach at that moment.
        Effect.catch(() => Effect.sleep(50 + client.random() * 50)),
        Effect.asVoid
      )
    ),
  check: early
}
