import { Effect } from "effect"
import { bounded } from "../checks.ts"
import { fibers, type Workload } from "../workload.ts"

const keys = ["library", "archive"]

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
        return client.hold([{ kind: "readWriteLock", key, weight, wait: true }], (body) =>
          writes ? ReadWriteLock.withWriteLock(body, key) : ReadWriteLock.withReadLock(body, key))
      })
    ),
  check: bounded(writer)
}
