/** Runs effects under holds: when one is lost, the effect under it is interrupted. */

import * as Cause from "effect/Cause"
import type * as Context from "effect/Context"
import type * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Fiber from "effect/Fiber"
import {
  type Acquire,
  acquire,
  claimed,
  forsake,
  granting,
  leave,
  leaving,
  leftOf,
  limit,
  limiting,
  type Restore,
  waited,
  waitOf,
  type WaitOptions
} from "./acquire.ts"
import { guarded } from "./guard.ts"
import { Hold, type Lease } from "./hold.ts"
import { start } from "./holding.ts"
import type { LeaseLost } from "./loss.ts"
import type { Place } from "./place.ts"
import { spanned } from "./span.ts"

/** Acquires, runs the effect under the hold, and releases. */
export const withHold = <A, E, R, E2>(
  self: Effect.Effect<A, E, R>,
  acquiring: Acquire<E2>
): Effect.Effect<A | undefined, E | E2, R> =>
  Effect.uninterruptibleMask((restore) => {
    const hold = claimed(acquiring)
    let granted = false
    let finish: Program<A, E | E2>["finish"] | undefined
    // One finalizer for the request, the program and the hold: there can be many holds.
    return Effect.onExitPrimitive(
      // The effects of the request are made when it is sent, so nothing refers to them while the hold lasts.
      Effect.withFiber((fiber) =>
        Effect.flatMap(
          granting(fiber, hold, acquiring, restore),
          (outcome): Effect.Effect<A | undefined, E | E2, R> => {
            const { fail, options, place, refuse } = acquiring
            if (outcome[0] !== "granted") return refuse(outcome)
            granted = true
            limit(fiber, place, hold, options)
            const program = begin(fiber, self, [hold], fail, undefined)
            if (Effect.isEffect(program)) return program
            finish = program.finish
            return restore(program.joined)
          }
        )
      ),
      (exit): Effect.Effect<void, E | E2> | undefined => {
        if (!granted) return forsake(hold, exit)
        const finishing = finish?.()
        return finishing === undefined ? leave(hold) : Effect.onExitPrimitive(finishing, () => leave(hold), true)
      },
      true
    )
  })

/** The limit that ends a hold after its `maxHold`, if the effect has not ended by then. */
interface Limiting {
  readonly place: Place
  readonly maxHold: Duration.Input
}

/** Acquires all, one after the other, and runs the effect under all of them. */
export const withAllHolds = <A, E, R, E2>(
  self: Effect.Effect<A, E, R>,
  acquiring: ReadonlyArray<Acquire<E2>>,
  fail: (error: LeaseLost) => E2,
  options: WaitOptions | undefined
): Effect.Effect<A, E | E2, R> =>
  Effect.uninterruptibleMask((restore) =>
    Effect.clockWith((clock) => {
      const first = acquiring[0]
      const wait = first === undefined ? undefined : waitOf(first.place, options)
      const left = wait === undefined ? undefined : leftOf(clock, wait)
      const taken: Array<Hold> = []
      const next = (at: number): Effect.Effect<A, E | E2, R> => {
        if (at === acquiring.length) return underAll(self, taken, restore, fail)
        const one = acquiring[at]!
        const failed: typeof one.fail = (error) =>
          one.fail(error._tag === "WaitTimeout" && wait !== undefined ? waited(error, wait) : error)
        // Each has the rest of the time, and at least a try.
        const rest = left && Math.max(1, left())
        return Effect.flatMap(
          acquire({ ...one, fail: failed, options: { ...options, wait: rest } }, unlessLost(taken, restore, fail)),
          (hold) => {
            taken.push(hold!)
            return Effect.withFiber((fiber) => {
              // Each is held from its grant on, also while the next one is waited for.
              limit(fiber, one.place, hold!, options)
              return next(at + 1)
            })
          }
        )
      }
      return Effect.onExitPrimitive(
        next(0),
        () => Effect.forEach(taken, leaving, { concurrency: "unbounded", discard: true }),
        true
      )
    })
  )

