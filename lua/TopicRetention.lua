-- What a topic keeps, and the end of a call.
--
-- after Topic.lua
-- after TopicGroups.lua

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

local MOST_PROBES = 64

-- The number of the first event up to which there were so many bytes; up to the oldest one there were fewer. The search is by time,
-- and by number within a millisecond. It looks where the event is if all are of one size, and every other time in the middle,
-- because sizes differ.
local function reaching(topic, oldest, bytes)
  local low, since, least = numberOf(oldest[1]), timeOf(oldest[1]), bytesOf(oldest)
  local high, latest, most = topic.number, topic.stamp, topic.total
  for probe = 1, MOST_PROBES do
    if high - low <= 1 then break end
    local part, time, from = probe % 2 == 0 and 0.5 or (bytes - least) / (most - least), since + 1, nil
    if latest > since then
      time = since + math.max(1, math.ceil(part * (latest - since)))
      from = text(time) .. '-0'
    else
      from = text(since) .. '-' .. text(low + math.max(1, math.min(high - low - 1, floor(part * (high - low)))))
    end
    local entry = call('XRANGE', topic.entries, from, '+', 'COUNT', 1)[1]
    local number, sum = entry and numberOf(entry[1]) or high, entry and bytesOf(entry) or most
    if number < high and sum < bytes then
      low, since, least = number, timeOf(entry[1]), sum
    else
      latest = time - 1
      if number < high then high, most = number, sum end
    end
  end
  return high
end

-- How many events may stay, by length and bytes. The newest one stays if it is too large by itself: it was confirmed.
local function wantedLength(topic, length)
  local wanted, over = topic.length > 0 and math.min(length, topic.length) or length, topic.total - topic.bytes
  if topic.bytes == 0 or over <= 0 then return wanted end
  local oldest = oldestEvent(topic)
  if bytesOf(oldest) - sizeOf(oldest) >= over then return wanted end
  local last = bytesOf(oldest) >= over and numberOf(oldest[1]) or reaching(topic, oldest, over)
  return math.min(wanted, math.max(1, topic.number - last))
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
    local time, from = ago(ctx, topic.age), '-0'
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

-- How long ids are known still, and for as long the hash has to be there: it says in which turn they are.
local function knownFor(ctx, topic)
  return topic.noted + 2 * windowOf(topic) - ctx.now
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
    -- Ids are known for as long as if the topic were there. Other shards may have events, and the first one knows how many there
    -- are, whether the first `make` or a later one has named the number.
    local left = knownFor(ctx, topic)
    local life = topic.epoch == 0 and topic.width == 1 and 0 or lifeOf(topic, false)
    if left <= 0 then call('DEL', topic.even, topic.odd) end
    if left <= 0 and life == 0 then
      call('DEL', key)
    else
      call('HSET', key, 's', packTopic(topic))
      call('HDEL', key, 'identity')
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
  keepFor(key, life and math.max(life, knownFor(ctx, topic)))
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
        topic.total, topic.largest = bytesOf(last), MOST_BYTES
      end
    end
    ctx.topics[key] = topic
    later(ctx, key, function() finishTopic(ctx, topic) end)
  end
  return topic
end
