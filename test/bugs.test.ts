/** The bugs that the torture is tried with are patches: each has to fit the library, or its hunt would find nothing. */
import { assert, it } from "@effect/vitest"
import { mkdtempSync, rmSync } from "node:fs"
import { tmpdir } from "node:os"
import { join } from "node:path"
import { bugs, copy } from "./torture/library.ts"

it("every known bug fits the library", () => {
  const directory = mkdtempSync(join(tmpdir(), "lockstep-bugs-"))
  try {
    for (const [name, bug] of Object.entries(bugs)) {
      assert.doesNotThrow(() => copy(directory, name, bug), undefined, name)
    }
  } finally {
    rmSync(directory, { recursive: true })
  }
})
