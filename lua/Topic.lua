-- A topic: a stream of events, read by subscribers as it is, and by groups whose events this actor hands out.
--
-- kinds: topic: hash, entries, even, odd, retries
--
-- The id of an event is "<ms>-<number>". Numbers are contiguous, so a reader notices what was trimmed or lost; times never
-- decrease, so the ids do neither. An entry of the stream has a first field that is named "<bytes of all events so far>
-- <publisher>", with the JSON, and where it has them: k <key> i <id of the publisher's> t <trace>. Two more fields would cost
-- a reader more than all the rest of the entry. After a change of the shards, the bytes are followed by ".<epoch>".
--
-- A topic has a shard in each of several partitions, and a key belongs to one of them. A change of their number begins an
-- epoch: all shards are *sealed*, the first one, which decides, before the others. A sealed shard refuses what is published,
-- until all are sealed and it is *opened*. So every event of an epoch was stored before every event of the next one, and a
-- reader that keeps order finishes an epoch in all shards before the next one. `shards` counts those that keys belong to now: 0 is one
-- that no process has named. `width` counts all that ever had events.
--
-- The hash:
--   s                  record Topic
--   o<session>/<id>    a member: it publishes or subscribes, and hears of changes
--   N<index>           the name of a group; G<name> its index
--   g<index>           record TopicGroup
--   m<index>           the members of a group: "<session>/<id> <credit> <deliveries so far> <gaps so far> <missed> ...", where
--                      `missed` counts the events of the gaps that the member has not acknowledged; -1 for a number that is
--                      not known
--   x<session>/<id>    the index of a member's group
--   k<index>:<key>     the events of a key, if the group is ordered: "<in work> <parked> ...", as ids
--   E<epoch>           the last event before an epoch
--   L<epoch>           "<shards before it> <time>"
-- `even` and `odd` have what was published in turns of `window` ms: i<id> of a publisher's, and p<node> the last number of a
-- coordinator's publications. `retries` is a zset of "<index>:<event>" by the time of the next delivery.
--
-- A group is a consumer group of the stream. Its consumers are its members by their claims, and these:
local RETURNED, PARKED, DELAYED = '-', '*', '~'
-- The count of deliveries of a pending event is its attempts, and CRASH for each attempt that ended with its member's session.
-- A schedule without an end makes millions of attempts.
local CRASH = 2 ^ 32
-- An ordered group hands out one event of a key at a time. Later ones are parked, so order needs no assignment of keys to
-- members, and outlives every member.
-- It begins an epoch when all shards have nothing of the former one left: its members tell each shard.
-- `held` of a topic says that a group keeps events beyond the limits: 0 or 1; `noted` when an id was published last.
-- record Topic 4: number, stamp, length, bytes, age, abandon, window, turn, total, members, groups, trimmed, protect, shards,
--   ring, epoch, width, open, decided, held, noted
-- `missed` of a group is of gaps that no member has.
-- record TopicGroup 4: ordered, members, returned, parked, cursor, stamp, left, epoch, drained, made, first, missed

-- Lua unpacks some thousand values at most; the fields are even.
local MOST_PARKED, PAGE, MOST_GROUPS, MOST_PAGES, MOST_FIELDS = 1024, 64, 64, 512, 2000

-- -----------------------------------------------------------------------------
-- State: read once in a call, and written at its end
-- -----------------------------------------------------------------------------

local function eventId(topic)
  return text(topic.stamp) .. '-' .. text(topic.number)
end

local function numberOf(id)
  return tonumber(match(id, '%-(%d+)$'))
end

local function timeOf(id)
  return tonumber(match(id, '^%d+'))
end

local function readTopic(ctx, key)
  local packed = call('HGET', key, 's')
  local topic = packed and unpackTopic(packed) or {
    number = 0, stamp = 0, length = 0, bytes = 0, age = 0, abandon = ABANDONED, window = 0, turn = 0, total = 0,
    members = 0, groups = 0, trimmed = 0, protect = 1, shards = 0, ring = 0, epoch = 0, width = 1, open = 1,
    decided = 0, held = 0, noted = 0
  }
  topic.known, topic.rung = packed and true, topic.ring
  -- What is written at the end of the call: for `even` or `odd`, and where each field of it stands.
  topic.published, topic.places, topic.last, topic.nodes = {}, {}, {}, {}
  topic.key, topic.entries, topic.even, topic.odd, topic.retries = key, ctx.entries, ctx.even, ctx.odd, ctx.retries
  topic.loaded = {}
  return topic
end

