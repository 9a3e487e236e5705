/** A worker that can be resized, drained and shut down while it works. */

import * as Deferred from "effect/Deferred"
import type * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Scope from "effect/Scope"
import { type CoordinatorReason, isAway } from "../actor/errors.ts"
import type { WaitTimeout } from "../hold/loss.ts"
import { millisFromNone, type Place, whole } from "../hold/place.ts"
import type { Io, Timer } from "../io.ts"
import type { Crew } from "./crew.ts"
import type { QueueError } from "./errors.ts"
import { onSignals } from "./signals.ts"

export interface WorkerPool {
  /** How many jobs it runs at a time at most. */
  readonly size: Effect.Effect<number>
  /** How many handlers run now: more than `size` while it shrinks. */
  readonly running: Effect.Effect<number>
  /** Runs up to so many jobs at a time from now on: 1 to 1,024. Handlers that run go on, also when it shrinks. */
  readonly resize: (size: number) => Effect.Effect<void>
  /**
   * Works until no job waits and no handler of this pool runs, and then ends. Jobs that are delayed, or that wait for a retry,
   * stay. While the queue is paused, or Redis is away, it waits.
   */
  readonly drain: Effect.Effect<void, QueueError>
  /**
   * Takes no more jobs, lets handlers go on for `grace` (default: that of the pool), interrupts the other handlers, and gives their
   * jobs back, which is no attempt. Interrupting this does not stop it. A second call can end the grace earlier:
   * `shutdown({ grace: 0 })` ends it now.
   */
  readonly shutdown: (options?: { readonly grace?: Duration.Input | undefined }) => Effect.Effect<void>
  /** Waits until the pool has ended: drained, shut down, or idle. Fails when its coordinator is closed. */
  readonly await: Effect.Effect<void, QueueError>
}

export interface Pooling {
  /** Its lease says how often the pool asks again while Redis is away. */
  readonly place: Place
  /** In milliseconds, as `idle`. */
  readonly grace: number
  readonly idle: number | undefined
  readonly signals: ReadonlyArray<NodeJS.Signals>
  readonly closed: () => QueueError
  readonly fail: (error: CoordinatorReason | WaitTimeout) => QueueError
}

export const mostConcurrency = 1024

/** In milliseconds, by default. */
export const mostOverrun = 10_000

/** In milliseconds; 0 is allowed. */
export const graceOf = (grace: Duration.Input): number => millisFromNone(grace, "grace")

export const poolOf = (
  crew: Crew,
  { closed, fail, grace: usual, idle, place, signals }: Pooling
): Effect.Effect<WorkerPool, QueueError, Scope.Scope> =>
  Effect.uninterruptibleMask((restore) =>
    Effect.gen(function*() {
      const { channel, space: { kernel: { io } } } = place
      const run = Effect.runForkWith(yield* Effect.context<never>())
      const own = yield* Scope.make()
      const ended = Deferred.makeUnsafe<void, QueueError>()
      let deaf = () => {}
      const end = (exit: Effect.Effect<void, QueueError>) => {
        // A process whose pool has ended ends by its signals again.
        deaf()
        Deferred.doneUnsafe(ended, exit)
      }
      const leave = leaving(crew, own, run, () => end(Effect.void))
      let [told, joining] = [0, true]
      const obey = () => {
        if (!joining && told > 0) run(leave(told === 1 ? usual : 0))
      }
      yield* Effect.acquireRelease(
        Effect.sync(() => {
          deaf = onSignals(signals, () => {
            told++
            obey()
          })
        }),
        () => Effect.sync(() => deaf())
      )
      yield* Effect.onExit(
        restore(Scope.provide(crew.work(() => end(Effect.fail(closed())), fail), own)),
        (exit) => {
          joining = false
          return Exit.isSuccess(exit) ? Effect.void : leave(told > 1 ? 0 : usual)
        }
      )
      yield* Effect.addFinalizer(() => leave(usual))
      obey()
      if (idle !== undefined) {
        const quit = whenIdle(crew, idle, io, () => {
          crew.retire()
          run(leave(0))
        })
        yield* Effect.addFinalizer(() => Effect.sync(quit))
      }
      return {
        size: Effect.sync(() => crew.size),
        running: Effect.sync(() => crew.running),
        resize: (size) => Effect.sync(() => crew.resize(whole(size, "size", mostConcurrency))),
        drain: Effect.raceFirst(
          Deferred.await(ended),
          Effect.andThen(drained(crew, fail, (f) => io.after(channel.retryPause, f)), leave(0))
        ),
        shutdown: ({ grace } = {}) => Effect.suspend(() => leave(grace === undefined ? usual : graceOf(grace))),
        await: Deferred.await(ended)
      }
    })
  )

