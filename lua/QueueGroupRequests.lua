-- Requests about a group of jobs, or all of them.
--
-- after Queue.lua
-- after QueueGroups.lua

-- queue.pauseGroup: no jobs of a group are handed out from now on, or again, also if a worker has asked for less haste
-- keys: all
-- args: group string, paused boolean
-- reply: ["paused"]
-- flags: allow-oom
handlers['queue.pauseGroup'] = function(ctx, key, group, paused)
  local state = changing(loadQueue(ctx, key), group)
  if paused == '1' then state.paused = 1 else state.paused, state.after = 0, 0 end
  return '["paused"]'
end

-- queue.slow: no jobs of a group, or of the queue if it is "", are handed out for so many ms
-- keys: all
-- args: group string, delay number
-- reply: ["slowed"]
-- flags: allow-oom
handlers['queue.slow'] = function(ctx, key, group, delay)
  local queue = loadQueue(ctx, key)
  local state = group == '' and queue or changing(queue, group)
  state.after = math.max(state.after, ctx.now + tonumber(delay))
  return '["slowed"]'
end

-- queue.purgeGroup: removes some of the jobs of a group that are not in work, and says whether there are more
-- keys: all
-- args: group string
-- reply: ["purged", count number, more boolean]
-- flags: allow-oom
handlers['queue.purgeGroup'] = function(ctx, key, group)
  local queue, prefix, count, found = loadQueue(ctx, key), prefixOf(group), 0, 0
  if queue.grouped > 0 then count, found = groups.purge(ctx, queue, '[' .. prefix, '(' .. prefix .. BEHIND, MOVED) end
  local more = count < found or found == MOVED
  if queue.awaited > 0 then extend.removedSome(ctx, queue, more) end
  return reply('purged', count, more)
end

-- queue.group: how many jobs a group has
-- keys: all
-- args: group string
-- reply: ["group", waiting number, delayed number, active number, paused boolean] | ["stale"] | ["missing"]
-- flags: allow-oom
handlers['queue.group'] = function(ctx, key, group)
  if isStale(ctx) then return STALE end
  local state = readGroup(readQueue(ctx, key), group)
  if not state then return MISSING end
  return reply('group', state.waiting, state.delayed, state.active, state.paused == 1)
end

-- queue.groups: some groups that have jobs or are paused, as `queue.group`, and the cursor of the next ones, "0" for none
-- keys: all
-- args: cursor string, count number
-- reply: ["groups", cursor string, groups json] | ["stale"]
-- flags: allow-oom
handlers['queue.groups'] = function(ctx, key, cursor, count)
  if isStale(ctx) then return STALE end
  local found = call('HSCAN', key, cursor, 'MATCH', 'g*', 'COUNT', count)
  local parts, fields = {}, found[2]
  for at = 1, #fields, 2 do
    local state = unpackQueueGroup(fields[at + 1])
    if state and state.waiting + state.delayed + state.active + state.paused > 0 then
      parts[#parts + 1] = '[' .. encoded(sub(fields[at], 2)) .. ',' .. text(state.waiting) .. ',' .. text(state.delayed)
        .. ',' .. text(state.active) .. ',' .. encoded(state.paused == 1) .. ']'
    end
  end
  return reply('groups', found[1], json('[' .. concat(parts, ',') .. ']'))
end
