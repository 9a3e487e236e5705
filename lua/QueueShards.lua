-- Queues of several shards: each is a queue of its own, and the slots of a process go where jobs are.
--
-- after Queue.lua
-- after QueueHandOut.lua
-- after QueueWorkers.lua

-- The share of one shard in a limit of the queue: at least 1, as 0 would be no limit.
extend.shareOf = function(queue, limit, shard)
  local share = floor(limit / queue.shards) + (shard < limit % queue.shards and 1 or 0)
  return limit > 0 and math.max(1, share) or 0
end

-- A process shares its slots among the shards, so a shard that has jobs and no credit says so: once to each worker, and again
-- after the worker has given it credit.
extend.tellOfMore = function(ctx, queue)
  local arming = queue.arming
  if not arming and not (queue.lacking and queue.armed > 0) then return end
  local armed, before = {}, queue.armed > 0 and call('HGET', queue.key, 'z') or ''
  for claim in string.gmatch(before, '%S+') do armed[#armed + 1] = claim end
  for claim in pairs(arming or {}) do
    if not find(before .. ' ', claim .. ' ', 1, true) then armed[#armed + 1] = claim end
  end
  queue.arming = nil
  local left = {}
  for _, claim in ipairs(armed) do
    local worker = workerOf(queue, claim)
    if worker and (worker.credit > 0 or not queue.lacking) then
      left[#left + 1] = claim
    elseif worker then
      local session, id = match(claim, '^([^/]*)/(.*)$')
      deliver(ctx, session, reply('changed', id, 'more'))
    end
  end
  local after = concat(left, ' ')
  queue.armed = #left
  if after ~= before then call('HSET', queue.key, 'z', after) end
end

-- queue.shed: a worker takes so many jobs less at a time, as far as it has credit for them
-- keys: all
-- args: id string, most number
-- reply: ["shed", count number] | ["missing"]
-- flags: allow-oom
handlers['queue.shed'] = function(ctx, key, id, most)
  local queue, worker = askingWorker(ctx, key, id)
  if not worker then return MISSING end
  -- Credit of the same call may be for jobs that wait: two shards would shed each other's slots for ever.
  dispatchJobs(ctx, queue)
  local count = math.max(0, math.min(worker.credit, tonumber(most)))
  worker.credit, worker.changed = worker.credit - count, true
  return reply('shed', count)
end
