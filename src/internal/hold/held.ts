/**
 * Everything that is held goes through here: the one place that waits, and that gives back.
 */
import * as Context from "effect/Context"
import * as DateTime from "effect/DateTime"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import type * as Fiber from "effect/Fiber"
import * as Scope from "effect/Scope"
import { Coordinator } from "../../Coordinator.ts"
import type { Lease } from "../../Lease.ts"
import type { CoordinatorError } from "../actor/errors.ts"
import { type Kernel, kernelOf } from "../actor/kernel.ts"
import { checkName } from "../actor/keys.ts"
import type { Requests } from "../actor/lua.ts"
import type { Partition } from "../actor/partition.ts"
import {
  type CheckVerb,
  Claim,
  type ClaimVerb,
  type Details,
  type Observation,
  type Outcome,
  type Refusal,
  type Verb
} from "./claim.ts"
import { LeaseLost, WaitTimeout } from "./loss.ts"
import { spanned } from "./span.ts"

export type Kind =
  | "lock"
  | "rw"
  | "sem"
  | "latch"
  | "gate"
  | "leader"
  | "singleton"
  | "tick"
  | "barrier"
  | "phase"
  | "tasks"
  | "signal"
  | "rendezvous"

export interface WaitOptions {
  readonly wait?: Duration.Input | undefined
  readonly maxHold?: Duration.Input | undefined
}

/** A hold as the fibers under it see it. It ends with its last user, so a child that outlives its parent is still safe. */
export class Held implements Lease {
  readonly "~lockstep/Lease" = "~lockstep/Lease" as const
  users = 1
  /** Settles when it has been given up, once somebody has begun with that. */
  surrendering: Promise<void> | undefined = undefined
  readonly claim: Claim
  readonly key: string

  constructor(claim: Claim, key: string) {
    this.claim = claim
    this.key = key
  }

  get token(): number {
    return this.claim.token
  }

  get acquiredAt(): DateTime.Utc {
    return DateTime.makeUnsafe(this.claim.acquiredAt)
  }

  get active(): boolean {
    return this.claim.state === "held" && this.claim.lost === undefined
  }

  get isHeld(): Effect.Effect<boolean> {
    return Effect.sync(() => {
      this.claim.session?.expireIfDue()
      return this.active
    })
  }

  get lost(): Effect.Effect<never, LeaseLost> {
    return Effect.callback<never, LeaseLost>((resume) => {
      const off = this.claim.onLoss(() => resume(Effect.fail(this.loss())))
      return Effect.sync(off)
    })
  }

  /** Why it is no longer held; `given` is said of one that was given back. */
  loss(given: LeaseLost["reason"] = "closed"): LeaseLost {
    return new LeaseLost({ key: this.key, token: this.claim.token, reason: this.claim.lost ?? given })
  }
}

interface Holding {
  readonly held: Held
  readonly outer: Holding | undefined
}

export const Holdings = Context.Reference<Holding | undefined>("lockstep/Holdings", { defaultValue: () => undefined })

export const prune = (holding: Holding | undefined): Holding | undefined => {
  while (holding !== undefined && !holding.held.active) holding = holding.outer
  return holding
}

/** The hold of this place that the fiber runs under. */
export const findHeld = (fiber: Fiber.Fiber<unknown, unknown>, { key, partition }: Place): Held | undefined => {
  for (let at = fiber.getRef(Holdings); at !== undefined; at = at.outer) {
    const { claim } = at.held
    if (claim.key === key && at.held.active && claim.partition === partition) return at.held
  }
  return undefined
}

export const current: Effect.Effect<Lease | undefined> = Effect.withFiber((fiber) =>
  Effect.succeed(prune(fiber.getRef(Holdings))?.held)
)

export const currentOf = (key: string): Effect.Effect<Lease | undefined> =>
  Effect.withFiber((fiber) => {
    let at = fiber.getRef(Holdings)
    while (at !== undefined && !(at.held.key === key && at.held.active)) at = at.outer
    return Effect.succeed(at?.held)
  })

// -----------------------------------------------------------------------------
// Acquire and release
// -----------------------------------------------------------------------------

export const duration = (input: Duration.Input, what: string): Duration.Duration => {
  const parsed = Duration.fromInputUnsafe(input)
  if (!(Duration.toMillis(parsed) > 0)) throw new RangeError(`${what} must be longer than zero`)
  return parsed
}

