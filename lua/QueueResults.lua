-- Outcomes that are known for a time of their own: each is a key, which Redis removes in time.
--
-- after Queue.lua
--
--   queue-r<job>:<name>                 the outcome of a job
--   queue-i<bytes of id>:<id><name>     the job of an id of a producer, where that is known for longer than the window
--   queue-f<bytes of id>:<id><name>     the same of a job that was removed
-- `kept` of the queue's record is the time from which there is none: no request looks for any then. These keys are not declared, see
-- lua/QueueErrands.lua for what that takes.

local function resultKey(queue, field)
  local head, name = match(queue.key, '^({[^}]*}:%a+):(.*)$')
  local kind, of = sub(field, 1, 1), sub(field, 2)
  if kind == 'r' then return head .. '-' .. field .. ':' .. name end
  return head .. '-' .. kind .. text(#of) .. ':' .. of .. name
end

local function keepId(queue, field, job, life)
  if life > windowOf(queue) then call('SET', resultKey(queue, field), job, 'PX', text(life)) end
end

extend.keepOutcome = function(ctx, queue, job, given, outcome, life)
  call('SET', resultKey(queue, 'r' .. job), outcome, 'PX', text(life))
  if given and given ~= '' then
    keepId(queue, 'i' .. given, job, life)
    local first = queue.firsts and queue.firsts[job]
    if first then keepId(queue, 'i' .. first, job, life) end
  end
  queue.kept = math.max(queue.kept, ctx.now + life)
end

-- What is known under a field, as those of `even` and `odd`: i<id>, f<id> or r<job>.
extend.keptAs = function(ctx, queue, field)
  if queue.kept <= ctx.now or not find(field, '^[ifr]') then return nil end
  return call('GET', resultKey(queue, field)) or nil
end

-- Notes the id of a job for as long as its outcome is known: for the window, or for a life of its own that is longer.
extend.noteId = function(ctx, queue, field, job, wanted)
  noteIn(ctx, queue, field, job)
  queue.named = ctx.now
  keepId(queue, field, job, tonumber(wanted) or 0)
end

-- Another job has the id of one that was removed, which might be known by it for longer than the other.
extend.reusedId = function(ctx, queue, given)
  if queue.kept > ctx.now then call('DEL', resultKey(queue, 'f' .. given)) end
end

-- Ids are not known any more under these fields.
extend.forgetIds = function(ctx, queue, fields)
  call('HDEL', queue.even, unpack(fields))
  call('HDEL', queue.odd, unpack(fields))
  for _, field in ipairs(fields) do
    queue.noted[field] = nil
    if queue.kept > ctx.now then call('DEL', resultKey(queue, field)) end
  end
end
