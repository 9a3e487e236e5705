-- The one actor behind everything that is held: a weighted first-in-first-out semaphore with capacity C.
-- A lock has C = 1, see Lock.lua; a semaphore has C = n; a read-write lock weighs a reader 1 and a writer C.
--
-- kinds: readWriteLock, semaphore: hash
-- after inline.lua
-- after waiters.lua
--
-- A resource is one hash, deleted with its last hold, member and waiter: a queue (see waiters.lua), and
--   s                  record Semaphore
--   w                  its waiters, while they are few
--   h<session>/<id>    a hold: "<weight> <token> <since, in seconds>", and behind that " k" if its process may keep it
--   o<session>/<id>    a member: it keeps a semaphore alive, and hears how many permits there are
-- Waiters wait for a weight, which is 1 where none is given. With weight 0 they wait to become a member of a semaphore that does not
-- exist yet: capacity 0.
-- `kept` counts the holds with a k. Below 0 it is when processes were asked to give theirs back, in ms: one number more would make the
-- record too long for the compact form of a hash.
-- record Semaphore 2: capacity, taken, holds, members, first, last, kept

local MOST_LISTED = 1000
-- So long, in ms, may what was recalled be on its way: as `patience` in src/internal/hold/kept.ts.
local RECALL = 100

local function load(key, capacity)
  local found = call('HMGET', key, 's', 'w')
  local state = found[1] and unpackSemaphore(found[1])
    or { capacity = capacity, taken = 0, holds = 0, members = 0, first = 1, last = 0, kept = 0 }
  state.written, state.isNew = found[2], not found[1]
  collectWaiters(state, found[2])
  return state
end

local function weightIn(detail)
  return detail == '' and 1 or tonumber(detail)
end

local function detailOf(weight)
  return weight == 1 and '' or text(weight)
end

-- Nothing keeps it: it is as one that was never there.
local function isUnused(state)
  return state.holds + state.members == 0 and isQueueEmpty(state)
end

-- With its waiters, if they have changed since they were written.
local function putState(key, state)
  local waiters = state.waiters ~= '' and state.waiters or false
  local changed = waiters ~= state.written
  state.written = waiters
  if changed and not waiters then removeFields(key, state, 'w') end
  putFields(key, state, 's', packSemaphore(state), changed and waiters and 'w', waiters)
end

local function save(key, state)
  -- It is written at the end of the call.
  if state.fields then
    state.changed = true
    return
  end
  if isUnused(state) then return call('DEL', key) end
  putState(key, state)
end

