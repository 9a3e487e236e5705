-- A lock: its holder, mostly, and its waiters, if they are few. That is its inline state:
--   "<flag><session>/<id> <token> <since, in seconds>", or, with a queue,
--   "S<flag><count> <session>/<id> <token> <since> <session>/<id>...", with the waiters in order, or
--   "<flag><first> <last> <session>/<id> <token> <since>", see waiters.lua: they are in the hash of the lock.
-- Without a holder, "-" stands for its claim: the queue goes on in another call. The flag is k if its process may keep the lock,
-- otherwise h; and K or Q if the queue is in the hash. While the lock may be on its way back because another claim wants it, the flag is r,
-- or R, and behind `since` is when it was recalled: "/<ms>".
--
-- kinds: lock: hash
-- after inline.lua
-- after Semaphore.lua
-- after waiters.lua

local NO_HOLDER, KEEP_EVERY = '-', 64

local function partsOf(packed)
  local flag = sub(packed, 1, 1)
  if flag == 'S' then
    local is, count, claim, token, since, waiters = match(packed, '^S(%l)(%S+) (%S+) (%S+) (%S+)(.*)$')
    return { flag = is, claim = claim, token = token, since = since, waiters = waiters, first = 1, last = tonumber(count) }
  end
  if find(flag, '%l') then
    local claim, token, since = match(packed, '^.(%S+) (%S+) (%S+)$')
    return { flag = flag, claim = claim, token = token, since = since, waiters = '', first = 1, last = 0 }
  end
  local first, last, claim, token, since = match(packed, '^.(%S+) (%S+) (%S+) (%S+) (%S+)$')
  flag = flag == 'Q' and 'h' or string.lower(flag)
  return { flag = flag, claim = claim, token = token, since = since, first = tonumber(first), last = tonumber(last) }
end

local function unpackLock(packed)
  local lock = partsOf(packed)
  if lock.flag == 'r' then
    local since, recalled = match(lock.since, '^(.*)/(.*)$')
    lock.since, lock.recalled = since, tonumber(recalled)
  end
  return lock
end

local function loadLock(ctx, key)
  local packed = readInline(ctx, key)
  return packed and unpackLock(packed)
end

local function saveLock(ctx, key, lock)
  local isEmpty = isQueueEmpty(lock)
  if isEmpty and lock.claim == NO_HOLDER then return writeInline(ctx, key, false) end
  local holder, flag = lock.claim .. ' ' .. lock.token .. ' ' .. lock.since, lock.flag
  if flag == 'r' then holder = holder .. '/' .. text(lock.recalled) end
  if isEmpty then return writeInline(ctx, key, flag .. holder) end
  if lock.waiters then return writeInline(ctx, key, 'S' .. flag .. text(lock.last) .. ' ' .. holder .. lock.waiters) end
  flag = flag == 'h' and 'Q' or string.upper(flag)
  writeInline(ctx, key, flag .. text(lock.first) .. ' ' .. text(lock.last) .. ' ' .. holder)
end

-- Behind the last waiter there may be empty places, of waiters that have left. A hash that another one made anew would never expire.
local function closeQueue(key, lock)
  if not lock.waiters and not isQueueEmpty(lock) and call('HLEN', key) == 0 then lock.first = lock.last + 1 end
end

-- The next waiter holds it, if there is one.
local function serveLock(ctx, key, lock)
  local claim = lock.claim == NO_HOLDER and front(ctx, key, lock)
  if claim then
    departFirst(key, lock, claim)
    lock.claim, lock.token, lock.since = claim, nextToken(ctx), ctx.seconds
    inform(ctx, claim, lock.token)
  end
  closeQueue(key, lock)
  saveLock(ctx, key, lock)
end

local function enqueueLock(ctx, key, lock, id)
  local inline = lock.waiters
  join(key, lock, claimOf(ctx, id), '')
  -- A queue that lasts is kept.
  if not lock.waiters and (inline or lock.last % KEEP_EVERY == 0) then keep(key) end
  own(ctx, key, id, PERMANENT)
  saveLock(ctx, key, lock)
  return queued(ctx, lock.last - lock.first)
end

