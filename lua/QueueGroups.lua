-- Jobs of groups: of each group only so many are in work at a time, they begin in order, and groups take turns.
--
-- after Queue.lua
-- after QueueNotes.lua
-- after QueueHandOut.lua
--
-- Jobs of groups are entries of `held`. A job that can begin is pending under "-<letter>", as returned jobs are.
--
-- `order` is a zset, with scores of 0, of the jobs of groups that are not in work: "<bytes of the name>:<name><rank><number of
-- the job, 16 digits><letter><ms of its id>,<deliveries>". So the jobs of a group stand together, in the order in which they
-- begin. The ranks:
--   0         begun before, in a group of one job at a time: no other job of the group goes ahead of it
--   1 3 5 7   begun before, of each level
--   2 4 6 8   not begun, of each level
--   9 :       delayed: not begun, and begun before
-- `turns` is a zset of groups. Groups that can begin a job come first, by the level of that job and by their turn. Groups that
-- wait for a time come behind them.
--
-- The hash:
--   g<name>    record QueueGroup
--   G          record QueueGroups
-- A group has a record while it has jobs, is paused, or its rate or a worker that asked for less haste holds it back. `begun`
-- counts the delayed jobs that have begun before, `placed` says where in `turns` the group is, and `served` counts the jobs that it has
-- begun.
-- record QueueGroup 2: waiting, active, delayed, begun, paused, tat, after, placed, served
-- record QueueGroups 1: waiting1, waiting2, waiting3, waiting4, ready1, ready2, ready3, ready4, timed, turn

local LEVEL = groups.levels
local STRICT, LATER, AGAIN, BEHIND = '0', '9', ':', ';'
-- Where a group is in `turns`: at one of the four levels, or one of these. After it was taken its place is not its own any more.
local NOWHERE, TIMED, TAKEN = 0, 5, 6
local PLACES = { 'ready1', 'ready2', 'ready3', 'ready4', 'timed' }
local IN_LEVEL = { 'waiting1', 'waiting2', 'waiting3', 'waiting4' }
-- Scores: the turns of a level are behind the turns of the level above it, and times are behind all turns.
local LEVEL_APART, TIMES = 2 ^ 49, 2 ^ 52
-- Records that only a time keeps are dropped after full minutes, so that the alarm does not ring for each of them.
local A_MINUTE = 60000

-- -----------------------------------------------------------------------------
-- State
-- -----------------------------------------------------------------------------

local function totalsOf(queue)
  local totals = queue.totals
  if not totals then
    local found = call('HMGET', queue.key, 'G', 'm')
    totals = found[1] and unpackQueueGroups(found[1]) or {
      waiting1 = 0, waiting2 = 0, waiting3 = 0, waiting4 = 0, ready1 = 0, ready2 = 0, ready3 = 0, ready4 = 0, timed = 0,
      turn = 0
    }
    queue.totals = totals
    queue.policy = queue.policy or found[2] and unpackQueuePolicy(found[2])
  end
  return totals
end

local function rulesOf(queue)
  queue.policy = queue.policy or policyOf(queue)
  return queue.policy
end

local function readGroup(queue, name)
  local packed = call('HGET', queue.key, 'g' .. name)
  return packed and unpackQueueGroup(packed)
end

