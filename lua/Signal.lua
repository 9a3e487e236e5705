-- A signal: each time it is set, one waiter passes, now or later. It is a semaphore whose capacity is the number of signals
-- that are set and not consumed. A waiter takes one, and consumes it when it knows of the grant. Until then it only holds
-- the signal, so that the signal of a waiter that dies goes to the next one.
--
-- after Semaphore.lua
-- after waiters.lua
-- kinds: signal: hash
--
-- A resource is the hash of a semaphore, and also:
--   timeToLive   ms for which signals are kept that nothing waits for
-- In its state, every signal that is set counts as a hold of weight 0: that is what keeps the resource.

local function saveSignal(key, state, life)
  save(key, state)
  if state.holds == 0 and isQueueEmpty(state) then return end
  life = tonumber(life or state.capacity > 0 and call('HGET', key, 'timeToLive') or ABANDONED)
  if state.taken > 0 or not isQueueEmpty(state) then keep(key, life) else call('PEXPIRE', key, text(life)) end
end

local function addSignals(state, count)
  state.capacity = state.capacity + count
  state.holds = state.holds + count
end

-- signal.set: wakes so many waiters, or is kept for those that come
-- keys: hash
-- args: by number, life number
-- reply: ["set"]
handlers['signal.set'] = function(ctx, key, by, life)
  local state = load(key, 0)
  addSignals(state, tonumber(by))
  call('HSET', key, 'timeToLive', life)
  serve(ctx, key, state)
  saveSignal(key, state, life)
  return '["set"]'
end

-- signal.await: takes a signal that is set, or queues for one
-- keys: hash
-- args: id string
-- reply: ["granted", token string] | ["queued", ahead number]
handlers['signal.await'] = function(ctx, key, id)
  local state = load(key, 0)
  local known = recallClaim(ctx, key, state, id)
  if known then return known end
  if isQueueEmpty(state) and state.taken < state.capacity then
    local answer = grant(ctx, key, state, id, 1)
    -- The signals that are left may be kept for longer than what a session owns.
    local life = tonumber(call('HGET', key, 'timeToLive') or 0)
    if life > ABANDONED then keep(key, life) end
    return answer
  end
  return enqueue(ctx, key, state, id, 1)
end

-- signal.consume: the waiter knows that it has the signal, which ends it
-- keys: hash
-- args: id string
-- reply: ["consumed"] | ["absent"]
-- flags: allow-oom
handlers['signal.consume'] = function(ctx, key, id)
  if call('HDEL', key, 'h' .. claimOf(ctx, id)) == 0 then return ABSENT end
  local state = load(key, 0)
  state.taken, state.holds = state.taken - 1, state.holds - 1
  addSignals(state, -1)
  saveSignal(key, state)
  disownNow(ctx, key, id)
  return '["consumed"]'
end

-- signal.clear: forgets the signals that no waiter has taken
-- keys: hash
-- args:
-- reply: ["cleared", count number]
-- flags: allow-oom
handlers['signal.clear'] = function(_, key)
  local state = load(key, 0)
  local count = state.capacity - state.taken
  if count > 0 then
    addSignals(state, -count)
    saveSignal(key, state)
  end
  return reply('cleared', count)
end

-- signal.state: how many are set and not taken, and how many waiters there are
-- keys: hash
-- args:
-- reply: ["state", pending number, waiting number] | ["stale"]
-- flags: no-writes
handlers['signal.state'] = function(ctx, key)
  if isStale(ctx) then return STALE end
  local state = load(key, 0)
  -- Fields: two a waiter, one a hold, the state, and perhaps the time to live.
  local waiting = state.waiters and state.last or math.floor((call('HLEN', key) - state.taken - 1) / 2)
  return reply('state', state.capacity - state.taken, waiting)
end

reapers.signal = function(ctx, key, session, id)
  if drop(ctx, key, session, id, load(key, 0)) then saveSignal(key, load(key, 0)) end
end

alarms.signal = function(ctx, key)
  local state = load(key, 0)
  if isQueueEmpty(state) then return end
  serve(ctx, key, state)
  saveSignal(key, state)
end