-- Another claim wants it. Answers whether it may be on its way back soon.
local function recallLock(ctx, lock)
  local isKept = lock.flag == 'k'
  if not isKept and (lock.flag ~= 'r' or ctx.now - lock.recalled >= RECALL) then return false end
  if not isAlive(ctx, holderOf(lock.claim)) then return false end
  if isKept then
    lock.flag, lock.recalled = 'r', ctx.now
    deliver(ctx, holderOf(lock.claim), reply('recall', idOf(lock.claim)))
  end
  return true
end

-- lock.take: takes a lock, or queues for it. `how` begins with "1" to wait; with "0" for not at all; "2" for not at all, though an
-- expired session may stand in the way. With "k" behind that, its process may keep it when it has released it, and take it again with
-- tokens of its own: one for each microsecond since the grant, for a second at most. When another claim comes, it is recalled by an
-- event, and the claim queues, whether it waits or not: a claim that does not wait leaves the queue if it is not granted soon. So do claims
-- that come soon after it. With "a", it may have been asked before.
-- keys: hash
-- args: id string, how string
-- reply: ["granted", token string] | ["kept", token string, tokens number] | ["queued", ahead number] | ["busy"] | ["stale"]
handlers['lock.take'] = function(ctx, key, id, how)
  local packed, claim = readInline(ctx, key), claimOf(ctx, id)
  if not packed then
    local keeps = find(how, 'k', 1, true) and hasTokens(ctx)
    local token = keeps and nextTokens(ctx, KEPT_TOKENS) or nextToken(ctx)
    writeInline(ctx, key, (keeps and 'k' or 'h') .. claim .. ' ' .. token .. ' ' .. ctx.seconds)
    own(ctx, key, id, PERMANENT)
    return keeps and grantedToKeep(token) or granted(token)
  end
  local lock = unpackLock(packed)
  if lock.claim == claim then return granted(lock.token) end
  local ahead = find(how, 'a', 1, true) and aheadOf(key, lock, claim)
  if ahead then return queued(ctx, ahead) end
  local wait, recalled = sub(how, 1, 1), recallLock(ctx, lock)
  if wait ~= '1' and not recalled then return wait == '0' and isStale(ctx) and STALE or '["busy"]' end
  return enqueueLock(ctx, key, lock, id)
end

-- Ends a hold or a wait, whichever it is by now. Answers whether it was there.
local function dropLock(ctx, key, session, id)
  local packed, claim = readInline(ctx, key), session .. '/' .. id
  if not packed then return false end
  local alone = 'h' .. claim .. ' '
  if sub(packed, 1, #alone) == alone then
    writeInline(ctx, key, false)
    return true
  end
  local lock = unpackLock(packed)
  if lock.claim == claim then
    lock.flag, lock.claim = 'h', NO_HOLDER
  elseif not depart(key, lock, claim) then
    return false
  end
  serveLock(ctx, key, lock)
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

-- lock.holders: its holder, if it has one, as a semaphore answers it
-- keys: hash
-- args:
-- reply: ["holders", holders json] | ["stale"]
-- flags: no-writes
handlers['lock.holders'] = function(ctx, key)
  if isStale(ctx) then return STALE end
  local lock = loadLock(ctx, key)
  if not lock or lock.claim == NO_HOLDER then return reply('holders', json('[]')) end
  return reply('holders', list({ list({ 1, lock.token, json(lock.since), aboutOf(ctx, lock.claim) }) }))
end

-- lock.waiters: its waiters, as a semaphore answers them
-- keys: hash
-- args:
-- reply: ["waiters", waiters json] | ["stale"]
-- flags: no-writes
handlers['lock.waiters'] = function(ctx, key)
  if isStale(ctx) then return STALE end
  local lock = loadLock(ctx, key)
  local waiters = {}
  for index, claim in ipairs(lock and waitersOf(ctx, key, lock, MOST_LISTED) or {}) do
    waiters[index] = list({ 1, aboutOf(ctx, claim) })
  end
  return reply('waiters', list(waiters))
end

reapers.lock = dropLock
alarms.lock = function(ctx, key)
  local lock = loadLock(ctx, key)
  if lock then serveLock(ctx, key, lock) end
end
