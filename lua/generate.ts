/**
 * Assembles `lua/*.lua` into `src/internal/actor/lua.ts`: the source as a string (bundlers must work, so nothing is read at
 * run time) and the types of all requests and replies, taken from the headers of the handlers.
 *
 * `node lua/generate.ts` writes, `node lua/generate.ts --check` fails when what is committed is stale.
 */
import { createHash } from "node:crypto"
import { readFileSync, writeFileSync } from "node:fs"

// What dispatch() in kernel.lua passes on.
const maxArguments = 6

const files = [
  "kernel.lua",
  "Semaphore.lua",
  "Latch.lua",
  "Leader.lua",
  "Singleton.lua",
  "Barrier.lua",
  "DoubleBarrier.lua",
  "TaskGroup.lua",
  "Signal.lua",
  "Rendezvous.lua",
  "Fence.lua"
]
const target = new URL("../src/internal/actor/lua.ts", import.meta.url)

interface Handler {
  readonly verb: string
  readonly keys: number
  readonly args: ReadonlyArray<string>
  readonly replies: ReadonlyArray<string>
  readonly oom: boolean
  readonly tags: ReadonlyArray<readonly [tag: string, types: ReadonlyArray<string>, rest: boolean]>
}

const fail = (message: string): never => {
  throw new Error(`lua: ${message}`)
}

const typeOf = (field: string): string => {
  const [name, type] = field.trim().split(/\s+/)
  if (name === undefined || type === undefined || !/^(string|number|boolean|strings|json)$/.test(type)) {
    return fail(`"${field}" is not "<name> string|number|boolean|json"`)
  }
  return `${name.replace("...", "")}: ${type === "strings" ? "string" : type === "json" ? "unknown" : type}`
}

