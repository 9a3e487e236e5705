/** What a stranger reads first: the README's program runs as it stands, and the documentation agrees with the sources. */
import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import { execFile } from "node:child_process"
import * as fs from "node:fs"
import * as path from "node:path"
import { promisify } from "node:util"

const root = path.join(import.meta.dirname, "..")
const read = (file: string) => fs.readFileSync(path.join(root, file), "utf8")
const run = promisify(execFile)

const pages = fs.globSync("docs/*.md", { cwd: root })
const documents = new Map(["README.md", "CHANGELOG.md", ...pages].map((file) => [file, read(file)]))

const blocks = (text: string) => [...text.matchAll(/^```ts\n([^]*?)^```/gm)].map(([, code]) => code!)
const imported = (code: string) =>
  code.replaceAll("\"lockstep\"", "\"../../src/index.ts\"").replaceAll(
    "\"lockstep/testing\"",
    "\"../../src/testing.ts\""
  ).replaceAll(/"lockstep\/(effect\/\w+)"/g, "\"../../src/$1.ts\"")

/** A folder beside the tests, where packages are found as they are from here. */
const withFolder = <A>(use: (folder: string) => Promise<A>) =>
  Effect.acquireUseRelease(
    Effect.sync(() => fs.mkdtempSync(path.join(import.meta.dirname, "documentation-"))),
    (folder) => Effect.promise(() => use(folder)),
    (folder) => Effect.sync(() => fs.rmSync(folder, { recursive: true, force: true }))
  )

