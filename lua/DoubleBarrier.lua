-- A double barrier: parties enter a phase together, and leave it together.
--
-- A resource is one hash, deleted with the last one that has anything to do with it:
--   s                state, packed: parties, number of the phase, inside, waiting, last place, members, token of the phase
--   o<session>/<id>  a member: somebody who has it open
--   q<session>/<id>  waits to enter: its place
--   h<session>/<id>  is inside
--   l<session>/<id>  has left, and waits until all have
-- A phase opens when nobody is inside and enough wait.

local PHASE = '<ddddddd'

-- The state, and the values of the fields.
local function loadPhase(key, ...)
  local found = call('HMGET', key, 's', ...)
  if not found[1] then return nil end
  local parties, number, inside, waiting, last, members, token = unpackStruct(PHASE, found[1])
  return {
    parties = parties, number = number, inside = inside, waiting = waiting, last = last, members = members, token = token
  }, unpack(found, 2)
end

local function newPhase(parties)
  return { parties = tonumber(parties), number = 0, inside = 0, waiting = 0, last = 0, members = 0, token = 0 }
end

local function savePhase(key, state)
  if state.members + state.inside + state.waiting == 0 then
    call('DEL', key)
  else
    call('HSET', key, 's',
      pack(PHASE, state.parties, state.number, state.inside, state.waiting, state.last, state.members, state.token))
  end
end

-- Those of a kind, by the first byte of their fields.
local function claimsOf(key, kind)
  local all, claims = call('HGETALL', key), {}
  for at = 1, #all, 2 do
    if string.byte(all[at]) == kind then
      claims[#claims + 1] = { field = all[at], owner = string.sub(all[at], 2), place = tonumber(all[at + 1]) }
    end
  end
  return claims
end

local function entered(state)
  return '"granted","' .. text(state.token) .. '",1,' .. state.number
end

-- Opens the next phase if it can be, and tells those of it.
local function openPhase(ctx, key, state)
  if state.inside > 0 or state.waiting < state.parties then return end
  local claims = claimsOf(key, 113)
  table.sort(claims, function(one, other) return one.place < other.place end)
  local group, gone, inside = {}, {}, {}
  for _, one in ipairs(claims) do
    if #group == state.parties then break end
    if isAlive(ctx, sessionOf(one.owner)) then
      group[#group + 1], gone[#gone + 1] = one.owner, one.field
      inside[#inside + 1] = 'h' .. one.owner
      inside[#inside + 1] = ''
    else
      -- Its reaper finds nothing.
      call('HDEL', key, one.field)
      state.waiting = state.waiting - 1
    end
  end
  if #group < state.parties then return end
  call('HDEL', key, unpack(gone))
  call('HSET', key, unpack(inside))
  state.number, state.token = state.number + 1, tonumber(nextToken(ctx))
  state.inside, state.waiting = #group, state.waiting - #group
  tell(ctx, group, entered(state))
end

-- phase.join: creates the double barrier, or joins it when it has as many parties
-- keys: resource
-- args: id string, parties number
-- reply: ["observing"] | ["mismatch", parties number]
handlers['phase.join'] = function(ctx, key, id, parties)
  local state = loadPhase(key) or newPhase(parties)
  if state.parties ~= tonumber(parties) then return format('["mismatch",%d]', state.parties) end
  if enrol(ctx, key, id, '') then
    state.members = state.members + 1
    savePhase(key, state)
  end
  return '["observing"]'
end

-- phase.enter: waits for a phase, and opens it when enough wait
-- keys: resource
-- args: id string, parties number
-- reply: ["queued", ahead number, nearest number] | ["mismatch", parties number]
handlers['phase.enter'] = function(ctx, key, id, parties)
  local state = loadPhase(key) or newPhase(parties)
  if state.parties ~= tonumber(parties) then return format('["mismatch",%d]', state.parties) end
  state.last, state.waiting = state.last + 1, state.waiting + 1
  call('HSET', key, 'q' .. ctx.session .. '/' .. id, text(state.last))
  own(ctx, key, id)
  openPhase(ctx, key, state)
  savePhase(key, state)
  return queued(ctx, state.waiting)
end

-- phase.leave: waits until all have left the phase of this token
-- keys: resource
-- args: id string, token string
-- reply: ["queued", ahead number, nearest number] | ["left"]
handlers['phase.leave'] = function(ctx, key, id, token)
  local state = loadPhase(key)
  if not state or state.inside == 0 or text(state.token) ~= token then return '["left"]' end
  call('HSET', key, 'l' .. ctx.session .. '/' .. id, '')
  return queued(ctx, state.inside)
end

-- phase.check: what has become of somebody who waits
-- keys: resource
-- args: id string
-- reply: ["granted", token string, capacity number, phase number] | ["queued", ahead number, nearest number] | ["absent"]
-- flags: allow-oom
handlers['phase.check'] = function(ctx, key, id)
  local owner = ctx.session .. '/' .. id
  local state, inside, waits, leaves = loadPhase(key, 'h' .. owner, 'q' .. owner, 'l' .. owner)
  if inside then return '[' .. entered(state) .. ']' end
  if waits or leaves then return queued(ctx, state.waiting) end
  return ABSENT
end

-- phase.state: how many are inside, and wait
-- keys: resource
-- args:
-- reply: ["state", inside number, waiting number] | ["missing"]
-- flags: no-writes
handlers['phase.state'] = function(_, key)
  local state = loadPhase(key)
  if not state then return '["missing"]' end
  return format('["state",%d,%d]', state.inside, state.waiting)
end

reapers.phase = function(ctx, key, session, id)
  local owner = session .. '/' .. id
  local state, inside, waits, leaves, member = loadPhase(key, 'h' .. owner, 'q' .. owner, 'l' .. owner, 'o' .. owner)
  if not state then return end
  call('HDEL', key, 'h' .. owner, 'q' .. owner, 'l' .. owner, 'o' .. owner)
  if waits then state.waiting = state.waiting - 1 end
  if member then state.members = state.members - 1 end
  if inside then
    state.inside = state.inside - 1
    if state.inside == 0 then
      local leavers = {}
      for index, one in ipairs(claimsOf(key, 108)) do
        leavers[index] = one.owner
        call('HDEL', key, one.field)
      end
      tell(ctx, leavers, '"left"')
      openPhase(ctx, key, state)
    end
  end
  savePhase(key, state)
end
