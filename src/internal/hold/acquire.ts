/** Acquires, waits and releases in Effect: the one place that waits, and that releases. */

import type * as Clock from "effect/Clock"
import * as Context from "effect/Context"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import type * as Fiber from "effect/Fiber"
import { identity } from "effect/Function"
import * as Scope from "effect/Scope"
import type { CoordinatorReason } from "../actor/errors.ts"
import type { Requests } from "../actor/lua.ts"
import type { Verb } from "../actor/transport.ts"
import { monotonicOf } from "../io.ts"
import type { Argument, Claim, ClaimVerb, Entry, LeaveVerb, Refusal } from "./claim.ts"
import { departing, type Departure, onSettled, type Settled } from "./departing.ts"
import { Hold } from "./hold.ts"
import { findHold, isDetached, isInside, note, under } from "./holding.ts"
import { type LeaseLost, WaitTimeout } from "./loss.ts"
import { Membership, type Observer } from "./membership.ts"
import { watchOverruns } from "./overruns.ts"
import { Coordinator, duration, flag, oneOf, type Place, type Space, spaceOf } from "./place.ts"
import { spanned, spannedScope, spannedUntil } from "./span.ts"

export type Restore = <A, E, R>(effect: Effect.Effect<A, E, R>) => Effect.Effect<A, E, R>

export interface WaitOptions {
  readonly wait?: Duration.Input | undefined
  readonly maxHold?: Duration.Input | undefined
  readonly release?: Release | undefined
  readonly cached?: boolean | undefined
}

/** Whether the end of what runs under a hold waits until Redis has released it. */
export const releases = ["awaited", "background"] as const
export type Release = typeof releases[number]

/** Why something cannot be held. */
export type Failure = CoordinatorReason | LeaseLost | WaitTimeout

/** A claim, and its result where the actor refuses it and the refusal is no error. */
export interface Acquire<E, A = undefined> extends Claim {
  readonly place: Place
  readonly weight?: number | undefined
  /** The membership that it ends with, if any: it is refused as "closed" then. */
  readonly member?: Membership | undefined
  readonly options?: WaitOptions | undefined
  readonly fail: (error: Failure) => E
  readonly refuse: (refusal: Refusal) => Effect.Effect<A, E>
  /** When its wait is over, the actor has the last word: asked so, it ends the wait, or says what has come of that. */
  readonly departure?: Departure | undefined
}

const ignore = () => {}

// -----------------------------------------------------------------------------
// Enter
// -----------------------------------------------------------------------------

/** The entrance of a combinator: the fiber, and the runtime of its coordinator. */
export const use = <A, E, R>(
  f: (fiber: Fiber.Fiber<unknown, unknown>, space: Space) => Effect.Effect<A, E, R>
): Effect.Effect<A, E, R | Coordinator> =>
  Effect.withFiber<A, E, R>((fiber) =>
    f(fiber, spaceOf(Context.get(fiber.context as Context.Context<Coordinator>, Coordinator)))
  )

/**
 * Goes on with the hold of a place that the fiber runs under, if waiting for it would never end: a fiber that the holder does
 * not wait for may wait. The fiber that has just started this one may be about to wait for it, so that is looked at twice.
 */
export const nested = <A, E, R>(
  fiber: Fiber.Fiber<unknown, unknown>,
  place: Place,
  reentrant: boolean,
  go: (found: Hold | undefined) => Effect.Effect<A, E, R>
): Effect.Effect<A, E, R> => {
  const found = findHold(fiber, place)
  if (found === undefined || reentrant || !isDetached(fiber, found)) return go(found)
  return Effect.flatMap(Effect.yieldNow, () => go(isDetached(fiber, found) ? undefined : found))
}

// -----------------------------------------------------------------------------
// Release
// -----------------------------------------------------------------------------

const giveUp = (entry: Entry, done: () => void): void => {
  if (entry instanceof Hold) entry.onRelease()
  entry.keeper.release(entry, done)
}

/**
 * Releases, and returns when that is certain, or when Redis has been away for the coordinator's `requestTimeout`. What is released in the
 * background is not waited for.
 */
