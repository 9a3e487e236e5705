/**
 * A lock that many readers or one writer hold, shared by several processes.
 *
 * **Guarantees**
 *
 * - First in, first out: a reader that comes after a waiting writer waits behind it, so that neither starves.
 * - Reading inside one's own read or write lock shares the hold. Writing inside one's own read lock upgrades it when no
 *   other reader holds it at that moment, and fails with `UpgradeConflict` otherwise. Neither ever deadlocks.
 * - Everything that `Lock` says of loss, interruption and crashes.
 *
 * **Gotchas**
 *
 * - On `UpgradeConflict`, leave the read lock, take the write lock, and read again: others may have written meanwhile.
 * - Fibers that share one read lock are one reader: what else they read under it goes on while one of them writes.
 * - Readers have tokens too, from the same sequence. Data that only writers write has to be fenced by writers' tokens alone.
 *
 * **Example** (Reading by many, writing by one)
 *
 * ```ts
 * import { ReadWriteLock } from "lockstep"
 * import { Effect } from "effect"
 *
 * const read = Effect.log("reading").pipe(ReadWriteLock.withReadLock("catalogue"))
 * const write = Effect.log("writing").pipe(ReadWriteLock.withWriteLock("catalogue"))
 * ```
 *
 * @since 0.1.0
 */

import * as Cause from "effect/Cause"
import type * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import type * as Fiber from "effect/Fiber"
import { dual } from "effect/Function"
import * as Option from "effect/Option"
import * as Schema from "effect/Schema"
import type * as Scope from "effect/Scope"
import type { Coordinator } from "./Coordinator.ts"
import { type CoordinatorError, coordinatorReasons } from "./internal/actor/errors.ts"
import * as acquiring from "./internal/hold/acquire.ts"
import { Hold } from "./internal/hold/hold.ts"
import { type Holder as AnyHolder, holdersOf, type Waiter as AnyWaiter, waitersOf } from "./internal/hold/holders.ts"
import { isBehind, type Point, pointOf } from "./internal/hold/holding.ts"
import { describe, LeaseLost, WaitTimeout } from "./internal/hold/loss.ts"
import { type Place, placeOf } from "./internal/hold/place.ts"
import { withHold, withinHold } from "./internal/hold/protect.ts"
import { fresh, request, targetOf } from "./internal/hold/request.ts"
import { spanned } from "./internal/hold/span.ts"
import * as permits from "./internal/sync/permits.ts"
import type { Lease } from "./Lease.ts"

/**
 * @category options
 * @since 0.1.0
 */
export interface Options {
  /** How long to wait for it; then it fails with `WaitTimeout`. Default: that of the coordinator, as long as it takes. */
  readonly wait?: Duration.Input | undefined
  /**
   * How long it may be held; then the holder is interrupted, and loses it with the reason `maxHold`. Default: that of the
   * coordinator, as long as the effect runs.
   */
  readonly maxHold?: Duration.Input | undefined
  /**
   * With `awaited`, the end of the effect, or of the scope, waits until Redis has released it. `background` saves that round
   * trip. The release goes with the next request of this process, or at once. Others may find it held for that moment. If the
   * process ends without closing its coordinator, they may find it held for the lease. Default `awaited`.
   */
  readonly release?: "awaited" | "background" | undefined
  /**
   * Keep the lock for a moment after its release. While the process takes it again in the same mode within 50 ms, it does so
   * without asking Redis. This ends when another claim needs the lock, and after 0.9 s at most. Many processes can keep a read
   * lock at a time. A process that ends without closing its coordinator may keep it for the lease. Default `false`.
   */
  readonly cached?: boolean | undefined
  /** How long it outlives a process that died. Default: the coordinator's lease. */
  readonly lease?: Duration.Input | undefined
  /**
   * For writing inside one's own write lock: share it. Default `false`: it fails with `AlreadyWriting`. A fiber that writes beside
   * another one, under a read lock that both share, fails with `UpgradeConflict` all the same.
   */
  readonly reentrant?: boolean | undefined
}

