/**
 * The operations of several processes and their times, recorded so that they survive the processes.
 *
 * Each process appends its events to a file of its own. An event is written by the time `record` returns, so a SIGKILL
 * right after it loses nothing; times are of the machine's monotonic clock, so they compare between its processes.
 *
 * **Gotchas**
 *
 * - Record the question before it is asked and the answer after it came: the checkers rely on that order.
 * - `record` writes synchronously: some microseconds each.
 *
 * **Example** (Recording)
 *
 * ```ts
 * import { Effect } from "effect"
 * import { History } from "lockstep/testing"
 *
 * const program = Effect.gen(function*() {
 *   const history = yield* History.recorder("/tmp/worker-1.jsonl")
 *   history.record({ event: "asked", key: "a" })
 *   // ...
 *   history.record({ event: "granted", key: "a" })
 * })
 * ```
 *
 * @since 0.1.0
 */

import * as Effect from "effect/Effect"
import type * as Scope from "effect/Scope"
import * as fs from "node:fs"

/**
 * An event and when it was recorded, in microseconds of the monotonic clock of the machine.
 *
 * @category models
 * @since 0.1.0
 */
export type Timed<Event> = Event & { readonly at: number }

/**
 * @category models
 * @since 0.1.0
 */
export interface Recorder<Event extends object> {
  readonly record: (event: Event) => void
}

/**
 * Microseconds since the machine was started; the same clock in all of its processes.
 *
 * @category combinators
 * @since 0.1.0
 */
export const now = (): number => Number(process.hrtime.bigint() / 1000n)

/**
 * Appends to a file, which is closed with the scope: `record` throws then.
 *
 * @category constructors
 * @since 0.1.0
 */
export const recorder = <Event extends object>(
  file: string
): Effect.Effect<Recorder<Event>, never, Scope.Scope> =>
  Effect.map(
    Effect.acquireRelease(
      Effect.sync(() => {
        // A process that was killed may have left a part of an event.
        if (fs.existsSync(file)) fs.truncateSync(file, fs.readFileSync(file).lastIndexOf("\n") + 1)
        return { descriptor: fs.openSync(file, "a"), isOpen: true }
      }),
      (history) =>
        Effect.sync(() => {
          history.isOpen = false
          fs.closeSync(history.descriptor)
        })
    ),
    (history) => ({
      record: (event) => {
        // The descriptor may be that of another file by then.
        if (!history.isOpen) throw new Error(`the scope of the history ${file} is closed`)
        fs.writeSync(history.descriptor, `${JSON.stringify({ ...event, at: now() })}\n`)
      }
    })
  )

/**
 * Reads the records, in the order in which they were made. A record that a process was writing when it was killed is
 * left out.
 *
 * @category combinators
 * @since 0.1.0
 */
export const read = <Event extends object>(file: string): ReadonlyArray<Timed<Event>> => {
  const lines = fs.readFileSync(file, "utf8").split("\n")
  // Behind the last line end is nothing, or the part of a line.
  return lines.slice(0, -1).map((line) => JSON.parse(line) as Timed<Event>)
}
