/**
 * The side of a program that `Process.spawn` starts. Imports nothing that takes time, so that it starts at once.
 *
 * @since 0.1.0
 */

import { writeSync } from "node:fs"

/**
 * The environment variable that carries the argument.
 *
 * @category constants
 * @since 0.1.0
 */
export const variable = "LOCKSTEP_ARGUMENT"

/**
 * The character in front of an event, as in JSON text sequences (RFC 7464): other lines of a program can be JSON, too.
 *
 * @category constants
 * @since 0.1.0
 */
export const separator = "\u001e"

/**
 * The `argument` that was passed to `Process.spawn`.
 *
 * @category combinators
 * @since 0.1.0
 */
export const argument = <A>(): A => JSON.parse(process.env[variable] ?? "null") as A

/**
 * Sends one event to the process that started this one. Written before it returns, so that a SIGKILL right after does not
 * lose it.
 *
 * @category combinators
 * @since 0.1.0
 */
export const emit = (event: object): void => {
  let rest: Uint8Array = Buffer.from(`${separator}${JSON.stringify(event)}\n`)
  while (rest.length > 0) {
    try {
      rest = rest.subarray(writeSync(1, rest))
    } catch (error) {
      if ((error as NodeJS.ErrnoException).code !== "EAGAIN") throw error
      // The reader is slow: this process waits for it.
      Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 1)
    }
  }
}
