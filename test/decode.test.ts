import { assert, describe, it } from "@effect/vitest"
import * as fc from "fast-check"
import { replies as shapes } from "../src/internal/actor/lua.ts"
import { decode } from "../src/internal/actor/transport.ts"

const value = fc.oneof(
  fc.bigInt({ min: 0n, max: 2n ** 64n }).map(String),
  fc.constantFrom("", "0", "01", "-1", "1.5", "1e3", " 1", "1\"]]]", "\\", "\u00e9", "1\",\"2"),
  fc.string({ unit: "grapheme" }),
  fc.integer(),
  fc.boolean(),
  fc.array(fc.string(), { maxLength: 2 })
)

const ofType: { readonly [type: string]: (value: unknown) => boolean } = {
  string: (value) => typeof value === "string",
  number: (value) => typeof value === "number",
  boolean: (value) => typeof value === "boolean",
  strings: Array.isArray,
  json: () => true
}

/** What a reply counts as. */
const model = (verb: string, reply: ReadonlyArray<unknown>): ReadonlyArray<unknown> => {
  const [tag, ...values] = reply
  const shape = Object.entries(shapes[verb]!).find(([name]) => name === tag)?.[1]
  const fits = tag === "failed" ||
    shape?.length === values.length && shape.every((type, at) => ofType[type]!(values[at]))
  return fits ? reply : ["failed", "malformed reply"]
}

const verbs = Object.keys(shapes)
const tags = [...new Set(Object.values(shapes).flatMap((byTag) => Object.keys(byTag)))]
const request = fc.constantFrom(...verbs).chain((verb) =>
  fc.record({
    verb: fc.constant(verb),
    reply: fc.tuple(
      fc.oneof(
        { weight: 4, arbitrary: fc.constantFrom(...Object.keys(shapes[verb]!)) },
        fc.constantFrom(...tags, "failed", "toString", "__proto__", "", "granted\"")
      ),
      fc.array(value, { maxLength: 2 })
    ).map(([tag, values]) => [tag, ...values])
  })
)

describe("the answer to a batch", () => {
  it("is what JSON says, where that fits its requests", () => {
    fc.assert(
      fc.property(fc.array(request, { minLength: 1, maxLength: 3, size: "max" }), (requests) => {
        const messages = requests.map(({ verb }) => ({ verb, args: [] }))
        const raw = JSON.stringify(["ok", requests.map(({ reply }) => reply)])
        const replies = requests.map(({ reply, verb }) => model(verb, reply))
        assert.deepStrictEqual(decode(messages, raw), { status: "ok", replies, events: [], next: undefined } as never)
      }),
      { numRuns: 2000 }
    )
  })

  it("is refused where it is none", () => {
    const messages = [{ verb: "lock.take", args: [] }]
    const answers = [
      "",
      "[\"ok\"]",
      "[\"ok\",[]]",
      "[\"ok\",[[\"granted\",\"1\"],[\"granted\",\"1\"]]]",
      "[\"ok\",[[\"granted\",\"1\"]]",
      "[\"ok\",[[\"granted\",\"1\"]]]]",
      "[\"no\",[]]",
      null,
      1
    ]
    for (const raw of answers) assert.throws(() => decode(messages, raw), /./)
  })
})
