-- The length of a queue: how many jobs may wait, delayed jobs included, and what a full queue does with offers.
--
-- after Queue.lua
-- after QueueNotes.lua
-- after QueueHandOut.lua
-- after QueueOffers.lua
--
-- `overflow` of the record says it: an offer waits, fails, or is stored in the place of the oldest job of the lowest level.
-- Members whose jobs wait stand in a line, in the field `f`: their claims. `queued` counts them, and `told` is 1 when the first
-- member was told of room. While there is a line, only the first member stores anything; then it goes to the end.
-- Blocked jobs take no room. They are stored whatever the length, as are jobs that would be blocked, had the jobs before them not ended:
-- `apart` counts those of a call for which there was no room, or that took none.
-- `offered` counts the other jobs that offers have stored in a call. No more than these make others go: jobs that are returned, replayed
-- or unblocked wait beyond the length. A lower length than before makes all go that are beyond it, over several calls.

local WAIT, DROP = 0, 2
-- Of one call.
local MOST_DROPPED = 1024
-- Members of `delayed` that are not delayed jobs of no group, and that it passes over.
local MOST_OTHERS = 1024

local function lengthOf(queue)
  return queue.delayed + waitingIn(queue)
end

local function lineOf(queue)
  local line = queue.line
  if not line then
    line = queue.queued > 0 and wordsIn(queue.key, 'f') or {}
    queue.line = line
  end
  return line
end

local function setLine(queue, line, first)
  if line[1] ~= first then queue.told = 0 end
  queue.queued = #line
  if #line > 0 then call('HSET', queue.key, 'f', concat(line, ' ')) else call('HDEL', queue.key, 'f') end
end

-- How many jobs more may be stored. Workers that wait take what there is first.
extend.room = function(ctx, queue, claim)
  if queue.overflow == DROP then return math.huge end
  if queue.queued > 0 and lineOf(queue)[1] ~= claim then return 0 end
  if lengthOf(queue) >= queue.length and queue.workers > 0 then dispatchJobs(ctx, queue) end
  return math.max(0, queue.length - lengthOf(queue))
end

extend.refusal = function(queue, place)
  return '[' .. text(place) .. (queue.overflow == WAIT and ',2]' or ',0]')
end

-- A member leaves the line.
extend.depart = function(queue, claim)
  local line = lineOf(queue)
  local first = line[1]
  for at = #line, 1, -1 do
    if line[at] == claim then table.remove(line, at) end
  end
  setLine(queue, line, first)
end

-- Removes jobs that no worker has. Without `delayed`, jobs that were rescheduled are delayed from now on. Answers how many it has
-- removed.
local function removeEntries(ctx, queue, letter, entries, delayed, outcome)
  local count = 0
  for _, entry in ipairs(entries) do
    local id, job = entry[1], letter .. entry[1]
    local due = not delayed and tonumber(noteOf(queue, 'd' .. job) or 0) or 0
    if due > ctx.now then
      unsetNote(queue, 'd' .. job)
      delayJob(ctx, queue, letter, id, due, 0)
    else
      extend.remove(ctx, queue, letter, id, entry[2], outcome)
      count = count + 1
    end
  end
  return count
end

-- Of a source: up to so many that it reads.
local function removeWaiting(ctx, queue, source, most, delayed, outcome)
  local some = math.min(queue[FIELD[source]], most)
  if some <= 0 then return 0 end
  -- No worker has a claim of this name.
  local entries, _, letter = takeSource(queue, source, '/', some, true)
  return removeEntries(ctx, queue, letter, entries, delayed, outcome)
end

-- Of deques: the same.
local function removeStored(ctx, queue, most, delayed, outcome)
  if queue.stored == 0 or most <= 0 then return 0 end
  return removeEntries(ctx, queue, 'N', extend.takeStored(queue, most), delayed, outcome)
end

-- Removes up to so many delayed jobs of no group, those first that are due first. Answers how many.
local function removeDelayed(ctx, queue, most, outcome)
  local count, others = 0, 0
  while count < most and others < MOST_OTHERS do
    local some = math.min(most - count + others, MOVED)
    local found = call('ZRANGEBYSCORE', queue.delays, 0, '+inf', 'LIMIT', others, some)
    for _, job in ipairs(found) do
      local letter, id = split(job)
      if not letter or groups.levels[letter] then
        -- A schedule, or a job of a group.
        others = others + 1
      elseif count < most and call('ZREM', queue.delays, job) == 1 then
        -- A removal before may have ended the delay of a job that was kept behind another.
        queue.delayed, count = queue.delayed - 1, count + 1
        extend.remove(ctx, queue, letter, id, entryAt(queue[letter], id), outcome)
      end
    end
    if #found < some then break end
  end
  return count
end