export const release = (entry: Entry): Effect.Effect<void> =>
  entry.claim.background === true
    ? Effect.sync(() => giveUp(entry, ignore))
    : Effect.callback((resume) => giveUp(entry, () => resume(Effect.void)))

/** One user less; the last one releases it. Answers what is left to wait for. */
export const leave = (hold: Hold): Effect.Effect<void> | undefined => {
  if (--hold.users > 0) return undefined
  if (hold.claim.background !== true) return release(hold)
  giveUp(hold, ignore)
  return undefined
}

export const leaving = (hold: Hold): Effect.Effect<void> => Effect.suspend(() => leave(hold) ?? Effect.void)

// -----------------------------------------------------------------------------
// Acquire
// -----------------------------------------------------------------------------

/**
 * Asks, and waits for the outcome. After any failure on the way, also an interruption at the very moment of the grant, the
 * claim must not outlive it, see `forsake`.
 */
const asking = <E>(
  place: Place,
  entry: Entry,
  restore: Restore,
  wait: Duration.Input | undefined,
  fail: (error: CoordinatorReason | WaitTimeout) => E,
  departure?: Departure
): Effect.Effect<Settled, E> => {
  let settled: Effect.Effect<Settled, E> | undefined
  const asked = Effect.callback<Settled, E>((resume) => {
    onSettled(entry, fail, (result) => {
      settled = result
      resume(result)
    })
    place.tenancy.take(entry)
  })
  if (wait === undefined) return restore(asked)
  if (departure === undefined) return restore(within(asked, place, wait, fail))
  const late = (timeout: Effect.Effect<never, E>) =>
    Effect.suspend(() => settled ?? departing(place, entry, departure, timeout, fail))
  return restore(within(asked, place, wait, fail, late))
}

/** Gives a claim up that was not granted, if asking for it has failed. */
export const forsake = (entry: Entry, exit: Exit.Exit<unknown, unknown>): undefined => {
  if (Exit.isFailure(exit)) entry.keeper.release(entry, ignore)
}

const obtain = <A, E>(asked: Effect.Effect<A, E>, entry: Entry): Effect.Effect<A, E> =>
  Effect.onExitPrimitive(asked, (exit) => forsake(entry, exit), true)

/** The target of a wait: a place is one. */
export interface Awaited extends Pick<Place, "channel" | "name" | "space"> {
  readonly kind: string
}

/** Bounds a wait. The error says whether Redis was out of reach meanwhile. */
export const within = <A, E, R, E2>(
  self: Effect.Effect<A, E, R>,
  { channel, kind, name, space: { kernel } }: Awaited,
  wait: Duration.Input,
  fail: (error: WaitTimeout) => E2,
  late: (timeout: Effect.Effect<never, E2>) => Effect.Effect<A, E | E2, R> = identity
): Effect.Effect<A, E | E2, R> =>
  Effect.suspend(() => {
    const limit = duration(wait, "wait")
    const { hooks, settings: { namespace }, transport } = kernel
    const { outages } = channel
    const { connects } = transport
    return Effect.timeoutOrElse(self, {
      duration: limit,
      orElse: () =>
        late(Effect.suspend(() => {
          hooks.metrics.timedOut()
          const away = channel.away || channel.outages > outages || !transport.commands.isReady() ||
            transport.connects > connects
          return Effect.fail(fail(new WaitTimeout({ kind, key: name, namespace, wait: limit, away })))
        }))
    })
  })

/** A part of a wait was over: the time was for all of its parts. */
export const waited = (
  { away, key, kind, namespace }: Pick<WaitTimeout, "away" | "key" | "kind" | "namespace">,
  wait: Duration.Input
): WaitTimeout => new WaitTimeout({ kind, key, namespace, away, wait: duration(wait, "wait") })

/** As `within`, if there is a bound. */
export const bounded = <A, E, R, E2>(
  self: Effect.Effect<A, E, R>,
  awaited: Awaited,
  wait: Duration.Input | undefined,
  fail: (error: WaitTimeout) => E2
): Effect.Effect<A, E | E2, R> => wait === undefined ? self : within(self, awaited, wait, fail)

