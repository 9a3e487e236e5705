-- A barrier: parties wait until all of them have arrived, again and again.
--
-- A resource is two hashes, deleted with its last member; its own
--   s                   state, packed: parties, generation, arrived, last place, members, epoch
--   o<session>/<id>     a member: somebody who has it open; who arrives belongs to one, and is reaped with it
--   x                   all have arrived, and one of them runs the action first: "<arrival> <last place> <token>"
--   e, r                the arrivals of the generation that ended last, in order, and how it ended
-- and its items, apart, so that a whole generation is read and deleted at once:
--   <session>/<claim>   who has arrived: "<place> <mode> <arrival> <member> <contribution>"; session "-" has left
-- An arrival outlives the session that it was made in: its claim asks again in the next one, and hears how the generation
-- has ended if it has. What happened longer ago is forgotten: who may have arrived then is told that it is broken, since to
-- arrive a second time could be to count twice. Another epoch means that Redis has forgotten the barrier meanwhile.

local BARRIER = '<dddddd'
-- Where one that has left would have its session.
local GONE = '-/'
local ARRIVAL = '^(%S+) (.)(.) (%S+) (%S+) (.*)$'

-- The state, and the values of the fields.
local function loadBarrier(key, ...)
  local found = call('HMGET', key, 's', 'x', ...)
  if not found[1] then return nil end
  local parties, generation, arrived, last, members, epoch = unpackStruct(BARRIER, found[1])
  local state = {
    parties = parties, generation = generation, arrived = arrived, last = last, members = members, epoch = epoch
  }
  if found[2] then
    local runner, bound, token = match(found[2], '^(%S+) (%S+) (%S+)$')
    state.runner, state.bound, state.token = runner, tonumber(bound), token
  end
  return state, unpack(found, 3)
end

local function newBarrier(ctx, parties)
  -- Redis can have lost the one key and not the other.
  call('DEL', ctx.items)
  local epoch = tonumber(nextToken(ctx))
  return { parties = tonumber(parties), generation = 1, arrived = 0, last = 0, members = 0, epoch = epoch }
end

local function saveBarrier(ctx, key, state)
  local packed = pack(BARRIER, state.parties, state.generation, state.arrived, state.last, state.members, state.epoch)
  if state.members == 0 then
    call('DEL', key, ctx.items)
  elseif state.concluded then
    call('HSET', key, 's', packed, 'e', state.ended, 'r', state.result)
  else
    call('HSET', key, 's', packed)
  end
end

-- Who has arrived, in that order.
local function census(ctx)
  local all, arrivals, last, ordered = call('HGETALL', ctx.items), {}, 0, true
  for at = 1, #all, 2 do
    local place, _, acts, arrival, member, contribution = match(all[at + 1], ARRIVAL)
    place = tonumber(place)
    ordered, last = ordered and place > last, place
    arrivals[#arrivals + 1] = {
      owner = all[at], place = place, acts = acts == '1', arrival = arrival, member = member, contribution = contribution
    }
  end
  -- Redis keeps small hashes in the order of writing.
  if not ordered then table.sort(arrivals, function(one, other) return one.place < other.place end) end
  return arrivals
end

local function hasGone(owner)
  return string.sub(owner, 1, 2) == GONE
end

-- The present generation, of all who have arrived.
local function presentOf(ctx, state)
  local arrivals = census(ctx)
  state.arrived = #arrivals
  if #arrivals <= state.parties then return arrivals end
  local group = {}
  for index = 1, state.parties do group[index] = arrivals[index] end
  return group
end

local function contributionsOf(group)
  local contributions = {}
  for index, one in ipairs(group) do contributions[index] = one.contribution end
  return '[' .. table.concat(contributions, ',') .. ']'
end

-- To write a number costs more than to look up how it is written.
local written = {}

local function indexOf(at)
  local index = written[at] or text(at - 1)
  written[at] = index
  return index
end

