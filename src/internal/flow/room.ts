/** Offers of conductors that wait for room in their queues. */

import * as Deferred from "effect/Deferred"
import * as Effect from "effect/Effect"
import type { Io } from "../io.ts"
import type { QueueError } from "../queue/errors.ts"
import type { Port } from "./graph.ts"

// An offer that waits for room keeps the place of its process in the line, and so often looks whether its run has stopped.
const lookAgain = "2 seconds"
// Of each queue, so many errands stay in work until there is room. The others go behind the errands of other queues, as a group in
// which lua/Queue.lua lets 64 be in work. They take turns there, for a run may stop whose errand is far behind. Of these, two stay for
// their process, or it would lose its place in the line. They give way at last: the errands of many processes would be the whole group.
const mostPatient = 16
const mostPatientBehind = 2
const mostInGroup = 64

/** The errands of a queue that wait for room in a process at a time. */
export const mostOfQueue = mostPatient + mostInGroup

// In milliseconds. All turns end together, so their requests share calls.
const turn = 500
const longestPatient = "30 seconds"

// In milliseconds. A queue with `onFull: "fail"` has no line for room: an offer looks again after so long, and then less often.
const shortestPause = 25

/** Offers again for as long as the queue is full. */
const patiently = <A>(
  offer: Effect.Effect<A, QueueError>,
  waits: () => void,
  pause = shortestPause
): Effect.Effect<A, QueueError> =>
  Effect.catchIf(
    offer,
    ({ reason }) => reason._tag === "QueueFull",
    () =>
      Effect.suspend(() => {
        waits()
        return Effect.delay(patiently(offer, waits, Math.min(2 * pause, turn)), pause)
      })
  )

/** The queue of an errand has no room: the errand waits behind others. */
export class Behind {
  readonly queue: string

  constructor(queue: string) {
    this.queue = queue
  }
}

/** The offers of a process that wait, by their queues. */
export class Room {
  readonly #io: Io
  readonly #patient = new Map<Port["queue"], number>()

  constructor(io: Io) {
    this.#io = io
  }

  /** Fails if the queue has no room, and the run has stopped meanwhile or others wait. Answers nothing if `stop` came first. */
  inLine<A>(
    queue: Port["queue"],
    offering: (waits: () => void) => Effect.Effect<A, QueueError>,
    isBehind: boolean,
    isStopped: Effect.Effect<boolean, unknown>,
    stop: Effect.Effect<void> = Effect.never
  ): Effect.Effect<A | undefined, unknown> {
    return Effect.suspend((): Effect.Effect<A | undefined, unknown> => {
      const waits = Deferred.makeUnsafe<void>()
      const told = () => Deferred.doneUnsafe(waits, Effect.void)
      return Effect.raceAllFirst([
        patiently(offering(told), told),
        Effect.as(stop, undefined),
        Effect.andThen(Deferred.await(waits), this.#wait(queue, isBehind, isStopped))
      ])
    })
  }

  #wait(
    queue: Port["queue"],
    isBehind: boolean,
    isStopped: Effect.Effect<boolean, unknown>
  ): Effect.Effect<never, unknown> {
    return Effect.suspend(() => {
      const ofQueue = this.#patient.get(queue) ?? 0
      const goBehind = Effect.fail(new Behind(queue.name))
      if (ofQueue >= (isBehind ? mostPatientBehind : mostPatient)) {
        return isBehind ? Effect.delay(goBehind, turn - this.#io.now() % turn) : goBehind
      }
      const count = (by: number) => this.#patient.set(queue, (this.#patient.get(queue) ?? 0) + by)
      const stopped = Effect.andThen(
        // While the run cannot be asked, the offer goes on.
        Effect.repeat(Effect.delay(Effect.orElseSucceed(isStopped, () => false), lookAgain), {
          until: (stopped) => stopped
        }),
        Effect.fail("the run has stopped")
      )
      return Effect.acquireUseRelease(
        Effect.sync(() => count(1)),
        () => isBehind ? Effect.raceFirst(stopped, Effect.delay(goBehind, longestPatient)) : stopped,
        () => Effect.sync(() => count(-1))
      )
    })
  }
}
