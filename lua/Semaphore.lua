-- The one actor behind everything that is held: a weighted first-in-first-out semaphore with capacity C.
-- A lock has C = 1; a semaphore has C = n; a read-write lock weighs a reader 1 and a writer C.
--
-- A resource is one hash, deleted with its last hold and waiter:
--   s                  state, packed: capacity, weight taken, number of holds, first and last place in the queue
--   h<session>/<id>    a hold: "<weight> <token> <since, in seconds>"
--   w<place>           a waiter: "<session>/<id> <weight>"
--   q<session>/<id>    the place of a waiter
-- Capacity 0 means that nobody has created the semaphore yet. A hold of weight 0 is membership: it keeps a created
-- semaphore alive, and waiting for it is waiting for the creation.
-- Invariant: the first place is a waiter's, or the queue is empty (first > last).

local FORMAT = '<ddddd'
local MANY_EMPTY = 32
local RELEASED, ABSENT = '["released"]', '["absent"]'

local function granted(token, capacity)
  -- Concatenation is several times faster than a format.
  return '["granted","' .. token .. '",' .. (capacity == 1 and '1' or text(capacity)) .. ']'
end

local function load(key, capacity)
  local packed = call('HGET', key, 's')
  if not packed then
    return { capacity = capacity, taken = 0, holds = 0, first = 1, last = 0 }
  end
  local c, u, n, f, l = unpackStruct(FORMAT, packed)
  return { capacity = c, taken = u, holds = n, first = f, last = l }
end

local function save(key, state)
  if state.holds == 0 and state.first > state.last then
    call('DEL', key)
  else
    call('HSET', key, 's',
      pack(FORMAT, state.capacity, state.taken, state.holds, state.first, state.last))
  end
end

local function hold(ctx, state, weight)
  state.taken = state.taken + weight
  state.holds = state.holds + 1
  local token = nextToken(ctx)
  return token, (weight == 1 and '1' or text(weight)) .. ' ' .. token .. ' ' .. ctx.seconds
end

-- The first place from one on that is a waiter's. Who leaves the queue leaves an empty place, and behind somebody who waits
-- for long there can be millions of them.
local function nextWaiter(key, place, last)
  local found = last + 1
  for _, field in ipairs(call('HKEYS', key)) do
    local at = tonumber(match(field, '^w(%-?%d+)$'))
    if at and at >= place and at < found then found = at end
  end
  return found
end

-- Grants to waiters from the front for as long as they fit; waiters of dead sessions are skipped, and the reaper finds
-- nothing of theirs.
local function serve(ctx, key, state)
  local empty = 0
  while state.first <= state.last do
    local waiter = call('HGET', key, 'w' .. text(state.first))
    if waiter then
      empty = 0
      local owner, session, id, weight = match(waiter, '^(([^/]*)/(%S*)) (%S+)$')
      weight = tonumber(weight)
      if not isAlive(ctx, session) then
        call('HDEL', key, 'w' .. text(state.first), 'q' .. owner)
      elseif state.capacity > 0 and weight > state.capacity then
        call('HDEL', key, 'w' .. text(state.first), 'q' .. owner)
        post(ctx, session, format('["refused","%s",%d]', id, state.capacity))
      elseif state.capacity > 0 and state.taken + weight <= state.capacity then
        local token, value = hold(ctx, state, weight)
        call('HDEL', key, 'w' .. text(state.first), 'q' .. owner)
        call('HSET', key, 'h' .. owner, value)
        ctx.served = owner
        post(ctx, session, format('["granted","%s","%s",%d]', id, token, state.capacity))
      else
        return
      end
      state.first = state.first + 1
    else
      empty = empty + 1
      state.first = empty < MANY_EMPTY and state.first + 1 or nextWaiter(key, state.first, state.last)
    end
  end
end

-- If a session that is over has not been reaped yet, whoever waits has to ask for that at once.
local function queued(ctx, ahead)
  return format('["queued",%d,%d]', ahead, nearest(ctx, 0))
end

local function enqueue(ctx, key, state, id, weight)
  local owner = ctx.session .. '/' .. id
  state.last = state.last + 1
  local place = text(state.last)
  call('HSET', key, 'w' .. place, owner .. ' ' .. text(weight), 'q' .. owner, place)
  save(key, state)
  own(ctx, key, id)
  return queued(ctx, state.last - state.first)
end

local function grant(ctx, key, state, id, weight)
  local token, value = hold(ctx, state, weight)
  call('HSET', key, 'h' .. ctx.session .. '/' .. id, value, 's',
    pack(FORMAT, state.capacity, state.taken, state.holds, state.first, state.last))
  own(ctx, key, id)
  return granted(token, state.capacity)
end

-- Ends a hold or a wait, whichever it is by now. Answers whether it was there.
local function drop(ctx, key, session, id)
  local field = 'h' .. session .. '/' .. id
  local found = call('HMGET', key, 's', field)
  local packed, value = found[1], found[2]
  if not packed then return false end
  local c, u, n, f, l = unpackStruct(FORMAT, packed)
  if value then
    u, n = u - tonumber(match(value, '^%S+')), n - 1
    if n == 0 and f > l then
      call('DEL', key)
      return true
    end
    call('HDEL', key, field)
  else
    local seat = 'q' .. session .. '/' .. id
    local place = call('HGET', key, seat)
    if not place then return false end
    call('HDEL', key, seat, 'w' .. place)
  end
  local state = { capacity = c, taken = u, holds = n, first = f, last = l }
  serve(ctx, key, state)
  save(key, state)
  return true
