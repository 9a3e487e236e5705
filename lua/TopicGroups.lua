-- Groups of a topic: their members get events, and give them back.
--
-- after Topic.lua

-- False if the stream has the group already.
local function startGroup(topic, group, from)
  local made = redis.pcall('XGROUP', 'CREATE', topic.entries, group, from, 'MKSTREAM')
  if type(made) ~= 'table' or not made.err then return true end
  if not find(made.err, 'BUSYGROUP', 1, true) then error(made) end
  return false
end

-- The stream has outlived what the hash knew of a group: the group goes on before the first event that it has not acknowledged.
-- Later ones that it had acknowledged are handed out again with the others: their keys are not known any more.
local function resumeGroup(topic, group)
  call('XREADGROUP', 'GROUP', group, RETURNED, 'COUNT', 1, 'STREAMS', topic.entries, '>')
  local pending = call('XPENDING', topic.entries, group)
  local from = pending[1] > 0 and text(timeOf(pending[2])) .. '-' .. text(numberOf(pending[2]) - 1) or eventId(topic)
  call('XGROUP', 'DESTROY', topic.entries, group)
  startGroup(topic, group, from)
  return from
end

local function described(id, count, fields)
  local key, trace = '', ''
  for at = 3, #fields, 2 do
    if fields[at] == 'k' then key = fields[at + 1] elseif fields[at] == 't' then trace = fields[at + 1] end
  end
  local crashes = count < CRASH and '' or ',' .. text(floor(count / CRASH))
  return '["' .. id .. '",' .. text(count % CRASH) .. ',' .. encoded(fields[2]) .. ',' .. encoded(key) .. ','
    .. encoded(match(fields[1], ' (.*)$') or '') .. ',' .. encoded(trace) .. crashes .. ']', key
end

local function handTo(ctx, member, items)
  if #items == 0 then return end
  local session, id = match(member.claim, '^([^/]*)/(.*)$')
  member.sent = member.sent + 1
  deliver(ctx, session, '["changed","' .. id .. '","deliver",' .. text(member.sent) .. ',[' .. concat(items, ',') .. ']]')
end

local function spend(group, member, count)
  member.credit, group.credit = member.credit - count, group.credit - count
end

-- Adds to the events that a group misses, or one of its members. The number of those that Redis has lost is not known.
local function miss(party, missed)
  party.missed = (party.missed < 0 or missed < 0) and -1 or party.missed + missed
end