/** What is left of a wait that several requests share, in milliseconds. The wall clock can be set meanwhile. */
export const leftOf = (clock: Clock.Clock, wait: Duration.Input): () => number => {
  const end = monotonicOf(clock) + Duration.toMillis(duration(wait, "wait"))
  return () => end - monotonicOf(clock)
}

/** How long to wait: the `wait` of the call, or the coordinator's default. */
export const waitOf = (place: Place, options: WaitOptions | undefined): Duration.Input | undefined =>
  options?.wait ?? place.space.wait

export const maxHoldOf = (place: Place, options: WaitOptions | undefined): Duration.Input | undefined =>
  options?.maxHold ?? place.space.maxHold

/** Wrong options are refused, also where nothing has to be waited for. */
export const check = (options: (WaitOptions & { readonly reentrant?: boolean | undefined }) | undefined): void => {
  if (options?.wait !== undefined) duration(options.wait, "wait")
  if (options?.maxHold !== undefined) duration(options.maxHold, "maxHold")
  if (options?.release !== undefined) oneOf(options.release, "release", releases)
  for (const what of ["cached", "reentrant"] as const) flag(options?.[what] ?? false, what)
}

const newHold = <E, A>(acquiring: Acquire<E, A>): Hold => {
  const { member, place, weight = 1 } = acquiring
  return new Hold(place.space.kernel.nextId(), acquiring, place.tenancy, member, weight)
}

/** A hold to be. */
export const claimed = <E, A>(acquiring: Acquire<E, A>): Hold => {
  const { options } = acquiring
  if (options?.maxHold !== undefined) duration(options.maxHold, "maxHold")
  return newHold(acquiring)
}

/** Asks for a hold. The caller has to end the claim, after any outcome. Runs under `uninterruptibleMask`. */
export const granting = <E, A>(
  fiber: Fiber.Fiber<unknown, unknown>,
  hold: Hold,
  { departure, fail, options, place, question }: Acquire<E, A>,
  restore: Restore
): Effect.Effect<Settled, E> => {
  const wait = question === true ? undefined : waitOf(place, options)
  const asked = asking(place, hold, restore, wait, fail, departure)
  return spanned(fiber, asked, `lockstep.${place.kind}.wait`, place.kind, place.name)
}

/** Runs under `uninterruptibleMask`. */
export const acquire = <E, A>(acquiring: Acquire<E, A>, restore: Restore): Effect.Effect<Hold | A, E> =>
  Effect.withFiber((fiber) => {
    const hold = claimed(acquiring)
    return Effect.flatMap(
      obtain(granting(fiber, hold, acquiring, restore), hold),
      (outcome): Effect.Effect<Hold | A, E> =>
        outcome[0] === "granted" ? Effect.succeed(hold) : acquiring.refuse(outcome)
    )
  })

/** Acquires without a scope: the hold lasts until it is released or lost. */
export const acquireUnscoped = <E>(acquiring: Acquire<E>): Effect.Effect<Hold | undefined, E> =>
  Effect.uninterruptibleMask((restore) =>
    Effect.flatMap(acquire(acquiring, restore), (hold) => {
      if (hold === undefined) return Effect.succeed(hold)
      return Effect.as(enterUnscoped(acquiring, hold), hold)
    })
  )

// The end of the hold ends what belongs to it: users may outlive the one that has acquired it.
const endWith = (hold: Hold, end: () => void): void => {
  const { onRelease } = hold
  hold.onRelease = () => {
    onRelease()
    end()
  }
  hold.onLoss(end)
}

const enterUnscoped = <E>({ options, place }: Acquire<E>, hold: Hold): Effect.Effect<void> =>
  Effect.withFiber((fiber) => {
    limit(fiber, place, hold, options)
    return Effect.map(spannedUntil(fiber, `lockstep.${hold.kind}.hold`, hold.kind, hold.key), (end) => {
      if (end === undefined) return
      endWith(hold, () => end(hold.loss === undefined ? Exit.void : Exit.fail(hold.lossError())))
    })
  })

