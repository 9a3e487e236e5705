-- A barrier: parties wait until all of them have arrived, again and again.
--
-- kinds: barrier: hash, items
--
-- A resource is two hashes, deleted when its last member leaves; its own
--   s                   record Barrier
--   o<session>/<id>     a member; an arrival belongs to one, and is reaped with it
--   x                   all have arrived, and one party runs the action first: "<arrival> <last place> <token> <parties>"
--   e<n>, r<n>          the arrivals of one of the generations that ended last, in order, and how it ended
-- and its items, apart, so that a whole generation is read and deleted at once:
--   <session>/<id>      an arrival: "<place> <mode> <arrival> <member> <contribution>"; session "-": its party has left
-- An arrival outlives the session that it was made in: its claim asks again in the next one, and hears how the generation
-- has ended if it has. The barrier keeps the last few results. A claim of an older generation hears that it is broken, since a
-- second arrival could count twice. Another epoch means that Redis has forgotten the barrier meanwhile, or before the claim
-- was made: it may have been made in any generation of this epoch, which are those from `base` on. `change` is the token of
-- the last change of `parties`, and `stamp` of the last change of anything.
-- `away` is 1 when the session of a member has expired: behind the last member, the results stay for a day then, as its process may
-- come back, and ask for one.
-- record Barrier 1: parties, generation, arrived, last, members, away, epoch, base, change, stamp

-- A party can be late: others may have passed already, arrived again, and given up.
local RESULTS = 4

local ARRIVAL = '^(%S+) (.)(.) (%S+) (%S+) (.*)$'

-- So many arrivals of all barriers are remembered at most, and none that brings more than so many bytes.
local REMEMBERED, BRIEF = 4096, 256

-- The state, and the values of the fields.
local function loadBarrier(key, ...)
  local found = call('HMGET', key, 's', 'x', ...)
  local state = found[1] and unpackBarrier(found[1])
  if not state then return nil end
  if found[2] then
    local runner, bound, token, size = match(found[2], '^(%S+) (%S+) (%S+) (%S+)$')
    state.runner, state.bound, state.token, state.size = runner, tonumber(bound), token, tonumber(size)
  end
  return state, unpack(found, 3)
end

-- The process of a claim finds out how it is.
local function askAgain(ctx, owner)
  deliver(ctx, holderOf(owner), reply('again', idOf(owner)))
end

local function newBarrier(ctx, parties, state)
  -- Its results may be asked for yet, and nothing else.
  if state then
    if state.parties ~= parties then state.parties, state.change = parties, tonumber(nextToken(ctx)) end
    return state
  end
  -- Redis can have lost the one key and not the other: claims that have arrived ask again.
  for _, owner in ipairs(call('HKEYS', ctx.items)) do askAgain(ctx, owner) end
  call('DEL', ctx.items)
  local epoch = tonumber(nextToken(ctx))
  return {
    parties = parties, generation = 1, arrived = 0, last = 0, members = 0, away = 0, epoch = epoch, base = 1,
    change = epoch, stamp = 0
  }
end

local function saveBarrier(ctx, key, state)
  state.stamp = math.max(ctx.micros, state.stamp + 1)
  if state.memory then state.memory.stamp = state.stamp end
  if state.members == 0 and not state.kept then
    call('DEL', key, ctx.items)
  elseif state.results then
    local fields = { 's', packBarrier(state) }
    for slot, one in pairs(state.results) do
      local last = #fields
      fields[last + 1], fields[last + 2], fields[last + 3], fields[last + 4] = 'e' .. slot, one.ended, 'r' .. slot, one.result
    end
    call('HSET', key, unpack(fields))
  else
    call('HSET', key, 's', packBarrier(state))
  end
end

-- What members know of a barrier.
local function progressOf(state)
  return continued(state.generation, state.epoch, state.parties, state.change)
end

-- Redis has lost arrivals: in another epoch, members have them made again.
local function beginAgain(ctx, key, state)
  state.epoch, state.base = tonumber(nextToken(ctx)), state.generation
  announce(ctx, key, json(progressOf(state)))
end

