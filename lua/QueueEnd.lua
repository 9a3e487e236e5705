-- The end of a call: jobs are handed out, and the queue is written.
--
-- after Queue.lua
-- after QueueHandOut.lua

local function everyKey(queue, act)
  for _, key in ipairs({
    queue.key, queue.u, queue.h, queue.n, queue.l, queue.U, queue.delays, queue.letters, queue.ids, queue.notebook,
    queue.order, queue.turns, queue.schedules
  }) do act(key) end
end

-- What the call has changed of the hash, as fields.
local function changedIn(queue)
  if #queue.fresh > 0 then listOfWorkers(queue) end
  if queue.relisted then queue.idle = #queue.list - queue.head + 1 end
  local args = { queue.key, 's', packQueue(queue) }
  if queue.relisted then args[4], args[5] = 'q', concat(queue.list, ' ', queue.head) end
  for claim, worker in pairs(queue.loaded) do
    if worker and worker.changed then
      args[#args + 1] = 'w' .. claim
      local packed = text(worker.credit) .. ' ' .. text(worker.sent) .. (worker.listed and ' 1' or ' 0')
      if worker.deque then packed = packed .. ' ' .. text(worker.busy) .. ' ' .. worker.deque end
      args[#args + 1] = packed
    end
  end
  if queue.deques then extend.writeDeques(queue, args) end
  return args
end

-- A queue without jobs and members is removed, but for the ids and offers that are still known, and what holds back the next jobs.
local function forgetQueue(ctx, queue)
  -- What else the end of the call may do must find it as later calls will.
  ctx.queues[queue.key] = nil
  call('ZREM', ctx.dues, '@' .. sub(queue.key, #ctx.prefix + 1))
  local named = queue.named > 0 and queue.named + windowOf(queue) or 0
  local held = queue.grouped > 0 and groups.heldFor(ctx, queue) or 0
  local known = math.ceil(math.max(named - ctx.now, queue.kept - ctx.now, queue.tat - ctx.now, queue.after - ctx.now, held))
  if known <= 0 then
    call('DEL', queue.even, queue.odd)
    return everyKey(queue, function(key) call('DEL', key) end)
  end
  everyKey(queue, function(key) if key ~= queue.key and key ~= queue.turns then call('DEL', key) end end)
  for source = 1, #FIELD do queue[FIELD[source]] = 0 end
  queue.bounded, queue.expiring = 1, 0
  call('HSET', unpack(changedIn(queue)))
  call('PEXPIRE', queue.key, text(known))
  call('PEXPIRE', queue.turns, text(known))
end

local function writeNoted(ctx, queue)
  if not next(queue.noted) then return end
  -- The window may have changed in this call.
  local now = turnsOf(ctx, queue)
  local args = { now }
  for field, value in pairs(queue.noted) do
    args[#args + 1], args[#args + 2] = field, value
    if #args > 2000 then
      call('HSET', unpack(args))
      args = { now }
    end
  end
  if #args > 1 then call('HSET', unpack(args)) end
  call('PEXPIRE', now, text(2 * windowOf(queue)))
end

-- Trims the finished jobs of a level.
local function trimLevel(queue, letter)
  local stream = queue[letter]
  queue[DONE[letter]] = 0
  local pending = tryGroup('XPENDING', stream, JOBS)
  if not pending then return end
  local first = pending[2] or text(queue[AT[letter]]) .. '-' .. text(queue[LAST[letter]] + 1)
  call('XTRIM', stream, 'MINID', '=', first)
  local left = call('XLEN', stream) - queue[WAITING[letter]] - pending[1]
  queue[FULL[letter]] = left >= MOST.done and 1 or 0
end

-- What the requests of a call have led to: jobs begin, and members and subscribers hear of it.
extend.endCall = function(ctx, queue)
  -- What runs offer now is handed out below.
  if queue.ended then extend.tellSubscribers(ctx, queue, true) end
  queue.finished = true
  if queue.workers > 0 then dispatchJobs(ctx, queue) end
  if queue.length > 0 or queue.queued > 0 then extend.bound(ctx, queue) end
  if queue.ending then extend.release(ctx, queue) end
  if queue.ending then extend.suspend(ctx, queue) end
  if queue.shards > 1 then extend.tellOfMore(ctx, queue) end
  if queue.draining > 0 then extend.tellDrained(ctx, queue) end
  for letter, done in pairs(DONE) do
    if queue[done] >= MOST.trimmed or queue[done] > 0 and queue.active == 0 then trimLevel(queue, letter) end
  end
  if queue.ended then extend.tellSubscribers(ctx, queue, false) end
end

local function writeQueue(ctx, queue)
  if queue.recount then queue.dead = call('XLEN', queue.letters) end
  writeNoted(ctx, queue)
  groups.finish(ctx, queue)
  local jobs = jobsOf(queue)
  if jobs == 0 and queue.members == 0 and queue.workers == 0 then return forgetQueue(ctx, queue) end
  -- Jobs stay until they are done; a queue that never had one does not.
  local bounded = queue.bounded
  if jobs > 0 then queue.bounded = 0 elseif not queue.known then queue.bounded = 1 end
  call('HSET', unpack(changedIn(queue)))
  if queue.bounded < bounded then
    everyKey(queue, function(key) call('PERSIST', key) end)
  elseif queue.bounded > bounded or queue.bounded == 1 and queue.joined then
    keep(queue.key)
    if queue.grouped > 0 then keep(queue.turns) end
  end
  if queue.next then alarm(ctx, queue.key, math.max(0, queue.next - ctx.now)) end
end

-- The record is written in any case: without it, all that the call has done until an error would be unknown.
extend.finish = function(ctx, queue)
  local fine, cause = pcall(extend.endCall, ctx, queue)
  queue.finished = true
  writeQueue(ctx, queue)
  if not fine then error(cause, 0) end
end

-- The alarm rings when the next job or schedule of `delayed` is due.
local function expectDelayed(ctx, queue)
  if queue.expiring > 0 then extend.expectExpired(ctx, queue) end
  if queue.delayed + queue.plans == 0 then return end
  local first = call('ZRANGEBYSCORE', queue.delays, 0, '(+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
  if first then soonerDue(ctx, queue, tonumber(first)) end
end

-- Removes dead letters that are too old. The alarm rings when the next one is.
local function expectLetters(ctx, queue)
  local retain = queue.dead > 0 and policyOf(queue).retain or 0
  if retain == 0 then return end
  call('XTRIM', queue.letters, 'MINID', '=', text(ago(ctx, retain)) .. '-0')
  queue.recount = true
  local oldest = call('XRANGE', queue.letters, '-', '+', 'COUNT', 1)[1]
  if oldest then soonerDue(ctx, queue, tonumber(match(oldest[1], '^%d+')) + retain + 1) end
end
