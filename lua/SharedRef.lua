-- A value that processes share, and its version.
--
-- kinds: sharedRef: hash, value
-- after waiters.lua
--
-- `value` is a key of its own, so that a process reads it without a call of the actor, and so that it can have a time to
-- live which is not that of the members: "<version> <until> <JSON>". `until` is the server time in ms at which it expires,
-- 0 for never. Versions are tokens, so that none is given twice, also after the value was deleted. An absent value has
-- version 0.
--
-- The hash:
--   o<session>/<id>    a member; it hears of every change
--   f<lease>           the largest token with which a holder of that lease has written, and when that was written last, in ms
--   t                  the claim whose turn it is to update; the others are a queue (see waiters.lua)
--   s                  record RefLine, while there is one
-- Tokens of leases are kept for a day after the last write with one, also when the value is deleted: a former holder must
-- not bring it back.
-- Updates are optimistic. One that was in the way of others waits for its turn, during which no other update is made. A
-- turn is short and protects nothing: an update that comes too late for it finds another version, or waits again.
-- record RefLine 1: first, last, till

-- When a lease makes it a multiple of so many fields, tokens of writes that are older than a day are dropped: names of leases may be endless.
local CROWD = 128

-- In ms: what a paused process costs the next in line; and for how long updates that come one right after the other are
-- made in one turn.
local TURN, SPELL = 100, 8

local NO_VALUE = json('null')

local function loadRef(ctx)
  local found = call('GET', ctx.value)
  if not found then return '0', 0, NO_VALUE end
  local version, till, value = match(found, '^(%d+) (%d+) (.*)$')
  return version, tonumber(till), json(value)
end

-- The newest token of the partition: no change up to it is newer than what is read now, and every later one is.
local function asOf(ctx)
  return json(lastToken(ctx))
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

-- The token may be much older than the write: of a holder that has held for long.
local function dropOldFences(ctx, key)
  if call('HLEN', key) % CROWD > 0 then return end
  local fields, oldest = call('HGETALL', key), ago(ctx, ABANDONED)
  for index = 1, #fields, 2 do
    local written = sub(fields[index], 1, 1) == 'f' and tonumber(match(fields[index + 1], '%d+$'))
    if written and written < oldest then call('HDEL', key, fields[index]) end
  end
end

local function writeRef(ctx, key, value, life)
  local version = nextToken(ctx)
  storeRef(ctx, key, version, value, life)
  return json(version)
end

-- The answer that another version is the present one, if it is.
local function conflictWith(ctx, expected)
  local version, _, present = loadRef(ctx)
  if version ~= expected then return reply('conflict', json(version), present) end
end

-- sharedRef.join: hears of every change from now on; answers the token as of which the answer is, and the present value. Asked
-- again, a member hears these through its mailbox, behind the changes that are there already; the reply has a
-- negative number for the token then.
-- keys: all
-- args: id string
-- reply: ["joined", change number, version number, value json]
handlers['sharedRef.join'] = function(ctx, key, id)
  local isNew = enrol(ctx, key, id)
  local version, till, value = loadRef(ctx)
  if till > 0 then alarm(ctx, key, till - ctx.now + 1) end
  if isNew then return reply('joined', asOf(ctx), json(version), value) end
  post(ctx, ctx.session, reply('changed', id, asOf(ctx), json(version), value))
  return reply('joined', asked(ctx), json(version), value)
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
  local conflict = conflictWith(ctx, expected)
  if conflict then return conflict end
  return reply('set', writeRef(ctx, key, value, life))
end

local function loadLine(key)
  local found = call('HMGET', key, 's', 't')
  local line = found[1] and unpackRefLine(found[1]) or { first = 1, last = 0, till = 0 }
  line.claim = found[2]
  return line
end