-- All arrivals in order, read once in a call. Of them, `from` belong to generations that this call has ended.
local function census(ctx, state)
  if state.all then return state.all end
  local fields, arrivals, last, ordered = call('HGETALL', ctx.items), {}, 0, true
  for at = 1, #fields, 2 do
    local owner, value = fields[at], fields[at + 1]
    -- This is most of what a generation costs that has an action, so nothing is captured that is seldom needed.
    local place, acts, arrival, contribution = match(value, '^(%S+) .(.) (%S+) %S+ (.*)$')
    place = tonumber(place)
    ordered, last = ordered and place > last, place
    arrivals[(at + 1) / 2] = {
      owner = owner, value = value, place = place, acts = acts == '1', arrival = arrival, contribution = contribution,
      gone = state.runner and find(owner, '-/', 1, true) == 1
    }
  end
  -- Redis keeps small hashes in the order of writing.
  if not ordered then table.sort(arrivals, function(one, other) return one.place < other.place end) end
  state.all, state.from = arrivals, 0
  return arrivals
end

-- The arrivals of the present generation. While an action runs, it is the one that was complete then.
local function presentOf(ctx, state)
  local all = census(ctx, state)
  local from, group = state.from, {}
  state.arrived = #all - from
  if not state.runner and from == 0 and #all <= state.parties then return all end
  for index = 1, state.arrived do
    local one = all[from + index]
    if state.runner and one.place > state.bound or not state.runner and index > state.parties then break end
    group[index] = one
  end
  return group
end

