/**
 * A program that runs on exactly one process of many, or a schedule whose every tick runs on one of them.
 *
 * **Guarantees**
 *
 * - One at a time. The others stand by, first in first out. The next one begins when the process that runs the program ends or
 *   loses its lease. The program is interrupted before another begins, see `Election`.
 * - A tick of `schedule` runs at most once, across all processes and fail-overs: it is claimed by compare-and-set before it
 *   runs. A process that dies in the middle of a tick has begun it, and no other process begins it again.
 * - Ticks never overlap.
 *
 * **Gotchas**
 *
 * - A program that ends with success stays where it was: no other process runs it while this one lives.
 * - A program and a schedule of the same name share one leadership: while the program has it, the schedule never ticks. Nothing
 *   reports that, so give them different names.
 * - A tick that fails is logged, and the schedule goes on. Retries, where needed, belong inside of the effect.
 * - Ticks of a calendar that were due while no process lived to run them, or while an earlier one still ran, are left out; see
 *   `missed`. A `Schedule` of intervals is asked when a tick ends, so none is missed while one runs.
 * - Other processes stand by for as long as it takes: the `wait` and `maxHold` of the coordinator do not count here.
 * - When Redis loses its data, which ticks were claimed is lost with it.
 * - The times of a calendar are compared by the clocks of the processes. A clock that is ahead runs a tick early, never twice:
 *   behind that, no process runs a tick before its own clock has reached the time of it. A clock that is set is noticed within
 *   5 seconds, or within 1 minute when the tick is far away. Ticks that it was set past are missed. A `Schedule` of intervals
 *   waits for no clock.
 *
 * **Example** (A report every night, on any process that is there)
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
import * as Cron from "effect/Cron"
import type * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Schedule from "effect/Schedule"
import type * as Scope from "effect/Scope"
import { Coordinator } from "./Coordinator.ts"
import { CoordinatorError } from "./internal/actor/errors.ts"
import { lead, standingBy } from "./internal/election/leading.ts"
import { restart } from "./internal/election/restart.ts"
import { ofCron, ofSchedule, type Tick } from "./internal/election/ticks.ts"
import { type Failure, use } from "./internal/hold/acquire.ts"
import type { Hold } from "./internal/hold/hold.ts"
import { findHold } from "./internal/hold/holding.ts"
import { describe, type LeaseLost, type WaitTimeout } from "./internal/hold/loss.ts"
import { millis, oneOf, type Place, placeOf, spaceOf } from "./internal/hold/place.ts"
import { question, request } from "./internal/hold/request.ts"
import { logFailure } from "./internal/text.ts"
import { cronOf } from "./internal/work/cron.ts"
import { untilBack } from "./internal/work/patience.ts"

interface CommonOptions {
  /**
   * How long a process that died keeps its successor waiting. Default: the coordinator's lease. Another one is a second
   * session, which is renewed by itself.
   */
  readonly lease?: Duration.Input | undefined
}

/**
 * @category options
 * @since 0.1.0
 */
export interface Options<R = never> extends CommonOptions {
  /**
   * When a program that has failed is run again, by the next process in line; a defect counts as a failure. Default: after 1
   * second, then twice as long each time, up to 1 minute. It is 1 second again when the program has not failed for 2 minutes.
   */
  readonly restart?: Schedule.Schedule<unknown, unknown, never, R> | undefined
}

/**
 * @category options
 * @since 0.1.0
 */
export interface ScheduleOptions extends CommonOptions {
  /**
   * What to do with ticks that were due while no process ran them, or while an earlier one still ran. `skip`, the default, leaves
   * them out. `once` makes up for them by one run, however many they were. Before the first tick ever, none was missed. A
   * `Schedule` of intervals is asked for its next tick when one ends, so none is missed meanwhile.
   */
  readonly missed?: "skip" | "once" | undefined
  /**
   * How long Redis keeps the last tick when no other follows. Default: twice the time between it and the next, but not less
   * than 1 day. The next tick of a `Schedule` is taken to come as late as that one has come.
   */
  readonly timeToLive?: Duration.Input | undefined
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
      const again = options?.restart ?? restart
      if (!Schedule.isSchedule(again)) throw new RangeError("restart must be a Schedule")
      const place = placeOf(spaceOf(coordinator), "singleton", name, "name", options?.lease)
      // A program that has ended keeps its place, so that no other process runs it.
      return lead(Effect.andThen(Effect.scoped(run), Effect.never), {
        place: standingBy(place),
        value: "null",
        wait: undefined,
        forever: false,
        span: "lockstep.Singleton",
        begin: () => nothing,
        fail: errorOf
      }).pipe(
        Effect.tapCause((cause) => logFailure(`${describe("singleton", name, place.namespace)} has failed`, cause)),
        // Also after a defect, or having interrupted itself: otherwise no process would run it any more.
        Effect.catchCause((cause) => Effect.fail(Cause.squash(cause))),
        Effect.retry(again as Schedule.Schedule<unknown, unknown, never, R2>),
        Effect.exit,
        Effect.forkScoped
      )
    })
  )

