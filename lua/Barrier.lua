-- A barrier: parties wait until all of them have arrived, again and again.
--
-- A resource is one hash, deleted with its last member:
--   s                   state, packed: parties, generation, arrived, last place, members, epoch
--   o<session>/<id>     a member: somebody who has it open; who arrives belongs to one, and is reaped with it
--   a<arrival>          who has arrived: "<place> <session> <member> <claim> <mode> <contribution>"; session "-" has left
--   q<session>/<claim>  the arrival that a claim waits for
--   x                   all have arrived, and one of them runs the action first: "<arrival> <last place> <token>"
--   e<arrival>, r       place in the generation that ended last, and how it ended
-- An arrival outlives the session that it was made in: its claim asks again in the next one, and hears how the generation
-- has ended if it has. What happened longer ago is forgotten: who may have arrived then is told that it is broken, since to
-- arrive a second time could be to count twice. Another epoch means that Redis has forgotten the barrier meanwhile.

local BARRIER = '<dddddd'
local ARRIVAL = '^(%S+) (%S+) (%S+) (%S+) (%S+) (.*)$'

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
  local epoch = tonumber(nextToken(ctx))
  return { parties = tonumber(parties), generation = 1, arrived = 0, last = 0, members = 0, epoch = epoch }
end

local function saveBarrier(key, state)
  if state.members == 0 then
    call('DEL', key)
  else
    call('HSET', key, 's', pack(BARRIER, state.parties, state.generation, state.arrived, state.last, state.members,
      state.epoch))
  end
end