/** The headings of a document, as GitHub makes anchors of them. */
const anchors = (text: string) =>
  [...text.matchAll(/^#+ (.*)$/gm)].map(([, heading]) =>
    heading!.toLowerCase().replaceAll(/[^\w -]/g, "").replaceAll(" ", "-")
  )

const modules = [...read("src/index.ts").matchAll(/export \* as (\w+)/g)].map(([, name]) => name!)

/** Of a public interface, the names between its braces. */
const interfaces = (source: string) =>
  [...source.matchAll(/^export interface (\w+)[^{]*\{\n([^]*?)^\}/gm)].map(([, name, body]) => ({
    name: name!,
    members: [...body!.matchAll(/^ {2,4}readonly (\w+)/gm)].map(([, member]) => member!)
  }))

describe("README.md", () => {
  it.live("has a first program that runs", () =>
    withFolder(async (folder) => {
      const [program] = blocks(documents.get("README.md")!)
      assert.isBelow(program!.trim().split("\n").length, 15)
      const file = path.join(folder, "first.ts")
      fs.writeFileSync(file, imported(program!))
      const { stdout } = await run(process.execPath, [file])
      assert.include(stdout, "one process at a time")
    }))

  it("fits on one and a half screens", () => {
    // A screen has some 60 lines.
    assert.isAtMost(documents.get("README.md")!.split("\n").length, 90)
  })
})

describe("the documentation", () => {
  it("links to files and headings that exist", () => {
    let found = 0
    for (const [file, text] of documents) {
      for (const [, link] of text.matchAll(/\]\(([^)\s]+)\)/g)) {
        if (/^https?:/.test(link!)) continue
        const [target = "", anchor] = link!.split("#")
        const to = target === "" ? path.join(root, file) : path.join(root, path.dirname(file), target)
        assert.isTrue(fs.existsSync(to), `${file}: ${link}`)
        if (anchor !== undefined) assert.include(anchors(fs.readFileSync(to, "utf8")), anchor, `${file}: ${link}`)
        found++
      }
    }
    assert.isAbove(found, 50)
  })

  it.live("has programs that type-check", () =>
    withFolder(async (folder) => {
      let count = 0
      for (const [file, text] of documents) {
        for (const [index, code] of blocks(text).entries()) {
          assert.match(code, /from "lockstep(\/testing)?"/, `${file}: all that it shows is a program`)
          fs.writeFileSync(path.join(folder, `${path.basename(file, ".md")}-${index + 1}.ts`), imported(code))
          count++
        }
      }
      assert.isAbove(count, 25)
      fs.writeFileSync(
        path.join(folder, "tsconfig.json"),
        JSON.stringify({ extends: "../../tsconfig.json", include: ["."] })
      )
      const compiler = path.join(root, "node_modules/typescript/bin/tsc")
      const output = await run(process.execPath, [compiler, "-p", folder, "--pretty", "false"], { cwd: folder }).then(
        () => "",
        ({ stderr, stdout }: { readonly stderr: string; readonly stdout: string }) => stdout + stderr
      )
      // What is wrong with the sources themselves, other checks say.
      assert.deepStrictEqual(output.split("\n").filter((line) => line !== "" && !/^(\s|\.\.\/)/.test(line)), [])
    }))

  it("names every error and reason", () => {
    let found = 0
    for (const file of fs.globSync("src/**/*.ts", { cwd: root })) {
      for (const [, name] of read(file).matchAll(/export class (\w+)(?:<[^>]*>)?\s+extends Schema\.Error/g)) {
        assert.include(documents.get("docs/errors.md")!, `\`${name}\``, file)
        found++
      }
    }
    assert.isAbove(found, 50)
  })

  it("is right that every reason about a named thing says in which namespace that is", () => {
    let found = 0
    for (const file of fs.globSync("src/**/*.ts", { cwd: root })) {
      for (
        const [, name, fields] of read(file).matchAll(/class (\w+)\b[^{]*extends Schema\.Error[^{]*\{([^]*?)\n\s*\}\)/g)
      ) {
        if (!/\b(name|key): Schema/.test(fields!)) continue
        assert.match(fields!, /\bnamespace: Schema/, `${name} in ${file}`)
        found++
      }
    }
    assert.isAbove(found, 25)
  })

  it("has a page for every module, with its options, members and functions", () => {
    for (const name of modules) {
      const source = read(`src/${name}.ts`)
      const page = documents.get(`docs/${name}.md`)
      assert.isDefined(page, name)
      const words = new Set(page!.match(/\w+/g))
      const options = interfaces(source).flatMap(({ members, name: found }) =>
        found === name || found.endsWith("Options") ? members : []
      )
      const functions = [...source.matchAll(/^export const (\w+)/gm)].map(([, name]) => name!)
      for (const word of [...options, ...functions]) {
        if (word !== "TypeId") assert.isTrue(words.has(word), `docs/${name}.md does not mention ${word}`)
      }
    }
  })

  it("has every option of a coordinator and of a connection", () => {
    const coordinator = interfaces(read("src/Coordinator.ts")).find(({ name }) => name === "Options")!.members
    assert.isAbove(coordinator.length, 9)
    for (const option of coordinator) {
      if (option !== "batch") {
        assert.match(documents.get("docs/Coordinator.md")!, new RegExp(`\\| \`(batch\\.)?${option}\``))
      }
    }
    for (const { members } of interfaces(read("src/internal/redis/options.ts"))) {
      for (const option of members) assert.match(documents.get("docs/Redis.md")!, new RegExp(`\`${option}\``), option)
    }
  })

  it("has the permissions that are tested", () => {
    const tested = /const keys = [^]*?\n\]\n/.exec(read("test/limits.test.ts"))![0]
    const rules = [...tested.matchAll(/"((?:\+|-@)[^"]+|resetchannels)"/g)].map(([, rule]) => rule!)
    const documented = new Set(
      /ACL SETUSER[^]*?```/.exec(documents.get("docs/Redis.md")!)![0].match(/[+-][\w@|]+|resetchannels/g)
    )
    assert.isAbove(rules.length, 30)
    assert.deepStrictEqual([...documented].sort(), [...new Set([...rules, "+ping"])].sort())
  })
})
