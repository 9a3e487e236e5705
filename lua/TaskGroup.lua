-- A group of tasks: workers register shards of a job and submit what they come to, and whoever wants it waits for all.
--
-- A resource is two hashes. While a session has it open they stay; afterwards for as long as it says, if there is anything
-- to remember:
--   s                 state, packed: shards expected, shards known of before Redis forgot them, registered and running, done,
--                     failed, lost, round, version, ms to keep, members
--   reset             the last reset
--   o<session>/<id>   a member; it hears of every change, in order: each has the version after the one before it
-- and its items, apart, so that neither a change nor a reset has to go through the shards:
--   t<shard>          "<status> <token> <session>/<id>"; r is registered and running, d done, f failed, l lost
--   v<shard>          what was submitted, as JSON
--   i<place>          a shard; places are given in the order of the first registrations
--   w<session>/<id>   the shard that a running worker has
-- A token is that of a registration. Only who has the newest one can submit, and only while it is neither lost nor over.

local TASKS = '<dddddddddd'
-- Of one answer: more are asked for.
local PAGE_PLACES, PAGE_BYTES = 256, 131072
local MISSING, REFUSED = '["missing"]', '["refused"]'

local function loadTasks(key)
  local packed = call('HGET', key, 's')
  if not packed then return nil end
  local expected, least, r, d, f, l, round, version, keep, members = unpackStruct(TASKS, packed)
  return {
    expected = expected, least = least, r = r, d = d, f = f, l = l, round = round, version = version, keep = keep,
    members = members
  }
end

local function saveTasks(key, group)
  call('HSET', key, 's', pack(TASKS, group.expected, group.least, group.r, group.d, group.f, group.l, group.round,
    group.version, group.keep, group.members))
end

local function knownTasks(group)
  return group.r + group.d + group.f + group.l
end

local function describeTasks(group)
  return format('%d,%d,%d,%d,%d,%d,%d,', group.expected, group.least, group.r, group.d, group.f, group.l, group.round) ..
    text(group.version)
end

local function changeTasks(ctx, key, group, change)
  group.version = group.version + 1
  saveTasks(key, group)
  announce(ctx, key, describeTasks(group) .. change)
end

local function findTask(ctx, shard)
  local found = call('HGET', ctx.items, 't' .. shard)
  if found then return match(found, '^(%l) (%d+) (.*)$') end
end

-- Gives a shard another status, and everybody word of it. `from` is nil for one that was not known.
local function moveTask(ctx, key, group, shard, from, to, token, owner)
  if from then
    group[from] = group[from] - 1
  else
    call('HSET', ctx.items, 'i' .. text(knownTasks(group) + 1), shard)
  end
  group[to] = group[to] + 1
  call('HSET', ctx.items, 't' .. shard, to .. ' ' .. token .. ' ' .. owner)
  changeTasks(ctx, key, group, ',' .. cjson.encode(shard) .. ',"' .. to .. '"')
end

local function loseTask(ctx, key, group, shard, token, owner)
  call('HDEL', ctx.items, 'w' .. owner)
  moveTask(ctx, key, group, shard, 'r', 'l', token, owner)
end

local function beginRound(ctx, key, group, round)
  call('DEL', ctx.items)
  group.least, group.r, group.d, group.f, group.l, group.round = 0, 0, 0, 0, 0, round
  changeTasks(ctx, key, group, '')
end

local function leaveTasks(ctx, key, session, id)
  local group = loadTasks(key)
  if not group then return end
  local owner = session .. '/' .. id
  if call('HDEL', key, 'o' .. owner) == 1 then
    group.members = group.members - 1
    if group.members == 0 and knownTasks(group) == 0 then
      call('DEL', key, ctx.items)
      return
    end
    saveTasks(key, group)
    if group.members == 0 then
      call('PEXPIRE', key, text(group.keep))
      call('PEXPIRE', ctx.items, text(group.keep))
    end
    return
  end
  local shard = call('HGET', ctx.items, 'w' .. owner)
  if not shard then return end
  local _, token = findTask(ctx, shard)
  loseTask(ctx, key, group, shard, token, owner)
end

-- tasks.join: creates the group, or joins it; a member of it gets an event that tells how it is, behind those under way.
-- Who joins again tells which round it knew, and how many shards of it: Redis may have forgotten them.
-- keys: resource, items
-- args: id string, shards number, keep number, round number, known number
-- reply: ["observing", expected number, least number, running number, done number, failed number, lost number, round number, version number] | ["posted"] | ["mismatch", expected number]
handlers['tasks.join'] = function(ctx, key, id, shards, keep, round, known)
  shards, keep, round, known = tonumber(shards), tonumber(keep), tonumber(round), tonumber(known)
  local group = loadTasks(key)
  if not group then
    group = {
      expected = shards, least = 0, r = 0, d = 0, f = 0, l = 0, round = math.max(1, round),
      version = tonumber(nextToken(ctx)), keep = keep, members = 0
    }
  elseif group.expected == 0 then
    group.expected = shards
    if shards > 0 then changeTasks(ctx, key, group, '') end
  elseif round == 0 and shards > 0 and shards ~= group.expected then
    return format('["mismatch",%d]', group.expected)
  end
  if round > group.round then beginRound(ctx, key, group, round) end
  if round == group.round and known > knownTasks(group) then group.least = math.max(group.least, known) end
  group.keep = keep
  if enrol(ctx, key, id, '') then
    if group.members == 0 then
      call('PERSIST', key)
      call('PERSIST', ctx.items)
    end
    group.members = group.members + 1
    saveTasks(key, group)
    return '["observing",' .. describeTasks(group) .. ']'
  end
  saveTasks(key, group)
  post(ctx, ctx.session, '["changed","' .. id .. '",' .. describeTasks(group) .. ']')
  return '["posted"]'
