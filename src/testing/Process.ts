/**
 * Programs in processes of their own, to be killed and paused, which no test inside of one process can do.
 *
 * A process that was started here never outlives the scope, nor the process that started it, however that ends.
 *
 * **Example** (Killing a holder)
 *
 * ```ts
 * import { Effect } from "effect"
 * import { Process } from "lockstep/testing"
 *
 * const program = Effect.gen(function*() {
 *   const holder = yield* Process.spawn<{ readonly event: string }>(new URL("./holder.ts", import.meta.url))
 *   yield* holder.waitFor(({ event }) => event === "held")
 *   yield* holder.kill9
 *   yield* holder.exit
 * })
 * ```
 *
 * @since 0.1.0
 */

import type * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import type * as Scope from "effect/Scope"
import * as Stream from "effect/Stream"
import { Socket } from "node:net"
import { resolve } from "node:path"
import type { Readable } from "node:stream"
import { fileURLToPath } from "node:url"
import { live } from "../internal/io.ts"
import { realSleep } from "../internal/testing/sleep.ts"
import { type Child, type Ended, workspace } from "../internal/testing/workspace.ts"
import { separator, variable } from "./Program.ts"

export type { Ended } from "../internal/testing/workspace.ts"

/**
 * A program in another process that reports with `Program.emit`. `Event` is trusted, not checked.
 *
 * @category models
 * @since 0.1.0
 */
export interface Process<Event> {
  readonly pid: number
  readonly running: boolean
  /** All events so far, oldest first. */
  readonly received: ReadonlyArray<Event>
  /** All events from the first on, for each reader; ends with the process. */
  readonly events: Stream.Stream<Event>
  /**
   * The first event, among those received and those to come, that satisfies `predicate`. With `after: n` the first n are
   * passed over: `after: process.received.length` waits for a new one. Dies when the process ends before, or at the
   * timeout (30 s by default, real time).
   */
  readonly waitFor: {
    <B extends Event>(predicate: (event: Event) => event is B, options?: WaitOptions): Effect.Effect<B>
    (predicate: (event: Event) => boolean, options?: WaitOptions): Effect.Effect<Event>
  }
  /** Each of these acts at once; only `exit` waits. */
  readonly kill9: Effect.Effect<void>
  readonly sigstop: Effect.Effect<void>
  readonly sigcont: Effect.Effect<void>
  readonly signal: (signal: NodeJS.Signals) => Effect.Effect<void>
  /**
   * Waits until the process has ended and its last event is in. Its output may stay open, when a process that it has started has
   * inherited it: then that is awaited for 200 milliseconds.
   */
  readonly exit: Effect.Effect<Ended>
  /** Everything it printed that is not an event, and its standard error. */
  readonly output: Effect.Effect<string>
}

/**
 * @category models
 * @since 0.1.0
 */
export interface WaitOptions {
  readonly timeout?: Duration.Input | undefined
  readonly after?: number | undefined
}

/** Cuts a text at line feeds: `node:readline` also cuts at U+2028 and U+2029, which JSON leaves. Answers how to end the last line. */
const lines = (stream: Readable, each: (line: string) => void): () => void => {
  let rest: Array<string> = []
  stream.setEncoding("utf8").on("data", (text: string) => {
    const [first = "", ...others] = text.split("\n")
    rest.push(first)
    for (const next of others) {
      each(rest.join(""))
      rest = [next]
    }
  })
  return () => {
    const last = rest.join("")
    rest = []
    if (last !== "") each(last)
  }
}

// In milliseconds. What a process has written is in the pipe when it ends.
const grace = 200

