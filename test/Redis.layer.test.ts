/** What a layer is made of: its clocks and timers. */

import { assert, describe, it } from "@effect/vitest"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as EffectRedis from "effect/persistence/Redis"
import { CurrentIo, type Io, live, type Timer } from "../src/internal/io.ts"
import * as Redis from "../src/Redis.ts"
import { cluster } from "./support/cluster.ts"
import { standalone } from "./support/servers.ts"

/** Live, and knows which timers are set. */
const counting = () => {
  const pending = new Set<Timer>()
  const faults: Array<string> = []
  const io: Io = {
    ...live,
    after: (millis, f) => {
      if (!(millis >= 0 && millis < 2 ** 31)) faults.push(`after ${millis}`)
      const inner = live.after(millis, () => {
        pending.delete(timer)
        f()
      })
      const timer: Timer = {
        cancel: () => {
          pending.delete(timer)
          inner.cancel()
        }
      }
      pending.add(timer)
      return timer
    }
  }
  return { io, pending, faults }
}

/** Every kind of connection once. */
const exercise = Effect.gen(function*() {
  const redis = yield* Redis.Redis
  const effect = yield* EffectRedis.Redis
  assert.strictEqual(yield* redis.send("SET", "a", 1), "OK")
  const own = yield* redis.connect({ key: "a" })
  // Longer than any timer can be set to.
  yield* Effect.timeoutOption(own.send("BLPOP", "list", 4_000_000), 50)
  yield* effect.subscribe("channel")
  yield* effect.send("SCAN", "0")
  yield* Effect.scoped(Effect.flatMap(effect.reserve, (reserved) => reserved.send("GET", "a")))
})

describe("the timers of a layer", () => {
  const check = (layer: Layer.Layer<Redis.Redis | EffectRedis.Redis, Redis.RedisError>) =>
    Effect.gen(function*() {
      const { faults, io, pending } = counting()
      yield* Effect.scoped(Effect.gen(function*() {
        const context = yield* Layer.build(layer)
        assert.isAbove(pending.size, 0, "the timers come from somewhere else")
        yield* Effect.provideContext(exercise, context)
      })).pipe(Effect.provideService(CurrentIo, io))
      yield* Effect.sleep(20)
      assert.strictEqual(pending.size, 0)
      assert.deepStrictEqual(faults, [])
    })

  it.live("are those of CurrentIo, and none is left when it is closed", () =>
    Effect.gen(function*() {
      const { port } = yield* standalone()
      yield* check(Redis.layer({ host: "127.0.0.1", port }))
      yield* check(Redis.layerEmbedded())
    }).pipe(Effect.scoped), 20_000)

  it.live("on a Cluster too", () =>
    Effect.gen(function*() {
      const { startupNodes } = yield* cluster()
      yield* check(Redis.layer({ cluster: startupNodes }))
    }).pipe(Effect.scoped), 60_000)
})