end

-- tasks.register: makes the session the worker of a shard that nobody alive works on, and that is not done
-- keys: resource, items
-- args: id string, shard string
-- reply: ["granted", token string, capacity number, round number] | ["taken"] | ["done", value json] | ["missing"]
handlers['tasks.register'] = function(ctx, key, id, shard)
  local group = loadTasks(key)
  if not group or group.members == 0 then return MISSING end
  local status, former, owner = findTask(ctx, shard)
  if status == 'd' then return '["done",' .. call('HGET', ctx.items, 'v' .. shard) .. ']' end
  if status == 'r' then
    if isAlive(ctx, match(owner, '^[^/]*')) then return '["taken"]' end
    loseTask(ctx, key, group, shard, former, owner)
    status = 'l'
  end
  local token = nextToken(ctx)
  owner = ctx.session .. '/' .. id
  if status == 'f' then call('HDEL', ctx.items, 'v' .. shard) end
  call('HSET', ctx.items, 'w' .. owner, shard)
  own(ctx, key, id)
  moveTask(ctx, key, group, shard, status, 'r', token, owner)
  return '["granted","' .. token .. '",1,' .. text(group.round) .. ']'
end

-- tasks.submit: ends a registration with a result, or an error; the same again changes nothing
-- keys: resource, items
-- args: shard string, token string, fine boolean, value string
-- reply: ["submitted"] | ["refused"]
handlers['tasks.submit'] = function(ctx, key, shard, token, fine, value)
  local group = loadTasks(key)
  local status, newest, owner = findTask(ctx, shard)
  if not group or newest ~= token or status == 'l' then return REFUSED end
  if status == 'r' then
    if not isAlive(ctx, match(owner, '^[^/]*')) then return REFUSED end
    call('HDEL', ctx.items, 'w' .. owner)
    call('HSET', ctx.items, 'v' .. shard, value)
    moveTask(ctx, key, group, shard, 'r', fine ~= '' and 'd' or 'f', token, owner)
  end
  return '["submitted"]'
end

-- tasks.restore: says again how a registration has ended, if Redis has forgotten it
-- keys: resource, items
-- args: shard string, status string, token string, value string, round number
-- reply: ["restored"] | ["refused"] | ["missing"]
handlers['tasks.restore'] = function(ctx, key, shard, status, token, value, round)
  local group = loadTasks(key)
  if not group or group.members == 0 then return MISSING end
  if tonumber(round) ~= group.round then return REFUSED end
  local from, newest, owner = findTask(ctx, shard)
  if from then
    local order = tonumber(newest) - tonumber(token)
    -- That it is lost is for the reaper to say; that it was submitted was acknowledged.
    if from == 'd' or order > 0 or order == 0 and (from == 'f' or status == 'l') then return REFUSED end
    if from == 'r' then call('HDEL', ctx.items, 'w' .. owner) end
  end
  if value ~= '' then call('HSET', ctx.items, 'v' .. shard, value) end
  moveTask(ctx, key, group, shard, from, status, token, '')
  return '["restored"]'
end

-- tasks.reset: ends the round with everything in it, once for each reset
-- keys: resource, items
-- args: reset string
-- reply: ["reset"] | ["missing"]
handlers['tasks.reset'] = function(ctx, key, reset)
  local group = loadTasks(key)
  if not group or group.members == 0 then return MISSING end
  if call('HGET', key, 'reset') ~= reset then
    call('HSET', key, 'reset', reset)
    beginRound(ctx, key, group, group.round + 1)
  end
  return '["reset"]'
end

-- tasks.read: how it is, and those of the shards from a place on that have one of the wanted statuses; next is 0 at the end
-- keys: resource, items
-- args: from number, wanted string
-- reply: ["page", expected number, least number, running number, done number, failed number, lost number, round number, version number, next number, shards json] | ["missing"]
-- flags: no-writes
handlers['tasks.read'] = function(ctx, key, from, wanted)
  local group = loadTasks(key)
  if not group then return MISSING end
  local place, last, bytes, shards = tonumber(from), 0, 0, {}
  if wanted ~= '' then last = math.min(knownTasks(group), place + PAGE_PLACES - 1) end
  while place <= last and bytes < PAGE_BYTES do
    local shard = call('HGET', ctx.items, 'i' .. text(place))
    local status = findTask(ctx, shard)
    if string.find(wanted, status, 1, true) then
      local value = status == 'l' and 'null' or call('HGET', ctx.items, 'v' .. shard)
      bytes = bytes + #value + #shard
      shards[#shards + 1] = '[' .. cjson.encode(shard) .. ',"' .. status .. '",' .. value .. ']'
    end
    place = place + 1
  end
  if wanted == '' or place > knownTasks(group) then place = 0 end
  return '["page",' .. describeTasks(group) .. ',' .. text(place) .. ',[' .. table.concat(shards, ',') .. ']]'
end

reapers.tasks = leaveTasks
