/**
 * Lets `PersistedQueue` and `DurableQueue` of `effect` store their elements in queues of this library.
 *
 * **Guarantees**
 *
 * - An element is pushed to a process that takes: nothing polls.
 * - An `offer` is stored once, also when its reply is lost and it is sent again.
 * - The elements of a process that died go to others when its session ends: after the coordinator's `lease` at most.
 * - An interrupted `take` returns its element to the queue at once, and uses up no attempt.
 *
 * **Gotchas**
 *
 * - `timeToLive` of `PersistedQueue.layerCleanup` has no effect: a processed element leaves nothing behind but its custom id, for
 *   `retention`, whose default is that of `timeToLive`. Set `retention` where you would set `timeToLive`. `failedTimeToLive` works
 *   for the queues that this process uses.
 * - The custom id of a failed element is known for `retention` from its end, however long the element itself is kept. During that
 *   time, another offer with that id stores nothing, also when `failedTimeToLive` has removed the element. Afterwards, it is
 *   stored.
 * - An element that has failed as often as the `maxAttempts` of a process allows fails there for good, although other processes may allow
 *   more.
 * - The effect of `take` is not interrupted when the session is lost. The element may be delivered to another process then. That
 *   is logged as a warning, and counted (`lockstep_overruns`).
 * - A store that is closed gives the elements of its takers to others at once, though their effects run on. Close it when they have
 *   ended.
 * - The queue of a name is the `Queue` of that name in the same namespace. Offer to it, and work on it, with `PersistedQueue` only:
 *   this store decides about its limits.
 * - The name is that of a `Queue`: not empty, and up to 512 bytes.
 * - In the `Queue`, a custom id that a job cannot have has a `=` in front. One of more than 512 bytes is a hash.
 * - It belongs to the unstable part of `effect`, and may have to change with it.
 *
 * **Example** (A persisted queue)
 *
 * ```ts
 * import { Coordinator } from "lockstep"
 * import { layerStore } from "lockstep/effect/PersistedQueue"
 * import { Effect, Layer, Schema } from "effect"
 * import { PersistedQueue } from "effect/persistence"
 *
 * const program = Effect.gen(function*() {
 *   const mails = yield* PersistedQueue.make({ name: "mails", schema: Schema.Struct({ to: Schema.String }) })
 *   yield* mails.offer({ to: "ann@example.com" }, { id: "welcome-ann" })
 *   yield* mails.take(({ to }) => Effect.log(`to ${to}`))
 * })
 *
 * program.pipe(
 *   Effect.provide(
 *     PersistedQueue.layer.pipe(Layer.provide(layerStore()), Layer.provide(Coordinator.layerEmbedded()))
 *   ),
 *   Effect.runPromise
 * )
 * ```
 *
 * @since 0.1.0
 */

import * as Cause from "effect/Cause"
import * as Context from "effect/Context"
import * as Deferred from "effect/Deferred"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Layer from "effect/Layer"
import { PersistedQueueError, PersistedQueueStore } from "effect/persistence/PersistedQueue"
import * as Predicate from "effect/Predicate"
import * as Schema from "effect/Schema"
import * as Scope from "effect/Scope"
import { createHash } from "node:crypto"
import { Coordinator } from "../Coordinator.ts"
import { CoordinatorClosed } from "../internal/actor/errors.ts"
import { describe } from "../internal/hold/loss.ts"
import { millisOf, placeOf, type Space, spaceOf } from "../internal/hold/place.ts"
import type { Handling, Verdict } from "../internal/queue/attempts.ts"
import type { Crew } from "../internal/queue/crew.ts"
import { fail as queueError, QueueClosed } from "../internal/queue/errors.ts"
import type { Task } from "../internal/queue/job.ts"
import { ownOf } from "../internal/queue/naming.ts"
import { mostOverrun } from "../internal/queue/pool.ts"
import { crewOf } from "../internal/queue/worker.ts"
import { prettyOf, shortened } from "../internal/text.ts"
import { persevering } from "../internal/work/patience.ts"
import * as Queue from "../Queue.ts"

/**
 * @category options
 * @since 0.1.0
 */