/**
 * The read lock could not become a write lock, because others read too, or another fiber writes that shares the read lock. Nothing has
 * changed.
 *
 * @category errors
 * @since 0.1.0
 */
export class UpgradeConflict extends Schema.Error<UpgradeConflict>("lockstep/ReadWriteLock/UpgradeConflict")({
  _tag: Schema.tag("UpgradeConflict"),
  key: Schema.String,
  namespace: Schema.String
}) {
  override get message(): string {
    const subject = describe("readWriteLock", this.key, this.namespace)
    return `Others read or write under ${subject} too, and two readers that wait for each other would never end: ` +
      `leave the read lock before writing.`
  }
}

/**
 * The fiber, or a parent of it, holds the write lock already, and `reentrant` was not set.
 *
 * @category errors
 * @since 0.1.0
 */
export class AlreadyWriting extends Schema.Error<AlreadyWriting>("lockstep/ReadWriteLock/AlreadyWriting")({
  _tag: Schema.tag("AlreadyWriting"),
  key: Schema.String,
  namespace: Schema.String
}) {
  override get message(): string {
    const subject = describe("readWriteLock", this.key, this.namespace)
    return `This fiber, or one that waits for it, writes under ${subject} already: nest it with \`reentrant: true\`.`
  }
}

/**
 * The lease is not a write lock that is held.
 *
 * @category errors
 * @since 0.1.0
 */
export class NotWriting extends Schema.Error<NotWriting>("lockstep/ReadWriteLock/NotWriting")({
  _tag: Schema.tag("NotWriting"),
  /** Of the lease: it may be that of another primitive. */
  kind: Schema.String,
  key: Schema.String,
  namespace: Schema.String
}) {
  override get message(): string {
    return `The lease of ${describe(this.kind, this.key, this.namespace)} is not a write lock that is held: ` +
      `downgrade the lease that \`acquireWrite\` has answered, before it is released.`
  }
}

/**
 * @category errors
 * @since 0.1.0
 */
export class ReadWriteLockError extends Schema.Error<ReadWriteLockError>("lockstep/ReadWriteLock/ReadWriteLockError")({
  _tag: Schema.tag("ReadWriteLockError"),
  reason: Schema.Union([LeaseLost, WaitTimeout, UpgradeConflict, AlreadyWriting, NotWriting, ...coordinatorReasons])
}) {
  override get message(): string {
    return this.reason.message
  }
}

// A writer weighs as much as all readers that there can be.
const everything = 2 ** 30

type Mode = "read" | "write"

/**
 * A process that reads or writes.
 *
 * @category models
 * @since 0.1.0
 */
export interface Holder extends Omit<AnyHolder, "weight"> {
  readonly mode: Mode
}

/**
 * A process that waits to read or to write.
 *
 * @category models
 * @since 0.1.0
 */
export interface Waiter extends Omit<AnyWaiter, "weight"> {
  readonly mode: Mode
}

const fail = (reason: ReadWriteLockError["reason"]): ReadWriteLockError => new ReadWriteLockError({ reason })

const busy = () => Effect.succeed(undefined)

const taking = (
  place: Place,
  mode: Mode,
  wait: boolean,
  options: Options | undefined
): acquiring.Acquire<ReadWriteLockError> =>
  permits.taking(place, mode === "read" ? 1 : everything, everything, wait, { options, fail, refuse: busy })

/** How one hold is changed between reading and writing. */
class Changes {
  /** The effects that write under it since it was made a write lock for the first of them. */
  readonly writers = new Set<Writer>()
  /** Those whose writing a downgrade ends, unless Redis refuses it. */
  downgraded: ReadonlyArray<Writer> = []
  /** So many requests to make it lighter are not answered. */
  lightening = 0
  /** One of them was refused, and has to be made again. */
  isOwed = false
}

/** An effect that writes under a read lock. */
class Writer {
  ended = false
  /** It runs behind this point, when the lock is a write lock. */
  begun: Point | undefined = undefined
}

const known = new WeakMap<Hold, Changes>()

const changesOf = (hold: Hold): Changes => {
  let changes = known.get(hold)
  if (changes === undefined) known.set(hold, changes = new Changes())
  return changes
}

