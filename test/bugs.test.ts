/** The bugs that the torture is tried with are patches: each has to fit the library, or its hunt would find nothing. */
import { assert, it } from "@effect/vitest"
import { mkdtempSync, rmSync } from "node:fs"
import { tmpdir } from "node:os"
import { join } from "node:path"
import { bugs, copy, rareBugs } from "./torture/library.ts"

it("every known bug fits the library", () => {
  const directory = mkdtempSync(join(tmpdir(), "lockstep-bugs-"))
  try {
    const unfit = Object.entries({ ...bugs, ...rareBugs }).flatMap(([name, bug]) => {
      try {
        copy(directory, name, bug)
        return []
      } catch (cause) {
        return [`${name}: ${cause}`]
      }
    })
    assert.deepStrictEqual(unfit, [])
  } finally {
    rmSync(directory, { recursive: true })
  }
})
