/**
 * The side of a program that `Process.spawn` starts. Imports nothing, so that it starts at once.
 *
 * @since 0.1.0
 */

/**
 * The environment variable that carries the argument.
 *
 * @category constants
 * @since 0.1.0
 */
export const variable = "LOCKSTEP_ARGUMENT"

/**
 * What was passed to `Process.spawn` as `argument`.
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
  process.stdout.write(`${JSON.stringify(event)}\n`)
}
