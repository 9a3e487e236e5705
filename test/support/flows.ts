/** What is on its way between a flow and its queues. */
import { Effect } from "effect"
import { Coordinator } from "../../src/index.ts"
import { placeIn, spaceOf } from "../../src/internal/hold/place.ts"
import { question, request } from "../../src/internal/hold/request.ts"
import { eventually } from "./eventually.ts"

/** Waits until all errands of a flow are delivered. What is left when the last process closes waits for the next one, for ever. */
export const delivered = (name: string) =>
  Effect.gen(function*() {
    const space = spaceOf(yield* Coordinator.Coordinator)
    const { partitions } = space.kernel.settings
    for (let index = 0; index < partitions; index++) {
      const place = placeIn(space, space.kernel.partitionAt(index), "errands", name, undefined)
      yield* eventually(
        Effect.map(question(place, "queue.state", []), (reply) => {
          if (reply[0] === "missing") return true
          const [, ready, delayed, active] = reply
          return [...ready, delayed, active].every((count) => Number(count) === 0)
        }),
        { message: `the errands of ${name} are delivered` }
      )
    }
  })

/** What tells a run from the runs before it that had its id. */
export const stampOf = (name: string, run: string) =>
  Effect.gen(function*() {
    const space = spaceOf(yield* Coordinator.Coordinator)
    const place = placeIn(space, space.kernel.partitionFor(name), "flow", `${name}/${run}`, undefined)
    const reply = yield* question(place, "flow.status", [1])
    return reply[0] === "missing" ? Number.NaN : reply[19]
  })

/** Stores an errand for the conductors of a flow, as its actor does when it sends one, and when its worker is lost. */
export const sent = (name: string, errand: ReadonlyArray<unknown>) =>
  Effect.gen(function*() {
    const space = spaceOf(yield* Coordinator.Coordinator)
    const { kernel } = space
    const place = placeIn(space, kernel.partitionFor(name), "errands", name, undefined)
    const body = JSON.stringify(errand)
    yield* request(place, "queue.offer", [body, String(Buffer.byteLength(body)), kernel.uniqueId(), 1])
  })
