/** The holds that a fiber runs under: its own, and those of its parents. */

import * as Context from "effect/Context"
import * as Effect from "effect/Effect"
import type * as Fiber from "effect/Fiber"
import type { Kind } from "./claim.ts"
import type { Hold } from "./hold.ts"
import type { Place } from "./place.ts"

interface Holding {
  readonly hold: Hold
  readonly outer: Holding | undefined
}

export const Holdings = Context.Reference<Holding | undefined>("lockstep/Holdings", { defaultValue: () => undefined })

const prune = (holding: Holding | undefined): Holding | undefined => {
  while (holding !== undefined && !holding.hold.active) holding = holding.outer
  return holding
}

/** A context under one hold more. */
export const under = <R>(context: Context.Context<R>, hold: Hold): Context.Context<R> =>
  Context.add(context, Holdings, { hold, outer: prune(Context.get(context, Holdings)) })

/** The hold of this place that the fiber runs under, by whatever coordinator of the process. */
export const findHold = (fiber: Fiber.Fiber<unknown, unknown>, place: Place): Hold | undefined => {
  for (let at = fiber.getRef(Holdings); at !== undefined; at = at.outer) {
    const { key, identity } = at.hold.claim.place
    if (key === place.key && at.hold.active && identity === place.identity) return at.hold
  }
  return undefined
}

/** What Effect keeps of a fiber, and does not show: whose child it is, and whether somebody awaits it. */
interface Inner {
  readonly _parent?: Inner | undefined
  readonly _observers?: ReadonlyArray<unknown> | undefined
}

// Programs under holds that are being started right now: what awaits such a fiber can only say so when it is there.
let starting = 0

/** Starts the fiber of a program that is awaited. */
export const start = <A, E, R>(program: Effect.Effect<A, E, R>, context: Context.Context<R>): Fiber.Fiber<A, E> => {
  starting++
  try {
    return Effect.runForkWith(context)(program)
  } finally {
    starting--
  }
}

/**
 * Whether the fiber has been detached from the program that holds: nothing awaits it, so the hold does not wait for it
 * either, and it may wait for the hold. A fiber that is forked and awaited later counts as detached until then.
 */
export const isDetached = (fiber: Fiber.Fiber<unknown, unknown>, hold: Hold): boolean => {
  let at = fiber as unknown as Inner
  for (;;) {
    if (at === hold.fiber as unknown) return false
    if (at._parent === undefined) return starting === 0 && (at._observers === undefined || at._observers.length === 0)
    at = at._parent
  }
}

export const current: Effect.Effect<Hold | undefined> = Effect.withFiber((fiber) =>
  Effect.succeed(prune(fiber.getRef(Holdings))?.hold)
)

export const currentOf = (key: string, kind: Kind | undefined): Effect.Effect<Hold | undefined> =>
  Effect.withFiber((fiber) => {
    let at = fiber.getRef(Holdings)
    while (
      at !== undefined && !(at.hold.key === key && at.hold.active && (kind === undefined || at.hold.kind === kind))
    ) at = at.outer
    return Effect.succeed(at?.hold)
  })