-- Whether there is a semaphore is also known beside it, as its inline state: one that is created though it was there has been evicted.
local function note(ctx, key, exists)
  if sub(key, #ctx.prefix + 1, #ctx.prefix + 10) ~= 'semaphore:' then return end
  local noted = readInline(ctx, key) and true or false
  if noted ~= exists then writeInline(ctx, key, exists and '1') end
end

-- The state of a semaphore or a read-write lock, which all requests of a call share.
local function opened(ctx, key, capacity)
  local known = sharedIn(ctx, 'semaphores')
  local state = known[key]
  if not state then
    state = load(key, capacity)
    collectFields(state)
    known[key] = state
    later(ctx, key, function()
      if not state.changed then return end
      local exists = not isUnused(state)
      note(ctx, key, exists)
      if not exists then return call('DEL', key) end
      putState(key, state)
      writeFields(key, state)
      if state.owned then keep(key) end
    end)
  end
  -- The call may have emptied it.
  if isUnused(state) then state.capacity = capacity end
  return state
end

local function ownPart(ctx, key, state, id)
  if not state.fields then return own(ctx, key, id) end
  own(ctx, key, id, PERMANENT)
  state.owned = true
end

local function granted(token)
  -- Concatenation is several times faster than `reply`, and this is the most frequent one.
  return '["granted","' .. token .. '"]'
end

local function hold(ctx, state, weight, keeps)
  state.taken = state.taken + weight
  state.holds = state.holds + 1
  local token = keeps and nextTokens(ctx, KEPT_TOKENS) or nextToken(ctx)
  return token, (weight == 1 and '1' or text(weight)) .. ' ' .. token .. ' ' .. ctx.seconds
end

-- Other claims want what processes may keep. Answers whether one of these is alive.
local function recallKept(ctx, key, state)
  if state.kept <= 0 then return false end
  if state.fields then writeFields(key, state) end
  local fields, found = call('HGETALL', key), false
  for index = 1, #fields, 2 do
    local claim, kept = match(fields[index], '^h(.*)$'), match(fields[index + 1], '^(.*) k$')
    if claim and kept then
      putFields(key, state, fields[index], kept)
      if isAlive(ctx, holderOf(claim)) then
        found = true
        deliver(ctx, holderOf(claim), reply('recall', idOf(claim)))
      end
    end
  end
  state.kept, state.changed = found and -ctx.now or 0, true
  return found
end

-- Grants to waiters from the front for as long as they fit. While all is taken, none is looked at, unless the capacity may have changed:
-- then those that are too heavy hear of it.
local function serve(ctx, key, state, changed)
  while state.first <= state.last do
    if not changed and state.capacity > 0 and state.taken >= state.capacity then return end
    local claim, weight = front(ctx, key, state)
    if not claim then return end
    weight = weightIn(weight)
    if state.capacity == 0 or weight <= state.capacity and state.taken + weight > state.capacity then return end
    departFirst(key, state, claim)
    if weight > state.capacity then
      tell(ctx, { claim }, continued('exceeds', state.capacity))
    elseif weight == 0 then
      -- If a fail-over has undone this, and the member has asked again since, it is one already.
      state.members = state.members + call('HSET', key, 'o' .. claim, '')
      tell(ctx, { claim }, continued('joined', state.capacity))
    else
      local token, value = hold(ctx, state, weight)
      putFields(key, state, 'h' .. claim, value)
      ctx.served = claim
      inform(ctx, claim, token)
    end
  end
end

local function enqueue(ctx, key, state, id, weight)
  join(key, state, claimOf(ctx, id), detailOf(weight))
  save(key, state)
  ownPart(ctx, key, state, id)
  return queued(ctx, state.last - state.first)
end

local function grant(ctx, key, state, id, weight, keeps)
  local token, value = hold(ctx, state, weight, keeps)
  if keeps then
    value, state.kept = value .. ' k', math.max(state.kept, 0) + 1
  end
  putFields(key, state, 'h' .. claimOf(ctx, id), value)
  save(key, state)
  ownPart(ctx, key, state, id)
  return keeps and grantedToKeep(token) or granted(token)
end

-- What has become of a claim that has asked before.
local function recallClaim(ctx, key, state, id)
  -- Mostly there is nothing yet.
  if state.holds == 0 and state.first > state.last then return end
  local claim = claimOf(ctx, id)
  local held = readField(key, state, 'h' .. claim)
  if held then return granted(match(held, '^%S+ (%S+)')) end
  local ahead = aheadOf(key, state, claim)
  return ahead and queued(ctx, ahead)
end

-- Ends a hold, a wait or a membership, whichever it is by now. Answers whether it was there.
local function drop(ctx, key, session, id, state)
  local claim = session .. '/' .. id
  if isUnused(state) then return false end
  local hold = readField(key, state, 'h' .. claim)
  if hold then
    state.taken, state.holds = state.taken - tonumber(match(hold, '^%S+')), state.holds - 1
    if sub(hold, -1) == 'k' then state.kept = state.kept - 1 end
    removeFields(key, state, 'h' .. claim)
  elseif not depart(key, state, claim) then
    if call('HDEL', key, 'o' .. claim) == 0 then return false end
    state.members = state.members - 1
  end
  serve(ctx, key, state)
  save(key, state)
  return true
end

-- Takes a weight of what is there already, or queues for it.
local function take(ctx, key, id, weight, capacity, how)
  local state = opened(ctx, key, capacity)
  local known, wait = find(how, 'a', 1, true) and recallClaim(ctx, key, state, id), sub(how, 1, 1)
  if known then return known end
  if state.capacity == 0 then return MISSING end
  if weight > state.capacity then return reply('exceeds', state.capacity) end
  if state.first > state.last and state.taken + weight <= state.capacity then
    return grant(ctx, key, state, id, weight, find(how, 'k', 1, true) and hasTokens(ctx))
  end
  if recallKept(ctx, key, state) or wait == '1' or state.kept < 0 and ctx.now + state.kept < RECALL then
    return enqueue(ctx, key, state, id, weight)
  end
  return wait == '0' and isStale(ctx) and STALE or '["busy"]'
end

-- semaphore.take: takes a weight, or queues for it. `how` begins with "1" to wait; with "0" for not at all; "2" for not at all, though an
-- expired session may stand in the way. With "k" behind that, its process may keep what it has released, as it may keep a lock: see
-- `lock.take`. When there is too little for another claim, all that is kept is recalled, and the claim queues, whether it waits or not; so
-- do those that come soon after it. With "a", it may have been asked before.
-- keys: hash
-- args: id string, weight number, capacity number, how string
-- reply: ["granted", token string] | ["kept", token string, tokens number] | ["queued", ahead number] | ["busy"] | ["missing"] | ["exceeds", capacity number] | ["stale"]
handlers['semaphore.take'] = function(ctx, key, id, weight, capacity, how)
  return take(ctx, key, id, tonumber(weight), tonumber(capacity), how)
end

-- semaphore.release: releases a hold, or leaves the queue, whichever it is by now
-- keys: hash
-- args: id string
-- reply: ["released"] | ["absent"]
-- flags: allow-oom
handlers['semaphore.release'] = function(ctx, key, id)
  local found = drop(ctx, key, ctx.session, id, opened(ctx, key, 0))
  disown(ctx, key, id)
  return found and RELEASED or ABSENT
end

-- It has another capacity.
local function resize(ctx, key, state)
  announce(ctx, key, state.capacity)
  if state.taken > state.capacity then recallKept(ctx, key, state) end
end

-- semaphore.join: creates the semaphore, or joins it. When it has another number of permits, `mismatch` decides: "fail",
-- unless no other process has it open; "keep" that number, likewise; or "resize". With "attach", the member waits until a process
-- creates the semaphore. With "again", the member keeps the number: it has found the semaphore gone, though its session is not. All
-- sessions hear when a semaphore is created again that was there, and ask about their permits and claims. "firm" is as "fail", and
-- "kept" as "keep", though only an expired session may have it open.
-- keys: hash
-- args: id string, permits number, mismatch string
-- reply: ["joined", capacity number] | ["queued", ahead number] | ["mismatch", capacity number] | ["stale"]
handlers['semaphore.join'] = function(ctx, key, id, permits, mismatch)
  permits = tonumber(permits)
  local state = opened(ctx, key, 0)
  local claim = claimOf(ctx, id)
  if state.isNew and readInline(ctx, key) then
    state.isNew = false
    doubtAll(ctx)
  end
  if state.capacity == 0 and mismatch == 'attach' then
    local ahead = aheadOf(key, state, claim)
    if ahead then return queued(ctx, ahead) end
    return enqueue(ctx, key, state, id, 0)
  end
  local differs = state.capacity ~= 0 and state.capacity ~= permits
  local member = call('HGET', key, 'o' .. claim)
  -- A member that asks again only wants to know the number.
  differs = differs and not member and mismatch ~= 'kept' and mismatch ~= 'attach' and mismatch ~= 'again'
  if differs and state.members > 0 then
    if (mismatch == 'fail' or mismatch == 'keep') and isStale(ctx) then return STALE end
    if mismatch == 'fail' or mismatch == 'firm' then return reply('mismatch', state.capacity) end
  end
  local resized = differs and not (mismatch == 'keep' and state.members > 0)
  if state.capacity == 0 or resized then state.capacity = permits end
  if resized then resize(ctx, key, state) end
  if enrol(ctx, key, id) then state.members = state.members + 1 end
  serve(ctx, key, state, true)
  save(key, state)
  return reply('joined', state.capacity)
end

-- semaphore.resize: changes the number of permits, and grants to waiters that fit now
-- keys: hash
-- args: permits number
-- reply: ["resized", capacity number] | ["missing"]
handlers['semaphore.resize'] = function(ctx, key, permits)
  local state = opened(ctx, key, 0)
  if state.capacity == 0 then return MISSING end
  state.capacity = tonumber(permits)
  resize(ctx, key, state)
  serve(ctx, key, state, true)
  save(key, state)
  return reply('resized', state.capacity)
end

-- semaphore.reweigh: makes a hold lighter, or heavier when no other hold is in the way; a heavier one gets a new token. Its process may not
-- keep it then. What others may keep is recalled if it is in the way.
-- keys: hash
-- args: id string, weight number, anyway boolean
-- reply: ["granted", token string] | ["conflict"] | ["absent"] | ["stale"]
-- flags: allow-oom
handlers['semaphore.reweigh'] = function(ctx, key, id, weight, anyway)
  weight = tonumber(weight)
  local field = 'h' .. claimOf(ctx, id)
  local state = opened(ctx, key, 0)
  local found = readField(key, state, field)
  if not found then return ABSENT end
  local before, token, since = match(found, '^(%S+) (%S+) (%S+)')
  before = tonumber(before)
  if weight > before and state.taken - before + weight > state.capacity then
    recallKept(ctx, key, state)
    return anyway == '' and isStale(ctx) and STALE or '["conflict"]'
  end
  if weight > before then token = nextToken(ctx) end
  if sub(found, -1) == 'k' then state.kept = state.kept - 1 end
  state.taken = state.taken - before + weight
  setField(state, field, text(weight) .. ' ' .. token .. ' ' .. since)
  serve(ctx, key, state)
  save(key, state)
  return granted(token)
end

-- semaphore.state: how many permits there are and are taken, and how many claims hold and wait
-- keys: hash
-- args:
-- reply: ["state", capacity number, taken number, holds number, waiting number] | ["stale"]
-- flags: no-writes
handlers['semaphore.state'] = function(ctx, key)
  if isStale(ctx) then return STALE end
  local state = load(key, 0)
  -- Places in the queue can be empty, so the fields are counted instead: one of state, one a hold or member, two a waiter.
  local waiting = state.waiters and state.last or (call('HLEN', key) - 1 - state.holds - state.members) / 2
  return reply('state', state.capacity, state.taken, state.holds, waiting)
end

-- semaphore.holders: up to 1,000 holds: for each its weight, token, since when in seconds, and the process
-- keys: hash
-- args:
-- reply: ["holders", holders json] | ["stale"]
-- flags: no-writes
handlers['semaphore.holders'] = function(ctx, key)
  if isStale(ctx) then return STALE end
  local fields, holders = call('HGETALL', key), {}
  for index = 1, #fields, 2 do
    local claim = match(fields[index], '^h(.*)$')
    if claim and #holders < MOST_LISTED then
      local weight, token, since = match(fields[index + 1], '^(%S+) (%S+) (%S+)')
      holders[#holders + 1] = list({ json(weight), token, json(since), aboutOf(ctx, claim) })
    end
  end
  return reply('holders', list(holders))
end

-- semaphore.waiters: up to 1,000 waiters, the next first: for each its weight, and the process
-- keys: hash
-- args:
-- reply: ["waiters", waiters json] | ["stale"]
-- flags: no-writes
handlers['semaphore.waiters'] = function(ctx, key)
  if isStale(ctx) then return STALE end
  local claims, weights = waitersOf(ctx, key, load(key, 0), MOST_LISTED)
  local waiters = {}
  for index, claim in ipairs(claims) do
    waiters[index] = list({ weightIn(weights[index]), aboutOf(ctx, claim) })
  end
  return reply('waiters', list(waiters))
end

local function serveOn(ctx, key, state)
  if isQueueEmpty(state) then return end
  serve(ctx, key, state)
  save(key, state)
end

local function reapClaim(ctx, key, session, id) drop(ctx, key, session, id, opened(ctx, key, 0)) end
local function ring(ctx, key) serveOn(ctx, key, opened(ctx, key, 0)) end

reapers.readWriteLock, alarms.readWriteLock = reapClaim, ring
reapers.semaphore, alarms.semaphore = reapClaim, ring
