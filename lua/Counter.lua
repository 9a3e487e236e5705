-- A number that processes share, and add to.
--
-- kinds: counter: hash, value
--
-- `value` is a key of its own, so that a process reads it without a call of the actor: "<number> <until>". `until` is the
-- server time in ms at which it expires, 0 for never. A counter at 0 has no value.
--
-- The hash, for a day after it was needed last:
--   o<session>/<id>    a member; it hears of every change
--   b<source>          the number of the last sum of this source that was added, and when, in ms: the next session may send
--                      it again

-- Beyond it, doubles are not exact.
local MOST = 2 ^ 53 - 1
-- When a source makes it a multiple of so many fields, those of processes that died a day ago are dropped.
local CROWD = 128

local function loadCounter(ctx)
  local found = call('GET', ctx.value)
  if not found then return 0, 0 end
  local value, till = match(found, '^(%-?%d+) (%d+)$')
  return tonumber(value), tonumber(till)
end

local function saveCounter(ctx, key, value, life)
  life = tonumber(life)
  if value == 0 then
    call('DEL', ctx.value)
  elseif life > 0 then
    call('SET', ctx.value, text(value) .. ' ' .. text(ctx.now + life), 'PX', text(life))
  else
    call('SET', ctx.value, text(value) .. ' 0')
  end
  if announce(ctx, key, json(nextToken(ctx)), value) and life > 0 and value ~= 0 then alarm(ctx, key, life + 1) end
end

local function lastSum(key, source)
  return tonumber(match(call('HGET', key, 'b' .. source) or '0', '^%d+'))
end

local function noteSum(ctx, key, source, number)
  local isNew = call('HSET', key, 'b' .. source, number .. ' ' .. text(ctx.now)) == 1
  keep(key)
  if not isNew or call('HLEN', key) % CROWD > 0 then return end
  local fields = call('HGETALL', key)
  for index = 1, #fields, 2 do
    local at = sub(fields[index], 1, 1) == 'b' and match(fields[index + 1], ' (%d+)$')
    if at and tonumber(at) < ctx.now - ABANDONED then call('HDEL', key, fields[index]) end
  end
end

-- counter.join: hears of every change from now on; answers the token as of which the answer is, and the present value. Asked
-- again, a member hears these through its mailbox, behind the changes that are there already; the reply has a
-- negative number for the token then.
-- keys: all
-- args: id string
-- reply: ["joined", change number, value number]
handlers['counter.join'] = function(ctx, key, id)
  local isNew = enrol(ctx, key, id)
  local value, till = loadCounter(ctx)
  if till > 0 then alarm(ctx, key, till - ctx.now + 1) end
  if isNew then return reply('joined', json(lastToken(ctx)), value) end
  post(ctx, ctx.session, reply('changed', id, json(lastToken(ctx)), value))
  return reply('joined', asked(ctx), value)
end

-- counter.add: adds, unless the sum is not exact any more. With a source, each of its numbers is added once.
-- keys: all
-- args: by number, life number, source string, number number
-- reply: ["added", value number] | ["exceeds", value number]
handlers['counter.add'] = function(ctx, key, by, life, source, number)
  local value = loadCounter(ctx)
  if source ~= '' and lastSum(key, source) >= tonumber(number) then return reply('added', value) end
  local sum = value + tonumber(by)
  if sum > MOST or sum < -MOST then return reply('exceeds', value) end
  if source ~= '' then noteSum(ctx, key, source, number) end
  saveCounter(ctx, key, sum, life)
  return reply('added', sum)
end

-- counter.reset: back to 0; answers what it was, if that was not 0
-- keys: all
-- args:
-- reply: ["reset", former number] | ["zero"]
-- flags: allow-oom
handlers['counter.reset'] = function(ctx, key)
  local former = loadCounter(ctx)
  if former == 0 then return '["zero"]' end
  saveCounter(ctx, key, 0, 0)
  return reply('reset', former)
end

-- counter.forget: a source sends no more sums
-- keys: hash
-- args: source string
-- reply: ["forgotten"]
-- flags: allow-oom
handlers['counter.forget'] = function(_, key, source)
  call('HDEL', key, 'b' .. source)
  return '["forgotten"]'
end

reapers.counter = function(ctx, key, session, id)
  call('HDEL', key, 'o' .. session .. '/' .. id)
  -- Without members, nothing has to be told when the value expires.
  if call('HLEN', key) == 0 then call('ZREM', ctx.dues, '@' .. sub(key, #ctx.prefix + 1)) end
end

alarms.counter = function(ctx, key)
  local value, till = loadCounter(ctx)
  if till > ctx.now then
    alarm(ctx, key, till - ctx.now + 1)
  elseif value == 0 or till > 0 then
    -- Another command has given the value another time to live, or none.
    if till > 0 then call('DEL', ctx.value) end
    announce(ctx, key, json(nextToken(ctx)), 0)
  end
end
