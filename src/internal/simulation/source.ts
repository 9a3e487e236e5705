/**
 * The function library as a simulation runs it in a real Redis: one function, which executes calls of several simulations. Their
 * times come with them. Redis itself goes by the real time, so keys that are to expire get a time in the far future, and the
 * simulation deletes them. Results that chance decides in Redis are sorted.
 */

// Behind this time, in milliseconds of a real clock, are the times at which keys expire.
const never = 4_000_000_000_000

/** The name of the function. */
export const entrance = "simulated"

/** A function of the simulation itself, which deletes those of its keys that have expired. */
export const expiry = "expiry"

const prelude = `
-- What a call has done that the simulation has to know: "w<key>" for a stream that was written to, "x<ms> <key>" for a key that is to
-- expire, "l<message>" for what it logs, and "e<message>" for an error.
local simulated = { entries = {} }
do
-- The time in microseconds.
local now, notes
local special = {}

special.TIME = function()
  return { string.format('%d', math.floor(now / 1e6)), string.format('%d', now % 1e6) }
end

-- This note tells the simulator when a key expires. The function answers the deadline, as Redis takes it.
local function expiry(key, millis)
  local at = string.format('%d', math.floor(now / 1000) + millis)
  notes[#notes + 1] = 'x' .. at .. ' ' .. key
  return string.format('%d', ${never} + at)
end

special.PEXPIRE = function(run, key, millis, ...)
  return run('PEXPIREAT', key, expiry(key, millis), ...)
end

special.SET = function(run, key, value, ...)
  local option, millis = ...
  if option ~= 'PX' then return run('SET', key, value, ...) end
  return run('SET', key, value, 'PXAT', expiry(key, millis), select(3, ...))
end

special.SRANDMEMBER = function(run, key, count)
  local members, few = run('SMEMBERS', key), {}
  table.sort(members)
  for at = 1, math.min(#members, count) do few[at] = members[at] end
  return few
end

special.XADD = function(run, key, ...)
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

-- A script cannot reach keys of a slot that is leaving its server when they are not there.
local leaving
local function isAway(command, ...)
  local args, at = { ... }, 1
  if command == 'XREADGROUP' then
    while args[at - 1] ~= 'STREAMS' do at = at + 1 end
  end
  local key = args[at]
  return type(key) == 'string' and string.sub(key, 1, #leaving) == leaving and redis.call('EXISTS', key) == 0
end
local AWAY = { err = 'ERR Script attempted to access a non local key in a cluster node' }

simulated.call = function(command, ...)
  if leaving ~= '' and isAway(command, ...) then error(AWAY) end
  local other = special[command]
  if other then return other(redis.call, ...) end
  return redis.call(command, ...)
end

simulated.pcall = function(command, ...)
  if leaving ~= '' and isAway(command, ...) then return AWAY end
  local other = special[command]
  if other then return other(redis.pcall, ...) end
  return redis.pcall(command, ...)
end

simulated.log = function(message)
  notes[#notes + 1] = 'l' .. message
end

simulated.entries.${expiry} = function(keys)
  for _, key in ipairs(keys) do
    local at = redis.call('PEXPIRETIME', key)
    if at > 0 and (at - ${never}) * 1000 <= now then redis.call('DEL', key) end
  end
end

-- Each call is its database, its time, the name of a function or '', how many arguments it has, and these.
local function execute(argv, at, name, count)
  if name == '' then return redis.call(unpack(argv, at, at + count - 1)) end
  local keys, args, named = {}, {}, tonumber(argv[at])
  for index = 1, named do keys[index] = argv[at + index] end
  for index = 1, count - named - 1 do args[index] = argv[at + named + index] end
  -- In front of the name may be the slot that is leaving.
  local slot, entry = string.match(name, '^(.*})(.*)$')
  leaving = slot or ''
  return simulated.entries[entry or name](keys, args)
end

simulated.all = function(_, argv)
  local replies, at, length = {}, 1, #argv
  while at <= length do
    local count = tonumber(argv[at + 3])
    redis.call('SELECT', argv[at])
    now, notes = tonumber(argv[at + 1]), {}
    local fine, reply = pcall(execute, argv, at + 4, argv[at + 2], count)
    if not fine then
      replies[#replies + 1] = { false, 'e' .. tostring(type(reply) == 'table' and reply.err or reply) }
    elseif type(reply) == 'table' and reply.err then
      replies[#replies + 1] = { false, 'e' .. reply.err }
    else
      replies[#replies + 1] = { reply or false, unpack(notes) }
    end
    at = at + 4 + count
  end
  return replies
end
end
`

const replaced = (source: string, from: RegExp, to: string): string => {
  if (!from.test(source)) throw new Error(`the library cannot be simulated: nothing matches ${from}`)
  return source.replaceAll(from, to)
}

/** The library for `FUNCTION LOAD`, made from the one that coordinators load. */
export const simulated = (source: string): string => {
  let body = replaced(source.slice(source.indexOf("\n")), /\bredis\.pcall\b/g, "simulated.pcall")
  body = replaced(body, /\bredis\.call\b/g, "simulated.call")
  body = replaced(
    body,
    /redis\.register_function\{function_name='(\w+)', callback=(\w+), flags=\{[^}]*\}\}/g,
    "simulated.entries['$1'] = $2"
  )
  body = replaced(body, /\bredis\.log\(redis\.LOG_WARNING, /g, "simulated.log(")
  // Few schedules have as many waiters as that.
  body = replaced(body, /\bMOST_INLINE = \d+/g, "MOST_INLINE = 2")
  return `#!lua name=${entrance}\n${prelude}${body}\nredis.register_function('${entrance}', simulated.all)\n`
}