-- Who has arrived, in that order, and the fields of those that had arrived in the generation before.
local function census(key)
  local all, arrivals, ended = call('HGETALL', key), {}, {}
  for at = 1, #all, 2 do
    local kind = string.byte(all[at])
    if kind == 97 then
      local place, session, member, claim, mode, contribution = match(all[at + 1], ARRIVAL)
      arrivals[#arrivals + 1] = {
        arrival = string.sub(all[at], 2), place = tonumber(place), session = session, member = member, id = claim, mode = mode,
        contribution = contribution
      }
    elseif kind == 101 then
      ended[#ended + 1] = all[at]
    end
  end
  table.sort(arrivals, function(one, other) return one.place < other.place end)
  return arrivals, ended
end

-- The present generation, of all who have arrived.
local function groupOf(state, arrivals)
  local group = {}
  for index = 1, math.min(state.parties, #arrivals) do group[index] = arrivals[index] end
  return group
end

local function indexOf(group, arrival)
  for index, one in ipairs(group) do
    if one.arrival == arrival then return index - 1 end
  end
end

local function contributionsOf(group)
  local contributions = {}
  for index, one in ipairs(group) do contributions[index] = one.contribution end
  return '[' .. table.concat(contributions, ',') .. ']'
end

-- Ends the present generation, and tells all of it but the asker, who is going to be answered.
local function conclude(ctx, key, state, group, ended, result, asker)
  local gone, known, told = ended, { 'r', result }, {}
  gone[#gone + 1] = 'x'
  for index, one in ipairs(group) do
    gone[#gone + 1] = 'a' .. one.arrival
    gone[#gone + 1] = 'q' .. one.session .. '/' .. one.id
    known[#known + 1] = 'e' .. one.arrival
    known[#known + 1] = index - 1
    if one.arrival ~= asker and one.session ~= '-' then
      one.own = index - 1
      told[#told + 1] = one
    end
  end
  call('HDEL', key, unpack(gone))
  call('HSET', key, unpack(known))
  state.generation, state.arrived, state.runner = state.generation + 1, state.arrived - #group, nil
  tell(ctx, told, result)
end

local function pass(ctx, key, state, group, ended, asker)
  conclude(ctx, key, state, group, ended, '"passed",' .. state.generation .. ',' .. contributionsOf(group), asker)
end

local function breakUp(ctx, key, state, left, why)
  local arrivals, ended = census(key)
  local group = groupOf(state, arrivals)
  local missing = state.parties - #group + left
  for _, one in ipairs(group) do
    if one.session == '-' then missing = missing + 1 end
  end
  conclude(ctx, key, state, group, ended, '"broken",' .. state.generation .. ',' .. missing .. ',"' .. why .. '"')
end

-- How the last generation ended for one of it.
local function verdict(key, index)
  return '[' .. call('HGET', key, 'r') .. ',' .. index .. ']'
end

-- What the one is told that runs the action.
local function charge(state, group)
  return '"' .. state.token .. '",1,' .. state.generation .. ',' .. contributionsOf(group) .. ',' .. indexOf(group, state.runner)
end

local function charged(key, state)
  return '["granted",' .. charge(state, groupOf(state, (census(key)))) .. ']'
end

-- Somebody does not wait any more: that breaks the generation, or it goes on without.
local function depart(ctx, key, state, arrival, why)
  local value = call('HGET', key, 'a' .. arrival)
  if not value then return end
  local place, session, member, claim, mode, contribution = match(value, ARRIVAL)
  local runs = state.runner == arrival
  if state.runner and not runs and tonumber(place) <= state.bound then
    -- The action is for all of them: who leaves while it runs has arrived nevertheless.
    call('HDEL', key, 'q' .. session .. '/' .. claim)
    call('HSET', key, 'a' .. arrival, place .. ' - ' .. member .. ' ' .. claim .. ' w0 ' .. contribution)
  elseif string.byte(mode) == 98 and (runs or not state.runner) then
    breakUp(ctx, key, state, 1, why)
  else
    call('HDEL', key, 'a' .. arrival, 'q' .. session .. '/' .. claim)
    state.arrived = state.arrived - 1
    if not runs then return end
    call('HDEL', key, 'x')
    state.runner = nil
    for _, one in ipairs((census(key))) do
      if one.session == '-' then
        call('HDEL', key, 'a' .. one.arrival)
        state.arrived = state.arrived - 1
      end
    end
  end
end

-- A session that has ended on its own word has a successor, which is going to ask again, or it is being reaped right now.
local function hasExpired(ctx, session)
  local state = call('HGET', ctx.sessions, 's' .. session)
  if not state then return true end
  local _, deadline = unpackStruct(STATE, state)
  return deadline > 0 and deadline <= ctx.now
end

-- Who has died leaves before others complete the generation, as if it had been reaped in time.
local function sweep(ctx, key, state)
  -- Mostly nobody has, and a look at all who have arrived is what an arrival would cost most.
  if not isAnyDue(ctx) then return end
  for _, one in ipairs((census(key))) do
    if one.session ~= ctx.session and hasExpired(ctx, one.session) then depart(ctx, key, state, one.arrival, 'left') end
  end
end

-- All have arrived: they pass, or the last of them that has an action runs it first. Answers what the asker hears, if it
-- is one of them; the others are told.
local function advance(ctx, key, state, asker)
  while not state.runner and state.arrived >= state.parties do
    if not asker then sweep(ctx, key, state) end
    if state.arrived < state.parties then return nil end
    local arrivals, ended = census(key)
    local group = groupOf(state, arrivals)
    local runner
    for _, one in ipairs(group) do
      if string.byte(one.mode, 2) == 49 then runner = one end
    end
    if runner then
      state.runner, state.bound, state.token = runner.arrival, group[#group].place, nextToken(ctx)
      call('HSET', key, 'x', state.runner .. ' ' .. text(state.bound) .. ' ' .. state.token)
      if runner.arrival == asker then return '["granted",' .. charge(state, group) .. ']' end
      post(ctx, runner.session, '["granted","' .. runner.id .. '",' .. charge(state, group) .. ']')
      return nil
    end
    pass(ctx, key, state, group, ended, asker)
    if asker then return verdict(key, indexOf(group, asker)) end
  end
end

-- barrier.join: creates the barrier, or joins it when it has as many parties
-- keys: resource
-- args: id string, parties number
-- reply: ["observing", generation number, epoch number] | ["mismatch", parties number]
handlers['barrier.join'] = function(ctx, key, id, parties)
  local state = loadBarrier(key) or newBarrier(ctx, parties)
  if state.parties ~= tonumber(parties) then return format('["mismatch",%d]', state.parties) end
  if enrol(ctx, key, id, '') then
    state.members = state.members + 1
    saveBarrier(key, state)
  end
  return '["observing",' .. state.generation .. ',' .. text(state.epoch) .. ']'
end

-- barrier.arrive: arrives, once for each arrival; the last one ends the generation, or is granted to run the action first.
-- The mode is b (breaks) or w (withdraws), 1 or 0 for an action, and the epoch and the generation at the first time, if this
-- is not the first time.
-- keys: resource
-- args: id string, arrival string, member string, contribution string, parties number, mode string
-- reply: ["queued", ahead number, nearest number] | ["granted", token string, capacity number, generation number, contributions json, index number] | ["passed", generation number, contributions json, index number] | ["broken", generation number, missing number, why string, index number] | ["mismatch", parties number]
handlers['barrier.arrive'] = function(ctx, key, id, arrival, member, contribution, parties, mode)
  local state, value, index, enrolled = loadBarrier(key, 'a' .. arrival, 'e' .. arrival, 'o' .. ctx.session .. '/' .. member)
  if not state then state = newBarrier(ctx, parties) end
  if state.parties ~= tonumber(parties) then return format('["mismatch",%d]', state.parties) end
  if index then return verdict(key, index) end
  local epoch, since = match(mode, ' (%S+) (%S+)$')
  if not value and epoch == text(state.epoch) and state.generation > since + 1 then
    return format('["broken",%d,1,"left",0]', tonumber(since))
  end
  if not enrolled then
    enrol(ctx, key, member, '')
    state.members = state.members + 1
  end
  local answer
  local place = state.last + 1
  if value then
    -- Asked again, by another session: it is that one's from now on.
    local before, session, _, claim = match(value, ARRIVAL)
    place = before
    call('HDEL', key, 'q' .. session .. '/' .. claim)
  else
    if not state.runner and state.arrived + 1 >= state.parties then sweep(ctx, key, state) end
    state.last, state.arrived = place, state.arrived + 1
    place = text(place)
  end
  call('HSET', key, 'a' .. arrival, place .. ' ' .. ctx.session .. ' ' .. member .. ' ' .. id .. ' ' .. string.sub(mode, 1, 2) .. ' '
    .. contribution,
    'q' .. ctx.session .. '/' .. id, arrival)
  if state.runner == arrival then
    answer = charged(key, state)
  else
    answer = advance(ctx, key, state, arrival)
  end
  saveBarrier(key, state)
  return answer or queued(ctx, state.arrived)
end

-- barrier.check: what has become of somebody who waits
-- keys: resource
-- args: id string
-- reply: ["granted", token string, capacity number, generation number, contributions json, index number] | ["queued", ahead number, nearest number] | ["absent"]
-- flags: allow-oom
handlers['barrier.check'] = function(ctx, key, id)
  local state, arrival = loadBarrier(key, 'q' .. ctx.session .. '/' .. id)
  if not arrival then return ABSENT end
  if state.runner == arrival then return charged(key, state) end
  return queued(ctx, state.arrived)
end

-- barrier.release: the action has succeeded, and all pass; unless the generation was broken meanwhile
-- keys: resource
-- args: arrival string, generation number
-- reply: ["passed", generation number, contributions json, index number] | ["broken", generation number, missing number, why string, index number]
-- flags: allow-oom
handlers['barrier.release'] = function(ctx, key, arrival, generation)
  local state, index = loadBarrier(key, 'e' .. arrival)
  if state and state.runner == arrival then
    local arrivals, ended = census(key)
    local group = groupOf(state, arrivals)
    pass(ctx, key, state, group, ended, arrival)
    local answer = verdict(key, indexOf(group, arrival))
    advance(ctx, key, state)
    saveBarrier(key, state)
    return answer
  end
  if index then return verdict(key, index) end
  return format('["broken",%d,0,"reset",0]', tonumber(generation))
end

-- barrier.reset: breaks the present generation, if anybody waits
-- keys: resource
-- args:
-- reply: ["reset"]
-- flags: allow-oom
handlers['barrier.reset'] = function(ctx, key)
  local state = loadBarrier(key)
  if state and state.arrived > 0 then
    breakUp(ctx, key, state, 0, 'reset')
    advance(ctx, key, state)
    saveBarrier(key, state)
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
  local state, arrival, member = loadBarrier(key, 'q' .. owner, 'o' .. owner)
  if arrival then
    depart(ctx, key, state, arrival, state.runner == arrival and 'action' or 'left')
  elseif member then
    call('HDEL', key, 'o' .. owner)
    state.members = state.members - 1
    for _, one in ipairs((census(key))) do
      if one.session == session and one.member == id then depart(ctx, key, state, one.arrival, 'left') end
    end
  else
    return
  end
  if state.members > 0 then advance(ctx, key, state) end
  saveBarrier(key, state)
end
