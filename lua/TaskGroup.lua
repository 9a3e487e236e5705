-- A group of tasks: workers register shards of a job and submit their results, and waiters wait for all of them.
--
-- kinds: taskGroup: hash, items
--
-- A resource is two hashes. They stay while a session has it open, and for `timeToLive` ms afterwards if any shard was
-- registered:
--   s                  record TaskGroup
--   run                the run that the state belongs to; empty for none
--   reset              the last reset
--   identity           see `dropForgottenMembers`
--   o<session>/<id>    a member; it hears of every change, in order: each has the version after the one before it
-- and its items, apart, so that neither a change nor a reset has to go through the shards:
--   t<shard>           "<status> <token> <session>/<id>"; the status is running, done, failed or lost
--   v<shard>           what was submitted, as JSON
--   i<place>           a shard; places are given in the order of the first registrations
--   w<session>/<id>    the shard of a running worker
-- A token is that of a registration. Only the worker with the newest one can submit, and only while its registration is
-- neither lost nor over. `least` is how many shards there were before Redis forgot some of them.
-- record TaskGroup 2: expected, least, running, done, failed, lost, round, version, timeToLive, members, decided

-- Of one answer: more are asked for.
local PAGE_PLACES, PAGE_BYTES = 256, 131072

local function loadTasks(key)
  local found = call('HMGET', key, 's', 'run')
  local group = found[1] and unpackTaskGroup(found[1])
  if group then group.run = found[2] or '' end
  return group
end

local function saveTasks(key, group)
  call('HSET', key, 's', packTaskGroup(group))
  if group.run ~= '' then call('HSET', key, 'run', group.run) end
end

local function knownTasks(group)
  return group.running + group.done + group.failed + group.lost
end

-- The state of a group as replies and events tell it, and what else they tell.
local function tasksState(group, ...)
  return group.expected, group.least, group.running, group.done, group.failed, group.lost, group.round, group.version, group.run, ...
end

local function changeTasks(ctx, key, group, ...)
  group.version = group.version + 1
  saveTasks(key, group)
  announce(ctx, key, tasksState(group, ...))
end

local function findTask(ctx, shard)
  local found = call('HGET', ctx.items, 't' .. shard)
  if found then return match(found, '^(%l+) (%d+) (.*)$') end
end

-- Gives a shard another status, and tells every member. `from` is nil for a shard that was not known.
local function moveTask(ctx, key, group, shard, from, to, token, claim)
  if from then
    group[from] = group[from] - 1
  else
    call('HSET', ctx.items, 'i' .. text(knownTasks(group) + 1), shard)
  end
  group[to] = group[to] + 1
  call('HSET', ctx.items, 't' .. shard, to .. ' ' .. token .. ' ' .. claim)
  changeTasks(ctx, key, group, shard, to)
end

local function loseTask(ctx, key, group, shard, token, claim)
  call('HDEL', ctx.items, 'w' .. claim)
  moveTask(ctx, key, group, shard, 'running', 'lost', token, claim)
end

-- Members learn from the number of the round that registrations of former rounds are over.
local function beginRound(ctx, key, group, round)
  call('DEL', ctx.items)
  group.least, group.running, group.done, group.failed, group.lost, group.round = 0, 0, 0, 0, 0, round
  changeTasks(ctx, key, group)
end

-- Whether the group belongs to another run than the member that asks.
local function isRunOver(group, run)
  return run ~= '' and run ~= group.run
end

local function leaveTasks(ctx, key, session, id)
  local group = loadTasks(key)
  if not group then return end
  local claim = session .. '/' .. id
  if call('HDEL', key, 'o' .. claim) == 1 then
    group.members = group.members - 1
    if group.members == 0 and knownTasks(group) == 0 then
      call('DEL', key, ctx.items)
      return
    end
    saveTasks(key, group)
    if group.members == 0 then
      local left = leftOf(ctx, session, group.timeToLive)
      call('PEXPIRE', key, left)
      call('PEXPIRE', ctx.items, left)
    end
    return
  end
  local shard = call('HGET', ctx.items, 'w' .. claim)
  if not shard then return end
  local _, token = findTask(ctx, shard)
  loseTask(ctx, key, group, shard, token, claim)
end

-- A member of a former session joins again, and tells how the group was, and of which run: Redis may have forgotten it.
local function rejoinTasks(ctx, key, group, shards, run, round, known)
  if round > group.round then
    if isRunOver(group, run) then
      group.run, group.expected = run, shards
    end
    beginRound(ctx, key, group, round)
  elseif round == group.round and group.run == '' then
    group.run = run
  end
  if round == group.round and not isRunOver(group, run) and known > knownTasks(group) then
    group.least = math.max(group.least, known)
  end
