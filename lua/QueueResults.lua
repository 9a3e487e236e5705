-- Outcomes that are known for a time of their own: each is a key, which Redis removes in time.
--
-- after Queue.lua
--
--   queue-r<job>:<name>                 the outcome of a job
--   queue-i<bytes of id>:<id><name>     the job of an id of a producer, where that is known for longer than the window
-- `kept` of the queue's record is the time from which there is none: no request looks for any then. These keys are not declared, see
-- lua/QueueErrands.lua for what that takes.

local function resultKey(queue, field)
  local head, name = match(queue.key, '^({[^}]*}:%a+):(.*)$')
  local kind, of = sub(field, 1, 1), sub(field, 2)
  if kind == 'r' then return head .. '-' .. field .. ':' .. name end
  return head .. '-i' .. text(#of) .. ':' .. of .. name
end

extend.keepOutcome = function(ctx, queue, job, given, outcome, life)
  call('SET', resultKey(queue, 'r' .. job), outcome, 'PX', text(life))
  if given and given ~= '' and life > windowOf(queue) then
    call('SET', resultKey(queue, 'i' .. given), job, 'PX', text(life))
    local first = queue.firsts and queue.firsts[job]
    if first then call('SET', resultKey(queue, 'i' .. first), job, 'PX', text(life)) end
  end
  queue.kept = math.max(queue.kept, ctx.now + life)
end

-- What is known under a field, as those of `even` and `odd`: i<id> or r<job>.
extend.keptAs = function(ctx, queue, field)
  if queue.kept <= ctx.now or not find(field, '^[ir]') then return nil end
  return call('GET', resultKey(queue, field)) or nil
end
