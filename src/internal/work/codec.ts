/** Values of users as JSON text. Synchronous: one that is decoded later would have to keep all others waiting. */

import * as Cause from "effect/Cause"
import * as Exit from "effect/Exit"
import * as Schema from "effect/Schema"
import { InvalidPayload, jsonText, type Owner } from "../hold/payload.ts"
import { messageOf } from "../text.ts"

export interface Codec<in out A> {
  readonly encode: (value: A) => Exit.Exit<string, InvalidPayload>
  readonly decode: (body: string) => Exit.Exit<A, InvalidPayload>
  /** From JSON that has been parsed already. */
  readonly decodeParsed: (value: unknown) => Exit.Exit<A, InvalidPayload>
}

export const codec = <A>(
  schema: Schema.Codec<A, any>,
  what: string,
  { kind, name, namespace }: Owner
): Codec<A> => {
  const json = Schema.toCodecJson(schema)
  const encode = Schema.encodeExit(json)
  const decode = Schema.decodeUnknownExit(json)
  const invalid = (issue: string) => Exit.fail(new InvalidPayload({ what, kind, name, namespace, issue }))
  const refused = (cause: Cause.Cause<Schema.SchemaError>) => {
    const issue = Cause.squash(cause)
    return invalid(messageOf(issue))
  }
  const decodeParsed = (value: unknown) => {
    const exit = decode(value)
    // Not made again, which every value would pay for.
    return Exit.isSuccess(exit) ? exit as Exit.Success<A, never> : refused(exit.cause)
  }
  return {
    decodeParsed,
    encode: (value) => {
      const exit = encode(value)
      return Exit.isSuccess(exit) ? jsonText(exit.value, invalid) : refused(exit.cause)
    },
    decode: (body) => {
      let parsed: unknown
      try {
        parsed = JSON.parse(body)
      } catch (cause) {
        return invalid(messageOf(cause))
      }
      return decodeParsed(parsed)
    }
  }
}
