/** The typings that are published: each module keeps its documentation. */

import { assert, it } from "@effect/vitest"
import { execFileSync } from "node:child_process"
import * as fs from "node:fs"
import * as os from "node:os"
import * as path from "node:path"

const root = path.join(import.meta.dirname, "..")

it("the typings keep the documentation of their modules", () => {
  const out = fs.mkdtempSync(path.join(os.tmpdir(), "lockstep-typings-"))
  try {
    const compiler = path.join(root, "node_modules/.bin/tsc")
    execFileSync(compiler, ["-p", path.join(root, "src"), "--outDir", out, "--emitDeclarationOnly"], { cwd: root })
    const documented = fs.readdirSync(path.join(root, "src"), { recursive: true, encoding: "utf8" }).flatMap((file) => {
      const doc = file.endsWith(".ts") &&
        /^\/\*\*[\s\S]*?\*\//.exec(fs.readFileSync(path.join(root, "src", file), "utf8"))
      return doc ? [[file, doc[0]] as const] : []
    })
    assert.isAbove(documented.length, 50)
    for (const [file, doc] of documented) {
      const typings = fs.readFileSync(path.join(out, file.replace(/\.ts$/, ".d.ts")), "utf8")
      // TypeScript drops a comment together with the import that follows it, unless a blank line keeps them apart.
      assert.isTrue(typings.startsWith(doc), file)
    }
  } finally {
    fs.rmSync(out, { recursive: true, force: true })
  }
}, 60_000)
