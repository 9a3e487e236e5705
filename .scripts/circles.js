// Fails when files of src/ import each other in a circle, or upwards: each layer may only look down, and neither at other folders of the
// same layer; when a primitive imports another one; and when another folder of internal/ than redis/ imports ioredis. Type imports count.
import { readdirSync, readFileSync } from "node:fs"
import { dirname, join, relative, resolve } from "node:path"

const root = resolve(import.meta.dirname, "../src")
const files = readdirSync(root, { recursive: true, withFileTypes: true })
  .filter((entry) => entry.isFile() && entry.name.endsWith(".ts"))
  .map((entry) => join(entry.parentPath, entry.name))
/** @type {Array<string>} */
const problems = []

const imports = new Map(files.map((file) => {
  const text = readFileSync(file, "utf8").replace(/\/\*[\s\S]*?\*\//g, "")
  const found = [...text.matchAll(/(?:from|import)\s*\(?\s*"(\.[^"]+)"/g)].map(([, path]) =>
    resolve(dirname(file), String(path))
  )
  const path = relative(root, file)
  if (/from "ioredis/.test(text) && path.startsWith("internal/") && !path.startsWith("internal/redis/")) {
    problems.push(`${path} imports ioredis: only internal/redis/ may`)
  }
  return [file, found.filter((path) => files.includes(path))]
}))

// The lowest first: folders, and single files, which may not look at those beside them either.
const layers = [
  ["internal/io.ts", "internal/text.ts"],
  ["internal/redis/"],
  ["internal/actor/errors.ts", "internal/actor/keys.ts", "internal/actor/lua.ts"],
  ["internal/actor/home.ts", "internal/actor/wire.ts"],
  ["internal/actor/session.ts"],
  ["internal/actor/hooks.ts", "internal/actor/vigil.ts"],
  ["internal/actor/transport.ts"],
  ["internal/actor/sending.ts"],
  ["internal/actor/outbox.ts", "internal/actor/pulse.ts", "internal/actor/reader.ts", "internal/actor/reaper.ts"],
  ["internal/actor/mailbox.ts", "internal/actor/office.ts"],
  ["internal/actor/former.ts", "internal/actor/questions.ts"],
  ["internal/actor/reads.ts"],
  ["internal/actor/opening.ts"],
  ["internal/actor/channel.ts"],
  ["internal/actor/kernel.ts"],
  ["internal/hold/"],
  ["internal/sync/", "internal/work/"],
  ["Metrics.ts"],
  ["internal/metrics.ts", "Redis.ts"],
  ["internal/election/", "internal/queue/", "internal/ref/", "internal/taskGroup/", "internal/topic/"],
  ["internal/flow/"],
  // All other files of src/ itself.
  ["*.ts"],
  ["effect/", "internal/simulation/", "internal/testing/"],
  ["testing/"],
  ["testing.ts"]
]
/** @param {string} path @param {string} part */
const isIn = (path, part) => part.endsWith("/") ? path.startsWith(part) : path === part
/** @param {string} file */
const placeOf = (file) => {
  const path = relative(root, file)
  const parts = layers.flatMap((layer, at) => layer.map((part) => ({ at, part })))
  return parts.find(({ part }) => isIn(path, part)) ??
    (path.includes("/") ? undefined : parts.find(({ part }) => part === "*.ts"))
}

for (const [file, found] of imports) {
  const from = placeOf(file)
  if (from === undefined) problems.push(`${relative(root, file)} has no place in a layer`)
  for (const path of found) {
    const to = placeOf(path)
    if (from === undefined || to === undefined || to.at < from.at) continue
    const isBeside = to.at === from.at && to.part === from.part && !from.part.endsWith(".ts")
    // Primitives are looked at below.
    const isPrimitive = to.part === "*.ts" && from.part === "*.ts"
    if (!isBeside && !isPrimitive) problems.push(`${relative(root, file)} looks up at ${relative(root, path)}`)
  }
}

// What every primitive needs. A value that one of them has for another one comes from internal/.
const shared = new Set(["Coordinator.ts", "Lease.ts", "Metrics.ts", "Redis.ts"])
/** @param {string} file */
const isPublic = (file) => /^[A-Z]\w*\.ts$/.test(relative(root, file))
for (const [file, found] of imports) {
  for (const path of found) {
    if (isPublic(file) && isPublic(path) && !shared.has(relative(root, path))) {
      problems.push(`${relative(root, file)} imports another primitive: ${relative(root, path)}`)
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
