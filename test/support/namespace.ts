/** What a namespace has in Redis, whatever its coordinators say. */
import { Effect } from "effect"
import type { CommandError, Server } from "./servers.ts"

// As JSON: there can be line ends in a key.
const list = (server: Server, ...command: ReadonlyArray<string>): Effect.Effect<ReadonlyArray<string>, CommandError> =>
  Effect.map(server.cli("--json", ...command), (json) => JSON.parse(json) as ReadonlyArray<string>)

export const keysOf = (server: Server, namespace: string): Effect.Effect<ReadonlyArray<string>, CommandError> =>
  list(server, "KEYS", `{${namespace}:*`)

const numbers = new Set(["protocol", "partitions", "token"])

// Of a function library: which one it was, not whose.
const isNumber = (field: string) => numbers.has(field) || /^library[^/]/.test(field)

/** Everything in it but the numbers of its partitions: a key, or a key and one of its fields. */
export const remainsOf = Effect.fnUntraced(function*(servers: ReadonlyArray<Server>, namespace: string) {
  const found: Array<string> = []
  for (const server of servers) {
    for (const key of yield* keysOf(server, namespace)) {
      if (/^\{[^}]+\}:floor$/.test(key)) continue
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
