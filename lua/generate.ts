/**
 * Assembles `lua/*.lua` into `src/internal/actor/lua.ts`: the source as a string (bundlers must work, so nothing is read
 * at run time) and the types of all requests and replies, taken from the headers of the handlers.
 *
 * Beside handlers, a file declares the records that it packs (`-- record Name version: field, ...`) and the kinds of
 * resources that it acts for, with the keys of each (`-- kinds: lock, semaphore: hash`).
 *
 * `node lua/generate.ts` writes, `node lua/generate.ts --check` fails when what is committed is stale.
 */
import { createHash } from "node:crypto"
import { readdirSync, readFileSync, writeFileSync } from "node:fs"

const target = new URL("../src/internal/actor/lua.ts", import.meta.url)

type Type = "string" | "number" | "boolean" | "strings" | "json"

interface Handler {
  readonly verb: string
  /** Empty for none; undefined for all of the kind. */
  readonly roles: ReadonlyArray<string> | undefined
  /** It is about several resources of one kind. */
  readonly each: boolean
  readonly args: ReadonlyArray<readonly [name: string, type: Type]>
  /** It may run when the server is out of memory. */
  readonly oom: boolean
  /** It follows from what its session has heard. */
  readonly heard: boolean
  readonly replies: ReadonlyArray<readonly [tag: string, fields: ReadonlyArray<readonly [name: string, type: Type]>]>
}

const fail = (message: string): never => {
  throw new Error(`lua: ${message}`)
}

const fieldOf = (text: string): readonly [string, Type] => {
  const found = /^(\w+) (string|number|boolean|strings|json)$/.exec(text.trim())
  return found === null
    ? fail(`"${text}" is not "<name> string|number|boolean|strings|json"`)
    : [found[1]!, found[2] as Type]
}

const fieldsOf = (text: string) => text.trim() === "" ? [] : text.split(",").map(fieldOf)

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
    const args = fieldsOf(field("args") ?? fail(`${where} declares no args`))
    const reply = field("reply") ?? fail(`${where} declares no reply`)
    const end = lines.findIndex((text, at) => at > index && text === "end")
    const body = lines.slice(index, end).join("\n")
    const parameters = found[2]!.split(/, ?/).filter((name) => name !== "").slice(1)
    if (parameters.join() !== args.map(([name]) => name).join()) {
      fail(`${where} takes (${parameters.join(", ")}), and its header declares "${field("args")}"`)
    }
    const each = keys === "each"
    if (each && args[0]?.join(" ") !== "count number") {
      fail(`${where} has keys of each: its first argument is the count`)
    }
    const roles = keys === "none"
      ? []
      : keys === "all" || each
      ? undefined
      : keys.split(",").map((role) => role.trim())
    if (roles !== undefined && roles.some((role, at) => !/^[a-z]+$/.test(role) || (at === 0) !== (role === "hash"))) {
      fail(`${where} has keys "${keys}": the first one is the hash`)
    }
    const replies = reply.split(" | ").map((tuple) => {
      const [tag, ...fields] = tuple.trim().replace(/^\[|\]$/g, "").split(",").map((part) => part.trim())
      return [JSON.parse(tag!) as string, fields.map(fieldOf)] as const
    })
    for (const used of body.matchAll(/return (?:reply\(|'\[")'?(\w+)/g)) {
      if (!replies.some(([tag]) => tag === used[1])) {
        fail(`${where} answers "${used[1]}", which its header does not declare`)
      }
    }
    const flags = field("flags")?.split(", ") ?? []
    handlers.push({
      verb,
      roles,
      each,
      args,
      oom: flags.includes("allow-oom"),
      heard: flags.includes("heard"),
      replies
    })
  }
  return handlers
}

const shapeOf = (numbers: number): string => `'<B${"d".repeat(numbers)}'`

/** In bytes, with the version. */
const lengthOf = (numbers: number): number => 1 + 8 * numbers

/**
 * A record of numbers, packed behind its version: one of another version cannot be read, and is as good as none. The last field
 * can be a text ("text name").
 */
const recordOf = (file: string, name: string, version: string, fields: ReadonlyArray<string>): string => {
  const tail = /^text (\w+)$/.exec(fields.at(-1)!)?.[1]
  const numbers = tail === undefined ? fields : fields.slice(0, -1)
  if (numbers.some((field) => !/^[a-z]\w*$/i.test(field))) fail(`${file}: record ${name} has fields "${fields.join()}"`)
  const shape = shapeOf(numbers.length)
  const length = lengthOf(numbers.length)
  const letters = numbers.map((_, at) => `v${at}`)
  const found = numbers.map((field, at) => `${field} = ${letters[at]}`)
  return [
    `local function pack${name}(r)`,
    `  return pack(${shape}, ${version}, ${numbers.map((field) => `r.${field}`).join(", ")})${
      tail === undefined ? "" : ` .. r.${tail}`
    }`,
    "end",
    `local function unpack${name}(packed)`,
    `  if byte(packed) ~= ${version} or #packed ${tail === undefined ? "~=" : "<"} ${length} then return nil end`,
    `  local _, ${letters.join(", ")} = unpackStruct(${shape}, packed)`,
    `  return { ${[...found, ...tail === undefined ? [] : [`${tail} = sub(packed, ${length + 1})`]].join(", ")} }`,
    "end"
  ].join("\n")
}

