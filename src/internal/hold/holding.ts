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
  /** How many there are, with this one. */
  readonly depth: number
  /** The fiber of a protected program, and the one that waits for it. */
  body?: AnyFiber | undefined
  readonly parent?: AnyFiber | undefined
}

type AnyFiber = Fiber.Fiber<unknown, unknown>

const Holdings = Context.Reference<Holding | undefined>("lockstep/Holdings", { defaultValue: () => undefined })

// The earlier holds of a fiber are not its own here: it runs a part of a program as another process would.
const Apart = Context.Reference<boolean>("lockstep/Apart", { defaultValue: () => false })

/** Runs an effect as another process would: without the holds of the fiber that runs it here. */
export const apart = <A, E, R>(self: Effect.Effect<A, E, R>): Effect.Effect<A, E, R> =>
  self.pipe(Effect.provideService(Holdings, undefined), Effect.provideService(Apart, true))

/** The innermost of these that is meant. */
const innermostOf = (
  holdings: Holding | undefined,
  isMeant: (holding: Holding) => boolean
): Holding | undefined => {
  let at = holdings
  while (at !== undefined && !isMeant(at)) at = at.outer
  return at
}

const prune = (holdings: Holding | undefined) => innermostOf(holdings, ({ hold }) => hold.active)

const depthIn = (outer: Holding | undefined): number => outer === undefined ? 1 : outer.depth + 1

/** A context under one hold more. */
export const under = <R>(context: Context.Context<R>, hold: Hold): Context.Context<R> => {
  const outer = prune(Context.get(context, Holdings))
  return Context.add(context, Holdings, { hold, outer, depth: depthIn(outer) })
}

/** Runs an effect in a region whose end does not end what the fiber has acquired in it. */
export const across = <A, E, R>(
  self: Effect.Effect<A, E, R>,
  region: <B>(self: Effect.Effect<B, E, R>) => Effect.Effect<B, E, R>
): Effect.Effect<A, E, R> => {
  const inside = Effect.flatMap(
    self,
    (value) => Effect.withFiber((fiber) => Effect.succeed([value, fiber.getRef(Holdings)] as const))
  )
  return Effect.flatMap(region(inside), ([value, holdings]) =>
    Effect.withFiber((fiber) => {
      fiber.setContext(Context.add(fiber.context, Holdings, holdings))
      return Effect.succeed(value)
    }))
}

/** A hold that a fiber has acquired into a scope, before all fibers that come later. */
interface Acquired {
  readonly hold: Hold
  readonly fiber: number
}

// Fibers are numbered: all that come later have larger numbers.
const nextFiber = (): number => Effect.runFork(Effect.void).id

// The context of a fiber says the same, but only up to the end of the region in which it has acquired: a span, annotations of logs, a
// retry are such regions.
const acquired = new WeakMap<AnyFiber, Array<Acquired>>()

// A fiber may note so many holds before those are dropped that have ended.
const fewest = 16

/** The fiber has acquired the hold into a scope. */
export const note = (fiber: AnyFiber, hold: Hold): void => {
  if (fiber.getRef(Apart)) return
  const one = { hold, fiber: nextFiber() }
  const holds = acquired.get(fiber)
  if (holds === undefined) return void acquired.set(fiber, [one])
  holds.push(one)
  // Only at powers of two, so that a fiber with many holds does not look at all of them each time.
  if (holds.length < fewest || (holds.length & (holds.length - 1)) !== 0) return
  acquired.set(fiber, holds.filter(({ hold }) => hold.active))
}

/** The fields of a fiber that Effect does not show: whose child it is, and the observers of its end. */
interface Inner {
  readonly _parent?: AnyFiber | undefined
  readonly _observers?: ReadonlyArray<(exit: never) => void> | undefined
}

/** The holding whose protected program a fiber runs: of several, the inner one. */
const protectedIn = (fiber: AnyFiber, holdings: Holding | undefined) =>
  innermostOf(holdings, ({ body }) => body === fiber)

/** Whether a fiber runs a program that is protected by this hold, perhaps with others. */
const isProtectedBy = (fiber: AnyFiber, hold: Hold, holdings: Holding | undefined): boolean =>
  innermostOf(holdings, (one) => one.body === fiber && one.hold === hold) !== undefined

/** The fiber that a fiber is a child of, or that waits for its protected program. */
const parentOf = (fiber: AnyFiber, holdings: Holding | undefined): AnyFiber | undefined =>
  (fiber as Inner)._parent ?? protectedIn(fiber, holdings)?.parent

/** A point in the life of a fiber. */
export interface Point {
  readonly fiber: AnyFiber
  readonly before: number
}

export const pointOf = (fiber: AnyFiber): Point => ({ fiber, before: nextFiber() })