-- Removes the oldest jobs of the lowest level; then jobs of deques, jobs of groups, and then delayed jobs.
local function dropJobs(ctx, queue, excess)
  local outcome, left, looked = '["dropped"]', excess, 0
  for level = #FIELD / 3, 1, -1 do
    for source = 3 * level, 3 * level - 2, -1 do
      while left > 0 and queue[FIELD[source]] > 0 do
        -- The rest is for the next call.
        if looked >= MOST_DROPPED then return excess - left end
        looked = looked + math.min(left, queue[FIELD[source]])
        left = left - removeWaiting(ctx, queue, source, left, false, outcome)
      end
    end
  end
  while left > 0 and queue.stored > 0 do
    if looked >= MOST_DROPPED then return excess - left end
    looked = looked + left
    left = left - removeStored(ctx, queue, left, false, outcome)
  end
  if left > 0 and queue.grouped > 0 then
    local from = '-'
    -- Delayed jobs of groups stand between the waiting jobs.
    for _ = 1, 4 do
      local count, read, last = groups.purge(ctx, queue, from, '+', math.max(left, MOVED), true, outcome, left)
      left = left - count
      if left == 0 or read < MOVED then break end
      from = '(' .. last
    end
  end
  if left > 0 then left = left - removeDelayed(ctx, queue, left, outcome) end
  if left > 0 and queue.grouped > 0 then left = left - groups.purge(ctx, queue, '-', '+', left, false, outcome) end
  return excess - left
end

local function isDropping(queue)
  return queue.overflow == DROP and queue.length > 0
end

-- The length may be lower than before.
extend.lower = function(queue)
  queue.lowered = isDropping(queue) and lengthOf(queue) > queue.length or nil
  if queue.lowered then call('HSET', queue.key, 'l', '') else call('HDEL', queue.key, 'l') end
end

-- At an alarm: whether that is still to be enforced.
extend.lowering = function(queue)
  queue.lowered = call('HGET', queue.key, 'l') and true or nil
end

-- Removes jobs beyond the length: as many as were offered, or all of them, over several calls.
local function dropBeyond(ctx, queue, excess)
  local count = math.min(excess, queue.lowered and MOST_DROPPED or queue.offered, MOST_DROPPED)
  local dropped = count > 0 and dropJobs(ctx, queue, count) or 0
  queue.dropped = queue.dropped + dropped
  -- A job behind one of these may be able to begin.
  if count > 0 and queue.workers > 0 then dispatchJobs(ctx, queue) end
  if not queue.lowered then return end
  -- If nothing could be dropped, an alarm would ring for it again and again.
  if dropped > 0 and dropped < excess then return soonerDue(ctx, queue, ctx.now) end
  call('HDEL', queue.key, 'l')
end

-- At the end of a call: tells the first member of the line of room, or removes the jobs beyond the length.
extend.bound = function(ctx, queue)
  local room = queue.length - lengthOf(queue)
  if isDropping(queue) then dropBeyond(ctx, queue, -room) end
  -- The length was removed, or offers do not wait any more: the members of the line go on.
  if queue.length == 0 or queue.overflow ~= WAIT then room = 1 end
  if queue.queued == 0 or queue.told == 1 or room <= 0 then return end
  local line = lineOf(queue)
  -- A request of a member that has left can have come behind that.
  while line[1] and not (isAlive(ctx, holderOf(line[1])) and call('HGET', queue.key, 'o' .. line[1])) do table.remove(line, 1) end
  setLine(queue, line, nil)
  if not line[1] then return end
  queue.told = 1
  deliver(ctx, holderOf(line[1]), reply('changed', idOf(line[1]), 'room'))
end

-- queue.enter: as `queue.offer`, of a member whose jobs may wait: while some jobs were refused, the member stands in the line
-- keys: all
-- args: id string, values string, shapes string, node string, number number
-- reply: ["offered", stamp number, first number, known json] | ["late"]
handlers['queue.enter'] = function(ctx, key, id, values, shapes, node, number)
  local claim = claimOf(ctx, id)
  local queue = loadQueue(ctx, key)
  local before = queue.number - queue.apart
  local answered = offerOnce(ctx, queue, values, shapes, node, number, claim)
  -- Also when it was answered before: that may have been in a session that is over.
  local line, waits = lineOf(queue), find(answered, ',2]', 1, true) ~= nil
  local first = line[1]
  local place
  for at = #line, 1, -1 do
    if line[at] == claim then place = at end
  end
  if place and (not waits or queue.number - queue.apart > before) then
    table.remove(line, place)
    place = nil
  end
  if waits and not place then line[#line + 1] = claim end
  setLine(queue, line, first)
  -- The actor tells the first member again if it has stored nothing.
  if line[1] == claim then queue.told = 0 end
  if waits then expectExpiry(ctx, queue) end
  return answered
end

-- queue.pass: a member leaves the line, because nothing of it waits any more. It needs no memory, and is refused all the same while there
-- is none: the next member could not store anything, and would fail for that.
-- keys: all
-- args: id string
-- reply: ["passed"]
handlers['queue.pass'] = function(ctx, key, id)
  local queue = loadQueue(ctx, key)
  if queue.queued > 0 then extend.depart(queue, claimOf(ctx, id)) end
  return '["passed"]'
end