const errorOf = (error: Failure): CoordinatorError | LeaseLost | WaitTimeout =>
  error._tag === "LeaseLost" || error._tag === "WaitTimeout" ? error : new CoordinatorError({ reason: error })

/**
 * Runs an effect at the times of a schedule, each time on one process of all that provide this layer under the same name.
 *
 * A `Cron` means the same times for all processes: it counts in its own time zone, and without one in UTC. One that has no
 * times, such as a 30 February, is a `RangeError`.
 *
 * A `Schedule` begins anew with each process that takes over. Its first tick is as long after the last one of the former
 * process as the schedule says. A `Schedule` such as `Schedule.cron` is a calendar: asked a millisecond later, it answers the
 * same first time. Each process asks it so when it takes over. Any other `Schedule` has intervals.
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
  const { lease, missed = "skip" } = options ?? {}
  oneOf(missed, "missed", ["skip", "once"])
  if (!Cron.isCron(times) && !Schedule.isSchedule(times)) throw new RangeError("times must be a Schedule or a Cron")
  const sure = Cron.isCron(times) ? cronOf(times) : times
  const timeToLive = options?.timeToLive === undefined ? undefined : millis(options.timeToLive, "timeToLive")
  const tick = (namespace: string) =>
    // An interruption of this fiber is not caught.
    Effect.catchCause(
      Effect.scoped(run),
      (cause) => logFailure(`a tick of ${describe("singleton", name, namespace)} has failed`, cause)
    )
  const ticks = (place: Place, term: Hold) =>
    Effect.gen(function*() {
      const { next, wait } = yield* Cron.isCron(sure) ? Effect.succeed(ofCron(sure, missed)) : ofSchedule(sure, missed)
      let last = yield* lastTick(place)
      let mine = false
      for (;;) {
        const now = yield* Clock.currentTimeMillis
        const found: Tick | undefined = yield* next(last, now, mine)
        if (found === undefined) return
        const due: number = Math.max(now, found.due)
        if (!(yield* wait(due, now))) continue
        const kept: number = timeToLive ?? Math.max(day, Math.ceil(2 * found.following(due)))
        const taken: number | undefined = yield* claim(place, term, last, due, kept)
        mine = taken === undefined
        last = mine ? due : taken
        if (mine) yield* tick(place.namespace)
      }
    })
  return make(
    name,
    use((fiber, space) => {
      const term = findHold(fiber, placeOf(space, "singleton", name, "name", lease))
      // The term is over: no tick is claimed in it any more.
      return term === undefined ? Effect.interrupt : ticks(placeOf(space, "tick", name, "name", lease), term)
    }),
    { lease }
  ) as Layer.Layer<never, never, Coordinator | Exclude<R, Scope.Scope> | R2>
}

// While Redis is away, a schedule waits. A claim that was executed without an answer is answered when it is made again.
const waiting = <A>(self: Effect.Effect<A, CoordinatorError>): Effect.Effect<A, CoordinatorError> =>
  untilBack(self, "100 millis")

const lastTick = (place: Place): Effect.Effect<number | undefined, CoordinatorError> =>
  Effect.map(waiting(question(place, "singleton.last", [])), ([, tick]) => tick === "" ? undefined : Number(tick))

/** Answers the tick that another process has claimed since the last one, if there is one. */
const claim = (
  place: Place,
  term: Hold,
  last: number | undefined,
  due: number,
  timeToLive: number
): Effect.Effect<number | undefined, CoordinatorError> => {
  const args = [term.id, last === undefined ? "" : String(last), String(due), timeToLive] as const
  const claiming = request(place, "singleton.claim", [...args], {
    session: term.session,
    moot: () => ["moot"] as const
  })
  return Effect.flatMap(waiting(claiming), (reply) => {
    switch (reply[0]) {
      case "claimed":
        return Effect.undefined
      case "taken":
        return Effect.succeed(Number(reply[1]))
      default:
        // The lease is lost, so the tick must not run: this is being interrupted.
        return Effect.never
    }
  })
}