export interface Options {
  /**
   * How long the custom id of a processed element is known, in place of `timeToLive`: at least this long, at most twice as long.
   * Another offer with that id stores nothing. Default 30 days. An element without a custom id costs nothing after it was
   * processed.
   */
  readonly retention?: Duration.Input | undefined
  /** How many elements that have failed are kept, and how long. Default: 10,000 for ever. */
  readonly letters?: Omit<NonNullable<Queue.Options<unknown>["letters"]>, "crashes"> | undefined
  /** Of each queue, as of a `Queue`: how many elements are with takers, or wait. Default: none. */
  readonly limits?: Queue.Options<unknown>["limits"]
  /** How long elements stay with a process that died. Default: that of the coordinator. */
  readonly lease?: Duration.Input | undefined
}

type Store = Context.Service.Shape<typeof PersistedQueueStore>
type TakeOptions = Parameters<Store["take"]>[0]
type Element = Effect.Success<ReturnType<Store["take"]>>

// `PersistedQueue` makes an id for each element that has none. A job's own `id` costs more: it is known for `retention`.
const Body = Schema.Struct({ element: Schema.Json, id: Schema.optionalKey(Schema.String) })

const [mark, mostBytes] = ["=", 512]

const fits = (id: string): boolean => id.isWellFormed() && Buffer.byteLength(id) <= mostBytes

/** The id of its job, which has a mark in front where the queue would not take it. The body has an id that only fits as a hash. */
const offered = (element: Schema.Json, id: string): readonly [body: typeof Body.Type, id: string] => {
  if (fits(id) && id !== "" && !id.startsWith(mark) && ownOf(id) === undefined) return [{ element }, id]
  const marked = mark + id
  if (fits(marked)) return [{ element }, marked]
  return [{ element, id }, `${mark}#${createHash("sha256").update(JSON.stringify(id)).digest("base64url")}`]
}

const failed = (what: string) => (cause: unknown) =>
  new PersistedQueueError({ message: `Failed to ${what} of a persisted queue`, cause })

// `PersistedQueue` does not export it.
const isDeadLetter = Predicate.isTagged("~effect/persistence/PersistedQueue/DeadLetter")

/** A `take`, from its beginning until its scope is closed. */
interface Taker {
  readonly options: TakeOptions
  readonly given: Deferred.Deferred<Element, PersistedQueueError>
  /** How its scope was closed. */
  readonly over: Deferred.Deferred<void, unknown>
}

/** The takers of one queue in this process share a worker, which has credit for as many as there are. */
class Takers {
  readonly worker: Crew
  readonly #space: Space
  readonly #waiting = new Set<Taker>()
  // Those that have an element, and which takers had which ones.
  readonly #given = new Set<Taker>()
  readonly #takers = new WeakMap<Task, Taker>()
  #shrinking = false
  // Why it gives no elements any more.
  #closed: PersistedQueueError | undefined = undefined

  constructor(space: Space, name: string, lease: Duration.Input | undefined) {
    this.#space = space
    const handling: Handling<never> = {
      attempt: (task) => this.#hand(task),
      judge: (task, { cause }) => this.#judge(task, cause)
    }
    this.worker = crewOf(
      { context: Context.empty(), handling, overrun: mostOverrun, lends: true },
      [placeOf(space, "queue", name, "name", lease)],
      0
    )
  }

  wait(taker: Taker): void {
    if (this.#closed !== undefined) return void Deferred.doneUnsafe(taker.given, Effect.fail(this.#closed))
    this.#waiting.add(taker)
    if (this.#wanted > this.worker.size) this.worker.resize(this.#wanted)
  }

  /** It waits no more, or its scope is closed. */
  leave(taker: Taker, exit: Exit.Exit<unknown, unknown>): void {
    this.#waiting.delete(taker)
    Deferred.doneUnsafe(taker.over, Exit.asVoid(exit))
    this.#shrink()
  }

  get #wanted(): number {
    return this.#waiting.size + this.#given.size
  }

  // Mostly, a taker whose element is done takes the next element at once.
  #shrink(): void {
    if (this.#shrinking) return
    this.#shrinking = true
    this.#space.kernel.io.after(1, () => {
      this.#shrinking = false
      if (this.#wanted < this.worker.size) this.worker.resize(this.#wanted)
    })
  }