local function groupAt(topic, index)
  local group = topic.loaded[index]
  if group == nil then
    local found = call('HMGET', topic.key, 'g' .. index, 'm' .. index, 'N' .. index)
    group = found[1] and unpackTopicGroup(found[1]) or false
    if group then
      group.name, group.index, group.list = found[3], index, {}
      group.before, group.beforeList, group.credit = found[1], found[2], 0
      for claim, credit, sent, gaps, missed in string.gmatch(found[2] or '', '(%S+) (%d+) (%d+) (%d+) (-?%d+)') do
        group.list[#group.list + 1] = {
          claim = claim, credit = tonumber(credit), sent = tonumber(sent), gaps = tonumber(gaps), missed = tonumber(missed)
        }
        group.credit = group.credit + tonumber(credit)
      end
    end
    topic.loaded[index] = group
  end
  return group
end

local function sooner(ctx, topic, at)
  if not topic.next or at < topic.next then topic.next = at end
end

-- -----------------------------------------------------------------------------
-- Groups
-- -----------------------------------------------------------------------------

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

-- A command about a group; false if that has expired with its stream.
local function tryGroup(...)
  local answered = redis.pcall(...)
  if type(answered) ~= 'table' or not answered.err then return answered or {} end
  if find(answered.err, 'NOGROUP', 1, true) or find(answered.err, 'requires the key to exist', 1, true) then return false end
  error(answered)
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

-- Some of these events were removed while members had them in hand: their keys are not known any more.
unlockRemoved = function(topic, group, ids)
  local among = {}
  for _, id in ipairs(ids) do among[id] = true end
  eachKey(topic, group, function(field, first, rest)
    local pending = among[first] and tryGroup('XPENDING', topic.entries, group.name, first, first, 1)
    if pending and not pending[1] then unlock(topic, group, field, rest) end
  end)
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
    local id = pending[1]
    local entry = call('XCLAIM', topic.entries, group.name, member.claim, 0, id)[1]
    group.returned = group.returned - 1
    if entry then
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

-- False if the event has to wait for others of its key.
local function lockKey(topic, group, key, id)
  if group.ordered == 0 or key == '' then return true end
  local field = 'k' .. group.index .. ':' .. key
  local busy = call('HGET', topic.key, field)
  call('HSET', topic.key, field, busy and busy .. ' ' .. id or id)
  return not busy
end

local function handNew(ctx, topic, group, member, items, limit)
  local entries = readNew(topic, group, member, math.min(member.credit, PAGE, limit - group.cursor))
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
    if ctx.steps > MOST_PAGES then return sooner(ctx, topic, ctx.now) end
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
      for _, found in ipairs(pending) do call('XACK', topic.entries, group.name, found[1]) end
      missed = missed + #pending
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

-- What a member has not acknowledged goes to the others. After a crash, its events count that.
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
  while true do
    local pending = tryGroup('XPENDING', topic.entries, group.name, '-', '+', PAGE, claim)
    if not pending then return end
    if #pending == 0 then break end
    local ids = {}
    for _, found in ipairs(pending) do
      local count = found[4] + (crashed and CRASH or 0)
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

-- -----------------------------------------------------------------------------
-- Retention
-- -----------------------------------------------------------------------------

local function eachGroup(topic, act)
  for index = 1, topic.groups do
    local group = groupAt(topic, text(index))
    if group then act(group) end
  end
end

-- Number and time of the first event that must stay for a group; nothing if there is none. An ordered group needs its events
-- to know their keys, so it loses none. What XPENDING counts is truer than what was counted here.
local function neededFrom(topic)
  local number, stamp
  eachGroup(topic, function(group)
    if topic.protect == 0 and group.ordered == 0 then return end
    local needed, at = group.cursor + 1, group.stamp
    local pending = tryGroup('XPENDING', topic.entries, group.name)
    if pending then
      group.returned, group.parked = 0, 0
      for _, consumer in ipairs(pending[4] or {}) do
        if consumer[1] == RETURNED then group.returned = tonumber(consumer[2]) end
        if consumer[1] == PARKED then group.parked = tonumber(consumer[2]) end
      end
      if pending[1] > 0 then needed, at = numberOf(pending[2]), timeOf(pending[2]) end
    end
    if not number or needed < number then number, stamp = needed, at end
  end)
  return number, stamp
end

local function oldestEvent(topic)
  return call('XRANGE', topic.entries, '-', '+', 'COUNT', 1)[1]
end

local function bytesOf(entry)
  return tonumber(match(entry[2][1], '^%d+')) or 0
end

-- How many events may stay, by length and bytes.
local function wantedLength(topic, length)
  local wanted = topic.length > 0 and math.min(length, topic.length) or length
  if topic.bytes == 0 or wanted == 0 then return wanted end
  local oldest = oldestEvent(topic)
  local size = oldest and topic.total - bytesOf(oldest) or 0
  -- Sizes differ, so this is an estimate, made again with the next trimming.
  if size > topic.bytes then wanted = math.min(wanted, floor(length * topic.bytes / size)) end
  return wanted
end

