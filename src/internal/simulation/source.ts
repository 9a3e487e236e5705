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
-- What is executed in another way, by the name of the command; false for others.
local special = {}

-- Programs also write it in small letters.
local function specialOf(name)
  local found = special[name]
  if found == nil then
    found = special[string.upper(name)] or false
    special[name] = found
  end
  return found
end

special.TIME = function()
  return { string.format('%d', math.floor(now / 1e6)), string.format('%d', now % 1e6) }
end

-- Times at which keys expire, in milliseconds, from those that a command names.
local function behind(millis) return math.floor(now / 1000) + millis end
local deadlines = {
  EX = function(seconds) return behind(seconds * 1000) end,
  PX = behind,
  EXAT = function(seconds) return seconds * 1000 end,
  PXAT = function(millis) return tonumber(millis) end
}

-- A command tells Redis a deadline in the far future. This note tells the simulator the real one, if the command has set it.
local function due(key, at) notes[#notes + 1] = 'x' .. string.format('%d', at) .. ' ' .. key end

local function expiring(key, at, isSet, run, ...)
  local reply = run(...)
  if isSet(reply) then due(key, at) end
  return reply
end

local function far(at) return string.format('%d', ${never} + at) end

local function isOne(reply) return reply == 1 end
local function isDone(reply) return reply and not (type(reply) == 'table' and reply.err) end

-- A key that gets another name keeps its deadline.
local function rename(name)
  special[name] = function(run, key, other, ...)
    local reply = run(name, key, other, ...)
    local at = other and redis.call('PEXPIRETIME', other) or -1
    if at >= 0 then due(other, at - ${never}) end
    return reply
  end
end
rename('RENAME')
rename('RENAMENX')

local function expire(name, unit)
  special[name] = function(run, key, time, ...)
    local at = tonumber(time) and deadlines[unit](time)
    if not at then return run(name, key, time, ...) end
    return expiring(key, at, isOne, run, 'PEXPIREAT', key, far(at), ...)
  end
end
expire('PEXPIRE', 'PX')
expire('EXPIRE', 'EX')
expire('PEXPIREAT', 'PXAT')
expire('EXPIREAT', 'EXAT')

-- Options of SET and GETEX, from one on: the deadline, and all with that in the far future.
local function options(...)
  local given, at = { ... }, nil
  for index = 1, #given - 1 do
    local unit = deadlines[string.upper(given[index])]
    -- Redis refuses others.
    if unit and (tonumber(given[index + 1]) or 0) > 0 then
      at = unit(given[index + 1])
      given[index], given[index + 1] = 'PXAT', far(at)
      break
    end
  end
  return at, given
end

special.SET = function(run, key, value, ...)
  if not ... then return run('SET', key, value) end
  local at, given = options(...)
  if not at then return run('SET', key, value, ...) end
  -- With GET, the reply is what was there before.
  local reply = run('SET', key, value, unpack(given))
  if redis.call('PEXPIRETIME', key) == ${never} + at then due(key, at) end
  return reply
end

special.GETEX = function(run, key, ...)
  local at, given = options(...)
  if not at then return run('GETEX', key, ...) end
  return expiring(key, at, isDone, run, 'GETEX', key, unpack(given))
end

local function set(name, unit)
  special[name] = function(run, key, time, value)
    local at = value and (tonumber(time) or 0) > 0 and deadlines[unit](time)
    if not at then return run(name, key, time, value) end
    return expiring(key, at, isDone, run, 'SET', key, value, 'PXAT', far(at))
  end
end
set('PSETEX', 'PX')
set('SETEX', 'EX')

-- When a key expires, or how long that takes. A negative number says that it does not.
local function rest(name, of)
  special[name] = function(run, key)
    local at = run('PEXPIRETIME', key)
    return type(at) == 'number' and at >= 0 and of(at - ${never}) or at
  end
end
local function left(at) return math.max(0, at - math.floor(now / 1000)) end
rest('PTTL', left)
rest('TTL', function(at) return math.floor((left(at) + 500) / 1000) end)
rest('PEXPIRETIME', function(at) return at end)
rest('EXPIRETIME', function(at) return math.floor(at / 1000) end)

-- The first ones, for random ones.
special.SRANDMEMBER = function(run, key, count)
  local members, some = run('SMEMBERS', key), {}
  if members.err then return members end
  table.sort(members)
  if not count then return members[1] or false end
  count = tonumber(count)
  -- Of fewer than none, one can come several times.
  local wanted = count < 0 and #members > 0 and -count or math.min(#members, count)
  for at = 1, wanted do some[at] = members[(at - 1) % #members + 1] end
  return some
end

-- Redis answers these in an order that differs from one server to another.
local function sort(name)
  special[name] = function(run, ...)
    local reply = run(name, ...)
    if type(reply) == 'table' and not reply.err then table.sort(reply) end
    return reply
  end
end
sort('KEYS')
sort('SDIFF')
sort('SINTER')
sort('SMEMBERS')
sort('SUNION')

-- The place of the id among the arguments behind the key.
local function idIn(args)
  local function is(at, word) return args[at] and string.upper(args[at]) == word end
  local at = is(1, 'NOMKSTREAM') and 2 or 1
  if is(at, 'MAXLEN') or is(at, 'MINID') then
    at = at + 1
    if is(at, '=') or is(at, '~') then at = at + 1 end
    at = at + 1
    if is(at, 'LIMIT') then at = at + 2 end
  end
  return at
end

special.XADD = function(run, key, ...)
  notes[#notes + 1] = 'w' .. key
  local args = { ... }
  local id = idIn(args)
  if args[id] == '*' then
    local last = redis.pcall('XINFO', 'STREAM', key)
    local ms = math.floor(now / 1000)
    for info = 1, #last, 2 do
      if last[info] == 'last-generated-id' then ms = math.max(ms, tonumber(string.match(last[info + 1], '^%d+'))) end
    end
    args[id] = string.format('%d', ms) .. '-*'
  end
  return run('XADD', key, unpack(args))
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
  local other = specialOf(command)
  if other then return other(redis.call, ...) end
  return redis.call(command, ...)
end

simulated.pcall = function(command, ...)
  if leaving ~= '' and isAway(command, ...) then return AWAY end
  local other = specialOf(command)
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
  if name == '' then
    local other = specialOf(argv[at])
    if other then return other(redis.call, unpack(argv, at + 1, at + count - 1)) end
    return redis.call(unpack(argv, at, at + count - 1))
  end
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
