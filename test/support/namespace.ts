/** What a namespace has in Redis, regardless of what its coordinators say. */
import { Effect } from "effect"
import type { CommandError } from "./command.ts"
import type { Server } from "./servers.ts"

// There can be line ends in a key, so this is no text.
const list = (server: Server, ...command: ReadonlyArray<string>) =>
  server.call(...command) as Effect.Effect<ReadonlyArray<string>, CommandError>

export const keysOf = (server: Server, namespace: string): Effect.Effect<ReadonlyArray<string>, CommandError> =>
  list(server, "KEYS", `{${namespace}:*`)

const numbers = new Set(["protocol", "partitions", "opened", "identity", "token"])

const isNumber = (field: string) => numbers.has(field)

/** A barrier whose last session has expired: its results stay for a day. */
const isKept = Effect.fnUntraced(function*(server: Server, key: string) {
  const fields = yield* list(server, "HKEYS", key)
  return fields.every((field) => /^(s|[er]\d)$/.test(field)) && Number(yield* server.cli("PTTL", key)) > 0
})

/** What says which ids were published in a topic that was deleted: they stay known for a while. */
const isNoted = Effect.fnUntraced(function*(server: Server, key: string) {
  const [, prefix, name] = /^(\{[^}]+\}:)topic(?:-even|-odd)?:(.*)$/s.exec(key) ?? []
  if (prefix === undefined) return false
  const notes = yield* Effect.forEach(
    ["even", "odd"],
    (role) => list(server, "HKEYS", `${prefix}topic-${role}:${name}`)
  )
  const fields = key.startsWith(`${prefix}topic:`) ? yield* list(server, "HKEYS", key) : []
  return notes.flat().some((field) => field.startsWith("i")) && fields.every((field) => /^(s|[EL]\d+)$/.test(field)) &&
    Number(yield* server.cli("PTTL", key)) > 0
})

/** Everything in it but the numbers of its partitions: a key, or a key and one of its fields. */
export const remainsOf = Effect.fnUntraced(function*(servers: ReadonlyArray<Server>, namespace: string) {
  const found: Array<string> = []
  for (const server of servers) {
    for (const key of yield* keysOf(server, namespace)) {
      if (/^\{[^}]+\}:(floor|libraries)$/.test(key)) continue
      if (/^\{[^}]+\}:barrier:/.test(key) && (yield* isKept(server, key))) continue
      if (yield* isNoted(server, key)) continue
      if (!/^\{[^}]+\}:sessions$/.test(key)) {
        found.push(key)
        continue
      }
      const fields = yield* list(server, "HKEYS", key)
      found.push(...fields.filter((field) => !isNumber(field)).map((field) => `${key} ${field}`))
    }
  }
  return found
})
