/**
 * The function library as a simulation runs it in a real Redis. Its time comes with each call. Redis itself goes by the real time, so
 * keys that are to expire get a time in the far future, and the simulation deletes them. What chance decides in Redis is sorted.
 */

/** Behind this time, in milliseconds of a real clock, are the times at which keys expire. */
export const never = 4_000_000_000_000

export const prefix = "simulated_"

const prelude = `
-- The time in microseconds. What the call has done that the simulation has to know: "w<key>" for a stream that was written to, and
-- "x<ms> <key>" for a key that is to expire.
local simulated = {}
do
local now, notes

local function with(run, command, key, ...)
  if command == 'TIME' then
    return { string.format('%d', math.floor(now / 1e6)), string.format('%d', now % 1e6) }
  elseif command == 'PEXPIRE' then
    local at = string.format('%d', math.floor(now / 1000) + select(1, ...))
    notes[#notes + 1] = 'x' .. at .. ' ' .. key
    return run('PEXPIREAT', key, string.format('%d', ${never} + at), select(2, ...))
  elseif command == 'SRANDMEMBER' then
    local members, few = redis.call('SMEMBERS', key), {}
    table.sort(members)
    for at = 1, math.min(#members, select(1, ...)) do few[at] = members[at] end
    return few
  elseif command == 'XADD' then
    notes[#notes + 1] = 'w' .. key
    local fields = { ... }
    for at = 1, #fields do
      if fields[at] == '*' then
        local last = redis.pcall('XINFO', 'STREAM', key)
        local ms = math.floor(now / 1000)
        for info = 1, #last, 2 do
          if last[info] == 'last-generated-id' then ms = math.max(ms, tonumber(string.match(last[info + 1], '^%d+'))) end
        end
        fields[at] = string.format('%d', ms) .. '-*'
        break
      end
    end
    return run('XADD', key, unpack(fields))
  end
  return run(command, key, ...)
end

simulated.call = function(...) return with(redis.call, ...) end
simulated.pcall = function(...) return with(redis.pcall, ...) end
simulated.calls = function(run)
  return function(keys, argv)
    now, notes = tonumber(table.remove(argv)), {}
    local reply = run(keys, argv)
    if type(reply) == 'table' and reply.err then return reply end
    return { reply, unpack(notes) }
  end
end
end
`

const replaced = (source: string, from: RegExp, to: string): string => {
  if (!from.test(source)) throw new Error(`the library cannot be simulated: nothing matches ${from}`)
  return source.replaceAll(from, to)
}

/** The library for `FUNCTION LOAD`, made from the one that coordinators load. */
export const simulated = (source: string): string => {
  const end = source.indexOf("\n")
  const head = replaced(source.slice(0, end), /name=/g, `name=${prefix}`)
  let body = replaced(source.slice(end), /\bredis\.pcall\b/g, "simulated.pcall")
  body = replaced(body, /\bredis\.call\b/g, "simulated.call")
  body = replaced(
    body,
    /function_name='(\w+)', callback=(\w+)/g,
    `function_name='${prefix}$1', callback=simulated.calls($2)`
  )
  return head + prelude + body
}
