/** Offers while their process is overloaded, or Redis is out of memory or out of reach. */
import { assert, layer } from "@effect/vitest"
import { Effect, Fiber } from "effect"
import type { Coordinator } from "../src/index.ts"
import { behindLine } from "./support/behindLine.ts"
import { eventually } from "./support/eventually.ts"
import { TestServer } from "./support/live.ts"
import { inLine, make, shows, upTo } from "./support/queues.ts"
import { channelOf, on, promptly, several } from "./support/several.ts"

const live = { excludeTestServices: true, timeout: "60 seconds" } as const

const narrow = {
  lease: "9 seconds",
  margin: "1 second",
  requestTimeout: "3 seconds",
  batch: { maxPending: 20, maxRequests: 10 }
} as const satisfies Coordinator.Options

layer(TestServer.layer, live)("an offer", (it) => {
  it.effect("fails while too many requests wait, and later ones do not", () =>
    several(1, ([a]) =>
      Effect.gen(function*() {
        const queue = yield* on(a!, make())
        yield* queue.offer(0)
        const others = yield* Effect.forEach(upTo(40), (n) =>
          Effect.forkChild(Effect.exit(queue.reschedule(`none ${n}`, { delay: 1 })), { startImmediately: true }))
        const refused = Effect.all([Effect.flip(queue.offer(1)), Effect.flip(queue.offerAll([2, 3]))], {
          concurrency: "unbounded"
        })
        const reasons = yield* promptly(refused, "the refusals")
        assert.deepStrictEqual(
          reasons.map(({ reason }) =>
            reason._tag
          ),
          ["Overloaded", "Overloaded"]
        )
        yield* Effect.forEach(others, (fiber) => Fiber.join(fiber))
        yield* promptly(queue.offer(4), "the next offer")
        yield* shows(queue, { waiting: 2 })
      }), narrow))

  it.effect("that waits for room is stored when there is some, also while too many requests wait", () =>
    behindLine(({ context, direct, line, namespace, server }) =>
      Effect.gen(function*() {
        const limits = { length: 3 }
        const queue = yield* on(context, make({ limits }))
        const other = yield* on(yield* direct(), make({ limits }))
        yield* other.offerAll(upTo(3))
        const waiting = yield* Effect.forkChild(queue.offerAll(upTo(3, 10)))
        const asked = Effect.forEach(upTo(40), (n) =>
          Effect.forkChild(Effect.exit(queue.reschedule(`none ${n}`, { delay: 1 })), { startImmediately: true }))
        yield* inLine(server, namespace, 1)
        const { session } = channelOf(context)
        const read = session!.read
        const held = yield* line.hold(({ name }) =>
          name === "FCALL"
        )
        yield* asked
        yield* held.request
        // Some requests are under way, and then as many wait as may.
        yield* asked
        assert.strictEqual(yield* other.drain(), 3)
        yield* eventually(Effect.sync(() => assert.isAbove(session!.read, read)), { message: "the news of room" })
        yield* held.release()
        yield* promptly(Fiber.join(waiting), "the offer")
        yield* shows(other, { waiting: 3 })
      }), narrow))
})