-- Subscribers hear of events behind the ones they have read by later events only, and there are none now.
local function tellEmptied(ctx, topic)
  announce(ctx, topic.key, 'emptied', eventId(topic))
end

-- How many publications there are between two trimmings, or acknowledgements of a group that holds events back.
local function stepOf(topic)
  return topic.length > 0 and math.max(1, math.min(PAGE, floor(topic.length / 8))) or PAGE
end

local function trimTopic(ctx, topic)
  topic.trimmed, topic.held = topic.number, 0
  local number, stamp = neededFrom(topic)
  local length = call('XLEN', topic.entries)
  if length == 0 then return end
  local wanted = wantedLength(topic, length)
  if number and wanted < length and wanted < topic.number - number + 1 then
    wanted, topic.held = topic.number - number + 1, 1
  end
  if wanted < length then call('XTRIM', topic.entries, 'MAXLEN', '=', text(wanted)) end
  if topic.age > 0 then
    local time, from = ctx.now - topic.age, '-0'
    -- Events that a group needs stay, whatever their age.
    if number and stamp <= time then time, from, topic.held = stamp, '-' .. text(number), 1 end
    call('XTRIM', topic.entries, 'MINID', '=', text(time) .. from)
    local left = oldestEvent(topic)
    topic.ring = left and timeOf(left[1]) > time and timeOf(left[1]) + topic.age or 0
  end
  if call('XLEN', topic.entries) == 0 then tellEmptied(ctx, topic) end
end

local function lifeOf(topic, hasGroups)
  if topic.window == 0 then return ABANDONED end
  if topic.age == 0 or hasGroups and topic.abandon == 0 then return nil end
  return math.max(topic.age, hasGroups and topic.abandon or 0, topic.members > 0 and ABANDONED or 0) + 1000
end

-- For good, if there is no life.
local function keepFor(key, life)
  if life then call('PEXPIRE', key, text(life)) else call('PERSIST', key) end
end

