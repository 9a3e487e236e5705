import { Effect } from "effect"
import { bounded, isKeptBlindly } from "../checks.ts"
import { fibers, type Workload } from "../workload.ts"

const keys = ["exclusive a", "exclusive {b}:\n", "exclusive \u{1f512}"]

// Its holder may keep it.
const kept = "exclusive and kept"

/** Locks: one or several, by a body or by a scope; waiting, with a limit to it, or only if available; again and again. */
export const lock: Workload = {
  name: "lock",
  run: (client) =>
    fibers(
      4,
      client,
      Effect.suspend(() => {
        const { Lease, Lock } = client.lockstep
        const way = client.random()
        if (client.random() < 0.15) {
          const wait = client.random() < 0.7
          const once = client.hold([{ kind: "lock", key: kept, weight: 1, wait }], (body) =>
            wait ? Lock.withLock(body, kept, { cached: true }) : Lock.withLockIfAvailable(body, kept, { cached: true }))
          return Effect.forEach(Array.from({ length: 1 + Math.floor(client.random() * 8) }), () =>
            once, { discard: true })
        }
        const asked = way < 0.1
          ? keys.filter(() =>
            client.random() < 0.6
          )
          : [client.pick(keys)]
        const key = asked[0]!
        return client.hold(
          asked.map((key) => ({ kind: "lock", key, weight: 1, wait: way >= 0.1 && way < 0.85 })),
          (body) =>
            way < 0.1
              ? Lock.withLocks(body, asked)
              : way < 0.2
              ? Effect.scoped(Effect.flatMap(Lock.acquire(key), (lease) =>
                Lease.protect(body, lease)))
              : way < 0.35
              ? Lock.withLock(body, key, { wait: 1 + client.random() * 300 })
              : way < 0.85
              ? Lock.withLock(body, key)
              : Lock.withLockIfAvailable(body, key)
        )
      })
    ),
  check: (holds, run) =>
    bounded(1)(holds, run).filter((anomaly) => holds[0]!.key !== kept || !isKeptBlindly(anomaly, run, 1))
}