/** Whether the fiber is that of the point, or was forked there since, by itself or by a parent. */
export const isBehind = (fiber: AnyFiber, point: Point): boolean => {
  const holdings = fiber.getRef(Holdings)
  let before = Number.POSITIVE_INFINITY
  for (let at: AnyFiber | undefined = fiber; at !== undefined; at = parentOf(at, holdings)) {
    if (at === point.fiber) return point.before < before
    before = at.id
  }
  // A detached fiber has no parent, but the holds of the program that has forked it.
  return point.before < before && innermostOf(holdings, ({ body }) => body === point.fiber) !== undefined
}

/** The newest hold of those that the fiber has acquired, or one of its parents before it was forked. */
const findAcquired = (fiber: AnyFiber, isMeant: (hold: Hold) => boolean): Acquired | undefined => {
  if (fiber.getRef(Apart)) return undefined
  const holdings = fiber.getRef(Holdings)
  let before = Number.POSITIVE_INFINITY
  for (let at: AnyFiber | undefined = fiber; at !== undefined; at = parentOf(at, holdings)) {
    const found = acquired.get(at)?.findLast((one) => one.fiber < before && isMeant(one.hold))
    if (found !== undefined) return found
    before = at.id
  }
  return undefined
}

const isOf = ({ active, claim }: Hold, { home, key }: Place): boolean =>
  claim.place.key === key && active && claim.place.home.isSame(home)

/** The hold of this place that the fiber runs under, by any coordinator of the process. */
export const findHold = (fiber: Fiber.Fiber<unknown, unknown>, place: Place): Hold | undefined => {
  for (let at = fiber.getRef(Holdings); at !== undefined; at = at.outer) if (isOf(at.hold, place)) return at.hold
  return findAcquired(fiber, (hold) => isOf(hold, place))?.hold
}

// A program starts on the stack of the one that waits for it, and ends below it. Some thousand levels would be too many.
const mostLevels = 64

/** Lets a program begin and end on stacks of its own. */
const apartFromStack = <A, E, R>(self: Effect.Effect<A, E, R>): Effect.Effect<A, E, R> =>
  Effect.ensuring(Effect.andThen(Effect.yieldNow, self), Effect.yieldNow)

/** Starts a program under holds, in a fiber that `parent` waits for. */
export const start = <A, E, R>(
  program: Effect.Effect<A, E, R>,
  context: Context.Context<R>,
  holds: ReadonlyArray<Hold>,
  parent: AnyFiber
): Fiber.Fiber<A, E> => {
  const around = prune(Context.get(context, Holdings))
  let inner = around
  for (const hold of holds) inner = { hold, outer: inner, depth: depthIn(inner), body: undefined, parent }
  const isDeep = inner !== undefined && inner.depth % mostLevels === 0
  return Effect.runForkWith(Context.add(context, Holdings, inner))(Effect.withFiber((fiber) => {
    for (let at = inner; at !== undefined && at !== around; at = at.outer) at.body = fiber
    return isDeep ? apartFromStack(program) : program
  }))
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
    if (hold.fiber === at.id || isProtectedBy(at, hold, holdings)) return false
    const next = parentOf(at, holdings)
    if (next === undefined) return !isAwaited(at as Inner)
    at = next
  }
}

/** Whether a program that the hold protects waits for the fiber, or is the fiber's own. */
export const isInside = (fiber: AnyFiber, hold: Hold): boolean =>
  innermostOf(fiber.getRef(Holdings), (one) => one.hold === hold && one.body !== undefined) !== undefined &&
  !isDetached(fiber, hold)

// Of two, the one under which the fiber runs since later: a program can be protected by a hold that is older than one of its own.
const innermost = (fiber: AnyFiber, isMeant: (hold: Hold) => boolean): Hold | undefined => {
  const at = innermostOf(fiber.getRef(Holdings), ({ hold }) => hold.active && isMeant(hold))
  const own = findAcquired(fiber, (hold) => hold.active && isMeant(hold))
  if (at === undefined || own === undefined) return at?.hold ?? own?.hold
  const isOwn = at.body === undefined ? own.hold.heldAt > at.hold.heldAt : own.fiber > at.body.id
  return isOwn ? own.hold : at.hold
}

export const current: Effect.Effect<Hold | undefined> = Effect.withFiber((fiber) =>
  Effect.succeed(innermost(fiber, () => true))
)

export const currentOf = (key: string, kind: Kind | undefined): Effect.Effect<Hold | undefined> =>
  Effect.withFiber((fiber) =>
    Effect.succeed(innermost(fiber, (hold) => hold.key === key && (kind === undefined || hold.kind === kind)))
  )
