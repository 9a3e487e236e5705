-- A lock: a semaphore of capacity 1. Mostly it has a holder and nothing else, and then it is a field of `sessions`:
-- "<session>/<id> <token> <since, in seconds>", and " k" behind that if its process may keep the lock. The next claim that
-- queues makes the hash of Semaphore.lua of it, and the field is empty for as long as that is there.
--
-- kinds: lock: hash
-- after lone.lua
-- after Semaphore.lua

-- Another claim wants it: from now on, its hash has the hold, and the waiters.
local function unfold(ctx, key, hold)
  local claim, rest = match(hold, '^(%S+)( .*)$')
  -- Nothing is there, unless `sessions` was deleted.
  call('DEL', key)
  call('HSET', key, 'h' .. claim, '1' .. rest)
  setLone(ctx, key, '')
  return { capacity = 1, taken = 1, holds = 1, members = 0, first = 1, last = 0 }
end

-- lock.take: takes a lock, or queues for it. `how` is "1" to wait; "0" for not at all; "2" for not at all, though an expired session
-- may stand in the way. With a "k" behind that, its process may keep it when it has released it, and take it again with tokens of its
-- own: one for each microsecond since the grant, for a second at most. When another claim comes, it is recalled by an event, and the
-- claim queues, whether it waits or not: a claim that does not wait leaves the queue if it is not granted soon.
-- keys: hash
-- args: id string, how string
-- reply: ["granted", token string] | ["kept", token string] | ["queued", ahead number] | ["busy"] | ["stale"]
handlers['lock.take'] = function(ctx, key, id, how)
  local wait, keeps = sub(how, 1, 1), #how == 2
  local hold = loneOf(ctx, key)
  if not hold then
    local token = nextToken(ctx)
    hold = ctx.session .. '/' .. id .. ' ' .. token .. ' ' .. ctx.seconds
    setLone(ctx, key, keeps and hold .. ' k' or hold)
    own(ctx, key, id, PERMANENT)
    return keeps and '["kept","' .. token .. '"]' or granted(token)
  end
  if hold == '' then return take(ctx, key, id, 1, 1, wait) end
  local claim, token = match(hold, '^(%S+) (%S+)')
  if claim == claimOf(ctx, id) then return granted(token) end
  if byte(hold, -1) == KEPT and isAlive(ctx, holderOf(claim)) then
    deliver(ctx, holderOf(claim), reply('recall', idOf(claim)))
  elseif wait ~= '1' then
    return wait == '0' and isStale(ctx) and STALE or '["busy"]'
  end
  return enqueue(ctx, key, unfold(ctx, key, hold), id, 1)
end

-- Ends a hold or a wait, whichever it is by now. Answers whether it was there.
local function dropLock(ctx, key, session, id)
  local hold = loneOf(ctx, key)
  if not hold then return false end
  if hold == '' then return drop(ctx, key, session, id) end
  local claim = session .. '/' .. id .. ' '
  if sub(hold, 1, #claim) ~= claim then return false end
  skipKept(ctx, session, hold)
  setLone(ctx, key, false)
  return true
end

-- lock.release: releases a hold, or leaves the queue, whichever it is by now
-- keys: hash
-- args: id string
-- reply: ["released"] | ["absent"]
-- flags: allow-oom
handlers['lock.release'] = function(ctx, key, id)
  local found = dropLock(ctx, key, ctx.session, id)
  disown(ctx, key, id)
  return found and RELEASED or ABSENT
end

-- lock.return: releases a lock that its process has kept, and says which token was the last
-- keys: hash
-- args: id string, token number
-- reply: ["released"] | ["absent"]
-- flags: allow-oom
handlers['lock.return'] = function(ctx, key, id, token)
  skipTokens(ctx, token + 0)
  return handlers['lock.release'](ctx, key, id)
end

reapers.lock, alarms.lock = dropLock, serveOn

straight['lock.take'] = {
  length = 5,
  takes = true,
  take = function(found, hold, token, argv)
    if found then return end
    if #argv[5] == 2 then return '["ok",[["kept","' .. token .. '"]]]', hold .. ' k' end
    return '["ok",[["granted","' .. token .. '"]]]', hold
  end
}
straight['lock.release'] = {
  length = 4,
  release = function(found, claim)
    return found and sub(found, 1, #claim) == claim and '["ok",[["released"]]]'
  end
}