end

-- semaphore.take: takes a weight, or queues for it
-- keys: resource
-- args: id string, weight number, capacity number, wait boolean
-- reply: ["granted", token string, capacity number] | ["queued", ahead number, nearest number] | ["busy"] | ["missing"] | ["tooBig", capacity number]
handlers['semaphore.take'] = function(ctx, key, id, weight, capacity, wait)
  weight = tonumber(weight)
  local state = load(key, tonumber(capacity))
  if state.capacity == 0 then return '["missing"]' end
  if weight > state.capacity then return format('["tooBig",%d]', state.capacity) end
  if state.first > state.last and state.taken + weight <= state.capacity then
    return grant(ctx, key, state, id, weight)
  end
  if wait == '' then return '["busy"]' end
  return enqueue(ctx, key, state, id, weight)
end

-- semaphore.release: gives back a hold, or leaves the queue, whichever it is by now
-- keys: resource
-- args: id string
-- reply: ["released"] | ["absent"]
-- flags: allow-oom
handlers['semaphore.release'] = function(ctx, key, id)
  local found = drop(ctx, key, ctx.session, id)
  disown(ctx, key, id)
  return found and RELEASED or ABSENT
end

-- semaphore.check: what has become of a request to take
-- keys: resource
-- args: id string
-- reply: ["granted", token string, capacity number] | ["queued", ahead number, nearest number] | ["absent"]
-- flags: allow-oom
handlers['semaphore.check'] = function(ctx, key, id)
  local owner = ctx.session .. '/' .. id
  local found = call('HMGET', key, 's', 'h' .. owner, 'q' .. owner)
  if found[2] then return granted(match(found[2], '^%S+ (%S+)'), (unpackStruct(FORMAT, found[1]))) end
  if found[3] then return queued(ctx, tonumber(found[3]) - load(key, 0).first) end
  return ABSENT
end

-- semaphore.create: creates the semaphore, or joins it when it has as many permits
-- keys: resource
-- args: id string, permits number
-- reply: ["granted", token string, capacity number] | ["mismatch", capacity number]
handlers['semaphore.create'] = function(ctx, key, id, permits)
  permits = tonumber(permits)
  local state = load(key, 0)
  if state.capacity ~= 0 and state.capacity ~= permits then return format('["mismatch",%d]', state.capacity) end
  state.capacity = permits
  local reply = grant(ctx, key, state, id, 0)
  serve(ctx, key, state)
  save(key, state)
  return reply
end

-- semaphore.attach: joins a semaphore, or queues until somebody creates it
-- keys: resource
-- args: id string
-- reply: ["granted", token string, capacity number] | ["queued", ahead number, nearest number]
handlers['semaphore.attach'] = function(ctx, key, id)
  local state = load(key, 0)
  if state.capacity == 0 then return enqueue(ctx, key, state, id, 0) end
  return grant(ctx, key, state, id, 0)
end

-- semaphore.resize: changes the number of permits, and grants to whoever now fits
-- keys: resource
-- args: permits number
-- reply: ["resized", capacity number] | ["missing"]
handlers['semaphore.resize'] = function(ctx, key, permits)
  local state = load(key, 0)
  if state.capacity == 0 then return '["missing"]' end
  state.capacity = tonumber(permits)
  serve(ctx, key, state)
  save(key, state)
  return format('["resized",%d]', state.capacity)
end

-- semaphore.reweigh: makes a hold lighter, or heavier when nobody else is in the way; a heavier one gets a new token
-- keys: resource
-- args: id string, weight number
-- reply: ["granted", token string, capacity number] | ["conflict"] | ["absent"]
-- flags: allow-oom
handlers['semaphore.reweigh'] = function(ctx, key, id, weight)
  weight = tonumber(weight)
  local field = 'h' .. ctx.session .. '/' .. id
  local found = call('HGET', key, field)
  if not found then return ABSENT end
  local before, token, since = match(found, '^(%S+) (%S+) (%S+)$')
  before = tonumber(before)
  local state = load(key, 0)
  if weight > before and state.taken - before + weight > state.capacity then return '["conflict"]' end
  if weight > before then token = nextToken(ctx) end
  state.taken = state.taken - before + weight
  call('HSET', key, field, text(weight) .. ' ' .. token .. ' ' .. since)
  serve(ctx, key, state)
  save(key, state)
  return granted(token, state.capacity)
end

-- semaphore.state: how many permits there are, are taken, and how many wait
-- keys: resource
-- args:
-- reply: ["state", capacity number, taken number, holds number, waiting number]
-- flags: no-writes
handlers['semaphore.state'] = function(_, key)
  local state = load(key, 0)
  local waiting = 0
  if state.first <= state.last then
    -- Places in the queue can be empty (their waiters left), so the fields are counted instead: one of state, one a hold,
    -- two a waiter.
    waiting = (call('HLEN', key) - 1 - state.holds) / 2
  end
  return format('["state",%d,%d,%d,%d]', state.capacity, state.taken, state.holds, waiting)
end

reapers.lock = drop
reapers.rw = drop
reapers.sem = drop
