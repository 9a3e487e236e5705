-- Jobs that are cancelled while a worker has them. Such a job has ended, but it keeps its slots of the queue and of its group until its
-- worker says that the handler has ended, or has never begun, or until the session of the worker ends.
--
-- after Queue.lua
-- after QueueHandOut.lua
--
-- The entry of such a job is deleted, and the job stays pending under the claim of its worker. `j<job>` of the hash has its group, ''
-- for none. `cancelled` of the queue's record counts these fields: while there are none, no request looks for any.

-- A job that a worker has in hand ends, and its handler is interrupted.
extend.cancel = function(ctx, queue, letter, id, fields, holder)
  local job = letter .. id
  endJob(ctx, queue, letter, id, fields, '["cancelled"]', true)
  call('HSET', queue.key, 'j' .. job, fieldOf(fields, 'g') or '')
  queue.cancelled = queue.cancelled + 1
  local session, worker = match(holder, '^([^/]*)/(.*)$')
  deliver(ctx, session, reply('changed', worker, 'cancel', job))
end

-- Whether a job was cancelled, and keeps its slots.
extend.isCancelled = function(queue, job)
  return call('HGET', queue.key, 'j' .. job) and true or false
end

-- The handler of a job has ended: if the job was cancelled, it loses its slots, and nothing else becomes of it. Answers whether it was.
extend.freed = function(queue, letter, id)
  local field = 'j' .. letter .. id
  local group = call('HGET', queue.key, field)
  if not group then return false end
  call('HDEL', queue.key, field)
  call('XACK', queue[letter], JOBS, id)
  queue.active, queue.cancelled = queue.active - 1, queue.cancelled - 1
  if groups.levels[letter] then groups.freed(queue, group) end
  return true
end
