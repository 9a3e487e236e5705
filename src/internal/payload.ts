/** Values of users as JSON text, by their schemas. */
import * as Effect from "effect/Effect"
import * as Schema from "effect/Schema"

export interface Payload<A> {
  readonly encode: (value: A) => Effect.Effect<string, Schema.SchemaError>
  /** From JSON that has been parsed already. */
  readonly decode: (value: unknown) => Effect.Effect<A, Schema.SchemaError>
}

export const payload = <A>(schema: Schema.Codec<A, any>): Payload<A> => {
  const codec = Schema.toCodecJson(schema)
  const encode = Schema.encodeEffect(codec)
  const decode = Schema.decodeUnknownEffect(codec)
  return { encode: (value) => Effect.map(encode(value), (json) => JSON.stringify(json)), decode }
}

/** Of what has no value. */
export const nothing: Payload<void> = {
  encode: () => Effect.succeed("null"),
  decode: () => Effect.void
}