// The wait for a hold ends when one of those is lost that it is to be held with.
const unlessLost = <E2>(taken: ReadonlyArray<Hold>, restore: Restore, fail: (error: LeaseLost) => E2): Restore => {
  if (taken.length === 0) return restore
  const lost = Effect.callback<never, E2>((resume) => {
    const end = () => {
      const hold = taken.find(({ active }) => !active)
      if (hold !== undefined) resume(Effect.fail(fail(hold.lossError())))
    }
    for (const hold of taken) hold.onLoss(end)
    return Effect.sync(() => {
      for (const hold of taken) hold.offLoss(end)
    })
  })
  return <A, E, R>(self: Effect.Effect<A, E, R>) =>
    // A grant at the same moment is released, as for any failure of a wait.
    restore(Effect.raceFirst(self, lost)) as Effect.Effect<A, E, R>
}

const underAll = <A, E, R, E2>(
  self: Effect.Effect<A, E, R>,
  taken: ReadonlyArray<Hold>,
  restore: Restore,
  fail: (error: LeaseLost) => E2
): Effect.Effect<A, E | E2, R> =>
  taken.length === 0
    ? restore(self)
    : Effect.withFiber((parent) => protecting(parent, self, taken, restore, fail, undefined))

/** Runs the effect under a hold that the fiber has already. */
export const withinHold = <A, E, R, E2>(
  self: Effect.Effect<A, E, R>,
  hold: Hold,
  fail: (error: LeaseLost) => E2
): Effect.Effect<A, E | E2, R> =>
  Effect.uninterruptibleMask((restore) => {
    // An interruption that arrives with this very operation still skips the next one, so nothing is counted before that.
    let counted = false
    return Effect.onExitPrimitive(
      Effect.suspend(() => {
        counted = true
        hold.users++
        return protect(self, hold, restore, fail, undefined)
      }),
      () => counted ? leave(hold) : undefined,
      true
    )
  })

export const protectLease = <A, E, R, E2>(
  self: Effect.Effect<A, E, R>,
  lease: Lease,
  fail: (error: LeaseLost) => E2
): Effect.Effect<A, E | E2, R> => {
  return Effect.uninterruptibleMask((restore) => {
    if (!(lease instanceof Hold)) throw new TypeError("This lease was not made by Lockstep")
    return protect(self, lease, restore, fail, undefined)
  })
}

export const protect = <A, E, R, E2>(
  self: Effect.Effect<A, E, R>,
  hold: Hold,
  restore: Restore,
  fail: (error: LeaseLost) => E2,
  limited: Limiting | undefined
): Effect.Effect<A, E | E2, R> =>
  Effect.withFiber<A, E | E2, R>((parent) => protecting(parent, self, [hold], restore, fail, limited))

const protecting = <A, E, R, E2>(
  parent: Fiber.Fiber<unknown, unknown>,
  self: Effect.Effect<A, E, R>,
  holds: ReadonlyArray<Hold>,
  restore: Restore,
  fail: (error: LeaseLost) => E2,
  limited: Limiting | undefined
): Effect.Effect<A, E | E2, R> => {
  const program = begin(parent, self, holds, fail, limited)
  return Effect.isEffect(program) ? program : Effect.onExitPrimitive(restore(program.joined), program.finish, true)
}

/** A program under its holds that has not ended yet. */
interface Program<A, E> {
  /** Ends when it does. */
  readonly joined: Effect.Effect<A, E>
  /** Called when the wait for it has ended: interrupts it if it has not. */
  readonly finish: () => Effect.Effect<void, E> | undefined
}