-- The alarm is for members that have to hear when the value expires, and for the line.
local function silence(ctx, key)
  call('ZREM', ctx.dues, '@' .. sub(key, #ctx.prefix + 1))
end

local function saveLine(ctx, key, line)
  if line.claim then
    call('HSET', key, 's', packRefLine(line), 't', line.claim)
  elseif isQueueEmpty(line) then
    call('HDEL', key, 's', 't')
    local _, till = loadRef(ctx)
    if till == 0 or call('HLEN', key) == 0 then silence(ctx, key) end
  else
    call('HSET', key, 's', packRefLine(line))
    call('HDEL', key, 't')
  end
end

-- Whether it is the turn of another claim.
local function isTaken(ctx, line, claim)
  return line.claim ~= claim and (line.claim and line.till > ctx.now or not isQueueEmpty(line))
end

local function giveTurn(ctx, key, line, claim)
  line.claim, line.till = claim, ctx.now + TURN
  alarm(ctx, key, TURN + 1)
end

-- The turn of the next in line begins, with what stands there now.
local function passTurn(ctx, key, line)
  line.claim = false
  local claim = front(ctx, key, line)
  if claim then
    departFirst(key, line, claim)
    giveTurn(ctx, key, line, claim)
    local version, _, value = loadRef(ctx)
    inform(ctx, claim, text(line.till), json(version), value)
  end
  saveLine(ctx, key, line)
end

-- sharedRef.turn: waits until no other update is made for a while; answers the present value. It ends with an update.
-- keys: all
-- args: id string
-- reply: ["granted", till string, version number, value json] | ["queued", ahead number]
handlers['sharedRef.turn'] = function(ctx, key, id)
  local line, claim = loadLine(key), claimOf(ctx, id)
  local place = line.claim ~= claim and call('HGET', key, 'q' .. claim)
  if place then return queued(ctx, tonumber(place) - line.first) end
  if isTaken(ctx, line, claim) then
    join(key, line, claim, '1')
    own(ctx, key, id)
    if line.till <= ctx.now then passTurn(ctx, key, line) else saveLine(ctx, key, line) end
    return queued(ctx, line.last - line.first)
  end
  if line.claim ~= claim then
    giveTurn(ctx, key, line, claim)
    saveLine(ctx, key, line)
    own(ctx, key, id)
  end
  local version, _, value = loadRef(ctx)
  return reply('granted', text(line.till), json(version), value)
end

-- sharedRef.update: as `compareAndSet`, in the claim's turn; or, with the id "", while it is the turn of no claim. The turn
-- ends with the write, unless more are to come and the next in line has not waited for long.
-- keys: all
-- args: id string, expected string, value string, life number, more boolean
-- reply: ["set", version number, kept boolean] | ["conflict", version number, value json] | ["taken"]
handlers['sharedRef.update'] = function(ctx, key, id, expected, value, life, more)
  local line, claim = loadLine(key), id ~= '' and claimOf(ctx, id)
  if isTaken(ctx, line, claim) then
    if claim then disownNow(ctx, key, id) end
    return '["taken"]'
  end
  local conflict = conflictWith(ctx, expected)
  if conflict then return conflict end
  local version = writeRef(ctx, key, value, life)
  local kept = claim and line.claim == claim and more == '1' and ctx.now < line.till - TURN + SPELL
  if claim and not kept then
    if line.claim == claim then passTurn(ctx, key, line) end
    disownNow(ctx, key, id)
  end
  return reply('set', version, kept or false)
end

-- sharedRef.fence: writes the value unless a holder with a newer token of the lease has written
-- keys: all
-- args: value string, life number, lease string, token number
-- reply: ["set", version number] | ["fenced", seen number]
handlers['sharedRef.fence'] = function(ctx, key, value, life, lease, token)
  local seen = tonumber(match(call('HGET', key, 'f' .. lease) or '0', '^%d+'))
  if seen > tonumber(token) then return reply('fenced', seen) end
  if call('HSET', key, 'f' .. lease, token .. ' ' .. text(ctx.now)) == 1 then dropOldFences(ctx, key) end
  keep(key)
  return reply('set', writeRef(ctx, key, value, life))
end

-- sharedRef.delete: removes the value, if there is one; answers the token as of which there is none
-- keys: all
-- args:
-- reply: ["deleted", change number] | ["absent", change number]
-- flags: allow-oom
handlers['sharedRef.delete'] = function(ctx, key)
  if call('DEL', ctx.value) == 0 then return reply('absent', asOf(ctx)) end
  announce(ctx, key, json(nextToken(ctx)), 0, NO_VALUE)
  return reply('deleted', asOf(ctx))
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
  local claim = session .. '/' .. id
  if call('HDEL', key, 'o' .. claim) == 0 then
    local line = loadLine(key)
    if line.claim == claim then
      passTurn(ctx, key, line)
    elseif depart(key, line, claim) then
      saveLine(ctx, key, line)
    end
  end
  if call('HLEN', key) == 0 then silence(ctx, key) end
end

alarms.sharedRef = function(ctx, key)
  local version, till = loadRef(ctx)
  if till > ctx.now then
    alarm(ctx, key, till - ctx.now + 1)
  elseif version == '0' or till > 0 then
    -- Another command has given the value another time to live, or none.
    if till > 0 then call('DEL', ctx.value) end
    announce(ctx, key, json(nextToken(ctx)), 0, NO_VALUE)
  end
  local line = loadLine(key)
  if line.claim and line.till > ctx.now then
    alarm(ctx, key, line.till - ctx.now + 1)
  elseif line.claim or not isQueueEmpty(line) then
    passTurn(ctx, key, line)
  end
end
