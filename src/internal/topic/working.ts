/** Runs a handler on the events of a topic: as a member of a group, or as a subscriber. */

import * as Cause from "effect/Cause"
import type * as Context from "effect/Context"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Fiber from "effect/Fiber"
import * as Option from "effect/Option"
import type * as Schedule from "effect/Schedule"
import type { Log } from "../actor/hooks.ts"
import { millisOf } from "../hold/place.ts"
import { joined } from "../hold/protect.ts"
import { receiving } from "../hold/span.ts"
import { prettyOf } from "../text.ts"
import { delayAfter } from "../work/patience.ts"
import type { Event, Gap } from "./event.ts"
import type { Delivery } from "./group.ts"

/** How a handler's failure is taken. */
export interface Policy<E> {
  readonly retry: Schedule.Schedule<unknown, E>
  /** The session of a member may end so often while it has an event. */
  readonly crashes: number
  /** Makes an event that cannot be handled a dead letter. */
  readonly bury: (delivery: Delivery<any>, error: string) => Effect.Effect<void, unknown>
  readonly onGap: (gap: Gap) => Effect.Effect<void>
  readonly buried: () => void
  readonly log: Log
  readonly name: string
  /** The topic in log lines. */
  readonly subject: string
}

const ignore = () => {}

/** A handler of an event, in its span. */
export const handled = <A, B, E, R>(
  handler: (event: Event<A>) => Effect.Effect<B, E, R>,
  event: Event<A>,
  name: string
): Effect.Effect<B, E, R> =>
  receiving(
    Effect.suspend(() => handler(event)),
    "lockstep.Topic.handle",
    { "lockstep.kind": "topic", "lockstep.key": name, "lockstep.event": event.id },
    event.trace
  )

/** Runs a program that ends when the delivery is lost. */
const whileDelivered = <A, E, R>(
  self: Effect.Effect<A, E, R>,
  delivery: Delivery<any>
): Effect.Effect<Exit.Exit<A, E>, never, R> =>
  Effect.uninterruptibleMask((restore) =>
    Effect.withFiber((parent) => {
      const child = Effect.runForkWith(parent.context as Context.Context<R>)(self)
      const done = child.pollUnsafe()
      if (done !== undefined) return Effect.succeed(done)
      const off = delivery.onLoss(() => child.interruptUnsafe(parent.id))
      child.addObserver(delivery.run())
      return Effect.onExit(restore(joined(child, Effect.succeed)), () => {
        off()
        // An interruption has ended the wait for it, or has skipped that.
        return child.pollUnsafe() === undefined ? Effect.asVoid(Fiber.interrupt(child)) : Effect.void
      })
    })
  )

// A defect, or an interruption from inside, of what a program gives besides its handler must not end the handling of later events. An
// interruption of this fiber is not caught.
const guarded = (
  self: Effect.Effect<void, unknown>,
  failed: (cause: unknown) => void
): Effect.Effect<void> => Effect.catchCause(self, (cause) => Effect.sync(() => failed(Cause.squash(cause))))

/** Handles one delivery, and acknowledges it, returns it, or makes it a dead letter. */
export const handle = <A, E, R>(
  delivery: Delivery<A>,
  handler: (event: Event<A>) => Effect.Effect<unknown, E, R>,
  policy: Policy<E>
): Effect.Effect<void, never, R> =>
  Effect.suspend(() => {
    const { element, raw } = delivery
    if (delivery.over) return Effect.void
    const log = (level: "Debug" | "Warn", what: string, end: string, cause: unknown) =>
      policy.log(level, `${what} of ${policy.subject} ${end}`, cause)
    if (element._tag === "Gap") {
      const told = guarded(
        Effect.suspend(() => policy.onGap(element)),
        (cause) => log("Warn", "a gap", "could not be handled", cause)
      )
      return Effect.andThen(told, Effect.sync(() => delivery.acknowledge(ignore)))
    }
    const again = (cause: unknown) => {
      log("Warn", `event ${raw!.id}`, "could not be put aside, and is handled again", cause)
      delivery.giveBack(1000, ignore)
    }
    const aside = (error: string) =>
      Effect.andThen(
        policy.bury(delivery, error),
        Effect.sync(() => {
          policy.buried()
          delivery.acknowledge(ignore)
        })
      )
    if (element._tag === "Undecodable") return guarded(aside(element.error.message), again)
    const { crashes } = raw!
    if (crashes >= policy.crashes) {
      return guarded(aside(`crashed: the session of its member has ended ${crashes} times`), again)
    }
    return Effect.flatMap(whileDelivered(handled(handler, element, policy.name), delivery), (exit) => {
      if (Exit.isSuccess(exit)) return Effect.sync(() => delivery.acknowledge(ignore))
      if (delivery.lost) return Effect.void
      const error = Cause.squash(exit.cause) as E
      return Effect.matchCauseEffect(delayAfter(policy.retry, raw!.attempt, error, 0), {
        // A schedule that throws does so each time.
        onFailure: (cause) => guarded(aside(prettyOf(cause)), again),
        onSuccess: Option.match({
          onNone: () => guarded(aside(prettyOf(exit.cause)), again),
          onSome: (delay) => {
            log("Debug", `event ${raw!.id}`, "is handled again", error)
            return Effect.sync(() => delivery.giveBack(millisOf(delay), ignore))
          }
        })
      })
    })
  })
