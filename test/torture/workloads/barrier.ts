import { Effect, Schema } from "effect"
import { type Anomaly, overlaps, type Run } from "../checks.ts"
import type { Hold } from "../history.ts"
import { fibers, lives, type Workload } from "../workload.ts"

const parties = 3
const names = ["breaks", "acts {b}:\n"]

/** Barriers that more come to than there are parties; some break a generation, some withdraw, and some run an action. */
export const barrier: Workload = {
  name: "barrier",
  run: (client) =>
    lives(Effect.gen(function*() {
      const shared = yield* Effect.forEach(names, (name) =>
        client.lockstep.Barrier.make({
          name,
          parties,
          schema: Schema.Number,
          onDeparture: client.random() < 0.5 ? "break" : "withdraw",
          ...name === "breaks" ? {} : { action: () => Effect.sleep(client.random() * 10) }
        }))
      yield* fibers(
        2,
        client,
        Effect.suspend(() => {
          // Of two draws, as one has 32 bits only: no two arrivals may bring the same.
          const mine = Math.floor(client.random() * 2 ** 26) * 2 ** 26 + Math.floor(client.random() * 2 ** 26)
          const at = Math.floor(client.random() * names.length)
          const request = { kind: "barrier", key: names[at]!, weight: mine, wait: true }
          // When the round is over, no other party comes.
          const limit = 20 + client.random() * (client.random() < 0.2 ? 100 : 3000)
          return client.attempt(
            request,
            shared[at]!.await(mine),
            ({ generation }) => generation,
            ({ contributions }) => contributions
          ).pipe(
            Effect.timeoutOption(limit),
            Effect.andThen(Effect.sleep(client.random() * 20))
          )
        })
      )
    })),
  check: allOrNone
}

/** A party passes with the same others as they do, all of them were there, and none passes twice. */
function allOrNone(holds: ReadonlyArray<Hold>, run: Run): ReadonlyArray<Anomaly> {
  const found: Array<Anomaly> = []
  const asked = new Map(holds.map((hold) => [hold.weight, hold]))
  const known = new Map<number, Hold>()
  // Redis has forgotten the one by the time of the other, or what led to it.
  const excused = (one: Hold, other: Hold) =>
    overlaps(
      run.forgets,
      Math.min(one.asked, other.asked) - run.lease,
      Math.max(one.entered!, other.entered!)
    )
  for (const hold of holds) {
    const { saw } = hold
    if (saw === undefined) continue
    if (saw.length !== parties || !saw.includes(hold.weight)) {
      found.push({ check: "apart", detail: `passed with ${saw.join(", ")}`, holds: [hold] })
    }
    for (const one of saw) {
      const other = asked.get(one)
      if (other === undefined || other.asked > hold.entered!) {
        found.push({ check: "early", detail: `passed before ${one} was there`, holds: [hold] })
      }
      const before = known.get(one)
      known.set(one, hold)
      if (before === undefined || before.saw!.join() === saw.join() || excused(before, hold)) continue
      found.push({ check: "twice", detail: `${one} was counted in two generations`, holds: [before, hold] })
    }
  }
  return found
}