-- A group that is about to change.
local function changing(queue, name)
  queue.states = queue.states or {}
  local group = queue.states[name]
  if not group then
    totalsOf(queue)
    group = readGroup(queue, name)
    if not group then
      group = { waiting = 0, active = 0, delayed = 0, begun = 0, paused = 0, tat = 0, after = 0, placed = NOWHERE, served = 0 }
      queue.grouped = queue.grouped + 1
    end
    group.name = name
    queue.states[name] = group
  end
  if not group.touched then
    group.touched = true
    queue.touched = queue.touched or {}
    queue.touched[#queue.touched + 1] = group
  end
  return group
end

local function groupOfJob(queue, fields)
  return changing(queue, fieldOf(fields, 'g'))
end

-- Jobs of groups that can begin, as far as their groups let them; of one level, or of all.
groups.waiting = function(queue, level)
  if queue.grouped == 0 then return 0 end
  local totals = totalsOf(queue)
  if level then return totals[IN_LEVEL[level]] end
  return totals.waiting1 + totals.waiting2 + totals.waiting3 + totals.waiting4
end

-- How many jobs can begin now, about.
groups.ready = function(queue)
  local totals = totalsOf(queue)
  local ready = totals.ready1 + totals.ready2 + totals.ready3 + totals.ready4
  return math.min(groups.waiting(queue), ready * rulesOf(queue).grouplimit)
end


-- -----------------------------------------------------------------------------
-- Order
-- -----------------------------------------------------------------------------

local function prefixOf(name)
  return text(#name) .. ':' .. name
end

local function memberOf(name, rank, letter, id, count)
  local ms, number = match(id, '^(%d+)%-(%d+)$')
  return prefixOf(name) .. rank .. sub('000000000000000' .. number, -16) .. letter .. ms .. ',' .. text(count)
end

-- The job that a member of `order` stands for.
local function orderedJob(member)
  local size, rest = match(member, '^(%d+):(.*)$')
  local rank, number, letter, ms, count = match(sub(rest, size + 1), '^(.)(%d+)(%a)(%d+),(%d+)$')
  return {
    member = member, group = sub(rest, 1, size), rank = rank, letter = letter, id = ms .. '-' .. text(tonumber(number)),
    count = tonumber(count)
  }
end

-- The first job of a group that waits, from a rank on.
local function firstFrom(queue, group, rank)
  local prefix = prefixOf(group.name)
  local found = call('ZRANGEBYLEX', queue.order, '[' .. prefix .. rank, '(' .. prefix .. LATER, 'LIMIT', 0, 1)[1]
  return found and orderedJob(found)
end

-- The first job of a group that has one waiting. It is known until the order of the group changes.
local function headOf(queue, group)
  group.head = group.head or firstFrom(queue, group, '')
  return group.head
end

local function numberOfJob(job)
  return tonumber(match(job.id, '%d+$'))
end

-- The job that a group with a waiting job begins next: one of TURNS is the oldest of the levels below that of its first job. A job that
-- has begun before in a strict group stays ahead of all.
local function nextOf(queue, group)
  local head = headOf(queue, group)
  if group.served % TURNS ~= TURNS - 1 or group.waiting == 1 or head.rank == STRICT then return head end
  local oldest
  local lower = firstFrom(queue, group, 2 * LEVEL[head.letter] + 1)
  while lower do
    if not oldest or numberOfJob(lower) < numberOfJob(oldest) then oldest = lower end
    lower = firstFrom(queue, group, 2 * LEVEL[lower.letter] + 1)
  end
  return oldest or head
end

local function countWaiting(queue, group, letter, change)
  local totals, field = totalsOf(queue), IN_LEVEL[LEVEL[letter]]
  group.waiting, totals[field] = group.waiting + change, totals[field] + change
end

-- A job of a group can begin, as far as its group lets it.
local function enqueue(queue, group, letter, id, count, begun)
  local rank = text(2 * LEVEL[letter])
  if begun then rank = rulesOf(queue).grouplimit == 1 and STRICT or text(2 * LEVEL[letter] - 1) end
  local member = memberOf(group.name, rank, letter, id, count)
  call('ZADD', queue.order, 0, member)
  group.head = group.waiting == 0 and { member = member, rank = rank, letter = letter, id = id, count = count } or nil
  -- Behind others of its level it does not change where its group belongs.
  if rank == STRICT or LEVEL[letter] < group.placed then group.moved = true end
  countWaiting(queue, group, letter, 1)
end

-- A job that was waiting is not any more. Answers whether it has begun before.
local function dequeue(queue, group, letter, id, count)
  group.head, group.moved = nil, true
  countWaiting(queue, group, letter, -1)
  if call('ZREM', queue.order, memberOf(group.name, 2 * LEVEL[letter], letter, id, count)) == 1 then return false end
  call('ZREM', queue.order, memberOf(group.name, STRICT, letter, id, count),
    memberOf(group.name, 2 * LEVEL[letter] - 1, letter, id, count))
  return true
end

-- A job of a group cannot begin for a while.
local function delayInGroup(queue, group, letter, id, count, begun)
  group.delayed, group.begun = group.delayed + 1, group.begun + (begun and 1 or 0)
  call('ZADD', queue.order, 0, memberOf(group.name, begun and AGAIN or LATER, letter, id, count))
end

-- The delay of a job is over, or does not matter any more. Answers whether the job has begun before.
local function endDelay(queue, group, letter, id, count)
  group.delayed = group.delayed - 1
  if call('ZREM', queue.order, memberOf(group.name, LATER, letter, id, count)) == 1 then return false end
  call('ZREM', queue.order, memberOf(group.name, AGAIN, letter, id, count))
  group.begun = group.begun - 1
  return true
end

-- -----------------------------------------------------------------------------
-- Turns
-- -----------------------------------------------------------------------------

local function canBegin(queue, group)
  if group.waiting == 0 or group.paused == 1 then return false end
  local limit = rulesOf(queue).grouplimit
  -- Of a strict group, a job that waits for its next attempt stands in the way of all others.
  return group.active + (limit == 1 and group.begun or 0) < limit
end

-- When the next job of a group can begin.
local function freeFrom(ctx, queue, group)
  local rules = rulesOf(queue)
  if rules.groupspacing == 0 then return group.after end
  -- It is later only when the rate was lower before, or the clock goes back.
  group.tat = math.min(group.tat, ctx.now + rules.groupburst)
  return math.max(group.after, math.ceil(group.tat + rules.groupspacing - rules.groupburst - 1e-6))
end

-- Puts a group where it belongs in `turns` now.
local function placeGroup(ctx, queue, group)
  local totals, at, time = totalsOf(queue), NOWHERE, nil
  group.touched, group.over = false, false
  if canBegin(queue, group) then
    time = freeFrom(ctx, queue, group)
    if time > ctx.now then
      at = TIMED
    elseif IN_LEVEL[group.placed] and not group.moved then
      at = group.placed
    else
      at = LEVEL[headOf(queue, group).letter]
    end
  elseif group.waiting + group.active + group.delayed + group.paused == 0 then
    local till = math.max(group.after, group.tat)
    group.over = till <= ctx.now
    if not group.over then at, time = TIMED, math.ceil(till / A_MINUTE) * A_MINUTE end
  end
  if at == TIMED then
    call('ZADD', queue.turns, text(TIMES + time), group.name)
    soonerDue(ctx, queue, time)
  elseif at == NOWHERE and group.placed ~= NOWHERE then
    call('ZREM', queue.turns, group.name)
  elseif at ~= group.placed then
    totals.turn = totals.turn + 1
    call('ZADD', queue.turns, text(at * LEVEL_APART + totals.turn), group.name)
  end
  local before, after = PLACES[group.placed], PLACES[at]
  if before then totals[before] = totals[before] - 1 end
  if after then totals[after] = totals[after] + 1 end
  group.placed, group.moved = at, false
end

groups.place = function(ctx, queue)
  local touched = queue.touched or {}
  queue.touched = nil
  for _, group in ipairs(touched) do placeGroup(ctx, queue, group) end
end

-- Writes the groups that have changed, once for all requests of a call, or again when the end of the call has changed some: those that
-- are written are read anew then, or a group that is gone would be counted as gone twice.
groups.finish = function(ctx, queue)
  if not queue.states then return end
  groups.place(ctx, queue)
  local kept, gone = {}, {}
  for name, group in pairs(queue.states) do
    if group.over then
      gone[#gone + 1], queue.grouped = 'g' .. name, queue.grouped - 1
    else
      kept[#kept + 1], kept[#kept + 2] = 'g' .. name, packQueueGroup(group)
    end
  end
  queue.states = nil
  local last = queue.grouped == 0 and gone or kept
  last[#last + 1] = 'G'
  if queue.grouped > 0 then last[#last + 1] = packQueueGroups(queue.totals) end
  for from = 1, #kept, 1000 do call('HSET', queue.key, unpack(kept, from, math.min(from + 999, #kept))) end
  for from = 1, #gone, 1000 do call('HDEL', queue.key, unpack(gone, from, math.min(from + 999, #gone))) end
end

-- Places the groups whose time has come.
groups.ring = function(ctx, queue)
  groups.place(ctx, queue)
  if totalsOf(queue).timed == 0 then return end
  for _, name in ipairs(call('ZRANGEBYSCORE', queue.turns, text(TIMES), text(TIMES + ctx.now), 'LIMIT', 0, MOVED)) do
    changing(queue, name)
  end
  groups.place(ctx, queue)
  local after = call('ZRANGEBYSCORE', queue.turns, text(TIMES), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
  if after then soonerDue(ctx, queue, tonumber(after) - TIMES) end
end

-- For how many ms groups are held back, by a rate or by a worker that has slowed one down.
groups.heldFor = function(ctx, queue)
  local timed, burst = totalsOf(queue).timed, rulesOf(queue).groupburst
  if timed == 0 then return 0 end
  local last = call('ZRANGEBYSCORE', queue.turns, text(TIMES), '+inf', 'WITHSCORES', 'LIMIT', timed - 1, 1)
  local group = last[1] and readGroup(queue, last[1])
  return group and group.after > ctx.now and math.max(burst, tonumber(last[2]) - TIMES - ctx.now) or burst
end

-- Whether other limits may let groups begin jobs sooner.
extend.haveChanged = function(before, after)
  return before.grouplimit ~= after.grouplimit or before.groupspacing ~= after.groupspacing
    or before.groupburst ~= after.groupburst
end

-- Places a group that may be able to begin a job, and has no turn.
groups.sweep = function(queue, name, packed)
  local group = unpackQueueGroup(packed)
  if group and not IN_LEVEL[group.placed] and canBegin(queue, group) then changing(queue, name) end
end

-- -----------------------------------------------------------------------------
-- Hand out
-- -----------------------------------------------------------------------------

-- Each of these groups begins a job, if it can. Answers these jobs, and their groups.
local function beginHeads(ctx, queue, names)
  local begun, spacing = {}, rulesOf(queue).groupspacing
  for _, name in ipairs(names) do
    local group = changing(queue, name)
    -- The limits may have changed since it was placed.
    if canBegin(queue, group) and freeFrom(ctx, queue, group) <= ctx.now then
      local job = nextOf(queue, group)
      call('ZREM', queue.order, job.member)
      group.head = nil
      countWaiting(queue, group, job.letter, -1)
      group.active, group.served = group.active + 1, group.served + 1
      begun[#begun + 1] = { job, group, group.tat }
      if spacing > 0 then group.tat = math.max(group.tat, ctx.now) + spacing end
      local place = PLACES[group.placed]
      totalsOf(queue)[place] = totalsOf(queue)[place] - 1
      group.placed = TAKEN
    end
  end
  return begun
end

-- Takes up to so many jobs of the groups of a level for a worker, one of each group in turn.
local function takeOfGroups(ctx, queue, level, claim, count, items)
  local lowest, behind, taken = text(level * LEVEL_APART), '(' .. text((level + 1) * LEVEL_APART), 0
  while taken < count do
    local names = call('ZRANGEBYSCORE', queue.turns, lowest, behind, 'LIMIT', 0, count - taken)
    if #names == 0 then return taken end
    for _, begun in ipairs(beginHeads(ctx, queue, names)) do
      local job, group = begun[1], begun[2]
      local entries = call('XCLAIM', queue.U, JOBS, consumerOf(job.letter, claim), 0, job.id)
      local fields = entries[1] and entries[1][2]
      local notes = fields and notesOf(queue, job.letter, entries)
      if notes then reviseFields(fields, notes[1], notes[3]) end
      if not fields or expireJob(ctx, queue, job.letter, job.id, fields) then
        group.active, group.tat, group.served = group.active - 1, begun[3], group.served - 1
      else
        items[#items + 1] = describedJob(job.letter, job.id, text(job.count + 1), fields)
      end
    end
    groups.place(ctx, queue)
    taken = taken + #names
  end
  return taken
end

-- The number of the job that begins next among the groups of a level.
local function numberInTurn(queue, level)
  local name = call('ZRANGEBYSCORE', queue.turns, text(level * LEVEL_APART), '+inf', 'LIMIT', 0, 1)[1]
  return name and numberOfJob(nextOf(queue, changing(queue, name))) or 0
end

-- As `takeJobs`. The groups of a level and its other jobs take turns.
groups.take = function(ctx, queue, claim, count)
  local totals, sources, items = totalsOf(queue), {}, {}
  local function take(source, some, aged)
    if source < 0 then return takeOfGroups(ctx, queue, -source, claim, some, items) end
    some = math.min(some, queue[FIELD[source]])
    takeInto(ctx, queue, source, claim, some, items, aged)
    return some
  end
  for source = 1, #FIELD do
    if queue[FIELD[source]] > 0 then sources[#sources + 1] = source end
    if source % 3 == 0 and totals[PLACES[source / 3]] > 0 then sources[#sources + 1] = -source / 3 end
  end
  local first, others, turn = sources[1], {}, queue.served % TURNS
  -- The groups of the first level have their half of the other turns.
  for index = 2, #sources do
    if sources[index] ~= -math.ceil(first / 3) then others[#others + 1] = sources[index] end
  end
  if first > 0 and hidesOlder(queue, first) then others[#others + 1] = first end
  if #sources == 1 and #others == 0 then
    take(first, count)
  elseif turn == TURNS - 1 and #others > 0 then
    take(
      eldest(others, function(source)
        return source < 0 and numberInTurn(queue, -source) or oldestIn(queue, source)
      end),
      1, true
    )
    queue.served = queue.served + 1
  else
    local some, level = math.min(count, math.max(1, TURNS - 1 - turn)), math.ceil(first / 3)
    local shared = first > 0 and totals[PLACES[level]] > 0
    local theirs = shared and floor((some + queue.served % 2) / 2) or 0
    local taken = theirs > 0 and take(-level, theirs) or 0
    if some > theirs then taken = taken + take(first, some - theirs) end
    queue.served = queue.served + taken
  end
  return items
end

-- -----------------------------------------------------------------------------
-- What becomes of jobs
-- -----------------------------------------------------------------------------

groups.offered = function(queue, letter, id, name, later)
  local group = changing(queue, name)
  if not later then return enqueue(queue, group, letter, id, 0, false) end
  delayInGroup(queue, group, letter, id, 0, false)
end

-- Jobs in work are about to be removed.
groups.done = function(queue, letter, ids)
  for _, id in ipairs(ids) do
    local fields = entryAt(queue[letter], id)
    if fields then
      local group = groupOfJob(queue, fields)
      group.active = group.active - 1
    end
  end
end

-- Jobs in work are given back, and go ahead of jobs that have not begun.
groups.returned = function(queue, letter, ids, count)
  for _, id in ipairs(ids) do
    local fields = entryAt(queue[letter], id)
    if fields then
      local group = groupOfJob(queue, fields)
      group.active = group.active - 1
      enqueue(queue, group, letter, id, count, true)
    end
  end
end

-- A job in work is given back, to be handed out again later.
groups.postponed = function(queue, letter, id, count)
  local fields = entryAt(queue[letter], id)
  if not fields then return end
  local group = groupOfJob(queue, fields)
  group.active = group.active - 1
  delayInGroup(queue, group, letter, id, count, true)
end

-- A job that waits begins later.
groups.rescheduled = function(queue, letter, id)
  local fields, _, count = jobAt(queue, letter, id)
  local group = groupOfJob(queue, fields)
  delayInGroup(queue, group, letter, id, count, dequeue(queue, group, letter, id, count))
end

-- The delays of jobs are over.
groups.due = function(queue, letter, ids)
  for _, id in ipairs(ids) do
    local fields, _, count = jobAt(queue, letter, id)
    if fields then
      local group = groupOfJob(queue, fields)
      enqueue(queue, group, letter, id, count, endDelay(queue, group, letter, id, count))
    end
  end
end

-- A job that is not in work is removed.
groups.cancelled = function(queue, letter, id, fields, holder, count)
  local group = groupOfJob(queue, fields)
  if holder == DELAYED then
    endDelay(queue, group, letter, id, count)
  else
    dequeue(queue, group, letter, id, count)
  end
end

-- A cancelled job of a group is not in work any more.
groups.freed = function(queue, name)
  local group = changing(queue, name)
  group.active = group.active - 1
end

local function purgeInGroup(ctx, queue, job, outcome)
  local group = changing(queue, job.group)
  if job.rank == LATER or job.rank == AGAIN then
    call('ZREM', queue.delays, job.letter .. job.id)
    queue.delayed, group.delayed = queue.delayed - 1, group.delayed - 1
    if job.rank == AGAIN then group.begun = group.begun - 1 end
  else
    group.head, group.moved = nil, true
    countWaiting(queue, group, job.letter, -1)
  end
  extend.remove(ctx, queue, job.letter, job.id, entryAt(queue.U, job.id), outcome)
end

-- Removes jobs that are not in work, or only waiting jobs: `most` jobs, or `wanted` of the `most` that it reads. Answers how many
-- it has removed, how many it has read, and the last member that it has read.
groups.purge = function(ctx, queue, from, to, most, waiting, outcome, wanted)
  local members, count = call('ZRANGEBYLEX', queue.order, from, to, 'LIMIT', 0, most), 0
  for _, member in ipairs(members) do
    local job = orderedJob(member)
    local fits = count < (wanted or most) and (not waiting or job.rank ~= LATER and job.rank ~= AGAIN)
    -- The removal of a job before it may have ended the delay of this job, and so moved it.
    if fits and call('ZREM', queue.order, member) == 1 then
      purgeInGroup(ctx, queue, job, outcome or '["cancelled"]')
      count = count + 1
    end
  end
  return count, #members, members[#members]
end

-- Adds up to so many jobs that wait, behind a member of the order. Answers the place behind which there are more.
groups.list = function(queue, behind, most, items, add)
  local members = call('ZRANGEBYLEX', queue.order, behind and '(' .. behind or '-', '+', 'LIMIT', 0, most)
  for _, member in ipairs(members) do
    local job = orderedJob(member)
    if job.rank ~= LATER and job.rank ~= AGAIN then
      add(queue, items, 'g' .. member, '0', job.letter, job.id, text(job.count), entryAt(queue.U, job.id))
    end
  end
  return #members == most and 'g' .. members[most] or ''
end