-- The gap stays with the member until that acknowledges it: a delivery can be lost, and its process die.
local function tellGap(member, items, missed)
  miss(member, missed)
  member.gaps = member.gaps + 1
  items[#items + 1] = '["gap",' .. text(missed) .. ',' .. text(member.gaps) .. ']'
end

local unlockRemoved

-- To another consumer, without counting that as a delivery. The group misses what was removed from the stream. Answers how many
-- there are still.
local function shift(topic, group, consumer, ids, count)
  if #ids == 0 then return 0 end
  local args = { topic.entries, group.name, consumer, 0 }
  for _, id in ipairs(ids) do args[#args + 1] = id end
  if count then
    args[#args + 1], args[#args + 2] = 'RETRYCOUNT', text(count)
  end
  args[#args + 1] = 'JUSTID'
  local shifted = tryGroup('XCLAIM', unpack(args)) or {}
  miss(group, #ids - #shifted)
  if #shifted < #ids then unlockRemoved(topic, group, ids) end
  return #shifted
end

local function giveBack(topic, group, ids, count)
  local there = shift(topic, group, RETURNED, ids, count)
  group.returned = group.returned + there
end

local function eachKey(topic, group, act)
  if group.ordered == 0 then return end
  local prefix = 'k' .. group.index .. ':'
  for _, field in ipairs(call('HKEYS', topic.key)) do
    if sub(field, 1, #prefix) == prefix then act(field, match(call('HGET', topic.key, field), '^(%S+) ?(.*)$')) end
  end
end

-- The event of a key is done: the next one of the key can be handed out.
local function unlock(topic, group, field, rest)
  if rest == '' then
    call('HDEL', topic.key, field)
    return
  end
  call('HSET', topic.key, field, rest)
  group.parked = group.parked - 1
  giveBack(topic, group, { match(rest, '^%S+') }, 0)
end

-- Nothing is if the stream was deleted, and with it the group.
local function isPending(topic, group, id)
  return (tryGroup('XPENDING', topic.entries, group.name, id, id, 1) or {})[1] ~= nil
end

-- A member says that it has done an event that is not pending: it had the event when the stream was deleted. What the group had before
-- it was made again cost the member nothing.
local function hadRemoved(topic, group, id)
  return numberOf(id) >= group.first and not isPending(topic, group, id)
end

-- Some of these events were removed while members had them in hand: their keys are not known any more.
unlockRemoved = function(topic, group, ids)
  local among = {}
  for _, id in ipairs(ids) do among[id] = true end
  eachKey(topic, group, function(field, first, rest)
    if among[first] and not isPending(topic, group, first) then unlock(topic, group, field, rest) end
  end)
end

-- How many bytes of events this call may still read for groups.
local function roomOf(ctx)
  return MOST_BYTES - (ctx.handed or 0)
end

local function spendRoom(ctx, entry)
  ctx.handed = (ctx.handed or 0) + sizeOf(entry)
end

local function handReturned(ctx, topic, group, member, items)
  local count = math.min(member.credit, PAGE)
  local found = tryGroup('XPENDING', topic.entries, group.name, '-', '+', count, RETURNED) or {}
  if #found < math.min(count, group.returned) then
    -- Retention may have removed the others; where it may not, they were counted wrongly, and are none.
    if topic.protect == 0 then tellGap(member, items, group.returned - #found) end
    group.returned = #found
  end
  for _, pending in ipairs(found) do
    if roomOf(ctx) <= 0 then return end
    local id = pending[1]
    local entry = call('XCLAIM', topic.entries, group.name, member.claim, 0, id)[1]
    group.returned = group.returned - 1
    if entry then
      spendRoom(ctx, entry)
      items[#items + 1] = described(id, pending[4] + 1, entry[2])
      spend(group, member, 1)
    else
      -- It was deleted from the stream.
      call('XACK', topic.entries, group.name, id)
      tellGap(member, items, 1)
      unlockRemoved(topic, group, { id })
    end
  end
end

local function readNew(topic, group, member, count)
  local args = { 'XREADGROUP', 'GROUP', group.name, member.claim, 'COUNT', count, 'STREAMS', topic.entries, '>' }
  local found = tryGroup(unpack(args))
  if not found then
    startGroup(topic, group.name, '0')
    found = tryGroup(unpack(args))
  end
  return found[1] and found[1][2] or {}
end

-- The sizes of the next events are not known: if they may be too large together, it reads one after the other until all the others
-- fit.
local function readPage(ctx, topic, group, member, most)
  local page, count = {}, most * topic.largest <= roomOf(ctx) and most or 1
  repeat
    local entries = readNew(topic, group, member, count)
    for _, entry in ipairs(entries) do
      page[#page + 1] = entry
      spendRoom(ctx, entry)
    end
    if #entries < count then break end
    if topic.total - bytesOf(page[#page]) <= roomOf(ctx) then count = most - #page end
  until #page == most or roomOf(ctx) <= 0
  return page
end

-- False if the event has to wait for others of its key.
local function lockKey(topic, group, key, id)
  if group.ordered == 0 or key == '' then return true end
  local field = 'k' .. group.index .. ':' .. key
  local busy = call('HGET', topic.key, field)
  call('HSET', topic.key, field, busy and busy .. ' ' .. id or id)
  return not busy
end

local function handNew(ctx, topic, group, member, items, limit)
  local entries = readPage(ctx, topic, group, member, math.min(member.credit, PAGE, limit - group.cursor))
  if #entries == 0 then
    -- All that was to come has been deleted.
    tellGap(member, items, topic.number - group.cursor)
    group.cursor, group.stamp = topic.number, topic.stamp
    return
  end
  local parked = {}
  for _, entry in ipairs(entries) do
    local id, number = entry[1], numberOf(entry[1])
    if number ~= group.cursor + 1 then
      tellGap(member, items, number > group.cursor and number - group.cursor - 1 or -1)
    end
    group.cursor, group.stamp = number, timeOf(id)
    local item, key = described(id, 1, entry[2])
    if lockKey(topic, group, key, id) then
      items[#items + 1] = item
      spend(group, member, 1)
    else
      parked[#parked + 1] = id
    end
  end
  group.parked = group.parked + shift(topic, group, PARKED, parked, 0)
end

-- The next member with credit; it goes to the end. One whose session has ended gets nothing, and is reaped soon.
local function nextMember(ctx, group)
  while group.credit > 0 do
    local member = table.remove(group.list, 1)
    group.list[#group.list + 1] = member
    if member.credit > 0 then
      if isAlive(ctx, holderOf(member.claim)) then return member end
      spend(group, member, member.credit)
    end
  end
end

-- The number of the last event that a group may be handed.
local function limitOf(topic, group)
  if group.ordered == 0 or group.epoch == topic.epoch then return topic.number end
  return numberOf(call('HGET', topic.key, 'E' .. text(group.epoch + 1)) or '0-0')
end

-- An ordered group has acknowledged all that there was before an epoch: its members hear of that, and begin it together.
local function drainGroup(ctx, topic, group)
  if group.ordered == 0 or group.drained == topic.epoch then return end
  local drained = math.max(group.drained, group.epoch)
  while drained < topic.epoch and numberOf(call('HGET', topic.key, 'E' .. text(drained + 1)) or '0-0') <= group.cursor do
    drained = drained + 1
  end
  if drained == group.drained then return end
  local pending = tryGroup('XPENDING', topic.entries, group.name)
  if pending and pending[1] > 0 then return end
  group.drained = drained
  for _, member in ipairs(group.list) do handTo(ctx, member, { '["drained",' .. text(drained) .. ']' }) end
end

-- What a group misses, and no member has been told of, or has acknowledged.
local function tellMissed(ctx, group)
  if group.missed == 0 then return end
  for _, member in ipairs(group.list) do
    if isAlive(ctx, holderOf(member.claim)) then
      local items = {}
      tellGap(member, items, group.missed)
      group.missed = 0
      return handTo(ctx, member, items)
    end
  end
end

-- Hands events out for as long as there are any, and a member has credit.
local function dispatchGroup(ctx, topic, group)
  local limit = limitOf(topic, group)
  while group.credit > 0 do
    local fresh = limit > group.cursor and group.parked < MOST_PARKED
    if group.returned == 0 and not fresh then return end
    ctx.steps = (ctx.steps or 0) + 1
    if ctx.steps > MOST_PAGES or roomOf(ctx) <= 0 then return sooner(ctx, topic, ctx.now) end
    local member = nextMember(ctx, group)
    if not member then return end
    local items = {}
    if group.returned > 0 then
      handReturned(ctx, topic, group, member, items)
    else
      handNew(ctx, topic, group, member, items, limit)
    end
    handTo(ctx, member, items)
  end
end

local function unlockKey(topic, group, key, id)
  if group.ordered == 0 or key == '' then return end
  local field = 'k' .. group.index .. ':' .. key
  local first, rest = match(call('HGET', topic.key, field) or '', '^(%S+) ?(.*)$')
  if first == id then unlock(topic, group, field, rest) end
end

local function forgetKeys(topic, group)
  eachKey(topic, group, function(field) call('HDEL', topic.key, field) end)
end

-- A group keeps only the events that its members are working on, with their keys, and misses the others.
local function purgeGroup(topic, group)
  local missed = topic.number - group.cursor
  for _, consumer in ipairs({ RETURNED, PARKED, DELAYED }) do
    repeat
      local pending = tryGroup('XPENDING', topic.entries, group.name, '-', '+', PAGE, consumer) or {}
      local ids = {}
      for at, found in ipairs(pending) do ids[at] = found[1] end
      if #ids > 0 then call('XACK', topic.entries, group.name, unpack(ids)) end
      missed = missed + #ids
    until #pending == 0
  end
  eachKey(topic, group, function(field, first)
    local pending = tryGroup('XPENDING', topic.entries, group.name, first, first, 1)
    if pending and pending[1] then call('HSET', topic.key, field, first) else call('HDEL', topic.key, field) end
  end)
  miss(group, missed)
  group.returned, group.parked, group.cursor, group.stamp = 0, 0, topic.number, topic.stamp
end

-- A member had these events in hand when Redis lost the group, and the one that was made since began behind them: its own again, if
-- they are there still.
local function takeBack(topic, group, member, events)
  for id in string.gmatch(events, '%S+') do
    local entry = numberOf(id) < group.first and call('XRANGE', topic.entries, id, id)[1]
    local pending = entry and tryGroup('XPENDING', topic.entries, group.name, id, id, 1)
    if pending and #pending == 0 then
      local _, key = described(id, 1, entry[2])
      local consumer = member.claim
      if not lockKey(topic, group, key, id) then
        consumer, group.parked = PARKED, group.parked + 1
      elseif member.credit > 0 then
        spend(group, member, 1)
      else
        consumer, group.returned = RETURNED, group.returned + 1
      end
      local attempts = consumer == member.claim and 1 or 0
      call('XCLAIM', topic.entries, group.name, consumer, 0, id, 'RETRYCOUNT', attempts, 'FORCE', 'JUSTID')
    end
  end
end

local function memberOf(group, claim)
  for _, member in ipairs(group.list) do
    if member.claim == claim then return member end
  end
end

local function credited(ctx, group, id, credit)
  local member = memberOf(group, claimOf(ctx, id))
  if member then spend(group, member, -credit) end
end

-- A group that has no members is removed some time after the last one has left.
local function expectEnd(ctx, topic, group)
  if group.members == 0 and topic.abandon > 0 then sooner(ctx, topic, group.left + topic.abandon) end
end

-- What a member has not acknowledged goes to the others. After a crash, its events count that; otherwise its delivery does not count.
local function dismissMember(ctx, topic, claim, index, crashed)
  local group = groupAt(topic, index)
  call('HDEL', topic.key, 'x' .. claim)
  if not group then return end
  for at = #group.list, 1, -1 do
    if group.list[at].claim == claim then
      local member = table.remove(group.list, at)
      group.credit = group.credit - member.credit
      miss(group, member.missed)
      group.members = group.members - 1
    end
  end
  group.left = ctx.now
  expectEnd(ctx, topic, group)
  local change = crashed and CRASH or -1
  while true do
    local pending = tryGroup('XPENDING', topic.entries, group.name, '-', '+', PAGE, claim)
    if not pending then return end
    if #pending == 0 then break end
    local ids = {}
    for _, found in ipairs(pending) do
      local count = found[4] + change
      local counted = ids[count] or {}
      ids[count], counted[#counted + 1] = counted, found[1]
    end
    for count, counted in pairs(ids) do giveBack(topic, group, counted, count) end
  end
  call('XGROUP', 'DELCONSUMER', topic.entries, group.name, claim)
end

local function destroyGroup(topic, group)
  local index = group.index
  topic.trim = true
  tryGroup('XGROUP', 'DESTROY', topic.entries, group.name)
  call('HDEL', topic.key, 'g' .. index, 'm' .. index, 'N' .. index, 'G' .. group.name)
  forgetKeys(topic, group)
  topic.loaded[index] = false
end