end

local function dropForgottenTasks(ctx, key, group)
  local members = dropForgottenMembers(ctx, key)
  if not members then return end
  group.members = group.members - members
  saveTasks(key, group)
  for _, field in ipairs(call('HKEYS', ctx.items)) do
    local claim = match(field, '^w(.*)$')
    if claim and not sessionOf(ctx, holderOf(claim)) then
      local shard = call('HGET', ctx.items, field)
      local _, token = findTask(ctx, shard)
      loseTask(ctx, key, group, shard, token, claim)
    end
  end
end

-- taskGroup.join: creates the group, or joins it. With another run than that of the group, or `fresh` while no member is
-- alive, it begins anew. With another number of shards, `mismatch` decides: "fail", unless no other member is alive;
-- "keep" that number; or "resize". `anyway` is not to mind that an expired session may stand in the way. A member that
-- joins again, in another session, tells the round, and how many of its shards it knew. The last member decides about
-- `timeToLive`: `decided` is 0 for one that does so now, and the number that it was answered for one that did so before. Asked again,
-- a member hears the state through its mailbox, behind the changes that are there already; the reply has version 0 then.
-- keys: hash, items
-- args: id string, shards number, mismatch string, timeToLive number, decided number, run string, fresh boolean, anyway boolean, round number, known number
-- reply: ["joined", expected number, least number, running number, done number, failed number, lost number, round number, version number, run string, decided number] | ["mismatch", expected number] | ["stale"]
handlers['taskGroup.join'] = function(ctx, key, id, shards, mismatch, timeToLive, decided, run, fresh, anyway, round, known)
  shards, decided, round, known = tonumber(shards), tonumber(decided), tonumber(round), tonumber(known)
  local group = loadTasks(key)
  if group and call('HGET', key, 'o' .. claimOf(ctx, id)) then
    post(ctx, ctx.session, reply('changed', id, tasksState(group)))
    return reply('joined', 0, 0, 0, 0, 0, 0, 0, 0, '', group.decided)
  end
  if not group then
    group = {
      expected = shards, least = 0, running = 0, done = 0, failed = 0, lost = 0, round = math.max(1, round),
      version = tonumber(nextToken(ctx)), members = 0, decided = 0, run = run
    }
  end
  dropForgottenTasks(ctx, key, group)
  local first, others = round == 0, group.members > 0
  local anew = first and (isRunOver(group, run) or fresh == '1' and not others)
  local differs = not anew and shards > 0 and group.expected > 0 and shards ~= group.expected
  local refused = differs and others and mismatch == 'fail'
  -- Had the members that died been reaped in time, the group might be gone, or free.
  if others and (first or refused) and anyway == '' and isStale(ctx) then return STALE end
  if refused then return reply('mismatch', group.expected) end
  if decided == 0 then decided = math.max(group.decided + 1, ctx.now) end
  if decided > group.decided then group.timeToLive, group.decided = tonumber(timeToLive), decided end
  if anew then
    if run ~= '' then group.run = run end
    group.expected = shards
    -- What was just created is new.
    if others or knownTasks(group) > 0 then beginRound(ctx, key, group, group.round + 1) end
  elseif shards > 0 and (group.expected == 0 or differs and mismatch ~= 'keep') then
    group.expected = shards
    changeTasks(ctx, key, group)
  end
  if not first then rejoinTasks(ctx, key, group, shards, run, round, known) end
  if enrol(ctx, key, id, group.timeToLive) then group.members = group.members + 1 end
  saveTasks(key, group)
  return reply('joined', tasksState(group, group.decided))
end

-- taskGroup.register: makes the session the worker of a shard that no living worker has, and that is not done. `again` asks
-- whether an earlier registration under the same id is still valid, and registers nothing.
-- keys: hash, items
-- args: id string, shard string, run string, again boolean
-- reply: ["granted", token string, round number] | ["taken"] | ["done", value json] | ["missing"] | ["ended", run string] | ["absent"]
handlers['taskGroup.register'] = function(ctx, key, id, shard, run, again)
  local group = loadTasks(key)
  if not group or group.members == 0 then return MISSING end
  local claim = claimOf(ctx, id)
  local status, token, owner = findTask(ctx, shard)
  if status == 'running' and owner == claim then return reply('granted', token, group.round) end
  if again == '1' then return ABSENT end
  if isRunOver(group, run) then return reply('ended', group.run) end
  if status == 'done' then return reply('done', json(call('HGET', ctx.items, 'v' .. shard))) end
  if status == 'running' then
    if isAlive(ctx, holderOf(owner)) then return '["taken"]' end
    loseTask(ctx, key, group, shard, token, owner)
    status = 'lost'
  end
  if status == 'failed' then call('HDEL', ctx.items, 'v' .. shard) end
  token = nextToken(ctx)
  call('HSET', ctx.items, 'w' .. claim, shard)
  own(ctx, key, id, group.timeToLive)
  moveTask(ctx, key, group, shard, status, 'running', token, claim)
  return reply('granted', token, group.round)
