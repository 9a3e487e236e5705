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
  /** The fiber of a protected program, and the one that waits for it. */
  body?: AnyFiber | undefined
  readonly parent?: AnyFiber | undefined
}

type AnyFiber = Fiber.Fiber<unknown, unknown>

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
    const { home, key } = at.hold.claim.place
    if (key === place.key && at.hold.active && home.identity === place.home.identity) return at.hold
  }
  return undefined
}

/** Starts a program under a hold, in a fiber that `parent` waits for. */
export const start = <A, E, R>(
  program: Effect.Effect<A, E, R>,
  context: Context.Context<R>,
  hold: Hold,
  parent: AnyFiber
): Fiber.Fiber<A, E> => {
  const holding: Holding = { hold, outer: prune(Context.get(context, Holdings)), body: undefined, parent }
  return Effect.runForkWith(Context.add(context, Holdings, holding))(Effect.withFiber((fiber) => {
    holding.body = fiber
    return program
  }))
}

/** What Effect keeps of a fiber, and does not show: whose child it is, and what is told when it ends. */
interface Inner {
  readonly _parent?: AnyFiber | undefined
  readonly _observers?: ReadonlyArray<(exit: never) => void> | undefined
}

// An observer without a parameter does not read the exit: a scope into which the fiber was forked only forgets it.
const isAwaited = ({ _observers: observers }: Inner): boolean => observers?.some((f) => f.length > 0) === true

/**
 * Whether the fiber has been detached from the program that holds: nothing awaits it, so the hold does not wait for it
 * either, and it may wait for the hold. A fiber that is forked and awaited later counts as detached until then.
 */
export const isDetached = (fiber: AnyFiber, hold: Hold): boolean => {
  const holdings = fiber.getRef(Holdings)
  // From child to parent, and from a protected program to the fiber that waits for it.
  for (let at = fiber;;) {
    let next = (at as Inner)._parent
    for (let holding = holdings; holding !== undefined; holding = holding.outer) {
      if (holding.body !== at && holding.hold.fiber !== at.id) continue
      if (holding.hold === hold) return false
      if (holding.body === at) next ??= holding.parent
    }
    if (next === undefined) return !isAwaited(at as Inner)
    at = next
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
