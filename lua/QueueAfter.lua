-- Jobs that run after other jobs of the same queue, and shard. Such a job is blocked until the jobs before it have ended.
--
-- after Queue.lua
-- after QueueHandOut.lua
-- after QueueNamed.lua
--
-- A blocked job is pending in `held` under a consumer of its own. The hash has of jobs that others run after, and of blocked jobs:
--   c<job>       a blocked job: "<letter> <how many jobs it waits for>". The letter says what becomes of it when one of these fails:
--                it fails (f), is skipped (s), or runs all the same (c).
--   d<job>       a job that others run after: "<first> <last>" of its edges; behind them how it has ended, when it has:
--                s for success, f for anything else, with its dead letter if it has one, x if all blocked jobs are being removed
--   e<job> <n>   its edge of that number: the blocked job
--   E            the jobs that have ended and still have edges. The alarm goes on with them: the work of a call is bounded.
--   C            while waiting jobs are removed over several calls: the time until which no blocked job hears of an end. A job that is
--                unblocked would be removed as a waiting one.
-- `blocked` of the queue's record counts the blocked jobs, and `awaited` the fields d<job>: while there are none, no end of a job looks
-- for any.

local MOST_EDGES = 256
-- In ms, behind the last call: the process that removes jobs may die.
local HELD_BACK = 5000
local SUCCESS = '["success"'