-- Ends the present generation, and tells all of it.
local function conclude(ctx, key, state, group, result)
  local owners, ended, told, indices = {}, {}, {}, {}
  for at, one in ipairs(group) do
    owners[at], ended[at] = one.owner, one.arrival
    if not (state.runner and hasGone(one.owner)) then
      told[#told + 1], indices[#indices + 1] = one.owner, indexOf(at)
    end
  end
  if #group == state.arrived then call('DEL', ctx.items) else call('HDEL', ctx.items, unpack(owners)) end
  if state.runner then call('HDEL', key, 'x') end
  state.ended, state.result, state.concluded = table.concat(ended, ' '), result, true
  state.generation, state.arrived, state.runner = state.generation + 1, state.arrived - #group, nil
  tell(ctx, told, result, indices)
end

local function pass(ctx, key, state, group)
  conclude(ctx, key, state, group, '"passed",' .. state.generation .. ',' .. contributionsOf(group))
end

local function breakUp(ctx, key, state, left, why)
  local group = presentOf(ctx, state)
  local missing = state.parties - #group + left
  for _, one in ipairs(group) do
    if hasGone(one.owner) then missing = missing + 1 end
    if one.arrival == state.runner then revoke(ctx, one.owner) end
  end
  conclude(ctx, key, state, group, '"broken",' .. state.generation .. ',' .. missing .. ',"' .. why .. '"')
end

-- How the last generation ended for one of it, if it was one of it.
local function verdict(key, state, arrival)
  if not state.ended then
    local known = call('HMGET', key, 'e', 'r')
    state.ended, state.result = known[1] or '', known[2]
  end
  local index = 0
  for one in string.gmatch(state.ended, '%S+') do
    if one == arrival then return '[' .. state.result .. ',' .. index .. ']' end
    index = index + 1
  end
end

-- What the one is told that runs the action.
local function charge(state, group)
  local index
  for at, one in ipairs(group) do
    if one.arrival == state.runner then index = at - 1 end
  end
  return '"granted","' .. state.token .. '",1,' .. state.generation .. ',' .. contributionsOf(group) .. ',' .. index
end

local function charged(ctx, state)
  return '[' .. charge(state, presentOf(ctx, state)) .. ']'
end

-- Somebody does not wait any more: that breaks the generation, or it goes on without.
local function depart(ctx, key, state, owner, why)
  local value = call('HGET', ctx.items, owner)
  if not value then return end
  local place, departure, _, arrival = match(value, ARRIVAL)
  local runs = state.runner == arrival
  if state.runner and not runs and tonumber(place) <= state.bound then
    -- The action is for all of them: who leaves while it runs has arrived nevertheless.
    call('HDEL', ctx.items, owner)
    call('HSET', ctx.items, GONE .. arrival, value)
  elseif departure == 'b' and (runs or not state.runner) then
    breakUp(ctx, key, state, 1, why)
  else
    call('HDEL', ctx.items, owner)
    state.arrived = state.arrived - 1
    if not runs then return end
    call('HDEL', key, 'x')
    state.runner = nil
    for _, one in ipairs(census(ctx)) do
      if hasGone(one.owner) then state.arrived = state.arrived - call('HDEL', ctx.items, one.owner) end
    end
  end
end

-- A session that has ended on its own word has a successor, which is going to ask again, or it is being reaped right now.
local function hasExpired(ctx, session)
  local deadline = deadlineOf(ctx, session)
  return not deadline or deadline > 0 and deadline <= ctx.now
end

-- Who has died leaves before others complete the generation, as if it had been reaped in time.
local function sweep(ctx, key, state)
  -- Mostly nobody has, and a look at all who have arrived is what an arrival would cost most.
  if state.due == nil then state.due = isAnyDue(ctx) end
  if not state.due then return end
  local generation, living = state.generation, 0
  for _, one in ipairs(census(ctx)) do
    local session = sessionOf(one.owner)
    if session ~= ctx.session and hasExpired(ctx, session) then
      depart(ctx, key, state, one.owner, 'left')
      if state.generation ~= generation then return end
    else
      living = living + 1
      -- Who has come in excess is of a later generation.
      if living == state.parties then return end
    end
  end
end

-- All have arrived: they pass, or the last of them that has an action runs it first.
local function advance(ctx, key, state)
  while not state.runner and state.arrived >= state.parties do
    sweep(ctx, key, state)
    if state.arrived < state.parties then return end
    local group = presentOf(ctx, state)
    if #group < state.parties then return end
    local runner
    for _, one in ipairs(group) do
      if one.acts then runner = one end
    end
    if not runner then
      pass(ctx, key, state, group)
    else
      state.runner, state.bound, state.token = runner.arrival, group[#group].place, nextToken(ctx)
      call('HSET', key, 'x', state.runner .. ' ' .. text(state.bound) .. ' ' .. state.token)
      tell(ctx, { runner.owner }, charge(state, group))
    end
  end
end

-- barrier.join: creates the barrier, or joins it when it has as many parties
-- keys: resource, items
-- args: id string, parties number
-- reply: ["observing", generation number, epoch number] | ["mismatch", parties number]
handlers['barrier.join'] = function(ctx, key, id, parties)
  local state = loadBarrier(key) or newBarrier(ctx, parties)
  if state.parties ~= tonumber(parties) then return format('["mismatch",%d]', state.parties) end
  if enrol(ctx, key, id, '') then
    state.members = state.members + 1
    saveBarrier(ctx, key, state)
  end
  return '["observing",' .. state.generation .. ',' .. text(state.epoch) .. ']'
end

-- barrier.arrive: arrives, once for each arrival; the last one ends the generation, or is granted to run the action first.
-- The mode is b (breaks) or w (withdraws), 1 or 0 for an action, and the epoch and the generation at the first time, if this
-- is not the first time.
-- keys: resource, items
-- args: id string, arrival string, member string, contribution string, parties number, mode string
-- reply: ["queued", ahead number, nearest number] | ["granted", token string, capacity number, generation number, contributions json, index number] | ["passed", generation number, contributions json, index number] | ["broken", generation number, missing number, why string, index number] | ["mismatch", parties number]
handlers['barrier.arrive'] = function(ctx, key, id, arrival, member, contribution, parties, mode)
  local state, enrolled = loadBarrier(key, 'o' .. ctx.session .. '/' .. member)
  if not state then state = newBarrier(ctx, parties) end
  if state.parties ~= tonumber(parties) then return format('["mismatch",%d]', state.parties) end
  local epoch, since = match(mode, ' (%S+) (%S+)$')
  local known
  if epoch then
    local ended = verdict(key, state, arrival)
    if ended then return ended end
    for _, one in ipairs(census(ctx)) do
      if one.arrival == arrival then known = one end
    end
    if not known and epoch == text(state.epoch) and state.generation > since + 1 then
      return format('["broken",%d,1,"left",0]', tonumber(since))
    end
  end
  if not enrolled then
    enrol(ctx, key, member, '')
    state.members = state.members + 1
  end
  if state.runner == arrival and not known then
    call('HDEL', key, 'x')
    state.runner = nil
  end
  local place
  if known then
    -- Asked again, by another session: it is that one's from now on.
    place = known.place
    call('HDEL', ctx.items, known.owner)
  else
    if not state.runner and state.arrived + 1 >= state.parties then sweep(ctx, key, state) end
    place = state.last + 1
    state.last, state.arrived = place, state.arrived + 1
  end
  call('HSET', ctx.items, ctx.session .. '/' .. id,
    text(place) .. ' ' .. string.sub(mode, 1, 2) .. ' ' .. arrival .. ' ' .. member .. ' ' .. contribution)
  local answer
  if state.runner == arrival then
    answer = charged(ctx, state)
  else
    advance(ctx, key, state)
    answer = queued(ctx, state.arrived)
  end
  saveBarrier(ctx, key, state)
  return answer
end

-- barrier.check: what has become of somebody who waits
-- keys: resource, items
-- args: id string
-- reply: ["granted", token string, capacity number, generation number, contributions json, index number] | ["queued", ahead number, nearest number] | ["absent"]
-- flags: allow-oom
handlers['barrier.check'] = function(ctx, key, id)
  local state, value = loadBarrier(key), call('HGET', ctx.items, ctx.session .. '/' .. id)
  if not (state and value) then return ABSENT end
  local _, _, _, arrival = match(value, ARRIVAL)
  if state.runner == arrival then return charged(ctx, state) end
  return queued(ctx, state.arrived)
end

-- What whoever ran the action is told: that it has passed, without what it knows already.
local function released(key, state, arrival)
  local ended = verdict(key, state, arrival)
  return ended and string.find(ended, '["passed"', 1, true) and '["passed"]' or ended or ABSENT
end

-- barrier.release: the action has succeeded, and all pass; unless the generation was broken meanwhile. It is absent when so
-- much has happened since that this is not known any more.
-- keys: resource, items
-- args: arrival string
-- reply: ["passed"] | ["broken", generation number, missing number, why string, index number] | ["absent"]
-- flags: allow-oom
handlers['barrier.release'] = function(ctx, key, arrival)
  local state = loadBarrier(key)
  if not state then return ABSENT end
  if state.runner ~= arrival then return released(key, state, arrival) end
  local group = presentOf(ctx, state)
  if #group == state.parties then pass(ctx, key, state, group) else breakUp(ctx, key, state, 0, 'left') end
  local answer = released(key, state, arrival)
  advance(ctx, key, state)
  saveBarrier(ctx, key, state)
  return answer
end

-- barrier.reset: breaks the present generation, if anybody waits
-- keys: resource, items
-- args:
-- reply: ["reset"]
-- flags: allow-oom
handlers['barrier.reset'] = function(ctx, key)
  local state = loadBarrier(key)
  if state and state.arrived > 0 then
    breakUp(ctx, key, state, 0, 'reset')
    advance(ctx, key, state)
    saveBarrier(ctx, key, state)
  end
  return '["reset"]'
end

-- barrier.state: how many have arrived
-- keys: resource
-- args:
-- reply: ["state", arrived number] | ["missing"]
-- flags: no-writes
handlers['barrier.state'] = function(_, key)
  local state = loadBarrier(key)
  if not state then return '["missing"]' end
  return format('["state",%d]', math.min(state.arrived, state.parties))
end

reapers.barrier = function(ctx, key, session, id)
  local owner = session .. '/' .. id
  local state, member = loadBarrier(key, 'o' .. owner)
  if not state then return end
  local value = call('HGET', ctx.items, owner)
  if value then
    local _, _, _, arrival = match(value, ARRIVAL)
    depart(ctx, key, state, owner, state.runner == arrival and 'action' or 'left')
  elseif member then
    call('HDEL', key, 'o' .. owner)
    state.members = state.members - 1
    for _, one in ipairs(census(ctx)) do
      if one.member == id and sessionOf(one.owner) == session then depart(ctx, key, state, one.owner, 'left') end
    end
  else
    return
  end
  if state.members > 0 then advance(ctx, key, state) end
  saveBarrier(ctx, key, state)
end
