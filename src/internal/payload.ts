/** Values of users as JSON text, by their schemas. */
import * as Effect from "effect/Effect"
import * as Schema from "effect/Schema"

export class InvalidPayload extends Schema.Error<InvalidPayload>("lockstep/InvalidPayload")({
  _tag: Schema.tag("InvalidPayload"),
  what: Schema.String,
  issue: Schema.String
}) {
  override get message(): string {
    return `${this.what} does not fit the schema, which has to be the same everywhere: ${this.issue}`
  }
}

export interface Payload<A, RE = never, RD = never> {
  readonly encode: (value: A, what: string) => Effect.Effect<string, InvalidPayload, RE>
  /** From JSON that has been parsed already. */
  readonly decode: (value: unknown, what: string) => Effect.Effect<A, InvalidPayload, RD>
}

export const payload = <S extends Schema.Constraint>(
  schema: S
): Payload<S["Type"], S["EncodingServices"], S["DecodingServices"]> => {
  const json = Schema.toCodecJson(schema)
  const encode = Schema.encodeEffect(json)
  const decode = Schema.decodeUnknownEffect(json)
  const named = <A, R>(self: Effect.Effect<A, Schema.SchemaError, R>, what: string) =>
    Effect.mapError(self, ({ message }) => new InvalidPayload({ what, issue: message }))
  return {
    encode: (value, what) => Effect.map(named(encode(value), what), (encoded) => JSON.stringify(encoded)),
    decode: (value, what) => named(decode(value), what)
  }
}
