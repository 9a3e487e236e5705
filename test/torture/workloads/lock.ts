import { Effect } from "effect"
import { bounded } from "../checks.ts"
import { fibers, type Workload } from "../workload.ts"

const keys = ["exclusive a", "exclusive {b}:\n", "exclusive \u{1f512}"]

/** Locks: one or several, by a body or by a scope; waiting, with a limit to it, or only if available. */
export const lock: Workload = {
  name: "lock",
  run: (client) =>
    fibers(
      4,
      client,
      Effect.suspend(() => {
        const { Lease, Lock } = client.lockstep
        const way = client.random()
        const asked = way < 0.1 ? keys.filter(() => client.random() < 0.6) : [client.pick(keys)]
        const key = asked[0]!
        return client.hold(
          asked.map((key) => ({ kind: "lock", key, weight: 1, wait: way >= 0.1 && way < 0.85 })),
          (body) =>
            way < 0.1
              ? Lock.withLocks(body, asked)
              : way < 0.2
              ? Effect.scoped(Effect.flatMap(Lock.acquire(key), (lease) => Lease.protect(body, lease)))
              : way < 0.35
              ? Lock.withLock(body, key, { wait: 1 + client.random() * 300 })
              : way < 0.85
              ? Lock.withLock(body, key)
              : Lock.withLockIfAvailable(body, key)
        )
      })
    ),
  check: bounded(1)
}
