-- A signal: each time it is set, one waiter passes, now or later. It is a semaphore whose capacity is the number of
-- signals that are set and not consumed. Who waits takes one, and consumes it when it knows that it has it; until then it
-- only holds it, so that the signal of a waiter that dies goes to the next.
--
-- A resource is the hash of a semaphore, and also:
--   k   ms for which signals are kept that nobody waits for
-- In its state, every signal that is set counts as a hold of weight 0: that is what keeps the resource.

-- It has an owner, or a time to live.
local function saveSignal(key, state, keep)
  save(key, state)
  if state.taken > 0 or state.first <= state.last then
    call('PERSIST', key)
  elseif state.capacity > 0 then
    call('PEXPIRE', key, keep or call('HGET', key, 'k'))
  end
end

local function addSignals(state, count)
  state.capacity = state.capacity + count
  state.holds = state.holds + count
end

-- signal.set: wakes so many waiters, or is kept for those who come
-- keys: resource
-- args: by number, keep number
-- reply: ["set"]
handlers['signal.set'] = function(ctx, key, by, keep)
  local state = load(key, 0)
  addSignals(state, tonumber(by))
  call('HSET', key, 'k', keep)
  serve(ctx, key, state)
  saveSignal(key, state, keep)
  return '["set"]'
end

-- signal.await: takes a signal that is set, or queues for one
-- keys: resource
-- args: id string
-- reply: ["granted", token string, capacity number] | ["queued", ahead number, nearest number]
handlers['signal.await'] = function(ctx, key, id)
  local state = load(key, 0)
  if state.first > state.last and state.taken < state.capacity then
    local reply = grant(ctx, key, state, id, 1)
    call('PERSIST', key)
    return reply
  end
  return enqueue(ctx, key, state, id, 1)
end

-- signal.consume: the waiter knows that it has the signal, which is over with that
-- keys: resource
-- args: id string
-- reply: ["consumed"] | ["absent"]
-- flags: allow-oom
handlers['signal.consume'] = function(ctx, key, id)
  if call('HDEL', key, 'h' .. ctx.session .. '/' .. id) == 0 then return ABSENT end
  local state = load(key, 0)
  state.taken, state.holds = state.taken - 1, state.holds - 1
  addSignals(state, -1)
  saveSignal(key, state)
  disown(ctx, key, id)
  return '["consumed"]'
end

-- signal.clear: forgets the signals that nobody has taken yet
-- keys: resource
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
  return format('["cleared",%d]', count)
end

-- signal.state: how many are set and not taken, and how many wait
-- keys: resource
-- args:
-- reply: ["state", count number, waiting number]
-- flags: no-writes
handlers['signal.state'] = function(_, key)
  local state = load(key, 0)
  local waiting = 0
  if state.first <= state.last then
    -- Fields: two a waiter, one a hold, the state, and perhaps how long it is kept.
    waiting = math.floor((call('HLEN', key) - state.taken - 1) / 2)
  end
  return format('["state",%d,%d]', state.capacity - state.taken, waiting)
end

reapers.signal = function(ctx, key, session, id)
  if drop(ctx, key, session, id) then saveSignal(key, load(key, 0)) end
end