/** Whether it is a write lock, and stays one: a request to make it lighter may be on its way to Redis. */
const isHeavy = (hold: Hold): boolean => hold.weight === everything && changesOf(hold).lightening === 0

/** Whether it is a write lock, or is being made one. */
const isWriting = (hold: Hold): boolean => isHeavy(hold) || changesOf(hold).writers.size > 0

/** Whether others write under the read lock that the fiber shares with them, and the fiber is not a part of what they do. */
const isBeside = (fiber: Fiber.Fiber<unknown, unknown>, { writers }: Changes): boolean =>
  writers.size > 0 && [...writers].every(({ begun }) => begun === undefined || !isBehind(fiber, begun))

/**
 * Makes a hold lighter or heavier. Heavier fails with "conflict" unless it is possible at once. Redis executes these in order. One that
 * insists is made again when Redis has refused it, as for a missing permission.
 */
const reweigh = (
  hold: Hold,
  mode: Mode,
  insists = false
): Effect.Effect<"granted" | "conflict" | "absent", ReadWriteLockError> => {
  const target = targetOf(hold)
  const isLighter = mode === "read"
  const weight = isLighter ? 1 : everything
  const changes = changesOf(hold)
  const asked = fresh(target, (anyway) =>
    Effect.suspend(() => {
      if (!hold.active) return Effect.succeed(["absent"] as const)
      // A lock that this process keeps would be in the way.
      target.tenancy.kept.cease(hold.stretch)
      target.tenancy.kept.surrenderResting(target.key)
      if (isLighter) {
        hold.weight = weight
        if (changes.isOwed) changes.isOwed = false
        else changes.lightening++
      }
      return request(target, "semaphore.reweigh", [hold.id, weight, anyway], {
        session: hold.session,
        moot: () => ["absent"] as const,
        // Whether the hold is heavier must not stay unknown: while Redis is away, nor when the fiber is interrupted.
        persists: true,
        refused: ({ reason }, sent) => {
          if (!isLighter) return
          const { downgraded } = changes
          changes.downgraded = []
          // Its writing has ended meanwhile, which nothing else says to Redis.
          const isOver = downgraded.length > 0 && downgraded.every(({ ended }) => ended)
          if (insists || sent || isOver) {
            if (changes.isOwed) changes.lightening--
            changes.isOwed = true
            if (reason._tag !== "ActorDefect") lightenLater(hold)
          } else {
            changes.lightening--
            hold.weight = everything
            for (const writer of downgraded) if (!writer.ended) changes.writers.add(writer)
          }
        },
        answered: (reply) => {
          if (isLighter) {
            changes.lightening--
            changes.downgraded = []
          }
          if (reply[0] !== "granted") return
          hold.weight = weight
          if (isLighter) return
          hold.token = Number(reply[1])
          // Redis knows it by this token, and not by the first of what the process might have kept.
          hold.stretch = undefined
        }
      })
    }))
  return Effect.mapBoth(asked, { onFailure: ({ reason }) => fail(reason), onSuccess: ([outcome]) => outcome })
}

// Unless it writes again by then.
const lightenLater = (hold: Hold): void => {
  const { channel, kernel: { io } } = targetOf(hold).tenancy
  io.after(channel.retryPause, () => {
    const { isOwed, writers } = changesOf(hold)
    if (hold.active && isOwed && writers.size === 0) io.run(Effect.ignore(reweigh(hold, "read", true)))
  })
}

/** One effect more writes under a read lock, unless others read or write there. Answers whether it does. */
const upgrade = (reading: Hold, writer: Writer): Effect.Effect<boolean, ReadWriteLockError> =>
  Effect.withFiber<boolean, ReadWriteLockError>((fiber) => {
    const changes = changesOf(reading)
    if (isBeside(fiber, changes)) return Effect.succeed(false)
    changes.writers.add(writer)
    if (isHeavy(reading)) return Effect.succeed(true)
    return Effect.flatMap(reweigh(reading, "write"), (outcome) =>
      outcome === "absent"
        ? Effect.fail(fail(reading.lossError("closed")))
        : Effect.succeed(outcome === "granted")).pipe(
        Effect.onExit((exit) => {
          if (Exit.isSuccess(exit)) return exit.value ? Effect.void : lighten(reading, writer, exit, false)
          // Redis may still make it heavier, unless the hold is lost.
          const lost = Cause.findErrorOption(exit.cause).pipe(
            Option.exists(({ reason }) => reason._tag === "LeaseLost")
          )
          return lighten(reading, writer, exit, !lost)
        })
      )
  })

