-- Requests about one job, and about the queue as a whole.
--
-- after Queue.lua
-- after QueueHandOut.lua
-- after QueueNotes.lua

-- Replays that are followed: each gives a job another id.
local MOST_REPLAYS = 16

-- As `recalled`, without a write, and for up to a window longer.
local function notedAs(ctx, queue, field)
  return queue.noted[field] or call('HGET', queue.even, field) or call('HGET', queue.odd, field) or extend.keptAs(ctx, queue, field)
end

-- A job by its own id, a former one, or that of its producer.
local function jobNamed(ctx, queue, name)
  local job = call('HGET', queue.ids, name)
  if not job then
    job = name
    for _ = 1, MOST_REPLAYS do
      local later = notedAs(ctx, queue, 'i' .. job)
      if not later then break end
      job = later
    end
    -- Another job may have had the id since.
    if job == name and not split(name) then job = notedAs(ctx, queue, 'f' .. name) or name end
  end
  local letter, at = split(job)
  return job, letter, at
end

-- Removes a job that no worker has, and says what has become of it.
extend.removeUnbegun = function(ctx, queue, job, fields, holder, count, outcome)
  local letter, at = split(job)
  endJob(ctx, queue, letter, at, fields, outcome)
  if holder == BLOCKED then return extend.unblocked(queue, job) end
  if groups.levels[letter] then groups.cancelled(queue, letter, at, fields, holder, count) end
  if not holder then
    local field = WAITING[letter] or 'stored'
    queue[field] = math.max(0, queue[field] - 1)
    if field == 'stored' then queue.gaps = queue.gaps + 1 end
  elseif holder == RETURNED then
    unstack(queue, job)
    if not groups.levels[letter] then queue[READY[letter]] = math.max(0, queue[READY[letter]] - 1) end
  else
    call('ZREM', queue.delays, job)
    queue.delayed = queue.delayed - 1
  end
end

-- queue.cancel: removes a job. One that is in work is interrupted, see lua/QueueCancel.lua. With `unbegun`, a job stays that was attempted.
-- keys: all
-- args: name string, unbegun boolean
-- reply: ["cancelled", active boolean] | ["begun"] | ["missing"]
-- flags: allow-oom
handlers['queue.cancel'] = function(ctx, key, name, unbegun)
  local queue = loadQueue(ctx, key)
  local job, letter, at = jobNamed(ctx, queue, name)
  if not letter then return MISSING end
  local fields, holder, count = jobAt(queue, letter, at)
  if not fields then return MISSING end
  if unbegun == '1' and (count or 0) % CRASH > 0 then return '["begun"]' end
  local active = holder and find(holder, '/', 1, true)
  if active then
    extend.cancel(ctx, queue, letter, at, fields, holder)
  else
    extend.removeUnbegun(ctx, queue, job, fields, holder, count, '["cancelled"]')
  end
  return reply('cancelled', active and true or false)
end

-- queue.status: what has become of a job
-- keys: all
-- args: name string
-- reply: ["status", state string, attempts number] | ["missing"] | ["stale"]
-- flags: allow-oom
handlers['queue.status'] = function(ctx, key, name)
  if isStale(ctx) then return STALE end
  local queue = readQueue(ctx, key)
  local job, letter, at = jobNamed(ctx, queue, name)
  if not letter then return MISSING end
  local fields, holder, count = jobAt(queue, letter, at)
  if not fields then return MISSING end
  local state = 'active'
  if not holder then
    state = tonumber(noteOf(queue, 'd' .. job) or 0) > ctx.now and 'delayed' or 'waiting'
  elseif holder == RETURNED then
    state = 'waiting'
  elseif holder == DELAYED then
    state = 'delayed'
  elseif holder == BLOCKED then
    state = 'blocked'
  end
  return reply('status', state, (count or 0) % CRASH)
end

-- queue.watch: a member waits for the outcome of a job, by its own id, or by that of its producer
-- keys: all
-- args: id string, name string
-- reply: ["outcome", job string, outcome json] | ["watching", job string] | ["missing"]
handlers['queue.watch'] = function(ctx, key, id, name)
  local queue = loadQueue(ctx, key)
  local job, letter, at = jobNamed(ctx, queue, name)
  local outcome = recalled(ctx, queue, 'r' .. job)
  if outcome then return reply('outcome', job, json(outcome)) end
  local fields = letter and jobAt(queue, letter, at)
  if not fields or not fieldOf(fields, 'r') then return MISSING end
  local claim, waiting = claimOf(ctx, id), call('HGET', key, 'a' .. job) or ''
  if not find(waiting .. ' ', claim .. ' ', 1, true) then call('HSET', key, 'a' .. job, waiting .. claim .. ' ') end
  expectExpiry(ctx, queue)
  return reply('watching', job)
end

-- queue.pause: no jobs are handed out from now on, or again, also if a worker has asked for less haste
-- keys: all
-- args: paused boolean
-- reply: ["paused"]
-- flags: allow-oom
handlers['queue.pause'] = function(ctx, key, paused)
  local queue = loadQueue(ctx, key)
  if paused == '1' then queue.paused = 1 else queue.paused, queue.after = 0, 0 end
  if queue.plans > 0 and paused ~= '1' then extend.wakePlans(ctx, queue) end
  return '["paused"]'
end

-- queue.state: how many jobs and workers there are, and when the oldest job that waits in its order was offered, 0 for none
-- keys: all
-- args:
-- reply: ["state", ready strings, delayed number, active number, dead number, workers number, paused boolean, completed number, buried number, expired number, dropped number, oldest number, blocked number] | ["stale"] | ["missing"]
-- flags: allow-oom
handlers['queue.state'] = function(ctx, key)
  local queue = readQueue(ctx, key)
  if not queue.known then return MISSING end
  if isStale(ctx) then return STALE end
  local ready, oldest = {}, nil
  for letter, field in pairs(WAITING) do
    local first = queue[field] > 0 and firstWaiting(queue, letter)
    if first then oldest = math.min(oldest or math.huge, tonumber(match(first[1], '^%d+'))) end
  end
  for level = 1, 4 do
    ready[level] = queue[FIELD[3 * level - 2]] + queue[FIELD[3 * level - 1]] + queue[FIELD[3 * level]]
      + groups.waiting(queue, level)
  end
  ready[3] = ready[3] + queue.stored
  return reply('state', list(ready), queue.delayed, queue.active, queue.dead, queue.workers, queue.paused == 1,
    queue.completed, queue.buried, queue.expired, queue.dropped, oldest or 0, queue.blocked)
end
