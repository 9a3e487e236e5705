/** Keeps a protected program from running on when its lease has run out. */

import * as Context from "effect/Context"
import type * as Fiber from "effect/Fiber"
import * as Scheduler from "effect/Scheduler"
import type { Session } from "../actor/session.ts"

const none: ReadonlyArray<never> = []

/**
 * A scheduler that looks at the lease before every operation of a protected program. A process that was paused, or whose
 * event loop was blocked, goes on with the timer or reply that comes first. That may be the program's own; this way the
 * program is interrupted before it can do more.
 */
class Guard implements Scheduler.Scheduler {
  readonly executionMode: "sync" | "async"
  readonly base: Scheduler.Scheduler
  readonly session: Session
  /** Those of the leases around it: each once, however often a program alternates between them. */
  readonly outer: ReadonlyArray<Session>

  constructor(base: Scheduler.Scheduler, session: Session) {
    const outer = base instanceof Guard ? base : undefined
    this.base = outer === undefined ? base : outer.base
    this.outer = outer === undefined ? none : [outer.session, ...outer.outer].filter(({ lost }) => lost === undefined)
    this.session = session
    this.executionMode = base.executionMode
  }

  shouldYield(fiber: Fiber.Fiber<unknown, unknown>): boolean {
    // Yielding at that moment keeps the operation at hand from running: the interruption comes first.
    if (this.session.expireIfDue()) return true
    for (let at = 0; at < this.outer.length; at++) if (this.outer[at]!.expireIfDue()) return true
    return this.base.shouldYield(fiber)
  }

  covers(session: Session): boolean {
    return this.session === session || this.outer.includes(session)
  }

  makeDispatcher(): Scheduler.SchedulerDispatcher {
    return this.base.makeDispatcher()
  }
}

const guards = new WeakMap<Session, WeakMap<Scheduler.Scheduler, Guard>>()

const guard = (base: Scheduler.Scheduler, session: Session): Scheduler.Scheduler => {
  if (base instanceof Guard && base.covers(session)) return base
  let known = guards.get(session)
  if (known === undefined) guards.set(session, known = new WeakMap())
  let found = known.get(base)
  if (found === undefined) known.set(base, found = new Guard(base, session))
  return found
}

// A context with another scheduler costs a fiber a dozen look-ups, and a fiber that locks once often does so again.
const contexts = new WeakMap<Session, WeakMap<Context.Context<never>, Context.Context<never>>>()

/** The context of a program that is protected by a session. */
export const guarded = (context: Context.Context<never>, session: Session): Context.Context<never> => {
  let known = contexts.get(session)
  if (known === undefined) contexts.set(session, known = new WeakMap())
  let found = known.get(context)
  if (found === undefined) {
    const base = Context.get(context, Scheduler.Scheduler)
    const guarding = guard(base, session)
    found = guarding === base ? context : Context.add(context, Scheduler.Scheduler, guarding)
    known.set(context, found)
  }
  return found
}
