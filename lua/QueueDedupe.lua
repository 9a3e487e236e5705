-- Jobs that are duplicates of others, by an id that their producers give for that.
--
-- after Queue.lua
-- after QueueNotes.lua
-- after QueueJobs.lua
--
-- The letters of the modes, and which offers store nothing:
--   s  simple: while the job is not done
--   t  throttle: until the window is over that began with the offer of the job
--   d  debounce: while the job has not begun, which then has the payload of the last offer, and begins a window after that, unless it
--      was to begin later
--   k  keepLast: while the job has not begun, which then has the payload of the last offer. While it has begun and is not done,
--      the next job is kept behind it.

-- A job that is kept behind another is delayed until this time, or until the other is done.
local FOREVER = 8640000000000000
-- In ms: a job whose former job is removed with all that wait. The process that removes them may die.
local KEPT_BACK = 60000

-- The job that is in the way of an offer; none if the offer is to be stored.
extend.duplicated = function(ctx, queue, wish, body)
  local mode, id = match(wish.q, '^(.)(.*)$')
  if mode == 't' then
    local till, job = match(recalled(ctx, queue, 't' .. id) or '', '^(%d+) (.*)$')
    return till and tonumber(till) > ctx.now and job or nil
  end
  local name, kept = match(call('HGET', queue.key, 'x' .. id) or '', '^(%S+) ?(%S*)$')
  if mode == 'd' then wish.d = wish.v end
  if not name then return nil end
  local job, letter, at, holder, count = jobHere(queue, name)
  if not job or mode == 's' then return job end
  -- The former may have been given back as if it had not begun; and one that is kept may have been promoted.
  if kept ~= '' and select(5, jobHere(queue, kept)) == 0 then
    replacePayload(queue, kept, body)
    return kept
  end
  if count == 0 then
    replacePayload(queue, job, body)
    if mode == 'd' then
      -- A handler that has snoozed it, or a process that has rescheduled it, may want it later.
      local due = holder == DELAYED and call('ZSCORE', queue.delays, job) or not holder and noteOf(queue, 'd' .. job)
      postponeJob(ctx, queue, job, letter, at, holder, math.max(ctx.now + tonumber(wish.v), tonumber(due or 0)))
    end
    return job
  end
  if mode == 'd' then return nil end
  wish.behind, wish.w = job, text(FOREVER)
end

-- The job that one is to be kept behind can have expired since, when there was to be room for it.
extend.checkBehind = function(queue, wish)
  if not jobHere(queue, wish.behind) then wish.behind, wish.w = nil, nil end
end

-- A job was stored.
extend.placed = function(ctx, queue, wish, job)
  local mode, id = match(wish.q, '^(.)(.*)$')
  if mode == 't' then
    noteIn(ctx, queue, 't' .. id, text(ctx.now + tonumber(wish.v)) .. ' ' .. job)
    queue.named = ctx.now
  else
    call('HSET', queue.key, 'x' .. id, wish.behind and wish.behind .. ' ' .. job or job)
  end
end

-- A job is done, or gone: the job that was kept behind it begins.
extend.released = function(ctx, queue, deduped, job)
  local field = 'x' .. sub(deduped, 2)
  local name, kept = match(call('HGET', queue.key, field) or '', '^(%S+) ?(%S*)$')
  if kept == job then return call('HSET', queue.key, field, name) end
  if name ~= job then return end
  local behind, letter, at, holder = jobHere(queue, kept)
  if not behind then return call('HDEL', queue.key, field) end
  call('HSET', queue.key, field, behind)
  if not queue.drained or holder ~= DELAYED then return promoteJob(queue, behind, letter, at, holder) end
  local due = ctx.now + KEPT_BACK
  postponeJob(ctx, queue, behind, letter, at, holder, due)
  queue.drained[#queue.drained + 1] = behind .. ' ' .. text(due)
end

-- Some waiting jobs were removed. The jobs that were kept behind these begin when there are no more to remove.
extend.drainedSome = function(queue, more)
  local known = call('HGET', queue.key, 'K')
  local kept = concat(queue.drained, ' ')
  queue.drained = nil
  if known then kept = known .. ' ' .. kept end
  if more and kept ~= '' then return call('HSET', queue.key, 'K', kept) end
  if known then call('HDEL', queue.key, 'K') end
  for job, due in string.gmatch(kept, '(%S+) (%S+)') do
    -- It may have begun, or have another time since.
    if tonumber(call('ZSCORE', queue.delays, job)) == tonumber(due) then promoteJob(queue, jobHere(queue, job)) end
  end
end
