/** The typings that are published: each module keeps its documentation. */

import { assert, it } from "@effect/vitest"
import { execFileSync } from "node:child_process"
import * as fs from "node:fs"
import * as os from "node:os"
import * as path from "node:path"

const root = path.join(import.meta.dirname, "..")

it("the typings of Redis keep the documentation of their modules", () => {
  const out = fs.mkdtempSync(path.join(os.tmpdir(), "lockstep-typings-"))
  try {
    const compiler = path.join(root, "node_modules/.bin/tsc")
    execFileSync(compiler, ["-p", path.join(root, "src"), "--outDir", out, "--emitDeclarationOnly"], { cwd: root })
    const folder = path.join(root, "src/internal/redis")
    for (const file of [...fs.readdirSync(folder).map((name) => `internal/redis/${name}`), "Redis.ts"]) {
      const doc = /^\/\*\*[\s\S]*?\*\//.exec(fs.readFileSync(path.join(root, "src", file), "utf8"))?.[0]
      assert.isDefined(doc, file)
      const typings = fs.readFileSync(path.join(out, file.replace(/\.ts$/, ".d.ts")), "utf8")
      // TypeScript drops a comment together with the import that follows it, unless a blank line keeps them apart.
      assert.isTrue(typings.startsWith(doc!), file)
    }
  } finally {
    fs.rmSync(out, { recursive: true, force: true })
  }
}, 60_000)