-- The jobs before an offered job, "<bytes> <name>" for each behind the letter of its policy: those that have not ended, and what the
-- others have come to for it. It answers the place of a job that is not known, from 0 on. For a job that is replayed, only those matter
-- that have not ended.
local function predecessorsOf(ctx, queue, named, replayed)
  local policy, at, place, open, failed = sub(named, 1, 1), 2, 0, {}, nil
  while at <= #named do
    local size, from = match(named, '^(%d+) ()', at)
    local name = sub(named, from, from + size - 1)
    local job, letter, id = jobNamed(ctx, queue, name)
    if letter and jobAt(queue, letter, id) then
      open[#open + 1] = job
    elseif not replayed then
      local outcome = recalled(ctx, queue, 'r' .. job)
      if not outcome then return nil, place end
      if sub(outcome, 1, #SUCCESS) ~= SUCCESS then failed = failed or job end
    end
    at, place = from + size, place + 1
  end
  return { policy = policy, open = open, failed = policy ~= 'c' and failed or nil }
end

-- Of an offer that is about to be stored. It answers the place of a job before it that is not known.
extend.precede = function(ctx, queue, wish, replayed)
  local found, unknown = predecessorsOf(ctx, queue, wish.p, replayed)
  wish.before = found
  return unknown
end

-- Whether a job that is stored now is blocked.
extend.isBlocked = function(wish)
  return wish.before and (#wish.before.open > 0 or wish.before.failed)
end

local function addEdge(queue, before, job)
  local first, last = match(call('HGET', queue.key, 'd' .. before) or '', '^(%d+) (%d+)')
  if not first then first, last, queue.awaited = '1', '0', queue.awaited + 1 end
  last = text(last + 1)
  call('HSET', queue.key, 'd' .. before, first .. ' ' .. last, 'e' .. before .. ' ' .. last, job)
end

local function messageOf(before)
  return 'job ' .. before .. ', which it runs after, has not succeeded'
end

-- A blocked job ends, because a job before it has not succeeded. Its dead letter names that of the other.
local function endBlocked(ctx, queue, job, policy, before, how, cause)
  local letter, id = split(job)
  local fields = entryAt(queue[letter], id) or {}
  queue.blocked = queue.blocked - 1
  if how == 'x' then
    queue.removed = (queue.removed or 0) + 1
    -- Those that run after it are removed too, whichever call goes on with that.
    local clearing = queue.clearing
    queue.clearing = true
    extend.remove(ctx, queue, letter, id, fields, '["cancelled"]')
    queue.clearing = clearing
  elseif policy == 's' then
    endJob(ctx, queue, letter, id, fields, '["skipped"]')
  else
    local message = messageOf(before)
    if cause and cause ~= '' then fields[#fields + 1], fields[#fields + 2] = 'u', cause end
    bury(ctx, queue, job, fields, 'failed', 0, message, '["failed",' .. encoded(message) .. ']')
    removeJob(queue, letter, id)
  end
end

-- A job was stored, and is blocked.
extend.blocked = function(ctx, queue, job, wish)
  local before = wish.before
  queue.blocked = queue.blocked + 1
  if before.failed then return endBlocked(ctx, queue, job, before.policy, before.failed, 'f') end
  for _, one in ipairs(before.open) do addEdge(queue, one, job) end
  call('HSET', queue.key, 'c' .. job, before.policy .. ' ' .. #before.open)
end

-- Jobs have ended, in this way. Those that run after them hear of it before the call ends, or later.
extend.settled = function(ctx, queue, jobs, how)
  local fields = {}
  for at, job in ipairs(jobs) do fields[at] = 'd' .. job end
  for at, edges in ipairs(call('HMGET', queue.key, unpack(fields))) do
    if edges and not find(edges, '%a') then
      call('HSET', queue.key, fields[at], edges .. ' ' .. (queue.clearing and 'x' or how))
      queue.ending = queue.ending or {}
      queue.ending[#queue.ending + 1] = jobs[at]
    end
  end
end

-- Nothing is in the way of these jobs any more.
local function unblock(queue, jobs)
  local sorted = {}
  for _, job in ipairs(jobs) do
    local letter, id = split(job)
    local ids = sorted[letter] or {}
    sorted[letter], ids[#ids + 1] = ids, id
    if groups.levels[letter] then groups.offered(queue, letter, id, fieldOf(entryAt(queue[letter], id), 'g'), false) end
  end
  for letter, ids in pairs(sorted) do
    moveJobs(queue[letter], consumerOf(letter, RETURNED), ids)
    if not groups.levels[letter] then queue[READY[letter]] = queue[READY[letter]] + #ids end
  end
  queue.blocked = queue.blocked - #jobs
end

-- Tells up to so many blocked jobs that a job before them has ended. Answers how many it has told, and whether these were all.
local function tellBlocked(ctx, queue, before, most)
  local first, last, how, cause = match(call('HGET', queue.key, 'd' .. before) or '', '^(%d+) (%d+) (%a)(.*)$')
  if not first then return 0, true end
  first, last = tonumber(first), tonumber(last)
  local upTo, edges = math.min(last, first + most - 1), {}
  for number = first, upTo do edges[#edges + 1] = 'e' .. before .. ' ' .. text(number) end
  local jobs, states = call('HMGET', queue.key, unpack(edges)), {}
  call('HDEL', queue.key, unpack(edges))
  for at, job in ipairs(jobs) do states[at] = 'c' .. job end
  states = call('HMGET', queue.key, unpack(states))
  local free, gone, left, over, counts = {}, {}, {}, {}, {}
  for at, job in ipairs(jobs) do
    local policy, count = match(states[at] or '', '^(%a) (%d+)$')
    -- It may have been removed, or have ended because of another job. It may run after one job twice.
    if policy and counts[job] ~= 0 then
      local fails = how == 'x' or how == 'f' and policy ~= 'c'
      count = fails and 0 or (counts[job] or tonumber(count)) - 1
      counts[job] = count
      if fails then
        gone[#gone + 1], over[#over + 1] = { job, policy }, 'c' .. job
      elseif count == 0 then
        free[#free + 1], over[#over + 1] = job, 'c' .. job
      else
        left[#left + 1], left[#left + 2] = 'c' .. job, policy .. ' ' .. text(count)
      end
    end
  end
  if #left > 0 then call('HSET', queue.key, unpack(left)) end
  if #over > 0 then call('HDEL', queue.key, unpack(over)) end
  unblock(queue, free)
  for _, one in ipairs(gone) do endBlocked(ctx, queue, one[1], one[2], before, how, cause) end
  local all = upTo == last
  if all then
    call('HDEL', queue.key, 'd' .. before)
    queue.awaited = queue.awaited - 1
  else
    call('HSET', queue.key, 'd' .. before, text(upTo + 1) .. ' ' .. text(last) .. ' ' .. how .. cause)
  end
  return #jobs, all
end

-- Until when no blocked job hears of an end; 0 for no such time.
local function heldUntil(ctx, queue)
  local till = queue.heldUntil
  if not till then
    till = tonumber(call('HGET', queue.key, 'C') or 0)
    -- After a fail-over the clock may be behind.
    local holds = till > ctx.now and till <= ctx.now + HELD_BACK
    if till > 0 and not holds then call('HDEL', queue.key, 'C') end
    till = holds and till or 0
    queue.heldUntil = till
  end
  return till
end

-- Goes on with jobs that have ended, for as long as the call may work. Jobs that end because of that are among them.
extend.release = function(ctx, queue)
  if heldUntil(ctx, queue) > 0 then return end
  local ending, at = queue.ending, 1
  queue.edges = queue.edges or 0
  while ending[at] and queue.edges < MOST_EDGES do
    local count, all = tellBlocked(ctx, queue, ending[at], MOST_EDGES - queue.edges)
    queue.edges = queue.edges + math.max(1, count)
    if all then at = at + 1 end
  end
  queue.ending = ending[at] and {} or nil
  for rest = at, #ending do queue.ending[#queue.ending + 1] = ending[rest] end
end

-- At the end of a call, jobs that have ended and still have edges are kept for the alarm.
extend.suspend = function(ctx, queue)
  local known = call('HGET', queue.key, 'E')
  call('HSET', queue.key, 'E', (known and known .. ' ' or '') .. concat(queue.ending, ' '))
  queue.ending = nil
  soonerDue(ctx, queue, math.max(ctx.now, heldUntil(ctx, queue)))
end

-- Goes on with what calls before have left.
extend.resume = function(ctx, queue)
  local till = heldUntil(ctx, queue)
  if till > 0 then return soonerDue(ctx, queue, till) end
  local known = call('HGET', queue.key, 'E')
  if not known then return end
  call('HDEL', queue.key, 'E')
  queue.ending = queue.ending or {}
  for job in string.gmatch(known, '%S+') do queue.ending[#queue.ending + 1] = job end
end

-- Some waiting jobs were removed. While more are to be, blocked jobs do not hear of their ends.
extend.removedSome = function(ctx, queue, more)
  if more then
    queue.heldUntil = ctx.now + HELD_BACK
    call('HSET', queue.key, 'C', text(queue.heldUntil))
  else
    queue.heldUntil = 0
    call('HDEL', queue.key, 'C')
    extend.resume(ctx, queue)
  end
end

-- A blocked job is removed, for another reason than the end of a job before it.
extend.unblocked = function(queue, job)
  call('HDEL', queue.key, 'c' .. job)
  queue.blocked = queue.blocked - 1
end

-- Removes up to so many blocked jobs. Jobs that run after these, or after any job that this call removes, are blocked too, and
-- removed with them: they have not failed. Answers how many it has removed.
extend.drainBlocked = function(ctx, queue, most)
  local count = 0
  queue.clearing = true
  if queue.awaited > 0 then extend.removedSome(ctx, queue, false) end
  for _, letter in ipairs(queue.blocked > 0 and EVERY_LETTER or {}) do
    local some = LAST[letter] and 0 or most - count
    for _, one in ipairs(some > 0 and pendingOf(queue[letter], some, consumerOf(letter, BLOCKED)) or {}) do
      extend.unblocked(queue, letter .. one[1])
      extend.remove(ctx, queue, letter, one[1], entryAt(queue[letter], one[1]), '["cancelled"]')
      count = count + 1
    end
  end
  return count
end
