-- A value that processes share, and its version.
--
-- kinds: sharedRef: hash, value
--
-- `value` is a key of its own, so that a process reads it without a call of the actor, and so that it can have a time to
-- live which is not that of the members: "<version> <until> <JSON>". `until` is the server time in ms at which it expires,
-- 0 for never. Versions are tokens, so that none is given twice, also after the value was deleted. An absent value has
-- version 0.
--
-- The hash:
--   o<session>/<id>    a member; it hears of every change
--   f<lease>           the largest token with which a holder of that lease has written
-- Tokens of leases are kept for a day after the last write with one, also when the value is deleted: a former holder must
-- not bring it back.

-- When a lease makes it a multiple of so many fields, tokens older than a day are dropped: names of leases may be endless.
local CROWD = 128

local NO_VALUE = json('null')

local function loadRef(ctx)
  local found = call('GET', ctx.value)
  if not found then return '0', 0, NO_VALUE end
  local version, till, value = match(found, '^(%d+) (%d+) (.*)$')
  return version, tonumber(till), json(value)
end

-- The newest token of the partition: no change up to it is newer than what is read now, and every later one is.
local function asOf(ctx)
  return json(ctx.last)
end

local function storeRef(ctx, key, version, value, life)
  life = tonumber(life)
  local till = '0'
  if life > 0 then
    till = text(ctx.now + life)
    call('SET', ctx.value, version .. ' ' .. till .. ' ' .. value, 'PX', text(life))
  else
    call('SET', ctx.value, version .. ' 0 ' .. value)
  end
  -- A member has to hear when it expires.
  if announce(ctx, key, json(version), json(version), json(value)) and life > 0 then alarm(ctx, key, life + 1) end
end

-- Tokens begin with the time at which they were given.
local function dropOldFences(ctx, key)
  if call('HLEN', key) % CROWD > 0 then return end
  local fields, oldest = call('HGETALL', key), ctx.micros - ABANDONED * 1000
  for index = 1, #fields, 2 do
    if sub(fields[index], 1, 1) == 'f' and tonumber(fields[index + 1]) < oldest then call('HDEL', key, fields[index]) end
  end
end

local function writeRef(ctx, key, value, life)
  local version = nextToken(ctx)
  storeRef(ctx, key, version, value, life)
  return json(version)
end

-- sharedRef.join: hears of every change from now on; answers the token as of which the answer is, and the present value
-- keys: all
-- args: id string
-- reply: ["joined", change number, version number, value json]
handlers['sharedRef.join'] = function(ctx, key, id)
  enrol(ctx, key, id)
  local version, till, value = loadRef(ctx)
  if till > 0 then alarm(ctx, key, till - ctx.now + 1) end
  return reply('joined', asOf(ctx), json(version), value)
end

-- sharedRef.set: writes the value; answers what it replaces, if that is asked for
-- keys: all
-- args: value string, life number, former boolean
-- reply: ["set", version number] | ["replaced", version number, before number, value json]
handlers['sharedRef.set'] = function(ctx, key, value, life, former)
  if former ~= '1' then return reply('set', writeRef(ctx, key, value, life)) end
  local before, _, replaced = loadRef(ctx)
  return reply('replaced', writeRef(ctx, key, value, life), json(before), replaced)
end

-- sharedRef.compareAndSet: writes the value if the present one still has that version; else answers the present one
-- keys: all
-- args: expected string, value string, life number
-- reply: ["set", version number] | ["conflict", version number, value json]
handlers['sharedRef.compareAndSet'] = function(ctx, key, expected, value, life)
  local version, _, present = loadRef(ctx)
  if version ~= expected then return reply('conflict', json(version), present) end
  return reply('set', writeRef(ctx, key, value, life))
end

-- sharedRef.fence: writes the value unless a holder with a newer token of the lease has written
-- keys: all
-- args: value string, life number, lease string, token number
-- reply: ["set", version number] | ["fenced", seen number]
handlers['sharedRef.fence'] = function(ctx, key, value, life, lease, token)
  local seen = tonumber(call('HGET', key, 'f' .. lease) or 0)
  if seen > tonumber(token) then return reply('fenced', seen) end
  if call('HSET', key, 'f' .. lease, token) == 1 then dropOldFences(ctx, key) end
  keep(key)
  return reply('set', writeRef(ctx, key, value, life))
end

-- sharedRef.delete: removes the value; answers whether there was one, and the token as of which there is none
-- keys: all
-- args:
-- reply: ["deleted", existed boolean, change number]
-- flags: allow-oom
handlers['sharedRef.delete'] = function(ctx, key)
  local existed = call('DEL', ctx.value) == 1
  if existed then announce(ctx, key, json(nextToken(ctx)), 0, NO_VALUE) end
  return reply('deleted', existed, asOf(ctx))
end

-- sharedRef.commit: writes the values of several refs, with one version, if all of them still have the versions expected;
-- else answers the present ones. Of each: "<expected version> <life> <length>:<value>", of length 0 to leave it as it is.
-- keys: each
-- args: count number, changes string
-- reply: ["committed", version number] | ["conflict", present json]
handlers['sharedRef.commit'] = function(ctx, _, count, changes)
  local present, fits, at, parts = {}, true, 1, {}
  for index = 1, tonumber(count) do
    ctx.bind(index)
    local _, last, expected, life, length = find(changes, '^(%d+) (%d+) (%d+):', at)
    local version, _, value = loadRef(ctx)
    fits = fits and version == expected
    present[index] = '[' .. version .. ',' .. value[1] .. ']'
    at = last + 1 + tonumber(length)
    parts[index] = { value = sub(changes, last + 1, at - 1), life = life }
  end
  if not fits then return reply('conflict', json('[' .. concat(present, ',') .. ']')) end
  local version = nextToken(ctx)
  for index, part in ipairs(parts) do
    if part.value ~= '' then storeRef(ctx, ctx.bind(index), version, part.value, part.life) end
  end
  return reply('committed', json(version))
end

reapers.sharedRef = function(ctx, key, session, id)
  call('HDEL', key, 'o' .. session .. '/' .. id)
  -- Without members, nothing has to be told when the value expires.
  if call('HLEN', key) == 0 then call('ZREM', ctx.dues, '@' .. sub(key, #ctx.prefix + 1)) end
end

alarms.sharedRef = function(ctx, key)
  local version, till = loadRef(ctx)
  if till > 0 then
    alarm(ctx, key, till - ctx.now + 1)
  elseif version == '0' then
    announce(ctx, key, json(nextToken(ctx)), 0, NO_VALUE)
  end
end
