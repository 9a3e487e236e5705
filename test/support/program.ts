/** The side of the started program; see `processes.ts`. Imports nothing, so that it starts at once. */

/** The environment variable that carries the argument. */
export const variable = "LOCKSTEP_ARGUMENT"

/** What the test passed as `argument`. */
export const argument = <A>(): A => JSON.parse(process.env[variable] ?? "null") as A

/** Sends one event to the test. Written before it returns, so that a SIGKILL right after does not lose it. */
export const emit = (event: object): void => {
  process.stdout.write(`${JSON.stringify(event)}\n`)
}