/** Ends a hold after its `maxHold`, if it has one, whoever uses it then, unless it has been released before. */
export const limit = (
  { context }: Fiber.Fiber<unknown, unknown>,
  place: Place,
  hold: Hold,
  options: WaitOptions | undefined
): void => {
  const maxHold = maxHoldOf(place, options)
  if (maxHold === undefined) return
  const timer = Effect.runForkWith(context)(limiting(place, hold, maxHold))
  endWith(hold, () => {
    // After the limit, it still has to wait for the margin.
    if (hold.loss !== "maxHold") timer.interruptUnsafe()
  })
}

/**
 * Acquires into the scope of the caller; the rest of the fiber runs under the hold. `begin` is called at once, and
 * returns what is called before the release.
 */
export const acquireScoped = <E>(
  acquiring: Acquire<E>,
  begin?: (hold: Hold) => () => void
): Effect.Effect<Hold | undefined, E, Scope.Scope> =>
  Effect.uninterruptibleMask((restore) =>
    Effect.flatMap(Effect.scope, (scope) =>
      Effect.flatMap(acquire(acquiring, restore), (hold) => {
        if (hold === undefined) return Effect.succeed(hold)
        return Effect.as(
          Effect.andThen(
            Scope.addFinalizerExit(scope, ending(hold, begin?.(hold))),
            enter(acquiring.place, hold, acquiring.options, scope)
          ),
          hold
        )
      }))
  )

// Made here, so that it refers to nothing else.
const ending = (hold: Hold, end: (() => void) | undefined) => () => {
  end?.()
  return leave(hold) ?? Effect.void
}

/** One more user of a hold, until the scope of the caller closes. */
export const shareScoped = (hold: Hold): Effect.Effect<Hold, never, Scope.Scope> =>
  Effect.uninterruptible(
    Effect.flatMap(Effect.scope, (scope) => {
      hold.users++
      return Effect.as(Scope.addFinalizer(scope, leaving(hold)), hold)
    })
  )

/** Makes the rest of the fiber, up to the end of the surrounding region, run under the hold. */
const enter = (
  place: Place,
  hold: Hold,
  options: WaitOptions | undefined,
  scope: Scope.Scope
): Effect.Effect<unknown> =>
  Effect.withFiber((fiber) => {
    hold.fiber = fiber.id
    note(fiber, hold)
    fiber.setContext(under(fiber.context, hold))
    limit(fiber, place, hold, options)
    return spannedScope(fiber, scope, `lockstep.${hold.kind}.hold`, hold.kind, hold.key)
  })

/** Ends a hold after some time. As after any loss, the margin is for finalizers; then it is released for them. */
export const limiting = ({ channel, space: { kernel } }: Place, hold: Hold, maxHold: Duration.Input) =>
  Effect.gen(function*() {
    yield* Effect.sleep(duration(maxHold, "maxHold"))
    if (!hold.active) return
    hold.lose("maxHold")
    kernel.hooks.log("Warn", hold.lossError().message)
    watchOverruns(kernel, channel.margin, [hold])
    yield* Effect.sleep(Duration.millis(channel.margin))
    if (hold.state === "held") yield* release(hold)
  })

/**
 * Gives holds up that others may use: the programs under them are interrupted. Each is released when these have ended, or after
 * the margin. Another call meanwhile waits for the same. A program under a hold that goes on, as a finalizer, would wait for itself.
 */
export const surrender = (
  place: Place,
  holds: ReadonlyArray<Hold>,
  reason: "resigned" | "closed"
): Effect.Effect<void> =>
  Effect.withFiber((fiber) => {
    const waits = holds.filter((hold) => !isInside(fiber, hold))
    return Effect.promise(async () => {
      for (const hold of holds) if (hold.active) hold.surrendering = givingUp(place, hold, reason)
      await Promise.all(waits.map(({ surrendering }) => surrendering))
    })
  })

// No fiber: the one that asks for it may be the one that is interrupted.
const givingUp = async ({ channel, space: { kernel }, tenancy }: Place, hold: Hold, reason: "resigned" | "closed") => {
  hold.lose(reason)
  watchOverruns(kernel, channel.margin, [hold])
  await Promise.race([hold.calm(), kernel.transport.sleep(channel.margin)])
  await new Promise<void>((resolve) => tenancy.release(hold, resolve))
}

