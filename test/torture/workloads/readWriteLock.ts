import { Effect } from "effect"
import { bounded, isKeptBlindly } from "../checks.ts"
import { fibers, type Workload } from "../workload.ts"

// Processes may keep the last one.
const keys = ["library", "archive", "kept library"]
const kept = keys[2]!

/** As heavy as all readers that there can be. */
const writer = 1_000_000

/** Many readers, some writers. */
export const readWriteLock: Workload = {
  name: "readWriteLock",
  run: (client) =>
    fibers(
      3,
      client,
      Effect.suspend(() => {
        const { ReadWriteLock } = client.lockstep
        const key = client.pick(keys)
        const writes = client.random() < 0.35
        const weight = writes ? writer : 1
        const cached = key === kept
        const once = client.hold([{ kind: "readWriteLock", key, weight, wait: true }], (body) =>
          writes
            ? ReadWriteLock.withWriteLock(body, key, { cached })
            : ReadWriteLock.withReadLock(body, key, { cached }))
        return cached ? Effect.forEach(Array.from({ length: 1 + Math.floor(client.random() * 8) }), () => once) : once
      })
    ),
  check: (holds, run) =>
    bounded(writer)(holds, run).filter((anomaly) => holds[0]!.key !== kept || !isKeptBlindly(anomaly, run, writer))
}
