import { Deferred, Effect, Layer, Schedule } from "effect"
import { bounded, exclusive } from "../checks.ts"
import type { Client } from "../client.ts"
import type { Hold } from "../history.ts"
import { type again, fibers, onlyOnce, type Workload } from "../workload.ts"

const program = "exclusive singleton"
const ticks = "ticks"

/** One run of the program, which its layer would run again after the loss of its lease. */
const once = (client: Client) =>
  client.hold([{ kind: "singleton", key: program, weight: 1, wait: true }], (body) =>
    Effect.gen(function*() {
      const over = yield* Deferred.make<void, typeof again>()
      const run = Effect.matchEffect(onlyOnce(body), {
        onFailure: (error) => Deferred.fail(over, error),
        onSuccess: () => Deferred.succeed(over, undefined)
      })
      yield* Layer.build(client.lockstep.Singleton.make(program, run))
      yield* Deferred.await(over)
    }).pipe(Effect.scoped))

const tick = (client: Client) =>
  client.follow({ kind: "singleton tick", key: ticks, weight: 1, wait: false }, ({ step }) =>
    Effect.forEach(
      Array.from({ length: 3 }),
      () => Effect.andThen(Effect.sleep(client.random() * 6), Effect.sync(step)),
      { discard: true }
    ))

/** Provides the schedule for a while. */
const ticking = Effect.fnUntraced(function*(client: Client) {
  const times = Schedule.spaced(5 + client.random() * 20)
  const options = { timeToLive: client.keep, missed: client.pick(["skip", "once"] as const) }
  yield* Layer.build(client.lockstep.Singleton.schedule(ticks, tick(client), times, options))
  yield* Effect.sleep(100 + client.random() * 400)
}, Effect.scoped)

/** Programs and ticks that run in one process at a time. */
export const singleton: Workload = {
  name: "singleton",
  run: (client) =>
    Effect.all([fibers(2, client, once(client)), fibers(1, client, ticking(client))], {
      concurrency: "unbounded",
      discard: true
    }),
  check: (holds, run) => holds[0]!.key === ticks ? exclusive(holds.map(asHold), 1, run) : bounded(1)(holds, run)
}

/** A tick that its process interrupts may have lost its lease: its last step then counts as that of a holder does. */
const asHold = (tick: Hold): Hold => tick.outcome === "interrupted" ? { ...tick, outcome: "lost in a tick" } : tick