  /**
   * The worker takes no more elements. It reports the outcomes of takers that have ended to Redis, and returns the other elements
   * to the queue. The effect ends when Redis knows that, or has been away for the coordinator's `requestTimeout`.
   */
  get stop(): Effect.Effect<void> {
    return Effect.suspend(() => {
      for (const taker of this.#given) this.leave(taker, Exit.interrupt())
      return this.worker.stop(this.#space.kernel.settings.requestTimeout)
    })
  }

  /** The coordinator is closed, or the store is. */
  close(cause: Queue.QueueError): void {
    const error = this.#closed ??= failed("take an element")(cause)
    for (const taker of this.#waiting) Deferred.doneUnsafe(taker.given, Effect.fail(error))
    this.#waiting.clear()
  }

  // The first that allows this attempt, or else the first.
  #takerOf(attempt: number): Taker | undefined {
    for (const taker of this.#waiting) if (attempt <= taker.options.maxAttempts) return taker
    return this.#waiting.values().next().value
  }

  #hand(task: Task): Effect.Effect<void, unknown> {
    const { attempt, body, crashes, id: given } = task
    const taker = this.#takerOf(attempt)
    // The element was on its way to a taker that waits no more.
    if (taker === undefined) return Effect.onInterrupt(Effect.interrupt, () => Effect.sync(() => this.#shrink()))
    this.#takers.set(task, taker)
    const { element, id = given.startsWith(mark) ? given.slice(mark.length) : given } = body as typeof Body.Type
    const { maxAttempts } = taker.options
    // The process that had its last attempt has died, or would have allowed more.
    if (attempt > maxAttempts) {
      const died = crashes === 0 ? "" : `, with which ${crashes} processes have died`
      return Effect.fail(`The element had ${attempt - 1} attempts${died}, and maxAttempts is ${maxAttempts} here`)
    }
    this.#waiting.delete(taker)
    this.#given.add(taker)
    Deferred.doneUnsafe(taker.given, Effect.succeed({ id, attempts: attempt, element }))
    const ended = Effect.sync(() => {
      this.#given.delete(taker)
      this.#shrink()
    })
    return Effect.ensuring(Deferred.await(taker.over), ended)
  }

  #judge(task: Task, cause: Cause.Cause<unknown>): Effect.Effect<Verdict> {
    const taker = this.#takers.get(task)
    if (taker === undefined || Cause.hasInterruptsOnly(cause)) {
      return Effect.succeed({ tag: "retry", delay: 0, attempted: false })
    }
    const letter = cause.reasons.find((reason) => Cause.isFailReason(reason) && isDeadLetter(reason.error))
    const bury = (reason: "failed" | "undecodable", cause: Cause.Cause<unknown>): Verdict => ({
      tag: "bury",
      reason,
      message: shortened(prettyOf(cause)),
      outcome: ""
    })
    if (letter !== undefined) {
      return Effect.succeed(bury("undecodable", (letter as Cause.Fail<{ cause: Cause.Cause<unknown> }>).error.cause))
    }
    const { maxAttempts, retryDelay } = taker.options
    if (task.attempt >= maxAttempts) return Effect.succeed(bury("failed", cause))
    return Effect.map(retryDelay(task.attempt), (delay) => ({
      tag: "retry",
      delay: millisOf(delay),
      attempted: true
    }))
  }
}

/** Makes one resource for each name, which stays while the scope is open. After a failure, the next caller makes it again. */
const oncePerName = <A, E>(
  scope: Scope.Scope,
  make: (name: string) => Effect.Effect<A, E, Scope.Scope>,
  closed: (name: string) => E
): {
  readonly known: ReadonlyMap<string, Deferred.Deferred<A, E>>
  readonly get: (name: string) => Effect.Effect<A, E>
} => {
  const known = new Map<string, Deferred.Deferred<A, E>>()
  const get = (name: string): Effect.Effect<A, E> =>
    Effect.suspend(() => {
      if (scope.state._tag === "Closed") return Effect.fail(closed(name))
      const found = known.get(name)
      if (found !== undefined) return Deferred.await(found)
      const made = Deferred.makeUnsafe<A, E>()
      known.set(name, made)
      const making = Effect.onExit(Scope.provide(make(name), scope), (exit) =>
        Effect.sync(() => {
          if (Exit.isFailure(exit)) known.delete(name)
          const isClosed = Exit.isFailure(exit) && Cause.hasInterruptsOnly(exit.cause)
          Deferred.doneUnsafe(made, isClosed ? Exit.fail(closed(name)) : exit)
        }))
      return Effect.andThen(Effect.forkIn(making, scope, { startImmediately: true }), Deferred.await(made))
    })
  return { known, get }
}

/** The takers of a queue, and their worker, for as long as the scope is open. */
const takersOf = (
  queue: Effect.Effect<unknown, Queue.QueueError>,
  space: Space,
  name: string,
  lease: Duration.Input | undefined,
  closed: (name: string) => Queue.QueueError
) => {
  const what = describe("queue", name, space.kernel.settings.namespace)
  const taking = Effect.gen(function*() {
    yield* queue
    const takers = new Takers(space, name, lease)
    const scope = yield* Effect.scope
    yield* Effect.uninterruptible(Effect.andThen(
      takers.worker.work(() => takers.close(closed(name)), queueError),
      Scope.addFinalizer(scope, Effect.andThen(takers.stop, Effect.sync(() => takers.close(closed(name)))))
    ))
    return takers
  })
  // A take waits for as long as there is nothing.
  return persevering(
    taking,
    (error) => Effect.logWarning(`nothing can be taken from ${what} yet: this process tries again`, error)
  )
}

/** Takes an element, which is handled when the scope closes. */
const take = <E>(options: Taker["options"], takers: Effect.Effect<Takers, E>) =>
  Effect.uninterruptibleMask((restore) =>
    Effect.gen(function*() {
      const scope = yield* Effect.scope
      const found = yield* Effect.mapError(restore(takers), failed("take an element"))
      const taker: Taker = { options, given: Deferred.makeUnsafe(), over: Deferred.makeUnsafe() }
      found.wait(taker)
      const given = yield* Effect.onExit(
        restore(Deferred.await(taker.given)),
        // An element that is delivered to a taker as it is interrupted returns to the queue.
        (exit) => Exit.isSuccess(exit) ? Effect.void : Effect.sync(() => found.leave(taker, exit))
      )
      yield* Scope.addFinalizerExit(scope, (exit) => Effect.sync(() => found.leave(taker, exit)))
      return given
    })
  )

/**
 * A `PersistedQueueStore` on the queues of a coordinator.
 *
 * @category layers
 * @since 0.1.0
 */
export const layerStore = (
  { lease, letters, limits, retention = "30 days" }: Options = {}
): Layer.Layer<PersistedQueueStore, never, Coordinator> =>
  Layer.effect(
    PersistedQueueStore,
    Effect.gen(function*() {
      const coordinator = yield* Coordinator
      const scope = yield* Effect.scope
      const space = spaceOf(coordinator)
      const { namespace } = space.kernel.settings
      const closed = (name: string) =>
        queueError(
          space.kernel.isClosing() ? new CoordinatorClosed({ namespace }) : new QueueClosed({ name, namespace })
        )
      const queues = oncePerName(scope, (name) =>
        Queue.make({
          name,
          payload: Body,
          shards: 1,
          lease,
          limits,
          retention,
          // How often an element may be attempted is not known here; a process that dies uses up an attempt.
          letters: { age: Duration.infinity, ...letters, crashes: 1000 }
        }).pipe(Effect.provideService(Coordinator, coordinator)), closed)
      const takers = oncePerName(scope, (name) => takersOf(queues.get(name), space, name, lease, closed), closed)
      return PersistedQueueStore.of({
        offer: ({ delay, element, id, isCustomId, name }) =>
          Effect.flatMap(queues.get(name), (queue) => {
            if (!isCustomId) return queue.offer({ element: element as Schema.Json, id }, { delay })
            const [body, own] = offered(element as Schema.Json, id)
            return queue.offer(body, { id: own, delay })
          }).pipe(
            Effect.asVoid,
            Effect.mapError(failed("offer an element"))
          ),
        take: (options) => take(options, takers.get(options.name)),
        cleanup: ({ failedTimeToLive }) =>
          failedTimeToLive === undefined || !Duration.isFinite(failedTimeToLive) ? Effect.void : Effect.forEach(
            [...queues.known.keys()],
            (name) =>
              Effect.flatMap(
                queues.get(name),
                (queue) => Duration.toMillis(failedTimeToLive) > 0 ? queue.clean(failedTimeToLive) : queue.discard()
              ),
            { discard: true }
          ).pipe(Effect.mapError(failed("remove elements")))
      })
    })
  )
