/** The package as users get it: built, bundled, and without the repository around it. */
import { assert, layer } from "@effect/vitest"
import { Effect } from "effect"
import { build } from "esbuild"
import { execFile } from "node:child_process"
import * as fs from "node:fs"
import * as os from "node:os"
import * as path from "node:path"
import { promisify } from "node:util"
import { freshNamespace, TestServer } from "./support/live.ts"

const run = promisify(execFile)
const root = path.join(import.meta.dirname, "..")

const program = (importing: string, url: string, namespace: string) => `
import { Coordinator, Lock, Redis } from "${importing}"
import { Effect, Layer } from "effect"
const program = Effect.succeed("held").pipe(
  Lock.withLock("a"),
  Effect.provide(Coordinator.layer({ namespace: "${namespace}" }).pipe(Layer.provide(Redis.layer({ url: "${url}" }))))
)
Effect.runPromise(program).then(console.log)
`

/** TypeScript drops a comment together with the import that follows it, unless a blank line keeps them apart. */
const assertDocumented = (dist: string) => {
  const documented = fs.readdirSync(path.join(root, "src"), { recursive: true, encoding: "utf8" }).flatMap((file) => {
    const doc = file.endsWith(".ts") &&
      /^\/\*\*[\s\S]*?\*\//.exec(fs.readFileSync(path.join(root, "src", file), "utf8"))
    return doc ? [[file, doc[0]] as const] : []
  })
  assert.isAbove(documented.length, 50)
  for (const [file, doc] of documented) {
    const typings = fs.readFileSync(path.join(dist, file.replace(/\.ts$/, ".d.ts")), "utf8")
    assert.isTrue(typings.startsWith(doc), `the typings of ${file} keep the documentation of their module`)
  }
}

layer(TestServer.layer, { excludeTestServices: true, timeout: "60 seconds" })("the package", (it) => {
  it.effect(
    "runs built and bundled, from a folder that has nothing else, and its typings keep the documentation",
    () =>
      Effect.gen(function*() {
        const server = yield* TestServer
        yield* Effect.acquireUseRelease(
          Effect.sync(() => fs.mkdtempSync(path.join(os.tmpdir(), "lockstep-package-"))),
          (folder) =>
            Effect.promise(async () => {
              const home = path.join(folder, "node_modules", "lockstep")
              await run(process.execPath, [
                path.join(root, "node_modules/typescript/bin/tsc"),
                "-p",
                path.join(root, "src"),
                "--outDir",
                path.join(home, "dist")
              ])
              fs.copyFileSync(path.join(root, "package.json"), path.join(home, "package.json"))
              assertDocumented(path.join(home, "dist"))
              for (const name of ["effect", "ioredis"]) {
                fs.symlinkSync(path.join(root, "node_modules", name), path.join(folder, "node_modules", name))
              }
              const entry = path.join(folder, "main.mjs")
              fs.writeFileSync(entry, program("lockstep", server.url, freshNamespace()))
              assert.strictEqual((await run(process.execPath, [entry], { cwd: folder })).stdout.trim(), "held")
              // Each module by itself, as the exports map names it.
              const modules = ["", "effect/"].flatMap((folder) =>
                fs.readdirSync(path.join(root, "src", folder)).flatMap((file) =>
                  /^[A-Z].*\.ts$/.test(file) ? [folder + file.slice(0, -3)] : []
                )
              )
              for (const name of modules) {
                const check =
                  `import * as it from "lockstep/${name}"; if (Object.keys(it).length === 0) process.exit(1)`
                await run(process.execPath, ["--input-type=module", "-e", check], { cwd: folder })
              }
              const bundle = path.join(folder, "bundled", "main.mjs")
              await build({
                entryPoints: [entry],
                outfile: bundle,
                bundle: true,
                platform: "node",
                format: "esm",
                // ioredis is CommonJS, and asks for Node's own modules with require.
                banner: {
                  js: "import { createRequire } from 'node:module'; const require = createRequire(import.meta.url)"
                },
                logLevel: "error"
              })
              const alone = path.join(folder, "alone.mjs")
              fs.renameSync(bundle, alone)
              fs.rmSync(path.join(folder, "node_modules"), { recursive: true })
              assert.strictEqual((await run(process.execPath, [alone], { cwd: folder })).stdout.trim(), "held")
            }),
          (folder) => Effect.sync(() => fs.rmSync(folder, { recursive: true, force: true }))
        )
      }),
    180_000
  )
})
