/**
 * A program that runs on exactly one process of many, or a schedule whose every tick runs on one of them.
 *
 * **Guarantees**
 *
 * - One at a time: the others stand by, first in first out, and the next one begins when the process that runs it ends or
 *   loses its lease. It is interrupted before another begins, see `Leader`.
 * - A tick of `schedule` runs at most once, across all processes and fail-overs: it is claimed by compare-and-set before it
 *   runs. A process that dies in the middle of a tick has begun it, and nobody else begins it again.
 * - Ticks never overlap.
 *
 * **Gotchas**
 *
 * - A program that ends with success stays where it was: no other process runs it while this one lives.
 * - A tick that fails is logged, and the schedule goes on. Retry inside of the effect what has to be retried.
 * - Ticks that were due while nobody lived to run them, or while an earlier one still ran, are left out; see `missed`.
 * - When Redis loses its data, which ticks were claimed is lost with it.
 * - The times of a `Cron` are compared by the clocks of the processes. A clock that is ahead runs a tick early, never twice.
 *
 * **Example** (A report every night, whichever of the processes is there)
 *
 * ```ts
 * import { Coordinator, Singleton } from "lockstep"
 * import { Cron, Effect, Layer } from "effect"
 *
 * const Report = Singleton.schedule("report", Effect.log("making the report"), Cron.parseUnsafe("0 2 * * *", "UTC"))
 *
 * const main = Report.pipe(Layer.provide(Coordinator.layerEmbedded()))
 *
 * Effect.runPromise(Layer.launch(main))
 * ```
 *
 * @since 0.1.0
 */
import * as Cause from "effect/Cause"
import * as Clock from "effect/Clock"
import type * as Context from "effect/Context"
import * as Cron from "effect/Cron"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Pull from "effect/Pull"
import * as Schedule from "effect/Schedule"
import type * as Scope from "effect/Scope"
import { Coordinator } from "./Coordinator.ts"
import { type CoordinatorError, coordinatorError } from "./internal/actor/errors.ts"
import { kernelOf } from "./internal/actor/kernel.ts"
import * as held from "./internal/hold/held.ts"
import type { LeaseLost, WaitTimeout } from "./internal/hold/loss.ts"
import { lead } from "./internal/leading.ts"
import { restart } from "./internal/restart.ts"

/**
 * @category options
 * @since 0.1.0
 */
export interface Options<R = never> {
  /**
   * When a program that has failed is run again, by whoever is next in line; a defect counts as a failure. Default: after 1
   * second, then twice as long each time, up to 1 minute; after 1 second again when it has not failed for 2 minutes.
   */
  readonly restart?: Schedule.Schedule<unknown, unknown, never, R> | undefined
}

/**
 * @category options
 * @since 0.1.0
 */
export interface ScheduleOptions {
  /**
   * What becomes of ticks that were due while nobody ran them: left out (`skip`, the default), or made up for by one run
   * (`once`), however many they were. Before the first tick ever, none was missed.
   */
  readonly missed?: "skip" | "once" | undefined
  /**
   * How long the last tick is remembered when no other follows. Default: twice the time between it and the next, but not less than 1
   * day.
   */
  readonly keep?: Duration.Input | undefined
}

const day = 86_400_000

const nothing = () => {}

/**
 * Runs a program on one process of all that provide this layer under the same name, for as long as the layer lives. Its
 * finalizers run when the program ends or is interrupted. The fencing token is that of `Lease.current`.
 *
 * @category layers
 * @since 0.1.0
 */
export const make = <E, R, R2 = never>(
  name: string,
  run: Effect.Effect<unknown, E, R>,
  options?: Options<R2>
): Layer.Layer<never, never, Coordinator | Exclude<R, Scope.Scope> | R2> =>
  Layer.effectDiscard(
    Effect.flatMap(Coordinator, (coordinator) => {
      const place = held.placeOf(kernelOf(coordinator), "singleton", name, "name")
      const quoted = JSON.stringify(name)
      // Having ended it keeps its place, so that no other runs it.
      return lead(Effect.andThen(Effect.scoped(run), Effect.never), {
        place,
        value: "null",
        wait: undefined,
        again: false,
        span: "lockstep.Singleton",
        begin: () => nothing,
        fail: (error: CoordinatorError | LeaseLost | WaitTimeout) => error
      }).pipe(
        Effect.tapCause((cause) => Effect.logError(`the singleton ${quoted} has failed`, cause)),
        // Also after a defect, or having interrupted itself: otherwise no process would run it any more.
        Effect.catchCause((cause) => Effect.fail(Cause.squash(cause))),
        Effect.retry((options?.restart ?? restart) as Schedule.Schedule<unknown, unknown, never, R2>),
        Effect.exit,
        Effect.forkScoped
      )
    })
  )

