/** Runs effects under holds: while one is lost, what runs under it is interrupted. */
import * as Cause from "effect/Cause"
import * as Context from "effect/Context"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Fiber from "effect/Fiber"
import type { Lease } from "../../Lease.ts"
import { guarded } from "./guard.ts"
import {
  type Acquire,
  acquire,
  duration,
  Held,
  Holdings,
  leave,
  leaving,
  limit,
  prune,
  type WaitOptions
} from "./held.ts"
import type { LeaseLost } from "./loss.ts"

/** Acquires, runs the effect under the hold, and gives back. */
export const withHeld = <A, E, R, E2>(
  self: Effect.Effect<A, E, R>,
  acquiring: Acquire<E2>
): Effect.Effect<A | undefined, E | E2, R> =>
  Effect.uninterruptibleMask((restore) =>
    Effect.flatMap(acquire(acquiring, restore), (held) => {
      if (held === undefined) return Effect.succeed(undefined)
      return Effect.onExitPrimitive(
        protect(self, held, restore, acquiring.fail, acquiring.options?.maxHold),
        () => leave(held),
        true
      )
    })
  )

/** Acquires all, one after the other, and runs the effect under all of them. */
export const withAllHeld = <A, E, R, E2>(
  self: Effect.Effect<A, E, R>,
  acquiring: ReadonlyArray<Acquire<E2>>,
  fail: (error: LeaseLost) => E2,
  options: WaitOptions | undefined
): Effect.Effect<A, E | E2, R> =>
  Effect.uninterruptibleMask((restore) =>
    Effect.clockWith((clock) => {
      const deadline = options?.wait === undefined
        ? undefined
        : clock.currentTimeMillisUnsafe() + Duration.toMillis(duration(options.wait, "wait"))
      const taken: Array<Held> = []
      const next = (at: number): Effect.Effect<A, E | E2, R> => {
        if (at === acquiring.length) {
          let body: Effect.Effect<A, E | E2, R> = self
          for (const inner of taken.slice(1)) {
            const outer = body
            body = Effect.uninterruptibleMask((restore) => protect(outer, inner, restore, fail, options?.maxHold))
          }
          const first = taken[0]
          return first === undefined ? restore(body) : protect(body, first, restore, fail, options?.maxHold)
        }
        // Each has what is left of the time, and at least a try.
        const wait = deadline === undefined ? undefined : Math.max(1, deadline - clock.currentTimeMillisUnsafe())
        return Effect.flatMap(
          acquire({ ...acquiring[at]!, options: { ...options, wait } }, restore),
          (held) => {
            taken.push(held!)
            return next(at + 1)
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

/** Runs the effect under a hold that the fiber has already. */
export const withinHeld = <A, E, R, E2>(
  self: Effect.Effect<A, E, R>,
  held: Held,
  fail: (error: LeaseLost) => E2
): Effect.Effect<A, E | E2, R> =>
  Effect.uninterruptibleMask((restore) => {
    // An interruption that arrives with this very operation still skips the next one, so nothing is counted before that.
    let counted = false
    return Effect.onExitPrimitive(
      Effect.suspend(() => {
        counted = true
        held.users++
        return protect(self, held, restore, fail, undefined)
      }),
      () => counted ? leave(held) : undefined,
      true
    )
  })

export const protectLease = <A, E, R, E2>(
  self: Effect.Effect<A, E, R>,
  lease: Lease,
  fail: (error: LeaseLost) => E2
): Effect.Effect<A, E | E2, R> => {
  if (!(lease instanceof Held)) throw new TypeError("This lease was not made by Lockstep")
  return Effect.uninterruptibleMask((restore) => protect(self, lease, restore, fail, undefined))
}

// The body runs in a fiber of its own, so that it can be interrupted without the fiber that holds. That one does not end
// before it, so it needs no supervision beyond being joined.
export const protect = <A, E, R, E2>(
  self: Effect.Effect<A, E, R>,
  held: Held,
  restore: <A, E, R>(effect: Effect.Effect<A, E, R>) => Effect.Effect<A, E, R>,
  fail: (error: LeaseLost) => E2,
  maxHold: Duration.Input | undefined
): Effect.Effect<A, E | E2, R> =>
  Effect.withFiber<A, E | E2, R>((parent) => {
    const { claim } = held
    if (!held.active) return Effect.fail(fail(held.loss()))
    const context = Context.add(
      guarded(parent.context, claim.session!),
      Holdings,
      { held, outer: prune(parent.getRef(Holdings)) }
    )
    claim.protecting++
    const child = Effect.runForkWith(context as Context.Context<R>)(self)
    const done = child.pollUnsafe()
    if (done !== undefined) {
      claim.unprotect()
      return outcome(held, done, fail)
    }
    const off = claim.onLoss(() => child.interruptUnsafe(parent.id))
    const timer = maxHold === undefined ? undefined : Effect.runForkWith(parent.context)(limit(held, maxHold))
    const end = () => {
      claim.unprotect()
      off()
      timer?.interruptUnsafe()
    }
    return Effect.onExitPrimitive(
      Effect.flatMap(restore(join(child)), (exit) => outcome(held, exit, fail)),
      () => {
        // An interruption that came with the body's first steps skips joining it.
        if (child.pollUnsafe() === undefined) return Effect.andThen(Fiber.interrupt(child), Effect.sync(end))
        end()
        return undefined
      },
      true
    )
  })

/** How a body has ended, if it was still under the hold then. */
const outcome = <A, E, E2>(
  held: Held,
  exit: Exit.Exit<A, E>,
  fail: (error: LeaseLost) => E2
): Exit.Exit<A, E | E2> => {
  if (held.claim.lost === undefined) return exit
  const lost = Cause.fail(fail(held.loss()))
  return Exit.failCause(
    Exit.isSuccess(exit) || Cause.hasInterruptsOnly(exit.cause) ? lost : Cause.combine(lost, exit.cause)
  )
}

const join = <A, E>(fiber: Fiber.Fiber<A, E>): Effect.Effect<Exit.Exit<A, E>> =>
  Effect.callback((resume) => {
    fiber.addObserver((exit) => resume(Effect.succeed(exit)))
    return Effect.asVoid(Fiber.interrupt(fiber))
  })
