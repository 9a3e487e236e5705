-- Dead letters are read, offered again and removed.
--
-- after Queue.lua
-- after QueueNotes.lua
-- after QueueOffers.lua

-- queue.letters: dead letters behind an id, the oldest first: id, job, reason, attempts, crashes, error, body, id of the
-- producer, group, lines of the log
-- keys: all
-- args: behind string, count number
-- reply: ["letters", letters json]
-- flags: allow-oom
handlers['queue.letters'] = function(ctx, key, behind, count)
  local found = call('XRANGE', ctx.dead, behind == '' and '-' or '(' .. behind, '+', 'COUNT', count)
  local letters = {}
  for at, entry in ipairs(found) do
    local fields = entry[2]
    local parts = { encoded(entry[1]) }
    for _, name in ipairs({ 'j', 'w', 'n', 'c', 'm', 'b', 'i', 'g' }) do parts[#parts + 1] = encoded(fieldOf(fields, name) or '') end
    parts[#parts + 1] = encoded(linesOf(fieldOf(fields, 'o')))
    letters[at] = '[' .. concat(parts, ',') .. ']'
  end
  return reply('letters', json('[' .. concat(letters, ',') .. ']'))
end

-- queue.replay: offers the job of a dead letter again, at the end of its level; its attempts begin anew. It has a new id of its own, and
-- is known by its former one as by that of a producer. Another job that has its id is in the way, and so is the dead letter of the job
-- before it that has made it one. A job that runs after others is blocked by those of them that have not ended. Without `ordered` it
-- stays, and the answer is the number that it was first offered with: the jobs before it have smaller ones.
-- keys: all
-- args: id string, ordered boolean
-- reply: ["replayed", job string] | ["missing"] | ["taken"] | ["after", number number]
handlers['queue.replay'] = function(ctx, key, id, ordered)
  local queue = loadQueue(ctx, key)
  local fields = entryAt(queue.letters, id)
  if not fields then return MISSING end
  local former = fieldOf(fields, 'j')
  local given, first = fieldOf(fields, 'i') or former, nil
  if given ~= former and not split(given) then first = fieldOf(fields, 'f') or former end
  local wish, cause = { p = fieldOf(fields, 'p') }, fieldOf(fields, 'u')
  if wish.p and ordered ~= '1' then return reply('after', tonumber(match(first or given, '%d+$'))) end
  if call('HGET', queue.ids, given) or cause and entryAt(queue.letters, cause) then return '["taken"]' end
  if wish.p then extend.precede(ctx, queue, wish, true) end
  local group, blocked = fieldOf(fields, 'g'), extend.isBlocked(wish)
  local letter = LOWER[sub(former, 1, 1)]
  if group or blocked then letter = (group and groups.letters or HELD)[letter] end
  queue.number, queue.stamp = queue.number + 1, math.max(queue.stamp, ctx.now)
  local at = text(queue.stamp) .. '-' .. text(queue.number)
  local args, own = { queue[letter], at }, false
  for place = 1, #fields, 2 do
    -- The letter's own fields end with the first one of the job.
    own = own or fields[place] == 'b'
    if own and not find('eifqu', fields[place], 1, true) then args[#args + 1], args[#args + 2] = fields[place], fields[place + 1] end
  end
  args[#args + 1], args[#args + 2] = 'i', given
  if first then args[#args + 1], args[#args + 2] = 'f', first end
  -- A replayed job has as long to begin as it had when it was stored: its former id tells when that was.
  local left = tonumber(fieldOf(fields, 'e') or 0) - tonumber(match(former, '%d+'))
  if left > 0 then args[#args + 1], args[#args + 2] = 'e', text(queue.stamp + left) end
  call('XADD', unpack(args))
  if left > 0 then extend.expires(ctx, queue, letter .. at, queue.stamp + left) end
  if blocked then
    holdJobs(queue, consumerOf(letter, BLOCKED), { at })
    extend.blocked(ctx, queue, letter .. at, wish)
  elseif group then
    holdJobs(queue, consumerOf(letter, RETURNED), { at })
    groups.offered(queue, letter, at, group, false)
  else
    queue[WAITING[letter]] = queue[WAITING[letter]] + 1
  end
  call('HSET', queue.ids, given, letter .. at)
  if first then
    call('HSET', queue.ids, first, letter .. at)
    call('HSET', key, 'F' .. given, first)
  end
  if given ~= former and first ~= former then
    noteIn(ctx, queue, 'i' .. former, letter .. at)
    queue.named = ctx.now
  end
  call('XDEL', queue.letters, id)
  queue.recount = true
  return reply('replayed', letter .. at)
end

-- queue.discard: removes dead letters: those with these ids, or all
-- keys: all
-- args: ids string
-- reply: ["discarded", count number]
-- flags: allow-oom
handlers['queue.discard'] = function(ctx, key, ids)
  local queue = loadQueue(ctx, key)
  local count = 0
  if ids == '' then
    count = call('XLEN', queue.letters)
    call('UNLINK', queue.letters)
  else
    for id in string.gmatch(ids, '%S+') do count = count + call('XDEL', queue.letters, id) end
  end
  queue.recount = true
  return reply('discarded', count)
end
