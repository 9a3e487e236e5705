-- Pools of workers that end when no job waits: the actor tells them.
--
-- after Queue.lua
-- after QueueNotes.lua
-- after QueueWorkers.lua

extend.tellDrained = function(ctx, queue)
  if waitingIn(queue) > 0 then return end
  local claims = call('HGET', queue.key, 'e')
  call('HDEL', queue.key, 'e')
  queue.draining = 0
  tellMembers(ctx, claims or '', 'drained')
end

-- queue.drained: whether no job waits, and a worker has no job in hand. While jobs wait, the actor tells the worker when the last of
-- them has gone.
-- keys: all
-- args: id string
-- reply: ["drained", drained boolean] | ["missing"]
-- flags: allow-oom
handlers['queue.drained'] = function(ctx, key, id)
  local queue, worker, claim = askingWorker(ctx, key, id)
  if not worker then return MISSING end
  if waitingIn(queue) > 0 then
    local known = call('HGET', key, 'e') or ''
    if not find(known, claim .. ' ', 1, true) then call('HSET', key, 'e', known .. claim .. ' ') end
    queue.draining = 1
    return reply('drained', false)
  end
  for _, letter in ipairs(EVERY_LETTER) do
    if #pendingOf(queue[letter], 1, consumerOf(letter, claim)) > 0 then return reply('drained', false) end
  end
  return reply('drained', true)
end