end

-- taskGroup.submit: ends a registration with a result, or an error; the same again changes nothing, and what follows it was executed with
-- the first one
-- keys: hash, items
-- args: shard string, token string, fine boolean, value string
-- reply: ["submitted"] | ["repeated"] | ["refused"]
-- flags: allow-oom
handlers['taskGroup.submit'] = function(ctx, key, shard, token, fine, value)
  local group = loadTasks(key)
  local status, newest, claim = findTask(ctx, shard)
  if not group or newest ~= token or status == 'lost' then return '["refused"]' end
  if status == 'running' then
    if not isAlive(ctx, holderOf(claim)) then return '["refused"]' end
    call('HDEL', ctx.items, 'w' .. claim)
    call('HSET', ctx.items, 'v' .. shard, value)
    moveTask(ctx, key, group, shard, 'running', fine ~= '' and 'done' or 'failed', token, claim)
    return '["submitted"]'
  end
  local same = (status == 'done') == (fine ~= '') and call('HGET', ctx.items, 'v' .. shard) == value
  return same and '["repeated"]' or '["refused"]'
end

-- taskGroup.restore: says again how a registration has ended, if Redis has forgotten it
-- keys: hash, items
-- args: shard string, status string, token string, value string, round number, run string
-- reply: ["restored"] | ["refused"] | ["missing"]
handlers['taskGroup.restore'] = function(ctx, key, shard, status, token, value, round, run)
  local group = loadTasks(key)
  if not group or group.members == 0 then return MISSING end
  if tonumber(round) ~= group.round or isRunOver(group, run) then return '["refused"]' end
  local from, newest, claim = findTask(ctx, shard)
  if from then
    local order = tonumber(newest) - tonumber(token)
    -- That it is lost is for the reaper to say; that it was submitted was acknowledged.
    if from == 'done' or order > 0 or order == 0 and (from == 'failed' or status == 'lost') then return '["refused"]' end
    if from == 'running' then call('HDEL', ctx.items, 'w' .. claim) end
  end
  if value ~= '' then call('HSET', ctx.items, 'v' .. shard, value) end
  moveTask(ctx, key, group, shard, from, status, token, claimOf(ctx, ''))
  keep(ctx.items, group.timeToLive)
  return '["restored"]'
end

-- taskGroup.reset: ends the round with everything in it, once for each reset
-- keys: hash, items
-- args: reset string, run string
-- reply: ["reset"] | ["missing"] | ["ended", run string]
handlers['taskGroup.reset'] = function(ctx, key, reset, run)
  local group = loadTasks(key)
  if not group or group.members == 0 then return MISSING end
  if isRunOver(group, run) then return reply('ended', group.run) end
  if call('HGET', key, 'reset') ~= reset then
    call('HSET', key, 'reset', reset)
    beginRound(ctx, key, group, group.round + 1)
  end
  return '["reset"]'
end

-- taskGroup.read: the state, and those of the shards from a place on that have one of the wanted statuses, each with its
-- status and what was submitted, and with its worker if all are wanted; next is 0 at the end
-- keys: hash, items
-- args: from number, wanted string
-- reply: ["page", expected number, least number, running number, done number, failed number, lost number, round number, version number, run string, next number, shards json] | ["missing"] | ["stale"]
-- flags: no-writes
handlers['taskGroup.read'] = function(ctx, key, from, wanted)
  if isStale(ctx) then return STALE end
  local group = loadTasks(key)
  if not group then return MISSING end
  local place, last, bytes, shards = tonumber(from), 0, 0, {}
  local all = find(wanted, 'running', 1, true)
  if wanted ~= '' then last = math.min(knownTasks(group), place + PAGE_PLACES - 1) end
  while place <= last and bytes < PAGE_BYTES do
    local shard = call('HGET', ctx.items, 'i' .. text(place))
    local status, _, claim = findTask(ctx, shard)
    if find(wanted, status, 1, true) then
      local value = (status == 'done' or status == 'failed') and call('HGET', ctx.items, 'v' .. shard) or 'null'
      bytes = bytes + #value + #shard
      shards[#shards + 1] = list({ shard, status, json(value), all and aboutOf(ctx, claim) or json('null') })
    end
    place = place + 1
  end
  if wanted == '' or place > knownTasks(group) then place = 0 end
  return reply('page', tasksState(group, place, list(shards)))
end

reapers.taskGroup = leaveTasks