/** As whole milliseconds, not more than Redis can count. */
export const millis = (input: Duration.Input, what: string): number => {
  const found = Math.ceil(Duration.toMillis(duration(input, what)))
  if (!Number.isSafeInteger(found)) throw new RangeError(`${what} must be finite`)
  return found
}

/** A name, checked, and where it lives. */
export interface Place {
  readonly partition: Partition
  readonly name: string
  readonly key: string
}

export const placeOf = (kernel: Kernel, kind: Kind, name: string, what: string): Place => {
  checkName(name, what)
  const partition = kernel.partitionFor(name)
  return { partition, name, key: `${partition.prefix}${kind}:${name}` }
}

type Settled = Exclude<Outcome, readonly ["failed", ...any]>

/** What is asked for, and what it comes to when it is refused and that is no error. */
export interface Acquire<E, A = undefined> {
  readonly place: Place
  /** Default: to take from a semaphore. */
  readonly verb?: ClaimVerb | undefined
  readonly details?: Details | undefined
  readonly check?: CheckVerb | undefined
  /** The membership that it ends with, if any: it is refused as "closed" then. */
  readonly member?: Claim | undefined
  readonly weight: number
  readonly capacity: number
  /** Whether to queue when it is taken. */
  readonly wait: boolean
  readonly options: WaitOptions | undefined
  readonly fail: (error: CoordinatorError | LeaseLost | WaitTimeout) => E
  readonly refuse: (refusal: Refusal) => Effect.Effect<A, E>
}

const ignore = () => {}

/**
 * The entrance of a combinator: the fiber and the kernel, and a span if it has a name and somebody looks: a tracer is
 * provided, or a span is open. Otherwise none is made, which is most of what an uncontended lock would cost.
 */
export const use = <A, E, R>(
  span: string | undefined,
  key: string,
  f: (fiber: Fiber.Fiber<unknown, unknown>, kernel: Kernel) => Effect.Effect<A, E, R>
): Effect.Effect<A, E, R | Coordinator> =>
  Effect.withFiber<A, E, R>((fiber) => {
    const self = f(fiber, kernelOf(Context.get(fiber.context as Context.Context<Coordinator>, Coordinator)))
    return span === undefined ? self : spanned(fiber, self, span, key)
  })

/** Gives the hold back and returns when that is certain. */
export const giveBack = (claim: Claim): Effect.Effect<void> =>
  Effect.callback((resume) => claim.partition.claims.release(claim, () => resume(Effect.void)))

/** One user less; the last one gives it back. */
export const leave = (held: Held): Effect.Effect<void> | undefined =>
  --held.users > 0 ? undefined : giveBack(held.claim)

export const leaving = (held: Held): Effect.Effect<void> => Effect.suspend(() => leave(held) ?? Effect.void)

/**
 * Asks for a hold and waits for it. Whatever goes wrong on the way, also an interruption at the very moment of the
 * grant, the claim does not outlive it.
 */
const obtain = <E>(
  claim: Claim,
  name: string,
  restore: <A, E, R>(effect: Effect.Effect<A, E, R>) => Effect.Effect<A, E, R>,
  wait: Duration.Input | undefined,
  fail: (error: CoordinatorError | WaitTimeout) => E
): Effect.Effect<Settled, E> => {
  const asked = Effect.callback<Settled, E>((resume) => {
    claim.settle = (outcome) =>
      resume(outcome[0] === "failed" ? Effect.fail(fail(outcome[1])) : Effect.succeed(outcome))
    claim.partition.claims.take(claim)
  })
  return Effect.onExitPrimitive(restore(wait === undefined ? asked : within(asked, name, wait, fail)), (exit) => {
    if (Exit.isFailure(exit)) claim.partition.claims.release(claim, ignore)
    return undefined
  }, true)
}

const within = <A, E>(
  self: Effect.Effect<A, E>,
  key: string,
  wait: Duration.Input,
  fail: (error: WaitTimeout) => E
): Effect.Effect<A, E> => {
  const limit = duration(wait, "wait")
  return Effect.timeoutOrElse(self, {
    duration: limit,
    orElse: () => Effect.fail(fail(new WaitTimeout({ key, wait: limit })))
  })
}

