-- The one actor behind everything that is held: a weighted first-in-first-out semaphore with capacity C.
-- A lock has C = 1, see Lock.lua; a semaphore has C = n; a read-write lock weighs a reader 1 and a writer C.
--
-- kinds: readWriteLock, semaphore: hash
--
-- A resource is one hash, deleted with its last hold, member and waiter: a queue (see kernel.lua), and
--   s                  record Semaphore
--   h<session>/<id>    a hold: "<weight> <token> <since, in seconds>"
--   o<session>/<id>    a member: it keeps a semaphore alive, and hears how many permits there are
-- Waiters wait for a weight, or, with weight 0, to become a member of a semaphore that does not exist yet: capacity 0.
-- record Semaphore 1: capacity, taken, holds, members, first, last

local MOST_LISTED = 1000

local function load(key, capacity)
  local packed = call('HGET', key, 's')
  local state = packed and unpackSemaphore(packed)
  return state or { capacity = capacity, taken = 0, holds = 0, members = 0, first = 1, last = 0 }
end

local function save(key, state)
  if state.holds + state.members == 0 and state.first > state.last then
    call('DEL', key)
  else
    call('HSET', key, 's', packSemaphore(state))
  end
end

local function granted(token)
  -- Concatenation is several times faster than `reply`, and this is the most frequent one.
  return '["granted","' .. token .. '"]'
end

local function hold(ctx, state, weight)
  state.taken = state.taken + weight
  state.holds = state.holds + 1
  local token = nextToken(ctx)
  return token, (weight == 1 and '1' or text(weight)) .. ' ' .. token .. ' ' .. ctx.seconds
end

-- Grants to waiters from the front for as long as they fit.
local function serve(ctx, key, state)
  while state.first <= state.last do
    local claim, weight = front(ctx, key, state)
    if not claim then return end
    weight = tonumber(weight)
    if state.capacity == 0 or weight <= state.capacity and state.taken + weight > state.capacity then return end
    depart(key, state, claim, text(state.first))
    if weight > state.capacity then
      tell(ctx, { claim }, continued('exceeds', state.capacity))
    elseif weight == 0 then
      call('HSET', key, 'o' .. claim, '')
      state.members = state.members + 1
      tell(ctx, { claim }, continued('joined', state.capacity))
    else
      local token, value = hold(ctx, state, weight)
      call('HSET', key, 'h' .. claim, value)
      ctx.served = claim
      inform(ctx, claim, token)
    end
  end
end

local function enqueue(ctx, key, state, id, weight)
  join(key, state, claimOf(ctx, id), text(weight))
  save(key, state)
  own(ctx, key, id)
  return queued(ctx, state.last - state.first)
end

local function grant(ctx, key, state, id, weight)
  local token, value = hold(ctx, state, weight)
  call('HSET', key, 'h' .. claimOf(ctx, id), value, 's', packSemaphore(state))
  own(ctx, key, id)
  return granted(token)
end

-- The state, and what has become of a claim that has asked before.
local function recallClaim(ctx, key, id, capacity)
  local state = load(key, capacity)
  -- Mostly there is nothing yet.
  if state.holds == 0 and state.first > state.last then return state end
  local claim = claimOf(ctx, id)
  local found = call('HMGET', key, 'h' .. claim, 'q' .. claim)
  if found[1] then return state, granted(match(found[1], '^%S+ (%S+)')) end
  if found[2] then return state, queued(ctx, tonumber(found[2]) - state.first) end
  return state
end

-- Ends a hold, a wait or a membership, whichever it is by now. Answers whether it was there.
local function drop(ctx, key, session, id)
  local claim = session .. '/' .. id
  local packed = call('HGET', key, 's')
  local state = packed and unpackSemaphore(packed)
  if not state then return false end
  local hold = call('HGET', key, 'h' .. claim)
  if hold then
    state.taken, state.holds = state.taken - tonumber(match(hold, '^%S+')), state.holds - 1
    if state.holds + state.members == 0 and state.first > state.last then
      call('DEL', key)
      return true
    end
    call('HDEL', key, 'h' .. claim)
  elseif not depart(key, state, claim) then
    if call('HDEL', key, 'o' .. claim) == 0 then return false end
    state.members = state.members - 1
  end
  serve(ctx, key, state)
  save(key, state)
  return true
end

-- Takes a weight of what is there already, or queues for it.
local function take(ctx, key, id, weight, capacity, wait)
  local state, known = recallClaim(ctx, key, id, capacity)
  if known then return known end
  if state.capacity == 0 then return MISSING end
  if weight > state.capacity then return reply('exceeds', state.capacity) end
  if state.first > state.last and state.taken + weight <= state.capacity then
    return grant(ctx, key, state, id, weight)
  end
  if wait == '1' then return enqueue(ctx, key, state, id, weight) end
  return wait == '0' and isStale(ctx) and STALE or '["busy"]'