const records = /^-- record (\w+) (\d+): (.*(?:\n--   .*)*)$/gm

const listedIn = (listed: string): ReadonlyArray<string> =>
  listed.replace(/\n--/g, " ").split(",").map((field) => field.trim())

const expandRecords = (file: string, source: string): string =>
  source.replace(
    records,
    (_, name: string, version: string, listed: string) => recordOf(file, name, version, listedIn(listed))
  )

/** The keys of a resource of each kind, by role. */
const kindsOf = (file: string, source: string): ReadonlyArray<readonly [kind: string, roles: ReadonlyArray<string>]> =>
  [...source.matchAll(/^-- kinds: (.*): (.*)$/gm)].flatMap(([, kinds, roles]) =>
    kinds!.split(",").map((kind) => {
      if (!/^[a-zA-Z]+$/.test(kind.trim())) fail(`${file}: "${kind}" is not a kind`)
      return [kind.trim(), roles!.split(",").map((role) => role.trim())] as const
    })
  )

// The kernel comes first. A file may name the files that it comes behind, and then it sees their names.
const read = (file: string) => readFileSync(new URL(file, import.meta.url), "utf8").trimEnd()
const texts = new Map(
  readdirSync(new URL(".", import.meta.url)).filter((file) => file.endsWith(".lua")).sort().map((file) =>
    [file, read(file)] as const
  )
)
const ordered: Array<string> = []
const add = (file: string): void => {
  if (ordered.includes(file)) return
  const source = texts.get(file) ?? fail(`${file} is missing`)
  for (const [, needed] of source.matchAll(/^-- after (\w+\.lua)$/gm)) add(needed!)
  ordered.push(file)
}
add("kernel.lua")
for (const file of texts.keys()) add(file)

/**
 * What is known of a record's packing, for code that needs no table of it: `SHAPE.Name`, `VERSION.Name`, `LENGTH.Name`; and of a field
 * the byte that it begins with, `PLACE.Name.field`, and the shape of all fields before it, `SHAPE.Name.field`.
 */
const packings = new Map(
  [...texts.values()].flatMap((source) =>
    [...source.matchAll(records)].map(([, name, version, listed]) => {
      const fields = listedIn(listed!).filter((field) => !field.startsWith("text "))
      return [name!, { version: version!, fields }] as const
    })
  )
)
const expandPackings = (file: string, source: string): string => {
  const packingOf = (name: string) => packings.get(name) ?? fail(`${file}: there is no record ${name}`)
  const before = (name: string, field: string | undefined): number => {
    const { fields } = packingOf(name)
    const at = field === undefined ? fields.length : fields.indexOf(field)
    return at < 0 ? fail(`${file}: there is no ${field} in record ${name}`) : at
  }
  return source
    .replace(/\bVERSION\.(\w+)/g, (_, name: string) => packingOf(name).version)
    .replace(/\bLENGTH\.(\w+)/g, (_, name: string) => String(lengthOf(before(name, undefined))))
    .replace(/\bPLACE\.(\w+)\.(\w+)/g, (_, name: string, field: string) => String(1 + lengthOf(before(name, field))))
    .replace(
      /\bSHAPE\.(\w+)(?:\.(\w+))?/g,
      (_, name: string, field: string | undefined) => shapeOf(before(name, field))
    )
}

const sources = ordered.map((file) => [file, expandPackings(file, expandRecords(file, texts.get(file)!))] as const)
const namesOf = (source: string) =>
  [...source.matchAll(/^local (?:function )?([\w, ]+)/gm)].flatMap((found) => found[1]!.trim().split(/, */))
const handlers = sources.flatMap(([file, source]) => parse(file, source))
const kinds = sources.flatMap(([file, source]) => kindsOf(file, source))
const verbs = sources.flatMap(([, source]) => [...source.matchAll(/^handlers\['([\w.]+)'\]/gm)])
if (verbs.length !== handlers.length) fail("a handler is not written as handlers['verb'] = function(...)")

