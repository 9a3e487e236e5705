/** Runs a handler on the events of a topic: as a member of a group, or as a subscriber. */

import * as Cause from "effect/Cause"
import type * as Context from "effect/Context"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Fiber from "effect/Fiber"
import * as Option from "effect/Option"
import type * as Schedule from "effect/Schedule"
import type { Log } from "../actor/hooks.ts"
import { joined } from "../hold/protect.ts"
import { receiving } from "../hold/span.ts"
import { delayAfter } from "../work/patience.ts"
import type { Event, Gap } from "./event.ts"
import type { Delivery } from "./group.ts"

/** How a handler's failure is taken. */
export interface Policy<E> {
  readonly retry: Schedule.Schedule<unknown, E>
  /** Puts what cannot be handled aside; answers whether that was possible. */
  readonly bury: (delivery: Delivery<any>, error: string) => Effect.Effect<void, unknown>
  readonly onGap: (gap: Gap) => Effect.Effect<void>
  readonly buried: () => void
  readonly log: Log
  readonly name: string
}

const ignore = () => {}

const traced = <A, E, R>(self: Effect.Effect<A, E, R>, name: string, { id, trace }: Event<unknown>) =>
  receiving(
    self,
    "lockstep.Topic.handle",
    { "lockstep.kind": "topic", "lockstep.key": name, "lockstep.event": id },
    trace
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
      return Effect.onExit(restore(joined(child)), () => {
        off()
        // An interruption that came with the program's first steps skips joining it.
        return child.pollUnsafe() === undefined ? Effect.asVoid(Fiber.interrupt(child)) : Effect.void
      })
    })
  )

/** Handles one delivery, and acknowledges it, gives it back, or puts it aside. */
export const handle = <A, E, R>(
  delivery: Delivery<A>,
  handler: (event: Event<A>) => Effect.Effect<unknown, E, R>,
  policy: Policy<E>
): Effect.Effect<void, never, R> =>
  Effect.suspend(() => {
    const { element, raw } = delivery
    if (delivery.over) return Effect.void
    if (element._tag === "Gap") return policy.onGap(element)
    const aside = (error: string) =>
      Effect.matchEffect(policy.bury(delivery, error), {
        onFailure: (cause) =>
          Effect.sync(() => {
            policy.log("Warn", `event ${raw!.id} of topic ${JSON.stringify(policy.name)} could not be put aside`, cause)
            delivery.giveBack(1000, ignore)
          }),
        onSuccess: () =>
          Effect.sync(() => {
            policy.buried()
            delivery.acknowledge(ignore)
          })
      })
    if (element._tag === "Undecodable") return aside(element.error.message)
    return Effect.flatMap(whileDelivered(traced(handler(element), policy.name, element), delivery), (exit) => {
      if (Exit.isSuccess(exit)) return Effect.sync(() => delivery.acknowledge(ignore))
      if (delivery.lost) return Effect.void
      const error = Cause.squash(exit.cause) as E
      return Effect.flatMap(
        delayAfter(policy.retry, raw!.attempt, error),
        Option.match({
          onNone: () => aside(Cause.pretty(exit.cause)),
          onSome: (delay) => {
            policy.log("Debug", `event ${raw!.id} of topic ${JSON.stringify(policy.name)} is handled again`, error)
            return Effect.sync(() => delivery.giveBack(Math.ceil(Duration.toMillis(delay)), ignore))
          }
        })
      )
    })
  })
