/**
 * A build. Each module of Lockstep that `Lock.ts` needs is compiled by a job, behind the modules that it imports, on whatever process
 * is free. Then one of them cannot be compiled: what is behind it is cancelled, and goes on when it is mended.
 */
import { NodeRuntime } from "@effect/platform-node"
import { Console, Effect, Layer, Schema } from "effect"
import assert from "node:assert/strict"
import { createHash } from "node:crypto"
import { readFile } from "node:fs/promises"
import { stripTypeScriptTypes } from "node:module"
import { Flow, Queue } from "../src/index.ts" // In your program: from "lockstep"
import { layer } from "./support.ts"

const Built = Schema.Struct({ hash: Schema.String, bytes: Schema.Number })

class Compile extends Queue.Service<Compile>()("compile", {
  // What it is made of is in the hash, so a module is other code if one of its imports is.
  payload: Schema.Struct({ module: Schema.String, imports: Schema.Array(Schema.String) }),
  success: Built,
  error: Schema.Struct({ module: Schema.String, why: Schema.String })
}) {}

const Modules = Schema.Record(Schema.String, Schema.Array(Schema.String))

class Build extends Flow.Service<Build>()("build", { queues: [Compile], input: Modules }, (flow, modules) => {
  const nodes = new Map<string, Flow.Node<typeof Built.Type>>()
  const nodeOf = (module: string): Flow.Node<typeof Built.Type> => {
    const known = nodes.get(module)
    if (known !== undefined) return known
    const node = flow.job(Compile, {
      name: module,
      attempts: 1,
      after: modules[module]!.map(nodeOf),
      payload: (built) => ({ module, imports: built.map(({ hash }) => hash) })
    })
    nodes.set(module, node)
    return node
  }
  return nodeOf("Lock.ts")
}) {}

const source = (module: string) => Effect.promise(() => readFile(new URL(`../src/${module}`, import.meta.url), "utf8"))

/** The modules that a module needs, and what each of them imports. */
const modulesOf = Effect.fnUntraced(function*(entry: string) {
  const found: Record<string, Array<string>> = {}
  const pending = [entry]
  for (let module = pending.pop(); module !== undefined; module = pending.pop()) {
    if (found[module] !== undefined) continue
    const imports = [...(yield* source(module)).matchAll(/^(?:import|export) (?!type)[^"]*from "(\.[^"]+)"/gm)]
    const names = imports.map(([, path]) => new URL(path!, `file:///${module}`).pathname.slice(1))
    pending.push(...found[module] = [...new Set(names)])
  }
  return found
})

const compiled: Array<string> = []
let broken = ""

const compile = Effect.fnUntraced(function*({ imports, module }: {
  readonly module: string
  readonly imports: ReadonlyArray<string>
}) {
  if (module === broken) return yield* Effect.fail({ module, why: "syntax error" })
  const code = stripTypeScriptTypes(yield* source(module))
  compiled.push(module)
  const hash = createHash("sha1").update(code)
  for (const imported of imports) hash.update(imported)
  return { hash: hash.digest("hex"), bytes: code.length }
})

const program = Effect.gen(function*() {
  const build = yield* Build
  const modules = yield* modulesOf("Lock.ts")
  const { hash } = yield* build.run(modules)
  assert.deepEqual(compiled.toSorted(), Object.keys(modules).toSorted())
  for (const [module, imports] of Object.entries(modules)) {
    for (const imported of imports) assert(compiled.indexOf(imported) < compiled.indexOf(module))
  }

  // The same build, with an error in the middle of the graph.
  compiled.length = 0
  broken = "internal/actor/keys.ts"
  const again = yield* build.start(modules, { id: "again" })
  const { reason } = yield* Effect.flip(again.await)
  assert(reason._tag === "NodeFailed")
  assert.deepEqual(reason.error, { module: broken, why: "syntax error" })
  const before = [...compiled]
  broken = ""
  yield* again.retry
  assert.equal((yield* again.await).hash, hash)
  // What was compiled was not compiled again.
  assert.equal(new Set(compiled).size, compiled.length)
  assert(before.length < compiled.length)
  yield* Console.log(`every module was compiled once, behind its imports, also after ${reason.node} had failed`)
})

program.pipe(
  Effect.provide(
    Layer.mergeAll(Queue.worker(Compile, compile, { concurrency: 8 }), Build.layer).pipe(
      Layer.provideMerge(Compile.layer),
      Layer.provide(layer())
    )
  ),
  NodeRuntime.runMain
)
