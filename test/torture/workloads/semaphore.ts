import { Effect, Scope } from "effect"
import type * as Lockstep from "../../../src/index.ts"
import { bounded } from "../checks.ts"
import type { Client } from "../client.ts"
import { kinds, resized } from "../permits.ts"
import { fibers, gaveUp, type Workload } from "../workload.ts"

const [name, permits] = ["connections", 5]
// Processes disagree about how many permits this one has: up to so many.
const [disputed, most] = ["disputed", 5]

type Semaphore = Lockstep.Semaphore.Semaphore

const taking = (client: Client, shared: Semaphore, most: number) =>
  Effect.suspend(() => {
    const weight = client.random() < 0.7 ? 1 : 1 + Math.floor(client.random() * most)
    const wait = client.random() >= 0.1
    return client.hold([{ kind: "semaphore", key: shared.name, weight, wait }], (body) =>
      wait ? shared.withPermits(weight)(body) : shared.withPermitsIfAvailable(weight)(body))
  })

const equal = (client: Client) =>
  Effect.flatMap(
    client.lockstep.Semaphore.make({ name, permits }),
    (shared) => fibers(3, client, taking(client, shared, permits))
  ).pipe(
    Effect.scoped,
    // Redis may be out of memory or out of reach at that moment.
    Effect.catch(() => Effect.sleep(100)),
    Effect.repeat({ while: () => !client.stopping() })
  )

/** Has it open for a while, with a number of its own, resizes it now and then, and looks how many there are. */
const unequal = (client: Client) =>
  Effect.gen(function*() {
    const request = (kind: string, weight: number) => ({ kind, key: disputed, weight, wait: false })
    const number = () => 1 + Math.floor(client.random() * most)
    const own = number()
    const onMismatch = client.pick(["fail", "keep", "resize"] as const)
    const scope = yield* Effect.scope
    let shared: Semaphore | undefined
    yield* client.attempt(
      request(kinds[onMismatch], own),
      client.lockstep.Semaphore.make({ name: disputed, permits: own, onMismatch }).pipe(
        Effect.map((made) => shared = made),
        Scope.provide(scope)
      )
    )
    if (shared === undefined) return yield* Effect.sleep(20 + client.random() * 50)
    const { permits, resize } = shared
    let left = 1 + Math.floor(client.random() * 12)
    const deciding = Effect.gen(function*() {
      for (; left > 0 && !client.stopping(); left--) {
        yield* client.attempt(request(kinds.reads, 1), permits, (permits) => permits)
        yield* Effect.sleep(client.random() * 60)
        const next = number()
        if (client.random() < 0.5) yield* client.attempt(request(kinds.resizes, next), resize(next))
      }
      left = 0
    })
    const take = taking(client, shared, own)
    const using = Effect.whileLoop({ while: () => left > 0, body: () => take, step: () => {} })
    yield* Effect.all([deciding, using], { concurrency: "unbounded" })
    // No progress, so nothing that succeeds.
    yield* client.attempt(request(kinds.closes, 1), Effect.fail(gaveUp))
  }).pipe(Effect.scoped)

/** Weighted permits. */
export const semaphore: Workload = {
  name: "semaphore",
  run: (client) =>
    Effect.all([equal(client), fibers(1, client, unequal(client))], { concurrency: "unbounded", discard: true }),
  check: (holds, run) => holds[0]!.key === disputed ? resized(holds, run) : bounded(permits)(holds, run)
}