// -----------------------------------------------------------------------------
// Conclude
// -----------------------------------------------------------------------------

/** Ends a hold by a request that says what has come of it, rather than by releasing it. */
export const conclude = <V extends Verb>({ channel, key, tenancy }: Place, hold: Hold, request: {
  readonly verb: V
  readonly args: Requests[V]["args"]
  readonly settle: (reply: Requests[V]["reply"]) => void
  /**
   * With the session, the hold was lost; whether the request can have been executed before. Without this, the next session
   * asks whether it was.
   */
  readonly moot?: ((sent: boolean) => void) | undefined
  readonly fail: (error: CoordinatorReason) => void
}): void => {
  const { moot } = request
  if (hold.loss !== undefined && moot !== undefined) return moot(false)
  hold.concluding = true
  channel.outbox.request<V>({
    verb: request.verb,
    args: request.args,
    key,
    urgent: true,
    session: moot && hold.session,
    settle: (reply) => {
      tenancy.forget(hold)
      request.settle(reply)
    },
    moot,
    fail: ({ reason }) => {
      hold.concluding = false
      tenancy.release(hold, ignore)
      request.fail(reason)
    }
  })
}

/** Asks for something that is not held: the answer is all there is to it. */
export const ask = <A, E>(
  acquiring: Omit<Acquire<E>, "options" | "refuse"> & { readonly wait?: Duration.Input | undefined },
  answer: (outcome: Settled, hold: Hold) => Effect.Effect<A, E>
): Effect.Effect<A, E> => {
  const { fail, place, question, wait = question === true ? undefined : place.space.wait } = acquiring
  // One operation: between two of them an interruption could lose what the first has got.
  const asked = Effect.callback<A, E>((resume) => {
    const hold = newHold({ ...acquiring, refuse: () => Effect.undefined })
    hold.settle = (outcome) =>
      resume(outcome[0] === "failed" ? Effect.fail(fail(outcome[1].reason)) : answer(outcome, hold))
    place.tenancy.take(hold)
    return Effect.sync(() => place.tenancy.release(hold, ignore))
  })
  return wait === undefined ? asked : within(asked, place, wait, fail)
}

// -----------------------------------------------------------------------------
// Join
// -----------------------------------------------------------------------------

/** Joins a resource for as long as a scope is open; after a loss of the session it is joined again by itself. */
export const join = <E, W extends Duration.Input | undefined = undefined>(
  place: Place,
  options: {
    readonly verb: ClaimVerb
    readonly args: (anyway: boolean, again: boolean) => ReadonlyArray<Argument>
    readonly leave?: LeaveVerb | undefined
    readonly observer: Observer
    readonly wait?: W
    /** It waits for others, rather than failing while Redis is away. */
    readonly waits?: boolean | undefined
    readonly verified?: boolean | undefined
    readonly fail: (error: CoordinatorReason | (W extends undefined ? never : WaitTimeout)) => E
  }
): Effect.Effect<readonly [Membership, Settled], E, Scope.Scope> =>
  Effect.uninterruptibleMask((restore) =>
    Effect.flatMap(Effect.scope, (scope) => {
      const { args, fail, leave, observer, verb, verified, wait, waits = false } = options
      const claim = { place, verb, args, leave, question: !waits, verified } as const
      const member = new Membership(place.space.kernel.nextId(), claim, place.tenancy, observer)
      return Effect.flatMap(
        obtain(asking(place, member, restore, wait, fail as (error: CoordinatorReason | WaitTimeout) => E), member),
        (outcome) => Effect.as(Scope.addFinalizer(scope, release(member)), [member, outcome] as const)
      )
    })
  )

/** Its resource is gone, though the scope is open: it joins again, before anything that is asked from now on. Answers whether it does. */
export const rejoin = ({ channel: { session }, tenancy }: Place, member: Membership): boolean => {
  if (member.state !== "held" || session === undefined) return false
  tenancy.upkeep.verify(session, [member])
  return true
}