end

-- semaphore.take: takes a weight, or queues for it. `wait` is 1; 0 for not at all; 2 for not at all, though an expired session
-- may stand in the way.
-- keys: hash
-- args: id string, weight number, capacity number, wait number
-- reply: ["granted", token string] | ["queued", ahead number] | ["busy"] | ["missing"] | ["exceeds", capacity number] | ["stale"]
handlers['semaphore.take'] = function(ctx, key, id, weight, capacity, wait)
  return take(ctx, key, id, tonumber(weight), tonumber(capacity), wait)
end

-- semaphore.release: releases a hold, or leaves the queue, whichever it is by now
-- keys: hash
-- args: id string
-- reply: ["released"] | ["absent"]
-- flags: allow-oom
handlers['semaphore.release'] = function(ctx, key, id)
  local found = drop(ctx, key, ctx.session, id)
  disown(ctx, key, id)
  return found and RELEASED or ABSENT
end

-- semaphore.join: creates the semaphore, or joins it. When it has another number of permits, `mismatch` decides: "fail",
-- unless no other process has it open; "keep" that number; or "resize". With "attach", it waits until a process creates it.
-- "firm" is as "fail", though an expired session may stand in the way.
-- keys: hash
-- args: id string, permits number, mismatch string
-- reply: ["joined", capacity number] | ["queued", ahead number] | ["mismatch", capacity number] | ["stale"]
handlers['semaphore.join'] = function(ctx, key, id, permits, mismatch)
  permits = tonumber(permits)
  local state = load(key, 0)
  local claim = claimOf(ctx, id)
  if state.capacity == 0 and mismatch == 'attach' then
    local place = call('HGET', key, 'q' .. claim)
    if place then return queued(ctx, tonumber(place) - state.first) end
    return enqueue(ctx, key, state, id, 0)
  end
  local differs = state.capacity ~= 0 and state.capacity ~= permits
  local member = call('HGET', key, 'o' .. claim)
  if differs and (mismatch == 'fail' or mismatch == 'firm') and not member and state.members > 0 then
    if mismatch == 'fail' and isStale(ctx) then return STALE end
    return reply('mismatch', state.capacity)
  end
  -- A member that asks again only wants to know the number.
  local resized = differs and not member and mismatch ~= 'keep' and mismatch ~= 'attach'
  if state.capacity == 0 or resized then state.capacity = permits end
  if resized then announce(ctx, key, state.capacity) end
  if enrol(ctx, key, id) then state.members = state.members + 1 end
  serve(ctx, key, state)
  save(key, state)
  return reply('joined', state.capacity)
end

-- semaphore.resize: changes the number of permits, and grants to waiters that fit now
-- keys: hash
-- args: permits number
-- reply: ["resized", capacity number] | ["missing"]
handlers['semaphore.resize'] = function(ctx, key, permits)
  local state = load(key, 0)
  if state.capacity == 0 then return MISSING end
  state.capacity = tonumber(permits)
  announce(ctx, key, state.capacity)
  serve(ctx, key, state)
  save(key, state)
  return reply('resized', state.capacity)
end

-- semaphore.reweigh: makes a hold lighter, or heavier when no other hold is in the way; a heavier one gets a new token
-- keys: hash
-- args: id string, weight number, anyway boolean
-- reply: ["granted", token string] | ["conflict"] | ["absent"] | ["stale"]
-- flags: allow-oom
handlers['semaphore.reweigh'] = function(ctx, key, id, weight, anyway)
  weight = tonumber(weight)
  local field = 'h' .. claimOf(ctx, id)
  local state = load(key, 0)
  local found = call('HGET', key, field)
  if not found then return ABSENT end
  local before, token, since = match(found, '^(%S+) (%S+) (%S+)')
  before = tonumber(before)
  if weight > before and state.taken - before + weight > state.capacity then
    return anyway == '' and isStale(ctx) and STALE or '["conflict"]'
  end
  if weight > before then token = nextToken(ctx) end
  state.taken = state.taken - before + weight
  call('HSET', key, field, text(weight) .. ' ' .. token .. ' ' .. since)
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
  local waiting = 0
  if state.first <= state.last then
    -- Places in the queue can be empty, so the fields are counted instead: one of state, one a hold or member, two a waiter.
    waiting = (call('HLEN', key) - 1 - state.holds - state.members) / 2
  end
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
    waiters[index] = list({ json(weights[index]), aboutOf(ctx, claim) })
  end
  return reply('waiters', list(waiters))
end

local function serveOn(ctx, key)
  local state = load(key, 0)
  if state.first > state.last then return end
  serve(ctx, key, state)
  save(key, state)
end

reapers.readWriteLock, alarms.readWriteLock = drop, serveOn
reapers.semaphore, alarms.semaphore = drop, serveOn
