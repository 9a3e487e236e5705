-- Members, and workers: from the first request to the end of their sessions.
--
-- after Queue.lua
-- after QueueEnd.lua
-- after QueueHandOut.lua
-- after QueueNotes.lua

-- -----------------------------------------------------------------------------
-- Members and workers
-- -----------------------------------------------------------------------------

-- queue.join: becomes a member, and says how the queue works: how many jobs may be in work (0 for no
-- limit), how many ms are between two jobs, and how many ms of that may be saved up for a burst (0 for no limit), how long
-- ids are known, how many dead letters are kept, and for how long (0 for ever), after how many crashes a job is one, how many
-- jobs may wait (0 for no limit), and what becomes of offers beyond that: see lua/QueueLimits.lua. Of each group: how many jobs
-- may be in work, how many ms are between two, and how many of these may be saved up. It also says how many shards there are
-- (0: as many as there were), among which the limits but those of groups are divided, and which one this is. Another number than
-- that of a member before is refused while there are jobs or members; with `anyway`, though an expired session may stand in the way.
-- The last member decides how the queue works: `decided` is 1 for one that does so now, the number that it was answered for one that
-- did so before, and 0 for one that leaves that as it is. It answers how many shards there are, whether the queue has schedules, and
-- errands, when the member decided, and how long ids are known. When that changes, all members are told by a sweep.
-- keys: all
-- args: id string, decided number, limit number, spacing number, burst number, window number, letters number, retain number, crashes number, length number, overflow number, grouplimit number, groupspacing number, groupburst number, shards number, shard number, anyway boolean
-- reply: ["joined", shards number, scheduled boolean, errands boolean, decided number, window number] | ["mismatch", shards number] | ["stale"]
handlers['queue.join'] = function(ctx, key, id, decided, limit, spacing, burst, window, letters, retain, crashes, length, overflow, grouplimit, groupspacing, groupburst, shards, shard, anyway)
  local queue = loadQueue(ctx, key)
  shards = tonumber(shards)
  if shards > 0 and shards ~= queue.shards then
    -- After a loss of data, workers and offers can come before any member.
    local used = queue.window > 0 and queue.members + queue.workers + jobsOf(queue) > 0
    if used then return anyway ~= '1' and isStale(ctx) and STALE or reply('mismatch', queue.shards) end
    queue.shards = shards
  end
  local before = policyOf(queue)
  decided = decided == '1' and math.max(before.decided + 1, ctx.now) or tonumber(decided) or 0
  if decided > before.decided or queue.window == 0 then
    queue.limit = extend.shareOf(queue, tonumber(limit), tonumber(shard))
    queue.spacing = tonumber(spacing) * queue.shards
    queue.burst = math.max(tonumber(burst), queue.spacing)
    if queue.window ~= tonumber(window) then
      if queue.window > 0 then extend.beginSweep(ctx, queue) end
      queue.window, queue.current = tonumber(window), nil
      -- What is known stays so for one of the new turns at least: they do not follow the former ones.
      queue.turn = floor(ctx.now / queue.window) + 1
    end
    queue.length = extend.shareOf(queue, tonumber(length), tonumber(shard))
    queue.overflow = tonumber(overflow)
    queue.policy = {
      letters = tonumber(letters), retain = tonumber(retain), crashes = tonumber(crashes),
      grouplimit = tonumber(grouplimit), groupspacing = tonumber(groupspacing), groupburst = tonumber(groupburst),
      decided = decided
    }
    call('HSET', key, 'm', packQueuePolicy(queue.policy))
    extend.lower(queue)
    if queue.dead > 0 then
      call('XTRIM', queue.letters, 'MAXLEN', '=', text(queue.policy.letters))
      queue.recount = true
    end
    if queue.grouped > 0 and extend.haveChanged(before, queue.policy) then extend.beginSweep(ctx, queue) end
  end
  queue.joined = true
  if enrol(ctx, key, id, PERMANENT) then queue.members = queue.members + 1 end
  if queue.plans > 0 then
    call('HSET', key, 'n', claimOf(ctx, id))
    extend.wakePlans(ctx, queue)
  end
  -- Alarms are forgotten when no session was alive for a day.
  if queue.sweep > 0 then soonerDue(ctx, queue, ctx.now) end
  if queue.awaited > 0 then extend.resume(ctx, queue) end
  expectDelayed(ctx, queue)
  expectLetters(ctx, queue)
  if queue.grouped > 0 then groups.ring(ctx, queue) end
  return reply('joined', queue.shards, queue.plans > 0, extend.hasErrands(ctx, key), math.max(before.decided, decided), queue.window)
