/** Values of users as JSON text, by their schemas. */

import * as Cause from "effect/Cause"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Schema from "effect/Schema"
import { messageOf, textOf } from "../text.ts"

export class InvalidPayload extends Schema.Error<InvalidPayload>("lockstep/InvalidPayload")({
  _tag: Schema.tag("InvalidPayload"),
  /** Which of its values, and its name. */
  what: Schema.String,
  kind: Schema.String,
  name: Schema.String,
  namespace: Schema.String,
  issue: Schema.String
}) {
  override get message(): string {
    return `${this.what} of namespace ${
      JSON.stringify(this.namespace)
    } does not fit the schema, which has to be the same everywhere: ` +
      this.issue
  }
}

/** The owner of the values: a place is one. */
export interface Owner {
  readonly kind: string
  readonly name: string
  readonly namespace: string
}

export interface Payload<in out A> {
  readonly encode: (value: A, what: string) => Effect.Effect<string, InvalidPayload>
  /** From JSON that has been parsed already. */
  readonly decode: (value: unknown, what: string) => Effect.Effect<A, InvalidPayload>
  readonly decodeAll: (values: unknown, what: string) => Effect.Effect<ReadonlyArray<A>, InvalidPayload>
}

/** The JSON text of what a schema has encoded, if it has any: schemas such as `Schema.Any` let everything pass. */
export const jsonText = <E>(
  encoded: unknown,
  invalid: (issue: string) => Exit.Exit<never, E>
): Exit.Exit<string, E> => {
  try {
    const text = JSON.stringify(encoded) as string | undefined
    return text === undefined ? invalid(`Expected a JSON value, got ${typeof encoded}`) : Exit.succeed(text)
  } catch (cause) {
    return invalid(textOf(cause))
  }
}

// Nothing has to be decoded where parties bring nothing.
const nothing: Payload<any> = {
  encode: () => Effect.succeed("null"),
  decode: () => Effect.void,
  decodeAll: (values) => Effect.succeed((values as ReadonlyArray<unknown>).map(() => undefined))
}

/** Without a schema it is for values that say nothing. */
export const payload = <A>(
  schema: Schema.Codec<A, any> | undefined,
  { kind, name, namespace }: Owner
): Payload<A> => {
  if (schema === undefined) return nothing
  const json = Schema.toCodecJson(schema)
  const encode = Schema.encodeEffect(json)
  const decode = Schema.decodeUnknownEffect(json)
  const decodeAll = Schema.decodeUnknownEffect(Schema.toCodecJson(Schema.Array(schema)))
  const invalid = (what: string, issue: string) => new InvalidPayload({ what, kind, name, namespace, issue })
  // A schema of users may throw, or interrupt itself, which is no reason to end their fibers.
  const named = <B>(self: Effect.Effect<B, Schema.SchemaError>, what: string): Effect.Effect<B, InvalidPayload> =>
    Effect.catchCause(self, (cause) => Effect.fail(invalid(what, messageOf(Cause.squash(cause)))))
  return {
    encode: (value, what) =>
      Effect.flatMap(
        named(encode(value), what),
        (encoded) => jsonText(encoded, (issue) => Exit.fail(invalid(what, issue)))
      ),
    decode: (value, what) => named(decode(value), what),
    decodeAll: (values, what) => named(decodeAll(values), what)
  }
}