-- At the end of a call: hands events out, trims, and writes what has changed.
local function finishTopic(ctx, topic)
  if topic.groups > 0 then
    eachGroup(topic, function(group)
      tellMissed(ctx, group)
      dispatchGroup(ctx, topic, group)
      drainGroup(ctx, topic, group)
    end)
  end
  if topic.trim or topic.number - topic.trimmed >= stepOf(topic) then trimTopic(ctx, topic) end
  local key = topic.key
  for node, number in pairs(topic.nodes) do
    topic.published[#topic.published + 1], topic.published[#topic.published + 2] = 'p' .. node, number
  end
  for index, group in pairs(topic.loaded) do
    if group then
      local list = {}
      for at, member in ipairs(group.list) do
        list[at] = concat({ member.claim, text(member.credit), text(member.sent), text(member.gaps), text(member.missed) }, ' ')
      end
      local packed, members = packTopicGroup(group), concat(list, ' ')
      if packed ~= group.before or members ~= group.beforeList then
        call('HSET', key, 'g' .. index, packed, 'm' .. index, members)
      end
    end
  end
  local groups = false
  eachGroup(topic, function() groups = true end)
  -- When it is made again, the time makes its ids different.
  if topic.members == 0 and not groups and call('XLEN', topic.entries) == 0 then
    call('DEL', topic.entries, topic.retries)
    call('ZREM', ctx.dues, '@' .. sub(key, #ctx.prefix + 1))
    -- Ids are known for as long as if the topic were there, and the hash says in which turn they are. Other shards may have
    -- events, and the first one knows how many there are.
    local left = topic.noted + 2 * windowOf(topic) - ctx.now
    local life = topic.epoch == 0 and 0 or lifeOf(topic, false)
    if left <= 0 then call('DEL', topic.even, topic.odd) end
    if left <= 0 and life == 0 then
      call('DEL', key)
    else
      call('HSET', key, 's', packTopic(topic))
      keepFor(key, life and math.max(life, left))
    end
    return
  end
  if topic.age > 0 and topic.ring <= ctx.now and #topic.published > 0 then topic.ring = ctx.now + topic.age end
  if topic.ring > ctx.now and topic.ring ~= topic.rung then sooner(ctx, topic, topic.ring + 1) end
  call('HSET', key, 's', packTopic(topic))
  if #topic.published > 0 then
    local turn = topic.turn % 2 == 0 and topic.even or topic.odd
    for from = 1, #topic.published, MOST_FIELDS do
      call('HSET', turn, unpack(topic.published, from, math.min(#topic.published, from + MOST_FIELDS - 1)))
    end
    call('PEXPIRE', turn, text(2 * windowOf(topic)))
  end
  local life = lifeOf(topic, groups)
  keepFor(key, life)
  keepFor(topic.entries, life)
  if groups then keepFor(topic.retries, life) end
  if topic.next then alarm(ctx, key, math.max(0, topic.next - ctx.now)) end
end

local function loadTopic(ctx, key)
  ctx.topics = ctx.topics or {}
  local topic = ctx.topics[key]
  if not topic then
    topic = readTopic(ctx, key)
    -- The stream may have outlived the hash.
    if not topic.known then
      local last = call('XREVRANGE', topic.entries, '+', '-', 'COUNT', 1)[1]
      if last then
        topic.stamp, topic.number = timeOf(last[1]), numberOf(last[1])
        topic.total = bytesOf(last)
      end
    end
    ctx.topics[key] = topic
    later(ctx, key, function() finishTopic(ctx, topic) end)
  end
  return topic
end

-- -----------------------------------------------------------------------------
-- Publish
-- -----------------------------------------------------------------------------

-- The last number that a coordinator has published under.
local function lastOf(topic, node, now, before)
  local last = topic.last[node]
  if not last then
    local field = 'p' .. node
    last = tonumber(call('HGET', now, field) or call('HGET', before, field) or '0')
    topic.last[node] = last
  end
  return last
end

local function note(topic, field, value)
  local published, at = topic.published, topic.places[field]
  if not at then
    at = #published + 1
    topic.places[field], published[at] = at, field
  end
  published[at + 1] = value
end

-- What is about an event besides its number, in one argument, which mostly is the same for all of a call: "<epoch> <node>
-- <after> <bytes of key> <of id> <of trace> " and then key, id, trace and publisher.
local function originOf(ctx, about)
  local origins = ctx.origins
  if not origins then
    origins = {}
    ctx.origins = origins
  end
  local origin = origins[about]
  if not origin then
    local epoch, node, after, key, id, trace, at = match(about, '^(%d+) (%S+) (%S*) (%d+) (%d+) (%d+) ()')
    local ofId, ofTrace = at + key, at + key + id
    local ofPublisher = ofTrace + trace
    origin = {
      epoch = tonumber(epoch), node = node, after = after, key = sub(about, at, ofId - 1), id = sub(about, ofId, ofTrace - 1),
      trace = sub(about, ofTrace, ofPublisher - 1), publisher = sub(about, ofPublisher), size = key + id + trace
    }
    origins[about] = origin
  end
  return origin
end

-- The event that was published under an id.
local function eventOf(topic, id, now, before)
  local field = 'i' .. id
  local at = topic.places[field]
  return at and topic.published[at + 1] or call('HGET', now, field) or call('HGET', before, field)
end

-- What stands in front of the number and behind the bytes of each event of this call.
local function stampTopic(ctx, topic)
  if topic.time then return end
  topic.stamp = math.max(topic.stamp, ctx.now)
  topic.time = text(topic.stamp) .. '-'
  topic.mark = topic.epoch > 0 and '.' .. text(topic.epoch) .. ' ' or ' '
end

-- Whether what an event follows was answered with a tag. Several events can follow one request.
local function follows(ctx, after)
  local count = #ctx.replies
  if ctx.followed ~= count then ctx.leader = ctx.replies[count] or '' end
  ctx.followed = count + 1
  return match(ctx.leader, '^%["(%w+)"') == after
end

-- topic.publish: appends an event, once for the number of a coordinator's publication, and once for an id. It may be given
-- the tag that the request which it follows in the batch must have been answered with: then it is stored whatever the epoch,
-- since it cannot be stored anywhere else in the same step. With "-" as the tag, that request is not made again: the answer says
-- whether the event was stored with it.
-- keys: all
-- args: value string, about string, number number
-- reply: ["published", event string] | ["duplicate", event string] | ["skipped"] | ["moved"]
handlers['topic.publish'] = function(ctx, hash, value, about, number)
  local origin = originOf(ctx, about)
  local after, topic, node, id = origin.after, loadTopic(ctx, hash), origin.node, origin.id
  local fits = after == '' or after ~= '-' and follows(ctx, after)
  local now, before = turnsOf(ctx, topic)
  if tonumber(number) <= lastOf(topic, node, now, before) then return reply('duplicate', '') end
  -- One that has failed may be made again, with what follows it.
  if not fits then return after ~= '-' and find(ctx.leader, '["failed"', 1, true) == 1 and ctx.leader or '["skipped"]' end
  local known = id ~= '' and eventOf(topic, id, now, before)
  if known then return reply('duplicate', known) end
  if (origin.epoch ~= topic.epoch or topic.open == 0) and after == '' then return '["moved"]' end
  stampTopic(ctx, topic)
  local total = topic.total + #value + origin.size
  local event = topic.time .. text(topic.number + 1)
  if origin.size == 0 then
    call('XADD', topic.entries, event, text(total) .. topic.mark .. origin.publisher, value)
  else
    call('XADD', topic.entries, event, text(total) .. topic.mark .. origin.publisher, value, 'k', origin.key, 'i', id,
      't', origin.trace)
  end
  topic.number, topic.total = topic.number + 1, total
  topic.last[node] = tonumber(number)
  topic.nodes[node] = number
  if id ~= '' then
    topic.noted = ctx.now
    note(topic, 'i' .. id, event)
  end
  return '["published","' .. event .. '"]'
end

-- topic.publishAll: appends events without key, id and trace: their values behind one another, and the bytes of each. They are
-- stored once, and have the numbers behind that of the first one.
-- keys: all
-- args: values string, sizes string, about string, number number
-- reply: ["published", event string] | ["duplicate"] | ["moved"]
handlers['topic.publishAll'] = function(ctx, hash, values, sizes, about, number)
  local origin, topic = originOf(ctx, about), loadTopic(ctx, hash)
  local node = origin.node
  local now, before = turnsOf(ctx, topic)
  if tonumber(number) <= lastOf(topic, node, now, before) then return '["duplicate"]' end
  if origin.epoch ~= topic.epoch or topic.open == 0 then return '["moved"]' end
  stampTopic(ctx, topic)
  local entries, time, last, total, at = topic.entries, topic.time, topic.number, topic.total, 1
  local first, rest = time .. text(last + 1), topic.mark .. origin.publisher
  for size in string.gmatch(sizes, '%d+') do
    size = tonumber(size)
    last, total = last + 1, total + size
    call('XADD', entries, time .. text(last), text(total) .. rest, sub(values, at, at + size - 1))
    at = at + size
  end
  topic.number, topic.total = last, total
  topic.last[node] = tonumber(number)
  topic.nodes[node] = number
  return reply('published', first)
end

-- The lowest free index is the new group's.
local function makeGroup(ctx, topic, name, from, ordered, epoch)
  local index
  for at = 1, MOST_GROUPS do
    if not groupAt(topic, text(at)) then
      index = text(at)
      break
    end
  end
  if not index then return nil end
  if from == '' then from = eventId(topic) end
  -- It misses what was removed behind an event that it is to begin after.
  local last = numberOf(from)
  if not startGroup(topic, name, from) then from, epoch, last = resumeGroup(topic, name), 0, nil end
  local before = call('XREVRANGE', topic.entries, from, '-', 'COUNT', 1)[1]
  local oldest = not before and oldestEvent(topic)
  local group = {
    ordered = ordered, credit = 0, members = 0, returned = 0, parked = 0, left = 0, name = name, index = index, list = {},
    cursor = before and numberOf(before[1]) or oldest and numberOf(oldest[1]) - 1 or topic.number,
    stamp = before and timeOf(before[1]) or 0, epoch = epoch, drained = epoch, made = ctx.now
  }
  group.first, group.missed = group.cursor + 1, math.max(0, group.cursor - (last or group.cursor))
  topic.loaded[index], topic.groups = group, math.max(topic.groups, tonumber(index))
  call('HSET', topic.key, 'G' .. name, index, 'N' .. index, name)
  return group
end

-- -----------------------------------------------------------------------------
-- Members
-- -----------------------------------------------------------------------------

-- The numbers of shards that there were while ids are known that were published then, and for how long they still are.
local function formerOf(ctx, topic)
  local former = {}
  for epoch = topic.epoch, 1, -1 do
    local shards, at = match(call('HGET', topic.key, 'L' .. text(epoch)) or '', '^(%d+) (%d+)$')
    local left = at and tonumber(at) + 2 * windowOf(topic) - ctx.now or 0
    if left <= 0 then break end
    former[#former + 1] = '[' .. shards .. ',' .. text(left) .. ']'
  end
  return json('[' .. concat(former, ',') .. ']')
end

-- How it is kept, and when that was decided: as members say when they join.
local function keptOf(topic)
  return json('[' .. concat({ text(topic.decided), text(topic.length), text(topic.bytes), text(topic.age), text(topic.abandon),
    text(topic.window), tostring(topic.protect == 1) }, ',') .. ']')
end

-- topic.join: becomes a member, and says how the topic is kept: in events, bytes and ms (0 for no limit), how long a group
-- without members is kept, how long ids are known, and whether what a group still needs is kept. The last member decides that:
-- `decided` is -1 for one that does so now, the number that was answered for one that did so before, or knows it from another shard,
-- and 0 for one that leaves that as it is. `shards` counts for a topic that is new, and is 0 for a process that names no number.
-- keys: all
-- args: id string, decided number, length number, bytes number, age number, abandon number, window number, protect boolean, shards number
-- reply: ["joined", number number, last string, epoch number, shards number, width number, open number, former json, kept json]
handlers['topic.join'] = function(ctx, key, id, decided, length, bytes, age, abandon, window, protect, shards)
  local topic = loadTopic(ctx, key)
  if topic.window == 0 and topic.epoch == 0 then
    topic.shards, topic.width = tonumber(shards), math.max(1, tonumber(shards))
  end
  decided = decided == '-1' and math.max(topic.decided + 1, ctx.now) or tonumber(decided)
  if decided > topic.decided or topic.window == 0 then
    topic.length, topic.bytes, topic.age = tonumber(length), tonumber(bytes), tonumber(age)
    topic.abandon = tonumber(abandon)
    if topic.window ~= tonumber(window) then
      if topic.window > 0 then announce(ctx, key, 'window', tonumber(window)) end
      topic.window, topic.current = tonumber(window), nil
      -- What is known stays so for one of the new turns at least: they do not follow the former ones.
      topic.turn = floor(ctx.now / topic.window) + 1
    end
    topic.protect, topic.trim, topic.decided = protect == '1' and 1 or 0, true, decided
    -- How long groups are kept may have been for ever.
    eachGroup(topic, function(group) expectEnd(ctx, topic, group) end)
  end
  if enrol(ctx, key, id, PERMANENT) then topic.members = topic.members + 1 end
  if topic.number > 0 and call('XLEN', topic.entries) == 0 then
    -- It may not have heard of that. Its mailbox tells it behind what was read of the stream before.
    post(ctx, ctx.session, '["changed","' .. id .. '","emptied","' .. eventId(topic) .. '"]')
  end
  return reply('joined', topic.number, eventId(topic), topic.epoch, topic.shards, topic.width, topic.open, formerOf(ctx, topic),
    keptOf(topic))
end

-- topic.seal: ends the epoch of a shard, unless it is in this one or in a later one already, which is answered. `width` is how many
-- shards are known to have had events.
-- keys: all
-- args: epoch number, shards number, width number
-- reply: ["sealed", epoch number, shards number, width number, open number, former json, groups json, kept json]
-- flags: allow-oom
handlers['topic.seal'] = function(ctx, key, epoch, shards, width)
  local topic = loadTopic(ctx, key)
  if tonumber(epoch) > topic.epoch then
    call('HSET', key, 'E' .. epoch, eventId(topic), 'L' .. epoch, text(math.max(1, topic.shards)) .. ' ' .. text(ctx.now))
    topic.epoch, topic.shards, topic.open, topic.time = tonumber(epoch), tonumber(shards), 0, nil
    topic.width = math.max(topic.width, topic.shards)
    announce(ctx, key, 'epoch', topic.epoch)
  end
  -- One that has lost its data hears of all shards again.
  topic.width = math.max(topic.width, tonumber(width))
  local groups = {}
  eachGroup(topic, function(group) groups[#groups + 1] = '[' .. encoded(group.name) .. ',' .. text(group.ordered) .. ']' end)
  return reply('sealed', topic.epoch, topic.shards, topic.width, topic.open, formerOf(ctx, topic),
    json('[' .. concat(groups, ',') .. ']'), keptOf(topic))
end

-- topic.open: all shards are sealed, so this one takes in events of the epoch. It gets the groups of the others, given as
-- JSON, at its first event of the epoch.
-- keys: all
-- args: epoch number, groups string
-- reply: ["opened", epoch number]
-- flags: allow-oom
handlers['topic.open'] = function(ctx, key, epoch, groups)
  local topic = loadTopic(ctx, key)
  if tonumber(epoch) == topic.epoch and topic.open == 0 then
    for _, group in ipairs(cjson.decode(groups)) do
      if not call('HGET', key, 'G' .. group[1]) then
        local made = makeGroup(ctx, topic, group[1], call('HGET', key, 'E' .. epoch), group[2], topic.epoch - 1)
        if made then
          made.left = ctx.now
          expectEnd(ctx, topic, made)
        end
      end
    end
    topic.open = 1
  end
  return reply('opened', topic.epoch)
end

-- topic.mark: the last event before an epoch, if the shard is in that one already
-- keys: all
-- args: epoch number
-- reply: ["mark", event string] | ["early"]
-- flags: no-writes
handlers['topic.mark'] = function(ctx, key, epoch)
  local topic = readTopic(ctx, key)
  if topic.epoch < tonumber(epoch) then return '["early"]' end
  return reply('mark', call('HGET', key, 'E' .. epoch) or '0-0')
end

-- topic.find: the event that was published under an id
-- keys: all
-- args: id string
-- reply: ["found", event string]
-- flags: no-writes
handlers['topic.find'] = function(ctx, key, id)
  return reply('found', eventOf(readTopic(ctx, key), id, ctx.even, ctx.odd) or '')
end

local function orderOf(ordered)
  return ordered == '1' and 1 or 0
end

-- topic.consume: becomes a member of a group, with credit for so many events. A group that is new begins after `from`, or
-- with the next event. A member that asks again hears all events that it has not acknowledged, how many it misses in all gaps up to
-- a number that it has not acknowledged, and the number of deliveries to it so far: a delivery among these that comes later is old.
-- Of events that were purged it hears the ids.
-- `made` tells a group from one of that name that Redis has lost: 0 for a member that knows none, otherwise what it was answered, with
-- the events that it had in hand.
-- keys: all
-- args: id string, name string, from string, credit number, ordered boolean, made number, events string
-- reply: ["joined", index string, sent number, drained number, epoch number, made number, unacknowledged json] | ["full"] | ["ordering"]
handlers['topic.consume'] = function(ctx, key, id, name, from, credit, ordered, made, events)
  local topic = loadTopic(ctx, key)
  local claim, index = claimOf(ctx, id), call('HGET', key, 'G' .. name)
  local group = index and groupAt(topic, index)
    -- While this shard is sealed, others may still take in events of the former epoch.
    or makeGroup(ctx, topic, name, from, orderOf(ordered), from == '' and topic.epoch + topic.open - 1 or 0)
  if not group then return '["full"]' end
  if group.ordered ~= orderOf(ordered) then return '["ordering"]' end
  index = group.index
  if call('HSET', key, 'x' .. claim, index) == 1 then
    local member = { claim = claim, credit = tonumber(credit), sent = 0, gaps = 0, missed = 0 }
    group.list[#group.list + 1] = member
    group.members, group.credit = group.members + 1, group.credit + tonumber(credit)
    own(ctx, key, id, PERMANENT)
    if made ~= '0' and tonumber(made) ~= group.made then takeBack(topic, group, member, events) end
  end
  local items, member = {}, memberOf(group, claim)
  if member and member.missed ~= 0 then
    items[1] = '["missed",' .. text(member.missed) .. ',' .. text(member.gaps) .. ']'
  end
  for _, pending in ipairs(tryGroup('XPENDING', topic.entries, name, '-', '+', 1024, claim) or {}) do
    local entry = call('XRANGE', topic.entries, pending[1], pending[1])[1]
    -- If its delivery was lost too, the member gives it back.
    items[#items + 1] = entry and described(pending[1], pending[4], entry[2]) or '["removed","' .. pending[1] .. '"]'
  end
  return reply('joined', index, member and member.sent or 0, group.drained, group.epoch, group.made,
    json('[' .. concat(items, ',') .. ']'))
end

-- topic.begin: no shard has anything left for a group of what there was before an epoch, so the group begins that epoch
-- keys: all
-- args: name string, epoch number
-- reply: ["begun"]
-- flags: allow-oom
handlers['topic.begin'] = function(ctx, key, name, epoch)
  local topic = loadTopic(ctx, key)
  local index = call('HGET', key, 'G' .. name)
  local group = index and groupAt(topic, index)
  if group then group.epoch = math.max(group.epoch, math.min(tonumber(epoch), topic.epoch)) end
  return '["begun"]'
end

-- topic.ack: a member has handled an event, and takes another one; or a gap, of as many events as stand in place of the event.
-- keys: all
-- args: id string, index string, event string, key string
-- reply: ["acknowledged"]
-- flags: allow-oom
handlers['topic.ack'] = function(ctx, hash, id, index, event, key)
  local topic = loadTopic(ctx, hash)
  local group = groupAt(topic, index)
  if not group then return '["acknowledged"]' end
  local missed = tonumber(event)
  if missed then
    local member = memberOf(group, claimOf(ctx, id))
    if member and missed < 0 then member.missed = 0 end
    if member and member.missed > 0 then member.missed = math.max(0, member.missed - missed) end
    return '["acknowledged"]'
  end
  if call('XACK', topic.entries, group.name, event) == 1 then
    unlockKey(topic, group, key, event)
    credited(ctx, group, id, 1)
    -- Perhaps the group has held it back, or the last ones do.
    if topic.held == 1 and (group.cursor == topic.number or numberOf(event) % stepOf(topic) == 0) then topic.trim = true end
  end
  return '["acknowledged"]'
end

-- topic.retry: a member could not handle an event; it is delivered again in so many ms
-- keys: all
-- args: id string, index string, event string, delay number
-- reply: ["returned"]
-- flags: allow-oom
handlers['topic.retry'] = function(ctx, hash, id, index, event, delay)
  local topic = loadTopic(ctx, hash)
  local group = groupAt(topic, index)
  if not group then return '["returned"]' end
  local pending = (tryGroup('XPENDING', topic.entries, group.name, event, event, 1, claimOf(ctx, id)) or {})[1]
  if not pending then return '["returned"]' end
  if tonumber(delay) > 0 then
    local at = ctx.now + tonumber(delay)
    shift(topic, group, DELAYED, { event })
    call('ZADD', topic.retries, text(at), index .. ':' .. event)
    sooner(ctx, topic, at)
  else
    giveBack(topic, group, { event })
  end
  credited(ctx, group, id, 1)
  return '["returned"]'
end

-- topic.forget: removes a group and all that it has not acknowledged
-- keys: all
-- args: name string
-- reply: ["forgotten"] | ["missing"] | ["busy"]
-- flags: allow-oom
handlers['topic.forget'] = function(ctx, key, name)
  local topic = loadTopic(ctx, key)
  local index = call('HGET', key, 'G' .. name)
  local group = index and groupAt(topic, index)
  if not group then return MISSING end
  if group.members > 0 then return '["busy"]' end
  destroyGroup(topic, group)
  return '["forgotten"]'
end

-- topic.purge: removes all events, and groups without members; what members are working on, they finish. The shards are purged one
-- after the other: it is given, as JSON, the groups that stay in those before, and answers all that stay. Their members may not have
-- joined this shard yet, and would not hear what they miss in it.
-- keys: all
-- args: groups string
-- reply: ["purged", length number, groups json]
-- flags: allow-oom
handlers['topic.purge'] = function(ctx, key, groups)
  local topic = loadTopic(ctx, key)
  local length, stays, names = call('XLEN', topic.entries), {}, {}
  for at, name in ipairs(cjson.decode(groups)) do stays[name], names[at] = true, encoded(name) end
  if length > 0 then
    call('XTRIM', topic.entries, 'MAXLEN', 0)
    tellEmptied(ctx, topic)
  end
  call('UNLINK', topic.retries)
  eachGroup(topic, function(group)
    if not stays[group.name] then
      if group.members == 0 then return destroyGroup(topic, group) end
      names[#names + 1] = encoded(group.name)
    end
    purgeGroup(topic, group)
    tryGroup('XGROUP', 'SETID', topic.entries, group.name, eventId(topic))
  end)
  return reply('purged', length, json('[' .. concat(names, ',') .. ']'))
end

-- topic.state: how the topic is
-- keys: all
-- args:
-- reply: ["state", number number, length number, bytes number, first string, last string, members number, groups json] | ["stale"] | ["missing"]
-- flags: allow-oom
handlers['topic.state'] = function(ctx, key)
  local topic = readTopic(ctx, key)
  if not topic.known then return MISSING end
  if isStale(ctx) then return STALE end
  local first, groups = oldestEvent(topic), {}
  eachGroup(topic, function(group)
    local pending = tryGroup('XPENDING', topic.entries, group.name)
    local count, oldest = 0, ''
    if pending and pending[1] > 0 then count, oldest = pending[1], pending[2] end
    groups[#groups + 1] = '[' .. concat({ encoded(group.name), encoded(group.members),
      encoded(math.max(0, topic.number - group.cursor) + group.parked), encoded(count - group.parked), encoded(oldest) }, ',') .. ']'
  end)
  local last = topic.number > 0 and eventId(topic) or ''
  local bytes = 0
  if first then
    -- What the first one has is counted with those before it.
    local own = 0
    for at = 2, #first[2], 2 do own = own + #first[2][at] end
    bytes = topic.total - bytesOf(first) + own
  end
  return reply('state', topic.number, call('XLEN', topic.entries), bytes, first and first[1] or '', last, topic.members,
    json('[' .. concat(groups, ',') .. ']'))
end

reapers.topic = function(ctx, key, session, id)
  local claim = session .. '/' .. id
  local index = call('HGET', key, 'x' .. claim)
  local member = call('HDEL', key, 'o' .. claim) == 1
  if not index and not member then return end
  local topic = loadTopic(ctx, key)
  if member then topic.members = math.max(0, topic.members - 1) end
  if index then dismissMember(ctx, topic, claim, index, not hasLeft(ctx, session)) end
end

alarms.topic = function(ctx, key)
  local topic = loadTopic(ctx, key)
  topic.trim, topic.rung = true, nil
  for _, member in ipairs(call('ZRANGEBYSCORE', topic.retries, '-inf', text(ctx.now), 'LIMIT', 0, SERVED)) do
    local index, event = match(member, '^(%d+):(.*)$')
    local group = groupAt(topic, index)
    call('ZREM', topic.retries, member)
    -- The group may be another one by now, and the event be in hand.
    local delayed = group and tryGroup('XPENDING', topic.entries, group.name, event, event, 1, DELAYED)
    if delayed and #delayed > 0 then
      giveBack(topic, group, { event })
    end
  end
  local nextRetry = call('ZRANGEBYSCORE', topic.retries, '-inf', '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
  if nextRetry then sooner(ctx, topic, tonumber(nextRetry)) end
  eachGroup(topic, function(group)
    if group.members > 0 or topic.abandon == 0 then return end
    if group.left + topic.abandon > ctx.now then return expectEnd(ctx, topic, group) end
    destroyGroup(topic, group)
  end)
end