/** The names that a file uses of the files that it comes behind. */
const importsOf = (file: string): ReadonlyArray<readonly [from: string, names: ReadonlyArray<string>]> => {
  const words = new Set(texts.get(file)!.replace(/--.*$/gm, "").match(/\w+/g))
  return [...texts.get(file)!.matchAll(/^-- after (\w+\.lua)$/gm)].map(([, from]) => {
    const [, provider] = sources.find(([name]) => name === from)!
    return [from!, namesOf(provider).filter((name) => words.has(name))] as const
  })
}
const imports = new Map(ordered.map((file) => [file, importsOf(file)] as const))
const shared = ["modules", ...namesOf(sources[0]![1])]
for (const [file, source] of sources.slice(1)) {
  const names = [...shared, ...imports.get(file)!.flatMap(([, imported]) => imported), ...namesOf(source)]
  // A name that is taken twice would change what the first file means by it.
  const twice = names.find((name, at) => names.indexOf(name) !== at)
  if (twice !== undefined) fail(`${file}: ${twice} is declared twice`)
  if (names.length > 195) fail(`${file}: ${names.length} names: a Lua function has room for 200`)
}

// All files see the names of the kernel. The names of another file reach the files that come behind it.
const scoped = (file: string, source: string): string => {
  const imported = imports.get(file)!.flatMap(([from, names]) =>
    names.map((name) => `local ${name} = modules['${from}'].${name}`)
  )
  const exported = new Set([...imports.values()].flat().flatMap(([from, names]) => from === file ? names : []))
  const table = exported.size === 0
    ? []
    : [`modules['${file}'] = { ${[...exported].map((name) => `${name} = ${name}`).join(", ")} }`]
  return ["do", ...imported, source, ...table, "end"].join("\n")
}

const rolesInLua = (roles: ReadonlyArray<string>) => `{ ${roles.map((role) => `'${role}'`).join(", ")} }`
const shapeInLua = ({ args, each, roles }: Handler): string =>
  `{ keys = ${each ? -2 : roles === undefined ? -1 : roles.length}, args = ${args.length}${
    roles !== undefined && roles.length > 1 ? `, roles = ${rolesInLua(roles)}` : ""
  } }`

// Comments and blank lines would be parsed by Redis at every load and sent with it; they stay in lua/.
const body = [
  `local SHAPES = { ${handlers.map((handler) => `['${handler.verb}'] = ${shapeInLua(handler)}`).join(", ")} }`,
  // Of a request about the same resource as the one before it, which names all keys of it.
  `local SAME = { ${handlers.map(({ verb }) => `['=${verb}'] = '${verb}'`).join(", ")} }`,
  `local ROLES = { none = { 'hash' }, ${kinds.map(([kind, roles]) => `${kind} = ${rolesInLua(roles)}`).join(", ")} }`,
  "local modules = {}",
  ...sources.map(([file, source]) => file === "kernel.lua" ? source : scoped(file, source))
].join("\n")
  .split("\n").map((line) => line.replace(/^\s+| +-- .*$/g, "")).filter((line) => line !== "" && !line.startsWith("--"))
  .join("\n")
const protocol = /^-- PROTOCOL (\d+):/m.exec(sources[0]![1])?.[1] ?? fail("PROTOCOL is missing")
const hash = createHash("sha1").update(body).digest("hex").slice(0, 12)

const inTypeScript: Record<Type, string> = {
  string: "string",
  number: "number",
  boolean: "boolean",
  strings: "ReadonlyArray<string>",
  json: "unknown"
}
const typed = (fields: Handler["args"]) => fields.map(([name, type]) => `${name}: ${inTypeScript[type]}`)

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
  handlers.map(({ args, replies, verb }) =>
    `  "${verb}": {\n    readonly args: [${typed(args).join(", ")}]\n    readonly reply: ${
      replies.map(([tag, fields]) => `readonly [${[`tag: "${tag}"`, ...typed(fields)].join(", ")}]`).join(" | ")
    }\n  }`
  ).join("\n")
}
}

/** Requests that may run when the server is out of memory: they only renew, release or acknowledge. */
export const allowOom: ReadonlySet<string> = new Set(${
  JSON.stringify(handlers.filter(({ oom }) => oom).map(({ verb }) => verb))
})

/** Requests that follow from what their session has heard: Redis has to know what that was. */
export const heard: ReadonlySet<string> = new Set(${
  JSON.stringify(handlers.filter(({ heard }) => heard).map(({ verb }) => verb))
})

/** The keys of a resource of each kind, by role. */
export const kinds = {
${kinds.map(([kind, roles]) => `  ${kind}: ${JSON.stringify(roles)}`).join(",\n")}
} as const

/** Requests that name more than the hash of their resource, and what they name; null for all keys of its kind. */
export const roles: { readonly [verb: string]: ReadonlyArray<string> | null } = {
${
  handlers.filter(({ roles }) => roles === undefined || roles.length > 1).map(({ roles, verb }) =>
    `  "${verb}": ${JSON.stringify(roles ?? null)}`
  ).join(",\n")
}
}

/** The shape of each reply: its tags, and the types behind each tag. */
export const replies: { readonly [verb: string]: { readonly [tag: string]: ReadonlyArray<string> } } = {
${
  handlers.map(({ replies, verb }) =>
    `  "${verb}": { ${
      replies.map(([tag, fields]) => `${tag}: [${fields.map(([, type]) => `"${type}"`).join(", ")}]`).join(", ")
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
