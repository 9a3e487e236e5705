/** The events of an election object's own terms: a stream, and callbacks in a fiber of their own. */

import type * as Cause from "effect/Cause"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Fiber from "effect/Fiber"
import * as PubSub from "effect/PubSub"
import * as Queue from "effect/Queue"
import type * as Scope from "effect/Scope"
import * as Stream from "effect/Stream"
import type * as Take from "effect/Take"
import type { Lease } from "../hold/hold.ts"
import { describe, type LeaseLost } from "../hold/loss.ts"
import { callback, type Place } from "../hold/place.ts"
import { pause } from "../io.ts"
import { logFailure } from "../text.ts"

/** A change of an election object as a candidate. */
export type Transition =
  | { readonly _tag: "Acquired"; readonly lease: Lease }
  | { readonly _tag: "Lost"; readonly lease: Lease; readonly reason: LeaseLost["reason"] }

export interface Callbacks<R = never> {
  /** Called when a term begins. */
  readonly onAcquired?: ((lease: Lease) => Effect.Effect<unknown, unknown, R>) | undefined
  /** Called when a term has ended, with the reason: `resigned` also if its effect has ended. */
  readonly onLost?: ((lease: Lease, reason: LeaseLost["reason"]) => Effect.Effect<unknown, unknown, R>) | undefined
}

/** Its streams end with the scope, behind everything that was published. */
export const untilClosed = <A, E = never>(
  options?: { readonly replay: number }
): Effect.Effect<PubSub.PubSub<Take.Take<A, E>>, never, Scope.Scope> =>
  Effect.acquireRelease(PubSub.unbounded<Take.Take<A, E>>(options), (self) => PubSub.end(self, Exit.void))

/** Answers what calls them. The scope waits for the calls that are due when it closes, and not for longer than the margin. */
export const calling = Effect.fnUntraced(function*<R>(place: Place, callbacks: Callbacks<R>) {
  const onAcquired = callback(callbacks.onAcquired, "onAcquired")
  const onLost = callback(callbacks.onLost, "onLost")
  if (onAcquired === undefined && onLost === undefined) return () => {}
  const name = describe(place.kind, place.name, place.space.kernel.settings.namespace)
  const context = yield* Effect.context<R>()
  const queue = yield* Queue.unbounded<Transition, Cause.Done>()
  const call = (transition: Transition): Effect.Effect<unknown, unknown, R> | undefined =>
    transition._tag === "Acquired"
      ? onAcquired?.(transition.lease)
      : onLost?.(transition.lease, transition.reason)
  const calls = Stream.runForEach(Stream.fromQueue(queue), (transition) =>
    Effect.catchCause(
      Effect.suspend(() => call(transition) ?? Effect.void),
      (cause) => logFailure(`on${transition._tag} of ${name}: the callback has failed`, cause)
    ))
  yield* Effect.acquireRelease(Effect.forkDetach(Effect.provideContext(calls, context)), (fiber) => {
    const { channel: { margin }, space: { kernel: { io } } } = place
    // Also when the coordinator is closed already, which ends the pauses of its transport.
    const late = pause(io, margin).pipe(
      Effect.andThen(Effect.logError(`a callback of ${name} did not end within the margin, and is interrupted`)),
      Effect.andThen(Fiber.interrupt(fiber))
    )
    return Effect.andThen(Queue.end(queue), Effect.raceFirst(Fiber.await(fiber), late))
  })
  return (transition: Transition): void => {
    Queue.offerUnsafe(queue, transition)
  }
})
