/** Text for people, of values that may be anything: also of those that throw when they are looked at. */

import * as Cause from "effect/Cause"
import * as Effect from "effect/Effect"
import * as Inspectable from "effect/Inspectable"

const attempted = (text: () => string): string => {
  try {
    return text()
  } catch {
    return "a value that cannot be shown as text"
  }
}

export const textOf = (value: unknown): string => attempted(() => String(value))

/** Of an error, what it says. */
export const messageOf = (error: unknown): string =>
  attempted(() => String(error instanceof Error ? error.message : error))

export const prettyOf = (cause: Cause.Cause<unknown>): string => attempted(() => Cause.pretty(cause))

// Of an error that is kept with a dead letter.
export const mostText = 4096

/** Of what may be no text: handlers may discard what they have caught. */
export const shortened = (text: unknown): string => textOf(text).slice(0, mostText).toWellFormed()

/** Loggers throw where they cannot show a cause. */
export const logFailure = (message: string, cause: Cause.Cause<unknown>): Effect.Effect<void> =>
  Effect.catchDefect(Effect.logError(message, cause), () => Effect.logError(`${message}: ${prettyOf(cause)}`))

/** Loggers and `console.log` show this instead of all that the object refers to, as passwords. */
export const showAs = (object: object, shown: object): void => {
  const value = () => shown
  Object.defineProperties(object, { toJSON: { value }, [Inspectable.NodeInspectSymbol]: { value } })
}