const parse = (file: string, source: string): ReadonlyArray<Handler> => {
  const handlers: Array<Handler> = []
  const lines = source.split("\n")
  for (const [index, line] of lines.entries()) {
    const found = /^handlers\['([\w.]+)'\] = function\(\w+,? ?(.*)\)$/.exec(line)
    if (found === null) continue
    const verb = found[1]!
    const where = `${file}: ${verb}`
    const header: Array<string> = []
    for (let at = index - 1; lines[at]?.startsWith("-- "); at--) header.unshift(lines[at]!.slice(3))
    if (!header[0]?.startsWith(`${verb}: `)) fail(`${where} has no header`)
    const field = (name: string) => header.find((text) => text.startsWith(`${name}:`))?.slice(name.length + 1).trim()
    const keys = field("keys") ?? fail(`${where} declares no keys`)
    const args = field("args") ?? fail(`${where} declares no args`)
    const reply = field("reply") ?? fail(`${where} declares no reply`)
    const names = args === "" ? [] : args.split(",").map(typeOf)
    const end = lines.findIndex((text, at) => at > index && text === "end")
    const body = lines.slice(index, end).filter((text) => !text.includes("post(")).join("\n")
    const parameters = found[2]!.split(/, ?/).filter((name) => name !== "").slice(1)
    if (parameters.join() !== names.map((name) => name.split(":")[0]).join()) {
      fail(`${where} takes (${parameters.join(", ")}), and its header declares "${args}"`)
    }
    if (keys !== "none" && keys !== "resource" && keys !== "resource, items") fail(`${where} has keys "${keys}"`)
    if (names.length > maxArguments) fail(`${where} has more than ${maxArguments} arguments`)
    for (const used of body.matchAll(/'\["(\w+)"/g)) {
      if (!reply.includes(`"${used[1]}"`)) fail(`${where} answers "${used[1]}", which its header does not declare`)
    }
    const tags = reply.split(" | ").map((tuple) => {
      const [tag, ...fields] = tuple.trim().replace(/^\[|\]$/g, "").split(",").map((part) => part.trim())
      const rest = fields.at(-1)?.startsWith("...") === true
      return [tag!, fields.map(typeOf), rest] as const
    })
    handlers.push({
      verb,
      keys: keys === "none" ? 0 : keys.split(",").length,
      args: names,
      replies: tags.map(([tag, fields, rest]) =>
        rest
          ? `readonly [tag: ${tag}, ...${fields[0]!.replace(": ", ": ReadonlyArray<").replace("...", "")}>]`
          : `readonly [${[`tag: ${tag}`, ...fields].join(", ")}]`
      ),
      oom: field("flags") === "allow-oom",
      tags: tags.map(([tag, fields, rest]) => [tag, fields.map((text) => text.split(": ")[1]!), rest])
    })
  }
  return handlers
}

const sources = files.map((file) => [file, readFileSync(new URL(file, import.meta.url), "utf8").trimEnd()] as const)
const handlers = sources.flatMap(([file, source]) => parse(file, source))
const verbs = sources.flatMap(([, source]) => [...source.matchAll(/^handlers\['([\w.]+)'\]/gm)])
if (verbs.length !== handlers.length) fail("a handler is not written as handlers['verb'] = function(...)")
// All files are one chunk, so a name that is taken twice would change what the first file means by it.
const locals = sources.flatMap(([, source]) =>
  [...source.matchAll(/^local (?:function )?([\w, ]+)/gm)].flatMap((found) => found[1]!.trim().split(/, */))
)
const twice = locals.find((name, at) => locals.indexOf(name) !== at)
if (twice !== undefined) fail(`${twice} is declared twice`)
// Comments and blank lines would be parsed by Redis at every load and sent with it; they stay in lua/.
const body = [
  // How many keys and arguments each request has.
  `local SHAPES = { ${
    handlers.map(({ args, keys, verb }) => `['${verb}'] = { ${keys}, ${args.length} }`).join(", ")
  } }`,
  ...sources.map(([, source]) => source)
].join("\n")
  .split("\n").map((line) => line.replace(/^\s+| +-- .*$/g, "")).filter((line) => line !== "" && !line.startsWith("--"))
  .join("\n")
const protocol = /^-- PROTOCOL (\d+):/m.exec(sources[0]![1])?.[1] ?? fail("PROTOCOL is missing")
const hash = createHash("sha1").update(body).digest("hex").slice(0, 12)

const output = `// Generated by lua/generate.ts from lua/*.lua. Do not edit.
/** The protocol between coordinators and partition actors. Two that differ must not share a namespace. */
export const protocol = ${protocol}

/** Names the library and its functions, so that two releases can share a Redis. */
export const library = "lockstep_${protocol}_${hash}"

/** All actors, without the registration of their functions. */
export const body = ${JSON.stringify(body)}

/** What a handler is called with, and what it can answer. */
export interface Requests {
${
  handlers.map(({ args, keys, replies, verb }) =>
    `  "${verb}": {\n    readonly keys: ${keys}\n    readonly args: [${args.join(", ")}]\n    readonly reply: ${
      replies.join(" | ")
    }\n  }`
  ).join("\n")
}
}

/** Requests that may run when the server is out of memory: they only renew, release or acknowledge. */
export const allowOom: ReadonlySet<string> = new Set(${
  JSON.stringify(handlers.filter(({ oom }) => oom).map(({ verb }) => verb))
})

/** Requests about a resource that may carry items: they name its hash and those. */
export const carriers: ReadonlySet<string> = new Set(${
  JSON.stringify(handlers.filter(({ keys }) => keys === 2).map(({ verb }) => verb))
})

/** The shape of each reply: its tags, and the types behind each tag ("..." repeats the last). */
export const replies: { readonly [verb: string]: { readonly [tag: string]: ReadonlyArray<string> } } = {
${
  handlers.map(({ tags, verb }) =>
    `  "${verb}": { ${
      tags.map(([tag, types, rest]) =>
        `${JSON.parse(tag)}: [${[...types, ...(rest ? ["..."] : [])].map((type) => `"${type}"`).join(", ")}]`
      ).join(", ")
    } }`
  ).join(",\n")
}
}
`

if (process.argv.includes("--check")) {
  if (readFileSync(target, "utf8") !== output) {
    console.error("src/internal/actor/lua.ts is stale: run `node lua/generate.ts` and commit the result.")
    process.exit(1)
  }
} else {
  writeFileSync(target, output)
}
