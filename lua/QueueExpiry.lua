-- Jobs that may not begin any more after a time.
--
-- after Queue.lua
--
-- `delayed` has "e<job>" of each such job that is not done, with a score of EXPIRY and the time; of a job that was in work then, LAPSED:
-- it ends when it goes back. All other scores are above. `expiring` of the queue's record counts these members: while there are none, no
-- request looks for any.

local EXPIRY, LAPSED, LATEST = -2 ^ 53, -2 ^ 54, 2 ^ 52

-- A job was stored.
extend.expires = function(ctx, queue, job, till)
  if till >= LATEST then return end
  queue.expiring = queue.expiring + call('ZADD', queue.delays, text(EXPIRY + till), 'e' .. job)
  soonerDue(ctx, queue, till)
end

-- The alarm rings when the next job expires.
extend.expectExpired = function(ctx, queue)
  local first = call('ZRANGEBYSCORE', queue.delays, text(EXPIRY), '(' .. text(EXPIRY + LATEST), 'WITHSCORES', 'LIMIT', 0, 1)[2]
  if first then soonerDue(ctx, queue, tonumber(first) - EXPIRY) end
end

-- A job that was in work goes back. It ends if it may not begin any more.
extend.lapse = function(ctx, queue, job)
  local lapsed = call('ZADD', queue.delays, 'XX', 'GT', 'CH', text(EXPIRY + ctx.now), 'e' .. job) == 1
  if lapsed then soonerDue(ctx, queue, ctx.now) end
end

-- Removes jobs whose time has passed.
extend.expire = function(ctx, queue)
  local due = call('ZRANGEBYSCORE', queue.delays, text(EXPIRY), text(EXPIRY + ctx.now), 'LIMIT', 0, MOVED)
  for _, member in ipairs(due) do
    local job = sub(member, 2)
    local letter, id = split(job)
    local fields, holder, count = jobAt(queue, letter, id)
    if fields and holder and find(holder, '/', 1, true) then
      call('ZADD', queue.delays, text(LAPSED), member)
    elseif fields then
      extend.removeUnbegun(ctx, queue, job, fields, holder, count, '["expired"]')
      queue.expired = queue.expired + 1
    else
      queue.expiring = queue.expiring - call('ZREM', queue.delays, member)
    end
  end
  if #due == MOVED then soonerDue(ctx, queue, ctx.now) end
end
