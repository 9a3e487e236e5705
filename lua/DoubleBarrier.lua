-- A double barrier: parties enter a phase together, and leave it together.
--
-- kinds: doubleBarrier: hash
-- after waiters.lua
--
-- A resource is one hash, deleted with its last member, waiter and party inside:
--   s                record DoubleBarrier
--   o<session>/<id>  a member
--   h<session>/<id>  a party inside
--   l<session>/<id>  a party that has left, and waits until all have
-- The queue has the parties that want to enter, and `waiting` counts them. A phase opens when no party is inside and enough wait.
-- `token` is that of the phase, `change` that of the last change of `parties`.
-- record DoubleBarrier 2: parties, number, inside, waiting, first, last, members, token, change

-- The state, and the values of the fields.
local function loadPhase(key, ...)
  local found = call('HMGET', key, 's', ...)
  local state = found[1] and unpackDoubleBarrier(found[1])
  if not state then return nil end
  return state, unpack(found, 2)
end

local function newPhase(ctx, parties)
  local change = tonumber(nextToken(ctx))
  return {
    parties = tonumber(parties), number = 0, inside = 0, waiting = 0, first = 1, last = 0, members = 0, token = 0, change = change
  }
end

local function savePhase(key, state)
  if state.members + state.inside + state.waiting == 0 then
    call('DEL', key)
  else
    call('HSET', key, 's', packDoubleBarrier(state))
  end
end

-- Opens the next phase if it can be, and tells its parties.
local function openPhase(ctx, key, state)
  if state.inside > 0 or state.waiting < state.parties then return end
  local function dropped() state.waiting = state.waiting - 1 end
  if not front(ctx, key, state, dropped) then return end
  -- Waiters of dead sessions behind the first one stay until they are reaped.
  local group = waitersOf(ctx, key, state, state.parties)
  if #group < state.parties then return end
  collectFields(state)
  for _, claim in ipairs(group) do
    depart(key, state, claim)
    setField(state, 'h' .. claim, '')
  end
  writeFields(key, state)
  state.number, state.token = state.number + 1, tonumber(nextToken(ctx))
  state.inside, state.waiting = #group, state.waiting - #group
  tell(ctx, group, continued('granted', text(state.token), state.number))
end

-- doubleBarrier.join: creates the double barrier, or joins it. When it is for another number of parties, `mismatch` decides:
-- "fail", unless no other session has it open; "keep" that number, likewise; or "resize" it, from the next phase on. "firm" is as
-- "fail", and "kept" as "keep", though only an expired session may have it open.
-- keys: hash
-- args: id string, parties number, mismatch string
-- reply: ["joined", parties number, change number] | ["mismatch", parties number] | ["stale"]
handlers['doubleBarrier.join'] = function(ctx, key, id, parties, mismatch)
  parties = tonumber(parties)
  local state, member = loadPhase(key, 'o' .. claimOf(ctx, id))
  state = state or newPhase(ctx, parties)
  -- A member that asks again only wants to know the number.
  local differs, isOpen = not member and state.parties ~= parties and mismatch ~= 'kept', state.members > 0
  if differs and isOpen and (mismatch == 'fail' or mismatch == 'keep') and isStale(ctx) then return STALE end
  if differs and not (isOpen and mismatch == 'keep') then
    if isOpen and mismatch ~= 'resize' then return reply('mismatch', state.parties) end
    state.parties, state.change = parties, tonumber(nextToken(ctx))
    openPhase(ctx, key, state)
    announce(ctx, key, state.parties, state.change)
  end
  if enrol(ctx, key, id) then state.members = state.members + 1 end
  savePhase(key, state)
  return reply('joined', state.parties, state.change)
end

-- doubleBarrier.enter: waits for a phase, and opens it when enough wait. `parties` is for a double barrier that Redis has
-- forgotten.
-- keys: hash
-- args: id string, parties number
-- reply: ["queued", ahead number] | ["granted", token string, number number]
handlers['doubleBarrier.enter'] = function(ctx, key, id, parties)
  local claim = claimOf(ctx, id)
  local state, inside, waits = loadPhase(key, 'h' .. claim, 'q' .. claim)
  state = state or newPhase(ctx, parties)
  if inside then return reply('granted', text(state.token), state.number) end
  if waits then return queued(ctx, state.waiting) end
  join(key, state, claim, '')
  state.waiting = state.waiting + 1
  own(ctx, key, id)
  openPhase(ctx, key, state)
  savePhase(key, state)
  return queued(ctx, state.waiting)
end

-- doubleBarrier.leave: waits until all have left the phase of this token
-- keys: hash
-- args: id string, token string
-- reply: ["queued", ahead number] | ["left"]
-- flags: allow-oom
handlers['doubleBarrier.leave'] = function(ctx, key, id, token)
  local state = loadPhase(key)
  if not state or state.inside == 0 or text(state.token) ~= token then return '["left"]' end
  call('HSET', key, 'l' .. claimOf(ctx, id), '')
  return queued(ctx, state.inside)
end

-- doubleBarrier.state: how many are inside, how many wait, and how many parties there are
-- keys: hash
-- args:
-- reply: ["state", inside number, waiting number, parties number] | ["missing"] | ["stale"]
-- flags: no-writes
handlers['doubleBarrier.state'] = function(ctx, key)
  if isStale(ctx) then return STALE end
  local state = loadPhase(key)
  if not state then return MISSING end
  return reply('state', state.inside, state.waiting, state.parties)
end

reapers.doubleBarrier = function(ctx, key, session, id)
  local claim = session .. '/' .. id
  local state, inside, waits, leaves, member = loadPhase(key, 'h' .. claim, 'q' .. claim, 'l' .. claim, 'o' .. claim)
  if not (inside or waits or leaves or member) then return end
  call('HDEL', key, 'h' .. claim, 'l' .. claim, 'o' .. claim)
  if waits and depart(key, state, claim, waits) then state.waiting = state.waiting - 1 end
  if member then state.members = state.members - 1 end
  if inside then
    state.inside = state.inside - 1
    if state.inside == 0 then
      local leavers = {}
      for _, field in ipairs(call('HKEYS', key)) do
        local leaver = match(field, '^l(.*)$')
        if leaver then
          leavers[#leavers + 1] = leaver
          call('HDEL', key, field)
        end
      end
      tell(ctx, leavers, '"left"')
      openPhase(ctx, key, state)
    end
  end
  savePhase(key, state)
end

-- The front of the queue was too far from its last waiter for one call.
alarms.doubleBarrier = function(ctx, key)
  local state = loadPhase(key)
  if not state then return end
  openPhase(ctx, key, state)
  savePhase(key, state)
end
