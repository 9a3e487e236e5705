/** The sessions of a partition in Redis, looked at and forgotten from outside. */
import { Effect } from "effect"
import type { CommandError } from "./command.ts"
import type { Server } from "./servers.ts"

// The record of a session begins with 49 bytes; behind that are entries of what it owns, each between two bytes that no text has.
const entriesIn = "for entry in packed:sub(50):gmatch('\\254([^\\255]*)\\255') do "

/** What the sessions of a namespace own: "<claim id>:<kind>:<name>". */
export const ownedIn = Effect.fnUntraced(function*(server: Server, namespace: string) {
  const keys = (yield* server.call("KEYS", `{${namespace}:*}:sessions`)) as ReadonlyArray<string>
  const owned = yield* Effect.forEach(keys, (key) => ownedAt(server, key))
  return owned.flat()
})

const ownedAt = (server: Server, key: string) =>
  server.call(
    "EVAL",
    "local owned, prefix, sessions = {}, KEYS[1]:sub(1, -9), redis.call('HGETALL', KEYS[1]) " +
      "for at = 1, #sessions, 2 do if sessions[at]:sub(1, 1) == 's' then local packed = sessions[at + 1] " +
      `${entriesIn} owned[#owned + 1] = entry end ` +
      "for _, entry in ipairs(redis.call('SMEMBERS', prefix .. 'own:' .. sessions[at]:sub(2))) do " +
      "if entry ~= '' then owned[#owned + 1] = entry end end end end return owned",
    1,
    key
  ) as Effect.Effect<ReadonlyArray<string>, CommandError>

/** Has Redis forget a session of a partition, or all of them; what these own can still be reaped. */
export const forget = (server: Server, namespace: string, session = "", partition = 0) =>
  server.cli(
    "EVAL",
    "local prefix = KEYS[1]:sub(1, -9) for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do " +
      "if field:sub(1, 1) == 's' and (ARGV[1] == '' or field == 's' .. ARGV[1]) then " +
      "local packed, owned = redis.call('HGET', KEYS[1], field), prefix .. 'own:' .. field:sub(2) " +
      `${entriesIn} redis.call('SADD', owned, entry) end redis.call('HDEL', KEYS[1], field) end end`,
    1,
    `{${namespace}:0${partition}}:sessions`,
    session
  )
