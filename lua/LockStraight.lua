-- One lock is taken, or released, in a call of its own: what `run` does, without its context, for a third of its cost. Whatever is not
-- frequent is left to `run`, and so is what Redis refuses: then nothing has been written.
--
-- after calls.lua
-- after Lock.lua
-- after waiters.lua

local HELD, SHORT_QUEUE, QUEUED, KEPT = 104, 83, 81, 107 -- h S Q k
local RELEASED_ALONE = '["ok",[["released"]]]'

-- The numbers of the session that asks, and what it owns, if the call is its next one, and it is alive.
local function callerOf(argv, found, now)
  local packed, number = found[1], tonumber(argv[2])
  if not (packed and number and found[2] and byte(packed) == VERSION.Session) then return end
  local _, answered, deadline, read, posted, stamp, lease = unpackStruct(SHAPE.Session, packed)
  if deadline <= now or number ~= answered + 1 then return end
  return number, read, posted, stamp, lease, sub(packed, LENGTH.Session + 1)
end

local function packed(number, deadline, read, posted, stamp, lease, owned)
  return pack(SHAPE.Session, VERSION.Session, number, deadline, read, posted, stamp, lease) .. owned
end

-- So many next tokens: the first and the last one, unless `floor` has to be raised for them.
local function tokensBehind(before, micros, count)
  before = before + 0
  local first = before + 1
  if micros > first then first = micros end
  local last = first + count - 1
  if before % TOKENS_EACH + (last - before) >= TOKENS_EACH then return end
  first = text(first)
  return first, count == 1 and first or text(last)
end

straight['lock.take'] = function(keys, argv, field, inline, found, micros, seconds)
  local now = floor(micros / 1000)
  local number, read, posted, stamp, lease, owned = callerOf(argv, found, now)
  if not number or #argv ~= 5 or #owned >= SHORT then return end
  local sessions, session, id, how, lock = keys[1], argv[1], argv[4], argv[5], found[3]
  local claim = session .. '/' .. id
  local reply
  if not lock then
    local keeps = byte(how, 2) == KEPT and found[2] and found[2] + 0 <= micros
    local token, last = tokensBehind(found[2], micros, keeps and KEPT_TOKENS or 1)
    if not token then return end
    owned = owned .. marked(id .. ':' .. sub(inline, 2))
    if keeps then
      lock, reply = 'k', '["ok",[' .. grantedToKeep(token) .. ']]'
    else
      lock, reply = 'h', '["ok",[["granted","' .. token .. '"]]]'
    end
    call('HSET', sessions, field, packed(number, now + lease, read, posted, stamp, lease, owned), 'r' .. session, reply,
      'token', last, inline, lock .. claim .. ' ' .. token .. ' ' .. seconds)
    return reply
  end
  if how ~= '1' then return end
  local flag, ahead = byte(lock), nil
  if flag == HELD then
    ahead, lock = 0, 'Sh1 ' .. sub(lock, 2) .. ' ' .. claim
  elseif flag == SHORT_QUEUE then
    local count, behind = match(lock, '^Sh(%d+)()')
    if not count or count + 0 == MOST_INLINE then return end
    ahead = count + 0
    lock = 'Sh' .. text(ahead + 1) .. sub(lock, behind) .. ' ' .. claim
  elseif flag == QUEUED then
    local first, last, behind = match(lock, '^.(%S+) (%S+)()')
    local place = text(last + 1)
    ahead = place - first
    local queued = redis.pcall('HSET', keys[2], 'w' .. place, claim .. ' ', 'q' .. claim, place)
    if type(queued) == 'table' then return end
    if place % KEEP_EVERY == 0 then keep(keys[2]) end
    lock = 'Q' .. first .. ' ' .. place .. sub(lock, behind)
  else
    return
  end
  owned = owned .. marked(id .. ':' .. sub(inline, 2))
  reply = '["ok",[["queued",' .. text(ahead) .. ']],[],' .. nearest(sub(sessions, 1, -9) .. 'due', '-inf', session, micros) .. ']'
  call('HSET', sessions, field, packed(number, now + lease, read, posted, stamp, lease, owned), 'r' .. session, reply,
    inline, lock)
  return reply
end

straight['lock.release'] = function(keys, argv, field, inline, found, micros, seconds)
  local now = floor(micros / 1000)
  local number, read, posted, stamp, lease, owned = callerOf(argv, found, now)
  local lock = found[3]
  if not (number and lock) or #argv ~= 4 then return end
  local sessions, session, id, flag = keys[1], argv[1], argv[4], byte(lock)
  local from, to = find(owned, marked(id .. ':' .. sub(inline, 2)), 1, true)
  if not from then return end
  owned = sub(owned, 1, from - 1) .. sub(owned, to + 1)
  if flag == HELD then
    local mine = 'h' .. session .. '/' .. id .. ' '
    if sub(lock, 1, #mine) ~= mine then return end
    call('HDEL', sessions, inline)
    call('HSET', sessions, field, packed(number, now + lease, read, posted, stamp, lease, owned), 'r' .. session, RELEASED_ALONE)
    return RELEASED_ALONE
  end

  -- To the first waiter, if that is alive.
  local mine = session .. '/' .. id
  local first, last, count, holder, claim, behind
  if flag == SHORT_QUEUE then
    count, holder, claim, behind = match(lock, '^Sh(%d+) (%S+) %S+ %S+ (%S+)()')
  elseif flag == QUEUED then
    first, last, holder = match(lock, '^.(%S+) (%S+) (%S+)')
    local waiter = holder == mine and redis.pcall('HGET', keys[2], 'w' .. first)
    claim = type(waiter) == 'string' and sub(waiter, 1, -2)
  end
  if not claim or holder ~= mine then return end
  local heir, heirId = match(claim, '^([^/]*)/(.*)$')
  local theirs, beats, theirRead, theirPosted, theirLease, deadline, _
  if heir ~= session then
    theirs = call('HGET', sessions, 's' .. heir)
    if not theirs or byte(theirs) ~= VERSION.Session then return end
    _, beats, deadline, theirRead, theirPosted, _, theirLease = unpackStruct(SHAPE.Session, theirs)
    if deadline <= now then return end
  end
  local token = tokensBehind(found[2], micros, 1)
  if not token then return end
  local held = claim .. ' ' .. token .. ' ' .. seconds
  if count then
    lock = count == '1' and 'h' .. held or 'Sh' .. text(count - 1) .. ' ' .. held .. sub(lock, behind)
  else
    call('HDEL', keys[2], 'w' .. first, 'q' .. claim)
    local isLast = first == last or call('HLEN', keys[2]) == 0
    lock = isLast and 'h' .. held or 'Q' .. text(first + 1) .. ' ' .. last .. ' ' .. held
  end
  local event = '["granted","' .. heirId .. '","' .. token .. '"]'
  if heir == session then
    local reply = '["ok",[["released"]],[' .. event .. ']]'
    call('HSET', sessions, field, packed(number, now + lease, read, posted, stamp, lease, owned), 'r' .. session, reply,
      'token', token, inline, lock)
    return reply
  end
  theirPosted = theirPosted + 1
  putMail(sub(sessions, 1, -9), heir, text(theirPosted) .. '-' .. text(micros), '[' .. event .. ']')
  call('HSET', sessions, field, packed(number, now + lease, read, posted, stamp, lease, owned), 'r' .. session, RELEASED_ALONE,
    's' .. heir, packed(beats, deadline, theirRead, theirPosted, micros, theirLease, sub(theirs, LENGTH.Session + 1)),
    'token', token, inline, lock)
  return RELEASED_ALONE
end
