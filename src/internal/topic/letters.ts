/** The events that a group could not handle, in a topic of their own. */

import * as Effect from "effect/Effect"
import * as Schema from "effect/Schema"
import { createHash } from "node:crypto"
import type { Log } from "../actor/hooks.ts"
import { shortened } from "../text.ts"
import type { Delivery } from "./group.ts"

export const DeadLetter = Schema.Struct({
  topic: Schema.String,
  /** Of the event in its topic. */
  id: Schema.String,
  group: Schema.String,
  key: Schema.optional(Schema.String),
  publisher: Schema.String,
  attempts: Schema.Number,
  error: Schema.String,
  /** The JSON text that was published. */
  body: Schema.String
})

export type DeadLetter = typeof DeadLetter.Type

/** The name of the topic. */
export const lettersOf = (topic: string, group: string): string => `${topic}/dead/${group}`

// Of any length, and still different for each event of each group.
const letterId = (topic: string, group: string, { element }: Delivery<unknown>): string =>
  createHash("sha1").update(JSON.stringify([topic, group, element._tag === "Gap" ? "" : element.id])).digest("hex")

const letterOf = (
  { element, raw }: Delivery<unknown>,
  topic: string,
  group: string,
  error: string
): DeadLetter => ({
  topic,
  id: element._tag === "Gap" ? "" : element.id,
  group,
  key: raw!.key === "" ? undefined : raw!.key,
  publisher: raw!.publisher,
  attempts: raw!.attempt,
  error: shortened(error),
  body: raw!.body
})

/** Where letters go. */
interface Letters<out E> {
  readonly publish: (letter: DeadLetter, options: { readonly id: string }) => Effect.Effect<unknown, E>
}

/**
 * Makes events of a group dead letters: in a topic that is opened when it is needed, and again if that failed. `false`
 * drops them.
 */
export const burying = <E, R>(
  { group, log, name, subject }: {
    readonly group: string
    readonly log: Log
    readonly name: string
    /** The topic in log lines. */
    readonly subject: string
  },
  given: Letters<E> | false | undefined,
  open: Effect.Effect<Letters<E>, E, R>
) => {
  let letters = given
  const opened = Effect.suspend(() =>
    letters === undefined
      ? Effect.tap(open, (topic) => Effect.sync(() => void (letters = topic)))
      : Effect.succeed(letters)
  )
  return (delivery: Delivery<unknown>, error: string): Effect.Effect<void, E, R> => {
    const dropped = (why: string) =>
      Effect.sync(() => log("Error", `event ${delivery.raw!.id} of ${subject} is dropped: ${why}`))
    return Effect.flatMap(opened, (topic) =>
      topic === false
        ? dropped(error)
        : Effect.catchIf(
          Effect.asVoid(topic.publish(letterOf(delivery, name, group, error), { id: letterId(name, group, delivery) })),
          // As JSON text inside of JSON text, it is longer than the event was.
          (cause) => (cause as { readonly reason?: { readonly _tag?: unknown } }).reason?._tag === "RequestTooLarge",
          () => dropped(`its dead letter is larger than what Redis takes; ${error}`)
        ))
  }
}
