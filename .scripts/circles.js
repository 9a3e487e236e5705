// Fails when files of src/ import each other in a circle, or upwards: each layer may only look down. Type imports count.
import { readdirSync, readFileSync } from "node:fs"
import { dirname, join, relative, resolve } from "node:path"

const root = resolve(import.meta.dirname, "../src")
const files = readdirSync(root, { recursive: true, withFileTypes: true })
  .filter((entry) => entry.isFile() && entry.name.endsWith(".ts"))
  .map((entry) => join(entry.parentPath, entry.name))
const imports = new Map(files.map((file) => {
  const text = readFileSync(file, "utf8").replace(/\/\*[\s\S]*?\*\//g, "")
  const found = [...text.matchAll(/(?:from|import)\s*\(?\s*"(\.[^"]+)"/g)].map(([, path]) =>
    resolve(dirname(file), String(path))
  )
  return [file, found.filter((path) => files.includes(path))]
}))

// The lowest first. What is public, and the files of single primitives, may look at all of them.
const layers = ["internal/io.ts", "internal/redis/", "internal/actor/", "internal/hold/", "internal/work/"]
/** @param {string} file */
const layerOf = (file) => {
  const at = layers.findIndex((layer) => relative(root, file).startsWith(layer))
  return at < 0 ? layers.length : at
}
// Metrics are declared for users, and written from inside.
const leaves = new Set([join(root, "Metrics.ts")])

/** @type {Array<string>} */
const problems = []
for (const [file, found] of imports) {
  for (const path of found) {
    if (layerOf(path) > layerOf(file) && !leaves.has(path)) {
      problems.push(`${relative(root, file)} looks up at ${relative(root, path)}`)
    }
  }
}

// Tarjan's strongly connected components.
/** @type {Map<string, number>} */
const index = new Map()
/** @type {Map<string, number>} */
const low = new Map()
/** @type {Array<string>} */
const stack = []
/** @param {string} file */
const visit = (file) => {
  const at = index.size
  index.set(file, at)
  low.set(file, at)
  stack.push(file)
  for (const next of imports.get(file) ?? []) {
    if (!index.has(next)) visit(next)
    if (stack.includes(next)) low.set(file, Math.min(Number(low.get(file)), Number(low.get(next))))
  }
  if (low.get(file) !== at) return
  const part = stack.splice(stack.indexOf(file))
  if (part.length > 1) problems.push(`a circle: ${part.map((one) => relative(root, one)).sort().join(", ")}`)
}
for (const file of files) if (!index.has(file)) visit(file)

for (const problem of problems) console.error(problem)
process.exitCode = problems.length > 0 ? 1 : 0
