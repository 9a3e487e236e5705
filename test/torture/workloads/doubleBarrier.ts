import { Effect } from "effect"
import { type Anomaly, exclusive, overlaps, type Run } from "../checks.ts"
import { type Hold, lastRun } from "../history.ts"
import { fibers, lives, type Workload } from "../workload.ts"

const parties = 2
const name = "phases"

/** A double barrier that more come to than there are parties. */
export const doubleBarrier: Workload = {
  name: "doubleBarrier",
  run: (client) =>
    lives(Effect.gen(function*() {
      const shared = yield* client.lockstep.DoubleBarrier.make({ name, parties })
      yield* fibers(
        2,
        client,
        Effect.suspend(() => {
          // When the round is over, no other party comes.
          const limit = 20 + client.random() * (client.random() < 0.2 ? 100 : 3000)
          return client.hold(
            [{ kind: "doubleBarrier", key: name, weight: 1, wait: false }],
            (body) => Effect.timeoutOption(shared.withPhase(body), limit)
          )
        })
      )
    })),
  check: (holds, run) => [...exclusive(holds, parties, run), ...apart(holds, run)]
}

/** The bodies of two phases never run at the same time, and no phase has more of them than there are parties. */
function apart(holds: ReadonlyArray<Hold>, run: Run): ReadonlyArray<Anomaly> {
  const found: Array<Anomaly> = []
  const phases = new Map<number, Array<Hold>>()
  let latest: Hold | undefined
  for (const hold of holds.filter(({ entered }) => entered !== undefined).sort((a, b) => a.entered! - b.entered!)) {
    const phase = phases.get(hold.token!) ?? []
    phase.push(hold)
    phases.set(hold.token!, phase)
    if (phase.length > parties) found.push({ check: "phases", detail: "too many in one phase", holds: phase })
    if (
      latest !== undefined && latest.token !== hold.token && lastRun(latest) > hold.entered! &&
      !overlaps(run.forgets, hold.entered! - run.lease, lastRun(latest))
    ) {
      found.push({ check: "phases", detail: "two phases at the same time", holds: [latest, hold] })
    }
    if (latest === undefined || lastRun(hold) > lastRun(latest)) latest = hold
  }
  return found
}
