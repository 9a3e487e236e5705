import { Effect, Scope } from "effect"
import type * as Lockstep from "../../../src/index.ts"
import { bounded, isKeptBlindly } from "../checks.ts"
import type { Client } from "../client.ts"
import type { Hold } from "../history.ts"
import { kinds, resized } from "../permits.ts"
import { fibers, gaveUp, lives, type Workload } from "../workload.ts"

const [name, permits] = ["connections", 5]
// Processes may keep these.
const kept = "kept connections"
// Processes disagree about how many permits this one has: up to so many.
const [disputed, most] = ["disputed", 5]

type Semaphore = Lockstep.Semaphore.Semaphore

const taking = (client: Client, shared: Semaphore, most: number, cached = false) =>
  Effect.suspend(() => {
    const weight = client.random() < 0.7 ? 1 : 1 + Math.floor(client.random() * most)
    const wait = client.random() >= 0.1
    return client.hold([{ kind: "semaphore", key: shared.name, weight, wait }], (body) =>
      wait ? shared.withPermits(weight, { cached })(body) : shared.withPermitsIfAvailable(weight, { cached })(body))
  })

/** Again and again, with rests between. */
const retaking = (client: Client, shared: Semaphore) =>
  Effect.suspend(() => {
    const take = taking(client, shared, permits, true)
    const times = Array.from({ length: 1 + Math.floor(client.random() * 8) })
    return Effect.andThen(Effect.forEach(times, () => take), Effect.sleep(client.random() * 100))
  })

const equal = (client: Client) =>
  lives(Effect.gen(function*() {
    const shared = yield* client.lockstep.Semaphore.make({ name, permits })
    const cached = yield* client.lockstep.Semaphore.make({ name: kept, permits })
    yield* Effect.all([
      fibers(3, client, taking(client, shared, permits)),
      fibers(1, client, retaking(client, cached))
    ], { concurrency: "unbounded", discard: true })
  }))

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
  check: (holds, run) => {
    const [{ key }] = holds as readonly [Hold]
    if (key === disputed) return resized(holds, run)
    return bounded(permits)(holds, run).filter((anomaly) => key !== kept || !isKeptBlindly(anomaly, run, permits))
  }
}