/** The output of a process, and the callers that wait for more of it. */
const mailbox = <Event>(child: Child) => {
  const received: Array<Event> = []
  const waiters = new Set<() => void>()
  let output = ""
  const wake = () => {
    for (const waiter of Array.from(waiters)) waiter()
  }
  const { stderr, stdout } = child.process
  if (stdout === null || stderr === null) throw new Error("no pipes")
  const flush = lines(stdout, (text) => {
    const at = text.indexOf(separator)
    const event = at < 0 ? undefined : parse<Event>(text.slice(at + separator.length))
    if (event === undefined) {
      output += `${text}\n`
    } else {
      output += text.slice(0, at)
      received.push(event)
    }
    wake()
  })
  stderr.setEncoding("utf8").on("data", (text: string) => {
    output += text
  })
  let ended: Ended | undefined
  const closed = Promise.all(
    [stdout, stderr].map((stream) => new Promise<void>((resolve) => stream.once("close", resolve)))
  )
  const over = child.ended.then(async (how) => {
    const { promise: late, resolve } = Promise.withResolvers<void>()
    // The turn of the event loop reads what the process has written before it ended.
    const timer = live.after(grace, () => live.after(0, resolve))
    await Promise.race([closed, late])
    timer.cancel()
    // This process must be able to end before the other one that has the output.
    for (const stream of [stdout, stderr]) if (stream instanceof Socket) stream.unref()
    flush()
    ended = how
    wake()
    return how
  })
  /** The event number `index`, or how the process ended before it. */
  const at = (index: number): Effect.Effect<{ readonly event: Event } | { readonly ended: Ended }> =>
    Effect.callback((resume) => {
      const look = () => {
        const event = received[index]
        if (event === undefined && ended === undefined) return
        waiters.delete(look)
        resume(Effect.succeed(event !== undefined ? { event } : { ended: ended ?? { code: null, signal: null } }))
      }
      waiters.add(look)
      look()
      return Effect.sync(() => waiters.delete(look))
    })
  return { received, at, over, output: () => output }
}

const parse = <Event>(text: string): Event | undefined => {
  try {
    return JSON.parse(text) as Event
  } catch {
    return undefined
  }
}

/**
 * Runs a TypeScript file with this Node until the scope closes, by SIGKILL if it still runs then. `argument` is read by
 * `Program.argument`. The file is a path or an `import.meta.url`-based URL.
 *
 * @category constructors
 * @since 0.1.0
 */
export const spawn = <Event extends object>(file: string | URL, options?: {
  readonly argument?: unknown
  readonly env?: Readonly<Record<string, string>> | undefined
  readonly nodeArgs?: ReadonlyArray<string> | undefined
}): Effect.Effect<Process<Event>, never, Scope.Scope> =>
  Effect.gen(function*() {
    const space = yield* workspace
    const path = file instanceof URL || file.startsWith("file:") ? fileURLToPath(file) : resolve(file)
    const child = space.spawn(process.execPath, [...options?.nodeArgs ?? [], path], {
      stdio: ["ignore", "pipe", "pipe"],
      env: { ...process.env, ...options?.env, [variable]: JSON.stringify(options?.argument ?? null) }
    })
    const box = mailbox<Event>(child)
    const report = () => `events: ${JSON.stringify(box.received.slice(-20))}\noutput:\n${box.output().slice(-4000)}`
    const signal = (signal: NodeJS.Signals) => Effect.sync(() => child.signal(signal))

    const waitFor = (predicate: (event: Event) => boolean, wait?: WaitOptions): Effect.Effect<Event> => {
      const search = Effect.gen(function*() {
        for (let index = wait?.after ?? 0;; index++) {
          const next = yield* box.at(index)
          if ("ended" in next) {
            const how = `code ${next.ended.code}, signal ${next.ended.signal}`
            return yield* Effect.die(new Error(`${path} ended (${how}) without the event; ${report()}`))
          }
          if (predicate(next.event)) return next.event
        }
      })
      const expire = Effect.suspend(() => Effect.die(new Error(`${path}: no such event in time; ${report()}`)))
      return Effect.raceFirst(search, Effect.andThen(realSleep(wait?.timeout ?? "30 seconds"), expire))
    }

    return {
      pid: child.pid,
      get running() {
        return child.running
      },
      get received() {
        return Array.from(box.received)
      },
      events: Stream.unfold(0, (index) =>
        Effect.map(box.at(index), (next) => "ended" in next ? undefined : [next.event, index + 1] as const)),
      waitFor: waitFor as Process<Event>["waitFor"],
      kill9: signal("SIGKILL"),
      sigstop: signal("SIGSTOP"),
      sigcont: signal("SIGCONT"),
      signal,
      exit: Effect.promise(() =>
        box.over
      ),
      output: Effect.sync(() => box.output())
    }
  })
