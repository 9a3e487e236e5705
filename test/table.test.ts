import { assert, describe, it } from "@effect/vitest"
import * as fc from "fast-check"
import { Table } from "../src/internal/hold/table.ts"

const id = fc.oneof(
  fc.integer({ min: 0, max: 40 }).map((number) => number.toString(36)),
  fc.string({ maxLength: 3 }),
  // These have one hash.
  fc.constantFrom("Aa", "BB", "AaAa", "BBBB", "AaBB", "BBAa")
)

describe("a table of claims", () => {
  it("does what a map does", () => {
    fc.assert(fc.property(
      fc.array(fc.record({ do: fc.constantFrom("add", "add", "delete", "get"), id }), { maxLength: 400, size: "max" }),
      (steps) => {
        const table = new Table<{ readonly id: string }>()
        const model = new Map<string, { readonly id: string }>()
        for (const step of steps) {
          if (step.do === "add") {
            const item = { id: step.id }
            table.add(item)
            model.set(step.id, item)
          } else if (step.do === "delete") {
            table.delete(model.get(step.id) ?? { id: step.id })
            model.delete(step.id)
          }
          assert.strictEqual(table.get(step.id), model.get(step.id))
          assert.strictEqual(table.size, model.size)
        }
        assert.sameMembers(table.values(), [...model.values()])
        for (const [id, item] of model) assert.strictEqual(table.get(id), item)
      }
    ))
  })

  it("does not delete another one of the same name", () => {
    const table = new Table<{ readonly id: string }>()
    const item = { id: "a" }
    table.add(item)
    table.delete({ id: "a" })
    assert.strictEqual(table.get("a"), item)
  })
})
