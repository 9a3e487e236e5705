/**
 * The clocks, timers and randomness that everything in `internal/` uses. They come in through one record, so that a
 * simulation decides about the time, the timer that fires next, and chance.
 */

import type * as Clock from "effect/Clock"
import * as Context from "effect/Context"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import type * as Exit from "effect/Exit"
import type * as Fiber from "effect/Fiber"
import * as Option from "effect/Option"
import { randomBytes } from "node:crypto"
import { hostname } from "node:os"
import { pid } from "node:process"

/** A timer that has been set. */
export interface Timer {
  readonly cancel: () => void
}

export interface Io {
  /** Monotonic milliseconds. They may stand still while the machine is suspended. */
  readonly now: () => number
  /** Milliseconds since the epoch, which go on while the machine is suspended, and may be set. */
  readonly wall: () => number
  /** Calls back once, after so many milliseconds. Real timers: a test's `TestClock` must not lose sessions. */
  readonly after: (millis: number, f: () => void) => Timer
  /** As `after`, to a part of a millisecond, and never before: it takes the processor for some two milliseconds. */
  readonly exactly: (millis: number, f: () => void) => Timer
  /** Calls back at the end of this turn of the event loop. */
  readonly defer: (f: () => void) => void
  /** From 0 up to 1. */
  readonly random: () => number
  /** Text that no other coordinator has: at least 12 of `A-Z a-z 0-9 _ -`. */
  readonly id: () => string
  /** The process, for operators. */
  readonly host: string
  readonly pid: number
  /** Runs what no caller waits for, with these clocks and timers. */
  readonly run: <A, E>(effect: Effect.Effect<A, E>) => Fiber.Fiber<A, E>
}

/** A duration in milliseconds; NaN for what is none. For Effect, a number that is none is no time. */
export const millisIn = (input: Duration.Input): number =>
  Number.isNaN(input)
    ? Number.NaN
    : Option.match(Duration.fromInput(input), { onNone: () => Number.NaN, onSome: Duration.toMillis })

/** Milliseconds of Effect's clock that go on, however it is set: a test may have provided it. */
export const monotonicOf = (clock: Clock.Clock): number => Number(clock.monotonicTimeNanosUnsafe()) / 1e6

const settled = Promise.resolve()

// Taken at import: the fake timers of a test runner must not stop what goes on in real time.
const { clearImmediate, clearTimeout, setImmediate, setTimeout } = globalThis

// A longer timer of Node fires at once.
const longest = 2 ** 31 - 1

/** A part of a millisecond, which no timer of Node can wait for: turns of the event loop, until it is over. */
const within = (millis: number, f: () => void): Timer => {
  const until = performance.now() + millis
  const look = () => {
    if (performance.now() < until) turn = setImmediate(look)
    else f()
  }
  let turn = setImmediate(look)
  return { cancel: () => clearImmediate(turn) }
}

const after = (millis: number, f: () => void): Timer => {
  if (millis < 1) return within(millis, f)
  const set = (rest: number) =>
    setTimeout(() => {
      if (rest > longest) timer = set(rest - longest)
      else f()
    }, Math.min(rest, longest))
  let timer = set(millis)
  return { cancel: () => clearTimeout(timer) }
}

// Timers of Node are up to a millisecond late, or early.
const exactly = (millis: number, f: () => void): Timer => {
  const until = performance.now() + millis
  let timer = after(millis - 1, () => {
    timer = within(until - performance.now(), f)
  })
  return { cancel: () => timer.cancel() }
}

export const live: Io = {
  now: () => performance.now(),
  wall: () => Date.now(),
  after,
  exactly,
  // Half of what `queueMicrotask` costs, and it is in every call.
  defer: (f) => void settled.then(f),
  random: Math.random,
  id: () => randomBytes(9).toString("base64url"),
  host: hostname(),
  pid,
  run: Effect.runFork
}

/** The exit of an effect that it runs. */
export const exitOf = <A, E>({ run }: Io, effect: Effect.Effect<A, E>): Promise<Exit.Exit<A, E>> =>
  new Promise((resolve) => run(effect).addObserver(resolve))

/** Ends after so many milliseconds, in real time as all timers of these. */
export const pause = ({ after }: Io, millis: number): Effect.Effect<void> =>
  Effect.callback((resume) => {
    const timer = after(millis, () => resume(Effect.void))
    return Effect.sync(timer.cancel)
  })

// In milliseconds. A timer that is late by more shows that the process has not run.
const [punctual, longestGrace] = [10, 1000]

/**
 * As `after`, for how long a server's answer is waited for. When the event loop was blocked at the end of the wait, or the machine stood
 * still, the wait is extended once, by as long as its timer was late, at most by a second: the answer may have come without being read,
 * and the server may have stood still too. Then `onExtended` is called with the time at which the timer came, and `f` in the end.
 */
export const giveUpAfter = (
  io: Io,
  millis: number,
  f: (over: number) => void,
  onExtended?: (over: number) => void
): Timer => {
  const until = io.now() + millis
  let timer = io.after(millis, () => {
    const over = io.now()
    const late = over - until
    if (late <= punctual) return f(over)
    timer = io.after(Math.min(late, longestGrace), () => f(over))
    onExtended?.(over)
  })
  return { cancel: () => timer.cancel() }
}

/** The record that connections and coordinators are made with. */
export const CurrentIo = Context.Reference<Io>("lockstep/Io", { defaultValue: () => live })