/** Runs under `uninterruptibleMask`. */
export const acquire = <E, A>(
  {
    capacity,
    check,
    details,
    fail,
    member,
    options,
    place,
    refuse,
    verb = "semaphore.take",
    wait,
    weight
  }: Acquire<E, A>,
  restore: <A, E, R>(effect: Effect.Effect<A, E, R>) => Effect.Effect<A, E, R>
): Effect.Effect<Held | A, E> => {
  if (options?.maxHold !== undefined) duration(options.maxHold, "maxHold")
  const claim = new Claim(place.partition, {
    key: place.key,
    verb,
    weight,
    capacity,
    wait,
    standing: false,
    details,
    check,
    member
  })
  return Effect.flatMap(
    obtain(claim, place.name, restore, options?.wait, fail),
    (outcome): Effect.Effect<Held | A, E> =>
      outcome[0] === "granted" ? Effect.succeed(new Held(claim, place.name)) : refuse(outcome)
  )
}

/**
 * Acquires into the scope of the caller; the rest of the fiber runs under it. `begin` is told at once, and answers what is
 * to be called before it is given back.
 */
export const acquireScoped = <E>(
  acquiring: Acquire<E>,
  begin: (held: Held) => () => void = () => ignore
): Effect.Effect<Held | undefined, E, Scope.Scope> =>
  Effect.uninterruptibleMask((restore) =>
    Effect.flatMap(Effect.scope, (scope) =>
      Effect.flatMap(acquire(acquiring, restore), (held) => {
        if (held === undefined) return Effect.succeed(held)
        const end = begin(held)
        const release = Effect.suspend(() => {
          end()
          return leave(held) ?? Effect.void
        })
        return Effect.as(
          Effect.andThen(Scope.addFinalizer(scope, release), enter(held, acquiring.options?.maxHold, scope)),
          held
        )
      }))
  )

/** One more user of a hold, until the scope of the caller closes. */
export const shareScoped = (held: Held): Effect.Effect<Lease, never, Scope.Scope> =>
  Effect.uninterruptible(
    Effect.flatMap(Effect.scope, (scope) => {
      held.users++
      return Effect.as(Scope.addFinalizer(scope, leaving(held)), held)
    })
  )

/** Makes the rest of the fiber, up to the end of the surrounding region, run under the hold. */
const enter = (held: Held, maxHold: Duration.Input | undefined, scope: Scope.Scope): Effect.Effect<void> =>
  Effect.withFiber((fiber) => {
    fiber.setContext(Context.add(fiber.context, Holdings, { held, outer: prune(fiber.getRef(Holdings)) }))
    if (maxHold === undefined) return Effect.void
    return Effect.asVoid(Effect.forkIn(limit(held, maxHold), scope))
  })

// The margin gives the holder's finalizers time, as after any loss; then it is given back for them.
export const limit = (held: Held, maxHold: Duration.Input): Effect.Effect<void> =>
  Effect.gen(function*() {
    yield* Effect.sleep(duration(maxHold, "maxHold"))
    const { claim } = held
    const { kernel } = claim.partition
    if (!held.active) return
    kernel.log("Warn", `a hold of ${JSON.stringify(held.key)} was interrupted after its maxHold`)
    claim.lose("maxHold")
    kernel.watchOverruns([claim])
    yield* Effect.sleep(Duration.millis(kernel.settings.margin))
    if (claim.state === "held") yield* giveBack(claim)
  })

/**
 * Gives a hold up whoever uses it: what runs under it is interrupted, and it is given back when that has ended, or after
 * the margin. Whoever asks for that meanwhile waits for the same.
 */
export const surrender = (held: Held, reason: "resigned" | "closed"): Effect.Effect<void> =>
  Effect.promise(() => {
    if (held.active) held.surrendering = givingUp(held.claim, reason)
    return held.surrendering ?? Promise.resolve()
  })

// No fiber: the one that asks for it may be the one that is interrupted.
const givingUp = async (claim: Claim, reason: "resigned" | "closed"): Promise<void> => {
  const { kernel } = claim.partition
  claim.lose(reason)
  kernel.watchOverruns([claim])
  await Promise.race([claim.calm(), kernel.sleep(kernel.settings.margin)])
  await new Promise<void>((resolve) => claim.partition.claims.release(claim, resolve))
}

// -----------------------------------------------------------------------------
// Conclude
// -----------------------------------------------------------------------------