end

-- The jobs that a worker has in hand, as `describedJob` describes them, and those of them that were cancelled. All of them: those that are
-- not named are taken for cancelled ones by the worker.
local function inHandOf(queue, claim)
  local items, cancelled = {}, {}
  for _, letter in ipairs(EVERY_LETTER) do
    local consumer, page, from = consumerOf(letter, claim), nil, nil
    repeat
      page = pendingOf(queue[letter], MOST.credit, consumer, from)
      for _, pending in ipairs(page) do
        local fields = entryAt(queue[letter], pending[1])
        if fields then
          local job = letter .. pending[1]
          if queue.notes > 0 then reviseFields(fields, noteOf(queue, 'b' .. job), noteOf(queue, 'k' .. job)) end
          items[#items + 1] = describedJob(letter, pending[1], text(pending[4]), fields)
        else
          cancelled[#cancelled + 1] = letter .. pending[1]
        end
        from = '(' .. pending[1]
      end
    until #page < MOST.credit
  end
  return items, cancelled
end

-- queue.work: becomes a worker, with credit for so many jobs. A worker that asks again hears of all jobs that it has in
-- hand, with new tokens from `token` on, and how many deliveries it was sent so far: a delivery among these that comes later
-- is old. It also hears of cancelled jobs whose slots it has not freed.
-- keys: all
-- args: id string, credit number
-- reply: ["joined", sent number, token number, jobs json, cancelled strings]
handlers['queue.work'] = function(ctx, key, id, credit)
  local claim = claimOf(ctx, id)
  local queue = loadQueue(ctx, key, claim)
  local worker = workerOf(queue, claim)
  if worker then
    arm(queue, claim)
    local items, cancelled = inHandOf(queue, claim)
    local token = json(nextTokens(ctx, #items))
    return reply('joined', worker.sent, token, json('[' .. concat(items, ',') .. ']'), list(cancelled))
  end
  worker = { claim = claim, credit = tonumber(credit), sent = 0, listed = false }
  queue.loaded[claim], queue.workers = worker, queue.workers + 1
  own(ctx, key, id, PERMANENT)
  enlist(queue, worker)
  arm(queue, claim)
  return reply('joined', 0, 0, json('[]'), json('[]'))
end

-- The queue, the worker that asks, if it is one still, and its claim.
local function askingWorker(ctx, key, id)
  local claim = claimOf(ctx, id)
  local queue = loadQueue(ctx, key, claim)
  local worker = workerOf(queue, claim)
  if worker then worker.before = queue.active end
  return queue, worker, claim
end

-- A worker takes so many jobs more. What has become of jobs that it had in hand is done by then.
local function giveCredit(ctx, queue, worker, take)
  worker.credit = worker.credit + tonumber(take)
  if worker.deque then extend.relieved(ctx, queue, worker, worker.before - queue.active) end
  if tonumber(take) > 0 then arm(queue, worker.claim) end
  enlist(queue, worker)
end

-- queue.done: a worker has done plain jobs, and takes so many more. The jobs are their ids without the letter, which stands
-- before those of each stream.
-- keys: all
-- args: id string, jobs string, take number
-- reply: ["done"] | ["missing"]
-- flags: allow-oom, heard
handlers['queue.done'] = function(ctx, key, id, jobs, take)
  local queue, worker = askingWorker(ctx, key, id)
  if not worker then return MISSING end
  local sorted, done, letter = {}, 0, nil
  for part in string.gmatch(jobs, '%S+') do
    if #part == 1 then
      letter = part
    elseif queue.cancelled == 0 or not extend.freed(queue, letter, part) then
      local ids = sorted[letter] or {}
      sorted[letter], ids[#ids + 1] = ids, part
    end
  end
  for letter, ids in pairs(sorted) do
    local stream = queue[letter]
    if groups.levels[letter] then groups.done(queue, letter, ids) end
    local count = call('XACK', stream, JOBS, unpack(ids))
    done = done + count
    if not LAST[letter] or queue[FULL[letter]] == 1 then
      call('XDEL', stream, unpack(ids))
    end
    if LAST[letter] then queue[DONE[letter]] = queue[DONE[letter]] + count end
    if queue.notes + queue.awaited + queue.expiring > 0 then
      for at = 1, #ids do ids[at] = letter .. ids[at] end
      dropNotes(ctx, queue, ids)
      if queue.awaited > 0 then extend.settled(ctx, queue, ids, 's') end
    end
  end
  queue.active, queue.completed = queue.active - done, queue.completed + done
  giveCredit(ctx, queue, worker, take)
  return '["done"]'
end

-- A job is done. Answers whether it was there.
local function finishJob(ctx, queue, job, given, deduped, outcome, life)
  local letter, at = split(job)
  if queue.cancelled > 0 and extend.freed(queue, letter, at) then return false end
  if groups.levels[letter] then groups.done(queue, letter, { at }) end
  if removeJob(queue, letter, at) == 0 then return false end
  queue.active, queue.completed = queue.active - 1, queue.completed + 1
  dropNotes(ctx, queue, { job })
  releaseId(ctx, queue, given, job, deduped)
  conclude(ctx, queue, job, given, outcome ~= '' and life, outcome, 's')
  return true
end

-- queue.finish: a worker has done a job whose id its producer gave, or whose outcome is kept: for so many ms, or with `life` 0 as long as
-- ids are
-- keys: all
-- args: id string, job string, given string, deduped string, outcome string, life number, take number
-- reply: ["done"] | ["missing"]
-- flags: allow-oom, heard
handlers['queue.finish'] = function(ctx, key, id, job, given, deduped, outcome, life, take)
  local queue, worker = askingWorker(ctx, key, id)
  if not worker then return MISSING end
  finishJob(ctx, queue, job, given, deduped, outcome, life)
  giveCredit(ctx, queue, worker, take)
  return '["done"]'
end

-- Jobs that a worker gives up go back, each with a count of its own.
local function returnJobs(queue, letter, counted)
  for count, ids in pairs(counted) do
    moveJobs(queue[letter], consumerOf(letter, RETURNED), ids, count)
    if groups.levels[letter] then
      groups.returned(queue, letter, ids, count)
    else
      queue[READY[letter]] = queue[READY[letter]] + #ids
    end
    queue.active = queue.active - #ids
  end
end

-- Of a worker that asks about a job: its queue, the worker, the letter and the id of the job, and how often that was delivered, if the
-- worker still has it.
local function attemptOf(ctx, key, id, job)
  local queue, worker, claim = askingWorker(ctx, key, id)
  if not worker then return end
  local letter, at = split(job)
  local freed = queue.cancelled > 0 and extend.freed(queue, letter, at)
  local holder, count = holdingOf(queue, letter, at)
  return queue, worker, letter, at, holder == claim and not freed and count
end

-- queue.retry: a worker gives a job back, to be handed out again in so many ms; `attempted` says whether that was an attempt
-- keys: all
-- args: id string, job string, delay number, attempted boolean, take number
-- reply: ["returned"] | ["missing"]
-- flags: allow-oom
handlers['queue.retry'] = function(ctx, key, id, job, delay, attempted, take)
  local queue, worker, letter, at, count = attemptOf(ctx, key, id, job)
  if not worker then return MISSING end
  if count then
    -- Behind the attempts, the number has the crashes: the last attempt that it can have is counted once.
    if attempted ~= '1' or count % CRASH == CRASH - 1 then count = count - 1 end
    if tonumber(delay) > 0 then
      if groups.levels[letter] then groups.postponed(queue, letter, at, count) end
      delayJob(ctx, queue, letter, at, ctx.now + tonumber(delay), count)
      queue.active = queue.active - 1
    else
      returnJobs(queue, letter, { [count] = { at } })
    end
    if queue.expiring > 0 then extend.lapse(ctx, queue, job) end
  end
  giveCredit(ctx, queue, worker, take)
  return '["returned"]'
end

-- queue.bury: a worker puts a job aside as a dead letter
-- keys: all
-- args: id string, job string, reason string, message string, outcome string, take number
-- reply: ["buried"] | ["missing"]
-- flags: allow-oom
handlers['queue.bury'] = function(ctx, key, id, job, reason, message, outcome, take)
  local queue, worker, letter, at, count = attemptOf(ctx, key, id, job)
  if not worker then return MISSING end
  if count then
    local fields = entryAt(queue[letter], at)
    if fields then bury(ctx, queue, job, fields, reason, count, message, outcome) end
    if groups.levels[letter] then groups.done(queue, letter, { at }) end
    removeJob(queue, letter, at)
    queue.active = queue.active - 1
  end
  giveCredit(ctx, queue, worker, take)
  return '["buried"]'
end

-- queue.credit: a worker takes more jobs at a time, or fewer; with `stop`, none from now on
-- keys: all
-- args: id string, change number, stop boolean
-- reply: ["credited"] | ["missing"]
-- flags: allow-oom
handlers['queue.credit'] = function(ctx, key, id, change, stop)
  local queue, worker = askingWorker(ctx, key, id)
  if not worker then return MISSING end
  if stop == '1' then worker.credit, worker.changed = 0, true else giveCredit(ctx, queue, worker, change) end
  return '["credited"]'
end

-- -----------------------------------------------------------------------------
-- The end of a session, and alarms
-- -----------------------------------------------------------------------------

-- The jobs that a worker has in hand go back. After a crash they count it, and a job with too many crashes becomes a dead letter.
local function dismissWorker(ctx, queue, claim, crashed)
  local most = crashed and policyOf(queue).crashes
  for _, letter in ipairs(EVERY_LETTER) do
    local stream, consumer = queue[letter], consumerOf(letter, claim)
    repeat
      local pending, counted = pendingOf(stream, MOVED, consumer), {}
      for _, one in ipairs(pending) do
        local id, count = one[1], tonumber(one[4]) + (crashed and CRASH or -1)
        local freed = queue.cancelled > 0 and extend.freed(queue, letter, id)
        local fields = crashed and not freed and floor(count / CRASH) >= most and entryAt(queue[letter], id)
        if fields then
          bury(ctx, queue, letter .. id, fields, 'crashed', count, '', '["crashed"]')
          if groups.levels[letter] then groups.done(queue, letter, { id }) end
          removeJob(queue, letter, id)
          queue.active = queue.active - 1
        elseif not freed then
          local ids = counted[count] or {}
          counted[count], ids[#ids + 1] = ids, id
          if queue.expiring > 0 then extend.lapse(ctx, queue, letter .. id) end
        end
      end
      returnJobs(queue, letter, counted)
    until #pending == 0
    tryGroup('XGROUP', 'DELCONSUMER', stream, JOBS, consumer)
  end
  call('HDEL', queue.key, 'w' .. claim)
  if queue.loaded[claim].deque then extend.bereave(ctx, queue, queue.loaded[claim]) end
  local list = queue.loaded[claim].listed and listOfWorkers(queue) or {}
  for at = #list, queue.head or 1, -1 do
    if list[at] == claim then
      table.remove(list, at)
      queue.relisted = true
    end
  end
  queue.loaded[claim] = false
  queue.workers = queue.workers - 1
end

-- A member or worker is not there any more. Answers whether it was a worker.
local function dropClaim(ctx, queue, claim, crashed)
  if call('HDEL', queue.key, 'o' .. claim) == 1 then queue.members = math.max(0, queue.members - 1) end
  if queue.queued > 0 then extend.depart(queue, claim) end
  local works = workerOf(queue, claim)
  if works then dismissWorker(ctx, queue, claim, crashed) end
  return works
end

reapers.queue = function(ctx, key, session, id)
  local claim = session .. '/' .. id
  local queue, crashed = loadQueue(ctx, key, claim), not hasLeft(ctx, session)
  dropClaim(ctx, queue, claim, crashed)
  -- Its process may live, and send an offer again: that stays known for the window, also if the queue is forgotten before that.
  if crashed and call('HLEN', queue.even) + call('HLEN', queue.odd) > 0 then queue.named = ctx.now end
  if queue.plans > 0 then extend.wakePlans(ctx, queue) end
end

alarms.queue = function(ctx, key)
  local queue = loadQueue(ctx, key)
  local due, sorted, jobs, plans = call('ZRANGEBYSCORE', queue.delays, 0, text(ctx.now), 'LIMIT', 0, MOVED), {}, {}, {}
  for _, job in ipairs(due) do
    local letter, id = split(job)
    if letter then
      local ids = sorted[letter] or {}
      sorted[letter], ids[#ids + 1] = ids, id
      jobs[#jobs + 1] = job
    else
      plans[#plans + 1] = job
    end
  end
  for letter, ids in pairs(sorted) do
    endDelays(queue, letter, ids)
  end
  if queue.grouped > 0 then groups.ring(ctx, queue) end
  if queue.awaited > 0 then extend.resume(ctx, queue) end
  if #jobs > 0 then call('ZREM', queue.delays, unpack(jobs)) end
  if queue.expiring > 0 then extend.expire(ctx, queue) end
  if #plans > 0 then extend.tickPlans(ctx, queue, plans) end
  if queue.sweep > 0 then extend.sweep(ctx, queue) end
  if queue.length > 0 then extend.lowering(queue) end
  expectDelayed(ctx, queue)
  expectLetters(ctx, queue)
end
