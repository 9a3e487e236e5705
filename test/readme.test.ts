/** What a stranger reads first: the README's program runs as it stands, and its links lead somewhere. */
import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import { execFile } from "node:child_process"
import * as fs from "node:fs"
import * as path from "node:path"
import { promisify } from "node:util"

const root = path.join(import.meta.dirname, "..")
const readme = fs.readFileSync(path.join(root, "README.md"), "utf8")
const run = promisify(execFile)

describe("README.md", () => {
  it.live("has a first program that runs", () =>
    Effect.promise(async () => {
      const program = /```ts\n([^]*?)```/.exec(readme)![1]!
      assert.isBelow(program.trim().split("\n").length, 15)
      const file = path.join(import.meta.dirname, `readme-${process.pid}.ts`)
      fs.writeFileSync(file, program.replace("\"lockstep\"", "\"../src/index.ts\""))
      try {
        const { stdout } = await run(process.execPath, [file])
        assert.include(stdout, "one process at a time")
      } finally {
        fs.rmSync(file)
      }
    }))

  it("links to files that exist", () => {
    const links = [...readme.matchAll(/\]\(([^)#]+)\)/g)].map(([, link]) => link!).filter((link) =>
      !link.startsWith("http")
    )
    assert.isAbove(links.length, 5)
    for (const link of links) assert.isTrue(fs.existsSync(path.join(root, link)), link)
  })

  it("names every error and reason that there is", () => {
    for (
      const file of fs.globSync(["*.ts", "internal/*.ts"], { cwd: path.join(root, "src") })
    ) {
      const source = fs.readFileSync(path.join(root, "src", file), "utf8")
      for (const [, name] of source.matchAll(/export class (\w+)(?:<[^>]*>)?\s+extends Schema\.Error/g)) {
        assert.include(readme, `\`${name}\``)
      }
    }
  })
})