/** Ends a hold by a request that says what has come of it, rather than by giving it back. */
export const conclude = <V extends Verb>(claim: Claim, request: {
  readonly verb: V
  readonly args: Requests[V]["args"]
  readonly settle: (reply: Requests[V]["reply"]) => void
  /**
   * With the session, the hold was lost; whether the request can have been executed before. Without this, the next session
   * asks whether it was.
   */
  readonly moot?: (sent: boolean) => void
  readonly fail: (error: CoordinatorError) => void
}): void => {
  const { moot } = request
  if (claim.lost !== undefined && moot !== undefined) return moot(false)
  const concluded = claim.partition.concluding()
  claim.partition.request({
    ...request,
    key: claim.key,
    session: moot && claim.session,
    settle: (reply) => {
      concluded()
      claim.partition.claims.forget(claim)
      request.settle(reply)
    },
    moot: moot && ((sent) => {
      concluded()
      moot(sent)
    }),
    fail: (error) => {
      concluded()
      claim.partition.claims.release(claim, ignore)
      request.fail(error)
    }
  })
}

/** Asks for something that is not held: the answer is all there is to it. */
export const ask = <A, E>(
  { check, details, fail, member, place, verb }:
    & Pick<Acquire<E>, "check" | "details" | "fail" | "member" | "place">
    & { readonly verb: ClaimVerb },
  answer: (outcome: Settled, claim: Claim) => Effect.Effect<A, E>
): Effect.Effect<A, E> =>
  // One operation: between two of them an interruption could lose what the first has got.
  Effect.callback((resume) => {
    const claim = new Claim(place.partition, {
      key: place.key,
      verb,
      weight: 1,
      capacity: 0,
      wait: true,
      standing: false,
      details,
      check,
      member
    })
    claim.settle = (outcome) => resume(outcome[0] === "failed" ? Effect.fail(fail(outcome[1])) : answer(outcome, claim))
    place.partition.claims.take(claim)
    return Effect.sync(() => place.partition.claims.release(claim, ignore))
  })

/**
 * Waits for a grant and consumes it. The caller has it as soon as it is granted, and Redis is told behind its back: one round
 * trip less, for the case that a session which is lost in that moment leaves it to the next as well.
 */
export const consume = <E>(
  place: Place,
  verb: ClaimVerb,
  consumption: "signal.consume",
  fail: (error: CoordinatorError) => E
): Effect.Effect<void, E> =>
  ask({ place, verb, fail: (error) => fail(error as CoordinatorError) }, (_, claim) => {
    conclude(claim, {
      verb: consumption,
      args: [claim.id],
      settle: ignore,
      moot: ignore,
      fail: (error) => place.partition.kernel.log("Warn", "what was consumed is given back", error)
    })
    return Effect.void
  })

// -----------------------------------------------------------------------------
// Weight
// -----------------------------------------------------------------------------

/** Makes a hold lighter or heavier. Heavier fails with "conflict" unless it is possible at once. */
export const reweigh = (
  held: Held,
  weight: number
): Effect.Effect<"granted" | "conflict" | "absent", CoordinatorError> =>
  Effect.callback((resume) => {
    const { claim } = held
    if (!held.active || claim.session === undefined) return resume(Effect.succeed("absent"))
    claim.partition.request({
      verb: "semaphore.reweigh",
      key: claim.key,
      args: [claim.id, weight],
      session: claim.session,
      moot: () => resume(Effect.succeed("absent")),
      settle: (reply) => {
        if (reply[0] === "granted") {
          claim.weight = weight
          claim.token = Number(reply[1])
        }
        resume(Effect.succeed(reply[0]))
      },
      fail: (error) => resume(Effect.fail(error))
    })
  })

// -----------------------------------------------------------------------------
// Standing claims
// -----------------------------------------------------------------------------

/** Joins something for as long as a scope is open; after a loss of the session it is joined again by itself. */
export const membership = <E>(
  place: Place,
  verb: ClaimVerb,
  capacity: number,
  wait: Duration.Input | undefined,
  fail: (error: CoordinatorError | WaitTimeout) => E,
  options?: { readonly observation?: Observation; readonly details?: Details }
): Effect.Effect<readonly [Claim, Settled], E, Scope.Scope> =>
  Effect.uninterruptibleMask((restore) =>
    Effect.flatMap(Effect.scope, (scope) => {
      const claim = new Claim(place.partition, {
        key: place.key,
        verb,
        weight: 0,
        capacity,
        wait: true,
        standing: true,
        ...options
      })
      return Effect.flatMap(
        obtain(claim, place.name, restore, wait, fail),
        (outcome) => Effect.as(Scope.addFinalizer(scope, giveBack(claim)), [claim, outcome] as const)
      )
    })
  )