// In a fiber of its own: it goes on when the fiber that has asked for it is interrupted.
const leaving = (crew: Crew, own: Scope.Closeable, run: (self: Effect.Effect<void>) => unknown, end: () => void) => {
  const left = Deferred.makeUnsafe<void>()
  let begun = false
  return (grace: number): Effect.Effect<void> =>
    Effect.suspend(() => {
      if (begun) return Effect.andThen(crew.stop(grace), Deferred.await(left))
      begun = true
      run(Effect.gen(function*() {
        yield* crew.stop(grace)
        yield* Scope.close(own, Exit.void)
        end()
        Deferred.doneUnsafe(left, Effect.void)
      }))
      return Deferred.await(left)
    })
}

/** Retires the crew as soon as no job waits and no handler runs. `pause` sets the timer until it asks again while Redis is away. */
const drained = (
  crew: Crew,
  fail: Pooling["fail"],
  pause: (f: () => void) => Timer
): Effect.Effect<void, QueueError> =>
  Effect.suspend(() => {
    const nothingWaits = crew.nothingWaits.pipe(
      Effect.catchIf(({ reason }) => isAway(reason), () => Effect.succeed("away" as const)),
      Effect.mapError(({ reason }) => fail(reason))
    )
    const news = newsOf(crew)
    return Effect.gen(function*() {
      while (true) {
        news.forget()
        const nothing = crew.running === 0 && (yield* nothingWaits)
        // In one step with the end of the worker: a handler that has begun meanwhile goes on, and a job that comes later returns
        // to the queue.
        if (nothing === true && crew.running === 0) return crew.retire()
        yield* news.await((f) => nothing === "away" ? pause(f) : undefined)
      }
    }).pipe(Effect.ensuring(Effect.sync(news.end)))
  })

/** The events of a crew, also between two questions. */
const newsOf = (crew: Crew) => {
  let heard = false
  let wake = () => {}
  const end = crew.listen(() => {
    heard = true
    wake()
  })
  return {
    forget: (): void => void (heard = false),
    /** Ends when the crew has sent an event, or when the timer fires. */
    await: (set: (f: () => void) => Timer | undefined): Effect.Effect<void> =>
      Effect.callback((resume) => {
        if (heard) return resume(Effect.void)
        const timer = set(() => wake())
        wake = () => {
          timer?.cancel()
          resume(Effect.void)
        }
        return Effect.sync(() => timer?.cancel())
      }),
    end
  }
}

/** Calls once, when the crew had nothing to do for so many milliseconds. Answers how to end that. */
const whenIdle = (crew: Crew, idle: number, io: Io, quit: () => void): () => void => {
  // One timer, which is not set anew for each job.
  let since = io.now()
  const check = () => {
    const rest = crew.running > 0 || !crew.ready ? idle : since + idle - io.now()
    if (rest > 0) timer = io.after(rest, check)
    else quit()
  }
  const off = crew.listen(() => void (since = io.now()))
  let timer = io.after(idle, check)
  return () => {
    off()
    timer.cancel()
  }
}