/** The result where a read lock could not be upgraded. */
const refused = (reading: Hold, wait: boolean): Effect.Effect<Option.Option<never>, ReadWriteLockError> =>
  wait
    ? Effect.fail(fail(new UpgradeConflict({ key: reading.key, namespace: reading.claim.place.namespace })))
    : Effect.succeedNone

/** The last of these effects makes it a read lock again. One that has failed, or was interrupted, does not wait for that. */
const lighten = (
  reading: Hold,
  writer: Writer,
  exit: Exit.Exit<unknown, unknown>,
  mayBeHeavy = isHeavy(reading) || changesOf(reading).isOwed
): Effect.Effect<void> =>
  Effect.suspend(() => {
    const { writers } = changesOf(reading)
    writer.ended = true
    // A downgrade has ended the writing of all of them.
    if (!writers.delete(writer) || writers.size > 0 || !mayBeHeavy) return Effect.void
    const lightened = Effect.ignore(reweigh(reading, "read", true))
    return Exit.isSuccess(exit) ? lightened : Effect.asVoid(Effect.forkDetach(lightened))
  })

/** From here on, the fiber that runs this writes. */
const begin = (writer: Writer): Effect.Effect<void> =>
  Effect.withFiber((fiber) => {
    writer.begun = pointOf(fiber)
    return Effect.void
  })

interface Cases<A, E, R> {
  readonly share: (hold: Hold) => Effect.Effect<A, E, R>
  readonly take: (place: Place) => Effect.Effect<A, E, R>
  readonly upgraded: (hold: Hold) => Effect.Effect<A, E, R>
}

const nested = <A, E, R>(
  span: string,
  key: string,
  mode: Mode,
  options: Options | undefined,
  { share, take, upgraded }: Cases<A, E, R>
): Effect.Effect<A, E | ReadWriteLockError, R | Coordinator> =>
  acquiring.use<A, E | ReadWriteLockError, R>((fiber, space) => {
    acquiring.check(options)
    const place = placeOf(space, "readWriteLock", key, "key", options?.lease)
    const reentrant = mode === "read" || options?.reentrant === true
    const run = (found: Hold | undefined): Effect.Effect<A, E | ReadWriteLockError, R> => {
      if (found === undefined) return take(place)
      if (mode === "read") return share(found)
      if (!isWriting(found) || isBeside(fiber, changesOf(found))) return upgraded(found)
      if (!reentrant) return Effect.fail(fail(new AlreadyWriting({ key, namespace: space.kernel.settings.namespace })))
      return changesOf(found).writers.size === 0 ? share(found) : upgraded(found)
    }
    return acquiring.nested(
      fiber,
      place,
      reentrant,
      (found) => spanned(fiber, run(found), `lockstep.ReadWriteLock.${span}`, "readWriteLock", key)
    )
  })

const withMode = <A, E, R>(
  self: Effect.Effect<A, E, R>,
  key: string,
  mode: Mode,
  wait: boolean,
  options: Options | undefined
): Effect.Effect<Option.Option<A>, E | ReadWriteLockError, R | Coordinator> => {
  const body = Effect.asSome(self)
  return nested<Option.Option<A>, E | ReadWriteLockError, R>(mode, key, mode, options, {
    share: (shared) => withinHold(body, shared, fail),
    take: (place) =>
      Effect.map(withHold(body, taking(place, mode, wait, options)), (result) => result ?? Option.none()),
    upgraded: (reading) =>
      Effect.suspend(() => {
        const writer = new Writer()
        return Effect.onExit(
          Effect.flatMap(
            upgrade(reading, writer),
            (writes) => writes ? withinHold(Effect.andThen(begin(writer), body), reading, fail) : refused(reading, wait)
          ),
          (exit) => lighten(reading, writer, exit)
        )
      })
  })
}