// The body runs in a fiber of its own, so that it can be interrupted without the fiber that holds. That one does not end
// before it, so it needs no supervision beyond being joined. It is started at once, and can have ended then. `limited` is about the
// first hold.
const begin = <A, E, R, E2>(
  parent: Fiber.Fiber<unknown, unknown>,
  self: Effect.Effect<A, E, R>,
  holds: ReadonlyArray<Hold>,
  fail: (error: LeaseLost) => E2,
  limited: Limiting | undefined
): Program<A, E | E2> | Effect.Effect<A, E | E2> => {
  let { context } = parent
  for (const hold of holds) {
    if (!hold.active) return Effect.fail(fail(hold.lossError()))
    context = guarded(context, hold.session!)
  }
  // The span of the first hold is around those of the others, as its time is.
  const body = holds.reduceRight(
    (inner, { key, kind }) => spanned(parent, inner, `lockstep.${kind}.hold`, kind, key),
    self
  )
  const child = started(body, context as Context.Context<R>, holds, parent)
  const done = child.pollUnsafe()
  if (done !== undefined) {
    for (const hold of holds) hold.unprotect()
    return outcome(holds, done, fail)
  }
  const interrupt = () => child.interruptUnsafe(parent.id)
  for (const hold of holds) hold.onLoss(interrupt)
  const timer = limited && Effect.runForkWith(parent.context)(limiting(limited.place, holds[0]!, limited.maxHold))
  return {
    joined: joined(child, (exit) => outcome(holds, exit, fail)),
    finish: () => {
      // An interruption has ended the wait for it, or has skipped that.
      if (child.pollUnsafe() === undefined) {
        return Effect.andThen(
          Fiber.interrupt(child),
          Effect.suspend(() => {
            end(holds, interrupt, timer)
            return unexpected(child.pollUnsafe()!)
          })
        )
      }
      end(holds, interrupt, timer)
      return undefined
    }
  }
}

/** Starts a program, and counts it. That fails where the stack is too deep. */
const started: typeof start = (program, context, holds, parent) => {
  for (const hold of holds) hold.protecting++
  try {
    return start(program, context, holds, parent)
  } catch (cause) {
    for (const hold of holds) hold.unprotect()
    throw cause
  }
}

/** What an effect has failed with that was only to be interrupted, as its finalizers can. */
const unexpected = <E>(exit: Exit.Exit<unknown, E>): Effect.Effect<void, E> => {
  if (Exit.isSuccess(exit)) return Effect.void
  const others = exit.cause.reasons.filter((reason) => !Cause.isInterruptReason(reason))
  return others.length === 0 ? Effect.void : Effect.failCause(Cause.fromReasons(others))
}

const end = (holds: ReadonlyArray<Hold>, interrupt: () => void, timer: Fiber.Fiber<void> | undefined): void => {
  for (const hold of holds) {
    hold.unprotect()
    hold.offLoss(interrupt)
  }
  timer?.interruptUnsafe()
}

/** How a body has ended, if it was still under its holds then. */
const outcome = <A, E, E2>(
  holds: ReadonlyArray<Hold>,
  exit: Exit.Exit<A, E>,
  fail: (error: LeaseLost) => E2
): Exit.Exit<A, E | E2> => {
  for (const hold of holds) {
    // The last operation can have kept this process from noticing.
    if (hold.loss === undefined) hold.session?.expireIfDue()
    // The end of a request of the session comes before the interruption.
    const lost = hold.session?.lost
    if (lost !== undefined && hold.active && !hold.concluding) hold.lose(lost)
    if (hold.loss !== undefined) return lostWith(fail(hold.lossError()), exit)
  }
  return exit
}

/** The exit of an effect that was interrupted for a loss: that loss, and the other failures. */
export const lostWith = <E, E2>(error: E2, exit: Exit.Exit<unknown, E>): Exit.Exit<never, E | E2> => {
  const lost = Cause.fail(error)
  // `Cause.combine` compares the failures, and those of users may throw when they are looked at.
  return Exit.failCause(
    Exit.isSuccess(exit) || Cause.hasInterruptsOnly(exit.cause)
      ? lost
      : Cause.fromReasons<E | E2>([...lost.reasons, ...exit.cause.reasons])
  )
}

/** The end of a fiber, as the caller's result. The caller interrupts the fiber if its own wait is interrupted. */
export const joined = <A, E, B, E2>(
  fiber: Fiber.Fiber<A, E>,
  end: (exit: Exit.Exit<A, E>) => Effect.Effect<B, E2>
): Effect.Effect<B, E2> =>
  Effect.callback((resume) => {
    fiber.addObserver((exit) => {
      // Effect drops what an observer throws: the caller would wait for ever.
      try {
        resume(end(exit))
      } catch (defect) {
        resume(Effect.die(defect))
      }
    })
  })
