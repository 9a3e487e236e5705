import { Effect } from "effect"
import { bounded } from "../checks.ts"
import { fibers, type Workload } from "../workload.ts"

const name = "connections"
const permits = 5

/** Weighted permits. */
export const semaphore: Workload = {
  name: "semaphore",
  run: (client) =>
    Effect.gen(function*() {
      const shared = yield* client.lockstep.Semaphore.make({ name, permits })
      yield* fibers(
        4,
        client,
        Effect.suspend(() => {
          const weight = client.random() < 0.7 ? 1 : 1 + Math.floor(client.random() * permits)
          const wait = client.random() >= 0.1
          return client.hold([{ kind: "semaphore", key: name, weight, wait }], (body) =>
            wait ? shared.withPermits(weight)(body) : shared.withPermitsIfAvailable(weight)(body))
        })
      )
    }).pipe(
      Effect.scoped,
      // Redis may be out of memory or out of reach at that moment.
      Effect.catch(() =>
        Effect.sleep(100)
      ),
      Effect.repeat({ while: () => !client.stopping() }),
      Effect.asVoid
    ),
  check: bounded(permits)
}