const acquireMode = (
  span: string,
  key: string,
  mode: Mode,
  wait: boolean,
  options: Options | undefined
): Effect.Effect<Option.Option<Lease>, ReadWriteLockError, Coordinator | Scope.Scope> =>
  nested<Option.Option<Lease>, ReadWriteLockError, Scope.Scope>(span, key, mode, options, {
    share: (shared) => Effect.asSome(acquiring.shareScoped(shared)),
    take: (place) => Effect.map(acquiring.acquireScoped(taking(place, mode, wait, options)), Option.fromUndefinedOr),
    upgraded: (reading) =>
      Effect.suspend(() => {
        const writer = new Writer()
        return Effect.flatMap(
          Effect.andThen(
            // Before it is asked: it may be interrupted at the moment of the answer.
            Effect.addFinalizer((exit) => lighten(reading, writer, exit)),
            upgrade(reading, writer)
          ),
          (writes) =>
            writes
              ? Effect.asSome(Effect.andThen(begin(writer), acquiring.shareScoped(reading)))
              : refused(reading, wait)
        )
      })
  })

/** A claim that waits is granted in the end. */
const granted = <A, E, R>(self: Effect.Effect<Option.Option<A>, E, R>): Effect.Effect<A, E, R> =>
  Effect.map(self, Option.getOrThrow)

type With<O> = {
  <A, E, R>(
    self: Effect.Effect<A, E, R>,
    key: string,
    options?: O | undefined
  ): Effect.Effect<A, E | ReadWriteLockError, R | Coordinator>
  (
    key: string,
    options?: O | undefined
  ): <A, E, R>(self: Effect.Effect<A, E, R>) => Effect.Effect<A, E | ReadWriteLockError, R | Coordinator>
}

type WithIfAvailable<O> = {
  <A, E, R>(
    self: Effect.Effect<A, E, R>,
    key: string,
    options?: O | undefined
  ): Effect.Effect<Option.Option<A>, E | ReadWriteLockError, R | Coordinator>
  (
    key: string,
    options?: O | undefined
  ): <A, E, R>(
    self: Effect.Effect<A, E, R>
  ) => Effect.Effect<Option.Option<A>, E | ReadWriteLockError, R | Coordinator>
}

const isDataFirst = (args: IArguments) => Effect.isEffect(args[0])

/**
 * Runs an effect while holding the read lock. Inside one's own read or write lock it shares that.
 *
 * @category combinators
 * @since 0.1.0
 */
export const withReadLock: With<Omit<Options, "reentrant">> = dual(
  isDataFirst,
  (self: Effect.Effect<unknown>, key: string, options?: Options) => granted(withMode(self, key, "read", true, options))
)

/**
 * As `withReadLock` if it can be had now; otherwise `None`, and the effect does not run.
 *
 * @category combinators
 * @since 0.1.0
 */
export const withReadLockIfAvailable: WithIfAvailable<Omit<Options, "reentrant" | "wait">> = dual(
  isDataFirst,
  (self: Effect.Effect<unknown>, key: string, options?: Options) => withMode(self, key, "read", false, options)
)

/**
 * Runs an effect while holding the write lock. Inside one's own read lock it upgrades that for the time, or fails with
 * `UpgradeConflict`.
 *
 * @category combinators
 * @since 0.1.0
 */
export const withWriteLock: With<Options> = dual(
  isDataFirst,
  (self: Effect.Effect<unknown>, key: string, options?: Options) => granted(withMode(self, key, "write", true, options))
)

/**
 * As `withWriteLock` if it can be had now; otherwise `None`, and the effect does not run.
 *
 * @category combinators
 * @since 0.1.0
 */
export const withWriteLockIfAvailable: WithIfAvailable<Omit<Options, "wait">> = dual(
  isDataFirst,
  (self: Effect.Effect<unknown>, key: string, options?: Options) => withMode(self, key, "write", false, options)
)