/**
 * Runs an effect at the times of a schedule, each time on one process of all that provide this layer under the same name.
 *
 * A `Cron` means the same times for all processes. A `Schedule` begins anew with each process that takes over, with its first
 * tick as long after the last one of the former process as the schedule says.
 *
 * @category layers
 * @since 0.1.0
 */
export const schedule = <E, R, R2 = never>(
  name: string,
  run: Effect.Effect<unknown, E, R>,
  times: Schedule.Schedule<unknown, void, never, R2> | Cron.Cron,
  options?: ScheduleOptions
): Layer.Layer<never, never, Coordinator | Exclude<R, Scope.Scope> | R2> => {
  const keep = options?.keep === undefined ? undefined : held.millis(options.keep, "keep")
  const tick = Effect.catchCause(
    Effect.scoped(run),
    (cause) =>
      Cause.hasInterrupts(cause)
        ? Effect.failCause(cause)
        : Effect.logError(`a tick of the singleton ${JSON.stringify(name)} has failed`, cause)
  )
  return make(
    name,
    Effect.gen(function*() {
      const kernel = kernelOf(yield* Coordinator)
      const place = held.placeOf(kernel, "tick", name, "name")
      const term = yield* Effect.withFiber((fiber) =>
        Effect.succeed(held.findHeld(fiber, held.placeOf(kernel, "singleton", name, "name")))
      )
      const next = yield* Cron.isCron(times) ? Effect.succeed(ofCron(times)) : ofSchedule(times)
      let last = yield* lastTick(place)
      let mine = false
      for (;;) {
        const now = yield* Clock.currentTimeMillis
        const found: Times | undefined = yield* next(last, now, mine)
        if (found === undefined) return
        const due: number = found.due >= now ? found.due : options?.missed === "once" ? now : found.later
        yield* Effect.sleep(Duration.millis(Math.max(0, due - now)))
        const memory = keep ?? Math.max(day, Math.ceil(2 * (due - (last ?? now))))
        const taken: number | undefined = yield* claim(place, term, last, due, memory)
        mine = taken === undefined
        last = mine ? due : taken
        if (mine) yield* tick
      }
    }),
    undefined
  ) as Layer.Layer<never, never, Coordinator | Exclude<R, Scope.Scope> | R2>
}

interface Times {
  /** The first tick after the last one. */
  readonly due: number
  /** The first one after now. */
  readonly later: number
}

/** All in milliseconds of the clock; `mine` says that the last tick was this process's own. */
type Next = (last: number | undefined, now: number, mine: boolean) => Effect.Effect<Times | undefined>

const ofCron = (cron: Cron.Cron): Next => (last, now) =>
  Effect.sync(() => {
    const after = (millis: number) => Cron.next(cron, new Date(millis)).getTime()
    return { due: after(last ?? now), later: after(Math.max(now, last ?? now)) }
  })

const ofSchedule = <R>(times: Schedule.Schedule<unknown, void, never, R>): Effect.Effect<Next, never, R> =>
  Effect.contextWith((context: Context.Context<R>) =>
    Effect.map(Schedule.toStep(times), (step) => (last, now, mine) =>
      step(now, undefined).pipe(
        Effect.map(([, delay]) => {
          const later = now + Duration.toMillis(delay)
          return { due: mine || last === undefined ? later : last + Duration.toMillis(delay), later }
        }),
        Pull.catchDone(() => Effect.succeed(undefined)),
        Effect.provideContext(context)
      ))
  )

const lastTick = ({ key, partition }: held.Place): Effect.Effect<number | undefined, CoordinatorError> =>
  Effect.map(
    Effect.tryPromise({
      try: () => partition.kernel.inspect(partition, { verb: "singleton.last", key, args: [] }),
      catch: coordinatorError
    }),
    ([, tick]) => tick === "" ? undefined : Number(tick)
  )

/** Answers the tick that somebody else has claimed since the last one, if there is one. */
const claim = (
  { key, partition }: held.Place,
  term: held.Held | undefined,
  last: number | undefined,
  due: number,
  keep: number
): Effect.Effect<number | undefined, CoordinatorError> =>
  Effect.callback((resume) =>
    partition.request({
      verb: "singleton.claim",
      key,
      args: [last === undefined ? "" : String(last), String(due), keep],
      // Whoever has lost the lease is interrupted, and does not run it.
      session: term?.claim.session,
      moot: nothing,
      settle: (reply) => resume(Effect.succeed(reply[0] === "taken" ? Number(reply[1]) : undefined)),
      fail: (error) => resume(Effect.fail(error))
    })
  )