-- Of parties that all bring nothing, their number says as much.
local function listOf(contributions)
  for at = 1, #contributions do
    if contributions[at] ~= 'null' then return '[' .. table.concat(contributions, ',') .. ']' end
  end
  return text(#contributions)
end

local function contributionsOf(group)
  local contributions = {}
  for index, one in ipairs(group) do contributions[index] = one.contribution end
  return listOf(contributions)
end

-- To write a number costs more than to look up how it is written.
local written = {}

local function indexOf(at)
  local index = written[at]
  if not index then
    index = text(at - 1)
    written[at] = index
  end
  return index
end

-- Keeps how the present generation ended, for arrivals that ask again, and begins the next one.
local function nextGeneration(state, ended, result)
  state.results = state.results or {}
  state.results[state.generation % RESULTS] = { ended = table.concat(ended, ' '), result = result }
  state.generation, state.runner = state.generation + 1, nil
end

-- Ends the present generation, and tells all of it.
local function conclude(ctx, key, state, group, result)
  local owners, ended, told, indices, count = {}, {}, {}, {}, 0
  for at = 1, #group do
    local one = group[at]
    owners[at], ended[at] = one.owner, one.arrival
    if not one.gone then
      count = count + 1
      told[count], indices[count] = one.owner, indexOf(at)
    end
  end
  if #group == state.arrived then
    call('DEL', ctx.items)
  elseif #group > 0 then
    call('HDEL', ctx.items, unpack(owners))
  end
  if state.runner then call('HDEL', key, 'x') end
  nextGeneration(state, ended, result)
  state.arrived, state.from = state.arrived - #group, state.from + #group
  tell(ctx, told, result, indices)
end

local function passed(state, contributions)
  return '"passed",' .. text(state.generation) .. ',' .. contributions
end

local function pass(ctx, key, state, group)
  conclude(ctx, key, state, group, passed(state, contributionsOf(group)))
end

-- To read and to split all arrivals would be half of what the last one costs, so each is remembered here when it is written: by
-- barrier, what `passAll` needs of those of the present generation. Only Redis has the word: a memory counts if the barrier was
-- changed by nothing else, which its stamp shows. There is none after a restart or a fail-over.
local memories, remembered = {}, 0

local function forget(key)
  local memory = memories[key]
  if memory then memories[key], remembered = nil, remembered - #memory.ended end
end

-- An arrival of this call, the last one that `state` counts.
local function remember(key, state, session, id, arrival, contribution)
  local memory = memories[key]
  if state.arrived == 1 or not memory or memory.stamp ~= state.stamp or #memory.ended ~= state.arrived - 1 then
    forget(key)
    if state.arrived ~= 1 then return end
    memory = { ended = {}, contributions = {}, told = {} }
  end
  if #contribution > BRIEF then return forget(key) end
  if remembered == REMEMBERED then
    memories, remembered = {}, 0
    return
  end
  memories[key], remembered, state.memory = memory, remembered + 1, memory
  memory.ended[state.arrived], memory.contributions[state.arrived] = arrival, contribution
  gather(memory.told, session, id, indexOf(state.arrived))
end

-- Lets all arrivals pass in one go, as most generations do, without a census: if they are remembered.
local function passAll(ctx, key, state)
  local memory = state.memory
  if state.arrived ~= state.parties or not memory or #memory.ended ~= state.parties then return false end
  forget(key)
  state.memory = nil
  call('DEL', ctx.items)
  local result = passed(state, listOf(memory.contributions))
  nextGeneration(state, memory.ended, result)
  state.arrived, state.all = 0, nil
  tellAll(ctx, memory.told, result)
  return true
end

local function breakUp(ctx, key, state, left, why)
  local group = presentOf(ctx, state)
  local missing = (state.runner and state.size or state.parties) - #group + left
  for _, one in ipairs(group) do
    if one.gone then missing = missing + 1 end
    if one.arrival == state.runner then revoke(ctx, one.owner) end
  end
  conclude(ctx, key, state, group, continued('broken', state.generation, missing, why))
end

-- How one of the last generations ended for an arrival, if it was one of it.
local function verdict(key, state, arrival)
  local fields = {}
  for slot = 0, RESULTS - 1 do fields[slot + 1] = 'e' .. slot end
  local known = call('HMGET', key, unpack(fields))
  for slot = 0, RESULTS - 1 do
    local own, index = state.results and state.results[slot], 0
    for one in string.gmatch(own and own.ended or known[slot + 1] or '', '%S+') do
      if one == arrival then return '[' .. (own and own.result or call('HGET', key, 'r' .. slot)) .. ',' .. text(index) .. ']' end
      index = index + 1
    end
  end
end

-- The generation, the contributions, and the place of the party that runs the action.
local function chargeOf(state, group)
  local index
  for at, one in ipairs(group) do
    if one.arrival == state.runner then index = at - 1 end
  end
  return state.generation, json(contributionsOf(group)), index
end

-- A party does not wait any more: that breaks its generation, or the generation goes on without it.
local function quit(ctx, key, state, owner)
  local value = call('HGET', ctx.items, owner)
  if not value then return end
  local place, departure, _, arrival = match(value, ARRIVAL)
  place = tonumber(place)
  local runs = state.runner == arrival
  if state.runner and not runs and place <= state.bound then
    -- The action is for all of them: a party that leaves while it runs has arrived nevertheless.
    call('HSET', ctx.items, '-/' .. arrival, value)
    call('HDEL', ctx.items, owner)
    state.all = nil
    return
  end
  if departure == 'b' and (runs or not state.runner) then
    local group = presentOf(ctx, state)
    if runs or place <= group[#group].place then return breakUp(ctx, key, state, 1, runs and 'action' or 'left') end
  end
  call('HDEL', ctx.items, owner)
  state.arrived, state.all = state.arrived - 1, nil
  if not runs then return end
  local all = census(ctx, state)
  call('HDEL', key, 'x')
  state.runner = nil
  for _, one in ipairs(all) do
    if one.gone then
      state.arrived = state.arrived - call('HDEL', ctx.items, one.owner)
    elseif one.place <= state.bound then
      -- Its wait may have been over before.
      askAgain(ctx, one.owner)
    end
  end
  state.all = nil
end

-- How a session has ended, if it has: "expired", or "early". One that was ended early may have a successor, which asks again for what it
-- still waits for; the rest is reaped.
local function endOf(ctx, session)
  if session == ctx.session then return nil end
  local known = sessionOf(ctx, session)
  if not known or known.deadline > 0 and known.deadline <= ctx.now then return 'expired' end
  return known.deadline <= 0 and 'early' or nil
end

-- Parties of expired sessions leave before others complete the generation, as if they had been reaped in time. Answers whether one
-- of the parties belongs to a session that was ended early: it counts when its successor has asked again. It may have passed, and have
-- arrived once more, while a fail-over has undone that: a party must not count twice.
local function sweep(ctx, key, state)
  -- Mostly no session has ended, and a census is what an arrival would cost most.
  if not isAnyDue(ctx) then return false end
  local all, generation, present, unsure = census(ctx, state), state.generation, 0, false
  for index = state.from + 1, #all do
    local one = all[index]
    local ended = endOf(ctx, holderOf(one.owner))
    if ended == 'expired' then
      quit(ctx, key, state, one.owner)
      if state.generation ~= generation then return false end
    else
      unsure = unsure or ended ~= nil
      present = present + 1
      -- An arrival in excess is of a later generation.
      if present == state.parties then break end
    end
  end
  return unsure
end

local function charge(ctx, key, state, group, runner)
  state.runner, state.bound, state.token = runner.arrival, group[#group].place, nextToken(ctx)
  state.size = #group
  call('HSET', key, 'x', table.concat({ state.runner, text(state.bound), state.token, text(state.size) }, ' '))
  inform(ctx, runner.owner, state.token, chargeOf(state, group))
end

-- All have arrived: they pass, or the last of them that has an action runs it first.
local function advance(ctx, key, state)
  local steps = 0
  while not state.runner and state.arrived >= state.parties do
    if steps >= SERVED then return alarm(ctx, key, 0) end
    steps = steps + state.parties
    local unsure = sweep(ctx, key, state)
    if state.arrived < state.parties then return end
    if unsure then return expect(ctx) end
    if not passAll(ctx, key, state) then
      local group = presentOf(ctx, state)
      if #group < state.parties then return beginAgain(ctx, key, state) end
      local runner
      for _, one in ipairs(group) do
        if one.acts then runner = one end
      end
      if runner then charge(ctx, key, state, group, runner) else pass(ctx, key, state, group) end
    end
  end
end

-- barrier.join: creates the barrier, or joins it. When it is for another number of parties, `mismatch` decides: "fail",
-- unless no other session has it open; "keep" that number; or "resize" it, for the present generation too unless its action
-- runs. "firm" is as "fail", and "kept" as "keep", though only an expired session may have it open.
-- keys: hash, items
-- args: id string, parties number, mismatch string
-- reply: ["joined", generation number, epoch number, parties number, change number] | ["mismatch", parties number] | ["stale"]
handlers['barrier.join'] = function(ctx, key, id, parties, mismatch)
  parties = tonumber(parties)
  local state, member = loadBarrier(key, 'o' .. claimOf(ctx, id))
  if not state or state.members == 0 then state = newBarrier(ctx, parties, state) end
  -- A member that asks again only wants to know how the barrier is.
  local differs = not member and state.parties ~= parties and mismatch ~= 'kept'
  if differs and (mismatch == 'fail' or mismatch == 'keep') and isStale(ctx) then return STALE end
  if differs and mismatch ~= 'keep' then
    if mismatch ~= 'resize' then return reply('mismatch', state.parties) end
    state.parties, state.change = parties, tonumber(nextToken(ctx))
    advance(ctx, key, state)
    announce(ctx, key, json(progressOf(state)))
  end
  if enrol(ctx, key, id) then state.members = state.members + 1 end
  saveBarrier(ctx, key, state)
  return reply('joined', json(progressOf(state)))
end

-- barrier.arrive: arrives, once for each arrival; the last one ends the generation, or is granted to run the action first.
-- The mode is b (breaks) or w (withdraws), 1 or 0 for an action, and the epoch and the generation at the first time, if this
-- is not the first time. `parties` is for a barrier that Redis has forgotten.
-- keys: hash, items
-- args: id string, arrival string, member string, contribution string, parties number, mode string
-- reply: ["queued", ahead number] | ["granted", token string, generation number, contributions json, index number] | ["passed", generation number, contributions json, index number] | ["broken", generation number, missing number, why string, index number]
-- flags: heard
handlers['barrier.arrive'] = function(ctx, key, id, arrival, member, contribution, parties, mode)
  local state, enrolled = loadBarrier(key, 'o' .. claimOf(ctx, member))
  if not state or state.members == 0 then state = newBarrier(ctx, tonumber(parties), state) end
  local claim, known = claimOf(ctx, id), nil
  local epoch, since = match(mode, ' (%S+) (%S+)$')
  if epoch then
    local ended = verdict(key, state, arrival)
    if ended then return ended end
    local value = call('HGET', ctx.items, claim)
    if value then
      known = { owner = claim }
    else
      for _, one in ipairs(census(ctx, state)) do
        if one.arrival == arrival then known = one end
      end
    end
    -- The results of all generations since then are kept, unless there are too many: then it may have arrived in one of the others.
    local from = epoch == text(state.epoch) and tonumber(since) or state.base
    if not known and state.generation > from + RESULTS then return reply('broken', from, 0, 'unknown', 0) end
  end
  if not enrolled then
    -- Redis has lost the barrier since this member joined it.
    enrol(ctx, key, member)
    state.members = state.members + 1
    post(ctx, ctx.session, reply('changed', member, json(progressOf(state))))
  end
  if state.runner == arrival and not known then
    call('HDEL', key, 'x')
    state.runner = nil
  end
  if not known then
    if not state.runner and state.arrived + 1 >= state.parties then sweep(ctx, key, state) end
    state.last, state.arrived = state.last + 1, state.arrived + 1
  end
  if not known or known.owner ~= claim then
    -- An arrival that was made in another session keeps its place, and is this one's from now on.
    call('HSET', ctx.items, claim,
      text(known and known.place or state.last) .. ' ' .. string.sub(mode, 1, 2) .. ' ' .. arrival .. ' ' .. member .. ' '
        .. contribution)
    if known then call('HDEL', ctx.items, known.owner) elseif state.arrived == 1 then keep(ctx.items) end
    if not known and sub(mode, 2, 2) == '0' then remember(key, state, ctx.session, id, arrival, contribution) end
    state.all = nil
  end
  local answer
  if state.runner == arrival then
    answer = reply('granted', state.token, chargeOf(state, presentOf(ctx, state)))
  else
    advance(ctx, key, state)
    -- No party waits behind a complete generation, so nothing is expected.
    answer = state.arrived == 0 and reply('queued', 0) or queued(ctx, state.arrived)
  end
  saveBarrier(ctx, key, state)
  return answer
end

-- barrier.depart: a party does not wait any more, unless its generation is over, or its action has begun
-- keys: hash, items
-- args: id string, arrival string
-- reply: ["departed"] | ["acting"] | ["passed", generation number, contributions json, index number] | ["broken", generation number, missing number, why string, index number]
-- flags: allow-oom
handlers['barrier.depart'] = function(ctx, key, id, arrival)
  local state, owner = loadBarrier(key), claimOf(ctx, id)
  local value = state and call('HGET', ctx.items, owner)
  if not value then return state and verdict(key, state, arrival) or '["departed"]' end
  if state.runner and tonumber(match(value, '^%S+')) <= state.bound then return '["acting"]' end
  quit(ctx, key, state, owner)
  advance(ctx, key, state)
  saveBarrier(ctx, key, state)
  return '["departed"]'
end

-- barrier.release: the action has succeeded, and all pass; unless the generation was broken meanwhile. It is absent when so
-- much has happened since that this is not known any more.
-- keys: hash, items
-- args: arrival string
-- reply: ["passed"] | ["broken", generation number, missing number, why string, index number] | ["absent"]
-- flags: allow-oom, heard
handlers['barrier.release'] = function(ctx, key, arrival)
  local state = loadBarrier(key)
  if not state then return ABSENT end
  local released = state.runner == arrival
  if released then
    local group = presentOf(ctx, state)
    if #group == state.size then
      pass(ctx, key, state, group)
    else
      breakUp(ctx, key, state, 0, 'left')
      beginAgain(ctx, key, state)
    end
  end
  local ended = verdict(key, state, arrival)
  if released then
    advance(ctx, key, state)
    saveBarrier(ctx, key, state)
  end
  -- The party that ran the action knows the rest already.
  return ended and (find(ended, '["passed"', 1, true) and '["passed"]' or ended) or ABSENT
end

-- barrier.reset: breaks the present generation, if any party has arrived
-- keys: hash, items
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

-- barrier.state: how many have arrived, and of how many parties
-- keys: hash
-- args:
-- reply: ["state", arrived number, parties number] | ["missing"] | ["stale"]
-- flags: no-writes
handlers['barrier.state'] = function(ctx, key)
  if isStale(ctx) then return STALE end
  local state = loadBarrier(key)
  if not state or state.members == 0 then return MISSING end
  return reply('state', math.min(state.arrived, state.runner and state.size or state.parties), state.parties)
end

reapers.barrier = function(ctx, key, session, id)
  local owner = session .. '/' .. id
  local state, member = loadBarrier(key, 'o' .. owner)
  if not state then return end
  local value = call('HGET', ctx.items, owner)
  if value then
    quit(ctx, key, state, owner)
  elseif member then
    call('HDEL', key, 'o' .. owner)
    state.members = state.members - 1
    if not hasLeft(ctx, session) then state.away = 1 end
    local all = census(ctx, state)
    for index = 1, #all do
      local one = all[index]
      local _, _, _, _, joined = match(one.value, ARRIVAL)
      if joined == id and holderOf(one.owner) == session then quit(ctx, key, state, one.owner) end
    end
  else
    return
  end
  if state.members > 0 then
    advance(ctx, key, state)
  elseif state.generation > 1 and state.away == 1 then
    state.kept, state.arrived = true, 0
    call('DEL', ctx.items)
    call('HDEL', key, 'x')
    keep(key)
  end
  saveBarrier(ctx, key, state)
end

-- Goes on with generations that were too many for one call.
alarms.barrier = function(ctx, key)
  local state = loadBarrier(key)
  if not state or state.members == 0 then return end
  advance(ctx, key, state)
  saveBarrier(ctx, key, state)
end