/**
 * Acquires the read lock for as long as the scope is open. See `Lock.acquire` for what happens on loss.
 *
 * @category constructors
 * @since 0.1.0
 */
export const acquireRead = (
  key: string,
  options?: Omit<Options, "reentrant"> | undefined
): Effect.Effect<Lease, ReadWriteLockError, Coordinator | Scope.Scope> =>
  granted(acquireMode("acquireRead", key, "read", true, options))

/**
 * As `acquireRead` if it can be had now; otherwise `None`.
 *
 * @category constructors
 * @since 0.1.0
 */
export const acquireReadIfAvailable = (
  key: string,
  options?: Omit<Options, "reentrant" | "wait"> | undefined
): Effect.Effect<Option.Option<Lease>, ReadWriteLockError, Coordinator | Scope.Scope> =>
  acquireMode("acquireReadIfAvailable", key, "read", false, options)

/**
 * Acquires the write lock for as long as the scope is open. See `Lock.acquire` for what happens on loss.
 *
 * @category constructors
 * @since 0.1.0
 */
export const acquireWrite = (
  key: string,
  options?: Options | undefined
): Effect.Effect<Lease, ReadWriteLockError, Coordinator | Scope.Scope> =>
  granted(acquireMode("acquireWrite", key, "write", true, options))

/**
 * As `acquireWrite` if it can be had now; otherwise `None`.
 *
 * @category constructors
 * @since 0.1.0
 */
export const acquireWriteIfAvailable = (
  key: string,
  options?: Omit<Options, "wait"> | undefined
): Effect.Effect<Option.Option<Lease>, ReadWriteLockError, Coordinator | Scope.Scope> =>
  acquireMode("acquireWriteIfAvailable", key, "write", false, options)

/**
 * Makes a write lock a read lock without a release: no other writer gets in between, and readers that wait come
 * in at once. It keeps its token.
 *
 * @category combinators
 * @since 0.1.0
 */
export const downgrade = (lease: Lease): Effect.Effect<void, ReadWriteLockError> =>
  Effect.suspend(() => {
    if (!(lease instanceof Hold)) throw new TypeError("This lease was not made by Lockstep")
    if (lease.kind !== "readWriteLock" || !lease.active || !isHeavy(lease)) {
      const { claim: { place: { namespace } }, key, kind } = lease
      return Effect.fail(fail(new NotWriting({ kind, key, namespace })))
    }
    const changes = changesOf(lease)
    changes.downgraded = [...changes.writers]
    changes.writers.clear()
    return Effect.flatMap(reweigh(lease, "read"), (outcome) =>
      outcome === "granted" ? Effect.void : Effect.fail(fail(lease.lossError("closed"))))
  })

const inspecting = <A extends { readonly weight: number }>(
  key: string,
  inspect: (place: Place) => Effect.Effect<ReadonlyArray<A>, CoordinatorError>
): Effect.Effect<ReadonlyArray<Omit<A, "weight"> & { readonly mode: Mode }>, ReadWriteLockError, Coordinator> =>
  acquiring.use((_, space) =>
    Effect.mapBoth(inspect(placeOf(space, "readWriteLock", key, "key")), {
      onFailure: ({ reason }) => fail(reason),
      onSuccess: (all) =>
        all.map(({ weight, ...rest }) => ({
          ...rest,
          mode: weight === everything ? "write" as const : "read" as const
        }))
    })
  )

/**
 * The processes that read or write now, in no order, for people; up to 1,000.
 *
 * @category accessors
 * @since 0.1.0
 */
export const holders = (key: string): Effect.Effect<ReadonlyArray<Holder>, ReadWriteLockError, Coordinator> =>
  inspecting(key, (place) => holdersOf(place, "semaphore.holders"))

/**
 * The processes that wait to read or to write now, the next one first; up to 1,000.
 *
 * @category accessors
 * @since 0.1.0
 */
export const waiting = (key: string): Effect.Effect<ReadonlyArray<Waiter>, ReadWriteLockError, Coordinator> =>
  inspecting(key, (place) => waitersOf(place, "semaphore.waiters"))
